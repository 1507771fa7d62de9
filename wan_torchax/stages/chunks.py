"""A video through the VAE piece by piece: a program for its first piece, one for all later ones, caches in between."""
from collections.abc import Callable

import jax
import numpy

from wan_torchax.devices.sharding import partition_spec, replicated
from wan_torchax.runtime.programs import Program
from wan_torchax.stages.stage import Stage


def add_chunks(
    stage: Stage, function: Callable, first: jax.ShapeDtypeStruct, later: jax.ShapeDtypeStruct, carry=None
) -> None:
    """Programs `first` and `later` of function(arrays, piece, caches=None) -> (result, finite, caches).

    The caches lie on the devices as the spec `carry` says; without it as `sharding.vae.carry`, their channels last.
    """
    everywhere, spec = replicated(stage.mesh), partition_spec(stage.config.sharding.vae.carry)
    channels_last = jax.sharding.PartitionSpec(*spec[:1], *spec[2:], *spec[1:2])
    carry = jax.sharding.NamedSharding(stage.mesh, channels_last if carry is None else carry)

    def carried(cache):
        return jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=carry)

    def later_arguments(lowered):
        return [later, jax.tree.map(carried, lowered["first"].out_info[2])]

    outputs = (everywhere, everywhere, carry)
    stage.add("first", Program(function, "vae", [first], outputs))
    stage.add("later", Program(function, "vae", later_arguments, outputs, donated=(2,)))


def statistics(architecture) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Mean and deviation of the VAE's latents, by channel: models see them normalised."""
    return tuple(numpy.float32(architecture[key]).reshape(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
