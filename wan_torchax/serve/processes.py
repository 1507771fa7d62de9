"""The supervisor of two processes: the front answers requests, the worker computes; they share only the disk.

A worker that crashes (e.g. OOM-killed) loses at most one video and no request, and is restarted. The supervisor does
nothing else, so that it can always fork safely: its signal thread holds no lock. If it is killed, its children exit.
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
BIND_SECONDS = 5  # how long processes of a killed server may still hold the port
KILL_SECONDS = 60  # grace period for a step after the drain deadline
NICE = 10  # the worker's niceness: on a CPU, the front must stay responsive
CANNOT_START = 3  # a worker's exit status if a restart would not help
context = multiprocessing.get_context("fork")


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; owned by the supervisor, so that no connection is refused while the front restarts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        # With IPPROTO_TCP explicit, asyncio sets TCP_NODELAY; otherwise small responses take 40 ms longer.
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
    """Serve until interrupted."""
    listening = bind(base.config.serve.host, base.config.serve.port)
    ready = multiprocessing.RawValue(ctypes.c_bool, False)  # no lock: a killed process might hold it
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
    """Handle the exit of a child process."""
    if process.exitcode == CANNOT_START:
        raise ConfigError("the worker cannot start; see the error above")
    code = process.exitcode
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
    log.error("the %s ended (%s) and is restarted", name, reason)
    if name == "worker":
        work.give_up(queue, work.name_of(process.pid), base.config.serve.attempts, reason)
    time.sleep(0.2)  # a crash loop must not flood the log


def stop(running: dict, seconds: float) -> None:
    """Shut down: the front rejects new requests, the worker finishes or parks its jobs, then the front exits."""
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
    """Exit if the supervisor is killed: nothing else would stop this process."""
    parent = multiprocessing.parent_process()

    def watch():
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def front(base: Base, queue: Queue, ready, listening: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the supervisor handles it
    end_with_parent()
    run_front(base, queue, ready, listening)


def worker(base: Base, queue: Queue, ready, listening: socket.socket) -> None:
    listening.close()
    signalled = []  # times of SIGTERM

    def remember(*_):
        signalled.append(time.monotonic())

    def must_stop() -> bool:
        return bool(signalled)

    def must_end() -> bool:
        return bool(signalled) and time.monotonic() > signalled[0] + base.config.serve.drain_seconds

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


def park_if(stopping: bool) -> None:
    if stopping:
        raise work.Parked


def leave(status: int) -> None:
    """Exit without joining threads: one may be compiling."""
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)
