"""What a stage is: one file says all there is to know of it.

    class Decode(Stage):
        label, share = …        # what clients are told while it runs, and how much of the whole work it is
        settings = …            # keys of the config that its programs are built from
        reads = …               # further keys that it reads while it runs, and that its result depends on
        reads_beside = …        # and those that it does not depend on
        def derived(…)          # numbers from other parts of the config that its programs are built from
        def parts(…)            # which tensors of a component it uses
        def build(…)            # its programs
        def result_shapes(…)    # of the values it gives
        def problems(…)         # what is wrong with a job, before anything loads
        def check(…)            # what can go wrong, before any stage runs
        def amount(…)           # what its progress counts
        def run(…)              # values in, values out
        def temporaries(…)      # bytes it needs beside its weights, for plans
        def report(…)           # what a run's metrics say of it
        previews, def preview(…)    # whether and how it shows what another stage makes

Stages import torch, diffusers and transformers only where they build: what they say of themselves costs nothing.
"""
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy

from wan_torchax.config import inputs, registry
from wan_torchax.config.graph import Graph
from wan_torchax.config.resolve import Job, Recipe, Resolved, View, plain
from wan_torchax.config.wording import flatten
from wan_torchax.events import Listener
from wan_torchax.models.family import Family
from wan_torchax.records.fingerprints import digest
from wan_torchax.records.store import Store
from wan_torchax.runtime.build_cache import BuildCache
from wan_torchax.runtime.components import Component, settings_of
from wan_torchax.runtime.programs import Program, Programs

COMMON_SETTINGS = ("ops", "allow_external_ops", "compile.matmul_precision")
# Keys that change the last bits of a result at most: where things are computed, in which order and blocks, not what.
LAST_BITS = re.compile("|".join((
    r"sharding\..*", r"model\.weights\..*", r"model\.scan_blocks", r"mesh\..*", r"products\..*", r"guidance",
    r"allow_external_ops", r"ops\.\w+\.(why|platforms)",
    r"attention\.(self|cross)\.(kernel|block_q|block_kv|tile_kv|sub_q|chunk_kv|fold_scale|vmem_mib|min_keys|smooth_keys"
    r"|interpret|outline)",
)))


