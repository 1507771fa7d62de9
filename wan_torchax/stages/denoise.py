"""Noise to latents: one compiled step, guidance and scheduler included, called as often as there are steps."""
import logging
import math
import re
import time
from dataclasses import replace

import jax
import numpy

from wan_torchax.config import caches
from wan_torchax.config.geometry import (
    Geometry,
    expert_at,
    guidance_at,
    prompt_count,
    reference_count,
    steps_skipped,
)
from wan_torchax.devices.mesh import memory_bytes
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.events import Advanced, Stepped
from wan_torchax.kernels.settings import Kernel, Parallel, Products
from wan_torchax.runtime import weights
from wan_torchax.runtime.programs import NotFinite, Program, own_compilation, put
from wan_torchax.stages import caching
from wan_torchax.stages.image import Image
from wan_torchax.stages.sampling import noises, scheduler_table
from wan_torchax.stages.stage import Stage
from wan_torchax.stages.step import Step

log = logging.getLogger("wan")
LANES = 128  # of a tile in a TPU's memory
# Values that are the same in every step.
CONDITIONS = ("embeddings", "condition", "first_latent", "image_embeddings", "control", "conditioning_scale")
SPARE_BYTES = 2 * 2**30  # to leave free beside weights and what a step needs
PROGRAMS = {caching.FULL: "step", caching.PROMPT: "prompt", caching.REUSE: "reuse"}


