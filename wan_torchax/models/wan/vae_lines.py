"""Wan 2.1's VAE decoder in a TPU-friendly layout, as functions of its arrays; equivalent to diffusers' decoder.

A video is (frames, columns, lines, channels). Lines are the batch of every convolution: without a batch, XLA's TPU
backend would split the image to create one and reassemble it. Channels are zero-padded to multiples of 128. With only
128 channels, two lines are packed as one of 256, the width of the MXU. Columns are sharded over `axes`, inside
`jax.shard_map`: chips exchange one halo column at each edge. For upright images, lines and columns swap.
"""
import jax
import jax.numpy as jnp

from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import Kernel

LANES = 128
EPSILON = 1e-12  # of diffusers' norm


def decode_chunk(arrays, latent, caches, axes, columns, upright=False):
    """One latent frame (1, channels, 1, height, width) to pixels (1, 3, frames, height, width) in -1..1, and caches.

    `caches` has the last two input frames of every causal convolution, by the name of its weight, None at the start.
    The first latent frame decodes to one frame, later ones to four. The first `columns` of all chips' latent columns
    are the picture's, the rest is padding.
    """
    first, kept, sides = caches is None, {}, (3, 2) if upright else (2, 3)  # of a picture (channels, height, width)

    def wide(array, *dimensions):
        """Zero-pad channels to a multiple of 128; the few channels of latents and pixels are not padded."""
        counts = [array.shape[index] if index in dimensions else 0 for index in range(array.ndim)]
        return jnp.pad(array, [(0, -count % LANES if count > LANES // 2 else 0) for count in counts])

    def weights(name):
        """(frames, columns, lines, inputs, outputs), and the bias."""
        weight = arrays[f"{name}.weight"]
        weight = weight if weight.ndim == 5 else weight[:, :, None]
        return wide(weight, 0, 1).transpose(2, 1 + sides[1], 1 + sides[0], 1, 0), wide(arrays[f"{name}.bias"], 0)

    def convolve(name, video):
        return convolution(video, *weights(name))

    def causal(name, video, edges=True):
        video = with_edges(within(video), axes) if edges else video
        before = jnp.zeros((2, *video.shape[1:]), video.dtype) if first else caches[name]
        video = jnp.concatenate([before, video])
        kept[name] = video[-2:]
        return convolve(name, video)

    def within(video):
        """Zeros instead of what convolutions have made of the padding, as at the picture's edge."""
        shard, latents = video.shape[1], latent.shape[sides[1] + 1]
        if columns == latents * jax.lax.axis_size(axes):
            return video
        places = jax.lax.axis_index(axes) * shard + jnp.arange(shard)
        return jnp.where((places < columns * (shard // latents))[None, :, None, None], video, 0)

    def outputs(name, video, parts):
        """A convolution's output without the padding channels, split into parts."""
        return jnp.split(video[..., : len(arrays[f"{name}.bias"])], parts, axis=-1)

    def norm(name, video):
        gamma = arrays[f"{name}.gamma"].reshape(-1)
        factor = wide(gamma, 0)
        beside = video.shape[-1] // factor.size
        # The sum of squares as a matmul with ones: the result is already broadcast to every channel.
        ones = jnp.kron(jnp.eye(beside, dtype=video.dtype), jnp.ones((factor.size,) * 2, video.dtype))
        squares = jnp.matmul(jnp.square(video), ones, preferred_element_type=jnp.float32)
        length = jax.lax.rsqrt(jnp.maximum(squares, EPSILON**2)) * gamma.size**0.5
        return (video.astype(jnp.float32) * length).astype(video.dtype) * jnp.tile(factor, beside)

    def residual(name, video):
        shortcut = convolve(f"{name}.conv_shortcut", video) if f"{name}.conv_shortcut.weight" in arrays else video
        for number in (1, 2):
            video = causal(f"{name}.conv{number}", jax.nn.silu(norm(f"{name}.norm{number}", video)))
        return video + shortcut

    def attention(name, video):
        """Attention over all pixels of the frame; each chip has the queries of its own columns."""
        frame = convolve(f"{name}.to_qkv", norm(f"{name}.norm", video))
        query, key, value = (part.reshape(1, -1, part.shape[-1]) for part in outputs(f"{name}.to_qkv", frame, 3))
        key, value = (jax.lax.all_gather(part, axes, axis=1, tiled=True) for part in (key, value))
        kernel = Kernel(kernel="xla", block_q=2048, block_kv=8192)  # 64 MiB of scores
        attend = Attend(query.shape[-1], kernel, keys=columns * video.shape[2])
        out = wide(attend(query, key, value), 2)
        return video + convolve(f"{name}.proj", out.reshape(video.shape))

    def upsample(name, video):
        weight, bias = weights(f"{name}.resample.1")
        video = one_by_one(video, weight.shape[3])
        if f"{name}.time_conv.weight" in arrays:  # two frames for one, except for the first
            if first:
                kept[f"{name}.time_conv"] = jnp.zeros((2, *video.shape[1:]), video.dtype)
            else:
                pairs = outputs(f"{name}.time_conv", causal(f"{name}.time_conv", video, edges=False), 2)
                video = wide(jnp.stack(pairs, axis=1), 4).reshape(-1, *video.shape[1:])
        above, middle, below = jnp.split(weight, 3, axis=2)
        none = jnp.zeros_like(middle)  # nearest upsampling folded into the weights: even lines, then odd ones
        even = jnp.concatenate([above, middle + below, none], axis=2)
        odd = jnp.concatenate([none, above + middle, below], axis=2)
        video = with_edges(within(video).repeat(2, axis=1), axes)
        pairs = convolution(video, jnp.concatenate([even, odd], axis=-1), jnp.concatenate([bias, bias]))
        return pairs if len(bias) <= LANES else one_by_one(pairs, len(bias))

    def present(part):
        return any(name.startswith(f"{part}.") for name in arrays)

    video = latent[0].transpose(1, sides[1], sides[0], 0)
    video = causal("decoder.conv_in", convolve("post_quant_conv", video))
    video = residual("decoder.mid_block.resnets.0", video)
    video = attention("decoder.mid_block.attentions.0", video)
    video = residual("decoder.mid_block.resnets.1", video)
    level = 0
    while present(block := f"decoder.up_blocks.{level}"):
        number = 0
        while present(f"{block}.resnets.{number}"):
            video = residual(f"{block}.resnets.{number}", video)
            number += 1
        if present(f"{block}.upsamplers"):
            video = upsample(f"{block}.upsamplers.0", video)
        level += 1
    video = causal("decoder.conv_out", jax.nn.silu(norm("decoder.norm_out", video)))
    pixels = one_by_one(video, 3).transpose(3, 0, *((1, 2) if upright else (2, 1)))[None]
    return pixels.clip(-1, 1), kept


def convolution(video, weight, bias):
    """Convolve `video`, which is padded along frames and columns but not along lines."""
    inputs, is_paired = weight.shape[3], video.shape[-1] > weight.shape[3]
    if weight.shape[2] == 3:
        above, below = video[:, :, :-1, -inputs:], video[:, :, 1:, :inputs]
        sides = [jnp.pad(lines, ((0, 0), (0, 0), zeros, (0, 0))) for lines, zeros in ((above, (1, 0)), (below, (0, 1)))]
        video = jnp.concatenate([sides[0], video, sides[1]], axis=-1)
    if is_paired:
        none = jnp.zeros_like(weight[:, :, :1])
        even, odd = jnp.concatenate([weight, none], axis=2), jnp.concatenate([none, weight], axis=2)
        weight, bias = jnp.concatenate([even, odd], axis=-1), jnp.tile(bias, 2)
    weight = weight.reshape(*weight.shape[:2], -1, weight.shape[-1])
    order = ("HWNC", "HWIO", "HWNC")  # H and W are frames and columns
    return jax.lax.conv_general_dilated(video, weight, (1, 1), "VALID", dimension_numbers=order) + bias


def one_by_one(video, channels):
    """Unpack lines to this many channels."""
    return video.reshape(*video.shape[:2], -1, channels)


def with_edges(video, axes):
    """Add the neighbours' halo column on either side, zeros at the image's edges."""
    chips = jax.lax.axis_size(axes)
    left = jax.lax.ppermute(video[:, -1:], axes, [(chip, chip + 1) for chip in range(chips - 1)])
    right = jax.lax.ppermute(video[:, :1], axes, [(chip + 1, chip) for chip in range(chips - 1)])
    return jnp.concatenate([left, video, right], axis=1)
