"""Linear layers for TPU in Pallas: array · weightᵀ + bias in one pass, fused with GELU or with gate and residual; in
bf16, or quantized to eight bits with bf16 inputs and outputs.

XLA fuses the norm before a product and the GELU after it into the product and recomputes them for each tile: a
feed-forward takes 1.7 times what its products would at peak (benchmarks/results/plan_v6e8.txt). And inside a loop over
layers it reads a layer's weights through the slice of their stack, without prefetching. Here a block of tokens stays in
VMEM while blocks of weights are fetched directly from the stack; GELU, or gate and residual, overlap the products.

The attention kernel has values and outputs with tokens along the lanes. The product that computes values writes them in
that layout; the one that consumes outputs transposes its block of tokens in VMEM, once, or for every product, beside it
(`products.upright`).

Quantized (kernels/quantized.py), the kernel rounds its block of tokens itself, once: in separate passes, maxima and
rounding would take as long as the products gain. It transposes them before.
"""
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from wan_torchax.kernels.parallel import Pieces, divided
from wan_torchax.kernels.quantized import LARGEST
from wan_torchax.kernels.rotary import rotate_pairs, signed
from wan_torchax.kernels.settings import Products

COLUMNS = 256  # outputs of one product: the width of the MXU
LANES = 128
PACKED = {2: 16, 1: 32}  # rows of a tile, by item size
THIRDS_COST = 1 / 16  # by the compiler's schedule a token takes 3 % longer in thirds of a block, in eight bits 5 %
STRIP = 32  # tokens quantized at a time: the rows of an 8-bit tile
WHOLE = PartitionSpec()
TOKENS, TABLES = ("array", "second"), ("cosine", "sine")  # in one order: sets differ from process to process


class Target(NamedTuple):
    """Where a result's tokens go: into an array of several, of which each of `parts` devices has a part."""

    first: int  # in a part
    total: int  # tokens of a part
    parts: int
    into: jax.Array | None = None  # with the other tokens; None: they are yet to come

    def put(self, out):
        batch, tokens, width = out.shape
        into = jnp.zeros((batch, self.parts * self.total, width), out.dtype) if self.into is None else self.into
        into, out = (array.reshape(batch, self.parts, -1, width) for array in (into, out))
        return lax.dynamic_update_slice(into, out, (0, 0, self.first, 0)).reshape(batch, -1, width)


@dataclass(frozen=True)
class Linear:
    """array (batch, tokens, inputs) · weight (outputs, inputs)ᵀ + bias (outputs,), with batch and tokens sharded by
    `sharding` and weights replicated. With `layer`, weight is a stack and that layer is used.

    array       or two arrays, whose inputs follow each other in the weight; with transpose_in, Pieces
    scale       one per output: weight is quantized, and tokens, of one array, are quantized to the same dtype
    residual    added to the result, after multiplying it by gate (batch, outputs) if given
    turn        norm and RoPE of each head, of 128 outputs
    target      where the result goes, if tokens divide over the devices
    transpose_in, transpose_out      array, the first of two, or result has tokens minormost in memory
    """

    settings: Products
    sharding: jax.sharding.NamedSharding | None = None  # None: one device

    def __call__(
        self, array, weight, bias, layer=None, scale=None, residual=None, gate=None, turn=None, target=None,
        gelu=False, transpose_in=False, transpose_out=False,
    ):
        if layer is None:
            weight, layer = weight[None], 0
        spread = None if self.sharding is None else self.sharding.spec
        array, second = array if isinstance(array, tuple) else (array, None)
        tokens, in_pieces = array.shape[1], isinstance(array, Pieces)
        array_spread = spread and PartitionSpec(None, spread[1], spread[0]) if in_pieces else spread
        given = {  # with partition specs
            "array": (array, array_spread), "weight": (weight, WHOLE), "layer": (jnp.asarray(layer, jnp.int32), WHOLE),
            "bias": (bias, WHOLE), "scale": (scale, WHOLE), "residual": (residual, spread),
            "gate": (gate, spread and PartitionSpec(spread[0])), "second": (second, spread),
        }
        how = {"gelu": gelu, "transpose_in": transpose_in, "transpose_out": transpose_out}
        if turn is not None:
            by_row = spread and PartitionSpec(spread[1])
            given |= {"cosine": (turn.cosine, by_row), "sine": (signed(turn.sine), by_row)}
            given["norm"] = turn.weight, WHOLE
            how["epsilon"] = turn.epsilon
        if target is not None:
            given["into"] = target.into, spread
            how["target"] = target._replace(into=None)
            tokens = target.parts * target.total
        given = {name: pair for name, pair in given.items() if pair[0] is not None}
        arrays, specs = ({name: pair[place] for name, pair in given.items()} for place in range(2))
        compute = partial(product, settings=self.settings, **how)
        if spread is None:
            return compute(arrays)
        arrays |= {
            name: divided(arrays[name], self.sharding) for name in (*TOKENS, "residual")
            if name in arrays and not (in_pieces and name == "array")
        }
        arrays |= {name: divided(arrays[name][None], self.sharding)[0] for name in TABLES if name in arrays}
        return jax.shard_map(
            compute, mesh=self.sharding.mesh, in_specs=(specs,), out_specs=spread,
            check_vma=False,  # Pallas kernels carry no varying-axes types
        )(arrays)[:, :tokens]


