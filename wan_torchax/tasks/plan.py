"""task=plan: does it fit, and how fast is it? For TPUs and GPUs that need not be here; no weights, no accelerator.

    python run.py task=plan model=wan21_t2v_14b resolution=720p mesh=v6e_8
    python run.py -m task=plan model=wan21_t2v_14b resolution=720p mesh=v6e_8 sharding=tp,sequence …
    python run.py task=plan preset=t2v_14b_720p_v6e8_v1 stages=[denoise]        # only this stage is compiled

Counted here: parameters, bytes by rule, FLOPs, the time floor; communication as XLA partitions the program for as many
fake CPU devices. With libtpu (in this environment, or through the command in `plan.compiler`), the TPU's own compiler
adds HBM, cycles by group of ops, and code size. Writes plan.json, plan.md and plan.png. Estimates are labelled as such;
their seconds are given three times, for the assumptions in `plan.low`, `plan.likely` and `plan.high`.
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
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import jax
from omegaconf import OmegaConf

from wan_torchax import interruption
from wan_torchax.config.geometry import device_count, prompt_count
from wan_torchax.config.jobs import read_seeds
from wan_torchax.config.live import Layout
from wan_torchax.config.resolve import Job, Resolved, resolve
from wan_torchax.config.schema import ENDS, ConfigError
from wan_torchax.devices.mesh import Described, Here
from wan_torchax.devices.start import use_fake_devices
from wan_torchax.kernels import product
from wan_torchax.kernels.settings import Products
from wan_torchax.records.store import Store
from wan_torchax.runtime.jobs import plan_job
from wan_torchax.runtime.weights import gib
from wan_torchax.session import Session
from wan_torchax.stages import caching
from wan_torchax.stages.stage import Stage, find, main_stage
from wan_torchax.tasks import compiler, plan_page

log = logging.getLogger("wan")
VERSIONS = "from importlib.metadata import version; print(*map(version, ('libtpu', 'jax', 'jaxlib')))"
PROMPT_ALONE = "a step with the prompt alone"
# Keys of a chip's file: shares of peak of linear layers, by the type of their weights, and of attention.
SHARES = {
    "bf16": "product_share", "s8": "int8_product_share", "f8e4m3fn": "fp8_product_share",
    "attention": "self_attention_share", "lists": "listed_attention_share",
}
THREE_PASSES = 1.5  # of a step with skip-layer guidance's third pass, in full steps
REUSED = 0.005  # upper bound for a step that skips its blocks, in full steps (measured: 0.0007 to 0.003)


def plan(config, folder: Path, overrides=()) -> float:
    """Write and print the plan of one configuration; returns the likely seconds per step."""
    use_fake_devices(config)
    report = make(config, folder)
    print((folder / "plan.md").read_text())
    return plan_page.time_of(report)


def describe(config) -> Resolved:
    """The configuration on chips that need not be here. A local checkpoint's config.json completes conf/model."""
    return resolve(job_of(outlined(config)), Described.by(config.mesh))


def job_of(config) -> Job:
    """The job to plan: with `images`, all of them at once."""
    job = plan_job(config)
    return job if config.images is None else replace(job, seeds=tuple(read_seeds(config)))


def outlined(config):
    """The config with the Pallas kernels' bodies left out: they take minutes to compile and get no cycle estimate. With
    `plan.kernels` they are compiled."""
    local = config.copy()
    for part in ("attention.self", "attention.cross", "products"):
        OmegaConf.update(local, f"{part}.outline", not config.plan.kernels)
    return local


