"""The config's dataclasses: pure, no JAX, no torch.

Hydra composes the files under conf/ against these classes, so a misspelt key or a wrong type fails before anything
heavy loads. validation.py checks what types cannot express.
"""
from __future__ import annotations

import functools
import math
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from wan_torchax import private
from wan_torchax.kernels.settings import Kernel, Products

DTYPES = ("float32", "bfloat16", "float16")
NOISES = ("float32", "bfloat16", "bfloat16_8bit")
TIMES = ("bfloat16", "integer")
EIGHT_BITS = ("float8_e4m3fn", "int8")
LARGE_LAYERS = "attention_in", "attention_out", "feed_forward_in", "feed_forward_out"  # rules of most families
GUIDANCE = ("batched", "sequential")
GUIDERS = ("cfg_zero", "apg")
POSITIONS = ("absolute", "relative")
EXPERT_WEIGHTS = ("resident", "swapped")
PLATFORMS = ("cpu", "gpu", "tpu")


def longer_side(height: int, width: int, axes: list) -> ListConfig:
    """The spec of a video (batch, channels, frames, height, width) with its longer side sharded: ${longer_side:…}."""
    sides = [list(axes), None] if height > width else [None, list(axes)]
    return OmegaConf.create([None, None, None, *sides])


def first_given(*values):
    """The first value that is not null: ${first:${model.flow_shift},5.0}."""
    return next((value for value in values if value is not None), None)


def length(values) -> int | None:
    """The length of a list; null for null: ${length:${scheduler.sigmas}}."""
    return None if values is None else len(values)


def home() -> str:
    """The home folder. If HOME is not set, as in containers and cron, it comes from the user database."""
    folder = os.path.expanduser("~")
    return folder if folder != "~" else tempfile.gettempdir()


