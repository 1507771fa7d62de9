"""Several videos of one shape, denoised as one.

What comes of it lies in their folders as a run leaves it that was interrupted behind its latents: each is then made as
any other, decoded and written by itself. They differ in their texts and seeds alone.
"""
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
from omegaconf import DictConfig

from wan_torchax.config import inputs
from wan_torchax.config.graph import Graph
from wan_torchax.config.resolve import Resolved
from wan_torchax.devices.mesh import memory_bytes
from wan_torchax.events import Event, Finished, Listener, to_all
from wan_torchax.records.clock import Clock
from wan_torchax.runtime.checkpoint import fingerprints
from wan_torchax.runtime.weights import gib
from wan_torchax.session import session
from wan_torchax.stages.denoise import SPARE_BYTES, Denoise
from wan_torchax.tasks.generate import read_results, saver

log = logging.getLogger("wan")


@dataclass
class Video:
    """One of them."""

    config: DictConfig
    folder: Path
    listener: Listener
    clock: Clock
    values: dict[str, Any] = field(default_factory=dict)
    resolved: Resolved | None = None
    tell: Listener | None = None


def denoise_together(videos: list[Video]) -> None:
    """Texts one by one, then all latents at once. Where that cannot be, or is not worth it, nothing is done."""
    if not Denoise.takes_several(videos[0].config):
        return
    for video in videos:
        encode(video)
    missing = [video for video in videos if "latents" not in video.values]
    several = several_of(missing[0].resolved, [video.config.seed for video in missing]) if len(missing) > 1 else None
    if several is None:
        return
    log.info("%d videos are denoised together", len(missing))
    taken = Denoise.joined([video.values for video in missing])
    latents = session.run(several, ["denoise"], taken, to_each(missing))["latents"]
    for video, part in zip(missing, numpy.split(latents, len(missing))):
        video.tell(Finished("denoise", {"latents": part}))


def encode(video: Video) -> None:
    """What comes before denoising, or was made of it in an earlier try."""
    config = inputs.with_texts(video.config)
    graph = Graph.of(config.pipeline)
    values, weights = read_results(config, graph)
    video.resolved = session.resolve(config, list(graph.stages), video.listener)
    weights |= fingerprints(video.resolved.checkpoints)
    video.tell = to_all(video.clock, saver(config, video.folder, weights), video.listener)
    before = [name for name in graph.upstream("denoise") if name != "denoise"]
    video.values = session.run(video.resolved, before, video.resolved.inputs() | values, video.tell)


def several_of(resolved: Resolved, seeds: list[int]) -> Resolved | None:
    """Videos like this one, to be denoised together; None where there is no memory for them, which is told."""
    several = replace(resolved, seeds=tuple(seeds))
    loaded = [component for component in session.components.values() if component.is_loaded()]
    weights = sum(tensor.bytes_per_device for component in loaded for tensor in component.tensors.values())
    needed = weights + Denoise.temporaries(several) + SPARE_BYTES
    limit = memory_bytes(resolved.mesh, resolved.config.mesh.chip)
    if limit is not None and needed > limit:
        words = "%d videos are denoised one by one: together they need %.1f GiB of a device's %.1f"
        log.info(words, len(seeds), gib(needed), gib(limit))
        return None
    return several


def to_each(videos: list[Video]) -> Listener:
    """Steps and previews to the video they are of, the rest to all. Latents are not one video's yet."""

    def tell(event: Event) -> None:
        for place, video in enumerate(videos):
            if getattr(event, "video", place) == place and not isinstance(event, Finished):
                video.tell(event)

    return tell
