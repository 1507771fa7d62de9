"""The queue on disk: a run folder for every video that was asked for, and a folder's files are its state.

    request.json     what was asked; acknowledged once it is on the disk
    inputs/          pictures that came with it
    events.jsonl     what has happened so far, a line each
    cancel           nobody wants it any more
    metrics.json     finished (records/outputs.py writes it last)
    failure.json     failed

Nothing else is remembered: a server that was killed finds everything here, and so do several that share the folder.
"""
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wan_torchax.config.schema import FolderError
from wan_torchax.records.files import claimed, own_file, sync, write_text
from wan_torchax.records.report import read_json

log = logging.getLogger("wan")
IDS = re.compile(r"video_[0-9a-f]{12,48}")
TAIL_BYTES = 4096  # more than the last line of events.jsonl has
# What request.json says of a job, and of what type.
REQUEST = {
    "created": (int, float), "digest": str, "keyed": bool, "fields": dict, "values": dict, "model": str, "size": str,
    "seconds": str, "frames": int, "steps": int, "seed": int, "remixed_from": (str, type(None)),
}
NUMBERS = ("progress", "step", "steps", "preview")  # of an event
STALE_SECONDS = 3600  # after which a folder that was never completed is nobody's


class Full(Exception):
    """As many wait as may."""


class Conflict(Exception):
    """An idempotency key that was used for another request."""


@dataclass(frozen=True)
class Job:
    """A video that was asked for."""

    id: str
    folder: Path
    request: dict

    @property
    def order(self) -> tuple:
        return self.request["created"], self.id


@dataclass(frozen=True)
class State:
    """How far it is. `progress` never goes back, also where the work begins again after a kill."""

    status: str = "queued"  # queued, in_progress, completed, failed
    phase: str = "queued"
    progress: int = 0
    step: int = 0
    steps: int = 0
    preview: int = 0  # the step of the last preview
    error: str | None = None
    ended: float | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed")


class Queue:
    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.known: dict[str, Job] = {}
        self.over: dict[str, State] = {}
        self.strange: set[str] = set()  # folders that are no jobs
        self.lock = threading.Lock()

    # ------------------------------------------------------------ asking

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """A folder to prepare a job in; gone afterwards, unless it was submitted."""
        folder = self.folder / f".new-{uuid.uuid4().hex}"
        (folder / "inputs").mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def submit(self, draft: Path, request: dict, limit: int, key: str | None = None) -> Job:
        """Put a job into the queue. With a key, a second call gives the job of the first; the folder's name sees to
        that, for all servers that share the queue. When this returns the job is on the disk."""
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode() + pictures_digest(draft)).hexdigest()
        identifier = f"video_{hashlib.sha256(key.encode()).hexdigest()[:40] if key else new_number()}"
        with self.lock:
            if key and (before := self.before(identifier, digest)):
                return before
            if len(self.waiting()) >= limit:
                raise Full
            content = request | {"created": time.time(), "digest": digest, "keyed": key is not None}
            write_text(draft / "request.json", json.dumps(content, indent=2) + "\n")
            append(draft, {"event": "queued", "progress": 0})
            for path in (*draft.rglob("*"), draft):
                sync(path)
            try:
                os.rename(draft, self.folder / identifier)
            except OSError:  # another server was given the same key at the same time
                if key and (before := self.before(identifier, digest)):
                    return before
                raise
            sync(self.folder)
        return self.get(identifier)

    def before(self, identifier: str, digest: str) -> Job | None:
        """What was made of a key earlier."""
        if (self.folder / ".deleted" / identifier).exists():
            raise Conflict("this Idempotency-Key made a video that was deleted since; use another key for a new one")
        job = self.get(identifier)
        if job is not None and job.request["digest"] != digest:
            raise Conflict("this Idempotency-Key was used for another request; use another key for another video")
        return job

    # ------------------------------------------------------------ looking

    def get(self, identifier: str) -> Job | None:
        """A job that is there and that somebody still wants."""
        if not IDS.fullmatch(identifier):
            return None
        folder = self.folder / identifier
        if (folder / "cancel").exists() or not (folder / "request.json").exists():
            self.known.pop(identifier, None), self.over.pop(identifier, None)
            return None
        job = self.known.get(identifier)
        if job is None and identifier not in self.strange:
            request = read_json(folder / "request.json")
            if own_file(self.folder, f"{identifier}/request.json") and is_request(request):
                job = self.known[identifier] = Job(identifier, folder, request)
            else:
                self.strange.add(identifier)
                log.warning("%s: left alone: its request.json is none of a server's", folder)
        return job

    def jobs(self) -> list[Job]:
        """All, from the first to the last."""
        names = [entry.name for entry in os.scandir(self.folder) if entry.name.startswith("video_")]
        # Of thousands that are over the disk is not asked again.
        found = ((self.known.get(name) if name in self.over else None) or self.get(name) for name in names)
        return sorted((job for job in found if job is not None), key=lambda job: job.order)

    def waiting(self) -> list[Job]:
        """Those that are not over, the next first."""
        return [job for job in self.jobs() if not self.state(job).is_over]

    def state(self, job: Job) -> State:
        state = self.over.get(job.id) or read_state(job.folder)
        if state.is_over:
            self.over[job.id] = state
        return state

    # ------------------------------------------------------------ ending

    def delete(self, job: Job) -> None:
        """Take a job away, for good: at once if it is not being worked on, else its worker stops at its next step."""
        if job.request["keyed"]:
            tombs = self.folder / ".deleted"
            tombs.mkdir(exist_ok=True)
            (tombs / job.id).touch()
            sync(tombs)
        # Once more behind the cancel file: who has the folder then looks for the file when it lets go.
        for _ in range(2):
            try:
                with claimed(job.folder):
                    return self.remove(job)
            except FolderError:
                (job.folder / "cancel").touch()
                sync(job.folder)
            except FileNotFoundError:  # another request was faster
                return None

    def remove(self, job: Job) -> None:
        """By a new name first: half a folder is no job."""
        gone = self.folder / f".gone-{job.id}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            os.rename(job.folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        self.known.pop(job.id, None), self.over.pop(job.id, None)

    def tidy(self) -> None:
        """What servers that were killed have left half made or half removed, and jobs that nobody wants any more."""
        for entry in list(os.scandir(self.folder)):
            path, old = Path(entry.path), time.time() - STALE_SECONDS
            with contextlib.suppress(OSError):
                if entry.name.startswith(".gone-") or (entry.name.startswith(".new-") and entry.stat().st_mtime < old):
                    shutil.rmtree(path, ignore_errors=True)
                elif entry.name.startswith("video_") and (path / "cancel").exists():
                    with contextlib.suppress(FolderError), claimed(path):
                        self.remove(Job(entry.name, path, {}))


