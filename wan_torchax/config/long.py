"""Videos longer than a model was trained for. No JAX, no torch.

    riflex=true                         up to twice the length in one piece (RIFLEx, arXiv 2502.15894)
    windows=static, windows=uniform     any length: the transformer sees windows, and their velocities are averaged
    pipeline=i2v_long, ti2v_long, …     any length: segments that begin with the last frames of the one before
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from wan_torchax.config import caches, coarse, live
from wan_torchax.config.commandline import options
from wan_torchax.config.geometry import Geometry, is_segmented
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import Resolution
from wan_torchax.config.wording import one_of

if TYPE_CHECKING:  # imported where it is used: most commands need none
    import numpy

MODES = ("static", "uniform")
WEIGHTS = ("pyramid", "linear", "flat")
MOST_FRAMES = 1_000_001  # with windows or segments
STEP_BITS = 64
# Published as 1e-37, of which products are rounded to 0; and a frame may have no other weight.
LEAST_WEIGHT = 1e-6

# ---------------------------------------------------------------- lengths


def most_frames(config) -> int:
    """Frames that a video may have."""
    model, segments = config.model, config.pipeline.segments
    if config.windows.mode is not None or (segments.stages and not segments.whole):
        return MOST_FRAMES
    return max(model.max_frames, 2 * model.frames - 1) if config.riflex else model.max_frames


def is_windowed(config) -> bool:
    return config.windows.mode is not None and config.resolution.frames > config.windows.frames


def seen_at_once(config) -> Resolution:
    """The size of what the transformer sees in one forward pass: the video, or a window or segment of it."""
    size, frames = config.resolution, config.resolution.frames
    if is_windowed(config):
        frames = config.windows.frames
    elif is_segmented(config):
        frames = config.pipeline.segments.frames
    return Resolution(size.height, size.width, frames)


def longer_with(config) -> str:
    """What makes videos that are longer than the model takes, for a message; empty if nothing does."""
    if f"{config.pipeline.name}_long" in options("pipeline"):
        return f"; pipeline={config.pipeline.name}_long goes on from its last frames, in segments"
    windowed = OmegaConf.merge(config, {"windows": {"name": "static", "mode": "static"}})
    return "; windows=static has no such limit" if not any(long_problems(windowed)) else ""


# ---------------------------------------------------------------- windows


def latent_frames(frames: int, geometry: Geometry) -> int:
    """That hold so many frames, the first a single one."""
    return (frames - 1) // geometry.frame_scale + 1 if frames else 0


def window_tables(config, geometry: Geometry, steps: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """For each step the latent frames of its windows (steps, windows, frames), and how much each counts: windows that a
    step has less than others count nothing."""
    import numpy

    sizes = (config.resolution.frames, config.windows.frames, config.windows.overlap)
    frames, length, overlap = (latent_frames(size, geometry) for size in sizes)
    starts = [window_starts(config.windows.mode, frames, length, overlap, step) for step in range(steps)]
    shape = steps, max(map(len, starts)), length
    places: numpy.ndarray = numpy.zeros(shape, numpy.int32)
    weights: numpy.ndarray = numpy.zeros(shape, numpy.float32)
    for step, row in enumerate(starts):
        for window, start in enumerate(row):
            places[step, window] = numpy.arange(start, start + length)
            weights[step, window] = window_weights(config.windows.weights, start, frames, length, overlap)
    return places, weights


def window_starts(mode: str, frames: int, length: int, overlap: int, step: int) -> list[int]:
    """The first frames of a step's windows. Static: one after another, the last moved back to the video's end. Uniform:
    the same from an offset on, which the bits of the step in reverse order spread evenly over the video; a window that
    reaches over the end is moved back to it, and another begins the video unless the next one holds its first frame."""
    if mode == "static":
        return [*range(0, frames - length, length - overlap), frames - length]
    offset = round(frames * int(f"{step:0{STEP_BITS}b}"[::-1], 2) / 2**STEP_BITS)
    starts = [start % frames for start in range(offset, offset + frames - overlap, length - overlap)]
    place = 0
    while place < len(starts):
        if starts[place] + length > frames:
            starts[place] = frames - length
            following = starts[(place + 1) % len(starts)]
            if 0 < following <= frames - length:
                starts.insert(place + 1, 0)
        place += 1
    return list(dict.fromkeys(starts))


def window_weights(kind: str, start: int, frames: int, length: int, overlap: int) -> numpy.ndarray:
    """How much a window's prediction counts, by its frames."""
    import numpy

    places = numpy.arange(length)
    if kind == "pyramid":
        return numpy.minimum(places + 1, length - places)
    weights = numpy.ones(length)
    if kind == "linear" and overlap:
        ramp = numpy.linspace(LEAST_WEIGHT, 1, overlap)
        if start > 0:
            weights[:overlap] = ramp
        if start + length < frames:
            weights[-overlap:] = ramp[::-1]
    return weights


