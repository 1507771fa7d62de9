"""A control video, a mask and reference pictures to the control that VACE's transformers take."""
from pathlib import Path

import numpy

from wan_torchax.config.geometry import Geometry, reference_count
from wan_torchax.stages.encode import Encoder
from wan_torchax.stages.pictures import on_white, pixels_of, read_video


class EncodeControl(Encoder):
    """Video, mask and references, any of which may be absent, to the control (1, channels, frames, height, width).

    Its channels: latents of what stays (where the mask is black), latents of what is made anew (white), and the mask
    itself, the pixels that a latent pixel stands for side by side. Without a video all is grey, without a mask all is
    made anew. References stand in front, a latent frame each; the last one first, as diffusers has them.
    """

    @classmethod
    def result_shapes(cls, config):
        geometry = Geometry.of(config.model.architecture)
        batch, channels, *sizes = geometry.latent_shape(config.resolution, reference_count(config))
        return {"control": (batch, control_channels(geometry), *sizes)}

    @classmethod
    def amount(cls, resolved):
        videos = 1 if resolved.config.video is None else 2
        return videos * resolved.config.resolution.frames + reference_count(resolved.config), "frame"

    def run(self, resolved, values, tell):
        size, scale = resolved.config.resolution, resolved.geometry.size_scale
        frames, mask = self.read(resolved, values)

        def part(is_new: bool):
            def pixels(piece: range):
                if frames is None:
                    return numpy.zeros((1, 3, len(piece), size.height, size.width), numpy.float32)
                chosen = (mask[piece.start : piece.stop] > 127) == is_new
                return pixels_of(frames[piece.start : piece.stop]) * chosen.transpose(3, 0, 1, 2)[None]

            return self.encode(resolved, size.frames, pixels, tell)

        stays = part(False)
        latents = [numpy.concatenate([stays, stays if frames is None else part(True)], axis=1)]
        folded = fold(mask[..., 0], resolved.geometry)
        for path in values["references"] or ():
            picture = on_white(Path(path), size.height, size.width, scale)
            latent = self.encode(resolved, 1, lambda _, picture=picture: picture, tell)
            latents.insert(0, numpy.concatenate([latent, numpy.zeros_like(latent)], axis=1))
        latents = numpy.concatenate(latents, axis=2)
        before = numpy.zeros((*folded.shape[:2], latents.shape[2] - folded.shape[2], *folded.shape[3:]), folded.dtype)
        return {"control": numpy.concatenate([latents, numpy.concatenate([before, folded], axis=2)], axis=1)}

    def read(self, resolved, values) -> tuple[numpy.ndarray | None, numpy.ndarray]:
        """Frames of the video, if there is one, and of the mask: uint8 (frames, height, width, 3)."""
        size, fit = resolved.config.resolution, resolved.config.fit
        frames, mask = (
            None if values[name] is None else read_video(Path(values[name]), size, fit) for name in ("video", "mask")
        )
        white = numpy.broadcast_to(numpy.uint8(255), (size.frames, size.height, size.width, 3))
        return frames, white if mask is None else mask


def control_channels(geometry: Geometry) -> int:
    return 2 * geometry.channels + geometry.size_scale**2


def fold(mask: numpy.ndarray, geometry: Geometry) -> numpy.ndarray:
    """Uint8 (frames, height, width) to float32 (1, pixels of a latent pixel, latent frames, height, width), 0 to 1. A
    latent frame shows the mask of the frame in the middle of its share of time."""
    count, side = (len(mask) - 1) // geometry.frame_scale + 1, geometry.size_scale
    chosen = ((numpy.arange(count) + 0.5) * len(mask) / count).astype(int)
    tiles = mask[chosen].astype(numpy.float32) / 255
    tiles = tiles.reshape(count, tiles.shape[1] // side, side, tiles.shape[2] // side, side)
    return tiles.transpose(2, 4, 0, 1, 3).reshape(1, side * side, count, *tiles.shape[1::2])
