"""From a composed config to one frozen object from which everything else is built.

    job = Job.of(config, checkpoints, contents)     # a config with its files located
    resolved = resolve(job, devices)                # mesh sizes and kernels decided
    recipe = resolved.recipe(("model.dtype.vae", "ops"), latent=(1, 16, 1, 16, 16))

After this nothing writes to a config, and everything is built from a recipe: what is not in the recipe cannot be read,
so its cache key is always complete. No JAX, no torch.
"""
from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from omegaconf import DictConfig, OmegaConf

from wan_torchax.config import attention, validation
from wan_torchax.config.commandline import literal
from wan_torchax.config.geometry import Geometry, is_segmented, segment_count
from wan_torchax.config.graph import Graph, helpers_of
from wan_torchax.config.long import seen_at_once
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ConfigError, copied
from wan_torchax.config.wording import nested

if TYPE_CHECKING:
    from wan_torchax.models.family import Family

log = logging.getLogger("wan")


class Devices(Protocol):
    """The devices, here or elsewhere, and how to arrange them in a mesh (devices/mesh.py)."""

    platform: str
    kind: str
    count: int
    hosts: int

    def arrange(self, axes: dict[str, int]) -> Any: ...


@dataclass(frozen=True)
class Checkpoint:
    """One component of a checkpoint on this machine."""

    path: Path  # a folder, or a single file
    architecture: dict  # its config.json, merged with conf/model
    fingerprint: str  # of its weights and of the adapters merged into them
    adapters: tuple = ()  # runtime.adapters.File
    folders: Mapping[str, Path] = field(default_factory=dict)  # further ones that it needs, such as the tokenizer's


@dataclass(frozen=True)
class Recipe:
    """Everything that a program, a component's arrays or a stage's result depends on."""

    settings: dict[str, Any]  # config keys and their values
    mesh: Any = None
    placement: dict = field(default_factory=dict)  # the mesh as plain data
    derived: dict = field(default_factory=dict)  # numbers that follow from other parts of the config

    @functools.cached_property
    def key(self) -> str:
        return key_of([self.settings, self.placement, self.derived])

    @functools.cached_property
    def config(self) -> DictConfig:
        """A read-only config with only these settings; reading another key raises."""
        config = OmegaConf.create(nested(self.settings))
        OmegaConf.set_struct(config, True)
        OmegaConf.set_readonly(config, True)
        return config


