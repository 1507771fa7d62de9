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
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from wan_torchax.config import schema
from wan_torchax.records import media

log = logging.getLogger("wan")
GIB = 2**30
PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers", "hydra-core", "numpy")
RESULTS = {"text": "embeddings", "denoise": "latents", "decode": "frames"}

# What each stage's result depends on, beside what the stages before it depend on. Meshes, shardings and kernels are not
# here: they change the last bits, not the video. A window does change it.
SETTINGS = {
    "text": ("model.path", "model.revision", "model.text_tokens", "model.dtype.text_encoder", "model.dtype.transformer", "ops"),
    "denoise": ("seed", "steps", "guidance_scale", "scheduler", "resolution.height", "resolution.width", "resolution.frames",
                "resolution.flow_shift", "attention.self.window"),
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

    def median_step(self) -> float | None:
        return sorted(self.steps)[len(self.steps) // 2] if self.steps else None

    def report(self) -> dict:
        """Times with the device in step with the clock and compilation apart."""
        median = self.median_step()
        return {
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()} | {"total": round(time.perf_counter() - self.began, 4)},
            "step_seconds": [round(value, 4) for value in self.steps],
            "step_seconds_median": median and round(median, 4),
            "compile": self.programs,
        }

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


# ---------------------------------------------------------------- configurations, stored and taken over


# What belongs to one call of the program, not to the video it makes.
CALL = ("task", "stages", "resume", "replay", "prompts", "seeds", "shard", "sweep", "traceback", "keep_resident", "preview_every", "profile",
        "distributed")


def settle(config, prompts) -> dict:
    """The configuration as it stands before this machine adds to it: kept as config.yaml, carried by the video."""
    settled = OmegaConf.to_container(config, resolve=True)
    settled["prompt"] = {"text": prompts[0], "negative": prompts[1], "file": None, "negative_file": None}
    settled["compile"]["cache_dir"] = None  # a place on this machine
    return settled


def config_hash(settled: dict) -> str:
    """Twelve hex digits that change with any setting that can change the video or its time."""
    counted = {key: value for key, value in settled.items() if key not in CALL}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:12]


def take_over(config, overrides):
    """`resume` and `replay`: the stored configuration, with what this command line says on top."""
    key = "replay" if config.replay is not None else "resume"
    if config[key] is None:
        return config
    try:
        taken = OmegaConf.merge(schema.root(), read_stored(Path(config[key]), key)["config"])
    except OmegaConfBaseException as error:
        raise schema.ConfigError(f"{key}={config[key]}: made by another version of this program ({str(error).splitlines()[0]})") from error
    said = [override.lstrip("+~").partition("=")[0] for override in overrides]
    if "preset" in said:
        raise schema.ConfigError(f"{key}={config[key]}: takes its whole configuration from there; leave preset out")
    for name in [*CALL, "compile.cache_dir", *said]:
        OmegaConf.update(taken, name, OmegaConf.select(config, name), merge=False, force_add=True)
    if any(name.startswith("resolution") for name in said) and not any(name.startswith("scheduler") for name in said):
        for name in {"flow_shift", "shift"} & set(taken.scheduler.arguments):  # it goes with the resolution
            taken.scheduler.arguments[name] = taken.resolution.flow_shift
    return taken


def read_stored(path: Path, key: str) -> dict:
    """What a run folder or a video says of how it was made: config, and if it got that far device, mesh and versions."""
    if (path / "config.yaml").is_file():
        metrics = path / "metrics.json"
        return {"config": OmegaConf.load(path / "config.yaml")} | (json.loads(metrics.read_text()) if metrics.is_file() else {})
    if path.is_dir():
        raise schema.ConfigError(f"{key}={path}: not a run folder (it has no config.yaml); runs are under outputs/<date>/<time>")
    if not path.is_file():
        raise schema.ConfigError(f"{key}={path}: no such run folder{' or video' if key == 'replay' else ''}; runs are under outputs/<date>/<time>")
    stored = media.read_metadata(path)
    if key == "resume" or not stored or "config" not in stored:
        raise schema.ConfigError(f"{key}={path}: carries no settings; give a run folder{', or a video made by this program' if key == 'replay' else ''}")
    return stored


def compare_replay(config, now: dict) -> None:
    """Say in what a replay cannot be expected to be bit for bit the same."""
    if config.replay is None:
        return
    then = read_stored(Path(config.replay), "replay")
    for key in ("config_hash", "device", "devices", "mesh", "versions"):
        if then.get(key) != now[key]:
            log.warning("replay: %s differs: %s then, %s now; the video will be alike, not the same bit for bit", key, then.get(key), now[key])


def finished_before(settled: dict, folder: Path) -> float | None:
    """What the same job gave in an earlier try at this sweep, or None if it has to be done."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        metrics = json.loads((folder / "metrics.json").read_text())
        if metrics["config_hash"] == config_hash(settled) and metrics["stages"] == settled["stages"]:
            log.info("%s: done before", folder)
            return metrics["step_seconds_median"] or metrics["seconds"]["total"]
    return None


# ---------------------------------------------------------------- outputs


def write_config(folder: Path, settled: dict) -> None:
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(settled)))


def write_outputs(config, folder: Path, settled: dict, results, metrics: dict) -> Path:
    """Video, poster and contact sheet, if there are frames. Returns what to show the user."""
    if "decode" not in results:
        return folder
    prompt = settled["prompt"]
    comment = {"prompt": prompt["text"], "negative_prompt": prompt["negative"], "seed": config.seed, **metrics, "config": settled}
    video = folder / "video.mp4"
    media.write_video(video, results["decode"], config.resolution.fps, config.output.quality, prompt["text"], comment)
    media.write_pictures(folder, results["decode"])
    return video


def write_failure(folder: Path, overrides: list[str], message: str) -> None:
    """Why a job failed, for the sweep's report."""
    with contextlib.suppress(OSError):  # the disk may be what failed
        (folder / "failure.json").write_text(json.dumps({"error": message, "overrides": overrides}, indent=2) + "\n")


def write_preview(folder: Path, frame: numpy.ndarray) -> None:
    """The middle frame as it looks so far, always under the same name."""
    partial = folder / ".partial-preview.png"
    Image.fromarray(frame).save(partial)
    os.replace(partial, folder / "preview.png")


def metrics(settled: dict, mesh, overrides: list[str]) -> dict:
    """Everything about a run but its times: memory, hardware, versions, settings.

    Peaks are the process's so far: in a sweep, the largest of the jobs up to this one.
    """
    device = mesh.devices.flat[0]
    statistics = device.memory_stats() or {}
    return {
        "overrides": list(overrides),
        "stages": settled["stages"],
        "config_hash": config_hash(settled),
        "device": device.device_kind,
        "devices": mesh.devices.size,
        "processes": len({device.process_index for device in mesh.devices.flat}),
        "mesh": dict(mesh.shape),
        "peak_device_gib": round(statistics["peak_bytes_in_use"] / GIB, 3) if "peak_bytes_in_use" in statistics else None,
        "peak_host_gib": round(peak_host_bytes() / GIB, 3),
        "versions": versions(),
        "git_revision": git_revision(),
    }


def write_metrics(folder: Path, metrics: dict) -> None:
    """metrics.json, written last: a folder that has it holds a finished run."""
    (folder / "failure.json").unlink(missing_ok=True)
    partial = folder / ".partial-metrics.json"
    partial.write_text(json.dumps(metrics, indent=2) + "\n")
    os.replace(partial, folder / "metrics.json")


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
