"""The base class of stages. Each stage is one file, which defines all of this:

    class Decode(Stage):
        label, share = …        # the progress label for clients, and its share of the total work
        settings = …            # config keys that its programs depend on
        reads = …               # further keys that it reads at run time and its result depends on
        reads_beside = …        # keys that it reads but its result does not depend on
        def derived(…)          # values computed from other parts of the config that its programs depend on
        def parts(…)            # which tensors of a component it uses
        def build(…)            # its programs
        def result_shapes(…)    # shapes of its outputs
        def problems(…)         # what is wrong with a job, before anything loads
        def check(…)            # raises what would fail later, before any stage runs
        def part_shapes(…)      # shapes of a part of its outputs, if it finishes them in parts
        def part_settings(…)    # what such a part depends on
        def joined_parts(…)     # its outputs from all their parts
        follows, def following(…)   # whether and how it takes another stage's outputs in parts
        def amount(…)           # the total and unit of its progress
        def run(…)              # values in, values out
        def temporaries(…)      # bytes it needs besides its weights, for plans
        def report(…)           # its entries in a run's metrics
        previews, def preview(…)    # whether and how it previews another stage's output

Stages import torch, diffusers and transformers only in `build`, so their metadata is cheap to query.
"""
import re
from collections.abc import Iterable, Iterator, Mapping
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

COMMON_SETTINGS = ("model.family", "ops", "allow_external_ops", "compile.matmul_precision")
# Keys that change a result only by rounding: where and in which order and block sizes it is computed.
LAST_BITS = re.compile("|".join((
    r"sharding\..*", r"model\.weights\..*", r"model\.scan_blocks", r"mesh\..*", r"products\..*", r"guidance",
    r"allow_external_ops", r"ops\.\w+\.(why|platforms)",
    r"attention\.(self|cross)\.(kernel|block_q|block_kv|tile_kv|sub_q|chunk_kv|fold_scale|vmem_mib|min_keys|smooth_keys"
    r"|interpret|outline)",
)))


