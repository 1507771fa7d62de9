"""Figures in pages, presets and configs, from benchmarks/results/*.json.

    python benchmarks/figures.py            # lists the lines that differ from the results; status 1 if there are any
    python benchmarks/figures.py --write    # replaces them with the figures of the results

A claim is a file, a text with {} for each figure, and the figures; the text must occur in the file exactly once.
"""
import argparse
import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOOR, CASES = "floor of a guided step", ("1.3b-480p", "1.3b-720p", "14b-480p", "14b-720p")
STARTS = ("start to first step", "start to frames, 4 steps")
RESULTS = ROOT / "benchmarks/results"
NUMBER = r"\d[\d,]*(?:\.\d+)?"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


GPU, FAMILY, START = read("gpu_h200"), read("gpu_h200_family"), read("gpu_h200_start")
DENOISE, EIGHT = read("gpu_h200_denoise"), read("precision_h200")
ATTENTION, PEERS, CPU = read("attention_gpu_h200"), read("peers_h200"), read("start_cpu")
PLANS, TPU = read("plans")["presets"], read("peers_tpu")
SWAPS = {row["what"]: row for row in read("adapter_swap")["rows"]}
OTHERS, ANIMATE = read("families_gpu"), read("animate_gpu")
FLOORS = {  # run 3, and of FLUX.1 run 4
    (row["case"], row["what"]): row["seconds"] for row in OTHERS["rows"] if row["run"] > 2 and row["column"] == "c"
}
USED = (1, "hunyuan15-480p"), (2, "hunyuan15-480p"), (4, "flux1-dev")
OTHERS["rows"] = [row for row in OTHERS["rows"] if (row["run"], row["case"]) in USED]


def row(result: dict, what: str, case: str, column: str) -> dict:
    (found,) = [
        row for row in result["rows"] if (row["what"], row["case"], row.get("column")) == (what, case, column)
    ]
    return found


def seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def compared(result: dict, what: str, case: str, peer: str, memory: bool = False) -> list[str]:
    """The peer's seconds, ours, and the ratio; with `memory`, each followed by its peak GiB."""
    rows = [row(result, what, case, column) for column in (peer, "c")]
    figures = [[seconds(row["seconds"]), *([f"{row['peak_gib']:.1f}"] if memory else [])] for row in rows]
    return [*figures[0], *figures[1], ratio(rows)]


def ratio(rows: list[dict]) -> str:
    return f"{rows[0]['seconds'] / rows[1]['seconds']:.2f}"


def started(what: str) -> list[str]:
    rows = [row(START, what, "1.3b-480p", column) for column in "bc"]
    return [*(f"{row['seconds']:.1f}" for row in rows), ratio(rows)]


def encoded() -> list[str]:
    rows = [row(GPU, "text encoder", "1.3b-480p", column) for column in "bc"]
    return [*(f"{1000 * row['seconds']:.1f}" for row in rows), ratio(rows)]


def leads(kernel: str, tokens: int, peer: str = "torch") -> list[str]:
    """A kernel's speedup over a peer, with 12 and with 40 heads."""
    rows = [row["milliseconds"] for row in ATTENTION["rows"] if row["tokens"] == tokens]
    return [f"{row[peer] / row[kernel]:.2f}" for row in rows]


def preset(case: str, digits: str, last: list[str]) -> list[str]:
    rows = [row(GPU, "guided step", case, column) for column in "bc"]
    return [format(rows[1]["seconds"], digits), ratio(rows), *last]


