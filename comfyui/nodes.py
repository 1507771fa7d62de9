"""Wan 2.1 in ComfyUI: nodes that compose the configs of run.py and ask the Session that run.py asks.

Node ids, input names and their order are those of the TPU nodes these replace, so that saved workflows load. What a
widget says wins over the config; everything else comes from the config, by default the embedded demo model.
"""
import gc
import os
import sys

from omegaconf import OmegaConf

from wan_torchax.config import commandline, inputs
from wan_torchax.config.geometry import Geometry, guided
from wan_torchax.config.validation import validate

from . import host

# JAX would take most of a GPU's memory at once, and ComfyUI's other models need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# What suits a server better than a command; a Config node can say otherwise.
SERVER_DEFAULTS = ("keep_resident=true", "preview_every=5")

LARGEST_SEED = 2**53 - 1  # exact in JavaScript
UNCHANGED = "default"  # a choice of the Config node: as the preset or conf/config.yaml says


def compose(overrides):
    """The config that `python run.py <overrides>` would run with, checked."""
    config = commandline.compose(commandline.rewrite(list(overrides)))
    validate(config)
    return config


DEMO = compose(())  # what the widgets start with
GEOMETRY = Geometry.of(DEMO.model.architecture)


# ---------------------------------------------------------------- work


def run_stages(names, overrides, values=None, helpers=()):
    """Compose the config and run some stages of the pipeline on values at hand; returns all values (numpy).

    `helpers` are stages whose weights may be used on the way: the decoder, for previews. Torch is what it was before
    and after, whatever happens: torchax is on only while a program is traced, in the session's own thread.
    """
    import torch

    from wan_torchax.session import session

    # ComfyUI runs nodes in inference mode, which is a thread's own, and the session builds and traces modules in two
    # threads: in both, torch is here as it is under run.py.
    with torch.inference_mode(False):
        config = inputs.with_texts(compose([*SERVER_DEFAULTS, *overrides]))
        check_values(config.model, values or {})
        resolved = session.resolve(config, [*names, *helpers])
        return session.run(resolved, names, resolved.inputs() | (values or {}), host.Listener(config.steps))


def check_values(model, values) -> None:
    """Embeddings and latents must be those of a model like this one; compiled programs would say so less clearly."""
    tokens = (model.text_tokens, model.architecture.transformer.text_dim)
    if "embeddings" in values and values["embeddings"].shape[1:] != tokens:
        shape = values["embeddings"].shape[1:]
        remedy = "use one config or model_id for all nodes"
        raise ValueError(f"embeddings of (tokens, width) {shape}: {model.name} takes {tokens}; {remedy}")
    channels = Geometry.of(model.architecture).channels
    if "latents" in values and values["latents"].shape[1] != channels:
        remedy = "use this pack's sampler with the same config"
        raise ValueError(f"latents of {values['latents'].shape[1]} channels: {model.name} takes {channels}; {remedy}")


def release() -> None:
    """Let go of weights, programs and embeddings."""
    if "wan_torchax.session" in sys.modules:
        sys.modules["wan_torchax.session"].session.clear()
        gc.collect()


host.on_memory_request(release)


def choose_config(config, model_id) -> list[str]:
    """The Config node's overrides, or without one those that choose a model by its path or Hub id."""
    if config is not None:
        return list(config)
    models = commandline.options("model")
    paths = {OmegaConf.load(commandline.CONF / "model" / f"{name}.yaml").path: name for name in models}
    if model_id not in paths:
        remedy = "connect a Config node to use another checkpoint"
        raise ValueError(f"model_id={model_id}: not a path in conf/model ({', '.join(paths)}); {remedy}")
    return [f"model={paths[model_id]}"]


def prompt_overrides(prompt, negative_prompt) -> list[str]:
    texts = [f"prompt.text={prompt}", f"prompt.negative={negative_prompt}"]
    return [*texts, "prompt.file=null", "prompt.negative_file=null"]


# Widgets, by their names in the earlier TPU nodes -> keys of the config.
SAMPLING = {
    "height": "resolution.height", "width": "resolution.width", "num_frames": "resolution.frames",
    "flow_shift": "resolution.flow_shift", "num_inference_steps": "steps", "guidance_scale": "guidance_scale",
    "seed": "seed",
}


def sampling_overrides(**widgets) -> list[str]:
    """What the widgets say, as overrides."""
    return [f"{SAMPLING[name]}={value}" for name, value in widgets.items()]


