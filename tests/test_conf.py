"""Every config composes and validates, and every sharding table fits the real models, without their weights."""
import subprocess

import jax
import pytest
import yaml

import run
from tests.conftest import ROOT, make_config
from wan_torchax.config.commandline import CONF, options
from wan_torchax.config.schema import COMPONENTS
from wan_torchax.config.validation import validate
from wan_torchax.runtime import weights
from wan_torchax.stages import denoise as stages

REAL = {"wan21_t2v_1_3b": 1.42e9, "wan21_t2v_14b": 14.29e9}
GROUPS = ("model", "mesh", "distributed", "sharding", "resolution", "attention", "ops", "scheduler", "prompt")


@pytest.mark.parametrize("group, option", [(group, option) for group in GROUPS for option in options(group)])
def test_every_option_composes(group, option):
    beside = ["model=wan21_t2v_14b", "resolution=720p", "distributed=auto"] if group == "mesh" else []  # what the largest mesh needs
    config = make_config(f"{group}={option}", *beside)
    assert (CONF / group / f"{option}.yaml").read_text().startswith("# "), "a config file says on its first line what it is"
    if group in ("mesh", "sharding", "ops", "scheduler", "prompt"):  # the others go with real models, below
        validate(config)


def test_the_recipes_for_clusters_are_valid():
    """The JobSet's pods and its command fit the mesh it names; the Slurm script is bash."""
    spec = yaml.safe_load((ROOT / "docs" / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]["containers"][0]
    config = make_config(*pod["args"])
    validate(config)
    assert config.distributed.name == "auto" and config.prompt.text == "a cat walks on the grass, realistic"
    assert spec["parallelism"] == spec["completions"] == config.mesh.hosts
    assert pod["resources"]["limits"]["google.com/tpu"] * config.mesh.hosts == config.mesh.devices
    assert spec["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == config.mesh.chip.topology.partition(":")[2]
    subprocess.run(["bash", "-n", "docs/slurm.sh"], cwd=ROOT, check=True)


@pytest.mark.parametrize("resolution", ["480p", "480p_portrait", "720p", "720p_portrait"])
@pytest.mark.parametrize("attention", options("attention"))
def test_every_real_combination_is_valid(resolution, attention):
    config = make_config("model=wan21_t2v_14b", "mesh=v6e_8", f"resolution={resolution}", f"attention={attention}")
    validate(config)
    spread = config.sharding.vae.activations.decoder.spec[3 if "portrait" in resolution else 4]
    assert spread == ["dp", "sp", "tp"], "the longer side is spread"


NO_CUDNN = ["attention=hopper", *(f"attention.cross.{value}" for value in ("kernel=hopper", "block_q=128", "block_kv=128"))]  # it lowers only where it is


def build(model, mesh, sharding, stage, *overrides):
    axes = ["mesh.axes={dp:2,sp:4,tp:1}"] if sharding in ("sequence", "ring") else []
    config = make_config(f"model={model}", f"mesh={mesh}", f"sharding={sharding}", "resolution=720p", *axes, *overrides)
    validate(config)
    return config, stages.BUILDERS[stage](config, run.abstract_mesh(config))


@pytest.mark.parametrize("sharding", options("sharding"))
@pytest.mark.parametrize("stage", COMPONENTS)
@pytest.mark.parametrize("model", REAL)
def test_every_table_fits_the_real_parameter_names(model, stage, sharding):
    """plan() raises on a rule that matches nothing, on a tensor matched twice, and on a dimension that does not divide."""
    _, built = build(model, "v6e_8", sharding, stage)
    if stage == "denoise":
        count = sum(tensor.bytes // jax.numpy.dtype(tensor.dtype).itemsize for tensor in built.tensors.values() if tensor.sources)
        assert count == pytest.approx(REAL[model], rel=0.005)


@pytest.mark.parametrize("stage", COMPONENTS)
@pytest.mark.parametrize("mesh, platform, kernel", [("v6e_8", "tpu", "tpu_custom_call"), ("gpu_1", "cuda", "mosaic_gpu")])
def test_the_14b_at_720p_lowers_for_hardware_that_is_not_here(mesh, platform, kernel, stage):
    config, built = build("wan21_t2v_14b", mesh, "tp", stage, *(NO_CUDNN if platform == "cuda" else []))
    with jax.sharding.use_abstract_mesh(run.abstract_mesh(config)):
        lowered = stages.lower(built, platforms=(platform,))
    text = "".join(program.as_text() for program in lowered.values())
    assert f"mhlo.num_partitions = {config.mesh.devices}" in text
    assert len(text) < 4e6, "the program must not grow with depth or length"
    if stage == "denoise":
        assert kernel in text, "self-attention runs in the chip's own kernel"
        assert "75600" in text
    if stage == "denoise" and platform == "cuda":
        kernels = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
        assert any("tensor<1x75600x5120xbf16>" in line for line in kernels), "the first self-attention is one for both prompts"
        assert any("tensor<2x75600x5120xbf16>" in line for line in kernels)


def test_tensor_parallel_puts_a_quarter_of_the_14b_on_each_chip():
    _, built = build("wan21_t2v_14b", "v6e_8", "tp", "denoise")
    total = sum(tensor.bytes for tensor in built.tensors.values())
    per_chip = sum(tensor.bytes_per_device for tensor in built.tensors.values())
    assert weights.gib(total) == pytest.approx(26.7, abs=0.2)
    assert per_chip < 0.27 * total
