"""The Session behind run.py, ComfyUI, benchmarks, plans and tuning.

    session = Session()
    resolved = session.resolve(config, ["text", "denoise", "decode"])       # locates checkpoints, starts devices
    values = session.run(resolved, ["text", "denoise", "decode"], resolved.inputs(), print)

It owns a process's programs, weights and recent results of stages with small outputs, each under its cache key. So a
sweep over seeds or prompts compiles and loads nothing twice, and a change of model, mesh or sharding frees the old
weights before the new ones load. Calls from several threads are serialized by a lock.
"""
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
from omegaconf import DictConfig, OmegaConf

from wan_torchax.config.frames import close_onward
from wan_torchax.config.resolve import Job, Resolved, key_of, plain, resolve
from wan_torchax.config.validation import raise_problems
from wan_torchax.devices.start import is_running, start, warm_up
from wan_torchax.events import Background, Listener, Took, silence
from wan_torchax.models.family import Family, import_module
from wan_torchax.records.provenance import sources, versions
from wan_torchax.records.store import Store
from wan_torchax.runtime.build_cache import BuildCache
from wan_torchax.runtime.components import Component
from wan_torchax.runtime.jobs import find_job, with_weights
from wan_torchax.runtime.programs import Programs, compiling
from wan_torchax.stages.stage import Stage, find, result_settings
from wan_torchax.work import AtHand, RunStep, Work, is_resident, load, phase, wait_for_programs

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
        """Download missing checkpoints of the named stages, start the devices, and resolve all settings."""
        job, names = find_job(job) if OmegaConf.is_config(job) else job, list(names)
        check_stages(job, names)
        job = with_weights(job, job.graph.components([*names, *job.graph.helpers]))
        store = None if is_running() else Store.of(job.config)
        return self.place(job, emit, warm=store is not None and store.has("start", start_of(job.config, names)))

    def place(self, job: Job, emit: Listener = silence, warm: bool = False) -> Resolved:
        """A job on this machine's devices. Torch and diffusers are imported while the devices start; not if the start
        is `warm`, when nothing is traced."""
        with self.lock, phase("start", emit):
            imports = Background(functools.partial(import_models, job.family))
            began = time.perf_counter()
            devices = start(job.config, meanwhile=(lambda: None) if warm else imports.start)
            resolved = resolve(job, devices)
            warm_up(resolved.mesh)
            emit(Took("devices", time.perf_counter() - began))
            imports.finish()
            imports.forward(emit)
        return resolved

    def build(self, resolved: Resolved, names: Iterable[str], cache: BuildCache | None = None) -> dict[str, Stage]:
        """Build the named stages, reusing what this process has built under the same key. With `cache`, also use
        programs of earlier processes; those can be run but not inspected."""
        self.free_others(resolved)
        return {name: self.build_one(name, resolved, cache) for name in names}

    def free_others(self, resolved: Resolved) -> None:
        """Free components of other jobs, including ones that this run does not use: they hold device memory. Those of
        other adapters stay: what these change is loaded again."""
        for name, component in list(self.components.items()):
            if component.family is not resolved.family or Component.base_key_for(name, resolved) != component.base_key:
                self.components.pop(name).free()

    def build_one(self, name: str, resolved: Resolved, cache: BuildCache | None) -> Stage:
        components = {}
        for component in resolved.graph.stage(name).uses:
            if component not in self.components:
                self.components[component] = Component(component, resolved, cache)
            components[component] = self.components[component]
            components[component].move_to(resolved)
        recipe = find(name).recipe_for(name, resolved)
        videos = recipe.derived.get("videos", 1)  # programs for each batch size are cached separately
        place = name if videos == 1 else f"{name} of {videos}"
        stage = self.stages.get(place)
        if stage is None or stage.recipe.key != recipe.key or not stage.programs.ready():
            self.stages.pop(place, None)
            stage = self.stages[place] = find(name)(name, recipe, components, resolved, cache)
        stage.components, stage.gives = components, tuple(resolved.graph.stage(name).gives)
        return stage

    def prepare(self, resolved: Resolved, names: Iterable[str], emit: Listener = silence) -> None:
        """Compile the named stages and load weights that may stay resident, so that the first run waits for neither."""
        with self.lock:
            resolved = resolved.segments()[0]
            with phase("build", emit):
                stages = self.build(resolved, names)
                for component in self.components.values():
                    component.check()
            fresh = {name: stage.programs for name, stage in stages.items() if not stage.programs.ready()}
            with compiling(fresh, emit) as emit_all:
                for stage in stages.values() if is_resident(resolved.config) else ():
                    load(stage, resolved, emit_all)
                for stage in stages.values():
                    wait_for_programs(stage, emit_all)
                    stage.programs.raise_error()

    # ------------------------------------------------------------ a run

    @contextlib.contextmanager
    def open(
        self, resolved: Resolved, names: Iterable[str], values: dict[str, Any], emit: Listener = silence,
        at_hand: AtHand | None = None, kept: bool = True,
    ) -> Iterator[Work]:
        """Build the named stages and check them against their checkpoints; the block then runs them while their
        programs compile in the background. `values` are the values already available, `at_hand` has those of single
        segments and parts of stages' results. Without `kept`, frames and a live video's latents are left out of the
        result: `emit` has had them."""
        with self.lock:
            try:
                cache, names = BuildCache.of(resolved), list(names)
                recall = functools.partial(self.recall, cache)
                work = Work(resolved, names, values, at_hand or AtHand(), recall, kept)
                with phase("build", emit):
                    stages = self.build_checked(resolved.segments()[0], work.fresh, cache)
                fresh = {name: stage.programs for name, stage in stages.items() if not stage.programs.ready()}
                if cache:
                    log_misses(cache, fresh)
                with compiling(fresh, emit) as emit_all:
                    work.begin(self, stages, cache, emit_all)
                    yield work
                if cache:
                    cache.store.write("start", start_of(resolved.config, names), {}, {})
            finally:
                close_onward()
                if not is_resident(resolved.config):
                    self.free()

    def run(self, resolved: Resolved, names: Iterable[str], values: dict[str, Any], *more) -> dict[str, Any]:
        """Run the named stages in order; returns the given values and the stages' outputs. `more` is passed on to
        `open`."""
        with self.open(resolved, names, values, *more) as work:
            for step in work.steps:
                work.run(step)
        return work.result

    def build_checked(
        self, resolved: Resolved, named: dict[str, Resolved], cache: BuildCache | None
    ) -> dict[str, Stage]:
        """Build the stages and those that decode previews, and check them against their checkpoints."""
        self.free_others(resolved)
        helpers = dict.fromkeys(self.helpers(resolved, list(named)), resolved)
        order = [name for name in (*resolved.graph.stages, *resolved.graph.helpers) if name in named or name in helpers]
        stages = {name: self.build_one(name, (named | helpers)[name], cache) for name in order}
        for name in {component for stage in stages.values() for component in stage.components}:
            self.components[name].check()
        for name, part in named.items():
            stages[name].check(stages[name].view_of(name, part))
        return stages

    # ------------------------------------------------------------ previews

    def helpers(self, resolved: Resolved, names: list[str]) -> list[str]:
        """Stages that are not run but decode previews: the pipeline's own if their weights are local and may stay
        resident."""
        graph = resolved.graph
        given = {value for name in names for value in graph.stages[name].gives}
        if graph.helpers:
            return [name for name, stage in graph.helpers.items() if given & set(stage.takes)]
        if not (resolved.config.preview_every and is_resident(resolved.config)):
            return []
        takers = [name for name in graph.stages if name not in names and given & set(graph.stages[name].takes)]
        able = [name for name in takers if find(name).previews]
        return [name for name in able if set(graph.stages[name].uses) <= resolved.checkpoints.keys()]

    # ------------------------------------------------------------ results and memory

    def recall(self, cache: BuildCache | None, step: RunStep) -> dict[str, numpy.ndarray] | None:
        """The cached result of a stage with the same key, from this process or an earlier one."""
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
        """Free the weights that none of these stages needs."""
        needed = {key for stage in stages for key in stage.components}
        for key, component in self.components.items():
            if key not in needed:
                component.free()

    def free(self) -> None:
        """Free all weights."""
        self.free_unused([])

    def clear(self) -> None:
        """Free all weights, programs and results."""
        with self.lock:
            self.free()
            for made in (self.stages, self.components, self.results):
                made.clear()


