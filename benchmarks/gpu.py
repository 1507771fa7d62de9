"""This project against diffusers on one NVIDIA GPU: the same shapes, the same random weights, one run.

    python benchmarks/gpu.py                                   # everything
    python benchmarks/gpu.py --only transformer --cases 1.3b-480p
    python benchmarks/gpu.py --smoke                           # small shapes of the demo model, on any machine

Columns: (a) diffusers as it comes, (b) diffusers with cuDNN attention and torch.compile on its repeated blocks, (c) this project, built from
conf/ by run.py's own functions. Peers and project have a process each: torch.compile refuses one that has imported torchax. Both make the same
random weights on the device. Every call is synchronised and warmed up; medians; compile times and peak memory apart. Prints a table, writes
JSON, ends in one JSON line.
"""
import argparse
import functools
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # weights come from PyTorch, which needs its share of the memory
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import diffusers
import hydra
import numpy
import torch
import transformers
from omegaconf import OmegaConf

import run  # JAX, torchax and the stages are imported where they are used: the peers' process must not have them
from wan_torchax.config import commandline

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "1.3b-480p": ["model=wan21_t2v_1_3b", "resolution=480p"],
    "1.3b-720p": ["model=wan21_t2v_1_3b", "resolution=720p"],
    "14b-480p": ["model=wan21_t2v_14b", "resolution=480p"],
    "14b-720p": ["model=wan21_t2v_14b", "resolution=720p"],
}
SMOKE = ["model=demo", "resolution.height=64", "resolution.width=64", "resolution.frames=5", "mesh=auto", "attention=auto",
         "+model.architecture.vae.latents_mean=[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]", "+model.architecture.vae.latents_std=[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MESH = ["mesh=gpu_1"] if DEVICE == "cuda" else []
PROMPT = "a red circle moving to the right"
STEPS = 4  # of the whole pipeline
rows, skipped = [], []


# ---------------------------------------------------------------- configs and timing


def configure(*overrides):
    """A config as `python run.py <overrides>` composes it, without the cache of compiled programs."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose("config", commandline.rewrite([*MESH, "compile.cache_dir=null", *overrides]))


def median_seconds(call, repeats, warm_up=1):
    """Median of `repeats` synchronised calls after those to warm up, and the first call's seconds."""
    times = []
    for _ in range(repeats + warm_up):
        began = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[warm_up:]), times[0]


def repeats_for(config) -> int:
    """Fewer where a step takes long: about half a minute a case."""
    size = config.resolution
    work = size.height * size.width * config.model.architecture.transformer.num_layers
    return 1 if work > 30e6 else 2 if work > 15e6 else 5


def record(what, case, column, seconds, compile_seconds=None, peak_gib=None):
    rows.append({"what": what, "case": case, "column": column, "seconds": seconds, "compile_seconds": compile_seconds, "peak_gib": peak_gib})
    extra = "".join(f"  {name} {value:.1f}" for name, value in (("compile s", compile_seconds), ("peak GiB", peak_gib)) if value is not None)
    print(f"{what:22} {case:10} ({column}) {seconds:9.4f} s{extra}", flush=True)


def torch_peak():
    """GiB at most since this was asked for last."""
    if DEVICE == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak


def free():
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- weights


