"""Programs: traced from shapes alone, compiled in a thread while weights load, called with arrays."""
import contextlib
import functools
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy
from omegaconf import OmegaConf

from wan_torchax import interruption, private
from wan_torchax.config.resolve import Recipe
from wan_torchax.events import Background, Compiled, Listener, Took
from wan_torchax.runtime import weights
from wan_torchax.runtime.build_cache import (
    BuildCache,
    Missing,
    compile_and_cache,
    describe_program,
    load_program,
    structs,
)

log = logging.getLogger("wan")


@dataclass
class Program:
    """A function of (arrays, *arguments), to be compiled ahead of time."""

    function: Callable | None  # None for one that is kept: it is not traced again
    component: str  # whose arrays it takes; another of the same architecture serves as well
    arguments: Any  # structs; or a function of the programs lowered before, which returns them
    outputs: Any = None  # shardings
    donated: tuple[int, ...] = ()  # positions in (arrays, *arguments)


@dataclass
class Programs:
    """The programs of one stage, and the plan of the arrays they take.

    Those that the store has are there at once, to be loaded. Else the stage is built, which adds them, to be compiled.
    """

    stage: str
    recipe: Recipe
    specs: dict[str, dict[str, weights.ArraySpec]]  # by component, then by name
    build: Callable[[], None]  # has the stage add programs that can be traced
    cache: BuildCache | None = None
    ops: dict = field(default_factory=dict)  # overrides for torchax while they are traced
    entries: dict[str, Program] = field(default_factory=dict)
    stored: dict[str, dict] = field(default_factory=dict)  # what the store says of each
    compiled: dict[str, Future] = field(default_factory=dict)

    def __post_init__(self):
        if entry := self.cache and self.cache.read(self.kind, self.recipe):
            self.stored = entry.about["programs"]
        for name, about in self.stored.items():
            self.entries[name] = Program(None, about["component"], structs(about, self.recipe.mesh))

    @property
    def kind(self) -> str:
        return f"programs-{self.stage}"

    def __call__(self, name: str, arrays: dict, *arguments):
        interruption.wait([self.compiled[name]])
        return self.compiled[name].result()(arrays, *arguments)

    def put(self, name: str, values: tuple) -> tuple:
        """Send numpy values, in the trees that the program takes, to the devices."""
        return put(tuple(self.entries[name].arguments), values)

    def ready(self) -> bool:
        """Not so after a run that was cancelled, or failed, before the compiler got to the last program."""
        futures = self.compiled.values()
        return bool(futures) and all(future.done() and future.exception() is None for future in futures)

    def raise_error(self) -> None:
        """Raise what one of them could not be traced or compiled for."""
        for future in self.compiled.values():
            if future.done() and (error := future.exception()) is not None:
                raise error

    def lower(self, stop: threading.Event | None = None, platforms: tuple[str, ...] | None = None) -> dict:
        """Trace and lower every program from shapes alone: {name: jax.stages.Lowered}.

        `stop` ends it early; `platforms` lowers for devices that are not here, on an abstract mesh.
        """
        lowered = {}
        for name in self.entries:
            if stop is not None and stop.is_set():
                break
            jitted, structs = self.jitted(name, lowered)
            lowered[name] = jitted.trace(*structs).lower(lowering_platforms=platforms)
        return lowered

    def jitted(self, name: str, lowered: dict) -> tuple[Callable, tuple]:
        """A program as a jitted function, and the structs of what it takes; `lowered` has the programs before it."""
        program = self.entries[name]
        arrays = {key: tensor.struct for key, tensor in self.specs[program.component].items()}
        function = jax.jit(self.traced(program.function), donate_argnums=program.donated, out_shardings=program.outputs)
        return function, (arrays, *self.arguments(name, lowered))

    def arguments(self, name: str, lowered: dict) -> list:
        """The structs of what a program takes beside its component's arrays."""
        arguments = self.entries[name].arguments
        return arguments(lowered) if callable(arguments) else arguments

    def describe(self, lowered: dict) -> dict[str, dict]:
        """What the store is to know of each program, to load it without tracing."""
        return {
            name: describe_program(program, self.entries[name].component, self.arguments(name, lowered))
            for name, program in lowered.items()
        }

    def load(self, about: dict) -> tuple[jax.stages.Compiled, Any, bool]:
        return *load_program(self.cache, about, self.specs[about["component"]], self.recipe.mesh), True

    def compile(self, lowered: jax.stages.Lowered, about: dict | None) -> tuple[jax.stages.Compiled, Any, bool]:
        """A program, the memory it takes, and whether it was compiled before: by sources that lower to the same."""
        if about is None:
            hits = cache_hits[threading.get_ident()]
            compiled = lowered.compile()
            return compiled, compiled.memory_analysis(), cache_hits[threading.get_ident()] > hits
        try:
            return self.load(about)
        except Exception as error:
            if not isinstance(error, Missing):
                log.warning("a program of %s is compiled again: it cannot be loaded (%s)", self.stage, error)
            compiled = compile_and_cache(self.cache, about, lowered)
            return compiled, compiled.memory_analysis(), False

    def traced(self, function: Callable) -> Callable:
        """The function inside torchax, which is on only while it is traced."""
        from wan_torchax.patches import torchax_on

        @functools.wraps(function)
        def program(*arguments):
            with torchax_on(self.ops):
                return function(*arguments)

        return program


