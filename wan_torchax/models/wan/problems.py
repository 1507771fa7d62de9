"""What a pipeline gives and a model of Wan does not take, or wants and is not given. No JAX, no torch."""
from collections.abc import Iterator

from omegaconf import OmegaConf

from wan_torchax.config import live
from wan_torchax.config.wording import nearest_multiple
from wan_torchax.kernels.settings import UNTRAINED
from wan_torchax.models.wan import control_channels, geometry, is_driven, sound_shape, tokens_behind


def problems(config) -> Iterator[str]:
    """Mismatches between the transformer's inputs and what the pipeline provides."""
    given = {value for stage in config.pipeline.stages.values() for value in stage.takes}
    for check in CHECKS:
        yield from check(config, config.model.architecture["transformer"], given)


def names(config) -> tuple[str, str]:
    return f"model={config.model.name}", f"pipeline={config.pipeline.name}"


def picture_problems(config, transformer, given: set[str]) -> Iterator[str]:
    """Of given frames, which are channels of the input, and of a picture's tokens."""
    size, (model, pipeline) = geometry(config.model.architecture), names(config)
    concatenated = given & {"condition", "given_frames", "character_frames"}
    needed = size.channels + (size.frame_scale + size.channels if concatenated else 0)
    needed += size.channels if "control_latents" in given else 0
    if transformer["in_channels"] != needed:
        remedy = "choose another model, or the pipeline that is its own"
        takes = f"and {config.model.name} takes {transformer['in_channels']}"
        yield f"{pipeline}: gives the transformer {needed} channels, {takes}; {remedy}"
    pictured = given & {"image_embeddings", "character_embeddings"}
    if transformer.get("image_dim") is not None and not pictured:
        yield f"{model} wants a picture's tokens, and {pipeline} gives none; choose a pipeline with an image encoder"
    elif transformer.get("image_dim") is None and pictured:
        yield f"{model} has no use for a picture's tokens, which {pipeline} gives; choose a pipeline without them"
    if "last_image" in config.pipeline.inputs and config.resolution.frames == 1:
        yield f"resolution.frames=1: {pipeline} starts with one picture and ends with another; at least 5"


def control_problems(config, transformer, given: set[str]) -> Iterator[str]:
    """Of VACE's control blocks."""
    controlled, channels = "vace_layers" in transformer, control_channels(geometry(config.model.architecture))
    model, pipeline = names(config)
    if controlled and "control" not in given:
        yield f"{model} wants control, and {pipeline} gives none; use pipeline=vace"
    elif "control" in given and not controlled:
        yield f"{model} has no blocks for control, which {pipeline} gives; use model=wan21_vace_1_3b or wan21_vace_14b"
    elif controlled and transformer["vace_in_channels"] != channels:
        key = "model.architecture.transformer.vace_in_channels"
        yield f"{key}={transformer['vace_in_channels']}: {pipeline} gives {channels}"
    scales, layers = config.conditioning_scale, len(transformer.get("vace_layers", ()))
    if OmegaConf.is_list(scales) and len(scales) != layers:
        yield f"conditioning_scale={scales}: has {len(scales)} values, {model} {layers} control layers; one for each"
    if controlled and config.precision.weights is not None:
        yield f"precision={config.precision.name}: control blocks (VACE) are not in it yet; use precision=none"


def driving_problems(config, transformer, given: set[str]) -> Iterator[str]:
    """Of Animate 2's driving video."""
    driven, stride, ring = is_driven(transformer), transformer.get("refer_stride", 1), config.sharding.attention.ring
    model, pipeline = names(config)
    if driven and "driving_latents" not in given:
        yield f"{model} wants a driving video, and {pipeline} gives none; use pipeline=animate2"
    elif "driving_latents" in given and not driven:
        yield f"{model} has no use for a driving video, which {pipeline} gives; use model=wan22_animate2_14b"
    elif driven and config.driving_prompt is None:
        yield f'driving_prompt: missing, and {model} has none; say what video= shows: driving_prompt="somebody dances"'
    if driven and ring is not None:
        reason = "a frame attends to its own of the driving video, and a ring cuts frames"
        yield f"sharding.attention.ring={ring}: {reason}; use sharding=tp or tokens"
    if driven and (kind := config.attention.self.sparse.kind) != "none":
        yield f"sparse={kind}: lists name keys of one video, and {model} attends to two; set sparse=none"
    if stride != 1:
        yield f"model.architecture.transformer.refer_stride={stride}: frames that are skipped are not there; set 1"


def pose_problems(config, transformer, given: set[str]) -> Iterator[str]:
    """Of Animate's pose and face."""
    animated, (model, pipeline) = "motion_encoder_size" in transformer, names(config)
    if animated and "pose_latents" not in given:
        yield f"{model} wants a pose and a face, and {pipeline} gives none; use pipeline=animate or replace"
    elif "pose_latents" in given and not animated:
        yield f"{model} has no use for a pose and a face, which {pipeline} gives; use model=wan22_animate_14b"
    layers, every = transformer["num_layers"], transformer.get("inject_face_latents_blocks", 1)
    if animated and layers % every:
        key = "model.architecture.transformer.inject_face_latents_blocks"
        yield f"{key}={every}: must divide the {layers} blocks; the published model has 5"


