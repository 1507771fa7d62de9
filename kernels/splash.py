"""Full attention for TPU in Pallas: forward, bf16 in and out, float32 in between. kernels/README.md explains it.

    out_t, log_sum = attention(query, key, value_t, head_dim, kernel)

    query    (batch, queries, heads * head_dim)     value_t  (batch, heads * head_dim, keys)
    key      (batch, keys, heads * head_dim)        out_t    (batch, heads * head_dim, queries)
    log_sum  (batch, heads, queries) float32: log of the sum of exp(score), for merging with other keys

Scores are kept transposed, (keys, queries): softmax reductions then run over sublanes, a query's statistics
lie along the lanes, and both matrix products fill the MXU without a transpose inside the loop.
"""
from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LOG2_E = 1.4426950408889634
LOWEST = float(np.finfo(np.float32).min)  # masks a score; finite, so that a row masked so far is not inf - inf
TRUSTED_SUM = 2.0**100  # of the fast path's row sums; above it, 1 / sum nears the denormals that the TPU flushes to zero


def reference(query, key, value, head_dim, window=None):
    """What the kernel computes, in plain JAX at the inputs' precision and without blocks; all (batch, tokens, width)."""
    split = [x.reshape(*x.shape[:2], -1, head_dim) for x in (query, key, value)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *split[:2]) * head_dim**-0.5
    if window is not None:
        distance = abs(jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :])
        scores = jnp.where(distance <= window, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), split[2]).reshape(query.shape)


def attention(query, key, value_t, head_dim, kernel):
    """The fast kernel, and behind it the exact one where the fast one says it lost a row."""
    batch, queries, width = query.shape
    heads = width // head_dim
    query = (query.astype(jnp.float32) * (head_dim**-0.5 * LOG2_E)).astype(query.dtype)  # exp2 is the cheaper exponential
    if head_dim % 128:  # a block's last dimension is whole lanes or the whole array: fold the heads into the batch
        query, key = (x.reshape(batch, -1, heads, head_dim).swapaxes(1, 2).reshape(batch * heads, -1, head_dim) for x in (query, key))
        value_t = value_t.reshape(batch * heads, head_dim, -1)
    exact = partial(call, exact_kernel, query, key, value_t, head_dim, kernel)
    if kernel.window is not None:
        out_t, log_sum = exact()
    else:
        out_t, log_sum = call(fast_kernel, query, key, value_t, head_dim, kernel)
        lost = ~jnp.all(jnp.isfinite(log_sum))
        # A loop that runs at most once, not lax.cond: its result takes over the buffers it starts from, without a copy.
        _, out_t, log_sum = lax.while_loop(lambda state: state[0], lambda state: (False, *exact()), (lost, out_t, log_sum))
    return out_t.reshape(batch, width, queries), log_sum.reshape(batch, heads, queries)


