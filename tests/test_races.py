"""Every Pallas kernel for TPU in JAX's TPU interpret mode: no data race, no uninitialized read, nothing out of bounds.

There memory starts as NaN, a block beyond its array raises, grid points of parallel dimensions run in random order, and
copies happen when they are waited for. The tests at the end plant a fault of each kind in these kernels. The
interpreter cannot run a last block of queries that overhangs a result it updates in place: here it does one or the
other.
"""
from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_torchax.kernels import lanes, quantized, rotary, sparse, splash, splash_lists
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.norm import Norm
from wan_torchax.kernels.parallel import Pieces
from wan_torchax.kernels.product import Linear, Target
from wan_torchax.kernels.settings import Kernel, Parallel, Products, Sparse

pytestmark = pytest.mark.system

QUICK = {"xla_backend_optimization_level": 0}
CHECKED = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", random_seed=7
)
CORES = next(field.name for field in fields(CHECKED) if field.name in ("num_cores_or_threads", "num_cores_per_device"))
TWO_CORES = replace(CHECKED, **{CORES: 2})  # a v5p chip: parallel grid points run on both
SPLASH = Kernel(
    kernel="splash", block_q=256, block_kv=256, tile_kv=128, sub_q=128, chunk_kv=128, interpret=CHECKED
)
PRODUCTS = Products(kernel="pallas", rows=64, weights_mib=1, interpret=CHECKED)


def draw(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(0.5, 1, shape), dtype)


def relative_error(out, truth):
    out, truth = (np.asarray(array, np.float64) for array in (out, truth))
    return np.linalg.norm(out - truth) / np.linalg.norm(truth)  # NaN, which is below nothing, if a value is


@pytest.fixture
def checked(capsys):
    """Runs a function in the interpreter and fails if it reports a race."""
    pltpu.reset_tpu_interpret_mode_state()

    def run(function, *arrays):
        anew = jax.jit(lambda *arrays: function(*arrays), compiler_options=QUICK)  # a fault may have been planted since
        out = jax.block_until_ready(anew(*arrays))
        assert "RACE DETECTED" not in capsys.readouterr().out
        return out

    yield run
    pltpu.reset_tpu_interpret_mode_state()


def attention_error(checked, kernel, queries, keys, head_dim=128, scale=1, **placed):
    query, key, value = (draw(1, n, 128, seed=n) for n in (queries, keys, keys))
    query = query * scale
    out = checked(Attend(head_dim, kernel, **placed), query, key, value)
    truth = splash.reference(*(array.astype(jnp.float32) for array in (query, key, value)), head_dim, kernel.window)
    return relative_error(out, truth)


@pytest.mark.parametrize("queries, keys, head_dim, options", [
    pytest.param(384, 300, 128, {"interpret": TWO_CORES}, id="a last block in place, two cores"),
    pytest.param(100, 129, 64, {}, id="overhanging, two heads folded into the batch"),
    pytest.param(300, 300, 128, {"window": 20, "block_q": 384}, id="window, the exact kernel"),
])
def test_attention(checked, queries, keys, head_dim, options):
    assert attention_error(checked, replace(SPLASH, **options), queries, keys, head_dim) < 4e-3


def test_attention_that_recomputes_lost_rows(checked):
    """Scores that rise by more than 2**100 within a tile."""
    query, key, value = jnp.abs(draw(1, 128, 128)) + 1, jnp.linspace(0, 60, 300)[None, :, None], draw(1, 300, 128)
    key = jnp.broadcast_to(key, (1, 300, 128)).astype(jnp.bfloat16)
    out, rescued = checked(Attend(128, SPLASH).counted, query, key, value)
    truth = splash.reference(*(array.astype(jnp.float32) for array in (query, key, value)), 128)
    assert rescued.sum() > 0 and relative_error(out, truth) < 4e-3


