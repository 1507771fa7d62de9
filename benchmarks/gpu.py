"""This project compared with diffusers on one NVIDIA GPU: the same shapes, the same random weights, one run.

    python benchmarks/gpu.py                                   # everything
    python benchmarks/gpu.py --only step --cases 1.3b-480p
    python benchmarks/gpu.py --smoke                           # small shapes of the demo model, on any machine

Columns: (a) diffusers out of the box, (b) diffusers with cuDNN attention and torch.compile on its repeated blocks, (c)
this project, built from conf/ by the Session that run.py uses. Peers and project run in separate processes:
torch.compile fails in one that has imported torchax. Both make the same random weights on the device. Calls are
synchronised and warmed up; reports medians, and compile times and peak memory separately. Prints a table, writes JSON,
ends with one JSON line.
"""
import argparse
import functools
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # weights come from PyTorch, which needs memory too
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import diffusers
import numpy
import torch
import transformers
from omegaconf import OmegaConf

import wan_torchax

wan_torchax.leave_sys_path()

# Modules that import JAX or torchax are imported where they are used: the peers' process must not load them.
from wan_torchax import ROOT, private  # noqa: E402
from wan_torchax.config import inputs  # noqa: E402
from wan_torchax.config.commandline import compose, rewrite  # noqa: E402
from wan_torchax.config.geometry import text_count  # noqa: E402
from wan_torchax.config.registry import family_of  # noqa: E402
from wan_torchax.runtime.checkpoint import find_all  # noqa: E402

