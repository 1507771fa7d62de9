"""FLUX.2's weights in Black Forest Labs' names, spelled as FLUX.1's, and the tensors by which a file is recognized."""
from collections.abc import Mapping

from wan_torchax.models.family import Rows
from wan_torchax.models.flux import files
from wan_torchax.models.flux2.adapters import NAMES


def rename(parameter: str) -> str | Rows | None:
    """single_blocks.3.linear1.weight -> single_transformer_blocks.3.attn.to_qkv_mlp_proj.weight"""
    return files.rename(parameter, NAMES)


def landmarks(transformer: Mapping) -> files.Landmarks:
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    double, single = transformer["num_layers"], transformer["num_single_layers"]
    wide = int(width * transformer.get("mlp_ratio", 3.0))
    return {
        "x_embedder.weight": (width, transformer["in_channels"]),
        "context_embedder.weight": (width, transformer["joint_attention_dim"]),
        "time_guidance_embed.guidance_embedder.linear_1.weight": None,  # dev has it
        f"transformer_blocks.{double - 1}.attn.to_add_out.weight": (width, width),
        f"transformer_blocks.{double}.attn.to_add_out.weight": None,
        f"single_transformer_blocks.{single - 1}.attn.to_out.weight": (width, width + wide),
        f"single_transformer_blocks.{single}.attn.to_out.weight": None,
    }


def vae_landmarks(vae: Mapping) -> files.Landmarks:
    return files.vae_landmarks(vae) | {"bn.running_mean": (4 * vae["latent_channels"],)}
