"""Eight bits: weights are rounded as the formula says, where conf/precision says, and what cannot be is told."""
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.conftest import SMALL, make_config
from tests.test_plan import make as make_plan
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import float8_problems, validate
from wan_torchax.kernels import quantized
from wan_torchax.runtime.components import Component
from wan_torchax.session import Session

FIVE = {"num_layers": 5}
ENDS = "precision.first=1", "precision.last=2"  # blocks 1 and 2 have eight bits
LAYERS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_q", "attn2.to_k", "attn2.to_v",
          "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2")
NAMES = [f"blocks.{block}.{layer}.weight" for block in (1, 2) for layer in LAYERS]
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", **FIVE)


def resolved_with(checkpoint, *overrides):
    config = make_config(*SMALL, *tiny.overrides(checkpoint, **FIVE), "steps=2", *overrides)
    validate(config)
    session = Session()
    return session, session.resolve(config, ["text", "denoise"])


def latents(checkpoint, *overrides):
    session, resolved = resolved_with(checkpoint, *overrides)
    return session.run(resolved, ["text", "denoise"], resolved.inputs())["latents"]


def rounded(weight, dtype):
    """In torch, row by row."""
    largest = {"int8": 127, "float8_e4m3fn": 448}[dtype]
    scale = weight.float().abs().amax(1, keepdim=True) / largest
    values = (weight / scale).round() if dtype == "int8" else (weight / scale).to(torch.float8_e4m3fn).float()
    return values * scale


def relative(found, expected):
    return np.linalg.norm(np.asarray(found, float) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("dtype, activations, most", [
    ("int8", False, 0.01), ("int8", True, 0.015), ("float8_e4m3fn", False, 0.04), ("float8_e4m3fn", True, 0.055),
])
def test_a_linear_layer_is_as_exact_as_eight_bits_are(dtype, activations, most):
    generator = np.random.default_rng(0)
    array, weight, bias = (generator.normal(size=shape) for shape in ((2, 37, 200), (90, 200), (90,)))
    array[0, 3] = 0  # a row of nothing
    array[1, 5] *= 1e6  # a scale of its own
    weight[7] *= 1e-4
    values, scale = quantized.quantize(jnp.asarray(weight), dtype)
    assert values.dtype == dtype and scale.shape == (90,)
    out = quantized.linear(jnp.asarray(array, jnp.float32), values, scale, jnp.asarray(bias), activations)
    expected = array @ weight.T + bias
    for token in np.ndindex(2, 37):
        assert relative(out[token], expected[token]) < most
    np.testing.assert_allclose(out[0, 3], bias, rtol=1e-6)


@pytest.mark.system
@pytest.mark.parametrize("placed", [
    pytest.param(["mesh.axes.tp=1"], id="one"),
    pytest.param(["mesh.axes.tp=1", "guidance=sequential"], id="sequential", marks=pytest.mark.full),
    pytest.param(["mesh=cpu_8", "sharding=tp", "mesh.axes={dp:2,sp:1,tp:4}"], id="tp"),
    pytest.param(
        ["mesh=cpu_8", "sharding=sequence", "mesh.axes={dp:2,sp:4,tp:1}"], id="sequence", marks=pytest.mark.full
    ),
])
def test_weights_of_eight_bits_are_the_model_with_rounded_weights(checkpoint, tmp_path, cache, placed):
    """In the blocks between the ends, and nowhere else."""
    folder = tmp_path / "rounded"
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "transformer" / FILE)
    save_file(weights | {name: rounded(weights[name], "int8") for name in NAMES}, folder / "transformer" / FILE)
    ours = latents(checkpoint, cache, *placed, "precision=int8_weights", *ENDS)
    expected, exact = (latents(model, cache, *placed) for model in (folder, checkpoint))
    assert relative(ours, expected) < 1e-5 < relative(ours, exact) < 0.01


