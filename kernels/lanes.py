"""Splits and joins arrays for the all-to-all that have tokens along the lanes; the parts become the leading dimension.

On TPU by a Pallas kernel that only copies blocks. For 75,776 tokens of 10 heads on v6e, XLA takes 2.4 M cycles by the
compiler's estimate to split and join once, where reading and writing takes 0.4 each.
"""
from functools import partial
from itertools import accumulate

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


def join(pieces, kernel, begin=0, width=None):
    """(parts, batch, width, tokens / parts) -> (batch, width, tokens), of all rows or `width` rows from `begin` on"""
    parts, batch, all_rows, share = pieces.shape
    width = width or all_rows
    if not is_served(share, kernel) or begin % ROWS:
        return jnp.concatenate(pieces[:, :, begin:begin + width], axis=2)
    first = begin // ROWS
    return copied(pieces, (batch, width, parts * share), part(share, first), whole(share), parts, kernel)


def stack(groups, kernel):
    """Some (parts, batch, width, tokens), all with the same tokens -> (batch, rows, tokens): the rows of every group's
    first part, then of their second parts, and so on"""
    parts, batch, _, share = groups[0].shape
    blocks = [group.shape[2] // ROWS for group in groups]
    if not is_served(share, kernel) or any(group.shape[2] % ROWS for group in groups):
        joined = jnp.concatenate(groups, axis=2)
        return jnp.moveaxis(joined, 0, 1).reshape(batch, -1, share)
    ends = list(accumulate(blocks))

    def block(begin, end):
        """Of a group, which has the blocks of rows from `begin` to `end` of a part; otherwise the nearest one's, which
        is there already or will be needed next."""
        return pl.BlockSpec(
            (None, None, ROWS, share), lambda b, p, i: (p, b, jnp.clip(i, begin, end - 1) - begin, 0)
        )

    return pl.pallas_call(
        partial(stack_kernel, ends=ends),
        grid=(batch, parts, ends[-1]),
        in_specs=[block(end - count, end) for count, end in zip(blocks, ends)],
        out_specs=pl.BlockSpec((None, ROWS, share), lambda b, p, i: (b, p * ends[-1] + i, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, parts * ends[-1] * ROWS, share), groups[0].dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=kernel.vmem_mib * 2**20
        ),
        interpret=kernel.interpret,
        name="copy_kernel",
    )(*groups)


def stack_kernel(*refs, ends):
    *sources, target = refs
    for source, begin, end in zip(sources, [0, *ends], ends):
        number = pl.program_id(2)
        pl.when((begin <= number) & (number < end))(partial(copy_kernel, source, target))


def is_served(share, kernel):
    return kernel.kernel == "splash" and share % LANES == 0


def whole(share):
    return pl.BlockSpec((None, ROWS, share), lambda b, p, i: (b, i, p))


def part(share, first=0):
    return pl.BlockSpec((None, None, ROWS, share), lambda b, p, i: (p, b, i + first, 0))


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
