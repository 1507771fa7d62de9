"""The Hopper kernel without a Hopper GPU: it lowers, it is chosen, wrong settings are refused.

benchmarks/attention_gpu.py checks its numbers on one.
"""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import make_config
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels import hopper
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import Kernel

HOPPER = Kernel(kernel="hopper", block_q=128, block_kv=128)


def lowered(tokens, heads, head_dim=128, keys=None):
    array = jax.ShapeDtypeStruct((2, tokens, heads * head_dim), jnp.bfloat16)
    attend = jax.jit(Attend(head_dim, HOPPER, keys=keys))
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


SELF = "attention.self"
REFUSED = {
    "model.dtype.transformer=float16": f"{SELF}.kernel=hopper: takes bfloat16, and model.dtype.transformer=float16",
    f"{SELF}.block_kv=256": f"{SELF}.block_kv=256: more does not fit the registers; use 64, 96, 128, 160",
    f"{SELF}.block_q=256": f"{SELF}.block_q=256: the Hopper kernel's tile is 128 queries; set 128",
    f"{SELF}.window=100": f"{SELF}.window=100: the Hopper kernel has no windows",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_it_cannot_do_is_refused(override):
    with pytest.raises(ConfigError) as error:
        validate(make_config("model=wan21_t2v_1_3b", "resolution=480p", "mesh=gpu_1", "attention=hopper", override))
    assert REFUSED[override] in str(error.value)
