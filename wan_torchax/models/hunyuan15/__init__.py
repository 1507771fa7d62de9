"""HunyuanVideo 1.5: text and image to video."""
from collections.abc import Iterator

from wan_torchax.config.geometry import Geometry
from wan_torchax.models import qwen, t5, vit
from wan_torchax.models.family import (
    WRAPPERS,
    ComponentSpec,
    Condition,
    Family,
    LatentEncoding,
    PictureEncoding,
    TextEncoding,
    VideoCodec,
    lazily,
)
from wan_torchax.models.hunyuan15 import files, prompts
from wan_torchax.models.hunyuan15.adapters import NAMES

HERE = "wan_torchax.models.hunyuan15"
# What describes the architecture in the config.json of transformers' models.
QWEN_FIELDS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "rope_theta",
})
T5_FIELDS = frozenset({
    "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets",
    "relative_attention_max_distance", "layer_norm_epsilon", "feed_forward_proj",
})
SIGLIP_FIELDS = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size",
    "patch_size", "hidden_act", "layer_norm_eps",
})
TEXTS = ("embeddings", "counts", "glyphs", "glyph_counts")
# The blocks' linear layers.
ADAPTED = (
    r"transformer_blocks\.\*\.(norm1(_context)?\.linear|attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
    r"|ff(_context)?\.net\.(0\.proj|2))"
)


def geometry(architecture) -> Geometry:
    vae = architecture["vae"]
    scales = vae["temporal_compression_ratio"], vae["spatial_compression_ratio"]
    return Geometry(vae["latent_channels"], *scales, (1, 1, 1))


def heads(architecture) -> tuple[int, int]:
    transformer = architecture["transformer"]
    return transformer["num_attention_heads"], transformer["attention_head_dim"]


def taken(config) -> set[str]:
    """The values that stages of the pipeline take."""
    return {value for stage in config.pipeline.stages.values() for value in stage.takes}


# ---------------------------------------------------------------- conditions


def text_shapes(config) -> dict[str, tuple[int, ...]]:
    return {"embeddings": (config.model.text_tokens, config.model.architecture.text_encoder.hidden_size), "counts": ()}


def glyph_shapes(config) -> dict[str, tuple[int, ...]]:
    width = config.model.architecture.text_encoder_2.d_model
    return {"glyphs": (prompts.GLYPH_TOKENS, width), "glyph_counts": ()}


