"""Attention as configured: selects the kernel and the sharding.

    attend = Attend(head_dim, kernel, parallel, mesh)
    out = attend(query, key, value)                     # all (batch, tokens, heads * head_dim)
    out, rescued = attend.counted(query, key, value)    # and how many rows the kernel's guard recomputed

It runs inside `jax.jit`. A kernel sees only the tokens and heads of its own device. Besides its output it returns the
log-sum-exp of every score row, which suffices to merge two partial results, and the number of rows it recomputed.
"""
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from wan_torchax import private
from wan_torchax.kernels import masks, sparse, splash, splash_lists
from wan_torchax.kernels import parallel as schemes
from wan_torchax.kernels.rotary import normalized, rotate, rotate_both
from wan_torchax.kernels.settings import TILE, Kernel, Parallel

MASKED = splash.LOWEST  # finite: a row masked so far must not become inf - inf
ALONE, WHOLE = Parallel(), schemes.Place()  # one device, which has all tokens
NONE = np.int32(0)  # rescued rows of a kernel without a guard


class Beside(NamedTuple):
    """Extra tokens besides the sharded ones: few, replicated on every device, without RoPE (a prompt's tokens in joint
    attention). They attend to all tokens, and all tokens attend to the valid ones among them."""

    query: jax.Array  # (batch, tokens, heads * head_dim), like the next two
    key: jax.Array
    value: jax.Array
    count: jax.Array  # (batch,) int32: how many of the keys are valid; the others must be finite


class OfFrames(NamedTuple):
    """Keys and values of another video, of which the tokens of a latent frame attend to those of one latent frame only:
    the first frame's to none, the second frame's to those of the other video's first, and so on."""

    key: jax.Array  # (layers, 1, tokens, heads * head_dim), after RoPE, placed like `Kept`
    value: jax.Array
    layer: jax.Array  # whose attention it is


class Kept(NamedTuple):
    """Keys and values of a video that is made chunk by chunk, in slots of tokens that later chunks overwrite: see
    `Attend.chunk`. Of each layer the first `Attend.fillings[filling]` tokens are valid."""

    key: jax.Array  # (layers, batch, tokens, heads * head_dim): after RoPE, or before it if `rotary` is given
    value: jax.Array  # likewise, or with tokens last: kernels.settings.Kernel.turns_values
    layer: jax.Array  # whose attention it is
    start: jax.Array  # the first token of the chunk's slot
    filling: jax.Array
    rotary: tuple = ()  # cosines and sines (tokens, head_dim) of all slots


