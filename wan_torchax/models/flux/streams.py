"""What the FLUX transformers share: two stacks of blocks on text and image tokens, packed latents, RoPE over axes.

Double blocks have weights of their own for text and image, which attend together; single blocks take both as one
sequence, and compute attention and feed-forward side by side.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy

from wan_torchax.devices.sharding import ways
from wan_torchax.kernels.attention import GUARDED, Attend
from wan_torchax.kernels.product import Target
from wan_torchax.kernels.rotary import Turn, normalized
from wan_torchax.models.family import Forward, Output
from wan_torchax.models.loop import Blocks, Layer, no_rows, pad_tokens, plain_norm, token_sharding

EPSILON = 1e-6  # of all norms
DOUBLE, SINGLE = "transformer_blocks", "single_transformer_blocks"  # the stacks


class Context(NamedTuple):
    """Inputs shared by all blocks."""

    attend: Attend
    rotary: tuple  # cosines and sines (tokens, head_dim) of both streams' tokens as one sequence, for attention
    tables: tuple  # or for linear layers to apply, after the QK norms: of the text, of the image, of both as one
    texts: int  # tokens of the text
    parts: int  # of the sequence of text and image, see `joined`
    divides: bool  # whether each device that shares tokens has one of these
    modulation: Any  # what the model's blocks are modulated with; FLUX.1: by norm (layers, batch, count · channels)

    def placed(self, array, channels: str | None = None):
        """(batch, tokens, channels) or (batch, channels) as devices share prompts and tokens; channels over a mesh
        axis, or whole."""
        mesh = self.attend.mesh
        batch, *tokens = token_sharding(mesh, self.attend.parallel, len(array)).spec
        spec = jax.sharding.PartitionSpec(batch, *tokens[: array.ndim - 2], channels)
        return jax.lax.with_sharding_constraint(array, jax.sharding.NamedSharding(mesh, spec))

    def rows(self, name: str, index, count: int):
        """Of one block and norm, (batch, channels) each."""
        return jnp.split(jax.lax.dynamic_index_in_dim(self.modulation[name], index, keepdims=False), count, axis=-1)


class Names(NamedTuple):
    """The layers of a stream's attention in a double block."""

    projections: tuple[str, str, str]  # query, key and value
    norms: tuple[str, str]  # of query and key
    out: str


TEXT = Names(
    ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), ("attn.norm_added_q", "attn.norm_added_k"),
    "attn.to_add_out",
)
IMAGE = Names(("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.norm_q", "attn.norm_k"), "attn.to_out.0")


def denoiser(
    forward: Forward, patch: int, tables: Callable, embed: Callable, double: Callable, single: Callable
) -> Callable[..., Output]:
    """(arrays, latents (batch, channels, 1, height, width), time, conditions, residual) -> Output. `residual`, the
    blocks' residual of an earlier step, replaces the blocks.

    tables   () -> RoPE of the text's and of the image's tokens; traced, as constants they would be most of the program
    embed    (arrays, time, conditions) -> (time after its SiLU, (batch, channels), what modulates the blocks)
    double   (context, layer, (text, image)) -> ((text, image), rescued rows)
    single   (context, layer, tokens of both) -> (tokens, rescued rows)
    """
    parts, texts = parts_of(forward), forward.text_tokens
    attend = Attend(
        forward.architecture["attention_head_dim"], forward.self_attention, forward.parallel, forward.mesh,
        keys=texts + forward.tokens, norm_epsilon=EPSILON, grid=forward.grid,
    )

    def velocity(arrays, latents, time, conditions, residual=None) -> Output:
        sharding = token_sharding(forward.mesh, forward.parallel, len(latents))
        text, image = (
            jax.lax.with_sharding_constraint(linear(arrays, name, array.astype(forward.dtype)), sharding)
            for name, array in (("context_embedder", conditions["embeddings"]), ("x_embedder", packed(latents, patch)))
        )
        time, modulation = embed(arrays, time, conditions)
        before, counted = image, None
        if residual is not None:
            image = image + residual[:, : forward.tokens]
        else:
            own, other = tables()
            both = tuple(joined(first[None], second[None], parts)[0] for first, second in zip(own, other))
            placed = ((), (own, other, both)) if forward.products.kernel == "pallas" else (both, ())
            divides = parts == ways(forward.parallel.token_axes, forward.mesh)
            context = Context(attend, *placed, texts, parts, divides, modulation)
            image, counted = run_blocks(arrays, forward, context, (double, single), (text, image))
        velocity = unpacked(head(arrays, image, time), latents.shape, patch)
        return Output(velocity, pad_tokens(image - before, forward.multiple), counted)

    return velocity


def run_blocks(arrays: dict, forward: Forward, context: Context, blocks: tuple[Callable, Callable], both):
    """The image's tokens after all blocks, and the rescued rows (layers, devices)."""
    guarded, counts = context.attend.kernel.kernel in GUARDED, []

    def run(stack: str, layers: int, block: Callable, carry: Any):
        stacked = Blocks.of(arrays, stack, layers, forward, epsilon=EPSILON)

        def pinned(layer, carry):
            """A block, with its tokens' sharding constrained: XLA would share their channels as the modulation's."""
            return block(context, layer, jax.tree.map(context.placed, carry))

        carry, counted = stacked.run(pinned, carry, no_rows(layers, forward.mesh, guarded))
        counts.append(counted)
        return carry

    double, single = blocks
    text, image = run(DOUBLE, forward.architecture["num_layers"], double, both)
    tokens = joined(text, image, context.parts)
    tokens = run(SINGLE, forward.architecture["num_single_layers"], single, tokens)
    _, image = parted(context.placed(tokens), context.texts, context.parts)
    return image, jnp.concatenate(counts) if guarded else None


