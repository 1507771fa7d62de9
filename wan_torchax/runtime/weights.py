"""From safetensors on disk to sharded arrays on the devices, one tensor at a time.

    tensors = plan(module, table, mesh, "bfloat16", key)    # what goes where: pure, from shapes alone
    check(tensors, folder)                                  # against the files' headers
    arrays = load(tensors, folder, progress)                # {name: jax.Array}

What adapters add (`Change`) is merged on the way, tensor by tensor, on the devices.

Threads read some tensors ahead of the one that is sent to the devices, and host memory never holds more than those
(runtime/reading.py).
"""
import contextlib
import functools
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import jax
import numpy

from wan_torchax import private
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import listed, nearest
from wan_torchax.devices.sharding import partition_spec, replicated, spec_problem
from wan_torchax.kernels.quantised import quantise
from wan_torchax.runtime.checkpoint import Stored, index
from wan_torchax.runtime.reading import AHEAD_BYTES, STORED_DTYPES, Load, read_ahead

REPLICATED = "(replicated)"
SENT_NUMBERS = 2**22  # of a layer that a device is sent at a time to be merged
MERGING_AHEAD_BYTES = 3 * 2**25  # read ahead while merging, which needs memory of its own where the host is the device
STACK_BYTES = 2**26  # of layers that become one array: up to here they are put together in host memory
PROBLEMS_SHOWN = 20


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
    scaled_by: str | None = None  # of eight bits: the array with what its rows have to be multiplied with

    @property
    def struct(self):
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @property
    def bytes(self):
        return math.prod(self.shape) * numpy.dtype(self.dtype).itemsize

    @property
    def bytes_per_device(self):
        return math.prod(self.sharding.shard_shape(self.shape)) * numpy.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Change:
    """What an adapter adds to one tensor of a checkpoint: scale · up · down, or scale · whole."""

    scale: float
    factors: tuple[Stored, ...]  # (up, down) of shapes (rows, rank) and (rank, …), or one like the tensor


# ---------------------------------------------------------------- the plan


def plan(module, table, mesh, dtype: str, key: str) -> dict[str, Tensor]:
    """Shape, dtype and sharding of every array a module (on the meta device) needs.

    The table's rules are full matches on checkpoint names and must be disjoint and all used, but for optional ones.
    Arrays of blocks under a scan get a leading dimension, the layer, which is never sharded.
    """
    used, tensors, problems = set(), {}, []
    for name, parameter in module.named_parameters():
        sources, stacked, own_dtype = stored_of(module, name)
        rules = {rule_for(source, table.weights, problems, key) for source in sources}
        if len(rules) > 1:
            names = sorted(map(str, rules))
            problems.append(
                f"{key}.weights: layers of {sources[0]} match different rules {names}; a scan needs one: "
                "model.scan_blocks=false"
            )
        rule = rules.pop()
        if rule is None and table.unmatched == "error":
            problems.append(f"{key}.weights: no rule matches {sources[0]}; add one, or set {key}.unmatched=replicate")
        used.add(rule)
        spec = partition_spec(table.weights[rule].spec if rule else ())
        is_scale = own_dtype == "float32"
        if is_scale:  # one for each row of a weight
            spec = jax.sharding.PartitionSpec(*spec[:1])
        problem = spec_problem(spec, parameter.shape, mesh)
        if problem:
            problems.append(f"{key}.weights.{rule}: {sources[0]} {problem}")
            continue
        shape = ((len(sources),) if stacked else ()) + tuple(parameter.shape)
        spec = jax.sharding.PartitionSpec(None, *spec) if stacked and len(spec) else spec
        sharding, dtype_here = jax.sharding.NamedSharding(mesh, spec), own_dtype or dtype_of(module, name, dtype)
        scaled_by = f"{name.rpartition('.')[0]}.scale" if own_dtype and not is_scale else None
        listed_sources = [] if is_scale else sources  # scales are made of the weights that are read
        tensors[name] = Tensor(
            shape, dtype_here, sharding, rule or REPLICATED, listed_sources, stacked=stacked, scaled_by=scaled_by
        )
    for rule in table.weights.keys() - used:
        if getattr(table.weights[rule], "optional", False):
            continue
        pattern = table.weights[rule].pattern
        sources = [tensor.sources[0] for tensor in tensors.values() if tensor.sources]
        problems.append(f"{key}.weights.{rule}: pattern {pattern!r} matches nothing; {nearest(pattern, sources)}")
    if problems:
        raise ConfigError(f"the sharding table does not fit the model:\n{listed(problems, PROBLEMS_SHOWN)}")
    return tensors | tables(module, mesh)


