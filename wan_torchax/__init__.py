"""The runner's modules. run.py is the entry; docs/architecture.md says what stands on what.

patches.py and kernels/ lie at the project's top, where users look for them, and belong to this package all the same:
as `wan_torchax.patches` and `wan_torchax.kernels` they take nobody else's name (Hugging Face has a package `kernels`).
"""
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
__path__.append(str(ROOT))


def own_path(path: str) -> Path:
    """A path as the user means it; where there is no such thing, as one of the project's own."""
    meant = Path(os.path.expanduser(path))
    return meant if meant.is_absolute() or meant.exists() else ROOT / path


def leave_sys_path() -> None:
    """Take the project's folder off sys.path, where Python puts it for run.py: others would find our folders there."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
