"""Reads tensors from files into host memory, in threads, directly into the buffers that are transferred.

    for parts in read_ahead([Load(stored, "bfloat16", tensor.shape, tensor.sharding), …]):
        …                                                   # {index of a shard: its values}

The next arrays are prefetched while one is transferred, up to AHEAD_BYTES, which bounds host memory. Uses pread at the
offsets from the header: pages of a mapped file would stay resident once read.
"""
import contextlib
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy

from wan_torchax import interruption
from wan_torchax.config.schema import ConfigError
from wan_torchax.runtime.formats import STORED_DTYPES, Stored, row_bytes
from wan_torchax.runtime.remote import fill

READERS = 8  # threads: several outstanding reads keep the disk busy
PIECE_BYTES = 2**24  # of one read
AHEAD_BYTES = 2**28  # of prefetched arrays


@dataclass
class Load:
    """An array to load, and its tensors on disk: one, or one per index of the leading dimension if `stacked`."""

    sources: list[Stored]
    dtype: str
    shape: tuple
    sharding: jax.sharding.Sharding
    stacked: bool = False
    begin: int = 0  # first row within each device's shard of the tensor, if only some rows are read
    finite: bool = False  # whether other numbers are refused

    @property
    def raw(self) -> "Load":
        """What is read: of a tensor in blocks, which the devices dequantize, the bytes of its rows."""
        stored = self.sources[0]
        if not stored.in_blocks:
            return self
        rows = jax.sharding.NamedSharding(self.sharding.mesh, jax.sharding.PartitionSpec(*self.sharding.spec[:1]))
        return replace(self, dtype="uint8", shape=(stored.shape[0], row_bytes(stored)), sharding=rows)


@dataclass
class Reading:
    """An array that is being read."""

    parts: dict[str, numpy.ndarray]  # by index of the shard
    bytes: int
    pieces: list[Future]  # the outstanding reads

    def result(self) -> dict[str, numpy.ndarray]:
        interruption.wait(self.pieces)
        for piece in self.pieces:
            piece.result()  # raises read errors
        return self.parts


def read_ahead(loads: Iterable[Load], ahead: int = AHEAD_BYTES) -> Iterator[dict[str, numpy.ndarray]]:
    """This process's shards of each array, in order, prefetching up to `ahead` bytes."""
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
    """Cancel pending reads and wait for running ones, unless the process is asked to end."""
    readers.shutdown(wait=interruption.asked is None, cancel_futures=True)


def load_bytes(load: Load) -> int:
    return math.prod(load.shape) * numpy.dtype(load.dtype).itemsize


def begin(load: Load, files: dict[Path, int], readers: ThreadPoolExecutor) -> Reading:
    """Submit reads for the rows of this process's shards; rows that several shards share are read once."""
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
    """A 64-byte aligned buffer: JAX's CPU backend would copy an unaligned one."""
    size = math.prod(shape) * dtype.itemsize
    memory = numpy.empty(size + 64, numpy.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def pieces(place: numpy.ndarray, stored: Stored, first: int) -> Iterator[tuple[int, numpy.ndarray]]:
    """Split a read of rows starting at `first` into pieces: (first row, destination)."""
    step = max(PIECE_BYTES // max(row_bytes(stored), 1), 1)
    for start in range(0, len(place), step):
        yield first + start, place[start : start + step]


def read_rows(file: int, stored: Stored, first: int, place: numpy.ndarray) -> None:
    """Read rows starting at `first` into `place`, converting to its dtype."""
    if stored.shift:
        begin, straight = (first + stored.shift) % stored.shape[0], replace(stored, shift=0)
        left = stored.shape[0] - begin  # rows up to the last
        read_rows(file, straight, begin, place[:left])
        return read_rows(file, straight, 0, place[left:])
    offset, kind = stored.offset + first * row_bytes(stored), numpy.dtype(STORED_DTYPES[stored.dtype])
    if kind == place.dtype and stored.scale is None:
        return read_into(file, place, offset, stored)
    rows = numpy.empty(place.shape, kind)
    read_into(file, rows, offset, stored)
    cast(rows, place, None if stored.scale is None else read_scale(stored)[first : first + len(rows)])


def read_whole(stored: Stored) -> numpy.ndarray:
    """A small tensor, in float32."""
    place = numpy.empty(stored.shape, numpy.float32)
    file = os.open(stored.file, os.O_RDONLY)
    try:
        read_rows(file, stored, 0, place)
    finally:
        os.close(file)
    return place


def read_scale(stored: Stored) -> numpy.ndarray:
    """What a tensor is multiplied by, one number for each of its rows; for a scalar always the same."""
    scale = stored.scale
    assert scale is not None
    fill(scale.file, scale.offset, math.prod(scale.shape) * row_bytes(scale))
    numbers = numpy.fromfile(scale.file, STORED_DTYPES[scale.dtype], scale.shape[0], offset=scale.offset)
    numbers = numbers.astype(numpy.float32)
    if len(numbers) < scale.shape[0] or not numpy.isfinite(numbers).all():
        raise ConfigError(f"{scale.file}: a scale is not a finite number; download it again")
    return numpy.broadcast_to(numbers, stored.shape[:1])


def read_into(file: int, array: numpy.ndarray, offset: int, stored: Stored) -> None:
    rest = memoryview(array.reshape(-1).view(numpy.uint8))
    fill(stored.file, offset, rest.nbytes)
    while rest:
        count = os.preadv(file, [rest], offset)
        if not count:
            raise OSError(f"{stored.file}: it ends before its last tensor; download it again")
        rest, offset = rest[count:], offset + count


def cast(rows: numpy.ndarray, place: numpy.ndarray, scale: numpy.ndarray | None = None) -> None:
    """Cast with round-to-nearest, as torch does; with a scale for each row, of the product in float32. Works around
    slow casts in numpy, with identical results."""
    same = scale is None or (scale == scale[0]).all()
    if rows.itemsize == 1 and same:  # only 256 values
        table = numpy.arange(256, dtype=numpy.uint8).view(rows.dtype).astype(numpy.float32)
        table = (table if scale is None else table * scale[0]).astype(place.dtype)
        numpy.take(table, rows.view(numpy.uint8), out=place)
    elif scale is not None:
        product = rows.astype(numpy.float32) * scale.reshape(-1, *[1] * (rows.ndim - 1))
        numpy.copyto(place, product, casting="unsafe")
    elif (rows.dtype, place.dtype) == ("float16", "bfloat16"):
        numpy.copyto(place, rows.astype(numpy.float32), casting="unsafe")
    else:
        numpy.copyto(place, rows, casting="unsafe")
