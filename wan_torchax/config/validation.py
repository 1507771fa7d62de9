"""What types cannot say of a composed config: every problem at once, each with key, value, rule and nearest valid choice.

Pure, like schema.py: no JAX, no torch.
"""
from __future__ import annotations

import math
import os
import re

import yaml
from omegaconf import OmegaConf

from wan_torchax.config.schema import COMPONENTS, DTYPES, GUIDANCE, PLATFORMS, STAGES, TASKS, Config, ConfigError, Kernel, Op, Parallel, Rule, nearest


def nearest_multiple(value: int, base: int, offset: int = 0) -> str:
    """The two valid values around `value`, valid being base*n + offset."""
    below = max((value - offset) // base * base + offset, offset or base)
    return f"nearest {below} or {below + base}" if below != value else str(value)


def validate(config: Config) -> None:
    """Raises one ConfigError that lists everything wrong with a composed config; returns if nothing is."""
    checks = (choice_problems, resolution_problems, sampling_problems, prompt_problems, mesh_problems, host_problems, table_problems, op_problems,
              tune_problems, plan_problems)
    problems = [problem for check in checks for problem in check(config)]
    if not problems:  # these need sound axes and heads
        problems += picture_problems(config)
        transformer = config.model.architecture["transformer"]
        axes = {} if -1 in config.mesh.axes.values() else dict(config.mesh.axes)
        problems += attention_problems(
            config.attention, transformer["num_attention_heads"], transformer["attention_head_dim"], axes, config.sharding.attention
        )
        problems += kernel_dtype_problems(config)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{count} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems))


def kernel_dtype_problems(config: Config):
    dtype = config.model.dtype["transformer"]
    for part in ("self", "cross"):
        kernel = config.attention[part].kernel
        if not takes_dtype(kernel, dtype):
            yield f"attention.{part}.kernel={kernel}: takes bfloat16, and model.dtype.transformer={dtype}; set that to bfloat16, or use kernel=xla"


def choice_problems(config: Config):
    yield from one_of("task", config.task, TASKS)
    yield from one_of("guidance", config.guidance, GUIDANCE)
    if not config.stages:
        yield f"stages=[]: name at least one of {', '.join(STAGES)}"
    for stage in config.stages:
        yield from one_of("stages", stage, STAGES)
    known = [stage for stage in STAGES if stage in config.stages]
    if set(known) == set(config.stages) and list(config.stages) != known:
        yield f"stages={list(config.stages)}: each once and in order; nearest [{','.join(known)}]"
    for component, dtype in config.model.dtype.items():
        yield from one_of(f"model.dtype.{component}", dtype, DTYPES)
    for component in set(COMPONENTS.values()) - set(config.model.dtype):
        yield f"model.dtype.{component}: missing; one of: {', '.join(DTYPES)}"
    if config.compile.matmul_precision is not None:
        yield from one_of("compile.matmul_precision", config.compile.matmul_precision, ("default", "high", "highest"))
    if not 0 <= config.output.quality <= 51:
        yield f"output.quality={config.output.quality}: an H.264 CRF from 0 (lossless) to 51; usual 18"


def one_of(key: str, value, choices):
    if value not in choices:
        yield f"{key}={value}: unknown; {nearest(value, choices)}"


def resolution_problems(config: Config):
    model, resolution = config.model, config.resolution
    for key in ("height", "width"):
        size = resolution[key]
        if size % 16:
            yield f"resolution.{key}={size}: must be a multiple of 16; {nearest_multiple(size, 16)}"
        elif not model.min_size <= size <= model.max_size:
            closest = min(max(size, model.min_size), model.max_size)
            yield f"resolution.{key}={size}: {model.name} takes {model.min_size} to {model.max_size}; nearest {closest}"
    if resolution.frames < 1 or resolution.frames % 4 != 1:
        yield f"resolution.frames={resolution.frames}: must be 4n+1; {nearest_multiple(resolution.frames, 4, 1)}"
    elif resolution.frames > model.max_frames:
        yield f"resolution.frames={resolution.frames}: {model.name} takes at most {model.max_frames}"
    if not 1 <= resolution.fps <= 120:
        yield f"resolution.fps={resolution.fps}: must be from 1 to 120; usual 16"
    if not 0 < resolution.flow_shift <= 20:
        yield f"resolution.flow_shift={resolution.flow_shift}: must be above 0 and at most 20; usual 3.0 (480p) or 5.0 (720p)"


