"""Noise to latents: one compiled step, guidance and scheduler included, called as often as there are steps."""
import math
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy

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
from wan_torchax.kernels.settings import Kernel, Parallel
from wan_torchax.runtime import weights
from wan_torchax.runtime.programs import NotFinite, Program, own_compilation
from wan_torchax.stages.image import Image
from wan_torchax.stages.sampling import advance, noises, scheduler_table
from wan_torchax.stages.stage import Stage

LANES = 128  # of a tile in a TPU's memory
# Values that are the same in every step.
CONDITIONS = ("embeddings", "condition", "first_latent", "image_embeddings", "control", "conditioning_scale")
SPARE_BYTES = 2 * 2**30  # to leave free beside weights and what a step needs


class Denoise(Stage):
    """Embeddings to latents (1, channels, frames, height, width).

    What goes from step to step and what stays the same are named arrays:

        state       slots: the latents (slot 0) and what the scheduler remembers, (slots, 1, channels, frames, …)
        schedule    timestep, coefficients (slots, slots + 1), guidance_scale: of one step; with a scheduler that draws
                    noise also that, like the latents, and coefficients (slots, slots + 2)
        conditions  embeddings (prompts, tokens, width); condition (1, channels, frames, height, width), which joins the
                    latents as further channels; first_latent (1, channels, 1, height, width), which is the first frame
                    of the latents, without noise; image_embeddings (pictures, tokens, width); control (1, channels,
                    frames, height, width), of which VACE's control blocks make hints that count conditioning_scale

    Reference pictures are latent frames in front of the video's: denoised with them, and left out of the result.
    """

    settings = ("attention.self", "attention.cross", "guidance", "model.text_tokens", "sharding.attention")
    result_settings = (
        "seed", "steps", "guidance_scale", "guidance_scale_2", "model.experts", "model.boundary", "scheduler",
        "resolution.height", "resolution.width", "resolution.frames", "resolution.flow_shift", "attention.self.window",
    )

    @classmethod
    def derived(cls, resolved):
        _, slots, terms = scheduler_table(resolved.config)[1].shape
        pictures = "image" in resolved.graph.stages and Image.result_shapes(resolved.config)["image_embeddings"]
        return {
            "prompts": prompt_count(resolved.config),
            "latent_shape": resolved.denoised_shape,
            "references": reference_count(resolved.config),
            "tokens": resolved.tokens,
            "slots": slots,
            "renoised": terms == slots + 2,
            "conditions": [name for name in resolved.graph.stages["denoise"].takes if name in CONDITIONS],
            "pictures": pictures,
        }

    @classmethod
    def result_shapes(cls, config):
        return {"latents": Geometry.of(config.model.architecture).latent_shape(config.resolution)}

    def build(self):
        from wan_torchax.patches import call_module

        derived, dtype = self.recipe.derived, self.config.model.dtype.transformer
        module, given, references = self.spread_module(), self.given_tokens(), derived["references"]
        prompts, batched = derived["prompts"], self.config.guidance == "batched"
        everywhere = replicated(self.mesh)

        def forward(arrays, latents, timestep, embeddings, conditions):
            """The model's input (1, …) repeated for each of the embeddings (batch, tokens, width)."""
            batch, named = embeddings.shape[0], {}

            def repeated(array):
                return jnp.broadcast_to(array.astype(dtype), (batch, *array.shape[1:]))

            timestep = jnp.stack([jnp.zeros_like(timestep), timestep]) if given else timestep
            times = jnp.broadcast_to(timestep, (batch, *timestep.shape))
            if "image_embeddings" in conditions:
                named["encoder_hidden_states_image"] = jnp.tile(conditions["image_embeddings"], (batch, 1, 1))
            if "control" in conditions:
                named["control_hidden_states"] = repeated(conditions["control"])
                named["control_hidden_states_scale"] = conditions["conditioning_scale"].astype(dtype)
            hidden = repeated(latents)
            velocity = call_module(module, arrays, hidden, times, embeddings, **named, return_dict=False)[0]
            # Small, and what follows would otherwise be spread over the devices in pieces to be put together again.
            return jax.lax.with_sharding_constraint(velocity.astype(jnp.float32), everywhere)

        def predict(arrays, latents, schedule, conditions):
            embeddings = conditions["embeddings"]
            if "condition" in conditions:
                latents = jnp.concatenate([latents, conditions["condition"]], axis=1)
            latents = with_first(latents, conditions)

            def velocity(embeddings):
                return forward(arrays, latents, schedule["timestep"], embeddings, conditions)

            if prompts == 1:
                return velocity(embeddings)
            if batched:
                prompt, negative = jnp.split(velocity(embeddings), 2)
            else:
                prompt, negative = jax.lax.map(lambda one: velocity(one[None]), embeddings)
            return negative + schedule["guidance_scale"] * (prompt - negative)

        def step(arrays, state, schedule, conditions):
            slots = state["slots"]
            velocity = predict(arrays, slots[0], schedule, conditions)
            # Where the flow would end: what previews show, of the first frame, the only one that can be decoded alone.
            estimate = with_first(slots[0] - schedule["timestep"] / 1000 * velocity, conditions)
            estimate = estimate[:, :, references : references + 1]
            slots = advance(slots, velocity, schedule["coefficients"], schedule.get("noise"))
            return {"slots": slots}, jnp.isfinite(slots[0]).all(), estimate

        # One program: the experts of a model are of one architecture.
        self.add("step", Program(step, "transformer", self.arguments(), everywhere, donated=(1,)))

    def arguments(self):
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
        conditions = {"embeddings": array(derived["prompts"], *text, dtype=dtype)}
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
        return [{"slots": array(slots, *derived["latent_shape"])}, schedule, conditions]

    def given_tokens(self) -> int:
        """Tokens of a first frame that is given, at the start of all."""
        derived = self.recipe.derived
        return derived["tokens"] // derived["latent_shape"][2] if "first_latent" in derived["conditions"] else 0

    def spread_module(self):
        """The transformer with its attention and its loop over the blocks as the mesh wants them."""
        from wan_torchax.kernels.attention import Attend
        from wan_torchax.models.transformer import AttentionProcessor, give_times_by_token

        config, mesh, parallel = self.config, self.mesh, Parallel(**self.config.sharding.attention)
        if self.recipe.derived["prompts"] == 1 or config.guidance == "sequential":  # a batch of one: nothing to spread
            parallel = replace(parallel, batch=None)
        module, head_dim = self.module("transformer"), config.model.architecture.transformer.attention_head_dim
        kernels = {part: Kernel(**config.attention[part]) for part in ("self", "cross")}
        module.set_attn_processor(AttentionProcessor(
            to_video=Attend(head_dim, kernels["self"], parallel, mesh, keys=self.recipe.derived["tokens"]),
            to_text=Attend(head_dim, kernels["cross"], parallel, mesh, cross=True),
            text_tokens=config.model.text_tokens,
        ))
        if config.model.scan_blocks:
            blocks, shards = module.blocks[0], math.prod(mesh.shape[axis] for axis in parallel.token_axes)
            blocks.gathered = replicated(mesh) if config.sharding.transformer.gather else None
            blocks.multiple = LANES * shards if shards > 1 else 1
            # Over several devices each would compute what the prompts share.
            blocks.same_video = not (parallel.batch and mesh.shape[parallel.batch] > 1)
            blocks.given_tokens = self.given_tokens()
        if self.given_tokens():
            give_times_by_token(module, self.given_tokens(), self.recipe.derived["tokens"])
        return module

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
        config, (timesteps, coefficients, sigmas) = resolved.config, scheduler_table(resolved.config)
        draws = noises(config.seed, resolved.denoised_shape)
        slots = numpy.zeros((coefficients.shape[1], *resolved.denoised_shape), numpy.float32)
        slots[0] = first_latents(config, values, next(draws), sigmas[0])
        first = {"timestep": timesteps[0], "coefficients": coefficients[0], "guidance_scale": config.guidance_scale}
        first |= {"noise": slots[0]} if self.recipe.derived["renoised"] else {}
        given = {name: values[name] for name in values if name in CONDITIONS}
        if "control" in given:
            scale, layers = given["conditioning_scale"], config.model.architecture.transformer.vace_layers
            given["conditioning_scale"] = numpy.full(len(layers), 1.0 if scale is None else scale)
        inputs = {"slots": slots}, first, given
        state, schedule, conditions = self.programs.put("step", inputs)
        tables = {"timestep": timesteps, "coefficients": coefficients}
        tables["guidance_scale"] = numpy.float32([guidance_at(config, timestep) for timestep in timesteps])
        experts = [expert_at(config, timestep) for timestep in timesteps]
        for name in set(experts[1:]):
            if not self.components[name].is_loaded():
                self.components[name].read_ahead()
        for index, expert in enumerate(experts):
            began = time.perf_counter()
            self.bring(expert, tell)
            for name, table in tables.items():
                schedule[name] = weights.put(table[index], schedule[name].sharding)
            if "noise" in schedule:
                schedule["noise"] = weights.put(next(draws), schedule["noise"].sharding)
            state, finite, estimate = self("step", state, schedule, conditions, component=expert)
            if not bool(finite):
                what = f"the latents are not finite after step {index + 1} of {len(experts)}"
                raise NotFinite(what, config, "transformer")
            tell(Stepped(index + 1, len(experts), time.perf_counter() - began, estimate))
            tell(Advanced(self.name, 1))
        latents = numpy.array(state["slots"])[0][:, :, reference_count(config) :]
        if "first_latent" in values:
            latents[:, :, :1] = values["first_latent"]
        return {"latents": latents}

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

        batch = prompt_count(config) if config.guidance == "batched" else 1
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


def with_first(latents, conditions: dict):
    """The latents with the frame that is given, if one is, in its place."""
    return latents.at[:, :, :1].set(conditions["first_latent"]) if "first_latent" in conditions else latents
