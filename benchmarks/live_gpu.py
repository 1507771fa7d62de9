"""Live video on one NVIDIA GPU: frames a second over half a minute of video, from the prompt to bytes that play.

    python benchmarks/live_gpu.py --out live.json
    python benchmarks/live_gpu.py --only "1.3b-480p, tiny VAE"
    python benchmarks/live_gpu.py --only demo --repeats 5       # the embedded model, on any machine
    python benchmarks/live_gpu.py --smoke                       # small shapes of the demo model, on any machine

A case makes one video to compile and warm up, then others with new prompts in the same process, as a server does:
the text is encoded, chunks are denoised and decoded, and fragments appended to live.mp4. Counted from the request.
Random weights, made on the device; the decoder's are faint, as strong noise takes longer to encode than a real video.
"""
import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import families_gpu  # benchmarks/families_gpu.py
import gpu  # benchmarks/gpu.py
import numpy

from wan_torchax import ROOT

HALF_A_MINUTE = ["resolution=480p", "resolution.frames=489"]  # 123 latent frames
VIDEO = [*HALF_A_MINUTE, "model.dtype.vae=bfloat16", "keep_resident=true"]
FOUR_STEPS = ["guidance_scale=1", "scheduler=renoise_linear", "steps=4", "resolution.flow_shift=5"]
LARGE = ["model=wan21_t2v_14b", "pipeline=live", "live=self_forcing", "live.window=6", *FOUR_STEPS, "precision=fp8"]
TINY = ["vae=tiny"]
CASES = {
    "1.3b-480p": ["model=longlive_1_3b", *VIDEO],
    "1.3b-480p, tiny VAE": ["model=longlive_1_3b", *TINY, *VIDEO],
    "14b-480p, fp8, window 6": [*LARGE, *VIDEO],
    "14b-480p, fp8, window 6, tiny VAE": [*LARGE, *TINY, *VIDEO],
}
LAPTOP = {"demo": ["model=demo_live", "resolution.frames=245", "keep_resident=true"]}  # for any machine
SMOKE = [
    "model=demo", "pipeline=live", "live=longlive", *FOUR_STEPS, "resolution.height=64", "resolution.width=64",
    "resolution.frames=57", "keep_resident=true", *TINY,
]
FAINT, LAST = 0.06, {"decoder.conv_out.weight", "decoder.22.weight"}  # the last layers of VAE and tiny VAE


def use_random_weights() -> None:
    """Components get random arrays where they would read a checkpoint."""
    from wan_torchax.runtime.components import Component

    def load(component, specs, emit):
        arrays = families_gpu.random_arrays({name: specs[name] for name in specs.keys() - component.arrays.keys()})
        component.arrays |= arrays | {name: arrays[name] * FAINT for name in LAST & arrays.keys()}

    Component.load, Component.check = load, lambda component: None


def place(config):
    """The config on this machine's devices, with stand-ins for checkpoints; the tokenizer is the demo model's."""
    from omegaconf import OmegaConf

    from wan_torchax.config.graph import Graph
    from wan_torchax.config.resolve import Checkpoint, Job
    from wan_torchax.session import session

    graph, folder = Graph.of(config.pipeline), ROOT / "models/demo"
    architectures = OmegaConf.to_container(config.model.architecture)
    checkpoints = {
        name: Checkpoint(folder / name, architectures[name], "random", folders={"tokenizer": folder / "tokenizer"})
        for name in graph.components(graph.stages)
    }
    return session.place(Job.of(config, checkpoints))


class Fragments:
    """Notes when each fragment of a video is in its file."""

    def __init__(self):
        from wan_torchax.records.growing import Growing

        self.times, write = [], Growing.write

        def noted(growing, *chunk):
            write(growing, *chunk)
            self.times.append(time.perf_counter())

        Growing.write = noted


def make_video(config, folder: Path, fragments: Fragments) -> dict:
    """A request as a server has it, in a process that has started. Seconds are counted from here."""
    from wan_torchax.session import session
    from wan_torchax.tasks.generate import Making
    from wan_torchax.work import AtHand

    fragments.times.clear()
    folder.mkdir()
    began, names = time.perf_counter(), list(config.pipeline.stages)
    with Making(config, folder) as video:
        resolved = place(video.config)
        video.begin(resolved, AtHand())
        with session.open(resolved, names, resolved.inputs(), video.emit) as work:
            for step in work.steps:
                work.run(step)
        video.write(work.result)
    times = numpy.array(fragments.times) - began
    return {"times": times.tolist(), "parts": json.loads((folder / "metrics.json").read_text())["seconds"]}


def measure(case: str, overrides: list[str], repeats: int, scratch: Path) -> dict:
    from wan_torchax.config.live import chunk_frames

    fragments, videos = Fragments(), []
    for number in range(1 + repeats):
        prompt = f"{gpu.PROMPT}, {number} of {case}"  # a new one: embeddings of earlier ones are kept
        config = gpu.configure(*overrides, f"prompt={json.dumps(prompt)}", f"seed={number}")
        videos.append(make_video(config, scratch / f"{case} {number}", fragments))
        first, *_, last = videos[-1]["times"]
        print(f"{case}: video {number}, frames after {first:.3f} to {last:.2f} s; {videos[-1]['parts']}", flush=True)
    warm, (_, later) = videos[1:], chunk_frames(config)
    gaps = numpy.concatenate([numpy.diff(video["times"]) for video in warm])
    frames, ends = config.resolution.frames, [video["times"][-1] for video in warm]
    return {
        "what": "live", "case": case, "n": repeats, "frames": frames,
        "frames_per_second": frames / statistics.median(ends), "spread": [frames / max(ends), frames / min(ends)],
        "frames_per_second_between_chunks": later / statistics.median(gaps),
        "first_frames_seconds": statistics.median(video["times"][0] for video in warm),
        "gap_median": statistics.median(gaps), "gap_p99": float(numpy.percentile(gaps, 99)),
        "gap_ratio": float(numpy.percentile(gaps, 99) / statistics.median(gaps)), "videos": videos,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", nargs="*", choices=[*CASES, *LAPTOP], default=list(CASES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], help="overrides for the configs, e.g. attention=cudnn")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    cases = {"smoke": SMOKE} if options.smoke else {name: (CASES | LAPTOP)[name] for name in options.only}
    report = {"command": " ".join(["python benchmarks/live_gpu.py", *sys.argv[1:]]), "device": families_gpu.device()}
    report |= {"n": options.repeats, "versions": families_gpu.versions(), "rows": []}
    use_random_weights()
    with tempfile.TemporaryDirectory() as scratch:
        for case, overrides in cases.items():
            row = measure(case, [*overrides, *options.set], options.repeats, Path(scratch))
            report["rows"].append(row)
            print({name: value for name, value in row.items() if name != "videos"}, flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
