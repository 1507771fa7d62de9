"""The denoising step in JAX, around the transformer.

The exact step is `full`. With a cache (stages/caching.py) or skip-layer guidance several programs share a state and the
host picks one per step:

    full        both prompts through the whole model
    skip        the same, and the prompt once more without some layers
    prompt      the prompt only; the negative prompt's velocity is extrapolated from the last step that computed both
    reuse       no blocks: reuses the last residual of the blocks (MagCache) or of the whole model (EasyCache)
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from wan_torchax.models.family import UP, Output
from wan_torchax.stages.guidance import AVERAGE, CFG, Guider, guide
from wan_torchax.stages.sampling import advance

LOW_FREQUENCIES = 1 / 8  # cycles a latent pixel: the lowest quarter


@dataclass(frozen=True)
class Step:
    """The functions of one denoiser's programs."""

    denoiser: Callable[..., Output]
    dtype: str
    prompts: int  # in one step: prompt and negative prompt, or the prompt alone
    batched: bool
    by_prompt: tuple[str, ...]  # conditions with one entry per prompt; the others are shared
    references: int  # reference latent frames before the video's
    replicated: Any  # a sharding
    mode: str | None = None  # magcache | easycache | calibrate; None: no cache
    rests: bool = False  # some steps extrapolate the negative prompt's velocity
    guider: Guider = CFG
    alone: "Step | None" = None  # that of the prompt alone, for `skip`
    windows: Mapping[str, Callable] = field(default_factory=dict)  # conditions -> what a window sees of them

    # ------------------------------------------------------------ the model

    def forward(self, arrays, latents, time, conditions, residual=None) -> Output:
        """The model on latents (videos, …) for each prompt of the conditions: first the prompts of all videos, then
        their negative prompts."""
        batch = conditions[self.by_prompt[0]].shape[0]
        repeated = jnp.tile(latents.astype(self.dtype), (batch // len(latents),) + (1,) * (latents.ndim - 1))
        output = self.denoiser(arrays, repeated, time, conditions, residual)
        # Replicate: it is small, and sharding the rest of the step would only add collectives.
        velocity = jax.lax.with_sharding_constraint(output.velocity.astype(jnp.float32), self.replicated)
        return output._replace(velocity=velocity)

    def by_windows(self, arrays, latents, schedule, conditions) -> Output:
        """The model on one window of the latents after another; velocities are averaged by the windows' weights. The
        window's size is the program's, however long the video is."""
        table, weights = schedule["windows"], schedule["window_weights"]

        def see(window) -> Output:
            places = table[window]
            cut = {name: self.windows[name](conditions[name], places) for name in self.windows}
            output = self.forward(arrays, latents[:, :, places], schedule["timestep"], conditions | cut)
            return output._replace(residual=None)

        def add(window, sums: Output) -> Output:
            output = see(window)
            weighted = output.velocity * weights[window][:, None, None]
            rescued = None if output.rescued is None else sums.rescued + output.rescued
            return Output(sums.velocity.at[:, :, table[window]].add(weighted), None, rescued)

        def add_if_counted(window, sums: Output) -> Output:
            return jax.lax.cond(weights[window].sum() > 0, lambda: add(window, sums), lambda: sums)

        shapes = jax.eval_shape(see, 0)
        size = shapes.velocity.shape[:2] + latents.shape[2:]
        empty = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)._replace(velocity=jnp.zeros(size))
        sums = jax.lax.fori_loop(0, len(table), add_if_counted, empty)
        covered = jnp.zeros(latents.shape[2]).at[table].add(weights)
        return sums._replace(velocity=sums.velocity / covered[:, None, None])

    def velocities(self, arrays, latents, schedule, conditions, residual=None, skip_prompt=False):
        """Velocities (prompts · videos, channels, frames, height, width), the blocks' residual, and (2,): how many
        attention rows were recomputed, in how many layers. With `skip_prompt`, the prompt's own pass skips layers."""
        latents, arrays = with_first(latents, conditions), with_strengths(arrays, schedule)
        prompted = {name: conditions[name][: self.prompts * len(latents)] for name in self.by_prompt}
        if skip_prompt or self.guider.skip_negative:
            skips = jnp.array([skip_prompt, not skip_prompt][: self.prompts]).repeat(len(latents))
            prompted["skipped"] = skips[:, None] & (schedule["skipped"] > 0)
        kept = {} if residual is None else {"residual": residual}
        if self.guider.nag != 1:
            negative = slice(len(latents), 2 * len(latents))
            conditions = conditions | {f"negative_{name}": conditions[name][negative] for name in self.by_prompt}
        conditions = conditions | {name: schedule[name] for name in ("next_timestep",) if name in schedule}

        def one(own: dict) -> Output:
            own = dict(own)
            residual = own.pop("residual", None)
            if "windows" in schedule:
                return self.by_windows(arrays, latents, schedule, conditions | own)
            return self.forward(arrays, latents, schedule["timestep"], conditions | own, residual)

        if self.prompts == 1 or self.batched:
            output = one(prompted | kept)
            return output.velocity, output.residual, summed(output.rescued)

        def apart(array):
            return array.reshape(self.prompts, len(latents), *array.shape[1:])

        output = jax.lax.map(one, jax.tree.map(apart, prompted | kept))
        velocities, residual = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), output[:2])
        return velocities, residual, summed(None if output.rescued is None else output.rescued.sum(axis=0))

    # ------------------------------------------------------------ programs

    def full(self, arrays, state, schedule, conditions, skipped=None):
        """Every prompt through every block."""
        latents = state["slots"][0]
        velocities, residual, rescued = self.velocities(arrays, latents, schedule, conditions)
        state = state | self.kept(state, latents, velocities, residual)
        if self.rests:
            state["velocities"] = velocities
        return self.finish(state, velocities, schedule, conditions, rescued, skipped)

    def skip(self, arrays, state, schedule, conditions):
        """Every prompt through every block, and the prompt through some of them."""
        skipped, *_ = self.alone.velocities(arrays, state["slots"][0], schedule, conditions, skip_prompt=True)
        return self.full(arrays, state, schedule, conditions, skipped)

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
        """The cached residual on the current latents."""
        latents = state["slots"][0]
        if self.mode == "easycache":
            velocities = latents + state["offsets"]
        else:
            velocities, *_ = self.velocities(arrays, latents, schedule, conditions, state["residual"])
        if self.rests:
            guessed = guess(velocities[:1], state["velocities"], schedule["rest_weights"])
            velocities = jnp.where(schedule["resting"] > 0, jnp.concatenate([velocities[:1], guessed]), velocities)
        return self.finish(state, velocities, schedule, conditions)

    def finish(self, state, velocities, schedule, conditions, rescued=None, skipped=None):
        """Guidance and the scheduler's step; returns the state, a report for the host, and the x0 estimate."""
        velocity, slots = velocities, state["slots"]
        if len(velocities) == 2 * slots.shape[1]:
            velocity, state = guide(self.guider, *jnp.split(velocities, 2), schedule, state, skipped)
        estimate = with_first(slots[0] - schedule["timestep"] / 1000 * velocity, conditions)  # for previews
        estimate = estimate[:, :, self.references :]
        after = advance(slots, velocity, schedule["coefficients"], schedule.get("noise"))
        state = state | {"slots": after}
        if self.mode == "easycache":
            change = jnp.abs(after[0] - slots[0]).mean()
            state["measures"] = state["measures"].at[0].set(change)
        report = {"finite": jnp.isfinite(after[0]).all()} | ({} if rescued is None else {"rescued": rescued})
        return state, report, estimate

    # ------------------------------------------------------------ cache state

    def kept(self, state, latents, velocities, residual) -> dict:
        """The cache state after a computed step."""
        if self.mode == "magcache":
            return {"residual": residual}
        if self.mode == "easycache":
            before = state["offsets"][:1] + state["latents"]  # the prompt's velocity at the last computed step
            measures = [
                jnp.zeros(()), jnp.abs(velocities[:1]).mean(), jnp.abs(velocities[:1] - before).mean(),
                jnp.abs(latents - state["latents"]).mean(),
            ]
            return {"offsets": velocities - latents, "latents": latents, "measures": jnp.stack(measures)}
        if self.mode == "calibrate":
            sizes = [jnp.linalg.norm(array.astype(jnp.float32), axis=2) for array in (residual, state["residual"])]
            real = sizes[1] > 0  # excludes padding, and everything in the first step
            ratios = jnp.where(real, sizes[0] / jnp.where(real, sizes[1], 1), 0).sum(1) / jnp.maximum(real.sum(1), 1)
            return {"residual": residual, "measures": ratios}
        return {}

    def state_structs(self, array, shape: tuple[int, ...], residual_struct) -> dict:
        """Structs of the state besides the scheduler's slots; `array` makes a struct of a shape."""
        pair = (self.prompts, *shape[1:])
        structs = {
            "magcache": {"residual": residual_struct},
            "easycache": {"offsets": array(*pair), "latents": array(*shape), "measures": array(4)},
            "calibrate": {"residual": residual_struct, "measures": array(self.prompts)},
            None: {},
        }[self.mode]
        structs |= {"velocities": array(*pair)} if self.rests else {}
        return structs | ({AVERAGE: array(*shape)} if self.guider.remembers else {})


