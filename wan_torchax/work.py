"""A run in progress: executes stages in order, for a whole video or segment by segment.

    with session.open(resolved, names, values, emit) as work:
        for step in work.steps:
            work.run(step)
    work.result                         # the given values and the stages' outputs
"""
import contextlib
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy

from wan_torchax import interruption
from wan_torchax.config.geometry import segment_count
from wan_torchax.config.resolve import Resolved, View
from wan_torchax.events import (
    Advanced,
    Asked,
    Began,
    Decoded,
    Ended,
    Finished,
    Listener,
    Part,
    Previewed,
    Queued,
    Reencoded,
    Stepped,
    silence,
)
from wan_torchax.records.files import Spool
from wan_torchax.runtime.build_cache import BuildCache
from wan_torchax.runtime.programs import compiling, no_compilation, own_compilation
from wan_torchax.stages.stage import Stage, find

if TYPE_CHECKING:
    from wan_torchax.session import Session


REENCODE = "reencode"


@dataclass(frozen=True, eq=False)
class RunStep:
    """One execution of a stage: for the whole video or for one segment."""

    name: str
    resolved: Resolved
    segment: int | None = None

    @property
    def gives(self) -> set[str]:
        return set(self.resolved.graph.stages[self.name].gives)

    @property
    def takes(self) -> set[str]:
        return set(self.resolved.graph.stages[self.name].takes)


@dataclass
class AtHand:
    """Values from an earlier run, and the stages still to run."""

    values: dict[str, Any] = field(default_factory=dict)
    segments: dict[int | None, ChainMap[str, Any]] = field(default_factory=dict)  # by segment, if there are several
    finished: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # by stage: parts of a result
    missing: list[str] = field(default_factory=list)


