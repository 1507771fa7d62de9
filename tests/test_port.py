"""task=port: the traps of real models are found, with their lines, and the files to begin with run."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, make_config
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.tasks.port import port

RESULTS = json.loads((ROOT / "benchmarks/results/port.json").read_text())


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hunyuan")
    port(make_config("task=port", "port.model=HunyuanVideo15Transformer3DModel", "mesh=v6e_8"), folder)
    return folder


def test_the_traps_of_hunyuanvideo_are_found_by_line(hunyuan):
    (report,) = json.loads((hunyuan / "port.json").read_text())
    lines = {kind: [one["source"] for one in report["findings"] if one["kind"] == kind] for kind in (
        "branch on a value", "shape depends on values", "tokens x tokens", "widens activations",
    )}
    assert lines["branch on a value"] == ["if is_t2v:"]
    assert len(lines["shape depends on values"]) == 12
    assert "text[text_mask],  # valid mllm" in lines["shape depends on values"]
    assert any("repeat(1, 1, seq_len, 1)" in line for line in lines["tokens x tokens"])
    assert ["timesteps_proj.to(dtype=timestep.dtype)" in line for line in lines["widens activations"]] == [True]
    assert report["traces"].startswith("no: ConcretizationTypeError at diffusers/models/transformers/")


def test_what_it_says_of_hunyuanvideo_is_so(hunyuan):
    (report,) = json.loads((hunyuan / "port.json").read_text())
    assert report["parameters"] == 8_326_608_160
    assert {stack["name"]: stack["blocks"] for stack in report["stacks"]}["transformer_blocks"] == 54
    width, tokens, text = 2048, 32760, 512
    linear, attention = 2 * 12 * width**2 * (tokens + text) * 54, 4 * (tokens + text) ** 2 * width * 54
    assert report["tflops"] == pytest.approx((linear + attention) / 1e12, rel=0.01)
    rules = {rule["name"]: re.compile(rule["pattern"]) for rule in report["rules"]}
    for name, rule in (
        ("attn.to_q", "heads_in"), ("attn.add_v_proj", "heads_in"), ("attn.to_add_out", "heads_out"),
        ("ff_context.net.0.proj", "mlp_in"), ("ff.net.2", "mlp_out"),
    ):
        assert rules[f"transformer_blocks_{rule}"].fullmatch(f"transformer_blocks.7.{name}.weight"), name
    assert not any(rule.fullmatch("transformer_blocks.7.norm1.linear.weight") for rule in rules.values())


def test_the_files_to_begin_with_say_what_is_missing(hunyuan):
    family = yaml.safe_load((hunyuan / "conf/family/hunyuan_video15.yaml").read_text())
    assert family["weights"]["transformer"]["transformer_blocks_heads_out"]["axes"] == [None, "heads"]
    model = yaml.safe_load((hunyuan / "conf/model/hunyuan_video15.yaml").read_text())
    assert model["architecture"]["transformer"]["num_layers"] == 54
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(hunyuan), "--tb=line"]
    command.append(str(hunyuan / "tests/test_hunyuan_video15.py"))
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    for missing in ("missing: geometry", "missing: denoiser", "missing: transformer_blocks_block: one of 54 blocks",
                    "branch on a value at diffusers/"):
        assert missing in answer.stdout, answer.stdout


@pytest.mark.full
def test_a_mask_filled_by_a_loop_and_a_gather_are_found(tmp_path):
    port(make_config("task=port", "port.model=AutoencoderKLHunyuanVideo15"), tmp_path)
    decode, encode = json.loads((tmp_path / "port.json").read_text())
    assert (decode["entry"], encode["entry"]) == ("decode", "encode")
    found = {one["kind"]: one["note"] for one in decode["findings"]}
    assert "replication_pad3d" in found["gather or scatter"] and "ops" in found["loop over tokens"]
    assert decode["parameters"] == 1_260_634_115


@pytest.mark.parametrize("model, words", [
    (None, "task=port needs a class of diffusers"),
    ("FluxTransformer", "nearest: .*FluxTransformer2DModel"),
    ("EulerDiscreteScheduler", "neither a model nor a pipeline"),
])
def test_what_cannot_be_ported_is_told(model, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        config = make_config("task=port", *([f"port.model={model}"] if model else []))
        validate(config)
        port(config, tmp_path)


def test_a_folder_names_only_models_of_diffusers(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"_class_name": "os.system"}))
    with pytest.raises(ConfigError, match=r"no config\.json of a diffusers model"):
        port(make_config("task=port", f"port.model={tmp_path}"), Path(tmp_path))


def test_the_table_of_the_guide_is_what_was_found():
    guide = (ROOT / "docs/porting.md").read_text()
    assert len(RESULTS["models"]) >= 10
    for row in RESULTS["rows"]:
        assert row in guide, row
