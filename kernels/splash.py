"""Full attention for TPU in Pallas: forward, bf16 in and out, float32 in between. kernels/README.md explains it.

    out_t, log_sum, rescued = attention(query, key, value_t, keys, head_dim, kernel)

    query    (batch, queries, heads * head_dim)     value_t  (batch, heads * head_dim, keys)
    key      (batch, keys, heads * head_dim)        out_t    (batch, heads * head_dim, queries)
    log_sum  (batch, heads, queries) float32: log of the sum of exp(score), for merging with other keys
    rescued  how many rows of heads the fast kernel lost
    keys     how many of the keys count; the rest is padding

Scores are kept transposed, (keys, queries): softmax reductions then run over sublanes, a query's statistics
lie along the lanes, and both matrix products reach the MXU without a transpose inside the loop.
"""
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LOG2_E = 1.4426950408889634
# Masks a score; finite, because a row that is all masked so far must not give inf - inf.
LOWEST = float(np.finfo(np.float32).min)
# The fast path's largest row sum: well below overflow, and 1 / sum well above the denormals a TPU flushes.
TRUSTED_SUM = 2.0**100
SCRATCHES = 4  # arrays that a kernel keeps from one block of keys to the next


def reference(query, key, value, head_dim, window=None):
    """What the kernel computes, in plain JAX at the inputs' precision, without blocks; all (batch, tokens, width)."""
    split = [x.reshape(*x.shape[:2], -1, head_dim) for x in (query, key, value)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *split[:2]) * head_dim**-0.5
    if window is not None:
        distance = abs(jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :])
        scores = jnp.where(distance <= window, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), split[2]).reshape(query.shape)


def attention(query, key, value_t, keys, head_dim, kernel):
    """The fast kernel, and behind it the exact one for blocks of queries of which the fast one reports a lost row."""
    batch, queries, width = query.shape
    heads = width // head_dim
    if head_dim % 128:  # a block's last dimension must be whole lanes or the whole array: fold the heads into the batch
        query, key = (
            array.reshape(batch, -1, heads, head_dim).swapaxes(1, 2).reshape(batch * heads, -1, head_dim)
            for array in (query, key)
        )
        value_t = value_t.reshape(batch * heads, head_dim, -1)
    arrays, rescued = (query, key, value_t), jnp.int32(0)
    if kernel.window is not None:
        out_t, log_sum = call(exact_kernel, arrays, keys, head_dim, kernel)
    else:
        out_t, log_sum = call(fast_kernel, arrays, keys, head_dim, kernel)
        lost = ~jnp.isfinite(log_sum)
        rescued = jnp.sum(lost, dtype=jnp.int32)

        def again(state):
            return False, *call(again_kernel, arrays, keys, head_dim, kernel, before=state[1:], lost=lost)

        # A loop that runs at most once, not lax.cond: its result takes over the buffers it starts from, without a copy.
        _, out_t, log_sum = lax.while_loop(lambda state: state[0], again, (rescued > 0, out_t, log_sum))
    return out_t.reshape(batch, width, queries), log_sum.reshape(batch, heads, queries), rescued


