"""Wan's conditions from images and videos: their latents, and masks of which frames are given.

`encode(frames, pixels)` returns latents (1, channels, latent frames, height, width) of a video whose pixels (1, 3,
frames, height, width) in -1..1 are produced in chunks by `pixels(range of frames)`.
"""
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

from wan_torchax.config.clips import frame_count
from wan_torchax.config.geometry import Geometry
from wan_torchax.config.inputs import is_picture
from wan_torchax.config.live import first_of, given_chunks
from wan_torchax.models.pictures import (
    bicubic,
    on_black,
    on_white,
    pixels_of,
    read_mirrored,
    read_picture,
    read_preprocessing,
    read_video,
)


def first_and_last(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, mask + channels, frames, height, width) from a first image and optionally a last one; zeros from neither.

    The VAE encodes a video of these images with grey between them. Its latents are preceded by a mask with one channel
    per frame of a latent frame, 1 where an image is given.
    """
    size = view.config.resolution
    given = {name: frame for name, frame in (("image", 0), ("last_image", size.frames - 1))
             if values.get(name) is not None}
    if not given:
        batch, channels, *sizes = view.latent_shape
        return numpy.zeros((batch, view.geometry.frame_scale + channels, *sizes), numpy.float32)
    pictures = {
        frame: read_picture(values[name], size.height, size.width, view.config.fit)
        for name, frame in given.items()
    }
    latents = encode(size.frames, lambda piece: video(pictures, piece, size))
    marks = mask(pictures, view.geometry.frame_scale, latents.shape)
    return numpy.concatenate([marks, latents], axis=1)


def first_alone(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, 1, height, width): an image as the first latent frame; zeros without one."""
    size = view.config.resolution
    if values["image"] is None:
        return no_frame(view)
    picture = read_picture(values["image"], size.height, size.width, view.config.fit)
    return encode(1, lambda _: picture[None, :, None])


def no_frame(view) -> numpy.ndarray:
    batch, channels, _, *sides = view.latent_shape
    return numpy.zeros((batch, channels, 1, *sides), numpy.float32)


def whole_video(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, frames, height, width): the latents of a video to start from, or to be guided by."""
    frames = read_video(Path(values["video"]), view.config.resolution, view.config.fit, view.first_frame)
    return encode(len(frames), lambda piece: pixels_of(frames[piece.start : piece.stop]))


def video(pictures: dict[int, numpy.ndarray], frames: range, size) -> numpy.ndarray:
    """Frames of a video (1, 3, frames, height, width) with the images in place and mid grey elsewhere."""
    grey = numpy.zeros((3, size.height, size.width), numpy.float32)
    return numpy.stack([pictures.get(frame, grey) for frame in frames], axis=1)[None]


def mask(pictures: dict[int, numpy.ndarray], scale: int, latent_shape) -> numpy.ndarray:
    """(1, scale, latent frames, height, width): 1 where an image is given."""
    batch, _, frames, height, width = latent_shape
    given = numpy.zeros(((frames - 1) * scale + 1, 1, 1), numpy.float32)
    given[list(pictures)] = 1
    return numpy.broadcast_to(in_channels(given, scale), (batch, scale, frames, height, width))


def in_channels(given: numpy.ndarray, scale: int) -> numpy.ndarray:
    """(frames, height, width) to (1, scale, latent frames, height, width): a channel for each frame of a latent frame.
    The first latent frame covers one frame only, repeated in all its channels."""
    given = numpy.concatenate([given[:1]] * (scale - 1) + [given])
    return given.reshape(-1, scale, *given.shape[1:]).swapaxes(0, 1)[None]


# ---------------------------------------------------------------- live


def given_latents(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, latent frames, height, width): what leads a video that is made chunk by chunk: a picture, or the
    last frames of a video, in whole chunks."""
    size, live, scale = view.config.resolution, view.config.live, view.geometry.frame_scale
    if "image" in values:
        return first_alone(view, values, encode)
    chunks = given_chunks(live, size, view.geometry, values["video"])
    count, path = (first_of(live) + (chunks - 1) * live.chunk - 1) * scale + 1, Path(values["video"])
    part = SimpleNamespace(frames=count, fps=size.fps, height=size.height, width=size.width)
    frames = read_video(path, part, view.config.fit, frame_count(path, size.fps) - count)
    return encode(count, lambda piece: pixels_of(frames[piece.start : piece.stop]))


