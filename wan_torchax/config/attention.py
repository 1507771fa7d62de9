"""The choice of attention kernel for a device, and the validation of kernel settings. No JAX, no torch."""
import math
from collections.abc import Iterator
from dataclasses import asdict, replace

from omegaconf import OmegaConf

from wan_torchax.config.commandline import read_option
from wan_torchax.config.schema import Attention, ConfigError
from wan_torchax.config.wording import nearest_multiple, one_of
from wan_torchax.kernels.settings import UNTRAINED, Kernel, Parallel, Question, vmem_bytes

KERNELS = ("auto", "splash", "hopper", "cudnn", "xla")
BESIDE_AUTO = ("window", "smooth_keys", "min_keys", "sparse", "outline")  # keys allowed beside `kernel: auto`
HOPPER_LISTS = (64, 64), (128, 64), (128, 128)
# Kinds of lists -> kernels -> their shapes, as (block_q, block_kv); (): any.
LISTS: dict[str, dict[str, tuple]] = {
    "sla": {"auto": (), "xla": (), "hopper": HOPPER_LISTS, "splash": ((256, 128),)},
    "vsa": {"auto": (), "xla": (), "hopper": HOPPER_LISTS, "splash": ((256, 128),)},
    "radial": {"auto": (), "xla": (), "hopper": HOPPER_LISTS, "splash": ((256, 128),)},
    "band": {"auto": (), "xla": (), "hopper": HOPPER_LISTS, "splash": ((256, 128),)},
}
HOPPER_BLOCKS = (64, 96, 128, 160)  # values of block_kv whose scores and sums fit a warpgroup's registers


def parallel_of(sharding) -> Parallel:
    """The mesh axes over which attention is parallelized."""
    named = {**sharding.attention, "groups": tuple(sharding.attention.groups)}
    return Parallel(heads=sharding.axes.get("heads"), **named)


# ---------------------------------------------------------------- the choice


def choose(attention: Attention, devices, dtype: str, questions: dict[str, Question]) -> Attention:
    """Replace every `kernel: auto` with the kernel that conf/attention/auto.yaml names for these devices.

    A device kind ("TPU v6 lite") takes precedence over a platform ("gpu"). If that kernel does not support the dtype or
    the question (only `xla` has float32; splash and hopper have head dims 64 and 128), `xla` is used.
    """
    file = attention.devices.get(devices.kind) or attention.devices.get(devices.platform)
    parts = {}
    for name in ("self", "cross"):
        parts[name] = part = getattr(attention, name)
        if part.kernel != "auto":
            continue
        if file is None:
            listed = ", ".join(attention.devices)
            raise ConfigError(f"attention=auto: nothing in attention.devices for {devices.kind!r}; has {listed}")
        parts[name] = serving_kernel(file, name, part, dtype, questions[name])
    return replace(attention, **parts)


def serving_kernel(file: str, name: str, part: Kernel, dtype: str, question: Question) -> Kernel:
    """The kernel in a file of conf/attention, or `xla` if that is not supported."""
    kernel = read_kernel(file, name, part)
    if not takes_dtype(kernel.kernel, dtype) or list(unserved(kernel, question)):
        kernel = read_kernel("xla", name, part)
    problems = list(kernel_problems(kernel, question))
    if problems:
        raise ConfigError(f"conf/attention/{file}.yaml: {name}.{problems[0]}")
    return kernel


def read_kernel(file: str, name: str, part: Kernel) -> Kernel:
    """The values of a file in conf/attention, overridden by those that the config sets beside `kernel: auto`."""
    values = OmegaConf.to_container(read_option("attention", file))[name]
    return Kernel.of(values | {key: value for key, value in set_beside(part).items() if key in BESIDE_AUTO})


def set_beside(part: Kernel) -> dict:
    """The values that a config sets beside `kernel: auto`."""
    plain = asdict(Kernel())
    return {key: value for key, value in asdict(part).items() if value != plain[key] and key != "kernel"}


# ---------------------------------------------------------------- problems


def attention_problems(attention, questions: dict[str, Question], axes, parallel: Parallel) -> Iterator[str]:
    """Problems with the kernels and their sharding over the mesh; an axis missing from `axes` counts as 1."""
    for name, question in questions.items():
        yield from (f"attention.{name}.{problem}" for problem in kernel_problems(getattr(attention, name), question))
    if attention.cross.window is not None:
        window = attention.cross.window
        yield f"attention.cross.window={window}: text and video have no common positions; set null"
    if (kind := attention.cross.sparse.kind) != "none":
        yield f"attention.cross.sparse.kind={kind}: lists are for a video's own tokens; set none"
    if (kind := attention.self.sparse.kind) != "none" and parallel.ring is not None:
        ring = "a ring has a part of them at a time"
        yield f"sparse={kind}: lists name any of a video's keys, and {ring}; use sharding=tokens or tp"
    if attention.self.window is not None and parallel.ring is not None:
        yield (
            f"attention.self.window={attention.self.window}: a ring passes keys without their positions; "
            "set window=null, or sharding.attention.ring=null and use ulysses or heads"
        )
    yield from spread_problems(questions["self"].heads, axes, parallel)
    if parallel.groups:
        key = f"sharding.attention.groups={list(parallel.groups)}"
        problems = group_problems(attention.self, questions["self"], axes, parallel)
        yield from (f"{key}: {problem}; set groups=[]" for problem in problems)


