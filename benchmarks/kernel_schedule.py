"""How close the attention kernels' schedules come to a TPU's peak, from the compiler alone.

    python benchmarks/kernel_schedule.py --compiler "tpu-python tpu_compile.py" --chip v6e --queries 75600 --keys 75600
    python benchmarks/kernel_schedule.py --compiler "…" --chip v5e --blocks 2048/16384/2048/512/128 1024/16384/2048/512/128

Each kernel is exported here, without a TPU, and compiled by the command given, which must take a jax.export artifact and
--topology, --mesh and --libtpu-args, and hand the last to libtpu. Counted are the VLIW bundles (one cycle each when
nothing stalls) of everything that runs for one block of queries: start, tiles, tail, end, and for every grid step all of
the pipeline's code, though part of it is skipped. Not counted: stalls on memory.
"""
import argparse
import glob
import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as jax_splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_mask
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from wan_torchax.kernels import splash  # noqa: E402

from wan_torchax.config import schema  # noqa: E402

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
SHOWN = ("MXU", "VALU", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL")


@dataclass(frozen=True)
class Chip:
    kind: str  # what JAX calls it
    topology: str  # the smallest slice libtpu compiles for
    flops: int  # bf16, per cycle and core


CHIPS = {
    "v6e": Chip("TPU v6 lite", "v6e:2x2", 524_288),
    "v5e": Chip("TPU v5 lite", "v5e:2x2", 131_072),
    "v5p": Chip("TPU v5", "v5p:2x2x1", 131_072),
}


@dataclass(frozen=True)
class Candidate:
    """A kernel to compile, and how often its parts run for one block of queries."""

    name: str
    function: object
    shapes: list
    block_q: int
    steps: int  # of the grid
    trips: tuple  # of each stretch of code that uses the MXU, in program order


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", required=True, help='the compile command, e.g. "tpu-python tpu_compile.py"')
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--queries", type=int, default=75_600)
    parser.add_argument("--keys", type=int, default=75_600)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--part", choices=("self", "cross"), default="self", help="whose values of conf/attention/splash_<chip>.yaml to start from")
    parser.add_argument("--blocks", nargs="*", help="block_q/block_kv/tile_kv/sub_q/chunk_kv …; default: the shipped ones")
    parser.add_argument("--no-baseline", action="store_true", help="leave out JAX's own splash kernel")
    return parser.parse_args()


def candidates(options):
    """Ours with every block size asked for, its exact fallback, and JAX's own kernel."""
    file = OmegaConf.load(ROOT / "conf" / "attention" / f"splash_{options.chip}.yaml")
    shipped = replace(schema.Kernel(), **file[options.part])
    kernels = [shipped]
    if options.blocks:
        names = ("block_q", "block_kv", "tile_kv", "sub_q", "chunk_kv")
        kernels = [replace(shipped, **dict(zip(names, map(int, text.split("/"))))) for text in options.blocks]
    yield from (ours(kernel, options) for kernel in kernels)
    if not options.no_baseline:
        yield baseline(options)


def ours(kernel, options):
    block_kv = splash.fitting(kernel.block_kv, kernel.chunk_kv, options.keys)
    tiles, tail = divmod(options.keys, kernel.tile_kv)
    return Candidate(
        name=f"ours {kernel.block_q}/{kernel.block_kv}/{kernel.tile_kv}/{kernel.sub_q}/{kernel.chunk_kv}",
        function=lambda *arrays: splash.call(splash.fast_kernel, *arrays, options.head_dim, kernel),
        shapes=[(1, options.queries, options.head_dim), (1, options.keys, options.head_dim), (1, options.head_dim, options.keys)],
        block_q=splash.fitting(kernel.block_q, kernel.sub_q, options.queries),
        steps=ceil(options.keys / block_kv),
        trips=(1,) + (tiles,) * (tiles > 0) + (1,) * (tail > 0),
    )


def baseline(options, block_q=2048, block_kv=2048, compute=1024):
    """JAX's splash attention; it wants lengths that are multiples of its blocks."""
    queries, keys = (ceil(tokens / block) * block for tokens, block in ((options.queries, block_q), (options.keys, min(block_kv, options.keys))))
    sizes = jax_splash.BlockSizes(block_q=block_q, block_kv=min(block_kv, keys), block_kv_compute=min(compute, keys))
    mask = jax_mask.MultiHeadMask([jax_mask.FullMask((queries, keys))])
    kernel = jax_splash.make_splash_mha_single_device(mask, block_sizes=sizes)
    shapes = [(1, queries, options.head_dim), (1, keys, options.head_dim), (1, keys, options.head_dim)]
    return Candidate(f"JAX's splash {block_q}/{sizes.block_kv}/{sizes.block_kv_compute}", kernel, shapes, block_q, keys // sizes.block_kv,
                     (keys // sizes.block_kv,))


def export(candidate, chip):
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind=chip.kind, num_cores=1, platform="tpu"))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())) for shape in candidate.shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.export.export(jax.jit(candidate.function), platforms=["tpu"])(*arrays).serialize()