# ---------------------------------------------------------------- VideoX-Fun


def reference(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, 1, height, width): the picture of who speaks, or of what should appear; zeros without one."""
    size = view.config.resolution
    if "references" not in values:
        return first_alone(view, values, encode)
    if not values["references"]:
        return no_frame(view)
    picture = on_white(Path(values["references"][0]), size.height, size.width, view.geometry.size_scale)
    return encode(1, lambda _: picture)


# ---------------------------------------------------------------- Animate


def given_frames(view, values: dict[str, Any], encode: Callable, picture: Callable = on_black) -> numpy.ndarray:
    """(1, mask + channels, 1 + latent frames, height, width): a character's picture as a latent frame of its own, then
    what is given of a segment's frames: the end of the segment before, and in a pipeline with a background its frames.

    The mask is 1 where pixels are given: in the picture, the segment before, and the background outside its own mask,
    whose white parts are made anew. The rest is grey. `picture` fits the character's picture into the frame.
    """
    size, scales = view.config.resolution, (view.geometry.frame_scale, view.geometry.size_scale)
    character, before = picture(Path(values["image"]), size.height, size.width), values["previous"]
    behind, white = (
        read_mirrored(Path(values[name]), size, view.config.fit, view.first_frame) if name in values else None
        for name in ("background", "mask")
    )

    def pixels(piece: range):
        frames = numpy.zeros((1, 3, len(piece), size.height, size.width), numpy.float32)
        if behind is not None:
            frames = pixels_of(behind[piece.start : piece.stop])
        if before is not None:
            own = before[:, :, piece.start : piece.stop]
            frames[:, :, : own.shape[2]] = own
        return frames

    reference, latents = encode(1, lambda _: character), encode(size.frames, pixels)
    marks = numpy.zeros((size.frames, *latents.shape[3:]), numpy.float32)
    if white is not None:
        marks = 1 - white[:, :: scales[1], :: scales[1], 0].astype(numpy.float32) / 255
    marks[: 0 if before is None else before.shape[2]] = 1
    given = numpy.concatenate([in_channels(marks, scales[0]), latents], axis=1)
    first = numpy.concatenate([numpy.ones_like(reference[:, : scales[0]]), reference], axis=1)
    return numpy.concatenate([first, given], axis=2)


def pose_latents(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, latent frames, height, width): a segment of a video of skeletons."""
    frames = read_mirrored(Path(values["pose"]), view.config.resolution, view.config.fit, view.first_frame)
    return encode(len(frames), lambda piece: pixels_of(frames[piece.start : piece.stop]))


# ---------------------------------------------------------------- Animate 2


