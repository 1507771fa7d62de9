"""Files that are there whole or not at all, and folders that one run at a time writes into."""
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from wan_torchax.config.schema import FolderError


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; the file gets its name when all of it is written."""
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")  # two processes may write the same
    partial.unlink(missing_ok=True)  # a link, in a folder of somebody else's making
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # a prompt may hold half a character


def own_file(folder: Path, name: str) -> Path | None:
    """A file that lies in the folder itself, not one that a link leads to."""
    path = folder / name
    return path if path.is_file() and path.resolve() == folder.resolve() / name else None


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """This process alone writes into the folder; the system lets go of it however the process ends."""
    # Not through a link: a folder may be a stranger's.
    with open(os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "wait for it, or name another folder with hydra.run.dir=<folder>"
            raise FolderError(f"{folder}: another run is writing into this folder; {remedy}") from error
        yield
