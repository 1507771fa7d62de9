"""The Hopper kernel's fast pass with 8-bit products, at twice the tensor cores' rate: approximate.

    out, log_sum, steep = fast(query, key, value, keys, head_dim, block_kv)     # as hopper.fast

Scores are int8 products, with one scale per query and one per block of keys: a quarter of e4m3's error. Weights and
values are e4m3, values with a scale and a mean per channel. XLA does the quantization.

Order: a thread holds other columns of the scores than an e4m3 product expects. The softmax does not depend on the order
of keys: weights stay in place, and values are permuted to match.

Range: weights above 448 would saturate. The reference is chosen such that a block's weights sum to about 32, judging by
a sample of the keys. Before a block is added whose weights sum to more than 448, the reference is raised and the sums
so far are scaled down. Weights below 2**-10 become zero: a row whose average weight is at most 2**-9 is lost, and
recomputed in bf16 (hopper.py).

Sums: e4m3 products accumulate with about 14 bits and truncate what is small relative to the sum: of 75,600 values
around 1, half are lost. So the mean is subtracted from values, and sums are flushed to float32 every few blocks.
"""
import math
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from wan_torchax import private
from wan_torchax.kernels.hopper import GROUPS, LOG2_E, ROWS, STAGES, Ring, along, any_above, masked, mosaic, row

FEWEST_KEYS = 2048  # below this, the sample would be a large share of the keys
BLOCK = 192  # keys at a time
SAMPLES = 2  # blocks of keys sampled for the reference: a whole round of the ring
STRETCH = 32  # blocks between two flushes of the sums
E4M3, LARGEST = jnp.float8_e4m3fn, 448.0
# Sum of a block's weights: in the sample, and after the reference is raised. Powers of two, so that a row with a single
# large weight is exact.
SAMPLE_SUM, RAISED_SUM = 2.0**5, 2.0**8
LEAST_AVERAGE = 2.0**-9  # of a row's weights
# The bits of the float ZERO. Adding an integer to the bits adds it to the float: scores become floats at no cost.
ZERO_BITS, ZERO = 0x4B400000, 1.5 * 2.0**23


