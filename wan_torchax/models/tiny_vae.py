"""vae=tiny: TAEHV's decoder (taehv.py) latent frame by latent frame; the state between two is one frame per memory
block."""
from collections.abc import Mapping

import jax
import torch

from wan_torchax.devices.sharding import partition_spec
from wan_torchax.models.activations import constrain_pictures
from wan_torchax.models.modules import construct
from wan_torchax.models.taehv import MemoryBlock, TinyVAE
from wan_torchax.patches import call_function


def build(architecture) -> torch.nn.Module:
    return construct(TinyVAE, architecture)


def decoder(module, config, mesh):
    """See models.family.VideoCodec."""
    spec = partition_spec([*config.sharding.picture, *[None] * 5][:5])
    spec = jax.sharding.PartitionSpec(spec[2], spec[1], *spec[3:])
    constrain_pictures(module, r"decoder\.\d+", spec, mesh)

    def decode(arrays, latent, caches):
        return call_function(decode_chunk, module, arrays, latent.astype(config.model.dtype.tiny_vae), caches)

    return decode, spec


def decode_chunk(vae: TinyVAE, latent, caches: Mapping | None):
    """One latent frame (1, channels, 1, height, width) to pixels (1, 3, frames, height, width) in -1..1, and caches:
    the last frame that each memory block has seen, None at the start. Of the first latent frame only the last of its
    frames is the video's."""
    frames, seen = latent[0].movedim(1, 0), {}
    for name, layer in vae.decoder.named_children():
        if isinstance(layer, MemoryBlock):
            before = torch.zeros_like(frames[:1]) if caches is None else caches[name]
            seen[name] = frames[-1:]
            frames = layer(frames, torch.cat([before, frames[:-1]]))
        else:
            frames = layer(frames)
    frames = frames[-1:] if caches is None else frames
    return (frames.clamp(0, 1) * 2 - 1).movedim(0, 1)[None], seen
