"""What run.py needs beside the Session to make a video: results of an earlier run, and a run's outputs."""
import contextlib
import functools
import itertools
import logging
import math
import os
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from omegaconf import OmegaConf

from wan_torchax.config import inputs, live, trust
from wan_torchax.config.commandline import key_of, literal
from wan_torchax.config.resolve import Job, Resolved
from wan_torchax.config.schema import ConfigError, copied
from wan_torchax.devices import distributed
from wan_torchax.devices.mesh import describe
from wan_torchax.events import Asked, Decoded, Event, Finished, Listener, Part, Previewed, silence, to_all
from wan_torchax.records import files, outputs, results
from wan_torchax.records.clock import Clock
from wan_torchax.records.files import claimed
from wan_torchax.records.media import Pictures
from wan_torchax.records.stored import compare_replay, is_alike
from wan_torchax.runtime import adapters
from wan_torchax.runtime.jobs import find_job
from wan_torchax.stages.stage import find, result_settings
from wan_torchax.tasks.progress import Bars, Progress
from wan_torchax.work import AtHand, phase

log = logging.getLogger("wan")


class Making:
    """A video in progress: its folder, its listeners, and the encoder that receives frames as they are decoded.

    Only the first of several processes writes. `claims`: whether to claim the folder; a server already has.
    """

    def __init__(
        self, config, folder: Path, overrides=(), listener: Listener = silence, clock: Clock | None = None,
        claims: bool = True,
    ):
        self.config, self.folder, self.overrides = inputs.with_texts(config), folder, list(overrides)
        self.clock, self.claims, self.first = clock or Clock(), claims, distributed.is_first()
        self.settled = outputs.settle(self.config)
        self.is_alike = is_alike(self.config, folder)  # asked before its config.yaml is replaced
        self.video, self.pictures = outputs.open_video(folder, self.config), Pictures(config.resolution.frames)
        self.emit = self.clock
        if self.first:
            self.emit = to_all(self.clock, Bars(), Progress(folder), self.encode, listener)

    def __enter__(self) -> "Making":
        with contextlib.ExitStack() as stack:
            if self.first and self.claims:
                stack.enter_context(claimed(self.folder))
            if self.first:
                files.remove_partial(self.folder)
            stack.enter_context(contextlib.closing(self.video))
            if self.first:
                outputs.write_config(self.folder, self.settled, self.overrides)
                if self.config.output.copy_inputs:
                    outputs.copy_pictures(self.folder, self.config)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self.stack.__exit__(*error)

    def encode(self, event: Event) -> None:
        if isinstance(event, Decoded):
            self.video.add(event.frames)
            self.pictures.add(event.frames)

    def begin(self, resolved: Resolved, at_hand: AtHand) -> None:
        """Save results from here on, also those read from an earlier run: this run can be resumed too."""
        log.info("%s on %s", self.config.model.name, describe(resolved.mesh))
        if self.config.profile:
            self.stack.enter_context(profiled(self.folder / "profile"))
        self.resolved = resolved
        if self.first:
            self.emit = to_all(saver(lambda: self.resolved, self.folder), self.emit, self.note)
            for number, known in {None: at_hand.values, **at_hand.segments}.items():
                for name, stage in resolved.graph.stages.items():
                    if read := {value: known[value] for value in stage.gives if value in known}:
                        self.emit(Finished(name, read, number))

    def note(self, event: Event) -> None:
        """Prompts that are given while the video is made are part of its configuration, for resume and replay."""
        if isinstance(event, Asked) and event.prompts:
            rows = [*self.resolved.config.live.prompts, live.later_prompt(event.second, event.prompts[-1])]
            rows.sort(key=lambda row: live.later_prompts([row])[0][0])
            self.settled["live"]["prompts"] = rows
            kept = [text for text in self.overrides if key_of(text) != "live.prompts"]
            self.overrides = [*kept, trust.override("live.prompts", rows)]
            self.resolved = with_prompts(self.resolved, rows)
            outputs.write_config(self.folder, self.settled, self.overrides)
            results.path_of(self.folder, self.resolved.graph.giver("embeddings")).unlink(missing_ok=True)

    def write(self, values: dict[str, Any]) -> float:
        """Video, pictures and metrics. Returns the median seconds of a step, or of the whole."""
        if self.first:
            metrics = outputs.metrics(self.settled, fingerprints(self.resolved), self.resolved.mesh, self.overrides)
            metrics["adapters"] = adapters.described(self.config)
            for name in self.resolved.graph.stages:
                metrics |= find(name).report(self.resolved)
            with phase("write", self.emit):
                if "frames" in values:  # those read from an earlier run emitted no events
                    self.encode(Decoded(values["frames"][self.video.frames :]))
                made = outputs.write_outputs(self.folder, self.settled, metrics, self.video, self.pictures)
            described = outputs.described(self.settled, self.overrides)
            outputs.write_metrics(self.folder, metrics | self.clock.report() | described)
            if made != self.folder and not self.config.output.keep_frames:  # not needed once the video is written
                for path in stage_files(self.folder, self.resolved, self.resolved.graph.giver("frames")):
                    path.unlink(missing_ok=True)
            compare_replay(self.config, metrics)
            show(made)
        return self.clock.median_step() or self.clock.report()["seconds"]["total"]