@dataclass(frozen=True)
class Attend:
    """softmax(query · keyᵀ / sqrt(head_dim)) · value per head."""

    head_dim: int
    kernel: Kernel
    parallel: Parallel = ALONE
    mesh: jax.sharding.Mesh | None = None  # None: one device
    cross: bool = False  # cross-attention: the keys are few and replicated, so no communication is needed
    keys: int | None = None  # how many of the keys are valid, the rest being padding; None: all
    norm_epsilon: float | None = None  # of the QK norms
    grid: tuple[int, int, int] | None = None  # frames, height and width of a video's tokens
    fillings: tuple[int, ...] = ()  # how many kept tokens there can be, the chunk's included

    def __call__(self, query, key, value, rotary=(), norms=()):
        """`norms`, weights of the RMS norms of queries and keys, are applied first: over all heads if they are
        (width,), per head if they are (head_dim,). Then RoPE with `rotary`, cosines and sines as (tokens, head_dim)
        float32."""
        return self.counted(query, key, value, rotary, norms)[0]

    def counted(
        self, query, key, value, rotary=(), norms=(), beside: Beside | None = None, branch=(),
        others: OfFrames | None = None, in_pieces=False,
    ):
        """Attention, and the number of rescued rows per device, (devices,) int32; None if the kernel has no guard. With
        `beside`, the output is a pair: for the tokens and for the extra tokens; with VSA: of the lists and, per tile,
        of the coarse branch. `branch` is the weight and bias of SLA's linear branch, or whether lists that need no
        training are left aside; `others` are attended to besides the tokens themselves. The output may be parallel's
        `Pieces` if that is asked for."""
        keys = self.keys or key.shape[1]
        if norms and not self.joins_norms(norms):
            query, key = (self.normalized(array, weight) for array, weight in zip((query, key), norms))
            norms = ()
        if self.mesh is not None:
            arrays, more = (query, key, value), (beside, branch, others, in_pieces)
            out, rescued = schemes.spread(self, arrays, rotary, norms, keys, *more)
        else:
            query, key = self.prepare(query, key, rotary, norms, keys)
            out, rescued = self.both(query[0], key[0], value, keys, beside, branch, others)
            rescued = rescued[None]
        return out, rescued if self.kernel.kernel in GUARDED else None

    def chunk(self, query, key, value, rotary, norms, kept: Kept):
        """Like counted, for the tokens of one chunk, which attend to each other and to those of earlier chunks: (out,
        rescued, kept with the chunk's keys and values in its slot)."""
        if norms and (kept.rotary or not self.joins_norms(norms)):
            query, key = (self.normalized(array, weight) for array, weight in zip((query, key), norms))
            norms = ()
        out, rescued, kept = schemes.spread_chunk(self, (query, key, value), rotary, norms, kept)
        return out, rescued if self.kernel.kernel in GUARDED else None, kept

    def to_kept(self, query, key, value, kept: Kept):
        """(out, rescued, kept) on one device. Each number of valid tokens has its own branch: kernels take a fixed one,
        and nothing is computed for slots that are still empty."""
        key, value = (array[None, :, : self.keys].astype(kept.key.dtype) for array in (key, value))
        upright, lying = (kept.layer, 0, kept.start, 0), (kept.layer, 0, 0, kept.start)
        value, place = (value.swapaxes(2, 3), lying) if self.kernel.turns_values else (value, upright)
        kept = kept._replace(
            key=lax.dynamic_update_slice(kept.key, key, upright),
            value=lax.dynamic_update_slice(kept.value, value, place),
        )
        choices = [partial(self.to_valid, count) for count in self.fillings]
        return *lax.switch(kept.filling, choices, query, kept), kept

    def to_valid(self, count, query, kept: Kept):
        """(out, rescued) of attention to the first `count` kept tokens of a layer."""
        key, value = (
            lax.dynamic_index_in_dim(stack, kept.layer, keepdims=False) for stack in (kept.key, kept.value)
        )
        key, value = key[:, :count], value[..., :count].swapaxes(1, 2) if self.kernel.turns_values else value[:, :count]
        if kept.rotary:
            key = self.rotated(key, [table[:count] for table in kept.rotary], 1, None)[0]
        out, _, rescued = self.local(query, key, value, count)
        return out, jnp.asarray(rescued, jnp.int32)

    def joins_norms(self, norms) -> bool:
        """Whether norms are fused with RoPE: if a kernel does both in one pass, and a device has all heads that a norm
        spans."""
        spread = self.mesh is not None and self.parallel.heads and norms[0].size != self.head_dim
        return self.kernel.kernel == "splash" and not spread

    def prepare(self, query, key, rotary, norms, keys, place=WHOLE):
        """Norms, RoPE and smoothing on one device's tokens; the heads split into `place.parts`."""
        with jax.named_scope("rope"):
            pairs = zip((query, key), norms or (None, None))
            query, key = (self.rotated(array, rotary, place.parts, weight) for array, weight in pairs)
        if self.kernel.smooth_keys:
            real = place.first + jnp.arange(key.shape[2]) < keys
            total = jnp.sum(jnp.where(real[:, None], key, 0), axis=2, keepdims=True, dtype=jnp.float32)
            key = key - (lax.psum(total, place.axes) / keys).astype(key.dtype)
        return query, key

    def takes_one_array(self, keys) -> bool:
        """Whether queries and keys may be the same array, which has the heads of both."""
        return self.name(keys) == "splash" and self.kernel.sparse.kind in ("none", "sla")

    def takes_parts(self, parts, tokens, keys) -> bool:
        """Whether `of_parts` serves values in parts of so many tokens."""
        dense = self.name(keys) == "splash" and not self.kernel.sparse and self.kernel.window is None
        return dense and splash.takes_parts(parts, tokens, self.head_dim, self.kernel)

    def of_parts(self, query, key, parts, first, width, keys, pieces):
        """(out with tokens last, rescued) of attention to some heads of values in parts: splash.Values."""
        values = splash.Values(parts, first, width)
        out_t, _, rescued = splash.attention(query, key, values, keys, self.head_dim, self.kernel, pieces=pieces)
        return out_t, rescued

    def rotated_together(self, query, key, rotary, norms, parts, sizes):
        """Queries and keys after norms and RoPE, as rotary.rotate_both returns them."""
        norms = [weight if weight is None else (weight, self.norm_epsilon) for weight in norms or (None, None)]
        return rotate_both(query, key, rotary, self.head_dim, self.kernel, parts, sizes, norms)

    def normalized(self, array, weight):
        wide = normalized(array.astype(jnp.float32), weight, self.norm_epsilon)
        return wide.reshape(array.shape).astype(array.dtype)

    def rotated(self, array, rotary, parts, weight):
        if not rotary:
            return schemes.cut_heads(array, parts)
        norm = None if weight is None else (weight, self.norm_epsilon)
        return rotate(array, *rotary, self.head_dim, self.kernel, parts, norm)

    def gives_pair(self, beside: Beside | None) -> bool:
        """Whether the output is a pair, the second of it replicated where tokens are sharded."""
        return beside is not None or self.kernel.sparse.kind == "vsa"

    def both(self, query, key, value, keys, beside, branch=(), others=None):
        """(out, rescued) on one device; with `beside`, ((out, out for the extra tokens), rescued)."""
        if self.kernel.sparse:
            # Read by lists, by what chooses them and by a branch: XLA would apply RoPE again for each.
            query, key = lax.optimization_barrier((query, key))
            return SPARSE[self.kernel.sparse.kind](self, query, key, value, keys, *branch)
        if others is not None:
            before, first = self.to_frames(query, others)
            out, _, rescued = self.go_on(before, query, key, value, keys, query.dtype)
            return out, first + rescued
        if beside is None:
            out, _, rescued = self.local(query, key, value, keys)
            return out, rescued
        outs, total = [], NONE
        for one in (query, beside.query):
            before, first = self.start(one, beside)
            out, _, rescued = self.go_on(before, one, key, value, keys, query.dtype)
            outs, total = [*outs, out], total + first + rescued
        return tuple(outs), total

    def to_frames(self, query, others: OfFrames):
        """((out, log_sum), rescued) over another video's keys, as a start for the tokens' own keys. Frames are rows of
        a batch, so that no score is computed in vain and none is masked."""
        (batch, tokens, width), (frames, height, columns) = query.shape, self.grid
        size = height * columns
        after = tokens - frames * size  # padding

        def rows(stack):
            array = lax.dynamic_index_in_dim(stack, others.layer, keepdims=False).reshape(frames - 1, size, width)
            return jnp.tile(array, (batch, 1, 1))

        own = query[:, size : frames * size].reshape(-1, size, width)
        out, log_sum, rescued = self.local(own, rows(others.key), rows(others.value), size)
        out = out.astype(jnp.float32).reshape(batch, -1, width)
        log_sum = log_sum.reshape(batch, frames - 1, -1, size).swapaxes(1, 2).reshape(batch, -1, (frames - 1) * size)
        out = jnp.pad(out, ((0, 0), (size, after), (0, 0)))
        return (out, jnp.pad(log_sum, ((0, 0), (0, 0), (size, after)), constant_values=MASKED)), rescued

    def start(self, query, beside: Beside):
        """((out, log_sum), rescued) over the extra keys, as a start for the tokens' own keys."""
        if self.kernel.kernel in ("hopper", "cudnn"):
            result = cudnn_counted(query, beside.key, beside.value, beside.count, self.head_dim, self.kernel)
        elif self.name(beside.key.shape[1]) == "xla":
            result = xla(query, beside.key, beside.value, beside.count, self.head_dim, self.kernel)
        else:
            result = self.counted_by_mean(query, *beside[1:])
        out, log_sum, rescued = result
        return (out.astype(jnp.float32), log_sum), rescued

    def counted_by_mean(self, query, key, value, count):
        """Like local, for a number of valid keys per row of the batch that is known only at run time.

        Kernels take a fixed number of keys: the others become the mean of the valid ones, with values of zero, and what
        they add to a row's sum is subtracted. The exponential of a mean is at most the mean of the exponentials, so of
        the sum at least count / tokens remains, whatever the scores are, and the subtraction is accurate.
        """
        tokens, counts = key.shape[1], jnp.maximum(count, 1).astype(jnp.float32)[:, None, None]
        valid = jnp.arange(tokens)[:, None] < count[:, None, None]
        mean = (jnp.where(valid, key, 0).sum(axis=1, keepdims=True, dtype=jnp.float32) / counts).astype(key.dtype)
        out, log_sum, rescued = self.local(query, jnp.where(valid, key, mean), jnp.where(valid, value, 0), tokens)
        heads = [array.reshape(*array.shape[:2], -1, self.head_dim) for array in (query, mean)]
        score = jnp.einsum("bqhd,bkhd->bhq", *heads, preferred_element_type=jnp.float32) * self.head_dim**-0.5
        share = 1 - (tokens - counts) * jnp.exp(score - log_sum)
        share = jnp.maximum(share, 0.5 * counts / tokens)  # rounding
        out = out.astype(jnp.float32) / jnp.repeat(share.swapaxes(1, 2), self.head_dim, axis=2)
        some = (count > 0)[:, None, None]
        return jnp.where(some, out, 0), jnp.where(some, log_sum + jnp.log(share), MASKED), rescued

    def local(self, query, key, value, keys):
        """(out, log_sum, rescued) of one device's queries and its first `keys` keys."""
        return KERNELS[self.name(keys)](query, key, value, keys, self.head_dim, self.kernel)

    def go_on(self, before, query, key, value, keys, dtype):
        """Like local, continuing from `before`, the (out, log_sum) in float32 of other keys, or (). Output in
        `dtype`."""
        if self.name(keys) == "splash":
            return tpu_splash(query, key, value, keys, self.head_dim, self.kernel, before, dtype)
        out, log_sum, rescued = self.local(query, key, value, keys)
        if before:
            out, log_sum = schemes.merge(before, (out.astype(jnp.float32), log_sum), self.head_dim)
        return out.astype(dtype), log_sum, rescued

    def listed(self, query, key, value, chosen, query_blocks, key_blocks):
        """(out, rescued) of attention to the chosen blocks of keys."""
        blocks = query_blocks, key_blocks
        if self.kernel.kernel == "xla":
            return sparse.listed(query, key, value, chosen, *blocks, self.head_dim), NONE
        return LISTED[self.kernel.kernel](query, key, value, chosen, *blocks, self.head_dim, self.kernel)

    def name(self, keys):
        return self.kernel.kernel if keys >= self.kernel.min_keys else "xla"


