"""RoPE as a kernel equals RoPE written out, on one device and spread over eight."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from wan_torchax.kernels import rotary
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import Kernel, Parallel

PLAIN = Kernel(kernel="xla")
LANES = Kernel(kernel="splash", interpret=True)


def make_inputs(tokens, heads, head_dim, dtype=jnp.float32):
    generator = np.random.default_rng(tokens)
    angles = np.repeat(generator.uniform(0, 6, (tokens, head_dim // 2)), 2, axis=1)
    array = jnp.asarray(generator.normal(1, 1, (2, tokens, heads * head_dim)), dtype)
    return array, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def complex_rotation(array, cosine, sine, head_dim):
    pairs = np.asarray(array, np.float64).reshape(*array.shape[:2], -1, head_dim // 2, 2)
    angles = (np.asarray(cosine, np.float64) + 1j * np.asarray(sine, np.float64))[:, None, ::2]
    rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * angles
    return np.stack((rotated.real, rotated.imag), axis=-1).reshape(array.shape)


@pytest.mark.parametrize("kernel", [PLAIN, LANES], ids=lambda kernel: kernel.kernel)
@pytest.mark.parametrize("tokens, heads, head_dim", [(300, 2, 128), (7, 2, 64), (19, 3, 64)])
def test_rotation_is_multiplication_by_a_complex_number(tokens, heads, head_dim, kernel):
    inputs = make_inputs(tokens, heads, head_dim)
    rotated = rotary.rotate(*inputs, head_dim, kernel)[0]
    np.testing.assert_allclose(rotated, complex_rotation(*inputs, head_dim), atol=1e-5)


@pytest.mark.parametrize("kernel", [PLAIN, LANES], ids=lambda kernel: kernel.kernel)
def test_parts_are_runs_of_heads(kernel):
    inputs = make_inputs(20, 4, 128)
    whole, parts = rotary.rotate(*inputs, 128, kernel)[0], rotary.rotate(*inputs, 128, kernel, parts=2)
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=2), whole)


@pytest.mark.parametrize("kernel", [PLAIN, LANES], ids=lambda kernel: kernel.kernel)
@pytest.mark.parametrize("dtype, within", [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-8)])
def test_rows_are_normalised_first(kernel, dtype, within):
    array, cosine, sine = make_inputs(300, 4, 64, dtype)
    weight, epsilon = jnp.linspace(0.5, 2, 256, dtype=dtype), 0.1
    wide = np.asarray(array, np.float64)
    normalised = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * np.asarray(weight, np.float64)
    parts = rotary.rotate(array, cosine, sine, 64, kernel, parts=2, norm=(weight, epsilon))
    out = np.asarray(jnp.concatenate(parts, axis=2), np.float64)
    np.testing.assert_allclose(out, complex_rotation(normalised, cosine, sine, 64), rtol=within, atol=within)


def test_attention_normalises_queries_and_keys_on_every_device():
    query, cosine, sine = make_inputs(41, 2, 64)
    key, value, weights = query[::-1] * 0.3, query + 1, [jnp.linspace(0.5, 2, 128), jnp.linspace(2, 1, 128)]
    mesh = jax.make_mesh((2, 4), ("u", "r"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    places = (), (Parallel(ulysses="u", ring="r"), mesh)
    placed = [Attend(64, PLAIN, *place, norm_epsilon=0.1) for place in places]
    one, eight = (jax.jit(attend)(query, key, value, [cosine, sine], weights) for attend in placed)
    normalised = [x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * w for x, w in zip((query, key), weights)]
    np.testing.assert_allclose(one, Attend(64, PLAIN)(*normalised, value, [cosine, sine]), atol=1e-5)
    np.testing.assert_allclose(eight, one, atol=1e-5)


def test_bf16_is_rounded_once():
    inputs = make_inputs(40, 2, 128, jnp.bfloat16)
    out = rotary.rotate(*inputs, 128, LANES)[0]
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), complex_rotation(*inputs, 128), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("tokens", [48, 41])
def test_attention_turns_queries_and_keys_on_every_device(tokens):
    query, cosine, sine = make_inputs(tokens, 2, 64)
    key, value = query[::-1] * 0.3, query + 1
    rotated = [jnp.asarray(complex_rotation(x, cosine, sine, 64), jnp.float32) for x in (query, key)]
    mesh = jax.make_mesh((2, 4), ("u", "r"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    parallel = Parallel(ulysses="u", ring="r")
    attend = Attend(64, PLAIN, parallel, mesh)
    out = jax.jit(lambda *arrays: attend(*arrays[:3], rotary=arrays[3:]))(query, key, value, cosine, sine)
    np.testing.assert_allclose(out, Attend(64, PLAIN)(*rotated, value), atol=1e-5)


def test_kernel_lowers_for_tpu():
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    kernel = Kernel(kernel="splash")
    shapes, whole = ((1, 75_600, 5120), (75_600, 128), (75_600, 128)), NamedSharding(mesh, PartitionSpec())
    dtypes = (jnp.bfloat16, jnp.float32, jnp.float32)
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in zip(shapes, dtypes)]
    rotate = jax.jit(lambda *arrays: rotary.rotate(*arrays, 128, kernel))
    with jax.sharding.use_abstract_mesh(mesh):
        exported = jax.export.export(rotate, platforms=["tpu"])(*arrays)
    assert "tpu_custom_call" in exported.mlir_module()
