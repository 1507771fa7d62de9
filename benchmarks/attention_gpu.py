"""Our attention kernels against PyTorch's cuDNN attention, in one process on one NVIDIA GPU: bf16, Wan's token counts.
FlashAttention-3 is timed too if it is installed (its module flash_attn_interface).

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/attention_gpu.py
    python benchmarks/attention_gpu.py --only hopper eight
    python benchmarks/attention_gpu.py --smoke          # small, on any machine: the plain-JAX kernel, PyTorch's own

Checks the kernels against float32 first. Calls are interleaved and synchronised; prints a table of medians and a JSON
line. The Hopper kernel is also timed with scores outside its fast pass's range, in one row and in all rows, from a key
in the middle; and with 8-bit products, whose error is reported too, as a multiple of the bf16 kernel's.
"""
import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs its share of the memory
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import wan_torchax

wan_torchax.leave_sys_path()
from wan_torchax.kernels.attention import GUARDED, Attend  # noqa: E402
from wan_torchax.kernels.settings import Kernel  # noqa: E402

HEAD_DIM, REPEATS = 128, 7
EXACT = Kernel(kernel="xla")
EIGHT = Kernel(kernel="hopper", block_q=128, block_kv=128, eight_bits=True, smooth_keys=True)  # approximate
SIZES = ((32_760, 12), (32_760, 40), (75_600, 12), (75_600, 40))  # tokens, heads
SMOKE_SIZES = ((300, 2),)
# number of padding tokens, which rows the fast pass loses
CASES = ((0, None), (223, None), (0, "one"), (0, "all"), (0, "values"))
CHECKS = (("cudnn", 0, None), *(("hopper", *case) for case in CASES))
SMOKE_CHECKS = tuple(("xla", *case) for case in CASES)


def kernels(smoke: bool) -> dict[str, Kernel]:
    names = ("xla",) if smoke else ("cudnn", "hopper")
    return {name: Kernel(kernel=name, block_q=128, block_kv=128) for name in names}


def torch_call(tokens, heads):
    """A function that runs PyTorch's attention and waits, on its (batch, heads, tokens, head_dim) layout."""
    backend = SDPBackend.CUDNN_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH

    def attend(*arrays):
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(*arrays)

    return waiting(attend, (1, heads, tokens, HEAD_DIM))


def flash_call(tokens, heads):
    """The same with FlashAttention-3, whose layout is (batch, tokens, heads, head_dim)."""
    from flash_attn_interface import flash_attn_func

    return waiting(flash_attn_func, (1, tokens, heads, HEAD_DIM))


def waiting(attend, shape):
    """A function that calls a peer on random arrays and waits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arrays = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]

    def call():
        attend(*arrays)
        if device == "cuda":
            torch.cuda.synchronize()

    return call


def inputs(tokens, heads, lost=None):
    """Query, key and value. With lost="one" or "all", these rows have a score far above the others, at a key in the
    middle; with "values" it is lower, but values overflow with its weight."""
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(key, (1, tokens, heads * HEAD_DIM), jnp.bfloat16) for key in keys)
    middle, head = tokens // 2, slice(HEAD_DIM)
    if lost == "one":  # a score of about 196, in units of the softmax's exponent
        key = key.at[0, middle, head].set(query[0, 77, head] * 12)
    if lost in ("all", "values"):
        query = query.at[0, :, ::HEAD_DIM].set(16)
        key = key.at[0, middle, ::HEAD_DIM].set(120 if lost == "all" else 40)
    return query, key, value * (2.0**60 if lost == "values" else 1)


def our_call(tokens, heads, kernel, lost=None):
    query, key, value = inputs(tokens, heads, lost)
    attention = jax.jit(Attend(HEAD_DIM, kernel).counted)
    if kernel.kernel in GUARDED:
        rescued = int(attention(query, key, value)[1].sum())
        assert rescued == {None: 0, "one": 1, "all": tokens * heads}[lost], rescued
    return lambda: attention(query, key, value)[0].block_until_ready()


def check(smoke: bool):
    """Check all rows for lengths that do not fill blocks, and when the Hopper kernel's fast pass loses rows."""
    tokens, heads = (600, 2) if smoke else (3000, 6)  # enough for several tiles per thread block of the guarded kernel
    for name, padding, lost in SMOKE_CHECKS if smoke else CHECKS:
        arrays, keys = inputs(tokens, heads, lost), tokens - padding
        ours = jax.jit(Attend(HEAD_DIM, kernels(smoke)[name], keys=keys))(*arrays).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            exact = Attend(HEAD_DIM, EXACT, keys=keys)(*(x.astype(jnp.float32) for x in arrays))
        error = float(jnp.max(jnp.linalg.norm(ours - exact, axis=2) / jnp.linalg.norm(exact, axis=2)))
        print(f"{name}, {keys} keys{f', {lost} lost' if lost else ''}: relative error {error:.1e}", flush=True)
        assert error < 1e-2, error


