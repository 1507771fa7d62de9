"""From safetensors on disk to sharded arrays on the devices, one tensor at a time.

    tensors = plan(module, table, mesh, "bfloat16", key)    # what goes where: pure, from shapes alone
    arrays = load(tensors, folder, progress)                # {name: jax.Array}

Threads read a few tensors ahead of the one that is sent to the devices, and host memory never holds more than those.
They read plainly, at the offsets that a file's header names: opening a file for every tensor with `safe_open` takes
longer than reading a few MB, and keeping it open would keep in memory what was read, since it is mapped.
"""
import functools
import json
import math
import re
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy
import torch
from safetensors import safe_open

from wan_torchax.config.schema import ConfigError, nearest
from wan_torchax.patches import ScannedBlocks, partition_spec, spec_problem

REPLICATED = "(replicated)"
READERS = 4  # threads that read, each one tensor at a time
# What safetensors calls the dtypes that weights come in, and numpy and torch alike.
STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


@dataclass
class Tensor:
    """One array on the devices, and the checkpoint tensors it is made of (several where blocks are stacked)."""

    shape: tuple
    dtype: str
    sharding: jax.sharding.NamedSharding
    rule: str
    sources: list = field(default_factory=list)  # checkpoint names, by layer; empty for tables that no checkpoint has
    value: object = None  # a numpy array for those
    stacked: bool = False  # a leading dimension for the layer, under a scan

    @property
    def struct(self):
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @property
    def bytes(self):
        return int(numpy.prod(self.shape)) * numpy.dtype(self.dtype).itemsize

    @property
    def bytes_per_device(self):
        return int(numpy.prod(self.sharding.shard_shape(self.shape))) * numpy.dtype(self.dtype).itemsize


# ---------------------------------------------------------------- the plan


