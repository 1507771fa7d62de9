"""Loads weight files into sharded arrays on the devices, one tensor at a time.

    specs = array_specs(module, spec, {}, Layout(mesh), "bfloat16")  # shapes and shardings, from the meta device
    check(specs, folder)                                             # against the files' headers
    arrays = load(specs, folder, progress)                           # {name: jax.Array}

Adapters (`Change`) are merged during loading, and GGUF's blocks dequantized, tensor by tensor, on the devices. Threads
prefetch a bounded number of bytes, so host memory stays small (runtime/reading.py).
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
from wan_torchax.kernels.dequantized import dequantize
from wan_torchax.kernels.quantized import quantize
from wan_torchax.models.family import DOWN, UP, ComponentSpec
from wan_torchax.runtime.checkpoint import index
from wan_torchax.runtime.formats import STORED_DTYPES, Stored, by_module
from wan_torchax.runtime.merging import Change, Form, merged
from wan_torchax.runtime.reading import AHEAD_BYTES, Load, read_ahead, read_scale, read_whole

REPLICATED = "(replicated)"
SENT_NUMBERS = 2**22  # values of a layer transferred to a device at a time for merging
MERGING_AHEAD_BYTES = 3 * 2**25  # prefetch limit while merging, which itself needs host memory on CPU devices
STACK_BYTES = 2**26  # stacked arrays up to this size are assembled in host memory
PROBLEMS_SHOWN = 20
UNNAMED = ComponentSpec(lambda architecture: None)  # whose tensors are named as its modules are


@dataclass
class ArraySpec:
    """One array on the devices, and the checkpoint tensors it is loaded from (several if blocks are stacked)."""

    shape: tuple
    dtype: str
    sharding: jax.sharding.NamedSharding
    rule: str
    sources: list = field(default_factory=list)  # checkpoint names, by layer; empty for computed tables
    value: object = None  # the numpy array of a computed table
    stacked: bool = False  # has a leading layer dimension, for the scan
    scaled_by: str | None = None  # if quantized: the name of the array with the scales of its rows
    beside: list = field(default_factory=list)  # of adapters' factors: the tensors that they are for, by layer

    @property
    def struct(self):
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @property
    def bytes(self):
        return math.prod(self.shape) * numpy.dtype(self.dtype).itemsize

    @property
    def bytes_per_device(self):
        return math.prod(self.sharding.shard_shape(self.shape)) * numpy.dtype(self.dtype).itemsize


# ---------------------------------------------------------------- array specs


@dataclass(frozen=True)
class Layout:
    """How a component's arrays are sharded."""

    mesh: object
    rules: Mapping[str, object] = field(default_factory=dict)  # schema.Rule: names the dimensions of weights
    axes: Mapping[str, object] = field(default_factory=dict)  # dimension name -> mesh axes
    gather: str | None = None  # mesh axis over which the blocks' matrices are stored sharded and gathered for use
    key: str = "model.weights"  # config key of the rules

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
    """Parameters that become one array: a single one, or the same one of every block of a stack."""

    name: str
    parameter: object
    sources: list[str]
    stacked: bool
    dtype: str | None = None  # overrides the component's
    scaled_by: str | None = None


def array_specs(
    module, spec: ComponentSpec, architecture, layout: Layout, dtype: str, precision=None
) -> dict[str, ArraySpec]:
    """Shape, dtype and sharding of every array that a module (on the meta device) needs.

    Rules are full matches on checkpoint names; they must be disjoint and, unless optional, match something. Arrays of
    stacked blocks get a leading layer dimension, which is never sharded.
    """
    used, specs, problems = set(), {}, []
    for part in split_quantized(parts_of(module, spec.stacks), layout, precision):
        rules = {rule_for(source, layout, problems) for source in part.sources}
        if len(rules) > 1:
            names = sorted(map(str, rules))
            problems.append(f"{layout.key}: layers of {part.sources[0]}, one array, match different rules {names}")
        rule = rules.pop()
        used.add(rule)
        partition, is_scale = layout.spec(rule, part.parameter, part.stacked), part.name.endswith(".scale")
        shape = tuple(part.parameter.shape)
        if is_scale:  # one per row of a weight, computed when the weight is quantized
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


