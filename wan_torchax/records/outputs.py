"""The files of a run folder besides stage results: video, images, configuration and metrics."""
import contextlib
import functools
import hashlib
import json
import logging
import shutil
from pathlib import Path

import numpy
import yaml
from omegaconf import DictConfig, OmegaConf

from wan_torchax.config import inputs, live, schema, trust
from wan_torchax.config.commandline import key_of
from wan_torchax.config.wording import flatten
from wan_torchax.records import media, provenance
from wan_torchax.records.files import atomic, write_text
from wan_torchax.records.growing import Growing

log = logging.getLogger("wan")
GIB = 2**30
VIDEO, PICTURE = "video.mp4", "picture.png"
Video = media.Encoder | media.Picture | Growing
# Keys of one invocation, not of the video.
CALL = (
    "task", "stages", "resume", "replay", "prompts", "seeds", "images", "shard", "sweep", "traceback", "keep_resident",
    "preview_every", "preview", "profile", "distributed",
)
# Keys that affect neither a video nor its speed, and tables of which only the selected entry matters. Adapters are
# hashed by content with the weights.
UNCOUNTED = (
    *CALL, "plan", "tune", "calibrate", "serve", "inspect", "output", "compile.cache_dir", "compile.store",
    "compile.store_gib", "attention.devices", "adapter", *inputs.FILES,
)


# ---------------------------------------------------------------- configurations


def settle(config: DictConfig) -> dict:
    """The configuration without machine-specific values, for config.yaml and the video's metadata."""
    settled = OmegaConf.to_container(config, resolve=True)
    settled["compile"]["cache_dir"] = settled["compile"]["store"] = None  # local paths
    return settled