@pytest.mark.parametrize("mode, most", [("int8", 0.02), pytest.param("fp8", 0.06, marks=pytest.mark.system)])
def test_activations_of_eight_bits_stay_close(checkpoint, cache, mode, most):
    exact, ours = latents(checkpoint, cache), latents(checkpoint, cache, f"precision={mode}", *ENDS)
    assert 1e-4 < relative(ours, exact) < most


@pytest.mark.system
@pytest.mark.parametrize("placed", [
    pytest.param(["mesh.axes.tp=1"], id="one"),
    pytest.param(
        ["mesh=cpu_8", "sharding=sequence", "mesh.axes={dp:2,sp:4,tp:1}"], id="gathered", marks=pytest.mark.full
    ),
    pytest.param(
        ["mesh=cpu_8", "sharding=tokens", "mesh.axes={dp:1,sp:8,tp:1}"], id="from the stack", marks=pytest.mark.full
    ),
])
def test_the_kernel_for_tpus_takes_int8_too(checkpoint, cache, placed):
    """In blocks between the ends; those at the ends have it in bfloat16, from stacks that hold them alone."""
    exact = latents(checkpoint, cache, *placed)
    modes = "model.dtype.transformer=bfloat16", "precision=int8", *ENDS
    xla = latents(checkpoint, cache, *placed, *modes)
    pallas = latents(checkpoint, cache, *placed, *modes, "products=pallas_int8", "products.interpret=true")
    assert 0 < relative(pallas, exact) < 1.3 * relative(xla, exact)
    assert np.abs(xla - pallas).max() > 0  # it was another program


@pytest.mark.parametrize("ends", [(0, 0), (0, 3), (4, 0)])
def test_any_blocks_can_be_left_out(checkpoint, cache, ends):
    first, last = ends
    session, resolved = resolved_with(
        checkpoint, "precision=int8_weights", f"precision.first={first}", f"precision.last={last}"
    )
    component = Component("transformer", resolved)
    tensors = {name: tensor for name, tensor in component.specs.items() if "attn1.to_q." in name}
    sources = {name.rpartition(".")[2]: tensor.sources for name, tensor in tensors.items()}
    small = range(first, 5 - last)
    assert sources["quantized"] == [f"blocks.{block}.attn1.to_q.weight" for block in small]
    kept = [f"blocks.{block}.attn1.to_q.weight" for block in range(5) if block not in small]
    assert sources.get("weight", []) == kept and sources["scale"] == []
    assert np.isfinite(session.run(resolved, ["text", "denoise"], resolved.inputs())["latents"]).all()


@pytest.mark.parametrize("mode, dtype", [("fp8", "float8_e4m3fn"), ("int8", "int8")])
def test_what_is_loaded_is_rounded_once_after_adapters(checkpoint, tmp_path, mode, dtype):
    """From the checkpoint's numbers, not from bfloat16, and with a scale for each row."""
    weights = load_file(checkpoint / "transformer" / FILE)
    down, up = torch.randn(4, 128), torch.randn(128, 4)
    save_file({
        "transformer.blocks.1.attn1.to_q.lora_A.weight": down, "transformer.blocks.1.attn1.to_q.lora_B.weight": up,
    }, tmp_path / "style.safetensors")
    adapted = f"adapter.style={{path: {tmp_path / 'style.safetensors'}, strength: 0.5}}"
    dtypes = "model.dtype.transformer=bfloat16", f"precision={mode}"
    session, resolved = resolved_with(checkpoint, *dtypes, *ENDS, adapted)
    session.build(resolved, ["denoise"])
    component = session.components["transformer"]
    component.check()
    component.load(component.specs, lambda event: None)
    weights["blocks.1.attn1.to_q.weight"] += 0.5 * up @ down
    for layer in LAYERS:
        name = f"blocks.*.{layer}"
        values, scale, kept = (
            np.asarray(component.arrays[f"{name}.{part}"]).astype("float32")
            for part in ("quantized", "scale", "weight")
        )
        assert str(component.specs[f"{name}.quantized"].dtype) == dtype
        for place, block in enumerate((1, 2)):
            expected = rounded(weights[f"blocks.{block}.{layer}.weight"], dtype).numpy()
            step = scale[place][:, None] * (1 if dtype == "int8" else 32)  # of the largest numbers
            differences = np.abs(values[place] * scale[place][:, None] - expected)
            assert (differences <= 1.001 * step).all() and (differences > 1e-6).mean() < 1e-3  # ties alone
        assert kept.shape[0] == 3 and relative(kept[0], weights[f"blocks.0.{layer}.weight"].numpy()) < 2**-8


