"""From safetensors on disk to sharded arrays on the devices, one tensor at a time.

    specs = array_specs(module, spec, {}, Layout(mesh), "bfloat16")  # what goes where: pure, from shapes alone
    check(specs, folder)                                             # against the files' headers
    arrays = load(specs, folder, progress)                           # {name: jax.Array}

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
from wan_torchax.kernels.quantized import quantize
from wan_torchax.models.family import ComponentSpec
from wan_torchax.runtime.checkpoint import Stored, index
from wan_torchax.runtime.reading import AHEAD_BYTES, STORED_DTYPES, Load, read_ahead

REPLICATED = "(replicated)"
SENT_NUMBERS = 2**22  # of a layer that a device is sent at a time to be merged
MERGING_AHEAD_BYTES = 3 * 2**25  # read ahead while merging, which needs memory of its own where the host is the device
STACK_BYTES = 2**26  # of layers that become one array: up to here they are put together in host memory
PROBLEMS_SHOWN = 20


@dataclass
class ArraySpec:
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


@dataclass(frozen=True)
class Layout:
    """How a component's arrays lie on the devices."""

    mesh: object
    rules: Mapping[str, object] = field(default_factory=dict)  # schema.Rule: what the dimensions of its weights are
    axes: Mapping[str, object] = field(default_factory=dict)  # a dimension's name -> mesh axes
    gather: str | None = None  # mesh axis over which the blocks' matrices are stored in parts
    key: str = "model.weights"  # of the rules in the config

    def spec(self, rule: str | None, parameter, stacked: bool) -> jax.sharding.PartitionSpec:
        names = self.rules[rule].axes if rule else ()
        entries = [self.axes.get(name) if name else None for name in names]
        if self.gather and rule and stacked and parameter.ndim > 1:
            entries = [self.gather, *entries[1:]]
        while entries and entries[-1] is None:
            entries.pop()
        return partition_spec(entries)


@dataclass
class Part:
    """Parameters of a module that become one array: one, or the same of every block of a stack."""

    name: str
    parameter: object
    sources: list[str]
    stacked: bool
    dtype: str | None = None  # if it has one of its own
    scaled_by: str | None = None


def array_specs(
    module, spec: ComponentSpec, architecture, layout: Layout, dtype: str, precision=None
) -> dict[str, ArraySpec]:
    """Shape, dtype and sharding of every array a module (on the meta device) needs.

    Rules are full matches on checkpoint names and must be disjoint and all used, but for optional ones. Arrays of
    stacked blocks get a leading dimension, the layer, which is never sharded.
    """
    used, specs, problems = set(), {}, []
    for part in in_eight_bits_too(parts_of(module, spec.stacks), layout, precision):
        rules = {rule_for(source, layout, problems) for source in part.sources}
        if len(rules) > 1:
            names = sorted(map(str, rules))
            problems.append(f"{layout.key}: layers of {part.sources[0]}, one array, match different rules {names}")
        rule = rules.pop()
        used.add(rule)
        partition, is_scale = layout.spec(rule, part.parameter, part.stacked), part.name.endswith(".scale")
        shape = tuple(part.parameter.shape)
        if is_scale:  # one for each row of a weight, made of the weights that are read
            partition, shape = jax.sharding.PartitionSpec(*partition[:1]), shape[:1]
        problem = spec_problem(partition, shape, layout.mesh)
        if problem:
            problems.append(f"{layout.key}.{rule}: {part.sources[0]} {problem}")
            continue
        if part.stacked:
            shape = (len(part.sources), *shape)
            partition = jax.sharding.PartitionSpec(None, *partition) if len(partition) else partition
        sharding = jax.sharding.NamedSharding(layout.mesh, partition)
        specs[part.name] = ArraySpec(
            shape, part.dtype or dtype_of(module, part.name, dtype), sharding, rule or REPLICATED,
            [] if is_scale else part.sources, stacked=part.stacked, scaled_by=part.scaled_by,
        )
    for rule in layout.rules.keys() - used:
        if not layout.rules[rule].get("optional", False):
            pattern = layout.rules[rule].pattern
            sources = [spec.sources[0] for spec in specs.values() if spec.sources]
            problems.append(f"{layout.key}.{rule}: pattern {pattern!r} matches nothing; {nearest(pattern, sources)}")
    if problems:
        raise ConfigError(f"the rules for weights do not fit the model:\n{listed(problems, PROBLEMS_SHOWN)}")
    return specs | {
        name: ArraySpec(value.shape, "float32", replicated(layout.mesh), REPLICATED, value=value)
        for name, value in spec.tables(architecture).items()
    }