def sampling_problems(config: Config):
    if not 1 <= config.steps <= 1000:
        yield f"steps={config.steps}: must be from 1 to 1000; nearest {min(max(config.steps, 1), 1000)}"
    if not 0 <= config.guidance_scale <= 20 or math.isnan(config.guidance_scale):
        yield f"guidance_scale={config.guidance_scale}: must be from 0 to 20; usual {config.model.guidance_scale} (1 turns guidance off)"
    if config.preview_every < 0:
        yield f"preview_every={config.preview_every}: a number of steps; 0 for no previews"
    if config.preview_every > 0 and not {"denoise", "decode"} <= set(config.stages):
        yield f"preview_every={config.preview_every}: previews need the decoder; add denoise and decode to stages, or set 0"
    if not 0 <= config.seed < 2**63:
        yield f"seed={config.seed}: must be from 0 to 2**63 - 1; nearest {min(max(config.seed, 0), 2**63 - 1)}"


def prompt_problems(config: Config):
    prompt = config.prompt
    for key in ("file", "negative_file"):
        if prompt[key] is not None and not os.path.isfile(prompt[key]):
            yield f"prompt.{key}={prompt[key]}: no such file"
    if "text" in config.stages and prompt.file is None and not (prompt.text or "").strip():
        yield 'prompt: missing; give prompt="a red ball bouncing" or prompt.file=prompt.txt'
    if config.resume is not None and not os.path.isdir(config.resume):
        yield f"resume={config.resume}: no such run folder; runs are under outputs/<date>/<time>"
    if config.task == "generate" and config.resume is None and config.stages and config.stages[0] in STAGES[1:]:
        before = STAGES[STAGES.index(config.stages[0]) - 1]
        yield f"stages={list(config.stages)}: starts after {before}; add resume=<run folder that holds the {before} stage> or stages=[{','.join(STAGES)}]"


def mesh_problems(config: Config):
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
    product = math.prod(size for size in mesh.axes.values() if size > 0)
    if mesh.devices is not None and not free and product != mesh.devices:
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
        yield f"mesh.axes: {sizes} needs {product} devices, {mesh.name} has {mesh.devices}; make the product {mesh.devices}"


def host_problems(config: Config):
    """Several hosts: each runs one process and holds as many devices as the others."""
    mesh, several = config.mesh, config.distributed
    yield from one_of("distributed", several.name, ("none", "auto"))
    if mesh.hosts is not None and (mesh.hosts < 1 or (mesh.devices or 0) % mesh.hosts):
        yield f"mesh.hosts={mesh.hosts}: must divide mesh.devices={mesh.devices}"
    if several.name == "none" and (mesh.hosts or 1) > 1 and config.task in ("generate", "tune"):
        yield f"mesh={mesh.name}: has {mesh.hosts} hosts, and distributed=none is one process; set distributed=auto, and run the command on every host"
    if several.name == "auto" and config.task != "generate":
        yield f"distributed=auto: task={config.task} is done by one process; set distributed=none"
    for key, least, most in (("join_seconds", 1, 86400), ("lost_seconds", 5, 3600)):
        if not least <= several[key] <= most:
            yield f"distributed.{key}={several[key]}: must be from {least} to {most}; nearest {min(max(several[key], least), most)}"


