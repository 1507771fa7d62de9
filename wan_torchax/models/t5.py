"""Names of T5's encoders in files of others: llama.cpp's (GGUF), and those of the repository of Wan."""
import re
from collections.abc import Mapping

LAYER = {
    **{f"attn_{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "attn_norm": "layer.0.layer_norm", "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "ffn_gate": "layer.1.DenseReluDense.wi_0", "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo", "ffn_norm": "layer.1.layer_norm",
    **{f"attn.{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "norm1": "layer.0.layer_norm", "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0", "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo", "norm2": "layer.1.layer_norm",
}
REST = {
    "token_embd": "shared", "enc.output_norm": "encoder.final_layer_norm",
    "token_embedding": "shared", "norm": "encoder.final_layer_norm",
}
FOREIGN = r"^(enc\.blk|blocks)\.0\."
# The table is there twice in some files, and ComfyUI's hold the tokenizer.
UNUSED = (r"encoder\.embed_tokens\.", r"spiece_model$", r"logit_scale$")


def rename(parameter: str) -> str | None:
    """blocks.3.attn.q.weight -> encoder.block.3.layer.0.SelfAttention.q.weight"""
    module, _, end = parameter.rpartition(".")
    match = re.fullmatch(r"(?:enc\.blk|blocks)\.(\d+)\.(.+)", module)
    if match is None:
        return f"{REST[module]}.{end}" if module in REST else None
    part = LAYER.get(match[2])
    return part and f"encoder.block.{match[1]}.{part}.{end}"


def landmarks(encoder: Mapping) -> dict[str, tuple[int, ...] | None]:
    width, layers = encoder["d_model"], encoder["num_layers"]
    return {
        "shared.weight": (encoder["vocab_size"], width),
        f"encoder.block.{layers - 1}.layer.1.DenseReluDense.wo.weight": (width, encoder["d_ff"]),
        f"encoder.block.{layers}.layer.0.layer_norm.weight": None,
    }