def image_tokens(config) -> int:
    encoder = config.model.architecture.image_encoder
    return (encoder.image_size // encoder.patch_size) ** 2


def image_shape(config) -> tuple[int, int]:
    return image_tokens(config), config.model.architecture.image_encoder.hidden_size


def image_pixels(config) -> tuple[int, int, int]:
    return 3, *[config.model.architecture.image_encoder.image_size] * 2


def text_scores(config) -> float:
    """Bytes of one layer's scores in Qwen."""
    tokens = prompts.CROPPED + config.model.text_tokens
    return 16 * config.model.architecture.text_encoder.num_attention_heads * tokens**2


def beside(config) -> int:
    """Tokens of prompt, glyphs and image in joint attention."""
    image = image_tokens(config) if "image_embeddings" in taken(config) else 0
    return config.model.text_tokens + prompts.GLYPH_TOKENS + image


def condition_shape(job) -> tuple[int, ...]:
    """The first frame's latents, and a mask."""
    batch, channels, *sizes = job.latent_shape
    return batch, channels + 1, *sizes


CONDITIONS = {
    "embeddings": Condition(lambda job: text_shapes(job.config)["embeddings"], half=True, by_prompt=True),
    "counts": Condition(lambda job: (), by_prompt=True),
    "glyphs": Condition(lambda job: glyph_shapes(job.config)["glyphs"], half=True, by_prompt=True),
    "glyph_counts": Condition(lambda job: (), by_prompt=True),
    "image_embeddings": Condition(lambda job: (1, *image_shape(job.config)), half=True),
    "condition": Condition(condition_shape),
}


def problems(config) -> Iterator[str]:
    """Mismatches between the transformer's inputs and what the pipeline provides."""
    transformer, given = config.model.architecture["transformer"], taken(config)
    model, pipeline = f"model={config.model.name}", f"pipeline={config.pipeline.name}"
    channels, key = geometry(config.model.architecture).channels, "model.architecture.transformer"
    for name in ("patch_size", "patch_size_t"):
        if transformer.get(name, 1) != 1:
            yield f"{key}.{name}={transformer[name]}: a token of HunyuanVideo 1.5 is one latent pixel; 1"
    if transformer["in_channels"] != 2 * channels + 1:
        yield f"{key}.in_channels={transformer['in_channels']}: with this VAE it is {2 * channels + 1}"
    pictured = {"condition", "image_embeddings"} & given
    if not given.issuperset(TEXTS) or len(pictured) == 1:
        yield f"{pipeline}: does not give {model} what it takes; use pipeline=t2v_hunyuan15 or i2v_hunyuan15"


# ---------------------------------------------------------------- arithmetic


def widths(transformer) -> tuple[int, int]:
    """Channels of a token, and of the feed-forward."""
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    return width, int(width * transformer["mlp_ratio"])


def products(transformer) -> dict[str, tuple[int, int]]:
    """Linear layers that a kernel can compute: number of blocks and FLOPs per token."""
    width, wide = widths(transformer)
    square = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    flops = dict.fromkeys(square, 2 * width**2) | dict.fromkeys(("ff.net.0.proj", "ff.net.2"), 2 * width * wide)
    return {f"transformer_blocks.*.{name}": (transformer["num_layers"], count) for name, count in flops.items()}


def flops(config, tokens: int) -> dict[str, int]:
    """FLOPs of one forward pass per prompt, by part, as if all tokens of the text were valid."""
    transformer, text = config.model.architecture.transformer, beside(config)
    (width, wide), layers = widths(transformer), transformer.num_layers
    return {
        "projections": layers * 8 * (tokens + text) * width**2,
        "feed-forward": layers * 4 * (tokens + text) * width * wide,
        "self-attention": layers * 4 * (tokens + text) ** 2 * width,
        "cross-attention": 0,
    }


FAMILY = Family(
    name="hunyuan15",
    modules=tuple(f"{HERE}.{name}" for name in ("blocks", "vae", "text", "image")),
    components={
        "text_encoder": ComponentSpec(
            lazily(f"{HERE}.text", "build"), unused=lazily(f"{HERE}.text", "unused"), prefix=qwen.PREFIX,
            rename=qwen.rename, foreign=qwen.FOREIGN, respell=qwen.respell, landmarks=qwen.landmarks,
            beside=("tokenizer",), fields=QWEN_FIELDS,
        ),
        "text_encoder_2": ComponentSpec(
            lazily(f"{HERE}.text", "build_glyphs"), unused=lambda architecture: t5.UNUSED, rename=t5.rename,
            foreign=t5.FOREIGN, landmarks=t5.landmarks, fields=T5_FIELDS,
        ),
        "image_encoder": ComponentSpec(
            lazily(f"{HERE}.image", "build"), unused=lambda architecture: (r"head\.", r"embeddings\.position_ids"),
            prefix="vision_model.", landmarks=vit.landmarks, beside=("feature_extractor",), fields=SIGLIP_FIELDS,
        ),
        "transformer": ComponentSpec(
            lazily(f"{HERE}.blocks", "build"), ("transformer_blocks",), wrappers=WRAPPERS, rename=files.rename,
            landmarks=files.landmarks, adapted=ADAPTED,
        ),
        "vae": ComponentSpec(
            lazily(f"{HERE}.vae", "build"), wrappers=("vae.",), rename=files.rename_vae, foreign=files.VAE_FOREIGN,
            landmarks=files.vae_landmarks,
        ),
    },
    geometry=geometry,
    heads=heads,
    denoiser=lazily(f"{HERE}.blocks", "denoiser"),
    conditions=CONDITIONS,
    codec=VideoCodec(
        # Six of the widest activations, and the convolutions' caches, as many values again.
        "vae", lazily(f"{HERE}.vae", "decoder"), r"decoder\..*", lambda vae: 13 * vae["block_out_channels"][0],
        lazily(f"{HERE}.vae", "encoder"), r"encoder\..*", lambda vae: 11 * vae["block_out_channels"][0],
        settings=("resolution.frames",),  # of the attention's buffer
    ),
    texts=(
        TextEncoding(
            "text_encoder", lambda config: prompts.CROPPED + config.model.text_tokens, text_shapes, 2, prompts.tokenize,
            lazily(f"{HERE}.text", "encode"), temporaries=text_scores,
        ),
        TextEncoding(
            "text_encoder_2", lambda config: prompts.GLYPH_TOKENS, glyph_shapes, 2, prompts.tokenize_glyphs,
            lazily(f"{HERE}.text", "encode_glyphs"),
        ),
    ),
    pictures={
        "image_embeddings": PictureEncoding(
            "image_encoder", image_shape, image_pixels, lazily(f"{HERE}.conditions", "check"),
            lazily(f"{HERE}.conditions", "read"), lazily(f"{HERE}.image", "encode"),
            # A few copies of the widest layer.
            lambda config: 16 * image_tokens(config) * config.model.architecture.image_encoder.intermediate_size,
            settings=("resolution.height", "resolution.width", "fit"),
        ),
    },
    encodings={
        "condition": LatentEncoding(condition_shape, lambda job: 1, lazily(f"{HERE}.conditions", "first_frame")),
    },
    two_times=lambda config: bool(config.model.architecture.transformer.get("use_meanflow")),
    norm="head",
    beside=beside,
    skippable=lambda architecture: architecture["transformer"]["num_layers"],
    problems=problems,
    flops=flops,
    products=products,
    transposed=frozenset(f"transformer_blocks.*.attn.{name}" for name in ("to_v", "to_out.0")),
    adapters=NAMES,
    groups={
        "rope": r"/rope/",
        "modulation": r"/norm1(_context)?/linear/",
        "norms": r"/(norm\w*)/",
        "projections": r"/attn/(to_\w+|add_\w+)",
        "feed-forward": r"/ff(_context)?/",
        "attention": r"/attend/",
        "embeddings": r"/(x_embedder|context_embedder(_2)?|image_embedder|time_embed|proj_out)/",
    },
)
