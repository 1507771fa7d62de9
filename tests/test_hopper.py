"""The Hopper kernel without a Hopper GPU: it lowers, it is chosen, wrong settings are refused.

benchmarks/attention_gpu.py checks its numbers on one.
"""
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import make_config
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels import hopper, hopper_eight
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import Kernel

HOPPER = Kernel(kernel="hopper", block_q=128, block_kv=128)
EIGHT = replace(HOPPER, eight_bits=True, smooth_keys=True)


def lowered(tokens, heads, head_dim=128, keys=None, kernel=HOPPER):
    array = jax.ShapeDtypeStruct((2, tokens, heads * head_dim), jnp.bfloat16)
    attend = jax.jit(Attend(head_dim, kernel, keys=keys))
    return attend.trace(array, array, array).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("tokens, heads, head_dim, keys, kernels", [
    (32_760, 12, 128, None, 2),  # 480p
    (75_776, 2, 128, 75_600, 2),  # padding behind the keys
    (100, 2, 64, None, 1),  # less than a block, which cannot be lost, and no multiple of 8
])
def test_it_lowers_to_two_kernels_and_no_branch_of_the_host(tokens, heads, head_dim, keys, kernels):
    """The guarded kernel is always started and decides for itself: lax.cond or a loop would have XLA ask the host."""
    program = lowered(tokens, heads, head_dim, keys)
    assert program.count("custom_call @mosaic_gpu") == kernels
    assert "stablehlo.while" not in program and "stablehlo.case" not in program and "stablehlo.if" not in program


def test_the_guarded_kernel_writes_over_the_fast_ones_results():
    assert "output_operand_alias" in lowered(1024, 2)


def test_only_tiles_with_lost_rows_are_computed_again_and_from_where_it_counts():
    lost, steep = np.zeros((1, 2, 300), bool), np.full((1, 2, 384), 9.0)
    lost[0, 0, 5], steep[0, 0, 5] = True, 2  # one row; what the others have is not asked
    lost[0, 1, 128:256], steep[0, 1, 128:256], steep[0, 1, 200] = True, 4, 3  # a whole tile
    lost[0, 1, 256:], steep[0, 1, 256:], steep[0, 1, 300:] = True, 8, 0  # and the last one, with 44 real rows
    begins = hopper.first_blocks(jnp.array(lost), jnp.array(steep), 8)
    assert begins.tolist() == [2, hopper.NOTHING, hopper.NOTHING, hopper.NOTHING, 3, 6]  # two blocks at least


@pytest.mark.parametrize("tokens, head_dim, keys, eight_bits", [
    (32_760, 128, None, True),
    (3000, 64, 2777, True),  # padding behind the keys, the last block not full
    (1024, 128, None, False),  # too few for a sample
])
def test_eight_bits_lower_to_a_kernel_of_their_own_with_the_same_rescue(tokens, head_dim, keys, eight_bits):
    program = lowered(tokens, 2, head_dim, keys, EIGHT)
    assert program.count("custom_call @mosaic_gpu") == 2
    assert ("f8E4M3FN" in program) == eight_bits and "stablehlo.while" not in program


def test_without_eight_bits_nothing_is_quantised():
    assert "f8E4M3FN" not in lowered(4096, 2)


def test_values_lie_in_the_order_of_a_threads_weights():
    """Of 16 scores the thread q of four has the keys 2q, 2q + 1, 2q + 8, 2q + 9 and multiplies values 4q to 4q + 3."""
    values = jnp.broadcast_to(jnp.arange(16.0)[None, :, None], (1, 16, 8)).astype(jnp.bfloat16)
    small, channel = hopper_eight.quantise_values(values)
    assert small.shape == (1, 8, 128)  # whole tiles, zeros behind
    found = small.astype(jnp.float32) * channel[:, 0, :, None] + channel[:, 1, :, None]
    order = [2 * q + key for q in range(4) for key in (0, 1, 8, 9)]
    np.testing.assert_allclose(found[0, 0, :16], order, atol=0.3)  # e4m3 has steps of 1/16


