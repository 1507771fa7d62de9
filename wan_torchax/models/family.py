"""The interface of a model family; code outside wan_torchax/models/<family>/ and conf/ goes through it.

    family = registry.family_of(config)             # wan_torchax.models.wan.FAMILY
    family.geometry(config.model.architecture)      # pixels, latents, tokens

A family is a folder whose __init__.py defines one `Family`. Importing it is cheap: JAX and torch are imported only when
one of its build functions is called. docs/architecture.md explains how to add one.
"""
from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from wan_torchax import private
from wan_torchax.config.geometry import Geometry
from wan_torchax.config.long import seen_at_once
from wan_torchax.kernels.settings import Kernel, Parallel, Products, Question

if TYPE_CHECKING:
    import jax
    import torch
    from omegaconf import DictConfig

    from wan_torchax.config.resolve import Job, View
    from wan_torchax.records.store import Store

# Of a transformer's names in ComfyUI's files.
WRAPPERS = ("model.diffusion_model.", "diffusion_model.", "model.model.", "model.")
# Beside a linear layer's weight: an adapter's factors, (layers, rank, inputs) and (layers, outputs, rank).
DOWN, UP = "lora_down", "lora_up"
Architecture = Mapping[str, Any]  # of one component: its config.json merged with conf/model


@dataclass(frozen=True)
class Rows:
    """Where rows of a tensor belong that others lay out differently."""

    names: tuple[str, ...]  # modules whose rows follow each other
    swapped: bool = False  # the first half of the rows is the module's second


@dataclass(frozen=True)
class ComponentSpec:
    """One model of a family's checkpoints: one of their folders."""

    build: Callable[[Architecture], torch.nn.Module]  # on the meta device: names and shapes, no memory
    stacks: tuple[str, ...] = ()  # lists of identical blocks: their weights are stacked along a leading layer dimension
    tables: Callable[[Architecture], dict[str, numpy.ndarray]] = lambda architecture: {}  # computed, not in checkpoints
    unused: Callable[[Architecture], tuple[str, ...]] = lambda architecture: ()  # patterns of tensors to ignore
    adapted: str = ""  # pattern of linear layers of stacked blocks that can have an adapter's factors beside them
    prefix: str = ""  # of names in checkpoints, written by some library versions
    # What stands before all of its names in some single files, of which others may hold further components.
    wrappers: tuple[str, ...] = ()
    # Of names in checkpoints that are not in diffusers' layout; None: as it is. Applied to files in which a name
    # matches the pattern `foreign`: a name may exist in both layouts, for different tensors.
    rename: Callable[[str], str | Rows | None] = lambda name: None
    foreign: str = ""
    described: Callable[[dict], dict] = lambda stored: stored  # another class's config.json in the words of conf/model
    respell: Callable[[str], str | None] = lambda name: None  # of names in diffusers' layout that ports spell otherwise
    # Tensors by which a file is recognized, and their shapes; None: it has no such tensor.
    landmarks: Callable[[Architecture], Mapping[str, tuple[int, ...] | None]] = lambda architecture: {}
    beside: tuple[str, ...] = ()  # further folders that it needs, e.g. a tokenizer
    twin_of: str | None = None  # another component of the same architecture; only the weights differ
    # Of config.json, what reaches `build`. None: everything, as models.modules.construct takes only what the class's
    # constructor names. transformers' configs take any name, some of which load code.
    fields: frozenset[str] | None = None


@dataclass(frozen=True)
class TextEncoding:
    """A prompt through one text encoder."""

    component: str
    tokens: Callable[[DictConfig], int]  # of a prompt, padding included
    shapes: Callable[[DictConfig], dict[str, tuple[int, ...]]]  # of its outputs, per prompt
    inputs: int  # how many arrays `encode` takes, int32 (prompts, tokens) each
    # (folders named in `beside`, prompts, tokens, store) -> those arrays
    tokenize: Callable[[Mapping[str, Path], list[str], int, Store | None], tuple[numpy.ndarray, ...]]
    encode: Callable[..., dict[str, jax.Array]]  # traced: (module, arrays, *outputs of tokenize) -> values
    clean: Callable[[str], str] = str  # normalizes a prompt; prompts with equal normal forms share a result
    temporaries: Callable[[DictConfig], float] = lambda config: 0.0  # bytes per device besides the weights


