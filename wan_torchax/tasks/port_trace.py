"""Runs a torch module once, with few blocks and few tokens, and records its ops, their source lines and the data flow.

    small, inputs, *_ = run(diffusers.FluxTransformer2DModel, {}, "forward")
    trace = Trace(small).run("forward", inputs)
    trace.sites                 # what happened at each line of the library's code

The run is in bfloat16 on the CPU with a float32 time, as a runner under JAX would have it. Where torch refuses to
multiply float32 by bfloat16, JAX would promote both: so does this, and records the place.
"""
import contextlib
import inspect
import itertools
import math
import re
import sys
import types
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import torch

from wan_torchax import private

LAYERS = ("num_layers", "num_single_layers", "num_refiner_layers", "n_layers", "n_refiner_layers", "num_hidden_layers")
HEADS = ("num_attention_heads", "audio_num_attention_heads", "n_heads", "n_kv_heads")
FRAMES, HEIGHT, WIDTH, TEXT, TEXT_2, PICTURE = 3, 4, 6, 7, 5, 9  # sizes that can be told apart in a trace
LIBRARIES = tuple(str(Path(torch.__file__).parents[1] / name) for name in ("diffusers", "transformers"))


@dataclass(frozen=True)
class Small:
    """A module with few blocks, and the constructor arguments it was built with."""

    module: torch.nn.Module
    settings: Mapping[str, Any]

    @property
    def source(self) -> str:
        return inspect.getsourcefile(type(self.module)) or ""


class NoInitialization(private.dispatch_mode()):
    """Skips random initialization, which for a billion parameters takes longer than the run."""

    def __torch_dispatch__(self, op, kinds, arguments=(), keywords=None):
        if op.overloadpacket in (torch.ops.aten.uniform_, torch.ops.aten.normal_):
            return arguments[0]
        return op(*arguments, **(keywords or {}))


def settings_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a class's constructor: its defaults, and over them what is given."""
    parameters = inspect.signature(kind.__init__).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    return defaults | {name: value for name, value in given.items() if name in parameters}


def on_meta(kind: type, settings: Mapping[str, Any]) -> torch.nn.Module:
    """The module at its real size: names and shapes, no memory."""
    with torch.device("meta"):
        return kind(**settings).eval()


def shrink(kind: type, given: Mapping[str, Any]) -> Iterator[Small]:
    """The module with two blocks a stack: first also with two heads, then at its real width."""
    settings = settings_of(kind, given)
    fewer = settings | {name: min(settings[name], 2) for name in LAYERS if isinstance(settings.get(name), int)}
    # Autoencoders: fewer channels.
    fewer |= {"block_out_channels": tuple(min(width, 64) for width in settings.get("block_out_channels", ()))}
    fewer |= {name: 16 for name in ("base_dim", "decoder_base_dim") if settings.get(name)}
    fewer = {name: value for name, value in fewer.items() if name in settings}
    heads = {name: 2 for name in HEADS if isinstance(settings.get(name), int)}
    for arguments in (fewer | heads, fewer) if heads else (fewer,):
        with contextlib.suppress(Exception), NoInitialization():
            module = kind(**arguments).eval()
            for tensor in module.parameters():
                tensor.data = torch.full_like(tensor, 0.01, dtype=torch.bfloat16)
            for tensor in module.buffers():
                tensor.data = tensor.nan_to_num() if tensor.is_floating_point() else tensor
            yield Small(module, arguments)


# ---------------------------------------------------------------- example inputs


def example_inputs(small: Small, entry: str, scale: int = 1) -> Iterator[dict[str, Any]]:
    """Arguments for a method, guessed from their names and the module's settings: several layouts, for one to fit.

    `scale` multiplies the video's height.
    """
    parameters = [name for name in inspect.signature(getattr(small.module, entry)).parameters if name != "return_dict"]
    options = {name: list(guesses(name, small.settings, entry, scale)) for name in parameters}
    named = {name: values for name, values in options.items() if values}
    for values in itertools.product(*named.values()):
        yield dict(zip(named, values))


