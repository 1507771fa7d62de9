"""task=plan: does it fit, how fast will it be? For TPUs and GPUs that are not here; no weights, no accelerator.

    python run.py task=plan model=wan21_t2v_14b resolution=720p mesh=v6e_8
    python run.py -m task=plan model=wan21_t2v_14b resolution=720p mesh=v6e_8 sharding=tp,sequence …
    python run.py task=plan preset=t2v_14b_720p_v6e8_v1 stages=[denoise]        # only this stage is compiled

Counted here: parameters, bytes by rule, FLOPs, the time floor; communication as XLA partitions the program for as
many fake CPU devices. With libtpu (in this environment, or through the command in `plan.compiler`) also what the
TPU's own compiler says: HBM, cycles by group of ops, code size. Writes plan.json, plan.md and plan.png. Everything
estimated is called so.
"""
import importlib.util
import json
import logging
import math
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
from omegaconf import OmegaConf
from PIL import Image, ImageDraw, ImageFont

from wan_torchax.config import schema
from wan_torchax.runtime import weights
from wan_torchax.stages import denoise as stages
from wan_torchax.tasks import compiler

log = logging.getLogger("wan")
# The part of the program an op belongs to, by the names its scopes have; the first that matches counts.
GROUPS = {
    "rope": r"/rope/",
    "norms": r"/(norm\w*)/",
    "projections": r"/attn[12]/(to_\w+|0/linear)",
    "feed-forward": r"/ffn/",
    "attention": r"/attend/",
    "embeddings": r"/(patch_embedding|condition_embedder|proj_out)/",
}
COLOURS = {"self-attention kernel": "#2f6690", "cross-attention kernel": "#7aa6c2", "feed-forward": "#f2a65a", "projections": "#d1495b", "norms": "#81b29a",
           "rope": "#b5838d", "attention": "#577590", "communication": "#6d597a", "embeddings": "#bdbdbd", "modulation and rest": "#888888"}


def make(config, mesh, folder: Path) -> dict:
    """The whole plan of one configuration, written into the folder; `mesh` is abstract."""
    chips = math.prod(mesh.shape.values())
    report = {"model": config.model.name, "mesh": config.mesh.name, "axes": dict(mesh.shape), "chips": chips, "sharding": config.sharding.name,
              "resolution": [config.resolution.width, config.resolution.height, config.resolution.frames], "guidance": config.guidance}
    with jax.sharding.use_abstract_mesh(mesh):
        built = {name: stages.BUILDERS[name](outlined(config), mesh) for name in schema.STAGES}
    report["components"] = {stage.component: component_bytes(stage) for stage in built.values()}
    report |= arithmetic(config, chips)
    report["communication"] = communication(config, chips)
    report["compiler"] = {name: compile_stage(config, mesh, built[name]) for name in config.stages} if tpu_compiler(config) else None
    report["memory"] = memory(config, report)
    report["fits"] = all(row["fits"] for row in report["memory"].values())
    report["estimate"] = estimate(config, report)
    report["why"] = why_not(config, report)
    (folder / "plan.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "plan.md").write_text(render(config, report))
    draw(folder / "plan.png", report)
    return report


# ---------------------------------------------------------------- counted


def component_bytes(stage) -> dict:
    """Parameters and bytes of one component, by sharding rule."""
    rules = {}
    for tensor in stage.tensors.values():
        row = rules.setdefault(tensor.rule, {"tensors": 0, "gib": 0.0, "gib_per_chip": 0.0})
        row["tensors"] += max(len(tensor.sources), 1)
        row["gib"] += weights.gib(tensor.bytes)
        row["gib_per_chip"] += weights.gib(tensor.bytes_per_device)
    parameters = sum(math.prod(tensor.shape) for tensor in stage.tensors.values() if tensor.sources)
    totals = {key: sum(row[key] for row in rules.values()) for key in ("gib", "gib_per_chip")}
    return {"parameters": parameters, **totals, "rules": rules}


def arithmetic(config, chips) -> dict:
    """Tokens, FLOPs of a denoising step's forwards by kind, and the time floor at the chips' peak.

    Where the prompts share the first block's self-attention (patches.ScannedBlocks) the step does up to 1.5 % less.
    """
    transformer, text = config.model.architecture.transformer, config.model.text_tokens
    _, _, frames, height, width = stages.latent_shape(config)
    patch = math.prod(transformer.patch_size)
    tokens = frames * height * width // patch
    dim, layers = transformer.num_attention_heads * transformer.attention_head_dim, transformer.num_layers
    forwards = 2 if stages.guided(config) else 1
    flops = {
        "projections": layers * (2 * tokens * dim * dim * 6 + 2 * text * dim * dim * 2),  # q, k, v, out and q, out; k, v of the text
        "feed-forward": layers * 4 * tokens * dim * transformer.ffn_dim,
        "self-attention": layers * 4 * tokens * tokens * dim,
        "cross-attention": layers * 4 * tokens * text * dim,
    }
    flops = {name: count * forwards for name, count in flops.items()}
    total, peak = sum(flops.values()), config.mesh.chip.peak_tflops
    floor = peak and total / (chips * peak * 1e12)
    return {"tokens": tokens, "forwards": forwards, "flops_per_step": flops | {"total": total}, "floor_seconds_per_step": floor}


def communication(config, chips) -> dict:
    """What a step communicates, as XLA partitions it for as many fake CPU devices, with the same tables."""
    local = config.copy()
    for part in ("self", "cross"):  # kernels work on one chip; which one does not change what travels
        OmegaConf.update(local, f"attention.{part}.kernel", "xla")
    # The CPU backend widens some bfloat16 collectives and not others: everything in float32, counted at the real width.
    width = jax.numpy.dtype(config.model.dtype.transformer).itemsize / 4
    OmegaConf.update(local, "model.dtype.transformer", "float32")
    devices = jax.devices("cpu")
    if len(devices) < chips:
        return {"source": f"not counted: needs {chips} fake CPU devices, this process has {len(devices)}", "rows": []}
    axes = dict(config.mesh.axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes), devices=devices[:chips])
    text = stages.lower(stages.build_denoise(local, mesh))["step"].compile().as_text()
    rows = [row | {"bytes": row["bytes"] * width} for row in compiler.collectives(text, axes) if row["axis"] != "none"]
    rows = [row | {"host_bytes": from_other_hosts(row, axes, config.mesh.hosts or 1)} for row in rows]
    return {"source": "XLA's partitioner, CPU backend", "rows": rows}


