"""Chunked VAE passes over a video: one program for the first chunk, one for all later ones, caches carried over."""
from collections.abc import Callable

import jax

from wan_torchax.devices.sharding import padded, replicated
from wan_torchax.runtime.programs import Program
from wan_torchax.stages.stage import Stage


def add_chunks(
    stage: Stage, function: Callable, first: jax.ShapeDtypeStruct, later: jax.ShapeDtypeStruct | None,
    caches_spec: jax.sharding.PartitionSpec,
) -> None:
    """Programs `first` and, unless there is no later piece, `later` of function(arrays, piece, caches=None) -> (result,
    finite, caches). Between calls caches are padded to what the devices divide: arguments and results of a program have
    to be."""
    everywhere, carry = replicated(stage.mesh), jax.sharding.NamedSharding(stage.mesh, caches_spec)

    def chunk(arrays, piece, caches=None):
        if caches is not None:
            real = jax.eval_shape(function, arrays, first)[2]
            caches = jax.tree.map(lambda cache, kept: cache[tuple(map(slice, kept.shape))], caches, real)
        result, finite, caches = function(arrays, piece, caches)
        return result, finite, jax.tree.map(lambda cache: padded(cache, carry), caches)

    def carried(cache):
        return jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=carry)

    def later_arguments(lowered):
        return [later, jax.tree.map(carried, lowered["first"].out_info[2])]

    outputs, (component,) = (everywhere, everywhere, carry), stage.components
    stage.add("first", Program(chunk, component, [first], outputs))
    if later is not None:
        stage.add("later", Program(chunk, component, later_arguments, outputs, donated=(2,)))
