"""All that the project uses of other packages without their promise to keep it, in one place.

An entry is a function: what it gives, why no public name gives that, and when it can go. VERSIONS are those that all
entries were checked with. tests/test_private.py calls each on what is installed, so that an upgrade that breaks one
fails there, by its name. Packages are imported inside the functions: this file costs nothing to import.
"""
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

# The first and the last.
VERSIONS = {
    "jax": ("0.10.2", "0.11.2"),
    "torch": ("2.10.0", "2.13.0"),
    "torchax": ("0.0.13", "0.0.13"),
    "diffusers": ("0.42.1", "0.42.1"),
    "transformers": ("5.22.2", "5.22.2"),
    "hydra-core": ("1.3.8", "1.3.8"),
    "uvicorn": ("0.54.0", "0.54.0"),
}


class Entry(NamedTuple):
    packages: tuple[str, ...]
    why: str
    until: str


ENTRIES: dict[str, Entry] = {}  # by the function's name


def private(*packages: str, why: str, until: str) -> Callable:
    """Marks a function that uses what these packages do not promise."""

    def enter(function):
        ENTRIES[function.__name__] = Entry(packages, why, until)
        return function

    return enter


# ---------------------------------------------------------------- JAX


@private(
    "jax",
    why="JAX reads jax_enable_compilation_cache once a process, and it would count for all threads",
    until="an executable that came out of the cache can be serialised on a CPU, or compile() takes a switch",
)
@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """What this thread compiles in here is not looked up in JAX's cache, nor written there."""
    ask_each_thread()
    here.uncached = True
    try:
        yield
    finally:
        here.uncached = False


here = threading.local()


@functools.cache
def ask_each_thread() -> None:
    from jax._src import compilation_cache

    is_cache_used = compilation_cache.is_cache_used
    compilation_cache.is_cache_used = lambda backend: not getattr(here, "uncached", False) and is_cache_used(backend)


@private(
    "jax",
    why="jax.devices() answers by looking for them, after which flags come too late",
    until="JAX says publicly whether it has started",
)
def has_devices() -> bool:
    """Whether JAX has looked for its devices yet."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


@private(
    "jax",
    why="jax.distributed.initialize() finds them and starts at once, and the processes have to meet before",
    until="JAX finds a cluster without joining it",
)
def find_cluster(coordinator: str | None, processes: int | None, process: int | None, seconds: int) -> tuple:
    """Coordinator, process count and id, those that are None as JAX finds them; still None where it finds none."""
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(coordinator, processes, process, None, None, seconds)[:3]


@private(
    "jax",
    why="jax.nn.dot_product_attention, which calls this, rounds the log-sum-exp to bf16: too coarse to merge with",
    until="it gives float32",
)
def cudnn_attention(query, key, value, scale: float) -> tuple:
    """cuDNN's attention, (batch, tokens, heads, head_dim), and its log-sum-exp, (batch, heads, queries) float32."""
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    return dot_product_attention(query, key, value, scale=scale, return_residual=True)


@private(
    "jax",
    why="jax.extend.mlir lacks the LLVM dialect, and what plgpu.inline_mgpu gives and takes has no public name",
    until="jax.extend and jax.experimental.pallas.mosaic_gpu have them",
)
def mosaic_gpu() -> SimpleNamespace:
    """What code inside plgpu.inline_mgpu is written with."""
    from jax._src.lib.mlir.dialects import llvm
    from jax.experimental.mosaic import gpu

    return SimpleNamespace(
        llvm=llvm, warpgroup_idx=gpu.warpgroup_idx, FragmentedArray=gpu.FragmentedArray,
        WGMMA_LAYOUT_8BIT=gpu.WGMMA_LAYOUT_8BIT,
    )


@private(
    "jax",
    why="FragmentedArray's constructor names its arguments as private; its other makers load or fill",
    until="plgpu can turn float32 into e4m3 without moving it between threads",
)
def fragmented_array(registers, layout):
    """An array from each thread's own registers, of floating point."""
    return mosaic_gpu().FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


@private(
    "jax",
    why="jax.config has each setting as an attribute, and no documented list of them",
    until="such a list is documented",
)
def jax_settings() -> dict[str, Any]:
    """All of JAX's settings as they are now."""
    import jax

    return jax.config.values