def from_other_hosts(row, axes, hosts) -> float:
    """Of a collective's bytes, those that one host receives from others, with devices in the order of distributed.arrange.

    A ring (sums, gathers, permutes) enters each host it runs through by one chip; in an all-to-all every chip hears
    from every other.
    """
    chips_a_host = math.prod(axes.values()) // hosts
    group = compiler.devices_along(axes, row["axis"].split("+"))
    inside = sum(device < chips_a_host for device in group)
    share = 1 - inside / len(group) if row["kind"] == "all-to-all" or inside == len(group) else 1 / inside
    return chips_a_host * row["bytes"] * share


# ---------------------------------------------------------------- compiled


def tpu_compiler(config) -> list[str] | None:
    """The command of a Python that has libtpu; None if there is none, or the plan is not for a TPU."""
    if config.mesh.platform != "tpu" or config.plan.compiler == "none":
        return None
    if config.plan.compiler is not None:
        return shlex.split(config.plan.compiler)
    return [sys.executable] if importlib.util.find_spec("libtpu") else None


def outlined(config):
    """The config with the Pallas attention kernels' bodies left out: they take minutes to compile and get no cycles."""
    local = config.copy()
    for part in ("self", "cross"):
        OmegaConf.update(local, f"attention.{part}.outline", True)
    return local


def compile_stage(config, mesh, stage) -> dict:
    """Export a stage's last program (the one that runs most) and have libtpu compile it for the mesh's topology."""
    with jax.sharding.use_abstract_mesh(mesh), tempfile.TemporaryDirectory() as scratch:
        lowered = stages.lower(stage, platforms=("tpu",))
        jitted, structs = stages.callable_of(stage, list(stage.programs)[-1], lowered)
        artifact = Path(scratch) / "program.bin"
        artifact.write_bytes(jax.export.export(jitted, platforms=["tpu"])(*structs).serialize())
        return call_compiler(config, mesh, artifact)


