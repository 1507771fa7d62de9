"""Every way of spreading attention over eight devices gives the single device's result."""
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from wan_torchax.config.attention import attention_problems
from wan_torchax.config.schema import Attention
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.parallel import Pieces
from wan_torchax.kernels.product import Linear
from wan_torchax.kernels.settings import Kernel, Parallel, Products, Question, Sparse

QUICK = {"xla_backend_optimization_level": 0}  # each program is compiled once and run once
XLA = Kernel(kernel="xla", block_q=16, block_kv=16)
SPLASH = Kernel(kernel="splash", block_q=128, block_kv=128, tile_kv=128, sub_q=128, chunk_kv=128, interpret=True)
SCHEMES = {  # mesh axes, which of them do what, the collectives that must appear
    "heads": ({"x": 8}, {"heads": "x"}, set()),
    "ulysses": ({"x": 8}, {"ulysses": "x"}, {"all-to-all"}),
    "ring": ({"x": 8}, {"ring": "x"}, {"collective-permute"}),
    "ulysses_ring": ({"u": 4, "r": 2}, {"ulysses": "u", "ring": "r"}, {"all-to-all", "collective-permute"}),
    "batch_ulysses_ring": (
        {"d": 2, "u": 2, "r": 2}, {"batch": "d", "ulysses": "u", "ring": "r"}, {"all-to-all", "collective-permute"},
    ),
    "heads_ulysses": ({"h": 2, "u": 4}, {"heads": "h", "ulysses": "u"}, {"all-to-all"}),
    "heads_ring": ({"h": 2, "r": 4}, {"heads": "h", "ring": "r"}, {"collective-permute"}),
}


HEADS = 8


def inputs(queries, keys, head_dim=16, dtype=jnp.float32):
    generator = np.random.default_rng(queries)
    shapes = [(2, tokens, HEADS * head_dim) for tokens in (queries, keys, keys)]
    return [jnp.asarray(generator.normal(0.5, 1, shape), dtype) for shape in shapes]


