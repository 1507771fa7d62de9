"""One Session for all who want videos: run.py, ComfyUI, benchmarks, plans and tuning are its callers.

    session = Session()
    resolved = session.resolve(config, ["text", "denoise", "decode"])       # checkpoints found, devices started
    values = session.run(resolved, ["text", "denoise", "decode"], resolved.inputs(), print)

It owns what a process has made so far, each thing by what it was made from: programs, weights, and the last results of
stages that are cheap to keep. So a sweep over seeds or prompts compiles and loads nothing twice, and a change of model,
mesh or sharding frees the old before the new is loaded. Two threads may ask it at once: they queue.
"""
import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from typing import Any

import numpy
from omegaconf import OmegaConf

from wan_torchax import interruption
from wan_torchax.config import inputs
from wan_torchax.config.graph import Graph
from wan_torchax.config.resolve import Resolved, key_of, plain, resolve
from wan_torchax.devices.start import start, warm_up
from wan_torchax.events import (
    Advanced,
    Background,
    Began,
    Ended,
    Finished,
    Listener,
    Previewed,
    Stepped,
    Took,
    silence,
)
from wan_torchax.records.provenance import sources, versions
from wan_torchax.records.store import Store
from wan_torchax.runtime import adapters
from wan_torchax.runtime.checkpoint import find_all, find_present, fingerprints
from wan_torchax.runtime.components import Component
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
        self.results: dict[str, dict[str, dict[str, numpy.ndarray]]] = {}  # by stage, then by what they were made from

    # ------------------------------------------------------------ before a run

    def resolve(self, config, names: Iterable[str], tell: Listener = silence, weights: bool = True) -> Resolved:
        """Find the checkpoints of the named stages, start the devices, and leave nothing open in the config.

        Without `weights`, only a local checkpoint is looked at, for what its config.json adds: nothing will be loaded.
        """
        graph = Graph.of(config.pipeline)
        needed = graph.components(names)
        loaded = [name for name in graph.components(graph.stages) if name in self.components and name not in needed]
        checkpoints = find_present(config.model, loaded) | find_all(config.model, needed, required=weights)
        checkpoints = adapters.on(checkpoints, config) if weights else checkpoints
        names, store = list(names), Store.of(config)
        with self.lock, phase("start", tell):
            imports = Background(import_models)
            # Torch and diffusers are imported while the devices start, if this run will need them.
            warm = store is not None and weights and store.has("start", start_of(config, names))
            began = time.perf_counter()
            devices = start(config, meanwhile=(lambda: None) if warm else imports.start)
            resolved = resolve(config, checkpoints, devices)
            warm_up(resolved.mesh)
            tell(Took("devices", time.perf_counter() - began))
            imports.finish()
            imports.hand_on(tell)
        return resolved

    def build(self, resolved: Resolved, names: Iterable[str], kept: Kept | None = None) -> dict[str, Stage]:
        """The named stages, on their components; what was made before and still fits is used again. With `kept`, also
        what earlier processes made: such programs run, and cannot be looked into."""
        for name in list(self.components):  # also one that is not used this time holds memory
            if Component.key_for(name, resolved) != self.components[name].key:
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
            stage = self.stages[place] = find(name)(name, recipe, components, kept)
        stage.components = components
        return stage

    # ------------------------------------------------------------ a run

    def run(
        self, resolved: Resolved, names: Iterable[str], values: dict[str, Any], tell: Listener = silence
    ) -> dict[str, Any]:
        """Run the named stages in order on the values at hand; returns those they give beside those handed in."""
        with self.lock:
            try:
                return self.run_alone(resolved, list(names), dict(values), tell)
            finally:
                if not is_resident(resolved.config):
                    self.free()

    def prepare(self, resolved: Resolved, names: Iterable[str], tell: Listener = silence) -> None:
        """Compile what the named stages will run and load what may stay, so that a first run waits for neither."""
        with self.lock:
            with phase("build", tell):
                stages = self.build(resolved, names)
                for component in self.components.values():
                    component.check()
            fresh = {name: stage.programs for name, stage in stages.items() if not stage.programs.ready()}
            with compiling(fresh, tell) as tell_all:
                for stage in stages.values():
                    for key in stage.components_first(resolved) if is_resident(resolved.config) else ():
                        stage.components[key].load(stage.tensors[key], tell_all)
                for stage in stages.values():
                    wait_for_programs(stage, tell_all)
                    stage.programs.raise_error()

    def run_alone(self, resolved: Resolved, names: list[str], values: dict[str, Any], tell: Listener) -> dict[str, Any]:
        asked, kept = list(names), Kept.of(resolved)
        for name in names:
            if (result := self.recall(name, resolved, kept)) is not None:
                values |= result
                tell(Finished(name, result))
        names = [name for name in names if not set(resolved.graph.stages[name].gives) <= values.keys()]
        with phase("build", tell):
            stages = self.build(resolved, [*names, *self.helpers(resolved, names)], kept)
            for name in {component for stage in stages.values() for component in stage.components}:
                self.components[name].check()
            for name in names:
                stages[name].check(resolved)
        fresh = {name: stage.programs for name, stage in stages.items() if not stage.programs.ready()}
        if kept:
            tell_misses(kept, fresh)
        with compiling(fresh, tell) as tell_all:
            for name in names:
                result = self.run_stage(name, stages, resolved, values, tell_all)
                if not is_resident(resolved.config):
                    self.free_unused([stages[other] for other in names[names.index(name) + 1 :]])
                values |= result
                self.remember(name, resolved, result, kept)
                tell_all(Finished(name, result))
        if kept:
            kept.store.write("start", start_of(resolved.config, asked), {}, {})
        return values

    def run_stage(self, name: str, stages: dict[str, Stage], resolved: Resolved, values: dict, tell: Listener) -> dict:
        """Load what a stage needs, wait for its programs, run it; gives its values."""
        stage, previewer = stages[name], self.previewer(name, stages, resolved)
        for loading in filter(None, (stage, previewer)):
            for key in loading.components_first(resolved):
                loading.components[key].load(loading.tensors[key], tell)
        wait_for_programs(stage, tell)
        self.read_next(name, stages, resolved)
        taken = {value: values[value] for value in resolved.graph.stages[name].takes}
        listener = tell if previewer is None else with_previews(previewer, resolved.config.preview_every, tell)
        with phase(name, tell, *stage.amount(resolved)), no_compilation(name):
            return stage.run(resolved, taken, listener)

    def read_next(self, name: str, stages: dict[str, Stage], resolved: Resolved) -> None:
        """Have the weights of the next stage read from disk while this one runs."""
        names = list(stages)
        for following in names[names.index(name) + 1 :][:1]:
            for key in stages[following].components_first(resolved):
                component = stages[following].components[key]
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

    def recall(self, name: str, resolved: Resolved, kept: Kept | None) -> dict[str, numpy.ndarray] | None:
        """The result of a stage that was made from the same before, by this process or another."""
        stage = find(name)
        if not stage.results_remembered:
            return None
        if result := self.results.get(name, {}).get(result_key(name, resolved)):
            return result
        recipe = stage.recipe_for(name, resolved)
        entry = kept and kept.read(f"result-{name}", recipe, **result_inputs(name, resolved))
        return entry and entry.arrays

    def remember(self, name: str, resolved: Resolved, result: dict[str, numpy.ndarray], kept: Kept | None) -> None:
        stage = find(name)
        if not stage.results_remembered:
            return
        results = self.results.setdefault(name, {})
        results[result_key(name, resolved)] = result
        while len(results) > stage.results_remembered:
            results.pop(next(iter(results)))
        if kept:
            recipe = stage.recipe_for(name, resolved)
            kept.write(f"result-{name}", recipe, {}, result, **result_inputs(name, resolved))

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


def result_key(name: str, resolved: Resolved) -> str:
    contents = fingerprints(resolved.checkpoints) | inputs.fingerprints(resolved.config)
    return key_of(result_settings(resolved.config, name, contents))


def result_inputs(name: str, resolved: Resolved) -> dict[str, Any]:
    """What a result was made from beside the recipe of its programs: weights, and inputs as the stage sees them."""
    contents = fingerprints(resolved.checkpoints) | inputs.fingerprints(resolved.config)
    settings = result_settings(resolved.config, name, contents)
    return {"result": settings | find(name).seen_inputs(settings)}


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


def import_models(tell: Listener) -> None:
    """Import torch, diffusers and transformers: seconds, once a process."""
    began = time.perf_counter()
    importlib.import_module("wan_torchax.models")
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
