"""task=generate: a prompt in; a video, results of stages and metrics out."""
import contextlib
import logging
import os
import sys
from pathlib import Path

from wan_torchax.config import inputs
from wan_torchax.config.graph import Graph
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices import distributed
from wan_torchax.devices.mesh import describe
from wan_torchax.events import Decoded, Event, Finished, Listener, Previewed, silence, to_all
from wan_torchax.records import outputs, results
from wan_torchax.records.clock import Clock
from wan_torchax.records.files import claimed
from wan_torchax.records.stored import compare_replay
from wan_torchax.runtime import adapters
from wan_torchax.runtime.checkpoint import find_present, fingerprints
from wan_torchax.session import phase, session
from wan_torchax.stages.denoise import Denoise
from wan_torchax.stages.stage import find, result_settings
from wan_torchax.tasks.progress import Bars, Progress

log = logging.getLogger("wan")


def generate(config, folder: Path, overrides=(), listener: Listener = silence) -> float:
    """The stages of the pipeline that the config names. Returns the median seconds of a step, or of the whole."""
    with claimed(folder) if distributed.is_first() else contextlib.nullcontext():
        return generate_into(config, folder, overrides, listener)


def generate_into(config, folder: Path, overrides, listener: Listener, clock: Clock | None = None) -> float:
    """With a `clock` of what was made of it before."""
    clock, config = clock or Clock(), inputs.with_texts(config)
    settled, graph = outputs.settle(config), Graph.of(config.pipeline)
    first = distributed.is_first()  # the process that writes
    if first:
        outputs.write_config(folder, settled, overrides)
        if config.output.copy_inputs:
            outputs.copy_pictures(folder, config)
    values, weights = read_results(config, graph)
    names = to_run(config, graph, values)
    distributed.agree("stages", {"inputs": settled["prompt"], "stages to run": names, "weights": weights})

    video = outputs.open_video(folder, settled)

    def encode(event: Event) -> None:
        if isinstance(event, Decoded):
            video.add(event.frames)

    tell = to_all(clock, Bars(), Progress(folder), saver(config, folder, weights), encode, listener) if first else clock
    resolved = session.resolve(config, names, tell)
    log.info("%s on %s", config.model.name, describe(resolved.mesh))
    weights |= fingerprints(resolved.checkpoints)
    for stage in graph.stages:  # what was read, so that this run can be resumed too
        read = {value: values[value] for value in graph.stages[stage].gives if value in values}
        if read:
            tell(Finished(stage, read))
    with contextlib.closing(video):
        with profiled(folder / "profile") if config.profile else contextlib.nullcontext():
            values = session.run(resolved, names, resolved.inputs() | values, tell)
        if first:
            metrics = outputs.metrics(settled, weights, resolved.mesh, overrides)
            metrics["floor_seconds_per_step"] = Denoise.floor_seconds(resolved)
            metrics["adapters"] = adapters.described(config)
            metrics["step_flops"] = Denoise.flops(resolved)["total"]
            with phase("write", tell):
                made = outputs.write_outputs(folder, settled, values, metrics, video)
    if first:
        outputs.write_metrics(folder, metrics | clock.report() | outputs.described(settled, overrides))
        if made != folder and not config.output.keep_frames:  # there was a need for them until the video was written
            results.path_of(folder, graph.giver("frames")).unlink(missing_ok=True)
        compare_replay(config, metrics)
        show(made)
    return clock.median_step() or clock.report()["seconds"]["total"]


def saver(config, folder: Path, weights: dict[str, str]) -> Listener:
    """A listener that keeps results of stages, with what they were made from, and previews."""

    def save(event: Event) -> None:
        if isinstance(event, Finished) and config.output.save_stages:
            results.save(folder, event.stage, event.values, result_settings(config, event.stage, weights))
        elif isinstance(event, Previewed):
            outputs.write_preview(folder, event.frame)

    return save


def read_results(config, graph: Graph) -> tuple[dict, dict[str, str]]:
    """The values in the folder named by `resume`, refused where they were made with other settings than these; and the
    fingerprints of the weights: of those that are here, else of those that made them."""
    weights = weights_here(config, graph)
    values, folder = {}, config.resume and Path(config.resume)
    for name in graph.stages if folder else ():
        path = results.path_of(folder, name)
        if path.is_file():
            read, made_with = results.read(folder, name, find(name).result_shapes(config))
            results.compare(path, made_with, result_settings(config, name, weights))
            log.info("%s: taken from %s", name, path)
            recorded = {key.removeprefix("weights."): value for key, value in made_with.items() if "weights." in key}
            values, weights = values | read, recorded | weights
    missing = graph.missing(to_run(config, graph, values), values)
    if folder and missing:
        (name, value), *_ = missing
        giver = graph.giver(value)
        raise ConfigError(
            f"resume={folder}: {name} takes {value}, and {results.path_of(folder, giver).name} is not there; "
            f"add {giver} to stages"
        )
    return values, weights


def weights_here(config, graph: Graph) -> dict[str, str]:
    """Fingerprints of the pipeline's components, as far as they are on this machine, and of its pictures."""
    present = find_present(config.model, graph.components(graph.stages))
    return fingerprints(adapters.on(present, config, local_only=True)) | inputs.fingerprints(config)


def to_run(config, graph: Graph, values: dict) -> list[str]:
    """The stages asked for whose values are not there yet."""
    return [name for name in config.stages if not set(graph.stages[name].gives) <= values.keys()]


def finished_before(config, folder: Path) -> float | None:
    """What this job gave in an earlier try at a sweep."""
    config, graph = inputs.with_texts(config), Graph.of(config.pipeline)
    return outputs.finished_before(outputs.settle(config), weights_here(config, graph), folder)


def show(made: Path) -> None:
    """The last line of a run. Nobody may be reading any more, and the run is finished all the same."""
    try:
        print(made, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def profiled(folder: Path):
    """A JAX trace of what runs inside, for Perfetto and xprof."""
    import jax

    return jax.profiler.trace(str(folder), create_perfetto_trace=True)
