"""Many videos over many workers: Hydra's launchers and shard=, each video made once, lost work taken up again."""
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from tests import tiny
from tests.conftest import ROOT, SMALL, listed
from tests.fork import warm
from wan_torchax.config import jobs
from wan_torchax.config.schema import ConfigError

PROMPTS = json.dumps(["a red circle", "a blue square", "a green star", "a yellow ring"])


def start(*arguments):
    only = ["steps=2", "stages=[text,denoise]", f"prompts={PROMPTS}"]
    return warm().start([*SMALL, *tiny.model(), *only, *arguments])


def done(folder) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.rglob("metrics.json")}


def workers(folder) -> list[int]:
    """Processes that submitit has started for a sweep's jobs."""
    listed = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode()
        except OSError:  # it has ended
            continue
        if "submitit.core._submit" in command and str(folder) in command:
            listed.append(int(path.parent.name))
    return listed


@pytest.mark.system
def test_a_lost_worker_loses_its_running_job_and_a_restart_makes_it(tmp_path):
    """Two workers of submitit's local launcher, one of them killed while it makes a video."""
    sweep = ["shard=1/2,2/2", "steps=60", "sweep.resume=true", f"hydra.sweep.dir={tmp_path}"]
    command = ["-m", "hydra/launcher=workers", *sweep]
    process = start(*command)
    while not done(tmp_path):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(workers(tmp_path)[0], signal.SIGKILL)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1 and "has not produced any output" in output and "Traceback" not in output, output
    before = done(tmp_path)
    assert 2 <= len(before) < 4, "the other worker's two, and what this one had finished"
    assert f"{tmp_path / 'report.html'}" in output
    process = start(*command)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    after = done(tmp_path)
    assert len(after) == 4 and all(after[name] == time for name, time in before.items())
    assert rows(tmp_path) == {"done": 4}


def rows(folder) -> dict[str, int]:
    with (folder / "results.csv").open() as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    return {status: statuses.count(status) for status in statuses}


@pytest.mark.system
def test_shards_in_one_folder_are_one_list_and_one_report(tmp_path):
    """Two machines that know nothing of each other but the folder."""
    processes = [start(f"shard={part}/2", f"hydra.run.dir={tmp_path}") for part in (1, 2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert set(done(tmp_path)) == {folder.name for folder in listed(tmp_path)}
    assert rows(tmp_path) == {"done": 4}, "whoever ends last reports on all"
    made = [line for output in outputs for line in output.splitlines() if line in map(str, listed(tmp_path))]
    assert len(made) == len(set(made)) == 4, "each video once"


# ---------------------------------------------------------------- one job, one host


def launcher(name, *overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", [f"hydra/launcher={name}", *overrides], return_hydra_config=True).hydra.launcher


TPU = SimpleNamespace(platform="tpu", axes={"tp": 8})


def test_a_launcher_that_would_put_two_jobs_on_one_tpu_is_refused():
    refusal = "LocalLauncher may start two jobs on one host, and its tpu takes one process; leave hydra/launcher out"
    with pytest.raises(ConfigError, match=refusal):
        jobs.check_launcher(launcher("workers"), TPU)
    with pytest.raises(ConfigError, match="SlurmLauncher may .* use hydra/launcher=slurm, which asks for whole nodes"):
        jobs.check_launcher(launcher("submitit_slurm"), TPU)
    with pytest.raises(ConfigError, match="SlurmLauncher may"):
        jobs.check_launcher(launcher("slurm", "hydra.launcher.tasks_per_node=2"), TPU)
    remote = SimpleNamespace(remote={"resources": {"TPU": 4}})
    ray = SimpleNamespace(_target_="hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher", ray=remote)
    with pytest.raises(ConfigError, match=r"RayLauncher may .* set hydra.launcher.ray.remote.resources=\{TPU:8\}"):
        jobs.check_launcher(ray, TPU)


def test_launchers_that_give_a_job_its_host_are_taken():
    jobs.check_launcher(launcher("basic"), TPU)
    jobs.check_launcher(launcher("slurm"), TPU)
    jobs.check_launcher(launcher("workers"), SimpleNamespace(platform="cpu", axes={"tp": 1}))
    remote = SimpleNamespace(remote={"resources": {"TPU": 8}})
    jobs.check_launcher(SimpleNamespace(_target_="x.RayLauncher", ray=remote), TPU)


@pytest.mark.system
def test_a_refusal_reaches_the_user(tmp_path):
    sweep = ["-m", "hydra/launcher=workers", "mesh=v6e_8", "seed=1,2", f"hydra.sweep.dir={tmp_path}"]
    answer = subprocess.run([sys.executable, "run.py", *sweep], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "its tpu takes one process" in answer.stderr