def parts_of(module, stacks: Iterable[str]) -> list[Part]:
    """A module's parameters; those of stacked blocks once: blocks.*.norm2.weight of blocks.0.norm2.weight, …"""
    parts: dict[str, Part] = {}
    for name, parameter in module.named_parameters():
        match = re.fullmatch(r"(\w+)\.\d+\.(.+)", name)
        stacked = match is not None and match[1] in stacks
        array = f"{match[1]}.*.{match[2]}" if stacked else name
        parts.setdefault(array, Part(array, parameter, [], stacked)).sources.append(name)
    return list(parts.values())


def in_eight_bits_too(parts: list[Part], layout: Layout, precision) -> Iterable[Part]:
    """With linear layers in eight bits, in all blocks but a few at both ends: their weights are three arrays, `weight`
    of the blocks that keep theirs, `quantized` and `scale` of the others."""
    if precision is None or not precision.weights:
        yield from parts
        return
    matched = set()
    for part in parts:
        rule = rule_for(part.sources[0], layout, []) if part.stacked and part.name.endswith(".weight") else None
        if rule not in precision.layers:
            yield part
            continue
        matched.add(rule)
        count, first, last = len(part.sources), precision.first, precision.last
        if first + last >= count:
            raise ConfigError(f"precision.first={first} and last={last} leave none of {count} blocks")
        quantized, kept = part.sources[first : count - last], part.sources[:first] + part.sources[count - last :]
        name = part.name.removesuffix(".weight")
        if kept:
            yield replace(part, sources=kept)
        yield replace(
            part, name=f"{name}.quantized", sources=quantized, dtype=precision.weights, scaled_by=f"{name}.scale"
        )
        yield replace(part, name=f"{name}.scale", sources=quantized, dtype="float32")
    for rule in precision.layers:
        if rule not in matched:
            raise ConfigError(f"precision.layers: {rule} is no rule for linear layers of the blocks")


def rule_for(name: str, layout: Layout, problems: list[str]) -> str | None:
    """The one rule that matches a name; None if none does."""
    matches = [rule for rule in layout.rules if re.fullmatch(layout.rules[rule].pattern, name)]
    if len(matches) > 1:
        problems.append(f"{layout.key}: {name} matches {' and '.join(matches)}; make their patterns disjoint")
    return matches[0] if matches else None


def dtype_of(module, name: str, dtype: str) -> str:
    """The configured dtype, or float32 where the model's authors want it."""
    exempt = private.float32_parts(module, dtype)
    return "float32" if any(part in exempt for part in name.split(".")) else dtype


def summary(specs: dict[str, ArraySpec]) -> list[str]:
    """The plan as lines: by rule the tensors, their size and spec; then totals."""
    groups = defaultdict(list)
    for spec in specs.values():
        groups[spec.rule].append(spec)
    lines = []
    for rule, group in sorted(groups.items()):
        count = sum(max(len(spec.sources), 1) for spec in group)
        shardings = ", ".join(sorted({str(tuple(spec.sharding.spec)) for spec in group}))
        lines.append(f"  {rule:20} {count:5} tensors {gib(sum(t.bytes for t in group)):9.3f} GiB  {shardings}")
    total, everywhere = sum(t.bytes for t in specs.values()), sum(t.bytes for t in groups[REPLICATED])
    shares = f"sharded {gib(total - everywhere):.3f} GiB, replicated {gib(everywhere):.3f} GiB"
    per_device = sum(spec.bytes_per_device for spec in specs.values())
    lines.append(f"  {shares}; {gib(per_device):.3f} GiB on each device")
    return lines


def gib(count: float) -> float:
    return count / 2**30


# ---------------------------------------------------------------- loading


