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
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy
from omegaconf import DictConfig, OmegaConf

from wan_torchax import interruption
from wan_torchax.config.resolve import Job, Resolved, key_of, plain, resolve
from wan_torchax.config.validation import raise_problems
from wan_torchax.devices.start import start, warm_up
from wan_torchax.events import (
    Advanced,
    Background,
    Began,
    Decoded,
    Ended,
    Finished,
    Listener,
    Previewed,
    Stepped,
    Took,
    silence,
)
from wan_torchax.models.family import Family, import_module
from wan_torchax.records.provenance import sources, versions
from wan_torchax.records.store import Store
from wan_torchax.runtime.components import Component
from wan_torchax.runtime.jobs import find_job, with_weights
from wan_torchax.runtime.kept import Kept
from wan_torchax.runtime.programs import Programs, compiling, no_compilation
from wan_torchax.stages.stage import Stage, find, result_settings

log = logging.getLogger("wan")


class Session:
    """Devices, components and programs of this process."""

    def __init__(self):
        self.lock = threading.RLock()
        self.stages: dict[str, Stage] = {}
        self.components: dict[str, Component] = {}
        self.results: dict[str, dict[str, dict[str, numpy.ndarray]]] = {}  # by stage, then by key

    # ------------------------------------------------------------ before a run

    def resolve(self, job: Job | DictConfig, names: Iterable[str], tell: Listener = silence) -> Resolved:
        """Have the checkpoints of the named stages here, start the devices, and leave nothing open."""
        job, names = find_job(job) if OmegaConf.is_config(job) else job, list(names)
        check_stages(job, names)
        job, store = with_weights(job, job.graph.components(names)), Store.of(job.config)
        return self.place(job, tell, warm=store is not None and store.has("start", start_of(job.config, names)))

    def place(self, job: Job, tell: Listener = silence, warm: bool = False) -> Resolved:
        """A job on the devices of this machine. Torch and diffusers are imported while these start, unless the start is
        `warm`: then nothing will need them."""
        with self.lock, phase("start", tell):
            imports = Background(functools.partial(import_models, job.family))
            began = time.perf_counter()
            devices = start(job.config, meanwhile=(lambda: None) if warm else imports.start)
            resolved = resolve(job, devices)
            warm_up(resolved.mesh)
            tell(Took("devices", time.perf_counter() - began))
            imports.finish()
            imports.hand_on(tell)
        return resolved

    def build(self, resolved: Resolved, names: Iterable[str], kept: Kept | None = None) -> dict[str, Stage]:
        """The named stages, on their components; what was made before and still fits is used again. With `kept`, also
        what earlier processes made: such programs run, and cannot be looked into."""
        for name, component in list(self.components.items()):  # also one that is not used this time holds memory
            if component.family is not resolved.family or Component.key_for(name, resolved) != component.key:
                self.components.pop(name).free()
        return {name: self.build_one(name, resolved, kept) for name in names}

    def build_one(self, name: str, resolved: Resolved, kept: Kept | None) -> Stage:
        components = {}
        for component in resolved.graph.stages[name].uses:
            if component not in self.components:
                self.components[component] = Component(component, resolved, kept)
            components[component] = self.components[component]
        recipe = find(name).recipe_for(name, resolved)
        videos = recipe.derived.get("videos", 1)  # programs for several at once stay beside those for one
        place = name if videos == 1 else f"{name} of {videos}"
        stage = self.stages.get(place)
        if stage is None or stage.recipe.key != recipe.key or not stage.programs.ready():
            self.stages.pop(place, None)
            stage = self.stages[place] = find(name)(name, recipe, components, resolved, kept)
        stage.components, stage.gives = components, tuple(resolved.graph.stages[name].gives)
        return stage

    def prepare(self, resolved: Resolved, names: Iterable[str], tell: Listener = silence) -> None:
        """Compile what the named stages will run and load what may stay, so that a first run waits for neither."""
        with self.lock:
            resolved = resolved.segments()[0]
            with phase("build", tell):
                stages = self.build(resolved, names)
                for component in self.components.values():
                    component.check()
            fresh = {name: stage.programs for name, stage in stages.items() if not stage.programs.ready()}
            with compiling(fresh, tell) as tell_all:
                for stage in stages.values() if is_resident(resolved.config) else ():
                    load(stage, resolved, tell_all)
                for stage in stages.values():
                    wait_for_programs(stage, tell_all)
                    stage.programs.raise_error()

    # ------------------------------------------------------------ a run

    def run(
        self, resolved: Resolved, names: Iterable[str], values: dict[str, Any], tell: Listener = silence,
        segments: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Run the named stages in order on the values at hand; returns those they give beside those handed in. Of a
        video that is made in several segments, `segments` has what is at hand of each."""
        with self.lock:
            try:
                return self.run_alone(resolved, list(names), dict(values), tell, segments)
            finally:
                if not is_resident(resolved.config):
                    self.free()

    def run_alone(self, resolved: Resolved, names: list[str], values: dict, tell: Listener, segments) -> dict[str, Any]:
        kept, steps = Kept.of(resolved), schedule(resolved, names)
        scopes = {step.segment: ChainMap(dict(segments.get(step.segment, {})), values) for step in steps}
        left = [step for step in steps if not step.gives <= scopes[step.segment].keys()]
        recalled = {step: result for step in left if (result := self.recall(step, kept)) is not None}
        left = [step for step in left if step not in recalled]
        with phase("build", tell):
            stages = self.build_checked(steps[0].resolved if steps else resolved, [step.name for step in left], kept)
        fresh = {name: stage.programs for name, stage in stages.items() if not stage.programs.ready()}
        if kept:
            tell_misses(kept, fresh)
        with compiling(fresh, tell) as tell_all:
            for step in steps:
                scope = scopes[step.segment]
                if step.segment:  # what the one before gave
                    carried = resolved.graph.carry.items()
                    scope.update({value: scopes[step.segment - 1].get(source) for value, source in carried})
                if step in left:
                    result = self.run_step(step, stages, scope, joined(step, resolved, tell_all))
                    left.remove(step)
                    if not is_resident(resolved.config):
                        self.free_unused([stages[other.name] for other in left])
                    self.remember(step, result, kept)
                elif step in recalled:
                    result = recalled[step]
                else:
                    joined(step, resolved, tell_all)(Decoded(scope["frames"])) if "frames" in step.gives else None
                    continue
                (values if step.segment is None else scope).update(result)
                tell_all(Finished(step.name, result, step.segment))
        if kept:
            kept.store.write("start", start_of(resolved.config, names), {}, {})
        return values | whole(resolved, scopes)

    def build_checked(self, resolved: Resolved, names: list[str], kept: Kept | None) -> dict[str, Stage]:
        """The named stages, each once, and those that show what they make; held against their files."""
        names = list(dict.fromkeys(names))
        stages = self.build(resolved, [*names, *self.helpers(resolved, names)], kept)
        for name in {component for stage in stages.values() for component in stage.components}:
            self.components[name].check()
        for name in names:
            stages[name].check(stages[name].view_of(name, resolved))
        return stages

    def run_step(self, step: "RunStep", stages: dict[str, Stage], values: dict, tell: Listener) -> dict:
        """Load what a stage needs, wait for its programs, run it; gives its values."""
        name, resolved, stage = step.name, step.resolved, stages[step.name]
        previewer = self.previewer(name, stages, resolved)
        for loading in filter(None, (stage, previewer)):
            load(loading, resolved, tell)
        wait_for_programs(stage, tell)
        self.read_next(name, stages, resolved)
        taken = {value: values.get(value) for value in resolved.graph.stages[name].takes}
        listener = tell if previewer is None else with_previews(previewer, resolved.config.preview_every, tell)
        with phase(name, tell, *stage.amount(name, resolved)), no_compilation(name):
            return stage.run(stage.view_of(name, resolved), taken, listener)

    def read_next(self, name: str, stages: dict[str, Stage], resolved: Resolved) -> None:
        """Have the weights of the next stage read from disk while this one runs."""
        names = list(stages)
        for following in names[names.index(name) + 1 :][:1]:
            stage = stages[following]
            for key in stage.components_first(stage.view_of(following, resolved)):
                component = stage.components[key]
                if not component.is_loaded() and component.fits_in_memory():
                    component.read_ahead()

    # ------------------------------------------------------------ previews

    def previewer(self, name: str, stages: dict[str, Stage], resolved: Resolved) -> Stage | None:
        """The stage that can show what another makes while it is made."""
        if not resolved.config.preview_every:
            return None
        graph = resolved.graph
        for key, stage in stages.items():
            if set(graph.stages[name].gives) & set(graph.stages[key].takes) and hasattr(stage, "preview"):
                return stage
        return None

    def helpers(self, resolved: Resolved, names: list[str]) -> list[str]:
        """Stages that are not run but show what others make: where their weights are at hand and may stay."""
        if not (resolved.config.preview_every and is_resident(resolved.config)):
            return []
        graph = resolved.graph
        given = {value for name in names for value in graph.stages[name].gives}
        takers = [name for name in graph.stages if name not in names and given & set(graph.stages[name].takes)]
        able = [name for name in takers if hasattr(find(name), "preview")]
        return [name for name in able if set(graph.stages[name].uses) <= resolved.checkpoints.keys()]

    # ------------------------------------------------------------ what stays

    def recall(self, step: "RunStep", kept: Kept | None) -> dict[str, numpy.ndarray] | None:
        """The result of a stage that was made from the same before, by this process or another."""
        stage = find(step.name)
        if not stage.results_remembered:
            return None
        settings = seen_settings(step)
        if result := self.results.get(step.name, {}).get(key_of(settings)):
            return result
        entry = kept and kept.read(f"result-{step.name}", stage.recipe_for(step.name, step.resolved), result=settings)
        return entry and entry.arrays

    def remember(self, step: "RunStep", result: dict[str, numpy.ndarray], kept: Kept | None) -> None:
        stage = find(step.name)
        if not stage.results_remembered:
            return
        results, settings = self.results.setdefault(step.name, {}), seen_settings(step)
        results[key_of(settings)] = result
        while len(results) > stage.results_remembered:
            results.pop(next(iter(results)))
        if kept:
            kept.write(f"result-{step.name}", stage.recipe_for(step.name, step.resolved), {}, result, result=settings)

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
            self.stages.clear(), self.components.clear(), self.results.clear()


def check_stages(job: Job, names: list[str]) -> None:
    """Raise what the stages know to be wrong with a job."""
    problems = [problem for name in names for problem in find(name).problems(name, job)]
    if job.config.preview_every and not any(hasattr(find(name), "preview") for name in names):
        remedy = "add the stage that decodes to stages, or set 0"
        problems.append(f"preview_every={job.config.preview_every}: previews need the decoder; {remedy}")
    raise_problems(problems)


def load(stage: Stage, resolved: Resolved, tell: Listener) -> None:
    """Bring the weights that a stage begins with to the devices."""
    for key in stage.components_first(stage.view_of(stage.name, resolved)):
        stage.components[key].load(stage.tensors[key], tell)


# ---------------------------------------------------------------- segments of a video


@dataclass(frozen=True, eq=False)
class RunStep:
    """A stage to be run: once, or for one of a video's segments."""

    name: str
    resolved: Resolved
    segment: int | None = None

    @property
    def gives(self) -> set[str]:
        return set(self.resolved.graph.stages[self.name].gives)


def schedule(resolved: Resolved, names: list[str]) -> list[RunStep]:
    """The named stages in order; those that the pipeline repeats, segment after segment."""
    parts, repeated = resolved.segments(), [name for name in names if name in resolved.graph.repeated]
    if len(parts) == 1:
        return [RunStep(name, resolved) for name in names]
    steps = []
    for name in names:
        if name not in repeated:
            steps.append(RunStep(name, resolved))
        elif name == repeated[0]:
            steps += [RunStep(other, part, part.segment) for part in parts for other in repeated]
    return steps


def window(resolved: Resolved, segment: int) -> slice:
    """Of a segment's frames, those that are the video's: what it shares with the one before comes once, and no more
    come than were asked for."""
    segments, total = resolved.config.pipeline.segments, resolved.config.resolution.frames
    first = segment * (segments.frames - segments.overlap)
    return slice(segments.overlap if segment else 0, min(segments.frames, total - first))


def joined(step: RunStep, resolved: Resolved, tell: Listener) -> Listener:
    """A listener that tells of a segment's frames as of the whole video's."""
    if step.segment is None:
        return tell
    part, seen = window(resolved, step.segment), 0

    def listener(event):
        nonlocal seen
        if isinstance(event, Decoded):
            first, last = max(part.start - seen, 0), max(part.stop - seen, 0)
            seen += len(event.frames)
            event = Decoded(event.frames[first:last])
        tell(event)

    return listener


def whole(resolved: Resolved, scopes: dict[int | None, ChainMap]) -> dict[str, numpy.ndarray]:
    """The frames of all segments as one video's."""
    own = {number: scope.maps[0] for number, scope in scopes.items() if number is not None}
    made = [values["frames"][window(resolved, number)] for number, values in own.items() if "frames" in values]
    return {"frames": numpy.concatenate(made)} if made else {}


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


def import_models(family: Family, tell: Listener) -> None:
    """Import torch, diffusers and transformers: seconds, once a process."""
    began = time.perf_counter()
    for module in family.modules:
        import_module(module)
    tell(Took("imports", time.perf_counter() - began))


def is_resident(config) -> bool:
    """Whether weights stay on the device after their stage: as the config says, by default only in a sweep."""
    return config.keep_resident if config.keep_resident is not None else config.sweep.active


@contextlib.contextmanager
def phase(name: str, tell: Listener, total: int | None = None, unit: str = "") -> Iterator[None]:
    began = time.perf_counter()
    interruption.check()
    tell(Began(name, total, unit))
    yield
    tell(Ended(name, time.perf_counter() - began))


def tell_misses(kept: Kept, fresh: dict[str, Programs]) -> None:
    """One line for all stages that are traced for the same reason."""
    reasons: dict[str, list[str]] = {}
    for name, programs in fresh.items():
        if not programs.stored:
            reasons.setdefault(kept.why_not(programs.kind, programs.recipe), []).append(name)
    for reason, names in reasons.items():
        log.info("%s: traced, since %s", ", ".join(names), reason)


def wait_for_programs(stage: Stage, tell: Listener) -> None:
    """Tell that compilation is still going on, if it is."""
    waiting, name = list(stage.programs.compiled.values()), f"compile_{stage.name}"
    if wait(waiting, timeout=0).not_done:
        with phase(name, tell):
            while wait(waiting, timeout=0.2).not_done:
                tell(Advanced(name, 0))


def with_previews(previewer: Stage, every: int, tell: Listener) -> Listener:
    """A listener that also tells how the video looks, every so many steps."""

    def listener(event):
        tell(event)
        if isinstance(event, Stepped) and event.step % every == 0 and event.step < event.steps:
            tell(Previewed(event.step, previewer.preview(event.estimate), event.video))

    return listener


session = Session()  # of this process
