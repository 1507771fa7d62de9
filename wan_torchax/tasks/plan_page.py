"""A plan for people to read: plan.md, plan.png, and the table of a sweep."""
import json
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from wan_torchax.config.schema import ENDS
from wan_torchax.kernels.settings import Kernel
from wan_torchax.tasks import compiler

COLOURS = {
    "self-attention kernel": "#2f6690", "cross-attention kernel": "#7aa6c2", "feed-forward": "#f2a65a",
    "projections": "#d1495b", "norms": "#81b29a", "rope": "#b5838d", "attention": "#577590",
    "communication": "#6d597a", "products' waits for memory": "#e9c46a", "embeddings": "#bdbdbd",
    "modulation and rest": "#888888",
}


METHOD = (
    "Nobody has measured it: XLA's ops by its own cycle estimate, Pallas kernels by the bundles of their schedules and "
    "the bytes they move, communication at the links' speed, each times the factors of plan.low, plan.likely and "
    "plan.high."
)


def between(figures: dict[str, float], digits: str, unit: str = "") -> str:
    """The likely figure and its range: 2.95 s (2.80 to 3.30)."""
    likely, (low, high) = format(figures["likely"], digits), sorted((figures["low"], figures["high"]))
    low, high = format(low, digits), format(high, digits)
    return f"{likely}{unit}" if low == high else f"{likely}{unit} ({low} to {high})"


def render(config, report: dict) -> str:
    """The plan as Markdown; this is also what is printed."""
    flops, floor = report["flops_per_step"], report["floor_seconds_per_step"]
    width, height, frames = report["resolution"]
    axes = " x ".join(f"{axis}={size}" for axis, size in report["axes"].items())
    place = f"on {report['mesh']} ({axes}), sharding {report['sharding']}"
    lines = [f"# {report['model']} at {width} x {height} x {frames} {place}", ""]
    if report["estimate"]:
        lines.append(f"**Estimated step: {between(report['estimate']['seconds_per_step'], '.2f', ' s')}**. {METHOD}")
    elif config.mesh.platform == "tpu" and not report["compiler"]:
        remedy = "install jax[tpu] (x86_64 Linux), or name a Python that has it in plan.compiler"
        lines.append(f"No libtpu here, so no estimated step time: {remedy}.")
    whole = report["denoising"]
    if whole["seconds"] is not None:
        lines.append(f"**Estimated denoising of a video: {between(whole['seconds'], '.0f', ' s')}**; {whole['plan']}.")
    elif len(whole["steps"]) > 1:
        lines.append(f"Cache: {whole['plan']}.")
    if Kernel.of(config.attention.self).sparse.dense_above < 1:
        lines.append("Steps that attend to all keys (dense_above) take longer, and are counted like the others.")
    if report["frames_per_second"]:
        rates = between(report["frames_per_second"], ".1f")
        lines.append(f"**Estimated frames a second: {rates}**; it plays at {config.resolution.fps}.")
    if (coarse := report["stage_steps"].get("coarse")) is not None:
        lines.append(f"Before these, {coarse} steps at half height and width.")
    verdict = "Fits" if report["fits"] else f"**Does not fit**: {report['why']};"
    lines += [f"{verdict} with a margin of {config.plan.margin_gib} GiB.", ""]
    columns = "| stage | weights GiB/chip | temporaries GiB/chip | of GiB | fits | source |"
    lines += [columns, "|---|---|---|---|---|---|"]
    for name, row in report["memory"].items():
        sizes = f"{row['weights_gib']:.2f} | {row['temporaries_gib']:.2f} | {row['limit_gib']}"
        lines.append(f"| {name} | {sizes} | {'yes' if row['fits'] else 'no'} | {row['source']} |")
    shares = ", ".join(f"{name} {count / flops['total']:.0%}" for name, count in flops.items() if name != "total")
    several = f" of {report['videos']} at once" if report["videos"] > 1 else ""
    tokens, forwards = f"{report['tokens']:,} tokens", f"{report['forwards']} forwards a step{several}"
    work = f"{tokens}, {forwards}, {flops['total'] / 1e12:,.0f} TFLOPs"
    lines += ["", f"{work}: {shares}."]
    if floor:
        lines.append(f"Floor at 100 % of peak: {floor:.3f} s a step.")
    lines += ["", f"Communication a step and chip ({report['communication']['source']}):", ""]
    lines += ["| kind | axis | count | MB | MB into a host |", "|---|---|---|---|---|"]
    rows, hosts = report["communication"]["rows"], config.mesh.hosts or 1
    for row in rows:
        megabytes = f"{row['bytes'] / 1e6:,.1f} | {row['host_bytes'] / 1e6:,.1f}"
        lines.append(f"| {row['kind']} | {row['axis']} | {row['count']} | {megabytes} |")
    if hosts > 1:
        received = sum(row["host_bytes"] for row in rows) / 1e9
        lines += ["", f"Each of the {hosts} hosts receives {received:.1f} GB a step from the others."]
    if report["estimate"]:
        parts = report["estimate"]["parts"]
        lines += ["", f"| where a step's time goes (estimate, s) | {' | '.join(ENDS)} |", "|---|---|---|---|"]
        for name in sorted(parts["likely"], key=lambda name: -parts["likely"][name]):
            lines.append(f"| {name} | {' | '.join(f'{parts[end][name]:.3f}' for end in ENDS)} |")
        compiled = report["compiler"][report["main_stage"]]
        code, cycles = compiled["code_bytes"] / 2**20, compiled["cycles"] / 1e6
        made = f"{code:.0f} MiB of code, {cycles:,.0f} M cycles outside kernels"
        lines += ["", f"libtpu compiled the step in {compiled['compile_seconds']:.0f} s: {made}."]
    if report["compiler"]:
        lines += vmem(config, report["compiler"])
        lines += whole_video(config, report)
    lines += ["", "| component | rule | tensors | GiB | GiB/chip |", "|---|---|---|---|---|"]
    for component, row in report["components"].items():
        title = f"**{component}**, {row['parameters'] / 1e9:.2f} B"
        lines.append(f"| {title} | | | {row['gib']:.2f} | {row['gib_per_chip']:.2f} |")
        for rule, part in row["rules"].items():
            lines.append(f"| | {rule} | {part['tensors']} | {part['gib']:.2f} | {part['gib_per_chip']:.2f} |")
    return "\n".join(lines) + "\n"