def make(config, folder: Path) -> dict:
    """The whole plan, also written into the folder."""
    resolved = describe(config).segments()[0]
    size, chips, main = config.resolution, device_count(resolved.config.mesh), main_stage(resolved.graph)
    with jax.sharding.use_abstract_mesh(resolved.mesh):
        stages = Session().build(resolved, [*resolved.graph.stages, *working_helpers(resolved)])
    videos, floor = resolved.videos, find(main).floor_seconds(resolved)
    flops = {name: videos * count for name, count in find(main).flops(resolved).items()}
    report = {
        "model": config.model.name, "mesh": config.mesh.name, "axes": resolved.placement["axes"], "chips": chips,
        "sharding": config.sharding.name, "resolution": [size.width, size.height, size.frames],
        "guidance": config.guidance, "tokens": find(main).tokens(resolved), "forwards": prompt_count(config),
        "videos": videos,
        "components": components(stages),
        "flops_per_step": flops, "floor_seconds_per_step": floor and videos * floor,
        "communication": communication(config, chips),
        "compiler": None, "main_stage": main,
    }
    if tpu_compiler(config):
        report["compiler"] = {name: compile_stage(resolved, stages[name]) for name in config.stages}
        for name in working_helpers(resolved):
            report["compiler"][name] = compile_stage(resolved, stages[name], "first")  # of one frame
        if main in config.stages and "prompt" in stages[main].programs.entries:
            report["compiler"][PROMPT_ALONE] = compile_stage(resolved, stages[main], "prompt")
    report["memory"] = memory(resolved, stages, report)
    report["fits"] = all(row["fits"] for row in report["memory"].values())
    report["estimate"] = estimate(resolved, report)
    report["denoising"] = denoising(resolved, report)
    report["video"] = video(resolved, report)
    report["frames_per_second"] = frames_per_second(resolved, report) if main == "live" else None
    amounts = {name: find(name).amount(name, resolved) for name in resolved.graph.stages}
    report["stage_steps"] = {name: count for name, (count, unit) in amounts.items() if unit == "step"}
    report["why"] = why_not(config, report)
    (folder / "plan.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "plan.md").write_text(plan_page.render(config, report))
    plan_page.draw(folder / "plan.png", report)
    return report


# ---------------------------------------------------------------- counted


def components(stages: dict[str, Stage]) -> dict[str, dict]:
    """Parameters and bytes of the parts of each component that stages use, by sharding rule."""
    tensors: dict[str, dict] = {}
    for stage in stages.values():
        for component, part in stage.specs.items():
            tensors.setdefault(component, {}).update(part)
    return {component: component_bytes(part.values()) for component, part in tensors.items()}


def component_bytes(tensors) -> dict:
    rules = {}
    for tensor in tensors:
        row = rules.setdefault(tensor.rule, {"tensors": 0, "gib": 0.0, "gib_per_chip": 0.0})
        row["tensors"] += max(len(tensor.sources), 1)
        row["gib"] += gib(tensor.bytes)
        row["gib_per_chip"] += gib(tensor.bytes_per_device)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors if tensor.sources)
    totals = {key: sum(row[key] for row in rules.values()) for key in ("gib", "gib_per_chip")}
    return {"parameters": parameters, **totals, "rules": rules}


def communication(config, chips: int) -> dict:
    """A step's communication, as XLA partitions it for as many fake CPU devices with the same sharding tables."""
    local = config.copy()
    for part in ("self", "cross"):  # kernels run on one chip; the choice of kernel does not affect communication
        OmegaConf.update(local, f"attention.{part}.kernel", "xla")
    OmegaConf.update(local, "products.kernel", "xla")
    # The CPU backend widens some bfloat16 collectives but not others: use float32 for all, and count the real width.
    width = jax.numpy.dtype(config.model.dtype.transformer).itemsize / 4
    OmegaConf.update(local, "model.dtype.transformer", "float32")
    devices = jax.devices("cpu")
    if len(devices) < chips:
        return {"source": f"not counted: needs {chips} fake CPU devices, this process has {len(devices)}", "rows": []}
    resolved = resolve(job_of(local), Here(devices[:chips])).segments()[0]
    name = main_stage(resolved.graph)
    stage = Session().build(resolved, [name])[name]
    step = stage.programs.lower()[stage.usual_program].compile()
    axes = resolved.placement["axes"]
    sent = compiler.collectives(compiler.timeline(step.as_text(), axes))
    rows = [row for row in sent if row["axis"] != "none"]
    rows = [row | {"bytes": row["bytes"] * width} for row in rows]
    rows = [row | {"host_bytes": from_other_hosts(row, axes, config.mesh.hosts or 1)} for row in rows]
    return {"source": "XLA's partitioner, CPU backend", "rows": rows}


