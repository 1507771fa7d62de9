"""All uses of other packages' private APIs, in one place.

Each entry is a function with a reason why no public API suffices and when it can be removed. VERSIONS are the versions
that all entries were checked with. tests/test_private.py calls each entry on the installed packages, so an upgrade that
breaks one fails there by name. Packages are imported inside the functions, so this file is cheap to import.
"""
import contextlib
import copy
import functools
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

# The first and last checked versions.
VERSIONS = {
    "jax": ("0.10.2", "0.11.2"),
    "torch": ("2.10.0", "2.13.0"),
    "torchax": ("0.0.13", "0.0.13"),
    "diffusers": ("0.42.1", "0.42.1"),
    "transformers": ("5.17.0", "5.22.2"),
    "hydra-core": ("1.3.8", "1.3.8"),
    "omegaconf": ("2.3.1", "2.3.1"),
    "uvicorn": ("0.54.0", "0.54.0"),
}


SHORT = 200  # letters: what parsers make of a stranger's long text takes megabytes


class Entry(NamedTuple):
    packages: tuple[str, ...]
    why: str
    until: str


ENTRIES: dict[str, Entry] = {}  # by the function's name


def private(*packages: str, why: str, until: str) -> Callable:
    """Registers a function that uses private APIs of these packages."""

    def enter(function):
        ENTRIES[function.__name__] = Entry(packages, why, until)
        return function

    return enter


# ---------------------------------------------------------------- JAX


@private(
    "jax",
    why="JAX reads jax_enable_compilation_cache once per process, and it applies to all threads",
    until="an executable from the cache can be serialized on CPU, or compile() has an option",
)
@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compilations of this thread inside the block bypass JAX's compilation cache."""
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
    why="JAX compiles anew if it cannot read an entry of its compilation cache, but never overwrites the entry",
    until="it does",
)
@functools.cache
def remove_damaged_entries() -> None:
    """From now on, an entry that cannot be read is removed, so that JAX writes it again."""
    from jax._src import compilation_cache, lru_cache

    read = compilation_cache.get_executable_and_time

    def read_or_remove(key, compile_options, backend, *more):  # JAX 0.11 has one more
        try:
            return read(key, compile_options, backend, *more)
        except Exception:
            with contextlib.suppress(OSError):
                (compilation_cache._get_cache(backend).path / f"{key}{lru_cache._CACHE_SUFFIX}").unlink()
            raise

    compilation_cache.get_executable_and_time = read_or_remove


@private(
    "jax",
    why="jax.devices() initializes the devices, after which flags have no effect",
    until="JAX has a public query for it",
)
def has_devices() -> bool:
    """Whether JAX has initialized its devices."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


@private(
    "jax",
    why="jax.distributed.initialize() detects the cluster and joins at once; our rendezvous has to come before",
    until="JAX can detect a cluster without joining it",
)
def find_cluster(coordinator: str | None, processes: int | None, process: int | None, seconds: int) -> tuple:
    """Coordinator, process count and id; those given as None are detected by JAX, and stay None if it cannot."""
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(coordinator, processes, process, None, None, seconds)[:3]


@private(
    "jax",
    why="jax.nn.dot_product_attention, which calls this, rounds the log-sum-exp to bf16: too coarse to merge with",
    until="it returns float32",
)
def cudnn_attention(query, key, value, scale: float, counts=None) -> tuple:
    """cuDNN's attention, (batch, tokens, heads, head_dim), and its log-sum-exp, (batch, heads, queries) float32.
    `counts` (batch,) int32: how many of the keys are valid, at least one."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    if counts is None:
        return dot_product_attention(query, key, value, scale=scale, return_residual=True)
    queries = counts * 0 + query.shape[1]
    return dot_product_attention(
        query, key, value, q_seqlen=queries, kv_seqlen=counts, mask_type=MaskType.PADDING, scale=scale,
        return_residual=True,
    )


@private(
    "jax",
    why="jax.extend.mlir lacks the LLVM dialect, and the types of plgpu.inline_mgpu have no public names",
    until="jax.extend and jax.experimental.pallas.mosaic_gpu have them",
)
def mosaic_gpu() -> SimpleNamespace:
    """The types and dialects for code inside plgpu.inline_mgpu."""
    from jax._src.lib.mlir.dialects import llvm
    from jax.experimental.mosaic import gpu

    return SimpleNamespace(
        llvm=llvm, warpgroup_idx=gpu.warpgroup_idx, FragmentedArray=gpu.FragmentedArray,
        WGMMA_LAYOUT_8BIT=gpu.WGMMA_LAYOUT_8BIT,
    )


