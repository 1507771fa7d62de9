"""Locates the runner and imports its package from there.

ComfyUI and all its custom nodes share one Python process, so nothing is added to sys.path: `wan_torchax` is the only
top-level name used, and its modules import each other through it.
"""
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent  # through a link in custom_nodes/ to the project
PACKAGES = ("hydra", "jax", "torchax", "diffusers", "transformers", "safetensors", "imageio_ffmpeg")


def find_root() -> Path:
    """The project's folder: WAN_TORCHAX_HOME, or the parent of this folder."""
    home = os.environ.get("WAN_TORCHAX_HOME")
    root = Path(home).expanduser().resolve() if home else HERE.parent
    if not (root / "conf" / "config.yaml").is_file():
        raise ImportError(
            f"{root} is not wan-torchax (it has no conf/config.yaml): link its comfyui folder into custom_nodes "
            "instead of copying it, or set WAN_TORCHAX_HOME to the project's folder"
        )
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        packages = ", ".join(missing)
        remedy = f"run pip install -r {root / 'comfyui' / 'requirements.txt'}"
        raise ImportError(f"missing in ComfyUI's Python: {packages}; {remedy}")
    return root


def import_package(root: Path) -> None:
    """Make `import wan_torchax` load the project's package."""
    if "wan_torchax" not in sys.modules:
        folder = root / "wan_torchax"
        spec = importlib.util.spec_from_file_location(
            "wan_torchax", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    loaded = sys.modules["wan_torchax"].ROOT
    if root != loaded:
        raise ImportError(f"wan_torchax is already loaded from {loaded}; remove one of the two")


ROOT = find_root()
import_package(ROOT)
