"""Our attention kernels against PyTorch's cuDNN attention, in one process on one NVIDIA GPU: bf16, head dim 128, Wan's token counts.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/attention_gpu.py

Checks the kernels against float32 first. Interleaved, each call synchronised, medians; prints a table and one JSON line.
"""
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs its share of the memory
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from wan_torchax.kernels.attention import attend_flat

from wan_torchax.config import schema

HEAD_DIM, REPEATS = 128, 7
KERNELS = {name: schema.Kernel(kernel=name, block_q=128, block_kv=128) for name in ("cudnn", "hopper")}


def torch_call(tokens, heads):
    """A function that runs cuDNN attention in PyTorch and waits, on its (batch, heads, tokens, head_dim) layout."""
    arrays = [torch.randn(1, heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(*arrays)
        torch.cuda.synchronize()

    return call


def our_call(tokens, heads, kernel):
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, (1, tokens, heads * HEAD_DIM), jnp.bfloat16) for key in keys]
    attention = jax.jit(lambda *arrays: attend_flat(*arrays, HEAD_DIM, kernel))
    return lambda: attention(*arrays).block_until_ready()


def check():
    """Both kernels are right where keys and queries fill no block; the Hopper kernel also where its fast pass would overflow."""
    query, key, value = (jax.random.normal(key, (2, 1000, 3 * HEAD_DIM), jnp.bfloat16) for key in jax.random.split(jax.random.key(1), 3))
    aligned = (key * 0.1).at[0, 900, :HEAD_DIM].set(query[0, 5, :HEAD_DIM] * 12)  # a late score of about 190, the first ones near 0
    for name, keys, given in (("cudnn", 1000, key), ("hopper", 1000, key), ("hopper", 777, key), ("hopper", 1000, aligned)):
        ours = jax.jit(lambda *x, name=name, keys=keys: attend_flat(*x, HEAD_DIM, KERNELS[name], keys=keys))(query, given, value).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            exact = attend_flat(*(x.astype(jnp.float32) for x in (query, given, value)), HEAD_DIM, schema.Kernel(kernel="xla"), keys=keys)
        error = float(jnp.linalg.norm(ours - exact) / jnp.linalg.norm(exact))
        print(f"{name}, {keys} keys{', overflowing' if given is aligned else ''}: relative error {error:.1e}", flush=True)
        assert error < 5e-3, error


def medians(calls):
    """Milliseconds of each call, taken in turns so that clocks and heat are the same for all."""
    for call in calls * 3:
        call()
    times = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, taken in zip(calls, times):
            began = time.perf_counter()
            call()
            taken.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(taken) for taken in times]


def main():
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, jax {jax.__version__}")
    check()
    print(f"{'tokens':>8} {'heads':>6} {'torch':>8} {'cudnn':>8} {'hopper':>8} ms {'torch':>8} {'cudnn':>8} {'hopper':>8} TFLOP/s   hopper/torch")
    rows = []
    for tokens, heads in ((32_760, 12), (32_760, 40), (75_600, 12), (75_600, 40)):
        times = medians([torch_call(tokens, heads), *(our_call(tokens, heads, kernel) for kernel in KERNELS.values())])
        work = 4 * tokens**2 * heads * HEAD_DIM / 1e9  # GFLOP, so that over milliseconds it is TFLOP/s
        rows.append({"tokens": tokens, "heads": heads, "milliseconds": dict(zip(("torch", *KERNELS), times)), "speed_ratio": times[0] / times[-1]})
        listed = " ".join(f"{t:8.2f}" for t in times), " ".join(f"{work / t:8.0f}" for t in times)
        print(f"{tokens:8} {heads:6} {listed[0]}    {listed[1]} {times[0] / times[-1]:21.3f}", flush=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
