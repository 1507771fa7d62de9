"""A denoising step: seconds by part, from a profile, and memory; beside an estimate (task=plan) if there is one.

Weights are random. What differs from the estimate by more than DIFFERENT is named, with the likely reason and what to
try.
"""
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from wan_torchax.config.geometry import device_count
from wan_torchax.config.resolve import Resolved
from wan_torchax.config.schema import ConfigError
from wan_torchax.records.report import read_json
from wan_torchax.runtime.weights import gib
from wan_torchax.stages.stage import find, main_stage
from wan_torchax.tasks import compiler
from wan_torchax.tasks.doctor import Finding
from wan_torchax.tasks.tune import compiled_step, median_seconds
from wan_torchax.tasks.verify.profile import by_part

DIFFERENT = 0.15
NOTICED = 0.01  # of the step: smaller differences are not worth a word
UNKNOWN = 0.8  # of the step without an op: then the profile lacks them
REST, WAIT = "rest", "wait"
# Parts of a plan, and of a family's `groups`, that make up a part here; what is in none is the rest.
PARTS = {
    "attention": r"attention|(self|cross)-attention kernel",
    "linear layers": r"projections|feed-forward|product kernel.*|products' waits for memory",
    "norms": r"norms|rope",
    "communication": r"communication",
    WAIT: r"kernels' launches",
}
REASONS = {  # the likely reason, and what to try
    "attention": (
        "the kernel's blocks do not fit this chip or shape, or rows left its range (attention_rescued in metrics.json)",
        "task=tune for other blocks; attention=xla or attention=cudnn to compare",
    ),
    "linear layers": ("they wait for memory, or the clock is lower", "products=xla, or products=pallas if it is xla"),
    "norms": ("memory is slower than conf/chip says: see its figure", "products=xla, or products=pallas if it is xla"),
    "communication": (
        "links are slower than conf/chip says, or computing does not overlap them as compiled",
        "another sharding or other mesh.axes; task=plan -m compares them",
    ),
    REST: ("XLA's own ops: its estimate is rough", "other versions of JAX and libtpu; compile.libtpu_flags"),
    WAIT: ("launches, or the host: another program may use its cores", "an idle host; profile=true shows the gaps"),
}


def check(resolved: Resolved, folder: Path, report: dict) -> Iterator[Finding]:
    """Time and profile the step; compare its parts and its memory with the estimate's."""
    compiled, call = compiled_step(resolved)
    seconds = median_seconds(call, resolved.config.verify.repeats)
    parts, whole = profiled(call, compiled.as_text(), resolved.family.groups)
    plan = read_plan(resolved.config)
    if plan and plan_differs(plan, resolved):
        yield Finding("step", "note", f"verify.plan is for another run ({plan_differs(plan, resolved)}): not compared",
                      "python run.py task=plan with the same overrides")
        plan = None
    planned = planned_parts(plan) if plan else {}
    report["step"] = {
        "seconds": seconds, "profiled_seconds": whole, "floor_seconds": floor_seconds(resolved),
        "planned_seconds": plan and plan["estimate"]["seconds_per_step"],
        "parts": {
            part: {"seconds": parts.get(part, 0.0), "planned": planned.get(part)}
            for part in (*PARTS, REST) if part in parts or part in planned
        },
        "memory": memory(resolved, compiled, plan),
    }
    main = ", ".join(f"{part} {taken / whole:.0%}" for part, taken in sorted(parts.items(), key=lambda item: -item[1]))
    yield Finding("step", "ok", f"{seconds:.3f} s: {main}")
    if parts[WAIT] > UNKNOWN * whole:
        what = f"the profile shows ops for {1 - parts[WAIT] / whole:.0%} of the step only: its parts are not known"
        yield Finding("step", "note", what, "on a GPU 'compile.xla_flags=[--xla_gpu_enable_command_buffer=]'")
    elif plan:
        yield from differences(report["step"])
    else:
        remedy = "python run.py task=plan with the same overrides, then verify.plan=<its plan.json>"
        yield Finding("step", "ok", "no estimate to compare with", remedy)
    yield from memory_differences(report["step"]["memory"])


# ---------------------------------------------------------------- measured


def profiled(call, text: str, groups: Mapping[str, str]) -> tuple[dict[str, float], float]:
    """Seconds of one call by part, and of the whole; what no op runs in is the wait."""
    with tempfile.TemporaryDirectory() as scratch:
        with jax.profiler.trace(scratch):
            began = time.perf_counter()
            jax.block_until_ready(call())
            whole = time.perf_counter() - began
        parts = by_part(Path(scratch), text, lambda kind, name: part_of(kind, name, groups))
    return parts | {WAIT: parts.get(WAIT, 0.0) + max(whole - sum(parts.values()), 0.0)}, whole


