"""Wan's causal video VAE, run in chunks with its caches carried from one call to the next."""
import functools

import diffusers
import jax
import numpy
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify

from wan_torchax.config.schema import ConfigError
from wan_torchax.devices.sharding import padded, partition_spec
from wan_torchax.models.activations import constrain_pictures
from wan_torchax.models.modules import construct
from wan_torchax.models.wan import vae_lines
from wan_torchax.patches import call_function

PICTURES = r"decoder\.(conv_in|mid_block|up_blocks\.\d+)|encoder\.(conv_in|mid_block|down_blocks\.\d+)"


def build(architecture) -> torch.nn.Module:
    return construct(diffusers.AutoencoderKLWan, architecture)


def decoder(module, config, mesh):
    """See models.family.VideoCodec."""
    if config.mesh.chip.vae_lines:
        return decoder_by_lines(config, mesh)
    module.encoder = module.quant_conv = None
    constrain_pictures(module, PICTURES, config.sharding.picture, mesh)
    mean, deviation = statistics(config.model.architecture.vae)

    def decode(arrays, latent, caches):
        latent = (latent * deviation + mean).astype(config.model.dtype.vae)
        return call_function(decode_chunk, module, arrays, latent, caches)

    return decode, cache_spec(config)


def decoder_by_lines(config, mesh):
    """The decoder with columns sharded explicitly over the chips (vae_lines.py)."""
    spec = partition_spec(config.sharding.picture)
    axes = next(filter(None, spec), None)
    if config.model.architecture.vae.get("is_residual") or axes is None:
        raise ConfigError(
            "mesh.chip.vae_lines=true: is for Wan 2.1's VAE and a picture that sharding.picture spreads; set it to "
            "false"
        )
    caches_spec = jax.sharding.PartitionSpec(None, axes)
    specs = (jax.sharding.PartitionSpec(), spec, caches_spec)
    mean, deviation = statistics(config.model.architecture.vae)
    upright = spec[3] is not None
    side = 3 if upright else 4

    def decode(arrays, latent, caches):
        latent = (latent * deviation + mean).astype(config.model.dtype.vae)
        columns = latent.shape[side]
        latent = padded(latent, jax.sharding.NamedSharding(mesh, spec))
        chunk = functools.partial(vae_lines.decode_chunk, axes=axes, columns=columns, upright=upright)
        spread = jax.shard_map(chunk, mesh=mesh, in_specs=specs, out_specs=specs[1:], check_vma=False)
        pixels, caches = spread(arrays, latent, caches)
        scale = pixels.shape[side] // latent.shape[side]
        return jax.lax.slice_in_dim(pixels, 0, columns * scale, axis=side), caches

    return decode, caches_spec


def encoder(module, config, mesh):
    """See models.family.VideoCodec."""
    module.decoder = module.post_quant_conv = None
    constrain_pictures(module, PICTURES, config.sharding.picture, mesh)
    mean, deviation = statistics(config.model.architecture.vae)

    def encode(arrays, pixels, caches):
        pixels = pixels.astype(config.model.dtype.vae)
        latents, caches = call_function(encode_chunk, module, arrays, pixels, caches)
        return (latents.astype("float32") - mean) / deviation, caches

    return encode, cache_spec(config)


def cache_spec(config) -> jax.sharding.PartitionSpec:
    """Caches are sharded like frames, with channels last."""
    spec = partition_spec(config.sharding.picture)
    return jax.sharding.PartitionSpec(*spec[:1], *spec[2:], *spec[1:2])


def statistics(architecture) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Mean and standard deviation of the VAE's latents per channel, for the transformer's normalized latents."""
    return tuple(numpy.float32(architecture[key]).reshape(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))


def decode_chunk(vae, latent, caches):
    """One latent frame to its pixels, with the causal convolutions' last two inputs carried in `caches`.

    latent (1, channels, 1, height, width); caches None for a video's first latent frame, which decodes to one frame,
    then those of the previous call, which decode to as many frames as a latent frame covers. The program is the same
    for every later frame, so a video of any length compiles once. Returns pixels (1, 3, frames, height, width) in -1..1
    and the caches, which have channels last, the convolutions' layout, to avoid copies.

    diffusers marks a missing cache by None or "Rep" and zero-pads a short one inside the convolution; here every cache
    has two frames from the start, with leading zeros, which is equivalent.
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
    waiting = iter(upsampled)  # inputs of the temporal upsamplers, whose first call leaves "Rep"
    features = [next(waiting)[:, :, -1:] * 0 if isinstance(feature, str) else feature for feature in features]
    if vae.config.patch_size is not None:
        pixels = unpatchify(pixels, vae.config.patch_size)
    return pixels.clamp(-1, 1), packed(features)


def encode_chunk(vae, pixels, caches):
    """Pixels (1, 3, frames, height, width) in -1..1 to one latent frame; the inverse of `decode_chunk`.

    The first chunk is one frame, with caches None; later ones have as many frames as a latent frame covers. Returns the
    mode of the latents (1, channels, 1, height, width), and the caches.
    """
    features = unpacked(vae.encoder, caches)
    if vae.config.patch_size is not None:  # Wan 2.2's folds 2 x 2 pixels into channels
        pixels = patchify(pixels, vae.config.patch_size)
    moments = vae.quant_conv(vae.encoder(pixels, feat_cache=features, feat_idx=[0]))
    return moments.chunk(2, dim=1)[0], packed(features)


def unpacked(part, caches) -> list:
    """The caches in diffusers' format: one per causal convolution, None at the start."""
    features = [None] * sum(isinstance(module, WanCausalConv3d) for module in part.modules())
    for index, cache in (caches or {}).items():
        features[int(index)] = torch.movedim(cache, -1, 1)
    return features


def packed(features: list) -> dict:
    """The convolutions' new caches, two frames each, channels last."""
    return {
        str(index): torch.movedim(two_frames(feature), 1, -1)
        for index, feature in enumerate(features)
        if feature is not None
    }


def two_frames(cache):
    """Pad a one-frame cache to two with leading zeros."""
    return cache if cache.shape[2] == 2 else torch.cat([torch.zeros_like(cache), cache], dim=2)
