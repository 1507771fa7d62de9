"""Few steps: given sigmas and samplers that draw fresh noise, each as diffusers steps, and the published recipes."""
import functools

import diffusers
import numpy
import pytest
import torch

from tests import reference, tiny
from tests.conftest import SMALL, make_config, results, run_into
from tests.reference import TEXTS, assert_same
from wan_torchax.config.commandline import CONF, options
from wan_torchax.config.geometry import expert_at
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import idle_axis, validate
from wan_torchax.stages import sampling

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
    (timesteps, coefficients, _), scheduler, shape = sampling.scheduler_table(config), theirs(config), (1, 4, 3, 2, 2)
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
    times, coefficients, sigmas = sampling.scheduler_table(config)
    assert config.steps == 4
    numpy.testing.assert_allclose(times / 1000, [1, 0.9375, 0.83333, 0.625], atol=1e-5)
    numpy.testing.assert_allclose(sigmas, times / 1000, atol=1e-6)
    numpy.testing.assert_allclose(coefficients[:, 0, 0], 1)
    numpy.testing.assert_allclose(coefficients[:, 0, 1], numpy.diff([1, 0.9375, 0.83333, 0.625, 0]), atol=1e-5)


BAD = {
    "scheduler.sigmas=[0.5,0.75]": r"scheduler.sigmas=\[0.5, 0.75\]: must fall from 1 to above 0",
    "scheduler.sigmas=[1,0]": "must fall from 1 to above 0",
    "scheduler.sigmas=[]": "must fall from 1 to above 0",
    "scheduler.sigmas=[1,0.5] steps=4": "steps=4: scheduler.sigmas are 2 steps; steps=2, or leave it out",
    "scheduler.sigmas=[1,0.5] scheduler=dpm": "takes none; use scheduler=euler, unipc or renoise",
    "scheduler.round_times=float8": "scheduler.round_times=float8: unknown",
    "scheduler.noise_scale=0": "scheduler.noise_scale=0.0: must be above 0",
}


@pytest.mark.parametrize("overrides", BAD)
def test_sigmas_that_are_none_are_told(overrides):
    with pytest.raises(ConfigError, match=BAD[overrides]):
        validate(make_config(*overrides.split(" ")))


# ---------------------------------------------------------------- recipes


MODELS = {  # that a recipe is for, where it is not wan21_t2v_14b; and the noise of its steps
    "wan21_i2v_4step": "wan21_i2v_14b_480p", "wan22_t2v_4step": "wan22_t2v_a14b", "wan22_i2v_4step": "wan22_i2v_a14b",
    "wan22_flf2v_4step": "wan22_i2v_a14b", "rcm_4step_i2v": "wan22_i2v_a14b",
}
SHIFTED = {
    "wan22_flf2v_4step": [1, 0.97959, 0.94118, 0.84211], "fastwan_3step": [1, 0.75676, 0.52174],
    "rcm_4step": [0.98765, 0.93378, 0.85290, 0.60898], "rcm_4step_i2v": [0.99502, 0.93378, 0.85290, 0.60898],
    "causvid_9step": [1, 0.934, 0.862, 0.756, 0.603, 0.41, 0.25, 0.14, 0.074],
}


@pytest.mark.parametrize("name", options("sampling"))
def test_a_recipe_is_as_published(name):
    model, pipeline = MODELS.get(name, "wan21_t2v_14b"), ["pipeline=flf2v"] if "flf2v" in name else []
    config = make_config("task=plan", f"model={model}", f"sampling={name}", "resolution=720p", "mesh=v6e_8", *pipeline)
    validate(config)
    times, _, sigmas = sampling.scheduler_table(config)
    numpy.testing.assert_allclose(sigmas, SHIFTED.get(name, [1, 0.9375, 0.83333, 0.625]), atol=2e-5)
    assert config.steps == len(times) and config.guidance_scale == 1 and config.guidance_scale_2 is None
    if len(config.model.experts) == 2:
        assert [expert_at(config, time) for time in times] == ["transformer"] * 2 + ["transformer_2"] * 2
    text = (CONF / "sampling" / f"{name}.yaml").read_text()
    assert f"sampling={name}" in text and "# Source: " in text and "Not verified with the real weights" in text