def shift_by_size(height: int, width: int, token: int, first: list, second: list) -> float:
    """The flow shift of an image whose tokens have so many pixels a side: e to a power that grows with their number, on
    a line through two points (tokens, power): ${shift_by_size:1024,1024,16,[256,0.5],[4096,1.15]}."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return math.exp(first[1] + slope * (height * width / token**2 - first[0]))


def shift_by_steps(height: int, width: int, token: int, steps: int, lines: list, most: int) -> float:
    """The flow shift of an image and a number of steps: e to a power on a line between two numbers of steps, each with
    a line in the image's tokens (steps, slope, power at none); above `most` tokens the second alone:
    ${shift_by_steps:1024,1024,16,4,[[10,8.7e-5,1.9],[200,1.7e-4,0.46]],4300}."""
    few, many = lines
    tokens = height * width // token**2
    low, high = (slope * tokens + power for _, slope, power in (few, many))
    share = 1 if tokens > most else (steps - few[0]) / (many[0] - few[0])
    return math.exp(low + share * (high - low))


private.remember_interpolations()
OmegaConf.register_new_resolver("shift_by_steps", shift_by_steps, replace=True)
OmegaConf.register_new_resolver("shift_by_size", shift_by_size, replace=True)
OmegaConf.register_new_resolver("longer_side", longer_side, replace=True)


OmegaConf.register_new_resolver("home", home, replace=True)
OmegaConf.register_new_resolver("first", first_given, replace=True)
OmegaConf.register_new_resolver("length", length, replace=True)
OmegaConf.register_new_resolver("text", lambda text: text, replace=True)  # "???" means missing to OmegaConf


class ConfigError(Exception):
    """An error the user can fix: shown as one paragraph, without a traceback."""


class FolderError(ConfigError):
    """A folder that this run must not write to."""


# Metadata of keys that an untrusted video, folder, list, workflow or request may set; all others are the owner's
# (trust.py).
OFFERED, KIND, GROUP, ROWS = "offered", "kind", "group", "rows"


def offered(default: Any = MISSING, kind: Any = None) -> Any:
    """A key that an artefact may set; `kind` is its type, if OmegaConf cannot express it."""
    if callable(default):
        return field(default_factory=default, metadata={OFFERED: True})
    return field(default=default, metadata={OFFERED: True, KIND: kind})


def group(kind: Callable[[], Any], rows: type | None = None) -> Any:
    """A config group of which an artefact may choose an option by name, or several options if the group is a table of
    rows."""
    return field(default_factory=kind, metadata={GROUP: True, ROWS: rows})


# ---------------------------------------------------------------- groups


@dataclass
class PipelineStage:
    """One stage of a pipeline: the components it uses, the values it takes and those it gives."""

    uses: list[str] = field(default_factory=list)
    takes: list[str] = field(default_factory=list)
    gives: list[str] = field(default_factory=list)


@dataclass
class Segments:
    """Consecutive stages that run once per segment of a long video. To a stage, a segment is a video with a number of
    frames and a first frame in the whole."""

    stages: list[str] = field(default_factory=list)  # empty: the video is made in one piece
    frames: int = offered(0)  # of a segment
    whole: bool = False  # every segment has all its frames: what is beyond the video's end is cut off
    overlap: int = offered(0)  # frames that a segment shares with the previous one, which makes them
    dropped: int = 0  # frames of the first segment that are not part of the video
    remembered: int = 0  # frames before a segment that it goes on from, which it does not share
    carry: dict[str, str] = field(default_factory=dict)  # a value that a segment takes -> the previous segment's output


@dataclass
class Pipeline:
    """A small graph of stages, in the order they run; graph.py reads it."""

    name: str = ""
    inputs: dict[str, str] = field(default_factory=dict)  # a value's name -> its config key
    optional: list[str] = field(default_factory=list)  # inputs that may be omitted
    stages: dict[str, PipelineStage] = field(default_factory=dict)
    segments: Segments = field(default_factory=Segments)


@dataclass
class Model:
    name: str = ""
    family: str = MISSING  # conf/family, wan_torchax/models/<family>
    weights: dict[str, Any] = field(default_factory=dict)  # by component: rows of Rule
    quantized: list[str] = field(default_factory=lambda: list(LARGE_LAYERS))  # rules of weights.transformer
    path: str = MISSING  # a folder in diffusers layout, or a Hub id; on the command line also a single file
    # By component, for those stored elsewhere: such a path, or a single file. model.vae=… on the command line.
    paths: dict[str, str] = field(default_factory=dict)
    revision: Optional[str] = None
    scan_blocks: bool = offered(True)
    text_tokens: int = offered(512)
    dtype: dict[str, str] = offered(dict)  # by component
    noise_dtype: str = offered("float32")  # in which torch would draw the noise; one of NOISES
    experts: list[str] = field(default_factory=lambda: ["transformer"])  # denoising components, from high noise to low
    boundary: Optional[float] = None  # noise level from 0 to 1, below which the second expert is used
    steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: Optional[float] = None  # of the second expert; null: the same
    flow_shift: Optional[float] = None  # null: the resolution's
    area: int = 480 * 832  # pixels, frames and rate of resolution=auto
    buckets: bool = False  # whether its sizes are those of config.inputs.nearest_bucket
    frames: int = 81
    fps: int = 16
    size_multiple: int = 16
    spectrum: Optional[list[float]] = None  # amplitude and exponent of the latents' power, for coarse steps
    curve: Optional[str] = None  # for cache=magcache; null: the one with the model's name
    min_size: int = 256
    max_size: int = 1280
    max_frames: int = 121
    driving_prompt: Optional[str] = None  # what it was trained to read with a driving video
    riflex_frequency: Optional[int] = None  # of time, counted from 1: the one that riflex=true slows down
    architecture: dict[str, dict[str, Any]] = field(default_factory=dict)  # by component


@dataclass
class Decoder:
    """The component that decodes latents: conf/vae, conf/preview."""

    name: str = ""
    component: str = "vae"


@dataclass
class Chip:
    kind: Optional[str] = None  # JAX's name for it
    devices: int = 1  # JAX devices per chip; the figures below are per device
    hbm_gib: Optional[float] = None
    vmem_mib: Optional[float] = None  # on-chip memory of a core, for kernels
    peak_tflops: Optional[float] = None  # dense bf16
    topology: Optional[str] = None  # the TPU compiler's name of the slice
    clock_ghz: Optional[float] = None
    hbm_gbs: Optional[float] = None  # GB/s of its memory
    link_gbs: Optional[float] = None  # GB/s of one link to a neighbour, one way
    self_attention_share: Optional[float] = None  # share of peak that the kernels reach
    cross_attention_share: Optional[float] = None
    listed_attention_share: Optional[float] = None  # of sparse self-attention, over lists of key blocks
    product_share: Optional[float] = None
    transposed_product_share: Optional[float] = None
    int8_product_share: Optional[float] = None  # of the bf16 peak, so the maximum is 2
    int8_transposed_product_share: Optional[float] = None
    fp8_product_share: Optional[float] = None
    fp8_transposed_product_share: Optional[float] = None
    vae_lines: bool = False  # decode with models/vae_lines.py


@dataclass
class Mesh:
    name: str = ""
    platform: Optional[str] = None  # cpu | gpu | tpu; null: whatever JAX finds
    hosts: Optional[int] = None  # null: one per process
    axes: dict[str, int] = offered(dict)
    chip: Chip = field(default_factory=Chip)
    xla_flags: list[str] = field(default_factory=list)  # for this hardware; compile.xla_flags come after them


@dataclass
class Distributed:
    name: str = ""  # none | auto
    coordinator: Optional[str] = None  # host:port of process 0
    processes: Optional[int] = None
    process: Optional[int] = None  # this one's number
    join_seconds: int = 300
    lost_seconds: int = 30


@dataclass
class Rule:
    """The dimensions of some weights: conf/family."""

    pattern: str
    axes: list[Any]  # a name for each dimension, or null
    optional: bool = False  # may match nothing: not all models have this part


@dataclass
class Tokens:
    """The mesh axes over which attention shards batch and tokens."""

    batch: Optional[str] = None
    ulysses: Optional[str] = None
    ring: Optional[str] = None
    groups: list[int] = field(default_factory=list)


@dataclass
class Sharding:
    """conf/sharding/tp.yaml explains each key."""

    name: str = ""
    axes: dict[str, Any] = field(default_factory=dict)  # a name of conf/family -> mesh axes
    gather: Optional[str] = None
    picture: list[Any] = field(default_factory=list)
    attention: Tokens = offered(Tokens)


@dataclass
class Resolution:
    height: int = offered()
    width: int = offered()
    frames: int = offered()
    fps: int = offered(16)
    area: Optional[int] = offered(None)  # of resolution=auto
    flow_shift: float = offered(3.0)


@dataclass
class Op:
    """One torchax override: the op, the function that replaces it, and why."""

    op: str
    implementation: str
    why: str
    platforms: list[str] = field(default_factory=list)  # where it applies; empty: everywhere


@dataclass
class Scheduler:
    name: str = ""
    target: str = MISSING  # a class in diffusers
    arguments: dict[str, Any] = field(default_factory=dict)
    sigmas: Optional[list[float]] = offered(None)  # noise at the start of each step, before the shift; null: default
    linear: bool = offered(False)  # if sigmas are null: 1 - step / steps, shifted once; else the scheduler's default
    noise_scale: float = offered(1.0)  # of the initial latents
    round_times: Optional[str] = offered(None)  # how the times that the model is told are rounded; one of TIMES


# What the group says of all its rows; conf/config.yaml explains each key.
ADAPTER_SETTINGS = {"allow_unmatched": False, "mode": "merge", "rank": 64}


@dataclass
class Adapter:
    """An adapter (LoRA): one file, for a transformer's weights."""

    path: Optional[str] = None  # a .safetensors file; or on the Hub:
    repo: Optional[str] = None
    file: Optional[str] = None  # in the repository
    revision: Optional[str] = None
    strength: Any = offered(1.0, Union[float, list[float]])  # factor of its update, or one for each step; 0 is off
    blocks: list[float] = offered(list)  # factors of the strength, one for each block; empty: all 1
    target: list[str] = offered(lambda: ["all"])  # all | high | low | transformer | transformer_2
    models: list[str] = field(default_factory=list)  # those of conf/model that it was made for; empty: any it fits


