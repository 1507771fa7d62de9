"""Qwen3, for FLUX.2's prompt embeddings: hidden states of three layers beside each other. Imports torch."""
import jax.numpy as jnp
import torch
import transformers

from wan_torchax.models import qwen
from wan_torchax.patches import call_function


def build(architecture) -> torch.nn.Module:
    """The layers up to the last that is used, without the norm behind all of them."""
    own = {name: value for name, value in architecture.items() if name not in ("out_layers", "rope_theta")}
    with torch.device("meta"):
        module = transformers.Qwen3Model(transformers.Qwen3Config(**own)).eval()
    module.layers = module.layers[: max(architecture["out_layers"])]
    # What needs its buffers, which on the meta device have no values, is computed in `states`.
    module.norm = module.rotary_emb = None
    module.read = tuple(architecture["out_layers"]), float(architecture["rope_theta"])
    return module


def unused(architecture) -> tuple[str, ...]:
    layers = range(max(architecture["out_layers"]), architecture["num_hidden_layers"])
    return (*qwen.UNUSED, *(rf"layers\.{layer}\." for layer in layers))


def encode(module, arrays, ids, mask):
    """Embeddings (prompts, tokens, 3 · width), of padding too: the model was made with them."""
    out_layers, theta = module.read
    places, head_dim = jnp.arange(ids.shape[1]), module.config.head_dim
    angles = places[:, None] * theta ** -(jnp.arange(0, head_dim, 2) / head_dim)
    angles = jnp.concatenate([angles, angles], axis=-1)[None]
    seen = (places[None, :] <= places[:, None])[None, None] & (mask[:, None, None] > 0)
    return {"embeddings": call_function(states, module, arrays, ids, seen, jnp.cos(angles), jnp.sin(angles))}


def states(model, ids, seen, cosine, sine):
    """seen (prompts, 1, tokens, tokens), cosine and sine (1, tokens, head_dim)"""
    out_layers, _ = model.read
    hidden, read = model.embed_tokens(ids), []
    rotary = cosine.to(hidden.dtype), sine.to(hidden.dtype)
    for number, layer in enumerate(model.layers, start=1):
        hidden = layer(hidden, attention_mask=seen, position_embeddings=rotary)
        if number in out_layers:
            read.append(hidden)
    return torch.cat(read, dim=-1)
