"""A video that is watched while it is made: fragmented MP4, to which every finished chunk is appended as one fragment.

A player shows what is there, and whatever ends the process leaves a file with all fragments that were appended.
"""
import struct
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy

from wan_torchax import interruption
from wan_torchax.config.clips import run_ffmpeg
from wan_torchax.records.media import MOST_QUEUED, Encoding, check, encoder, raw_source, write_with_metadata

NAME = "live.mp4"
TICKS = 1000  # of a frame: the unit of a fragment's times
FIRST, EVERY = ("ftyp", "moov", "moof", "mdat"), ("moof", "mdat")  # boxes that are kept of a chunk's file


class Growing:
    """Stands in for an Encoder: `add` takes frames as they come, and chunks are of fixed lengths, the first and the
    later ones, so that the same frames give the same bytes.

    `finish` writes the video with its metadata and removes the file that grew; `close` keeps that of an unfinished one.
    """

    def __init__(self, path: Path, encoding: Encoding, lengths: tuple[int, int]):
        self.path, self.stream, self.encoding, self.lengths = path, path.with_name(NAME), encoding, lengths
        self.frames = self.fragments = 0  # added so far
        self.waiting: list[numpy.ndarray] = []  # frames of the next fragment
        self.writer, self.queued = ThreadPoolExecutor(1), deque[Future]()

    def add(self, frames: numpy.ndarray) -> None:
        """Take frames (frames, height, width, 3); a whole chunk is encoded in the background. Waits where that is far
        behind: what is queued is in memory."""
        self.frames += len(frames)
        self.waiting.extend(frames)
        while len(self.waiting) >= (length := self.lengths[self.fragments > 0]):
            self.append(length)

    def append(self, count: int) -> None:
        chunk, first = numpy.stack(self.waiting[:count]), self.frames - len(self.waiting)
        self.queued.append(self.writer.submit(self.write, chunk, self.fragments, first))
        self.waiting, self.fragments = self.waiting[count:], self.fragments + 1
        self.settle(MOST_QUEUED)

    def settle(self, most: int) -> None:
        """Wait until at most so many chunks are queued; raises what has failed."""
        while self.queued and (len(self.queued) > most or self.queued[0].done()):
            interruption.wait([self.queued[0]])
            self.queued.popleft().result()

    def write(self, chunk: numpy.ndarray, number: int, first: int) -> None:
        """Encode a chunk and append it, in one write."""
        fragment = ["-g", str(len(chunk)), "-sc_threshold", "0", "-tune", "zerolatency"]  # one key frame
        fragment += ["-fragment_index", str(number + 1), "-video_track_timescale", str(TICKS * self.encoding.fps)]
        fragment += ["-movflags", "+empty_moov+default_base_moof+frag_keyframe", "-f", "mp4", "pipe:1"]
        source = [*raw_source(self.encoding, *chunk.shape[1:3]), "-i", "-"]
        ran = run_ffmpeg(*source, *encoder(self.encoding), *fragment, input=chunk.tobytes())
        check(self.stream, ran.returncode, ran.stderr)
        kept = FIRST if number == 0 else EVERY
        content = b"".join(placed(box, first * TICKS) for kind, box in boxes(ran.stdout) if kind in kept)
        with self.stream.open("ab" if number else "wb", buffering=0) as file:
            file.write(content)

    def finish(self, title: str, comment: dict) -> None:
        if self.waiting:
            self.append(len(self.waiting))
        self.settle(0)
        write_with_metadata(self.stream, self.path, title, comment)
        self.stream.unlink()

    def close(self) -> None:
        self.writer.shutdown(cancel_futures=True)


def boxes(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The boxes of an MP4 file, by kind."""
    while content:
        size, kind = struct.unpack(">I4s", content[:8])
        yield kind.decode(), content[:size]
        content = content[size:]


def placed(box: bytes, time: int) -> bytes:
    """A fragment's box with its time in the video, which ffmpeg counts from the beginning of a chunk."""
    place = box.find(b"tfdt") + 8  # in the form with eight bytes
    if box[4:8] != b"moof":
        return box
    return box[:place] + struct.pack(">Q", time + int.from_bytes(box[place : place + 8])) + box[place + 8 :]
