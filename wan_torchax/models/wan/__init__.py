"""Wan 2.1 and 2.2: text, image, first and last frame, video, control (VACE), and pose and face (Animate) to video."""
import html
import math
import re
from collections.abc import Iterator

import numpy
from omegaconf import OmegaConf

from wan_torchax.config import live
from wan_torchax.config.geometry import Geometry
from wan_torchax.config.long import seen_at_once
from wan_torchax.kernels.settings import Kernel
from wan_torchax.models import t5
from wan_torchax.models.family import (
    WRAPPERS,
    ComponentSpec,
    Condition,
    FaceEncoding,
    Family,
    LatentEncoding,
    PictureEncoding,
    TextEncoding,
    VideoCodec,
    lazily,
)
from wan_torchax.models.wan import files
from wan_torchax.models.wan.adapters import NAMES

HERE = "wan_torchax.models.wan"
TINY = "wan_torchax.models.tiny_vae"
# The blocks' linear layers.
ADAPTED = (
    r"(vace_)?blocks\.\*\.(attn[12]\.(to_[qkv]|to_out\.0|add_[kv]_proj)|ffn\.net\.(0\.proj|2)|proj_in|proj_out"
    r"|to_gate_compress)"
)
# What describes the architecture in the config.json of transformers' models.
UMT5_FIELDS = frozenset({
    "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets",
    "relative_attention_max_distance", "layer_norm_epsilon", "feed_forward_proj",
})
CLIP_FIELDS = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size",
    "patch_size", "hidden_act", "layer_norm_eps",
})


def geometry(architecture) -> Geometry:
    vae, transformer = architecture["vae"], architecture["transformer"]
    scales = vae["scale_factor_temporal"], vae["scale_factor_spatial"]
    return Geometry(vae["z_dim"], *scales, tuple(transformer["patch_size"]))


def heads(architecture) -> tuple[int, int]:
    transformer = architecture["transformer"]
    return transformer["num_attention_heads"], transformer["attention_head_dim"]


# ---------------------------------------------------------------- text and images


def clean(prompt: str) -> str:
    """Clean a prompt like Wan's own pipeline: fix broken Unicode, unescape HTML entities twice, collapse whitespace."""
    if not (prompt.isascii() and prompt.isprintable()) or "&" in prompt:  # ftfy does not change other prompts
        import ftfy

        prompt = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", prompt).strip()


def tokenize(folders, prompts, tokens, store):
    from wan_torchax.models.tokens import tokenize

    return tokenize(folders["tokenizer"], prompts, tokens, store, clean)


def encoded_shape(config) -> dict[str, tuple[int, int]]:
    return {"embeddings": (config.model.text_tokens, config.model.architecture.text_encoder.d_model)}


def check_clip(folders) -> None:
    from wan_torchax.models.pictures import read_preprocessing

    read_preprocessing(folders["image_processor"])


def read_for_clip(folders, path, config):
    from wan_torchax.config.frames import open_picture
    from wan_torchax.models.pictures import preprocessed, read_preprocessing

    return preprocessed(open_picture(path), read_preprocessing(folders["image_processor"]))


