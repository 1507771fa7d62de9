"""Input sounds, decoded by ffmpeg. No JAX, no torch."""
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from wan_torchax.config import clips

if TYPE_CHECKING:  # not at run time: --help must be fast
    import numpy

RATE = 16_000  # samples a second
MOST_SECONDS = 3600
# Self-contained formats, those of videos too: their sound is taken.
SAFE = ["-protocol_whitelist", "file", "-format_whitelist", f"{clips.FORMATS},wav,w64,mp3,flac,aac,aiff,au,caf,amr"]


def read(path: Path) -> "numpy.ndarray":
    """A sound's float32 samples at RATE, its channels averaged; an hour of it at most. Raises OSError with ffmpeg's
    message if the file has none."""
    status = path.stat()
    return decode(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2)
def decode(path: Path, *changed: int) -> "numpy.ndarray":
    import numpy

    source = [*SAFE, "-t", str(MOST_SECONDS), "-i", f"file:{path}", "-map", "0:a:0"]
    mean = ["-ac", "1", "-rematrix_maxval", "1"]  # of samples in floating point ffmpeg would take more
    ran = clips.decode(path, *source, *mean, "-ar", str(RATE), "-f", "f32le", "-")
    said = ran.stderr.decode(errors="replace").strip().splitlines()
    if any("matches no streams" in line for line in said):
        raise OSError("it has no sound")
    if ran.returncode:
        raise OSError(said[-1][:200] if said else f"ffmpeg ended with {ran.returncode}")
    return numpy.frombuffer(ran.stdout, numpy.float32)


def frame_count(path: Path, fps: float) -> int:
    """Whole frames of a video as long as the sound."""
    return int(len(read(path)) * fps / RATE)
