"""task=serve: the API as OpenAI's client knows it, strangers at the door, a queue that forgets nothing."""
import errno
import gc
import io
import json
import os
import random
import shutil
import socket
import threading
import time
import tracemalloc
import weakref

import numpy
import openai
import pytest
from omegaconf import OmegaConf
from PIL import Image
from safetensors.numpy import load_file

from tests import given
from tests.conftest import ROOT, SMALL, make_config
from tests.serving import Server, at_step, connect, wait_for
from wan_torchax.config import clips, inputs, validation
from wan_torchax.config.commandline import compose
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.events import Stepped
from wan_torchax.records import results
from wan_torchax.serve import requests, worker
from wan_torchax.serve.processes import bind
from wan_torchax.serve.queue import Queue, append, read_state
from wan_torchax.session import session

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # OpenAI's, of its own video API
FUZZ_ROUNDS = int(os.environ.get("FUZZ_ROUNDS", 40))


@pytest.fixture(scope="module")
def server(tmp_path_factory, two_layers):
    """One that makes videos."""
    made = Server(tmp_path_factory.mktemp("queue"), *two_layers, works=True)
    yield made
    made.close()
    session.clear()


@pytest.fixture
def idle(tmp_path):
    """One without a worker: everything waits."""
    made = Server(tmp_path / "queue", *SMALL)
    yield made
    made.close()


# ---------------------------------------------------------------- OpenAI's client


@pytest.mark.system
def test_openais_client_makes_lists_downloads_and_deletes(server, generate, two_layers):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    first = client.videos.create_and_poll(prompt="a red circle", extra_body={"seed": 7})
    assert (first.status, first.progress, first.size, first.prompt) == ("completed", 100, "64x64", "a red circle")
    others = [client.videos.create(prompt="a blue square", seconds="0.6", extra_body={"steps": 1}) for _ in range(2)]
    assert others[0].seconds == "0.6" and others[1].status == "queued"
    listed = [video.id for video in client.videos.list(limit=1)]
    assert listed == [others[1].id, others[0].id, first.id], "page after page, the newest first"
    assert next(iter(client.videos.list(limit=2, order="asc"))).id == first.id
    folder = server.queue.folder / first.id
    assert client.videos.download_content(first.id).read() == (folder / "video.mp4").read_bytes()
    part = server.get(f"/v1/videos/{first.id}/content", 206, headers={"Range": "bytes=4-7"})
    assert part.content == b"ftyp", "a player asks for parts"
    for variant, name in (("thumbnail", "poster.png"), ("spritesheet", "contact_sheet.png")):
        assert client.videos.download_content(first.id, variant=variant).read() == (folder / name).read_bytes()
    remix = client.videos.remix(first.id, prompt="a green star")
    assert remix.remixed_from_video_id == first.id and remix.prompt == "a green star"
    assert server.finished(remix.id)["seed"] == 7
    deleted = client.videos.delete(first.id)
    assert deleted.deleted and deleted.object == "video.deleted" and not folder.exists()
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(first.id)
    assert server.finished(others[0].id)["frames"] == 5, "8 a second, and 4n+1 of them"
    run = generate("prompt=a green star", "seed=7")
    made = load_file(server.queue.folder / remix.id / "decode.safetensors")["frames"]
    assert numpy.array_equal(made, load_file(run / "decode.safetensors")["frames"]), "what run.py makes"


def test_events_tell_every_step_and_never_go_back(server):
    video = server.post(prompt="a red circle", steps=8)
    events = read_events(server, video["id"])
    names = [name for _, name, _ in events]
    assert names[0] == "queued" and names[-1] == "done" and "preview" in names
    assert [data["step"] for _, name, data in events if name == "step"] == list(range(1, 9))
    progress = [data["progress"] for _, _, data in events]
    assert progress == sorted(progress) and len(set(progress)) >= 8 and progress[-1] == 100
    behind = read_events(server, video["id"], {"Last-Event-ID": str(len(events) - 2)})
    assert [number for number, _, _ in behind] == [len(events) - 1, len(events)], "a client that was cut off goes on"
    server.get(f"/v1/videos/{video['id']}/preview")


@pytest.mark.system
def test_a_size_that_is_new_is_compiled_and_says_so(server):
    video = server.post(prompt="a red circle", steps=1, size="64x80")
    names = [name for _, name, _ in read_events(server, video["id"])]
    order = [names.index(name) for name in ("queued", "loading", "compiling", "step", "decoding", "writing", "done")]
    assert order == sorted(order)


def read_events(server, identifier, headers=()):
    events, current = [], {}
    with server.client.stream("GET", f"/v1/videos/{identifier}/events", headers=dict(headers)) as answer:
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line:
                current[name] = value
            elif "event" in current:
                events.append((int(current["id"]), current["event"], json.loads(current["data"])))
                current = {}
    return events


