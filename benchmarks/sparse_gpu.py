"""Sparse attention on one NVIDIA Hopper GPU: the kernel over lists beside the dense one, and whole denoisings.

    python benchmarks/sparse_gpu.py                         # each job in a process of its own
    python benchmarks/sparse_gpu.py --smoke                 # tiny shapes, on any machine

`check` compares the kernel with plain JAX in float32, given equal lists. `kernels` times dense and lists in turns, and
the parts of SLA beside them; its TFLOP/s count the blocks that the lists name. The others are all steps of a video with
random weights: medians of synchronised calls. Random weights have no structure, so nothing is said about quality.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import families_gpu
import gpu

WIDE = ["model.architecture.transformer.num_layers=2", "model.architecture.transformer.num_attention_heads=2"]
SMALL = [*WIDE, "resolution=480p", "resolution.height=256", "resolution.width=256", "resolution.frames=5"]
TURBO = ["sampling=rcm_4step"]
CASES = {
    "turbo-14b-720p": ["model=turbowan21_t2v_14b", "resolution=720p", *TURBO],
    "turbo-14b-720p, keep 0.15": [
        "model=turbowan21_t2v_14b", "resolution=720p", *TURBO, "attention.self.sparse.keep=0.15"
    ],
    "turbo-14b-720p, fp8": ["model=turbowan21_t2v_14b", "resolution=720p", *TURBO, "precision=fp8"],
    "turbo-1.3b-480p": ["model=turbowan21_t2v_1_3b", "resolution=480p", *TURBO],
}


def check(smoke: bool, repeats: int) -> None:
    """Relative errors of the kernel, given equal lists: partial blocks, odd lists, rows that leave the fast range."""
    import jax.numpy as jnp

    from wan_torchax.kernels import sparse

    shapes = (5000, 0.2, 64, 1), (4097, 0.5, 128, 1), (300, 0.3, 64, 1), (5000, 0.2, 64, 12)
    for tokens, keep, block_kv, scale in shapes:
        inputs, blocks, chosen = listed_inputs(tokens, 2, keep, block_kv, scale)
        out, rescued = attend(smoke)(*inputs, chosen, *blocks)
        exact = sparse.listed(*(array.astype(jnp.float32) for array in inputs), chosen, *blocks, 128)
        error = float(jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
        case = f"{tokens} tokens, {block_kv} keys, keep {keep}, scale {scale}"
        gpu.record("kernel given lists", case, "c", 0.0)
        gpu.rows[-1] |= {"relative_error": error, "rescued": int(rescued)}
        assert error < 4e-3, f"{case}: {error}"


def listed_inputs(tokens, heads, keep, block_kv, scale=1.0):
    import jax

    from wan_torchax.kernels import sparse
    from wan_torchax.kernels.settings import Sparse

    query, key, value = (
        (jax.random.normal(jax.random.key(seed), (1, tokens, heads * 128)) * size).astype("bfloat16")
        for seed, size in enumerate((scale, scale, 1))
    )
    blocks = sparse.Blocks.even(tokens, 128), sparse.Blocks.even(tokens, block_kv)
    scores = sparse.sla_scores(query, key, *blocks, 128)
    return (query, key, value), blocks, sparse.top(scores, Sparse("sla", keep).count(len(blocks[1].sizes)))


def attend(smoke: bool):
    from wan_torchax.kernels import attention, sparse
    from wan_torchax.kernels.settings import Kernel

    if smoke:
        return lambda *inputs: (sparse.listed(*inputs, 128), 0)
    return partial(attention.gpu_listed, head_dim=128, kernel=Kernel(kernel="hopper", block_q=128, block_kv=128))


def kernels(smoke: bool, repeats: int) -> None:
    for shape in [(500, 2, 0.3)] if smoke else [(75_600, 40, 0.1), (75_600, 40, 0.15), (32_760, 12, 0.1)]:
        time_kernels(smoke, repeats, *shape)


def time_kernels(smoke: bool, repeats: int, tokens: int, heads: int, keep: float) -> None:
    import jax

    from wan_torchax.kernels import sparse
    from wan_torchax.kernels.attention import Attend
    from wan_torchax.kernels.settings import Kernel

    inputs, blocks, chosen = listed_inputs(tokens, heads, keep, 64)
    dense = Attend(128, Kernel(kernel="xla") if smoke else Kernel(kernel="hopper", block_q=128, block_kv=128))
    weight, bias = jax.numpy.zeros((128, 128), "bfloat16"), jax.numpy.zeros(128, "bfloat16")
    scores = jax.jit(partial(sparse.sla_scores, query_blocks=blocks[0], key_blocks=blocks[1], head_dim=128))
    calls = {
        "dense": partial(jax.jit(dense), *inputs),
        "lists": partial(jax.jit(lambda *x: attend(smoke)(*x, *blocks)), *inputs, chosen),
        "scores": partial(scores, *inputs[:2]),
        "top": partial(jax.jit(partial(sparse.top, count=chosen.shape[-1])), scores(*inputs[:2])),
        "linear": partial(jax.jit(lambda *x: sparse.linear_branch(*x, tokens, weight, bias, 128)), *inputs),
    }
    times = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[name] += [time.perf_counter() - began] if turn else []
    pairs = {"dense": tokens**2, "lists": len(blocks[0].sizes) * 128 * chosen.shape[-1] * 64}
    for name, seconds in times.items():
        gpu.record(f"attention: {name}", f"{tokens} tokens, {heads} heads, keep {keep}", "c", gpu.median_of(seconds))
        if name in pairs:
            rate = 4 * pairs[name] * heads * 128 / statistics.median(seconds) / 1e12
            gpu.rows[-1]["tflops"] = round(rate, 1)


def denoising(case: str, smoke: bool, repeats: int) -> None:
    """All steps of a video, one program, from noise to latents."""
    config = gpu.configure(*CASES[case], *(SMALL if smoke else []))
    stage, seconds = families_gpu.built(config, "denoise")
    arguments = tuple(stage.programs.entries["step"].arguments)
    state, *rest = stage.programs.put("step", families_gpu.random_values(arguments))

    def call():
        nonlocal state
        for _ in range(config.steps):
            state, report, _ = stage("step", state, *rest)
        return bool(report["finite"])

    median, peak = gpu.watched(call, repeats, 0.0)
    gpu.record(f"denoising, {config.steps} steps", case, "c", median, seconds, peak)


JOBS = {"check": check, "kernels": kernels} | {case: partial(denoising, case) for case in CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(JOBS), default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--job", choices=list(JOBS), help="one job, in this process")
    options = parser.parse_args()
    options.repeats = 1 if options.smoke else options.repeats
    if options.job:
        JOBS[options.job](options.smoke, options.repeats)
        print("ROWS " + json.dumps(gpu.rows), flush=True)
        return
    rows, report = [], {}
    for job in options.only or (["check", "kernels", "turbo-1.3b-480p"] if options.smoke else JOBS):
        command = [sys.executable, __file__, "--job", job, "--repeats", str(options.repeats)]
        command += ["--smoke"] * options.smoke
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        print(answer.stdout if answer.returncode == 0 else f"{job}: failed\n{answer.stderr[-3000:]}", flush=True)
        rows += [row for line in answer.stdout.splitlines() if line.startswith("ROWS ") for row in json.loads(line[5:])]
        about = {"command": "python benchmarks/sparse_gpu.py", "device": families_gpu.device(), "n": options.repeats}
        report = about | {"versions": families_gpu.versions(), "rows": rows}
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
