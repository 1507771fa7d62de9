"""Wan's weights in files that are not in diffusers' layout: Wan's own names, which ComfyUI's files and GGUF have too,
and the tensors by which a file is recognized."""
import math
import re
from collections.abc import Mapping

from wan_torchax.models.family import Rows
from wan_torchax.models.wan.adapters import BARE, EMBEDDER, translate

Landmarks = dict[str, tuple[int, ...] | None]

# ---------------------------------------------------------------- transformer

FOREIGN = r"^blocks\.0\.(block\.)?self_attn\."
# What Animate 2's class in diffusers calls otherwise than Wan's others.
FIELDS = {"in_dim": "in_channels", "out_dim": "out_channels", "num_heads": "num_attention_heads"}
# TurboWan's projection, as its authors and two ports to diffusers' layout spell it.
PROJECTION = re.compile(r"(blocks\.\d+)\.(?:self_attn|attn1)\.(?:attn_op\.local_attn|attn_impl)\.(proj_l\.\w+)")


# Animate's encoders of a face. The pattern's second group is the number of a residual block, from 1 on.
MOTION = re.compile(r"motion_encoder\.enc\.net_app\.convs\.(?:(\d+)\.(conv1|conv2|skip)\.)?(.+)")
FACE = re.compile(r"(face_encoder\.conv(?:1_local|2|3))\.conv(\.\w+)")


def rename(parameter: str) -> str | Rows | None:
    """blocks.0.self_attn.q.weight -> blocks.0.attn1.to_q.weight; blocks.0.modulation -> blocks.0.scale_shift_table"""
    if spelled := respell(parameter) or rename_face(parameter):
        return spelled
    bare = translate(parameter, native=False)
    if isinstance(bare, str) and bare.endswith(BARE):
        return bare
    module, _, end = parameter.rpartition(".")
    translated = translate(module, native=False)
    if isinstance(translated, Rows):
        return Rows(tuple(f"{name}.{end}" for name in translated.names))
    return translated and f"{translated}.{end}"


def rename_face(parameter: str) -> str | None:
    """motion_encoder.enc.net_app.convs.3.conv2.2.bias -> motion_encoder.res_blocks.2.conv2.act_fn.bias"""
    if match := FACE.fullmatch(parameter):
        return match[1] + match[2]
    if parameter.startswith("motion_encoder.enc.fc."):
        return parameter.replace("enc.fc", "motion_network")
    if parameter == "motion_encoder.dec.direction.weight":
        return "motion_encoder.motion_synthesis_weight"
    match = MOTION.fullmatch(parameter)
    if match is None or parameter.endswith(".kernel"):
        return None
    number, part, end = match.groups()
    end = "act_fn.bias" if end.endswith("bias") else "weight"
    if number is None:
        return f"motion_encoder.conv_{'in' if match[3].startswith('0.') else 'out'}.{end}"
    return f"motion_encoder.res_blocks.{int(number) - 1}.{'conv_skip' if part == 'skip' else part}.{end}"


