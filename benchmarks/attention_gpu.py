"""Our attention kernels against PyTorch's cuDNN attention, in one process on one NVIDIA GPU: bf16, Wan's token counts.
FlashAttention-3 is one more peer where it is installed (its module flash_attn_interface).

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/attention_gpu.py
    python benchmarks/attention_gpu.py --smoke          # small and on any machine: the plain-JAX kernel, PyTorch's own

Checks the kernels against float32 first. Interleaved, each call synchronised, medians; prints a table and a JSON line.
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
from wan_torchax.kernels.attention import Attend  # noqa: E402
from wan_torchax.kernels.settings import Kernel  # noqa: E402

HEAD_DIM, REPEATS = 128, 7
EXACT = Kernel(kernel="xla")
SIZES = ((32_760, 12), (32_760, 40), (75_600, 12), (75_600, 40))  # tokens, heads
SMOKE_SIZES = ((300, 2),)
# kernel, keys, whether the fast pass overflows
CHECKS = (("cudnn", 1000, False), ("hopper", 1000, False), ("hopper", 777, False), ("hopper", 1000, True))
SMOKE_CHECKS = (("xla", 1000, False), ("xla", 777, False), ("xla", 1000, True))


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


def our_call(tokens, heads, kernel):
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, (1, tokens, heads * HEAD_DIM), jnp.bfloat16) for key in keys]
    attention = jax.jit(Attend(HEAD_DIM, kernel))
    return lambda: attention(*arrays).block_until_ready()


def check(smoke: bool):
    """The kernels are right where keys and queries fill no block, and where the Hopper kernel's fast pass overflows."""
    keys = jax.random.split(jax.random.key(1), 3)
    query, key, value = (jax.random.normal(key, (2, 1000, 3 * HEAD_DIM), jnp.bfloat16) for key in keys)
    # A late score of about 190, the first ones near 0.
    aligned = (key * 0.1).at[0, 900, :HEAD_DIM].set(query[0, 5, :HEAD_DIM] * 12)
    for name, keys, overflows in SMOKE_CHECKS if smoke else CHECKS:
        given = aligned if overflows else key
        ours = jax.jit(Attend(HEAD_DIM, kernels(smoke)[name], keys=keys))(query, given, value).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            exact = Attend(HEAD_DIM, EXACT, keys=keys)(*(x.astype(jnp.float32) for x in (query, given, value)))
        error = float(jnp.linalg.norm(ours - exact) / jnp.linalg.norm(exact))
        print(f"{name}, {keys} keys{', overflowing' if overflows else ''}: relative error {error:.1e}", flush=True)
        assert error < 5e-3, error


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
    names = (*peers, *kernels(smoke))
    columns = " ".join(f"{name:>8}" for name in names)
    print(f"{'tokens':>8} {'heads':>6} {columns} ms {columns} TFLOP/s   {names[-1]}/torch")
    rows = []
    for tokens, heads in SMOKE_SIZES if smoke else SIZES:
        calls = [peer(tokens, heads) for peer in peers.values()]
        calls += [our_call(tokens, heads, kernel) for kernel in kernels(smoke).values()]
        times, spreads = medians(calls)
        work = 4 * tokens**2 * heads * HEAD_DIM / 1e9  # GFLOP, so that over milliseconds it is TFLOP/s
        ratio = times[0] / times[-1]
        row = {"tokens": tokens, "heads": heads, "milliseconds": dict(zip(names, times)), "speed_ratio": ratio}
        rows.append(row | {"n": REPEATS, "spread": dict(zip(names, spreads))})
        listed = " ".join(f"{t:8.2f}" for t in times), " ".join(f"{work / t:8.0f}" for t in times)
        print(f"{tokens:8} {heads:6} {listed[0]}    {listed[1]} {ratio:21.3f}", flush=True)
    versions = {"torch": torch.__version__, "PyTorch's cuDNN": str(torch.backends.cudnn.version())}
    made = {"command": ["python benchmarks/attention_gpu.py"], "device": device}
    print(json.dumps(made | {"versions": versions | {"jax": jax.__version__}, "rows": rows}))


if __name__ == "__main__":
    main()
