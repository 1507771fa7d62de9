"""Names of Qwen's language models in files of others: llama.cpp's (GGUF), and those of models that see too."""
import re
from collections.abc import Mapping

LAYER = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}, "attn_output": "self_attn.o_proj",
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}
REST = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
PREFIX = "model."
FOREIGN = r"^blk\.0\."
UNUSED = (r"norm\.", r"lm_head\.", r"visual\.")  # what lies behind the layers that are used, and what sees


def rename(parameter: str) -> str | None:
    """blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight"""
    module, _, end = parameter.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if match is None:
        return f"{REST[module]}.{end}" if module in REST else None
    part = LAYER.get(match[2])
    return part and f"layers.{match[1]}.{part}.{end}"


def respell(parameter: str) -> str | None:
    """language_model.layers.0.mlp.up_proj.weight -> layers.0.mlp.up_proj.weight"""
    return parameter.removeprefix("language_model.")


def landmarks(encoder: Mapping) -> dict[str, tuple[int, ...] | None]:
    width, layers = encoder["hidden_size"], encoder["num_hidden_layers"]
    head_dim = encoder.get("head_dim")  # of Qwen3, which norms queries; Qwen2.5 adds a bias to them
    return {
        "embed_tokens.weight": (encoder["vocab_size"], width),
        "layers.0.self_attn.q_norm.weight": (head_dim,) if head_dim else None,
        "layers.0.self_attn.q_proj.bias": None if head_dim else (width,),
        f"layers.{layers - 1}.mlp.down_proj.weight": (width, encoder["intermediate_size"]),
        f"layers.{layers}.input_layernorm.weight": None,
    }
