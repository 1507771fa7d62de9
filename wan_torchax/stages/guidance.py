"""How the velocities of prompt and negative prompt become one: classifier-free guidance and its relatives.

    velocity, state = guide(guider, prompt, negative, schedule, state, skipped)

Velocities are (videos, channels, frames, height, width) in float32. conf/guider explains the settings; formulas are
those of diffusers.guiders, with which tests compare.
"""
from dataclasses import dataclass

import jax.numpy as jnp

AVERAGE = "guidance_average"  # in the state: differences of earlier steps (APG)


@dataclass(frozen=True)
class Guider:
    """The settings of conf/guider that programs depend on."""

    mode: str | None = None
    rescale: float = 0.0
    zero_steps: int = 0
    momentum: float = 0.0
    parallel: float = 1.0
    most_norm: float = 0.0
    skip_layers: tuple[int, ...] = ()
    skip_scale: float = 0.0
    skip_negative: bool = False
    nag: float = 1.0

    @property
    def remembers(self) -> bool:
        return self.mode == "apg" and self.momentum != 0


CFG = Guider()


def guide(guider: Guider, prompt, negative, schedule: dict, state: dict, skipped=None):
    """The guided velocity, and the state with what the next step needs. A scale of 1 is the prompt's velocity alone.
    `skipped` is the prompt's velocity without some layers."""
    scale = schedule["guidance_scale"]
    difference = prompt - negative
    if guider.mode == "cfg_zero":
        fitted = negative * (total(prompt * negative) / (total(negative**2) + 1e-8))
        negative, difference = fitted, prompt - fitted
    if guider.mode == "apg":
        if guider.remembers:
            average = jnp.where(scale == 1, state[AVERAGE], difference + guider.momentum * state[AVERAGE])
            difference, state = average, state | {AVERAGE: average}
        difference = projected(guider, difference, prompt)
        negative = prompt - difference  # what is projected away is missing from guidance alone, not from the prompt's
    velocity = negative + scale * difference
    if guider.mode is not None:
        velocity = jnp.where(scale == 1, prompt, velocity)
    if skipped is not None:
        velocity = velocity + guider.skip_scale * (prompt - skipped)
    if guider.rescale:
        velocity = velocity * (1 - guider.rescale + guider.rescale * deviation(prompt) / deviation(velocity))
    if guider.zero_steps:
        velocity = jnp.where(schedule["zeroed"] > 0, 0, velocity)
    return velocity, state


def projected(guider: Guider, difference, prompt):
    """The difference, not longer than a limit, with less of it along the prompt's velocity."""
    if guider.most_norm:
        norm = jnp.sqrt(total(difference**2))
        difference = difference * jnp.minimum(1, guider.most_norm / jnp.maximum(norm, 1e-12))
    direction = prompt / jnp.maximum(jnp.sqrt(total(prompt**2)), 1e-12)
    along = total(difference * direction) * direction
    return difference - (1 - guider.parallel) * along


def total(array):
    """The sum over each video."""
    return array.sum(axis=range(1, array.ndim), keepdims=True)


def deviation(array):
    return array.std(axis=range(1, array.ndim), keepdims=True)