CASES = {
    "1.3b-480p": ["model=wan21_t2v_1_3b", "resolution=480p"],
    "1.3b-720p": ["model=wan21_t2v_1_3b", "resolution=720p"],
    "14b-480p": ["model=wan21_t2v_14b", "resolution=480p"],
    "14b-720p": ["model=wan21_t2v_14b", "resolution=720p"],
    "i2v-14b-480p": ["model=wan21_i2v_14b_480p", "resolution=480p"],
    "ti2v-5b-704p": ["model=wan22_ti2v_5b", "pipeline=ti2v", "resolution=704p"],
}
SMALL = ["resolution.height=64", "resolution.width=64", "resolution.frames=5"]
SMOKE = ["model=demo", *SMALL, "mesh=auto", "attention=auto"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MESH = ["mesh=gpu_1"] if DEVICE == "cuda" else []
PROMPT = "a red circle moving to the right"
STEPS = 4  # of the whole pipeline
REPEATS = 5
STEP, FORWARD, FLOOR = "guided step", "transformer forward", "floor of a guided step"
FEW = ["guidance_scale=1", "scheduler=euler", "scheduler.sigmas=[1,0.75,0.5,0.25]"]
RUNS = {  # of whole denoisings
    "magcache, 50 steps": ["steps=50", "cache=magcache"], "four steps": FEW,
    "magcache and guidance, 50 steps": ["steps=50", "cache=magcache_guidance"],
    "easycache, 5 steps": ["steps=5", "cache=easycache"],
}
DENOISED = {  # these take minutes, so not every mode is run for every case
    "1.3b-480p": ["magcache, 50 steps", "four steps"],
    "14b-480p": ["magcache, 50 steps", "magcache and guidance, 50 steps", "four steps"],
    "14b-720p": ["four steps"],
    "smoke": ["four steps", "easycache, 5 steps"],
}
FEW_BLOCKS = {"smoke": ["precision.first=1", "precision.last=1"]}  # the demo model has six
rows, skipped = [], []


# ---------------------------------------------------------------- configs and timing


def configure(*overrides):
    """A config as `python run.py <overrides>` composes it, without the cache of compiled programs.

    A local checkpoint's config.json completes it.
    """
    config = compose(rewrite([*MESH, "compile.cache_dir=null", "compile.store=null", *overrides]))
    for key in inputs.taken(config):  # needed for the checks only
        config[key] = str(ROOT / "docs" / "demo.png")
    for name, checkpoint in find_all(config, list(config.model.architecture), required=False).items():
        config.model.architecture[name] = checkpoint.architecture
    return config


class Seconds(float):
    """A median that also holds the individual times."""

    times: tuple[float, ...] = ()


def median_seconds(call, repeats, warm_up=1):
    """Median of `repeats` synchronised calls after warming up, and the first call's seconds."""
    times = []
    for _ in range(repeats + warm_up):
        began = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median_of(times[warm_up:]), times[0]


def watched(call, repeats, account):
    """Median seconds of one of our calls, and the peak GiB of JAX's allocator meanwhile, comparable with torch's for
    the peers; without allocator statistics, the compiler's figure for the program."""
    import jax

    device, most, done = jax.devices()[0], [0], threading.Event()

    def look():
        while not done.wait(0.005):  # polling suffices: a program holds its memory from beginning to end
            most[0] = max(most[0], (device.memory_stats() or {}).get("bytes_in_use", 0))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        seconds, _ = median_seconds(call, repeats)
    finally:
        done.set()
        watcher.join()
    return seconds, most[0] / 2**30 or account


def median_of(times) -> Seconds:
    median = Seconds(statistics.median(times))
    median.times = tuple(times)
    return median


def repeats_for(config) -> int:
    """Enough for a median and its spread."""
    return 2 if config.model.name == "demo" else REPEATS


def record(what, case, column, seconds, compile_seconds=None, peak_gib=None):
    row = {"what": what, "case": case, "column": column, "seconds": seconds}
    if times := getattr(seconds, "times", ()):
        row |= {"n": len(times), "spread": [min(times), max(times)]}
    rows.append(row | {"compile_seconds": compile_seconds, "peak_gib": peak_gib})
    figures = {"compile s": compile_seconds, "peak GiB": peak_gib}
    extra = "".join(f"  {name} {value:.1f}" for name, value in figures.items() if value is not None)
    print(f"{what:22} {case:10} ({column}) {seconds:9.4f} s{extra}", flush=True)


def torch_peak():
    """Peak GiB since the last call of this function."""
    if DEVICE == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak


def free():
    if "wan_torchax.session" in sys.modules:
        sys.modules["wan_torchax.session"].session.clear()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- weights


def random_module(make, dtype):
    """A torch module with random weights made on the device, in the dtypes in which diffusers would load it."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        module = make().eval().requires_grad_(False)
    exempt = private.float32_parts(module, "float16")  # the longer list, which the published figures were taken with
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:  # norms keep their ones
            torch.nn.init.normal_(parameter, std=0.02 if parameter.ndim == 2 else (parameter[0].numel()) ** -0.5)
        full = any(part in exempt for part in name.split("."))
        parameter.data = parameter.data.to(torch.float32 if full else dtype)
    return module


def transformer_module(config):
    architecture = OmegaConf.to_container(config.model.architecture.transformer)
    dtype = getattr(torch, config.model.dtype.transformer)
    return random_module(lambda: diffusers.WanTransformer3DModel(**architecture), dtype)


def vae_module(config):
    architecture = OmegaConf.to_container(config.model.architecture.vae)
    return random_module(lambda: diffusers.AutoencoderKLWan(**architecture), getattr(torch, config.model.dtype.vae))


def text_module(config):
    settings = transformers.UMT5Config(**OmegaConf.to_container(config.model.architecture.text_encoder))
    dtype = getattr(torch, config.model.dtype.text_encoder)
    return random_module(lambda: transformers.UMT5EncoderModel(settings), dtype)


def hand_over(tensors, module):
    """A component's arrays from a torch module's weights, on the device."""
    import jax

    from wan_torchax.kernels.quantized import quantize

    quantize_all = jax.jit(quantize, static_argnums=1)
    weights = dict(module.named_parameters())
    if "encoder.embed_tokens.weight" in weights:
        weights["shared.weight"] = weights["encoder.embed_tokens.weight"]
    arrays = {}
    for name, tensor in tensors.items():
        if not tensor.sources:
            if tensor.value is not None:
                arrays[name] = jax.device_put(tensor.value, tensor.sharding)
            continue
        parts = [weights[source].data for source in tensor.sources]
        whole = torch.stack(parts) if tensor.stacked else parts[0]
        if tensor.scaled_by:
            array = jax.numpy.from_dlpack(whole.contiguous())
            arrays[name], arrays[tensor.scaled_by] = jax.block_until_ready(quantize_all(array, str(tensor.dtype)))
            continue
        array = jax.numpy.from_dlpack(whole.to(getattr(torch, str(tensor.dtype))).contiguous())
        arrays[name] = jax.device_put(jax.numpy.copy(array), tensor.sharding).block_until_ready()
    return arrays


def build(config, name, make):
    """A compiled stage with the weights of the torch module that `make(config)` returns, or those of an earlier call.

    Returns (stage, resolved, compile seconds, peak GiB according to XLA).
    """
    from wan_torchax.events import Compiled
    from wan_torchax.runtime.jobs import plan_job
    from wan_torchax.runtime.programs import compiling
    from wan_torchax.session import session

    resolved = session.place(plan_job(config))
    stage, report = session.build(resolved, [name])[name], []
    (component, tensors), = stage.specs.items()
    with compiling({name: stage.programs}, report.append):
        if not stage.components[component].arrays:
            stage.components[component].arrays = hand_over(tensors, make(config))
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
        for future in stage.programs.compiled.values():
            future.result()
    compiled = [event for event in report if isinstance(event, Compiled)]
    peaks = [
        memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        for memory in (event.memory for event in compiled)
    ]
    return stage, resolved, sum(event.seconds for event in compiled), max(peaks) / 2**30


# ---------------------------------------------------------------- the transformer


def transformer(case, overrides, side, options, what=STEP):
    if side == "ours":
        return project_steps(case, overrides, what)
    config = configure(*overrides)
    if case in options.eager:
        peer_steps(case, config, "a", what)
        free()
    else:
        skipped.append(f"{what} {case} (a): not in --eager")
    if DEVICE == "cuda":
        peer_steps(case, config, "b", what)


def whole(case, overrides, side, options):
    """Peer (b) with its blocks compiled, and with the whole transformer compiled; six layers, to save minutes."""
    if DEVICE == "cuda":
        config = configure(*overrides, "model.architecture.transformer.num_layers=6")
        for column in ("b", "w"):
            peer_steps(f"{case}, 6 layers", config, column, FORWARD)
            free()


def peer_steps(case, config, column, what):
    """Time diffusers' forward, or its step with guidance, which is two forwards and the scheduler."""
    model, dtype = transformer_module(config), getattr(torch, config.model.dtype.transformer)
    latents, texts = random_inputs(config, dtype)
    hidden, timestep, pictures = peer_inputs(config, latents, dtype)
    if column != "a":
        torch.compiler.reset()  # discard what was compiled for other shapes
        model.set_attention_backend("_native_cudnn")
        model.compile_repeated_blocks(fullgraph=True) if column == "b" else model.compile(fullgraph=True)

    @torch.no_grad()
    def forward(text=texts[0]):
        return model(hidden, timestep, text, pictures, return_dict=False)[0]

    scheduler = diffusers.UniPCMultistepScheduler(**OmegaConf.to_container(config.scheduler.arguments, resolve=True))

    @torch.no_grad()
    def guided_step():
        scheduler.set_timesteps(config.steps, device=DEVICE)
        prompt, negative = forward(texts[0]), forward(texts[1])
        velocity = negative + config.guidance_scale * (prompt - negative)
        return scheduler.step(velocity, scheduler.timesteps[0], latents, return_dict=False)[0]

    torch_peak()
    first, _ = median_seconds(forward, 1, warm_up=0)
    seconds, _ = median_seconds(guided_step if what == STEP else forward, repeats_for(config), warm_up=0)
    forward_seconds = seconds / 2 if what == STEP else seconds
    record(what, case, column, seconds, None if column == "a" else first - forward_seconds, torch_peak())


def geometry_of(config):
    return family_of(config).geometry(config.model.architecture)


def latent_shape(config):
    return geometry_of(config).latent_shape(config.resolution)


def random_inputs(config, dtype):
    """Latents and the two prompts' embeddings (2, 1, tokens, width), the same in every process."""
    torch.manual_seed(1)
    latents = torch.randn(latent_shape(config), device=DEVICE)
    shape = 2, 1, config.model.text_tokens, config.model.architecture.transformer.text_dim
    return latents, torch.randn(shape, device=DEVICE, dtype=dtype)


def random_conditions(config) -> dict:
    """A step's inputs beside the latents and the text, by name; the same in every process."""
    torch.manual_seed(2)
    geometry, architecture = geometry_of(config), config.model.architecture
    batch, channels, *sizes = latent_shape(config)
    shapes = {
        "condition": (batch, geometry.frame_scale + channels, *sizes), "first_latent": (batch, channels, 1, *sizes[1:]),
    }
    if "image_encoder" in architecture:
        shapes["image_embeddings"] = (1, 257, architecture.image_encoder.hidden_size)
    taken = [name for name in config.pipeline.stages.denoise.takes if name in shapes]
    return {name: torch.randn(shapes[name], device=DEVICE) for name in taken}


def peer_inputs(config, latents, dtype):
    """The same in the form that diffusers' pipelines pass to their transformer: input, timesteps, picture tokens."""
    conditions, timestep = random_conditions(config), torch.tensor([500.0], device=DEVICE)
    if "condition" in conditions:
        latents = torch.cat([latents, conditions["condition"]], dim=1)
    if "first_latent" in conditions:
        latents = torch.cat([conditions["first_latent"], latents[:, :, 1:]], dim=2)
        tokens = geometry_of(config).tokens(config.resolution)
        timestep = torch.full((1, tokens), 500.0, device=DEVICE)
        timestep[:, : tokens // latents.shape[2]] = 0
    pictures = conditions.get("image_embeddings")
    return latents.to(dtype), timestep, pictures if pictures is None else pictures.to(dtype)


def project_steps(case, overrides, what):
    """Time the step program, without or with guidance."""
    config = configure(*overrides, *(["guidance_scale=1"] if what == FORWARD else []))
    stage, _, compile_seconds, peak = build(config, "denoise", transformer_module)
    values = step_values(config, *random_inputs(config, getattr(torch, config.model.dtype.transformer)))
    state, *rest = stage.programs.put("step", values)

    def call():
        nonlocal state
        state, report, _ = stage("step", state, *rest)
        return bool(report["finite"])

    seconds, peak = watched(call, repeats_for(config), peak)
    record(what, case, "c", seconds, compile_seconds, peak)
    return stage


def precision(case, overrides, side, options):
    """The guided step in the modes of conf/precision; for fp8 also the number of float8 products in the compiled
    program."""
    for name in options.precisions:
        stage = project_steps(case, [*overrides, f"precision={name}", *FEW_BLOCKS.get(case, [])], f"{STEP}, {name}")
        rows[-1]["fp8_products"] = stage.programs.compiled["step"].result().as_text().count("matmul$f8")
        free()


def step_values(config, latents, texts, row=None):
    """The step program's arguments from torch tensors; `row` are coefficients, by default those of the first step."""
    from wan_torchax.stages.sampling import scheduler_table

    coefficients = scheduler_table(config).coefficients
    slots = numpy.zeros((coefficients.shape[1], *latent_shape(config)), numpy.float32)
    slots[0] = latents.cpu().numpy()
    embeddings = torch.cat(list(texts[: text_count(config)])).float().cpu().numpy()
    row = coefficients[0] if row is None else row
    schedule = {"timestep": numpy.float32(500.0), "coefficients": row, "guidance_scale": config.guidance_scale}
    conditions = {name: value.cpu().numpy() for name, value in random_conditions(config).items()}
    return {"slots": slots}, schedule, {"embeddings": embeddings} | conditions


def velocity(stage, config, latents, texts):
    """The velocity of one forward: a step whose new latents are the velocity itself."""
    slots = stage.recipe.derived["slots"]
    row = numpy.zeros((slots, slots + 1), numpy.float32)
    row[0, slots] = 1
    state, *_ = stage("step", *stage.programs.put("step", step_values(config, latents, texts, row)))
    return numpy.asarray(state["slots"])[0]


def denoise(case, overrides, side, options):
    """A whole video's denoising: exact, with caches, in four steps."""
    from wan_torchax.events import Stepped

    for what in DENOISED.get(case, DENOISED["smoke"]):
        config = configure(*overrides, *RUNS[what])
        stage, resolved, compile_seconds, peak = build(config, "denoise", transformer_module)
        _, texts = random_inputs(config, getattr(torch, config.model.dtype.transformer))
        values = {"embeddings": torch.cat(list(texts[: text_count(config)])).float().cpu().numpy()}
        steps = []

        def note(event, steps=steps):
            steps.append(event) if isinstance(event, Stepped) else None

        began = time.perf_counter()
        stage.run(stage.view_of("denoise", resolved), values, note)
        record(f"denoise, {what}", case, "c", time.perf_counter() - began, compile_seconds, peak)
        for kind in dict.fromkeys(event.work for event in steps):
            seconds = [event.seconds for event in steps if event.work == kind]
            rows[-1][kind] = {"steps": len(seconds), "median": statistics.median(seconds)}
            print(f"    {kind}: {len(seconds)} steps, median {statistics.median(seconds):.4f} s", flush=True)


def floor(case, overrides, side, options):
    """The time of a guided step if it consisted only of attention and products, each timed on its own in plain JAX."""
    import jax

    from wan_torchax.kernels.attention import Attend
    from wan_torchax.kernels.settings import Kernel
    from wan_torchax.runtime.jobs import plan_job
    from wan_torchax.session import session

    resolved = session.place(plan_job(configure(*overrides)))
    config, tokens = resolved.config, resolved.tokens
    architecture = config.model.architecture.transformer
    head_dim, hidden, dtype = architecture.attention_head_dim, architecture.ffn_dim, config.model.dtype.transformer
    dim = head_dim * architecture.num_attention_heads

    def seconds(function, *shapes):
        keys = jax.random.split(jax.random.key(0), len(shapes))
        arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]
        jitted, calls = jax.jit(function), 4  # queued back to back, so that launch overhead does not count

        def burst():
            for _ in range(calls):
                out = jitted(*arrays)
            out.block_until_ready()

        return numpy.array(median_seconds(burst, REPEATS)[0].times) / calls

    def attend(part):
        return Attend(head_dim, Kernel.of(config.attention[part]))

    def product(rows, columns):  # for both prompts; weights in torch's layout
        return seconds(lambda x, weight: x @ weight.T, (2 * tokens, rows), (columns, rows))

    video, text = (1, tokens, dim), (1, config.model.text_tokens, dim)
    parts = {
        "self-attention": 2 * seconds(attend("self"), video, video, video),
        "cross-attention": 2 * seconds(attend("cross"), video, text, text),
        "square products": 6 * product(dim, dim),
        "feed-forward": product(dim, hidden) + product(hidden, dim),
    }
    work = 4 * tokens**2 * dim, 4 * tokens * dim * text[1], 12 * tokens * dim**2, 4 * tokens * dim * hidden
    rates = {name: round(float(2 * flops / numpy.median(parts[name]) / 1e12), 1) for name, flops in zip(parts, work)}
    # The first block's self-attention, whose inputs do not depend on the prompt yet.
    once = (parts["self-attention"] + parts["square products"] * 4 / 6) / 2
    record(FLOOR, case, "c", median_of((architecture.num_layers * sum(parts.values()) - once).tolist()))
    rows[-1]["tflops"] = rates
    print(f"  TFLOP/s: {rates}", flush=True)


# ---------------------------------------------------------------- correctness


def correctness(case, overrides, side, options):
    """Relative error of the velocity against torch in float32: ours and diffusers', both in the config's dtype, and
    ours in each mode of conf/precision."""
    small = ["guidance_scale=1", *(["resolution.frames=17"] if DEVICE == "cuda" else [])]
    config = configure(*overrides, *small)
    model, dtype = transformer_module(config), getattr(torch, config.model.dtype.transformer)
    latents, texts = random_inputs(config, dtype)
    hidden, timestep, pictures = peer_inputs(config, latents, torch.float32)
    velocities = {}
    for name in ("none", *options.precisions):
        ends = FEW_BLOCKS.get(case, []) if name != "none" else []
        there = configure(*overrides, *small, f"precision={name}", *ends)
        stage, *_ = build(there, "denoise", lambda config: model)
        velocities["project" if name == "none" else name] = velocity(stage, config, latents, texts)
    with torch.no_grad():
        tokens = pictures if pictures is None else pictures.to(dtype)
        theirs = model(hidden.to(dtype), timestep, texts[0], tokens, return_dict=False)[0].float().cpu().numpy()
        exact = model.float()(hidden, timestep, texts[0].float(), pictures, return_dict=False)[0].cpu().numpy()
    sides = {"diffusers": theirs} | velocities
    errors = {name: float(numpy.linalg.norm(value - exact) / numpy.linalg.norm(exact)) for name, value in sides.items()}
    rows.append({"what": "error against float32", "case": case, **errors})
    shown = ", ".join(f"{name} {error:.2e}" for name, error in errors.items())
    print(f"relative error against float32: {shown}", flush=True)


# ---------------------------------------------------------------- VAE and text encoder


def vae(case, overrides, side, options, dtype="float32"):
    config = configure(*overrides, f"model.dtype.vae={dtype}")
    torch.manual_seed(1)
    latents = torch.randn(latent_shape(config), device=DEVICE, dtype=getattr(torch, dtype))
    if side == "ours":
        from wan_torchax.events import silence

        stage, resolved, compile_seconds, peak = build(config, "decode", vae_module)
        values = {"latents": latents.float().cpu().numpy()}
        seconds, peak = watched(lambda: stage.run(stage.view_of("decode", resolved), values, silence), REPEATS, peak)
        return record(f"VAE decode {dtype}", case, "c", seconds, compile_seconds, peak)
    model = vae_module(config)
    torch_peak()
    with torch.no_grad():
        seconds, _ = median_seconds(lambda: model.decode(latents).sample, REPEATS)
    record(f"VAE decode {dtype}", case, "a", seconds, None, torch_peak())


def encode(case, overrides, side, options):
    """The VAE's encoder on a picture followed by grey frames, as in image-to-video."""
    config = configure(*overrides)
    if "encode" not in config.pipeline.stages:
        return skipped.append(f"encode {case}: its pipeline has no such stage")
    size = config.resolution
    if side == "ours":
        from wan_torchax.events import silence

        stage, resolved, compile_seconds, peak = build(config, "encode", vae_module)
        view, values = stage.view_of("encode", resolved), resolved.inputs()
        seconds, peak = watched(lambda: stage.run(view, values, silence), REPEATS, peak)
        return record("VAE encode float32", case, "c", seconds, compile_seconds, peak)
    model = vae_module(config)
    pixels = torch.zeros((1, 3, size.frames, size.height, size.width), device=DEVICE)
    torch_peak()
    with torch.no_grad():
        seconds, _ = median_seconds(lambda: model.encode(pixels).latent_dist.mode(), REPEATS)
    record("VAE encode float32", case, "a", seconds, None, torch_peak())


def text(case, overrides, side, options):
    config = configure(*overrides)
    tokens = torch.randint(3, 600, (2, config.model.text_tokens), device=DEVICE)
    mask = torch.ones_like(tokens)
    if side == "ours":
        stage, _, compile_seconds, peak = build(config, "text", text_module)
        inputs = stage.programs.put("text_encoder", (tokens.cpu().numpy(), mask.cpu().numpy()))
        seconds, peak = watched(lambda: stage("text_encoder", *inputs)["embeddings"].block_until_ready(), 10, peak)
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
pipeline(prompt, height=height, width=width, num_frames=frames, num_inference_steps=steps, guidance_scale=5.0,
         output_type="np", callback_on_step_end=after_step)
print(first[0], time.time() - began)
"""


def pipeline(case, overrides, side, options):
    """Seconds from process start to the first denoised step and to the frames, from a checkpoint on disk. One run of
    each warms the compilation caches; then the median of five more, interleaved. The project also with a prompt that
    it has encoded before."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(configure(*overrides), Path(scratch) / "model")
        free()
        measures = {("b", ""): peer_pipeline} if DEVICE == "cuda" else {}
        measures |= {("c", ""): project_pipeline, ("c", ", known prompt"): project_pipeline}
        taken = {which: [] for which in measures}
        for number in range(1 + REPEATS):
            for which, measure in measures.items():
                taken[which].append(measure(folder, Path(scratch), overrides, f"{PROMPT} {number}"))
                first, frames = taken[which][-1]
                shown = "".join(which)
                print(f"  ({shown}) start to first step {first:.2f} s, to frames {frames:.2f} s", flush=True)
        for (column, known), times in taken.items():
            first, whole = map(median_of, zip(*times[1:]))
            record(f"start to first step{known}", case, column, first)
            record(f"start to frames, {STEPS} steps{known}", case, column, whole)


def peer_pipeline(folder, scratch, overrides, prompt):
    size = configure(*overrides).resolution
    numbers = map(str, (STEPS, size.height, size.width, size.frames, time.time()))
    command = [sys.executable, "-c", PEER, str(folder), prompt, *numbers]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=offline)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    return tuple(map(float, done.stdout.split()[-2:]))


