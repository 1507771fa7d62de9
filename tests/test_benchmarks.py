"""Every benchmark runs through on any machine with --smoke: small sizes, what it would measure, how it ends."""
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.conftest import ROOT

ENDS = {  # the last line's keys, where it is JSON
    "attention_gpu.py": {"command", "versions", "device", "rows"},
    "gpu.py": {"command", "device", "versions", "rows", "ratios", "skipped"},
    "kernel_schedule.py": {"chip", "queries", "keys", "rows"},
    "plans.py": {"preset", "low", "likely", "high"},
    "demo_quality.py": None,
    "start.py": {"reading", "runs"},
    "adapter_load.py": {"checkpoint_bytes", "rank", "rows"},
    "serve_batch.py": {"command", "versions", "device", "rows"},
    "quality.py": {"command", "versions", "device", "n", "rows"},
    "outliers.py": {"command", "versions", "device", "n", "rows"},
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
    if script == "outliers.py":
        assert max(row["changed"] for row in report["rows"]) < 1e-5
        before, after = (row["error"] for row in report["rows"] if row["mode"] == "int8")
        assert before < 0.03 < 0.1 < after


def test_outliers_do_not_change_the_function(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    outliers = importlib.import_module("outliers")
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=32, ffn_dim=64, num_layers=2, text_dim=16, freq_dim=16
    ).eval()
    inputs = torch.randn(1, 16, 2, 4, 4), torch.tensor([500.0]), torch.randn(1, 5, 16)
    expected, before = outliers.forward(model, *inputs)
    outliers.rescale(model, factor=1000, seed=0)
    found, after = outliers.forward(model, *inputs)
    assert outliers.relative(found, expected) < 1e-5 and before < 20 < 500 < after


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
