"""Latents to frames."""
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy

from wan_torchax.config.schema import ConfigError
from wan_torchax.devices.sharding import partition_spec, struct
from wan_torchax.events import Advanced, Decoded
from wan_torchax.runtime.programs import NotFinite
from wan_torchax.stages.chunks import add_chunks, statistics
from wan_torchax.stages.stage import Stage


class Decode(Stage):
    """Latents (1, channels, frames, height, width) to uint8 frames (frames, height, width, 3).

    Latent frames go through one by one: `first` gives one frame, `later` as many as a latent frame stands for, each
    with the caches for the next.
    """

    settings = ("mesh.chip.vae_lines",)
    result_settings = ("model.dtype.vae",)
    parts: ClassVar = {"vae": r"(decoder|post_quant_conv)\..*"}

    @classmethod
    def result_shapes(cls, config):
        size = config.resolution
        return {"frames": (size.frames, size.height, size.width, 3)}

    @classmethod
    def derived(cls, resolved):
        batch, channels, _, height, width = resolved.latent_shape
        return {"latent_shape": (batch, channels, 1, height, width)}

    def build(self):
        chunk, carry = self.by_lines() if self.config.mesh.chip.vae_lines else self.by_modules()
        dtype, (mean, deviation) = self.config.model.dtype.vae, statistics(self.config.model.architecture.vae)

        def decode(arrays, latent, caches=None):
            pixels, caches = chunk(arrays, (latent * deviation + mean).astype(dtype), caches)
            pixels = pixels.astype(jnp.float32)
            frames = jnp.round((pixels[0] + 1) * 127.5).astype(jnp.uint8).transpose(1, 2, 3, 0)
            return frames, jnp.isfinite(pixels).all(), caches

        latent = struct(self.mesh, self.recipe.derived["latent_shape"], "float32")
        add_chunks(self, decode, latent, latent, carry)

    def by_modules(self):
        """diffusers' decoder as a function of (arrays, latent, caches), and no spec for its caches but the config's."""
        from wan_torchax.models.vae import decode_chunk
        from wan_torchax.patches import call_module

        module = self.module("vae")
        module.encoder = module.quant_conv = None
        module.forward = functools.partial(decode_chunk, module)
        return functools.partial(call_module, module), None

    def by_lines(self):
        """The same with every chip at its own columns, and the spec of the caches."""
        from wan_torchax.models.vae_lines import decode_chunk

        spec = partition_spec(self.config.sharding.vae.carry)
        axes = next(filter(None, spec), None)
        if self.config.model.architecture.vae.get("is_residual") or axes is None:
            raise ConfigError(
                "mesh.chip.vae_lines=true: is for Wan 2.1's VAE and a picture that sharding.vae.carry spreads; set it "
                "to false"
            )
        carry = jax.sharding.PartitionSpec(None, axes)
        chunk = functools.partial(decode_chunk, axes=axes, upright=spec[3] is not None)
        specs = (jax.sharding.PartitionSpec(), spec, carry)
        return jax.shard_map(chunk, mesh=self.mesh, in_specs=specs, out_specs=specs[1:], check_vma=False), carry

    def run(self, resolved, values, tell):
        chunks, caches, latents = [], None, values["latents"]
        for index in range(latents.shape[2]):
            latent = self.programs.put("first", (latents[:, :, index : index + 1],))
            frames, finite, caches = self("first", *latent) if index == 0 else self("later", *latent, caches)
            chunks.append((frames, finite))
            if index:  # the chunk before is copied out while the device works on this one
                chunks[-2] = self.fetch(chunks[-2], index - 1, resolved.config, tell)
        chunks[-1] = self.fetch(chunks[-1], len(chunks) - 1, resolved.config, tell)
        return {"frames": numpy.concatenate(chunks)}

    @classmethod
    def amount(cls, resolved):
        return resolved.config.resolution.frames, "frame"

    def fetch(self, chunk, index, config, tell):
        frames, finite = chunk
        if not bool(finite):
            what = f"the decoded frames are not finite at latent frame {index}"
            raise NotFinite(what, config, "vae")
        frames = numpy.asarray(frames)
        tell(Advanced(self.name, len(frames)))
        tell(Decoded(frames))
        return frames

    def preview(self, latent) -> numpy.ndarray:
        """A frame (height, width, 3) of a latent frame that is on the devices."""
        return numpy.asarray(self("first", latent)[0])[0]

    @classmethod
    def temporaries(cls, resolved):
        """Six of the widest activations of a latent frame, eight where shortcuts run beside them."""
        size, vae = resolved.config.resolution, resolved.config.model.architecture.vae
        width = 2 * (vae.get("decoder_base_dim") or vae.get("base_dim", 96))
        pixels = size.height * size.width * resolved.geometry.frame_scale / (vae.get("patch_size") or 1) ** 2
        item = jnp.dtype(resolved.config.model.dtype.vae).itemsize
        return (8 if vae.get("is_residual") else 6) * pixels * width * item / resolved.config.mesh.devices
