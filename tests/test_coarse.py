"""Coarse first: where the change is, that it is the published loop around diffusers' transformer, what is refused."""
import copy
import re
import sys

import diffusers
import numpy
import pytest
import scipy.fft
import torch
from PIL import Image
from safetensors.numpy import save_file

from tests import reference, tiny
from tests.conftest import ROOT, make_config, metrics, results, run_into
from tests.reference import TEXTS, relative_error
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.runtime.jobs import plan_job
from wan_torchax.session import session
from wan_torchax.stages.coarse import Coarse
from wan_torchax.stages.denoise import Denoise
from wan_torchax.stages.enlarge import cosines, enlarged
from wan_torchax.stages.sampling import coarse_steps, scheduler_table

DELTAS = 0.01, 0.02, 0.05, 0.10
PUBLISHED = {  # model, height, shift: coarse steps for each delta
    ("wan21_t2v_1_3b", "480p", 480, 5): [23, 27, 33, 37],
    ("wan21_t2v_14b", "720p", 704, 5): [29, 33, 38, 41],
    ("wan22_t2v_a14b", "720p", 704, 12): [31, 33, 36, 37],
}
# Of eight steps three are coarse. With SPREAD, four; and every device has tokens at both sizes.
SPREAD = ["resolution.height=128", "resolution.width=192", "resolution.frames=13"]
SHORT = [*TEXTS, "resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=8"]
COARSE = "pipeline=t2v_coarse"


