"""task=verify: is what this machine computes right, and as fast as it should be? In one page, made to be sent.

    python run.py task=verify                                               # the embedded model: seconds on a laptop
    python run.py task=verify preset=t2v_14b_720p_v6e8_v1                   # what that run would use, at its shapes
    python run.py task=verify preset=… verify.plan=outputs/…/plan.json      # the step beside its estimate, part by part

    kernels   each kernel of the config against XLA in float32, on every device by itself and on all together
    machine   memory, matrix products and links of every device, against conf/chip
    step      seconds of a denoising step by part, from a profile, and its memory
    weights   the checkpoint's files and a known answer (verify/known), if the checkpoint is on this machine

Writes verify.json and verify.html, which say nothing of the machine's owner: docs/verified.md collects them.
"""
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from wan_torchax import interruption
from wan_torchax.config.resolve import Resolved
from wan_torchax.config.schema import ConfigError
from wan_torchax.records import pages, provenance
from wan_torchax.records.files import write_text
from wan_torchax.records.report import without_places
from wan_torchax.runtime.jobs import plan_job
from wan_torchax.session import session
from wan_torchax.tasks.doctor import Finding
from wan_torchax.tasks.verify import kernels, known, machine, step

# A check takes (resolved, folder, report) and fills report[its name]; it yields what it finds.
CHECKS: dict[str, Callable[[Resolved, Path, dict], Iterator[Finding]]] = {
    "kernels": kernels.check, "machine": machine.check, "step": step.check, "weights": known.check,
}


def verify(config, folder: Path, overrides=()) -> float | None:
    """Run the checks and print what each finds; returns the step's seconds. Raises if something is wrong."""
    step.read_plan(config)  # a file that is not a plan is told before anything is measured
    resolved = session.place(plan_job(config))
    report, findings = {"config": describe(resolved), "versions": provenance.versions()}, []
    report["git"] = provenance.git_revision()
    for name in config.verify.checks:
        for finding in run_check(name, resolved, folder, report):
            findings.append(finding)
            print(f"{finding.state:4}  {finding.check:10} {finding.what}", flush=True)
            if finding.remedy:
                print(f"{'':16} → {finding.remedy}", flush=True)
    report["findings"] = [asdict(finding) for finding in findings]
    write_text(folder / "verify.json", without_places(json.dumps(report, indent=1), folder) + "\n")
    write_text(folder / "verify.html", without_places(pages.render("verify.html", report=report), folder) + "\n")
    print(folder / "verify.html")
    if bad := dict.fromkeys(finding.check for finding in findings if finding.state == "bad"):
        raise ConfigError(f"task=verify: {', '.join(bad)}: see above")
    return report.get("step", {}).get("seconds")


def run_check(name: str, resolved: Resolved, folder: Path, report: dict) -> Iterator[Finding]:
    """One check; if it cannot be done, that is what it finds."""
    interruption.check()
    try:
        yield from CHECKS[name](resolved, folder, report)
    except Exception as error:  # compilers and devices raise all kinds; the other checks still run
        interruption.check()
        message = without_places(str(error).strip(), folder).partition("\n")[0][:300]
        yield Finding(name, "bad", f"{type(error).__name__}: {message}", "traceback=true in the command shows where")
        if resolved.config.traceback:
            raise


def describe(resolved: Resolved) -> dict:
    """What was verified, in the config's names: no paths, no prompts."""
    config, size, mesh = resolved.config, resolved.config.resolution, resolved.mesh
    return {
        "model": config.model.name, "pipeline": config.pipeline.name, "mesh": config.mesh.name,
        "resolution": f"{size.width} x {size.height} x {size.frames}", "tokens": resolved.tokens,
        "device": f"{mesh.size} {resolved.placement['kind']}", "axes": dict(resolved.placement["axes"]),
        "sharding": config.sharding.name, "dtype": config.model.dtype.transformer, "guidance": config.guidance,
        "attention": {part: config.attention[part].kernel for part in ("self", "cross")},
        "products": config.products.kernel, "precision": config.precision.name,
    }
