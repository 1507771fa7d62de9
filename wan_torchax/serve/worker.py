"""The worker: makes the queue's videos one by one, or in batches, with this process's Session.

It communicates only through files and does not know its clients. A `cancel` file or a shutdown makes its listener
raise, so a video stops between two steps.
"""
import contextlib
import functools
import gc
import itertools
import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from wan_torchax.config import inputs, live
from wan_torchax.config.commandline import compose
from wan_torchax.config.jobs import APART
from wan_torchax.config.registry import STAGES
from wan_torchax.config.schema import ConfigError, FolderError
from wan_torchax.events import Advanced, Asked, Began, Event, Listener, Previewed, Stepped
from wan_torchax.records import results
from wan_torchax.records.clock import Clock
from wan_torchax.records.files import claimed, sync
from wan_torchax.run import generate
from wan_torchax.serve import requests
from wan_torchax.serve.queue import Job, Prompts, Queue, Watched, append, events_from, last_event
from wan_torchax.serve.requests import Base, files_in
from wan_torchax.session import session
from wan_torchax.stages.stage import find, main_stage
from wan_torchax.tasks.attempt import explain
from wan_torchax.tasks.together import Video, denoise_together, several_of, takes_several

log = logging.getLogger("wan")
IDLE_SECONDS = 0.1  # polling interval of an empty queue whose folder does not change
LOOK_SECONDS = 0.05  # polling interval for the cancel file while weights load
RESERVED_BYTES = 4096  # preallocated for the error message, in case the disk fills up
# Session phases that are not stages -> their label for clients.
PHASES = {"start": "loading", "build": "loading", "load_": "loading", "compile_": "compiling", "write": "writing"}
FIRST, LAST = 2, 98  # progress in per cent when the first stage begins and when the last ends


class Cancelled(Exception):
    """The job is cancelled."""


class Parked(Exception):
    """The process shuts down before the video is finished."""


class Reporter:
    """A listener that writes events to a job's folder, and raises if the job is cancelled or the worker must stop."""

    def __init__(self, job: Job, must_end: Callable[[], bool], ahead: float | None = None):
        self.bounds: dict[str, tuple[float, float]] = {}  # of the video's stages
        self.ahead = ahead
        self.job, self.must_end, self.looked = job, must_end, 0.0
        said, self.begun = job.request.get("segments"), Counter[str]()
        self.segments = said if type(said) is int and said > 0 else 1  # an earlier version's request says none
        self.clock = Clock()
        self.together = [job]  # the batch: it continues while any of its jobs is not cancelled
        self.now = {"event": "loading", "progress": last_event(job.folder).progress}
        self.total, self.done = None, 0

    def expect(self, stages: Iterable[str]) -> None:
        """Know the video's stages: a request may choose another pipeline than the server's own."""
        self.bounds = bounds_of(stages)

    def __call__(self, event: Event) -> None:
        self.stop_if_unwanted(at_once=isinstance(event, Stepped))
        if isinstance(event, Began):
            self.begin(event)
        elif isinstance(event, Advanced) and event.phase == self.phase and self.total:
            self.done += event.count
            if event.phase in STAGES and self.unit != "step":
                self.emit(find(event.phase).label, share=self.done / self.total)
        elif isinstance(event, Stepped):
            self.emit("step", share=event.step / event.steps, step=event.step, steps=event.steps)
        elif isinstance(event, Previewed):
            self.emit("preview", preview=event.step)
        elif isinstance(event, Asked):
            self.wait_for_viewers(event.second)
            prompt = Prompts(self.job.folder).apply(functools.partial(live.later_prompt, event.second))
            event.prompts.extend(() if prompt is None else [prompt])

    def stop_if_unwanted(self, at_once: bool) -> None:
        now = time.monotonic()
        if at_once or now - self.looked > LOOK_SECONDS:
            self.looked = now
            if all((job.folder / "cancel").exists() for job in self.together):
                raise Cancelled
            if self.must_end():
                raise Parked

    def wait_for_viewers(self, second: float) -> None:
        """Wait until those who watch a live video are near: then what they say next is soon seen."""
        watched = Watched(self.job.folder)
        while self.ahead is not None and (seen := watched.seconds()) is not None and second > seen + self.ahead:
            self.stop_if_unwanted(at_once=True)
            time.sleep(LOOK_SECONDS)

    def begin(self, event: Began) -> None:
        self.phase, self.total, self.unit, self.done = event.phase, event.total, event.unit, 0
        self.begun[event.phase] += 1
        if event.phase in STAGES:
            return self.emit(find(event.phase).label)
        names = (name for name in PHASES if event.phase == name or (name[-1] == "_" and event.phase.startswith(name)))
        self.emit(PHASES[next(names)])

    def emit(self, word: str, share: float = 0.0, **numbers) -> None:
        """Append an event; numbers not given keep their last value, and progress never decreases."""
        first, last = self.bounds.get(self.phase, (LAST, LAST) if self.phase == "write" else (1, 1))
        percent = first + share * (last - first)
        if self.phase in self.bounds:
            done = min(self.begun[self.phase], self.segments) - 1  # segments
            percent = FIRST + (percent - FIRST + done * (LAST - FIRST)) / self.segments
        now = self.now | numbers | {"event": word, "progress": max(self.now["progress"], int(percent))}
        if now != self.now:
            self.now = now
            append(self.job.folder, now)