def claims():
    """Every claim: file, text, figures."""
    results = "docs/results.md"
    for name, what, result, case in (
        ("1.3B, 480p", "Wan 2.1 1.3B, 480p", GPU, "1.3b-480p"),
        ("1.3B, 720p", None, GPU, "1.3b-720p"),
        ("14B, 480p", "Wan 2.1 14B, 480p", GPU, "14b-480p"),
        ("14B, 720p", "Wan 2.1 14B, 720p", GPU, "14b-720p"),
        ("Wan 2.1 I2V-14B, 480p", None, FAMILY, "i2v-14b-480p"),
        ("Wan 2.2 TI2V-5B, 1280 x 704 x 121", "Wan 2.2 TI2V-5B, 1280 x 704 x 121", FAMILY, "ti2v-5b-704p"),
    ):
        figures = compared(result, "guided step", case, "b")
        yield results, f"| step with guidance, {name}, bf16 | {{}} s | {{}} s | {{}} |", figures
        if what:
            yield "README.md", f"\n| {what} | {{}} s | {{}} s | {{}} |", figures
    text = "an exchange takes {} s beside the\nweights and {} s merged, of which {} s is composing the run's config"
    beside, merged = SWAPS["exchange, beside"], SWAPS["exchange, merge"]
    composing = beside["strength_seconds"]
    yield "docs/adapters.md", text, [f"{one:.2f}" for one in (beside["seconds"], merged["seconds"], composing)]
    beside, merged = SWAPS["guided step, beside"], SWAPS["guided step, merged"]
    figures = [f"{100 * beside['cost']:.1f}", *(f"{one['seconds']:.2f}" for one in (beside, merged))]
    yield "docs/adapters.md", "H200 at 480p it takes {} % longer ({} s and {} s", figures
    disk = SWAPS["GGUF Q4_K, from disk"]
    text = "loaded from disk in {} s, {} times as fast as eight threads read it, with\n{} GiB of host memory"
    yield "docs/adapters.md", text, [f"{disk[key]:.2f}" for key in ("seconds", "share_of_plain", "host_gib")]
    plans = read("families_plans")["presets"]
    large, small, image = (
        plans[name]["seconds_per_step"]
        for name in ("t2v_hunyuan15_720p_v6e8_v1", "t2v_hunyuan15_480p_v6e8_v1", "t2i_flux1_dev_1024_v6e8_v1")
    )
    text = "{} s a step ({} to {}) at 1280 x 720 (`preset=t2v_hunyuan15_720p_v6e8_v1`), {} ({} to {}) at 848 x 480"
    ends = "likely", "low", "high"
    yield "docs/plans.md", text, [f"{plan[end]:.2f}" for plan in (large, small) for end in ends]
    yield "docs/plans.md", "FLUX.1 dev at 1024 x 1024: {} ms ({} to {})", [f"{1000 * image[end]:.0f}" for end in ends]
    for version, text, digits in (
        ("v2", "one on each chip, {} s ({} to {}): {} pictures a second in 28 steps", 3),
        ("v1", "with XLA's linear layers {} s ({} to {}): {}", 2),
    ):
        which = f"t2i_flux1_dev_1024_images8_v6e8_{version}"
        eight = plans[f"{which} images=8"]
        each = 8 / sum(part["likely"] for name, part in eight["video"].items() if name != "weights from disk")
        figures = [*(f"{eight['seconds_per_step'][end]:.{digits}f}" for end in ends), f"{each:.1f}"]
        yield "docs/plans.md", text, figures
        text = "Time: an estimate of {} s a step of all eight ({} to {}), {} pictures a second."
        yield f"conf/preset/{which}.yaml", text, figures
    for name, digits in (("hunyuan15_720p", ".2f"), ("hunyuan15_480p", ".2f"), ("flux1_dev_1024", ".3f")):
        kind = "t2i" if "flux" in name else "t2v"
        plan = plans[f"{kind}_{name}_v6e8_v1"]["seconds_per_step"]
        figures = [format(plan[end], digits) for end in ends]
        yield f"conf/preset/{kind}_{name}_v6e8_v1.yaml", "Time: an estimate of {} s a step ({} to {}).", figures
        if kind == "t2v":
            yield f"conf/preset/i2v_{name}_v6e8_v1.yaml", "estimated at {} s ({} to {}); nobody", figures
    for name, what, case, peer in (
        ("HunyuanVideo 1.5, 848 x 480 x 121, one forward pass", "one forward", "hunyuan15-480p", "b"),
        ("the same, given only the valid tokens and no mask", "one forward", "hunyuan15-480p", "v"),
        ("FLUX.1 dev, 1024 x 1024, one forward pass", "one forward", "flux1-dev", "b"),
    ):
        yield results, f"| {name} | {{}} s | {{}} s | {{}} |", compared(OTHERS, what, case, peer)
    whole, part = (FLOORS["hunyuan15-480p", what] for what in ("one forward", "of it, attention and products"))
    text = "take {} s of HunyuanVideo's {} s, so that it is within {} % of them; of FLUX's {} s they take {}."
    flux = [f"{FLOORS['flux1-dev', what]:.3f}" for what in ("one forward", "of it, attention and products")]
    yield results, text, [f"{part:.2f}", f"{whole:.2f}", f"{100 * (whole / part - 1):.1f}", *flux]
    time = row(OTHERS, "one forward", "flux1-dev", "c")["seconds"]
    yield "conf/preset/t2i_flux1_dev_1024_h200_v2.yaml", "Time: {} s a step", [seconds(time)]
    figures = compared(ANIMATE, "one forward", "animate-14b-720p", "b")
    yield results, "| Wan 2.2 Animate 14B, 1280 x 720 x 77, one forward pass | {} s | {} s | {} |", figures
    yield "conf/preset/animate_14b_720p_h200_v1.yaml", "Time: {} s a step of a segment of 77 frames.", figures[1:2]
    figures = compared(OTHERS, "one forward", "hunyuan15-480p", "v")
    text = "| HunyuanVideo 1.5, 848 x 480 x 121, one forward pass, diffusers without its mask | {} s | {} s | {} |"
    yield "README.md", text, figures
    text = "| HunyuanVideo 1.5's VAE decode, 848 x 480 x 121, bf16 | {} s, {} GiB | {} s, {} GiB | {} |"
    yield results, text, compared(OTHERS, "decode", "hunyuan15-480p", "b", memory=True)
    for name, what, result, case in (
        ("VAE decode, 480p, float32", "VAE decode float32", GPU, "1.3b-480p"),
        ("VAE decode, 480p, bf16", "VAE decode bfloat16", GPU, "1.3b-480p"),
        ("VAE encode of a picture and 80 frames, 480p, float32", "VAE encode float32", FAMILY, "i2v-14b-480p"),
        ("VAE decode, Wan 2.2's, 1280 x 704 x 121, float32", "VAE decode float32", FAMILY, "ti2v-5b-704p"),
    ):
        memory = result is GPU  # only there were both sides measured in the same way
        one = "{} s, {} GiB" if memory else "{} s"
        yield results, f"| {name} | {one} | {one} | {{}} |", compared(result, what, case, "a", memory)
    sizes = [
        f"{row(FAMILY, f'VAE {what} float32', case, column)['peak_gib']:.1f}"
        for column in "ac" for what, case in (("encode", "i2v-14b-480p"), ("decode", "ti2v-5b-704p"))
    ]
    text = "encoding takes diffusers {} GiB and Wan 2.2's decoder {}, this project {} and {} by XLA's account"
    yield results, text, sizes
    yield results, "| text encoder, two prompts of 512 tokens, bf16 | {} ms | {} ms | {} |", encoded()
    text = "| process start to the first step, 1.3B, 480p, compiled before | {} s | {} s | {} |"
    first, whole = map(started, STARTS)
    yield results, text, first
    yield results, "| process start to the frames, 4 steps | {} s | {} s | {} |", whole
    yield "README.md", "| process start to the first step, 1.3B, 480p | {} s | {} s | {} |", first
    known = [row(START, f"{what}, known prompt", "1.3b-480p", "c")["seconds"] for what in STARTS]
    yield results, "with a prompt met before {} s and {} s", [f"{value:.1f}" for value in known]
    text = "the first step after {} s where diffusers takes {}, four steps' frames after {} ({})"
    yield "docs/start.md", text, [first[1], first[0], whole[1], whole[0]]
    yield "docs/start.md", "with a prompt met before {} and {} s", [f"{value:.1f}" for value in known]
    video = row(START, "prompt to video.mp4, four steps without guidance", "1.3b-480p", "c")
    parts = [video["seconds"], *(video["parts"][name] for name in ("denoise", "decode"))]
    text = "in four steps without guidance: {} s (`--only videos`; {} s of it denoising, {} decoding)"
    yield results, text, [f"{value:.2f}" for value in parts]
    floors = [row(GPU, "guided step", case, "c")["seconds"] / row(GPU, FLOOR, case, "c")["seconds"] for case in CASES]
    over = [f"{100 * (share - 1):.1f}" for share in (min(floors), max(floors))]
    yield results, "within {} to {} % of its floor", over
    cudnn = [float(lead) for tokens in (32760, 75600) for lead in leads("hopper", tokens, "cudnn")]
    text = "What makes it {} to {} times as fast as cuDNN"
    yield "kernels/README.md", text, [f"{lead:.2f}" for lead in (min(cudnn), max(cudnn))]
    yield from cache_claims()
    yield from cpu_claims()
    yield from live_claims()
    yield from precision_claims()
    yield from attention_claims(results)
    yield from sparse_claims()
    yield from plan_claims()
    for dtype, name in (("bfloat16", "bf16"), ("float32", "float32")):
        figures = [f"{value:.2f}" for value in PEERS["vae_decode_seconds"][dtype].values()]
        yield results, f"| VAE decode, 480p, {name}, the same day | {{}} s | {{}} s | {{}} s |", figures
    for case, digits, minutes in (("1.3b-480p", ".2f", "s"), ("14b-480p", ".2f", "min"), ("14b-720p", ".1f", "min")):
        file = f"conf/preset/t2v_{case.replace('.', '_').replace('b-', 'b_')}_h200_v1.yaml"
        yield file, "Time: {} s a step, {} times as fast as diffusers", preset(case, digits, [])
        whole = 50 * row(GPU, "guided step", case, "c")["seconds"]
        text = "so 50 steps take {} s." if minutes == "s" else "so 50 steps take {} minutes."
        yield file, text, [f"{whole if minutes == 's' else whole / 60:.0f}"]
        memory = row(GPU, "guided step", case, "c")["peak_gib"]
        yield file, "Memory of the denoising program: {} GiB.", [f"{memory:.1f}"]