def image(frames):
    """uint8 frames (frames, height, width, 3) as ComfyUI's IMAGE: float32 from 0 to 1."""
    import torch

    return torch.tensor(frames, dtype=torch.float32) / 255


# ---------------------------------------------------------------- widgets


def text_widgets() -> dict:
    return {
        "prompt": ("STRING", {"multiline": True, "default": DEMO.prompt.text}),
        "negative_prompt": ("STRING", {"multiline": True, "default": DEMO.prompt.negative}),
    }


def sampling_widgets() -> dict:
    """Ranges for every model; the config's own checks say which part of them a model takes."""
    size, scale = {"min": 64, "max": 1280}, GEOMETRY.frame_scale
    frames = {"min": 1, "max": 121, "step": scale, "tooltip": f"{scale}n+1"}
    guidance = {"min": 0.0, "max": 20.0, "step": 0.1, "tooltip": "1 turns guidance off: half the work"}
    return {
        "height": ("INT", {"default": DEMO.resolution.height, **size, "step": GEOMETRY.multiples["height"]}),
        "width": ("INT", {"default": DEMO.resolution.width, **size, "step": GEOMETRY.multiples["width"]}),
        "num_frames": ("INT", {"default": DEMO.resolution.frames, **frames}),
        "num_inference_steps": ("INT", {"default": DEMO.steps, "min": 1, "max": 100}),
        "guidance_scale": ("FLOAT", {"default": DEMO.guidance_scale, **guidance}),
        "seed": ("INT", {"default": DEMO.seed, "min": 0, "max": LARGEST_SEED, "control_after_generate": True}),
    }


def model_widget() -> dict:
    tooltip = "A path or Hub id in conf/model. Not looked at when a config is connected"
    return {"model_id": ("STRING", {"default": DEMO.model.path, "tooltip": tooltip})}


def flow_shift_widget() -> dict:
    shift = {"min": 1.0, "max": 10.0, "step": 0.5, "tooltip": "480p: 3, 720p: 5"}
    return {"flow_shift": ("FLOAT", {"default": DEMO.resolution.flow_shift, **shift})}


def fps_widget() -> dict:
    return {"fps": ("INT", {"default": DEMO.resolution.fps, "min": 1, "max": 120})}


CONFIG_TOOLTIP = "From a Wan 2.1 Config node; without one, model_id chooses the model"
CONFIG_INPUT = {"config": ("WAN_CONFIG", {"tooltip": CONFIG_TOOLTIP})}


# ---------------------------------------------------------------- nodes


class Wan21Config:
    """A preset, choices from conf/ and any overrides, for the other nodes; its numbers link to their widgets."""

    CATEGORY = "TPU/Wan2.1"
    DESCRIPTION = "Everything run.py's command line can say: a preset, a model, a mesh, and one Hydra override a line."
    FUNCTION = "configure"
    RETURN_TYPES = ("WAN_CONFIG", "INT", "INT", "INT", "INT", "FLOAT", "FLOAT", "INT")
    RETURN_NAMES = (
        "config", "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "flow_shift", "fps",
    )

    @classmethod
    def INPUT_TYPES(cls):
        groups = ("preset", "model", "resolution", "mesh")
        choices = {group: ([UNCHANGED, *commandline.options(group)],) for group in groups}
        tooltip = "One a line, as on run.py's command line: sharding.transformer.weights.attention_out.spec=[null]"
        text = {"multiline": True, "default": "", "placeholder": "key=value", "tooltip": tooltip}
        return {"required": choices | {"overrides": ("STRING", text)}}

    @classmethod
    def IS_CHANGED(cls, **choices):
        """The config itself: files in conf/ may have been edited since the last run."""
        return OmegaConf.to_yaml(compose(config_overrides(**choices)), resolve=True)

    def configure(self, **choices):
        overrides = config_overrides(**choices)
        config = compose(overrides)
        size, sampling = config.resolution, (config.steps, config.guidance_scale)
        return overrides, size.height, size.width, size.frames, *sampling, size.flow_shift, size.fps


def config_overrides(overrides="", **choices) -> tuple[str, ...]:
    chosen = [f"{group}={name}" for group, name in choices.items() if name != UNCHANGED]
    lines = [line.strip() for line in overrides.splitlines()]
    return (*chosen, *(line for line in lines if line and not line.startswith("#")))


