"""Weights as people have them: single files in the names of others, eight bits with scales, GGUF; each loads as
diffusers' folder does, and its model is recognized."""
import json
import re

import jax
import ml_dtypes
import numpy
import pytest
import torch
import transformers
from diffusers.loaders import single_file_utils
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from tests import flux, tiny
from tests.conftest import ROOT, SMALL, generate_into, make_config, results
from wan_torchax.config.commandline import compose, options, rewrite
from wan_torchax.config.registry import FAMILIES, family_of, load
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.models import t5
from wan_torchax.models.flux import adapters as flux_names
from wan_torchax.models.wan import adapters as wan_names
from wan_torchax.runtime import checkpoint, recognition, weights
from wan_torchax.runtime.jobs import find_job
from wan_torchax.session import Session

DEMO = ROOT / "models" / "demo"


def wan_specs(module, name):
    spec = load(FAMILIES, "wan").components[name]
    mesh = jax.make_mesh((1, 1), ("tp", "dp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return weights.array_specs(module, spec, {}, weights.Layout(mesh), "float32"), spec


def loaded(specs, place, spec):
    weights.check(specs, place, (*spec.unused({}), *t5.UNUSED), spec)
    arrays = weights.load(specs, place, lambda count: None, spec)
    return {name: numpy.asarray(array) for name, array in arrays.items()}


def same(first, second):
    return first.keys() == second.keys() and all(numpy.array_equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------- names


def in_names_of_wan(state):
    """A transformer's parameters as Wan's own repository names them."""
    back = {theirs: name for name, theirs in wan_names.BLOCK.items()}
    # Skeletons are embedded by cond_encoder in speech-to-video only.
    rest = {theirs: name for name, theirs in wan_names.REST.items() if name != "cond_encoder"}
    named = face_in_names_of_wan(state)
    for name, tensor in state.items():
        if name.startswith(("face_", "motion_")):
            continue
        if name.startswith(BESIDE):
            named[voice_in_names_of_wan(name)] = tensor
            continue
        match = re.fullmatch(r"((?:vace_)?blocks\.\d+\.)(.+?)(\.weight|\.bias|)", name)
        table, start, module, end = (back, *match.groups()) if match else (rest, "", *re.fullmatch(
            r"(.+?)(\.weight|\.bias|)", name).groups())
        named[f"{start}{table[module]}{end}"] = tensor
    return named


def face_in_names_of_wan(state):
    """Animate's encoders and adapters: keys and values in one layer, convolutions' biases with four dimensions."""
    patterns = {
        r"face_adapter\.(\d+)\.to_q\.(\w+)": r"face_adapter.fuser_blocks.\1.linear1_q.\2",
        r"face_adapter\.(\d+)\.to_out\.(\w+)": r"face_adapter.fuser_blocks.\1.linear2.\2",
        r"face_adapter\.(\d+)\.norm_([qk])\.(\w+)": r"face_adapter.fuser_blocks.\1.\2_norm.\3",
        r"(face_encoder\.conv\w+)\.(\w+)": r"\1.conv.\2",
        r"(face_encoder\.(?:out_proj\.\w+|padding_tokens))": r"\1",
        r"(motion_encoder)\.conv_in\.weight": r"\1.enc.net_app.convs.0.0.weight",
        r"(motion_encoder)\.conv_in\.act_fn\.bias": r"\1.enc.net_app.convs.0.1.bias",
        r"(motion_encoder)\.conv_out\.weight": r"\1.enc.net_app.convs.8.weight",
        r"(motion_encoder)\.motion_network\.(.+)": r"\1.enc.fc.\2",
        r"(motion_encoder)\.motion_synthesis_weight": r"\1.dec.direction.weight",
    }
    named = {}
    for name, tensor in state.items():
        if found := next((pattern for pattern in patterns if re.fullmatch(pattern, name)), None):
            name, old = re.sub(found, patterns[found], name), name
            named[name] = tensor.reshape(1, -1, 1, 1) if old.endswith("act_fn.bias") else tensor
        elif match := re.fullmatch(r"face_adapter\.(\d+)\.to_k\.(\w+)", name):
            both = numpy.concatenate([tensor, state[name.replace("to_k", "to_v")]])
            named[f"face_adapter.fuser_blocks.{match[1]}.linear1_kv.{match[2]}"] = both
        elif match := re.fullmatch(r"motion_encoder\.res_blocks\.(\d+)\.conv(1|2|_skip)\.(act_fn\.bias|weight)", name):
            part = {"1": "conv1", "2": "conv2", "_skip": "skip"}[match[2]]
            place = (part != "conv1") + (match[3] != "weight")
            shaped = tensor if match[3] == "weight" else tensor.reshape(1, -1, 1, 1)
            start = f"motion_encoder.enc.net_app.convs.{int(match[1]) + 1}.{part}"
            named[f"{start}.{place}.{match[3].rpartition('.')[2]}"] = shaped
    return named


# What VideoX-Fun's models and speech-to-video have, and diffusers does not know.
BESIDE = "ref_conv", "control_adapter", "casual_audio", "audio_injector", "frame_packer", "trainable_cond_mask"


def voice_in_names_of_wan(name):
    """Speech-to-video's layers after the blocks are lists of their kinds; the others have their names already."""
    name = re.sub(r"^audio_injector\.(\d+)\.linear", r"audio_injector.injector_adain_layers.\1.linear", name)
    name = re.sub(r"^audio_injector\.(\d+)\.", r"audio_injector.injector.\1.", name)
    return name.replace(".to_out.", ".o.").replace(".to_", ".") if "injector.injector." in name else name


@pytest.mark.parametrize("kind, wrapper", [
    ("text", ""), ("spoken", ""), ("fun_camera_5b", "model."), ("fun_control", "diffusion_model."),
    ("seen", "diffusion_model."), ("controlled", "model."), ("animated", "diffusion_model."),
    pytest.param("seen_both", "model.diffusion_model.", marks=pytest.mark.system),
])
def test_a_transformer_in_wans_names(kind, wrapper, tmp_path):
    folder = tiny.checkpoint(kind) / "transformer"
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    theirs = in_names_of_wan(state)
    if kind == "spoken":
        theirs = {re.sub("^pose_patch_embedding", "cond_encoder", name): tensor for name, tensor in theirs.items()}
    elif kind != "seen_both" and not any(name.startswith(BESIDE) for name in state):
        # diffusers forgets the positions of two pictures' tokens
        assert same(state, single_file_utils.convert_wan_transformer_to_diffusers(dict(theirs)))
    if kind == "animated":  # a constant
        theirs["motion_encoder.enc.net_app.convs.1.conv2.0.kernel"] = numpy.ones((4, 4), "float32")
    save_file({f"{wrapper}{name}": tensor for name, tensor in theirs.items()}, tmp_path / "one.safetensors")
    architecture = json.loads((folder / "config.json").read_text())
    specs, spec = wan_specs(load(FAMILIES, "wan").components["transformer"].build(
        {name: value for name, value in architecture.items() if not name.startswith("_")}), "transformer")
    assert same(loaded(specs, folder, spec), loaded(specs, tmp_path / "one.safetensors", spec))


def vae_in_names_of_wan(state):
    """The VAE's, by the published order of its blocks."""
    parts = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6",
             "conv_shortcut": "shortcut"}
    named = {}
    for name, tensor in state.items():
        name = re.sub(r"^quant_conv", "conv1", re.sub(r"^post_quant_conv", "conv2", name))
        name = name.replace("conv_in", "conv1").replace("norm_out", "head.0").replace("conv_out", "head.2")
        name = name.replace("mid_block.resnets.0", "middle.0").replace("mid_block.resnets.1", "middle.2")
        name = name.replace("mid_block.attentions.0", "middle.1").replace("encoder.down_blocks", "encoder.downsamples")
        up = re.match(r"decoder\.up_blocks\.(\d)\.(?:resnets\.(\d)|upsamplers\.0)", name)
        if up:
            name = name.replace(up[0], f"decoder.upsamples.{4 * int(up[1]) + int(up[2] or 3)}")
        if "samples" in name or "middle" in name:
            name = re.sub(r"(?<=\d\.)(norm[12]|conv[12]|conv_shortcut)(?=\.)", lambda found: parts[found[1]], name)
        named[name] = tensor
    return named


def test_wan_2_1s_vae_in_its_own_names(tmp_path):
    import diffusers

    torch.manual_seed(0)
    module = diffusers.AutoencoderKLWan(z_dim=16, base_dim=8)
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    theirs = vae_in_names_of_wan(state)
    converted = single_file_utils.convert_wan_vae_to_diffusers(dict(theirs))
    assert converted.keys() == state.keys() and "decoder.upsamples.14.residual.6.weight" in theirs
    save_torch(state, tmp_path / "ours.safetensors")
    save_torch(theirs, tmp_path / "theirs.safetensors")
    specs, spec = wan_specs(module, "vae")
    assert same(*(loaded(specs, tmp_path / f"{name}.safetensors", spec) for name in ("ours", "theirs")))


def test_every_tensor_of_wan_2_2s_vae_has_its_own_name():
    import diffusers

    with torch.device("meta"):
        module = diffusers.AutoencoderKLWan(**tiny.VAE_22 | {"num_res_blocks": 2})
    rename, parts = load(FAMILIES, "wan").components["vae"].rename, {
        "norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6",
        "conv_shortcut": "shortcut",
    }
    for name in module.state_dict():
        if match := re.fullmatch(r"(\w+)\.(up|down)_blocks\.(\d)\.resnets\.(\d)\.(\w+)\.(\w+)", name):
            half, way, outer, inner, part, end = match.groups()
            assert rename(f"{half}.{way}samples.{outer}.{way}samples.{inner}.{parts[part]}.{end}") == name
        elif match := re.fullmatch(r"(\w+)\.(up|down)_blocks\.(\d)\.\w+sampler\.(.+)", name):
            half, way, outer, rest = match.groups()
            last = 3 if way == "up" else 2
            assert rename(f"{half}.{way}samples.{outer}.{way}samples.{last}.{rest}") == name


@pytest.mark.parametrize("style", ["wan", "llama.cpp", "ComfyUI"])
def test_a_t5_encoder_in_the_names_of_others(style, tmp_path):
    state = load_file(tiny.checkpoint("text") / "text_encoder" / "model.safetensors")
    is_theirs = {"wan": lambda name: "_" not in name or name.startswith("pos"), "llama.cpp": lambda name: "_" in name
                 and not name.startswith("pos"), "ComfyUI": lambda name: False}[style]
    start = "blocks" if style == "wan" else "enc.blk"
    back = {theirs: name for name, theirs in t5.LAYER.items() if is_theirs(name)}
    rest = {"wan": ("token_embedding", "norm"), "llama.cpp": ("token_embd", "enc.output_norm")}.get(style)
    theirs = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"encoder\.block\.(\d+)\.(.+)\.weight", name)
        if style == "ComfyUI":
            theirs |= {name: tensor, "encoder.embed_tokens.weight": state["shared.weight"].copy(),
                       "spiece_model": numpy.zeros(7, numpy.uint8)}
        elif match:
            theirs[f"{start}.{match[1]}.{back[match[2]]}.weight"] = tensor
        else:
            theirs[f"{rest[0] if name.startswith('shared') else rest[1]}.weight"] = tensor
    save_file(state, tmp_path / "ours.safetensors")
    save_file(theirs, tmp_path / "theirs.safetensors")
    module = transformers.UMT5EncoderModel(transformers.UMT5Config(**tiny.TEXT_ENCODER, vocab_size=len(
        state["shared.weight"])))
    specs, spec = wan_specs(module, "text_encoder")
    assert same(*(loaded(specs, tmp_path / f"{name}.safetensors", spec) for name in ("ours", "theirs")))


def flux_in_its_own_names(state, names=flux_names):
    """The transformer's parameters as Black Forest Labs' repository stores them."""
    joined = {}
    for old, stack, table in (("double", "transformer_blocks", names.DOUBLE),
                              ("single", "single_transformer_blocks", names.SINGLE)):
        for number in range(3):
            for name, theirs in table.items():
                joined[f"{old}_blocks.{number}.{name}"] = [
                    f"{stack}.{number}.{one}" for one in (theirs if isinstance(theirs, tuple) else (theirs,))]
    joined |= {name: [theirs] for name, theirs in names.REST.items()}
    named = {}
    for name, theirs in joined.items():
        for end in ("weight", "bias"):
            if "processor" not in name and all(f"{one}.{end}" in state for one in theirs):
                named[f"{name}.{end}"] = torch.cat([state[f"{one}.{end}"] for one in theirs])
    for end in ("weight", "bias"):
        if f"norm_out.linear.{end}" in state:
            named[f"final_layer.adaLN_modulation.1.{end}"] = torch.cat(state[f"norm_out.linear.{end}"].chunk(2)[::-1])
    for name, tensor in state.items():
        if match := re.fullmatch(r"(single_)?transformer_blocks\.(\d)\.attn\.norm_(added_)?([qk])\.weight", name):
            stream = "" if match[1] else f"{'txt' if match[3] else 'img'}_attn."
            part = {"q": "query", "k": "key"}[match[4]]
            named[f"{'single' if match[1] else 'double'}_blocks.{match[2]}.{stream}norm.{part}_norm.scale"] = tensor
    return named


def flux_specs(module, name):
    spec = load(FAMILIES, "flux").components[name]
    mesh = jax.make_mesh((1, 1), ("tp", "dp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return weights.array_specs(module, spec, {}, weights.Layout(mesh), "float32"), spec


def test_flux_in_its_own_names(tmp_path):
    import diffusers

    module = flux.randomize(diffusers.FluxTransformer2DModel(**flux.TRANSFORMER, guidance_embeds=True))
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    theirs = flux_in_its_own_names(state)
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(tensor.numel() for tensor in state.values())
    save_torch(state, tmp_path / "ours.safetensors")
    both = {f"model.diffusion_model.{name}": tensor for name, tensor in theirs.items()} | {"vae.x": torch.zeros(1)}
    save_torch(both, tmp_path / "theirs.safetensors")  # with another component beside it
    specs, spec = flux_specs(module, "transformer")
    assert same(*(loaded(specs, tmp_path / f"{name}.safetensors", spec) for name in ("ours", "theirs")))


def test_fluxs_vae_in_its_own_names(tmp_path):
    import diffusers

    module = flux.randomize(diffusers.AutoencoderKL(**flux.VAE))
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    theirs = {}
    for name, tensor in state.items():
        name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", name)
        name = re.sub(r"up_blocks\.(\d)", lambda found: f"up.{3 - int(found[1])}", name)
        name = name.replace("down_blocks", "down").replace("resnets", "block")
        name = name.replace("downsamplers.0", "downsample").replace("upsamplers.0", "upsample")
        if match := re.search(r"mid_block\.attentions\.0\.(.+)\.(weight|bias)", name):
            name = name.replace(match[0], f"mid.attn_1.{attention[match[1]]}.{match[2]}")
            tensor = tensor[..., None, None] if tensor.ndim == 2 else tensor  # a convolution there
        theirs[name] = tensor.clone()
    converted = single_file_utils.convert_ldm_vae_checkpoint(dict(theirs), flux.VAE)
    assert converted.keys() == state.keys() and all(torch.equal(converted[name], state[name]) for name in state)
    save_torch(state, tmp_path / "ours.safetensors")
    save_torch(theirs, tmp_path / "theirs.safetensors")
    specs, spec = flux_specs(module, "vae")
    assert same(*(loaded(specs, tmp_path / f"{name}.safetensors", spec) for name in ("ours", "theirs")))


# ---------------------------------------------------------------- recognition


LANES = dict.fromkeys(("wan21_vace_1_3b", "flux1_schnell", "flux2_klein_4b"), ()) | dict.fromkeys(
    ("wan21_flf2v_14b", "wan22_ti2v_5b", "hunyuan15_i2v_480p_step_distilled", "flux1_dev"), pytest.mark.system)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=LANES.get(name, pytest.mark.full))
    for name in options("model") if not name.startswith("demo")
])
def test_a_models_tensors_are_those_it_is_recognized_by(name):
    model = recognition.described(name)
    config = make_config(f"model={name}")
    assert model["family"] == config.model.family and model["path"] == config.model.path
    family = family_of(config)
    for component, architecture in model["architecture"].items():
        spec = family.components[component]
        assert architecture == config.model.architecture[component]
        ignored = spec.unused(architecture)
        landmarks = {key: shape for key, shape in spec.landmarks(architecture).items()
                     if not (shape and any(re.match(rule, key) for rule in ignored))}
        shapes = landmarks and {key: tuple(one.shape) for key, one in spec.build(architecture).state_dict().items()}
        assert {key: shapes.get(key) for key in landmarks} == landmarks
    assert family.components["transformer"].landmarks(model["architecture"]["transformer"])