def cache_claims():
    for one in read("quality_coarse")["rows"]:
        figures = [f"{one['forwards']:.0f}"]
        for aspect in ("colour", "shape", "motion"):
            low, high = one[aspect]["interval"]
            figures += [f"{100 * one[aspect]['rate']:.1f}", f"{100 * low:.0f}", f"{100 * high:.0f}"]
        yield "docs/quality.md", f"\n| {one['mode']} | {{}} |" + " {} ({}–{}) |" * 3, figures
    for name, case, modes in (("14B, 480p", "14b-480p", 2), ("1.3B, 480p", "1.3b-480p", 1)):
        step = row(GPU, "guided step", case, "c")["seconds"]
        what = ("denoise, magcache, 50 steps", "denoise, magcache and guidance, 50 steps")[:modes]
        less = [f"{row(DENOISE, one, case, 'c')['seconds']:.1f}" for one in what]
        text = f"| {name} | {{}} s (50 x {{}} s) |" + " {} s |" * modes
        yield "docs/quality.md", text, [f"{50 * step:.0f}", f"{step:.2f}", *less]


def precision_claims():
    page = "docs/precision.md"
    for size in ("480p", "720p"):
        exact, fp8 = (row(EIGHT, what, f"14b-{size}", "c") for what in ("guided step", "guided step, fp8"))
        figures = [seconds(exact["seconds"]), seconds(fp8["seconds"]), ratio([exact, fp8])]
        memory = [f"{one['peak_gib']:.1f}" for one in (exact, fp8)]
        yield page, f"| 14B, {size} | {{}} s | {{}} s | {{}} | {{}} | {{}} |", figures + memory
    beside = [row(EIGHT, "guided step", "14b-480p", column)["seconds"] for column in "cb"]
    text = "A later run with it, diffusers beside it, took {} s (14B, 480p) where diffusers took {} s"
    yield "docs/results.md", text, [seconds(value) for value in beside]
    (errors,) = [row for row in EIGHT["rows"] if row["what"] == "error against float32"]
    figures = [f"{100 * errors['project']:.2f}"]
    for mode in ("int8_weights", "fp8"):
        figures += [f"{100 * errors[mode]:.2f}", f"{errors[mode] / errors['project']:.2f}"]
    yield page, "bfloat16 {} %, `int8_weights` {} % ({} times), `fp8` {} % ({} times)", figures
    swept = read("outliers_demo")["rows"]
    for factor in (None, 1, 10, 30, 100, 1000, 10_000, 100_000):
        found = {one["mode"]: one for one in swept if one["factor"] == factor}
        figures = [f"{found['bf16']['peak']:,.0f}", f"{found['bf16']['psnr']:.1f}"]
        for mode in ("int8_weights", "int8", "fp8"):
            figures += [f"{found[mode]['times_bf16']:.1f}", f"{found[mode]['psnr']:.1f}"]
        name = "as it was" if factor is None else f"{factor:,}"
        yield page, f"| {name} | {{}} | {{}} dB |" + " {}, {} dB |" * 3, figures
    for mode in ("int8", "int8_weights", "fp8"):
        rows = {one["factor"]: one for one in read("outliers_1_3b")["rows"] if one["mode"] == mode}
        yield page, f"`{mode}` {{}}, {{}}, {{}}", [f"{rows[factor]['times_bf16']:.1f}" for factor in (10, 100, 100_000)]
    for judged in read("quality_precision")["rows"][1:]:
        kind, mode = judged["mode"].split()
        name = f"`precision={mode}`" if kind == "precision" else "transformer in bfloat16"
        figures = [f"{judged['psnr']:.1f}", f"{judged['psnr_p5']:.1f}", f"{judged['ssim']:.3f}"]
        yield page, f"| {name} | {{}} ({{}}) | {{}} |", figures


