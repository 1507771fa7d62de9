"""HunyuanVideo 1.5's weights and adapters in the names of others: each ends up where diffusers has it."""
import json
from pathlib import Path

import diffusers
import numpy
import pytest
import torch
from safetensors.torch import save_file

from tests import hunyuan15
from tests.conftest import make_config, results, run_into
from tests.denoisers import mesh_of
from wan_torchax.config.schema import ConfigError
from wan_torchax.models.family import Rows
from wan_torchax.models.hunyuan15 import FAMILY
from wan_torchax.models.hunyuan15.adapters import BLOCK, REFINER, REST
from wan_torchax.runtime import adapters, weights

SPEC = FAMILY.components["transformer"]
# Spellings that the original does not have.
COMFYUI = (".qkv", ".lin", "_mlp.0", "_mlp.2", "_attn.proj", "query_norm", "key_norm", "_layer")


@pytest.fixture(scope="module")
def module():
    return hunyuan15.transformer(use_meanflow=True)


@pytest.fixture(scope="module")
def specs(module):
    return weights.array_specs(module, SPEC, {}, weights.Layout(mesh_of(tp=1)), "float32")


def load(specs, folder, changes=None):
    arrays = weights.load(specs, folder, lambda count: None, SPEC, changes or {})
    return {name: numpy.asarray(array) for name, array in arrays.items()}


def original(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The transformer's parameters as the original repository stores them."""
    made = {}
    lists = [("double_blocks", "transformer_blocks", 3, BLOCK),
             ("txt_in.individual_token_refiner.blocks", "context_embedder.token_refiner.refiner_blocks", 2, REFINER)]
    names = {f"{old}.{number}.{name}": (f"{new}.{number}.", theirs) for old, new, count, table in lists
             for number in range(count) for name, theirs in table.items() if not name.endswith(COMFYUI)}
    names |= {name: ("", theirs) for name, theirs in REST.items() if not name.endswith(COMFYUI)}
    for name, (start, theirs) in names.items():
        rows = theirs if isinstance(theirs, Rows) else Rows((theirs,))
        for end in ("weight", "bias"):
            if f"{start}{rows.names[0]}.{end}" in state:
                tensor = torch.cat([state[f"{start}{part}.{end}"] for part in rows.names])
                made[f"{name}.{end}"] = torch.cat(tensor.chunk(2)[::-1]) if rows.swapped else tensor
    return made


@pytest.mark.system
def test_the_transformer_may_be_one_file_anywhere(tmp_path):
    """As LightX2V publishes its four steps: in the original's names, without a config.json beside it."""
    size = ["resolution.height=48", "resolution.width=64", "resolution.frames=5"]
    overrides = [*hunyuan15.model(), "prompt=a cat", *size, "steps=2", "stages=[text,denoise]"]
    folder = Path(make_config(*overrides).model.path)
    module = diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(folder / "transformer")
    file = tmp_path / "four_steps.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in original(module.state_dict()).items()}, file)
    expected, made = (
        results(run_into(tmp_path / name, *overrides, *more))["latents"]
        for name, more in (("folder", []), ("file", [f"model.transformer={file}"]))
    )
    numpy.testing.assert_array_equal(made, expected)


def test_a_checkpoint_in_the_original_names_is_the_same(module, specs, tmp_path):
    for name, state in (("ours", module.state_dict()), ("theirs", original(module.state_dict()))):
        (tmp_path / name).mkdir()
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / name / "a.safetensors")
        weights.check(specs, tmp_path / name, (), SPEC)
    ours, theirs = (load(specs, tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(numpy.array_equal(ours[name], theirs[name]) for name in ours)


def pair(outputs: int, inputs: int, rank: int = 2):
    return torch.randn(outputs, rank), torch.randn(rank, inputs)


QUERY, HEAD = "transformer_blocks.1.attn.to_q.weight", "norm_out.linear.weight"
FORMATS = {  # a key without its end, those ends, alpha in the file, and what the rows are of
    "diffusers": ("transformer.transformer_blocks.1.attn.to_q", "lora_A lora_B", None, (QUERY,)),
    "PEFT": ("double_blocks.1.img_attn_q", "lora_A lora_B", "metadata", (QUERY,)),
    "PEFT, the head": ("final_layer.adaLN_modulation.1", "lora_A lora_B", None, (HEAD,)),
    "musubi-tuner": ("lora_unet_double_blocks_1_txt_mlp_fc1", "lora_down lora_up", "tensor",
                     ("transformer_blocks.1.ff_context.net.0.proj.weight",)),
    "musubi-tuner, the refiner": (
        "lora_unet_txt_in_individual_token_refiner_blocks_1_self_attn_qkv", "lora_down lora_up", "tensor",
        tuple(f"context_embedder.token_refiner.refiner_blocks.1.attn.to_{part}.weight" for part in "qkv"),
    ),
    "ComfyUI": ("diffusion_model.double_blocks.1.txt_attn.qkv", "lora_down lora_up", "tensor",
                tuple(f"transformer_blocks.1.attn.add_{part}_proj.weight" for part in "qkv")),
    "ComfyUI, underscores": ("lora_unet_double_blocks_1_img_attn_qkv", "lora_down lora_up", "tensor",
                             tuple(f"transformer_blocks.1.attn.to_{part}.weight" for part in "qkv")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_an_adapter_is_added_where_it_belongs(module, specs, tmp_path, name):
    key, ends, alpha, places = FORMATS[name]
    torch.manual_seed(0)
    state = module.state_dict()
    rows, inputs = state[places[0]].shape
    up, down = pair(rows * len(places), inputs)
    tensors = {f"{key}.{end}.weight": tensor for end, tensor in zip(ends.split(), (down, up))}
    tensors |= {f"{key}.alpha": torch.tensor(1.0)} if alpha == "tensor" else {}
    settings = {"lora_adapter_metadata": json.dumps({"lora_alpha": 1, "r": 2})} if alpha == "metadata" else None
    file = tmp_path / "adapter.safetensors"
    save_file(tensors, file, settings)
    (tmp_path / "model").mkdir()
    save_file(state, tmp_path / "model" / "a.safetensors")
    given = (adapters.File("x", file, "", 0.5, False),)
    made = load(specs, tmp_path / "model", adapters.place(given, weights.source_shapes(specs), FAMILY))
    added = (up @ down) * (0.25 if alpha else 0.5)
    if places == (HEAD,):
        added = torch.cat(added.chunk(2)[::-1])
    before = load(specs, tmp_path / "model")
    for place, part in zip(places, added.chunk(len(places))):
        array = place.replace("blocks.1.", "blocks.*.") if place.startswith("transformer_blocks") else place
        difference = made[array] - before[array]
        difference = difference[1] if ".*." in array else difference
        numpy.testing.assert_allclose(difference, part.numpy(), atol=1e-5)
    changed = {name for name in made if not numpy.array_equal(made[name], before[name])}
    assert len(changed) == len(places)


def test_fused_rows_that_do_not_split_are_refused(specs, tmp_path):
    up, down = pair(100, 128)
    key = "diffusion_model.double_blocks.0.img_attn.qkv"
    save_file({f"{key}.lora_up.weight": up, f"{key}.lora_down.weight": down}, tmp_path / "x.safetensors")
    given = (adapters.File("x", tmp_path / "x.safetensors", "", 1.0, False),)
    with pytest.raises(ConfigError, match=r"qkv.lora_up.weight: 100 outputs, the model's layers have 384"):
        adapters.place(given, weights.source_shapes(specs), FAMILY)
