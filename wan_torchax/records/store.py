"""The on-disk cache that makes later runs start fast: programs, array specs, tables, embeddings.

    store = Store.of(config)                                    # None if compile.store is null
    entry = store and store.read("programs-denoise", made_from)     # None: missing, or not trusted
    store.write("programs-denoise", made_from, {"any": "JSON"}, {"name": array})

An entry's key is a hash of `made_from`, everything it depends on. Programs are code, so the folder and its entries must
belong to the user and be closed to others. An entry with another owner or a wrong digest is ignored.
"""
import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import safetensors.numpy
from safetensors import SafetensorError

from wan_torchax.config.resolve import key_of
from wan_torchax.config.wording import flatten
from wan_torchax.records.files import atomic

log = logging.getLogger("wan")
GIB = 2**30
COMPARED = 8  # most recent entries of a kind to compare a miss with
SHOWN = 3  # differences to list
LEFT_OVER_SECONDS = 3600  # age at which a partial file is assumed to be from a dead process


class Untrusted(Exception):
    """Why an entry is rejected."""


@dataclass(frozen=True)
class Entry:
    about: dict[str, Any]
    arrays: dict[str, numpy.ndarray]


@dataclass(frozen=True)
class Store:
    folder: Path
    limit_bytes: float

    @classmethod
    def of(cls, config) -> "Store | None":
        folder = config.compile.store
        return cls(Path(os.path.expanduser(folder)), config.compile.store_gib * GIB) if folder else None

    def path(self, kind: str, made_from: dict) -> Path:
        return self.folder / f"{kind}-{key_of(made_from)}"

    def has(self, kind: str, made_from: dict) -> bool:
        """Whether there is such an entry, without validating it."""
        return self.path(kind, made_from).is_file()

    def read(self, kind: str, made_from: dict) -> Entry | None:
        path, made_from = self.path(kind, made_from), as_json(made_from)
        try:
            check_folder(self.folder)
            content = read_own(path)
            digest, rest = content[:64], content[65:]
            if hashlib.sha256(rest).hexdigest().encode() != digest:
                raise Untrusted("it was cut short or changed since it was written")
            head, _, arrays = rest.partition(b"\n")
            about = json.loads(head)
            if about.pop("made_from") != made_from:
                raise Untrusted("it was made from something else")
            with contextlib.suppress(OSError):  # a store may be read-only
                os.utime(path)  # for LRU eviction
            return Entry(about, safetensors.numpy.load(arrays))
        except FileNotFoundError:
            return None
        except (Untrusted, OSError, ValueError, KeyError, SafetensorError) as error:
            log.warning("ignoring %s in the store: %s", path, error)
            return None

    def write(self, kind: str, made_from: dict, about: dict, arrays: dict[str, numpy.ndarray]) -> None:
        """Write an entry. A failure is only logged: the run itself does not need it."""
        head = json.dumps(about | {"made_from": as_json(made_from)}).encode()
        # Safetensors would save a strided view in memory order.
        arrays = {name: numpy.ascontiguousarray(array) for name, array in arrays.items()}
        rest = head + b"\n" + safetensors.numpy.save(arrays)
        try:
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            check_folder(self.folder)
            with atomic(self.path(kind, made_from)) as partial, open(partial, "wb", opener=only_mine) as file:
                file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
            self.trim()
        except (Untrusted, OSError) as error:
            log.warning("%s is not cached: %s", kind, error)

    def trim(self) -> None:
        """Evict the least recently used entries beyond the size limit, and stale partial files."""
        files = {}
        for file in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process trims too
                files[file] = file.lstat()
        total = sum(status.st_size for status in files.values())
        for file, status in sorted(files.items(), key=lambda item: item[1].st_mtime):
            left_over = file.name.startswith(".") and time.time() - status.st_mtime > LEFT_OVER_SECONDS
            if left_over or (total > self.limit_bytes and not file.name.startswith(".")):
                file.unlink(missing_ok=True)
                total -= status.st_size

    def difference(self, kind: str, made_from: dict) -> str:
        """Why there is no such entry: its differences from the most similar recent entry of the kind."""
        made_from = as_json(made_from)
        files = [file for file in self.folder.glob(f"{kind}-*") if file.name.removeprefix(f"{kind}-").isalnum()]
        latest = sorted(files, key=modified, reverse=True)[:COMPARED]
        differences = []
        for file in latest:
            with contextlib.suppress(Untrusted, OSError, ValueError, KeyError):
                differences.append(differing(made_from, read_head(file)["made_from"]))
        if not differences:
            return "nothing of the kind is in the store yet"
        lines = min(differences, key=len)
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        return f"the store has none with {', '.join(lines[:SHOWN])}{more}" if lines else "what it has is not taken"


# ---------------------------------------------------------------- ownership


def check_folder(folder: Path, key: str = "compile.store", closed: int = 0o077) -> None:
    """Raise if the folder belongs to another user, or has any of the permissions in `closed`."""
    if not folder.exists():
        return
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise Untrusted(f"{folder} belongs to user {status.st_uid}, not {os.getuid()}; set {key} to your own")
    if status.st_mode & closed:
        raise Untrusted(f"{folder} is open to others (mode {stat.S_IMODE(status.st_mode):o}); chmod 700 {folder}")


def only_mine(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def read_own(path: Path, size: int = -1) -> bytes:
    """The content of a regular file that this user owns and others cannot write to."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted("it is no plain file")
        if status.st_uid != os.getuid():
            raise Untrusted(f"it belongs to user {status.st_uid}, this is {os.getuid()}")
        if status.st_mode & 0o022:
            raise Untrusted(f"others can write to it (mode {stat.S_IMODE(status.st_mode):o})")
        return file.read(size)


# ---------------------------------------------------------------- comparison


def as_json(value) -> Any:
    """A value after a JSON round trip: tuples as lists, other types as text."""
    return json.loads(json.dumps(value, sort_keys=True, default=str))


def read_head(path: Path) -> dict:
    return json.loads(read_own(path, 1 << 20)[65:].partition(b"\n")[0])


def modified(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def differing(new: dict, old: dict) -> list[str]:
    """Keys whose values differ, with the new and the old."""
    new, old = dict(flatten(new)), dict(flatten(old))
    keys = [key for key in new | old if new.get(key) != old.get(key)]
    return [f"{key}={shortened(new.get(key))} (but {shortened(old.get(key))})" for key in keys]


def shortened(value) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
