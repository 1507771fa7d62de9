"""One video over several processes, one on each host: who takes part, that all do the same, and that they end together.

    python run.py distributed=auto mesh=v6e_16 …          # the same command on every host

JAX's multi-controller runtime (`jax.distributed`) joins the devices: every process runs the same programs in the same
order on the shards it holds. What that runtime does not say, who is missing and who fell out, goes through a store that
process 0 keeps one port below JAX's coordinator (torch's TCPStore): each process signs in there, compares its
configuration with the others', and beats once a second from a thread. A process that leaves says why, one that falls
silent is given up after `lost_seconds`, and either ends all the others with its name. Messages are signed with the
secret in WAN_TORCHAX_SECRET, for networks that are shared with others.

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
SECRET = "WAN_TORCHAX_SECRET"  # environment variable: what the processes sign their messages with
MARK_LETTERS = 64
PATIENCE = 24 * 3600  # seconds to wait for a process that is alive: it may be fetching weights, or writing
SHOWN = 10  # differences between two configurations that are listed


@dataclass
class Group:
    """The processes of this run, as one of them sees them."""

    coordinator: str  # host:port
    process: int
    processes: int
    lost_seconds: int
    stores: list  # connections to process 0's store: one for the main thread, one for the thread that beats
    names: list[str]  # "process 1 of 4 (its host)"
    job: int = 0  # jobs begun: part of every key, so that nothing of an earlier job is taken for this one's
    reason: str | None = None  # why this process leaves, for the others
    over: threading.Event = field(default_factory=threading.Event)
    reporter: subprocess.Popen | None = None  # says why, should this process be aborted
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


# ---------------------------------------------------------------- meeting


def join(config) -> None:
    """Meet the other processes and start JAX's runtime with them. Once a process; before JAX looks for devices."""
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
    log.info("%s; all are here", group.names[process])


def find(settings) -> tuple[str, int, int]:
    """Coordinator (host:port), process count and id: from the config, else as JAX finds them.

    JAX knows Cloud TPU, GKE, Slurm and Open MPI.
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
    """Two connections to the store beside the coordinator, which process 0 opens."""
    # Its C++ side prints a stack trace for every process that is late.
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


# ---------------------------------------------------------------- doing the same


def meet(what: str, value, seconds: float = PATIENCE) -> list:
    """Every process's value, by number, as soon as all have called this. `watch` ends a wait for one that died."""
    keys = [f"{group.job}/{what}/{number}" for number in range(group.processes)]
    group.store.set(keys[group.process], sign(keys[group.process], value))
    deadline = time.monotonic() + seconds
    while missing := [name for name, key in zip(group.names, keys) if not group.store.check([key])]:
        interruption.check()
        if time.monotonic() > deadline:
            late = ", ".join(missing)
            raise ConfigError(f"{late} did not arrive within {seconds:g} s; the same command must run on every host")
        time.sleep(0.05)  # not the store's own wait, which does not look at the flag
    return [verify(key, answer) for key, answer in zip(keys, group.store.multi_get(keys))]


def sign(key: str, value) -> str:
    """A value for the store, with a mark that only those can make who know the secret."""
    text = json.dumps(value)
    return mark(key, text) + text


def verify(key: str, signed: bytes) -> Any:
    """The value behind a mark; an error where somebody else made it."""
    text = signed.decode(errors="replace")
    if not hmac.compare_digest(text[:MARK_LETTERS], mark(key, text[MARK_LETTERS:])):
        number = int(key.rpartition("/")[2])
        raise ConfigError(f"{group.names[number]} does not know the secret; set {SECRET} to the same on every host")
    return json.loads(text[MARK_LETTERS:])


def mark(key: str, text: str) -> str:
    return hmac.new(os.environ.get(SECRET, "").encode(), f"{key}\0{text}".encode(), hashlib.sha256).hexdigest()


def begin() -> None:
    """A new job."""
    if group is not None:
        group.job += 1


def compare(config) -> None:
    """A job's configuration and everybody's packages must be the same; an error on all processes where they are
    not."""
    if group is None:
        return
    settings = OmegaConf.to_container(config, resolve=True)
    settings.pop("distributed")
    for key in ("cache_dir", "store"):  # places on each machine
        settings["compile"].pop(key)
    agree("configuration", settings | {"package": provenance.versions(), "git_revision": provenance.git_revision()})


