"""SigLIP's image encoder, for the image's tokens in joint attention. Imports torch and transformers."""
import torch
import transformers

from wan_torchax.patches import call_function


def build(architecture) -> torch.nn.Module:
    """SigLIP's vision model without its pooling head."""
    with torch.device("meta"):
        module = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**architecture)).eval()
    module = getattr(module, "vision_model", module)
    module.head = module.embeddings.position_ids = None
    return module


def encode(module, arrays, pixels):
    """Normalized images (count, 3, height, width) to tokens (count, patches, width)."""
    return call_function(tokens, module, arrays, pixels)


def tokens(module, pixels):
    patches = module.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
    embedded = patches + module.embeddings.position_embedding.weight
    return module.post_layernorm(module.encoder(inputs_embeds=embedded).last_hidden_state)
