"""HunyuanVideo's, FLUX's and image encoders' single files: each loads as diffusers' folder does, and is recognized."""
import fnmatch
import re

import jax
import numpy
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file, save_file

from tests import flux, flux2, hunyuan15, tiny
from tests.conftest import ROOT, make_config, results, run_into
from tests.test_files import FITS, eight_bits, flux_in_its_own_names, same, write_landmarks
from tests.test_hunyuan15_names import original
from wan_torchax.config.registry import FAMILIES, load
from wan_torchax.config.schema import ConfigError
from wan_torchax.models import qwen
from wan_torchax.models.flux2 import adapters as flux2_names
from wan_torchax.runtime import recognition, weights
from wan_torchax.runtime.checkpoint import read_architecture
from wan_torchax.tasks import inspection

# ---------------------------------------------------------------- names


def replaced(state, *pairs):
    """The state, each name with the first of a pair's pattern replaced by its second."""
    named = {}
    for name, tensor in state.items():
        for pattern, theirs in pairs:
            name = re.sub(pattern, theirs, name)
        named[name] = tensor.contiguous()
    return named


def hunyuan_in_comfyuis_names(state):
    """As ComfyUI renames the original's, and with queries, keys and values in one layer."""
    theirs = original(state)
    for stream in ("img", "txt"):
        for name in [name for name in theirs if f"{stream}_attn_q." in name]:
            parts = [theirs.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            theirs[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)
    return replaced(
        theirs, ("_mod.linear", "_mod.lin"), ("_attn_qkv", "_attn.qkv"), ("mlp.fc1", "mlp.0"), ("mlp.fc2", "mlp.2"),
        ("_attn_q_norm.weight", "_attn.norm.query_norm.scale"), ("_attn_k_norm.weight", "_attn.norm.key_norm.scale"),
        ("_attn_proj", "_attn.proj"), (r"(_in|t_embedder)\.mlp\.0", r"\1.in_layer"), ("^", "model.model."),
        (r"(_in|t_embedder)\.mlp\.2", r"\1.out_layer"), ("c_embedder.linear_1", "c_embedder.in_layer"),
        ("c_embedder.linear_2", "c_embedder.out_layer"),
    )


def hunyuans_vae_in_its_own_names(state):
    return replaced(
        state, (r"mid_block\.resnets\.0", "mid.block_1"), (r"mid_block\.resnets\.1", "mid.block_2"),
        (r"mid_block\.attentions\.0\.to_", "mid.attn_1."), (r"mid_block\.attentions\.0", "mid.attn_1"),
        (r"(down|up)_blocks\.(\d)\.resnets", r"\1.\2.block"),
        (r"(down|up)_blocks\.(\d)\.\1samplers\.0", r"\1.\2.\1sample"),
    )


def qwen_of(style):
    def rename(state):
        plain = {name.removeprefix("model."): tensor for name, tensor in state.items() if "lm_head" not in name}
        head = {"lm_head.weight": plain["embed_tokens.weight"].clone()}
        if style == "llama.cpp":
            back = {theirs: name for name, theirs in (qwen.LAYER | qwen.REST).items()}
            return {re.sub(r"^layers\.", "blk.", re.sub(r"(embed_tokens|lm_head|norm|(?<=\d\.)[\w.]+)(?=\.\w+$)",
                    lambda found: back[found[0]], name)): tensor for name, tensor in (plain | head).items()}
        start = {"ComfyUI": "model.", "transformers": "model.language_model."}[style]
        seeing = {f"{'visual' if style == 'ComfyUI' else 'model.visual'}.blocks.0.norm1.weight": torch.ones(3)}
        return {f"{start}{name}": tensor for name, tensor in plain.items()} | head | seeing

    return rename


def with_more(prefix, more):
    """With a prefix, and with tensors that are not needed."""
    return lambda state: {f"{prefix}{name.removeprefix(prefix)}": tensor for name, tensor in state.items()} | {
        name: torch.zeros(shape) for name, shape in more.items()}


def t5_of_comfyui(state):
    more = {"encoder.embed_tokens.weight": state["shared.weight"].clone(), "spiece_model": torch.zeros(7).byte()}
    return state | more


def flux2_in_its_own_names(state):
    theirs = flux_in_its_own_names(state, flux2_names)
    converted = single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers(dict(theirs))
    assert converted.keys() == state.keys() and all(torch.equal(converted[name], state[name]) for name in state)
    return {f"model.diffusion_model.{name}": tensor for name, tensor in theirs.items()}


def flux2s_vae_in_its_own_names(state):
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    return replaced(
        state, (r"^quant_conv", "encoder.quant_conv"), (r"^post_quant_conv", "decoder.post_quant_conv"),
        (r"conv_norm_out", "norm_out"), (r"conv_shortcut", "nin_shortcut"), (r"mid_block\.resnets\.0", "mid.block_1"),
        (r"mid_block\.resnets\.1", "mid.block_2"), (r"down_blocks", "down"),
        *((rf"up_blocks\.{number}", f"up.{3 - number}") for number in range(4)), ("resnets", "block"),
        (r"(down|up)samplers\.0", r"\1sample"),
        *((rf"mid_block\.attentions\.0\.{ours}\.", f"mid.attn_1.{theirs}.") for ours, theirs in attention.items()),
    )


WAN = "wan", tiny.checkpoint, tiny.model, "seen"
HUNYUAN = "hunyuan15", lambda kind: hunyuan15.checkpoint(), hunyuan15.model, "hunyuan15_i2v_480p"
FLUX = "flux", flux.checkpoint, flux.model, "dev"
FLUX2 = "flux2", lambda kind: flux2.checkpoint(), lambda kind: flux2.model(), ""
FILES = {  # a model, its component -> in others' names
    "HunyuanVideo, ComfyUI": (HUNYUAN, "transformer", hunyuan_in_comfyuis_names),
    "HunyuanVideo's VAE": (HUNYUAN, "vae", hunyuans_vae_in_its_own_names),
    "Qwen2.5-VL, ComfyUI": (HUNYUAN, "text_encoder", qwen_of("ComfyUI")),
    "Qwen2.5-VL, transformers": (HUNYUAN, "text_encoder", qwen_of("transformers")),
    "Qwen2.5-VL, llama.cpp": (HUNYUAN, "text_encoder", qwen_of("llama.cpp")),
    "ByT5": (HUNYUAN, "text_encoder_2", t5_of_comfyui),
    "SigLIP": (HUNYUAN, "image_encoder", with_more("vision_model.", {"vision_model.head.probe": (3,)})),
    "FLUX.2": (FLUX2, "transformer", flux2_in_its_own_names),
    "FLUX.2's VAE": (FLUX2, "vae", flux2s_vae_in_its_own_names),
    "Qwen3, ComfyUI": (FLUX2, "text_encoder", qwen_of("ComfyUI")),
    "Qwen3, llama.cpp": (FLUX2, "text_encoder", qwen_of("llama.cpp")),
    "CLIP-L": (FLUX, "text_encoder", with_more("text_model.", {
        "text_model.embeddings.position_ids": (1, 17), "text_projection.weight": (20, 20), "logit_scale": ()})),
    "T5": (FLUX, "text_encoder_2", t5_of_comfyui),
    "CLIP's image encoder": (WAN, "image_encoder", with_more("vision_model.", {
        "vision_model.embeddings.position_ids": (1, 5), "visual_projection.weight": (3, 3)})),
}


def in_half(state):
    """A checkpoint in float16, and what it stands for."""
    stored = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    return stored, {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}


def in_eight_bits(state):
    return eight_bits(state, "scale_weight e4m3", "layers|block|blk")


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_folder(name, tmp_path):
    (family, checkpoint, model, kind), component, rename = FILES[name]
    folder, spec = checkpoint(kind) / component, load(FAMILIES, family).components[component]
    architecture = make_config(*model(kind)).model.architecture[component]
    architecture = read_architecture(folder, architecture, component, spec)
    mesh = jax.make_mesh((1, 1), ("tp", "dp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = weights.array_specs(spec.build(architecture), spec, architecture, weights.Layout(mesh), "float32")

    def arrays(place):
        weights.check(specs, place, spec.unused(architecture), spec)
        found = weights.load(specs, place, lambda count: None, spec)
        return {name: numpy.asarray(array) for name, array in found.items()}

    def save(name, state):
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    state = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    theirs = rename(state)
    assert theirs.keys() != state.keys()
    assert same(arrays(save("theirs", theirs)), arrays(folder))
    for precision in (in_half, in_eight_bits):
        stored, meant = precision(theirs)
        assert same(arrays(save("stored", stored)), arrays(save("meant", meant)))


# ---------------------------------------------------------------- recognition


HOLDS = {  # a file's name -> a model, and the component of it that it holds
    "wan_2.1_vae": ("wan21_t2v_14b", "vae"), "wan2.2_vae": ("wan22_ti2v_5b", "vae"),
    "Wan2_1_VAE_bf16": ("wan21_t2v_14b", "vae"), "taew2_1": ("wan21_t2v_14b", "tiny_vae"),
    "taew2_2": ("wan22_ti2v_5b", "tiny_vae"), "umt5_xxl_fp8_e4m3fn_scaled": ("wan21_t2v_14b", "text_encoder"),
    "umt5-xxl-enc-bf16": ("wan21_t2v_14b", "text_encoder"),
    "umt5-xxl-encoder-Q4_K_M": ("wan21_t2v_14b", "text_encoder"),
    "clip_vision_h": ("wan21_i2v_14b_480p", "image_encoder"),
    "hunyuanvideo15_vae_fp16": ("hunyuan15_t2v_480p", "vae"),
    "qwen_2.5_vl_7b_fp8_scaled": ("hunyuan15_t2v_480p", "text_encoder"),
    "Qwen2.5-VL-7B-Instruct-Q4_K_M": ("hunyuan15_t2v_480p", "text_encoder"),
    "byt5_small_glyphxl_fp16": ("hunyuan15_t2v_480p", "text_encoder_2"),
    "sigclip_vision_patch14_384": ("hunyuan15_i2v_480p", "image_encoder"),
    "ae": ("flux1_dev", "vae"), "clip_l": ("flux1_dev", "text_encoder"), "t5xxl_fp16": ("flux1_dev", "text_encoder_2"),
    "t5xxl_fp8_e4m3fn_scaled": ("flux1_dev", "text_encoder_2"),
    "t5-v1_1-xxl-encoder-Q8_0": ("flux1_dev", "text_encoder_2"), "flux2-vae": ("flux2_klein_4b", "vae"),
    "qwen_3_4b": ("flux2_klein_4b", "text_encoder"), "qwen_3_8b_fp8mixed": ("flux2_klein_9b", "text_encoder"),
    "Qwen3-4B-Q4_K_M": ("flux2_klein_4b", "text_encoder"), "Qwen3-8B-Q6_K": ("flux2_klein_9b", "text_encoder"),
}


@pytest.mark.parametrize("name", HOLDS)
def test_a_component_is_recognized(name, tmp_path):
    model, component = HOLDS[name]
    path = write_landmarks(tmp_path / f"{name}.safetensors", model, component)
    found = recognition.recognize(path)
    assert found.keys() == {component} and model in found[component]
    family = recognition.described(model)["family"]
    assert {recognition.described(one)["family"] for one in found[component]} == {family}
    assert inspection.how_to_run(path, found).endswith(f"model.{component}={path}")
    with pytest.raises(ConfigError, match=f"holds the {component} of .*; choose one: model=.* model.{component}="):
        recognition.with_models([f"model.path={path}"])


def test_every_file_of_the_table_is_tested():
    """docs/models.md: the file names of its table, and those that are tested, are of the same patterns."""
    rows = (ROOT / "docs" / "models.md").read_text().partition("## Single files")[2].splitlines()
    rows = [row.split("|") for row in rows if row.startswith("| `") and "`model." in row.split("|")[3]]
    patterns = {one.removesuffix(".gguf") for row in rows for one in re.findall(r"`([^`]+)`", row[1])}
    assert not [one for one in patterns if not fnmatch.filter([*HOLDS, *FITS], one)]
    assert not [one for one in HOLDS if not any(fnmatch.fnmatch(one, pattern) for pattern in patterns)]


@pytest.mark.full
def test_a_video_of_hunyuan_from_single_files_is_that_of_the_folder(tmp_path):
    size = ["resolution.height=48", "resolution.width=64", "resolution.frames=5"]
    common = [*hunyuan15.model(), "prompt=a cat", *size, "steps=1"]
    given = []
    for name in ("HunyuanVideo, ComfyUI", "HunyuanVideo's VAE", "Qwen2.5-VL, ComfyUI", "ByT5"):
        _, component, rename = FILES[name]
        file = tmp_path / f"{component}.safetensors"
        states = [load_file(one) for one in (hunyuan15.checkpoint() / component).glob("*.safetensors")]
        save_file({key: one.contiguous() for state in states for key, one in rename(state).items()}, file)
        given.append(f"model.{component}={file}")
    assert same(*(results(run_into(tmp_path / name, *common, *more))
                  for name, more in (("folder", []), ("files", given))))
