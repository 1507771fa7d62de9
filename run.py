"""Generate video with Wan 2.1 from Hydra configs, on TPU, GPU or CPU.

    python run.py                                             # the embedded demo model, on whatever this machine has
    python run.py prompt="a blue star moving left" seed=7
    python run.py model=wan21_t2v_14b mesh=v6e_8 resolution=720p prompt="a cat on the grass"

compose → validate → mesh → build → compile (in a thread) → load → encode text → denoise → decode → write
"""
import contextlib
import errno
import importlib
import logging
import math
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

from wan_torchax.config import commandline, jobs, schema, validation
from wan_torchax.config.commandline import sweep_folders
from wan_torchax.devices import distributed
from wan_torchax.runtime import checkpoint

log = logging.getLogger("wan")
ConfigStore.instance().store("schema", schema.root())

FAKE_DEVICES = 8  # CPU devices there always are, so that a sweep can mix meshes; they cost nothing unused
failures: list[str] = []  # one line for each job of this process that failed


def main() -> None:
    """The command line: compose the config, run the task, leave with 0, 1 (an error) or 130 (Ctrl-C)."""
    # ffmpeg and git are started with fork and exec at once, which is safe beside JAX's threads.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and `explain` says it better
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))  # for a launcher's workers
    status = 0
    try:
        sys.argv[1:] = commandline.rewrite(sys.argv[1:])
        job()
    except Exception as error:
        failures.append(str(error))
        print(f"error: {explain(error)}", file=sys.stderr)
        if "traceback=true" in sys.argv:
            traceback.print_exc()
        distributed.leave(f"failed: {explain(error)}")
        if type(error).__module__.startswith("submitit"):
            wait_for_workers()
    except KeyboardInterrupt:
        print("interrupted: finished stages are in the run folder; go on with resume=<run folder>", file=sys.stderr)
        status = 130
        distributed.leave("was interrupted", status)
    for folder in sweep_folders if distributed.is_first() else ():
        if not sweep_folders.keys() & set(folder.parents):  # a list inside a sweep is in the sweep's report
            write_report(folder)
    distributed.finish()
    for thread in threading.enumerate():
        if thread.name == "imports":  # which would fail loudly in an interpreter that is shutting down
            thread.join()
    failed = failures or any(next(folder.rglob("failure.json"), None) for folder, elsewhere in sweep_folders.items() if elsewhere)
    sys.exit(status or (1 if failed else 0))


def wait_for_workers() -> None:
    """Submitit gives up at the first worker that is lost; those on this machine go on, and their jobs belong into the report."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(config) -> float | None:
    """One Hydra job: one composed config. Returns a number to minimise: seconds a step, or of the whole."""
    folder, overrides = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    jobs.check_launcher(HydraConfig.get().launcher, config.mesh)
    return attempt(config, folder, overrides)


def attempt(config, folder: Path, overrides: list[str]) -> float | None:
    """Run a config's task; an error is told and recorded, and does not stop the jobs that follow."""
    from wan_torchax.records import outputs as records

    try:
        distributed.join(config)
        distributed.begin(config)
        config = records.take_over(config, overrides)
        if jobs.wanted(config):
            return make_all(config, folder, overrides)
        validation.validate(config)
        if config.sweep.resume and (before := distributed.from_first("done before", finished_before(config, folder))):
            return before
        return TASKS[config.task](config, folder, overrides)
    except Exception as error:
        fail(folder, overrides, explain(error))
        if config.traceback:
            log.error(traceback.format_exc())
        distributed.regroup(explain(error))


def fail(folder: Path, overrides: list[str], message: str) -> None:
    """Tell and record why a job failed; the exit status and the report know of it too."""
    from wan_torchax.records import outputs as records

    failures.append(f"{folder}: {message}")
    log.error("error: %s", message)
    if distributed.is_first():
        records.write_failure(folder, overrides, message)