@pytest.mark.parametrize("scale, vmem_mib", [(1, 1), (60, 64)])
def test_attention_to_lists(checked, scale, vmem_mib):
    """The last block is partial, the lists have an odd length, and at the larger scale rows are lost. In little memory,
    the next head's keys wait until this one's are no longer needed."""
    query, key, value = (draw(1, 600, 256, seed=seed) for seed in range(3))
    kernel = replace(SPLASH, block_q=512, chunk_kv=256, vmem_mib=vmem_mib, interpret=TWO_CORES)
    query = query * scale
    blocks = sparse.Blocks.even(600, 256), sparse.Blocks.even(600, 128)
    chosen = sparse.top(sparse.sla_scores(query, key, *blocks, 128), 3)
    out, rescued = checked(lambda *x: splash_lists.attention(*x, *blocks, 128, kernel), query, key, value.mT, chosen)
    truth = sparse.listed(*(array.astype(jnp.float32) for array in (query, key, value)), chosen, *blocks, 128)
    assert relative_error(out.mT, truth) < 4e-3 and (rescued > 0) == (scale > 1)


def test_sla_and_its_pass_over_the_keys(checked):
    """Two steps of the pass, the last one partial."""
    arrays = [draw(1, 2200, 128, seed=seed) for seed in range(3)]
    branch = draw(128, 128, seed=3), draw(128, seed=4)
    settings = Sparse("sla", 0.3, 256, 128)
    kernel = replace(SPLASH, block_q=512, chunk_kv=256, sparse=settings, interpret=TWO_CORES)
    out, _ = checked(lambda *x: splash_lists.sla(*x[:2], x[2].mT, 2200, *x[3:], 128, kernel), *arrays, *branch)
    plain = Attend(128, Kernel(kernel="xla", sparse=settings))
    truth, _ = plain.counted(*(array.astype(jnp.float32) for array in arrays), branch=branch)
    assert relative_error(out.mT, truth) < 8e-3


@pytest.mark.parametrize("options, small, settings", [
    ({"gelu": True}, None, replace(PRODUCTS, interpret=TWO_CORES)),
    ({"transpose_in": True, "residual": True, "gate": True}, None, PRODUCTS),
    ({"transpose_in": True, "residual": True}, None, replace(PRODUCTS, upright=False, unrolled=True)),
    ({"transpose_out": True}, "int8", PRODUCTS),
    ({"residual": True, "transpose_in": True}, "float8_e4m3fn", PRODUCTS),
])
def test_linear_layers(checked, options, small, settings):
    array, weight, bias = draw(2, 77, 256), draw(2, 300, 256, seed=1), draw(300)
    given = {"residual": draw(2, 77, 300, seed=2), "gate": draw(2, 300, dtype=jnp.float32)}
    how = options | {name: given[name] for name in given if name in options}
    plain = {"scale": None, "weight": weight[1]}
    if small:
        weight, scale = quantized.quantize(weight, small)
        how["scale"], plain = scale[1], {"scale": scale[1], "weight": weight[1]}
    out = checked(partial(Linear(settings), **how), array, weight, bias, jnp.int32(1))
    truth = linear(array, bias, plain["weight"], plain["scale"])
    truth = jax.nn.gelu(truth, approximate=True) if "gelu" in how else truth
    truth = truth * (how["gate"][:, None] if "gate" in how else 1)
    assert relative_error(out, truth + how.get("residual", 0)) < 5e-3


@pytest.mark.parametrize("tokens, upright", [(384, True), (300, True), (640, True), (512, False)])
def test_linear_layers_that_fetch_the_next_tokens_ahead(checked, tokens, upright):
    """Of two arrays, the first transposed. With 640 tokens the last block is not full; with 300 it is not even of whole
    tiles, and none is fetched ahead."""
    settings = replace(PRODUCTS, rows=256 if tokens == 640 else 128, ahead=True, upright=upright, unrolled=not upright)
    array, second, weight, bias = draw(2, tokens, 128), draw(2, tokens, 256), draw(2, 512, 384, seed=1), draw(512)
    residual = draw(2, tokens, 512, seed=2)
    layer = partial(Linear(settings), transpose_in=True)
    out = checked(lambda *x: layer(x[:2], *x[2:4], 1, residual=x[4]), array, second, weight, bias, residual)
    wide = (one.astype(jnp.float32) for one in (array, second))
    truth = linear(jnp.concatenate(list(wide), axis=2), bias, weight[1], None)
    assert relative_error(out, truth + residual) < 5e-3


