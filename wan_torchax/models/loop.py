"""Runs identical blocks in one loop over stacked weights; selects how their linear layers and norms are computed.

    blocks = Blocks.of(arrays, "blocks", 40, forward)           # arrays "blocks.*.<layer>.weight" (40, …)
    hidden, counted = blocks.run(block, hidden, counted)        # block(layer, hidden) -> (hidden, rescued rows)

A block is a pure function of one `Layer`, which has its weights, and of the carry: one array or a tuple. The program
does not grow with depth.

Implementations of linear layers wrap each other. `linear_of` composes them in this order, and the first that supports a
layer computes it: a Pallas kernel (conf/products), quantized (conf/precision), XLA. Adapters' factors beside a weight
are added to it first, or their product with the input to the result.
"""
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from wan_torchax.kernels import quantized
from wan_torchax.kernels.norm import Norm
from wan_torchax.kernels.product import LANES, Linear, Target
from wan_torchax.kernels.rotary import Turn
from wan_torchax.models.family import DOWN, UP, Forward


@dataclass(frozen=True)
class Layer:
    """One block's weights, sliced from their stacks on access: layer["norm2.weight"]."""

    blocks: "Blocks"
    index: Any  # an int or a traced scalar
    eight_bits: bool = False
    adapted: str | None = None  # a linear layer whose weight is given with the adapters' factors beside it added

    def __getitem__(self, name: str) -> jax.Array:
        array = jax.lax.dynamic_index_in_dim(*self.stacked(name), keepdims=False)
        sharding = self.blocks.gathered.get(name)
        array = array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)
        return array if name != f"{self.adapted}.weight" else self.with_factors(array)

    def with_factors(self, weight: jax.Array) -> jax.Array:
        """A weight plus up · down, summed in float32."""
        up, down = (self[f"{self.adapted}.{name}"] for name in (UP, DOWN))
        added = jnp.einsum("ab,bc->ac", up, down, preferred_element_type=jnp.float32)
        return (weight.astype(jnp.float32) + added).astype(weight.dtype)

    def __contains__(self, name: str) -> bool:
        return name in self.blocks.arrays

    def stacked(self, name: str) -> tuple[jax.Array, Any]:
        """A weight's stack and this layer's index in it. A quantized linear layer has two stacks: for the quantized
        blocks and for the others."""
        stack, index, first = self.blocks.arrays[name], self.index, self.blocks.eight_bits.start
        if stack.shape[0] == self.blocks.count:
            return stack, index
        if self.eight_bits:
            return stack, index - first
        return stack, jnp.where(index < first, index, index - len(self.blocks.eight_bits))

    def pieces(self, name: str, array, options: "Options") -> list[tuple[jax.Array, jax.Array]]:
        """Each array of a tuple, or the only one, with the part of the weight that it meets."""
        if not isinstance(array, tuple) and options.rows == slice(None):
            return [(array, self[name])]
        arrays, weight = array if isinstance(array, tuple) else (array,), self[name]
        ends = itertools.accumulate(one.shape[-1] for one in arrays)
        parts = [weight[options.rows, end - one.shape[-1] : end] for one, end in zip(arrays, ends)]
        return [(one, self.blocks.shared(part, isinstance(array, tuple))) for one, part in zip(arrays, parts)]

    def has_eight_bits(self, name: str) -> bool:
        return self.eight_bits and f"{name}.quantized" in self

    def takes_pieces(self, name: str) -> bool:
        """Whether a layer's kernel puts attention's outputs together itself: parallel.Pieces."""
        return self.blocks.pieces and f"{name}.{DOWN}" not in self

    def bias(self, name: str, rows: slice = slice(None)):
        return self[f"{name}.bias"][rows] if f"{name}.bias" in self else jnp.float32(0)

    def linear(self, name: str, array, **options):
        """The linear layer of this name on (batch, tokens, inputs), or on a tuple of arrays whose inputs follow each
        other: joined, arrays whose columns devices share would have to be exchanged. See `Options`."""
        with jax.named_scope(name.replace(".", "/")):
            return self.blocks.linear(self, name, array, Options(**options))

    def norm(self, name: str, array, scale, shift):
        """Layer norm, times scale, plus shift: each (batch, channels) or per token (batch, tokens, channels)."""
        with jax.named_scope(name):
            return self.blocks.norm(array, scale, shift, self.blocks.epsilon)

    def rms_norm(self, name: str, array):
        with jax.named_scope(name):
            return self.blocks.norm(array, self[f"{name}.weight"][None], None, self.blocks.epsilon)