def agree(what: str, values: dict) -> None:
    """Raises on every process if the values are not the same on all."""
    if group is None:
        return
    first, *others = (dict(flatten(answer)) for answer in meet(what, values))
    for number, other in enumerate(others, start=1):
        keys = [key for key in first | other if first.get(key) != other.get(key)]
        if keys:
            lines = [f"{key}: {first.get(key)!r} on process 0, {other.get(key)!r} on process {number}" for key in keys]
            raise ConfigError(f"{group.names[number]} differs from {group.names[0]}:\n{listed(lines, SHOWN)}")


def gather(what: str, value) -> list:
    """Every process's value; of one that is alone, its own. Once a job for every `what`."""
    return [value] if group is None else meet(what, value)


def from_first(what: str, value):
    """Process 0's value, on every process."""
    return value if group is None else meet(what, value)[0]


# ---------------------------------------------------------------- ending together


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
        except RuntimeError:  # the store went with its process
            end(f"{group.names[0]}, which coordinates, is gone")
        for other, state in zip(group.others, states):
            if state is None:  # still to arrive
                continue
            if (reason := state[1]) is not None:
                end(f"{group.names[other]} {reason}")
            last, since = changed.get(other, (None, time.monotonic()))
            changed[other] = state, since if state == last else time.monotonic()
            if time.monotonic() - changed[other][1] > group.lost_seconds:
                end(f"{group.names[other]} was lost: nothing heard of it for {group.lost_seconds} s")


def last_heartbeat(store, process: int) -> list | None:
    key = f"heartbeat/{process}"
    return verify(key, store.get(key)) if store.check([key]) else None


def regroup(message: str) -> None:
    """After an error: when every process has had one, all go on with the next job; else this process leaves, which
    ends the others."""
    if group is None:
        return
    if group.job == 0:  # not even all are here
        leave(f"failed: {message}")
    try:
        meet("error", message, group.lost_seconds + 2 * HEARTBEAT_SECONDS)  # by then a lost one has been named
    except ConfigError:
        leave(f"failed: {message}")


def leave(reason: str, status: int = 1) -> None:
    """Tell the others why, and end."""
    if group is None:
        return
    group.reason = reason
    if group.watcher.is_alive():
        group.watcher.join()  # until it has been said
        time.sleep(0 if group.process else 3 * HEARTBEAT_SECONDS)  # process 0 has the store they hear it from
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
if not sys.stdin.read():            # ended by a signal: one that leaves in order says so
    try:
        socket.create_connection((host, int(port)), timeout=2)
    except OSError:
        print(message, file=sys.stderr, flush=True)
"""


def report_abort() -> None:
    """JAX abort()s a process that has lost its coordinator, from a C++ thread, before `watch` can see it. A process of
    its own sees that, and names the coordinator: Python code in the aborted one might wait for ever."""
    host, _, port = group.coordinator.rpartition(":")
    tag = f"[{group.process}/{group.processes}]"
    message = f"{tag} error: {group.names[0]}, which coordinates, is gone; this process ends too"
    command = [sys.executable, "-S", "-E", "-c", ABORT_REPORTER, message, host, port]
    group.reporter = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def stop_reporter() -> None:
    """This process ends in order."""
    if group.reporter is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # whatever it does, this process ends
            group.reporter.communicate(b"in order", timeout=5)


def finish() -> None:
    """The end of a run that went well: nobody leaves before all are done, process 0 with its files last."""
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

    The last axes, which carry the most, stay inside a process as far as they go; within each JAX orders the chips
    along their torus.
    """
    from jax.experimental import mesh_utils

    hosts = len({device.process_index for device in devices})
    inside, left = [], len(devices) // hosts
    for size in reversed(sizes):
        inside.insert(0, math.gcd(size, left))
        left //= inside[0]
    outside = [size // part for size, part in zip(sizes, inside)]
    return mesh_utils.create_hybrid_device_mesh(inside, outside, devices, process_is_granule=True)
