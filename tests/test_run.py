"""What a run leaves, how it resumes, how it ends."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import imageio_ffmpeg
import numpy
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from tests import tiny
from tests.conftest import ROOT, SMALL, generate_into, make_config, resolve_here
from tests.fork import warm
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices import start
from wan_torchax.events import Advanced, Began, Ended, Stepped
from wan_torchax.records import media
from wan_torchax.records.files import claimed
from wan_torchax.session import session
from wan_torchax.tasks import attempt, progress


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run through the command line."""
    folder = tmp_path_factory.mktemp("finished")
    answer = command(folder, "prompt=a red circle, moving = right", "seed=7", "output.quality=4")
    assert answer.returncode == 0, answer.stderr
    return folder, answer


def arguments(folder, *overrides):
    return [*SMALL, *tiny.model(), f"hydra.run.dir={folder / 'run'}", *overrides]


def command(folder, *overrides):
    return warm().run(arguments(folder, *overrides))


def frames(folder):
    return load_file(folder / "decode.safetensors")["frames"]


def test_the_last_line_is_the_video(finished):
    folder, answer = finished
    assert answer.stdout.splitlines()[-1] == str(folder / "run" / "video.mp4")
    assert "Traceback" not in answer.stderr and "Warning" not in answer.stderr


def test_the_video_plays_and_knows_where_it_came_from(finished):
    folder = finished[0] / "run"
    reader = imageio_ffmpeg.read_frames(str(folder / "video.mp4"))
    facts = next(reader)
    played = numpy.stack([numpy.frombuffer(frame, numpy.uint8).reshape(64, 64, 3) for frame in reader])
    assert facts["codec"] == "h264" and facts["pix_fmt"].startswith("yuv420p") and facts["fps"] == 8
    assert played.shape == frames(folder).shape == (5, 64, 64, 3)
    light = [pixels @ numpy.array([0.2126, 0.7152, 0.0722]) for pixels in (played, frames(folder))]
    assert numpy.abs(light[0] - light[1]).mean() < 5  # of noise, whose colours suffer more
    metadata = media.read_metadata(folder / "video.mp4")
    assert metadata["prompt"] == "a red circle, moving = right" and metadata["seed"] == 7
    assert metadata["config_hash"] == json.loads((folder / "metrics.json").read_text())["config_hash"]
    assert metadata["config"]["resolution.frames"] == 5


def test_pictures_config_log_and_metrics(finished):
    folder = finished[0] / "run"
    assert Image.open(folder / "poster.png").size == (64, 64)
    assert Image.open(folder / "contact_sheet.png").size == (192, 128)
    assert "seed: 7" in (folder / "config.yaml").read_text()
    assert "compiled denoise.step" in (folder / "log.txt").read_text()
    metrics = json.loads((folder / "metrics.json").read_text())
    stages = {"load_text_encoder", "text", "load_transformer", "denoise", "load_vae", "decode"}
    assert stages | {"start", "build", "write", "total"} <= set(metrics["seconds"])
    assert len(metrics["step_seconds"]) == 3 and sum(metrics["step_seconds"]) <= metrics["seconds"]["denoise"]
    assert set(metrics["compile"]) == {"text.text_encoder", "denoise.step", "decode.first", "decode.later"}
    assert metrics["versions"]["torchax"] and metrics["device"] == "cpu"
    assert metrics["mesh"] == {"dp": 1, "sp": 1, "tp": 1}
    assert metrics["peak_host_gib"] > 0.1 and metrics["pipeline"] == "t2v"
    assert set(metrics["weights"]) == {"text_encoder", "transformer", "vae"}
    assert json.loads((folder / "command.json").read_text())["overrides"] == metrics["overrides"]


def test_metadata_of_another_file_is_none(tmp_path):
    assert media.read_metadata(tmp_path / "nothing.mp4") is None


