"""Prometheus metrics: of requests as they are answered, of videos from the queue on disk."""
import contextlib
import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from wan_torchax.records.report import read_json, seconds_by_part
from wan_torchax.serve.queue import Job, Queue

log = logging.getLogger("wan")
ANSWER_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
PART_SECONDS = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600)
STEP_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)


class Measures:
    """Metrics since this process started."""

    def __init__(self, queue: Queue):
        self.queue, registry = queue, CollectorRegistry()
        self.registry = registry
        self.open: dict[str, Job] = {}  # videos that were unfinished at the last scrape
        names = ["route", "method", "status"]
        self.answers = Counter("wan_http_requests", "Requests answered", names, registry=registry)
        self.seconds = Histogram(
            "wan_http_seconds", "Time of an answer", ["route"], buckets=ANSWER_SECONDS, registry=registry
        )
        self.queued = Gauge("wan_queue_length", "Videos waiting or in progress", ["status"], registry=registry)
        self.ends = Counter("wan_videos", "Finished, failed and deleted videos", ["end"], registry=registry)
        self.parts = Histogram(
            "wan_part_seconds", "Time of a video's parts", ["part"], buckets=PART_SECONDS, registry=registry
        )
        self.steps = Histogram("wan_step_seconds", "Denoising steps", buckets=STEP_SECONDS, registry=registry)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self.answers.labels(route, method, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def look(self) -> None:
        """Count the videos that have ended since the last scrape."""
        waiting = self.queue.waiting()
        for job in [job for job in self.open.values() if job.id not in {other.id for other in waiting}]:
            self.count_end(self.open.pop(job.id))
        self.open |= {job.id: job for job in waiting}
        for status in ("queued", "in_progress"):
            self.queued.labels(status).set(sum(self.queue.state(job).status == status for job in waiting))

    def count_end(self, job: Job) -> None:
        if self.queue.get(job.id) is None:
            self.ends.labels("deleted").inc()
            return
        self.ends.labels(self.queue.state(job).status).inc()
        metrics = read_json(job.folder / "metrics.json")
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # written by another version
            for part, seconds in seconds_by_part(metrics).items():
                self.parts.labels(part).observe(seconds)
            for seconds in metrics.get("step_seconds", ()):
                self.steps.observe(seconds)

    def text(self) -> bytes:
        self.look()
        return generate_latest(self.registry)
