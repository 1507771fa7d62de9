"""Attention with tokens beside those that are spread: merged exactly, as many as count in each row, on every layout."""
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import make_config
from tests.test_parallel import HEADS, QUICK, SCHEMES, SPLASH, XLA, make_mesh
from wan_torchax.config.attention import unserved
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels import rotary
from wan_torchax.kernels.attention import Attend, Beside, Kept, OfFrames
from wan_torchax.kernels.settings import Kernel, Parallel, Question


def make(tokens, others, counts, head_dim=16, dtype=jnp.float32):
    """Queries, keys and values of a video, then of a text."""
    generator = np.random.default_rng(tokens)

    def arrays(length):
        return [jnp.asarray(generator.normal(0.3, 1, (2, length, HEADS * head_dim)), dtype) for _ in range(3)]

    return arrays(tokens), Beside(*arrays(others), jnp.asarray(counts, jnp.int32))


def expected(video, beside, head_dim):
    """In float64, with a mask."""
    query, key, value = (
        np.concatenate([np.asarray(one, np.float64), np.asarray(two, np.float64)], axis=1)
        for one, two in zip(video, beside[:3])
    )
    split = [x.reshape(*x.shape[:2], -1, head_dim) for x in (query, key, value)]
    scores = np.einsum("bqhd,bkhd->bhqk", *split[:2]) * head_dim**-0.5
    seen = np.arange(key.shape[1])[None] < video[0].shape[1] + np.asarray(beside.count)[:, None]
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), split[2]).reshape(query.shape)
    return np.split(out, [video[0].shape[1]], axis=1)


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_what_stands_beside_is_merged_as_far_as_it_counts(scheme):
    placed = {}
    if scheme is not None:
        axes, named, _ = SCHEMES[scheme]
        placed = dict(parallel=Parallel(**named), mesh=make_mesh(axes))
    attend = Attend(16, XLA, **placed)
    program = jax.jit(lambda *x: attend.counted(*x[:3], beside=x[3]), compiler_options=QUICK)
    for counts in ((5, 9), (0, 1), (9, 9)):
        video, beside = make(41, 9, counts)
        outs, _ = program(*video, beside)
        for out, exact in zip(outs, expected(video, beside, 16)):
            np.testing.assert_allclose(out, exact, atol=2e-6, err_msg=str(counts))


@pytest.mark.system
@pytest.mark.parametrize("scheme", [None, pytest.param("ulysses", marks=pytest.mark.full), "heads_ring"])
def test_the_tpus_kernel_goes_on_from_what_stands_beside(scheme):
    video, beside = make(300, 40, (7, 40), 64, jnp.bfloat16)
    placed = {}
    if scheme is not None:
        axes, named, _ = SCHEMES[scheme]
        placed = dict(parallel=Parallel(**named), mesh=make_mesh(axes))
    attend = Attend(64, SPLASH, **placed)
    outs, rescued = jax.jit(lambda *x: attend.counted(*x[:3], beside=x[3]), compiler_options=QUICK)(*video, beside)
    assert not rescued.any()
    for out, exact in zip(outs, expected(video, beside, 64)):
        assert np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact) < 5e-3


@pytest.mark.system
@pytest.mark.parametrize("counts, scale, level", [
    ((0, 1), 1, 0), pytest.param((1, 300), -4, 0, marks=pytest.mark.full),
    pytest.param((3, 299), 2, 0, marks=pytest.mark.full), ((2, 40), 1, 2),
])
def test_keys_that_do_not_count_leave_no_trace_in_the_tpus_kernel(counts, scale, level):
    """None of 300, or one that matters little, or few that matter; or all scores far below zero: what is subtracted
    again may be most of the sum."""
    (query, key, value), beside = make(200, 300, counts, 64, jnp.bfloat16)
    video = query + level, key - level, value
    beside = beside._replace(query=beside.query + level, key=beside.key - level)
    beside = beside._replace(key=beside.key * scale, value=beside.value.at[:, max(counts):].set(1e3))
    attend = Attend(64, SPLASH)
    outs, _ = jax.jit(lambda *x: attend.counted(*x[:3], beside=x[3]), compiler_options=QUICK)(*video, beside)
    for out, exact in zip(outs, expected(video, beside, 64)):
        assert np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact) < 5e-3