def bounds_of(stages: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Progress in per cent at the begin and end of each stage."""
    shares = {name: find(name).share for name in stages}
    ends = [FIRST + (LAST - FIRST) * done / sum(shares.values()) for done in itertools.accumulate(shares.values())]
    return dict(zip(shares, zip([FIRST, *ends], ends)))


# ---------------------------------------------------------------- one video


def make(job: Job, base: Base, reporter: Reporter) -> None:
    """Make a video, or resume one that an earlier worker left unfinished."""
    config, overrides = configure(job, base)
    reporter.expect(config.pipeline.stages)
    try:
        generate(config, job.folder, overrides, reporter, reporter.clock, claims=False)
    except results.Misfit as error:
        log.warning("%s: begins again: %s", job.id, error)
        for path in stage_results(job.folder):
            path.unlink()
        config.resume = None
        generate(config, job.folder, overrides, reporter, Clock(), claims=False)


def configure(job: Job, base: Base):
    """The configuration of a job's video; it resumes from finished stages."""
    values, applied = job.request["values"], Prompts(job.folder).applied()
    if applied:  # before a crash
        rows = [*values.get("live.prompts", ()), *applied]
        values = values | {"live.prompts": sorted(rows, key=lambda row: live.later_prompts([row])[0][0])}
    files = files_in(job.folder)
    overrides = base.overrides_for(values, files)
    with requests.decoding(base, files):
        config = requests.configure(overrides, "whole")
    if stage_results(job.folder):
        config.resume = str(job.folder)
    return config, overrides


def stage_results(folder: Path) -> list[Path]:
    return sorted(folder.glob(results.path_of(Path(), "*").name))


def attempt(job: Job, queue: Queue, base: Base, reporter: Reporter) -> None:
    """Run a job and record the outcome in its folder; errors do not stop the worker."""
    try:
        make(job, base, reporter)
        (job.folder / ".failure").unlink()
        for path in (*job.folder.iterdir(), job.folder):
            sync(path)
        log.info("%s: finished", job.id)
    except Cancelled:
        log.info("%s: cancelled", job.id)
        queue.remove(job)
    except Parked:
        log.info("%s: parked", job.id)
        append(job.folder, {"event": "queued", "progress": last_event(job.folder).progress})
    except Exception as error:
        log.error("%s: error: %s", job.id, explain(error), exc_info=base.config.traceback)
        fail(job.folder, explain(error))
        if not isinstance(error, (ConfigError, OSError)):
            free()


def free() -> None:
    """Free everything: the devices may be out of memory."""
    session.clear()
    gc.unfreeze()  # see prepare: programs are in cycles


def reserve(folder: Path) -> None:
    """Preallocate space for the error message: the failure may be a full disk."""
    (folder / ".failure").write_bytes(b" " * RESERVED_BYTES)


def fail(folder: Path, message: str) -> None:
    """Write failure.json into the space that `reserve` allocated."""
    content = json.dumps({"error": message[: RESERVED_BYTES // 8]}).encode()
    with (folder / ".failure").open("r+b") as file:
        file.write(content.ljust(RESERVED_BYTES))
        os.fsync(file.fileno())
    os.replace(folder / ".failure", folder / "failure.json")


# ---------------------------------------------------------------- batches


def groups(queue: Queue, most: int) -> Iterator[list[Job]]:
    """Waiting jobs in order, grouped into batches of up to `most` that can be denoised together."""
    waiting = [(job, shape_of(job) if most > 1 else job.id) for job in queue.waiting()]
    while waiting:
        group = [job for job, shape in waiting if shape == waiting[0][1]][:most]
        yield group
        waiting = [pair for pair in waiting if pair[0] not in group]


def shape_of(job: Job) -> dict | str:
    """The key of jobs that can share a batch: all values except prompts and seed. A job that may have crashed a worker
    runs alone."""
    if any(event.get("crashed") for event in events_from(job.folder, 0)[0]):
        return job.id
    return {key: value for key, value in job.request["values"].items() if key not in APART}


def denoise_group(jobs: list[Job], base: Base, reporters: list[Reporter]) -> None:
    """Denoise several jobs as a batch and write the latents to their folders, as if each had been interrupted after
    denoising. On any error the jobs run one by one, so nothing here fails a job."""
    for reporter in reporters:
        reporter.together = jobs
    try:
        videos = []
        for job, reporter in zip(jobs, reporters):
            config, _ = configure(job, base)
            reporter.expect(config.pipeline.stages)
            videos.append(Video(config, job.folder, reporter, reporter.clock))
        denoise_together(videos)
    except (Cancelled, Parked):
        pass
    except Exception as error:
        words = "%d videos are denoised one by one: %s"
        log.warning(words, len(jobs), explain(error), exc_info=base.config.traceback)
        if not isinstance(error, (ConfigError, OSError)):
            free()
    for job, reporter in zip(jobs, reporters):
        reporter.together = [job]


# ---------------------------------------------------------------- main loop


def prepare(base: Base, emit: Listener) -> None:
    """Load weights and compile programs before the first request."""
    overrides = [*base.overrides, "task=serve", "sweep.active=true"]
    if inputs.follows(base.config, "height"):
        width, height = inputs.usual_sizes(base.config)[0]
        overrides += [f"resolution.width={width}", f"resolution.height={height}"]
    config = compose(overrides)
    names = list(config.pipeline.stages)
    resolved = session.resolve(config, names, emit)
    session.prepare(resolved, names, emit)
    for videos in range(2, base.config.serve.batch + 1) if takes_several(resolved) else ():
        if (several := several_of(resolved, [config.seed] * videos)) is not None:
            session.prepare(several, [main_stage(resolved.graph)], emit)
    gc.collect()
    gc.freeze()  # what is loaded stays: looking through it for garbage would hold up a video's first frames


def work(queue: Queue, base: Base, must_end: Callable[[], bool], must_stop: Callable[[], bool]) -> None:
    """Run jobs until `must_stop`; the current job continues until `must_end`."""
    queue.tidy()
    release(queue)
    while not must_stop():
        known, waiting = queue.changed(), groups(queue, base.config.serve.batch)
        if not any(take(jobs, queue, base, must_end) for jobs in waiting if not must_stop()):
            queue.wait_for_change(known, IDLE_SECONDS)


def release(queue: Queue) -> None:
    """Requeue jobs that a killed worker left in progress."""
    for job in queue.waiting():
        if queue.state(job).status == "in_progress":
            with contextlib.suppress(FolderError, FileNotFoundError), claimed(job.folder):
                append(job.folder, {"event": "queued", "progress": last_event(job.folder).progress})


def take(jobs: list[Job], queue: Queue, base: Base, must_end: Callable[[], bool]) -> bool:
    """Run those of the jobs that this worker can claim and whose model it serves; returns whether there were any."""
    with contextlib.ExitStack() as claims:
        held = [job for job in jobs if job.request["model"] in base.models and hold(job, queue, claims)]
        reporters = [Reporter(job, must_end, base.config.serve.live_ahead) for job in held]
        if len(held) > 1:
            denoise_group(held, base, reporters)
        worked = [try_one(job, queue, base, reporter) for job, reporter in zip(held, reporters)]
    for job in jobs:
        if (job.folder / "cancel").exists():  # cancelled too late to be interrupted
            with ignored(job):
                queue.delete(job)
    return any(worked)


def hold(job: Job, queue: Queue, claims: contextlib.ExitStack) -> bool:
    """Claim a job if it is available and unfinished, and reserve space for its error message."""
    with ignored(job):
        claims.enter_context(claimed(job.folder))
        if queue.get(job.id) is not None and not queue.state(job).is_over:
            reserve(job.folder)
            progress = last_event(job.folder).progress
            append(job.folder, {"event": "loading", "progress": progress, "worker": name_of(os.getpid())})
            return True
    return False


def try_one(job: Job, queue: Queue, base: Base, reporter: Reporter) -> bool:
    with ignored(job):
        attempt(job, queue, base, reporter)
        return True
    return False


@contextlib.contextmanager
def ignored(job: Job) -> Iterator[None]:
    """Skip a job that cannot run now, without stopping the worker."""
    try:
        yield
    except (FolderError, FileNotFoundError):  # claimed or removed by another process
        pass
    except OSError as error:  # e.g. a full disk
        log.error("%s: waits: %s", job.id, explain(error))


def name_of(pid: int) -> str:
    """A worker's name, unique among all that share the queue."""
    return f"{socket.gethostname()}:{pid}"


def give_up(queue: Queue, worker: str, attempts: int, reason: str) -> None:
    """After a worker crash: requeue its job, or fail it after too many crashes."""
    for job in queue.waiting():
        events, _ = events_from(job.folder, 0)
        workers = [event["worker"] for event in events if "worker" in event]
        if workers and workers[-1] == worker and last_event(job.folder).status == "in_progress":
            crashes = 1 + sum(event.get("crashed", False) for event in events)
            progress = last_event(job.folder).progress
            append(job.folder, {"event": "queued", "progress": progress, "crashed": True})
            log.error("%s: its worker ended (%s)", job.id, reason)
            if crashes >= attempts:
                reserve(job.folder)
                fail(job.folder, f"the worker ended {crashes} times while making this video ({reason})")