def explain(error: Exception) -> str:
    """What to tell the user: our own errors as they are, a full disk with its remedy, others with their type."""
    if isinstance(error, commandline.USER_ERRORS):
        return commandline.explain(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
        return f"{error}: the disk is full; free some space and go on with resume=<run folder>, where finished stages are kept"
    if isinstance(error, (schema.ConfigError, OSError)) or type(error).__name__ == "NotFinite":
        return str(error)
    return f"{type(error).__name__}: {error} (traceback=true shows where)"


def make_all(config, folder: Path, overrides: list[str]) -> float | None:
    """Every video of a list, each in a folder of its own; what fails is told with its line and the others are made."""
    shared = [override for override in overrides if override.partition("=")[0] not in ("prompts", "seeds", "shard")]
    listed = jobs.read(config)
    distributed.agree("list", {"prompts": [one.overrides for one in listed]})
    sweep_folders[folder] = False
    seconds = []
    with bar(len(listed), "videos", unit="video", position=1) as progress:
        for one in listed:
            seconds.append(make_one(one, folder / one.name, shared))
            progress.update(1)
    made = [value for value in seconds if value is not None]
    return sum(made) / len(made) if made else None


def make_one(one: jobs.Job, folder: Path, shared: list[str]) -> float | None:
    """One video of a list: its own overrides on top of those of the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    if one.error is not None:
        return fail(folder, one.overrides, f"{one.error}; skipped")
    overrides = [*shared, "sweep.active=true", *one.overrides]
    try:
        config = hydra.compose("config", overrides)
    except commandline.USER_ERRORS as error:
        return fail(folder, overrides, f"{folder.name}: {explain(error)}; skipped")
    return attempt(config, folder, overrides)


def write_report(folder: Path) -> None:
    """The page of a sweep; the plans of a sweep of plans as one table."""
    if next(folder.glob("*/plan.json"), None):
        from wan_torchax.tasks import plan

        print(plan.compare(folder))
        return
    from wan_torchax.records import report

    print(report.write(folder))


def generate(config, folder: Path, overrides=()) -> float:
    """The whole pipeline: prompt in; video, stage results and metrics out. Returns the median seconds of a step."""
    from wan_torchax.records import outputs as records

    clock = records.Clock()
    prompts = read_prompts(config)
    settled = records.settle(config, prompts)
    first = distributed.is_first()  # the process that writes
    if first:
        records.write_config(folder, settled)
    results = records.finished(config, prompts)
    wanted = [stage for stage in config.stages if stage not in results]
    checkpoints = {name: find_checkpoint(config, name) for name in wanted}
    distributed.agree("stages", {"prompts": prompts, "stages to run": wanted})
    with clock("start"):
        mesh = start_jax(config, meanwhile=begin_imports)
        from wan_torchax.tasks import plan as plans

        from wan_torchax import session as engine
    log.info("%s on %s", config.model.name, describe(mesh))

    def keep_result(name, result):
        if first and config.output.save_stages:
            records.save(config, folder, name, result, prompts)

    def keep_preview(step, frame):
        if first:
            records.write_preview(folder, frame)

    for name, result in results.items():  # so that this run can be resumed too
        keep_result(name, result)
    watcher = engine.Watcher(bar, keep_result, keep_preview)
    with profiled(folder / "profile") if config.profile else contextlib.nullcontext():
        results = engine.execute(config, mesh, wanted, checkpoints, prompts, results, clock, watcher)
    if first:
        floor = plans.arithmetic(config, mesh.devices.size)["floor_seconds_per_step"]
        metrics = records.metrics(settled, mesh, overrides) | {"floor_seconds_per_step": floor}
        with clock("write"):
            made = records.write_outputs(config, folder, settled, results, metrics)
        records.write_metrics(folder, metrics | clock.report())
        records.compare_replay(config, metrics)
        print(made)
    return clock.median_step() or clock.report()["seconds"]["total"]


def profiled(folder: Path):
    """A JAX trace of what runs inside, for Perfetto and xprof."""
    import jax

    return jax.profiler.trace(str(folder), create_perfetto_trace=True)


def tune(config, folder: Path, overrides=()) -> float:
    """Search block sizes on this device; see tune.py."""
    mesh = start_jax(config)
    from wan_torchax.tasks import tune

    return tune.search(config, mesh, folder, bar)


def plan(config, folder: Path, overrides=()) -> float:
    """Whether it fits and how fast it will be, on hardware that is not here; see plan.py."""
    use_fake_devices(config)
    from wan_torchax.tasks import plan

    if Path(config.model.path).is_dir():  # what the config leaves to the checkpoint; without one, the config has to say it all
        for stage in schema.STAGES:
            find_checkpoint(config, stage)
    report = plan.make(config, abstract_mesh(config), folder)
    print((folder / "plan.md").read_text())
    return plan.time_of(report)


def presets(config, folder: Path, overrides=()) -> None:
    """The presets as a table: name, and the first line of its file."""
    for name in commandline.options("preset"):
        header = (commandline.CONF / "preset" / f"{name}.yaml").read_text().splitlines()[1].lstrip("# ")
        print(f"{name:36} {header}")


TASKS = {"generate": generate, "plan": plan, "tune": tune, "presets": presets}


# ---------------------------------------------------------------- progress


def bar(total, description, **options):
    """A progress bar on process 0's terminal, nothing elsewhere."""
    from tqdm import tqdm

    return tqdm(total=total, desc=description, disable=not (sys.stderr.isatty() and distributed.is_first()), leave=False, **options)


# ---------------------------------------------------------------- before JAX starts


def read_prompts(config) -> tuple[str, str]:
    """The prompt and the negative prompt, from the config or from files."""
    prompt, negative = config.prompt.text, config.prompt.negative or ""
    if config.prompt.file is not None:
        prompt = Path(config.prompt.file).read_text()
    if config.prompt.negative_file is not None:
        negative = Path(config.prompt.negative_file).read_text()
    return prompt.strip(), negative.strip()


def finished_before(config, folder: Path) -> float | None:
    from wan_torchax.records import outputs as records

    return records.finished_before(records.settle(config, read_prompts(config)), folder)


def find_checkpoint(config, stage: str) -> Path:
    """The folder of a stage's weights. Its config.json may add to the config's architecture, not contradict it."""
    component = schema.COMPONENTS[stage]
    folder = checkpoint.find(config.model, component)
    config.model.architecture[component] = checkpoint.read_architecture(folder, config.model.architecture[component], component)
    if stage == "text":
        checkpoint.find(config.model, "tokenizer")
    return folder


def begin_imports() -> None:
    """Import torch and diffusers in a thread, while the devices start. --help and mistakes in a config do without."""
    threading.Thread(target=importlib.import_module, args=["wan_torchax.session"], name="imports").start()


def start_jax(config, meanwhile=lambda: None):
    """Set the flags that must stand before JAX starts, then arrange its devices as the config's mesh; `meanwhile` is called in between."""
    append_flags("XLA_FLAGS", [*config.mesh.xla_flags, *config.compile.xla_flags])
    append_flags("LIBTPU_INIT_ARGS", config.compile.libtpu_flags)
    import jax

    meanwhile()
    use_fake_devices(config)
    if config.compile.cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", config.compile.cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_default_matmul_precision", config.compile.matmul_precision)
    mesh = make_mesh(config)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jax.jit(lambda: jax.numpy.zeros(()), out_shardings=everywhere)().block_until_ready()  # the first program takes seconds on a GPU
    return mesh


