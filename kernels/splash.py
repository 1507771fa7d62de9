"""Full attention for TPU in Pallas: forward, bf16 in and out, float32 in between. kernels/README.md explains it.

    out_t, log_sum, rescued = attention(query, key, value_t, keys, head_dim, kernel, before, dtype)

    query    (batch, queries, heads * head_dim)     value_t  (batch, heads * head_dim, keys)
    key      (batch, keys, heads * head_dim)        out_t    (batch, heads * head_dim, queries)
    log_sum  (batch, heads, queries) float32: log of the sum of exp(score), for merging with other keys
    before   out_t in float32 and log_sum of other keys, to continue from; (): there are none
    dtype    of out_t, by default the query's
    rescued  int32: how many rows of heads left the fast path's range and were recomputed
    keys     how many of the keys are valid; the rest is padding

Query and key may have more heads than the values: their first and their last ones count. So one array can be both.
Values may be `Values`, in parts as devices send them, and the output be in `pieces` to be sent, (pieces, batch, heads *
head_dim, sub_q): then nothing is copied before an all-to-all and after it.

Scores are transposed, (keys, queries): softmax reductions then run over sublanes, a query's statistics are along the
lanes, and both matrix products reach the MXU without a transpose inside the loop.
"""
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LOG2_E = 1.4426950408889634
# The value of masked scores; finite, because a row that is all masked so far must not yield inf - inf.
LOWEST = float(np.finfo(np.float32).min)
# The fast path's largest row sum: well below overflow, and 1 / sum well above the denormals a TPU flushes.
TRUSTED_SUM = 2.0**100
# Chunks unrolled at a time with the running maximum: 7 are a third of the 21 of v6e's tile.
CAREFUL_CHUNKS = 7


def reference(query, key, value, head_dim, window=None):
    """A plain-JAX reference at the inputs' precision, without blocks; all (batch, tokens, width)."""
    split = [x.reshape(*x.shape[:2], -1, head_dim) for x in (query, key, value)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *split[:2]) * head_dim**-0.5
    if window is not None:
        distance = abs(jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :])
        scores = jnp.where(distance <= window, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), split[2]).reshape(query.shape)


class Values(NamedTuple):
    """Values with tokens last, possibly in parts; attention is to `width` of their rows from `first` on."""

    array: jax.Array  # (batch, heads * head_dim, keys), or (parts, batch, heads * head_dim, keys of a part)
    first: int
    width: int

    @classmethod
    def whole(cls, value_t):
        return cls(value_t, 0, value_t.shape[1])


def takes_parts(parts: int, tokens: int, head_dim: int, kernel) -> bool:
    """Whether the kernel can read values in parts of so many tokens, and write pieces to be sent to as many devices: no
    chunk of keys and no piece crosses their borders, and all keys are one block."""
    whole = tokens % kernel.chunk_kv == 0 and tokens % kernel.sub_q == 0 and parts * tokens <= kernel.block_kv
    return whole and head_dim % 128 == 0


def attention(query, key, value_t, keys, head_dim, kernel, before=(), dtype=None, pieces=False):
    """The fast kernel, with the exact one as fallback if the result is not finite."""
    values = value_t if isinstance(value_t, Values) else Values.whole(value_t)
    (batch, queries, _), width = query.shape, values.width
    heads = width // head_dim
    if head_dim % 128:
        query, key, value_t = heads_as_rows(query, key, value_t, head_dim)
        values = Values.whole(value_t)
    if before:
        out_t, log_sum = before
        before = out_t.reshape(len(query), -1, queries), log_sum.reshape(len(query), -1, 1, queries)
    arrays = query, key, values, *before
    exact = partial(call, exact_kernel, arrays, keys, head_dim, kernel, dtype, pieces)
    if kernel.window is not None:
        out_t, rows = exact()
        rescued = jnp.int32(0)
    else:
        out_t, rows = call(fast_kernel, arrays, keys, head_dim, kernel, dtype, pieces)
        lost = ~jnp.isfinite(rows[:, :, 0])
        rescued = jnp.sum(lost | (rows[:, :, 1] > 0), dtype=jnp.int32)
        # A loop that runs at most once instead of lax.cond: it reuses its input buffers without a copy.
        start = jnp.any(lost), out_t, rows
        _, out_t, rows = lax.while_loop(lambda state: state[0], lambda state: (False, *exact()), start)
    out_t = out_t if pieces else out_t.reshape(batch, width, queries)
    return out_t, rows[:, :, 0].reshape(batch, heads, queries), rescued


