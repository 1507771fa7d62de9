"""HunyuanVideo 1.5's weights in files that are not in diffusers' layout: its own names, ComfyUI's, which GGUF has too,
and the tensors by which a file is recognized."""
import re
from collections.abc import Mapping

from wan_torchax.models.family import Rows
from wan_torchax.models.hunyuan15.adapters import translate

Landmarks = dict[str, tuple[int, ...] | None]

# ---------------------------------------------------------------- transformer


def rename(parameter: str) -> str | Rows | None:
    """double_blocks.0.img_attn_q.bias -> transformer_blocks.0.attn.to_q.bias"""
    module, _, end = parameter.rpartition(".")
    translated, end = translate(module, native=False), "weight" if end == "scale" else end  # of a norm in ComfyUI's
    if isinstance(translated, Rows):
        return Rows(tuple(f"{name}.{end}" for name in translated.names), translated.swapped)
    return translated and f"{translated}.{end}"


def landmarks(transformer: Mapping) -> Landmarks:
    width, layers = transformer["num_attention_heads"] * transformer["attention_head_dim"], transformer["num_layers"]
    next_time = (width, 256) if transformer.get("use_meanflow") else None
    return {
        "x_embedder.proj.weight": (width, transformer["in_channels"], 1, 1, 1),
        "context_embedder.proj_in.weight": (width, transformer["text_embed_dim"]),
        f"transformer_blocks.{layers - 1}.attn.to_add_out.weight": (width, width),
        f"transformer_blocks.{layers}.attn.to_add_out.weight": None,
        "time_embed.timestep_embedder_r.linear_1.weight": next_time,
    }


# ---------------------------------------------------------------- VAE

VAE_FOREIGN = r"^decoder\.mid\."
VAE_PARTS = {
    r"\.mid\.block_1\.": ".mid_block.resnets.0.", r"\.mid\.block_2\.": ".mid_block.resnets.1.",
    r"\.mid\.attn_1\.(?=[qkv]\.)": ".mid_block.attentions.0.to_", r"\.mid\.attn_1\.": ".mid_block.attentions.0.",
    r"\.(down|up)\.(\d)\.block\.": r".\1_blocks.\2.resnets.",
    r"\.(down|up)\.(\d)\.\1sample\.": r".\1_blocks.\2.\1samplers.0.",
}


def rename_vae(parameter: str) -> str:
    """decoder.up.0.block.2.conv1.conv.weight -> decoder.up_blocks.0.resnets.2.conv1.conv.weight"""
    for pattern, theirs in VAE_PARTS.items():
        parameter = re.sub(pattern, theirs, parameter)
    return parameter


def vae_landmarks(vae: Mapping) -> Landmarks:
    first, *_, last = vae["block_out_channels"]
    return {
        "decoder.conv_in.conv.weight": (last, vae["latent_channels"], 3, 3, 3),
        "decoder.mid_block.attentions.0.to_q.weight": (last, last, 1, 1, 1),
        "decoder.conv_out.conv.weight": (3, first, 3, 3, 3),
    }
