"""Content digests: of whole files, and of checkpoints without reading all of them."""
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

SAMPLE_BYTES = 1024  # from the beginning, the middle and the end of each tensor
MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
Ranges = tuple[tuple[int, int], ...]  # of bytes in a file
REMOTE = ".remote.json"  # records the source of a mirror (runtime/remote.py)


def fingerprint(places: Iterable[Path], ranges: Mapping[Path, Ranges] = MappingProxyType({})) -> str:
    """Sixteen hex digits over the contents of folders and files: samples of every tensor for weights; for other files,
    and those that the Hub's cache names by hash, the full content. Detects a fine-tune of a few layers without reading
    all weights. `ranges` are the bytes of the tensors in files whose header is not read here."""
    digest = hashlib.sha256()
    for place in places:
        if (place / REMOTE).exists():
            digest.update((place / REMOTE).read_bytes())
            continue
        for file in [place] if place.is_file() else sorted(path for path in place.iterdir() if path.is_file()):
            digest.update(b"" if place.is_file() else f"{place.name}/{file.name}\0".encode())
            digest.update(known_hash(file) or sampled(file, ranges.get(file)))
    return digest.hexdigest()[:16]


def known_hash(file: Path) -> bytes | None:
    """The hash of a file in the Hub's cache, where it links to blobs/<hash>."""
    target = file.resolve()
    named = target.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", target.name)
    return target.name.encode() if named else None


def sampled(file: Path, ranges: Ranges | None = None) -> bytes:
    """A digest of a file; of weights, of the header and samples of every tensor."""
    changed = file.stat().st_mtime_ns, file.stat().st_size
    if ranges is None and file.suffix == ".safetensors":
        ranges = tensors_in(file)
    return hash_file(file, *changed) if ranges is None else sample_tensors(file, ranges, *changed)


@functools.lru_cache(maxsize=256)  # by when it was changed
def sample_tensors(file: Path, ranges: Ranges, *changed: int) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        handle.seek(8)  # after safetensors' length, or GGUF's version
        header = min((begin for begin, _ in ranges), default=MOST_HEADER_BYTES) - 8
        digest.update(str(file.stat().st_size).encode() + handle.read(min(header, MOST_HEADER_BYTES)))
        for begin, end in sorted(ranges):
            last = max(end - SAMPLE_BYTES, begin)
            for place in (begin, (begin + last) // 2, last):
                handle.seek(place)
                digest.update(handle.read(min(SAMPLE_BYTES, end - place)))
    return digest.digest()


def tensors_in(file: Path) -> Ranges:
    """Byte ranges of the tensors of a safetensors file; none if its header is invalid, which loading reports."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = handle.read(min(length, MOST_HEADER_BYTES))
    try:
        places = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        return tuple((8 + length + int(begin), 8 + length + int(end)) for begin, end in places)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


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
