"""Plans: the arithmetic is Wan's, bytes are the table's, what does not fit says so and how it would."""
import json
import os
import shlex
import sys

import jax
import pytest
from PIL import Image

from tests.conftest import build, make_config, resolve_there
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ENDS, ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.runtime.jobs import plan_job
from wan_torchax.stages.stage import find
from wan_torchax.tasks import compiler, plan, plan_page


def make(folder, *overrides):
    config = make_config("task=plan", "plan.compiler=none", *overrides)
    validate(config)
    return plan.make(config, folder)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    return folder, make(folder, "model=wan21_t2v_14b", "resolution=720p", "mesh=v6e_8")


def test_the_arithmetic_is_wans(report):
    made = report[1]
    flops = made["flops_per_step"]
    assert made["tokens"] == 75_600
    assert flops["total"] == pytest.approx(2 * 6523e12, rel=0.001)
    assert flops["self-attention"] / flops["total"] == pytest.approx(0.72, abs=0.005)
    assert made["floor_seconds_per_step"] == pytest.approx(1.78, abs=0.01)


def test_bytes_are_the_tables(report):
    transformer = report[1]["components"]["transformer"]
    assert transformer["parameters"] == pytest.approx(14.29e9, rel=0.001)
    spread = transformer["rules"]["attention_in"]
    assert spread["gib_per_chip"] == pytest.approx(spread["gib"] / 4)
    text_encoder = report[1]["components"]["text_encoder"]
    assert text_encoder["gib"] == pytest.approx(10.6, abs=0.2), "bf16, as transformers loads it"
    assert report[1]["fits"]


def test_communication_is_three_sums_of_the_hidden_states_in_each_block(report):
    rows = {(row["kind"], row["axis"]): row for row in report[1]["communication"]["rows"]}
    sums = rows["all-reduce", "tp"]["bytes"]
    hidden = 75_600 * 5120 * 2
    assert sums == pytest.approx(40 * 3 * hidden, rel=0.01)


def test_it_is_written_shown_and_drawn(report):
    folder, made = report
    assert json.loads((folder / "plan.json").read_text())["tokens"] == made["tokens"]
    text = (folder / "plan.md").read_text()
    assert "Floor at 100 % of peak: 1.776 s a step" in text and "| all-reduce | tp |" in text
    assert "No libtpu here, so no estimated step time" in text and "estimate from shapes" in text
    assert Image.open(folder / "plan.png").size[0] == 1100


@pytest.mark.parametrize(
    "kind, axis, share",
    [
        ("all-reduce", "tp", 0),  # inside a host
        ("collective-permute", "sp", 4),  # four rings, each entering the host by its one chip
        ("all-gather", "sp+tp", 1),  # one ring through two hosts
        ("all-to-all", "sp", 2),  # each of four chips keeps half
        ("all-to-all", "dp+sp+tp", 3),  # each of four chips hears from twelve of sixteen elsewhere
    ],
)
def test_bytes_that_cross_hosts_follow_the_order_of_devices(kind, axis, share):
    row = {"kind": kind, "axis": axis, "bytes": 1000}
    assert plan.from_other_hosts(row, {"dp": 2, "sp": 2, "tp": 4}, hosts=4) == share * 1000
    assert plan.from_other_hosts(row, {"dp": 2, "sp": 2, "tp": 4}, hosts=1) == 0


def test_what_does_not_fit_says_by_how_much_and_what_would(tmp_path):
    made = make(tmp_path, "model=wan21_t2v_14b", "resolution=720p", "mesh=v5e_8", "sharding=replicate")
    assert not made["fits"] and "denoise does not fit, by" in made["why"] and "sharding=tp" in made["why"]