def write_landmarks(path, name, component="transformer"):
    """A file with the landmarks of a model's component and nothing else."""
    model = recognition.described(name)
    spec = load(FAMILIES, model["family"]).components[component]
    shapes = {key: shape for key, shape in spec.landmarks(model["architecture"][component]).items() if shape}
    tiny.write_zeros(path, shapes)
    return path


FITS = {  # a file's name -> the model whose shapes it has, and the one it is taken for
    "wan2.1_t2v_1.3B_fp16": ("wan21_t2v_1_3b", "wan21_t2v_1_3b"),
    "Wan2_1-T2V-14B_fp8_e4m3fn_scaled_KJ": ("wan21_t2v_14b", "wan21_t2v_14b"),
    "wan2.1_i2v_720p_14B_fp8_scaled": ("wan21_i2v_14b_480p", "wan21_i2v_14b_720p"),
    "wan2.1_flf2v_720p_14B_fp16": ("wan21_flf2v_14b", "wan21_flf2v_14b"),
    "wan2.1_vace_14B_fp16": ("wan21_vace_14b", "wan21_vace_14b"),
    "wan2.2_ti2v_5B_fp16": ("wan22_ti2v_5b", "wan22_ti2v_5b"),
    "wan2.2_animate_14B_bf16": ("wan22_animate_14b", "wan22_animate_14b"),
    "wan2.2_s2v_14B_bf16": ("wan22_s2v_14b", "wan22_s2v_14b"),
    "wan2.2_fun_control_5B_bf16": ("wan22_fun_control_5b", "wan22_fun_control_5b"),
    "wan2.2_fun_camera_5B_bf16": ("wan22_fun_camera_5b", "wan22_fun_camera_5b"),
    "wan_animate_2_bf16": ("wan22_animate2_14b", "wan22_animate2_14b"),
    "hunyuanvideo1.5_720p_t2v_fp16": ("hunyuan15_t2v_720p", "hunyuan15_t2v_720p"),
    "hy1.5_t2v_480p_lightx2v_4step": ("hunyuan15_t2v_480p", "hunyuan15_t2v_480p_4step"),
    "diffusion_pytorch_model": ("wan22_ti2v_5b", "wan22_ti2v_5b"),
    "anything": ("flux1_schnell", "flux1_schnell"),
    "flux1-dev": ("flux1_dev", "flux1_dev"),
    "flux1-schnell-fp8": ("flux1_schnell", "flux1_schnell"),
    "flux-2-klein-4b-fp8": ("flux2_klein_4b", "flux2_klein_4b"),
    "flux-2-klein-9b": ("flux2_klein_9b", "flux2_klein_9b"),
}


