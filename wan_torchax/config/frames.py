"""Input pictures and videos, decoded once per run: validation and stages share the result. No JAX."""
import collections
import contextlib
import functools
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from wan_torchax.config import clips

if TYPE_CHECKING:  # not at run time: --help must be fast
    import numpy
    from PIL import Image

log = logging.getLogger("wan")
# How Animate 2's picture and driving video are fitted: each with the filter of diffusers.
LETTERBOXED = {"letterbox_picture": "BICUBIC", "letterbox_video": "BILINEAR"}


def open_picture(source: "str | Path | numpy.ndarray") -> "Image.Image":
    """A picture in RGB, rotated as its EXIF orientation says, with transparency over white. Of frames (frames, height,
    width, 3), the last."""
    from PIL import Image

    if not isinstance(source, (str, Path)):
        return Image.fromarray(source[-1])
    status = Path(source).stat()
    return decode_picture(Path(source), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def decode_picture(path: Path, *changed: int) -> "Image.Image":
    from PIL import Image, ImageOps

    with path.open("rb") as content, Image.open(Timed(content, path)) as file:
        picture = in_eight_bits(ImageOps.exif_transpose(file))
        if "A" in picture.getbands() or "transparency" in picture.info:
            log.info("%s: transparency becomes white", path)
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return picture.convert("RGB")


class Timed:
    """A picture's file, which Pillow reads in small pieces, each in the time that is left for it."""

    def __init__(self, file, path: Path):
        self.file, self.path = file, path

    def read(self, *size: int) -> bytes:
        clips.seconds_left(self.path)
        return self.file.read(*size)

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def in_eight_bits(picture: "Image.Image") -> "Image.Image":
    """A greyscale picture with more than 8 bits, scaled down to 8, where Pillow would clip at 255; any other
    unchanged."""
    import numpy
    from PIL import Image

    if not picture.mode.startswith(("I", "F")):
        return picture
    values = numpy.asarray(picture).astype(numpy.float64)
    most = 1.0 if picture.mode == "F" else 65535.0
    return Image.fromarray((values / most * 255).round().clip(0, 255).astype(numpy.uint8))


def fitted(picture: "Image.Image", size: tuple[int, int], fit: str) -> "Image.Image":
    """A picture fitted to the size (width, height): cover (scaled and cropped), contain (scaled, with black borders),
    stretch, or one of LETTERBOXED."""
    from PIL import Image, ImageOps

    filtering = Image.Resampling.LANCZOS
    if fit in LETTERBOXED:
        return letterboxed(picture, size, Image.Resampling[LETTERBOXED[fit]])
    if fit == "stretch":
        return picture.resize(size, filtering)
    return {"cover": ImageOps.fit, "contain": ImageOps.pad}[fit](picture, size, filtering)


def letterboxed(picture: "Image.Image", size: tuple[int, int], filtering) -> "Image.Image":
    """The whole picture centred on black, as in diffusers for Animate 2: sides and borders are rounded down."""
    from PIL import Image

    (width, height), (wide, high) = size, picture.size
    scaled = (width, high * width // wide) if width * high < wide * height else (wide * height // high, height)
    canvas = Image.new("RGB", size)
    canvas.paste(picture.resize(scaled, filtering), ((width - scaled[0]) // 2, (height - scaled[1]) // 2))
    return canvas


def read_frames(path: Path, size, fit: str, first: int = 0) -> "numpy.ndarray":
    """uint8 (frames, height, width, 3) from frame `first` on, with the resolution's size, rate and number of frames;
    fewer if the video ends."""
    status = path.stat()
    settings = (size.frames, size.fps, (size.width, size.height), fit)
    return decode_frames(path, settings, first, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2)
def decode_frames(path: Path, settings: tuple, first: int, *changed: int) -> "numpy.ndarray":
    if first == 0:  # of most videos there is no more to read
        with contextlib.closing(Onward(path, settings)) as frames:
            return frames.read(0)
    key = path, settings, changed
    if key not in onward or onward[key].begin > first:
        close_onward(key)
        onward[key] = Onward(path, settings)
    return onward[key].read(first)


class Onward:
    """A video that is read segment by segment. Each goes on where the one before ended, with the frames that it
    overlaps or mirrors: as many as a segment has are kept."""

    def __init__(self, path: Path, settings: tuple):
        self.count, fps, self.size, self.fit = settings
        self.frames, self.next = clips.read_frames(path, sys.maxsize, fps), 0  # the number of the next
        self.kept: collections.deque[numpy.ndarray] = collections.deque(maxlen=self.count)

    @property
    def begin(self) -> int:
        """The number of the first frame that can be read: it does not go back further."""
        return self.next - len(self.kept)

    def read(self, first: int) -> "numpy.ndarray":
        """The frames of a segment; fewer if the video ends."""
        import numpy
        from PIL import Image

        last = first + self.count
        for frame in self.frames if self.next < last else ():
            if self.next >= first - self.count:
                self.kept.append(numpy.asarray(fitted(Image.fromarray(frame), self.size, self.fit)))
            else:
                self.kept.clear()
            self.next += 1
            if self.next == last:
                break
        frames = [frame for number, frame in enumerate(self.kept, self.begin) if first <= number < last]
        return numpy.stack(frames) if frames else numpy.empty((0, *self.size[::-1], 3), numpy.uint8)

    def close(self) -> None:
        self.frames.close()


onward: dict[tuple, Onward] = {}  # videos that a run reads segment by segment


def close_onward(*keys: tuple) -> None:
    """Close videos that were not read to their ends; without keys, all."""
    for key in keys or list(onward):
        if key in onward:
            onward.pop(key).close()
