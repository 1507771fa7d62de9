"""Prepares torch modules for tracing. Imports torch and diffusers."""
import inspect
import logging
from collections.abc import Mapping

import jax
import torch

from wan_torchax.config.schema import ConfigError

log = logging.getLogger("wan")


def construct(kind: type, architecture: Mapping) -> torch.nn.Module:
    """A module on the meta device: shapes and names, no memory. An unknown setting is an error unless it is off: Wan
    2.2's VAE has clip_output: false."""
    architecture, taken = dict(architecture), inspect.signature(kind).parameters
    for name in sorted(architecture.keys() - taken.keys()):
        if architecture[name] not in (None, False):
            raise ConfigError(
                f"{name}={architecture[name]} in the checkpoint's config.json: {kind.__name__} does not know it; "
                "a newer version of diffusers may"
            )
        log.info("%s: %s=%s in the checkpoint's config.json is left out", kind.__name__, name, architecture[name])
    with torch.device("meta"):
        return kind(**{name: value for name, value in architecture.items() if name in taken}).eval()


def name_scopes(module: torch.nn.Module) -> None:
    """Put the module's name into the metadata of every op, for plans and profiles: …/<block>/<layer>/…"""
    open_scopes = []

    def enter(child, _):
        open_scopes.append(jax.named_scope(child.scope_name))
        open_scopes[-1].__enter__()

    def leave(child, *_):
        open_scopes.pop().__exit__(None, None, None)

    for name, child in module.named_modules():
        if name:
            child.scope_name = name.rpartition(".")[2]
            child.register_forward_pre_hook(enter)
            child.register_forward_hook(leave, always_call=True)


def t5_encoder(kind, config) -> torch.nn.Module:
    """A text encoder of transformers' T5 classes, on the meta device."""
    with torch.device("meta"):
        module = kind(config).eval()
    if module.encoder.embed_tokens.weight is not module.shared.weight:
        raise RuntimeError("transformers left the encoder's embedding untied from the shared table: it gives noise")
    return module