def use_fake_devices(config) -> None:
    """As many CPU devices as the mesh has. Once JAX runs, in a sweep, it has as many as it has."""
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(FAKE_DEVICES, config.mesh.devices or 0) // distributed.processes())


def append_flags(variable: str, flags) -> None:
    """Add flags to an environment variable that is read once, when JAX starts."""
    present = os.environ.get(variable, "").split()
    missing = [flag for flag in flags if flag not in present]
    if missing and "wan_torchax.session" in sys.modules:  # JAX runs since an earlier job
        raise schema.ConfigError(f"compile: {' '.join(missing)} comes too late, JAX runs already; give each set of flags a process of its own")
    os.environ[variable] = " ".join(present + missing)


def make_mesh(config):
    """The config's axes over the devices of this machine, or of all hosts; an axis of -1 takes whatever remains."""
    import jax

    mesh = config.mesh
    try:
        devices = jax.devices(mesh.platform)
    except RuntimeError as error:
        wanted = mesh.platform or "device"
        raise schema.ConfigError(f"mesh={mesh.name}: no {wanted} to be had here ({error}); use mesh=auto for what this machine has") from error
    hosts = jax.process_count()
    if hosts != distributed.processes() or hosts != (mesh.hosts or hosts):
        raise schema.ConfigError(f"mesh={mesh.name}: {hosts} hosts, {distributed.processes()} processes have joined, mesh.hosts={mesh.hosts}; "
                                 "run the same command with distributed=auto on every host of the slice, once on each")
    if mesh.platform is None and devices[0].platform == "cpu" and hosts == 1:
        devices = devices[:1]  # fake CPU devices are for meshes that ask for them
    needed = mesh.devices or len(devices)
    fixed = [size for size in mesh.axes.values() if size != -1]
    rest, left = divmod(needed, math.prod(fixed))
    if needed > len(devices) or left or (hosts > 1 and needed != len(devices)) or (rest != 1 and -1 not in mesh.axes.values()):
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
        found = f"{'this machine has' if hosts == 1 else f'{hosts} hosts have'} {len(devices)} ({devices[0].device_kind})"
        raise schema.ConfigError(f"mesh={mesh.name}: axes {sizes} over {needed} devices, and {found}; change mesh.axes or use mesh=auto")
    config.mesh.axes = {axis: rest if size == -1 else size for axis, size in mesh.axes.items()}
    config.mesh.devices = needed
    validation.validate(config)  # again, now that every axis has a size
    types = (jax.sharding.AxisType.Auto,) * len(mesh.axes)
    if hosts > 1:
        return jax.sharding.Mesh(distributed.arrange(devices, tuple(mesh.axes.values())), tuple(mesh.axes), axis_types=types)
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