def call(body, arrays, keys, head_dim, kernel, before=(), lost=None):
    """One Pallas call, its grid over batch, heads, query blocks and, innermost, key blocks; edge blocks overhang.

    With results from `before`, only blocks of queries with a lost row have their queries, keys and values fetched."""
    query = arrays[0]
    batch, queries, width = query.shape
    heads = width // head_dim
    block_q, block_kv = fitting(kernel.block_q, kernel.sub_q, queries), fitting(kernel.block_kv, kernel.chunk_kv, keys)
    grid = batch, heads, pl.cdiv(queries, block_q), pl.cdiv(keys, block_kv)
    scalars = () if lost is None else (flags_of(lost, block_q),)

    def place(chosen):
        def of_block(b, h, i, j, *flags):
            wanted = flags[0][(b * heads + h) * grid[2] + i] if flags else 1
            return chosen(b * wanted, h * wanted, i * wanted, j * wanted)

        return of_block

    results = [
        pl.BlockSpec((None, head_dim, block_q), lambda b, h, i, j, *_: (b, h, i)),
        pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, j, *_: (b, h, 0, i)),
    ]
    return pl.pallas_call(
        outline if kernel.outline else partial(body, keys=keys, kernel=kernel),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[
                pl.BlockSpec((None, block_q, head_dim), place(lambda b, h, i, j: (b, i, h))),
                pl.BlockSpec((None, block_kv, head_dim), place(lambda b, h, i, j: (b, j, h))),
                pl.BlockSpec((None, head_dim, block_kv), place(lambda b, h, i, j: (b, h, j))),
                *results[: len(before)],
            ],
            out_specs=results,
            scratch_shapes=[
                pltpu.VMEM((head_dim * (2 if kernel.fold_scale else 1), block_q), query.dtype),
                pltpu.VMEM((head_dim, block_q), jnp.float32),
                pltpu.VMEM((1, block_q), jnp.float32),
                pltpu.VMEM((1, block_q), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, width, queries), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32),
        ],
        input_output_aliases={4: 0, 5: 1} if before else {},  # behind the flags and three arrays
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=kernel.vmem_mib * 2**20,
        ),
        interpret=kernel.interpret,
        name=body.__name__,
    )(*scalars, *arrays, *before)


def flags_of(lost, block_q):
    """1 for each block of queries with a lost row, flat (batch * heads * blocks,)."""
    padded = jnp.pad(lost, ((0, 0),) * 3 + ((0, -lost.shape[3] % block_q),))
    return padded.reshape(-1, block_q).any(axis=1).astype(jnp.int32)


def outline(*refs):
    """A kernel's operands without its work: what the program around it compiles to is the same."""
    *_, out_t, log_sum = refs[:-SCRATCHES]
    out_t[...] = jnp.zeros_like(out_t)
    log_sum[...] = jnp.zeros_like(log_sum)


def again_kernel(flags, query, key, value_t, out_before, log_sum_before, out_t, log_sum, *scratch, keys, kernel):
    """The exact kernel where a block of queries has a lost row; other blocks stay as they are."""
    place = (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)) * pl.num_programs(2) + pl.program_id(2)
    lost = flags[place] > 0
    exact_kernel(query, key, value_t, out_t, log_sum, *scratch, keys=keys, kernel=kernel, wanted=lost)

    @pl.when(~lost)
    def keep():
        out_t[...] = out_before[...]
        log_sum[...] = log_sum_before[...]


def fitting(block, part, tokens):
    """The block, or as many of its parts as hold all tokens where these are fewer."""
    return min(block, pl.cdiv(tokens, part) * part)


