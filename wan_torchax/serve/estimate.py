"""How long a video would take: from the last one that was made here, in proportion to the arithmetic of a step."""
from wan_torchax.config.geometry import device_count
from wan_torchax.config.graph import Graph
from wan_torchax.config.resolve import Job
from wan_torchax.records.report import read_json
from wan_torchax.serve.queue import Queue
from wan_torchax.serve.requests import Base
from wan_torchax.stages.stage import find, main_stage

LOOKED_AT = 20  # videos, the newest first
UNKNOWN_SECONDS = 30


def usual_seconds(queue: Queue) -> float:
    """Of a video, as the last that was finished; for clients that are asked to come again."""
    return next((metrics["seconds"]["total"] for _, metrics in finished(queue)), UNKNOWN_SECONDS)


def finished(queue: Queue):
    """The newest videos with their metrics."""
    over = [job for job in reversed(queue.jobs()) if queue.state(job).status == "completed"]
    for job in over[:LOOKED_AT]:
        metrics = read_json(job.folder / "metrics.json")
        if isinstance(metrics.get("seconds"), dict) and isinstance(metrics["seconds"].get("total"), (int, float)):
            yield job, metrics


def estimate(base: Base, queue: Queue, config) -> dict:
    """Seconds of a step and of a video with this configuration, and where they are from; nulls where nothing is."""
    flops = step_flops(config)
    for _, metrics in finished(queue):
        if metrics.get("model") == config.model.name and metrics.get("step_flops") and metrics["step_seconds_median"]:
            together = metrics.get("denoised_together", 1)
            step = metrics["step_seconds_median"] / together * flops / metrics["step_flops"]
            main = main_stage(Graph.of(config.pipeline))
            parts = [name for name in (*config.pipeline.stages, "write") if name != main]
            beside = sum(metrics["seconds"].get(part, 0) for part in parts) * flops / metrics["step_flops"]
            return {"step_seconds": step, "seconds": step * config.steps + beside, "source": "measured"}
    peak = config.mesh.chip.peak_tflops
    floor = peak and flops / (max(device_count(config.mesh), 1) * peak * 1e12)
    return {"step_seconds": floor, "seconds": floor and floor * config.steps, "source": "floor" if floor else None}


def step_flops(config) -> int:
    job = Job.of(config, {})
    return find(main_stage(job.graph)).flops(job)["total"]