def call(body, arrays, keys, head_dim, kernel, dtype=None, pieces=False):
    """Run a kernel over all queries, with a smaller last block if a full one would be mostly empty."""
    queries = arrays[0].shape[1]
    block_q = fitting(kernel.block_q, kernel.sub_q, queries)
    blocks, rest = divmod(queries, block_q)
    last_block = fitting(block_q, kernel.sub_q, rest)
    run = partial(call_blocks, body, arrays, keys, head_dim, kernel, dtype or arrays[0].dtype, pieces)
    if last_block in (0, block_q) or blocks * block_q % last_block:
        return run(block_q, range(pl.cdiv(queries, block_q)))
    first = blocks * block_q // last_block
    return run(last_block, range(first, first + 1), run(block_q, range(blocks)))


def call_blocks(body, arrays, keys, head_dim, kernel, dtype, pieces, block_q, blocks, into=()):
    """One Pallas call; its grid is batch, heads, query blocks and, innermost, key blocks; edge blocks overhang. `into`
    are the results of other blocks, which this call updates in place."""
    (query, key, (values, first_row, width), *before), given = arrays, len(arrays)
    (batch, queries, _), heads = query.shape, width // head_dim
    before_keys = key.shape[2] // head_dim - heads
    block_kv = fitting(kernel.block_kv, kernel.chunk_kv, keys)
    first, name = blocks.start, ("last_" if into else "") + body.__name__
    body = outline if kernel.outline else partial(body, first_block=first, queries=queries, keys=keys, kernel=kernel)
    block_out_t = pl.BlockSpec((None, head_dim, block_q), lambda b, h, i, j: (b, h, i + first))
    block_log_sum = pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, j: (b, h, 0, i + first))
    block_out, out_shape = block_out_t, (batch, width, queries)
    if pieces:
        several = block_q // kernel.sub_q, None, head_dim, kernel.sub_q
        block_out = pl.BlockSpec(several, lambda b, h, i, j: (i + first, b, h, 0))
        out_shape = queries // kernel.sub_q, batch, width, kernel.sub_q
    block_values = pl.BlockSpec((None, head_dim, block_kv), lambda b, h, i, j: (b, h, j))
    if values.ndim == 4:
        parts, *_, part = values.shape
        first_head = first_row // head_dim
        block_values = pl.BlockSpec((parts, None, head_dim, part), lambda b, h, i, j: (0, b, first_head + h, 0))
    out_specs = [block_out, pl.BlockSpec((None, None, 2, block_q), lambda b, h, i, j: (b, h, 0, i + first))]
    # Aliased outputs need not be fetched; plain interpret mode wants them with the blocks of the result.
    into_specs = out_specs if kernel.interpret is True else [pl.BlockSpec(memory_space=pl.ANY)] * 2
    return pl.pallas_call(
        lambda *refs: body(*refs[:3], refs[3:given], *refs[given + len(into) :]),
        grid=(batch, heads, len(blocks), pl.cdiv(keys, block_kv)),
        in_specs=[
            pl.BlockSpec((None, block_q, head_dim), lambda b, h, i, j: (b, i + first, h)),
            pl.BlockSpec((None, block_kv, head_dim), lambda b, h, i, j: (b, j, h + before_keys)),
            block_values,
            *[block_out_t, block_log_sum][: given - 3],
            *into_specs[: len(into)],
        ],
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct(out_shape, dtype),
            jax.ShapeDtypeStruct((batch, heads, 2, queries), jnp.float32),
        ],
        input_output_aliases={given + index: index for index in range(len(into))},
        scratch_shapes=[
            pltpu.VMEM((head_dim * (2 if kernel.fold_scale else 1), block_q), query.dtype),
            pltpu.VMEM((head_dim, block_q), jnp.float32),
            pltpu.VMEM((1, block_q), jnp.float32),
            pltpu.VMEM((1, block_q), jnp.float32),
            pltpu.SMEM((1,), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=kernel.vmem_mib * 2**20,
        ),
        interpret=kernel.interpret,
        name=name,
    )(query, key, values, *before, *into)


def outline(query, key, value_t, before, out_t, rows, *scratch):
    """A stub with the kernel's operands: the program around it compiles to the same code."""
    out_t[...] = jnp.zeros_like(out_t)
    rows[...] = jnp.zeros_like(rows)


