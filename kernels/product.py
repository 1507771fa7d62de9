"""Linear layers for TPU in Pallas: array · weightᵀ + bias in one pass, fused with GELU or with gate and residual; in
bf16, or quantized to eight bits with bf16 inputs and outputs.

XLA fuses the norm before a product and the GELU after it into the product and recomputes them for each tile: a
feed-forward takes 1.7 times what its products would at peak (benchmarks/results/plan_v6e8.txt). And inside a loop over
layers it reads a layer's weights through the slice of their stack, without prefetching. Here a block of tokens stays in
VMEM while blocks of weights are fetched directly from the stack; GELU, or gate and residual, overlap the products.

The attention kernel has values and outputs with tokens along the lanes. The product that computes values writes them in
that layout; the one that consumes outputs transposes its block of tokens in VMEM, once.

Quantized (kernels/quantized.py), the kernel rounds its block of tokens itself, once: in separate passes, maxima and
rounding would take as long as the products gain.
"""
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from wan_torchax.kernels.quantized import LARGEST
from wan_torchax.kernels.settings import Products

COLUMNS = 256  # outputs of one product: the width of the MXU
LANES = 128
PACKED = {2: 16, 1: 32}  # rows of a tile, by item size
STRIP = 32  # tokens quantized at a time: the rows of an 8-bit tile
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Linear:
    """array (batch, tokens, inputs) · weight (outputs, inputs)ᵀ + bias (outputs,), with batch and tokens sharded by
    `sharding` and weights replicated. With `layer`, weight is a stack and that layer is used.

    scale       one per output: weight is quantized, and tokens are quantized to the same dtype
    residual    added to the result, after multiplying it by gate (batch, outputs) if given
    transpose_in, transpose_out      array or result has tokens minormost in memory
    """

    settings: Products
    sharding: jax.sharding.NamedSharding | None = None  # None: one device

    def __call__(
        self, array, weight, bias, layer=None, scale=None, residual=None, gate=None, gelu=False, transpose_in=False,
        transpose_out=False,
    ):
        if layer is None:
            weight, layer = weight[None], 0
        spread = None if self.sharding is None else self.sharding.spec
        given = {  # with partition specs
            "array": (array, spread), "weight": (weight, WHOLE), "layer": (jnp.asarray(layer, jnp.int32), WHOLE),
            "bias": (bias, WHOLE), "scale": (scale, WHOLE), "residual": (residual, spread),
            "gate": (gate, spread and PartitionSpec(spread[0])),
        }
        given = {name: pair for name, pair in given.items() if pair[0] is not None}
        arrays, specs = ({name: pair[place] for name, pair in given.items()} for place in range(2))
        how = {"gelu": gelu, "transpose_in": transpose_in, "transpose_out": transpose_out}
        compute = partial(product, settings=self.settings, **how)
        if spread is None:
            return compute(arrays)
        return jax.shard_map(
            compute, mesh=self.sharding.mesh, in_specs=(specs,), out_specs=spread,
            check_vma=False,  # Pallas kernels carry no varying-axes types
        )(arrays)


def product(arrays, settings, gelu=False, transpose_in=False, transpose_out=False):
    """One device's shard, by Linear's names; weight (layers, outputs, inputs)."""
    (batch, tokens, inputs), (_, outputs, _) = arrays["array"].shape, arrays["weight"].shape
    dtype, (rows, columns) = arrays["array"].dtype, block_sizes(arrays, settings, transpose_in or transpose_out)
    blocks = {
        "array": pl.BlockSpec((None, rows, inputs), lambda b, i, j, layer: (b, i, 0)),
        "weight": pl.BlockSpec((None, columns, inputs), lambda b, i, j, layer: (layer[0], j, 0)),
        "bias": pl.BlockSpec((1, columns), lambda b, i, j, layer: (0, j)),
        "scale": pl.BlockSpec((1, columns), lambda b, i, j, layer: (0, j)),
        "residual": pl.BlockSpec((None, rows, columns), lambda b, i, j, layer: (b, i, j)),
        "gate": pl.BlockSpec((None, 1, columns), lambda b, i, j, layer: (b, 0, j)),
    }
    out_shape, out_block = (batch, tokens, outputs), blocks["residual"]
    if transpose_out:
        out_shape = batch, outputs, tokens
        out_block = pl.BlockSpec((None, columns, rows), lambda b, i, j, layer: (b, j, i))
    arrays = arrays | {name: arrays[name][None] for name in ("bias", "scale") if name in arrays}
    if "gate" in arrays:
        arrays["gate"] = arrays["gate"][:, None]
    scratch = {}
    if transpose_in:
        arrays["array"] = arrays["array"].swapaxes(1, 2)
        blocks["array"] = pl.BlockSpec((None, inputs, rows), lambda b, i, j, layer: (b, 0, i))
        scratch["upright"] = pltpu.VMEM((rows, inputs), dtype)
    if "scale" in arrays:
        scratch["quantized"] = pltpu.VMEM((rows, inputs), arrays["weight"].dtype)
        scratch["own"] = pltpu.VMEM((rows, 1), jnp.float32)
    names = [name for name in blocks if name in arrays]
    kernel = partial(product_kernel, names=(*names, "out", *scratch), gelu=gelu, transposed=transpose_out)
    out = pl.pallas_call(
        partial(outline, 1 + len(names)) if settings.outline else kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(tokens, rows), pl.cdiv(outputs, columns)),
            in_specs=[blocks[name] for name in names],
            out_specs=out_block,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=settings.vmem_mib * 2**20
        ),
        interpret=settings.interpret,
        name="product_kernel",
    )(arrays["layer"].reshape(1), *(arrays[name] for name in names))
    return out.swapaxes(1, 2) if transpose_out else out