def vmem(config, compiled: dict[str, dict]) -> list[str]:
    """A table of the VMEM of each program's kernels. Of kernels without their bodies, only what they may use is known.
    """
    lines = ["", "| VMEM, MiB (libtpu) | used | may use | a core has |", "|---|---|---|---|"]
    for program, report in compiled.items():
        for name, row in report["vmem_bytes"].items():
            known = config.plan.kernels or name == compiler.XLA_OPS
            used = f"{row['used'] / 2**20:.1f}" if known else "plan.kernels=true tells"
            lines.append(f"| {program}: {name} | {used} | {row['limit'] / 2**20:.0f} | {config.mesh.chip.vmem_mib} |")
    return lines


def whole_video(config, report: dict) -> list[str]:
    """A table of a video's seconds, stage by stage."""
    known = {name: seconds for name, seconds in report["video"].items() if seconds is not None}
    shown = {name: between(known[name], ".2f") if name in known else "not compiled" for name in report["video"]}
    together = {end: sum(seconds[end] for seconds in known.values()) for end in ENDS}
    shown[f"together{' at least' if len(known) < len(shown) else ''}"] = between(together, ".1f")
    lines = ["", "| a whole video (estimate) | s |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in shown.items()]
    compiled = report["compiler"].values()
    took, cores = (sum(row[key] for row in compiled) for key in ("compile_seconds", "compile_core_seconds"))
    return [*lines, "", f"Disk at plan.disk_gbs={config.plan.disk_gbs}; nothing overlapped; without writing the file. "
            f"A first run compiles too, which took {took:.0f} s here, {cores:.0f} s of its cores."]


def draw(path: Path, report: dict) -> None:
    """A step's time as one stacked bar: the parts of the estimate, or without libtpu the floor at peak."""
    if report["estimate"]:
        parts, title = report["estimate"]["parts"]["likely"], "likely seconds of a step, an estimate"
    else:
        flops, floor = report["flops_per_step"], report["floor_seconds_per_step"] or 0
        kernels = ("self-attention", "cross-attention")
        names = {name: f"{name} kernel" if name in kernels else name for name in flops if name != "total"}
        parts = {shown: floor * flops[name] / flops["total"] for name, shown in names.items()}
        title = "seconds of a step at 100 % of peak"
    total = sum(parts.values()) or 1
    font, picture = ImageFont.load_default(18), Image.new("RGB", (1100, 120 + 30 * len(parts)), "white")
    pen, left = ImageDraw.Draw(picture), 20.0
    place = f"{report['model']} on {report['mesh']}, {report['sharding']}"
    pen.text((20, 12), f"{place}: {total:.3f} {title}", fill="black", font=font)
    for index, (name, seconds) in enumerate(sorted(parts.items(), key=lambda item: -item[1])):
        colour, width = COLOURS.get(name, "#888888"), 1060 * seconds / total
        pen.rectangle((left, 45, left + width, 90), fill=colour)
        left += width
        pen.rectangle((20, 108 + 30 * index, 38, 126 + 30 * index), fill=colour)
        pen.text((48, 105 + 30 * index), f"{name}: {seconds:.3f} s, {seconds / total:.0%}", fill="black", font=font)
    picture.save(path)


def compare(folder: Path) -> str:
    """The plans of a sweep, best first: those that fit, ordered by estimate or floor, then those that do not."""
    plans = [(path.parent.name, json.loads(path.read_text())) for path in folder.glob("*/plan.json")]
    plans.sort(key=lambda item: (not item[1]["fits"], time_of(item[1])))
    columns = ("job", "mesh", "sharding", "axes", "fits", "step", "GiB/chip", "GB sent", "why not better")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, report in plans:
        axes = " ".join(f"{axis}={size}" for axis, size in report["axes"].items())
        most = max(row["total_gib"] for row in report["memory"].values())
        sent = sum(row["bytes"] for row in report["communication"]["rows"]) / 1e9
        step = f"{time_of(report):.3f} s ({'estimate' if report['estimate'] else 'floor'})"
        fits = "yes" if report["fits"] else "no"
        place, sizes = (report["mesh"], report["sharding"], axes), (f"{most:.1f}", f"{sent:.1f}")
        lines.append(f"| {' | '.join((name, *place, fits, step, *sizes, report['why']))} |")
    table = "\n".join(lines) + "\n"
    (folder / "plans.md").write_text(table)
    return table


def time_of(report: dict) -> float:
    """Seconds of a step: the likely estimate, or without one the floor at peak."""
    if report["estimate"]:
        return report["estimate"]["seconds_per_step"]["likely"]
    return report["floor_seconds_per_step"] or math.inf
