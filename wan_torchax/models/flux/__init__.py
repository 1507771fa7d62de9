"""FLUX.1 dev and schnell: text to image."""
from collections.abc import Iterator

import numpy

from wan_torchax.config.geometry import Geometry
from wan_torchax.models import t5
from wan_torchax.models.family import (
    WRAPPERS,
    ComponentSpec,
    Condition,
    Family,
    TextEncoding,
    VideoCodec,
    lazily,
)
from wan_torchax.models.flux import files
from wan_torchax.models.flux.adapters import NAMES

HERE = "wan_torchax.models.flux"
PATCH = 2  # latent pixels a side of a token
# The blocks' linear layers.
ADAPTED = (
    r"transformer_blocks\.\*\.(norm1(_context)?\.linear|attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
    r"|ff(_context)?\.net\.(0\.proj|2))"
    r"|single_transformer_blocks\.\*\.(norm\.linear|attn\.to_[qkv]|proj_mlp|proj_out)"
)
# What describes the architecture in the config.json of transformers' models.
CLIP_FIELDS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "hidden_act", "layer_norm_eps", "eos_token_id",
})
T5_FIELDS = frozenset({
    "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets",
    "relative_attention_max_distance", "layer_norm_epsilon", "feed_forward_proj",
})


def geometry(architecture) -> Geometry:
    """An image is a video of one frame."""
    vae = architecture["vae"]
    return Geometry(vae["latent_channels"], 1, 2 ** (len(vae["block_out_channels"]) - 1), (1, PATCH, PATCH))


def heads(architecture) -> tuple[int, int]:
    transformer = architecture["transformer"]
    return transformer["num_attention_heads"], transformer["attention_head_dim"]


# ---------------------------------------------------------------- text


def tokenize_for_clip(folders, prompts, tokens, store):
    from wan_torchax.models.tokens import tokenize

    return tokenize(folders["tokenizer"], prompts, tokens, store)[:1]


def tokenize_for_t5(folders, prompts, tokens, store):
    from wan_torchax.models.tokens import tokenize

    return tokenize(folders["tokenizer_2"], prompts, tokens, store)[:1]


def embeddings_shape(config) -> tuple[int, int]:
    return config.model.text_tokens, config.model.architecture.text_encoder_2.d_model


def pooled_shape(config) -> tuple[int]:
    return (config.model.architecture.text_encoder.hidden_size,)


def clip_tokens(config) -> int:
    return config.model.architecture.text_encoder.max_position_embeddings


CONDITIONS = {
    "embeddings": Condition(lambda job: embeddings_shape(job.config), half=True, by_prompt=True),
    "pooled": Condition(lambda job: pooled_shape(job.config), half=True, by_prompt=True),
    # An input of models that were distilled with guidance: one forward pass makes what two did.
    "guidance": Condition(lambda job: (), by_prompt=True, prepare=lambda value, shape: numpy.full(shape, value)),
}


def problems(config) -> Iterator[str]:
    """Mismatches of model and pipeline, and options that the blocks do not have."""
    transformer = config.model.architecture["transformer"]
    given = {value for stage in config.pipeline.stages.values() for value in stage.takes}
    model, pipeline = f"model={config.model.name}", f"pipeline={config.pipeline.name}"
    for value in ("embeddings", "pooled"):
        if value not in given:
            yield f"{model} wants {value}, and {pipeline} gives none; use pipeline=t2i_flux or t2i_flux_guided"
    if bool(transformer.get("guidance_embeds")) != ("guidance" in given):
        is_guided, other = ("takes", "t2i_flux_guided") if "guidance" not in given else ("does not take", "t2i_flux")
        yield f"{pipeline}: {model} {is_guided} the guidance scale as an input; use pipeline={other}"
    channels = geometry(config.model.architecture).channels * PATCH**2
    if transformer["in_channels"] != channels:
        yield f"{model}: the transformer takes {transformer['in_channels']} channels, its VAE's latents give {channels}"
    yield from unserved(config)


def unserved(config) -> Iterator[str]:
    """Options that neither family's blocks have."""
    if config.attention.self.window is not None:
        yield f"attention.self.window={config.attention.self.window}: text and image attend to each other; set null"


# ---------------------------------------------------------------- arithmetic