def split(config):
    *_, height, width = family_of(config).geometry(config.model.architecture).latent_shape(config.resolution)
    return coarse_steps(config, height // 2, width // 2)


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_the_change_is_where_it_is_published(case):
    model, resolution, height, shift = case
    size = [f"resolution={resolution}", f"resolution.height={height}", f"resolution.flow_shift={shift}"]
    configs = [make_config(f"model={model}", *size, COARSE, f"coarse_delta={delta}") for delta in DELTAS]
    for config in configs:
        validate(config)
    assert [split(config) for config in configs] == PUBLISHED[case]
    assert split(make_config(f"model={model}", *size, COARSE)) == PUBLISHED[case][2], "the default"


def test_enlarged_latents_are_the_published_ones():
    generator = numpy.random.default_rng(0)
    latents = generator.normal(size=(1, 4, 3, 6, 10)).astype(numpy.float32)
    noise = generator.normal(size=(1, 4, 3, 12, 20)).astype(numpy.float32)
    sigma = 0.6
    made = enlarged(latents, noise, 2 * sigma / (1 + sigma))
    numpy.testing.assert_allclose(made, published(latents, noise, sigma), atol=1e-5)
    assert made.dtype == numpy.float32
    numpy.testing.assert_allclose(cosines(7), scipy.fft.dct(numpy.eye(7), axis=0, norm="ortho"), atol=1e-6)


def published(latents, noise, sigma):
    """The published change of size."""
    height, width = latents.shape[-2:]
    frequencies = sigma * noise
    frequencies[..., :height, :width] = scipy.fft.dctn(latents, axes=(-2, -1), norm="ortho")
    return 2 / (1 + sigma) * scipy.fft.idctn(frequencies, axes=(-2, -1), norm="ortho")


# ---------------------------------------------------------------- the whole loop


@torch.no_grad()
def in_torch(kind, config, values, processor=None):
    """The latents by the published loop over diffusers' transformers and scheduler; `processor` of self-attention."""
    folder = tiny.checkpoint(kind)
    loaded = {name: diffusers.WanTransformer3DModel.from_pretrained(folder / name) for name in config.model.experts}
    for block in (block for transformer in loaded.values() for block in transformer.blocks):
        block.attn1.set_processor(processor or block.attn1.processor)
    given = {name: torch.tensor(array) for name, array in values.items()}
    scheduler, change, seed = reference.scheduler(config), split(config), config.seed
    scheduler.set_timesteps(config.steps)
    *shape, height, width = values["latents"].shape
    latents = torch.randn(*shape, height // 2, width // 2, generator=torch.Generator().manual_seed(seed))
    for step in range(config.steps):
        if step == change:
            sigma, fresh = float(scheduler.sigmas[step]), torch.Generator().manual_seed(seed + 10_000)
            noise = torch.randn(*shape, height, width, generator=fresh)
            latents = torch.tensor(published(latents.numpy(), noise.numpy(), sigma)).float()
            sigmas, timesteps = copy.deepcopy((scheduler.sigmas, scheduler.timesteps))
            scheduler = reference.scheduler(config)  # its history begins anew
            scheduler.set_timesteps(config.steps)
            sigmas[step], timesteps[step] = 2 * sigma / (1 + sigma), 1000 * 2 * sigma / (1 + sigma)
            scheduler.sigmas, scheduler.timesteps = sigmas, timesteps
            scheduler.set_begin_index(step)
        time = scheduler.timesteps[step]
        name = config.model.experts[-1 if time < 1000 * (config.model.boundary or 0) else 0]
        condition = given.get("coarse_condition" if step < change else "condition")
        taken = latents if condition is None else torch.cat([latents, condition], dim=1)
        prompt, negative = (
            loaded[name](taken, time[None], text[None], given.get("image_embeddings"), return_dict=False)[0]
            for text in given["embeddings"]
        )
        velocity = negative + config.guidance_scale * (prompt - negative)
        latents = scheduler.step(velocity, time, latents, return_dict=False)[0]
    return latents.numpy()


@pytest.fixture
def run(tmp_path):
    """Run a tiny model; gives its config, its values and its folder."""

    def run_it(kind, *overrides, folder="run"):
        arguments = [*tiny.model(kind), *overrides]
        made = run_into(tmp_path / folder, *arguments)
        return make_config(*arguments), results(made), made

    return run_it


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("given") / "picture.png"
    pixels = numpy.random.default_rng(0).integers(0, 255, (90, 150, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).resize((300, 180), Image.Resampling.BICUBIC).save(path)
    return path


def on(axes, sharding):
    return ["mesh=cpu_8", f"mesh.axes={axes}", f"sharding={sharding}"]


NO_DECODE = "stages=[text,coarse,denoise]"
FULL, SYSTEM = pytest.mark.full, pytest.mark.system
EXPERTS = ["model.experts=[transformer,transformer_2]", "model.boundary=0.8"]
CASES = [
    pytest.param("text", [COARSE, NO_DECODE], id="unipc"),
    pytest.param(
        "pictured", ["pipeline=i2v_coarse", *EXPERTS, "scheduler=euler"], id="a picture, two experts", marks=SYSTEM,
    ),
    # diffusers takes the last 512 tokens for the text's
    pytest.param("seen", ["pipeline=i2v_clip_coarse", "model.text_tokens=512"], id="a picture's tokens", marks=FULL),
    pytest.param("text", [COARSE, NO_DECODE, *SPREAD, *on("{dp:2,sp:2,tp:2}", "tp_ring")], id="ring", marks=SYSTEM),
    pytest.param("text", [COARSE, NO_DECODE, *SPREAD, *on("{dp:2,sp:4,tp:1}", "tokens")], id="tokens", marks=FULL),
    pytest.param("pictured", ["pipeline=i2v_coarse", *on("{dp:1,sp:1,tp:8}", "tp")], id="tp", marks=FULL),
]


@pytest.mark.parametrize("kind, overrides", CASES)
def test_the_loop_is_the_published_one_around_diffusers(run, picture, kind, overrides):
    given = [] if kind == "text" else [f"image={picture}"]
    config, values, folder = run(kind, *SHORT, *overrides, *given)
    assert 1 < split(config) < config.steps - 1
    assert relative_error(values["latents"], in_torch(kind, config, values)) < 1e-4
    work = metrics(folder)
    assert work["step_work"] == {"coarse": split(config), "full": config.steps - split(config)}
    assert work["step_flops"] == Denoise.flops(plan_job(config))["total"], "of a step of the full size"


@pytest.mark.system
def test_the_condition_of_coarse_steps_is_that_of_a_video_of_their_size(run, picture):
    given = [f"image={picture}", *SHORT]
    _, values, _ = run("pictured", "pipeline=i2v_coarse", "stages=[encode,coarse_encode]", *given)
    size = ["resolution.height=32", "resolution.width=32", "model.min_size=32"]
    _, small, _ = run("pictured", "pipeline=i2v", "stages=[encode]", *given, *size, folder="small")
    numpy.testing.assert_array_equal(values["coarse_condition"], small["condition"])


# ---------------------------------------------------------------- with other options


def test_the_steps_are_the_schedulers():
    """Without coarse steps its table bit for bit; the coarse ones are its first rows bit for bit."""
    plain = plan_job(make_config(*tiny.model(), *SHORT))
    whole = scheduler_table(plain.config)
    assert Denoise.table(plain.config, plain.geometry, None) is whole
    small = plan_job(make_config(*tiny.model(), *SHORT, COARSE)).halved()
    for column, rows in zip(Coarse.table(small.config, small.geometry, None), whole):
        numpy.testing.assert_array_equal(column, rows[:3])
    assert small.latent_shape[-2:] == (4, 4) and small.halved() is small


def test_it_resumes_from_the_coarse_latents(run, tmp_path):
    _, whole, folder = run("text", *SHORT, COARSE, NO_DECODE)
    (folder / "denoise.safetensors").unlink()
    again = run_into(tmp_path / "again", f"resume={folder}", *tiny.model())
    numpy.testing.assert_array_equal(results(again)["latents"], whole["latents"])
    assert metrics(again)["step_work"] == {"full": 5}, "coarse steps are not computed again"


def test_a_cache_is_for_the_steps_behind_the_coarse_ones(run):
    magcache = ["cache=magcache", "cache.curve=demo", "cache.threshold=1"]
    _, values, folder = run("text", *SHORT, COARSE, NO_DECODE, *magcache)
    assert metrics(folder)["step_work"] == {"coarse": 3, "full": 2, "reuse": 3}
    _, exact, _ = run("text", *SHORT, COARSE, NO_DECODE, folder="exact")
    numpy.testing.assert_array_equal(values["coarse_latents"], exact["coarse_latents"])
    assert 0 < relative_error(values["latents"], exact["latents"]) < 0.5


REFUSED = {
    "spectrum": (["model=wan22_ti2v_5b", "resolution=704p"], "model.spectrum"),
    "numbers": ([*SHORT, "model.spectrum=[1,2,3]"], "an amplitude and an exponent"),
    "size": (["model=wan21_t2v_14b", "resolution=720p"], "resolution.height=720: must be a multiple of 32"),
    "guidance": ([*SHORT, "cache=guidance"], "cache=guidance lets guidance rest"),
    "zero steps": ([*SHORT, "guider=cfg_zero"], "guider.zero_steps=1: counts a video's first steps"),
    "calibrate": ([*SHORT, "task=calibrate"], "a curve is of steps of one size"),
    "delta": ([*SHORT, "coarse_delta=2"], "coarse_delta=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    overrides, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        validate(make_config(COARSE, *overrides))


def test_a_delta_is_refused_where_nothing_is_coarse():
    with pytest.raises(ConfigError, match="coarse_delta=0.02: pipeline=t2v does not use it"):
        validate(make_config("coarse_delta=0.02"))


@pytest.mark.parametrize("override, which", [("coarse_delta=0", "none"), ("model.spectrum=[1,19]", "all")])
def test_steps_of_one_size_only_are_refused(override, which):
    with pytest.raises(ConfigError, match=f"{which} of 8 steps would be coarse"):
        session.resolve(make_config(*tiny.model(), *SHORT, COARSE, override), ["coarse", "denoise"])


def test_a_spectrum_is_fitted_to_latents(tmp_path, monkeypatch, capsys):
    """Noise whose power falls as 5 / frequency^1.5, of any size."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import fit_spectrum

    generator = numpy.random.default_rng(0)
    waves = numpy.hypot(numpy.fft.fftfreq(32)[:, None] * 32, numpy.fft.fftfreq(48)[None] * 32)
    noise = generator.normal(size=(1, 16, 9, 32, 48))
    shaped = numpy.fft.ifft2(numpy.fft.fft2(noise) * numpy.sqrt(5 / numpy.maximum(waves, 1) ** 1.5)).real
    save_file({"video_latents": shaped.astype(numpy.float32)}, tmp_path / "encode.safetensors")
    monkeypatch.setattr(sys, "argv", ["fit_spectrum.py", str(tmp_path / "encode.safetensors")])
    fit_spectrum.main()
    amplitude, exponent = map(float, re.search(r"spectrum=\[(.+),(.+)\]", capsys.readouterr().out).groups())
    assert amplitude == pytest.approx(5, rel=0.15) and exponent == pytest.approx(1.5, abs=0.1)  # rings have a width