def xla(query, key, value, keys, head_dim, kernel):
    """Blockwise attention with an online softmax in plain JAX, without a full score matrix. `keys` may be one number,
    or one per row of the batch."""
    batch, queries, width = query.shape
    heads, most = width // head_dim, keys if isinstance(keys, int) else key.shape[1]
    query_blocks = blocks(query, min(kernel.block_q, queries), heads)
    key_blocks = blocks(key, min(kernel.block_kv, most), heads)
    value_blocks = blocks(value, min(kernel.block_kv, most), heads)
    block_q, block_kv = query_blocks.shape[2], key_blocks.shape[2]

    def one_query_block(indexed):
        index, query_block = indexed
        rows = index * block_q + jnp.arange(block_q)

        def step(carry, block):
            number, key_block, value_block = block
            columns = number * block_kv + jnp.arange(block_kv)
            scores = jnp.einsum("bqhd,bkhd->bhqk", query_block, key_block, preferred_element_type=jnp.float32)
            scores = jnp.where(visible(rows, columns, keys, kernel.window), scores * head_dim**-0.5, MASKED)
            return online_step(carry, scores, value_block), None

        shape = (batch, heads, block_q)
        start = (jnp.zeros((*shape, head_dim), jnp.float32), jnp.full(shape, MASKED), jnp.zeros(shape))
        (out, maximum, total), _ = lax.scan(step, start, (jnp.arange(len(key_blocks)), key_blocks, value_blocks))
        return out / total[..., None], maximum + jnp.log(total)

    out, log_sum = lax.map(one_query_block, (jnp.arange(len(query_blocks)), query_blocks))
    out = out.transpose(1, 0, 3, 2, 4).reshape(batch, -1, width)[:, :queries]  # (blocks, batch, heads, block_q, dim)
    log_sum = log_sum.transpose(1, 2, 0, 3).reshape(batch, heads, -1)[..., :queries]
    return out.astype(query.dtype), log_sum, NONE