class Stage:
    """A stage of a pipeline, built from a recipe on components that it may share with others."""

    label: ClassVar[str] = "encoding"
    share: ClassVar[float] = 1.0
    settings: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    reads_beside: ClassVar[tuple[str, ...]] = ()
    previews: ClassVar[bool] = False  # whether it can show what another stage makes while it is made
    results_remembered: ClassVar[int] = 0  # results that a session keeps, for settings it has met before

    def __init__(
        self, name: str, recipe: Recipe, components: dict[str, Component], job: Resolved, cache: BuildCache | None
    ):
        """With `cache`, programs are taken from the store if it has them, and handed to it if it has not."""
        self.name, self.recipe, self.components, self.family = name, recipe, components, job.family
        self.gives = tuple(job.graph.stages[name].gives)
        self.config, self.mesh = recipe.config, recipe.mesh
        parts = self.parts(job.family)
        self.specs = {key: component.part(parts.get(key, ".*")) for key, component in components.items()}
        self.temporary_bytes = self.temporaries(job)
        self.programs = Programs(name, recipe, self.specs, self.prepare, cache)
        if not self.programs.stored:
            self.prepare()

    def prepare(self) -> None:
        """Add the programs as functions of torch modules, to be traced and compiled."""
        self.programs.ops = self.load_ops()
        self.build()

    @classmethod
    def recipe_for(cls, name: str, job: Job) -> Recipe:
        """All that the programs of this stage are made from."""
        uses = list(job.graph.stages[name].uses)
        own = (key for component in uses for key in settings_of(component, job.family))
        keys = [*COMMON_SETTINGS, *own, *cls.settings_for(job.family)]
        return job.recipe(keys, uses=uses, **cls.derived(name, job))

    @classmethod
    def settings_for(cls, family: Family) -> tuple[str, ...]:
        """`settings`, and those that a family's parts add."""
        return cls.settings

    @classmethod
    def view_of(cls, name: str, job: Job) -> View:
        """What the stage sees while it runs. What is under its settings' names it may read too."""
        recipe = job.recipe([*cls.recipe_for(name, job).settings, *cls.reads_for(name, job), *cls.reads_beside])
        uses = job.graph.stages[name].uses
        segment = job.config.pipeline.segments
        return View(
            recipe.config, job.geometry, {key: job.checkpoints[key] for key in uses if key in job.checkpoints},
            cls.files(job), job.seeds, job.segment, job.segment * (segment.frames - segment.overlap),
            Store.of(job.config),
        )

    @classmethod
    def reads_for(cls, name: str, job: Job) -> tuple[str, ...]:
        """`reads`, and those that a family's parts add."""
        return cls.reads

    @classmethod
    def files(cls, job: Job) -> dict[str, Path]:
        """Files beside checkpoints and inputs that its result depends on: it counts what they hold."""
        return {}

    @classmethod
    def parts(cls, family: Family) -> dict[str, str]:
        """Component -> pattern of the tensors it uses; all of those not listed."""
        return {}

    def load_ops(self) -> dict:
        from wan_torchax.runtime.ops import load_ops

        return load_ops(self.config.ops, self.recipe.placement["platform"], self.config.allow_external_ops)

    def module(self, component: str):
        """A component as a torch module to trace, its parts with the names they have in it."""
        from wan_torchax.models.modules import name_scopes

        key = self.family.described_by(component)
        module = self.family.spec(component).build(plain(self.config.model.architecture[key]))
        name_scopes(module)
        return module

    def add(self, name: str, program: Program) -> None:
        self.programs.entries[name] = program

    def __call__(self, program: str, *arguments, component: str | None = None):
        """Run a program on a component's arrays: by default of the one it was built for, or of another just like it."""
        component = component or self.programs.entries[program].component
        arrays = self.components[component].arrays
        return self.programs(program, {name: arrays[name] for name in self.specs[component]}, *arguments)

    def components_first(self, view: View) -> Iterable[str]:
        """The components whose weights must be there when it begins; it brings others itself."""
        return self.components

    @classmethod
    def result_shapes(cls, name: str, job: Job) -> dict[str, tuple[int, ...]]:
        """Of the values it gives."""
        raise NotImplementedError

    @classmethod
    def problems(cls, name: str, job: Job) -> Iterator[str]:
        """What is wrong with a job, as validation says it: called before devices start and anything loads."""
        return iter(())

    def check(self, view: View) -> None:
        """Raise now what `run` would stumble over: called before any stage runs."""

    @classmethod
    def derived(cls, name: str, job: Job) -> dict[str, Any]:
        return {}

    @classmethod
    def seen_inputs(cls, settings: dict[str, Any], family: Family) -> dict[str, Any]:
        """Of the settings its result depends on, those that it sees otherwise than the user wrote them."""
        return {}

    @classmethod
    def amount(cls, name: str, job: Job) -> tuple[int | None, str]:
        """How much its progress counts, and of what."""
        return None, ""

    @classmethod
    def report(cls, resolved: Resolved) -> dict[str, Any]:
        """What a run's metrics say of it beside its time."""
        return {}

    def build(self) -> None:
        """Add the programs."""
        raise NotImplementedError

    def run(self, view: View, values: dict[str, Any], emit: Listener) -> dict[str, numpy.ndarray]:
        """The stage's work on the values it takes; gives those it gives."""
        raise NotImplementedError

    def preview(self, estimate) -> numpy.ndarray:
        """How the video looks that a part of another stage's result, on the devices, would make: (height, width, 3)."""
        raise NotImplementedError

    @classmethod
    def temporaries(cls, resolved: Resolved) -> float:
        """Bytes of one device that are alive at once beside the weights, estimated from shapes."""
        raise NotImplementedError

    @property
    def usual_program(self) -> str:
        """The program that runs most, of which plans speak."""
        return list(self.programs.entries)[-1]


def find(name: str) -> type[Stage]:
    return registry.load(registry.STAGES, name)


def main_stage(graph: Graph) -> str:
    """The stage that is most of the work: what tuning, calibration and estimates are about."""
    return max(graph.stages, key=lambda name: find(name).share)


def result_settings(job: Job, name: str) -> dict[str, Any]:
    """Everything a stage's result depends on, by key: what its programs are made from, but for what changes the last
    bits; what it reads while it runs; its inputs; and all that of the stages before it. Weights and files count by what
    they hold; weights that are not on this machine by where they are."""
    graph = job.graph
    settings: dict[str, Any] = {}
    for stage in graph.upstream(name):
        kind, recipe = find(stage), find(stage).recipe_for(stage, job)
        read = job.recipe(kind.reads_for(stage, job)).settings
        settings |= {key: value for key, value in flatten(recipe.settings | read) if not LAST_BITS.fullmatch(key)}
        settings |= {f"{stage}.{key}": plain(value) for key, value in recipe.derived.items()}
        settings |= {f"file.{key}": digest([path]) for key, path in kind.files(job).items()}
        if stage in graph.repeated:
            settings |= dict(flatten(job.recipe(["pipeline.segments"]).settings)) | {"segment": job.segment}
    for key in graph.input_keys(name):
        if key in inputs.FILES:
            settings[f"input.{key}"] = job.contents.get(key)
        else:
            settings |= job.recipe([key]).settings
    for component in graph.components(graph.upstream(name)):
        model, checkpoint = job.config.model, job.checkpoints.get(component)
        settings[f"path.{component}"] = f"{model.paths.get(component, model.path)}@{model.revision}"
        settings[f"weights.{component}"] = None if checkpoint is None else checkpoint.fingerprint
    return settings