@pytest.mark.parametrize("name", FITS)
def test_a_file_is_recognized(name, tmp_path):
    shapes, expected = FITS[name]
    path = write_landmarks(tmp_path / f"{name}.safetensors", shapes)
    assert recognition.with_models(["seed=3", f"model.path={path}"]) == [
        f"model={expected}", "seed=3", f"++model.paths.transformer='{path}'"]
    assert recognition.with_models(["model=wan21_t2v_1_3b", f"model.path={path}"])[0] == "model=wan21_t2v_1_3b"


@pytest.mark.parametrize("kind, model", [
    ("t2v", "wan22_t2v_a14b"), ("fun_vace", "wan22_vace_fun_a14b"), ("fun_control", "wan22_fun_control_a14b"),
    ("fun_camera", "wan22_fun_camera_a14b"),
])
def test_both_transformers_of_a_model_with_two(kind, model, tmp_path):
    high, low = (write_landmarks(tmp_path / f"wan2.2_{kind}_{noise}_noise_14B.safetensors", model)
                 for noise in ("high", "low"))
    both = rewrite([f"model.transformer={high}", f"model.transformer_2={low}"])
    assert recognition.with_models(both) == [f"model={model}", *both]
    with pytest.raises(ConfigError, match=f"one of the two transformers of {model}; give both"):
        recognition.with_models([f"model.path={high}"])


