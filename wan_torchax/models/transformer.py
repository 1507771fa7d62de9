"""Wan's transformer: its blocks under one loop, its attention through the project's kernels."""
import functools
import itertools
import re
from dataclasses import dataclass, field

import diffusers
import jax
import jax.numpy as jnp
import torch

from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import nearest
from wan_torchax.kernels import quantised
from wan_torchax.kernels.attention import GUARDED, Attend
from wan_torchax.models.modules import construct
from wan_torchax.patches import call_module, interop

SMALL_PARTS = (".quantised", ".scale")  # of a linear layer with eight bits
LAST = ("attn1.to_out.0", "attn2.to_out.0", "ffn.net.2")  # linear layers at the end of a block's branches
# Linear layers that a kernel can compute, and what is special about them: attention has values and outputs turned.
PRODUCTS = {
    "attn1.to_q": {}, "attn1.to_k": {}, "attn1.to_v": {"gives_turned": True}, "attn1.to_out.0": {"takes_turned": True},
    "attn2.to_q": {}, "attn2.to_out.0": {"takes_turned": True}, "ffn.net.0.proj": {"gelu": True}, "ffn.net.2": {},
}


class Transformer:
    ignored = (r".*norm_added_q",)  # checkpoints hold it, no version of the model uses it

    @staticmethod
    def build(config) -> torch.nn.Module:
        """The module on the meta device, its blocks under a loop where the config says so."""
        architecture = config.model.architecture.transformer
        controlled = "vace_layers" in architecture
        kind = diffusers.WanVACETransformer3DModel if controlled else diffusers.WanTransformer3DModel
        module = construct(kind, architecture)
        settings = module.config
        # RoPE's tables are computed when the module is made, which the meta device does not do.
        module.rope = type(module.rope)(
            settings.attention_head_dim, settings.patch_size, settings.rope_max_seq_len
        )
        if config.model.scan_blocks:
            module.blocks = torch.nn.ModuleList([ScannedBlocks(module.blocks)])
            if config.precision.weights:
                module.blocks[0].quantise(config.precision)
            if controlled:
                interleave_control(module)
        return module


@dataclass
class AttentionProcessor:
    """Projections, norms, RoPE and the configured kernels, in place of diffusers' WanAttnProcessor.

    diffusers writes RoPE's halves into a new tensor with stride 2, which XLA can only turn into scatters, and
    calls attention through a dispatcher that knows no JAX kernel.
    """

    to_video: Attend
    to_text: Attend
    text_tokens: int
    rescued: list = field(default_factory=list)  # by the kernels' guards, while a block is traced

    @property
    def is_guarded(self):
        return any(attend.kernel.kernel in GUARDED for attend in (self.to_video, self.to_text))

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        if attention_mask is not None:
            raise NotImplementedError("this transformer's attention has masks, which are not implemented")
        attend = self.to_video if encoder_hidden_states is None else self.to_text
        context, pictures = hidden_states if encoder_hidden_states is None else encoder_hidden_states, None
        if attn.add_k_proj is not None:  # a picture's tokens go before the text's
            pictures, context = context[:, : -self.text_tokens], context[:, -self.text_tokens :]
        query, key = attn.to_q(hidden_states), attn.to_k(context)
        norms = () if rotary_emb is None or attend.norm_epsilon is None else [attn.norm_q.weight, attn.norm_k.weight]
        if not norms:  # else they are taken with RoPE
            query, key = attn.norm_q(query), attn.norm_k(key)
        query = query.expand(context.shape[0], -1, -1)  # one video, several prompts: see ScannedBlocks
        tables = () if rotary_emb is None else [table[0, :, 0] for table in rotary_emb]  # (tokens, head_dim)

        def in_jax(query, key, value, tables=(), norms=()):
            with jax.named_scope("attend"):
                out, rescued = attend.counted(query, key, value, tables, norms)
            if rescued is not None:
                self.rescued.append(rescued)
            return out

        attended = interop.call_jax(in_jax, query, key, attn.to_v(context), tables, norms)
        if pictures is not None:  # a softmax of their own
            key, value = attn.norm_added_k(attn.add_k_proj(pictures)), attn.add_v_proj(pictures)
            attended = attended + interop.call_jax(in_jax, query, key, value)
        return attn.to_out[0](attended)


