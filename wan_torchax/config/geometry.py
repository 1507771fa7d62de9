"""The relation of pixels, latents and tokens, and quantities that follow from a config. No JAX, no torch."""
import math
from dataclasses import dataclass

DEFAULT_STRENGTH = 0.8


@dataclass(frozen=True)
class Geometry:
    """A model's geometry; its family derives it from the architectures of the VAE and the transformer."""

    channels: int  # of the latents
    frame_scale: int  # video frames per latent frame; the first latent frame is one video frame
    size_scale: int  # pixels per latent pixel, along each side
    patch: tuple[int, int, int]  # latent frames, height and width of a token

    @property
    def multiples(self) -> dict[str, int]:
        """Height and width must be multiples of these."""
        return {"height": self.size_scale * self.patch[1], "width": self.size_scale * self.patch[2]}

    def latent_shape(self, resolution, extra_frames: int = 0) -> tuple[int, int, int, int, int]:
        """(1, channels, frames, height, width) of a video's latents, with `extra_frames` in front."""
        frames = extra_frames + (resolution.frames - 1) // self.frame_scale + 1
        return 1, self.channels, frames, resolution.height // self.size_scale, resolution.width // self.size_scale

    def grid(self, resolution, extra_frames: int = 0) -> tuple[int, int, int]:
        """Frames, height and width of a video in tokens."""
        _, _, *latents = self.latent_shape(resolution, extra_frames)
        frames, height, width = (size // side for size, side in zip(latents, self.patch))
        return frames, height, width

    def tokens(self, resolution, extra_frames: int = 0) -> int:
        return math.prod(self.grid(resolution, extra_frames))

    def pixels(self, latent_shape) -> dict[str, int]:
        """frames, height and width of the video that latents of this shape decode to."""
        frames, height, width = latent_shape[2:]
        return {
            "frames": (frames - 1) * self.frame_scale + 1,
            "height": height * self.size_scale,
            "width": width * self.size_scale,
        }


def guided(config) -> bool:
    """Whether classifier-free guidance is on, which needs the negative prompt and twice the work. As in diffusers, a
    scale of 1 or less turns it off. A guidance-distilled model takes the scale as an input instead."""
    return config.guidance_scale > 1 and "guidance_scale" not in config.pipeline.inputs.values()


def expert_at(config, timestep: float) -> str:
    """The expert for a timestep, from 1000 (all noise) to 0. As in diffusers, the first includes the boundary."""
    first, *others = config.model.experts
    return others[0] if others and timestep < config.model.boundary * 1000 else first


def guidance_at(config, timestep: float) -> float:
    """The guidance scale at a timestep: each expert may have its own."""
    first, second = config.guidance_scale, config.guidance_scale_2
    return first if second is None or expert_at(config, timestep) == config.model.experts[0] else second


def steps_skipped(config) -> int:
    """Steps skipped at the start for `strength` (video-to-video). As in diffusers."""
    if "strength" not in config.pipeline.inputs.values():
        return 0
    strength = DEFAULT_STRENGTH if config.strength is None else config.strength
    return config.steps - int(config.steps * min(max(0, strength), 1))  # validation reports others, also NaN


def previewer_of(config) -> str | None:
    """The component that decodes previews besides the decoder of the video; None if there is none."""
    component = config.preview.component
    return component if config.preview_every and component != config.vae.component else None


def prompt_count(config) -> int:
    """Prompts in a batch: the prompt and, with guidance, the negative prompt."""
    return 2 if guided(config) else 1


def text_count(config) -> int:
    """Prompts that are encoded: NAG needs the negative prompt without guidance too."""
    return 2 if guided(config) or config.guider.nag != 1 else 1


def device_count(mesh) -> int:
    """Devices of a mesh whose axis sizes are resolved."""
    return math.prod(mesh.axes.values())


def is_segmented(config) -> bool:
    """Whether a video is made in segments. One that fits into a segment is made in one piece, unless segments are
    always whole."""
    segments = config.pipeline.segments
    return bool(segments.stages) and (segments.whole or config.resolution.frames > segments.frames)


def segment_count(config) -> int:
    """How many segments a video is made in, one after the other."""
    segments = config.pipeline.segments
    frames = config.resolution.frames + segments.dropped
    if not is_segmented(config) or frames <= segments.frames:
        return 1
    return math.ceil((frames - segments.overlap) / (segments.frames - segments.overlap))
