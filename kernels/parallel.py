"""Attention over a mesh: heads sharded, Ulysses, ring, and Ulysses × ring, all through one `jax.shard_map`.

The mesh axes in `settings.Parallel` select the scheme. Before and after attention:

    tokens  over (ring, ulysses), ring outermost; padded at the end if they do not divide, with an exact mask
    heads   over heads

Inside, Ulysses exchanges tokens for heads (all-to-all) and back; the ring passes keys and values from neighbour to
neighbour while each device attends to those it has, so no device ever holds all of them.
Arrays are (batch, tokens, heads * head_dim); a head is a contiguous run of the last dimension.
"""
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from wan_torchax.kernels import lanes


@dataclass(frozen=True)
class Place:
    """The position of one device's tokens among all."""

    first: int | jax.Array = 0  # index of its first token
    axes: tuple[str, ...] = ()  # mesh axes that shard the tokens
    parts: int = 1  # parts of its heads: one per device of the Ulysses axis


@partial(jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=[])
@dataclass(frozen=True)
class Pieces:
    """Attention's output as all-to-alls deliver it, in runs of tokens, tokens last: for each group of heads an array
    (devices whose heads they are, runs, batch, width of the group, tokens of a run). A linear layer's kernel puts a
    block of tokens together as it fetches it."""

    groups: tuple[jax.Array, ...]

    @property
    def run(self) -> int:
        return self.groups[0].shape[4]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of what they are pieces of: (batch, tokens, heads * head_dim)."""
        _, runs, batch, *_ = self.groups[0].shape
        return batch, runs * self.run, sum(group.shape[0] * group.shape[3] for group in self.groups)

    @property
    def dtype(self):
        return self.groups[0].dtype

    def joined(self) -> jax.Array:
        return jnp.concatenate(self.groups, axis=3).transpose(2, 1, 4, 0, 3).reshape(self.shape)


def spread(attend, tokens, rotary, norms, keys, beside=None, branch=(), others=None, in_pieces=False):
    """Run `attend` (attention.Attend) on every device's shard of `tokens`: queries, keys and values. In cross-attention
    keys and values are replicated. Returns the output, in `Pieces` if asked for and possible, and the rescued rows of
    each device."""
    parallel, mesh, cross = attend.parallel, attend.mesh, attend.cross
    token_axes = parallel.token_axes
    shards = prod(mesh.shape[axis] for axis in token_axes)
    queries = tokens[0].shape[1]
    tokens_spread = PartitionSpec(parallel.batch, token_axes or None, parallel.heads)
    tokens_whole = PartitionSpec(parallel.batch, None, parallel.heads)
    key_spec = tokens_whole if cross else tokens_spread
    table_specs = [PartitionSpec(token_axes or None) for _ in rotary]
    beside_specs = beside and type(beside)(*[tokens_whole] * 3, PartitionSpec(parallel.batch))
    others_specs = others and type(others)(*[kept_spec(parallel, whole_batch=True)] * 2, PartitionSpec())
    pair = attend.gives_pair(beside)
    out_spec = (tokens_spread, tokens_whole) if pair else tokens_spread
    in_pieces = in_pieces and parallel.groups and queries % shards == 0
    if in_pieces := in_pieces and attend.takes_parts(shards, queries // shards, keys):
        out_spec = Pieces((PartitionSpec(parallel.heads, token_axes, parallel.batch),) * len(parallel.groups))

    def on_device(tokens, rotary, norms, beside, branch, others):
        query, key, value = tokens
        if cross:
            query, key = attend.prepare(query, key, (), (), keys)
            out, _, rescued = attend.local(query[0], key[0], value, keys)
            return out, rescued[None]
        if parallel.groups:
            out, rescued = exchange_in_groups(attend, query, key, value, rotary, norms, keys, branch, in_pieces)
            return out, rescued[None]
        first = lax.axis_index(token_axes) * key.shape[1] if token_axes else 0
        place = Place(first, token_axes, lax.axis_size(parallel.ulysses) if parallel.ulysses else 1)
        query, key = attend.prepare(query, key, rotary, norms, keys, place)
        out, rescued = exchange(attend, query, key, value, keys, beside, branch, others)
        return out, rescued[None]

    everywhere = PartitionSpec()
    sharded = jax.shard_map(
        on_device, mesh=mesh,
        in_specs=((tokens_spread, key_spec, key_spec), table_specs, everywhere, beside_specs, everywhere, others_specs),
        out_specs=(out_spec, PartitionSpec(mesh.axis_names)),
        check_vma=False,  # Pallas kernels carry no varying-axes types
    )
    padded = tuple(array if cross and place else pad_tokens(array, shards) for place, array in enumerate(tokens))
    tables = [pad_tokens(table[None], shards)[0] for table in rotary]
    out, rescued = sharded(padded, tables, list(norms), beside, branch, others)
    if in_pieces:
        return out, rescued
    return ((out[0][:, :queries], out[1]) if pair else out[:, :queries]), rescued


def spread_chunk(attend, tokens, rotary, norms, kept):
    """Run `attend.to_kept` on every device's shard of a chunk's queries, keys and values: (out, rescued, kept). What is
    kept stays as Ulysses has exchanged it: a device has all tokens of its heads, and only the chunk's own travel."""
    parallel, mesh = attend.parallel, attend.mesh
    token_axes = parallel.token_axes
    shards = prod(mesh.shape[axis] for axis in token_axes)
    queries, everywhere = tokens[0].shape[1], PartitionSpec()
    tokens_spread = PartitionSpec(parallel.batch, token_axes or None, parallel.heads)
    stacks_spread = kept_spec(parallel), kept_spec(parallel, turned=attend.kernel.turns_values)

    def on_device(tokens, rotary, norms, kept):
        query, key, value = tokens
        parts = lax.axis_size(parallel.ulysses) if parallel.ulysses else 1
        with jax.named_scope("rope"):
            rotations = zip((query, key), (rotary, () if kept.rotary else rotary), norms or (None, None))
            query, key = (attend.rotated(array, tables, parts, norm) for array, tables, norm in rotations)
        out, rescued, kept = attend.to_kept(*tokens_for_heads(attend, query, key, value), kept)
        return heads_for_tokens(attend, out), rescued[None], (kept.key, kept.value)

    kept_specs = type(kept)(*stacks_spread, *[everywhere] * 4)
    sharded = jax.shard_map(
        on_device, mesh=mesh, in_specs=(tokens_spread, [PartitionSpec(token_axes or None)] * len(rotary), everywhere,
                                        kept_specs),
        out_specs=(tokens_spread, PartitionSpec(mesh.axis_names), stacks_spread),
        check_vma=False,  # Pallas kernels carry no varying-axes types
    )
    padded = tuple(pad_tokens(array, shards) for array in tokens)
    tables = [pad_tokens(table[None], shards)[0] for table in rotary]
    out, rescued, (key, value) = sharded(padded, tables, list(norms), kept)
    return out[:, :queries], rescued, kept._replace(key=key, value=value)