@dataclass(frozen=True)
class Blocks:
    """A stack of identical blocks."""

    arrays: Mapping[str, jax.Array]  # by name in a block: (layers, …)
    count: int
    linear: Callable
    norm: Callable
    epsilon: float = 1e-6
    eight_bits: range = range(0)  # blocks with quantized linear layers
    gathered: Mapping[str, jax.sharding.NamedSharding] | Any = ()  # shardings of gathered weights while in use
    scan: bool = True
    skipped: jax.Array | None = None  # (batch, layers) true where a block is left out
    pieces: bool = False  # whether linear layers take attention's outputs in pieces
    heads: jax.sharding.NamedSharding | None = None  # over the axis of which devices share a weight's first dimension

    @classmethod
    def of(cls, arrays: Mapping[str, jax.Array], stack: str, count: int, forward: Forward, **settings) -> "Blocks":
        """The blocks whose arrays are named "<stack>.*.…"."""
        start = f"{stack}.*."
        own = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
        precision = forward.precision
        eight = range(precision.first, count - precision.last) if precision.weights else range(0)
        whole = jax.sharding.NamedSharding(forward.mesh, jax.sharding.PartitionSpec())
        gathered = dict.fromkeys(own, whole) if forward.gather else {}
        return cls(
            own, count, linear_of(forward), norm_of(forward), eight_bits=eight, gathered=gathered, scan=forward.scan,
            pieces=forward.products.kernel == "pallas" and forward.products.ahead,
            heads=jax.sharding.NamedSharding(forward.mesh, jax.sharding.PartitionSpec(forward.parallel.heads)),
            **settings,
        )

    def layer(self, index, eight_bits: bool | None = None) -> Layer:
        return Layer(self, index, index in self.eight_bits if eight_bits is None else eight_bits)

    def shared(self, part, by_input: bool) -> jax.Array:
        """Part of a weight, its outputs or inputs shared as heads are. It is whole on every device before: cut where
        the devices' shares end elsewhere, it would have to be exchanged."""
        if self.heads is None:
            return part
        mesh, spec = self.heads.mesh, self.heads.spec
        for axes in ((), (None, *spec) if by_input else spec):
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
            part = jax.lax.with_sharding_constraint(part, sharding)
        return part

    def run(self, block: Callable, carry, counted=None, begin: int = 0) -> tuple[Any, jax.Array | None]:
        """Run all blocks from `begin` on. `counted` (layers, devices) accumulates rescued rows, if attention counts
        them."""
        ends = sorted({begin, *(max(begin, end) for end in (self.eight_bits.start, self.eight_bits.stop)), self.count})
        for first, last in itertools.pairwise(ends if self.eight_bits else [begin, self.count]):
            step = functools.partial(self.step, block, first in self.eight_bits)
            if self.scan:
                carry, counted = jax.lax.fori_loop(first, last, step, (carry, counted))
            else:
                for index in range(first, last):
                    carry, counted = step(index, (carry, counted))
        return carry, counted

    def step(self, block: Callable, eight_bits: bool, index, state):
        before, counted = state
        carry, rescued = block(self.layer(index, eight_bits), before)
        if self.skipped is not None:
            left_out = self.skipped[:, index, None, None]
            carry = jax.tree.map(lambda old, new: jnp.where(left_out, old, new), before, carry)
        return carry, counted if rescued is None else counted.at[index].add(rescued)


# ---------------------------------------------------------------- linear layers


@dataclass(frozen=True)
class Options:
    """What a linear layer fuses after array · weightᵀ + bias, and its layouts."""

    gelu: bool = False
    turn: Turn | None = None  # norm and RoPE of each head
    target: Target | None = None  # where the result goes
    residual: jax.Array | None = None  # added to the result
    gate: jax.Array | None = None  # multiplies the result before the residual: (batch, channels), or per token
    kernel: bool = False  # a Pallas kernel may compute it
    transpose_in: bool = False  # the attention kernel's layout of the input, or output: tokens minormost
    transpose_out: bool = False
    rows: slice = field(default_factory=lambda: slice(None))  # of a weight that is several layers' in one


