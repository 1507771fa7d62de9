"""task=port: what stands between a diffusers model and this project, and the files to begin with.

    python run.py task=port port.model=HunyuanVideo15Transformer3DModel
    python run.py task=port port.model=FluxPipeline
    python run.py task=port port.model=/path/to/a/checkpoint

Each component is built small, run once on the CPU and traced (port_trace.py); then JAX traces it through torchax. The
report names what does not lower, what lowers badly and what would widen activations, each with its line in the library
and a remedy; which blocks repeat, what attends to what, what a forward pass costs, and how the weights can be sharded.
port_files.py writes a family's folder, configs and a parity test. docs/porting.md describes the whole path.
"""
import dataclasses
import json
import linecache
import logging
import math
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch

from wan_torchax import private
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import nearest
from wan_torchax.models.family import import_module
from wan_torchax.patches import call_function, torchax, torchax_on
from wan_torchax.tasks import port_files
from wan_torchax.tasks.port_trace import (
    LIBRARIES,
    Call,
    Small,
    Trace,
    component_classes,
    on_meta,
    run,
    settings_of,
)

log = logging.getLogger("wan")
REMEDIES = {
    "branch on a value": "decide it in Python from the config or pipeline, or compute both and select with jnp.where",
    "shape depends on values": "keep the whole length: valid tokens first (stable argsort of the mask), and a count",
    "loop over tokens": "one array operation; as it stands the program grows with the video",
    "tokens x tokens": "a count of valid keys, or a comparison inside attention, in place of an array of that size",
    "widens activations": "cast to the activations' dtype here: JAX promotes where torch would refuse",
    "float64": "JAX has none by default and computes in float32: make the table in numpy, in float64, and pass it in",
    "gather or scatter": "a slice, reshape, jnp.pad(mode='edge') or one-hot product; gathers are slow on a TPU",
    "table made while running": "constant for one shape: XLA folds it, or make it in numpy once",
    "no lowering": "an entry in conf/ops with an implementation in patches.py",
}
SLOW = re.compile(r"index|gather|scatter|index_select|take|replication_pad\w*|index_put_?")


@dataclass(frozen=True)
class Finding:
    kind: str
    where: str  # file:line in the library
    source: str  # that line
    note: str = ""

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]


@dataclass(frozen=True)
class Rule:
    """A proposed row of conf/family/<family>.yaml."""

    name: str
    pattern: str
    axes: list[str | None]
    note: str = ""


@dataclass(frozen=True)
class Stack:
    name: str
    blocks: int
    others: int  # blocks behind them that differ
    parameters: int  # of the blocks that are alike


@dataclass(frozen=True)
class Report:
    """What was found in one method of one component."""

    component: str
    kind: type
    entry: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    parameters: int
    stacks: list[Stack]
    findings: list[Finding]
    attention: list[str]
    rules: list[Rule]
    tflops: float | None
    traces: str  # "yes", or the first error under torchax


def port(config, folder: Path, overrides=()) -> None:
    """Trace, report, write: port.json, port.md and the files of a family."""
    import_module("diffusers")
    reports = [
        examine(component, kind, entry, given, config)
        for component, (kind, given) in components(config.port.model).items()
        for entry in entries(kind)
    ]
    text = "\n".join(map(markdown, reports))
    written = port_files.write(folder, config.port.model, reports)
    (folder / "port.md").write_text(text)
    (folder / "port.json").write_text(json.dumps([as_json(report) for report in reports], indent=2) + "\n")
    print(text)
    print("\n".join(str(path) for path in (folder / "port.md", folder / "port.json", *written)))


# ---------------------------------------------------------------- which classes


def components(model: str) -> dict[str, tuple[type, Mapping[str, Any]]]:
    """Models by name, with what their config.json says: of a class of diffusers, a pipeline of it, or a folder."""
    import diffusers

    place = Path(model).expanduser()
    if place.is_dir():
        return in_folder(place)
    kind = getattr(diffusers, model, None)
    if not isinstance(kind, type):
        close = nearest(model, dir(diffusers))
        raise ConfigError(f"port.model={model}: neither a folder nor a class of diffusers; {close}")
    if issubclass(kind, torch.nn.Module):
        return {port_files.component_name(kind): (kind, {})}
    found = {name: one for name, one in component_classes(kind).items() if one.__module__.startswith("diffusers")}
    if not found:
        raise ConfigError(f"port.model={model}: neither a model nor a pipeline with models")
    return {name: (one, {}) for name, one in found.items()}