def attend(arrays, kernel, **settings):
    return Attend(arrays[0].shape[2] // HEADS, kernel, **settings)(*arrays)


def make_mesh(axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def alone(arrays, kernel=XLA):
    """The same on one device."""
    return jax.jit(lambda *arrays: attend(arrays, kernel), compiler_options=QUICK)(*arrays)


def compiled(scheme, arrays, kernel, cross=False):
    axes, named, _ = SCHEMES[scheme]
    spread = dict(parallel=Parallel(**named), mesh=make_mesh(axes), cross=cross)
    return jax.jit(lambda *arrays: attend(arrays, kernel, **spread), compiler_options=QUICK).lower(*arrays).compile()


# 41 tokens divide over nothing, 64 over everything, and 5 leave devices without any.
OTHERS = [("ulysses_ring", 64), ("ring", 64), ("ring", 5), ("ulysses", 5)]


@pytest.mark.parametrize("scheme, tokens", [*((scheme, 41) for scheme in SCHEMES), *OTHERS])
def test_scheme_equals_one_device(scheme, tokens):
    arrays = inputs(tokens, tokens)
    program = compiled(scheme, arrays, XLA)
    np.testing.assert_allclose(program(*arrays), alone(arrays), atol=2e-6)
    sent = set(re.findall(r" (all-to-all|all-reduce|collective-permute)\(", program.as_text()))
    assert sent == SCHEMES[scheme][2]


@pytest.mark.parametrize("scheme", ["heads_ulysses", "batch_ulysses_ring"])
def test_cross_attention_exchanges_nothing(scheme):
    arrays = inputs(41, 9)
    program = compiled(scheme, arrays, XLA, cross=True)
    np.testing.assert_allclose(program(*arrays), alone(arrays), atol=2e-6)
    assert "all-to-all" not in program.as_text() and "collective-permute" not in program.as_text()


@pytest.mark.parametrize("scheme", ["ulysses", "heads_ring"])
def test_splash_inside_a_scheme(scheme):
    arrays = inputs(300, 300, head_dim=64, dtype=jnp.bfloat16)
    out = compiled(scheme, arrays, SPLASH)(*arrays)
    exact = alone([x.astype(jnp.float32) for x in arrays])
    assert np.linalg.norm(np.asarray(out, np.float32) - exact) / np.linalg.norm(exact) < 5e-3


def test_smooth_keys_takes_the_mean_over_all_devices():
    """A mean over each device's own keys would shift the scores of the ring's parts against each other."""
    query, key, value = inputs(48, 48)
    key = key + 3 * jnp.arange(48)[None, :, None] / 48
    smoothed = compiled("ring", (query, key, value), replace(XLA, smooth_keys=True))(query, key, value)
    np.testing.assert_allclose(smoothed, alone((query, key, value)), atol=1e-5)


SLA = Kernel(
    kernel="splash", block_q=512, block_kv=256, tile_kv=256, sub_q=256, chunk_kv=256, interpret=True,
    sparse=Sparse("sla", 0.5, 256, 128),
)


@pytest.mark.parametrize("kernel, head_dim, tokens, groups", [
    pytest.param(XLA, 16, 41, (1, 2), id="plain JAX"),
    pytest.param(SPLASH, 128, 256, (1, 1, 1), id="one array of queries and keys"),
    pytest.param(SPLASH, 64, 300, (2, 1), id="half a tile's lanes", marks=pytest.mark.system),
    pytest.param(SLA, 128, 600, (1, 2), id="lists", marks=pytest.mark.system),
])
def test_heads_in_groups_give_the_same(kernel, head_dim, tokens, groups):
    """Six heads on two devices, norms and RoPE as a model has them."""
    generator, width, listed = np.random.default_rng(tokens), 6 * head_dim, kernel.sparse.kind == "sla"
    arrays = [jnp.asarray(generator.normal(0.5, 1, (1, tokens, width)), jnp.bfloat16) for _ in range(3)]
    rotary = [jnp.float32(np.repeat(generator.normal(size=(tokens, head_dim // 2)), 2, axis=1)) for _ in range(2)]
    more = dict(rotary=rotary, norms=[jnp.asarray(generator.normal(1, 0.1, width), jnp.bfloat16) for _ in range(2)])
    more["branch"] = [jnp.ones((head_dim, head_dim), jnp.bfloat16), jnp.ones(head_dim, jnp.bfloat16)] if listed else ()
    placed = Parallel(ulysses="u"), jax.sharding.Mesh(np.array(jax.devices()[:2]), ("u",))
    whole = Attend(head_dim, kernel, *placed, norm_epsilon=1e-6)
    divided = replace(whole, parallel=replace(whole.parallel, groups=groups))
    programs = [jax.jit(partial(one.counted, **more), compiler_options=QUICK) for one in (whole, divided)]
    programs = [program.lower(*arrays).compile() for program in programs]
    (expected, lost), (out, rescued) = (program(*arrays) for program in programs)
    off = np.abs(np.float32(out) - np.float32(expected))  # where RoPE was rounded the other way in the last bit
    assert off.max() < 0.02 and (off > 0).mean() < 1e-3
    np.testing.assert_array_equal(rescued if lost is not None else (), () if lost is None else lost)
    sent = [len(re.findall(r" all-to-all\(", program.as_text())) for program in programs]
    assert sent == [4, 1 + 2 * len(groups)]


@pytest.mark.parametrize("tokens, rows, in_pieces", [
    (1536, 256, True),  # three runs of tokens a device, the second block of which is not full
    pytest.param(1536, 192, True, marks=pytest.mark.system),  # a block of the layer is no whole number of runs
    pytest.param(1500, 256, False, marks=pytest.mark.system),  # runs would cross the devices' borders
])
def test_a_layer_puts_attention_s_pieces_together(tokens, rows, in_pieces):
    """Four prompts, two on each pair of devices, six heads in groups of one and two of each device."""
    generator, width = np.random.default_rng(tokens), 6 * 128
    arrays = [jnp.asarray(generator.normal(0.5, 1, (4, tokens, width)), jnp.bfloat16) for _ in range(3)]
    weight, bias, residual, gate = (
        jnp.asarray(generator.normal(0, 0.1, shape), jnp.bfloat16)
        for shape in ((3, 256, width), (256,), (4, tokens, 256), (4, 256))
    )
    mesh, kernel = make_mesh({"d": 2, "u": 2}), replace(SPLASH, block_q=512, block_kv=2048, sub_q=256)
    whole = Attend(128, kernel, Parallel(batch="d", ulysses="u"), mesh, keys=tokens - 36)
    divided = replace(whole, parallel=replace(whole.parallel, groups=(1, 2)))
    layer = Linear(
        Products(kernel="pallas", rows=rows, weights_mib=1, ahead=True, interpret=True),
        NamedSharding(mesh, PartitionSpec("d", "u")),
    )

    def after(attend, **asked):
        out, rescued = attend.counted(*arrays, **asked)
        return out, layer(out, weight, bias, 1, residual=residual, gate=gate, transpose_in=True), rescued

    out, result, rescued = jax.jit(partial(after, divided, in_pieces=True))()
    assert isinstance(out, Pieces) == in_pieces and out.shape == (4, tokens, width)
    expected, expected_result, lost = jax.jit(partial(after, whole))()
    np.testing.assert_array_equal(out.joined() if in_pieces else out, expected)
    np.testing.assert_array_equal(result, expected_result)
    np.testing.assert_array_equal(rescued, lost)


@pytest.mark.parametrize("told, options", [
    ("by ulysses (sharding=sequence, tokens), and without a ring; set groups=[]", dict(axes={"sp": 4}, ring="sp")),
    ("a device's 10 heads do not divide into 4 (sums that divide them: 2, 5, 10)", dict(groups=(1, 3))),
    ("relative sizes, from 1 on, e.g. [1, 8, 1]", dict(groups=(0, 1))),
    ("before the mean is known that attention.self.smooth_keys=true subtracts", dict(smooth_keys=True)),
])
def test_groups_that_cannot_be_are_refused(told, options):
    named = {"ulysses": None if "ring" in options else "sp", "groups": (2, 7, 1), "axes": {"sp": 4}} | options
    [problem] = problems(40, **named)
    assert problem.startswith("sharding.attention.groups=[") and told in problem


def test_a_window_survives_ulysses():
    arrays, kernel = inputs(41, 41), replace(XLA, window=6)
    np.testing.assert_allclose(compiled("ulysses", arrays, kernel)(*arrays), alone(arrays, kernel), atol=2e-6)


def problems(head_count, axes, window=None, smooth_keys=False, **named):
    attention = Attention(self=replace(XLA, window=window, smooth_keys=smooth_keys), cross=XLA)
    asked = {"self": Question(head_count, 128, (21, 45, 80)), "cross": Question(head_count, 128)}
    return list(attention_problems(attention, asked, axes, Parallel(**named)))


def test_heads_that_do_not_divide_are_refused_with_what_works():
    [problem] = problems(12, {"sp": 8}, ulysses="sp")
    assert "12 heads do not divide over 8 devices; sizes that work: 1, 2, 3, 4, 6, 12" in problem
    assert "axes of 4 for ulysses and 2 for ring" in problem
    assert problems(12, {"sp": 4, "r": 2}, ulysses="sp", ring="r") == []
    assert problems(12, {"sp": 8}, ring="sp") == []


def test_heads_over_two_axes_count_together():
    [problem] = problems(40, {"tp": 4, "sp": 4}, heads="tp", ulysses="sp")
    assert "40 heads do not divide over 16 devices" in problem


def test_one_axis_cannot_do_two_things():
    assert any("sp is named twice" in problem for problem in problems(40, {"sp": 4}, ulysses="sp", ring="sp"))


def test_a_window_in_a_ring_is_refused():
    assert any("use ulysses or heads" in problem for problem in problems(40, {"sp": 4}, window=100, ring="sp"))
