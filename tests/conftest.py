"""Fake CPU devices, a folder for what a session's processes share, and configs composed as run.py composes them.

Most tests run the models of tests/tiny.py at one size (SMALL) on one device: programs, compiled once, are then those of
all tests, of both workers and of their forked runs. Tests of compiling and keeping itself have folders of their own.

Marks: `system` is for tests of whole systems: processes that are killed or wait for each other, servers, programs for
real chips, whole videos that take more than some seconds; `full` for cases of a matrix whose other cases cover the same
code. Makefile says which lane runs which.
"""
import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import version


def fast_flags() -> str:
    """Compile in no time: most programs run once. XLA aborts over a flag that it does not know."""
    flags = ["--xla_backend_optimization_level=0"]
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        # A small program in parts, one for each thread of LLVM, takes twice the time of the whole.
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    return " ".join(flags)


if "WAN_TESTS_FOLDER" not in os.environ:  # workers and forked runs have that of the process which started them
    os.environ["WAN_TESTS_FOLDER"] = tempfile.mkdtemp(prefix="wan-tests-")
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(FOLDER, ignore_errors=True))
    os.environ.setdefault("XLA_FLAGS", fast_flags())
FOLDER = os.environ["WAN_TESTS_FOLDER"]
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = f"{FOLDER}/cache"  # compiled programs, also those of other packages
os.environ["WAN_TORCHAX_STORE"] = f"{FOLDER}/store"
os.environ["OMP_NUM_THREADS"] = "1"  # torch's: as many processes as cores run beside each other

import pytest  # noqa: E402

import wan_torchax  # noqa: E402
from wan_torchax import ROOT  # noqa: E402, F401 - for the tests

wan_torchax.leave_sys_path()  # as run.py does
gc.set_threshold(100_000)  # so does this
from wan_torchax.config.commandline import compose, rewrite  # noqa: E402
from wan_torchax.config.resolve import resolve  # noqa: E402
from wan_torchax.config.validation import validate  # noqa: E402

# As small and short as it goes, on one device.
SMALL = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=3", "output.keep_frames=true"]

# Files that take long in one of the lanes, the longest first.
LONG = (
    "distributed", "serve_page", "demo", "swaps", "serve_faults", "hunyuan15", "defects2", "flux", "races", "splash",
    "comfyui", "keys", "conf", "long", "sweep", "guidance", "live", "serve", "serve_adapters", "launchers",
    "bad_inputs", "family", "adapters", "precision", "start",
)


def pytest_collection_modifyitems(items):
    """The longest files first: workers then end at about the same time."""
    order = {f"test_{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def make_config(*overrides):
    """The config that `python run.py <overrides>` would run with."""
    return compose(rewrite(list(overrides)))


def generate_into(config, folder, overrides=(), **named):
    """run.py's way of a prompt, in this process."""
    from wan_torchax.run import generate

    return generate(config, folder, overrides, **named)


def run_into(folder, *overrides):
    """What run.py does with these overrides, resume and replay among them, in this process; gives the folder."""
    from wan_torchax.records.stored import composed_from, take_over

    folder.mkdir(parents=True, exist_ok=True)
    overrides = rewrite(list(overrides))
    config = take_over(compose(overrides), overrides)
    validate(config)
    generate_into(config, folder, composed_from(config, overrides))
    return folder


def results(folder):
    """What the stages of a run have left, by name."""
    from safetensors.numpy import load_file

    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


def listed(folder):
    """The folders of a list's videos, in the order of the list."""
    return [folder / name for name in json.loads((folder / "list.json").read_text())]


def resolve_here(*overrides):
    """A config on this process's devices, with what a local checkpoint adds."""
    from tests import reference  # noqa: F401 - a session that fails leaves a thread behind that imports the same
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
def cache():
    """Where JAX keeps compiled programs: the default of these tests."""
    return f"compile.cache_dir={os.environ['XDG_CACHE_HOME']}/wan-torchax/jax"


@pytest.fixture(scope="session")
def two_layers():
    """Overrides for a run of the smallest model: a step of it costs next to nothing."""
    from tests import tiny

    return [*SMALL, *tiny.model()]


@pytest.fixture
def unkept(monkeypatch):
    """Nothing is taken from the store, nor kept in it: for tests of how programs are made, or with other constants in
    their code."""
    monkeypatch.setenv("WAN_TORCHAX_STORE", "")


@pytest.fixture
def generate(tmp_path, two_layers):
    """Run the whole pipeline of the smallest model in this process; gives the run's folder."""
    from wan_torchax.run import generate

    def run_it(*overrides, folder="run"):
        path = tmp_path / folder
        path.mkdir()
        config = make_config(*two_layers, *overrides)
        validate(config)
        generate(config, path, list(overrides))
        return path

    return run_it