def product(arrays, settings, gelu=False, transpose_in=False, transpose_out=False, epsilon=None, target=None):
    """One device's shard, by Linear's names; weight (layers, outputs, inputs). `second`, of two arrays, has the last of
    the inputs."""
    (batch, tokens, inputs), (_, outputs, total) = arrays["array"].shape, arrays["weight"].shape
    dtype, (rows, columns) = arrays["array"].dtype, block_sizes(arrays, settings, transpose_in, transpose_out)
    ahead, pieces = fetches_ahead(settings, tokens, rows, transpose_in), ()
    if isinstance(arrays["array"], Pieces):
        if ahead and transpose_in and rows % arrays["array"].run == 0:
            pieces, run = list(arrays["array"].groups), arrays["array"].run
        else:
            arrays = arrays | {"array": arrays["array"].joined()}
    blocks = {
        "array": pl.BlockSpec((None, rows, inputs), lambda b, i, j, layer: (b, i, 0)),
        "weight": pl.BlockSpec((None, columns, total), lambda b, i, j, layer: (layer[0], j, 0)),
        "bias": pl.BlockSpec((1, columns), lambda b, i, j, layer: (0, j)),
        "scale": pl.BlockSpec((1, columns), lambda b, i, j, layer: (0, j)),
        "residual": pl.BlockSpec((None, rows, columns), lambda b, i, j, layer: (b, i, j)),
        "gate": pl.BlockSpec((None, 1, columns), lambda b, i, j, layer: (b, 0, j)),
        "second": pl.BlockSpec((None, rows, total - inputs), lambda b, i, j, layer: (b, i, 0)),
        "cosine": pl.BlockSpec((rows, LANES), lambda b, i, j, layer: (i, 0)),
        "sine": pl.BlockSpec((rows, LANES), lambda b, i, j, layer: (i, 0)),
        "norm": pl.BlockSpec((1, LANES), lambda b, i, j, layer: (0, 0)),
    }
    if target is not None and (target.first % rows or tokens % rows or outputs % columns):
        into = arrays.pop("into", None)
        out = product(arrays, settings, gelu, transpose_in, transpose_out, epsilon)
        return target._replace(into=into, parts=1).put(out)
    first, total_tokens = (0, tokens) if target is None else (target.first // rows, target.total)
    out_shape = batch, total_tokens, outputs
    out_block = pl.BlockSpec((None, rows, columns), lambda b, i, j, layer: (b, first + i, j))
    # Else a loop over blocks of one residual each would copy it. Interpreters cannot, where blocks overhang.
    in_place = "residual" in arrays and (not settings.interpret or tokens % rows == outputs % columns == 0)
    aliased = "into" if "into" in arrays else "residual" if in_place else None
    if transpose_out:
        out_shape = batch, outputs, total_tokens
        out_block = pl.BlockSpec((None, columns, rows), lambda b, i, j, layer: (b, j, first + i))
    arrays = arrays | {name: arrays[name][None] for name in ("bias", "scale", "norm") if name in arrays}
    if "gate" in arrays:
        arrays["gate"] = arrays["gate"][:, None]
    scratch = {}
    if "into" in arrays:
        arrays["into"] = arrays["into"].swapaxes(1, 2) if transpose_out else arrays["into"]
        blocks["into"] = pl.BlockSpec(memory_space=pl.ANY)
    if transpose_in:
        arrays["array"] = pieces or arrays["array"].swapaxes(1, 2)
        blocks["array"] = pl.BlockSpec((None, inputs, rows), lambda b, i, j, layer: (b, 0, i))
        if settings.upright or "scale" in arrays or pieces:
            scratch["upright"] = pltpu.VMEM((rows, inputs), dtype)
    if "scale" in arrays:
        scratch["quantized"] = pltpu.VMEM((rows, inputs), arrays["weight"].dtype)
        scratch["own"] = pltpu.VMEM((rows, 1), jnp.float32)
    names = [name for name in blocks if name in arrays]
    for name in [name for name in TOKENS if ahead and name in names]:
        shape = [size for size in blocks[name].block_shape if size]
        if pieces and name == "array":
            shape = [rows // run, inputs, run]
        scratch[f"{name} ahead"] = pltpu.VMEM((2, *shape), dtype)
        scratch[f"{name} copied"] = pltpu.SemaphoreType.DMA((2,))
        blocks[name] = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), arrays[name])
    kernel = partial(
        product_kernel, names=(*names, "out", *scratch), gelu=gelu, transposed=transpose_out, epsilon=epsilon,
        upright_in=not transpose_in, unrolled=settings.unrolled,
        # As many heads as fill the MXU; each alone if some are beyond the outputs, and may be NaN.
        groups=COLUMNS // LANES if outputs % COLUMNS else 1,
    )
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
        input_output_aliases={1 + names.index(aliased) + max(len(pieces) - 1, 0): 0} if aliased else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(*["arbitrary" if ahead else "parallel"] * 2, "arbitrary"),
            vmem_limit_bytes=settings.vmem_mib * 2**20,
        ),
        interpret=settings.interpret,
        name="product_kernel",
    )(arrays["layer"].reshape(1), *(arrays[name] for name in names))
    return out.swapaxes(1, 2) if transpose_out else out


