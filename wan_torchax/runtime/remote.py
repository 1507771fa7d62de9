"""Checkpoints in buckets (gs://, s3:// and whatever fsspec supports), read by byte ranges.

    folder = mirror("gs://bucket/Wan2.1-T2V-14B-Diffusers", "transformer")     # configs, headers, sparse files
    fill(folder / "a.safetensors", offset, count)                            # fetches these bytes

A mirror is a local folder with the layout of the remote one. Its safetensors files are sparse: bytes are fetched just
before they are read, so a host fetches only its devices' shards, once.
"""
import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from pathlib import Path

from wan_torchax.config.schema import ConfigError
from wan_torchax.records.files import atomic, write_text
from wan_torchax.records.fingerprints import REMOTE as RECORD

KEPT = (".safetensors", ".json", ".model")
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs"}
lock = threading.RLock()


def is_remote(path: str) -> bool:
    return re.match(r"[a-z][a-z0-9+]+://", path) is not None


def mirror(url: str, component: str) -> Path:
    """The local mirror of a remote checkpoint, with one component brought up to date."""
    files, source = connect(url), f"{url.rstrip('/')}/{component}"
    try:
        listed = {entry["name"]: entry["size"] for entry in files.ls(source, detail=True)}
        kept = [(name, size) for name, size in listed.items() if name.endswith(KEPT)]
        state = sorted([Path(name).name, size, str(files.checksum(name))] for name, size in kept)
    except FileNotFoundError:
        state = []
    except Exception as error:  # filesystems raise different errors
        raise ConfigError(f"model.path={url}: cannot be read ({error}); check its name and your credentials") from error
    folder = cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / component
    record = json.dumps({"source": source, "state": state})
    if not (folder / RECORD).exists() or (folder / RECORD).read_text() != record:
        shutil.rmtree(folder, ignore_errors=True)  # stale: the remote files have changed
        if state:
            folder.mkdir(parents=True)
            for name, size, _ in state:
                make(files, f"{source}/{name}", folder / name, size)
            write_text(folder / RECORD, record)
    return folder.parent


def connect(url: str):
    """The filesystem behind a URL."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        return fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        remedy = f"pip install {PACKAGES[scheme]}" if scheme in PACKAGES else "use gs:// or s3://, or a local folder"
        raise ConfigError(f"model.path={url}: {error}; {remedy}") from error


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wan-torchax/remote"


def make(files, source: str, target: Path, size: int) -> None:
    """Copy a config file; create a safetensors file sparse, with only its header."""
    with atomic(target) as partial:
        if target.suffix != ".safetensors":
            partial.write_bytes(files.cat_file(source))
            return
        length = 8 + int.from_bytes(files.cat_file(source, 0, 8), "little")
        partial.write_bytes(files.cat_file(source, 0, min(length, size)))
        os.truncate(partial, size)


def fill(file: Path, offset: int, count: int) -> None:
    """Fetch a byte range of a mirrored file unless it is present. Does nothing for files outside a mirror."""
    if not (file.parent / RECORD).exists():
        return
    with lock:
        ranges = read_ranges(file)
    if any(first <= offset and offset + count <= last for first, last in ranges):
        return
    source = f"{json.loads((file.parent / RECORD).read_text())['source']}/{file.name}"
    content = connect(source).cat_file(source, offset, offset + count)
    if len(content) != count:
        raise OSError(f"{source}: {len(content)} bytes instead of {count} at {offset}")
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())  # before recording the range: after a power loss, zeros must not load as weights
    with lock:
        write_text(ranges_of(file), json.dumps(joined([*read_ranges(file), [offset, offset + count]])))


def ranges_of(file: Path) -> Path:
    return file.with_name(f".ranges-{file.name}")


def read_ranges(file: Path) -> list[list[int]]:
    with contextlib.suppress(FileNotFoundError):
        return json.loads(ranges_of(file).read_text())
    return []


def joined(ranges: list[list[int]]) -> list[list[int]]:
    """Merge overlapping and adjacent ranges."""
    merged: list[list[int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged
