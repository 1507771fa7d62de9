"""Generate video with Wan 2.1 from Hydra configs, on TPU, GPU or CPU.

    python run.py                                             # the embedded demo model, on whatever this machine has
    python run.py prompt="a blue star moving left" seed=7
    python run.py model=wan21_t2v_14b mesh=v6e_8 resolution=720p prompt="a cat on the grass"

compose → validate → mesh → build → compile (in a thread) → load → encode text → denoise → decode → write
"""
import logging
import math
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

import checkpoint
import commandline
import schema

log = logging.getLogger("wan")
ConfigStore.instance().store("schema", schema.root())

failures: list[str] = []  # one line for each job of this process that failed


def main() -> None:
    """The command line: compose the config, run the task, leave with 0, 1 (an error) or 130 (Ctrl-C)."""
    # ffmpeg and git are started with fork and exec at once, which is safe beside JAX's threads.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and `explain` says it better
    try:
        sys.argv[1:] = commandline.rewrite(sys.argv[1:])
        job()
    except schema.ConfigError as error:
        failures.append(str(error))
        print(f"error: {error}", file=sys.stderr)
    except commandline.USER_ERRORS as error:
        failures.append(str(error))
        print(f"error: {commandline.explain(error)}", file=sys.stderr)
        if "traceback=true" in sys.argv:
            traceback.print_exc()
    except KeyboardInterrupt:
        print("interrupted: finished stages are in the run folder; go on with resume=<run folder>", file=sys.stderr)
        sys.exit(130)
    sys.exit(1 if failures else 0)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(config) -> float | None:
    """One job: one composed config. Returns the seconds it took, for sweepers that minimise."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        schema.validate(config)
        began = time.perf_counter()
        TASKS[config.task](config, folder)
        return time.perf_counter() - began
    except Exception as error:
        failures.append(str(error))
        expected = isinstance(error, (schema.ConfigError, OSError)) or type(error).__name__ == "NotFinite"
        log.error("error: %s", error if expected else f"{type(error).__name__}: {error} (traceback=true shows where)")
        if config.traceback:
            log.error(traceback.format_exc())


def generate(config, folder: Path) -> Path:
    """The whole pipeline: prompt in; video, stage results and metrics out."""
    import records

    clock = records.Clock()
    prompts = read_prompts(config)
    results = records.finished(config, prompts)
    wanted = [stage for stage in config.stages if stage not in results]
    checkpoints = {name: find_checkpoint(config, name) for name in wanted}
    with clock("start"):
        mesh = start_jax(config)
        import engine  # brings in torch and diffusers: after the flags are set, and never for --help
    log.info("%s on %s", config.model.name, describe(mesh))

    def keep_result(name, result):
        if config.output.save_stages:
            records.save(config, folder, name, result, prompts)

    watcher = engine.Watcher(bar, keep_result, lambda step, frame: records.write_preview(folder, frame))
    results = engine.execute(config, mesh, wanted, checkpoints, prompts, results, clock, watcher)
    with clock("write"):
        made = records.write_outputs(config, folder, prompts, results)
    records.write_metrics(config, folder, mesh, clock)
    print(made)
    return made


TASKS = {"generate": generate}


def bar(total, description, **options):
    """A progress bar on a terminal, nothing elsewhere."""
    from tqdm import tqdm

    return tqdm(total=total, desc=description, disable=not sys.stderr.isatty(), leave=False, **options)


# ---------------------------------------------------------------- before JAX starts


def read_prompts(config) -> tuple[str, str]:
    """The prompt and the negative prompt, from the config or from files."""
    prompt, negative = config.prompt.text, config.prompt.negative or ""
    if config.prompt.file is not None:
        prompt = Path(config.prompt.file).read_text()
    if config.prompt.negative_file is not None:
        negative = Path(config.prompt.negative_file).read_text()
    return prompt.strip(), negative.strip()


def find_checkpoint(config, stage: str) -> Path:
    """The folder of a stage's weights. Its config.json may add to the config's architecture, not contradict it."""
    component = schema.COMPONENTS[stage]
    folder = checkpoint.find(config.model, component)
    config.model.architecture[component] = checkpoint.read_architecture(folder, config.model.architecture[component], component)
    return folder


def start_jax(config):
    """Set the flags that must stand before JAX starts, then arrange its devices as the config's mesh."""
    append_flags("XLA_FLAGS", config.compile.xla_flags)
    append_flags("LIBTPU_INIT_ARGS", config.compile.libtpu_flags)
    import jax

    if config.mesh.platform == "cpu" and config.mesh.devices and not jax._src.xla_bridge.backends_are_initialized():
        jax.config.update("jax_num_cpu_devices", config.mesh.devices)
    if config.compile.cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", config.compile.cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_default_matmul_precision", config.compile.matmul_precision)
    return make_mesh(config)


def append_flags(variable: str, flags) -> None:
    present = os.environ.get(variable, "").split()
    os.environ[variable] = " ".join(present + [flag for flag in flags if flag not in present])


def make_mesh(config):
    """The config's axes over this machine's devices; an axis of -1 takes whatever remains."""
    import jax

    mesh = config.mesh
    try:
        devices = jax.devices(mesh.platform)
    except RuntimeError as error:
        wanted = mesh.platform or "device"
        raise schema.ConfigError(f"mesh={mesh.name}: no {wanted} to be had here ({error}); use mesh=auto for what this machine has") from error
    if mesh.platform is None and devices[0].platform == "cpu":
        devices = devices[:1]  # fake CPU devices are for meshes that ask for them
    needed = mesh.devices or len(devices)
    fixed = [size for size in mesh.axes.values() if size != -1]
    rest, left = divmod(needed, math.prod(fixed))
    if needed > len(devices) or left or (rest != 1 and -1 not in mesh.axes.values()):
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
        found = f"this machine has {len(devices)} ({devices[0].device_kind})"
        raise schema.ConfigError(f"mesh={mesh.name}: axes {sizes} over {needed} devices, and {found}; change mesh.axes or use mesh=auto")
    config.mesh.axes = {axis: rest if size == -1 else size for axis, size in mesh.axes.items()}
    config.mesh.devices = needed
    schema.validate(config)  # again, now that every axis has a size
    types = (jax.sharding.AxisType.Auto,) * len(mesh.axes)
    return jax.make_mesh(tuple(mesh.axes.values()), tuple(mesh.axes), axis_types=types, devices=devices[:needed])


def abstract_mesh(config):
    """The config's mesh without its devices: enough to trace and lower for hardware that is not here."""
    import jax

    kind = jax.sharding.AbstractDevice(device_kind=config.mesh.chip.kind, num_cores=1, platform=config.mesh.platform)
    axes = config.mesh.axes
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes), abstract_device=kind)


def describe(mesh) -> str:
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"{mesh.devices.size} {mesh.devices.flat[0].device_kind} ({axes})"


if __name__ == "__main__":
    main()
