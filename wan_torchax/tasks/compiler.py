"""Compile an exported program for a TPU topology with libtpu, without a TPU, and report what the compiler says.

    python compiler.py step.bin --topology v6e:2x4 --mesh dp=2,sp=1,tp=4 --json report.json

It runs in any Python that has JAX and libtpu, and imports nothing else: plan.py calls it, in this environment or
through the command in `plan.compiler`. The report, per chip: HBM, code size, the compiler's cycle estimate for every op
(loop bodies times their trip counts; Pallas kernels have none), the bytes and shapes of those kernels, the VMEM that
kernels and XLA's ops use and may use, and the collectives with their bytes.
"""
import argparse
import json
import math
import os
import re
import sys
import time

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all")
XLA_OPS = "XLA's ops"
# Of a sort along the last dimension, per element (rounded up to a power of two) and stage of a bitonic network: the
# schedule for 1,480 x 591 integers has 26 times 7,998 bundles.
SORT_CYCLES = 26 * 7998 / (1480 * 1024 * 55)
# Pallas kernels bound by memory, and the part of a plan that they count towards.
PASSES = {"rotary_kernel": "rope", "norm_kernel": "norms", "copy_kernel": "attention", "sums_kernel": "attention"}
LIST_BLOCK = 256, 128  # queries and keys of an entry of lists_kernel's lists
ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8,
}
NAMED_GROUPS = (
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
KERNEL = r"%?(\w+_kernel)\S* = .* custom-call\(.*?layout_constraints=\{(.*?)\}(?:, \w+=|$)"
BRANCHES = r"(?:branch_computations=\{|true_computation=|false_computation=)([^}]*?)(?:\}|, false|, metadata|$)"


# ---------------------------------------------------------------- reading HLO


def parse(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of every computation in an HLO module's text, and the entry's name."""
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([^\s(]+) .*\{$", line)
        if header and not line.startswith((" ", "HloModule")):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif current is not None and " = " in line:
            current.append(line.strip())
    return computations, entry


def instructions(text: str):
    """(instruction, how often it runs) for everything the entry computation reaches through loops, calls and
    branches."""
    computations, entry = parse(text)

    def visit(name, times):
        for line in computations.get(name, ()):
            yield line, times
            loop = re.search(r" while\(.*condition=%?([^\s,]+), body=%?([^\s,]+)", line)
            if loop:
                yield from visit(loop.group(2), times * trips(line, computations.get(loop.group(1), ())))
            for callee in re.findall(r" (?:call|async-start)\(.*?(?:to_apply|calls)=%?([^\s,)]+)", line):
                yield from visit(callee, times)
            for branches in re.findall(BRANCHES, line):  # the first is the usual one, the other a fallback
                yield from visit(branches.split(",")[0].strip(" %"), times)

    yield from visit(entry, 1)


def trips(line: str, condition) -> int:
    """A loop's trip count: XLA's if known, else the constant its counter is compared with."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known.group(1))
    limits = [int(value) for text in condition for value in re.findall(r"s32\[\]\S* constant\((\d+)\)", text)]
    return max(limits, default=1)


def result_bytes(line: str) -> int:
    """Bytes of an instruction's result, tuples summed."""
    result = re.sub(r"\{[^{}]*\}", "", line.split(" = ", 1)[1])  # without layouts
    result = result[: result.index(")") + 1] if result.startswith("(") else result.split(" ")[0]
    return sum(math.prod(shape) * ITEM_BYTES.get(dtype, 4) for dtype, shape in arrays(result))


def arrays(text: str) -> list[tuple[str, list[int]]]:
    """The types and shapes in a text, in order."""
    matches = re.findall(r"(\w+)\[([\d,]*)\]", text)
    return [(dtype, [int(size) for size in sizes.split(",") if size]) for dtype, sizes in matches]


def collectives(events: list[dict]) -> list[dict]:
    """A timeline's collectives by kind and mesh axis: how often they run, and the total bytes that one chip receives.
    """
    rows = {}
    for event in events:
        if "start" in event:
            row = rows.setdefault((event["kind"], event["axis"]), {"count": 0, "bytes": 0})
            row["count"] += event["count"]
            row["bytes"] += event["bytes"]
    return [{"kind": kind, "axis": axis, **row} for (kind, axis), row in sorted(rows.items())]


def timeline(text: str, axes: dict[str, int]) -> list[dict]:
    """Events in program order, loop bodies times their trip counts: the start of a collective, the wait for it, and the
    work in between: cycles of XLA's ops, and FLOPs of the kernels of linear layers, by the type of their weights, and
    of attention."""
    events, under_way = [], {}
    for line, times in instructions(text):
        collective = re.search(r" (" + "|".join(COLLECTIVES) + r")(-start|-done)?\(%?([\w.\-]*)", line)
        if not collective:
            work = {"cycles": times * cycles_of(line)}
            work["flops"] = {kind: times * flops for kind, flops in kernel_flops(line).items()}
            if under_way and (work["cycles"] or work["flops"]):
                events.append(work)
            continue
        kind, state, operand = collective.groups()
        if state != "-done":
            name = operand = name_of(line)
            under_way[name] = {"start": name, "kind": kind, "axis": axis_of(line, axes), "count": times}
            events.append(under_way[name])
        if state != "-start":
            under_way.pop(operand)["bytes"] = times * result_bytes(line)
            events.append({"done": operand})
    return events


def kernel_bytes(text: str) -> dict[str, int]:
    """The bytes that memory-bound kernels read and write."""
    moved = {}
    for line, times in instructions(text):
        kernel = re.match(KERNEL, line)
        if kernel and kernel.group(1) in PASSES:
            group, written = PASSES[kernel.group(1)], result_bytes(line)
            size = written + bytes_read(kernel.group(1), kernel.group(2), written)
            moved[group] = moved.get(group, 0) + times * size
    return moved


def bytes_read(name: str, operands: str, written: int) -> int:
    """The bytes that a kernel reads, of all its operands or of some heads of them."""
    if name == "copy_kernel":
        return written
    if name == "sums_kernel":  # queries and keys, possibly in one array, and values
        dtype, values = arrays(operands)[-1]
        return 3 * math.prod(values) * ITEM_BYTES[dtype]
    return result_bytes(f" = ({operands})")


def product_calls(text: str) -> list[dict]:
    """Calls of kernels/product.py: how often, the numbers of tokens, inputs and outputs, the type of the weights, and
    whether the result is added to a residual."""
    calls = []
    for line, times in instructions(text):
        kernel = re.match(KERNEL, line)
        if kernel and kernel.group(1) == "product_kernel":
            array, (dtype, (_, outputs, inputs)), *others = product_operands(kernel.group(2))
            tokens = tokens_of(line, array, outputs, inputs)
            calls.append({
                "times": times, "tokens": tokens, "inputs": inputs, "outputs": outputs, "weights": dtype,
                "residual": any(math.prod(shape) == tokens * outputs for _, shape in others),
            })
    return calls


def product_operands(text: str) -> list:
    """The shape of the array, or of one of its pieces (parallel.Pieces), and what follows it, types and shapes: weights
    first. The layer's number is before them."""
    _, (_, array), *others = arrays(text)
    return [array, *(others if len(array) < 5 else [one for one in others if len(one[1]) < 5])]


def tokens_of(line: str, array: list[int], outputs: int, inputs: int) -> int:
    """Those of a call of kernels/product.py. The result may be part of a longer one, or the array have some of the
    inputs, but not both."""
    if len(array) == 5:
        _, runs, batch, _, run = array
        return runs * batch * run
    if inputs in array[1:]:
        return math.prod(array) // inputs
    return math.prod(arrays(line.split(" = ", 1)[1])[0][1]) // outputs


def launches(text: str) -> int:
    """How often a Pallas kernel is called."""
    return sum(times for line, times in instructions(text) if re.match(KERNEL, line))


def vmem_bytes(text: str) -> dict[str, dict[str, int]]:
    """The most VMEM that calls of each Pallas kernel, and XLA's ops, use and may use at a time."""
    rows: dict[str, dict[str, int]] = {}
    for line, _ in instructions(text):
        kernel = re.match(KERNEL, line)
        row = rows.setdefault(kernel.group(1) if kernel else XLA_OPS, {"used": 0, "limit": 0})
        for key, field in (("used", "used_scoped_memory_configs"), ("limit", "scoped_memory_configs")):
            sizes = re.search(rf'"{field}":\[{{"memory_space":"1","offset":"\d+","size":"(\d+)"', line)
            row[key] = max(row[key], int(sizes.group(1)) if sizes else 0)
    return rows


def name_of(line: str) -> str:
    return line.split(" = ")[0].removeprefix("ROOT ").strip("% ")


def cycles_of(line: str) -> int:
    """The compiler's estimate; 0 if it gives none. It gives none for sorts, whose schedules take SORT_CYCLES."""
    cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
    if cycles is None and " sort(" in line:
        _, (*rows, length) = arrays(line.split(" = ", 1)[1])[0]
        stages = (length - 1).bit_length() * ((length - 1).bit_length() + 1) // 2
        return round(SORT_CYCLES * math.prod(rows) * 2 ** (length - 1).bit_length() * stages)
    return int(cycles.group(1)) if cycles else 0


def kernel_flops(line: str) -> dict[str, int]:
    """FLOPs of a call of kernels/product.py, by the type of its weights, or of attention's fast kernel or that over
    lists; empty for other ops."""
    kernel = re.match(KERNEL, line)
    if not kernel or kernel.group(1) not in ("product_kernel", "fast_kernel", "lists_kernel"):
        return {}
    operands = arrays(kernel.group(2))
    if kernel.group(1) == "lists_kernel":  # lists, queries, keys, values
        (_, lists), _, _, (_, (_, width, _)) = operands[:4]
        return {"lists": 4 * math.prod(LIST_BLOCK) * math.prod(lists) // lists[1] * width}
    if kernel.group(1) == "product_kernel":
        array, (dtype, (_, outputs, inputs)) = product_operands(kernel.group(2))[:2]
        return {dtype: 2 * tokens_of(line, array, outputs, inputs) * inputs * outputs}
    (_, (_, keys, _)), (_, out) = operands[1], arrays(line.split(" = ", 1)[1])[0]
    return {"attention": 4 * keys * math.prod(out)}


def axis_of(line: str, axes: dict[str, int]) -> str:
    """The mesh axes along which the devices of one group differ."""
    group = first_group(line)
    sizes = list(axes.values())

    def coordinates(device):
        place = []
        for size in reversed(sizes):
            device, rest = divmod(device, size)
            place.append(rest)
        return place[::-1]

    places = [coordinates(device) for device in group]
    return "+".join(axis for index, axis in enumerate(axes) if len({place[index] for place in places}) > 1) or "none"


def first_group(line: str) -> list[int]:
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    if listed:
        return [int(device) for device in listed.group(1).split(",")]
    named = re.search(NAMED_GROUPS, line)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        group = devices_along(sizes, re.findall(r"'(\w+)'", named.group(4)))
        order = transposed_iota(named.group(2), named.group(3)) if named.group(2) else None
        return sorted(order[device] for device in group) if order else group
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    return transposed_iota(iota.group(3), iota.group(4))[: int(iota.group(2))] if iota else []


def devices_along(sizes: dict[str, int], varying) -> list[int]:
    """Devices of the first group: all positions along the varying axes, 0 along the others."""
    group, stride = [0], 1
    for name, size in reversed(sizes.items()):
        if name in varying:
            group = [device + stride * index for index in range(size) for device in group]
        stride *= size
    return sorted(group)


def transposed_iota(shape: str, order: str | None) -> list[int]:
    """0, 1, 2 … reshaped to "2,4", transposed to the order "1,0" and flattened."""
    shape = [int(size) for size in shape.split(",")]
    order = [int(axis) for axis in order.split(",")] if order else range(len(shape))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    flat = [0]
    for axis in order:
        flat = [base + strides[axis] * index for base in flat for index in range(shape[axis])]
    return flat


def cycle_rows(text: str) -> list[dict]:
    """The compiler's cycle estimate for every op that has one, with its name in the program."""
    rows = []
    for line, times in instructions(text):
        if cycles := cycles_of(line):
            name = re.search(r'op_name="([^"]*)"', line)
            kind = re.search(r"\}?\)? ([a-z][\w\-]*)\(", line.split(" = ", 1)[1])
            rows.append({
                "op": name_of(line), "kind": kind.group(1) if kind else "",
                "times": times, "cycles": times * cycles, "name": name.group(1) if name else "",
            })
    return sorted(rows, key=lambda row: -row["cycles"])


def read(text: str, axes: dict[str, int]) -> dict:
    """The report on a compiled program, from its text."""
    rows, events = cycle_rows(text), timeline(text, axes)
    return {
        "cycles": sum(row["cycles"] for row in rows),
        "ops": rows,
        "collectives": collectives(events),
        "timeline": events,
        "kernel_bytes": kernel_bytes(text),
        "product_calls": product_calls(text),
        "launches": launches(text),
        "vmem_bytes": vmem_bytes(text),
    }


# ---------------------------------------------------------------- compiling


def compile_for(path: str, topology_name: str, axes: dict[str, int], donated: list[int]) -> tuple[dict, str]:
    """The report on an exported program compiled for a topology, and the compiled HLO's text. An export does not say
    which arguments are donated."""
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-8")
    import jax
    import numpy
    from jax.experimental import topologies

    # By default a host has four chips; a slice of one says so.
    alone = {"chips_per_host_bounds": (1, 1, 1)} if topology_name.endswith(":1x1") else {}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name, **alone)
    devices = numpy.array(topology.devices)
    count = math.prod(axes.values())
    if count > devices.size or devices.size % count:
        sys.exit(f"the mesh {axes} has {count} devices, the topology {topology_name} has {devices.size}")
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.sharding.Mesh(devices[:count].reshape(tuple(axes.values())), tuple(axes), axis_types=auto)
    with open(path, "rb") as file:
        exported = jax.export.deserialize(bytearray(file.read()))
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh))
    ]
    arguments, keywords = jax.tree.unflatten(exported.in_tree, structs)
    began, worked = time.time(), time.process_time()
    with jax.set_mesh(mesh):
        compiled = jax.jit(exported.call, donate_argnums=donated).lower(*arguments, **keywords).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "device": topology.devices[0].device_kind,
        "compile_seconds": time.time() - began,
        "compile_core_seconds": time.process_time() - worked,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    } | read(text, axes), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", help="the output of jax.export(...).serialize()")
    parser.add_argument("--topology", required=True, help="libtpu's name: v6e:2x4, v5e:2x4, v5p:2x2x1, tpu7x:2x2x1")
    parser.add_argument("--mesh", required=True, help="axis=size,… in order")
    parser.add_argument("--donated", default="", help="positions of donated arguments, with commas")
    parser.add_argument("--json", required=True, help="where the report goes")
    parser.add_argument("--hlo", help="where the compiled program's text goes")
    parser.add_argument("--libtpu-args", default="", help="flags for libtpu, e.g. to write its schedules somewhere")
    options = parser.parse_args()
    os.environ["LIBTPU_INIT_ARGS"] = options.libtpu_args
    axes = {axis: int(size) for axis, size in (item.split("=") for item in options.mesh.split(","))}
    donated = [int(place) for place in options.donated.split(",") if place]
    report, text = compile_for(options.artifact, options.topology, axes, donated)
    with open(options.json, "w") as file:
        json.dump(report, file)
    if options.hlo:
        with open(options.hlo, "w") as file:
            file.write(text)
    sys.stdout.flush()
    os._exit(0)  # libtpu's teardown can crash without a TPU; the report is complete here


if __name__ == "__main__":
    main()
