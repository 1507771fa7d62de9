"""HunyuanVideo 1.5's causal video VAE as functions of its arrays, run in chunks with caches carried between calls.

    decode, caches_spec = decoder(module, config, mesh)         # see models.family.VideoCodec
    pixels, caches = decode(arrays, latent, None)               # the first latent frame: one frame
    pixels, caches = decode(arrays, latent, caches)             # every later one: four

The caches are the last two input frames of every convolution, and keys and values of all latent frames so far in the
attention, in a buffer for the whole video: with them chunks are exactly what the whole video would be. A video is (1,
channels, frames, height, width).
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import torch

from wan_torchax.devices.sharding import partition_spec
from wan_torchax.models.modules import construct
from wan_torchax.patches import interop

EPSILON = 1e-12  # of the norms
FRAME = "frame"  # the cache that counts latent frames


def build(architecture) -> torch.nn.Module:
    return construct(diffusers.AutoencoderKLHunyuanVideo15, architecture)


def decoder(module, config, mesh):
    """See models.family.VideoCodec."""
    scale, dtype = module.config.scaling_factor, config.model.dtype.vae

    def decode(arrays, latent, caches):
        chunk = Chunk(arrays, caches, *settings_of(module, config, mesh))
        return decode_chunk(chunk, (latent / scale).astype(dtype)), chunk.kept

    return decode, partition_spec(config.sharding.picture)


def encoder(module, config, mesh):
    """See models.family.VideoCodec."""
    scale, dtype = module.config.scaling_factor, config.model.dtype.vae

    def encode(arrays, pixels, caches):
        chunk = Chunk(arrays, caches, *settings_of(module, config, mesh))
        return encode_chunk(chunk, pixels.astype(dtype)).astype(jnp.float32) * scale, chunk.kept

    return encode, partition_spec(config.sharding.picture)


def settings_of(module, config, mesh) -> tuple:
    sharding = jax.sharding.NamedSharding(mesh, partition_spec(config.sharding.picture))
    times, sides = (round(math.log2(module.config[f"{name}_compression_ratio"])) for name in ("temporal", "spatial"))
    frames = (config.resolution.frames - 1) // module.config.temporal_compression_ratio + 1
    # Sizes need not divide: inside a program XLA pads, and masks what it has padded.
    return times, sides, frames, lambda video: jax.lax.with_sharding_constraint(video, sharding)


@dataclass
class Chunk:
    """One call's arrays and caches."""

    arrays: dict
    caches: dict | None  # of the call before; None: the first
    times: int  # levels that double or halve frames
    sides: int  # levels that double or halve height and width
    frames: int  # latent frames of the whole video
    constrain: Callable  # gives a video its sharding
    kept: dict[str, Any] = field(default_factory=dict)  # caches for the next call

    @property
    def first(self) -> bool:
        return self.caches is None

    def has(self, part: str) -> bool:
        return any(name.startswith(f"{part}.") for name in self.arrays)


# ---------------------------------------------------------------- decoder and encoder


