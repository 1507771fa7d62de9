"""HunyuanVideo 1.5's conditions from an image: its pixels for SigLIP, and its latents with a mask."""
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from wan_torchax.config.frames import fitted, open_picture
from wan_torchax.models.pictures import pixels_of, preprocessed, read_preprocessing


def framed(source: str | Path | numpy.ndarray, size, fit: str) -> Image.Image:
    """The image, of a file or the last of frames, in the video's frame. Like diffusers, `cover` scales to whole pixels
    and cuts off from the middle."""
    picture, (width, height) = open_picture(source), (size.width, size.height)
    if fit != "cover":
        return fitted(picture, (width, height), fit)
    scaled = width, picture.height * width // picture.width
    if width / height <= picture.width / picture.height:
        scaled = picture.width * height // picture.height, height
    frame = Image.new("RGB", (width, height))
    place = width // 2 - scaled[0] // 2, height // 2 - scaled[1] // 2
    frame.paste(picture.resize(scaled, Image.Resampling.LANCZOS), place)
    return frame


def check(folders) -> None:
    read_preprocessing(folders["feature_extractor"])


def read(folders, source: str | Path | numpy.ndarray, config) -> numpy.ndarray:
    """Float32 (3, height, width) for SigLIP: the framed image, not the given one."""
    return preprocessed(framed(source, config.resolution, config.fit), read_preprocessing(folders["feature_extractor"]))


def first_frame(view, values: dict[str, Any], encode: Callable) -> numpy.ndarray:
    """(1, channels + 1, frames, height, width): the image's latents in the first frame, zeros after it; then the mask,
    one where they are given."""
    picture = framed(values["image"], view.config.resolution, view.config.fit)
    latent = encode(1, lambda _: pixels_of(numpy.asarray(picture)[None]))
    batch, channels, *sizes = view.latent_shape
    condition = numpy.zeros((batch, channels + 1, *sizes), numpy.float32)
    condition[:, :channels, :1], condition[:, channels:, :1] = latent, 1
    return condition
