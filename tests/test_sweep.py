"""Sweeps: nothing is made twice, failures stay alone, a killed sweep goes on, and any video can be made again."""
import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy
import pytest
from omegaconf import OmegaConf
from PIL import Image
from safetensors.numpy import load_file

from tests import tiny
from tests.conftest import ROOT, SMALL, generate_into, listed, make_config, metrics, run_into
from tests.fork import warm
from wan_torchax import run
from wan_torchax.config import inputs
from wan_torchax.config.commandline import compose, rewrite
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices import distributed
from wan_torchax.events import Stepped
from wan_torchax.records import media, outputs, report, results
from wan_torchax.records.stored import compare_replay, composed_from, read_stored, take_over
from wan_torchax.session import session
from wan_torchax.tasks import attempt, together

PROMPTS = ["a red circle, moving right", "a blue square"]
KILLS = int(os.environ.get("KILLS", 1))


def listing(folder):
    """Three seeds of two prompts."""
    model = [*SMALL, *tiny.model()]
    return [*model, f"prompts={json.dumps(PROMPTS)}", "seeds=3", "seed=1", f"hydra.run.dir={folder}"]


def done(folder):
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A list, made: its folder, and what was said."""
    folder = tmp_path_factory.mktemp("sweep")
    store = f"compile.store={tmp_path_factory.mktemp('store') / 'store'}"  # an empty one
    answer = warm().run([*listing(folder), store])
    assert answer.returncode == 0, answer.output
    return folder, answer.output


@pytest.fixture(scope="module")
def made(sweep):
    """One of its videos: the first."""
    return listed(sweep[0])[0]


@pytest.mark.system
def test_a_killed_sweep_goes_on_with_nothing_lost_or_doubled(sweep, tmp_path):
    """Killed in the middle and started again; KILLS=30 does that thirty times, at any moment."""
    random, arguments = Random(0), [*listing(tmp_path), "sweep.resume=true"]
    for number in range(KILLS):
        process = warm().start(arguments)
        deadline = time.monotonic() + (random.uniform(0, 25) if number else 200)
        while (number or len(done(tmp_path)) < 2) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    before = done(tmp_path)
    answer = warm().run(arguments)
    assert answer.returncode == 0, answer.output
    after = done(tmp_path)
    assert len(before) >= 2 and len(after) == 6
    assert all(after[name] == time for name, time in before.items()), "finished jobs are left alone"
    for name in after:
        assert numpy.array_equal(frames(tmp_path / name), frames(sweep[0] / name)), "as undisturbed"


@pytest.mark.system
def test_no_two_videos_of_a_sweep_are_the_same(sweep):
    assert len({frames(path).tobytes() for path in listed(sweep[0])}) == 6


@pytest.mark.system
def test_a_sweep_loads_and_compiles_once(sweep):
    first, *later = map(metrics, listed(sweep[0]))
    assert set(first["compile"]) == {"text.text_encoder", "denoise.step", "decode.first", "decode.later"}
    assert {"load_text_encoder", "load_transformer", "load_vae"} <= set(first["seconds"])
    for job in later:
        assert not job["compile"]
        assert not [name for name in job["seconds"] if name.startswith("load_")]
    assert ["text" in job["seconds"] for job in (first, *later)] == 2 * [True, False, False], "each prompt once"


@pytest.mark.system
def test_a_sweep_is_reported(sweep):
    folder, output = sweep
    assert str(folder / "report.html") in output.splitlines()
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == [path.name for path in listed(folder)], "in the order of the list"
    assert len(rows) == 6 and {row["seed"] for row in rows} == {"1", "2", "3"}
    assert len({row["prompt.text"] for row in rows}) == 2 and all(float(row["seconds_per_step"]) > 0 for row in rows)
    assert len((folder / "results.jsonl").read_text().splitlines()) == 6
    page = (folder / "report.html").read_text()
    assert page.count("<video") == page.count("data:video/mp4;base64,") == 6
    assert page.count("contact sheet") == 6 and page.count("python run.py replay=") == 6
    assert not [place for place in (folder.parent, ROOT, Path.home()) if f"{place}/" in page], "nothing of this machine"
    assert "http" not in page.replace("http-equiv", ""), "the page needs nothing from elsewhere"


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.system
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_report_opens_in_a_browser(sweep, tmp_path):
    """Rendered for real: the table's text is in the page, and every video has its size."""
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    picture = ["--window-size=1280,2000", f"--screenshot={tmp_path / 'page.png'}"]
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", *quiet, *picture]
    page = f"file://{sweep[0] / 'report.html'}"
    subprocess.run([CHROMIUM, *flags, page], capture_output=True, check=True, timeout=120)
    page = Image.open(tmp_path / "page.png").convert("RGB")
    colours = {colour for _, colour in page.getcolors(2**24)}
    assert page.size == (1280, 2000)
    assert {tuple(bytes.fromhex(colour[1:])) for colour in report.STAGE_COLOURS[:3]} <= colours, "bars are drawn"
    assert len(colours) > 500, "contact sheets are shown"


