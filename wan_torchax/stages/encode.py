"""Pictures and videos to what a model is conditioned on: their latents, and which frames they are."""
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy

from wan_torchax.config.geometry import Geometry
from wan_torchax.devices.sharding import struct
from wan_torchax.events import Advanced
from wan_torchax.runtime.programs import NotFinite
from wan_torchax.stages.chunks import add_chunks, statistics
from wan_torchax.stages.pictures import pixels_of, read_picture, read_video
from wan_torchax.stages.stage import Stage


class Encoder(Stage):
    """What all stages have in common that encode pixels with the VAE: `first` takes a frame, `later` as many as a
    latent frame stands for, each with the caches for the next."""

    result_settings = (
        "model.path", "model.paths", "model.revision", "model.dtype.vae", "resolution.height", "resolution.width",
        "resolution.frames", "fit", "ops",
    )
    parts: ClassVar = {"vae": r"(encoder|quant_conv)\..*"}

    @classmethod
    def derived(cls, resolved):
        size = resolved.config.resolution
        return {"piece": (1, 3, resolved.geometry.frame_scale, size.height, size.width)}

    def build(self):
        from wan_torchax.models.vae import encode_chunk
        from wan_torchax.patches import call_module

        module = self.module("vae")
        module.decoder = module.post_quant_conv = None
        module.forward = functools.partial(encode_chunk, module)
        dtype, (mean, deviation) = self.config.model.dtype.vae, statistics(self.config.model.architecture.vae)

        def encode(arrays, pixels, caches=None):
            latents, caches = call_module(module, arrays, pixels.astype(dtype), caches)
            latents = (latents.astype(jnp.float32) - mean) / deviation
            return latents, jnp.isfinite(latents).all(), caches

        piece = self.recipe.derived["piece"]
        first = struct(self.mesh, (*piece[:2], 1, *piece[3:]), "float32")
        add_chunks(self, encode, first, struct(self.mesh, piece, "float32"))

    @classmethod
    def amount(cls, resolved):
        return resolved.config.resolution.frames, "frame"

    def encode(self, resolved, frames: int, pixels: Callable[[range], numpy.ndarray], tell) -> numpy.ndarray:
        """Latents (1, channels, latent frames, height, width) of a video whose pixels (1, 3, frames, height, width) in
        -1..1 come piece by piece."""
        scale, latents, caches = resolved.geometry.frame_scale, [], None
        for start in range(1 - scale, frames, scale):  # the first piece is one frame, all others `scale`
            piece = range(max(start, 0), start + scale)
            array = self.programs.put("first", (pixels(piece),))
            latent, finite, caches = self("later", *array, caches) if latents else self("first", *array)
            if not bool(finite):
                raise NotFinite(f"what is given has no finite latents at frame {piece[0]}", resolved.config, "vae")
            latents.append(numpy.asarray(latent))
            tell(Advanced(self.name, len(piece)))
        return numpy.concatenate(latents, axis=2)

    @classmethod
    def temporaries(cls, resolved):
        """Six of the widest activations of a piece."""
        size, vae = resolved.config.resolution, resolved.config.model.architecture.vae
        devices, frames = resolved.config.mesh.devices, resolved.geometry.frame_scale
        return 6 * size.height * size.width * frames * vae.get("base_dim", 96) * 4 / devices


class Encode(Encoder):
    """The first picture, and the last if there is one, to a condition (1, mask + channels, frames, height, width).

    The VAE encodes a video of these pictures with grey between them. In front of its latents goes a mask: a channel for
    every frame that a latent frame stands for, 1 where a picture is given.
    """

    @classmethod
    def result_shapes(cls, config):
        geometry = Geometry.of(config.model.architecture)
        batch, channels, *sizes = geometry.latent_shape(config.resolution)
        return {"condition": (batch, geometry.frame_scale + channels, *sizes)}

    def run(self, resolved, values, tell):
        size = resolved.config.resolution
        given = {0: "image", size.frames - 1: "last_image"}
        pictures = {
            frame: read_picture(Path(values[name]), size.height, size.width, resolved.config.fit)
            for frame, name in given.items()
            if name in values
        }
        latents = self.encode(resolved, size.frames, lambda piece: video(pictures, piece, size), tell)
        marks = mask(pictures, resolved.geometry.frame_scale, latents.shape)
        return {"condition": numpy.concatenate([marks, latents], axis=1)}


class EncodeFirst(Encoder):
    """A picture to its latents alone (1, channels, 1, height, width): the first latent frame of the video, as it is."""

    @classmethod
    def result_shapes(cls, config):
        batch, channels, _, *sides = Geometry.of(config.model.architecture).latent_shape(config.resolution)
        return {"first_latent": (batch, channels, 1, *sides)}

    @classmethod
    def amount(cls, resolved):
        return 1, "frame"

    def run(self, resolved, values, tell):
        size = resolved.config.resolution
        picture = read_picture(Path(values["image"]), size.height, size.width, resolved.config.fit)
        return {"first_latent": self.encode(resolved, 1, lambda _: picture[None, :, None], tell)}


class EncodeVideo(Encoder):
    """A video to its latents (1, channels, frames, height, width), for a sampling that starts from them."""

    @classmethod
    def result_shapes(cls, config):
        return {"video_latents": Geometry.of(config.model.architecture).latent_shape(config.resolution)}

    def run(self, resolved, values, tell):
        frames = read_video(Path(values["video"]), resolved.config.resolution, resolved.config.fit)
        latents = self.encode(resolved, len(frames), lambda piece: pixels_of(frames[piece.start : piece.stop]), tell)
        return {"video_latents": latents}


def video(pictures: dict[int, numpy.ndarray], frames: range, size) -> numpy.ndarray:
    """Some frames of a video (1, 3, frames, height, width): the pictures in their places, mid grey elsewhere."""
    grey = numpy.zeros((3, size.height, size.width), numpy.float32)
    return numpy.stack([pictures.get(frame, grey) for frame in frames], axis=1)[None]


def mask(pictures: dict[int, numpy.ndarray], scale: int, latent_shape) -> numpy.ndarray:
    """(1, scale, latent frames, height, width): 1 where a picture is given. The first latent frame stands for one frame
    only, which all its channels show."""
    batch, _, frames, height, width = latent_shape
    given = numpy.zeros(frames * scale, numpy.float32)
    for frame in pictures:
        given[frame + scale - 1] = 1
    given[: scale - 1] = given[scale - 1]
    channels = given.reshape(1, frames, scale, 1, 1).transpose(0, 2, 1, 3, 4)
    return numpy.broadcast_to(channels, (batch, scale, frames, height, width))
