"""FLUX.1's text encoders: CLIP, of which it takes one vector, and T5. Neither has a mask. Imports torch."""
import jax.numpy as jnp
import torch
import transformers

from wan_torchax.models.modules import t5_encoder
from wan_torchax.patches import call_module


def build_clip(architecture) -> torch.nn.Module:
    with torch.device("meta"):
        module = transformers.CLIPTextModel(transformers.CLIPTextConfig(**architecture)).eval()
    module = getattr(module, "text_model", module)
    module.embeddings.position_ids = None  # given below: on the meta device it has no values
    return module


def pool(module, arrays, ids):
    """The prompt as one vector: (prompts, width), CLIP's at the end of the text."""
    places = jnp.arange(ids.shape[1])[None]
    return {"pooled": call_module(module, arrays, ids, position_ids=places, return_dict=False)[1]}


def build_t5(architecture) -> torch.nn.Module:
    return t5_encoder(transformers.T5EncoderModel, transformers.T5Config(**architecture))


def encode(module, arrays, ids):
    """Embeddings (prompts, tokens, width), of padding too: the model was made with them."""
    return {"embeddings": call_module(module, arrays, ids, return_dict=False)[0]}
