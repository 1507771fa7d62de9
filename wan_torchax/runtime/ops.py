"""Resolves the op overrides of conf/ops: dotted names to torch ops and functions."""
import importlib

import torch

from wan_torchax.config.schema import ConfigError, Op
from wan_torchax.config.wording import nearest

OWN = ("patches", "kernels")  # the project's modules that an override may name


def load_ops(table, platform: str, allow_external: bool) -> dict:
    """The overrides for this platform, as {torch op: implementation}."""
    rows = {name: Op(**row) for name, row in table.items()}
    return {
        find_op(name, row.op): find_function(f"ops.{name}.implementation", row.implementation, allow_external)
        for name, row in rows.items()
        if not row.platforms or platform in row.platforms
    }


def find_op(name: str, path: str):
    """`aten.native_layer_norm` -> torch.ops.aten.native_layer_norm; `torch.…` is looked up as given."""
    parent = torch.ops if path.startswith("aten.") else torch
    for part in path.removeprefix("torch.").split("."):
        if not hasattr(parent, part):
            close = nearest(part, public_names(parent))
            raise ConfigError(f"ops.{name}.op={path}: torch has no such op; {close}")
        parent = getattr(parent, part)
    return parent


def find_function(key: str, path: str, allow_external: bool):
    """A function by dotted path; only from the project's own modules unless `allow_external` is set."""
    module_name, _, name = path.rpartition(".")
    own = module_name.split(".")[0] in OWN
    if not own and not allow_external:
        raise ConfigError(f"{key}={path}: not in {' or '.join(OWN)}; set allow_external_ops=true to trust it")
    try:
        module = importlib.import_module(f"wan_torchax.{module_name}" if own else module_name)
    except ImportError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    if not callable(getattr(module, name, None)):
        choices = [choice for choice in public_names(module) if callable(getattr(module, choice))]
        raise ConfigError(f"{key}={path}: no such function; {nearest(name, choices)}")
    return getattr(module, name)


def public_names(owner) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]