def put(structs, values):
    """numpy values on the devices, as structs of the same tree say."""
    return jax.tree.map(
        lambda struct, value: weights.put(numpy.asarray(value, struct.dtype), struct.sharding), structs, values
    )


class NotFinite(RuntimeError):
    """Numbers overflowed; nothing is written."""

    def __init__(self, what: str, config, component: str):
        dtype = config.model.dtype[component]
        cause = "the checkpoint may be damaged"
        if dtype != "float32":
            cause = f"{dtype} may overflow: try model.dtype.{component}=float32"
        scale = OmegaConf.select(config, "guidance_scale")
        guidance = "" if scale is None else f"; a guidance_scale that is too high (now {scale}) can do it too"
        super().__init__(f"{what}: {cause}{guidance}")


# ---------------------------------------------------------------- compilation


compilations, cache_hits = Counter(), Counter()  # by thread, counted by JAX's own events


def count_found():
    cache_hits[threading.get_ident()] += 1


def count_compiled():
    compilations[threading.get_ident()] += 1


private.on_compilation(count_found, count_compiled)


class Unexpected(RuntimeError):
    """Everything was compiled ahead: a compilation while a stage runs is a bug that would cost minutes on a TPU."""


raise_unexpected = False  # set by tests: a user's result is not worth less for it


@contextlib.contextmanager
def no_compilation(stage: str) -> Iterator[None]:
    """Tell of programs that this thread compiles in here."""
    thread = threading.get_ident()
    before = compilations[thread]
    yield
    if count := compilations[thread] - before:
        log.warning("%d programs were compiled while %s ran: please report it", count, stage)
        if raise_unexpected:
            raise Unexpected(f"{count} programs were compiled while {stage} ran")


@contextlib.contextmanager
def own_compilation() -> Iterator[None]:
    """What is compiled in here is none of the stage's programs: merging the adapters of weights that it brings."""
    before = compilations[threading.get_ident()]
    yield
    compilations[threading.get_ident()] = before


@contextlib.contextmanager
def compiling(stages: dict[str, Programs], emit: Listener) -> Iterator[Listener]:
    """Compile the programs of every stage in a thread, in order, while the `with` block loads and runs what is ready.

    The block tells its events to the listener it is given. That one tells those of the thread too, and then raises what
    ends a run early: an interruption, or what the compiler stumbled over, also in a stage whose turn comes later.
    Leaving the block early waits for the program in the compiler's hands, which cannot be stopped, and for no other.
    """
    stop = threading.Event()
    for programs in stages.values():
        programs.compiled = {name: Future() for name in programs.entries}

    def work(tell_later):
        for programs in stages.values():
            try:
                compile_all(programs, tell_later, stop)
            except BaseException as error:
                for future in programs.compiled.values():
                    if not future.done():
                        future.set_exception(error)

    def tell_all(event):
        thread.hand_on(emit)
        emit(event)
        interruption.check()
        for programs in stages.values():
            programs.raise_error()

    thread, interval = Background(work), sys.getswitchinterval()
    # Loading asks for the interpreter thousands of times, and tracing keeps it for this long each time; by default 5
    # ms.
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        yield tell_all
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.finish()
    thread.hand_on(emit)


def compile_all(programs: Programs, emit: Listener, stop: threading.Event) -> None:
    """Load what the store has. Where it has nothing, or what cannot be loaded: trace, compile and keep."""
    try:
        for name, about in programs.stored.items():
            if not stop.is_set():
                hand_over(programs, name, emit, functools.partial(programs.load, about), from_store=True)
        if programs.stored:
            return
    except Exception as error:  # whatever a platform says of an executable that it does not take
        log.warning("%s is traced again: what the store has cannot be loaded (%s)", programs.stage, error)
        programs.build()
    began = time.perf_counter()
    lowered = programs.lower(stop)
    emit(Took("tracing", time.perf_counter() - began))
    abouts = programs.describe(lowered) if programs.cache else {}
    for name, program in lowered.items():
        if stop.is_set():
            return
        hand_over(programs, name, emit, functools.partial(programs.compile, program, abouts.get(name)))
    if programs.cache and all(programs.cache.has_executable(about["executable"]) for about in abouts.values()):
        programs.cache.write(programs.kind, programs.recipe, {"programs": abouts}, {})


def hand_over(programs: Programs, name: str, emit: Listener, make: Callable, from_store: bool = False) -> None:
    """Make a program for those who wait for it; `make` gives it, its memory, and whether it was compiled before."""
    if programs.compiled[name].done():  # it could be loaded, and another could not
        return
    began = time.perf_counter()
    compiled, memory, from_cache = make()
    seconds = time.perf_counter() - began
    emit(Took("compiling", seconds))
    emit(Compiled(f"{programs.stage}.{name}", seconds, from_cache, memory, from_store))
    programs.compiled[name].set_result(compiled)
