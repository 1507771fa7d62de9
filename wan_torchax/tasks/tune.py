"""task=tune: finds the fastest of the listed values for one shape on this machine's device.

    python run.py task=tune model=wan21_t2v_14b resolution=720p mesh=v6e_8 attention=splash_v6e

Every combination of `tune.search` is compiled, warmed up and timed with synchronized calls; invalid combinations and
those that do not compile are reported and skipped. Keys under attention.self or attention.cross time only that
attention; any other key times the whole denoising step, with zero weights. The winner is written to
conf/attention/<device>_<shape>.yaml.
"""
import dataclasses
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import yaml
from omegaconf import OmegaConf

from wan_torchax.config.attention import parallel_of
from wan_torchax.config.commandline import CONF
from wan_torchax.config.geometry import prompt_count
from wan_torchax.config.resolve import Resolved
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import search_lists, validate
from wan_torchax.devices.sharding import replicated
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import Kernel
from wan_torchax.runtime.jobs import plan_job
from wan_torchax.session import session
from wan_torchax.stages.stage import main_stage
from wan_torchax.tasks.progress import bar

log = logging.getLogger("wan")


def tune(config, folder: Path, overrides=(), conf: Path = CONF) -> float:
    """Time every combination, write tune.json and the winner's config; returns the winner's seconds."""
    lists, resolved = search_lists(config), session.place(plan_job(config))
    config = with_kernels(config, resolved)
    rows = []
    combinations = [dict(zip(lists, values)) for values in itertools.product(*lists.values())]
    with bar(len(combinations), "tuning", unit="try") as progress:
        for values in combinations:
            rows.append(try_one(config, values))
            progress.update(1)
            log.info("%s  %s", in_words(rows[-1]), "  ".join(f"{key}={value}" for key, value in values.items()))
    report = {"device": device_name(resolved), "shape": shape_name(config), "tries": rows}
    (folder / "tune.json").write_text(json.dumps(report, indent=2) + "\n")
    timed = [row for row in rows if row["seconds"] is not None]
    if not timed:
        first = rows[0]["error"]
        raise ConfigError(f"task=tune: none of the {len(rows)} tries in tune.search ran; the first said: {first}")
    best = min(timed, key=lambda row: row["seconds"])
    print(write_winner(config, resolved, best, len(timed), conf))
    return best["seconds"]


def with_kernels(config, resolved: Resolved):
    """The config with `kernel: auto` replaced by the kernels for these devices, so that their blocks can be changed."""
    chosen = config.copy()
    OmegaConf.update(chosen, "attention", OmegaConf.to_container(resolved.config.attention))
    return chosen


def in_words(row: dict) -> str:
    return f"{row['seconds'] * 1e3:10.3f} ms" if row["seconds"] is not None else f"passed over: {row['error']}"


def try_one(config, values: dict) -> dict:
    """Seconds of one combination, or its error."""
    changed = config.copy()
    try:
        for key, value in values.items():
            OmegaConf.update(changed, key, value)
        validate(changed)
        resolved = session.place(plan_job(changed))
        seconds = median_seconds(program(resolved, values), config.tune.repeats)
        return {"values": values, "seconds": seconds, "error": None}
    except Exception as error:
        return {"values": values, "seconds": None, "error": str(error).strip().splitlines()[-1].strip(" -")[:300]}


def program(resolved: Resolved, values: dict) -> Callable:
    """What to time, as a function without arguments that returns device arrays."""
    parts = {".".join(key.split(".")[:2]) for key in values}
    if parts in ({"attention.self"}, {"attention.cross"}):
        return attention_call(resolved, parts.pop().split(".")[1])
    return step_call(resolved)