def spread(seconds: dict, digits: str = ".2f") -> list[str]:
    """The likely figure of an estimate, then the lowest and the highest."""
    return [format(seconds[end], digits) for end in ("likely", "low", "high")]


def sparse_claims():
    """Sparse attention on an H200: benchmarks/sparse_gpu.py."""
    seconds = {row["case"]: row["seconds"] for row in read("sparse_gpu")["rows"] if "denoising" in row["what"]}
    large, eight = (f"{seconds[case]:.1f}" for case in ("turbo-14b-720p", "turbo-14b-720p, fp8"))
    small, tiles = (f"{seconds[case]:.2f}" for case in ("turbo-1.3b-480p", "fastwan-1.3b-480p"))
    page, preset = "docs/sparse.md", "conf/preset/t2v_{}_h200_v1.yaml"
    yield page, "| 14B, 720p, keep 0.1 | {} s |", [large]
    yield page, "| the same with `precision=fp8` | {} s |", [eight]
    yield page, "| 1.3B, 480p, keep 0.1 | {} s |", [small]
    yield page, "a list for each tile | {} s |", [tiles]
    yield page, "| FastWan 14B, 720p, keep 0.1 | {} s |", [f"{seconds['fastwan-14b-720p']:.1f}"]
    yield preset.format("fastwan_14b_720p"), "Time: {} s for the three steps", [f"{seconds['fastwan-14b-720p']:.1f}"]
    yield from coarse_claims()
    text = "Time: {} s for the four steps, with precision=fp8 on top {} s"
    yield preset.format("turbo_14b_720p"), text, [large, eight]
    yield preset.format("turbo_1_3b_480p"), "Time: {} s for the four steps", [small]
    yield preset.format("fastwan_1_3b_480p"), "Time: {} s for the three steps", [tiles]


