"""What is changed in torchax and diffusers, each with its reason.

Everything here acts inside `torchax_on()` or on one model instance; no class of diffusers is changed.
"""
import contextlib
import functools
import importlib
import math
import re
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

# torchax turns off torch's transformer fast path for the whole process when it is imported; outside
# `torchax_on()` torch must behave as if torchax were not there.
_fast_path = torch.backends.mha.get_fastpath_enabled()
import torchax  # noqa: E402
from torchax import interop  # noqa: E402

torch.backends.mha.set_fastpath_enabled(_fast_path)

from wan_torchax.kernels.attention import attend_flat  # noqa: E402

from wan_torchax.config.schema import Attention, ConfigError, Kernel, Op, Parallel, nearest  # noqa: E402

# ---------------------------------------------------------------- torchax's lifetime


@contextlib.contextmanager
def torchax_on(ops=None):
    """torchax with our op overrides, and torch without gradients, for the length of a `with` block.

    Safe to nest and to leave by an exception: torch's modes, torchax's table of ops and every
    setting touched are afterwards what they were before. `ops` maps a torch op to its implementation.
    """
    environment = torchax.default_env()
    saved = dict(environment._ops), environment.enabled, torchax.tensor.Tensor.type_as
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        for op, implementation in (ops or {}).items():
            environment.override_op_definition(op, implementation)
        torchax.tensor.Tensor.type_as = type_as
        torch.backends.mha.set_fastpath_enabled(False)
        with environment, torch.no_grad(), warnings.catch_warnings():
            # JAX has no 64-bit integers unless asked; torch's indices fit in 32.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")
            yield environment
    finally:
        environment._ops, environment.enabled, torchax.tensor.Tensor.type_as = saved
        torch.backends.mha.set_fastpath_enabled(fast_path)


def type_as(tensor, other):
    """torchax 0.0.13 casts in place and leaves the old dtype in torch's metadata: bf16 convolutions then refuse their input."""
    return tensor.to(other.dtype)


def call_module(module, parameters, *arguments, **keywords):
    """Run a torch module on JAX arrays, inside `torchax_on()`; gives JAX arrays back."""
    arguments, keywords = interop.torch_view((arguments, keywords))
    output = torch.func.functional_call(module, interop.torch_view(parameters), arguments, keywords)
    return interop.jax_view(output)


# ---------------------------------------------------------------- op overrides, named in conf/ops


def load_ops(table, platform, allow_external) -> dict:
    """The rows of the config's op table that serve this platform, as {torch op: implementation}."""
    rows = {name: Op(**row) for name, row in table.items()}
    return {
        find_op(name, row.op): find_function(f"ops.{name}.implementation", row.implementation, allow_external)
        for name, row in rows.items()
        if not row.platforms or platform in row.platforms
    }


def find_op(name, path):
    """`aten.native_layer_norm` -> torch.ops.aten.native_layer_norm; `torch.…` as it stands."""
    parent = torch.ops if path.startswith("aten.") else torch
    for part in path.removeprefix("torch.").split("."):
        if not hasattr(parent, part):
            raise ConfigError(f"ops.{name}.op={path}: torch has no such op; {nearest(part, [choice for choice in dir(parent) if choice[0] != '_'])}")
        parent = getattr(parent, part)
    return parent


def find_function(key, path, allow_external):
    """A function by dotted path, from this project's own modules unless the user allows others."""
    module, _, name = path.rpartition(".")
    if not allow_external and module.split(".")[0] not in ("patches", "kernels"):
        raise ConfigError(f"{key}={path}: not in patches or kernels; set allow_external_ops=true to trust it")
    try:
        found = importlib.import_module(module if allow_external and not module.startswith(("patches", "kernels")) else f"wan_torchax.{module}")
    except ImportError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    if not callable(getattr(found, name, None)):
        choices = [choice for choice in dir(found) if callable(getattr(found, choice)) and choice[0] != "_"]
        raise ConfigError(f"{key}={path}: no such function; {nearest(name, choices)}")
    return getattr(found, name)


