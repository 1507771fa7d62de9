"""Attention over a mesh: heads sharded, Ulysses, ring, and Ulysses × ring, all through one `jax.shard_map`.

A scheme is which mesh axes `schema.Parallel` names. Before and after attention:

    tokens  over (ring, ulysses), ring the slower; padded at the end where they do not divide, exactly masked
    heads   over heads

Inside, Ulysses trades tokens for heads (all-to-all) and back; the ring then passes keys and values from
neighbour to neighbour while each device merges what it sees, so no device ever holds all of them.
Arrays are (batch, tokens, heads * head_dim); a head is a contiguous run of the last dimension.
"""
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

EMPTY = -1e30  # log-sum-exp of no keys at all, finite so that two empty parts merge without NaN


def spread(local, query, key, value, head_dim, parallel, mesh, cross):
    """Run `local(query, key, value) -> (out, log_sum)` on every device's share; with `cross`, keys stay whole."""
    token_axes = tuple(axis for axis in (parallel.ring, parallel.ulysses) if axis)
    shards = prod(mesh.shape[axis] for axis in token_axes)
    queries, keys = query.shape[1], key.shape[1]
    tokens_spread = PartitionSpec(parallel.batch, token_axes or None, parallel.heads)
    tokens_whole = PartitionSpec(parallel.batch, None, parallel.heads)
    key_spec = tokens_whole if cross else tokens_spread

    def on_device(query, key, value):
        if cross:
            return local(query, key, value)[0]
        return exchange(local, query, key, value, head_dim, parallel, keys)

    sharded = jax.shard_map(on_device, mesh=mesh, in_specs=(tokens_spread, key_spec, key_spec), out_specs=tokens_spread,
                            check_vma=False)  # Pallas kernels carry no varying-axes types
    query = pad_tokens(query, shards)
    key, value = (x if cross else pad_tokens(x, shards) for x in (key, value))
    return sharded(query, key, value)[:, :queries]


def spread_by_token(function, array, tables, parallel, mesh):
    """Run `function(array, *tables)`, which works token by token, on every device's share; tables are (tokens, …)."""
    token_axes = tuple(axis for axis in (parallel.ring, parallel.ulysses) if axis)
    shards = prod(mesh.shape[axis] for axis in token_axes)
    spec, table_spec = PartitionSpec(parallel.batch, token_axes or None, parallel.heads), PartitionSpec(token_axes or None)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=(spec, *(table_spec for _ in tables)), out_specs=spec, check_vma=False)
    padded = (pad_tokens(table[None], shards)[0] for table in tables)
    return sharded(pad_tokens(array, shards), *padded)[:, :array.shape[1]]


def pad_tokens(array, shards):
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % shards), (0, 0)))


def exchange(local, query, key, value, head_dim, parallel, keys):
    """One device's part of Ulysses, ring or both; `keys` is how many of all keys are real."""
    if parallel.ulysses:
        to_heads = [lax.all_to_all(x, parallel.ulysses, split_axis=2, concat_axis=1, tiled=True) for x in (query, key, value)]
        query, key, value = to_heads
    if parallel.ring:
        out = ring(local, query, key, value, head_dim, parallel.ring, keys)
    else:
        out = local(query, key[:, :keys], value[:, :keys])[0]
    if parallel.ulysses:
        out = lax.all_to_all(out, parallel.ulysses, split_axis=1, concat_axis=2, tiled=True)
    return out


def ring(local, query, key, value, head_dim, axis, keys):
    """Attention of this device's queries to the keys of every device on `axis`."""
    size, shard = lax.axis_size(axis), key.shape[1]
    real = [min(max(keys - index * shard, 0), shard) for index in range(size)]  # only the last shards hold padding
    lengths = sorted(set(real))
    neighbours = [(index, (index + 1) % size) for index in range(size)]

    def part(step, key, value):
        source = (lax.axis_index(axis) - step) % size
        which = jnp.array([lengths.index(length) for length in real])[source]
        branches = [lambda key, value, length=length: attend_real(local, query, key, value, head_dim, length) for length in lengths]
        out, log_sum = lax.switch(which, branches, key, value)
        return out.astype(jnp.float32), log_sum

    def step(carry, number):
        result, key, value = carry
        key, value = (lax.ppermute(x, axis, neighbours) for x in (key, value))
        return (merge(result, part(number, key, value), head_dim), key, value), None

    start = (part(0, key, value), key, value)
    ((out, _), _, _), _ = lax.scan(step, start, jnp.arange(1, size))
    return out.astype(query.dtype)


def attend_real(local, query, key, value, head_dim, length):
    """`local` on the first `length` keys; a shard that is all padding contributes nothing."""
    if length:
        return local(query, key[:, :length], value[:, :length])
    batch, queries, width = query.shape
    return jnp.zeros_like(query), jnp.full((batch, width // head_dim, queries), EMPTY)


def merge(first, second, head_dim):
    """Attention over two disjoint sets of keys, from (out, log_sum) of each."""
    (first_out, first_sum), (second_out, second_sum) = first, second
    log_sum = jnp.logaddexp(first_sum, second_sum)
    out = sum(out * jnp.repeat(jnp.exp(part - log_sum).swapaxes(1, 2), head_dim, axis=2)
              for out, part in ((first_out, first_sum), (second_out, second_sum)))
    return out, log_sum
