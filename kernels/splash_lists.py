"""Attention to lists of key blocks for TPU in Pallas, by the steps of splash.py: sparse.listed on the chip.

    out_t, rescued = attention(query, key, value_t, chosen, query_blocks, key_blocks, head_dim, kernel)
    out_t, rescued = sla(query, key, value_t, keys, weight, bias, head_dim, kernel)     # lists and the linear branch

    query    (batch, queries, heads * head_dim)     value_t  (batch, heads * head_dim, keys)
    key      (batch, keys, heads * head_dim)        out_t    (batch, heads * head_dim, queries)
    chosen   (batch, heads, blocks of queries, count) int32: the blocks of keys that each attends to
    rescued  int32: how many rows of heads left the fast path's range and were recomputed

Query and key may have more heads than the values, as in splash.py.
All keys and values of a head lie in VMEM, so that an entry of a list is a slice of them. Two lists are computed in
turns: while one's scores become weights, the MXU has the other's products. SLA reads queries, keys and values once more
before, for the means of blocks and the sums of its linear branch, and the kernel adds that branch to its output. Left
to XLA, both take longer than the lists, by its own estimate: it makes a dozen passes.
"""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_torchax.kernels import sparse
from wan_torchax.kernels.settings import vmem_bytes
from wan_torchax.kernels.splash import (
    LOWEST,
    TRUSTED_SUM,
    Chunks,
    State,
    add_chunks,
    fitting,
    heads_as_rows,
    keep_query,
    scores_of,
)

LISTS = 2  # computed in turns
SUBLANES, STRETCHES = 8, 4  # blocks of queries or keys whose sums are written at once, and in one stretch of code
UNROLLED, CAREFUL_UNROLLED = 14, 7  # chunks of code; a longer stretch has fewer ends, where the MXU waits
AHEAD = 3  # steps are half as wide as the dense kernel's, and the MXU must not wait for their exponentials


def sla(query, key, value_t, keys, weight, bias, head_dim, kernel):
    blocks = [sparse.Blocks.even(keys, size) for size in (kernel.sparse.block_q, kernel.sparse.block_kv)]
    with jax.named_scope("lists"):
        *means, sums, total = passed(query, key, value_t, *blocks, head_dim, kernel)
        chosen = sparse.top(
            sparse.scores_of_means(*means, blocks[1], query.dtype), kernel.sparse.count(len(blocks[1].sizes))
        )
    linear = sparse.Linear.of(sums, total, weight, bias, query.dtype)
    return attention(query, key, value_t, chosen, *blocks, head_dim, kernel, linear)


