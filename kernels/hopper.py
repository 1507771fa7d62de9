"""Full attention for NVIDIA Hopper in Pallas (Mosaic GPU): forward, bf16 or fp16 in and out, float32 in between.

    out, log_sum = attention(query, key, value, keys, head_dim, kernel)

    query, out  (batch, queries, heads * head_dim)     key, value  (batch, tokens, heads * head_dim)
    log_sum     (batch, heads, queries) float32: log of the sum of exp(score), for merging with other keys
    keys        how many of the tokens count; the rest is padding, which must be finite

A block of threads holds a tile of queries, 64 rows for each of its two compute warpgroups, and walks over all keys. A third
warpgroup does nothing but fetch blocks of keys and values into rings of buffers in shared memory. The copies leave out what
overhangs an array: zeros are read there and nothing is written.
"""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

GROUPS, ROWS = 2, 64  # compute warpgroups of a block of threads, and the queries of each
STAGES = 2  # buffers of a ring: one is filled while the other is used
LOG2_E = 1.4426950408889634
TRUSTED_SUM = 2.0**100  # the fast kernel's largest row sum: well below overflow, also of the sum times a value


def attention(query, key, value, keys, head_dim, kernel):
    """One Pallas call: a grid over batch, heads and, fastest, query tiles, so that a head's keys and values stay in L2."""
    batch, queries, width = query.shape
    heads, tiles, block_kv = width // head_dim, pl.cdiv(queries, GROUPS * ROWS), kernel.block_kv
    # Copies move tiles of 8 tokens, so only their number may overhang. Wan's token counts need no padding.
    query, key, value = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0))) for x in (query, key, value))
    swizzle = next(size for size in (128, 64, 32) if block_kv % (size // 2) == 0)  # in bytes; a product goes this deep at a time
    ring = partial(plgpu.SMEM, dtype=query.dtype, transforms=(plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)))
    out, log_sum = plgpu.kernel(
        partial(body, keys=keys, fast=query.dtype == jnp.bfloat16),
        out_type=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, tiles * GROUPS * ROWS), jnp.float32),
        ],
        scratch_types=dict(
            query_tile=ring((GROUPS, ROWS, head_dim)),
            key_ring=ring((STAGES, block_kv, head_dim)),
            value_ring=ring((STAGES, block_kv, head_dim)),
            log_sum_tile=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            total_tile=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            largest_tile=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            query_ready=plgpu.Barrier(num_barriers=GROUPS),
            key_ready=plgpu.Barrier(num_barriers=STAGES),
            value_ready=plgpu.Barrier(num_barriers=STAGES),
            key_free=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            value_free=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            largest_ready=plgpu.Barrier(num_arrivals=GROUPS),
        ),
        grid=(batch, heads, tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        kernel_name="hopper_attention",
    )(query, key, value)
    return out[:, :queries], log_sum[..., :queries]


