"""Whether videos denoised as a batch (serve.batch) take less time than one after the other.

    python benchmarks/serve_batch.py                                        # the demo, batches of one to four
    python benchmarks/serve_batch.py model=wan21_t2v_1_3b resolution=480p   # another model, by overrides
    python benchmarks/serve_batch.py --smoke                                # small and short

Medians over all steps, batch sizes interleaved; CPU seconds are those of all threads of this process. Ends with a JSON
line.
"""
import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wan_torchax  # noqa: E402

wan_torchax.leave_sys_path()
from wan_torchax.config.commandline import compose, rewrite  # noqa: E402
from wan_torchax.events import Stepped  # noqa: E402
from wan_torchax.records.provenance import versions  # noqa: E402
from wan_torchax.session import session  # noqa: E402
from wan_torchax.stages.denoise import Denoise  # noqa: E402

SMOKE = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=2"]


def denoise(resolved, values: dict, videos: int) -> tuple[list[float], float]:
    """Seconds of each step of a batch of videos, and CPU seconds of all steps."""
    steps, began = [], time.process_time()

    def emit(event):
        if isinstance(event, Stepped) and event.video == 0:
            steps.append(event.seconds)

    several = replace(resolved, seeds=tuple(range(videos)))
    session.run(several, ["denoise"], Denoise.joined([values] * videos, ["embeddings"]), emit)
    return steps, time.process_time() - began


def measure(resolved, values: dict, sizes: list[int], repeats: int) -> list[dict]:
    """A row for every batch size. The first round compiles and does not count."""
    steps, processor = ({videos: [] for videos in sizes} for _ in range(2))
    for turn in range(repeats + 1):
        for videos in sizes:
            seconds, used = denoise(resolved, values, videos)
            if turn:
                steps[videos] += seconds
                processor[videos].append(used / len(seconds))
    return [row(videos, steps[videos], processor[videos]) for videos in sizes]


def row(videos: int, steps: list[float], processor: list[float]) -> dict:
    median = statistics.median(steps)
    return {
        "videos": videos, "n": len(steps), "step_seconds": round(median, 4),
        "step_seconds_a_video": round(median / videos, 4),
        "step_seconds_a_video_best": round(min(steps) / videos, 4),
        "cpu_seconds_a_video_and_step": round(statistics.median(processor) / videos, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--most", type=int, default=4, help="largest batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    sizes, repeats = ([1, 2], 1) if options.smoke else (list(range(1, options.most + 1)), options.repeats)
    config = compose(rewrite(["sweep.active=true", *(SMOKE if options.smoke else []), *options.overrides]))
    names = ["text", "denoise"]
    resolved = session.resolve(config, names)
    values = session.run(resolved, ["text"], resolved.inputs())
    rows = measure(resolved, values, sizes, repeats)
    print("videos  seconds a step  of each video  CPU seconds of each")
    for line in rows:
        figures = (line[key] for key in ("step_seconds", "step_seconds_a_video", "cpu_seconds_a_video_and_step"))
        print("{:6}  {:14.3f}  {:13.3f}  {:19.3f}".format(line["videos"], *figures))
    size = f"{config.resolution.width}x{config.resolution.height}x{config.resolution.frames}"
    device = resolved.mesh.devices.flat[0].device_kind
    print(json.dumps({
        "command": " ".join(["python", "benchmarks/serve_batch.py", *sys.argv[1:]]), "device": device,
        "versions": versions(), "model": config.model.name, "size": size, "rows": rows,
    }))


if __name__ == "__main__":
    main()
