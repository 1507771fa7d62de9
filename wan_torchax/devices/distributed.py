"""Multi-host runs, one process per host: rendezvous, consistency checks, and coordinated failure.

    python run.py distributed=auto mesh=v6e_16 …          # the same command on every host

JAX's multi-controller runtime (`jax.distributed`) joins the devices: every process runs the same programs in the same
order on its shards. It does not report which process is missing or failed, so this uses a store of its own, torch's
TCPStore, which process 0 serves one port below JAX's coordinator. Each process registers there, compares its
configuration with the others', and sends a heartbeat once a second from a thread. A process that exits gives a reason,
one that is silent times out after `lost_seconds`, and either ends all the others with an error that names it. Messages
are signed with the secret in WAN_TORCHAX_SECRET, for shared networks.

Without `distributed=auto` there is one process, and every function here returns at once.
"""
import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from omegaconf import OmegaConf

from wan_torchax import interruption, private
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import flatten, listed
from wan_torchax.records import provenance

log = logging.getLogger("wan")
HEARTBEAT_SECONDS = 1.0
SECRET = "WAN_TORCHAX_SECRET"  # environment variable with the HMAC key
MARK_LETTERS = 64
PATIENCE = 24 * 3600  # timeout in seconds for a process that is alive: it may be downloading weights, or writing
SHOWN = 10  # differences between configurations to list


@dataclass
class Group:
    """The processes of this run, from the view of one of them."""

    coordinator: str  # host:port
    process: int
    processes: int
    lost_seconds: int
    stores: list  # connections to process 0's store: for the main thread and for the heartbeat thread
    names: list[str]  # "process 1 of 4 (its host)"
    job: int = 0  # jobs begun: part of every key, so that values of an earlier job are not read
    met: Counter = field(default_factory=Counter)  # how often they have met, by key: likewise
    reason: str | None = None  # why this process exits, for the others
    over: threading.Event = field(default_factory=threading.Event)
    reporter: subprocess.Popen | None = None  # reports the cause if JAX aborts this process
    watcher: threading.Thread = field(default_factory=lambda: threading.Thread(target=watch, name="watch", daemon=True))

    @property
    def store(self):
        return self.stores[0]

    @property
    def others(self) -> list[int]:
        return [other for other in range(self.processes) if other != self.process]


group: Group | None = None


def processes() -> int:
    return 1 if group is None else group.processes


def is_first() -> bool:
    """Whether this process writes files, prints results and shows progress."""
    return group is None or group.process == 0


# ---------------------------------------------------------------- rendezvous


def join(config) -> None:
    """Rendezvous with the other processes and start JAX's runtime. Once per process, before JAX initializes devices."""
    global group
    settings = config.distributed
    if settings.name == "none" or group is not None:
        return
    import jax

    coordinator, processes, process = find(settings)
    stores = sign_in(coordinator, processes, process, settings)
    names = [f"process {number} of {processes}" for number in range(processes)]
    group = Group(coordinator, process, processes, settings.lost_seconds, stores, names)
    tag_logs(f"{process}/{processes}")
    group.watcher.start()
    hosts = meet("host", socket.gethostname(), settings.join_seconds)
    group.names = [f"{name} ({host})" for name, host in zip(group.names, hosts)]
    report_abort()
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.distributed.initialize(
        coordinator, processes, process,
        initialization_timeout=settings.join_seconds, cluster_detection_method="deactivate",
    )
    log.info("%s; all processes have joined", group.names[process])


def find(settings) -> tuple[str, int, int]:
    """Coordinator (host:port), process count and id: from the config, else from JAX's cluster detection.

    JAX detects Cloud TPU, GKE, Slurm and Open MPI.
    """
    place = settings.coordinator, settings.processes, settings.process
    if None in place:
        place = private.find_cluster(*place, settings.join_seconds)
    keys = ("coordinator", "processes", "process")
    unknown = ", ".join(f"distributed.{key}" for key, value in zip(keys, place) if value is None)
    if unknown:
        raise ConfigError(
            f"distributed=auto: this is no Cloud TPU, GKE or Slurm job that JAX knows; set {unknown} "
            "(e.g. host0:8476, 2 and 0)"
        )
    coordinator, processes, process = place
    if not 0 <= process < processes:
        raise ConfigError(
            f"distributed.process={process}: must be from 0 to {processes - 1}, with distributed.processes={processes}"
        )
    if not coordinator.rpartition(":")[2].isdigit():
        raise ConfigError(
            f"distributed.coordinator={coordinator}: write host:port of process 0, e.g. {coordinator}:8476"
        )
    return coordinator, processes, process