def in_folder(place: Path) -> dict[str, tuple[type, Mapping[str, Any]]]:
    """The models of a checkpoint in diffusers' layout, or of one component's folder; only diffusers' own classes."""
    import diffusers

    below = sorted(path.parent for path in place.glob("*/config.json"))
    folders = [place] if (place / "config.json").exists() else below
    found = {}
    for one in folders:
        stored = json.loads((one / "config.json").read_text())
        kind = getattr(diffusers, str(stored.get("_class_name")), None)
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
            found[one.name] = kind, {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
    if not found:
        raise ConfigError(f"port.model={place}: no config.json of a diffusers model in it or one folder below")
    return found


def entries(kind: type) -> list[str]:
    """The methods that a runner calls: forward, or those of an autoencoder."""
    return ["decode", "encode"] if hasattr(kind, "decode") else ["forward"]


# ---------------------------------------------------------------- what was found


def examine(component: str, kind: type, entry: str, given: Mapping[str, Any], config) -> Report:
    log.info("%s.%s: a small one is run and traced", kind.__name__, entry)
    try:
        small, inputs, trace, larger = run(kind, given, entry)
    except ValueError as error:
        raise ConfigError(f"port.model={config.port.model}: {error}") from error
    settings = settings_of(kind, given)
    whole = on_meta(kind, settings)
    stacks = list(repeated(whole))
    return Report(
        component, kind, entry, settings, {name: shape_of(value) for name, value in inputs.items()},
        sum(tensor.numel() for tensor in whole.parameters()), stacks,
        [*findings(trace, larger), *unlowered(trace)], sorted({in_words(one) for one in trace.attentions}),
        list(rules(trace.calls, whole, config)),
        tflops(whole, trace, larger, stacks, config.port) if larger and trace.calls and stacks else None,
        traced(small, entry, inputs),
    )


def findings(trace: Trace, larger: Trace | None) -> Iterator[Finding]:
    """One a line and kind, in the order of the run."""
    widened = [where for where, site in trace.sites.items() if site.promoted]
    for where, site in trace.sites.items():
        bigger = larger.sites.get(where) if larger else None
        names = {op.overloadpacket.__name__ for op in site.ops}
        grown = bigger and largest(bigger) > 3 * largest(site) > 3 * 24**2
        looped = bigger and bigger.ops.total() >= 1.5 * site.ops.total() and bigger.ops.total() - site.ops.total() > 8
        counts = f"{site.ops.total()} ops, {bigger.ops.total()} at twice the height" if bigger else ""
        slow = sorted(name for name in names if SLOW.fullmatch(name))
        kinds = {
            "branch on a value": (site.branches, ""),
            "shape depends on values": (site.dynamic, ""),
            "loop over tokens": (looped, counts),
            "tokens x tokens": (grown, f"{max(site.shapes, key=math.prod)}" if grown else ""),
            "widens activations": (where in widened[:1], f"and {len(widened) - 1} later lines compute in float32"),
            "float64": (site.doubles, ""),
            "gather or scatter": (slow and not site.dynamic, ", ".join(slow)),
            "table made while running": (site.tables, ""),
        }
        for kind, (present, note) in kinds.items():
            if present:
                yield finding(kind, where, note)


def largest(site) -> int:
    return max(map(math.prod, site.shapes), default=0)


def finding(kind: str, where: str, note: str = "") -> Finding:
    file, _, line = where.rpartition(":")
    return Finding(kind, short(where), linecache.getline(file, int(line or 0)).strip(), note)


def short(where: str) -> str:
    """A line's place from its library on."""
    parts = Path(where).parts
    names = [Path(library).name for library in LIBRARIES]
    start = next((number for number, part in enumerate(parts) if part in names), 0)
    return "/".join(parts[start:])


def unlowered(trace: Trace) -> Iterator[Finding]:
    """Ops that torchax does not know, once each."""
    environment, seen = torchax.default_env(), set()
    for where, site in trace.sites.items():
        for op in site.ops:
            if op not in seen and not private.has_lowering(environment, op):
                yield finding("no lowering", where, str(op))
            seen.add(op)


def traced(small: Small, entry: str, inputs: Mapping[str, Any]) -> str:
    """Whether JAX traces the method as it stands, or what stops it first."""
    shapes = jax.tree.map(as_shape, dict(inputs))
    stored = [*small.module.named_parameters(), *small.module.named_buffers()]
    arrays = {name: as_shape(tensor) for name, tensor in stored}
    constants = {name: value for name, value in shapes.items() if not jax.tree.leaves(value) or is_constant(value)}
    arguments = {name: value for name, value in shapes.items() if name not in constants}

    def method(module, arguments):
        return values_of(getattr(module, entry)(**arguments, **constants))

    def call(arrays, arguments):
        return jax.tree.leaves(call_function(method, small.module, arrays, arguments))

    try:
        with torchax_on():
            jax.eval_shape(call, arrays, arguments)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(LIBRARIES)]
        place = short(f"{frames[-1].filename}:{frames[-1].lineno}") if frames else "?"
        return f"no: {type(error).__name__} at {place}"
    return "yes"


