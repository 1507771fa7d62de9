"""Noise to latents, chunk by chunk: each chunk attends to what is kept of those before it."""
import math
import time
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy
from omegaconf import OmegaConf

from wan_torchax.config.attention import parallel_of
from wan_torchax.config.live import Layout, Window, chunk_seconds, prompt_chunks
from wan_torchax.config.schema import copied
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.events import Advanced, Asked, Part, Queued, Reencoded, Stepped
from wan_torchax.kernels.lanes import LANES
from wan_torchax.kernels.parallel import kept_spec
from wan_torchax.models.family import Chunk, Forward
from wan_torchax.records.files import Spool
from wan_torchax.runtime import weights
from wan_torchax.runtime.programs import NotFinite, Program, own_compilation, put
from wan_torchax.stages.caching import FULL
from wan_torchax.stages.denoise import Denoise, log_rescued, width_of
from wan_torchax.stages.sampling import advance
from wan_torchax.stages.step import summed

PLACED = ("start", "filling", "positions", "kept_positions")  # of a Chunk, in its schedule


class Live(Denoise):
    """Embeddings to latents (1, channels, frames, height, width); each chunk is a part of the result. The first ones
    may be given (given_latents).

    A chunk begins as noise and takes all steps of the scheduler. A pass at `live.context_noise` then reads the finished
    latents, so that the keys and values of the last step are replaced. All are one program: a pass that changes no
    latents is a step whose coefficients are those of the identity. Arguments:

        slots       the latents (slot 0) and the scheduler's history, (slots, 1, channels, frames of a chunk, …)
        kept        keys and values, (layers, 1, tokens of the window, width): kernels.attention.Kept
        schedule    timestep and coefficients of a step; seed and numbers of chunk and step, for the noise; and where
                    the chunk stands (models.family.Chunk)
    """

    label, reads = "generating", (*Denoise.reads, "live", "resolution.fps")

    @classmethod
    def derived(cls, name, job):
        batch, channels, latents, *sides = job.latent_shape
        layout, config, (_, *lines) = Layout.of(job.config.live, latents), job.config, job.grid
        tokens, transformer = layout.window * lines[0] * lines[1], config.model.architecture.transformer
        return super().derived(name, job) | {
            "latent_shape": (batch, channels, layout.chunk, *sides),
            "grid": (layout.chunk, *lines),
            "layout": asdict(replace(layout, chunks=min(2, layout.chunks))),  # those that follow run the same program
            "kept_shape": (transformer.num_layers, batch, tokens, width_of(job.family, config)),
            "relative": config.live.positions == "relative",
            "noise_scale": config.scheduler.noise_scale,
        }

    @classmethod
    def part_shapes(cls, name, job, number):
        batch, channels, latents, *sides = job.latent_shape
        layout = Layout.of(job.config.live, latents)
        return {"latents": (batch, channels, layout.size(number), *sides)} if number < layout.chunks else None

    @classmethod
    def part_settings(cls, name, job, number, settings):
        """Prompts of later chunks do not count, nor how many there are."""
        layout, texts = Layout.of(job.config.live, job.latent_shape[2]), job.graph.giver("embeddings")
        chunks = prompt_chunks(job.config, job.geometry, layout)[1:]
        rows = [row for row, chunk in zip(job.config.live.prompts, chunks) if chunk <= number]
        counted = {key: value for key, value in settings.items() if key != f"{texts}.prompts"}
        return counted | {"live.prompts": rows}

    @classmethod
    def joined_parts(cls, parts):
        return {"latents": numpy.concatenate([part["latents"] for part in parts], axis=2)}

    @classmethod
    def takes_several(cls, name, job) -> bool:
        return False

    @classmethod
    def amount(cls, name, job):
        steps, unit = super().amount(name, job)
        return Layout.of(job.config.live, job.latent_shape[2]).chunks * steps, unit

    @property
    def layout(self) -> Layout:
        """What the programs depend on: of the chunks, whether there are several."""
        return Layout(**self.recipe.derived["layout"])

    # ------------------------------------------------------------ programs

    def build(self):
        """`step`, and `first` for a first chunk of another length."""
        for number in range(self.layout.chunks):
            structs = self.arguments(number)
            outputs = *jax.tree.map(lambda one: one.sharding, tuple(structs[:2])), replicated(self.mesh)
            component, function = self.recipe.derived["uses"][0], self.step_of(number)
            self.add(self.program(number), Program(function, component, structs, outputs, donated=(1, 2)))

    def program(self, number: int) -> str:
        """The program of a chunk."""
        return "first" if number == 0 and self.layout.first != self.layout.chunk else "step"

    @property
    def usual_program(self):
        return self.program(self.layout.chunks - 1)

    def step_of(self, number: int):
        """(arrays, slots, kept, schedule, conditions) -> (slots, kept, report): a step of a chunk."""
        derived, dtype = self.recipe.derived, self.config.model.dtype.transformer
        denoiser = self.family.chunk_denoiser(self.module(derived["uses"][0]), self.forward_of(number))

        def step(arrays, slots, kept, schedule, conditions):
            begun = jnp.zeros_like(slots).at[0].set(derived["noise_scale"] * noise(schedule, 0, slots.shape[1:]))
            slots = jnp.where(schedule["step"] == 0, begun, slots)
            chunk = Chunk(**kept, **{name: schedule[name] for name in PLACED if name in schedule})
            output, chunk = denoiser(arrays, slots[0].astype(dtype), schedule["timestep"], conditions, chunk)
            velocity = output.velocity.astype(jnp.float32)
            velocity = jax.lax.with_sharding_constraint(velocity, replicated(self.mesh))
            fresh = noise(schedule, schedule["step"] + 1, velocity.shape) if derived["renoised"] else None
            slots = advance(slots, velocity, schedule["coefficients"], fresh)
            report = {"finite": jnp.isfinite(slots[0]).all()}
            if (rescued := summed(output.rescued)) is not None:
                report["rescued"] = rescued
            return slots, {"key": chunk.key, "value": chunk.value}, report

        return step

    def forward_of(self, number: int) -> Forward:
        """How the transformer is computed for a chunk. A full window comes first: it is the usual one, which plans
        count."""
        layout, (_, height, width) = self.layout, self.recipe.derived["grid"]
        filled = range(layout.slots, 0, -1) if self.program(number) == "step" else [1]
        fillings = tuple(layout.begin(count) * height * width for count in filled)
        return replace(self.forward(1), grid=(layout.size(number), height, width), fillings=fillings)

    def arguments(self, number: int):
        """Structs of the slots, what is kept, the schedule and the conditions."""
        derived, layout, dtype = self.recipe.derived, self.layout, self.config.model.dtype.transformer
        batch, channels, _, *sides = derived["latent_shape"]

        def array(*shape, dtype="float32"):
            return struct(self.mesh, shape, dtype)

        schedule = {"timestep": array(), "coefficients": array(derived["slots"], self.terms)}
        schedule |= {name: array(dtype="int32") for name in ("chunk", "step", "start", "filling")}
        schedule |= {"seed": array(dtype="uint32"), "positions": array(layout.size(number), dtype="int32")}
        if derived["relative"]:
            schedule["kept_positions"] = array(layout.window, dtype="int32")
        kept = {}
        for name, turned in (("key", False), ("value", self.forward(1).self_attention.turns_values)):
            *outer, tokens, width = derived["kept_shape"]
            # In whole tiles: TPUs lay out arguments with as little padding as they can, and would not have tokens last.
            shape = (*outer, width, tokens + -tokens % LANES) if turned else (*outer, tokens, width)
            sharding = jax.sharding.NamedSharding(self.mesh, kept_spec(self.parallel(1), turned=turned))
            kept[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        slots = array(derived["slots"], batch, channels, layout.size(number), *sides)
        conditions = {name: array(1, *shape, dtype=dtype) for name, shape in derived["conditions"].items()}
        return [slots, kept, schedule, conditions]

    @property
    def terms(self) -> int:
        """Columns of a step's coefficients."""
        return self.recipe.derived["slots"] + 1 + self.recipe.derived["renoised"]

    # ------------------------------------------------------------ a run

    def run(self, view, values, emit):
        making, latents, rescued = Making(self, view, values["embeddings"]), Spool(kept=view.kept), []
        chunks = making.layout.chunks
        for number in range(chunks):
            making.prepare(number, emit)
            finished = self.finished(number, view, values)
            slots, reports = making.begin(number, finished), []
            for index in range(making.count if finished is None else 0):
                slots, report = making.step(number, index, slots)
                reports.append(report)
                # On a GPU a program is queued when the last but one has run, so frames are ready before the last step.
                emit(Queued(self.name, more=True))
            emit(Queued(self.name))  # the devices have a chunk to compute: frames of the one before are fetched
            rescued += self.wait_for(reports, number, chunks, view, emit)
            made = making.keep(number, numpy.array(slots)[0])
            latents.append(made.swapaxes(0, 2))
            emit(Part(self.name, number, {"latents": made}))  # the devices decode it before they go on
            if number == 0:
                emit(Queued(self.name))  # on a CPU, what is queued now would hold up the first frames
            if number + 1 < chunks and not view.config.live.rebuild:
                making.read(number, slots)
                emit(Queued(self.name, more=True))
        log_rescued(rescued)
        whole = latents.array()
        return {} if whole is None else {"latents": whole.swapaxes(0, 2)}

    def finished(self, number: int, view, values) -> numpy.ndarray | None:
        """The latents of a chunk that is given, or was finished by an earlier run."""
        if number < len(view.finished):
            return view.finished[number]["latents"]
        begin, given = self.layout.begin(number), values.get("given_latents")
        if given is None or begin >= given.shape[2]:
            return None
        return given[:, :, begin : begin + self.layout.size(number)]

    def wait_for(self, reports: list[dict], number: int, chunks: int, view, emit) -> list[tuple[int, int]]:
        """Wait for the steps of a chunk, one by one. Returns how many rows were rescued in each."""
        rescued, total = [], chunks * len(reports)
        for index, report in enumerate(reports):
            began = time.perf_counter()
            if not bool(report["finite"]):
                raise NotFinite(f"the latents of chunk {number + 1} are not finite", view.config, "transformer")
            again = tuple(numpy.asarray(report["rescued"]).tolist()) if "rescued" in report else None
            rescued.append(again or (0, 0))
            seconds = time.perf_counter() - began
            emit(Stepped(number * len(reports) + index + 1, total, seconds, None, rescued=again))
            emit(Advanced(self.name, 1))
        return rescued

    # ------------------------------------------------------------ plans

    @classmethod
    def flops(cls, job):
        layout, flops = Layout.of(job.config.live, job.latent_shape[2]), super().flops(one_chunk(job))
        flops["self-attention"] = flops["self-attention"] * layout.window // layout.chunk
        return flops | {"total": sum(count for name, count in flops.items() if name != "total")}

    @classmethod
    def tokens(cls, job):
        return one_chunk(job).tokens

    @classmethod
    def work(cls, job):
        """The steps of all chunks and the passes that read them, as if the window were always full."""
        layout, live = Layout.of(job.config.live, job.latent_shape[2]), job.config.live
        return layout.chunks * [*super().work(job), *[FULL] * (layout.slots - 1 if live.rebuild else 1)]

    @classmethod
    def product_flops(cls, job):
        return super().product_flops(one_chunk(job))

    @classmethod
    def temporaries(cls, resolved):
        """Those of a chunk, and what is kept."""
        axes, parallel = resolved.placement["axes"], parallel_of(resolved.config.sharding)
        shards = math.prod(axes.get(axis, 1) for axis in (parallel.heads, parallel.ulysses) if axis)
        item = jnp.dtype(resolved.config.model.dtype.transformer).itemsize
        kept = 2 * item * math.prod(cls.derived("live", resolved)["kept_shape"])
        return super().temporaries(one_chunk(resolved)) + kept / shards


class Making:
    """A video that is being made: what is kept of it, and the prompt that applies. Arrays are on the devices."""

    def __init__(self, stage: Live, view, texts: numpy.ndarray):
        self.stage, self.view, self.texts = stage, view, texts
        self.layout = Layout.of(view.config.live, view.latent_shape[2])
        self.changes = prompt_chunks(view.config, view.geometry, self.layout)
        self.seconds = chunk_seconds(view.config, view.geometry, self.layout)
        _, kept, _, self.conditions = stage.programs.entries[stage.program(0)].arguments
        with own_compilation():  # zeros are allocated on the devices by a small program
            self.kept = {name: weights.zeros(one) for name, one in kept.items()}
        table = stage.table(view.config, view.geometry, view.store)
        identity = numpy.zeros(table.coefficients.shape[1:])
        identity[0, 0] = 1
        times, coefficients = [*table.timesteps, view.config.live.context_noise], [*table.coefficients, identity]
        rows = zip(range(len(times)), times, coefficients)
        self.steps = [self.put(0, step=step, timestep=time, coefficients=row) for step, time, row in rows]
        self.count, self.window = len(table.timesteps), Window(self.layout)
        self.text, self.coming = None, []  # embeddings that apply, and those of the next chunks
        self.made = dict[int, numpy.ndarray]()  # latents of the window's chunks

    def keep(self, number: int, latents: numpy.ndarray) -> numpy.ndarray:
        """The latents of a finished chunk, and as long as it is in the window."""
        self.made = {chunk: self.made[chunk] for chunk in self.window.chunks if chunk != number} | {number: latents}
        return latents

    def prepare(self, number: int, emit) -> None:
        """What a chunk begins with: its prompt, and what is kept. That is read again if the prompt has changed, or for
        every chunk (live.rebuild), as if the chunks that stay were the video's beginning."""
        live, changed = self.view.config.live, self.change_prompt(number, emit)
        if number and (live.rebuild or (changed and live.recache)):
            staying, self.window = self.window.staying(), Window(self.layout)
            for chunk in staying:
                again = live.reencode and chunk == staying[0] > 0
                self.read(chunk, self.begin(chunk, self.reencoded(chunk, emit) if again else self.made[chunk]))

    def reencoded(self, chunk: int, emit) -> numpy.ndarray:
        """A chunk's latents, the first of them encoded from its picture as if it were the first of a video."""
        asked = Reencoded()
        emit(asked)
        return numpy.concatenate([*asked.latents, self.made[chunk][:, :, 1:]], axis=2)

    def change_prompt(self, number: int, emit) -> bool:
        """Change to the prompt that begins with a chunk, if one does: at once, or over live.blend chunks."""
        text = self.texts[self.changes.index(number)][None] if number in self.changes else self.asked(number, emit)
        if text is not None:
            before, count = self.text, self.view.config.live.blend if number else 0
            mixed = [before + (text - before) * numpy.float32(part / count) for part in range(1, count)]
            self.coming = [*mixed, text]
        if not self.coming:
            return False
        self.text = self.coming.pop(0)
        self.conditions = put(self.conditions, dict.fromkeys(self.conditions, self.text))
        return True

    def asked(self, number: int, emit) -> numpy.ndarray | None:
        """The embeddings of a prompt that was given meanwhile, for a chunk that was not made before."""
        asked = Asked(self.seconds[number])
        if number >= len(self.view.finished):
            emit(asked)
        return asked.embeddings[-1] if asked.embeddings else None

    def begin(self, number: int, latents: numpy.ndarray | None = None):
        """A chunk's slots before its first step, or with finished latents. It takes its place in the window."""
        stage, layout, (_, height, width) = self.stage, self.layout, self.stage.recipe.derived["grid"]
        slot, first, more = self.window.take(number), layout.begin(number), {}
        if stage.recipe.derived["relative"]:
            ranks = self.window.ranks()
            frames = [layout.begin(rank) + place for rank in ranks for place in range(layout.size(rank))]
            first, more["kept_positions"] = layout.begin(ranks[slot]), [*frames, *[0] * (layout.window - len(frames))]
        empty = layout.slots - len(self.window.chunks) if stage.program(number) == "step" else 0
        self.chunk = self.put(
            number, seed=self.view.seeds[0], chunk=number, start=layout.begin(slot) * height * width,
            filling=empty, positions=range(first, first + layout.size(number)), **more,
        )
        struct = stage.programs.entries[stage.program(number)].arguments[0]
        slots = numpy.zeros(struct.shape, numpy.float32)
        if latents is not None:
            slots[0] = latents
        return put(struct, slots)

    def step(self, number: int, index: int, slots):
        """(slots, report) after a step of the chunk that was begun last."""
        arguments = slots, self.kept, self.chunk | self.steps[index], self.conditions
        slots, self.kept, report = self.stage(self.stage.program(number), *arguments)
        return slots, report

    def read(self, number: int, slots) -> None:
        """Read the finished latents of the chunk that was begun last, for its keys and values."""
        self.step(number, self.count, slots)

    def put(self, number: int, **values) -> dict:
        """Part of a chunk's schedule."""
        structs = self.stage.programs.entries[self.stage.program(number)].arguments[2]
        return put({name: structs[name] for name in values}, {name: numpy.array(values[name]) for name in values})


def one_chunk(job):
    """A job of a chunk's latent frames."""
    config = copied(job.config)
    OmegaConf.set_readonly(config, False)
    config.resolution.frames = (config.live.chunk - 1) * job.geometry.frame_scale + 1
    OmegaConf.set_readonly(config, True)
    return replace(job, config=config)


def noise(schedule: dict, step, shape: tuple[int, ...]):
    """The noise of a step of a chunk: it follows from the seed and both numbers, not from what was drawn before."""
    key = jax.random.wrap_key_data(jnp.stack([jnp.uint32(0), schedule["seed"]]), impl="threefry2x32")
    return jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, schedule["chunk"]), step), shape)