def flops(config, tokens: int) -> dict[str, int]:
    """FLOPs of one forward pass per prompt, by part."""
    transformer, tokens = config.model.architecture.transformer, tokens + config.model.text_tokens
    width = transformer.num_attention_heads * transformer.attention_head_dim
    double, single = transformer.num_layers, transformer.num_single_layers
    return {
        "projections": (double + single) * 8 * tokens * width**2,
        "feed-forward": (double + single) * 16 * tokens * width**2,
        "self-attention": (double + single) * 4 * tokens**2 * width,
        "cross-attention": 0,
    }


def products(transformer) -> dict[str, tuple[int, int]]:
    """Linear layers by their number and FLOPs per token."""
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    square, wide = 2 * width**2, 8 * width**2
    double = {
        "attn.to_q": square, "attn.to_k": square, "attn.to_v": square, "attn.to_out.0": square,
        "ff.net.0.proj": wide, "ff.net.2": wide,
    }
    single = {
        "attn.to_q": square, "attn.to_k": square, "attn.to_v": square, "proj_mlp": wide, "proj_out": square + wide,
    }
    return {
        f"{stack}.*.{name}": (transformer[count], flops)
        for stack, count, layers in (
            ("transformer_blocks", "num_layers", double), ("single_transformer_blocks", "num_single_layers", single),
        )
        for name, flops in layers.items()
    }


# In the attention kernel's layout.
TRANSPOSED = frozenset({
    "transformer_blocks.*.attn.to_v", "transformer_blocks.*.attn.to_out.0", "single_transformer_blocks.*.attn.to_v",
    "single_transformer_blocks.*.proj_out",
})
GROUPS = {
    "rope": r"/rope/",
    "norms": r"/(norm\w*)/",
    "projections": r"/attn/(to_\w+|add_\w+)",
    "feed-forward": r"/(ff(_context)?|proj_mlp|proj_out)/",
    "attention": r"/attend/",
    "embeddings": r"/(x_embedder|context_embedder|time_(text|guidance)_embed)/",
}
FAMILY = Family(
    name="flux",
    modules=tuple(f"{HERE}.{name}" for name in ("blocks", "vae", "text")),
    components={
        "text_encoder": ComponentSpec(
            lazily(f"{HERE}.text", "build_clip"),
            unused=lambda architecture: (r"embeddings\.position_ids", r"text_projection\.", r"logit_scale"),
            prefix="text_model.", wrappers=("text_encoders.clip_l.transformer.",), beside=("tokenizer",),
            fields=CLIP_FIELDS, landmarks=files.clip_landmarks,
        ),
        "text_encoder_2": ComponentSpec(
            lazily(f"{HERE}.text", "build_t5"), unused=lambda architecture: t5.UNUSED,
            wrappers=("text_encoders.t5xxl.transformer.",), rename=t5.rename, foreign=t5.FOREIGN,
            landmarks=t5.landmarks, beside=("tokenizer_2",), fields=T5_FIELDS,
        ),
        "transformer": ComponentSpec(
            lazily(f"{HERE}.blocks", "build"), stacks=("transformer_blocks", "single_transformer_blocks"),
            wrappers=WRAPPERS, rename=files.rename, foreign=files.FOREIGN, landmarks=files.landmarks,
            adapted=ADAPTED,
        ),
        "vae": ComponentSpec(
            lazily(f"{HERE}.vae", "build"), wrappers=("vae.", "first_stage_model."), rename=files.rename_vae,
            foreign=files.VAE_FOREIGN, landmarks=files.vae_landmarks,
        ),
    },
    geometry=geometry,
    heads=heads,
    denoiser=lazily(f"{HERE}.blocks", "denoiser"),
    conditions=CONDITIONS,
    codec=VideoCodec(
        "vae", lazily(f"{HERE}.vae", "decoder"), r"(decoder|post_quant_conv)\..*",
        lambda vae: 6 * vae["block_out_channels"][1],  # six of the widest activations
    ),
    texts=(
        TextEncoding(
            "text_encoder", clip_tokens, lambda config: {"pooled": pooled_shape(config)}, 1, tokenize_for_clip,
            lazily(f"{HERE}.text", "pool"),
        ),
        TextEncoding(
            "text_encoder_2", lambda config: config.model.text_tokens,
            lambda config: {"embeddings": embeddings_shape(config)}, 1, tokenize_for_t5,
            lazily(f"{HERE}.text", "encode"),
            # Scores of one layer.
            temporaries=lambda config: 16 * config.model.architecture.text_encoder_2.num_heads
            * config.model.text_tokens**2,
        ),
    ),
    norm="head",
    problems=problems,
    flops=flops,
    products=products,
    transposed=TRANSPOSED,
    takes_text=True,
    adapters=NAMES,
    groups=GROUPS,
)
