"""What others' servers have too: a video in one call, pictures, their names of fields; and what the page asks for."""
import base64
import io
import json

import openai
import pytest
from PIL import Image

from tests import tiny
from tests.conftest import SMALL, make_config
from tests.serving import DEADLINE, Server, connect, wait_for
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.serve import api, estimate, page, requests
from wan_torchax.serve.errors import Refused
from wan_torchax.serve.gallery import read_run
from wan_torchax.serve.queue import append
from wan_torchax.session import session


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


@pytest.fixture
def pictured(tmp_path):
    """One that starts from pictures, and has no worker."""
    made = Server(tmp_path / "queue", *SMALL, "model=demo_i2v")
    yield made
    made.close()


def picture(colour: str = "red") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(content, "PNG")
    return content.getvalue()


# ---------------------------------------------------------------- routes of SGLang and vLLM-Omni


def test_a_video_in_one_call(server):
    fields = {"prompt": "a red circle", "num_inference_steps": "1"}
    answer = server.client.post("/v1/videos/sync", data=fields, timeout=DEADLINE)
    assert answer.status_code == 200 and answer.headers["content-type"] == "video/mp4"
    identifier = answer.headers["x-video-id"]
    assert answer.content == (server.queue.folder / identifier / "video.mp4").read_bytes()
    video = server.get(f"/v1/videos/{identifier}").json()
    assert video["url"] == f"/v1/videos/{identifier}/content" and video["media_type"] == "video/mp4"
    assert server.get(video["url"]).content == answer.content
    assert "resolution.width=50" in server.client.post("/v1/videos/sync", json={"prompt": "a", "width": 50}).text


def test_who_does_not_wait_does_not_want_it(idle):
    head = f"POST /v1/videos/sync HTTP/1.1\r\nHost: {idle.url[7:]}\r\nContent-Type: application/json\r\n"
    with connect(idle) as client:
        client.sendall(f'{head}Content-Length: 15\r\n\r\n{{"prompt": "a"}}'.encode())
        wait_for(idle.queue.jobs)
    wait_for(lambda: not idle.queue.jobs())


@pytest.mark.system
def test_openais_client_makes_pictures(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)
    made = client.images.generate(prompt="a red circle", n=2, size="64x80", extra_body={"steps": 1, "seed": 5})
    pictures = [Image.open(io.BytesIO(base64.b64decode(one.b64_json))) for one in made.data]
    assert [one.size for one in pictures] == [(64, 80)] * 2 and pictures[0].tobytes() != pictures[1].tobytes()
    assert made.size == "64x80" and made.output_format == "png"
    seeds = {job.request["seed"] for job in server.queue.jobs() if job.request["frames"] == 1}
    assert seeds == {5, 6}
    said = dict(size="64x80", response_format="url", quality="standard")
    linked = client.images.generate(prompt="a", extra_body={"steps": 1}, **said)
    assert server.get(linked.data[0].url).headers["content-type"] == "image/png"


