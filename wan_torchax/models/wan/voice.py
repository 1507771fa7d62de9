"""How a voice moves a face, for Wan's speech-to-video (S2V): features of a sound become a few tokens for each latent
frame; the video's tokens of that frame attend to them after some blocks. Behind the video stand tokens of a reference
picture and of the frames before a segment, the older the coarser (FramePack).

    values = encode(module, arrays, features, prompts)          # once for a segment
    hidden = with_behind(patches, arrays, hidden, conditions)   # the video's tokens, the reference's, the motion's
    hidden = hidden + attend(layer, hidden, voice, grid, 128)   # after the blocks audio_inject_layers
"""
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy
import torch

from wan_torchax.models.loop import Layer, plain_norm
from wan_torchax.models.wan import BUCKETS
from wan_torchax.models.wan.face import attend_in_frames, causal, normed

# Of config.json, what describes these layers.
FIELDS = ("audio_inject_layers", "audio_dim", "num_audio_layers", "num_audio_token", "cond_dim", "motion_frames")
ENCODER = "casual_audio_encoder"  # as the published weights spell it
REFERENCE_TIME = 30  # in RoPE
NORM_EPSILON = 1e-5


class Voice(NamedTuple):
    tokens: jax.Array  # (prompts, latent frames, tokens, width)
    whole: jax.Array  # (prompts, latent frames, width): what modulates a latent frame


def add_layers(module: torch.nn.Module, architecture) -> None:
    if "audio_inject_layers" not in architecture:
        return
    config, channels = module.config, module.config.in_channels
    width, patch = config.num_attention_heads * config.attention_head_dim, tuple(config.patch_size)
    quarter, tokens, nn = width // 4, architecture["num_audio_token"], torch.nn

    def conv(inputs: int, outputs: int) -> torch.nn.Module:
        return nn.ModuleDict({"conv": nn.Conv1d(inputs, outputs, 3)})

    with torch.device("meta"):
        module.pose_patch_embedding = nn.Conv3d(architecture["cond_dim"], width, patch, patch)
        module.casual_audio_encoder = encoder = nn.Module()
        encoder.weights = nn.Parameter(torch.empty(1, architecture["num_audio_layers"], 1, 1))
        encoder.encoder = nn.ModuleDict({
            "conv1_local": conv(architecture["audio_dim"], quarter * tokens),
            "conv1_global": conv(architecture["audio_dim"], quarter), "conv2": conv(quarter, 2 * quarter),
            "conv3": conv(2 * quarter, width), "final_linear": nn.Linear(width, width),
        })
        encoder.encoder.padding_tokens = nn.Parameter(torch.empty(1, 1, 1, width))
        module.audio_injector = nn.ModuleList(injector(width, config.eps) for _ in architecture["audio_inject_layers"])
        module.frame_packer = nn.ModuleDict({
            name: nn.Conv3d(channels, width, *[(size, 2 * size, 2 * size)] * 2) for name, (_, size) in BUCKETS.items()
        })
        module.trainable_cond_mask = nn.Embedding(3, width)
    module.motion_frames = architecture["motion_frames"]


def injector(width: int, epsilon: float) -> torch.nn.Module:
    """Cross-attention to a latent frame's tokens, and the linear layer of the norm before it."""
    linear = {name: torch.nn.Linear(width, width) for name in ("to_q", "to_k", "to_v", "to_out")}
    norms = {name: torch.nn.RMSNorm(width, epsilon) for name in ("norm_q", "norm_k")}
    return torch.nn.ModuleDict(linear | norms | {"linear": torch.nn.Linear(width, 2 * width)})


# ---------------------------------------------------------------- the sound


