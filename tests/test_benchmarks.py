"""Every benchmark runs through on any machine with --smoke: small sizes, what it would measure, how it ends."""
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

ENDS = {  # the last line's keys, where it is JSON
    "attention_gpu.py": {"command", "versions", "device", "rows"},
    "gpu.py": {"command", "device", "versions", "rows", "ratios", "skipped"},
    "kernel_schedule.py": {"chip", "queries", "keys", "rows"},
    "demo_quality.py": None,
    "start.py": {"reading", "runs"},
    "adapter_load.py": {"checkpoint_bytes", "rank", "rows"},
    "serve_batch.py": {"command", "versions", "device", "rows"},
    "quality.py": {"command", "versions", "device", "n", "rows"},
}


def test_every_benchmark_is_here():
    assert {path.name for path in (ROOT / "benchmarks").glob("*.py")} == set(ENDS) | {"figures.py"}


@pytest.mark.parametrize("script", ENDS)
def test_a_smoke_test_runs_through(script, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--smoke"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    last = answer.stdout.splitlines()[-1]
    if ENDS[script] is None:
        assert last.startswith("| bf16 transformer | ") and " dB | " in last
        return
    report = json.loads(last)
    assert ENDS[script] <= report.keys()
    if script == "gpu.py":
        assert not [line for line in report["skipped"] if "not in --eager" not in line]
        measured = {row["what"] for row in report["rows"]}
        assert {"floor of a guided step", "text encoder", "error against float32"} <= measured


def test_flash_attention_is_a_peer_where_it_is_installed(tmp_path):
    """With a module of its name and call."""
    (tmp_path / "flash_attn_interface.py").write_text(
        "import torch\n"
        "def flash_attn_func(*arrays):\n"
        "    arrays = [array.transpose(1, 2) for array in arrays]\n"
        "    return torch.nn.functional.scaled_dot_product_attention(*arrays).transpose(1, 2)\n"
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "attention_gpu.py"), "--smoke"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    row = json.loads(answer.stdout.splitlines()[-1])["rows"][0]
    assert list(row["milliseconds"]) == ["torch", "flash3", "xla"] and row["milliseconds"]["flash3"] > 0
