"""Runs of run.py that cost a fork instead of a start: `python tests/fork.py` reads one JSON list of arguments a line.

Answers a line for each: {"status", "cpu" (seconds), "output", "torch": whether it was imported by then}.
"""
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main():
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    run.job.__wrapped__.__module__ = "__main__"  # as Hydra knows it
    for line in sys.stdin:
        print(json.dumps(attempt(run, json.loads(line))), flush=True)


def attempt(run, arguments) -> dict:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as facts:
        child = os.fork()
        if child == 0:
            alone(run, arguments, output, facts)
        _, status, used = os.wait4(child, 0)
        for file in (output, facts):
            file.seek(0)
        answer = {"status": os.waitstatus_to_exitcode(status), "cpu": used.ru_utime + used.ru_stime}
        return answer | {"output": output.read()} | json.loads(facts.read() or "{}")


def alone(run, arguments, output, facts):
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    sys.argv = ["run.py", *arguments]
    leave = os._exit

    def end(status=0):
        sys.stdout.flush(), sys.stderr.flush()
        facts.write(json.dumps({"torch": "torch" in sys.modules}))
        facts.flush()
        leave(status)

    os._exit = end
    try:
        run.main()
        end(0)
    except SystemExit as error:
        end(error.code or 0)
    except BaseException as error:
        print(f"RAW {type(error).__name__}: {error}")
        end(99)


if __name__ == "__main__":
    main()