class Wan21TextEncoder:
    """Prompt and negative prompt to embeddings, (1, tokens, width) each."""

    CATEGORY = "TPU/Wan2.1"
    FUNCTION = "encode"
    RETURN_TYPES = ("TENSOR", "TENSOR")
    RETURN_NAMES = ("prompt_embeds", "negative_prompt_embeds")

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": text_widgets(), "optional": model_widget() | CONFIG_INPUT}

    def encode(self, prompt, negative_prompt, model_id=DEMO.model.path, config=None):
        import torch

        # The sampler chooses guidance later, so the negative prompt is encoded whatever the config says; sizes do not
        # matter here, and any that the model takes will pass.
        anything = ["guidance_scale=2", "resolution.height=${model.min_size}", "resolution.width=${model.min_size}"]
        overrides = [*choose_config(config, model_id), *prompt_overrides(prompt, negative_prompt), *anything]
        embeddings = torch.tensor(run_stages(["text"], overrides)["embeddings"])
        return embeddings[:1].clone(), embeddings[1:].clone()


class Wan21TPUSampler:
    """Embeddings to latents (1, channels, frames, height, width), normalised as the model has them."""

    CATEGORY = "TPU/Wan2.1"
    FUNCTION = "sample"
    RETURN_TYPES = ("LATENT", "INT")
    RETURN_NAMES = ("latents", "num_frames")

    @classmethod
    def INPUT_TYPES(cls):
        embeddings = {"prompt_embeds": ("TENSOR",), "negative_prompt_embeds": ("TENSOR",)}
        optional = model_widget() | flow_shift_widget() | CONFIG_INPUT
        return {"required": embeddings | sampling_widgets(), "optional": optional}

    def sample(self, prompt_embeds, negative_prompt_embeds, height, width, num_frames, num_inference_steps,
               guidance_scale, seed, model_id=DEMO.model.path, flow_shift=DEMO.resolution.flow_shift, config=None):
        import torch

        sampling = sampling_overrides(
            height=height, width=width, num_frames=num_frames, num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale, seed=seed, flow_shift=flow_shift,
        )
        overrides = [*choose_config(config, model_id), *sampling]
        prompts = [prompt_embeds, negative_prompt_embeds] if guided(compose(overrides)) else [prompt_embeds]
        embeddings = torch.cat(prompts).float().numpy()
        values = run_stages(["denoise"], overrides, {"embeddings": embeddings}, helpers=["decode"])
        return {"samples": torch.tensor(values["latents"]), "num_frames": num_frames}, num_frames


class Wan21TPUVAEDecoder:
    """Latents of the sampler to frames."""

    CATEGORY = "TPU/Wan2.1"
    FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE", "FLOAT")
    RETURN_NAMES = ("frames", "fps")

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latents": ("LATENT",)}, "optional": model_widget() | fps_widget() | CONFIG_INPUT}

    def decode(self, latents, model_id=DEMO.model.path, fps=DEMO.resolution.fps, config=None):
        samples = latents["samples"]
        if samples.ndim != 5 or samples.shape[0] != 1:
            shape = tuple(samples.shape)
            raise ValueError(f"latents of shape {shape}: it takes one video, (1, channels, frames, height, width)")
        chosen = choose_config(config, model_id)
        pixels = Geometry.of(compose(chosen).model.architecture).pixels(samples.shape)
        size = [f"resolution.{key}={value}" for key, value in (pixels | {"fps": fps}).items()]
        values = run_stages(["decode"], [*chosen, *size], {"latents": samples.float().cpu().numpy()})
        return image(values["frames"]), float(fps)


class Wan21TPUPipeline:
    """Prompt to frames in one node."""

    CATEGORY = "TPU/Wan2.1"
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE", "FLOAT")
    RETURN_NAMES = ("frames", "fps")

    @classmethod
    def INPUT_TYPES(cls):
        optional = model_widget() | fps_widget() | flow_shift_widget() | CONFIG_INPUT
        return {"required": text_widgets() | sampling_widgets(), "optional": optional}

    def generate(self, prompt, negative_prompt, height, width, num_frames, num_inference_steps, guidance_scale, seed,
                 model_id=DEMO.model.path, fps=DEMO.resolution.fps, flow_shift=DEMO.resolution.flow_shift, config=None):
        sampling = sampling_overrides(
            height=height, width=width, num_frames=num_frames, num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale, seed=seed, flow_shift=flow_shift,
        )
        texts = prompt_overrides(prompt, negative_prompt)
        overrides = [*choose_config(config, model_id), *texts, *sampling, f"resolution.fps={fps}"]
        return image(run_stages(["text", "denoise", "decode"], overrides)["frames"]), float(fps)
