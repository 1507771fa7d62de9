"""Runs jobs one after the other: a job that fails is logged and recorded, and the others still run."""
import errno
import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from wan_torchax import interruption
from wan_torchax.config import clips, commandline, inputs, jobs, registry, trust, validation
from wan_torchax.config.commandline import compose, sweep_folders
from wan_torchax.config.schema import ConfigError, FolderError
from wan_torchax.devices import distributed

if TYPE_CHECKING:  # not at run time: --help must be fast
    from wan_torchax.records.clock import Clock

log = logging.getLogger("wan")
LIST_KEYS = ("prompts", "seeds", "images", "shard")
failures: list[str] = []  # one line for each job of this process that failed


def attempt(config, folder: Path, overrides: list[str], **more) -> float | None:
    """Run a config's task (`more` is for it), or every job of a list. An error is recorded and does not stop later
    jobs."""
    from wan_torchax.records.stored import composed_from, take_over

    interruption.check()
    try:
        distributed.join(config)
        distributed.begin()
        inputs.check_texts(overrides)
        config = take_over(config, overrides)
        distributed.compare(config)
        if jobs.are_listed(config):
            return attempt_list(config, folder, overrides)
        overrides = composed_from(config, overrides)
        if needs_ffmpeg(config):
            clips.ffmpeg()
        validation.validate(config)
        if config.sweep.resume and (before := distributed.from_first("done before", done_before(config, folder))):
            return before
        return registry.load(registry.TASKS, config.task)(config, folder, overrides, **more)
    except Exception as error:
        interruption.check()  # Ctrl-C also reaches ffmpeg; its error is then not a failure of the job
        fail(folder, overrides, explain(error), record=not isinstance(error, FolderError))
        if config.traceback:
            log.error(traceback.format_exc())
        distributed.regroup(explain(error))


def needs_ffmpeg(config) -> bool:
    """Whether the task reads or writes a video."""
    stages = [stage for name, stage in config.pipeline.stages.items() if name in config.stages]
    if config.task == "generate" and any("frames" in stage.gives for stage in stages):
        return True
    return config.task == "serve" or (config.video is not None and config.task != "plan")


def done_before(config, folder: Path) -> float | None:
    from wan_torchax.tasks.generate import finished_before

    return finished_before(config, folder)


def attempt_list(config, folder: Path, overrides: list[str]) -> float | None:
    """Every video of a list, each in its own folder; failures are reported with their line, and the others still
    run."""
    from wan_torchax.records.outputs import write_order
    from wan_torchax.tasks.progress import bar

    shared = [override for override in overrides if commandline.key_of(override) not in LIST_KEYS]
    everywhere = jobs.read(config)
    listed = jobs.share(everywhere, config.shard)
    distributed.agree("list", {"prompts": [job.overrides for job in listed]})
    if distributed.is_first():
        write_order(folder, [job.name for job in everywhere])
    sweep_folders[folder] = False
    together = config.task == "generate" and config.resume is config.replay is None
    seconds = []
    with bar(len(listed), "videos", unit="video", position=1) as progress:
        for group in jobs.groups(listed, config.images or 1):
            several = together and len(group) > 1 and group[0].error is None
            begun = denoise_group(group, folder, shared) if several else {}
            for job in group:
                seconds.append(attempt_one(job, folder / job.name, shared, begun.get(job.name)))
                progress.update(1)
    made = [value for value in seconds if value is not None]
    return sum(made) / len(made) if made else None


def denoise_group(group: list[jobs.Job], folder: Path, shared: list[str]) -> dict[str, "Clock"]:
    """Denoise several videos of a list as a batch: each one's folder is then that of a run which was interrupted behind
    its latents. Returns their clocks by name; if it fails none, and they are made one by one, which tells what is wrong
    with each."""
    from wan_torchax.events import silence
    from wan_torchax.records.clock import Clock
    from wan_torchax.records.outputs import settle, write_config
    from wan_torchax.tasks.together import Video, denoise_together

    videos: dict[str, Video] = {}
    try:
        for job in group:
            overrides, path = overrides_of(job, shared), folder / job.name
            config = inputs.with_texts(compose(overrides))
            validation.validate(config)
            path.mkdir(parents=True, exist_ok=True)
            if config.sweep.resume and distributed.from_first("done before", done_before(config, path)):
                continue
            write_config(path, settle(config), overrides)
            videos[job.name] = Video(config, path, silence, Clock())
        if len(videos) > 1:
            denoise_together(list(videos.values()))
        return {name: video.clock for name, video in videos.items()}
    except Exception as error:
        interruption.check()
        log.warning("%d videos are made one by one: %s", len(group), explain(error))
        return {}


def overrides_of(job: jobs.Job, shared: list[str]) -> list[str]:
    """A video's overrides on top of the command line's."""
    return [*inputs.without_files(shared, job.overrides), "sweep.active=true", *job.overrides]


def attempt_one(job: jobs.Job, folder: Path, shared: list[str], clock: "Clock | None") -> float | None:
    """One video of a list. With the clock of a batch it goes on in its folder, which has its preset."""
    folder.mkdir(parents=True, exist_ok=True)
    if job.error is not None:
        return fail(folder, job.overrides, f"{job.error}; skipped")
    more = {}
    if clock:
        shared = [text for text in shared if commandline.key_of(text) != "preset"]
        shared, more = [*shared, f"resume={trust.written(str(folder.resolve()))}"], {"clock": clock}
    overrides = overrides_of(job, shared)
    try:
        config = compose(overrides)
    except ConfigError as error:
        return fail(folder, overrides, f"{folder.name}: {error}; skipped")
    return attempt(config, folder, overrides, **more)


def fail(folder: Path, overrides: list[str], message: str, record: bool = True) -> None:
    """Log and record why a job failed, also for the exit status and the report."""
    from wan_torchax.records.outputs import write_failure

    failures.append(f"{folder}: {message}")
    log.error("error: %s", message)
    if record and distributed.is_first():
        write_failure(folder, overrides, message)


def explain(error: Exception) -> str:
    """The message for the user: our own errors unchanged, a full disk with its remedy, others with their type."""
    if isinstance(error, commandline.USER_ERRORS):
        return commandline.explain(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
        remedy = "free some space and go on with resume=<run folder>: finished stages are kept"
        return f"{error}: the disk is full; {remedy}"
    if isinstance(error, (ConfigError, OSError)) or type(error).__name__ == "NotFinite":
        return str(error)
    return f"{type(error).__name__}: {error} (traceback=true shows where)"


def report(folder: Path) -> None:
    """The page of a sweep, or one table for a sweep of plans. If this fails, the videos are still there."""
    try:
        if next(folder.glob("*/plan.json"), None):
            from wan_torchax.tasks.plan_page import compare as write
        else:
            from wan_torchax.records.report import write
        print(write(folder))
    except Exception as error:
        failures.append(f"{folder}: {error}")
        log.error("error: no report on %s: %s", folder, explain(error))
