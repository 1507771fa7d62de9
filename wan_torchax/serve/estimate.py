"""Estimates of a video's time: that of the last video made here, in proportion to the FLOPs of a step."""
import math
from collections.abc import Iterable
from dataclasses import dataclass

from wan_torchax.config import live
from wan_torchax.config.geometry import device_count, segment_count
from wan_torchax.config.graph import Graph
from wan_torchax.config.resolve import Job
from wan_torchax.records.report import read_json
from wan_torchax.serve.queue import Job as Asked
from wan_torchax.serve.queue import Queue, events_from
from wan_torchax.stages.stage import find, main_stage

LOOKED_AT = 20  # number of newest videos considered
UNKNOWN_SECONDS = 30


def usual_seconds(queue: Queue) -> float:
    """The time of the last finished video, for Retry-After."""
    return next((metrics["seconds"]["total"] for _, metrics in finished(queue)), UNKNOWN_SECONDS)


def finished(queue: Queue):
    """The newest finished videos, with their metrics."""
    over = [job for job in reversed(queue.jobs()) if queue.state(job).status == "completed"]
    for job in over[:LOOKED_AT]:
        metrics = read_json(job.folder / "metrics.json")
        if isinstance(metrics.get("seconds"), dict) and isinstance(metrics["seconds"].get("total"), (int, float)):
            yield job, metrics


@dataclass(frozen=True)
class Pace:
    """Seconds per FLOP of a step: of each step, and of everything else together."""

    step: float
    beside: float

    def seconds(self, flops: int, steps: int) -> float:
        return flops * (self.step * steps + self.beside)


def last_pace(queue: Queue, config) -> Pace | None:
    """The pace of the last video made with a config's model."""
    main = main_stage(Graph.of(config.pipeline))
    parts = [name for name in (*config.pipeline.stages, "write") if name != main]
    for _, metrics in finished(queue):
        flops, step = metrics.get("step_flops"), metrics.get("step_seconds_median")
        if metrics.get("model") == config.model.name and flops and step:
            beside = sum(metrics["seconds"].get(part, 0) for part in parts)
            return Pace(step / metrics.get("denoised_together", 1) / flops, beside / flops)
    return None


def own_pace(job: Asked) -> Pace | None:
    """The pace of a running video, from its steps since it was started or resumed."""
    flops, steps = job.request.get("step_flops"), []
    for event in events_from(job.folder, 0)[0]:
        if event["event"] == "step" and isinstance(event.get("time"), (int, float)):
            again = steps and event.get("step", 0) <= steps[-1].get("step", 0)
            steps = [event] if again else [*steps, event]
    if len(steps) < 2 or not flops:
        return None
    return Pace((steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1) / flops, 0)


def seconds_left(queue: Queue, jobs: Iterable[Asked], config) -> dict[str, float | None]:
    """Seconds until each video is finished, by id, for videos in queue order; None if nothing is known."""
    pace, total, left = last_pace(queue, config), 0.0, {}
    for job in jobs:
        state, flops = queue.state(job), job.request.get("step_flops")
        own = own_pace(job) if state.step > 1 else None
        pace = Pace(own.step, pace.beside if pace else 0) if own else pace
        known = pace is not None and isinstance(flops, int)
        total += pace.seconds(flops, (state.steps or job.request["steps"]) - state.step) if known else float("nan")
        left[job.id] = None if math.isnan(total) else round(total, 1)
    return left


def estimate(queue: Queue, config) -> dict:
    """Seconds of a step and of a video with this configuration, and their source; nulls if nothing is known."""
    flops, pace = step_flops(config), last_pace(queue, config)
    if pace is not None:
        seconds = pace.seconds(flops, step_count(config))
        return {"step_seconds": pace.step * flops, "seconds": seconds, "source": "measured"}
    peak = config.mesh.chip.peak_tflops
    floor = peak and flops / (max(device_count(config.mesh), 1) * peak * 1e12)
    seconds = floor and floor * step_count(config)
    return {"step_seconds": floor, "seconds": seconds, "source": "floor" if floor else None}


def step_count(config) -> int:
    """Steps of a whole video: of its segments, or of its chunks."""
    return config.steps * (live.chunk_count(config) if live.is_on(config) else segment_count(config))


def step_flops(config) -> int:
    job = Job.of(config, {})
    return find(main_stage(job.graph)).flops(job)["total"]
