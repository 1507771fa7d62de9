"""Atomic file writes, arrays in files, and folder locks."""
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy

from wan_torchax.config.schema import FolderError

IN_MEMORY = 2**29  # bytes of a video's frames, or latents; more are in a file


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it is renamed to `path` when the block succeeds."""
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")  # two processes may write the same file
    partial.unlink(missing_ok=True)  # may be a link, if the folder is untrusted
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove what a killed run left of a result, picture or video. Others write smaller files into a run's folder."""
    for kind in ("safetensors", "png", "mp4"):
        for partial in folder.glob(f".partial-*.{kind}"):
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # a prompt may have lone surrogates


class Spool:
    """Rows of an array, in memory; if they are more than `most` bytes, in a temporary file (in TMPDIR), which is gone
    when nobody has the array any longer. Without `kept` there is none."""

    def __init__(self, most: int | None = None, kept: bool = True):
        self.most, self.kept = IN_MEMORY if most is None else most, kept
        self.held, self.rows, self.bytes = list[numpy.ndarray](), 0, 0
        self.file: IO[bytes] | None = None

    def append(self, rows: numpy.ndarray) -> None:
        if not self.kept:
            return
        self.held.append(rows)
        self.rows, self.bytes = self.rows + len(rows), self.bytes + rows.nbytes
        if self.bytes > self.most:
            self.file = self.file or tempfile.TemporaryFile(prefix="wan-")  # noqa: SIM115 - closed with the array
            for part in self.held:
                self.file.write(numpy.ascontiguousarray(part).data)
            self.held = [rows[:0]]

    def array(self) -> numpy.ndarray | None:
        """What was appended; a part that is in a file is read where it is used. None if nothing was, or is kept."""
        if not self.held:
            return None
        if self.file is None:
            return numpy.concatenate(self.held)
        self.file.flush()
        return numpy.memmap(self.file, self.held[0].dtype, "r", shape=(self.rows, *self.held[0].shape[1:]))


def own_file(folder: Path, name: str) -> Path | None:
    """A file in the folder itself, not reached through a link."""
    path = folder / name
    return path if path.is_file() and path.resolve() == folder.resolve() / name else None


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock the folder for writing; the kernel releases the lock however the process ends."""
    # Do not follow a link: the folder may be untrusted.
    with open(os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "wait for it, or name another folder with hydra.run.dir=<folder>"
            raise FolderError(f"{folder}: another run is writing into this folder; {remedy}") from error
        yield
