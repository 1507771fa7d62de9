"""Converts the config's sharding specs to JAX's and validates them."""
import math

import jax


def replicated(mesh) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def struct(mesh, shape, dtype) -> jax.ShapeDtypeStruct:
    """A replicated argument."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))


def partition_spec(spec) -> jax.sharding.PartitionSpec:
    """A config's spec as JAX's: lists become tuples."""
    entries = (entry if entry is None or isinstance(entry, str) else tuple(entry) for entry in spec)
    return jax.sharding.PartitionSpec(*entries)


def spec_problem(spec, shape, mesh) -> str | None:
    """Why a tensor of this shape cannot be sharded this way, with a remedy; None if it can."""
    if len(spec) > len(shape):
        return f"has {len(shape)} dimensions, the spec {tuple(spec)} has {len(spec)}; shorten the spec"
    for dimension, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        size = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % size:
            names = " x ".join(axes)
            remedy = f"use a mesh where {names} divides it, or null"
            return f"has {shape[dimension]} in dimension {dimension}, not divisible by {names} = {size}; {remedy}"
    return None
