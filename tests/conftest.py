"""Eight fake CPU devices, one compilation cache for the whole session, and configs composed as run.py composes them."""
import json
import os
import re
import sys

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WAN_TORCHAX_STORE"] = ""  # nothing is kept from test to test; tests/test_start.py has stores of its own
os.environ["OMP_NUM_THREADS"] = "1"  # torch's: as many processes as cores run beside each other
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # most programs are compiled to run once

import pytest

import wan_torchax
from wan_torchax import ROOT  # noqa: F401 - for the tests

wan_torchax.leave_sys_path()  # as run.py does
from wan_torchax.config.commandline import compose, rewrite  # noqa: E402
from wan_torchax.config.resolve import resolve  # noqa: E402
from wan_torchax.config.validation import validate  # noqa: E402

# The demo model as small and short as it goes.
SMALL = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=3", "output.keep_frames=true"]

LONG = (
    "family", "distributed", "weights", "parity", "conf", "sweep", "keys", "bad_inputs", "serve", "launchers", "demo",
    "benchmarks", "comfyui", "run", "interruption", "caches", "splash",
)


# Cases of a matrix whose other cases cover the same code: FULL=1 runs them too (make test-full).
FULL_ONLY = re.compile("|".join(map(re.escape, (
    "two_experts_are_diffusers[guidance off", "two_experts_are_diffusers[swapped",
    "with_an_image_encoder_is_diffusers[first]", "with_an_image_encoder_is_diffusers[tokens over sp]",
    "image_to_video_is_diffusers[one expert", "image_to_video_is_diffusers[other sizes]",
    "the_5b_is_diffusers[a prompt]", "the_5b_is_diffusers[one prompt", "the_5b_is_diffusers[dp and tp]",
    "the_5b_is_diffusers[tokens over sp]", "vace_is_diffusers[all, tokens", "video_to_video_is_diffusers[flow Euler",
    "with_an_image_encoder_is_diffusers[heads over tp]", "resting_guidance_is_the_same_over_all_chips",
    "bfloat16_is_as_close_to_float32", "as_with_xla[sequence]", "changes_nothing[denoise]",
    "every_layout_is_diffusers[dp and tp]", "a_hydra_sweep_over_meshes_and_blocks",
    "a_smoke_test_runs_through[adapter_load.py]",
    "shards_in_one_folder_are_one_list", "parameter_names[wan22_t2v_a14b", "parameter_names[wan22_i2v_a14b-denoise",
    "parameter_names[wan21_t2v_1_3b", "a_video_goes_through_the_pipeline_node", "a_smoke_test_runs_through[start.py]",
    "image_to_video_is_diffusers[first and last]", "every_layout_is_diffusers[tokens over sp, Ulysses]",
    "two_experts_are_diffusers[guidance of each]", "lowers_for_its_tpu[ti2v", "lowers_for_its_tpu[t2v_1_3b_480p_v5e",
    "lowers_for_its_tpu[t2v_14b_480p_4step", "a_torch_xla_of_another_torch_is_not_imported",
    "video_to_video_is_diffusers[all of it", "vace_is_diffusers[one reference", "vace_is_diffusers[all, heads",
    "every_layout_is_diffusers[dp]", "every_layout_is_diffusers[everything every",
    "every_layout_is_diffusers[tokens over sp, ring]",
    "every_layout_is_diffusers[tokens over sp, whole", "changes_nothing[text_encoder]", "changes_nothing[vae]",
    "changes_nothing[text]", "changes_nothing[decode]", "denoise-replicate]", "training_resumes_where_it_stopped",
    "a_lost_worker_loses_its_running_job", "lowers_for_its_tpu[flf2v",
    "magcache_reuses_what_the_blocks_added[one prompt", "a_smoke_test_runs_through[quality.py]",
    "a_smoke_test_runs_through[outliers.py]",
    "a_smoke_test_runs_through[demo_quality.py]", "a_mode_is_swept_resumed_and_replayed",
    "a_cache_goes_through_the_nodes", "a_smoke_test_runs_through[gpu.py]",
    "teaching_runs_through[outline]", "teaching_runs_through[i2v]",
    "a_video_of_several_is_what_it_is_alone[not guided]",
    "lowers_for_its_tpu[i2v_14b", "lowers_for_its_tpu[t2v_a14b", "lowers_for_its_tpu[t2v_14b_480p_v",
    "with_rounded_weights[sequen", "eight_bits_stay_close[int8", "left_out[ends1]", "left_out[ends2]",
    "the_kernel_for_tpus_takes_int8_too", "a_14b_fits_24_gb", "decodes_the_same_by_lines",
    "lowers_for_its_tpu[t2v_14b_480p_int8", "lowers_for_its_tpu[t2v_14b_720p_v6e8_v3",
    "by_lines_is_diffusers_decode[False-1]", "by_lines_is_diffusers_decode[True-1]",
    "a_smoke_test_runs_through[attention_gpu.py]",
    "guard_rescues_is_counted_and_told[in range]", "guard_rescues_is_counted_and_told[unrolled]",
    "guard_rescues_is_counted_and_told[sequential]",
    "a_smoke_test_runs_through[serve_batch.py]", "as_with_xla[tokens]",
    "by_the_kernels_of_linear_layers", "lowers_for_its_tpu[t2v_14b_720p_int8_v6e8_v1",
    "lowers_for_its_tpu[t2v_14b_720p_v7x8_v1", "lowers_for_its_tpu[t2v_14b_720p_v7x8_v2",
    "lowers_for_its_tpu[t2v_14b_720p_4step",
    "lowers_for_its_tpu[t2v_14b_720p_v6e8_v2", "has_eight_of_them_a_block[sequence",
    "lowers_for_its_tpu[ti2v_5b_704p_v6e1", "lowers_for_its_tpu[vace_1_3b_480p_v6e1",
    "image_to_video_is_diffusers[eight devices]", "a_video_of_several_is_what_it_is_alone[one after",
    "flash_attention_is_a_peer", "goes_on_from_the_output_of_other_keys[head dim 64", "with_rounded_weights[tp]",
    "vace_is_diffusers[not in a loop]", "one_chip_plans_too[v6e_1]", "guard_rescues_is_counted_and_told[one]",
    "lowers_for_its_tpu[vace_14b", "lowers_for_its_tpu[vace_1_3b_480p_v5e1", "range_of_eight_bits[0.03",
    "fast_path_alone_is_as_exact_as_jax[629-629-64", "fast_path_alone_is_as_exact_as_jax[257-257-64",
    "fast_path_alone_is_as_exact_as_jax[511-513-64", "the_whole_is_as_exact_as_jax[1023-1023-64",
    "parameter_names[wan21_flf2v_14b-denoise-t", "parameter_names[wan21_vace_14b-denoise-t",
    "parameter_names[wan21_i2v_14b_480p-denoise-sequence",
    "magcache_reuses_what_the_blocks_added[eight",
    *(f"fast_path_alone_is_as_exact_as_jax[{lengths}-128-options" for lengths in (
        "2-3", "127-129", "128-128", "256-256", "257-257", "100-512", "64-769", "511-513", "512-769",
    )),
))))


