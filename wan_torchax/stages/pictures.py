"""Pictures that the user gives, as a model wants them."""
import logging
from pathlib import Path

import numpy
from PIL import Image, ImageOps

log = logging.getLogger("wan")


def read_picture(path: Path, height: int, width: int, fit: str) -> numpy.ndarray:
    """Float32 (3, height, width) from -1 to 1, upright as the camera held it. `fit` says how it meets the frame:
    cover (scaled, what is too much cut off on both sides), contain (scaled, the rest black) or stretch."""
    with Image.open(path) as file:
        picture = ImageOps.exif_transpose(file)
        if "A" in picture.getbands() or "transparency" in picture.info:
            log.info("%s: what is transparent in it becomes white", path)
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        picture = picture.convert("RGB")
    size, filtering = (width, height), Image.Resampling.LANCZOS
    if fit == "stretch":
        picture = picture.resize(size, filtering)
    else:
        picture = {"cover": ImageOps.fit, "contain": ImageOps.pad}[fit](picture, size, filtering)
    return numpy.asarray(picture, numpy.float32).transpose(2, 0, 1) / 255 * 2 - 1
