"""Every way of spreading attention over eight devices gives the single device's result."""
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wan_torchax.config.attention import attention_problems
from wan_torchax.config.schema import Attention
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import Kernel, Parallel, Question

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


def test_a_window_survives_ulysses():
    arrays, kernel = inputs(41, 41), replace(XLA, window=6)
    np.testing.assert_allclose(compiled("ulysses", arrays, kernel)(*arrays), alone(arrays, kernel), atol=2e-6)


def problems(head_count, axes, window=None, **named):
    attention = Attention(self=replace(XLA, window=window), cross=XLA)
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
