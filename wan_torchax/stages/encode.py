"""Images and videos to conditions of the model, with the VAE."""
from collections.abc import Callable

import jax.numpy as jnp
import numpy

from wan_torchax.config.geometry import device_count
from wan_torchax.devices.sharding import struct
from wan_torchax.events import Advanced
from wan_torchax.models.family import LatentEncoding
from wan_torchax.runtime.programs import NotFinite
from wan_torchax.stages.chunks import add_chunks
from wan_torchax.stages.stage import Stage


class Encode(Stage):
    """Encodes pixels with the family's VAE (Family.encodings), chunk by chunk: `first` takes one frame, `later` as many
    as a latent frame encodes, each with the caches for the next."""

    share = 3.0
    settings = ("sharding.picture",)
    reads = ("resolution.height", "resolution.width", "resolution.frames", "fit")

    @classmethod
    def encodings(cls, name, job) -> dict[str, LatentEncoding]:
        """By the names of what it gives."""
        return {value: job.family.encodings[cls.known(value)] for value in job.graph.stage(name).gives}

    @staticmethod
    def known(value: str) -> str:
        """The family's name of a value."""
        return value

    @classmethod
    def problems(cls, name, job):
        for value in map(cls.known, job.graph.stages[name].gives):
            if value not in job.family.encodings:
                model, pipeline = f"model={job.config.model.name}", f"pipeline={job.config.pipeline.name}"
                yield f"{pipeline}: {model} takes no {value}, which it gives; choose another pipeline"

    @classmethod
    def settings_for(cls, family):
        return *cls.settings, *family.codec.settings

    @classmethod
    def reads_for(cls, name, job):
        own = (key for encoding in cls.encodings(name, job).values() for key in encoding.settings)
        return *cls.reads, *dict.fromkeys(own)

    @classmethod
    def parts(cls, family):
        return {family.codec.component: family.codec.encoder_part}

    @classmethod
    def derived(cls, name, job):
        size = job.config.resolution
        return {"piece": (1, 3, job.geometry.frame_scale, size.height, size.width)}

    @classmethod
    def result_shapes(cls, name, job):
        return {value: encoding.shape(job) for value, encoding in cls.encodings(name, job).items()}

    @classmethod
    def amount(cls, name, job):
        return sum(encoding.frames(job) for encoding in cls.encodings(name, job).values()), "frame"

    def build(self):
        codec = self.family.codec
        encode_piece, caches_spec = codec.encoder(self.module(codec.component), self.config, self.mesh)

        def encode(arrays, pixels, caches=None):
            latents, caches = encode_piece(arrays, pixels, caches)
            return latents, jnp.isfinite(latents).all(), caches

        piece = self.recipe.derived["piece"]
        first = struct(self.mesh, (*piece[:2], 1, *piece[3:]), "float32")
        add_chunks(self, encode, first, struct(self.mesh, piece, "float32"), caches_spec)

    def run(self, view, values, emit):
        def encode(frames: int, pixels: Callable[[range], numpy.ndarray]) -> numpy.ndarray:
            return self.encode(view, frames, pixels, emit)

        known = self.family.encodings
        return {value: known[self.known(value)].make(view, values, encode) for value in self.gives}

    def encode(self, view, frames: int, pixels: Callable[[range], numpy.ndarray], emit) -> numpy.ndarray:
        """Latents (1, channels, latent frames, height, width) of a video whose pixels (1, 3, frames, height, width) in
        -1..1 are produced chunk by chunk."""
        scale, latents, caches = view.geometry.frame_scale, [], None
        for start in range(1 - scale, frames, scale):  # the first piece is one frame, all others `scale`
            piece = range(max(start, 0), start + scale)
            array = self.programs.put("first", (pixels(piece),))
            latent, finite, caches = self("later", *array, caches) if latents else self("first", *array)
            if not bool(finite):
                raise NotFinite(f"what is given has no finite latents at frame {piece[0]}", view.config, "vae")
            latents.append(numpy.asarray(latent))
            emit(Advanced(self.name, len(piece)))
        return numpy.concatenate(latents, axis=2)

    @classmethod
    def temporaries(cls, resolved):
        """The widest activations of a piece, in float32."""
        size, codec = resolved.config.resolution, resolved.family.codec
        width = codec.encoder_width(resolved.config.model.architecture[codec.component])
        pixels = size.height * size.width * resolved.geometry.frame_scale
        return pixels * width * 4 / device_count(resolved.config.mesh)
