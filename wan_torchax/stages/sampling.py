"""diffusers' schedulers as coefficient tables, so that their steps run inside the compiled program."""
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy
from omegaconf import OmegaConf

from wan_torchax import private
from wan_torchax.config import coarse
from wan_torchax.config.geometry import steps_skipped
from wan_torchax.config.schema import ConfigError
from wan_torchax.records.provenance import sources, versions
from wan_torchax.records.store import Store

USUAL = "use scheduler=unipc, euler, dpm or renoise"
GROUP = 16  # torch generates normal values in groups of this size


def advance(state, velocity, coefficients, noise=None):
    """new slot = Σ coefficient · (old slots, the model's output and, if the scheduler draws it, fresh noise):
    (slots, 1, channels, frames, height, width).

    Written as sums of scaled arrays, not as a matrix product, which a TPU would round to bfloat16.
    """
    import jax.numpy as jnp

    terms = [*state, velocity] if noise is None else [*state, velocity, noise]
    return jnp.stack([sum(row[index] * term for index, term in enumerate(terms)) for row in coefficients])


class Table(NamedTuple):
    """A scheduler as a table, one row per step."""

    timesteps: numpy.ndarray  # (steps,): as the model takes them
    coefficients: numpy.ndarray  # (steps, slots, slots + 1), or + 2
    sigmas: numpy.ndarray  # (steps,): noise level of a step's input


@dataclass(frozen=True)
class Steps:
    """A scheduler's step count or its sigmas before the shift, and the first step to run."""

    count: int
    sigmas: tuple[float, ...] | None = None
    begin: int = 0
    rewinds: bool = False  # the first step to run begins with more noise: enlarged latents (stages/enlarge.py)

    @property
    def taken(self) -> int:
        return self.count - self.begin


def scheduler_table(config, store: Store | None = None, behind_coarse: int = 0) -> Table:
    """A diffusers scheduler as a table: timesteps (steps,) and coefficients (steps, slots, slots + 1).

    A scheduler's step is linear in the latents, the model's output, its history and the noise it draws. Feeding it unit
    vectors returns the coefficients. The step then runs inside the compiled program, for any scheduler, without a
    round trip to the host. Slot 0 is the latents; a scheduler that draws noise has one more column, the last. Behind
    coarse steps it begins anew, with the noise level of their enlarged latents.
    """
    target, arguments = config.scheduler.target, OmegaConf.to_container(config.scheduler.arguments, resolve=True)
    try:
        sigmas = config.scheduler.sigmas and tuple(config.scheduler.sigmas)
        if sigmas is None and config.scheduler.linear:
            sigmas = tuple(1 - step / config.steps for step in range(config.steps))
        steps = Steps(config.steps, sigmas, behind_coarse or steps_skipped(config), behind_coarse > 0)
        table = find_table(target, json.dumps(arguments, sort_keys=True), steps, store)
    except ConfigError:
        raise
    except Exception as error:  # schedulers raise different errors for invalid arguments
        raise ConfigError(f"scheduler.target={target}: fails with {arguments} ({error}); {USUAL}") from error
    rounding = config.scheduler.round_times
    return table if rounding is None else table._replace(timesteps=ROUNDINGS[rounding](table.timesteps))


def coarse_steps(config, height: int, width: int, store: Store | None = None) -> int:
    """How many steps have coarse latents, which are of this size."""
    count = int((scheduler_table(config, store).sigmas > coarse.last_sigma(config, height, width)).sum())
    if not 0 < count < config.steps:
        few = f"{'none' if count == 0 else 'all'} of {config.steps} steps would be coarse"
        remedy = f"give coarse_delta a {'larger' if count == 0 else 'smaller'} value, or more steps"
        raise ConfigError(f"pipeline={config.pipeline.name}: {few}; {remedy}, or use the pipeline without")
    return count


@functools.lru_cache(maxsize=8)  # building and running a stage both need it
def find_table(target: str, arguments: str, steps: Steps, store: Store | None) -> Table:
    """From the store, else from the scheduler itself, which needs torch and diffusers."""
    made_from = {"target": target, "arguments": arguments, "steps": asdict(steps)}
    made_from |= {"versions": versions(), "sources": sources()}
    if entry := store and store.read("scheduler", made_from):
        return Table(**entry.arrays)
    table = read_off(target, arguments, steps)
    if store:
        store.write("scheduler", made_from, {}, table._asdict())
    return table