def summed(rescued):
    """Counts (layers, devices) to (total, layers with any); None stays None."""
    return rescued if rescued is None else jnp.stack([rescued.sum(), (rescued.sum(axis=1) > 0).sum()])


def guess(prompt, last, weights):
    """Extrapolate the negative prompt's velocity (1, channels, frames, height, width): the prompt's plus the last known
    difference, with separate weights for low and high frequencies."""
    height, width = prompt.shape[-2:]
    rows, columns = numpy.abs(numpy.fft.fftfreq(height)), numpy.abs(numpy.fft.rfftfreq(width))
    low = (rows[:, None] <= LOW_FREQUENCIES) & (columns[None] <= LOW_FREQUENCIES)
    weight = jnp.where(low, weights[0], weights[1])
    difference = jnp.fft.irfft2(jnp.fft.rfft2(last[1:] - last[:1]) * weight, (height, width))
    return prompt + difference


def with_strengths(arrays: dict, schedule: dict) -> dict:
    """The transformer's arrays, adapters' factors beside them at this step's strengths, one for each rank."""
    if "strengths" not in schedule:
        return arrays
    return {
        name: (array * schedule["strengths"]).astype(array.dtype) if name.endswith(UP) else array
        for name, array in arrays.items()
    }


def with_first(latents, conditions: dict):
    """The latents with the given first frame in place, if there is one. Where it may be absent, the condition
    `first_given` says whether it is there."""
    if "first_latent" not in conditions:
        return latents
    first = conditions["first_latent"]
    if "first_given" in conditions:
        first = jnp.where(conditions["first_given"] > 0, first, latents[:, :, :1])
    return latents.at[:, :, :1].set(first)