def test_delete_stops_a_video_within_two_steps_and_frees_the_worker(server, monkeypatch):
    steps, deleted_at = [], []

    def count(self, event, original=worker.Reporter.__call__):
        if isinstance(event, Stepped):
            steps.append(event.step)
        original(self, event)

    monkeypatch.setattr(worker.Reporter, "__call__", count)
    video = server.post(prompt="a red circle", steps=150)
    wait_for(lambda: len(steps) >= 3)
    answer = server.client.delete(f"/v1/videos/{video['id']}")
    deleted_at = len(steps)
    assert answer.json()["deleted"]
    server.get(f"/v1/videos/{video['id']}", 404)
    wait_for(lambda: not (server.queue.folder / video["id"]).exists())
    assert len(steps) <= deleted_at + 2
    assert server.finished(server.post(prompt="a red circle", steps=1)["id"])["status"] == "completed"


def test_what_is_not_there_is_said_in_openais_words(server):
    error = server.get("/v1/videos/video_000000000000/content", 404).json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == "not_found"
    assert server.get("/nowhere", 404).json()["error"]["type"] == "not_found_error"
    assert server.client.put("/v1/videos").status_code == 405
    video = server.finished(server.post(prompt="x", steps=1)["id"])
    assert "nearest: video" in server.get(f"/v1/videos/{video['id']}/content?variant=vide", 400).text
    assert server.get("/v1/models").json()["data"][0]["id"] == "demo"


def test_metrics_count_videos_stages_and_routes_by_template(server):
    server.finished(server.post(prompt="a", steps=2)["id"])
    text = server.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['wan_videos_total{end="completed"}']) >= 1 and float(lines["wan_step_seconds_count"]) >= 2
    assert float(lines['wan_part_seconds_count{part="denoise"}']) >= 1
    assert lines['wan_queue_length{status="queued"}'] == "0.0"
    assert 'route="/v1/videos/{id}"' in text and "video_" not in text


