"""task=generate: a prompt in; a video, results of stages and metrics out."""
import contextlib
import logging
import os
import sys
from pathlib import Path

from wan_torchax.config import inputs
from wan_torchax.config.resolve import Job, Resolved
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices import distributed
from wan_torchax.devices.mesh import describe
from wan_torchax.events import Decoded, Event, Finished, Listener, Previewed, silence, to_all
from wan_torchax.records import outputs, results
from wan_torchax.records.clock import Clock
from wan_torchax.records.files import claimed
from wan_torchax.records.stored import compare_replay
from wan_torchax.runtime import adapters
from wan_torchax.runtime.jobs import find_job
from wan_torchax.session import phase, session
from wan_torchax.stages.stage import find, result_settings
from wan_torchax.tasks.progress import Bars, Progress

log = logging.getLogger("wan")


def generate(config, folder: Path, overrides=(), listener: Listener = silence) -> float:
    """The stages of the pipeline that the config names. Returns the median seconds of a step, or of the whole."""
    with claimed(folder) if distributed.is_first() else contextlib.nullcontext():
        return generate_into(config, folder, overrides, listener)


def generate_into(config, folder: Path, overrides, listener: Listener, clock: Clock | None = None) -> float:
    """With a `clock` of what was made of it before."""
    clock, config = clock or Clock(), inputs.with_texts(config)
    settled, first = outputs.settle(config), distributed.is_first()  # the process that writes
    if first:
        outputs.write_config(folder, settled, overrides)
        if config.output.copy_inputs:
            outputs.copy_pictures(folder, config)
    job = find_job(config)
    values, segments = read_results(job)
    names = to_run(job, values, segments)
    distributed.agree("stages", {"inputs": settled["prompt"], "stages to run": names, "weights": fingerprints(job)})

    video = outputs.open_video(folder, settled)

    def encode(event: Event) -> None:
        if isinstance(event, Decoded):
            video.add(event.frames)

    tell = to_all(clock, Bars(), Progress(folder), encode, listener) if first else clock
    resolved = session.resolve(job, names, tell)
    log.info("%s on %s", config.model.name, describe(resolved.mesh))
    if first:
        tell = to_all(saver(resolved, folder), tell)
        save_read(resolved, values, segments, tell)
    with contextlib.closing(video):
        with profiled(folder / "profile") if config.profile else contextlib.nullcontext():
            values = session.run(resolved, names, resolved.inputs() | values, tell, segments)
        if first:
            metrics = outputs.metrics(settled, fingerprints(resolved), resolved.mesh, overrides)
            metrics["adapters"] = adapters.described(config)
            for name in resolved.graph.stages:
                metrics |= find(name).report(resolved)
            with phase("write", tell):
                made = outputs.write_outputs(folder, settled, values, metrics, video)
    if first:
        outputs.write_metrics(folder, metrics | clock.report() | outputs.described(settled, overrides))
        if made != folder and not config.output.keep_frames:  # there was a need for them until the video was written
            for path in stage_files(folder, resolved, resolved.graph.giver("frames")):
                path.unlink(missing_ok=True)
        compare_replay(config, metrics)
        show(made)
    return clock.median_step() or clock.report()["seconds"]["total"]


def fingerprints(job: Job) -> dict[str, str]:
    """What a job is made from, by content: weights by component, pictures and videos by their key."""
    return {name: checkpoint.fingerprint for name, checkpoint in job.checkpoints.items()} | dict(job.contents)


def saver(resolved: Resolved, folder: Path) -> Listener:
    """A listener that keeps results of stages, with what they were made from, and previews."""
    parts = {part.segment: part for part in resolved.segments()}

    def save(event: Event) -> None:
        if isinstance(event, Finished) and resolved.config.output.save_stages:
            part = resolved if event.segment is None else parts[event.segment]
            path = results.path_of(folder, event.stage, event.segment)
            results.save(path, event.values, result_settings(part, event.stage))
        elif isinstance(event, Previewed):
            outputs.write_preview(folder, event.frame)

    return save


def save_read(resolved: Resolved, values: dict, segments: dict[int, dict], tell: Listener) -> None:
    """Tell of what was read, so that this run can be resumed too."""
    for number, known in {None: values, **segments}.items():
        for name, stage in resolved.graph.stages.items():
            read = {value: known[value] for value in stage.gives if value in known}
            if read:
                tell(Finished(name, read, number))


def stage_files(folder: Path, job: Job, name: str) -> list[Path]:
    """Where a stage's results are: one file, or one for each segment."""
    parts = job.segments()
    if name not in job.graph.repeated or len(parts) == 1:
        return [results.path_of(folder, name)]
    return [results.path_of(folder, name, part.segment) for part in parts]


def read_results(job: Job) -> tuple[dict, dict[int, dict]]:
    """The values in the folder named by `resume`, of the video and of its segments; refused where they were made with
    other settings than these."""
    values, segments, folder = {}, {}, job.config.resume and Path(job.config.resume)
    for name in job.graph.stages if folder else ():
        several = name in job.graph.repeated and len(job.segments()) > 1
        for part, path in zip(job.segments() if several else [job], stage_files(folder, job, name)):
            if path.is_file():
                read, made_with = results.read(path, find(name).result_shapes(name, part))
                results.compare(path, made_with, result_settings(part, name))
                log.info("%s: taken from %s", name, path)
                (segments.setdefault(part.segment, {}) if several else values).update(read)
    missing = job.graph.missing(to_run(job, values, segments), values)
    if folder and missing:
        (name, value), *_ = missing
        giver = job.graph.giver(value)
        raise ConfigError(
            f"resume={folder}: {name} takes {value}, and {results.path_of(folder, giver).name} is not there; "
            f"add {giver} to stages"
        )
    return values, segments


def to_run(job: Job, values: dict, segments: dict[int, dict]) -> list[str]:
    """The stages asked for whose values are not all there yet."""
    parts = job.segments()

    def is_done(name: str) -> bool:
        gives = set(job.graph.stages[name].gives)
        if name in job.graph.repeated and len(parts) > 1:
            return all(gives <= segments.get(part.segment, {}).keys() for part in parts)
        return gives <= values.keys()

    return [name for name in job.config.stages if not is_done(name)]


def finished_before(config, folder: Path) -> float | None:
    """What this job gave in an earlier try at a sweep."""
    config = inputs.with_texts(config)
    return outputs.finished_before(outputs.settle(config), fingerprints(find_job(config)), folder)


def show(made: Path) -> None:
    """The last line of a run. Nobody may be reading any more, and the run is finished all the same."""
    try:
        print(made, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def profiled(folder: Path):
    """A JAX trace of what runs inside, for Perfetto and xprof."""
    import jax

    return jax.profiler.trace(str(folder), create_perfetto_trace=True)
