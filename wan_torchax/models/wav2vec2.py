"""wav2vec 2.0, an encoder of speech whose layers' inputs are features of a sound. Imports torch and transformers.

    hidden = encode(arrays, config, samples, count)     # (layers + 1, tokens, width), 50 tokens a second

The large kind, with layer norms in its convolutions and before each attention. What lies past `count` samples is
padding: it changes nothing, so one program serves all sounds of up to a length.
"""
import functools

import jax
import jax.numpy as jnp
import torch
import transformers

from wan_torchax.models.loop import plain_norm

QUERIES = 1024  # that are attended with at a time: the scores of minutes would fill the memory
CONV_EPSILON = 1e-5
POSITIONS = "encoder.pos_conv_embed.conv"
OWN = dict(feat_extract_norm="layer", do_stable_layer_norm=True, feat_extract_activation="gelu", hidden_act="gelu")


def build(architecture) -> torch.nn.Module:
    with torch.device("meta"):
        config = transformers.Wav2Vec2Config(**architecture, **OWN, mask_time_prob=0.0, mask_feature_prob=0.0)
        return transformers.Wav2Vec2Model(config).eval()


def features(module, arrays: dict, samples, count):
    return encode(arrays, module.config, samples, count)


def token_count(samples, config):
    """How many tokens so many samples have: convolutions have no padding."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride):
        samples = (samples - kernel) // stride + 1
    return samples


def encode(arrays: dict, config, samples, count):
    """Float32 samples, of which `count` are the sound, to the inputs of every layer and the last one's output."""
    hidden = samples[None, :, None]
    for number, stride in enumerate(config.conv_stride):
        name = f"feature_extractor.conv_layers.{number}"
        hidden = convolved(arrays, f"{name}.conv", hidden, stride)
        hidden = jax.nn.gelu(normed(arrays, f"{name}.layer_norm", hidden, CONV_EPSILON), approximate=False)
    valid = jnp.arange(hidden.shape[1]) < token_count(count, config)
    norm = functools.partial(normed, arrays, epsilon=config.layer_norm_eps)
    hidden = linear(arrays, "feature_projection.projection", norm("feature_projection.layer_norm", hidden))
    hidden = jnp.where(valid[:, None], hidden, 0)
    hidden, seen = hidden + jax.nn.gelu(positions(arrays, config, hidden), approximate=False), []
    for number in range(config.num_hidden_layers):
        name, seen = f"encoder.layers.{number}", [*seen, hidden]
        attended = attention(arrays, f"{name}.attention", norm(f"{name}.layer_norm", hidden), valid, config)
        hidden = hidden + attended
        wide = linear(arrays, f"{name}.feed_forward.intermediate_dense", norm(f"{name}.final_layer_norm", hidden))
        wide = jax.nn.gelu(wide, approximate=False)
        hidden = hidden + linear(arrays, f"{name}.feed_forward.output_dense", wide)
    return jnp.concatenate([*seen, norm("encoder.layer_norm", hidden)])


def positions(arrays: dict, config, hidden):
    """A convolution over many tokens, its weight stored as lengths and directions."""
    length, direction = (arrays[f"{POSITIONS}.parametrizations.weight.original{part}"] for part in "01")
    weight = length * direction / jnp.sqrt((direction**2).sum((0, 1), keepdims=True))
    kernel, groups = weight.shape[2], config.num_conv_pos_embedding_groups
    sides = [(kernel // 2, kernel // 2 - (kernel % 2 == 0))]
    out = jax.lax.conv_general_dilated(
        hidden, weight, (1,), sides, dimension_numbers=("NWC", "OIW", "NWC"), feature_group_count=groups,
    )
    return out + arrays[f"{POSITIONS}.bias"]


def attention(arrays: dict, name: str, hidden, valid, config):
    heads = config.num_attention_heads
    query, key, value = (
        linear(arrays, f"{name}.{part}_proj", hidden)[0].reshape(hidden.shape[1], heads, -1) for part in "qkv"
    )

    def attend(queries):
        scores = jnp.einsum("qhc,khc->hqk", queries, key) / jnp.sqrt(queries.shape[-1])
        return jnp.einsum("hqk,khc->qhc", jax.nn.softmax(jnp.where(valid, scores, -jnp.inf)), value)

    padded = jnp.pad(query, [(0, -len(query) % QUERIES), (0, 0), (0, 0)])
    out = jax.lax.map(attend, padded.reshape(-1, QUERIES, *query.shape[1:])) if len(query) > QUERIES else attend(query)
    return linear(arrays, f"{name}.out_proj", out.reshape(1, -1, hidden.shape[2])[:, : len(query)])


def convolved(arrays: dict, name: str, hidden, stride: int):
    layout = ("NWC", "OIW", "NWC")
    out = jax.lax.conv_general_dilated(hidden, arrays[f"{name}.weight"], (stride,), "VALID", dimension_numbers=layout)
    return out + arrays[f"{name}.bias"] if f"{name}.bias" in arrays else out


def linear(arrays: dict, name: str, hidden):
    return jnp.einsum("...a,ba->...b", hidden, arrays[f"{name}.weight"]) + arrays[f"{name}.bias"]


def normed(arrays: dict, name: str, hidden, epsilon: float):
    return plain_norm(hidden, arrays[f"{name}.weight"][None], arrays[f"{name}.bias"][None], epsilon)