@private(
    "jax",
    why="FragmentedArray's constructor has private arguments; its public constructors load or fill",
    until="plgpu can convert float32 to e4m3 without moving values between threads",
)
def fragmented_array(registers, layout):
    """A floating-point array from each thread's own registers."""
    return mosaic_gpu().FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


@private(
    "jax",
    why="jax.config has settings as attributes, without a documented list of them",
    until="such a list is documented",
)
def jax_settings() -> dict[str, Any]:
    """The current values of all JAX settings."""
    import jax

    return jax.config.values


@private(
    "jax",
    why="jax.monitoring is public, but the names of JAX's own events are not",
    until="they are documented",
)
def on_compilation(found: Callable[[], None], compiled: Callable[[], None]) -> None:
    """Register callbacks: `found` for each hit in JAX's compilation cache, `compiled` for each compilation; both run in
    the thread that compiles."""
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
    why="torchax looks up torch overloads when imported, and torch has no way to add one",
    until="patches.overloads_of_old is removed",
)
@contextlib.contextmanager
def missing_overloads(stand_in: Callable[[str, str], Any]) -> Iterator[None]:
    """Inside the block, `stand_in(op, overload)` replaces an overload that torch lacks; None: none."""
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
    why="override_op_definition is permanent",
    until="torchax can undo an override",
)
@contextlib.contextmanager
def overridden_ops(environment, ops: dict[Any, Callable]) -> Iterator[None]:
    """Inside the block, these implementations replace torchax's own."""
    shipped = dict(environment._ops)
    try:
        for op, implementation in ops.items():
            environment.override_op_definition(op, implementation)
        yield
    finally:
        environment._ops = shipped


@private(
    "torch",
    why="the class that sees every op of a run is in a module of torch that has an underscore",
    until="torch moves it",
)
def dispatch_mode() -> type:
    """torch's TorchDispatchMode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


@private(
    "torchax",
    why="torchax has no way to ask whether it can lower an op",
    until="it has one",
)
def has_lowering(environment, op) -> bool:
    """Whether torchax can run a torch op under JAX, by itself or decomposed."""
    try:
        return environment._get_op_or_decomp(op) is not None
    except Exception:  # its OperatorNotFound is private too
        return False


# ---------------------------------------------------------------- diffusers and transformers


@private(
    "diffusers",
    why="diffusers imports torch_xla if it is installed, and has no option against that",
    until="there is one, or it imports torch_xla lazily",
)
def hide_torch_xla() -> None:
    """Make later imports of diffusers modules treat torch_xla as not installed."""
    from diffusers.utils import import_utils

    import_utils._torch_xla_available = False


@private(
    "diffusers", "transformers",
    why="from_pretrained() applies these lists and no public API exposes them; our loader bypasses it",
    until="a model exposes the dtypes of its parameters",
)
def float32_parts(module, dtype: str) -> tuple[str, ...]:
    """The parts of a model that must stay in float32 when the rest has this dtype.

    diffusers keeps its list in float32 for any half precision, transformers for float16 only (its strict list for
    both).
    """
    strict = dtype != "float16" and hasattr(module, "_keep_in_fp32_modules_strict")
    return tuple(getattr(module, "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules", None) or ())


@private(
    "diffusers",
    why="schedulers draw noise with a function imported by their module; not all take a generator, none takes noise",
    until="step() takes noise",
)
@contextlib.contextmanager
def given_noise(scheduler) -> Iterator[list]:
    """A list from which the scheduler's next step pops its noise, if it draws any."""
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
    why="Hydra's state is global; hydra.initialize() fails if it is already set, and restores only a copy",
    until="a config can be composed without that state",
)
@contextlib.contextmanager
def hydra_apart() -> Iterator[None]:
    """Inside the block, Hydra's global state is empty; afterwards it is restored."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    others, base = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, VersionBase.instance().version_base = others, base


@private(
    "hydra-core", "omegaconf",
    why="composing reads files with a YAML parser in Python, though PyYAML has one in C, copies schemas node by node "
    "and all that is stored once more, tells each node its parent after every merge, builds a table for "
    "interpolations in lists of defaults for each file, whether it has any or not, and is done twice for each command",
    until="Hydra and OmegaConf are as fast without",
)
@contextlib.contextmanager
def quick_hydra() -> Iterator[None]:
    """Inside the block, Hydra composes the same configs in a third of the time, the first in three fifths. Whether it
    sweeps may be said on the command line alone, not by `hydra.mode` in a file."""
    from hydra._internal import config_repository, defaults_list
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig, ListConfig, OmegaConf, _utils, base

    create_map, load, loader = defaults_list._create_interpolation_map, OmegaConf.load, loader_in_c()
    get_mode = Hydra.get_mode

    def create_needed(overrides, defaults, self_added):
        needed = any(default.is_interpolation() for default in defaults)
        return create_map(overrides, defaults, self_added) if needed else {}

    def mode_asked_for(self, config_name, overrides):  # composes the whole config, to look for this in it
        return get_mode(self, config_name, overrides) if any("hydra.mode" in text for text in overrides) else None

    def load_text(file):
        return pickle.loads(loaded(file.read(), file.name)) if hasattr(file, "read") else load(file)

    def keep_repository(self, delegate):  # Hydra gives it other sources, and changes nothing in those that it has
        self.delegate, self.cache = copy.copy(delegate), {}

    def set_parents(node):
        content = node.__dict__["_content"]
        nodes = content.values() if isinstance(content, dict) else content if isinstance(content, list) else [content]
        for child in nodes:
            known = getattr(child, "__dict__", {})  # isinstance is slow for these classes
            if known.get("_parent", node) is not node:
                child._set_parent(node)
            if "_content" in known:
                set_parents(child)

    replaced = [
        (_utils, "get_yaml_loader", lambda: loader), (OmegaConf, "load", staticmethod(load_text)),
        (defaults_list, "_create_interpolation_map", create_needed),
        (config_repository.CachingConfigRepository, "__init__", keep_repository),
        (base.Box, "_re_parent", set_parents), (Hydra, "get_mode", mode_asked_for),
        (DictConfig, "__deepcopy__", pickled), (ListConfig, "__deepcopy__", pickled),
    ]
    shipped = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in shipped:
            setattr(owner, name, function)


@functools.lru_cache(maxsize=1024)
def loaded(text: str, name: str) -> bytes:
    """What OmegaConf makes of a YAML file's text, pickled. The name is for messages about errors in it."""
    import yaml
    from omegaconf import OmegaConf

    file: Any = io.StringIO(text)
    file.name = name
    content = yaml.load(file, Loader=loader_in_c())
    return pickle.dumps(OmegaConf.create({} if content is None else content), pickle.HIGHEST_PROTOCOL)