def load(
    specs: dict[str, ArraySpec], folder: Path, progress: Callable[[int], None], prefix: str = "",
    changes: Mapping[str, list[Change]] = MappingProxyType({}),
    took: Callable[[str, float], None] = lambda part, seconds: None,
) -> dict[str, jax.Array]:
    """Read every planned tensor from a component's folder to its devices; `progress` hears of bytes as they arrive,
    `took` of the seconds that reading and sending made this wait. `changes`, by checkpoint name, are added on the
    way."""
    files, arrays, spent = without_prefix(index(folder), prefix), {}, Counter()
    ahead = MERGING_AHEAD_BYTES if changes else AHEAD_BYTES
    planned = (load for spec in specs.values() for load in loads(spec, files, changes))
    with contextlib.closing(read_ahead(planned, ahead)) as reading:
        parts = timed(functools.partial(next, reading), spent, "reading")
        began = time.perf_counter()
        for name, spec in specs.items():
            arrays |= jax.block_until_ready(load_one(name, specs, changes, parts))
            progress(spec.bytes)
    took("reading", spent["reading"])
    took("sending", time.perf_counter() - began - spent["reading"])
    return arrays


def load_one(
    name: str, specs: dict[str, ArraySpec], changes: Mapping[str, list[Change]], parts: Callable[[], dict]
) -> dict[str, jax.Array]:
    """A planned tensor on its devices, with the scales that come with one of eight bits."""
    spec = specs[name]
    if spec.value is not None:
        return {name: put(spec.value, spec.sharding)}
    if not spec.sources:
        return {}  # scales, which come with what they scale
    if spec.scaled_by:
        values, scales = in_eight_bits(spec, specs[spec.scaled_by], changes, parts)
        return {name: values, spec.scaled_by: scales}
    if is_whole(spec, changes):
        return {name: send(spec.shape, spec.sharding, parts())}
    if spec.stacked:
        return {name: by_layer(spec, changes, parts)}
    return {name: merge(spec, changes[spec.sources[0]], parts)}


def timed(function: Callable, spent: Counter, part: str) -> Callable:
    """The function, its seconds added up."""

    def call():
        began = time.perf_counter()
        try:
            return function()
        finally:
            spent[part] += time.perf_counter() - began

    return call


def loads(spec: ArraySpec, files: dict[str, Stored], changes: Mapping[str, list[Change]]) -> list[Load]:
    """What is read for an array, in the order it is needed: all of it at once, or its sources one by one, each after
    what is added to it."""
    if is_whole(spec, changes):
        sources = [files[source] for source in spec.sources]
        return [Load(sources, spec.dtype, spec.shape, spec.sharding, spec.stacked)] if sources else []
    listed, sharding = [], layer_sharding(spec)
    for source in spec.sources:
        stored, added = files[source], changes.get(source, ())
        factors = (factor for change in added for factor in placed(change, sharding))
        listed += [Load([one], sent_as(one), one.shape, spread) for one, spread in factors]
        in_place = added and spec.stacked and not spec.scaled_by  # as merge_layer does it
        shape, begins = some_rows(stored.shape, sharding) if in_place else (stored.shape, [0])
        dtype = sent_as(stored) if added or spec.scaled_by else spec.dtype
        listed += [Load([stored], dtype, shape, sharding, begin=begin) for begin in begins]
    return listed


