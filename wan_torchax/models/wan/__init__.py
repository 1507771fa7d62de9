"""Wan 2.1 and 2.2: text, image, first and last frame, video, control (VACE, VideoX-Fun), a camera's path, pose and face
(Animate), a driving video (Animate 2), and speech to video."""
import functools
import html
import math
import re

import numpy

from wan_torchax.config import live
from wan_torchax.config.geometry import Geometry
from wan_torchax.config.long import seen_at_once
from wan_torchax.kernels.settings import UNTRAINED, Kernel
from wan_torchax.models import t5, vit
from wan_torchax.models.family import (
    WRAPPERS,
    ComponentSpec,
    Condition,
    FaceEncoding,
    Family,
    LatentEncoding,
    PictureEncoding,
    SoundEncoding,
    TextEncoding,
    VideoCodec,
    VoiceEncoding,
    lazily,
)
from wan_torchax.models.wan import files
from wan_torchax.models.wan.adapters import NAMES

HERE = "wan_torchax.models.wan"
TINY = "wan_torchax.models.tiny_vae"
# FramePack's for speech-to-video: latent frames before a segment, the latest first, and how coarse their tokens are.
BUCKETS = {"proj": (1, 1), "proj_2x": (2, 2), "proj_4x": (16, 4)}
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


WAV2VEC2_FIELDS = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "conv_dim", "conv_kernel",
    "conv_stride", "conv_bias", "num_conv_pos_embeddings", "num_conv_pos_embedding_groups", "layer_norm_eps",
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


def read_for_clip(folders, source, config):
    from wan_torchax.config.frames import open_picture
    from wan_torchax.models.pictures import preprocessed, read_preprocessing

    return preprocessed(open_picture(source), read_preprocessing(folders["image_processor"]))