def upsample_nearest_exact2d(image, output_size, scales_h=None, scales_w=None):
    """Nearest upsampling by whole factors: (batch, channels, height, width), repeated along both sides."""
    height, width = image.shape[-2:]
    if output_size[0] % height or output_size[1] % width:
        raise NotImplementedError(f"nearest-exact upsampling from {height}x{width} to {tuple(output_size)}: only whole factors")

    def repeat(array):
        return array.repeat(output_size[0] // height, axis=-2).repeat(output_size[1] // width, axis=-1)

    return interop.call_jax(repeat, image)


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention for models that call torch's, (batch, heads, tokens, head_dim): blockwise, so that no score matrix is held.

    A mask or bias (the text encoder's, 512 tokens) has the size of the score matrix itself: JAX's own attention serves.
    """
    if dropout_p or is_causal or enable_gqa:
        raise NotImplementedError("scaled_dot_product_attention: dropout, causal masks and grouped heads are not needed by Wan")
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale

    def masked(query, key, value, mask):
        keyword = "mask" if mask.dtype == bool else "bias"
        out = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (query, key, value)), scale=scale, **{keyword: mask})
        return out.swapaxes(1, 2)

    def blockwise(*tensors):
        flat = [x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1) for x in tensors]
        out = attend_flat(flat[0] * (scale * head_dim**0.5), *flat[1:], head_dim, Kernel(kernel="xla", block_q=2048, block_kv=8192))  # 64 MiB of scores
        return out.reshape(*out.shape[:2], -1, head_dim).swapaxes(1, 2)

    if attn_mask is not None:
        return interop.call_jax(masked, query, key, value, attn_mask)
    return interop.call_jax(blockwise, query, key, value)


def layer_norm(array, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Layer norm over the last dimension with its mean and variance from one pass, which XLA joins to whatever made the array."""
    def normalize(array, *affine):
        wide = array.astype(jnp.float32)
        mean = wide.mean(axis=-1, keepdims=True)
        variance = jnp.maximum((wide * wide).mean(axis=-1, keepdims=True) - mean * mean, 0)
        out = (wide - mean) * jax.lax.rsqrt(variance + eps)
        out = out * affine[0] if weight is not None else out
        out = out + affine[-1] if bias is not None else out
        return out.astype(array.dtype)

    if tuple(normalized_shape) != tuple(array.shape[-1:]):
        raise NotImplementedError(f"layer norm over {tuple(normalized_shape)} of {tuple(array.shape)}: only the last dimension")
    return interop.call_jax(normalize, array, *(part for part in (weight, bias) if part is not None))


def conv3d_as_2d(video, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """A 3D convolution as one 2D convolution, the taps in time side by side as channels: (batch, channels, frames, height, width)."""
    stride, padding, dilation = (value if isinstance(value, (tuple, list)) else (value,) * 3 for value in (stride, padding, dilation))
    if padding[0] or tuple(dilation) != (1, 1, 1) or groups != 1:
        raise NotImplementedError("conv3d: padding in time, dilation and groups are not used by Wan")

    def convolve(video, weight, *bias):
        batch, channels, frames, height, width = video.shape
        outputs, _, taps, *kernel = weight.shape
        count = (frames - taps) // stride[0] + 1
        shifted = [video[:, :, tap : tap + (count - 1) * stride[0] + 1 : stride[0]] for tap in range(taps)]
        images = jnp.concatenate(shifted, axis=1).swapaxes(1, 2).reshape(batch * count, taps * channels, height, width)
        flat = weight.swapaxes(1, 2).reshape(outputs, taps * channels, *kernel)
        flat = jnp.pad(flat, [(0, max(0, 8 - outputs))] + [(0, 0)] * 3)  # cuDNN has no fast kernel for three outputs, RGB
        out = jax.lax.conv_general_dilated(images, flat, stride[1:], [(side, side) for side in padding[1:]])[:, :outputs]
        out = out.reshape(batch, count, outputs, *out.shape[2:]).swapaxes(1, 2)
        return out + bias[0].reshape(-1, 1, 1, 1) if bias else out

    return interop.call_jax(convolve, video, weight, *([] if bias is None else [bias]))


# ---------------------------------------------------------------- transformer


@dataclass
class AttentionProcessor:
    """Projections, norms, RoPE and the configured kernel, in place of diffusers' WanAttnProcessor.

    diffusers writes RoPE's halves into a new tensor with stride 2, which XLA can only turn into scatters, and
    calls attention through a dispatcher that knows no JAX kernel.
    """

    attention: Attention  # kernels already resolved for the platform
    parallel: Parallel
    mesh: object
    tokens: int  # of the video; what comes after them is padding

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        cross = encoder_hidden_states is not None
        context = encoder_hidden_states if cross else hidden_states
        query, key, value = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context)), attn.to_v(context)
        query = query.expand(context.shape[0], -1, -1)  # one video, several prompts: see ScannedBlocks
        tables = () if rotary_emb is None else [table[0, :, 0] for table in rotary_emb]  # (tokens, head_dim)

        def attend(query, key, value, *tables):
            kernel = self.attention.cross if cross else self.attention.self
            head_dim = query.shape[-1] // attn.heads
            with jax.named_scope("attend"):
                keys = None if cross else self.tokens
                return attend_flat(query, key, value, head_dim, kernel, self.parallel, self.mesh, cross, tables or None, keys)

        return attn.to_out[0](interop.call_jax(attend, query, key, value, *tables))


class ScannedBlocks(torch.nn.Module):
    """All transformer blocks as one loop over stacked weights, so that the program does not grow with depth.

    It stands in the model's `blocks` list as its only element: diffusers' own loop over the blocks runs it once.
    Its parameters carry a leading dimension, the layer. With `gathered`, a sharding, each layer's weights are brought to
    it before use: XLA gathers the next layer's while this one computes. Tokens are padded to a multiple of `multiple` from
    here to the end of the blocks, so that every device's share fills whole tiles of its memory: 18,900 would not, and XLA
    copies an array wherever its tiles shift.

    With `same_video`, all of the batch is one video at one time, and only the texts differ. Then the first block's
    self-attention, which no text has reached yet, is computed once for all: the block takes a batch of one and its
    cross-attention spreads it. That is 1 % of a guided step's arithmetic.
    """

    def __init__(self, block, gathered=None, multiple=1, same_video=False):
        super().__init__()
        self.block, self.gathered, self.multiple, self.same_video = block, gathered, multiple, same_video

    def forward(self, hidden_states, text, modulation, rotary):
        """hidden_states (batch, tokens, channels); rotary: two tables (1, tokens, 1, head_dim)."""
        stacked = interop.jax_view(dict(self.block.named_parameters()))
        tokens = hidden_states.shape[1]
        hidden, *rotary = (self.pad(array) for array in interop.jax_view((hidden_states, *rotary)))
        text, modulation = interop.jax_view((text, modulation))

        def one_block(layer, hidden):
            weights = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False), stacked)
            if self.gathered is not None:
                weights = jax.lax.with_sharding_constraint(weights, self.gathered)
            return call_module(self.block, weights, hidden, text, modulation[: hidden.shape[0]], tuple(rotary))

        first, layers = int(self.same_video and hidden.shape[0] > 1), len(next(iter(stacked.values())))
        if first:
            hidden = one_block(0, hidden[:1])
        hidden = jax.lax.fori_loop(first, layers, one_block, hidden)
        return interop.torch_view(hidden[:, :tokens])

    def pad(self, array):
        """Zeros after the last token."""
        return jnp.pad(array, [(0, 0), (0, -array.shape[1] % self.multiple)] + [(0, 0)] * (array.ndim - 2))