def factor_specs(module, spec: ComponentSpec, layout: Layout, dtype: str, rank: int) -> dict[str, ArraySpec]:
    """Arrays for adapters' factors of so many ranks beside linear layers' weights: `up` sharded like the weight's rows,
    `down` like its columns."""
    specs = {}
    for part in parts_of(module, spec.stacks):
        name, layers = part.name.removesuffix(".weight"), len(part.sources)
        if name == part.name or not re.fullmatch(spec.adapted, name):
            continue
        rule, (rows, columns) = rule_for(part.sources[0], layout, []), part.parameter.shape
        over_rows, over_columns = (*layout.spec(rule, part.parameter, True), None, None)[:2]
        for kind, shape, axes in (
            (DOWN, (rank, columns), (None, over_columns)), (UP, (rows, rank), (over_rows, None)),
        ):
            sharding = jax.sharding.NamedSharding(layout.mesh, partition_spec([None, *axes]))
            shape = layers, *shape
            specs[f"{name}.{kind}"] = ArraySpec(shape, dtype, sharding, rule or REPLICATED, beside=part.sources)
    return specs


def parts_of(module, stacks: Iterable[str]) -> list[Part]:
    """A module's parameters, with those of stacked blocks grouped: blocks.0.norm2.weight, … as blocks.*.norm2.weight"""
    parts: dict[str, Part] = {}
    for name, parameter in module.named_parameters():
        match = re.fullmatch(r"(\w+)\.\d+\.(.+)", name)
        stacked = match is not None and match[1] in stacks
        array = f"{match[1]}.*.{match[2]}" if stacked else name
        parts.setdefault(array, Part(array, parameter, [], stacked)).sources.append(name)
    return list(parts.values())


def split_quantized(parts: list[Part], layout: Layout, precision) -> Iterable[Part]:
    """Split the weights of quantized linear layers into three arrays: `weight` for the first and last blocks, which
    keep their dtype, `quantized` and `scale` for the others."""
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
    """The rule that matches a name; None if none does."""
    matches = [rule for rule in layout.rules if re.fullmatch(layout.rules[rule].pattern, name)]
    if len(matches) > 1:
        problems.append(f"{layout.key}: {name} matches {' and '.join(matches)}; make their patterns disjoint")
    return matches[0] if matches else None


def dtype_of(module, name: str, dtype: str) -> str:
    """The configured dtype, or float32 where the model requires it."""
    exempt = private.float32_parts(module, dtype)
    return "float32" if any(part in exempt for part in name.split(".")) else dtype


def summary(specs: dict[str, ArraySpec]) -> list[str]:
    """The specs as lines of text: count, size and partition spec by rule, then totals."""
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
    specs: dict[str, ArraySpec], place: Path, progress: Callable[[int], None], component: ComponentSpec = UNNAMED,
    changes: Mapping[str, list[Change]] = MappingProxyType({}),
    took: Callable[[str, float], None] = lambda part, seconds: None,
) -> dict[str, jax.Array]:
    """Load every tensor from a component's folder or file onto the devices, merging `changes` (by checkpoint name).
    `progress` is called with bytes loaded, `took` with the seconds spent waiting for reads and transfers."""
    files = by_module(index(place), component, source_shapes(specs))
    arrays, spent, ahead = {}, Counter(), MERGING_AHEAD_BYTES if changes else AHEAD_BYTES
    planned = [load for spec in specs.values() for load in loads(spec, files, changes)]
    with contextlib.closing(read_ahead((load.raw for load in planned), ahead)) as reading:
        parts, awaited = timed(functools.partial(next, reading), spent, "reading"), iter(planned)
        began = time.perf_counter()
        for name, spec in specs.items():
            arrays |= jax.block_until_ready(load_one(name, specs, files, changes, lambda: send(next(awaited), parts())))
            progress(spec.bytes)
    took("reading", spent["reading"])
    took("sending", time.perf_counter() - began - spent["reading"])
    return arrays


def load_one(
    name: str, specs: dict[str, ArraySpec], files: Mapping[str, Stored], changes: Mapping[str, list[Change]],
    arrive: Callable[[], jax.Array],
) -> dict[str, jax.Array]:
    """Load one array from what `arrive` gives, in the order of `loads`; a quantized one together with its scales."""
    spec = specs[name]
    if spec.value is not None:
        return {name: put(spec.value, spec.sharding)}
    if not spec.sources:
        return {}  # scales are loaded with their weight
    if spec.scaled_by:
        values, scales = quantize_layers(spec, specs[spec.scaled_by], files, changes, arrive)
        return {name: values, spec.scaled_by: scales}
    if is_whole(spec, files, changes):
        return {name: arrive()}
    if spec.stacked:
        return {name: stack_layers(spec, files, changes, arrive)}
    return {name: merge(spec, changes.get(spec.sources[0], ()), arrive)}