def random_module(make, dtype):
    """A torch module with random weights made on the device, in the dtypes diffusers would load it in."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        module = make().eval().requires_grad_(False)
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:  # norms keep their ones
            torch.nn.init.normal_(parameter, std=0.02 if parameter.ndim == 2 else (parameter[0].numel()) ** -0.5)
        parameter.data = parameter.data.to(torch.float32 if any(part in kept for part in name.split(".")) else dtype)
    return module


def transformer_module(config):
    architecture = OmegaConf.to_container(config.model.architecture.transformer)
    return random_module(lambda: diffusers.WanTransformer3DModel(**architecture), getattr(torch, config.model.dtype.transformer))


def vae_module(config):
    architecture = OmegaConf.to_container(config.model.architecture.vae)
    return random_module(lambda: diffusers.AutoencoderKLWan(**architecture), getattr(torch, config.model.dtype.vae))


def text_module(config):
    settings = transformers.UMT5Config(**OmegaConf.to_container(config.model.architecture.text_encoder))
    return random_module(lambda: transformers.UMT5EncoderModel(settings), getattr(torch, config.model.dtype.text_encoder))


def hand_over(stage, module):
    """A stage's arrays from a torch module's weights, on the device."""
    import jax

    weights = dict(module.named_parameters())
    if "encoder.embed_tokens.weight" in weights:
        weights["shared.weight"] = weights["encoder.embed_tokens.weight"]
    arrays = {}
    for name, tensor in stage.tensors.items():
        if not tensor.sources:
            arrays[name] = jax.device_put(tensor.value, tensor.sharding)
            continue
        parts = [weights[source].data for source in tensor.sources]
        whole = torch.stack(parts) if tensor.stacked else parts[0]
        array = jax.numpy.from_dlpack(whole.to(getattr(torch, str(tensor.dtype))).contiguous())
        arrays[name] = jax.device_put(jax.numpy.copy(array), tensor.sharding).block_until_ready()
    return arrays


def build(config, name, make, arrays=None):
    """A compiled stage on the weights of the torch module that `make(config)` gives, or on arrays made before.

    Returns (stage, compile seconds, peak GiB by XLA's own account).
    """
    mesh = run.start_jax(config)
    from wan_torchax.stages import denoise as stages

    stage = stages.BUILDERS[name](config, mesh)
    report = []
    with stages.compiling({name: stage}, lambda *row: report.append(row)):
        stage.arrays = arrays or hand_over(stage, make(config))
        free()
        for future in stage.compiled.values():
            future.result()
    peak = max((m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes) / 2**30 for *_, m in report)
    return stage, sum(row[1] for row in report), peak


# ---------------------------------------------------------------- the transformer


def transformer(case, overrides, side, options):
    if side == "ours":
        return project_steps(case, overrides)
    config = configure(*overrides)
    if case in options.eager:
        peer_steps(case, config, "a")
        free()
    else:
        skipped.append(f"transformer {case} (a): not in --eager")
    if DEVICE == "cuda":
        peer_steps(case, config, "b")


def whole(case, overrides, side, options):
    """Peer (b) with its blocks compiled, and with the whole transformer: which is faster, on six layers to spare minutes of compiling."""
    if DEVICE == "cuda":
        config = configure(*overrides, "model.architecture.transformer.num_layers=6")
        for column in ("b", "w"):
            peer_steps(f"{case}, 6 layers", config, column, guided=False)
            free()


def peer_steps(case, config, column, guided=True):
    """Time diffusers' forward and its step with guidance, which is two forwards and the scheduler."""
    model, dtype = transformer_module(config), getattr(torch, config.model.dtype.transformer)
    latents, texts = random_inputs(config, dtype)
    timestep = torch.tensor([500.0], device=DEVICE)
    if column != "a":
        torch._dynamo.reset()  # what it compiled for other shapes
        model.set_attention_backend("_native_cudnn")
        model.compile_repeated_blocks(fullgraph=True) if column == "b" else model.compile(fullgraph=True)

    @torch.no_grad()
    def forward(text=texts[0]):
        return model(latents.to(dtype), timestep, text, return_dict=False)[0]

    scheduler = diffusers.UniPCMultistepScheduler(**OmegaConf.to_container(config.scheduler.arguments, resolve=True))

    @torch.no_grad()
    def guided_step():
        scheduler.set_timesteps(config.steps, device=DEVICE)
        prompt, negative = forward(texts[0]), forward(texts[1])
        return scheduler.step(negative + config.guidance_scale * (prompt - negative), scheduler.timesteps[0], latents, return_dict=False)[0]

    torch_peak()
    seconds, first = median_seconds(forward, repeats_for(config))
    record("transformer forward", case, column, seconds, None if column == "a" else first - seconds, torch_peak())
    if guided:
        seconds, _ = median_seconds(guided_step, repeats_for(config), warm_up=0)  # the forwards were its warm-up
        record("guided step", case, column, seconds, None, torch_peak())


def latent_shape(config):
    size = config.resolution
    return 1, config.model.architecture.transformer.in_channels, (size.frames - 1) // 4 + 1, size.height // 8, size.width // 8


def random_inputs(config, dtype):
    """Latents and the two prompts' embeddings (2, 1, tokens, width), the same in every process."""
    torch.manual_seed(1)
    latents = torch.randn(latent_shape(config), device=DEVICE)
    return latents, torch.randn(2, 1, config.model.text_tokens, config.model.architecture.transformer.text_dim, device=DEVICE, dtype=dtype)


def project_steps(case, overrides):
    """Time the step program without and with guidance, both on the same weights."""
    arrays = None
    for what, changed in (("transformer forward", ["guidance_scale=1"]), ("guided step", [])):
        config = configure(*overrides, *changed)
        stage, compile_seconds, peak = build(config, "denoise", transformer_module, arrays)
        arrays = stage.arrays
        from wan_torchax.stages import denoise as stages

        values = step_values(config, *random_inputs(config, getattr(torch, config.model.dtype.transformer)))
        state, *rest = stages.put(stage, "step", values)
        state = [state]

        def call(stage=stage, state=state, rest=rest):
            state[0], finite, _ = stage("step", state[0], *rest)
            return bool(finite)

        seconds, _ = median_seconds(call, repeats_for(config))
        record(what, case, "c", seconds, compile_seconds, peak)


def step_values(config, latents, texts, row=None):
    """What the step program takes, from torch tensors; `row` is the scheduler's coefficients, by default those of its first step."""
    from wan_torchax.stages import denoise as stages

    _, coefficients = stages.scheduler_table(config)
    state = numpy.zeros((coefficients.shape[1], *stages.latent_shape(config)), numpy.float32)
    state[0] = latents.cpu().numpy()
    embeddings = torch.cat(list(texts[: 2 if stages.guided(config) else 1])).float().cpu().numpy()
    return [state, numpy.float32(500.0), coefficients[0] if row is None else row, config.guidance_scale, embeddings]


def floor(case, overrides, side, options):
    """What a guided step would take if it were its attention and matrix products alone, each timed by itself in plain JAX."""
    config = configure(*overrides)
    mesh = run.start_jax(config)
    import jax
    from wan_torchax.kernels import attention

    from wan_torchax.stages import denoise as stages

    architecture = config.model.architecture.transformer
    tokens = math.prod(latent_shape(config)[2:]) // math.prod(architecture.patch_size)
    head_dim, hidden, dtype = architecture.attention_head_dim, architecture.ffn_dim, config.model.dtype.transformer
    dim = head_dim * architecture.num_attention_heads
    kernels = attention.resolve(OmegaConf.to_object(config.attention), stages.mesh_device(mesh), dtype, head_dim)

    def seconds(function, *shapes):
        keys = jax.random.split(jax.random.key(0), len(shapes))
        arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]
        jitted, calls = jax.jit(function), 8  # one after the other, so that starting them costs the device nothing

        def burst():
            for _ in range(calls):
                out = jitted(*arrays)
            out.block_until_ready()

        return median_seconds(burst, 3)[0] / calls

    def attend(kernel):
        return lambda query, key, value: attention.attend_flat(query, key, value, head_dim, kernel)

    def product(rows, columns):
        return seconds(lambda x, weight: x @ weight.T, (2 * tokens, rows), (columns, rows))  # both prompts; weights lie as torch has them

    video, text = (1, tokens, dim), (1, config.model.text_tokens, dim)
    parts = {
        "self-attention": 2 * seconds(attend(kernels.self), video, video, video),
        "cross-attention": 2 * seconds(attend(kernels.cross), video, text, text),
        "square products": 6 * product(dim, dim),
        "feed-forward": product(dim, hidden) + product(hidden, dim),
    }
    work = 2 * 4 * tokens**2 * dim, 2 * 4 * tokens * dim * text[1], 2 * 12 * tokens * dim**2, 2 * 4 * tokens * dim * hidden
    rates = {name: round(flops / parts[name] / 1e12, 1) for name, flops in zip(parts, work)}
    once = (parts["self-attention"] + parts["square products"] * 4 / 6) / 2  # the first block's self-attention, which no prompt has reached
    record("floor of a guided step", case, "c", architecture.num_layers * sum(parts.values()) - once)
    rows[-1]["tflops"] = rates
    print(f"  TFLOP/s: {rates}", flush=True)


