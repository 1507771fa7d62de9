"""One Session for all who want videos: run.py, ComfyUI, benchmarks, plans and tuning are its callers.

    session = Session()
    resolved = session.resolve(config, ["text", "denoise", "decode"])       # checkpoints found, devices started
    values = session.run(resolved, ["text", "denoise", "decode"], resolved.inputs(), print)

It owns what a process has made so far, each thing by its key: programs, weights, and the last results of stages that
are cheap to keep. So a sweep over seeds or prompts compiles and loads nothing twice, and a change of model, mesh or
sharding frees the old before the new is loaded. Two threads may ask it at once: they queue.
"""
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy
from omegaconf import DictConfig, OmegaConf

from wan_torchax.config.resolve import Job, Resolved, key_of, plain, resolve
from wan_torchax.config.validation import raise_problems
from wan_torchax.devices.start import start, warm_up
from wan_torchax.events import Background, Listener, Took, silence
from wan_torchax.models.family import Family, import_module
from wan_torchax.records.provenance import sources, versions
from wan_torchax.records.store import Store
from wan_torchax.runtime.build_cache import BuildCache
from wan_torchax.runtime.components import Component
from wan_torchax.runtime.jobs import find_job, with_weights
from wan_torchax.runtime.programs import Programs, compiling
from wan_torchax.stages.stage import Stage, find, result_settings
from wan_torchax.work import RunStep, Work, is_resident, load, phase, wait_for_programs

log = logging.getLogger("wan")


