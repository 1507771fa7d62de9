"""The gallery: all finished runs below some folders, of run.py and of servers, with search."""
import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from wan_torchax.config import inputs, trust
from wan_torchax.config.commandline import key_of
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import flatten
from wan_torchax.records.outputs import PICTURE, VIDEO
from wan_torchax.records.report import read_json
from wan_torchax.records.stored import read_stored
from wan_torchax.serve.queue import IDS, Queue

DEPTH = 4  # levels of folders that are searched: outputs/<date>/<time>/<job>
LOOK_SECONDS = 2  # least interval between two scans of the disk
# The settings shown for a run, by the form's field names.
SHOWN = {
    "prompt": "prompt.text", "negative_prompt": "prompt.negative", "seed": "seed", "steps": "steps",
    "guidance_scale": "guidance_scale", "frames": "resolution.frames", "fps": "resolution.fps",
    "width": "resolution.width", "height": "resolution.height", "flow_shift": "resolution.flow_shift",
    "driving_prompt": "driving_prompt", "camera": "camera",
}
# Of inputs: browsers execute none of these.
SHOWN_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".mp4", ".webm", ".wav", ".mp3", ".flac", ".ogg")


class Gallery:
    def __init__(self, folders: list[Path], queue: Queue):
        self.folders, self.queue = [folder.resolve() for folder in folders], queue
        self.runs: dict[Path, dict] = {}
        self.beside: set[Path] = set()  # run folders outside the queue
        self.looked = -LOOK_SECONDS

    def search(self, words: str) -> list[dict]:
        """Runs that match all words, newest first: words of the prompt, or `seed=7`, `preset=…`, `model=…`."""
        terms = words.lower().split()
        matches = [run for run in self.look() if all(term in run["words"] for term in terms)]
        return sorted(matches, key=lambda run: -run["created"])

    def look(self) -> list[dict]:
        """All runs: those of the queue up to date, those of other folders as of the last scan."""
        if time.monotonic() - self.looked > LOOK_SECONDS:
            self.beside, self.looked = set(self.walk()), time.monotonic()
        there = self.beside | {job.folder for job in self.queue.jobs() if self.queue.state(job).status == "completed"}
        runs = {folder: run for folder, run in self.runs.items() if folder in there}
        for folder in there - runs.keys():
            with contextlib.suppress(OSError, ConfigError, KeyError, TypeError, ValueError):
                runs[folder] = read_run(folder)
        self.runs = runs
        return list(runs.values())

    def walk(self) -> Iterator[Path]:
        """Folders with a finished video or picture."""
        for root in self.folders:
            for place, below, files in os.walk(root):
                below[:] = [name for name in below if not name.startswith(".") and name != "profile"]
                if Path(place) == self.queue.folder:
                    below.clear()
                if len(Path(place).relative_to(root).parts) >= DEPTH:
                    below.clear()
                if "metrics.json" in files and {VIDEO, PICTURE} & set(files):
                    yield Path(place)

    def folder_of(self, identifier: str) -> Path | None:
        """The folder of a run by its id."""
        if identifier not in (run["id"] for run in self.runs.values()):
            self.look()
        return next((folder for folder, run in self.runs.items() if run["id"] == identifier), None)


def read_run(folder: Path) -> dict:
    metrics = read_json(folder / "metrics.json")
    settings = metrics.get("settings") or dict(flatten(read_stored(folder, "replay").config))
    said = {key_of(text): text.partition("=")[2] for text in metrics.get("overrides", [])}
    run = {name: settings.get(key) for name, key in SHOWN.items()}
    run["model"], run["preset"] = metrics.get("model") or settings.get("model.name"), said.get("preset")
    run["choices"] = {group: said[group] for group in trust.groups() if group in said and group != "preset"}
    strengths = {name: row.get("strength") for name, row in (metrics.get("adapters") or {}).items()}
    run["adapters"] = {f"adapter.{name}": one for name, one in strengths.items() if type(one) in (int, float)}
    run["file"] = PICTURE if (folder / PICTURE).is_file() else VIDEO
    run["inputs"] = {key: [path.name for path in paths] for key, paths in shown_inputs(folder).items()}
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:24]
    run["id"] = folder.name if IDS.fullmatch(folder.name) else f"run_{digest}"
    run["created"] = (folder / "metrics.json").stat().st_mtime
    run["total_seconds"] = metrics["seconds"]["total"]
    named = (f"{name}={run[name]}" for name in ("seed", "steps", "preset", "model", "frames"))
    run["words"] = " ".join([str(run["prompt"]), *named, f"{run['width']}x{run['height']}"]).lower()
    return run


def shown_inputs(folder: Path) -> dict[str, list[Path]]:
    """A run's input pictures, videos and sounds, by key."""
    copies = {key: inputs.copies(folder, key) for key in inputs.FILES}
    safe = {key: all(path.suffix.lower() in SHOWN_SUFFIXES for path in paths) for key, paths in copies.items()}
    return {key: paths for key, paths in copies.items() if paths and safe[key]}