def scan_blocks(transformer, gathered=None, multiple=1, same_video=False):
    """Put the blocks of a transformer (on the meta device) under one loop."""
    transformer.blocks = torch.nn.ModuleList([ScannedBlocks(transformer.blocks[0], gathered, multiple, same_video)])


# ---------------------------------------------------------------- VAE


def decode_chunk(vae, latent, caches):
    """One latent frame to its pixels, the causal convolutions' last two inputs carried in `caches`.

    latent (1, channels, 1, height/8, width/8); caches None for a video's first latent frame, which gives one frame of
    pixels, then what the call before returned, which gives four. The program is the same for every later frame, so a
    video of any length compiles once. Returns pixels (1, 3, frames, height, width) in -1..1 and the caches, which have
    their channels last: so they need not be copied for convolutions that want them there.

    diffusers marks a cache that does not exist yet by None or "Rep" and pads one that is too short with zeros inside the
    convolution; here every cache is two frames from the start, zeros in front, which gives the same sums.
    """
    first = caches is None
    count = sum(isinstance(module, WanCausalConv3d) for module in vae.decoder.modules())
    features = [None] * count if first else [torch.movedim(caches[str(index)], -1, 1) if str(index) in caches else None for index in range(count)]
    upsampled = []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: upsampled.append(inputs[0]))
        for module in vae.decoder.modules()
        if getattr(module, "mode", None) == "upsample3d"
    ]
    pixels = vae.decoder(vae.post_quant_conv(latent), feat_cache=features, feat_idx=[0], first_chunk=first)
    for hook in hooks:
        hook.remove()
    waiting = iter(upsampled)  # inputs of the layers that double the frame rate: they left "Rep" in the first call
    features = [next(waiting)[:, :, -1:] * 0 if isinstance(feature, str) else feature for feature in features]
    caches = {str(index): torch.movedim(two_frames(feature), 1, -1) for index, feature in enumerate(features) if feature is not None}
    return pixels.clamp(-1, 1), caches