def heads_as_rows(query, key, value_t, head_dim):
    """Heads as rows of the batch, for heads of other than whole lanes: a block's last dimension must be whole lanes or
    the whole array."""
    batch, width, _ = value_t.shape
    query, key = (
        array.reshape(batch, -1, width // head_dim, head_dim).swapaxes(1, 2).reshape(-1, array.shape[1], head_dim)
        for array in (query[:, :, :width], key[:, :, -width:])
    )
    return query, key, value_t.reshape(len(query), head_dim, -1)


def fitting(block, part, tokens):
    """The block size, reduced to a multiple of `part` that covers all tokens if they are fewer."""
    return min(block, pl.cdiv(tokens, part) * part)


def fast_kernel(
    query, key, value_t, before, out_t, rows, query_t, sums, reference, total, wary,
    *, first_block, queries, keys, kernel,
):
    """One block of keys, tile by tile, with a softmax reference that is corrected only between tiles.

    first_block: the index of the grid's first block of queries
    query (block_q, head_dim)   key (block_kv, head_dim)
    value_t (head_dim, block_kv) or (parts, head_dim, keys of one)
    out_t (head_dim, block_q) or (pieces, head_dim, queries of one)
    before: (), or out_t in float32 and log_sum (1, block_q) of earlier keys
    rows (2, block_q): each row's log_sum, and 1 if it was ever out of range
    Carried from tile to tile: query_t (head_dim or twice that, block_q), and in float32 sums (head_dim, block_q),
    reference and total (1, block_q). So far, the output is sums / total and the log2 of the softmax's denominator
    reference + log2(total). If a tile takes a row out of range, its total beyond TRUSTED_SUM, the tile is recomputed
    with a running maximum, which costs 1.4 tiles; wary (1,) is then 1, and later tiles use it directly.
    """
    block_kv, block_q, number = key.shape[0], query.shape[0], pl.program_id(3)
    last, block_tiles = pl.cdiv(keys, block_kv) - 1, block_kv // kernel.tile_kv
    all_tiles = keys // kernel.tile_kv if keys > kernel.tile_kv else 0
    tail = keys - all_tiles * kernel.tile_kv
    real_rows = queries - (first_block + pl.program_id(2)) * block_q
    add = partial(add_keys, key, value_t, State(query_t, sums, reference, total), kernel)

    @pl.when(number == 0)
    def start():
        keep_query(query, query_t, kernel)
        rows[...] = jnp.zeros_like(rows)
        wary[0] = 0
        if before:
            go_on(before, sums, reference, total)
            return
        sums[...] = jnp.zeros_like(sums)
        total[...] = jnp.zeros_like(total)
        for columns in parts_of(block_q, kernel.sub_q):
            scores = scores_of(key[:kernel.chunk_kv, :], query_t[:, columns], kernel)
            reference[:, columns] = jnp.max(hide_tail(scores, keys), axis=0, keepdims=True)

    def attempt(first, size):
        """Add keys; returns whether a row left the range."""
        add(first, size, careful=False)
        within = lax.broadcasted_iota(jnp.int32, total.shape, 1) < real_rows  # overhanging rows have arbitrary values
        return jnp.any(within & (total[...] >= TRUSTED_SUM))

    def again(first, size, attempted):
        """Add keys with a running maximum: to the rows that the attempt lost or, without an attempt, to all."""
        wary[0] = 1
        lost, base = total[...] >= TRUSTED_SUM, reference[...]
        known = base + jnp.where(attempted, 0, jnp.log2(total[...]))  # an attempt leaves it in the reference

        @pl.when(attempted)
        def clear():  # a lost row's earlier keys have less than 2**-100 of its weight: drop them
            sums[...] = jnp.where(lost, 0, sums[...])
            total[...] = jnp.where(lost, 0, total[...])
            reference[...] = jnp.where(lost, LOWEST, -LOWEST)  # the others add zero weights and do not change

        group = CAREFUL_CHUNKS * kernel.chunk_kv
        groups, rest = divmod(size, group)
        if groups:
            pl.loop(0, groups)(lambda index: add(first + index * group, group, careful=True))
        if rest:
            add(first + groups * group, rest, careful=True)
        reference[...] = jnp.where(attempted & ~lost, base, reference[...])
        rise = reference[...] + jnp.log2(total[...]) - known
        rows[1:] = jnp.where(rise < np.log2(TRUSTED_SUM), rows[1:], 1)

    def stretch(index, tiles):
        """Tiles from `index` on, up to one where a row leaves the range, which is recomputed. Returns the next
        index."""
        trusting = wary[0] == 0

        def tile(state):
            missed = attempt(state[0] * kernel.tile_kv, kernel.tile_kv)
            return jnp.where(missed, state[0], state[0] + 1), missed

        index, missed = lax.while_loop(lambda state: (state[0] < tiles) & ~state[1], tile, (index, ~trusting))
        pl.when(missed)(lambda: again(index * kernel.tile_kv, kernel.tile_kv, trusting))
        return jnp.where(missed, index + 1, index)

    def finish():
        result = sums[...] / total[...]
        sound = jnp.isfinite(jnp.sum(jnp.abs(result), axis=0, keepdims=True))
        put(result, out_t)
        rows[:1] = jnp.where(sound, (reference[...] + jnp.log2(total[...])) / LOG2_E, jnp.nan)

    def end(first, size):
        """The last keys and the result together, which makes shorter code."""

        def both():
            missed = attempt(first, size)
            finish()
            return missed

        trusting = wary[0] == 0
        missed = lax.cond(trusting, both, lambda: ~trusting) if all_tiles else both()

        @pl.when(missed)
        def both_again():
            again(first, size, trusting)
            finish()

    if all_tiles:
        tiles = jnp.minimum(block_tiles, all_tiles - number * block_tiles)
        lax.while_loop(lambda index: index < tiles, lambda index: stretch(index, tiles), 0)
    if tail:  # separate code for the partial tile, so that the others need no mask
        pl.when(number == last)(lambda: end(all_tiles * kernel.tile_kv - last * block_kv, tail))
    else:
        pl.when(number == last)(finish)


def go_on(before, sums, reference, total):
    """Initialize from the output and log_sum of earlier keys, as after a tile."""
    out_t, log_sum = before
    sums[...] = out_t[...]
    reference[...] = log_sum[...] * LOG2_E
    total[...] = jnp.ones_like(total)


class State(NamedTuple):
    """The fast kernel's state between tiles; see there."""

    query_t: jax.Array
    sums: jax.Array
    reference: jax.Array
    total: jax.Array


def add_keys(key, value_t, state, kernel, first, real, careful):
    """Add `real` keys, from the block's `first` on, to the state, in steps of chunk_kv keys by sub_q queries."""
    first = pl.multiple_of(first, kernel.chunk_kv)

    def keys_at(begin, part):
        return key[pl.ds(first + begin, kernel.chunk_kv), :]

    def values_at(begin, part):
        values = values_of(value_t, first + begin, kernel.chunk_kv)
        if begin + kernel.chunk_kv > real:  # overhanging values may be NaN, which a zero weight would not cancel
            values = jnp.where(lax.broadcasted_iota(jnp.int32, (1, kernel.chunk_kv), 1) < real - begin, values, 0)
        return values

    chunks = Chunks(keys_at, values_at, lambda scores, begin, part: hide_tail(scores, real - begin))
    columns = parts_of(state.query_t.shape[1], kernel.sub_q)
    add_chunks(chunks, range(0, real, kernel.chunk_kv), columns, state, kernel, careful)


def values_of(value_t, begin, size):
    """`size` values from `begin` on, which are in one part."""
    if len(value_t.shape) == 2:
        return value_t[:, pl.ds(begin, size)]
    parts, _, tokens = value_t.shape
    part = sum((begin >= tokens * number).astype(jnp.int32) for number in range(1, parts))
    return value_t[part, :, pl.ds(pl.multiple_of(begin - part * tokens, size), size)]


def put(result, out_t):
    """(head_dim, block_q), into pieces if it goes there."""
    if len(out_t.shape) == 2:
        out_t[...] = result.astype(out_t.dtype)
        return
    pieces, _, size = out_t.shape
    for piece in range(pieces):
        out_t[piece] = result[:, piece * size : (piece + 1) * size].astype(out_t.dtype)


class Chunks(NamedTuple):
    """Where a step's keys and values come from; all are functions of a chunk and a part of the queries."""

    keys: Callable  # (chunk_kv, head_dim)
    values: Callable  # (head_dim, chunk_kv)
    hide: Callable  # (scores, chunk, part) -> scores, those of invalid keys masked


def add_chunks(chunks, numbers, parts, state, kernel, careful, ahead=1):
    """Add chunks of keys to the state's parts, which are slices of its columns.

    Source order is the schedule: a step's score product comes `ahead` steps before its softmax and its value product
    after the next step's, so that the MXU overlaps its neighbours' exponentials. If `careful`, a step's reference is
    the highest score so far; else all steps use the log-sum-exp of the keys before.
    """
    query_t, sums, reference, total = state
    bases, row_sums = [reference[:, columns] for columns in parts], [total[:, columns] for columns in parts]
    factors = [None] * len(parts)  # rescale sums before the step's are added
    if not careful:  # normalize: the log-sum-exp so far becomes the reference, the total 1
        for part, columns in enumerate(parts):
            known = row_sums[part]
            divisor = jnp.where(known == 0, 1, known)  # zero before the first tile
            # A sum that is still out of range is NaN, or of an overhanging row: it stays lost.
            bases[part] = jnp.where(known < TRUSTED_SUM, bases[part] + jnp.log2(divisor), jnp.inf)
            factors[part] = 1 / divisor
            row_sums[part] = jnp.where(known == 0, 0.0, 1.0)
            reference[:, columns] = bases[part]

    def scores_at(number, part):
        return chunks.hide(scores_of(chunks.keys(number, part), query_t[:, parts[part]], kernel), number, part)

    def accumulate(number, part, weights, factor):
        held = sums[:, parts[part]]
        held = held * factor if careful or number == numbers[0] else held
        sums[:, parts[part]] = held + dot(chunks.values(number, part), weights)

    steps = [(number, part) for number in numbers for part in range(len(parts))]
    pending, waiting = [scores_at(*step) for step in steps[:ahead]], None
    for index, (number, part) in enumerate(steps):
        pending += [scores_at(*step) for step in steps[index + ahead : index + ahead + 1]]
        scores = pending.pop(0)
        if careful:
            highest = jnp.maximum(bases[part], jnp.max(scores, axis=0, keepdims=True))
            factors[part] = jnp.exp2(bases[part] - highest)
            row_sums[part] *= factors[part]
            bases[part] = highest
        weights = jnp.exp2(scores - bases[part])
        row_sums[part] += jnp.sum(weights, axis=0, keepdims=True)
        if waiting:
            accumulate(*waiting)
        waiting = number, part, weights.astype(query_t.dtype), factors[part]
    accumulate(*waiting)
    for columns, base, row_sum in zip(parts, bases, row_sums):
        total[:, columns] = row_sum
        if careful:
            reference[:, columns] = base


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
    """Scores times log2 e, for the hardware's exp2: (keys, queries) float32."""
    if kernel.fold_scale:
        return dot(jnp.concatenate([key, key], axis=1), query_t)
    return dot(key, query_t) * (key.shape[1]**-0.5 * LOG2_E)


def hide_tail(scores, real):
    """Scores (keys, queries), masked for keys beyond the first `real` ones."""
    if scores.shape[0] <= real:
        return scores
    return jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 0) < real, scores, LOWEST)


