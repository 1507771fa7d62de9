"""Full attention for NVIDIA Hopper in Pallas (Mosaic GPU): forward, bf16 in and out, float32 in between.

    out, log_sum, rescued = attention(query, key, value, keys, head_dim, kernel)

    query, out  (batch, queries, heads * head_dim)     key, value  (batch, tokens, heads * head_dim)
    log_sum     (batch, heads, queries) float32: log of the sum of exp(score), for merging with other keys
    rescued     how many rows were recomputed
    keys        how many of the tokens are valid; the rest is padding, which must be finite

    out, rescued = attention_to_lists(query, key, value, chosen, query_blocks, key_blocks, head_dim)     # sparse.listed

Lists are for 128 queries, whose warpgroups share the keys, or for the 64 of a warpgroup, which then has a ring of its
own: the keys of 64 queries are fetched for them alone, twice the bytes, but none is computed in vain, as the union of
two lists would have them.

The fast kernel's softmax reference is the maximum of a row's first block of keys, not a running maximum: that saves the
maxima and corrections of all later blocks. A row is lost if later scores exceed the reference by so much that its
weights come near overflow. The guarded kernel recomputes lost rows, starting at the block where their sums grew: it
checks every block's sums before adding the block, and raises the reference if needed. It skips tiles without lost rows.

Copies clip at an array's end: they read zeros beyond it and write nothing there.
"""
import itertools
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from wan_torchax import private
from wan_torchax.kernels import sparse

mosaic = private.mosaic_gpu()
ROWS = 64  # queries per warpgroup
GROUPS = 2  # compute warpgroups per thread block
STAGES = 2  # buffers per ring: one is filled while the other is used
OWN_STAGES = 3  # the same where every warpgroup has a ring of its own, whose steps are half as long
BLOCKS = 132  # thread blocks of the guarded kernel, one for each multiprocessor of an H200
LOG2_E = 1.4426950408889634
TRUSTED_SUM = 2.0**100  # the fast kernel's largest row sum: well below overflow, also of the sum times a value
# If a row's sum ends above TRUSTED_SUM, the keys before the block where it first exceeded this have less than 2**-60 of
# its weight.
STEEP_SUM = 2.0**40
LISTED_KEYS = 128  # keys of a step over lists
# Less scratch memory than by default, which reductions across warps would need; here there are none.
PARAMETERS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024)
NOTHING = 2**30  # larger than any block index: nothing to recompute


def attention(query, key, value, keys, head_dim, kernel, first_pass=None):
    """`first_pass` replaces `fast`."""
    queries = query.shape[1]
    # Copies move tiles of 8 tokens, and only whole tiles may overhang. Wan's token counts need no padding.
    query, key, value = inputs = [jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0))) for x in (query, key, value)]
    out, log_sum, steep = (first_pass or fast)(*inputs, keys, head_dim, kernel.block_kv)
    return rescue(inputs, (out, log_sum, steep), queries, partial(AllKeys, keys), (), head_dim, kernel.block_kv)