def decode_chunk(chunk: Chunk, latent):
    """One latent frame to pixels in -1..1."""
    video = causal(chunk, "decoder.conv_in", latent)
    video = chunk.constrain(video + jnp.repeat(latent, video.shape[1] // latent.shape[1], axis=1))
    video = chunk.constrain(middle(chunk, "decoder.mid_block", video))
    level = 0
    while chunk.has(block := f"decoder.up_blocks.{level}"):
        video = residuals(chunk, f"{block}.resnets", video)
        if level < chunk.sides:
            video = upsample(chunk, f"{block}.upsamplers.0", video, level < chunk.times)
        video, level = chunk.constrain(video), level + 1
    return last(chunk, "decoder", video).clip(-1, 1)


def encode_chunk(chunk: Chunk, pixels):
    """One frame, or as many as a latent frame covers, to the mode of the latent frame."""
    video, level = chunk.constrain(causal(chunk, "encoder.conv_in", pixels)), 0
    while chunk.has(block := f"encoder.down_blocks.{level}"):
        video = residuals(chunk, f"{block}.resnets", video)
        if level < chunk.sides:
            video = downsample(chunk, f"{block}.downsamplers.0", video, level >= chunk.sides - chunk.times)
        video, level = chunk.constrain(video), level + 1
    video = chunk.constrain(middle(chunk, "encoder.mid_block", video))
    moments = last(chunk, "encoder", video)
    return jnp.split(moments + mean_of_groups(video, moments.shape[1]), 2, axis=1)[0]


def last(chunk: Chunk, part: str, video):
    return causal(chunk, f"{part}.conv_out", jax.nn.silu(norm(chunk, f"{part}.norm_out", video)))


def middle(chunk: Chunk, name: str, video):
    video = residual(chunk, f"{name}.resnets.0", video)
    number = 0
    while chunk.has(f"{name}.attentions.{number}"):
        video = attention(chunk, f"{name}.attentions.{number}", video)
        video = residual(chunk, f"{name}.resnets.{number + 1}", video)
        number += 1
    return video


def residuals(chunk: Chunk, name: str, video):
    number = 0
    while chunk.has(f"{name}.{number}"):
        video, number = residual(chunk, f"{name}.{number}", video), number + 1
    return video


# ---------------------------------------------------------------- layers


def residual(chunk: Chunk, name: str, video):
    shortcut = pointwise(chunk, f"{name}.conv_shortcut", video) if chunk.has(f"{name}.conv_shortcut") else video
    for number in (1, 2):
        video = causal(chunk, f"{name}.conv{number}", jax.nn.silu(norm(chunk, f"{name}.norm{number}", video)))
    return video + shortcut


def causal(chunk: Chunk, name: str, video):
    """A convolution over this frame and the two before, whose edges are repeated on all sides."""
    before = jnp.repeat(video[:, :, :1], 2, axis=2) if chunk.caches is None else chunk.caches[name]
    video = jnp.concatenate([before, video], axis=2)
    chunk.kept[name] = video[:, :, -2:]
    video = jnp.pad(video, [(0, 0)] * 3 + [(1, 1)] * 2, mode="edge")
    given = video, chunk.arrays[f"{name}.conv.weight"], chunk.arrays[f"{name}.conv.bias"]
    with jax.named_scope(name.replace(".", "/")):
        return interop.jax_view(torch.nn.functional.conv3d(*interop.torch_view(given)))  # as conf/ops says


def pointwise(chunk: Chunk, name: str, video):
    weight, bias = chunk.arrays[f"{name}.weight"], chunk.arrays[f"{name}.bias"]
    return jnp.einsum("bcfhw,dc->bdfhw", video, weight[..., 0, 0, 0]) + bias.reshape(-1, 1, 1, 1)


def norm(chunk: Chunk, name: str, video):
    wide, gamma = video.astype(jnp.float32), chunk.arrays[f"{name}.gamma"]
    length = jnp.maximum(jnp.sqrt((wide * wide).sum(axis=1, keepdims=True)), EPSILON)
    return (wide / length * len(gamma) ** 0.5 * gamma).astype(video.dtype)


def attention(chunk: Chunk, name: str, video):
    """All pixels of a latent frame attend to those of this and all earlier frames."""
    normed = norm(chunk, f"{name}.norm", video)
    query, *own = (pointwise(chunk, f"{name}.to_{part}", normed) for part in "qkv")
    number = jnp.zeros((1,) * 5, jnp.int32) if chunk.caches is None else chunk.caches[FRAME]
    place, buffers = number[0, 0, 0, 0, 0], []
    for part, new in zip(("key", "value"), own):
        shape = (*new.shape[:2], chunk.frames, *new.shape[3:])
        buffer = jnp.zeros(shape, new.dtype) if chunk.caches is None else chunk.caches[f"{name}.{part}"]
        buffers.append(jax.lax.dynamic_update_slice_in_dim(buffer, new, place, axis=2))
        chunk.kept[f"{name}.{part}"] = buffers[-1]
    chunk.kept[FRAME] = number + 1
    with jax.named_scope("attend"):
        out = attend(query[0, :, 0], buffers[0][0], buffers[1][0], 1 if chunk.first else place + 1)
    return video + pointwise(chunk, f"{name}.proj_out", out.astype(video.dtype)[None, :, None])


def attend(query, keys, values, count):
    """One head's attention of a frame (channels, height, width) to the first `count` of (channels, frames, height,
    width): a frame at a time, so that there are never more scores than of two frames."""

    def step(frame, carry):
        out, maximum, total = carry
        key, value = (jax.lax.dynamic_index_in_dim(array, frame, axis=1, keepdims=False) for array in (keys, values))
        scores = jnp.einsum("chw,cyx->hwyx", query, key, preferred_element_type=jnp.float32) * len(query) ** -0.5
        highest = jnp.maximum(maximum, scores.max(axis=(2, 3)))
        correction, weights = jnp.exp(maximum - highest), jnp.exp(scores - highest[..., None, None])
        added = jnp.einsum("hwyx,cyx->chw", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
        return out * correction + added, highest, total * correction + weights.sum(axis=(2, 3))

    sides = query.shape[1:]
    lowest = jnp.full(sides, jnp.finfo(jnp.float32).min)
    out, _, total = jax.lax.fori_loop(0, count, step, (jnp.zeros(query.shape), lowest, jnp.zeros(sides)))
    return out / total


def upsample(chunk: Chunk, name: str, video, in_time: bool):
    """Twice as high and wide and, if `in_time`, two frames for each but the video's first."""
    wide = causal(chunk, f"{name}.conv", video)
    channels = wide.shape[1] // (8 if in_time else 4)
    if not in_time:
        return unfolded(wide, 1) + unfolded(jnp.repeat(video, wide.shape[1] // video.shape[1], axis=1), 1)
    times = 1 if chunk.first else 2
    wide, shortcut = unfolded(wide, times), unfolded(video, times)
    return wide[:, :channels] + jnp.repeat(shortcut, channels // shortcut.shape[1], axis=1)


def downsample(chunk: Chunk, name: str, video, in_time: bool):
    """The inverse; a first frame has its channels twice."""
    times = 2 if in_time and not chunk.first else 1
    narrow, shortcut = folded(causal(chunk, f"{name}.conv", video), times), folded(video, times)
    if in_time and chunk.first:
        narrow = jnp.concatenate([narrow, narrow], axis=1)
    return narrow + mean_of_groups(shortcut, narrow.shape[1])


def unfolded(video, times: int):
    """(1, times · 2 · 2 · channels, frames, height, width) to (1, channels, times · frames, 2 · height, 2 · width)."""
    batch, _, frames, height, width = video.shape
    parts = video.reshape(batch, times, 2, 2, -1, frames, height, width).transpose(0, 4, 5, 1, 6, 2, 7, 3)
    return parts.reshape(batch, -1, times * frames, 2 * height, 2 * width)


def folded(video, times: int):
    """The inverse of `unfolded`."""
    batch, channels, frames, height, width = video.shape
    parts = video.reshape(batch, channels, frames // times, times, height // 2, 2, width // 2, 2)
    return parts.transpose(0, 3, 5, 7, 1, 2, 4, 6).reshape(batch, -1, frames // times, height // 2, width // 2)


def mean_of_groups(video, channels: int):
    """Means of neighbouring channels, so that this many are left."""
    batch, _, *sizes = video.shape
    return video.reshape(batch, channels, -1, *sizes).mean(axis=2)
