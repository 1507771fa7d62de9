"""torchax's lifetime, the op overrides and the model patches, each shown to be needed."""
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
from diffusers import AutoencoderKLWan

from tests.conftest import ROOT, make_config
from wan_torchax import patches
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.models.wan.vae import decode_chunk
from wan_torchax.patches import interop, torchax
from wan_torchax.runtime import ops

# ---------------------------------------------------------------- lifetime


def torch_is_itself():
    """Ordinary PyTorch: gradients, plain tensors, no modes, torchax's tables as shipped."""
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    environment = torchax.default_env()
    assert type(weight.grad) is torch.Tensor and weight.grad.tolist() == [2, 2, 2]
    assert torch.is_grad_enabled() and not environment.enabled
    assert torch.overrides._get_current_function_mode() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not any(op.is_user_defined for op in environment._ops.values())
    assert torchax.tensor.Tensor.type_as is not patches.type_as
    assert torch.backends.mha.get_fastpath_enabled()
    return True


def test_importing_changes_nothing():
    assert torch_is_itself()


def test_on_inside_off_outside():
    array = jnp.ones(3)
    with patches.torchax_on({torch.nn.functional.silu: lambda x, inplace: x * 0}):
        assert isinstance(interop.torch_view(array) + 1, torchax.tensor.Tensor)
        assert interop.jax_view(torch.nn.functional.silu(interop.torch_view(array))).sum() == 0
        assert not torch.is_grad_enabled()
    assert torch_is_itself()
    with pytest.raises(AssertionError, match="within the torchax environment"):
        interop.torch_view(array) + 1


def test_an_exception_leaves_it_off():
    with pytest.raises(ZeroDivisionError), patches.torchax_on({torch.nn.functional.silu: lambda x, inplace: x}):
        1 / 0  # noqa: B018
    assert torch_is_itself()


def test_nesting_is_safe():
    array = jnp.ones(3)
    with patches.torchax_on():
        with patches.torchax_on({torch.nn.functional.silu: lambda x, inplace: x * 0}):
            pass
        assert torchax.default_env().enabled
        assert interop.jax_view(torch.nn.functional.silu(interop.torch_view(array))).sum() > 0
    assert torch_is_itself()


def test_another_thread_does_not_notice():
    seen = []
    with patches.torchax_on():
        thread = threading.Thread(target=lambda: seen.append(type(torch.ones(2) + 1)))
        thread.start()
        thread.join()
    assert seen == [torch.Tensor]


# ---------------------------------------------------------------- op overrides


def traced(function, *arguments, overrides=None):
    def program(*arrays):
        with patches.torchax_on(overrides):
            return interop.jax_view(function(*interop.torch_view(arrays)))

    return jax.jit(program).lower(*arguments).as_text(), program(*arguments)


def shipped(name):
    row = make_config().ops[name]
    return {ops.find_op(name, row.op): ops.find_function(name, row.implementation, False)}


def test_upsampling_is_no_gather():
    image = jnp.arange(24.0).reshape(1, 2, 3, 4)
    upsample = torch.nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact")
    before, plain = traced(upsample, image)
    after, ours = traced(upsample, image, overrides=shipped("upsample"))
    assert "gather" in before and "gather" not in after
    numpy.testing.assert_array_equal(ours, plain)
    numpy.testing.assert_array_equal(ours, upsample(torch.tensor(numpy.asarray(image))).numpy())


@pytest.mark.parametrize("masked", [False, True])
def test_attention_holds_no_score_matrix(masked):
    tokens = 2600
    query, key, value = (jax.random.normal(jax.random.key(seed), (1, 2, tokens, 16)) for seed in range(3))
    mask = [jax.random.normal(jax.random.key(4), (1, 2, tokens, tokens))] if masked else []
    attention = torch.nn.functional.scaled_dot_product_attention
    before, _ = traced(attention, query, key, value, *mask)
    after, ours = traced(attention, query, key, value, *mask, overrides=shipped("attention"))
    expected = attention(*(torch.tensor(numpy.asarray(x)) for x in (query, key, value, *mask)))
    numpy.testing.assert_allclose(ours, expected.numpy(), atol=2e-6)
    assert f"{tokens}x{tokens}" in before
    assert masked or f"{tokens}x{tokens}" not in after


@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_is_torchs(affine):
    torch.manual_seed(0)
    tensors = [3 + 2 * torch.randn(2, 5, 64), *(torch.randn(2, 64) if affine else ())]

    def norm(array, *weights):
        return torch.nn.functional.layer_norm(array, (64,), *weights, eps=1e-6)

    _, ours = traced(norm, *(jnp.asarray(tensor.numpy()) for tensor in tensors), overrides=shipped("layer_norm"))
    numpy.testing.assert_allclose(ours, norm(*tensors).numpy(), atol=2e-6)


@pytest.mark.parametrize("ours", ["conv3d", "conv3d_gpu"])
@pytest.mark.parametrize(
    "kernel, stride, padding",
    [((3, 3, 3), 1, (0, 1, 1)), ((3, 1, 1), (2, 1, 1), 0), ((1, 2, 2), (1, 2, 2), 0)],
)
def test_convolutions_of_images_are_the_videos(kernel, stride, padding, ours):
    torch.manual_seed(0)
    video, weight, bias = torch.randn(2, 3, 5, 8, 8), torch.randn(4, 3, *kernel), torch.randn(4)
    expected = torch.nn.functional.conv3d(video, weight, bias, stride, padding)
    arrays = [jnp.asarray(tensor.numpy()) for tensor in (video, weight, bias)]
    _, made = traced(lambda *x: torch.nn.functional.conv3d(*x, stride, padding), *arrays, overrides=shipped(ours))
    numpy.testing.assert_allclose(made, expected.numpy(), atol=2e-5)