def from_other_hosts(row: dict, axes: dict[str, int], hosts: int) -> float:
    """The bytes of a collective that one host receives from others, with devices in distributed.arrange's order.

    A ring (sums, gathers, permutes) enters each host through one chip; in an all-to-all every chip receives from every
    other.
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


def compile_stage(resolved: Resolved, stage: Stage, program: str | None = None) -> dict:
    """Export a stage's program, by default the most frequent one, and compile it with libtpu for the mesh's topology.
    """
    interruption.check()
    program = program or stage.usual_program
    with jax.sharding.use_abstract_mesh(resolved.mesh), tempfile.TemporaryDirectory() as scratch:
        lowered = stage.programs.lower(platforms=("tpu",))
        jitted, structs = stage.programs.jitted(program, lowered)
        artifact = Path(scratch) / "program.bin"
        artifact.write_bytes(jax.export.export(jitted, platforms=["tpu"])(*structs).serialize())
        report = call_compiler(resolved.config, artifact, stage.programs.entries[program].donated)
        report["cycles_by_group"] = by_group(report.pop("ops"), resolved.family.groups)
        return report


def call_compiler(config, artifact: Path, donated: tuple[int, ...] = ()) -> dict:
    """libtpu's report on a program. Compiling takes minutes, so the report is cached in the store."""
    axes = ",".join(f"{axis}={size}" for axis, size in config.mesh.axes.items())
    place = ["--topology", config.mesh.chip.topology, "--mesh", axes]
    place += ["--donated", ",".join(map(str, donated))] if donated else []
    flags = [f"--libtpu-args={' '.join(config.compile.libtpu_flags)}"] if config.compile.libtpu_flags else []
    versions = ask_compiler(config, ["-c", VERSIONS]).split()
    store, made_from = Store.of(config), {"place": place + flags, "versions": versions}
    for name, path in {"program": artifact, "compiler": Path(compiler.__file__)}.items():
        made_from[name] = sha256(path.read_bytes()).hexdigest()
    entry = store and store.read("compiled", made_from)
    if entry:
        report = entry.about["report"]
    else:
        answer = artifact.with_suffix(".json")
        ask_compiler(config, [compiler.__file__, str(artifact), *place, *flags, "--json", str(answer)])
        report = json.loads(answer.read_text())
        if store:
            store.write("compiled", made_from, {"report": report}, {})
    return report


