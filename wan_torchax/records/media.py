"""Writes the video or picture, poster and contact sheet. Frames are uint8 arrays (frames, height, width, 3)."""
import contextlib
import json
import logging
import math
import re
import subprocess
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from wan_torchax import interruption
from wan_torchax.config import sounds
from wan_torchax.config.clips import ffmpeg, run_ffmpeg
from wan_torchax.records.files import atomic

log = logging.getLogger("wan")
SHEET_FRAMES = 9
SHEET_WIDTH = 1920  # pixels, at most
PREVIEW_FRAMES, PREVIEW_SIDE = 16, 320  # of an animated preview, at most
MOST_QUEUED = 8  # chunks of frames that wait for the encoder
READ_SECONDS = 60  # timeout for ffmpeg to read a file's metadata


@dataclass(frozen=True)
class Encoding:
    """Encoder settings."""

    fps: int
    quality: int  # H.264's constant rate factor
    sound: Path | None = None  # a file whose sound it gets
    sound_start: float = 0.0  # seconds of it before the video's first frame


def write_video(path: Path, frames: numpy.ndarray, encoding: Encoding, title: str, comment: dict) -> None:
    """Write H.264 in yuv420p, with the settings in its metadata."""
    encoder = Encoder(path, encoding)
    try:
        encoder.add(frames)
        encoder.finish(title, comment)
    finally:
        encoder.close()


class Encoder:
    """Encodes a video in the background while frames are still being produced.

    `finish` adds the metadata and renames the file into place; `close` always cleans up, and an unfinished video leaves
    no file.
    """

    def __init__(self, path: Path, encoding: Encoding):
        self.path, self.encoding, self.frames = path, encoding, 0
        self.stream = path.with_name(f".encoding-{path.name}")
        self.process, self.writer, self.queued = None, ThreadPoolExecutor(1), deque()

    def add(self, frames: numpy.ndarray) -> None:
        """Queue frames (frames, height, width, 3) for encoding. Waits where the encoder has fallen far behind: what is
        queued is in memory."""
        if self.process is None:
            self.process = self.start(*frames.shape[1:3])
        if self.process.poll() is not None:  # it would not write what is yet to be computed
            check(self.path, self.process.returncode, self.process.stderr.read())
        self.frames += len(frames)
        self.queued.append(self.writer.submit(self.write, numpy.ascontiguousarray(frames)))
        while len(self.queued) > MOST_QUEUED:
            interruption.wait([self.queued.popleft()])

    def start(self, height: int, width: int) -> subprocess.Popen:
        command = [ffmpeg(), "-y", "-v", "error", *raw_source(self.encoding, height, width), "-i", "-"]
        command += [*encoder(self.encoding), "-f", "mp4", str(self.stream)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)

    def write(self, frames: numpy.ndarray) -> None:
        with contextlib.suppress(BrokenPipeError):  # `finish` checks the exit status
            self.process.stdin.write(frames.data)

    def finish(self, title: str, comment: dict) -> None:
        """Wait for the encoder, then write the video with its metadata."""
        encoded = self.writer.submit(self.process.communicate)  # runs after the queued frames are written
        interruption.wait([encoded])
        check(self.path, self.process.returncode, encoded.result()[1])
        seconds = self.encoding.sound_start, self.frames / self.encoding.fps
        sound = self.encoding.sound and (self.encoding.sound, *seconds)
        try:
            write_with_metadata(self.stream, self.path, title, comment, sound)
        except OSError as error:
            if sound is None:
                raise
            log.warning("%s: the video is silent, since this file's sound cannot be taken (%s)", sound[0], error)
            write_with_metadata(self.stream, self.path, title, comment)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()  # a no-op if it has exited
            self.process.wait()
        self.writer.shutdown(cancel_futures=True)
        self.stream.unlink(missing_ok=True)


def raw_source(encoding: Encoding, height: int, width: int) -> list[str]:
    """ffmpeg's options for frames as they are."""
    return ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(encoding.fps)]


def encoder(encoding: Encoding) -> list[str]:
    """ffmpeg's options for H.264. With the preset `medium`, a four-step model would wait for it."""
    # Convert to BT.709 and tag it: players guess the colours of untagged video.
    colours = ["-vf", "scale=out_color_matrix=bt709:out_range=tv", "-color_range", "tv"]
    colours += ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"]
    return ["-c:v", "libx264", "-preset", "veryfast", "-crf", str(encoding.quality), "-pix_fmt", "yuv420p", *colours]


def write_with_metadata(
    stream: Path, path: Path, title: str, comment: dict, sound: tuple[Path, float, float] | None = None
) -> None:
    """Remux an encoded video with metadata and the index first (faststart), so that players start at once; with the
    sound of another file from a second on, for so many."""
    # Through a file: a prompt may exceed the command line's limit.
    with atomic(path) as partial, tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as metadata:
        # ffmpeg treats a backslash at the end of a line as an escape, even if it is itself escaped.
        entries = {"title": title.rstrip("\\"), "comment": json.dumps(comment, ensure_ascii=False)}
        metadata.write(";FFMETADATA1\n" + "".join(f"{key}={escape(text)}\n" for key, text in entries.items()))
        metadata.flush()
        inputs = ["-i", str(stream), "-f", "ffmetadata", "-i", metadata.name]
        maps = ["-map", "0:v", "-map_metadata", "1", "-c:v", "copy"]
        if sound is not None:
            inputs += [*sounds.SAFE, "-ss", str(sound[1]), "-t", str(sound[2]), "-i", f"file:{sound[0]}"]
            maps += ["-map", "2:a:0", "-map_metadata:s:a", "-1", "-c:a", "aac"]
        ran = run_ffmpeg(*inputs, *maps, "-movflags", "+faststart", str(partial))
        check(path, ran.returncode, ran.stderr)


