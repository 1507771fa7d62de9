"""Linear layers for TPU in Pallas: array · weightᵀ + bias, with GELU behind it where asked, in one pass; in bf16, or
bf16 to bf16 with both factors in int8.

XLA joins the norm before a product and the GELU behind it to the product itself and computes them again for each of its
tiles: a feed-forward takes 1.7 times what its products would at peak (benchmarks/results/plan_v6e8.txt). And inside a
loop over layers it reads a layer's weights through the slice that takes them from their stack, without fetching them
ahead. Here a block of tokens stays in VMEM while blocks of weights are fetched beside it, straight from the stack; GELU
fits between the products.

Values of attention lie with tokens along the lanes, as the attention kernel takes them: their product is turned around.

In int8 (kernels/quantised.py) the kernel rounds its block of tokens itself, once: in passes of their own, maxima and
rounding take as long as the products gain.
"""
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from wan_torchax.kernels.quantised import LARGEST
from wan_torchax.kernels.settings import Products

COLUMNS = 256  # outputs of one product: the width of the MXU
LANES = 128
PACKED = {2: 16, 1: 32}  # rows in a tile of memory, by bytes of a number
STRIP = 32  # tokens that are rounded at a time: a tile of int8
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Linear:
    """array (batch, tokens, inputs) · weight (outputs, inputs)ᵀ + bias (outputs,), batch and tokens on the devices as
    `sharding` says, weights whole on each. With `layer`, weight is a stack and that layer's counts. With `scale`, one
    for each output, it is of int8, and tokens are rounded to it too. With `turned`, the result lies with its tokens
    last in memory."""

    settings: Products
    sharding: jax.sharding.NamedSharding | None = None  # None: one device

    def __call__(self, array, weight, bias, layer=None, scale=None, gelu=False, turned=False):
        if layer is None:
            weight, layer = weight[None], 0
        compute = partial(product, settings=self.settings, gelu=gelu, turned=turned)
        arrays = (array, weight, layer, bias) if scale is None else (array, weight, layer, bias, scale)
        if self.sharding is None:
            return compute(*arrays)
        spread = self.sharding.spec
        return jax.shard_map(
            compute, mesh=self.sharding.mesh, in_specs=(spread, *[WHOLE] * (len(arrays) - 1)), out_specs=spread,
            check_vma=False,  # Pallas kernels carry no varying-axes types
        )(*arrays)


def product(array, weight, layer, *by_output, settings, gelu=False, turned=False):
    """One device's share: array (batch, tokens, inputs), weight (layers, outputs, inputs), bias (outputs,) and, for
    int8, scale (outputs,)."""
    (batch, tokens, inputs), outputs, small = array.shape, weight.shape[1], weight.dtype == jnp.int8
    rows, columns = block_sizes(tokens, inputs, outputs, weight.dtype.itemsize, settings, turned)
    kernel, scratch = turned_kernel if turned else product_kernel, []
    if small:
        kernel, scratch = int8_kernel, [pltpu.VMEM((rows, inputs), jnp.int8), pltpu.VMEM((rows, 1), jnp.float32)]
    out_shape, out_block, out_place = (batch, tokens, outputs), (rows, columns), lambda b, i, j, layer: (b, i, j)
    if turned:
        out_shape, out_block, out_place = (batch, outputs, tokens), (columns, rows), lambda b, i, j, layer: (b, j, i)
    out = pl.pallas_call(
        partial(outline, 3 + len(by_output)) if settings.outline else partial(kernel, gelu=gelu),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(tokens, rows), pl.cdiv(outputs, columns)),
            in_specs=[
                pl.BlockSpec((None, rows, inputs), lambda b, i, j, layer: (b, i, 0)),
                pl.BlockSpec((None, columns, inputs), lambda b, i, j, layer: (layer[0], j, 0)),
                *[pl.BlockSpec((1, columns), lambda b, i, j, layer: (0, j)) for _ in by_output],
            ],
            out_specs=pl.BlockSpec((None, *out_block), out_place),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, array.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=settings.vmem_mib * 2**20
        ),
        interpret=settings.interpret,
        name="product_kernel",
    )(jnp.asarray(layer, jnp.int32).reshape(1), array, weight, *(numbers[None] for numbers in by_output))
    return out.swapaxes(1, 2) if turned else out


