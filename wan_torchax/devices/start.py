"""Starts JAX: sets what must be set before it initializes, once per process, and what may change between jobs."""
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from wan_torchax import private
from wan_torchax.config.geometry import device_count
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices import distributed
from wan_torchax.records.store import Untrusted, check_folder

log = logging.getLogger("wan")
FAKE_DEVICES = 8  # CPU devices, always created so that a sweep can mix meshes; unused ones cost nothing
flags_in_force: dict[str, list[str]] | None = None  # the flags of this process's first job


def start(config, meanwhile: Callable[[], None] = lambda: None):
    """Start JAX with a config's settings, or reuse the running one; returns its devices. `meanwhile` is called before
    the devices initialize."""
    set_flags(config)
    import jax

    from wan_torchax.devices import mesh

    meanwhile()
    use_fake_devices(config)
    use_cache(config.compile.cache_dir)
    jax.config.update("jax_default_matmul_precision", config.compile.matmul_precision)
    return mesh.find(config.mesh)


@functools.cache
def warm_up(mesh) -> None:
    """Run a first program, which takes seconds on a GPU; once on each mesh."""
    import jax

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jax.jit(lambda: jax.numpy.zeros(()), out_shardings=everywhere)().block_until_ready()


def set_flags(config) -> None:
    """Set the config's flags in the environment, where JAX reads them when it starts. Once JAX runs, different flags
    are an error."""
    global flags_in_force
    asked = {
        "XLA_FLAGS": [*config.mesh.xla_flags, *config.compile.xla_flags],
        "LIBTPU_INIT_ARGS": list(config.compile.libtpu_flags),
    }
    if flags_in_force is None and not is_running():
        for variable, flags in asked.items():
            present = os.environ.get(variable, "").split()
            os.environ[variable] = " ".join(present + [flag for flag in flags if flag not in present])
    elif in_words(asked) != in_words(flags_in_force or {}):
        raise ConfigError(
            f"mesh.xla_flags, compile.xla_flags, compile.libtpu_flags: this job asks for {in_words(asked)}, and JAX "
            f"runs since an earlier one with {in_words(flags_in_force or {})}; give each set of flags a process of its "
            "own"
        )
    flags_in_force = asked


def in_words(flags: dict[str, list[str]]) -> str:
    return " ".join(flag for listed in flags.values() for flag in listed) or "no flags"


def is_running() -> bool:
    """Whether JAX has initialized its devices."""
    return "jax" in sys.modules and private.has_devices()


def use_fake_devices(config) -> None:
    """Create enough CPU devices for the mesh. Has no effect once JAX runs, as in a sweep."""
    import jax

    with contextlib.suppress(RuntimeError):
        count = max(FAKE_DEVICES, device_count(config.mesh)) // distributed.processes()
        jax.config.update("jax_num_cpu_devices", count)


def use_cache(folder: str | None) -> None:
    """Enable JAX's persistent compilation cache for all programs; None disables it."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = folder and own_folder(folder)
    private.remove_damaged_entries()
    if folder != jax.config.jax_compilation_cache_dir:
        compilation_cache.reset_cache()  # JAX would keep using the folder it opened first
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def own_folder(folder: str) -> str | None:
    """The folder, created if it does not exist; None, with a warning, if others can write to it, as its entries are
    code, or if it cannot be created. Buckets (gs://…) are JAX's to open."""
    if "://" in folder:
        return folder
    try:
        Path(folder).mkdir(parents=True, mode=0o700, exist_ok=True)
        check_folder(Path(folder), "compile.cache_dir", closed=0o022)
    except (Untrusted, OSError) as error:
        log.warning("JAX's compilation cache is not used: %s", error)
        return None
    return folder
