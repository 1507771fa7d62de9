"""What a run leaves in its folder: stage results, video, pictures, config and metrics; and how a later run picks them up."""
import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import resource
import subprocess
import time
from pathlib import Path

import numpy
from omegaconf import OmegaConf
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import media
import schema

log = logging.getLogger("wan")
GIB = 2**30
PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers", "hydra-core", "numpy")
RESULTS = {"text": "embeddings", "denoise": "latents", "decode": "frames"}

# What each stage's result depends on, beside what the stages before it depend on. Meshes, shardings and kernels are not
# here: they change the last bits, not the video.
SETTINGS = {
    "text": ("model.path", "model.revision", "model.text_tokens", "model.dtype.text_encoder", "model.dtype.transformer"),
    "denoise": ("seed", "steps", "guidance_scale", "scheduler", "resolution.height", "resolution.width", "resolution.frames", "resolution.flow_shift"),
    "decode": ("model.dtype.vae",),
}


class Clock:
    """Seconds by name, steps and compilations apart; everything metrics.json reports of time."""

    def __init__(self):
        self.seconds, self.steps, self.programs = {}, [], {}
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name):
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began

    def compiled(self, program, seconds, from_cache, memory):
        """Told of every program as soon as it is compiled."""
        plan = {part: round(getattr(memory, f"{part}_size_in_bytes") / GIB, 4) for part in ("argument", "output", "temp", "generated_code")}
        self.programs[program] = {"seconds": round(seconds, 3), "from_cache": from_cache, "memory_gib": plan}
        log.info(
            "compiled %s in %.1f s (%s); per device %.3f GiB arguments, %.3f GiB temporaries",
            program, seconds, "from the cache" if from_cache else "not in the cache", plan["argument"], plan["temp"],
        )


# ---------------------------------------------------------------- stage results


def stage_settings(config, stage, prompts) -> dict:
    """Everything a stage's result depends on, by key."""
    keys = [key for name in schema.STAGES[: schema.STAGES.index(stage) + 1] for key in SETTINGS[name]]
    settings = {key: OmegaConf.select(config, key) for key in keys}
    settings = {key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value for key, value in settings.items()}
    return settings | {"prompt.text": prompts[0], "prompt.negative": prompts[1], "guided": config.guidance_scale != 1}


def save(config, folder: Path, stage: str, result: numpy.ndarray, prompts) -> None:
    """A stage's result with the settings that made it. The file appears whole or not at all."""
    path = folder / f"{stage}.safetensors"
    partial = path.with_name(f".partial-{path.name}")
    save_file({RESULTS[stage]: numpy.ascontiguousarray(result)}, partial, metadata={"settings": json.dumps(stage_settings(config, stage, prompts))})
    os.replace(partial, path)


def finished(config, prompts) -> dict[str, numpy.ndarray]:
    """The results of the folder named by `resume`; refused where they were made with other settings than these.

    A stage before the first one asked for must be there; one that is asked for is taken if it is there.
    """
    if config.resume is None:
        return {}
    results, first = {}, schema.STAGES.index(config.stages[0])
    for number, stage in enumerate(schema.STAGES):
        path = Path(config.resume) / f"{stage}.safetensors"
        if path.is_file():
            results[stage] = read(path, stage, stage_settings(config, stage, prompts))
            log.info("%s: taken from %s", stage, path)
        elif number == first - 1:
            raise schema.ConfigError(f"resume={config.resume}: stages={list(config.stages)} needs {path.name}, which is not there; add {stage} to stages")
    return results


def read(path: Path, stage: str, settings: dict) -> numpy.ndarray:
    try:
        with safe_open(path, framework="numpy") as handle:
            made_with, result = json.loads(handle.metadata()["settings"]), handle.get_tensor(RESULTS[stage])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise schema.ConfigError(f"{path}: not a stage result of this program ({error}); remove it to make it again") from error
    differences = [f"{key}: {made_with.get(key)!r} there, {value!r} now" for key, value in settings.items() if made_with.get(key) != value]
    if differences:
        listed = "\n".join(f"  - {line}" for line in differences)
        raise schema.ConfigError(f"{path} was made with other settings; run without resume, or with the same:\n{listed}")
    return result


# ---------------------------------------------------------------- outputs


def write_outputs(config, folder: Path, prompts, results) -> Path:
    """Video, poster and contact sheet if there are frames; the resolved config always. Returns what to show the user."""
    resolved = OmegaConf.to_container(config, resolve=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    if "decode" not in results:
        return folder
    comment = {"prompt": prompts[0], "negative_prompt": prompts[1], "seed": config.seed, "config_hash": config_hash(resolved), "config": resolved}
    video = folder / "video.mp4"
    media.write_video(video, results["decode"], config.resolution.fps, config.output.quality, prompts[0], comment)
    media.write_pictures(folder, results["decode"])
    return video


def write_preview(folder: Path, frame: numpy.ndarray) -> None:
    """The middle frame as it looks so far, always under the same name."""
    partial = folder / ".partial-preview.png"
    Image.fromarray(frame).save(partial)
    os.replace(partial, folder / "preview.png")


def config_hash(resolved: dict) -> str:
    """Twelve hex digits that change with any setting."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:12]


def write_metrics(config, folder: Path, mesh, clock: Clock) -> None:
    """Times (compilation apart, the device in step with the clock), memory, versions and hardware, as metrics.json."""
    device = mesh.devices.flat[0]
    statistics = device.memory_stats() or {}
    steps = sorted(clock.steps)
    metrics = {
        "seconds": {name: round(value, 4) for name, value in clock.seconds.items()} | {"total": round(time.perf_counter() - clock.began, 4)},
        "step_seconds": [round(value, 4) for value in clock.steps],
        "step_seconds_median": round(steps[len(steps) // 2], 4) if steps else None,
        "compile": clock.programs,
        "peak_device_gib": round(statistics["peak_bytes_in_use"] / GIB, 3) if "peak_bytes_in_use" in statistics else None,
        "peak_host_gib": round(peak_host_bytes() / GIB, 3),
        "device": device.device_kind,
        "devices": mesh.devices.size,
        "mesh": dict(mesh.shape),
        "versions": versions(),
        "git_revision": git_revision(),
        "config_hash": config_hash(OmegaConf.to_container(config, resolve=True)),
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")


def peak_host_bytes() -> int:
    """The most memory this process has held. Linux's getrusage would count what its parent held when it forked."""
    with contextlib.suppress(OSError):
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_revision() -> str | None:
    """The commit this code is at, with "+" if files differ from it; None outside a git checkout."""
    here = Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        revision = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, check=True, text=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, check=True, text=True).stdout
        return revision + ("+" if changed else "")
    return None