def plan_claims():
    """Estimates of TPUs: benchmarks/plans.py."""
    page, steps = "docs/plans.md", {name: one["estimate"]["seconds_per_step"] for name, one in PLANS.items()}
    for name, one in PLANS.items():
        parts = one["estimate"]["parts"]["likely"]
        words = "-attention kernel", "product"
        kernels = [sum(value for part, value in parts.items() if word in part) for word in words]
        waits = parts["communication"]
        figures = [f"{value:.2f}" for value in (*kernels, waits, sum(parts.values()) - sum(kernels) - waits)]
        told = one["compiled"]
        held = sum(told[f"{kind}_bytes"] for kind in ("argument", "temporary", "output", "code")) / 2**30
        row = f"`preset={name}` | **{{}}** | {{}} to {{}} | {{}} | {{}} | {{}} | {{}} | {{}} |"
        yield page, row, [*spread(steps[name]), *figures, f"{held:.1f}"]
        if " " not in name:
            text = "Time: an estimate of {} s a step ({} to {}"
            yield f"conf/preset/{name}.yaml", text, spread(steps[name])
        if (rates := one["estimate"].get("frames_per_second")) is not None:
            figures = [f"{rates[end]:.1f}" for end in ("likely", "high", "low")]  # the longest time is the lowest rate
            yield f"conf/preset/{name}.yaml", ", {} frames a second ({} to {})", figures
            yield "docs/live.md", f"`preset={name}` {{}} frames a second ({{}} to {{}})", figures
        if "4step" in name:
            yield f"conf/preset/{name}.yaml", "so {} s for four", [f"{4 * steps[name]['likely']:.1f}"]
    for name, of in (
        ("flf2v_14b_720p_v6e8_v1", "t2v_14b_720p_v6e8_v1"), ("i2v_14b_720p_v6e8_v1", "t2v_14b_720p_v6e8_v1"),
        ("i2v_14b_480p_v6e8_v1", "t2v_14b_480p_v6e8_v1"),
    ):
        if of in steps:
            yield f"conf/preset/{name}.yaml", "estimated at {} s ({} to {}); nobody", spread(steps[of])
    alone = steps["i2v_14b_720p_v6e8_v1 guidance_scale=1 mesh.axes.dp=1 mesh.axes.sp=8"]["likely"]
    times = f"{steps['animate_14b_720p_v6e8_v1']['likely'] / alone:.2f}"
    yield page, "Animate's step takes {} times as long as I2V-14B's", [times]
    for name in ("t2v_a14b_720p_v6e8_v1", "i2v_a14b_720p_v6e8_v1"):
        text = "Time: an estimate of {} s a step ({} to {}), that of t2v_14b_720p_v6e8_v1"
        yield f"conf/preset/{name}.yaml", text, spread(steps["t2v_14b_720p_v6e8_v1"])
    exact = "t2v_14b_720p_v6e8_v3"
    text = "estimated at {} s ({} to {}) with factors of rank 64 and {} s ({} to {}) without"
    yield "docs/adapters.md", text, [*spread(steps[f"{exact} adapter.mode=beside"]), *spread(steps[exact])]
    for name in ("t2v_turbo_14b_720p_v6e8_v2", "t2v_turbo_14b_720p_v7x8_v2"):
        text = f"(`preset={name}`) a step takes {{}} s by estimate ({{}} to {{}}), so four take {{}} s"
        yield "docs/sparse.md", text, [*spread(steps[name]), f"{4 * steps[name]['likely']:.1f}"]
    text = "{} s ({} to {}) at 720p where bfloat16 takes {} ({} to {})"
    both = steps["t2v_14b_720p_int8_v6e8_v5"], steps["t2v_14b_720p_v6e8_v5"]
    yield "docs/precision.md", text, [figure for each in both for figure in spread(each)]
    coarse = steps[f"{exact} resolution.height=352 resolution.width=640"]
    both = [f"{38 * coarse[end] + 12 * steps[exact][end]:.0f}" for end in ("likely", "low", "high")]
    text = "on a v6e-8: {} s ({} to {}), where as many exact ones take {} s"
    yield "docs/quality.md", text, [*both, f"{50 * steps[exact]['likely']:.0f}"]
    text = "| 14B, 720p, v6e-8 | {} s ({} to {}) | {} s (maxdiffusion, Wan 2.2), {} to {} s (the scripts it replaces) |"
    peer, scripts = TPU["steps"]["maxdiffusion"], TPU["steps"]["replaced scripts"]
    measured = {size: [f"{value:.2f}" for value in scripts[size]["seconds_per_step"]] for size in ("720p", "480p")}
    v6e, v7x = (f"{peer[chips]['seconds_per_step']:.2f}" for chips in ("v6e-8", "v7x-8"))
    yield page, text, [*spread(steps["t2v_14b_720p_v6e8_v5"]), v6e, *measured["720p"]]
    text = "| 14B, 480p, v6e-8 | {} s ({} to {}) | {} to {} s (the scripts it replaces) |"
    yield page, text, [*spread(steps["t2v_14b_480p_v6e8_v4"]), *measured["480p"]]
    text = "| 14B, 720p, four TPU7x chips | {} s ({} to {}) | {} s (maxdiffusion, Wan 2.2) |"
    yield page, text, [*spread(steps["t2v_14b_720p_v7x8_v4"]), v7x]
    text = "takes {} s by estimate ({} to {}) instead of {} ({} to {}), of which communication is {} s instead of {} "
    both = [f"t2v_14b_720p_v6e8_v{version}" for version in (4, 3)]
    waits = [f"{PLANS[name]['estimate']['parts']['likely']['communication']:.2f}" for name in both]
    yield "kernels/README.md", text, [*(figure for name in both for figure in spread(steps[name])), *waits]
    text = "longer stretches of code in attention {} ({} to {}) (`…_v5`"
    yield "kernels/README.md", text, spread(steps["t2v_14b_720p_v6e8_v5"])
    yield from accuracy_claims(page, steps, PLANS[exact]["estimate"]["assumed"])
    for name, row in read("plan_memory_v6e8")["vmem_bytes"].items():
        shown = f"`{name}`" if name.endswith("_kernel") else name
        yield page, f"\n| {shown} | {{}} | {{}} |", [f"{row['used'] / 2**20:.1f}", f"{row['limit'] / 2**20:.0f}"]