@dataclass
class Cache:
    """Which steps are not computed in full; conf/cache explains each key."""

    name: str = ""
    mode: Optional[str] = offered(None)  # magcache | easycache
    curve: Optional[str] = offered(None)
    threshold: float = offered(0.12)
    most_in_a_row: int = offered(2)
    retention: float = offered(0.2)
    last: int = offered(0)
    guidance_every: int = offered(1)
    guidance_start: float = offered(0.0)
    guidance_stop: float = offered(1.0)
    rest_start: float = offered(0.334)
    rest_stop: float = offered(0.9)
    rest_boost: float = offered(0.2)


@dataclass
class Live:
    """How a video is made chunk by chunk; conf/live explains each key."""

    name: str = ""
    chunk: Optional[int] = offered(None)  # latent frames; null: the video is made in one piece
    first: Optional[int] = offered(None)
    window: Optional[int] = offered(None)
    sink: int = offered(0)
    context_noise: float = offered(0.0)
    positions: str = offered("absolute")  # one of POSITIONS
    prompts: list[str] = offered(list)  # "<second>: <prompt>"
    recache: bool = offered(True)
    blend: int = offered(0)  # chunks
    rebuild: bool = offered(False)
    reencode: bool = offered(False)


@dataclass
class Windows:
    """How the transformer sees a video that is longer than it was trained for; conf/windows explains each key."""

    name: str = ""
    mode: Optional[str] = offered(None)  # static | uniform; null: as a whole
    frames: int = offered(81)
    overlap: int = offered(30)
    weights: str = offered("pyramid")
    free_noise: bool = offered(True)


