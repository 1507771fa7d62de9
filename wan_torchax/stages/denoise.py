"""The three stages: text to embeddings, noise to latents, latents to frames.

A stage is built from the config alone (`build_text`, `build_denoise`, `build_decode`): a module on the meta device, a
plan of its arrays, and programs that are compiled from shapes while the weights load. What goes in and comes out of
the `run_…` functions is numpy; between them JAX arrays stay on the devices.
"""
import contextlib
import functools
import json
import logging
import math
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import diffusers
import jax
import jax.numpy as jnp
import numpy
import torch
import transformers
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from omegaconf import OmegaConf

from wan_torchax import patches
from wan_torchax.config.schema import ConfigError
from wan_torchax.kernels.attention import resolve
from wan_torchax.runtime import checkpoint, weights

log = logging.getLogger("wan")

LANES = 128  # of a tile in a TPU's memory
# Tensors that checkpoints hold and a stage has no use for.
IGNORED = {"text_encoder": (), "transformer": (r".*norm_added_q",), "vae": (r"encoder\.", r"quant_conv\.")}


@dataclass
class Program:
    """A function of (arrays, *arguments) to compile ahead of time."""

    function: object
    arguments: object  # structs; or a function of the programs lowered before, which returns them
    outputs: object = None  # shardings
    donated: tuple = ()  # positions in (arrays, *arguments)


@dataclass
class Stage:
    """One component of the model and the programs that run on it."""

    component: str
    tensors: dict
    programs: dict  # name -> Program
    compiled: dict = field(default_factory=dict)  # name -> Future of a compiled program
    arrays: dict | None = None

    def __call__(self, program, *arguments):
        return self.compiled[program].result()(self.arrays, *arguments)


def replicated(mesh):
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def struct(mesh, shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))


def make_stage(config, mesh, component, module, programs, layers=1) -> Stage:
    """Plan a module's arrays, put its activation constraints in place and wrap its programs for tracing."""
    key, table = f"sharding.{component}", config.sharding[component]
    ops = patches.load_ops(config.ops, mesh_device(mesh).platform, config.allow_external_ops)
    patches.name_scopes(module)
    patches.constrain_activations(module, table.activations, mesh, f"{key}.activations")
    tensors = weights.plan(module, table, mesh, config.model.dtype[component], key, layers)

    def traced(function):
        @functools.wraps(function)
        def program(*arguments):
            with patches.torchax_on(ops):
                return function(*arguments)

        return program

    programs = {name: replace(program, function=traced(program.function)) for name, program in programs.items()}
    return Stage(component, tensors, programs)


# ---------------------------------------------------------------- text


def build_text(config, mesh) -> Stage:
    """Token ids and mask (prompts, tokens) to embeddings (prompts, tokens, width), zero where there is padding."""
    with torch.device("meta"):
        module = transformers.UMT5EncoderModel(transformers.UMT5Config(**config.model.architecture.text_encoder)).eval()
    if module.encoder.embed_tokens.weight is not module.shared.weight:
        raise RuntimeError("transformers left the encoder's embedding untied from the shared table: it would stay uninitialised and give noise")

    def encode(arrays, tokens, mask):
        hidden = patches.call_module(module, arrays, tokens, attention_mask=mask, return_dict=False)[0]
        return jnp.where(mask[..., None] > 0, hidden, 0).astype(config.model.dtype.transformer)

    shape = (2 if guided(config) else 1, config.model.text_tokens)
    arguments = [struct(mesh, shape, "int32")] * 2
    return make_stage(config, mesh, "text_encoder", module, {"encode": Program(encode, arguments, replicated(mesh))})


def guided(config) -> bool:
    return config.guidance_scale != 1