def described(stored: dict) -> dict:
    """The config.json of Animate 2 as one of Wan's others. How long its texts are, conf/model says."""
    if "dim" not in stored:
        return stored
    width, heads = stored["dim"], stored["num_heads"]
    named = {FIELDS.get(name, name): value for name, value in stored.items()}
    named |= {"attention_head_dim": width // heads, "added_kv_proj_dim": width if stored["use_img_emb"] else None}
    return {name: value for name, value in named.items() if name not in ("dim", "text_len", "use_img_emb")}


def respell(parameter: str) -> str | None:
    """blocks.0.attn1.attn_impl.proj_l.weight -> blocks.0.attn1.proj_l.weight"""
    match = PROJECTION.fullmatch(parameter)
    return match and f"{match[1]}.attn1.{match[2]}"


def landmarks(transformer: Mapping) -> Landmarks:
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    layers, patch = transformer["num_layers"], tuple(transformer["patch_size"])
    controls, picture = transformer.get("vace_layers"), transformer.get("image_dim")
    trained_for, head_dim = transformer.get("attention_type"), transformer["attention_head_dim"]
    return {
        "patch_embedding.weight": (width, transformer["in_channels"], *patch),
        "proj_out.weight": (transformer["out_channels"] * math.prod(patch), width),
        f"{EMBEDDER}.text_embedder.linear_1.weight": (width, transformer["text_dim"]),
        f"{EMBEDDER}.image_embedder.norm1.weight": (picture,) if picture else None,
        f"{EMBEDDER}.image_embedder.pos_embed": tokens_of(transformer) if picture else None,
        f"blocks.{layers - 1}.ffn.net.0.proj.weight": (transformer["ffn_dim"], width),
        f"blocks.{layers}.attn1.to_q.weight": None,
        "blocks.0.attn1.proj_l.weight": (head_dim, head_dim) if trained_for == "sla" else None,
        "blocks.0.to_gate_compress.weight": (width, width) if trained_for == "vsa" else None,
        **({f"vace_blocks.{len(controls) - 1}.proj_out.weight": (width, width)} if controls else {}),
        f"vace_blocks.{len(controls or ())}.proj_out.weight": None,
        "pose_patch_embedding.weight":
            (width, transformer["out_channels"], *patch)
            if transformer.keys() & {"motion_encoder_size", "audio_inject_layers"} else None,
        "trainable_cond_mask.weight": (3, width) if "audio_inject_layers" in transformer else None,
        "ref_conv.weight":
            (width, transformer["in_dim_ref_conv"], *patch[1:]) if transformer.get("add_ref_conv") else None,
        "control_adapter.conv.weight":
            (width, camera_channels(transformer), *patch[1:]) if transformer.get("add_control_adapter") else None,
    }


def camera_channels(transformer: Mapping) -> int:
    """Of a camera's rays, with the pixels of a latent pixel in them."""
    return transformer["in_dim_control_adapter"] * transformer["downscale_factor_control_adapter"] ** 2


def tokens_of(transformer: Mapping) -> tuple[int, ...] | None:
    """The positions of a first and a last picture's tokens."""
    length = transformer.get("pos_embed_seq_len")
    return (1, length, transformer["image_dim"]) if length else None


# ---------------------------------------------------------------- sound


def respell_sound(parameter: str) -> str | None:
    """encoder.pos_conv_embed.conv.weight_g -> encoder.pos_conv_embed.conv.parametrizations.weight.original0"""
    match = re.fullmatch(r"(encoder\.pos_conv_embed\.conv)\.weight_([gv])", parameter)
    return match and f"{match[1]}.parametrizations.weight.original{'gv'.index(match[2])}"


def sound_landmarks(encoder: Mapping) -> Landmarks:
    width, layers = encoder["hidden_size"], encoder["num_hidden_layers"]
    return {
        "feature_projection.projection.weight": (width, encoder["conv_dim"][-1]),
        f"encoder.layers.{layers - 1}.attention.q_proj.weight": (width, width),
        f"encoder.layers.{layers}.attention.q_proj.weight": None,
    }


# ---------------------------------------------------------------- VAE

VAE_FOREIGN = r"^(de|en)coder\.middle\."
RESIDUAL = {
    "residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
ENDS = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"}  # of encoder and decoder
GROUP = 4  # of Wan 2.1's decoder: three residual blocks and what enlarges their result


def rename_vae(parameter: str) -> str | None:
    """decoder.upsamples.4.residual.2.weight -> decoder.up_blocks.1.resnets.0.conv1.weight"""
    module, _, end = parameter.rpartition(".")
    half, _, rest = module.partition(".")
    if half in ("conv1", "conv2"):
        return f"{'quant_conv' if half == 'conv1' else 'post_quant_conv'}.{end}"
    if rest in ENDS:
        return f"{half}.{ENDS[rest]}.{end}"
    if match := re.fullmatch(r"middle\.(\d)\.(.+)", rest):
        return f"{half}.mid_block.{MIDDLE[match[1]]}.{RESIDUAL.get(match[2], match[2])}.{end}"
    if match := re.fullmatch(r"(down|up)samples\.(\d+)\.(?:\1samples\.(\d+)\.)?(.+)", rest):
        return f"{half}.{sampled(*match.groups())}.{end}"
    return None


def sampled(way: str, number: str, inner: str | None, part: str) -> str:
    """A part of what halves or doubles the size. In Wan 2.2 its residual blocks are numbered within each; in Wan 2.1
    throughout, and diffusers has those of the encoder in one list."""
    is_residual, part = part in RESIDUAL, RESIDUAL.get(part, part)
    if inner is not None:
        return f"{way}_blocks.{number}.{f'resnets.{inner}' if is_residual else f'{way}sampler'}.{part}"
    if way == "down":
        return f"down_blocks.{number}.{part}"
    group, place = divmod(int(number), GROUP)
    return f"up_blocks.{group}.{f'resnets.{place}' if is_residual else 'upsamplers.0'}.{part}"


def vae_landmarks(vae: Mapping) -> Landmarks:
    channels, base = vae["z_dim"], vae.get("decoder_base_dim") or vae["base_dim"]
    widest = base * vae.get("dim_mult", (1, 2, 4, 4))[-1]
    return {
        "post_quant_conv.weight": (channels, channels, 1, 1, 1),
        "decoder.conv_in.weight": (widest, channels, 3, 3, 3),
    }


def tiny_landmarks(vae: Mapping) -> Landmarks:
    """Of TAEHV's files, which number the decoder's layers."""
    channels, (first, *_, last) = vae["latent_channels"], vae["widths"]
    return {
        "decoder.1.weight": (first, channels, 3, 3),
        "decoder.22.weight": (3 * vae["patch_size"] ** 2, last, 3, 3),
    }