def block_sizes(tokens: int, inputs: int, outputs: int, size: int, settings: Products, turned=False) -> tuple[int, int]:
    """Rows and columns of a block: both halves of the rows are whole tiles, weights are of one or two bytes."""
    columns = settings.weights_mib * 2**20 // (size * inputs)
    return evenly(tokens, settings.rows, 2 * (LANES if turned else PACKED[size])), evenly(outputs, columns, COLUMNS)


def evenly(count: int, most: int, multiple: int) -> int:
    """The size of a block, a multiple and at most `most` (one multiple at least), so that blocks of equal size hold all
    of `count`."""
    parts = pl.cdiv(count, multiple)
    return pl.cdiv(parts, pl.cdiv(parts, max(most // multiple, 1))) * multiple


def product_kernel(layer, array, weight, bias, out, *, gelu):
    """array (rows, inputs)   weight (columns, inputs)   bias (1, columns)   out (rows, columns)"""

    @each_part(out.shape, PACKED[2])
    def part(rows, columns):
        out[rows, columns] = finished(dot(array[rows, :], weight[columns, :]), bias[:, columns], gelu).astype(out.dtype)


def turned_kernel(layer, array, weight, bias, out, *, gelu):
    """The same with out (columns, rows)."""

    @each_part(out.shape[::-1], LANES)
    def part(rows, columns):
        result = finished(dot(weight[columns, :], array[rows, :]), bias[:, columns].T, gelu)
        out[columns, rows] = result.astype(out.dtype)


def int8_kernel(layer, array, weight, bias, scale, out, small, own, *, gelu):
    """As product_kernel, with weights of int8 and their scale (1, columns). small (rows, inputs) and own (rows, 1) are
    the tokens rounded and their scales, made when the first weights come by."""

    @pl.when(pl.program_id(2) == 0)
    def round_tokens():
        @pl.loop(0, array.shape[0] // STRIP)
        def one_strip(index):
            rows = pl.ds(pl.multiple_of(index * STRIP, STRIP), STRIP)
            tokens = array[rows, :].astype(jnp.float32)
            largest = jnp.max(jnp.abs(tokens), axis=1, keepdims=True)
            factor = jnp.where(largest == 0, 1, largest / LARGEST["int8"])
            small[rows, :], own[rows, :] = jnp.round(tokens * (1 / factor)).astype(jnp.int8), factor

    @each_part(out.shape, PACKED[1])
    def part(rows, columns):
        result = dot(small[rows, :], weight[columns, :], jnp.int32).astype(jnp.float32)
        result = finished(result * own[rows, :] * scale[:, columns], bias[:, columns], gelu)
        out[rows, columns] = result.astype(out.dtype)


def each_part(shape, multiple):
    """Half the rows at a time: more would be too much code, fewer would leave GELU no product to hide behind."""
    half = shape[0] // 2

    def run(part):
        @pl.loop(0, 2)
        def one_half(number):
            rows = pl.ds(pl.multiple_of(number * half, multiple), half)
            for begin in range(0, shape[1], COLUMNS):
                part(rows, pl.ds(begin, COLUMNS))

    return run


def dot(left, right, dtype=jnp.float32):
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def finished(result, bias, gelu):
    result += bias.astype(jnp.float32)
    return jax.nn.gelu(result, approximate=True) if gelu else result


def outline(inputs, *refs):
    """A kernel's operands without its work: what the program around it compiles to is the same."""
    refs[inputs][...] = jnp.zeros_like(refs[inputs])
