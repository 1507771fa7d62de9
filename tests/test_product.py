"""The kernel of linear layers equals linear layers, on one device and spread over eight, and lowers for TPU."""
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from tests.conftest import ROOT, build, make_config, resolve_here, resolve_there
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels import product, quantized
from wan_torchax.kernels.product import Linear, Target
from wan_torchax.kernels.rotary import Turn
from wan_torchax.kernels.settings import Products
from wan_torchax.session import Session
from wan_torchax.stages.denoise import Denoise
from wan_torchax.tasks import plan

SMALL = Products(kernel="pallas", rows=64, weights_mib=1, interpret=True)
UNROLLED = replace(SMALL, unrolled=True, upright=False)
PLAN = "model=wan21_t2v_14b", "resolution=480p", "mesh=v6e_8", "attention=auto", "task=plan", "plan.compiler=none"


def make_inputs(batch, tokens, inputs, outputs, layers=3):
    generator = np.random.default_rng(tokens)
    shapes = (batch, tokens, inputs), (layers, outputs, inputs), (layers, outputs)
    return [jnp.asarray(generator.normal(0.1, 1, shape), jnp.bfloat16) for shape in shapes]


def exact(array, weight, bias, gelu):
    array, weight, bias = (np.asarray(x, np.float64) for x in (array, weight, bias))
    result = array @ weight.T + bias
    if not gelu:
        return result
    return result / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (result + 0.044715 * result**3)))


