"""A Wan 2.1 14B from a GGUF file on one accelerator, and its adapters exchanged: seconds, host memory, cost of a step.

    python benchmarks/adapter_swap.py [--folder /data] [--out swap.json]    # 8 GB of Q4_K, two adapters of rank 64
    python benchmarks/adapter_swap.py --smoke                               # two small layers, on any machine

Writes a transformer with random weights and two adapters of every linear layer of its blocks. Loads it through the
Session, from the disk and from the page cache, beside plain reads of the same file; times the guided step with
adapters merged and beside the weights, and exchanges of one adapter for the other in both modes; then compares the
weights with those of a fresh load, bit for bit. Rows are printed, and written to --out, as they come; --only steps
measures some of them.
"""
import argparse
import json
import os
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import adapter_load  # benchmarks/adapter_load.py
import families_gpu  # benchmarks/families_gpu.py
import gpu  # benchmarks/gpu.py
import numpy

RANK, SWAPS, STEPS = 64, 10, 3
SIZES = dict(num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=40)
SMALL = dict(num_attention_heads=2, attention_head_dim=128, ffn_dim=512, num_layers=2)
QUANTIZED, PLAIN = (12, 256, 144), (0, 1, 4)  # GGUF's number of Q4_K and float32; numbers and bytes of a block
PIECE = 2**26  # bytes of one write or plain read
PEAK = Path("/proc/self/clear_refs")


# ---------------------------------------------------------------- files


def shapes_of(sizes: dict) -> dict[str, tuple[int, ...]]:
    import diffusers
    import torch

    with torch.device("meta"):
        return {name: tuple(one.shape) for name, one in diffusers.WanTransformer3DModel(**sizes).named_parameters()}


def is_adapted(name: str, shape: tuple) -> bool:
    return name.startswith("blocks.") and len(shape) == 2