def accuracy_claims(page: str, steps: dict, assumed: dict):
    """What the method predicts of programs and ops that others have timed, and of this project's for the same work."""
    scripts = TPU["steps"]["replaced scripts"]

    def predicted(**static: float) -> dict[str, float]:
        """Low, likely and high, from static figures by the assumption that each is multiplied by."""
        sent = static.pop("communication", 0)
        work = {end: sum(factors[name] * value for name, value in static.items()) for end, factors in assumed.items()}
        return {end: work[end] / factors["clock"] + sent / factors["link"] for end, factors in assumed.items()}

    for size in ("720p", "480p"):
        found, measured = predicted(**scripts[size]["static"]), scripts[size]["seconds_per_step"]
        shares = [f"{value / found['likely']:.2f}" for value in measured]
        text = f"| the replaced scripts' layout, 14B, {size}, v6e-8 "
        text += "| {} s ({} to {}) | {} to {} s | {} to {} |"
        yield page, text, [*spread(found), *(f"{value:.2f}" for value in measured), *shares]
    for what, op, kind, static, measured, unit in (
        ("XLA's product 8192 × 8192 × 8192, v6e, million cycles", 0, "xla", "xla_cycles", "cycles", 1e6),
        ("the same, TPU7x", 1, "xla", "xla_cycles", "cycles", 1e6),
        ("JAX's splash attention, v6e, thousand cycles a grid step", 2, "attention", "bundles", "cycles", 1e3),
        ("maxdiffusion's ring attention, TPU7x, ms a hop", 3, "attention", "static_milliseconds", "milliseconds", 1),
    ):
        static, measured = (TPU["chips"][op][key] / unit for key in (static, measured))
        found = predicted(**{kind: static})
        figures = [*spread(found), f"{measured:.2f}", f"{measured / found['likely']:.2f}"]
        yield page, f"| {what} | {{}} ({{}} to {{}}) | {{}} | {{}} |", figures
    plans = {name: one["seconds_per_step"] for name, one in read("families_plans")["presets"].items()} | steps
    hunyuan = "HunyuanVideo 1.5, 720p, 121 frames, v6e-8: torchax scripts, heads over tp"
    layout = "the same, with this project's kernel in that layout"
    as_theirs = "t2v_hunyuan15_720p_v6e8_v1 sharding=tp products=xla mesh.axes={dp:1,sp:1,tp:8}"
    flux = "FLUX.1 dev, v6e-8: maxdiffusion, batch not stated"
    for what, name, peer, chips in (
        ("Wan 2.2 A14B, 720p, v6e-8: maxdiffusion", "t2v_14b_720p_v6e8_v5", "maxdiffusion", "v6e-8"),
        ("Wan 2.2 A14B, 720p, four TPU7x chips: maxdiffusion", "t2v_14b_720p_v7x8_v4", "maxdiffusion", "v7x-8"),
        (hunyuan, "t2v_hunyuan15_720p_v6e8_v1", "hunyuan scripts", "v6e-8"),
        (layout, as_theirs, "hunyuan scripts", "v6e-8"),
        (flux, "t2i_flux1_dev_1024_v6e8_v1", "maxdiffusion flux", "v6e-8"),
    ):
        measured, found = TPU["steps"][peer][chips]["seconds_per_step"], plans[name]
        figures = [*spread(found, ".3f"), f"{measured:.3f}", f"{measured / found['likely']:.2f}"]
        yield page, f"| {what} | {{}} s ({{}} to {{}}) | {{}} s | {{}} |", figures