def block_sizes(arrays, settings: Products, transpose_in=False, transpose_out=False) -> tuple[int, int]:
    """Rows and columns of a block: its parts, see `parts_of`, are whole tiles of the tokens' layouts; weights have one
    or two bytes."""
    tokens, (_, outputs, inputs) = arrays["array"].shape[1], arrays["weight"].shape
    size = arrays["weight"].dtype.itemsize
    columns = settings.weights_mib * 2**20 // (size * inputs)
    along_lanes = (2 * LANES, 3 * COLUMNS) if transpose_out else (2 * LANES, LANES)
    multiples = along_lanes if transpose_in or transpose_out else (2 * PACKED[size],)
    if isinstance(arrays["array"], Pieces) and arrays["array"].run <= settings.rows:
        multiples = (lcm(2 * LANES, arrays["array"].run),)
    rows = closely(tokens, settings.rows, multiples, THIRDS_COST if transpose_out else 0)
    return rows, closely(outputs, columns, (COLUMNS, 4 * COLUMNS))


def parts_of(rows: int, transpose_out: bool) -> int:
    """How many parts a block's rows are computed in. Halves: more rows at a time would be too much code, fewer would
    leave GELU no product to overlap with. Thirds if these fill the MXU's width where halves do not."""
    return 3 if transpose_out and rows % (2 * COLUMNS) and rows % (3 * COLUMNS) == 0 else 2