@dataclass(frozen=True)
class Job:
    """A request: a read-only config and the files it names, as far as they are on this machine."""

    config: DictConfig
    graph: Graph
    family: Family
    geometry: Geometry
    checkpoints: Mapping[str, Checkpoint]  # by component
    contents: Mapping[str, str]  # by the key of an input file: a digest of its content
    seeds: tuple[int, ...]  # of the videos denoised as a batch, which differ only in these and their prompts
    segment: int = 0  # the index of this part, if the video is made in several
    is_halved: bool = False  # of half height and width

    @classmethod
    def of(
        cls, config: DictConfig, checkpoints: Mapping[str, Checkpoint], contents: Mapping[str, str] | None = None
    ) -> Job:
        family, complete = family_of(config), copied(config)
        OmegaConf.set_readonly(complete, False)  # a job's own config is read-only
        for component, checkpoint in checkpoints.items():
            name = family.described_by(component)
            if checkpoint.architecture != checkpoints.get(name, checkpoint).architecture:
                raise ConfigError(f"{checkpoint.path} and {checkpoints[name].path} are of different architectures")
            complete.model.architecture[name] = literals(checkpoint.architecture)
        OmegaConf.set_readonly(complete, True)
        graph = Graph.of(config.pipeline, helpers_of(config))
        geometry = family.geometry(complete.model.architecture)
        return cls(complete, graph, family, geometry, dict(checkpoints), dict(contents or {}), (config.seed,))

    def with_checkpoints(self, more: Mapping[str, Checkpoint]) -> Job:
        """The same job with more components located."""
        return Job.of(self.config, {**self.checkpoints, **more}, self.contents)

    @property
    def videos(self) -> int:
        return len(self.seeds)

    @property
    def latent_shape(self) -> tuple[int, int, int, int, int]:
        return self.geometry.latent_shape(self.config.resolution)

    @property
    def denoised_shape(self) -> tuple[int, int, int, int, int]:
        """The latents during denoising: with the frames that a family puts in front of the video's."""
        return self.geometry.latent_shape(self.config.resolution, self.family.extra_frames(self.config))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, height and width of the tokens that the transformer sees at once."""
        return self.geometry.grid(seen_at_once(self.config), self.family.extra_frames(self.config))

    @property
    def tokens(self) -> int:
        return math.prod(self.grid) + self.family.behind(self.config)

    @property
    def is_segmented(self) -> bool:
        return is_segmented(self.config)

    def segments(self) -> list[Self]:
        """The segments of a video, each a job like this with a segment's frames; for most videos only this job."""
        if not self.is_segmented:
            return [self]
        config = copied(self.config)
        OmegaConf.set_readonly(config, False)
        config.resolution.frames = config.pipeline.segments.frames
        OmegaConf.set_readonly(config, True)
        return [replace(self, config=config, segment=number) for number in range(segment_count(self.config))]

    def halved(self) -> Self:
        """The same job at half height and width, every step computed in full: as coarse stages see it."""
        if self.is_halved:
            return self
        config = copied(self.config)
        OmegaConf.set_readonly(config, False)
        config.resolution.height //= 2
        config.resolution.width //= 2
        config.cache.mode = None
        OmegaConf.set_readonly(config, True)
        return replace(self, config=config, is_halved=True)

    def inputs(self) -> dict[str, Any]:
        """The user's inputs, under the names by which stages take them."""
        return {value: plain(OmegaConf.select(self.config, key)) for value, key in self.graph.inputs.items()}

    def recipe(self, keys: Iterable[str], **derived) -> Recipe:
        """A recipe of some config keys and of numbers derived from others."""
        return Recipe({key: self.setting(key) for key in keys}, derived=derived)

    def setting(self, key: str) -> Any:
        """A key's value, read once: a request asks for most of them a dozen times, a millisecond each."""
        if key not in self.known:
            self.known[key] = plain(OmegaConf.select(self.config, key))
        return self.known[key]

    @functools.cached_property
    def known(self) -> dict[str, Any]:
        """Values of the config, which is read-only, by key."""
        return {}

    @functools.cached_property
    def recipes(self) -> dict[str, Recipe]:
        """Those of stages' programs, by the stage's name."""
        return {}

    @functools.cached_property
    def kind(self) -> str:
        """A key of everything but what it says of its own."""
        settings = OmegaConf.to_container(self.config, resolve=False)
        for key in validation.OWN:
            *outer, name = key.split(".")
            place = functools.reduce(dict.__getitem__, outer, settings)
            place[name] = place[name] is None  # which family_problems ask
        return key_of([settings, self.checkpoints, self.contents])

    @functools.cached_property
    def views(self) -> dict[str, View]:
        """What stages see of this job, by name, once they have asked."""
        return {}


@dataclass(frozen=True)
class Resolved(Job):
    """A job on its devices, with mesh sizes and kernels decided."""

    mesh: Any = None
    placement: dict = field(default_factory=dict)

    def recipe(self, keys: Iterable[str], **derived) -> Recipe:
        return replace(super().recipe(keys, **derived), mesh=self.mesh, placement=self.placement)