def block_sizes(arrays, settings: Products, along_lanes=False) -> tuple[int, int]:
    """Rows and columns of a block: both halves of the rows are whole tiles; weights have one or two bytes."""
    (_, tokens, inputs), (_, outputs, _) = arrays["array"].shape, arrays["weight"].shape
    size = arrays["weight"].dtype.itemsize
    columns = settings.weights_mib * 2**20 // (size * inputs)
    rows = evenly(tokens, settings.rows, 2 * (LANES if along_lanes else PACKED[size]))
    return rows, evenly(outputs, columns, COLUMNS)


def evenly(count: int, most: int, multiple: int) -> int:
    """The size of equal blocks that cover `count`: a multiple of `multiple`, at most `most` (but at least one
    multiple)."""
    parts = pl.cdiv(count, multiple)
    return pl.cdiv(parts, pl.cdiv(parts, max(most // multiple, 1))) * multiple


def product_kernel(layer, *refs, names, gelu, transposed):
    """array (rows, inputs)   weight (columns, inputs)   out (rows, columns)   residual (rows, columns)
    bias, scale, gate (1, columns)

    With transposed, out (columns, rows). With upright (rows, inputs), array (inputs, rows) is transposed into it at the
    first block of weights; with quantized (rows, inputs) and own (rows, 1), tokens are quantized into it, with scales
    in own."""
    given = dict(zip(names, refs))
    array, weight, out, upright, quantized = map(given.get, ("array", "weight", "out", "upright", "quantized"))
    if upright is not None:
        pl.when(pl.program_id(2) == 0)(lambda: transpose_tokens(array, upright))
    if quantized is not None:
        source = array if upright is None else upright
        pl.when(pl.program_id(2) == 0)(lambda: quantize_tokens(source, quantized, given["own"]))
    tokens = next(ref for ref in (quantized, upright, array) if ref is not None)
    half = tokens.shape[0] // 2

    def along(row):
        return row.T if transposed else row

    # Half the rows at a time: more would be too much code, fewer would leave GELU no product to overlap with.
    @pl.loop(0, 2)
    def one_half(number):
        rows = pl.ds(pl.multiple_of(number * half, LANES if transposed else PACKED[weight.dtype.itemsize]), half)
        for begin in range(0, weight.shape[0], COLUMNS):
            columns = pl.ds(begin, COLUMNS)
            place = (columns, rows) if transposed else (rows, columns)
            factors = (weight[columns, :], tokens[rows, :]) if transposed else (tokens[rows, :], weight[columns, :])
            result = dot(*factors)
            if quantized is not None:
                result = result * along(given["own"][rows, :]) * along(given["scale"][:, columns])
            result += along(given["bias"][:, columns].astype(jnp.float32))
            if gelu:
                result = jax.nn.gelu(result, approximate=True)
            if "gate" in given:
                result *= given["gate"][:, columns]
            if "residual" in given:
                result += given["residual"][place].astype(jnp.float32)
            out[place] = result.astype(out.dtype)


def transpose_tokens(array, upright):
    """(inputs, rows) into (rows, inputs), by tiles of 128 rows."""
    @pl.loop(0, upright.shape[0] // LANES)
    def one_tile(index):
        rows = pl.ds(pl.multiple_of(index * LANES, LANES), LANES)
        upright[rows, :] = array[:, rows].T


def quantize_tokens(array, quantized, own):
    @pl.loop(0, array.shape[0] // STRIP)
    def one_strip(index):
        rows = pl.ds(pl.multiple_of(index * STRIP, STRIP), STRIP)
        tokens = array[rows, :].astype(jnp.float32)
        largest = jnp.max(jnp.abs(tokens), axis=1, keepdims=True)
        factor = jnp.where(largest == 0, 1, largest / LARGEST[str(quantized.dtype)])
        tokens = tokens * (1 / factor)
        quantized[rows, :] = (jnp.round(tokens) if quantized.dtype == jnp.int8 else tokens).astype(quantized.dtype)
        own[rows, :] = factor


def dot(left, right):
    """left · rightᵀ, accumulated in int32 or float32, as float32."""
    wide = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=wide).astype(jnp.float32)


def outline(inputs, *refs):
    """A stub with the kernel's operands: the program around it compiles to the same code."""
    refs[inputs][...] = jnp.zeros_like(refs[inputs])
