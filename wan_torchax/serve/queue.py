"""The queue on disk: one run folder per requested video, whose files are the job's state.

    request.json     the request; acknowledged once it is fsynced
    inputs/          uploaded images
    events.jsonl     progress events, one per line
    cancel           the job is cancelled
    prompts.jsonl    prompts for later chunks of a live video, as requests gave them
    applied.jsonl    those that the worker has applied, and how many it had read by then
    metrics.json     finished (records/outputs.py writes it last)
    failure.json     failed

There is no other state: a restarted server recovers everything from here, and several servers can share the folder.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wan_torchax.config.schema import FolderError
from wan_torchax.records.files import claimed, own_file, sync, write_text
from wan_torchax.records.report import read_json

log = logging.getLogger("wan")
IDS = re.compile(r"video_[0-9a-f]{12,48}")
TAIL_BYTES = 4096  # more than the longest line of events.jsonl
# The schema of request.json.
REQUEST = {
    "created": (int, float), "digest": str, "keyed": bool, "fields": dict, "values": dict, "model": str, "size": str,
    "seconds": str, "frames": int, "steps": int, "seed": int, "remixed_from": (str, type(None)),
}
NUMBERS = ("progress", "step", "steps", "preview")  # of an event
MOST_PROMPT_BYTES = 2**20  # of all prompts that are given to a video while it is made
WATCHED_SECONDS = 3  # without a sign, until nobody watches a video any more
CHANGE_SECONDS = 0.005  # polling interval for a change of the folder
STALE_SECONDS = 3600  # age at which an incomplete folder is assumed abandoned


class Full(Exception):
    """The queue has reached its limit."""


class Conflict(Exception):
    """An idempotency key was reused for a different request."""


@dataclass(frozen=True)
class Job:
    """A requested video."""

    id: str
    folder: Path
    request: dict

    @property
    def order(self) -> tuple:
        return self.request["created"], self.id


@dataclass(frozen=True)
class State:
    """A job's progress. `progress` never decreases, even if the work restarts after a crash."""

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


class Prompts:
    """Prompts that are given while a live video is made. The front adds them, the worker applies the last one."""

    def __init__(self, folder: Path):
        self.given, self.used = folder / "prompts.jsonl", folder / "applied.jsonl"

    def add(self, prompt: str) -> None:
        append_line(self.given, {"prompt": prompt})

    def room(self, prompt: str) -> bool:
        """Whether one more fits."""
        return not self.given.exists() or self.given.stat().st_size + 8 * len(prompt) < MOST_PROMPT_BYTES

    def applied(self) -> list[str]:
        """Rows of `live.prompts`."""
        return [line["row"] for line in lines_of(self.used, "row")]

    def apply(self, row_of: Callable[[str], str]) -> str | None:
        """The last prompt that was given since, if there is one, recorded as the row that is made of it."""
        given, used = lines_of(self.given, "prompt"), lines_of(self.used, "row")
        if len(given) <= (used[-1].get("read", 0) if used else 0):
            return None
        append_line(self.used, {"row": row_of(given[-1]["prompt"]), "read": len(given)})
        return given[-1]["prompt"]


class Watched:
    """Whether a live video is watched, and since when. The front says so while it sends it, the worker asks."""

    def __init__(self, folder: Path):
        self.file = folder / "watched"  # the time when it began to be sent; changed while it is

    def now(self) -> None:
        with contextlib.suppress(OSError):  # it was deleted, or the disk is full
            with contextlib.suppress(FileExistsError), self.file.open("x") as file:
                file.write(str(time.time()))
            os.utime(self.file)

    def seconds(self) -> float | None:
        """How much of it has been seen, by who began first; None if nobody watches."""
        try:
            since, last = float(self.file.read_text()), self.file.stat().st_mtime
        except (OSError, ValueError):  # not yet, or being written
            return None
        now = time.time()
        return now - since if now - last < WATCHED_SECONDS else None


