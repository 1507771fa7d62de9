"""Full attention for NVIDIA Hopper in Pallas (Mosaic GPU): forward, bf16 in and out, float32 in between.

    out, log_sum = attention(query, key, value, keys, head_dim, kernel)

    query, out  (batch, queries, heads * head_dim)     key, value  (batch, tokens, heads * head_dim)
    log_sum     (batch, heads, queries) float32: log of the sum of exp(score), for merging with other keys
    keys        how many of the tokens count; the rest is padding, which must be finite

The fast kernel takes the maximum of a row's first block of keys as its weights' reference, not a running one: that
saves the maxima and corrections of all later blocks. A row whose later scores are so far above it that its weights
come near overflow is lost. Its log_sum says so, and the exact kernel, which otherwise ends at once, computes every
row again with a running maximum.

Copies leave out what overhangs an array: zeros are read there and nothing is written.
"""
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # queries of a warpgroup
GROUPS = 2  # compute warpgroups of a block of threads in the fast kernel
STAGES = 2  # buffers of a ring: one is filled while the other is used
BLOCKS = 132  # blocks of threads of the exact kernel, one for each multiprocessor of an H200
LOG2_E = 1.4426950408889634
TRUSTED_SUM = 2.0**100  # the fast kernel's largest row sum: well below overflow, also of the sum times a value


def attention(query, key, value, keys, head_dim, kernel):
    queries = query.shape[1]
    # Copies move tiles of 8 tokens, so only their number may overhang. Wan's token counts need no padding.
    query, key, value = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0))) for x in (query, key, value))
    out, log_sum = fast(query, key, value, keys, head_dim, kernel.block_kv)
    lost = ~jnp.all(jnp.isfinite(log_sum))
    out, log_sum = exact_if(lost, (query, key, value), (out, log_sum), keys, head_dim)
    return out[:, :queries], log_sum[..., :queries]


def tiles_for_products(dtype, swizzle=128):
    """Shared memory as the tensor cores read it; `swizzle` is how many bytes deep a product goes at a time."""
    transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    return partial(plgpu.SMEM, dtype=dtype, transforms=transforms)


def masked(scores, first, keys):
    """Scores of the keys from `first` on, those past the last key at minus infinity."""
    column = first + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(column < keys, scores, -jnp.inf)