def test_a_local_checkpoint_completes_the_architecture(tmp_path):
    plan.plan(make_config("task=plan", "mesh=v6e_1", "plan.compiler=none"), tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["fits"]


@pytest.mark.parametrize("mesh", [pytest.param("v6e_1", marks=pytest.mark.full), "gpu_1"])
def test_one_chip_plans_too(tmp_path, mesh):
    made = make(tmp_path, "model=wan21_t2v_1_3b", "resolution=480p", f"mesh={mesh}")
    assert made["fits"] and made["chips"] == 1 and not made["communication"]["rows"]


def test_plans_are_compared_best_first(report, tmp_path):
    good = report[1]
    bad = good | {"fits": False, "why": "denoise does not fit, by 3.0 GiB a chip"}
    slow = good | {"floor_seconds_per_step": 9.0, "why": "slow"}
    for number, one in enumerate((bad, slow, good)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "plan.json").write_text(json.dumps(one))
    lines = plan_page.compare(tmp_path).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["2", "1", "0"]
    assert "does not fit, by 3.0 GiB" in lines[2]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["mesh=auto"], "a plan needs a mesh that names its chip"),
        (["mesh=v6e_8", "mesh.chip.link_gbs=null"], "needs mesh.chip.clock_ghz, hbm_gbs and link_gbs"),
        (["mesh=v6e_8", "mesh.chip.topology='v6e:2x2'"], "has 4 chips, mesh.axes make 8; make them equal"),
        (["mesh=v6e_8", "mesh.chip.self_attention_share=60"], "a share of peak"),
        (["mesh=v6e_8", "plan.likely.xla=0"], "plan.likely.xla=0.0: must not be negative, and only launch_us 0"),
        (["mesh=v6e_8", "plan.high.hidden=2"], "plan.high.hidden=2.0: a share, from 0 to 1"),
    ],
)
def test_bad_plans_are_told(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config("task=plan", "model=wan21_t2v_14b", "resolution=720p", *overrides))


def test_a_compiler_that_fails_is_told(tmp_path):
    config = make_config("task=plan", "mesh=v6e_8", "plan.compiler='python -c 1/0'")
    with pytest.raises(ConfigError, match=r"plan.compiler: .* failed"):
        plan.call_compiler(config, tmp_path / "program.bin")


FAKE = """
import json, pathlib, sys
if sys.argv[1:2] == ["-c"]:
    print("1 2 3")
else:
    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"ops": [], "cycles": 7}))
    pathlib.Path(__file__).with_name("asked").open("a").write(".")
"""