class Picture:
    """Stands in for an Encoder where there is one frame: a PNG, with the settings in its metadata."""

    def __init__(self, path: Path):
        self.path, self.frames, self.pixels = path, 0, None

    def add(self, frames: numpy.ndarray) -> None:
        if len(frames):
            self.pixels, self.frames = frames[-1], self.frames + len(frames)

    def finish(self, title: str, comment: dict) -> None:
        metadata = PngInfo()
        metadata.add_itxt("Title", title)
        metadata.add_itxt("Comment", json.dumps(comment, ensure_ascii=False))
        write_picture(self.path, self.pixels, pnginfo=metadata)

    def close(self) -> None:
        """Nothing is open."""


def check(path: Path, status: int, errors: bytes) -> None:
    if status:
        raise OSError(f"{path}: ffmpeg failed: {errors.decode(errors='replace').strip()}")


def escape(text: str) -> str:
    """Escape a value for ffmpeg's metadata format."""
    return re.sub(r"([=;#\\\n])", r"\\\1", text)


def read_metadata(path: Path) -> dict | None:
    """The settings in the metadata of a video or picture of this project; None for any other file."""
    try:
        content = json.loads(picture_comment(path) if is_png(path) else video_comment(path) or "null")
    except (OSError, ValueError, RecursionError, subprocess.TimeoutExpired):
        return None
    return content if isinstance(content, dict) else None


def is_png(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8) == b"\x89PNG\r\n\x1a\n"


def picture_comment(path: Path) -> str:
    """Of what stands before a PNG's pixels, which are not decoded."""
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return str(picture.info.get("Comment", "null"))
    except Exception as error:  # Pillow raises many types over broken files
        raise ValueError(f"{path}: not a whole PNG") from error


def video_comment(path: Path) -> str | None:
    # Force MP4: ffmpeg would open the files listed in a playlist that is named like a video.
    source = ["-f", "mp4", "-protocol_whitelist", "file", "-i", f"file:{path}"]
    text = run_ffmpeg(*source, "-f", "ffmetadata", "-", timeout=READ_SECONDS).stdout
    comment = re.search(r"^comment=((?:[^\\\n]|\\.|\\\n)*+)", text.decode(errors="replace"), re.MULTILINE)
    return re.sub(r"\\(.|\n)", r"\1", comment.group(1)) if comment else None


class Pictures:
    """poster.png, the middle frame of a video, and contact_sheet.png, evenly spaced ones: kept as frames go by."""

    def __init__(self, total: int):
        self.middle, self.seen, self.kept = total // 2, 0, dict[int, numpy.ndarray]()
        self.spaced = numpy.unique(numpy.linspace(0, total - 1, SHEET_FRAMES).round().astype(int)).tolist()

    def add(self, frames: numpy.ndarray) -> None:
        for place in (self.middle, *self.spaced):
            if self.seen <= place < self.seen + len(frames):
                self.kept[place] = numpy.array(frames[place - self.seen])  # a view would hold all of them
        self.seen += len(frames)

    def write(self, folder: Path) -> None:
        write_picture(folder / "poster.png", self.kept[self.middle])
        chosen = [self.kept[place] for place in self.spaced]
        columns = math.ceil(math.sqrt(len(chosen)))
        rows = math.ceil(len(chosen) / columns)
        height, width, _ = chosen[0].shape
        sheet = numpy.zeros((rows * height, columns * width, 3), numpy.uint8)
        for index, frame in enumerate(chosen):
            row, column = divmod(index, columns)
            sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = frame
        smaller = Image.fromarray(sheet).reduce(math.ceil(sheet.shape[1] / SHEET_WIDTH))
        write_picture(folder / "contact_sheet.png", numpy.asarray(smaller))


def write_preview(path: Path, frames: numpy.ndarray, fps: int) -> None:
    """Write a PNG: one frame as it is, or small and animated some of several."""
    if len(frames) == 1:
        write_picture(path, frames[0])
        return
    chosen = frames[numpy.linspace(0, len(frames) - 1, min(len(frames), PREVIEW_FRAMES)).round().astype(int)]
    factor = math.ceil(max(frames.shape[1:3]) / PREVIEW_SIDE)
    first, *others = (Image.fromarray(frame).reduce(factor) for frame in chosen)
    milliseconds = 1000 * len(frames) / fps / len(chosen)
    with atomic(path) as partial:
        first.save(partial, compress_level=2, save_all=True, append_images=others, duration=milliseconds, loop=0)


def write_picture(path: Path, pixels: numpy.ndarray, **named) -> None:
    with atomic(path) as partial:
        Image.fromarray(pixels).save(partial, compress_level=2, **named)  # slightly larger, much faster
