"""The attention kernels on one device: exact, guarded, lowerable for TPU, and configured from conf/attention."""
import functools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from wan_torchax.config import schema
from wan_torchax.config.attention import attention_problems, choose
from wan_torchax.config.commandline import CONF
from wan_torchax.kernels import attention, splash
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import Kernel, Parallel, Question

QUICK = {"xla_backend_optimization_level": 0}  # each shape is compiled once and run once
# Small blocks, so that a few hundred tokens make several blocks, tiles and chunks and a tail.
SPLASH = Kernel(kernel="splash", block_q=256, block_kv=512, tile_kv=256, sub_q=128, chunk_kv=128, interpret=True)
XLA = Kernel(kernel="xla", block_q=96, block_kv=80)
LENGTHS = [  # (queries, keys)
    (1, 257), (257, 1), (2, 3), (7, 13), (127, 129), (128, 128), (129, 127), (256, 256), (257, 257), (100, 512),
    (64, 769), (300, 512), (511, 513), (512, 769), (640, 257),
    (1023, 1023),  # 32,760 tokens leave 2040 of the last 2048; this leaves 255 of 256
    (629, 629),  # 75,600 leave 1872 of 4096; this leaves 117 of 256
]
CASES = [(*lengths, 128, {}) for lengths in LENGTHS[::4]]
CASES += [(*lengths, 64, {}) for lengths in LENGTHS[1::8]] + [(129, 127, 128, {"fold_scale": False})]
CASES += [pytest.param(*lengths, 128, {}, marks=pytest.mark.full) for lengths in sorted({*LENGTHS} - {*LENGTHS[::4]})]
CASES += [pytest.param(*lengths, 64, {}, marks=pytest.mark.full) for lengths in LENGTHS[::4]]
CASES += [pytest.param(*lengths, 128, {"fold_scale": False}, marks=pytest.mark.full) for lengths in LENGTHS[1::6]]
WHOLE_CASES = [(*lengths, head_dim, {"smooth_keys": True}) for lengths, head_dim in zip(LENGTHS[-2:], (64, 128))]
WHOLE_CASES += [(512, 769, 128, {}), (640, 257, 64, {})]
WINDOWS = ((257, 0, 128), (300, 20, 64), (629, 400, 128))
WHOLE_CASES += [(tokens, tokens, head_dim, {"window": window}) for tokens, window, head_dim in WINDOWS]


def random_inputs(queries, keys, head_dim, mean=4.0, spread=1.0, heads=1):
    """bf16 query, key, value as (batch, tokens, heads * head_dim), with means that are large for their spread."""
    generator = np.random.default_rng(queries * 10007 + keys)
    shapes = [(1, tokens, heads * head_dim) for tokens in (queries, keys, keys)]
    return [generator.normal(mean, spread, shape).astype(jnp.bfloat16) for shape in shapes]


def attend(inputs, head_dim, kernel):
    return jax.jit(Attend(head_dim, kernel), compiler_options=QUICK)(*inputs)


def fast_alone(query, key, value, head_dim=128, kernel=SPLASH):
    """Output, log_sum and rescued rows of the fast kernel without the exact one behind it."""
    out_t, rows = map(np.asarray, fast(head_dim, kernel, splash.CAREFUL_CHUNKS)(query, key, value.swapaxes(1, 2)))
    return out_t.swapaxes(1, 2), rows[:, :, 0], rows[:, :, 1] > 0


@functools.cache
def fast(head_dim, kernel, careful_chunks):
    """Compiled once for inputs of one shape."""

    def run(query, key, value_t):
        arrays = query, key, splash.Values.whole(value_t)
        return splash.call(splash.fast_kernel, arrays, key.shape[1], head_dim, kernel)

    return jax.jit(run, compiler_options=QUICK)


