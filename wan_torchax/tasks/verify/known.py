"""The checkpoint's files and a known answer, against verify/known/<model>.json: what others have found.

    {"model": …, "source": where the hashes are from, "files": {"transformer/….safetensors": sha256},
     "answers": [{"settings": {…}, "by": {"device": …, "versions": {…}}, "values": {"embeddings": [64 numbers], …}}]}

The answer is one step at a fixed seed for a known sentence. It belongs to the files whose hashes stand beside it: other
files have other answers. The run folder's known.json is this machine's, in the same form.
"""
import json
from collections.abc import Iterator
from pathlib import Path

import numpy
from omegaconf import OmegaConf

from wan_torchax import ROOT
from wan_torchax.config import inputs
from wan_torchax.config.resolve import Job, Resolved, plain
from wan_torchax.config.schema import ADAPTER_SETTINGS, Cache, Prompt
from wan_torchax.records import provenance
from wan_torchax.records.files import write_text
from wan_torchax.records.fingerprints import hash_file
from wan_torchax.records.report import read_json
from wan_torchax.runtime.checkpoint import files_of
from wan_torchax.runtime.jobs import find_job
from wan_torchax.session import session
from wan_torchax.stages.stage import main_stage
from wan_torchax.tasks.doctor import Finding

KNOWN = ROOT / "verify" / "known"
SENTENCE, NEGATIVE, SEED = "a big red heart bouncing on a blue background", "blurry", 2025
# The settings that an answer depends on; the machine's own, like kernels and sharding, are what it is to agree with.
SETTINGS = (
    "pipeline.name", "resolution", "model.dtype", "model.text_tokens", "model.noise_dtype", "scheduler",
    "guidance_scale", "precision.name", "seed", "steps", "prompt.text", "prompt.negative",
)
VALUES = 64  # of each array, evenly spaced
BOUNDS = {"float32": 1e-3, "bfloat16": 0.05}  # relative error of an array, by the transformer's type
EIGHT_BITS = 0.2


def check(resolved: Resolved, folder: Path, report: dict) -> Iterator[Finding]:
    """Hash the files, run the step, compare both with what is known."""
    config = fixed(resolved.config)
    missing = [key for key in inputs.taken(config) if not inputs.paths(config, key)]
    missing = [key for key in missing if key not in config.pipeline.optional]
    job, name = find_job(config), main_stage(resolved.graph)
    absent = [part for part in job.graph.components(job.graph.upstream(name)) if part not in job.checkpoints]
    report["weights"] = record = {"model": config.model.name, "source": "", "files": {}, "answers": []}
    if absent:
        yield Finding("weights", "ok", f"not on this machine ({', '.join(absent)}): not verified",
                      "run the model once, which downloads them, or give model.path")
        return
    record["files"] = hashes(job)
    known = read_json(KNOWN / f"{config.model.name}.json")
    yield compare_files(record["files"], known.get("files", {}), known.get("source", ""))
    if missing:
        example = " ".join(f"{key}={inputs.EXAMPLES[key]}" for key in missing)
        yield Finding("answer", "ok", f"not computed: pipeline={config.pipeline.name} starts from a file", example)
        return
    record["answers"] = [answer(job, name, resolved)]
    write_text(folder / "known.json", json.dumps(record, indent=1) + "\n")
    same_files = known.get("files") == record["files"]
    yield from compare_answers(record["answers"][0], known.get("answers", []) if same_files else [], config)


def fixed(config):
    """The config with the known sentence and seed, one step, no cache and no adapters."""
    local = config.copy()
    OmegaConf.set_readonly(local, False)
    local.prompt, local.cache = Prompt(SENTENCE, NEGATIVE), Cache("none")
    local.seed, local.steps = SEED, 1
    if local.scheduler.sigmas:
        local.scheduler.sigmas = list(local.scheduler.sigmas)[:1]
    local.adapter = dict(ADAPTER_SETTINGS)
    return local


# ---------------------------------------------------------------- files


def hashes(job: Job) -> dict[str, str]:
    """sha256 of every file of weights, by component and name."""
    files = {}
    for component, checkpoint in sorted(job.checkpoints.items()):
        for path in files_of(checkpoint.path):
            status = path.stat()
            files[f"{component}/{path.name}"] = hash_file(path, status.st_mtime_ns, status.st_size).hex()
    return files


def compare_files(files: dict[str, str], known: dict[str, str], source: str) -> Finding:
    if not known:
        remedy = "with the hashes that its publisher states, known.json of the run folder can become verify/known/…"
        return Finding("weights", "ok", f"{len(files)} files hashed; none is known for this model", remedy)
    if other := [name for name, digest in files.items() if known.get(name, digest) != digest]:
        remedy = "another release of the model, or damaged: download it anew"
        return Finding("weights", "note", f"{', '.join(other)}: not the known files ({source})", remedy)
    if absent := sorted(known.keys() - files.keys()):
        return Finding("weights", "note", f"{', '.join(absent)}: missing", "download the model anew")
    return Finding("weights", "ok", f"{len(files)} files are the known ones ({source})")


# ---------------------------------------------------------------- the answer


def answer(job: Job, name: str, resolved: Resolved) -> dict:
    """Embeddings and latents of one step, some numbers of each."""
    names = list(job.graph.upstream(name))
    placed = session.resolve(job, names)
    values = session.run(placed, names, placed.inputs())
    arrays = {key: value for key, value in values.items() if key not in job.graph.inputs}
    return {
        "settings": {key: plain(OmegaConf.select(job.config, key)) for key in SETTINGS},
        "by": {"device": f"{resolved.mesh.size} {resolved.placement['kind']}", "versions": provenance.versions()},
        "values": {key: sample(value) for key, value in sorted(arrays.items()) if isinstance(value, numpy.ndarray)},
    }


def sample(array: numpy.ndarray) -> list[float]:
    """Evenly spaced values, to six digits."""
    flat = numpy.asarray(array, numpy.float32).ravel()
    places = numpy.linspace(0, flat.size - 1, min(VALUES, flat.size)).astype(int)
    return [float(f"{value:.6g}") for value in flat[places]]


def compare_answers(own: dict, known: list[dict], config) -> Iterator[Finding]:
    """The answer against those that others had with the same settings and files."""
    same = [other for other in known if other.get("settings") == own["settings"]]
    if not same:
        remedy = "if its video looks right, offer known.json of the run folder as verify/known/<model>.json"
        yield Finding("answer", "ok", "computed; none is known for these files and settings", remedy)
    bound = EIGHT_BITS if config.precision.weights else BOUNDS.get(config.model.dtype.transformer, 0.05)
    for other in same:
        errors = {key: difference(values, other["values"].get(key)) for key, values in own["values"].items()}
        told = ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
        by = f"those of {other['by']['device']}"
        if all(error <= bound for error in errors.values()):
            yield Finding("answer", "ok", f"one step is as {by}: {told}")
        else:
            remedy = "attention=xla products=xla precision=none, one after the other, shows which part it is"
            yield Finding("answer", "bad", f"one step is not as {by}: {told}, at most {bound:.0e}", remedy)


def difference(own: list[float], other: list[float] | None) -> float:
    """The relative error; infinite if there is nothing to compare with."""
    if other is None or len(own) != len(other):
        return float("inf")
    own, other = numpy.array(own), numpy.array(other)
    return float(numpy.linalg.norm(own - other) / max(numpy.linalg.norm(other), 1e-30))
