"""serve.batch: videos that wait and are of one shape are denoised as one, and each is what it would be alone."""
import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from tests.conftest import SMALL, make_config, metrics, resolve_here
from tests.serving import Server, at_step
from wan_torchax.runtime.jobs import find_job
from wan_torchax.serve import worker
from wan_torchax.serve.queue import Queue, append
from wan_torchax.session import session
from wan_torchax.stages.denoise import Denoise
from wan_torchax.tasks import together

pytestmark = pytest.mark.system
DECIBELS = 55
PROMPTS = ("a red circle", "a blue square", "a green star")


class Crowd(Server):
    """A server whose worker begins when all have asked, and ends when nothing waits."""

    def ask(self, *requests) -> list[Path]:
        return [self.queue.folder / self.post(**fields)["id"] for fields in requests]

    def work_off(self, batch: int = 3) -> None:
        self.base.config.serve.batch = batch
        queue = Queue(self.queue.folder)
        worker.work(queue, self.base, lambda: self.parks, lambda: self.parks or not queue.waiting())


@pytest.fixture
def crowd(tmp_path, two_layers):
    made = Crowd(tmp_path / "queue", *two_layers)
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def tidy():
    yield
    session.clear()


def counts(folders) -> list[int]:
    return [metrics(folder)["denoised_together"] for folder in folders]


def frames(folder: Path):
    return load_file(folder / "decode.safetensors")["frames"].astype(float)


def decibels(one: Path, other: Path) -> float:
    error = numpy.mean((frames(one) - frames(other)) ** 2)
    return numpy.inf if error == 0 else 10 * numpy.log10(255**2 / error)


@pytest.mark.parametrize("settings", [
    pytest.param((), id="guided"),
    pytest.param(("guidance=sequential", "scheduler=renoise"), id="one after the other", marks=pytest.mark.full),
    pytest.param(("guidance_scale=1",), id="not guided", marks=pytest.mark.full),
])
def test_a_video_of_several_is_what_it_is_alone(tmp_path, two_layers, settings):
    crowd = Crowd(tmp_path / "queue", *two_layers, *settings)
    texts = [{"prompt": prompt, "negative_prompt": prompt[::-1], "seed": seed} for seed, prompt in enumerate(PROMPTS)]
    alone = crowd.ask(*texts)
    crowd.work_off(batch=1)
    several = crowd.ask(*texts)
    crowd.work_off()
    crowd.close()
    assert counts(alone) == [1] * 3 and counts(several) == [3] * 3
    for one, other in zip(alone, several):
        assert decibels(one, other) >= DECIBELS
        assert len(metrics(other)["step_seconds"]) == 3
        assert {"denoise", "decode", "write"} <= metrics(other)["seconds"].keys()
    assert decibels(*several[:2]) < 40, "they are not all the same"


def test_videos_of_other_shapes_or_with_a_cache_are_not_put_together(crowd):
    wanted = ({"steps": 2, "seed": 1}, {"steps": 3}, {"steps": 2, "size": "64x80"}, {"steps": 2, "seed": 2})
    asked = crowd.ask(*({"prompt": "a"} | fields for fields in wanted))
    groups = [[asked.index(job.folder) for job in group] for group in worker.groups(crowd.queue, 3)]
    assert groups == [[0, 3], [1], [2]]
    assert together.takes_several(find_job(make_config()))
    for others in ("cache=easycache", "cache=guidance", "pipeline=i2v", "pipeline=v2v"):
        assert not together.takes_several(find_job(make_config(others)))


def test_latents_that_nobody_keeps_or_asks_for_are_not_made_together(two_layers):
    for setting, expected in (("seed=1", True), ("output.save_stages=false", False), ("stages=[text]", False)):
        assert together.takes_several(resolve_here(*two_layers, setting)) is expected


def test_each_has_its_own_events_and_preview(crowd):
    asked = crowd.ask(*({"prompt": prompt, "steps": 4} for prompt in PROMPTS))
    crowd.work_off()
    for folder in asked:
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]
        progress = [event["progress"] for event in events]
        assert progress == sorted(progress) and events[-1]["step"] == 4
        assert [event["event"] for event in events].count("preview") == 3
    assert len({(folder / "preview.png").read_bytes() for folder in asked}) == 3


def test_one_that_nobody_wants_any_more_stops_no_other(crowd, monkeypatch):
    first, *others = crowd.ask(*({"prompt": prompt, "steps": 4} for prompt in PROMPTS))
    at_step(monkeypatch, 2, lambda: crowd.client.delete(f"/v1/videos/{first.name}"))
    crowd.work_off()
    assert not first.exists() and counts(others) == [3, 3]
    crowd.get(f"/v1/videos/{first.name}", 404)


def test_all_are_stopped_when_nobody_wants_any(crowd, monkeypatch):
    asked = crowd.ask(*({"prompt": prompt, "steps": 900} for prompt in PROMPTS))
    at_step(monkeypatch, 2, lambda: [crowd.client.delete(f"/v1/videos/{folder.name}") for folder in asked])
    crowd.work_off()
    assert not any(folder.exists() for folder in asked)


def test_several_are_parked_and_go_on_behind_what_is_finished(crowd, monkeypatch):
    asked = crowd.ask(*({"prompt": prompt, "steps": 4} for prompt in PROMPTS))
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: setattr(crowd, "parks", True))
        crowd.work_off()
    for folder in asked:
        assert crowd.get(f"/v1/videos/{folder.name}").json()["status"] == "queued"
        assert (folder / "text.safetensors").exists() and not (folder / "denoise.safetensors").exists()
    crowd.parks = False
    crowd.work_off()
    assert counts(asked) == [3] * 3
    assert not any("text" in metrics(folder)["seconds"] for folder in asked)


def test_without_memory_for_several_they_go_one_by_one_and_the_log_says_so(crowd, monkeypatch, caplog):
    monkeypatch.setattr(together, "memory_bytes", lambda *_: 3 * 2**30)
    monkeypatch.setattr(Denoise, "temporaries", classmethod(lambda cls, resolved: resolved.videos * 0.6 * 2**30))
    caplog.set_level("INFO", "wan")
    asked = crowd.ask({"prompt": "a"}, {"prompt": "b"})
    crowd.work_off()
    assert counts(asked) == [1, 1]
    assert "2 videos are denoised one by one: together they need 3." in caplog.text


def test_what_goes_wrong_together_goes_well_alone(crowd, monkeypatch, caplog):
    """As where memory runs out in spite of the estimate."""
    run = session.run

    def without_memory(resolved, *arguments):
        if resolved.videos > 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return run(resolved, *arguments)

    monkeypatch.setattr(session, "run", without_memory)
    asked = crowd.ask({"prompt": "a"}, {"prompt": "b"})
    crowd.work_off()
    assert counts(asked) == [1, 1] and "RESOURCE_EXHAUSTED" in caplog.text


def test_what_took_a_worker_down_is_alone_the_next_time(tmp_path):
    server = Server(tmp_path / "queue", *SMALL)
    first, second, third = (server.queue.get(server.post(prompt=prompt)["id"]) for prompt in PROMPTS)
    server.close()
    assert list(worker.groups(server.queue, 3)) == [[first, second, third]]
    assert list(worker.groups(server.queue, 2)) == [[first, second], [third]]
    append(second.folder, {"event": "step", "progress": 50, "worker": "here:12"})
    worker.give_up(server.queue, "here:12", 2, "signal SIGKILL")
    assert list(worker.groups(server.queue, 3)) == [[first, third], [second]]
