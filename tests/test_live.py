"""Videos made chunk by chunk: equal to Self-Forcing's loop in torch, over windows and devices; what is refused."""
import json
import re
import signal
import subprocess
from concurrent.futures import wait
from functools import partial

import numpy
import pytest
import torch

from tests import causal, tiny
from tests.conftest import generate_into, make_config, results, run_into
from tests.fork import warm
from tests.reference import TEXTS, relative_error
from tests.serving import Server
from wan_torchax.config.clips import ffmpeg
from wan_torchax.config.geometry import Geometry
from wan_torchax.config.live import Layout, Window, later_prompt, prompt_chunks
from wan_torchax.config.schema import ConfigError, Live
from wan_torchax.config.validation import validate
from wan_torchax.events import Decoded, Part, Stepped
from wan_torchax.records.growing import Growing
from wan_torchax.records.media import Encoding, read_metadata
from wan_torchax.serve.queue import Prompts
from wan_torchax.serve.worker import configure
from wan_torchax.session import session
from wan_torchax.stages.sampling import scheduler_table

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


@pytest.mark.parametrize("model", ["self_forcing_1_3b", "longlive_1_3b"])
def test_models_have_their_published_times(model):
    config = make_config(f"model={model}", "resolution=480p", "prompt=a")
    validate(config)
    table = scheduler_table(config)
    assert numpy.allclose(table.timesteps, [1000, 937.5, 833.3333, 625]) and numpy.allclose(table.sigmas[3], 0.625)
    assert (config.pipeline.name, config.live.chunk, config.guidance_scale) == ("live", 3, 1)
    assert (config.live.window, config.live.sink) == ((12, 3) if model == "longlive_1_3b" else (21, 0))


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
    pytest.param([*WINDOW, "live.sink=0", *on("{dp:1,sp:1,tp:8}", "tp")], [2] * 6, id="tp", marks=SYSTEM),
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
    expected = causal.generate(causal.load(tiny.checkpoint("text")), config, text, sizes, values["latents"].shape)
    assert values["latents"].shape == expected.shape and expected.std() > 0.1
    for number, end in enumerate(numpy.cumsum(sizes)):
        chunk = slice(end - sizes[number], end)
        error = relative_error(values["latents"][:, :, chunk], expected[:, :, chunk])
        assert error < 1e-4, f"chunk {number}: {error}"


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


# ---------------------------------------------------------------- prompts that follow


LATER = ["resolution.frames=45", "live.window=6", "live.sink=2", "live.prompts=['3: a green star moving left']"]


@pytest.mark.parametrize("recache", [True, pytest.param(False, marks=FULL)])
def test_a_later_prompt_applies_from_its_chunk_on(tmp_path, recache):
    arguments = [*tiny.model("text"), *LIVE, NO_DECODE, *LATER, f"live.recache={recache}"]
    values, config = results(run_into(tmp_path, *arguments)), make_config(*arguments)
    assert prompt_chunks(config, GEOMETRY, Layout.of(config.live, 12)) == [0, 4], "frame 29 is at 3.6 seconds"
    texts, sizes = torch.tensor(values["embeddings"]), [2] * 6
    assert len(texts) == 2 and (texts[0] != texts[1]).any()
    model = causal.load(tiny.checkpoint("text"))
    expected = causal.generate(model, config, texts, sizes, values["latents"].shape, change=4)
    assert relative_error(values["latents"], expected) < 1e-4
    without = causal.generate(model, config, texts[:1], sizes, values["latents"].shape)
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
        wait(video.pending)
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

    arguments = [*tiny.model("text"), *LIVE, "resolution.frames=13"]
    generate_into(make_config(*arguments), tmp_path, arguments, listener=listener)
    first, second = (place for place, kind in enumerate(heard) if kind is Part)
    assert Decoded in heard[first:second] and Stepped in heard[first:second]
    assert there == [["live.0.safetensors"], ["live.0.safetensors", "live.1.safetensors"]]
    values = results(tmp_path)
    assert values["frames"].shape == (13, 64, 64, 3) and not list(tmp_path.glob("live.*.safetensors"))[1:]
    again = run_into(tmp_path / "again", *AGAIN, f"resume={tmp_path}", "stages=[decode]")
    assert (results(again)["frames"] == values["frames"]).all(), "decoded in one go"


KILLED = """
import os, signal
from wan_torchax.events import Stepped
from wan_torchax.tasks import generate

def listener(event):
    if isinstance(event, Stepped) and event.step == int(os.environ["LAST_STEP"]):
        os.kill(os.getpid(), signal.SIGKILL)

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
@pytest.mark.parametrize("step", [3, 6, 16])  # of 16, in four chunks
def test_a_killed_run_leaves_its_chunks_and_goes_on_with_the_same_bits(tmp_path, undisturbed, step):
    arguments, folder = [*tiny.model("text"), *LIVE, "resolution.frames=29"], tmp_path / "killed"
    process = warm().start([*arguments, f"hydra.run.dir={folder}"], {"LAST_STEP": str(step)}, KILLED)
    assert process.wait(120) == -signal.SIGKILL, process.output
    parts = sorted(folder.glob("live.*.safetensors"))
    assert len(parts) == (step - 1) // 4 and not (folder / "video.mp4").exists()
    if len(parts) > 1:  # the last one may still have been encoded
        shown = frames_in(folder / "live.mp4")
        assert len(shown) in [5 + 8 * (len(parts) - 1), 5 + 8 * (len(parts) - 2)]
        assert (shown == frames_in(undisturbed / "video.mp4")[: len(shown)]).all()
    process = warm().start([*AGAIN, f"resume={folder}", f"hydra.run.dir={tmp_path / 'again'}"])
    assert process.wait(120) == 0, process.output
    values, expected = results(tmp_path / "again"), results(undisturbed)
    assert all((values[name] == expected[name]).all() for name in ("latents", "frames"))
    assert encoded(tmp_path / "again" / "video.mp4") == encoded(undisturbed / "video.mp4")
    if parts:
        assert f"its first {len(parts)} parts are taken" in process.output


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
    assert request["values"]["live.prompts"] == ["2: a blue star"]
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
    for wrong in ({"prompt": " "}, {"prompt": "a", "seed": 1}, {"prompt": "a\0b"}, {}):
        assert server.client.post(path, json=wrong).status_code == 400
    prompts = Prompts(folder)
    assert prompts.apply(partial(later_prompt, 4 / 3)) == "a green star: ${oc.env:HOME}", "the last of them"
    assert prompts.apply(partial(later_prompt, 2)) is None
    assert prompts.applied() == ["1.333: a green star: ${oc.env:HOME}"]
    config, _ = configure(server.queue.get(video["id"]), server.base)
    assert list(config.live.prompts) == prompts.applied(), "after a crash"
    (folder / "metrics.json").write_text('{"step_seconds": [0.1]}')
    assert server.client.post(path, json={"prompt": "too late"}).status_code == 409


@pytest.mark.system
def test_a_prompt_given_while_a_video_is_made_is_part_of_it(tmp_path):
    settings = [*tiny.model("text"), *LIVE, "resolution.frames=29"]
    server = Server(tmp_path / "queue", *settings, works=True)
    try:
        video = server.post(prompt=TEXTS[0].removeprefix("prompt="))
        path = f"/v1/videos/{video['id']}/prompt"
        assert server.client.post(path, json={"prompt": "a green star"}).status_code == 200
        server.finished(video["id"])
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
    "preview_every=1": "writes the video itself",
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
