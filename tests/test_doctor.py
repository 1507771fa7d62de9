"""task=doctor: each fault, injected, is found and comes with what to do."""
import importlib.metadata
import json
import platform
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from tests.conftest import make_config
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices import machine
from wan_torchax.tasks import doctor


@pytest.fixture
def config(tmp_path):
    return make_config(f"compile.cache_dir={tmp_path}")


@pytest.fixture(autouse=True)
def sound(monkeypatch):
    """A machine on which all is well, but for what a test breaks."""
    monkeypatch.setattr(machine, "find", lambda: ("cpu", "no TPU and no NVIDIA GPU"))
    monkeypatch.setattr(doctor, "find_devices", lambda config: [SimpleNamespace(device_kind="cpu", platform="cpu")])
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def fault(check, config):
    """The one finding that is not as it should be."""
    (finding,) = [finding for finding in check(config) if finding.state != "ok"]
    assert finding.remedy
    return finding


def test_a_sound_machine(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "FREE_MEMORY_GIB", 0)
    doctor.doctor(config, tmp_path)
    report = json.loads((tmp_path / "doctor.json").read_text())
    bad = [finding for finding in report["findings"] if finding["state"] == "bad"]
    assert not bad and len(report["findings"]) >= len(doctor.CHECKS) and report["versions"]["torch"]
    assert "ok    ffmpeg" in capsys.readouterr().out


def test_what_does_not_work_is_an_error(config, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (lambda config: [doctor.Finding("python", "bad", "3.6", "newer")],))
    with pytest.raises(ConfigError, match="python"):
        doctor.doctor(config, tmp_path)
    assert (tmp_path / "doctor.json").exists()


def test_another_python(config, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.1")
    assert fault(doctor.check_python, config).state == "bad"


def test_other_and_missing_packages(config, monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name == "torchax":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.15.0" if name == "torch" else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    missing, other = doctor.check_versions(config)
    assert missing.state == "bad" and "torchax" in missing.what
    assert other.state == "note" and "torch 2.15.0 (tested: 2.10.0)" in other.what


@pytest.mark.parametrize(
    "packages, check, told",
    [
        (["hydra"], "clash", "not Hydra"),
        (["libtpu-nightly"], "clash", "shadows"),
        (["jax-cuda12-plugin"], "clash", "fight"),
        (["nvidia-cudnn-cu12", "nvidia-cudnn-cu13"], "clash", "gpu.lock"),
        (["torch_xla"], "torch_xla", "uninstall"),
    ],
)
def test_clashes(config, monkeypatch, packages, check, told):
    listed = [SimpleNamespace(metadata={"Name": name}) for name in packages]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: listed)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    finding = fault(doctor.check_clashes, config)
    assert finding.check == check and told in finding.remedy


def test_a_jax_that_does_not_start(config, monkeypatch):
    def fail(config):
        raise RuntimeError("Unable to initialize backend 'tpu': ALREADY_EXISTS\nmore")

    monkeypatch.setattr(doctor, "find_devices", fail)
    finding = fault(doctor.check_devices, config)
    assert finding.state == "bad" and finding.what.endswith("ALREADY_EXISTS") and "kernel" in finding.remedy


def test_an_accelerator_that_jax_does_not_see(config, monkeypatch):
    monkeypatch.setattr(machine, "find", lambda: ("tpu", "a TPU v5e"))
    assert fault(doctor.check_devices, config).remedy == "pip install -r requirements/tpu.lock"


def test_little_memory(config, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    1048576 kB\n")
    (finding,) = doctor.check_memory(config, tmp_path / "meminfo")
    assert finding.state == "note" and finding.what.startswith("1.0 GiB")


def test_a_full_disk_and_a_folder_that_cannot_be_written(config, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    assert {finding.state for finding in doctor.check_disk(config)} == {"note"}
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != tmp_path)
    assert [finding.check for finding in doctor.check_disk(config) if finding.state == "bad"] == ["cache"]


def test_an_encoder_that_does_not_run(config, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    assert fault(doctor.check_encoder, config).state == "bad"


def test_no_network_and_offline(config, monkeypatch):
    def fail(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    assert "no route" in fault(doctor.check_hub, config).what
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in fault(doctor.check_hub, config).what