def row(op, implementation):
    return {"op": op, "implementation": implementation, "why": "a test"}


def test_overrides_follow_their_platform():
    table = make_config().ops
    assert torch.nn.functional.conv3d in ops.load_ops(table, "cpu", False)
    assert torch.nn.functional.conv3d not in ops.load_ops(table, "tpu", False)


@pytest.mark.parametrize(
    "bad, message",
    [
        (row("aten.gelo", "patches.type_as"), "torch has no such op; nearest: gelu"),
        (row("aten.gelu", "patches.type_a"), "no such function; nearest: type_as"),
        (row("aten.gelu", "patches.nothing.here"), "No module named"),
        (row("aten.gelu", "math.sin"), "set allow_external_ops=true"),
    ],
)
def test_bad_op_rows_are_told(bad, message):
    with pytest.raises(ConfigError, match=message):
        ops.load_ops({"mine": bad}, "cpu", False)


def test_an_op_is_added_from_the_command_line():
    added = (
        "+ops.mine={op: torch.nn.functional.silu, implementation: torch.nn.functional.relu, "
        "why: to see a difference}"
    )
    config = make_config(added, "allow_external_ops=true")
    validate(config)
    assert ops.load_ops(config.ops, "cpu", True)[torch.nn.functional.silu] is torch.nn.functional.relu


def test_external_ops_work_when_allowed():
    loaded = ops.load_ops({"mine": row("torch.nn.functional.silu", "torch.nn.functional.relu")}, "cpu", True)
    assert loaded == {torch.nn.functional.silu: torch.nn.functional.relu}


# ---------------------------------------------------------------- patches


def test_type_as_gives_a_new_tensor_of_the_new_dtype():
    array = jnp.ones(3, jnp.float32)
    with torchax.default_env():
        tensor, half = interop.torch_view(array), interop.torch_view(array.astype(jnp.bfloat16))
        tensor.type_as(half)
        assert tensor.dtype == torch.bfloat16, "torchax no longer casts in place: the patch can go"
    with patches.torchax_on():
        tensor = interop.torch_view(array)
        assert tensor.type_as(half).dtype == torch.bfloat16
        assert tensor.dtype == torch.float32


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_decoding_frame_by_frame_is_diffusers_decode(frames):
    """Against diffusers' own decode, with caches that start as None, "Rep" and short."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=8, num_res_blocks=1).eval()
    latents = torch.randn(1, 16, frames, 4, 4)
    chunks, caches = [], None
    with torch.no_grad():
        expected = vae.decode(latents).sample
        for index in range(frames):
            pixels, caches = decode_chunk(vae, latents[:, :, index : index + 1], caches)
            assert all(cache.shape[1] == 2 for cache in caches.values())
            chunks.append(pixels)
    assert torch.allclose(torch.cat(chunks, dim=2), expected, atol=1e-5)
    assert [chunk.shape[2] for chunk in chunks] == [1] + [4] * (frames - 1)


@pytest.mark.parametrize("name", ["all.dimname", "norm.names_ScalarOpt_dim", "std.correction_names"])
def test_overloads_that_torch_no_longer_has_stop_no_import(name):
    """torch 2.13 removed what torchax 0.0.13 lists."""
    source = Path(torchax.decompositions.__file__).read_text()
    assert f"aten.{name}" in source, "torchax no longer lists overloads for named dimensions: the patch can go"
    operator, overload = name.split(".")
    packet = getattr(torch.ops.aten, operator)
    shipped = type(packet).__getattr__

    def without(self, wanted):
        if wanted == overload:
            raise AttributeError(wanted)
        return shipped(self, wanted)

    packet.__dict__.pop(overload, None)  # a packet keeps what was asked for once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(packet), "__getattr__", without)
        with pytest.raises(AttributeError):
            getattr(packet, overload)
        with patches.overloads_of_old():
            assert getattr(packet, overload) == f"aten::{name}"
            with pytest.raises(AttributeError):
                packet.no_such_overload  # noqa: B018
        with pytest.raises(AttributeError):
            getattr(packet, overload)


@pytest.mark.system
def test_a_torch_xla_of_another_torch_is_not_imported(tmp_path):
    """As on Kaggle's and Colab's TPU machines; diffusers' pipelines import it where it is installed."""
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("_XLAC.so: undefined symbol")')
    (tmp_path / "torch_xla-2.9.0.dist-info").mkdir()
    (tmp_path / "torch_xla-2.9.0.dist-info/METADATA").write_text("Name: torch_xla\nVersion: 2.9.0\n")
    code = """
import sys, diffusers.utils
assert diffusers.utils.is_torch_xla_available()
import wan_torchax.models
from pathlib import Path
from wan_torchax.models import tokens
tokens.tokenize(Path("models/demo/tokenizer"), ["a red circle"], 20)
print("torch_xla" in sys.modules)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.stdout.strip() == "False", ran.stderr
