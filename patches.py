"""Workarounds for torchax, each with its reason: its global state, and the op overrides that conf/ops names.

Everything here takes effect only inside `torchax_on()`. The models themselves are in wan_torchax/models.
"""
import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import torch

from wan_torchax import private

# Importing torchax disables torch's transformer fast path for the whole process; outside `torchax_on()` torch must
# behave as if torchax were not imported.
_fast_path = torch.backends.mha.get_fastpath_enabled()


def overloads_of_old() -> contextlib.AbstractContextManager:
    """Inside the block, overloads for named dimensions that torch has removed resolve to their name, as placeholders.

    torchax 0.0.13 lists such overloads (aten.prod.dim_Dimname, aten.all.dimname, aten.norm.names_dim, ...) in tables
    that it builds on import, and torch 2.13 has removed them: without this the import fails. The placeholders are keys
    that are never looked up. Remove this when torchax no longer lists them; its test then fails.
    """

    def name(op, overload):
        return f"{op}.{overload}" if re.search("dimname|names", overload, re.IGNORECASE) else None

    return private.missing_overloads(name)


with overloads_of_old():
    import torchax
    import torchax.decompositions  # otherwise imported with the first environment, outside this block
    from torchax import interop

torch.backends.mha.set_fastpath_enabled(_fast_path)

from wan_torchax.kernels.attention import Attend  # noqa: E402
from wan_torchax.kernels.settings import Kernel  # noqa: E402

# ---------------------------------------------------------------- torchax's global state


@contextlib.contextmanager
def torchax_on(ops=None):
    """Enable torchax with our op overrides, and disable gradients, inside the block.

    Nestable and exception-safe: torch's modes, torchax's op table and all settings are restored. `ops` maps a torch op
    to its implementation.
    """
    environment = torchax.default_env()
    saved = environment.enabled, torchax.tensor.Tensor.type_as
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torchax.tensor.Tensor.type_as = type_as
        torch.backends.mha.set_fastpath_enabled(False)
        with private.overridden_ops(environment, ops or {}), environment, torch.no_grad(), warnings.catch_warnings():
            # JAX has no 64-bit integers by default; torch's indices fit in 32 bits.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")
            yield environment
    finally:
        environment.enabled, torchax.tensor.Tensor.type_as = saved
        torch.backends.mha.set_fastpath_enabled(fast_path)


def type_as(tensor, other):
    """torchax 0.0.13 casts in place but keeps the old dtype in the metadata; bf16 convolutions reject such input."""
    return tensor.to(other.dtype)


def call_module(module, parameters, *arguments, **keywords):
    """Run a torch module on JAX arrays, inside `torchax_on()`; returns JAX arrays."""
    arguments, keywords = interop.torch_view((arguments, keywords))
    output = torch.func.functional_call(module, interop.torch_view(parameters), arguments, keywords)
    return interop.jax_view(output)


class Call(torch.nn.Module):
    """Wraps a function of a module as a module, for functional_call."""

    def __init__(self, function, module):
        super().__init__()
        self.function, self.module = function, module

    def forward(self, *arguments):
        return self.function(self.module, *arguments)


def call_function(function, module, parameters, *arguments):
    """Like call_module, for `function(module, *arguments)` instead of the module's forward."""
    named = {f"module.{name}": array for name, array in parameters.items()}
    return call_module(Call(function, module), named, *arguments)


# ---------------------------------------------------------------- op overrides, named in conf/ops


def upsample_nearest_exact2d(image, output_size, scales_h=None, scales_w=None):
    """Nearest-neighbour upsampling by integer factors: (batch, channels, height, width)."""
    height, width = image.shape[-2:]
    if output_size[0] % height or output_size[1] % width:
        sizes = f"{height}x{width} to {tuple(output_size)}"
        raise NotImplementedError(f"nearest-exact upsampling from {sizes}: only whole factors")

    def repeat(array):
        return array.repeat(output_size[0] // height, axis=-2).repeat(output_size[1] // width, axis=-1)

    return interop.call_jax(repeat, image)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """torch's attention, (batch, heads, tokens, head_dim), computed blockwise without a full score matrix.

    A mask or bias (the text encoder's, 512 tokens) is as large as the score matrix anyway: then JAX's attention is
    used.
    """
    if dropout_p or enable_gqa:
        raise NotImplementedError("attention: dropout and grouped heads are not needed by any model here")
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale

    def masked(query, key, value, *mask):
        given = {"mask" if one.dtype == bool else "bias": one for one in mask}
        query, key, value = (array.swapaxes(1, 2) for array in (query, key, value))
        out = jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=is_causal, **given)
        return out.swapaxes(1, 2)

    def blockwise(*tensors):
        query, key, value = (array.swapaxes(1, 2).reshape(array.shape[0], array.shape[2], -1) for array in tensors)
        attend = Attend(head_dim, Kernel(kernel="xla", block_q=2048, block_kv=8192))  # 64 MiB of scores
        out = attend(query * (scale * head_dim**0.5), key, value)
        return out.reshape(*out.shape[:2], -1, head_dim).swapaxes(1, 2)

    if attn_mask is not None or is_causal:
        return interop.call_jax(masked, query, key, value, *([] if attn_mask is None else [attn_mask]))
    return interop.call_jax(blockwise, query, key, value)


def layer_norm(array, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Layer norm over the last dimension; mean and variance in one pass, which XLA fuses with the producer."""

    def normalize(array, *affine):
        wide = array.astype(jnp.float32)
        mean = wide.mean(axis=-1, keepdims=True)
        variance = jnp.maximum((wide * wide).mean(axis=-1, keepdims=True) - mean * mean, 0)
        out = (wide - mean) * jax.lax.rsqrt(variance + eps)
        out = out * affine[0] if weight is not None else out
        out = out + affine[-1] if bias is not None else out
        return out.astype(array.dtype)

    if tuple(normalized_shape) != tuple(array.shape[-1:]):
        shapes = f"{tuple(normalized_shape)} of {tuple(array.shape)}"
        raise NotImplementedError(f"layer norm over {shapes}: only the last dimension")
    return interop.call_jax(normalize, array, *(part for part in (weight, bias) if part is not None))


def conv3d_as_2d(*arguments, **how):
    """A 3D convolution as one 2D convolution, with the temporal taps concatenated as channels."""

    def convolve(taps, weight, *given):
        outputs, channels, count, *kernel = weight.shape
        flat = weight.swapaxes(1, 2).reshape(outputs, count * channels, *kernel)
        flat = jnp.pad(flat, [(0, max(0, 8 - outputs))] + [(0, 0)] * 3)  # cuDNN has no fast kernel for 3 outputs (RGB)
        return jax.lax.conv_general_dilated(_images(jnp.concatenate(taps, axis=1)), flat, *given)[:, :outputs]

    return _conv3d_of_images(convolve, *arguments, **how)


def conv3d_as_sum_of_2d(*arguments, **how):
    """A 3D convolution as a sum of 2D convolutions, one per temporal tap."""

    def convolve(taps, weight, *given):
        return sum(
            jax.lax.conv_general_dilated(_images(tap), weight[:, :, index], *given) for index, tap in enumerate(taps)
        )

    return _conv3d_of_images(convolve, *arguments, **how)


def _images(video):
    """Frames as a batch: (batch * frames, channels, height, width)."""
    batch, channels, frames, *size = video.shape
    return video.swapaxes(1, 2).reshape(batch * frames, channels, *size)


def _conv3d_of_images(convolve_images, video, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """A 3D convolution by `convolve_images(frames for each temporal tap, weight, stride, padding)`.

    video (batch, channels, frames, height, width)
    """
    stride, padding, dilation = (
        value if isinstance(value, (tuple, list)) else (value,) * 3 for value in (stride, padding, dilation)
    )
    if padding[0] or tuple(dilation) != (1, 1, 1) or groups != 1:
        raise NotImplementedError("conv3d: padding in time, dilation and groups are not used by Wan")

    def convolve(video, weight, *bias):
        count = (video.shape[2] - weight.shape[2]) // stride[0] + 1
        taps = [
            video[:, :, tap : tap + (count - 1) * stride[0] + 1 : stride[0]] for tap in range(weight.shape[2])
        ]
        out = convolve_images(taps, weight, stride[1:], [(side, side) for side in padding[1:]])
        out = out.reshape(len(video), count, *out.shape[1:]).swapaxes(1, 2)
        return out + bias[0].reshape(-1, 1, 1, 1) if bias else out

    return interop.call_jax(convolve, video, weight, *([] if bias is None else [bias]))
