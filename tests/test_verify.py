"""task=verify: what is right is said to be, and each fault, planted, is named."""
import json
import os
import shlex
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests import tiny
from tests.conftest import ROOT, SMALL, make_config, resolve_here
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import VERIFY_CHECKS, validate
from wan_torchax.kernels import attention
from wan_torchax.session import session
from wan_torchax.tasks import plan
from wan_torchax.tasks.verify import CHECKS, kernels, known, machine, profile, step, verify

EIGHT = "mesh=cpu_8", "sharding=sequence", "mesh.axes={dp:2,sp:4,tp:1}", "verify.repeats=1"


def found(check, resolved, folder):
    """What a check finds wrong, as (check, what), and what it reports."""
    report = {}
    return [(one.check, one.what) for one in check(resolved, folder, report) if one.state != "ok"], report


# ---------------------------------------------------------------- the profile


def test_a_loop_has_only_the_time_that_its_body_leaves():
    events = [(0, 100, "while"), (10, 40, "dot"), (40, 90, "fusion"), (50, 60, "copy"), (120, 130, "dot")]
    times = {}
    for op, nanoseconds in profile.self_times(events):
        times[op] = times.get(op, 0) + nanoseconds
    assert times == {"while": 20, "dot": 40, "fusion": 40, "copy": 10} and profile.length(events) == 110


def test_kernels_of_a_cuda_graph_have_their_parts():
    """A profile says of each kernel in it only that it is the graph's."""

    def event(name, duration):
        return SimpleNamespace(name=name, start_ns=0, duration_ns=duration, stats=[("hlo_op", "command_buffer_7")])

    names = ["loop_add_fusion_3", "nvjet_sm90_tst_256x144", "hopper_fast_mosaic_gpu_kernel", "memcpy128"]
    ops = {"loop_add_fusion.3": ("fusion", "block/norm1/add"), "attention": (), "projections": (), "copies": ()}
    line = SimpleNamespace(events=[event(name, 5) for name in names])
    (events,) = profile.by_device("/device:GPU:0", line, ops).values()
    assert [op for _, _, op in events] == ["loop_add_fusion.3", "projections", "attention", "copies"]
    parts = [step.part_of("kernel", op, {}) for op in ("projections", "attention", "copies")]
    assert parts == ["linear layers", "attention", "rest"]


