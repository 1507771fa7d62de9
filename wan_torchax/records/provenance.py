"""What made a video: versions, revision, memory. Light to import."""
import contextlib
import importlib.metadata
import re
import resource
import subprocess
from pathlib import Path

from wan_torchax import ROOT

PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers", "hydra-core", "numpy")


def versions() -> dict[str, str]:
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


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