def test_linear_layers_that_put_pieces_together(checked):
    """Of two groups of heads of two devices, in three runs of tokens: the second block has one."""
    groups = tuple(draw(2, 3, 2, width, 128, seed=width) for width in (128, 256))
    pieces, weight, bias = Pieces(groups), draw(2, 256, 768), draw(256)
    layer = Linear(replace(PRODUCTS, rows=256, ahead=True))
    out = checked(lambda *groups: layer(Pieces(groups), weight, bias, 1, transpose_in=True), *groups)
    assert relative_error(out, linear(pieces.joined(), bias, weight[1], None)) < 5e-3


@pytest.mark.parametrize("outputs, settings", [
    (384, replace(PRODUCTS, interpret=TWO_CORES)), (512, replace(PRODUCTS, ahead=True)),
])
def test_linear_layers_with_norm_and_rotation(checked, outputs, settings):
    """Three heads, of which two fill the MXU, and four."""
    array, weight, bias = draw(2, 77, 256), draw(outputs, 256, seed=1), draw(outputs)
    angles = draw(77, 128, dtype=jnp.float32)
    turn = rotary.Turn(draw(128, seed=3), jnp.cos(angles), jnp.sin(angles), 1e-6)
    out = checked(lambda *x: Linear(settings)(*x, turn=turn), array, weight, bias)
    assert relative_error(out, turn.plain(linear(array, bias, weight, None))) < 5e-3


@pytest.mark.parametrize("tokens, options", [
    ((256, 128), {}), ((256, 256), {"transpose_out": True}), ((300, 77), {"transpose_out": True}),
])
def test_linear_layers_that_write_into_one_array(checked, tokens, options):
    """Two layers' tokens, in blocks of their own or, where they do not divide into blocks, put beside each other."""
    layer = partial(Linear(replace(PRODUCTS, rows=128, ahead=True)), **options)
    arrays, weights = [draw(2, count, 256, seed=count) for count in tokens], draw(2, 256, 256, seed=1)
    target, bias = Target(0, sum(tokens), 1), draw(256)

    def both(first, second):
        made = layer(first, weights, bias, 0, target=target)
        return layer(second, weights, bias, 1, target=target._replace(first=tokens[0], into=made))

    truth = [linear(array, bias, weight, None) for array, weight in zip(arrays, weights)]
    assert relative_error(checked(both, *arrays), jnp.concatenate(truth, axis=1)) < 5e-3


def linear(array, bias, weight, scale):
    wide = [one.astype(jnp.float32) for one in (array, weight, bias)]
    if scale is None:
        return wide[0] @ wide[1].T + wide[2]
    return quantized.linear(wide[0], weight, scale, wide[2], activations=True)


@pytest.mark.parametrize("tokens, channels, centred, mode", [(600, 256, True, TWO_CORES), (7, 96, False, CHECKED)])
def test_norms(checked, tokens, channels, centred, mode):
    array, scale = draw(2, tokens, channels), draw(2, channels, dtype=jnp.float32)
    out = checked(Norm(replace(PRODUCTS, interpret=mode)), array, scale, scale if centred else None)
    truth = array.astype(jnp.float32)
    truth -= truth.mean(axis=2, keepdims=True) if centred else 0
    truth *= jax.lax.rsqrt((truth**2).mean(axis=2, keepdims=True) + 1e-6) * scale[:, None]
    assert relative_error(out, truth + (scale[:, None] if centred else 0)) < 4e-3