class Work:
    """The steps of a run and the values produced so far."""

    def __init__(
        self, resolved: Resolved, names: list[str], values: Mapping, at_hand: AtHand, recall: Callable, kept: bool
    ):
        # What segments carry over is absent before the first, unless it is an input.
        self.resolved, self.values = resolved, {**dict.fromkeys(resolved.graph.carry), **values}
        self.steps = schedule(resolved, names)
        self.finished, self.kept = at_hand.finished, kept
        # A step sees the values of its segment first, then those of the whole run.
        self.scopes = {
            step.segment: ChainMap({}, at_hand.segments.get(step.segment, {}), self.values) for step in self.steps
        }
        self.frames = Spool(kept=kept)  # of all segments, joined into one video
        absent = [step for step in self.steps if not step.gives <= self.scopes[step.segment].keys()]
        self.recalled = {step: result for step in absent if (result := recall(step)) is not None}
        self.left = [step for step in absent if step not in self.recalled]
        self.stages: dict[str, Stage] = {}
        self.emit: Listener = silence

    @property
    def fresh(self) -> dict[str, Resolved]:
        """Stages still to run, each once, with what they are built for: all segments share programs."""
        return {step.name: step.resolved for step in reversed(self.left)}

    def begin(self, session: "Session", stages: dict[str, Stage], cache: BuildCache | None, emit: Listener) -> None:
        self.session, self.stages, self.cache, self.emit = session, stages, cache, emit

    def run(self, step: RunStep) -> None:
        """Provide a step's values: given, recalled from a cache, or computed now."""
        scope, emit = self.scopes[step.segment], joined(step, self.resolved, self.emit)
        if step.segment:  # carried over from the previous segment
            before = self.scopes[step.segment - 1]
            scope.update({value: before[source] for value, source in self.resolved.graph.carry.items()})
        if step in self.left:
            result = self.make(step, scope, emit)
        elif step in self.recalled:
            result = self.recalled.pop(step)
        else:
            if "frames" in step.gives:
                emit(Decoded(scope["frames"]))
            self.leave(step, scope)
            return
        (self.values if step.segment is None else scope).update(result)
        self.emit(Finished(step.name, result, step.segment))
        self.leave(step, scope)

    def leave(self, step: RunStep, scope: Mapping) -> None:
        """Join a segment's frames to the video's. What is known of the segment before is not needed any longer."""
        if step.segment is not None and "frames" in step.gives:
            self.frames.append(scope["frames"][window(self.resolved, step.segment)])
            before = self.scopes.pop(step.segment - 1, ChainMap())
            before.maps[0].clear()  # tracebacks of OmegaConf's own exceptions hold its user until they are collected

    def make(self, step: RunStep, scope: Mapping, emit: Listener) -> dict[str, Any]:
        """Load a stage's weights, wait for its programs and run it."""
        name, resolved, stage = step.name, step.resolved, self.stages[step.name]
        previewer, follower = self.previewer(name), self.follower(step)
        behind = self.stages[follower.name] if follower else None
        for loading in (stage, previewer, behind):
            if loading is not None:
                load(loading, resolved, emit)
        for waiting in (stage, behind):
            if waiting is not None:
                wait_for_programs(waiting, emit)
        self.read_next(name, resolved)
        taken = {value: scope[value] for value in resolved.graph.stages[name].takes}
        listener = emit if previewer is None else with_previews(previewer, resolved.config.preview_every, emit)
        if follower and behind:
            following = Following(behind.following(self.view(behind, follower), emit))
            listener = with_follower(following, listener)
            if REENCODE in self.stages:
                listener = with_pictures(self.encoder(emit), following, listener)
        listener = with_embeddings(self.encode, listener)
        view = self.view(stage, step, follower)
        with phase(name, emit, *stage.amount(name, resolved)), no_compilation(name):
            result = stage.run(view, taken, listener)
        self.left.remove(step)
        if follower is not None:
            self.left.remove(follower)
            self.recalled[follower] = following.do("result")
            emit(Ended(follower.name, following.seconds))
        if not is_resident(resolved.config):
            self.session.free_unused([self.stages[other.name] for other in self.left])
        self.session.remember(self.cache, step, result)
        return result

    def view(self, stage: Stage, step: RunStep, follower: RunStep | None = None) -> View:
        """What a stage sees while it runs. What it emits as it is made is kept for those who take it: the caller, or a
        step behind it, but for the one that follows it part by part."""
        later = {value for other in self.left if other not in (step, follower) for value in other.takes}
        kept = self.kept or step.segment is not None or bool(step.gives & later)
        finished = tuple(self.finished.get(step.name, ()))
        return replace(stage.view_of(step.name, step.resolved), finished=finished, kept=kept)

    def follower(self, step: RunStep) -> RunStep | None:
        """The step behind one that finishes its result in parts, if it can take them as they come."""
        if find(step.name).part_shapes(step.name, step.resolved, 0) is None:
            return None
        later = self.left[self.left.index(step) + 1 :][:1]
        return next((other for other in later if find(other.name).follows and other.takes <= step.gives), None)

    def encoder(self, emit: Listener) -> Callable[[numpy.ndarray], numpy.ndarray]:
        """From pixels (1, 3, 1, height, width) to latents, by the stage that helps."""
        stage = self.stages[REENCODE]
        load(stage, self.resolved, emit)
        wait_for_programs(stage, emit)
        view = stage.view_of(REENCODE, self.resolved)
        return lambda pixels: stage.encode(view, 1, lambda _: pixels, silence)  # type: ignore[attr-defined]

    def encode(self, prompt: str) -> numpy.ndarray:
        """The embeddings of another prompt."""
        name = str(self.resolved.graph.giver("embeddings"))
        stage = self.session.build_one(name, self.resolved, self.cache)
        with own_compilation():
            load(stage, self.resolved, silence)
            if not stage.programs.ready():  # the first prompt's embeddings were in the store
                with compiling({name: stage.programs}, silence):
                    wait_for_programs(stage, silence)
            values = self.resolved.inputs() | {"prompt": prompt}
            return stage.run(stage.view_of(name, self.resolved), values, silence)["embeddings"][:1]

    def read_next(self, name: str, resolved: Resolved) -> None:
        """Prefetch the next stage's weights from disk while this one runs."""
        names = list(self.stages)
        for following in names[names.index(name) + 1 :][:1]:
            stage = self.stages[following]
            for key in stage.components_first(stage.view_of(following, resolved)):
                component = stage.components[key]
                if not component.is_loaded() and component.fits_in_memory():
                    component.read_ahead()

    def previewer(self, name: str) -> Stage | None:
        """The stage that can decode previews of another stage's output: a helper before the pipeline's own."""
        given = set(self.resolved.graph.stages[name].gives)
        able = [stage for stage in self.stages.values() if stage.previews and given & set(stage.takes)]
        return able[-1] if able and self.resolved.config.preview_every else None

    @property
    def result(self) -> dict[str, Any]:
        """All values; the frames of all segments joined into one video."""
        frames = self.frames.array()
        return self.values | ({} if frames is None else {"frames": frames})


# ---------------------------------------------------------------- segments of a video