def sign_in(coordinator, processes, process, settings) -> list:
    """Two connections to the store that process 0 serves."""
    # Its C++ side prints a stack trace for every late process.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import DistNetworkError, TCPStore

    host, _, port = coordinator.rpartition(":")
    place = host, int(port) - 1
    wait = timedelta(seconds=settings.join_seconds / 2)  # torch tries twice
    try:
        stores = [
            TCPStore(*place, is_master=first and process == 0, timeout=wait, wait_for_workers=False)
            for first in (True, False)
        ]
    except DistNetworkError as error:
        if process == 0:
            reason = f"cannot listen on port {place[1]} ({str(error).splitlines()[0]})"
        else:
            reason = (
                f"process 0 of {processes} did not answer at {host}:{place[1]} within {settings.join_seconds} s; "
                "the same command must run on every host"
            )
        raise ConfigError(f"distributed.coordinator={coordinator}: {reason}") from error
    if stores[0].add(f"arrived/{process}", 1) > 1:
        raise ConfigError(
            f"distributed.process={process}: there is one already; give each host its own number, "
            f"from 0 to {processes - 1}"
        )
    return stores


def tag_logs(tag: str) -> None:
    make = logging.getLogRecordFactory()

    def tagged(*arguments, **keywords):
        record = make(*arguments, **keywords)
        record.msg = f"[{tag}] {record.msg}"
        return record

    logging.setLogRecordFactory(tagged)


# ---------------------------------------------------------------- consistency


def meet(what: str, value, seconds: float = PATIENCE) -> list:
    """A barrier that gathers every process's value, by number. `watch` ends the wait if a process dies."""
    group.met[what] += 1
    keys = [f"{group.job}/{what}/{group.met[what]}/{number}" for number in range(group.processes)]
    group.store.set(keys[group.process], sign(keys[group.process], value))
    deadline = time.monotonic() + seconds
    while missing := [name for name, key in zip(group.names, keys) if not group.store.check([key])]:
        interruption.check()
        if time.monotonic() > deadline:
            late = ", ".join(missing)
            raise ConfigError(f"{late} did not arrive within {seconds:g} s; the same command must run on every host")
        time.sleep(0.05)  # the store's own wait would not check for interruption
    return [verify(key, answer) for key, answer in zip(keys, group.store.multi_get(keys))]


def sign(key: str, value) -> str:
    """A value for the store, prefixed with its HMAC."""
    text = json.dumps(value)
    return mark(key, text) + text


def verify(key: str, signed: bytes) -> Any:
    """The value of a signed message; an error if the HMAC does not match."""
    text = signed.decode(errors="replace")
    if not hmac.compare_digest(text[:MARK_LETTERS], mark(key, text[MARK_LETTERS:])):
        number = int(key.rpartition("/")[2])
        raise ConfigError(f"{group.names[number]} does not know the secret; set {SECRET} to the same on every host")
    return json.loads(text[MARK_LETTERS:])


def mark(key: str, text: str) -> str:
    return hmac.new(os.environ.get(SECRET, "").encode(), f"{key}\0{text}".encode(), hashlib.sha256).hexdigest()


def begin() -> None:
    """Begin a new job."""
    if group is not None:
        group.job += 1


def compare(config) -> None:
    """Raise on all processes if the job's configuration or package versions differ between them."""
    if group is None:
        return
    settings = OmegaConf.to_container(config, resolve=True)
    settings.pop("distributed")
    for key in ("cache_dir", "store"):  # local paths may differ
        settings["compile"].pop(key)
    agree("configuration", settings | {"package": provenance.versions(), "git_revision": provenance.git_revision()})


def agree(what: str, values: dict) -> None:
    """Raise on every process if the values are not the same on all."""
    if group is None:
        return
    first, *others = (dict(flatten(answer)) for answer in meet(what, values))
    for number, other in enumerate(others, start=1):
        keys = [key for key in first | other if first.get(key) != other.get(key)]
        if keys:
            lines = [f"{key}: {first.get(key)!r} on process 0, {other.get(key)!r} on process {number}" for key in keys]
            raise ConfigError(f"{group.names[number]} differs from {group.names[0]}:\n{listed(lines, SHOWN)}")


def gather(what: str, value) -> list:
    """Every process's value; just its own in a single-process run. All call for each `what` equally often."""
    return [value] if group is None else meet(what, value)