@pytest.mark.parametrize("tokens, head_dim, parts, weights", [(300, 128, 2, 512), (19, 64, 1, 64)])
def test_rotation(checked, tokens, head_dim, parts, weights):
    angles = np.repeat(np.linspace(0, 6, tokens * head_dim // 2).reshape(tokens, -1), 2, axis=1)
    tables, norm = [jnp.float32(table(angles)) for table in (np.cos, np.sin)], (draw(weights), 0.1)
    array, kernel = draw(1, tokens, 512), replace(SPLASH, interpret=TWO_CORES)
    out = checked(lambda array: rotary.rotate(array, *tables, head_dim, kernel, parts, norm), array)
    truth = rotary.rotate_plain(array.astype(jnp.float32), *tables, norm)
    assert relative_error(jnp.concatenate(out, axis=2), truth) < 4e-3


def test_rotation_of_queries_and_keys_in_groups(checked):
    angles = np.repeat(np.linspace(0, 6, 300 * 64).reshape(300, -1), 2, axis=1)
    tables = [jnp.float32(table(angles)) for table in (np.cos, np.sin)]
    norms = [(draw(768, seed=n), 0.1) for n in (1, 2)]
    arrays, kernel = [draw(1, 300, 768, seed=n) for n in (3, 4)], replace(SPLASH, interpret=TWO_CORES)
    groups = checked(lambda *x: rotary.rotate_both(*x, tables, 128, kernel, 2, [1, 2], norms), *arrays)
    wide = (array.astype(jnp.float32) for array in arrays)
    truth = rotary.rotate_both(*wide, tables, 128, Kernel(), 2, [1, 2], norms)
    assert all(relative_error(one, other) < 4e-3 for one, other in zip(groups, truth))


def stack_and_join(*groups):
    kernel = replace(SPLASH, interpret=TWO_CORES)
    return lanes.stack(groups, kernel), lanes.join(groups[1], kernel, 128, 128)


def test_copies_of_groups(checked):
    groups = [draw(2, 1, rows, 256, seed=rows) for rows in (128, 384)]
    stacked, joined = checked(stack_and_join, *groups)
    rows = jnp.concatenate(groups, axis=2)
    np.testing.assert_array_equal(stacked[0], jnp.concatenate([rows[0, 0], rows[1, 0]]))
    np.testing.assert_array_equal(joined[0], jnp.concatenate([groups[1][0, 0, 128:256], groups[1][1, 0, 128:256]], 1))


def copy_there_and_back(array):
    return lanes.join(lanes.cut(array, 2, replace(SPLASH, interpret=TWO_CORES)), SPLASH)


def test_copies(checked):
    array = draw(1, 200, 512)
    np.testing.assert_array_equal(checked(copy_there_and_back, array), array)


def test_attention_in_groups(checked):
    """Values in parts, and the output in pieces."""
    mesh = jax.make_mesh((2,), ("u",), axis_types=(jax.sharding.AxisType.Auto,))
    attend = Attend(128, replace(SPLASH, block_kv=512), Parallel(ulysses="u", groups=(1, 1)), mesh, keys=500)
    arrays = [draw(1, 512, 512, seed=seed) for seed in range(3)]
    out, _ = checked(partial(attend.counted, in_pieces=True), *arrays)
    query, key, value = (array.astype(jnp.float32) for array in arrays)
    truth = splash.reference(query, key[:, :500], value[:, :500], 128)
    assert isinstance(out, Pieces) and relative_error(out.joined(), truth) < 4e-3


@pytest.mark.parametrize("axes, parallel", [
    ({"r": 2}, Parallel(ring="r")),
    ({"u": 2, "r": 4}, Parallel(ulysses="u", ring="r")),
], ids=["two", "eight"])
def test_attention_over_devices(checked, axes, parallel):
    """With an all-to-all and a ring around the kernels; the last devices hold padding."""
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    kernel = replace(SPLASH, block_q=128, block_kv=128)
    assert attention_error(checked, kernel, 250, 250, 64, parallel=parallel, mesh=mesh) < 4e-3


# ---------------------------------------------------------------- planted faults


def test_a_race_is_found(checked, monkeypatch):
    """Both parts are written to the same place, by two cores."""
    monkeypatch.setattr(lanes, "part", lambda share, first=0: pl.BlockSpec(
        (None, None, lanes.ROWS, share), lambda b, p, i: (0, b, first + i, 0)
    ))
    with pytest.raises(AssertionError, match="RACE DETECTED"):
        checked(copy_there_and_back, draw(1, 200, 512))


def test_a_read_of_uninitialized_memory_is_found(checked, monkeypatch):
    monkeypatch.setattr(splash, "keep_query", lambda query, query_t, kernel: None)
    assert np.isnan(attention_error(checked, replace(SPLASH, window=20), 100, 100))


def test_a_read_out_of_bounds_is_found(checked, monkeypatch):
    monkeypatch.setattr(lanes, "whole", lambda share: pl.BlockSpec(
        (None, lanes.ROWS, share), lambda b, p, i: (b, i, p + 1)
    ))
    with pytest.raises(jax.errors.JaxRuntimeError, match="[Oo]ut-of-bounds"):
        checked(copy_there_and_back, draw(1, 200, 512))
