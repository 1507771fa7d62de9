"""FLUX.2's transformer as functions of its arrays; what it shares with FLUX.1 is in models/flux/streams.py.

All blocks of a stack share their modulation; feed-forwards are gated; a single block's first linear layers are one, and
so are its last; text tokens have positions; there are no biases.
"""
import itertools
from collections.abc import Callable
from dataclasses import replace

import diffusers
import jax
import jax.numpy as jnp
import torch

from wan_torchax.models.family import Forward, Output
from wan_torchax.models.flux import streams
from wan_torchax.models.flux.streams import IMAGE, TEXT, Context, attend_together, linear, over_heads, part_of, rotary
from wan_torchax.models.loop import Layer
from wan_torchax.models.modules import construct
from wan_torchax.patches import call_module


def build(architecture) -> torch.nn.Module:
    return construct(diffusers.Flux2Transformer2DModel, architecture)


def denoiser(module, forward: Forward) -> Callable[..., Output]:
    """See streams.denoiser. Positions are of four axes: a time, which is 0, row and column, place in the text."""
    forward = replace(forward, architecture=dict(module.config))  # with the class's defaults
    sizes, theta = tuple(forward.architecture["axes_dims_rope"]), float(forward.architecture["rope_theta"])

    def embed(arrays, time, conditions):
        own = module.time_guidance_embed
        waves = call_module(own.time_proj, {}, jnp.broadcast_to(time, len(conditions["embeddings"])))
        weights = part_of(arrays, "time_guidance_embed.timestep_embedder")
        time = jax.nn.silu(call_module(own.timestep_embedder, weights, waves.astype(forward.dtype)))
        modulation = {
            name: jnp.split(linear(arrays, f"{name}.linear", time), count, axis=-1) for name, count in
            (("double_stream_modulation_txt", 6), ("double_stream_modulation_img", 6), ("single_stream_modulation", 3))
        }
        return time, tuple(modulation.values())

    def tables():
        return rotary((1, 1, 1, forward.text_tokens), sizes, theta), rotary((*forward.grid, 1), sizes, theta)

    return streams.denoiser(forward, 1, tables, embed, double_block, single_block)


def double_block(context: Context, layer: Layer, both):
    """((text, image), rescued) of one block on both streams (batch, tokens, channels)."""
    rows = context.modulation[:2]
    normed = [layer.norm("norm1", stream, 1 + row[1], row[0]) for stream, row in zip(both, rows)]
    outs, rescued = attend_together(context, layer, normed)
    made = []
    for end, names, stream, row, out in zip(("_context", ""), (TEXT, IMAGE), both, rows, outs):
        stream = layer.linear(names.out, out, residual=stream, gate=row[2])
        wide = layer[f"ff{end}.linear_out.weight"].shape[1]
        normed = layer.norm("norm2", stream, 1 + row[4], row[3])
        gated = gate(*cut(context, layer, f"ff{end}.linear_in", normed, [wide, wide]))
        made.append(layer.linear(f"ff{end}.linear_out", gated, residual=stream, gate=row[5]))
    return tuple(made), rescued


def single_block(context: Context, layer: Layer, tokens):
    """(tokens, rescued) of one block on the sequence of text and image (batch, tokens, channels)."""
    shift, scale, gate_row = context.modulation[2]
    normed = layer.norm("norm", tokens, 1 + scale, shift)
    width, wide = tokens.shape[-1], layer["attn.to_out.weight"].shape[1] - tokens.shape[-1]
    sizes = [width, width, width, wide, wide]
    query, key, value, *gated = cut(context, layer, "attn.to_qkv_mlp_proj", normed, sizes)
    norms = [layer[f"{name}.weight"] for name in IMAGE.norms]
    with jax.named_scope("attn/attend"):
        out, rescued = context.attend.counted(query, key, value, context.rotary, norms)
    return layer.linear("attn.to_out", (out, gate(*gated)), residual=tokens, gate=gate_row), rescued


def cut(context: Context, layer: Layer, name: str, normed, sizes: list[int]):
    """The outputs of linear layers of these sizes that are stored as one."""
    ends = list(itertools.accumulate(sizes, initial=0))
    outs = (layer.linear(name, normed, rows=slice(*pair)) for pair in itertools.pairwise(ends))
    return [over_heads(context, out) for out in outs]


def gate(first, second):
    return jax.nn.silu(first) * second