class Stage:
    """A stage of a pipeline, built from a recipe on components that it may share with other stages."""

    label: ClassVar[str] = "encoding"
    share: ClassVar[float] = 1.0
    settings: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    reads_beside: ClassVar[tuple[str, ...]] = ()
    previews: ClassVar[bool] = False  # whether it can decode previews of another stage's output
    follows: ClassVar[bool] = False  # whether it can take another stage's outputs in parts, while they are made
    results_remembered: ClassVar[int] = 0  # how many results a session caches

    def __init__(
        self, name: str, recipe: Recipe, components: dict[str, Component], job: Resolved, cache: BuildCache | None
    ):
        """With `cache`, programs are read from the store, or written to it once compiled."""
        self.name, self.recipe, self.components, self.family = name, recipe, components, job.family
        self.takes, self.gives = tuple(job.graph.stage(name).takes), tuple(job.graph.stage(name).gives)
        self.config, self.mesh = recipe.config, recipe.mesh
        parts = self.parts(job.family)
        self.specs = {key: component.part(parts.get(key, ".*")) for key, component in components.items()}
        self.temporary_bytes = self.temporaries(job)
        self.programs = Programs(name, recipe, self.specs, self.prepare, cache)
        if not self.programs.stored:
            self.prepare()

    def prepare(self) -> None:
        """Add the programs to trace and compile."""
        self.programs.ops = self.load_ops()
        self.build()

    @classmethod
    def seen(cls, job: Job) -> Job:
        """The job as the stage sees it."""
        return job

    @classmethod
    def recipe_for(cls, name: str, job: Job) -> Recipe:
        """Everything that the programs of this stage depend on."""
        if name not in job.recipes:
            job.recipes[name] = cls.new_recipe(name, job)
        return job.recipes[name]

    @classmethod
    def new_recipe(cls, name: str, job: Job) -> Recipe:
        uses = list(job.graph.stage(name).uses)
        own = (key for component in uses for key in settings_of(component, job.family))
        keys = [*COMMON_SETTINGS, *own, *cls.settings_for(job.family)]
        return job.recipe(keys, uses=uses, **cls.derived(name, job))

    @classmethod
    def settings_for(cls, family: Family) -> tuple[str, ...]:
        """`settings`, plus those that the family adds."""
        return cls.settings

    @classmethod
    def view_of(cls, name: str, job: Job) -> View:
        """What the stage may read at run time, including its settings."""
        if name not in job.views:
            job.views[name] = cls.new_view(name, job)
        return job.views[name]

    @classmethod
    def new_view(cls, name: str, job: Job) -> View:
        recipe = job.recipe([*cls.recipe_for(name, job).settings, *cls.reads_for(name, job), *cls.reads_beside])
        uses = job.graph.stage(name).uses
        segment = job.config.pipeline.segments
        return View(
            recipe.config, job.geometry, {key: job.checkpoints[key] for key in uses if key in job.checkpoints},
            cls.files(job), job.seeds, job.segment, job.segment * (segment.frames - segment.overlap),
            Store.of(job.config),
        )

    @classmethod
    def reads_for(cls, name: str, job: Job) -> tuple[str, ...]:
        """`reads`, plus those that the family adds."""
        return cls.reads

    @classmethod
    def files(cls, job: Job) -> dict[str, Path]:
        """Files besides checkpoints and inputs that its result depends on; keyed by content."""
        return {}

    @classmethod
    def parts(cls, family: Family) -> dict[str, str]:
        """Component -> pattern of the tensors it uses; all tensors of components not listed."""
        return {}

    def load_ops(self) -> dict:
        from wan_torchax.runtime.ops import load_ops

        return load_ops(self.config.ops, self.recipe.placement["platform"], self.config.allow_external_ops)

    def module(self, component: str):
        """A component as a torch module to trace, with submodule names as name scopes."""
        from wan_torchax.models.modules import name_scopes

        key = self.family.described_by(component)
        module = self.family.spec(component).build(plain(self.config.model.architecture[key]))
        name_scopes(module)
        return module

    def add(self, name: str, program: Program) -> None:
        self.programs.entries[name] = program

    def __call__(self, program: str, *arguments, component: str | None = None):
        """Run a program on a component's arrays: of the one it was built for, or of another of the same
        architecture."""
        component = component or self.programs.entries[program].component
        arrays = self.components[component].arrays
        return self.programs(program, {name: arrays[name] for name in self.specs[component]}, *arguments)

    def components_first(self, view: View) -> Iterable[str]:
        """The components that must be loaded before it runs; it loads others itself."""
        return self.components

    @classmethod
    def result_shapes(cls, name: str, job: Job) -> dict[str, tuple[int, ...]]:
        """Shapes of its outputs."""
        raise NotImplementedError

    @classmethod
    def part_shapes(cls, name: str, job: Job, number: int) -> dict[str, tuple[int, ...]] | None:
        """Shapes of a part of its outputs; None if there is no such part."""
        return None

    @classmethod
    def part_settings(cls, name: str, job: Job, number: int, settings: dict[str, Any]) -> dict[str, Any]:
        """Of the settings that its result depends on, those of a part."""
        return settings

    @classmethod
    def joined_parts(cls, parts: list[Mapping[str, numpy.ndarray]]) -> dict[str, numpy.ndarray]:
        """Its outputs, of all their parts."""
        raise NotImplementedError

    @classmethod
    def problems(cls, name: str, job: Job) -> Iterator[str]:
        """What is wrong with a job, as messages for validation: called before devices start."""
        return iter(())

    def check(self, view: View) -> None:
        """Raise errors that `run` would hit later: called before any stage runs."""

    @classmethod
    def derived(cls, name: str, job: Job) -> dict[str, Any]:
        return {}

    @classmethod
    def seen_inputs(cls, settings: dict[str, Any], family: Family) -> dict[str, Any]:
        """Settings that the stage normalizes before use, e.g. cleaned prompts, for the result's key."""
        return {}

    @classmethod
    def amount(cls, name: str, job: Job) -> tuple[int | None, str]:
        """The total and unit of its progress."""
        return None, ""

    @classmethod
    def report(cls, resolved: Resolved) -> dict[str, Any]:
        """Its entries in a run's metrics besides its time."""
        return {}

    def build(self) -> None:
        """Add the programs."""
        raise NotImplementedError

    def run(self, view: View, values: dict[str, Any], emit: Listener) -> dict[str, numpy.ndarray]:
        """Compute the outputs from the inputs."""
        raise NotImplementedError

    def following(self, view: View, emit: Listener) -> Any:
        """An object with `add(values)` for each part of the stage before, which queues it on the devices, `fetch()` for
        what they have made of it, and `result()`."""
        raise NotImplementedError

    def preview(self, estimate, video: int) -> numpy.ndarray:
        """Frames (frames, height, width, 3) that show what another stage's output will be, of one video in a batch."""
        raise NotImplementedError

    @classmethod
    def temporaries(cls, resolved: Resolved) -> float:
        """Peak bytes per device besides the weights, estimated from shapes."""
        raise NotImplementedError

    @property
    def usual_program(self) -> str:
        """The program that runs most often; plans report it."""
        return list(self.programs.entries)[-1]


def find(name: str) -> type[Stage]:
    return registry.load(registry.STAGES, name)


def main_stage(graph: Graph) -> str:
    """The stage with most of the work: the subject of tuning, calibration and estimates."""
    return max(graph.stages, key=lambda name: find(name).share)


def result_settings(job: Job, name: str) -> dict[str, Any]:
    """Everything a stage's result depends on, by key: the recipes of its programs without LAST_BITS, what it reads at
    run time, its inputs, and the same for the stages before it, those of an earlier segment too. Weights and files are
    keyed by content; weights that are not local by path."""
    graph, goes_on = job.graph, job.segment > 0
    settings: dict[str, Any] = {}
    stages = graph.upstream(name, goes_on)
    if helpers := [helper for helper, one in graph.helpers.items() if one.gives]:  # of what later stages have made
        stages = [*graph.stages, *helpers]
    for stage in stages:
        kind, recipe = find(stage), find(stage).recipe_for(stage, job)
        read = job.recipe(kind.reads_for(stage, job)).settings
        settings |= {key: value for key, value in flatten(recipe.settings | read) if not LAST_BITS.fullmatch(key)}
        settings |= {f"{stage}.{key}": plain(value) for key, value in recipe.derived.items()}
        settings |= {f"file.{key}": digest([path]) for key, path in kind.files(job).items()}
        if stage in graph.repeated:
            settings |= dict(flatten(job.recipe(["pipeline.segments"]).settings)) | {"segment": job.segment}
    for key in graph.input_keys(name, goes_on):
        if key in inputs.FILES:
            settings[f"input.{key}"] = job.contents.get(key)
        else:
            settings |= job.recipe([key]).settings
    for component in graph.components(stages):
        model, checkpoint = job.config.model, job.checkpoints.get(component)
        settings[f"path.{component}"] = f"{model.paths.get(component, model.path)}@{model.revision}"
        settings[f"weights.{component}"] = None if checkpoint is None else checkpoint.fingerprint
    return settings
