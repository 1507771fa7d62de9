"""What files hold, in a few letters: of whole files, and of checkpoints without reading all of them."""
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, for its fingerprint
REMOTE = ".remote.json"  # in a folder that stands for a remote one: where it comes from (runtime/remote.py)


def fingerprint(folders: Iterable[Path]) -> str:
    """Sixteen hex digits that change with what the folders hold: by the Hub's commit where they are of a snapshot, else
    by the files. So another fine-tune of the same shape is noticed, without reading all of it."""
    digest = hashlib.sha256()
    for folder in folders:
        if folder.parent.parent.name == "snapshots":
            digest.update(f"{folder.parent.name}/{folder.name}".encode())
            continue
        if (folder / REMOTE).exists():
            digest.update((folder / REMOTE).read_bytes())
            continue
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            digest.update(f"{folder.name}/{file.name}".encode())
            sample(file, digest)
    return digest.hexdigest()[:16]


def sample(file: Path, digest) -> None:
    """A file's size, its safetensors header, and blocks spread evenly over all of it, from the first to the last."""
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as handle:
        if file.suffix == ".safetensors":
            digest.update(handle.read(min(int.from_bytes(handle.read(8), "little"), size)))
        offsets = list(range(0, size, SAMPLE_BYTES))
        if len(offsets) > SAMPLES:
            offsets = [(size - SAMPLE_BYTES) * number // (SAMPLES - 1) for number in range(SAMPLES)]
        for offset in offsets:
            handle.seek(offset)
            digest.update(handle.read(SAMPLE_BYTES))


def digest(files: Iterable[Path]) -> str:
    """Sixteen hex digits of what the files hold."""
    content = hashlib.sha256()
    for path in files:
        status = path.stat()
        content.update(hash_file(path, status.st_mtime_ns, status.st_size))
    return content.hexdigest()[:16]


@functools.lru_cache(maxsize=64)  # by when it was changed
def hash_file(path: Path, *changed: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