# ---------------------------------------------------------------- correctness


def correctness(case, overrides, side, options):
    """Relative error of the velocity against torch in float32: ours and diffusers', both in the config's half precision."""
    config = configure(*overrides, "guidance_scale=1", *(["resolution.frames=17"] if DEVICE == "cuda" else []))
    model, dtype = transformer_module(config), getattr(torch, config.model.dtype.transformer)
    latents, texts = random_inputs(config, dtype)
    stage, _, _ = build(config, "denoise", lambda config: model)
    from wan_torchax.stages import denoise as stages

    slots = stages.scheduler_table(config)[1].shape[1]
    row = numpy.zeros((slots, slots + 1), numpy.float32)
    row[0, slots] = 1  # the new latents are the velocity itself
    ours = numpy.asarray(stage("step", *stages.put(stage, "step", step_values(config, latents, texts, row)))[0])[0]
    with torch.no_grad():
        timestep = torch.tensor([500.0], device=DEVICE)
        theirs = model(latents.to(dtype), timestep, texts[0], return_dict=False)[0].float().cpu().numpy()
        exact = model.float()(latents, timestep, texts[0].float(), return_dict=False)[0].cpu().numpy()
    errors = {name: float(numpy.linalg.norm(value - exact) / numpy.linalg.norm(exact)) for name, value in (("diffusers", theirs), ("project", ours))}
    rows.append({"what": "error against float32", "case": case, **errors})
    print(f"relative error against float32: diffusers {errors['diffusers']:.2e}, project {errors['project']:.2e}", flush=True)