def attention_call(resolved: Resolved, part: str) -> Callable:
    """One attention of the transformer, with the config's shape and mesh."""
    config, mesh, dtype = resolved.config, resolved.mesh, resolved.config.model.dtype.transformer
    heads, head_dim = resolved.family.heads(config.model.architecture)
    batch = prompt_count(config) if config.guidance == "batched" else 1
    keys = resolved.tokens if part == "self" else config.model.text_tokens
    kernel = Kernel.of(config.attention[part])
    attend = Attend(head_dim, kernel, parallel_of(config.sharding), mesh, cross=part == "cross")

    # Replicated: each device takes its part, and there is no communication that the step would not have too.
    @functools.partial(jax.jit, static_argnums=1, out_shardings=replicated(mesh))
    def make(seed, length):
        return jax.random.normal(jax.random.key(seed), (batch, length, heads * head_dim), dtype)

    inputs = [make(seed, length) for seed, length in enumerate((resolved.tokens, keys, keys))]
    return functools.partial(jax.jit(attend), *inputs)


def step_call(resolved: Resolved) -> Callable:
    """One denoising step, as a function without arguments."""
    return compiled_step(resolved)[1]


def compiled_step(resolved: Resolved) -> tuple[jax.stages.Compiled, Callable]:
    """One denoising step with random weights: the program and a call of it."""
    name = main_stage(resolved.graph)
    stage = session.build(resolved, [name])[name]
    compiled = stage.programs.lower()[stage.usual_program].compile()
    step = stage.programs.entries[stage.usual_program]
    arrays = {name: noise(tensor.struct, 0.02) for name, tensor in stage.specs[step.component].items()}
    state, *rest = jax.tree.map(noise, tuple(step.arguments))
    return compiled, lambda: compiled(arrays, jax.tree.map(jnp.copy, state), *rest)  # the state is donated


def noise(struct, scale: float = 1.0) -> jax.Array:
    """Random numbers of a shape, type and place; whole ones, which count something, are zeros. Zeros everywhere would
    take less power, and on a GPU less time."""
    return noise_program(struct, scale)(jax.random.key(0))


@functools.cache  # many arrays are alike
def noise_program(struct, scale: float):
    dtype = struct.dtype if struct.dtype.itemsize > 1 else jnp.bfloat16  # a stack in float32 may be too large beside

    def make(key):
        if struct.dtype == jnp.int8:
            return jax.random.randint(key, struct.shape, -127, 128, jnp.int8)
        if not jnp.issubdtype(struct.dtype, jnp.floating):
            return jnp.zeros(struct.shape, struct.dtype)
        return (jax.random.normal(key, struct.shape, dtype) * jnp.asarray(scale, dtype)).astype(struct.dtype)

    return jax.jit(make, out_shardings=struct.sharding)


def median_seconds(call: Callable, repeats: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


# ---------------------------------------------------------------- the winner's file


def device_name(resolved: Resolved) -> str:
    return resolved.placement["kind"].lower().replace(" ", "_")


def shape_name(config) -> str:
    size = config.resolution
    return f"{config.model.name}_{size.width}x{size.height}x{size.frames}"


def write_winner(config, resolved: Resolved, best: dict, tried: int, conf: Path) -> Path:
    """Write conf/attention/<device>_<shape>.yaml: both kernels in full, with the figures in a header."""
    chosen = config.copy()
    for key, value in best["values"].items():
        OmegaConf.update(chosen, key, value)
    attention = OmegaConf.to_object(chosen.attention)
    axes = ", ".join(f"{axis}={size}" for axis, size in resolved.placement["axes"].items())
    place = f"{shape_name(config)} on {resolved.placement['kind']} ({axes})"
    values = ", ".join(f"{key}={value}" for key, value in best["values"].items())
    header = (
        f"# Tuned for {place}: {best['seconds'] * 1e3:.3f} ms, the best of {tried}.\n"
        f"# {values}\n# Made by: python run.py task=tune …\n"
    )
    path = conf / "attention" / f"{device_name(resolved)}_{shape_name(config)}.yaml"
    kernels = {part: dataclasses.asdict(getattr(attention, part)) for part in ("self", "cross")}
    path.write_text(header + yaml.safe_dump(kernels, sort_keys=False))
    return path
