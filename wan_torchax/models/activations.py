"""Sharding constraints on the activations between a VAE's modules."""
import functools
import re

import jax
import torch

from wan_torchax.config.schema import ConfigError
from wan_torchax.devices.sharding import partition_spec, spec_problem
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
    problem = spec_problem(sharding.spec, tensor.shape, sharding.mesh)
    if problem:
        raise ConfigError(f"sharding.picture: an activation of shape {tuple(tensor.shape)} {problem}")
    return interop.call_jax(jax.lax.with_sharding_constraint, tensor, sharding)
