"""Wan's transformer as functions of its arrays: the blocks, and diffusers' embeddings and head around them.

    forward = denoiser(module, settings)                        # settings: models.family.Forward
    output = forward(arrays, latents, time, conditions)         # inside jax.jit and torchax

A block is self-attention over the video's tokens, cross-attention to the text's (and an image's), and a feed-forward;
each after a norm, the first and the last modulated by the timestep. VACE's control blocks are the same blocks on tokens
of a control video; their hints are added to the main blocks' outputs. Animate adds a pose to the tokens, and after
every fifth block what they take from a face (face.py). In Animate 2 they attend to a driving video's too (driving.py).
VideoX-Fun's models have tokens of a reference behind the video's, and add a camera's rays to these (fun.py);
speech-to-video has those of a reference and of earlier frames there, and after some blocks adds what the video's take
from a voice (voice.py).
"""
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import diffusers
import jax
import jax.numpy as jnp
import numpy
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from wan_torchax.config.schema import ConfigError
from wan_torchax.kernels import sparse
from wan_torchax.kernels.attention import GUARDED, Attend, Kept, OfFrames
from wan_torchax.kernels.settings import TILE
from wan_torchax.models.family import Chunk, Forward, Nag, Output
from wan_torchax.models.loop import Blocks, Layer, no_rows, pad_tokens, plain_norm, token_sharding
from wan_torchax.models.modules import construct
from wan_torchax.models.wan import face, fun, voice
from wan_torchax.patches import call_module

# Of config.json, what says that a checkpoint was trained for sparse attention, or to be driven by a video: what
# diffusers' class does not know.
SPARSE_FIELDS = ("attention_type", "sla_topk")
DRIVING_FIELDS = ("refer_offset_t", "refer_offset_h", "refer_offset_w", "refer_stride")
TRAINED_TIMES = 1000  # the timestep of pure noise
# To the latents' channels, in this order.
CONCATENATED = ("control_latents", "condition", "given_frames", "character_frames")
PICTURES = ("image_embeddings", "character_embeddings")  # of these a pipeline gives one
POSES = {"pose_latents", "skeleton_latents"}  # added to the video's tokens; of these a pipeline gives one


class Context(NamedTuple):
    """Inputs shared by all blocks."""

    text: jax.Array  # (prompts, tokens, channels)
    negative: jax.Array | None  # the same of the negative prompt for each, with NAG
    pictures: jax.Array | None  # the same for image tokens
    modulation: jax.Array  # (batch, 6, channels); with a given frame (batch, 2, 6, channels): its and the others'
    rotary: tuple[jax.Array, jax.Array]  # cosines and sines (tokens, head_dim)
    face: jax.Array | None = None  # (prompts, latent frames, tokens, channels)
    skipped: jax.Array | None = None  # (prompts, layers) true where a block is left out
    dense: jax.Array | None = None  # whether the step attends to all keys, where some steps do not
    driving: dict | None = None  # key and value (layers, 1, tokens, channels) of a driving video
    heard: voice.Voice | None = None
    goes_on: jax.Array | None = None  # 0 where the tokens of earlier frames are not attended to


class Attention(NamedTuple):
    """The attention of blocks."""

    to_video: Attend
    to_text: Attend
    given: range  # tokens at timestep 0: of a given first frame, or of all that stands behind the video
    nag: Nag | None = None
    to_first: Attend | None = None  # to_video in a first segment, without tokens of earlier frames

    @property
    def is_tiled(self) -> bool:
        """Whether the tokens are in the order of VSA's tiles, not of the video."""
        return self.to_video.kernel.sparse.kind == "vsa"

    def tiled(self, array, axis: int):
        return jnp.take(array, sparse.tile_order(self.to_video.grid, TILE), axis) if self.is_tiled else array

    def untiled(self, array, axis: int):
        return jnp.take(array, sparse.video_order(self.to_video.grid, TILE), axis) if self.is_tiled else array


def build(architecture) -> torch.nn.Module:
    trained_for, kind = architecture.get("attention_type", "none"), diffusers.WanTransformer3DModel
    if "vace_layers" in architecture:
        kind = diffusers.WanVACETransformer3DModel
    elif "motion_encoder_size" in architecture:
        kind = diffusers.WanAnimateTransformer3DModel
    others = (*SPARSE_FIELDS, *DRIVING_FIELDS, *fun.FIELDS, *voice.FIELDS)
    module = construct(kind, {name: value for name, value in architecture.items() if name not in others})
    for part in (fun, voice):
        part.add_layers(module, architecture)
    if trained_for != "none":
        with torch.device("meta"):
            for block in module.blocks:
                add_sparse(block, trained_for, module.config)
    return module


