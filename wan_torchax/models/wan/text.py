"""UMT5's encoder, for prompt embeddings. Imports torch and transformers."""
import jax.numpy as jnp
import torch
import transformers

from wan_torchax.models.modules import t5_encoder
from wan_torchax.patches import call_module


def build(architecture) -> torch.nn.Module:
    return t5_encoder(transformers.UMT5EncoderModel, transformers.UMT5Config(**architecture))


def encode(module, arrays, ids, mask):
    """Embeddings (prompts, tokens, width), zero where there is padding."""
    hidden = call_module(module, arrays, ids, attention_mask=mask, return_dict=False)[0]
    return {"embeddings": jnp.where(mask[..., None] > 0, hidden, 0)}
