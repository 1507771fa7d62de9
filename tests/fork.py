"""Runs of run.py that cost a fork instead of a start: a server that has imported what they need, and forks for each.

    run = warm().start(["seed=3"], environment)     # like subprocess.Popen: pid, poll, wait, send_signal
    run.wait(60), run.output, run.torch, run.cpu

A run is a process of its own, with its own JAX; a warm server's finds torch, diffusers and JAX imported.
"""
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STOPS = signal.SIGINT, signal.SIGTERM
HEAVY = (
    "wan_torchax.session", "wan_torchax.tasks.generate", "wan_torchax.models.loop", "wan_torchax.patches",
    *(f"wan_torchax.stages.{name}" for name in ("text", "image", "encode", "denoise", "decode")),
    *(f"wan_torchax.models.wan.{name}" for name in ("blocks", "vae", "text", "clip", "conditions")),
)


# ---------------------------------------------------------------- who asks


@functools.cache
def warm() -> "Server":
    """The one of this process."""
    server = Server(warm=True)
    atexit.register(server.close)
    return server


class Server:
    def __init__(self, warm: bool = False):
        environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
        command = [sys.executable, "-m", "tests.fork", *(["warm"] if warm else [])]
        self.folder = tempfile.TemporaryDirectory(prefix="runs-")
        atexit.register(self.folder.cleanup)  # what the runs said is read after the server's end too
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def start(self, arguments, environment=(), code: str | None = None) -> "Run":
        """run.py, or some code that knows it as `run`, with these arguments, and with these variables beside the
        server's."""
        folder = Path(tempfile.mkdtemp(dir=self.folder.name))
        order = {"arguments": list(map(str, arguments)), "environment": dict(environment), "code": code}
        order["folder"] = str(folder)
        for name in ("1", "2"):  # what it says, also before it has begun
            (folder / name).touch()
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Run(int(self.process.stdout.readline()), folder)

    def run(self, arguments, environment=(), seconds=300) -> "Run":
        run = self.start(arguments, environment)
        run.wait(seconds)
        return run

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(60) == 0


class Run:
    def __init__(self, pid: int, folder: Path):
        self.pid, self.folder = pid, folder

    def poll(self) -> int | None:
        return self.facts.get("returncode")

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"no end after {seconds} s: {self.output[-2000:]}")
            time.sleep(0.02)
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        self.wait(timeout)
        return self.output, None

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def facts(self) -> dict:
        path = self.folder / "facts.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def stdout(self) -> str:
        return (self.folder / "1").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "2").read_text()

    @property
    def returncode(self) -> int:
        return self.facts["returncode"]

    @property
    def cpu(self) -> float:
        return self.facts["cpu"]

    @property
    def torch(self) -> bool:
        return (self.folder / "torch").exists()


# ---------------------------------------------------------------- the server


def serve(warm: bool) -> None:
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    run.job.__wrapped__.__module__ = "__main__"  # as Hydra knows it
    run.commandline.compose([])  # Hydra looks for its plugins once
    for name in HEAVY if warm else ():
        importlib.import_module(name)
    gc.freeze()  # what is imported stays
    gc.set_threshold(100_000)  # as run.py does
    children, waiting = {}, True
    while waiting or children:
        if select.select([sys.stdin] if waiting else [], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            waiting = bool(line)
            if line:
                order = json.loads(line)
                signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # one for the child waits for its handlers
                child = os.fork()
                if child == 0:
                    alone(run, order)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
                children[child] = Path(order["folder"])
                print(child, flush=True)
        reap(children)


def reap(children: dict) -> None:
    """Write down how those ended that have."""
    while children:
        child, status, used = os.wait4(-1, os.WNOHANG)
        if not child:
            return
        facts = {"returncode": os.waitstatus_to_exitcode(status), "cpu": used.ru_utime + used.ru_stime}
        folder = children.pop(child)
        (folder / "partial").write_text(json.dumps(facts))
        os.replace(folder / "partial", folder / "facts.json")


def alone(run, order) -> None:
    """In the child: run.py as it would be from a shell."""
    run.interruption.install()
    folder = Path(order["folder"])
    for number in (1, 2):
        os.dup2(os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= order["environment"]
    if "NOBODY_READS" in os.environ:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    sys.argv = ["run.py", *order["arguments"]]
    os._exit = functools.partial(end, folder, os._exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        exec(order["code"], {"__name__": "__main__", "run": run}) if order["code"] else run.main()
        os._exit(0)
    except SystemExit as error:
        os._exit(error.code or 0)
    except BaseException as error:
        print(f"RAW {type(error).__name__}: {error}")
        os._exit(99)


def end(folder: Path, leave, status: int) -> None:
    if "torch" in sys.modules:
        (folder / "torch").touch()
    with contextlib.suppress(OSError):
        sys.stdout.flush(), sys.stderr.flush()
    leave(status)


if __name__ == "__main__":
    serve("warm" in sys.argv)