def config_hash(settled: dict, fingerprints: dict[str, str]) -> str:
    """Twelve hex digits that change with any setting or weights that affect the video or its speed.

    Keys at their schema default are left out, so that keys added by later versions do not change old hashes.
    """
    usual = defaults()
    counted = {
        key: value
        for key, value in flatten(settled)
        if not is_under(key, UNCOUNTED) and (key not in usual or usual[key] != value)
    }
    content = json.dumps([counted, fingerprints], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


@functools.cache
def defaults() -> dict:
    """The schema's, by key."""
    return dict(flatten(OmegaConf.to_container(schema.root(), throw_on_missing=False)))


def is_under(key: str, names) -> bool:
    """Whether a dotted key equals one of the names or is nested under one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def write_config(folder: Path, settled: dict, overrides: list[str]) -> None:
    """Write config.yaml and command.json, the overrides it was composed from; resume and replay read both."""
    for name in ("metrics.json", "failure.json"):  # of an earlier run in this folder
        (folder / name).unlink(missing_ok=True)
    write_text(folder / "config.yaml", yaml.dump(settled, Dumper=PlainDumper, sort_keys=False, allow_unicode=True))
    command = {"overrides": list(overrides), "versions": provenance.versions(), "git": provenance.git_revision()}
    write_text(folder / "command.json", json.dumps(command, indent=2) + "\n")


class PlainDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # in C where PyYAML was built with it
    """Writes repeated values in full instead of as aliases."""

    def ignore_aliases(self, data) -> bool:
        return True


def carried(settled: dict, overrides: list[str]) -> dict:
    """The settings for a video's metadata: those that a replay accepts, so nothing machine-specific."""
    config = {key: value for key, value in flatten(settled) if trust.is_offered(key) and not is_under(key, CALL)}
    safe = []
    for text in overrides:
        with contextlib.suppress(schema.ConfigError):
            key = key_of(text)
            offered = key in trust.groups() or trust.is_offered(key)  # else there is no need to say why it is refused
            safe += trust.repeated(text) if offered and not is_under(key, CALL) else []
    return {"overrides": safe, "config": config}


def finished_before(settled: dict, fingerprints: dict[str, str], folder: Path) -> float | None:
    """The result of the same job in an earlier attempt at this sweep; None if it has to run."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        metrics = json.loads((folder / "metrics.json").read_text())
        same = metrics["config_hash"] == config_hash(settled, fingerprints)
        if same and metrics["stages"] == settled["stages"] and metrics["output"] == settled["output"]:
            log.info("%s: done before", folder)
            return metrics["step_seconds_median"] or metrics["seconds"]["total"]
    return None


# ---------------------------------------------------------------- the video


def open_video(folder: Path, config: DictConfig) -> Video:
    """An encoder for the run's video, which is a picture if it has one frame."""
    if config.resolution.frames == 1:
        return media.Picture(folder / PICTURE)
    start = config.pipeline.segments.dropped / config.resolution.fps
    encoding = media.Encoding(config.resolution.fps, config.output.quality, inputs.sound_of(config), start)
    if live.is_on(config):
        return Growing(folder / VIDEO, encoding, live.chunk_frames(config))
    return media.Encoder(folder / VIDEO, encoding)


def made_file(folder: Path) -> Path | None:
    """The video or picture that a run has made."""
    return next((folder / name for name in (VIDEO, PICTURE) if (folder / name).is_file()), None)


def write_outputs(folder: Path, settled: dict, metrics: dict, video: Video, pictures: media.Pictures) -> Path:
    """Write video or picture, poster and contact sheet, if there were frames. Returns the path to print."""
    if not video.frames:
        return folder
    prompt = settled["prompt"]
    comment = {"prompt": prompt["text"], "negative_prompt": prompt["negative"], "seed": settled["seed"]}
    comment |= metrics | carried(settled, metrics["overrides"])
    pictures.write(folder)  # overlaps encoding
    video.finish(prompt["text"], comment)
    return video.path


def write_preview(folder: Path, frames: numpy.ndarray, fps: int) -> None:
    """Write a preview, replacing the last one."""
    media.write_preview(folder / "preview.png", frames, fps)


def write_failure(folder: Path, overrides: list[str], message: str) -> None:
    """Write failure.json, for the sweep's report."""
    with contextlib.suppress(OSError):  # the disk may be what failed
        write_text(folder / "failure.json", json.dumps({"error": message, "overrides": overrides}, indent=2) + "\n")


def copy_pictures(folder: Path, config) -> None:
    """Copy the input files, for replays: inputs/image.jpg, inputs/references.0.png. Removes those of an earlier run,
    unless this run uses them."""
    given = {key: inputs.paths(config, key) for key in inputs.taken(config)}
    sources = {path.resolve() for paths in given.values() for path in paths}
    for old in folder.glob("inputs/*"):
        if old.resolve() not in sources:
            old.unlink()
    for key, paths in given.items():
        for number, source in enumerate(paths):
            place = f".{number}" if OmegaConf.is_list(config[key]) else ""
            target = folder / "inputs" / f"{key}{place}{source.suffix}"
            target.parent.mkdir(exist_ok=True)
            if not (target.exists() and target.samefile(source)):
                with atomic(target) as partial:
                    shutil.copyfile(source, partial)


def write_order(folder: Path, names: list[str]) -> None:
    """Write list.json: the folders of a prompt list's videos in order, for its report."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "list.json", json.dumps(names, indent=0) + "\n")


# ---------------------------------------------------------------- metrics


def metrics(settled: dict, contents: dict[str, str], mesh, overrides: list[str]) -> dict:
    """A run's metrics except timings: memory, hardware, versions, settings.

    Peaks are per process: in a sweep, the maximum over the jobs so far.
    """
    device = mesh.devices.flat[0]
    statistics = device.memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    return {
        "overrides": list(overrides),
        "pipeline": settled["pipeline"]["name"],
        "stages": settled["stages"],
        "output": settled["output"],
        "config_hash": config_hash(settled, contents),
        "weights": {key: value for key, value in contents.items() if key not in inputs.FILES},
        "inputs": {key: value for key, value in contents.items() if key in inputs.FILES},
        "device": device.device_kind,
        "devices": mesh.devices.size,
        "processes": len({device.process_index for device in mesh.devices.flat}),
        "mesh": dict(mesh.shape),
        "peak_device_gib": None if peak is None else round(peak / GIB, 3),
        "peak_host_gib": round(provenance.peak_host_bytes() / GIB, 3),
        "versions": provenance.versions(),
        "git_revision": provenance.git_revision(),
    }


def described(settled: dict, overrides: list[str]) -> dict:
    """A video's data for the gallery and its search."""
    return {"model": settled["model"]["name"], "settings": carried(settled, overrides)["config"]}


def write_metrics(folder: Path, metrics: dict) -> None:
    """Write metrics.json, last: its presence marks a finished run."""
    (folder / "failure.json").unlink(missing_ok=True)
    write_text(folder / "metrics.json", json.dumps(metrics, indent=2) + "\n")
