"""Estimates for presets on TPUs, from libtpu's report on their denoising step; needs no TPU.

    python benchmarks/plans.py --compiler tpu-python t2v_14b_720p_v6e8_v3 "t2v_14b_720p_v7x8_v3 precision=fp8"
    python benchmarks/plans.py          # updates the estimates from earlier reports, e.g. after a change in conf/chip
    python benchmarks/plans.py --smoke  # the same for one preset, without writing

With --compiler, a Python that has JAX and libtpu, each preset, optionally followed by overrides, is compiled, which
takes minutes. The compiler's report is stored in benchmarks/results/plans.json with task=plan's estimate from it. Of a
live video, the programs between two chunks are compiled too, for its frames a second.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

import wan_torchax

wan_torchax.leave_sys_path()
from wan_torchax import ROOT  # noqa: E402
from wan_torchax.config.commandline import compose  # noqa: E402
from wan_torchax.config.geometry import device_count  # noqa: E402
from wan_torchax.config.validation import validate  # noqa: E402
from wan_torchax.session import Session  # noqa: E402
from wan_torchax.stages.stage import find, main_stage  # noqa: E402
from wan_torchax.tasks import plan  # noqa: E402

RESULTS = ROOT / "benchmarks/results/plans.json"
ABOUT = {  # each preset has its own command and versions
    "command": "python benchmarks/plans.py --compiler <a Python with libtpu> <preset>",
    "device": "no TPU: libtpu compiles for one without having it", "versions": "of each preset", "n": 1,
}


def resolve(name: str, compiler: str):
    """A preset, optionally followed by overrides, on chips that need not be here."""
    settings = [f"preset={name.split()[0]}", *name.split()[1:], "task=plan", f"plan.compiler={compiler}"]
    config = compose([*settings, "compile.store=null"])
    validate(config)
    return plan.describe(config).segments()[0]


def compiled(resolved) -> dict[str, dict]:
    """libtpu's reports: on a step, and on what a live video's chips do between its chunks."""
    main, helpers = main_stage(resolved.graph), plan.working_helpers(resolved)
    programs = {main: None} | ({"decode": None} if main == "live" else {}) | dict.fromkeys(helpers, "first")
    with jax.sharding.use_abstract_mesh(resolved.mesh):
        stages = Session().build(resolved, list(programs))
    told = {name: plan.compile_stage(resolved, stages[name], program) for name, program in programs.items()}
    step = told.pop(main)
    return {"compiled": step} | ({"between": told} if told else {})


def estimated(resolved, step: dict, between: dict[str, dict]) -> dict:
    """task=plan's estimate from libtpu's reports."""
    main = main_stage(resolved.graph)
    flops = {name: resolved.videos * count for name, count in find(main).flops(resolved).items()}
    report = {
        "compiler": {main: step, **between}, "flops_per_step": flops,
        "chips": device_count(resolved.config.mesh), "axes": resolved.placement["axes"], "components": {},
    }
    made = plan.estimate(resolved, report)
    if between:
        report["denoising"] = plan.denoising(resolved, report | {"estimate": made})
        report["video"] = plan.video(resolved, report)
        made["frames_per_second"] = plan.frames_per_second(resolved, report)
    return {"floor_seconds_per_step": resolved.videos * find(main).floor_seconds(resolved)} | made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", help="default: those compiled before")
    parser.add_argument("--compiler", help="a Python with JAX and libtpu; without it nothing is compiled")
    parser.add_argument("--smoke", action="store_true", help="only one preset's estimate, without writing")
    options = parser.parse_args()
    kept = json.loads(RESULTS.read_text())["presets"] if RESULTS.exists() else {}
    for name in list(kept)[:1] if options.smoke else options.presets or list(kept):
        resolved = resolve(name, options.compiler or "none")
        if options.compiler:
            versions = plan.ask_compiler(resolved.config, ["-c", plan.VERSIONS]).split()
            kept[name] = {
                "command": f'python benchmarks/plans.py --compiler <a Python with libtpu> "{name}"',
                "versions": dict(zip(("libtpu", "jax", "jaxlib"), versions)), **compiled(resolved),
            }
        kept[name]["estimate"] = estimated(resolved, kept[name]["compiled"], kept[name].get("between", {}))
        print(json.dumps({"preset": name} | kept[name]["estimate"]["seconds_per_step"]), flush=True)
        if not options.smoke:
            text = json.dumps(ABOUT | {"presets": kept}, separators=(",", ":"))
            RESULTS.write_text(text.replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    main()
