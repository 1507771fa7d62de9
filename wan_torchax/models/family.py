"""What a family of models says of itself. Everything outside wan_torchax/models/<family>/ and conf/ asks through this.

    family = registry.family_of(config)             # wan_torchax.models.wan.FAMILY
    family.geometry(config.model.architecture)      # pixels, latents, tokens

A family is a folder whose __init__.py makes one `Family`. Describing it costs nothing: neither JAX nor torch is
imported before one of the functions that build is called. docs/architecture.md says how to add one.
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
from wan_torchax.kernels.settings import Kernel, Parallel, Products, Question

if TYPE_CHECKING:
    import jax
    import torch
    from omegaconf import DictConfig

    from wan_torchax.config.resolve import Job, View
    from wan_torchax.records.store import Store

Architecture = Mapping[str, Any]  # of one component: its config.json and what conf/model says of it


@dataclass(frozen=True)
class ComponentSpec:
    """One model of a family's checkpoints: a folder of theirs."""

    build: Callable[[Architecture], torch.nn.Module]  # on the meta device: names and shapes, no memory
    stacks: tuple[str, ...] = ()  # lists of equal blocks: their weights become arrays with a dimension more, the layer
    tables: Callable[[Architecture], dict[str, numpy.ndarray]] = lambda architecture: {}  # arrays no checkpoint has
    unused: Callable[[Architecture], tuple[str, ...]] = lambda architecture: ()  # patterns of tensors held in vain
    prefix: str = ""  # of names in checkpoints, which some versions of the libraries write
    beside: tuple[str, ...] = ()  # folders that belong to it: a tokenizer
    twin_of: str | None = None  # the component that describes it: it has other weights and nothing else


@dataclass(frozen=True)
class TextEncoding:
    """A prompt through one text encoder."""

    component: str
    tokens: Callable[[DictConfig], int]  # of a prompt, padding included
    shapes: Callable[[DictConfig], dict[str, tuple[int, ...]]]  # what it gives, of one prompt
    inputs: int  # how many arrays `encode` takes, int32 (prompts, tokens) each
    # (folders beside the component, prompts, tokens, store) -> those arrays
    tokenize: Callable[[Mapping[str, Path], list[str], int, Store | None], tuple[numpy.ndarray, ...]]
    encode: Callable[..., dict[str, jax.Array]]  # (module, arrays, *what tokenize gives) -> the values, traced
    clean: Callable[[str], str] = str  # a prompt as it is encoded: two that are alike afterwards have one result
    temporaries: Callable[[DictConfig], float] = lambda config: 0.0  # bytes of one device beside the weights


@dataclass(frozen=True)
class PictureEncoding:
    """Pictures through an image encoder."""

    component: str
    shape: Callable[[DictConfig], tuple[int, ...]]  # of one picture's tokens
    pixels: Callable[[DictConfig], tuple[int, ...]]  # of one picture as `encode` takes it
    check: Callable[[Mapping[str, Path]], None]  # raises what is wrong with the folders beside the component
    read: Callable[[Mapping[str, Path], Path], numpy.ndarray]  # (folders beside the component, picture) -> its pixels
    encode: Callable[..., jax.Array]  # (module, arrays, pixels of all pictures) -> their tokens, traced
    temporaries: Callable[[DictConfig], float] = lambda config: 0.0


@dataclass(frozen=True)
class VideoCodec:
    """A VAE that works on a video piece by piece: the first piece is one frame, later ones a latent frame's worth.

    The functions that decoder and encoder give are traced: (arrays, piece, caches) -> (result, caches), caches None for
    the first piece. Latents are as the transformer has them, pixels (1, 3, frames, height, width) from -1 to 1.
    """

    component: str
    # (module, config, mesh) -> the function, and how its caches lie on the devices
    decoder: Callable[..., tuple[Callable, jax.sharding.PartitionSpec]]
    decoder_part: str  # pattern of the tensors that the decoder takes
    decoder_width: Callable[[Architecture], float]  # numbers for each pixel that are alive at once while it decodes
    encoder: Callable[..., tuple[Callable, jax.sharding.PartitionSpec]] | None = None  # None: it only decodes
    encoder_part: str = ""
    encoder_width: Callable[[Architecture], float] = lambda architecture: 0.0
    settings: tuple[str, ...] = ()  # keys of the config that the functions are built from


@dataclass(frozen=True)
class Condition:
    """What a transformer takes beside latents and time, the same in every step."""

    shape: Callable[[Job], tuple[int, ...]]  # of one video; of one prompt where it is `by_prompt`
    half: bool = False  # in the transformer's dtype; else in float32
    by_prompt: bool = False  # one for each prompt, negative ones behind
    # Where a value is no array that a stage gives, but the user's, or none yet: (value, shape) -> array.
    prepare: Callable[[Any, tuple[int, ...]], Any] = lambda value, shape: value