class Queue:
    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.known: dict[str, Job] = {}
        self.over: dict[str, State] = {}
        self.invalid: set[str] = set()  # folders without a valid request.json
        self.lock = threading.Lock()

    # ------------------------------------------------------------ submitting

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """A temporary folder to prepare a job in; removed afterwards unless submitted."""
        folder = self.folder / f".new-{uuid.uuid4().hex}"
        (folder / "inputs").mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def submit(self, draft: Path, request: dict, limit: int, key: str | None = None) -> Job:
        """Enqueue a job. With a key, a second call returns the first call's job: the key determines the folder's name,
        for all servers that share the queue. When this returns, the job is fsynced."""
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
            except OSError:  # another server received the same key concurrently
                if key and (before := self.before(identifier, digest)):
                    return before
                raise
            sync(self.folder)
        return self.get(identifier)

    def before(self, identifier: str, digest: str) -> Job | None:
        """The job of an earlier request with the same key."""
        if (self.folder / ".deleted" / identifier).exists():
            raise Conflict("this Idempotency-Key's video was deleted since; use another key for a new one")
        job = self.get(identifier)
        if job is not None and job.request["digest"] != digest:
            raise Conflict("this Idempotency-Key was used for another request; use another key for another video")
        return job

    # ------------------------------------------------------------ reading

    def get(self, identifier: str) -> Job | None:
        """A job that exists and is not cancelled."""
        if not IDS.fullmatch(identifier):
            return None
        folder = self.folder / identifier
        if (folder / "cancel").exists() or not (folder / "request.json").exists():
            self.known.pop(identifier, None), self.over.pop(identifier, None)
            return None
        job = self.known.get(identifier)
        if job is None and identifier not in self.invalid:
            request = read_json(folder / "request.json")
            if own_file(self.folder, f"{identifier}/request.json") and is_request(request):
                job = self.known[identifier] = Job(identifier, folder, request)
            else:
                self.invalid.add(identifier)
                log.warning("%s: ignored: invalid request.json", folder)
        return job

    def jobs(self) -> list[Job]:
        """All jobs, oldest first."""
        names = [entry.name for entry in os.scandir(self.folder) if entry.name.startswith("video_")]
        # Finished jobs, possibly thousands, are not read from disk again.
        found = ((self.known.get(name) if name in self.over else None) or self.get(name) for name in names)
        return sorted((job for job in found if job is not None), key=lambda job: job.order)

    def waiting(self) -> list[Job]:
        """Unfinished jobs, oldest first."""
        return [job for job in self.jobs() if not self.state(job).is_over]

    def changed(self) -> int:
        """When a job last came or went."""
        return self.folder.stat().st_mtime_ns

    def wait_for_change(self, known: int, seconds: float) -> None:
        """Wait until jobs have come or gone since `known`, at most so long: clocks of files are coarse, and those of
        other machines late."""
        deadline = time.monotonic() + seconds
        while self.changed() == known and time.monotonic() < deadline:
            time.sleep(CHANGE_SECONDS)

    def state(self, job: Job) -> State:
        state = self.over.get(job.id) or read_state(job.folder)
        if state.is_over:
            self.over[job.id] = state
        return state

    # ------------------------------------------------------------ removing

    def delete(self, job: Job) -> None:
        """Delete a job: immediately if no worker has it, else its worker stops at the next step."""
        if job.request["keyed"]:
            tombs = self.folder / ".deleted"
            tombs.mkdir(exist_ok=True)
            (tombs / job.id).touch()
            sync(tombs)
        # Retry after writing the cancel file: a worker checks for it when it releases the folder.
        for _ in range(2):
            try:
                with claimed(job.folder):
                    return self.remove(job)
            except FolderError:
                (job.folder / "cancel").touch()
                sync(job.folder)
            except FileNotFoundError:  # deleted concurrently
                return None

    def remove(self, job: Job) -> None:
        """Rename first, so that a partially removed folder is never seen as a job."""
        gone = self.folder / f".gone-{job.id}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            os.rename(job.folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        self.known.pop(job.id, None), self.over.pop(job.id, None)

    def tidy(self) -> None:
        """Remove what crashed servers left behind, and cancelled jobs."""
        for entry in list(os.scandir(self.folder)):
            path, old = Path(entry.path), time.time() - STALE_SECONDS
            with contextlib.suppress(OSError):
                if entry.name.startswith(".gone-") or (entry.name.startswith(".new-") and entry.stat().st_mtime < old):
                    shutil.rmtree(path, ignore_errors=True)
                elif entry.name.startswith("video_") and (path / "cancel").exists():
                    with contextlib.suppress(FolderError), claimed(path):
                        self.remove(Job(entry.name, path, {}))


def is_request(content: dict) -> bool:
    """Whether request.json matches the schema."""
    has = all(isinstance(content.get(name), kind) for name, kind in REQUEST.items())
    return has and isinstance(content["values"].get("prompt.text"), str)


def new_number() -> str:
    """A unique id for a job without a key, ordered by time."""
    return f"{time.time_ns():016x}{uuid.uuid4().hex[:8]}"


def pictures_digest(draft: Path) -> bytes:
    paths = sorted((draft / "inputs").iterdir())
    return b"".join(hashlib.sha256(path.name.encode() + path.read_bytes()).digest() for path in paths)


# ---------------------------------------------------------------- events


def append(folder: Path, event: dict) -> None:
    """Append a line to events.jsonl."""
    append_line(folder / "events.jsonl", {"time": round(time.time(), 3)} | event)


def append_line(path: Path, content: dict) -> None:
    """Append a line, after terminating a partial line of a killed process."""
    with path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")
        file.write(json.dumps(content).encode() + b"\n")


def lines_of(path: Path, name: str) -> list[dict]:
    """The lines of a file that have a text of this name; the front and the worker read what the other wrote."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    lines = (read_line(line) for line in content.split(b"\n"))
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get(name), str)]


def read_line(line: bytes):
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)


def read_state(folder: Path) -> State:
    """A job's state from its files."""
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
    """A line of events.jsonl; None if it is invalid."""
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
    """The complete lines of events.jsonl from an offset on, and the offset after them."""
    try:
        with (folder / "events.jsonl").open("rb") as file:
            file.seek(offset)
            content = file.read()
    except OSError:
        return [], offset
    end = content.rfind(b"\n") + 1
    events = [event_of(line) for line in content[:end].splitlines()]
    return [event for event in events if event is not None], offset + end
