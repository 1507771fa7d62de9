"""How close the kernels' schedules come to a TPU's peak, from the compiler alone.

    python benchmarks/kernel_schedule.py --compiler tpu-python --chip v6e --queries 75600 --keys 75600
    python benchmarks/kernel_schedule.py --compiler … --chip v5e --blocks 2048/16384/2048/512/128 1024/8192/2048/512/128
    python benchmarks/kernel_schedule.py --compiler … --product 18944x5120x13824+gelu 18944x13824x5120+residual
    python benchmarks/kernel_schedule.py --compiler … --norm 18944x5120
    python benchmarks/kernel_schedule.py --compiler … --queries 75776 --lists 59 --linear     # sparse attention
    python benchmarks/kernel_schedule.py --smoke            # only exports the kernels: needs no compiler

Each kernel is exported here, without a TPU, and compiled by wan_torchax/tasks/compiler.py in the Python that --compiler
names, which must have JAX and libtpu. Counted are the VLIW bundles (one cycle each if nothing stalls) of everything
that runs for one block of queries (for linear layers: of tokens by outputs): start, tiles, tail, end, and for every
grid step all of the pipeline's code, though part of it is skipped. The schedule is the one before libtpu folds empty
bundles into the preceding instruction: they take a cycle each, and on a TPU7x they are up to half of a kernel. Blocks
that overhang an array count in full. Not counted: memory stalls, and code that runs only if a row leaves the fast
path's range; the lengths of these stretches are "again" in the result. If splash.call computes the last queries in a
smaller block, there are two kernels: count each with its own --queries. benchmarks/results/kernel_schedule.json is made
with --append.
"""
import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as jax_splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_mask
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from omegaconf import OmegaConf

import wan_torchax