@pytest.mark.system
def test_one_failure_does_not_stop_the_others(tmp_path, two_layers):
    jobs = tmp_path / "jobs.jsonl"
    broken = '{"prompt": "a", "resolution.height": 50}\n{oops\n{"prompt": "b", "stesp": 3}\n'
    jobs.write_text('{"prompt": "a red circle"}\n' + broken + '{"prompt": "a blue square"}\n')
    answer = warm().run([*two_layers, f"prompts={jobs}", f"hydra.run.dir={tmp_path / 'out'}", "steps=1"])
    assert answer.returncode == 1
    first, second, *_, last = (path.name for path in listed(tmp_path / "out"))
    assert set(done(tmp_path / "out")) == {first, last}
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    errors = {row["job"]: row["error"] for row in rows if row["status"] == "failed"}
    assert "multiple of 16" in errors[second] and "line 3: not JSON" in errors["line0003"]
    assert "nearest: steps" in errors["line0004"]
    assert "line 3: not JSON" in answer.output


@pytest.fixture
def batches(monkeypatch):
    """Lists whose videos are not made: which would be denoised together, and from which settings each is made."""
    seen = SimpleNamespace(together=[], made=[], clocks=[])

    def make(config, folder, overrides, clock=None):
        seen.clocks.append(clock)
        seen.made.append((folder.name, config.resume, config.steps, inputs.with_texts(config).prompt.text))
        outputs.write_metrics(folder, {"config_hash": "", "stages": [], "output": {}})

    def attempt_all(folder, *overrides):
        seen.together.clear(), seen.made.clear(), attempt.failures.clear()
        overrides = rewrite(list(overrides))
        attempt.attempt(compose(overrides), folder, overrides)
        return attempt.failures

    monkeypatch.setattr(attempt, "failures", [])
    monkeypatch.setattr(attempt, "sweep_folders", {})
    monkeypatch.setattr(run, "generate", make)
    monkeypatch.setattr(together, "denoise_together", lambda videos: seen.together.append([v.config for v in videos]))
    seen.attempt = attempt_all
    return seen


def test_several_at_once_of_a_preset(tmp_path, batches):
    """Each goes on in its folder, which knows the preset."""
    assert not batches.attempt(tmp_path, "preset=t2v_demo_128_cpu_v2", "steps=2", "images=2", "prompt=a ball")
    assert [[config.seed for config in group] for group in batches.together] == [[2025, 2026]]
    names = "seed2025", "seed2026"
    assert batches.made == [(name, str(tmp_path / name), 2, "a ball") for name in names]
    assert len(set(batches.clocks)) == 2 and None not in batches.clocks, "its metrics count the batch"


