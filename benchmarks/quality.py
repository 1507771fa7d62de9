"""What modes that compute less cost in quality, and what they save: the demo model's held-out prompts.

    python benchmarks/quality.py outputs/quality                    # 73 prompts x 2 seeds; resumes where it stopped
    python benchmarks/quality.py outputs/quality --modes magcache   # some of the modes
    python benchmarks/quality.py --judge --modes coarse             # rates alone: for modes that begin with other noise
    python benchmarks/quality.py --smoke                            # one prompt, one mode, few steps

The reference is the exact float32 video of 50 steps. Each mode is compared with the alternative at equal cost: exact
steps with as many forwards. Writes quality.json, quality.md and index.html, where videos play side by side.
"""
import argparse
import datetime
import json
import math
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import demo_world as world  # noqa: E402

import wan_torchax  # noqa: E402

wan_torchax.leave_sys_path()
from wan_torchax.config.commandline import compose, rewrite  # noqa: E402
from wan_torchax.config.inputs import with_texts  # noqa: E402
from wan_torchax.events import Stepped  # noqa: E402
from wan_torchax.records import media, provenance  # noqa: E402
from wan_torchax.session import session  # noqa: E402

STEPS = 50
MODES = {
    "magcache E0.06 K2": ["cache=magcache", "cache.threshold=0.06"],
    "magcache E0.12 K2": ["cache=magcache"],
    "magcache E0.24 K6": ["cache=magcache", "cache.threshold=0.24", "cache.most_in_a_row=6"],
    "easycache 0.02": ["cache=easycache"],
    "easycache 0.05": ["cache=easycache", "cache.threshold=0.05"],
    "guidance every 5th": ["cache=guidance"],
    "guidance in 0 to 0.6": ["cache.guidance_stop=0.6"],
    "magcache + guidance": ["cache=magcache_guidance"],
    "coarse first 0.01": ["pipeline=t2v_coarse", "coarse_delta=0.01"],
    "coarse first 0.05": ["pipeline=t2v_coarse"],
    "bf16 transformer": ["model.dtype.transformer=bfloat16"],
} | {  # four of its six blocks
    f"precision {name}": [f"precision={name}", "precision.first=1", "precision.last=1"]
    for name in ("int8_weights", "int8", "fp8")
}
FORWARDS = {"full": 2, "prompt": 1, "reuse": 0, "coarse": 0.5}  # of a step; coarse ones have a quarter of the tokens
ASPECTS = ("colour", "shape", "motion")
SHOWN = 6  # prompts on the page


# ---------------------------------------------------------------- videos


