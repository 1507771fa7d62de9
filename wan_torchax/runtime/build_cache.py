"""Array specs and compiled programs in the store, so that a later process can run a stage without tracing it.

    cache = BuildCache.of(resolved)                            # None if compile.store is null
    entry = cache.read("programs-denoise", recipe)       # None: build it, then cache.write(…)

An entry's cache key covers the recipe and the environment: versions, sources, devices, flags.
"""
import dataclasses
import functools
import hashlib
import logging
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy
from jax.experimental import serialize_executable

from wan_torchax import private
from wan_torchax.config.resolve import Recipe, Resolved
from wan_torchax.devices import distributed
from wan_torchax.devices.sharding import partition_spec
from wan_torchax.records import provenance
from wan_torchax.records.store import Entry, Store
from wan_torchax.runtime.weights import ArraySpec

log = logging.getLogger("wan")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
PLACES = re.compile(r"jax_(compilation_cache|persistent_cache|log|dump|debug|coordination)\w*|jax_\w+_(dir|path)")
OUTPUT = object()  # placeholder leaf for an output array
MEMORY = ("argument", "output", "temp", "alias", "generated_code")


class Missing(Exception):
    """An executable is not in the store."""


@dataclass(frozen=True)
class BuildCache:
    """The store, keyed for the devices of this run."""

    store: Store
    environment: dict

    @classmethod
    def of(cls, resolved: Resolved) -> "BuildCache | None":
        store = Store.of(resolved.config)
        if store is None:
            return None
        if any(is_external(row["implementation"]) for row in resolved.config.ops.values()):
            log.info("build cache disabled: external ops may change without changing the cache key")
            return None
        return cls(store, environment(resolved.mesh))

    def read(self, kind: str, recipe: Recipe, **more) -> Entry | None:
        """An entry, if every process has it: all processes must take the same path."""
        entry = self.store.read(kind, self.made_from(recipe, more))
        return entry if all(distributed.gather(f"build_cache/{kind}", entry is not None)) else None

    def why_not(self, kind: str, recipe: Recipe) -> str:
        """Why there is no such entry."""
        return self.store.difference(kind, self.made_from(recipe, {}))

    def write(self, kind: str, recipe: Recipe, about: dict, arrays: dict[str, numpy.ndarray], **more) -> None:
        self.store.write(kind, self.made_from(recipe, more), about, arrays)

    def made_from(self, recipe: Recipe, more: dict) -> dict:
        parts = {"settings": recipe.settings, "placement": recipe.placement, "derived": recipe.derived}
        return parts | more | self.environment

    def read_executable(self, program: str) -> Entry:
        entry = self.store.read("executable", self.compiled_from(program))
        if entry is None:
            raise Missing(f"executable {program} is no longer in the store")
        return entry

    def has_executable(self, program: str) -> bool:
        return self.store.has("executable", self.compiled_from(program))

    def write_executable(self, program: str, memory: dict[str, int], payload: bytes) -> None:
        executable = {"executable": numpy.frombuffer(payload, "uint8")}
        self.store.write("executable", self.compiled_from(program), {"memory": memory}, executable)

    def compiled_from(self, program: str) -> dict:
        """An executable's key: the lowered program and the environment, without the sources. Most source changes do not
        change the lowered program."""
        return {"program": program} | {key: value for key, value in self.environment.items() if key != "sources"}


def is_external(implementation: str) -> bool:
    return implementation.split(".")[0] not in ("patches", "kernels")


def environment(mesh) -> dict:
    """What every program depends on besides its recipe."""
    devices = mesh.devices.flat
    options = {name: value for name, value in private.jax_settings().items() if not PLACES.fullmatch(name)}
    return {
        "versions": provenance.versions(),
        "sources": provenance.sources(),
        "flags": {name: os.environ.get(name, "") for name in FLAGS},
        "jax": {name: value for name, value in options.items() if isinstance(value, (str, int, float, type(None)))},
        "runtime": devices[0].client.platform_version,
        "devices": [device.id for device in devices],
        "process": [jax.process_index(), jax.process_count()],
        "processor": processor() if devices[0].platform == "cpu" else None,
    }


@functools.cache
def processor() -> str:
    """The CPU's feature set: XLA compiles for the host's features."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    features = re.search(r"^(flags|Features)\s*:.*$", text, re.MULTILINE)
    return f"{platform.machine()} {hashlib.sha256((features.group() if features else text).encode()).hexdigest()[:12]}"


# ---------------------------------------------------------------- array specs


def pack_specs(specs: dict[str, ArraySpec]) -> tuple[dict, dict[str, numpy.ndarray]]:
    """Array specs as JSON, and the values of computed tables."""
    rows = {name: pack_spec(spec) for name, spec in specs.items()}
    return rows, {name: spec.value for name, spec in specs.items() if spec.value is not None}


def pack_spec(tensor: ArraySpec) -> dict:
    """A spec's fields as JSON, with the sharding as a partition spec and without the value."""
    row = {field.name: getattr(tensor, field.name) for field in dataclasses.fields(ArraySpec)}
    return row | {"sharding": list(tensor.sharding.spec), "value": None}