# ---------------------------------------------------------------- VAE and text encoder


def vae(case, overrides, side, options, dtype="float32"):
    config = configure(*overrides, f"model.dtype.vae={dtype}")
    torch.manual_seed(1)
    latents = torch.randn(latent_shape(config), device=DEVICE, dtype=getattr(torch, dtype))
    if side == "ours":
        stage, compile_seconds, peak = build(config, "decode", vae_module)
        from wan_torchax.stages import denoise as stages

        values = latents.float().cpu().numpy()
        seconds, _ = median_seconds(lambda: stages.run_decode(stage, config, values, lambda count: None), 3)
        return record(f"VAE decode {dtype}", case, "c", seconds, compile_seconds, peak)
    model = vae_module(config)
    torch_peak()
    with torch.no_grad():
        seconds, _ = median_seconds(lambda: model.decode(latents).sample, 3)
    record(f"VAE decode {dtype}", case, "a", seconds, None, torch_peak())


def text(case, overrides, side, options):
    config = configure(*overrides)
    tokens = torch.randint(3, 600, (2, config.model.text_tokens), device=DEVICE)
    mask = torch.ones_like(tokens)
    if side == "ours":
        stage, compile_seconds, peak = build(config, "text", text_module)
        from wan_torchax.stages import denoise as stages

        inputs = stages.put(stage, "encode", [tokens.cpu().numpy(), mask.cpu().numpy()])
        seconds, _ = median_seconds(lambda: stage("encode", *inputs).block_until_ready(), 10)
        return record("text encoder", case, "c", seconds, compile_seconds, peak)
    model = text_module(config)
    for column in "ab" if DEVICE == "cuda" else "a":
        if column == "b":
            model.compile()
        torch_peak()
        with torch.no_grad():
            seconds, first = median_seconds(lambda: model(tokens, mask).last_hidden_state, 10)
        record("text encoder", case, column, seconds, first - seconds if column == "b" else None, torch_peak())


