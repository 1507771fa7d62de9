"""Attention to lists of key blocks for TPU in Pallas, by the steps of splash.py: sparse.listed on the chip.

    out_t, rescued = attention(query, key, value_t, chosen, query_blocks, key_blocks, head_dim, kernel)

    query    (batch, queries, heads * head_dim)     value_t  (batch, heads * head_dim, keys)
    key      (batch, keys, heads * head_dim)        out_t    (batch, heads * head_dim, queries)
    chosen   (batch, heads, blocks of queries, count) int32: the blocks of keys that each attends to
    rescued  int32: how many rows of heads left the fast path's range and were recomputed

All keys and values of a head lie in VMEM, so that an entry of a list is a slice of them. Two lists are computed in
turns: while one's scores become weights, the MXU has the other's products.
"""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_torchax.kernels import sparse
from wan_torchax.kernels.splash import (
    LOWEST,
    TRUSTED_SUM,
    Chunks,
    State,
    add_chunks,
    fitting,
    keep_query,
    scores_of,
)

LISTS = 2  # computed in turns
UNROLLED, CAREFUL_UNROLLED = 14, 7  # chunks of code; a longer stretch has fewer ends, where the MXU waits
AHEAD = 3  # steps are half as wide as the dense kernel's, and the MXU must not wait for their exponentials


