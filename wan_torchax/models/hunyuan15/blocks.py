"""HunyuanVideo 1.5's transformer as functions of its arrays.

    forward = denoiser(module, settings)                        # settings: models.family.Forward
    output = forward(arrays, latents, time, conditions)         # inside jax.jit

A block has two streams, the video's tokens and those of prompt, glyphs and image, with weights of their own; both
attend to both. How many of the second stream are valid differs from prompt to prompt, so they are sorted to its front
and counted. The modulation of all blocks depends on the time alone and is computed before the first.
"""
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import diffusers
import jax
import jax.numpy as jnp
import numpy
import torch

from wan_torchax.kernels.attention import GUARDED, Attend, Beside, xla
from wan_torchax.kernels.settings import Kernel
from wan_torchax.models.family import Forward, Output
from wan_torchax.models.loop import Blocks, Layer, linear_of_all_blocks, no_rows, pad_tokens, plain_norm, token_sharding
from wan_torchax.models.modules import construct

EPSILON = 1e-6  # of the norms in the blocks, the refiner and the head
PROJECTION_EPSILON = 1e-5  # of the norms in the projections of glyphs and images
WAVES = 128  # cosines and sines of a time
STACK = "transformer_blocks"
TEXT, GLYPHS, IMAGE = range(3)  # rows of cond_type_embed


class Context(NamedTuple):
    """Inputs shared by all blocks."""

    counts: jax.Array  # (batch,): valid tokens of the second stream
    modulation: tuple[jax.Array, jax.Array]  # of each stream (layers, 6, channels)
    rotary: tuple[jax.Array, jax.Array]  # cosines and sines (tokens, head_dim)


def build(architecture) -> torch.nn.Module:
    return construct(diffusers.HunyuanVideo15Transformer3DModel, architecture)


def denoiser(module, forward: Forward) -> Callable[..., Output]:
    """(arrays, latents (batch, channels, frames, height, width), time, conditions, residual) -> Output. `residual`, the
    blocks' residual of an earlier step, replaces the blocks."""
    forward = replace(forward, architecture=dict(module.config))  # with the class's defaults
    layers, guarded = forward.architecture["num_layers"], forward.self_attention.kernel in GUARDED
    attend = Attend(
        forward.architecture["attention_head_dim"], forward.self_attention, forward.parallel, forward.mesh,
        keys=forward.tokens, grid=forward.grid, norm_epsilon=EPSILON,
    )

    def velocity(arrays, latents, time, conditions, residual=None) -> Output:
        embedded = time_embedding(arrays, forward.dtype, time, conditions.get("next_timestep"))
        video = pad_tokens(video_tokens(arrays, latents, conditions.get("condition")), forward.multiple)
        place = token_sharding(forward.mesh, forward.parallel, len(video))
        before = video = jax.lax.with_sharding_constraint(video, place)
        counted = None
        if residual is None:
            text, counts = text_tokens(arrays, forward, time, conditions)
            modulation = tuple(modulation_of(arrays, forward, name, embedded) for name in ("norm1", "norm1_context"))
            step = functools.partial(block, forward, attend, Context(counts, modulation, rotary_tables(forward)))
            blocks = Blocks.of(arrays, STACK, layers, forward, epsilon=EPSILON, skipped=conditions.get("skipped"))
            (video, _), counted = blocks.run(step, (video, text), no_rows(layers, forward.mesh, guarded))
        else:
            video = video + residual
        video = jax.lax.with_sharding_constraint(video, place)
        return Output(head(arrays, video[:, : forward.tokens], embedded, latents.shape), video - before, counted)

    return velocity


# ---------------------------------------------------------------- embeddings and head


def linear(arrays: dict, name: str, array):
    with jax.named_scope(name.replace(".", "/")):
        return jnp.einsum("...a,ba->...b", array, arrays[f"{name}.weight"]) + arrays[f"{name}.bias"]


def norm(arrays: dict, name: str, array, epsilon: float):
    with jax.named_scope(name.replace(".", "/")):
        return plain_norm(array, arrays[f"{name}.weight"][None], arrays[f"{name}.bias"][None], epsilon)


def time_embedding(arrays: dict, dtype: str, time, next_time=None):
    """(1, channels) of a time from 0 to 1000; models that take two times of a step have two embeddings. The waves are
    float32: bfloat16 has no 998."""
    embedded = time_mlp(arrays, "time_embed.timestep_embedder", dtype, time)
    if next_time is not None:
        embedded = embedded + time_mlp(arrays, "time_embed.timestep_embedder_r", dtype, next_time)
    return embedded


def time_mlp(arrays: dict, name: str, dtype: str, time):
    angles = time.astype(jnp.float32) * jnp.exp(-math.log(10_000) * jnp.arange(WAVES, dtype=jnp.float32) / WAVES)
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)])[None].astype(dtype)
    return linear(arrays, f"{name}.linear_2", jax.nn.silu(linear(arrays, f"{name}.linear_1", waves)))


