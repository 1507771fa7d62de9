"""task=doctor: compares this machine with what the project was tested with, and suggests a remedy for each difference.

    python run.py task=doctor              # one line per check; attach doctor.json from the run folder to a bug report

This is the quick look; task=verify computes.
"""
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from wan_torchax import ROOT
from wan_torchax.config import clips
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices import machine
from wan_torchax.records import provenance
from wan_torchax.records.files import write_text

GIB = 2**30
PYTHONS = ((3, 11), (3, 13))  # the oldest and the newest tested
FREE_DISK_GIB = 5  # outputs and compiled programs; a checkpoint is 17 to 80 GB besides
FREE_MEMORY_GIB = 4  # the demo takes 2; weights stream through
HUB = "https://huggingface.co"
HUB_SECONDS = 5
# Other packages known to conflict, and the remedy.
CLASHES = {
    "hydra": "it is not Hydra and has its name: pip uninstall hydra, then pip install --force-reinstall hydra-core",
    "libtpu-nightly": "it shadows libtpu: pip uninstall libtpu-nightly",
    "jax-cuda12-plugin": "requirements/gpu.txt has CUDA 13, and two plugins fight: pip uninstall jax-cuda12-plugin "
    "jax-cuda12-pjrt",
}


@dataclass(frozen=True)
class Finding:
    """The result of a check, and a remedy if one is needed."""

    check: str
    state: str  # ok, note (works, differs from what was tested), bad (does not work)
    what: str
    remedy: str = ""


def doctor(config, folder: Path, overrides=()) -> None:
    """Print every check as a line; raise if something does not work."""
    findings = []
    for check in CHECKS:
        for finding in check(config):
            findings.append(finding)
            print(f"{finding.state:4}  {finding.check:10} {finding.what}")
            if finding.remedy:
                print(f"{'':16} → {finding.remedy}")
    report = {"findings": [asdict(finding) for finding in findings], "versions": provenance.versions()}
    report |= {"git": provenance.git_revision(), "platform": platform.platform()}
    write_text(folder / "doctor.json", json.dumps(report, indent=2) + "\n")
    print(folder / "doctor.json")
    print("python run.py task=verify checks what the devices compute, and how fast (docs/verified.md)")
    if bad := [finding.check for finding in findings if finding.state == "bad"]:
        raise ConfigError(f"task=doctor: {', '.join(bad)}: see above")


def check_python(config) -> Iterator[Finding]:
    version = sys.version_info[:2]
    what = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if PYTHONS[0] <= version <= PYTHONS[1]:
        yield Finding("python", "ok", what)
    else:
        oldest, newest = (f"{major}.{minor}" for major, minor in PYTHONS)
        state = "bad" if version < PYTHONS[0] else "note"
        yield Finding("python", state, what, f"tested with {oldest} to {newest}: uv venv --python {newest}")


def check_versions(config) -> Iterator[Finding]:
    """Installed packages against the requirements of this kind of machine."""
    kind, _ = machine.find()
    missing, other, count = [], [], 0
    for name, versions in required(kind).items():
        count += 1
        try:
            installed = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if installed not in versions:
            other.append(f"{name} {installed} (tested: {' or '.join(sorted(versions))})")
    remedy = f"pip install -r requirements/{kind}.lock in an environment of its own"
    if missing:
        yield Finding("packages", "bad", f"missing: {', '.join(missing)}", remedy)
    if other:
        yield Finding("packages", "note", f"other than tested: {', '.join(other)}", remedy)
    if not missing + other:
        yield Finding("packages", "ok", f"{count} as in requirements/{kind}.lock")