@dataclass(frozen=True)
class View:
    """What a stage sees of a job while it runs: the config keys it declared, its components' files, and what all stages
    know. It cannot read undeclared keys, so the cache key of its result is always complete."""

    config: DictConfig
    geometry: Geometry
    checkpoints: Mapping[str, Checkpoint]
    files: Mapping[str, Path]  # those it declared
    seeds: tuple[int, ...]
    segment: int  # the index of this part, if the video is made in several
    first_frame: int  # of this part, in the whole video
    store: Any  # records.store.Store, or None
    finished: tuple[Mapping[str, Any], ...] = ()  # parts of its result from an earlier run
    kept: bool = True  # whether someone takes the whole of a result that is emitted as it is made

    @property
    def latent_shape(self) -> tuple[int, int, int, int, int]:
        return self.geometry.latent_shape(self.config.resolution)


def key_of(parts) -> str:
    """A hash of the parts, as short text."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def plain(value) -> Any:
    """A config value as plain lists and dicts."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def literals(value) -> Any:
    """A value with its texts escaped: OmegaConf would interpolate `${…}` in a checkpoint's config.json."""
    if isinstance(value, dict):
        return {key: literals(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [literals(item) for item in value]
    return literal(value) if isinstance(value, str) else value


def resolve(job: Job, devices: Devices) -> Resolved:
    """Decide axis sizes and kernels, and validate once more; for the first job of a kind."""
    key = key_of([job.kind, devices.kind, devices.platform, devices.count, devices.hosts])
    complete, before = copied(job.config), resolved_last.get(key)
    OmegaConf.set_readonly(complete, False)
    if before is None:
        complete.mesh.axes = size_axes(complete.mesh, devices)
        questions, dtype = job.family.questions(complete), complete.model.dtype.transformer
        chosen = attention.choose(OmegaConf.to_object(complete.attention), devices, dtype, questions)
        OmegaConf.update(complete, "attention", asdict(chosen))
        validation.validate_resolved(complete, devices)
    else:
        complete.mesh.axes, complete.attention = before.config.mesh.axes, before.config.attention
    OmegaConf.set_readonly(complete, True)
    axes = dict(complete.mesh.axes)
    placement = {"axes": axes, "kind": devices.kind, "platform": devices.platform, "hosts": devices.hosts}
    known = {name: getattr(job, name) for name in Job.__dataclass_fields__} | {"config": complete}
    resolved = Resolved(**known, mesh=devices.arrange(axes), placement=placement)
    if before is not None and before.mesh == resolved.mesh:
        resolved.known.update({key: value for key, value in before.known.items() if not is_own(key)})
        common = {name: one for name, one in before.recipes.items() if not any(map(is_own, one.settings))}
        resolved.recipes.update(common)
    resolved_last.keep(key, resolved)
    return resolved


class Kept(dict):
    """The values that were kept last, at most so many. Threads share it."""

    def __init__(self, most: int):
        self.most, self.lock = most, threading.Lock()

    def keep(self, key: Any, value: Any) -> None:
        with self.lock:
            self.pop(key, None)
            self[key] = value
            while len(self) > self.most:
                del self[next(iter(self))]


resolved_last = Kept(16)  # by kind and devices


def is_own(key: str) -> bool:
    """Whether a key's value has something that a request says of its own."""
    return any(own == key or own.startswith(f"{key}.") for own in validation.OWN)


def size_axes(mesh, devices: Devices) -> dict[str, int]:
    """The sizes of the mesh's axes; -1 means all devices that the others leave."""
    fixed = math.prod(size for size in mesh.axes.values() if size != -1)
    open_axis = -1 in mesh.axes.values()
    needed = devices.count if open_axis else fixed
    partly = devices.hosts > 1 and needed != devices.count  # some hosts would have nothing to do
    if needed > devices.count or needed % fixed or partly:
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
        count = "1 device" if devices.count == 1 else f"{devices.count} devices"
        owner = "this machine has" if devices.hosts == 1 else f"{devices.hosts} hosts have"
        raise ConfigError(
            f"mesh={mesh.name}: axes {sizes}, and {owner} {count} ({devices.kind}); "
            "change mesh.axes, or use mesh=auto unchanged"
        )
    return {axis: needed // fixed if size == -1 else size for axis, size in mesh.axes.items()}