def character_frames(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """given_frames, with the picture fitted as `fit` says."""

    def picture(path: Path, height: int, width: int) -> numpy.ndarray:
        return read_picture(path, height, width, character_fit(view.config.fit))[None, :, None]

    return given_frames(view, values, encode, picture)


def driving_latents(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, latent frames, height, width): a segment of a driving video."""
    size = view.config.resolution
    frames = read_mirrored(Path(values["driving"]), size, "letterbox_video", view.first_frame, twice=True)
    return encode(len(frames), lambda piece: pixels_of(frames[piece.start : piece.stop]))


def read_for_clip(folders, source: str, config) -> numpy.ndarray:
    """Float32 (3, side, side): a character's picture, or a driving video's first frame, as the VAE sees it, for the
    image encoder."""
    how, size, path = read_preprocessing(folders["image_processor"]), config.resolution, Path(source)
    if is_picture(path):
        pixels = read_picture(path, size.height, size.width, character_fit(config.fit))
    else:
        first = SimpleNamespace(frames=1, fps=size.fps, height=size.height, width=size.width)
        pixels = pixels_of(read_video(path, first, "letterbox_video"))[0, :, 0]
    side = config.model.architecture.image_encoder.image_size
    mean, deviation = (numpy.float32(values)[:, None, None] for values in (how.mean, how.deviation))
    return (bicubic(pixels, side, side) / 2 + 0.5 - mean) / deviation


def character_fit(fit: str) -> str:
    """With `contain` a picture is as in diffusers."""
    return "letterbox_picture" if fit == "contain" else fit


# ---------------------------------------------------------------- speech


def motion(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, latent frames, height, width): the frames before a segment; zeros before the first, which has no
    use for them."""
    before = values["previous"]
    if before is None:
        batch, channels, _, *sides = view.latent_shape
        count = (view.config.pipeline.segments.remembered - 1) // view.geometry.frame_scale + 1
        return numpy.zeros((batch, channels, count, *sides), numpy.float32)
    return encode(before.shape[2], lambda piece: before[:, :, piece.start : piece.stop])


def skeletons(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, latent frames, height, width): a segment of a video of skeletons, behind a copy of its first frame,
    and black behind its end; zeros without one."""
    size = view.config.resolution
    if not values["pose"]:
        return numpy.zeros(view.latent_shape, numpy.float32)
    frames = read_video(Path(values["pose"]), size, view.config.fit, view.first_frame)
    frames = numpy.pad(frames, [(0, size.frames - len(frames)), (0, 0), (0, 0), (0, 0)])
    frames = numpy.concatenate([frames[:1], frames])
    return encode(len(frames), lambda piece: pixels_of(frames[piece.start : piece.stop]))[:, :, 1:]


# ---------------------------------------------------------------- VACE


def control(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels, frames, height, width) from a video, a mask and references, each optional.

    Channels: latents of the inactive part (mask black), latents of the reactive part (mask white), and the mask itself,
    with the pixels of a latent pixel folded into channels. Without a video all is grey; without a mask all is reactive.
    A segment that goes on begins with the last frames of the one before, which are inactive. References are prepended,
    one latent frame each, in reverse order as in diffusers.
    """
    size, scale = view.config.resolution, view.geometry.size_scale
    frames, white, before = *read_control(view, values), values.get("previous")
    if before is not None:
        white = numpy.concatenate([numpy.zeros_like(before), white[len(before) :]])

    def part(is_new: bool) -> numpy.ndarray:
        def pixels(piece: range):
            given = numpy.zeros((1, 3, len(piece), size.height, size.width), numpy.float32)
            if frames is not None:
                given = pixels_of(frames[piece.start : piece.stop])
            if before is not None:
                own = before[piece.start : piece.stop]
                given[:, :, : len(own)] = pixels_of(own)
            chosen = (white[piece.start : piece.stop] > 127) == is_new
            return given * chosen.transpose(3, 0, 1, 2)[None]

        return encode(size.frames, pixels)

    stays = part(False)
    is_grey = frames is None and before is None
    latents = [numpy.concatenate([stays, stays if is_grey else part(True)], axis=1)]
    folded = fold(white[..., 0], view.geometry)
    for path in values["references"] or ():
        picture = on_white(Path(path), size.height, size.width, scale)
        latent = encode(1, lambda _, picture=picture: picture)
        latents.insert(0, numpy.concatenate([latent, numpy.zeros_like(latent)], axis=1))
    latents = numpy.concatenate(latents, axis=2)
    before = numpy.zeros((*folded.shape[:2], latents.shape[2] - folded.shape[2], *folded.shape[3:]), folded.dtype)
    return numpy.concatenate([latents, numpy.concatenate([before, folded], axis=2)], axis=1)


def read_control(view, values: dict[str, Any]) -> tuple[numpy.ndarray | None, numpy.ndarray]:
    """Frames of the video, or None, and of the mask: uint8 (frames, height, width, 3). What a last segment has beyond
    their end is mirrored."""
    size, fit = view.config.resolution, view.config.fit
    frames, mask = (
        None if values[name] is None else read_mirrored(Path(values[name]), size, fit, view.first_frame)
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