def unpack_specs(rows: dict, values: dict[str, numpy.ndarray], mesh) -> dict[str, ArraySpec]:
    return {
        name: ArraySpec(**row | {
            "shape": tuple(row["shape"]), "sharding": sharded(mesh, row["sharding"]), "value": values.get(name),
        })
        for name, row in rows.items()
    }


def sharded(mesh, spec) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, partition_spec(spec))


# ---------------------------------------------------------------- programs


def describe_program(lowered: jax.stages.Lowered, component: str, arguments) -> dict:
    """A program's signature and the key of its executable."""
    text = lowered.as_text()
    return {
        "component": component,
        "arguments": pack_tree(list(arguments)),
        "outputs": pack_tree(jax.tree.map(lambda _: OUTPUT, lowered.out_info)),
        "executable": hashlib.sha256(text.encode()).hexdigest()[:24],
        "mosaic_gpu": "mosaic_gpu" in text,
        "lapack": "@lapack_" in text,
    }


def load_program(
    cache: BuildCache, about: dict, arrays: dict[str, ArraySpec], mesh
) -> tuple[jax.stages.Compiled, "Memory"]:
    """Load a program from the store; it takes arrays of these names and the arguments it was compiled for."""
    entry = cache.read_executable(about["executable"])
    if about["mosaic_gpu"]:  # importing Mosaic GPU registers the custom calls that the executable needs
        from wan_torchax.kernels import hopper  # noqa: F401
    if about["lapack"]:  # lowering any of LAPACK's functions loads it: without, the executable would call nothing
        jax.jit(jax.numpy.linalg.qr).lower(jax.ShapeDtypeStruct((1, 1), "float32"))
    taken = (dict.fromkeys(arrays, 0), *unpack_tree(about["arguments"], lambda leaf: 0))
    takes, gives = jax.tree.structure((taken, {})), jax.tree.structure(unpack_tree(about["outputs"], lambda leaf: 0))
    devices = list(mesh.devices.flat)
    client = next(device.client for device in devices if device.process_index == jax.process_index())
    payload = entry.arrays["executable"].tobytes()
    compiled = serialize_executable.deserialize_and_load(payload, takes, gives, client, devices)
    return compiled, Memory(entry.about["memory"])


def compile_and_cache(cache: BuildCache, about: dict, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile and store. Bypasses JAX's compilation cache: on CPU, an executable from it cannot be serialized again."""
    with private.uncached():
        compiled = lowered.compile()
    try:
        memory = compiled.memory_analysis()
        sizes = {part: getattr(memory, f"{part}_size_in_bytes") for part in MEMORY}
        cache.write_executable(about["executable"], sizes, serialize_executable.serialize(compiled)[0])
    except Exception as error:  # platforms without serialization raise different errors
        log.warning("a program is not cached: its executable cannot be serialized (%s)", error)
    return compiled


def structs(about: dict, mesh) -> list:
    """The arguments of a program besides its component's arrays."""
    return unpack_tree(about["arguments"], lambda leaf: jax.ShapeDtypeStruct(
        tuple(leaf["shape"]), leaf["dtype"], sharding=sharded(mesh, leaf["spec"])
    ))


class Memory:
    """XLA's memory analysis of a program, from when it was compiled."""

    def __init__(self, sizes: dict[str, int]):
        for part, size in sizes.items():
            setattr(self, f"{part}_size_in_bytes", size)


def pack_tree(tree) -> Any:
    """A tree of structs as JSON. JAX serializes trees with pickle, which can run code when loaded."""
    if isinstance(tree, dict):
        return {"dict": {key: pack_tree(value) for key, value in tree.items()}}
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [pack_tree(value) for value in tree]}
    if tree is OUTPUT:
        return {"leaf": None}
    return {"leaf": {"shape": tree.shape, "dtype": str(tree.dtype), "spec": list(tree.sharding.spec)}}


def unpack_tree(packed: dict, leaf) -> Any:
    (kind, value), = packed.items()
    if kind == "dict":
        return {key: unpack_tree(part, leaf) for key, part in value.items()}
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](unpack_tree(part, leaf) for part in value)
    return leaf(value)
