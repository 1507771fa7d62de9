"""Adapters of every trainer, merged while weights load: as diffusers fuses them, or as the formula says."""
import json

import diffusers
import jax
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import lora, tiny
from tests.conftest import SMALL, make_config
from tests.test_parity import NEGATIVE, PROMPT, TEXTS, psnr, results
from wan_torchax.config import jobs, trust
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.session import Session, session
from wan_torchax.tasks.generate import generate as generate_into

DIFFS = ("blocks.1.norm2.weight", "blocks.0.norm2.bias", "blocks.0.attn1.norm_q.weight", "blocks.1.scale_shift_table",
         "blocks.0.ffn.net.2.bias", "patch_embedding.weight", "patch_embedding.bias", "scale_shift_table",
         "condition_embedder.time_proj.bias", "proj_out.bias")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", experts=2)


@pytest.fixture(scope="module")
def weights(checkpoint):
    """The transformer's, as they are stored."""
    return load_file(checkpoint / "transformer" / "diffusion_pytorch_model.safetensors")


def loaded(*overrides, component="transformer"):
    """A component's arrays by checkpoint name, float32, after loading them in a session of their own."""
    config = make_config(*SMALL, *overrides)
    validate(config)
    own = Session()
    resolved = own.resolve(config, ["denoise"])
    own.build(resolved, ["denoise"])
    part = own.components[component]
    part.check()
    part.load(part.tensors, lambda event: None)
    arrays = {}
    for name, tensor in part.tensors.items():
        value = numpy.asarray(part.arrays[name]).astype("float32")
        arrays |= dict(zip(tensor.sources, value if tensor.stacked else [value]))
    return arrays


def assert_merged(arrays, weights, changes, within=1e-5):
    """Each tensor is the checkpoint's with what is added; relative to the tensor's largest number."""
    for name, array in arrays.items():
        expected = weights[name].double() + sum(change.double() for change in changes.get(name, ()))
        error = numpy.abs(array - expected.numpy()).max() / expected.abs().max()
        assert error < within, (name, error)


def adapter(name, path, **rest):
    row = ", ".join(f"{key}: {value}" for key, value in {"path": path, **rest}.items())
    return f"adapter.{name}={{{row}}}"


@pytest.mark.parametrize("name", lora.FORMATS)
def test_every_format_is_the_formula(checkpoint, weights, tmp_path, name):
    """Two ranks, an alpha that is neither, and differences of norms, biases, modulations and the patch embedding."""
    learned = lora.Learned(weights).differ(weights, *DIFFS)
    file = learned.save(tmp_path / "x.safetensors", **lora.FORMATS[name])
    arrays = loaded(*tiny.overrides(checkpoint), adapter("style", file, strength=0.7))
    assert_merged(arrays, weights, {key: [0.7 * value] for key, value in learned.changes().items()})


# ---------------------------------------------------------------- as diffusers fuses them


def fused(folder, *files, component="transformer", strengths=(1.0,)):
    """diffusers' own: a pipeline whose transformer has these adapters fused into it."""
    transformer = diffusers.WanTransformer3DModel.from_pretrained(folder / component)
    names, pipeline = [], diffusers.WanPipeline.from_pretrained(folder, transformer=transformer, transformer_2=None)
    for number, file in enumerate(files):
        names.append(f"adapter{number}")
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=names[-1])
    pipeline.set_adapters(names, list(strengths))
    pipeline.fuse_lora(components=["transformer"], adapter_names=names)
    pipeline.unload_lora_weights()
    return pipeline


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("single") / "model")


METADATA = {"lora_adapter_metadata": json.dumps({
    "transformer.r": 2, "transformer.lora_alpha": 6, "transformer.rank_pattern": {"attn1.to_q": 4, "attn1.to_k": 4,
    "attn1.to_v": 4, "attn1.to_out.0": 4}, "transformer.target_modules": ["to_q", "to_k", "to_v", "to_out.0", "proj", "net.2"],
})}
THEIRS = {  # what diffusers loads: no modulations, no patch embedding, of biases those beside low-rank factors
    "diffusers": (dict(alpha=None, top=False), dict(lora.FORMATS["diffusers"]), ()),
    "ComfyUI": (dict(top=False), lora.FORMATS["ComfyUI"], ("blocks.0.ffn.net.2.bias", "blocks.1.attn1.to_q.bias")),
    "ai-toolkit": (dict(top=False), lora.FORMATS["ai-toolkit"], ()),
    "musubi": (dict(top=False), lora.FORMATS["musubi"], ()),
}


@pytest.mark.parametrize("name", THEIRS)
def test_formats_that_diffusers_knows_are_fused_as_there(single, tmp_path, name):
    weights = load_file(single / "transformer" / "diffusion_pytorch_model.safetensors")
    settings, form, diffs = THEIRS[name]
    file = lora.Learned(weights, **settings).differ(weights, *diffs).save(tmp_path / "x.safetensors", **form)
    theirs = fused(single, file).transformer.state_dict()
    assert any((theirs[key] - weights[key]).abs().max() > 0.01 for key in weights)
    assert_merged(loaded(*tiny.overrides(single), adapter("style", file)), theirs, {})