# ---------------------------------------------------------------- the whole, from a checkpoint on disk


PEER = """
import sys, time, torch, diffusers
folder, prompt, steps, height, width, frames, began = *sys.argv[1:3], *map(int, sys.argv[3:7]), float(sys.argv[7])
vae = diffusers.AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
pipeline = diffusers.WanPipeline.from_pretrained(folder, vae=vae, torch_dtype=torch.bfloat16).to("cuda")
pipeline.transformer.set_attention_backend("_native_cudnn")
pipeline.transformer.compile_repeated_blocks(fullgraph=True)
first = []
def after_step(pipeline, index, timestep, tensors):
    if not first:
        torch.cuda.synchronize()
        first.append(time.time() - began)
    return tensors
pipeline(prompt, height=height, width=width, num_frames=frames, num_inference_steps=steps, guidance_scale=5.0, output_type="np",
         callback_on_step_end=after_step)
print(first[0], time.time() - began)
"""


def pipeline(case, overrides, side, options):
    """Seconds from process start to the first denoised step and to the frames, from a checkpoint on disk. A run of each warms the caches of
    compiled programs; of two more, taken in turns, the median."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(configure(*overrides), Path(scratch) / "model")
        free()
        measures = {"b": peer_pipeline, "c": project_pipeline} if DEVICE == "cuda" else {"c": project_pipeline}
        taken = {column: [] for column in measures}
        for _ in range(3):
            for column, measure in measures.items():
                taken[column].append(measure(folder, Path(scratch), overrides))
                print(f"  ({column}) start to first step {taken[column][-1][0]:.2f} s, to frames {taken[column][-1][1]:.2f} s", flush=True)
        for column, times in taken.items():
            first, whole = map(statistics.median, zip(*times[1:]))
            record("start to first step", case, column, first)
            record(f"start to frames, {STEPS} steps", case, column, whole)


def peer_pipeline(folder, scratch, overrides):
    size = configure(*overrides).resolution
    command = [sys.executable, "-c", PEER, str(folder), PROMPT, *map(str, (STEPS, size.height, size.width, size.frames, time.time()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    return tuple(map(float, done.stdout.split()[-2:]))


def project_pipeline(folder, scratch, overrides):
    """As the user runs it, until it writes its metrics. What came after the first step, or after the frames, is taken off."""
    shutil.rmtree(scratch / "run", ignore_errors=True)
    command = [sys.executable, "run.py", *MESH, *overrides, f"model.path={folder}", f"steps={STEPS}", f"prompt={PROMPT}",
               f"hydra.run.dir={scratch}/run", f"compile.cache_dir={scratch}/cache"]
    began = time.time()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-600:])
    written = scratch / "run/metrics.json"
    metrics, whole = json.loads(written.read_text()), written.stat().st_mtime - began
    print(f"  {metrics['seconds']}", flush=True)
    after = sum(metrics["step_seconds"][1:]) + sum(metrics["seconds"][part] for part in ("load_decode", "decode", "write"))
    return whole - after, whole - metrics["seconds"]["write"]


def write_checkpoint(config, folder: Path) -> Path:
    """A whole pipeline of random weights in diffusers' layout, with the demo model's tokenizer and scheduler."""
    shutil.copytree(ROOT / "models/demo", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, make in {"transformer": transformer_module, "text_encoder": text_module, "vae": vae_module}.items():
        make(config).save_pretrained(folder / name)
    return folder


# ---------------------------------------------------------------- all together


# part -> (function, whose processes run it)
PARTS = {
    "transformer": (transformer, ("peers", "ours")),
    "floor": (floor, ("ours",)),
    "vae": (vae, ("peers", "ours")),
    "vae-bf16": (functools.partial(vae, dtype="bfloat16"), ("peers", "ours")),
    "text": (text, ("peers", "ours")),
    "correctness": (correctness, ("ours",)),
    "pipeline": (pipeline, ("peers",)),  # starts processes for both
    "whole": (whole, ("peers",)),
}
ALL_SIZES = ("transformer", "floor")  # the others with the first case alone


def measure(side, cases, options):
    """Everything that belongs to one side, in this process. The file holds what there is after each part."""
    for part in (part for part in options.only if side in PARTS[part][1]):
        for case, overrides in list(cases.items())[: None if part in ALL_SIZES else 1]:
            try:
                PARTS[part][0](case, [*overrides, *options.set], side, options)
            except Exception as error:  # the other parts' figures are worth having
                skipped.append(f"{part} {case} ({side}): {type(error).__name__}: {' '.join(str(error).split())[:600]}")
            free()
            Path(options.json).write_text(json.dumps({"rows": rows, "skipped": skipped}))


def measure_in_a_process(side):
    """The same command in a process of its own; its rows are taken over, also if it dies."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        status = subprocess.run([sys.executable, *sys.argv, "--side", side, "--json", str(result)]).returncode
        found = json.loads(result.read_text()) if result.exists() else {"rows": [], "skipped": []}
        rows.extend(found["rows"]), skipped.extend(found["skipped"])
        if status:
            skipped.append(f"what {side} had left: exit status {status}")


