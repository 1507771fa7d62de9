"""task=serve as processes: killed, told to end, crowded; what was acknowledged is made, and made once."""
import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import statistics
import time
from pathlib import Path
from random import Random

import httpx2 as httpx
import pytest

from tests.conftest import SMALL
from tests.fork import warm
from tests.serving import wait_for
from wan_torchax.config.schema import FolderError
from wan_torchax.records.files import claimed
from wan_torchax.serve.queue import read_state

pytestmark = pytest.mark.system
KILLS = int(os.environ.get("KILLS", 0))
LOAD = int(os.environ.get("SERVE_LOAD", 0))  # videos


class Processes:
    """run.py task=serve."""

    def __init__(self, folder: Path, *overrides: str):
        self.folder = folder
        places = [f"serve.folder={folder}", "serve.gallery=[]", "serve.port=0", f"hydra.run.dir={folder}-log"]
        self.run = warm().start(["task=serve", *places, "serve.drain_seconds=0", *overrides])
        self.url = wait_for(self.address)
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def address(self) -> str | None:
        assert self.run.poll() is None, self.run.output
        path = self.run.folder / "1"
        found = re.search(r"http://\S+:\d+\n", path.read_text()) if path.exists() else None
        return found and found.group().strip()

    def ready(self) -> "Processes":
        wait_for(lambda: self.client.get("/readyz").status_code == 200)
        return self

    def post(self, **fields) -> str:
        answer = self.client.post("/v1/videos", json={"prompt": "a red circle"} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def get(self, identifier: str) -> dict:
        return self.client.get(f"/v1/videos/{identifier}").json()

    def all_over(self, identifiers) -> list[dict]:
        videos = wait_for(lambda: all((video := self.get(name))["completed_at"] for name in identifiers), 300)
        assert videos
        return [self.get(name) for name in identifiers]

    def kill(self) -> None:
        self.run.kill()
        self.client.close()
        wait_for(lambda: self.run.poll() is not None)


def metrics(folder: Path, identifier: str) -> dict:
    return json.loads((folder / identifier / "metrics.json").read_text())


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_killed_server_takes_up_its_queue_and_one_told_to_end_parks(tmp_path, two_layers):
    folder, settings = tmp_path / "queue", [*two_layers, "serve.batch=2"]
    server = Processes(folder, *settings)
    assert server.client.get("/readyz").status_code == 503, "nothing is loaded yet"
    server.ready()
    blocker = server.post(steps=900)  # while it is made the others wait
    first, second = server.post(steps=2, seed=1), server.post(steps=80, seed=2, prompt="a blue square")
    third = server.post(steps=80, seed=3)
    server.client.delete(f"/v1/videos/{blocker}")
    wait_for(lambda: server.get(second)["step"] >= 2)
    server.kill()
    assert read_state(folder / third).step >= 1, "the two of one shape are denoised together"
    before, progress = files(folder / first), read_state(folder / second).progress
    assert (folder / second / "text.safetensors").exists()
    server = Processes(folder, *settings).ready()
    assert server.get(second)["progress"] >= progress
    videos = server.all_over([first, second, third])
    assert [video["status"] for video in videos] == ["completed"] * 3
    assert files(folder / first) == before, "what was finished is untouched"
    assert "text" not in metrics(folder, second)["seconds"], "what was finished of the second is not made again"
    for name in (first, second, third):
        made = metrics(folder, name)
        assert not made["compile"] and not [phase for phase in made["seconds"] if phase.startswith("load_")]
    fourth = server.post(steps=900)
    wait_for(lambda: server.get(fourth)["step"] >= 1)
    server.run.send_signal(signal.SIGTERM)
    assert server.run.wait(60) == 0, server.run.output
    events = [json.loads(line) for line in (folder / fourth / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "queued" and (folder / fourth / "text.safetensors").exists()
    assert not (folder / fourth / "failure.json").exists()


def test_a_second_signal_ends_a_server_that_waits_for_its_video(tmp_path, two_layers):
    server = Processes(tmp_path / "queue", *two_layers, "serve.drain_seconds=600").ready()
    video = server.post(steps=900)
    wait_for(lambda: server.get(video)["step"] >= 1)
    server.run.send_signal(signal.SIGINT)
    wait_for(lambda: server.client.post("/v1/videos", json={"prompt": "a"}).status_code == 503)
    assert server.run.poll() is None
    server.run.send_signal(signal.SIGINT)
    assert server.run.wait(30) == 130, server.run.output
    wait_for(lambda: is_free(tmp_path / "queue" / video))  # the worker ends with it


def is_free(folder: Path) -> bool:
    """Whether no process writes into it."""
    with contextlib.suppress(FolderError), claimed(folder):
        return True
    return False


def test_a_server_that_cannot_start_says_why(tmp_path):
    places = [f"serve.folder={tmp_path / 'queue'}", f"hydra.run.dir={tmp_path / 'log'}", "serve.port=0"]
    run = warm().run(["task=serve", "model.path=/nowhere", *places])
    assert run.returncode == 1 and "/nowhere" in run.stderr and "the worker cannot start" in run.stderr


# ---------------------------------------------------------------- the long lanes


def children(pid: int) -> dict[str, int]:
    """The front and the worker: {name: pid}, the worker being the one that holds more memory."""
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent_of(path) == pid]
    front, worker = sorted(found, key=resident)[-2:]
    return {"front": front, "worker": worker}


def parent_of(path: Path) -> int | None:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def resident(pid: int) -> float:
    """MiB."""
    return int(re.search(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1)) / 1024


@pytest.mark.skipif(not KILLS, reason="KILLS=10 kills ten times")
def test_kills_at_any_moment_lose_nothing_that_was_acknowledged(tmp_path, two_layers):
    folder, chance, asked = tmp_path / "queue", Random(0), []
    for number in range(KILLS):
        server = Processes(folder, *two_layers)
        deadline = time.monotonic() + chance.uniform(0, 20)
        while time.monotonic() < deadline:
            if len(asked) < 3 * (number + 1):
                asked.append(ask(server, len(asked)))
            time.sleep(0.1)
        if chance.random() < 0.3:  # the worker alone, which is started again
            os.kill(children(server.run.pid)["worker"], signal.SIGKILL)
            time.sleep(0.5)
            assert server.client.get("/healthz").status_code == 200
        server.kill()
    server = Processes(folder, *two_layers).ready()
    assert [ask(server, number) for number in range(len(asked))] == asked, "a client that got no answer asks again"
    assert {video["status"] for video in server.all_over(asked)} == {"completed"}
    assert len(list(folder.glob("video_*"))) == len(asked)
    server.kill()


def ask(server: Processes, number: int) -> str:
    fields, headers = {"prompt": "a", "seed": number, "steps": 6}, {"Idempotency-Key": f"key {number}"}
    return server.client.post("/v1/videos", json=fields, headers=headers).json()["id"]


@pytest.mark.skipif(not LOAD, reason="SERVE_LOAD=100 makes a hundred videos for two hundred clients")
def test_a_crowd_is_served_and_nothing_grows(tmp_path):
    server = Processes(tmp_path / "queue", *SMALL, "serve.queue_limit=50").ready()
    try:
        asyncio.run(crowd(server))
    finally:
        server.run.send_signal(signal.SIGTERM)
        assert server.run.wait(90) == 0


async def crowd(server: Processes) -> None:
    gc.freeze()  # this process measures, and its own garbage would be in the figures
    limits, made, memory, times = httpx.Limits(max_connections=400), [], [], []
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        while len(made) < 50:
            answer = await client.post("/v1/videos", json={"prompt": "a", "steps": 4, "seed": len(made)})
            made.append(answer.json()["id"])
        assert (await client.post("/v1/videos", json={"prompt": "a"})).status_code in (200, 429)
        strangers = [asyncio.create_task(slow_reader(server.url, path)) for path in ("/", "/v1/videos?limit=100") * 10]
        strangers += [asyncio.create_task(half_open(server.url)) for _ in range(20)]
        pollers = [asyncio.create_task(poll(server.url, made, times, place / 200)) for place in range(200)]
        processes = children(server.run.pid)
        while await completed(client) < LOAD:
            await asyncio.sleep(0.5)
            answer = await client.post("/v1/videos", json={"prompt": "a", "steps": 4, "seed": len(made)})
            if len(made) < LOAD and answer.status_code == 200:
                made.append(answer.json()["id"])
            memory.append({name: resident(pid) for name, pid in processes.items()})
        assert not [task for task in pollers if task.done()], "none was refused"
        for task in (*pollers, *strangers):
            task.cancel()
    ordered = sorted(times)
    p99 = ordered[int(len(ordered) * 0.99)]
    third = len(memory) // 3
    grown = {name: statistics.mean(row[name] for row in memory[-third:]) - statistics.mean(
        row[name] for row in memory[third : 2 * third]) for name in processes}
    print(json.dumps({
        "answers": len(ordered), "median_seconds": statistics.median(ordered), "p99_seconds": p99,
        "mib_first": memory[0], "mib_last": memory[-1], "mib_grown": grown, "machine_load": os.getloadavg(),
    }))
    assert p99 < 0.05 and max(grown.values()) < 20


async def completed(client) -> int:
    videos, more = [], {"has_more": True, "last_id": None}
    while more["has_more"]:
        after = {"after": more["last_id"]} if videos else {}
        more = (await client.get("/v1/videos", params={"limit": 100} | after)).json()
        videos += more["data"]
    return sum(video["status"] == "completed" for video in videos)


async def poll(url: str, made: list, times: list, wait: float) -> None:
    """Every second, from some moment on. Without a client's own work, of which two hundred would be slower than the
    server."""
    await asyncio.sleep(wait)
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    while True:
        began = time.perf_counter()
        writer.write(f"GET /v1/videos/{made[-1]} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head).group(1)))
        times.append(time.perf_counter() - began)
        await asyncio.sleep(1)


async def slow_reader(url: str, path: str) -> None:
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    while await reader.read(1):
        await asyncio.sleep(0.2)


async def half_open(url: str) -> None:
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    head = b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 99"
    writer.write(head + b"\r\n\r\n{")
    await reader.read()
