"""Runs stages one after the other, and keeps what it made for the next run in this process.

Programs, weights and text embeddings are each kept by what they were made from, the last of their kind (embeddings:
the last few): a sweep over seeds or prompts compiles and loads nothing twice, and a change of model, mesh or sharding
frees the old before the new is loaded.
"""
import json
import logging
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy
from omegaconf import OmegaConf

from wan_torchax.config import schema
from wan_torchax.records import outputs as records
from wan_torchax.runtime import weights
from wan_torchax.stages import denoise as stages

log = logging.getLogger("wan")
TEXTS_KEPT = 64


@dataclass
class Kept:
    """What this process has made so far; each entry with the key it was made from."""

    stages: dict = field(default_factory=dict)  # name -> (key, Stage with its compiled programs)
    arrays: dict = field(default_factory=dict)  # name -> (key, weights on the devices)
    texts: dict = field(default_factory=dict)  # key -> embeddings

    def clear(self):
        self.stages.clear(), self.arrays.clear(), self.texts.clear()


kept = Kept()


@dataclass
class Watcher:
    """Who is told of progress. Anything here may raise, which ends the run with torch and JAX in good order."""

    bar: object  # bar(total, description, **options): a context manager with update(count) and refresh()
    on_result: object = None  # on_result(stage, result): as soon as a stage is done
    on_preview: object = None  # on_preview(step, frame): every `preview_every` steps, the middle frame so far


def execute(config, mesh, names, folders: dict[str, Path], prompts, results, clock, watcher) -> dict[str, numpy.ndarray]:
    """Run the named stages in order; returns their results beside those handed in. `folders` has each stage's weights."""
    results = dict(results)
    text_key = key_of(records.stage_settings(config, "text", prompts))
    if "text" in names and text_key in kept.texts:
        results["text"] = kept.texts[text_key]
        tell_result(watcher, "text", results["text"])
    names = [name for name in names if name not in results]
    with clock("build"):
        built, fresh = build(config, mesh, names + preview_helpers(config, names, folders))
    with stages.compiling(fresh, clock.compiled):
        for name in names:
            load(config, name, built[name], folders[name], clock, watcher.bar)
            if name == "denoise" and config.preview_every and "decode" in built:
                load(config, "decode", built["decode"], folders["decode"], clock, watcher.bar)
            wait_for_programs(name, built[name], watcher.bar)
            with clock(name), stages.no_compilation():
                results[name] = RUNNERS[name](built, config, prompts, results, clock, watcher)
            if not resident(config):
                free(name, built[name])
            tell_result(watcher, name, results[name])
    if "text" in names:
        kept.texts[text_key] = results["text"]
        while len(kept.texts) > TEXTS_KEPT:
            kept.texts.pop(next(iter(kept.texts)))
    return results


def preview_helpers(config, names, folders) -> list[str]:
    """The decoder beside denoising alone, if previews are wanted and there are weights for it that may stay."""
    wanted = config.preview_every and names == ["denoise"] and "decode" in folders and resident(config)
    return ["decode"] if wanted else []


def tell_result(watcher, name, result):
    if watcher.on_result is not None:
        watcher.on_result(name, result)


def resident(config) -> bool:
    """Whether weights stay on the device after their stage: as the config says, by default only in a sweep."""
    return config.keep_resident if config.keep_resident is not None else config.sweep.active


# ---------------------------------------------------------------- what is kept


def key_of(parts) -> str:
    return json.dumps(parts, sort_keys=True, default=str)


def weights_key(config, name) -> str:
    """What a stage's arrays depend on."""
    component = schema.COMPONENTS[name]
    model, table = config.model, OmegaConf.to_container(config.sharding[component], resolve=True)
    mesh = OmegaConf.to_container(config.mesh, resolve=True)
    return key_of([model.name, model.path, model.revision, model.dtype[component], model.scan_blocks, table, mesh])