@pytest.mark.parametrize("fields, words", [
    ({"n": 11}, "n=11: must be from 1 to 10"), ({"output_format": "webp"}, "output_format=webp: unknown; one of: png"),
    ({"quality": "hd"}, "quality=hd: unknown"), ({"frames": 6}, "resolution.frames=6"),
    ({"stesp": 1}, "nearest: steps"),
])
def test_pictures_that_cannot_be_made_are_refused(idle, fields, words):
    answer = idle.client.post("/v1/images/generations", json={"prompt": "a"} | fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert not idle.queue.jobs()


def test_a_null_is_what_is_not_said_of_pictures_too(idle, monkeypatch):
    async def finished(request, jobs):
        """Nobody makes them."""

    monkeypatch.setattr(api, "finished", finished)
    said = {"prompt": "a", "n": None, "frames": None, "steps": None, "response_format": None}
    assert idle.client.post("/v1/images/generations", json=said).status_code == 200
    (job,) = idle.queue.jobs()
    assert job.request["frames"] == 1


def test_pictures_are_all_taken_or_none(tmp_path):
    full = Server(tmp_path / "queue", *SMALL, "serve.queue_limit=2")
    try:
        assert full.client.post("/v1/images/generations", json={"prompt": "a", "n": 3}).status_code == 429
        assert not full.queue.jobs()
    finally:
        full.close()


def test_fields_of_others_mean_the_same(idle):
    said = {"width": "64", "height": "80", "num_frames": 9, "num_inference_steps": 2, "n": 1, "user": "somebody"}
    first = idle.post(prompt="a", extra_params={"seed": 4, "flow_shift": 2.5}, **said)
    form = {"prompt": "a", "extra_body": json.dumps({"seed": 4, "flow_shift": 2.5})} | said
    second = idle.client.post("/v1/videos", data=form).json()
    for video in (first, second):
        values = idle.queue.get(video["id"]).request["values"]
        assert values["resolution.flow_shift"] == 2.5 and values["seed"] == 4
        assert (video["size"], video["frames"], video["steps"]) == ("64x80", 9, 2)
    nested = idle.client.post("/v1/videos", json={"extra_body": {"prompt": "a", "seed": 4}}).json()
    again = idle.client.post(f"/v1/videos/{nested['id']}/remix", json={"prompt": "b"}).json()
    assert (again["prompt"], again["seed"]) == ("b", 4)


@pytest.mark.parametrize("fields, words", [
    ({"n": 2}, "one video a request"), ({"extra_body": "[1]"}, "extra_body: must be a JSON object"),
    ({"extra_body": {"seed": 1}, "seed": 1}, "seed: given twice"),
    ({"steps": 3, "num_inference_steps": 4}, "num_inference_steps: given twice, once as steps"),
    ({"size": "64x64", "width": 64}, "give one of the two"), ({"image": [[[]]]}, "upload a file"),
    ({"extra_params": {"model.path": "/etc"}}, "no such field"),
    ({"video_url": "http://127.0.0.1/a.mp4"}, "upload a file"),
])
def test_what_they_cannot_mean_here_is_refused(idle, fields, words):
    assert words in idle.post(400, prompt="a", **fields)["error"]["message"]


def test_references_come_by_any_of_their_names(tmp_path, pictured):
    link = "data:image/png;base64," + base64.b64encode(picture()).decode()
    for name, value in (("reference_url", link), ("image_reference", {"image_url": link})):
        job = pictured.queue.get(pictured.post(prompt="a", **{name: value})["id"])
        assert (job.folder / "inputs" / "image.png").read_bytes() == picture()
    form = {"prompt": "a", "image_reference": json.dumps({"image_url": link})}
    assert pictured.client.post("/v1/videos", data=form).status_code == 200
    twice = pictured.client.post("/v1/videos", json={"prompt": "a", "image": link, "reference_url": link})
    assert twice.status_code == 400 and "reference_url: given twice" in twice.text
    (tmp_path / "inputs").mkdir()
    requests.write_files(tmp_path, {"input_reference": [b"\0\0\0\x18ftypmp42"]})
    assert [path.name for path in (tmp_path / "inputs").iterdir()] == ["video.mp4"], "a video is one for video-to-video"


# ---------------------------------------------------------------- what a server offers of its own accord


def test_adapters_that_lie_here_and_fit_are_offered(idle):
    assert idle.base.choices == {"adapter": ["none", "demo_4step", "demo_outline"]}
    video = idle.post(prompt="a", adapter="demo_4step", frames=5)
    assert video["steps"] == 4
    assert "not served here" in idle.post(400, prompt="a", adapter="lightx2v_t2v_21")["error"]["message"]


def test_recipes_come_with_the_adapter_they_are_for(tmp_path, monkeypatch):
    from wan_torchax.serve import choices

    monkeypatch.setattr(choices, "adapter_of", {"wan21_t2v_4step": "demo_4step"}.get)
    assert choices.at_hand(make_config())["sampling"] == ["wan21_t2v_4step"]
    assert choices.at_hand(make_config(*tiny.model())) == {}, "what does not fit is not offered"
    assert choices.at_hand(make_config("model=wan21_t2v_14b")) == {}, "nor what nobody has looked at"


def test_an_owner_can_offer_less(tmp_path):
    server = Server(tmp_path / "queue", *SMALL, "+serve.choices.adapter=[none]")
    try:
        assert "not served here" in server.post(400, prompt="a", adapter="demo_4step")["error"]["message"]
    finally:
        server.close()


def test_every_recipe_names_an_adapter_of_conf_or_none():
    from wan_torchax.config.commandline import options
    from wan_torchax.serve import choices

    named = {choices.adapter_of(name) for name in options("sampling")}
    assert "lightx2v_t2v_21" in named and named - {None} <= set(options("adapter"))


# ---------------------------------------------------------------- what the page asks for


def asked(server, files=None, **fields) -> dict:
    return server.client.post("/page/estimate", data={"prompt": "a"} | fields, files=files).json()


def test_the_page_has_no_words_of_the_command_line(pictured):
    assert asked(pictured) == {"missing": "Choose a picture to start from first."}
    files = {"image": ("photo.jpg", picture())}
    assert asked(pictured, files, size="50x64")["problem"] == "Width 50: must be a multiple of 16; nearest 48 or 64"
    assert asked(pictured, files, frames="6")["problem"] == "Frames 6: must be 4n+1; nearest 5 or 9"
    both = asked(pictured, files, steps="0", guidance_scale="99")["problem"]
    assert both.splitlines()[0].startswith("Steps 0: must be from 1 to 1000") and "Guidance 99" in both
    broken = asked(pictured, {"image": ("photo.jpg", picture()[:20])})["problem"]
    assert "=" not in broken and "photo" not in broken
    answer = pictured.client.post("/page/videos", data={"prompt": "a"})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "Choose a picture to start from first."
    assert pictured.client.post("/page/videos", data={"prompt": "a"}, files=files).json()["status"] == "queued"
    assert not [word for word in ("pipeline=", "resolution.", "seed=") if word in pictured.get("/").text]


def test_a_damaged_video_has_no_last_frame(tmp_path):
    (tmp_path / "video.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with pytest.raises(Refused, match="the last frame cannot be read"):
        page.last_frame(tmp_path / "video.mp4")


def test_words_of_a_form_are_whole():
    said = page.worded("2 problems in the configuration:\n  - image=image.png: too small\n  - prompt.text: has a NUL")
    assert said == "Picture: too small\nPrompt: has a NUL"
    assert page.worded("steps=20: scheduler.sigmas are 4 steps; steps=4, or leave it out").startswith("Steps 20: noise")
    assert page.worded("the disk is full") == "the disk is full"


def test_a_choice_brings_its_own_numbers(idle):
    """Of an adapter for four steps, the form shows four steps."""
    usual, few = asked(idle)["values"], asked(idle, adapter="demo_4step")["values"]
    assert (usual["steps"], usual["guidance_scale"], usual["size"]) == (3, 4.0, "64x64")
    assert (few["steps"], few["guidance_scale"]) == (4, 1.0), "also where the owner said steps=3"
    assert asked(idle, adapter="demo_outline")["values"] == usual


def test_every_video_of_the_queue_has_its_time_left(idle):
    ids = [idle.post(prompt=text, steps=10, frames=frames)["id"] for text, frames in (("a", 5), ("b", 5), ("c", 9))]
    jobs = [idle.queue.get(identifier) for identifier in ids]
    assert set(left_of(idle, jobs)) == {None}, "nothing was made here yet"
    for step in (1, 2, 3):  # two seconds a step
        event = {"event": "step", "step": step, "steps": 10, "progress": step, "time": 100.0 + 2 * step}
        with (jobs[0].folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
    first, second, third = left_of(idle, jobs)
    assert (first, second) == (14, 34) and third > 54, "those that wait, wait for those before them"
    append(jobs[0].folder, {"event": "step", "step": 1, "steps": 10, "progress": 3})
    assert left_of(idle, jobs)[0] is None, "it was begun again: one step says nothing yet"


def left_of(server, jobs) -> list:
    left = estimate.seconds_left(server.queue, jobs, server.base.config)
    shown = page.shown_queue(server.front)
    assert [video["seconds_left"] for video in shown] == [left[job.id] for job in jobs]
    return list(left.values())


def test_a_finished_video_is_what_others_are_judged_by(server):
    server.finished(server.post(prompt="a", steps=3)["id"])
    pace = estimate.last_pace(server.queue, server.base.config)
    plan = asked(server, steps="7")
    assert plan["source"] == "measured" and plan["step_seconds"] > 0
    assert plan["seconds"] == pytest.approx(pace.seconds(estimate.step_flops(server.base.config), 7))


def test_a_run_brings_its_pictures_and_choices_along(tmp_path, generate):
    folder = generate("scheduler=euler", folder="made")
    (folder / "inputs").mkdir()
    for name in ("image.png", "references.0.webp", "references.1.webp", "video.html"):
        (folder / "inputs" / name).write_bytes(picture())
    (folder / "inputs" / "mask.png").symlink_to("/etc/passwd")
    run = read_run(folder)
    assert run["inputs"] == {"image": ["image.png"], "references": ["references.0.webp", "references.1.webp"]}
    assert run["choices"]["scheduler"] == "euler" and run["flow_shift"]
    server = Server(tmp_path / "queue", *SMALL, f"serve.gallery=[{tmp_path}]")
    try:
        shown, = server.get("/page/runs").json()["data"]
        assert server.get(f"{shown['files']}/image.png").content == picture()
        for name in ("video.html", "mask.png", "config.yaml", "..%2Fconfig.yaml", "metrics.json"):
            server.get(f"{shown['files']}/{name}", 404)
    finally:
        server.close()


@pytest.mark.parametrize("overrides", [[], ["model=demo_i2v"], ["model=wan21_t2v_14b", "resolution=480p"]])
def test_the_page_shows_the_model_and_examples_for_it(overrides):
    config = make_config(*overrides)
    texts = page.examples(config)
    assert len(texts) >= 3 and all(texts)
    demo = config.model.name.startswith("demo")
    assert demo == any(word in " ".join(texts) for word in ("star", "heart", "ball"))


def test_only_objects_are_taken_apart():
    assert requests.plain({"a": 1, "extra_body": {"b": 2}, "extra_json": None}) == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match="extra_params: must be a JSON object"):
        requests.plain({"extra_params": "{"})


# ---------------------------------------------------------------- models of people who move


@pytest.mark.parametrize("model, shown", [
    ("wan22_s2v_14b", {"microphone"}), ("wan22_animate_14b", {"camera"}),
    ("wan22_animate2_14b", {"camera", "driving_prompt"}), ("wan22_fun_camera_a14b", {"move"}),
    ("wan21_t2v_14b", set()),
])
def test_the_page_asks_for_what_the_model_takes(model, shown, tmp_path):
    server = Server(tmp_path / "queue", f"model={model}")
    try:
        text = server.get("/").text
    finally:
        server.close()
    marks = {
        "microphone": 'data-device="microphone"', "camera": 'data-device="camera"', "move": 'class="example move"',
        "driving_prompt": 'name="driving_prompt"',
    }
    assert {name for name, mark in marks.items() if mark in text} == shown


@pytest.mark.parametrize("model, sizes, frames", [
    ("wan22_s2v_14b", ["auto", "1152x640", "640x1152", "832x832"], None),
    ("wan22_animate_14b", ["auto", "1280x720", "720x1280", "960x960"], None),
    ("wan21_i2v_14b_480p resolution=auto", ["auto", "848x480", "480x848", "624x624"], 81),
])
def test_size_and_length_are_those_of_the_files(model, sizes, frames):
    """Unless somebody says another; before there are any, the page has nothing to say."""
    config = make_config("task=serve", *f"model={model}".split())
    validate(config)
    assert page.sizes(config) == sizes
    (field,) = [number for number in page.numbers(config) if number.name == "frames"]
    assert field.value == frames
    size = ["resolution.height=512", "resolution.width=768", "resolution.frames=33"]
    said = make_config(*f"model={model}".split(), *size)
    assert page.sizes(said)[0] == "768x512"
    assert [number.value for number in page.numbers(said) if number.name == "frames"] == [33]


def test_a_live_videos_length_is_whole_chunks():
    config = make_config("task=serve", "model=demo_live")
    (field,) = [number for number in page.numbers(config) if number.name == "frames"]
    assert (field.least, field.step, field.help) == (5, 8, "5, and 8 for each further chunk")
    assert (field.value - field.least) % field.step == 0
