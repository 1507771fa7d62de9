"""UMT5's encoder, which turns token ids into embeddings."""
import torch
import transformers
from omegaconf import OmegaConf


class TextEncoder:
    ignored = ()

    @staticmethod
    def build(config) -> torch.nn.Module:
        with torch.device("meta"):
            settings = transformers.UMT5Config(**OmegaConf.to_container(config.model.architecture.text_encoder))
            module = transformers.UMT5EncoderModel(settings).eval()
        if module.encoder.embed_tokens.weight is not module.shared.weight:
            raise RuntimeError("transformers left the encoder's embedding untied from the shared table: it gives noise")
        return module