TEXTS = ["a; b # c = d \\ e", "line\nbreak", "你好 \"quoted\" 'too' %d", "at the end\\", "a" * 45_000, "你好" * 10_000]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_any_text_survives_in_the_metadata(tmp_path, text):
    frames = numpy.zeros((2, 32, 32, 3), numpy.uint8)
    media.write_video(tmp_path / "v.mp4", frames, media.Encoding(8, 18), text, {"prompt": text})
    assert media.read_metadata(tmp_path / "v.mp4") == {"prompt": text}


def test_resume_goes_on_from_any_stage_bit_for_bit(finished, tmp_path):
    """The overrides come from that run; stages it has are read, the rest gives the same frames."""
    folder = finished[0] / "run"
    part = tmp_path / "part"
    part.mkdir()
    for name in ("config.yaml", "text.safetensors"):
        (part / name).write_bytes((folder / name).read_bytes())
    places = [f"hydra.run.dir={tmp_path / 'again'}", "output.keep_frames=true"]
    answer = warm().run([*tiny.model(), f"resume={part}", *places])
    assert answer.returncode == 0, answer.stderr
    assert "text: taken from" in answer.stderr and "loading text" not in answer.stderr
    assert numpy.array_equal(frames(tmp_path / "again"), frames(folder))
    compiled = json.loads((tmp_path / "again" / "metrics.json").read_text())["compile"]
    assert set(compiled) == {"denoise.step", "decode.first", "decode.later"}
    assert all(program["from_store"] for program in compiled.values()), "the second run compiles nothing"


def test_resume_refuses_other_settings(finished):
    folder = finished[0] / "run"
    settings = "prompt=a red circle, moving = right", "seed=8", f"resume={folder}", "stages=[decode]"
    config = make_config(*SMALL, *tiny.model(), *settings)
    message = r"denoise.safetensors was made with other settings(.|\n)*seed: 7 there, 8 now"
    with pytest.raises(ConfigError, match=message):
        generate_into(config, folder)


def test_resume_refuses_other_weights(generate, tmp_path):
    """A fine-tune of the same shape under the same name."""
    model = tmp_path / "model"
    tiny.copied("text", model)
    source = generate(f"model.path={model}", "stages=[text]")
    file = model / "text_encoder" / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file)
    message = r"text.safetensors was made with other settings; .*\n  - weights.text_encoder: '\w+' there, '\w+' now$"
    with pytest.raises(ConfigError, match=message):
        generate(f"model.path={model}", f"resume={source}", folder="again")