def from_first(what: str, value):
    """Process 0's value, on every process."""
    return value if group is None else meet(what, value)[0]


# ---------------------------------------------------------------- failure


def watch() -> None:
    """The thread that sends this process's heartbeats and checks those of the others."""
    store, heartbeat, changed = group.stores[1], 0, {}
    while not group.over.wait(HEARTBEAT_SECONDS):
        heartbeat += 1
        try:
            store.set(f"heartbeat/{group.process}", sign(f"heartbeat/{group.process}", [heartbeat, group.reason]))
            if group.reason is not None:
                return
            states = [last_heartbeat(store, other) for other in group.others]
        except ConfigError as error:
            end(str(error))
        except RuntimeError:  # process 0, which serves the store, is gone
            end(f"{group.names[0]}, which coordinates, is gone")
        for other, state in zip(group.others, states):
            if state is None:  # not joined yet
                continue
            if (reason := state[1]) is not None:
                end(f"{group.names[other]} {reason}")
            last, since = changed.get(other, (None, time.monotonic()))
            changed[other] = state, since if state == last else time.monotonic()
            if time.monotonic() - changed[other][1] > group.lost_seconds:
                end(f"{group.names[other]} was lost: no heartbeat for {group.lost_seconds} s")


def last_heartbeat(store, process: int) -> list | None:
    key = f"heartbeat/{process}"
    return verify(key, store.get(key)) if store.check([key]) else None


def regroup(message: str) -> None:
    """After an error: if every process had one, all continue with the next job; else this process exits, which ends
    the others."""
    if group is None:
        return
    if group.job == 0:  # not all have joined
        leave(f"failed: {message}")
    try:
        meet("error", message, group.lost_seconds + 2 * HEARTBEAT_SECONDS)  # by then `watch` has reported a lost one
    except ConfigError:
        leave(f"failed: {message}")


def leave(reason: str, status: int = 1) -> None:
    """Exit, and report the reason to the others."""
    if group is None:
        return
    group.reason = reason
    if group.watcher.is_alive():
        group.watcher.join()  # returns once the reason is sent
        time.sleep(0 if group.process else 3 * HEARTBEAT_SECONDS)  # process 0 serves the store they read it from
    end(None, status)


def end(message: str | None, status: int = 1) -> None:
    """End this process at once: the main thread may hang in a collective that will never finish."""
    if message is not None:
        log.error("error: %s; this process ends too", message)
    logging.shutdown()
    sys.stdout.flush()
    stop_reporter()
    os._exit(status)


ABORT_REPORTER = """
import socket, sys
message, host, port = sys.argv[1:]
if not sys.stdin.read():            # killed by a signal: a clean exit writes to stdin
    try:
        socket.create_connection((host, int(port)), timeout=2)
    except OSError:
        print(message, file=sys.stderr, flush=True)
"""


def report_abort() -> None:
    """JAX calls abort() from a C++ thread when the coordinator is lost, before `watch` notices. A separate process
    detects that and reports the cause: Python code in the aborted process might hang."""
    host, _, port = group.coordinator.rpartition(":")
    tag = f"[{group.process}/{group.processes}]"
    message = f"{tag} error: {group.names[0]}, which coordinates, is gone; this process ends too"
    command = [sys.executable, "-S", "-E", "-c", ABORT_REPORTER, message, host, port]
    group.reporter = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def stop_reporter() -> None:
    """Signal a clean exit to the reporter."""
    if group.reporter is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the exit must not fail
            group.reporter.communicate(b"in order", timeout=5)


def finish() -> None:
    """Shut down after a successful run: waits until all processes are done, including process 0's files."""
    if group is None:
        return
    import jax

    group.job += 1
    meet("end", None)
    group.over.set()
    group.watcher.join()
    jax.distributed.shutdown()
    stop_reporter()


# ---------------------------------------------------------------- devices


def arrange(devices, sizes):
    """The devices of several processes as an array of the mesh's shape.

    The last axes, which have the most traffic, stay within a process as far as possible; within each, JAX orders the
    chips along the torus.
    """
    from jax.experimental import mesh_utils

    hosts = len({device.process_index for device in devices})
    inside, left = [], len(devices) // hosts
    for size in reversed(sizes):
        inside.insert(0, math.gcd(size, left))
        left //= inside[0]
    outside = [size // part for size, part in zip(sizes, inside)]
    return mesh_utils.create_hybrid_device_mesh(inside, outside, devices, process_is_granule=True)
