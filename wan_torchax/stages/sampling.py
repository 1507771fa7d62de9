"""diffusers' schedulers as tables of numbers, so that a step of theirs runs inside the compiled program."""
import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy
from omegaconf import OmegaConf

from wan_torchax.config.geometry import steps_skipped
from wan_torchax.config.schema import ConfigError

USUAL = "use scheduler=unipc, euler or dpm"


def advance(state, velocity, coefficients):
    """new slot = Σ coefficient · (old slots and the model's output): (slots, 1, channels, frames, height, width).

    Written as sums of scaled arrays, not as a matrix product, which a TPU would round to bfloat16.
    """
    import jax.numpy as jnp

    terms = [*state, velocity]
    return jnp.stack([sum(row[index] * term for index, term in enumerate(terms)) for row in coefficients])


def scheduler_table(config) -> tuple[numpy.ndarray, numpy.ndarray]:
    """What diffusers' scheduler does in each step: timesteps (steps,) and coefficients (steps, slots, slots + 1).

    A deterministic scheduler's step is linear in the latents, the model's output and what it remembers of earlier
    steps. So each of those is given to it as a unit vector, and what comes back are the coefficients. The step then
    runs inside the compiled program, for any scheduler, with no tensor leaving the device. Slot 0 is the latents.
    """
    target, arguments = config.scheduler.target, OmegaConf.to_container(config.scheduler.arguments, resolve=True)
    try:
        return read_off(target, json.dumps(arguments, sort_keys=True), config.steps, steps_skipped(config))
    except ConfigError:
        raise
    except Exception as error:  # whatever the scheduler makes of arguments that are not its own
        raise ConfigError(f"scheduler.target={target}: fails with {arguments} ({error}); {USUAL}") from error


@functools.lru_cache(maxsize=8)  # building and running a stage both ask
def read_off(target: str, arguments: str, steps: int, begin: int = 0) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The table from step `begin` on, where the scheduler has no memory yet."""
    import torch

    velocities = torch.randn(steps - begin + 1, 1, 4, 1, 1, 2, generator=torch.Generator().manual_seed(0))
    slots, expected = rehearse(make_scheduler(target, arguments, steps, begin), begin, velocities)
    scheduler, size, rows = make_scheduler(target, arguments, steps, begin), len(slots) + 1, []
    for timestep in scheduler.timesteps[begin:]:
        for number, slot in enumerate(slots, start=1):
            if slot.get(scheduler) is not None:
                slot.set(scheduler, unit_vector(number, size))
        sample = scheduler.step(unit_vector(size, size), timestep, unit_vector(0, size), return_dict=False)[0]
        after = [sample, *(slot.get(scheduler) for slot in slots)]
        rows.append([numpy.zeros(size + 1) if vector is None else vector.flatten().numpy() for vector in after])
    coefficients, key = numpy.asarray(rows, dtype=numpy.float32), f"scheduler.target={target}"
    if not numpy.isfinite(coefficients).all():
        raise ConfigError(f"{key}: not finite with steps={steps} and {arguments}; use more steps or scheduler=unipc")
    same = numpy.allclose(replay(coefficients, velocities), expected, atol=1e-3)
    if getattr(scheduler, "init_noise_sigma", 1) != 1 or not same:
        raise ConfigError(f"{key}: with {arguments} it is not deterministic and linear; {USUAL}")
    return scheduler.timesteps.numpy()[begin:].astype(numpy.float32), coefficients


def start_sigma(config) -> float:
    """The share of noise in what the first step of the table takes."""
    arguments = OmegaConf.to_container(config.scheduler.arguments, resolve=True)
    scheduler = make_scheduler(config.scheduler.target, json.dumps(arguments), config.steps)
    return float(scheduler.sigmas[steps_skipped(config)])


def rehearse(scheduler, begin, velocities):
    """Where a scheduler keeps tensors between steps, and what it makes of made-up velocities, the last of them as
    noise."""
    latents = velocities[-1]
    for timestep, velocity in zip(scheduler.timesteps[begin:], velocities):
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


def replay(coefficients: numpy.ndarray, velocities) -> numpy.ndarray:
    """The rehearsal's end by the table."""
    state = numpy.zeros((coefficients.shape[1], *velocities.shape[1:]), numpy.float32)
    state[0] = velocities[-1]
    for rows, velocity in zip(coefficients, velocities.numpy()):
        state = numpy.einsum("ij,j...->i...", rows, numpy.stack([*state, velocity]))
    return state[0]


def make_scheduler(target: str, arguments: str, steps: int, begin: int = 0):
    import diffusers

    kind = getattr(diffusers, target, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        raise ConfigError(f"scheduler.target={target}: not a scheduler in diffusers; {USUAL}")
    scheduler = kind(**json.loads(arguments))
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(begin)
    return scheduler


def unit_vector(index: int, size: int):
    """A video of one pixel whose channels are the basis: (1, size + 1, 1, 1, 1)."""
    import torch

    return torch.nn.functional.one_hot(torch.tensor(index), size + 1).float().reshape(1, -1, 1, 1, 1)


@dataclass
class Slot:
    """A place where a scheduler remembers a tensor: an attribute, or an element of a list in one."""

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


def noise(seed: int, shape: tuple[int, ...]) -> numpy.ndarray:
    """The first latents, from a CPU generator: the same on every backend and mesh, and in diffusers."""
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).numpy()
