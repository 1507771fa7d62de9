"""Sparse attention: every block of queries attends to a list of blocks of keys.

    blocks = Blocks.even(75_600, 128)                       # or Blocks.tiles((21, 45, 80), (4, 4, 4))
    chosen = top(scores, count)                             # (batch, heads, query blocks, count) int32
    out = listed(query, key, value, chosen, query_blocks, key_blocks, head_dim)

Two published kinds use it: SLA (TurboWan) adds a linear attention over all keys, VSA (FastWan) a coarse attention
between tiles. `listed` is the plain-JAX version; kernels/hopper.py and kernels/splash_lists.py compute the same.
"""
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from wan_torchax.kernels.splash import LOWEST

LINEAR_EPSILON = 1e-5  # SLA's, added to the linear branch's denominator


@dataclass(frozen=True)
class Blocks:
    """Consecutive runs of tokens, each of at most `size`. Tokens after the last run are padding."""

    sizes: tuple[int, ...]
    size: int

    @classmethod
    def even(cls, count: int, size: int) -> "Blocks":
        return cls(tuple(min(size, count - start) for start in range(0, count, size)), size)

    @classmethod
    def tiles(cls, grid: tuple[int, ...], tile: tuple[int, ...]) -> "Blocks":
        """One block per tile of a grid of tokens, in the order that `tile_order` puts them."""
        return cls(tuple(tile_sizes(grid, tile).ravel()[tile_sequence(grid, tile)].tolist()), prod(tile))

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *self.sizes[:-1]])

    def runs(self, array) -> list:
        """Consecutive blocks of equal size, each run (batch, blocks, size, width), of (batch, tokens, width)."""
        runs, start = [], 0
        for size, blocks in groupby(self.sizes):
            end = start + size * len(list(blocks))
            runs.append(array[:, start:end].reshape(array.shape[0], -1, size, array.shape[2]))
            start = end
        return runs

    def padded(self, array):
        """(batch, tokens, width) -> (batch, blocks, size, width), zeros after a block's tokens."""
        missing = [((0, 0), (0, 0), (0, self.size - run.shape[2]), (0, 0)) for run in self.runs(array)]
        return jnp.concatenate([jnp.pad(run, some) for run, some in zip(self.runs(array), missing)], axis=1)

    def unpadded(self, blocks, tokens: int):
        """The inverse of `padded`; tokens after the valid ones are zero."""
        runs, start = [], 0
        for size, some in groupby(self.sizes):
            end = start + len(list(some))
            runs.append(blocks[:, start:end, :size].reshape(blocks.shape[0], -1, blocks.shape[3]))
            start = end
        return jnp.pad(jnp.concatenate(runs, axis=1), ((0, 0), (0, tokens - sum(self.sizes)), (0, 0)))

    @property
    def valid(self) -> np.ndarray:
        """(blocks, size): which rows of padded blocks hold tokens."""
        return np.arange(self.size) < np.array(self.sizes)[:, None]

    def numbers(self, tokens: int) -> np.ndarray:
        """The block of each of `tokens` tokens; those after the valid ones count as the last block's."""
        numbers = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return np.pad(numbers, (0, tokens - len(numbers)), mode="edge")

    def means(self, array, head_dim: int, by_products: bool = False):
        """The mean of each block's tokens (batch, heads, blocks, head_dim), in float32. By products on a TPU, where XLA
        would first write a reduction's input to memory in float32, at twelve times the cycles."""
        mean = mean_by_product if by_products else partial(jnp.mean, axis=2, dtype=jnp.float32)
        means = jnp.concatenate([mean(run) for run in self.runs(array)], axis=1)
        return means.reshape(*means.shape[:2], -1, head_dim).swapaxes(1, 2)

    def shared(self, other: "Blocks"):
        """How many tokens each block shares with each of other blocks: (blocks, other's blocks) float32."""
        begins, ends = jnp.array(self.starts)[:, None], jnp.array(self.starts + self.sizes)[:, None]
        first, last = jnp.maximum(begins, other.starts), jnp.minimum(ends, other.starts + other.sizes)
        return jnp.maximum(last - first, 0).astype(jnp.float32)


def mean_by_product(run):
    """(batch, blocks, size, width) -> (batch, blocks, width): of up to four blocks in one product, since XLA makes that
    with a vector a reduction again."""
    batch, blocks, size, width = run.shape
    together = next(count for count in (4, 2, 1) if blocks % count == 0)
    members = jnp.array(np.kron(np.eye(together), np.ones(size)), run.dtype)
    groups = run.reshape(batch, -1, together * size, width)
    precision = lax.Precision.HIGHEST if run.dtype == jnp.float32 else None
    sums = jnp.einsum("ts,bgsw->bgtw", members, groups, preferred_element_type=jnp.float32, precision=precision)
    return sums.reshape(batch, blocks, width) / size