def load_factors(name: str, spec: ArraySpec, placed: Mapping[str, list[tuple[int, Change]]]) -> jax.Array:
    """Adapters' factors beside a weight, of every layer: each at its first rank, zeros elsewhere. `placed` has first
    ranks and changes by checkpoint name."""
    value = numpy.zeros(spec.shape, spec.dtype)
    for layer, source in enumerate(spec.beside):
        for begin, change in placed.get(source, ()):
            up, down = change.factors
            ranks = slice(begin, begin + down.shape[0])
            if name.endswith(UP):
                value[layer, :, ranks] = numpy.float32(change.scale) * read_finite(up)
            else:
                value[layer, ranks] = read_finite(down)
    return put(value, spec.sharding)


def timed(function: Callable, spent: Counter, part: str) -> Callable:
    """The function, accumulating its seconds in `spent`."""

    def call():
        began = time.perf_counter()
        try:
            return function()
        finally:
            spent[part] += time.perf_counter() - began

    return call


def loads(spec: ArraySpec, files: Mapping[str, Stored], changes: Mapping[str, list[Change]]) -> list[Load]:
    """The reads for an array, in the order they are consumed: all sources at once, or one by one, each preceded by the
    factors of its changes."""
    if is_whole(spec, files, changes):
        sources = [files[source] for source in spec.sources]
        return [Load(sources, spec.dtype, spec.shape, spec.sharding, spec.stacked)] if sources else []
    listed, sharding = [], layer_sharding(spec)
    for source in spec.sources:
        stored, added = files[source], changes.get(source, ())
        factors = (factor for change in added for factor in placed(change, sharding))
        listed += [Load([one], sent_as(one), one.shape, spread, finite=True) for one, spread in factors]
        in_rows = merged_in_rows(spec, stored, added)
        shape, begins = some_rows(stored.shape, sharding) if in_rows else (stored.shape, [0])
        dtype = sent_as(stored) if added or spec.scaled_by else spec.dtype
        if is_kept(spec, stored, added):
            stored, dtype = replace(stored, scale=None), spec.dtype
        listed += [Load([stored], dtype, shape, sharding, begin=begin) for begin in begins]
    return listed


def merged_in_rows(spec: ArraySpec, stored: Stored, added: Iterable[Change]) -> bool:
    """Whether changes are merged into a layer some rows at a time; see merge_layer."""
    plain = all(change.form.is_plain for change in added)
    return bool(added) and plain and spec.stacked and not spec.scaled_by and not stored.in_blocks


def is_kept(spec: ArraySpec, stored: Stored, added: Iterable[Change]) -> bool:
    """Whether a weight is stored as it is computed with, in eight bits with a scale: it is not rounded again."""
    return bool(spec.scaled_by) and not added and STORED_DTYPES[stored.dtype] == spec.dtype