def read_off(target: str, arguments: str, steps: Steps) -> Table:
    import torch

    made_up = torch.randn(2, steps.taken + 1, 1, 4, 1, 1, 2, generator=torch.Generator().manual_seed(0))
    slots, expected = rehearse(make_scheduler(target, arguments, steps), steps, *made_up)
    scheduler, count, rows = make_scheduler(target, arguments, steps), len(slots) + 3, []
    latents, *remembered, velocity, noise = (unit_vector(index, count) for index in range(count))
    with private.given_noise(scheduler) as given:
        for timestep in scheduler.timesteps[steps.begin :]:
            for slot, vector in zip(slots, remembered):
                if slot.get(scheduler) is not None:
                    slot.set(scheduler, vector)
            given[:] = [noise]
            sample = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
            after = [sample, *(slot.get(scheduler) for slot in slots)]
            rows.append([numpy.zeros(count) if vector is None else vector.flatten().numpy() for vector in after])
    coefficients, key = numpy.asarray(rows, dtype=numpy.float32), f"scheduler.target={target}"
    if not numpy.isfinite(coefficients).all():
        remedy = "use more steps or scheduler=unipc"
        raise ConfigError(f"{key}: not finite with steps={steps.count} and {arguments}; {remedy}")
    same = numpy.allclose(replay(coefficients, *made_up), expected, atol=1e-3)
    coefficients = coefficients if coefficients[..., -1].any() else coefficients[..., :-1]
    if getattr(scheduler, "init_noise_sigma", 1) != 1 or not same:
        raise ConfigError(f"{key}: with {arguments} its steps are not linear; {USUAL}")
    times = scheduler.timesteps.numpy(), scheduler.sigmas.numpy()[: len(scheduler.timesteps)]
    timesteps, sigmas = (values[steps.begin :].astype(numpy.float32) for values in times)
    return Table(timesteps, coefficients, sigmas)


def rehearse(scheduler, steps: Steps, velocities, noises):
    """Run a scheduler on random velocities and noise, with the last velocity as initial latents: returns where it keeps
    tensors between steps, and the final latents."""
    latents = velocities[-1]
    with private.given_noise(scheduler) as given:
        for timestep, velocity, noise in zip(scheduler.timesteps[steps.begin :], velocities, noises):
            given[:] = [noise]
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]

    def is_remembered(value):
        return hasattr(value, "numpy") and value.shape == latents.shape

    slots = []
    for name, value in vars(scheduler).items():
        if is_remembered(value):
            slots.append(Slot(name))
        elif isinstance(value, list):
            slots += [Slot(name, index) for index, item in enumerate(value) if is_remembered(item)]
    return slots, latents.numpy()


def replay(coefficients: numpy.ndarray, velocities, noises) -> numpy.ndarray:
    """The final latents of the rehearsal, computed with the table."""
    state = numpy.zeros((coefficients.shape[1], *velocities.shape[1:]), numpy.float32)
    state[0] = velocities[-1]
    for rows, velocity, noise in zip(coefficients, velocities.numpy(), noises.numpy()):
        state = numpy.einsum("ij,j...->i...", rows, numpy.stack([*state, velocity, noise]))
    return state[0]