def video_tokens(arrays: dict, latents, condition):
    """(batch, tokens, channels): a token is a latent pixel, with its channels of the condition; without one those are
    zeros, and left out."""
    if condition is not None:
        condition = jnp.broadcast_to(condition, (len(latents), *condition.shape[1:]))
        latents = jnp.concatenate([latents, condition.astype(latents.dtype)], axis=1)
    with jax.named_scope("x_embedder"):
        weight = arrays["x_embedder.proj.weight"][:, : latents.shape[1], 0, 0, 0]
        tokens = jnp.einsum("bcfhw,dc->bfhwd", latents, weight) + arrays["x_embedder.proj.bias"]
    return tokens.reshape(len(latents), -1, len(weight))


def text_tokens(arrays: dict, forward: Forward, time, conditions):
    """Tokens of image, glyphs and prompt (batch, tokens, channels), the valid ones first, and how many those are."""
    whole = jax.sharding.NamedSharding(forward.mesh, jax.sharding.PartitionSpec(forward.parallel.batch))

    def spread(array):
        return jax.lax.with_sharding_constraint(array, whole) if forward.parallel.batch else array

    embeddings, counts = spread(conditions["embeddings"]), conditions["counts"].astype(jnp.int32)
    refined = refine(arrays, forward, time, embeddings, counts)
    glyphs, glyph_counts = spread(conditions["glyphs"]), conditions["glyph_counts"].astype(jnp.int32)
    parts = [(GLYPHS, glyph_tokens(arrays, glyphs), glyph_counts), (TEXT, refined, counts)]
    if "image_embeddings" in conditions:
        image = image_tokens(arrays, conditions["image_embeddings"])
        image = jnp.broadcast_to(image, (len(embeddings), *image.shape[1:]))
        parts.insert(0, (IMAGE, image, jnp.full_like(counts, image.shape[1])))
    kinds = arrays["cond_type_embed.weight"]
    tokens = jnp.concatenate([part + kinds[kind] for kind, part, _ in parts], axis=1)
    valid = jnp.concatenate([jnp.arange(part.shape[1]) < count[:, None] for _, part, count in parts], axis=1)
    order = jnp.argsort(~valid, axis=1, stable=True)
    tokens = jnp.take_along_axis(jnp.where(valid[..., None], tokens, 0), order[..., None], axis=1)
    return spread(tokens), valid.sum(axis=1, dtype=jnp.int32)


def refine(arrays: dict, forward: Forward, time, embeddings, counts):
    """The prompt's tokens (batch, tokens, channels): two blocks of attention to the valid ones, whose gates depend on
    the time and on the mean of the embeddings."""
    start, head_dim = "context_embedder", forward.architecture["attention_head_dim"]
    valid = jnp.arange(embeddings.shape[1])[:, None] < counts[:, None, None]
    total = jnp.where(valid, embeddings, 0).sum(axis=1, dtype=jnp.float32)
    pooled = (total / counts[:, None]).astype(embeddings.dtype)
    name = f"{start}.time_text_embed"
    text = linear(arrays, f"{name}.text_embedder.linear_1", pooled)
    text = linear(arrays, f"{name}.text_embedder.linear_2", jax.nn.silu(text))
    gates_from = jax.nn.silu(time_mlp(arrays, f"{name}.timestep_embedder", forward.dtype, time) + text)
    tokens = linear(arrays, f"{start}.proj_in", embeddings)
    for number in range(forward.architecture["num_refiner_layers"]):
        name = f"{start}.token_refiner.refiner_blocks.{number}"
        gates = jnp.split(linear(arrays, f"{name}.norm_out.linear", gates_from)[:, None], 2, axis=-1)
        normed = norm(arrays, f"{name}.norm1", tokens, EPSILON)
        heads = (linear(arrays, f"{name}.attn.to_{part}", normed) for part in "qkv")
        out, *_ = xla(*heads, counts, head_dim, Kernel(kernel="xla"))
        tokens = tokens + linear(arrays, f"{name}.attn.to_out.0", out) * gates[0]
        wide = linear(arrays, f"{name}.ff.net.0.proj", norm(arrays, f"{name}.norm2", tokens, EPSILON))
        tokens = tokens + linear(arrays, f"{name}.ff.net.2", jax.nn.silu(wide)) * gates[1]
    return tokens


def glyph_tokens(arrays: dict, glyphs):
    hidden = norm(arrays, "context_embedder_2.norm", glyphs, PROJECTION_EPSILON)
    for number in (1, 2):
        hidden = jax.nn.gelu(linear(arrays, f"context_embedder_2.linear_{number}", hidden), approximate=False)
    return linear(arrays, "context_embedder_2.linear_3", hidden)