def coarse_claims():
    """Coarse first on an H200."""
    rows = {(row["case"], row["what"]): row for row in read("sparse_gpu")["rows"]}
    for name, case, shift in (
        ("1.3B, 832 x 480, shift 3", "coarse-1.3b-480p", 3), ("1.3B, 832 x 480, shift 5", "coarse-1.3b-480p", 5),
        ("14B, 1280 x 704, shift 5", "coarse-14b-704p", 5),
    ):
        steps = [rows[case, what]["seconds"] for what in ("a coarse step", "a full step")]
        total = rows[case, f"50 steps by these, shift {shift}"]
        figures = [*(f"{one:.2f}" for one in steps), str(total["coarse_steps"]), f"{total['seconds']:.0f}"]
        figures.append(f"{total['times_as_fast']:.1f}")
        yield "docs/quality.md", f"| {name} | {{}} s | {{}} s | {{}} | {{}} s | {{}} |", figures


def live_claims():
    for name, case in (
        ("1.3B", "1.3b-480p"), ("1.3B, `vae=tiny`", "1.3b-480p, tiny VAE"),
        ("14B, `precision=fp8`, a window of 6", "14b-480p, fp8, window 6"),
        ("14B, `precision=fp8`, a window of 6, `vae=tiny`", "14b-480p, fp8, window 6, tiny VAE"),
    ):
        (found,) = [row for row in read("live_gpu")["rows"] if row["case"] == case]
        rates = [f"{found[key]:.1f}" for key in ("frames_per_second", "frames_per_second_between_chunks")]
        figures = [*rates, f"{found['first_frames_seconds']:.2f}", f"{found['gap_ratio']:.2f}"]
        yield "docs/live.md", f"\n| {name} | {{}} | {{}} | {{}} s | {{}} medians |", figures
    rates = json.loads((ROOT / "models/demo_live/metrics.json").read_text())
    text = "right in {} %, {} % and {} %\nbefore the change of the prompt, in {} %, {} % and {} % after it"
    aspects, parts = ("colour", "shape", "motion"), ("held_out", "after_change")
    yield "docs/live.md", text, [f"{100 * rates[part][aspect]:.1f}" for part in parts for aspect in aspects]
    tiny = json.loads((ROOT / "models/demo/tiny_vae/metrics.json").read_text())
    figures = [str(tiny["videos"]), *(f"{tiny[key]:.1f}" for key in ("psnr_db", "psnr_db_least", "own_psnr_db"))]
    text = "Of {} videos of 65 frames\nits own are {} dB from those that were drawn, {} at least"
    yield "docs/models.md", f"{text}; those of the exact decoder, which was taught 17, {{}} dB", figures
    yield "models/demo/README.md", f"{text.replace(chr(10), chr(10) + '  ')}; those of the VAE itself {{}} dB", figures
    (found,) = read("live_cpu")["rows"]
    figures = [f"{found['frames_per_second']:.0f}", f"{found['first_frames_seconds']:.2f}"]
    yield "docs/live.md", "On two cores it makes {} frames a second, the first after {} s", figures
    found = read("live_memory_cpu")
    sizes = [f"{size / 1e9:.2f}" for size in found["anonymous"]]
    text = "Of {} frames of the embedded model, {} minutes on two\n  busy cores, the process held {} GB"
    figures = [str(found["frames"]), f"{found['seconds'] / 60:.0f}", *sizes]
    yield "docs/live.md", f"{text} at the eighth chunk and at most {{}} GB until it had ended", figures