def add_sparse(block: torch.nn.Module, kind: str, config) -> None:
    """The layers that checkpoints trained for sparse attention have, and diffusers' classes lack."""
    width = config.num_attention_heads * config.attention_head_dim
    if kind == "sla":
        block.attn1.proj_l = torch.nn.Linear(config.attention_head_dim, config.attention_head_dim)
    elif kind == "vsa":
        block.to_gate_compress = torch.nn.Linear(width, width)
    else:
        raise ConfigError(f"attention_type={kind}: trained for an attention that is not here; has sla, vsa")


def tables(architecture) -> dict[str, numpy.ndarray]:
    """The RoPE tables: buffers computed by the module's constructor, which the meta device skips."""
    settings = build(architecture).config
    rope = WanRotaryPosEmbed(settings.attention_head_dim, settings.patch_size, settings.rope_max_seq_len)
    return {f"rope.{name}": buffer.float().numpy() for name, buffer in rope.named_buffers()}


def denoiser(module, forward: Forward) -> Callable[..., Output]:
    """(arrays, latents (batch, channels, frames, height, width), time, conditions, residual) -> Output. `residual`, the
    blocks' residual of an earlier step, replaces the blocks."""
    forward = replace(forward, architecture={**forward.architecture, **module.config})  # with the class's defaults
    attention = attention_of(forward)

    def velocity(arrays, latents, time, conditions, residual=None) -> Output:
        hidden = patches(arrays, "patch_embedding", joined(latents, conditions))
        for name in POSES & conditions.keys():
            pose = patches(arrays, "pose_patch_embedding", repeated(conditions[name], latents))
            hidden = hidden + jnp.pad(pose, [(0, 0), (hidden.shape[1] - pose.shape[1], 0), (0, 0)])
        if "camera" in conditions:
            hidden = hidden + fun.camera_tokens(arrays, conditions["camera"], forward).astype(hidden.dtype)
        tokens, hidden = hidden.shape[1], attention.tiled(hidden, axis=1)
        if "motion_latents" in conditions:
            hidden = voice.with_behind(functools.partial(patches, arrays), arrays, hidden, conditions)
        elif "reference_latent" in conditions:
            shown = patches(arrays, "ref_conv", conditions["reference_latent"][:, :, 0])
            hidden = jnp.concatenate([hidden, repeated(shown, hidden)], axis=1)
        time, context = embed(module, arrays, forward, attention, time, conditions)
        hidden = pad_tokens(hidden, forward.multiple)
        before = hidden = jax.lax.with_sharding_constraint(
            hidden, token_sharding(forward.mesh, forward.parallel, hidden.shape[0])
        )
        counted = None
        if residual is not None:
            hidden = hidden + residual
        elif "control" in conditions:
            control = repeated(conditions["control"], latents).astype(forward.dtype)
            control = patches(arrays, "vace_patch_embedding", control)
            control = pad_tokens(control, forward.multiple), conditions["conditioning_scale"].astype(forward.dtype)
            hidden, counted = run_controlled(arrays, forward, attention, context, hidden, control)
        else:
            hidden, counted = run_blocks(arrays, forward, attention, context, hidden)
        hidden = jax.lax.with_sharding_constraint(
            hidden, token_sharding(forward.mesh, forward.parallel, hidden.shape[0])
        )
        out = head(arrays, forward, attention.given, hidden[:, :tokens], time)
        out = attention.untiled(out, axis=1)
        return Output(unpatched(out, latents.shape, forward.architecture["patch_size"]), hidden - before, counted)

    return velocity


