"""HunyuanVideo 1.5, FLUX.1 and Wan Animate compared with diffusers on one NVIDIA GPU: one forward pass, and
HunyuanVideo's VAE.

    python benchmarks/families_gpu.py                       # peers and project, in turns, each in a process of its own
    python benchmarks/families_gpu.py --smoke               # tiny models, on any machine

Columns: (b) diffusers with torch.compile on its repeated blocks and its best working attention; (v) the same, given
only the valid tokens and no mask, where a model masks; (c) this project. Random weights; medians of synchronised calls.
"""
import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu  # benchmarks/gpu.py
import torch

VALID = 256  # tokens of a prompt
LARGE = 30.0  # deviation of quantized values
SMALL_HUNYUAN = [
    "model.architecture.transformer.num_layers=2", "model.architecture.transformer.num_attention_heads=2",
    "model.architecture.vae.block_out_channels=[16,16,32,32,32]", "model.architecture.vae.layers_per_block=1",
    "resolution.height=64", "resolution.width=64", "resolution.frames=5",
]
SMALL_FLUX = [
    "model.architecture.transformer.num_layers=1", "model.architecture.transformer.num_single_layers=1",
    "model.architecture.transformer.num_attention_heads=2", "resolution.height=128", "resolution.width=128",
]
ANIMATE = "animate-14b-720p"
SMALL_ANIMATE = [
    "model.architecture.transformer.num_layers=5", "model.architecture.transformer.num_attention_heads=2",
    "model.architecture.transformer.ffn_dim=64", "model.architecture.transformer.added_kv_proj_dim=256",
    "model.architecture.transformer.motion_encoder_size=16",
    "model.architecture.transformer.face_encoder_hidden_dim=16",
    "resolution.height=64", "resolution.width=64", "resolution.frames=5", "pipeline.segments.frames=5",
]
ANIMATE_2 = "animate2-14b-640p"
SMALL_ANIMATE_2 = [one for one in SMALL_ANIMATE if "motion" not in one and "face" not in one]
CASES = {
    ANIMATE_2: (
        ["model=wan22_animate2_14b_distilled", "resolution.height=640", "resolution.width=800"], SMALL_ANIMATE_2,
    ),
    ANIMATE: (["model=wan22_animate_14b", "resolution.height=720", "resolution.width=1280"], SMALL_ANIMATE),
    "hunyuan15-480p": (["model=hunyuan15_t2v_480p", "guidance_scale=1"], SMALL_HUNYUAN),
    "flux1-dev": (["model=flux1_dev", "compile.xla_flags=['--xla_gpu_dot_merger_threshold_mb=0']"], SMALL_FLUX),
}


def config_of(case: str, smoke: bool):
    overrides, small = CASES[case]
    return gpu.configure(*overrides, *(small if smoke else []))


# ---------------------------------------------------------------- this project


def random_arrays(specs):
    """A component's arrays: normal matrices, ones for what norms multiply, zeros for biases; quantized values are large
    and their scales small."""
    import jax

    arrays = {}
    for number, (name, spec) in enumerate(specs.items()):
        if spec.value is not None:
            arrays[name] = jax.device_put(spec.value, spec.sharding)
            continue
        shape, dtype = spec.struct.shape, spec.struct.dtype
        fill = 1 if "norm" in name and name.endswith("weight") else 0 if name.endswith("bias") else None
        fill = 0.02 / LARGE if name.endswith(".scale") else fill
        make = random_array(shape, dtype, fill, spec.sharding)
        arrays[name] = make(jax.random.key(number)).block_until_ready()
    return arrays


@functools.cache
def random_array(shape, dtype, fill: float | None, sharding):
    """A compiled function that makes such an array from a key: models have few shapes."""
    import jax

    deviation = LARGE if dtype.itemsize == 1 else 0.02

    def make(key):
        if fill is not None:
            return jax.numpy.full(shape, fill, dtype)
        return (jax.random.normal(key, shape) * deviation).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def built(config, name: str):
    """A compiled stage with random weights, and its compile seconds."""
    from wan_torchax.events import Compiled
    from wan_torchax.runtime.jobs import plan_job
    from wan_torchax.runtime.programs import compiling
    from wan_torchax.session import session

    stage, report = session.build(session.place(plan_job(config)), [name])[name], []
    with compiling({name: stage.programs}, report.append):
        for component, specs in stage.specs.items():
            stage.components[component].arrays = random_arrays(specs)
        for future in stage.programs.compiled.values():
            future.result()
    return stage, sum(event.seconds for event in report if isinstance(event, Compiled))


