"""What people look at: the video, its poster, its contact sheet. Frames are uint8 arrays (frames, height, width, 3)."""
import json
import math
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import imageio_ffmpeg
import numpy
from PIL import Image

from wan_torchax.records.files import whole

SHEET_FRAMES = 9
READ_SECONDS = 60  # that ffmpeg may take over a file's metadata


@dataclass(frozen=True)
class Encoding:
    """How a video is written."""

    fps: int
    quality: int  # H.264's constant rate factor


def write_video(path: Path, frames: numpy.ndarray, encoding: Encoding, title: str, comment: dict) -> None:
    """H.264 in yuv420p, the settings in its metadata."""
    _, height, width, _ = frames.shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(encoding.fps), "-i", "-"]
    encoder = ["-c:v", "libx264", "-crf", str(encoding.quality), "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    # Through a file: no command line is as long as some prompts.
    with whole(path) as partial, tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as metadata:
        # ffmpeg takes a backslash at the end of a line for an escape, even one that is escaped itself.
        entries = {"title": title.rstrip("\\"), "comment": json.dumps(comment, ensure_ascii=False)}
        metadata.write(";FFMETADATA1\n" + "".join(f"{key}={escape(text)}\n" for key, text in entries.items()))
        metadata.flush()
        inputs = [*source, "-f", "ffmetadata", "-i", metadata.name, "-map_metadata", "1"]
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *inputs, *encoder, str(partial)]
        ran = subprocess.run(command, input=numpy.ascontiguousarray(frames).data, capture_output=True, check=False)
        if ran.returncode:
            raise OSError(f"{path}: ffmpeg failed: {ran.stderr.decode(errors='replace').strip()}")


def escape(text: str) -> str:
    """A value of ffmpeg's metadata files."""
    return re.sub(r"([=;#\\\n])", r"\\\1", text)


def read_metadata(path: Path) -> dict | None:
    """The settings a video of ours carries; None for any other file."""
    # As MP4 and nothing else: a playlist under a video's name would have ffmpeg open what it lists.
    source = ["-f", "mp4", "-protocol_whitelist", "file", "-i", f"file:{path}"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *source, "-f", "ffmetadata", "-"]
    try:
        text = subprocess.run(command, capture_output=True, check=False, timeout=READ_SECONDS).stdout
        comment = re.search(r"^comment=((?:[^\\\n]|\\.|\\\n)*+)", text.decode(errors="replace"), re.MULTILINE)
        content = json.loads(re.sub(r"\\(.|\n)", r"\1", comment.group(1))) if comment else None
    except (ValueError, RecursionError, subprocess.TimeoutExpired):
        return None
    return content if isinstance(content, dict) else None


def write_pictures(folder: Path, frames: numpy.ndarray) -> None:
    """poster.png, the frame in the middle, and contact_sheet.png, frames spread over the whole length."""
    write_picture(folder / "poster.png", frames[len(frames) // 2])
    chosen = frames[numpy.unique(numpy.linspace(0, len(frames) - 1, SHEET_FRAMES).round().astype(int))]
    columns = math.ceil(math.sqrt(len(chosen)))
    rows = math.ceil(len(chosen) / columns)
    height, width = frames.shape[1:3]
    sheet = numpy.zeros((rows * height, columns * width, 3), numpy.uint8)
    for index, frame in enumerate(chosen):
        row, column = divmod(index, columns)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = frame
    write_picture(folder / "contact_sheet.png", sheet)


def write_picture(path: Path, pixels: numpy.ndarray) -> None:
    with whole(path) as partial:
        Image.fromarray(pixels).save(partial)