def fingerprints(job: Job) -> dict[str, str]:
    """Content hashes of a job's inputs: weights by component, pictures and videos by their key."""
    used = job.graph.components(job.graph.stages)
    return {name: job.checkpoints[name].fingerprint for name in used if name in job.checkpoints} | dict(job.contents)


def saver(job: Callable[[], Resolved], folder: Path) -> Listener:
    """A listener that saves previews, and stages' results with the settings they depend on: those of the job as it is
    then."""

    @functools.cache  # parts follow each other quickly
    def settings(stage: str, prompts: tuple[str, ...]) -> dict:
        return result_settings(job(), stage)

    def save(event: Event) -> None:
        if isinstance(event, Previewed):
            outputs.write_preview(folder, event.frames, job().config.resolution.fps)
        elif isinstance(event, Finished) and is_saved(event, job().config):
            save_result(folder, job(), event)
        elif isinstance(event, Part) and job().config.output.save_stages:
            known = settings(event.stage, tuple(job().config.live.prompts))
            known = find(event.stage).part_settings(event.stage, job(), event.number, known)
            results.save(results.path_of(folder, event.stage, event.number), event.values, known)

    return save


def keeps_frames(config) -> bool:
    """Whether frames are kept besides the video. A live video, however long it grows, has its latents in its chunks'
    files; frames that are too many for memory, in all segments, would fill the disk: both are decoded again."""
    size = config.resolution
    few = 3 * size.frames * size.height * size.width <= files.IN_MEMORY
    return config.output.keep_frames or (few and not live.is_on(config))


def is_saved(event: Finished, config) -> bool:
    """Whether a result goes to a file. One is empty if it was emitted as it was made, and not kept."""
    kept = keeps_frames(config) or "frames" not in event.values
    return config.output.save_stages and kept and bool(event.values)


def save_result(folder: Path, resolved: Resolved, event: Finished) -> None:
    """Save a stage's result with the settings it depends on."""
    segments = {part.segment: part for part in resolved.segments()}
    job = resolved if event.segment is None else segments[event.segment]
    path = results.path_of(folder, event.stage, event.segment)
    results.save(path, event.values, result_settings(job, event.stage))
    for path in part_files(folder, resolved, event.stage):  # the whole result has them
        path.unlink()


def with_prompts(resolved: Resolved, rows: list[str]) -> Resolved:
    """A live video's job with other prompts behind the first."""
    config = copied(resolved.config)
    OmegaConf.set_readonly(config, False)
    config.live.prompts = [literal(row) for row in rows]
    OmegaConf.set_readonly(config, True)
    return replace(resolved, config=config)


def stage_files(folder: Path, job: Job, name: str) -> list[Path]:
    """The files of a stage's results: one, or one per segment."""
    if name not in job.graph.repeated or not job.is_segmented:
        return [results.path_of(folder, name)]
    return [results.path_of(folder, name, part.segment) for part in job.segments()]


def part_files(folder: Path, job: Job, name: str) -> list[Path]:
    """The files of an unfinished stage's finished parts, in order."""
    numbers = itertools.takewhile(lambda number: find(name).part_shapes(name, job, number), itertools.count())
    return list(itertools.takewhile(Path.is_file, (results.path_of(folder, name, number) for number in numbers)))


def read_parts(folder: Path, job: Job, name: str) -> list[Mapping[str, Any]]:
    """The parts of a stage's result that were finished. Raises if they were made with other settings."""
    parts: list[Mapping[str, Any]] = []
    for number, path in enumerate(part_files(folder, job, name)):
        shapes = find(name).part_shapes(name, job, number) or {}
        settings = find(name).part_settings(name, job, number, result_settings(job, name))
        results.compare(path, results.read(path, shapes)[1], settings)
        parts.append(results.Stored(path, shapes))
    if parts:
        log.info("%s: its first %d parts are taken from %s", name, len(parts), folder)
    return parts


