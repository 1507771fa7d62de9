"""Two processes on loopback make what one makes, hold half of it each, and end together, by name."""
import contextlib
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from random import randrange
from types import SimpleNamespace

import numpy
import pytest

from tests import tiny
from tests.conftest import SMALL, listed, make_config, metrics, resolve_here, results, run_into
from tests.fork import warm
from tests.reference import psnr, relative_error
from tests.test_parity import LARGE
from wan_torchax.config.geometry import device_count
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.devices import distributed

PROMPT = "a red circle moving right on a white background"
system = pytest.mark.system  # two processes


def free_port() -> int:
    """A port whose neighbour below is free too. The system gives neither to others that ask for any port, so they stay
    free until they are used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = randrange(first // 2, first)
        with socket.socket() as one, socket.socket() as below, contextlib.suppress(OSError):
            one.bind(("localhost", port)), below.bind(("localhost", port - 1))
            return port


def without_devices() -> dict:
    """The environment of a process that chooses its number of devices by itself."""
    return {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}


class Pair:
    """The same command (run.py, or some code) as process 0 and process 1 of two, each with its environment."""

    def __init__(self, command, each=({}, {})):
        program, *arguments = command
        code = None if program == "run.py" else program.format()
        self.processes = [
            warm().start([part.format(number=number) for part in arguments], each[number], code) for number in (0, 1)
        ]

    def text(self, number) -> str:
        return self.processes[number].output

    def wait_for(self, number, pattern, seconds=200):
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text(number)):
            assert self.processes[number].poll() is None and time.monotonic() < deadline, self.text(number)[-2000:]
            time.sleep(0.1)

    def ends(self, seconds) -> list[int]:
        """Exit statuses, once both have ended."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


def by_config(port):
    place = [f"distributed.coordinator=localhost:{port}", "distributed.processes=2", "distributed.process={number}"]
    return ["distributed=auto", *place]


def by_environment(port):
    common = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2"}
    return [common | {"JAX_PROCESS_ID": str(number)} for number in (0, 1)]


# ---------------------------------------------------------------- one video over two processes

SMALL_SIZE = {"resolution.height": 64, "resolution.width": 64, "resolution.frames": 5}
ALONG = {"mesh.axes.dp": 1, "mesh.axes.sp": 8, "mesh.axes.tp": 1, "stages": ["text", "denoise"]}
LAYOUTS = {  # each axis crosses from one process to the other in one of them, with tokens on every device
    "tokens over sp": ALONG | {"sharding": "sequence"},
    "a ring over sp": ALONG | {"sharding": "ring"},
    "guidance over dp and tp": SMALL_SIZE | {"mesh.axes.dp": 2, "mesh.axes.tp": 4},
}
LAST, KILLED = len(LAYOUTS), len(LAYOUTS) + 2  # line numbers


def video(folder, line):
    """What process 0 wrote for a line of the list."""
    return listed(folder / "0")[line - 1]


