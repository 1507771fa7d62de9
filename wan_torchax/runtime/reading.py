"""Tensors from safetensors files into host memory: threads read pieces straight to where they are sent from.

    for parts in read_ahead([Load(stored, "bfloat16", tensor.shape, tensor.sharding), …]):
        …                                                   # {where a part lies in the array: its numbers}

The next arrays are read while one is sent, as many as fit into AHEAD_BYTES; host memory never holds more than those and
the one in hand. Plain reads at the offsets that a file's header names: a mapped file would stay in memory once read.
"""
import _thread
import contextlib
import functools
import math
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import jax
import numpy

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
    pieces: int  # it is read in
    answers: SimpleQueue  # of those that have been: None, or what went wrong

    def result(self) -> dict[str, numpy.ndarray]:
        for _ in range(self.pieces):
            if error := self.answers.get():
                raise error
        return self.parts


class Readers:
    """Threads that work off a queue. Not those of threading and concurrent.futures: who starts them or gives them work
    shares conditions with them that are written in Python, and Ctrl-C or SIGTERM can leave one locked for ever."""

    def __init__(self):
        self.work, self.ended = SimpleQueue(), SimpleQueue()
        for _ in range(READERS):
            _thread.start_new_thread(self.read, ())

    def read(self) -> None:
        while given := self.work.get():
            function, answers = given
            try:
                answers.put(function())
            except BaseException as error:
                answers.put(error)
            del given, function, answers  # or a thread that waits would hold the memory that it read into
        self.ended.put(None)

    def close(self) -> None:
        """Wait for the pieces in hand, and for no others."""
        if sys.is_finalizing():  # Python ends and takes its threads along
            return
        with contextlib.suppress(Empty):
            while True:
                self.work.get_nowait()
        for _ in range(READERS):
            self.work.put(None)
        for _ in range(READERS):
            self.ended.get()


def read_ahead(loads: Iterable[Load], ahead: int = AHEAD_BYTES) -> Iterator[dict[str, numpy.ndarray]]:
    """What this process's devices hold of each array, in their order, the next ones being read meanwhile, as far as
    they fit into `ahead` bytes."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        readers = Readers()
        stack.callback(lambda: [os.close(file) for file in files.values()])
        stack.callback(readers.close)
        waiting: deque[Reading] = deque()
        for load in loads:
            while waiting and sum(reading.bytes for reading in waiting) + load_bytes(load) > ahead:
                yield waiting.popleft().result()
            for stored in load.sources:
                if stored.file not in files:
                    files[stored.file] = os.open(stored.file, os.O_RDONLY)
            waiting.append(begin(load, files, readers.work))
        while waiting:
            yield waiting.popleft().result()


def load_bytes(load: Load) -> int:
    return math.prod(load.shape) * numpy.dtype(load.dtype).itemsize


def begin(load: Load, files: dict[Path, int], work: SimpleQueue) -> Reading:
    """Have the rows read that this process's devices hold, each once, also where several parts share them."""
    buffers, parts, count, answers = {}, {}, 0, SimpleQueue()
    lead = int(load.stacked)
    for part in load.sharding.addressable_devices_indices_map(load.shape).values():
        first, last, _ = part[lead].indices(load.shape[lead])
        if (first, last) not in buffers:
            buffer = aligned((len(load.sources), last - first, *load.shape[lead + 1 :]), numpy.dtype(load.dtype))
            for place, stored in zip(buffer, load.sources):
                for rows in pieces(place, stored, first * stored.shape[0] // load.shape[lead] + load.begin):
                    work.put((functools.partial(read_rows, files[stored.file], stored, *rows), answers))
                    count += 1
            buffers[first, last] = buffer if load.stacked else buffer[0]
        parts[str(part)] = buffers[first, last][(*part[:lead], slice(None), *part[lead + 1 :])]
    return Reading(parts, sum(buffer.nbytes for buffer in buffers.values()), count, answers)


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