def blocks(array, size, heads):
    """(batch, tokens, width) -> (blocks, batch, size, heads, head_dim), the last block padded with zeros."""
    batch, tokens, width = array.shape
    padded = jnp.pad(array, ((0, 0), (0, -tokens % size), (0, 0)))
    return padded.reshape(batch, -1, size, heads, width // heads).swapaxes(0, 1)


def visible(rows, columns, keys, window):
    """The attention mask: valid keys, and with a window only those at most that far away."""
    seen = columns[None, :] < (keys if isinstance(keys, int) else keys[:, None, None, None])
    return seen if window is None else seen & (abs(rows[:, None] - columns[None, :]) <= window)


def online_step(carry, scores, value_block):
    """Add one block of keys to (out, maximum, total); out is not yet divided by total."""
    out, maximum, total = carry
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
    correction = jnp.exp(maximum - new_maximum)
    weights = jnp.exp(scores - new_maximum[..., None])
    product = jnp.einsum(
        "bhqk,bkhd->bhqd", weights.astype(value_block.dtype), value_block, preferred_element_type=jnp.float32
    )
    return out * correction[..., None] + product, new_maximum, total * correction + weights.sum(axis=-1)


def cudnn(query, key, value, keys, head_dim, kernel):
    """cuDNN's fused attention (NVIDIA, bf16 or fp16).

    It is 7 to 9 % slower if the keys are not a multiple of 128 (75,600 are not): then the remainder is computed
    separately and merged (benchmarks/attention_gpu.py).
    """
    whole = keys // 128 * 128
    if whole in (0, keys):
        return *cudnn_call(query, key[:, :keys], value[:, :keys], head_dim), NONE
    most, rest = slice(whole), slice(whole, keys)
    parts = (cudnn_call(query, key[:, part], value[:, part], head_dim) for part in (most, rest))
    out, log_sum = schemes.merge(*parts, head_dim)
    return out.astype(query.dtype), log_sum, NONE


def cudnn_counted(query, key, value, counts, head_dim, kernel):
    """cuDNN's fused attention with a number of valid keys per row of the batch. Plain JAX would take as long for a
    thousand keys as the Hopper kernel for all of a video's: its scores go through memory."""
    some = (counts > 0)[:, None, None]
    out, log_sum = cudnn_call(query, key, value, head_dim, jnp.maximum(counts, 1))
    return jnp.where(some, out, 0), jnp.where(some, log_sum, MASKED), NONE


def cudnn_call(query, key, value, head_dim, counts=None):
    split = [x.reshape(*x.shape[:2], -1, head_dim) for x in (query, key, value)]
    out, log_sum = private.cudnn_attention(*split, scale=head_dim**-0.5, counts=counts)
    return out.reshape(query.shape), log_sum


def tpu_splash(query, key, value, keys, head_dim, kernel, before=(), dtype=None):
    """The Pallas kernel for TPU, whose values and outputs have tokens along the lanes."""
    if before:
        before = before[0].swapaxes(1, 2), before[1]
    out, log_sum, rescued = splash.attention(query, key, value.swapaxes(1, 2), keys, head_dim, kernel, before, dtype)
    return out.swapaxes(1, 2), log_sum, rescued


def gpu_hopper(query, key, value, keys, head_dim, kernel):
    """The Pallas kernel for NVIDIA Hopper, with 8-bit products if configured and worthwhile."""
    from wan_torchax.kernels import hopper, hopper_eight  # Mosaic GPU takes a second to import

    eight = kernel.eight_bits and keys >= hopper_eight.FEWEST_KEYS
    return hopper.attention(query, key, value, keys, head_dim, kernel, hopper_eight.fast if eight else None)


def gpu_listed(query, key, value, chosen, query_blocks, key_blocks, head_dim, kernel):
    """The Pallas kernel for NVIDIA Hopper over lists of key blocks."""
    from wan_torchax.kernels import hopper

    return hopper.attention_to_lists(query, key, value, chosen, query_blocks, key_blocks, head_dim)


def sla(attend: Attend, query, key, value, keys, weight, bias):
    """Sparse-linear attention: softmax over the highest key blocks, plus a linear attention over all keys."""
    if attend.kernel.kernel == "splash":
        value_t = value.swapaxes(1, 2)
        out_t, rescued = splash_lists.sla(query, key, value_t, keys, weight, bias, attend.head_dim, attend.kernel)
        return out_t.swapaxes(1, 2), rescued
    settings = attend.kernel.sparse
    # Padding after the valid tokens is in no block; what comes out for it is dropped.
    query_blocks, key_blocks = (sparse.Blocks.even(keys, size) for size in (settings.block_q, settings.block_kv))
    with jax.named_scope("lists"):
        scores = sparse.sla_scores(query, key, query_blocks, key_blocks, attend.head_dim)
        chosen = sparse.top(scores, settings.count(len(key_blocks.sizes)))
    out, rescued = attend.listed(query, key, value, chosen, query_blocks, key_blocks)
    with jax.named_scope("linear"):
        linear = sparse.linear_branch(query, key, value, keys, weight, bias, attend.head_dim)
    return (out + linear).astype(query.dtype), rescued


def vsa(attend: Attend, query, key, value, keys):
    """Video sparse attention: softmax over the tokens of the highest tiles, and a coarse attention between tiles. Where
    a kernel needs larger blocks than tiles, lists are of those to which most of the coarse attention falls."""
    settings, tiles = attend.kernel.sparse, sparse.Blocks.tiles(attend.grid, TILE)
    with jax.named_scope("lists"):
        by_products = attend.kernel.kernel == "splash"
        scores, coarse = sparse.coarse_branch(query, key, value, tiles, attend.head_dim, by_products)
        blocks = tiles, tiles
        if not settings.lists_tiles:
            blocks = tuple(sparse.Blocks.even(keys, size) for size in (settings.block_q, settings.block_kv))
            scores = sparse.vsa_shares(scores, tiles, *blocks)
        chosen = sparse.top(scores, settings.count(len(blocks[1].sizes)))
    out, rescued = attend.listed(query, key, value, chosen, *blocks)
    return (out, coarse), rescued


def tpu_listed(query, key, value, chosen, query_blocks, key_blocks, head_dim, kernel):
    """The Pallas kernel for TPU over lists of key blocks."""
    blocks = query_blocks, key_blocks
    out, rescued = splash_lists.attention(query, key, value.swapaxes(1, 2), chosen, *blocks, head_dim, kernel)
    return out.swapaxes(1, 2), rescued


def fixed(attend: Attend, query, key, value, keys, dense=None):
    """Softmax over lists that need no training (masks.py); over all keys where `dense`, a traced bool, says so."""
    settings = attend.kernel.sparse
    query_blocks, key_blocks = blocks = tuple(
        sparse.Blocks.even(keys, size) for size in (settings.block_q, settings.block_kv)
    )

    def by_lists(query, key, value):
        count = settings.count(len(key_blocks.sizes))
        with jax.named_scope("lists"):
            if settings.kind == "band":
                chosen = masks.banded(query, key, value, attend.grid, *blocks, count, attend.head_dim)
            else:
                heads = query.shape[0], query.shape[2] // attend.head_dim
                lists = masks.radial(attend.grid, *blocks, count)
                chosen = jnp.broadcast_to(jnp.array(lists), (*heads, *lists.shape))
        out, rescued = attend.listed(query, key, value, chosen, *blocks)
        return out, jnp.asarray(rescued, jnp.int32)

    def by_all(query, key, value):
        out, _, rescued = attend.local(query, key, value, keys)
        return out, jnp.asarray(rescued, jnp.int32)

    if dense is None:
        return by_lists(query, key, value)
    return lax.cond(dense, by_all, by_lists, query, key, value)


SPARSE = {"sla": sla, "vsa": vsa, "radial": fixed, "band": fixed}
LISTED = {"hopper": gpu_listed, "splash": tpu_listed}
KERNELS = {"xla": xla, "cudnn": cudnn, "splash": tpu_splash, "hopper": gpu_hopper}
GUARDED = ("splash", "hopper")  # kernels that detect and recompute lost rows