@dataclass(frozen=True)
class LatentEncoding:
    """A value that the VAE makes of pictures and videos."""

    shape: Callable[[Job], tuple[int, ...]]
    frames: Callable[[Job], int]  # that are encoded
    # (view, values, encode) -> the value; encode(frames, pixels of a range of frames) -> latents
    make: Callable[[View, dict[str, Any], Callable[..., numpy.ndarray]], numpy.ndarray]
    settings: tuple[str, ...] = ()  # keys of the config that `make` reads, beside size and fit


class Output(NamedTuple):
    """What a transformer's forward gives."""

    velocity: jax.Array  # like the latents
    residual: jax.Array | None = None  # what the blocks added to the tokens, (batch, tokens, width)
    rescued: jax.Array | None = None  # rows that attention's guards computed again, (layers, devices)


@dataclass(frozen=True)
class Forward:
    """How a transformer's forward is computed and laid out on the devices: all that a family builds it from."""

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
    precision: Any  # schema.Precision, its layers by name
    gather: str | None = None  # mesh axis over which matrices are stored in parts
    scan: bool = True  # blocks under a loop, or written out
    same_video: bool = False  # all of the batch is one video at one time, and only the prompts differ
    multiple: int = 1  # what tokens are padded to a multiple of while they are in the blocks
    pinned: bool = False  # say how tokens lie on the devices, where the compiler would not see it

    @property
    def tokens(self) -> int:
        frames, height, width = self.grid
        return frames * height * width


@dataclass(frozen=True)
class AdapterNames:
    """How trainers name the modules of a family's transformer."""

    prefix: str  # a pattern of what stands before a module's name
    native: re.Pattern  # what only diffusers' own names have
    translate: Callable[[str, bool], str | None]  # (module, whether in diffusers' names) -> diffusers' name
    bare: tuple[str, ...] = ()  # parameters that are not a module's weight, by the end of their names
    modulation: Callable[[str], str | None] = lambda module: None  # where a difference "of the modulation" goes


@dataclass(frozen=True)
class Family:
    """One architecture and its relatives."""

    name: str
    modules: tuple[str, ...]  # what is imported, and torch and diffusers with it, when something is built
    components: Mapping[str, ComponentSpec]
    geometry: Callable[[Mapping[str, Architecture]], Geometry]
    heads: Callable[[Mapping[str, Architecture]], tuple[int, int]]  # of the transformer, and the size of one
    denoiser: Callable[[torch.nn.Module, Forward], Callable[..., Output]]  # (arrays, latents, time, conditions)
    conditions: Mapping[str, Condition]
    codec: VideoCodec
    texts: tuple[TextEncoding, ...]
    flops: Callable[[DictConfig, int], dict[str, int]]  # (config, tokens): of one forward for one prompt, by part
    # Linear layers that a kernel can compute: (architecture) -> {array's name: (layers, FLOPs a token)}
    products: Callable[[Architecture], dict[str, tuple[int, int]]]
    adapters: AdapterNames
    pictures: Mapping[str, PictureEncoding] = field(default_factory=dict)  # by the value they give
    encodings: Mapping[str, LatentEncoding] = field(default_factory=dict)  # by the value they give
    extra_frames: Callable[[DictConfig], int] = lambda config: 0  # latent frames in front of the video's
    norm: str | None = None  # of attention's queries and keys: over the whole "width", or each "head" by itself
    beside: Callable[[DictConfig], int] = lambda config: 0  # tokens that attend together with the video's
    problems: Callable[[DictConfig], Iterator[str]] = lambda config: iter(())  # what model and pipeline cannot do
    transposed: frozenset[str] = frozenset()  # of `products`, those at attention's values and outputs
    # What plans call parts of the program -> patterns of the names that their ops have; the first match counts.
    groups: Mapping[str, str] = field(default_factory=dict)

    def described_by(self, component: str) -> str:
        """The name under which a component stands in the config."""
        return self.components[component].twin_of or component

    def spec(self, component: str) -> ComponentSpec:
        return self.components[self.described_by(component)]

    def questions(self, config: DictConfig) -> dict[str, Question]:
        """What its blocks ask of attention: among the video's tokens, and to a text's."""
        heads = self.heads(config.model.architecture)
        grid = self.geometry(config.model.architecture).grid(config.resolution, self.extra_frames(config))
        return {"self": Question(*heads, grid, self.norm, self.beside(config)), "cross": Question(*heads)}


# ---------------------------------------------------------------- what families are made with


def lazily(module: str, name: str) -> Callable:
    """A function of a module that is imported, and torch and diffusers with it, when it is first called."""

    def call(*arguments, **named):
        return getattr(import_module(module), name)(*arguments, **named)

    return call


def import_module(module: str) -> Any:
    # diffusers imports torch_xla where that is installed, for attention on its own devices. Kaggle's and Colab's TPU
    # machines have one, built for another torch than ours: its import fails. Nothing here uses it.
    private.hide_torch_xla()
    return importlib.import_module(module)