def programs_key(config, name) -> str:
    """What a stage's programs depend on: its arrays, shapes and settings that are compiled in."""
    settings = [weights_key(config, name), stages.guided(config), OmegaConf.to_container(config.ops, resolve=True), config.model.text_tokens]
    settings += [config.compile.matmul_precision, config.model.dtype.transformer]
    if name == "denoise":
        attention = OmegaConf.to_container(config.attention, resolve=True), OmegaConf.to_container(config.sharding.attention, resolve=True)
        settings += [*attention, config.guidance, stages.latent_shape(config), stages.scheduler_table(config)[1].shape[1]]
    if name == "decode":
        settings += [config.resolution.height, config.resolution.width]
    return key_of(settings)


def build(config, mesh, names):
    """The stages, and those of them that still have to be compiled. What does not fit any more is freed first."""
    for name in list(kept.arrays):  # all of them: a stage that is not run this time holds memory too
        if kept.arrays[name][0] != weights_key(config, name):
            free(name, None)
    built, fresh = {}, {}
    for name in names:
        key = programs_key(config, name)
        if kept.stages.get(name, (None,))[0] == key and is_compiled(kept.stages[name][1]):
            built[name] = kept.stages[name][1]
        else:
            kept.stages.pop(name, None)
            built[name] = fresh[name] = stages.BUILDERS[name](config, mesh)
            kept.stages[name] = key, built[name]
    return built, fresh


def is_compiled(stage) -> bool:
    """Not so after a run that was cancelled, or failed, before the compiler got to the last program."""
    return bool(stage.compiled) and all(future.done() and future.exception() is None for future in stage.compiled.values())


def free(name, stage) -> None:
    """Let go of a stage's weights."""
    kept.arrays.pop(name, None)
    for holder in (stage, kept.stages.get(name, (None, None))[1]):
        if holder is not None:
            holder.arrays = None


def load(config, name, stage, folder: Path, clock, bar) -> None:
    """Weights to the devices, with a bar in bytes and a summary of what lies where; nothing if they are there."""
    key = weights_key(config, name)
    if kept.arrays.get(name, (None,))[0] == key:
        stage.arrays = kept.arrays[name][1]
        return
    free(name, stage)
    total = sum(tensor.bytes for tensor in stage.tensors.values())
    with clock(f"load_{name}"), bar(total, f"loading {stage.component}", unit="B", unit_scale=True) as progress:
        stage.arrays = weights.load(stage.tensors, folder, progress.update, stages.IGNORED[stage.component])
    kept.arrays[name] = key, stage.arrays
    log.info("%s: %.3f GiB loaded in %.1f s", stage.component, weights.gib(total), clock.seconds[f"load_{name}"])
    for line in weights.summary(stage.tensors):
        log.info(line)


def wait_for_programs(name, stage, bar) -> None:
    """Show that compilation is still going on, if it is."""
    waiting = list(stage.compiled.values())
    with bar(None, f"compiling {name}", bar_format="{desc}: {elapsed}") as progress:
        while wait(waiting, timeout=0.2).not_done:
            progress.refresh()


# ---------------------------------------------------------------- the stages, with progress


def run_text(built, config, prompts, results, clock, watcher):
    return stages.run_text(built["text"], config, *prompts, log.warning)


def run_denoise(built, config, prompts, results, clock, watcher):
    with watcher.bar(config.steps, "denoising", unit="step") as progress:

        def on_step(index, seconds, estimate):
            clock.steps.append(seconds)
            progress.update(1)
            if watcher.on_preview is not None and "decode" in built and due(config, index):
                frame, _, _ = built["decode"]("first", estimate)
                watcher.on_preview(index + 1, numpy.asarray(frame)[0])

        return stages.run_denoise(built["denoise"], config, results["text"], on_step)


def due(config, index) -> bool:
    return bool(config.preview_every) and (index + 1) % config.preview_every == 0 and index + 1 < config.steps


def run_decode(built, config, prompts, results, clock, watcher):
    with watcher.bar(config.resolution.frames, "decoding", unit="frame") as progress:
        return stages.run_decode(built["decode"], config, results["denoise"], progress.update)


RUNNERS = {"text": run_text, "denoise": run_denoise, "decode": run_decode}
