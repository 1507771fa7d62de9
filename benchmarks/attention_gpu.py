"""Our cuDNN attention against PyTorch's, in one process on one NVIDIA GPU: bf16, head dim 128, Wan's token counts.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/attention_gpu.py

Interleaved, each call synchronised, medians; prints a table and one JSON line.
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

import schema
from kernels.attention import attend_flat

HEAD_DIM, REPEATS = 128, 15


def torch_call(tokens, heads):
    """A function that runs cuDNN attention in PyTorch and waits, on its (batch, heads, tokens, head_dim) layout."""
    arrays = [torch.randn(1, heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(*arrays)
        torch.cuda.synchronize()

    return call


def our_call(tokens, heads):
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, (1, tokens, heads * HEAD_DIM), jnp.bfloat16) for key in keys]
    attention = jax.jit(lambda *arrays: attend_flat(*arrays, HEAD_DIM, schema.Kernel(kernel="cudnn")))
    return lambda: attention(*arrays).block_until_ready()


def check():
    """The cuDNN path is right where the keys are no multiple of 128, which it serves in two parts."""
    arrays = [jax.random.normal(key, (2, 1000, 3 * HEAD_DIM), jnp.bfloat16) for key in jax.random.split(jax.random.key(1), 3)]
    ours = attend_flat(*arrays, HEAD_DIM, schema.Kernel(kernel="cudnn")).astype(jnp.float32)
    exact = attend_flat(*(x.astype(jnp.float32) for x in arrays), HEAD_DIM, schema.Kernel(kernel="xla"))
    error = float(jnp.linalg.norm(ours - exact) / jnp.linalg.norm(exact))
    assert error < 5e-3, error
    print(f"relative error at 1000 tokens: {error:.1e}")


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
    print(f"{'tokens':>8} {'heads':>6} {'torch ms':>9} {'ours ms':>9} {'torch TFLOP/s':>14} {'ours TFLOP/s':>13} {'ours/torch':>11}")
    rows = []
    for tokens in (32_760, 75_600):
        for heads in (12, 40):
            theirs, ours = medians([torch_call(tokens, heads), our_call(tokens, heads)])
            work = 4 * tokens**2 * heads * HEAD_DIM / 1e9  # GFLOP, so that over milliseconds it is TFLOP/s
            rows.append({"tokens": tokens, "heads": heads, "torch_ms": theirs, "ours_ms": ours, "speed_ratio": theirs / ours})
            print(f"{tokens:8} {heads:6} {theirs:9.2f} {ours:9.2f} {work / theirs:14.0f} {work / ours:13.0f} {theirs / ours:11.3f}", flush=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