class Denoise(Stage):
    """Embeddings to latents (videos, channels, frames, height, width), mostly of one video.

    What goes from step to step and what stays the same are named arrays:

        state       slots: the latents (slot 0) and what the scheduler remembers, (slots, videos, channels, frames, …)
        schedule    timestep, coefficients (slots, slots + 1), guidance_scale: of one step; with a scheduler that draws
                    noise also that, like the latents, and coefficients (slots, slots + 2)
        conditions  embeddings (prompts · videos, tokens, width), those of all videos' prompts before those of their
                    negative ones; condition (1, channels, frames, height, width), which joins the latents as further
                    channels; first_latent (1, channels, 1, height, width), which is the first frame
                    of the latents, without noise; image_embeddings (pictures, tokens, width); control (1, channels,
                    frames, height, width), of which VACE's control blocks make hints that count conditioning_scale

    Reference pictures are latent frames in front of the video's: denoised with them, and left out of the result.
    """

    settings = (
        "attention.self", "attention.cross", "products", "guidance", "model.text_tokens", "sharding.attention"
    )
    result_settings = (
        "seed", "steps", "guidance_scale", "guidance_scale_2", "model.experts", "model.boundary", "scheduler",
        "resolution.height", "resolution.width", "resolution.frames", "resolution.flow_shift", "attention.self.window",
        "cache", "precision",
    )

    @classmethod
    def derived(cls, resolved):
        mode, rests = resolved.config.cache.mode, caches.rests(resolved.config)
        _, slots, terms = scheduler_table(resolved.config)[1].shape
        pictures = "image" in resolved.graph.stages and Image.result_shapes(resolved.config)["image_embeddings"]
        return {
            "prompts": prompt_count(resolved.config),
            "videos": resolved.videos,
            "latent_shape": (resolved.videos, *resolved.denoised_shape[1:]),
            "references": reference_count(resolved.config),
            "tokens": resolved.tokens,
            "slots": slots,
            "renoised": terms == slots + 2,
            "conditions": [name for name in resolved.graph.stages["denoise"].takes if name in CONDITIONS],
            "pictures": pictures,
            "mode": mode,
            "rests": rests,
        }

    @classmethod
    def result_shapes(cls, config):
        return {"latents": Geometry.of(config.model.architecture).latent_shape(config.resolution)}

    def build(self):
        """One program for the exact step; with a cache, others beside it. The experts of a model share them."""
        derived = self.recipe.derived
        step = self.step(self.spread_module(derived["prompts"]), derived["prompts"])
        structs = self.arguments(step)
        programs = {"step": step.full}
        if step.mode in ("magcache", "easycache"):
            programs["reuse"] = step.reuse
        if step.rests:
            programs["prompt"] = self.step(self.spread_module(1), 1).prompt
        for name, function in programs.items():
            outputs = jax.tree.map(lambda struct: struct.sharding, structs[0]), *[replicated(self.mesh)] * 2
            self.add(name, Program(function, "transformer", structs, outputs, donated=(1,)))

    def step(self, module, prompts: int) -> Step:
        """What the programs of a module compute."""
        derived, config = self.recipe.derived, self.config
        step = Step(
            module, config.model.dtype.transformer, prompts, config.guidance == "batched", bool(self.given_tokens()),
            derived["references"], replicated(self.mesh), derived["mode"], derived["rests"],
        )
        if step.mode in ("magcache", "calibrate"):
            from wan_torchax.models.transformer import keep_residual

            keep_residual(module)
        return step

    def arguments(self, step: Step):
        """Structs of the state, the schedule and the conditions."""
        derived, architecture = self.recipe.derived, self.config.model.architecture.transformer
        slots, text = derived["slots"], (self.config.model.text_tokens, architecture.text_dim)

        def array(*shape, dtype="float32"):
            return struct(self.mesh, shape, dtype)

        terms = slots + 1 + derived["renoised"]
        schedule = {"timestep": array(), "coefficients": array(slots, terms), "guidance_scale": array()}
        if derived["renoised"]:
            schedule["noise"] = array(*derived["latent_shape"])
        dtype = self.config.model.dtype.transformer
        conditions = {"embeddings": array(derived["prompts"] * derived["videos"], *text, dtype=dtype)}
        if "condition" in derived["conditions"]:
            batch, channels, *sizes = derived["latent_shape"]
            conditions["condition"] = array(batch, architecture.in_channels - channels, *sizes)
        if "first_latent" in derived["conditions"]:
            batch, channels, _, *sides = derived["latent_shape"]
            conditions["first_latent"] = array(batch, channels, 1, *sides)
        if "image_embeddings" in derived["conditions"]:
            conditions["image_embeddings"] = array(*derived["pictures"], dtype=dtype)
        if "control" in derived["conditions"]:
            batch, _, *sizes = derived["latent_shape"]
            conditions["control"] = array(batch, architecture.vace_in_channels, *sizes)
            conditions["conditioning_scale"] = array(len(architecture.vace_layers))
        if derived["rests"]:
            schedule |= {"rest_weights": array(2), "resting": array()}
        residual = self.residual_struct(step) if step.mode in ("magcache", "calibrate") else None
        state = {"slots": array(slots, *derived["latent_shape"])}
        return [state | step.state_structs(array, derived["latent_shape"], residual), schedule, conditions]

    def residual_struct(self, step: Step):
        """Of what the blocks add: (prompts, tokens, channels), on the devices as the blocks leave it."""
        architecture, blocks = self.config.model.architecture.transformer, step.module.blocks[0]
        width = architecture.num_attention_heads * architecture.attention_head_dim
        tokens = self.recipe.derived["tokens"]
        shape = step.prompts, tokens + -tokens % blocks.multiple, width
        sharding = self.token_sharding(self.parallel(step.prompts))
        return jax.ShapeDtypeStruct(shape, self.config.model.dtype.transformer, sharding=sharding)

    def token_sharding(self, parallel: Parallel) -> jax.sharding.NamedSharding:
        """How (prompts, tokens, channels) lie on the devices between blocks."""
        spec = jax.sharding.PartitionSpec(parallel.batch, parallel.token_axes or None)
        return jax.sharding.NamedSharding(self.mesh, spec)

    def given_tokens(self) -> int:
        """Tokens of a first frame that is given, at the start of all."""
        derived = self.recipe.derived
        return derived["tokens"] // derived["latent_shape"][2] if "first_latent" in derived["conditions"] else 0

    def parallel(self, prompts: int) -> Parallel:
        """Who shares heads, tokens and prompts. With one forward at a time there is no batch to spread: where tokens
        are shared already, they are over the batch's axis too."""
        config, parallel = self.config, Parallel(**self.config.sharding.attention)
        if prompts > 1 and config.guidance == "batched":
            return parallel
        axis, parts = parallel.batch, self.mesh.shape.get(parallel.batch, 1)
        parallel = replace(parallel, batch=None)
        heads = config.model.architecture.transformer.num_attention_heads
        if parts > 1 and parallel.ulysses and heads % (parts * self.mesh.shape[parallel.ulysses]) == 0:
            return replace(parallel, ulysses=(axis, parallel.ulysses))
        return parallel  # where it is idle, validation has said so

    def spread_module(self, prompts: int):
        """The transformer with its attention and its loop over the blocks as the mesh wants them."""
        from wan_torchax.kernels.attention import Attend
        from wan_torchax.kernels.norm import Norm
        from wan_torchax.kernels.product import Linear
        from wan_torchax.models.transformer import AttentionProcessor, give_times_by_token

        config, mesh, parallel = self.config, self.mesh, self.parallel(prompts)
        module, head_dim = self.module("transformer"), config.model.architecture.transformer.attention_head_dim
        kernels = {part: Kernel(**config.attention[part]) for part in ("self", "cross")}
        joined = module.config.eps if config.products.kernel == "pallas" else None
        module.set_attn_processor(AttentionProcessor(
            to_video=Attend(
                head_dim, kernels["self"], parallel, mesh, keys=self.recipe.derived["tokens"], norm_epsilon=joined
            ),
            to_text=Attend(head_dim, kernels["cross"], parallel, mesh, cross=True),
            text_tokens=config.model.text_tokens,
        ))
        if config.model.scan_blocks:
            # Programs that hand what the blocks add to each other pad alike.
            widest = self.parallel(1) if self.recipe.derived["rests"] else parallel
            blocks, shards = module.blocks[0], math.prod(mesh.shape[axis] for axis in widest.token_axes)
            blocks.gathered = replicated(mesh) if config.sharding.transformer.gather else None
            blocks.multiple = LANES * shards if shards > 1 else 1
            if prompts == 1 and self.recipe.derived["rests"]:  # beside what two prompts have left on the devices
                blocks.spread = self.token_sharding(parallel)
            # Over several devices each would compute what the prompts share.
            spread = parallel.batch and mesh.shape[parallel.batch] > 1
            blocks.same_video = self.recipe.derived["videos"] == 1 and not spread
            blocks.given_tokens = self.given_tokens()
            if config.products.kernel == "pallas":
                placed = Products(**config.products), self.token_sharding(parallel)
                blocks.use_products(Linear(*placed), Norm(*placed))
        if self.given_tokens():
            give_times_by_token(module, self.given_tokens(), self.recipe.derived["tokens"])
        return module

    @classmethod
    def takes_several(cls, config) -> bool:
        """Whether videos can be denoised together: where a text is all that tells them apart, and no cache judges by
        what it sees of one."""
        return not caches.is_on(config) and list(config.pipeline.stages.denoise.takes) == ["embeddings"]

    @staticmethod
    def joined(values: list[dict]) -> dict:
        """What several videos take, as one."""
        embeddings = numpy.stack([taken["embeddings"] for taken in values], axis=1)  # (prompts, videos, …)
        return {"embeddings": embeddings.reshape(-1, *embeddings.shape[2:])}

    @classmethod
    def amount(cls, resolved):
        return resolved.config.steps - steps_skipped(resolved.config), "step"

    def components_first(self, resolved):
        if self.are_resident(resolved):
            return list(self.components)
        return [expert_at(resolved.config, scheduler_table(resolved.config)[0][0])]

    def are_resident(self, resolved) -> bool:
        """Whether the weights of all experts are on the devices at once: as the config says, else if they fit."""
        if resolved.config.expert_weights is not None or len(self.components) == 1:
            return resolved.config.expert_weights != "swapped"
        weights_bytes = sum(tensor.bytes_per_device for part in self.tensors.values() for tensor in part.values())
        limit = memory_bytes(resolved.mesh, resolved.config.mesh.chip)
        return limit is None or weights_bytes + self.temporaries(resolved) + SPARE_BYTES < limit

    def bring(self, name: str, tell) -> None:
        """The weights of an expert in place of another's."""
        if self.components[name].is_loaded():
            return
        for other in self.components.values():
            other.free()
        with own_compilation():
            self.components[name].load(self.tensors[name], tell)

    def run(self, resolved, values, tell):
        config, table = resolved.config, scheduler_table(resolved.config)
        draws = map(numpy.concatenate, zip(*(noises(seed, resolved.denoised_shape) for seed in resolved.seeds)))
        state, schedule, conditions = self.first_arguments(config, table, values, draws)
        rows = schedule_rows(config, table)
        experts = [expert_at(config, timestep) for timestep in table.timesteps]
        for name in set(experts[1:]):
            if not self.components[name].is_loaded():
                self.components[name].read_ahead()
        adaptive = caching.Adaptive(config, table) if config.cache.mode == "easycache" else None
        work, resting, rescued = caching.plan(config, table), 0.0, []
        tell_plan(config, work)
        for index, expert in enumerate(experts):
            began = time.perf_counter()
            self.bring(expert, tell)
            kind = work[index] if adaptive is None else adaptive.choose(index, work[index])
            resting = resting if kind == caching.REUSE else float(kind == caching.PROMPT)
            row = {name: column[index] for name, column in rows.items()} | {"resting": numpy.float32(resting)}
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
            seconds, videos = time.perf_counter() - began, resolved.videos
            again = tuple(numpy.asarray(report["rescued"]).tolist()) if "rescued" in report else None
            rescued.append(again or (0, 0))
            for video, one in enumerate(numpy.split(numpy.asarray(estimate), videos) if videos > 1 else [estimate]):
                tell(Stepped(index + 1, len(experts), seconds, one, kind, measures, again, video, videos))
            tell(Advanced(self.name, 1))
        tell_rescued(rescued)
        latents = numpy.array(state["slots"])[0][:, :, reference_count(config) :]
        if "first_latent" in values:
            latents[:, :, :1] = values["first_latent"]
        return {"latents": latents}

    def first_arguments(self, config, table, values, draws):
        """State, schedule and conditions of the first step, on the devices."""
        state, schedule, conditions = self.programs.entries["step"].arguments
        slots = numpy.zeros(state["slots"].shape, numpy.float32)
        slots[0] = first_latents(config, values, next(draws), table.sigmas[0])
        given = {name: values[name] for name in values if name in CONDITIONS}
        if "control" in given:
            scale, layers = given["conditioning_scale"], config.model.architecture.transformer.vace_layers
            given["conditioning_scale"] = numpy.full(len(layers), 1.0 if scale is None else scale)
        with own_compilation():  # of zeros, which need not pass through the host
            kept = {name: weights.zeros(struct) for name, struct in state.items() if name != "slots"}
        empty = {name: numpy.zeros(struct.shape) for name, struct in schedule.items()}
        structs = {"slots": state["slots"]}, schedule, conditions
        first, schedule, conditions = put(structs, ({"slots": slots}, empty, given))
        return kept | first, schedule, conditions

    @classmethod
    def flops(cls, resolved) -> dict[str, int]:
        """Of a step's forwards, by kind.

        Where the prompts share the first block's self-attention (ScannedBlocks) the step does up to 1.5 % less.
        """
        config, tokens, text = resolved.config, resolved.tokens, resolved.config.model.text_tokens
        transformer = config.model.architecture.transformer
        dim, controls = transformer.num_attention_heads * transformer.attention_head_dim, control_layers(transformer)
        layers = transformer.num_layers + controls
        flops = {
            # q, k, v, out and q, out; k, v of the text; one of each control block
            "projections": layers * (2 * tokens * dim * dim * 6 + 2 * text * dim * dim * 2)
            + controls * 2 * tokens * dim * dim,
            "feed-forward": layers * 4 * tokens * dim * transformer.ffn_dim,
            "self-attention": layers * 4 * tokens * tokens * dim,
            "cross-attention": layers * 4 * tokens * text * dim,
        }
        flops = {name: count * prompt_count(config) for name, count in flops.items()}
        return flops | {"total": sum(flops.values())}

    @classmethod
    def product_flops(cls, resolved) -> dict[str, int]:
        """Of a step's forwards, those that conf/products gives to its kernel (ScannedBlocks.use_products), by what the
        chip's file has its share of peak as."""
        from wan_torchax.models.transformer import PRODUCTS

        config, transformer = resolved.config, resolved.config.model.architecture.transformer
        if config.products.kernel != "pallas":
            return {}
        dim, precision, counts = transformer.num_attention_heads * transformer.attention_head_dim, config.precision, {}
        for name, options in PRODUCTS.items():
            flops = 2 * resolved.tokens * prompt_count(config) * dim * (transformer.ffn_dim if "ffn" in name else dim)
            kind = "turned_product_share" if {"takes_turned", "gives_turned"} & set(options) else "product_share"
            patterns = precision.layers.values() if precision.weights else ()
            matched = any(re.fullmatch(pattern, f"blocks.{precision.first}.{name}") for pattern in patterns)
            small = transformer.num_layers - precision.first - precision.last if matched else 0
            format_ = "int8" if precision.weights == "int8" else "fp8"
            for fact, layers in ((f"{format_}_{kind}", small), (kind, transformer.num_layers - small)):
                counts[fact] = counts.get(fact, 0) + layers * flops
        return {name: count for name, count in counts.items() if count}

    @classmethod
    def floor_seconds(cls, resolved) -> float | None:
        """A step's time if every device did nothing but products at its peak; None where that is not known."""
        peak = resolved.config.mesh.chip.peak_tflops
        return peak and cls.flops(resolved)["total"] / (resolved.config.mesh.devices * peak * 1e12)

    @classmethod
    def temporaries(cls, resolved):
        """The widest layer in bf16 beside a float32 residual and a few copies."""
        config, axes, parallel = resolved.config, resolved.placement["axes"], resolved.config.sharding.attention
        transformer = config.model.architecture.transformer

        def size(axis):
            return axes.get(axis, 1) if axis else 1

        batch = resolved.videos * (prompt_count(config) if config.guidance == "batched" else 1)
        shards = size(parallel.ulysses) * size(parallel.ring)
        rows = math.ceil(batch / size(parallel.batch)) * resolved.tokens / shards
        dim = transformer.num_attention_heads * transformer.attention_head_dim
        return rows * (transformer.ffn_dim / size(parallel.heads) * 2 + dim * (4 + 2 * 4))


