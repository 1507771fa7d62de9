"""The cookbook's ten commands print what it says they print, in a copy of the project."""
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.full  # ten runs
DEADLINE = 600  # seconds, of a command
NEEDED = ("run.py", "patches.py", "__init__.py", "wan_torchax", "conf", "kernels", "models")
# What differs from one run to the next: hashes and times.
VARYING = {r"[0-9a-f]{12}": r"[0-9a-f]{12}", r"[\d.]+ ms": r"[\d.]+ ms", r"in [\d.]+ s": r"in [\d.]+ s"}


def recipes() -> list[tuple[str, list[str]]]:
    """Each command and the lines below it."""
    block = (ROOT / "docs" / "cookbook.md").read_text().split("```")[1]
    found = []
    for part in re.split(r"\n\n", block.strip()):
        command, *printed = (line for line in part.splitlines() if not line.startswith("#"))
        found.append((command.removeprefix("$ "), printed))
    return found


def pattern(line: str) -> str:
    """`…` stands for anything."""
    line = line.strip()
    for written, varying in VARYING.items():
        line = re.sub(written, lambda match, kept=varying: f"\0{kept}\0", line)
    parts = line.split("\0")
    escaped = [part if place % 2 else re.escape(part).replace("…", ".*") for place, part in enumerate(parts)]
    return "".join(escaped)


def test_the_ten_commands_print_what_the_cookbook_says(tmp_path):
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    commands, folder, wrong = recipes(), None, []
    assert len(commands) == 10
    for command, printed in commands:
        typed = command.replace("python run.py", f"{shlex.quote(sys.executable)} run.py", 1)
        typed = typed.replace("replay=…", f"replay={folder}").replace("resume=outputs/…", f"resume={folder}")
        run = subprocess.run(
            ["bash", "-c", typed], cwd=tmp_path, env=environment, timeout=DEADLINE, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{command}\n{run.stderr[-3000:]}"
        lines = [line.strip() for line in (run.stderr + run.stdout).splitlines()]
        missing = [line for line in printed if not any(re.fullmatch(pattern(line), one) for one in lines)]
        if missing:
            wrong.append("\n".join([f"$ {command}", *(f"- {line}" for line in missing), *lines[-20:]]))
        if videos := re.findall(r"(\S*outputs/\S+?)(?:/video\.mp4)?$", run.stdout, re.MULTILINE):
            folder = videos[-1]
    assert not wrong, "\n\n".join(wrong)


def test_lines_that_differ_are_seen():
    assert re.fullmatch(pattern("…/a-seed1/video.mp4"), "outputs/x/a-seed1/video.mp4")
    assert not re.fullmatch(pattern("…/a-seed1/video.mp4"), "outputs/x/a-seed2/video.mp4")
    assert re.fullmatch(pattern("    31.605 ms  a.b=1"), "9.5 ms  a.b=1")
    assert not re.fullmatch(pattern("| 1.776 s (floor) |"), "| 1.777 s (floor) |")