def passes(config, geometry: Geometry) -> float:
    """Forward passes in a step, on average: one for each window."""
    if not is_windowed(config):
        return 1
    _, weights = window_tables(config, geometry, config.steps)
    return float((weights.sum(axis=2) > 0).sum(axis=1).mean())


# ---------------------------------------------------------------- problems


def long_problems(config) -> Iterator[str]:
    if config.riflex and config.model.riflex_frequency is None:
        yield (
            f"riflex=true: it is not known which frequency to slow down in model={config.model.name}; "
            "set riflex=false, or model.riflex_frequency"
        )
    if config.riflex and config.pipeline.segments.stages:
        reason = f"a segment of pipeline={config.pipeline.name} is no longer than the model was trained for"
        yield f"riflex=true: {reason}; set riflex=false"
    if live.is_on(config) and (config.riflex or config.windows.mode is not None):
        chosen = "riflex=true" if config.riflex else f"windows={config.windows.name}"
        yield f"{chosen}: pipeline={config.pipeline.name} makes a video of any length chunk by chunk; leave it out"
    elif config.windows.mode is not None:
        yield from window_problems(config)


def window_problems(config) -> Iterator[str]:
    windows, family, chosen = config.windows, family_of(config), f"windows={config.windows.name}"
    yield from one_of("windows.mode", windows.mode, MODES)
    yield from one_of("windows.weights", windows.weights, WEIGHTS)
    geometry = family.geometry(config.model.architecture)
    scale = geometry.frame_scale
    if windows.frames <= scale or (windows.frames - 1) % scale:
        yield f"windows.frames={windows.frames}: must be {scale}n+1, {scale + 1} or more"
    elif windows.frames > config.model.max_frames:
        yield f"windows.frames={windows.frames}: {config.model.name} takes at most {config.model.max_frames}"
    elif not 0 <= windows.overlap <= windows.frames - scale:
        most = windows.frames - scale
        yield (
            f"windows.overlap={windows.overlap}: must be from 0 to {most} with windows.frames={windows.frames}; usual "
            f"{windows.frames * 3 // 8}"
        )
    if config.riflex:
        yield f"{chosen}: a window is no longer than the model was trained for; set riflex=false"
    if caches.is_on(config):
        yield f"{chosen}: cache={config.cache.name} keeps what a step computes of one window; use cache=none"
    if coarse.is_on(config) or config.pipeline.segments.stages:
        yield f"{chosen}: pipeline={config.pipeline.name} makes its video in parts already; use windows=none"
    whole = [value for stage in config.pipeline.stages.values() for value in stage.takes
             if value in family.conditions and family.conditions[value].window is None]
    if "last_image" in config.pipeline.inputs:
        whole.append("last_image")
    if whole:
        reason = f"pipeline={config.pipeline.name} gives {whole[0]}, which is of the whole video"
        yield f"{chosen}: {reason}; use windows=none, or pipeline=t2v, i2v or v2v"


def long_warnings(config) -> Iterator[str]:
    """What is allowed, and better left out."""
    model, frames = config.model, config.resolution.frames
    if config.riflex and frames <= model.frames:
        yield (
            f"riflex=true: {model.name} was trained for {model.frames} frames, and resolution.frames={frames}; it only "
            "helps longer videos, and changes this one"
        )
    is_long = model.frames < seen_at_once(config).frames and not live.is_on(config)
    if not config.riflex and is_long and model.riflex_frequency is not None:
        yield (
            f"resolution.frames={frames}: {model.name} was trained for {model.frames}, and in longer ones motion tends "
            "to start again; riflex=true, windows=static or, with a picture, a pipeline=…_long is for that"
        )