def call(body, query, key, value_t, head_dim, kernel):
    """One Pallas call: a grid over batch, heads, query blocks and, innermost, key blocks."""
    batch, queries, width = query.shape
    keys, heads = key.shape[1], width // head_dim
    block_q, block_kv = min(kernel.block_q, lanes(queries)), min(kernel.block_kv, lanes(keys))
    grid = (batch, heads, pl.cdiv(queries, block_q), pl.cdiv(keys, block_kv))
    return pl.pallas_call(
        partial(body, keys=keys, kernel=kernel),
        grid=grid,
        in_specs=[
            pl.BlockSpec((None, block_q, head_dim), lambda b, h, i, j: (b, i, h)),
            pl.BlockSpec((None, block_kv, head_dim), lambda b, h, i, j: (b, j, h)),
            pl.BlockSpec((None, head_dim, block_kv), lambda b, h, i, j: (b, h, j)),
        ],
        out_specs=[
            pl.BlockSpec((None, head_dim, block_q), lambda b, h, i, j: (b, h, i)),
            pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, j: (b, h, 0, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, width, queries), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((head_dim, block_q), query.dtype),
            pltpu.VMEM((head_dim, block_q), jnp.float32),
            pltpu.VMEM((1, block_q), jnp.float32),
            pltpu.VMEM((1, block_q), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=kernel.vmem_mib * 2**20),
        interpret=kernel.interpret,
        name=body.__name__,
    )(query, key, value_t)


def lanes(tokens):
    """The smallest whole number of 128 lanes that holds this many tokens."""
    return 128 * ceil(tokens / 128)


def fast_kernel(query, key, value_t, out_t, log_sum, query_t, sums, reference, total, *, keys, kernel):
    """One tile, the softmax taken against a reference that is only corrected between tiles.

    query (block_q, head_dim)   key (block_kv, head_dim)   value_t, out_t (head_dim, block_kv / block_q)
    query_t (head_dim, block_q), sums (head_dim, block_q) float32, reference, total (1, block_q) float32: kept from tile to tile
    """
    block_kv, block_q = key.shape[0], query.shape[0]
    number, last = pl.program_id(3), pl.num_programs(3) - 1
    chunk, part = min(kernel.chunk_kv, block_kv), min(kernel.sub_q, block_q)
    parts = [pl.ds(start, part) for start in range(0, block_q, part)]

    @pl.when(number == 0)
    def start():
        query_t[...] = query[...].T
        sums[...] = jnp.zeros_like(sums)
        total[...] = jnp.ones_like(total)
        for columns in parts:
            scores = dot(key[:chunk, :], query_t[:, columns])
            reference[:, columns] = jnp.max(hide_tail(scores, keys, 0), axis=0, keepdims=True)

    def tile(real):
        before, factor, row_sum = [], [], []
        for columns in parts:
            known = total[:, columns]
            factor.append(1 / known)
            before.append(jnp.where(known < TRUSTED_SUM, reference[:, columns] + jnp.log2(known), jnp.inf))
            reference[:, columns] = before[-1]
            row_sum.append(jnp.where(number == 0, 0.0, 1.0) * jnp.ones_like(known))
        steps = [(begin, index) for begin in range(0, real, chunk) for index in range(len(parts))]

        def scores_of(begin, index):
            scores = dot(key[begin:begin + chunk, :], query_t[:, parts[index]])
            return hide_tail(scores, real, begin)

        def accumulate(begin, index, weights):
            values = value_t[:, begin:begin + chunk]
            if begin + chunk > real:
                values = jnp.where(lax.broadcasted_iota(jnp.int32, (1, chunk), 1) < real - begin, values, 0)
            held = sums[:, parts[index]]
            held = held * factor[index] if begin == 0 else held
            sums[:, parts[index]] = held + dot(values, weights)

        scores, waiting = scores_of(*steps[0]), None
        for step, (begin, index) in enumerate(steps):
            following = scores_of(*steps[step + 1]) if step + 1 < len(steps) else None
            weights = jnp.exp2(scores - before[index])
            row_sum[index] = row_sum[index] + jnp.sum(weights, axis=0, keepdims=True)
            if waiting:
                accumulate(*waiting)
            waiting = (begin, index, weights.astype(value_t.dtype))
            scores = following
        accumulate(*waiting)
        for index, columns in enumerate(parts):
            total[:, columns] = row_sum[index]

    tail = keys % block_kv
    if tail:
        pl.when(number < last)(lambda: tile(block_kv))
        pl.when(number == last)(lambda: tile(tail))
    else:
        tile(block_kv)

    @pl.when(number == last)
    def finish():
        result = sums[...] / total[...]
        fine = jnp.all(jnp.isfinite(result), axis=0, keepdims=True) & (total[...] < TRUSTED_SUM)
        out_t[...] = result.astype(out_t.dtype)
        log_sum[...] = jnp.where(fine, (reference[...] + jnp.log2(total[...])) / LOG2_E, jnp.nan)


def hide_tail(scores, real, begin):
    """Scores (chunk, columns) of keys from `begin` on, lowest where the key is not among the `real` ones."""
    if begin + scores.shape[0] <= real:
        return scores
    return jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 0) < real - begin, scores, LOWEST)


def dot(left, right):
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def exact_kernel(query, key, value_t, out_t, log_sum, query_t, sums, maximum, total, *, keys, kernel):
    """One tile with a running maximum, always normalised: right for any finite scores and values, but slower.

    Shapes as in fast_kernel; `sums` is here the mean of the values seen so far, so that nothing can overflow.
    """
    (block_kv, head_dim), block_q = key.shape, query.shape[0]
    query_block, number, last = pl.program_id(2), pl.program_id(3), pl.num_programs(3) - 1
    chunk, part = min(kernel.chunk_kv, block_kv), min(kernel.sub_q, block_q)

    @pl.when(number == 0)
    def start():
        query_t[...] = query[...].T
        sums[...] = jnp.zeros_like(sums)
        maximum[...] = jnp.full_like(maximum, LOWEST)
        total[...] = jnp.zeros_like(total)

    def add_chunk(index):
        begin = pl.multiple_of(index * chunk, chunk)
        position = number * block_kv + begin
        values = value_t[:, pl.ds(begin, chunk)]
        values = jnp.where(position + lax.broadcasted_iota(jnp.int32, (1, chunk), 1) < keys, values, 0)
        for columns in (pl.ds(begin_q, part) for begin_q in range(0, block_q, part)):
            scores = dot(key[pl.ds(begin, chunk), :], query_t[:, columns])
            key_at = position + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            seen = key_at < keys
            if kernel.window is not None:
                query_at = query_block * block_q + columns.start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                seen &= jnp.abs(query_at - key_at) <= kernel.window
            scores = jnp.where(seen, scores, LOWEST)
            highest = jnp.maximum(maximum[:, columns], jnp.max(scores, axis=0, keepdims=True))
            weights = jnp.exp2(scores - highest)
            kept = total[:, columns] * jnp.exp2(maximum[:, columns] - highest)
            new_total = kept + jnp.sum(weights, axis=0, keepdims=True)
            product = dot(values, (weights / new_total).astype(values.dtype))
            sums[:, columns] = sums[:, columns] * (kept / new_total) + product
            maximum[:, columns], total[:, columns] = highest, new_total

    pl.loop(0, block_kv // chunk)(add_chunk)

    @pl.when(number == last)
    def finish():
        out_t[...] = sums[...].astype(out_t.dtype)
        log_sum[...] = (maximum[...] + jnp.log2(total[...])) / LOG2_E