def project_pipeline(folder, scratch, overrides, prompt):
    """run.py as a user would run it, until it writes metrics.json, minus the time after the first step or the frames.
    """
    shutil.rmtree(scratch / "run", ignore_errors=True)
    began = time.time()
    run_project(folder, scratch, [*overrides, f"steps={STEPS}", f"prompt={prompt}"])
    written = scratch / "run/metrics.json"
    metrics, whole = json.loads(written.read_text()), written.stat().st_mtime - began
    print(f"  {metrics['seconds']} {metrics['start']}", flush=True)
    parts = ("load_vae", "decode", "write")
    after = sum(metrics["step_seconds"][1:]) + sum(metrics["seconds"][part] for part in parts)
    return whole - after, whole - metrics["seconds"]["write"]


def run_project(folder, scratch, overrides) -> None:
    """run.py with a checkpoint, into scratch/run, with its own caches."""
    folders = [f"model.path={folder}", f"hydra.run.dir={scratch}/run", f"compile.cache_dir={scratch}/cache"]
    command = [sys.executable, "run.py", *MESH, *overrides, *folders, f"compile.store={scratch}/store"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-600:])


def videos(case, overrides, side, options):
    """Seconds per video of a list in a process that has made one before: text, four steps, decoding, the file. The
    decoder's noise is faint: strong noise makes files of 20 MB, which take twice as long to encode as a real video."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(configure(*overrides), Path(scratch) / "model", contrast=0.06)
        prompts = [f"{PROMPT}, {number}" for number in ("one", "two", "three", "four", "five", "six")]
        run_project(folder, scratch, [*overrides, f"prompts={json.dumps(prompts)}", *FEW])
        files = sorted(Path(scratch).glob("run/*/metrics.json"), key=lambda file: file.stat().st_mtime)
        seconds = [json.loads(file.read_text())["seconds"] for file in files]
        print(*seconds, sep="\n", flush=True)
        totals = median_of([one["total"] for one in seconds[1:]])
        record("prompt to video.mp4, four steps without guidance", case, "c", totals)
        parts = {name: statistics.median(one[name] for one in seconds[1:]) for name in seconds[-1]}
        rows[-1] |= {"parts": parts, "file_megabytes": files[-1].with_name("video.mp4").stat().st_size / 1e6}
        print(rows[-1], flush=True)


def write_checkpoint(config, folder: Path, contrast: float = 1.0) -> Path:
    """A whole pipeline with random weights in diffusers' layout, with the demo model's tokenizer and scheduler."""
    shutil.copytree(ROOT / "models/demo", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, make in {"transformer": transformer_module, "text_encoder": text_module, "vae": vae_module}.items():
        module = make(config)
        if name == "vae":
            module.decoder.conv_out.weight.data *= contrast
        module.save_pretrained(folder / name)
    return folder


# ---------------------------------------------------------------- all together


# part -> (function, the sides whose processes run it)
PARTS = {
    "step": (transformer, ("peers", "ours")),
    "forward": (functools.partial(transformer, what=FORWARD), ("peers", "ours")),
    "precision": (precision, ("ours",)),
    "floor": (floor, ("ours",)),
    "denoise": (denoise, ("ours",)),
    "vae": (vae, ("peers", "ours")),
    "vae-bf16": (functools.partial(vae, dtype="bfloat16"), ("peers", "ours")),
    "encode": (encode, ("peers", "ours")),
    "text": (text, ("peers", "ours")),
    "correctness": (correctness, ("ours",)),
    "pipeline": (pipeline, ("peers",)),  # starts processes for both
    "videos": (videos, ("ours",)),
    "whole": (whole, ("peers",)),
}
QUICK_PARTS = ["floor", "text", "correctness", "denoise"]
ALL_SIZES = ("step", "forward", "precision", "floor", "denoise")  # the others run only the first case


def measure(side, cases, options):
    """Measure everything of one side in this process. The file is rewritten after each part."""
    for part in (part for part in options.only if side in PARTS[part][1]):
        for case, overrides in list(cases.items())[: None if part in ALL_SIZES else 1]:
            try:
                PARTS[part][0](case, [*overrides, *options.set], side, options)
            except Exception as error:  # keep the figures of the other parts
                reason = " ".join(str(error).split())[:600]
                skipped.append(f"{part} {case} ({side}): {type(error).__name__}: {reason}")
            free()
            Path(options.json).write_text(json.dumps({"rows": rows, "skipped": skipped}))


def measure_in_a_process(side):
    """The same command in its own process; its rows are collected even if it dies."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        status = subprocess.run([sys.executable, *sys.argv, "--side", side, "--json", str(result)]).returncode
        measured = json.loads(result.read_text()) if result.exists() else {"rows": [], "skipped": []}
        rows.extend(measured["rows"]), skipped.extend(measured["skipped"])
        if status:
            skipped.append(f"the rest of {side}: exit status {status}")


