"""Step caching: decides on the host which steps are computed and how much of them, before the run or adaptively.

    work = plan(config, table)      # one per step: full, skip, prompt or reuse (stages/step.py)

MagCache (Ma et al., 2025) has a calibrated curve of how the norm of the blocks' residual changes from step to step, and
reuses the residual while the accumulated error is small. EasyCache (Zhou et al., 2025) estimates the error from the
latents at run time. The CFG cache (Lv et al., 2025) extrapolates the negative prompt's velocity in most middle steps.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import numpy
import yaml

from wan_torchax.config.caches import curve_file
from wan_torchax.config.geometry import expert_at, guidance_at, guided

FULL, SKIP, PROMPT, REUSE = "full", "skip", "prompt", "reuse"
SAME_SIGMA = 0.005  # diffusers' schedule ends at 0.001, Wan's own at 0: curves treat them as equal


@dataclass(frozen=True)
class Curve:
    """Ratios of the norm of the blocks' residual from one step to the next (conf/curve)."""

    name: str
    steps: int
    shift: float
    solver: str
    ratios: tuple[float, ...]  # of steps 1, 2, …: the prompt's

    @property
    def sigmas(self) -> numpy.ndarray:
        """The schedule it was measured with; Wan and diffusers use the same spacing."""
        plain = 0.999 * (1 - numpy.arange(self.steps) / self.steps)
        return self.shift * plain / (1 + (self.shift - 1) * plain)

    def at(self, sigmas: numpy.ndarray) -> numpy.ndarray:
        """The ratios for another schedule: norms multiply along the steps, so their logarithms are interpolated."""
        sizes, own = numpy.concatenate([[0.0], numpy.cumsum(numpy.log(self.ratios))]), self.sigmas
        if len(sigmas) == len(own) and numpy.abs(sigmas - own).max() < SAME_SIGMA:
            sigmas = own
        there = numpy.interp(-sigmas, -own, sizes)
        return numpy.exp(numpy.diff(there, prepend=there[0]))


def read_curve(path: Path) -> Curve:
    stored = yaml.safe_load(path.read_text())
    return Curve(path.stem, stored["steps"], stored["shift"], stored["solver"], tuple(stored["ratios"]))


def plan(config, table, curve: Path | None = None) -> list[str]:
    """The work of each step as known before the run; an adaptive cache changes more steps to `reuse`."""
    work = [FULL] * len(table.timesteps)
    if config.cache.mode == "magcache":
        ratios = read_curve(curve or curve_file(config)).at(table.sigmas)
        skips = skipped(ratios, kept_steps(config, table), config.cache.threshold, config.cache.most_in_a_row)
        work = [REUSE if skip else FULL for skip in skips]
    if not guided(config):
        return work
    if not config.guider.skip_negative:
        work = [SKIP if skip else kind for skip, kind in zip(skip_steps(config, table), work)]
    return rest(config, work)


def skip_steps(config, table) -> list[bool]:
    """Steps with skip-layer guidance, as diffusers counts them: those that are guided."""
    guider, count = config.guider, len(table.timesteps)
    first, last = (int(share * count) for share in (guider.skip_start, guider.skip_stop))
    always = guider.skip_negative and (guider.skip_start, guider.skip_stop) == (0, 1)
    return [
        bool(guider.skip_layers) and (first < place < last or always) and guidance_of(config, place, time, count) != 1
        for place, time in enumerate(table.timesteps)
    ]


def guidance_of(config, place: int, timestep: float, count: int) -> float:
    """The guidance scale of a step."""
    return guidance_at(config, timestep) if in_interval(config, place, count) else 1.0


def skipped(ratios, kept: list[bool], threshold: float, most: int) -> list[bool]:
    """MagCache's rule: skip a step while the accumulated error since the last computed step is below the threshold. A
    skip's error is the distance of the product of ratios from 1."""
    skips, product, error, count = [], 1.0, 0.0, 0
    for ratio, keep in zip(ratios, kept):
        if keep:
            skips.append(False)
            continue
        product, count = product * ratio, count + 1
        error += abs(1 - product)
        skips.append(error < threshold and count <= most)
        if not skips[-1]:
            product, error, count = 1.0, 0.0, 0
    return skips


def kept_steps(config, table) -> list[bool]:
    """Steps that are always computed: the first share of each expert's steps, the last few, and those that `skip`."""
    experts = [expert_at(config, time) for time in table.timesteps]
    skips = [skip and not config.guider.skip_negative for skip in skip_steps(config, table)]
    kept = []
    for place, expert in enumerate(experts):
        first, count = experts.index(expert), experts.count(expert)
        early = place - first < max(int(config.cache.retention * count), 1)
        kept.append(early or skips[place] or place >= len(experts) - config.cache.last)
    return kept


def rest(config, work: list[str]) -> list[str]:
    """Apply the CFG cache: `prompt` outside the guidance interval, and in the middle for all but every n-th computed
    step."""
    cache, count, since, rested = config.cache, len(work), 0, []
    first, last = (int(share * count) for share in (cache.rest_start, cache.rest_stop))
    for place, kind in enumerate(work):
        since += 1
        resting = cache.guidance_every > 1 and first < place < last and since < cache.guidance_every
        if kind == FULL and (resting or not in_interval(config, place, count)):
            kind = PROMPT
        if kind == FULL:
            since = 0
        rested.append(kind)
    return rested


def in_interval(config, place: int, count: int) -> bool:
    """Whether a step is guided."""
    start, stop = config.cache.guidance_start, config.cache.guidance_stop
    return start <= (place + 0.5) / count < stop or (start, stop) == (0, 1)


def rest_weights(config, count: int) -> numpy.ndarray:
    """(steps, 2): weights of low and high frequencies of the last difference; low is boosted in the first half."""
    boost = config.cache.rest_boost
    rows = [(1 + boost, 1.0) if place < count / 2 else (1.0, 1 + boost) for place in range(count)]
    return numpy.float32(rows)


class Adaptive:
    """EasyCache's rule, evaluated per step from four measurements: the latents' last change; and for the last computed
    step the velocity's magnitude, its change, and the latents' change since the computed step before."""

    def __init__(self, config, table):
        self.threshold, self.kept = config.cache.threshold, kept_steps(config, table)
        self.error, self.slope, self.measures = 0.0, None, None

    def learn(self, measures: numpy.ndarray, kind: str) -> None:
        change, size, output_change, input_change = map(float, measures)
        if kind != REUSE:
            self.error = 0.0
            if self.measures is not None and input_change > 0:
                self.slope = output_change / input_change
        self.measures = change, size

    def choose(self, place: int, kind: str) -> str:
        """`reuse` if a planned step can be skipped."""
        if self.slope is None or self.kept[place]:
            return kind
        change, size = self.measures
        self.error += self.slope * change / max(size, 1e-12)
        return REUSE if self.error < self.threshold and math.isfinite(self.error) else kind


def summary(work: list[str]) -> str:
    """The plan for the log, one character per step where they differ."""
    if set(work) == {FULL}:
        return f"all {len(work)} steps computed"
    letters = {FULL: "X", SKIP: "S", PROMPT: "x", REUSE: "."}
    computed = sum(kind != REUSE for kind in work)
    return f"{computed} of {len(work)} steps computed: {''.join(letters[kind] for kind in work)}"