def ask_compiler(config, arguments: list[str]) -> str:
    command = [*tpu_compiler(config), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        reason = ran.stderr.strip().splitlines()
        shown = reason[-1] if reason else ran.returncode
        raise ConfigError(f"plan.compiler: {' '.join(command[:2])} failed: {shown}")
    return ran.stdout


def by_group(rows: list[dict], groups: Mapping[str, str]) -> dict[str, int]:
    """Cycles by part of the model, from the names of a family's ops; loop bodies times their trip counts."""
    cycles = {}
    for row in rows:
        matches = (group for group, pattern in groups.items() if re.search(pattern, row["name"] + "/"))
        group = next(matches, "modulation and rest")
        cycles[group] = cycles.get(group, 0) + row["cycles"]
    return dict(sorted(cycles.items(), key=lambda item: -item[1]))


# ---------------------------------------------------------------- judged


def memory(resolved: Resolved, stages: dict[str, Stage], report: dict) -> dict:
    """GiB per chip of each stage, and whether they fit: the compiler's figures, or an estimate of the temporaries."""
    limit, margin = resolved.config.mesh.chip.hbm_gib, resolved.config.plan.margin_gib
    rows = {}
    for name, stage in stages.items():
        compiled = (report["compiler"] or {}).get(name)
        if compiled:
            beside = compiled["temporary_bytes"] + compiled["output_bytes"] + compiled["code_bytes"]
            weights, temporaries, source = gib(compiled["argument_bytes"]), gib(beside), "libtpu"
        else:
            tensors = (tensor for part in stage.specs.values() for tensor in part.values())
            weights = gib(sum(tensor.bytes_per_device for tensor in tensors))
            temporaries, source = gib(stage.temporaries(resolved)), "estimate from shapes"
        total = weights + temporaries
        rows[name] = {
            "weights_gib": weights, "temporaries_gib": temporaries, "total_gib": total, "limit_gib": limit,
            "source": source, "fits": limit is None or total + margin <= limit,
        }
    return rows


def denoising(resolved: Resolved, report: dict) -> dict:
    """The number of steps of each kind in a video, and their seconds, if estimated."""
    work = find(main_stage(resolved.graph)).work(resolved)
    counts = {kind: work.count(kind) for kind in dict.fromkeys(work)}
    whole, alone = report["estimate"], estimate(resolved, report, PROMPT_ALONE, 0.5)
    seconds = {
        caching.FULL: whole and whole["seconds_per_step"],
        caching.SKIP: whole and {end: THREE_PASSES * whole["seconds_per_step"][end] for end in ENDS},
        caching.PROMPT: alone and alone["seconds_per_step"],
        caching.REUSE: whole and {end: REUSED * whole["seconds_per_step"][end] for end in ENDS},
    }
    known = all(seconds[kind] is not None for kind in counts)
    total = {end: sum(count * seconds[kind][end] for kind, count in counts.items()) for end in ENDS} if known else None
    return {"steps": counts, "seconds_each": {kind: seconds[kind] for kind in counts}, "seconds": total,
            "plan": caching.summary(work), "adaptive": resolved.config.cache.mode == "easycache"}


def video(resolved: Resolved, report: dict) -> dict[str, dict[str, float] | None]:
    """Seconds of each part of a video made in its own process; None for a stage that was not compiled."""
    weights = sum(row["gib"] for row in report["components"].values()) * 2**30
    compiled = report["compiler"] or {}
    parts = {"weights from disk": dict.fromkeys(ENDS, weights / (resolved.config.plan.disk_gbs * 1e9))}
    for name in resolved.graph.stages:
        seconds = steps_seconds if find(name).amount(name, resolved)[1] == "step" else run_seconds
        parts[name] = seconds(resolved, name, report) if name in compiled else None
    for name in working_helpers(resolved):
        chunks = Layout.of(resolved.config.live, resolved.latent_shape[2]).chunks
        once = run_seconds(resolved, name, report) if name in compiled else None
        parts[name] = once and {end: chunks * once[end] for end in ENDS}
    return parts | {main_stage(resolved.graph): report["denoising"]["seconds"]}


def working_helpers(resolved: Resolved) -> list[str]:
    """Helpers that run once for every chunk of a live video; not those that decode previews."""
    return [name for name, stage in resolved.graph.helpers.items() if stage.gives]


def frames_per_second(resolved: Resolved, report: dict) -> dict[str, float] | None:
    """Of a live video that goes on, where all its stages share the chips."""
    seconds = [one for name, one in report["video"].items() if name not in ("weights from disk", "text")]
    if None in seconds:
        return None
    return {end: resolved.config.resolution.frames / sum(one[end] for one in seconds) for end in ENDS}


def steps_seconds(resolved: Resolved, name: str, report: dict) -> dict[str, float]:
    """Seconds of a stage that denoises, every step computed in full."""
    stage, (count, _) = find(name), find(name).amount(name, resolved)
    seen = stage.seen(resolved)
    each = estimate(seen, report | {"flops_per_step": stage.flops(seen)}, name)["seconds_per_step"]  # of one video
    return {end: count * each[end] for end in ENDS}


def run_seconds(resolved: Resolved, name: str, report: dict) -> dict[str, float]:
    """Seconds of a stage other than denoising: its program as often as it runs; the first piece of a video counts like
    the later ones."""
    chip, (frames, _), compiled = resolved.config.mesh.chip, find(name).amount(name, resolved), report["compiler"][name]
    pieces = math.ceil(frames / resolved.geometry.frame_scale) if frames else 1
    seconds = {}
    for end in ENDS:
        assumed = resolved.config.plan[end]
        link = chip.link_gbs * 1e9 * assumed.link
        axes = resolved.placement["axes"]
        sent = sum(travel_seconds(row, axes, link, chip.devices) for row in compiled["collectives"])
        seconds[end] = pieces * (compiled["cycles"] * assumed.xla / (chip.clock_ghz * 1e9 * assumed.clock) + sent)
    return seconds


def estimate(resolved: Resolved, report: dict, program: str | None = None, share: float = 1.0) -> dict | None:
    """Seconds of a step: low, likely and high, and their parts. `share` is the program's share of a full step's FLOPs.
    """
    compiled = (report["compiler"] or {}).get(program or main_stage(resolved.graph))
    if compiled is None:
        return None
    parts = {end: step_parts(resolved, report, compiled, share, resolved.config.plan[end]) for end in ENDS}
    return {
        "seconds_per_step": {end: sum(parts[end].values()) for end in ENDS}, "parts": parts,
        "assumed": OmegaConf.to_container(OmegaConf.masked_copy(resolved.config.plan, list(ENDS))),
    }


def step_parts(resolved: Resolved, report: dict, compiled: dict, share: float, assumed) -> dict[str, float]:
    """Seconds of a step by part: XLA's ops by its own cycle estimate, and what that does not cover: Pallas kernels by
    the bundles of their schedules and the bytes they move, communication, and launch overhead."""
    config, flops = resolved.config, report["flops_per_step"]
    chip = config.mesh.chip
    clock, memory = chip.clock_ghz * 1e9 * assumed.clock, chip.hbm_gbs * 1e9 * assumed.memory
    all_chips = report["chips"] * chip.peak_tflops * 1e12 * assumed.clock
    parts = {group: cycles * assumed.xla / clock for group, cycles in compiled["cycles_by_group"].items()}
    for kind in ("self", "cross"):
        at_peak = flops[f"{kind}-attention"] * share / all_chips
        lists = "listed" if config.attention[kind].sparse.kind != "none" else kind
        parts[f"{kind}-attention kernel"] = assumed.attention * at_peak / chip_fact(config, f"{lists}_attention_share")
    for fact, count in find(main_stage(resolved.graph)).product_flops(resolved).items():
        kind = fact.removesuffix("product_share").strip("_").replace("_", " ")
        name = f"product kernel, {kind}" if kind else "product kernel"
        parts[name] = assumed.product * resolved.videos * count * share / all_chips / chip_fact(config, fact)
    for group, moved in compiled["kernel_bytes"].items():  # kernels bound by memory
        parts[group] = parts.get(group, 0) + moved / memory
    parts["products' waits for memory"] = sum(wait_seconds(call, config, assumed) for call in compiled["product_calls"])
    parts["communication"] = waiting_seconds(compiled["timeline"], report["axes"], config, assumed)
    parts["kernels' launches"] = compiled["launches"] * assumed.launch_us / 1e6
    return parts


def chip_fact(config, name: str) -> float:
    """A value from the chip's file."""
    value = config.mesh.chip[name]
    if value is None:
        kind = config.mesh.chip.kind
        raise ConfigError(f"mesh.chip.{name}: not known for {kind}; give it, or add it to its file in conf/chip")
    return value


def wait_seconds(call: dict, config, assumed) -> float:
    """How long a call of compiler.product_calls waits for memory. The first blocks cannot be overlapped. Later, blocks
    of weights and results move while another block is computed; so do the next tokens, beside the last block of
    weights or, where the kernel fetches ahead, beside all of them."""
    tokens, inputs, outputs = call["tokens"], call["inputs"], call["outputs"]
    size = compiler.ITEM_BYTES[call["weights"]]
    dtype = jax.numpy.bfloat16 if size == 2 else jax.numpy.int8
    shapes = {"array": ((1, tokens, inputs), jax.numpy.bfloat16), "weight": ((1, outputs, inputs), dtype)}
    structs = {name: jax.ShapeDtypeStruct(*one) for name, one in shapes.items()}
    settings = Products(**config.products)
    rows, columns = product.block_sizes(structs, settings)
    down, across = math.ceil(tokens / rows), math.ceil(outputs / columns)
    peak = config.mesh.chip.peak_tflops * 1e12 * assumed.clock * chip_fact(config, SHARES[call["weights"]])
    computing = assumed.product * 2 * tokens * inputs * outputs / peak / (down * across)
    weights, fresh = columns * inputs * size, rows * inputs * 2
    beside = weights + rows * columns * 2 * (2 if call["residual"] else 1)
    speed = config.mesh.chip.hbm_gbs * 1e9 * assumed.memory
    if product.fetches_ahead(settings, tokens, rows):
        begun = [(beside * across + one) / speed - computing * across for one in [fresh] * (down - 1) + [0]]
        return call["times"] * ((weights + fresh) / speed + sum(max(one, 0) for one in begun))
    usual, last = (max(moved / speed - computing, 0) for moved in (beside, beside + fresh))
    return call["times"] * ((weights + fresh) / speed + down * ((across - 1) * usual + last))


def waiting_seconds(events: list[dict], axes: dict[str, int], config, assumed) -> float:
    """How long a compiler.timeline waits for collectives. They use the links one after the other, while XLA's ops and
    the kernels run; where the result of one is needed, the program waits for it and those before it."""
    chip = config.mesh.chip
    left, waited = {}, 0.0  # remaining seconds of collectives in flight
    for event in events:
        if "start" in event:
            left[event["start"]] = travel_seconds(event, axes, chip.link_gbs * 1e9 * assumed.link, chip.devices)
        elif "done" in event:
            while event["done"] in left:
                waited += left.pop(next(iter(left)))
        else:
            flops = (count / chip_fact(config, SHARES[kind]) for kind, count in event["flops"].items())
            seconds = event["cycles"] / (chip.clock_ghz * 1e9) + sum(flops) / (chip.peak_tflops * 1e12)
            seconds *= assumed.hidden
            for name, rest in left.items():
                left[name] = max(rest - seconds, 0)
                seconds = max(seconds - rest, 0)
    return waited


def travel_seconds(row: dict, axes: dict[str, int], link: float, devices: int = 1) -> float:
    """A collective's time on a ring of chips, using both directions; `link` is bytes per second of one link, one way.

    The bytes are those of the result on one device. In an all-to-all on a ring of n chips, a part crosses n/4 links on
    average, however many devices share a chip and its links; two chips are no ring.
    """
    size = math.prod(axes.get(axis, 1) for axis in row["axis"].split("+"))
    shares = {
        "all-gather": (size - 1) / size, "all-reduce": 2 * (size - 1) / size, "reduce-scatter": size - 1,
        "all-to-all": size / 4 / (devices if size >= 4 * devices else 1),
    }
    return row["bytes"] * shares.get(row["kind"], 1) / (2 * link)


def why_not(config, report: dict) -> str:
    """In a few words: what limits a configuration."""
    for name, row in report["memory"].items():
        if not row["fits"]:
            over = row["total_gib"] + config.plan.margin_gib - row["limit_gib"]
            return f"{name} does not fit, by {over:.1f} GiB a chip: {remedy(config, row)}"
    if report["estimate"]:
        parts = report["estimate"]["parts"]["likely"]
        parts = {name: time for name, time in parts.items() if name != "self-attention kernel"}
        worst = max(parts, key=parts.get)
        return f"beside self-attention, most goes to {worst} ({parts[worst]:.2f} s)"
    sent = sum(row["bytes"] for row in report["communication"]["rows"])
    return f"communicates {sent / 1e9:.1f} GB a step and chip"


def remedy(config, row: dict) -> str:
    if row["weights_gib"] > row["temporaries_gib"]:
        layouts = "sharding=tp with a larger tp, or sharding=sequence"
        return f"shard the weights over more chips ({layouts}), or use a larger mesh"
    if config.guidance == "batched" and config.mesh.axes.get(config.sharding.attention.batch or "", 1) < 2:
        return "guidance=sequential halves the activations; more chips over sp or tp divide them"
    return "more chips over sp or tp divide the activations; or a smaller resolution"
