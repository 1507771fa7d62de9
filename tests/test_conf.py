"""Every config composes and validates, and every sharding table fits the real models, without their weights."""
import itertools
import math
import re
import subprocess

import jax
import pytest
import yaml

from tests.conftest import ROOT, build, make_config, resolve_there
from wan_torchax.config.commandline import CONF, options
from wan_torchax.config.schema import ADAPTER_SETTINGS
from wan_torchax.config.validation import validate
from wan_torchax.runtime.weights import gib
from wan_torchax.stages.stage import main_stage

REAL = {  # parameters of a transformer
    "wan21_t2v_1_3b": 1.42e9, "wan21_t2v_14b": 14.29e9, "wan22_t2v_a14b": 14.29e9, "wan22_i2v_a14b": 14.29e9,
    "wan21_i2v_14b_480p": 16.395e9, "wan21_flf2v_14b": 16.396e9, "wan22_ti2v_5b": 5.0e9,
    "wan21_vace_1_3b": 2.154e9, "wan21_vace_14b": 17.338e9, "wan22_animate_14b": 17.275e9,
    "wan22_fun_control_5b": 5.0e9, "wan22_fun_camera_a14b": 14.79e9,
    "wan22_animate2_14b": 16.395e9,
    "wan22_s2v_14b": 16.30e9,
    "hunyuan15_t2v_720p": 8.327e9, "hunyuan15_i2v_480p_step_distilled": 8.331e9,
}
OWN = {  # pipelines that want files, and most of them a model of their own
    "i2v": "wan22_i2v_a14b", "flf2v": "wan22_i2v_a14b", "i2v_clip": "wan21_i2v_14b_480p",
    "flf2v_clip": "wan21_flf2v_14b", "i2v_coarse": "wan22_i2v_a14b", "flf2v_coarse": "wan22_i2v_a14b",
    "i2v_clip_coarse": "wan21_i2v_14b_480p", "flf2v_clip_coarse": "wan21_flf2v_14b", "ti2v": "wan22_ti2v_5b",
    "v2v": "wan21_t2v_14b", "live": "self_forcing_1_3b", "vace": "wan21_vace_14b",
    "animate": "wan22_animate_14b", "replace": "wan22_animate_14b", "animate2": "wan22_animate2_14b",
    "s2v": "wan22_s2v_14b", "fun_control": "wan22_fun_control_a14b", "fun_control_5b": "wan22_fun_control_5b",
    "fun_camera": "wan22_fun_camera_a14b", "fun_camera_5b": "wan22_fun_camera_5b",
    "t2v_hunyuan15": "hunyuan15_t2v_720p", "i2v_hunyuan15": "hunyuan15_i2v_720p",
    "i2v_long": "wan22_i2v_a14b", "i2v_clip_long": "wan21_i2v_14b_720p", "ti2v_long": "wan22_ti2v_5b",
    "vace_long": "wan21_vace_14b", "i2v_hunyuan15_long": "hunyuan15_i2v_720p", "live_i2v": "self_forcing_1_3b",
    "live_v2v": "self_forcing_1_3b",
    "t2i_flux": "flux1_schnell", "t2i_flux_guided": "flux1_dev", "t2i": "flux2_klein_4b",
}
ALONE = "pipeline", "mesh", "sharding", "ops", "scheduler", "prompt"  # the others go with real models, below
TOGETHER = "model", "resolution", "attention", "adapter", "distributed", "vae", "preview", "windows", "guider"
VALID = [(group, option) for group in ALONE for option in options(group) if option not in OWN]


@pytest.mark.parametrize("group, option", VALID)
def test_an_option_is_valid(group, option):
    largest = ["model=wan21_t2v_14b", "resolution=720p", "distributed=auto"]  # what the largest mesh needs
    validate(make_config(f"{group}={option}", *(largest if group == "mesh" else [])))


@pytest.mark.parametrize("row", [*itertools.zip_longest(*map(options, TOGETHER))], ids=lambda row: row[0])
def test_options_compose(row):
    """The first of each group, the second of each, and so on: composing does not ask whether they go together."""
    chosen = [(group, option) for group, option in zip(TOGETHER, row) if option]
    config = make_config(*(f"{group}={option}" for group, option in chosen))
    assert all(config[group].name == option for group, option in chosen if "name" in config[group])