def start_two(folder, lines, *overrides):
    """The lines of a list, one after the other, by two processes; the folder of each is its number's."""
    (folder / "jobs.jsonl").write_text("".join(json.dumps({"prompt": PROMPT, **line}) + "\n" for line in lines))
    command = ["run.py", *tiny.model(), *LARGE, "mesh=cpu_8", "distributed=auto", "distributed.lost_seconds=10"]
    places = [f"prompts={folder / 'jobs.jsonl'}", f"hydra.run.dir={folder}/{{number}}"]
    return Pair([*command, "output.keep_frames=true", *places, *overrides], by_environment(free_port()))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Every layout as one line of a list, in one pair of processes; then a line that fails on both, and one in whose
    steps process 1 is killed."""
    folder = tmp_path_factory.mktemp("two")
    pair = start_two(folder, [*LAYOUTS.values(), {"mesh.axes.dp": 3}, {"steps": 900, "preview_every": 2}])
    deadline = time.monotonic() + 400
    while not (folder / "0" / "list.json").exists() or not (video(folder, KILLED) / "preview.png").exists():
        running = pair.processes[0].poll() is None and time.monotonic() < deadline
        assert running, pair.text(0)[-2000:] + pair.text(1)[-2000:]
        time.sleep(0.1)
    pair.processes[1].kill()
    pair.statuses = pair.ends(120)
    return folder, pair


def alone(folder, *overrides):
    return results(run_into(folder, *tiny.model(), *LARGE, f"prompt={PROMPT}", "output.keep_frames=true", *overrides))


@system
def test_two_processes_give_what_one_gives(two, tmp_path):
    small = alone(tmp_path / "small", *SMALL, "steps=2")
    large = alone(tmp_path / "large", "stages=[text,denoise]")
    for number, (name, layout) in enumerate(LAYOUTS.items(), start=1):
        expected = small if "resolution.height" in layout else large
        values = results(video(two[0], number))
        assert relative_error(values["latents"], expected["latents"]) < 1e-4, name
        if "stages" not in layout:
            assert psnr(values["frames"], expected["frames"]) > 55, name
    assert small["frames"].std() > 1


@system
@pytest.mark.full
def test_an_adaptive_cache_decides_alike_on_both(tmp_path):
    mode = ["cache=easycache", "cache.threshold=1", "steps=6"]
    pair = start_two(tmp_path, [LAYOUTS["tokens over sp"]], *mode)
    assert pair.ends(300) == [0, 0], pair.text(0) + pair.text(1)
    expected = alone(tmp_path / "alone", *mode, "stages=[text,denoise]")
    assert relative_error(results(video(tmp_path, 1))["latents"], expected["latents"]) < 1e-4


@system
def test_process_0_writes_and_all_are_tagged(two):
    folder, pair = two
    written = {path.name for path in video(folder, LAST).iterdir()}
    assert {"video.mp4", "metrics.json", "config.yaml", "text.safetensors"} <= written
    left = {path.name for path in (folder / "1").rglob("*") if path.is_file() and ".hydra" not in path.parts}
    assert left == {"log.txt"}, "the other process leaves its log"
    assert "video.mp4" in pair.text(0) and "video.mp4" not in pair.text(1)
    for number in (0, 1):
        joined = f"process {number} of 2 ({socket.gethostname()}); all processes have joined"
        assert f"[{number}/2] {joined}" in pair.text(number)
        both = "an error of both is told, and the list goes on"
        assert f"[{number}/2] error: mesh=cpu_8: axes dp=3 x" in pair.text(number), both


@system
def test_each_process_holds_its_part_of_the_mesh(two):
    told = metrics(video(two[0], LAST))
    assert told["devices"] == 8 and told["processes"] == 2 and told["mesh"] == {"dp": 2, "sp": 1, "tp": 4}


LOAD = """
import sys, torch, jax
from pathlib import Path
from tests.conftest import make_config
from omegaconf import OmegaConf
from wan_torchax.devices import distributed
from wan_torchax.models.family import ComponentSpec
from wan_torchax.records.provenance import peak_host_bytes
from wan_torchax.runtime import weights
from wan_torchax.runtime.jobs import plan_job
from wan_torchax.session import session
config = make_config("mesh=cpu_8", "mesh.axes={{dp:1,sp:1,tp:8}}", *sys.argv[2:])
distributed.join(config)
mesh = session.place(plan_job(config)).mesh
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False) for _ in range(16)))
rules = OmegaConf.create({{"all": {{"pattern": ".*", "axes": ["rows"]}}}})
layout = weights.Layout(mesh, rules, {{"rows": "tp"}})
tensors = weights.array_specs(model, ComponentSpec(lambda _: model), {{}}, layout, "float32")
arrays = weights.load(tensors, Path(sys.argv[1]), lambda count: None)
print("peak", peak_host_bytes())
distributed.finish()
"""


@system
def test_each_process_loads_only_what_it_owns(tmp_path):
    """4 GiB of weights over eight devices: a process that has four of them never holds more than 0.6 of what one with
    all eight does."""
    tiny.write_zeros(tmp_path / "model.safetensors", {f"{layer}.weight": (8192, 8192) for layer in range(16)})
    alone = warm().start([tmp_path], code=LOAD.format())
    assert alone.wait(300) == 0, alone.output
    pair = Pair([LOAD, str(tmp_path), *by_config(free_port())])
    assert pair.ends(300) == [0, 0], pair.text(0) + pair.text(1)
    one, *two = (int(re.search(r"peak (\d+)", text).group(1)) for text in (alone.output, pair.text(0), pair.text(1)))
    assert one > 4 << 30
    assert max(two) < 0.6 * one, (one, two)


# ---------------------------------------------------------------- ending together


@system
def test_a_process_killed_while_denoising_ends_the_other_by_name(two):
    _, pair = two
    assert pair.statuses == [1, -signal.SIGKILL]
    assert f"error: process 1 of 2 ({socket.gethostname()}) was lost" in pair.text(0)


def test_messages_of_those_who_do_not_know_the_secret_are_refused(monkeypatch):
    names = ["process 0 of 2 (here)", "process 1 of 2 (there)"]
    monkeypatch.setattr(distributed, "group", SimpleNamespace(names=names))
    monkeypatch.setenv(distributed.SECRET, "right")
    signed = distributed.sign("1/host/1", {"a": 1}).encode()
    assert distributed.verify("1/host/1", signed) == {"a": 1}
    for key, message in (("2/host/1", signed), ("1/host/1", signed[:-1] + b"2"), ("1/host/1", b"{}")):
        with pytest.raises(ConfigError, match=r"process 1 of 2 \(there\) does not know the secret; set WAN_"):
            distributed.verify(key, message)
    monkeypatch.setenv(distributed.SECRET, "wrong")
    with pytest.raises(ConfigError, match="does not know the secret"):
        distributed.verify("1/host/1", signed)


@system
def test_mismatched_configurations_end_both_at_once(tmp_path):
    command = ["run.py", "mesh=cpu_8", "steps=3{number}", f"hydra.run.dir={tmp_path}/{{number}}"]
    pair = Pair([*command, *by_config(free_port())])
    assert pair.ends(120) == [1, 1]
    for number in (0, 1):
        difference = r":\n  - steps: 30 on process 0, 31 on process 1\n"
        assert re.search(r"process 1 of 2 \(.*\) differs from process 0 of 2 \(.*\)" + difference, pair.text(number))
        assert "loaded in" not in pair.text(number) and "Traceback" not in pair.text(number)


WAIT = """
import os, sys, time
from tests.conftest import make_config
from wan_torchax import interruption
from wan_torchax.devices import distributed
try:
    config = make_config("distributed.lost_seconds=5", *sys.argv[1:])
    distributed.join(config)
    distributed.begin()
    distributed.compare(config)
    print("joined", flush=True)
    if "ERROR" in os.environ:
        distributed.regroup(os.environ["ERROR"])
    if "MEET" in os.environ:
        distributed.meet(os.environ["MEET"], None)
    time.sleep(60)