def test_resume_refuses_what_is_not_there_or_damaged(finished, tmp_path):
    config = make_config(*SMALL, *tiny.model(), "stages=[decode]", f"resume={tmp_path}")
    message = r"decode takes latents, and denoise.safetensors is not there; add denoise to stages"
    with pytest.raises(ConfigError, match=message):
        generate_into(config, tmp_path)
    good = (finished[0] / "run" / "denoise.safetensors").read_bytes()
    with safe_open(finished[0] / "run" / "denoise.safetensors", "numpy") as handle:
        about = {"settings": handle.metadata()["settings"]}
    damaged = {
        "Error while deserializing": good[: len(good) // 2],
        "its bytes are not those that were written": good[:-400] + bytes(400),
        "latents has the shape": save({"latents": numpy.zeros((1, 16, 2, 8, 9), "float32")}, about),
    }
    for message, content in damaged.items():
        (tmp_path / "denoise.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=f"not a stage result of this program .*{message}"):
            generate_into(config, tmp_path)


def test_an_error_is_one_paragraph_and_status_1(tmp_path):
    answer = command(tmp_path, "model.path=no/such/folder")
    assert answer.returncode == 1
    assert "error: model.path=no/such/folder: neither a local folder nor a repository on the Hub" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "Traceback" in command(tmp_path, "model.path=no/such/folder", "traceback=true").stderr


def test_a_mesh_that_is_not_here_is_told(monkeypatch):
    with pytest.raises(ConfigError, match="mesh=v6e_8: no tpu to be had here .*; use mesh=auto"):
        resolve_here("mesh=v6e_8")
    with pytest.raises(ConfigError, match="axes dp=2 x sp=1 x tp=8, and this machine has 8 devices"):
        resolve_here("mesh=cpu_8", "mesh.axes.tp=8", "resolution.width=256")


@pytest.fixture
def unstarted(monkeypatch):
    """As a process before its first job: no flags, and JAX not running."""
    monkeypatch.setattr(start, "flags_in_force", None)
    monkeypatch.setattr(start, "is_running", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--given")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)


def test_the_meshs_flags_come_before_the_users(unstarted):
    flags = ["mesh.xla_flags=[--first]", "compile.xla_flags=[--second]", "compile.libtpu_flags=[--third]"]
    start.set_flags(make_config(*flags))
    assert os.environ["XLA_FLAGS"] == "--given --first --second" and os.environ["LIBTPU_INIT_ARGS"] == "--third"


def test_flags_of_an_earlier_job_are_never_silently_in_force(unstarted, monkeypatch):
    start.set_flags(make_config("compile.xla_flags=[--first]"))
    start.set_flags(make_config("compile.xla_flags=[--first]"))
    for later, asked in (([], "no flags"), (["compile.xla_flags=[--second]"], "--second")):
        message = f"this job asks for {asked}, and JAX runs since an earlier one with --first"
        with pytest.raises(ConfigError, match=message):
            start.set_flags(make_config(*later))
    monkeypatch.setattr(start, "flags_in_force", None)
    monkeypatch.setattr(start, "is_running", lambda: True)  # started by somebody else in this process
    with pytest.raises(ConfigError, match="with no flags; give each set of flags a process of its own"):
        start.set_flags(make_config("compile.xla_flags=[--first]"))


def test_a_schedulers_stop_leaves_finished_stages_and_status_143(finished, tmp_path):
    process = warm().start(arguments(tmp_path, "steps=900"))
    text = tmp_path / "run" / "text.safetensors"
    deadline = time.monotonic() + 120
    while not text.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143
    errors = process.stderr
    assert text.exists() and not (tmp_path / "run" / "video.mp4").exists()
    assert "terminated: finished stages are in the run folder; go on with resume=" in errors
    assert "Traceback" not in errors


@pytest.mark.system
def test_ctrl_c_at_any_moment_of_the_start_says_nothing_ugly(tmp_path):
    for seconds in (0.1, 0.15, 0.2, 0.3, 0.6, 1.0, 2.0):
        command = [sys.executable, f"{ROOT}/run.py", *arguments(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        if "Traceback" in errors:
            assert is_too_early(errors), errors
        else:
            assert process.returncode in (130, -signal.SIGINT), errors


def is_too_early(errors: str) -> bool:
    """Whether Python itself was starting, or run.py imported the module that it needs first: nothing can be done about
    that, and Python may end with any status, or go on."""
    ours = re.findall(rf'File "{re.escape(str(ROOT))}/(?:run\.py|wan_torchax/.*)", line [1-9].*\n(.*)', errors)
    return all(line.strip() in ("import gc", "import signal") for line in ours)


def test_nobody_reading_the_output_is_no_failure(finished, tmp_path):
    answer = warm().run(arguments(tmp_path, "stages=[text]"), {"NOBODY_READS": "1"})
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "run" / "metrics.json").exists() and not (tmp_path / "run" / "failure.json").exists()


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(attempt, "failures", [])
    with claimed(tmp_path):
        assert attempt.attempt(make_config(*SMALL), tmp_path, []) is None
    assert "another run is writing into this folder; wait for it, or name another" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [".lock"], "the other's files are left alone"


def test_a_folder_used_again_does_not_look_finished(generate, monkeypatch):
    folder = generate("stages=[text]")
    assert (folder / "metrics.json").exists()
    monkeypatch.setattr(session, "open", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate_into(make_config(*SMALL, *tiny.model()), folder)
    assert not (folder / "metrics.json").exists()


@pytest.mark.system
def test_frames_are_kept_until_the_video_is_written(generate, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no encoder")

    finish = media.Encoder.finish
    monkeypatch.setattr(media.Encoder, "finish", fail)
    with pytest.raises(OSError, match="no encoder"):
        generate("output.keep_frames=false")
    folder = tmp_path / "run"
    assert (folder / "decode.safetensors").exists() and not list(folder.glob(".*.mp4"))
    monkeypatch.setattr(media.Encoder, "finish", finish)
    generate_into(make_config(*SMALL, *tiny.model(), "output.keep_frames=false", f"resume={folder}"), folder)
    assert (folder / "video.mp4").exists() and not (folder / "decode.safetensors").exists()


def test_a_video_says_its_colours_and_starts_with_its_index(tmp_path):
    """Red, green and blue come back, from a file that says how they are coded."""
    frames = numpy.zeros((6, 32, 48, 3), numpy.uint8)
    for channel in range(3):
        frames[..., 16 * channel : 16 * channel + 16, channel] = 230
    encoder = media.Encoder(tmp_path / "v.mp4", media.Encoding(8, 8))
    for chunk in (frames[:1], frames[1:5], frames[5:]):
        encoder.add(chunk)
    encoder.finish("colours", {})
    encoder.close()
    content = (tmp_path / "v.mp4").read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    told = subprocess.run([ffmpeg, "-i", str(tmp_path / "v.mp4")], capture_output=True, text=True).stderr
    assert "yuv420p(tv, bt709" in told and "8 fps" in told, told
    back = subprocess.run(
        [ffmpeg, "-v", "error", "-i", str(tmp_path / "v.mp4"), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        capture_output=True, check=True,
    ).stdout
    difference = numpy.frombuffer(back, numpy.uint8).reshape(frames.shape).astype(int) - frames
    inside = difference[:, 2:-2].reshape(6, 28, 3, 16, 3)[:, :, :, 4:-4]  # away from edges, where colour is subsampled
    assert abs(inside).mean() < 4
    assert list(tmp_path.iterdir()) == [tmp_path / "v.mp4"]


def test_a_failing_encoder_says_so_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="ffmpeg failed"):
        media.write_video(tmp_path / "v.mp4", numpy.zeros((2, 33, 33, 3), numpy.uint8), media.Encoding(8, 18), "", {})
    assert not list(tmp_path.iterdir())


def test_progress_without_a_terminal(tmp_path, caplog):
    """A line a phase and every tenth of the steps; progress.json says the same at any time."""
    listener, seen = progress.Progress(tmp_path), []
    with caplog.at_level("INFO", "wan"):
        for event in (Began("load_vae", 9, "B"), Advanced("load_vae", 9), Ended("load_vae", 2.0)):
            listener(event)
        listener(Began("denoise", 40, "step"))
        for step in range(1, 41):
            listener(Stepped(step, 40, 0.5, None))
            listener(Advanced("denoise", 1))
            seen.append(json.loads((tmp_path / "progress.json").read_text()))
        listener(Ended("denoise", 20.0))
    assert len(caplog.messages) == 2 + 10
    assert caplog.messages[:3] == ["loading vae", "denoise: 40 steps", "4 of 40 steps, 0.500 s each"]
    assert [state["done"] for state in seen] == list(range(1, 41)) and seen[7]["phase"] == "denoise"
    assert seen[7]["total"] == 40


@pytest.mark.system
def test_a_profile_is_a_trace_in_the_run_folder(generate):
    folder = generate("profile=true", "stages=[text]")
    assert list((folder / "profile").rglob("perfetto_trace.json.gz"))
