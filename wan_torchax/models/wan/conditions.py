"""Wan's conditions from images and videos: their latents, and masks of which frames are given.

`encode(frames, pixels)` returns latents (1, channels, latent frames, height, width) of a video whose pixels (1, 3,
frames, height, width) in -1..1 are produced in chunks by `pixels(range of frames)`.
"""
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from wan_torchax.config.geometry import Geometry
from wan_torchax.models.pictures import on_white, pixels_of, read_picture, read_video


def first_and_last(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, mask + channels, frames, height, width) from a first image and optionally a last one.

    The VAE encodes a video of these images with grey between them. Its latents are preceded by a mask with one channel
    per frame of a latent frame, 1 where an image is given.
    """
    size = view.config.resolution
    given = {name: frame for name, frame in (("image", 0), ("last_image", size.frames - 1)) if name in values}
    pictures = {
        frame: read_picture(Path(values[name]), size.height, size.width, view.config.fit)
        for name, frame in given.items()
    }
    latents = encode(size.frames, lambda piece: video(pictures, piece, size))
    marks = mask(pictures, view.geometry.frame_scale, latents.shape)
    return numpy.concatenate([marks, latents], axis=1)


def first_alone(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, 1, height, width): an image as the first latent frame."""
    size = view.config.resolution
    picture = read_picture(Path(values["image"]), size.height, size.width, view.config.fit)
    return encode(1, lambda _: picture[None, :, None])


def whole_video(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, frames, height, width): the latents that video-to-video starts from."""
    frames = read_video(Path(values["video"]), view.config.resolution, view.config.fit, view.first_frame)
    return encode(len(frames), lambda piece: pixels_of(frames[piece.start : piece.stop]))


def video(pictures: dict[int, numpy.ndarray], frames: range, size) -> numpy.ndarray:
    """Frames of a video (1, 3, frames, height, width) with the images in place and mid grey elsewhere."""
    grey = numpy.zeros((3, size.height, size.width), numpy.float32)
    return numpy.stack([pictures.get(frame, grey) for frame in frames], axis=1)[None]


def mask(pictures: dict[int, numpy.ndarray], scale: int, latent_shape) -> numpy.ndarray:
    """(1, scale, latent frames, height, width): 1 where an image is given. The first latent frame covers one frame
    only, repeated in all its channels."""
    batch, _, frames, height, width = latent_shape
    given = numpy.zeros(frames * scale, numpy.float32)
    for frame in pictures:
        given[frame + scale - 1] = 1
    given[: scale - 1] = given[scale - 1]
    channels = given.reshape(1, frames, scale, 1, 1).transpose(0, 2, 1, 3, 4)
    return numpy.broadcast_to(channels, (batch, scale, frames, height, width))


# ---------------------------------------------------------------- VACE


def control(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, frames, height, width) from a video, a mask and references, each optional.

    Channels: latents of the inactive part (mask black), latents of the reactive part (mask white), and the mask itself,
    with the pixels of a latent pixel folded into channels. Without a video all is grey; without a mask all is reactive.
    References are prepended, one latent frame each, in reverse order as in diffusers.
    """
    size, scale = view.config.resolution, view.geometry.size_scale
    frames, white = read_control(view, values)

    def part(is_new: bool) -> numpy.ndarray:
        def pixels(piece: range):
            if frames is None:
                return numpy.zeros((1, 3, len(piece), size.height, size.width), numpy.float32)
            chosen = (white[piece.start : piece.stop] > 127) == is_new
            return pixels_of(frames[piece.start : piece.stop]) * chosen.transpose(3, 0, 1, 2)[None]

        return encode(size.frames, pixels)

    stays = part(False)
    latents = [numpy.concatenate([stays, stays if frames is None else part(True)], axis=1)]
    folded = fold(white[..., 0], view.geometry)
    for path in values["references"] or ():
        picture = on_white(Path(path), size.height, size.width, scale)
        latent = encode(1, lambda _, picture=picture: picture)
        latents.insert(0, numpy.concatenate([latent, numpy.zeros_like(latent)], axis=1))
    latents = numpy.concatenate(latents, axis=2)
    before = numpy.zeros((*folded.shape[:2], latents.shape[2] - folded.shape[2], *folded.shape[3:]), folded.dtype)
    return numpy.concatenate([latents, numpy.concatenate([before, folded], axis=2)], axis=1)


def read_control(view, values: dict[str, Any]) -> tuple[numpy.ndarray | None, numpy.ndarray]:
    """Frames of the video, or None, and of the mask: uint8 (frames, height, width, 3)."""
    size, fit = view.config.resolution, view.config.fit
    frames, mask = (
        None if values[name] is None else read_video(Path(values[name]), size, fit, view.first_frame)
        for name in ("video", "mask")
    )
    white = numpy.broadcast_to(numpy.uint8(255), (size.frames, size.height, size.width, 3))
    return frames, white if mask is None else mask


def fold(mask: numpy.ndarray, geometry: Geometry) -> numpy.ndarray:
    """Uint8 (frames, height, width) to float32 (1, pixels of a latent pixel, latent frames, height, width) in 0..1. A
    latent frame takes the mask of the middle frame it covers."""
    count, side = (len(mask) - 1) // geometry.frame_scale + 1, geometry.size_scale
    chosen = ((numpy.arange(count) + 0.5) * len(mask) / count).astype(int)
    tiles = mask[chosen].astype(numpy.float32) / 255
    tiles = tiles.reshape(count, tiles.shape[1] // side, side, tiles.shape[2] // side, side)
    return tiles.transpose(2, 4, 0, 1, 3).reshape(1, side * side, count, *tiles.shape[1::2])
