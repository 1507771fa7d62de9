"""A server inside the test's process: the front in a thread and, where a test wants videos, the worker in another."""
import ctypes
import multiprocessing
import socket
import threading
import time
from pathlib import Path

import httpx2 as httpx
import uvicorn

from tests.conftest import make_config
from wan_torchax.config.commandline import rewrite
from wan_torchax.events import Stepped
from wan_torchax.serve import worker
from wan_torchax.serve.connections import connection_class
from wan_torchax.serve.front import Front, make_app
from wan_torchax.serve.processes import bind
from wan_torchax.serve.queue import Queue
from wan_torchax.serve.requests import Base

DEADLINE = 300


class Server:
    def __init__(self, folder: Path, *overrides: str, works: bool = False):
        overrides = ["task=serve", f"serve.folder={folder}", "serve.gallery=[]", *overrides]
        config = make_config(*overrides)
        self.base, self.queue = Base.of(config, rewrite(overrides)), Queue(folder)
        ready = multiprocessing.RawValue(ctypes.c_bool, works)
        self.front, self.ends, self.parks = Front(self.base, self.queue, ready), False, False
        listening = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        options = dict(log_level="warning", lifespan="off", http=connection_class(config.serve.connections))
        self.uvicorn = uvicorn.Server(uvicorn.Config(make_app(self.front), **options))
        self.threads = [threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [listening]})]
        if works:
            self.threads.append(threading.Thread(target=self.work))
        for thread in self.threads:
            thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def work(self) -> None:
        # Another Queue, as of another process: the disk is all that the two share.
        worker.work(Queue(self.queue.folder), self.base, lambda: self.parks, lambda: self.ends or self.parks)

    def close(self) -> None:
        self.ends = self.front.stopping = self.uvicorn.should_exit = True
        self.client.close()
        for thread in self.threads:
            thread.join(DEADLINE)

    def post(self, status: int = 200, key: str | None = None, **fields) -> dict:
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = self.client.post("/v1/videos", json=fields, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str, status: int = 200, **options):
        answer = self.client.get(path, **options)
        assert answer.status_code == status, answer.text
        return answer

    def finished(self, identifier: str) -> dict:
        return wait_for(lambda: (video := self.get(f"/v1/videos/{identifier}").json())["completed_at"] and video)


def connect(server: Server) -> socket.socket:
    """A connection without a client's ways."""
    return socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=DEADLINE)


def at_step(monkeypatch, number: int, action) -> None:
    """Do something when a step of any video is done, before its worker goes on."""

    def listen(self, event, original=worker.Reporter.__call__):
        if isinstance(event, Stepped) and event.step == number:
            action()
        original(self, event)

    monkeypatch.setattr(worker.Reporter, "__call__", listen)


def wait_for(condition, seconds: float = DEADLINE):
    """What a condition gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
    return value