def make(folder: Path, mode: str, overrides: list[str], clips: list, extra: list[str]) -> list[float]:
    """Make every clip of a mode as <folder>/<mode>/<number>.npy, skipping those that exist; returns the forwards of
    each."""
    place = folder / mode.replace(" ", "_")
    place.mkdir(parents=True, exist_ok=True)
    forwards = json.loads((place / "forwards.json").read_text()) if (place / "forwards.json").is_file() else {}
    composed = compose(rewrite([f"steps={STEPS}", *overrides, *extra, "keep_resident=true"]))
    for number, (prompt, seed) in enumerate(clips):
        file = place / f"{number}.npy"
        if file.is_file() and str(number) in forwards:
            continue
        config = composed.copy()
        config.seed, config.prompt.text = seed, prompt
        config, work = with_texts(config), []

        def note(event, work=work):
            if isinstance(event, Stepped):
                work.append(FORWARDS[event.work])

        resolved = session.resolve(config, config.stages)
        numpy.save(file, session.run(resolved, config.stages, resolved.inputs(), note)["frames"])
        forwards[str(number)] = sum(work)
        (place / "forwards.json").write_text(json.dumps(forwards))
        print(f"\r{mode}: {number + 1} of {len(clips)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [forwards[str(number)] for number in range(len(clips))]


def read(folder: Path, mode: str, number: int) -> numpy.ndarray:
    return numpy.load(folder / mode.replace(" ", "_") / f"{number}.npy")


# ---------------------------------------------------------------- measures


def compare(arguments) -> dict:
    """One clip against the reference, and the judge's verdict."""
    import judge_demo

    folder, mode, number, scene = arguments
    frames, reference = (read(folder, name, number).astype(float) for name in (mode, "exact"))
    errors = ((frames - reference) ** 2).mean(axis=(1, 2, 3))
    verdict = judge_demo.judge(frames.astype(numpy.uint8), scene)
    return {
        "psnr": psnr(errors.mean()), "ssim": ssim(frames, reference), "edges": edge_distance(frames, reference),
        "psnr_by_frame": [psnr(error) for error in errors], **{aspect: bool(verdict[aspect]) for aspect in ASPECTS},
    }


def psnr(error: float) -> float:
    return min(10 * math.log10(255**2 / error), 100.0) if error else 100.0


def ssim(frames, reference) -> float:
    """Structural similarity with a Gaussian window of 1.5 pixels, mean over frames and channels."""
    from scipy.ndimage import gaussian_filter

    def blur(array):
        return gaussian_filter(array, (0, 1.5, 1.5, 0), truncate=3.5)

    first, second = blur(frames), blur(reference)
    variances = blur(frames**2) - first**2 + blur(reference**2) - second**2
    covariance = blur(frames * reference) - first * second
    small, large = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    index = (2 * first * second + small) * (2 * covariance + large)
    return float((index / ((first**2 + second**2 + small) * (variances + large))).mean())


def edge_distance(frames, reference) -> float:
    """A perceptual distance without learned parts: gradients at four scales, relative to the reference's."""
    distance = []
    for scale in (1, 2, 4, 8):
        small = [array[:, ::scale, ::scale] if scale == 1 else pooled(array, scale) for array in (frames, reference)]
        edges = [numpy.stack(numpy.gradient(array, axis=(1, 2))) for array in small]
        distance.append(numpy.abs(edges[0] - edges[1]).mean() / max(numpy.abs(edges[1]).mean(), 1e-6))
    return float(numpy.mean(distance))


def pooled(array, scale):
    frames, height, width, channels = array.shape
    return array.reshape(frames, height // scale, scale, width // scale, scale, channels).mean(axis=(2, 4))


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a rate."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def judged(arguments) -> dict:
    """The judge's verdict on one clip."""
    import judge_demo

    folder, mode, number, scene = arguments
    verdict = judge_demo.judge(read(folder, mode, number), scene)
    return {aspect: bool(verdict[aspect]) for aspect in ASPECTS}


def rates(rows: list[dict]) -> dict:
    shares = {aspect: float(numpy.mean([row[aspect] for row in rows])) for aspect in ASPECTS}
    return {aspect: {"rate": share, "interval": wilson(share, len(rows))} for aspect, share in shares.items()}


def summarise_rates(folder: Path, mode: str, scenes: list, forwards: list[float], pool) -> dict:
    rows = list(pool.map(judged, [(folder, mode, number, scene) for number, scene in enumerate(scenes)], chunksize=4))
    return {"mode": mode, "clips": len(rows), "forwards": float(numpy.mean(forwards)), **rates(rows)}


def summarise(folder: Path, mode: str, scenes: list, forwards: list[float], pool) -> dict:
    jobs = [(folder, mode, number, scene) for number, scene in enumerate(scenes)]
    rows = list(pool.map(compare, jobs, chunksize=4))
    levels = [row["psnr"] for row in rows]
    summary = {
        "mode": mode, "clips": len(rows), "forwards": float(numpy.mean(forwards)), "psnr": float(numpy.mean(levels)),
        "psnr_p5": float(numpy.percentile(levels, 5)), "ssim": float(numpy.mean([row["ssim"] for row in rows])),
        "edges": float(numpy.mean([row["edges"] for row in rows])),
        "psnr_by_frame": numpy.mean([row["psnr_by_frame"] for row in rows], axis=0).round(2).tolist(),
    }
    return summary | rates(rows)


# ---------------------------------------------------------------- what is written


def table(rows: list[dict]) -> str:
    lines = [
        "| mode | forwards | PSNR dB (5th percentile) | SSIM | edges | colour | shape | motion |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = " | ".join(percent(row[aspect]) for aspect in ASPECTS)
        close = " | | "
        if "psnr" in row:
            close = f"{row['psnr']:.1f} ({row['psnr_p5']:.1f}) | {row['ssim']:.3f} | {row['edges']:.3f}"
        lines.append(f"| {row['mode']} | {row['forwards']:.0f} | {close} | {shares} |")
    return "\n".join(lines) + "\n"


def percent(aspect: dict) -> str:
    low, high = aspect["interval"]
    return f"{100 * aspect['rate']:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def page(folder: Path, rows: list[dict], clips: list) -> None:
    """A page with videos of a few prompts side by side, one column per mode, playing in sync."""
    heads = "".join(f"<th>{row['mode']}<br>{row['forwards']:.0f} forwards, {row['psnr']:.1f} dB</th>" for row in rows)
    body = []
    for number in range(0, len(clips), max(len(clips) // SHOWN, 1)):
        cells = []
        for row in rows:
            video = folder / "videos" / f"{row['mode'].replace(' ', '_')}-{number}.mp4"
            video.parent.mkdir(exist_ok=True)
            media.write_video(video, read(folder, row["mode"], number), media.Encoding(8, 18), clips[number][0], {})
            cells.append(f'<td><video src="videos/{video.name}" muted loop autoplay playsinline></video></td>')
        body.append(f"<tr><th>{clips[number][0]}</th>{''.join(cells)}</tr>")
    style = "body{font:14px sans-serif}td video{width:128px}th{font-weight:normal;text-align:left;max-width:14em}"
    play = "document.querySelectorAll('video').forEach(video => { video.currentTime = 0; video.play() })"
    html = f"<!doctype html><meta charset=utf-8><title>Quality of modes</title><style>{style}</style>"
    html += f'<script>addEventListener("load", () => {play})</script>'
    (folder / "index.html").write_text(f"{html}<table><tr><th></th>{heads}</tr>{''.join(body)}</table>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/quality"))
    parser.add_argument("--modes", nargs="*", default=list(MODES), help="names, or parts of them")
    parser.add_argument("--prompts", type=int, help="use only this many")
    parser.add_argument("--seeds", type=int, default=2, help="of each prompt")
    parser.add_argument("--make", action="store_true", help="only make videos: several processes may share the modes")
    parser.add_argument("--judge", action="store_true", help="no comparison with exact videos of 50 steps, nor a page")
    parser.add_argument("--no-videos", action="store_true", help="no page, for machines without ffmpeg")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    extra, held_out = [], world.held_out_prompts()[: 1 if options.smoke else options.prompts]
    if options.smoke:
        extra = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=8"]
    seeds = range(options.seeds)
    clips = [(prompt, number + 1000 * seed) for seed in seeds for number, (prompt, _) in enumerate(held_out)]
    scenes = [scene for _ in seeds for _, scene in held_out]
    chosen = ["easycache 0.02"] if options.smoke else options.modes
    modes = {name: MODES[name] for name in MODES if any(part in name for part in chosen)}
    rows: list[dict] = []
    summary = summarise_rates if options.judge else summarise
    with ProcessPoolExecutor(mp_context=__import__("multiprocessing").get_context("spawn")) as pool:
        if not (options.make or options.judge) or not modes:
            exact = make(options.folder, "exact", [], clips, extra)
        if not (options.make or options.judge):
            rows.append(summarise(options.folder, "exact", scenes, exact, pool))
        for name, overrides in modes.items():
            made = {name: make(options.folder, name, overrides, clips, extra)}
            steps = round(numpy.mean(made[name]) / 2)
            equal = f"exact in {steps} steps"
            if steps < STEPS and not options.smoke and equal not in [row["mode"] for row in rows]:
                made[equal] = make(options.folder, equal, [f"steps={steps}"], clips, extra)
            if not options.make:
                rows += [summary(options.folder, mode, scenes, forwards, pool) for mode, forwards in made.items()]
    if options.make:
        return
    import jax

    report = {
        "command": f"python benchmarks/quality.py {' '.join(sys.argv[1:])}", "date": str(datetime.date.today()),
        "device": jax.devices()[0].device_kind, "machine": platform.machine(), "versions": provenance.versions(),
        "n": len(clips), "steps": STEPS, "rows": rows,
    }
    (options.folder / "quality.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.folder / "quality.md").write_text(table(rows))
    if not (options.no_videos or options.judge):
        page(options.folder, rows, clips)
    print(table(rows))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