def random_values(structs):
    """Arguments of a program: noise, and for counts of tokens a prompt's usual number."""
    import jax
    import numpy

    def value(path, struct):
        name = str(getattr(path[-1], "key", ""))
        if "count" in name:
            return numpy.full(struct.shape, 0 if "glyph" in name else VALID, struct.dtype)
        if name in ("timestep", "guidance"):
            return numpy.full(struct.shape, 500.0 if name == "timestep" else 3.5, struct.dtype)
        return numpy.random.default_rng(0).standard_normal(struct.shape, numpy.float32).astype(struct.dtype)

    return jax.tree_util.tree_map_with_path(value, structs)


def random_arguments(stage):
    """Of a step, on the device; what is kept of a driving video is too large for the host, and is read from noise."""
    import jax

    from wan_torchax.runtime import weights
    from wan_torchax.runtime.programs import put

    state, schedule, conditions = stage.programs.entries["step"].arguments
    kept = {name: conditions[name] for name in conditions if name == "driving"}
    structs = state, schedule, {name: conditions[name] for name in conditions if name not in kept}
    state, schedule, conditions = put(structs, random_values(structs))
    if kept:
        empty, driving = stage.programs.entries["read"].arguments
        zeros = jax.tree.map(weights.zeros, empty)
        conditions["driving"] = stage("read", zeros, put(driving, random_values(driving)))
    return state, schedule, conditions


def project_step(case: str, smoke: bool, repeats: int) -> None:
    stage, seconds = built(config_of(case, smoke), "driven" if case == ANIMATE_2 else "denoise")
    state, *rest = random_arguments(stage)

    def call():
        nonlocal state
        state, report, _ = stage("step", state, *rest)
        return bool(report["finite"])

    median, peak = gpu.watched(call, repeats, 0.0)
    gpu.record("one forward", case, "c", median, seconds, peak)
    parts = kernel_seconds(call)
    gpu.record("of it, attention and products", case, "c", parts["attention"] + parts["projections"])
    gpu.rows[-1] |= {"parts": parts}
    gpu.free()


def kernel_seconds(call) -> dict[str, float]:
    """Seconds of a call's kernels on the GPU, by what they compute; copies are all those of no library."""
    import jax

    from wan_torchax.tasks.verify.profile import COPIES, LIBRARIES, of_kernel

    total = dict.fromkeys((*LIBRARIES, COPIES), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    for event in line.events if "Stream" in line.name else ():
                        total[of_kernel(event.name, {})] += event.duration_ns / 1e9
    return total


def project_decode(case: str, smoke: bool, repeats: int) -> None:
    """All chunks of a video, frames on the host, as a run makes them."""
    from wan_torchax.events import silence
    from wan_torchax.runtime.jobs import plan_job
    from wan_torchax.session import session

    config = config_of(case, smoke)
    stage, seconds = built(config, "decode")
    view = stage.view_of("decode", session.place(plan_job(config)))
    values = {"latents": torch.randn(gpu.latent_shape(config)).numpy()}
    median, peak = gpu.watched(lambda: stage.run(view, values, silence), repeats, 0.0)
    gpu.record("decode", case, "c", median, seconds, peak)
    gpu.free()


def check_beside(smoke: bool) -> None:
    """Attention with extra tokens, counts that differ: the chip's kernels against plain JAX in float32."""
    import jax
    import jax.numpy as jnp

    from wan_torchax.kernels.attention import Attend, Beside
    from wan_torchax.kernels.settings import Kernel

    heads, tokens, text = (1, 200, 300) if smoke else (4, 1000, 300)
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(2, tokens, heads * 128)] * 3 + [(2, text, heads * 128)] * 3
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]
    counts = jnp.asarray([256, 6], jnp.int32)

    def attend(kernel, dtype):
        own = [array.astype(dtype) for array in arrays]
        out, _ = Attend(128, kernel).counted(*own[:3], beside=Beside(*own[3:], counts))
        return [part.astype(jnp.float32) for part in (out[0], out[1][:, :6])]

    kernel = Kernel(kernel="xla") if smoke else Kernel(kernel="hopper", block_q=128, block_kv=128)
    truth = jax.jit(lambda: attend(Kernel(kernel="xla"), jnp.float32))()
    ours = jax.jit(lambda: attend(kernel, jnp.bfloat16))()
    errors = [float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other)) for one, other in zip(ours, truth)]
    print(f"attention with extra tokens, relative error: {errors[0]:.5f}, theirs {errors[1]:.5f}", flush=True)
    gpu.rows.append({"what": "attention with extra tokens", "case": kernel.kernel, "column": "c", "seconds": 0.0,
                     "relative_errors": errors})