def rule_for(name: str, rules, problems: list[str], key: str) -> str | None:
    """The one rule that matches a name; None if none does."""
    matches = [rule for rule in rules if re.fullmatch(rules[rule].pattern, name)]
    if len(matches) > 1:
        problems.append(f"{key}.weights: {name} matches {' and '.join(matches)}; make their patterns disjoint")
    return matches[0] if matches else None


def stored_of(module, name: str) -> tuple[list[str], bool, str | None]:
    """The checkpoint names of a parameter, whether they are the layers of a scan, and its dtype if it has its own."""
    stack = re.match(r"(\w*blocks)\.0\.block\.", name)  # models.transformer: Stacked
    if stack is None or not hasattr(blocks := getattr(module, stack[1])[0], "stored"):
        return [name], False, None
    layers, source, dtype = blocks.stored(name[stack.end():])
    return [f"{stack[1]}.{layer}.{source}" for layer in layers], True, dtype


def dtype_of(module, name: str, dtype: str) -> str:
    """The configured dtype, or float32 where the model's authors want it."""
    exempt = private.float32_parts(module, dtype)
    return "float32" if any(part in exempt for part in name.split(".")) else dtype


def tables(module, mesh) -> dict[str, Tensor]:
    """Buffers that are computed, not stored in checkpoints (RoPE's cosines and sines)."""
    return {
        name: Tensor(tuple(buffer.shape), "float32", replicated(mesh), REPLICATED, value=buffer.float().numpy())
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
    total, everywhere = sum(t.bytes for t in tensors.values()), sum(t.bytes for t in groups[REPLICATED])
    shares = f"sharded {gib(total - everywhere):.3f} GiB, replicated {gib(everywhere):.3f} GiB"
    per_device = sum(tensor.bytes_per_device for tensor in tensors.values())
    lines.append(f"  {shares}; {gib(per_device):.3f} GiB on each device")
    return lines


def gib(count: float) -> float:
    return count / 2**30


# ---------------------------------------------------------------- loading


def load(
    tensors: dict[str, Tensor], folder: Path, progress: Callable[[int], None], prefix: str = "",
    changes: Mapping[str, list[Change]] = MappingProxyType({}),
    took: Callable[[str, float], None] = lambda part, seconds: None,
) -> dict[str, jax.Array]:
    """Read every planned tensor from a component's folder to its devices; `progress` hears of bytes as they arrive,
    `took` of the seconds that reading and sending made this wait. `changes`, by checkpoint name, are added on the
    way."""
    files, arrays, spent = without_prefix(index(folder), prefix), {}, Counter()
    ahead = MERGING_AHEAD_BYTES if changes else AHEAD_BYTES
    planned = (load for tensor in tensors.values() for load in loads(tensor, files, changes))
    with contextlib.closing(read_ahead(planned, ahead)) as reading:
        parts = timed(functools.partial(next, reading), spent, "reading")
        began = time.perf_counter()
        for name, tensor in tensors.items():
            arrays |= jax.block_until_ready(load_one(name, tensors, changes, parts))
            progress(tensor.bytes)
    took("reading", spent["reading"])
    took("sending", time.perf_counter() - began - spent["reading"])
    return arrays


def load_one(
    name: str, tensors: dict[str, Tensor], changes: Mapping[str, list[Change]], parts: Callable[[], dict]
) -> dict[str, jax.Array]:
    """A planned tensor on its devices, with the scales that come with one of eight bits."""
    tensor = tensors[name]
    if tensor.value is not None:
        return {name: put(tensor.value, tensor.sharding)}
    if not tensor.sources:
        return {}  # scales, which come with what they scale
    if tensor.scaled_by:
        values, scales = in_eight_bits(tensor, tensors[tensor.scaled_by], changes, parts)
        return {name: values, tensor.scaled_by: scales}
    if is_whole(tensor, changes):
        return {name: send(tensor.shape, tensor.sharding, parts())}
    if tensor.stacked:
        return {name: by_layer(tensor, changes, parts)}
    return {name: merge(tensor, changes[tensor.sources[0]], parts)}


def timed(function: Callable, spent: Counter, part: str) -> Callable:
    """The function, its seconds added up."""

    def call():
        began = time.perf_counter()
        try:
            return function()
        finally:
            spent[part] += time.perf_counter() - began

    return call


def loads(tensor: Tensor, files: dict[str, Stored], changes: Mapping[str, list[Change]]) -> list[Load]:
    """What is read for an array, in the order it is needed: all of it at once, or its sources one by one, each after
    what is added to it."""
    if is_whole(tensor, changes):
        sources = [files[source] for source in tensor.sources]
        return [Load(sources, tensor.dtype, tensor.shape, tensor.sharding, tensor.stacked)] if sources else []
    listed, sharding = [], layer_sharding(tensor)
    for source in tensor.sources:
        stored, added = files[source], changes.get(source, ())
        factors = (factor for change in added for factor in placed(change, sharding))
        listed += [Load([one], sent_as(one), one.shape, spread) for one, spread in factors]
        in_place = added and tensor.stacked and not tensor.scaled_by  # as merge_layer does it
        shape, begins = some_rows(stored.shape, sharding) if in_place else (stored.shape, [0])
        dtype = sent_as(stored) if added or tensor.scaled_by else tensor.dtype
        listed += [Load([stored], dtype, shape, sharding, begin=begin) for begin in begins]
    return listed


def some_rows(shape: tuple, sharding) -> tuple[tuple, list[int]]:
    """The shape of what is sent of a layer at a time, the same rows of each device's part, and where they begin in
    it."""
    part = sharding.shard_shape(shape)
    held, times = part[0], math.ceil(math.prod(part) / SENT_NUMBERS)
    rows = math.ceil(held / min(times, held))
    return (shape[0] // held * rows, *shape[1:]), [min(begin, held - rows) for begin in range(0, held, rows)]


def is_whole(tensor: Tensor, changes: Mapping[str, list[Change]]) -> bool:
    """Whether an array is put together in host memory. Not one of many layers that would be much, nor one whose sources
    are added to or rounded on the devices."""
    much = tensor.stacked and tensor.bytes > STACK_BYTES
    return not (much or tensor.scaled_by or any(map(changes.get, tensor.sources)))


def layer_sharding(tensor: Tensor):
    """How one of an array's sources lies on the devices."""
    if not tensor.stacked:
        return tensor.sharding
    return jax.sharding.NamedSharding(tensor.sharding.mesh, jax.sharding.PartitionSpec(*tensor.sharding.spec[1:]))


def without_prefix(files: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    """What files hold, by the names that modules have."""
    return {name.removeprefix(prefix): stored for name, stored in files.items()}


def source_shapes(tensors: dict[str, Tensor]) -> dict[str, tuple]:
    """The shape of every checkpoint tensor that a plan needs, by its name."""
    shapes = {}
    for tensor in tensors.values():
        shapes |= dict.fromkeys(tensor.sources, tensor.shape[1:] if tensor.stacked else tensor.shape)
    return shapes


def check(tensors: dict[str, Tensor], folder: Path, ignored: Iterable[str] = (), prefix: str = "") -> None:
    """One error that lists every missing, unexpected and mis-shaped tensor; from the files' headers alone."""
    files, shapes = without_prefix(index(folder), prefix), source_shapes(tensors)
    surplus = [name for name in files if name not in shapes and not any(re.match(rule, name) for rule in ignored)]
    problems = [f"missing: {name}" for name in shapes if name not in files]
    problems += [f"unexpected: {name}" for name in surplus]
    for name in shapes.keys() & files.keys():
        stored = files[name]
        if stored.shape != shapes[name]:
            problems.append(f"{name}: shape {stored.shape} in the checkpoint, {shapes[name]} in the model")
        if stored.dtype not in STORED_DTYPES:
            problems.append(f"{name}: stored as {stored.dtype}, which is none of {', '.join(STORED_DTYPES)}")
    if problems:
        raise ConfigError(f"{folder} does not hold this model's weights:\n{listed(problems, PROBLEMS_SHOWN)}")


def sent_as(stored: Stored) -> str:
    """The dtype that a tensor goes to the devices in before it is cast there: its own, if JAX computes with it."""
    kind = STORED_DTYPES[stored.dtype]
    return kind if kind in ("float32", "bfloat16", "float16") else "float32"


def placed(change: Change, sharding) -> list[tuple[Stored, jax.sharding.NamedSharding]]:
    """The factors of a change and how they lie on the devices: `up` as the tensor's rows, `down` as the rest of it, so
    that their product needs no communication."""
    if len(change.factors) == 1:
        return [(change.factors[0], sharding)]
    rows, rest = (*sharding.spec, None)[0], tuple(sharding.spec)[1:]
    specs = jax.sharding.PartitionSpec(rows), jax.sharding.PartitionSpec(None, *rest)
    return [(one, jax.sharding.NamedSharding(sharding.mesh, spec)) for one, spec in zip(change.factors, specs)]


def send(shape, sharding, parts) -> jax.Array:
    return jax.make_array_from_callback(shape, sharding, lambda part: parts[str(part)])


def by_layer(tensor: Tensor, changes: Mapping[str, list[Change]], parts: Callable[[], dict]) -> jax.Array:
    """The same tensor of every layer into one array, written layer by layer into memory that is already on the
    devices."""
    stack = zeros(tensor.struct)
    for layer, source in enumerate(tensor.sources):
        if added := changes.get(source):
            stack = merge_layer(tensor, added, parts, stack, layer)
        else:
            stack = in_turn(write_layer, stack, send(tensor.shape[1:], layer_sharding(tensor), parts()), layer)
    return stack


def merge_layer(tensor: Tensor, changes: list[Change], parts: Callable[[], dict], stack, layer: int) -> jax.Array:
    """The stack with the next layer and what adapters add to it, some rows at a time."""
    sharding = layer_sharding(tensor)
    scales, factors = send_added(changes, sharding, parts)
    specs = jax.tree.map(lambda factor: factor.sharding.spec, factors)
    program = merge_into_program(tensor.sharding, specs)
    shape, begins = some_rows(tensor.shape[1:], sharding)
    for begin in begins:
        stack = in_turn(program, stack, layer, begin, send(shape, sharding, parts()), scales, factors)
    return stack


def in_turn(program: Callable, stack, *arguments) -> jax.Array:
    """The next stack as soon as this one is there: the arguments were sent meanwhile, and no more than those wait."""
    return program(jax.block_until_ready(stack), *arguments)


def in_eight_bits(
    tensor: Tensor, scale: Tensor, changes: Mapping[str, list[Change]], parts: Callable[[], dict]
) -> tuple[jax.Array, jax.Array]:
    """A weight of every layer and its scales, from numbers as they are stored and what adapters add to them."""
    values, scales = zeros(tensor.struct), zeros(scale.struct)
    whole = replace(tensor, dtype="float32", sharding=layer_sharding(tensor), shape=tensor.shape[1:], stacked=False)
    program = quantise_program(tensor.sharding, scale.sharding)
    for layer, source in enumerate(tensor.sources):
        values, scales = program(values, scales, merge(whole, changes.get(source, ()), parts), layer)
        jax.block_until_ready(values)
    return values, scales


@functools.cache
def quantise_program(*shardings):
    def program(values, scales, array, layer):
        new_values, new_scales = quantise(array, str(values.dtype))
        return into_place(values, new_values, layer), into_place(scales, new_scales, layer)

    return jax.jit(program, out_shardings=shardings, donate_argnums=(0, 1))


def merge(tensor: Tensor, changes: Iterable[Change], parts: Callable[[], dict]) -> jax.Array:
    """The next of a tensor's sources on the devices, with what adapters add to it."""
    added = send_added(changes, tensor.sharding, parts)
    array = send(tensor.shape, tensor.sharding, parts())
    return merge_program(tensor.sharding, tensor.dtype)(array, *added) if changes else array


def send_added(changes: Iterable[Change], sharding, parts: Callable[[], dict]) -> tuple[tuple, tuple]:
    """What is added to a tensor: the scale and the factors, on the devices, of every change."""
    factors = tuple(
        tuple(send(one.shape, spread, parts()) for one, spread in placed(change, sharding)) for change in changes
    )
    return tuple(numpy.float32(change.scale) for change in changes), factors


def merged(base, scales, added, dtype):
    """base + Σ scale · product of factors, in float32 and cast once. A TPU would multiply in bfloat16 unasked."""
    total = base.astype(jax.numpy.float32)
    for scale, factors in zip(scales, added):
        first, *second = (factor.astype(jax.numpy.float32) for factor in factors)
        whole = scale * first
        if second:
            turned = jax.lax.optimization_barrier(whole.T)  # a CPU multiplies so an eighth faster
            whole = jax.numpy.tensordot(turned, second[0], (0, 0), precision="highest")
        total = total + whole
    return total.astype(dtype)


@functools.cache
def merge_program(sharding, dtype: str):
    return jax.jit(functools.partial(merged, dtype=dtype), out_shardings=sharding)


@functools.cache
def merge_into_program(sharding, factor_specs):
    """Rows of each device's part into a layer of a stack."""

    def program(stack, layer, begin, base, scales, added):
        cut = [[jax.lax.dynamic_slice_in_dim(first, begin, len(base)), *rest] for first, *rest in added]
        return into_place(stack, merged(base, scales, cut, stack.dtype), layer, begin)

    layer_spec, everywhere = jax.sharding.PartitionSpec(*sharding.spec[1:]), jax.sharding.PartitionSpec()
    specs = sharding.spec, everywhere, everywhere, layer_spec, everywhere, factor_specs
    local = jax.shard_map(program, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
    return jax.jit(local, donate_argnums=0)


def put(value: numpy.ndarray, sharding) -> jax.Array:
    """A numpy array on the devices of this process. Over several processes device_put would first compare it with
    theirs, in a program of its own."""
    return jax.make_array_from_callback(value.shape, sharding, lambda part: numpy.asarray(value[part]))


def zeros(struct) -> jax.Array:
    """Zeros made on the devices that a struct names."""
    return zeros_program(struct)()


@functools.cache  # many arrays are alike
def zeros_program(struct):
    return jax.jit(lambda: jax.numpy.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding)


def into_place(stack, value, layer, row=0):
    """A layer of a stack, or its rows from one on. A CPU moves numbers of half precision one by one, integers many at a
    time; a TPU would make a second stack of integers."""

    def update(stack, value, *place):
        return jax.lax.dynamic_update_slice(stack, value[None], place + (0,) * (stack.ndim - len(place)))

    def as_integers(stack, value, *place):
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=f"uint{8 * stack.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(update(bits(stack), bits(value), *place), stack.dtype)

    return jax.lax.platform_dependent(stack, value, layer, row, cpu=as_integers, default=update)


write_layer = jax.jit(into_place, donate_argnums=0)