def two_frames(cache):
    """A cache of one frame, with a frame of zeros in front."""
    return cache if cache.shape[2] == 2 else torch.cat([torch.zeros_like(cache), cache], dim=2)


# ---------------------------------------------------------------- names


def name_scopes(module) -> None:
    """Give every op the name of the module it comes from, for plans and profiles: …/attn1/to_q/…"""
    open_scopes = []

    def enter(child, _):
        open_scopes.append(jax.named_scope(child.scope_name))
        open_scopes[-1].__enter__()

    def leave(child, *_):
        open_scopes.pop().__exit__(None, None, None)

    for name, child in module.named_modules():
        if name:
            child.scope_name = name.rpartition(".")[2]
            child.register_forward_pre_hook(enter)
            child.register_forward_hook(leave, always_call=True)


# ---------------------------------------------------------------- activation sharding


def constrain_activations(module, rules, mesh, key):
    """Sharding constraints on the inputs and outputs of every submodule whose name a rule matches."""
    names = [name for name, _ in module.named_modules()]
    for rule_name, rule in rules.items():
        matches = [name for name in names if re.fullmatch(rule.pattern, name)]
        if not matches:
            raise ConfigError(f"{key}.{rule_name}.pattern={rule.pattern}: matches no module; {nearest(rule.pattern, names)}")
        sharding = jax.sharding.NamedSharding(mesh, partition_spec(rule.spec))
        constrain = functools.partial(constrain_tensor, sharding=sharding, key=f"{key}.{rule_name}")
        for name in matches:
            module.get_submodule(name).register_forward_pre_hook(lambda _, inputs, constrain=constrain: (constrain(inputs[0]), *inputs[1:]))
            module.get_submodule(name).register_forward_hook(lambda _, inputs, output, constrain=constrain: constrain(output))


def constrain_tensor(tensor, sharding, key):
    if tensor.shape[0] == 1:  # a batch of one cannot be spread
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(None, *sharding.spec[1:]))
    problem = spec_problem(sharding.spec, tensor.shape, sharding.mesh)
    if problem:
        raise ConfigError(f"{key}.spec: an activation of shape {tuple(tensor.shape)} {problem}")
    return interop.call_jax(jax.lax.with_sharding_constraint, tensor, sharding)


def partition_spec(spec):
    """A config's spec as JAX's: lists become tuples."""
    return jax.sharding.PartitionSpec(*(entry if entry is None or isinstance(entry, str) else tuple(entry) for entry in spec))


def spec_problem(spec, shape, mesh) -> str | None:
    """Why a tensor of this shape cannot be sharded so, and the way out; None if it can."""
    if len(spec) > len(shape):
        return f"has {len(shape)} dimensions, the spec {tuple(spec)} has {len(spec)}; shorten the spec"
    for dimension, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        size = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % size:
            names = " x ".join(axes)
            return f"has {shape[dimension]} in dimension {dimension}, not divisible by {names} = {size}; use a mesh where {names} divides it, or null"
    return None
