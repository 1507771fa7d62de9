"""Splits and joins arrays for the all-to-all that have tokens along the lanes; the parts become the leading dimension.

On TPU by a Pallas kernel that only copies blocks. For 75,776 tokens of 10 heads on v6e, XLA takes 2.4 M cycles by the
compiler's estimate to split and join once, where reading and writing takes 0.4 each.
"""
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
ROWS = 128  # of a block, which has all tokens of a part


def cut(array, parts, kernel):
    """(batch, width, tokens) -> (parts, batch, width, tokens / parts)"""
    batch, width, tokens = array.shape
    share = tokens // parts
    if not is_served(share, kernel):
        return jnp.stack(jnp.split(array, parts, axis=2))
    return copied(array, (parts, batch, width, share), whole(share), part(share), parts, kernel)


def join(pieces, kernel):
    """(parts, batch, width, tokens / parts) -> (batch, width, tokens)"""
    parts, batch, width, share = pieces.shape
    if not is_served(share, kernel):
        return jnp.concatenate(pieces, axis=2)
    return copied(pieces, (batch, width, parts * share), part(share), whole(share), parts, kernel)


def is_served(share, kernel):
    return kernel.kernel == "splash" and share % LANES == 0


def whole(share):
    return pl.BlockSpec((None, ROWS, share), lambda b, p, i: (b, i, p))


def part(share):
    return pl.BlockSpec((None, None, ROWS, share), lambda b, p, i: (p, b, i, 0))


def copied(array, shape, source, target, parts, kernel):
    batch, width = shape[-3:-1]
    return pl.pallas_call(
        copy_kernel,
        grid=(batch, parts, pl.cdiv(width, ROWS)),
        in_specs=[source],
        out_specs=target,
        out_shape=jax.ShapeDtypeStruct(shape, array.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=kernel.vmem_mib * 2**20
        ),
        interpret=kernel.interpret,
        name="copy_kernel",
    )(array)


def copy_kernel(source, target):
    target[...] = source[...]