def values_of(output: Any) -> Any:
    """The tensors of a model's output."""
    if hasattr(output, "latent_dist"):
        return output.latent_dist.mode()
    return output.to_tuple() if hasattr(output, "to_tuple") else output


def is_constant(value: Any) -> bool:
    return all(isinstance(leaf, (int, float)) for leaf in jax.tree.leaves(value))


def as_shape(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return jax.ShapeDtypeStruct(tuple(value.shape), str(value.dtype).removeprefix("torch.").replace("int64", "int32"))


def shape_of(value: Any) -> str:
    return str(jax.tree.map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, value))


def in_words(attention) -> str:
    mask = "no mask" if attention.mask is None else f"mask {attention.mask}"
    mask = "causal" if attention.causal else mask
    return f"{short(attention.where)}: query {attention.query}, {attention.keys} keys, {mask}"


# ---------------------------------------------------------------- repeated blocks, weights, cost


def repeated(module: torch.nn.Module) -> Iterator[Stack]:
    """Lists of blocks that begin with several of the same parameters: those can run in a loop over stacked weights."""
    for name, blocks in module.named_modules():
        if isinstance(blocks, torch.nn.ModuleList) and not re.search(r"\.\d+\.", f"{name}."):
            shapes = [{key: tuple(tensor.shape) for key, tensor in block.named_parameters()} for block in blocks]
            alike = next((number for number, one in enumerate(shapes) if one != shapes[0]), len(shapes))
            if alike > 1 and shapes[0]:
                yield Stack(name, alike, len(blocks) - alike, alike * sum(map(math.prod, shapes[0].values())))


def rules(calls: list[Call], whole: torch.nn.Module, config) -> Iterator[Rule]:
    """Column and row pairs: layers whose outputs feed another's inputs with nothing between that mixes channels."""
    by_name = {call.name: call for call in calls}
    pairs: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in by_name.values():
        if call.sources and call.block.endswith(".0"):
            pairs[call.block, "heads" if call.attended else "mlp"].append(call)
    for (block, axis), rows in pairs.items():
        columns = {name for row in rows for name in row.sources}
        start = re.escape(block.removesuffix(".0")) + r"\.\d+\."
        label = re.sub(r"\W+", "_", block.removesuffix(".0"))
        first, second = (
            "|".join(sorted(re.escape(name.removeprefix(f"{block}.")) for name in names))
            for names in (columns, [row.name for row in rows])
        )
        notes = [*pieces(rows, by_name), *indivisible(columns, whole, config)]
        yield Rule(f"{label}_{axis}_in", rf"{start}({first})\.(weight|bias)", [axis], "; ".join(notes))
        yield Rule(f"{label}_{axis}_out", rf"{start}({second})\.weight", [None, axis])


