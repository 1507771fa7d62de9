"""Few steps: given sigmas and samplers that draw fresh noise, each as diffusers steps, and the published recipes."""
import functools

import diffusers
import numpy
import pytest
import torch

from tests import tiny
from tests.conftest import SMALL, make_config
from tests.test_parity import NEGATIVE, PROMPT, TEXTS, psnr, results
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.session import session
from wan_torchax.stages import sampling
from wan_torchax.tasks.generate import generate as generate_into

FOUR = "scheduler.sigmas=[1,0.75,0.5,0.25]"
SAMPLERS = {
    "euler": ["scheduler=euler"], "unipc": ["scheduler=unipc"], "renoise": ["scheduler=renoise"],
    "stochastic euler": ["scheduler=euler", "+scheduler.arguments.stochastic_sampling=true"],
    "sde": ["scheduler=dpm", "scheduler.arguments.algorithm_type=sde-dpmsolver++"],
}


def theirs(config):
    """diffusers' own scheduler, set up as its pipelines would."""
    scheduler = getattr(diffusers, config.scheduler.target)(**config.scheduler.arguments)
    given = {} if config.scheduler.sigmas is None else {"sigmas": numpy.float32(config.scheduler.sigmas)}
    scheduler.set_timesteps(**given or {"num_inference_steps": config.steps})
    return scheduler


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_step_is_diffusers(name):
    """A made-up model through diffusers' scheduler, drawing from the seed's generator, and through our table."""
    config = make_config(*SAMPLERS[name], "resolution.flow_shift=5", "steps=4" if name == "sde" else FOUR)
    validate(config)
    (timesteps, coefficients), scheduler, shape = sampling.scheduler_table(config), theirs(config), (1, 4, 3, 2, 2)
    generator, draws = torch.Generator().manual_seed(config.seed), sampling.noises(config.seed, shape)
    latents = torch.randn(shape, generator=generator)
    state = numpy.zeros((coefficients.shape[1], *shape), numpy.float32)
    state[0] = next(draws)
    draws_noise = coefficients.shape[2] == coefficients.shape[1] + 2
    assert draws_noise == (name in ("renoise", "stochastic euler", "sde"))
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = torch.sin(3 * latents) + timestep / 1000
        latents = scheduler.step(
            velocity, timestep, latents, return_dict=False, **({"generator": generator} if draws_noise else {})
        )[0]
        velocity = numpy.sin(3 * state[0]) + timesteps[index] / 1000
        state = sampling.advance(state, velocity, coefficients[index], next(draws) if draws_noise else None)
        numpy.testing.assert_allclose(state[0], latents.numpy(), atol=2e-5)
    assert numpy.array_equal(timesteps, scheduler.timesteps.numpy().astype("float32"))


def test_diffusers_draws_its_own_noise_again_afterwards():
    sampling.read_off("FlowMatchLCMScheduler", "{}", sampling.Steps(3))
    assert diffusers.schedulers.scheduling_flow_match_lcm.randn_tensor is diffusers.utils.torch_utils.randn_tensor


def test_distilled_models_get_their_sigmas():
    config = make_config("scheduler=euler", FOUR, "resolution.flow_shift=5")
    times, coefficients = sampling.scheduler_table(config)
    assert config.steps == 4
    numpy.testing.assert_allclose(times / 1000, [1, 0.9375, 0.83333, 0.625], atol=1e-5)
    numpy.testing.assert_allclose(coefficients[:, 0, 0], 1)
    numpy.testing.assert_allclose(coefficients[:, 0, 1], numpy.diff([1, 0.9375, 0.83333, 0.625, 0]), atol=1e-5)


BAD = {
    "scheduler.sigmas=[0.5,0.75]": r"scheduler.sigmas=\[0.5, 0.75\]: must fall from 1 to above 0",
    "scheduler.sigmas=[1,0]": "must fall from 1 to above 0",
    "scheduler.sigmas=[]": "must fall from 1 to above 0",
    "scheduler.sigmas=[1,0.5] steps=4": "steps=4: scheduler.sigmas are 2 steps; steps=2, or leave it out",
    "scheduler.sigmas=[1,0.5] scheduler=dpm": "takes none; use scheduler=euler, unipc or renoise",
    "scheduler.noise_scale=0": "scheduler.noise_scale=0.0: must be above 0",
}


@pytest.mark.parametrize("overrides", BAD)
def test_sigmas_that_are_none_are_told(overrides):
    with pytest.raises(ConfigError, match=BAD[overrides]):
        validate(make_config(*overrides.split(" ")))


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def test_a_renoised_run_is_diffusers(checkpoint, cache, tmp_path):
    """The first noise scaled, as rCM wants it."""
    session.clear()
    size = [text for text in SMALL if not text.startswith("steps=")]
    few = ["scheduler=renoise", FOUR, "scheduler.noise_scale=0.9", "guidance_scale=1"]
    config = make_config(*size, *TEXTS, cache, *tiny.overrides(checkpoint), *few)
    validate(config)
    generate_into(config, tmp_path)
    values = results(tmp_path)
    pipeline = diffusers.WanPipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = scheduler = theirs(config)
    generator = torch.Generator().manual_seed(config.seed)
    latents = config.scheduler.noise_scale * torch.randn(values["latents"].shape, generator=generator)
    scheduler.step = functools.partial(scheduler.step, generator=generator)
    set_timesteps = scheduler.set_timesteps
    scheduler.set_timesteps = lambda *_, **__: set_timesteps(sigmas=list(config.scheduler.sigmas))
    frames = pipeline(
        prompt=PROMPT, negative_prompt=NEGATIVE, height=64, width=64, num_frames=5, num_inference_steps=4,
        guidance_scale=1.0, latents=latents, output_type="np",
    ).frames[0]
    assert psnr(values["frames"], (frames * 255).round()) > 55