def plan_problems(config: Config):
    if config.task != "plan":
        return
    mesh, plan = config.mesh, config.plan
    if mesh.platform is None or mesh.chip.kind is None or mesh.chip.peak_tflops is None:
        yield f"mesh={mesh.name}: a plan needs a mesh that names its chip; e.g. mesh=v6e_8 or mesh=gpu_1"
    elif mesh.platform == "tpu" and None in (mesh.chip.clock_ghz, mesh.chip.hbm_gbs, mesh.chip.link_gbs):
        yield f"mesh={mesh.name}: a TPU's plan needs mesh.chip.clock_ghz, hbm_gbs and link_gbs; see conf/mesh/v6e_8.yaml"
    elif mesh.chip.topology is not None:
        chips = math.prod(int(size) for size in mesh.chip.topology.partition(":")[2].split("x"))
        if chips != math.prod(mesh.axes.values()):
            yield f"mesh.chip.topology={mesh.chip.topology}: has {chips} chips, mesh.axes make {math.prod(mesh.axes.values())}; make them equal"
    for key in ("self_attention_share", "cross_attention_share"):
        if not 0 < plan[key] <= 1:
            yield f"plan.{key}={plan[key]}: a share of peak, above 0 and at most 1"
    if plan.margin_gib < 0 or plan.correction <= 0:
        yield f"plan.margin_gib={plan.margin_gib}, plan.correction={plan.correction}: must not be negative"


def spec_axes(spec) -> list[str]:
    """The axis names a sharding spec mentions: [dp, null, [sp, tp]] -> dp, sp, tp."""
    return [axis for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or [])]


def table_problems(config: Config):
    for component in COMPONENTS.values():
        table = config.sharding[component]
        yield from one_of(f"sharding.{component}.unmatched", table.unmatched, ("replicate", "error"))
        for kind in ("weights", "activations"):
            for name, rule in table[kind].items():
                yield from rule_problems(f"sharding.{component}.{kind}.{name}", rule, config.mesh.axes)
    for component in COMPONENTS.values():
        if config.sharding[component].gather and not (component == "transformer" and config.model.scan_blocks):
            yield f"sharding.{component}.gather=true: works on the transformer's scanned blocks only; set model.scan_blocks=true, or gather=false"
    for key in ("batch", "heads", "ulysses", "ring"):
        axis = config.sharding.attention[key]
        if axis is not None and axis not in config.mesh.axes:
            yield f"sharding.attention.{key}={axis}: the mesh has no such axis; {nearest(axis, config.mesh.axes)}"


def picture_problems(config: Config):
    """Sides of the latent picture against the axes that share them in the decoder."""
    specs = {f"sharding.vae.activations.{name}.spec": rule.spec for name, rule in config.sharding.vae.activations.items()}
    for key, spec in (specs | {"sharding.vae.carry": config.sharding.vae.carry}).items():
        for dimension, side in ((3, "height"), (4, "width")):
            entry = spec[dimension] if len(spec) > dimension else None
            ways = math.prod(config.mesh.axes.get(axis, 1) for axis in spec_axes([entry]))
            if ways > 0 and config.resolution[side] // 8 % ways:
                yield (f"{key}: resolution.{side}={config.resolution[side]} is {config.resolution[side] // 8} in latents, not divisible by {ways} devices; "
                       f"use a {side} that is a multiple of {8 * ways}, or {key}=[]")


def rule_problems(key: str, rule: Rule, axes):
    try:
        re.compile(rule.pattern)
    except re.error as error:
        yield f"{key}.pattern={rule.pattern}: not a regular expression ({error}); escape literal dots and brackets"
    try:
        used = spec_axes(rule.spec)
    except TypeError:
        yield f"{key}.spec={list(rule.spec)}: each entry must be an axis name, a list of axis names, or null"
        return
    for axis in used:
        if axis not in axes:
            yield f"{key}.spec: the mesh has no axis {axis!r}; {nearest(axis, axes)}"
    if len(set(used)) != len(used):
        yield f"{key}.spec={list(rule.spec)}: an axis may shard one dimension only"


