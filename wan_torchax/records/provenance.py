"""What made a video: versions, revision, memory. Light to import."""
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
    """Sixteen hex digits that change with any line of the project's code."""
    digest = hashlib.sha256()
    files = [ROOT / "patches.py", *(ROOT / "kernels").rglob("*.py"), *(ROOT / "wan_torchax").rglob("*.py")]
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of what is installed, without importing it."""
    installed = {package: version(package) for package in PACKAGES}
    return {package: number for package, number in installed.items() if number is not None}


@functools.cache  # a few ms each, and every key has them all
def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def git_revision() -> str | None:
    """The commit this code is at, with "+" if files differ from it; None outside a git checkout."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    return None


def git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, text=True)
    return ran.stdout.strip()


def peak_host_bytes() -> int:
    """The most memory this process has held. Linux's getrusage would count what its parent held when it forked."""
    with contextlib.suppress(OSError):
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def available_host_bytes() -> int:
    """Memory that could be had without anything being swapped out; 0 where the system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        return int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text()).group(1)) * 1024
    return 0
