"""Generate video with Wan from Hydra configs, on TPU, GPU or CPU.

    python run.py                                             # the embedded demo model, on whatever this machine has
    python run.py prompt="a blue star moving left" seed=7
    python run.py model=wan21_t2v_14b mesh=v6e_8 resolution=720p prompt="a cat on the grass"

This file is the command line: it composes the config, tries the task it names, and leaves with a status. The way of a
prompt from there, each word a place in wan_torchax/ (docs/architecture.md has the floors):

    compose → validate → resolve (checkpoints, devices) → build → compile beside loading → run the stages → write
    config/   config/    session.py                       stages/  runtime/               stages/          records/
"""
import gc
import os
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until `main` knows better: nothing has been done yet
    gc.set_threshold(100_000)  # what is imported stays: no need to look through it for garbage again and again

import contextlib
import sys
import threading
import traceback
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig

import wan_torchax
from wan_torchax import events
from wan_torchax.config import commandline, jobs
from wan_torchax.devices import distributed
from wan_torchax.tasks.attempt import attempt, explain, failures, report


class Terminated(KeyboardInterrupt):
    """SIGTERM: a scheduler wants this process to end."""


def interrupt(*_) -> None:
    events.interruptions.append(KeyboardInterrupt)
    raise KeyboardInterrupt


def terminate(*_) -> None:
    events.interruptions.append(Terminated)
    raise Terminated


def ignore(lost) -> None:
    """An interruption that was lost in a callback of Python's own is raised again at the next event."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)


def main() -> None:
    """Compose the config, run the task, leave with 0, 1 (an error), 130 (Ctrl-C) or 143 (SIGTERM)."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)
    sys.unraisablehook = ignore
    # ffmpeg and git are started with fork and exec at once, which is safe beside JAX's threads.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and `explain` says it better
    if {"--help", "-h"} & set(sys.argv):
        print(commandline.help_text())
        return
    status = 0
    try:
        sys.argv[1:] = commandline.rewrite(sys.argv[1:])
        job()
    except Exception as error:
        failures.append(str(error))
        print(f"error: {explain(error)}", file=sys.stderr)
        if "traceback=true" in sys.argv:
            traceback.print_exc()
        distributed.leave(f"failed: {explain(error)}")
        if type(error).__module__.startswith("submitit"):
            wait_for_workers()
    except KeyboardInterrupt as reason:
        word, status = ("terminated", 143) if isinstance(reason, Terminated) else ("interrupted", 130)
        print(f"{word}: finished stages are in the run folder; go on with resume=<run folder>", file=sys.stderr)
        distributed.leave(f"was {word}", status)
    write_reports()
    distributed.finish()
    leave(status or (1 if failures or failed_elsewhere() else 0))


def leave(status: int) -> None:
    """End, also where a thread is still importing what is not needed any more: Python would wait for it."""
    if any(thread.name == "imports" for thread in threading.enumerate()):
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


@hydra.main(version_base=commandline.HYDRA_VERSION, config_path="conf", config_name="config")
def job(config) -> float | None:
    """One Hydra job: one composed config. Returns a number to minimise: seconds a step, or of the whole."""
    wan_torchax.leave_sys_path()
    folder, overrides = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    jobs.check_launcher(HydraConfig.get().launcher, config.mesh)
    return attempt(commandline.with_names(config, HydraConfig.get().runtime.choices), folder, overrides)


def wait_for_workers() -> None:
    """Submitit gives up at the first worker that is lost; those on this machine go on, and belong into the report."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def write_reports() -> None:
    """A page for every sweep or list; a list inside a sweep is in the sweep's."""
    for folder in commandline.sweep_folders if distributed.is_first() else ():
        if not commandline.sweep_folders.keys() & set(folder.parents):
            report(folder)


def failed_elsewhere() -> bool:
    """Whether a job that a launcher ran in another process failed."""
    elsewhere = [folder for folder, launched in commandline.sweep_folders.items() if launched]
    return any(next(folder.rglob("failure.json"), None) for folder in elsewhere)


if __name__ == "__main__":
    main()