def tune_problems(config: Config):
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


def search_lists(config) -> dict[str, list]:
    """tune.search as {key: values}: `attention.self.block_q=512,1024` -> {"attention.self.block_q": [512, 1024]}."""
    pairs = (entry.partition("=") for entry in config.tune.search)
    return {key: yaml.safe_load(f"[{values}]") for key, _, values in pairs}


def op_problems(config: Config):
    for name, row in config.ops.items():
        try:
            op = Op(**row)
        except TypeError:
            yield f"ops.{name}={row}: needs op, implementation and why, may have platforms; see conf/ops/default.yaml"
            continue
        module = str(op.implementation).split(".")[0]
        if module not in ("patches", "kernels") and not config.allow_external_ops:
            yield f"ops.{name}.implementation={op.implementation}: not in patches or kernels; set allow_external_ops=true to trust it"
        for platform in op.platforms:
            yield from one_of(f"ops.{name}.platforms", platform, PLATFORMS)
        if not re.fullmatch(r"(torch|aten)(\.\w+)+", str(op.op)):
            yield f"ops.{name}.op={op.op}: write it as aten.<op>[.<overload>] or torch.<function>"


# ---------------------------------------------------------------- attention


KERNELS = ("auto", "splash", "hopper", "cudnn", "xla")


HOPPER_BLOCKS = (64, 96, 128, 160)  # keys at a time: scores and sums of 64 queries fit a warpgroup's registers


def attention_problems(attention, heads: int, head_dim: int, axes: dict[str, int], parallel) -> list[str]:
    """What is wrong with the attention kernels and their spread over the mesh; an axis missing from `axes` counts as 1."""
    problems = [f"attention.self.{problem}" for problem in kernel_problems(attention.self, head_dim)]
    problems += [f"attention.cross.{problem}" for problem in kernel_problems(attention.cross, head_dim)]
    if attention.cross.window is not None:
        problems.append(f"attention.cross.window={attention.cross.window}: text and video have no common positions; set null")
    if attention.self.window is not None and parallel.ring is not None:
        problems.append(f"attention.self.window={attention.self.window}: a ring passes keys without their positions; "
                        "set window=null, or sharding.attention.ring=null and use ulysses or heads")
    return problems + list(spread_problems(heads, axes, parallel))


def kernel_problems(kernel: Kernel, head_dim: int):
    """Messages that start with the key, for one Kernel."""
    yield from one_of("kernel", kernel.kernel, KERNELS)
    if kernel.kernel == "auto":
        plain = Kernel()
        for name in ("block_q", "block_kv", "tile_kv", "sub_q", "chunk_kv", "vmem_mib", "min_keys"):
            if getattr(kernel, name) != getattr(plain, name):
                yield f"{name}={getattr(kernel, name)}: kernel=auto brings its own; name the kernel's file, e.g. attention=xla or attention=splash_v6e"
        return
    for name in ("block_q", "block_kv", "tile_kv", "sub_q", "chunk_kv", "vmem_mib"):
        if getattr(kernel, name) < 1:
            yield f"{name}={getattr(kernel, name)}: must be positive"
            return
    if kernel.window is not None and kernel.window < 0:
        yield f"window={kernel.window}: how many tokens away a key may be; null for all"
    yield from unserved(kernel, head_dim)
    if kernel.kernel == "splash":
        yield from splash_problems(kernel, head_dim)
    if kernel.kernel == "hopper":
        yield from hopper_problems(kernel)


def takes_dtype(kernel: str, dtype: str) -> bool:
    """Only xla takes float32; the Hopper kernel's weights may be larger than float16 holds."""
    return kernel in ("auto", "xla") or dtype == "bfloat16" or (dtype == "float16" and kernel != "hopper")