def pickled(node, memo):
    """A copy of a config's node, which keeps its parent."""
    with copying:
        parent, node.__dict__["_parent"] = node.__dict__["_parent"], None
        try:
            copied = pickle.loads(pickle.dumps(node, pickle.HIGHEST_PROTOCOL))
        finally:
            node.__dict__["_parent"] = parent
    copied.__dict__["_parent"] = parent
    return copied


copying = threading.RLock()


def kept_if_short(parse: Callable) -> Callable:
    """The same function of a text; what it makes of the last short ones is kept."""
    kept = functools.lru_cache(maxsize=512)(parse)

    @functools.wraps(parse)
    def either(text: str, *more, **options):
        return (kept if len(text) <= SHORT else parse)(text, *more, **options)

    return either


@private(
    "omegaconf",
    why="OmegaConf parses the text of an interpolation each time that its value is read",
    until="it keeps what it has parsed",
)
@functools.cache
def remember_interpolations() -> None:
    """From now on, the text of an interpolation is parsed once."""
    from omegaconf import _utils, base, grammar_parser

    base.parse = _utils.parse = kept_if_short(grammar_parser.parse)


@functools.cache
def loader_in_c() -> type:
    """OmegaConf's YAML loader on PyYAML's parser in C, where PyYAML was built with it."""
    import yaml
    from omegaconf import _utils

    in_python: Any = _utils.get_yaml_loader()
    if not yaml.__with_libyaml__:
        return in_python

    class Loader(yaml.cyaml.CParser, in_python):
        def __init__(self, stream):
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


@private(
    "hydra-core",
    why="Hydra documents the grammar of overrides but not its parser, which plugins use",
    until="the parser is documented",
)
def parse_override(text: str):
    """Hydra's own view of an override: type.name, package, key_or_group, value(), is_sweep_override()."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


@private("uvicorn", why="uvicorn has no deadline for a request's headers", until="it has one")
def h11_protocol() -> type:
    """uvicorn's connection class: `conn`, `connections`, `loop`, `transport` and asyncio's protocol methods."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return H11Protocol


@private(
    "hydra-core",
    why="compose() applies value overrides in the same call that reads all files, a third of a second each time",
    until="Hydra can apply overrides to a composed config",
)
def apply_overrides(config, overrides: list[str]) -> None:
    """Apply value overrides to a composed config, as Hydra does."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    ConfigLoaderImpl._apply_overrides_to_config([parsed(override) for override in overrides], config)


@kept_if_short
def parsed(override: str):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_overrides([override])[0]