def test_what_cannot_be_recognized_is_told(tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({"x": numpy.zeros(3, "float32")}, other)
    vae, unnamed = tmp_path / "vae.safetensors", tmp_path / "mine.safetensors"
    save_file(load_file(DEMO / "vae" / "diffusion_pytorch_model.safetensors"), vae)
    write_landmarks(unnamed, "wan21_t2v_14b")
    for path, message in {
        other: "no model of conf/model has its tensors .x and 0 others.", tmp_path / "no.gguf": "no such file",
        tmp_path / "x.pth": "can run code when opened and is not read; `python tools/convert.py", vae:
        "holds the vae of demo, demo_animate, demo_i2v, demo_live", unnamed:
        "say model=wan21_t2v_14b, model=wan22_t2v_a14b",
    }.items():
        with pytest.raises(ConfigError, match=message):
            recognition.with_models([f"model.path={path}"])


@pytest.mark.parametrize("model", [
    "longlive_1_3b", "longlive2_5b", "causvid_1_3b", "krea_14b", "hunyuan15_t2v_480p_4step", "wan22_s2v_14b",
])
def test_a_model_whose_transformer_is_a_file_of_its_own_does_not_run_with_another(model):
    """Its folder has the base model's, which would give a video without a word."""
    file = str(make_config(f"model={model}").model.paths["transformer"])
    with pytest.raises(ConfigError, match=rf"{re.escape(file)}: no such file"):
        checkpoint.find(make_config(f"model={model}"), "transformer", local_only=True)


@pytest.mark.system
def test_a_video_from_single_files_is_that_of_the_folder(tmp_path):
    """The demo's transformer as ComfyUI would have it, VAE and text encoder in their own names, recognized and run."""
    file = "diffusion_pytorch_model.safetensors"
    theirs = in_names_of_wan(load_file(DEMO / "transformer" / file))
    save_file({f"diffusion_model.{name}": tensor for name, tensor in theirs.items()}, tmp_path / "a.safetensors")
    save_file(load_file(DEMO / "vae" / file), tmp_path / "b.safetensors")
    given = recognition.with_models(rewrite([f"model.path={tmp_path / 'a.safetensors'}",
                                             f"model.vae={tmp_path / 'b.safetensors'}"]))
    assert given[0] == "model=demo"
    made = []
    for number, overrides in enumerate(([], given)):
        config = compose([*rewrite([*SMALL, "steps=1", "model=demo"]), *overrides])
        validate(config)
        folder = tmp_path / str(number)
        folder.mkdir()
        generate_into(config, folder, overrides)
        made.append(results(folder))
    assert same(*made) and "latents" in made[0]


# ---------------------------------------------------------------- eight bits with scales


def eight_bits(state, scheme, pattern="blocks"):
    """A checkpoint, its matrices of this pattern in eight bits, and what it stands for in float32."""
    kind = torch.float8_e5m2 if "e5m2" in scheme else torch.float8_e4m3fn
    stored, meant = {}, {}
    for name, tensor in state.items():
        if tensor.ndim != 2 or not re.search(pattern, name):
            stored[name], meant[name] = tensor, tensor
            continue
        rows = "rows" in scheme
        scale = tensor.abs().amax(1 if rows else None, keepdim=rows) / 300 if "scale" in scheme else torch.ones(())
        stored[name] = (tensor / scale).to(kind)
        meant[name] = stored[name].float() * scale
        module = name.removesuffix(".weight")
        if "scale" in scheme:
            stored[f"{module}.{scheme.split()[0]}"] = scale.reshape(scale.shape if rows else ()).clone()
            stored[f"{module}.{'scale_input' if 'scale_weight' in scheme else 'input_scale'}"] = torch.ones(())
            stored[f"{module}.comfy_quant"] = torch.zeros(20, dtype=torch.uint8)
    return stored | {"scaled_fp8": torch.zeros(2, dtype=kind)}, meant


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["e4m3", "e5m2", "scale_weight e4m3", "weight_scale e5m2", "weight_scale rows e4m3"])
def test_eight_bits_are_widened(scheme, dtype, tmp_path):
    folder = tiny.checkpoint("text") / "transformer"
    state = load_torch(folder / "diffusion_pytorch_model.safetensors")
    stored, meant = eight_bits(state, scheme)
    save_torch(stored, tmp_path / "a.safetensors")
    spec = load(FAMILIES, "wan").components["transformer"]
    architecture = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k[0] != "_"}
    mesh = jax.make_mesh((1, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = weights.array_specs(spec.build(architecture), spec, architecture, weights.Layout(mesh), dtype)
    weights.check(specs, tmp_path / "a.safetensors", (), spec)
    arrays = weights.load(specs, tmp_path / "a.safetensors", lambda count: None, spec)
    for name in ("blocks.1.attn1.to_q.weight", "blocks.0.ffn.net.2.weight"):
        array = numpy.asarray(arrays[re.sub(r"\.\d\.", ".*.", name, count=1)])[int(name.split(".")[1])]
        numpy.testing.assert_array_equal(array, meant[name].numpy().astype(ml_dtypes.bfloat16 if dtype == "bfloat16"
                                                                           else "float32"))


def test_a_folder_in_eight_bits(tmp_path):
    """diffusers' layout with scales beside the weights, and a config.json that says so, as ModelOpt's."""
    folder = tiny.make_checkpoint(tmp_path / "model")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    stored, meant = eight_bits(load_torch(file), "weight_scale e4m3")
    save_torch(stored, file)
    about = json.loads((folder / "transformer" / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (folder / "transformer" / "config.json").write_text(json.dumps(about))
    session = Session()
    resolved = session.resolve(find_job(make_config(*SMALL, *tiny.overrides(folder))), ["denoise"], lambda event: None)
    component = session.build(resolved, ["denoise"])["denoise"].components["transformer"]
    component.check()
    component.load(component.specs, lambda event: None)
    found = numpy.asarray(component.arrays["blocks.*.attn1.to_q.weight"][1])
    numpy.testing.assert_array_equal(found, meant["blocks.1.attn1.to_q.weight"].numpy())


def test_scales_that_do_not_fit_are_refused(tmp_path):
    tensors = {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.zeros(2, 2)}
    save_torch(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="one number is implemented, or one for each row"):
        recognition.recognize(tmp_path / "a.safetensors")


def test_eight_bits_are_not_rounded_again(tmp_path):
    """precision=fp8 computes with the numbers of the file."""
    folder = tiny.make_checkpoint(tmp_path / "model", num_layers=3)
    state = load_torch(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    stored, _ = eight_bits(state, "scale_weight e4m3")
    save_torch(stored, tmp_path / "a.safetensors")
    config = make_config(*SMALL, *tiny.overrides(folder, num_layers=3), f"model.transformer={tmp_path}/a.safetensors",
                         "precision=fp8", "precision.first=1", "precision.last=1")
    session = Session()
    resolved = session.resolve(find_job(config), ["denoise"], lambda event: None)
    component = session.build(resolved, ["denoise"])["denoise"].components["transformer"]
    component.check()
    component.load(component.specs, lambda event: None)
    values = component.arrays["blocks.*.ffn.net.0.proj.quantized"]
    scales = component.arrays["blocks.*.ffn.net.0.proj.scale"]
    name = "blocks.1.ffn.net.0.proj"
    assert torch.equal(torch.tensor(numpy.asarray(values[0]).view("uint8")), stored[f"{name}.weight"].view(torch.uint8))
    assert (numpy.asarray(scales[0]) == float(stored[f"{name}.scale_weight"])).all()
