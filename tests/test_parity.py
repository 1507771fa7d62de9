"""The same numbers as diffusers' WanPipeline, on the same weights and seed, in float32, on every mesh."""
import numpy
import pytest
import torch
from diffusers import WanPipeline
from safetensors.numpy import load_file

from tests.conftest import ROOT, SMALL, make_config

PROMPT = "a red circle moving right on a white background"
NEGATIVE = "a blue square"


def relative_error(found, wanted):
    return numpy.abs(found - wanted).max() / numpy.abs(wanted).max()


def psnr(found, wanted):
    error = numpy.mean((found.astype(float) - wanted.astype(float)) ** 2)
    return numpy.inf if error == 0 else 10 * numpy.log10(255**2 / error)


@pytest.fixture(scope="module")
def pipeline():
    pipeline = WanPipeline.from_pretrained(ROOT / "models" / "demo", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def reference(pipeline):
    """What diffusers makes of the prompt: embeddings, latents and frames."""
    config = make_config(*SMALL)
    with torch.no_grad():
        embeddings = torch.cat(pipeline.encode_prompt(PROMPT, NEGATIVE, max_sequence_length=512))
    settings = dict(height=64, width=64, num_frames=5, num_inference_steps=3, guidance_scale=config.guidance_scale)
    arguments = dict(prompt=PROMPT, negative_prompt=NEGATIVE, **settings)
    latents = pipeline(**arguments, generator=torch.Generator("cpu").manual_seed(config.seed), output_type="latent").frames
    frames = pipeline(**arguments, generator=torch.Generator("cpu").manual_seed(config.seed), output_type="np").frames[0]
    return {"text": embeddings.numpy(), "denoise": latents.numpy(), "decode": (frames * 255).round()}


def results(folder):
    return {stage: next(iter(load_file(folder / f"{stage}.safetensors").values())) for stage in ("text", "denoise", "decode")}


def check(found, reference):
    assert relative_error(found["text"], reference["text"]) < 1e-4
    assert relative_error(found["denoise"], reference["denoise"]) < 1e-4
    assert psnr(found["decode"], reference["decode"]) > 55


MESHES = {
    "one device": [],
    "no scan": ["model.scan_blocks=false"],
    "tp": ["mesh=cpu_8", "mesh.axes={dp:1,sp:1,tp:8}"],
    "dp": ["mesh=cpu_8", "mesh.devices=2", "mesh.axes={dp:2,sp:1,tp:1}"],
    "dp and tp": ["mesh=cpu_8"],
    "tokens over sp, Ulysses": ["mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=sequence"],
    "tokens over sp, ring": ["mesh=cpu_8", "mesh.axes={dp:1,sp:8,tp:1}", "sharding=ring"],
}


@pytest.mark.parametrize("overrides", MESHES.values(), ids=MESHES)
def test_frames_equal_diffusers(generate, reference, overrides):
    found = results(generate(f"prompt={PROMPT}", f"negative_prompt={NEGATIVE}", *overrides))
    check(found, reference)
    assert found["decode"].shape == (5, 64, 64, 3)
    assert found["decode"].std() > 1