def pytest_collection_modifyitems(items):
    """The longest files first: two workers then end at about the same time."""
    order = {f"test_{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    mistakes = [item for item in items if "a_mistake_is_told_before_torch_loads" in item.nodeid]
    left_out = [item for item in items if FULL_ONLY.search(item.nodeid)]
    left_out += [item for number, item in enumerate(mistakes) if number % 4]
    for item in left_out if not os.environ.get("FULL") else ():
        item.add_marker(pytest.mark.skip(reason="FULL=1 runs it"))


def make_config(*overrides):
    """The config that `python run.py <overrides>` would run with."""
    return compose(rewrite(list(overrides)))


def listed(folder):
    """The folders of a list's videos, in the order of the list."""
    return [folder / name for name in json.loads((folder / "list.json").read_text())]


def resolve_here(*overrides):
    """A config on this process's devices, with what a local checkpoint adds."""
    from wan_torchax.runtime.jobs import plan_job
    from wan_torchax.session import Session

    return Session().place(plan_job(make_config(*overrides)))


def resolve_there(*overrides):
    """A config on the devices that its mesh describes."""
    from wan_torchax.devices.mesh import Described
    from wan_torchax.runtime.jobs import plan_job

    config = make_config(*overrides)
    validate(config)
    return resolve(plan_job(config), Described.by(config.mesh))


def build(resolved, name):
    """One stage, built and not compiled."""
    from wan_torchax.session import Session

    return Session().build(resolved, [name])[name]


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """A program that is compiled while a stage runs is an error here."""
    if programs := sys.modules.get("wan_torchax.runtime.programs"):
        monkeypatch.setattr(programs, "raise_unexpected", True)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One cache of compiled programs for all tests, also those of the other worker."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "jax-cache"
    return f"compile.cache_dir={folder}"


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory):
    """Overrides for a model of two layers, where what it makes is not looked at: a step of it costs next to nothing."""
    from tests import tiny

    folder = tiny.make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    return [*SMALL, *tiny.overrides(folder), "mesh.axes.tp=1"]


@pytest.fixture
def generate(tmp_path, cache):
    """Run the whole pipeline in this process; gives the run's folder."""
    from wan_torchax.tasks.generate import generate

    def run_it(*overrides, folder="run"):
        path = tmp_path / folder
        path.mkdir()
        config = make_config(*SMALL, cache, *overrides)
        validate(config)
        generate(config, path, list(overrides))
        return path

    return run_it