def linear_of(forward: Forward) -> Callable:
    """How the blocks' linear layers are computed: (layer, name, array, options)."""
    linear = plain_linear
    if forward.precision.weights:
        linear = functools.partial(linear_in_eight_bits, linear, forward.precision.activations)
    if forward.products.kernel == "pallas":
        placed = Linear(forward.products, token_sharding(forward.mesh, forward.parallel))
        linear = functools.partial(linear_by_kernel, linear, placed)
    return functools.partial(linear_with_adapters, linear)


def linear_of_all_blocks(arrays: Mapping[str, jax.Array], stack: str, name: str, array, forward: Forward) -> jax.Array:
    """The linear layer of this name of every block at once, (batch, inputs) to (layers, batch, outputs). It is for
    modulations: a third of a model's weights, for a row of each prompt or video. Devices that share these or their
    tokens share the outputs, so that each reads its part of the weights only, whether it stores the others or not."""
    own = {kind: arrays.get(f"{stack}.*.{name}.{kind}") for kind in ("weight", "bias", DOWN, UP)}
    with jax.named_scope(name.replace(".", "/")):
        out = jnp.einsum("ba,lca->lbc", array, own["weight"])
        if own[DOWN] is not None:
            out = out + jnp.einsum("lba,lca->lbc", jnp.einsum("ba,lca->lbc", array, own[DOWN]), own[UP])
        out = out + own["bias"][:, None].astype(out.dtype)
        batch, tokens = token_sharding(forward.mesh, forward.parallel, len(array)).spec
        for axes in ((None, None, tuple(jax.tree.leaves((batch, tokens))) or None), (None, batch)):
            place = jax.sharding.NamedSharding(forward.mesh, jax.sharding.PartitionSpec(*axes))
            out = jax.lax.with_sharding_constraint(out, place)
        return out


def linear_with_adapters(inner: Callable, layer: Layer, name: str, array, options: Options):
    """The layer, with the adapters' factors beside its weight, if there are any. The weight plus up · down is made anew
    for each call, or up · down · array added to the result, whichever multiplies less: a video has far more tokens than
    a weight has rows. Quantized weights stay as they are."""
    if f"{name}.{DOWN}" not in layer:
        return inner(layer, name, array, options)
    if not layer.has_eight_bits(name) and sum_is_less(layer, name, array):
        return inner(replace(layer, adapted=name), name, array, options)
    out = inner(layer, name, array, replace(options, gelu=False, turn=None, residual=None, gate=None, target=None))
    pieces = layer.pieces(f"{name}.{DOWN}", array, Options())
    low = sum(jnp.einsum("...a,ba->...b", piece, part) for piece, part in pieces)
    return finish(out + jnp.einsum("...a,ba->...b", low, layer[f"{name}.{UP}"][options.rows]), options)


def sum_is_less(layer: Layer, name: str, array) -> bool:
    """Whether up · down has fewer products than both with every token."""
    _, outputs, inputs = layer.blocks.arrays[f"{name}.weight"].shape
    tokens = math.prod((array[0] if isinstance(array, tuple) else array).shape[:-1])
    return outputs * inputs < tokens * (outputs + inputs)


def plain_linear(layer: Layer, name: str, array, options: Options):
    pieces = layer.pieces(f"{name}.weight", array, options)
    out = sum(jnp.einsum("...a,ba->...b", piece, weight) for piece, weight in pieces)
    return finish(out + layer.bias(name, options.rows).astype(out.dtype), options)


def finish(out, options: Options):
    """Apply GELU, or norm and RoPE; gate and residual."""
    if options.gelu:
        out = jax.nn.gelu(out, approximate=True)
    if options.turn is not None:
        out = options.turn.plain(out)
    if options.target is not None:
        return options.target.put(out)
    if options.residual is None:
        return out
    out = out.astype(jnp.float32)
    added = out if options.gate is None else out * by_token(options.gate)
    return (options.residual.astype(jnp.float32) + added).astype(options.residual.dtype)


def by_token(rows):
    """(batch, channels) as (batch, 1, channels)."""
    return rows[:, None] if rows.ndim == 2 else rows


