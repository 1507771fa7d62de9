"""Sparse attention: every block of queries attends to a list of blocks of keys.

    blocks = Blocks.even(75_600, 128)                       # or Blocks.tiles((21, 45, 80), (4, 4, 4))
    chosen = top(scores, count)                             # (batch, heads, query blocks, count) int32
    out = listed(query, key, value, chosen, query_blocks, key_blocks, head_dim)

Two published kinds use it: SLA (TurboWan) adds a linear attention over all keys, VSA (FastWan) a coarse attention
between tiles. `listed` is the plain-JAX version; kernels/hopper.py and kernels/splash_lists.py compute the same.
"""
from dataclasses import dataclass
from math import ceil, prod
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
        sides = [[min(side, length - start) for start in range(0, length, side)] for length, side in zip(grid, tile)]
        return cls(tuple(t * h * w for t in sides[0] for h in sides[1] for w in sides[2]), prod(tile))

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *self.sizes[:-1]])

    @property
    def is_even(self) -> bool:
        """Whether all blocks but the last are full, so that padding needs no gather."""
        return all(size == self.size for size in self.sizes[:-1])

    def padded(self, array):
        """(batch, tokens, width) -> (batch, blocks, size, width), zeros after a block's tokens."""
        count = sum(self.sizes)
        if self.is_even:
            array = jnp.pad(array[:, :count], ((0, 0), (0, len(self.sizes) * self.size - count), (0, 0)))
            return array.reshape(array.shape[0], -1, self.size, array.shape[2])
        places = self.starts[:, None] + np.arange(self.size)
        return jnp.where(self.valid[..., None], array[:, np.minimum(places, count - 1)], 0)

    def unpadded(self, blocks, tokens: int):
        """The inverse of `padded`; tokens after the valid ones are zero."""
        batch, _, _, width = blocks.shape
        flat, count = blocks.reshape(batch, -1, width), sum(self.sizes)
        flat = flat[:, :count] if self.is_even else flat[:, np.flatnonzero(self.valid)]
        return jnp.pad(flat, ((0, 0), (0, tokens - count), (0, 0)))

    @property
    def valid(self) -> np.ndarray:
        """(blocks, size): which rows of padded blocks hold tokens."""
        return np.arange(self.size) < np.array(self.sizes)[:, None]

    def numbers(self, tokens: int) -> np.ndarray:
        """The block of each of `tokens` tokens; those after the valid ones count as the last block's."""
        numbers = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return np.pad(numbers, (0, tokens - len(numbers)), mode="edge")

    def means(self, array, head_dim: int):
        """The mean of each block's tokens (batch, heads, blocks, head_dim), in float32."""
        means = self.padded(array).sum(axis=2, dtype=jnp.float32) / np.array(self.sizes, np.float32)[:, None]
        return means.reshape(*means.shape[:2], -1, head_dim).swapaxes(1, 2)


def tile_order(grid: tuple[int, ...], tile: tuple[int, ...]) -> np.ndarray:
    """The tokens of a grid tile by tile, both in (frame, row, column) order: number i is the video's order[i]."""
    tiles, inside = zip(*(divmod(np.arange(length), side) for length, side in zip(grid, tile)))
    counts = [ceil(length / side) for length, side in zip(grid, tile)]
    number = np.ravel_multi_index(np.meshgrid(*tiles, indexing="ij"), counts)
    place = np.ravel_multi_index(np.meshgrid(*inside, indexing="ij"), tile)
    return np.lexsort((place.ravel(), number.ravel()))


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
    sums = jnp.einsum("bkhd,bkhe->bhde", key_features, value, preferred_element_type=jnp.float32)
    linear = Linear.of(sums, key_features.sum(axis=1, dtype=jnp.float32), weight, bias, query.dtype)
    above = jnp.einsum("bqhd,bhdf->bqhf", features, linear.sums)  # in bf16: in float32 it is the most memory of all
    below = (features * linear.total[:, None]).sum(axis=-1, keepdims=True) + LINEAR_EPSILON
    return (above / below + bias).reshape(*query.shape[:2], -1)


def coarse_branch(query, key, value, blocks: Blocks, head_dim: int):
    """VSA's attention between the tiles' means: scores (batch, heads, tiles, tiles) and outputs (batch, tiles,
    width)."""
    queries, keys, values = (blocks.means(array, head_dim).astype(array.dtype) for array in (query, key, value))
    scores = jnp.einsum("bhqd,bhkd->bhqk", queries, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum("bhqk,bhkd->bqhd", weights, values, preferred_element_type=jnp.float32)
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
