"""Wan 2.1 text-to-video for ComfyUI. Link this folder into ComfyUI's custom_nodes; README.md says how."""
from . import project  # isort: skip - before the others: it makes wan_torchax importable
from .nodes import Wan21Adapter, Wan21Config, Wan21TextEncoder, Wan21TPUPipeline, Wan21TPUSampler, Wan21TPUVAEDecoder

NODES = (Wan21Config, Wan21Adapter, Wan21TextEncoder, Wan21TPUSampler, Wan21TPUVAEDecoder, Wan21TPUPipeline)
NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}

NODE_DISPLAY_NAME_MAPPINGS = {
    "Wan21Config": "Wan 2.1 Config",
    "Wan21Adapter": "Wan 2.1 Adapter",
    "Wan21TextEncoder": "Wan 2.1 Text Encoder",
    "Wan21TPUSampler": "Wan 2.1 TPU Sampler",
    "Wan21TPUVAEDecoder": "Wan 2.1 TPU VAE Decoder",
    "Wan21TPUPipeline": "Wan 2.1 TPU Full Pipeline",
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "project"]
