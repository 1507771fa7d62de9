"""Noise to latents: one compiled step, including guidance and scheduler, called once per step."""
import itertools
import logging
import math
import re
import time
from dataclasses import replace

import jax
import numpy

from wan_torchax.config import caches, coarse
from wan_torchax.config.attention import parallel_of
from wan_torchax.config.geometry import device_count, expert_at, prompt_count, text_count
from wan_torchax.config.long import is_windowed, latent_frames, passes, window_tables
from wan_torchax.config.resolve import plain
from wan_torchax.config.validation import SEEDS
from wan_torchax.devices.mesh import memory_bytes
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.events import Advanced, Stepped
from wan_torchax.kernels.settings import Kernel, Parallel, Products
from wan_torchax.models.family import Forward, Nag
from wan_torchax.records.store import Store
from wan_torchax.runtime import weights
from wan_torchax.runtime.programs import NotFinite, Program, own_compilation, put
from wan_torchax.stages import caching
from wan_torchax.stages.enlarge import enlarged
from wan_torchax.stages.guidance import Guider
from wan_torchax.stages.sampling import Table, coarse_steps, free_noise, noises, scheduler_table
from wan_torchax.stages.stage import Stage
from wan_torchax.stages.step import Step

log = logging.getLogger("wan")
LANES, ROWS = 128, 8  # of a TPU tile; cuBLAS takes rows by eight too
EIGHT_BIT_ROWS = 16  # that cuBLAS takes of eight bits
SPARE_BYTES = 2 * 2**30  # headroom besides weights and temporaries
SEED_ENLARGED = 10_000  # added to the seed for the noise of enlarged latents
PROGRAMS = {caching.FULL: "step", caching.SKIP: "skip", caching.PROMPT: "prompt", caching.REUSE: "reuse"}