def tokenize(config, prompts, warn):
    """Token ids and mask as int32 arrays; a prompt that is too long is cut, and `warn` is told where."""
    folder = checkpoint.find(config.model, "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    prompts, limit = [prompt_clean(prompt) for prompt in prompts], config.model.text_tokens
    for prompt in prompts:
        tokens = tokenizer(prompt, truncation=False, verbose=False).input_ids
        if len(tokens) > limit:
            lost = tokenizer.decode(tokens[limit - 1 :], skip_special_tokens=True)
            warn(f"the prompt has {len(tokens)} tokens and is cut after {limit}; this is lost: {lost[:200]!r}")
    batch = tokenizer(prompts, padding="max_length", max_length=limit, truncation=True, return_tensors="np")
    return batch.input_ids.astype("int32"), batch.attention_mask.astype("int32")


def run_text(stage, config, prompt, negative, warn) -> numpy.ndarray:
    tokens = tokenize(config, [prompt, negative] if guided(config) else [prompt], warn)
    return numpy.asarray(stage("encode", *put(stage, "encode", tokens))).astype(numpy.float32)


def put(stage, program, values):
    """Send numpy values to the devices the way the program was compiled to take them."""
    arguments = stage.programs[program].arguments
    return [weights.put(numpy.asarray(value, wanted.dtype), wanted.sharding) for value, wanted in zip(values, arguments, strict=True)]


# ---------------------------------------------------------------- denoise


def latent_shape(config) -> tuple:
    size = config.resolution
    return (1, config.model.architecture.transformer.in_channels, (size.frames - 1) // 4 + 1, size.height // 8, size.width // 8)


def build_denoise(config, mesh) -> Stage:
    """One denoising step, guidance and scheduler included: the state goes in, the next state comes out."""
    architecture = config.model.architecture.transformer
    with torch.device("meta"):
        module = diffusers.WanTransformer3DModel(**architecture).eval()
    # RoPE's tables are computed when the module is made, which the meta device does not do.
    module.rope = type(module.rope)(architecture.attention_head_dim, architecture.patch_size, architecture.rope_max_seq_len)
    dtype = config.model.dtype.transformer
    attention = resolve(OmegaConf.to_object(config.attention), mesh_device(mesh), dtype, architecture.attention_head_dim)
    parallel = OmegaConf.to_object(config.sharding.attention)
    if not guided(config) or config.guidance == "sequential":  # a batch of one: nothing to spread
        if parallel.batch and mesh.shape[parallel.batch] > 1:
            log.warning("one forward at a time: the %d parts of axis %s do the same work", mesh.shape[parallel.batch], parallel.batch)
        parallel = replace(parallel, batch=None)
    tokens = math.prod(latent_shape(config)[2:]) // math.prod(architecture.patch_size)
    module.set_attn_processor(patches.AttentionProcessor(attention, parallel, mesh, tokens))
    if config.model.scan_blocks:
        shards = math.prod(mesh.shape[axis] for axis in (parallel.ring, parallel.ulysses) if axis)
        multiple = LANES * shards if shards > 1 else 1
        spread = parallel.batch and mesh.shape[parallel.batch] > 1  # over devices: what they share would be computed by each
        patches.scan_blocks(module, replicated(mesh) if config.sharding.transformer.gather else None, multiple, same_video=not spread)
    batched = config.guidance == "batched"

    def forward(arrays, latents, timestep, embeddings):
        """Latents (1, …) repeated for each of the embeddings (batch, tokens, width)."""
        batch = embeddings.shape[0]
        hidden = jnp.broadcast_to(latents.astype(dtype), (batch, *latents.shape[1:]))
        times = jnp.broadcast_to(timestep, (batch,))
        velocity = patches.call_module(module, arrays, hidden, times, embeddings, return_dict=False)[0].astype(jnp.float32)
        # Small, and what follows would otherwise be spread over the devices in pieces that have to be put together again.
        return jax.lax.with_sharding_constraint(velocity, replicated(mesh))

    def predict(arrays, latents, timestep, scale, embeddings):
        if not guided(config):
            return forward(arrays, latents, timestep, embeddings)
        if batched:
            prompt, negative = jnp.split(forward(arrays, latents, timestep, embeddings), 2)
        else:
            prompt, negative = jax.lax.map(lambda one: forward(arrays, latents, timestep, one[None]), embeddings)
        return negative + scale * (prompt - negative)

    def step(arrays, state, timestep, coefficients, scale, embeddings):
        velocity = predict(arrays, state[0], timestep, scale, embeddings)
        middle = slice(state.shape[3] // 2, state.shape[3] // 2 + 1)
        estimate = (state[0] - timestep / 1000 * velocity)[:, :, middle]  # where the flow would end: what previews show
        state = advance(state, velocity, coefficients)
        return state, jnp.isfinite(state[0]).all(), estimate

    slots = scheduler_table(config)[1].shape[1]
    width = architecture.text_dim
    embeddings = (2 if guided(config) else 1, config.model.text_tokens, width)
    arguments = [
        struct(mesh, (slots, *latent_shape(config)), "float32"),
        struct(mesh, (), "float32"),
        struct(mesh, (slots, slots + 1), "float32"),
        struct(mesh, (), "float32"),
        struct(mesh, embeddings, dtype),
    ]
    layers = architecture.num_layers
    return make_stage(config, mesh, "transformer", module, {"step": Program(step, arguments, replicated(mesh), donated=(1,))}, layers)


def mesh_device(mesh):
    """A device of the mesh, real or abstract, to ask for its platform and kind."""
    return mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else mesh.abstract_device


def advance(state, velocity, coefficients):
    """new slot = Σ coefficient · (old slots and the model's output), elementwise: (slots, 1, channels, frames, height, width).

    Written as sums of scaled arrays, not as a matrix product, which a TPU would round to bfloat16.
    """
    terms = [*state, velocity]
    return jnp.stack([sum(row[index] * term for index, term in enumerate(terms)) for row in coefficients])


def scheduler_table(config):
    """What diffusers' scheduler does in each step, as numbers: timesteps (steps,) and coefficients (steps, slots, slots + 1).

    A deterministic scheduler's step is linear in the latents, the model's output and what it remembers of earlier
    steps. So each of those is given to it as a unit vector, and what comes back are the coefficients. The step then
    runs inside the compiled program, for any scheduler, with no tensor leaving the device. Slot 0 is the latents.
    """
    arguments = OmegaConf.to_container(config.scheduler.arguments, resolve=True)
    return read_off(config.scheduler.target, json.dumps(arguments, sort_keys=True), config.steps)


@functools.lru_cache(maxsize=8)  # building, running and keeping a stage all ask
def read_off(target, arguments, steps):
    velocities = torch.randn(steps + 1, 1, 4, 1, 1, 2, generator=torch.Generator().manual_seed(0))
    slots, wanted = rehearse(make_scheduler(target, arguments, steps), velocities)
    scheduler, size, rows = make_scheduler(target, arguments, steps), len(slots) + 1, []
    for timestep in scheduler.timesteps:
        for number, slot in enumerate(slots, start=1):
            if slot.get(scheduler) is not None:
                slot.set(scheduler, unit_vector(number, size))
        sample = scheduler.step(unit_vector(size, size), timestep, unit_vector(0, size), return_dict=False)[0]
        after = [sample, *(slot.get(scheduler) for slot in slots)]
        rows.append([numpy.zeros(size + 1) if vector is None else vector.flatten().numpy() for vector in after])
    coefficients = numpy.asarray(rows, dtype=numpy.float32)
    if not numpy.isfinite(coefficients).all():
        raise ConfigError(f"scheduler.target={target}: not finite with steps={steps} and {arguments}; use more steps or scheduler=unipc")
    if getattr(scheduler, "init_noise_sigma", 1) != 1 or not numpy.allclose(replay(coefficients, velocities), wanted, atol=1e-3):
        raise ConfigError(f"scheduler.target={target}: with {arguments} it is not deterministic and linear; use scheduler=unipc, euler or dpm")
    return scheduler.timesteps.numpy().astype(numpy.float32), coefficients


def rehearse(scheduler, velocities):
    """Where a scheduler keeps tensors between steps, and what it makes of made-up velocities, the last of them as noise."""
    latents = velocities[-1]
    for timestep, velocity in zip(scheduler.timesteps, velocities):
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]

    def remembered(value):
        return isinstance(value, torch.Tensor) and value.shape == latents.shape

    slots = []
    for name, value in vars(scheduler).items():
        if remembered(value):
            slots.append(Slot(name))
        elif isinstance(value, list):
            slots += [Slot(name, index) for index, item in enumerate(value) if remembered(item)]
    return slots, latents.numpy()


def replay(coefficients, velocities):
    """The rehearsal's end by the table."""
    state = numpy.zeros((coefficients.shape[1], *velocities.shape[1:]), numpy.float32)
    state[0] = velocities[-1]
    for rows, velocity in zip(coefficients, velocities.numpy()):
        state = numpy.einsum("ij,j...->i...", rows, numpy.stack([*state, velocity]))
    return state[0]


def make_scheduler(target, arguments, steps):
    wanted = getattr(diffusers, target, None)
    if not (isinstance(wanted, type) and issubclass(wanted, diffusers.SchedulerMixin)):
        raise ConfigError(f"scheduler.target={target}: not a scheduler in diffusers; use scheduler=unipc, euler or dpm")
    scheduler = wanted(**json.loads(arguments))
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    return scheduler


def unit_vector(index, size):
    """A video of one pixel whose channels are the basis: (1, size + 1, 1, 1, 1)."""
    return torch.nn.functional.one_hot(torch.tensor(index), size + 1).float().reshape(1, -1, 1, 1, 1)


@dataclass
class Slot:
    """A place where a scheduler remembers a tensor: an attribute, or an element of a list in one."""

    name: str
    index: int | None = None

    def get(self, scheduler):
        value = getattr(scheduler, self.name)
        return value if self.index is None else value[self.index]

    def set(self, scheduler, value):
        if self.index is None:
            setattr(scheduler, self.name, value)
        else:
            getattr(scheduler, self.name)[self.index] = value


def noise(config) -> numpy.ndarray:
    """The first latents, from a CPU generator: the same on every backend and mesh, and in diffusers."""
    generator = torch.Generator("cpu").manual_seed(config.seed)
    return torch.randn(latent_shape(config), generator=generator, dtype=torch.float32).numpy()


def run_denoise(stage, config, embeddings, on_step) -> numpy.ndarray:
    """The whole loop; `on_step(index, seconds, estimate)` is called after each step, with the device in step with the clock.

    `estimate` is the middle latent frame as the video would end if it went straight on from here.
    """
    timesteps, coefficients = scheduler_table(config)
    state = numpy.zeros((coefficients.shape[1], *latent_shape(config)), numpy.float32)
    state[0] = noise(config)
    inputs = [state, timesteps[0], coefficients[0], config.guidance_scale, embeddings]
    state, timestep, row, scale, embeddings = put(stage, "step", inputs)
    for index in range(config.steps):
        began = time.perf_counter()
        timestep, row = weights.put(timesteps[index], timestep.sharding), weights.put(coefficients[index], row.sharding)
        state, finite, estimate = stage("step", state, timestep, row, scale, embeddings)
        if not bool(finite):
            raise NotFinite(f"the latents are not finite after step {index + 1} of {config.steps}", config)
        on_step(index, time.perf_counter() - began, estimate)
    return numpy.asarray(state)[0]


class NotFinite(RuntimeError):
    """Numbers overflowed; nothing is written."""

    def __init__(self, what, config, component="transformer"):
        dtype = config.model.dtype[component]
        cause = "the checkpoint may be damaged" if dtype == "float32" else f"{dtype} may overflow: try model.dtype.{component}=float32"
        super().__init__(f"{what}: {cause}; a guidance_scale that is too high (now {config.guidance_scale}) can do it too")


# ---------------------------------------------------------------- decode


def build_decode(config, mesh) -> Stage:
    """Latent frames to pixels one by one: `first` gives one frame, `later` four, each with the caches for the next."""
    architecture = config.model.architecture.vae
    with torch.device("meta"):
        module = diffusers.AutoencoderKLWan(**architecture).eval()
    module.encoder = module.quant_conv = None
    module.forward = functools.partial(patches.decode_chunk, module)
    dtype = config.model.dtype.vae
    mean, deviation = (numpy.float32(architecture[key]).reshape(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))

    def decode(arrays, latent, caches=None):
        pixels, caches = patches.call_module(module, arrays, (latent * deviation + mean).astype(dtype), caches)
        pixels = pixels.astype(jnp.float32)
        frames = jnp.round((pixels[0] + 1) * 127.5).astype(jnp.uint8).transpose(1, 2, 3, 0)
        return frames, jnp.isfinite(pixels).all(), caches

    batch, channels, _, height, width = latent_shape(config)
    latent = struct(mesh, (batch, channels, 1, height, width), "float32")
    spec = patches.partition_spec(config.sharding.vae.carry)
    carry = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec[:1], *spec[2:], *spec[1:2]))  # caches have their channels last
    outputs = (replicated(mesh), replicated(mesh), carry)

    def later_arguments(lowered):
        caches = lowered["first"].out_info[2]
        return [latent, jax.tree.map(lambda cache: jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=carry), caches)]

    programs = {"first": Program(decode, [latent], outputs), "later": Program(decode, later_arguments, outputs, donated=(2,))}
    return make_stage(config, mesh, "vae", module, programs)


