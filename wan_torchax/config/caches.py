"""Validation of a step cache (conf/cache). No JAX, no torch."""
import logging
from collections.abc import Iterator
from pathlib import Path

import yaml

from wan_torchax import ROOT
from wan_torchax.config.geometry import guided
from wan_torchax.config.wording import one_of

log = logging.getLogger("wan")
CURVES = Path(ROOT) / "conf" / "curve"
MODES = ("magcache", "easycache")


def is_on(config) -> bool:
    """Whether any step is not computed in full."""
    return config.cache.mode is not None or rests(config)


def rests(config) -> bool:
    """Whether some steps skip the negative prompt."""
    cache = config.cache
    return guided(config) and (cache.guidance_every > 1 or (cache.guidance_start, cache.guidance_stop) != (0, 1))


def curve_name(config) -> str:
    return config.cache.curve or config.model.curve or config.model.name


def curve_file(config) -> Path:
    return CURVES / f"{curve_name(config)}.yaml"


def cache_problems(config) -> Iterator[str]:
    cache = config.cache
    if cache.mode is not None and config.task != "calibrate":
        yield from one_of("cache.mode", cache.mode, MODES)
    for key, least, most in (
        ("threshold", 0, 1), ("retention", 0, 1), ("guidance_start", 0, 1), ("guidance_stop", 0, 1),
        ("rest_start", 0, 1), ("rest_stop", 0, 1), ("rest_boost", 0, 1), ("most_in_a_row", 1, 1000),
        ("last", 0, 1000), ("guidance_every", 1, 1000),
    ):
        if not least <= cache[key] <= most:
            closest = min(max(cache[key], least), most)
            yield f"cache.{key}={cache[key]}: must be from {least} to {most}; nearest {closest}"
    if cache.guidance_start >= cache.guidance_stop:
        yield f"cache.guidance_start={cache.guidance_start}: must be below guidance_stop={cache.guidance_stop}"
    if (cache.guidance_every > 1 or (cache.guidance_start, cache.guidance_stop) != (0, 1)) and not guided(config):
        none = f"guidance_scale={config.guidance_scale} is none"
        yield f"cache={cache.name}: lets guidance rest, and {none}; leave it out"
    if cache.mode == "magcache":
        yield from curve_problems(config)
    if config.scheduler.target == "FlowMatchLCMScheduler" and is_on(config):
        reason = "scheduler=renoise draws noise in every step, so no step can be reused"
        yield f"cache={cache.name}: {reason}; use cache=none or another scheduler"


def curve_problems(config) -> Iterator[str]:
    name, known = curve_name(config), sorted(path.stem for path in CURVES.glob("*.yaml"))
    if name not in known:
        remedy = f"cache=easycache needs none; task=calibrate writes one; there are: {', '.join(known)}"
        yield f"cache.curve={name}: there is no such curve; {remedy}"


def curve_warnings(config, curve: Path) -> Iterator[str]:
    """How a run differs from those its curve was measured with."""
    stored = yaml.safe_load(curve.read_text())
    size, solver = config.resolution, config.scheduler.name
    if stored["shift"] != size.flow_shift:
        yield f"it was measured at shift {stored['shift']}, this run has {size.flow_shift}"
    if stored["solver"] != solver:
        yield f"it was measured with {stored['solver']}, this run has {solver}"
    if stored.get("resolution") and stored["resolution"] != f"{size.width}x{size.height}":
        yield f"it was measured at {stored['resolution']}, this run has {size.width}x{size.height}"