def attention_to_lists(query, key, value, chosen, query_blocks, key_blocks, head_dim):
    """Attention of every 128 queries to their own blocks of 64 or 128 keys, or of every 64 to blocks of 64, which may
    be partial: `chosen` (batch, heads, tiles, count)."""
    if query_blocks.size == ROWS:
        return attention_to_tiles(query, key, value, chosen, query_blocks, key_blocks, head_dim)
    tokens, keys = query.shape[1], sum(key_blocks.sizes)
    query = query[:, :sum(query_blocks.sizes)]
    inputs = [jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0))) for x in (query, key, value)]
    lists = sparse.ordered(chosen, key_blocks, LISTED_KEYS // key_blocks.size)
    source = partial(Listed, keys, key_blocks.size)
    results = fast(*inputs, keys, head_dim, LISTED_KEYS, source, (lists,))
    out, _, rescued = rescue(inputs, results, query.shape[1], source, (lists,), head_dim, LISTED_KEYS)
    return jnp.pad(out, ((0, 0), (0, tokens - out.shape[1]), (0, 0))), rescued


def attention_to_tiles(query, key, value, chosen, query_tiles, key_tiles, head_dim):
    """Tiles are padded to 64 tokens. A list has an entry's last valid token, and full tiles first, so that only the
    steps after them need masks."""
    tokens, tiles = query.shape[1], len(query_tiles.sizes)
    inputs = [
        blocks.padded(x).reshape(x.shape[0], -1, x.shape[2])
        for blocks, x in ((query_tiles, query), (key_tiles, key), (key_tiles, value))
    ]
    size = jnp.array(key_tiles.sizes, jnp.int32)[chosen]
    partial_last = size < key_tiles.size
    _, lists = lax.sort((partial_last.astype(jnp.int32), chosen * key_tiles.size + size - 1), num_keys=1)
    whole = jnp.sum(~partial_last, axis=-1, dtype=jnp.int32)
    missing = (0, 0), (0, 0), (0, -tiles % GROUPS)  # for the last warpgroup, which may have no tile
    lists = jnp.pad(lists, (*missing, (0, 0))), jnp.pad(whole, missing)
    results = fast(*inputs, None, head_dim, key_tiles.size, Tiles, lists)
    out, _, rescued = rescue(inputs, results, tiles * ROWS, Tiles, lists, head_dim, key_tiles.size)
    return query_tiles.unpadded(out.reshape(out.shape[0], tiles, ROWS, -1), tokens), rescued


def rescue(inputs, results, queries, source, lists, head_dim, block_kv):
    """(out, log_sum, rescued): the fast kernel's results, their lost rows recomputed."""
    out, log_sum, steep = results
    lost, steps = jnp.isnan(log_sum[..., :queries]), source(*lists).steps(block_kv)
    if steps > 1:  # otherwise the reference is the true maximum
        begins = first_blocks(lost, steep, steps)
        out, log_sum = compute_again(begins, inputs, (out, log_sum), source, lists, head_dim, block_kv)
    return out[:, :queries], log_sum[..., :queries], jnp.sum(lost, dtype=jnp.int32)


class AllKeys(NamedTuple):
    """All keys, in order. Only the last step can have invalid ones. A place is a batch's row, a head, a tile of queries
    and a warpgroup; `rings` says for how many of these the keys differ."""

    keys: int
    rings = 1

    def steps(self, block_kv) -> int:
        return pl.cdiv(self.keys, block_kv)

    def runs(self, block_kv) -> int:
        """Into how many runs of consecutive keys, of equal length, a step is split."""
        return 1

    def starts(self, place, step, block_kv):
        """The first token of each run."""
        return [step * block_kv]

    def whole(self, place, last):
        """The step from which on there may be invalid keys; `last` is the last one."""
        return last

    def valid(self, scores, place, step):
        """A step's scores, minus infinity for invalid keys."""
        tail = self.keys % scores.shape[1]
        return masked(scores, tail) if tail else scores


class Listed(NamedTuple):
    """The keys of lists of blocks, (batch, heads, tiles of queries, count)."""

    keys: int
    size: int  # of a block
    lists: object  # an array, or its reference in the kernel
    rings = 1
    whole = AllKeys.whole

    def steps(self, block_kv) -> int:
        return self.lists.shape[-1] // self.runs(block_kv)

    def runs(self, block_kv) -> int:
        return block_kv // self.size

    def starts(self, place, step, block_kv):
        runs = self.runs(block_kv)
        return [self.lists[*place[:3], step * runs + run] * self.size for run in range(runs)]

    def valid(self, scores, place, step):
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        for run, start in enumerate(self.starts(place, step, scores.shape[1])):
            own = (column >= run * self.size) & (column < (run + 1) * self.size)
            scores = jnp.where(own & (column - run * self.size >= self.keys - start), -jnp.inf, scores)
        return scores


class Tiles(NamedTuple):
    """The keys of lists of tiles of 64, (batch, heads, tiles of queries, count), one list for each warpgroup: the last
    valid token of each tile, full ones first, of which there are `counts` (batch, heads, tiles of queries)."""

    lists: object
    counts: object
    rings = GROUPS

    def steps(self, block_kv) -> int:
        return self.lists.shape[-1]

    def runs(self, block_kv) -> int:
        return 1

    def entry(self, place, step):
        batch, head, tile, group = place
        return self.lists[batch, head, tile * GROUPS + group, step]

    def starts(self, place, step, block_kv):
        return [self.entry(place, step) // block_kv * block_kv]

    def whole(self, place, last):
        batch, head, tile, group = place
        return jnp.minimum(self.counts[batch, head, tile * GROUPS + group], last)

    def valid(self, scores, place, step):
        return masked(scores, self.entry(place, step) % scores.shape[1] + 1)


def first_blocks(lost, steep, steps):
    """The block of keys from which each tile of queries is recomputed, flat (batch * heads * tiles,): the first block
    that matters to any of the tile's lost rows."""
    first = jnp.where(lost, jnp.minimum(steep[..., : lost.shape[2]], steps - 2), NOTHING)
    first = jnp.pad(first, ((0, 0), (0, 0), (0, steep.shape[2] - lost.shape[2])), constant_values=NOTHING)
    return jnp.min(first.reshape(-1, GROUPS * ROWS), axis=1).astype(jnp.int32)


def tiles_for_products(dtype, swizzle=128):
    """Shared memory in the tensor cores' layout; `swizzle` is the depth in bytes that a product covers at a time."""
    transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    return partial(plgpu.SMEM, dtype=dtype, transforms=transforms)


def masked(scores, keys):
    """Scores with invalid keys masked to minus infinity."""
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(column < keys, scores, -jnp.inf)


def row(value):
    """The same value for each query, in the layout of the scores' row reductions."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def along(values, shape):
    """One value for each query, repeated along its row."""
    return lax.broadcast_in_dim(values, shape, [0])


class Ring(NamedTuple):
    """Buffers in shared memory that one warpgroup fills and the others use, with barriers for each."""

    buffer: object  # (rings * stages, block_kv, head_dim)
    ready: object
    free: object
    stages: int = STAGES
    first: int | jax.Array = 0  # buffer: rings share an array

    def slot(self, step):
        return self.first + (step % self.stages if isinstance(step, int) else lax.rem(step, self.stages))


def stages_of(rings):
    return STAGES if rings == 1 else OWN_STAGES


def memory(block_kv, head_dim, dtype, runs=1, rings=1):
    """The shared memory and barriers of a thread block; a block of keys is copied in `runs`."""
    buffers, users = rings * stages_of(rings), GROUPS // rings
    ring = tiles_for_products(dtype, next(size for size in (128, 64, 32) if block_kv % (size // 2) == 0))
    return dict(
        query_tile=ring((GROUPS, ROWS, head_dim)),
        key_ring=ring((buffers, block_kv, head_dim)),
        value_ring=ring((buffers, block_kv, head_dim)),
        row_tile=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        query_ready=plgpu.Barrier(num_barriers=GROUPS),
        key_ready=plgpu.Barrier(num_arrivals=runs, num_barriers=buffers),
        value_ready=plgpu.Barrier(num_arrivals=runs, num_barriers=buffers),
        key_free=plgpu.Barrier(num_arrivals=users, num_barriers=buffers),
        value_free=plgpu.Barrier(num_arrivals=users, num_barriers=buffers),
    )


def fast(query, key, value, keys, head_dim, block_kv, source=None, lists=()):
    """(out, log_sum, steep): lost rows have a log_sum of NaN; `steep` is the index of the first block whose keys matter
    to a row. Query tiles vary fastest in the grid, so that a head's keys and values stay in L2. `source` makes an
    AllKeys or Listed, from references to `lists`."""
    batch, queries, width = query.shape
    heads, tiles = width // head_dim, pl.cdiv(queries, GROUPS * ROWS)
    rows = jax.ShapeDtypeStruct((batch, heads, tiles * GROUPS * ROWS), jnp.float32)
    source = source or partial(AllKeys, keys)

    def one_tile(visit):
        visit(lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("tile"), 0)

    def body(*refs, **scratch):
        own, refs = source(*refs[: len(lists)]), refs[len(lists) :]
        walk(one_tile, attend_fast, own, *refs, **scratch)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(query.shape, query.dtype), rows, rows],
        scratch_types=memory(
            block_kv, head_dim, query.dtype, source(*lists).runs(block_kv), source(*lists).rings
        ),
        grid=(batch, heads, tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=PARAMETERS,
        kernel_name="hopper_lists" if lists else "hopper_fast",
    )(*lists, query, key, value)


def compute_again(begins, inputs, results, source, lists, head_dim, block_kv):
    """The results, with lost rows recomputed.

    Which tiles have any is decided on the device: with lax.cond, XLA would synchronize with the host in every
    transformer block.
    """
    batch, queries, width = inputs[0].shape
    heads, tiles = width // head_dim, pl.cdiv(queries, GROUPS * ROWS)

    def body(begins, *refs):
        def some_tiles(visit):
            @pl.loop(lax.axis_index("block"), batch * heads * tiles, step=BLOCKS)
            def one_tile(number):
                place = number // (heads * tiles), number // tiles % heads, number % tiles
                pl.when(begins[number] < NOTHING)(lambda: visit(*place, begins[number]))

        own = source(*refs[: len(lists)])
        work = partial(walk, some_tiles, attend_guarded, own, *refs[len(lists) :], None)
        scratch = memory(block_kv, head_dim, inputs[0].dtype, own.runs(block_kv), own.rings)
        pl.run_scoped(work, **scratch, collective_axes="group")

    out, log_sum = (jax.new_ref(result) for result in results)
    pl.kernel(  # plgpu.kernel of jax 0.10.2 cannot update arrays in place
        body,
        mesh=plgpu.Mesh(grid=(BLOCKS,), grid_names=("block",), num_threads=GROUPS + 1, thread_name="group"),
        compiler_params=PARAMETERS,
        name="hopper_guarded",
    )(begins, *lists, *inputs, out, log_sum)
    return jax.freeze(out), jax.freeze(log_sum)


def walk(tiles, attend, source, query, key, value, out, log_sum, steep, *, query_tile, key_ring, value_ring, row_tile,
         query_ready, key_ready, value_ready, key_free, value_free):
    """The work of a thread block: its compute warpgroups share a tile of queries and walk over the keys, from a given
    block on; one more warpgroup only fetches blocks of keys and values into rings of buffers."""
    _, block_kv, head_dim = key_ring.shape
    blocks, group = source.steps(block_kv), lax.axis_index("group")
    stages = stages_of(source.rings)

    def rings(number):
        """Of keys and values."""
        keys = Ring(key_ring, key_ready, key_free, stages, number * stages)
        return keys, Ring(value_ring, value_ready, value_free, stages, number * stages)

    def fetch(batch, head, tile, first):
        lanes, steps = pl.ds(head * head_dim, head_dim), blocks - first

        def fetch_block(array, ring, step, starts):
            slot, size = ring.slot(step), block_kv // len(starts)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
            for run, start in enumerate(starts):
                buffer = ring.buffer.at[slot] if len(starts) == 1 else ring.buffer.at[slot, pl.ds(run * size, size)]
                plgpu.copy_gmem_to_smem(array.at[batch, pl.ds(start, size), lanes], buffer, ring.ready.at[slot])

        @pl.loop(0, steps)
        def fetch_blocks(step):
            for number in range(source.rings):
                starts = source.starts((batch, head, tile, number), first + step, block_kv)
                for array, ring in zip((key, value), rings(number)):
                    fetch_block(array, ring, step, starts)

        @pl.loop(0, jnp.minimum(steps, stages))  # leaves the barriers as the next tile expects them
        def wait(step):
            for ring in itertools.chain(*map(rings, range(source.rings))):
                plgpu.barrier_wait(ring.free.at[ring.slot(step)])

    def compute(batch, head, tile, first):
        rows, lanes = pl.ds((tile * GROUPS + group) * ROWS, ROWS), pl.ds(head * head_dim, head_dim)
        own_query, own_row = query_tile.at[group], row_tile.at[group]

        def take(source, target):
            plgpu.copy_gmem_to_smem(source, target, query_ready.at[group])
            plgpu.barrier_wait(query_ready.at[group])

        def give(values, target):
            own_row[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_row, target.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0)

        take(query.at[batch, rows, lanes], own_query)
        place, own_rings = (batch, head, tile, group), rings(group if source.rings > 1 else 0)
        work = partial(attend, Walk(own_query, *own_rings, source, place, first, blocks - first))
        sums, maximum, total, *steep_at = pl.run_scoped(work, plgpu.ACC((ROWS, head_dim), jnp.float32))
        result = sums / along(total, sums.shape)
        sound = (total < TRUSTED_SUM) & (jnp.sum(jnp.abs(result), axis=1) < jnp.inf)
        own_log_sum = jnp.where(sound, maximum / LOG2_E + jnp.log(total), jnp.nan)
        if steep is None:  # the guarded kernel: keep rows that were not lost
            plgpu.commit_smem()  # all warps are done with the queries
            take(out.at[batch, rows, lanes], own_query)
            take(log_sum.at[batch, head, rows], own_row)
            before = plgpu.load(own_row, (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            lost = along(jnp.where(before == before, 0.0, 1.0), result.shape)
            result = jnp.where(lost > 0, result, own_query[...].astype(jnp.float32))
            own_log_sum = jnp.where(before == before, before, own_log_sum)
        own_query[...] = result.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_query, out.at[batch, rows, lanes])
        give(own_log_sum, log_sum)
        if steep is not None:  # a lost row whose sum is in range overflowed in its values: all of its keys matter
            give(jnp.where(total < TRUSTED_SUM, 0.0, *steep_at), steep)

    @pl.when(group == GROUPS)
    def fetcher():
        plgpu.set_max_registers(24, action="decrease")
        tiles(fetch)

    @pl.when(group < GROUPS)
    def computer():
        plgpu.set_max_registers(240, action="increase")
        tiles(compute)


class Walk(NamedTuple):
    """State of one warpgroup's walk: its queries, the rings, the keys, the tile's place, the first step, how many."""

    query: object
    key_blocks: Ring
    value_blocks: Ring
    source: AllKeys | Listed | Tiles
    place: tuple
    first: int | jax.Array
    steps: int | jax.Array

    @property
    def block_kv(self):
        return self.key_blocks.buffer.shape[1]

    @property
    def scale(self):
        return self.query.shape[1] ** -0.5 * LOG2_E

    def multiply_keys(self, scores, slot):
        plgpu.wgmma(scores, self.query, self.key_blocks.buffer.at[slot].transpose((1, 0)))

    def multiply_values(self, sums, weights, slot):
        plgpu.barrier_wait(self.value_blocks.ready.at[slot])
        plgpu.wgmma(sums, weights, self.value_blocks.buffer.at[slot])

    def real(self, scores, index, last, whole=False):
        """Only the last block can have invalid keys; of lists of tiles, all can that are not known to be `whole`."""
        sound = whole if self.source.rings > 1 else not last
        return scores if sound else self.source.valid(scores, self.place, self.first + index)

    def weigh(self, scores, reference):
        return jnp.exp2(scores * self.scale - along(reference, scores.shape))

    def first_step(self, last=False):
        """(weights, reference, total) of the first block."""

        def product(scores):
            plgpu.barrier_wait(self.key_blocks.ready.at[self.key_blocks.slot(0)])
            self.multiply_keys(scores, self.key_blocks.slot(0))
            values = self.real(scores[...], 0, last)
            maximum = jnp.max(values, axis=1) * self.scale
            weights = self.weigh(values, maximum)
            weights, total = lax.optimization_barrier((weights, jnp.sum(weights, axis=1)))
            if not last:
                plgpu.barrier_wait(self.key_blocks.ready.at[self.key_blocks.slot(1)])
            return weights.astype(self.query.dtype), maximum, total

        return pl.run_scoped(product, plgpu.ACC((ROWS, self.block_kv), jnp.float32))

    def step(self, sums, index, weights, maximum, old_total, last=False, whole=False):
        """The next block's weights, not rounded, and the new total; adds the previous block's values to the sums.

        Starts this block's score product and the previous block's value product, and computes the softmax while the
        latter still runs. The compiler keeps this order only because (a) the softmax ends in an optimization barrier,
        (b) the wait for the next keys, a branch, separates it from the wait for the value product, and (c) the weights
        are rounded after that wait, since registers that a product reads must not be written before it is done.
        """
        slot, previous = self.key_blocks.slot(index), self.key_blocks.slot(index - 1)

        def overlapped(scores):
            self.multiply_keys(scores, slot)
            self.multiply_values(sums, weights, previous)
            values = self.real(plgpu.wgmma_accumulator_load(scores, wait_n=1), index, last, whole)
            weights_now = self.weigh(values, maximum)
            results = lax.optimization_barrier((weights_now, old_total + jnp.sum(weights_now, axis=1)))
            if not last:
                plgpu.barrier_wait(self.key_blocks.ready.at[self.key_blocks.slot(index + 1)])
            return results

        results = pl.run_scoped(overlapped, plgpu.ACC((ROWS, self.block_kv), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.value_blocks.free.at[previous])
        return results

    def release_keys(self, index):
        plgpu.barrier_arrive(self.key_blocks.free.at[self.key_blocks.slot(index)])

    def finish(self, sums, weights):
        """The weighted values of all blocks."""
        last = self.value_blocks.slot(self.steps - 1)
        self.multiply_values(sums, weights, last)
        result = sums[...]
        plgpu.barrier_arrive(self.value_blocks.free.at[last])
        return result


def attend_fast(walk, sums):
    """One warpgroup's rows over all blocks: weighted values, reference (times log2 e), the sum of the weights, and the
    block where it became steep."""

    def step(index, state, last=False, whole=False):
        weights, maximum, total, steep = state
        weights, total = walk.step(sums, index, weights, maximum, total, last, whole)
        walk.release_keys(index)
        # The sum only grows, so this counts the blocks before it became steep.
        return weights.astype(walk.query.dtype), maximum, total, steep + jnp.where(total < STEEP_SUM, 1.0, 0.0)

    state = *walk.first_step(last=walk.steps == 1), row(1)
    walk.release_keys(0)
    whole = walk.source.whole(walk.place, walk.steps - 1)
    state = lax.fori_loop(1, whole, partial(step, whole=True), state)
    if walk.source.rings > 1:
        state = lax.fori_loop(jnp.maximum(whole, 1), walk.steps - 1, step, state)
    if walk.steps > 1:
        state = step(jnp.int32(walk.steps - 1), state, last=True)
    weights, *rest = state
    return walk.finish(sums, weights), *rest


def attend_guarded(walk, sums):
    """The same for any scores: a block whose weights are too large is reweighed before its values are added."""

    def weigh_again(index, maximum, old_total, last=False):
        """A block's weights relative to its highest score, or to the log-sum-exp so far if that is higher; its keys are
        still in the ring."""

        def product(scores):
            walk.multiply_keys(scores, walk.key_blocks.slot(index))
            return walk.real(scores[...], index, last)

        values = pl.run_scoped(product, plgpu.ACC((ROWS, walk.block_kv), jnp.float32))
        known = maximum + jnp.log(old_total) * LOG2_E
        highest = jnp.maximum(known, jnp.max(values, axis=1) * walk.scale)
        correction, weights = jnp.exp2(maximum - highest), walk.weigh(values, highest)
        sums[...] = sums[...] * along(correction, sums.shape)
        return weights.astype(walk.query.dtype), highest, old_total * correction + jnp.sum(weights, axis=1)

    def step(index, state, last=False):
        """One block, and whether it is too steep: if so, its weights and total are unusable."""
        walk.release_keys(index - 1)
        weights, maximum, old_total = state
        weights, total = walk.step(sums, index, weights, maximum, old_total, last)
        return (weights.astype(walk.query.dtype), maximum, total), old_total, any_above(total, STEEP_SUM)

    def until_steep(progress):
        index, state, *_ = progress
        return index + 1, *step(index, state)

    def stretch(progress):
        """Blocks up to the first that is too steep, or to the last but one. That block is reweighed in either case:
        testing for it would cost registers."""
        index, state = progress
        index, (_, maximum, _), old_total, _ = lax.while_loop(
            lambda progress: (progress[0] < walk.steps - 1) & ~progress[3], until_steep, (index, state, state[2], False)
        )
        return index, weigh_again(index - 1, maximum, old_total)

    state = walk.first_step()
    index, state = lax.while_loop(lambda progress: progress[0] < walk.steps - 1, stretch, (jnp.int32(1), state))
    (_, maximum, _), old_total, _ = step(index, state, last=True)
    weights, *rest = weigh_again(index, maximum, old_total, last=True)
    walk.release_keys(index)
    return walk.finish(sums, weights), *rest


def any_above(sums, limit):
    """Whether any row of a warpgroup has a sum that is not below the limit, or NaN."""
    types = plgpu.Layout.WGMMA.reduce(1),
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(partial(vote_any, limit))(sums) != 0


def vote_any(limit, _, sums):
    """1 in all threads of a warpgroup if any has such a sum: a reducing barrier (bar.red.or).

    The shuffle is for the compiler, which would otherwise treat the branch as divergent and serialize later products.
    """
    number, single = ir.IntegerType.get_signless(32), ir.F32Type.get()
    limit = arith.constant(single, ir.FloatAttr.get(single, limit))
    flags = [
        arith.extui(number, arith.cmpf(arith.CmpFPredicate.UGE, vector.extract(register, [], [0]), limit))
        for register in sums.registers.flat
    ]
    barrier = arith.addi(mosaic.warpgroup_idx(sync=False), arith.constant(number, 1))  # Mosaic's numbering
    vote = mosaic.llvm.inline_asm(
        number, [reduce(arith.ori, flags), barrier],
        "{ .reg .pred own, any; .reg .b32 told; setp.ne.s32 own, $1, 0; bar.red.or.pred any, $2, 128, own;"
        "selp.b32 told, 1, 0, any; shfl.sync.idx.b32 $0, told, 0, 31, -1; }",
        "=r,r,r", has_side_effects=True,
    )
    return mosaic.FragmentedArray.splat(vote, (), is_signed=True)