def run_decode(stage, config, latents, on_frame) -> numpy.ndarray:
    """Latents (1, channels, frames, height, width) to uint8 frames (frames, height, width, 3), chunk by chunk to the host."""
    chunks, caches = [], None
    for index in range(latents.shape[2]):
        latent = put(stage, "first", [latents[:, :, index : index + 1]])
        frames, finite, caches = stage("first", *latent) if index == 0 else stage("later", *latent, caches)
        chunks.append((frames, finite))
        if index:  # the chunk before is copied out while the device works on this one
            chunks[-2] = fetch_chunk(chunks[-2], index - 1, config)
            on_frame(chunks[-2].shape[0])
    chunks[-1] = fetch_chunk(chunks[-1], len(chunks) - 1, config)
    on_frame(chunks[-1].shape[0])
    return numpy.concatenate(chunks)


def fetch_chunk(chunk, index, config):
    frames, finite = chunk
    if not bool(finite):
        raise NotFinite(f"the decoded frames are not finite at latent frame {index}", config, "vae")
    return numpy.asarray(frames)


# ---------------------------------------------------------------- compilation


BUILDERS = {"text": build_text, "denoise": build_denoise, "decode": build_decode}


def lower(stage, stop=None, platforms=None) -> dict:
    """Trace and lower every program of a stage from shapes alone: {name: jax.stages.Lowered}.

    `stop` (an Event) ends it early; `platforms` lowers for devices that are not here, on an abstract mesh.
    """
    lowered = {}
    for name in stage.programs:
        if stop is not None and stop.is_set():
            break
        jitted, structs = callable_of(stage, name, lowered)
        lowered[name] = jitted.trace(*structs).lower(lowering_platforms=platforms)
    return lowered


