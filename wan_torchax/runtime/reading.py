"""Tensors from safetensors files into host memory: threads read pieces straight to where they are sent from.

    for parts in read_ahead([Load(stored, "bfloat16", tensor.shape, tensor.sharding), …]):
        …                                                   # {where a part lies in the array: its numbers}

The next arrays are read while one is sent, as many as fit into AHEAD_BYTES; host memory never holds more than those and
the one in hand. Plain reads at the offsets that a file's header names: a mapped file would stay in memory once read.
"""
import contextlib
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy

from wan_torchax import interruption
from wan_torchax.runtime.checkpoint import Stored
from wan_torchax.runtime.remote import fill

READERS = 8  # threads: a disk is busy only if several reads wait for it
PIECE_BYTES = 2**24  # of one read
AHEAD_BYTES = 2**28  # of arrays that wait to be sent
# What safetensors calls the dtypes that weights come in, and numpy and torch alike.
STORED_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}


@dataclass
class Load:
    """An array to be sent, and the tensors on disk that it is made of: one, or one for each of its first dimension."""

    sources: list[Stored]
    dtype: str
    shape: tuple
    sharding: jax.sharding.Sharding
    stacked: bool = False
    begin: int = 0  # where its rows lie in each device's part of the tensor, if it has fewer


@dataclass
class Reading:
    """An array on its way into memory."""

    parts: dict[str, numpy.ndarray]  # by where they lie in it
    bytes: int
    pieces: list[Future]  # it is read in

    def result(self) -> dict[str, numpy.ndarray]:
        interruption.wait(self.pieces)
        for piece in self.pieces:
            piece.result()  # raises what went wrong
        return self.parts


def read_ahead(loads: Iterable[Load], ahead: int = AHEAD_BYTES) -> Iterator[dict[str, numpy.ndarray]]:
    """What this process's devices hold of each array, in their order, the next ones being read meanwhile, as far as
    they fit into `ahead` bytes."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        readers = ThreadPoolExecutor(READERS)
        stack.callback(lambda: [os.close(file) for file in files.values()])
        stack.callback(close, readers)
        waiting: deque[Reading] = deque()
        for load in loads:
            while waiting and sum(reading.bytes for reading in waiting) + load_bytes(load) > ahead:
                yield waiting.popleft().result()
            for stored in load.sources:
                if stored.file not in files:
                    files[stored.file] = os.open(stored.file, os.O_RDONLY)
            waiting.append(begin(load, files, readers))
        while waiting:
            yield waiting.popleft().result()


def close(readers: ThreadPoolExecutor) -> None:
    """Wait for the pieces in hand, and for no others; for none if this process is asked to end."""
    readers.shutdown(wait=interruption.asked is None, cancel_futures=True)


def load_bytes(load: Load) -> int:
    return math.prod(load.shape) * numpy.dtype(load.dtype).itemsize


def begin(load: Load, files: dict[Path, int], readers: ThreadPoolExecutor) -> Reading:
    """Have the rows read that this process's devices hold, each once, also where several parts share them."""
    buffers, parts, submitted = {}, {}, []
    lead = int(load.stacked)
    for part in load.sharding.addressable_devices_indices_map(load.shape).values():
        first, last, _ = part[lead].indices(load.shape[lead])
        if (first, last) not in buffers:
            buffer = aligned((len(load.sources), last - first, *load.shape[lead + 1 :]), numpy.dtype(load.dtype))
            for place, stored in zip(buffer, load.sources):
                for rows in pieces(place, stored, first * stored.shape[0] // load.shape[lead] + load.begin):
                    submitted.append(readers.submit(read_rows, files[stored.file], stored, *rows))
            buffers[first, last] = buffer if load.stacked else buffer[0]
        parts[str(part)] = buffers[first, last][(*part[:lead], slice(None), *part[lead + 1 :])]
    return Reading(parts, sum(buffer.nbytes for buffer in buffers.values()), submitted)


def aligned(shape: tuple, dtype: numpy.dtype) -> numpy.ndarray:
    """Memory that JAX's CPU backend takes as it is; what does not begin at a multiple of 64 it copies."""
    size = math.prod(shape) * dtype.itemsize
    memory = numpy.empty(size + 64, numpy.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def pieces(place: numpy.ndarray, stored: Stored, first: int) -> Iterator[tuple[int, numpy.ndarray]]:
    """Rows of a tensor from `first` on, a piece at a time, and where they go."""
    step = max(PIECE_BYTES // max(row_bytes(stored), 1), 1)
    for start in range(0, len(place), step):
        yield first + start, place[start : start + step]


def row_bytes(stored: Stored) -> int:
    return math.prod(stored.shape[1:]) * numpy.dtype(STORED_DTYPES[stored.dtype]).itemsize


def read_rows(file: int, stored: Stored, first: int, place: numpy.ndarray) -> None:
    """Some rows from `first` on into their place, in its dtype."""
    offset, kind = stored.offset + first * row_bytes(stored), numpy.dtype(STORED_DTYPES[stored.dtype])
    if kind == place.dtype:
        return read_into(file, place, offset, stored)
    rows = numpy.empty(place.shape, kind)
    read_into(file, rows, offset, stored)
    cast(rows, place)


def read_into(file: int, array: numpy.ndarray, offset: int, stored: Stored) -> None:
    rest = memoryview(array.reshape(-1).view(numpy.uint8))
    fill(stored.file, offset, rest.nbytes)
    while rest:
        count = os.preadv(file, [rest], offset)
        if not count:
            raise OSError(f"{stored.file}: it ends before its last tensor; download it again")
        rest, offset = rest[count:], offset + count


def cast(rows: numpy.ndarray, place: numpy.ndarray) -> None:
    """Rounded to the nearest, as torch does. Where numpy takes its time, by a way around that gives the same."""
    if rows.itemsize == 1:  # there are 256 of them
        table = numpy.arange(256, dtype=numpy.uint8).view(rows.dtype).astype(place.dtype)
        numpy.take(table, rows.view(numpy.uint8), out=place)
    elif (rows.dtype, place.dtype) == ("float16", "bfloat16"):
        numpy.copyto(place, rows.astype(numpy.float32), casting="unsafe")
    else:
        numpy.copyto(place, rows, casting="unsafe")