@pytest.mark.parametrize("settings", [SMALL, UNROLLED], ids=["loop", "unrolled"])
@pytest.mark.parametrize("gelu, transposed", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", [(1, 1, 128, 1), (1, 100, 96, 300), (2, 377, 256, 1100)])
def test_it_is_a_linear_layer_at_odd_sizes(sizes, gelu, transposed, settings):
    array, weight, bias = make_inputs(*sizes)
    out = Linear(settings)(array, weight[1], bias[1], gelu=gelu, transpose_out=transposed)
    np.testing.assert_allclose(np.asarray(out, float), exact(array, weight[1], bias[1], gelu), rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("settings", [SMALL, UNROLLED], ids=["loop", "unrolled"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("small, gated", [(False, True), (False, False), (True, True)])
def test_a_residual_is_joined_and_attention_s_outputs_are_taken_as_they_lie(transposed, small, gated, settings):
    array, weight, bias = make_inputs(2, 377, 256, 1100)
    generator = np.random.default_rng(1)
    residual = jnp.asarray(generator.normal(0, 1, (2, 377, 1100)), jnp.bfloat16)
    gate = jnp.asarray(generator.normal(0, 1, (2, 1100)), jnp.float32) if gated else None
    weight, scale = quantized.quantize(weight, "int8") if small else (weight, [None] * 3)
    plain = Linear(SMALL)(array, weight[1], bias[1], scale=scale[1]).astype(jnp.float32)
    given = dict(scale=scale[1], residual=residual, gate=gate, transpose_in=transposed)
    out = Linear(settings)(array, weight[1], bias[1], **given)
    expected = residual.astype(jnp.float32) + plain * (gate[:, None] if gated else 1)
    assert np.abs(out - expected).max() < 2**-7 * np.abs(expected).max()  # both are rounded
    assert np.linalg.norm(out - expected) < 4e-3 * np.linalg.norm(expected)


def test_every_setting_changes_the_program():
    """The results are the same."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 512, 256), (512, 256), (512,))]
    changes = {}, {"ahead": True}, {"unrolled": True}, {"upright": False}, {"rows": 256}, {"vmem_mib": 50}
    layers = [partial(Linear(replace(SMALL, **({"rows": 512} | change))), transpose_in=True) for change in changes]
    programs = {re.sub("0x[0-9a-f]+", "", str(jax.jit(layer).trace(*structs).jaxpr)) for layer in layers}
    assert len(programs) == len(changes)


def test_a_layer_of_a_stack_is_that_layer():
    array, weight, bias = make_inputs(1, 50, 128, 256)
    for layer in range(3):
        of_stack = jax.jit(Linear(SMALL))(array, weight, bias[layer], jnp.int32(layer))
        np.testing.assert_array_equal(of_stack, Linear(SMALL)(array, weight[layer], bias[layer]))


@pytest.mark.parametrize("kind, transposed", [("int8", False), ("int8", True), ("float8_e4m3fn", False)])
@pytest.mark.parametrize("batch, tokens, inputs, outputs", [(1, 100, 96, 300), (2, 77, 256, 1100)])
def test_in_eight_bits_it_is_the_layer_with_both_factors_rounded(batch, tokens, inputs, outputs, kind, transposed):
    array, weight, bias = make_inputs(batch, tokens, inputs, outputs)
    array = array.at[0, 0].set(0)  # a token without a largest number
    small, scale = quantized.quantize(weight, kind)
    expected = quantized.linear(array, small[1], scale[1], bias[1], activations=True).astype(jnp.float32)
    for chosen in ((small[1], bias[1], None), (small, bias[1], jnp.int32(1))):
        layer = jax.jit(partial(Linear(SMALL), transpose_out=transposed))
        out = layer(array, *chosen, scale=scale[1]).astype(jnp.float32)
        within = 2e-3 if kind == "int8" else 3e-3  # of float8 the other rounds its products before they are scaled
        assert np.linalg.norm(out - expected) < within * np.linalg.norm(expected)
        np.testing.assert_array_equal(out[0, 0], bias[1].astype(jnp.float32))
    assert np.abs(expected - exact(array, weight[1], bias[1], False)).max() > 0.01  # it was rounded


@pytest.mark.parametrize("batch, spread", [(2, ("dp", "sp")), (1, (None, ("dp", "sp")))])
def test_tokens_and_prompts_are_spread(batch, spread):
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spread))
    linear = Linear(SMALL, sharding)
    array, weight, bias = make_inputs(batch, 64, 128, 256)
    out = jax.jit(linear)(array, weight[0], bias[0])
    np.testing.assert_array_equal(out, Linear(SMALL)(array, weight[0], bias[0]))
    assert out.sharding.is_equivalent_to(sharding, 3)


@pytest.mark.parametrize("spread", [("dp", "sp"), (None, ("dp", "sp")), ("dp", None)])
def test_tokens_need_not_divide_over_devices(spread):
    """Of two arrays, joined to a residual; and with each head's norm and RoPE."""
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread_out = Linear(SMALL, NamedSharding(mesh, PartitionSpec(*spread)))
    generator = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(generator.normal(0.1, 1, shape), jnp.bfloat16)  # noqa: E731
    array, second, residual, angles = draw(2, 77, 128), draw(2, 77, 384), draw(2, 77, 256), draw(77, 128)
    weight, bias, gate, norm = draw(256, 512), draw(256), draw(2, 256), draw(128)
    turn = Turn(norm, jnp.cos(angles.astype(jnp.float32)), jnp.sin(angles.astype(jnp.float32)), 1e-6)
    product = exact(jnp.concatenate([array, second], axis=2), weight, bias, False)

    def joined(linear):
        return jax.jit(partial(linear, residual=residual, gate=gate))((array, second), weight, bias)

    def turned(linear):
        return jax.jit(lambda array: linear(array, weight, bias, turn=turn))(jnp.concatenate([array, second], axis=2))

    for function, truth in ((joined, residual.astype(jnp.float32) + product * gate[:, None]),
                            (turned, turn.plain(jnp.float32(product)))):
        out = function(spread_out)
        np.testing.assert_array_equal(out, function(Linear(SMALL)))
        assert np.linalg.norm(out - truth) < 4e-3 * np.linalg.norm(truth)


@pytest.mark.parametrize("counts", [(256, 256), (96, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_device_has_its_part_of_two_layers_tokens_in_one_array(counts, transposed):
    """Written there in blocks, or put beside each other where they do not divide into blocks."""
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    linear = Linear(replace(SMALL, rows=256 if transposed else 64), NamedSharding(mesh, PartitionSpec("dp", "sp")))
    counts = [4 * count if transposed else count for count in counts]
    both = [make_inputs(2, count, 128, 256) for count in counts]
    target = Target(0, sum(counts) // 4, 4)

    def joined():
        into = None
        for first, (array, weight, bias), layer in zip((0, counts[0] // 4), both, (0, 2)):
            given = target._replace(first=first, into=into)
            into = linear(array, weight, bias[layer], layer, target=given, transpose_out=transposed)
        return into

    parts = [
        exact(array, weight[layer], bias[layer], False).reshape(2, 4, -1, 256)
        for (array, weight, bias), layer in zip(both, (0, 2))
    ]
    expected = np.concatenate(parts, axis=2).reshape(2, -1, 256)
    np.testing.assert_allclose(np.asarray(jax.jit(joined)(), float), expected, rtol=2**-8, atol=2e-3)


PROGRAMS = """
import dataclasses
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from wan_torchax.kernels.product import Linear
from wan_torchax.kernels.settings import Products

shapes = [(1, 77, 128), (1, 77, 384), (1, 77, 256), (256, 512), (256,)]
inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
spread = NamedSharding(mesh, PartitionSpec(None, "sp"))
settings = Products(kernel="pallas", rows=64, weights_mib=1, interpret=True)
for linear, tokens in (
    (Linear(settings, spread), 77), (Linear(dataclasses.replace(settings, ahead=True)), 128),
):
    given = [jax.ShapeDtypeStruct((1, tokens, one.shape[2]), one.dtype) for one in inputs[:3]]
    function = jax.jit(lambda a, b, c, *more: linear((a, b), *more, residual=c))
    print(function.trace(*given, *inputs[3:]).jaxpr)
"""


def test_every_process_makes_the_same_programs():
    """Else hosts of one mesh would run different ones, and programs kept from earlier runs would not be found."""
    made = set()
    for seed in "012":  # of Python's hashes: sets of strings have another order
        environment = os.environ | {"PYTHONHASHSEED": seed, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        command = [sys.executable, "-c", PROGRAMS]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        made.add(run.stdout)
    assert len(made) == 1 and "pallas_call" in made.pop()


def test_values_in_thirds_fill_the_mxu():
    """Of FLUX's 4,608 tokens: in halves they would overhang, or leave a half of it empty."""
    shapes = {"array": (1, 4608, 3072), "weight": (1, 3072, 3072)}
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    settings = Products(**make_config("products=pallas_ahead").products)
    assert product.block_sizes(structs, settings, transpose_out=True) == (768, 1536)
    assert product.parts_of(768, True) == 3 and product.parts_of(1024, True) == product.parts_of(1152, False) == 2
    assert product.block_sizes(structs, settings, transpose_in=True) == (1152, 1536)
    array, weight, bias = make_inputs(1, 1536, 128, 256)
    out = Linear(replace(SMALL, rows=800))(array, weight[0], bias[0], transpose_out=True)
    np.testing.assert_allclose(np.asarray(out, float), exact(array, weight[0], bias[0], False), rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("products, dtype, tokens, sizes", [
    ("pallas", "bfloat16", 18944, (1024, 1280)), ("pallas_int8", "int8", 18944, (1024, 1280)),
    ("pallas_int8", "bfloat16", 18944, (1024, 768)), ("pallas_v7x", "bfloat16", 8448, (512, 1024)),
])
def test_thirds_must_save_more_than_they_cost_and_blocks_stay_within_the_settings(products, dtype, tokens, sizes):
    """Values of a 720p video would take 3 % longer in thirds of 768 tokens, in eight bits 5 %."""
    structs = {"array": jax.ShapeDtypeStruct((1, tokens, 5120), jnp.bfloat16)}
    structs["weight"] = jax.ShapeDtypeStruct((1, 5120, 5120), dtype)
    settings = Products(**make_config(f"products={products}").products)
    assert product.block_sizes(structs, settings, transpose_out=True) == sizes


@pytest.mark.parametrize("count, most, multiple, size", [
    (9472, 1184, 32, 1184), (4096, 1184, 32, 1024), (13824, 1638, 256, 1536), (5120, 1638, 256, 1280),
    (5120, 606, 256, 512), (1, 1184, 32, 32), (300, 100, 256, 256),
])
def test_blocks_are_even(count, most, multiple, size):
    assert product.evenly(count, most, multiple) == size


def test_it_lowers_for_tpu():
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    shapes, whole = ((1, 9472, 5120), (40, 13824, 5120), (13824,)), NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in shapes]
    settings = Products(**make_config("products=pallas").products)
    with jax.sharding.use_abstract_mesh(mesh):
        function = jax.jit(lambda *arrays: Linear(settings)(*arrays, 7, gelu=True))
        text = jax.export.export(function, platforms=["tpu"])(*arrays).mlir_module()
    assert text.count("tpu_custom_call") == 1 and "40x13824x5120" in text


@pytest.mark.parametrize("sharding, stack", [
    pytest.param("sequence", False, marks=pytest.mark.system), ("tokens", True),
])
def test_a_step_has_eight_of_them_a_block(sharding, stack):
    """Read from the stack where every device holds all weights, else from what was gathered. The first block, which the
    prompts share, stands apart from the loop."""
    overrides = f"sharding={sharding}", "products=pallas", "mesh.axes={dp:1,sp:8,tp:1}"
    resolved = plan.describe(make_config(*PLAN, *overrides))
    with jax.sharding.use_abstract_mesh(resolved.mesh):
        text = build(resolved, "denoise").programs.lower(platforms=("tpu",))["step"].as_text()
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line and "product_kernel" in line]
    assert len(calls) == 2 * 8
    assert all(("tensor<40x" in line) == stack for line in calls)


@pytest.mark.system
def test_nothing_is_copied_around_the_all_to_alls():
    """Where kernels of linear layers fetch ahead: values come in parts, and outputs go in pieces."""
    resolved = plan.describe(make_config("preset=t2v_14b_720p_v6e8_v5", "task=plan", "plan.compiler=none"))
    with jax.sharding.use_abstract_mesh(resolved.mesh):
        text = build(resolved, "denoise").programs.lower(platforms=("tpu",))["step"].as_text()
    assert "fast_kernel" in text and "tensor<148x1x1024x512xbf16>" in text and "copy_kernel" not in text


@pytest.mark.system
@pytest.mark.parametrize("placed", [
    pytest.param(["mesh.axes.tp=1"], id="one"),
    pytest.param(
        ["mesh=cpu_8", "sharding=sequence", "mesh.axes={dp:2,sp:4,tp:1}"], id="sequence", marks=pytest.mark.full
    ),
    pytest.param(["mesh=cpu_8", "sharding=tokens", "mesh.axes={dp:1,sp:8,tp:1}"], id="tokens", marks=pytest.mark.full),
])
def test_a_video_is_as_close_to_float32_as_with_xla(two_layers, cache, placed):
    """On one device the prompts share the first block."""
    tiny = [override for override in two_layers if not override.startswith("mesh")]
    kernel = "products=pallas", "products.interpret=true"

    def latents(*overrides):
        config = make_config(*tiny, cache, *placed, "steps=2", *overrides)
        validate(config)
        session = Session()
        resolved = session.resolve(config, ["text", "denoise"])
        return session.run(resolved, ["text", "denoise"], resolved.inputs())["latents"]

    reference = latents()
    xla, pallas = (latents("model.dtype.transformer=bfloat16", *overrides) for overrides in ((), kernel))
    errors = [np.linalg.norm(found - reference) for found in (xla, pallas)]
    assert 0 < errors[1] < 1.2 * errors[0]
    assert np.abs(xla - pallas).max() > 0  # it was another program


@pytest.mark.parametrize("overrides, layers", [
    (["products=xla"], (0, 0)), (["products=pallas"], (40, 0)), (["products=pallas_int8", "precision=int8"], (5, 35)),
])
def test_plans_count_them(overrides, layers):
    compiled = {"cycles_by_group": {}, "timeline": [], "kernel_bytes": {"norms": 1640e9}}
    compiled |= {"product_calls": [], "launches": 0}
    report = {"compiler": {"denoise": compiled}, "chips": 8, "axes": {}}
    resolved = resolve_there(*PLAN, "sharding=sequence", *overrides, "mesh.axes={dp:2,sp:4,tp:1}")
    parts = plan.estimate(resolved, report | {"flops_per_step": Denoise.flops(resolved)})["parts"]["low"]
    chip, peak = resolved.config.mesh.chip, 8 * 918e12
    transposed, layer = (2 * 32_760 * flops / peak for flops in (3 * 2 * 5120**2, 3 * 2 * 5120**2 + 4 * 5120 * 13824))
    expected = {
        "product kernel": layers[0] * layer / chip.product_share,
        "product kernel, transposed": layers[0] * transposed / chip.transposed_product_share,
        "product kernel, int8": layers[1] * layer / chip.int8_product_share,
        "product kernel, int8 transposed": layers[1] * transposed / chip.int8_transposed_product_share,
        "norms": 1,
    }
    assert {name: parts.get(name, 0) for name in expected} == pytest.approx(expected)


def test_devices_that_it_does_not_serve_are_told_before_weights_load():
    with pytest.raises(ConfigError, match="a kernel for TPUs, and mesh=auto has none; use products=xla"):
        resolve_here("products=pallas", "model.dtype.transformer=bfloat16")


WAN = "products=pallas", "model=wan21_t2v_14b", "resolution=480p"


@pytest.mark.parametrize("overrides, message", [
    (["products.kernel=cuda"], "products.kernel=cuda: "),
    (["products=pallas", "mesh=cpu_8"], "products.kernel=pallas: a kernel for TPUs, and mesh=cpu_8 has none"),
    ([*WAN, "model.dtype.transformer=float32"], "takes bfloat16"),
    ([*WAN, "mesh=v6e_8", "sharding=tp"], "sharding=tp cuts them with the heads"),
    (["products=pallas", "products.rows=0"], "products.rows=0: at least 32"),
    ([*WAN, "products=pallas_ahead", "products.vmem_mib=56", "mesh=v5p_8", "sharding=tokens"],
     "products.ahead=true: one of the two cores of a TPU v5 would do nothing"),
])
def test_what_cannot_be_is_said_before(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config(*overrides))
