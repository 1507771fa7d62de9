"""How fast a run starts: reading weights against a plain reader, and whole runs of the demo, with cold and warm caches.

    python benchmarks/start.py                              # 4 GiB in the temporary folder; runs of the demo
    python benchmarks/start.py --gib 16 --folder /data      # on the disk with the checkpoints
    python benchmarks/start.py --smoke                      # small, no runs

The file is dropped from the page cache before each read. Medians, the two readers interleaved; ends with a JSON line.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy  # noqa: E402

import wan_torchax  # noqa: E402

wan_torchax.leave_sys_path()
from wan_torchax.runtime.checkpoint import read_header  # noqa: E402
from wan_torchax.runtime.reading import PIECE_BYTES, Load, read_ahead  # noqa: E402

ROW, TENSORS = 4096, 16


def write_file(path: Path, total: int) -> None:
    """Write a safetensors file of random bfloat16 numbers; fsynced when this returns."""
    rows = max(total // (2 * ROW * TENSORS), 1)
    size, random = 2 * ROW * rows, numpy.random.default_rng(0)
    layout = {
        f"{index}": {"dtype": "BF16", "shape": [rows, ROW], "data_offsets": [index * size, (index + 1) * size]}
        for index in range(TENSORS)
    }
    header = json.dumps(layout).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(TENSORS):
            file.write(random.bytes(size))
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Drop the file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(path: Path) -> None:
    """Read from the first byte to the last, into one buffer."""
    buffer = bytearray(PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def read_as_weights(path: Path) -> None:
    """Read like weight loading does, into the memory from which it would be sent."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for _ in read_ahead(Load([stored], "bfloat16", stored.shape, here) for stored in read_header(path).values()):
        pass


def reading(folder: Path, total: int, repeats: int) -> dict[str, float]:
    """GB/s of both readers."""
    rates = {"plain": [], "weights": []}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "model.safetensors"
        write_file(path, total)
        for _ in range(repeats):
            for name, read in {"plain": read_plainly, "weights": read_as_weights}.items():
                forget(path)
                began = time.perf_counter()
                read(path)
                rates[name].append(path.stat().st_size / (time.perf_counter() - began) / 1e9)
    medians = {f"{name}_gbs": round(statistics.median(taken), 3) for name, taken in rates.items()}
    return medians | {"ratio": round(medians["weights_gbs"] / medians["plain_gbs"], 3), "runs": rates}


def runs(repeats: int, *overrides: str) -> list[dict]:
    """`python run.py …`: the first with an empty store, the others with a warm one. `outside`: seconds outside denoise
    and decode."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        places = [f"compile.store={scratch}/store", f"compile.cache_dir={scratch}/jax", f"hydra.run.dir={scratch}/run"]
        for number in range(1 + repeats):
            began, used = time.perf_counter(), cpu_seconds()
            subprocess.run([sys.executable, "run.py", *overrides, *places], cwd=ROOT, check=True, capture_output=True)
            wall, cpu = time.perf_counter() - began, cpu_seconds() - used
            metrics = json.loads(Path(scratch, "run", "metrics.json").read_text())
            outside = wall - metrics["seconds"]["denoise"] - metrics["seconds"]["decode"]
            figures = {"wall": wall, "cpu": cpu, "outside": outside, "peak_host_gib": metrics["peak_host_gib"]}
            rows.append({"run": number} | {key: round(value, 2) for key, value in figures.items()})
            rows[-1]["start"] = metrics["start"]
            print(rows[-1], flush=True)
    return rows


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the weights to read")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to read")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small, no runs")
    options = parser.parse_args()
    total = 2**24 if options.smoke else int(options.gib * 2**30)
    report = {"reading": reading(options.folder, total, options.repeats)}
    print(report["reading"], flush=True)
    if not options.smoke:
        report["runs"] = runs(options.repeats)
        report["runs in four steps"] = runs(options.repeats, "adapter=demo_4step")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