def test_what_the_compiler_says_is_kept(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    program = tmp_path / "program.bin"
    settings = [f"plan.compiler='{sys.executable} {tmp_path / 'fake.py'}'", f"compile.store={tmp_path / 'store'}"]
    config = make_config("task=plan", "mesh=v6e_8", *settings)
    for content, asked in (b"one", 1), (b"one", 1), (b"two", 2):
        program.write_bytes(content)
        assert plan.call_compiler(config, program) == {"cycles": 7, "ops": []}
        assert len((tmp_path / "asked").read_text()) == asked


# ---------------------------------------------------------------- the estimate's arithmetic


@pytest.mark.parametrize(
    "kind, seconds",  # 1000 bytes on each of four chips, links of 100 bytes a second each way
    [
        ("all-gather", 3.75),
        ("all-reduce", 7.5),
        ("reduce-scatter", 15.0),
        ("all-to-all", 5.0),
        ("collective-permute", 5.0),
    ],
)
def test_collectives_take_the_time_of_a_ring(kind, seconds):
    assert plan.travel_seconds({"kind": kind, "axis": "sp", "bytes": 1000}, {"dp": 2, "sp": 4}, link=100) == seconds


@pytest.mark.parametrize("size, devices, seconds", [(8, 1, 10), (8, 2, 5), (4, 2, 5)])
def test_two_devices_of_a_chip_are_one_stop_of_a_ring(size, devices, seconds):
    """Of four chips each sends half of its bytes one link far, a quarter two; of two chips half, over one link."""
    row = {"kind": "all-to-all", "axis": "sp", "bytes": 1000}
    assert plan.travel_seconds(row, {"sp": size}, link=100, devices=devices) == seconds


CALL = {"times": 1, "tokens": 18_944, "inputs": 13_824, "outputs": 5120, "weights": "bf16", "residual": True}
PLAIN = "{xla: 1, attention: 1, product: 1, memory: 1, link: 1, hidden: 1, launch_us: 1, clock: 1}".replace(" ", "")
KERNELS = ("self-attention kernel", "cross-attention kernel")
PRODUCTS = ("product kernel", "product kernel, transposed")


def estimate(report, *overrides):
    """Made-up compiler figures: 1.75e9 cycles are a second on v6e, and so are 180 GB at its links' speed and 1.64 TB at
    its memory's."""
    timeline = [{"start": "it", "kind": "all-to-all", "axis": "sp", "bytes": 180e9}, {"done": "it"}]
    compiled = {
        "cycles_by_group": {"norms": 1_750_000_000}, "timeline": timeline, "kernel_bytes": {"rope": 1.64e12},
        "product_calls": [CALL], "launches": 10**6,
    }
    made = report | {"compiler": {"denoise": compiled}, "axes": {"dp": 2, "sp": 4, "tp": 1}}
    return plan.estimate(resolve_there("task=plan", *overrides), made)


def test_an_estimate_is_the_sum_of_its_parts_three_times(report):
    made = estimate(report[1], "preset=t2v_14b_720p_v6e8_v3", *(f"plan.{end}={PLAIN}" for end in ENDS))
    parts, chip = made["parts"]["likely"], make_config("mesh=v6e_8").mesh.chip
    assert [parts[name] for name in ("norms", "communication", "rope", "kernels' launches")] == pytest.approx([1] * 4)
    flops = 4 * 75_600**2 * 5120 * 40 * 2
    assert parts["self-attention kernel"] == pytest.approx(flops / (8 * 918e12) / chip.self_attention_share)
    assert made["seconds_per_step"] == pytest.approx(dict.fromkeys(ENDS, sum(parts.values())))
    assumed = estimate(report[1], "preset=t2v_14b_720p_v6e8_v3")["seconds_per_step"]
    assert assumed["low"] < assumed["likely"] < assumed["high"]


@pytest.mark.parametrize(
    "key, value, times",  # what the parts are multiplied by; the others stay
    [
        ("xla", 0.5, {"norms": 0.5}),
        ("attention", 2, dict.fromkeys(KERNELS, 2)),
        ("product", 2, dict.fromkeys(PRODUCTS, 2)),
        ("memory", 0.5, {"rope": 2}),
        ("link", 0.5, {"communication": 2}),
        ("launch_us", 3, {"kernels' launches": 3}),
        ("clock", 0.5, dict.fromkeys(("norms", *KERNELS, *PRODUCTS), 2)),
    ],
)
def test_what_is_assumed_changes_its_own_parts_alone(report, key, value, times):
    """XLA's factor above all: a Pallas kernel's bundles cannot take less than a cycle each."""
    common = "preset=t2v_14b_720p_v6e8_v3", *(f"plan.{end}={PLAIN}" for end in ENDS)
    before = estimate(report[1], *common)["parts"]["likely"]
    after = estimate(report[1], *common, f"plan.likely.{key}={value}")["parts"]["likely"]
    waits = {"products' waits for memory"}  # they follow from memory and product both
    assert set(before) == {"norms", "rope", "communication", "kernels' launches", *KERNELS, *PRODUCTS, *waits}
    ratios = {name: after[name] / before[name] for name in set(before) - waits}
    assert ratios == pytest.approx({name: times.get(name, 1) for name in ratios})


def test_products_wait_for_their_first_blocks_and_where_tokens_come_within_one_step():
    """The feed-forward's second layer on v6e: blocks of 1184 tokens by 512 outputs, 16 of tokens, 10 of outputs."""
    config = make_config("mesh=v6e_8", "products=pallas", "mesh.chip.product_share=0.96", f"plan.low={PLAIN}")
    weights, tokens, result = 512 * 13_824 * 2, 1184 * 13_824 * 2, 2 * 1184 * 512 * 2
    step = 2 * 18_944 * 13_824 * 5120 / (0.96 * 918e12) / 160
    fetch = (weights + tokens + result) / 1640e9
    assert step < fetch < 2 * step and (weights + result) / 1640e9 < step
    expected = (weights + tokens) / 1640e9 + 16 * (fetch - step)
    assert plan.wait_seconds(CALL, config, config.plan.low) == pytest.approx(expected)
    assert plan.wait_seconds(CALL | {"times": 40}, config, config.plan.low) == pytest.approx(40 * expected)
    config.mesh.chip.hbm_gbs *= 1000
    assert plan.wait_seconds(CALL, config, config.plan.low) == pytest.approx((weights + tokens) / 1640e12)


def test_a_whole_video_is_its_stages_and_the_disk(report):
    plain = [f"plan.{end}={PLAIN}" for end in ENDS]
    resolved = resolve_there("task=plan", "preset=t2v_14b_720p_v6e8_v1", "plan.disk_gbs=2", *plain, "plan.high.xla=3")
    told = {"cycles": 1.75e8, "collectives": [{"kind": "collective-permute", "axis": "sp", "bytes": 18e9}]}
    told |= {"compile_seconds": 3, "compile_core_seconds": 5}
    seconds = {"low": 140.0, "likely": 145.0, "high": 150.0}
    made = report[1] | {"compiler": {"decode": told}, "denoising": report[1]["denoising"] | {"seconds": seconds}}
    parts = plan.video(resolved, made)
    disk = sum(row["gib"] for row in made["components"].values()) * 2**30 / 2e9
    assert parts["text"] is None and parts["denoise"] == seconds
    assert parts["weights from disk"] == pytest.approx(dict.fromkeys(ENDS, disk))
    assert parts["decode"] == pytest.approx(dict.fromkeys(ENDS, 21 * (0.1 + 0.1)) | {"high": 21 * (0.3 + 0.1)})
    page = "\n".join(plan_page.whole_video(resolved.config, made | {"video": parts}))
    assert "| text | not compiled |" in page and "| decode | 4.20 (4.20 to 8.40) |" in page
    assert "together at least" in page and "which took 3 s here, 5 s of its cores" in page


@pytest.mark.parametrize("model, passes, again", [("longlive_1_3b", 4 + 1, 0), ("krea_14b", 4 + 1, 1)])
def test_a_live_video_counts_every_pass_of_every_chunk(model, passes, again):
    """What is read, too, and what Krea's scheme encodes again; 40 chunks of three latent frames."""
    plain = [f"plan.{end}={PLAIN}" for end in ENDS]
    there = "task=plan", "mesh=v6e_1", "sharding=replicate"
    resolved = resolve_there(*there, f"model={model}", "resolution.frames=477", *plain)
    assert len(find("live").work(resolved)) == 40 * passes and find("live").tokens(resolved) == 3 * 30 * 52
    told = {"cycles": 1.75e7, "collectives": []}  # 10 ms
    compiled = {"decode": told, "text": told} | ({"reencode": told} if again else {})
    denoising = {"seconds": dict.fromkeys(ENDS, 20.0)}
    made = {"compiler": compiled, "components": {}, "denoising": denoising}
    made["video"] = plan.video(resolved, made)
    seconds = 20 + 120 * 0.01 + again * 40 * 0.01
    assert plan.frames_per_second(resolved, made) == pytest.approx(dict.fromkeys(ENDS, 477 / seconds))
    made["video"] |= {"decode": None}
    assert plan.frames_per_second(resolved, made) is None


def test_a_page_gives_the_range_and_says_that_nobody_measured_it(report):
    made = report[1] | {"estimate": estimate(report[1], "preset=t2v_14b_720p_v6e8_v3")}
    compiled = {"code_bytes": 0, "cycles": 0, "compile_seconds": 1, "compile_core_seconds": 1, "vmem_bytes": {}}
    config = make_config("task=plan", "preset=t2v_14b_720p_v6e8_v3")
    made |= {"compiler": {"denoise": compiled}}
    page = plan_page.render(config, made)
    low, likely, high = (f"{made['estimate']['seconds_per_step'][end]:.2f}" for end in ENDS)
    assert f"**Estimated step: {likely} s ({low} to {high})**. Nobody has measured it" in page
    assert "| where a step's time goes (estimate, s) | low | likely | high |" in page
    assert plan_page.time_of(made) == made["estimate"]["seconds_per_step"]["likely"]
    lists = make_config("task=plan", "preset=t2v_14b_720p_v6e8_v3", "sparse=radial_tpu")
    assert "attend to all keys" in plan_page.render(lists, made) and "attend to all keys" not in page


def test_a_plan_takes_its_own_chips_facts_and_the_users_before_them(report):
    plain = f"plan.likely={PLAIN}"
    v5e = estimate(report[1], "preset=t2v_14b_480p_v5e8_v1", "mesh.chip.product_share=1", plain)["parts"]["likely"]
    assert v5e["norms"] == pytest.approx(1.75 / 1.5)
    own = estimate(report[1], "preset=t2v_14b_720p_v6e8_v1", plain)["parts"]["likely"]
    half = "mesh.chip.self_attention_share=0.311"
    said = estimate(report[1], "preset=t2v_14b_720p_v6e8_v1", plain, half)["parts"]["likely"]
    share = make_config("mesh=v6e_8").mesh.chip.self_attention_share
    assert said[KERNELS[0]] / own[KERNELS[0]] == pytest.approx(share / 0.311)
    told = "mesh.chip.self_attention_share: not known for TPU v6 lite; give it, or add it to its file"
    with pytest.raises(ConfigError, match=told):
        estimate(report[1], "preset=t2v_14b_720p_v6e8_v1", "mesh.chip.self_attention_share=null")


@pytest.mark.system
def test_outlined_kernels_leave_the_program_around_them_as_it_is():
    """What a plan compiles has the real program's operands: the same kernel calls, without their bodies."""
    overrides = "model=wan21_t2v_14b", "resolution=480p", "mesh=v6e_8", "attention=auto", "task=plan"
    texts = []
    for resolved in (resolve_there(*overrides), plan.describe(make_config(*overrides))):
        with jax.sharding.use_abstract_mesh(resolved.mesh):
            texts.append(build(resolved, "denoise").programs.lower(platforms=("tpu",))["step"].as_text())
    calls = [[line.rpartition(" : ")[2] for line in text.splitlines() if "tpu_custom_call" in line] for text in texts]
    assert calls[0] == calls[1] and len(calls[0]) >= 4 and len(texts[1]) < len(texts[0])


# ---------------------------------------------------------------- reading what compilers write

HLO = """HloModule jit_step

%body.1 (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %p = (s32[], bf16[8,4]{1,0}) parameter(0)
  %gather.1 = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[2,4]T(0,1), dimensions={0}
  %fusion.7 = bf16[8,4] fusion(%p), metadata={op_name="jit(step)/body/norm1/mul"}, config={"estimated_cycles":"100"}
  %product_kernel.8 = bf16[1,6,3] custom-call(%i), layout_constraints={s32[1]{0}, bf16[1,6,5]{2,1,0}, s8[4,3,5]{2,1,0}}
  %norm_kernel.2 = bf16[6,4]{1,0} custom-call(%i), layout_constraints={bf16[6,4]{1,0}, f32[1,4]{1,0}}, metadata={}
  %fast_kernel.1 = (bf16[1,8,6]) custom-call(%i), layout_constraints={bf16[1,6,8]{2}, bf16[1,10,8]{2}, bf16[1,8,10]{2}}
  %done.1 = bf16[8,4]{1,0} all-gather-done(%gather.1)
  ROOT %tuple.1 = (s32[], bf16[8,4]{1,0}) tuple(%p)
}

%condition.1 (p: (s32[], bf16[8,4])) -> pred[] {
  %limit = s32[] constant(40)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main.2 (a: bf16[8,4]) -> bf16[8,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %while.1 = (s32[], bf16[8,4]{1,0}) while(%init), condition=%condition.1, body=%body.1
  %sum.1 = f32[16]{0} all-reduce(%b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  ROOT %fusion.9 = bf16[8,4] fusion(%a), metadata={op_name="jit(step)/ffn/net/dot"}, config={"estimated_cycles":"7"}
}
"""


def test_linear_layers_of_pieces_are_counted_as_of_whole_tokens():
    """Two groups of heads of two devices, three runs of four tokens, a batch of two."""
    shapes = "s32[1]{0}, bf16[2,3,2,4,4]{4,3,2,1,0}, bf16[2,3,2,8,4]{4,3,2,1,0}, bf16[5,7,24]{2}, bf16[2,12,7]{2}"
    line = f"  %product_kernel.2 = bf16[2,12,7] custom-call(%i), layout_constraints={{{shapes}}}, metadata={{}}"
    [call] = compiler.product_calls(f"ENTRY %main (a: s32[]) -> s32[] {{\n{line}\n}}")
    assert (call["tokens"], call["inputs"], call["outputs"], call["residual"]) == (24, 24, 7, True)
    assert compiler.kernel_flops(line.strip()) == {"bf16": 2 * 24 * 24 * 7}


def test_sorts_have_cycles_though_the_compiler_estimates_none():
    line = "%sort.0 = s32[1,5,296,591]{3,2,1,0} sort(%x), dimensions={3}, to_apply=%less"
    assert compiler.cycles_of(line) == 26 * 7998
    assert 3.5 < compiler.cycles_of(line.replace("591", "1182")) / compiler.cycles_of(line.replace("591", "300")) < 6



def test_loop_bodies_count_by_their_trips():
    rows = compiler.cycle_rows(HLO)
    assert [(row["op"], row["cycles"], row["times"]) for row in rows] == [("fusion.7", 4000, 40), ("fusion.9", 7, 1)]
    groups = family_of(make_config("model=wan21_t2v_14b")).groups
    assert plan.by_group(rows, groups) == {"norms": 4000, "feed-forward": 7}


def test_collectives_are_counted_by_kind_axis_and_trips():
    gather = {"kind": "all-gather", "axis": "tp", "count": 40, "bytes": 2560}
    reduce = {"kind": "all-reduce", "axis": "dp", "count": 1, "bytes": 64}
    events = compiler.timeline(HLO, {"dp": 2, "tp": 4})
    assert compiler.collectives(events) == [gather, reduce]
    assert events == [
        {"start": "gather.1"} | gather,
        {"cycles": 4000, "flops": {}},
        {"cycles": 0, "flops": {"s8": 40 * 2 * 6 * 5 * 3}},
        {"cycles": 0, "flops": {"attention": 40 * 4 * 6 * 8 * 10}},
        {"done": "gather.1"},
        {"start": "sum.1"} | reduce,
        {"done": "sum.1"},
    ]


SCOPED = """ENTRY %main (a: bf16[8]) -> bf16[8] {
  %fast_kernel.1 = bf16[8] custom-call(%a), operand_layout_constraints={bf16[8]{0}}, backend_config={\
"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"104857600"}],\
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"87031808"}]}
  %fusion.1 = bf16[8] fusion(%a), backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"0",\
"size":"33554432"}],"used_scoped_memory_configs":[]}
}
"""


def test_vmem_is_what_libtpu_says_of_each_kernel():
    """Of a kernel without its body, only what it may use."""
    rows = compiler.vmem_bytes(SCOPED)
    assert rows["fast_kernel"] == {"used": 83 * 2**20, "limit": 100 * 2**20}
    assert rows[compiler.XLA_OPS] == {"used": 0, "limit": 32 * 2**20}
    for kernels, used in (("true", "83.0"), ("false", "plan.kernels=true tells")):
        config = make_config("mesh=v6e_8", f"plan.kernels={kernels}")
        page = plan_page.vmem(config, {"denoise": {"vmem_bytes": rows}})
        assert f"| denoise: fast_kernel | {used} | 100 | 128.0 |" in page
        assert "| denoise: XLA's ops | 0.0 | 32 | 128.0 |" in page
        resolved = plan.describe(make_config("task=plan", "preset=t2v_14b_720p_v6e8_v3", f"plan.kernels={kernels}"))
        assert resolved.config.attention.self.outline == (kernels == "false")


def test_more_vmem_than_a_core_has_is_refused():
    told = "products.vmem_mib=112: a core of TPU v5 has 64 MiB; choose the products option for this chip"
    with pytest.raises(ConfigError, match=told):
        size = "model=wan21_t2v_14b", "resolution=480p", "mesh=v5p_8"
        resolve_there("task=plan", *size, "sharding=tokens", "products=pallas")


def test_what_kernels_move_and_how_often_they_are_called_is_counted():
    assert compiler.kernel_bytes(HLO) == {"norms": 40 * (48 + 48 + 16)}
    assert compiler.launches(HLO) == 3 * 40
    [call] = compiler.product_calls(HLO)
    assert call == {"times": 40, "tokens": 6, "inputs": 5, "outputs": 3, "weights": "s8", "residual": False}


def test_eight_bits_are_one_byte():
    assert compiler.result_bytes("%x = (f8e4m3fn[8,4]{1,0}, s8[2], bf16[3], f32[]) tuple(%y)") == 32 + 2 + 6 + 4


def test_what_runs_beside_a_collective_is_not_waited_for():
    config = make_config("mesh=v6e_8", f"plan.low={PLAIN}")

    def start(name):
        return {"start": name, "kind": "all-to-all", "axis": "sp", "bytes": 10**9, "count": 1}

    def waited(*events):
        return plan.waiting_seconds(events, {"sp": 4}, config, config.plan.low)

    alone = waited(start("a"), {"done": "a"})
    assert alone == pytest.approx(10**9 / (2 * 90e9))
    half = {"cycles": alone / 2 * 1.75e9, "flops": {}}
    quarter = {"cycles": 0, "flops": {"s8": alone / 4 * 918e12 * config.mesh.chip.int8_product_share}}
    long, both = {"cycles": 1e12, "flops": {}}, [start("a"), start("b")]
    assert waited(start("a"), half, {"done": "a"}) == pytest.approx(alone / 2)
    assert waited(start("a"), half, quarter, {"done": "a"}) == pytest.approx(alone / 4)
    assert waited(start("a"), long, {"done": "a"}) == 0
    assert waited(*both, half, half, half, {"done": "a"}, {"done": "b"}) == pytest.approx(alone / 2), "one by one"
    assert waited(*both, {"done": "b"}, long, {"done": "a"}) == pytest.approx(2 * alone), "and in order"
    assert waited(start("a"), long, start("b"), {"done": "a"}, {"done": "b"}) == pytest.approx(alone), "not before"
    config.plan.low.hidden = 0.5
    assert waited(start("a"), half, {"done": "a"}) == pytest.approx(0.75 * alone), "half of the time does not hide"
    config.plan.low.link = 0.5
    assert waited(start("a"), {"done": "a"}) == pytest.approx(2 * alone)


@pytest.mark.parametrize(
    "groups, axis",
    [
        ("replica_groups=[2,4]<=[8]", "tp"),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "dp"),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", "dp+tp"),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", "tp"),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", "dp"),
        ("replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", "tp"),
        ("source_target_pairs={{0,4},{1,5}}", "dp"),
    ],
)
def test_every_way_to_write_a_group_is_read(groups, axis):
    assert compiler.axis_of(f"%x = f32[] all-reduce(%y), {groups}, channel_id=1", {"dp": 2, "tp": 4}) == axis


