"""Components: one model of a checkpoint each. Stages share them; they are loaded and freed as a unit."""
import functools
import logging
import re
import threading
import time

import jax
import numpy

from wan_torchax.config.resolve import Checkpoint, Recipe, Resolved, key_of, plain
from wan_torchax.events import Advanced, Began, Ended, Listener, Took
from wan_torchax.models.family import UP, ComponentSpec, Family
from wan_torchax.records import provenance
from wan_torchax.runtime import adapters, weights
from wan_torchax.runtime.build_cache import BuildCache, pack_specs, unpack_specs
from wan_torchax.runtime.checkpoint import files_of

log = logging.getLogger("wan")
READ_BYTES = 1 << 26


def settings_of(name: str, family: Family) -> tuple[str, ...]:
    """The config keys that determine a component's arrays."""
    key = family.described_by(name)
    spec = family.spec(name)
    own = ("precision", "sharding.gather") if spec.stacks else ()
    beside = ("adapter.mode", "adapter.rank") if spec.adapted else ()
    model = ("model.family", *(f"model.{part}.{key}" for part in ("architecture", "dtype", "weights")))
    return *model, "sharding.axes", *own, *beside


class Component:
    """A component's array specs, and the arrays that are loaded."""

    def __init__(self, name: str, resolved: Resolved, cache: BuildCache | None = None):
        self.name, self.checkpoint = name, resolved.checkpoints.get(name)
        self.key, self.base_key = self.key_for(name, resolved), self.base_key_for(name, resolved)
        self.family = resolved.family
        self.arrays: dict[str, jax.Array] = {}
        self.origins: dict[str, list] = {}  # the adapters' changes that each array was loaded with
        recipe, kind = resolved.recipe(settings_of(name, resolved.family)), f"plan-{name}"
        # Adapters are merged at load time, or have room beside weights, and do not change array specs.
        files = self.checkpoint and self.checkpoint.fingerprint.partition("+")[0]
        if entry := cache and cache.read(kind, recipe, weights=files):
            self.specs = unpack_specs(entry.about["specs"], entry.arrays, recipe.mesh)
            self.unused = tuple(entry.about["unused"])
            return
        self.plan(recipe)
        if cache:
            rows, tables = pack_specs(self.specs)
            about = {"specs": rows, "unused": self.unused}
            cache.write(kind, recipe, about, tables, weights=files)

    def plan(self, recipe: Recipe) -> None:
        """Derive the array specs from the torch module."""
        spec, key, config = self.spec, self.family.described_by(self.name), recipe.config
        architecture, sharding = plain(config.model.architecture[key]), config.sharding
        rules = config.model.weights.get(key) or {}
        layout = weights.Layout(recipe.mesh, rules, sharding.axes, sharding.get("gather"), f"model.weights.{key}")
        dtype, precision = config.model.dtype[key], config.get("precision")
        module = spec.build(architecture)
        self.specs = weights.array_specs(module, spec, architecture, layout, dtype, precision)
        if spec.adapted and config.adapter.mode == "beside":
            self.specs |= weights.factor_specs(module, spec, layout, dtype, config.adapter.rank)
        self.unused = spec.unused(architecture)

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint; a component of a plan has none."""
        assert self.checkpoint is not None, f"{self.name} has no checkpoint: it was planned, not found"
        return self.checkpoint

    @property
    def spec(self) -> ComponentSpec:
        return self.family.spec(self.name)

    @staticmethod
    def key_for(name: str, resolved: Resolved) -> str:
        """The cache key of the arrays: the recipe of their specs, and the checkpoint with its adapters."""
        checkpoint, recipe = resolved.checkpoints.get(name), resolved.recipe(settings_of(name, resolved.family))
        allowed = checkpoint and [adapter.allow_unmatched for adapter in checkpoint.adapters]
        return key_of([recipe.key, checkpoint and checkpoint.fingerprint, allowed])

    @staticmethod
    def base_key_for(name: str, resolved: Resolved) -> str:
        """The same without adapters: arrays of one base are exchanged for those of other adapters one by one."""
        checkpoint, recipe = resolved.checkpoints.get(name), resolved.recipe(settings_of(name, resolved.family))
        return key_of([recipe.key, checkpoint and checkpoint.fingerprint.partition("+")[0]])

    def move_to(self, resolved: Resolved) -> None:
        """Load from this job's checkpoint: of the same base, which may be elsewhere by now, with its own adapters."""
        checkpoint, self.key = resolved.checkpoints.get(self.name), self.key_for(self.name, resolved)
        if checkpoint != self.checkpoint:
            self.checkpoint = checkpoint
            self.__dict__.pop("placement", None)

    def check(self) -> None:
        """Check the array specs against the headers of the checkpoint and of the adapters."""
        weights.check(self.specs, self.stored.path, self.unused, self.spec)
        len(self.placement.merged)  # evaluated for its errors

    @functools.cached_property
    def placement(self) -> adapters.Placement:
        """What the adapters change."""
        layers = {source for spec in self.specs.values() for source in spec.beside}
        shapes = weights.source_shapes(self.specs)
        return adapters.place_all(self.stored.adapters, shapes, self.family, layers, self.rank)

    @property
    def rank(self) -> int:
        """Ranks that adapters beside the weights have room for."""
        return next((spec.shape[-1] for name, spec in self.specs.items() if name.endswith(UP)), 0)

    def strengths(self, step: int) -> numpy.ndarray:
        """The strength of each rank of the factors beside weights, in a step."""
        strengths: numpy.ndarray = numpy.zeros(self.rank, numpy.float32)
        for ranks, strength in self.placement.strengths:
            strengths[ranks] = strength[step] if isinstance(strength, list) else strength
        return strengths

    def changes_of(self, name: str) -> list:
        """The adapters' changes in an array."""
        beside, placement = self.specs[name].beside, self.placement
        sources, changes = (beside, placement.beside) if beside else (self.sources[name], placement.merged)
        return [(source, changes[source]) for source in sources if source in changes]

    @functools.cached_property
    def sources(self) -> dict[str, list[str]]:
        """Checkpoint names by array; of scales, those of the weight they are of."""
        scales = {spec.scaled_by: spec.sources for spec in self.specs.values() if spec.scaled_by}
        return {name: spec.sources for name, spec in self.specs.items()} | scales

    def part(self, pattern: str) -> dict[str, weights.ArraySpec]:
        """The specs whose names match."""
        return {name: tensor for name, tensor in self.specs.items() if re.fullmatch(pattern, name)}

    def load(self, specs: dict[str, weights.ArraySpec], emit: Listener) -> None:
        """Load these tensors onto the devices, except those already loaded with the same adapters. An array with others
        is not changed but loaded again: however often adapters change, weights are those of a first load."""
        for name in self.stale():
            del self.arrays[name]
        absent = {name: spec for name, spec in specs.items() if name not in self.arrays}
        if not absent:
            return
        phase, total = f"load_{self.name}", sum(tensor.bytes for tensor in absent.values())
        began = time.perf_counter()
        emit(Began(phase, total, "B"))

        def progress(count):
            emit(Advanced(phase, count))

        def took(part, seconds):
            emit(Took(part, seconds))

        changes, beside = self.placement.merged, self.placement.beside
        arrays = weights.load(absent, self.stored.path, progress, self.spec, changes, took)
        for name in absent.keys() - arrays.keys():
            arrays[name] = weights.load_factors(name, absent[name], beside)
        self.arrays |= arrays
        self.origins |= {name: self.changes_of(name) for name in arrays}
        seconds = time.perf_counter() - began
        emit(Ended(phase, seconds))
        rate = total / seconds / 1e9
        log.info("%s: %.3f GiB loaded in %.1f s, %.2f GB/s", self.name, weights.gib(total), seconds, rate)
        for line in weights.summary(absent):
            log.info(line)

    def free(self) -> None:
        self.arrays = {}

    def stale(self) -> list[str]:
        """Arrays that were loaded with other adapters."""
        return [name for name in self.arrays if self.origins.get(name, []) != self.changes_of(name)]

    def is_loaded(self) -> bool:
        return bool(self.arrays) and not self.stale()

    def fits_in_memory(self) -> bool:
        """Whether the page cache can hold the weight files using at most half of the available memory."""
        needed: int = sum(file.stat().st_size for file in files_of(self.stored.path))
        return 2 * needed < provenance.available_host_bytes()

    def read_ahead(self) -> threading.Thread:
        """Prefetch the weights into the page cache, so that loading does not wait for the disk."""

        def read():
            for file in files_of(self.stored.path):
                with file.open("rb", buffering=0) as handle:
                    while handle.read(READ_BYTES):
                        pass

        thread = threading.Thread(target=read, name=f"read {self.name}", daemon=True)
        thread.start()
        return thread