def part_of(kind: str, name: str, groups: Mapping[str, str]) -> str:
    """The part that an op of the compiled program belongs to; a library's kernel is named after its group."""
    if kind == "kernel":
        return in_parts(name)
    if kind.removesuffix("-start").removesuffix("-done") in compiler.COLLECTIVES:
        return "communication"
    return in_parts(next((group for group, pattern in groups.items() if re.search(pattern, f"{name}/")), REST))


def in_parts(name: str) -> str:
    return next((part for part, pattern in PARTS.items() if re.fullmatch(pattern, name)), REST)


def floor_seconds(resolved: Resolved) -> float | None:
    """Seconds at 100 % of peak; None if conf/chip has no peak for this device."""
    return find(main_stage(resolved.graph)).floor_seconds(resolved)


def memory(resolved: Resolved, compiled, plan: dict | None) -> dict[str, dict]:
    """GiB of a device: what XLA reserves for the step, and what the device says it had in use at most."""
    analysis = compiled.memory_analysis()
    row = plan["memory"][plan["main_stage"]] if plan else {}
    beside = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    rows = {
        "weights and inputs": {"gib": gib(analysis.argument_size_in_bytes), "planned": row.get("weights_gib")},
        "temporaries, results and code": {
            "gib": gib(beside + analysis.generated_code_size_in_bytes), "planned": row.get("temporaries_gib"),
        },
    }
    used = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in resolved.mesh.devices.flat]
    if all(used):
        rows["in use at most, all checks"] = {"gib": gib(max(used)), "planned": row.get("total_gib")}
    return rows


# ---------------------------------------------------------------- against the estimate


def read_plan(config) -> dict | None:
    """The plan.json that verify.plan names."""
    if config.verify.plan is None:
        return None
    plan = read_json(Path(config.verify.plan))
    if not {"estimate", "memory", "axes", "tokens"} <= plan.keys():
        raise ConfigError(f"verify.plan={config.verify.plan}: not a plan; give the plan.json that task=plan wrote")
    if not plan["estimate"]:
        remedy = "task=plan needs libtpu for it (plan.compiler)"
        raise ConfigError(f"verify.plan={config.verify.plan}: has no estimate of the step's parts; {remedy}")
    return plan


def plan_differs(plan: dict, resolved: Resolved) -> str:
    """What a plan was made for, where that is not this run."""
    here = {
        "model": resolved.config.model.name, "tokens": resolved.tokens, "guidance": resolved.config.guidance,
        "chips": device_count(resolved.config.mesh), "axes": dict(resolved.placement["axes"]),
        "sharding": resolved.config.sharding.name,
    }
    return ", ".join(f"{key}={plan.get(key)}" for key, value in here.items() if plan.get(key) != value)


def planned_parts(plan: dict) -> dict[str, float]:
    """The likely seconds of a plan, by the parts of this page."""
    parts: dict[str, float] = {}
    for name, seconds in plan["estimate"]["parts"]["likely"].items():
        parts[in_parts(name)] = parts.get(in_parts(name), 0.0) + seconds
    return parts


def differences(step: dict) -> Iterator[Finding]:
    """Parts that take other than planned, the largest difference first."""
    def extra(part):
        return step["parts"][part]["seconds"] - (step["parts"][part]["planned"] or 0.0)

    for part in sorted(step["parts"], key=lambda part: -abs(extra(part))):
        seconds, planned = (step["parts"][part][key] or 0.0 for key in ("seconds", "planned"))
        if abs(extra(part)) <= DIFFERENT * planned or abs(extra(part)) < NOTICED * step["profiled_seconds"]:
            continue
        reason, remedy = REASONS[part]
        what = f"{part}: {seconds:.3f} s, planned {planned:.3f}"
        if extra(part) > 0:
            yield Finding("slow", "note", f"{what}; likely {reason}", remedy)
        else:
            yield Finding("step", "ok", f"{what}: faster than the estimate, which assumes too much")


def memory_differences(rows: dict[str, dict]) -> Iterator[Finding]:
    for name, row in rows.items():
        if row["planned"] and row["gib"] > (1 + DIFFERENT) * row["planned"]:
            remedy = "guidance=sequential halves activations; other versions of JAX and libtpu"
            yield Finding("memory", "note", f"{name}: {row['gib']:.2f} GiB, planned {row['planned']:.2f}", remedy)
