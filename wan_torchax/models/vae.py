"""Wan's causal video VAE, run chunk by chunk with its caches carried from one call to the next."""
import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify

from wan_torchax.models.modules import construct


class Vae:
    ignored = ()

    @staticmethod
    def build(config) -> torch.nn.Module:
        return construct(diffusers.AutoencoderKLWan, config.model.architecture.vae)


def decode_chunk(vae, latent, caches):
    """One latent frame to its pixels, the causal convolutions' last two inputs carried in `caches`.

    latent (1, channels, 1, height, width); caches None for a video's first latent frame, which gives one frame of
    pixels, then what the call before returned, which gives as many as the VAE puts into a latent frame. The program
    is the same for every later frame, so a video of any length compiles once. Returns pixels (1, 3, frames, height,
    width) in -1..1 and the caches, which have their channels last: so they need not be copied for convolutions that
    want them there.

    diffusers marks a cache that does not exist yet by None or "Rep" and pads one that is too short with zeros inside
    the convolution; here every cache is two frames from the start, zeros in front, which gives the same sums.
    """
    first, features, upsampled = caches is None, unpacked(vae.decoder, caches), []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: upsampled.append(inputs[0]))
        for module in vae.decoder.modules()
        if getattr(module, "mode", None) == "upsample3d"
    ]
    pixels = vae.decoder(vae.post_quant_conv(latent), feat_cache=features, feat_idx=[0], first_chunk=first)
    for hook in hooks:
        hook.remove()
    waiting = iter(upsampled)  # inputs of the layers that double the frame rate: they left "Rep" in the first call
    features = [next(waiting)[:, :, -1:] * 0 if isinstance(feature, str) else feature for feature in features]
    if vae.config.patch_size is not None:
        pixels = unpatchify(pixels, vae.config.patch_size)
    return pixels.clamp(-1, 1), packed(features)


def encode_chunk(vae, pixels, caches):
    """Pixels (1, 3, frames, height, width) in -1..1 to the latent frame they make, as `decode_chunk` the other way.

    A video's first frame makes one, with caches None; then as many frames as the VAE puts into a latent frame. Returns
    the mode of the latents (1, channels, 1, height, width), and the caches.
    """
    features = unpacked(vae.encoder, caches)
    if vae.config.patch_size is not None:  # Wan 2.2's folds 2 x 2 pixels into channels
        pixels = patchify(pixels, vae.config.patch_size)
    moments = vae.quant_conv(vae.encoder(pixels, feat_cache=features, feat_idx=[0]))
    return moments.chunk(2, dim=1)[0], packed(features)


def unpacked(part, caches) -> list:
    """The caches as diffusers' encoder and decoder take them: one for every causal convolution, None at the start."""
    features = [None] * sum(isinstance(module, WanCausalConv3d) for module in part.modules())
    for index, cache in (caches or {}).items():
        features[int(index)] = torch.movedim(cache, -1, 1)
    return features


def packed(features: list) -> dict:
    """What the convolutions left, two frames each, channels last."""
    return {
        str(index): torch.movedim(two_frames(feature), 1, -1)
        for index, feature in enumerate(features)
        if feature is not None
    }


def two_frames(cache):
    """A cache of one frame, with a frame of zeros in front."""
    return cache if cache.shape[2] == 2 else torch.cat([torch.zeros_like(cache), cache], dim=2)