class Denoise(Stage):
    """Embeddings to latents (videos, channels, frames, height, width), usually of one video.

    The step's arguments are named arrays:

        state       slots: the latents (slot 0) and the scheduler's history, (slots, videos, channels, frames, …)
        schedule    timestep, coefficients (slots, slots + 1), guidance_scale of one step; if the scheduler draws
                    noise, also the noise, shaped like the latents, and coefficients (slots, slots + 2);
                    next_timestep, 0 in the last step, if the family takes it (Family.two_times)
        conditions  further inputs of the transformer (Family.conditions): per-prompt ones have all videos' prompts
                    first, then their negative prompts; first_latent (1, channels, 1, height, width) is the noise-free
                    first latent frame

    With coarse_latents it continues from these, enlarged: the scheduler and caches begin anew.

    Reference frames that a family prepends are denoised with the video and dropped from the result.
    """

    label, share = "denoising", 85.0
    settings = (
        "attention.self", "attention.cross", "products", "guidance", "guider", "model.text_tokens",
        "model.scan_blocks", "sharding.attention", "riflex", "model.riflex_frequency",
    )
    reads = (
        "seed", "steps", "strength", "guidance_scale", "guidance_scale_2", "model.experts", "model.boundary",
        "scheduler", "resolution.height", "resolution.width", "resolution.frames", "resolution.flow_shift", "cache",
        "pipeline.inputs", "model.noise_dtype", "windows",
    )
    reads_beside = ("expert_weights", "mesh.chip", "model.name", "model.curve")

    @classmethod
    def derived(cls, name, job):
        _, slots, terms = cls.table(job.config, job.geometry, Store.of(job.config)).coefficients.shape
        return {
            "prompts": prompt_count(job.config),
            "texts": text_count(job.config),
            "videos": job.videos,
            "latent_shape": (job.videos, *job.denoised_shape[1:]),
            "grid": job.grid,
            "behind": job.family.behind(job.config),
            "windows": windows_shape(job),
            "extra_frames": job.family.extra_frames(job.config),
            "slots": slots,
            "renoised": terms == slots + 2,
            "two_times": job.family.two_times(job.config),
            "conditions": {
                value: job.family.conditions[value].shape(job)
                for value in cls.takes(name, job) if value in job.family.conditions
            },
            "mode": job.config.cache.mode,
            "rests": caches.rests(job.config),
            "layers": job.family.skippable(job.config.model.architecture) if job.config.guider.skip_layers else 0,
        }

    @classmethod
    def reads_for(cls, name, job):
        return *cls.reads, *(("coarse_delta", "model.spectrum") if coarse.is_on(job.config) else ())

    @classmethod
    def takes(cls, name, job) -> list[str]:
        """What it takes, by the family's names."""
        return list(job.graph.stages[name].takes)

    @classmethod
    def table(cls, config, geometry, store) -> Table:
        """Its steps: all, or those behind the coarse ones."""
        if not coarse.is_on(config):
            return scheduler_table(config, store)
        *_, height, width = geometry.latent_shape(config.resolution)
        return scheduler_table(config, store, coarse_steps(config, height // 2, width // 2, store))

    @classmethod
    def files(cls, job):
        return {"curve": caches.curve_file(job.config)} if job.config.cache.mode == "magcache" else {}

    @classmethod
    def result_shapes(cls, name, job):
        return {"latents": job.latent_shape}

    @property
    def usual_program(self):
        return "step"

    def build(self):
        """One program for the exact step; with a cache, additional ones. A model's experts share them."""
        derived = self.recipe.derived
        step = self.step(derived["prompts"])
        structs = self.arguments(step)
        programs = {"step": step.full}
        if step.mode in ("magcache", "easycache"):
            programs["reuse"] = step.reuse
        if step.rests:
            programs["prompt"] = self.step(1).prompt
        if derived["layers"] and not step.guider.skip_negative:
            programs["skip"] = replace(step, alone=self.step(1)).skip
        for name, function in programs.items():
            outputs = jax.tree.map(lambda struct: struct.sharding, structs[0]), *[replicated(self.mesh)] * 2
            self.add(name, Program(function, self.recipe.derived["uses"][0], structs, outputs, donated=(1,)))

    def step(self, prompts: int) -> Step:
        """The step's functions for this many prompts."""
        derived, config, conditions = self.recipe.derived, self.config, self.family.conditions
        denoiser = self.family.denoiser(self.module(derived["uses"][0]), self.forward(prompts))
        return Step(
            denoiser, config.model.dtype.transformer, prompts, config.guidance == "batched",
            tuple(name for name in derived["conditions"] if conditions[name].by_prompt), derived["extra_frames"],
            replicated(self.mesh), derived["mode"], derived["rests"], guider_of(config),
            windows={name: conditions[name].window for name in derived["conditions"]} if derived["windows"] else {},
        )

    def forward(self, prompts: int) -> Forward:
        """How the transformer is computed and sharded for this many prompts."""
        config, derived, parallel = self.config, self.recipe.derived, self.parallel(prompts)
        # With the batch sharded, each device would recompute what the prompts share.
        spread = parallel.batch and self.mesh.shape[parallel.batch] > 1
        return Forward(
            architecture=plain(config.model.architecture.transformer), dtype=config.model.dtype.transformer,
            grid=tuple(derived["grid"]), text_tokens=config.model.text_tokens, conditions=tuple(derived["conditions"]),
            mesh=self.mesh, parallel=parallel, self_attention=Kernel.of(config.attention.self),
            cross_attention=Kernel.of(config.attention.cross), products=Products(**config.products),
            precision=config.precision, gather=config.sharding.gather, scan=config.model.scan_blocks,
            same_video=derived["videos"] == 1 and not spread, multiple=self.multiple(parallel),
            riflex=config.model.riflex_frequency if config.riflex else None,
            pinned=prompts == 1 and derived["rests"],  # its state comes from the two-prompt program
            nag=Nag.of(config.guider), behind=derived["behind"],
        )

    def multiple(self, parallel: Parallel) -> int:
        """Tokens are padded to a multiple of this; the same for all programs that share the blocks' residual. On one
        device to whole rows of a tile: XLA would pad, and so copy, the input of every product (49,290 tokens: 4 %)."""
        widest = self.parallel(1) if self.recipe.derived["rests"] else parallel
        shards = math.prod(self.mesh.shape[axis] for axis in widest.token_axes)
        if shards > 1:
            return LANES * shards
        return EIGHT_BIT_ROWS if self.config.precision.activations else ROWS

    def parallel(self, prompts: int) -> Parallel:
        """The mesh axes for heads, tokens, and prompts or videos. With one prompt of one video at a time there is no
        batch to shard, so the batch's axis shards tokens too, if they are sharded at all."""
        config, parallel, videos = self.config, parallel_of(self.config.sharding), self.recipe.derived["videos"]
        axis, parts = parallel.batch, self.mesh.shape.get(parallel.batch, 1)
        if (prompts > 1 and config.guidance == "batched") or (videos > 1 and videos % parts == 0):
            return parallel
        parallel = replace(parallel, batch=None)
        heads, _ = self.family.heads(config.model.architecture)
        if parts > 1 and parallel.ulysses and heads % (parts * self.mesh.shape[parallel.ulysses]) == 0:
            own = heads // (parts * self.mesh.shape[parallel.ulysses])
            # A device has fewer heads here than in the usual step: exchanged at once if they do not divide into groups.
            groups = parallel.groups if parallel.groups and parallel.group_sizes(own) else ()
            return replace(parallel, ulysses=(axis, parallel.ulysses), groups=groups)
        return parallel  # the axis is idle; validation warns about it

    def arguments(self, step: Step):
        """Structs of the state, the schedule and the conditions."""
        derived, dtype = self.recipe.derived, self.config.model.dtype.transformer
        slots, videos = derived["slots"], derived["videos"]

        def array(*shape, dtype="float32"):
            return struct(self.mesh, shape, dtype)

        terms = slots + 1 + derived["renoised"]
        schedule = {"timestep": array(), "coefficients": array(slots, terms), "guidance_scale": array()}
        if derived["renoised"]:
            schedule["noise"] = array(*derived["latent_shape"])
        if derived["two_times"]:
            schedule["next_timestep"] = array()
        if derived["rests"]:
            schedule |= {"rest_weights": array(2), "resting": array()}
        if self.config.guider.zero_steps:
            schedule["zeroed"] = array()
        if derived["layers"]:
            schedule["skipped"] = array(derived["layers"])
        if rank := self.components[derived["uses"][0]].rank:
            schedule["strengths"] = array(rank)
        if derived["windows"]:
            shape = derived["windows"]
            schedule |= {"windows": array(*shape, dtype="int32"), "window_weights": array(*shape)}
        conditions = {}
        for name, shape in derived["conditions"].items():
            condition = self.family.conditions[name]
            shape = (derived["texts"] * videos, *shape) if condition.by_prompt else shape
            conditions[name] = array(*shape, dtype=dtype if condition.half else "float32")
        residual = self.residual_struct(step) if step.mode in ("magcache", "calibrate") else None
        state = {"slots": array(slots, *derived["latent_shape"])}
        return [state | step.state_structs(array, derived["latent_shape"], residual), schedule, conditions]

    def residual_struct(self, step: Step):
        """The blocks' residual: (prompts, tokens, channels), sharded as the blocks produce it."""
        from wan_torchax.models.loop import token_sharding

        derived, parallel = self.recipe.derived, self.parallel(step.prompts)
        tokens = math.prod(derived["grid"]) + derived["behind"]
        shape = step.prompts, tokens + -tokens % self.multiple(parallel), width_of(self.family, self.config)
        sharding = token_sharding(self.mesh, parallel)
        return jax.ShapeDtypeStruct(shape, self.config.model.dtype.transformer, sharding=sharding)

    @classmethod
    def takes_several(cls, name: str, job) -> bool:
        """Whether videos can be denoised as one batch: if they differ only in text and noise, and no cache is on, whose
        decisions would depend on a single video."""
        conditions = job.family.conditions
        takes = job.graph.stages[name].takes
        return not caches.is_on(job.config) and all(
            value in conditions and conditions[value].by_prompt for value in takes
        )

    @staticmethod
    def joined(values: list[dict], names: list[str]) -> dict:
        """Batch the inputs of several videos: (prompts, …) each to (prompts · videos, …); numbers are those of all."""

        def join(first, *others):
            if not isinstance(first, numpy.ndarray):
                return first
            return numpy.stack([first, *others], axis=1).reshape(-1, *first.shape[1:])

        return {name: join(*(taken[name] for taken in values)) for name in names}

    @classmethod
    def amount(cls, name, job):
        return len(cls.table(job.config, job.geometry, Store.of(job.config)).timesteps), "step"

    def components_first(self, view):
        if self.are_resident(view):
            return list(self.components)
        return [expert_at(view.config, self.table(view.config, view.geometry, view.store).timesteps[0])]

    def are_resident(self, view) -> bool:
        """Whether the weights of all experts stay in device memory: as configured, by default if they fit."""
        if view.config.expert_weights is not None or len(self.components) == 1:
            return view.config.expert_weights != "swapped"
        weights_bytes = sum(tensor.bytes_per_device for part in self.specs.values() for tensor in part.values())
        limit = memory_bytes(self.mesh, view.config.mesh.chip)
        return limit is None or weights_bytes + self.temporary_bytes + SPARE_BYTES < limit

    def bring(self, name: str, emit) -> None:
        """Swap in the weights of an expert."""
        if self.components[name].is_loaded():
            return
        for other in self.components.values():
            other.free()
        with own_compilation():
            self.components[name].load(self.specs[name], emit)

    def run(self, view, values, emit):
        config, table = view.config, self.table(view.config, view.geometry, view.store)
        seeds = [(seed + SEED_ENLARGED) % SEEDS if "coarse_latents" in values else seed for seed in view.seeds]
        draws = map(numpy.concatenate, zip(*(self.noises(view, seed, table) for seed in seeds)))
        state, schedule, conditions = self.first_arguments(config, table, values, draws)
        rows = schedule_rows(config, table, view.geometry, self.recipe.derived["layers"])
        experts = [expert_at(config, timestep) for timestep in table.timesteps]
        for name in set(experts[1:]):
            if not self.components[name].is_loaded():
                self.components[name].read_ahead()
        adaptive = caching.Adaptive(config, table) if config.cache.mode == "easycache" else None
        work, resting, rescued = caching.plan(config, table, view.files.get("curve")), 0.0, []
        log_plan(config, work, view.files.get("curve"))
        for index, expert in enumerate(experts):
            began = time.perf_counter()
            self.bring(expert, emit)
            kind = work[index] if adaptive is None else adaptive.choose(index, work[index])
            resting = resting if kind == caching.REUSE else float(kind == caching.PROMPT)
            row = {name: column[index] for name, column in rows.items()} | {"resting": numpy.float32(resting)}
            row["strengths"] = self.components[expert].strengths(index)
            schedule |= {name: weights.put(row[name], schedule[name].sharding) for name in row.keys() & schedule.keys()}
            if "noise" in schedule:
                schedule["noise"] = weights.put(next(draws), schedule["noise"].sharding)
            state, report, estimate = self(PROGRAMS[kind], state, schedule, conditions, component=expert)
            if not bool(report["finite"]):
                what = f"the latents are not finite after step {index + 1} of {len(experts)}"
                raise NotFinite(what, config, "transformer")
            measures = numpy.asarray(state["measures"]) if "measures" in state else None
            if adaptive is not None:
                adaptive.learn(measures, kind)
            seconds, videos = time.perf_counter() - began, len(view.seeds)
            again = tuple(numpy.asarray(report["rescued"]).tolist()) if "rescued" in report else None
            rescued.append(again or (0, 0))
            for video in range(videos):
                emit(Stepped(index + 1, len(experts), seconds, estimate, kind, measures, again, video, videos))
            emit(Advanced(self.name, 1))
        log_rescued(rescued)
        latents = numpy.array(state["slots"])[0][:, :, self.recipe.derived["extra_frames"] :]
        if "first_latent" in values and values.get("first_given", True) is not None:
            latents[:, :, :1] = values["first_latent"]
        return {"latents": latents}

    def noises(self, view, seed: int, table):
        """The initial noise of a video, then the noise of each step. Segments of a video continue one generator."""
        shape = 1, *self.recipe.derived["latent_shape"][1:]
        drawn = 1 + (len(table.timesteps) if self.recipe.derived["renoised"] else 0)
        own = noises(seed, shape, view.config.model.noise_dtype, skipped=view.segment * drawn)
        if is_windowed(view.config) and view.config.windows.free_noise:
            windows, scale = view.config.windows, view.geometry
            sizes = (latent_frames(frames, scale) for frames in (windows.frames, windows.overlap))
            return itertools.chain([free_noise(next(own), *sizes, seed)], own)
        return own

    def first_arguments(self, config, table, values, draws):
        """State, schedule and conditions of the first step, on the devices."""
        state, schedule, conditions = self.programs.entries["step"].arguments
        slots = numpy.zeros(state["slots"].shape, numpy.float32)
        slots[0] = first_latents(config, values, next(draws), table.sigmas[0])
        conditions = {name: conditions[name] for name in self.recipe.derived["conditions"]}
        known = self.family.conditions
        given = {name: known[name].prepare(values[name], struct.shape) for name, struct in conditions.items()}
        with own_compilation():  # zeros are allocated on the devices by a small program
            blank = {name: weights.zeros(struct) for name, struct in state.items() if name != "slots"}
        empty = {name: numpy.zeros(struct.shape) for name, struct in schedule.items()}
        structs = {"slots": state["slots"]}, schedule, conditions
        first, schedule, conditions = put(structs, ({"slots": slots}, empty, given))
        return blank | first, schedule, conditions

    @classmethod
    def flops(cls, job) -> dict[str, int]:
        """FLOPs of a step's forward passes, by part."""
        flops = job.family.flops(job.config, job.tokens)
        forwards = prompt_count(job.config) * passes(job.config, job.geometry)
        flops = {name: int(count * forwards) for name, count in flops.items()}
        return flops | {"total": sum(flops.values())}

    @classmethod
    def tokens(cls, job) -> int:
        """Those of a step."""
        return job.tokens

    @classmethod
    def work(cls, job) -> list[str]:
        """What the steps of a video compute, one by one (stages.caching)."""
        return caching.plan(job.config, cls.table(job.config, job.geometry, None))

    @classmethod
    def product_flops(cls, job) -> dict[str, int]:
        """FLOPs of a step's linear layers in the Pallas kernel, by the chip's key for their share of peak."""
        config, precision, counts = job.config, job.config.precision, {}
        forwards = prompt_count(config) * passes(config, job.geometry)
        if config.products.kernel != "pallas":
            return {}
        tokens = job.tokens + (config.model.text_tokens if job.family.takes_text else 0)
        rules = [config.model.weights.transformer[rule].pattern for rule in precision.layers]
        format_ = "int8" if precision.weights == "int8" else "fp8"
        for name, (layers, flops) in job.family.products(config.model.architecture.transformer).items():
            kind = "transposed_product_share" if name in job.family.transposed else "product_share"
            source = f"{name.replace('*', str(precision.first))}.weight"
            is_quantized = precision.weights and any(re.fullmatch(pattern, source) for pattern in rules)
            quantized = layers - precision.first - precision.last if is_quantized else 0
            for fact, count in ((f"{format_}_{kind}", quantized), (kind, layers - quantized)):
                counts[fact] = counts.get(fact, 0) + int(count * flops * tokens * forwards)
        return {name: count for name, count in counts.items() if count}

    @classmethod
    def floor_seconds(cls, resolved) -> float | None:
        """A step's time at peak FLOP/s on every device; None if the peak is not known."""
        mesh = resolved.config.mesh
        peak = mesh.chip.peak_tflops
        return peak and cls.flops(resolved)["total"] / (device_count(mesh) * peak * 1e12)

    @classmethod
    def report(cls, resolved):
        return {
            "floor_seconds_per_step": cls.floor_seconds(resolved), "step_flops": cls.flops(resolved)["total"],
        }

    @classmethod
    def temporaries(cls, resolved):
        """The widest layer in bf16 plus a float32 residual and a few copies."""
        config, axes, parallel = resolved.config, resolved.placement["axes"], parallel_of(resolved.config.sharding)

        def size(axis):
            return axes.get(axis, 1) if axis else 1

        batch = resolved.videos * (prompt_count(config) if config.guidance == "batched" else 1)
        shards = size(parallel.ulysses) * size(parallel.ring)
        rows = math.ceil(batch / size(parallel.batch)) * resolved.tokens / shards
        dim = width_of(resolved.family, config)
        products = resolved.family.products(config.model.architecture.transformer)
        widest = max(flops for _, flops in products.values()) / (2 * dim)
        return rows * (widest / size(parallel.heads) * 2 + dim * (4 + 2 * 4))


def windows_shape(job) -> tuple[int, int] | None:
    """Windows of a step, at most, and their latent frames; None if there is one forward pass."""
    return window_tables(job.config, job.geometry, job.config.steps)[0].shape[1:] if is_windowed(job.config) else None


def width_of(family, config) -> int:
    """Channels of the transformer's tokens."""
    return math.prod(family.heads(config.model.architecture))


def first_latents(config, values, noise: numpy.ndarray, sigma: float) -> numpy.ndarray:
    """Noise; for video-to-video, the video's latents noised to the first step's sigma; or enlarged coarse latents."""
    if "coarse_latents" in values:
        return enlarged(values["coarse_latents"], noise, sigma)
    if "video_latents" not in values:
        return config.scheduler.noise_scale * noise
    return (1 - sigma) * values["video_latents"] + sigma * noise


def schedule_rows(config, table, geometry, layers: int = 0) -> dict[str, numpy.ndarray]:
    """The schedule arguments, one row per step."""
    count = len(table.timesteps)
    scales = [caching.guidance_of(config, place, time, count) for place, time in enumerate(table.timesteps)]
    skipped = numpy.isin(numpy.arange(layers), list(config.guider.skip_layers))
    tables = window_tables(config, geometry, config.steps) if is_windowed(config) else ()
    windowed = {name: column[:count] for name, column in zip(("windows", "window_weights"), tables)}
    return windowed | {
        "timestep": table.timesteps, "next_timestep": numpy.append(table.timesteps[1:], numpy.float32(0)),
        "coefficients": table.coefficients, "guidance_scale": numpy.float32(scales),
        "rest_weights": caching.rest_weights(config, count),
        "zeroed": numpy.float32(numpy.arange(count) < config.guider.zero_steps),
        "skipped": numpy.float32(numpy.outer(caching.skip_steps(config, table), skipped)),
    }


def guider_of(config) -> Guider:
    settings = plain(config.guider)
    return Guider(**{name: settings[name] for name in Guider.__dataclass_fields__})


def log_rescued(rescued: list[tuple[int, int]]) -> None:
    """Warn if the attention guard fired."""
    fired = [(rows, layers) for rows, layers in rescued if rows]
    if fired:
        rows, layers = (max(column) for column in zip(*fired))
        log.warning(
            "attention's guard fired in %d of %d steps: up to %d rows in %d layers had scores too far above those "
            "before them and were computed again, which takes time and is exact (kernels/README.md)",
            len(fired), len(rescued), rows, layers,
        )


def log_plan(config, work: list[str], curve) -> None:
    """Log which steps the cache skips, and warn if its curve does not match the schedule."""
    if caches.is_on(config) and config.cache.mode != "calibrate":
        log.info("cache %s: %s", config.cache.name, caching.summary(work))
    if config.cache.mode == "magcache":
        for problem in caches.curve_warnings(config, curve):
            log.warning("cache.curve=%s: %s; skips may be too many or too few", caches.curve_name(config), problem)