def make_scheduler(target: str, arguments: str, steps: Steps):
    import diffusers

    kind = getattr(diffusers, target, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        raise ConfigError(f"scheduler.target={target}: not a scheduler in diffusers; {USUAL}")
    scheduler = kind(**json.loads(arguments))
    # The scheduler applies its shift to given sigmas too.
    given = {"num_inference_steps": steps.count} if steps.sigmas is None else {"sigmas": numpy.float32(steps.sigmas)}
    scheduler.set_timesteps(**given)
    scheduler.set_begin_index(steps.begin)
    if steps.rewinds:
        sigma = scheduler.sigmas[steps.begin]
        scheduler.sigmas[steps.begin] = 2 * sigma / (1 + sigma)
        scheduler.timesteps[steps.begin] = 1000 * scheduler.sigmas[steps.begin]
    return scheduler


def unit_vector(index: int, count: int):
    """A basis vector as the channels of a one-pixel video: (1, count, 1, 1, 1)."""
    import torch

    return torch.nn.functional.one_hot(torch.tensor(index), count).float().reshape(1, -1, 1, 1, 1)


@dataclass
class Slot:
    """Where a scheduler keeps a tensor between steps: an attribute, or an element of a list attribute."""

    name: str
    index: int | None = None

    def get(self, scheduler) -> Any:
        value = getattr(scheduler, self.name)
        return value if self.index is None else value[self.index]

    def set(self, scheduler, value) -> None:
        if self.index is None:
            setattr(scheduler, self.name, value)
        else:
            getattr(scheduler, self.name)[self.index] = value


def noise(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> numpy.ndarray:
    """The initial noise."""
    return next(noises(seed, shape, dtype))


def noises(seed: int, shape: tuple[int, ...], dtype: str = "float32", skipped: int = 0) -> Iterator[numpy.ndarray]:
    """The initial noise, then the noise of each step: the same on every backend and mesh, matching torch's CPU
    generator, which diffusers uses. The first `skipped` of them are passed over.

    Like torch: 24 bits of each Mersenne Twister output, turned into normal values in groups of 16 by Box-Muller.
    Torch's values can differ in the last bit, as they do between CPUs. `dtype` is what torch would draw, one of
    schema.NOISES; the arrays are float32.
    """
    normal, bits = NORMALS[dtype]
    twister, size = numpy.random.MT19937(), math.prod(shape)
    # RandomState seeds like torch and the reference implementation; MT19937(seed) hashes the seed first.
    twister.state = numpy.random.RandomState(seed).get_state(legacy=False)
    if size < GROUP:
        raise ValueError(f"noise of {size} values: torch draws fewer than {GROUP} in another way")
    rest = size % GROUP
    twister.random_raw(skipped * (size + (GROUP if rest else 0)), output=False)
    while True:
        values = numpy.empty(size, numpy.float32)
        drawn = uniform(twister, size, bits)
        values[: size - rest] = normal(drawn[: size - rest])
        if rest:  # torch redraws the last 16
            values[-GROUP:] = normal(uniform(twister, GROUP, bits))
        yield values.reshape(shape)


def uniform(twister, count: int, bits: int) -> numpy.ndarray:
    """Uniform values in [0, 1) from this many bits of each output."""
    return (twister.random_raw(count) & (2**bits - 1)) * 2.0**-bits


def normal(drawn: numpy.ndarray) -> numpy.ndarray:
    """Normal values from uniform ones, rounded where torch rounds."""
    first, second = numpy.moveaxis(drawn.reshape(-1, 2, GROUP // 2), 1, 0)
    radius = numpy.sqrt(-2 * numpy.log(1 - first).astype(numpy.float32))
    angle = (2 * math.pi * second).astype(numpy.float32).astype(numpy.float64)
    pair = numpy.stack([numpy.cos(angle), numpy.sin(angle)], axis=1).astype(numpy.float32)
    return (radius[:, None] * pair).reshape(-1)


def normal_bfloat16(drawn: numpy.ndarray) -> numpy.ndarray:
    """Like torch 2.13: computed in float32, rounded once."""
    return rounded(normal(drawn))


def normal_bfloat16_8bit(drawn: numpy.ndarray) -> numpy.ndarray:
    """Like torch 2.10: every operation rounded to bfloat16, so that there are few different values."""
    first, second = numpy.moveaxis(drawn.reshape(-1, 2, GROUP // 2), 1, 0)
    radius = rounded(numpy.sqrt(rounded(-2 * rounded(numpy.log(rounded(1 - first))))))
    angle = rounded(2 * math.pi * second)
    pair = numpy.stack([rounded(numpy.cos(angle)), rounded(numpy.sin(angle))], axis=1)
    return rounded(radius[:, None] * pair).reshape(-1)


def rounded(values: numpy.ndarray) -> numpy.ndarray:
    """Float32, rounded to bfloat16."""
    return values.astype(numpy.float32).astype(ml_dtypes.bfloat16).astype(numpy.float32)


ROUNDINGS = {"bfloat16": rounded, "integer": numpy.rint}  # of times, by schema.TIMES
NORMALS = {  # dtype -> how normal values are made, from how many bits
    "float32": (normal, 24), "bfloat16": (normal_bfloat16, 24), "bfloat16_8bit": (normal_bfloat16_8bit, 8),
}


def free_noise(noise: numpy.ndarray, length: int, overlap: int, seed: int) -> numpy.ndarray:
    """FreeNoise (arXiv 2310.15169): noise (1, channels, frames, …) whose frames behind the first window are those of
    earlier windows, in another order."""
    import torch

    generator, noise = torch.Generator().manual_seed(seed), noise.copy()
    frames, new = noise.shape[2], length - overlap
    for start in range(0, frames - length, new):
        place = start + length
        count = min(new, frames - place)
        order = torch.randperm(count, generator=generator).numpy()
        noise[:, :, place : place + count] = noise[:, :, start + order]
    return noise
