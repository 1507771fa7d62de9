"""What people look at: the video, its poster, its contact sheet. Frames are uint8 arrays (frames, height, width, 3)."""
import json
import math
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import imageio_ffmpeg
import numpy
from PIL import Image

SHEET_FRAMES = 9


@dataclass(frozen=True)
class Encoding:
    """How a video is written."""

    fps: int
    quality: int  # H.264's constant rate factor


def write_video(path: Path, frames: numpy.ndarray, encoding: Encoding, title: str, comment: dict) -> None:
    """H.264 in yuv420p, the settings in its metadata. The file appears whole or not at all."""
    partial = path.with_name(f".partial-{path.name}")
    _, height, width, _ = frames.shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(encoding.fps), "-i", "-"]
    # A metadata value goes on to the end of its argument: no escaping is needed on a command line.
    metadata = ["-metadata", f"title={title}", "-metadata", f"comment={json.dumps(comment, ensure_ascii=False)}"]
    encoder = ["-c:v", "libx264", "-crf", str(encoding.quality), "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *source, *encoder, *metadata, str(partial)]
    ran = subprocess.run(command, input=numpy.ascontiguousarray(frames).data, capture_output=True, check=False)
    if ran.returncode:
        partial.unlink(missing_ok=True)
        raise OSError(f"{path}: ffmpeg failed: {ran.stderr.decode(errors='replace').strip()}")
    os.replace(partial, path)


def read_metadata(path: Path) -> dict | None:
    """The settings a video of ours carries; None for any other file."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "ffmetadata", "-"]
    text = subprocess.run(command, capture_output=True, check=False).stdout.decode()
    comment = re.search(r"^comment=((?:[^\\\n]|\\.|\\\n)*)", text, re.MULTILINE)
    try:
        return json.loads(re.sub(r"\\(.|\n)", r"\1", comment.group(1))) if comment else None
    except ValueError:
        return None


def write_pictures(folder: Path, frames: numpy.ndarray) -> None:
    """poster.png, the frame in the middle, and contact_sheet.png, frames spread over the whole length."""
    Image.fromarray(frames[len(frames) // 2]).save(folder / "poster.png")
    chosen = frames[numpy.unique(numpy.linspace(0, len(frames) - 1, SHEET_FRAMES).round().astype(int))]
    columns = math.ceil(math.sqrt(len(chosen)))
    rows = math.ceil(len(chosen) / columns)
    height, width = frames.shape[1:3]
    sheet = numpy.zeros((rows * height, columns * width, 3), numpy.uint8)
    for index, frame in enumerate(chosen):
        row, column = divmod(index, columns)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = frame
    Image.fromarray(sheet).save(folder / "contact_sheet.png")
