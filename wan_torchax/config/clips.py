"""Videos that the user gives, decoded by ffmpeg. No JAX, no torch."""
import contextlib
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wan_torchax.config.schema import ConfigError

if TYPE_CHECKING:  # --help does without it
    import numpy

# Containers that hold their own frames: a playlist would have ffmpeg open what it lists.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,ogg,flv"
REMEDY = "pip install --force-reinstall imageio-ffmpeg, or name one with the variable IMAGEIO_FFMPEG_EXE"
SAFE = ["-protocol_whitelist", "file", "-format_whitelist", FORMATS]


def ffmpeg() -> str:
    """The command that reads and writes videos; raises ConfigError if it does not run here."""
    import imageio_ffmpeg

    try:
        command = imageio_ffmpeg.get_ffmpeg_exe()
        version_of(command)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise ConfigError(f"ffmpeg, which reads and writes videos, does not run: {error}; {REMEDY}") from error
    return command


@functools.cache
def version_of(command: str) -> str:
    """What ffmpeg says of itself. Raises OSError, RuntimeError or SubprocessError."""
    told = subprocess.run([command, "-version"], capture_output=True, text=True, check=True, timeout=30).stdout
    if not told.startswith("ffmpeg version"):
        raise RuntimeError(f"{command} is no ffmpeg")
    return told.split("Copyright")[0].strip()


@dataclass(frozen=True)
class Clip:
    """What a video's header says."""

    width: int
    height: int
    fps: float


def probe(path: Path) -> Clip:
    """Raises OSError, with what ffmpeg says, for what is no video."""
    with opened(path) as frames:
        meta = next(frames)
        width, height = meta["size"]
        return Clip(width, height, meta["fps"])


def read_frames(path: Path, count: int, fps: float) -> "Iterator[numpy.ndarray]":
    """Up to `count` frames (height, width, 3) in uint8 at so many a second, each the one nearest in time."""
    import numpy

    with opened(path) as frames:
        meta = next(frames)
        width, height = meta["size"]
        rate = meta["fps"] / fps if meta["fps"] else 1.0
        places = (int(index * rate + 0.5) for index in range(count))
        wanted = next(places, None)
        for index, frame in enumerate(frames):
            while index == wanted:  # more than once, where the video has fewer a second
                yield numpy.frombuffer(frame, numpy.uint8).reshape(height, width, 3)
                wanted = next(places, None)
            if wanted is None:
                return


@contextlib.contextmanager
def opened(path: Path) -> Iterator:
    """imageio-ffmpeg's generator: what the header says, then frames as bytes. ffmpeg ends with the block."""
    import imageio_ffmpeg

    frames = imageio_ffmpeg.read_frames(f"file:{path}", pix_fmt="rgb24", input_params=SAFE)
    try:
        yield frames
    finally:
        frames.close()