def schedule(resolved: Resolved, names: list[str]) -> list[RunStep]:
    """The named stages in order; those that the pipeline repeats run once per segment."""
    parts, repeated = resolved.segments(), [name for name in names if name in resolved.graph.repeated]
    if not resolved.is_segmented:
        return [RunStep(name, resolved) for name in names]
    steps = []
    for name in names:
        if name not in repeated:
            steps.append(RunStep(name, resolved))
        elif name == repeated[0]:
            steps += [RunStep(other, part, part.segment) for part in parts for other in repeated]
    return steps


def window(resolved: Resolved, segment: int) -> slice:
    """The frames of a segment that go into the video: without the overlap with the previous one and what is dropped of
    the first, cut at the video's length."""
    segments, total = resolved.config.pipeline.segments, resolved.config.resolution.frames
    first = segment * (segments.frames - segments.overlap) - segments.dropped
    return slice(segments.overlap if segment else segments.dropped, min(segments.frames, total - first))


def joined(step: RunStep, resolved: Resolved, emit: Listener) -> Listener:
    """A listener that trims a segment's frames to those that go into the video, and counts steps over all segments."""
    if (segment := step.segment) is None:
        return emit
    part, seen, count = window(resolved, segment), 0, segment_count(resolved.config)

    def listener(event):
        nonlocal seen
        if isinstance(event, Stepped):
            event = replace(event, step=segment * event.steps + event.step, steps=count * event.steps)
        if isinstance(event, Decoded):
            first, last = max(part.start - seen, 0), max(part.stop - seen, 0)
            seen += len(event.frames)
            event = Decoded(event.frames[first:last])
        emit(event)

    return listener


# ---------------------------------------------------------------- while it runs


def is_resident(config) -> bool:
    """Whether weights stay in device memory after their stage. By default only in a sweep."""
    return config.keep_resident if config.keep_resident is not None else config.sweep.active


@contextlib.contextmanager
def phase(name: str, emit: Listener, total: int | None = None, unit: str = "") -> Iterator[None]:
    began = time.perf_counter()
    interruption.check()
    emit(Began(name, total, unit))
    yield
    emit(Ended(name, time.perf_counter() - began))


def load(stage: Stage, resolved: Resolved, emit: Listener) -> None:
    """Bring the weights that a stage begins with to the devices."""
    for key in stage.components_first(stage.view_of(stage.name, resolved)):
        stage.components[key].load(stage.specs[key], emit)


def wait_for_programs(stage: Stage, emit: Listener) -> None:
    """Wait for the stage's programs, emitting heartbeats."""
    waiting, name = list(stage.programs.compiled.values()), f"compile_{stage.name}"
    if wait(waiting, timeout=0).not_done:
        with phase(name, emit):
            while wait(waiting, timeout=0.2).not_done:
                emit(Advanced(name, 0))


class Following:
    """A stage that follows another (Stage.following), and the seconds that it takes from it."""

    def __init__(self, work):
        self.work, self.seconds = work, 0.0

    def do(self, what: str, *arguments) -> Any:
        """One of `add`, `fetch` and `result`."""
        began = time.perf_counter()
        result = getattr(self.work, what)(*arguments)
        self.seconds += time.perf_counter() - began
        return result


def with_follower(following: Following, emit: Listener) -> Listener:
    """A listener that also passes the parts of a result to the stage behind it. That queues its work on the devices
    before anything else happens; what comes of it is fetched, and shown, once the part is saved and the devices have
    more to do."""

    def listener(event):
        if isinstance(event, Part):
            following.do("add", event.values)
        emit(event)
        if isinstance(event, Queued):
            following.do("fetch", event.more)

    return listener


def with_pictures(encode: Callable, following: Following, emit: Listener) -> Listener:
    """A listener that encodes pictures of a live video again, which the stage behind it has decoded."""

    def listener(event):
        emit(event)
        if isinstance(event, Reencoded):
            event.latents.append(encode(following.do("first_kept")))

    return listener


def with_embeddings(encode: Callable[[str], numpy.ndarray], emit: Listener) -> Listener:
    """A listener that encodes prompts which others give while a video is made; the last of several applies."""

    def listener(event):
        emit(event)
        if isinstance(event, Asked) and event.prompts:
            event.embeddings.append(encode(event.prompts[-1]))

    return listener


def with_previews(previewer: Stage, every: int, emit: Listener) -> Listener:
    """A listener that also emits a preview every `every` steps."""

    def listener(event):
        emit(event)
        if isinstance(event, Stepped) and event.step % every == 0 and event.step < event.steps:
            emit(Previewed(event.step, previewer.preview(event.estimate, event.video), event.video))

    return listener
