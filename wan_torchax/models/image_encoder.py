"""CLIP's image encoder, whose tokens the transformers of Wan 2.1's image-to-video attend to beside the text's."""
import torch
import transformers
from omegaconf import OmegaConf


class ImageEncoder:
    ignored = (r"embeddings\.position_ids", r"post_layernorm\.", r"visual_projection\.")
    prefix = "vision_model."  # versions of transformers differ in whether names have it

    @staticmethod
    def build(config) -> torch.nn.Module:
        """Without its last layer and norm, which only CLIP's own output needs."""
        settings = transformers.CLIPVisionConfig(**OmegaConf.to_container(config.model.architecture.image_encoder))
        with torch.device("meta"):
            module = transformers.CLIPVisionModel(settings).eval()
        module = getattr(module, "vision_model", module)
        last = len(module.encoder.layers) - 1
        module.encoder.layers = module.encoder.layers[:last]
        module.post_layernorm = module.embeddings.position_ids = None
        module.ignored = (rf"encoder\.layers\.{last}\.",)
        return module


def encode_picture(module, pixels):
    """Pictures (count, 3, height, width), normalised as CLIP wants them, to tokens (count, 1 + patches, width)."""
    embeddings = module.embeddings
    patches = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
    first = embeddings.class_embedding.expand(patches.shape[0], 1, -1)
    tokens = torch.cat([first, patches], dim=1) + embeddings.position_embedding.weight
    return module.encoder(inputs_embeds=module.pre_layrnorm(tokens)).last_hidden_state
