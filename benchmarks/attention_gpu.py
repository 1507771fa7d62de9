"""Our attention kernels against PyTorch's cuDNN attention, in one process on one NVIDIA GPU: bf16, Wan's token counts.
FlashAttention-3 is one more peer where it is installed (its module flash_attn_interface).

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/attention_gpu.py
    python benchmarks/attention_gpu.py --smoke          # small and on any machine: the plain-JAX kernel, PyTorch's own

Checks the kernels against float32 first. Interleaved, each call synchronised, medians; prints a table and a JSON line.
The Hopper kernel also with scores that its fast pass cannot take: of one row, and of all rows, by a key in the middle.
"""
import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
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
SIZES = ((32_760, 12), (32_760, 40), (75_600, 12), (75_600, 40))  # tokens, heads
SMOKE_SIZES = ((300, 2),)
# kernel, tokens that are padding, which rows the fast pass loses
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
    """Query, key and value; with lost="one" or "all" rows meet a key, in the middle, that is far above the others; with
    "values" one that is not so far above them, but values overflow with its weight."""
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
    """Every row is right where keys and queries fill no block, and where the Hopper kernel's fast pass loses rows."""
    tokens, heads = (600, 2) if smoke else (3000, 6)  # a block of threads of the guarded kernel has several tiles
    for name, padding, lost in SMOKE_CHECKS if smoke else CHECKS:
        arrays, keys = inputs(tokens, heads, lost), tokens - padding
        ours = jax.jit(Attend(HEAD_DIM, kernels(smoke)[name], keys=keys))(*arrays).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            exact = Attend(HEAD_DIM, EXACT, keys=keys)(*(x.astype(jnp.float32) for x in arrays))
        error = float(jnp.max(jnp.linalg.norm(ours - exact, axis=2) / jnp.linalg.norm(exact, axis=2)))
        print(f"{name}, {keys} keys{f', {lost} lost' if lost else ''}: relative error {error:.1e}", flush=True)
        assert error < 1e-2, error


def medians(calls):
    """Medians and spreads of each call's milliseconds, taken in turns so that clocks and heat are the same for all."""
    for call in calls * 3:
        call()
    times = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, taken in zip(calls, times):
            began = time.perf_counter()
            call()
            taken.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(taken) for taken in times], [[min(taken), max(taken)] for taken in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, the plain-JAX kernel, any machine")
    smoke = parser.parse_args().smoke
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}; torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, jax {jax.__version__}")
    check(smoke)
    peers = {"torch": torch_call} | ({"flash3": flash_call} if importlib.util.find_spec("flash_attn_interface") else {})
    guarded = [name for name in kernels(smoke) if name in GUARDED]
    names = (*peers, *kernels(smoke), *(f"{lost} lost" for _ in guarded for lost in ("one", "all")))
    columns = " ".join(f"{name:>8}" for name in names)
    print(f"{'tokens':>8} {'heads':>6} {columns} ms {columns} TFLOP/s   {list(kernels(smoke))[-1]}/torch")
    rows = []
    for tokens, heads in SMOKE_SIZES if smoke else SIZES:
        calls = [peer(tokens, heads) for peer in peers.values()]
        calls += [our_call(tokens, heads, kernel) for kernel in kernels(smoke).values()]
        calls += [our_call(tokens, heads, kernels(smoke)[name], lost) for name in guarded for lost in ("one", "all")]
        times, spreads = medians(calls)
        work = 4 * tokens**2 * heads * HEAD_DIM / 1e9  # GFLOP, so that over milliseconds it is TFLOP/s
        ratio = times[0] / times[names.index(list(kernels(smoke))[-1])]
        row = {"tokens": tokens, "heads": heads, "milliseconds": dict(zip(names, times)), "speed_ratio": ratio}
        rows.append(row | {"n": REPEATS, "spread": dict(zip(names, spreads))})
        listed = " ".join(f"{t:8.2f}" for t in times), " ".join(f"{work / t:8.0f}" for t in times)
        print(f"{tokens:8} {heads:6} {listed[0]}    {listed[1]} {ratio:21.3f}", flush=True)
    versions = {"torch": torch.__version__, "PyTorch's cuDNN": str(torch.backends.cudnn.version())}
    made = {"command": ["python benchmarks/attention_gpu.py"], "device": device}
    print(json.dumps(made | {"versions": versions | {"jax": jax.__version__}, "rows": rows}))


if __name__ == "__main__":
    main()
