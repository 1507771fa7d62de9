"""Programs: traced from shapes alone, compiled in a thread while weights load."""
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

    function: Callable | None  # None if it comes from the store: it is not traced again
    component: str  # whose arrays it takes; another of the same architecture works as well
    arguments: Any  # structs; or a function of the programs lowered before, which returns them
    outputs: Any = None  # shardings
    donated: tuple[int, ...] = ()  # positions in (arrays, *arguments)


@dataclass
class Programs:
    """The programs of one stage, and the specs of the arrays they take.

    Programs that are in the store are loaded from it. Otherwise the stage is built, which adds programs to compile.
    """

    stage: str
    recipe: Recipe
    specs: dict[str, dict[str, weights.ArraySpec]]  # by component, then by name
    build: Callable[[], None]  # makes the stage add its traceable programs
    cache: BuildCache | None = None
    ops: dict = field(default_factory=dict)  # torchax op overrides during tracing
    entries: dict[str, Program] = field(default_factory=dict)
    stored: dict[str, dict] = field(default_factory=dict)  # metadata of the programs in the store
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
        """Transfer numpy values, in the tree structure that the program takes, to the devices."""
        return put(tuple(self.entries[name].arguments), values)

    def ready(self) -> bool:
        """Whether all programs are compiled: a run that failed or was cancelled may leave some out."""
        futures = self.compiled.values()
        return bool(futures) and all(future.done() and future.exception() is None for future in futures)

    def raise_error(self) -> None:
        """Raise the first tracing or compilation error, if any."""
        for future in self.compiled.values():
            if future.done() and (error := future.exception()) is not None:
                raise error

    def lower(self, stop: threading.Event | None = None, platforms: tuple[str, ...] | None = None) -> dict:
        """Trace and lower every program from shapes alone: {name: jax.stages.Lowered}.

        `stop` ends it early; `platforms` lowers for devices that are not attached, on an abstract mesh.
        """
        lowered = {}
        for name in self.entries:
            if stop is not None and stop.is_set():
                break
            jitted, structs = self.jitted(name, lowered)
            lowered[name] = jitted.trace(*structs).lower(lowering_platforms=platforms)
        return lowered

    def jitted(self, name: str, lowered: dict) -> tuple[Callable, tuple]:
        """A program as a jitted function, and the structs of its arguments; `lowered` has the programs before it."""
        program = self.entries[name]
        arrays = {key: tensor.struct for key, tensor in self.specs[program.component].items()}
        function = jax.jit(self.traced(program.function), donate_argnums=program.donated, out_shardings=program.outputs)
        return function, (arrays, *self.arguments(name, lowered))

    def arguments(self, name: str, lowered: dict) -> list:
        """The structs of a program's arguments besides its component's arrays."""
        arguments = self.entries[name].arguments
        return arguments(lowered) if callable(arguments) else arguments

    def describe(self, lowered: dict) -> dict[str, dict]:
        """The metadata that the store needs to load each program without tracing."""
        return {
            name: describe_program(program, self.entries[name].component, self.arguments(name, lowered))
            for name, program in lowered.items()
        }

    def load(self, about: dict) -> tuple[jax.stages.Compiled, Any, bool]:
        return *load_program(self.cache, about, self.specs[about["component"]], self.recipe.mesh), True

    def compile(self, lowered: jax.stages.Lowered, about: dict | None) -> tuple[jax.stages.Compiled, Any, bool]:
        """A program, its memory analysis, and whether it came from a cache: other sources may lower to the same
        program."""
        if about is None:
            hits = cache_hits[threading.get_ident()]
            compiled = lowered.compile()
            return compiled, compiled.memory_analysis(), cache_hits[threading.get_ident()] > hits
        try:
            return self.load(about)
        except Exception as error:
            if not isinstance(error, Missing):
                log.warning("recompiling a program of %s: the stored one cannot be loaded (%s)", self.stage, error)
            compiled = compile_and_cache(self.cache, about, lowered)
            return compiled, compiled.memory_analysis(), False

    def traced(self, function: Callable) -> Callable:
        """The function with torchax enabled, which is needed only during tracing."""
        from wan_torchax.patches import torchax_on

        @functools.wraps(function)
        def program(*arguments):
            with torchax_on(self.ops):
                return function(*arguments)

        return program


def put(structs, values):
    """Transfer numpy values to the devices, with the dtypes and shardings of structs in the same tree."""
    return jax.tree.map(
        lambda struct, value: weights.put(numpy.asarray(value, struct.dtype), struct.sharding), structs, values
    )


