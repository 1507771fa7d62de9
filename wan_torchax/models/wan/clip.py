"""CLIP's image encoder, for cross-attention in Wan 2.1's image-to-video models. Imports torch and transformers."""
import torch
import transformers

from wan_torchax.patches import call_function


def build(architecture) -> torch.nn.Module:
    """CLIP's vision model without the last layer and norm: Wan uses the penultimate hidden state."""
    with torch.device("meta"):
        module = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**architecture)).eval()
    module = getattr(module, "vision_model", module)
    module.encoder.layers = module.encoder.layers[:-1]
    module.post_layernorm = module.embeddings.position_ids = None
    return module


def unused(architecture) -> tuple[str, ...]:
    last = architecture["num_hidden_layers"] - 1
    return (
        r"embeddings\.position_ids", r"post_layernorm\.", r"visual_projection\.", rf"encoder\.layers\.{last}\.",
    )


def encode(module, arrays, pixels):
    """Normalized images (count, 3, height, width) to tokens (count, 1 + patches, width)."""
    return call_function(tokens, module, arrays, pixels)


def tokens(module, pixels):
    embeddings = module.embeddings
    patches = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
    first = embeddings.class_embedding.expand(patches.shape[0], 1, -1)
    embedded = torch.cat([first, patches], dim=1) + embeddings.position_embedding.weight
    return module.encoder(inputs_embeds=module.pre_layrnorm(embedded)).last_hidden_state
