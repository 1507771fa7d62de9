"""Coarse first: pipelines whose first steps have half the height and width (conf/pipeline/t2v_coarse.yaml).

Spectral Progressive Diffusion (arXiv 2605.18736): while there is much noise, only low frequencies of the latents stand
out from it, and half the height and width hold those. No JAX, no torch.
"""
import math
from collections.abc import Iterator

from wan_torchax.config import caches
from wan_torchax.config.registry import family_of
from wan_torchax.config.wording import nearest_multiple

DEFAULT_DELTA = 0.05
PREFIX = "coarse_"  # of values at half height and width


def is_on(config) -> bool:
    """Whether the pipeline's first steps are coarse."""
    return "coarse_delta" in config.pipeline.inputs.values()


def last_sigma(config, height: int, width: int) -> float:
    """The noise level down to which latents of this size hold all that stands out from the noise: the highest frequency
    has a power of amplitude / frequency^exponent, and it may be off by `coarse_delta` of its variance."""
    amplitude, exponent = config.model.spectrum
    delta = DEFAULT_DELTA if config.coarse_delta is None else config.coarse_delta
    power = amplitude * (min(height, width) // 2) ** -exponent
    return 1 / (1 + math.sqrt(delta / (power * (1 + power - delta))))


def coarse_problems(config) -> Iterator[str]:
    if not is_on(config):
        return
    pipeline = f"pipeline={config.pipeline.name}"
    spectrum = config.model.spectrum
    if spectrum is None:
        reason = f"the spectrum of the latents of model={config.model.name} is not known"
        yield f"{pipeline}: {reason}; give model.spectrum=[amplitude,exponent], or leave the pipeline out"
    elif len(spectrum) != 2 or min(spectrum) <= 0:
        yield f"model.spectrum={list(spectrum)}: must be an amplitude and an exponent, both above 0"
    for key, multiple in family_of(config).geometry(config.model.architecture).multiples.items():
        size, even = config.resolution[key], 2 * multiple
        if size % even and not size % multiple:
            least = f"must be a multiple of {even} with {pipeline}"
            yield f"resolution.{key}={size}: {least}; {nearest_multiple(size, even)}"
    if caches.rests(config):
        reason = f"cache={config.cache.name} lets guidance rest in a share of all steps, of which these are two parts"
        yield f"{pipeline}: {reason}; use cache=none, magcache or easycache"
    if config.guider.zero_steps:
        reason = f"counts a video's first steps, and {pipeline} has two parts with a first one each"
        yield f"guider.zero_steps={config.guider.zero_steps}: {reason}; set guider.zero_steps=0"
    if config.task == "calibrate":
        yield f"task=calibrate: a curve is of steps of one size, and {pipeline} has two; use the pipeline without"