def kernel_problems(kernel: Kernel, question: Question) -> Iterator[str]:
    """Problems of one Kernel, as messages that start with the key."""
    yield from one_of("kernel", kernel.kernel, KERNELS)
    if kernel.window is not None and kernel.window < 0:
        yield f"window={kernel.window}: how many tokens away a key may be; null for all"
    if kernel.sparse.kind != "none":
        yield from (f"sparse.{problem}" for problem in sparse_problems(kernel, question))
    sizes = ("block_q", "block_kv", "tile_kv", "sub_q", "chunk_kv", "vmem_mib")
    if kernel.kernel == "auto":
        for name, value in set_beside(kernel if isinstance(kernel, Kernel) else Kernel.of(kernel)).items():
            if name not in BESIDE_AUTO:
                remedy = "name the kernel's file, e.g. attention=xla or attention=splash_v6e"
                yield f"{name}={value}: kernel=auto brings its own; {remedy}"
        return
    for name in sizes:
        if getattr(kernel, name) < 1:
            yield f"{name}={getattr(kernel, name)}: must be positive"
            return
    yield from unserved(kernel, question)
    if kernel.eight_bits and kernel.kernel != "hopper":
        yield f"eight_bits=true: only kernel=hopper has products of eight bits, not {kernel.kernel}; set false"
    if kernel.kernel == "splash":
        yield from splash_problems(kernel, question.head_dim)
    if kernel.kernel == "hopper":
        yield from hopper_problems(kernel)


def sparse_problems(kernel: Kernel, question: Question) -> Iterator[str]:
    """Problems of lists of key blocks, for this kernel and model."""
    sparse = kernel.sparse
    yield from one_of("kind", sparse.kind, ("none", *LISTS))
    if not 0 < sparse.keep <= 1:
        yield f"keep={sparse.keep}: the share of key blocks, above 0 and at most 1"
    if sparse.kind in LISTS and sparse.kind not in question.sparse:
        yield f"kind={sparse.kind}: not for models of this family; set sparse=none"
    if not 0 <= sparse.dense_above <= 1:
        yield f"dense_above={sparse.dense_above}: a share of noise, from 0 (all steps are dense) to 1 (none)"
    if sparse.dense_layers < 0:
        yield f"dense_layers={sparse.dense_layers}: how many of the first layers; 0 for none"
    if sparse.kind not in UNTRAINED and (sparse.dense_above < 1 or sparse.dense_layers):
        yield f"kind={sparse.kind}: is trained for all steps and layers; set dense_above=1 and dense_layers=0"
    if kernel.window is not None:
        yield f"kind={sparse.kind}: chooses the keys itself; set window=null"
    if kernel.eight_bits:
        yield f"kind={sparse.kind}: kernels over lists have products of 16 bits only; set eight_bits=false"
    if kernel.kernel == "splash" and question.grid is not None:
        tokens = math.prod(question.grid)
        needed = vmem_bytes(tokens, kernel.block_q, question.head_dim, kernel, buffers=1) / 2**20
        if needed > kernel.vmem_mib:
            yield (
                f"kind={sparse.kind}: a head's keys and values, of {tokens} tokens, need {needed:.1f} MiB of VMEM, "
                f"the limit is vmem_mib={kernel.vmem_mib}; use fewer frames or a smaller resolution"
            )
    served = LISTS.get(sparse.kind, {}).get(kernel.kernel)
    if served is None:
        yield f"kind={sparse.kind}: kernel={kernel.kernel} has no lists of this kind; use kernel=xla"
    elif (sparse.block_q, sparse.block_kv) not in served and (served or min(sparse.block_q, sparse.block_kv) < 1):
        shapes = ", ".join(f"{block_q} x {block_kv}" for block_q, block_kv in served) or "positive sizes"
        remedy = f"; use sparse={sparse.kind}_tpu" if kernel.kernel == "splash" else "; set them so"
        yield f"block_q={sparse.block_q}, block_kv={sparse.block_kv}: kernel={kernel.kernel} has {shapes}{remedy}"


def takes_dtype(kernel: str, dtype: str) -> bool:
    """Whether a kernel supports a dtype: only xla has float32; the Hopper kernel's weights can overflow float16."""
    return kernel in ("auto", "xla") or dtype == "bfloat16" or (dtype == "float16" and kernel != "hopper")