def first_latents(config, values, noise: numpy.ndarray, sigma: float) -> numpy.ndarray:
    """Noise; or a video's latents with as much noise in them as the first step expects."""
    if "video_latents" not in values:
        return config.scheduler.noise_scale * noise
    return (1 - sigma) * values["video_latents"] + sigma * noise


def control_layers(transformer) -> int:
    return len(transformer.get("vace_layers", ()))


def schedule_rows(config, table) -> dict[str, numpy.ndarray]:
    """What each step is told, a row a step."""
    count = len(table.timesteps)
    scales = [
        guidance_at(config, timestep) if caching.in_interval(config, place, count) else 1.0
        for place, timestep in enumerate(table.timesteps)
    ]
    return {
        "timestep": table.timesteps, "coefficients": table.coefficients, "guidance_scale": numpy.float32(scales),
        "rest_weights": caching.rest_weights(config, count),
    }


def tell_rescued(rescued: list[tuple[int, int]]) -> None:
    """How often the guard of attention fired, if it did: by step, rows and layers."""
    fired = [(rows, layers) for rows, layers in rescued if rows]
    if fired:
        rows, layers = (max(column) for column in zip(*fired))
        log.warning(
            "attention's guard fired in %d of %d steps: up to %d rows in %d layers had scores too far above those "
            "before them and were computed again, which takes time and is exact (kernels/README.md)",
            len(fired), len(rescued), rows, layers,
        )


def tell_plan(config, work: list[str]) -> None:
    """Which steps a cache leaves out, and where its curve does not quite fit."""
    if caches.is_on(config) and config.cache.mode != "calibrate":
        log.info("cache %s: %s", config.cache.name, caching.summary(work))
    if config.cache.mode == "magcache":
        for problem in caches.curve_warnings(config):
            log.warning("cache.curve=%s: %s; skips may be too many or too few", caches.curve_name(config), problem)