wan_torchax.leave_sys_path()
from wan_torchax import ROOT  # noqa: E402
from wan_torchax.config.commandline import compose  # noqa: E402
from wan_torchax.kernels import norm, product, splash, splash_lists  # noqa: E402
from wan_torchax.kernels.parallel import Pieces  # noqa: E402
from wan_torchax.kernels.settings import Kernel, Products  # noqa: E402
from wan_torchax.kernels.sparse import Blocks  # noqa: E402
from wan_torchax.tasks import compiler  # noqa: E402
from wan_torchax.tasks.plan import VERSIONS  # noqa: E402

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
SHOWN = ("MXU", "VALU", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL")
DEVICES, RUN = 4, 512  # of an all-to-all, and tokens that stay together in it
DELAY = 5  # a branch takes effect after the next four bundles
# The smallest slice that libtpu compiles for, and the cores per JAX device; a kernel runs on one core.
CHIPS = {"v6e": ("v6e:2x2", 1), "v5e": ("v5e:2x2", 1), "v5p": ("v5p:2x2x1", 2), "v7x": ("tpu7x:2x2x1", 1)}


@dataclass(frozen=True)
class Candidate:
    """A kernel to compile, and how often its parts run for one block."""

    name: str
    function: object
    shapes: list
    flops: int  # of the whole kernel
    blocks: int
    steps: int  # of the grid, for one block
    trips: tuple  # of each stretch of code that uses the MXU, in program order; 0 for those that only lost rows need
    before: tuple = ()  # trips of the longest stretches without the MXU: transposing and quantizing tokens


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", help="a Python with JAX and libtpu; by default this one", default=sys.executable)
    parser.add_argument("--smoke", action="store_true", help="only export the kernels")
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--queries", type=int, default=75_600)
    parser.add_argument("--keys", type=int, default=75_600)
    parser.add_argument("--head-dim", type=int, default=128)
    part = "which values of conf/attention/splash_<chip>.yaml to start from"
    parser.add_argument("--part", choices=("self", "cross"), default="self", help=part)
    going_on = "as in a ring's later steps: continue from the float32 output of other keys"
    parser.add_argument("--going-on", action="store_true", help=going_on)
    parts = "values in so many parts, as many as queries with padding, and the result in pieces: heads in groups"
    parser.add_argument("--parts", type=int, default=1, help=parts)
    blocks = "block_q/block_kv/tile_kv/sub_q/chunk_kv …; default: the shipped ones"
    parser.add_argument("--blocks", nargs="*", help=blocks)
    product = (
        "linear layers instead: TOKENSxINPUTSxOUTPUTS, +gelu, +int8 or +fp8, +residual (with a gate), "
        "+transpose_out (the result has tokens last), +transpose_in (the input has), +pieces (and is in pieces, of "
        "three groups of heads of four devices), +joined (of two arrays, the first as wide as the result), +turn (norm "
        "and RoPE of each head)"
    )
    parser.add_argument("--product", nargs="*", help=product)
    blocks = "their blocks: a file of conf/products, and settings that differ, e.g. products.rows=1024"
    parser.add_argument("--products", nargs="+", default=["pallas"], help=blocks)
    parser.add_argument("--norm", nargs="*", help="layer norms instead: TOKENSxCHANNELS; they have no share of peak")
    parser.add_argument("--lists", type=int, help="attention to lists of this many blocks of 128 keys instead")
    linear = "with --lists: SLA's linear branch, in the kernel's end and in a pass before it"
    parser.add_argument("--linear", action="store_true", help=linear)
    parser.add_argument("--no-baseline", action="store_true", help="leave out JAX's own splash kernel")
    parser.add_argument(
        "--append", type=Path, help="a JSON file to add the result to; replaces that of the same command"
    )
    return parser.parse_args()


def candidates(options):
    """Our kernel with every requested block size, its exact fallback, and JAX's own kernel."""
    if options.product:
        yield from (linear(text, options.products) for text in options.product)
        return
    if options.norm:
        yield from map(layer_norm, options.norm)
        return
    file = OmegaConf.load(ROOT / "conf" / "attention" / f"splash_{options.chip}.yaml")
    shipped = Kernel(**file[options.part])
    kernels = [shipped]
    if options.blocks:
        names = ("block_q", "block_kv", "tile_kv", "sub_q", "chunk_kv")
        kernels = [replace(shipped, **dict(zip(names, map(int, text.split("/"))))) for text in options.blocks]
    if options.lists:
        yield from (over_lists(kernel, options) for kernel in kernels)
        if options.linear:
            yield sums(shipped, options)
        return
    yield from (ours(kernel, options) for kernel in kernels)
    if not options.no_baseline:
        yield baseline(options)


def ours(kernel, options):
    block_kv = splash.fitting(kernel.block_kv, kernel.chunk_kv, options.keys)
    tiles, tail = divmod(options.keys, kernel.tile_kv)

    def again(keys):  # as in fast_kernel: a loop over groups of chunks, and the rest
        groups, rest = divmod(keys, splash.CAREFUL_CHUNKS * kernel.chunk_kv)
        return (0,) * ((groups > 1) + (groups == 1 or rest > 0))  # a loop that runs once is unrolled

    trips = (tiles, *again(kernel.tile_kv)) + ((1, *again(tail)) if tail else ())
    trips = trips if options.going_on else (1, *trips)
    if options.keys <= kernel.tile_kv:  # start and the only tile in one stretch
        trips = (1, *again(options.keys))
    before = [(1, options.head_dim, options.queries), (1, 1, 1, options.queries)] if options.going_on else []
    dtype = jnp.float32 if options.going_on else None

    parts, in_pieces = options.parts, options.parts > 1
    keys = options.queries if in_pieces else options.keys  # with padding

    def function(query, key, values, *before):
        arrays = query, key, splash.Values(values, 0, options.head_dim), *before
        return splash.call(splash.fast_kernel, arrays, options.keys, options.head_dim, kernel, dtype, in_pieces)

    return Candidate(
        name=f"ours {kernel.block_q}/{kernel.block_kv}/{kernel.tile_kv}/{kernel.sub_q}/{kernel.chunk_kv}",
        function=function,
        shapes=bfloat16(
            (1, options.queries, options.head_dim), (1, keys, options.head_dim),
            (parts, 1, options.head_dim, keys // parts) if in_pieces else (1, options.head_dim, keys),
        ) + [jax.ShapeDtypeStruct(shape, dtype) for shape in before],
        flops=flops_of(options),
        blocks=ceil(options.queries / splash.fitting(kernel.block_q, kernel.sub_q, options.queries)),
        steps=ceil(options.keys / block_kv),
        trips=trips,
    )


def over_lists(kernel, options):
    """Lists of key blocks. What is not a product is counted once for every two lists: most of it is."""
    list_q, list_kv = 256, 128
    entries = kernel.chunk_kv // list_kv
    count, rows = ceil(options.lists / entries) * entries, ceil(options.queries / list_q)
    times = kernel.block_q // (splash_lists.LISTS * list_q)
    groups, _ = divmod(count // entries - 1, splash_lists.UNROLLED)
    again, _ = divmod(count // entries - 1, splash_lists.CAREFUL_UNROLLED)
    lists = jax.ShapeDtypeStruct((1, 1, rows, count), jnp.int32)
    shapes = bfloat16(
        (1, options.queries, options.head_dim), (1, options.keys, options.head_dim), (1, options.head_dim, options.keys)
    )

    dim = options.head_dim
    branch = [(1, 1, dim, dim, jnp.bfloat16), (1, 1, 1, dim, jnp.float32), (dim, 1, jnp.float32)]
    branch = [jax.ShapeDtypeStruct(shape, dtype) for *shape, dtype in branch] if options.linear else []

    def function(lists, query, key, value_t, *branch):
        arrays = query, key, value_t
        return splash_lists.call(arrays, lists, options.keys, dim, list_q, list_kv, kernel, branch)

    name = f"lists of {options.lists} {list_q}/{list_kv}" + ", linear" * options.linear
    return Candidate(
        name=name, function=function, shapes=[lists, *shapes, *branch],
        flops=4 * options.queries * options.lists * list_kv * options.head_dim,
        blocks=ceil(options.queries / kernel.block_q), steps=times,
        # Without a loop, the start and all chunks are one stretch; a loop that runs once is unrolled.
        trips=((times, times * groups, times) if groups else (times,)) + (0,) * (1 + (again > 1))
        + (times,) * options.linear,
    )


def sums(kernel, options):
    """SLA's pass over queries, keys and values before its lists."""
    blocks = [Blocks.even(options.keys, size) for size in (256, 128)]
    tokens = (1, options.queries, options.head_dim)
    steps, stretches = splash_lists.SUBLANES, splash_lists.STRETCHES
    return Candidate(
        name="sums", function=lambda *arrays: splash_lists.passed(*arrays, *blocks, options.head_dim, kernel),
        shapes=bfloat16(tokens, tokens, (1, options.head_dim, options.queries)), flops=0,
        blocks=ceil(options.queries / (steps * 256)), steps=1, trips=(steps // stretches,),
    )


def linear(text, products):
    sizes, *features = text.split("+")
    tokens, inputs, outputs = map(int, sizes.split("x"))
    settings = Products(**compose([f"products={products[0]}", *products[1:]]).products)
    small = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}.get(next((name for name in features if "8" in name), None))
    how = {name: name in features for name in ("gelu", "transpose_in", "transpose_out")}
    width = outputs if "joined" in features else inputs
    shapes = {"array": (1, tokens, width), "weight": (1, outputs, inputs), "layer": (), "bias": (outputs,)}
    shapes |= {"scale": (outputs,)} if small else {}
    shapes |= {"residual": (1, tokens, outputs), "gate": (1, outputs)} if "residual" in features else {}
    shapes |= {"second": (1, tokens, inputs - width)} if "joined" in features else {}
    if "turn" in features:
        shapes |= {"cosine": (tokens, product.LANES), "sine": (tokens, product.LANES), "norm": (product.LANES,)}
        how["epsilon"] = 1e-6
    dtypes = dict.fromkeys(("scale", "gate", "cosine", "sine"), jnp.float32)
    dtypes |= {"layer": jnp.int32} | ({"weight": small} if small else {})
    shapes = {name: jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.bfloat16)) for name, shape in shapes.items()}
    rows, columns = product.block_sizes(shapes, settings, how["transpose_in"], how["transpose_out"])
    structs = list(shapes.values())
    if "pieces" in features:
        widths = [inputs // DEVICES // 10 * share for share in (1, 8, 1)]
        structs[:1] = bfloat16(*[(DEVICES, tokens // RUN, 1, width, RUN) for width in widths])

    def function(*arrays):
        if "pieces" in features:
            arrays = Pieces(arrays[:3]), *arrays[3:]
        return product.product(dict(zip(shapes, arrays)), settings=settings, **how)

    before = [rows / product.LANES] if how["transpose_in"] and (small or settings.upright) else []
    before += [rows / product.STRIP] if small else []
    return Candidate(
        name=f"linear {text}, blocks {rows} x {columns}",
        function=function,
        shapes=structs,
        flops=2 * tokens * inputs * outputs,
        blocks=ceil(tokens / rows) * ceil(outputs / columns),
        steps=1,
        trips=(1 if settings.unrolled else product.parts_of(rows, how["transpose_out"]),),
        before=tuple(trips / ceil(outputs / columns) for trips in before),
    )


def layer_norm(text):
    tokens, channels = map(int, text.split("x"))
    row = jax.ShapeDtypeStruct((1, 1, channels), jnp.float32)
    rows = min(norm.ROWS, tokens)
    return Candidate(
        name=f"norm {text}, blocks of {rows}",
        function=lambda *arrays: norm.normalise(*arrays, epsilon=1e-6, settings=Products()),
        shapes=[*bfloat16((1, tokens, channels)), row, row],
        flops=0, blocks=ceil(tokens / rows), steps=1, trips=(), before=(rows / norm.STRIP,),
    )


def bfloat16(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def flops_of(options) -> int:
    return 4 * options.queries * options.keys * options.head_dim


def baseline(options, block_q=2048, block_kv=2048, compute=1024):
    """JAX's splash attention; it needs lengths that are multiples of its blocks."""
    block_kv = min(block_kv, options.keys)
    queries, keys = ceil(options.queries / block_q) * block_q, ceil(options.keys / block_kv) * block_kv
    sizes = jax_splash.BlockSizes(block_q=block_q, block_kv=min(block_kv, keys), block_kv_compute=min(compute, keys))
    mask = jax_mask.MultiHeadMask([jax_mask.FullMask((queries, keys))])
    kernel = jax_splash.make_splash_mha_single_device(mask, block_sizes=sizes)
    shapes = bfloat16((1, queries, options.head_dim), (1, keys, options.head_dim), (1, keys, options.head_dim))
    name, steps = f"JAX's splash {block_q}/{sizes.block_kv}/{sizes.block_kv_compute}", keys // sizes.block_kv
    return Candidate(name, kernel, shapes, flops_of(options), ceil(options.queries / block_q), steps, (steps,))


def export(candidate, kind):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole) for one in candidate.shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.export.export(jax.jit(candidate.function), platforms=["tpu"])(*arrays).serialize()


def compile_schedule(python, artifact, topology):
    """The kernel's schedule: for each bundle, the slots used per unit; where straight stretches begin; the ranges that
    branches skip, as (begin, end)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.bin")
        path.write_bytes(artifact)
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
        place = ["--topology", topology, "--mesh", "x=1", "--json", f"{folder}/report.json"]
        command = [*shlex.split(python), compiler.__file__, str(path), *place, f"--libtpu-args={flags}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        schedules = [parse(file) for file in Path(folder).glob("*-pre-delay_hlo-static-per-bundle-utilization.txt")]
    # The kernel's own: the schedule that uses the MXU most, or else the longest.
    return max(schedules, key=lambda schedule: (sum(bundle[0] for bundle in schedule[0]), len(schedule[0])))


def parse(utilization):
    lines = utilization.read_text().splitlines()
    bundles = [tuple(map(int, line.split())) for line in lines[lines.index("== UTILIZATION:") + 1:] if line.strip()]
    kernel = re.sub(r"\d+-pre-delay.*", "", utilization.name)
    [listing] = [
        file for file in utilization.parent.glob("*-packed-bundles-post-ra.txt")
        if re.fullmatch(re.escape(kernel) + r"\d+-packed-bundles-post-ra.txt", file.name)
    ]
    borders, skips, address = {0}, [], 0
    for line in listing.read_text().splitlines():
        start = re.match(r"\s*0x([0-9a-f]+)", line)
        address = int(start.group(1), 16) if start else address
        if re.search(r"(Start|End|empty) region \d+", line):
            borders.add(address)
        skips += [(address + DELAY, int(end)) for end in re.findall(r"sbr.rel .*target bundleno = (\d+)", line)]
    return bundles, sorted(borders), [(begin, end) for begin, end in skips if end > begin]


def count(candidate, bundles, borders, skips):
    """Bundles for one block, the bundles of the busiest stretch, and the lengths of the stretches that do not run."""
    stretches = {begin: bundles[begin:end] for begin, end in zip(borders, [*borders[1:], len(bundles)])}
    starts = [begin for begin, stretch in stretches.items() if sum(bundle[0] for bundle in stretch) > 100]
    computing = [stretches[begin] for begin in starts]
    if candidate.steps == 1 and set(candidate.trips) == {1}:  # straight-line code; stretches may have been merged
        return len(bundles), max(computing, key=len), []
    if len(computing) != len(candidate.trips):
        expected = len(candidate.trips)
        raise SystemExit(f"{candidate.name}: {len(computing)} stretches of code use the MXU, {expected} were expected")
    longest = sorted((begin for begin in stretches if begin not in starts), key=lambda begin: -len(stretches[begin]))
    longest = sorted(longest[:len(candidate.before)])
    running = [stretch for trips, stretch in zip(candidate.trips, computing) if trips]
    idle = set()  # bundles that a branch skips together with the stretches that do not run
    for begin, end in skips:
        inside = [trips for trips, start in zip(candidate.trips, starts) if begin <= start < end]
        if inside and not any(inside):
            idle.update(range(begin, end))
    other = len(bundles) - len(idle) - sum(map(len, running))
    total = sum(trips * len(stretch) for trips, stretch in zip(candidate.trips, computing))
    total += candidate.steps * other
    total += sum(trips * len(stretches[begin]) for trips, begin in zip(candidate.before, longest))
    again = [len(stretch) for trips, stretch in zip(candidate.trips, computing) if not trips]
    return round(total), max(running or [stretches[begin] for begin in longest], key=len), again


def main():
    options = arguments()
    (topology, cores), rows = CHIPS[options.chip], []
    facts = OmegaConf.load(ROOT / "conf" / "chip" / f"{options.chip}.yaml")
    flops_a_cycle = facts.peak_tflops * 1e12 / (facts.clock_ghz * 1e9) / cores
    shape = {"queries": options.queries, "keys": options.keys, "head_dim": options.head_dim}
    shape = {} if options.product or options.norm else shape
    print(", ".join([facts.kind, *(f"{value} {name}" for name, value in shape.items())]) + f"; jax {jax.__version__}")
    columns = " ".join(f"{unit:>6}" for unit in ("bundles", *SHOWN))
    print(f"{'kernel':38} {'bundles':>9} {'of peak':>8}   hot tile: {columns}")
    for candidate in candidates(options):
        artifact = export(candidate, facts.kind)
        if options.smoke:
            print(f"{candidate.name:38} exported, {len(artifact)} bytes")
            continue
        total, hot, again = count(candidate, *compile_schedule(options.compiler, artifact, topology))
        total *= candidate.blocks
        share = candidate.flops / flops_a_cycle / total
        slots = dict(zip(UNITS, map(sum, zip(*hot))))
        row = {"kernel": candidate.name, "bundles": total, "share_of_peak": round(share, 4)}
        rows.append(row | {"hot_bundles": len(hot), "slots": slots, "again": again})
        used = " ".join(f"{slots[unit]:6}" for unit in SHOWN)
        print(f"{candidate.name:38} {total:9} {share:8.1%}   {'':10}{len(hot):7} {used}", flush=True)
    result = {"chip": options.chip, **shape, "rows": rows}
    if options.append:
        keep(options, result)
    print(json.dumps(result))


def keep(options, result):
    """Add the result to a results file, with the command and versions to reproduce it."""
    named = [option for option in sys.argv[1:] if option not in ("--compiler", options.compiler)]
    named = [option for option in named if option not in ("--append", str(options.append))]
    command = shlex.join(["python", "benchmarks/kernel_schedule.py", *named])
    asked = subprocess.run([*shlex.split(options.compiler), "-c", VERSIONS], capture_output=True, text=True, check=True)
    versions = dict(zip(("libtpu", "jax", "jaxlib"), asked.stdout.split()))
    kept = json.loads(options.append.read_text())["runs"] if options.append.exists() else []
    kept = [one for one in kept if one["command"] != command] + [{"command": command} | result]
    about = {"command": "that of each run, with --compiler <a Python with libtpu> --append <this file>", "n": 1}
    about |= {"device": "no TPU: libtpu compiles for one without having it", "versions": versions}
    options.append.write_text(json.dumps(about | {"runs": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