def tile_sizes(grid: tuple[int, ...], tile: tuple[int, ...]) -> np.ndarray:
    """The tokens of each tile of a grid; the last ones along an axis may be partial."""
    sides = [np.minimum(side, length - np.arange(0, length, side)) for length, side in zip(grid, tile)]
    return sides[0][:, None, None] * sides[1][:, None] * sides[2]


def tile_sequence(grid: tuple[int, ...], tile: tuple[int, ...]) -> np.ndarray:
    """The numbers of all tiles in the order in which kernels have them. Full tiles come first, so that even blocks of
    tokens hold whole tiles, and four that form a square of a frame follow each other."""
    sizes = tile_sizes(grid, tile)
    frame, row, column = (places.ravel() for places in np.indices(sizes.shape))
    return np.lexsort((column % 2, row % 2, column // 2, row // 2, frame, -sizes.ravel()))


def tile_order(grid: tuple[int, ...], tile: tuple[int, ...]) -> np.ndarray:
    """The tokens of a grid tile by tile, in a tile by frame, row and column: number i is the video's order[i]."""
    tiles, inside = zip(*(divmod(np.arange(length), side) for length, side in zip(grid, tile)))
    number = np.ravel_multi_index(np.meshgrid(*tiles, indexing="ij"), tile_sizes(grid, tile).shape)
    place = np.ravel_multi_index(np.meshgrid(*inside, indexing="ij"), tile)
    return np.lexsort((place.ravel(), np.argsort(tile_sequence(grid, tile))[number].ravel()))


def video_order(grid: tuple[int, ...], tile: tuple[int, ...]) -> np.ndarray:
    """The inverse of `tile_order`."""
    return np.argsort(tile_order(grid, tile))


# ---------------------------------------------------------------- which blocks


def top(scores, count: int):
    """The blocks with the `count` highest scores (…, blocks), highest first, of equal scores the first: (…, count).

    One sort of integers that hold a score's leading bits and its index; lax.top_k sorts pairs, which takes longer. Of
    1182 blocks' scores 21 bits remain, more than a bf16 product has.
    """
    blocks = scores.shape[-1]
    bits = max(blocks - 1, 1).bit_length()
    ordered = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    ordered = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    packed = (ordered >> bits << bits) | (blocks - 1 - jnp.arange(blocks, dtype=jnp.int32))
    highest = lax.sort(packed, dimension=packed.ndim - 1, is_stable=False)[..., ::-1][..., :count]
    return blocks - 1 - (highest & ((1 << bits) - 1))


def sla_scores(query, key, query_blocks: Blocks, key_blocks: Blocks, head_dim: int):
    """SLA's scores (batch, heads, query blocks, key blocks): products of the blocks' means, of keys less their mean."""
    means = query_blocks.means(query, head_dim), key_blocks.means(key, head_dim)
    return scores_of_means(*means, key_blocks, query.dtype)


def scores_of_means(query_means, key_means, key_blocks: Blocks, dtype):
    # The mean of all keys from the blocks': subtracted from every key, it would take one more pass over them.
    shares = np.array(key_blocks.sizes, np.float32)[:, None] / sum(key_blocks.sizes)
    key_means = key_means - (key_means * shares).sum(axis=2, keepdims=True)
    means = query_means.astype(dtype), key_means.astype(dtype)
    return jnp.einsum("bhqd,bhkd->bhqk", *means, preferred_element_type=jnp.float32)


def vsa_shares(scores, tiles: Blocks, query_blocks: Blocks, key_blocks: Blocks):
    """How much of the coarse attention between tiles falls to each pair of blocks of their tokens (batch, heads, query
    blocks, key blocks), from its scores (batch, heads, tiles, tiles)."""
    weights = jax.nn.softmax(scores, axis=-1)
    parts = tiles.shared(key_blocks) / np.array(tiles.sizes, np.float32)[:, None]
    return jnp.einsum("bhqk,qm,kn->bhmn", weights, tiles.shared(query_blocks), parts)


def ordered(chosen, key_blocks: Blocks, entries: int):
    """Lists as kernels read them: in steps of `entries` blocks, filled up with the number after the last block; and if
    the last block, which may be partial, is among them, at the end. Only the last step can then have invalid keys."""
    last, fill = len(key_blocks.sizes) - 1, -chosen.shape[-1] % entries
    is_last, end = chosen == last, chosen[..., -1:]
    chosen = jnp.where(is_last, end, chosen).at[..., -1:].set(jnp.where(is_last.any(-1, keepdims=True), last, end))
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, fill)), constant_values=last + 1)