def write_gguf(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """The blocks' linear layers in Q4_K, the rest in float32."""
    header, offset = [b"GGUF", struct.pack("<IQQ", 3, len(shapes), 0)], 0
    kinds = {name: QUANTIZED if is_adapted(name, shape) else PLAIN for name, shape in shapes.items()}
    sizes = {name: int(numpy.prod(shapes[name])) // numbers * size for name, (_, numbers, size) in kinds.items()}
    for name, shape in shapes.items():
        text = name.encode()
        header.append(struct.pack("<Q", len(text)) + text + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1]))
        header.append(struct.pack("<IQ", kinds[name][0], offset))
        offset += -(-sizes[name] // 32) * 32
    content = {QUANTIZED: random_blocks(), PLAIN: random_numbers()}
    with path.open("wb") as handle:
        for piece in header:
            handle.write(piece)
        for name, size in sizes.items():
            handle.write(bytes(-handle.tell() % 32))
            source = content[kinds[name]]
            for begin in range(0, size, len(source)):
                handle.write(source[: size - begin])


def random_blocks() -> memoryview:
    """Blocks of Q4_K of which each number is around 0.02."""
    numbers = numpy.random.default_rng(0).integers(0, 256, (PIECE // QUANTIZED[2], QUANTIZED[2]), dtype=numpy.uint8)
    numbers[:, :4] = numpy.frombuffer(numpy.array([1e-4, 6e-4], numpy.float16).tobytes(), numpy.uint8)
    return memoryview(numbers.reshape(-1))


def random_numbers() -> memoryview:
    return memoryview(0.02 * numpy.random.default_rng(1).standard_normal(PIECE // 4, numpy.float32)).cast("B")


def write_adapter(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator, pairs = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        if is_adapted(name, shape):
            module = name.removesuffix(".weight")
            for end, size in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
                numbers = torch.empty(size).uniform_(-0.01, 0.01, generator=generator)
                pairs[f"transformer.{module}.lora_{end}.weight"] = numbers.bfloat16()
    save_file(pairs, path)


def seconds_of(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def read_plainly(file: Path, threads: int) -> None:
    """All of a file, piece by piece, into memory that is used again."""
    size, handle = file.stat().st_size, os.open(file, os.O_RDONLY)

    def read(first: int) -> None:
        place = bytearray(PIECE)
        for begin in range(first * PIECE, size, threads * PIECE):
            os.preadv(handle, [place], begin)

    with ThreadPoolExecutor(threads) as readers:
        list(readers.map(read, range(threads)))
    os.close(handle)


# ---------------------------------------------------------------- this project


class Run:
    """A session with the file's transformer, and the rows it has measured."""

    def __init__(self, folder: Path, smoke: bool, out: Path | None):
        from wan_torchax.session import Session

        self.session, self.folder, self.out, self.smoke = Session(), folder, out, smoke
        self.report = {
            "command": " ".join(["python", *sys.argv]), "device": families_gpu.device(), "rank": RANK,
            "versions": families_gpu.versions(), "n": STEPS, "rows": [],
        }

    def record(self, what: str, **figures) -> None:
        row = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
        self.report["rows"].append({"what": what, **row})
        print(json.dumps(self.report["rows"][-1]), flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.report, indent=2) + "\n")

    def config(self, *overrides: str):
        sizes = SMALL if self.smoke else SIZES
        shape = gpu.SMALL if self.smoke else ["resolution=480p"]
        return gpu.configure(
            "model=wan21_t2v_14b", *shape, f"model.transformer={self.folder / 'model.gguf'}", "prompt=x", *overrides,
            *(f"model.architecture.transformer.{name}={size}" for name, size in sizes.items()),
        )

    def resolved(self, *overrides: str):
        return self.session.resolve(self.config(*overrides), ["denoise"])

    def loaded(self, *overrides: str):
        """The denoising stage with its transformer's arrays on the device."""
        return self.load(self.resolved(*overrides))

    def load(self, resolved):
        from wan_torchax.events import silence

        stage = self.session.build(resolved, ["denoise"])["denoise"]
        component = stage.components["transformer"]
        component.check()
        component.load(component.specs, silence)
        return stage

    def adapter(self, number: int, strength: float = 0.8) -> str:
        return f"adapter.style={{path: {self.folder / f'{number}.safetensors'}, strength: {strength}}}"

    def step_seconds(self, stage) -> list[float]:
        """Of guided steps, after one that compiles and one that warms up."""
        from wan_torchax.events import silence
        from wan_torchax.runtime.programs import compiling

        with compiling({"denoise": stage.programs}, silence):
            for future in stage.programs.compiled.values():
                future.result()
        values = families_gpu.random_values(tuple(stage.programs.entries["step"].arguments))
        state, *rest = stage.programs.put("step", values)
        seconds = []
        for _ in range(STEPS + 1):
            began = time.perf_counter()
            state, report, _ = stage("step", state, *rest)
            bool(report["finite"])
            seconds.append(time.perf_counter() - began)
        return seconds[1:]


def host_bytes(reset: bool = False) -> int:
    """The process's peak memory since it was last reset."""
    from wan_torchax.records.provenance import peak_host_bytes

    if reset and os.access(PEAK, os.W_OK):
        PEAK.write_text("5")
    return peak_host_bytes()


def measure_loading(run: Run) -> None:
    """From the disk, then from the page cache, each beside plain reads of one thread and of as many as load."""
    from wan_torchax.runtime.reading import READERS

    file = run.folder / "model.gguf"
    size = file.stat().st_size
    run.loaded()  # compiles what dequantizes
    for what in ("disk", "page cache"):
        plain = []
        for threads in (1, READERS):
            if what == "disk":
                forget(file)
            plain.append(seconds_of(lambda threads=threads: read_plainly(file, threads)))
        run.session.components["transformer"].free()
        if what == "disk":
            forget(file)
        before = host_bytes(reset=True)
        seconds = seconds_of(run.loaded)
        run.record(
            f"GGUF Q4_K, from {what}", seconds=seconds, gb_per_second=size / seconds / 1e9, bytes=size,
            plain_seconds=min(plain), plain_one_thread=plain[0], share_of_plain=min(plain) / seconds,
            host_gib=(host_bytes() - before) / 2**30, host_gib_before=before / 2**30,
        )


def forget(file: Path) -> None:
    os.sync()
    adapter_load.forget(file.parent, file.name)


def measure_swaps(run: Run, mode: str, times: int) -> None:
    """One adapter for the other and back, then another strength; both jobs are composed before."""
    settings = [f"adapter.mode={mode}", f"adapter.rank={RANK}"]
    began = time.perf_counter()
    jobs = [run.resolved(*settings, run.adapter(number)) for number in range(2)]
    composing = (time.perf_counter() - began) / 2
    for job in jobs:
        run.load(job)
    seconds = [seconds_of(lambda number=number: run.load(jobs[number % 2])) for number in range(times)]
    weaker = run.resolved(*settings, run.adapter(0, 0.3))
    run.load(jobs[0])
    strength = seconds_of(lambda: run.load(weaker))
    component = run.load(jobs[0]).components["transformer"]
    swapped = dict(component.arrays)
    changed = [name for name in swapped if component.changes_of(name)]
    component.arrays = {name: array for name, array in swapped.items() if name not in changed}
    fresh = run.load(jobs[0]).components["transformer"].arrays
    equal = all(bool((bits(fresh[name]) == bits(swapped[name])).all()) for name in changed)
    run.record(
        f"exchange, {mode}", **median(seconds), n=times, strength_seconds=strength, composing_seconds=composing,
        arrays=len(changed), equal_to_a_fresh_load=equal,
    )


def median(seconds: list[float]) -> dict:
    return {"seconds": sorted(seconds)[len(seconds) // 2], "spread": [round(min(seconds), 4), round(max(seconds), 4)]}


def bits(array):
    import jax

    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def measure_steps(run: Run) -> None:
    merged = median(run.step_seconds(run.loaded()))
    run.record("guided step, merged", **merged)
    beside = median(run.step_seconds(run.loaded("adapter.mode=beside", f"adapter.rank={RANK}", run.adapter(0))))
    run.record("guided step, beside", **beside, cost=beside["seconds"] / merged["seconds"] - 1)


PARTS = {
    "loading": measure_loading, "steps": measure_steps,
    "beside": lambda run: measure_swaps(run, "beside", 2 if run.smoke else SWAPS),
    "merge": lambda run: measure_swaps(run, "merge", 2 if run.smoke else 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where the files are written; by default the temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, shapes = Path(name), shapes_of(SMALL if options.smoke else SIZES)
        write_gguf(folder / "model.gguf", shapes)
        for number in range(2):
            write_adapter(folder / f"{number}.safetensors", shapes, number)
        print(f"{(folder / 'model.gguf').stat().st_size / 1e9:.2f} GB written", flush=True)
        run = Run(folder, options.smoke, options.out)
        for part in options.only:
            PARTS[part](run)
    print(json.dumps(run.report))


if __name__ == "__main__":
    main()