def fast_kernel(query, key, value_t, out_t, log_sum, query_t, sums, reference, total, *, keys, kernel):
    """One block of keys, tile by tile, the softmax taken against a reference that is corrected only between tiles.

    query (block_q, head_dim)   key (block_kv, head_dim)   value_t (head_dim, block_kv)   out_t (head_dim, block_q)
    Kept from tile to tile: query_t (head_dim or twice that, block_q), and in float32 sums (head_dim, block_q),
    reference and total (1, block_q). So far, the output is sums / total and the log2 of the softmax's denominator
    reference + log2(total).
    """
    block_kv, number = key.shape[0], pl.program_id(3)
    last = pl.cdiv(keys, block_kv) - 1

    @pl.when(number == 0)
    def start():
        keep_query(query, query_t, kernel)
        sums[...] = jnp.zeros_like(sums)
        total[...] = jnp.zeros_like(total)
        for columns in parts_of(query.shape[0], kernel.sub_q):
            scores = scores_of(key[:kernel.chunk_kv, :], query_t[:, columns], kernel)
            reference[:, columns] = jnp.max(hide_tail(scores, keys), axis=0, keepdims=True)

    tile = partial(fast_tile, key, value_t, State(query_t, sums, reference, total), kernel)
    last_tiles, tail = divmod(keys - last * block_kv, kernel.tile_kv)
    if keys >= kernel.tile_kv:
        tiles = jnp.where(number < last, block_kv // kernel.tile_kv, last_tiles)
        pl.loop(0, tiles)(lambda index: tile(pl.multiple_of(index * kernel.tile_kv, kernel.tile_kv), kernel.tile_kv))
    if tail:  # code of its own for the keys that fill no tile, so that the others need no mask
        pl.when(number == last)(lambda: tile(last_tiles * kernel.tile_kv, tail))

    @pl.when(number == last)
    def finish():
        result = sums[...] / total[...]
        sound = jnp.all(jnp.isfinite(result), axis=0, keepdims=True) & (total[...] < TRUSTED_SUM)
        out_t[...] = result.astype(out_t.dtype)
        log_sum[...] = jnp.where(sound, (reference[...] + jnp.log2(total[...])) / LOG2_E, jnp.nan)


class State(NamedTuple):
    """What the fast kernel keeps from tile to tile; see there."""

    query_t: jax.Array
    sums: jax.Array
    reference: jax.Array
    total: jax.Array


def fast_tile(key, value_t, state, kernel, first, real):
    """Add `real` keys, from the block's `first` on, to the state, in steps of chunk_kv keys by sub_q queries.

    Source order is the schedule: a step's score product stands before the previous step's softmax and its value product
    after the next step's, so that the MXU works while the exponentials of its neighbours are taken.
    """
    query_t, sums, reference, total = state
    parts = parts_of(query_t.shape[1], kernel.sub_q)
    bases, factors, row_sums = [], [], []
    for columns in parts:  # what is known so far becomes one: its log-sum-exp is the new reference
        known = total[:, columns]
        divisor = jnp.where(known == 0, 1, known)  # zero before the first tile
        bases.append(jnp.where(known < TRUSTED_SUM, reference[:, columns] + jnp.log2(divisor), jnp.inf))
        factors.append(1 / divisor)
        row_sums.append(jnp.where(known == 0, 0.0, 1.0))
        reference[:, columns] = bases[-1]

    def scores_at(begin, part):
        scores = scores_of(key[pl.ds(first + begin, kernel.chunk_kv), :], query_t[:, parts[part]], kernel)
        return hide_tail(scores, real - begin)

    def accumulate(begin, part, weights):
        values = value_t[:, pl.ds(first + begin, kernel.chunk_kv)]
        if begin + kernel.chunk_kv > real:  # what overhangs may be NaN, which a weight of zero would not silence
            values = jnp.where(lax.broadcasted_iota(jnp.int32, (1, kernel.chunk_kv), 1) < real - begin, values, 0)
        held = sums[:, parts[part]]
        held = held * factors[part] if begin == 0 else held
        sums[:, parts[part]] = held + dot(values, weights)

    steps = [(begin, part) for begin in range(0, real, kernel.chunk_kv) for part in range(len(parts))]
    scores, waiting = scores_at(*steps[0]), None
    for (begin, part), following in zip(steps, steps[1:] + [None]):
        next_scores = scores_at(*following) if following else None
        weights = jnp.exp2(scores - bases[part])
        row_sums[part] += jnp.sum(weights, axis=0, keepdims=True)
        if waiting:
            accumulate(*waiting)
        scores, waiting = next_scores, (begin, part, weights.astype(value_t.dtype))
    accumulate(*waiting)
    for columns, row_sum in zip(parts, row_sums):
        total[:, columns] = row_sum


def parts_of(block_q, sub_q):
    return [pl.ds(start, sub_q) for start in range(0, block_q, sub_q)]


def keep_query(query, query_t, kernel):
    """Transpose a query block, once. With fold_scale it is also scaled, and kept as two bf16 terms: scaled and rounded
    to one, it would lose a bit, and an MXU 256 deep takes both terms of head dim 128 in the time of one."""
    if not kernel.fold_scale:
        query_t[...] = query[...].T
        return
    head_dim = query.shape[1]
    scaled = query[...].astype(jnp.float32).T * (head_dim**-0.5 * LOG2_E)
    high = scaled.astype(query_t.dtype)
    query_t[:head_dim, :] = high
    query_t[head_dim:, :] = (scaled - high.astype(jnp.float32)).astype(query_t.dtype)


def scores_of(key, query_t, kernel):
    """Scores times log2 e, for exp2, the exponential that the hardware has: (keys, queries) float32."""
    if kernel.fold_scale:
        return dot(jnp.concatenate([key, key], axis=1), query_t)
    return dot(key, query_t) * (key.shape[1]**-0.5 * LOG2_E)


def hide_tail(scores, real):
    """Scores (keys, queries), lowest where a key is not among the first `real` ones."""
    if scores.shape[0] <= real:
        return scores
    return jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 0) < real, scores, LOWEST)