def is_request(content: dict) -> bool:
    """Whether request.json is whole: of a folder that a server did not write nothing is known."""
    has = all(isinstance(content.get(name), kind) for name, kind in REQUEST.items())
    return has and isinstance(content["values"].get("prompt.text"), str)


def new_number() -> str:
    """Of a job without a key: by time, and no two alike."""
    return f"{time.time_ns():016x}{uuid.uuid4().hex[:8]}"


def pictures_digest(draft: Path) -> bytes:
    paths = sorted((draft / "inputs").iterdir())
    return b"".join(hashlib.sha256(path.name.encode() + path.read_bytes()).digest() for path in paths)


# ---------------------------------------------------------------- events


def append(folder: Path, event: dict) -> None:
    """A line more in events.jsonl. Half a line, of a server that was killed, is ended first."""
    with (folder / "events.jsonl").open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")
        file.write(json.dumps({"time": round(time.time(), 3)} | event).encode() + b"\n")


def read_state(folder: Path) -> State:
    """From the files alone."""
    metrics, failure = read_json(folder / "metrics.json"), read_json(folder / "failure.json")
    if failure:
        error = str(failure.get("error"))
        return State("failed", "failed", last_event(folder).progress, error=error, ended=age(folder))
    if metrics:
        seconds = metrics.get("step_seconds")
        steps = len(seconds) if isinstance(seconds, list) else 0
        return State("completed", "completed", 100, steps, steps, ended=age(folder))
    return last_event(folder)


def last_event(folder: Path) -> State:
    try:
        with (folder / "events.jsonl").open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return State()
    events = (event_of(line) for line in reversed(lines))
    return next((state_of(event) for event in events if event is not None), State())


def event_of(line: bytes) -> dict | None:
    """A line of events.jsonl, if it is one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if sound and all(type(event.get(name, 0)) is int for name in NUMBERS) else None


def state_of(event: dict) -> State:
    status = "queued" if event["event"] == "queued" else "in_progress"
    numbers = {name: event.get(name, 0) for name in NUMBERS}
    return State(status, event["event"], **numbers)


def age(folder: Path) -> float | None:
    for name in ("failure.json", "metrics.json"):
        with contextlib.suppress(OSError):
            return (folder / name).stat().st_mtime
    return None


def events_from(folder: Path, offset: int) -> tuple[list[dict], int]:
    """The whole lines of events.jsonl from a place on, and the place behind them."""
    try:
        with (folder / "events.jsonl").open("rb") as file:
            file.seek(offset)
            content = file.read()
    except OSError:
        return [], offset
    end = content.rfind(b"\n") + 1
    events = [event_of(line) for line in content[:end].splitlines()]
    return [event for event in events if event is not None], offset + end
