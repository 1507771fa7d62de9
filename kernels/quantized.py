"""Linear layers in eight bits: weights with a scale for each output, activations with one for each token.

    values, scale = quantize(weight, "int8")                    # (outputs, inputs), (outputs,)
    out = linear(array, values, scale, bias, activations=True)  # array · weightᵀ + bias

Scales are multiplied into the result: that is exact for rows and columns, and cuBLASLt's fp8 wants it so, a product of
e4m3 numbers alone; whatever else is in it XLA computes in bfloat16, without saying so.
"""
import jax
import jax.numpy as jnp
from jax import lax

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


def quantize(array, dtype: str):
    """Numbers of eight bits, and for each row what they have to be multiplied with."""
    array = array.astype(jnp.float32)
    largest = jnp.max(jnp.abs(array), axis=-1)
    scale = jnp.where(largest == 0, 1, largest / LARGEST[dtype])
    scaled = array / scale[..., None]
    return (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype), scale


def linear(array, weight, scale, bias, activations: bool):
    """array (…, inputs), weight (outputs, inputs) and scale (outputs,) as `quantize` gives them. Without activations
    these stay as they are, and the weights become what they are."""
    flat = array.reshape(-1, array.shape[-1])  # cuBLASLt's fp8 knows no further dimensions
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