@pytest.mark.parametrize("group", (*ALONE, *TOGETHER))
def test_a_config_file_says_on_its_first_line_what_it_is(group):
    assert all((CONF / group / f"{option}.yaml").read_text().startswith("# ") for option in options(group))


def test_no_adapter_takes_the_place_of_another():
    """adapter=[a,b] merges their tables by row names."""
    tables = [make_config(f"adapter={option}").adapter for option in options("adapter")]
    rows = [row for table in tables for row in table if row not in ADAPTER_SETTINGS]
    assert len(rows) == len({*rows}) > 8, rows


@pytest.mark.parametrize("pipeline", OWN)
def test_pipelines_go_with_their_model(pipeline):
    resolution = "square" if pipeline.startswith("t2i") else "720p"
    if pipeline in ("ti2v", "ti2v_long", "s2v") or pipeline.endswith(("_coarse", "_5b")):  # multiples of 32, and of 64
        resolution = "704p"
    model = [f"model={OWN[pipeline]}", f"pipeline={pipeline}", f"resolution={resolution}"]
    model += ["live=first_frame", "resolution.frames=85"] if pipeline == "live_i2v" else []
    validate(make_config("task=plan", "mesh=gpu_1", *model))  # a plan needs no picture


@pytest.mark.parametrize("pipeline", [name for name in options("pipeline") if name.endswith("_long")])
def test_a_pipeline_of_segments_is_its_own_of_one_piece_repeated(pipeline):
    plain, long = (
        make_config(f"model={OWN[pipeline]}", f"pipeline={name}").pipeline
        for name in (pipeline.removesuffix("_long"), pipeline)
    )
    taken, of_picture = {"previous", "image"} & {*long.segments.carry}, "image" in plain.inputs
    assert long.inputs == plain.inputs and [*long.stages] == [*plain.stages] and long.name == pipeline
    assert list(long.segments.stages) == [name for name in plain.stages if name != "text"]
    assert taken == ({"image"} if of_picture else {"previous"}) and long.segments.overlap == (1 if of_picture else 5)
    for name, stage in plain.stages.items():
        more = {"decode": ("gives", ["last_frames"]), "encode": ("takes", [] if of_picture else ["previous"])}
        key, values = more.get(name, ("gives", []))
        assert long.stages[name] == {**stage, key: [*stage[key], *values]}


@pytest.mark.parametrize("chip", options("chip"))
def test_a_chip_is_described_once(chip):
    """Every fact of a chip is in its file, and meshes refer to it."""
    facts = yaml.safe_load((CONF / "chip" / f"{chip}.yaml").read_text())
    users = [
        name for name in options("mesh")
        if f"/chip@chip: {chip}\n" in (CONF / "mesh" / f"{name}.yaml").read_text()
    ]
    assert users, "a chip that no mesh has"
    for name in users:
        mesh = make_config(f"mesh={name}").mesh
        assert all(mesh.chip[key] == value for key, value in facts.items())
        own = yaml.safe_load((CONF / "mesh" / f"{name}.yaml").read_text()).get("chip", {})
        assert set(own) <= {"topology"}, "only the slice's own"


