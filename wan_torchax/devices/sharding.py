"""Converts the config's sharding specs to JAX's and validates them."""
import math

import jax
import jax.numpy as jnp


def replicated(mesh) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def struct(mesh, shape, dtype) -> jax.ShapeDtypeStruct:
    """A replicated argument."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))


def partition_spec(spec) -> jax.sharding.PartitionSpec:
    """A config's spec as JAX's: lists become tuples."""
    entries = (entry if entry is None or isinstance(entry, str) else tuple(entry) for entry in spec)
    return jax.sharding.PartitionSpec(*entries)


def ways(entry, mesh) -> int:
    """The number of shards that a spec's entry, an axis, several or None, makes of a dimension."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(mesh.shape[axis] for axis in axes)


def padded(array, sharding: jax.sharding.NamedSharding):
    """The array with zeros at the end of every dimension that its devices do not divide."""
    spec = (*sharding.spec, *[None] * (array.ndim - len(sharding.spec)))
    return jnp.pad(array, [(0, -size % ways(entry, sharding.mesh)) for size, entry in zip(array.shape, spec)])


def spec_problem(spec, shape, mesh) -> str | None:
    """Why a tensor of this shape cannot be sharded this way, with a remedy; None if it can."""
    if len(spec) > len(shape):
        return f"has {len(shape)} dimensions, the spec {tuple(spec)} has {len(spec)}; shorten the spec"
    for dimension, entry in enumerate(spec):
        size = ways(entry, mesh)
        if shape[dimension] % size:
            names = entry if isinstance(entry, str) else " x ".join(entry)
            remedy = f"use a mesh where {names} divides it, or null"
            return f"has {shape[dimension]} in dimension {dimension}, not divisible by {names} = {size}; {remedy}"
    return None