def test_several_at_once_of_a_run_that_is_taken_over(tmp_path, batches, made):
    """They are made one by one, of its settings and not of the defaults."""
    for key in ("replay", "resume"):
        assert not batches.attempt(tmp_path / key, f"{key}={made}", "images=2", *tiny.model())
        assert not batches.together and [one[2:] for one in batches.made] == [(3, PROMPTS[0])] * 2


def test_plans_of_a_list_denoise_nothing(tmp_path, batches, monkeypatch):
    monkeypatch.setitem(attempt.registry.TASKS, "plan", attempt.registry.TASKS["generate"])  # which is not made here
    assert not batches.attempt(tmp_path, "task=plan", "mesh=v6e_1", 'prompts=["a ball","a star"]', "images=2")
    assert not batches.together and set(batches.clocks) == {None} and len(batches.made) == 4


def test_what_is_done_before_is_not_begun_together(tmp_path, batches, monkeypatch):
    assert not batches.attempt(tmp_path, "images=2")
    monkeypatch.setattr(attempt, "done_before", lambda config, folder: 1.0 if config.seed < 2027 else None)
    for images, several in ((3, []), (4, [[2027, 2028]])):
        assert not batches.attempt(tmp_path, f"images={images}", "sweep.resume=true")
        assert [[config.seed for config in group] for group in batches.together] == several
        assert [name for name, *_ in batches.made] == [f"seed{seed}" for seed in range(2027, 2025 + images)]


def test_a_broken_line_is_not_begun(tmp_path, batches):
    (failed, _) = batches.attempt(tmp_path, 'prompts=[{"seed": 1}, "a ball"]', "images=2")
    assert "line 1: no prompt" in failed
    assert [[config.prompt.text for config in group] for group in batches.together] == [["a ball"] * 2]


@pytest.mark.parametrize("more", [(), ("images=2",)])
def test_a_lists_prompts_come_before_a_prompts_file(tmp_path, batches, more):
    (tmp_path / "prompt.txt").write_text("a star")
    lines = '["a ball", {"prompt": "a cat", "negative_prompt": "a dog"}]'
    files = f"prompt.file={tmp_path / 'prompt.txt'}", f"prompt.negative_file={tmp_path / 'prompt.txt'}"
    assert not batches.attempt(tmp_path / "list", f"prompts={lines}", *files, *more)
    assert list(dict.fromkeys(one[3] for one in batches.made)) == ["a ball", "a cat"]
    assert {config.prompt.negative for group in batches.together for config in group} <= {"a star", "a dog"}


DENOISED, AGAIN = ["stages=[text,denoise]", "steps=2"], ["steps=2", "sweep.resume=true", "output.keep_frames=true"]


def test_a_job_that_was_interrupted_goes_on_in_a_sweep(tmp_path, two_layers, monkeypatch):
    """Behind its finished stages; from the beginning if they are of other settings, also such of speed, which a search
    times, or damaged, or not on all hosts."""
    folder, alone = tmp_path / "0", run_into(tmp_path / "alone", *two_layers, "steps=2", "output.keep_frames=true")
    run_into(folder, *two_layers, *DENOISED)

    def steps(*overrides):
        events = []
        generate_into(make_config(*two_layers, *AGAIN, *overrides), folder, listener=events.append)
        return sum(isinstance(event, Stepped) for event in events)

    assert steps() == 0 and numpy.array_equal(frames(folder), frames(alone))
    assert steps("sweep.resume=false") == 2
    with monkeypatch.context() as patch:
        other = {"left": [["text", "denoise", "decode"]]}  # another process finds nothing there
        patch.setattr(distributed, "gather", lambda what, value: [value, *other.get(what, [])])
        assert steps() == 2
    assert steps("attention=xla", "attention.self.block_kv=32") == 2 and steps() == 2
    assert steps("seed=8") == 2 and not numpy.array_equal(frames(folder), frames(alone))
    file = folder / "denoise.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert steps("seed=8") == 2