def fast(query, key, value, keys, head_dim, _):
    """(out, log_sum, steep), with the grid of hopper.fast. `steep` is 0: lost rows are recomputed over all keys."""
    batch, queries, width = query.shape
    heads, tiles = width // head_dim, pl.cdiv(queries, GROUPS * ROWS)
    rows = jax.ShapeDtypeStruct((batch, heads, tiles * GROUPS * ROWS), jnp.float32)
    quantized_query, query_scale = quantise_queries(query, head_dim)
    query_scale = jnp.pad(query_scale, ((0, 0), (0, 0), (0, rows.shape[2] - queries)))
    out, log_sum = plgpu.kernel(
        partial(walk, keys),
        out_type=[jax.ShapeDtypeStruct(query.shape, query.dtype), rows],
        scratch_types=memory(head_dim, query.dtype),
        grid=(batch, heads, tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="hopper_eight",
    )(quantized_query, query_scale, *quantise_keys(key, head_dim), *quantise_values(value))
    return out, log_sum, jnp.zeros(log_sum.shape)


def quantise_queries(query, head_dim):
    """int8, and the factor of each query's scores (batch, heads, queries), which includes log2 e / √head_dim."""
    query = query.reshape(*query.shape[:2], -1, head_dim).astype(jnp.float32)
    scale = scale_to(127, jnp.max(jnp.abs(query), axis=3))
    quantized = jnp.round(query / scale[..., None]).astype(jnp.int8)
    return quantized.reshape(*quantized.shape[:2], -1), scale.swapaxes(1, 2) * (head_dim**-0.5 * LOG2_E)


def quantise_keys(key, head_dim):
    """int8, and one scale per block of keys (batch, heads, blocks)."""
    batch, tokens, width = key.shape
    blocks = jnp.pad(key, ((0, 0), (0, -tokens % BLOCK), (0, 0))).astype(jnp.float32)
    blocks = blocks.reshape(batch, -1, BLOCK, width // head_dim, head_dim)
    scale = scale_to(127, jnp.max(jnp.abs(blocks), axis=(2, 4)))
    quantized = jnp.round(blocks / scale[:, :, None, :, None]).astype(jnp.int8)
    return quantized.reshape(batch, -1, width)[:, :tokens], scale.swapaxes(1, 2)


def quantise_values(value):
    """e4m3 (batch, width, tokens), keys in the order of `to_e4m3`; and (batch, 2, width): a scale and an offset for the
    result."""
    tokens, value = value.shape[1], value.astype(jnp.float32)
    mean, high, low = jnp.mean(value, axis=1), jnp.max(value, axis=1), jnp.min(value, axis=1)
    scale = scale_to(LARGEST, jnp.maximum(high - mean, mean - low))
    quantized = ((value - mean[:, None]) / scale[:, None]).astype(E4M3)
    # Pack four keys into a word first: XLA is slow at transposing single bytes.
    parts = lax.bitcast_convert_type(quantized, jnp.uint8).astype(jnp.uint32)
    parts = jnp.pad(parts, ((0, 0), (0, -tokens % 128), (0, 0)))
    parts = parts.reshape(parts.shape[0], -1, 2, 4, 2, parts.shape[2])
    words = sum(parts[:, :, i, :, j] << 8 * (2 * i + j) for i in (0, 1) for j in (0, 1))
    words = words.reshape(words.shape[0], -1, words.shape[3]).swapaxes(1, 2)
    quantized = lax.bitcast_convert_type(words, E4M3).reshape(*words.shape[:2], -1)
    rest = jnp.sum(quantized.astype(jnp.float32), axis=2) / tokens * scale  # rounding shifts the mean
    return quantized, jnp.stack([scale, mean - rest], axis=1)


def scale_to(largest, of):
    return jnp.where(of == 0, 1, of / largest)


def memory(head_dim, dtype):
    """The shared memory and barriers of a thread block."""

    def tiles(shape, dtype, depth):
        size = jnp.dtype(dtype).itemsize
        swizzle = next(swizzle for swizzle in (128, 64, 32) if depth * size % swizzle == 0)
        transforms = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    return dict(
        query_tile=tiles((GROUPS, ROWS, head_dim), jnp.int8, head_dim),
        out_tile=tiles((GROUPS, ROWS, head_dim), dtype, head_dim),
        sum_tile=tiles((GROUPS, ROWS, head_dim), jnp.float32, head_dim),
        key_ring=tiles((STAGES, BLOCK, head_dim), jnp.int8, head_dim),
        value_ring=tiles((STAGES, head_dim, BLOCK), E4M3, BLOCK),
        row_tile=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        channel_tile=plgpu.SMEM((GROUPS, 2, head_dim), jnp.float32),
        query_ready=plgpu.Barrier(num_barriers=GROUPS),
        key_ready=plgpu.Barrier(num_barriers=STAGES),
        value_ready=plgpu.Barrier(num_barriers=STAGES),
        key_free=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
        value_free=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
    )


def walk(keys, query, query_scale, key, key_scale, value, channel, out, log_sum, *, query_tile, out_tile, sum_tile,
         key_ring, value_ring, row_tile, channel_tile, query_ready, key_ready, value_ready, key_free, value_free):
    """The work of a thread block, as in hopper.walk; the sample goes through the ring of keys first."""
    head_dim, group = key_ring.shape[2], lax.axis_index("group")
    batch, head, tile = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("tile")
    steps, lanes = pl.cdiv(keys, BLOCK), pl.ds(head * head_dim, head_dim)
    key_blocks, value_blocks = Ring(key_ring, key_ready, key_free), Ring(value_ring, value_ready, value_free)

    def sampled(number):
        return number * (steps - 1) // SAMPLES  # never the last block, which may be partial

    def fetch(source, number, ring):
        slot = lax.rem(number, STAGES)
        pl.when(number >= STAGES)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
        plgpu.copy_gmem_to_smem(source, ring.buffer.at[slot], ring.ready.at[slot])

    @pl.when(group == GROUPS)
    def fetcher():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, SAMPLES)
        def fetch_sample(number):
            fetch(key.at[batch, pl.ds(sampled(number) * BLOCK, BLOCK), lanes], number, key_blocks)

        @pl.loop(0, steps)
        def fetch_blocks(step):
            tokens = pl.ds(step * BLOCK, BLOCK)
            fetch(key.at[batch, tokens, lanes], SAMPLES + step, key_blocks)
            fetch(value.at[batch, lanes, tokens], step, value_blocks)

        @pl.loop(0, STAGES)
        def wait(slot):
            plgpu.barrier_wait(key_free.at[slot])
            plgpu.barrier_wait(value_free.at[slot])

    @pl.when(group < GROUPS)
    def computer():
        plgpu.set_max_registers(240, action="increase")
        place = tile * GROUPS + group
        rows = pl.ds(place * ROWS, ROWS)
        own_query, own_out, own_row, own_channel = (x.at[group] for x in (query_tile, out_tile, row_tile, channel_tile))

        def take(source, target):
            plgpu.copy_gmem_to_smem(source, target, query_ready.at[group])
            plgpu.barrier_wait(query_ready.at[group])

        take(query.at[batch, rows, lanes], own_query)
        take(query_scale.at[batch, head, rows], own_row)
        for number in (0, 1):
            take(channel.at[batch, number, lanes], own_channel.at[number])
        scale = plgpu.load(own_row, (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        def scale_of(block):
            return scale * key_scale[batch, head, block]

        own = Walk(own_query, key_blocks, value_blocks, sum_tile.at[group], keys, scale_of)
        reference = own.reference([sampled(number) for number in range(SAMPLES)])
        work = partial(own.attend, reference, lax.rem(place, STRETCH))
        sums, total, reference = pl.run_scoped(work, plgpu.ACC((ROWS, head_dim), jnp.float32))

        def channels(number):
            layout = plgpu.Layout.WGMMA.reduce(0)
            values = plgpu.load(own_channel, (number,), layout=layout, optimized=False)
            return lax.broadcast_in_dim(values, sums.shape, [1])

        result = sums / along(total, sums.shape) * channels(0) + channels(1)
        sound = (total > keys * LEAST_AVERAGE) & (jnp.sum(jnp.abs(result), axis=1) < jnp.inf)
        own_out[...] = result.astype(out.dtype)
        own_row[...] = jnp.where(sound, reference / LOG2_E + jnp.log(total), jnp.nan)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_out, out.at[batch, rows, lanes])
        plgpu.copy_smem_to_gmem(own_row, log_sum.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)


class Walk(NamedTuple):
    """State of one warpgroup's walk, as in hopper.py: its queries, the rings, the float32 sums, the number of keys, and
    a function from a block to the factor of its scores."""

    query: object
    key_blocks: Ring
    value_blocks: Ring
    sums: object
    keys: int
    scale: Callable

    def multiply_keys(self, scores, slot):
        """Scores, each plus ZERO."""
        scores[...] = plgpu.layout_cast(jnp.full(scores.shape, ZERO_BITS, jnp.int32), plgpu.Layout.WGMMA)
        plgpu.wgmma(scores, self.query, self.key_blocks.buffer.at[slot].transpose((1, 0)))

    def multiply_values(self, sums, weights, slot):
        plgpu.barrier_wait(self.value_blocks.ready.at[slot])
        plgpu.wgmma(sums, weights, self.value_blocks.buffer.at[slot].transpose((1, 0)))

    def weigh(self, scores, scale, reference):
        return jnp.exp2(scores * along(scale, scores.shape) - along(reference + scale * ZERO, scores.shape))

    def reference(self, blocks):
        """The softmax reference of each row, from a sample of blocks."""

        def sample_sum(number, block):
            slot, scale = number % STAGES, self.scale(block)

            def product(scores):
                plgpu.barrier_wait(self.key_blocks.ready.at[slot])
                self.multiply_keys(scores, slot)
                values = as_float(scores[...])
                maximum = (jnp.max(values, axis=1) - ZERO) * scale
                return maximum + log2(jnp.sum(self.weigh(values, scale, maximum), axis=1))

            log_sum = pl.run_scoped(product, plgpu.ACC((ROWS, BLOCK), jnp.int32))
            plgpu.barrier_arrive(self.key_blocks.free.at[slot])
            return log_sum

        sums = [sample_sum(*block) for block in enumerate(blocks)]
        return reduce(jnp.maximum, sums) - math.log2(SAMPLE_SUM)

    def attend(self, reference, offset, sums):
        """Weighted values over all blocks, the sum of the weights, and the final reference."""
        steps, tail = pl.cdiv(self.keys, BLOCK), self.keys % BLOCK

        def first(scores):
            scale = self.scale(0)
            plgpu.barrier_wait(self.key_blocks.ready.at[0])
            self.multiply_keys(scores, 0)
            weights = self.weigh(as_float(scores[...]), scale, reference)
            results = lax.optimization_barrier((weights, jnp.sum(weights, axis=1)))
            plgpu.barrier_wait(self.key_blocks.ready.at[1])
            return results

        def step(index, weights, block, total, reference, last=False):
            """The next block's weights, not rounded, and their sum; adds the previous block's values to the sums. In
            the order of hopper.Walk.step, for the same reasons."""
            slot, previous, scale = lax.rem(index, STAGES), lax.rem(index - 1, STAGES), self.scale(index)
            quantized = to_e4m3(weights)

            def overlapped(scores):
                self.multiply_keys(scores, slot)
                self.multiply_values(sums, quantized, previous)
                values = as_float(plgpu.wgmma_accumulator_load(scores, wait_n=1))
                values = masked(values, tail) if last and tail else values
                weights_now = self.weigh(values, scale, reference)
                results = lax.optimization_barrier((weights_now, jnp.sum(weights_now, axis=1), total + block))
                is_large = any_above(results[1], LARGEST)  # while the value product still runs
                if not last:
                    plgpu.barrier_wait(self.key_blocks.ready.at[lax.rem(index + 1, STAGES)])
                return *results, is_large

            results = pl.run_scoped(overlapped, plgpu.ACC((ROWS, BLOCK), jnp.int32))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.value_blocks.free.at[previous])
            plgpu.barrier_arrive(self.key_blocks.free.at[slot])
            return results

        def take_out(weights, block, total, reference):
            """Flush the sums, raising the reference where a block's weights are too large."""
            raised = reference + jnp.where(block < LARGEST, 0.0, log2(block) - math.log2(RAISED_SUM))
            factor = jnp.exp2(reference - raised)
            self.sums[...] = (self.sums[...] + sums[...]) * along(factor, sums.shape)
            sums[...] = zeros(sums.shape)
            return weights * along(factor, weights.shape), block * factor, total * factor, raised

        def stretch(progress):
            """Blocks until one's weights are too large or the sums are due to be flushed."""
            index, state, reference, is_large = progress
            # Warpgroups flush their sums at different times.
            end = jnp.minimum(index + jnp.where(index == 1, STRETCH - offset, STRETCH), steps - 1)

            def following(progress):
                index, state, _ = progress
                *state, is_large = step(index, *state, reference)
                return index + 1, tuple(state), is_large

            index, state, _ = lax.while_loop(
                lambda progress: (progress[0] < end) & ~progress[2], following, (index, state, is_large)
            )
            *state, reference = take_out(*state, reference)
            return index, tuple(state), reference, False

        self.sums[...] = zeros(sums.shape)
        weights, block = pl.run_scoped(first, plgpu.ACC((ROWS, BLOCK), jnp.int32))
        plgpu.barrier_arrive(self.key_blocks.free.at[0])
        progress = jnp.int32(1), (weights, block, row(0)), reference, any_above(block, LARGEST)
        _, state, reference, _ = lax.while_loop(lambda progress: progress[0] < steps - 1, stretch, progress)
        *state, _ = step(jnp.int32(steps - 1), *state, reference, last=True)
        weights, block, total, reference = take_out(*state, reference)
        last = (steps - 1) % STAGES
        self.multiply_values(sums, to_e4m3(weights), last)
        result = self.sums[...] + sums[...]
        plgpu.barrier_arrive(self.value_blocks.free.at[last])
        return result, total + block, reference


def log2(values):
    return jnp.log(values) * LOG2_E


def as_float(scores):
    return lax.bitcast_convert_type(scores, jnp.float32)


def zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def to_e4m3(weights):
    """Weights as operand of a product, without moving them between threads: of 16 keys, thread q of four holds 2q,
    2q + 1, 2q + 8 and 2q + 9, which become the keys 4q to 4q + 3."""
    result = plgpu.ShapeDtypeStruct(weights.shape, E4M3, layout=plgpu.Layout.WGMMA_8BIT)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)(pack)(weights)


def pack(_, weights):
    number, layout = ir.IntegerType.get_signless(32), mosaic.WGMMA_LAYOUT_8BIT
    four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    registers = np.empty(layout.registers_shape(weights.shape), dtype=object)
    for place in np.ndindex(registers.shape):
        pairs = (weights.registers[place[0], 2 * place[1] + half, *place[2:]] for half in (0, 1))
        word = mosaic.llvm.inline_asm(
            number, [vector.extract(pair, [], [i]) for pair in pairs for i in (0, 1)],
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
        )
        registers[place] = vector.bitcast(four, vector.broadcast(ir.VectorType.get((1,), number), word))
    return private.fragmented_array(registers, layout)