@dataclass
class Guider:
    """How the velocities of prompt and negative prompt become one; conf/guider explains each key."""

    name: str = ""
    mode: Optional[str] = offered(None)  # cfg_zero | apg; null: classifier-free guidance
    rescale: float = offered(0.0)
    zero_steps: int = offered(0)
    momentum: float = offered(0.0)
    parallel: float = offered(1.0)
    most_norm: float = offered(0.0)
    skip_layers: list[int] = offered(list)
    skip_scale: float = offered(2.8)
    skip_start: float = offered(0.01)
    skip_stop: float = offered(0.2)
    skip_negative: bool = offered(False)
    nag: float = offered(1.0)
    nag_limit: float = offered(2.5)
    nag_share: float = offered(0.25)


@dataclass
class Precision:
    """Which linear layers of the transformer are quantized; conf/precision explains each key."""

    name: str = ""
    weights: Optional[str] = None  # float8_e4m3fn | int8
    activations: bool = False
    layers: list[str] = field(default_factory=list)  # rules of model.quantized
    first: int = 0
    last: int = 0


@dataclass
class Prompt:
    text: Optional[str] = offered(None)
    negative: Optional[str] = offered("")
    file: Optional[str] = None
    negative_file: Optional[str] = None


@dataclass
class Compile:
    cache_dir: Optional[str] = None
    store: Optional[str] = None
    store_gib: float = 20.0
    xla_flags: list[str] = field(default_factory=list)
    libtpu_flags: list[str] = field(default_factory=list)
    matmul_precision: Optional[str] = offered(None)


@dataclass
class Sweep:
    active: bool = False
    resume: bool = False


ENDS = ("low", "likely", "high")  # of an estimate


@dataclass
class Assumed:
    """A plan's assumptions about what only a chip can show: conf/config.yaml."""

    xla: float = MISSING
    attention: float = MISSING
    product: float = MISSING
    memory: float = MISSING
    link: float = MISSING
    hidden: float = MISSING
    launch_us: float = MISSING
    clock: float = MISSING


@dataclass
class Plan:
    compiler: Optional[str] = None  # a Python with libtpu; null: this one if it has it; none: do not compile
    kernels: bool = False  # compile the bodies of Pallas kernels too
    margin_gib: float = MISSING
    disk_gbs: float = MISSING
    low: Assumed = field(default_factory=Assumed)
    likely: Assumed = field(default_factory=Assumed)
    high: Assumed = field(default_factory=Assumed)


@dataclass
class Tune:
    search: list[str] = field(default_factory=list)  # key=value,value,…
    repeats: int = MISSING


@dataclass
class Calibrate:
    prompts: list[str] = field(default_factory=list)


@dataclass
class Port:
    model: Optional[str] = None
    tokens: int = MISSING
    text_tokens: int = MISSING


@dataclass
class Verify:
    checks: list[str] = field(default_factory=list)
    plan: Optional[str] = None
    repeats: int = MISSING


@dataclass
class Inspect:
    adapters: Optional[str] = None


@dataclass
class Serve:
    folder: str = MISSING
    gallery: list[str] = field(default_factory=list)
    host: str = MISSING
    port: int = MISSING
    keys_file: Optional[str] = None
    origins: list[str] = field(default_factory=list)
    adapters: Optional[str] = None
    choices: dict[str, list[str]] = field(default_factory=dict)  # group -> the options that a request may choose from
    queue_limit: int = MISSING
    batch: int = MISSING
    preview_every: int = MISSING
    upload_mb: float = MISSING
    upload_seconds: float = MISSING
    decode_seconds: float = MISSING
    connections: int = MISSING
    drain_seconds: float = MISSING
    live_ahead: Optional[float] = None
    attempts: int = MISSING