class Session:
    """Devices, components and programs of this process."""

    def __init__(self):
        self.lock = threading.RLock()
        self.stages: dict[str, Stage] = {}
        self.components: dict[str, Component] = {}
        self.results: dict[str, dict[str, dict[str, numpy.ndarray]]] = {}  # by stage, then by key

    # ------------------------------------------------------------ before a run

    def resolve(self, job: Job | DictConfig, names: Iterable[str], emit: Listener = silence) -> Resolved:
        """Have the checkpoints of the named stages here, start the devices, and leave nothing open."""
        job, names = find_job(job) if OmegaConf.is_config(job) else job, list(names)
        check_stages(job, names)
        job, store = with_weights(job, job.graph.components(names)), Store.of(job.config)
        return self.place(job, emit, warm=store is not None and store.has("start", start_of(job.config, names)))

    def place(self, job: Job, emit: Listener = silence, warm: bool = False) -> Resolved:
        """A job on the devices of this machine. Torch and diffusers are imported while these start, unless the start is
        `warm`: then nothing will need them."""
        with self.lock, phase("start", emit):
            imports = Background(functools.partial(import_models, job.family))
            began = time.perf_counter()
            devices = start(job.config, meanwhile=(lambda: None) if warm else imports.start)
            resolved = resolve(job, devices)
            warm_up(resolved.mesh)
            emit(Took("devices", time.perf_counter() - began))
            imports.finish()
            imports.hand_on(emit)
        return resolved

    def build(self, resolved: Resolved, names: Iterable[str], cache: BuildCache | None = None) -> dict[str, Stage]:
        """The named stages, on their components; what was made before and still fits is used again. With `cache`, also
        what earlier processes made: such programs run, and cannot be looked into."""
        self.free_others(resolved)
        return {name: self.build_one(name, resolved, cache) for name in names}

    def free_others(self, resolved: Resolved) -> None:
        """Let go of components that are not this job's: also one that is not used this time holds memory."""
        for name, component in list(self.components.items()):
            if component.family is not resolved.family or Component.key_for(name, resolved) != component.key:
                self.components.pop(name).free()

    def build_one(self, name: str, resolved: Resolved, cache: BuildCache | None) -> Stage:
        components = {}
        for component in resolved.graph.stages[name].uses:
            if component not in self.components:
                self.components[component] = Component(component, resolved, cache)
            components[component] = self.components[component]
        recipe = find(name).recipe_for(name, resolved)
        videos = recipe.derived.get("videos", 1)  # programs for several at once stay beside those for one
        place = name if videos == 1 else f"{name} of {videos}"
        stage = self.stages.get(place)
        if stage is None or stage.recipe.key != recipe.key or not stage.programs.ready():
            self.stages.pop(place, None)
            stage = self.stages[place] = find(name)(name, recipe, components, resolved, cache)
        stage.components, stage.gives = components, tuple(resolved.graph.stages[name].gives)
        return stage

    def prepare(self, resolved: Resolved, names: Iterable[str], emit: Listener = silence) -> None:
        """Compile what the named stages will run and load what may stay, so that a first run waits for neither."""
        with self.lock:
            resolved = resolved.segments()[0]
            with phase("build", emit):
                stages = self.build(resolved, names)
                for component in self.components.values():
                    component.check()
            fresh = {name: stage.programs for name, stage in stages.items() if not stage.programs.ready()}
            with compiling(fresh, emit) as tell_all:
                for stage in stages.values() if is_resident(resolved.config) else ():
                    load(stage, resolved, tell_all)
                for stage in stages.values():
                    wait_for_programs(stage, tell_all)
                    stage.programs.raise_error()

    # ------------------------------------------------------------ a run

    @contextlib.contextmanager
    def open(
        self, resolved: Resolved, names: Iterable[str], values: dict[str, Any], emit: Listener = silence,
        segments: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    ) -> Iterator[Work]:
        """The named stages, built and held against their files, as work to be done in the block; their programs are
        compiled beside it. `values` are at hand; of a video that is made in several segments, `segments` has what is at
        hand of each."""
        with self.lock:
            try:
                cache, names = BuildCache.of(resolved), list(names)
                work = Work(resolved, names, values, segments, functools.partial(self.recall, cache))
                with phase("build", emit):
                    stages = self.build_checked(resolved.segments()[0], work.fresh, cache)
                fresh = {name: stage.programs for name, stage in stages.items() if not stage.programs.ready()}
                if cache:
                    tell_misses(cache, fresh)
                with compiling(fresh, emit) as tell_all:
                    work.begin(self, stages, cache, tell_all)
                    yield work
                if cache:
                    cache.store.write("start", start_of(resolved.config, names), {}, {})
            finally:
                if not is_resident(resolved.config):
                    self.free()

    def run(self, resolved: Resolved, names: Iterable[str], values: dict[str, Any], *more) -> dict[str, Any]:
        """Run the named stages in order on the values at hand; returns those they give beside those handed in. What
        comes behind is `open`'s."""
        with self.open(resolved, names, values, *more) as work:
            for step in work.steps:
                work.run(step)
        return work.result

    def build_checked(
        self, resolved: Resolved, named: dict[str, Resolved], cache: BuildCache | None
    ) -> dict[str, Stage]:
        """Stages, each for its own part of the job, and those that show what they make; held against their files."""
        self.free_others(resolved)
        helpers = dict.fromkeys(self.helpers(resolved, list(named)), resolved)
        order = [name for name in resolved.graph.stages if name in named or name in helpers]
        stages = {name: self.build_one(name, (named | helpers)[name], cache) for name in order}
        for name in {component for stage in stages.values() for component in stage.components}:
            self.components[name].check()
        for name, part in named.items():
            stages[name].check(stages[name].view_of(name, part))
        return stages

    # ------------------------------------------------------------ previews

    def helpers(self, resolved: Resolved, names: list[str]) -> list[str]:
        """Stages that are not run but show what others make: where their weights are at hand and may stay."""
        if not (resolved.config.preview_every and is_resident(resolved.config)):
            return []
        graph = resolved.graph
        given = {value for name in names for value in graph.stages[name].gives}
        takers = [name for name in graph.stages if name not in names and given & set(graph.stages[name].takes)]
        able = [name for name in takers if find(name).previews]
        return [name for name in able if set(graph.stages[name].uses) <= resolved.checkpoints.keys()]

    # ------------------------------------------------------------ what stays

    def recall(self, cache: BuildCache | None, step: RunStep) -> dict[str, numpy.ndarray] | None:
        """The result of a stage that was made from the same before, by this process or another."""
        stage = find(step.name)
        if not stage.results_remembered:
            return None
        settings = seen_settings(step)
        if result := self.results.get(step.name, {}).get(key_of(settings)):
            return result
        entry = cache and cache.read(f"result-{step.name}", stage.recipe_for(step.name, step.resolved), result=settings)
        return entry and entry.arrays

    def remember(self, cache: BuildCache | None, step: RunStep, result: dict[str, numpy.ndarray]) -> None:
        stage = find(step.name)
        if not stage.results_remembered:
            return
        results, settings = self.results.setdefault(step.name, {}), seen_settings(step)
        results[key_of(settings)] = result
        while len(results) > stage.results_remembered:
            results.pop(next(iter(results)))
        if cache:
            cache.write(f"result-{step.name}", stage.recipe_for(step.name, step.resolved), {}, result, result=settings)

    def free_unused(self, stages: list[Stage]) -> None:
        """Let go of the weights that none of these stages needs."""
        needed = {key for stage in stages for key in stage.components}
        for key, component in self.components.items():
            if key not in needed:
                component.free()

    def free(self) -> None:
        """Let go of all weights."""
        self.free_unused([])

    def clear(self) -> None:
        """Let go of everything."""
        with self.lock:
            self.free()
            for made in (self.stages, self.components, self.results):
                made.clear()