def attention(query, key, value_t, chosen, query_blocks, key_blocks, head_dim, kernel, linear=None):
    """`linear`: what SLA's linear branch knows of the keys; it is added to the output."""
    (batch, queries, _), width = query.shape, value_t.shape[1]
    heads, keys = width // head_dim, sum(key_blocks.sizes)
    lists = sparse.ordered(chosen, key_blocks, kernel.chunk_kv // key_blocks.size)
    branch = () if linear is None else (
        linear.sums.swapaxes(2, 3), linear.total[:, :, None], linear.bias.astype(jnp.float32)[:, None]
    )
    if head_dim % 128:
        query, key, value_t = heads_as_rows(query, key, value_t, head_dim)
        lists, *per_head = (
            array.reshape(batch * heads, 1, *array.shape[2:]) for array in (lists, *branch[:2])
        )
        branch = (*per_head, *branch[2:])
    arrays = query, key, value_t
    out_t, flags = call(arrays, lists, keys, head_dim, query_blocks.size, key_blocks.size, kernel, branch)
    return out_t.reshape(batch, width, queries), jnp.sum(flags > 0, dtype=jnp.int32)


# ---------------------------------------------------------------- one pass over queries, keys and values


def passed(query, key, value_t, query_blocks, key_blocks, head_dim, kernel):
    """The means of query and key blocks (batch, heads, blocks, head_dim), and of all keys' features the sums with their
    values (batch, heads, head_dim, head_dim) and the total (batch, heads, head_dim); all in float32."""
    batch, width, _ = value_t.shape
    heads = width // head_dim
    if head_dim % 128:
        query, key, value_t = heads_as_rows(query, key, value_t, head_dim)
    keys, sizes = sum(key_blocks.sizes), (query_blocks.size, key_blocks.size)
    rows, parts = SUBLANES * max(sizes), value_t.shape[1] // head_dim
    steps, before_keys = pl.cdiv(keys, rows), key.shape[2] // head_dim - parts

    def of_blocks(size):
        return pl.BlockSpec((None, None, rows // size, head_dim), lambda b, h, i: (b, h, i, 0))

    def shaped(*shape):
        return jax.ShapeDtypeStruct((query.shape[0], parts, *shape, head_dim), jnp.float32)

    *sums, products, total = pl.pallas_call(
        partial(sums_kernel, keys=keys, sizes=sizes),
        grid=(query.shape[0], parts, steps),
        in_specs=[
            pl.BlockSpec((None, rows, head_dim), lambda b, h, i: (b, i, h)),
            pl.BlockSpec((None, rows, head_dim), lambda b, h, i: (b, i, h + before_keys)),
            pl.BlockSpec((None, head_dim, rows), lambda b, h, i: (b, h, i)),
        ],
        out_specs=[
            *map(of_blocks, sizes), pl.BlockSpec((None, None, head_dim, head_dim), lambda b, h, i: (b, h, 0, 0)),
            pl.BlockSpec((None, None, 1, head_dim), lambda b, h, i: (b, h, 0, 0)),
        ],
        out_shape=[*(shaped(steps * rows // size) for size in sizes), shaped(head_dim), shaped(1)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=kernel.vmem_mib * 2**20
        ),
        interpret=kernel.interpret,
        name="sums_kernel",
    )(query, key, value_t)
    means = [
        one.reshape(batch, heads, -1, head_dim)[:, :, :len(blocks.sizes)] / np.array(blocks.sizes, np.float32)[:, None]
        for one, blocks in zip(sums, (query_blocks, key_blocks))
    ]
    return *means, products.reshape(batch, heads, head_dim, head_dim).swapaxes(2, 3), total.reshape(batch, heads, -1)


def sums_kernel(query, key, value_t, query_sums, key_sums, products_t, total, *, keys, sizes):
    """query, key (rows, head_dim)   value_t (head_dim, rows)   query_sums, key_sums (blocks of rows, head_dim)
    products_t (head_dim of values, head_dim of features) and total (1, head_dim), summed over all rows"""
    rows, stretch = query.shape[0], max(sizes)

    @pl.when(pl.program_id(2) == 0)
    def start():
        products_t[...] = jnp.zeros_like(products_t)
        total[...] = jnp.zeros_like(total)

    left = keys - pl.program_id(2) * rows  # rows beyond have arbitrary values

    @pl.loop(0, rows // stretch, unroll=STRETCHES)
    def one_stretch(number):
        begin = pl.multiple_of(number * stretch, stretch)
        some = pl.ds(begin, stretch)
        valid = begin + lax.broadcasted_iota(jnp.int32, (stretch, 1), 0) < left
        along = begin + lax.broadcasted_iota(jnp.int32, (1, stretch), 1) < left
        queries, those = (jnp.where(valid, array[some, :].astype(jnp.float32), 0) for array in (query, key))
        for array, out, size in zip((queries, those), (query_sums, key_sums), sizes):
            count = stretch // size
            out[pl.ds(number * count, count), :] = jnp.sum(array.reshape(count, size, -1), axis=1)
        features = exponentials(those)
        features = jnp.where(valid, features / jnp.sum(features, axis=1, keepdims=True), 0).astype(key.dtype)
        total[...] += jnp.sum(features.astype(jnp.float32), axis=0, keepdims=True)
        values = jnp.where(along, value_t[:, some], 0)
        products_t[...] += jnp.dot(values, features, preferred_element_type=jnp.float32, precision=precision(key))


def exponentials(rows):
    """Of rows of channels, less their highest."""
    return jnp.exp(rows - jnp.max(rows, axis=1, keepdims=True))


def precision(array):
    """Of products: what the inputs have."""
    return lax.Precision.HIGHEST if array.dtype == jnp.float32 else None


# ---------------------------------------------------------------- lists


def call(arrays, lists, keys, head_dim, list_q, list_kv, kernel, branch=()):
    """`branch`: SLA's sums (batch, heads, outputs, features), total (batch, heads, 1, features), bias (outputs, 1)."""
    query, key, value_t = arrays
    (batch, queries, _), width = query.shape, value_t.shape[1]
    heads, count = width // head_dim, lists.shape[-1]
    before_keys = key.shape[2] // head_dim - heads
    block_q = fitting(kernel.block_q, LISTS * list_q, queries)
    blocks, rows, tokens = pl.cdiv(queries, block_q), block_q // list_q, pl.cdiv(keys, 128) * 128
    lists = jnp.pad(lists, ((0, 0), (0, 0), (0, blocks * rows - lists.shape[2]), (0, 0)))
    # The next head's keys and values are fetched beside this one's computation if VMEM has room for both: a v6e's has.
    fits_twice = vmem_bytes(tokens, block_q, head_dim, kernel, buffers=2) <= kernel.vmem_mib * 2**20
    buffers = None if fits_twice else pl.Buffered(1)
    body = partial(lists_kernel, queries=queries, keys=keys, list_q=list_q, list_kv=list_kv, kernel=kernel)
    return pl.pallas_call(
        outline if kernel.outline else body,
        grid=(batch, heads, blocks),
        in_specs=[
            pl.BlockSpec((None, None, rows, count), lambda b, h, i: (b, h, i, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((None, block_q, head_dim), lambda b, h, i: (b, i, h)),
            pl.BlockSpec((None, tokens, head_dim), lambda b, h, i: (b, 0, h + before_keys), pipeline_mode=buffers),
            pl.BlockSpec((None, head_dim, tokens), lambda b, h, i: (b, h, 0), pipeline_mode=buffers),
            [
                pl.BlockSpec((None, None, *array.shape[2:]), lambda b, h, i: (b, h, 0, 0)) for array in branch[:2]
            ] + [pl.BlockSpec(array.shape, lambda b, h, i: (0, 0)) for array in branch[2:]],
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
    )(lists, query, key, value_t, list(branch))


def outline(lists, query, key, value_t, branch, out_t, flags, *scratch):
    """A stub with the kernel's operands: the program around it compiles to the same code."""
    out_t[...] = jnp.zeros_like(out_t)
    flags[...] = jnp.zeros_like(flags)


def lists_kernel(
    lists, query, key, value_t, branch, out_t, flags, query_t, sums, reference, total,
    *, queries, keys, list_q, list_kv, kernel,
):
    """All lists of a block of queries, two at a time; the state is splash.fast_kernel's.

    lists (block_q / list_q, entries)   query (block_q, head_dim)   key (keys, head_dim)   value_t (head_dim, keys)
    branch: [], or what `call` says   flags (1, block_q): 1 for rows that were recomputed with a running maximum
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

        for columns in parts:
            out = sums[:, columns] / total[:, columns]
            out += linear_part(query[columns, :], *branch) if branch else 0
            out_t[:, columns] = out.astype(out_t.dtype)


def linear_part(query, sums_t, total, bias):
    """SLA's linear branch for some rows (rows, head_dim), transposed. Features are divided by the rows' denominators,
    which are columns here, and would have to become rows for the product."""
    powers = exponentials(query.astype(jnp.float32))
    below = jnp.sum(powers * (total[...] + sparse.LINEAR_EPSILON), axis=1, keepdims=True)
    features = (powers / below).astype(query.dtype)
    products = lax.dot_general(
        sums_t[...], features, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32, precision=precision(query)
    )
    return products + bias[...]
