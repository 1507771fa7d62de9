"""Latents to frames."""
import jax.numpy as jnp
import numpy

from wan_torchax.config.geometry import device_count
from wan_torchax.devices.sharding import struct
from wan_torchax.events import Advanced, Decoded
from wan_torchax.records.files import Spool
from wan_torchax.runtime.programs import NotFinite
from wan_torchax.stages.chunks import add_chunks
from wan_torchax.stages.stage import Stage

IN_MEMORY = 2**30  # bytes of frames; more are in a file


class Decode(Stage):
    """Latents (1, channels, frames, height, width) to uint8 frames (frames, height, width, 3).

    Latent frames are decoded one by one: `first` returns one frame, `later` as many as a latent frame encodes, each
    with the caches for the next. In a pipeline of segments it may also give last_pixels, float32 (1, 3, frames, height,
    width) in -1..1: those frames of a segment, before rounding, that the next one overlaps.
    """

    label, share, previews, follows = "decoding", 8.0, True, True
    settings = ("sharding.picture",)

    @classmethod
    def settings_for(cls, family):
        return *cls.settings, *family.codec.settings

    @classmethod
    def parts(cls, family):
        return {component: codec.decoder_part for component, codec in family.decoders().items()}

    @classmethod
    def component(cls, config) -> str:
        """What it decodes with."""
        return config.vae.component

    @classmethod
    def result_shapes(cls, name, job):
        size, kept = job.config.resolution, cls.frames_kept(name, job)
        shapes = {"frames": (size.frames, size.height, size.width, 3)}
        return shapes | ({"last_pixels": (1, 3, kept, size.height, size.width)} if kept else {})

    @classmethod
    def problems(cls, name, job):
        if "last_pixels" in job.graph.stages[name].gives and not cls.frames_kept(name, job):
            yield "pipeline.segments.overlap=0: each segment begins with frames of the one before; at least 1"

    @classmethod
    def frames_kept(cls, name, job) -> int:
        """The number of frames in last_pixels."""
        stage = job.graph.stages.get(name)  # none for a preview
        return job.config.pipeline.segments.overlap if stage and "last_pixels" in stage.gives else 0

    @classmethod
    def derived(cls, name, job):
        batch, channels, frames, height, width = job.latent_shape
        shape = (batch, channels, 1, height, width)
        return {"latent_shape": shape, "several": frames > 1, "frames_kept": cls.frames_kept(name, job)}

    def build(self):
        (component,), kept = self.components, self.recipe.derived["frames_kept"]
        codec = self.family.decoders()[component]
        decode_piece, caches_spec = codec.decoder(self.module(component), self.config, self.mesh)

        def decode(arrays, latent, caches=None):
            pixels, caches = decode_piece(arrays, latent, caches)
            pixels = pixels.astype(jnp.float32)
            frames = jnp.round((pixels[0] + 1) * 127.5).astype(jnp.uint8).transpose(1, 2, 3, 0)
            return (frames, pixels) if kept else (frames,), jnp.isfinite(pixels).all(), caches

        latent = struct(self.mesh, self.recipe.derived["latent_shape"], "float32")
        add_chunks(self, decode, latent, latent if self.recipe.derived["several"] else None, caches_spec)

    def run(self, view, values, emit):
        decoding = self.following(view, emit)
        decoding.add(values)
        return decoding.result()

    def following(self, view, emit):
        return Decoding(self, view, emit)

    @classmethod
    def amount(cls, name, job):
        return job.config.resolution.frames, "frame"

    def preview(self, estimate, video):
        """The first frame alone: a large VAE would take longer for all of them than a step does."""
        latents = numpy.asarray(estimate)[video : video + 1, :, :1]
        return numpy.asarray(self("first", *self.programs.put("first", (latents,)))[0][0])

    @classmethod
    def temporaries(cls, resolved):
        """The widest activations of a latent frame."""
        size, component = resolved.config.resolution, cls.component(resolved.config)
        width = resolved.family.decoders()[component].decoder_width(resolved.config.model.architecture[component])
        pixels = size.height * size.width * resolved.geometry.frame_scale
        item = jnp.dtype(resolved.config.model.dtype[component]).itemsize
        return pixels * width * item / device_count(resolved.config.mesh)


class Decoding:
    """A video that is being decoded, with the VAE's caches behind its last latent frame."""

    def __init__(self, stage: Decode, view, emit):
        self.stage, self.view, self.emit = stage, view, emit
        self.frames, self.latents = Spool(IN_MEMORY), 0
        self.caches = None
        self.kept, self.recent = stage.recipe.derived["frames_kept"], []  # pixels of the last chunks, on the devices

    def add(self, values: dict) -> None:
        """Decode the next latents (1, channels, frames, height, width)."""
        computed = None
        for latent in numpy.split(values["latents"], values["latents"].shape[2], axis=2):
            before, computed = computed, self.decode(latent)
            if before:  # copied to the host while the device computes this one
                self.fetch(*before)
        self.fetch(*computed)

    def decode(self, latent: numpy.ndarray):
        """(frames, finite) of a latent frame, on the devices."""
        (latent,) = self.stage.programs.put("first", (latent,))
        program = ("first", latent) if self.caches is None else ("later", latent, self.caches)
        (frames, *pixels), finite, self.caches = self.stage(*program)
        self.recent = [*self.recent, *pixels][-self.kept :]
        return frames, finite

    def fetch(self, frames, finite) -> None:
        if not bool(finite):
            place = f"at latent frame {self.latents}"
            raise NotFinite(f"the decoded frames are not finite {place}", self.view.config, "vae")
        chunk, self.latents = numpy.asarray(frames), self.latents + 1
        self.frames.append(chunk)
        self.emit(Advanced(self.stage.name, len(chunk)))
        self.emit(Decoded(chunk))

    def result(self) -> dict[str, numpy.ndarray]:
        last = numpy.concatenate(self.recent, axis=2)[:, :, -self.kept :] if self.kept else None
        return {"frames": self.frames.array()} | ({} if last is None else {"last_pixels": last})