def cpu_claims():
    """The demo on two cores: runs after the first, with warm caches."""
    def median(runs: str, key: str, digits: str = ".1f") -> str:
        return format(statistics.median(run[key] for run in CPU[runs][1:]), digits)

    whole, four, first = median("runs", "wall"), median("runs in four steps", "wall"), CPU["runs"][0]["wall"]
    text = "{} s for a whole video, {} s of it outside denoising and decoding, and {} s the first time"
    yield "docs/start.md", text, [whole, median("runs", "outside", ".2f"), f"{first:.0f}"]
    yield "docs/start.md", "(`adapter=demo_4step`) {} s", [four]
    yield "README.md", "{} s from command to video on two cores", [four]
    yield "conf/preset/t2v_demo_128_cpu_v2.yaml", "Time: {} s from the second time on", [whole]
    took = [f"{CPU['runs'][0]['start'][part]:.1f}" for part in ("imports", "devices")]
    yield "docs/start.md", "the imports took {} s and the devices {} s", took
    rates = [f"{CPU['reading'][key]:.2f}" for key in ("weights_gbs", "plain_gbs")]
    yield "docs/start.md", "from disk at {} GB/s where one plain reader gets {}.", rates


def attention_claims(results: str):
    for lost, text in (("one", "one lost row {} to {} times"), ("all", "all rows lost {} to {} times")):
        shares = [row["milliseconds"][f"{lost} lost"] / row["milliseconds"]["hopper"] for row in ATTENTION["rows"]]
        yield "kernels/README.md", text, [f"{share:.2f}" for share in (min(shares), max(shares))]
    for tokens in (32760, 75600):
        text = f"| H200, Pallas kernel, {tokens:,} tokens, 12 / 40 heads | {{}} / {{}} times as fast | {{}} / {{}} |"
        yield results, text, [*leads("hopper", tokens), *leads("hopper", tokens, "cudnn")]
        for kernel in ("hopper", "cudnn"):
            text = f"{tokens:,} tokens: 12 heads {{}}, 40 heads {{}}"
            yield f"conf/attention/{kernel}.yaml", text, leads(kernel, tokens)
    for measured in PEERS["attention_tflops"]:
        figures = [str(measured[name]) for name in ("flash3", "hopper", "torch", "flash3_fp8")]
        yield results, f"| {measured['tokens']:,} × {measured['heads']} | {{}} | {{}} | {{}} | {{}} |", figures


def place(text: str) -> re.Pattern:
    """A pattern that matches a claim in its file, whatever its figures."""
    return re.compile(NUMBER.join(map(re.escape, text.split("{}"))))


def compare(write: bool = False) -> list[str]:
    """The differences from the results, one line each; with `write` they are corrected."""
    differences = []
    for file, text, figures in claims():
        path, wanted = ROOT / file, text.format(*figures)
        content = path.read_text()
        found = place(text).findall(content)
        if len(found) != 1:
            differences.append(f"{file}: {len(found)} places for {text.strip()!r}")
        elif found[0] != wanted:
            differences.append(f"{file}: {found[0].strip()!r} should be {wanted.strip()!r}")
            if write:
                path.write_text(content.replace(found[0], wanted))
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace figures that differ from the results")
    differences = compare(parser.parse_args().write)
    print("\n".join(differences) or "every figure is that of the results")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
