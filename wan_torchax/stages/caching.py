"""Which steps are computed, and how much of them: decided on the host, before the run or from a few numbers a step.

    work = plan(config, table)      # a word a step: full, prompt or reuse (stages/step.py)

MagCache (Ma et al., 2025) knows from a curve how fast the size of what the blocks add changes from step to step, and
reuses it while the error so summed up stays small. EasyCache (Zhou et al., 2025) sees it from the latents as it goes.
The CFG cache (Lv et al., 2025) guesses the negative prompt's velocity in most steps of the middle.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import numpy
import yaml

from wan_torchax.config.caches import curve_file
from wan_torchax.config.geometry import expert_at, guided

FULL, PROMPT, REUSE = "full", "prompt", "reuse"
SAME_SIGMA = 0.005  # diffusers ends its schedule at 0.001, Wan's own code at 0: the same steps to a curve


@dataclass(frozen=True)
class Curve:
    """How fast the size of what the blocks add changes, from one step to the next (conf/curve)."""

    name: str
    steps: int
    shift: float
    solver: str
    ratios: tuple[float, ...]  # of steps 1, 2, …: the prompt's

    @property
    def sigmas(self) -> numpy.ndarray:
        """Of the steps it was measured at, which Wan and diffusers spread alike."""
        plain = 0.999 * (1 - numpy.arange(self.steps) / self.steps)
        return self.shift * plain / (1 + (self.shift - 1) * plain)

    def at(self, sigmas: numpy.ndarray) -> numpy.ndarray:
        """The ratio of every step of another schedule to the one before: sizes are multiplied along the way, so that
        their logarithms can be read between the points."""
        sizes, own = numpy.concatenate([[0.0], numpy.cumsum(numpy.log(self.ratios))]), self.sigmas
        if len(sigmas) == len(own) and numpy.abs(sigmas - own).max() < SAME_SIGMA:
            sigmas = own
        there = numpy.interp(-sigmas, -own, sizes)
        return numpy.exp(numpy.diff(there, prepend=there[0]))


def read_curve(path: Path) -> Curve:
    stored = yaml.safe_load(path.read_text())
    return Curve(path.stem, stored["steps"], stored["shift"], stored["solver"], tuple(stored["ratios"]))


def plan(config, table, curve: Path | None = None) -> list[str]:
    """How each step is done, as far as that is known before the run: an adaptive cache turns more into `reuse`."""
    work = [FULL] * len(table.timesteps)
    if config.cache.mode == "magcache":
        ratios = read_curve(curve or curve_file(config)).at(table.sigmas)
        skips = skipped(ratios, kept_steps(config, table), config.cache.threshold, config.cache.most_in_a_row)
        work = [REUSE if skip else FULL for skip in skips]
    if not guided(config):
        return work
    return rest(config, work)


def skipped(ratios, kept: list[bool], threshold: float, most: int) -> list[bool]:
    """MagCache's choice: a step is skipped while the errors of all skips since the last computed step, each the
    distance of the product of ratios from 1, add up to less than the threshold."""
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
    """Steps that are computed whatever happens: the first share of each expert's, and a few at the end."""
    experts = [expert_at(config, time) for time in table.timesteps]
    kept = []
    for place, expert in enumerate(experts):
        first, count = experts.index(expert), experts.count(expert)
        early = place - first < max(int(config.cache.retention * count), 1)
        kept.append(early or place >= len(experts) - config.cache.last)
    return kept


def rest(config, work: list[str]) -> list[str]:
    """Steps in which guidance rests: outside its interval, and in the middle all but every n-th that is computed."""
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
    """(steps, 2): how low and high frequencies of the last difference count; more of the low in the first half."""
    boost = config.cache.rest_boost
    rows = [(1 + boost, 1.0) if place < count / 2 else (1.0, 1 + boost) for place in range(count)]
    return numpy.float32(rows)


class Adaptive:
    """EasyCache's choice, step by step, from four numbers that each step leaves: how much the latents changed; and of
    the last computed one the size of the velocity, its change and the latents' change since the one before."""

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
        """Whether a step that the plan would compute can be left out."""
        if self.slope is None or self.kept[place]:
            return kind
        change, size = self.measures
        self.error += self.slope * change / max(size, 1e-12)
        return REUSE if self.error < self.threshold and math.isfinite(self.error) else kind


def summary(work: list[str]) -> str:
    """`10 full, then …`: what a log says of a plan."""
    letters = {FULL: "X", PROMPT: "x", REUSE: "."}
    computed = sum(kind != REUSE for kind in work)
    return f"{computed} of {len(work)} steps computed: {''.join(letters[kind] for kind in work)}"