def check_frames(smoke: bool) -> None:
    """Attention of each frame to its own of another video: the chip's kernels against plain JAX in float32."""
    import jax
    import jax.numpy as jnp

    from wan_torchax.kernels.attention import Attend, OfFrames
    from wan_torchax.kernels.settings import Kernel

    grid = (3, 5, 8) if smoke else (5, 20, 50)
    frames, size = grid[0], grid[1] * grid[2]
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(2, frames * size, 4 * 128)] * 3 + [(1, 1, (frames - 1) * size, 4 * 128)] * 2
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]

    def attend(kernel, dtype):
        own = [array.astype(dtype) for array in arrays]
        others = OfFrames(*own[3:], jnp.int32(0))
        return Attend(128, kernel, grid=grid).counted(*own[:3], others=others)[0].astype(jnp.float32)

    kernel = Kernel(kernel="xla") if smoke else Kernel(kernel="hopper", block_q=128, block_kv=128)
    truth = jax.jit(lambda: attend(Kernel(kernel="xla"), jnp.float32))()
    error = float(jnp.linalg.norm(jax.jit(lambda: attend(kernel, jnp.bfloat16))() - truth) / jnp.linalg.norm(truth))
    print(f"attention to frames of another video, relative error: {error:.5f}", flush=True)
    gpu.rows.append({"what": "attention to frames", "case": kernel.kernel, "column": "c", "seconds": 0.0,
                     "relative_errors": [error]})


# ---------------------------------------------------------------- diffusers


