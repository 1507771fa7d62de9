"""How a face moves, for Wan Animate: the encoders of a face's video, and the blocks' attention to what they give.

    tokens = encode(module, arrays, frames, prompts)            # once for a segment
    hidden = hidden + attend(layer, hidden, tokens, grid)       # after every fifth block

A motion encoder makes each frame a sum of a few orthogonal directions; a face encoder, causal in time, makes the frames
of a latent frame a few tokens; and the video's tokens of a latent frame attend to those of the same frame.
"""
import itertools
import math

import jax
import jax.numpy as jnp
import numpy

from wan_torchax.models.loop import Layer, plain_norm

BLUR = numpy.outer([1, 3, 3, 1], [1, 3, 3, 1]) / 64  # before pixels are dropped
TOGETHER = 8  # frames that the motion encoder takes at a time
MOTION, FACE = "motion_encoder", "face_encoder"


def encode(module, arrays: dict, frames, prompts: int):
    """Uint8 (frames, side, side, 3) to (prompts, latent frames + 1, tokens, channels). For a negative prompt the face
    is black, and for the reference, the first latent frame, there is none."""
    basis, dtype = directions(arrays), arrays[f"{MOTION}.conv_in.weight"].dtype

    def motion(frame):
        pixels = frame.astype(jnp.float32).transpose(2, 0, 1) / 255 * 2 - 1
        return motion_of(arrays, basis, pixels.astype(dtype)[None])[0]

    motions = jax.lax.map(motion, frames, batch_size=TOGETHER)[None]
    if prompts == 2:
        black = jnp.broadcast_to(motion(jnp.zeros_like(frames[0])), motions.shape)
        motions = jnp.concatenate([motions, black])
    tokens = face_tokens(arrays, motions, module.config.face_encoder_num_heads)
    return jnp.pad(tokens, [(0, 0), (1, 0), (0, 0), (0, 0)])


# ---------------------------------------------------------------- motion


def directions(arrays: dict):
    """(channels, directions) float32: the orthogonal factor of a weight, with LAPACK's signs."""
    with jax.default_matmul_precision("highest"):
        return jnp.linalg.qr(arrays[f"{MOTION}.motion_synthesis_weight"].astype(jnp.float32) + 1e-8)[0]


def motion_of(arrays: dict, basis, pixels):
    """(frames, 3, side, side) to (frames, channels)."""
    pixels = convolved(arrays, f"{MOTION}.conv_in", pixels)
    for number in itertools.takewhile(lambda k: f"{MOTION}.res_blocks.{k}.conv1.weight" in arrays, itertools.count()):
        block = f"{MOTION}.res_blocks.{number}"
        inner = convolved(arrays, f"{block}.conv1", pixels, padding=1)
        inner = convolved(arrays, f"{block}.conv2", blurred(inner, 2), stride=2)
        skipped = convolved(arrays, f"{block}.conv_skip", blurred(pixels, 1), stride=2)
        pixels = (inner + skipped) / math.sqrt(2)
    shares = convolved(arrays, f"{MOTION}.conv_out", pixels)[:, :, 0, 0]
    for number in itertools.takewhile(lambda k: f"{MOTION}.motion_network.{k}.weight" in arrays, itertools.count()):
        weight, bias = (arrays[f"{MOTION}.motion_network.{number}.{part}"] for part in ("weight", "bias"))
        shares = jnp.einsum("...a,ba->...b", shares, weight) / math.sqrt(weight.shape[1]) + bias
    with jax.default_matmul_precision("highest"):
        return (shares.astype(jnp.float32) @ basis.T).astype(shares.dtype)


def convolved(arrays: dict, name: str, pixels, stride: int = 1, padding: int = 0):
    """A convolution whose weights are scaled by their number of inputs; with a bias, also a leaky ReLU."""
    weight = arrays[f"{name}.weight"]
    weight = weight / math.sqrt(math.prod(weight.shape[1:]))
    pixels = jax.lax.conv_general_dilated(pixels, weight, (stride, stride), [(padding, padding)] * 2)
    bias = arrays.get(f"{name}.act_fn.bias")
    return pixels if bias is None else jax.nn.leaky_relu(pixels + bias[:, None, None], 0.2) * math.sqrt(2)