def test_a_profile_is_read(tmp_path):
    """Eight devices, a product in a loop and a sum over all of them."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")

    def both(array):
        with jax.named_scope("mine"):
            array = lax.fori_loop(0, 3, lambda _, carry: jnp.tanh(carry @ carry), array)
        return lax.psum(array, "x")

    inside = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec(), check_vma=False)
    compiled = jax.jit(inside).lower(jax.ShapeDtypeStruct((8 * 256, 256), jnp.float32)).compile()
    array = jax.device_put(jnp.ones((8 * 256, 256)), compiled.input_shardings[0][0])
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(compiled(array))
    groups = {"norms": "/mine/"}
    parts = profile.by_part(tmp_path, compiled.as_text(), lambda kind, name: step.part_of(kind, name, groups))
    assert parts["norms"] > 0 and parts["communication"] > 0
    devices = profile.read(tmp_path, profile.instructions(compiled.as_text()))
    assert len(devices) == 8, "each fake device is told apart"


# ---------------------------------------------------------------- the step against a plan


PLANNED = {
    "self-attention kernel": 2.0, "cross-attention kernel": 0.1, "product kernel": 0.4, "feed-forward": 0.1,
    "products' waits for memory": 0.05, "norms": 0.1, "rope": 0.1, "communication": 0.2, "kernels' launches": 0.01,
    "embeddings": 0.01, "modulation and rest": 0.02,
}


def test_a_plan_has_the_same_parts():
    plan = {"estimate": {"parts": {"likely": PLANNED}}}
    expected = {"attention": 2.1, "linear layers": 0.55, "norms": 0.2, "communication": 0.2, "wait": 0.01, "rest": 0.03}
    assert step.planned_parts(plan) == pytest.approx(expected)


def test_what_differs_is_named_with_a_reason_and_a_remedy():
    parts = {"attention": (2.2, 2.1), "linear layers": (0.9, 0.55), "norms": (0.1, 0.2), "wait": (0.01, 0.0)}
    rows = {part: {"seconds": seconds, "planned": planned} for part, (seconds, planned) in parts.items()}
    slow, fast = step.differences({"parts": rows, "profiled_seconds": 3.2})
    assert slow.state == "note" and slow.what.startswith("linear layers: 0.900 s, planned 0.550; likely ")
    assert "products=xla" in slow.remedy
    assert fast.state == "ok" and fast.what.startswith("norms: 0.100 s")


def test_memory_beyond_the_plan_is_named():
    rows = {"temporaries": {"gib": 9.1, "planned": 1.7}, "weights": {"gib": 3.0, "planned": 2.9}}
    (finding,) = step.memory_differences(rows)
    assert "9.10 GiB, planned 1.70" in finding.what and finding.remedy


# ---------------------------------------------------------------- what is known


def test_other_files_are_named():
    files = {"transformer/a": "1", "vae/b": "2"}
    assert known.compare_files(files, files, "here").state == "ok"
    assert "transformer/a" in known.compare_files(files, files | {"transformer/a": "3"}, "here").what
    assert "text/c: missing" in known.compare_files(files, files | {"text/c": "3"}, "here").what


@pytest.mark.parametrize("change, state", [(0.0, "ok"), (1e-5, "ok"), (0.1, "bad"), (float("nan"), "bad")])
def test_another_answer_is_named(change, state):
    own = {"settings": {"seed": 1}, "values": {"latents": [1.0, 2.0]}}
    other = own | {"by": {"device": "8 TPU"}, "values": {"latents": [1.0 + change, 2.0]}}
    config = make_config()
    (finding,) = known.compare_answers(own, [other | {"settings": {"seed": 2}}, other], config)
    assert finding.state == state and "8 TPU" in finding.what
    (finding,) = known.compare_answers(own, [], config)
    assert "none is known" in finding.what


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("override, message", [
    ("verify.checks=[kernel]", "verify.checks=kernel: "), ("verify.repeats=0", "verify.repeats=0: must be at least 1"),
    ("verify.plan=/nowhere", "verify.plan=/nowhere: no such file"),
    ("mesh=v6e_16", "mesh=v6e_16: has 4 hosts, and distributed=none is one process"),
])
def test_what_cannot_be_is_said_before(override, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config("task=verify", override))


def test_a_file_that_is_no_plan_is_refused_first(tmp_path):
    (tmp_path / "plan.json").write_text('{"model": "demo"}')
    with pytest.raises(ConfigError, match="not a plan"):
        verify(make_config("task=verify", f"verify.plan={tmp_path}/plan.json"), tmp_path)
    assert tuple(CHECKS) == VERIFY_CHECKS and list(make_config().verify.checks) == list(CHECKS)


@pytest.mark.parametrize("file", sorted((ROOT / "verify" / "machines").glob("*.json")), ids=lambda file: file.stem)
def test_docs_list_every_machine(file):
    report = json.loads(file.read_text())
    (row,) = [line for line in (ROOT / "docs/verified.md").read_text().splitlines() if f"/{file.name})" in line]
    about, wrong = report["config"], [one["check"] for one in report["findings"] if one["state"] != "ok"]
    shape = f"{about['model']}, {about['resolution']}, {about['dtype']}"
    cells = about["device"], shape, f"{report['step']['seconds']:.3f} s", ", ".join(dict.fromkeys(wrong)) or "nothing"
    assert row.startswith("| " + " | ".join(cells) + " |")


# ---------------------------------------------------------------- planted faults


@pytest.mark.system
def test_a_wrong_device_is_named(tmp_path, monkeypatch, two_layers):
    resolved = resolve_here(*two_layers, *EIGHT)
    monkeypatch.setattr(kernels, "cases", lambda resolved: islice(kernels.attention_cases(resolved), 2))
    assert found(kernels.check, resolved, tmp_path)[0] == []

    def disturbed(query, *others):
        """The last bit of one number, on one device."""
        out, *rest = sound(query, *others)
        here = lax.axis_index(("dp", "sp", "tp")) == 5
        return out.at[0, 0, 0].multiply(jnp.where(here, 1 + 2**-22, 1.0)), *rest

    sound = attention.KERNELS["xla"]
    monkeypatch.setitem(attention.KERNELS, "xla", disturbed)
    findings, report = found(kernels.check, resolved, tmp_path)
    assert findings and {check for check, _ in findings} == {"device"}
    assert all(what.endswith("device 5 gives other bits than most") for _, what in findings)
    assert any(row["wrong"] == ["differs on device 5"] for row in report["kernels"])


@pytest.mark.system
def test_a_kernel_slower_than_xla_and_one_beyond_its_bound_are_named(two_layers):
    resolved = resolve_here(*two_layers, "verify.repeats=1")

    def doubled(array):
        return 2 * array[0]

    def slow(array):
        return lax.fori_loop(0, 300, lambda _, carry: jnp.tanh(carry) * 0 + 2 * array[0], array[0])

    shapes, exact = ((1, 500, 512),), lambda numbers, array: 2 * array[0, numbers]
    case = kernels.Case("mine", "attention=xla", shapes, slow, doubled, exact, 500, 1e-5)
    _, (finding,) = kernels.measure(case, resolved)
    assert finding.check == "slow" and finding.remedy == "try attention=xla" and "times what XLA takes" in finding.what
    wrong = replace(case, run=lambda array: 2.001 * array[0], plain=None)
    row, (finding,) = kernels.measure(wrong, resolved)
    assert finding.state == "bad" and "mine: error 5.0e-04" in finding.what and row["wrong"]
    _, (finding,) = kernels.measure(replace(wrong, run=lambda array: array[0] * jnp.nan), resolved)
    assert finding.state == "bad" and "mine: error inf" in finding.what


@pytest.mark.parametrize("sums, again, named", [
    ([1, 1, 1], [1, 1, 1], None),
    ([1, 2, 1], [1, 2, 1], "device 1 gives other bits than most"),
    ([1, 2], [1, 2], "device 0, device 1 do not agree, and no majority does"),
    ([1, 1, 1], [1, 1, 3], "the second call gives other bits on device 2"),
])
def test_devices_are_judged_by_what_most_of_them_compute(sums, again, named):
    devices = np.array([SimpleNamespace(id=number) for number in range(len(sums))])
    case = kernels.Case("mine", "", (), None, None, None, 1, 1e-5)
    row = {"error": 0.0, "seconds": 1.0, "wrong": []}
    given = case, row, [0.0] * len(sums), np.array(sums), np.array(again), SimpleNamespace(devices=devices)
    assert [finding.what for finding in kernels.faults(*given)] == ([] if named is None else [f"mine: {named}"])


@pytest.mark.system
def test_tpu_kernels_are_among_the_cases(two_layers):
    """Here in interpret mode; as many as a step on a TPU has."""
    blocks = {"block_q": 128, "block_kv": 128, "tile_kv": 128, "sub_q": 128, "chunk_kv": 128, "interpret": "true"}
    splash = ["attention.self.kernel=splash", *(f"attention.self.{key}={value}" for key, value in blocks.items())]
    products = "products=pallas_ahead", "products.interpret=true", "products.rows=256"
    groups = "mesh=cpu_8", "mesh.axes={dp:1,sp:2,tp:1}", "sharding=tokens", "sharding.attention.groups=[1]"
    typed = "model.dtype.transformer=bfloat16"
    resolved = resolve_here(*SMALL, *tiny.model("wide"), *splash, *products, *groups, typed)
    cases = list(kernels.cases(resolved))
    names = {case.name.split(",")[0].removeprefix("linear layer ") for case in cases}
    linear = {"pallas", "pallas gelu", "pallas pieces transpose_in"}
    assert names >= {"attention.self splash", *linear, "norm", "rope", "copies"}
    for case in cases[-6:]:  # a layer of pieces, norms, RoPE and copies
        row, findings = kernels.measure(case, resolved)
        assert row["error"] < row["bound"] and not [one for one in findings if one.state == "bad"]


@pytest.mark.system
def test_a_wrong_link_is_named(tmp_path, monkeypatch, two_layers):
    mesh = resolve_here(*two_layers, *EIGHT).mesh
    assert list(machine.broken_links(mesh, "sp", 2**12)) == []
    sent = lax.ppermute

    def lossy(array, axis, pairs):
        """One word changes on its way to the device in the third place."""
        received = sent(array, axis, pairs)
        return received.at[7].add(jnp.where(lax.axis_index(("dp", "sp", "tp")) == 3, 1, 0).astype(array.dtype))

    monkeypatch.setattr(machine.lax, "ppermute", lossy)
    (finding,) = machine.broken_links(mesh, "sp", 2**12)
    assert finding.state == "bad" and "1 of 1,024 words" in finding.what
    assert "from device 2 to device 3 (axis sp)" in finding.what


@pytest.mark.system
def test_a_slow_kernel_is_named(tmp_path, monkeypatch, two_layers):
    """The plan is what the same step took before attention was made to run twenty times."""
    overrides = *two_layers, "resolution.height=128", "resolution.width=128", "verify.repeats=1"
    resolved = resolve_here(*overrides)
    _, report = found(step.check, resolved, tmp_path)
    parts = {part: row["seconds"] for part, row in report["step"]["parts"].items()}
    write_plan(tmp_path / "plan.json", resolved, parts)
    sound = attention.KERNELS["xla"]

    def slow(query, *others):
        return lax.fori_loop(0, 19, lambda _, out: sound(query + 0 * out[0], *others), sound(query, *others))

    monkeypatch.setitem(attention.KERNELS, "xla", slow)
    session.clear()
    findings, report = found(step.check, resolve_here(*overrides, f"verify.plan={tmp_path}/plan.json"), tmp_path)
    session.clear()
    assert findings[0][0] == "slow" and findings[0][1].startswith("attention: ")
    assert report["step"]["parts"]["attention"]["seconds"] > 5 * parts["attention"]


def write_plan(path, resolved, parts):
    """A plan of this run with these likely seconds."""
    plan = {"model": resolved.config.model.name, "tokens": resolved.tokens, "guidance": resolved.config.guidance}
    plan |= {"chips": 1, "axes": dict(resolved.placement["axes"]), "sharding": resolved.config.sharding.name}
    plan |= {"main_stage": "denoise", "memory": {"denoise": {"weights_gib": 1.0, "temporaries_gib": 1.0}}}
    seconds = dict.fromkeys(("low", "likely", "high"), sum(parts.values()))
    names = {"linear layers": "projections", "wait": "kernels' launches"}
    likely = {names.get(part, part): value for part, value in parts.items()}
    path.write_text(json.dumps(plan | {"estimate": {"parts": {"likely": likely}, "seconds_per_step": seconds}}))


# ---------------------------------------------------------------- the whole


@pytest.mark.system
def test_the_demo_on_one_device_and_a_page_without_its_owner(tmp_path, capsys, monkeypatch):
    """All checks; the embedded model's answer is the known one, and another is told."""
    config = make_config("task=verify", "verify.repeats=1")
    assert verify(config, tmp_path) > 0
    out, report = capsys.readouterr().out, json.loads((tmp_path / "verify.json").read_text())
    assert "ok    answer     one step is as those of" in out and "files are the known ones" in out
    assert {finding["state"] for finding in report["findings"]} == {"ok"}
    assert set(report["step"]["parts"]) >= {"attention", "linear layers", "norms", "wait"}
    assert sum(row["seconds"] for row in report["step"]["parts"].values()) == pytest.approx(
        report["step"]["profiled_seconds"], rel=0.05
    )
    page = (tmp_path / "verify.html").read_text() + (tmp_path / "verify.json").read_text()
    assert not [place for place in (Path.home(), ROOT, tmp_path, Path.cwd()) if f"{place}/" in page]
    content = json.loads((known.KNOWN / "demo.json").read_text())
    content["answers"][0]["values"]["latents"] = list(np.array(content["answers"][0]["values"]["latents"]) * 1.1)
    (tmp_path / "demo.json").write_text(json.dumps(content))
    monkeypatch.setattr(known, "KNOWN", tmp_path)
    monkeypatch.setattr("wan_torchax.tasks.verify.CHECKS", {"weights": known.check})
    with pytest.raises(ConfigError, match="task=verify: answer"):
        verify(make_config("task=verify", "verify.checks=[weights]"), tmp_path)


