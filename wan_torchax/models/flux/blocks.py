"""FLUX.1's transformer as functions of its arrays.

    forward = denoiser(module, settings)                        # settings: models.family.Forward
    output = forward(arrays, latents, time, conditions)         # inside jax.jit and torchax

Time, pooled text and guidance modulate every norm, by weights of each block.
"""
from collections.abc import Callable
from dataclasses import replace

import diffusers
import jax
import jax.numpy as jnp
import torch

from wan_torchax.models.family import Forward, Output
from wan_torchax.models.flux import PATCH, streams
from wan_torchax.models.flux.streams import (
    DOUBLE,
    IMAGE,
    SINGLE,
    TEXT,
    Context,
    attend_together,
    part_of,
    project,
    rotary,
)
from wan_torchax.models.loop import Layer, linear_of_all_blocks
from wan_torchax.models.modules import construct
from wan_torchax.patches import call_module

THETA = 10000.0  # of RoPE
NORMS = "norm1_context", "norm1"  # of a double block, as modulated first


def build(architecture) -> torch.nn.Module:
    return construct(diffusers.FluxTransformer2DModel, architecture)


def denoiser(module, forward: Forward) -> Callable[..., Output]:
    """See streams.denoiser. The text has no positions."""
    forward = replace(forward, architecture=dict(module.config))  # with the class's defaults
    sizes = tuple(forward.architecture["axes_dims_rope"])

    def embed(arrays, time, conditions):
        """The time, 0 to 1000, the pooled text and, if the model takes it, the guidance scale."""
        pooled = conditions["pooled"]
        given = [jnp.broadcast_to(time, len(pooled))]
        if "guidance" in conditions:
            given.append(1000 * conditions["guidance"])
        time = jax.nn.silu(call_module(module.time_text_embed, part_of(arrays, "time_text_embed"), *given, pooled))
        return time, {
            name: linear_of_all_blocks(arrays, stack, f"{name}.linear", time, forward)
            for stack, name in (*((DOUBLE, name) for name in NORMS), (SINGLE, "norm"))
        }

    def tables():
        shape = forward.text_tokens, sum(sizes)
        still = [jnp.broadcast_to(table, shape) for table in rotary((1, 1, 1), sizes, THETA)]
        return still, rotary(forward.grid, sizes, THETA)

    return streams.denoiser(forward, PATCH, tables, embed, double_block, single_block)


def double_block(context: Context, layer: Layer, both):
    """((text, image), rescued) of one block on both streams (batch, tokens, channels)."""
    rows = [context.rows(name, layer.index, 6) for name in NORMS]
    normed = [layer.norm("norm1", stream, 1 + row[1], row[0]) for stream, row in zip(both, rows)]
    outs, rescued = attend_together(context, layer, normed)
    made = []
    for end, names, stream, row, out in zip(("_context", ""), (TEXT, IMAGE), both, rows, outs):
        stream = layer.linear(names.out, out, residual=stream, gate=row[2], kernel=True, transpose_in=True)
        normed = layer.norm("norm2", stream, 1 + row[4], row[3])
        wide = layer.linear(f"ff{end}.net.0.proj", normed, gelu=True, kernel=True)
        made.append(layer.linear(f"ff{end}.net.2", wide, residual=stream, gate=row[5], kernel=True))
    return tuple(made), rescued


def single_block(context: Context, layer: Layer, tokens):
    """(tokens, rescued) of one block on the sequence of text and image (batch, tokens, channels)."""
    shift, scale, gate = context.rows("norm", layer.index, 3)
    normed = layer.norm("norm", tokens, 1 + scale, shift)
    if context.tables:
        norms = ()
        query, key, value = (project(layer, IMAGE, place, normed, context.tables[2]) for place in range(3))
    else:
        norms = [layer[f"{name}.weight"] for name in IMAGE.norms]
        query, key, value = (layer.linear(name, normed) for name in IMAGE.projections)
    with jax.named_scope("attn/attend"):
        out, rescued = context.attend.counted(query, key, value, context.rotary, norms)
    wide = layer.linear("proj_mlp", normed, gelu=True, kernel=True)
    tokens = layer.linear("proj_out", (out, wide), residual=tokens, gate=gate, kernel=True, transpose_in=True)
    return tokens, rescued