def first_of(settings: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((settings[name] for name in names if settings.get(name) is not None), default)


def guesses(name: str, settings: Mapping[str, Any], entry: str, scale: int) -> Iterator[Any]:
    """Values that an argument of this name may have; none: it is left out."""
    patch = first_of(settings, "patch_size", "all_patch_size", default=1)
    *_, patch = patch if isinstance(patch, (tuple, list)) else [patch]
    height, width, frames = HEIGHT * scale * patch, WIDTH * patch, FRAMES
    channels = first_of(settings, "in_channels", default=4)
    text = first_of(
        settings, "text_dim", "text_embed_dim", "joint_attention_dim", "caption_channels", "cap_feat_dim",
        "cross_attention_dim", default=8,
    )
    tokens = frames * HEIGHT * scale * WIDTH
    if entry == "decode" and name == "z":
        channels = first_of(settings, "latent_channels", "z_dim", default=4)
        yield from (video(channels, frames, height, width), picture(channels, height, width))
    elif entry == "encode" and name == "x":
        yield from (video(3, 5, 16 * height, 16 * width), picture(3, 8 * height, 8 * width))
    elif name in ("hidden_states", "sample"):
        yield video(channels, frames, height, width)
        yield video(channels, frames, height, width).transpose(1, 2)
        yield from (picture(channels, height, width), noise(1, tokens, channels))
    elif name == "x":
        yield [video(channels, 1, height, width)[0]]
    elif name in ("timestep", "t", "audio_timestep"):
        yield torch.tensor([500.0])
        yield torch.full((1, tokens), 500.0)
    elif name == "timestep_r" and settings.get("use_meanflow"):
        yield torch.tensor([400.0])
    elif name == "guidance" and settings.get("guidance_embeds"):
        yield torch.tensor([3.5])
    elif name == "encoder_hidden_states":
        yield noise(1, settings.get("max_text_seq_length", TEXT), text)
    elif name == "cap_feats":
        yield [noise(TEXT, text)]
    elif name == "encoder_hidden_states_2":
        yield noise(1, TEXT_2, first_of(settings, "text_embed_2_dim", default=text))
    elif name == "encoder_hidden_states_image" and settings.get("image_dim"):
        yield noise(1, PICTURE, settings["image_dim"])
    elif name == "image_embeds" and settings.get("image_embed_dim"):
        yield noise(1, PICTURE, settings["image_embed_dim"])
    elif name == "pooled_projections" and settings.get("pooled_projection_dim"):
        yield noise(1, settings["pooled_projection_dim"])
    elif name in ("encoder_attention_mask", "encoder_hidden_states_mask", "attention_mask"):
        yield (torch.arange(TEXT) < TEXT - 2)[None].long()
        yield (torch.arange(TEXT) < TEXT - 2)[None]
    elif name == "encoder_attention_mask_2":
        yield (torch.arange(TEXT_2) < TEXT_2 - 2)[None].long()
    elif name in ("img_ids", "txt_ids"):
        yield torch.zeros(tokens if name == "img_ids" else TEXT, len(settings.get("axes_dims_rope", "123")))
    elif name == "img_shapes":
        yield [[(frames, HEIGHT * scale, WIDTH)]]
    elif name in ("num_frames", "height", "width"):
        yield {"num_frames": frames, "height": HEIGHT * scale, "width": WIDTH}[name]
    elif name == "audio_hidden_states":
        yield noise(1, PICTURE, settings["audio_in_channels"])
    elif name == "audio_encoder_hidden_states":
        yield noise(1, TEXT, text)
    elif name == "audio_num_frames":
        yield PICTURE
    elif name == "input_ids":
        yield torch.arange(TEXT)[None]
    elif name == "pixel_values":
        size = first_of(settings, "image_size", default=32)
        yield noise(1, 3, size, size)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def video(channels: int, frames: int, height: int, width: int) -> torch.Tensor:
    return noise(1, channels, frames, height, width)


def picture(channels: int, height: int, width: int) -> torch.Tensor:
    return noise(1, channels, height, width)


# ---------------------------------------------------------------- the trace


@dataclass
class Site:
    """What happened at one line."""

    ops: Counter = field(default_factory=Counter)
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # of results
    branches: int = 0  # values read into Python
    dynamic: int = 0  # results whose shape depends on values
    promoted: int = 0  # products of float32 and bfloat16
    doubles: int = 0  # results in float64
    tables: int = 0  # tensors made from no tensor


@dataclass(frozen=True)
class Call:
    """One call of a linear layer."""

    name: str
    rows: int
    inputs: int
    outputs: int
    sources: frozenset[str]  # layers of the same block whose outputs reach its input with no other layer between
    attended: bool  # attention lies between

    @property
    def block(self) -> str:
        return block_of(self.name)


@dataclass(frozen=True)
class Attention:
    where: str
    query: tuple[int, ...]
    keys: int
    mask: tuple[int, ...] | None
    causal: bool
    before: int  # number of linear layers called before it


DYNAMIC = ("nonzero", "masked_select", "unique", "_unique2", "unique_dim")
CONSTRUCTORS = ("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices")
FLOATS = (torch.float32, torch.bfloat16)


class Trace(private.dispatch_mode()):
    """Records every op of a run by the line of the library's code that called it."""

    def __init__(self, small: Small):
        super().__init__()
        self.small = small
        self.sites: dict[str, Site] = defaultdict(Site)
        self.calls: list[Call] = []
        self.attentions: list[Attention] = []
        self.output: Any = None
        self._sources: dict[int, tuple[frozenset[str], bool]] = {}
        self._alive: list[Any] = []  # ids are reused once a tensor is freed

    def run(self, entry: str, inputs: Mapping[str, Any]) -> "Trace":
        with torch.no_grad(), self.linear_layers(), Attending(self), self:
            self.output = getattr(self.small.module, entry)(**inputs)
        self._sources, self._alive = {}, []
        return self

    def __torch_dispatch__(self, op, kinds, arguments=(), keywords=None):
        keywords = keywords or {}
        where = self.where()
        site, name = self.sites[where], op.overloadpacket.__name__
        try:
            result = op(*arguments, **keywords)
        except RuntimeError as error:
            if "dtype" not in str(error) and "type" not in str(error):
                raise
            site.promoted += 1
            result = op(*jax.tree.map(widened, arguments), **keywords)
        given = [one for one in jax.tree.leaves((arguments, keywords)) if isinstance(one, torch.Tensor)]
        made = [one for one in jax.tree.leaves(result) if isinstance(one, torch.Tensor)]
        site.ops[op] += 1
        site.shapes |= {tuple(one.shape) for one in made}
        site.branches += name in ("_local_scalar_dense", "equal", "is_nonzero")
        indexed = name in ("index", "index_put", "index_put_") and any(one.dtype == torch.bool for one in given[1:])
        site.dynamic += name in DYNAMIC or indexed
        site.doubles += any(one.dtype == torch.float64 for one in made)
        site.tables += name in CONSTRUCTORS and not given and made[0].numel() > 1
        self.flow(given, made)
        return result

    def where(self) -> str:
        """The line in the module's own file, or the innermost one of the library."""
        frame: types.FrameType | None = sys._getframe(1)
        inner = None
        while frame is not None:
            file = frame.f_code.co_filename
            if file == self.small.source:
                return f"{file}:{frame.f_lineno}"
            inner = inner or (f"{file}:{frame.f_lineno}" if file.startswith(LIBRARIES) else None)
            frame = frame.f_back
        return inner or "?"

    # ------------------------------------------------------------ data flow between linear layers

    def flow(self, given: list[torch.Tensor], made: list[torch.Tensor], attended: bool = False) -> None:
        known = [self._sources[id(one)] for one in given if id(one) in self._sources]
        sources = frozenset(itertools.chain.from_iterable(names for names, _ in known))
        for one in made:
            self.set_sources(one, sources, attended or any(through for _, through in known))

    def set_sources(self, tensor: torch.Tensor, sources: frozenset[str], attended: bool) -> None:
        self._sources[id(tensor)] = sources, attended
        self._alive.append(tensor)

    @contextlib.contextmanager
    def linear_layers(self) -> Iterator[None]:
        """Record the calls of linear layers, and which of them feed each other."""
        shapes = {name: one for name, one in self.small.module.named_modules() if isinstance(one, torch.nn.Linear)}

        rows: dict[str, int] = {}

        def before(name, layer, arguments):
            array = arguments[0]
            sources, attended = self._sources.get(id(array), (frozenset(), False))
            # What a layer of one row gives, e.g. modulation, scales a whole token and is not split with it.
            near = frozenset(one for one in sources if block_of(one) == block_of(name) != "" and rows[one] > 1)
            rows[name] = math.prod(array.shape[:-1])
            self.calls.append(Call(name, rows[name], layer.in_features, layer.out_features, near, attended))

        def after(name, layer, arguments, result):
            ends = self.calls[-1].name == name and self.calls[-1].sources  # the second of a pair
            self.set_sources(result, frozenset() if ends else frozenset([name]), False)

        hooks = []
        for name, layer in shapes.items():
            hooks.append(layer.register_forward_pre_hook(lambda one, given, name=name: before(name, one, given)))
            hooks.append(layer.register_forward_hook(lambda one, given, out, name=name: after(name, one, given, out)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def attend(self, attention: Callable, given: dict[str, Any]) -> torch.Tensor:
        """Record a call of torch's attention, and make it."""
        streams, mask, where = [given[name] for name in ("query", "key", "value")], given.get("attn_mask"), self.where()
        shapes = tuple(given["query"].shape), given["key"].shape[-2], None if mask is None else tuple(mask.shape)
        self.attentions.append(Attention(where, *shapes, given.get("is_causal", False), len(self.calls)))
        if len({one.dtype for one in streams}) > 1:
            self.sites[where].promoted += 1
            given = {name: widened(value) for name, value in given.items()}
        result = attention(**given)
        self.flow(streams, [result], attended=True)
        return result


class Attending(torch.overrides.TorchFunctionMode):
    """Hands calls of torch's attention to a trace."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, function, kinds, arguments=(), keywords=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            return self.trace.attend(function, dict(zip(names, arguments)) | (keywords or {}))
        return function(*arguments, **(keywords or {}))


def block_of(name: str) -> str:
    """The block that a layer belongs to: "transformer_blocks.0" for "transformer_blocks.0.attn.to_q"."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""


def widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in FLOATS else value


def run(kind: type, given: Mapping[str, Any], entry: str) -> tuple[Small, dict[str, Any], Trace, Trace | None]:
    """The first small module and inputs with which the method runs: (module, inputs, trace, trace at twice the height).

    Raises ValueError if none does, with the error of the run that got furthest.
    """
    errors = []
    for small in shrink(kind, given):
        for number, inputs in enumerate(example_inputs(small, entry)):
            trace = Trace(small)
            try:
                trace.run(entry, inputs)
            except Exception as error:
                errors.append((len(trace.sites), f"{type(error).__name__}: {error}"))
                continue
            larger = next(itertools.islice(example_inputs(small, entry, 2), number, None))
            try:
                return small, inputs, trace, Trace(small).run(entry, larger)
            except Exception:
                return small, inputs, trace, None
    _, furthest = max(errors, default=(0, "it cannot be constructed"))
    raise ValueError(f"{kind.__name__}.{entry}: no inputs found that it takes; the furthest run ended with {furthest}")


def component_classes(pipeline: type) -> dict[str, type]:
    """A pipeline's models by name, from the annotations of its constructor."""
    hints = typing.get_type_hints(pipeline.__init__)
    found: dict[str, Callable] = {}
    for name, hint in hints.items():
        kinds = [kind for kind in typing.get_args(hint) or [hint] if inspect.isclass(kind)]
        models = [kind for kind in kinds if issubclass(kind, torch.nn.Module)]
        if models:
            found[name] = models[0]
    return found
