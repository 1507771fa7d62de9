"""This project against diffusers on one NVIDIA GPU: the same shapes, the same random weights, one run.

    python benchmarks/gpu.py                                   # everything, about 15 minutes on an H200
    python benchmarks/gpu.py --only transformer --cases 1.3b-480p
    python benchmarks/gpu.py --smoke                           # small shapes of the demo model, on any machine

Columns: (a) diffusers as it comes, (b) diffusers with torch.compile and cuDNN attention, (c) this project, built from
conf/ by run.py's own functions. Weights are random, made on the device and handed from torch to JAX. Every call is
synchronised and warmed up; medians; compile times and peak memory apart. Prints a table, writes JSON, ends in one JSON line.
"""
import argparse
import contextlib
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs its share of the memory
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import diffusers
import hydra
import jax
import numpy
import torch
import transformers
from omegaconf import OmegaConf

import commandline
import run
import stages

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
PROMPT = "a red circle moving to the right"
rows, skipped = [], []


# ---------------------------------------------------------------- configs and timing


def configure(*overrides):
    """A config as `python run.py <overrides>` composes it."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose("config", commandline.rewrite([*(["mesh=gpu_1"] if DEVICE == "cuda" else []), *overrides]))


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median_seconds(call, repeats):
    """Median of `repeats` synchronised calls, after one to warm up; the first call's seconds apart."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]), times[0]


def repeats_for(config) -> int:
    """Fewer where a step takes long: about half a minute a case."""
    size = config.resolution
    work = size.height * size.width * config.model.architecture.transformer.num_layers
    return 1 if work > 30e6 else 3 if work > 15e6 else 5


def record(what, case, column, seconds, compile_seconds=None, peak_gib=None):
    rows.append({"what": what, "case": case, "column": column, "seconds": seconds, "compile_seconds": compile_seconds, "peak_gib": peak_gib})
    extra = "".join(f"  {name} {value:.1f}" for name, value in (("compile s", compile_seconds), ("peak GiB", peak_gib)) if value is not None)
    print(f"{what:22} {case:10} ({column}) {seconds:9.4f} s{extra}", flush=True)


@contextlib.contextmanager
def torch_peak():
    """A list that holds the peak of torch's memory in GiB once the block is left."""
    peak = []
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield peak
    peak.append(torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None)


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


def hand_over(stage, module):
    """A stage's arrays from a torch module's weights, on the device."""
    weights = dict(module.named_parameters())
    if "encoder.embed_tokens.weight" in weights:
        weights["shared.weight"] = weights["encoder.embed_tokens.weight"]
    stage.arrays = {}
    for name, tensor in stage.tensors.items():
        if not tensor.sources:
            stage.arrays[name] = jax.device_put(tensor.value, tensor.sharding)
            continue
        parts = [weights[source].data for source in tensor.sources]
        whole = torch.stack(parts) if tensor.stacked else parts[0]
        array = jax.numpy.from_dlpack(whole.to(getattr(torch, str(tensor.dtype))).contiguous())
        stage.arrays[name] = jax.device_put(jax.numpy.copy(array), tensor.sharding).block_until_ready()


def build(config, mesh, name, module):
    """A compiled stage on a torch module's weights: (stage, compile seconds, peak GiB by XLA's own account)."""
    stage = stages.BUILDERS[name](config, mesh)
    report = []
    with stages.compiling({name: stage}, lambda *row: report.append(row)):
        hand_over(stage, module)
        for future in stage.compiled.values():
            future.result()
    peak = max((m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes) / 2**30 for *_, m in report)
    return stage, sum(row[1] for row in report), peak


# ---------------------------------------------------------------- the transformer


def transformer(case, overrides, options):
    config = configure(*overrides)
    architecture, dtype = OmegaConf.to_container(config.model.architecture.transformer), getattr(torch, config.model.dtype.transformer)
    model = random_module(lambda: diffusers.WanTransformer3DModel(**architecture), dtype)
    latents = torch.randn(stages.latent_shape(config), device=DEVICE)
    texts = torch.randn(2, 1, config.model.text_tokens, architecture["text_dim"], device=DEVICE, dtype=dtype)
    if not options.no_project:
        mesh = run.start_jax(config)
        for what, changed in (("transformer forward", ["guidance_scale=1"]), ("guided step", [])):
            project_step(what, case, configure(*overrides, *changed), mesh, model, latents, texts)
            free()
    timestep, repeats = torch.tensor([500.0], device=DEVICE), repeats_for(config)

    @torch.no_grad()
    def forward(text=texts[0]):
        return model(latents.to(dtype), timestep, text, return_dict=False)[0]

    scheduler = diffusers.UniPCMultistepScheduler(**OmegaConf.to_container(config.scheduler.arguments, resolve=True))

    @torch.no_grad()
    def guided_step():
        scheduler.set_timesteps(config.steps, device=DEVICE)
        prompt, negative = forward(texts[0]), forward(texts[1])
        return scheduler.step(negative + config.guidance_scale * (prompt - negative), scheduler.timesteps[0], latents, return_dict=False)[0]

    if repeats > 1:
        time_peer(case, "a", (forward, guided_step), repeats)
    else:
        skipped.append(f"{case} (a): takes minutes and is never the faster of the two")
    if DEVICE == "cuda":
        model.set_attention_backend("_native_cudnn")
        model.compile_repeated_blocks(fullgraph=True)
        time_peer(case, "b", (forward, guided_step), repeats)