def row(value):
    """A value for each query, where the scores' row reductions live."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def along(values, shape):
    """One value for each query, repeated along its row."""
    return lax.broadcast_in_dim(values, shape, [0])


# ---------------------------------------------------------------- the fast kernel


class Ring(NamedTuple):
    """Buffers in shared memory that one warpgroup fills and the others use, with barriers for each."""

    buffer: object  # (STAGES, block_kv, head_dim)
    ready: object
    free: object


def fast(query, key, value, keys, head_dim, block_kv):
    """A block of threads holds a tile of queries, a part for each of its compute warpgroups, and walks over all keys.

    One more warpgroup does nothing but fetch blocks of keys and values into rings of buffers. In the grid query tiles
    are fastest, so that a head's keys and values stay in L2.
    """
    batch, queries, width = query.shape
    heads, tiles = width // head_dim, pl.cdiv(queries, GROUPS * ROWS)
    ring = tiles_for_products(query.dtype, next(size for size in (128, 64, 32) if block_kv % (size // 2) == 0))
    return plgpu.kernel(
        partial(fast_body, keys=keys),
        out_type=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, tiles * GROUPS * ROWS), jnp.float32),
        ],
        scratch_types=dict(
            query_tile=ring((GROUPS, ROWS, head_dim)),
            key_ring=ring((STAGES, block_kv, head_dim)),
            value_ring=ring((STAGES, block_kv, head_dim)),
            log_sum_tile=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            query_ready=plgpu.Barrier(num_barriers=GROUPS),
            key_ready=plgpu.Barrier(num_barriers=STAGES),
            value_ready=plgpu.Barrier(num_barriers=STAGES),
            key_free=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            value_free=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
        ),
        grid=(batch, heads, tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="hopper_fast",
    )(query, key, value)


def fast_body(query, key, value, out, log_sum, *, query_tile, key_ring, value_ring, log_sum_tile,
              query_ready, key_ready, value_ready, key_free, value_free, keys):
    _, block_kv, head_dim = key_ring.shape
    batch, head, group = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("group")
    lanes = pl.ds(head * head_dim, head_dim)
    key_blocks, value_blocks = Ring(key_ring, key_ready, key_free), Ring(value_ring, value_ready, value_free)

    @pl.when(group == GROUPS)
    def fetch():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, pl.cdiv(keys, block_kv))
        def fetch_blocks(step):
            slot, tokens = lax.rem(step, STAGES), pl.ds(step * block_kv, block_kv)

            def fetch_block(array, ring):
                pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
                plgpu.copy_gmem_to_smem(array.at[batch, tokens, lanes], ring.buffer.at[slot], ring.ready.at[slot])

            fetch_block(key, key_blocks)
            fetch_block(value, value_blocks)

    @pl.when(group < GROUPS)
    def compute():
        plgpu.set_max_registers(240, action="increase")
        rows = pl.ds((lax.axis_index("tile") * GROUPS + group) * ROWS, ROWS)
        own_query, own_log_sum = query_tile.at[group], log_sum_tile.at[group]
        plgpu.copy_gmem_to_smem(query.at[batch, rows, lanes], own_query, query_ready.at[group])
        plgpu.barrier_wait(query_ready.at[group])
        attend = partial(attend_fast, own_query, key_blocks, value_blocks, keys)
        sums, maximum, total = pl.run_scoped(attend, plgpu.ACC((ROWS, head_dim), jnp.float32))
        own_log_sum[...] = jnp.where(total < TRUSTED_SUM, maximum / LOG2_E + jnp.log(total), jnp.nan)
        own_query[...] = (sums / along(total, sums.shape)).astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_query, out.at[batch, rows, lanes])
        plgpu.copy_smem_to_gmem(own_log_sum, log_sum.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)


def attend_fast(query, key_blocks, value_blocks, keys, sums):
    """One warpgroup's rows over all key blocks: the weighted values, the reference (times log2 e), the weights' sum.

    A step starts the score product of its block and the value product of the previous one, and takes the softmax
    while the second still runs. The compiler keeps to that order only because (a) the softmax ends in an optimization
    barrier, (b) the wait for the next keys, a branch, parts it from the wait for the value product, and (c) the
    weights are rounded behind that wait, since no register that a product reads may be written before it is done.
    """
    _, block_kv, head_dim = key_blocks.buffer.shape
    steps, scale, dtype = pl.cdiv(keys, block_kv), head_dim**-0.5 * LOG2_E, query.dtype

    def multiply_keys(scores, slot):
        plgpu.wgmma(scores, query, key_blocks.buffer.at[slot].transpose((1, 0)))

    def multiply_values(weights, slot):
        plgpu.barrier_wait(value_blocks.ready.at[slot])
        plgpu.wgmma(sums, weights, value_blocks.buffer.at[slot])

    def real(scores, last):
        """Only the last block can hold more than the keys."""
        return masked(scores, (steps - 1) * block_kv, keys) if last and keys % block_kv else scores

    def first_step(scores):
        plgpu.barrier_wait(key_blocks.ready.at[0])
        multiply_keys(scores, 0)
        values = real(scores[...], steps == 1)
        maximum = jnp.max(values, axis=1) * scale
        weights = jnp.exp2(values * scale - along(maximum, values.shape))
        weights, total = lax.optimization_barrier((weights, jnp.sum(weights, axis=1)))
        plgpu.barrier_arrive(key_blocks.free.at[0])
        if steps > 1:
            plgpu.barrier_wait(key_blocks.ready.at[1])
        return weights.astype(dtype), maximum, total

    def step(index, state, last=False):
        weights, maximum, old_total = state
        slot, previous = lax.rem(index, STAGES), lax.rem(index - 1, STAGES)

        def overlapped(scores):
            multiply_keys(scores, slot)
            multiply_values(weights, previous)
            values = real(plgpu.wgmma_accumulator_load(scores, wait_n=1), last)
            plgpu.barrier_arrive(key_blocks.free.at[slot])
            weights_now = jnp.exp2(values * scale - along(maximum, values.shape))
            results = lax.optimization_barrier((weights_now, old_total + jnp.sum(weights_now, axis=1)))
            if not last:
                plgpu.barrier_wait(key_blocks.ready.at[lax.rem(index + 1, STAGES)])
            return results

        new_weights, total = pl.run_scoped(overlapped, plgpu.ACC((ROWS, block_kv), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(value_blocks.free.at[previous])
        return new_weights.astype(dtype), maximum, total

    state = pl.run_scoped(first_step, plgpu.ACC((ROWS, block_kv), jnp.float32))
    state = lax.fori_loop(1, steps - 1, step, state)
    if steps > 1:
        state = step(jnp.int32(steps - 1), state, last=True)
    weights, maximum, total = state
    multiply_values(weights, (steps - 1) % STAGES)
    return sums[...], maximum, total


# ---------------------------------------------------------------- the exact kernel


def exact_if(lost, inputs, results, keys, head_dim):
    """Where `lost` is true, attention with a running maximum in place of the results; else those, at once.

    The device decides, not lax.cond: for that XLA asks the host, in every transformer block. Simple rather than fast:
    one warpgroup takes one tile after the other, and fetches a block of keys and values when it needs it.
    """
    block_kv, tile = 128, tiles_for_products(inputs[0].dtype)
    scratch = dict(
        query_tile=tile((ROWS, head_dim)),
        key_tile=tile((block_kv, head_dim)),
        value_tile=tile((block_kv, head_dim)),
        log_sum_tile=plgpu.SMEM((ROWS,), jnp.float32),
        ready=plgpu.Barrier(),
    )
    out, log_sum = (jax.new_ref(result) for result in results)
    pl.kernel(  # plgpu.kernel of jax 0.10.2 takes no arrays to change in place
        lambda *refs: pl.run_scoped(partial(exact_body, *refs, keys=keys, head_dim=head_dim), **scratch),
        mesh=plgpu.Mesh(grid=(BLOCKS,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        name="hopper_exact",
    )(lost.astype(jnp.int32)[None], *inputs, out, log_sum)
    return jax.freeze(out), jax.freeze(log_sum)


def exact_body(lost, query, key, value, out, log_sum, *, query_tile, key_tile, value_tile, log_sum_tile, ready,
               keys, head_dim):
    batch, queries, width = query.shape
    heads, tiles = width // head_dim, pl.cdiv(queries, ROWS)
    block_kv, scale = key_tile.shape[0], head_dim**-0.5 * LOG2_E

    def fetch(source, tile):
        plgpu.copy_gmem_to_smem(source, tile, ready)
        plgpu.barrier_wait(ready)

    @pl.loop(lax.axis_index("block"), jnp.where(lost[0] > 0, batch * heads * tiles, 0), step=BLOCKS)
    def one_tile(number):
        index, head = number // (heads * tiles), number // tiles % heads
        rows, lanes = pl.ds(number % tiles * ROWS, ROWS), pl.ds(head * head_dim, head_dim)
        fetch(query.at[index, rows, lanes], query_tile)

        def attend(sums):
            def step(block, state):
                maximum, total = state
                tokens = pl.ds(block * block_kv, block_kv)
                fetch(key.at[index, tokens, lanes], key_tile)
                fetch(value.at[index, tokens, lanes], value_tile)

                def multiply_keys(scores):
                    plgpu.wgmma(scores, query_tile, key_tile.transpose((1, 0)))
                    return scores[...]

                scores = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, block_kv), jnp.float32))
                scores = masked(scores, block * block_kv, keys)
                new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1) * scale)
                correction = jnp.exp2(maximum - new_maximum)
                weights = jnp.exp2(scores * scale - along(new_maximum, scores.shape))
                sums[...] = sums[...] * along(correction, sums.shape)
                plgpu.wgmma(sums, weights.astype(query.dtype), value_tile)
                plgpu.wgmma_wait(0)
                return new_maximum, total * correction + jnp.sum(weights, axis=1)

            maximum, total = lax.fori_loop(0, pl.cdiv(keys, block_kv), step, (row(-jnp.inf), row(0)))
            return sums[...], maximum, total

        sums, maximum, total = pl.run_scoped(attend, plgpu.ACC((ROWS, head_dim), jnp.float32))
        log_sum_tile[...] = maximum / LOG2_E + jnp.log(total)
        query_tile[...] = (sums / along(total, sums.shape)).astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(query_tile, out.at[index, rows, lanes])
        plgpu.copy_smem_to_gmem(log_sum_tile, log_sum.at[index, head, rows])
        plgpu.wait_smem_to_gmem(0)
