"""A made-up family of two streams: what a family needs to be run by all of the project, without a line elsewhere."""
import re

import numpy

from wan_torchax.config.geometry import Geometry
from wan_torchax.models.family import (
    AdapterNames,
    ComponentSpec,
    Condition,
    Family,
    TextEncoding,
    VideoCodec,
    lazily,
)

BLOCKS = "tests.toy.blocks"


def tokenize(folders, prompts, tokens, store):
    from wan_torchax.models.tokens import tokenize

    return tokenize(folders["tokenizer"], prompts, tokens, store)


def shapes(config):
    return {"embeddings": (config.model.text_tokens, config.model.architecture.text_encoder.width), "counts": ()}


def flops(config, tokens):
    transformer, text = config.model.architecture.transformer, config.model.text_tokens
    width = transformer.heads * transformer.head_dim
    return {
        "projections": transformer.layers * 8 * (tokens + text) * width**2,
        "feed-forward": transformer.layers * 8 * (tokens + text) * width**2,
        "self-attention": transformer.layers * 4 * (tokens + text) ** 2 * width,
        "cross-attention": 0,
    }


def translate(module, native):
    return module if re.match(r"(layers\.\d+\.)?\w+", module) else None


FAMILY = Family(
    name="toy",
    modules=(BLOCKS,),
    components={
        "text_encoder": ComponentSpec(lazily(BLOCKS, "build_text"), beside=("tokenizer",)),
        "transformer": ComponentSpec(lazily(BLOCKS, "build"), stacks=("layers",)),
        "vae": ComponentSpec(lazily(BLOCKS, "build_vae")),
    },
    geometry=lambda architecture: Geometry(architecture["transformer"]["channels"], 2, 4, (1, 2, 2)),
    heads=lambda architecture: (architecture["transformer"]["heads"], architecture["transformer"]["head_dim"]),
    denoiser=lazily(BLOCKS, "denoiser"),
    conditions={
        "embeddings": Condition(lambda job: shapes(job.config)["embeddings"], half=True, by_prompt=True),
        "counts": Condition(lambda job: (), by_prompt=True),
        # The latents of the segment before, where there is one.
        "previous": Condition(
            lambda job: job.latent_shape, prepare=lambda value, shape: numpy.zeros(shape) if value is None else value
        ),
    },
    codec=VideoCodec(
        "vae", lazily(BLOCKS, "decoder"), decoder_part="decoder.*", decoder_width=lambda vae: 8 * vae["channels"],
    ),
    texts=(
        TextEncoding(
            "text_encoder", lambda config: config.model.text_tokens, shapes, 2, tokenize, lazily(BLOCKS, "encode_text")
        ),
    ),
    norm="head",
    beside=lambda config: config.model.text_tokens,
    flops=flops,
    products=lambda transformer: {
        "layers.*.mlp_in": (transformer["layers"], 4 * (transformer["heads"] * transformer["head_dim"]) ** 2)
    },
    adapters=AdapterNames(r"(?:transformer\.)?", re.compile("layers"), translate),
    groups={"projections": "/attention/", "feed-forward": "/(text_)?mlp_"},
)