@pytest.mark.skipif("TPU_PYTHON" not in os.environ, reason="TPU_PYTHON names no Python with libtpu")
def test_libtpu_agrees_with_the_table(tmp_path):
    """The demo model on a v6e-8: the compiler's argument bytes are the table's and the states'."""
    python = f"plan.compiler={shlex.quote(os.environ['TPU_PYTHON'])}"
    plan.plan(make_config("task=plan", "stages=[denoise]", "mesh=v6e_8", "attention=xla", python), tmp_path)
    made = json.loads((tmp_path / "plan.json").read_text())
    compiled = made["compiler"]["denoise"]
    ratio = compiled["argument_bytes"] / (made["components"]["transformer"]["gib_per_chip"] * 2**30)
    assert 1 <= ratio < 1.5, "small tensors are padded to whole tiles"
    assert plan_page.time_of(made) > 0 and compiled["cycles"] > 0
    assert sum(compiled["cycles_by_group"].values()) == pytest.approx(compiled["cycles"], rel=0.05)


def test_linear_layers_that_fetch_ahead_wait_less():
    """The next block of tokens moves beside all blocks of weights, not beside the last one alone; where the last one is
    not of whole tiles, it does not."""
    layer = {"times": 1, "inputs": 12288, "outputs": 3072, "weights": "bf16", "residual": True}
    configs = [make_config("mesh=v6e_8", f"products={name}") for name in ("pallas", "pallas_ahead")]
    for tokens, fewer in ((4096, True), (4000, True), (4001, False)):
        usual, ahead = (plan.wait_seconds(layer | {"tokens": tokens}, one, one.plan.likely) for one in configs)
        assert (ahead < usual / 2) == fewer and (ahead == usual) == (not fewer)