def fun_problems(config, transformer, given: set[str]) -> Iterator[str]:
    """Of VideoX-Fun's models: a reference, and a camera."""
    model, pipeline = names(config)
    parts = {  # by what the transformer has for it
        "add_ref_conv": ("control_latents", "a control video", "fun_control"),
        "add_control_adapter": ("camera", "a camera's path", "fun_camera"),
    }
    for field, (value, words, own) in parts.items():
        if transformer.get(field) and value not in given:
            yield f"{model} wants {words}, and {pipeline} gives none; use pipeline={own}, or {own}_5b for the 5B"
        elif value in given and not transformer.get(field):
            models = f"wan22_{own}_a14b or wan22_{own}_5b"
            yield f"{model} has no use for {words}, which {pipeline} gives; use model={models}"
    held = geometry(config.model.architecture).size_scale == 16
    if given & {"control_latents", "camera"} and held != ("first_latent" in given):
        own = f"{pipeline}_5b" if held else pipeline.removesuffix("_5b")
        yield f"{pipeline}: {model} {'holds' if held else 'does not hold'} its first latent frame; use {own}"
    if "control_latents" in given and len(config.references) > 1:
        yield f"references: {len(config.references)} pictures; {model} takes one"


def speech_problems(config, transformer, given: set[str]) -> Iterator[str]:
    """Of a voice."""
    model, pipeline = names(config)
    layers, count = transformer.get("audio_inject_layers", ()), transformer["num_layers"]
    if layers and "audio_tokens" not in given:
        yield f"{model} wants a sound, and {pipeline} gives none; use pipeline=s2v"
    elif "audio_tokens" in given and not layers:
        yield f"{model} has no use for a sound, which {pipeline} gives; use model=wan22_s2v_14b"
    elif layers:
        if not all(0 <= layer < count for layer in layers):
            yield f"model.architecture.transformer.audio_inject_layers={layers}: there are {count} blocks, from 0 on"
        features, taken = sound_shape(config), (transformer["num_audio_layers"], transformer["audio_dim"])
        if features != taken:
            yield f"model.architecture.audio_encoder: gives {features} features a frame, {model} takes {taken}"
        remembered, needed = config.pipeline.segments.remembered, transformer["motion_frames"]
        if remembered != needed:
            yield f"pipeline.segments.remembered={remembered}: {model} goes on from {needed} frames; set it to that"
        for side in ("height", "width"):
            size = config.resolution[side]
            if size % 64:
                yield f"resolution.{side}={size}: must be a multiple of 64 for {model}; {nearest_multiple(size, 64)}"


def sparse_problems(config, transformer, given: set[str]) -> Iterator[str]:
    kind, trained_for = config.attention.self.sparse.kind, transformer.get("attention_type", "none")
    model, pipeline = names(config)
    if kind != trained_for and (kind not in UNTRAINED or trained_for != "none"):
        yield f"sparse={kind}: {model} is trained for {trained_for}; set sparse={trained_for}, or choose another model"
    if kind != "none" and "vace_layers" in transformer:
        yield f"sparse={kind}: control blocks (VACE) attend to all of their tokens; set sparse=none"
    if kind != "none" and tokens_behind(config):
        yield f"sparse={kind}: lists are for the video's tokens, and {pipeline} has a reference's; set sparse=none"
    if (window := config.attention.self.window) is not None and tokens_behind(config):
        reason = f"{pipeline} has a reference's tokens behind the video's, far from most of them"
        yield f"attention.self.window={window}: {reason}; set null"
    if kind == "vsa" and "first_latent" in given:
        yield f"sparse=vsa: its tokens lie in tiles, and {pipeline} gives a first frame; use pipeline=t2v"


def live_problems(config, transformer, given: set[str]) -> Iterator[str]:
    """A live video's positions beyond RoPE's table."""
    if not live.is_on(config) or config.live.chunk is None:
        return
    most, own = transformer["rope_max_seq_len"], config.live.positions == "absolute"
    latents = geometry(config.model.architecture).latent_shape(config.resolution)[2]
    needed = latents if own or config.live.window is None else min(latents, config.live.window)
    if needed > most:
        key = f"resolution.frames={config.resolution.frames}" if own else f"live.window={config.live.window}"
        remedy = "live.positions=relative with a window has no such limit" if own else f"at most {most}"
        table = f"RoPE's table of model={config.model.name} has {most} positions"
        yield f"{key}: {needed} latent frames, and {table}; {remedy}"


CHECKS = (
    picture_problems, control_problems, driving_problems, pose_problems, fun_problems, speech_problems, sparse_problems,
    live_problems,
)
