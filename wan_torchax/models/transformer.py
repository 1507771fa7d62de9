"""Wan's transformer: its blocks under one loop, its attention through the project's kernels."""
import functools
from dataclasses import dataclass

import diffusers
import jax
import jax.numpy as jnp
import torch

from wan_torchax.config.schema import ConfigError
from wan_torchax.kernels.attention import Attend
from wan_torchax.models.modules import construct
from wan_torchax.patches import call_module, interop


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
                return attend(query, key, value, tables, norms)

        attended = interop.call_jax(in_jax, query, key, attn.to_v(context), tables, norms)
        if pictures is not None:  # a softmax of their own
            key, value = attn.norm_added_k(attn.add_k_proj(pictures)), attn.add_v_proj(pictures)
            attended = attended + interop.call_jax(in_jax, query, key, value)
        return attn.to_out[0](attended)


class ScannedBlocks(torch.nn.Module):
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
    """

    def __init__(self, blocks):
        super().__init__()
        self.block, self.layers = blocks[0], len(blocks)
        self.gathered, self.multiple, self.same_video, self.given_tokens = None, 1, False, 0
        self.spread = None  # how tokens lie on the devices from block to block, where the compiler would not see it
        self.control_blocks, self.control = [], None  # in a list, so that its parameters keep their own names
        self.keeps, self.reused, self.residual = False, None, None  # what the blocks add: kept, or given instead
        self.at = None  # all layers' weights and the number of the one that is traced

    def forward(self, hidden_states, text, modulation, rotary):
        """hidden_states (batch, tokens, channels); rotary: two tables (1, tokens, 1, head_dim)."""
        stacked = interop.jax_view(dict(self.block.named_parameters()))
        tokens = hidden_states.shape[1]
        hidden, *rotary = (self.pad(array) for array in interop.jax_view((hidden_states, *rotary)))
        text, modulation = interop.jax_view((text, modulation))

        def modulate(batch):
            return by_token(modulation[:batch], self.given_tokens, hidden.shape[1])

        def one_block(layer, hidden):
            weights, self.at = self.layer_of(stacked, layer), (stacked, layer)
            if self.spread is not None:
                hidden = jax.lax.with_sharding_constraint(hidden, self.spread)
            return call_module(self.block, weights, hidden, text, modulate(hidden.shape[0]), tuple(rotary))

        first, layers = int(self.same_video and hidden.shape[0] > 1), len(next(iter(stacked.values())))
        before = hidden
        if self.reused is not None:
            hidden = hidden + interop.jax_view(self.reused)
        elif self.control is not None:
            control_block = functools.partial(self.control_block, text, modulation, tuple(rotary))
            hidden = self.in_groups(first, layers, one_block, control_block, hidden)
        else:
            if first:
                hidden = one_block(0, hidden[:1])
            hidden = jax.lax.fori_loop(first, layers, one_block, hidden)
        if self.keeps:
            self.residual = interop.torch_view(hidden - before)
        return interop.torch_view(hidden[:, :tokens])

    def layer_of(self, stacked, layer):
        """The weights of one layer, gathered where that is asked for."""
        weights = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False), stacked)
        return weights if self.gathered is None else jax.lax.with_sharding_constraint(weights, self.gathered)

    def use_products(self, product) -> None:
        """Have the large linear layers computed by `product` (kernels/product.py), the first of the feed-forward with
        its GELU. Values and outputs of attention stand transposed around their kernel: XLA's products take them so."""
        for name in ("attn1.to_q", "attn1.to_k", "attn2.to_q", "ffn.net.2"):
            module = self.block.get_submodule(name)
            module.forward = functools.partial(self.linear, product, module, name)
        module = self.block.get_submodule("ffn.net.0")
        if module.approximate != "tanh":
            raise NotImplementedError(f"a feed-forward with GELU's approximation {module.approximate!r}")
        module.forward = functools.partial(self.linear, product, module.proj, "ffn.net.0.proj", gelu=True)

    def linear(self, product, module, name, array, gelu=False):
        weights, layer = (module.weight, module.bias), None
        if self.gathered is None:  # read from the stack, of which a slice would be a copy
            stacked, layer = self.at
            weights = stacked[f"{name}.weight"], stacked[f"{name}.bias"]
        return interop.torch_view(product(*interop.jax_view((array, *weights)), layer, gelu))

    def control_block(self, text, modulation, rotary, layer, control):
        """(hint, control) of one control block. It has no use for the video's tokens beyond those it began with."""
        blocks = self.control_blocks[0]
        weights = self.layer_of(interop.jax_view(dict(blocks.block.named_parameters())), layer)
        return call_module(blocks.block, weights, None, text, control, modulation[: control.shape[0]], rotary)

    def in_groups(self, first, layers, one_block, control_block, hidden):
        control, scales = interop.jax_view(self.control)
        control = interop.jax_view(self.control_blocks[0].proj_in(interop.torch_view(self.pad(control)))) + hidden
        groups = len(scales)
        stride = layers // groups

        def one_group(group, carry):
            hidden, control = carry
            hint, control = control_block(group, control)
            hidden = one_block(group * stride, hidden) + scales[group] * hint
            rest = jax.lax.fori_loop(1, stride, lambda place, hidden: one_block(group * stride + place, hidden), hidden)
            return rest, control

        carry = hidden, control
        if first:
            carry = one_group(0, (hidden[:1], control[:1]))
        return jax.lax.fori_loop(first, groups, one_group, carry)[0]

    def pad(self, array):
        """Zeros after the last token."""
        return jnp.pad(array, [(0, 0), (0, -array.shape[1] % self.multiple)] + [(0, 0)] * (array.ndim - 2))


class ControlBlocks(torch.nn.Module):
    """VACE's control blocks with stacked weights, and what the first of them does before the others' work."""

    def __init__(self, blocks):
        super().__init__()
        self.proj_in, blocks[0].proj_in = blocks[0].proj_in, None
        self.block, self.layers = blocks[0], len(blocks)


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