def encode(module, arrays: dict, features, prompts: int) -> dict[str, jax.Array]:
    """Features (frames, layers, channels) of a segment's sound to what its latent frames have of it. For a negative
    prompt there is no sound. Frames like the first precede it: a latent frame sees the sound up to its end."""
    before = module.motion_frames
    arrays = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    weights = jax.nn.silu(arrays[f"{ENCODER}.weights"]).reshape(-1, 1)
    mixed = (features * weights / weights.sum()).sum(axis=1)[None]
    mixed = jnp.pad(mixed, [(0, 0), (before, 0), (0, 0)], mode="edge")
    mixed = jnp.concatenate([mixed, jnp.zeros_like(mixed)])[:prompts]
    dropped = (before + 3) // 4
    local, whole = (causal(arrays, f"{ENCODER}.encoder.conv1_{kind}.conv", mixed) for kind in ("local", "global"))
    heads = local.shape[-1] // whole.shape[-1]
    split = local.reshape(*local.shape[:2], heads, -1).swapaxes(1, 2).reshape(prompts * heads, local.shape[1], -1)
    local, whole = halved(arrays, split), halved(arrays, whole)
    local = local.reshape(prompts, heads, *local.shape[1:]).swapaxes(1, 2)
    learned = jnp.broadcast_to(arrays[f"{ENCODER}.encoder.padding_tokens"], (*local.shape[:2], 1, local.shape[-1]))
    weight, bias = (arrays[f"{ENCODER}.encoder.final_linear.{part}"] for part in ("weight", "bias"))
    whole = jnp.einsum("...a,ba->...b", whole, weight) + bias
    tokens = jnp.concatenate([local, learned], axis=2)
    return {"audio_tokens": tokens[:, dropped:], "audio_whole": whole[:, dropped:]}


def halved(arrays: dict, hidden):
    """Frames to latent frames, in two causal convolutions."""
    hidden = normed(hidden)
    for name in ("conv2", "conv3"):
        hidden = normed(causal(arrays, f"{ENCODER}.encoder.{name}.conv", hidden, stride=2))
    return hidden


def attend(layer: Layer, hidden, voice: Voice, grid: tuple[int, int, int], head_dim: int):
    """What the video's tokens, the first of (batch, tokens, width), take from the voice in their latent frame."""
    frames, rows, columns = grid
    places = jnp.arange(hidden.shape[1])
    own = jnp.minimum(places // (rows * columns), frames - 1)
    shift, scale = jnp.split(layer.linear("linear", jax.nn.silu(voice.whole)), 2, axis=-1)
    modulated = plain_norm(hidden, 1 + scale[:, own], shift[:, own], NORM_EPSILON)

    def project(name, array):
        array = layer.linear(f"to_{name}", array)
        return array if name == "v" else plain_norm(array, layer[f"norm_{name}.weight"][None], None, epsilon)

    epsilon = layer.blocks.epsilon
    tokens = voice.tokens.reshape(len(voice.tokens), -1, voice.tokens.shape[-1])
    parts = project("q", modulated), project("k", tokens), project("v", tokens)
    out = attend_in_frames(*(part.reshape(*part.shape[:2], -1, head_dim) for part in parts), own, frames)
    out = layer.linear("to_out", out.reshape(hidden.shape))
    return jnp.where((places < frames * rows * columns)[:, None], out, 0)


# ---------------------------------------------------------------- what stands behind the video


def with_behind(patches: Callable, arrays: dict, hidden, conditions: dict):
    """The video's tokens (batch, tokens, width), then a reference's, then those of the frames before; each kind with an
    embedding of its own. `patches(name, latents)` are tokens by a layer's name."""
    parts, end = [patches("patch_embedding", conditions["reference_latent"])], 0
    for name, (frames, _) in BUCKETS.items():
        motion = conditions["motion_latents"]
        count = motion.shape[2]
        parts.append(patches(f"frame_packer.{name}", motion[:, :, count - end - frames : count - end]))
        end += frames
    kinds = arrays["trainable_cond_mask.weight"]
    parts = [part + kinds[min(number + 1, 2)] for number, part in enumerate(parts)]
    parts = [jnp.broadcast_to(part, (len(hidden), *part.shape[1:])) for part in parts]
    return jnp.concatenate([hidden + kinds[0], *parts], axis=1)


def motion_places(grid: tuple[int, int, int]) -> list[tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]]:
    """Positions in RoPE of what stands behind a video: times, rows and columns of the reference's tokens and of each
    bucket's, which are spread over the video's rows and columns. Times before the video are negative."""
    _, *sides = grid
    places, end = [(numpy.array([REFERENCE_TIME]), *map(numpy.arange, sides))], 0
    for frames, size in BUCKETS.values():
        end += frames
        times = numpy.linspace(end, end - frames + 1, frames // size).astype(int)
        lines = (numpy.linspace(0, side - 1, side // size).astype(int) for side in sides)
        places.append((-times, *lines))
    return places


def reference_end(grid: tuple[int, int, int]) -> int:
    """Tokens up to the reference's last: a first segment has no frames before it."""
    frames, rows, columns = grid
    return (frames + 1) * rows * columns
