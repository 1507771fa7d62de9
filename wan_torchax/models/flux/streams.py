"""What the FLUX transformers share: packed latents, RoPE over several axes, text and image tokens as one sequence."""
import math

import jax.numpy as jnp
import numpy

from wan_torchax.models.family import Forward
from wan_torchax.models.loop import plain_norm

EPSILON = 1e-6  # of all norms


def part_of(arrays: dict, name: str) -> dict:
    """The arrays of a submodule, by their names in it."""
    return {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}


def linear(arrays: dict, name: str, array):
    """A linear layer outside the blocks, with or without a bias."""
    out = jnp.einsum("...a,ba->...b", array, arrays[f"{name}.weight"])
    return out + arrays[f"{name}.bias"] if f"{name}.bias" in arrays else out


# ---------------------------------------------------------------- latents and tokens


def packed(latents, patch: int):
    """(batch, channels, 1, height, width) to tokens (batch, tokens, channels · patch²), row by row."""
    batch, channels, _, height, width = latents.shape
    folded = latents.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return folded.transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def unpacked(tokens, shape, patch: int):
    """The inverse: tokens to (batch, channels, 1, height, width)."""
    batch, _, _, height, width = shape
    folded = tokens.reshape(batch, height // patch, width // patch, -1, patch, patch)
    return folded.transpose(0, 3, 1, 4, 2, 5).reshape(batch, -1, 1, height, width)


def head(arrays: dict, hidden, time):
    """Image tokens (batch, tokens, channels) to patches; time (batch, channels), after its SiLU."""
    scale, shift = jnp.split(linear(arrays, "norm_out.linear", time), 2, axis=-1)
    return linear(arrays, "proj_out", plain_norm(hidden, 1 + scale, shift, EPSILON))


# ---------------------------------------------------------------- text and image as one sequence


def parts_of(forward: Forward) -> int:
    """How many parts the sequence of both has: one for each device that shares tokens, which then holds its share of
    the text and of the image, so that joining them moves nothing; one if they do not divide."""
    shards = math.prod(forward.mesh.shape[axis] for axis in forward.parallel.token_axes)
    return 1 if forward.text_tokens % shards or forward.tokens % shards else shards


def joined(text, image, parts: int):
    """(batch, tokens, width) of both as one: in each part first the text's tokens, then the image's. Attention takes
    tokens in any order, with RoPE tables in the same one."""
    streams = [array.reshape(len(array), parts, -1, array.shape[-1]) for array in (text, image)]
    return jnp.concatenate(streams, axis=2).reshape(len(text), -1, text.shape[-1])


def parted(tokens, texts: int, parts: int):
    """The inverse: (text, image)."""
    split = tokens.reshape(len(tokens), parts, -1, tokens.shape[-1])
    return tuple(
        array.reshape(len(tokens), -1, tokens.shape[-1]) for array in jnp.split(split, [texts // parts], axis=2)
    )


# ---------------------------------------------------------------- RoPE


def rotary(grid: tuple[int, ...], sizes: tuple[int, ...], theta: float):
    """Cosines and sines (tokens, head_dim) float32 of the tokens of a grid; a head's channels are split among its axes.
    Angles are computed in float64, as in diffusers."""
    tables = []
    for wave in (numpy.cos, numpy.sin):
        columns = []
        for axis, (count, size) in enumerate(zip(grid, sizes)):
            angles = numpy.arange(count)[:, None] * theta ** -(numpy.arange(0, size, 2) / size)
            shape = [1] * len(grid) + [size]
            shape[axis] = count
            values = numpy.repeat(wave(angles), 2, axis=1).astype(numpy.float32).reshape(shape)
            columns.append(jnp.broadcast_to(values, (*grid, size)))
        tables.append(jnp.concatenate(columns, axis=-1).reshape(-1, sum(sizes)))
    return tables