except interruption.Interrupted as reason:
    distributed.leave("was " + reason.word, reason.status)
except Exception as error:
    # As attempt: an interpreter that ends by itself may find the watcher's thread inside the store, and abort.
    print(error, flush=True)
    distributed.regroup(str(error))
    sys.exit(1)
"""


def slurm(port):
    """What srun sets for two tasks; JAX makes the coordinator's port from the job's id."""
    common = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    common["JAX_COORDINATOR_PORT"] = str(port)
    return [common | {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0"} for number in (0, 1)]


@system
def test_slurm_is_found_and_ctrl_c_on_one_ends_all(tmp_path):
    each = slurm(free_port())
    pair = Pair([WAIT, "distributed=auto"], [each[0], each[1] | {"MEET": "what the other never says"}])
    for number in (0, 1):
        pair.wait_for(number, "joined")
    pair.processes[1].send_signal(signal.SIGINT)
    assert pair.ends(120) == [1, 130]
    assert re.search(r"process 1 of 2 \(.*\) was interrupted; this process ends too", pair.text(0))


@system
def test_an_error_on_one_ends_all_with_its_message(tmp_path):
    pair = Pair([WAIT, *by_config(free_port())], [{}, {"ERROR": "no such file here"}])
    assert pair.ends(120) == [1, 1]
    assert re.search(r"process 1 of 2 \(.*\) failed: no such file here; this process ends too", pair.text(0))


def test_two_processes_with_one_number_are_told():
    port, settings = free_port(), make_config("distributed=auto", "distributed.join_seconds=4").distributed
    stores = [distributed.sign_in(f"localhost:{port}", 2, number, settings) for number in (0, 1)]
    with pytest.raises(ConfigError, match="distributed.process=1: there is one already"):
        distributed.sign_in(f"localhost:{port}", 2, 1, settings)
    with pytest.raises(ConfigError, match=f"cannot listen on port {port - 1}"):
        distributed.sign_in(f"localhost:{port}", 2, 0, settings)
    del stores


@system
def test_a_coordinator_that_dies_is_named(tmp_path):
    pair = Pair([WAIT, *by_config(free_port())])
    for number in (0, 1):
        pair.wait_for(number, "joined")
    pair.processes[0].kill()
    assert pair.ends(120)[1] in (1, -signal.SIGABRT), "JAX aborts it, unless it sees by itself that process 0 is gone"
    deadline = time.monotonic() + 60
    while not re.search(r"process 0 of 2 \(.*\), which coordinates, is gone; this process ends too", pair.text(1)):
        assert time.monotonic() < deadline, pair.text(1)
        time.sleep(0.05)


@system
def test_a_process_that_never_arrives_is_named(tmp_path):
    """Process 0 of one pair and process 1 of another."""
    strangers = [by_environment(free_port())[number] for number in (0, 1)]
    pair = Pair([WAIT, "distributed=auto", "distributed.join_seconds=4"], strangers)
    assert pair.ends(120) == [1, 1]
    assert "process 1 of 2 did not arrive within 4 s" in pair.text(0)
    assert re.search(r"process 0 of 2 did not answer at localhost:\d+ within 4 s", pair.text(1))


KEYS = "distributed.coordinator, distributed.processes, distributed.process"
PLACE = ["distributed.processes=2", "distributed.coordinator=host0"]


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([], f"this is no Cloud TPU, GKE or Slurm job that JAX knows; set {KEYS}"),
        ([*PLACE, "distributed.process=1"], "write host:port of process 0, e.g. host0:8476"),
        ([*PLACE, "distributed.process=2"], "must be from 0 to 1"),
    ],
)
def test_what_cannot_be_joined_is_told(overrides, message):
    with pytest.raises(ConfigError, match=message):
        distributed.find(make_config("distributed=auto", *overrides).distributed)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["mesh=v6e_16"], "has 4 hosts, and distributed=none is one process; set distributed=auto"),
        (["distributed=auto", "task=tune"], "task=tune is done by one process; set distributed=none"),
        (["mesh=v6e_16", "mesh.hosts=3", "distributed=auto"], "mesh.hosts=3: must be at least 1 and divide the 16"),
        (
            ["distributed=auto", "distributed.lost_seconds=1"],
            "distributed.lost_seconds=1: must be from 5 to 3600; nearest 5",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config(*overrides))


# ---------------------------------------------------------------- the order of devices


def chips(width, height, depth=1, kind="TPU v6 lite"):
    """Devices as JAX shows those of a slice of hosts with two by two chips each."""
    listed = []
    for z in range(depth):
        for y in range(height):
            for x in range(width):
                host = (z * (height // 2) + y // 2) * (width // 2) + x // 2
                facts = dict(coords=(x, y, z), core_on_chip=0, process_index=host, device_kind=kind, platform="tpu")
                listed.append(SimpleNamespace(**facts))
    return listed


def gpus(count, hosts):
    facts = dict(device_kind="NVIDIA H200", platform="gpu")
    return [SimpleNamespace(id=number, process_index=number * hosts // count, **facts) for number in range(count)]


SLICES = {
    "v6e_16": chips(4, 4), "v6e_32": chips(4, 8), "v5p_16": chips(2, 2, 2, "TPU v5"), "gpu_2x8": gpus(16, 2),
}


@pytest.mark.parametrize("name", SLICES)
def test_the_axis_with_the_most_traffic_stays_inside_a_host_or_between_neighbours(name):
    mesh = make_config(f"mesh={name}", "sharding=tp_ring").mesh
    laid = distributed.arrange(SLICES[name], tuple(mesh.axes.values()))
    devices = device_count(mesh)
    assert laid.shape == tuple(mesh.axes.values()) and len({id(device) for device in laid.flat}) == devices
    in_order = [number * mesh.hosts // devices for number in range(devices)]
    assert [device.process_index for device in laid.flat] == in_order, "as task=plan counts"
    for group in laid.reshape(-1, mesh.axes.tp):
        if len({device.process_index for device in group}) > 1:
            spans = numpy.ptp([device.coords for device in group], axis=0) + 1
            assert spans.prod() == mesh.axes.tp, "a block of the torus without gaps"
        else:
            assert mesh.axes.tp <= devices // mesh.hosts


def test_a_slice_needs_every_host():
    with pytest.raises(ConfigError, match="1 hosts, 1 processes have joined, mesh.hosts=2"):
        resolve_here("mesh=cpu_8", "mesh.hosts=2", "distributed=auto")
