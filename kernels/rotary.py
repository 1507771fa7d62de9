"""RoPE on (batch, tokens, heads * head_dim): neighbouring lanes 2i and 2i + 1 rotate by their token's i-th angle.

On TPU this is a separate pass, because XLA finds no layout in which pairs are cheap: reshaped to (…, 2) or rolled, it
copies queries and keys several times. For 75,600 tokens of 10 heads on v6e that is 9.4 M cycles by the compiler's
estimate, and 0.3 M bundles here. Tables are diffusers': (tokens, head_dim) float32, with each pair's cosine or sine
repeated. A block has whole rows, so the RMS norm before RoPE can be fused: in XLA it takes two more passes. A norm per
head can also be fused with the linear layer before it, and RoPE with it: `Turn`.
"""
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_torchax.kernels.parallel import cut_heads

LANES = 128
ROWS = 256  # tokens of a block: a few MiB even for 40 heads


class Turn(NamedTuple):
    """An RMS norm of each head, and RoPE."""

    weight: jax.Array  # of the norm (head_dim,)
    cosine: jax.Array  # (tokens, head_dim)
    sine: jax.Array
    epsilon: float

    def plain(self, array):
        return rotate_plain(array, self.cosine, self.sine, (self.weight, self.epsilon))


def rotate(array, cosine, sine, head_dim, kernel, parts=1, norm=None):
    """Rotate every head of one device's tokens, in float32, rounded once; returns (parts, batch, tokens, width /
    parts). With `norm`, (weights, epsilon), an RMS norm is applied first: over all heads if the weights are (width,),
    per head if they are (head_dim,)."""
    if kernel.kernel != "splash" or array.shape[2] % (LANES * parts):
        return cut_heads(rotate_plain(array, cosine, sine, norm), parts)
    widths = [array.shape[2] // parts]
    return rotate_lanes((array,), cosine, sine, head_dim, kernel, parts, widths, (norm,))[0]


def rotate_both(query, key, tables, head_dim, kernel, parts, sizes, norms=(None, None)):
    """Queries and keys in one array for each group of heads, of the given sizes, of every part: (parts, batch, tokens,
    twice the group's width), queries first. `tables` are cosines and sines, or () for no rotation."""
    widths = [size * head_dim for size in sizes]
    if kernel.kernel == "splash" and tables and not any(width % LANES for width in widths):
        return rotate_lanes((query, key), *tables, head_dim, kernel, parts, widths, norms)
    pair = [rotate_plain(array, *tables, norm) if tables else array for array, norm in zip((query, key), norms)]
    ends = list(accumulate(widths))[:-1]
    pair = [jnp.split(cut_heads(array, parts), ends, axis=3) for array in pair]
    return [jnp.concatenate(group, axis=3) for group in zip(*pair)]


def rotate_plain(array, cosine, sine, norm=None):
    """Each lane times its cosine, plus its neighbour times its signed sine: elementwise, one pass in XLA."""
    batch, tokens, width = array.shape
    wide = array.astype(jnp.float32)
    if norm is not None:
        wide = normalized(wide, *norm).reshape(array.shape)
    wide = wide.reshape(batch, tokens, -1, cosine.shape[1] // 2, 2)
    cosine, sine = (table.reshape(tokens, 1, -1, 2) for table in (cosine, sine))
    return (wide * cosine + wide[..., ::-1] * sine * jnp.float32([-1, 1])).reshape(array.shape).astype(array.dtype)


def normalized(wide, weight, epsilon):
    """RMS norm over groups of `weight.size` lanes."""
    rows = wide.reshape(*wide.shape[:2], -1, weight.size)
    return rows * lax.rsqrt((rows * rows).mean(axis=-1, keepdims=True) + epsilon) * weight.astype(jnp.float32)


def rotate_lanes(arrays, cosine, sine, head_dim, kernel, parts, widths, norms):
    """The Pallas kernel: the same for some arrays, written directly to the parts of groups, each of `widths` lanes of
    every array."""
    batch, tokens, width = arrays[0].shape
    sine = signed(sine)
    cosine, sine = (jnp.concatenate([table] * (LANES // head_dim), axis=1) for table in (cosine, sine))
    rows = min(ROWS, pl.cdiv(tokens, 16) * 16)
    block = pl.BlockSpec((None, rows, width), lambda b, i: (b, i, 0))
    table = pl.BlockSpec((rows, LANES), lambda b, i: (i, 0))
    weights, epsilon, by_head = [], None, 0
    if norms[0] is not None:
        by_head = head_dim if norms[0][0].size != width else 0
        weights = [jnp.tile(norm[0].astype(jnp.float32), width // norm[0].size)[None] for norm in norms]
        epsilon = norms[0][1]
    widths = [len(arrays) * one for one in widths]
    return pl.pallas_call(
        partial(rotary_kernel, epsilon=epsilon, by_head=by_head),
        grid=(batch, pl.cdiv(tokens, rows)),
        in_specs=[
            [block] * len(arrays), table, table, [pl.BlockSpec((1, width), lambda b, i: (0, 0)) for _ in weights]
        ],
        out_specs=[pl.BlockSpec((parts, None, rows, one), lambda b, i: (0, b, i, 0)) for one in widths],
        out_shape=[jax.ShapeDtypeStruct((parts, batch, tokens, one), arrays[0].dtype) for one in widths],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=kernel.vmem_mib * 2**20
        ),
        interpret=kernel.interpret,
        name="rotary_kernel",
    )(list(arrays), cosine, sine, weights)


def signed(sine):
    """With the signs that neighbours have in a rotation."""
    return jnp.where(jnp.arange(sine.shape[1]) % 2 == 0, -sine, sine)


def rotary_kernel(arrays, cosine, sine, weights, *groups, epsilon=None, by_head=0):
    """arrays (rows, width)   cosine, sine (rows, 128)   weights (1, width), of each array, or none
    groups (parts, rows, their width of every array)

    by_head: 0, or how many lanes each norm is over."""
    lane = lax.broadcasted_iota(jnp.int32, cosine.shape, 1)
    width = arrays[0].shape[1]
    for number, array in enumerate(arrays):
        if weights and not by_head:
            squares = sum(array[:, begin:begin + LANES].astype(jnp.float32)**2 for begin in range(0, width, LANES))
            scale = lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / width + epsilon)
        for begin, (rotated, part, place) in zip(range(0, width, LANES), targets(groups, number, len(arrays))):
            lanes = array[:, begin:begin + LANES].astype(jnp.float32)
            if by_head:
                scale = scale_by_head(lanes, lane, by_head, epsilon)
            if weights:
                lanes = lanes * scale * weights[number][:, begin:begin + LANES]
            lanes = rotate_pairs(lanes, lane, cosine[...], sine[...])
            rotated[part, :, place:place + LANES] = lanes.astype(rotated.dtype)


def rotate_pairs(lanes, lane, cosine, sine):
    """128 lanes, of these numbers; sine is signed."""
    neighbours = jnp.where(lane % 2 == 0, pltpu.roll(lanes, LANES - 1, 1), pltpu.roll(lanes, 1, 1))
    return lanes * cosine + neighbours * sine


def targets(groups, number, arrays):
    """Where the lanes of an array go, in order: (group, part, first lane), 128 at a time."""
    for part in range(groups[0].shape[0]):
        for group in groups:
            width = group.shape[2] // arrays
            yield from ((group, part, place) for place in range(number * width, (number + 1) * width, LANES))


def scale_by_head(lanes, lane, head_dim, epsilon):
    """The RMS norm's factor for each lane, per head; 128 lanes have one or two heads."""
    squares = lanes * lanes
    if head_dim == LANES:
        return lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / head_dim + epsilon)
    sums = [jnp.sum(jnp.where(lane // head_dim == head, squares, 0), axis=1, keepdims=True) for head in range(2)]
    return lax.rsqrt(jnp.where(lane < head_dim, *sums) / head_dim + epsilon)
