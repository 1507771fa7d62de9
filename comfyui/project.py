"""Where the runner is, and its modules under their plain names only while they are needed.

ComfyUI and all its custom nodes share one Python process, and names like `schema`, `run` or `media` are nobody's own.
So the project's folder is on sys.path and its modules are in sys.modules only inside `at_work()`; outside it, whatever
others call by those names is what they left there.
"""
import contextlib
import importlib.util
import os
import sys
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent  # through a link in custom_nodes/ to the project
PACKAGES = ("hydra", "jax", "torchax", "diffusers", "transformers", "safetensors", "imageio_ffmpeg")


def find_root() -> Path:
    """The project's folder: where WAN_TORCHAX_HOME says, or the one this folder lies in."""
    home = os.environ.get("WAN_TORCHAX_HOME")
    root = Path(home).expanduser().resolve() if home else HERE.parent
    if not (root / "conf" / "config.yaml").is_file():
        raise ImportError(
            f"{root} is not wan-torchax (it has no conf/config.yaml): link its comfyui folder into custom_nodes instead of "
            "copying it, or set WAN_TORCHAX_HOME to the project's folder"
        )
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"missing in ComfyUI's Python: {', '.join(missing)}; run pip install -r {root / 'requirements.txt'}")
    return root


ROOT = find_root()
NAMES = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"comfyui", "tests"}

modules = {}  # the project's own, by name, from the first time they are imported
lock = threading.RLock()


@contextlib.contextmanager
def at_work():
    """`import run` and every other import of the project's modules mean the project's, for the length of a `with` block."""
    with lock:
        modules.update({name: module for name, module in named().items() if is_ours(module)})
        others = swap(modules)
        sys.path.insert(0, str(ROOT))
        try:
            yield
        finally:
            sys.path.remove(str(ROOT))
            modules.update(swap(others))


def named() -> dict:
    """What sys.modules has under the project's names."""
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in NAMES}


def is_ours(module) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(ROOT)


def swap(new: dict) -> dict:
    """Put `new` in the place of everything under the project's names; returns what was there."""
    old = named()
    for name in old:
        del sys.modules[name]
    sys.modules.update(new)
    return old


def options(group: str) -> list[str]:
    """The names of a group's files in conf/. Needs no `at_work()`: the server asks while a node is running."""
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


def compose(overrides):
    """The config that `python run.py <overrides>` would run with, checked. Inside `at_work()` only."""
    with hydra_apart():
        import hydra

        import run  # noqa: F401 - it registers the schema, and sets Hydra's version for the process
        from wan_torchax.config import commandline, schema, validation

        try:
            with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
                config = hydra.compose("config", commandline.rewrite(list(overrides)))
        except commandline.USER_ERRORS as error:
            raise schema.ConfigError(commandline.explain(error)) from error
        validation.validate(config)
        return config


@contextlib.contextmanager
def hydra_apart():
    """Hydra keeps its state for the whole process; other nodes that use it find theirs again."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    theirs, base = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, VersionBase.instance().version_base = theirs, base
