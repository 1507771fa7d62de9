"""Content digests: of whole files, and of checkpoints without reading all of them."""
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

SAMPLE_BYTES = 1024  # from the beginning, the middle and the end of each tensor
MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
REMOTE = ".remote.json"  # records the source of a mirror (runtime/remote.py)


def fingerprint(folders: Iterable[Path]) -> str:
    """Sixteen hex digits over the folders' contents: samples of every tensor for weights; for other files, and those
    that the Hub's cache names by hash, the full content. Detects a fine-tune of a few layers without reading all
    weights."""
    digest = hashlib.sha256()
    for folder in folders:
        if (folder / REMOTE).exists():
            digest.update((folder / REMOTE).read_bytes())
            continue
        files = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.is_file())
        for file in files:
            digest.update(f"{folder.name}/{file.name}\0".encode())
            digest.update(known_hash(file) or sampled(file))
    return digest.hexdigest()[:16]


def known_hash(file: Path) -> bytes | None:
    """The hash of a file in the Hub's cache, where it links to blobs/<hash>."""
    target = file.resolve()
    named = target.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", target.name)
    return target.name.encode() if named else None


def sampled(file: Path) -> bytes:
    """A digest of a file; of safetensors files, of the header and samples of every tensor."""
    status = file.stat()
    if file.suffix != ".safetensors":
        return hash_file(file, status.st_mtime_ns, status.st_size)
    return sample_tensors(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)  # by when it was changed
def sample_tensors(file: Path, *changed: int) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = handle.read(min(length, MOST_HEADER_BYTES))
        digest.update(str(file.stat().st_size).encode() + header)
        for begin, end in tensors_in(header):
            last = max(end - SAMPLE_BYTES, begin)
            for place in (begin, (begin + last) // 2, last):
                handle.seek(8 + length + place)
                digest.update(handle.read(min(SAMPLE_BYTES, end - place)))
    return digest.digest()


def tensors_in(header: bytes) -> Iterator[tuple[int, int]]:
    """Byte ranges of the tensors after a header; none if it is invalid, which loading reports."""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        yield from sorted((int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return


def digest(files: Iterable[Path]) -> str:
    """Sixteen hex digits over the files' contents."""
    content = hashlib.sha256()
    for path in files:
        status = path.stat()
        content.update(hash_file(path, status.st_mtime_ns, status.st_size))
    return content.hexdigest()[:16]


@functools.lru_cache(maxsize=256)  # by when it was changed
def hash_file(path: Path, *changed: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
