"""8-bit linear layers: weights with one scale per output, activations with one per token.

    values, scale = quantize(weight, "int8")                    # (outputs, inputs), (outputs,)
    out = linear(array, values, scale, bias, activations=True)  # array · weightᵀ + bias

Scales are applied to the result: that is exact for rows and columns, and required for cuBLASLt's fp8, which takes only
a plain product of e4m3 operands; anything else XLA silently computes in bfloat16.
"""
import jax
import jax.numpy as jnp
from jax import lax

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


def quantize(array, dtype: str):
    """8-bit values, and one scale per row."""
    array = array.astype(jnp.float32)
    largest = jnp.max(jnp.abs(array), axis=-1)
    scale = jnp.where(largest == 0, 1, largest / LARGEST[dtype])
    scaled = array / scale[..., None]
    return (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype), scale


def linear(array, weight, scale, bias, activations: bool):
    """array (…, inputs), weight (outputs, inputs) and scale (outputs,) from `quantize`. Without `activations`, the
    array is not quantized and weights are cast to its dtype."""
    flat = array.reshape(-1, array.shape[-1])  # cuBLASLt's fp8 supports no batch dimensions
    if activations:
        integer = weight.dtype == jnp.int8
        flat, own = quantize(flat, str(weight.dtype))
        out = dot(flat, weight, jnp.int32 if integer else array.dtype).astype(jnp.float32) * own[:, None]
    else:
        out = dot(flat, weight.astype(array.dtype), jnp.float32)
    out = out * scale + bias.astype(jnp.float32)
    return out.astype(array.dtype).reshape(*array.shape[:-1], -1)


def dot(array, weight, dtype):
    with jax.named_scope("eight_bits"):
        return lax.dot_general(array, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
