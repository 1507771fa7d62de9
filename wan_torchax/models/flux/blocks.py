"""FLUX.1's transformer as functions of its arrays.

    forward = denoiser(module, settings)                        # settings: models.family.Forward
    output = forward(arrays, latents, time, conditions)         # inside jax.jit and torchax

Double blocks have weights of their own for text and image, which attend together; single blocks take both as one
sequence, and compute attention and feed-forward side by side. Time, pooled text and guidance modulate every norm.
"""
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import diffusers
import jax
import jax.numpy as jnp
import torch

from wan_torchax.kernels.attention import GUARDED, Attend
from wan_torchax.kernels.rotary import normalized
from wan_torchax.models.family import Forward, Output
from wan_torchax.models.flux.streams import (
    EPSILON,
    head,
    joined,
    linear,
    packed,
    part_of,
    parted,
    parts_of,
    rotary,
    unpacked,
)
from wan_torchax.models.loop import Blocks, Layer, no_rows, pad_tokens, token_sharding
from wan_torchax.models.modules import construct
from wan_torchax.patches import call_module

THETA = 10000.0  # of RoPE
PATCH = 2  # latent pixels a side of a token


class Names(NamedTuple):
    """The layers of one stream of a double block."""

    modulation: str
    projections: tuple[str, str, str]  # query, key and value
    norms: tuple[str, str]  # of query and key
    out: str
    wide: str
    narrow: str


TEXT = Names(
    "norm1_context.linear", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    ("attn.norm_added_q", "attn.norm_added_k"), "attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2",
)
IMAGE = Names(
    "norm1.linear", ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.norm_q", "attn.norm_k"), "attn.to_out.0",
    "ff.net.0.proj", "ff.net.2",
)


class Context(NamedTuple):
    """Inputs shared by all blocks."""

    attend: Attend
    time: jax.Array  # (batch, channels): time, pooled text and guidance, after the SiLU
    rotary: list[jax.Array]  # cosines and sines (tokens, head_dim)
    texts: int  # tokens of the text
    parts: int  # of the sequence of text and image, see streams.joined


def build(architecture) -> torch.nn.Module:
    return construct(diffusers.FluxTransformer2DModel, architecture)


def denoiser(module, forward: Forward) -> Callable[..., Output]:
    """(arrays, latents (batch, channels, 1, height, width), time, conditions, residual) -> Output. `residual`, the
    blocks' residual of an earlier step, replaces the blocks."""
    forward = replace(forward, architecture=dict(module.config))  # with the class's defaults
    sizes, parts, texts = tuple(forward.architecture["axes_dims_rope"]), parts_of(forward), forward.text_tokens
    attend = Attend(
        forward.architecture["attention_head_dim"], forward.self_attention, forward.parallel, forward.mesh,
        keys=texts + forward.tokens, norm_epsilon=EPSILON, grid=forward.grid,
    )

    def velocity(arrays, latents, time, conditions, residual=None) -> Output:
        batch = len(latents)
        sharding = token_sharding(forward.mesh, forward.parallel, batch)
        text, image = (
            jax.lax.with_sharding_constraint(linear(arrays, name, array.astype(forward.dtype)), sharding)
            for name, array in (("context_embedder", conditions["embeddings"]), ("x_embedder", packed(latents, PATCH)))
        )
        time = jax.nn.silu(embed(module, arrays, time, conditions))
        before, counted = image, None
        if residual is not None:
            image = image + residual[:, : forward.tokens]
        else:
            # The text has no position.
            still = [jnp.broadcast_to(table, (texts, table.shape[1])) for table in rotary((1, 1, 1), sizes, THETA)]
            placed = rotary(forward.grid, sizes, THETA)
            tables = [joined(own[None], other[None], parts)[0] for own, other in zip(still, placed)]
            image, counted = run_blocks(arrays, forward, Context(attend, time, tables, texts, parts), text, image)
        velocity = unpacked(head(arrays, image, time), latents.shape, PATCH)
        return Output(velocity, pad_tokens(image - before, forward.multiple), counted)

    return velocity


