"""Videos made chunk by chunk: equal to Self-Forcing's loop in torch, over windows and devices; what is refused."""
import asyncio
import json
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import wait
from functools import partial
from types import SimpleNamespace

import diffusers
import numpy
import pytest
import torch
from PIL import Image

from tests import causal, given, tiny
from tests.conftest import generate_into, make_config, resolve_there, results, run_into
from tests.fork import warm
from tests.reference import TEXTS, relative_error
from tests.serving import DEADLINE, Server, at_step, wait_for
from wan_torchax.config import trust
from wan_torchax.config.clips import ffmpeg, read_frames
from wan_torchax.config.commandline import rewrite
from wan_torchax.config.geometry import Geometry
from wan_torchax.config.live import Layout, Window, later_prompt, live_warnings, prompt_chunks
from wan_torchax.config.long import long_warnings
from wan_torchax.config.schema import ConfigError, Live
from wan_torchax.config.validation import validate
from wan_torchax.events import Advanced, Asked, Decoded, Part, Queued, Stepped
from wan_torchax.records import outputs
from wan_torchax.records.growing import Growing
from wan_torchax.records.media import Encoding, read_metadata
from wan_torchax.records.results import save
from wan_torchax.records.stored import take_over
from wan_torchax.runtime.jobs import find_job
from wan_torchax.serve import api, queue, worker
from wan_torchax.serve.queue import Prompts, append
from wan_torchax.serve.worker import configure
from wan_torchax.session import session
from wan_torchax.stages.sampling import scheduler_table
from wan_torchax.stages.stage import find, result_settings

STEPS = ["scheduler=renoise", "scheduler.sigmas=[1,0.75,0.5,0.25]", "resolution.flow_shift=5", "guidance_scale=1"]
SMALL = ["resolution.height=64", "resolution.width=64", "output.keep_frames=true"]
LIVE = ["pipeline=live", "live=self_forcing", "live.chunk=2", "live.window=null", *STEPS, *SMALL, *TEXTS]
GEOMETRY = Geometry(16, 4, 8, (1, 2, 2))
NO_DECODE = "stages=[text,live]"


def on(axes, sharding):
    return ["mesh=cpu_8", f"mesh.axes={axes}", f"sharding={sharding}"]


# ---------------------------------------------------------------- the layout


def test_chunks_go_round_the_slots_behind_the_sink():
    layout = Layout.of(Live(chunk=3, window=12, sink=3), 30)
    assert (layout.chunks, layout.slots, layout.sinks, layout.window) == (10, 4, 1, 12)
    window = Window(layout)
    assert [window.take(number) for number in range(8)] == [0, 1, 2, 3, 1, 2, 3, 1]
    assert window.chunks == [0, 7, 5, 6] and window.ranks() == [0, 3, 1, 2] and window.staying() == [0, 6, 7]


def test_a_first_chunk_of_its_own_length():
    layout = Layout.of(Live(chunk=3, first=1), 10)
    assert [layout.size(number) for number in range(layout.chunks)] == [1, 3, 3, 3]
    assert [layout.begin(number) for number in range(layout.chunks)] == [0, 1, 4, 7] and layout.window == 10


def test_programs_are_those_of_any_length():
    """Beyond the window's; a shorter video has fewer slots."""
    def recipes(frames):
        resolved = resolve_there("task=plan", "model=self_forcing_1_3b", "mesh=v6e_1", f"resolution.frames={frames}")
        return {name: find(name).recipe_for(name, resolved) for name in resolved.graph.stages}

    short, long, longer = recipes(45), recipes(477), recipes(957)
    assert long == longer and short["live"] != long["live"] and short["decode"] == long["decode"]


