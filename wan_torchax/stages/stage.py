"""What a stage is: one file says all there is to know of it.

    class Decode(Stage):
        settings = …            # keys of the config that its programs are built from
        result_settings = …     # keys of the config that its result depends on
        parts = …               # which tensors of a component it uses
        def derived(…)          # numbers from other parts of the config that its programs are built from
        def build(…)            # its programs
        def result_shapes(…)    # of the values it gives
        def check(…)            # what can go wrong, before any stage runs
        def amount(…)           # what its progress counts
        def run(…)              # values in, values out
        def temporaries(…)      # bytes it needs beside its weights, for plans

Stages import torch, diffusers and transformers only where they build: what they say of themselves costs nothing.
"""
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy
from omegaconf import OmegaConf

from wan_torchax.config import inputs, registry
from wan_torchax.config.geometry import guided
from wan_torchax.config.graph import Graph
from wan_torchax.config.resolve import Recipe, Resolved, plain
from wan_torchax.events import Listener
from wan_torchax.runtime.components import Component, settings_of
from wan_torchax.runtime.kept import Kept
from wan_torchax.runtime.programs import Program, Programs

COMMON_SETTINGS = ("ops", "allow_external_ops", "compile.matmul_precision")


class Stage:
    """A stage of a pipeline, built from a recipe on components that it may share with others."""

    settings: ClassVar[tuple[str, ...]] = ()
    result_settings: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[dict[str, str]] = {}  # component -> pattern of tensor names; all of those not listed
    results_remembered: ClassVar[int] = 0  # results that a session keeps, for settings it has met before

    def __init__(self, name: str, recipe: Recipe, components: dict[str, Component], kept: Kept | None = None):
        """With `kept`, programs are taken from the store if it has them, and handed to it if it has not."""
        self.name, self.recipe, self.components = name, recipe, components
        self.config, self.mesh = recipe.config, recipe.mesh
        self.tensors = {key: component.part(self.parts.get(key, ".*")) for key, component in components.items()}
        self.programs = Programs(name, recipe, self.tensors, self.prepare, kept)
        if not self.programs.stored:
            self.prepare()

    def prepare(self) -> None:
        """Add the programs as functions of torch modules, to be traced and compiled."""
        self.programs.ops = self.load_ops()
        self.build()

    @classmethod
    def recipe_for(cls, name: str, resolved: Resolved) -> Recipe:
        """All that the programs of this stage are made from."""
        uses = list(resolved.graph.stages[name].uses)
        keys = (key for component in uses for key in settings_of(component))
        return resolved.recipe([*COMMON_SETTINGS, *keys, *cls.settings], uses=uses, **cls.derived(resolved))

    def load_ops(self) -> dict:
        from wan_torchax.runtime.ops import load_ops

        return load_ops(self.config.ops, self.recipe.placement["platform"], self.config.allow_external_ops)

    def module(self, component: str):
        """A component as a torch module to trace, with the names and sharding constraints of its parts in place."""
        from wan_torchax.models.modules import name_scopes
        from wan_torchax.runtime.activations import constrain_activations

        key = registry.described_by(component)
        module = registry.load(registry.COMPONENTS, component).build(self.config)
        name_scopes(module)
        constrain_activations(module, self.config.sharding[key].activations, self.mesh, f"sharding.{key}.activations")
        return module

    def add(self, name: str, program: Program) -> None:
        self.programs.entries[name] = program

    def __call__(self, program: str, *arguments, component: str | None = None):
        """Run a program on a component's arrays: by default of the one it was built for, or of another just like it."""
        component = component or self.programs.entries[program].component
        arrays = self.components[component].arrays
        return self.programs(program, {name: arrays[name] for name in self.tensors[component]}, *arguments)

    def components_first(self, resolved: Resolved) -> Iterable[str]:
        """The components whose weights must be there when it begins; it brings others itself."""
        return self.components

    @classmethod
    def result_shapes(cls, config) -> dict[str, tuple[int, ...]]:
        """Of the values it gives."""
        raise NotImplementedError

    def check(self, resolved: Resolved) -> None:
        """Raise now what `run` would stumble over: called before any stage runs."""

    @classmethod
    def derived(cls, resolved: Resolved) -> dict[str, Any]:
        return {}

    @classmethod
    def seen_inputs(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Of the settings its result depends on, those that it sees otherwise than the user wrote them."""
        return {}

    @classmethod
    def amount(cls, resolved: Resolved) -> tuple[int | None, str]:
        """How much its progress counts, and of what."""
        return None, ""

    def build(self) -> None:
        """Add the programs."""
        raise NotImplementedError

    def run(self, resolved: Resolved, values: dict[str, Any], tell: Listener) -> dict[str, numpy.ndarray]:
        """The stage's work on the values it takes; gives those it gives."""
        raise NotImplementedError

    @classmethod
    def temporaries(cls, resolved: Resolved) -> float:
        """Bytes of one device that are alive at once beside the weights, estimated from shapes."""
        raise NotImplementedError


def find(name: str) -> type[Stage]:
    return registry.load(registry.STAGES, name)


def result_settings(config, name: str, fingerprints: dict[str, str]) -> dict[str, Any]:
    """Everything a stage's result depends on, by key: its own settings and inputs, and those of the stages before it;
    weights and pictures by what they hold.

    Meshes, shardings and kernels are not among them: they change the last bits, not the video.
    """
    graph = Graph.of(config.pipeline)
    stages = graph.upstream(name)
    keys = [*graph.input_keys(name), *(key for stage in stages for key in find(stage).result_settings)]
    settings = {key: plain(OmegaConf.select(config, key)) for key in keys if key not in inputs.FILES}
    content = {f"weights.{key}": fingerprints[key] for key in graph.components(stages) if key in fingerprints}
    content |= {f"input.{key}": fingerprints.get(key) for key in keys if key in inputs.FILES}
    return settings | {"guided": guided(config)} | content
