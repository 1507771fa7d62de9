"""How pixels, latents and tokens of a model relate, from the configs of its VAE and its transformer. No JAX, no
torch."""
import math
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_STRENGTH = 0.8


@dataclass(frozen=True)
class Geometry:
    """Of one model."""

    channels: int  # of the latents
    frame_scale: int  # frames of pixels that a latent frame stands for; the first stands for one
    size_scale: int  # pixels a side of a latent pixel
    patch: tuple[int, int, int]  # latent frames, height and width of a token

    @classmethod
    def of(cls, architecture: Mapping) -> "Geometry":
        vae, transformer = architecture["vae"], architecture["transformer"]
        scales = vae["scale_factor_temporal"], vae["scale_factor_spatial"]
        return cls(vae["z_dim"], *scales, tuple(transformer["patch_size"]))

    @property
    def multiples(self) -> dict[str, int]:
        """What height and width must be multiples of."""
        return {"height": self.size_scale * self.patch[1], "width": self.size_scale * self.patch[2]}

    def latent_shape(self, resolution, references: int = 0) -> tuple[int, int, int, int, int]:
        """(1, channels, frames, height, width) of a video's latents, with a frame more in front for every reference."""
        frames = references + (resolution.frames - 1) // self.frame_scale + 1
        return 1, self.channels, frames, resolution.height // self.size_scale, resolution.width // self.size_scale

    def tokens(self, resolution, references: int = 0) -> int:
        """What the transformer sees of a video."""
        return math.prod(self.latent_shape(resolution, references)[2:]) // math.prod(self.patch)

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
    a scale of 1 or less is none."""
    return config.guidance_scale > 1


def expert_at(config, timestep: float) -> str:
    """The component that works at a time from 1000, all noise, to 0. As in diffusers, the boundary is the first's."""
    first, *others = config.model.experts
    return others[0] if others and timestep < config.model.boundary * 1000 else first


def guidance_at(config, timestep: float) -> float:
    """The scale of the component that works then."""
    first, second = config.guidance_scale, config.guidance_scale_2
    return first if second is None or expert_at(config, timestep) == config.model.experts[0] else second


def reference_count(config) -> int:
    """Pictures that stand before the video while it is denoised."""
    return len(config.references) if "references" in config.pipeline.inputs.values() else 0


def steps_skipped(config) -> int:
    """Steps at the start that a video which is only changed does not need. As in diffusers."""
    if "strength" not in config.pipeline.inputs.values():
        return 0
    strength = DEFAULT_STRENGTH if config.strength is None else config.strength
    return config.steps - min(int(config.steps * strength), config.steps)


def prompt_count(config) -> int:
    """Texts that go through the model together: the prompt and, with guidance, the negative prompt."""
    return 2 if guided(config) else 1
