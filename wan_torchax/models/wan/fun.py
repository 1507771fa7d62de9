"""What VideoX-Fun's models have besides Wan's transformer: a reference's tokens, behind the video's, and a camera's
path, whose rays through every pixel are added to them.

    add_layers(module, architecture)                    # to diffusers' module
    tokens = camera_tokens(arrays, poses, forward)      # (1, tokens, channels)
"""
import math

import jax
import jax.numpy as jnp
import torch

from wan_torchax.models.family import Forward
from wan_torchax.models.wan.files import camera_channels

# Of config.json, what says which of these layers there are.
FIELDS = (
    "add_ref_conv", "in_dim_ref_conv", "add_control_adapter", "in_dim_control_adapter",
    "downscale_factor_control_adapter",
)
# Of the cameras of the training's videos: focal lengths in widths and heights of a picture of this aspect.
FOCAL, ASPECT = (0.532139961, 0.946026558), 1280 / 720
RAY = 6  # Plücker coordinates: moment and direction


def add_layers(module: torch.nn.Module, architecture) -> None:
    config = module.config
    width, patch = config.num_attention_heads * config.attention_head_dim, tuple(config.patch_size[1:])
    with torch.device("meta"):
        if architecture.get("add_ref_conv"):
            module.ref_conv = torch.nn.Conv2d(architecture["in_dim_ref_conv"], width, patch, patch)
        if architecture.get("add_control_adapter"):
            block = {name: torch.nn.Conv2d(width, width, 3, padding=1) for name in ("conv1", "conv2")}
            module.control_adapter = torch.nn.ModuleDict({
                "conv": torch.nn.Conv2d(camera_channels(architecture), width, patch, patch),
                "residual_blocks": torch.nn.ModuleList([torch.nn.ModuleDict(block)]),
            })


def camera_tokens(arrays: dict, poses, forward: Forward):
    """(1, tokens, channels) from the poses (latent frames, frames of each, 3, 4) of a camera.

    The rays of a latent frame's pixels are folded into its tokens and convolved. Devices share the latent frames, where
    each would do the work of all.
    """
    weight, patch = arrays["control_adapter.conv.weight"], forward.architecture["patch_size"][1:]
    count, frames = poses.shape[:2]
    fold = math.isqrt(weight.shape[1] // (RAY * frames))
    sides = [size * side * fold for size, side in zip(forward.grid[1:], patch)]
    axes = forward.mesh.axis_names
    poses = jnp.pad(poses, [(0, -count % math.prod(forward.mesh.shape.values()))] + [(0, 0)] * 3)
    shared = jax.sharding.NamedSharding(forward.mesh, jax.sharding.PartitionSpec(axes))
    poses = jax.lax.with_sharding_constraint(poses, shared)
    with jax.named_scope("control_adapter"):
        rays = folded(rays_of(poses, *sides), fold).astype(weight.dtype)
        hidden = convolved(arrays, "conv", rays, patch)
        inner = jax.nn.relu(convolved(arrays, "residual_blocks.0.conv1", hidden, padding=1))
        hidden = hidden + convolved(arrays, "residual_blocks.0.conv2", inner, padding=1)
    return hidden[:count].transpose(0, 2, 3, 1).reshape(1, -1, hidden.shape[1])


def rays_of(poses, height: int, width: int):
    """(…, 6, height, width) from poses (…, 3, 4): Plücker coordinates of the ray through each pixel's centre."""
    focal_x, focal_y = FOCAL[0] * max(width, height * ASPECT), FOCAL[1] * max(height, width / ASPECT)
    rows = (jnp.arange(height, dtype=jnp.float32) + 0.5 - height / 2) / focal_y
    columns = (jnp.arange(width, dtype=jnp.float32) + 0.5 - width / 2) / focal_x
    ahead = jnp.stack([*jnp.broadcast_arrays(columns, rows[:, None]), jnp.ones((height, width))])
    ahead = ahead / jnp.linalg.norm(ahead, axis=0)
    with jax.default_matmul_precision("highest"):
        direction = jnp.einsum("...ij,jhw->...ihw", poses[..., :3], ahead)
    moment = jnp.cross(poses[..., 3][..., None, None], direction, axis=-3)
    return jnp.concatenate([moment, direction], axis=-3)


def folded(rays, fold: int):
    """(latent frames, frames, 6, height, width) to (latent frames, channels, height / fold, width / fold): channels by
    coordinate, then frame, then place in a square of pixels."""
    count, frames, coordinates, height, width = rays.shape
    rays = rays.swapaxes(1, 2).reshape(count, coordinates * frames, height // fold, fold, width // fold, fold)
    return rays.transpose(0, 1, 3, 5, 2, 4).reshape(count, -1, height // fold, width // fold)


def convolved(arrays: dict, name: str, pixels, stride=(1, 1), padding: int = 0):
    weight, bias = (arrays[f"control_adapter.{name}.{part}"] for part in ("weight", "bias"))
    return jax.lax.conv_general_dilated(pixels, weight, stride, [(padding, padding)] * 2) + bias[:, None, None]