def float64(query, key, value, head_dim, window=None):
    """Attention in NumPy, (batch, tokens, heads * head_dim)."""
    query, key, value = (np.asarray(x, np.float64).reshape(*x.shape[:2], -1, head_dim) for x in (query, key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key, optimize=True) * head_dim**-0.5
    if window is not None:
        distance = abs(np.subtract.outer(np.arange(query.shape[1]), np.arange(key.shape[1])))
        scores = np.where(distance <= window, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(axis=-1, keepdims=True), value, optimize=True)
    return out.reshape(*out.shape[:2], -1)


def relative_error(out, truth):
    return np.linalg.norm(np.asarray(out, np.float64) - truth) / np.linalg.norm(truth)


def error_of_jax(inputs, head_dim, truth, window=None):
    """The error of JAX's own attention in bf16, which ours is measured by."""
    split = [x.reshape(1, x.shape[1], -1, head_dim) for x in inputs]

    def theirs(*arrays):
        return jax.nn.dot_product_attention(*arrays, local_window_size=window)

    out = np.asarray(jax.jit(theirs, compiler_options=QUICK)(*split))
    return relative_error(out.reshape(inputs[0].shape), truth)


@pytest.mark.parametrize("queries, keys, head_dim, options", CASES)
def test_the_fast_path_alone_is_as_exact_as_jax(queries, keys, head_dim, options):
    inputs = random_inputs(queries, keys, head_dim)
    truth = float64(*inputs, head_dim)
    out, log_sum, rescued = fast_alone(*inputs, head_dim, replace(SPLASH, **options))
    assert np.isfinite(log_sum).all() and not rescued.any() and out.dtype == jnp.bfloat16
    assert relative_error(out, truth) <= 2 * error_of_jax(inputs, head_dim, truth)


@pytest.mark.parametrize("queries, keys, head_dim, options", WHOLE_CASES)
def test_the_whole_is_as_exact_as_jax(queries, keys, head_dim, options):
    inputs = random_inputs(queries, keys, head_dim, heads=128 // head_dim)
    truth = float64(*inputs, head_dim, options.get("window"))
    out = attend(inputs, head_dim, replace(SPLASH, **options))
    assert relative_error(out, truth) <= 2 * error_of_jax(inputs, head_dim, truth, options.get("window"))


def test_one_key_is_its_value():
    query, key, value = random_inputs(1, 1, 128)
    np.testing.assert_array_equal(attend((query, key, value), 128, SPLASH), value)


def test_the_reference_is_attention():
    inputs = [x.astype(np.float32) for x in random_inputs(30, 30, 64)]
    for window in (None, 7):
        assert relative_error(splash.reference(*inputs, 64, window), float64(*inputs, 64, window)) < 1e-6


@pytest.mark.parametrize("mean, spread", [(10, 1), (0, 3), (0, 6)])
def test_folding_the_scale_into_the_query_loses_nothing(mean, spread):
    """One bf16 term for the scaled query is 2.5 to 7 times less exact than JAX here."""
    inputs = random_inputs(300, 700, 128, mean, spread)
    truth = float64(*inputs, 128)
    assert relative_error(fast_alone(*inputs)[0], truth) <= 2 * error_of_jax(inputs, 128, truth)


def rising_keys():
    """Scores that climb by far more than 2**128 inside every tile."""
    query, key, value = random_inputs(200, 1000, 128, mean=0)
    rise = np.linspace(0, 60, 1000)[None, :, None] * np.ones((1, 1000, 128))
    return np.abs(query) + 1, rise.astype(query.dtype), value


def late_giant():
    """One key in the tail that takes all the weight."""
    query, key, value = random_inputs(200, 700, 128, mean=0)
    key[:, 699] = 300
    return np.abs(query), key, value


# In the second chunk of the first tile, in the second and the third, at their borders, and in the tail of 1000 keys.
GIANTS = [130, 255, 256, 400, 511, 512, 600, 767, 768, 900, 999]


def giants_for_all():
    """Two videos, two heads: each row meets one key with a far higher score, and which one differs from row to row."""
    query, key, value = (np.concatenate([x, x[:, ::-1]]) for x in random_inputs(200, 1000, 128, mean=0, heads=2))
    for kind, place in enumerate(GIANTS):  # eleven of a head's numbers for each
        for head in (0, 128):
            own = slice(head + 11 * kind, head + 11 * (kind + 1))
            query[:, kind::len(GIANTS), own], key[:, place, own] = 40, 40
    return query, key, value


def too_large():
    """Values of which no two can be added in float32."""
    query, key, value = random_inputs(200, 700, 128, mean=0)
    return query, key, np.where(value > 0, 3e38, 1e38).astype(value.dtype)


RESCUED = [(rising_keys, 1), (late_giant, 2), (giants_for_all, 1), (giants_for_all, 2)]


@pytest.mark.parametrize("inputs, chunks", RESCUED, ids=lambda value: getattr(value, "__name__", value))
def test_rows_out_of_range_are_rescued(inputs, chunks, monkeypatch):
    """With a tile's two chunks in a loop, and in one piece."""
    monkeypatch.setattr(splash, "CAREFUL_CHUNKS", chunks)
    query, key, value = inputs()
    out, log_sum, rescued = fast_alone(query, key, value)
    assert np.isfinite(log_sum).all(), "the exact kernel was not to be needed"
    assert rescued.all()
    assert relative_error(out, float64(query, key, value, 128)) < 4e-3


def test_one_row_out_of_range_leaves_all_others_as_they_were():
    """Bit for bit, as the exact kernel would not give them; this is also where the count of a layer is checked."""
    query, key, value = random_inputs(300, 700, 128, mean=0, heads=2)
    lost, key[:, 600, :128] = query.copy(), 8
    lost[:, 7, :128] = 8
    counted = jax.jit(Attend(128, SPLASH).counted, compiler_options=QUICK)
    results = (map(np.asarray, counted(*inputs)) for inputs in ((query, key, value), (lost, key, value)))
    (before, none), (out, rescued) = results
    assert (int(none.sum()), int(rescued.sum())) == (0, 1)
    assert relative_error(out, float64(lost, key, value, 128)) < 4e-3
    np.testing.assert_array_equal(out[:, :, 128:], before[:, :, 128:])
    np.testing.assert_array_equal(np.delete(out, 7, axis=1), np.delete(before, 7, axis=1))


@pytest.mark.parametrize("inputs, head_dim", [
    pytest.param(lambda: random_inputs(300, 1000, 64, heads=2), 64, id="head dim 64", marks=pytest.mark.full),
    pytest.param(lambda: random_inputs(300, 1000, 128), 128, id="head dim 128"),
    pytest.param(giants_for_all, 128, id="out of range", marks=pytest.mark.full),
    pytest.param(too_large, 128, id="too large", marks=pytest.mark.full),
])
def test_it_goes_on_from_the_output_of_other_keys(inputs, head_dim):
    """As a ring does, in three steps: as exact as all keys at once, also where rows leave the range or all is lost."""
    query, key, value = inputs()

    @partial(jax.jit, compiler_options=QUICK)
    def in_steps(query, key, value_t):
        before, rescued = (), 0
        for begin, end, dtype in (0, 300, jnp.float32), (300, 600, jnp.float32), (600, key.shape[1], jnp.bfloat16):
            arrays = query, key[:, begin:end], value_t[..., begin:end], end - begin
            *before, more = splash.attention(*arrays, head_dim, SPLASH, before, dtype)
            rescued += more
        return before[0].swapaxes(1, 2), rescued

    out, rescued = in_steps(query, key, value.swapaxes(1, 2))
    assert out.dtype == jnp.bfloat16 and bool(rescued) == (inputs in (giants_for_all, too_large))
    assert relative_error(out, float64(query, key, value, head_dim)) < 4e-3


def test_values_too_large_for_sums_go_to_the_exact_kernel():
    query, key, value = too_large()
    assert not np.isfinite(fast_alone(query, key, value)[1]).all(), "these values were to overflow the fast path"
    out, rescued = jax.jit(Attend(128, SPLASH).counted, compiler_options=QUICK)(query, key, value)
    assert np.isfinite(np.asarray(out, np.float32)).all() and 0 < int(rescued.sum()) <= 200
    assert relative_error(out, float64(query, key, value, 128)) < 4e-3


def test_the_fast_path_keeps_up_with_falling_and_slowly_rising_scores():
    """Scores over a range of 2**400, more than float32 holds, but never 2**100 within a tile above what came before."""
    query, _, value = random_inputs(100, 1000, 128, mean=0, heads=2)
    rising = np.linspace(-10, 10, 1000)[None, :, None] * np.ones((1, 1000, 128))
    key = np.concatenate([rising, -rising], axis=2).astype(query.dtype)  # one head each
    out, log_sum, rescued = fast_alone(np.abs(query), key, value)
    assert np.isfinite(log_sum).all() and not rescued.any()
    assert relative_error(out, float64(np.abs(query), key, value, 128)) < 4e-3


def test_inputs_that_are_not_finite_end():
    query, key, value = random_inputs(130, 300, 128)
    query[0, 5, 0] = np.nan
    out = attend((query, key, value), 128, SPLASH)
    assert np.isnan(np.asarray(out, np.float32)[0, 5, :128]).all()
    assert np.isfinite(np.asarray(out, np.float32)[0, :5]).all()


@pytest.mark.parametrize("name, kernel", [("splash", SPLASH), ("splash", replace(SPLASH, window=90)), ("xla", XLA)])
def test_log_sum_is_the_log_of_the_softmax_denominator(name, kernel):
    query, key, value = random_inputs(300, 300, 64, mean=1, heads=2)

    def run(*arrays):
        return attention.KERNELS[name](*arrays, key.shape[1], 64, kernel)

    _, log_sum, rescued = jax.jit(run, compiler_options=QUICK)(query, key, value)
    assert rescued == 0
    scores = np.einsum("qhd,khd->hqk", *(np.asarray(x[0], np.float64).reshape(300, 2, 64) for x in (query, key))) / 8
    if kernel.window is not None:
        scores = np.where(abs(np.subtract.outer(np.arange(300), np.arange(300))) <= kernel.window, scores, -np.inf)
    np.testing.assert_allclose(log_sum[0], np.log(np.exp(scores).sum(axis=-1)), atol=1e-4)


@pytest.mark.parametrize(
    "queries, keys, window", [(1, 1, None), (257, 769, None), (300, 300, 20), (96, 80, None), (500, 333, None)]
)
def test_xla_is_exact_in_float32(queries, keys, window):
    inputs = [x.astype(np.float32) for x in random_inputs(queries, keys, 40)]
    out = attend(inputs, 40, replace(XLA, window=window))
    assert relative_error(out, float64(*inputs, 40, window)) < 2e-6


def test_xla_never_holds_the_score_matrix():
    shape = jax.ShapeDtypeStruct((1, 8192, 16), jnp.float32)
    attend = jax.jit(Attend(16, replace(XLA, block_q=512, block_kv=512)))
    compiled = attend.lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8192 * 8192 * 4 / 10


def test_few_keys_go_to_xla(monkeypatch):
    used = []
    for name in ("splash", "xla"):
        monkeypatch.setitem(attention.KERNELS, name, lambda *arguments, name=name: used.append(name))
    for keys in (19_999, 20_000):
        Attend(128, replace(SPLASH, min_keys=20_000)).local(None, None, None, keys)
    assert used == ["xla", "splash"]


DEVICE_KINDS = {
    "splash_v6e": "TPU v6 lite", "splash_v5e": "TPU v5 lite", "splash_v5p": "TPU v5", "splash_v7x": "TPU7x",
}


def shipped(name):
    """conf/attention/<name>.yaml as the dataclasses that Hydra fills from it."""
    stored = OmegaConf.load(CONF / "attention" / f"{name}.yaml")
    return OmegaConf.to_object(OmegaConf.merge(schema.root().attention, stored))


@pytest.mark.parametrize("part, keys", [
    ("self", 75_600), pytest.param("self", 32_760, marks=pytest.mark.full), ("cross", 512),
    pytest.param("cross", 769, marks=pytest.mark.full),
])
@pytest.mark.parametrize("name", DEVICE_KINDS)
def test_shipped_blocks_lower_for_their_tpu(name, part, keys):
    kernel = getattr(shipped(name), part)
    queries = max(keys, 32_760)
    device = AbstractDevice(device_kind=DEVICE_KINDS[name], num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    shapes, whole = [(1, tokens, 256) for tokens in (queries, keys, keys)], NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        exported = jax.export.export(jax.jit(Attend(128, kernel)), platforms=["tpu"])(*arrays)
    assert exported.mlir_module().count("tpu_custom_call") >= 2  # the fast kernel and the exact one


@pytest.mark.parametrize("name", ["auto", "xla", "cudnn", "hopper", *DEVICE_KINDS])
def test_shipped_configs_are_sound(name):
    assert list(attention_problems(shipped(name), asked(40, 128), {}, Parallel())) == []


def test_an_unknown_key_is_refused():
    with pytest.raises(ConfigKeyError, match="blok_q"):
        OmegaConf.merge(schema.root().attention, {"self": {"blok_q": 512}})


def asked(heads, head_dim):
    return {"self": Question(heads, head_dim, (21, 45, 80), "width"), "cross": Question(heads, head_dim)}


SELF = "attention.self"
WRONG = [
    ({"block_q": 100}, 128, f"{SELF}.block_q=100: must be a multiple of 128; nearest 128"),
    (
        {"tile_kv": 384, "chunk_kv": 256}, 128,
        f"{SELF}.tile_kv=384: must be a multiple of chunk_kv=256; nearest 256 or 512",
    ),
    ({"block_kv": 640, "tile_kv": 512}, 128, f"{SELF}.block_kv=640: must be a multiple of tile_kv=512; nearest 512"),
    ({"sub_q": 64}, 128, f"{SELF}.sub_q=64: must be a multiple of 128"),
    ({"block_q": 16384, "block_kv": 16384, "vmem_mib": 16}, 128, "MiB of VMEM, the limit is vmem_mib=16"),
    ({}, 96, f"{SELF}.kernel=splash: serves head dims 64 and 128, the model has 96; use kernel=xla"),
    ({"kernel": "splahs"}, 128, f"{SELF}.kernel=splahs: unknown; nearest: splash"),
    ({"kernel": "cudnn", "window": 5}, 128, f"{SELF}.window=5: cuDNN"),
    ({"window": -1}, 128, f"{SELF}.window=-1"),
]


@pytest.mark.parametrize("change, head_dim, message", WRONG)
def test_wrong_blocks_are_refused_with_the_way_out(change, head_dim, message):
    wrong = schema.Attention(self=replace(SPLASH, **change), cross=XLA)
    problems = list(attention_problems(wrong, asked(12, head_dim), {}, Parallel()))
    assert any(message in problem for problem in problems), problems


def devices(kind, platform="tpu"):
    return SimpleNamespace(kind=kind, platform=platform)


V6E = devices("TPU v6 lite")
CHOSEN = [
    (V6E, "bfloat16", "splash_v6e"), (devices("TPU v5 lite"), "bfloat16", "splash_v5e"),
    (devices("TPU v5"), "bfloat16", "splash_v5p"), (devices("TPU7x"), "bfloat16", "splash_v7x"),
    (devices("NVIDIA H200", "gpu"), "bfloat16", "hopper"),
    (devices("NVIDIA A100-SXM4-80GB", "gpu"), "bfloat16", "cudnn"), (devices("NVIDIA H200", "gpu"), "float32", "xla"),
    (devices("cpu", "cpu"), "float32", "xla"),
]


@pytest.mark.parametrize("here, dtype, expected", CHOSEN)
def test_auto_takes_the_values_of_the_device_file(here, dtype, expected):
    chosen = choose(shipped("auto"), here, dtype, asked(40, 128))
    assert (chosen.self, chosen.cross) == (shipped(expected).self, shipped(expected).cross)


@pytest.mark.parametrize("dtype, head_dim", [("float32", 128), ("bfloat16", 32)])
def test_auto_takes_xla_where_the_chips_kernel_does_not_serve(dtype, head_dim):
    chosen = choose(shipped("auto"), V6E, dtype, asked(40, head_dim))
    assert chosen.self == shipped("xla").self and chosen.cross == shipped("xla").cross


def test_auto_leaves_a_window_asked_for():
    windowed = replace(shipped("auto"), self=replace(shipped("auto").self, window=100))
    assert choose(windowed, V6E, "bfloat16", asked(40, 128)).self == replace(shipped("splash_v6e").self, window=100)


def test_auto_refuses_a_device_it_does_not_know():
    with pytest.raises(schema.ConfigError, match="TPU v9.*TPU v6 lite"):
        choose(shipped("auto"), devices("TPU v9"), "bfloat16", asked(40, 128))
