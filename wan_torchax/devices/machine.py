"""Detects the kind of machine before anything is installed, to choose the requirements. Standard library only.

    python -m wan_torchax.devices.machine            # cpu, tpu or gpu; the reason goes to stderr
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

GOOGLE = "0x1ae0"
# PCI ids of TPUs. Google's network cards have its vendor id too.
TPUS = {
    "0x0027": "v2 or v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e",
    "0x0076": "v7x",
}


def find_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """The TPU of this machine."""
    for folder in sorted(devices.glob("*")) if devices.is_dir() else ():
        try:
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == GOOGLE and device in TPUS:
            return f"a TPU {TPUS[device]}"
    if os.environ.get("ISTPUVM") or os.environ.get("TPU_ACCELERATOR_TYPE"):
        return "a TPU, by the environment"
    return None


def find_gpu() -> str | None:
    """This machine's NVIDIA GPU, as its driver names it."""
    if not (command := shutil.which("nvidia-smi")):
        return None
    try:
        ran = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.partition("\n")[0].partition(" (")[0] or None


def find() -> tuple[str, str]:
    """cpu, tpu or gpu, and the reason."""
    if tpu := find_tpu():
        return "tpu", tpu
    if gpu := find_gpu():
        return "gpu", gpu
    return "cpu", "no TPU and no NVIDIA GPU"


if __name__ == "__main__":
    kind, reason = find()
    print(f"{reason}: requirements/{kind}.lock", file=sys.stderr)
    print(kind)