def dot(left, right):
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def exact_kernel(
    query, key, value_t, before, out_t, rows, query_t, means, maximum, total, wary,
    *, first_block, queries, keys, kernel,
):
    """One block of keys with a running maximum, normalized throughout: correct for any finite input, but slower.

    Shapes as in fast_kernel; `wary` is not used. `means` is the normalized output so far, not a sum, so it cannot
    overflow.
    """
    block_kv, block_q = key.shape[0], query.shape[0]
    first_query, first_key = (first_block + pl.program_id(2)) * block_q, pl.program_id(3) * block_kv
    last = pl.num_programs(3) - 1

    @pl.when(pl.program_id(3) == 0)
    def start():
        keep_query(query, query_t, kernel)
        if before:
            go_on(before, means, maximum, total)
            return
        means[...] = jnp.zeros_like(means)
        maximum[...] = jnp.full_like(maximum, LOWEST)
        total[...] = jnp.zeros_like(total)

    def add_chunk(index):
        begin = pl.multiple_of(index * kernel.chunk_kv, kernel.chunk_kv)
        positions = first_key + begin + lax.broadcasted_iota(jnp.int32, (1, kernel.chunk_kv), 1)
        values = jnp.where(positions < keys, values_of(value_t, begin, kernel.chunk_kv), 0)
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

    near = True
    if kernel.window is not None:  # skip blocks of keys outside the window
        near = first_key <= first_query + block_q - 1 + kernel.window
        near &= first_key + block_kv > first_query - kernel.window
    pl.when(near)(lambda: pl.loop(0, block_kv // kernel.chunk_kv)(add_chunk))

    @pl.when(pl.program_id(3) == last)
    def finish():
        put(means[...], out_t)
        rows[:1] = (maximum[...] + jnp.log2(total[...])) / LOG2_E
        rows[1:] = jnp.zeros_like(total)


def visible(shape, first_key, first_query, keys, window):
    """The mask of a chunk: (keys, queries)."""
    key_at = first_key + lax.broadcasted_iota(jnp.int32, shape, 0)
    if window is None:
        return key_at < keys
    query_at = first_query + lax.broadcasted_iota(jnp.int32, shape, 1)
    return (key_at < keys) & (jnp.abs(query_at - key_at) <= window)