class Stacked(torch.nn.Module):
    """Blocks that are one to torch: `block` has the names, its parameters become arrays with a leading dimension."""

    def __init__(self, blocks):
        super().__init__()
        self.block, self.layers = blocks[0], len(blocks)

    def stored(self, name: str) -> tuple[list[int], str, str | None]:
        """Which layers a parameter's array holds, its name in checkpoints, and its dtype if it has one of its own."""
        return list(range(self.layers)), name, None


class ScannedBlocks(Stacked):
    """All transformer blocks as one loop over stacked weights, so that the program does not grow with depth.

    It stands in the model's `blocks` list as its only element: diffusers' own loop over the blocks runs it once. Its
    parameters carry a leading dimension, the layer. With `gathered`, a sharding, each layer's weights are brought to
    it before use: XLA gathers the next layer's while this one computes. Tokens are padded to a multiple of `multiple`
    from here to the end of the blocks, so that every device's share fills whole tiles of its memory: 18,900 would
    not, and XLA copies an array wherever its tiles shift.

    With `same_video`, all of the batch is one video at one time, and only the texts differ. Then the first block's
    self-attention, which no text has reached yet, is computed once for all: the block takes a batch of one and its
    cross-attention spreads it. That is 1 % of a guided step's arithmetic.

    With `given_tokens`, so many tokens at the start are of a picture that is given, at time 0, and the modulation has a
    row for them and one for the others. Which is whose is said in each block anew, where XLA makes it part of the sums:
    a row for every token would be (tokens, 6, channels), gigabytes.

    With `control`, tokens of a control video (batch, tokens, channels) and a scale for every control block, the blocks
    run in groups of one control block and the main blocks up to the next: a control block's hint is added to the first
    of them and is gone, where all hints together would be gigabytes.

    With `precision` some linear layers have eight bits in all blocks but a few at both ends. Such a layer has three
    arrays: `weight`, of the blocks that keep theirs, `quantised` and `scale`, of the others. Each kind of block has a
    loop of its own.
    """

    def __init__(self, blocks):
        super().__init__(blocks)
        self.gathered, self.multiple, self.same_video, self.given_tokens = None, 1, False, 0
        self.spread = None  # how tokens lie on the devices from block to block, where the compiler would not see it
        self.control_blocks, self.control = [], None  # in a list, so that its parameters keep their own names
        self.keeps, self.reused, self.residual = False, None, None  # what the blocks add: kept, or given instead
        self.at = None  # all layers' weights, the number of the one that is traced, and whether it has eight bits
        self.joined = {}  # residual and gate for the last linear layer of the branch that is traced
        self.rescued = None  # rows that attention computed again, (layers, devices)
        self.precision, self.small, self.quantised = None, (), {}  # names of linear layers; those of the traced block

    def forward(self, hidden_states, text, modulation, rotary):
        """hidden_states (batch, tokens, channels); rotary: two tables (1, tokens, 1, head_dim)."""
        stacked = interop.jax_view(dict(self.block.named_parameters()))
        tokens = hidden_states.shape[1]
        hidden, *rotary = (self.pad(array) for array in interop.jax_view((hidden_states, *rotary)))
        text, modulation = interop.jax_view((text, modulation))

        def modulate(batch):
            return by_token(modulation[:batch], self.given_tokens, hidden.shape[1])

        def one_block(layer, state, small=False):
            hidden, rescued = state
            weights, self.at = self.layer_of(stacked, layer, small), (stacked, layer, small)
            self.quantised = {name: weights.pop(name) for name in list(weights) if name.endswith(SMALL_PARTS)}
            if self.spread is not None:
                hidden = jax.lax.with_sharding_constraint(hidden, self.spread)
            hidden = call_module(self.block, weights, hidden, text, modulate(hidden.shape[0]), tuple(rotary))
            return hidden, self.count_rescued(rescued, layer)

        first, layers = int(self.same_video and hidden.shape[0] > 1), self.layers
        before, rescued = hidden, self.none_rescued()
        if self.reused is not None:
            hidden = hidden + interop.jax_view(self.reused)
        elif self.control is not None:
            control_block = functools.partial(self.control_block, text, modulation, tuple(rotary))
            hidden, self.rescued = self.in_groups(first, layers, one_block, control_block, (hidden, rescued))
        else:
            state = one_block(0, (hidden[:1], rescued), self.is_small(0)) if first else (hidden, rescued)
            for begin, end in self.stretches(first):
                block = functools.partial(one_block, small=self.is_small(begin))
                state = jax.lax.fori_loop(begin, end, block, state)
            hidden, self.rescued = state
        if self.keeps:
            self.residual = interop.torch_view(hidden - before)
        return interop.torch_view(hidden[:, :tokens])

    def none_rescued(self):
        """Zeros for how many rows attention's guards compute again, (layers, devices); None where it has none."""
        processor, self.rescued = self.block.attn1.processor, None
        if not processor.is_guarded:
            return None
        mesh = processor.to_video.mesh
        if mesh is None:
            return jnp.zeros((self.layers, 1), jnp.int32)
        zeros = jnp.zeros((self.layers, mesh.size), jnp.int32)
        # As the devices report them: brought together after the last block, not after each.
        spec = jax.sharding.PartitionSpec(None, mesh.axis_names)
        return jax.lax.with_sharding_constraint(zeros, jax.sharding.NamedSharding(mesh, spec))

    def count_rescued(self, rescued, layer):
        """With what was rescued in the block that was just traced."""
        here = self.block.attn1.processor.rescued
        if rescued is not None:
            rescued = rescued.at[layer].add(sum(here))
        here.clear()
        return rescued

    def layer_of(self, stacked, layer, small=False):
        """The weights of one layer, gathered where that is asked for; of linear layers with eight bits those."""
        places = {name: self.place(name, layer, small) for name in stacked}
        weights = {
            name: jax.lax.dynamic_index_in_dim(stacked[name], place, keepdims=False)
            for name, place in places.items() if place is not None
        }
        return weights if self.gathered is None else jax.lax.with_sharding_constraint(weights, self.gathered)

    def place(self, name, layer, small):
        """Where a layer stands in a parameter's array; None if only the other kind of block has it."""
        layers, _, dtype = self.stored(name)
        if len(layers) == self.layers:
            return layer
        if small == (dtype is None):
            return None
        first, left_out = self.precision.first, self.layers - len(layers)
        return layer - first if small else jnp.where(layer < first, layer, layer - left_out)

    def quantise(self, precision) -> None:
        """Have the linear layers that the precision's patterns match kept and computed in eight bits."""
        self.precision = precision
        if precision.first + precision.last >= self.layers:
            raise ConfigError(
                f"precision.first={precision.first} and last={precision.last} leave none of {self.layers} blocks"
            )
        linear = [name for name, module in self.block.named_modules() if isinstance(module, torch.nn.Linear)]
        for rule, pattern in precision.layers.items():
            places = [[re.fullmatch(pattern, f"blocks.{layer}.{name}") is not None for name in linear]
                      for layer in range(precision.first, self.layers - precision.last)]
            if not any(map(any, places)):
                near = nearest(pattern, [f"blocks.0.{name}" for name in linear])
                raise ConfigError(f"precision.layers.{rule}: pattern {pattern!r} matches no linear layer; {near}")
            if any(place != places[0] for place in places):
                raise ConfigError(
                    f"precision.layers.{rule}: matches other layers in one block than in the next; blocks at the ends "
                    "are left out with precision.first and precision.last"
                )
            self.small += tuple(name for name, matched in zip(linear, places[0]) if matched and name not in self.small)
        for name in self.small:
            module = self.block.get_submodule(name)
            module.quantised, module.scale = (
                torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
                for shape in (module.weight.shape, module.weight.shape[:1])
            )
            if not precision.first + precision.last:
                module.weight = None
            module.forward = functools.partial(self.small_linear, module, name)

    def stored(self, name):
        path, _, kind = name.rpartition(".")
        if path not in self.small or kind == "bias":
            return super().stored(name)
        small = [layer for layer in range(self.layers) if self.is_small(layer)]
        if kind == "weight":
            return [layer for layer in range(self.layers) if layer not in small], name, None
        return small, f"{path}.weight", self.precision.weights if kind == "quantised" else "float32"

    def is_small(self, layer: int) -> bool:
        """Whether a block is one with eight bits."""
        return bool(self.small) and self.precision.first <= layer < self.layers - self.precision.last

    def stretches(self, first: int) -> list[tuple[int, int]]:
        """The blocks from the first on, alike ones together."""
        ends = [self.precision.first, self.layers - self.precision.last] if self.small else []
        ends = sorted({max(first, end) for end in (first, *ends, self.layers)})
        return list(itertools.pairwise(ends))

    def small_linear(self, module, name, array):
        if f"{name}.quantised" not in self.quantised:
            return torch.nn.functional.linear(array, module.weight, module.bias)
        weight, scale = self.quantised[f"{name}.quantised"], self.quantised[f"{name}.scale"]
        array, bias = interop.jax_view((array, module.bias))
        return interop.torch_view(quantised.linear(array, weight, scale, bias, self.precision.activations))

    def use_products(self, product, norm) -> None:
        """Have the large linear layers computed by `product` (kernels/product.py), the first of the feed-forward with
        its GELU, the last of attention and feed-forward with gate and residual; and norms by `norm` (kernels/norm.py).

        Where modulation differs from token to token, XLA keeps norms, gates and residuals."""
        block, norms = self.block, [self.block.attn2.norm_q]
        if block.ffn.net[0].approximate != "tanh":
            raise NotImplementedError(f"a feed-forward with GELU's approximation {block.ffn.net[0].approximate!r}")
        if not self.given_tokens:
            block.forward = self.joining_block
            norms += [block.norm1, block.norm2, block.norm3]
        for module in norms:
            if not isinstance(module, torch.nn.Identity):
                module.forward = functools.partial(normalise, norm, module)
        for name, options in PRODUCTS.items():
            layer = block.get_submodule(name)
            module = block.ffn.net[0] if "gelu" in options else layer
            module.forward = functools.partial(self.linear, product, layer, name, **options)

    def joining_block(self, hidden, text, modulation, rotary):
        """diffusers' block; each branch's last linear layer adds to the residual itself."""
        block = self.block
        rows = (block.scale_shift_table + modulation.float()).unbind(1)
        shift, scale, gate, forward_shift, forward_scale, forward_gate = rows
        normed = block.norm1(hidden, 1 + scale, shift)
        self.joined = {"residual": hidden, "gate": gate}
        hidden = block.attn1(normed, None, None, rotary)
        normed = block.norm2(hidden)
        self.joined = {"residual": hidden.expand(text.shape[0], -1, -1)}  # see same_video
        hidden = block.attn2(normed, text, None, None)
        normed = block.norm3(hidden, 1 + forward_scale, forward_shift)
        self.joined = {"residual": hidden, "gate": forward_gate}
        return block.ffn(normed)

    def linear(self, product, module, name, array, **options):
        (stacked, layer, small), scale = self.at, self.quantised.get(f"{name}.scale")
        if name in LAST:
            options, self.joined = options | self.joined, {}
        array, bias, options = interop.jax_view((array, module.bias, options))
        part = f"{name}.weight" if scale is None else f"{name}.quantised"
        if self.gathered is None:  # read from the stack, of which a slice would be a copy
            weight, layer = stacked[part], self.place(part, layer, small)
        else:
            weight, layer = self.quantised.get(part, module.weight), None
        return interop.torch_view(product(array, interop.jax_view(weight), bias, layer, scale, **options))

    def control_block(self, text, modulation, rotary, layer, control):
        """(hint, control) of one control block. It has no use for the video's tokens beyond those it began with."""
        blocks = self.control_blocks[0]
        weights = self.layer_of(interop.jax_view(dict(blocks.block.named_parameters())), layer)
        return call_module(blocks.block, weights, None, text, control, modulation[: control.shape[0]], rotary)

    def in_groups(self, first, layers, one_block, control_block, state):
        hidden, rescued = state
        control, scales = interop.jax_view(self.control)
        control = interop.jax_view(self.control_blocks[0].proj_in(interop.torch_view(self.pad(control)))) + hidden
        groups = len(scales)
        stride = layers // groups

        def one_group(group, carry):
            state, control = carry
            hint, control = control_block(group, control)
            hidden, rescued = one_block(group * stride, state)
            state = hidden + scales[group] * hint, rescued
            rest = jax.lax.fori_loop(1, stride, lambda place, state: one_block(group * stride + place, state), state)
            return rest, control

        carry = state, control
        if first:
            carry = one_group(0, ((hidden[:1], rescued), control[:1]))
        return jax.lax.fori_loop(first, groups, one_group, carry)[0]

    def pad(self, array):
        """Zeros after the last token."""
        return jnp.pad(array, [(0, 0), (0, -array.shape[1] % self.multiple)] + [(0, 0)] * (array.ndim - 2))


