"""Guidance: prompt and negative prompt are combined as diffusers' guiders do, step by step."""
import jax.numpy as jnp
import numpy
import pytest
import torch
from diffusers import guiders
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer

from tests.conftest import make_config, results
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.stages.denoise import guider_of, schedule_rows
from wan_torchax.stages.guidance import AVERAGE, guide
from wan_torchax.stages.sampling import scheduler_table

SCALE, STEPS = 6.0, 4
SHAPE = 2, 3, 2, 4, 5  # two videos: each has its own norms
THEIRS = {  # overrides -> diffusers' guider
    "guider=cfg": lambda: guiders.ClassifierFreeGuidance(SCALE),
    "guider.rescale=0.7": lambda: guiders.ClassifierFreeGuidance(SCALE, guidance_rescale=0.7),
    "guider=cfg_zero": lambda: guiders.ClassifierFreeZeroStarGuidance(SCALE, zero_init_steps=1),
    "guider=cfg_zero guider.zero_steps=0 guider.rescale=0.3":
        lambda: guiders.ClassifierFreeZeroStarGuidance(SCALE, zero_init_steps=0, guidance_rescale=0.3),
    "guider=apg guider.most_norm=9": lambda: guiders.AdaptiveProjectedGuidance(
        SCALE, adaptive_projected_guidance_momentum=-0.75, adaptive_projected_guidance_rescale=9.0, eta=0.0),
    "guider=apg guider.momentum=0 guider.parallel=0.4 guider.most_norm=0": lambda: guiders.AdaptiveProjectedGuidance(
        SCALE, adaptive_projected_guidance_momentum=None, adaptive_projected_guidance_rescale=0.0, eta=0.4),
}


@pytest.mark.parametrize("overrides", THEIRS)
def test_every_step_is_diffusers(overrides):
    theirs, guider = THEIRS[overrides](), guider_of(make_config(*overrides.split()))
    if guider.remembers:  # theirs begins to when it is given inputs
        theirs.momentum_buffer = MomentumBuffer(guider.momentum)
    rng, state = numpy.random.default_rng(0), {AVERAGE: jnp.zeros(SHAPE)}
    for step in range(STEPS):
        theirs.set_state(step, STEPS, torch.tensor(1000.0 - step))
        prompt, negative = rng.normal(size=(2, *SHAPE)).astype("float32")
        expected = theirs.forward(torch.tensor(prompt), torch.tensor(negative)).pred.numpy()
        schedule = {"guidance_scale": jnp.float32(SCALE), "zeroed": jnp.float32(step < guider.zero_steps)}
        found, state = guide(guider, jnp.asarray(prompt), jnp.asarray(negative), schedule, state)
        numpy.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cfg", "cfg_zero", "apg"])
def test_a_scale_of_one_is_the_prompt_alone(name):
    guider, (prompt, negative) = guider_of(make_config(f"guider={name}")), jnp.ones((2, *SHAPE)) * 3
    state = {AVERAGE: jnp.full(SHAPE, 5.0)}
    schedule = {"guidance_scale": jnp.float32(1), "zeroed": jnp.float32(0)}
    found, after = guide(guider, prompt, negative * 0.5, schedule, state)
    numpy.testing.assert_allclose(found, prompt, rtol=1e-6)
    numpy.testing.assert_array_equal(after[AVERAGE], state[AVERAGE])


def test_the_first_steps_change_nothing():
    config = make_config("guider=cfg_zero", "guider.zero_steps=2", "steps=5")
    assert list(schedule_rows(config, scheduler_table(config, None))["zeroed"]) == [1, 1, 0, 0, 0]


@pytest.mark.system
def test_a_run_with_each(generate):
    """One video apart from the other; CFG-Zero*'s only step of one changes nothing."""
    common = "steps=3", "guidance_scale=4", "stages=[text,denoise]"
    made = {name: results(generate(*common, *name.split(), folder=name))["latents"]
            for name in ("guider=cfg", "guider=cfg_zero", "guider=apg guider.most_norm=1")}
    first, *others = made.values()
    assert all(numpy.isfinite(one).all() and numpy.abs(one - first).max() > 1e-3 for one in others)
    still = [results(generate("steps=1", "guider=cfg_zero", f"guidance_scale={scale}", "stages=[text,denoise]",
                              folder=f"still{scale}"))["latents"] for scale in (3, 9)]
    numpy.testing.assert_array_equal(*still)


WRONG = {
    ("guider=apg", "guidance_scale=1"): "combines prompt and negative prompt, and guidance_scale=1.0 is none",
    ("guider=cfg_zero", "model=flux1_dev"): "guidance is an input of the model; use guider=cfg",
    ("guider.mode=apgg",): "guider.mode=apgg: unknown; nearest: apg",
    ("guider.momentum=0.5",): "momentum, parallel and most_norm are of guider=apg",
    ("guider.rescale=2",): "guider.rescale=2.0: must be from 0 to 1",
    ("guider=cfg_zero", "guider.zero_steps=99"): "guider.zero_steps=99: must be from 0 to",
}


@pytest.mark.parametrize("overrides", WRONG, ids=str)
def test_what_cannot_be_is_told(overrides):
    with pytest.raises(ConfigError, match=WRONG[overrides]):
        validate(make_config(*overrides))
