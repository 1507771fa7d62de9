"""Two processes and one that looks after them: the front answers, the worker computes, and the disk is between them.

A worker that dies (the system may kill it for its memory) takes one video with it at most, and no request: it is
started again. This process does nothing else, so that it can always fork: the thread that hears signals holds no lock.
If it is killed, the others notice and end.
"""
import ctypes
import errno
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import wait

from wan_torchax import interruption
from wan_torchax.config.schema import ConfigError
from wan_torchax.serve import worker as work
from wan_torchax.serve.front import run as run_front
from wan_torchax.serve.queue import Queue
from wan_torchax.serve.requests import Base
from wan_torchax.tasks.attempt import explain

log = logging.getLogger("wan")
BIND_SECONDS = 5  # that the processes of a server which was killed may still hold the port
KILL_SECONDS = 60  # after the deadline, that a step may take
NICE = 10  # of the worker: where a CPU makes the videos, whoever asks is answered first
CANNOT_START = 3  # a worker's status when another try would be no better
context = multiprocessing.get_context("fork")


def bind(host: str, port: int) -> socket.socket:
    """The socket to listen on: held by this process, so that nobody is turned away while the front starts again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        # TCP by its name: asyncio sends small answers at once then, and not 40 ms later (TCP_NODELAY).
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(1024)
            return listening
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"serve.host={host}: cannot listen there ({error.strerror})") from error
            if time.monotonic() > deadline:
                remedy = f"use another, e.g. serve.port={port + 1}, or 0 for any that is free"
                raise ConfigError(f"serve.port={port}: another program listens there; {remedy}") from error
            time.sleep(0.1)


def supervise(base: Base, queue: Queue) -> None:
    """Serve until this process is told to end."""
    listening = bind(base.config.serve.host, base.config.serve.port)
    ready = multiprocessing.RawValue(ctypes.c_bool, False)  # without a lock: who is killed holds none
    running = {}

    def start(name: str) -> None:
        target = {"worker": worker, "front": front}[name]
        running[name] = context.Process(target=target, args=(base, queue, ready, listening), name=name)
        running[name].start()

    try:
        start("front"), start("worker")
        while True:
            wait([process.sentinel for process in running.values()], interruption.LOOK_SECONDS)
            interruption.check()
            for name, process in list(running.items()):
                if not process.is_alive():
                    ready.value = ready.value and name != "worker"
                    look_after(name, process, base, queue)
                    start(name)
    except interruption.Interrupted:
        stop(running, base.config.serve.drain_seconds)
    except BaseException:
        stop(running, 0)
        raise


def look_after(name: str, process, base: Base, queue: Queue) -> None:
    """What the end of a process means."""
    if process.exitcode == CANNOT_START:
        raise ConfigError("the worker cannot start; what is wrong is said above")
    code = process.exitcode
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
    log.error("the %s ended (%s) and is started again", name, reason)
    if name == "worker":
        work.give_up(queue, work.name_of(process.pid), base.config.serve.attempts, reason)
    time.sleep(0.2)  # one that cannot live must not fill the log


def stop(running: dict, seconds: float) -> None:
    """No new requests; the worker finishes or parks what it has; then the front ends."""
    for name in ("front", "worker"):
        if name in running:
            running[name].terminate()
    if "worker" in running:
        running["worker"].join(seconds + KILL_SECONDS)
    if "front" in running:
        running["front"].terminate()
        running["front"].join(10)
    for process in running.values():
        if process.is_alive():
            process.kill()
        process.join()


# ---------------------------------------------------------------- in the children


def end_with_parent() -> None:
    """A process whose parent was killed has nobody who would start it again or end it."""
    parent = multiprocessing.parent_process()

    def watch():
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def front(base: Base, queue: Queue, ready, listening: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent says what to do
    end_with_parent()
    run_front(base, queue, ready, listening)


def worker(base: Base, queue: Queue, ready, listening: socket.socket) -> None:
    listening.close()
    told = []  # when to stop

    def remember(*_):
        told.append(time.monotonic())

    def must_stop() -> bool:
        return bool(told)

    def must_end() -> bool:
        return bool(told) and time.monotonic() > told[0] + base.config.serve.drain_seconds

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, remember)
    end_with_parent()
    os.nice(NICE)
    try:
        work.prepare(base, lambda event: park_if(must_stop()))
        ready.value = True
        work.work(queue, base, must_end, must_stop)
    except ConfigError as error:
        print(f"error: {explain(error)}", file=sys.stderr, flush=True)
        leave(CANNOT_START)
    except work.Parked:
        pass
    leave(0)


def park_if(told: bool) -> None:
    if told:
        raise work.Parked


def leave(status: int) -> None:
    """At once: a compiler in a thread would be waited for."""
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)
