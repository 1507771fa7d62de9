"""Sharding constraints on what flows between a model's modules, by the rules of sharding.<component>.activations."""
import functools
import re

import jax
import torch

from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import nearest
from wan_torchax.devices.sharding import partition_spec, spec_problem
from wan_torchax.patches import interop


def constrain_activations(module: torch.nn.Module, rules, mesh, key: str) -> None:
    """Sharding constraints on the inputs and outputs of every submodule whose name a rule matches."""
    names = [name for name, _ in module.named_modules()]
    for rule_name, rule in rules.items():
        matches = [name for name in names if re.fullmatch(rule.pattern, name)]
        if not matches:
            close = nearest(rule.pattern, names)
            raise ConfigError(f"{key}.{rule_name}.pattern={rule.pattern}: matches no module; {close}")
        sharding = jax.sharding.NamedSharding(mesh, partition_spec(rule.spec))
        constrain = functools.partial(constrain_tensor, sharding=sharding, key=f"{key}.{rule_name}")
        for name in matches:
            constrain_module(module.get_submodule(name), constrain)


def constrain_module(module: torch.nn.Module, constrain) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (constrain(inputs[0]), *inputs[1:]))
    module.register_forward_hook(lambda _, inputs, output: constrain(output))


def constrain_tensor(tensor, sharding, key: str):
    if tensor.shape[0] == 1:
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec_of_one(sharding, tensor.shape))
    problem = spec_problem(sharding.spec, tensor.shape, sharding.mesh)
    if problem:
        raise ConfigError(f"{key}.spec: an activation of shape {tuple(tensor.shape)} {problem}")
    return interop.call_jax(jax.lax.with_sharding_constraint, tensor, sharding)


def spec_of_one(sharding, shape) -> jax.sharding.PartitionSpec:
    """A batch of one cannot be spread: its axis takes a share of the tokens, where those are spread and divide."""
    batch, *others = *sharding.spec, *[None] * (2 - len(sharding.spec))
    if isinstance(batch, str) and isinstance(others[0], str):
        joined = jax.sharding.PartitionSpec(None, (batch, others[0]), *others[1:])
        if spec_problem(joined, shape, sharding.mesh) is None:
            return joined
    return jax.sharding.PartitionSpec(None, *others)
