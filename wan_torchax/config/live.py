"""Videos made chunk by chunk (conf/live): which latent frames a chunk has, and where its keys and values are kept.

    layout = Layout.of(config.live, 21)         # of 21 latent frames
    Window(layout).take(0)                      # the slot of the first chunk

No JAX, no torch.
"""
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wan_torchax.config import caches, clips
from wan_torchax.config.geometry import guided
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import POSITIONS
from wan_torchax.config.wording import nearest_multiple, one_of

MOST_TIME = 1000
STAGE = "live"


def is_on(config) -> bool:
    """Whether the pipeline makes videos chunk by chunk."""
    return STAGE in config.pipeline.stages


def chunk_frames(config) -> tuple[int, int]:
    """Video frames of the first chunk and of a later one."""
    first, scale = first_of(config.live), family_of(config).geometry(config.model.architecture).frame_scale
    return (first - 1) * scale + 1, config.live.chunk * scale


def chunk_count(config) -> int:
    """Chunks of a whole video."""
    first, later = chunk_frames(config)
    return 1 + (config.resolution.frames - first) // later


def first_of(live) -> int:
    """Latent frames of the first chunk."""
    return live.chunk if live.first is None else live.first


def given_chunks(live, size, geometry, video: str | None) -> int:
    """Chunks at the beginning of a video that are given: as many as another video has whole, but for the last; of a
    picture the first."""
    if video is None:
        return 1
    first, later = (first_of(live) - 1) * geometry.frame_scale + 1, live.chunk * geometry.frame_scale
    frames = min(clips.frame_count(Path(video), size.fps), size.frames - later)
    return max(1 + (frames - first) // later, 1)


def is_given(config) -> bool:
    """Whether a picture or a video leads the video."""
    return is_on(config) and any(value in config.pipeline.inputs for value in ("image", "video"))


@dataclass(frozen=True)
class Layout:
    """A video's chunks, and the slots of a window for the keys and values of one chunk each; in latent frames."""

    chunk: int
    first: int  # latent frames of the first chunk
    chunks: int
    slots: int
    sinks: int  # slots that are never overwritten

    @classmethod
    def of(cls, live, latents: int) -> "Layout":
        first = first_of(live)
        chunks = 1 + (latents - first) // live.chunk
        slots = chunks if live.window is None else min(chunks, 1 + (live.window - first) // live.chunk)
        return cls(live.chunk, first, chunks, slots, 1 + (live.sink - first) // live.chunk if live.sink else 0)

    def size(self, number: int) -> int:
        """Latent frames of a chunk."""
        return self.chunk if number else self.first

    def begin(self, number: int) -> int:
        """The first latent frame of a chunk, or of a slot among all."""
        return self.first + (number - 1) * self.chunk if number else 0

    @property
    def window(self) -> int:
        """Latent frames of all slots."""
        return self.begin(self.slots)


class Window:
    """The chunks that are kept: one in each slot.

    A chunk overwrites the oldest that is not part of the sink, once all slots are full. Attention does not depend on
    the order of keys, so nothing is moved.
    """

    def __init__(self, layout: Layout):
        self.layout, self.chunks = layout, list[int]()

    def take(self, number: int) -> int:
        """The slot of the next chunk, which now is in it."""
        if len(self.chunks) < self.layout.slots:
            self.chunks.append(number)
        else:
            self.chunks[self.chunks.index(self.oldest)] = number
        return self.chunks.index(number)

    @property
    def oldest(self) -> int:
        """The chunk that the next one overwrites."""
        return min(self.chunks[self.layout.sinks :])

    def staying(self) -> list[int]:
        """The chunks that the next one sees, in the order of time."""
        is_full = len(self.chunks) == self.layout.slots
        return sorted(chunk for chunk in self.chunks if not (is_full and chunk == self.oldest))

    def ranks(self) -> list[int]:
        """The place of each slot's chunk in the order of time."""
        return [sorted(self.chunks).index(chunk) for chunk in self.chunks]


def later_prompts(rows) -> list[tuple[float, str]]:
    """`live.prompts`: the second at which each begins, and its text."""
    parts = (row.partition(":") for row in rows)
    return [(float(second), text.strip()) for second, _, text in parts]


def later_prompt(second: float, text: str) -> str:
    """A row of `live.prompts`."""
    return f"{math.floor(1000 * second) / 1000}: {text}"  # never behind the chunk that begins then


def chunk_seconds(config, geometry, layout: Layout) -> list[float]:
    """When each chunk begins."""
    frames = (max(0, (layout.begin(number) - 1) * geometry.frame_scale + 1) for number in range(layout.chunks))
    return [frame / config.resolution.fps for frame in frames]


def prompt_chunks(config, geometry, layout: Layout) -> list[int]:
    """The chunk with which each prompt begins, the first one's included."""
    seconds = [0.0, *(second for second, _ in later_prompts(config.live.prompts))]
    begins = chunk_seconds(config, geometry, layout)
    return [sum(begin < second for begin in begins) for second in seconds]


# ---------------------------------------------------------------- problems


def live_problems(config) -> Iterator[str]:
    live, pipeline = config.live, f"pipeline={config.pipeline.name}"
    if live.chunk is None and is_on(config):
        remedy = "choose live=self_forcing, longlive, longlive2 or krea, as the model was trained, or another pipeline"
        yield f"{pipeline}: live={live.name} has no chunks; {remedy}"
    elif live.chunk is not None and not is_on(config):
        yield f"live={live.name}: {pipeline} makes a video in one piece; use pipeline=live, or live=none"
    elif is_on(config):
        problems = list(size_problems(config))
        yield from problems or [*frame_problems(config), *prompt_problems(config)]
        yield from unserved(config)


def size_problems(config) -> Iterator[str]:
    """The sizes in conf/live, each by itself and against each other."""
    live = config.live
    yield from one_of("live.positions", live.positions, POSITIONS)
    if not 0 <= live.context_noise <= MOST_TIME:
        yield f"live.context_noise={live.context_noise}: a time from 0 to {MOST_TIME}; usual 0"
    for key, least in (("chunk", 1), ("first", 1), ("window", 1), ("sink", 0), ("blend", 0)):
        if live[key] is not None and live[key] < least:
            unit = "chunks" if key == "blend" else "latent frames"
            yield f"live.{key}={live[key]}: must be at least {least} {unit}; nearest {least}"
            return
    chunk, first = live.chunk, first_of(live)
    whole = f"must be of whole chunks, {first} and then {chunk} each"
    for key in ("window", "sink"):
        if live[key] and (live[key] < first or (live[key] - first) % chunk):
            yield f"live.{key}={live[key]}: {whole}; {nearest_multiple(live[key], chunk, first % chunk)}"
    if live.reencode and not (live.rebuild and live.window is not None and not live.sink and first == chunk):
        own = "the first of a window that is read anew, in whole chunks and without a sink"
        yield f"live.reencode=true: encodes {own}; set live.rebuild=true, live.window and live.sink=0, or false"
    elif live.reencode and live.window is not None and live.window <= chunk:
        yield f"live.reencode=true: live.window={live.window} keeps no chunk to read anew; at least {2 * chunk}"
    if live.window is not None and live.sink + chunk > live.window:
        yield f"live.sink={live.sink}: leaves no chunk of live.window={live.window}; at most {live.window - chunk}"


def frame_problems(config) -> Iterator[str]:
    """The video's length against its chunks and the window."""
    live, geometry = config.live, family_of(config).geometry(config.model.architecture)
    latents, frames = geometry.latent_shape(config.resolution)[2], config.resolution.frames
    first = first_of(live)
    chunks, rest = divmod(latents - first, live.chunk)
    if latents < first or rest:
        near = [(first + max(count, 0) * live.chunk - 1) * geometry.frame_scale + 1 for count in (chunks, chunks + 1)]
        whole = f"must be whole chunks of {live.chunk} latent frames, the first of {first}"
        yield f"resolution.frames={frames}: {whole}; nearest {near[0]} or {near[1]}"
    elif first != live.chunk and not live.sink and live.window is not None and latents > live.window:
        reason = "the first chunk's slot is too small for another"
        yield f"live.sink=0: {reason}, and the video is longer than live.window={live.window}; set live.sink={first}"
    elif is_given(config) and not chunks:
        least = (first + live.chunk - 1) * geometry.frame_scale + 1
        yield f"resolution.frames={frames}: the first chunk is given, and no other is made; at least {least}"
    if "image" in config.pipeline.inputs and first != 1:
        yield (
            f"live.first={live.first}: a picture is one latent frame, and the first chunk has {first}; use "
            "live=first_frame with a model that begins so, or pipeline=live_v2v with a video"
        )


def live_warnings(config) -> Iterator[str]:
    """Of a video that leads another, what is left out."""
    if is_given(config) and config.get("video") is not None:
        geometry = family_of(config).geometry(config.model.architecture)
        first, later = chunk_frames(config)
        count = clips.frame_count(Path(config.video), config.resolution.fps)
        taken = first + (given_chunks(config.live, config.resolution, geometry, config.video) - 1) * later
        if taken < count:
            yield f"video={config.video}: has {count} frames; the last {taken} lead the video, in whole chunks"


def prompt_problems(config) -> Iterator[str]:
    """The prompts that follow the first one."""
    example = 'e.g. live.prompts=["5: a blue star moving left"]'
    for row in config.live.prompts:
        if not re.fullmatch(r"\s*\d{1,6}(\.\d{1,3})?\s*:.*\S.*", row, re.DOTALL):
            yield f"live.prompts: {row[:60]!r} is not a second, a colon and a prompt; {example}"
            return
    geometry = family_of(config).geometry(config.model.architecture)
    layout = Layout.of(config.live, geometry.latent_shape(config.resolution)[2])
    chunks = prompt_chunks(config, geometry, layout)
    seconds = [second for second, _ in later_prompts(config.live.prompts)]
    if any(after <= before for before, after in itertools.pairwise(chunks)):
        yield f"live.prompts: begin at {seconds} seconds; each needs a chunk of its own, after those before it"
    elif chunks[-1] >= layout.chunks:
        end = config.resolution.frames / config.resolution.fps
        yield f"live.prompts: one begins at {seconds[-1]} seconds, and no chunk of {end:g} seconds begins so late"


def unserved(config) -> Iterator[str]:
    """What does not go with chunks."""
    pipeline, kernel = f"pipeline={config.pipeline.name}", config.attention.self
    if family_of(config).chunk_denoiser is None:
        yield f"{pipeline}: videos of model.family={config.model.family} are made in one piece; choose another pipeline"
    if guided(config):
        reason = f"{pipeline} keeps keys and values of the prompt alone"
        yield f"guidance_scale={config.guidance_scale}: {reason}; set guidance_scale=1"
    if config.guider.nag != 1:
        yield f"guider.nag={config.guider.nag}: {pipeline} knows the prompt alone; use guider=cfg"
    if config.adapter.get("mode") == "beside":
        yield f"adapter.mode=beside: {pipeline} has no strengths for its steps; use adapter.mode=merge"
    if caches.is_on(config):
        yield f"cache={config.cache.name}: {pipeline} computes every step, for its keys and values; use cache=none"
    if len(config.model.experts) > 1:
        experts = list(config.model.experts)
        yield f"model.experts={experts}: {pipeline} keeps keys and values of one; choose another model"
    if config.model.noise_dtype != "float32":
        reason = f"{pipeline} draws its noise in float32"
        yield f"model.noise_dtype={config.model.noise_dtype}: {reason}; set float32"
    if kernel.sparse.kind != "none":
        yield f"sparse={kernel.sparse.kind}: {pipeline} attends to all that it keeps; set sparse=none"
    if kernel.window is not None:
        yield f"attention.self.window={kernel.window}: {pipeline} has live.window; set attention.self.window=null"
    if kernel.smooth_keys:
        yield f"attention.self.smooth_keys=true: chunks have no common mean; set false with {pipeline}"
    if config.sharding.attention.ring is not None:
        ring = "a ring shares keys that must be kept"
        yield f"sharding.attention.ring={config.sharding.attention.ring}: {ring}; use sharding=tp or tokens"
    if config.live.reencode and "decode" not in config.stages:
        stages = list(config.stages)
        yield f"live.reencode=true: needs decoded pictures, and stages={stages} makes none; add decode, or set false"
    if config.sharding.attention.groups:
        groups = f"sharding.attention.groups={config.sharding.attention.groups}"
        yield f"{groups}: {pipeline} keeps all heads of a chunk together; set groups=[]"
    if config.preview_every:
        yield f"preview_every={config.preview_every}: {pipeline} writes the video itself as it grows; set 0"
    if config.task in ("calibrate", "tune", "verify"):
        yield f"task={config.task}: not with {pipeline} yet; use pipeline=t2v"
