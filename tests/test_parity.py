"""The same numbers as diffusers' WanPipeline, on the same weights and seed, on every mesh, tokens on every device."""
import numpy
import pytest
import torch
from diffusers import WanPipeline
from safetensors.numpy import load_file

from tests import tiny
from tests.conftest import ROOT, SMALL, make_config, resolve_here
from wan_torchax.config.validation import validate
from wan_torchax.session import session
from wan_torchax.stages.denoise import LANES
from wan_torchax.tasks.generate import generate as generate_into

PROMPT = "a red circle moving right on a white background"
NEGATIVE = "a blue square"
TEXTS = [f"prompt={PROMPT}", f"negative_prompt={NEGATIVE}"]
# 960 tokens: over eight devices the last has 64 beside 64 of padding, the others 128 each.
SIZE = dict(height=240, width=256, num_frames=13, num_inference_steps=2)
SMALL_SIZE = dict(height=64, width=64, num_frames=5, num_inference_steps=3)  # SMALL
SIZE_OVERRIDES = ["resolution.height=240", "resolution.width=256", "resolution.frames=13", "steps=2"]


def relative_error(values, reference):
    return numpy.abs(values - reference).max() / numpy.abs(reference).max()


def distance(values, reference):
    return numpy.linalg.norm(values - reference) / numpy.linalg.norm(reference)


def psnr(frames, reference):
    error = numpy.mean((frames.astype(float) - reference.astype(float)) ** 2)
    return numpy.inf if error == 0 else 10 * numpy.log10(255**2 / error)


def run_diffusers(folder, dtype=torch.float32, output="np", **settings):
    """What diffusers makes of the prompt: embeddings, latents and, unless they are all that is asked for, frames."""
    pipeline = WanPipeline.from_pretrained(folder, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.float()
    config, values = make_config(), {}

    def keep(pipeline, step, timestep, tensors):
        values["latents"] = tensors["latents"]  # those of the last step stay
        return tensors

    with torch.no_grad():
        values["embeddings"] = torch.cat(pipeline.encode_prompt(PROMPT, NEGATIVE, max_sequence_length=tiny.TOKENS))
        made = pipeline(
            prompt=PROMPT, negative_prompt=NEGATIVE, guidance_scale=config.guidance_scale, output_type=output,
            generator=torch.Generator("cpu").manual_seed(config.seed), callback_on_step_end=keep,
            max_sequence_length=tiny.TOKENS, **settings,
        )
    values = {name: value.float().numpy() for name, value in values.items()}
    return values if output == "latent" else values | {"frames": (made.frames[0] * 255).round()}


def results(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


# ---------------------------------------------------------------- two layers, every layout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def references(checkpoint):
    """By whether the tokens are to be spread: what diffusers makes at the larger and at the smaller size."""
    large = run_diffusers(checkpoint, output="latent", **SIZE)
    return {True: large, False: run_diffusers(checkpoint, **SMALL_SIZE)}


@pytest.fixture
def run(checkpoint, tmp_path, cache):
    """Run the tiny model; gives its values."""

    def run_it(*overrides):
        session.results.clear()  # the text is encoded on every mesh
        keep = "output.keep_frames=true"
        config = make_config(*tiny.overrides(checkpoint), *SIZE_OVERRIDES, *TEXTS, cache, keep, *overrides)
        validate(config)
        generate_into(config, tmp_path)
        return results(tmp_path)

    return run_it


NO_DECODE = "stages=[text,denoise]"
ULYSSES_RING = ["sharding=sequence", "sharding.attention.ring=tp"]  # sp traded for heads, tp passed around
LAYOUTS = {  # those that spread the tokens at a size where every device has some, the others at a smaller one
    "one device": [NO_DECODE],
    "no scan": [*SMALL, "model.scan_blocks=false", NO_DECODE],
    "tp": [*SMALL, "mesh=cpu_8", "mesh.axes={dp:1,sp:1,tp:8}", NO_DECODE],
    "dp": [*SMALL, "mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:1}", NO_DECODE],
    "dp and tp": [*SMALL, "mesh=cpu_8"],
    "tokens over sp, Ulysses": ["mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=sequence", NO_DECODE],
    "tokens over sp, whole weights": ["mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=tokens", NO_DECODE],
    "tokens over sp, ring": ["mesh=cpu_8", "mesh.axes={dp:1,sp:8,tp:1}", "sharding=ring", NO_DECODE],
    "heads over tp, tokens in a ring": ["mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}", "sharding=tp_ring", NO_DECODE],
    "Ulysses and ring": ["mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}", *ULYSSES_RING, NO_DECODE],
    "everything everywhere": [*SMALL, "mesh=cpu_8", "sharding=replicate", NO_DECODE],
}


@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_is_diffusers(run, references, overrides):
    values, reference = run(*overrides), references[SMALL[0] not in overrides]
    assert relative_error(values["embeddings"], reference["embeddings"]) < 1e-4
    assert relative_error(values["latents"], reference["latents"]) < 1e-4
    if NO_DECODE not in overrides:
        assert values["frames"].shape == reference["frames"].shape
        assert psnr(values["frames"], reference["frames"]) > 55


def test_every_device_has_tokens_of_its_own():
    """The layouts that spread them send something real between devices, and one of the shares is partly padding."""
    tokens = resolve_here(*SIZE_OVERRIDES).tokens
    assert 7 * LANES < tokens < 8 * LANES
    spread = [name for name, overrides in LAYOUTS.items() if SMALL[0] not in overrides]
    assert {"tokens over sp, Ulysses", "tokens over sp, ring", "heads over tp, tokens in a ring"} <= set(spread)


def test_bfloat16_is_as_close_to_float32_as_diffusers_is(run, checkpoint):
    """Transformer and text encoder in bfloat16, diffusers' as ours; the VAE too, where diffusers has float32."""
    exact = run_diffusers(checkpoint, **SMALL_SIZE)
    theirs = run_diffusers(checkpoint, torch.bfloat16, output="latent", **SMALL_SIZE)
    values = run("model.dtype={text_encoder:bfloat16,transformer:bfloat16,vae:bfloat16}", *SMALL)
    for name in ("embeddings", "latents"):
        ours, peer = distance(values[name], exact[name]), distance(theirs[name], exact[name])
        assert 0 < ours < 1.2 * peer, name
        assert distance(values[name], theirs[name]) < 2 * peer, name
    assert 35 < psnr(values["frames"], exact["frames"]) < 100


# ---------------------------------------------------------------- the embedded model


def test_the_demo_model_is_diffusers(generate):
    """Its own weights, at another size."""
    values = results(generate(*TEXTS))
    reference = run_diffusers(ROOT / "models" / "demo", **SMALL_SIZE)
    assert values["frames"].shape == (5, 64, 64, 3) and values["frames"].std() > 1
    assert relative_error(values["embeddings"], reference["embeddings"]) < 1e-4
    assert relative_error(values["latents"], reference["latents"]) < 1e-4
    assert psnr(values["frames"], reference["frames"]) > 55