def dot(left, right):
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def exact_kernel(query, key, value_t, out_t, log_sum, query_t, means, maximum, total, *, keys, kernel, wanted=True):
    """One block of keys with a running maximum, always normalised: right for any finite scores and values, and slower.

    Shapes as in fast_kernel. `means` is the output so far, not a sum, so that no value is too large for it.
    """
    block_kv, block_q = key.shape[0], query.shape[0]
    first_query, first_key, last = pl.program_id(2) * block_q, pl.program_id(3) * block_kv, pl.num_programs(3) - 1

    @pl.when((pl.program_id(3) == 0) & wanted)
    def start():
        keep_query(query, query_t, kernel)
        means[...] = jnp.zeros_like(means)
        maximum[...] = jnp.full_like(maximum, LOWEST)
        total[...] = jnp.zeros_like(total)

    def add_chunk(index):
        begin = pl.multiple_of(index * kernel.chunk_kv, kernel.chunk_kv)
        positions = first_key + begin + lax.broadcasted_iota(jnp.int32, (1, kernel.chunk_kv), 1)
        values = jnp.where(positions < keys, value_t[:, pl.ds(begin, kernel.chunk_kv)], 0)
        for columns in parts_of(block_q, kernel.sub_q):
            scores = scores_of(key[pl.ds(begin, kernel.chunk_kv), :], query_t[:, columns], kernel)
            seen = visible(scores.shape, first_key + begin, first_query + columns.start, keys, kernel.window)
            scores = jnp.where(seen, scores, LOWEST)
            highest = jnp.maximum(maximum[:, columns], jnp.max(scores, axis=0, keepdims=True))
            weights = jnp.exp2(scores - highest)
            rest = total[:, columns] * jnp.exp2(maximum[:, columns] - highest)
            new_total = rest + jnp.sum(weights, axis=0, keepdims=True)
            product = dot(values, (weights / new_total).astype(values.dtype))
            means[:, columns] = means[:, columns] * (rest / new_total) + product
            maximum[:, columns], total[:, columns] = highest, new_total

    near = wanted
    if kernel.window is not None:  # a block of keys that no query of this block sees
        near &= first_key <= first_query + block_q - 1 + kernel.window
        near &= first_key + block_kv > first_query - kernel.window
    pl.when(near)(lambda: pl.loop(0, block_kv // kernel.chunk_kv)(add_chunk))

    @pl.when((pl.program_id(3) == last) & wanted)
    def finish():
        out_t[...] = means[...].astype(out_t.dtype)
        log_sum[...] = (maximum[...] + jnp.log2(total[...])) / LOG2_E


def visible(shape, first_key, first_query, keys, window):
    """Which of a chunk's keys (rows) each of its queries (columns) may see."""
    key_at = first_key + lax.broadcasted_iota(jnp.int32, shape, 0)
    if window is None:
        return key_at < keys
    query_at = first_query + lax.broadcasted_iota(jnp.int32, shape, 1)
    return (key_at < keys) & (jnp.abs(query_at - key_at) <= window)
