"""Atomic file writes and folder locks."""
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from wan_torchax.config.schema import FolderError


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


def write_text(path: Path, text: str) -> None:
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # a prompt may have lone surrogates


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
