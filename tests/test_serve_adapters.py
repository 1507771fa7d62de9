"""The owner's folder of adapters: what is offered, and videos that name them one after the other."""
import json
import os
import signal
import subprocess
import sys
import textwrap

import openai
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests import lora, tiny
from tests.conftest import ROOT, SMALL, make_config, results, run_into
from tests.serving import DEADLINE, Server
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.runtime import weights as loading
from wan_torchax.session import session

HOSTILE = "<script>alert(1)</script>\n\x1b[2J" + "ab " * 500
COMMON = [*SMALL, *tiny.model(), "preview_every=0", "output.keep_frames=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two that fit, with words and a picture; one of another model, a picture alone, and a file that is none."""
    place = tmp_path_factory.mktemp("adapters")
    weights = load_file(tiny.checkpoint("text") / "transformer" / "diffusion_pytorch_model.safetensors")
    tags = {"a": {"sketch ": 9, "line": 4}, "b": {"ink": 7, "rare": 1}}
    said = {"my style-1": {"ss_tag_frequency": json.dumps(tags)}, "other": {"modelspec.trigger_phrase": HOSTILE}}
    for seed, (name, metadata) in enumerate(said.items()):
        file = place / f"{name}.safetensors"
        lora.Learned(weights, seed=seed, top=False).save(file, **lora.FORMATS["ComfyUI"])
        save_file(load_file(file), file, metadata)
    Image.new("RGB", (8, 8), "red").save(place / "other.preview.png")
    save_file({"blocks.0.attn1.to_q.lora_A.weight": weights["blocks.0.attn1.to_q.weight"][:2],
               "blocks.0.attn1.to_q.lora_B.weight": weights["blocks.0.attn1.to_q.weight"][:8, :2].contiguous()},
              place / "misfit.safetensors")
    (place / "broken.safetensors").write_bytes(b"\xff" * 40)
    (place / "alone.png").write_bytes(b"x")
    return place


@pytest.fixture
def idle(tmp_path, folder):
    made = Server(tmp_path / "queue", *COMMON, f"serve.adapters={folder}")
    yield made
    made.close()


def test_those_that_fit_are_offered_with_words_and_pictures(idle, folder):
    style, other = idle.get("/v1/adapters").json()["data"]
    assert style == {"id": "my_style_1", "object": "adapter", "trigger_words": "sketch, ink, line", "picture": None}
    assert other["id"] == "other" and len(other["trigger_words"]) <= 120 and other["trigger_words"].isprintable()
    assert idle.get(other["picture"]).content == (folder / "other.preview.png").read_bytes()
    for path in ("/v1/adapters/my_style_1/picture", "/v1/adapters/alone/picture", "/v1/adapters/..%2Falone/picture"):
        idle.get(path, 404)
    page = idle.get("/").text
    assert 'name="adapter.my_style_1"' in page and "sketch, ink, line" in page and "misfit" not in page
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_a_request_names_them_and_nothing_else(idle, folder):
    video = idle.post(prompt="a", extra_body={"adapter.my_style_1": 0.5, "adapter.other": -1})
    values = idle.queue.get(video["id"]).request["values"]
    assert values["adapter.my_style_1.strength"] == 0.5
    overrides = idle.base.overrides_for(values, {})
    assert make_config(*overrides).adapter.other == {"path": str(folder / "other.safetensors"), "strength": -1}
    for fields, message in (
        ({"adapter.misfit": 1}, "adapter=misfit: not served here; one of: my_style_1, other"),
        ({"adapter.other.path": "/etc/passwd"}, "not served here"),
        ({"adapter.other": "/etc/passwd"}, "adapter.other.strength=/etc/passwd: must be"),
        ({"adapter.other": 11}, "adapter.other.strength=11"),
    ):
        answer = idle.post(400, prompt="a", **fields)["error"]["message"]
        assert message in answer and str(folder) not in answer, answer


def test_a_folder_that_is_none_is_told(tmp_path):
    with pytest.raises(ConfigError, match="serve.adapters=.*none: no such folder"):
        validate(make_config("task=serve", f"serve.adapters={tmp_path / 'none'}"))


CASES = [{}, {"adapter.other": 0.8}, {"adapter.other": 0.3, "adapter.my_style_1": -0.5}, {}]


def alone(folder, adapters, chosen, *overrides):
    """The frames of a run of its own."""
    rows = [f"adapter.{key.partition('.')[2]}={{path: '{adapters / (file + '.safetensors')}', strength: {chosen[key]}}}"
            for key, file in (("adapter.my_style_1", "my style-1"), ("adapter.other", "other")) if key in chosen]
    session.clear()
    return results(run_into(folder, *COMMON, "prompt=a red circle", "seed=7", *rows, *overrides))["frames"]


@pytest.mark.system
@pytest.mark.parametrize("mode", ["merge", pytest.param("beside", marks=pytest.mark.full)])
def test_openais_client_changes_adapters_while_videos_wait(tmp_path, folder, monkeypatch, mode):
    """All are queued before the first is made; each is the video of a run of its own, and weights are read once."""
    chosen, reads, load = [f"adapter.mode={mode}"], [], loading.load
    expected = [alone(tmp_path / str(number), folder, case, *chosen) for number, case in enumerate(CASES[:-1])]
    session.clear()
    monkeypatch.setattr(loading, "load", lambda specs, *rest: (reads.append(set(specs)), load(specs, *rest))[1])
    server = Server(tmp_path / "queue", *COMMON, *chosen, f"serve.adapters={folder}", works=True)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)
        videos = [client.videos.create(prompt="a red circle", extra_body={"seed": 7} | case) for case in CASES]
        assert {server.finished(video.id)["status"] for video in videos} == {"completed"}
    finally:
        server.close()
    made = [results(server.queue.folder / video.id)["frames"] for video in videos]
    for frames, other in zip(made, [*expected, expected[0]]):
        assert (frames == other).all()
    assert len({frames.tobytes() for frames in made}) == len(CASES) - 1
    transformer = [names for names in reads if any("attn2" in name for name in names)]
    norms = [names for names in transformer if "blocks.*.norm2.weight" in names]
    assert len(norms) == 1 and len(transformer) == len(CASES), "what no adapter changes is read once"
    session.clear()


@pytest.mark.system
def test_a_worker_killed_while_adapters_change_leaves_the_next_one_the_right_weights(tmp_path, folder):
    arguments = [*COMMON, f"serve.adapters={folder}"]
    waiting = Server(tmp_path / "queue", *arguments)
    names = [waiting.post(prompt="a red circle", seed=7, **case)["id"] for case in CASES[:2]]
    waiting.close()
    program = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from tests.serving import Server
        from wan_torchax.runtime import weights
        load_one, made = weights.load_one, []

        def fatal(name, specs, files, changes, arrive):
            made.append(name)
            if changes and len(made) % 5 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return load_one(name, specs, files, changes, arrive)

        weights.load_one = fatal
        Server(Path({str(tmp_path / 'queue')!r}), *{arguments!r}, works=True)
        signal.pause()
    """)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, timeout=DEADLINE, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [bool(waiting.queue.state(waiting.queue.get(name)).is_over) for name in names] == [True, False]
    expected = alone(tmp_path / "expected", folder, CASES[1])
    session.clear()
    server = Server(tmp_path / "queue", *arguments, works=True)
    try:
        assert {server.finished(name)["status"] for name in names} == {"completed"}
    finally:
        server.close()
    assert (results(tmp_path / "queue" / names[1])["frames"] == expected).all()
    session.clear()
