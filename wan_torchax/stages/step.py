"""What the programs of a denoising step compute, in JAX, around the transformer.

The exact step is `full`. With a cache (stages/caching.py) three programs share a state and the host chooses among them:

    full        both prompts through the whole model
    prompt      the prompt alone; the negative prompt's velocity is guessed from the last two that were computed
    reuse       no block at all: what the blocks added last time (MagCache), or the model as a whole (EasyCache)
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from wan_torchax.models.family import Output
from wan_torchax.stages.sampling import advance

LOW_FREQUENCIES = 1 / 8  # cycles a latent pixel: the lowest quarter


@dataclass(frozen=True)
class Step:
    """The functions of one denoiser's programs."""

    denoiser: Callable[..., Output]
    dtype: str
    prompts: int  # in one step: prompt and negative prompt, or the prompt alone
    batched: bool
    by_prompt: tuple[str, ...]  # conditions that are one for each prompt; the others are all prompts'
    references: int  # latent frames in front of the video's
    replicated: Any  # a sharding
    mode: str | None = None  # magcache | easycache | calibrate; null: nothing is kept
    rests: bool = False  # the negative prompt's velocity is guessed in some steps

    # ------------------------------------------------------------ the model

    def forward(self, arrays, latents, time, conditions, residual=None) -> Output:
        """The model on latents (videos, …) for each prompt of the conditions, those of all videos' prompts before those
        of their negative ones."""
        batch = conditions[self.by_prompt[0]].shape[0]
        repeated = jnp.tile(latents.astype(self.dtype), (batch // len(latents),) + (1,) * (latents.ndim - 1))
        output = self.denoiser(arrays, repeated, time, conditions, residual)
        # Small, and what follows would otherwise be spread over the devices in pieces to be put together again.
        velocity = jax.lax.with_sharding_constraint(output.velocity.astype(jnp.float32), self.replicated)
        return output._replace(velocity=velocity)

    def velocities(self, arrays, latents, schedule, conditions, residual=None):
        """One for each prompt of each video, (prompts · videos, channels, frames, height, width), what the blocks
        added, and how many rows of attention were computed again in how many layers, (2,)."""
        latents = with_first(latents, conditions)
        prompted = {name: conditions[name][: self.prompts * len(latents)] for name in self.by_prompt}
        kept = {} if residual is None else {"residual": residual}

        def one(own: dict) -> Output:
            own = dict(own)
            residual = own.pop("residual", None)
            return self.forward(arrays, latents, schedule["timestep"], conditions | own, residual)

        if self.prompts == 1 or self.batched:
            output = one(prompted | kept)
            return output.velocity, output.residual, summed(output.rescued)

        def apart(array):
            return array.reshape(self.prompts, len(latents), *array.shape[1:])

        output = jax.lax.map(one, jax.tree.map(apart, prompted | kept))
        velocities, residual = (array.reshape(-1, *array.shape[2:]) for array in output[:2])
        return velocities, residual, summed(None if output.rescued is None else output.rescued.sum(axis=0))

    # ------------------------------------------------------------ programs

    def full(self, arrays, state, schedule, conditions):
        """Every prompt through every block."""
        latents = state["slots"][0]
        velocities, residual, rescued = self.velocities(arrays, latents, schedule, conditions)
        state = state | self.kept(state, latents, velocities, residual)
        if self.rests:
            state["velocities"] = velocities
        return self.finish(state, velocities, schedule, conditions, rescued)

    def prompt(self, arrays, state, schedule, conditions):
        """The prompt alone through the blocks."""
        latents = state["slots"][0]
        velocity, residual, rescued = self.velocities(arrays, latents, schedule, conditions)
        velocities = jnp.concatenate([velocity, guess(velocity, state["velocities"], schedule["rest_weights"])])
        if "residual" in state:
            residual = state["residual"].at[:1].set(residual)
        state = state | self.kept(state, latents, velocities, residual)
        return self.finish(state, velocities, schedule, conditions, rescued)

    def reuse(self, arrays, state, schedule, conditions):
        """What was kept, on the latents as they are now."""
        latents = state["slots"][0]
        if self.mode == "easycache":
            velocities = latents + state["offsets"]
        else:
            velocities, *_ = self.velocities(arrays, latents, schedule, conditions, state["residual"])
        if self.rests:
            guessed = guess(velocities[:1], state["velocities"], schedule["rest_weights"])
            velocities = jnp.where(schedule["resting"] > 0, jnp.concatenate([velocities[:1], guessed]), velocities)
        return self.finish(state, velocities, schedule, conditions)

    def finish(self, state, velocities, schedule, conditions, rescued=None):
        """Guidance, the scheduler's step, what is to report of it, and a look at where the flow would end."""
        velocity, slots = velocities, state["slots"]
        if len(velocities) == 2 * slots.shape[1]:
            prompt, negative = jnp.split(velocities, 2)
            velocity = negative + schedule["guidance_scale"] * (prompt - negative)
        # What previews show, of the first frame, the only one that can be decoded alone.
        estimate = with_first(slots[0] - schedule["timestep"] / 1000 * velocity, conditions)
        estimate = estimate[:, :, self.references : self.references + 1]
        after = advance(slots, velocity, schedule["coefficients"], schedule.get("noise"))
        state = state | {"slots": after}
        if self.mode == "easycache":
            change = jnp.abs(after[0] - slots[0]).mean()
            state["measures"] = state["measures"].at[0].set(change)
        report = {"finite": jnp.isfinite(after[0]).all()} | ({} if rescued is None else {"rescued": rescued})
        return state, report, estimate

    # ------------------------------------------------------------ what is kept

    def kept(self, state, latents, velocities, residual) -> dict:
        """Of a step that was computed, for those that will not be."""
        if self.mode == "magcache":
            return {"residual": residual}
        if self.mode == "easycache":
            before = state["offsets"][:1] + state["latents"]  # what the prompt gave at the last computed step
            measures = [
                jnp.zeros(()), jnp.abs(velocities[:1]).mean(), jnp.abs(velocities[:1] - before).mean(),
                jnp.abs(latents - state["latents"]).mean(),
            ]
            return {"offsets": velocities - latents, "latents": latents, "measures": jnp.stack(measures)}
        if self.mode == "calibrate":
            sizes = [jnp.linalg.norm(array.astype(jnp.float32), axis=2) for array in (residual, state["residual"])]
            real = sizes[1] > 0  # not the padding, and nothing in the first step
            ratios = jnp.where(real, sizes[0] / jnp.where(real, sizes[1], 1), 0).sum(1) / jnp.maximum(real.sum(1), 1)
            return {"residual": residual, "measures": ratios}
        return {}

    def state_structs(self, array, shape: tuple[int, ...], residual_struct) -> dict:
        """What the state holds beside the scheduler's slots; `array` makes a struct of a shape."""
        pair = (self.prompts, *shape[1:])
        structs = {
            "magcache": {"residual": residual_struct},
            "easycache": {"offsets": array(*pair), "latents": array(*shape), "measures": array(4)},
            "calibrate": {"residual": residual_struct, "measures": array(self.prompts)},
            None: {},
        }[self.mode]
        return structs | ({"velocities": array(*pair)} if self.rests else {})


def summed(rescued):
    """Of (layers, devices): how many in all, and in how many layers; None stays None."""
    return rescued if rescued is None else jnp.stack([rescued.sum(), (rescued.sum(axis=1) > 0).sum()])


def guess(prompt, last, weights):
    """The negative prompt's velocity (1, channels, frames, height, width) from the prompt's and from both of the last
    step that computed both: their difference, low and high frequencies weighted apart."""
    height, width = prompt.shape[-2:]
    rows, columns = numpy.abs(numpy.fft.fftfreq(height)), numpy.abs(numpy.fft.rfftfreq(width))
    low = (rows[:, None] <= LOW_FREQUENCIES) & (columns[None] <= LOW_FREQUENCIES)
    weight = jnp.where(low, weights[0], weights[1])
    difference = jnp.fft.irfft2(jnp.fft.rfft2(last[1:] - last[:1]) * weight, (height, width))
    return prompt + difference


def with_first(latents, conditions: dict):
    """The latents with the frame that is given, if one is, in its place."""
    return latents.at[:, :, :1].set(conditions["first_latent"]) if "first_latent" in conditions else latents