def image_tokens(arrays: dict, image):
    normed = norm(arrays, "image_embedder.norm_in", image, PROJECTION_EPSILON)
    hidden = linear(arrays, "image_embedder.linear_1", normed)
    hidden = linear(arrays, "image_embedder.linear_2", jax.nn.gelu(hidden, approximate=False))
    return norm(arrays, "image_embedder.norm_out", hidden, PROJECTION_EPSILON)


def modulation_of(arrays: dict, forward: Forward, name: str, embedded):
    """(layers, 6, channels) of one stream: shift, scale and gate of attention, then of the feed-forward."""
    rows = linear_of_all_blocks(arrays, STACK, f"{name}.linear", jax.nn.silu(embedded), forward)
    return rows.reshape(len(rows), 6, -1)


def rotary_tables(forward: Forward):
    """Cosines and sines (tokens, head_dim): a head's channels are split among time, height and width."""
    theta, axes = forward.architecture["rope_theta"], forward.architecture["rope_axes_dim"]
    angles = []
    for axis, (size, lanes) in enumerate(zip(forward.grid, axes)):
        along = numpy.outer(numpy.arange(size), theta ** -(numpy.arange(0, lanes, 2) / lanes)).repeat(2, axis=1)
        shape = [1, 1, 1, lanes]
        shape[axis] = size
        along = jnp.asarray(along.reshape(shape), jnp.float32)
        angles.append(jnp.broadcast_to(along, (*forward.grid, lanes)))
    table = jnp.concatenate(angles, axis=-1).reshape(1, -1, sum(axes))
    return tuple(pad_tokens(wave(table), forward.multiple)[0] for wave in (jnp.cos, jnp.sin))


def head(arrays: dict, video, embedded, shape):
    """Tokens (batch, tokens, channels) to latents of this shape, but for the channels."""
    scale, shift = jnp.split(linear(arrays, "norm_out.linear", jax.nn.silu(embedded)), 2, axis=-1)
    out = linear(arrays, "proj_out", plain_norm(video, 1 + scale, shift, EPSILON))
    return jnp.moveaxis(out.reshape(len(out), *shape[2:], -1), -1, 1)


# ---------------------------------------------------------------- the blocks


def block(forward: Forward, attend: Attend, context: Context, layer: Layer, streams):
    """((video, text), rescued) of one block; video and text (batch, tokens, channels)."""
    video, text = streams
    if forward.pinned:
        video = jax.lax.with_sharding_constraint(video, token_sharding(forward.mesh, forward.parallel))
    rows = [modulation_rows(table, layer.index, len(video)) for table in context.modulation]
    (shift, scale, gate, *after), (text_shift, text_scale, text_gate, *text_after) = rows
    normed = layer.norm("norm1", video, 1 + scale, shift)
    query, key = (layer.linear(f"attn.to_{name}", normed, kernel=True) for name in "qk")
    value = layer.linear("attn.to_v", normed, kernel=True, transpose_out=True)
    beside = text_attention(attend, layer, text_norm("norm1_context", text, text_scale, text_shift), context.counts)
    norms = [layer[f"attn.norm_{name}.weight"] for name in "qk"]
    with jax.named_scope("attn/attend"):
        (out, text_out), rescued = attend.counted(query, key, value, context.rotary, norms, beside)
    video = layer.linear("attn.to_out.0", out, residual=video, gate=gate, kernel=True, transpose_in=True)
    text = layer.linear("attn.to_add_out", text_out, residual=text, gate=text_gate)

    shift, scale, gate = after
    wide = layer.linear("ff.net.0.proj", layer.norm("norm2", video, 1 + scale, shift), gelu=True, kernel=True)
    video = layer.linear("ff.net.2", wide, residual=video, gate=gate, kernel=True)
    shift, scale, gate = text_after
    wide = layer.linear("ff_context.net.0.proj", text_norm("norm2_context", text, scale, shift), gelu=True)
    text = layer.linear("ff_context.net.2", wide, residual=text, gate=gate)
    return (video, text), rescued


def modulation_rows(table, index, batch: int) -> list:
    """Six of one layer, (batch, channels) each."""
    rows = jax.lax.dynamic_index_in_dim(table, index, keepdims=False).astype(jnp.float32)
    return [jnp.broadcast_to(row, (batch, len(row))) for row in rows]


def text_attention(attend: Attend, layer: Layer, normed, counts) -> Beside:
    query, key, value = (layer.linear(f"attn.add_{name}_proj", normed) for name in "qkv")
    query = attend.normalized(query, layer["attn.norm_added_q.weight"])
    key = attend.normalized(key, layer["attn.norm_added_k.weight"])
    return Beside(query, key, value, counts)


def text_norm(name: str, array, scale, shift):
    """The second stream is replicated, which a kernel for sharded tokens does not expect, and short."""
    with jax.named_scope(name):
        return plain_norm(array, 1 + scale, shift, EPSILON)