def fetches_ahead(settings: Products, tokens: int, rows: int, along_lanes=False) -> bool:
    """Whether the next block of tokens is fetched during all blocks of weights: if also the last consists of whole
    tiles."""
    return settings.ahead and tokens % rows % (LANES if along_lanes else PACKED[2]) == 0


def closely(count: int, most: int, multiples: tuple[int, ...], cost: float = 0) -> int:
    """The size of equal blocks that overhang `count` the least: a multiple of the first of these, or of another that is
    not beyond `most`, if it saves more than this share of `count`."""
    usual, *others = (evenly(count, most, multiple) for multiple in multiples if multiple <= max(most, multiples[0]))
    return min([usual, *others], key=lambda size: -count % size + (size != usual) * cost * count)


def evenly(count: int, most: int, multiple: int) -> int:
    """The size of equal blocks that cover `count`: a multiple of `multiple`, at most `most` (but at least one
    multiple)."""
    parts = pl.cdiv(count, multiple)
    return pl.cdiv(parts, pl.cdiv(parts, max(most // multiple, 1))) * multiple


def product_kernel(layer, *refs, names, gelu, transposed, epsilon, upright_in, groups, unrolled):
    """array (rows, inputs)   weight (columns, inputs)   out (rows, columns)   residual (rows, columns)
    bias, scale, gate (1, columns)   second (rows, the last of the inputs), if array has not all of them
    cosine, sine (rows, 128)   norm (1, 128), of heads of 128 columns

    With transposed, out (columns, rows). Unless upright_in, array (inputs, rows) or, in pieces, (runs, inputs, rows of
    a run); with upright (rows, inputs), it is transposed into that at the first block of weights; with quantized (rows,
    inputs) and own (rows, 1), tokens are quantized into it, with scales in own. What is fetched ahead is given as it
    lies in HBM."""
    given = dict(zip(names, refs))
    given |= {name: fetched(given, name, upright_in or name != "array") for name in TOKENS if f"{name} ahead" in given}
    array, weight, out, upright, quantized = map(given.get, ("array", "weight", "out", "upright", "quantized"))
    if upright is not None:
        pl.when(pl.program_id(2) == 0)(lambda: transpose_tokens(array, upright))
    if quantized is not None:
        source = array if upright is None else upright
        pl.when(pl.program_id(2) == 0)(lambda: quantize_tokens(source, quantized, given["own"]))
    tokens = next(ref for ref in (quantized, upright, array) if ref is not None)
    lying = tokens is array and not upright_in
    size, inputs = reversed(tokens.shape) if lying else tokens.shape
    parts, first = parts_of(size, transposed), slice(inputs)
    part = size // parts

    def along(row):
        return row.T if transposed else row

    @pl.loop(0, parts, unroll=parts if unrolled else 1)
    def one_part(number):
        multiple = LANES if transposed or lying else PACKED[weight.dtype.itemsize]
        rows = pl.ds(pl.multiple_of(number * part, multiple), part)
        for begin in range(0, weight.shape[0], COLUMNS):
            columns = pl.ds(begin, COLUMNS)
            place = (columns, rows) if transposed else (rows, columns)
            some, axis = (tokens[:, rows], 0) if lying else (tokens[rows, :], 1)
            outer = weight[columns, first]
            result = dot(outer, some, (1, axis)) if transposed else dot(some, outer, (axis, 1))
            if "second" in given:
                result += dot(given["second"][rows, :], weight[columns, inputs:])
            if quantized is not None:
                result = result * along(given["own"][rows, :]) * along(given["scale"][:, columns])
            result += along(given["bias"][:, columns].astype(jnp.float32))
            if gelu:
                result = jax.nn.gelu(result, approximate=True)
            if "norm" in given:
                turn = given["norm"][...].astype(jnp.float32), given["cosine"][rows, :], given["sine"][rows, :], epsilon
                heads = [turn_heads(few, *turn) for few in jnp.split(result, groups, axis=1)]
                result = jnp.concatenate(heads, axis=1)
            if "gate" in given:
                result *= given["gate"][:, columns]
            if "residual" in given:
                result += given["residual"][place].astype(jnp.float32)
            out[place] = result.astype(out.dtype)


def fetched(given, name, upright):
    """The block of tokens, which was fetched while the one before was in use; fetching of the next begins."""
    source, blocks, copied = (given[key] for key in (name, f"{name} ahead", f"{name} copied"))
    axis = 1 if upright or isinstance(source, list) else 2
    down, size = pl.num_programs(1), blocks.shape[axis]
    rest = jax.tree.leaves(source)[0].shape[axis] % size  # in the last block
    number = pl.program_id(0) * down + pl.program_id(1)

    def copy(number, act):
        """Start to copy a block, or wait for it."""
        batch, index, into = number // down, number % down, number % 2
        some = pl.multiple_of(index * size, size)

        def part(block, *place):
            act(pltpu.make_async_copy(block, blocks.at[into, *place], copied.at[into]))

        def tokens(count):
            here, there = pl.ds(0, count), pl.ds(some, count)
            if isinstance(source, list):
                pl.loop(0, source[0].shape[0])(lambda device: pieces(device, here, there))
            elif upright:
                part(source.at[batch, there], here)
            else:
                part(source.at[batch, :, there], slice(None), here)

        def pieces(device, here, there):
            begin = device * sum(group.shape[3] for group in source)
            for group in source:
                width = group.shape[3]
                part(group.at[device, there, batch], here, pl.ds(pl.multiple_of(begin, LANES), width))
                begin += width

        if rest:
            pl.when(index == down - 1)(lambda: tokens(rest))
            pl.when(index != down - 1)(lambda: tokens(size))
        else:
            tokens(size)

    @pl.when(pl.program_id(2) == 0)
    def at_the_first_weights():
        pl.when(number == 0)(lambda: copy(number, lambda one: one.start()))
        copy(number, lambda one: one.wait())
        pl.when(number + 1 < pl.num_programs(0) * down)(lambda: copy(number + 1, lambda one: one.start()))

    return blocks.at[number % 2]


def turn_heads(heads, weight, cosine, sine, epsilon):
    """RMS norm and RoPE of (rows, heads of 128). The MXU adds their squares, which leaves the sum in every lane; a mean
    of 128 needs them no more exact than bf16."""
    head, other = (lax.broadcasted_iota(jnp.int32, (heads.shape[1],) * 2, axis) // LANES for axis in range(2))
    squares = dot((heads * heads).astype(jnp.bfloat16), jnp.where(head == other, 1 / LANES, 0).astype(jnp.bfloat16))
    scaled = jnp.split(heads * lax.rsqrt(squares + epsilon), heads.shape[1] // LANES, axis=1)
    lane = lax.broadcasted_iota(jnp.int32, cosine.shape, 1)
    return jnp.concatenate([rotate_pairs(one * weight, lane, cosine, sine) for one in scaled], axis=1)


def transpose_tokens(array, upright):
    """(inputs, rows), or (runs, inputs, rows of a run), into (rows, inputs), by tiles of 128 rows."""
    @pl.loop(0, upright.shape[0] // LANES)
    def one_tile(index):
        first, run = index * LANES, array.shape[-1]
        lying = pl.ds(pl.multiple_of(first % run, LANES), LANES)
        tile = array[:, lying] if len(array.shape) == 2 else array[first // run, :, lying]
        upright[pl.ds(pl.multiple_of(first, LANES), LANES), :] = tile.T


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


def dot(left, right, axes=(1, 1)):
    """The products over these axes, by default left · rightᵀ, accumulated in int32 or float32, as float32."""
    wide = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    over = [(axis,) for axis in axes], ((), ())
    return lax.dot_general(left, right, over, preferred_element_type=wide).astype(jnp.float32)


def outline(inputs, *refs):
    """A stub with the kernel's operands: the program around it compiles to the same code."""
    refs[inputs][...] = jnp.zeros_like(refs[inputs])