# ---------------------------------------------------------------- on a TPU, before there is one


@pytest.mark.skipif("TPU_PYTHON" not in os.environ, reason="TPU_PYTHON names no Python with libtpu")
@pytest.mark.parametrize(
    "preset", ["t2v_14b_720p_v6e8_v5", "t2v_14b_720p_int8_v6e8_v5", "t2v_turbo_14b_720p_v6e8_v1"]
)
def test_every_kernel_that_would_be_verified_compiles_for_a_v6e(tmp_path, preset):
    """At the run's shapes and at awkward ones: all cases as one program, by libtpu."""
    python = f"plan.compiler={shlex.quote(os.environ['TPU_PYTHON'])}"
    config = make_config("task=plan", "plan.kernels=true", f"preset={preset}", "compile.store=null", python)
    every = list(kernels.cases(plan.describe(config)))
    shapes = [[jax.ShapeDtypeStruct(shape, "bfloat16") for shape in case.shapes] for case in every]

    def program(inputs):
        return [case.run(*arrays) for case, arrays in zip(every, inputs)]

    artifact = tmp_path / "cases.bin"
    artifact.write_bytes(jax.export.export(jax.jit(program), platforms=["tpu"])(shapes).serialize())
    used = plan.call_compiler(config, artifact)["vmem_bytes"]
    assert len(every) > 10 and len(used) >= 3, used