def clip_tokens(config) -> int:
    encoder = config.model.architecture.image_encoder
    return (encoder.image_size // encoder.patch_size) ** 2 + 1


def clip_shape(config) -> tuple[int, int]:
    return clip_tokens(config), config.model.architecture.image_encoder.hidden_size


def clip_temporaries(config) -> float:
    """A few copies of the widest layer."""
    return 16 * clip_tokens(config) * config.model.architecture.image_encoder.intermediate_size


def clip_pixels(config) -> tuple[int, int, int]:
    return 3, *[config.model.architecture.image_encoder.image_size] * 2


# ---------------------------------------------------------------- conditions


def pictures_given(job) -> int:
    """The number of images in cross-attention."""
    return len(job.graph.stages[job.graph.giver("image_embeddings")].takes)


def reference_count(config) -> int:
    """The number of reference images, prepended to the video during denoising."""
    taken = {value for stage in config.pipeline.stages.values() for value in stage.takes}
    if {"given_frames", "character_frames"} & taken:  # the picture of who is animated
        return 1
    return len(config.references) if "control" in taken else 0


def tokens_behind(config) -> int:
    """Tokens that are not the latents', behind the video's: of a reference, and of the frames before a segment, the
    older the coarser."""
    taken = {value for stage in config.pipeline.stages.values() for value in stage.takes}
    _, height, width = geometry(config.model.architecture).grid(config.resolution)
    earlier = sum(frames // size * (height // size) * (width // size) for frames, size in BUCKETS.values())
    return ("reference_latent" in taken) * height * width + ("motion_latents" in taken) * earlier


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


def camera_shape(job) -> tuple[int, int, int, int]:
    """Poses by latent frame and frame."""
    return job.latent_shape[2], job.geometry.frame_scale, 3, 4


def camera_poses(path, shape) -> numpy.ndarray:
    """The poses of a camera's path. The first latent frame covers one frame only, repeated."""
    from wan_torchax.config.camera import poses

    latents, scale, *_ = shape
    places = poses(path, (latents - 1) * scale + 1)
    return numpy.concatenate([places[:1]] * (scale - 1) + [places]).reshape(shape)


def is_driven(transformer) -> bool:
    """Whether a transformer attends to a driving video."""
    return "refer_offset_w" in transformer


def driving_tokens(config) -> int:
    transformer, size = config.model.architecture.transformer, geometry(config.model.architecture)
    return size.tokens(config.resolution) if is_driven(transformer) else 0


def face_shape(job) -> tuple[int, int, int]:
    """Latent frames, the reference's included, tokens of each, channels."""
    return job.denoised_shape[2], face_heads(job.config) + 1, math.prod(heads(job.config.model.architecture))


def face_heads(config) -> int:
    return config.model.architecture.transformer.face_encoder_num_heads


def motion_shape(job) -> tuple[int, ...]:
    """Latents of the frames before a segment."""
    batch, channels, _, *sides = job.latent_shape
    return batch, channels, (job.config.pipeline.segments.remembered - 1) // job.geometry.frame_scale + 1, *sides


def given_shape(job) -> tuple[int, ...]:
    """Latents of the chunks that lead a live video."""
    (batch, channels, latents, *sides), config = job.latent_shape, job.config
    chunks = live.given_chunks(config.live, config.resolution, job.geometry, config.video)
    return batch, channels, live.Layout.of(config.live, latents).begin(chunks), *sides


def voice_shapes(job) -> dict[str, tuple[int, ...]]:
    """By latent frame: a few tokens, and one that modulates."""
    frames, width = job.latent_shape[2], math.prod(heads(job.config.model.architecture))
    tokens = job.config.model.architecture.transformer.num_audio_token + 1
    return {"audio_tokens": (frames, tokens, width), "audio_whole": (frames, width)}


def sound_shape(config) -> tuple[int, int]:
    """A frame's features: the hidden states of all layers."""
    encoder = config.model.architecture.audio_encoder
    return encoder.num_hidden_layers + 1, encoder.hidden_size


def sound_tokens(samples: int, config) -> int:
    encoder = config.model.architecture.audio_encoder
    for kernel, stride in zip(encoder.conv_kernel, encoder.conv_stride):
        samples = (samples - kernel) // stride + 1
    return samples


def sound_temporaries(config) -> float:
    """The first convolution's output, three times, in float32; of a minute."""
    return 3 * 4 * 60 * 16_000 / 5 * config.model.architecture.audio_encoder.conv_dim[0]


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
    # The same for Animate 2, and what is read of its driving video before the first step.
    "character_frames": Condition(lambda job: like_latents(job, job.geometry.channels + job.geometry.frame_scale)),
    "character_embeddings": Condition(lambda job: (1, *clip_shape(job.config)), half=True),
    "driving_latents": Condition(lambda job: job.latent_shape),
    "driving_embeddings": Condition(lambda job: (1, *text_shape(job.config)), half=True),
    "driving_picture": Condition(lambda job: (1, *clip_shape(job.config)), half=True),
    # The first latent frame, without noise, and whether it is given, where a picture is optional.
    "first_latent": Condition(first_latent_shape),
    "first_given": Condition(lambda job: (), prepare=lambda picture, shape: numpy.float32(picture is not None)),
    # Speech: what is heard in each latent frame, who speaks, the frames before a segment and whether there are some,
    # and skeletons.
    "audio_tokens": Condition(lambda job: voice_shapes(job)["audio_tokens"], half=True, by_prompt=True),
    "audio_whole": Condition(lambda job: voice_shapes(job)["audio_whole"], half=True, by_prompt=True),
    "motion_latents": Condition(motion_shape),
    "goes_on": Condition(lambda job: (), prepare=lambda before, shape: numpy.float32(before is not None)),
    "skeleton_latents": Condition(lambda job: job.latent_shape),
    # VideoX-Fun: latents of a control video, concatenated to the video's; a reference's, as tokens behind the video's;
    # the poses of a camera.
    "control_latents": Condition(lambda job: job.latent_shape),
    "reference_latent": Condition(first_latent_shape),
    "camera": Condition(camera_shape, prepare=camera_poses),
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
        CONDITIONS["condition"].shape, lambda job: job.config.resolution.frames if job.config.image else 0,
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
    "character_frames": LatentEncoding(
        CONDITIONS["character_frames"].shape, lambda job: 1 + job.config.resolution.frames,
        lazily(f"{HERE}.conditions", "character_frames"), settings=("resolution.fps",),
    ),
    "driving_latents": LatentEncoding(
        lambda job: job.latent_shape, lambda job: job.config.resolution.frames,
        lazily(f"{HERE}.conditions", "driving_latents"), settings=("resolution.fps",),
    ),
    "first_latent": LatentEncoding(
        first_latent_shape, lambda job: 1 if job.config.image else 0, lazily(f"{HERE}.conditions", "first_alone"),
    ),
    "reference_latent": LatentEncoding(
        first_latent_shape, lambda job: 1 if job.config.references or job.config.audio else 0,
        lazily(f"{HERE}.conditions", "reference"),
    ),
    "motion_latents": LatentEncoding(
        motion_shape, lambda job: job.config.pipeline.segments.remembered if job.segment else 0,
        lazily(f"{HERE}.conditions", "motion"), settings=("pipeline.segments.remembered",),
    ),
    "given_latents": LatentEncoding(
        given_shape, lambda job: (given_shape(job)[2] - 1) * job.geometry.frame_scale + 1,
        lazily(f"{HERE}.conditions", "given_latents"), settings=("resolution.fps", "live.chunk", "live.first"),
    ),
    "skeleton_latents": LatentEncoding(
        lambda job: job.latent_shape, lambda job: job.config.resolution.frames + 1 if job.config.pose else 0,
        lazily(f"{HERE}.conditions", "skeletons"), settings=("resolution.fps",),
    ),
    **dict.fromkeys(("video_latents", "control_latents"), LatentEncoding(
        lambda job: job.latent_shape, lambda job: job.config.resolution.frames,
        lazily(f"{HERE}.conditions", "whole_video"), settings=("resolution.fps",),
    )),
    "control": LatentEncoding(
        CONDITIONS["control"].shape,
        lambda job: (2 if job.config.video or job.segment else 1) * job.config.resolution.frames
        + reference_count(job.config),
        lazily(f"{HERE}.conditions", "control"), settings=("resolution.fps",),
    ),
}


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
    dense_layers = min(sparse.dense_layers, layers)
    if is_driven(transformer):  # every frame but the first attends to one of the driving video
        pairs += (size[0] - 1) * (size[1] * size[2]) ** 2
    texts = text * (1 if config.guider.nag == 1 else 2)  # keys in cross-attention
    gates = transformer.num_layers * 2 * tokens * width * width if sparse.kind == "vsa" else 0
    return {
        # q, k, v, out and q, out; k, v of the text; one of each control block
        "projections": layers * (2 * tokens * width * width * 6 + 2 * texts * width * width * 2)
        + controls * 2 * tokens * width * width + gates,
        "feed-forward": layers * 4 * tokens * width * transformer.ffn_dim,
        "self-attention": 4 * width * ((layers - dense_layers) * pairs + dense_layers * tokens * tokens),
        "cross-attention": layers * 4 * tokens * texts * width,
        **face_flops(config, transformer, tokens, size[0]),
        **camera_flops(transformer, tokens),
        **voice_flops(config, transformer, tokens, size[0]),
    }


def face_flops(config, transformer, tokens: int, frames: int) -> dict[str, int]:
    """Of the attention to a face: q, k, v, out, and all scores."""
    if "motion_encoder_size" not in transformer:
        return {}
    width, keys = math.prod(heads(config.model.architecture)), frames * (face_heads(config) + 1)
    adapters = transformer.num_layers // transformer.inject_face_latents_blocks
    return {"face": adapters * (4 * (tokens + keys) * width * width + 4 * tokens * keys * width)}


def camera_flops(transformer, tokens: int) -> dict[str, int]:
    """Of the convolutions of a camera's rays, which the prompts share."""
    if not transformer.get("add_control_adapter"):
        return {}
    width = transformer.num_attention_heads * transformer.attention_head_dim
    inputs = math.prod(transformer.patch_size) * files.camera_channels(transformer)
    return {"camera": 2 * tokens * width * (inputs + 2 * 9 * width)}


def voice_flops(config, transformer, tokens: int, frames: int) -> dict[str, int]:
    """Of the attention to a voice: q, k, v, out, and all scores."""
    width, keys = math.prod(heads(config.model.architecture)), frames * (transformer.get("num_audio_token", 0) + 1)
    layers = len(transformer.get("audio_inject_layers", ()))
    return {"voice": layers * (4 * (tokens + keys) * width * width + 4 * tokens * keys * width)} if layers else {}


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
        "audio_encoder": ComponentSpec(
            lazily("wan_torchax.models.wav2vec2", "build"), prefix="wav2vec2.", fields=WAV2VEC2_FIELDS,
            unused=lambda architecture: (r"masked_spec_embed", r"lm_head\."), respell=files.respell_sound,
            landmarks=files.sound_landmarks,
        ),
        "image_encoder": ComponentSpec(
            lazily(f"{HERE}.clip", "build"), unused=lazily(f"{HERE}.clip", "unused"), prefix="vision_model.",
            landmarks=functools.partial(vit.landmarks, extra=1), beside=("image_processor",), fields=CLIP_FIELDS,
        ),
        "transformer": ComponentSpec(
            lazily(f"{HERE}.blocks", "build"), ("blocks", "vace_blocks", "face_adapter", "audio_injector"),
            lazily(f"{HERE}.blocks", "tables"),
            # No version of the model uses the first; the second are constants in Animate's original files.
            unused=lambda architecture: (r".*norm_added_q", r"motion_encoder\..*\.kernel"),
            wrappers=WRAPPERS, rename=files.rename, foreign=files.FOREIGN, respell=files.respell,
            described=files.described, landmarks=files.landmarks, adapted=ADAPTED,
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
            clip_temporaries,
        ),
        "character_embeddings": PictureEncoding(
            "image_encoder", clip_shape, clip_pixels, check_clip, lazily(f"{HERE}.conditions", "read_for_clip"),
            lazily(f"{HERE}.clip", "encode"), clip_temporaries,
            settings=("resolution.height", "resolution.width", "resolution.fps", "fit"),
        ),
    },
    encodings=ENCODINGS,
    reader=lazily(f"{HERE}.driving", "reader"),
    faces={
        "face_embeddings": FaceEncoding(
            "transformer", r"(motion|face)_encoder\..*", face_shape,
            lambda config: config.model.architecture.transformer.motion_encoder_size, lazily(f"{HERE}.face", "encode"),
            face_temporaries,
        ),
    },
    sounds={
        "audio_features": SoundEncoding(
            "audio_encoder", sound_shape, 50, sound_tokens, 30, lazily("wan_torchax.models.wav2vec2", "features"),
            sound_temporaries,
        ),
    },
    voice=VoiceEncoding(
        "transformer", r"casual_audio_encoder\..*", "audio_features", voice_shapes,
        lazily(f"{HERE}.voice", "encode"),
    ),
    extra_frames=reference_count,
    behind=tokens_behind,
    norm="width",
    beside=driving_tokens,
    sparse=("sla", "vsa", *UNTRAINED),
    has_nag=True,
    skippable=lambda architecture: architecture["transformer"]["num_layers"],
    problems=lazily(f"{HERE}.problems", "problems", torch=False),
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
        "face": r"/(face|voice)/",
        "attention": r"/attend/",
        "embeddings":
            r"/(patch_embedding|(vace|pose)_patch_embedding|frame_packer\.\w+|ref_conv|control_adapter|condition_embedder|proj_out)/",
    },
)