def test_a_text_beside_the_picture_has_as_many_products():
    preset = "preset=t2i_flux1_dev_1024_images8_v6e8_v2"
    resolved = resolve_there(preset, "images=8")
    flops = find("denoise").flops(resolved)
    counted = sum(find("denoise").product_flops(resolved).values())
    assert counted == flops["projections"] + flops["feed-forward"]


# ---------------------------------------------------------------- other families


@pytest.mark.system
@pytest.mark.parametrize("name, tokens, videos", [
    ("t2v_hunyuan15_480p_v5e8_v1", 31 * 30 * 53, 1), ("t2i_flux1_dev_1024_images8_v6e8_v2", 64 * 64, 8),
])
def test_other_families_fit_their_chips(tmp_path, name, tokens, videos):
    made = make(tmp_path, f"preset={name}", *([f"images={videos}"] if videos > 1 else []))
    config = make_config(f"preset={name}")
    once = find("denoise").flops(plan_job(config))["total"]
    assert (made["tokens"], made["videos"]) == (tokens, videos) and made["flops_per_step"]["total"] == videos * once
    assert made["fits"] and {"text", "denoise", "decode"} <= made["memory"].keys()
    assert made["memory"]["denoise"]["weights_gib"] > 2 and made["components"]["transformer"]["parameters"] > 8e9
    assert (f" of {videos} at once" in (tmp_path / "plan.md").read_text()) == (videos > 1)