def check_stages(job: Job, names: list[str]) -> None:
    """Raise one error with all problems that the stages find in a job."""
    problems = [problem for name in names for problem in find(name).problems(name, job)]
    if job.config.preview_every and not job.graph.helpers and not any(find(name).previews for name in names):
        remedy = "add the stage that decodes to stages, or set 0"
        problems.append(f"preview_every={job.config.preview_every}: previews need the decoder; {remedy}")
    raise_problems(problems)


# ---------------------------------------------------------------- keys


def seen_settings(step: RunStep) -> dict[str, Any]:
    """The settings that determine a result, with inputs as the stage sees them."""
    settings = result_settings(step.resolved, step.name)
    return settings | find(step.name).seen_inputs(settings, step.resolved.family)


# The keys that determine a run's programs, as far as they are known before devices start and `resolve` runs.
START_KEYS = (
    "pipeline.name", "model.name", "model.path", "model.paths", "model.dtype", "model.scan_blocks", "vae", "mesh.name",
    "sharding.name", "resolution", "windows", "riflex", "ops", "guidance", "guider", "scheduler", "steps",
    "compile.xla_flags", "compile.matmul_precision",
)


def start_of(config, names: list[str]) -> dict:
    """The key under which a run records that the store holds all its programs. Devices are not known yet, so it is a
    guess: it only decides whether torch is imported while they start."""
    settings = {key: plain(OmegaConf.select(config, key)) for key in START_KEYS}
    return {"stages": names, "versions": versions(), "sources": sources()} | settings


# ---------------------------------------------------------------- while it runs


def import_models(family: Family, emit: Listener) -> None:
    """Import torch, diffusers and transformers: seconds, once a process."""
    began = time.perf_counter()
    for module in family.modules:
        import_module(module)
    emit(Took("imports", time.perf_counter() - began))


def log_misses(cache: BuildCache, fresh: dict[str, Programs]) -> None:
    """Log why stages are traced, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for name, programs in fresh.items():
        if not programs.stored:
            reasons.setdefault(cache.why_not(programs.kind, programs.recipe), []).append(name)
    for reason, names in reasons.items():
        log.info("%s: traced, since %s", ", ".join(names), reason)


session = Session()  # of this process