def attend_together(context: Context, layer: Layer, normed):
    """((text, image), rescued) of a double block's attention on both streams (batch, tokens, channels)."""
    text, image = normed

    def together(place: int):
        """The image's tokens and the text's, written into one array where linear layers can."""
        tables = context.tables or [()] * 2
        if not context.tables or not context.divides:
            of_text, of_image = (
                project(layer, names, place, *given) for names, *given in zip((TEXT, IMAGE), normed, tables)
            )
            return joined(of_text, of_image, context.parts)
        images = image.shape[1] // context.parts
        target = Target(0, images + context.texts // context.parts, context.parts)
        target = target._replace(first=images, into=project(layer, IMAGE, place, image, tables[1], target))
        return project(layer, TEXT, place, text, tables[0], target)

    query, key, value = map(together, range(3))
    with jax.named_scope("attn/attend"):
        out, rescued = context.attend.counted(query, key, value, context.rotary)
    return parted(out, context.texts, context.parts), rescued


def project(layer: Layer, names: Names, place: int, normed, tables=(), target=None):
    """A stream's query, key or value: the first two with their norm, as each stream has its own, and with RoPE if
    tables are given; the last in the attention kernel's layout."""
    name = names.projections[place]
    if place == 2:
        return layer.linear(name, normed, kernel=True, transpose_out=True, target=target)
    weight = layer[f"{names.norms[place]}.weight"]
    if tables:
        return layer.linear(name, normed, kernel=True, turn=Turn(weight, *tables, EPSILON), target=target)
    out = layer.linear(name, normed)
    return normalized(out.astype(jnp.float32), weight, EPSILON).reshape(out.shape).astype(out.dtype)


def part_of(arrays: dict, name: str) -> dict:
    """The arrays of a submodule, by their names in it."""
    return {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}


def linear(arrays: dict, name: str, array):
    """A linear layer outside the blocks, with or without a bias."""
    out = jnp.einsum("...a,ba->...b", array, arrays[f"{name}.weight"])
    return out + arrays[f"{name}.bias"] if f"{name}.bias" in arrays else out


def over_heads(context: Context, array):
    """(batch, tokens, channels) with the channels shared as heads are: a product with part of a weight that every
    device has whole is then computed by all, each its share."""
    return context.placed(array, context.attend.parallel.heads)


# ---------------------------------------------------------------- latents and tokens


def packed(latents, patch: int):
    """(batch, channels, 1, height, width) to tokens (batch, tokens, channels · patch²), row by row."""
    batch, channels, _, height, width = latents.shape
    folded = latents.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return folded.transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def unpacked(tokens, shape, patch: int):
    """The inverse: tokens to (batch, channels, 1, height, width)."""
    batch, _, _, height, width = shape
    folded = tokens.reshape(batch, height // patch, width // patch, -1, patch, patch)
    return folded.transpose(0, 3, 1, 4, 2, 5).reshape(batch, -1, 1, height, width)


def head(arrays: dict, hidden, time):
    """Image tokens (batch, tokens, channels) to patches; time (batch, channels), after its SiLU."""
    scale, shift = jnp.split(linear(arrays, "norm_out.linear", time), 2, axis=-1)
    return linear(arrays, "proj_out", plain_norm(hidden, 1 + scale, shift, EPSILON))


# ---------------------------------------------------------------- text and image as one sequence


def parts_of(forward: Forward) -> int:
    """How many parts the sequence of both has: one for each device that shares tokens, which then holds its share of
    the text and of the image, so that joining them moves nothing; one if they do not divide."""
    shards = ways(forward.parallel.token_axes, forward.mesh)
    return 1 if forward.text_tokens % shards or forward.tokens % shards else shards


def joined(text, image, parts: int):
    """(batch, tokens, width) of both as one: in each part first the image's tokens, then the text's, which are fewer:
    theirs begin where a block of them can. Attention takes tokens in any order, with RoPE tables in the same one."""
    streams = [array.reshape(len(array), parts, -1, array.shape[-1]) for array in (image, text)]
    return jnp.concatenate(streams, axis=2).reshape(len(text), -1, text.shape[-1])


def parted(tokens, texts: int, parts: int):
    """The inverse: (text, image)."""
    split = tokens.reshape(len(tokens), parts, -1, tokens.shape[-1])
    streams = jnp.split(split, [split.shape[2] - texts // parts], axis=2)
    image, text = (array.reshape(len(tokens), -1, tokens.shape[-1]) for array in streams)
    return text, image


# ---------------------------------------------------------------- RoPE


def rotary(grid: tuple[int, ...], sizes: tuple[int, ...], theta: float):
    """Cosines and sines (tokens, head_dim) float32 of the tokens of a grid; a head's channels are split among its axes.
    Angles are computed in float64, as in diffusers."""
    tables = []
    for wave in (numpy.cos, numpy.sin):
        columns = []
        for axis, (count, size) in enumerate(zip(grid, sizes)):
            angles = numpy.arange(count)[:, None] * theta ** -(numpy.arange(0, size, 2) / size)
            shape = [1] * len(grid) + [size]
            shape[axis] = count
            values = numpy.repeat(wave(angles), 2, axis=1).astype(numpy.float32).reshape(shape)
            columns.append(jnp.broadcast_to(values, (*grid, size)))
        tables.append(jnp.concatenate(columns, axis=-1).reshape(-1, sum(sizes)))
    return tables