def time_peer(case, column, calls, repeats):
    for what, call in zip(("transformer forward", "guided step"), calls):
        with torch_peak() as peak:
            seconds, first = median_seconds(call, repeats)
        record(what, case, column, seconds, first - seconds if column == "b" and what == "transformer forward" else None, peak[0])


def project_step(what, case, config, mesh, model, latents, texts):
    stage, compile_seconds, peak = build(config, mesh, "denoise", model)
    values = step_values(config, latents, texts)
    state, *rest = stages.put(stage, "step", values)
    state = [state]

    def call():
        state[0], finite, _ = stage("step", state[0], *rest)
        return bool(finite)

    seconds, _ = median_seconds(call, repeats_for(config))
    record(what, case, "c", seconds, compile_seconds, peak)


def step_values(config, latents, texts, row=None):
    """What the step program takes, from torch tensors; `row` is the scheduler's coefficients, by default those of its first step."""
    timesteps, coefficients = stages.scheduler_table(config)
    state = numpy.zeros((coefficients.shape[1], *stages.latent_shape(config)), numpy.float32)
    state[0] = latents.cpu().numpy()
    embeddings = torch.cat(list(texts[: 2 if stages.guided(config) else 1])).float().cpu().numpy()
    return [state, numpy.float32(500.0), coefficients[0] if row is None else row, config.guidance_scale, embeddings]


# ---------------------------------------------------------------- correctness


def correctness(case, overrides, options):
    """Relative error of the velocity against torch in float32: ours and diffusers', both in the config's half precision."""
    config = configure(*overrides, "guidance_scale=1", *(["resolution.frames=17"] if DEVICE == "cuda" else []))
    architecture, dtype = OmegaConf.to_container(config.model.architecture.transformer), getattr(torch, config.model.dtype.transformer)
    model = random_module(lambda: diffusers.WanTransformer3DModel(**architecture), dtype)
    latents = torch.randn(stages.latent_shape(config), device=DEVICE)
    texts = torch.randn(1, 1, config.model.text_tokens, architecture["text_dim"], device=DEVICE, dtype=dtype)
    stage, _, _ = build(config, run.start_jax(config), "denoise", model)
    slots = stages.scheduler_table(config)[1].shape[1]
    row = numpy.zeros((slots, slots + 1), numpy.float32)
    row[0, slots] = 1  # the new latents are the velocity itself
    ours = numpy.asarray(stage("step", *stages.put(stage, "step", step_values(config, latents, texts, row)))[0])[0]
    with torch.no_grad():
        theirs = model(latents.to(dtype), torch.tensor([500.0], device=DEVICE), texts[0], return_dict=False)[0].float().cpu().numpy()
        exact = model.float()(latents, torch.tensor([500.0], device=DEVICE), texts[0].float(), return_dict=False)[0].cpu().numpy()
    errors = {name: float(numpy.linalg.norm(value - exact) / numpy.linalg.norm(exact)) for name, value in (("diffusers", theirs), ("project", ours))}
    rows.append({"what": "error against float32", "case": case, **errors})
    print(f"relative error against float32: diffusers {errors['diffusers']:.2e}, project {errors['project']:.2e}", flush=True)


# ---------------------------------------------------------------- VAE and text encoder


def vae(case, overrides, options):
    for name in ("float32", "bfloat16"):
        config = configure(*overrides, f"model.dtype.vae={name}")
        architecture, label = OmegaConf.to_container(config.model.architecture.vae), f"VAE decode {name}"
        model = random_module(lambda architecture=architecture: diffusers.AutoencoderKLWan(**architecture), getattr(torch, name))
        latents = torch.randn(stages.latent_shape(config), device=DEVICE, dtype=getattr(torch, name))
        stage, compile_seconds, peak = build(config, run.start_jax(config), "decode", model)
        values = latents.float().cpu().numpy()
        seconds, _ = median_seconds(lambda stage=stage, config=config, values=values: stages.run_decode(stage, config, values, lambda count: None), 3)
        record(label, case, "c", seconds, compile_seconds, peak)
        stage.arrays = None
        with torch.no_grad(), torch_peak() as memory:
            seconds, _ = median_seconds(lambda model=model, latents=latents: model.decode(latents).sample, 3)
        record(label, case, "a", seconds, None, memory[0])
        del model, stage
        free()
    skipped.append("VAE decode (b): torch.compile does not take the decoder's list of caches without recompiling for every frame")