def required(kind: str) -> dict[str, set[str]]:
    """The versions that the requirements of a kind of machine pin, by package."""
    pins: dict[str, set[str]] = {}
    for name in ("base.txt", "../requirements.txt" if kind == "cpu" else f"{kind}.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            if match := re.match(r"([\w.-]+)(?:\[\w+\])?(?:==([^\s;]+)| @ \S+/\w+-([\d.]+))", line):
                pins.setdefault(match[1], set()).add(match[2] or match[3])
    return pins


def check_clashes(config) -> Iterator[Finding]:
    """Packages that conflict with each other."""
    installed = {distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()}
    clashing = sorted(installed & CLASHES.keys())
    for name in clashing:
        yield Finding("clash", "bad", f"{name} is installed", CLASHES[name])
    cuda = sorted({match[1] for name in installed if (match := re.fullmatch(r"nvidia-.*-cu(\d\d)", name))})
    if len(cuda) > 1:
        remedy = "torch needs none here: install requirements/gpu.lock in an environment of its own"
        yield Finding("clash", "note", f"libraries of CUDA {' and '.join(cuda)} are both installed", remedy)
    elif not clashing:
        yield Finding("clash", "ok", "no known conflicts")
    if "torch-xla" in installed or "torch_xla" in installed:
        what = f"torch_xla {importlib.metadata.version('torch_xla')} is installed; it is neither used nor imported"
        yield Finding("torch_xla", "note", what, "nothing, unless other software imports it: pip uninstall torch_xla")


def check_devices(config) -> Iterator[Finding]:
    """The devices that JAX finds, against those of the machine."""
    kind, reason = machine.find()
    try:
        devices = find_devices(config)
    except Exception as error:  # JAX and its plugins raise all kinds
        message = str(error).strip().partition("\n")[0]
        remedy = "another process may hold the TPU: end it (also notebook kernels), or set JAX_PLATFORMS=cpu"
        yield Finding("devices", "bad", f"JAX does not start: {message}", remedy)
        return
    what = f"{len(devices)} {devices[0].device_kind} ({reason})"
    if kind != "cpu" and devices[0].platform == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
        yield Finding("devices", "bad", f"JAX finds only the CPU: {reason}", f"pip install -r requirements/{kind}.lock")
    else:
        yield Finding("devices", "ok", what)


def find_devices(config) -> list:
    from wan_torchax.devices.start import start

    return list(start(config).devices)


def check_memory(config, source: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    if not source.is_file():
        return
    free = int(re.search(r"MemAvailable:\s*(\d+)", source.read_text())[1]) * 1024 / GIB
    what = f"{free:.1f} GiB of host memory free"
    if free < FREE_MEMORY_GIB:
        yield Finding("memory", "note", what, f"the demo needs {FREE_MEMORY_GIB}; end other programs")
    else:
        yield Finding("memory", "ok", what)


def check_disk(config) -> Iterator[Finding]:
    """Free space for videos, compiled programs and downloads."""
    hub = os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface"
    places = {"outputs": (Path("outputs"), "hydra.run.dir="), "downloads": (Path(hub), "the variable HF_HOME=")}
    if config.compile.cache_dir:
        places["cache"] = (Path(config.compile.cache_dir), "compile.cache_dir=")
    for name, (path, key) in places.items():
        present = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        free = shutil.disk_usage(present).free / GIB
        if not os.access(present, os.W_OK):
            yield Finding(name, "bad", f"{path} cannot be written", f"name another place with {key}")
        elif free < FREE_DISK_GIB:
            yield Finding(name, "note", f"{free:.1f} GiB free at {path}", f"free some, or name another with {key}")
        else:
            yield Finding(name, "ok", f"{free:.0f} GiB free at {path}")


def check_encoder(config) -> Iterator[Finding]:
    """Whether ffmpeg, which reads and writes videos, runs."""
    try:
        yield Finding("ffmpeg", "ok", clips.version_of(clips.ffmpeg()))
    except ConfigError as error:
        yield Finding("ffmpeg", "bad", str(error).removesuffix(f"; {clips.REMEDY}"), clips.REMEDY)


def check_hub(config) -> Iterator[Finding]:
    """Whether checkpoints can be downloaded."""
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        yield Finding("hub", "note", "HF_HUB_OFFLINE is set: nothing is downloaded", "unset it to download")
        return
    try:
        urllib.request.urlopen(urllib.request.Request(HUB, method="HEAD"), timeout=HUB_SECONDS).close()
        yield Finding("hub", "ok", f"{HUB} answers")
    except urllib.error.HTTPError as error:
        yield Finding("hub", "ok", f"{HUB} answers ({error.code})")
    except OSError as error:
        remedy = "the demo needs none; for others download elsewhere and set model.path to the folder"
        yield Finding("hub", "note", f"{HUB} cannot be reached: {error}", remedy)


CHECKS = (
    check_python, check_versions, check_clashes, check_devices, check_memory, check_disk, check_encoder, check_hub,
)