@pytest.mark.parametrize("kernel", [Kernel(kernel="xla"), Kernel(kernel="splash", interpret=True)],
                         ids=["xla", "splash"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_are_normalised_one_by_one_before_rope(kernel, head_dim):
    generator = np.random.default_rng(0)
    array = jnp.asarray(generator.normal(1, 1, (2, 50, 4 * head_dim)), jnp.float32)
    tables = [jnp.ones((50, head_dim)), jnp.zeros((50, head_dim))]
    weight = jnp.linspace(0.5, 2, head_dim)
    out = rotary.rotate(array, *tables, head_dim, kernel, parts=2, norm=(weight, 0.1))
    heads = np.asarray(array, np.float64).reshape(2, 50, 4, head_dim)
    normed = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 0.1) * np.asarray(weight, np.float64)
    np.testing.assert_allclose(jnp.concatenate(out, axis=2), normed.reshape(array.shape), atol=1e-5)


def test_a_norm_over_all_heads_is_over_those_of_other_devices_too():
    generator = np.random.default_rng(0)
    query, key, value = (jnp.asarray(generator.normal(0, 1, (2, 24, 128)), jnp.float32) for _ in range(3))
    tables, norms = [jnp.ones((24, 16)), jnp.zeros((24, 16))], [jnp.linspace(0.5, 2, 128), jnp.linspace(2, 1, 128)]
    spread = dict(parallel=Parallel(heads="x"), mesh=make_mesh({"x": 8}))
    one, eight = (
        jax.jit(Attend(16, XLA, norm_epsilon=0.1, **placed), compiler_options=QUICK)(query, key, value, tables, norms)
        for placed in ({}, spread)
    )
    np.testing.assert_allclose(eight, one, atol=1e-5)


def test_what_a_kernel_cannot_do_is_refused_before_anything_loads():
    alone, together = Question(8, 128), Question(8, 128, (1, 2, 3), "head", beside=9)
    for change in ({"window": 5}, {"smooth_keys": True}):
        assert not list(unserved(replace(XLA, **change), alone)) and list(unserved(replace(XLA, **change), together))
    hopper = Kernel(kernel="hopper", block_q=128, block_kv=128, eight_bits=True)
    assert not list(unserved(hopper, alone)) and "eight_bits" in next(unserved(hopper, together))
    with pytest.raises(ConfigError, match="attention.self.kernel=splash: serves head dims 64 and 128"):
        validate(make_config("attention=splash_v6e"))


# ---------------------------------------------------------------- chunk by chunk


@pytest.mark.parametrize("kernel, scheme", [
    (XLA, "ulysses"), pytest.param(SPLASH, "ulysses", marks=pytest.mark.system),
    pytest.param(SPLASH, None, marks=pytest.mark.full),
], ids=["xla on eight", "splash on eight", "splash"])
def test_chunks_see_what_is_kept_whatever_the_kernel(kernel, scheme):
    """Four chunks of 40 tokens in three slots: the last overwrites the second, in the second of two layers."""
    axes, named, _ = SCHEMES[scheme] if scheme else ({"x": 1}, {}, None)
    placed = dict(parallel=Parallel(**named), mesh=make_mesh(axes))
    attend = Attend(64, kernel, keys=40, fillings=(40, 80, 120), **placed)
    generator, dtype = np.random.default_rng(0), jnp.bfloat16 if kernel is SPLASH else jnp.float32
    chunks = [[jnp.asarray(generator.normal(0, 1, (1, 40, 8 * 64)), dtype) for _ in range(3)] for _ in range(4)]
    empty = jnp.zeros((2, 1, 120, 8 * 64), dtype)
    run = jax.jit(lambda tokens, kept: attend.chunk(*tokens, (), (), kept), compiler_options=QUICK)
    turned = jnp.zeros((2, 1, 8 * 64, 128), dtype) if kernel.turns_values else empty
    kept = Kept(empty, turned, jnp.int32(1), jnp.int32(0), jnp.int32(0))
    for number, seen in enumerate(([0], [0, 1], [0, 1, 2], [0, 3, 2])):
        place = kept._replace(start=jnp.int32(40 * [0, 1, 2, 1][number]), filling=jnp.int32(min(number, 2)))
        out, _, kept = run(chunks[number], place)
        key, value = (jnp.concatenate([chunks[one][part] for one in seen], axis=1) for part in (1, 2))
        exact = softmax(*(np.asarray(array, np.float64) for array in (chunks[number][0], key, value)), 64)
        assert np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact) < 5e-3
    assert not kept.key[0].any() and kept.key[1].any(), "only its own layer's"


def softmax(query, key, value, head_dim):
    """Attention in float64."""
    query, key, value = (array[0].reshape(len(array[0]), -1, head_dim) for array in (query, key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(head_dim)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)
    return out.reshape(1, len(query), -1)


WITHOUT_RING = [name for name in SCHEMES if "ring" not in name]


@pytest.mark.parametrize("kernel, scheme", [
    (XLA, None), *[(XLA, name) for name in WITHOUT_RING],
    pytest.param(SPLASH, "ulysses", marks=pytest.mark.system),
])
def test_a_frame_attends_to_its_own_of_another_video(kernel, scheme):
    """All of the video, and of the other one its frame: in float64, with a mask. The video's tokens are padded."""
    placed, head_dim, grid = {}, 16 if kernel is XLA else 128, (4, 3, 5)
    if scheme is not None:
        axes, named, _ = SCHEMES[scheme]
        placed = dict(parallel=Parallel(**named), mesh=make_mesh(axes))
    generator, width, dtype = np.random.default_rng(5), HEADS * head_dim, jnp.float32 if kernel is XLA else jnp.bfloat16
    video = [jnp.asarray(generator.normal(0.3, 1, (2, 64, width)), dtype) for _ in range(3)]
    stacks = [jnp.asarray(generator.normal(0.3, 1, (2, 1, 45, width)), dtype) for _ in range(2)]
    attend = Attend(head_dim, kernel, **placed, keys=60, grid=grid)

    def both(query, key, value, *stacks):
        return attend.counted(query, key, value, others=OfFrames(*stacks, jnp.int32(1)))[0]

    out = np.asarray(jax.jit(both, compiler_options=QUICK)(*video, *stacks), np.float64)[:, :60]
    query, key, value = (np.asarray(one, np.float64)[:, :60] for one in video)
    key, value = (np.concatenate([one, np.repeat(np.asarray(more, np.float64)[1], 2, 0)], 1)
                  for one, more in ((key, stacks[0]), (value, stacks[1])))
    frames = np.arange(60) // 15
    seen = np.concatenate([np.ones((60, 60), bool), frames[:, None] == frames[None, :45] + 1], axis=1)
    heads = [array.reshape(2, -1, HEADS, head_dim) for array in (query, key, value)]
    scores = np.where(seen, np.einsum("bqhd,bkhd->bhqk", *heads[:2]) * head_dim**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), heads[2]).reshape(2, 60, width)
    np.testing.assert_allclose(out, exact, atol=2e-6 if kernel is XLA else 0.03)
