"""Ctrl-C and SIGTERM: the first ends a run in order wherever it comes, the second at once."""
import os
import signal
import time
from random import Random

import pytest

from tests.conftest import generate_into, make_config
from tests.fork import warm
from tests.serving import wait_for
from wan_torchax import interruption
from wan_torchax.events import Advanced, Began, Finished, Stepped
from wan_torchax.interruption import Interrupted
from wan_torchax.records.files import claimed
from wan_torchax.tasks import attempt

STOPS = int(os.environ.get("STOPS", 5))


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    """Nobody has asked this process to end, and nobody has when a test is over."""
    monkeypatch.setattr(interruption, "asked", None)


# ---------------------------------------------------------------- the first, in order


MOMENTS = {  # when it comes, and the stages that were finished before
    "a tensor is loaded": (lambda event: event == Advanced("load_transformer", getattr(event, "count", 0)), ["text"]),
    "a step is done": (lambda event: isinstance(event, Stepped) and event.step == 2, ["text"]),
    "a stage ends": (lambda event: isinstance(event, Finished) and event.stage == "denoise", ["denoise", "text"]),
    "a latent frame is decoded": (lambda event: event == Advanced("decode", 1), ["denoise", "text"]),
    "the video is written": (lambda event: event == Began("write"), ["decode", "denoise", "text"]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_is_left_in_order(moment, tmp_path, two_layers):
    comes, finished = MOMENTS[moment]
    heard = []

    def listener(event):
        heard.append(event)
        if comes(event):
            interruption.remember(signal.SIGTERM, None)

    with pytest.raises(Interrupted) as stopped:
        generate_into(make_config(*two_layers, f"prompt={moment}"), tmp_path, listener=listener)
    assert stopped.value.status == 143 and stopped.value.word == "terminated"
    assert comes(heard[-1]), "nothing happens after it"
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == finished
    assert not list(tmp_path.glob("*.mp4")) and not list(tmp_path.glob(".*-*"))
    with claimed(tmp_path):
        pass


def ended_like_ffmpeg(*_):
    interruption.remember(signal.SIGINT, None)
    raise OSError("ffmpeg failed")


def test_what_a_library_makes_of_it_is_no_failure(tmp_path, monkeypatch):
    """Ctrl-C on a terminal ends ffmpeg too."""
    monkeypatch.setitem(attempt.registry.TASKS, "generate", "tests.test_interruption.ended_like_ffmpeg")
    with pytest.raises(Interrupted):
        attempt.attempt(make_config(), tmp_path, [])
    assert not (tmp_path / "failure.json").exists() and not attempt.failures


STUCK = """
import time
from wan_torchax.runtime.programs import Programs
Programs.compile = lambda *_: time.sleep(600)
run.main()
"""


@pytest.mark.system
def test_a_compiler_is_not_waited_for(tmp_path, two_layers):
    process = warm().start([*two_layers, f"hydra.run.dir={tmp_path}", "compile.store=null"], code=STUCK)
    progress = tmp_path / "progress.json"
    wait_for(lambda: progress.exists() and "compile_text" in progress.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, process.output
    assert "interrupted: finished stages are in the run folder" in process.stderr and "Traceback" not in process.stderr


AT_THE_SECOND = """
import itertools, os, signal
from wan_torchax.events import Began
from wan_torchax.tasks import generate

starts = itertools.count()

def listener(event):
    if event == Began("start") and next(starts):
        os.kill(os.getpid(), signal.SIGINT)

generate.Bars = lambda: listener
run.main()
"""


@pytest.mark.system
@pytest.mark.parametrize("jobs", ['prompts=["one","two","three"]', "-m seed=1,2,3"])
def test_the_jobs_before_are_kept_and_reported(jobs, tmp_path, two_layers):
    places = [f"hydra.run.dir={tmp_path}", f"hydra.sweep.dir={tmp_path}"]
    process = warm().start([*jobs.split(), *two_layers, "stages=[text]", *places], code=AT_THE_SECOND)
    assert process.wait(120) == 130, process.output
    assert len(list(tmp_path.glob("*/metrics.json"))) == 1 and (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob("*/failure.json")) and "Traceback" not in process.output


@pytest.mark.system
def test_a_signal_at_any_moment_ends_a_run(tmp_path, two_layers):
    """No lock stays held, which would have it wait for ever. STOPS=30 does it thirty times."""
    chance = Random(STOPS)
    for number in range(STOPS):
        process = warm().start([*two_layers, f"hydra.run.dir={tmp_path / str(number)}"])
        wait_for((process.folder / "1").exists)
        time.sleep(chance.uniform(0, 5))
        asked = chance.choice([signal.SIGINT, signal.SIGTERM])
        process.send_signal(asked)
        assert process.wait(60) in (0, 128 + asked), process.output
        assert "Traceback" not in process.output, process.output


# ---------------------------------------------------------------- the second, at once


NATIVE = """
import ctypes
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
print("waits", flush=True)
library.pthread_mutex_lock(mutex)  # for ever, and no signal has it return to Python
"""


@pytest.mark.parametrize("asked, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_what_hangs(asked, status):
    process = warm().start([], code=NATIVE)
    wait_for((process.folder / "1").exists) and wait_for(lambda: "waits" in process.stdout)
    process.send_signal(asked)
    wait_for(lambda: "interrupted: ends after the work in hand; once more ends at once\n" in process.stderr)
    assert process.poll() is None
    process.send_signal(asked)
    assert process.wait(60) == status


CHILD = """
import os, signal, time
from wan_torchax import interruption
os.kill(os.getpid(), signal.SIGTERM)
assert interruption.asked == signal.SIGTERM
child = os.fork()
if child == 0:
    assert interruption.asked is None
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
time.sleep(0.5)  # its signal is not our second
"""


def test_a_forked_child_has_its_own_signals():
    assert warm().start([], code=CHILD).wait(60) == 0