def attention(query, key, value_t, chosen, query_blocks, key_blocks, head_dim, kernel):
    batch, queries, width = query.shape
    heads, keys = width // head_dim, sum(key_blocks.sizes)
    lists = sparse.ordered(chosen, key_blocks, kernel.chunk_kv // key_blocks.size)
    if head_dim % 128:  # as in splash.attention
        query, key = (
            array.reshape(batch, -1, heads, head_dim).swapaxes(1, 2).reshape(batch * heads, -1, head_dim)
            for array in (query, key)
        )
        value_t, lists = value_t.reshape(batch * heads, head_dim, -1), lists.reshape(batch * heads, 1, *lists.shape[2:])
    out_t, flags = call((query, key, value_t), lists, keys, head_dim, query_blocks.size, key_blocks.size, kernel)
    return out_t.reshape(batch, width, queries), jnp.sum(flags > 0, dtype=jnp.int32)


def call(arrays, lists, keys, head_dim, list_q, list_kv, kernel):
    query, key, value_t = arrays
    batch, queries, width = query.shape
    heads, count = width // head_dim, lists.shape[-1]
    block_q = fitting(kernel.block_q, LISTS * list_q, queries)
    blocks, rows, tokens = pl.cdiv(queries, block_q), block_q // list_q, pl.cdiv(keys, 128) * 128
    lists = jnp.pad(lists, ((0, 0), (0, 0), (0, blocks * rows - lists.shape[2]), (0, 0)))
    body = partial(lists_kernel, queries=queries, keys=keys, list_q=list_q, list_kv=list_kv, kernel=kernel)
    return pl.pallas_call(
        outline if kernel.outline else body,
        grid=(batch, heads, blocks),
        in_specs=[
            pl.BlockSpec((None, None, rows, count), lambda b, h, i: (b, h, i, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((None, block_q, head_dim), lambda b, h, i: (b, i, h)),
            pl.BlockSpec((None, tokens, head_dim), lambda b, h, i: (b, 0, h)),
            pl.BlockSpec((None, head_dim, tokens), lambda b, h, i: (b, h, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, head_dim, block_q), lambda b, h, i: (b, h, i)),
            pl.BlockSpec((None, None, 1, block_q), lambda b, h, i: (b, h, 0, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, width, queries), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((head_dim * (2 if kernel.fold_scale else 1), block_q), query.dtype),
            pltpu.VMEM((head_dim, block_q), jnp.float32),
            pltpu.VMEM((1, block_q), jnp.float32),
            pltpu.VMEM((1, block_q), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"), vmem_limit_bytes=kernel.vmem_mib * 2**20
        ),
        interpret=kernel.interpret,
        name="lists_kernel",
    )(lists, query, key, value_t)


def outline(lists, query, key, value_t, out_t, flags, *scratch):
    """A stub with the kernel's operands: the program around it compiles to the same code."""
    out_t[...] = jnp.zeros_like(out_t)
    flags[...] = jnp.zeros_like(flags)


def lists_kernel(
    lists, query, key, value_t, out_t, flags, query_t, sums, reference, total,
    *, queries, keys, list_q, list_kv, kernel,
):
    """All lists of a block of queries, two at a time; the state is splash.fast_kernel's.

    lists (block_q / list_q, entries)   query (block_q, head_dim)   key (keys, head_dim)   value_t (head_dim, keys)
    flags (1, block_q): 1 for rows that were recomputed with a running maximum
    """
    block_q, entries = query.shape[0], kernel.chunk_kv // list_kv
    chunks, real_rows = lists.shape[1] // entries, queries - pl.program_id(2) * block_q
    state = State(query_t, sums, reference, total)
    keep_query(query, query_t, kernel)
    flags[...] = jnp.zeros_like(flags)

    @pl.loop(0, block_q // (LISTS * list_q))
    def some_lists(number):
        begin = pl.multiple_of(number * LISTS * list_q, LISTS * list_q)
        together = pl.ds(begin, LISTS * list_q)
        parts = [pl.ds(begin + part * list_q, list_q) for part in range(LISTS)]

        def source(base, last=None):
            """Chunks from entry `base` of the lists on; the chunk `last` may have invalid keys."""

            def block(chunk, part, entry):
                return lists[number * LISTS + part, base + chunk * entries + entry]

            def tokens(chunk, part, entry):
                first = jnp.minimum(block(chunk, part, entry), pl.cdiv(keys, list_kv) - 1) * list_kv
                return pl.ds(pl.multiple_of(first, list_kv), list_kv)

            def valid(chunk, part, axis):
                """(keys, 1) or (1, keys) of a chunk: which are valid."""
                shape = (list_kv, 1) if axis == 0 else (1, list_kv)
                counts = [keys - block(chunk, part, entry) * list_kv for entry in range(entries)]
                masks = [lax.broadcasted_iota(jnp.int32, shape, axis) < count for count in counts]
                return jnp.concatenate([mask.astype(jnp.int32) for mask in masks], axis=axis) > 0

            def keys_at(chunk, part):
                return jnp.concatenate([key[tokens(chunk, part, entry), :] for entry in range(entries)], axis=0)

            def values_at(chunk, part):
                values = [value_t[:, tokens(chunk, part, entry)] for entry in range(entries)]
                joined = jnp.concatenate(values, axis=1)
                return jnp.where(valid(chunk, part, 1), joined, 0) if chunk == last else joined

            def hide(scores, chunk, part):
                return jnp.where(valid(chunk, part, 0), scores, LOWEST) if chunk == last else scores

            return Chunks(keys_at, values_at, hide)

        def everything(unrolled, careful):
            groups, rest = divmod(chunks - 1, unrolled)
            add = partial(add_chunks, parts=parts, state=state, kernel=kernel, careful=careful, ahead=AHEAD)
            if groups:
                size = unrolled * entries
                pl.loop(0, groups)(lambda group: add(source(group * size), range(unrolled)))
            add(source(groups * unrolled * entries, last=rest), range(rest + 1))

        sums[:, together] = jnp.zeros((sums.shape[0], LISTS * list_q), jnp.float32)
        total[:, together] = jnp.zeros((1, LISTS * list_q), jnp.float32)
        first = source(0, last=0 if chunks == 1 else None)
        for part, columns in enumerate(parts):
            scores = first.hide(scores_of(first.keys(0, part), query_t[:, columns], kernel), 0, part)
            reference[:, columns] = jnp.max(scores, axis=0, keepdims=True)
        everything(UNROLLED, careful=False)
        within = begin + lax.broadcasted_iota(jnp.int32, (1, LISTS * list_q), 1) < real_rows
        lost = within & ~(total[:, together] < TRUSTED_SUM)

        @pl.when(jnp.any(lost))
        def again():
            sums[:, together] = jnp.zeros((sums.shape[0], LISTS * list_q), jnp.float32)
            total[:, together] = jnp.zeros((1, LISTS * list_q), jnp.float32)
            reference[:, together] = jnp.full((1, LISTS * list_q), LOWEST)
            everything(CAREFUL_UNROLLED, careful=True)
            flags[:, together] = lost.astype(jnp.float32)

        out_t[:, together] = (sums[:, together] / total[:, together]).astype(out_t.dtype)
