"""Denoises several videos of one shape as a batch. They differ only in prompts and seeds.

The latents are written to each video's folder, as if its run had been interrupted after denoising; each video is then
decoded and written on its own, like any other.
"""
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
from omegaconf import DictConfig

from wan_torchax.config import inputs
from wan_torchax.config.resolve import Job, Resolved
from wan_torchax.devices.mesh import memory_bytes
from wan_torchax.events import Event, Finished, Listener, to_all
from wan_torchax.records.clock import Clock
from wan_torchax.records.stored import is_alike
from wan_torchax.runtime.jobs import find_job
from wan_torchax.runtime.weights import gib
from wan_torchax.session import session
from wan_torchax.stages.denoise import SPARE_BYTES
from wan_torchax.stages.stage import find, main_stage
from wan_torchax.tasks.generate import read_results, saver

log = logging.getLogger("wan")


@dataclass
class Video:
    """One video of a batch."""

    config: DictConfig
    folder: Path
    listener: Listener
    clock: Clock
    values: dict[str, Any] = field(default_factory=dict)
    resolved: Resolved | None = None
    emit: Listener | None = None


def denoise_together(videos: list[Video]) -> None:
    """Encode texts one by one, then denoise all latents at once. Does nothing if that is impossible or pointless."""
    for video in videos:
        encode(video)
    first = videos[0].resolved
    name = main_stage(first.graph)
    if not takes_several(first):
        return
    (value,) = first.graph.stages[name].gives
    missing = [video for video in videos if value not in video.values]
    several = several_of(missing[0].resolved, [video.config.seed for video in missing]) if len(missing) > 1 else None
    if several is None:
        return
    log.info("%d videos are denoised together", len(missing))
    taken = find(name).joined([video.values for video in missing], list(first.graph.stages[name].takes))
    made = session.run(several, [name], taken, to_each(missing))[value]
    for video, part in zip(missing, numpy.split(made, len(missing))):
        video.emit(Finished(name, {value: part}))


def takes_several(job: Job) -> bool:
    """Whether videos like this can be denoised together, and what is made of each can be left in its folder."""
    name, config = main_stage(job.graph), job.config
    is_left = name in config.stages and config.output.save_stages
    return is_left and not job.is_segmented and find(name).takes_several(name, job)


def encode(video: Video) -> None:
    """Run the stages before denoising, or read their results from an earlier attempt."""
    config = inputs.with_texts(video.config)
    job = find_job(config)
    values = read_results(job, video.folder if is_alike(config, video.folder) else None).values
    video.resolved = session.resolve(job, list(job.graph.stages), video.listener)
    video.emit = to_all(video.clock, saver(lambda: video.resolved, video.folder), video.listener)
    main = main_stage(job.graph)
    before = [name for name in job.graph.upstream(main) if name != main] if takes_several(job) else []
    video.values = session.run(video.resolved, before, video.resolved.inputs() | values, video.emit)


def several_of(resolved: Resolved, seeds: list[int]) -> Resolved | None:
    """A batch of videos like this one; None, with a log message, if they do not fit in memory."""
    several = replace(resolved, seeds=tuple(seeds))
    loaded = [component for component in session.components.values() if component.is_loaded()]
    weights = sum(tensor.bytes_per_device for component in loaded for tensor in component.specs.values())
    needed = weights + find(main_stage(resolved.graph)).temporaries(several) + SPARE_BYTES
    limit = memory_bytes(resolved.mesh, resolved.config.mesh.chip)
    if limit is not None and needed > limit:
        words = "%d videos are denoised one by one: together they need %.1f GiB of a device's %.1f"
        log.info(words, len(seeds), gib(needed), gib(limit))
        return None
    return several


def to_each(videos: list[Video]) -> Listener:
    """Steps and previews go to their video, other events to all; not Finished, whose latents are those of the batch."""

    def emit(event: Event) -> None:
        for place, video in enumerate(videos):
            if getattr(event, "video", place) == place and not isinstance(event, Finished):
                video.emit(event)

    return emit