def blurred(pixels, padding: int):
    channels = pixels.shape[1]
    kernel = jnp.broadcast_to(BLUR.astype(pixels.dtype), (channels, 1, *BLUR.shape))
    return jax.lax.conv_general_dilated(pixels, kernel, (1, 1), [(padding, padding)] * 2, feature_group_count=channels)


# ---------------------------------------------------------------- tokens


def face_tokens(arrays: dict, motions, heads: int):
    """Motions (batch, frames, channels) to (batch, latent frames, heads + 1, width): each head's token of a latent
    frame, and a learned one."""
    batch, frames, _ = motions.shape
    split = causal(arrays, f"{FACE}.conv1_local", motions).reshape(batch, frames, heads, -1).swapaxes(1, 2)
    hidden = normed(split.reshape(batch * heads, frames, -1))
    for name in ("conv2", "conv3"):  # each halves the number of frames
        hidden = normed(causal(arrays, f"{FACE}.{name}", hidden, stride=2))
    weight, bias = (arrays[f"{FACE}.out_proj.{part}"] for part in ("weight", "bias"))
    tokens = jnp.einsum("...a,ba->...b", hidden, weight) + bias
    tokens = tokens.reshape(batch, heads, *tokens.shape[1:]).swapaxes(1, 2)
    learned = jnp.broadcast_to(arrays[f"{FACE}.padding_tokens"], (*tokens.shape[:2], 1, tokens.shape[-1]))
    return jnp.concatenate([tokens, learned], axis=2)


def causal(arrays: dict, name: str, hidden, stride: int = 1):
    """A convolution over time of (batch, frames, channels), its beginning padded with the first frame."""
    weight, bias = (arrays[f"{name}.{part}"] for part in ("weight", "bias"))
    hidden = jnp.pad(hidden, [(0, 0), (weight.shape[2] - 1, 0), (0, 0)], mode="edge")
    layout = ("NWC", "OIW", "NWC")
    return jax.lax.conv_general_dilated(hidden, weight, (stride,), [(0, 0)], dimension_numbers=layout) + bias


def normed(hidden):
    return jax.nn.silu(plain_norm(hidden, jnp.ones((1, 1)), jnp.zeros((1, 1)), 1e-6))


# ---------------------------------------------------------------- attention


def attend(layer: Layer, hidden, tokens, grid: tuple[int, int, int]):
    """What the video's tokens (batch, tokens, width) take from the face's (batch, latent frames, tokens, width): each
    attends to those of its own latent frame."""
    frames, rows, columns = grid
    own = jnp.minimum(jnp.arange(hidden.shape[1]) // (rows * columns), frames - 1)  # the last one's for padding too
    tokens = tokens.reshape(tokens.shape[0], -1, tokens.shape[-1])
    epsilon, head_dim = layer.blocks.epsilon, layer["norm_q.weight"].shape[0]

    def project(name, array):
        array = plain_norm(array, jnp.ones((1, 1)), jnp.zeros((1, 1)), epsilon)
        array = layer.linear(f"to_{name}", array)
        array = array.reshape(*array.shape[:2], -1, head_dim)
        return array if name == "v" else plain_norm(array, layer[f"norm_{name}.weight"][None], None, epsilon)

    out = attend_in_frames(project("q", hidden), project("k", tokens), project("v", tokens), own, frames)
    return layer.linear("to_out", out.reshape(hidden.shape))


def attend_in_frames(query, key, value, own, frames: int):
    """Attention (batch, tokens, heads, channels) of queries to the keys of their own frame: as many for each of the
    frames, one after another. All keys are scored, as few as they are, since devices share the video's tokens without
    regard to frames."""
    keys = jnp.repeat(jnp.arange(frames), key.shape[1] // frames)
    with jax.named_scope("attend"):
        scores = jnp.einsum("bqhc,bkhc->bhqk", query, key, preferred_element_type=jnp.float32)
        scores = jnp.where(own[:, None] == keys, scores / math.sqrt(query.shape[-1]), -jnp.inf)
        return jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores).astype(value.dtype), value)