def ratios():
    """The fastest peer's seconds over ours, by part and case; for a guided step also ours over the floor."""
    taken = {}
    for row in (row for row in rows if row.get("column") == "c"):
        what, case = row["what"], row["case"]
        same = [other for other in rows if (other["what"], other["case"]) == (what, case)]
        peers = [other["seconds"] for other in same if other["column"] != "c"]
        if peers:
            taken[f"{what} {case}"] = round(min(peers) / row["seconds"], 3)
        floors = [other["seconds"] for other in rows if (other["what"], other["case"]) == (FLOOR, case)]
        if what.startswith(f"{STEP}, "):
            mode, exact = what.rpartition(" ")[2], [
                other["seconds"] for other in rows
                if (other["what"], other["case"], other.get("column")) == (STEP, case, "c")
            ]
            if exact:
                taken[f"{STEP} over that with {mode} {case}"] = round(exact[0] / row["seconds"], 3)
        if floors and what == STEP:
            taken[f"{STEP} over floor {case}"] = round(row["seconds"] / floors[0], 3)
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all, in a smoke test the quick ones")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    eager = "cases to time the transformer in column (a) too"
    parser.add_argument("--eager", nargs="*", choices=CASES, default=["1.3b-480p"], help=eager)
    modes = "of conf/precision, for the parts precision and correctness"
    parser.add_argument("--precisions", nargs="*", default=["fp8", "int8_weights"], help=modes)
    parser.add_argument("--set", nargs="*", default=[], help="overrides for the configs, e.g. attention=cudnn")
    parser.add_argument("--smoke", action="store_true", help="small shapes of the demo model")
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--side", choices=("peers", "ours"), help="measure one side, in this process; --json is needed")
    options = parser.parse_args()
    options.only = options.only or (QUICK_PARTS if options.smoke else list(PARTS))
    if options.side and not options.json:
        parser.error("--side needs --json")
    cases = {"smoke": SMOKE} if options.smoke else {name: CASES[name] for name in options.cases}
    torch.backends.cudnn.benchmark = True
    if options.side:
        return measure(options.side, cases, options)
    versions = {name: version(name) for name in ("torch", "diffusers", "transformers", "jax")}
    device, today = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", time.strftime("%Y-%m-%d")
    print(f"{device}; {', '.join(f'{name} {number}' for name, number in versions.items())}; {today}", flush=True)
    for side in ("peers", "ours"):
        measure_in_a_process(side)
    lines = [f"{name:34} {value}" for name, value in ratios().items()]
    print("ratio, the faster of (a) and (b) over (c):", *lines, sep="\n  ")
    print("skipped:", *(skipped or ["nothing"]), sep="\n  ")
    command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
    made = {"command": [command], "device": device, "date": today, "versions": versions}
    result = made | {"rows": rows, "ratios": ratios(), "skipped": skipped}
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