@dataclass(frozen=True)
class PictureEncoding:
    """Images through an image encoder."""

    component: str
    shape: Callable[[DictConfig], tuple[int, ...]]  # of one image's tokens
    pixels: Callable[[DictConfig], tuple[int, ...]]  # shape of one image as `encode` takes it
    check: Callable[[Mapping[str, Path]], None]  # raises if the folders in `beside` are invalid
    # (folders in `beside`, image: a file or frames, whose last counts; config of the stage's keys) -> its pixels
    read: Callable[[Mapping[str, Path], Any, DictConfig], numpy.ndarray]
    encode: Callable[..., jax.Array]  # traced: (module, arrays, pixels of all images) -> their tokens
    temporaries: Callable[[DictConfig], float] = lambda config: 0.0
    settings: tuple[str, ...] = ()  # config keys that `read` reads


@dataclass(frozen=True)
class FaceEncoding:
    """A video of a face through encoders that are part of the transformer."""

    component: str
    part: str  # pattern of their tensors
    shape: Callable[[Job], tuple[int, ...]]  # of what they give, per prompt
    side: Callable[[DictConfig], int]  # height and width of the video in pixels
    encode: Callable[..., jax.Array]  # traced: (module, arrays, uint8 (frames, side, side, 3), prompts) -> (prompts, …)
    temporaries: Callable[[DictConfig], float] = lambda config: 0.0


@dataclass(frozen=True)
class SoundEncoding:
    """A sound through an encoder of its own."""

    component: str
    shape: Callable[[DictConfig], tuple[int, ...]]  # of a frame's features
    rate: float  # tokens a second, of which there are so many for a number of samples:
    tokens: Callable[[int, DictConfig], int]
    steps: float  # a second, to which tokens are resampled before frames take the nearest
    encode: Callable[..., jax.Array]  # traced: (module, arrays, samples, how many are sound) -> (layers, tokens, …)
    temporaries: Callable[[DictConfig], float] = lambda config: 0.0


@dataclass(frozen=True)
class VoiceEncoding:
    """Features of a sound through an encoder that is part of the transformer."""

    component: str
    part: str  # pattern of its tensors
    features: str  # a name in Family.sounds
    shapes: Callable[[Job], dict[str, tuple[int, ...]]]  # of what it gives, per prompt
    # traced: (module, arrays, features of a segment's frames, prompts) -> values (prompts, …)
    encode: Callable[..., dict[str, jax.Array]]
    temporaries: Callable[[DictConfig], float] = lambda config: 0.0


@dataclass(frozen=True)
class VideoCodec:
    """A VAE that processes a video in chunks: the first chunk is one frame, later ones cover one latent frame.

    The functions that `decoder` and `encoder` return are traced: (arrays, chunk, caches) -> (result, caches), with
    caches None for the first chunk. Latents are normalized, pixels (1, 3, frames, height, width) in -1..1.
    """

    component: str
    # (module, config, mesh) -> the function, and the partition spec of its caches
    decoder: Callable[..., tuple[Callable, jax.sharding.PartitionSpec]]
    decoder_part: str  # pattern of the decoder's tensors
    decoder_width: Callable[[Architecture], float]  # peak number of live values per pixel
    encoder: Callable[..., tuple[Callable, jax.sharding.PartitionSpec]] | None = None  # None: it only decodes
    encoder_part: str = ""
    encoder_width: Callable[[Architecture], float] = lambda architecture: 0.0
    settings: tuple[str, ...] = ()  # config keys that the functions depend on


@dataclass(frozen=True)
class Condition:
    """An input of the transformer besides latents and timestep, the same in every step."""

    shape: Callable[[Job], tuple[int, ...]]  # per video; per prompt if `by_prompt`
    half: bool = False  # in the transformer's dtype; else in float32
    by_prompt: bool = False  # one per prompt, negative prompts last
    # For a value that comes from the user, or may be absent: (value, shape) -> array.
    prepare: Callable[[Any, tuple[int, ...]], Any] = lambda value, shape: value
    # What a window of the video sees of it (conf/windows): (value, the window's latent frames) -> its part. None: it
    # cannot be cut.
    window: Callable[[jax.Array, jax.Array], jax.Array] | None = None