def test_small_answers_are_not_held_back():
    """asyncio has them wait 40 ms for more to send, unless it knows a socket to be TCP's."""
    with bind("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP


# ---------------------------------------------------------------- what a request may say


def refusal(*overrides):
    with pytest.raises(ConfigError) as error:
        validate(make_config(*SMALL, "prompt=a", *overrides))
    return str(error.value)


def test_bad_settings_get_the_message_that_run_py_prints(idle):
    for fields, overrides in (
        ({"size": "50x64"}, ["resolution.width=50"]),
        ({"frames": 6}, ["resolution.frames=6"]),
        ({"steps": 0, "guidance_scale": 99}, ["steps=0", "guidance_scale=99"]),
        ({"seconds": "60"}, ["resolution.frames=481"]),
    ):
        error = idle.post(400, prompt="a", **fields)["error"]
        assert error["message"] == refusal(*overrides) and error["type"] == "invalid_request_error"


STRANGE = [
    ({"stesp": 3}, "stesp: no such field; nearest: steps"),
    ({"model.path": "/etc"}, "no such field"),
    ({"compile.xla_flags": ["--x"]}, "no such field"),
    ({"resume": "/etc"}, "no such field"),
    ({"prompt.file": "/etc/passwd"}, "no such field"),
    ({"image": "/etc/passwd"}, "upload a file"),
    ({"input_reference": {"image_url": "http://127.0.0.1/x.png"}}, "upload a file"),
    ({"input_reference": {"file_id": "file_1"}}, "upload a file"),
    ({"input_reference": "data:image/png;base64,aGFsbG8="}, "not a file that is taken; send PNG, JPEG or WebP"),
    ({"model": "sora-2"}, "model=sora-2: not served here; one of: demo"),
    ({"scheduler": "euler"}, "scheduler: no such field"),
    ({"seed": "abc"}, "seed=abc: must be a whole number"),
    ({"seed": {"a": 1}}, "must be a whole number"),
    ({"size": "64 x 64"}, "write WIDTHxHEIGHT"),
    ({"seconds": "soon"}, "must be a number above 0"),
    ({"seconds": 1, "frames": 5}, "give one of the two"),
    ({"prompt": ""}, "prompt: must be a text"),
    ({"prompt": 5}, "prompt.text=5: must be"),
    ({"prompt": "a\0b"}, "NUL character"),
    ({"prompt": "x" * 32_001}, "1 to 32000 characters"),
]


def test_a_request_names_no_path_no_flag_and_no_code(idle):
    for fields, words in STRANGE:
        message = idle.post(400, **{"prompt": "a"} | fields)["error"]["message"]
        assert words in message and str(idle.queue.folder) not in message, message
    assert not list(idle.queue.folder.iterdir()), "nothing is left of them"


def test_seconds_are_the_nearest_frames_that_a_model_makes():
    config = make_config("resolution.fps=16")
    seconds = {4: 65, 5: 81, 7: 113, 8: 129, 0.01: 1, 4.1: 65, 4.2: 69}
    assert {second: requests.frames_for(second, config) for second in seconds} == seconds


def test_a_text_is_a_text(idle):
    text = "it costs ${oc.env:HOME} and 'quotes' = [1,2] \\${5"
    video = idle.post(prompt=text, negative_prompt="${x}")
    job = idle.queue.get(video["id"])
    config, _ = worker.configure(job, idle.base)
    assert video["prompt"] == config.prompt.text == text and config.prompt.negative == "${x}"


def test_what_requests_have_in_common_is_composed_and_checked_once(idle, monkeypatch):
    """Their texts and seeds are each one's own: another's are neither used nor taken for checked."""
    first = {"prompt": "a", "seed": 1, "steps": 7}
    idle.post(**first)
    monkeypatch.setattr(requests, "compose", None)
    monkeypatch.setattr(requests, "validate", None)
    jobs = [idle.queue.get(idle.post(**first | more)["id"]) for more in ({}, {"prompt": "${x}", "seed": 2})]
    configs = [worker.configure(job, idle.base)[0] for job in jobs]
    monkeypatch.undo()
    for job, config in zip(jobs, configs):
        fresh = compose(idle.base.overrides_for(job.request["values"], {}))
        assert config == fresh and OmegaConf.to_yaml(config) == OmegaConf.to_yaml(fresh)
    assert [config.prompt.text for config in configs] == ["a", "${x}"]
    assert "seed=-1" in idle.post(400, **first | {"seed": -1})["error"]["message"]
    own = worker.configure(idle.queue.get(idle.post(**first | {"negative_prompt": "b"})["id"]), idle.base)[0]
    assert (own.prompt.negative, configs[0].prompt.negative) == ("b", idle.base.config.prompt.negative)


def test_a_live_video_that_a_request_chooses_has_no_previews(tmp_path, monkeypatch):
    """Nor are they missing where the server's own videos are live."""
    for number, (own, chosen) in enumerate([("demo", "demo_live"), ("demo_live", "demo")]):
        server = Server(tmp_path / f"queue{number}", f"model={own}", f"+serve.choices.model=[{chosen}]")
        try:
            for fields, name in (({}, own), ({"model": chosen}, chosen)):
                job = server.queue.get(server.post(prompt="a ball", **fields)["id"])
                assert worker.configure(job, server.base)[0].preview_every == (name == "demo")
                monkeypatch.setattr(worker, "generate", lambda *_, **__: None)
                reporter = worker.Reporter(job, bool)
                worker.make(job, server.base, reporter)
                assert ("live" in reporter.bounds) == (name == "demo_live"), "progress is that of its own stages"
        finally:
            server.close()


def test_what_a_request_says_comes_before_the_owners_prompt_files(tmp_path):
    (tmp_path / "prompt.txt").write_text("a star")
    own = [f"{key}={tmp_path / 'prompt.txt'}" for key in ("prompt.file", "prompt.negative_file")]
    server = Server(tmp_path / "queue", *SMALL, *own)
    try:
        for fields, negative in (({}, "a star"), ({"negative_prompt": "a dog"}, "a dog")):
            job = server.queue.get(server.post(prompt="a ball", **fields)["id"])
            texts = inputs.with_texts(worker.configure(job, server.base)[0]).prompt
            assert (texts.text, texts.negative) == ("a ball", negative)
    finally:
        server.close()


def test_files_of_the_owner_are_looked_at_for_every_request_and_take_their_time(tmp_path, monkeypatch):
    """Only what requests bring has a limit; a file that goes away is missed."""
    file = tmp_path / "own.mkv"
    shutil.copyfile(given.clip("video"), file)
    server = Server(tmp_path / "queue", *SMALL, "pipeline=v2v", f"video={file}", "serve.decode_seconds=1")
    try:
        monkeypatch.setattr(clips, "within", None)
        for _ in range(2):
            worker.configure(server.queue.get(server.post(prompt="a")["id"]), server.base)
        file.unlink()
        assert "no such file" in server.post(400, prompt="a")["error"]["message"]
    finally:
        server.close()


def test_long_texts_of_requests_are_not_kept(idle):
    """Neither whole nor as what their parser makes of them."""
    for text in ("${x}" + "$a" * 1000, "b" * 30_000):
        tracemalloc.start()
        for number in range(4):
            idle.post(400, prompt=f"{number}{text}", seed=-1)
            gc.collect()
            if number == 0:
                before = tracemalloc.get_traced_memory()[0]
        kept = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert kept < 1e6, kept


def test_only_their_own_checks_look_at_what_requests_say():
    config = make_config()
    for key in validation.OWN:
        OmegaConf.update(config, key, -1 if key == "seed" else "a\0b")
    for check in {*validation.CHECKS, *validation.LATER_CHECKS} - {*validation.OWN_CHECKS}:
        assert not list(check(config)), check
    with pytest.raises(ConfigError, match="5 problems"):  # with a driving prompt where there is no driving video
        validation.validate_own(config)


def test_the_owner_offers_choices_and_a_request_takes_one(tmp_path):
    choices = {"scheduler": "unipc,euler", "preset": "t2v_demo_128_cpu_v2", "cache": "none,easycache",
               "adapter": "none,lightx2v_t2v_21"}
    offered = [f"+serve.choices.{group}=[{names}]" for group, names in choices.items()]
    server = Server(tmp_path / "queue", *SMALL, *offered)
    try:
        video = server.post(prompt="a", scheduler="euler", model="t2v_demo_128_cpu_v2", num_inference_steps=5)
        config, overrides = worker.configure(server.queue.get(video["id"]), server.base)
        assert config.scheduler.target == "FlowMatchEulerDiscreteScheduler" and config.steps == 5
        assert "preset=t2v_demo_128_cpu_v2" in overrides and video["model"] == "t2v_demo_128_cpu_v2"
        assert "one of: unipc, euler" in server.post(400, prompt="a", scheduler="deis")["error"]["message"]
        cached = server.queue.get(server.post(prompt="a", cache="easycache", adapter="none")["id"])
        assert worker.configure(cached, server.base)[0].cache.mode == "easycache"
        for fields in ({"cache": "magcache"}, {"adapter": "lightning_4step"}, {"preset": "t2v_14b_720p_v6e8_v1"}):
            assert "not served here" in server.post(400, prompt="a", **fields)["error"]["message"]
        assert [model["id"] for model in server.get("/v1/models").json()["data"]] == server.base.models
    finally:
        server.close()


def test_a_picture_comes_as_its_bytes_and_keeps_no_name(tmp_path):
    """Image to video: the picture is in the folder before the request is acknowledged, under a name of ours."""
    files = {"input_reference": ("../../evil.sh", picture(tmp_path), "text/x-sh")}
    model = ["pipeline=i2v", "model.architecture.transformer.in_channels=36"]
    server = Server(tmp_path / "queue", *SMALL, *model)
    try:
        answer = server.client.post("/v1/videos", data={"prompt": "a", "seed": "3"}, files=files)
        assert answer.status_code == 200, answer.text
        job = server.queue.get(answer.json()["id"])
        assert [path.name for path in (job.folder / "inputs").iterdir()] == ["image.png"]
        config, _ = worker.configure(job, server.base)
        assert config.image == str(job.folder / "inputs" / "image.png") and config.seed == 3
        remix = server.client.post(f"/v1/videos/{job.id}/remix", json={"prompt": "b"}).json()
        assert (server.queue.folder / remix["id"] / "inputs" / "image.png").is_file()
        assert "image: missing" in server.post(400, prompt="a")["error"]["message"]
        for length, status in ((20, 400), (200, 200)):  # without a header, and with one: that is all it looks at
            cut = {"input_reference": ("a.png", picture(tmp_path)[:length])}
            broken = server.client.post("/v1/videos", data={"prompt": "a"}, files=cut)
            assert broken.status_code == status and str(tmp_path) not in broken.text
        with pytest.raises(ConfigError, match="not a picture that Pillow reads"):
            worker.configure(server.queue.get(broken.json()["id"]), server.base)
    finally:
        server.close()


def test_a_picture_that_would_fill_the_memory_is_not_decoded(tmp_path):
    """Few bytes, and 900 million pixels; or 120 million, which Pillow itself would take."""
    server = Server(tmp_path / "queue", *SMALL, "pipeline=i2v", "model.architecture.transformer.in_channels=36")
    try:
        for side in (30_000, 11_000):
            bomb = io.BytesIO()
            Image.new("1", (side, side)).save(bomb, "PNG")
            files = {"input_reference": ("a.png", bomb.getvalue())}
            answer = server.client.post("/v1/videos", data={"prompt": "a"}, files=files)
            assert answer.status_code == 400 and not server.queue.jobs(), answer.text
    finally:
        server.close()


def picture(folder) -> bytes:
    path = folder / "photo.png"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    return path.read_bytes()


def test_text_to_video_takes_no_picture_and_says_so(idle, tmp_path):
    files = {"input_reference": ("a.png", picture(tmp_path))}
    answer = idle.client.post("/v1/videos", data={"prompt": "a"}, files=files)
    assert answer.status_code == 400 and "image=image.png: pipeline=t2v takes no such file" in answer.text


# ---------------------------------------------------------------- the door


def test_requests_that_are_no_requests(idle):
    post = idle.client.post
    assert post("/v1/videos", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert post("/v1/videos", content=b"[" * 90_000, headers={"content-type": "application/json"}).status_code == 400
    assert post("/v1/videos", content=b"a", headers={"content-type": "text/plain"}).status_code == 415
    for body in (b"", b"--b\r\n", b"--b\r\nContent-Disposition: form-data; name=prompt\r\n\r\nx", b"\xff" * 99):
        answer = post("/v1/videos", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
        assert answer.status_code == 400, answer.text
    no_boundary = post("/v1/videos", content=b"x", headers={"content-type": "multipart/form-data"})
    assert no_boundary.status_code == 400 and "message" in no_boundary.json()["error"]


def test_a_request_is_bounded_in_size_and_time(tmp_path):
    server = Server(tmp_path / "queue", *SMALL, "serve.upload_mb=0.05", "serve.upload_seconds=1")
    try:
        assert server.client.post("/v1/videos", json={"prompt": "x" * 60_000}).status_code == 413

        head = "POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with connect(server) as endless, pytest.raises(ConnectionError):
            endless.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            while True:  # it is the server that ends it
                endless.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        with connect(server) as half_open:
            half_open.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            assert b" 408 " in half_open.recv(1000)
    finally:
        server.close()


@pytest.fixture
def locked(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("first-key\n\nsecond-key\n")
    monkeypatch.setenv("WAN_TORCHAX_KEYS", "third-key")
    made = Server(tmp_path / "queue", *SMALL, f"serve.keys_file={tmp_path / 'keys'}")
    yield made
    made.close()


def test_without_a_key_there_is_nothing_to_see(locked):
    for path in ("/v1/videos", "/metrics", "/page/runs", "/page/queue", "/v1/models"):
        assert locked.get(path, 401).json()["error"]["code"] == "invalid_api_key"
        locked.get(path, 401, headers={"Authorization": "Bearer first-ke"})
    for key in ("first-key", "second-key", "third-key"):
        locked.get("/v1/videos", headers={"Authorization": f"Bearer {key}"})
    locked.get("/healthz")
    assert 'type="password"' in locked.get("/", 401).text


def test_the_page_signs_in_with_a_cookie(locked):
    wrong = locked.client.post("/login", data={"key": "no"})
    assert wrong.status_code == 303 and "set-cookie" not in wrong.headers
    right = locked.client.post("/login", data={"key": "second-key"})
    assert "HttpOnly" in right.headers["set-cookie"] and "SameSite=strict" in right.headers["set-cookie"]
    locked.get("/v1/videos")  # the client kept it
    assert "<textarea" in locked.get("/").text


def test_pages_of_other_sites_are_turned_away(idle, tmp_path):
    fields = {"prompt": "a"}
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example:8000"}, {"Origin": "null"}):
        assert idle.client.post("/v1/videos", data=fields, headers=headers).status_code == 403
    assert not idle.queue.jobs()
    assert idle.client.post("/v1/videos", data=fields, headers={"Origin": idle.url}).status_code == 200
    assert "access-control-allow-origin" not in idle.get("/healthz", headers={"Origin": idle.url}).headers
    friend = Server(tmp_path / "other", *SMALL, "serve.origins=[https://studio.example]")
    try:
        answer = friend.client.post("/v1/videos", data=fields, headers={"Origin": "https://studio.example"})
        assert answer.headers["access-control-allow-origin"] == "https://studio.example"
    finally:
        friend.close()


@pytest.mark.parametrize("override, words", [
    ("serve.host=0.0.0.0", "others can reach it, and there are no keys"),
    ("serve.port=70000", "must be from 1 to 65535"),
    ("+serve.choices.schedular=[unipc]", "serve.choices=schedular: unknown; nearest: scheduler"),
    ("+serve.choices.scheduler=[uni]", "nearest: unipc"),
    ("serve.queue_limit=0", "must be at least 1"),
    ("serve.keys_file=/nowhere", "cannot be read"),
])
def test_a_server_that_could_not_serve_is_not_started(override, words, monkeypatch):
    monkeypatch.delenv("WAN_TORCHAX_KEYS", raising=False)
    with pytest.raises(ConfigError, match=words):
        validate(make_config("task=serve", override))


def test_strangers_never_see_a_mistake_of_ours(idle):
    """FUZZ_ROUNDS=10000 asks ten thousand times."""
    chance, seen = random.Random(0), set()
    for _ in range(FUZZ_ROUNDS):
        method, path, headers, body = random_request(chance)
        status = idle.client.request(method, path, headers=headers, content=body, timeout=30).status_code
        assert status < 500, (method, path, headers, body)
        seen.add(status)
    assert {400, 404} <= seen
    idle.get("/healthz")


LINES = [f"&{new} [{','.join([f'*{old}'] * 8)}]" for old, new in zip("abcdefg", "bcdefgh")]
BOMB = f"[&a [x,x,x,x,x,x,x,x],{','.join(LINES)}]"  # two million when its aliases are followed


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


def random_request(chance):
    def junk():
        letters = (0x20, 0x41, 0x7F, 0xE9, 0x4E2D, 0x1F600, chance.randrange(0x250))
        return "".join(chr(chance.choice(letters)) for _ in range(9))

    values = (junk(), 7, -1, 10**30, 1.5, None, True, [], {}, [junk()], {junk(): junk()}, "64x64", "${x}", "../../etc",
              "\ud800", "9" * 5000, BOMB, "7 #/../../etc", nested(300), {"image_url": nested(300)},
              "data:image/png;base64,AA")
    names = (*requests.FIELDS, *requests.NESTED, *requests.ALIASES, "size", "seconds", "model", "n", "image", "preset",
             "resume", junk(), "\ud800")
    fields = {chance.choice(names): chance.choice(values) for _ in range(chance.randrange(5))}
    body = json.dumps(fields).encode("utf-8", "surrogatepass")
    if chance.random() < 0.3:
        body = bytes(chance.randrange(256) for _ in range(chance.randrange(200)))
    kinds = ("application/json", "multipart/form-data; boundary=b", "application/x-www-form-urlencoded", "é/;=")
    kind = chance.choice(kinds)
    if kind.startswith("multipart") and chance.random() < 0.7:
        start = "--b\r\nContent-Disposition: form-data; name="
        parts = (f'{start}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
        body = "".join(parts).encode("utf-8", "replace") + chance.choice((b"--b--\r\n", b"", b"--b"))
    identifier = chance.choice(("video_00", "video_" + "0" * 24, "%2e%2e", "..%2f..%2fetc", "%00", "a" * 300))
    ends = ("", f"/{identifier}", f"/{identifier}/content?variant=x", f"/{identifier}/events", f"/{identifier}/remix",
            "?limit=x", "?limit=-1&order=up", f"?limit={'9' * 5000}", f"?after={identifier}")
    others = ("estimate", "runs?start=x", f"runs/{identifier}/video.mp4", f"../static/{identifier}", "../login",
              "../v1/images/generations")
    path = f"/v1/videos{chance.choice(ends)}" if chance.random() < 0.8 else f"/page/{chance.choice(others)}"
    method = chance.choice(("POST", "POST", "POST", "GET", "DELETE", "PATCH", "HEAD"))
    headers = {"content-type": kind.encode(), "last-event-id": chance.choice(("", "x", "-1", "9" * 5000))}
    others = {"origin": "http://["}, {"host": "["}, {"range": f"bytes={'9' * 5000}-"}
    headers |= chance.choice(({}, {}, {}, *others))
    if chance.random() < 0.3:
        headers["idempotency-key"] = chance.choice(("k", "é", "x" * 4000)).encode()
    return method, path, headers, body


# ---------------------------------------------------------------- the queue on disk


def test_an_idempotency_key_never_makes_a_video_twice(idle):
    first = idle.post(key="k", prompt="a", seed=1)
    assert idle.post(key="k", prompt="a", seed=1)["id"] == first["id"]
    assert idle.post(409, key="k", prompt="b", seed=1)["error"]["code"] == "idempotency_conflict"
    made = []
    threads = [threading.Thread(target=lambda: made.append(idle.post(key="other", prompt="a")["id"])) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]
    assert len(made) == 4 and len(set(made)) == 1 and len(idle.queue.jobs()) == 2
    again = Queue(idle.queue.folder)  # another server, or this one after a kill
    assert again.get(first["id"]).request["values"]["seed"] == 1
    idle.client.delete(f"/v1/videos/{first['id']}")
    assert "deleted since" in idle.post(409, key="k", prompt="a", seed=1)["error"]["message"]


def test_a_full_queue_says_when_to_come_again(tmp_path):
    server = Server(tmp_path / "queue", *SMALL, "serve.queue_limit=2")
    try:
        first, _ = (server.post(prompt="a", key=str(number)) for number in range(2))
        answer = server.client.post("/v1/videos", json={"prompt": "a"})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert server.post(prompt="a", key="0")["id"] == first["id"], "one that was taken is no new one"
        server.client.delete(f"/v1/videos/{first['id']}")
        server.post(prompt="a")
        server.front.draining = True
        answer = server.client.post("/v1/videos", json={"prompt": "a"})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        server.get("/readyz", 503), server.get("/v1/videos")
    finally:
        server.close()


def test_a_full_disk_refuses_a_request_and_not_the_server(idle, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("wan_torchax.serve.queue.write_text", full)
        assert idle.post(507, prompt="a")["error"]["code"] == "disk_full"
    assert not list(idle.queue.folder.iterdir()) and idle.post(prompt="a")["status"] == "queued"


def test_a_video_that_fails_fails_alone(server, monkeypatch):
    """The disk is full when its result is to be kept, and there is room for no new file."""
    save = results.save

    def full(path, *rest):
        if path.stem == "denoise" and read_request(path.parent)["seed"] == 666:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(path, *rest)

    monkeypatch.setattr(results, "save", full)
    bad, good = server.post(prompt="a", seed=666, steps=1), server.post(prompt="a", seed=1, steps=1)
    assert server.finished(good["id"])["status"] == "completed"
    failed = server.get(f"/v1/videos/{bad['id']}").json()
    assert failed["status"] == "failed" and "the disk is full" in failed["error"]["message"]
    assert str(server.queue.folder.parent) not in failed["error"]["message"]
    assert read_events(server, bad["id"])[-1][1] == "done"
    server.get(f"/v1/videos/{bad['id']}/content", 409)


def test_a_video_without_memory_fails_alone(server, monkeypatch):
    def opened(resolved, *arguments, original=session.open):
        if resolved.config.seed == 666:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate 99 GiB")
        return original(resolved, *arguments)

    monkeypatch.setattr(session, "open", opened)
    bad, good = server.post(prompt="a", seed=666, steps=1), server.post(prompt="a", seed=1, steps=1)
    assert server.finished(good["id"])["status"] == "completed"
    failed = server.get(f"/v1/videos/{bad['id']}").json()
    assert failed["status"] == "failed" and "out of memory" in failed["error"]["message"]


def test_what_a_worker_has_prepared_is_freed_after_an_error(idle, monkeypatch):
    """Programs too, which cycles hold: a process that has no memory left has to give back what it has."""
    def make(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    session.clear()
    worker.prepare(idle.base, lambda event: None)
    programs = [weakref.ref(stage.programs) for stage in session.stages.values()]
    monkeypatch.setattr(worker, "make", make)
    job = idle.queue.get(idle.post(prompt="a", steps=1)["id"])
    worker.take([job], idle.queue, idle.base, lambda: False)
    gc.collect()
    alive = [made() for made in programs]
    gc.unfreeze()
    assert len(alive) == 3 and not any(alive)


@pytest.mark.system
def test_told_to_stop_a_worker_finishes_what_it_has_and_begins_nothing(tmp_path, two_layers, monkeypatch):
    """As between SIGTERM and the deadline."""
    server = Server(tmp_path / "queue", *two_layers, works=True)
    at_step(monkeypatch, 3, lambda: setattr(server, "ends", True))
    first, second = (server.post(prompt="a", steps=30)["id"] for _ in range(2))
    wait_for(lambda: not server.threads[1].is_alive())
    assert [server.get(f"/v1/videos/{name}").json()["status"] for name in (first, second)] == ["completed", "queued"]
    server.close()


def read_request(folder):
    return json.loads((folder / "request.json").read_text())


def test_a_parked_video_goes_on_behind_its_last_finished_stage(tmp_path, two_layers, monkeypatch):
    """As after SIGTERM: another worker takes it up, and encodes no text."""
    server = Server(tmp_path / "queue", *two_layers, works=True)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: setattr(server, "parks", True))
        video = server.post(prompt="a red circle", steps=150)
        wait_for(lambda: not server.threads[1].is_alive())
    parked = server.get(f"/v1/videos/{video['id']}").json()
    server.close()
    folder = server.queue.folder / video["id"]
    assert parked["status"] == "queued" and parked["progress"] > 0 and (folder / "text.safetensors").exists()
    content = read_request(folder)
    content["values"]["steps"] = 2  # as short as it goes; the text does not depend on it
    (folder / "request.json").write_text(json.dumps(content))
    again = Server(tmp_path / "queue", *two_layers, works=True)
    assert again.get(f"/v1/videos/{video['id']}").json()["progress"] >= parked["progress"]
    assert again.finished(video["id"])["status"] == "completed"
    again.close()
    seconds = json.loads((folder / "metrics.json").read_text())["seconds"]
    assert "denoise" in seconds and "text" not in seconds


def test_results_of_other_settings_are_made_again(tmp_path, generate, two_layers):
    server = Server(tmp_path / "queue", *two_layers)
    video = server.post(prompt="a red circle", steps=1)
    server.close()
    folder = server.queue.folder / video["id"]
    other = generate("prompt=something else", "stages=[text]")
    (folder / "text.safetensors").write_bytes((other / "text.safetensors").read_bytes())
    again = Server(tmp_path / "queue", *two_layers, works=True)
    assert again.finished(video["id"])["status"] == "completed"
    again.close()


def test_two_workers_that_share_a_folder_make_every_video_once(idle, monkeypatch):
    made = []

    def make(job, base, must_end):
        made.append(job.id)
        time.sleep(0.01)
        (job.folder / "metrics.json").write_text('{"seconds": {"total": 1}, "stages": []}')

    monkeypatch.setattr(worker, "make", make)
    wanted = [idle.post(prompt="a", seed=number)["id"] for number in range(6)]
    ends = []
    pairs = [(Queue(idle.queue.folder), idle.base, lambda: False, lambda: bool(ends)) for _ in range(2)]
    threads = [threading.Thread(target=worker.work, args=pair) for pair in pairs]
    [thread.start() for thread in threads]
    wait_for(lambda: not idle.queue.waiting())
    ends.append(True)
    [thread.join(30) for thread in threads]
    assert sorted(made) == sorted(wanted)


def test_a_video_that_takes_its_worker_down_is_given_up(idle):
    video = idle.post(prompt="a")
    folder = idle.queue.folder / video["id"]
    for crash in range(2):
        append(folder, {"event": "step", "progress": 40, "worker": "here:12"})
        append(folder, {"event": "step", "progress": 50})
        worker.give_up(idle.queue, "there:12", 2, "signal SIGKILL")
        assert read_state(folder).status == "in_progress", "another worker's"
        worker.give_up(idle.queue, "here:12", 2, "signal SIGKILL")
        assert read_state(folder).status == ("queued", "failed")[crash]
        assert read_state(folder).progress == 50
    assert "the worker ended 2 times" in read_state(folder).error


def test_what_a_killed_server_left_half_made_is_tidied(tmp_path):
    queue = Queue(tmp_path)
    for name in (".new-1", ".new-2", ".gone-video_1", "video_" + "0" * 24):
        (tmp_path / name).mkdir()
    (tmp_path / ("video_" + "0" * 24) / "cancel").touch()
    os.utime(tmp_path / ".new-1", (0, 0))
    queue.tidy()
    assert {path.name for path in tmp_path.iterdir()} == {".new-2"}, "that one may be another server's"
    folder = tmp_path / "video_1"
    folder.mkdir()
    append(folder, {"event": "queued", "progress": 0})
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "st')
    assert read_state(folder).status == "queued", "half a line is none"
    append(folder, {"event": "loading", "progress": 1})
    assert read_state(folder).phase == "loading"


# ---------------------------------------------------------------- the page


def test_the_page_is_made_from_what_the_server_offers(idle):
    page = idle.get("/")
    for name in ("frames", "steps", "guidance_scale", "seed", "fps", "flow_shift"):
        assert f'name="{name}"' in page.text
    assert 'value="64x64"' in page.text and 'max="81"' in page.text and 'type="file"' not in page.text
    policy = page.headers["content-security-policy"]
    files = [path for path in (ROOT / "wan_torchax").rglob("*") if path.suffix in (".js", ".css", ".html")]
    elsewhere = [path for path in files if "http://" in path.read_text() or "https://" in path.read_text()]
    assert "default-src 'self'" in policy and len(files) == 7 and not elsewhere


@pytest.mark.system
def test_the_gallery_finds_runs_of_run_py_too(server, generate, two_layers, tmp_path):
    run = generate("prompt=a Purple hexagon", "seed=4711", "steps=2")
    video = server.finished(server.post(prompt="a purple ring", seed=5, steps=2)["id"])
    gallery = Server(tmp_path / "queue", *SMALL, f"serve.gallery=[{run.parent},{server.queue.folder}]")
    try:
        def found(words):
            return gallery.get("/page/runs", params={"query": words}).json()["data"]

        assert {entry["seed"] for entry in found("purple steps=2")} == {4711, 5}
        (entry,) = found("HEXAGON seed=4711 model=demo")
        assert (entry["prompt"], entry["steps"], entry["width"]) == ("a Purple hexagon", 2, 64)
        assert gallery.get(f"{entry['files']}/video.mp4").content == (run / "video.mp4").read_bytes()
        gallery.get(f"{entry['files']}/config.yaml", 404), gallery.get("/page/runs/run_0/video.mp4", 404)
        assert found("purple seed=5")[0]["id"] == video["id"] and not found("zebra")
    finally:
        gallery.close()


def test_the_estimate_follows_the_work_and_tells_what_is_wrong(server):
    server.finished(server.post(prompt="a", steps=2)["id"])

    def ask(**fields):
        return server.client.post("/page/estimate", json={"prompt": "a"} | fields)

    short, long = ask(steps=4).json(), ask(steps=40, size="128x128").json()
    assert short["source"] == "measured" and short["frames"] == 5
    assert long["step_seconds"] > 2 * short["step_seconds"] and long["seconds"] > 40 * long["step_seconds"]
    assert "must be a multiple of 16" in ask(size="50x64").json()["problem"]