LARGEST = {"rcm_4step": 80, "rcm_4step_i2v": 200}  # rCM's sigmas
TOLD = {"rcm_4step": [988, 932, 852, 608], "rcm_4step_i2v": [996, 932, 852, 608], "fastwan_3step": [1000, 757, 522]}
FRESH = {"rcm_4step": True, "rcm_4step_i2v": False, "fastwan_3step": True}  # whether each step draws noise
SWITCHED = {"renoise": True, "euler": False}


@pytest.mark.parametrize("solver", [None, *SWITCHED])
@pytest.mark.parametrize("name", TOLD)
def test_a_recipe_is_the_published_formula(name, solver):
    """TurboWan's and FastWan's samplers in float64, with a made-up model, and through our table."""
    on_top = [] if solver is None else [f"scheduler={solver}"]
    config = make_config(f"model={MODELS.get(name, 'wan21_t2v_14b')}", f"sampling={name}", *on_top)
    fresh = FRESH[name] if solver is None else SWITCHED[solver]
    if name in LARGEST:
        ratios = numpy.array([LARGEST[name], *numpy.tan([1.5, 1.4, 1.0])])
        times = ratios / (1 + ratios)
    else:
        even = numpy.array([1, 0.28, 0.12])
        times = 8 * even / (1 + 7 * even)
    table, draws = sampling.scheduler_table(config), sampling.noises(0, (1, 4, 3, 2, 2))
    assert table.timesteps.tolist() == TOLD[name]
    assert (table.coefficients.shape[2] == table.coefficients.shape[1] + 2) == fresh
    first = next(draws)
    latents = times[0] * first.astype(float)
    state = numpy.float32(config.scheduler.noise_scale) * first[None]
    for index, (time, after) in enumerate(zip(times, [*times[1:], 0])):
        noise = next(draws) if fresh else None
        velocity = numpy.sin(3 * latents) + TOLD[name][index] / 1000
        if fresh:
            latents = (1 - after) * (latents - time * velocity) + after * noise
        else:
            latents = latents - (time - after) * velocity
        told = numpy.sin(3 * state[0]) + table.timesteps[index] / 1000
        state = sampling.advance(state, told, table.coefficients[index], noise)
        numpy.testing.assert_allclose(state[0], latents, atol=1e-5)


def test_a_recipe_goes_on_top_of_a_preset():
    config = make_config("preset=t2v_14b_720p_v6e8_v1", "sampling=wan21_t2v_4step", "task=plan")
    validate(config)
    assert (config.steps, config.guidance_scale, config.scheduler.name) == (4, 1.0, "euler")
    assert idle_axis(config) is None, "without guidance its tokens are over dp too"
    by_heads = make_config("model=wan21_t2v_14b", "resolution=720p", "mesh=v6e_8", "sampling=wan21_t2v_4step")
    assert "sharding=sequence mesh.axes={dp:1,sp:8,tp:1}" in idle_axis(by_heads)
    assert idle_axis(make_config("preset=t2v_14b_720p_v6e8_v1")) is None
    assert idle_axis(make_config("preset=t2v_14b_720p_4step_v6e8_v1")) is None


# ---------------------------------------------------------------- whole runs


def test_a_renoised_run_is_diffusers(tmp_path):
    """The first noise scaled, as rCM wants it."""
    size = [text for text in SMALL if not text.startswith("steps=")]
    few = ["scheduler=renoise", FOUR, "scheduler.noise_scale=0.9", "guidance_scale=1"]
    overrides = [*size, *TEXTS, *tiny.model(), *few]
    config, values = make_config(*overrides), results(run_into(tmp_path, *overrides))
    pipeline = reference.load(tiny.checkpoint("text"), config)
    pipeline.scheduler = scheduler = theirs(config)
    generator = torch.Generator().manual_seed(config.seed)
    latents = config.scheduler.noise_scale * torch.randn(values["latents"].shape, generator=generator)
    scheduler.step = functools.partial(scheduler.step, generator=generator)
    set_timesteps = scheduler.set_timesteps
    scheduler.set_timesteps = lambda *_, **__: set_timesteps(sigmas=list(config.scheduler.sigmas))
    assert_same(values, *reference.make(pipeline, config, latents=latents))