def some_rows(shape: tuple, sharding) -> tuple[tuple, list[int]]:
    """Split a layer for merging: the shape transferred at a time, with the same rows of each device's shard, and the
    first row of each transfer."""
    part = sharding.shard_shape(shape)
    held, times = part[0], math.ceil(math.prod(part) / SENT_NUMBERS)
    rows = math.ceil(held / min(times, held))
    return (shape[0] // held * rows, *shape[1:]), [min(begin, held - rows) for begin in range(0, held, rows)]


def is_whole(spec: ArraySpec, files: Mapping[str, Stored], changes: Mapping[str, list[Change]]) -> bool:
    """Whether an array is assembled in host memory. Large stacked arrays are not, nor arrays that are merged, quantized
    or dequantized on the devices."""
    large = spec.stacked and spec.bytes > STACK_BYTES
    on_devices = any(changes.get(source) or files[source].in_blocks for source in spec.sources)
    return not (large or spec.scaled_by or on_devices)


def layer_sharding(spec: ArraySpec):
    """The sharding of one layer of a stacked array."""
    if not spec.stacked:
        return spec.sharding
    return jax.sharding.NamedSharding(spec.sharding.mesh, jax.sharding.PartitionSpec(*spec.sharding.spec[1:]))


def source_shapes(specs: dict[str, ArraySpec]) -> dict[str, tuple]:
    """The shape of every checkpoint tensor that the specs need."""
    shapes = {}
    for spec in specs.values():
        shapes |= dict.fromkeys(spec.sources, spec.shape[1:] if spec.stacked else spec.shape)
    return shapes


def check(
    specs: dict[str, ArraySpec], place: Path, ignored: Iterable[str] = (), component: ComponentSpec = UNNAMED
) -> None:
    """Raise one error that lists every missing, unexpected and mis-shaped tensor; reads only headers."""
    shapes = source_shapes(specs)
    files = by_module(index(place), component, shapes)
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
        raise ConfigError(f"{place} does not hold this model's weights:\n{listed(problems, PROBLEMS_SHOWN)}")


def sent_as(stored: Stored) -> str:
    """The dtype in which a tensor is transferred before it is cast on the device: its own, if JAX computes in it."""
    kind = STORED_DTYPES[stored.dtype]
    return kind if kind in ("float32", "bfloat16", "float16") else "float32"


def placed(change: Change, sharding) -> list[tuple[Stored, jax.sharding.NamedSharding]]:
    """A change's factors and their shardings: `up` like the tensor's rows, `down` like its other dimensions, so that
    their product needs no communication. Factors of other forms are small, and whole everywhere."""
    if not change.form.is_plain:
        return [(one, replicated(sharding.mesh)) for one in change.factors]
    if len(change.factors) == 1:
        return [(change.factors[0], sharding)]
    rows, rest = (*sharding.spec, None)[0], tuple(sharding.spec)[1:]
    specs = jax.sharding.PartitionSpec(rows), jax.sharding.PartitionSpec(None, *rest)
    return [(one, jax.sharding.NamedSharding(sharding.mesh, spec)) for one, spec in zip(change.factors, specs)]


def send(load: Load, parts: dict) -> jax.Array:
    """The array on the devices; GGUF's blocks are dequantized there."""
    if load.finite:
        check_finite(load.sources[0], *parts.values())
    raw = load.raw
    array = jax.make_array_from_callback(raw.shape, raw.sharding, lambda part: parts[str(part)])
    stored = load.sources[0]
    return dequantize_program(stored.dtype, load.shape, load.dtype, load.sharding)(array) if stored.in_blocks else array


def check_finite(stored: Stored, *parts: numpy.ndarray) -> None:
    """Of adapters: later the error would point at the checkpoint."""
    if not all(numpy.isfinite(part.astype(numpy.float32)).all() for part in parts):
        raise ConfigError(f"{stored.file}: has numbers that are not finite; download it again, or leave it out")


def read_finite(stored: Stored) -> numpy.ndarray:
    """An adapter's factor, in float32."""
    numbers = read_whole(stored)
    check_finite(stored, numbers)
    return numbers


@functools.cache
def dequantize_program(blocks: str, shape: tuple, dtype: str, sharding):
    def program(array):
        return dequantize(array, blocks).astype(dtype).reshape(shape)

    return jax.jit(program, out_shardings=sharding)


def stack_layers(
    spec: ArraySpec, files: Mapping[str, Stored], changes: Mapping[str, list[Change]], arrive: Callable[[], jax.Array]
) -> jax.Array:
    """Write a tensor of every layer into a preallocated, donated array on the devices, layer by layer."""
    stack = zeros(spec.struct)
    whole = replace(spec, sharding=layer_sharding(spec), shape=spec.shape[1:], stacked=False)
    for layer, source in enumerate(spec.sources):
        added = changes.get(source, ())
        if merged_in_rows(spec, files[source], added):
            stack = merge_layer(spec, added, arrive, stack, layer)
        else:
            stack = update_stack(write_layer, stack, merge(whole, added, arrive), layer)
    return stack


def merge_layer(
    spec: ArraySpec, changes: Iterable[Change], arrive: Callable[[], jax.Array], stack, layer: int
) -> jax.Array:
    """Merge changes into the next layer and write it to the stack, some rows at a time."""
    sharding = layer_sharding(spec)
    scales, factors = added_by(changes, arrive)
    specs = jax.tree.map(lambda factor: factor.sharding.spec, factors)
    program = merge_into_program(spec.sharding, specs)
    for begin in some_rows(spec.shape[1:], sharding)[1]:
        stack = update_stack(program, stack, layer, begin, arrive(), scales, factors)
    return stack


def update_stack(program: Callable, stack, *arguments) -> jax.Array:
    """Run the program once the stack is ready. The arguments' transfer overlaps the previous update; waiting here
    bounds the memory of pending transfers."""
    return program(jax.block_until_ready(stack), *arguments)


def quantize_layers(
    spec: ArraySpec, scale: ArraySpec, files: Mapping[str, Stored], changes: Mapping[str, list[Change]],
    arrive: Callable[[], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Quantize a weight of every layer, after merging adapters, from the stored precision: values and scales."""
    values, scales = zeros(spec.struct), zeros(scale.struct)
    whole = replace(spec, dtype="float32", sharding=layer_sharding(spec), shape=spec.shape[1:], stacked=False)
    for layer, source in enumerate(spec.sources):
        stored, added = files[source], changes.get(source, ())
        if is_kept(spec, stored, added):
            factors = read_scale(stored) if stored.scale else numpy.ones(scale.shape[1:], numpy.float32)
            new = arrive(), put(factors, layer_sharding(scale))
        else:
            new = quantize_program(spec.dtype, whole.sharding, layer_sharding(scale))(merge(whole, added, arrive))
        values, scales = (write_layer(stack, value, layer) for stack, value in zip((values, scales), new))
        jax.block_until_ready(values)
    return values, scales


@functools.cache
def quantize_program(dtype: str, *shardings):
    return jax.jit(functools.partial(quantize, dtype=dtype), out_shardings=shardings)


def merge(spec: ArraySpec, changes: Iterable[Change], arrive: Callable[[], jax.Array]) -> jax.Array:
    """The next tensor, with its changes merged."""
    added = added_by(changes, arrive)
    array = arrive()
    forms = tuple(change.form for change in changes)
    return merge_program(spec.sharding, spec.dtype, forms)(array, *added) if changes else array


def added_by(changes: Iterable[Change], arrive: Callable[[], jax.Array]) -> tuple[tuple, tuple]:
    """Scales, and factors on the devices, of every change."""
    factors = tuple(tuple(arrive() for _ in change.factors) for change in changes)
    return tuple((numpy.float32(change.scale), numpy.float32(change.strength)) for change in changes), factors


@functools.cache
def merge_program(sharding, dtype: str, forms: tuple[Form, ...]):
    return jax.jit(functools.partial(merged, dtype=dtype, forms=forms), out_shardings=sharding)


@functools.cache
def merge_into_program(sharding, factor_specs):
    """Merge rows of each device's shard into a layer of a stack."""

    def program(stack, layer, begin, base, scales, added):
        cut = [[jax.lax.dynamic_slice_in_dim(first, begin, len(base)), *rest] for first, *rest in added]
        return into_place(stack, merged(base, scales, cut, stack.dtype), layer, begin)

    layer_spec, everywhere = jax.sharding.PartitionSpec(*sharding.spec[1:]), jax.sharding.PartitionSpec()
    specs = sharding.spec, everywhere, everywhere, layer_spec, everywhere, factor_specs
    local = jax.shard_map(program, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
    return jax.jit(local, donate_argnums=0)


def put(value: numpy.ndarray, sharding) -> jax.Array:
    """Transfer a numpy array to this process's devices. With several processes, device_put would compile a program to
    compare their values."""
    return jax.make_array_from_callback(value.shape, sharding, lambda part: numpy.asarray(value[part]))


def zeros(struct) -> jax.Array:
    """Zeros, allocated on the devices."""
    return zeros_program(struct)()


@functools.cache  # many arrays are alike
def zeros_program(struct):
    return jax.jit(lambda: jax.numpy.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding)


def into_place(stack, value, layer, row=0):
    """Write a layer of a stack, or rows of it starting at `row`. XLA's CPU backend vectorizes such copies for integers
    but not for half precision; on TPU, the bitcast would allocate a second stack."""

    def update(stack, value, *place):
        return jax.lax.dynamic_update_slice(stack, value[None], place + (0,) * (stack.ndim - len(place)))

    def as_integers(stack, value, *place):
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=f"uint{8 * stack.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(update(bits(stack), bits(value), *place), stack.dtype)

    return jax.lax.platform_dependent(stack, value, layer, row, cpu=as_integers, default=update)


write_layer = jax.jit(into_place, donate_argnums=0)
