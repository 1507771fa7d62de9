"""Untrue messages, trust that went too far and work that was thrown away: each a case that once was."""
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import operator
import os
import shutil
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy
import pytest
from safetensors.numpy import save_file

from tests.conftest import ROOT, make_config
from wan_torchax.config import registry
from wan_torchax.config.adapters import adapter_problems
from wan_torchax.config.commandline import CONF
from wan_torchax.config.resolve import Checkpoint
from wan_torchax.config.schema import ConfigError
from wan_torchax.models.wan import FAMILY
from wan_torchax.records import media, results
from wan_torchax.records.store import GIB, Store
from wan_torchax.runtime import adapters
from wan_torchax.runtime.checkpoint import find_all, read_architecture
from wan_torchax.serve import worker
from wan_torchax.tasks import attempt

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
    config = SimpleNamespace(resume=str(tmp_path), pipeline=SimpleNamespace(stages={}))
    monkeypatch.setattr(worker, "configure", lambda job, base: (config, []))
    return SimpleNamespace(id="video_1", folder=tmp_path)


def test_a_hub_out_of_reach_costs_no_finished_stage(job, monkeypatch):
    def generate(*_, **__):
        raise ConfigError("model.path=a/b: the Hub cannot be reached")

    monkeypatch.setattr(worker, "generate", generate)
    with pytest.raises(ConfigError, match="Hub"):
        worker.make(job, None, SimpleNamespace(clock=None, expect=list))
    assert (job.folder / "text.safetensors").exists()


def test_results_that_do_not_fit_are_made_again(job, monkeypatch):
    resumed = []

    def generate(config, *_, **__):
        resumed.append(config.resume)
        if config.resume:
            results.read(job.folder / "text.safetensors", {"embeddings": (1,)})

    monkeypatch.setattr(worker, "generate", generate)
    worker.make(job, None, SimpleNamespace(clock=None, expect=list))
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


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_an_alpha_that_is_no_number_is_the_adapters(tmp_path, peft, number):
    """As a factor that is not finite, it would later be told of the checkpoint's latents."""
    with pytest.raises(ConfigError, match="x.safetensors: an alpha is not a finite number"):
        place(saved(tmp_path / "x.safetensors", pair() | {f"{MODULE}.alpha": numpy.array(number, "float32")}))
    for settings in (f'"lora_alpha": {number}', f'"alpha_pattern": {{"to_q": {number}}}'):
        (peft / "adapter_config.json").write_text(f'{{"r": 4, {settings}}}')
        with pytest.raises(ConfigError, match="its settings cannot be read .an alpha is not a finite number"):
            place(peft / "adapter_model.safetensors")


def test_an_alpha_for_each_of_many_modules_is_found_at_once(peft):
    """Python remembers 512 regular expressions: of more, each was compiled again for every module, for a minute."""
    names = [f"blocks.{number}.attn1.to_q" for number in range(400)]
    pairs = [pair("base_model.model.", name, (1, 2), (2, 1)) for name in names]
    saved(peft / "adapter_model.safetensors", functools.reduce(operator.or_, pairs))
    row = adapters.File("style", peft / "adapter_model.safetensors", "", 1.0, False)
    for others, allowed in ((700, True), (20_000, False)):
        alphas = {f"none.{number}": 1 for number in range(others)} | {name: place for place, name in enumerate(names)}
        (peft / "adapter_config.json").write_text(json.dumps({"r": 1, "alpha_pattern": alphas}))
        began = time.perf_counter()
        with contextlib.nullcontext() if allowed else pytest.raises(ConfigError, match="20400 entries; at most 10000"):
            changes = adapters.place((row,), {f"{name}.weight": (2, 2) for name in names}, FAMILY)
            assert [changes[f"{name}.weight"][0].scale for name in names] == list(range(400))
        assert time.perf_counter() - began < 10


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
        assert "sparse-linear attention" in text and "model=turbowan2" in text
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
        assert read_architecture(tmp_path, {}, component, FAMILY.spec(component)) == {}


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


# ---------------------------------------------------------------- JAX's compilation cache


