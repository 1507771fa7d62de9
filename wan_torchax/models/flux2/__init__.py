"""FLUX.2 klein: text to image."""
from collections.abc import Iterator

from wan_torchax.config.geometry import Geometry
from wan_torchax.models import qwen
from wan_torchax.models.family import WRAPPERS, ComponentSpec, Condition, Family, TextEncoding, VideoCodec, lazily
from wan_torchax.models.flux import GROUPS, heads, unserved
from wan_torchax.models.flux.files import FOREIGN, VAE_FOREIGN, rename_vae
from wan_torchax.models.flux2 import files
from wan_torchax.models.flux2.adapters import NAMES

HERE = "wan_torchax.models.flux2"
PATCH = 2  # pixels a side of the VAE's latents that are one of the transformer's
# The blocks' linear layers.
ADAPTED = (
    r"transformer_blocks\.\*\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.linear_(in|out))"
    r"|single_transformer_blocks\.\*\.attn\.(to_qkv_mlp_proj|to_out)"
)
# What describes the architecture in the config.json of transformers' models.
QWEN_FIELDS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "attention_bias",
})


def geometry(architecture) -> Geometry:
    """An image is a video of one frame. A token is one pixel of the transformer's latents."""
    vae = architecture["vae"]
    scale = 2 ** (len(vae["block_out_channels"]) - 1) * PATCH
    return Geometry(vae["latent_channels"] * PATCH**2, 1, scale, (1, 1, 1))


# ---------------------------------------------------------------- text


def templated(prompt: str) -> str:
    """The prompt as Qwen3's chat template writes it, with thinking switched off."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def tokenize(folders, prompts, tokens, store):
    from wan_torchax.models.tokens import tokenize

    return tokenize(folders["tokenizer"], prompts, tokens, store, templated)


def embeddings_shape(config) -> tuple[int, int]:
    encoder = config.model.architecture.text_encoder
    return config.model.text_tokens, len(encoder.out_layers) * encoder.hidden_size


def problems(config) -> Iterator[str]:
    """Mismatches of model and pipeline, and options that the blocks do not have."""
    transformer, model = config.model.architecture["transformer"], f"model={config.model.name}"
    given = {value for stage in config.pipeline.stages.values() for value in stage.takes}
    if "embeddings" not in given or "pooled" in given:
        yield f"pipeline={config.pipeline.name}: {model} takes embeddings alone; use pipeline=t2i"
    if transformer.get("guidance_embeds", True):
        yield f"{model}: a FLUX.2 that takes the guidance scale as an input (dev) is not implemented; klein's are"
    channels = geometry(config.model.architecture).channels
    if transformer["in_channels"] != channels:
        yield f"{model}: the transformer takes {transformer['in_channels']} channels, its VAE's latents give {channels}"
    if config.products.kernel == "pallas":
        yield f"products.kernel=pallas: {model} has no layers for it; use products=xla"
    yield from unserved(config)


# ---------------------------------------------------------------- arithmetic


def flops(config, tokens: int) -> dict[str, int]:
    """FLOPs of one forward pass per prompt, by part."""
    transformer, tokens = config.model.architecture.transformer, tokens + config.model.text_tokens
    width, layers = transformer.num_attention_heads * transformer.attention_head_dim, layers_of(transformer)
    return {
        "projections": layers * 8 * tokens * width**2,
        "feed-forward": layers * 6 * tokens * width * int(width * transformer.get("mlp_ratio", 3.0)),
        "self-attention": layers * 4 * tokens**2 * width,
        "cross-attention": 0,
    }


def layers_of(transformer) -> int:
    return transformer["num_layers"] + transformer["num_single_layers"]


def products(transformer) -> dict[str, tuple[int, int]]:
    """Linear layers by their number and FLOPs per token."""
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    wide = 4 * width * int(width * transformer.get("mlp_ratio", 3.0))
    return {
        "transformer_blocks.*.ff.linear_in": (transformer["num_layers"], wide),
        "single_transformer_blocks.*.attn.to_qkv_mlp_proj": (transformer["num_single_layers"], wide + 6 * width**2),
    }


def decoder_width(vae) -> float:
    """Six of the widest activations."""
    return 6 * (vae.get("decoder_block_out_channels") or vae["block_out_channels"])[1]


FAMILY = Family(
    name="flux2",
    modules=tuple(f"{HERE}.{name}" for name in ("blocks", "vae", "text")),
    components={
        "text_encoder": ComponentSpec(
            lazily(f"{HERE}.text", "build"), unused=lazily(f"{HERE}.text", "unused"), prefix=qwen.PREFIX,
            rename=qwen.rename, foreign=qwen.FOREIGN, respell=qwen.respell, landmarks=qwen.landmarks,
            beside=("tokenizer",), fields=QWEN_FIELDS,
        ),
        "transformer": ComponentSpec(
            lazily(f"{HERE}.blocks", "build"), stacks=("transformer_blocks", "single_transformer_blocks"),
            wrappers=WRAPPERS, rename=files.rename, foreign=FOREIGN, landmarks=files.landmarks, adapted=ADAPTED,
        ),
        "vae": ComponentSpec(
            lazily(f"{HERE}.vae", "build"), unused=lambda architecture: (r"bn\.num_batches_tracked",),
            wrappers=("vae.",), rename=rename_vae, foreign=VAE_FOREIGN, landmarks=files.vae_landmarks,
        ),
    },
    geometry=geometry,
    heads=heads,
    denoiser=lazily(f"{HERE}.blocks", "denoiser"),
    conditions={"embeddings": Condition(lambda job: embeddings_shape(job.config), half=True, by_prompt=True)},
    codec=VideoCodec(
        "vae", lazily(f"{HERE}.vae", "decoder"), r"(decoder|post_quant_conv|bn)\..*", decoder_width,
    ),
    texts=(
        TextEncoding(
            "text_encoder", lambda config: config.model.text_tokens,
            lambda config: {"embeddings": embeddings_shape(config)}, 2, tokenize, lazily(f"{HERE}.text", "encode"),
            # Scores of one layer.
            temporaries=lambda config: 16 * config.model.architecture.text_encoder.num_attention_heads
            * config.model.text_tokens**2,
        ),
    ),
    norm="head",
    problems=problems,
    flops=flops,
    products=products,
    adapters=NAMES,
    groups=GROUPS | {"feed-forward": r"/ff(_context)?/"},
)
