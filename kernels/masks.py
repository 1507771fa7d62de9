"""Lists of key blocks for models that were not trained for them: known before the run, or chosen by a few rows.

    chosen = radial(grid, query_blocks, key_blocks, count)                              # (query blocks, count) int32
    chosen = banded(query, key, value, grid, query_blocks, key_blocks, count, head_dim)    # (batch, heads, …)

A list names the `count` blocks that are nearest by some distance between the middles of blocks; tokens lie frame by
frame. Every query sees its own block and the first frame. Radial attention's distance grows with that between frames.
Sparse-VideoGen has two: tokens near in a frame and its neighbours, or near in place in all frames. Each head takes the
one whose output is nearer to that of all keys, for some rows.
"""
import jax
import jax.numpy as jnp
import numpy as np

from wan_torchax.kernels.sparse import Blocks
from wan_torchax.kernels.splash import LOWEST

NEAR = 128  # tokens: Radial attention's narrowest window, in frames that are far away
PROBED = 64  # rows


def nearest(distances, grid, query_blocks: Blocks, key_blocks: Blocks, count: int) -> np.ndarray:
    """The `count` blocks of the smallest of `distances`, a function of the queries' frames and places in them and the
    keys': the own block first, then the first frame's; of equal ones those whose tokens are nearer."""
    tokens, middles = grid[1] * grid[2], [x.starts + np.array(x.sizes) // 2 for x in (query_blocks, key_blocks)]
    between = abs(middles[0][:, None] - middles[1])
    of_frames = distances(*np.divmod(middles[0], tokens), *np.divmod(middles[1], tokens))
    own, first = between < max(query_blocks.size, key_blocks.size) / 2, key_blocks.starts < tokens
    ranks = np.where(own, -2, np.where(first, -1, of_frames))
    return np.lexsort((between, ranks))[:, :count].astype(np.int32)


def radial(grid, query_blocks: Blocks, key_blocks: Blocks, count: int) -> np.ndarray:
    """By Radial attention: the own frame, half of its neighbours, and of frames at a distance a window of places that
    halves whenever the distance doubles."""
    tokens = grid[1] * grid[2]

    def distances(frame, place, other_frame, other_place):
        apart, away = abs(frame[:, None] - other_frame), abs(place[:, None] - other_place)
        halvings = np.ceil(np.log2(apart + 1))  # the number of the distance's bits
        beyond = np.maximum(away - NEAR, 0) / 2.0 ** (int(tokens).bit_length() - halvings)
        return np.where((apart == 0) | (apart == 1) & (away <= tokens // 2), 0, beyond)

    return nearest(distances, grid, query_blocks, key_blocks, count)


def spatial(grid, query_blocks: Blocks, key_blocks: Blocks, count: int) -> np.ndarray:
    """By distance in the order of tokens: the own frame and its neighbours."""

    def distances(frame, place, other_frame, other_place):
        return np.zeros((len(frame), len(other_frame)))  # nearer tokens come first

    return nearest(distances, grid, query_blocks, key_blocks, count)


def temporal(grid, query_blocks: Blocks, key_blocks: Blocks, count: int) -> np.ndarray:
    """By distance of places in a frame, in all frames alike."""

    def distances(frame, place, other_frame, other_place):
        return abs(place[:, None] - other_place)

    return nearest(distances, grid, query_blocks, key_blocks, count)


def banded(query, key, value, grid, query_blocks: Blocks, key_blocks: Blocks, count: int, head_dim: int):
    """Spatial or temporal lists for every head: those with the smaller error of `PROBED` rows."""
    choices = [make(grid, query_blocks, key_blocks, count) for make in (spatial, temporal)]
    tokens = sum(key_blocks.sizes)
    rows = np.linspace(0, tokens - 1, min(PROBED, tokens)).astype(np.int32)
    seen = [np.zeros((len(rows), len(key_blocks.sizes)), bool) for _ in choices]
    for mask, lists in zip(seen, choices):
        np.put_along_axis(mask, lists[query_blocks.numbers(tokens)[rows]], True, axis=1)
    heads = [array.reshape(*array.shape[:2], -1, head_dim) for array in (query[:, rows], key[:, :tokens], value)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *heads[:2], preferred_element_type=jnp.float32) * head_dim**-0.5

    def out(scores):
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        return jnp.einsum("bhqk,bkhd->bhqd", weights, heads[2][:, :tokens], preferred_element_type=jnp.float32)

    blocks, exact = key_blocks.numbers(tokens), out(scores)
    errors = [jnp.square(out(jnp.where(jnp.array(mask)[:, blocks], scores, LOWEST)) - exact).sum((-2, -1))
              for mask in seen]
    return jnp.where((errors[1] < errors[0])[..., None, None], choices[1], choices[0])
