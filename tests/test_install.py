"""What is installed where. The matrix asks the package index: RESOLVE=1 pytest tests/test_install.py."""
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from wan_torchax.devices import machine

LOCKS = ("cpu", "tpu", "gpu")
INPUTS = {"cpu": "requirements.txt", "tpu": "requirements/tpu.txt", "gpu": "requirements/gpu.txt"}
PLATFORMS = {"x86_64": "x86_64-manylinux_2_31", "aarch64": "aarch64-manylinux_2_28"}
PYTHONS = ("3.11", "3.12", "3.13")


def pins(path):
    """name → versions that a file of requirements pins, whatever their markers."""
    found = {}
    for line in path.read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9_.-]+)(?:\[\w+\])?==([^\s;\\]+)", line):
            found.setdefault(match[1].lower().replace("_", "-"), set()).add(match[2])
    return found


@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_is_of_its_requirements_and_every_line_has_a_hash(kind):
    lock = ROOT / f"requirements/{kind}.lock"
    locked = pins(lock)
    for source in ("requirements/base.txt", INPUTS[kind]):
        for name, versions in pins(ROOT / source).items():
            assert versions == locked[name], f"{name} in {source}: run make locks"
    for entry in re.split(r"\n(?=\S)", lock.read_text().strip()):
        assert "--hash=sha256:" in entry, entry
    wheels = re.findall(r"torch @ (\S+)", (ROOT / "requirements/base.txt").read_text())
    assert len(wheels) == len(PYTHONS) and all(wheel in lock.read_text() for wheel in wheels)


def test_torch_brings_no_cuda_and_a_gpu_has_one():
    cuda = {kind: [name for name in pins(ROOT / f"requirements/{kind}.lock") if is_cuda(name)] for kind in LOCKS}
    assert cuda["cpu"] == cuda["tpu"] == []
    majors = {match[1] for name in cuda["gpu"] if (match := re.search(r"cu(?:da)?(\d+)", name))}
    assert majors == {"13"}


def is_cuda(name):
    return name.startswith(("nvidia-", "triton", "jax-cuda", "cuda-"))


def uv():
    return shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")


@pytest.mark.skipif("RESOLVE" not in os.environ, reason="asks the package index: RESOLVE=1")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("kind", LOCKS)
def test_requirements_resolve(kind, platform, python):
    if kind == "tpu" and platform == "aarch64":
        pytest.skip("libtpu is for x86_64 alone")
    command = [uv(), "pip", "compile", "--quiet", "--no-header", "--python-version", python, "--only-binary", ":all:"]
    command += ["--no-binary", "antlr4-python3-runtime", "--python-platform", PLATFORMS[platform], INPUTS[kind]]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    resolved = [line for line in ran.stdout.splitlines() if not line.startswith(" ")]
    cuda = [line for line in resolved if is_cuda(line)]
    assert bool(cuda) == (kind == "gpu") and not any("cu12" in line for line in cuda), cuda
    assert any("libtpu" in line for line in resolved) == (kind == "tpu")


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without accelerators, and where its PCI devices would be."""
    for name in ("ISTPUVM", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine.find_tpu, "__defaults__", (tmp_path / "pci",))
    return tmp_path


def add_device(bare, vendor, device):
    folder = bare / "pci" / device
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


def test_a_machine_without_accelerators_is_a_cpu(bare):
    add_device(bare, "0x1ae0", "0x0042")  # Google's network card
    assert machine.find()[0] == "cpu"


def test_a_tpu_is_found_by_its_pci_id(bare):
    add_device(bare, "0x1ae0", "0x0063")
    assert machine.find() == ("tpu", "a TPU v5e")


def test_a_gpu_is_found_by_its_driver(bare):
    command = bare / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    command.chmod(0o755)
    assert machine.find() == ("gpu", "GPU 0: NVIDIA H200")
    command.write_text("#!/bin/sh\nexit 9\n")  # a driver without a device
    assert machine.find()[0] == "cpu"


# ---------------------------------------------------------------- ComfyUI


def ranges():
    """The requirements of the nodes, without comments."""
    lines = (ROOT / "comfyui/requirements.txt").read_text().splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]


def test_the_nodes_leave_comfyuis_packages_alone():
    names = {re.match(r"[\w-]+", line)[0].lower() for line in ranges()}
    assert not names & {"torch", "torchvision", "torchaudio", "numpy", "pillow", "tokenizers", "scipy", "av"}
    project = tomllib.loads((ROOT / "comfyui/pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ranges()
    assert (ROOT / "comfyui" / project["tool"]["comfy"]["Icon"].rpartition("/")[2]).exists()
    tested = pins(ROOT / "requirements/base.txt") | {"jax": {"0.10.2", "0.11.2"}}
    for line in ranges():
        specifier = Requirement(line)
        assert all(specifier.specifier.contains(version) for version in tested[specifier.name.replace("_", "-")]), line


@pytest.mark.skipif("RESOLVE" not in os.environ, reason="asks the package index: RESOLVE=1")
def test_the_nodes_resolve_beside_a_newer_torch(tmp_path):
    """As ComfyUI has it today."""
    asked = tmp_path / "asked.txt"
    asked.write_text("\n".join([*ranges(), "torch==2.15.0", "numpy>=2.4.6", "transformers>=4.50.3", "kernels"]))
    command = [uv(), "pip", "compile", "--quiet", "--python-version", "3.12", "--python-platform", PLATFORMS["aarch64"]]
    ran = subprocess.run([*command, str(asked)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "torch==2.15.0" in ran.stdout, ran.stderr