def test_the_recipes_for_clusters_are_valid():
    """The JobSet's pods and its command fit the mesh it names; the Slurm script is bash."""
    spec = yaml.safe_load((ROOT / "docs" / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]["containers"][0]
    config = make_config(*pod["args"])
    validate(config)
    assert config.distributed.name == "auto" and config.prompt.text == "a cat walks on the grass, realistic"
    assert spec["parallelism"] == spec["completions"] == config.mesh.hosts
    assert pod["resources"]["limits"]["google.com/tpu"] * config.mesh.hosts == math.prod(config.mesh.axes.values())
    selector = spec["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-topology"] == config.mesh.chip.topology.partition(":")[2]
    subprocess.run(["bash", "-n", "docs/slurm.sh"], cwd=ROOT, check=True)


def test_the_recipe_for_a_server_on_gke_is_valid(monkeypatch):
    deployment, service = yaml.safe_load_all((ROOT / "docs" / "serve_gke.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    pod = spec["containers"][0]
    monkeypatch.setenv("WAN_TORCHAX_KEYS", "a" * 32)
    config = make_config(*pod["args"])
    validate(config)
    assert config.task == "serve" and pod["env"][0]["name"] == "WAN_TORCHAX_KEYS"
    assert pod["resources"]["limits"]["google.com/tpu"] == math.prod(config.mesh.axes.values())
    assert spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == config.mesh.chip.topology.partition(":")[2]
    assert pod["ports"][0]["containerPort"] == service["spec"]["ports"][0]["targetPort"] == config.serve.port
    assert spec["terminationGracePeriodSeconds"] > config.serve.drain_seconds
    mounted = {mount["mountPath"] for mount in pod["volumeMounts"]}
    assert mounted == {"/models", "/app/outputs", "/cache"} and config.serve.folder.startswith("/app/outputs/")


@pytest.mark.parametrize("name", ["sky", "sky_serve"])
def test_the_recipes_for_skypilot_are_valid(name):
    task = yaml.safe_load((ROOT / "docs" / f"{name}.yaml").read_text())
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    preset = re.search(r"preset=(\w+)", task["run"])[1]
    config = make_config(f"preset={preset}", f"prompt={task['envs'].get('PROMPT', 'a cat')}")
    assert task["resources"]["accelerators"] == f"tpu-{config.mesh.name.replace('_', '-')}"
    assert (ROOT / re.search(r"-r (\S+)", task["setup"])[1]).exists()


def test_the_dockerfile_has_a_target_for_each_kind_of_machine():
    text = (ROOT / "Dockerfile").read_text()
    for kind in ("cpu", "tpu", "gpu"):
        (target,) = re.findall(rf"FROM {kind}-packages AS {kind}\n(.*?)(?=\nFROM|\Z)", text, re.DOTALL)
        assert "USER wan" in target and 'ENTRYPOINT ["python", "run.py"]' in target and "VOLUME" in target
        assert f"COPY requirements/{kind}.lock" in text and f"--require-hashes -r {kind}.lock" in text


RESOLUTIONS = ["480p", "480p_portrait", "720p", "720p_portrait"]
COMBINED = [(resolution, "auto") for resolution in RESOLUTIONS]
COMBINED += [("720p", attention) for attention in options("attention") if attention != "auto"]


@pytest.mark.parametrize("resolution, attention", COMBINED)
def test_every_real_combination_is_valid(resolution, attention):
    config = make_config("model=wan21_t2v_14b", "mesh=v6e_8", f"resolution={resolution}", f"attention={attention}")
    validate(config)
    spread = config.sharding.picture[3 if "portrait" in resolution else 4]
    assert spread == ["dp", "sp", "tp"], "the longer side is spread"


# cuDNN lowers only where it is.
NO_CUDNN = [
    "attention=hopper", "attention.cross.kernel=hopper", "attention.cross.block_q=128", "attention.cross.block_kv=128",
]


def resolve_real(model, mesh, sharding, *overrides):
    axes = ["mesh.axes={dp:2,sp:4,tp:1}"] if sharding in ("sequence", "ring") else []
    resolution = "704p" if model.endswith("_5b") or "s2v" in model else "720p"
    real = [f"model={model}", f"mesh={mesh}", f"sharding={sharding}", f"resolution={resolution}"]
    return resolve_there("task=plan", *real, *axes, *overrides)  # a plan needs no picture


# Text encoder and VAE are the same in all of them.
FITTED = [(model, "driven" if "animate2" in model else "denoise") for model in REAL]
FITTED += [("wan21_t2v_14b", "text"), ("wan21_t2v_14b", "decode")]
FITTED += [("wan21_flf2v_14b", "image"), ("wan22_i2v_a14b", "encode")]
FITTED += [("hunyuan15_i2v_480p_step_distilled", stage) for stage in ("text", "image", "encode", "decode")]


def fitted(model, stage, sharding):
    """Every model with one table, and one model with every table; the rest is for the full lane."""
    covered = sharding == "tp" or (model, stage) == ("wan21_t2v_14b", "denoise")
    return pytest.param(model, stage, sharding, marks=() if covered else pytest.mark.full)


# The rings have the weights' tables of tp and of sequence.
FITTED = [fitted(*row, sharding) for row in FITTED for sharding in options("sharding") if "ring" not in sharding]
FITTED += [("wan21_t2v_14b", "denoise", "ring"), ("wan21_t2v_14b", "denoise", "tp_ring")]


@pytest.mark.system
@pytest.mark.parametrize("model, stage, sharding", FITTED)
def test_every_table_fits_the_real_parameter_names(model, stage, sharding):
    """Planning raises on a rule that matches nothing, a tensor matched twice, a dimension that does not divide."""
    built = build(resolve_real(model, "v6e_8", sharding), stage)
    for part in built.specs.values() if stage in ("denoise", "driven") else ():
        specs = [spec for spec in part.values() if spec.sources]
        count = sum(spec.bytes // jax.numpy.dtype(spec.dtype).itemsize for spec in specs)
        assert count == pytest.approx(REAL[model], rel=0.005)


LOWERED = [("wan21_t2v_14b", "denoise", "v6e_8", "tpu", "tpu_custom_call")]
LOWERED += [
    pytest.param(model, stage, "v6e_8", "tpu", "tpu_custom_call", marks=pytest.mark.full)
    for model, stage in (
        ("wan21_t2v_14b", "text"), ("wan21_t2v_14b", "decode"), ("wan22_i2v_a14b", "encode"),
        ("wan21_flf2v_14b", "image"),
    )
]
LOWERED += [("wan21_t2v_14b", "denoise", "gpu_1", "cuda", "mosaic_gpu")]
LOWERED += [pytest.param("wan21_t2v_14b", "decode", "gpu_1", "cuda", "mosaic_gpu", marks=pytest.mark.full)]


@pytest.mark.system
@pytest.mark.parametrize("model, stage, mesh, platform, kernel", LOWERED)
def test_the_14b_at_720p_lowers_for_hardware_that_is_not_here(model, stage, mesh, platform, kernel):
    resolved = resolve_real(model, mesh, "tp", *(NO_CUDNN if platform == "cuda" else []))
    with jax.sharding.use_abstract_mesh(resolved.mesh):
        lowered = build(resolved, stage).programs.lower(platforms=(platform,))
    text = "".join(program.as_text() for program in lowered.values())
    assert f"mhlo.num_partitions = {resolved.mesh.size}" in text
    assert len(text) < 4e6, "the program must not grow with depth or length"
    if stage == "denoise":
        assert kernel in text, "self-attention runs in the chip's own kernel"
        assert "75600" in text
    if stage == "denoise" and platform == "cuda":
        kernels = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
        once = "the first self-attention is one for both prompts"
        assert any("tensor<1x75600x5120xbf16>" in line for line in kernels), once
        assert any("tensor<2x75600x5120xbf16>" in line for line in kernels)


# Of each kernel and layout the newest; the rest is for the full lane.
NEWEST = "t2v_14b_720p_int8_v6e8_v5", "t2v_14b_720p_v7x8_v4", "animate2_14b_640p_v6e8_v1"
PRESETS = [
    pytest.param(name, marks=() if name in NEWEST else pytest.mark.full)
    for name in options("preset") if re.search("_v[567]", name)
]


@pytest.mark.system
@pytest.mark.parametrize("preset", PRESETS)
def test_the_step_of_every_preset_lowers_for_its_tpu(preset):
    resolved = resolve_there("task=plan", f"preset={preset}")
    with jax.sharding.use_abstract_mesh(resolved.mesh):
        stage = build(resolved, main_stage(resolved.graph))
        lowered = stage.programs.lower(platforms=("tpu",))
    text = lowered[stage.usual_program].as_text()
    assert f"mhlo.num_partitions = {resolved.mesh.size}" in text and "tpu_custom_call" in text
    assert len(text) < 4e6, "the program must not grow with depth or length"


def test_tensor_parallel_puts_a_quarter_of_the_14b_on_each_chip():
    tensors = build(resolve_real("wan21_t2v_14b", "v6e_8", "tp"), "denoise").specs["transformer"].values()
    total, per_chip = sum(tensor.bytes for tensor in tensors), sum(tensor.bytes_per_device for tensor in tensors)
    assert gib(total) == pytest.approx(26.7, abs=0.2)
    assert per_chip < 0.27 * total
