"""A family that nothing of the project knows: its folder and its configs are all that it takes."""
import json
import shutil
from pathlib import Path

import diffusers
import numpy
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file

from tests.conftest import ROOT, make_config
from tests.test_parity import relative_error
from tests.toy import modules
from wan_torchax.config import clips, registry
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.events import Began
from wan_torchax.models.tokens import tokenize
from wan_torchax.run import generate
from wan_torchax.session import session
from wan_torchax.stages import sampling
from wan_torchax.tasks.plan import plan

CONF = Path(__file__).parent / "toy" / "conf"
SIZE = ["resolution.height=40", "resolution.width=48", "resolution.frames=7", "output.keep_frames=true"]
PROMPTS = "a red star", "blue"
ARCHITECTURES = {
    "transformer": (modules.Transformer, dict(layers=3, heads=4, head_dim=16, text_width=24, channels=4)),
    "text_encoder": (modules.Text, dict(width=24)),
    "vae": (modules.Vae, dict(channels=4)),
}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Its row in the registry."""
    monkeypatch.setitem(registry.FAMILIES, "toy", "tests.toy.FAMILY")
    session.clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "model"
    shutil.copytree(ROOT / "models" / "demo" / "tokenizer", folder / "tokenizer")
    torch.manual_seed(0)
    for name, (kind, architecture) in ARCHITECTURES.items():
        module = kind(**architecture)
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(architecture))
        save_file(module.state_dict(), folder / name / "a.safetensors")
    return folder


def overrides(checkpoint, *more):
    texts = [f"prompt={PROMPTS[0]}", f"negative_prompt={PROMPTS[1]}"]
    return [f"hydra.searchpath=[file://{CONF}]", "model=toy", f"model.path={checkpoint}", *SIZE, *texts, *more]


def run(checkpoint, folder, *more):
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(*overrides(checkpoint, *more))
    validate(config)
    generate(config, folder)
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def load(checkpoint, name):
    kind, architecture = ARCHITECTURES[name]
    module = kind(**architecture)
    module.load_state_dict(load_torch(checkpoint / name / "a.safetensors"))
    return module.eval()


@torch.no_grad()
def in_torch(checkpoint, config, change=None, segments=1):
    """The whole pipeline by the plain modules and diffusers' scheduler; segment after segment with one generator."""
    ids, mask = map(torch.from_numpy, tokenize(checkpoint / "tokenizer", list(PROMPTS), 24))
    embeddings, transformer = load(checkpoint, "text_encoder")(ids.long()), load(checkpoint, "transformer")
    if change is not None:
        change(transformer)
    draws, made, previous = sampling.noises(config.seed, (1, 4, 4, 10, 12)), [], 0
    for _ in range(segments):
        scheduler = getattr(diffusers, config.scheduler.target)(**config.scheduler.arguments)
        scheduler.set_timesteps(config.steps)
        latents = torch.from_numpy(next(draws))
        for time in scheduler.timesteps:
            both = (latents + 0.1 * previous).expand(2, -1, -1, -1, -1)
            prompt, negative = transformer(both, time, embeddings, mask.sum(1)).chunk(2)
            latents = scheduler.step(negative + 3.0 * (prompt - negative), time, latents).prev_sample
        made.append(latents.numpy())
        previous = latents
    return embeddings.numpy(), made, [decode(checkpoint, latents) for latents in made]


@torch.no_grad()
def decode(checkpoint, latents):
    pixels, before, vae = [], None, load(checkpoint, "vae")
    for latent in torch.from_numpy(latents).split(1, 2):
        piece, before = vae(latent, before)
        pixels.append(piece)
    return ((torch.cat(pixels, 2)[0] + 1) * 127.5).round().permute(1, 2, 3, 0).numpy()


def test_adapters_beside_its_weights_are_refused(checkpoint):
    """Its family names no layers that can have them."""
    with pytest.raises(ConfigError, match="adapters of toy are merged only; use adapter.mode=merge"):
        validate(make_config(*overrides(checkpoint, "adapter.mode=beside")))


WITH_TOY = """
from wan_torchax.config import registry
registry.FAMILIES["toy"] = "tests.toy.FAMILY"
run.main()
"""
LAYOUTS = {
    "one device": [],
    "written out": ["model.scan_blocks=false"],
    "tp": ["mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:4}"],
    "tokens over sp, weights gathered": ["mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=sequence"],
    "ring": ["mesh=cpu_8", "mesh.axes={dp:1,sp:8,tp:1}", "sharding=ring"],
    "heads over tp, tokens in a ring": ["mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}", "sharding=tp_ring"],
}


@pytest.mark.system
@pytest.mark.parametrize("placed", [
    pytest.param(placed, id=name, marks=pytest.mark.full if name in ("tp", "ring") else ())
    for name, placed in LAYOUTS.items()
])
def test_it_is_its_own_modules(checkpoint, tmp_path, cache, placed):
    placed = [*placed, cache, "sharding.picture=[]"]
    values = run(checkpoint, tmp_path, *placed)
    embeddings, (latents,), (frames,) = in_torch(checkpoint, make_config(*overrides(checkpoint)))
    assert relative_error(values["embeddings"], embeddings) < 1e-4
    assert values["counts"][0] > values["counts"][1] > 0, "prompts of different lengths"
    assert relative_error(values["latents"], latents) < 1e-4
    assert values["frames"].shape == (7, 40, 48, 3) and numpy.abs(values["frames"] - frames).max() <= 1