def linear_in_eight_bits(inner: Callable, activations: bool, layer: Layer, name: str, array, options: Options):
    """Quantized weights, and optionally activations, if the layer has them."""
    if not layer.has_eight_bits(name):
        return inner(layer, name, array, options)
    scale = layer[f"{name}.scale"][options.rows]
    first, *others = layer.pieces(f"{name}.quantized", array, options)
    out = quantized.linear(*first, scale, layer.bias(name, options.rows), activations)
    for piece, columns in others:
        out = out + quantized.linear(piece, columns, scale, jnp.float32(0), activations)
    return finish(out, options)


def linear_by_kernel(inner: Callable, product: Linear, layer: Layer, name: str, array, options: Options):
    """A Pallas kernel, in bf16 or with weights and activations quantized, if the options allow it."""
    # The kernel quantizes tokens of one array only.
    if not options.kernel or (isinstance(array, tuple) and layer.has_eight_bits(name)):
        return inner(layer, name, array, options)
    after = {step: getattr(options, step) for step in ("residual", "gate", "turn", "target")}
    # The kernel has no gate per token, and no heads other than of 128.
    apart = options.gate is not None and options.gate.ndim == 3
    apart |= options.turn is not None and options.turn.weight.size != LANES
    part, scale = f"{name}.weight", None
    if layer.has_eight_bits(name):
        part, scale = f"{name}.quantized", layer[f"{name}.scale"]
    # The kernel reads from the stack, since a slice would be a copy; not if the weight is gathered or summed.
    weight, index = (layer[part], None) if layer.blocks.gathered or layer.adapted else layer.stacked(part)
    out = product(
        array, weight, layer[f"{name}.bias"], index, scale, gelu=options.gelu, transpose_in=options.transpose_in,
        transpose_out=options.transpose_out, **({} if apart else after),
    )
    return finish(out, Options(**after)) if apart else out


# ---------------------------------------------------------------- norms


def norm_of(forward: Forward) -> Callable:
    """How the blocks' norms are computed: (array, scale, shift, epsilon); an RMS norm if shift is None."""
    if forward.products.kernel != "pallas":
        return plain_norm
    placed = Norm(forward.products, token_sharding(forward.mesh, forward.parallel))
    return functools.partial(norm_by_kernel, placed)


def plain_norm(array, scale, shift, epsilon):
    """Mean and variance in one pass, which XLA fuses with the producer."""
    wide = array.astype(jnp.float32)
    mean = 0 if shift is None else wide.mean(axis=-1, keepdims=True)
    variance = (wide * wide).mean(axis=-1, keepdims=True) - mean * mean
    variance = variance if shift is None else jnp.maximum(variance, 0)
    out = (wide - mean) * jax.lax.rsqrt(variance + epsilon) * by_token(scale)
    return (out if shift is None else out + by_token(shift)).astype(array.dtype)


def norm_by_kernel(norm: Norm, array, scale, shift, epsilon):
    """A Pallas kernel; XLA if scale and shift are per token, which the kernel does not support."""
    return (norm if scale.ndim == 2 else plain_norm)(array, scale, shift, epsilon)


# ---------------------------------------------------------------- tokens


def token_sharding(mesh, parallel, batch: int | None = None) -> jax.sharding.NamedSharding:
    """The sharding of (batch, tokens, channels) between blocks. A batch of one cannot be sharded, so its axis shards
    tokens too, if they are sharded."""
    axes = parallel.token_axes
    if batch == 1 and parallel.batch:
        spec = jax.sharding.PartitionSpec(None, (parallel.batch, *axes) if axes else None)
    else:
        spec = jax.sharding.PartitionSpec(parallel.batch, axes or None)
    return jax.sharding.NamedSharding(mesh, spec)


def pad_tokens(array, multiple: int):
    """Pad (batch, tokens, …) so that every device's shard fills whole tiles: with 18,900 tokens it would not, and XLA
    copies an array wherever its tiling shifts."""
    return jnp.pad(array, [(0, 0), (0, -array.shape[1] % multiple)] + [(0, 0)] * (array.ndim - 2))


def no_rows(layers: int, mesh, guarded: bool) -> jax.Array | None:
    """A zero counter of rescued rows (layers, devices); None if attention has no guard."""
    if not guarded:
        return None
    zeros = jnp.zeros((layers, math.prod(mesh.shape.values())), jnp.int32)
    # Sharded by device: reduced once after the last block, not after each.
    spec = jax.sharding.PartitionSpec(None, mesh.axis_names)
    return jax.lax.with_sharding_constraint(zeros, jax.sharding.NamedSharding(mesh, spec))