def emulated(query, key, value):
    """What the kernel computes for one head, in plain JAX: (out, smallest average weight, how often a row's reference
    was raised at most)."""
    tokens, block = key.shape[1], hopper_eight.BLOCK
    small_query, row = hopper_eight.quantise_queries(query, 128)
    small_key, scale = hopper_eight.quantise_keys(key, 128)
    small_value, channel = hopper_eight.quantise_values(value)
    scores = small_query[0].astype(jnp.float32) @ small_key[0].astype(jnp.float32).T
    scores = scores * row[0, 0][:, None] * jnp.repeat(scale[0, 0], block)[:tokens]
    ordered = small_value[0].astype(jnp.float32).reshape(128, -1, 4, 2, 2).swapaxes(2, 3).reshape(128, -1)[:, :tokens]
    parts = [slice(begin, begin + block) for begin in range(0, tokens, block)]
    sampled = [jnp.log2(jnp.sum(jnp.exp2(scores[:, parts[i]]), axis=1)) for i in (0, (len(parts) - 1) // 2)]
    reference = jnp.maximum(*sampled) - np.log2(hopper_eight.SAMPLE_SUM)
    sums, total, raised = 0, 0, 0
    for part in parts:
        level = jnp.log2(jnp.sum(jnp.exp2(scores[:, part] - reference[:, None]), axis=1))
        too_large = level >= np.log2(hopper_eight.LARGEST)
        more = jnp.where(too_large, level - np.log2(hopper_eight.RAISED_SUM), 0)
        reference, raised = reference + more, raised + too_large
        weights = jnp.exp2(scores[:, part] - reference[:, None])
        product = weights.astype(jnp.float8_e4m3fn).astype(jnp.float32) @ ordered[:, part].T
        sums = sums * jnp.exp2(-more)[:, None] + product
        total = total * jnp.exp2(-more) + jnp.sum(weights, axis=1)
    return sums / total[:, None] * channel[0, 0] + channel[0, 1], jnp.min(total) / tokens, jnp.max(raised)


@pytest.mark.parametrize("deviation, times", [(0.03, 0), (1, 0), (2, 1), (6, 2)])
def test_the_error_and_the_range_of_eight_bits(deviation, times):
    """Scores with that standard deviation, in natural units: none is lost, errors are those of e4m3's roundings, and
    references are raised where that is needed."""
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(key, (1, n, 128), jnp.bfloat16) for key, n in zip(keys, (128, 5000, 5000)))
    query = query * deviation
    out, average, raised = emulated(query, key, value + 1)
    with jax.default_matmul_precision("highest"):
        exact = Attend(128, Kernel(kernel="xla"))(*(x.astype(jnp.float32) for x in (query, key, value + 1)))[0]
    error = jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact - 1)
    assert 0.01 < error < 0.06 and average > hopper_eight.LEAST_AVERAGE and raised >= times


SELF = "attention.self"
REFUSED = {
    "model.dtype.transformer=float16": f"{SELF}.kernel=hopper: takes bfloat16, and model.dtype.transformer=float16",
    f"{SELF}.block_kv=256": f"{SELF}.block_kv=256: more does not fit the registers; use 64, 96, 128, 160",
    f"{SELF}.block_q=256": f"{SELF}.block_q=256: the Hopper kernel's tile is 128 queries; set 128",
    f"{SELF}.window=100": f"{SELF}.window=100: the Hopper kernel has no windows",
    "attention.cross.eight_bits=true": "attention.cross.eight_bits=true: only kernel=hopper has products of eight bits",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_it_cannot_do_is_refused(override):
    with pytest.raises(ConfigError) as error:
        validate(make_config("model=wan21_t2v_1_3b", "resolution=480p", "mesh=gpu_1", "attention=hopper", override))
    assert REFUSED[override] in str(error.value)