def some_rows(shape: tuple, sharding) -> tuple[tuple, list[int]]:
    """The shape of what is sent of a layer at a time, the same rows of each device's part, and where they begin in
    it."""
    part = sharding.shard_shape(shape)
    held, times = part[0], math.ceil(math.prod(part) / SENT_NUMBERS)
    rows = math.ceil(held / min(times, held))
    return (shape[0] // held * rows, *shape[1:]), [min(begin, held - rows) for begin in range(0, held, rows)]


def is_whole(spec: ArraySpec, changes: Mapping[str, list[Change]]) -> bool:
    """Whether an array is put together in host memory. Not one of many layers that would be much, nor one whose sources
    are added to or rounded on the devices."""
    much = spec.stacked and spec.bytes > STACK_BYTES
    return not (much or spec.scaled_by or any(map(changes.get, spec.sources)))


def layer_sharding(spec: ArraySpec):
    """How one of an array's sources lies on the devices."""
    if not spec.stacked:
        return spec.sharding
    return jax.sharding.NamedSharding(spec.sharding.mesh, jax.sharding.PartitionSpec(*spec.sharding.spec[1:]))


def without_prefix(files: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    """What files hold, by the names that modules have."""
    return {name.removeprefix(prefix): stored for name, stored in files.items()}


def source_shapes(specs: dict[str, ArraySpec]) -> dict[str, tuple]:
    """The shape of every checkpoint tensor that a plan needs, by its name."""
    shapes = {}
    for spec in specs.values():
        shapes |= dict.fromkeys(spec.sources, spec.shape[1:] if spec.stacked else spec.shape)
    return shapes


def check(specs: dict[str, ArraySpec], folder: Path, ignored: Iterable[str] = (), prefix: str = "") -> None:
    """One error that lists every missing, unexpected and mis-shaped tensor; from the files' headers alone."""
    files, shapes = without_prefix(index(folder), prefix), source_shapes(specs)
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


def by_layer(spec: ArraySpec, changes: Mapping[str, list[Change]], parts: Callable[[], dict]) -> jax.Array:
    """The same tensor of every layer into one array, written layer by layer into memory that is already on the
    devices."""
    stack = zeros(spec.struct)
    for layer, source in enumerate(spec.sources):
        if added := changes.get(source):
            stack = merge_layer(spec, added, parts, stack, layer)
        else:
            stack = in_turn(write_layer, stack, send(spec.shape[1:], layer_sharding(spec), parts()), layer)
    return stack


def merge_layer(spec: ArraySpec, changes: list[Change], parts: Callable[[], dict], stack, layer: int) -> jax.Array:
    """The stack with the next layer and what adapters add to it, some rows at a time."""
    sharding = layer_sharding(spec)
    scales, factors = send_added(changes, sharding, parts)
    specs = jax.tree.map(lambda factor: factor.sharding.spec, factors)
    program = merge_into_program(spec.sharding, specs)
    shape, begins = some_rows(spec.shape[1:], sharding)
    for begin in begins:
        stack = in_turn(program, stack, layer, begin, send(shape, sharding, parts()), scales, factors)
    return stack


def in_turn(program: Callable, stack, *arguments) -> jax.Array:
    """The next stack as soon as this one is there: the arguments were sent meanwhile, and no more than those wait."""
    return program(jax.block_until_ready(stack), *arguments)


def in_eight_bits(
    spec: ArraySpec, scale: ArraySpec, changes: Mapping[str, list[Change]], parts: Callable[[], dict]
) -> tuple[jax.Array, jax.Array]:
    """A weight of every layer and its scales, from numbers as they are stored and what adapters add to them."""
    values, scales = zeros(spec.struct), zeros(scale.struct)
    whole = replace(spec, dtype="float32", sharding=layer_sharding(spec), shape=spec.shape[1:], stacked=False)
    program = quantize_program(spec.sharding, scale.sharding)
    for layer, source in enumerate(spec.sources):
        values, scales = program(values, scales, merge(whole, changes.get(source, ()), parts), layer)
        jax.block_until_ready(values)
    return values, scales


@functools.cache
def quantize_program(*shardings):
    def program(values, scales, array, layer):
        new_values, new_scales = quantize(array, str(values.dtype))
        return into_place(values, new_values, layer), into_place(scales, new_scales, layer)

    return jax.jit(program, out_shardings=shardings, donate_argnums=(0, 1))


def merge(spec: ArraySpec, changes: Iterable[Change], parts: Callable[[], dict]) -> jax.Array:
    """The next of a tensor's sources on the devices, with what adapters add to it."""
    added = send_added(changes, spec.sharding, parts)
    array = send(spec.shape, spec.sharding, parts())
    return merge_program(spec.sharding, spec.dtype)(array, *added) if changes else array


def send_added(changes: Iterable[Change], sharding, parts: Callable[[], dict]) -> tuple[tuple, tuple]:
    """What is added to a tensor: the scale and the factors, on the devices, of every change."""
    factors = tuple(
        tuple(send(one.shape, spread, finite(one, parts())) for one, spread in placed(change, sharding))
        for change in changes
    )
    return tuple(numpy.float32(change.scale) for change in changes), factors


def finite(stored: Stored, parts: dict) -> dict:
    """An adapter's numbers, refused where there are others than finite ones: the checkpoint would be blamed."""
    if not all(numpy.isfinite(part.astype(numpy.float32)).all() for part in parts.values()):
        raise ConfigError(f"{stored.file}: has numbers that are not finite; download it again, or leave it out")
    return parts


def merged(base, scales, added, dtype):
    """base + Σ scale · product of factors, in float32 and cast once. A TPU would multiply in bfloat16 unasked."""
    total = base.astype(jax.numpy.float32)
    for scale, factors in zip(scales, added):
        first, *second = (factor.astype(jax.numpy.float32) for factor in factors)
        whole = scale * first
        if second:
            transposed = jax.lax.optimization_barrier(whole.T)  # a CPU multiplies so an eighth faster
            whole = jax.numpy.tensordot(transposed, second[0], (0, 0), precision="highest")
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