class ControlBlocks(Stacked):
    """VACE's control blocks with stacked weights, and what the first of them does before the others' work."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.proj_in, self.block.proj_in = self.block.proj_in, None


def interleave_control(module: torch.nn.Module) -> None:
    """Have VACE's transformer run its control blocks between the main ones, in place of all of them first."""
    layers, groups = module.blocks[0].layers, len(module.vace_blocks)
    if list(module.config.vace_layers) != list(range(0, layers, layers // groups)):
        raise ConfigError(
            f"model.architecture.transformer.vace_layers={list(module.config.vace_layers)}: not every n-th of {layers} "
            "layers, as a loop needs them; set model.scan_blocks=false"
        )
    module.vace_blocks = torch.nn.ModuleList([ControlBlocks(module.vace_blocks)])
    module.blocks[0].control_blocks.append(module.vace_blocks[0])

    def forward(*arguments, control_hidden_states, control_hidden_states_scale, **named):
        tokens = module.vace_patch_embedding(control_hidden_states).flatten(2).transpose(1, 2)
        module.blocks[0].control = tokens, control_hidden_states_scale
        return diffusers.WanTransformer3DModel.forward(module, *arguments, **named)

    module.forward = forward


def normalise(norm, module: torch.nn.Module, array, scale=None, shift=None):
    """A norm of the block by kernels/norm.py, with the module's weights or what is given in their place."""
    if scale is None:
        scale, shift = (None if row is None else row[None] for row in (module.weight, getattr(module, "bias", None)))
    return interop.call_jax(norm, array, scale, shift, module.eps)


def rescued_rows(module: torch.nn.Module):
    """Rows that the guards of attention computed again in the forward that was just traced, (layers, devices); None
    where its kernels have no guard."""
    if isinstance(module.blocks[0], ScannedBlocks):
        return module.blocks[0].rescued
    here = module.blocks[0].attn1.processor.rescued
    rescued = jnp.stack(here).reshape(len(module.blocks), -1, len(here[0])).sum(axis=1) if here else None
    here.clear()
    return rescued


def keep_residual(module: torch.nn.Module) -> None:
    """Have a transformer give what its blocks add beside its output, or add what it is given in their place."""
    plain, blocks = module.forward, module.blocks[0]

    def forward(*arguments, residual=None, **named):
        blocks.keeps, blocks.reused = True, residual
        (output,) = plain(*arguments, **named)
        return output, blocks.residual

    module.forward = forward


def by_token(rows, given: int, tokens: int):
    """(batch, 2, …) as (batch, tokens, …): the first row for the tokens that are given, the second for the others."""
    if not given:
        return rows
    shape = (1, tokens) + (1,) * (rows.ndim - 2)
    return jnp.where((jnp.arange(tokens) < given).reshape(shape), rows[:, :1], rows[:, 1:])


def give_times_by_token(module: torch.nn.Module, given: int, tokens: int) -> None:
    """Have a transformer take two times, of given tokens and of the others: the embedding of the time is one for every
    token then, as its head wants it. The blocks' modulation stays two rows (ScannedBlocks)."""
    embed = module.condition_embedder.forward

    def forward(*arguments, **named):
        time, *others = embed(*arguments, **named)
        return interop.call_jax(by_token, time, given, tokens), *others

    module.condition_embedder.forward = forward
