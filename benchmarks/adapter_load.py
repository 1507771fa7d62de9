"""The cost of merging an adapter while weights load: seconds and peak host memory, on this machine's CPU.

    python benchmarks/adapter_load.py [--folder /data] [--repeats 3]     # 3.2 GB of random float32 weights, rank 64
    python benchmarks/adapter_load.py --smoke                            # two small layers

Writes a checkpoint of Wan's transformer (1.3B wide, 17 layers deep) and an adapter for every linear layer of its
blocks. Each load runs in its own process, through the Session, from files that are not in the page cache, alternating
with and without the adapter. Ends with one JSON line, stored in benchmarks/results/adapter_load.json.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LAYERS, RANK = 17, 64
DTYPES = ("bfloat16", "float32")
SIZES = dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960)
SMALL = dict(num_attention_heads=2, attention_head_dim=16, ffn_dim=64)


def measure(overrides: list[str]) -> dict:
    """Load a transformer in this process."""
    import wan_torchax

    wan_torchax.leave_sys_path()
    from wan_torchax.config.commandline import compose, rewrite
    from wan_torchax.config.validation import validate
    from wan_torchax.records.provenance import peak_host_bytes
    from wan_torchax.session import Session

    config, session = compose(rewrite(overrides)), Session()
    validate(config)
    session.build(session.resolve(config, ["denoise"]), ["denoise"])
    component = session.components["transformer"]
    component.check()
    before, began, worked = peak_host_bytes(), time.perf_counter(), time.process_time()
    component.load(component.specs, lambda event: None)
    seconds, device = time.perf_counter() - began, sum(tensor.bytes for tensor in component.specs.values())
    cpu = time.process_time() - worked
    return {"seconds": seconds, "cpu": cpu, "device": device, "peak": peak_host_bytes(), "before": before}


def make_files(folder: Path, layers: int, small: bool) -> int:
    """Write a transformer with random weights, one file per block, and an adapter; returns the transformer's bytes."""
    import diffusers
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    with torch.device("meta"):
        module = diffusers.WanTransformer3DModel(num_layers=layers, **SMALL if small else SIZES)
    module.save_config(folder / "transformer")
    files, pairs = defaultdict(dict), {}
    for name, weight in module.named_parameters():
        file = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "rest"
        files[file][name] = weight.shape
        if name.startswith("blocks.") and weight.ndim == 2:
            key = f"transformer.{name.removesuffix('.weight')}"
            pairs[f"{key}.lora_A.weight"] = 0.01 * torch.randn(RANK, weight.shape[1])
            pairs[f"{key}.lora_B.weight"] = 0.01 * torch.randn(weight.shape[0], RANK)
    for file, shapes in files.items():
        tensors = {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
        save_file(tensors, folder / "transformer" / f"{file}.safetensors")
    save_file(pairs, folder / "adapter.safetensors")
    return sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors"))


def forget(folder: Path, pattern: str = "*.safetensors") -> None:
    """Drop the files from the page cache."""
    for file in folder.rglob(pattern):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path, layers: int, small: bool, dtype: str, adapted: bool) -> dict:
    """One load in its own process."""
    architecture = f"model.architecture.transformer.num_layers={layers}"
    overrides = [
        "model=wan21_t2v_1_3b", "resolution=480p", f"model.path={folder}", architecture, "mesh.platform=cpu",
        "mesh.axes.tp=1", "attention=xla", f"model.dtype.transformer={dtype}", "prompt=x",
        *(f"model.architecture.transformer.{name}={size}" for name, size in (SMALL if small else SIZES).items()),
        *([f"adapter.style={{path: {folder / 'adapter.safetensors'}, strength: 0.8}}"] if adapted else []),
    ]
    if small:
        return measure(overrides)
    forget(folder)
    command = [sys.executable, __file__, "--load", *overrides]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(answer.stderr[-3000:])
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        return print(json.dumps(measure(sys.argv[2:])))
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", help="where the files are written; by default the temporary folder")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    layers, repeats = (2, 1) if options.smoke else (LAYERS, options.repeats)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        report = {
            "checkpoint_bytes": make_files(folder, layers, options.smoke), "rank": RANK,
            "command": " ".join(["python", *sys.argv]), "device": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": versions(), "n": repeats, "rows": [],
        }
        for dtype in DTYPES[:1] if options.smoke else DTYPES:
            runs = {False: [], True: []}
            for _ in range(repeats):
                for adapted in (False, True):
                    runs[adapted].append(load(folder, layers, options.smoke, dtype, adapted))
            report["rows"].append(row(dtype, runs))
            print(report["rows"][-1], flush=True)
    print(json.dumps(report))


def versions() -> dict[str, str]:
    from wan_torchax.records import provenance

    return provenance.versions()


def row(dtype: str, runs: dict[bool, list[dict]]) -> dict:
    plain, adapted = ([round(run["seconds"], 2) for run in runs[which]] for which in (False, True))
    peak = max(run["peak"] - run["device"] for run in runs[True])
    return {
        "dtype": dtype, "seconds_without": plain, "seconds_with": adapted,
        **{f"cpu_seconds_{word}": median(round(run["cpu"], 1) for run in runs[which])
           for which, word in ((False, "without"), (True, "with"))},
        "ratio": round(median(adapted) / median(plain), 2),
        "device_gib": round(runs[True][0]["device"] / 2**30, 2),
        "host_gib_beside_device": round(peak / 2**30, 2),
        "of_that_before_loading_gib": round(max(run["before"] for run in runs[True]) / 2**30, 2),
    }


if __name__ == "__main__":
    main()
