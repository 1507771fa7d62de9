"""Pictures that the user gives, as a model wants them."""
import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy
from PIL import Image, ImageOps

from wan_torchax.config.schema import ConfigError

log = logging.getLogger("wan")
BICUBIC = int(Image.Resampling.BICUBIC)


def read_picture(path: Path, height: int, width: int, fit: str) -> numpy.ndarray:
    """Float32 (3, height, width) from -1 to 1, upright as the camera held it. `fit` says how it meets the frame:
    cover (scaled, what is too much cut off on both sides), contain (scaled, the rest black) or stretch."""
    picture = open_picture(path)
    size, filtering = (width, height), Image.Resampling.LANCZOS
    if fit == "stretch":
        picture = picture.resize(size, filtering)
    else:
        picture = {"cover": ImageOps.fit, "contain": ImageOps.pad}[fit](picture, size, filtering)
    return numpy.asarray(picture, numpy.float32).transpose(2, 0, 1) / 255 * 2 - 1


def open_picture(path: Path) -> Image.Image:
    """In RGB, upright, what is transparent over white."""
    with Image.open(path) as file:
        picture = ImageOps.exif_transpose(file)
        if "A" in picture.getbands() or "transparency" in picture.info:
            log.info("%s: what is transparent in it becomes white", path)
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return picture.convert("RGB")


# ---------------------------------------------------------------- as an image encoder wants them


@dataclass(frozen=True)
class Preprocessing:
    """What preprocessor_config.json says, in the words of transformers."""

    size: tuple[int, int] | int  # (height, width), or the shorter side
    crop: tuple[int, int] | None  # (height, width) of the middle
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


def clip_picture(path: Path, how: Preprocessing) -> numpy.ndarray:
    """Float32 (3, height, width): scaled, its middle cut out, normalised."""
    picture = open_picture(path)
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
