"""What the devices reach: memory, matrix products by size, and collectives on each axis of the mesh, against conf/chip.

Each figure is a loop inside one program, so that launches do not count. Every device is measured by itself: one that is
slower than the others is named, and so is a link over which data changes.
"""
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy
from jax import lax
from jax.sharding import PartitionSpec
from omegaconf import OmegaConf

from wan_torchax.config.commandline import CONF
from wan_torchax.config.resolve import Resolved
from wan_torchax.devices.mesh import memory_bytes
from wan_torchax.devices.sharding import replicated
from wan_torchax.tasks.doctor import Finding
from wan_torchax.tasks.plan import travel_seconds
from wan_torchax.tasks.tune import median_seconds
from wan_torchax.tasks.verify.kernels import named

BELOW = 0.85  # of what is expected
# By platform: bytes of the array that is read and written, sides of matrices, bytes that a device sends.
SIZES = {"cpu": (2**24, (256, 512), 2**18)}
ACCELERATOR = (2**31, (1024, 2048, 4096, 8192), 2**26)
LOOPS = 8  # products in one program
REASON = "another program on the devices, a lower clock, or a figure in conf/chip that is too high"
SIZE = "memory of a device"
OTHER_REASONS = {SIZE: "on a GPU JAX takes a share (XLA_PYTHON_CLIENT_MEM_FRACTION); else another program has the rest"}


def check(resolved: Resolved, folder: Path, report: dict) -> Iterator[Finding]:
    platform, chip = resolved.placement["platform"], facts(resolved)
    memory_size, sides, sent = SIZES.get(platform, ACCELERATOR)
    report["machine"] = found = {"chip": chip.kind, "rows": []}
    yield from memory(resolved, chip, memory_size, found["rows"])
    yield from products(resolved, chip, sides, found["rows"])
    for axis, size in resolved.mesh.shape.items():
        if size > 1:
            yield from links(resolved, chip, axis, sent, found["rows"])


def facts(resolved: Resolved):
    """The chip's file: that of the mesh, else the one that names this kind of device; empty if there is none."""
    chip = resolved.config.mesh.chip
    files = (OmegaConf.load(path) for path in sorted((CONF / "chip").glob("*.yaml")))
    kind = resolved.placement["kind"]
    return chip if chip.kind else OmegaConf.merge(chip, next((file for file in files if file.kind == kind), {}))


def judged(rows: list, check: str, what: str, value: float, unit: str, expected: float | None) -> Iterator[Finding]:
    """Add a row to the table; a finding with its share of what conf/chip says."""
    rows.append({"what": what, "value": value, "unit": unit, "expected": expected})
    figure = f"{what}: {value:,.1f} {unit}"
    if expected is None:
        yield Finding(check, "ok", f"{figure}; conf/chip has no figure for this device")
    elif value < BELOW * expected:
        reason = OTHER_REASONS.get(what, REASON)
        yield Finding(check, "note", f"{figure}, {value / expected:.0%} of {expected:,.0f}", reason)
    else:
        yield Finding(check, "ok", f"{figure}, {value / expected:.0%} of {expected:,.0f}")


# ---------------------------------------------------------------- devices