def plan(module, table, mesh, dtype, key, layers=1) -> dict[str, Tensor]:
    """Shape, dtype and sharding of every array a module (on the meta device) needs.

    The table's rules are full matches on checkpoint names and must be disjoint and all used. `layers` is the depth of
    the blocks under a scan, whose arrays get a leading dimension that is never sharded.
    """
    used, tensors, problems = set(), {}, []
    for name, parameter in module.named_parameters():
        stacked = scanned_prefix(module, name)
        sources = [name.replace(stacked, f"blocks.{layer}.") for layer in range(layers)] if stacked else [name]
        rules = {rule_for(source, table.weights, problems, key) for source in sources}
        if len(rules) > 1:
            problems.append(f"{key}.weights: layers of {sources[0]} match different rules {sorted(map(str, rules))}; a scan needs one: model.scan_blocks=false")
        rule = rules.pop()
        if rule is None and table.unmatched == "error":
            problems.append(f"{key}.weights: no rule matches {sources[0]}; add one, or set {key}.unmatched=replicate")
        used.add(rule)
        spec = partition_spec(table.weights[rule].spec if rule else ())
        problem = spec_problem(spec, parameter.shape, mesh)
        if problem:
            problems.append(f"{key}.weights.{rule}: {sources[0]} {problem}")
            continue
        shape = ((layers,) if stacked else ()) + tuple(parameter.shape)
        spec = jax.sharding.PartitionSpec(None, *spec) if stacked and len(spec) else spec
        sharding = jax.sharding.NamedSharding(mesh, spec)
        tensors[name] = Tensor(shape, kept_dtype(module, name, dtype), sharding, rule or REPLICATED, sources, stacked=bool(stacked))
    for rule in table.weights.keys() - used:
        problems.append(f"{key}.weights.{rule}: pattern {table.weights[rule].pattern!r} matches nothing; {nearest(table.weights[rule].pattern, tensors)}")
    if problems:
        raise ConfigError("the sharding table does not fit the model:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return tensors | tables(module, mesh)


def rule_for(name, rules, problems, key):
    """The one rule that matches a name; None if none does."""
    matches = [rule for rule in rules if re.fullmatch(rules[rule].pattern, name)]
    if len(matches) > 1:
        problems.append(f"{key}.weights: {name} matches {' and '.join(matches)}; make their patterns disjoint")
    return matches[0] if matches else None


def scanned_prefix(module, name) -> str | None:
    """The part of a parameter's name that stands for `blocks.<layer>.`, if a scan holds it."""
    head = "blocks.0.block."
    return head if name.startswith(head) and isinstance(module.blocks[0], ScannedBlocks) else None


def kept_dtype(module, name, dtype) -> str:
    """The configured dtype, or float32 where the model's authors keep it.

    diffusers keeps its list in float32 for any half precision, transformers for float16 only (its strict list for both).
    """
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    if dtype != "float16" and hasattr(module, "_keep_in_fp32_modules_strict"):
        kept = module._keep_in_fp32_modules_strict or ()
    return "float32" if any(part in kept for part in name.split(".")) else dtype


def tables(module, mesh) -> dict[str, Tensor]:
    """Buffers that are computed, not stored in checkpoints (RoPE's cosines and sines)."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return {
        name: Tensor(tuple(buffer.shape), "float32", replicated, REPLICATED, value=buffer.float().numpy())
        for name, buffer in module.named_buffers()
    }


def summary(tensors: dict[str, Tensor]) -> list[str]:
    """The plan as lines: by rule the tensors, their size and spec; then totals."""
    groups = defaultdict(list)
    for tensor in tensors.values():
        groups[tensor.rule].append(tensor)
    lines = []
    for rule, group in sorted(groups.items()):
        count = sum(max(len(tensor.sources), 1) for tensor in group)
        specs = ", ".join(sorted({str(tuple(tensor.sharding.spec)) for tensor in group}))
        lines.append(f"  {rule:20} {count:5} tensors {gib(sum(t.bytes for t in group)):9.3f} GiB  {specs}")
    total, replicated = sum(t.bytes for t in tensors.values()), sum(t.bytes for t in groups[REPLICATED])
    per_device = sum(tensor.bytes_per_device for tensor in tensors.values())
    lines.append(f"  sharded {gib(total - replicated):.3f} GiB, replicated {gib(replicated):.3f} GiB; {gib(per_device):.3f} GiB on each device")
    return lines


def gib(count: float) -> float:
    return count / 2**30


# ---------------------------------------------------------------- loading


@dataclass
class Stored:
    """Where a tensor lies, and its dtype in safetensors' words."""

    file: Path
    dtype: str
    shape: tuple
    offset: int


def index(folder: Path) -> dict[str, Stored]:
    """Every tensor in a component's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
        hint = f" ({', '.join(others)} can run code when opened and is not read; convert it to safetensors)" if others else ""
        raise ConfigError(f"{folder}: no .safetensors files{hint}")
    found = {}
    for file in files:
        try:
            tensors = read_header(file)
        except Exception as error:
            raise ConfigError(f"{file}: not a readable safetensors file ({error}); download it again") from error
        twice = next(iter(found.keys() & tensors.keys()), None)
        if twice is not None:
            raise ConfigError(f"{folder}: {twice} is in {found[twice].file.name} and in {file.name}; keep one set of files")
        found |= tensors
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """What a file holds; safetensors itself does not tell offsets."""
    with safe_open(file, framework="pt"):  # raises where header and length do not agree
        pass
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return {
        name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def load(tensors: dict[str, Tensor], folder: Path, progress, ignored=()) -> dict[str, jax.Array]:
    """Read every planned tensor from a component's folder to its devices. `progress` is told the bytes as they arrive."""
    files = index(folder)
    check_names(tensors, files, folder, ignored)
    jobs = [(files[source], tensor.dtype, layer_sharding(tensor)) for tensor in tensors.values() for source in tensor.sources]
    layers, arrays = read_ahead(jobs), {}
    for name, tensor in tensors.items():
        if not tensor.sources:
            arrays[name] = put(tensor.value, tensor.sharding)
        elif tensor.stacked:
            arrays[name] = stack(tensor, layers)
        else:
            arrays[name] = send(tensor.shape, tensor.sharding, next(layers))
        jax.block_until_ready(arrays[name])
        progress(tensor.bytes)
    return arrays


def layer_sharding(tensor: Tensor):
    """How one of an array's sources lies on the devices."""
    if not tensor.stacked:
        return tensor.sharding
    return jax.sharding.NamedSharding(tensor.sharding.mesh, jax.sharding.PartitionSpec(*tensor.sharding.spec[1:]))


def check_names(tensors, files, folder, ignored):
    """One error that lists every missing, unexpected and mis-shaped tensor."""
    wanted = {}
    for tensor in tensors.values():
        shape = tensor.shape[1:] if tensor.stacked else tensor.shape
        wanted.update(dict.fromkeys(tensor.sources, shape))
    unexpected = [name for name in files if name not in wanted and not any(re.match(pattern, name) for pattern in ignored)]
    missing = [name for name in wanted if name not in files]
    problems = [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in unexpected]
    for name in wanted.keys() & files.keys():
        stored = files[name]
        if stored.shape != wanted[name]:
            problems.append(f"{name}: shape {stored.shape} in the checkpoint, {wanted[name]} in the model")
        if stored.dtype not in STORED_DTYPES:
            problems.append(f"{name}: stored as {stored.dtype}, which is none of {', '.join(STORED_DTYPES)}")
    if problems:
        shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise ConfigError(f"{folder} does not hold this model's weights:\n" + "\n".join(f"  - {line}" for line in shown))


def read_ahead(jobs):
    """What `read` gives for each job, in their order, the next ones being read meanwhile."""
    with ThreadPoolExecutor(READERS) as pool:
        reading = deque()
        for job in jobs:
            reading.append(pool.submit(read, *job))
            if len(reading) == READERS:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def read(stored: Stored, dtype, sharding) -> dict[str, numpy.ndarray]:
    """The parts of a tensor that this process's devices hold, by where they lie in it. Rows are read once for all parts that share them."""
    rows, parts = {}, {}
    for part in sharding.addressable_devices_indices_map(stored.shape).values():
        first, last, _ = part[0].indices(stored.shape[0])
        if (first, last) not in rows:
            rows[first, last] = read_rows(stored, first, last, dtype)
        parts[str(part)] = rows[first, last][(slice(None), *part[1:])]
    return parts


def read_rows(stored: Stored, first: int, last: int, dtype: str) -> numpy.ndarray:
    """Some rows in the wanted dtype. All memory is numpy's: torch's may keep what another thread frees."""
    shape, kind = (last - first, *stored.shape[1:]), numpy.dtype(STORED_DTYPES[stored.dtype])
    offset = stored.offset + first * math.prod(stored.shape[1:]) * kind.itemsize
    found = numpy.fromfile(stored.file, kind, math.prod(shape), offset=offset).reshape(shape)
    if kind == dtype:
        return found
    wanted = numpy.empty(shape, dtype)
    as_torch(wanted).copy_(as_torch(found))  # numpy would take its time
    return wanted


def as_torch(array: numpy.ndarray) -> torch.Tensor:
    """The same memory. Torch does not know numpy's small floats: they pass as integers."""
    return torch.from_numpy(array.view(f"int{8 * array.itemsize}")).view(getattr(torch, array.dtype.name))


def send(shape, sharding, parts) -> jax.Array:
    return jax.make_array_from_callback(shape, sharding, lambda part: parts[str(part)])


def stack(tensor: Tensor, layers) -> jax.Array:
    """The same tensor of every layer into one array, written layer by layer into memory that is already on the devices."""
    array, sharding = zeros(tensor.struct), layer_sharding(tensor)
    for layer in range(len(tensor.sources)):
        array = write_layer(array, send(tensor.shape[1:], sharding, next(layers)), layer)
        jax.block_until_ready(array)  # or the layers queue up in host memory faster than they are written
    return array


def put(value: numpy.ndarray, sharding) -> jax.Array:
    """A numpy array on the devices of this process. Over several processes device_put would first compare it with theirs, in a program of its own."""
    return jax.make_array_from_callback(value.shape, sharding, lambda part: numpy.asarray(value[part]))


def zeros(struct) -> jax.Array:
    """Zeros made on the devices that a struct names."""
    return zeros_program(struct)()


@functools.cache  # many arrays are alike
def zeros_program(struct):
    return jax.jit(lambda: jax.numpy.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding)


@jax.jit(donate_argnums=0)
def write_layer(stack, value, layer):
    return jax.lax.dynamic_update_index_in_dim(stack, value, layer, 0)
