"""HunyuanVideo 1.5's text encoders: Qwen2.5-VL's language model in JAX, and ByT5's. Imports torch and transformers."""
import jax
import jax.numpy as jnp
import torch
import transformers

from wan_torchax.kernels.rotary import normalized
from wan_torchax.models import qwen
from wan_torchax.models.hunyuan15.prompts import CROPPED
from wan_torchax.models.modules import t5_encoder
from wan_torchax.patches import call_module

SKIPPED = 2  # layers at the end, and the last norm: the model uses what goes into them


def build(architecture) -> torch.nn.Module:
    """Names and shapes of the layers that are used."""
    settings = {name: value for name, value in architecture.items() if name != "rope_theta"}
    with torch.device("meta"):
        module = transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(**settings)).eval()
    module.layers, module.norm = module.layers[:-SKIPPED], None
    module.heads, module.theta = architecture["num_attention_heads"], architecture["rope_theta"]
    module.epsilon = architecture["rms_norm_eps"]
    return module


def unused(architecture) -> tuple[str, ...]:
    last = architecture["num_hidden_layers"]
    return (*qwen.UNUSED, *(rf"layers\.{number}\." for number in range(last - SKIPPED, last)))


def encode(module, arrays, ids, mask):
    """Embeddings (prompts, tokens, width) of what follows the template's beginning, zero where there is padding, and
    how many there are."""
    hidden = arrays["embed_tokens.weight"][ids]
    for number in range(len(module.layers)):
        own = {name.removeprefix(start): array for name, array in arrays.items()
               if name.startswith(start := f"layers.{number}.")}
        hidden = layer(own, hidden, module.heads, module.theta, module.epsilon)
    hidden, mask = hidden[:, CROPPED:], mask[:, CROPPED:]
    return {"embeddings": jnp.where(mask[..., None] > 0, hidden, 0), "counts": mask.sum(axis=1)}


def layer(arrays: dict, hidden, heads: int, theta: float, epsilon: float):
    """Causal attention in which several heads share keys and values, and a gated feed-forward. Padding is at the end,
    so no other token sees it."""
    head_dim = arrays["self_attn.q_proj.weight"].shape[0] // heads

    def project(name, array):
        out = jnp.einsum("...a,ba->...b", array, arrays[f"{name}.weight"])
        return out + arrays[f"{name}.bias"] if f"{name}.bias" in arrays else out

    def norm(name, array):
        weight = arrays[f"{name}.weight"]
        return normalized(array.astype(jnp.float32), weight, epsilon).reshape(array.shape).astype(array.dtype)

    normed = norm("input_layernorm", hidden)
    parts = (project(f"self_attn.{name}_proj", normed) for name in "qkv")
    query, key, value = (part.reshape(*part.shape[:2], -1, head_dim) for part in parts)
    query, key = (rotate(array, theta) for array in (query, key))
    out = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + project("self_attn.o_proj", out.reshape(*out.shape[:2], -1))
    normed = norm("post_attention_layernorm", hidden)
    wide = jax.nn.silu(project("mlp.gate_proj", normed)) * project("mlp.up_proj", normed)
    return hidden + project("mlp.down_proj", wide)


def rotate(array, theta: float):
    """RoPE on (prompts, tokens, heads, head_dim): lane i and lane i + head_dim / 2 by their token's i-th angle."""
    half = array.shape[-1] // 2
    angles = jnp.arange(array.shape[1])[:, None, None] * theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    first, second = jnp.split(array.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(array.dtype)


# ---------------------------------------------------------------- glyphs


def build_glyphs(architecture) -> torch.nn.Module:
    return t5_encoder(transformers.T5EncoderModel, transformers.T5Config(**architecture))


def encode_glyphs(module, arrays, ids, mask):
    """Embeddings (prompts, tokens, width) of quoted texts, zero where there is padding, and how many there are."""
    hidden = call_module(module, arrays, ids, attention_mask=mask, return_dict=False)[0]
    return {"glyphs": jnp.where(mask[..., None] > 0, hidden, 0), "glyph_counts": mask.sum(axis=1)}
