"""HunyuanVideo 1.5 with random weights, a few layers deep; every parameter matters to the result."""
import math

import diffusers
import torch

TRANSFORMER = dict(
    in_channels=9, out_channels=4, num_attention_heads=8, attention_head_dim=16, num_layers=3, num_refiner_layers=2,
    mlp_ratio=2.0, text_embed_dim=24, text_embed_2_dim=20, image_embed_dim=12, rope_axes_dim=(4, 6, 6), target_size=64,
)
VAE = dict(latent_channels=4, block_out_channels=(8, 16, 16, 16, 16), layers_per_block=1)


def randomized(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights as large as their inputs are many, norms and biases that are not ones and zeros: with torch's own, the
    text hardly changes the video."""
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        spread = torch.randn(parameter.shape)
        if name.endswith("gamma") or (parameter.ndim == 1 and name.endswith("weight")):
            parameter.data = 1 + 0.2 * spread
        elif parameter.ndim == 1:
            parameter.data = 0.2 * spread
        else:
            parameter.data = spread * math.prod(parameter.shape[1:]) ** -0.5
    return module.eval()


def transformer(**changes) -> torch.nn.Module:
    return randomized(diffusers.HunyuanVideo15Transformer3DModel(**TRANSFORMER | changes))


def vae() -> torch.nn.Module:
    return randomized(diffusers.AutoencoderKLHunyuanVideo15(**VAE))
