"""Input videos, decoded by ffmpeg. No JAX, no torch."""
import collections
import contextlib
import contextvars
import functools
import itertools
import math
import os
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wan_torchax.config.schema import ConfigError

if TYPE_CHECKING:  # not at run time: --help must be fast
    import numpy

# Self-contained formats only: a playlist would make ffmpeg open the files it lists.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,ogg,flv"
MOST_FRAMES = 4_000_000  # that are counted
RECORDED_FPS = 30  # of a video that says no rate of its own: a browser's recording, whose frames have times instead
REMEDY = "pip install --force-reinstall imageio-ffmpeg, or name one with the variable IMAGEIO_FFMPEG_EXE"
SAFE = ["-protocol_whitelist", "file", "-format_whitelist", FORMATS]


class TooSlow(Exception):
    """A file takes longer to decode than `within` allows."""


class Limit:
    """Until when files may be decoded, and the one for which that was not enough."""

    def __init__(self, seconds: float):
        self.deadline = time.monotonic() + seconds
        self.slow: Path | None = None

    def left(self, path: Path) -> float:
        """Seconds that are left for a file."""
        if (seconds := self.deadline - time.monotonic()) <= 0:
            self.slow = self.slow or path
            raise TooSlow(path)
        return seconds


limit: contextvars.ContextVar[Limit | None] = contextvars.ContextVar("limit", default=None)


@contextlib.contextmanager
def within(seconds: float, key: str) -> Iterator[None]:
    """Raise ConfigError if decoding input files in this block takes longer than a key allows, whatever the block makes
    of it. Small files can take for ever: strangers may send only what is decoded in time."""
    own = Limit(seconds)
    token = limit.set(own)
    try:
        yield
    finally:
        limit.reset(token)
        if own.slow is not None:
            problem = f"{own.slow.name}: takes longer to decode than {seconds:g} s ({key})"
            raise ConfigError(f"{problem}; give a shorter or a smaller one") from None


def seconds_left(path: Path) -> float | None:
    """Seconds that are left to decode a file; None if it may take any."""
    own = limit.get()
    return None if own is None else own.left(path)


def decode(path: Path, *options: str) -> subprocess.CompletedProcess:
    """Run ffmpeg on a file, in the time that is left for it."""
    try:
        return run_ffmpeg(*options, timeout=seconds_left(path))
    except subprocess.TimeoutExpired:
        seconds_left(path)
        raise


def ffmpeg() -> str:
    """The command that reads and writes videos; raises ConfigError if it does not run here."""
    import imageio_ffmpeg

    try:
        command = imageio_ffmpeg.get_ffmpeg_exe()
        version_of(command)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise ConfigError(f"ffmpeg, which reads and writes videos, does not run: {error}; {REMEDY}") from error
    return command


def run_ffmpeg(*options: str, **named) -> subprocess.CompletedProcess:
    """Run ffmpeg. It neither reads what is typed nor hears a terminal's Ctrl-C: a server finishes its video."""
    command = [ffmpeg(), "-nostdin", "-y", "-v", "error", *options]
    return subprocess.run(command, capture_output=True, check=False, process_group=0, **named)


@functools.cache
def version_of(command: str) -> str:
    """ffmpeg's version line. Raises OSError, RuntimeError or SubprocessError."""
    output = subprocess.run([command, "-version"], capture_output=True, text=True, check=True, timeout=30).stdout
    if not output.startswith("ffmpeg version"):
        raise RuntimeError(f"{command} is not ffmpeg")
    return output.split("Copyright")[0].strip()


@dataclass(frozen=True)
class Clip:
    """A video's header."""

    width: int
    height: int
    fps: float
    has_sound: bool


def probe(path: Path) -> Clip:
    """A video's header. Raises OSError with ffmpeg's message if the file is not a video."""
    with contextlib.closing(decoder(path)) as frames:
        meta = next(frames)
    width, height = meta["size"]
    return Clip(width, height, meta["fps"] or RECORDED_FPS, "audio_codec" in meta)


def read_frames(path: Path, count: int, fps: float) -> "Generator[numpy.ndarray]":
    """Up to `count` uint8 frames (height, width, 3), resampled to `fps`: each is the one nearest in time."""
    import numpy

    with opened(path) as (clip, frames):
        rate = clip.fps / fps
        sources = (int(index * rate + 0.5) for index in range(count))
        source = next(sources, None)
        for index, frame in enumerate(frames):
            seconds_left(path)
            while index == source:  # repeated if the video has fewer frames per second
                yield numpy.frombuffer(frame, numpy.uint8).reshape(clip.height, clip.width, 3)
                source = next(sources, None)
            if source is None:
                return


def last_frame(path: Path) -> "numpy.ndarray":
    """A video's last frame, uint8 (height, width, 3)."""
    import numpy

    frames = decoder(path, before=["-sseof", "-3"])  # not all of a long one is decoded
    width, height = next(frames)["size"]
    (frame,) = collections.deque(frames, maxlen=1)
    return numpy.frombuffer(frame, numpy.uint8).reshape(height, width, 3)


def frame_count(path: Path, fps: float) -> int:
    """How many frames `read_frames` gives at most."""
    status = path.stat()
    frames, own = count_frames(path, status.st_mtime_ns, status.st_size)
    rate = own / fps
    near = max(int((frames - 0.5) / rate) - 1, 0)
    return next(index for index in itertools.count(near) if int(index * rate + 0.5) >= frames)


@functools.lru_cache(maxsize=16)
def count_frames(path: Path, *changed: int) -> tuple[int, float]:
    """A video's frames, each decoded to be counted, but not more than MOST_FRAMES, and their rate."""
    rate = probe(path).fps
    given = [*SAFE, "-i", f"file:{path}", "-r", str(rate), "-frames:v", str(MOST_FRAMES)]
    return len(decode(path, *given, "-vf", "scale=2:2", "-pix_fmt", "gray", "-f", "rawvideo", "-").stdout) // 4, rate


@contextlib.contextmanager
def opened(path: Path) -> "Iterator[tuple[Clip, Iterator[bytes]]]":
    """The header, and the frames at its rate, which is an average: ffmpeg repeats frames or leaves some out where they
    come slower or faster. It exits with the context."""
    clip = probe(path)
    with contextlib.closing(decoder(path, "-r", str(clip.fps))) as frames:
        next(frames)  # the header again
        yield clip, frames


def decoder(path: Path, *options: str, before: Sequence[str] = ()) -> Generator:
    """imageio-ffmpeg's generator: the header, then frames as bytes. Options `before` are about reading."""
    import imageio_ffmpeg

    seconds = seconds_left(path)
    # For a frame that never comes: seconds of all cores together, of which one file rarely has more than a few.
    most = [] if seconds is None else ["-timelimit", str(math.ceil(seconds * min(os.cpu_count() or 1, 4)))]
    given = {"input_params": [*SAFE, *most, *before], "output_params": list(options)}
    return imageio_ffmpeg.read_frames(f"file:{path}", pix_fmt="rgb24", **given)
