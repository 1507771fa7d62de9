"""The norms' kernel equals the norms, and copies along the lanes are copies."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from wan_torchax.kernels import lanes
from wan_torchax.kernels.norm import Norm
from wan_torchax.kernels.settings import Kernel, Products

SETTINGS = Products(kernel="pallas", interpret=True)
SPLASH = Kernel(kernel="splash", interpret=True)


def draw(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(0.5, 1, shape), dtype)


@pytest.mark.parametrize("batch, tokens, channels", [(1, 1, 128), (2, 77, 96), (1, 600, 384)])
@pytest.mark.parametrize("centred", [True, False])
def test_it_is_the_norm_at_odd_sizes(batch, tokens, channels, centred):
    array, scale, shift = draw(batch, tokens, channels, dtype=jnp.bfloat16), draw(batch, channels), draw(1, channels)
    out = Norm(SETTINGS)(array, scale, shift if centred else None, 1e-6)
    exact = np.asarray(array, np.float64)
    exact -= exact.mean(axis=2, keepdims=True) if centred else 0
    exact = exact / np.sqrt((exact**2).mean(axis=2, keepdims=True) + 1e-6) * scale[:, None]
    exact += shift[:, None] if centred else 0
    np.testing.assert_allclose(np.asarray(out, float), exact, rtol=2**-8, atol=2e-3)


def test_tokens_and_prompts_are_spread():
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("dp", "sp"))
    array, scale, shift = draw(2, 64, 128, dtype=jnp.bfloat16), draw(2, 128), draw(2, 128, seed=1)
    out = jax.jit(Norm(SETTINGS, sharding))(array, scale, shift)
    np.testing.assert_array_equal(out, Norm(SETTINGS)(array, scale, shift))
    assert out.sharding.is_equivalent_to(sharding, 3)


@pytest.mark.parametrize("batch, width, share", [(1, 256, 128), (2, 100, 256), (1, 64, 50)])
def test_parts_along_the_lanes_are_cut_and_joined(batch, width, share):
    array = draw(batch, width, 4 * share, dtype=jnp.bfloat16)
    pieces = lanes.cut(array, 4, SPLASH)
    np.testing.assert_array_equal(pieces, jnp.stack(jnp.split(array, 4, axis=2)))
    np.testing.assert_array_equal(lanes.join(pieces, SPLASH), array)