def kept_spec(parallel, whole_batch: bool = False, turned: bool = False) -> PartitionSpec:
    """How (layers, batch, tokens, heads * head_dim) is kept, or with tokens last (`turned`): Ulysses cuts the heads of
    each device further. With `whole_batch`, what all of a batch attend to."""
    ulysses = parallel.ulysses if isinstance(parallel.ulysses, tuple) else (parallel.ulysses,)
    heads = tuple(axis for axis in (parallel.heads, *ulysses) if axis)
    batch, heads = None if whole_batch else parallel.batch, heads or None
    return PartitionSpec(None, batch, heads, None) if turned else PartitionSpec(None, batch, None, heads)


def pad_tokens(array, shards):
    """(batch, tokens, …) so that its tokens divide over devices."""
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % shards), (0, 0)))


def divided(array, sharding):
    """(batch, tokens, width), padded if its tokens do not divide over the sharding's devices."""
    return pad_tokens(array, prod(sharding.mesh.shape[axis] for axis in jax.tree.leaves(sharding.spec[1])))


def exchange(attend, query, key, value, keys, beside=None, branch=(), others=None):
    """One device's part of Ulysses, ring or both; `keys` is how many of all keys are valid.

    query, key (parts, batch, tokens, width of a part), one part per device of the Ulysses axis. Values and outputs are
    sent transposed, the TPU kernel's layout. Extra tokens are not sent: each device computes its part of their heads,
    and the results are gathered. `others` are kept as Ulysses has exchanged them; a ring has no place for them.
    """
    axis = attend.parallel.ulysses
    if beside and axis:
        own = [cut_heads(array, lax.axis_size(axis))[lax.axis_index(axis)] for array in beside[:3]]
        beside = beside._replace(query=own[0], key=own[1], value=own[2])
    query, key, value = tokens_for_heads(attend, query, key, value)
    if attend.parallel.ring:
        out, rescued = ring(attend, query, key, value, keys, beside)
    else:
        out, rescued = attend.both(query, key, value, keys, beside, branch, others)
    out, other = out if attend.gives_pair(beside) else (out, None)
    out = heads_for_tokens(attend, out)
    if other is None:
        return out, rescued
    return (out, lax.all_gather(other, axis, axis=2, tiled=True) if axis else other), rescued