def errors_of_eight_bits():
    """Relative errors of the bf16 and 8-bit kernels against float32, for 512 queries, by the standard deviation of the
    scores (in natural units) and the mean of the values; and the share of recomputed rows."""
    cases = []
    spreads = (1, 0), (1, 1), (2, 0), (4, 0), (6, 0)
    for tokens, deviation, mean in ((3000, 1, 0), *((75_600, *case) for case in spreads)):
        # Drawn in float32: random bf16 values have a nonzero mean, which makes relative errors look small.
        shape, seeds = (1, tokens, 2 * HEAD_DIM), jax.random.split(jax.random.key(0), 3)
        query, key, value = (jax.random.normal(seed, shape) for seed in seeds)
        arrays = [x.astype(jnp.bfloat16) for x in (query[:, :512] * deviation, key, value + mean)]
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(Attend(HEAD_DIM, EXACT))(*(x.astype(jnp.float32) for x in arrays))
        case = {"keys": tokens, "deviation": deviation, "mean": mean}
        for name, kernel in (("hopper", kernels(False)["hopper"]), ("eight", EIGHT)):
            out, rescued = jax.jit(Attend(HEAD_DIM, kernel).counted)(*arrays)
            case[name] = float(jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
        case["rescued"] = int(rescued.sum()) / (512 * 2)
        cases.append(case)
        print(f"eight bits, {case}: {case['eight'] / case['hopper']:.1f} times bf16's error", flush=True)
        assert case["eight"] < 0.06, case
    return cases


def medians(calls):
    """Medians and spreads of each call's milliseconds, interleaved so that clocks and heat are the same for all."""
    for call in calls * 3:
        call()
    times = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, taken in zip(calls, times):
            began = time.perf_counter()
            call()
            taken.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(taken) for taken in times], [[min(taken), max(taken)] for taken in times]


def columns(smoke: bool) -> dict:
    """What is timed, by name: functions of tokens and heads that return a call."""
    made = {"torch": torch_call} | ({"flash3": flash_call} if importlib.util.find_spec("flash_attn_interface") else {})
    made |= {name: partial(our_call, kernel=kernel) for name, kernel in kernels(smoke).items()}
    guarded = [kernel for name, kernel in kernels(smoke).items() if name in GUARDED]
    made |= {f"{lost} lost": partial(our_call, kernel=one, lost=lost) for one in guarded for lost in ("one", "all")}
    return made if smoke else made | {"eight": partial(our_call, kernel=EIGHT)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, the plain-JAX kernel, any machine")
    parser.add_argument("--only", nargs="+", help="columns to time, e.g. hopper eight: nothing else heats the card")
    options = parser.parse_args()
    smoke = options.smoke
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}; torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, jax {jax.__version__}")
    check(smoke)
    errors = [] if smoke else errors_of_eight_bits()
    timed = {name: make for name, make in columns(smoke).items() if name in (options.only or columns(smoke))}
    listed = " ".join(f"{name:>8}" for name in timed)
    print(f"{'tokens':>8} {'heads':>6} {listed} ms {listed} TFLOP/s")
    rows = []
    for tokens, heads in SMOKE_SIZES if smoke else SIZES:
        times, spreads = medians([make(tokens, heads) for make in timed.values()])
        work = 4 * tokens**2 * heads * HEAD_DIM / 1e9  # GFLOP, so that over milliseconds it is TFLOP/s
        row = {"tokens": tokens, "heads": heads, "milliseconds": dict(zip(timed, times)), "n": REPEATS}
        rows.append(row | {"spread": dict(zip(timed, spreads))})
        listed = " ".join(f"{t:8.2f}" for t in times), " ".join(f"{work / t:8.0f}" for t in times)
        print(f"{tokens:8} {heads:6} {listed[0]}    {listed[1]}", flush=True)
    versions = {"torch": torch.__version__, "PyTorch's cuDNN": str(torch.backends.cudnn.version())}
    made = {"command": ["python benchmarks/attention_gpu.py"], "device": device}
    print(json.dumps(made | {"versions": versions | {"jax": jax.__version__}, "rows": rows, "errors": errors}))


if __name__ == "__main__":
    main()
