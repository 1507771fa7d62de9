"""From a composed config, its checkpoints and its devices to one frozen object that everything else is made from.

    resolved = resolve(config, checkpoints, devices)
    recipe = resolved.recipe(("model.dtype.vae", "ops"), latent=(1, 16, 1, 16, 16))

Nothing writes into a config after this, and nothing is made but from a recipe: what a recipe does not hold cannot be
read, so its key cannot forget it. No JAX, no torch.
"""
import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from wan_torchax.config import attention, validation
from wan_torchax.config.geometry import Geometry, reference_count
from wan_torchax.config.graph import Graph
from wan_torchax.config.registry import described_by
from wan_torchax.config.schema import ConfigError

log = logging.getLogger("wan")


class Devices(Protocol):
    """What the devices are, here or elsewhere, and how to lay a mesh over them (devices/mesh.py)."""

    platform: str
    kind: str
    count: int
    hosts: int

    def arrange(self, axes: dict[str, int]) -> Any: ...


@dataclass(frozen=True)
class Checkpoint:
    """One component of a checkpoint on this machine."""

    folder: Path
    architecture: dict  # its config.json and what conf/model says of it
    fingerprint: str  # changes with its weights, and with what adapters add to them
    adapters: tuple = ()  # runtime.adapters.File


@dataclass(frozen=True)
class Recipe:
    """All that a program, or the arrays of a component, are made from."""

    settings: dict[str, Any]  # keys of the config and their values
    mesh: Any
    placement: dict  # the mesh in words
    derived: dict = field(default_factory=dict)  # numbers that follow from other parts of the config

    @functools.cached_property
    def key(self) -> str:
        return key_of([self.settings, self.placement, self.derived])

    @functools.cached_property
    def config(self) -> DictConfig:
        """A config of the settings alone, read-only; asking it for another key raises."""
        config = OmegaConf.create({})
        for key, value in self.settings.items():
            OmegaConf.update(config, key, value, force_add=True)
        OmegaConf.set_struct(config, True)
        OmegaConf.set_readonly(config, True)
        return config


@dataclass(frozen=True)
class Resolved:
    """A job with nothing left open. The config in it is read-only."""

    config: DictConfig
    graph: Graph
    geometry: Geometry
    checkpoints: Mapping[str, Checkpoint]  # by component; those of a plan may be missing
    mesh: Any
    placement: dict
    seeds: tuple[int, ...]  # of the videos that are denoised together; they differ in nothing but these and their texts

    @property
    def videos(self) -> int:
        return len(self.seeds)

    @property
    def latent_shape(self) -> tuple[int, int, int, int, int]:
        return self.geometry.latent_shape(self.config.resolution)

    @property
    def denoised_shape(self) -> tuple[int, int, int, int, int]:
        """Of the latents while they are made: with those of reference pictures in front."""
        return self.geometry.latent_shape(self.config.resolution, reference_count(self.config))

    @property
    def tokens(self) -> int:
        return self.geometry.tokens(self.config.resolution, reference_count(self.config))

    def inputs(self) -> dict[str, Any]:
        """What the user gives, by the names the stages take it by."""
        return {value: OmegaConf.select(self.config, key) for value, key in self.graph.inputs.items()}

    def recipe(self, keys: Iterable[str], **derived) -> Recipe:
        """A recipe of some keys of the config and of numbers derived from others."""
        settings = {key: plain(OmegaConf.select(self.config, key)) for key in keys}
        return Recipe(settings, self.mesh, self.placement, derived)


def key_of(parts) -> str:
    """A short text that differs where the parts do."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def plain(value) -> Any:
    """A value of a config as Python's own lists and dicts."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def resolve(config: DictConfig, checkpoints: Mapping[str, Checkpoint], devices: Devices) -> Resolved:
    """Every axis with its size, every kernel chosen, every architecture complete; checked once more."""
    complete = config.copy()
    complete.mesh.axes, complete.mesh.devices = size_axes(config.mesh, devices), used_devices(config.mesh, devices)
    for component, checkpoint in checkpoints.items():
        name = described_by(component)
        if checkpoint.architecture != checkpoints.get(name, checkpoint).architecture:
            raise ConfigError(f"{checkpoint.folder} and {checkpoints[name].folder} are of different architectures")
        complete.model.architecture[name] = checkpoint.architecture
    transformer = complete.model.architecture.transformer
    dtype, head_dim = complete.model.dtype.transformer, transformer.attention_head_dim
    chosen = attention.choose(OmegaConf.to_object(complete.attention), devices, dtype, head_dim)
    OmegaConf.update(complete, "attention", asdict(chosen))
    validation.validate(complete)
    for problem in validation.platform_problems(complete, devices.platform, devices.kind):
        raise ConfigError(problem)
    if idle := validation.idle_axis(complete):
        log.warning(idle)
    OmegaConf.set_readonly(complete, True)
    axes = dict(complete.mesh.axes)
    placement = {"axes": axes, "kind": devices.kind, "platform": devices.platform, "hosts": devices.hosts}
    return Resolved(
        complete, Graph.of(complete.pipeline), Geometry.of(complete.model.architecture), dict(checkpoints),
        devices.arrange(axes), placement, (complete.seed,),
    )


def used_devices(mesh, devices: Devices) -> int:
    return mesh.devices or devices.count


def size_axes(mesh, devices: Devices) -> dict[str, int]:
    """The mesh's axes with their sizes; one of -1 takes whatever the others leave."""
    needed = used_devices(mesh, devices)
    fixed = math.prod(size for size in mesh.axes.values() if size != -1)
    rest, left = divmod(needed, fixed)
    open_axis = -1 in mesh.axes.values()
    partly = devices.hosts > 1 and needed != devices.count  # some hosts would have nothing to do
    if needed > devices.count or left or partly or (rest != 1 and not open_axis):
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
        owner = "this machine has" if devices.hosts == 1 else f"{devices.hosts} hosts have"
        raise ConfigError(
            f"mesh={mesh.name}: axes {sizes} over {needed} devices, and {owner} {devices.count} ({devices.kind}); "
            "change mesh.axes and mesh.devices, or use mesh=auto as it is"
        )
    return {axis: rest if size == -1 else size for axis, size in mesh.axes.items()}