def test_a_run_goes_on_and_other_settings_are_refused(checkpoint, tmp_path, cache):
    first = run(checkpoint, tmp_path / "first", cache, "stages=[text,denoise]")
    again = run(checkpoint, tmp_path / "again", cache, f"resume={tmp_path / 'first'}")
    assert numpy.array_equal(first["latents"], again["latents"]) and "frames" in again
    with pytest.raises(Exception, match="guidance_scale: 3.0 there, 5.0 now"):
        run(checkpoint, tmp_path / "other", cache, f"resume={tmp_path / 'first'}", "guidance_scale=5")


def test_a_lora_is_added(checkpoint, tmp_path, cache):
    torch.manual_seed(1)
    down, up = torch.randn(2, 64), torch.randn(64, 2)
    name = "layers.1.attention.q"
    factors = {f"transformer.{name}.lora_A.weight": down, f"transformer.{name}.lora_B.weight": up}
    save_file(factors, tmp_path / "style.safetensors")
    row = f"adapter.style={{path: {tmp_path / 'style.safetensors'}, strength: 0.5}}"

    def change(transformer):
        transformer.get_submodule(name).weight += 0.5 * up @ down

    values = run(checkpoint, tmp_path / "run", cache, row)
    _, (latents,), _ = in_torch(checkpoint, make_config(*overrides(checkpoint)), change)
    assert relative_error(values["latents"], latents) < 1e-4
    _, (without,), _ = in_torch(checkpoint, make_config(*overrides(checkpoint)))
    assert relative_error(values["latents"], without) > 1e-2


@pytest.mark.system
def test_a_cache_and_eight_bits_serve_it(checkpoint, tmp_path, cache):
    exact = run(checkpoint, tmp_path / "exact", cache)["latents"]
    cached = run(checkpoint, tmp_path / "cached", cache, "cache=easycache", "steps=12")["latents"]
    assert numpy.isfinite(cached).all()
    eight = ["precision=int8_weights", "precision.first=1", "precision.last=1"]
    small = run(checkpoint, tmp_path / "small", cache, *eight)["latents"]
    assert 1e-5 < relative_error(small, exact) < 0.05


LONG = ["pipeline=toy_long", "stages=[text,denoise,decode]"]


def frames_in(video):
    with clips.opened(video) as (_, frames):
        return sum(1 for _ in frames)


@pytest.mark.system
def test_a_video_is_made_in_segments_that_go_on_from_each_other(checkpoint, tmp_path, cache):
    """Three of seven frames, of which three are the one before's; the last gives a frame more than was asked for."""
    long = [*LONG, "resolution.frames=15", cache]
    values = run(checkpoint, tmp_path / "whole", *long)
    _, latents, frames = in_torch(checkpoint, make_config(*overrides(checkpoint)), segments=3)
    for number, expected in enumerate(latents):
        kept = load_file(tmp_path / "whole" / f"denoise.{number}.safetensors")["latents"]
        assert relative_error(kept, expected) < 1e-4
    joined = numpy.concatenate([frames[0], frames[1][3:], frames[2][3:]])
    assert frames_in(tmp_path / "whole" / "video.mp4") == len(joined) == 15
    parts = [load_file(tmp_path / "whole" / f"decode.{number}.safetensors")["frames"] for number in range(3)]
    assert all(numpy.abs(part - expected).max() <= 1 for part, expected in zip(parts, frames))
    assert "text.safetensors" in {path.name for path in (tmp_path / "whole").iterdir()} and "latents" in values

    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    for name in ("denoise.2", "decode.2", "decode.1"):
        (tmp_path / "half" / f"{name}.safetensors").unlink()
    done = []
    again = tmp_path / "again"
    again.mkdir()
    config = make_config(*overrides(checkpoint, *long, f"resume={tmp_path / 'half'}"))
    generate(config, again, listener=lambda event: done.append(event) if isinstance(event, Began) else None)
    phases = [event.phase for event in done if event.phase in ("text", "denoise", "decode")]
    assert phases == ["decode", "denoise", "decode"]
    for number in range(3):
        files = (folder / f"decode.{number}.safetensors" for folder in (tmp_path / "whole", again))
        assert numpy.array_equal(*(load_file(file)["frames"] for file in files))
    assert frames_in(again / "video.mp4") == 15
    with pytest.raises(ConfigError, match="pipeline.segments.overlap|segment"):
        run(checkpoint, tmp_path / "other", *long, "pipeline.segments.overlap=5", f"resume={tmp_path / 'whole'}")


def test_it_is_planned(checkpoint, tmp_path, capsys):
    config = make_config(*overrides(checkpoint, "task=plan", "mesh=v6e_8", "plan.compiler=none", "sharding.picture=[]"))
    validate(config)
    plan(config, tmp_path)
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["model"] == "toy" and report["fits"] and report["tokens"] == 4 * 5 * 6
    assert {row["axis"] for row in report["communication"]["rows"]} == {"tp", "dp"}
    assert set(report["components"]["transformer"]["rules"]) >= {"attention_in", "attention_out", "feed_forward_in"}


@pytest.mark.system
def test_run_py_makes_a_video_of_it(checkpoint, tmp_path, cache):
    from tests.fork import warm

    done = warm().start([*overrides(checkpoint, cache), f"hydra.run.dir={tmp_path}"], code=WITH_TOY)
    done.wait(120)
    assert done.returncode == 0, done.output
    assert (tmp_path / "video.mp4").stat().st_size > 1000
