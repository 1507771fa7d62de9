"""Generate video from Hydra configs, on TPU, GPU or CPU.

    python run.py                                             # the embedded demo model, on whatever this machine has
    python run.py prompt="a blue star moving left" seed=7
    python run.py model=wan21_t2v_14b mesh=v6e_8 resolution=720p prompt="a cat on the grass"

`generate` below is the path from a prompt to a video, `main` the command line around it. The rest is in wan_torchax/,
in layers (docs/architecture.md).
"""
import gc
import signal

if __name__ == "__main__":  # until the handlers are there, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from wan_torchax import interruption

if __name__ == "__main__":
    interruption.install()
    gc.set_threshold(100_000)  # imported modules are never garbage: scan them less often

import contextlib
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig

import wan_torchax
from wan_torchax import private
from wan_torchax.config import commandline, jobs
from wan_torchax.devices import distributed
from wan_torchax.events import Background, silence
from wan_torchax.tasks.attempt import attempt, explain, failures, report


def generate(config, folder: Path, overrides=(), listener=silence, clock=None, claims=True) -> float:
    """From a composed and validated config to a video. Returns the median seconds per step.

    Results of finished stages stay in the folder however the run ends; `listener` receives all events.
    """
    from wan_torchax.runtime.jobs import find_job
    from wan_torchax.session import session
    from wan_torchax.tasks.generate import Making, keeps_frames, read_results

    with Making(config, folder, overrides, listener, clock, claims) as video:
        job = find_job(video.config)  # checkpoints, adapters, images: each located and hashed once
        at_hand = read_results(job, folder if video.is_alike else None)  # results of an earlier run
        resolved = session.resolve(job, at_hand.missing, video.emit)  # downloads weights, starts devices
        video.begin(resolved, at_hand)
        values = resolved.inputs() | at_hand.values
        # Builds the stages: programs and array specs. From here on programs compile in a thread …
        with session.open(resolved, at_hand.missing, values, video.emit, at_hand, keeps_frames(config)) as work:
            for step in work.steps:
                work.run(step)  # … while weights stream in and stages run: text, denoise, decode
        return video.write(work.result)  # video (encoded during decoding), images, metrics


# ---------------------------------------------------------------- the command line


def main() -> None:
    """Compose the config, run the task, exit with 0, 1 (an error), 130 (Ctrl-C) or 143 (SIGTERM)."""
    # ffmpeg and git are started with fork and immediate exec, which is safe with JAX's threads.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and `explain` formats the error
    if {"--help", "-h"} & set(sys.argv):
        print(commandline.help_text())
        return
    try:
        run_jobs()
        write_reports()
        distributed.finish()
        leave(1 if failures or failed_elsewhere() else 0)
    except interruption.Interrupted as reason:
        advice = "finished stages are in the run folder; go on with resume=<run folder>"
        print(f"{reason.word}: {advice}", file=sys.stderr)
        distributed.leave(f"was {reason.word}", reason.status)
        write_reports()
        leave(reason.status)


def run_jobs() -> None:
    """One job, or those of a sweep; reports errors that no job has reported itself."""
    interruption.check()
    try:
        sys.argv[1:] = commandline.rewrite(sys.argv[1:])
        if any("model.path" in argument for argument in sys.argv):  # a single file chooses its model
            from wan_torchax.runtime.recognition import with_models

            sys.argv[1:] = with_models(sys.argv[1:])
        with private.quick_hydra():
            job()
    except Exception as error:
        interruption.check()  # Ctrl-C also reaches a launcher's processes
        failures.append(str(error))
        print(f"error: {explain(error)}", file=sys.stderr)
        if "traceback=true" in sys.argv:
            traceback.print_exc()
        distributed.leave(f"failed: {explain(error)}")
        if type(error).__module__.startswith("submitit"):
            wait_for_workers()


@hydra.main(version_base=commandline.HYDRA_VERSION, config_path="conf", config_name="config")
def job(config) -> float | None:
    """One Hydra job. Returns a value for optimizers to minimize: seconds per step, or in total."""
    wan_torchax.leave_sys_path()
    folder, overrides = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    jobs.check_launcher(HydraConfig.get().launcher, config.mesh)
    return attempt(commandline.with_names(config, HydraConfig.get().runtime.choices), folder, overrides)


def leave(status: int) -> None:
    """Exit without waiting for background threads, which Python would join."""
    if interruption.asked or any(isinstance(thread, Background) for thread in threading.enumerate()):
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def wait_for_workers() -> None:
    """Submitit gives up when the first worker is lost; wait for the others on this machine, for the report."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, os.WNOHANG)
            interruption.check()
            time.sleep(interruption.LOOK_SECONDS)


def write_reports() -> None:
    """A report for every sweep or list; a list inside a sweep is part of the sweep's."""
    for folder in commandline.sweep_folders if distributed.is_first() else ():
        if not commandline.sweep_folders.keys() & set(folder.parents):
            report(folder)


def failed_elsewhere() -> bool:
    """Whether a job in another process of a launcher failed."""
    elsewhere = [folder for folder, launched in commandline.sweep_folders.items() if launched]
    return any(next(folder.rglob("failure.json"), None) for folder in elsewhere)


if __name__ == "__main__":
    main()