def embed(module, arrays: dict, time, conditions):
    """(batch, channels) of the time, 0 to 1000, the pooled text and, if the model takes it, the guidance scale."""
    pooled = conditions["pooled"]
    given = [jnp.broadcast_to(time, len(pooled))]
    if "guidance" in conditions:
        given.append(1000 * conditions["guidance"])
    return call_module(module.time_text_embed, part_of(arrays, "time_text_embed"), *given, pooled)


def run_blocks(arrays: dict, forward: Forward, context: Context, text, image):
    """The image's tokens after all blocks, and the rescued rows (layers, devices)."""
    architecture, guarded = forward.architecture, context.attend.kernel.kernel in GUARDED
    counts = []

    def run(stack: str, layers: int, block: Callable, carry: Any):
        blocks = Blocks.of(arrays, stack, layers, forward, epsilon=EPSILON)
        carry, counted = blocks.run(
            lambda layer, carry: block(context, layer, carry), carry, no_rows(layers, forward.mesh, guarded)
        )
        counts.append(counted)
        return carry

    text, image = run("transformer_blocks", architecture["num_layers"], double_block, (text, image))
    tokens = joined(text, image, context.parts)
    sharding = token_sharding(forward.mesh, forward.parallel, len(tokens))
    tokens = run(
        "single_transformer_blocks", architecture["num_single_layers"], single_block,
        jax.lax.with_sharding_constraint(tokens, sharding),
    )
    _, image = parted(tokens, context.texts, context.parts)
    return image, jnp.concatenate(counts) if guarded else None


def double_block(context: Context, layer: Layer, streams):
    """((text, image), rescued) of one block on both streams (batch, tokens, channels)."""
    rows = [jnp.split(layer.linear(names.modulation, context.time), 6, axis=-1) for names in (TEXT, IMAGE)]
    normed = [layer.norm("norm1", stream, 1 + row[1], row[0]) for stream, row in zip(streams, rows)]
    query, key, value = (
        joined(*(project(layer, names, place, array) for names, array in zip((TEXT, IMAGE), normed)), context.parts)
        for place in range(3)
    )
    with jax.named_scope("attn/attend"):
        out, rescued = context.attend.counted(query, key, value, context.rotary)
    made = []
    outs = parted(out, context.texts, context.parts)
    for names, stream, row, out in zip((TEXT, IMAGE), streams, rows, outs):
        stream = layer.linear(names.out, out, residual=stream, gate=row[2])
        wide = layer.linear(names.wide, layer.norm("norm2", stream, 1 + row[4], row[3]), gelu=True)
        made.append(layer.linear(names.narrow, wide, residual=stream, gate=row[5]))
    return tuple(made), rescued


def project(layer: Layer, names: Names, place: int, normed):
    """A stream's query, key or value: the first two with their norm, as each stream has its own."""
    out = layer.linear(names.projections[place], normed)
    if place == 2:
        return out
    wide = normalized(out.astype(jnp.float32), layer[f"{names.norms[place]}.weight"], EPSILON)
    return wide.reshape(out.shape).astype(out.dtype)


def single_block(context: Context, layer: Layer, tokens):
    """(tokens, rescued) of one block on the sequence of text and image (batch, tokens, channels)."""
    shift, scale, gate = jnp.split(layer.linear("norm.linear", context.time), 3, axis=-1)
    normed = layer.norm("norm", tokens, 1 + scale, shift)
    query, key, value = (layer.linear(name, normed) for name in IMAGE.projections)
    norms = [layer[f"{name}.weight"] for name in IMAGE.norms]
    with jax.named_scope("attn/attend"):
        out, rescued = context.attend.counted(query, key, value, context.rotary, norms)
    wide = layer.linear("proj_mlp", normed, gelu=True)
    return layer.linear("proj_out", (out, wide), residual=tokens, gate=gate), rescued