@pytest.mark.full
def test_a_14b_fits_24_gb_in_eight_bits(tmp_path):
    card = "model=wan21_t2v_14b", "resolution=480p", "mesh=gpu_1", "attention=cudnn", "mesh.chip.hbm_gib=24"
    fits = {mode: make_plan(tmp_path, *card, f"precision={mode}")["fits"] for mode in ("none", "fp8", "int8_weights")}
    assert fits == {"none": False, "fp8": True, "int8_weights": True}


WAN = "model=wan21_t2v_14b", "resolution=480p"
REFUSED = {
    ("precision.weights=int4",): "precision.weights=int4: ",
    ("precision.activations=true",): "precision.activations=true: only with weights of eight bits",
    ("precision=fp8", "precision.first=-1"): "precision.first=-1: a number of blocks; 0 is none",
    ("precision=int8", "precision.layers=[attention]"): "precision.layers=attention: unknown; nearest: attention_in",
    # Neither blocks' own layers nor ones that are computed for each block.
    ("precision=int8", "precision.layers=[attention_in,face_in]"): "precision.layers=face_in: unknown",
    ("precision=int8", "model=hunyuan15_t2v_480p", "precision.layers=[modulation]"): "precision.layers=modulation: ",
    ("precision=int8_weights", "products=pallas", "mesh=v6e_8", "sharding=sequence"): "pallas rounds activations too",
    ("precision=fp8", "mesh=v6e_8"): "precision=fp8: TPU v6 lite multiplies no float8; use precision=int8 (TPUs)",
    ("precision=int8", "model=wan21_vace_14b", "pipeline=vace"): "control blocks (VACE) are not in it yet",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_cannot_be_is_told_first(overrides):
    with pytest.raises(ConfigError) as error:
        validate(make_config(*WAN, *overrides))
    assert REFUSED[overrides] in str(error.value)


@pytest.mark.parametrize("kind, told", [
    ("NVIDIA A100-SXM4-80GB", True), ("NVIDIA A10G", True), ("Tesla T4", True), ("NVIDIA GeForce RTX 3090", True),
    ("NVIDIA H100 80GB HBM3", False), ("NVIDIA GeForce RTX 4090", False), ("NVIDIA L4", False), ("TPU7x", False),
    ("NVIDIA RTX A6000", True), ("NVIDIA RTX 6000 Ada Generation", False), ("TPU v5 lite", True), ("cpu", False),
])
def test_devices_without_float8_are_told(kind, told):
    assert bool(list(float8_problems(make_config("precision=fp8"), kind))) == told


@pytest.mark.parametrize("override, message", [
    ("model.quantized=[embedding]", "precision.layers: embedding is no rule for linear layers of the blocks"),
    ("precision.first=3", "precision.first=3 and last=2 leave none of 5 blocks"),
])
def test_layers_that_the_model_has_not_are_told_before_weights_load(checkpoint, override, message):
    rule = "+model.weights.transformer.embedding={pattern: 'patch_embedding.weight', axes: []}"
    session, resolved = resolved_with(checkpoint, "precision=int8", *ENDS, rule, override)
    with pytest.raises(ConfigError, match=message):
        session.build(resolved, ["denoise"])


@pytest.mark.parametrize("precision, rows", [
    ([], 8), (["precision=fp8", *ENDS], 16), (["precision=int8_weights", *ENDS], 8),
])
def test_cublas_gets_whole_rows_of_tokens(checkpoint, precision, rows):
    """Else XLA pads, and so copies, the input of every product."""
    session, resolved = resolved_with(checkpoint, *precision)
    stage = session.build(resolved, ["denoise"])["denoise"]
    assert stage.forward(1).multiple == rows