# ---------------------------------------------------------------- branches beside the lists


class Linear(NamedTuple):
    """What SLA's linear attention knows of all keys."""

    sums: jax.Array  # (batch, heads, head_dim, head_dim): of the keys' features times their values, projected
    total: jax.Array  # (batch, heads, head_dim) float32: of the keys' features
    bias: jax.Array  # (head_dim,), of the projection

    @classmethod
    def of(cls, sums, total, weight, bias, dtype) -> "Linear":
        """The projection `weight` (head_dim, head_dim), which all heads share, is applied to the sums: that costs
        nothing, and every token's output would."""
        sums = jnp.einsum("bhde,fe->bhdf", sums, weight.astype(jnp.float32))
        return cls(sums.astype(dtype), total, bias)


def linear_branch(query, key, value, keys: int, weight, bias, head_dim: int):
    """SLA's linear attention over all keys, with features softmax over a head's channels."""
    query, key, value = (array.reshape(*array.shape[:2], -1, head_dim) for array in (query, key, value))
    features, key_features = (jax.nn.softmax(array.astype(jnp.float32), axis=-1) for array in (query, key))
    valid = (jnp.arange(key.shape[1]) < keys)[:, None, None]
    key_features, features = jnp.where(valid, key_features, 0).astype(key.dtype), features.astype(query.dtype)
    # Without the barrier XLA keeps them in float32 as well, which on a GPU is twice the memory traffic.
    key_features, features = lax.optimization_barrier((key_features, features))
    sums = jnp.einsum("bkhd,bkhe->bhde", key_features, value, preferred_element_type=jnp.float32)
    linear = Linear.of(sums, key_features.sum(axis=1, dtype=jnp.float32), weight, bias, query.dtype)
    # In bf16: in float32 it is the most memory of all. Asked for by token, XLA would have the tokens minormost.
    above = jnp.einsum("bqhd,bhdf->bhqf", features, linear.sums).swapaxes(1, 2)
    below = (features * linear.total[:, None]).sum(axis=-1, keepdims=True) + LINEAR_EPSILON
    return (above / below + bias).reshape(*query.shape[:2], -1)


def coarse_branch(query, key, value, blocks: Blocks, head_dim: int, by_products: bool = False):
    """VSA's attention between the tiles' means: scores (batch, heads, tiles, tiles) and outputs (batch, tiles,
    width)."""
    queries, keys, values = (
        blocks.means(array, head_dim, by_products).astype(array.dtype) for array in (query, key, value)
    )
    scores = jnp.einsum("bhqd,bhkd->bhqk", queries, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    # Asked for by tile, XLA would have the tiles minormost, and adding them to tokens reads against that.
    out = jnp.einsum("bhqk,bhkd->bhqd", weights, values, preferred_element_type=jnp.float32).swapaxes(1, 2)
    return scores, out.reshape(*out.shape[:2], -1).astype(query.dtype)


# ---------------------------------------------------------------- attention over lists


def listed(query, key, value, chosen, query_blocks: Blocks, key_blocks: Blocks, head_dim: int):
    """Softmax attention of each block of queries to its chosen blocks of keys, one block of queries at a time."""
    heads = query.shape[2] // head_dim

    def by_head(blocks, array):
        """(batch, tokens, width) -> (batch, heads, blocks, size, head_dim)"""
        padded = blocks.padded(array)
        return jnp.moveaxis(padded.reshape(*padded.shape[:3], heads, head_dim), 3, 1)

    queries, keys, values = by_head(query_blocks, query), by_head(key_blocks, key), by_head(key_blocks, value)
    valid = jnp.asarray(key_blocks.valid)

    def one_block(inputs):
        rows, numbers = inputs  # (batch, heads, size, head_dim), (batch, heads, count)
        own = [jnp.take_along_axis(array, numbers[..., None, None], axis=2) for array in (keys, values)]
        scores = jnp.einsum("bhqd,bhnkd->bhqnk", rows, own[0], preferred_element_type=jnp.float32) * head_dim**-0.5
        scores = jnp.where(valid[numbers][:, :, None], scores, LOWEST)
        weights = jax.nn.softmax(scores, axis=(-2, -1)).astype(value.dtype)
        return jnp.einsum("bhqnk,bhnkd->bhqd", weights, own[1], preferred_element_type=jnp.float32)

    out = lax.map(one_block, (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(chosen, 2, 0)))
    out = out.transpose(1, 0, 3, 2, 4)  # (batch, blocks, size, heads, head_dim)
    out = out.reshape(*out.shape[:3], -1).astype(query.dtype)
    return query_blocks.unpadded(out, query.shape[1])