@dataclass(frozen=True)
class LatentEncoding:
    """A value that the VAE encodes from images and videos."""

    shape: Callable[[Job], tuple[int, ...]]
    frames: Callable[[Job], int]  # to encode
    # (view, values, encode) -> the value; encode(frames, pixels of a range of frames) -> latents
    make: Callable[[View, dict[str, Any], Callable[..., numpy.ndarray]], numpy.ndarray]
    settings: tuple[str, ...] = ()  # config keys that `make` reads, besides size and fit


class Output(NamedTuple):
    """The result of a transformer's forward pass."""

    velocity: jax.Array  # shaped like the latents
    residual: jax.Array | None = None  # the sum of what the blocks added to the tokens, (batch, tokens, width)
    rescued: jax.Array | None = None  # attention rows that the guards recomputed, (layers, devices)


class Chunk(NamedTuple):
    """A chunk's place in a video that is made chunk by chunk, and what is kept of the chunks before it."""

    key: jax.Array  # (layers, batch, tokens, width), like the values: kernels.attention.Kept
    value: jax.Array
    start: jax.Array  # the first token of its slot
    filling: jax.Array  # index of Forward.fillings
    positions: jax.Array | None  # in RoPE, of its latent frames; None: from Forward.first_position on
    kept_positions: jax.Array | None = None  # of all slots' latent frames, if keys are kept before RoPE


@dataclass(frozen=True)
class Nag:
    """Normalized attention guidance: a text's cross-attention, pushed away from the negative prompt's."""

    scale: float
    limit: float  # of the result's length, in lengths of the prompt's own
    share: float  # of the result; the rest is the prompt's own

    @classmethod
    def of(cls, guider) -> Nag | None:
        """As conf/guider says."""
        return cls(guider.nag, guider.nag_limit, guider.nag_share) if guider.nag != 1 else None


@dataclass(frozen=True)
class Forward:
    """How a transformer's forward pass is computed and sharded."""

    architecture: Architecture
    dtype: str
    grid: tuple[int, int, int]  # tokens: frames, height and width
    text_tokens: int
    conditions: tuple[str, ...]
    mesh: jax.sharding.Mesh
    parallel: Parallel
    self_attention: Kernel
    cross_attention: Kernel
    products: Products
    precision: Any  # schema.Precision
    gather: str | None = None  # mesh axis over which matrices are stored sharded and gathered for use
    scan: bool = True  # blocks in a loop, or unrolled
    same_video: bool = False  # the batch is one video at one timestep; only the prompts differ
    multiple: int = 1  # tokens are padded to a multiple of this inside the blocks
    fillings: tuple[int, ...] = ()  # tokens to attend to, by the number of chunks; empty: all are made at once
    first_position: tuple[int, int, int] = (0, 0, 0)  # in RoPE: of frames, height and width
    riflex: int | None = None  # the frequency of time, counted from 1, that has not repeated by the video's end
    pinned: bool = False  # constrain the tokens' sharding in every block, where the compiler would choose another
    nag: Nag | None = None  # with it, conditions of negative prompts come too, named negative_…
    behind: int = 0  # tokens behind the grid's in one sequence: Family.behind

    @property
    def tokens(self) -> int:
        """Of the grid."""
        frames, height, width = self.grid
        return frames * height * width


@dataclass(frozen=True)
class AdapterNames:
    """How trainers name the modules of a family's transformer."""

    prefix: str  # pattern of prefixes before a module's name
    native: re.Pattern  # matches only diffusers' names
    # (module, whether in diffusers' names) -> diffusers' name, or those of a layer that is several in the model
    translate: Callable[[str, bool], str | Rows | None]
    bare: tuple[str, ...] = ()  # suffixes of parameters that are not a module's `weight`
    modulation: Callable[[str], str | None] = lambda module: None  # the parameter that `diff_m` applies to