def attention_of(forward: Forward) -> Attention:
    head_dim, frames = forward.architecture["attention_head_dim"], forward.grid[0]
    place = forward.parallel, forward.mesh
    to_video = Attend(
        head_dim, forward.self_attention, *place, keys=forward.tokens + forward.behind, grid=forward.grid,
        norm_epsilon=forward.architecture["eps"], fillings=forward.fillings,
    )
    given = range(forward.tokens // frames if "first_latent" in forward.conditions else 0)
    to_first = None
    if "motion_latents" in forward.conditions:
        given = range(forward.tokens, forward.tokens + forward.behind)
        to_first = replace(to_video, keys=voice.reference_end(forward.grid))
    to_text = Attend(head_dim, forward.cross_attention, *place, cross=True)
    return Attention(to_video, to_text, given, forward.nag, to_first)


# ---------------------------------------------------------------- embeddings and head


def part_of(arrays: dict, name: str) -> dict:
    """The arrays of a submodule, by their names in it."""
    return {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}


def joined(latents, conditions: dict):
    """The latents, and what conditions add to their channels."""
    channels = [repeated(conditions[name], latents) for name in CONCATENATED if name in conditions]
    return jnp.concatenate([latents, *channels], axis=1)


def repeated(array, like):
    """Repeat a video's condition for every prompt of the batch."""
    return jnp.tile(array, (like.shape[0] // array.shape[0],) + (1,) * (array.ndim - 1))


def patches(arrays: dict, name: str, video):
    """(batch, channels, frames, height, width), or a picture, to tokens (batch, tokens, channels), by a convolution of
    this name whose stride is its kernel. As a product it gives tokens as they lie: XLA would copy those of a
    convolution several times."""
    weight, bias = (arrays[f"{name}.{kind}"] for kind in ("weight", "bias"))
    with jax.named_scope(name):
        counts = [length // size for length, size in zip(video.shape[2:], weight.shape[2:])]
        sizes = list(itertools.chain.from_iterable(zip(counts, weight.shape[2:])))
        whole = (slice(count * size) for count, size in zip(counts, weight.shape[2:]))
        split = video[:, :, *whole].astype(weight.dtype).reshape(*video.shape[:2], *sizes)
        axes = range(2, split.ndim)
        rows = split.transpose(0, *axes[::2], 1, *axes[1::2]).reshape(len(video), math.prod(counts), weight[0].size)
        return jnp.einsum("bti,oi->bto", rows, weight.reshape(len(weight), -1)) + bias


def embed(module, arrays: dict, forward: Forward, attention: Attention, time, conditions) -> tuple[Any, Context]:
    """The timestep embedding, for the head, and the blocks' context."""
    text, named = conditions["embeddings"], {}
    batch = text.shape[0]
    sparse_settings = attention.to_video.kernel.sparse
    dense = jnp.max(time) > sparse_settings.dense_above * TRAINED_TIMES if sparse_settings.is_dense_at_times else None
    if attention.given:
        at_first = time * (1 - conditions["first_given"]) if "first_given" in conditions else jnp.zeros_like(time)
        time, named["timestep_seq_len"] = jnp.stack([at_first, time]), 2
    times = jnp.broadcast_to(time, (batch, *time.shape)).reshape(-1)
    pictures = next((jnp.tile(conditions[name], (batch, 1, 1)) for name in PICTURES if name in conditions), None)
    if "negative_embeddings" in conditions:
        text = jnp.concatenate([text, repeated(conditions["negative_embeddings"], text)])
    time, modulation, text, pictures = call_module(
        module.condition_embedder, part_of(arrays, "condition_embedder"), times, text, pictures, **named
    )
    modulation = modulation.reshape(*modulation.shape[:-1], 6, -1)
    tables = rotary_of(arrays, forward, attention, conditions)
    rotary = tuple(pad_tokens(table[None], forward.multiple)[0] for table in tables)
    negative = text[batch:] if attention.nag else None
    heard = voice.Voice(conditions["audio_tokens"], conditions["audio_whole"]) if "audio_tokens" in conditions else None
    beside = conditions.get("face_embeddings"), conditions.get("skipped"), dense, conditions.get("driving")
    speech = heard, conditions.get("goes_on")
    return time, Context(text[:batch], negative, pictures, modulation, rotary, *beside, *speech)


def rotary_of(arrays: dict, forward: Forward, attention: Attention, conditions) -> list:
    """Cosines and sines (tokens, head_dim) of all tokens. VideoX-Fun's reference is the frame before the video's first.
    """
    if "motion_latents" in conditions:
        places = [tuple(map(numpy.arange, forward.grid)), *voice.motion_places(forward.grid)]
        return [jnp.concatenate([placed(table, forward, place, odd) for place in places])
                for table, odd in ((arrays["rope.freqs_cos"], False), (arrays["rope.freqs_sin"], True))]
    if "reference_latent" not in conditions:
        tables = rotary_tables(arrays, forward, conditions.get("positions"))
        return [attention.tiled(table, axis=0) for table in tables]
    places = numpy.arange(1, forward.grid[0] + 1), numpy.zeros(1, int)
    return list(map(jnp.concatenate, zip(*(rotary_tables(arrays, forward, place) for place in places))))


def rotary_tables(arrays: dict, forward: Forward, positions=None) -> list:
    """Cosines and sines (tokens, head_dim)."""
    tables = (arrays["rope.freqs_cos"], numpy.cos), (arrays["rope.freqs_sin"], numpy.sin)
    return [expanded(slowed(table, wave, forward), forward, positions) for table, wave in tables]


def slowed(table, wave: Callable, forward: Forward):
    """RoPE's table with RIFLEx: one frequency of time, which repeats in a video longer than those of the training, has
    nine tenths of a period in the whole video instead."""
    if forward.riflex is None:
        return table
    frames, first = forward.grid[0], 2 * (forward.riflex - 1)
    positions = numpy.arange(frames + 1)  # with a reference's
    column = wave(positions * 0.9 * 2 * numpy.pi / frames).astype(numpy.float32)
    return table.at[: frames + 1, first : first + 2].set(column[:, None])


def expanded(table, forward: Forward, positions=None):
    """RoPE tables per token (tokens, head_dim) from tables per position along an axis (positions, head_dim): a head's
    channels are split among time, height and width. `positions` are those of the frames; None: from 0 on."""
    places = [slice(first, first + size) for first, size in zip(forward.first_position, forward.grid)]
    return placed(table, forward, (places[0] if positions is None else positions, *places[1:]))


def placed(table, forward: Forward, places: tuple, odd: bool = False):
    """The same from the positions along each axis; of an odd function, a sine, negative ones are negated."""
    head_dim = forward.architecture["attention_head_dim"]
    side = 2 * (head_dim // 6)
    starts = (0, head_dim - 2 * side, head_dim - side, head_dim)
    rows = [table[place if isinstance(place, slice) else jnp.abs(place)] for place in places]
    if odd:
        rows = [one * jnp.where(place < 0, -1, 1)[:, None] for one, place in zip(rows, places)]
    grid, parts = tuple(map(len, rows)), []
    for axis, (one, start, end) in enumerate(zip(rows, starts, starts[1:])):
        shape = [1, 1, 1, end - start]
        shape[axis] = len(one)
        parts.append(jnp.broadcast_to(one[:, start:end].reshape(shape), (*grid, end - start)))
    return jnp.concatenate(parts, axis=-1).reshape(-1, head_dim)


def head(arrays: dict, forward: Forward, given: range, hidden, time):
    """Tokens to patches (batch, tokens, channels · patch)."""
    rows = arrays["scale_shift_table"]  # (1, 2, channels)
    rows = rows + time[:, None] if time.ndim == 2 else rows[:, None] + time[:, :, None]
    shift, scale = jnp.moveaxis(for_tokens(rows, given, hidden.shape[1]), -2, 0)
    with jax.named_scope("norm_out"):
        normed = plain_norm(hidden, 1 + scale, shift, forward.architecture["eps"])
    with jax.named_scope("proj_out"):
        return jnp.einsum("...a,ba->...b", normed, arrays["proj_out.weight"]) + arrays["proj_out.bias"]


def unpatched(tokens, shape, patch):
    """(batch, tokens, channels · patch) to (batch, channels, frames, height, width)."""
    sizes = [size // side for size, side in zip(shape[2:], patch)]
    video = tokens.reshape(tokens.shape[0], *sizes, *patch, -1).transpose(0, 7, 1, 4, 2, 5, 3, 6)
    return video.reshape(*video.shape[:2], *shape[2:])


def for_tokens(rows, given: range, tokens: int):
    """Modulation rows: (batch, rows, channels) unchanged. With a given frame, (batch, 2, rows, channels) expanded to
    (batch, tokens, rows, channels): the first entry for the given tokens, the second for the others.

    Expanded in each block, where XLA fuses it with the modulation: materialized, it would take gigabytes.
    """
    if not given:
        return rows
    places = jnp.arange(tokens).reshape(1, tokens, 1, 1)
    return jnp.where((places >= given.start) & (places < given.stop), rows[:, :1], rows[:, 1:])


# ---------------------------------------------------------------- the blocks


def run_blocks(arrays: dict, forward: Forward, attention: Attention, context: Context, hidden):
    """All blocks on (batch, tokens, channels), and the rescued rows (layers, devices).

    If the batch is one video at one timestep, the first block's self-attention does not depend on the text yet and is
    computed once: the block takes a batch of one and its cross-attention broadcasts it. That saves 1 % of a guided
    step's FLOPs.
    """
    blocks, counted = blocks_of(arrays, forward, "blocks", context.skipped), count_of(forward, attention)
    step = functools.partial(pinned_block, forward, attention, context)
    if context.face is not None:
        step = functools.partial(facing_block, step, forward, blocks_of(arrays, forward, "face_adapter"), context.face)
    if context.heard is not None:
        step = functools.partial(
            hearing_block, step, forward, blocks_of(arrays, forward, "audio_injector"), context.heard,
        )
    first = int(forward.same_video and hidden.shape[0] > 1)
    if first:
        hidden, counted = blocks.step(step, 0 in blocks.eight_bits, 0, (hidden[:1], counted))
    return blocks.run(step, hidden, counted, begin=first)


def chunk_denoiser(module, forward: Forward) -> Callable[..., tuple[Output, Chunk]]:
    """Like denoiser, for a chunk of a video that is made chunk by chunk (models.family.Chunk)."""
    forward = replace(forward, architecture={**forward.architecture, **module.config})  # with the class's defaults
    attention = attention_of(forward)

    def velocity(arrays, latents, time, conditions, chunk: Chunk) -> tuple[Output, Chunk]:
        hidden = patches(arrays, "patch_embedding", joined(latents, conditions))
        conditions = conditions | {"positions": chunk.positions}
        time, context = embed(module, arrays, forward, attention, time, conditions)
        tokens, hidden = hidden.shape[1], pad_tokens(hidden, forward.multiple)
        sharding = token_sharding(forward.mesh, forward.parallel, hidden.shape[0])
        hidden = jax.lax.with_sharding_constraint(hidden, sharding)
        rotary = () if chunk.kept_positions is None else rotary_tables(arrays, forward, chunk.kept_positions)
        kept = Kept(chunk.key, chunk.value, jnp.int32(0), chunk.start, chunk.filling, tuple(rotary))
        blocks, counted = blocks_of(arrays, forward, "blocks"), count_of(forward, attention)
        step = functools.partial(block_of_chunk, attention, context)
        (hidden, kept), counted = blocks.run(step, (hidden, kept), counted)
        out = head(arrays, forward, range(0), hidden[:, :tokens], time)
        output = Output(unpatched(out, latents.shape, forward.architecture["patch_size"]), rescued=counted)
        return output, chunk._replace(key=kept.key, value=kept.value)

    return velocity


def run_controlled(arrays: dict, forward: Forward, attention: Attention, context: Context, hidden, control):
    """Like run_blocks, with tokens of a control video and a scale per control block. Each control block runs just
    before its main block and its hint is added right after it: keeping all hints would take gigabytes."""
    blocks, counted = blocks_of(arrays, forward, "blocks", context.skipped), count_of(forward, attention)
    step = functools.partial(pinned_block, forward, attention, context)
    controls = blocks_of(arrays, forward, "vace_blocks")
    (control, scales), layers = control, list(forward.architecture["vace_layers"])
    control = controls.layer(0, eight_bits=False).linear("proj_in", control) + hidden

    def one_group(begin, size, number, state, control):
        """A control block, its main block, and the main blocks up to the next control block."""
        layer = controls.layer(number, eight_bits=False)
        control, rescued = block(attention, context, layer, control)
        hint = layer.linear("proj_out", control)
        hidden, counted = blocks.step(step, False, begin, state)
        counted = counted if rescued is None else counted.at[begin].add(rescued)
        state = hidden + scales[number] * hint, counted

        def one_more(place, state):
            return blocks.step(step, False, begin + place, state)

        return jax.lax.fori_loop(1, size, one_more, state), control

    sizes = [end - begin for begin, end in itertools.pairwise([*layers, blocks.count])]
    state, first = (hidden, counted), int(forward.same_video and hidden.shape[0] > 1)
    if first:
        state, control = one_group(layers[0], sizes[0], 0, (hidden[:1], counted), control[:1])
    if len(set(sizes)) > 1:  # not every n-th block has a control block
        for number in range(first, len(layers)):
            state, control = one_group(layers[number], sizes[number], number, state, control)
        return state

    def group(number, carry):
        return one_group(number * sizes[0], sizes[0], number, *carry)

    return jax.lax.fori_loop(first, len(layers), group, (state, control))[0]


def blocks_of(arrays: dict, forward: Forward, stack: str, skipped=None) -> Blocks:
    architecture, count = forward.architecture, forward.architecture["num_layers"]
    if stack == "vace_blocks":
        count = len(architecture["vace_layers"])
    elif stack == "face_adapter":
        count //= architecture["inject_face_latents_blocks"]
    elif stack == "audio_injector":
        count = len(architecture["audio_inject_layers"])
    return Blocks.of(arrays, stack, count, forward, epsilon=architecture["eps"], skipped=skipped)


def count_of(forward: Forward, attention: Attention):
    guarded = any(attend.kernel.kernel in GUARDED for attend in (attention.to_video, attention.to_text))
    return no_rows(forward.architecture["num_layers"], forward.mesh, guarded)


def pinned_block(forward: Forward, attention: Attention, context: Context, layer: Layer, hidden):
    """A block, with its tokens' sharding constrained if `forward.pinned`."""
    if forward.pinned:
        hidden = jax.lax.with_sharding_constraint(hidden, token_sharding(forward.mesh, forward.parallel))
    return block(attention, context, layer, hidden)


def facing_block(step: Callable, forward: Forward, adapters: Blocks, tokens, layer: Layer, hidden):
    """A block; after every n-th one, what the tokens take from the face is added."""
    hidden, rescued = step(layer, hidden)
    number, place = divmod(layer.index, forward.architecture["inject_face_latents_blocks"])

    def faced(hidden):
        with jax.named_scope("face"):
            return hidden + face.attend(adapters.layer(number, eight_bits=False), hidden, tokens, forward.grid)

    if isinstance(place, int):
        return hidden if place else faced(hidden), rescued
    return jax.lax.cond(place == 0, faced, lambda same: same, hidden), rescued


def hearing_block(step: Callable, forward: Forward, injectors: Blocks, heard: voice.Voice, layer: Layer, hidden):
    """A block; after some, what the video's tokens take from a voice is added."""
    hidden, rescued = step(layer, hidden)
    numbers = numpy.full(forward.architecture["num_layers"], -1)
    numbers[forward.architecture["audio_inject_layers"]] = numpy.arange(injectors.count)

    def spoken(hidden):
        injector = injectors.layer(jnp.asarray(numbers)[layer.index], eight_bits=False)
        with jax.named_scope("voice"):
            taken = voice.attend(injector, hidden, heard, forward.grid, forward.architecture["attention_head_dim"])
            return hidden + taken.astype(hidden.dtype)

    if isinstance(layer.index, int):
        return spoken(hidden) if numbers[layer.index] >= 0 else hidden, rescued
    return jax.lax.cond(jnp.asarray(numbers)[layer.index] >= 0, spoken, lambda same: same, hidden), rescued


def block(attention: Attention, context: Context, layer: Layer, hidden):
    """(hidden, rescued) of one block on hidden (batch, tokens, channels)."""
    (hidden, _), rescued = block_of_chunk(attention, context, layer, (hidden, None))
    return hidden, rescued


def block_of_chunk(attention: Attention, context: Context, layer: Layer, carry):
    """The same with what is kept of earlier chunks (kernels.attention.Kept), or None: ((hidden, kept), rescued)."""
    hidden, _ = carry
    rows = layer["scale_shift_table"] + context.modulation[: hidden.shape[0]].astype(jnp.float32)
    rows = for_tokens(rows, attention.given, hidden.shape[1])
    shift, scale, gate, forward_shift, forward_scale, forward_gate = jnp.moveaxis(rows, -2, 0)
    normed = layer.norm("norm1", hidden, 1 + scale, shift)
    (hidden, kept), counts = attend_to_video(attention, context, layer, normed, carry, gate)
    normed = hidden
    if "norm2.weight" in layer:
        normed = layer.norm("norm2", hidden, layer["norm2.weight"][None], layer["norm2.bias"][None])
    hidden, more = attend_to_text(attention, context, layer, normed, hidden)
    normed = layer.norm("norm3", hidden, 1 + forward_scale, forward_shift)
    wide = layer.linear("ffn.net.0.proj", normed, gelu=True, kernel=True)
    hidden = layer.linear("ffn.net.2", wide, residual=hidden, gate=forward_gate, kernel=True)
    rescued = [count for count in (*counts, *more) if count is not None]
    return (hidden, kept), sum(rescued) if rescued else None


def attend_to_video(attention: Attention, context: Context, layer: Layer, normed, carry, gate):
    hidden, kept = carry
    query, key = (layer.linear(f"attn1.to_{name}", normed, kernel=True) for name in "qk")
    value = layer.linear("attn1.to_v", normed, kernel=True, transpose_out=True)
    norms = [layer[f"attn1.norm_{name}.weight"] for name in "qk"]
    branch = [layer[f"attn1.proj_l.{part}"] for part in ("weight", "bias") if f"attn1.proj_l.{part}" in layer]
    if context.dense is not None:
        branch = [context.dense | (layer.index < attention.to_video.kernel.sparse.dense_layers)]
    others = context.driving and OfFrames(**context.driving, layer=jnp.int32(layer.index))
    with jax.named_scope("attn1/attend"):
        if context.goes_on is not None:
            arguments = query, key, value, context.rotary, norms
            attends = [functools.partial(one.counted, *arguments) for one in (attention.to_video, attention.to_first)]
            out, rescued = jax.lax.cond(context.goes_on > 0, *attends)
        elif kept is None:
            more = {"branch": branch, "others": others, "in_pieces": layer.takes_pieces("attn1.to_out.0")}
            out, rescued = attention.to_video.counted(query, key, value, context.rotary, norms, **more)
        else:
            kept = kept._replace(layer=jnp.int32(layer.index))
            out, rescued, kept = attention.to_video.chunk(query, key, value, context.rotary, norms, kept)
    if attention.is_tiled:
        lists, coarse = out
        tiles = sparse.Blocks.tiles(attention.to_video.grid, TILE).numbers(lists.shape[1])
        out = lists + coarse[:, tiles] * layer.linear("to_gate_compress", normed, kernel=True)
    hidden = layer.linear("attn1.to_out.0", out, residual=hidden, gate=gate, kernel=True, transpose_in=True)
    return (hidden, kept), [rescued]


def attend_to_text(attention: Attention, context: Context, layer: Layer, normed, hidden):
    """Cross-attention to the text's tokens, and with a separate softmax to image tokens."""
    query = layer.rms_norm("attn2.norm_q", layer.linear("attn2.to_q", normed, kernel=True))
    batch = context.text.shape[0]  # one video, several prompts: see run_blocks
    query = jnp.broadcast_to(query, (batch, *query.shape[1:]))
    hidden = jnp.broadcast_to(hidden, (batch, *hidden.shape[1:]))

    def attend(tokens, key, value, norm):
        key, value = text_norm(layer, norm, layer.linear(key, tokens)), layer.linear(value, tokens)
        with jax.named_scope("attn2/attend"):
            return attention.to_text.counted(query, key, value)

    out, rescued = attend(context.text, "attn2.to_k", "attn2.to_v", "attn2.norm_k")
    counts = [rescued]
    if context.negative is not None:
        away, rescued = attend(context.negative, "attn2.to_k", "attn2.to_v", "attn2.norm_k")
        out, counts = pushed(attention.nag, out, away), [*counts, rescued]
    if context.pictures is not None:
        more, rescued = attend(context.pictures, "attn2.add_k_proj", "attn2.add_v_proj", "attn2.norm_added_k")
        out, counts = out + more, [*counts, rescued]
    return layer.linear("attn2.to_out.0", out, residual=hidden, kernel=True, transpose_in=True), counts


def pushed(nag: Nag, prompt, negative):
    """The prompt's attention (batch, tokens, channels), pushed away from the negative prompt's and not far: NAG (arXiv
    2505.21179). Lengths are sums of magnitudes over channels."""
    own, negative = prompt.astype(jnp.float32), negative.astype(jnp.float32)
    far = nag.scale * own - (nag.scale - 1) * negative
    length, most = jnp.abs(far).sum(-1, keepdims=True), nag.limit * jnp.abs(own).sum(-1, keepdims=True)
    near = far * jnp.where(length > most, most / (length + 1e-7), 1)
    return (nag.share * near + (1 - nag.share) * own).astype(prompt.dtype)


def text_norm(layer: Layer, name: str, array):
    """The RMS norm of the text's keys: too few to need a kernel."""
    with jax.named_scope(name.replace(".", "/")):
        return plain_norm(array, layer[f"{name}.weight"][None], None, layer.blocks.epsilon)


