"""task=inspect: what a file or folder is, said from headers alone."""
import json

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import ROOT, make_config
from tests.test_files import in_names_of_wan, write_landmarks
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.runtime import recognition
from wan_torchax.tasks import inspection

DEMO = ROOT / "models" / "demo"


@pytest.fixture
def inspected(tmp_path, monkeypatch, capsys):
    """The report of a path, and what was printed; on one machine, to be quick."""
    monkeypatch.setattr(inspection, "options", lambda group: ["auto", "v5e_1"])

    def run(path, *overrides):
        config = make_config("task=inspect", f"model.path={path}", *overrides)
        validate(config)
        inspection.inspect(config, tmp_path)
        return json.loads((tmp_path / "inspect.json").read_text()), capsys.readouterr().out

    return run


def test_a_single_file(inspected, tmp_path):
    state = in_names_of_wan(load_file(DEMO / "transformer" / "diffusion_pytorch_model.safetensors"))
    path, loras = tmp_path / "mine.safetensors", tmp_path / "loras"
    save_file({f"diffusion_model.{name}": tensor for name, tensor in state.items()}, path)
    loras.mkdir()
    (loras / "fits.safetensors").symlink_to(ROOT / "models" / "demo_outline" / "demo_outline.safetensors")
    save_file({"blocks.0.attn1.to_q.lora_A.weight": numpy.zeros((2, 7), "float32"),
               "blocks.0.attn1.to_q.lora_B.weight": numpy.zeros((256, 2), "float32")}, loras / "other.safetensors")
    report, printed = inspected(path, f"inspect.adapters={loras}")
    row = report[str(path)]
    assert row["models"] == {"transformer": ["demo", "demo_live"]} and row["machines"].keys() == {"v5e_1"}
    assert "177 tensors, 7.0 million parameters, 13.3 MiB: F16 100.0%" in row["holds"]
    assert row["machines"]["v5e_1"]["fits"] and 0 < row["machines"]["v5e_1"]["gib"] < 1
    fits, other = (row["adapters"][str(loras / f"{name}.safetensors")] for name in ("fits", "other"))
    assert fits == "fits: 66 tensors" and "does not fit: 1 keys" in other and "to_q.lora_A.weight" in other
    assert f"python run.py model=demo model.path={path}; text_encoder, vae: from models/demo" in printed


@pytest.mark.system
def test_a_folder_and_what_does_not_fit_a_machine(inspected, tmp_path, monkeypatch):
    components = "text_encoder", "tiny_vae", "transformer", "vae"
    assert inspected(DEMO)[0].keys() == {str(DEMO / name) for name in components}
    write_landmarks(tmp_path / "big.safetensors", "wan21_t2v_14b")
    report, printed = inspected(tmp_path / "big.safetensors")
    row = report[str(tmp_path / "big.safetensors")]
    assert row["models"]["transformer"] == ["wan21_t2v_14b", "wan22_t2v_a14b", "krea_14b"]  # derived ones last
    assert not row["machines"]["v5e_1"]["fits"] and 28 < row["machines"]["v5e_1"]["gib"] < 40
    assert "mesh=v5e_1     too large" in printed and "832 x 480 x 81" in printed


def test_adapters_and_others(inspected, tmp_path):
    (tmp_path / "drawer").mkdir()
    adapter = tmp_path / "drawer" / "adapter.safetensors"
    adapter.symlink_to(ROOT / "models" / "demo_outline" / "demo_outline.safetensors")
    save_file({"x": numpy.zeros(3, "float32")}, tmp_path / "drawer" / "other.safetensors")
    report, _ = inspected(tmp_path / "drawer")
    assert "wan" in report[str(adapter)]["adapter_of"]
    assert "neither a component" in report[str(tmp_path / "drawer" / "other.safetensors")]["problem"]
    adapter.unlink()
    with pytest.raises(ConfigError, match="nothing there can be run"):
        inspected(tmp_path / "drawer")
    with pytest.raises(ConfigError, match="download it first"):
        inspected("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")


def test_inspecting_chooses_no_model(tmp_path):
    given = ["task=inspect", f"model.path={tmp_path / 'any.gguf'}"]
    assert recognition.with_models(given) == given