def compile_schedule(compiler, artifact, topology):
    """The kernel's final schedule: for each bundle, how many slots of each unit; and where straight stretches of code begin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.bin")
        path.write_bytes(artifact)
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
        subprocess.run([*shlex.split(compiler), path, "--topology", topology, "--mesh", "x=1", f"--libtpu-args={flags}"],
                       check=True, stdout=subprocess.DEVNULL)
        schedules = [parse(file) for file in glob.glob(f"{folder}/*final_hlo-static-per-bundle-utilization.txt")]
    return max(schedules, key=lambda schedule: sum(bundle[0] for bundle in schedule[0]))  # the one that computes


def parse(utilization):
    lines = Path(utilization).read_text().splitlines()
    bundles = [tuple(map(int, line.split())) for line in lines[lines.index("== UTILIZATION:") + 1:] if line.strip()]
    number = int(re.search(r"-(\d+)-final_hlo", utilization).group(1))
    [listing] = glob.glob(re.sub(r"-\d+-final_hlo.*", f"-{number + 2}-final_bundles.txt", utilization.replace("[", "[[]")))
    borders, address = {0}, 0
    for line in Path(listing).read_text().splitlines():
        found = re.match(r"\s*0x([0-9a-f]+)", line)
        address = int(found.group(1), 16) if found else address
        if re.search(r"(Start|End|empty) region \d+", line):
            borders.add(address)
    return bundles, sorted(borders)


def count(candidate, bundles, borders):
    """Bundles for one block of queries, and the busiest stretch's own bundles."""
    stretches = [bundles[begin:end] for begin, end in zip(borders, [*borders[1:], len(bundles)])]
    computing = [stretch for stretch in stretches if sum(bundle[0] for bundle in stretch) > 100]
    if candidate.steps == 1 and set(candidate.trips) == {1}:  # straight through; the compiler may have joined the stretches
        return len(bundles), max(computing, key=len)
    if len(computing) != len(candidate.trips):
        raise SystemExit(f"{candidate.name}: {len(computing)} stretches of code use the MXU, {len(candidate.trips)} were expected")
    other = len(bundles) - sum(map(len, computing))
    total = sum(trips * len(stretch) for trips, stretch in zip(candidate.trips, computing)) + candidate.steps * other
    return total, max(computing, key=len)


def main():
    options = arguments()
    chip, rows = CHIPS[options.chip], []
    print(f"{chip.kind}, {options.queries} queries, {options.keys} keys, head dim {options.head_dim}; jax {jax.__version__}")
    print(f"{'kernel':38} {'bundles':>9} {'of peak':>8}   hot tile: " + " ".join(f"{unit:>6}" for unit in ("bundles", *SHOWN)))
    for candidate in candidates(options):
        total, hot = count(candidate, *compile_schedule(options.compiler, export(candidate, chip), chip.topology))
        total *= ceil(options.queries / candidate.block_q)
        share = 4 * options.queries * options.keys * options.head_dim / chip.flops / total
        slots = dict(zip(UNITS, map(sum, zip(*hot))))
        rows.append({"kernel": candidate.name, "bundles": total, "share_of_peak": round(share, 4), "hot_bundles": len(hot), "slots": slots})
        print(f"{candidate.name:38} {total:9} {share:8.1%}   {'':10}{len(hot):7} " + " ".join(f"{slots[unit]:6}" for unit in SHOWN), flush=True)
    print(json.dumps({"chip": options.chip, "queries": options.queries, "keys": options.keys, "head_dim": options.head_dim, "rows": rows}))


if __name__ == "__main__":
    main()