def peer_inputs(case: str, config, masked: bool) -> dict:
    dtype, device = torch.bfloat16, gpu.DEVICE

    def noise(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    architecture = config.model.architecture.transformer
    batch, channels, frames, height, width = gpu.latent_shape(config)
    if case.startswith("flux"):
        tokens, text = height * width // 4, config.model.text_tokens
        return {
            "hidden_states": noise(1, tokens, architecture.in_channels),
            "timestep": torch.tensor([0.5], device=device, dtype=dtype),
            "encoder_hidden_states": noise(1, text, architecture.joint_attention_dim),
            "pooled_projections": noise(1, architecture.pooled_projection_dim),
            "guidance": torch.tensor([3.5], device=device, dtype=dtype),
            "img_ids": torch.zeros(tokens, 3, device=device), "txt_ids": torch.zeros(text, 3, device=device),
        }
    if case == ANIMATE:
        side = architecture.motion_encoder_size
        return {
            "hidden_states": noise(1, architecture.in_channels, frames + 1, height, width),
            "timestep": torch.tensor([500.0], device=device),
            "encoder_hidden_states": noise(1, config.model.text_tokens, architecture.text_dim),
            "encoder_hidden_states_image": noise(1, 257, architecture.image_dim),
            "pose_hidden_states": noise(1, channels, frames, height, width),
            "face_pixel_values": noise(1, 3, config.resolution.frames, side, side),
        }
    text, glyphs = config.model.text_tokens if masked else VALID, 256 if masked else 1
    mask = (torch.arange(text, device=device) < VALID)[None].long()
    return {
        "hidden_states": noise(1, architecture.in_channels, frames, height, width),
        "timestep": torch.tensor([500.0], device=device, dtype=dtype),
        "encoder_hidden_states": noise(1, text, architecture.text_embed_dim), "encoder_attention_mask": mask,
        "encoder_hidden_states_2": noise(1, glyphs, architecture.text_embed_2_dim),
        "encoder_attention_mask_2": torch.zeros(1, glyphs, device=device, dtype=torch.long) + (0 if masked else 1),
        "image_embeds": torch.zeros(1, 729 if masked else 1, architecture.image_embed_dim, device=device, dtype=dtype),
    }


def without_masks() -> None:
    """Take the masks from HunyuanVideo's attention: right where every token is valid, and fast attention takes none.
    torch.compile then drops the code that makes them."""
    from diffusers.models.transformers import transformer_hunyuan_video15 as module

    shipped = module.dispatch_attention_fn
    module.dispatch_attention_fn = lambda *streams, attn_mask=None, **others: shipped(*streams, **others)


def peer_step(case: str, smoke: bool, repeats: int, column: str) -> None:
    import diffusers
    from omegaconf import OmegaConf

    config = config_of(case, smoke)
    kind = {ANIMATE: diffusers.WanAnimateTransformer3DModel, "flux1-dev": diffusers.FluxTransformer2DModel}.get(
        case, diffusers.HunyuanVideo15Transformer3DModel
    )
    settings = OmegaConf.to_container(config.model.architecture.transformer)
    model = gpu.random_module(lambda: kind(**settings), torch.bfloat16)
    if case != ANIMATE:  # which takes its inputs to the dtypes of its parts
        model = model.to(torch.bfloat16)
    if column == "v":
        without_masks()
    if gpu.DEVICE == "cuda":
        if case != "hunyuan15-480p" or column == "v":
            model.set_attention_backend("_native_cudnn")
        model.compile_repeated_blocks(fullgraph=True)
    inputs = peer_inputs(case, config, masked=column != "v")

    @torch.no_grad()
    def call():
        return model(**inputs, return_dict=False)[0]

    gpu.torch_peak()
    median, first = gpu.median_seconds(call, repeats, warm_up=2)
    gpu.record("one forward", case, column, median, first - median, gpu.torch_peak())


def peer_decode(case: str, smoke: bool, repeats: int) -> None:
    import diffusers
    from omegaconf import OmegaConf

    config = config_of(case, smoke)
    settings = OmegaConf.to_container(config.model.architecture.vae)
    vae = gpu.random_module(lambda: diffusers.AutoencoderKLHunyuanVideo15(**settings), torch.bfloat16)
    vae = vae.to(torch.bfloat16)
    latents = torch.randn(gpu.latent_shape(config), device=gpu.DEVICE, dtype=torch.bfloat16)
    for tiled in (True, False):
        vae.enable_tiling() if tiled else vae.disable_tiling()
        gpu.torch_peak()
        try:
            with torch.no_grad():
                median, _ = gpu.median_seconds(lambda: vae.decode(latents, return_dict=False)[0], repeats)
            gpu.record(f"decode{', tiled' if tiled else ''}", case, "b", median, None, gpu.torch_peak())
        except torch.OutOfMemoryError:
            print(f"decode {case} (b): out of memory, tiled={tiled}", flush=True)


# ---------------------------------------------------------------- all of it


JOBS = {
    "check": lambda smoke, n: check_beside(smoke),
    "c-hunyuan": lambda smoke, n: project_step("hunyuan15-480p", smoke, n),
    "c-flux": lambda smoke, n: project_step("flux1-dev", smoke, 4 * n),
    "b-flux": lambda smoke, n: peer_step("flux1-dev", smoke, 4 * n, "b"),
    "v-hunyuan": lambda smoke, n: peer_step("hunyuan15-480p", smoke, n, "v"),
    "b-hunyuan": lambda smoke, n: peer_step("hunyuan15-480p", smoke, min(n, 3), "b"),
    "check-frames": lambda smoke, n: check_frames(smoke),
    "c-animate2": lambda smoke, n: project_step(ANIMATE_2, smoke, n),
    "c-animate": lambda smoke, n: project_step(ANIMATE, smoke, n),
    "b-animate": lambda smoke, n: peer_step(ANIMATE, smoke, n, "b"),
    "c-decode": lambda smoke, n: project_decode("hunyuan15-480p", smoke, min(n, 3)),
    "b-decode": lambda smoke, n: peer_decode("hunyuan15-480p", smoke, min(n, 3)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--job", help="one job, in this process")
    options = parser.parse_args()
    options.repeats = 1 if options.smoke else options.repeats
    if options.job:
        JOBS[options.job](options.smoke, options.repeats)
        print("ROWS " + json.dumps(gpu.rows), flush=True)
        return
    rows = []
    for job in options.only:
        command = [sys.executable, __file__, "--job", job, "--repeats", str(options.repeats)]
        command += ["--smoke"] * options.smoke
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        print(answer.stdout if answer.returncode == 0 else f"{job}: failed\n{answer.stderr[-3000:]}", flush=True)
        rows += [row for line in answer.stdout.splitlines() if line.startswith("ROWS ") for row in json.loads(line[5:])]
        about = {"command": "python benchmarks/families_gpu.py", "device": device(), "n": options.repeats}
        report = about | {"versions": versions(), "rows": rows}
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=2) + "\n")
    best = {(row["what"], row["case"], row["column"]): row["seconds"] for row in rows}
    for (what, case, column), seconds in best.items():
        ours = best.get((what.split(",")[0], case, "c"), math.nan)
        if column != "c":
            print(f"{what} {case} ({column}): {seconds / ours:.2f} times the project's {ours:.4f} s")
    print(json.dumps(report))


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions() -> dict:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "diffusers", "jax", "torchax", "transformers")}


if __name__ == "__main__":
    main()
