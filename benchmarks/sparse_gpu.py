"""Sparse attention on one NVIDIA Hopper GPU: the kernel over lists beside the dense one, and whole denoisings.

    python benchmarks/sparse_gpu.py                         # each job in a process of its own
    python benchmarks/sparse_gpu.py --smoke                 # tiny shapes, on any machine

`check` compares the kernel with plain JAX in float32, given equal lists. `kernels` times dense and lists in turns, and
the parts of SLA beside them, `vsa` those of VSA; TFLOP/s count the blocks that the lists name. The others are all steps
of a video with random weights: medians of synchronised calls. Random weights have no structure, so nothing is said
about quality. `coarse-…` are steps of pipeline=t2v_coarse at both sizes, with dense attention.
"""
import argparse
import json
import math
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
SMALL = [
    *WIDE, "resolution=480p", "resolution.height=256", "resolution.width=256", "resolution.frames=5", "mesh=auto",
    "attention=auto",
]
TURBO = ["sampling=rcm_4step"]
CASES = {
    "turbo-14b-720p": ["model=turbowan21_t2v_14b", "resolution=720p", *TURBO],
    "turbo-14b-720p, keep 0.15": [
        "model=turbowan21_t2v_14b", "resolution=720p", *TURBO, "attention.self.sparse.keep=0.15"
    ],
    "turbo-14b-720p, fp8": ["model=turbowan21_t2v_14b", "resolution=720p", *TURBO, "precision=fp8"],
    "turbo-1.3b-480p": ["model=turbowan21_t2v_1_3b", "resolution=480p", *TURBO],
    "fastwan-1.3b-480p": ["preset=t2v_fastwan_1_3b_480p_h200_v1"],
    "fastwan-5b-704p": ["preset=t2v_fastwan_5b_704p_h200_v1"],
    "fastwan-14b-720p": ["preset=t2v_fastwan_14b_720p_h200_v1"],
    "fastwan-14b-720p, pairs": ["preset=t2v_fastwan_14b_720p_h200_v1", "attention.self.sparse.block_q=128"],
    "fastwan-1.3b-480p, pairs": ["preset=t2v_fastwan_1_3b_480p_h200_v1", "attention.self.sparse.block_q=128"],
    "fastwan-14b-720p, fp8": ["preset=t2v_fastwan_14b_720p_h200_v1", "precision=fp8"],
}
PUBLISHED_SHIFT = 5.0  # at which SGLang's table of coarse steps was made
COARSE = {
    "coarse-1.3b-480p": ["pipeline=t2v_coarse", "model=wan21_t2v_1_3b", "resolution=480p", "steps=50"],
    "coarse-14b-704p": [
        "pipeline=t2v_coarse", "model=wan21_t2v_14b", "resolution=720p", "resolution.height=704", "steps=50"
    ],
}