def exchange_in_groups(attend, query, key, value, rotary, norms, keys, branch, in_pieces):
    """Ulysses, one group of heads after the other: beside attention to one, the next one's queries and keys travel, and
    the outputs of the one before. XLA has one all-to-all under way at a time, so queries and keys are one array;
    values, which are computed first, are sent whole while queries and keys are computed."""
    axis, kernel = attend.parallel.ulysses, attend.kernel
    parts = lax.axis_size(axis)
    sizes = attend.parallel.group_sizes(value.shape[2] // parts // attend.head_dim)
    value = travel(cut(value.swapaxes(1, 2), parts), axis)
    value, query, key = lax.optimization_barrier((value, query, key))
    with jax.named_scope("rope"):
        first, *later = attend.rotated_together(query, key, rotary, norms, parts, sizes)
    here, outs, total, begin = travel(first, axis), [], 0, 0
    for size in sizes:
        width = size * attend.head_dim
        # What travels beside attention may start when attention can, and has to be there when it ends.
        here, following, last = lax.optimization_barrier((here, later[:1], outs[-1:]))
        following, last = ([travel(array, axis) for array in some] for some in (following, last))
        query = key = join(here)
        if not attend.takes_one_array(keys):
            query, key = query[:, :, :width], key[:, :, width:]
        if attend.takes_parts(parts, value.shape[3], keys):
            out_t, rescued = attend.of_parts(query, key, value, begin, width, keys, in_pieces)
        else:
            value_t = lanes.join(value, kernel, begin, width)
            out, rescued = attend.both(query, key, value_t.swapaxes(1, 2), keys, None, branch)
            out_t = out.swapaxes(1, 2)
        out_t, here, outs[-1:] = lax.optimization_barrier((out_t, following, last))
        outs.append(out_t.reshape(parts, -1, *out_t.shape[1:]) if in_pieces else lanes.cut(out_t, parts, kernel))
        here, later = here[0] if here else None, later[1:]
        total, begin = total + rescued, begin + width
    outs[-1] = travel(outs[-1], axis)
    if in_pieces:
        return Pieces(tuple(outs)), total
    return lanes.stack(outs, kernel).swapaxes(1, 2), total


def tokens_for_heads(attend, query, key, value):
    """Ulysses, if it is on: from some tokens of all heads to all tokens of some heads."""
    axis = attend.parallel.ulysses
    if not axis or lax.axis_size(axis) == 1:
        return query[0], key[0], value
    query, key = (join(travel(x, axis)) for x in (query, key))
    value = travel(cut(value.swapaxes(1, 2), lax.axis_size(axis)), axis)
    return query, key, lanes.join(value, attend.kernel).swapaxes(1, 2)


def heads_for_tokens(attend, out):
    """And back."""
    axis = attend.parallel.ulysses
    if not axis or lax.axis_size(axis) == 1:
        return out
    out = lanes.cut(out.swapaxes(1, 2), lax.axis_size(axis), attend.kernel)
    return join(travel(out, axis)).swapaxes(1, 2)


# The parts of an all-to-all are the leading dimension: splitting along the last dimension in place would make XLA copy
# the array five times between layouts.


def cut(array, parts):
    """(batch, …, …) -> (parts, batch, …, …), cut along dimension 1."""
    return jnp.moveaxis(array.reshape(array.shape[0], parts, -1, array.shape[2]), 1, 0)


def cut_heads(array, parts):
    """(batch, tokens, width) -> (parts, batch, tokens, width of a part)"""
    return jnp.stack(jnp.split(array, parts, axis=2))


def travel(pieces, axis):
    """All-to-all: part i goes to the i-th device of the axis, and the i-th device's part becomes part i."""
    return lax.all_to_all(pieces, axis, split_axis=0, concat_axis=0, tiled=True)


def join(pieces):
    """(parts, batch, …, …) -> (batch, …, …), concatenated along dimension 1."""
    return jnp.moveaxis(pieces, 0, 1).reshape(pieces.shape[1], -1, pieces.shape[3])


def ring(attend, query, key, value, keys, beside=None):
    """Attention of this device's queries to the keys of all devices on the ring axis, and the rescued rows. Queries of
    extra tokens are replicated: each device attends to its own keys, and the results are merged."""
    axis = attend.parallel.ring
    size, shard = lax.axis_size(axis), key.shape[1]
    real = [min(max(keys - index * shard, 0), shard) for index in range(size)]  # only the last shards have padding
    lengths = sorted(set(real))
    neighbours = [(index, (index + 1) % size) for index in range(size)]

    so_far, rescued, held = (), 0, [key, value.swapaxes(1, 2)]
    if beside:
        (out, log_sum), rescued = attend.start(query, beside)
        so_far = out.swapaxes(1, 2), log_sum
    for step in range(size):  # unrolled: a scan would copy its carry
        here, last = held, step == size - 1
        if not last:  # overlap the next step's transfer with this step's attention, but do not start it earlier
            here, so_far = lax.optimization_barrier((here, so_far))
            held = [lax.ppermute(array, axis, neighbours) for array in here]
        which = jnp.array([lengths.index(length) for length in real])[(lax.axis_index(axis) - step) % size]
        dtype = query.dtype if last else jnp.float32
        choices = [partial(attend_real, attend, length, dtype, query) for length in lengths]
        so_far, more = lax.switch(which, choices, so_far, *here)
        rescued += more
    out = so_far[0].swapaxes(1, 2)
    if beside is None:
        return out, rescued
    which = jnp.array([lengths.index(length) for length in real])[lax.axis_index(axis)]
    choices = [partial(attend_real, attend, length, jnp.float32, beside.query) for length in lengths]
    (part, log_sum), more = lax.switch(which, choices, (), key, value.swapaxes(1, 2))
    parts = lax.all_gather((part.swapaxes(1, 2), log_sum), axis)
    other, first = attend.start(beside.query, beside)
    for index in range(size):
        other = merge(other, (parts[0][index], parts[1][index]), attend.head_dim)
    return (out, other[0].astype(query.dtype)), rescued + more + first


def attend_real(attend, length, dtype, query, before, key, value_t):
    """(out_t, log_sum) over `before`, possibly (), and the first `length` keys; and the rescued rows."""
    if length:
        before = before and (before[0].swapaxes(1, 2), before[1])
        out, log_sum, rescued = attend.go_on(before, query, key, value_t.swapaxes(1, 2), length, dtype)
        return (out.swapaxes(1, 2), log_sum), rescued
    if before:
        return (before[0].astype(dtype), before[1]), jnp.int32(0)
    batch, queries, width = query.shape  # all keys are padding: the result has weight zero
    log_sum = jnp.full((batch, width // attend.head_dim, queries), jnp.finfo(jnp.float32).min)
    return (jnp.zeros((batch, width, queries), dtype), log_sum), jnp.int32(0)


def merge(first, second, head_dim):
    """Attention over two disjoint sets of keys, from (out, log_sum) of each."""
    (first_out, first_sum), (second_out, second_sum) = first, second
    log_sum = jnp.logaddexp(first_sum, second_sum)
    out = sum(out * jnp.repeat(jnp.exp(part - log_sum).swapaxes(1, 2), head_dim, axis=2)
              for out, part in ((first_out, first_sum), (second_out, second_sum)))
    return out, log_sum