@pytest.fixture
def cache_dir(tmp_path):
    """The folder that JAX caches programs in, for the length of a test."""
    import jax

    from wan_torchax.devices import start

    before = jax.config.jax_compilation_cache_dir
    start.use_cache(str(tmp_path / "jax"))
    yield tmp_path / "jax"
    start.use_cache(before)


def used(folder, caplog):
    import jax

    from wan_torchax.devices import start

    caplog.clear()
    start.use_cache(str(folder))
    assert len(caplog.messages) == (jax.config.jax_compilation_cache_dir is None)
    return jax.config.jax_compilation_cache_dir


def test_a_cache_that_others_can_write_to_is_not_used(cache_dir, tmp_path, caplog, monkeypatch):
    assert cache_dir.stat().st_mode & 0o777 == 0o700
    for mode, taken in ((0o755, True), (0o775, False), (0o757, False), (0o700, True)):
        cache_dir.chmod(mode)
        assert used(cache_dir, caplog) == (str(cache_dir) if taken else None), oct(mode)
        assert taken or f"is open to others (mode {mode:o}); chmod 700 {cache_dir}" in caplog.text
    (tmp_path / "file").write_text("")
    assert used(tmp_path / "file", caplog) is None
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert used(cache_dir, caplog) is None and "set compile.cache_dir to your own" in caplog.text


def test_a_damaged_entry_is_compiled_and_written_again(cache_dir):
    import jax

    def entry():
        jax.jit(lambda x: x * 4.25 + 1).lower(jax.ShapeDtypeStruct((5,), "float32")).compile()
        (path,) = cache_dir.glob("*-cache")
        return path

    path = entry()
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    jax.clear_caches()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        entry()
    assert path.stat().st_size >= size - 8, "as long as it was: the time of compilation is in it"
    jax.clear_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry()


# ---------------------------------------------------------------- ffmpeg


def attempted(folder, *overrides):
    """Why a job failed before its task began; None if it got that far."""
    began, load = [], registry.load

    def load_all_but_tasks(table, name):
        return (lambda *_: began.append(name)) if table is registry.TASKS else load(table, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "load", load_all_but_tasks)
        patch.setattr(attempt, "failures", [])
        attempt.attempt(make_config(*overrides), folder, list(overrides))
        assert len(began) + len(attempt.failures) == 1
        return None if began else attempt.failures[0]


def test_an_ffmpeg_that_does_not_run_is_told_first(tmp_path, monkeypatch):
    for command in ("/nowhere/ffmpeg", "/bin/true", "/bin/false"):
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", command)
        for task in ("task=generate", "task=serve"):
            told = attempted(tmp_path, task)
            assert "ffmpeg, which reads and writes videos, does not run" in told and "IMAGEIO_FFMPEG_EXE" in told
        for without in (["task=plan", "mesh=v6e_8"], ["stages=[text]"], ["stages=[text,denoise]"]):
            assert attempted(tmp_path, *without) is None
    reads = "model=wan21_vace_1_3b", "resolution=480p", "stages=[encode]", f"video={tmp_path / 'clip.mp4'}"
    assert "does not run" in attempted(tmp_path, *reads)
    (tmp_path / "video.mp4").write_bytes(b"x")
    with pytest.raises(ConfigError, match="does not run"):
        media.read_metadata(tmp_path / "video.mp4")
    monkeypatch.delenv("IMAGEIO_FFMPEG_EXE")
    assert attempted(tmp_path, "task=generate") is None


@pytest.mark.system
def test_no_ffmpeg_is_told_before_anything_loads(tmp_path):
    command = [sys.executable, "-X", "importtime", "run.py", f"hydra.run.dir={tmp_path}"]
    environment = os.environ | {"IMAGEIO_FFMPEG_EXE": "/nowhere/ffmpeg"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines() if "import time:" in line}
    assert answer.returncode == 1 and "does not run: [Errno 2]" in answer.stderr + answer.stdout
    assert "hydra" in imported and not {"jax", "torch", "diffusers"} & imported
