"""Untrue messages, trust that went too far and work that was thrown away: each a case that once was."""
import dataclasses
import inspect
import json
import math
import os
import shutil
from types import SimpleNamespace

import numpy
import pytest
from safetensors.numpy import save_file

from tests.conftest import ROOT, make_config
from wan_torchax.config.adapters import adapter_problems
from wan_torchax.config.commandline import CONF
from wan_torchax.config.resolve import Checkpoint
from wan_torchax.config.schema import ConfigError
from wan_torchax.models.wan import FAMILY
from wan_torchax.records import results
from wan_torchax.records.store import GIB, Store
from wan_torchax.runtime import adapters
from wan_torchax.runtime.checkpoint import find_all, read_architecture
from wan_torchax.serve import worker

# ---------------------------------------------------------------- what was computed


def test_a_read_only_store_is_read(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(30, "Read-only file system")

    store = Store(tmp_path / "store", GIB)
    store.write("kind", {"a": 1}, {"b": 2}, {"c": numpy.ones(3)})
    monkeypatch.setattr(os, "utime", refuse)
    assert store.read("kind", {"a": 1}).about == {"b": 2}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A video of the queue with one finished stage."""
    (tmp_path / "text.safetensors").write_bytes(b"x")
    config = SimpleNamespace(resume=str(tmp_path))
    monkeypatch.setattr(worker, "configure", lambda job, base: (config, []))
    monkeypatch.setattr(worker, "validate", lambda config: None)
    return SimpleNamespace(id="video_1", folder=tmp_path)


def test_a_hub_out_of_reach_costs_no_finished_stage(job, monkeypatch):
    def generate(*_):
        raise ConfigError("model.path=a/b: the Hub cannot be reached")

    monkeypatch.setattr(worker, "generate", generate)
    with pytest.raises(ConfigError, match="Hub"):
        worker.make(job, None, SimpleNamespace(clock=None))
    assert (job.folder / "text.safetensors").exists()


def test_results_that_do_not_fit_are_made_again(job, monkeypatch):
    resumed = []

    def generate(config, *_):
        resumed.append(config.resume)
        if config.resume:
            results.read(job.folder / "text.safetensors", {"embeddings": (1,)})

    monkeypatch.setattr(worker, "generate", generate)
    worker.make(job, None, SimpleNamespace(clock=None))
    assert resumed == [str(job.folder), None] and not (job.folder / "text.safetensors").exists()
    with pytest.raises(results.Misfit, match="other settings"):
        results.compare(job.folder, {"steps": 3}, {"steps": 4})


# ---------------------------------------------------------------- adapters


MODULE, WIDTH = "blocks.0.attn1.to_q", 128


def pair(prefix="transformer.", module=MODULE, down=(4, WIDTH), up=(WIDTH, 4), ends=("lora_A", "lora_B")):
    shapes = zip(ends, (down, up))
    return {f"{prefix}{module}.{end}.weight": numpy.ones(shape, "float32") for end, shape in shapes}


def saved(path, tensors):
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path


def place(path):
    """What a file adds to a model of one matrix."""
    row = adapters.File("style", path, "", 1.0, False)
    return adapters.place((row,), {f"{MODULE}.weight": (WIDTH, WIDTH)}, FAMILY)


def problems(path):
    return list(adapter_problems(make_config(f"adapter.style={{path: {path}}}")))


@pytest.fixture
def peft(tmp_path):
    """A folder that PEFT saved."""
    saved(tmp_path / "peft" / "adapter_model.safetensors", pair("base_model.model."))
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "r": 4}))
    return tmp_path / "peft"


def test_a_folder_of_peft_is_taken_with_its_settings(peft):
    assert problems(peft) == []
    file = adapters.find("style", SimpleNamespace(path=str(peft)), local_only=True)
    (change,) = place(file)[f"{MODULE}.weight"]
    assert change.scale == 2.0, "lora_alpha / r"
    (peft / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="needs the adapter_config.json that PEFT saved beside it"):
        place(file)


def test_another_alpha_is_another_adapter(peft):
    config = make_config(f"adapter.style={{path: {peft}}}")
    checkpoints = {"transformer": Checkpoint(peft, {}, "0123456789abcdef")}
    before = adapters.on(checkpoints, config)["transformer"].fingerprint
    (peft / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4, "r": 4}))
    assert adapters.on(checkpoints, config)["transformer"].fingerprint != before


def test_peft_from_the_hub_comes_with_its_settings(peft, monkeypatch):
    import huggingface_hub

    fetched = []

    def download(repo, file, **_):
        fetched.append(file)
        return str(peft / file.removeprefix("sub/"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    row = SimpleNamespace(path=None, repo="a/b", file="sub/adapter_model.safetensors", revision=None)
    assert adapters.find("style", row, local_only=True) == peft / "adapter_model.safetensors"
    assert fetched == ["sub/adapter_config.json", "sub/adapter_model.safetensors"]


def test_what_is_no_adapter_is_told_as_it_is(tmp_path):
    (tmp_path / "folder").mkdir()
    (problem,) = problems(tmp_path / "folder")
    assert "a folder without adapter_model.safetensors" in problem and "run code" not in problem
    (tmp_path / "folder" / "adapter_model.bin").write_bytes(b"x")
    assert "adapter_model.bin can run code when opened" in problems(tmp_path / "folder")[0]
    (tmp_path / "style.gguf").write_bytes(b"x")
    assert "style.gguf is no .safetensors file" in problems(tmp_path / "style.gguf")[0]
    with pytest.raises(ConfigError, match="empty.safetensors: has no tensors"):
        place(saved(tmp_path / "empty.safetensors", {}))
    whole = {f"{MODULE}.weight": numpy.ones((WIDTH, WIDTH), "float32"), f"{MODULE}.bias": numpy.ones(WIDTH, "float32")}
    with pytest.raises(ConfigError, match="not an adapter: blocks.0.attn1.to_q.*named by model.path"):
        place(saved(tmp_path / "whole.safetensors", whole))
    with pytest.raises(ConfigError, match="to_q.bias: neither a low-rank factor nor a diff"):
        place(saved(tmp_path / "mixed.safetensors", pair() | whole))
    with pytest.raises(ConfigError, match="is there twice"):
        place(saved(tmp_path / "twice.safetensors", pair() | pair(prefix="diffusion_model.")))


def test_a_wrong_width_is_told_of_the_factor_that_has_it(tmp_path):
    with pytest.raises(ConfigError) as caught:
        place(saved(tmp_path / "x.safetensors", pair(up=(96, 4))))
    assert f"to_q.lora_B.weight: shape (96, 4), the model's tensor is ({WIDTH}, {WIDTH})" in str(caught.value)
    assert "lora_A" not in str(caught.value)


TRAINERS = {
    "OneTrainer": pair("lora_transformer_", MODULE.replace(".", "_"), ends=("lora_down", "lora_up")),
    "DiffSynth": pair("pipe.dit.", "blocks.0.self_attn.q", ends=("lora_A.default", "lora_B.default")),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_names_of_more_trainers_are_understood(tmp_path, trainer):
    assert list(place(saved(tmp_path / "x.safetensors", TRAINERS[trainer]))) == [f"{MODULE}.weight"]


# ---------------------------------------------------------------- recipes


def test_rcm_is_sampled_as_published():
    """tan / (1 + tan) of these angles; text-to-video with fresh noise, image-to-video as an ODE at 720p."""
    for name, first, scheduler in (("rcm_4step", 80, "renoise"), ("rcm_4step_i2v", 200, "euler")):
        config = make_config("model=wan22_i2v_a14b", f"sampling={name}", "resolution=720p")
        tangents = [first, *map(math.tan, (1.5, 1.4, 1.0))]
        assert list(config.scheduler.sigmas) == [round(tangent / (1 + tangent), 6) for tangent in tangents]
        assert config.scheduler.name == scheduler and config.scheduler.noise_scale == config.scheduler.sigmas[0]
        text = (CONF / "sampling" / f"{name}.yaml").read_text()
        assert "sparse-linear attention (SLA), which is not implemented" in text
    assert "resolution=720p mesh=" in text


# ---------------------------------------------------------------- checkpoints


def test_a_config_json_reaches_transformers_with_its_architecture_only(tmp_path):
    forged = {"attn_implementation": "publisher/kernel", "experts_implementation": "publisher/kernel",
              "per_layer_config": {}, "auto_map": {"AutoModel": "evil.Evil"}, "quantization_config": {}}
    shutil.copytree(ROOT / "models" / "demo", tmp_path / "model")
    path = tmp_path / "model" / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | forged))
    found = find_all(make_config(f"model.path={tmp_path / 'model'}"), ["text_encoder"])["text_encoder"]
    assert found.architecture.keys() == FAMILY.spec("text_encoder").fields
    for component in ("text_encoder", "image_encoder"):
        (tmp_path / "config.json").write_text(json.dumps(forged))
        assert read_architecture(tmp_path, {}, component, FAMILY.spec(component).fields) == {}


def test_fields_are_those_of_the_classes_and_all_that_conf_says():
    import diffusers
    import transformers

    from wan_torchax.models.modules import construct

    kinds = {"text_encoder": transformers.UMT5Config, "image_encoder": transformers.CLIPVisionConfig}
    said = make_config("model=wan21_i2v_14b_480p").model.architecture
    for component, kind in kinds.items():
        fields = FAMILY.spec(component).fields
        assert set(said[component]) <= fields <= {field.name for field in dataclasses.fields(kind)}
    for kind in (diffusers.WanTransformer3DModel, diffusers.AutoencoderKLWan):
        assert not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(kind).parameters.values())
    with pytest.raises(ConfigError, match="self=1 in the checkpoint's config.json"):
        construct(diffusers.AutoencoderKLWan, {"self": 1})