@pytest.mark.system
def test_videos_of_a_batch_that_was_interrupted_go_on(tmp_path, two_layers, monkeypatch):
    """One that has its latents is not denoised again; the other two are, together."""
    monkeypatch.setattr(attempt, "failures", [])
    monkeypatch.setattr(attempt, "sweep_folders", {})
    asked, batches = rewrite([*two_layers, *AGAIN, "images=3", "prompt=a ball"]), []
    run_into(tmp_path / "seed2026", *two_layers, *DENOISED, "prompt=a ball", "seed=2026")
    whole = together.session.run
    monkeypatch.setattr(together.session, "run", lambda job, *more: batches.append(job.seeds) or whole(job, *more))
    attempt.attempt(compose(asked), tmp_path, asked)
    assert not attempt.failures and (2025, 2027) in batches
    rest = "steps=2", "output.keep_frames=true", "prompt=a ball", "seed=2026"
    alone = run_into(tmp_path / "alone", *two_layers, *rest)
    assert numpy.array_equal(frames(tmp_path / "seed2026"), frames(alone))
    assert "denoise" not in metrics(tmp_path / "seed2026")["seconds"]
    assert {path.name for path in tmp_path.glob("seed*") if (path / "video.mp4").is_file()} == {
        "seed2025", "seed2026", "seed2027"
    }


@pytest.mark.full
def test_a_hydra_sweep_over_meshes_and_blocks(tmp_path, two_layers):
    swept = ["mesh=auto,cpu_8", "attention=xla", "attention.self.block_kv=16,512"]
    answer = warm().run(["-m", *two_layers, "stages=[text,denoise]", "steps=1", *swept, f"hydra.sweep.dir={tmp_path}"])
    assert answer.returncode == 0, answer.output
    latents = [load_file(tmp_path / str(job) / "denoise.safetensors")["latents"] for job in range(4)]
    assert all(numpy.abs(latents[0] - other).max() < 1e-4 for other in latents)
    made = [metrics(tmp_path / str(job)) for job in range(4)]
    assert [job["devices"] for job in made] == [1, 1, 8, 8]
    loads = ["load_transformer" in job["seconds"] for job in made]
    assert loads == [True, False, True, False], "weights survive a change of blocks, not of mesh"
    assert "attention.self.block_kv" in (tmp_path / "report.html").read_text()


# ---------------------------------------------------------------- replay


def frames(folder):
    return load_file(folder / "decode.safetensors")["frames"]


@pytest.mark.system
def test_a_video_alone_is_replayed_bit_for_bit(made, tmp_path):
    video = tmp_path / "found.mp4"
    shutil.copy(made / "video.mp4", video)
    places = [f"hydra.run.dir={tmp_path / 'again'}", "output.keep_frames=true"]
    answer = warm().run([*tiny.model(), f"replay={video}", *places])
    assert answer.returncode == 0, answer.stderr
    assert numpy.array_equal(frames(tmp_path / "again"), frames(made))
    assert "differs" not in answer.stderr
    assert metrics(tmp_path / "again")["config_hash"] == metrics(made)["config_hash"]


def taken(source, *overrides):
    """The config that `python run.py replay=<source> <overrides>` runs with."""
    overrides = [f"replay={source}", *overrides]
    return take_over(make_config(*overrides), rewrite(overrides))


@pytest.mark.system
def test_overrides_go_on_top_of_a_replay(made):
    config = taken(made, "seed=77", "mesh=cpu_8")
    assert (config.seed, config.mesh.name, config.steps, config.resolution.height) == (77, "cpu_8", 3, 64)
    assert config.prompt.text == PROMPTS[0]