def memory(resolved: Resolved, chip, size: int, rows: list) -> Iterator[Finding]:
    """Bandwidth of reading and writing an array, and how much memory there is."""
    mesh = resolved.mesh
    # One pass: in a loop XLA may copy what it carries.
    seconds = by_device(lambda array: array + 1, mesh, (size // 4,), "float32", resolved.config.verify.repeats)
    speeds = [2 * size / taken / 1e9 for taken in seconds]
    yield from judged(rows, "memory", "memory, read and written", min(speeds), "GB/s", chip.hbm_gbs)
    yield from slow_devices(mesh, "memory", speeds)
    limit = memory_bytes(mesh, chip)
    if resolved.placement["platform"] != "cpu" and limit:
        yield from judged(rows, "memory", SIZE, limit / 2**30, "GiB", chip.hbm_gib)


def products(resolved: Resolved, chip, sides, rows: list) -> Iterator[Finding]:
    """Matrix products of each size, in the transformer's type; the largest is held against the peak."""
    dtype = resolved.config.model.dtype.transformer
    peak = chip.peak_tflops if dtype == "bfloat16" else None
    for side in sides:

        def multiply(array, side=side):
            return lax.fori_loop(0, LOOPS, lambda _, carry: (carry @ array * side**-0.5).astype(dtype), array)

        seconds = by_device(multiply, resolved.mesh, (side, side), dtype, resolved.config.verify.repeats)
        speeds = [2 * LOOPS * side**3 / taken / 1e12 for taken in seconds]
        expected = peak if side == sides[-1] else None
        what = f"matrix product {dtype} {side}"
        findings = list(judged(rows, "products", what, min(speeds), "TFLOP/s", expected))
        if side == sides[-1]:
            yield from findings
            yield from slow_devices(resolved.mesh, "products", speeds)


def by_device(function: Callable, mesh, shape, dtype: str, repeats: int) -> list[float]:
    """Seconds on each device by itself, the others idle: the median of `repeats` calls."""
    return [seconds_on(device, function, shape, dtype, repeats) for device in mesh.devices.flat]


def seconds_on(device, function: Callable, shape, dtype: str, repeats: int) -> float:
    array = jax.device_put(jnp.full(shape, 0.01, dtype), device)
    return median_seconds(partial(jax.jit(function), array), repeats)


def slow_devices(mesh, check: str, speeds: list[float]) -> Iterator[Finding]:
    """Devices that are slower than the usual one."""
    usual = sorted(speeds)[len(speeds) // 2]
    slow = [index for index, speed in enumerate(speeds) if speed < BELOW * usual]
    if slow and mesh.devices.flat[0].platform != "cpu":  # fake devices share the machine's cores
        worst = min(speeds) / usual
        what = f"{check}: {named(list(mesh.devices.flat), slow)} reaches {worst:.0%} of what the others do"
        yield Finding("device", "note", what, "another program on it, heat, or a fault: have its host looked at")


# ---------------------------------------------------------------- links


def links(resolved: Resolved, chip, axis: str, size: int, rows: list) -> Iterator[Finding]:
    """What goes to the next device of an axis arrives as it was; then the bandwidth of each collective."""
    mesh = resolved.mesh
    yield from broken_links(mesh, axis, size)
    count, ways = size // 4, mesh.shape[axis]
    neighbours = [(index, (index + 1) % ways) for index in range(ways)]
    collectives = {
        "collective-permute": lambda array: lax.ppermute(array, axis, neighbours),
        "all-gather": lambda array: lax.all_gather(array, axis, tiled=True)[: len(array)],
        "all-reduce": lambda array: lax.psum(array, axis) / ways,
        "all-to-all": lambda array: lax.all_to_all(array, axis, 0, 0, tiled=True),
    }
    for kind, collective in collectives.items():
        seconds = collective_seconds(mesh, collective, count - count % ways, resolved.config.verify.repeats)
        received = size * (ways if kind == "all-gather" else 1)
        row = {"kind": kind, "axis": axis, "bytes": received}
        expected = None
        if chip.link_gbs:
            expected = received / travel_seconds(row, dict(mesh.shape), chip.link_gbs * 1e9, chip.devices) / 1e9
        what = f"{kind} over {axis}={ways}"
        yield from judged(rows, "links", what, received / seconds / 1e9, "GB/s", expected)


def broken_links(mesh, axis: str, size: int) -> Iterator[Finding]:
    """Sends a pattern of each device's own around the axis and compares every bit of what arrives."""
    ways, axes = mesh.shape[axis], mesh.axis_names
    places = numpy.arange(mesh.size).reshape(mesh.devices.shape)
    sources = numpy.roll(places, 1, axis=axes.index(axis)).ravel()

    def pattern(place):
        return lax.iota(jnp.uint32, size // 4) * jnp.uint32(2654435761) ^ place.astype(jnp.uint32)

    def send(sources):
        own = pattern(lax.axis_index(axes))
        received = lax.ppermute(own, axis, [(index, (index + 1) % ways) for index in range(ways)])
        return jnp.sum(received != pattern(sources[0]))[None]

    spread = PartitionSpec(axes)
    run = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False))
    wrong = numpy.asarray(run(jnp.asarray(sources)))
    devices = list(mesh.devices.flat)
    for place in numpy.flatnonzero(wrong):
        way = f"from {named(devices, [sources[place]])} to {named(devices, [place])} (axis {axis})"
        remedy = "a mesh without it (mesh.axes), and have its host looked at"
        yield Finding("link", "bad", f"{wrong[place]:,} of {size // 4:,} words change on the way {way}", remedy)


def collective_seconds(mesh, collective: Callable, count: int, repeats: int) -> float:
    """Seconds of one, in a loop of several."""

    def several(array):
        return lax.fori_loop(0, LOOPS, lambda _, carry: collective(carry), array)

    whole = PartitionSpec()
    run = jax.jit(jax.shard_map(several, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    array = jax.device_put(jnp.ones(count, jnp.float32), replicated(mesh))
    return median_seconds(lambda: run(array), repeats) / LOOPS