def unserved(kernel: Kernel, question: Question) -> Iterator[str]:
    """What a kernel does not support, whatever its block sizes."""
    head_dim = question.head_dim
    if question.beside:  # tokens without a grid position, whose keys are merged with the others
        beside = "the model attends to other tokens besides its video's"
        if kernel.window is not None:
            yield f"window={kernel.window}: {beside}, which have no place in it; set null"
        if kernel.smooth_keys:
            yield f"smooth_keys=true: {beside}, and all keys need one mean; set false"
        if kernel.eight_bits:
            yield f"eight_bits=true: {beside}, which products of eight bits cannot be merged with; set false"
    if kernel.kernel == "cudnn" and kernel.window is not None:
        yield f"window={kernel.window}: cuDNN has only causal windows; use kernel=xla or window=null"
    if kernel.kernel == "cudnn" and (head_dim > 128 or head_dim % 8):
        served = "head dims that are multiples of 8 up to 128"
        yield f"kernel=cudnn: serves {served}, the model has {head_dim}; use kernel=xla"
    if kernel.kernel == "hopper" and kernel.window is not None:
        yield f"window={kernel.window}: the Hopper kernel has no windows; use kernel=xla or window=null"
    if kernel.kernel in ("splash", "hopper") and head_dim not in (64, 128):
        yield f"kernel={kernel.kernel}: serves head dims 64 and 128, the model has {head_dim}; use kernel=xla"


def splash_problems(kernel: Kernel, head_dim: int) -> Iterator[str]:
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
        yield (
            f"block_q={kernel.block_q}, block_kv={kernel.block_kv}: need {needed:.1f} MiB of VMEM, "
            f"the limit is vmem_mib={kernel.vmem_mib}; make them smaller"
        )


def hopper_problems(kernel: Kernel) -> Iterator[str]:
    if kernel.block_q != 128:
        yield f"block_q={kernel.block_q}: the Hopper kernel's tile is 128 queries; set 128"
    if kernel.block_kv not in HOPPER_BLOCKS:
        blocks = ", ".join(map(str, HOPPER_BLOCKS))
        yield f"block_kv={kernel.block_kv}: more does not fit the registers; use {blocks}"


def splash_vmem_bytes(kernel: Kernel, head_dim: int) -> int:
    """VMEM of the splash kernel: blocks twice (one is fetched while the other is used), state, two score chunks."""
    blocks = 2 * 2 * head_dim * (2 * kernel.block_q + 2 * kernel.block_kv)  # query, out, key, value in bf16
    query_terms = 2 if kernel.fold_scale else 1
    # Transposed query and sums; two statistics and log_sum twice.
    state = kernel.block_q * (head_dim * (2 * query_terms + 4) + 4 * 8 * 4)
    return blocks + state + 2 * 4 * kernel.chunk_kv * kernel.sub_q


def group_problems(kernel: Kernel, question: Question, axes: dict[str, int], parallel: Parallel) -> Iterator[str]:
    """Problems with groups of heads that Ulysses exchanges in turn."""
    if parallel.ulysses is None or parallel.ring is not None:
        yield "heads are exchanged by ulysses (sharding=sequence, tokens), and without a ring"
    if question.beside:
        yield "the model attends to other tokens besides its video's, which are not exchanged"
    if kernel.smooth_keys:
        yield "keys travel with queries, before the mean is known that attention.self.smooth_keys=true subtracts"
    if kernel.sparse.kind == "vsa":
        yield "sparse=vsa has a second output, which is not exchanged"
    if min(parallel.groups) < 1:
        yield "these are relative sizes, from 1 on, e.g. [1, 8, 1]"
        return
    heads = question.heads // math.prod(axes.get(axis, 1) for axis in (parallel.heads, parallel.ulysses) if axis)
    if parallel.group_sizes(heads) is None:
        sums = ", ".join(str(total) for total in range(2, heads + 1) if heads % total == 0)
        yield f"a device's {heads} heads do not divide into {sum(parallel.groups)} (sums that divide them: {sums})"


def spread_problems(heads: int, axes: dict[str, int], parallel: Parallel) -> Iterator[str]:
    names = [axis for axis in (parallel.batch, parallel.heads, parallel.ulysses, parallel.ring) if axis is not None]
    for axis in sorted({axis for axis in names if names.count(axis) > 1}):
        yield f"sharding: axis {axis} is named twice; batch, heads, ulysses and ring each need their own"
    split = {"sharding.axes.heads": parallel.heads, "sharding.attention.ulysses": parallel.ulysses}
    split = {key: axis for key, axis in split.items() if axis is not None}
    ways = math.prod(axes.get(axis, 1) for axis in split.values())
    if heads % ways:
        named = " x ".join(f"{key}={axis} (size {axes.get(axis, 1)})" for key, axis in split.items())
        works = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        best, kinds = math.gcd(heads, ways), " and ".join(key.rpartition(".")[2] for key in split)
        yield (
            f"{named}: {heads} heads do not divide over {ways} devices; sizes that work: {works}; "
            f"or use ring, which does not split heads, e.g. axes of {best} for {kinds} and {ways // best} for ring"
        )
