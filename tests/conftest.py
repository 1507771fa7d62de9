"""Eight fake CPU devices, one compilation cache for the whole session, and configs composed as run.py composes them."""
import os

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import run  # noqa: E402 - it registers the schema
from wan_torchax.config import commandline  # noqa: E402

# The demo model as small and short as it goes.
SMALL = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=3"]

# The environment of a process that compiles for one small video: quickly, not well.
FAST = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def make_config(*overrides):
    """The config that `python run.py <overrides>` would run with."""
    return compose_rewritten(commandline.rewrite(list(overrides)))


def compose_rewritten(overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return f"compile.cache_dir={tmp_path_factory.mktemp('jax-cache')}"


@pytest.fixture
def generate(tmp_path, cache):
    """Run the whole pipeline in this process; gives the run's folder."""

    def run_it(*overrides, folder="run"):
        path = tmp_path / folder
        path.mkdir()
        config = make_config(*SMALL, cache, *overrides)
        run.validation.validate(config)
        run.generate(config, path)
        return path

    return run_it
