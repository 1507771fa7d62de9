"""FLUX.1's image VAE, decoding. An image is a video of one frame."""
import diffusers
import torch

from wan_torchax.devices.sharding import partition_spec
from wan_torchax.models.activations import constrain_pictures
from wan_torchax.models.modules import construct
from wan_torchax.patches import call_function

PICTURES = r"decoder\.(conv_in|mid_block|up_blocks\.\d+)"


def build(architecture) -> torch.nn.Module:
    return construct(diffusers.AutoencoderKL, architecture)


def decoder(module, config, mesh):
    """See models.family.VideoCodec; there is never a later chunk, so nothing is carried over."""
    vae = config.model.architecture.vae
    module.encoder = module.quant_conv = None
    constrain_pictures(module, PICTURES, without_frames(config.sharding.picture), mesh)

    def decode(arrays, latent, caches):
        latent = latent / vae["scaling_factor"] + (vae.get("shift_factor") or 0)
        pixels = call_function(decode_image, module, arrays, latent[:, :, 0].astype(config.model.dtype.vae))
        return pixels[:, :, None], {}

    return decode, partition_spec([])


def without_frames(spec) -> list:
    """sharding.picture, of (batch, channels, frames, height, width), for images."""
    return [*spec[:2], *spec[3:]]


def decode_image(vae, latent):
    """(1, channels, height, width) to pixels (1, 3, height, width) in -1..1."""
    latent = latent if vae.post_quant_conv is None else vae.post_quant_conv(latent)
    return vae.decoder(latent).clamp(-1, 1)