class NotFinite(RuntimeError):
    """A result has NaN or infinite values; nothing is written."""

    def __init__(self, what: str, config, component: str):
        dtype = config.model.dtype[component]
        cause = "the checkpoint may be damaged"
        if dtype != "float32":
            cause = f"{dtype} may overflow: try model.dtype.{component}=float32"
        scale = OmegaConf.select(config, "guidance_scale")
        guidance = "" if scale is None else f"; a guidance_scale that is too high (now {scale}) can do it too"
        super().__init__(f"{what}: {cause}{guidance}")


# ---------------------------------------------------------------- compilation


compilations, cache_hits = Counter(), Counter()  # by thread, counted by JAX's monitoring events


def count_hit():
    cache_hits[threading.get_ident()] += 1


def count_compiled():
    compilations[threading.get_ident()] += 1


private.on_compilation(count_hit, count_compiled)


class Unexpected(RuntimeError):
    """A compilation while a stage runs. All programs are compiled ahead; on a TPU this bug would cost minutes."""


raise_unexpected = False  # set by tests; for users it is only a warning


@contextlib.contextmanager
def no_compilation(stage: str) -> Iterator[None]:
    """Warn if this thread compiles anything inside the block."""
    thread = threading.get_ident()
    before = compilations[thread]
    yield
    if count := compilations[thread] - before:
        log.warning("%d programs were compiled while %s ran: please report it", count, stage)
        if raise_unexpected:
            raise Unexpected(f"{count} programs were compiled while {stage} ran")


@contextlib.contextmanager
def own_compilation() -> Iterator[None]:
    """Exempt the block from `no_compilation`: loading weights compiles programs of its own, e.g. to merge adapters."""
    before = compilations[threading.get_ident()]
    yield
    compilations[threading.get_ident()] = before


@contextlib.contextmanager
def compiling(stages: dict[str, Programs], emit: Listener) -> Iterator[Listener]:
    """Compile the programs of every stage in a thread, in order, while the `with` block loads and runs what is ready.

    The block emits its events to the listener it is given. That listener also forwards the thread's events, and raises
    what should end the run early: an interruption, or a compilation error, also of a later stage. Leaving the block
    early waits only for the program that is being compiled, since XLA cannot be interrupted.
    """
    stop = threading.Event()
    for programs in stages.values():
        programs.compiled = {name: Future() for name in programs.entries}

    def work(enqueue):
        for programs in stages.values():
            try:
                compile_all(programs, enqueue, stop)
            except BaseException as error:
                for future in programs.compiled.values():
                    if not future.done():
                        future.set_exception(error)

    def emit_all(event):
        thread.forward(emit)
        emit(event)
        interruption.check()
        for programs in stages.values():
            programs.raise_error()

    thread, interval = Background(work), sys.getswitchinterval()
    # Tracing holds the GIL for a whole switch interval (5 ms by default), and loading requests it thousands of times.
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        yield emit_all
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.finish()
    thread.forward(emit)


def compile_all(programs: Programs, emit: Listener, stop: threading.Event) -> None:
    """Load the programs from the store; if they are not there or fail to load, trace, compile and store them."""
    try:
        for name, about in programs.stored.items():
            if not stop.is_set():
                fulfil(programs, name, emit, functools.partial(programs.load, about), from_store=True)
        if programs.stored:
            return
    except Exception as error:  # platforms raise different errors for executables they reject
        log.warning("retracing %s: the stored programs cannot be loaded (%s)", programs.stage, error)
        programs.build()
    began = time.perf_counter()
    lowered = programs.lower(stop)
    emit(Took("tracing", time.perf_counter() - began))
    abouts = programs.describe(lowered) if programs.cache else {}
    for name, program in lowered.items():
        if stop.is_set():
            return
        fulfil(programs, name, emit, functools.partial(programs.compile, program, abouts.get(name)))
    if programs.cache and all(programs.cache.has_executable(about["executable"]) for about in abouts.values()):
        programs.cache.write(programs.kind, programs.recipe, {"programs": abouts}, {})


def fulfil(programs: Programs, name: str, emit: Listener, make: Callable, from_store: bool = False) -> None:
    """Set a program's future; `make` returns the program, its memory analysis, and whether it came from a cache."""
    if programs.compiled[name].done():  # this one was loaded before another failed to load
        return
    began = time.perf_counter()
    compiled, memory, from_cache = make()
    seconds = time.perf_counter() - began
    emit(Took("compiling", seconds))
    emit(Compiled(f"{programs.stage}.{name}", seconds, from_cache, memory, from_store))
    programs.compiled[name].set_result(compiled)
