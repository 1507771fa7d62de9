"""Linear layers for TPU in Pallas: array · weightᵀ + bias, with GELU behind it where asked, in one pass; bf16.

XLA joins the norm before a product and the GELU behind it to the product itself and computes them again for each of its
tiles: a feed-forward takes 1.7 times what its products would at peak (benchmarks/results/plan_v6e8.txt). And inside a
loop over layers it reads a layer's weights through the slice that takes them from their stack, without fetching them
ahead. Here a block of tokens stays in VMEM while blocks of weights are fetched beside it, straight from the stack; GELU
fits between the products.
"""
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from wan_torchax.kernels.settings import Products

COLUMNS = 256  # outputs of one product: the width of the MXU
PACKED = 16  # rows of bf16 in a tile of memory
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Linear:
    """array (batch, tokens, inputs) · weight (outputs, inputs)ᵀ + bias (outputs,), batch and tokens on the devices as
    `sharding` says, weights whole on each. With `layer`, weight and bias are stacks and that layer's count."""

    settings: Products
    sharding: jax.sharding.NamedSharding | None = None  # None: one device

    def __call__(self, array, weight, bias, layer=None, gelu=False):
        if layer is None:
            weight, bias, layer = weight[None], bias[None], 0
        compute = partial(product, settings=self.settings, gelu=gelu)
        if self.sharding is None:
            return compute(array, weight, bias, layer)
        spread = self.sharding.spec
        return jax.shard_map(
            compute, mesh=self.sharding.mesh, in_specs=(spread, WHOLE, WHOLE, WHOLE), out_specs=spread,
            check_vma=False,  # Pallas kernels carry no varying-axes types
        )(array, weight, bias, layer)


def product(array, weight, bias, layer, *, settings, gelu):
    """One device's share: array (batch, tokens, inputs), weight (layers, outputs, inputs), bias (layers, outputs)."""
    flat = array.reshape(-1, array.shape[-1])
    (count, inputs), outputs = flat.shape, weight.shape[1]
    rows, columns = block_sizes(count, inputs, outputs, settings)
    out = pl.pallas_call(
        outline if settings.outline else partial(product_kernel, gelu=gelu),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(count, rows), pl.cdiv(outputs, columns)),
            in_specs=[
                pl.BlockSpec((rows, inputs), lambda i, j, layer: (i, 0)),
                pl.BlockSpec((None, columns, inputs), lambda i, j, layer: (layer[0], j, 0)),
                pl.BlockSpec((None, 1, columns), lambda i, j, layer: (layer[0], 0, j)),
            ],
            out_specs=pl.BlockSpec((rows, columns), lambda i, j, layer: (i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((count, outputs), array.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=settings.vmem_mib * 2**20
        ),
        interpret=settings.interpret,
        name="product_kernel",
    )(jnp.asarray(layer, jnp.int32).reshape(1), flat, weight, bias[:, None])
    return out.reshape(*array.shape[:-1], outputs)


def block_sizes(count: int, inputs: int, outputs: int, settings: Products) -> tuple[int, int]:
    """Rows and columns of a block: both halves of the rows are whole tiles, weights are two bytes each."""
    columns = settings.weights_mib * 2**20 // (2 * inputs)
    return evenly(count, settings.rows, 2 * PACKED), evenly(outputs, columns, COLUMNS)


def evenly(count: int, most: int, multiple: int) -> int:
    """The size of a block, a multiple and at most `most` (one multiple at least), so that blocks of equal size hold all
    of `count`."""
    parts = pl.cdiv(count, multiple)
    return pl.cdiv(parts, pl.cdiv(parts, max(most // multiple, 1))) * multiple


def product_kernel(layer, array, weight, bias, out, *, gelu):
    """array (rows, inputs)   weight (columns, inputs)   bias (1, columns)   out (rows, columns), half the rows at a
    time: more would be too much code, fewer would leave GELU no product to hide behind."""
    half = out.shape[0] // 2

    @pl.loop(0, 2)
    def _(number):
        rows = pl.ds(pl.multiple_of(number * half, PACKED), half)
        for begin in range(0, out.shape[1], COLUMNS):
            columns = pl.ds(begin, COLUMNS)
            both_last = (((1,), (1,)), ((), ()))
            result = lax.dot_general(array[rows, :], weight[columns, :], both_last, preferred_element_type=jnp.float32)
            result += bias[:, columns].astype(jnp.float32)
            out[rows, columns] = (jax.nn.gelu(result, approximate=True) if gelu else result).astype(out.dtype)


def outline(layer, array, weight, bias, out):
    """The kernel's operands without its work: what the program around it compiles to is the same."""
    out[...] = jnp.zeros_like(out)
