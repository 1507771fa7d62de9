"""GGUF's blocks of quantized numbers, back in float32.

    dequantize(rows, "Q4_K")    # (rows, bytes) of uint8 -> (rows, numbers) of float32

A block holds 32 or 256 numbers in a few bits each, and what they are scaled by. Each function takes the blocks as
(blocks, bytes); multiplications and additions are in the order of llama.cpp's, so results are equal bit for bit.
"""
import jax
import jax.numpy as jnp
import numpy

# The sixteen values of IQ4's numbers.
IQ4 = numpy.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], numpy.float32)


def dequantize(rows, format: str):
    """Rows of blocks as rows of float32."""
    size, function = FORMATS[format]
    return function(rows.reshape(-1, size)).reshape(rows.shape[0], -1)


def half(array):
    """Pairs of bytes as float16, in float32."""
    return jax.lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 2), jnp.float16).astype(jnp.float32)


def signed(array):
    return jax.lax.bitcast_convert_type(array, jnp.int8)


def nibbles(array):
    """Low halves of all bytes, then the high halves, along a new dimension before the last."""
    return jnp.stack([array & 15, array >> 4], -2)


def bits(array, width: int, count: int):
    """Fields of so many bits of all bytes: the lowest of each, then the next, along a new dimension before the last."""
    return jnp.stack([(array >> (width * place)) & (2**width - 1) for place in range(count)], -2)


def flags(array):
    """The bits of four bytes, from the lowest of the first on."""
    return jnp.stack([(array >> place) & 1 for place in range(8)], -1).reshape(len(array), -1)


def floats(array):
    return array.astype(jnp.float32)


# ---------------------------------------------------------------- blocks of 32


def q4_0(blocks):
    numbers = nibbles(blocks[:, 2:]).reshape(-1, 32)
    return half(blocks[:, :2]) * (floats(numbers) - 8)


def q4_1(blocks):
    numbers = nibbles(blocks[:, 4:]).reshape(-1, 32)
    return half(blocks[:, :2]) * floats(numbers) + half(blocks[:, 2:4])


def q5_0(blocks):
    numbers = nibbles(blocks[:, 6:]).reshape(-1, 32) | flags(blocks[:, 2:6]) << 4
    return half(blocks[:, :2]) * (floats(numbers) - 16)


def q5_1(blocks):
    numbers = nibbles(blocks[:, 8:]).reshape(-1, 32) | flags(blocks[:, 4:8]) << 4
    return half(blocks[:, :2]) * floats(numbers) + half(blocks[:, 2:4])


def q8_0(blocks):
    return half(blocks[:, :2]) * floats(signed(blocks[:, 2:]))


def iq4_nl(blocks):
    return half(blocks[:, :2]) * jnp.asarray(IQ4)[nibbles(blocks[:, 2:]).reshape(-1, 32)]


# ---------------------------------------------------------------- blocks of 256, in parts with scales of their own


def parts(scale, numbers):
    """A scale for each part of a block, times its numbers."""
    return (scale[..., None] * floats(numbers.reshape(len(scale), scale.shape[1], -1))).reshape(-1, 256)


def q2_k(blocks):
    scales, scale, least = blocks[:, :16], half(blocks[:, 80:82]), half(blocks[:, 82:84])
    numbers = bits(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4)
    lowest = jnp.repeat(least * floats(scales >> 4), 16, axis=1)
    return parts(scale * floats(scales & 15), numbers) - lowest


def q3_k(blocks):
    low, high = bits(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4), bits(blocks[:, :32], 1, 8)
    # Sixteen scales of six bits: four low bits of each in eight bytes, two high bits in four.
    packed = blocks[:, 96:108]
    scales = nibbles(packed[:, :8]).reshape(-1, 16) | bits(packed[:, 8:], 2, 4).reshape(-1, 16) << 4
    numbers = signed(low.reshape(-1, 256)) - 4 * signed(1 - high.reshape(-1, 256))
    return parts(half(blocks[:, 108:]) * (floats(scales) - 32), numbers)


def six_bits(packed):
    """Eight scales and eight minima of six bits each, in twelve bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = jnp.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    return floats(scales), floats(jnp.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1))


def q4_k(blocks, high=0):
    """`high`: a fifth bit for each number (Q5_K)."""
    scales, minima = six_bits(blocks[:, 4:16])
    numbers = nibbles(blocks[:, -128:].reshape(-1, 4, 32)).reshape(-1, 256) | high
    lowest = jnp.repeat(half(blocks[:, 2:4]) * minima, 32, axis=1)
    return parts(half(blocks[:, :2]) * scales, numbers) - lowest


def q5_k(blocks):
    return q4_k(blocks, bits(blocks[:, 16:48], 1, 8).reshape(-1, 256) << 4)


def q6_k(blocks):
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = bits(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4).reshape(-1, 256)
    scale = half(blocks[:, 208:]) * floats(signed(blocks[:, 192:208]))
    return parts(scale, signed(low | high << 4) - 32)


def iq4_xs(blocks):
    high = (blocks[:, 2:4].reshape(-1, 2, 1) >> jnp.arange(0, 8, 2, dtype=jnp.uint8) & 3).reshape(-1, 8)
    low = nibbles(blocks[:, 4:8]).swapaxes(-1, -2).reshape(-1, 8)
    scale = half(blocks[:, :2]) * (floats(low | high << 4) - 32)
    return parts(scale, jnp.asarray(IQ4)[nibbles(blocks[:, 8:].reshape(-1, 8, 16))])


FORMATS = {  # name -> bytes of a block, function
    "Q4_0": (18, q4_0), "Q4_1": (20, q4_1), "Q5_0": (22, q5_0), "Q5_1": (24, q5_1), "Q8_0": (34, q8_0),
    "Q2_K": (84, q2_k), "Q3_K": (110, q3_k), "Q4_K": (144, q4_k), "Q5_K": (176, q5_k), "Q6_K": (210, q6_k),
    "IQ4_NL": (18, iq4_nl), "IQ4_XS": (136, iq4_xs),
}