@dataclass
class Output:
    quality: int = offered()
    save_stages: bool = True
    keep_frames: bool = False
    copy_inputs: bool = True


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class Attention:
    self: Kernel = offered(Kernel)
    cross: Kernel = offered(Kernel)
    # Device kind or platform -> the file of conf/attention that `kernel: auto` stands for.
    devices: dict[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------- the whole


@dataclass
class Config:
    """The root of the config; conf/config.yaml explains each key."""

    task: str = "generate"
    stages: list[str] = offered()
    seed: int = offered()
    steps: int = offered()
    guidance_scale: float = offered()
    guidance_scale_2: Optional[float] = offered(None)
    expert_weights: Optional[str] = None
    guidance: str = offered("batched")
    keep_resident: Optional[bool] = None
    preview_every: int = offered(0)
    preview: Decoder = field(default_factory=Decoder)
    profile: bool = False
    resume: Optional[str] = None
    replay: Optional[str] = None
    image: Optional[str] = None
    last_image: Optional[str] = None
    video: Optional[str] = None
    pose: Optional[str] = None
    face: Optional[str] = None
    background: Optional[str] = None
    mask: Optional[str] = None
    references: list[str] = field(default_factory=list)
    audio: Optional[str] = None
    camera: Any = offered(None, Union[str, list[str], None])
    driving_prompt: Optional[str] = offered(None)
    fit: str = offered("cover")
    strength: Optional[float] = offered(None)
    riflex: bool = offered(False)
    coarse_delta: Optional[float] = offered(None)
    conditioning_scale: Any = offered(None, Union[float, list[float], None])
    prompts: Optional[str] = None
    seeds: Optional[Any] = None
    images: Optional[int] = None
    shard: Optional[str] = None
    allow_external_ops: bool = False
    traceback: bool = False
    pipeline: Pipeline = group(Pipeline)
    model: Model = group(Model)
    vae: Decoder = group(Decoder)
    mesh: Mesh = group(Mesh)
    distributed: Distributed = field(default_factory=Distributed)
    sharding: Sharding = group(Sharding)
    resolution: Resolution = group(Resolution)
    attention: Attention = group(Attention)
    products: Products = group(Products)
    precision: Precision = group(Precision)
    ops: dict[str, Any] = group(dict)  # rows of Op; Any, so that a command line can add one
    scheduler: Scheduler = group(Scheduler)
    cache: Cache = group(Cache)
    live: Live = group(Live)
    guider: Guider = group(Guider)
    windows: Windows = group(Windows)
    # Rows of Adapter by name; Any, so that a command line can add one.
    adapter: dict[str, Any] = group(lambda: dict(ADAPTER_SETTINGS), rows=Adapter)
    prompt: Prompt = group(Prompt)
    compile: Compile = field(default_factory=Compile)
    output: Output = field(default_factory=Output)
    sweep: Sweep = field(default_factory=Sweep)
    tune: Tune = field(default_factory=Tune)
    calibrate: Calibrate = field(default_factory=Calibrate)
    plan: Plan = field(default_factory=Plan)
    port: Port = field(default_factory=Port)
    verify: Verify = field(default_factory=Verify)
    inspect: Inspect = field(default_factory=Inspect)
    serve: Serve = field(default_factory=Serve)


def root() -> DictConfig:
    """The schema as a config."""
    return copied(made_root())


@functools.cache
def made_root() -> DictConfig:
    """Frozen classes become read-only nodes, which Hydra must still be able to fill."""
    config = OmegaConf.structured(Config)
    attention = config.attention
    kernels = attention.self, attention.cross
    for node in (attention, *kernels, *(kernel.sparse for kernel in kernels), config.products):
        OmegaConf.set_readonly(node, False)
    OmegaConf.set_struct(config.adapter, False)  # adapter.style={…} adds a row
    return config


def copied(config: DictConfig) -> DictConfig:
    """A copy of a whole config. OmegaConf's own goes node by node, which takes more than twice as long."""
    return pickle.loads(pickle.dumps(config, pickle.HIGHEST_PROTOCOL))