def joined_parts(parts: list[Mapping[str, Any]], job: Job, name: str) -> dict[str, numpy.ndarray]:
    """The result of a stage whose parts are all there, if it is not too large for memory."""
    is_whole = bool(parts) and find(name).part_shapes(name, job, len(parts)) is None
    if not is_whole or 4 * math.prod(job.latent_shape) > files.IN_MEMORY:
        return {}
    return find(name).joined_parts(parts)


def read_results(job: Job, own: Path | None) -> AtHand:
    """The values in the folder named by `resume`, or with sweep.resume those in the job's own; nothing else."""
    if job.config.sweep.resume and job.config.resume is None:
        at_hand = read_left(job, own)
    else:
        at_hand = read_from(job, job.config.resume and Path(job.config.resume))
    weights = fingerprints(job)
    texts = {key: job.config.prompt[key] for key in ("text", "negative")}
    distributed.agree("stages", {"inputs": texts, "stages to run": at_hand.missing, "weights": weights})
    return at_hand


def read_left(job: Job, folder: Path | None) -> AtHand:
    """What a job of a sweep left in its folder when it was interrupted; nothing if it is damaged, or if not every
    process sees the same."""
    try:
        at_hand = read_from(job, folder)
    except ConfigError:
        log.info("%s: what is there is damaged, or of other weights: made again", folder)
        at_hand = read_from(job, None)
    parts = {name: len(several) for name, several in at_hand.finished.items()}
    segments = [[str(number), *values] for number, values in at_hand.segments.items()]
    seen = distributed.gather("left", [at_hand.missing, parts, segments])
    return at_hand if all(one == seen[0] for one in seen) else read_from(job, None)


def read_from(job: Job, folder: Path | None) -> AtHand:
    """The values in a folder, of the video and of its segments. Raises if they were made with other settings."""
    at_hand, parts = AtHand(), job.segments()
    for name in job.graph.stages if folder else ():
        several = name in job.graph.repeated and job.is_segmented
        for part, path in zip(parts if several else [job], stage_files(folder, job, name)):
            if path.is_file():
                shapes = find(name).result_shapes(name, part)
                read, made_with = results.read(path, shapes)
                results.compare(path, made_with, result_settings(part, name))
                log.info("%s: taken from %s", name, path)
                if several:
                    at_hand.segments.setdefault(part.segment, ChainMap()).maps.append(results.Stored(path, shapes))
                else:
                    at_hand.values.update(read)
        at_hand.finished[name] = read_parts(folder, job, name)
        at_hand.values.update(joined_parts(at_hand.finished[name], job, name))
    at_hand.missing = [name for name in job.config.stages if not is_there(name, job, at_hand)]
    complete = (stage.gives for name, stage in job.graph.stages.items() if is_there(name, job, at_hand))
    absent = job.graph.missing(at_hand.missing, {*at_hand.values, *itertools.chain(*complete)})
    if folder and absent:
        (name, value), *_ = absent
        giver = job.graph.giver(value)
        raise ConfigError(
            f"resume={folder}: {name} takes {value}, and {results.path_of(folder, giver).name} is not there; "
            f"add {giver} to stages"
        )
    giver = job.graph.giver("frames")
    if job.is_segmented and giver in job.config.stages and giver not in at_hand.missing:
        at_hand.missing.append(giver)  # nothing is left to compute, but its steps join the segments' frames
    return at_hand


def is_there(name: str, job: Job, at_hand: AtHand) -> bool:
    """Whether everything that a stage gives was read."""
    gives = set(job.graph.stages[name].gives)
    if name in job.graph.repeated and job.is_segmented:
        return all(gives <= at_hand.segments.get(part.segment, {}).keys() for part in job.segments())
    return gives <= at_hand.values.keys()


def finished_before(config, folder: Path) -> float | None:
    """The value that this job returned in an earlier run of the sweep; None if it did not finish."""
    config = inputs.with_texts(config)
    return outputs.finished_before(outputs.settle(config), fingerprints(find_job(config)), folder)


def show(made: Path) -> None:
    """Print the last line of a run. A closed pipe is not an error: the run is finished."""
    try:
        print(made, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def profiled(folder: Path):
    """A context that records a JAX trace for Perfetto and xprof."""
    import jax

    return jax.profiler.trace(str(folder), create_perfetto_trace=True)
