"""task=tune: which of the listed values is fastest, for one shape on the device that is here.

    python run.py task=tune model=wan21_t2v_14b resolution=720p mesh=v6e_8 attention=splash_v6e

Every combination of `tune.search` is compiled, warmed up and timed with the device in step with the clock; what is
refused or does not compile is told and passed over. Keys under attention.self or attention.cross time that attention
alone; any other key times the whole denoising step, on weights of zeros. The winner is written as
conf/attention/<device>_<shape>.yaml.
"""
import dataclasses
import functools
import itertools
import json
import logging
import time
from pathlib import Path

import jax
import yaml
from omegaconf import OmegaConf

from wan_torchax.config import commandline, schema, validation
from wan_torchax.kernels.attention import attend_flat, resolve
from wan_torchax.runtime import weights
from wan_torchax.stages import denoise as stages

log = logging.getLogger("wan")


def search(config, mesh, folder: Path, bar, conf: Path = commandline.CONF) -> float:
    """Time every combination, write tune.json and the winner's config; returns the winner's seconds."""
    lists = validation.search_lists(config)
    config = resolved(config, mesh)
    rows = []
    combinations = [dict(zip(lists, values)) for values in itertools.product(*lists.values())]
    with bar(len(combinations), "tuning", unit="try") as progress:
        for values in combinations:
            rows.append(try_one(config, mesh, values))
            progress.update(1)
            log.info("%s  %s", told(rows[-1]), "  ".join(f"{key}={value}" for key, value in values.items()))
    (folder / "tune.json").write_text(json.dumps({"device": device_name(mesh), "shape": shape_name(config), "tries": rows}, indent=2) + "\n")
    timed = [row for row in rows if row["seconds"] is not None]
    if not timed:
        raise schema.ConfigError(f"task=tune: none of the {len(rows)} combinations in tune.search ran; the first said: {rows[0]['error']}")
    best = min(timed, key=lambda row: row["seconds"])
    path = write_winner(config, mesh, best, len(timed), conf)
    print(path)
    return best["seconds"]


def resolved(config, mesh):
    """The config with `kernel: auto` replaced by the kernel that serves here, whose blocks can then be changed."""
    transformer, chosen = config.model.architecture.transformer, config.copy()
    attention = resolve(OmegaConf.to_object(config.attention), stages.mesh_device(mesh), config.model.dtype.transformer, transformer.attention_head_dim)
    OmegaConf.update(chosen, "attention", {part: dataclasses.asdict(getattr(attention, part)) for part in ("self", "cross")})
    return chosen


def told(row) -> str:
    return f"{row['seconds'] * 1e3:10.3f} ms" if row["seconds"] is not None else f"passed over: {row['error']}"


def try_one(config, mesh, values) -> dict:
    """Seconds of one combination, or why there are none."""
    tried = config.copy()
    try:
        for key, value in values.items():
            OmegaConf.update(tried, key, value)
        validation.validate(tried)
        seconds = median_seconds(program(tried, mesh, values), config.tune.repeats)
        return {"values": values, "seconds": seconds, "error": None}
    except Exception as error:
        return {"values": values, "seconds": None, "error": str(error).strip().splitlines()[-1].strip(" -")[:300]}


def program(config, mesh, values):
    """What to time, as a function without arguments that returns device arrays."""
    parts = {".".join(key.split(".")[:2]) for key in values}
    return attention_call(config, mesh, parts.pop().split(".")[1]) if parts in ({"attention.self"}, {"attention.cross"}) else step_call(config, mesh)


def attention_call(config, mesh, part):
    """One attention of the transformer, at the config's shape, on the config's mesh."""
    transformer = config.model.architecture.transformer
    heads, head_dim, dtype = transformer.num_attention_heads, transformer.attention_head_dim, config.model.dtype.transformer
    _, _, frames, height, width = stages.latent_shape(config)
    tokens = frames * height * width // 4
    batch = 2 if stages.guided(config) and config.guidance == "batched" else 1
    keys = tokens if part == "self" else config.model.text_tokens
    run = functools.partial(
        attend_flat, head_dim=head_dim, kernel=OmegaConf.to_object(config.attention[part]), parallel=OmegaConf.to_object(config.sharding.attention),
        mesh=mesh, cross=part == "cross",
    )
    # On every device whole: each takes its part, and nothing travels that the step would not send too.
    everywhere = stages.replicated(mesh)
    make = jax.jit(lambda seed, length: jax.random.normal(jax.random.key(seed), (batch, length, heads * head_dim), dtype),
                   static_argnums=1, out_shardings=everywhere)
    inputs = [make(seed, length) for seed, length in enumerate((tokens, keys, keys))]
    return functools.partial(jax.jit(run), *inputs)


def step_call(config, mesh):
    """One denoising step on weights of zeros, which take as long as any."""
    stage = stages.build_denoise(config, mesh)
    compiled = stages.lower(stage)["step"].compile()
    arrays = {name: weights.zeros(tensor.struct) for name, tensor in stage.tensors.items()}
    state, *rest = stage.programs["step"].arguments
    rest = [weights.zeros(struct) for struct in rest]
    return lambda: compiled(arrays, weights.zeros(state), *rest)  # the state is donated: a new one each time


def median_seconds(call, repeats) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


# ---------------------------------------------------------------- the winner's file


def device_name(mesh) -> str:
    return stages.mesh_device(mesh).device_kind.lower().replace(" ", "_")


def shape_name(config) -> str:
    size = config.resolution
    return f"{config.model.name}_{size.width}x{size.height}x{size.frames}"


def write_winner(config, mesh, best, tried, conf: Path) -> Path:
    """conf/attention/<device>_<shape>.yaml: both kernels in full, the figures in its header."""
    chosen = config.copy()
    for key, value in best["values"].items():
        OmegaConf.update(chosen, key, value)
    attention = OmegaConf.to_object(chosen.attention)
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    won = ", ".join(f"{key}={value}" for key, value in best["values"].items())
    header = (
        f"# Tuned for {shape_name(config)} on {stages.mesh_device(mesh).device_kind} ({axes}): {best['seconds'] * 1e3:.3f} ms, "
        f"the best of {tried}.\n# {won}\n# Made by: python run.py task=tune …\n"
    )
    path = conf / "attention" / f"{device_name(mesh)}_{shape_name(config)}.yaml"
    path.write_text(header + yaml.safe_dump({part: dataclasses.asdict(getattr(attention, part)) for part in ("self", "cross")}, sort_keys=False))
    return path