def pieces(rows: list[Call], by_name: Mapping[str, Call]) -> Iterator[str]:
    """Layers whose input is not one output of the layers before, but parts of several or a half of one."""
    for row in rows:
        widths = sorted({by_name[name].outputs for name in row.sources})
        if row.inputs not in widths:
            yield f"{row.name} takes {row.inputs} channels made of {widths}: cut each piece alike"


def indivisible(columns: set[str], whole: torch.nn.Module, config) -> Iterator[str]:
    """Outputs that the mesh's tp axis does not divide."""
    ways = config.mesh.axes.get("tp") or 1
    for name in sorted(columns):
        outputs = whole.get_submodule(name).out_features
        if outputs % ways:
            yield f"{name}: {outputs} outputs, which tp={ways} does not divide"


def tflops(whole: torch.nn.Module, trace: Trace, larger: Trace, stacks: list[Stack], sizes) -> float:
    """Of one forward pass of the real model for one prompt: linear layers of its blocks, and attention."""
    widths = {name: (layer.in_features, layer.out_features) for name, layer in whole.named_modules()
              if isinstance(layer, torch.nn.Linear)}
    blocks = {f"{stack.name}.0": stack.blocks for stack in stacks}

    def rows(small: int, large: int) -> int:
        """What a number of rows is in the real model, from how it grew with the video's tokens."""
        if small == large:
            return sizes.text_tokens if small > 1 else 1
        return sizes.tokens + (sizes.text_tokens if large != 2 * small else 0)

    total = 0.0
    for call, bigger in zip(trace.calls, larger.calls):
        if call.block in blocks:
            total += blocks[call.block] * 2 * math.prod(widths[call.name]) * rows(call.rows, bigger.rows)
    for one, bigger in zip(trace.attentions, larger.attentions):
        out = next((call for call in trace.calls[one.before :] if call.attended), None)
        if out is not None and out.block in blocks:
            queries, keys = rows(one.query[-2], bigger.query[-2]), rows(one.keys, bigger.keys)
            heads = one.query[-3] * one.query[-1] / out.outputs  # the attention's width, of the tokens' width
            total += blocks[out.block] * 4 * queries * keys * heads * widths[out.name][1]
    return total / 1e12


# ---------------------------------------------------------------- the report


def markdown(report: Report) -> str:
    lines = [f"## {report.component}: {report.kind.__name__}.{report.entry}", ""]
    lines.append(f"- {report.parameters:,} parameters ({2 * report.parameters / 2**30:.1f} GiB in bfloat16)")
    for stack in report.stacks:
        others = f"; {stack.others} behind them differ" if stack.others else ""
        lines.append(f"- {stack.blocks} x {stack.name}: {stack.parameters:,} parameters, one loop{others}")
    if report.tflops:
        lines.append(f"- {report.tflops:,.1f} TFLOP a forward pass at port.tokens and port.text_tokens")
    lines.append(f"- traced through torchax as it stands: {report.traces}")
    lines += [f"- attention at {one}" for one in report.attention]
    if report.rules:
        lines += ["", "| proposed rule | pattern | axes | |", "|---|---|---|---|"]
        for rule in report.rules:
            pattern = rule.pattern.replace("|", "\\|")  # a bare one ends a table's cell
            lines.append(f"| {rule.name} | `{pattern}` | {rule.axes} | {rule.note} |")
    lines += ["", "| found | where | line | remedy |", "|---|---|---|---|"]
    for one in report.findings:
        source = one.source.replace("|", "\\|")
        lines.append(f"| {one.kind} {one.note} | {one.where} | `{source}` | {one.remedy} |")
    return "\n".join([*lines, ""])


def as_json(report: Report) -> dict[str, Any]:
    found = [dataclasses.asdict(one) | {"remedy": one.remedy} for one in report.findings]
    content = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    content |= {name: [dataclasses.asdict(one) for one in content[name]] for name in ("stacks", "rules")}
    return content | {"kind": report.kind.__name__, "findings": found}
