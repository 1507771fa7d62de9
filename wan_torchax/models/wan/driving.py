"""How a character moves, for Wan Animate 2: a driving video is read once, and every step attends to it.

    driving = reader(module, forward)(arrays, empty, conditions)    # once a segment
    denoiser(…)(…, conditions | {"driving": driving})               # in every step

The driving video goes through the same blocks as a video without noise, at time 1, at positions of its own. Keys and
values of all layers are kept; the tokens of a latent frame attend to the whole video and to one frame of the driving
one (kernels.attention.OfFrames). Published code keeps keys before RoPE; their positions are the same in every step, so
here they are kept after it.
"""
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp

from wan_torchax.models.family import Chunk, Forward
from wan_torchax.models.wan.blocks import chunk_denoiser

TIME = 1.0


def reader(module, forward: Forward) -> Callable[..., dict]:
    """`forward` is that of the video that is made, with one latent frame more than the driving one: the character's
    picture."""
    frames, *sides = forward.grid
    grid = frames - 1, *sides
    settings = forward.architecture
    offsets = (settings[f"refer_offset_{axis}"] for axis in "thw")
    place = tuple(size if offset < 0 else offset for offset, size in zip(offsets, grid))
    forward = replace(forward, grid=grid, first_position=place)
    denoise = chunk_denoiser(module, replace(forward, fillings=(forward.tokens,), nag=None))  # it has one prompt

    def read(arrays, empty: dict, conditions: dict) -> dict:
        """Conditions: driving_latents, and of driving_embeddings and driving_picture the tokens."""
        latents = conditions["driving_latents"]
        given = jnp.ones_like(latents[:, : settings["in_channels"] - 2 * latents.shape[1]])
        taken = {
            "embeddings": conditions["driving_embeddings"], "image_embeddings": conditions["driving_picture"],
            "condition": jnp.concatenate([given, latents], axis=1),
        }
        chunk = Chunk(empty["key"], turned(empty["value"]), start=jnp.int32(0), filling=jnp.int32(0), positions=None)
        _, chunk = denoise(arrays, latents.astype(forward.dtype), jnp.float32(TIME), taken, chunk)
        return {"key": chunk.key, "value": turned(chunk.value)}

    def turned(value):  # a chunk is kept as its kernel takes it, what is read as all of them do
        return value.swapaxes(2, 3) if forward.self_attention.turns_values else value

    return read