@dataclass(frozen=True)
class Family:
    """One architecture and its relatives."""

    name: str
    modules: tuple[str, ...]  # imported, with torch and diffusers, when something is built
    components: Mapping[str, ComponentSpec]
    geometry: Callable[[Mapping[str, Architecture]], Geometry]
    heads: Callable[[Mapping[str, Architecture]], tuple[int, int]]  # the transformer's head count and head dimension
    denoiser: Callable[[torch.nn.Module, Forward], Callable[..., Output]]  # (arrays, latents, time, conditions)
    conditions: Mapping[str, Condition]
    codec: VideoCodec
    texts: tuple[TextEncoding, ...]
    flops: Callable[[DictConfig, int], dict[str, int]]  # (config, tokens): of one forward pass per prompt, by part
    # Linear layers that a kernel can compute: (architecture) -> {array name: (layers, FLOPs per token)}
    products: Callable[[Architecture], dict[str, tuple[int, int]]]
    adapters: AdapterNames
    # The same for a chunk of a video, with what is kept of those before: (arrays, latents, time, conditions, chunk) ->
    # (Output, Chunk). None: its videos cannot be made chunk by chunk.
    chunk_denoiser: Callable[[torch.nn.Module, Forward], Callable[..., tuple[Output, Chunk]]] | None = None
    # Reads a driving video once, for all steps: (module, Forward) -> a function of arrays, what to fill and conditions.
    # It fills key and value, (layers, 1, tokens, width): kernels.attention.OfFrames. None: no model is driven by one.
    reader: Callable[[torch.nn.Module, Forward], Callable[..., dict[str, jax.Array]]] | None = None
    tiny: VideoCodec | None = None  # a much smaller decoder of the same latents, approximate (conf/vae)
    pictures: Mapping[str, PictureEncoding] = field(default_factory=dict)  # by output value
    encodings: Mapping[str, LatentEncoding] = field(default_factory=dict)  # by output value
    faces: Mapping[str, FaceEncoding] = field(default_factory=dict)  # by output value
    sounds: Mapping[str, SoundEncoding] = field(default_factory=dict)  # by output value
    voice: VoiceEncoding | None = None
    extra_frames: Callable[[DictConfig], int] = lambda config: 0  # latent frames before the video's
    behind: Callable[[DictConfig], int] = lambda config: 0  # tokens behind the video's, of what it is made from
    # Whether a step's forward pass takes the time after the step too, as condition `next_timestep`.
    two_times: Callable[[DictConfig], bool] = lambda config: False
    norm: str | None = None  # QK norm: over the whole "width", or per "head"
    beside: Callable[[DictConfig], int] = lambda config: 0  # extra tokens in the video's self-attention
    sparse: tuple[str, ...] = ()  # kinds of sparse attention that its blocks can compute (conf/sparse)
    has_nag: bool = False  # whether its blocks can compute Forward.nag
    # Blocks of which a pass may skip some, by condition `skipped` (batch, blocks).
    skippable: Callable[[Architecture], int] = lambda architecture: 0
    problems: Callable[[DictConfig], Iterator[str]] = lambda config: iter(())  # mismatches of model and pipeline
    transposed: frozenset[str] = frozenset()  # of `products`, those with a transposed input or output
    takes_text: bool = False  # whether the text's tokens pass through products of the same number and size
    # Names of program parts in plans -> patterns of op names; the first match wins.
    groups: Mapping[str, str] = field(default_factory=dict)

    def described_by(self, component: str) -> str:
        """The component whose config entry describes this one."""
        return self.components[component].twin_of or component

    def spec(self, component: str) -> ComponentSpec:
        return self.components[self.described_by(component)]

    def decoders(self) -> dict[str, VideoCodec]:
        """What can decode its latents, by component."""
        return {codec.component: codec for codec in (self.codec, self.tiny) if codec is not None}

    def questions(self, config: DictConfig) -> dict[str, Question]:
        """The attention its blocks need: self-attention, and cross-attention to text."""
        heads = self.heads(config.model.architecture)
        grid = self.geometry(config.model.architecture).grid(seen_at_once(config), self.extra_frames(config))
        return {
            "self": Question(*heads, grid, self.norm, self.beside(config), self.sparse), "cross": Question(*heads),
        }


# ---------------------------------------------------------------- helpers


def lazily(module: str, name: str, torch: bool = True) -> Callable:
    """A function whose module, and with it torch and diffusers if it uses them, is imported on the first call."""
    load = import_module if torch else importlib.import_module

    def call(*arguments, **named):
        return getattr(load(module), name)(*arguments, **named)

    return call


def import_module(module: str) -> Any:
    # diffusers imports torch_xla if it is installed. Kaggle's and Colab's TPU machines have one built for another torch
    # version, so its import fails. Nothing here uses it.
    private.hide_torch_xla()
    return importlib.import_module(module)
