"""FLUX.2's image VAE, decoding. Its latents are folded 2 x 2 into channels and normalized by statistics it stores."""
import diffusers
import torch

from wan_torchax.devices.sharding import partition_spec
from wan_torchax.models.activations import constrain_pictures
from wan_torchax.models.flux.streams import unpacked
from wan_torchax.models.flux.vae import PICTURES, decode_image, without_frames
from wan_torchax.models.modules import construct
from wan_torchax.patches import call_function

PATCH = 2  # pixels a side of the VAE's latents that are one of the transformer's


class Statistics(torch.nn.Module):
    """A batch norm's mean and variance as parameters: they are in the checkpoint."""

    def __init__(self, channels: int):
        super().__init__()
        for name in ("running_mean", "running_var"):
            setattr(self, name, torch.nn.Parameter(torch.empty(channels, device="meta")))


def build(architecture) -> torch.nn.Module:
    module = construct(diffusers.AutoencoderKLFlux2, architecture)
    module.bn = Statistics(module.bn.num_features)
    return module


def decoder(module, config, mesh):
    """See models.family.VideoCodec; there is never a later chunk, so nothing is carried over."""
    epsilon = module.config.batch_norm_eps
    module.encoder = module.quant_conv = None
    constrain_pictures(module, PICTURES, without_frames(config.sharding.picture), mesh)

    def decode(arrays, latent, caches):
        mean, variance = (arrays[f"bn.running_{name}"].reshape(1, -1, 1, 1, 1) for name in ("mean", "var"))
        latent = latent * (variance + epsilon) ** 0.5 + mean
        batch, channels, _, height, width = latent.shape
        shape = batch, channels // PATCH**2, 1, height * PATCH, width * PATCH
        latent = unpacked(latent.reshape(batch, channels, -1).swapaxes(1, 2), shape, PATCH)
        pixels = call_function(decode_image, module, arrays, latent[:, :, 0].astype(config.model.dtype.vae))
        return pixels[:, :, None], {}

    return decode, partition_spec([])