def test_what_was_taken_over_is_taken_over_in_its_turn(tmp_path):
    """Options that only a command line may choose, from run to run: their overrides are recorded again."""
    source = tmp_path / "1"
    first = ["model=wan21_t2v_1_3b", "pipeline=v2v", "video=circle.mp4", "steps=7", "prompt=a cat"]
    source.mkdir()
    outputs.write_config(source, outputs.settle(make_config(*first)), rewrite(first))
    for number in (2, 3):
        overrides = rewrite([f"resume={source}", "guidance_scale=4"])
        config = take_over(make_config(*overrides), overrides)
        assert (config.pipeline.name, config.model.name) == ("v2v", "wan21_t2v_1_3b")
        assert (config.steps, config.guidance_scale, config.prompt.text) == (7, 4, "a cat")
        source = tmp_path / str(number)
        source.mkdir()
        outputs.write_config(source, outputs.settle(config), composed_from(config, overrides))


@pytest.mark.system
def test_overrides_of_a_replay_have_their_consequences(made):
    assert taken(made).scheduler.arguments.flow_shift == 3
    assert taken(made, "resolution.flow_shift=7").scheduler.arguments.flow_shift == 7
    portrait = taken(made, "model=wan21_t2v_1_3b", "resolution=720p_portrait")
    assert (portrait.resolution.height, portrait.resolution.width, portrait.resolution.frames) == (1280, 720, 81)
    assert portrait.scheduler.arguments.flow_shift == 5 and portrait.sharding.picture[3] == ["dp", "sp", "tp"]
    assert portrait.model.path == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" and portrait.guidance_scale == 5
    assert portrait.steps == 3, "said when the run was made"
    assert "conv3d" not in taken(made, "~ops.conv3d").ops and "conv3d" in taken(made).ops
    assert taken(made, "scheduler=euler").scheduler.target == "FlowMatchEulerDiscreteScheduler"


@pytest.mark.system
def test_what_the_stored_run_said_holds_where_conf_has_changed_since(made, tmp_path, caplog):
    """As if another version had made it, with another default of its own and one key fewer."""
    source = tmp_path / "run"
    shutil.copytree(made, source)
    stored = OmegaConf.load(source / "config.yaml")
    stored.guidance_scale, stored.resolution.fps = 2.5, 12
    del stored.compile["matmul_precision"]
    stored.plan["of_another_version"] = 1
    OmegaConf.save(stored, source / "config.yaml")
    config = taken(source)
    assert (config.guidance_scale, config.resolution.fps, config.compile.matmul_precision) == (2.5, 12, None)
    assert taken(source, "guidance_scale=3").guidance_scale == 3
    assert taken(source, "resolution=demo").resolution.fps == 8
    stored["of_the_video"] = 1
    OmegaConf.save(stored, source / "config.yaml")
    taken(source, *tiny.model())
    assert "not taken over, since they may only be given on the command line: of_the_video" in caplog.text


@pytest.mark.system
def test_a_run_whose_command_is_not_known_is_taken_value_by_value(made, tmp_path):
    """As an unfinished job of a list was stored before there was a command.json."""
    source = tmp_path / "run"
    source.mkdir()
    stored = OmegaConf.load(made / "config.yaml")
    stored.resolution.flow_shift = stored.scheduler.arguments.flow_shift = 5.0
    OmegaConf.save(stored, source / "config.yaml")
    config = taken(source)
    assert (config.resolution.height, config.steps, config.scheduler.arguments.flow_shift) == (64, 3, 5)
    config = taken(source, "resolution=demo")
    assert (config.resolution.height, config.scheduler.arguments.flow_shift) == (128, 3), "its shift comes along"


def test_a_prompt_is_a_text_in_a_replay_too(generate):
    text = "it costs ${oc.env:HOME} and \\\\${5"
    source = generate(f"prompt={text}", "stages=[text]")
    assert taken(source).prompt.text == text


@pytest.mark.system
def test_a_video_carries_nothing_of_this_machine(made):
    video = made / "video.mp4"
    carried = json.dumps(media.read_metadata(video))
    places = (ROOT, made.parent, Path.home(), tempfile.gettempdir(), sys.prefix, socket.gethostname())
    assert not [place for place in places if re.search(rf"(?<![\w/]){place}\b", carried)]
    assert read_stored(video, "replay").config["resolution.height"] == 64


