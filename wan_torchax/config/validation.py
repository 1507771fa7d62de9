"""Validation of a composed config beyond types: all problems at once, with key, value, rule and nearest valid choice.

Pure, like schema.py: no JAX, no torch.
"""
from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from wan_torchax import own_path
from wan_torchax.config import inputs, trust
from wan_torchax.config.adapters import adapter_problems
from wan_torchax.config.attention import attention_problems, parallel_of, takes_dtype
from wan_torchax.config.caches import cache_problems
from wan_torchax.config.camera import camera_problems
from wan_torchax.config.coarse import coarse_problems
from wan_torchax.config.commandline import options
from wan_torchax.config.geometry import guided, steps_skipped
from wan_torchax.config.guiders import guider_problems
from wan_torchax.config.keys import key_problems
from wan_torchax.config.live import live_problems, live_warnings
from wan_torchax.config.long import long_problems, long_warnings
from wan_torchax.config.pipelines import (
    decoder_problems,
    missing_problems,
    pipeline_problems,
    resolution_problems,
    stage_problems,
)
from wan_torchax.config.registry import FAMILIES, TASKS, family_of
from wan_torchax.config.schema import (
    DTYPES,
    EIGHT_BITS,
    ENDS,
    EXPERT_WEIGHTS,
    GUIDANCE,
    NOISES,
    PLATFORMS,
    TIMES,
    ConfigError,
    Op,
    PipelineStage,
    Rule,
)
from wan_torchax.config.wording import listed, nearest, one_of

log = logging.getLogger("wan")
SEEDS = 2**32
MOST_LETTERS = 1_000_000  # of a prompt
MOST_TOKENS = 8192
SCHEDULERS = (  # diffusers' linear ones: stages/sampling.py expresses them as a table
    "UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler",
    "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "DEISMultistepScheduler",
)
SIGMAS_TAKEN = SCHEDULERS[:3]  # these accept sigmas, and shift them like their own
PROBLEMS_SHOWN = 30
# What a request says of its own: OWN_CHECKS alone look at it, others at whether it says anything. Configs that differ
# in nothing else are of one kind.
OWN = ("prompt.text", "prompt.negative", "driving_prompt", "seed")
# Shares of the bf16 peak, and the most that a kernel can reach.
KERNEL_SHARES = {
    "self_attention_share": 1, "cross_attention_share": 1, "listed_attention_share": 1,
    "product_share": 1, "transposed_product_share": 1,
    "int8_product_share": 2, "int8_transposed_product_share": 2,
    "fp8_product_share": 2, "fp8_transposed_product_share": 2,
}
# Device kinds as JAX names them: chips whose two cores are one device; TPUs before TPU7x, NVIDIA before Ada and Hopper.
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
NO_FLOAT8 = r"TPU v|V100|T4|A100|A10\b|A10G|A16|A2\b|A30|A40|RTX A\d|RTX [23]0|GTX|Quadro|TITAN"
VERIFY_CHECKS = ("kernels", "machine", "step", "weights")  # tasks/verify has a module for each
SERVE_LEAST = {
    "queue_limit": 1, "batch": 1, "preview_every": 0, "upload_mb": 0.01, "upload_seconds": 1, "decode_seconds": 1,
    "connections": 10, "drain_seconds": 0, "attempts": 1,
}


def validate(config: DictConfig, files: str = "whole") -> None:
    """Raise one ConfigError that lists all problems of a composed config, if there are any. `files` says how pictures
    and videos are checked: `whole`, only their `headers`, or `none`, if they need not exist yet."""
    problems = list(one_of("model.family", config.model.family, FAMILIES))
    problems = problems or [problem for check in CHECKS for problem in check(config)]
    checked = files != "none" and config.task not in ("plan", "serve", "verify")  # a server gets files later
    about_files = list(inputs.input_problems(config, files == "whole")) if checked else []
    problems += about_files or inputs.size_problems(config)  # without its file, a size that follows it is unknown too
    if not problems:  # these need valid axes, heads and stages
        problems = [problem for check in LATER_CHECKS for problem in check(config)]
    raise_problems(problems)


def validate_own(config: DictConfig) -> None:
    """The same for a config that differs from a valid one only in OWN."""
    raise_problems([problem for check in OWN_CHECKS for problem in check(config)])


