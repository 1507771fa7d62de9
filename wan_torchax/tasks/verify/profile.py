"""Reads a profile that jax.profiler wrote: seconds of each part of a program, on each device.

    with jax.profiler.trace(folder): ...
    parts = by_part(folder, compiled.as_text(), part_of)      # seconds by part, the mean of the devices
"""
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from wan_torchax.tasks import compiler

CORE = "XLA Ops"
COPIES = "copies"
GRAPH = "command_buffer"  # a CUDA graph: a profile has the names of its kernels, not of their ops
LIBRARIES = {"attention": r"hopper_|sdpa|flash", "projections": r"nvjet|gemm|cutlass", "communication": r"nccl"}
Interval = tuple[float, float, str]  # begin and end in ns, and the op


def by_part(folder: Path, text: str, part_of: Callable[[str, str], str]) -> dict[str, float]:
    """Seconds by part, the mean of the devices. `part_of` has an op's kind and its name in the program. Where several
    threads of a device run ops at the same time, their shares add up to the time in which any of them runs."""
    ops = instructions(text) | {name: ("kernel", name) for name in (*LIBRARIES, COPIES)}
    devices = [lines for lines in read(folder, ops).values() if lines]
    total: dict[str, float] = {}
    for lines in devices:
        own: dict[str, float] = {}
        for events in lines:
            for op, nanoseconds in self_times(events):
                part = part_of(*ops[op])
                own[part] = own.get(part, 0) + nanoseconds
        busy = length([event for events in lines for event in events]) / max(sum(own.values()), 1)
        for part, nanoseconds in own.items():
            total[part] = total.get(part, 0) + nanoseconds * busy / 1e9 / len(devices)
    return total


def instructions(text: str) -> dict[str, tuple[str, str]]:
    """Kind and name in the program of every instruction of a compiled program. A fusion that has no name of its own
    has its last instruction's."""
    computations, _ = compiler.parse(text)
    named = {}
    for lines in computations.values():
        for line in lines:
            kind = re.search(r"\}?\)? ([a-z][\w\-]*)\(", line.split(" = ", 1)[1])
            inside = re.search(r"calls=%?([^\s,)}]+)", line)
            source = [line, *reversed(computations.get(inside.group(1), []) if inside else [])]
            names = (re.search(r'op_name="([^"]*)"', one) for one in source)
            name = next((name.group(1) for name in names if name), "")
            named[compiler.name_of(line)] = kind.group(1) if kind else "", name
    return named


def read(folder: Path, ops: dict) -> dict[str, list[list[Interval]]]:
    """The program's ops by device, line by line of the profile. A TPU has one line for what its core does; in others
    transfers run beside it, and count only as far as the core waits for them."""
    devices: dict[str, list[list[Interval]]] = {}
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            lines = list(plane.lines)
            for line in [line for line in lines if line.name == CORE] or lines:
                for device, events in by_device(plane.name, line, ops).items():
                    devices.setdefault(device, []).append(events)
    # Beside an accelerator's planes, the host's has the launches of the same ops.
    return {name: lines for name, lines in devices.items() if name.startswith("/device:")} or devices


def by_device(plane: str, line, ops: dict) -> dict[str, list[Interval]]:
    """A line's events that are ops, by device. On a CPU the devices' threads are in one plane, and events say whose
    they are; elsewhere a device has its own plane."""
    devices: dict[str, list[Interval]] = {}
    for event in line.events:
        stats = {name: value for name, value in event.stats if name in ("hlo_op", "device_ordinal")}
        op = str(stats.get("hlo_op") or event.name.split(" = ")[0].strip("%"))
        op = of_kernel(event.name, ops) if op.startswith(GRAPH) else op
        if op in ops and event.duration_ns:
            interval = event.start_ns, event.start_ns + event.duration_ns, op
            devices.setdefault(f"{plane} {stats.get('device_ordinal', '')}", []).append(interval)
    return devices


def of_kernel(name: str, ops: dict) -> str:
    """The op of a kernel in a CUDA graph: XLA names its own kernels after theirs (loop_add_fusion_3 is
    loop_add_fusion.3), libraries' are known by what they compute. What is left are copies."""
    known = next((part for part, pattern in LIBRARIES.items() if re.search(pattern, name)), None)
    return known or next((op for op in (name, re.sub(r"_(\d+)$", r".\1", name)) if op in ops), COPIES)


def self_times(events: list[Interval]) -> Iterator[tuple[str, float]]:
    """(op, ns) of a line's events without those inside them: a loop contains its body's."""
    open_events: list[list] = []  # begin, end, op, ns of the events inside
    for begin, end, op in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_events and open_events[-1][1] <= begin:
            yield close(open_events)
        open_events.append([begin, end, op, 0.0])
        if len(open_events) > 1:
            open_events[-2][3] += end - begin
    while open_events:
        yield close(open_events)


def close(open_events: list[list]) -> tuple[str, float]:
    begin, end, op, inside = open_events.pop()
    return op, max(end - begin - inside, 0)


def length(events: list[Interval]) -> float:
    """The ns in which at least one event runs."""
    covered, until = 0.0, float("-inf")
    for begin, end, _ in sorted(events):
        covered += max(end - max(begin, until), 0)
        until = max(until, end)
    return covered