@private(
    "jax",
    why="jax.monitoring is public, the names of JAX's own events are not",
    until="they are documented",
)
def on_compilation(found: Callable[[], None], compiled: Callable[[], None]) -> None:
    """Have `found` called for each program that JAX's cache has, and `compiled` for each program, both in the thread
    that asks for it."""
    import jax

    def event(name, **_):
        if name == "/jax/compilation_cache/cache_hits":
            found()

    def duration(name, seconds, **_):
        if name.endswith("backend_compile_duration"):
            compiled()

    jax.monitoring.register_event_listener(event)
    jax.monitoring.register_event_duration_secs_listener(duration)


# ---------------------------------------------------------------- torch and torchax


@private(
    "torch",
    why="torchax asks torch for overloads as it is imported, and torch has no way to add one",
    until="patches.overloads_of_old goes",
)
@contextlib.contextmanager
def missing_overloads(stand_in: Callable[[str, str], Any]) -> Iterator[None]:
    """Inside, what `stand_in(op, overload)` returns stands for an overload that torch does not have; None: nothing."""
    import torch

    packet = torch._ops.OpOverloadPacket
    shipped = packet.__getattr__

    def find(op, overload):
        try:
            return shipped(op, overload)
        except AttributeError:
            found = stand_in(op._qualified_op_name, overload)
            if found is None:
                raise
            return found

    packet.__getattr__ = find
    try:
        yield
    finally:
        packet.__getattr__ = shipped


@private(
    "torchax",
    why="override_op_definition overrides for good",
    until="torchax can take an override back",
)
@contextlib.contextmanager
def overridden_ops(environment, ops: dict[Any, Callable]) -> Iterator[None]:
    """Inside, these implementations take the place of torchax's own."""
    shipped = dict(environment._ops)
    try:
        for op, implementation in ops.items():
            environment.override_op_definition(op, implementation)
        yield
    finally:
        environment._ops = shipped


# ---------------------------------------------------------------- diffusers and transformers


@private(
    "diffusers",
    why="diffusers imports torch_xla wherever it is installed, and has no switch against that",
    until="there is one, or it imports torch_xla where it is used",
)
def hide_torch_xla() -> None:
    """diffusers takes torch_xla for not installed, in what is imported from now on."""
    from diffusers.utils import import_utils

    import_utils._torch_xla_available = False


@private(
    "diffusers", "transformers",
    why="from_pretrained() heeds these lists and nothing tells them; our weights do not go through it",
    until="a model tells the dtypes of its parameters",
)
def float32_parts(module, dtype: str) -> tuple[str, ...]:
    """The parts of a model that its authors want in float32 where the rest is of this dtype.

    diffusers keeps its list in float32 for any half precision, transformers for float16 only (its strict list for
    both).
    """
    strict = dtype != "float16" and hasattr(module, "_keep_in_fp32_modules_strict")
    return tuple(getattr(module, "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules", None) or ())


@private(
    "diffusers",
    why="schedulers draw by a function that their module has imported; not all take a generator, and none takes noise",
    until="step() takes noise",
)
@contextlib.contextmanager
def given_noise(scheduler) -> Iterator[list]:
    """A list that a scheduler's next step takes its noise from, if it draws any."""
    given: list = []
    module: Any = sys.modules[type(scheduler).__module__]
    draw = getattr(module, "randn_tensor", None)
    if draw is None:
        yield given
        return
    module.randn_tensor = lambda *_, **__: given.pop()
    try:
        yield given
    finally:
        module.randn_tensor = draw


# ---------------------------------------------------------------- Hydra


@private(
    "hydra-core",
    why="Hydra's state is the process's; hydra.initialize() refuses where there is one, and restores a copy of it",
    until="a config can be composed without that state",
)
@contextlib.contextmanager
def hydra_apart() -> Iterator[None]:
    """Inside, Hydra is as if nobody had used it; afterwards others find theirs again."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    others, base = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, VersionBase.instance().version_base = others, base


@private(
    "hydra-core",
    why="Hydra documents the grammar of overrides and not its parser, which plugins use",
    until="the parser is documented",
)
def parse_override(text: str):
    """Hydra's own view of an override: type.name, package, key_or_group, value(), is_sweep_override()."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


@private("uvicorn", why="uvicorn has no deadline for a request's headers", until="it has one")
def h11_protocol() -> type:
    """What uvicorn makes of a connection: `conn`, `connections`, `loop`, `transport` and asyncio's own methods."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return H11Protocol


@private(
    "hydra-core",
    why="values are put into a config in the same call that reads all files, a third of a second each time",
    until="Hydra composes files once and values often",
)
def apply_overrides(config, overrides: list[str]) -> None:
    """What Hydra does with overrides of values once it has composed the files."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser

    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(overrides), config)
