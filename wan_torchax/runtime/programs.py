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

from wan_torchax.events import Compiled, Listener
from wan_torchax.runtime import weights

log = logging.getLogger("wan")


@dataclass
class Program:
    """A function of (arrays, *arguments), to be compiled ahead of time."""

    function: Callable
    component: str  # whose arrays it takes; another of the same architecture serves as well
    arguments: Any  # structs; or a function of the programs lowered before, which returns them
    outputs: Any = None  # shardings
    donated: tuple[int, ...] = ()  # positions in (arrays, *arguments)


@dataclass
class Programs:
    """The programs of one stage, and the plan of the arrays they take."""

    tensors: dict[str, dict[str, weights.Tensor]]  # by component, then by name
    ops: dict  # overrides for torchax while they are traced
    entries: dict[str, Program] = field(default_factory=dict)
    compiled: dict[str, Future] = field(default_factory=dict)

    def __call__(self, name: str, arrays: dict, *arguments):
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
        arguments = program.arguments(lowered) if callable(program.arguments) else program.arguments
        arrays = {key: tensor.struct for key, tensor in self.tensors[program.component].items()}
        function = jax.jit(self.traced(program.function), donate_argnums=program.donated, out_shardings=program.outputs)
        return function, (arrays, *arguments)

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
        scale = config.guidance_scale
        super().__init__(f"{what}: {cause}; a guidance_scale that is too high (now {scale}) can do it too")


# ---------------------------------------------------------------- compilation


compilations = Counter()  # by what, counted by JAX's own events


def count_event(event, **_):
    if event == "/jax/compilation_cache/cache_hits" and threading.current_thread().name == "compile":
        compilations["cache_hits"] += 1


def count_duration(event, seconds, **_):
    if event.endswith("backend_compile_duration"):
        compilations[threading.get_ident()] += 1


jax.monitoring.register_event_listener(count_event)
jax.monitoring.register_event_duration_secs_listener(count_duration)


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
def compiling(stages: dict[str, Programs], tell: Listener) -> Iterator[None]:
    """Compile the programs of every stage in a thread, in order, while the `with` block loads and runs what is ready.

    An error reaches whoever asks for the program. Leaving the block early waits for the program in the compiler's
    hands, which cannot be stopped, and for no other.
    """
    stop = threading.Event()
    for programs in stages.values():
        programs.compiled = {name: Future() for name in programs.entries}

    def work():
        for stage, programs in stages.items():
            try:
                compile_all(stage, programs, tell, stop)
            except BaseException as error:
                for future in programs.compiled.values():
                    if not future.done():
                        future.set_exception(error)

    thread, interval = threading.Thread(target=work, name="compile"), sys.getswitchinterval()
    # Loading asks for the interpreter thousands of times, and tracing keeps it for this long each time; by default 5
    # ms.
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def compile_all(stage: str, programs: Programs, tell: Listener, stop: threading.Event) -> None:
    began = time.perf_counter()
    for name, lowered in programs.lower(stop).items():
        if stop.is_set():
            return
        hits = compilations["cache_hits"]
        compiled = lowered.compile()
        from_cache, seconds = compilations["cache_hits"] > hits, time.perf_counter() - began
        tell(Compiled(f"{stage}.{name}", seconds, from_cache, compiled.memory_analysis()))
        programs.compiled[name].set_result(compiled)
        began = time.perf_counter()
