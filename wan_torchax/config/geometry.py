"""How pixels, latents and tokens of a model relate, and what follows from a config for its steps. No JAX, no torch."""
import math
from dataclasses import dataclass

DEFAULT_STRENGTH = 0.8


@dataclass(frozen=True)
class Geometry:
    """Of one model: its family makes it from the architectures of the VAE and the transformer."""

    channels: int  # of the latents
    frame_scale: int  # frames of pixels that a latent frame stands for; the first stands for one
    size_scale: int  # pixels a side of a latent pixel
    patch: tuple[int, int, int]  # latent frames, height and width of a token

    @property
    def multiples(self) -> dict[str, int]:
        """What height and width must be multiples of."""
        return {"height": self.size_scale * self.patch[1], "width": self.size_scale * self.patch[2]}

    def latent_shape(self, resolution, extra_frames: int = 0) -> tuple[int, int, int, int, int]:
        """(1, channels, frames, height, width) of a video's latents, with so many more frames in front."""
        frames = extra_frames + (resolution.frames - 1) // self.frame_scale + 1
        return 1, self.channels, frames, resolution.height // self.size_scale, resolution.width // self.size_scale

    def grid(self, resolution, extra_frames: int = 0) -> tuple[int, int, int]:
        """Frames, height and width of the tokens that the transformer sees of a video."""
        _, _, *latents = self.latent_shape(resolution, extra_frames)
        frames, height, width = (size // side for size, side in zip(latents, self.patch))
        return frames, height, width

    def tokens(self, resolution, extra_frames: int = 0) -> int:
        return math.prod(self.grid(resolution, extra_frames))

    def pixels(self, latent_shape) -> dict[str, int]:
        """frames, height and width of the video that latents of this shape make."""
        frames, height, width = latent_shape[2:]
        return {
            "frames": (frames - 1) * self.frame_scale + 1,
            "height": height * self.size_scale,
            "width": width * self.size_scale,
        }


def guided(config) -> bool:
    """Whether there is classifier-free guidance, which needs the negative prompt and twice the work. As in diffusers,
    a scale of 1 or less is none. A model that was distilled with guidance takes the scale as an input instead."""
    return config.guidance_scale > 1 and "guidance_scale" not in config.pipeline.inputs.values()


def expert_at(config, timestep: float) -> str:
    """The component that works at a time from 1000, all noise, to 0. As in diffusers, the boundary is the first's."""
    first, *others = config.model.experts
    return others[0] if others and timestep < config.model.boundary * 1000 else first


def guidance_at(config, timestep: float) -> float:
    """The scale of the component that works then."""
    first, second = config.guidance_scale, config.guidance_scale_2
    return first if second is None or expert_at(config, timestep) == config.model.experts[0] else second


def steps_skipped(config) -> int:
    """Steps at the start that a video which is only changed does not need. As in diffusers."""
    if "strength" not in config.pipeline.inputs.values():
        return 0
    strength = DEFAULT_STRENGTH if config.strength is None else config.strength
    return config.steps - min(int(config.steps * strength), config.steps)


def prompt_count(config) -> int:
    """Texts that go through the model together: the prompt and, with guidance, the negative prompt."""
    return 2 if guided(config) else 1


def device_count(mesh) -> int:
    """Devices of a mesh whose axes have their sizes."""
    return math.prod(mesh.axes.values())


def segment_count(config) -> int:
    """Parts that a video is made in, one after the other."""
    segments, frames = config.pipeline.segments, config.resolution.frames
    if not segments.stages or frames <= segments.frames:
        return 1
    return math.ceil((frames - segments.overlap) / (segments.frames - segments.overlap))