def ratios():
    """Seconds of the fastest peer over ours, by part and case; of ours over the floor for a guided step."""
    found = {}
    for row in (row for row in rows if row.get("column") == "c"):
        peers = [r["seconds"] for r in rows if (r["what"], r["case"]) == (row["what"], row["case"]) and r["column"] != "c"]
        if peers:
            found[f"{row['what']} {row['case']}"] = round(min(peers) / row["seconds"], 3)
        floors = [r["seconds"] for r in rows if (r["what"], r["case"]) == ("floor of a guided step", row["case"])]
        if floors and row["what"] == "guided step":
            found[f"guided step over floor {row['case']}"] = round(row["seconds"] / floors[0], 3)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--eager", nargs="*", choices=CASES, default=["1.3b-480p"], help="cases to time the transformer in column (a) too")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for the project's configs, e.g. attention=cudnn")
    parser.add_argument("--smoke", action="store_true", help="small shapes of the demo model")
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--side", choices=("peers", "ours"), help="measure one side, in this process; --json is needed")
    options = parser.parse_args()
    if options.side and not options.json:
        parser.error("--side: say with --json where the rows go")
    cases = {"smoke": SMOKE} if options.smoke else {name: CASES[name] for name in options.cases}
    torch.backends.cudnn.benchmark = True
    if options.side:
        return measure(options.side, cases, options)
    versions = {name: version(name) for name in ("torch", "diffusers", "transformers", "jax")}
    device, today = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", time.strftime("%Y-%m-%d")
    print(f"{device}; {', '.join(f'{name} {number}' for name, number in versions.items())}; {today}", flush=True)
    for side in ("peers", "ours"):
        measure_in_a_process(side)
    print("ratio, the faster of (a) and (b) over (c):", *(f"{name:34} {value}" for name, value in ratios().items()), sep="\n  ")
    print("skipped:", *(skipped or ["nothing"]), sep="\n  ")
    result = {"device": device, "date": today, "versions": versions, "rows": rows, "ratios": ratios(), "skipped": skipped}
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