def check(smoke: bool, repeats: int) -> None:
    """Relative errors of the kernel, given equal lists: partial blocks, odd lists, rows that leave the fast range."""
    import jax.numpy as jnp

    from wan_torchax.kernels import sparse
    from wan_torchax.kernels.settings import TILE

    even = [
        (sparse.Blocks.even(tokens, block_q), sparse.Blocks.even(tokens, block_kv), keep, scale)
        for tokens, keep, block_q, block_kv, scale in (
            (5000, 0.2, 128, 64, 1), (4097, 0.5, 128, 128, 1), (300, 0.3, 128, 64, 1), (5000, 0.2, 128, 64, 12),
            (5000, 0.2, 64, 64, 1), (300, 0.2, 64, 64, 1),
        )
    ]
    # Full tiles, half full ones, those of a quarter and fewer tokens; an odd number of them; rows that are lost.
    tiles = [
        (sparse.Blocks.tiles(grid, TILE),) * 2 + (keep, scale)
        for grid, keep, scale in (((9, 10, 11), 0.3, 1), ((21, 30, 20), 0.2, 1), ((9, 14, 11), 0.3, 12))
    ]
    for *blocks, keep, scale in even + tiles:
        inputs, chosen = listed_inputs(blocks, 2, keep, scale)
        out, rescued = attend(smoke)(*inputs, chosen, *blocks)
        exact = sparse.listed(*(array.astype(jnp.float32) for array in inputs), chosen, *blocks, 128)
        error = float(jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
        kind = "tiles" if len(set(blocks[1].sizes)) > 2 else "blocks"
        case = f"{len(blocks[0].sizes)} x {len(blocks[1].sizes)} {kind} of {blocks[0].size} x {blocks[1].size}, "
        case += f"keep {keep}, scale {scale}"
        gpu.record("kernel given lists", case, "c", 0.0)
        gpu.rows[-1] |= {"relative_error": error, "rescued": int(rescued)}
        assert error < 4e-3, f"{case}: {error}"


def listed_inputs(blocks, heads, keep, scale=1.0):
    """Queries, keys and values, and lists chosen by SLA's scores."""
    import jax

    from wan_torchax.kernels import sparse
    from wan_torchax.kernels.settings import Sparse

    query, key, value = (
        (jax.random.normal(jax.random.key(seed), (1, sum(blocks[0].sizes), heads * 128)) * size).astype("bfloat16")
        for seed, size in enumerate((scale, scale, 1))
    )
    scores = sparse.sla_scores(query, key, *blocks, 128)
    return (query, key, value), sparse.top(scores, Sparse("sla", keep).count(len(blocks[1].sizes)))


def attend(smoke: bool):
    from wan_torchax.kernels import attention, sparse
    from wan_torchax.kernels.settings import Kernel

    if smoke:
        return lambda *inputs: (sparse.listed(*inputs, 128), 0)
    return partial(attention.gpu_listed, head_dim=128, kernel=Kernel(kernel="hopper", block_q=128, block_kv=128))


def kernels(smoke: bool, repeats: int) -> None:
    for shape in [(500, 2, 0.3)] if smoke else [(75_600, 40, 0.1), (75_600, 40, 0.15), (32_760, 12, 0.1)]:
        time_kernels(smoke, repeats, *shape)


def vsa(smoke: bool, repeats: int) -> None:
    """VSA's parts: the coarse branch, choosing by it, and the lists, for pairs of tiles and for each tile."""
    import jax

    from wan_torchax.kernels import sparse
    from wan_torchax.kernels.settings import TILE, Sparse

    small, full = [((5, 6, 9), 2, 0.3)], [((21, 30, 52), 12, 0.2), ((21, 45, 80), 40, 0.1)]
    for grid, heads, keep in small if smoke else full:
        tokens, settings, tiles = math.prod(grid), Sparse("vsa", keep, 128, 64), sparse.Blocks.tiles(grid, TILE)
        blocks = sparse.Blocks.even(tokens, 128), sparse.Blocks.even(tokens, 64)
        inputs = [
            jax.random.normal(jax.random.key(seed), (1, tokens, heads * 128)).astype("bfloat16") for seed in range(3)
        ]
        coarse = jax.jit(partial(sparse.coarse_branch, blocks=tiles, head_dim=128))
        count = settings.count(len(blocks[1].sizes))
        choose = jax.jit(partial(chosen_by_share, tiles=tiles, blocks=blocks, count=count))
        choose_tiles = jax.jit(partial(sparse.top, count=settings.count(len(tiles.sizes))))
        scores, _ = coarse(*inputs)
        chosen, of_tiles = choose(scores), choose_tiles(scores)
        calls = {
            "vsa coarse": partial(coarse, *inputs),
            "vsa choice": partial(choose, scores), "vsa choice of tiles": partial(choose_tiles, scores),
            "vsa lists": partial(jax.jit(partial(on_lists, smoke, blocks)), *inputs, chosen),
            "vsa lists of tiles": partial(jax.jit(partial(on_lists, smoke, (tiles, tiles))), *inputs, of_tiles),
        }
        pairs = {
            "vsa lists": len(blocks[0].sizes) * 128 * chosen.shape[-1] * 64,
            "vsa lists of tiles": len(tiles.sizes) * 64 * of_tiles.shape[-1] * 64,
        }
        time_calls(calls, pairs, repeats, f"{tokens} tokens, {heads} heads, keep {keep}", heads)


def chosen_by_share(scores, tiles, blocks, count):
    from wan_torchax.kernels import sparse

    return sparse.top(sparse.vsa_shares(scores, tiles, *blocks), count)


def on_lists(smoke, blocks, query, key, value, chosen):
    return attend(smoke)(query, key, value, chosen, *blocks)


def time_kernels(smoke: bool, repeats: int, tokens: int, heads: int, keep: float) -> None:
    import jax

    from wan_torchax.kernels import sparse
    from wan_torchax.kernels.attention import Attend
    from wan_torchax.kernels.settings import Kernel

    blocks = sparse.Blocks.even(tokens, 128), sparse.Blocks.even(tokens, 64)
    inputs, chosen = listed_inputs(blocks, heads, keep)
    dense = Attend(128, Kernel(kernel="xla") if smoke else Kernel(kernel="hopper", block_q=128, block_kv=128))
    weight, bias = jax.numpy.zeros((128, 128), "bfloat16"), jax.numpy.zeros(128, "bfloat16")
    scores = jax.jit(partial(sparse.sla_scores, query_blocks=blocks[0], key_blocks=blocks[1], head_dim=128))
    calls = {
        "dense": partial(jax.jit(dense), *inputs),
        "lists": partial(jax.jit(partial(on_lists, smoke, blocks)), *inputs, chosen),
        "scores": partial(scores, *inputs[:2]),
        "top": partial(jax.jit(partial(sparse.top, count=chosen.shape[-1])), scores(*inputs[:2])),
        "linear": partial(jax.jit(lambda *x: sparse.linear_branch(*x, tokens, weight, bias, 128)), *inputs),
    }
    pairs = {"dense": tokens**2, "lists": len(blocks[0].sizes) * 128 * chosen.shape[-1] * 64}
    time_calls(calls, pairs, repeats, f"{tokens} tokens, {heads} heads, keep {keep}", heads)


def time_calls(calls: dict, pairs: dict, repeats: int, case: str, heads: int) -> None:
    """Medians of synchronised calls, in turns; TFLOP/s of those with `pairs` of a query and a key."""
    import jax

    times = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[name] += [time.perf_counter() - began] if turn else []
    for name, seconds in times.items():
        gpu.record(f"attention: {name}", case, "c", gpu.median_of(seconds))
        if name in pairs:
            rate = 4 * pairs[name] * heads * 128 / statistics.median(seconds) / 1e12
            gpu.rows[-1]["tflops"] = round(rate, 1)


def steps_of(config, name: str):
    """A function that runs this many steps of a stage and waits for them, and the compile seconds."""
    stage, seconds = families_gpu.built(config, name)
    arguments = tuple(stage.programs.entries["step"].arguments)
    state, *rest = stage.programs.put("step", families_gpu.random_values(arguments))

    def run(count: int) -> bool:
        nonlocal state
        for _ in range(count):
            state, report, _ = stage("step", state, *rest)
        return bool(report["finite"])

    return run, seconds


def denoising(case: str, smoke: bool, repeats: int) -> None:
    """All steps of a video, one program, from noise to latents."""
    config = gpu.configure(*CASES[case], *(SMALL if smoke else []))
    run, seconds = steps_of(config, "denoise")
    median, peak = gpu.watched(partial(run, config.steps), repeats, 0.0)
    gpu.record(f"denoising, {config.steps} steps", case, "c", median, seconds, peak)


def coarse_first(case: str, smoke: bool, repeats: int) -> None:
    """A guided step at half height and width and one of the full size; what a video takes is added up from both."""
    from wan_torchax.config.registry import family_of
    from wan_torchax.stages.sampling import coarse_steps

    config, medians = gpu.configure(*COARSE[case], *(SMALL if smoke else [])), {}
    for name, what in (("coarse", "a coarse step"), ("denoise", "a full step")):
        run, seconds = steps_of(config, name)
        medians[name], peak = gpu.watched(partial(run, 1), repeats, 0.0)
        gpu.record(what, case, "c", medians[name], seconds, peak)
    *_, height, width = family_of(config).geometry(config.model.architecture).latent_shape(config.resolution)
    for shift in sorted({config.resolution.flow_shift, PUBLISHED_SHIFT}):
        config.resolution.flow_shift = shift
        count = coarse_steps(config, height // 2, width // 2)
        total = count * medians["coarse"] + (config.steps - count) * medians["denoise"]
        gpu.record(f"{config.steps} steps by these, shift {shift:g}", case, "c", total)
        faster = round(config.steps * medians["denoise"] / total, 3)
        gpu.rows[-1] |= {"coarse_steps": count, "times_as_fast": faster}


JOBS = {"check": check, "kernels": kernels, "vsa": vsa} | {case: partial(denoising, case) for case in CASES}
JOBS |= {case: partial(coarse_first, case) for case in COARSE}
SMOKE = ["check", "kernels", "vsa", "turbo-1.3b-480p", "fastwan-1.3b-480p", "coarse-1.3b-480p"]


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
    for job in options.only or (SMOKE if options.smoke else JOBS):
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