def check_stages(job: Job, names: list[str]) -> None:
    """Raise what the stages know to be wrong with a job."""
    problems = [problem for name in names for problem in find(name).problems(name, job)]
    if job.config.preview_every and not any(find(name).previews for name in names):
        remedy = "add the stage that decodes to stages, or set 0"
        problems.append(f"preview_every={job.config.preview_every}: previews need the decoder; {remedy}")
    raise_problems(problems)


# ---------------------------------------------------------------- keys


def seen_settings(step: RunStep) -> dict[str, Any]:
    """What a result is made from, inputs as the stage sees them."""
    settings = result_settings(step.resolved, step.name)
    return settings | find(step.name).seen_inputs(settings, step.resolved.family)


# What says which programs a run needs, before there are devices and `resolve` has filled in what is left open.
START_KEYS = (
    "pipeline.name", "model.name", "model.path", "model.paths", "model.dtype", "model.scan_blocks", "mesh.name",
    "sharding.name", "resolution", "ops", "guidance", "scheduler", "steps", "compile.xla_flags",
    "compile.matmul_precision",
)


def start_of(config, names: list[str]) -> dict:
    """What a run that begins has in common with one that left all it needs in the store; but for devices, which are not
    there yet. A guess: it decides what is imported while they start, and nothing else."""
    settings = {key: plain(OmegaConf.select(config, key)) for key in START_KEYS}
    return {"stages": names, "versions": versions(), "sources": sources()} | settings


# ---------------------------------------------------------------- while it runs


def import_models(family: Family, emit: Listener) -> None:
    """Import torch, diffusers and transformers: seconds, once a process."""
    began = time.perf_counter()
    for module in family.modules:
        import_module(module)
    emit(Took("imports", time.perf_counter() - began))


def tell_misses(cache: BuildCache, fresh: dict[str, Programs]) -> None:
    """One line for all stages that are traced for the same reason."""
    reasons: dict[str, list[str]] = {}
    for name, programs in fresh.items():
        if not programs.stored:
            reasons.setdefault(cache.why_not(programs.kind, programs.recipe), []).append(name)
    for reason, names in reasons.items():
        log.info("%s: traced, since %s", ", ".join(names), reason)


session = Session()  # of this process
