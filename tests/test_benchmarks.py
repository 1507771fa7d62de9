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
    "start.py": {"reading"},
    "adapter_load.py": {"checkpoint_bytes", "rank", "rows"},
    "adapter_swap.py": {"command", "versions", "device", "n", "rank", "rows"},
    "serve_batch.py": {"command", "versions", "device", "rows"},
    "quality.py": {"command", "versions", "device", "n", "rows"},
    "outliers.py": {"command", "versions", "device", "n", "rows"},
    "families_gpu.py": {"command", "versions", "device", "n", "rows"},
    "sparse_gpu.py": {"command", "versions", "device", "n", "rows"},
    "live_gpu.py": {"command", "versions", "device", "n", "rows"},
    "live_memory.py": {"command", "versions", "device", "n", "frames", "seconds", "anonymous", "files"},
    "sanitize.py": {"command", "versions", "device", "n", "rows"},
    "port.py": {"command", "versions", "device", "n", "models", "rows"},
}
LONG = (  # half a minute and more
    "adapter_load.py", "adapter_swap.py", "demo_quality.py", "families_gpu.py", "gpu.py", "live_gpu.py", "outliers.py",
    "quality.py", "serve_batch.py", "sparse_gpu.py",
)


def test_every_benchmark_is_here():
    assert {path.name for path in (ROOT / "benchmarks").glob("*.py")} == set(ENDS) | {"figures.py"}


@pytest.mark.system
@pytest.mark.parametrize("script", [pytest.param(one, marks=pytest.mark.full if one in LONG else ()) for one in ENDS])
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
    if script == "families_gpu.py":
        columns = {(row["what"], row["case"], row["column"]) for row in report["rows"]}
        cases = "flux1-dev", "hunyuan15-480p", "animate-14b-720p"
        forwards = {("one forward", case, column) for case in cases for column in "bc"}
        assert forwards | {("decode", "hunyuan15-480p", column) for column in "bc"} <= columns
    if script == "sparse_gpu.py":
        measured = {row["what"] for row in report["rows"]}
        assert {"kernel given lists", "attention: lists", "attention: vsa lists of tiles"} <= measured
        assert {"denoising, 4 steps", "denoising, 3 steps", "a coarse step", "50 steps by these, shift 5"} <= measured
    if script == "adapter_swap.py":
        rows = {row["what"]: row for row in report["rows"]}
        assert {"GGUF Q4_K, from disk", "guided step, beside"} < rows.keys()
        assert all(rows[f"exchange, {mode}"]["equal_to_a_fresh_load"] for mode in ("beside", "merge"))
    if script == "live_gpu.py":
        (row,) = report["rows"]
        assert len(row["videos"]) == 3 and all(len(video["times"]) == 5 for video in row["videos"])
        assert 0 < row["first_frames_seconds"] < row["frames"] / row["frames_per_second"]
    if script == "outliers.py":
        assert max(row["changed"] for row in report["rows"]) < 1e-5
        before, after = (row["error"] for row in report["rows"] if row["mode"] == "int8")
        assert before < 0.03 < 0.1 < after


def test_empty_bundles_and_what_hangs_over_take_their_cycles(monkeypatch, tmp_path):
    """A loop of 300 bundles, of which half are empty, run twice for a block of outputs."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    schedule = importlib.import_module("kernel_schedule")
    used = ["0 0 0 0 0 0 0 0 0 1"] * 20 + ["2 0 0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0 0 0"] * 150 + ["0 " * 10] * 10
    utilization = tmp_path / "7-product_kernel.1-66-pre-delay_hlo-static-per-bundle-utilization.txt"
    utilization.write_text("\n".join(["== CAPACTIY:", "== UTILIZATION:", *used]))
    (tmp_path / "7-product_kernel.1-62-schedule-analysis_packed-bundles-post-ra.txt").write_text("not this one")
    (tmp_path / "7-product_kernel.1-63-packed-bundles-post-ra.txt").write_text(
        "   0x0   :  { %1 = smov 0 } /* Start region 0 */\n"
        "   0x2   :  { %2 = sbr.rel (%p) target bundleno = 330 (0x14a), region = 3 }\n"
        f"  {20:#x} LB: > {{ %3 = vmatmul }} /* Start region 1 */\n"
        f"  {319:#x}   : > {{ %4 = sbr.rel (!%p) target bundleno = 20 (0x14), region = 1 }}\n"
        f"  {320:#x}   :  {{ %5 = vsyncpa }} /* End region 1 */\n"
    )
    bundles, borders, skips = schedule.parse(utilization)
    assert len(bundles) == 330 and borders == [0, 20, 320] and skips == [(2 + schedule.DELAY, 330)]
    kernel = schedule.Candidate("it", None, [], flops=0, blocks=4, steps=1, trips=(2,))
    total, hot, again = schedule.count(kernel, bundles, borders, skips)
    assert total == 2 * 300 + 30 and len(hot) == 300 and again == []
    assert schedule.linear("18944x5120x13824", ["pallas_v7x"]).blocks == 37 * 14, "13,824 outputs are 13.5 blocks"


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


@pytest.mark.system
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
