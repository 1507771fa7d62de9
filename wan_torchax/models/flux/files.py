"""FLUX.1's weights in files that are not in diffusers' layout: Black Forest Labs' names, which ComfyUI's files and GGUF
have too, and the tensors by which a file is recognized."""
import re
from collections.abc import Mapping

from wan_torchax.models.family import AdapterNames, Rows
from wan_torchax.models.flux.adapters import NAMES

Landmarks = dict[str, tuple[int, ...] | None]

# ---------------------------------------------------------------- transformer

FOREIGN = r"^double_blocks\.0\."
STACKS = {"double": "transformer_blocks", "single": "single_transformer_blocks"}
NORM = r"(double|single)_blocks\.(\d+)\.(?:(img|txt)_attn\.)?norm\.(q|k)\w+_norm\.scale"
HEAD = "final_layer.adaLN_modulation.1"  # shift before scale there


def rename(parameter: str, names: AdapterNames = NAMES) -> str | Rows | None:
    """single_blocks.3.linear1.bias -> the biases of to_q, to_k, to_v and proj_mlp, one after the other"""
    module, _, end = parameter.rpartition(".")
    if module == HEAD:
        return Rows((f"norm_out.linear.{end}",), swapped=True)
    if match := re.fullmatch(NORM, parameter):
        stack, number, stream, part = match.groups()
        return f"{STACKS[stack]}.{number}.attn.norm_{'added_' if stream == 'txt' else ''}{part}.weight"
    translated = names.translate(module, False)
    if isinstance(translated, Rows):
        return Rows(tuple(f"{name}.{end}" for name in translated.names))
    return translated and f"{translated}.{end}"


def landmarks(transformer: Mapping) -> Landmarks:
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    double, single = transformer["num_layers"], transformer["num_single_layers"]
    guided = "time_text_embed.guidance_embedder.linear_2.weight"
    return {
        "x_embedder.weight": (width, transformer["in_channels"]),
        "context_embedder.weight": (width, transformer["joint_attention_dim"]),
        guided: (width, width) if transformer.get("guidance_embeds") else None,
        f"transformer_blocks.{double - 1}.attn.to_add_out.weight": (width, width),
        f"transformer_blocks.{double}.attn.to_add_out.weight": None,
        f"single_transformer_blocks.{single - 1}.proj_out.weight": (width, 5 * width),
        f"single_transformer_blocks.{single}.proj_out.weight": None,
    }


def clip_landmarks(encoder: Mapping) -> Landmarks:
    return {
        "embeddings.token_embedding.weight": (encoder["vocab_size"], encoder["hidden_size"]),
        f"encoder.layers.{encoder['num_hidden_layers'] - 1}.mlp.fc2.bias": (encoder["hidden_size"],),
        f"encoder.layers.{encoder['num_hidden_layers']}.mlp.fc2.bias": None,
    }


# ---------------------------------------------------------------- VAE

VAE_FOREIGN = r"^decoder\.mid\."
ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
STAGES = 4  # of which the decoder's are counted from the last


def rename_vae(parameter: str) -> str | None:
    """decoder.up.3.block.0.nin_shortcut.weight -> decoder.up_blocks.0.resnets.0.conv_shortcut.weight"""
    module, _, end = parameter.rpartition(".")
    half, _, rest = module.partition(".")
    rest = rest.replace("nin_shortcut", "conv_shortcut")
    if rest in ("quant_conv", "post_quant_conv"):  # in FLUX.2's
        return f"{rest}.{end}"
    if rest == "norm_out":
        return f"{half}.conv_norm_out.{end}"
    if match := re.fullmatch(r"mid\.attn_1\.(\w+)", rest):
        return f"{half}.mid_block.attentions.0.{ATTENTION[match[1]]}.{end}"
    if match := re.fullmatch(r"mid\.block_([12])\.(\w+)", rest):
        return f"{half}.mid_block.resnets.{int(match[1]) - 1}.{match[2]}.{end}"
    if match := re.fullmatch(r"(down|up)\.(\d)\.(block\.(\d+)\.(\w+)|\w+sample\.conv)", rest):
        way, number, _, block, part = match.groups()
        number = int(number) if way == "down" else STAGES - 1 - int(number)
        inner = f"{way}samplers.0.conv" if block is None else f"resnets.{block}.{part}"
        return f"{half}.{way}_blocks.{number}.{inner}.{end}"
    return None


def vae_landmarks(vae: Mapping) -> Landmarks:
    widths, channels = vae["block_out_channels"], vae["latent_channels"]
    return {
        "decoder.conv_in.weight": (widths[-1], channels, 3, 3),
        "decoder.conv_out.weight": (3, widths[0], 3, 3),
        "post_quant_conv.weight": (channels, channels, 1, 1) if vae.get("use_post_quant_conv", True) else None,
    }
