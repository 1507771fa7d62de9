"""Latents to frames."""
from collections import deque

import jax.numpy as jnp
import numpy

from wan_torchax.config.geometry import device_count
from wan_torchax.devices.sharding import struct
from wan_torchax.events import Advanced, Decoded
from wan_torchax.records.files import Spool
from wan_torchax.runtime.programs import NotFinite
from wan_torchax.stages.chunks import add_chunks
from wan_torchax.stages.stage import Stage


class Decode(Stage):
    """Latents (1, channels, frames, height, width) to uint8 frames (frames, height, width, 3).

    Latent frames are decoded one by one: `first` returns one frame, `later` as many as a latent frame encodes, each
    with the caches for the next. In a pipeline of segments it may also give those frames of a segment that the next one
    overlaps or remembers: last_frames as they are, or before rounding last_pixels, float32 (1, 3, frames, height,
    width) in -1..1. A segment that remembers some is decoded behind their latents (motion_latents), the first one
    behind a picture's (reference_latent); what these decode to is left out.
    """

    label, share, previews, follows = "decoding", 8.0, True, True
    settings = ("sharding.picture",)

    @classmethod
    def settings_for(cls, family):
        return *cls.settings, *family.codec.settings

    @classmethod
    def reads_for(cls, name, job):
        stage = job.graph.stages.get(name)  # none for a preview
        return ("pipeline.segments.overlap",) if stage and "last_frames" in stage.gives else ()

    @classmethod
    def parts(cls, family):
        return {component: codec.decoder_part for component, codec in family.decoders().items()}

    @classmethod
    def component(cls, config) -> str:
        """What it decodes with."""
        return config.vae.component

    @classmethod
    def result_shapes(cls, name, job):
        size, kept, segments = job.config.resolution, cls.frames_kept(name, job), job.config.pipeline.segments
        shapes = {
            "frames": (size.frames, size.height, size.width, 3),
            "last_frames": (min(segments.overlap, size.frames), size.height, size.width, 3),
            "last_pixels": (1, 3, kept, size.height, size.width),
        }
        return {value: shapes[value] for value in job.graph.stages[name].gives}

    @classmethod
    def problems(cls, name, job):
        segments, last = job.config.pipeline.segments, {"last_pixels", "last_frames"} & {*job.graph.stages[name].gives}
        if last and not segments.overlap + segments.remembered:
            yield "pipeline.segments.overlap=0: each segment begins with frames of the one before; at least 1"
        if job.config.vae.component != job.family.codec.component and segments.remembered:
            yield f"vae={job.config.vae.name}: segments go on from the VAE's own frames; use vae=exact"

    @classmethod
    def frames_kept(cls, name, job) -> int:
        """The number of frames whose pixels stay on the devices: those in last_pixels, or those that a live video
        encodes the first of again."""
        stage = job.graph.stages.get(name)  # none for a preview
        segments, live = job.config.pipeline.segments, job.config.live
        if stage and live.reencode and None not in (live.window, live.chunk):  # null in a video made in one piece
            return (live.window - live.chunk - 1) * job.geometry.frame_scale + 1
        return segments.overlap + segments.remembered if stage and "last_pixels" in stage.gives else 0

    @classmethod
    def derived(cls, name, job):
        batch, channels, frames, height, width = job.latent_shape
        shape = (batch, channels, 1, height, width)
        kept, segments = cls.frames_kept(name, job), job.config.pipeline.segments
        several = frames > 1 or segments.remembered > 0
        return {"latent_shape": shape, "several": several, "frames_kept": kept, "dropped": segments.dropped}

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
        if "motion_latents" in values:
            decoding.go_on(values)
        for latent in numpy.split(values["latents"], values["latents"].shape[2], axis=2):
            decoding.add({"latents": latent})
            decoding.fetch(but=1)  # copied to the host while the device computes the next
        return decoding.result()

    def following(self, view, emit):
        return Decoding(self, view, emit, Spool(kept=view.kept))

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

    def __init__(self, stage: Decode, view, emit, frames: Spool):
        self.stage, self.view, self.emit = stage, view, emit
        self.frames, self.latents = frames, 0  # of the video, and how many latent frames they are from
        self.computed = deque()  # (frames, finite) of latent frames, on the devices
        self.caches = None
        self.kept, self.recent = stage.recipe.derived["frames_kept"], []  # pixels of the last chunks, on the devices
        self.before = None  # pixels of the frames before this segment

    def go_on(self, values: dict) -> None:
        """Decode the latents before a segment's own, for the caches behind them: of earlier frames, or of a picture."""
        latents = values["motion_latents"] if self.view.segment else values["reference_latent"]
        for latent in numpy.split(latents, latents.shape[2], axis=2):
            self.decode(latent)
        self.recent, self.before = [], values["previous"]

    def add(self, values: dict) -> None:
        """Queue the next latents (1, channels, frames, height, width) on the devices, for `fetch`."""
        for latent in numpy.split(values["latents"], values["latents"].shape[2], axis=2):
            self.computed.append(self.decode(latent))

    def decode(self, latent: numpy.ndarray):
        """(frames, finite) of a latent frame, on the devices."""
        (latent,) = self.stage.programs.put("first", (latent,))
        program = ("first", latent) if self.caches is None else ("later", latent, self.caches)
        (frames, *pixels), finite, self.caches = self.stage(*program)
        self.recent = [*self.recent, *pixels]
        while self.recent and frames_in(self.recent[1:]) >= self.kept:
            self.recent.pop(0)
        return frames, finite

    def fetch(self, ready: bool = False, but: int = 0) -> None:
        """Emit the frames of all latents that were added, but for so many of the last; if they are to be `ready`, only
        once all of them are."""
        if ready and self.computed and not self.computed[-1][0].is_ready():
            return
        while len(self.computed) > but:
            frames, finite = self.computed.popleft()
            if not bool(finite):
                place = f"at latent frame {self.latents}"
                raise NotFinite(f"the decoded frames are not finite {place}", self.view.config, "vae")
            chunk, self.latents = numpy.asarray(frames), self.latents + 1
            self.frames.append(chunk)
            self.emit(Advanced(self.stage.name, len(chunk)))
            self.emit(Decoded(chunk))

    def result(self) -> dict[str, numpy.ndarray]:
        self.fetch()
        if (frames := self.frames.array()) is None:  # they are where they were emitted to
            return {}
        values = {"frames": frames}
        if "last_pixels" in self.stage.gives:
            values["last_pixels"] = self.last_pixels(len(frames))
        if "last_frames" in self.stage.gives:
            values["last_frames"] = numpy.array(frames[-self.view.config.pipeline.segments.overlap :])
        return values

    def first_kept(self) -> numpy.ndarray:
        """(1, 3, 1, height, width): the first of the pixels that stay on the devices."""
        return numpy.concatenate(self.recent, axis=2)[:, :, -self.kept :][:, :, :1]

    def last_pixels(self, total: int) -> numpy.ndarray:
        """The last pixels of the segment's frames; if these are few, behind those of the segments before, grey at
        first."""
        dropped = 0 if self.view.segment else self.stage.recipe.derived["dropped"]
        last = numpy.concatenate(self.recent, axis=2)[:, :, max(dropped + frames_in(self.recent) - total, 0) :]
        before = numpy.zeros((*last.shape[:2], self.kept, *last.shape[3:]), last.dtype)
        before = before if self.before is None else self.before
        return numpy.concatenate([before[:, :, last.shape[2] :], last], axis=2)[:, :, -self.kept :]


def frames_in(chunks: list) -> int:
    return sum(chunk.shape[2] for chunk in chunks)