PUBLISHED = {  # times, and chunk, window and sink
    "self_forcing_1_3b": ([1000, 937.5, 833.3333, 625], (3, 21, 0)),
    "longlive_1_3b": ([1000, 937.5, 833.3333, 625], (3, 12, 3)),
    "krea_14b": ([1000, 937.5, 833.3333, 625], (3, 6, 0)),
    "causvid_1_3b": ([1000, 757, 522], (3, 21, 0)),
    "longlive2_5b": ([999, 937, 833, 625], (8, 32, 8)),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_models_have_their_published_schemes(model):
    size = ["resolution=704p", "resolution.frames=125"] if "5b" in model else ["resolution=480p"]
    config, (times, scheme) = make_config(f"model={model}", *size, "prompt=a"), PUBLISHED[model]
    validate(config)
    table, live = scheduler_table(config), config.live
    assert numpy.allclose(table.timesteps, times) and config.steps == len(times)
    assert (live.chunk, live.window, live.sink) == scheme
    assert (config.pipeline.name, config.guidance_scale, live.rebuild) == ("live", 1, model == "krea_14b")
    assert live.reencode == live.rebuild
    assert list(make_config(f"model={model}", "vae=tiny").pipeline.stages.decode.uses) == ["tiny_vae"]
    assert not list(long_warnings(make_config(f"model={model}", *size, "resolution.frames=509")))
    if model == "causvid_1_3b":
        assert numpy.allclose(table.sigmas, [1, 0.75676, 0.52174], atol=1e-5), "of a table of 1000 times, the nearest"


# ---------------------------------------------------------------- parity


WINDOW = ["live.window=6", "live.sink=2", "resolution.frames=45"]  # three slots for six chunks
FULL, SYSTEM = pytest.mark.full, pytest.mark.system
CASES = [
    pytest.param(["resolution.frames=21"], [2, 2, 2], id="all before"),
    pytest.param(WINDOW, [2] * 6, id="window and sink"),
    pytest.param(
        [*WINDOW, "live.positions=relative", "live.context_noise=50"], [2] * 6, id="relative positions", marks=SYSTEM,
    ),
    pytest.param(
        ["live.first=1", "live.sink=1", "live.window=5", "resolution.frames=41"], [1] + [2] * 5, id="a first frame",
        marks=SYSTEM,
    ),
    pytest.param(
        ["live.window=4", "live.positions=relative", "live.rebuild=true", "resolution.frames=29"], [2] * 4,
        id="rebuilt", marks=SYSTEM,
    ),
    pytest.param(
        [*WINDOW, "scheduler=unipc", "scheduler.sigmas=null", "steps=4"], [2] * 6, id="a solver with a memory",
        marks=SYSTEM,
    ),
    pytest.param([*WINDOW, "live.sink=0", *on("{dp:1,sp:1,tp:8}", "tp")], [2] * 6, id="tp", marks=FULL),
    pytest.param([*WINDOW, *on("{dp:2,sp:4,tp:1}", "tokens")], [2] * 6, id="tokens", marks=SYSTEM),
    pytest.param(
        [*WINDOW, "live.positions=relative", "sharding.attention.ulysses=sp", *on("{dp:1,sp:2,tp:4}", "tp")], [2] * 6,
        id="both", marks=FULL,
    ),
]


@pytest.mark.parametrize("overrides, sizes", CASES)
def test_every_chunk_is_that_of_the_published_loop(tmp_path, overrides, sizes):
    arguments = [*tiny.model("text"), *LIVE, NO_DECODE, *overrides]
    values, config = results(run_into(tmp_path, *arguments)), make_config(*arguments)
    text = torch.tensor(values["embeddings"])
    expected = causal.generate(causal.load(tiny.checkpoint("text")), config, text, sizes)
    assert values["latents"].shape == expected.shape and expected.std() > 0.1
    for number, end in enumerate(numpy.cumsum(sizes)):
        chunk = slice(end - sizes[number], end)
        error = relative_error(values["latents"][:, :, chunk], expected[:, :, chunk])
        assert error < 1e-4, f"chunk {number}: {error}"


REBUILT = ["live.window=4", "live.positions=relative", "live.rebuild=true", "live.reencode=true"]


@SYSTEM
@pytest.mark.parametrize("overrides", [[], pytest.param(["live.window=6", "resolution.frames=45"], marks=FULL)])
def test_the_first_latent_frame_that_is_read_anew_is_that_of_its_picture(tmp_path, overrides):
    """As in Krea's code, once the window's beginning is not the video's. A run that goes on encodes the same."""
    arguments = [*tiny.model("text"), *LIVE, *REBUILT, "resolution.frames=29", *overrides]
    values, config = results(run_into(tmp_path / "run", *arguments)), make_config(*arguments)
    sizes, text = [2] * (values["latents"].shape[2] // 2), torch.tensor(values["embeddings"])
    model, job, window = causal.load(tiny.checkpoint("text")), find_job(config), config.live.window
    expected = causal.generate(model, config, text, sizes)
    assert relative_error(values["latents"], expected) < 1e-4
    without = causal.generate(model, make_config(*arguments, "live.reencode=false"), text, sizes)
    assert relative_error(without[:, :, :window], expected[:, :, :window]) == 0
    assert relative_error(without[:, :, window:], expected[:, :, window:]) > 1e-3, "the picture matters"
    for name in ("live.safetensors", "decode.safetensors"):
        (tmp_path / "run" / name).unlink()
    for number, part in enumerate(numpy.split(values["latents"], len(sizes), axis=2)[:-1]):
        settings = find("live").part_settings("live", job, number, result_settings(job, "live"))
        save(tmp_path / "run" / f"live.{number}.safetensors", {"latents": part}, settings)
    again = results(run_into(tmp_path / "again", *AGAIN, f"resume={tmp_path / 'run'}"))
    assert (again["latents"] == values["latents"]).all() and (again["frames"] == values["frames"]).all()


def test_what_is_encoded_again_makes_the_latents():
    """So the VAE counts for them."""
    jobs = [find_job(make_config(*tiny.model("text"), *LIVE, *REBUILT, f"live.reencode={again}")) for again in (1, 0)]
    assert [bool(result_settings(job, "live").get("weights.vae")) for job in jobs] == [True, False]


def test_a_mask_over_the_whole_video_is_the_same():
    """Of the loop in torch, which is what the others are compared with."""
    model = causal.load(tiny.checkpoint("text"))
    latents, text = torch.randn(1, 16, 6, 8, 8), torch.randn(1, 20, 32)
    kept = [causal.Shifted(6, 0, False) for _ in model.blocks]
    parts = [(number, 2 * number) for number in range(3)]
    chunks = [causal.forward(model, part, 300.0, text, parts[n], kept) for n, part in enumerate(latents.split(2, 2))]
    whole = causal.forward(model, latents, 300.0, text, (0, 0), [causal.Masked(2)] * len(model.blocks))
    assert relative_error(torch.cat(chunks, dim=2).numpy(), whole.numpy()) < 1e-4
    alone = causal.forward(model, latents, 300.0, text, (0, 0), [causal.Masked(6)] * len(model.blocks))
    assert relative_error(alone.numpy(), whole.numpy()) > 1e-3, "the mask matters"


# ---------------------------------------------------------------- from a picture or a video


def encoded_by_diffusers(frames):
    """Normalized latents of pictures."""
    vae = diffusers.AutoencoderKLWan.from_pretrained(tiny.checkpoint("text") / "vae")
    pixels = numpy.stack([numpy.asarray(frame.resize((64, 64), Image.LANCZOS), "float32") for frame in frames])
    pixels = torch.tensor(pixels / 127.5 - 1).permute(3, 0, 1, 2)[None]
    mean, deviation = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    with torch.no_grad():
        return (vae.encode(pixels).latent_dist.mode() - mean) / deviation


LED = [  # overrides, chunks, and how many are given
    pytest.param(
        ["pipeline=live_v2v", f"video={given.clip('video', 16)}", "resolution.frames=29", "live.window=4"], [2] * 4, 2,
        id="a video",
    ),
    pytest.param(
        ["pipeline=live_i2v", f"image={given.picture('first')}", "live.first=1", "live.sink=1", "live.window=5",
         "resolution.frames=25"], [1, 2, 2, 2], 1, id="a picture", marks=SYSTEM,
    ),
]


@pytest.mark.parametrize("overrides, sizes, count", LED)
def test_what_is_given_leads_the_video(tmp_path, overrides, sizes, count):
    """Of 16 frames the last 13 are two chunks. They are read as finished chunks are, and the others go on from them."""
    arguments = [*tiny.model("text"), *LIVE, *overrides, "fit=stretch", "resolution.fps=16"]
    values, config = results(run_into(tmp_path, *arguments)), make_config(*arguments)
    frames = [Image.open(config.image)] if config.image else map(Image.fromarray, read_frames(config.video, 99, 16))
    latents, text = encoded_by_diffusers([*frames][-13:]), torch.tensor(values["embeddings"])
    assert relative_error(values["given_latents"], latents.numpy()) < 1e-4
    assert (values["latents"][:, :, : latents.shape[2]] == values["given_latents"]).all()
    model, parts = causal.load(tiny.checkpoint("text")), latents.split(sizes[:count], 2)
    expected = causal.generate(model, config, text, sizes, given=parts)
    assert relative_error(values["latents"], expected) < 1e-4
    assert len(values["frames"]) == config.resolution.frames
    without = causal.generate(model, config, text, sizes)
    assert relative_error(without, expected) > 1e-2, "what is given matters"


def test_what_is_left_out_of_a_given_video_is_told():
    video = [*tiny.model("text"), *LIVE, "pipeline=live_v2v", "resolution.fps=16", "resolution.frames=29"]
    (warning,) = live_warnings(make_config(*video, f"video={given.clip('video', 16)}"))
    assert warning.endswith("has 16 frames; the last 13 lead the video, in whole chunks")
    assert not [*live_warnings(make_config(*video, f"video={given.clip('video', 13)}"))]


@pytest.mark.parametrize("overrides, message", [
    (["pipeline=live_v2v", f"video={given.clip('video', 3)}"], "has 3 frames at 16 per second, fewer than the 5 of a"),
    (["pipeline=live_v2v", f"video={given.clip('video', 9)}", "resolution.frames=5"], "no other is made; at least 13"),
    (["pipeline=live_i2v", f"image={given.picture('first')}"], "live.first=None: a picture is one latent frame, and"),
    (["pipeline=live_i2v"], "image: missing; pipeline=live_i2v starts from it"),
    ([f"image={given.picture('first')}"], "pipeline=live takes no such file"),
])
def test_what_cannot_lead_a_video_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        size = ["resolution.frames=21", "resolution.fps=16"]
        validate(make_config(*tiny.model("text"), *LIVE, *size, *overrides))


# ---------------------------------------------------------------- prompts that follow


LATER = ["resolution.frames=45", "live.window=6", "live.sink=2", "live.prompts=['3: a green star moving left']"]


@pytest.mark.parametrize("how", [
    "live.recache=true", pytest.param("live.recache=false", marks=FULL), pytest.param("live.blend=2", marks=SYSTEM),
])
def test_a_later_prompt_applies_from_its_chunk_on(tmp_path, how):
    arguments = [*tiny.model("text"), *LIVE, NO_DECODE, *LATER, how]
    values, config = results(run_into(tmp_path, *arguments)), make_config(*arguments)
    assert prompt_chunks(config, GEOMETRY, Layout.of(config.live, 12)) == [0, 4], "frame 29 is at 3.6 seconds"
    texts, sizes = torch.tensor(values["embeddings"]), [2] * 6
    assert len(texts) == 2 and (texts[0] != texts[1]).any()
    model = causal.load(tiny.checkpoint("text"))
    expected = causal.generate(model, config, texts, sizes, change=4)
    assert relative_error(values["latents"], expected) < 1e-4
    without = causal.generate(model, config, texts[:1], sizes)
    assert relative_error(without[:, :, :8], expected[:, :, :8]) == 0
    assert relative_error(without[:, :, 8:], expected[:, :, 8:]) > 1e-3, "the prompt matters"


# ---------------------------------------------------------------- while it is made


AGAIN = [*tiny.model("text"), "output.keep_frames=true"]  # what only the command line may say


def frames_in(path):
    """The frames that a player shows of a file, finished or not."""
    command = [ffmpeg(), "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    shown = subprocess.run(command, capture_output=True, check=True).stdout
    return numpy.frombuffer(shown, numpy.uint8).reshape(-1, 64, 64, 3)


def encoded(path):
    command = [ffmpeg(), "-v", "error", "-i", str(path), "-c", "copy", "-f", "h264", "-"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def test_the_file_that_grows_plays_at_any_time(tmp_path):
    frames = numpy.random.default_rng(0).integers(0, 255, (21, 64, 64, 3), dtype=numpy.uint8)
    video = Growing(tmp_path / "video.mp4", Encoding(8, 18), (5, 8))
    for part, there in ((frames[:1], 0), (frames[1:9], 5), (frames[9:13], 13), (frames[13:], 21)):
        video.add(part)
        wait([*video.queued])
        assert not there or len(frames_in(video.stream)) == there
    grown = frames_in(video.stream)
    video.finish("a title", {"seed": 3})
    video.close()
    assert read_metadata(video.path) == {"seed": 3} and not video.stream.exists()
    assert (frames_in(video.path) == grown).all() and len(encoded(video.path)) > 1000


def test_chunks_are_decoded_and_shown_while_later_ones_are_made(tmp_path):
    heard, there = [], []

    def listener(event):
        heard.append(type(event))
        if isinstance(event, Part):
            there.append(sorted(path.name for path in tmp_path.glob("live.*.safetensors")))
        if event == Queued("live", more=True):
            heard.pop()  # frames may be ready then, or not

    arguments = [*tiny.model("text"), *LIVE, "resolution.frames=21"]
    generate_into(make_config(*arguments), tmp_path, arguments, listener=listener)
    first, second, third = (place for place, kind in enumerate(heard) if kind is Part)
    steps, names = [Stepped] * 4, [f"live.{number}.safetensors" for number in range(3)]
    between = [kind for kind in heard[first + 1 : second] if kind is not Advanced]
    assert between == [Queued, Decoded, Decoded, Asked, Queued, *steps], "nothing holds up the first frames"
    between = [kind for kind in heard[second + 1 : third] if kind is not Advanced]
    shown = [kind for kind in between if kind is Decoded]
    assert shown == [Decoded] * 2 and [kind for kind in between if kind is not Decoded] == [Asked, Queued, *steps]
    assert between.index(Decoded) <= between.index(Queued) + 1, "as soon as they are ready, or when a chunk is queued"
    assert there == [names[:1], names[:2], names]
    values, seconds = results(tmp_path), json.loads((tmp_path / "metrics.json").read_text())["seconds"]
    assert 0 < seconds["decode"] < seconds["total"]
    assert values["frames"].shape == (21, 64, 64, 3) and not list(tmp_path.glob("live.*.safetensors"))[1:]
    again = run_into(tmp_path / "again", *AGAIN, f"resume={tmp_path}", "stages=[decode]")
    assert (results(again)["frames"] == values["frames"]).all(), "decoded in one go"


def test_a_video_is_decoded_again_from_its_chunks(tmp_path):
    """Of frames that are not asked for, and of the whole latents, nothing is kept: a video may grow for hours."""
    arguments = [*tiny.model("text"), *LIVE, "resolution.frames=29", "output.keep_frames=false"]
    names = {path.name for path in run_into(tmp_path / "run", *arguments).glob("*.safetensors")}
    assert names == {"text.safetensors", *(f"live.{number}.safetensors" for number in range(4))}
    again = run_into(tmp_path / "again", *AGAIN, f"resume={tmp_path / 'run'}", "stages=[decode]")
    assert encoded(again / "video.mp4") == encoded(tmp_path / "run" / "video.mp4")
    assert len(results(again)["frames"]) == 29


KILLED = """
import os, signal
from concurrent.futures import wait
from wan_torchax.records.growing import Growing
from wan_torchax.tasks import generate

kind, left, *encoded = os.environ["MOMENT"].split()
left, growing, begin = int(left), [], Growing.__init__

def begin_noted(self, *given):
    begin(self, *given)
    growing.append(self)

def listener(event):
    global left
    left -= kind in (type(event).__name__, getattr(event, "phase", None))
    if left == 0:
        wait([chunk for video in growing for chunk in video.queued if encoded])
        os.kill(os.getpid(), signal.SIGKILL)

Growing.__init__ = begin_noted
generate.Bars = lambda: listener
run.main()
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live") / "whole"
    process = warm().start([*tiny.model("text"), *LIVE, "resolution.frames=29", f"hydra.run.dir={folder}"])
    assert process.wait(120) == 0, process.output
    return folder


@pytest.mark.system
@pytest.mark.parametrize("step", [6, pytest.param(16, marks=FULL)])  # of 16, in four chunks
def test_a_killed_run_leaves_its_chunks_and_goes_on_with_the_same_bits(tmp_path, undisturbed, step):
    arguments, folder = [*tiny.model("text"), *LIVE, "resolution.frames=29"], tmp_path / "killed"
    moment = {"MOMENT": f"Stepped {step} encoded"}
    process = warm().start([*arguments, f"hydra.run.dir={folder}"], moment, KILLED)
    assert process.wait(120) == -signal.SIGKILL, process.output
    parts = sorted(folder.glob("live.*.safetensors"))
    assert len(parts) == (step - 1) // 4 and not (folder / "video.mp4").exists()
    shown = frames_in(folder / "live.mp4")
    assert len(shown) == 5 + 8 * (len(parts) - 1)
    assert (shown == frames_in(undisturbed / "video.mp4")[: len(shown)]).all()
    process = warm().start([*AGAIN, f"resume={folder}", f"hydra.run.dir={tmp_path / 'again'}"])
    assert process.wait(120) == 0, process.output
    values, expected = results(tmp_path / "again"), results(undisturbed)
    assert all((values[name] == expected[name]).all() for name in ("latents", "frames"))
    assert encoded(tmp_path / "again" / "video.mp4") == encoded(undisturbed / "video.mp4")
    if parts:
        assert f"its first {len(parts)} parts are taken" in process.output


MOMENTS = [  # an event or a phase, and which of its kind, each in a run that goes on from the one before
    "Began 2", "Queued 1", "Stepped 4", "Part 1", "Asked 1", "Stepped 3", "Part 2", "Decoded 4", "Finished 2",
    "write 1 encoded",  # once all chunks are; the others may come while one is
]


@pytest.mark.system
def test_a_run_that_is_killed_ten_times_ends_with_the_same_bits(tmp_path, undisturbed):
    """After each kill, the file that grew has frames of whole chunks, and the latents of all of them are there. Every
    second run goes on in the folder of the one before."""
    arguments, expected = [*tiny.model("text"), *LIVE, "resolution.frames=29"], frames_in(undisturbed / "video.mp4")
    most = 0
    for number, moment in enumerate([*MOMENTS, None]):
        folder = tmp_path / str(number // 2)
        process = warm().start([*arguments, f"hydra.run.dir={folder}"], {"MOMENT": moment or "None 1"}, KILLED)
        assert process.wait(120) == (-signal.SIGKILL if moment else 0), f"{moment}: {process.output}"
        parts = 4 if (folder / "live.safetensors").exists() else len([*folder.glob("live.*.safetensors")])
        if moment and (folder / "live.mp4").exists() and (folder / "live.mp4").stat().st_size:  # begun, and written to
            shown = frames_in(folder / "live.mp4")
            assert len(shown) in [5 + 8 * chunk for chunk in range(parts)], moment
            assert (shown == expected[: len(shown)]).all(), moment
            most = max(most, len(shown))
        if not number % 2 and moment:
            (folder / ".partial-1-video.mp4").touch()  # as if it was killed while it wrote
        arguments = [*AGAIN, f"resume={folder}"]
    values, whole = results(folder), results(undisturbed)
    assert all((values[name] == whole[name]).all() for name in ("latents", "frames")) and most == 29
    assert not [*tmp_path.glob("*/.partial-*.mp4")]
    assert encoded(folder / "video.mp4") == encoded(undisturbed / "video.mp4")


# ---------------------------------------------------------------- a server


@pytest.fixture
def server(tmp_path):
    """One without a worker."""
    made = Server(tmp_path / "queue", "pipeline=live", "live=self_forcing", *STEPS)
    yield made
    made.close()


def test_a_server_sends_a_video_as_it_grows(server):
    video = server.post(prompt="a red circle", seconds="4", later_prompts=["2: a blue star"])
    folder = server.queue.folder / video["id"]
    assert video["frames"] == 33 and video["stream"] == f"/v1/videos/{video['id']}/stream", "9 and 12 frames each"
    request = json.loads((folder / "request.json").read_text())
    assert request["values"]["live.prompts"] == ["2: a blue star"] and video["steps"] == 3 * server.base.config.steps
    server.post(400, prompt="a red circle", seconds="4", later_prompts=["2: a\0b"])
    assert "preview_every=0" in server.base.overrides_for(request["values"], {})
    file = folder / "live.mp4"
    file.write_bytes(b"first")
    with server.client.stream("GET", video["stream"]) as answer:
        parts = answer.iter_raw()
        assert answer.headers["content-type"] == "video/mp4" and next(parts) == b"first"
        with file.open("ab") as more:
            more.write(b"second")
        assert next(parts) == b"second"
        file.unlink()
        (folder / "metrics.json").write_text('{"step_seconds": [0.1]}')
        assert list(parts) == [], "it ends with the video"
    (folder / "video.mp4").write_bytes(b"whole")
    assert server.get(video["stream"]).content == b"whole"
    assert server.get(f"/v1/videos/{video['id']}").json()["stream"] is None


def test_the_first_frames_are_not_waited_for(server, monkeypatch):
    """While a video is made, its stream looks for them often; a worker takes a job when it comes."""
    monkeypatch.setattr(api, "TAIL_SECONDS", DEADLINE)
    monkeypatch.setattr(api, "QUICK_LOOKS", DEADLINE / api.FIRST_SECONDS)
    monkeypatch.setattr(queue, "WATCHED_SECONDS", DEADLINE)
    video = server.post(prompt="a red circle", frames=33)
    folder = server.queue.folder / video["id"]
    append(folder, {"event": "loading"})
    with server.client.stream("GET", video["stream"]) as answer:
        (folder / "live.mp4").write_bytes(b"first")
        assert next(answer.iter_raw()) == b"first"
        wait_for(lambda: queue.Watched(folder).seconds() is not None)
        server.front.stopping = True


@pytest.mark.parametrize("is_there", [False, True], ids=["no file", "an empty file"])
def test_the_first_frames_are_looked_for_often_only_so_long(server, monkeypatch, is_there):
    """A model may take minutes to load; a file is empty for a moment before its first frames are in it."""
    video, slept = server.post(prompt="a red circle", frames=33), []
    job = server.queue.get(video["id"])
    append(job.folder, {"event": "loading"})
    if is_there:
        (job.folder / "live.mp4").touch()

    async def sleep(seconds):
        slept.append(seconds)
        server.front.stopping = len(slept) == api.QUICK_LOOKS + 2

    async def watch():
        return [content async for content in api.growing(server.front, job)]

    monkeypatch.setattr(api, "asyncio", SimpleNamespace(sleep=sleep))
    assert asyncio.run(watch()) == []
    assert slept == [api.FIRST_SECONDS] * api.QUICK_LOOKS + [api.TAIL_SECONDS] * 2


def test_a_file_that_goes_before_it_is_opened_ends_the_stream(server, monkeypatch):
    """The video is finished in that moment."""
    job = server.queue.get(server.post(prompt="a red circle", frames=33)["id"])

    def gone(folder, name):
        (folder / "metrics.json").write_text('{"step_seconds": [0.1]}')
        return folder / name

    async def watch():
        return [content async for content in api.growing(server.front, job)]

    monkeypatch.setattr(api, "own_file", gone)
    assert asyncio.run(asyncio.wait_for(watch(), DEADLINE)) == []


def test_a_video_does_not_run_away_from_those_who_watch(server, monkeypatch):
    """It waits for them, unless nobody watches any more; a cancelled one waits no longer."""
    video = server.post(prompt="a red circle", frames=33)
    job, now = server.queue.get(video["id"]), 1000.0
    monkeypatch.setattr(queue, "time", SimpleNamespace(time=lambda: now))  # the server's thread goes on as it is
    watched, slept = queue.Watched(job.folder), []

    def sleep(seconds, leaves=1e9):
        nonlocal now
        slept.append(seconds)
        now += seconds
        if len(slept) * seconds < leaves:
            os.utime(watched.file, (now, now))

    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    reporter = worker.Reporter(job, bool, ahead=5)
    reporter(Asked(100.0))
    assert watched.seconds() is None and not slept, "nobody watches"
    watched.now()
    os.utime(watched.file, (now, now))
    reporter(Asked(7.0))
    assert 1.9 < now - 1000 < 2.1
    monkeypatch.setattr(worker.time, "sleep", partial(sleep, leaves=4))
    reporter(Asked(1000.0))
    assert 4 < now - 1000 < 4 + 2 * queue.WATCHED_SECONDS, "they left"
    os.utime(watched.file, (now, now))
    (job.folder / "cancel").touch()
    with pytest.raises(worker.Cancelled):
        reporter(Asked(1000.0))
    before = now
    worker.Reporter(job, bool).wait_for_viewers(1000.0)
    assert now == before


def test_a_worker_takes_a_job_when_it_comes(server, monkeypatch):
    taken = []
    monkeypatch.setattr(worker, "IDLE_SECONDS", DEADLINE)
    monkeypatch.setattr(worker, "take", lambda jobs, *_: taken.extend(jobs) or False)
    works = threading.Thread(target=worker.work, args=[server.queue, server.base, bool, lambda: bool(taken)])
    works.start()
    server.post(prompt="a red circle", frames=33)
    wait_for(lambda: taken, DEADLINE / 2)
    server.post(prompt="another", frames=33)  # it looks whether to stop
    works.join(DEADLINE / 2)
    assert not works.is_alive()


def test_a_file_that_is_begun_anew_ends_the_stream(server):
    video = server.post(prompt="a red circle", frames=33)
    file = server.queue.folder / video["id"] / "live.mp4"
    file.write_bytes(b"a long beginning")
    with server.client.stream("GET", video["stream"]) as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"a long beginning"
        file.write_bytes(b"short")
        assert list(parts) == []


def test_prompts_are_applied_once_each(server):
    video = server.post(prompt="a red circle", frames=33)
    path, folder = f"/v1/videos/{video['id']}/prompt", server.queue.folder / video["id"]
    for prompt in ("a blue star", "a green\n  star: ${oc.env:HOME}"):
        assert server.client.post(path, json={"prompt": prompt}).status_code == 200
    for wrong in ({"prompt": " "}, {"prompt": None}, {"prompt": "a", "seed": 1}, {"prompt": "a\0b"}, {}):
        assert server.client.post(path, json=wrong).status_code == 400
    prompts = Prompts(folder)
    assert prompts.apply(partial(later_prompt, 4 / 3)) == "a green star: ${oc.env:HOME}", "the last of them"
    assert prompts.apply(partial(later_prompt, 2)) is None
    assert later_prompt(123456.7891, "a") == "123456.789: a", "an hour and more, to the millisecond"
    assert prompts.applied() == ["1.333: a green star: ${oc.env:HOME}"]
    config, _ = configure(server.queue.get(video["id"]), server.base)
    assert list(config.live.prompts) == prompts.applied(), "after a crash"
    (folder / "metrics.json").write_text('{"step_seconds": [0.1]}')
    assert server.client.post(path, json={"prompt": "too late"}).status_code == 409


@pytest.mark.system
def test_a_prompt_given_while_a_video_is_made_is_part_of_it(tmp_path, monkeypatch):
    settings, answers = [*tiny.model("text"), *LIVE, "resolution.frames=29"], []

    def say():
        (job,) = server.queue.jobs()
        answers.append(server.client.post(f"/v1/videos/{job.id}/prompt", json={"prompt": "a green star"}).status_code)

    at_step(monkeypatch, 1, say)
    server = Server(tmp_path / "queue", *settings, works=True)
    try:
        video = server.post(prompt=TEXTS[0].removeprefix("prompt="))
        server.finished(video["id"])
        assert answers == [200]
    finally:
        server.close()
        session.clear()
    folder = server.queue.folder / video["id"]
    (row,) = Prompts(folder).applied()
    assert row.endswith(": a green star")
    carried = read_metadata(folder / "video.mp4")
    assert carried["config"]["live.prompts"] == [row]
    values = results(folder)["latents"]
    expected = results(run_into(tmp_path / "again", *settings, NO_DECODE, f"live.prompts=['{row}']"))["latents"]
    assert relative_error(values, expected) < 1e-4
    without = results(run_into(tmp_path / "without", *settings, NO_DECODE))["latents"]
    assert relative_error(values, without) > 1e-3


def test_many_prompts_are_taken_over_and_nothing_else_is_said(tmp_path, caplog):
    """Their list is longer than an override may be, and the stored value is what counts."""
    rows = [f"{second}: a red circle {'that moves ' * 30}" for second in range(3, 24, 3)]
    arguments = rewrite([*LIVE, "resolution.frames=405", trust.override("live.prompts", rows)])
    outputs.write_config(tmp_path, outputs.settle(make_config(*arguments)), arguments)
    again = [f"resume={tmp_path}"]
    assert list(take_over(make_config(*again), again).live.prompts) == rows
    assert "not taken over" not in caplog.text


def test_other_videos_have_no_stream(tmp_path):
    made = Server(tmp_path / "queue")
    try:
        video = made.post(prompt="a red circle")
        assert video["stream"] is None
        answer = made.get(f"/v1/videos/{video['id']}/stream", 409)
        assert answer.json()["error"]["code"] == "not_live"
    finally:
        made.close()


# ---------------------------------------------------------------- refused


REFUSED = {
    "pipeline=t2v": "live=self_forcing: pipeline=t2v makes a video in one piece",
    "live.chunk=null": "has no chunks; choose live=self_forcing",
    "guidance_scale=4": "keeps keys and values of the prompt alone",
    "guider=nag": "guider.nag=11.0: pipeline=live knows the prompt alone; use guider=cfg",
    "adapter.mode=beside": "has no strengths for its steps; use adapter.mode=merge",
    "scheduler=unipc cache=easycache": "cache=easycache: pipeline=live computes every step",
    "resolution.frames=17": "nearest 13 or 21",
    "live.chunk=0": "live.chunk=0: must be at least 1",
    "live.window=5": "live.window=5: must be of whole chunks, 2 and then 2 each",
    "live.window=4 live.sink=4": "live.sink=4: leaves no chunk",
    "live.first=1 live.window=3 resolution.frames=25": "live.sink=0: the first chunk's slot is too small",
    "live.positions=some": "live.positions=some: unknown",
    "live.context_noise=-1": "live.context_noise=-1.0: a time from 0",
    "resolution.frames=261 model.max_frames=300": "RoPE's table of model=demo has 64 positions",
    "model.noise_dtype=bfloat16": "draws its noise in float32",
    "attention.self.window=9": "has live.window",
    "attention.self.smooth_keys=true": "chunks have no common mean",
    "mesh=cpu_8 sharding=tp_ring": "a ring shares keys that must be kept",
    "mesh=cpu_8 sharding=sequence sharding.attention.groups=[1,1]": "keeps all heads of a chunk together",
    "preview_every=1": "writes the video itself",
    "live.reencode=true": "live.reencode=true: encodes the first of a window that is read anew",
    "live.reencode=true live.rebuild=true live.window=4 stages=[text,live]": "needs decoded pictures, and stages=",
    "live.prompts=[now]": "'now' is not a second, a colon and a prompt",
    "live.prompts=['1:a','1.1:b']": "each needs a chunk of its own",
    "live.prompts=['9:a']": "one begins at 9.0 seconds, and no chunk of 2.625 seconds begins so late",
    "task=tune": "task=tune: not with pipeline=live",
    "model.experts=[transformer,transformer_2] model.boundary=0.8": "keeps keys and values of one",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_does_not_go_with_chunks_is_refused(change):
    arguments = [*tiny.model("text"), *LIVE, "resolution.frames=21", *change.split()]
    with pytest.raises(ConfigError, match=re.escape(REFUSED[change])):
        validate(make_config(*arguments))


def test_a_family_without_chunks_is_refused():
    arguments = ["model=hunyuan15_t2v_480p", "pipeline=live", "live=self_forcing", "prompt=a"]
    with pytest.raises(ConfigError, match=r"videos of model\.family=hunyuan15 are made in one piece"):
        validate(make_config(*arguments))
