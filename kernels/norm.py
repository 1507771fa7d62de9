"""Layer norm and RMS norm for TPU in Pallas, with scale and shift, in one pass over memory.

XLA computes mean and variance in one pass and applies them in the next, each at less than half the memory bandwidth by
the compiler's estimate: 1.9 M cycles for 18,944 tokens of 5,120 channels on v6e, where reading and writing takes 0.4.
"""
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from wan_torchax.kernels.parallel import divided
from wan_torchax.kernels.settings import Products

LANES = 128
ROWS, STRIP = 512, 64  # tokens per block, a few MiB even for 5,120 channels, and per iteration


@dataclass(frozen=True)
class Norm:
    """(array - mean) / deviation · scale + shift over the last dimension of (batch, tokens, channels), with batch and
    tokens sharded by `sharding`. scale and shift are (batch or 1, channels). Without a shift it is an RMS norm."""

    settings: Products
    sharding: jax.sharding.NamedSharding | None = None  # None: one device

    def __call__(self, array, scale, shift=None, epsilon=1e-6):
        by_channel = [scale] if shift is None else [scale, shift]
        by_channel = [
            jnp.broadcast_to(one.astype(jnp.float32), (array.shape[0], array.shape[2]))[:, None] for one in by_channel
        ]
        compute = partial(normalise, epsilon=epsilon, settings=self.settings)
        if self.sharding is None:
            return compute(array, *by_channel)
        spread = self.sharding.spec
        return jax.shard_map(
            compute, mesh=self.sharding.mesh, in_specs=(spread, *[PartitionSpec(spread[0])] * len(by_channel)),
            out_specs=spread, check_vma=False,  # Pallas kernels carry no varying-axes types
        )(divided(array, self.sharding), *by_channel)[:, : array.shape[1]]


def normalise(array, *by_channel, epsilon, settings):
    """One device's shard; scale and shift (batch, 1, channels)."""
    batch, tokens, channels = array.shape
    rows = min(ROWS, pl.cdiv(tokens, STRIP) * STRIP)
    block = pl.BlockSpec((None, rows, channels), lambda b, i: (b, i, 0))
    row = pl.BlockSpec((None, 1, channels), lambda b, i: (b, 0, 0))
    return pl.pallas_call(
        partial(norm_kernel, epsilon=epsilon),
        grid=(batch, pl.cdiv(tokens, rows)),
        in_specs=[block, *[row] * len(by_channel)],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=settings.vmem_mib * 2**20
        ),
        interpret=settings.interpret,
        name="norm_kernel",
    )(array, *by_channel)


def norm_kernel(array, scale, *rest, epsilon):
    """array, out (rows, channels)   scale, shift (1, channels)"""
    *shift, out = rest
    rows, channels = array.shape
    width = channels if channels % LANES else LANES
    parts = [slice(begin, begin + width) for begin in range(0, channels, width)]

    @pl.loop(0, rows // STRIP)
    def one_strip(index):
        strip = pl.ds(pl.multiple_of(index * STRIP, STRIP), STRIP)

        def wide(part):
            return array[strip, part].astype(jnp.float32)

        def average(of):
            return jnp.sum(sum(of(wide(part)) for part in parts), axis=1, keepdims=True) / channels

        mean = average(lambda lanes: lanes) if shift else 0
        factor = lax.rsqrt(average(lambda lanes: (lanes - mean) ** 2) + epsilon)
        for part in parts:
            lanes = (wide(part) - mean) * factor * scale[:, part]
            out[strip, part] = (lanes + shift[0][:, part] if shift else lanes).astype(out.dtype)
