"""Versions, git revision and memory, for metrics and cache keys. Cheap to import."""
import contextlib
import functools
import hashlib
import importlib.metadata
import re
import resource
import subprocess
from pathlib import Path

from wan_torchax import ROOT

PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers", "hydra-core", "numpy")


@functools.cache
def sources() -> str:
    """A digest of the project's sources: sixteen hex digits."""
    digest = hashlib.sha256()
    files = [ROOT / "patches.py", *(ROOT / "kernels").rglob("*.py"), *(ROOT / "wan_torchax").rglob("*.py")]
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of the installed packages, without importing them."""
    installed = {package: version(package) for package in PACKAGES}
    return {package: number for package, number in installed.items() if number is not None}


@functools.cache  # a few ms each, and every cache key needs all
def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@functools.cache  # of the sources that this process began with
def git_revision() -> str | None:
    """The current commit, with "+" if files are modified; None outside a git checkout."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    return None


def git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, text=True)
    return ran.stdout.strip()


def peak_host_bytes() -> int:
    """This process's peak memory. On Linux, getrusage would include the parent's memory at the fork."""
    with contextlib.suppress(OSError):
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def available_host_bytes() -> int:
    """Memory available without swapping; 0 if unknown."""
    with contextlib.suppress(OSError, AttributeError):
        return int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text()).group(1)) * 1024
    return 0