def clip_tokens(config) -> int:
    encoder = config.model.architecture.image_encoder
    return (encoder.image_size // encoder.patch_size) ** 2 + 1


def clip_shape(config) -> tuple[int, int]:
    return clip_tokens(config), config.model.architecture.image_encoder.hidden_size


def clip_pixels(config) -> tuple[int, int, int]:
    return 3, *[config.model.architecture.image_encoder.image_size] * 2


# ---------------------------------------------------------------- conditions


def pictures_given(job) -> int:
    """The number of images in cross-attention."""
    return len(job.graph.stages[job.graph.giver("image_embeddings")].takes)


def reference_count(config) -> int:
    """The number of reference images, prepended to the video during denoising."""
    inputs = config.pipeline.inputs.values()
    if "pose" in inputs:  # the picture of who is animated
        return 1
    return len(config.references) if "references" in inputs else 0


def like_latents(job, channels: int) -> tuple[int, ...]:
    """The shape of a condition that is a latent video."""
    batch, _, *sizes = job.denoised_shape
    return batch, channels, *sizes


def first_latent_shape(job) -> tuple[int, ...]:
    batch, channels, _, *sides = job.latent_shape
    return batch, channels, 1, *sides


def control_channels(geometry: Geometry) -> int:
    """Channels of the inactive and the reactive latents, and of the mask."""
    return 2 * geometry.channels + geometry.size_scale**2


def face_shape(job) -> tuple[int, int, int]:
    """Latent frames, the reference's included, tokens of each, channels."""
    return job.denoised_shape[2], face_heads(job.config) + 1, math.prod(heads(job.config.model.architecture))


def face_heads(config) -> int:
    return config.model.architecture.transformer.face_encoder_num_heads


def text_shape(config) -> tuple[int, int]:
    return config.model.text_tokens, config.model.architecture.transformer.text_dim


def whole(value, places):
    """Every window sees all of it."""
    return value


def with_picture(value, places):
    """Every window begins with the picture, as the videos of the training did."""
    return value[:, :, places].at[:, :, :1].set(value[:, :, :1])


CONDITIONS = {
    "embeddings": Condition(lambda job: text_shape(job.config), half=True, by_prompt=True, window=whole),
    # Concatenated to the latents along channels.
    "condition": Condition(
        lambda job: like_latents(job, job.geometry.channels + job.geometry.frame_scale), window=with_picture,
    ),
    # The same for Animate: a reference, and the frames of a segment that are given.
    "given_frames": Condition(lambda job: like_latents(job, job.geometry.channels + job.geometry.frame_scale)),
    # Skeletons, added to the video's tokens, and a face's tokens, attended to after some blocks.
    "pose_latents": Condition(lambda job: job.latent_shape),
    "face_embeddings": Condition(face_shape, half=True, by_prompt=True),
    # The first latent frame, without noise.
    "first_latent": Condition(first_latent_shape),
    # Image tokens for cross-attention, besides the text's.
    "image_embeddings": Condition(
        lambda job: (pictures_given(job), *clip_shape(job.config)), half=True, window=whole,
    ),
    # The input of VACE's control blocks, and the scale of each block's hint.
    "control": Condition(lambda job: like_latents(job, control_channels(job.geometry))),
    "conditioning_scale": Condition(
        lambda job: (len(job.config.model.architecture.transformer.vace_layers),),
        prepare=lambda value, shape: numpy.full(shape, 1.0 if value is None else value),
    ),
}
ENCODINGS = {
    "condition": LatentEncoding(
        CONDITIONS["condition"].shape, lambda job: job.config.resolution.frames,
        lazily(f"{HERE}.conditions", "first_and_last"),
    ),
    "given_frames": LatentEncoding(
        CONDITIONS["given_frames"].shape, lambda job: 1 + job.config.resolution.frames,
        lazily(f"{HERE}.conditions", "given_frames"), settings=("resolution.fps",),
    ),
    "pose_latents": LatentEncoding(
        lambda job: job.latent_shape, lambda job: job.config.resolution.frames,
        lazily(f"{HERE}.conditions", "pose_latents"), settings=("resolution.fps",),
    ),
    "first_latent": LatentEncoding(first_latent_shape, lambda job: 1, lazily(f"{HERE}.conditions", "first_alone")),
    "video_latents": LatentEncoding(
        lambda job: job.latent_shape, lambda job: job.config.resolution.frames,
        lazily(f"{HERE}.conditions", "whole_video"), settings=("resolution.fps",),
    ),
    "control": LatentEncoding(
        CONDITIONS["control"].shape,
        lambda job: (1 if job.config.video is None else 2) * job.config.resolution.frames + reference_count(job.config),
        lazily(f"{HERE}.conditions", "control"), settings=("resolution.fps",),
    ),
}


def problems(config) -> Iterator[str]:
    """Mismatches between the transformer's inputs and what the pipeline provides."""
    size, transformer = geometry(config.model.architecture), config.model.architecture["transformer"]
    given = {value for stage in config.pipeline.stages.values() for value in stage.takes}
    model, pipeline = f"model={config.model.name}", f"pipeline={config.pipeline.name}"
    needed = size.channels + (size.frame_scale + size.channels if given & {"condition", "given_frames"} else 0)
    if transformer["in_channels"] != needed:
        remedy = "choose another model, or the pipeline that is its own"
        takes = f"and {config.model.name} takes {transformer['in_channels']}"
        yield f"{pipeline}: gives the transformer {needed} channels, {takes}; {remedy}"
    if transformer.get("image_dim") is not None and "image_embeddings" not in given:
        yield f"{model} wants a picture's tokens, and {pipeline} gives none; choose a pipeline with an image encoder"
    elif transformer.get("image_dim") is None and "image_embeddings" in given:
        yield f"{model} has no use for a picture's tokens, which {pipeline} gives; choose a pipeline without them"
    controlled, channels = "vace_layers" in transformer, control_channels(size)
    if controlled and "control" not in given:
        yield f"{model} wants control, and {pipeline} gives none; use pipeline=vace"
    elif "control" in given and not controlled:
        yield f"{model} has no blocks for control, which {pipeline} gives; use model=wan21_vace_1_3b or wan21_vace_14b"
    elif controlled and transformer["vace_in_channels"] != channels:
        key = "model.architecture.transformer.vace_in_channels"
        yield f"{key}={transformer['vace_in_channels']}: {pipeline} gives {channels}"
    yield from animation_problems(transformer, given, model, pipeline)
    scales, layers = config.conditioning_scale, len(transformer.get("vace_layers", ()))
    if OmegaConf.is_list(scales) and len(scales) != layers:
        yield f"conditioning_scale={scales}: has {len(scales)} values, {model} {layers} control layers; one for each"
    if "last_image" in config.pipeline.inputs and config.resolution.frames == 1:
        yield f"resolution.frames=1: {pipeline} starts with one picture and ends with another; at least 5"
    kind, trained_for = config.attention.self.sparse.kind, transformer.get("attention_type", "none")
    if kind != trained_for:
        yield f"sparse={kind}: {model} is trained for {trained_for}; set sparse={trained_for}, or choose another model"
    if kind != "none" and controlled:
        yield f"sparse={kind}: control blocks (VACE) have no weights for it; set sparse=none"
    if kind == "vsa" and "first_latent" in given:
        yield f"sparse=vsa: its tokens lie in tiles, and {pipeline} gives a first frame; use pipeline=t2v"
    if live.is_on(config) and config.live.chunk is not None:
        most, own = transformer["rope_max_seq_len"], config.live.positions == "absolute"
        latents = size.latent_shape(config.resolution)[2]
        needed = latents if own or config.live.window is None else min(latents, config.live.window)
        if needed > most:
            key = f"resolution.frames={config.resolution.frames}" if own else f"live.window={config.live.window}"
            remedy = "live.positions=relative with a window has no such limit" if own else f"at most {most}"
            yield f"{key}: {needed} latent frames, and RoPE's table of {model} has {most} positions; {remedy}"
    if controlled and config.precision.weights is not None:
        yield f"precision={config.precision.name}: control blocks (VACE) are not in it yet; use precision=none"


def animation_problems(transformer, given: set[str], model: str, pipeline: str) -> Iterator[str]:
    """Of a pose and a face."""
    animated = "motion_encoder_size" in transformer
    if animated and "pose_latents" not in given:
        yield f"{model} wants a pose and a face, and {pipeline} gives none; use pipeline=animate or replace"
    elif "pose_latents" in given and not animated:
        yield f"{model} has no use for a pose and a face, which {pipeline} gives; use model=wan22_animate_14b"
    layers, every = transformer["num_layers"], transformer.get("inject_face_latents_blocks", 1)
    if animated and layers % every:
        key = "model.architecture.transformer.inject_face_latents_blocks"
        yield f"{key}={every}: must divide the {layers} blocks; the published model has 5"


# ---------------------------------------------------------------- arithmetic


def products(transformer) -> dict[str, tuple[int, int]]:
    """Linear layers that a kernel can compute: number of blocks and FLOPs per token."""
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    square, wide = 2 * width * width, 2 * width * transformer["ffn_dim"]
    own = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_q", "attn2.to_out.0")
    flops = dict.fromkeys(own, square) | {"ffn.net.0.proj": wide, "ffn.net.2": wide}
    stacks = {"blocks": transformer["num_layers"], "vace_blocks": len(transformer.get("vace_layers", ()))}
    return {
        f"{stack}.*.{name}": (layers, count)
        for stack, layers in stacks.items() if layers for name, count in flops.items()
    }


def flops(config, tokens: int) -> dict[str, int]:
    """FLOPs of one forward pass per prompt, by part. Up to 1.5 % too high where a batch of prompts shares the first
    block's self-attention."""
    transformer, text = config.model.architecture.transformer, config.model.text_tokens
    width = transformer.num_attention_heads * transformer.attention_head_dim
    controls = len(transformer.get("vace_layers", ()))
    layers = transformer.num_layers + controls
    size = geometry(config.model.architecture).grid(seen_at_once(config), reference_count(config))
    sparse = Kernel.of(config.attention.self).sparse
    pairs = sparse.pairs(size) if sparse else tokens * tokens
    texts = text * (1 if config.guider.nag == 1 else 2)  # keys in cross-attention
    gates = transformer.num_layers * 2 * tokens * width * width if sparse.kind == "vsa" else 0
    return {
        # q, k, v, out and q, out; k, v of the text; one of each control block
        "projections": layers * (2 * tokens * width * width * 6 + 2 * texts * width * width * 2)
        + controls * 2 * tokens * width * width + gates,
        "feed-forward": layers * 4 * tokens * width * transformer.ffn_dim,
        "self-attention": layers * 4 * pairs * width,
        "cross-attention": layers * 4 * tokens * texts * width,
        **face_flops(config, transformer, tokens, size[0]),
    }


def face_flops(config, transformer, tokens: int, frames: int) -> dict[str, int]:
    """Of the attention to a face: q, k, v, out, and all scores."""
    if "motion_encoder_size" not in transformer:
        return {}
    width, keys = math.prod(heads(config.model.architecture)), frames * (face_heads(config) + 1)
    adapters = transformer.num_layers // transformer.inject_face_latents_blocks
    return {"face": adapters * (4 * (tokens + keys) * width * width + 4 * tokens * keys * width)}


def face_temporaries(config) -> float:
    """A few copies of the largest activations of the frames that are encoded at a time."""
    transformer = config.model.architecture.transformer
    sizes = transformer.get("motion_encoder_channel_sizes") or {"512": 32}
    side = transformer.motion_encoder_size
    return 4 * 8 * 4 * side**2 * max(sizes.get(str(side), 32), 3)


def decoder_width(vae) -> float:
    """Six of the widest activations, eight with residual shortcuts."""
    width = 2 * (vae.get("decoder_base_dim") or vae.get("base_dim", 96))
    return (8 if vae.get("is_residual") else 6) * width / (vae.get("patch_size") or 1) ** 2


def tiny_width(vae) -> float:
    """A memory block's two inputs and output at half the height and width, or their enlarged frames."""
    return 4 * max(vae["widths"][2:]) / vae["patch_size"] ** 2


FAMILY = Family(
    name="wan",
    modules=tuple(f"{HERE}.{name}" for name in ("blocks", "vae", "text", "clip")),
    components={
        "text_encoder": ComponentSpec(
            lazily(f"{HERE}.text", "build"), unused=lambda architecture: t5.UNUSED, rename=t5.rename,
            foreign=t5.FOREIGN, landmarks=t5.landmarks, beside=("tokenizer",), fields=UMT5_FIELDS,
        ),
        "image_encoder": ComponentSpec(
            lazily(f"{HERE}.clip", "build"), unused=lazily(f"{HERE}.clip", "unused"), prefix="vision_model.",
            beside=("image_processor",), fields=CLIP_FIELDS,
        ),
        "transformer": ComponentSpec(
            lazily(f"{HERE}.blocks", "build"), ("blocks", "vace_blocks", "face_adapter"),
            lazily(f"{HERE}.blocks", "tables"),
            # No version of the model uses the first; the second are constants in Animate's original files.
            unused=lambda architecture: (r".*norm_added_q", r"motion_encoder\..*\.kernel"),
            wrappers=WRAPPERS, rename=files.rename, foreign=files.FOREIGN, respell=files.respell,
            landmarks=files.landmarks, adapted=ADAPTED,
        ),
        "transformer_2": ComponentSpec(lazily(f"{HERE}.blocks", "build"), twin_of="transformer"),
        "vae": ComponentSpec(
            lazily(f"{HERE}.vae", "build"), wrappers=("vae.",), rename=files.rename_vae, foreign=files.VAE_FOREIGN,
            landmarks=files.vae_landmarks,
        ),
        "tiny_vae": ComponentSpec(
            lazily(TINY, "build"), unused=lambda architecture: (r"encoder\.",), landmarks=files.tiny_landmarks,
        ),
    },
    geometry=geometry,
    heads=heads,
    denoiser=lazily(f"{HERE}.blocks", "denoiser"),
    chunk_denoiser=lazily(f"{HERE}.blocks", "chunk_denoiser"),
    conditions=CONDITIONS,
    codec=VideoCodec(
        "vae", lazily(f"{HERE}.vae", "decoder"), r"(decoder|post_quant_conv)\..*", decoder_width,
        lazily(f"{HERE}.vae", "encoder"), r"(encoder|quant_conv)\..*", lambda vae: 6 * vae.get("base_dim", 96),
        settings=("mesh.chip.vae_lines",),
    ),
    tiny=VideoCodec("tiny_vae", lazily(TINY, "decoder"), r"decoder\..*", tiny_width),
    texts=(
        TextEncoding(
            "text_encoder", lambda config: config.model.text_tokens, encoded_shape, 2, tokenize,
            lazily(f"{HERE}.text", "encode"), clean,
            # Scores of one layer.
            lambda config: 16 * config.model.architecture.text_encoder.num_heads * config.model.text_tokens**2,
        ),
    ),
    pictures={
        "image_embeddings": PictureEncoding(
            "image_encoder", clip_shape, clip_pixels, check_clip, read_for_clip, lazily(f"{HERE}.clip", "encode"),
            # A few copies of the widest layer.
            lambda config: 16 * clip_tokens(config) * config.model.architecture.image_encoder.intermediate_size,
        ),
    },
    encodings=ENCODINGS,
    faces={
        "face_embeddings": FaceEncoding(
            "transformer", r"(motion|face)_encoder\..*", face_shape,
            lambda config: config.model.architecture.transformer.motion_encoder_size, lazily(f"{HERE}.face", "encode"),
            face_temporaries,
        ),
    },
    extra_frames=reference_count,
    norm="width",
    sparse=("sla", "vsa"),
    has_nag=True,
    skippable=lambda architecture: architecture["transformer"]["num_layers"],
    problems=problems,
    flops=flops,
    products=products,
    transposed=frozenset(
        f"{stack}.*.{name}" for stack in ("blocks", "vace_blocks")
        for name in ("attn1.to_v", "attn1.to_out.0", "attn2.to_out.0")
    ),
    adapters=NAMES,
    groups={
        "rope": r"/rope/",
        "norms": r"/(norm\w*)/",
        "projections": r"/attn[12]/(to_\w+|add_\w+)",
        "feed-forward": r"/ffn/",
        "face": r"/face/",
        "attention": r"/attend/",
        "embeddings": r"/(patch_embedding|(vace|pose)_patch_embedding|condition_embedder|proj_out)/",
    },
)
