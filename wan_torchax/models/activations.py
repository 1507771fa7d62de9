"""Sharding constraints on the activations between a VAE's modules."""
import functools
import re

import jax
import torch

from wan_torchax.config.schema import ConfigError
from wan_torchax.devices.sharding import partition_spec
from wan_torchax.patches import interop


def constrain_pictures(module: torch.nn.Module, pattern: str, spec, mesh) -> None:
    """Apply `sharding.picture` to the input and output of every submodule whose name matches."""
    sharding = jax.sharding.NamedSharding(mesh, partition_spec(spec))
    constrain = functools.partial(constrain_tensor, sharding=sharding)
    for name, child in module.named_modules():
        if re.fullmatch(pattern, name):
            child.register_forward_pre_hook(lambda _, inputs: (constrain(inputs[0]), *inputs[1:]))
            child.register_forward_hook(lambda _, inputs, output: constrain(output))


def constrain_tensor(tensor, sharding):
    """Sizes need not divide: inside a program XLA pads, and masks what it has padded."""
    if len(sharding.spec) > tensor.ndim:
        shape = tuple(tensor.shape)
        raise ConfigError(f"sharding.picture: an activation of shape {shape} has {tensor.ndim} dimensions; "
                          f"the spec has {len(sharding.spec)}; shorten the spec")
    return interop.call_jax(jax.lax.with_sharding_constraint, tensor, sharding)
