"""Preprocessing of the user's images and videos."""
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy
from PIL import Image

from wan_torchax.config.frames import fitted, open_picture, read_frames
from wan_torchax.config.inputs import is_picture
from wan_torchax.config.schema import ConfigError

BICUBIC = int(Image.Resampling.BICUBIC)


def read_picture(source: str | Path | numpy.ndarray, height: int, width: int, fit: str) -> numpy.ndarray:
    """Float32 (3, height, width) in -1..1, from a file or the last of frames; `fit` is how it is fitted to the
    frame."""
    return pixels_of(numpy.asarray(fitted(open_picture(source), (width, height), fit))[None])[0, :, 0]


def read_video(path: Path, size, fit: str, first: int = 0) -> numpy.ndarray:
    """Uint8 (frames, height, width, 3): frames starting at `first`, resampled to the resolution's count, rate and size.
    An image is repeated."""
    if is_picture(path):
        frame = numpy.asarray(fitted(open_picture(path), (size.width, size.height), fit))
        return numpy.broadcast_to(frame, (size.frames, *frame.shape))
    return read_frames(path, size, fit, first)


def read_mirrored(path: Path, size, fit: str, first: int, twice: bool = False) -> numpy.ndarray:
    """The same, and past the video's end its frames backwards, then forwards again; where it turns back, a frame comes
    once or `twice`."""
    frames = read_video(path, size, fit, first)
    if len(frames) == size.frames:
        return frames
    last = first + len(frames) - 1
    period = max(2 * (last + twice), 1)
    places = numpy.arange(first, first + size.frames) % period
    places = numpy.minimum(places, period - twice - places)
    low = places.min()
    return read_video(path, size, fit, int(low))[places - low]


def pixels_of(frames: numpy.ndarray) -> numpy.ndarray:
    """Uint8 (frames, height, width, 3) to float32 (1, 3, frames, height, width) in -1..1."""
    return frames.astype(numpy.float32).transpose(3, 0, 1, 2)[None] / 255 * 2 - 1


def on_white(path: Path, height: int, width: int, multiple: int) -> numpy.ndarray:
    """Float32 (1, 3, 1, height, width): the whole image centred on white. As in diffusers for references: first resized
    to a multiple of the VAE's scale, then bilinear without antialiasing."""
    picture = open_picture(path)
    size = [side // multiple * multiple for side in picture.size]
    pixels = pixels_of(numpy.asarray(fitted(picture, size, "stretch"))[None])[0, :, 0]
    scale = min(height / pixels.shape[1], width / pixels.shape[2])
    scaled = bilinear(pixels, int(pixels.shape[1] * scale), int(pixels.shape[2] * scale))
    top, left = (height - scaled.shape[1]) // 2, (width - scaled.shape[2]) // 2
    canvas = numpy.ones((3, height, width), numpy.float32)
    canvas[:, top : top + scaled.shape[1], left : left + scaled.shape[2]] = scaled
    return canvas[None, :, None]


def on_black(path: Path, height: int, width: int) -> numpy.ndarray:
    """Float32 (1, 3, 1, height, width): the whole image centred on black. As in diffusers for Animate's character, with
    sides rounded down."""
    picture = open_picture(path)
    scaled = width, picture.height * width // picture.width
    if scaled[1] > height:
        scaled = picture.width * height // picture.height, height
    canvas = Image.new("RGB", (width, height))
    canvas.paste(fitted(picture, scaled, "stretch"), (width // 2 - scaled[0] // 2, height // 2 - scaled[1] // 2))
    return pixels_of(numpy.asarray(canvas)[None])


def bicubic(pixels: numpy.ndarray, height: int, width: int) -> numpy.ndarray:
    """Resize (channels, height, width) bicubically, without antialiasing: torch's interpolation, whose kernel has a
    slope of -3/4 at 1."""
    for axis, size in ((1, height), (2, width)):
        old = pixels.shape[axis]
        places = (numpy.arange(size) + 0.5) * (old / size) - 0.5
        below = numpy.floor(places).astype(int)
        resized = 0
        for place in (below - 1, below, below + 1, below + 2):
            far = numpy.abs(places - place)
            near = (1.25 * far - 2.25) * far**2 + 1
            shares = numpy.where(far <= 1, near, ((-0.75 * far + 3.75) * far - 6) * far + 3).astype(numpy.float32)
            resized = resized + pixels.take(place.clip(0, old - 1), axis) * shares.reshape((-1, 1) if axis == 1 else -1)
        pixels = resized
    return pixels


def bilinear(pixels: numpy.ndarray, height: int, width: int) -> numpy.ndarray:
    """Resize (channels, height, width) bilinearly, without antialiasing."""
    for axis, size in ((1, height), (2, width)):
        old = pixels.shape[axis]
        places = numpy.clip((numpy.arange(size, dtype=numpy.float32) + 0.5) * numpy.float32(old / size) - 0.5, 0, None)
        below = places.astype(int)
        above = numpy.minimum(below + 1, old - 1)
        shares = (places - below).reshape((-1, 1) if axis == 1 else -1)
        pixels = pixels.take(below, axis) * (1 - shares) + pixels.take(above, axis) * shares
    return pixels


# ---------------------------------------------------------------- for image encoders


@dataclass(frozen=True)
class Preprocessing:
    """The contents of transformers' preprocessor_config.json."""

    size: tuple[int, int] | int  # (height, width), or the shorter side
    crop: tuple[int, int] | None  # (height, width) of the centre crop
    resample: int
    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@functools.lru_cache(maxsize=4)
def read_preprocessing(folder: Path) -> Preprocessing:
    try:
        stored = json.loads((folder / "preprocessor_config.json").read_text())
        size, crop = stored["size"], stored.get("crop_size")
        size = size if isinstance(size, int) else size.get("shortest_edge") or (size["height"], size["width"])
        crop = (crop, crop) if isinstance(crop, int) else crop and (crop["height"], crop["width"])
        crop, resample = crop if stored.get("do_center_crop", True) else None, stored.get("resample", BICUBIC)
        normal = tuple(stored["image_mean"]), tuple(stored["image_std"])
        return Preprocessing(size, crop, resample, stored.get("rescale_factor", 1 / 255), *normal)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: no readable preprocessor_config.json ({error!r}); download it again") from error


def preprocessed(picture: Image.Image, how: Preprocessing) -> numpy.ndarray:
    """Float32 (3, height, width): resized, centre-cropped, normalized."""
    if isinstance(how.size, int):
        width, height = picture.size
        short, long = sorted((width, height))
        other = int(how.size * long / short)
        size = (how.size, other) if width <= height else (other, how.size)
    else:
        size = how.size[::-1]
    picture = picture.resize(size, how.resample)
    if how.crop is not None:
        height, width = how.crop
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    pixels = numpy.asarray(picture, numpy.float32) * numpy.float32(how.scale)
    return ((pixels - numpy.float32(how.mean)) / numpy.float32(how.deviation)).transpose(2, 0, 1)