def body(query, key, value, out, log_sum, *, query_tile, key_ring, value_ring, log_sum_tile, total_tile, largest_tile,
         query_ready, key_ready, value_ready, key_free, value_free, largest_ready, keys, fast):
    """A tile of queries. Fast first: the weights' reference is the maximum of the first block of keys, not a running one, which saves
    the maxima and the corrections of all later blocks. A row whose later scores are so far above it that its weights come near
    overflow shows in its total, and then the tile is computed again, exactly. fp16 has no range for such weights: exact at once."""
    _, block_kv, head_dim = key_ring.shape
    batch, head, group = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("group")
    lanes, steps = pl.ds(head * head_dim, head_dim), pl.cdiv(keys, block_kv)

    def tell_largest(total):
        """The largest total of a group's rows, in all of its row of `largest_tile`: only reductions along rows stay inside a warp."""
        total_tile[group] = total
        plgpu.commit_smem()
        totals = plgpu.load(total_tile.at[group], (), layout=plgpu.Layout.WGMMA.reduce(0))
        largest_tile[group] = jnp.max(lax.broadcast_in_dim(totals, (ROWS, ROWS), [1]), axis=1)
        plgpu.commit_smem()
        plgpu.barrier_arrive(largest_ready)

    def lost():
        plgpu.barrier_wait(largest_ready)
        return ~((largest_tile[0, 0] < TRUSTED_SUM) & (largest_tile[1, 0] < TRUSTED_SUM))

    def fetch_all(again=False):
        @pl.loop(0, steps)
        def fetch_blocks(step):
            slot, tokens = lax.rem(step, STAGES), pl.ds(step * block_kv, block_kv)

            def fetch_block(array, ring, ready, free):
                pl.when(again or step >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(array.at[batch, tokens, lanes], ring.at[slot], ready.at[slot])

            fetch_block(key, key_ring, key_ready, key_free)
            fetch_block(value, value_ring, value_ready, value_free)

    def compute(exact):
        rows = pl.ds((lax.axis_index("tile") * GROUPS + group) * ROWS, ROWS)
        own_query, own_log_sum = query_tile.at[group], log_sum_tile.at[group]
        plgpu.copy_gmem_to_smem(query.at[batch, rows, lanes], own_query, query_ready.at[group])
        plgpu.barrier_wait(query_ready.at[group])
        attend = partial(attend_rows, own_query, key_ring, value_ring, key_ready, value_ready, key_free, value_free, keys, exact)
        sums, maximum, total = pl.run_scoped(attend, plgpu.ACC((ROWS, head_dim), jnp.float32))
        own_log_sum[...] = maximum / LOG2_E + jnp.log(total)
        own_query[...] = (sums / along(total, sums.shape)).astype(out.dtype)
        plgpu.commit_smem()
        if not exact:
            tell_largest(total)
        plgpu.copy_smem_to_gmem(own_query, out.at[batch, rows, lanes])
        plgpu.copy_smem_to_gmem(own_log_sum, log_sum.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == GROUPS)
    def fetching_group():
        plgpu.set_max_registers(24, action="decrease")
        fetch_all()
        if fast:
            pl.when(lost())(partial(fetch_all, again=True))

    @pl.when(group < GROUPS)
    def computing_groups():
        plgpu.set_max_registers(240, action="increase")
        compute(exact=not fast)
        if fast:
            pl.when(lost())(partial(compute, exact=True))


def attend_rows(query, key_ring, value_ring, key_ready, value_ready, key_free, value_free, keys, exact, sums):
    """One warpgroup's rows over all key blocks: gives the weighted values, the maximum (times log2 e) and the weights' sum.

    A step starts the score product of its block and the value product of the previous one, and takes the softmax while the
    second still runs. The compiler keeps to that order only because (a) the softmax ends in an optimization barrier, (b) the
    wait for the next keys, a branch, parts it from the wait for the value product, and (c) the weights are rounded behind
    that wait, since no register that a product reads may be written before it is done.
    """
    _, block_kv, head_dim = key_ring.shape
    steps, scale, dtype = pl.cdiv(keys, block_kv), head_dim**-0.5 * LOG2_E, query.dtype

    def multiply_keys(scores, slot):
        plgpu.wgmma(scores, query, key_ring.at[slot].transpose((1, 0)))

    def multiply_values(weights, slot):
        plgpu.barrier_wait(value_ready.at[slot])
        plgpu.wgmma(sums, weights, value_ring.at[slot])

    def softmax(scores, maximum, total, first, last):
        if last and keys % block_kv:
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where(column < keys % block_kv, scores, -jnp.inf)
        correction = None
        if first or exact:
            new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1) * scale)
            correction = jnp.exp2(maximum - new_maximum)
            maximum, total = new_maximum, total * correction
        weights = jnp.exp2(scores * scale - along(maximum, scores.shape))
        return lax.optimization_barrier((weights, maximum, total + jnp.sum(weights, axis=1), correction))

    def first_step(scores):
        plgpu.barrier_wait(key_ready.at[0])
        multiply_keys(scores, 0)
        weights, maximum, total, _ = softmax(scores[...], row(-jnp.inf), row(0), True, steps == 1)
        plgpu.barrier_arrive(key_free.at[0])
        if steps > 1:
            plgpu.barrier_wait(key_ready.at[1])
        return weights.astype(dtype), maximum, total

    def step(index, state, last=False):
        weights, old_maximum, old_total = state
        slot, previous = lax.rem(index, STAGES), lax.rem(index - 1, STAGES)

        def overlapped(scores):
            multiply_keys(scores, slot)
            multiply_values(weights, previous)
            values = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            plgpu.barrier_arrive(key_free.at[slot])
            results = softmax(values, old_maximum, old_total, False, last)
            if not last:
                plgpu.barrier_wait(key_ready.at[lax.rem(index + 1, STAGES)])
            return results

        new_weights, maximum, total, correction = pl.run_scoped(overlapped, plgpu.ACC((ROWS, block_kv), jnp.float32))
        held = plgpu.wgmma_accumulator_load(sums)
        plgpu.barrier_arrive(value_free.at[previous])
        if exact:
            sums[...] = held * along(correction, held.shape)
        return new_weights.astype(dtype), maximum, total

    state = pl.run_scoped(first_step, plgpu.ACC((ROWS, block_kv), jnp.float32))
    state = lax.fori_loop(1, steps - 1, step, state)
    if steps > 1:
        state = step(jnp.int32(steps - 1), state, last=True)
    weights, maximum, total = state
    multiply_values(weights, (steps - 1) % STAGES)
    result = sums[...]
    plgpu.barrier_arrive(value_free.at[(steps - 1) % STAGES])
    return result, maximum, total


def row(value):
    """A value for each query, where the scores' row reductions live."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def along(values, shape):
    """One value for each query, repeated along its row."""
    return lax.broadcast_in_dim(values, shape, [0])