@pytest.mark.system
def test_a_replay_elsewhere_says_what_differs(made, caplog):
    now = metrics(made) | {"device": "TPU v6 lite", "devices": 8}
    with caplog.at_level("WARNING"):
        compare_replay(make_config(f"replay={made}"), now)
    assert "device differs: cpu then, TPU v6 lite now" in caplog.text
    assert "devices differs: 1 then, 8 now" in caplog.text


@pytest.mark.parametrize(
    "what, message",
    [("none", "no such run folder or video"), ("plain.mp4", "carries no settings"), ("empty", "not a run folder")],
)
def test_what_cannot_be_replayed_is_told(tmp_path, what, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain.mp4").write_bytes(b"not a video")
    with pytest.raises(ConfigError, match=message):
        taken(tmp_path / what)


# ---------------------------------------------------------------- other ends


def test_a_full_disk_is_told_and_finished_stages_are_kept(tmp_path, two_layers, monkeypatch, caplog):
    save = results.save

    def full(path, *rest):
        if path.stem == "decode":
            raise OSError(28, "No space left on device", str(path))
        save(path, *rest)

    monkeypatch.setattr(results, "save", full)
    monkeypatch.setattr(attempt, "failures", [])
    assert attempt.attempt(make_config(*two_layers), tmp_path, []) is None
    assert "the disk is full; free some space and go on with resume=" in caplog.text
    assert (tmp_path / "denoise.safetensors").exists() and not (tmp_path / "video.mp4").exists()


@pytest.mark.system
def test_previews_are_updated_while_denoising(generate, monkeypatch):
    seen = []
    monkeypatch.setattr(outputs, "write_preview", lambda folder, frames, fps: seen.append(frames))
    folder = generate("preview_every=1", "resolution.frames=9", "steps=8", "keep_resident=true")
    assert len(seen) == 7 and seen[0].shape == (1, 64, 64, 3) and seen[0].dtype == numpy.uint8
    distances = [numpy.abs(preview.astype(int) - frames(folder)[0]).mean() for preview in seen]
    assert distances[-1] < 0.7 * distances[0], "they come closer to the video's first frame"
    decode, latents = session.stages["decode"], load_file(folder / "denoise.safetensors")["latents"]
    (last,) = decode.preview(latents, 0)
    session.clear()
    assert numpy.array_equal(last, frames(folder)[0]), "a preview of finished latents is that frame"


@pytest.mark.system
def test_a_report_takes_folders_that_others_are_still_writing_into(made, tmp_path):
    for name, files in (("0", ("metrics.json", "video.mp4")), ("1", ("metrics.json", "config.yaml"))):
        (tmp_path / name).mkdir()
        for file in files:  # a video without its pictures, metrics without a video
            shutil.copy(made / file, tmp_path / name)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "failure.json").write_text('{"error": "half')
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "failure.json").write_text(json.dumps({"error": f"{tmp_path}/3/x: gone", "overrides": []}))
    page = report.write(tmp_path).read_text()
    statuses = [json.loads(line)["status"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert statuses == ["done", "done", "unfinished", "failed"] and page.count("<video") == 1
    assert "/3/x: gone" in page and str(tmp_path) not in page


def test_a_report_that_cannot_be_written_loses_nothing_else(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(attempt, "failures", [])
    monkeypatch.setattr(report, "collect", lambda folder: 1 / 0)
    attempt.report(tmp_path)
    assert len(attempt.failures) == 1 and "no report on" in caplog.text


def test_an_unfinished_job_is_reported_as_such(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "config.yaml").write_text("{}")
    report.write(tmp_path)
    assert json.loads((tmp_path / "results.jsonl").read_text())["status"] == "unfinished"
