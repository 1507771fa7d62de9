"""Memory of a process that makes a long live video with the embedded model, until it has ended. On Linux.

    python benchmarks/live_memory.py --out benchmarks/results/live_memory_cpu.json
    python benchmarks/live_memory.py --smoke                    # some seconds

A sample is the seconds since the start, the chunks that are finished, and the process's bytes
(/proc/<pid>/smaps_rollup): anonymous ones, and those of files, which the kernel takes back where they are needed.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import families_gpu  # benchmarks/families_gpu.py

from wan_torchax import ROOT

PROMPT = "a red ball moving right on a blue background"


def memory_of(process: subprocess.Popen) -> dict[str, int]:
    """Bytes; none if the process has just ended."""
    try:
        _, *lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    known = {key: 1024 * int(value) for key, value, *_ in map(str.split, lines)}
    return {"anonymous": known["Anonymous:"], "files": known["Rss:"] - known["Anonymous:"]} if known else {}


def sampled(command: list[str], folder: Path, every: float) -> list[dict]:
    began, samples = time.perf_counter(), []
    with subprocess.Popen([*command, f"hydra.run.dir={folder}"], cwd=ROOT) as process:
        while process.poll() is None:
            chunks = len([*folder.glob("live.*.safetensors")])
            seconds = round(time.perf_counter() - began, 1)
            if memory := memory_of(process):
                samples.append({"seconds": seconds, "chunks": chunks} | memory)
                print(samples[-1], flush=True)
            time.sleep(every)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: status {process.returncode}")
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--frames", type=int, default=16005)
    parser.add_argument("--every", type=float, default=2, help="seconds between samples")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.smoke:
        options.frames, options.every = 165, 0.2
    command = [sys.executable, "run.py", "model=demo_live", f"resolution.frames={options.frames}", f"prompt={PROMPT}"]
    with tempfile.TemporaryDirectory() as scratch:
        samples = sampled(command, Path(scratch) / "run", options.every)
    made = [sample for sample in samples if sample["chunks"] >= 8]  # all is compiled, and the window is full
    report = {"command": " ".join(["python benchmarks/live_memory.py", *sys.argv[1:]]), "n": 1, "device": "CPU"}
    report |= {"versions": families_gpu.versions(), "frames": options.frames, "seconds": samples[-1]["seconds"]}
    report |= {key: [made[0][key], max(one[key] for one in made)] for key in ("anonymous", "files")}  # first and most
    print(json.dumps(report))
    if options.out is not None:
        options.out.write_text(json.dumps(report | {"samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