def call_compiler(config, mesh, artifact: Path) -> dict:
    answer = artifact.with_suffix(".json")
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    command = [*tpu_compiler(config), compiler.__file__, str(artifact), "--topology", config.mesh.chip.topology, "--mesh", axes, "--json", str(answer)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not answer.is_file():
        reason = ran.stderr.strip().splitlines()
        raise schema.ConfigError(f"plan.compiler: {' '.join(command[:2])} failed: {reason[-1] if reason else ran.returncode}")
    report = json.loads(answer.read_text())
    report["cycles_by_group"] = by_group(report.pop("ops"))
    return report


def by_group(rows) -> dict[str, int]:
    """Cycles by part of the model, loop bodies times their trips."""
    found = {}
    for row in rows:
        named = next((group for group, pattern in GROUPS.items() if re.search(pattern, row["name"] + "/")), "modulation and rest")
        found[named] = found.get(named, 0) + row["cycles"]
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# ---------------------------------------------------------------- judged


def memory(config, report) -> dict:
    """GiB per chip of each stage, and whether they fit: the compiler's figures, or an estimate of the temporaries."""
    limit = config.mesh.chip.hbm_gib
    rows = {}
    for name, component in schema.COMPONENTS.items():
        compiled = (report["compiler"] or {}).get(name)
        held = report["components"][component]["gib_per_chip"]
        if compiled:
            temporaries, source = weights.gib(compiled["temporary_bytes"] + compiled["output_bytes"] + compiled["code_bytes"]), "libtpu"
            held = weights.gib(compiled["argument_bytes"])
        else:
            temporaries, source = estimated_temporaries(config, report)[name], "estimate from shapes"
        total = held + temporaries
        rows[name] = {"weights_gib": held, "temporaries_gib": temporaries, "total_gib": total, "limit_gib": limit, "source": source,
                      "fits": limit is None or total + config.plan.margin_gib <= limit}
    return rows


def estimated_temporaries(config, report) -> dict[str, float]:
    """Activations alive at once, from shapes: the widest layer in bf16 beside a float32 residual and a few copies."""
    axes, transformer = report["axes"], config.model.architecture.transformer
    parallel = config.sharding.attention

    def size(axis):
        return axes.get(axis, 1) if axis else 1

    batch = report["forwards"] if config.guidance == "batched" else 1
    rows = math.ceil(batch / size(parallel.batch)) * report["tokens"] / (size(parallel.ulysses) * size(parallel.ring))
    dim = transformer.num_attention_heads * transformer.attention_head_dim
    width = transformer.ffn_dim / size(parallel.heads) * 2 + dim * (4 + 2 * 4)
    text = 4 * 64 * config.model.text_tokens**2 * 4
    pixels = config.resolution.height * config.resolution.width * 4 * config.model.architecture.vae.get("base_dim", 96) * 2 * 4 / report["chips"]
    return {"text": weights.gib(text), "denoise": weights.gib(rows * width), "decode": weights.gib(6 * pixels)}


def estimate(config, report) -> dict | None:
    """Seconds of a step: the compiler's cycles, and what it gives none for: Pallas kernels and communication."""
    compiled = (report["compiler"] or {}).get("denoise")
    if compiled is None:
        return None
    chip, flops = config.mesh.chip, report["flops_per_step"]
    per_chip = report["chips"] * chip.peak_tflops * 1e12
    parts = {group: cycles / (chip.clock_ghz * 1e9) for group, cycles in compiled["cycles_by_group"].items()}
    parts["self-attention kernel"] = flops["self-attention"] / per_chip / config.plan.self_attention_share
    parts["cross-attention kernel"] = flops["cross-attention"] / per_chip / config.plan.cross_attention_share
    parts["rope"] = parts.get("rope", 0) + rotary_seconds(config, report)
    parts["communication"] = sum(travel_seconds(row, report["axes"], chip.link_gbs * 1e9) for row in compiled["collectives"])
    raw = sum(parts.values())
    return {"seconds_per_step": raw * config.plan.correction, "uncorrected_seconds": raw, "correction": config.plan.correction, "parts": parts,
            "source": "libtpu's cycles at the chip's clock, attention kernels at their schedule's share of peak, communication at the links' speed "
                      "with nothing overlapped"}


def rotary_seconds(config, report) -> float:
    """RoPE's kernel reads and writes queries and keys once, and does nothing else that takes time."""
    transformer = config.model.architecture.transformer
    width = transformer.num_attention_heads * transformer.attention_head_dim
    moved = 2 * 2 * 2 * report["forwards"] * report["tokens"] * width * transformer.num_layers  # two arrays, both ways, two bytes
    return moved / report["chips"] / (config.mesh.chip.hbm_gbs * 1e9)


def travel_seconds(row, axes, link) -> float:
    """A collective's time on a ring of chips, both directions used; `link` is bytes a second of one link, one way.

    The bytes are of the result on one chip. An all-to-all's part for a chip n/4 links away on average crosses them all.
    """
    size = math.prod(axes.get(axis, 1) for axis in row["axis"].split("+"))
    share = {"all-gather": (size - 1) / size, "all-reduce": 2 * (size - 1) / size, "reduce-scatter": size - 1, "all-to-all": size / 4}
    return row["bytes"] * share.get(row["kind"], 1) / (2 * link)


def why_not(config, report) -> str:
    """In a few words: what a configuration loses by."""
    for name, row in report["memory"].items():
        if not row["fits"]:
            over = row["total_gib"] + config.plan.margin_gib - row["limit_gib"]
            return f"{name} does not fit, by {over:.1f} GiB a chip: {remedy(config, row)}"
    if report["estimate"]:
        parts = {name: seconds for name, seconds in report["estimate"]["parts"].items() if name != "self-attention kernel"}
        worst = max(parts, key=parts.get)
        return f"beside self-attention, most goes to {worst} ({parts[worst]:.2f} s)"
    sent = sum(row["bytes"] for row in report["communication"]["rows"])
    return f"communicates {sent / 1e9:.1f} GB a step and chip"


def remedy(config, row) -> str:
    if row["weights_gib"] > row["temporaries_gib"]:
        return "shard the weights over more chips (sharding=tp with a larger tp, or sharding=sequence), or use a larger mesh"
    if config.guidance == "batched" and config.mesh.axes.get(config.sharding.attention.batch or "", 1) < 2:
        return "guidance=sequential halves the activations; more chips over sp or tp divide them"
    return "more chips over sp or tp divide the activations; or a smaller resolution"


# ---------------------------------------------------------------- shown


def render(config, report) -> str:
    """The plan as Markdown, also what is printed."""
    flops, floor = report["flops_per_step"], report["floor_seconds_per_step"]
    width, height, frames = report["resolution"]
    axes = " x ".join(f"{axis}={size}" for axis, size in report["axes"].items())
    lines = [f"# {report['model']} at {width} x {height} x {frames} on {report['mesh']} ({axes}), sharding {report['sharding']}", ""]
    if report["estimate"]:
        told = report["estimate"]
        uncorrected = f"uncorrected {told['uncorrected_seconds']:.2f} s times {told['correction']}"
        lines.append(f"**Estimated step: {told['seconds_per_step']:.2f} s** ({uncorrected}; {told['source']}).")
    elif config.mesh.platform == "tpu":
        lines.append("No libtpu here, so no estimated step time: install jax[tpu] (x86_64 Linux), or name a Python that has it in plan.compiler.")
    verdict = "Fits" if report["fits"] else f"**Does not fit**: {report['why']};"
    lines += [f"{verdict} with a margin of {config.plan.margin_gib} GiB.", ""]
    lines += ["| stage | weights GiB/chip | temporaries GiB/chip | of GiB | fits | source |", "|---|---|---|---|---|---|"]
    for name, row in report["memory"].items():
        held = f"{row['weights_gib']:.2f} | {row['temporaries_gib']:.2f} | {row['limit_gib']}"
        lines.append(f"| {name} | {held} | {'yes' if row['fits'] else 'no'} | {row['source']} |")
    lines += ["", f"{report['tokens']:,} tokens, {report['forwards']} forwards a step, {flops['total'] / 1e12:,.0f} TFLOPs: "
              + ", ".join(f"{name} {count / flops['total']:.0%}" for name, count in flops.items() if name != "total") + "."]
    if floor:
        lines.append(f"Floor at 100 % of peak: {floor:.3f} s a step.")
    lines += ["", f"Communication a step and chip ({report['communication']['source']}):", ""]
    lines += ["| kind | axis | count | MB | MB into a host |", "|---|---|---|---|---|"]
    rows, hosts = report["communication"]["rows"], config.mesh.hosts or 1
    lines += [f"| {row['kind']} | {row['axis']} | {row['count']} | {row['bytes'] / 1e6:,.1f} | {row['host_bytes'] / 1e6:,.1f} |" for row in rows]
    if hosts > 1:
        lines += ["", f"Each of the {hosts} hosts receives {sum(row['host_bytes'] for row in rows) / 1e9:.1f} GB a step from the others."]
    if report["estimate"]:
        lines += ["", "| where a step's time goes (estimate) | s |", "|---|---|"]
        lines += [f"| {name} | {seconds:.3f} |" for name, seconds in sorted(report["estimate"]["parts"].items(), key=lambda item: -item[1])]
        compiled = report["compiler"]["denoise"]
        code, cycles = f"{compiled['code_bytes'] / 2**20:.0f} MiB of code", f"{compiled['cycles'] / 1e6:,.0f} M cycles outside kernels"
        lines += ["", f"libtpu compiled the step in {compiled['compile_seconds']:.0f} s: {code}, {cycles}."]
    lines += ["", "| component | rule | tensors | GiB | GiB/chip |", "|---|---|---|---|---|"]
    for component, row in report["components"].items():
        lines.append(f"| **{component}**, {row['parameters'] / 1e9:.2f} B | | | {row['gib']:.2f} | {row['gib_per_chip']:.2f} |")
        lines += [f"| | {rule} | {found['tensors']} | {found['gib']:.2f} | {found['gib_per_chip']:.2f} |" for rule, found in row["rules"].items()]
    return "\n".join(lines) + "\n"


def draw(path: Path, report) -> None:
    """Where a step's time goes as one stacked bar: the estimate's parts, or without libtpu the arithmetic's floor."""
    if report["estimate"]:
        parts, title = report["estimate"]["parts"], "estimated seconds of a step"
    else:
        flops, floor = report["flops_per_step"], report["floor_seconds_per_step"] or 0
        parts = {name.replace("self-attention", "self-attention kernel").replace("cross-attention", "cross-attention kernel"): floor * count / flops["total"]
                 for name, count in flops.items() if name != "total"}
        title = "seconds of a step at 100 % of peak"
    total = sum(parts.values()) or 1
    font, picture = ImageFont.load_default(18), Image.new("RGB", (1100, 120 + 30 * len(parts)), "white")
    pen, left = ImageDraw.Draw(picture), 20.0
    pen.text((20, 12), f"{report['model']} on {report['mesh']}, {report['sharding']}: {total:.3f} {title}", fill="black", font=font)
    for index, (name, seconds) in enumerate(sorted(parts.items(), key=lambda item: -item[1])):
        colour, width = COLOURS.get(name, "#888888"), 1060 * seconds / total
        pen.rectangle((left, 45, left + width, 90), fill=colour)
        left += width
        pen.rectangle((20, 108 + 30 * index, 38, 126 + 30 * index), fill=colour)
        pen.text((48, 105 + 30 * index), f"{name}: {seconds:.3f} s, {seconds / total:.0%}", fill="black", font=font)
    picture.save(path)


def compare(folder: Path) -> str:
    """The plans of a sweep, best first: those that fit by their estimate or floor, then those that do not."""
    plans = [(path.parent.name, json.loads(path.read_text())) for path in folder.glob("*/plan.json")]
    plans.sort(key=lambda item: (not item[1]["fits"], time_of(item[1])))
    lines = ["| job | mesh | sharding | axes | fits | step | GiB/chip | GB sent | why not better |", "|---|---|---|---|---|---|---|---|---|"]
    for name, report in plans:
        axes = " ".join(f"{axis}={size}" for axis, size in report["axes"].items())
        most = max(row["total_gib"] for row in report["memory"].values())
        sent = sum(row["bytes"] for row in report["communication"]["rows"]) / 1e9
        step = f"{time_of(report):.3f} s ({'estimate' if report['estimate'] else 'floor'})"
        fits = "yes" if report["fits"] else "no"
        lines.append(f"| {name} | {report['mesh']} | {report['sharding']} | {axes} | {fits} | {step} | {most:.1f} | {sent:.1f} | {report['why']} |")
    table = "\n".join(lines) + "\n"
    (folder / "plans.md").write_text(table)
    return table


def time_of(report) -> float:
    return report["estimate"]["seconds_per_step"] if report["estimate"] else report["floor_seconds_per_step"] or math.inf
