"""The Hopper kernels under NVIDIA's compute-sanitizer: memory errors, data races in shared memory, misused barriers.

    python benchmarks/sanitize.py                           # needs a Hopper GPU and compute-sanitizer (CUDA toolkit)
    python benchmarks/sanitize.py --sanitizer /usr/local/cuda/bin/compute-sanitizer --tools memcheck
    python benchmarks/sanitize.py --smoke                   # on any machine: the cases are lowered, nothing runs

Each tool runs all cases in a process of its own, with few tokens: it slows a kernel down a hundred times and more.
Results are compared with float32 as well. Ends in one line of JSON, with status 1 if a tool reports an error.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

# An allocation of its own for each array: what lies behind it is out of bounds.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy

import wan_torchax

wan_torchax.leave_sys_path()
from wan_torchax.kernels import sparse  # noqa: E402
from wan_torchax.kernels.attention import Attend  # noqa: E402
from wan_torchax.kernels.settings import Kernel, Sparse  # noqa: E402

BFLOAT16 = Kernel(kernel="hopper", block_q=128, block_kv=128)
EIGHT = Kernel(kernel="hopper", block_q=128, block_kv=128, eight_bits=True, smooth_keys=True)
LISTS = replace(BFLOAT16, sparse=Sparse("sla", 1.0, 128, 64))
RUN = [sys.executable, __file__, "--run"]
TOOLS = ("memcheck", "racecheck", "synccheck")
# What each prints at its end.
SUMMARY = r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)"


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Kernel
    tokens: int
    keys: int  # how many of the tokens are valid keys
    head_dim: int = 128
    lost: str = ""  # rows whose scores leave the fast pass's range: one, all
    bound: float = 1e-2

    def inputs(self):
        seeds, shape = jax.random.split(jax.random.key(0), 3), (1, self.tokens, 2 * self.head_dim)
        query, key, value = (jax.random.normal(seed, shape).astype(jnp.bfloat16) for seed in seeds)
        head, middle = slice(self.head_dim), self.keys // 2
        if self.lost == "one":
            key = key.at[0, middle, head].set(query[0, 77, head] * 12)
        if self.lost == "all":
            query = query.at[0, :, :: self.head_dim].set(16)
            key = key.at[0, middle, :: self.head_dim].set(120)
        return query, key, value

    def attend(self, kernel: Kernel):
        attend = Attend(self.head_dim, kernel, keys=self.keys)
        return partial(to_every_block, attend) if kernel.sparse else attend


def to_every_block(attend: Attend, query, key, value):
    """Attention to lists that name every block, the last one first: as dense."""
    settings = attend.kernel.sparse
    queries, keys = (sparse.Blocks.even(attend.keys, size) for size in (settings.block_q, settings.block_kv))
    count = len(keys.sizes)
    lists = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[::-1], (1, 2, len(queries.sizes), count))
    return attend.listed(query, key, value, lists, queries, keys)[0]


CASES = (
    Case("bf16, 600 tokens", BFLOAT16, 600, 600),
    Case("bf16, 600 tokens, 377 keys, head dim 64", BFLOAT16, 600, 377, 64),
    Case("bf16, one row lost", BFLOAT16, 600, 600, lost="one"),
    Case("bf16, all rows lost", BFLOAT16, 600, 600, lost="all"),
    Case("bf16, lists of blocks", LISTS, 600, 600),
    Case("bf16, lists of blocks, all rows lost", LISTS, 600, 600, lost="all"),
    Case("eight bits, 2100 tokens", EIGHT, 2100, 2100, bound=0.06),
    Case("eight bits, one row lost", EIGHT, 2100, 2077, lost="one", bound=0.06),
)


def run_cases() -> None:
    """Compute every case and compare it with float32 on the CPU: under a tool, loading a library of products alone
    takes minutes."""
    for case in CASES:
        with jax.default_device(jax.devices("cpu")[0]):
            arrays = case.inputs()
            exact = jax.jit(case.attend(Kernel(kernel="xla")))(*(array.astype("float32") for array in arrays))
        out = jax.jit(case.attend(case.kernel))(*jax.device_put(arrays, jax.devices()[0]))
        out, exact = numpy.asarray(out, "float32"), numpy.asarray(exact)
        error = numpy.linalg.norm(out - exact) / numpy.linalg.norm(exact)
        print(f"{case.name}: relative error {error:.1e}", flush=True)
        assert error < case.bound, error


def lower_cases() -> None:
    for case in CASES:
        text = jax.jit(case.attend(case.kernel)).trace(*case.inputs()).lower(lowering_platforms=("cuda",)).as_text()
        print(f"{case.name}: {text.count('custom_call @mosaic_gpu')} kernels", flush=True)


def sanitized(sanitizer: str, tool: str) -> dict:
    """The cases under one tool: how many errors it reports."""
    only = ["--kernel-regex", "kns=hopper"]  # not XLA's own kernels
    command = [sanitizer, "--tool", tool, *only, "--error-exitcode", "99", *RUN]
    summary = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout:
            print(line, end="", flush=True)
            summary += re.findall(SUMMARY, line)
    if not summary:
        sys.exit(f"{tool}: no summary, status {running.returncode}; is this a Hopper GPU, and the tool made for it?")
    errors = sum(int(number) for found in summary for number in found if number)
    return {"tool": tool, "errors": errors, "status": running.returncode, "cases": len(CASES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer"), help="compute-sanitizer's path")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--run", action="store_true", help="only the cases, as a tool runs them")
    parser.add_argument("--smoke", action="store_true", help="only lower the cases")
    options = parser.parse_args()
    if options.run:
        return run_cases()
    if options.smoke:
        lower_cases()
    elif options.sanitizer is None:
        sys.exit("compute-sanitizer: not found; it is part of the CUDA toolkit (--sanitizer gives its path)")
    rows = []
    if not options.smoke:
        with tempfile.TemporaryDirectory() as folder:  # compiling takes minutes under a tool: once, before them
            os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            subprocess.run(RUN, check=True)
            rows = [sanitized(options.sanitizer, tool) for tool in options.tools]
    device = "none" if options.smoke else jax.devices()[0].device_kind
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    about = {"command": "python benchmarks/sanitize.py", "versions": versions, "device": device, "n": 1}
    print(json.dumps(about | {"rows": rows}))
    sys.exit(any(row["errors"] or row["status"] for row in rows))


if __name__ == "__main__":
    main()