def text(case, overrides, options):
    config = configure(*overrides)
    settings = transformers.UMT5Config(**OmegaConf.to_container(config.model.architecture.text_encoder))
    model = random_module(lambda: transformers.UMT5EncoderModel(settings), getattr(torch, config.model.dtype.text_encoder))
    tokens = torch.randint(3, 600, (2, config.model.text_tokens), device=DEVICE)
    mask = torch.ones_like(tokens)
    stage, compile_seconds, peak = build(config, run.start_jax(config), "text", model)
    inputs = stages.put(stage, "encode", [tokens.cpu().numpy(), mask.cpu().numpy()])
    seconds, _ = median_seconds(lambda: stage("encode", *inputs), 10)
    record("text encoder", case, "c", seconds, compile_seconds, peak)

    def call():
        with torch.no_grad():
            return model(tokens, mask).last_hidden_state

    with torch_peak() as memory:
        seconds, _ = median_seconds(call, 10)
    record("text encoder", case, "a", seconds, None, memory[0])
    if DEVICE == "cuda":
        model.compile()
        seconds, first = median_seconds(call, 10)
        record("text encoder", case, "b", seconds, first - seconds, None)


# ---------------------------------------------------------------- from process start


PEER = """
import sys, torch
from diffusers import WanPipeline
pipeline = WanPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.bfloat16).to("cuda")
pipeline.transformer.set_attention_backend("_native_cudnn")
pipeline.transformer.compile_repeated_blocks(fullgraph=True)
pipeline(sys.argv[2], height=480, width=832, num_frames=81, num_inference_steps=1, guidance_scale=5.0, output_type="latent")
torch.cuda.synchronize()
"""


def startup(case, overrides, options):
    """Seconds from process start to the first denoised latents, caches warm (the second of two runs), from a checkpoint on disk."""
    config = configure(*overrides)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(config, Path(scratch) / "model")
        free()
        ours = [sys.executable, "run.py", *overrides, f"model.path={folder}", "stages=[text,denoise]", "steps=1", f"prompt={PROMPT}",
                f"hydra.run.dir={scratch}/run", f"compile.cache_dir={scratch}/cache"]
        commands = {"c": ours, "b": [sys.executable, "-c", PEER, str(folder), PROMPT]} if DEVICE == "cuda" else {"c": ours}
        for column, command in commands.items():
            for _ in range(2):
                shutil.rmtree(f"{scratch}/run", ignore_errors=True)
                began = time.perf_counter()
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
                seconds = time.perf_counter() - began
            record("start to first step", case, column, seconds)


def write_checkpoint(config, folder: Path) -> Path:
    """A whole pipeline of random weights in diffusers' layout, with the demo model's tokenizer and scheduler."""
    architecture = OmegaConf.to_container(config.model.architecture)
    settings = transformers.UMT5Config(**architecture["text_encoder"])
    parts = {
        "transformer": lambda: diffusers.WanTransformer3DModel(**architecture["transformer"]),
        "text_encoder": lambda: transformers.UMT5EncoderModel(settings),
        "vae": lambda: diffusers.AutoencoderKLWan(**architecture["vae"]),
    }
    shutil.copytree(ROOT / "models/demo", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, make in parts.items():
        random_module(make, torch.bfloat16).save_pretrained(folder / name)
    return folder


# ---------------------------------------------------------------- all together


PARTS = {"text": text, "vae": vae, "transformer": transformer, "correctness": correctness, "startup": startup}
ALL_SIZES = ("transformer",)  # the others once, with the first case


def ratios():
    """Seconds of the faster peer over ours, by part and case."""
    found = {}
    for row in rows:
        if row.get("column") == "c":
            peers = [r["seconds"] for r in rows if (r["what"], r["case"]) == (row["what"], row["case"]) and r["column"] != "c"]
            if peers:
                found[f"{row['what']} {row['case']}"] = round(min(peers) / row["seconds"], 3)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--set", nargs="*", default=[], help="overrides for the project's configs, e.g. compile.xla_flags=[...]")
    parser.add_argument("--no-project", action="store_true", help="only the peers")
    parser.add_argument("--smoke", action="store_true", help="small shapes of the demo model")
    parser.add_argument("--json", help="also write the rows here")
    options = parser.parse_args()
    cases = {"smoke": SMOKE} if options.smoke else {name: CASES[name] for name in options.cases}
    torch.backends.cudnn.benchmark = True
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "transformers": transformers.__version__, "jax": jax.__version__}
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{device}; {', '.join(f'{name} {version}' for name, version in versions.items())}; {time.strftime('%Y-%m-%d')}", flush=True)
    for part in options.only:
        for case, overrides in list(cases.items())[: None if part in ALL_SIZES else 1]:
            try:
                PARTS[part](case, [*overrides, *options.set], options)
            except Exception as error:  # the other parts' figures are worth having
                skipped.append(f"{part} {case}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
            free()
    print("ratio, the faster of (a) and (b) over (c):", *(f"{name:34} {value}" for name, value in ratios().items()), sep="\n  ")
    print("skipped:", *(skipped or ["nothing"]), sep="\n  ")
    result = {"device": device, "date": time.strftime("%Y-%m-%d"), "versions": versions, "rows": rows, "ratios": ratios(), "skipped": skipped}
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