def raise_problems(problems: list[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{count} in the configuration:\n{listed(problems, PROBLEMS_SHOWN)}")


def validate_resolved(config: DictConfig, devices) -> None:
    """Validate what depends on the devices and on a checkpoint's config.json."""
    problems = [problem for check in LATER_CHECKS for problem in check(config)]
    raise_problems([*problems, *platform_problems(config, devices.platform, devices.kind)])
    if idle := idle_axis(config):
        log.warning(idle)
    for warning in (*long_warnings(config), *live_warnings(config)):
        log.warning(warning)


def choice_problems(config: DictConfig) -> Iterator[str]:
    if not 1 <= config.model.text_tokens <= MOST_TOKENS:
        yield f"model.text_tokens={config.model.text_tokens}: must be from 1 to {MOST_TOKENS}; usual 512"
    yield from one_of("scheduler.target", config.scheduler.target, SCHEDULERS)
    if config.expert_weights is not None:
        yield from one_of("expert_weights", config.expert_weights, EXPERT_WEIGHTS)
    names, boundary = list(config.model.experts), config.model.boundary
    if (len(names), boundary is None) not in ((1, True), (2, False)) or not 0 <= (boundary or 0) <= 1:
        yield f"model.experts={names}, model.boundary={boundary}: one and null, or two and a share from 0 to 1"
    yield from one_of("task", config.task, TASKS)
    if config.task == "port" and not config.port.model:
        yield "port.model=null: task=port needs a class of diffusers (port.model=FluxPipeline) or a checkpoint folder"
    yield from one_of("guidance", config.guidance, GUIDANCE)
    for component, dtype in config.model.dtype.items():
        yield from one_of(f"model.dtype.{component}", dtype, DTYPES)
    yield from one_of("model.noise_dtype", config.model.noise_dtype, NOISES)
    if config.compile.matmul_precision is not None:
        yield from one_of(
            "compile.matmul_precision", config.compile.matmul_precision, ("default", "high", "highest")
        )
    if not config.compile.store_gib > 0:
        yield f"compile.store_gib={config.compile.store_gib}: more than 0, e.g. 20; compile.store=null turns it off"
    if not 0 <= config.output.quality <= 51:
        yield f"output.quality={config.output.quality}: an H.264 CRF from 0 (lossless) to 51; usual 18"


def unknown_problems(config: DictConfig) -> Iterator[str]:
    """Keys that were added with `+key=value` but are not in the schema."""

    def walk(node, prefix):
        kind = OmegaConf.get_type(node)
        names = kind.__dataclass_fields__ if dataclasses.is_dataclass(kind) else node
        for name, child in node.items_ex(resolve=False):  # most are values: to resolve them takes most of the time
            if name not in names:
                yield f"{prefix}{name}: no such key; {nearest(name, names)}"
            elif OmegaConf.is_dict(child) and child:  # null, missing and interpolated ones are empty
                yield from walk(child, f"{prefix}{name}.")

    yield from walk(config, "")


def sampling_problems(config: DictConfig) -> Iterator[str]:
    if not 1 <= config.steps <= 1000:
        yield f"steps={config.steps}: must be from 1 to 1000; nearest {min(max(config.steps, 1), 1000)}"
    yield from sigma_problems(config)
    if not 0 <= config.guidance_scale <= 20 or math.isnan(config.guidance_scale):
        usual = config.model.guidance_scale
        yield f"guidance_scale={config.guidance_scale}: must be from 0 to 20; usual {usual} (up to 1 there is none)"
    second = config.guidance_scale_2
    if second is not None and not 0 <= second <= 20:
        yield f"guidance_scale_2={second}: must be from 0 to 20; null means the same as guidance_scale"
    elif second not in (None, config.model.guidance_scale_2) and second > 1 and not guided(config):
        scale = config.guidance_scale
        reason = f"guidance_scale={scale} decides, and turns guidance off"
        yield f"guidance_scale_2={second}: {reason}; set it above 1, or both to 1"
    yield from guider_problems(config)
    for key, most in (("strength", 1), ("coarse_delta", 1), ("conditioning_scale", 10)):
        numbers = config[key] if OmegaConf.is_list(config[key]) else [config[key]]
        if config[key] is None:
            continue
        if key not in config.pipeline.inputs.values():
            yield f"{key}={config[key]}: pipeline={config.pipeline.name} does not use it; leave it out"
        elif not all(type(number) in (int, float) and 0 <= number <= most for number in numbers):
            yield f"{key}={config[key]}: must be from 0 to {most}; null is the default"
    if steps_skipped(config) >= config.steps >= 1:
        least = f"strength of at least {math.ceil(1000 / config.steps) / 1000}, or more steps"
        yield f"strength={config.strength}: leaves none of {config.steps} steps; {least}"
    if config.preview_every < 0:
        yield f"preview_every={config.preview_every}: a number of steps; 0 for no previews"
    if not 0 <= config.seed < SEEDS:  # torch's generator uses 32 bits: larger seeds would repeat noise
        yield f"seed={config.seed}: must be from 0 to {SEEDS - 1}; {config.seed % SEEDS} gives the same noise"


def sigma_problems(config: DictConfig) -> Iterator[str]:
    """Steps given as noise levels."""
    scheduler = config.scheduler
    if not 0 < scheduler.noise_scale <= 10:
        yield f"scheduler.noise_scale={scheduler.noise_scale}: must be above 0 and at most 10; usual 1.0"
    if scheduler.round_times is not None:
        yield from one_of("scheduler.round_times", scheduler.round_times, TIMES)
    if scheduler.linear and scheduler.target not in SIGMAS_TAKEN:
        yield f"scheduler.linear=true: {scheduler.target} takes no sigmas; use scheduler=flow_euler"
    if scheduler.sigmas is None:
        return
    sigmas = list(scheduler.sigmas)
    falling = all(before > after for before, after in zip([1.0 + 1e-6, *sigmas], [*sigmas, 0.0]))
    if not sigmas or not falling:
        yield f"scheduler.sigmas={sigmas}: must fall from 1 to above 0, before the shift; e.g. [1,0.75,0.5,0.25]"
    if scheduler.target not in SIGMAS_TAKEN:
        yield f"scheduler.sigmas={sigmas}: {scheduler.target} takes none; use scheduler=euler, unipc or renoise"
    if config.steps != len(sigmas):
        yield f"steps={config.steps}: scheduler.sigmas are {len(sigmas)} steps; steps={len(sigmas)}, or leave it out"


def prompt_problems(config: DictConfig) -> Iterator[str]:
    prompt = config.prompt
    for name, key, file in (("prompt", "text", "file"), ("negative_prompt", "negative", "negative_file")):
        yield from file_problems(f"prompt.{file}", prompt[file])
        yield from text_problems(name, prompt[key] or "")
    yield from text_problems("driving_prompt", config.driving_prompt or "")
    for row in config.live.prompts:
        yield from text_problems("live.prompts", row)
    own = config.driving_prompt in (None, config.model.driving_prompt)
    if not own and "driving_prompt" not in config.pipeline.inputs.values():
        yield f"driving_prompt: pipeline={config.pipeline.name} has no driving video to describe; leave it out"
    taken = {value for name in config.stages for value in config.pipeline.stages.get(name, PipelineStage()).takes}
    if "prompt" in taken and prompt.file is None and prompt.text is None:
        yield 'prompt: missing; give prompt="a red ball bouncing" or prompt.file=prompt.txt'
    if config.resume is not None and not os.path.isdir(config.resume):
        yield f"resume={config.resume}: no such run folder; runs are under outputs/<date>/<time>"
    if config.shard is not None and config.prompts is None and config.seeds is None:
        yield f"shard={config.shard}: there is no list to take a share of; give prompts=<file> or seeds=<how many>"


def family_problems(config: DictConfig) -> Iterator[str]:
    """The model against the pipeline's inputs."""
    yield from family_of(config).problems(config)


def file_problems(key: str, path: str | None) -> Iterator[str]:
    """A text file that is missing, not text, or too long to be a prompt."""
    if path is None:
        return
    try:
        if os.path.getsize(path) > MOST_LETTERS:
            yield f"{key}={path}: has more than {MOST_LETTERS} bytes; is it a prompt?"
        else:
            yield from text_problems(f"{key}={path}", Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = "not UTF-8 text; convert it" if isinstance(error, UnicodeDecodeError) else "no such file"
        yield f"{key}={path}: {reason}"


def text_problems(key: str, text: str) -> Iterator[str]:
    """Text that a video's metadata cannot hold."""
    if "\0" in text:
        yield f"{key}: has a NUL character in it; leave it out"
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        yield f"{key}: has half a character in it (a lone surrogate); leave it out"
    if len(text) > MOST_LETTERS:
        yield f"{key}: has {len(text)} characters; at most {MOST_LETTERS}"


def mesh_problems(config: DictConfig) -> Iterator[str]:
    mesh = config.mesh
    if mesh.platform is not None:
        yield from one_of("mesh.platform", mesh.platform, PLATFORMS)
    if not mesh.axes:
        yield "mesh.axes={}: name at least one axis, e.g. mesh.axes.tp=1"
    free = [axis for axis, size in mesh.axes.items() if size == -1]
    for axis, size in mesh.axes.items():
        if size < 1 and size != -1:
            yield f"mesh.axes.{axis}={size}: must be at least 1, or -1 for whatever devices remain; nearest 1"
    if len(free) > 1:
        yield f"mesh.axes: only one axis may be -1, not {' and '.join(free)}"


def host_problems(config: DictConfig) -> Iterator[str]:
    """Several hosts: each runs one process and has the same number of devices."""
    mesh, several = config.mesh, config.distributed
    yield from one_of("distributed", several.name, ("none", "auto"))
    devices = math.prod(mesh.axes.values())
    if mesh.hosts is not None and (mesh.hosts < 1 or devices % mesh.hosts):
        known = "number of devices" if devices < 0 else f"{devices} devices of mesh.axes"
        yield f"mesh.hosts={mesh.hosts}: must be at least 1 and divide the {known}"
    if several.name == "none" and (mesh.hosts or 1) > 1 and config.task in ("generate", "tune", "verify"):
        yield (
            f"mesh={mesh.name}: has {mesh.hosts} hosts, and distributed=none is one process; "
            "set distributed=auto, and run the command on every host"
        )
    if several.name == "auto" and config.task != "generate":
        yield f"distributed=auto: task={config.task} is done by one process; set distributed=none"
    for key, least, most in (("join_seconds", 1, 86400), ("lost_seconds", 5, 3600)):
        if not least <= several[key] <= most:
            closest = min(max(several[key], least), most)
            yield f"distributed.{key}={several[key]}: must be from {least} to {most}; nearest {closest}"


def plan_problems(config: DictConfig) -> Iterator[str]:
    if config.task != "plan":
        return
    mesh, chip, plan = config.mesh, config.mesh.chip, config.plan
    if plan.compiler not in (None, "none") and shutil.which((shlex.split(plan.compiler) or [""])[0]) is None:
        yield f"plan.compiler={plan.compiler}: no such program; a Python that has JAX and libtpu, or none"
    if mesh.platform is None or chip.kind is None or chip.peak_tflops is None:
        yield f"mesh={mesh.name}: a plan needs a mesh that names its chip; e.g. mesh=v6e_8 or mesh=gpu_1"
    elif mesh.platform == "tpu" and None in (chip.clock_ghz, chip.hbm_gbs, chip.link_gbs):
        yield f"mesh={mesh.name}: a TPU's plan needs mesh.chip.clock_ghz, hbm_gbs and link_gbs; see conf/chip/v6e.yaml"
    elif chip.topology is not None:
        chips, devices = math.prod(map(int, chip.topology.partition(":")[2].split("x"))), math.prod(mesh.axes.values())
        if chips * chip.devices != devices:
            has = f"{chips} chips" if chip.devices == 1 else f"{chips} chips of {chip.devices} devices each"
            yield f"mesh.chip.topology={chip.topology}: has {has}, mesh.axes make {devices}; make them equal"
    for key, most in KERNEL_SHARES.items():
        if chip[key] is not None and not 0 < chip[key] <= most:
            yield f"mesh.chip.{key}={chip[key]}: a share of peak, above 0 and at most {most}"
    if plan.margin_gib < 0:
        yield f"plan.margin_gib={plan.margin_gib}: must not be negative"
    for end in ENDS:
        for key, value in plan[end].items():
            if value < 0 or (value == 0 and key not in ("hidden", "launch_us")) or (key == "hidden" and value > 1):
                meant = "a share, from 0 to 1" if key == "hidden" else "must not be negative, and only launch_us 0"
                yield f"plan.{end}.{key}={value}: {meant}"
    if plan.disk_gbs <= 0:
        yield f"plan.disk_gbs={plan.disk_gbs}: GB/s, above 0"


def serve_problems(config: DictConfig) -> Iterator[str]:
    """A server's settings. Without a key, only this machine may reach it."""
    serve = config.serve
    if config.task != "serve":
        return
    if not 0 <= serve.port <= 65535:
        yield f"serve.port={serve.port}: must be from 1 to 65535, or 0 for any that is free; usual 8000"
    yield from key_problems(serve.host, serve.keys_file)
    for key, least in SERVE_LEAST.items():
        if serve[key] < least:
            yield f"serve.{key}={serve[key]}: must be at least {least}; nearest {least}"
    if serve.live_ahead is not None and serve.live_ahead < 1:
        yield f"serve.live_ahead={serve.live_ahead}: must be at least 1, or null for any; nearest 1"
    if serve.adapters is not None and not own_path(serve.adapters).is_dir():
        yield f"serve.adapters={serve.adapters}: no such folder; name one with .safetensors files, or leave it out"
    for group, names in serve.choices.items():
        yield from one_of("serve.choices", group, trust.groups())
        for name in names if group in trust.groups() else ():
            yield from one_of(f"serve.choices.{group}", name, options(group))


def spec_axes(spec) -> list[str]:
    """The axis names in a sharding spec: [dp, null, [sp, tp]] -> dp, sp, tp."""
    return [axis for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or [])]


def table_problems(config: DictConfig) -> Iterator[str]:
    """The dimension names of conf/family against the mesh axes, and the rules that use them."""
    sharding, axes = config.sharding, config.mesh.axes
    for component, rules in config.model.weights.items():
        for name, rule in rules.items():
            yield from rule_problems(f"model.weights.{component}.{name}", rule, list(sharding.axes))
    for name, entry in sharding.axes.items():
        yield from axis_problems(f"sharding.axes.{name}", [entry], axes)
    if OmegaConf.is_list(sharding.picture):
        yield from axis_problems("sharding.picture", sharding.picture, axes)
    for key in ("batch", "ulysses", "ring"):
        yield from axis_problems(f"sharding.attention.{key}", [sharding.attention[key]], axes)
    yield from axis_problems("sharding.gather", [sharding.gather], axes)
    if sharding.gather is not None and (sharding.axes.get("heads") or sharding.axes.get("mlp")):
        key = f"sharding.gather={sharding.gather}"
        yield f"{key}: heads and mlp of sharding.axes share the blocks' weights already; set one of the two to null"


def axis_problems(key: str, spec, axes) -> Iterator[str]:
    """Entries of a spec that are not axes of the mesh."""
    try:
        used = spec_axes(spec)
    except TypeError:
        yield f"{key}={list(spec)}: each entry must be an axis name, a list of axis names, or null"
        return
    for axis in used:
        if axis not in axes:
            yield f"{key}: the mesh has no axis {axis!r}; {nearest(axis, axes)}"
    if len(set(used)) != len(used):
        yield f"{key}={list(spec)}: an axis may shard one dimension only"


def kernel_problems(config: DictConfig) -> Iterator[str]:
    """The attention kernels against the model and the mesh."""
    dtype, axes = config.model.dtype["transformer"], dict(config.mesh.axes)
    axes = {} if -1 in axes.values() else axes
    questions = family_of(config).questions(config)
    yield from attention_problems(config.attention, questions, axes, parallel_of(config.sharding))
    for part in ("self", "cross"):
        kernel = config.attention[part].kernel
        if not takes_dtype(kernel, dtype):
            yield (
                f"attention.{part}.kernel={kernel}: takes bfloat16, and model.dtype.transformer={dtype}; "
                "set that to bfloat16, or use kernel=xla"
            )


def vmem_problems(config: DictConfig) -> Iterator[str]:
    """What Pallas kernels may use of a TPU core's VMEM, against what it has."""
    limit = config.mesh.chip.vmem_mib
    for key in ("attention.self", "attention.cross", "products"):
        kernel = OmegaConf.select(config, key)
        if kernel.kernel in ("splash", "pallas") and limit is not None and kernel.vmem_mib > limit:
            what = f"{key}.vmem_mib={kernel.vmem_mib}: a core of {config.mesh.chip.kind} has {limit:g} MiB"
            yield f"{what}; choose the {key.split('.')[0]} option for this chip, or smaller blocks and a smaller limit"


def product_problems(config: DictConfig) -> Iterator[str]:
    """The kernel of linear layers against the model and the sharding of its weights."""
    products, dtype = config.products, config.model.dtype["transformer"]
    yield from one_of("products.kernel", products.kernel, ("xla", "pallas"))
    if products.kernel != "pallas":
        return
    for key, least in (("rows", 32), ("weights_mib", 1), ("vmem_mib", 1)):
        if products[key] < least:
            yield f"products.{key}={products[key]}: at least {least}"
    if config.mesh.platform is not None:
        yield from platform_problems(config, config.mesh.platform)
    if dtype != "bfloat16":
        yield f"products.kernel=pallas: takes bfloat16, and model.dtype.transformer={dtype}; use products=xla"
    if any(config.mesh.axes.get(axis, 1) > 1 for axis in spec_axes([config.sharding.axes.get("heads")])):
        yield (
            f"products.kernel=pallas: needs whole weights, and sharding={config.sharding.name} cuts them with the "
            "heads; use sharding=sequence or tokens, or products=xla"
        )


def precision_problems(config: DictConfig) -> Iterator[str]:
    """Quantization against the model and the kernel of its linear layers."""
    precision = config.precision
    if precision.weights is None:
        if precision.activations:
            yield "precision.activations=true: only with weights of eight bits; set precision.weights"
        return
    yield from one_of("precision.weights", precision.weights, EIGHT_BITS)
    for key in ("first", "last"):
        if precision[key] < 0:
            yield f"precision.{key}={precision[key]}: a number of blocks; 0 is none"
    for name in precision.layers:
        yield from one_of("precision.layers", name, config.model.quantized)
    if config.products.kernel == "pallas" and not precision.activations:
        yield f"precision={precision.name}: products.kernel=pallas rounds activations too; use int8, or products=xla"
    yield from float8_problems(config, config.mesh.chip.kind)


def float8_problems(config: DictConfig, kind: str | None) -> Iterator[str]:
    """Devices without float8 products: XLA would silently compute in bfloat16."""
    precision = config.precision
    if precision.weights == "float8_e4m3fn" and precision.activations and re.search(NO_FLOAT8, kind or ""):
        yield f"precision={precision.name}: {kind} multiplies no float8; use precision=int8 (TPUs) or int8_weights"


def platform_problems(config: DictConfig, platform: str, kind: str | None = None) -> Iterator[str]:
    """Kernels and formats against the devices, which with mesh=auto are known only at run time."""
    yield from float8_problems(config, kind)
    if config.products.kernel == "pallas" and platform != "tpu" and not config.products.interpret:
        yield f"products.kernel=pallas: a kernel for TPUs, and mesh={config.mesh.name} has none; use products=xla"
    kind = kind or config.mesh.chip.kind
    if config.products.kernel == "pallas" and config.products.ahead and kind in TWO_CORES:
        yield f"products.ahead=true: one of the two cores of a {kind} would do nothing; set false, or use products=xla"


def idle_axis(config: DictConfig) -> str | None:
    """A warning if the axis for guidance has no batch to shard: one forward at a time."""
    axis, axes = config.sharding.attention.batch, config.mesh.axes
    parts = axes.get(axis, 1) if axis else 1
    if parts < 2 or (guided(config) and config.guidance == "batched"):
        return None
    ulysses, (heads, _) = config.sharding.attention.ulysses, family_of(config).heads(config.model.architecture)
    if ulysses and heads % (parts * axes.get(ulysses, 1)) == 0:  # it shards tokens instead
        return None
    reason = "guidance=sequential is" if guided(config) else f"guidance_scale={config.guidance_scale} is none:"
    if "guidance_scale" in config.pipeline.inputs.values():
        reason = "guidance is an input of the model:"
    remedy = f"sharding=sequence mesh.axes={{dp:1,sp:{math.prod(axes.values())},tp:1}}"
    return (
        f"mesh.axes.{axis}={parts}: its parts do the same work, since {reason} one forward at a time; give all devices "
        f"tokens instead, e.g. {remedy}"
    )


def rule_problems(key: str, row, dimensions: Sequence[str]) -> Iterator[str]:
    try:
        rule = Rule(**row)
        if not (isinstance(rule.pattern, str) and OmegaConf.is_list(rule.axes)):
            raise TypeError
    except TypeError:
        yield f"{key}={row}: needs a pattern and axes, e.g. {{pattern: 'blocks.*', axes: [null, heads]}}"
        return
    try:
        re.compile(rule.pattern)
    except re.error as error:
        yield f"{key}.pattern={rule.pattern}: not a regular expression ({error}); escape literal dots and brackets"
    names = [name for name in rule.axes if name is not None]
    for name in names:
        if name not in dimensions:
            yield f"{key}.axes={list(rule.axes)}: {name} is no name of sharding.axes; {nearest(name, dimensions)}"
    if len(set(names)) < len(names):
        yield f"{key}.axes={list(rule.axes)}: each name of sharding.axes at most once"


def tune_problems(config: DictConfig) -> Iterator[str]:
    for key, values in search_lists(config).items():
        parent, _, name = key.rpartition(".")
        if name not in (OmegaConf.select(config, parent) if parent else config):
            yield f"tune.search: no key {key}; e.g. attention.self.block_q=512,1024"
        if not values or None in values:
            yield f"tune.search: {key} needs values to try; write {key}=512,1024"
    if config.task == "tune" and not config.tune.search:
        yield "tune.search=[]: name at least one key and its values"
    if config.tune.repeats < 1:
        yield f"tune.repeats={config.tune.repeats}: must be at least 1; usual 5"


def verify_problems(config: DictConfig) -> Iterator[str]:
    for name in config.verify.checks:
        yield from one_of("verify.checks", name, VERIFY_CHECKS)
    if config.verify.repeats < 1:
        yield f"verify.repeats={config.verify.repeats}: must be at least 1; usual 5"
    if config.verify.plan is not None and not Path(config.verify.plan).is_file():
        yield f"verify.plan={config.verify.plan}: no such file; give the plan.json that task=plan wrote"


def search_lists(config) -> dict[str, list]:
    """tune.search as {key: values}: `attention.self.block_q=512,1024` -> {"attention.self.block_q": [512, 1024]}."""
    pairs = (entry.partition("=") for entry in config.tune.search)
    return {key: yaml.safe_load(f"[{values}]") for key, _, values in pairs}


def op_problems(config: DictConfig) -> Iterator[str]:
    for name, row in config.ops.items():
        try:
            op = Op(**row)
        except TypeError:
            yield f"ops.{name}={row}: needs op, implementation and why, may have platforms; see conf/ops/default.yaml"
            continue
        module = str(op.implementation).split(".")[0]
        if module not in ("patches", "kernels") and not config.allow_external_ops:
            yield (
                f"ops.{name}.implementation={op.implementation}: not in patches or kernels; "
                "set allow_external_ops=true to trust it"
            )
        for platform in op.platforms:
            yield from one_of(f"ops.{name}.platforms", platform, PLATFORMS)
        if not re.fullmatch(r"(torch|aten)(\.\w+)+", str(op.op)):
            yield f"ops.{name}.op={op.op}: write it as aten.<op>[.<overload>] or torch.<function>"


CHECKS = (
    unknown_problems, choice_problems, pipeline_problems, decoder_problems, stage_problems, resolution_problems,
    sampling_problems, prompt_problems, mesh_problems, host_problems, table_problems, op_problems, tune_problems,
    plan_problems, adapter_problems, serve_problems, verify_problems, camera_problems,
)
OWN_CHECKS = (sampling_problems, prompt_problems)
LATER_CHECKS = (
    cache_problems, coarse_problems, live_problems, long_problems,
    missing_problems, family_problems, kernel_problems, product_problems, precision_problems, vmem_problems,
)