def callable_of(stage, name, lowered):
    """A program as a jitted function, and the structs of what it takes; `lowered` has the programs before it."""
    program = stage.programs[name]
    arguments = program.arguments(lowered) if callable(program.arguments) else program.arguments
    arrays = {key: tensor.struct for key, tensor in stage.tensors.items()}
    return jax.jit(program.function, donate_argnums=program.donated, out_shardings=program.outputs), (arrays, *arguments)


compilations = {"cache_hits": 0, "outside": 0}  # counted by JAX's own events


def count_event(event, **_):
    if event == "/jax/compilation_cache/cache_hits" and threading.current_thread().name == "compile":
        compilations["cache_hits"] += 1


def count_duration(event, seconds, **_):
    if event.endswith("backend_compile_duration") and threading.current_thread().name != "compile":
        compilations["outside"] += 1


jax.monitoring.register_event_listener(count_event)
jax.monitoring.register_event_duration_secs_listener(count_duration)


@contextlib.contextmanager
def no_compilation():
    """Everything was compiled ahead: a compilation in here is a bug that would cost minutes on a TPU."""
    before = compilations["outside"]
    yield
    if compilations["outside"] != before:
        raise RuntimeError(f"{compilations['outside'] - before} programs were compiled during a stage")


@contextlib.contextmanager
def compiling(stages: dict[str, Stage], report):
    """Compile every stage's programs in a thread, in order, while the `with` block loads weights and runs what is ready.

    `report(program, seconds, from_cache, memory)` is called after each. An error reaches whoever asks for the program.
    Leaving the block early waits for the program in the compiler's hands, which cannot be stopped, and for no other.
    """
    stop = threading.Event()
    for stage in stages.values():
        stage.compiled = {name: Future() for name in stage.programs}

    def work():
        for stage_name, stage in stages.items():
            try:
                compile_stage(stage_name, stage, report, stop)
            except BaseException as error:
                for future in stage.compiled.values():
                    if not future.done():
                        future.set_exception(error)

    thread, interval = threading.Thread(target=work, name="compile"), sys.getswitchinterval()
    # Loading asks for the interpreter thousands of times, and tracing keeps it for this long each time; by default 5 ms.
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def compile_stage(stage_name, stage, report, stop):
    began = time.perf_counter()
    for name, lowered in lower(stage, stop).items():
        if stop.is_set():
            return
        hits = compilations["cache_hits"]
        compiled = lowered.compile()
        report(f"{stage_name}.{name}", time.perf_counter() - began, compilations["cache_hits"] > hits, compiled.memory_analysis())
        stage.compiled[name].set_result(compiled)
        began = time.perf_counter()
