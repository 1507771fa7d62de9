"""Reads the header of a GGUF file: names, shapes, formats and places of its tensors. No JAX.

    read_header(Path("wan2.1-t2v-14b-Q4_K_M.gguf"))     # {name: Stored}

Every number of a header is held against the file's size before it is used: the file is untrusted.
"""
import math
import struct
from pathlib import Path
from typing import BinaryIO

from wan_torchax.runtime.formats import BLOCKS, Stored, bytes_of

VERSIONS = (2, 3)
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 28: "F64", 30: "BF16",
}
# Kinds of values, as `struct` writes them.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
MOST_HEADER_BYTES = 100_000_000  # as of safetensors
MOST_NAME_BYTES, MOST_ENTRIES, MOST_DIMENSIONS = 1024, 100_000, 8
ALIGNMENT = "general.alignment", 32
SHAPE = "comfy.gguf.orig_shape."  # of a tensor that was reshaped to fit GGUF's blocks


class Header:
    """The beginning of a file, read piece by piece."""

    def __init__(self, handle: BinaryIO, size: int):
        self.handle, self.left = handle, min(size, MOST_HEADER_BYTES)

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError(f"its header goes on beyond {'its end' if self.left < MOST_HEADER_BYTES else 'the limit'}")
        self.left -= count
        piece = self.handle.read(count)
        if len(piece) < count:
            raise ValueError("it ends within its header")
        return piece

    def number(self, kind: str):
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self, most: int) -> str:
        length = self.number("Q")
        if length > most:
            raise ValueError(f"a text of {length} bytes")
        return self.take(length).decode("utf-8")

    def value(self, kind: int):
        """A number, a text, or a short list of numbers; other lists are skipped."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text(MOST_HEADER_BYTES)
        if kind != ARRAY:
            raise ValueError(f"a value of unknown kind {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in NUMBERS:
            content = self.take(count * struct.calcsize(f"<{NUMBERS[inner]}"))
            return struct.unpack(f"<{count}{NUMBERS[inner]}", content) if count <= MOST_DIMENSIONS else None
        if inner != TEXT or count > self.left:
            raise ValueError(f"a list of {count} values of kind {inner}")
        for _ in range(count):
            self.take(self.number("Q"))
        return None


def read_header(file: Path) -> dict[str, Stored]:
    """A file's tensors."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        header = Header(handle, size)
        if header.take(4) != b"GGUF":
            raise ValueError("it does not begin as GGUF does")
        version, tensors, values = header.number("I"), header.number("Q"), header.number("Q")
        if version not in VERSIONS:
            raise ValueError(f"version {version} of GGUF; {' and '.join(map(str, VERSIONS))} are read")
        about = {}
        for _ in range(check_count(header, values)):
            name = header.text(MOST_NAME_BYTES)
            about[name] = header.value(header.number("I"))
        rows = [read_row(header) for _ in range(check_count(header, tensors))]
        alignment = about.get(ALIGNMENT[0], ALIGNMENT[1])
        if type(alignment) is not int or not 0 < alignment <= 2**16 or alignment % 8:
            raise ValueError(f"an alignment of {alignment}")
        begin = math.ceil(handle.tell() / alignment) * alignment
    found: dict[str, Stored] = {}
    end = begin
    for name, shape, kind, offset in rows:
        stored = place(file, name, original_shape(name, shape, about), kind, begin + offset)
        if name in found or stored.offset != math.ceil(end / alignment) * alignment:
            raise ValueError(f"{name} {'is there twice' if name in found else 'does not follow the tensor before it'}")
        found[name], end = stored, stored.offset + bytes_of(stored)
        if end > size:
            raise ValueError(f"it ends before the end of {name}")
    return found


def check_count(header: Header, count: int) -> int:
    if count > min(header.left, MOST_ENTRIES):
        raise ValueError(f"a header of {count} entries")
    return count


def read_row(header: Header) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = header.text(MOST_NAME_BYTES), header.number("I")
    if not 0 < dimensions <= MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}Q", header.take(8 * dimensions))
    return name, tuple(reversed(shape)), header.number("I"), header.number("Q")  # GGUF's last dimension is the first


def original_shape(name: str, shape: tuple[int, ...], about: dict) -> tuple[int, ...]:
    original = about.get(f"{SHAPE}{name}")
    if original is None:
        return shape
    whole = isinstance(original, tuple) and all(isinstance(one, int) and one > 0 for one in original)
    if not whole or math.prod(original) != math.prod(shape):
        raise ValueError(f"{name} has shape {shape}, by its metadata {original}")
    return original


def place(file: Path, name: str, shape: tuple, kind: int, offset: int) -> Stored:
    if kind not in TYPES:
        raise ValueError(f"{name} is in GGUF's type {kind}; {', '.join(TYPES.values())} are implemented")
    if 0 in shape:
        raise ValueError(f"{name} has shape {shape}")
    dtype = TYPES[kind]
    if dtype in BLOCKS and math.prod(shape[1:]) % BLOCKS[dtype][0]:
        raise ValueError(f"{name}: rows of {math.prod(shape[1:])} numbers do not divide into blocks of {dtype}")
    return Stored(file, dtype, shape, offset)