def unserved(kernel: Kernel, head_dim: int):
    """What a kernel cannot do at all, whatever its blocks."""
    if kernel.kernel == "cudnn" and kernel.window is not None:
        yield f"window={kernel.window}: cuDNN has only causal windows; use kernel=xla or window=null"
    if kernel.kernel == "cudnn" and (head_dim > 128 or head_dim % 8):
        yield f"kernel=cudnn: serves head dims that are multiples of 8 up to 128, the model has {head_dim}; use kernel=xla"
    if kernel.kernel == "hopper" and kernel.window is not None:
        yield f"window={kernel.window}: the Hopper kernel has no windows; use kernel=xla or window=null"
    if kernel.kernel in ("splash", "hopper") and head_dim not in (64, 128):
        yield f"kernel={kernel.kernel}: serves head dims 64 and 128, the model has {head_dim}; use kernel=xla"


def splash_problems(kernel: Kernel, head_dim: int):
    for block, part in (("block_q", "sub_q"), ("block_kv", "tile_kv"), ("tile_kv", "chunk_kv")):
        size, inner = getattr(kernel, block), getattr(kernel, part)
        if part != "tile_kv" and inner % 128:  # a tile is checked as a block of chunks
            yield f"{part}={inner}: must be a multiple of 128; {nearest_multiple(inner, 128)}"
        if size % 128:
            yield f"{block}={size}: must be a multiple of 128; {nearest_multiple(size, 128)}"
        elif size % inner:
            yield f"{block}={size}: must be a multiple of {part}={inner}; {nearest_multiple(size, inner)}"
    needed = splash_vmem_bytes(kernel, head_dim) / 2**20
    if needed > kernel.vmem_mib:
        yield (f"block_q={kernel.block_q}, block_kv={kernel.block_kv}: need {needed:.1f} MiB of VMEM, "
               f"the limit is vmem_mib={kernel.vmem_mib}; make them smaller")


def hopper_problems(kernel: Kernel):
    if kernel.block_q != 128:
        yield f"block_q={kernel.block_q}: the Hopper kernel's tile is 128 queries; set 128"
    if kernel.block_kv not in HOPPER_BLOCKS:
        yield f"block_kv={kernel.block_kv}: more does not fit the registers; use {', '.join(map(str, HOPPER_BLOCKS))}"


def splash_vmem_bytes(kernel: Kernel, head_dim: int) -> int:
    """VMEM the splash kernel takes: blocks twice (one is fetched while the other is used), state, two score chunks."""
    blocks = 2 * 2 * head_dim * (2 * kernel.block_q + 2 * kernel.block_kv)  # query, out, key, value in bf16
    query_terms = 2 if kernel.fold_scale else 1
    state = kernel.block_q * (head_dim * (2 * query_terms + 4) + 4 * 8 * 4)  # transposed query, sums; two statistics and log_sum twice
    return blocks + state + 2 * 4 * kernel.chunk_kv * kernel.sub_q


def spread_problems(heads: int, axes: dict[str, int], parallel: Parallel):
    names = [axis for axis in (parallel.batch, parallel.heads, parallel.ulysses, parallel.ring) if axis is not None]
    for axis in sorted({axis for axis in names if names.count(axis) > 1}):
        yield f"sharding.attention: axis {axis} is named twice; batch, heads, ulysses and ring each need their own"
    split = {key: getattr(parallel, key) for key in ("heads", "ulysses") if getattr(parallel, key) is not None}
    ways = math.prod(axes.get(axis, 1) for axis in split.values())
    if heads % ways:
        named = " x ".join(f"{key}={axis} (size {axes.get(axis, 1)})" for key, axis in split.items())
        works = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        best = math.gcd(heads, ways)
        yield (f"sharding.attention.{named}: {heads} heads do not divide over {ways} devices; sizes that work: {works}; or ring, which "
               f"takes any size, e.g. axes of {best} for {' and '.join(split)} and {ways // best} for ring")
