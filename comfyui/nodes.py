"""Wan 2.1 in ComfyUI: nodes that compose the same configs and use the same Session as run.py.

Node ids, input names and their order are those of the TPU nodes these replace, so that saved workflows load. Widgets
override the config; everything else comes from the config, by default the embedded demo model.
"""
import gc
import os
import sys

from omegaconf import OmegaConf

from wan_torchax.config import commandline, inputs
from wan_torchax.config.geometry import Geometry, text_count
from wan_torchax.config.long import MOST_FRAMES
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import SEEDS

from . import files, host, settings
from .settings import ANY_SIZE, check_files, choose, compose, from_files, from_prompts, from_widgets, in_words_of_nodes

# JAX would preallocate most of a GPU's memory, but ComfyUI's other models need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

try:
    START = compose()  # the widgets' defaults
except (ConfigError, ValueError) as error:  # no workflow is open yet
    raise ImportError(f"{settings.OWNER}: {error}") from error


def geometry_of(config) -> Geometry:
    return family_of(config).geometry(config.model.architecture)


GEOMETRY = geometry_of(START)
MODEL_ID = settings.model_paths()[START.model.name]


# ---------------------------------------------------------------- work


def run_stages(names, config, values=None, helpers=()):
    """Run some stages of the pipeline on given values; returns all values (numpy).

    `helpers` are further stages whose weights may be used: the decoder, for previews. Torch is left unchanged:
    torchax is on only while a program is traced, in the session's own thread.
    """
    import torch

    from wan_torchax.session import session

    values = values or {}
    # ComfyUI runs nodes in inference mode, which is per thread, but the session builds and traces modules in two
    # threads: turned off, so that torch behaves in both as under run.py.
    with torch.inference_mode(False):
        config = inputs.with_texts(config)
        resolved = session.resolve(config, [*names, *helpers])
        return session.run(resolved, names, resolved.inputs() | values, host.Listener(config.steps))


def compose_part(overrides):
    """The config of a node that runs only a part of the pipeline."""
    config = compose(overrides)
    if taken := inputs.taken(config):
        raise ConfigError(f"{config.model.name} starts from {', '.join(taken)}: use Wan 2.1 TPU Full Pipeline for it")
    if "denoise" not in config.pipeline.stages:
        pipeline = f"pipeline={config.pipeline.name}"
        raise ConfigError(f"{config.model.name} has {pipeline}: use Wan 2.1 TPU Full Pipeline for it")
    if more := [value for value in config.pipeline.stages["denoise"].takes if value != "embeddings"]:
        raise ConfigError(f"{config.model.name} takes {', '.join(more)} too: use Wan 2.1 TPU Full Pipeline for it")
    return config


def check_tensor(name, tensor, shape, remedy) -> None:
    """Check a tensor against a model's shape, in which None is any size; a workflow can pass anything."""
    import torch

    is_tensor = isinstance(tensor, torch.Tensor)
    had = tuple(tensor.shape) if is_tensor else type(tensor).__name__
    if not is_tensor or len(had) != len(shape) or any(want not in (None, size) for want, size in zip(shape, had)):
        raise ConfigError(f"{name}: {had} is not {str(shape).replace('None', 'any')}; {remedy}")


def release() -> None:
    """Release weights, programs and embeddings."""
    if "wan_torchax.session" in sys.modules:
        sys.modules["wan_torchax.session"].session.clear()
        gc.collect()
        host.log.info("let go of weights and programs: ComfyUI asked for memory")


host.on_memory_request(release)


def as_image(frames):
    """uint8 frames (frames, height, width, 3) as ComfyUI's IMAGE: float32 from 0 to 1."""
    import torch

    return torch.tensor(frames, dtype=torch.float32) / 255


# ---------------------------------------------------------------- widgets


def text_widgets() -> dict:
    texts = {"prompt": START.prompt.text, "negative_prompt": START.prompt.negative}
    tooltips = {
        "prompt": "What the video shows",
        "negative_prompt": "What it should not show; ignored if guidance_scale is 1 or less, unless guider=nag",
    }
    return {
        name: ("STRING", {"multiline": True, "default": text or "", "tooltip": tooltips[name]})
        for name, text in texts.items()
    }


def sampling_widgets() -> dict:
    """Ranges that cover every model; validation checks the model's own."""
    scale, multiples, size = GEOMETRY.frame_scale, GEOMETRY.multiples, START.resolution
    sides, model_sizes = {"min": 64, "max": 1280}, "the demo model takes 64 to 256, the others 256 to 1280"
    return {
        "height": number(size.height, f"Pixels; {model_sizes}", **sides, step=multiples["height"]),
        "width": number(size.width, f"Pixels; {model_sizes}", **sides, step=multiples["width"]),
        "num_frames": number(size.frames, f"Frames: a multiple of {scale}, plus 1", min=1, max=MOST_FRAMES, step=scale),
        "num_inference_steps": number(START.steps, "Denoising steps: more take longer and look better", min=1, max=100),
        "guidance_scale": number(
            START.guidance_scale, "How closely the video follows the prompt; 1 turns guidance off: half the work",
            min=0.0, max=20.0, step=0.1,
        ),
        "seed": number(
            START.seed, "The noise to start from: the same seed and settings give the same video",
            min=0, max=SEEDS - 1, control_after_generate=True,
        ),
    }


def number(default, tooltip, **limits) -> tuple:
    return "FLOAT" if isinstance(default, float) else "INT", {"default": default, "tooltip": tooltip, **limits}


def model_widget() -> dict:
    tooltip = f"Used if no Config node is connected: {', '.join(settings.model_paths().values())}"
    return {"model_id": ("STRING", {"default": MODEL_ID, "tooltip": tooltip})}


def flow_shift_widget() -> dict:
    tooltip = "How far sampling leans towards high noise, the coarse shapes: 3 for 480p, 5 for 720p"
    return {"flow_shift": number(START.resolution.flow_shift, tooltip, min=1.0, max=10.0, step=0.5)}


def fps_widget() -> dict:
    return {"fps": number(START.resolution.fps, "Frames per second, for the node that writes videos", min=1, max=120)}


def file_inputs() -> dict:
    """Pictures and videos, for models that take them."""
    tooltips = {
        "image": ("IMAGE", "The picture that the video starts with, for image-to-video models"),
        "last_image": ("IMAGE", "The picture that it ends with, for first-and-last-frame models"),
        "video": ("IMAGE", "Frames of a video to change, be guided by or move like, for models that take one"),
        "mask": ("MASK", "The parts to regenerate, for VACE and pipeline=replace: a mask per frame, or one for all"),
        "references": ("IMAGE", "Pictures of what should appear, for VACE: a batch; one for Fun-Control"),
        # At the end: saved workflows know inputs by their order.
        "pose": ("IMAGE", "Frames of skeletons that the character moves like, for Animate"),
        "face": ("IMAGE", "Frames of the face, square, whose expressions it has, for Animate"),
        "background": ("IMAGE", "Frames of the video that it is put into, for Animate's pipeline=replace"),
        "audio": ("AUDIO", "What is said or sung, for speech-to-video"),
    }
    return {name: (kind, {"tooltip": tooltip}) for name, (kind, tooltip) in tooltips.items()}


CONFIG_TOOLTIP = "From a Wan 2.1 Config node: connect the same one to all nodes. Without it, model_id chooses the model"
CONFIG_INPUT = {"config": ("WAN_CONFIG", {"tooltip": CONFIG_TOOLTIP})}


def check_seed(node, seed) -> bool | str:
    """ComfyUI calls this before queueing; earlier nodes saved seeds of up to 53 bits, of which torch uses the last 32.
    """
    if seed is None:  # it comes from a link; the config's validation will check it
        return True
    if type(seed) is not int:
        return f"{seed!r} is not a whole number"
    if 0 <= seed < SEEDS:
        return True
    return f"{seed} is not from 0 to {SEEDS - 1}; {seed % SEEDS} (it modulo 2**32) gives the same video"


# ---------------------------------------------------------------- nodes


CHOICES = {  # groups of conf/ -> tooltips
    "preset": "A complete configuration; the three choices below replace parts of it",
    "model": "default: the preset's, or the embedded demo model",
    "resolution": "Size, frames, fps and flow shift; default: the preset's, or the demo model's",
    "mesh": "The chips to use; default: the preset's, or what this machine has",
}


CONFIG_TYPES = ("WAN_CONFIG", "INT", "INT", "INT", "INT", "FLOAT", "FLOAT", "INT")
CONFIG_NAMES = (
    "config", "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "flow_shift", "fps",
)


def with_numbers(chosen) -> tuple:
    """The outputs of a Config or an Adapter node: the settings, and their numbers for other nodes' widgets."""
    values = settings.widget_values(compose(chosen.overrides))
    return chosen, *(values[name] for name in CONFIG_NAMES[1:])


class Wan21Config:
    CATEGORY = "TPU/Wan2.1"
    DESCRIPTION = (
        "Settings for the other Wan 2.1 nodes: a preset, or a model, a resolution and a mesh, and further settings, "
        "one per line. Connect config to all of them; the numbers can be connected to their widgets."
    )
    FUNCTION = "configure"
    RETURN_TYPES, RETURN_NAMES = CONFIG_TYPES, CONFIG_NAMES

    @classmethod
    def INPUT_TYPES(cls):
        choices = {
            group: ([settings.UNCHANGED, *commandline.options(group)], {"tooltip": tooltip})
            for group, tooltip in CHOICES.items()
        }
        tooltip = "Further settings, one per line, like steps=40 or scheduler=euler. Lines with # in front are ignored"
        text = {"multiline": True, "default": "", "placeholder": "key=value", "tooltip": tooltip}
        return {"required": choices | {"overrides": ("STRING", text)}}

    @classmethod
    @in_words_of_nodes(widgets={})  # its lines name keys of the config
    def IS_CHANGED(cls, **choices):
        """The config itself: files in conf/ may have been edited since the last run."""
        return OmegaConf.to_yaml(compose(settings.from_config_node(**choices).overrides), resolve=True)

    @in_words_of_nodes(widgets={})
    def configure(self, **choices):
        return with_numbers(settings.from_config_node(**choices))


class Wan21Adapter:
    CATEGORY = "TPU/Wan2.1"
    DESCRIPTION = (
        "An adapter (LoRA) for the transformer, merged into its weights while they load. Goes between a Wan 2.1 Config "
        "and the Wan 2.1 TPU Sampler; several in a row add up. Link the Sampler's numbers to the last of them: some "
        "adapters are made for few steps without guidance."
    )
    FUNCTION = "adapt"
    RETURN_TYPES, RETURN_NAMES = CONFIG_TYPES, CONFIG_NAMES

    @classmethod
    def INPUT_TYPES(cls):
        tooltip = "The project's own, and the safetensors files in ComfyUI's LoRA folders"
        experts = "For models with two transformers: the one for high or low noise; default: as the adapter says"
        return {"required": {
            "config": ("WAN_CONFIG", {"tooltip": "From a Wan 2.1 Config node, or another of these"}),
            "adapter": (settings.adapter_names(), {"tooltip": tooltip}),
            "strength": number(1.0, "Factor of the adapter's update; 0 is off", min=-10.0, max=10.0, step=0.05),
            "target": ([settings.UNCHANGED, "all", "high", "low"], {"tooltip": experts}),
        }}

    @in_words_of_nodes(widgets={})
    def adapt(self, config, adapter, strength, target):
        return with_numbers(settings.from_adapter_node(config, adapter, strength, target))


class Wan21TextEncoder:
    CATEGORY = "TPU/Wan2.1"
    DESCRIPTION = "Prompt and negative prompt to embeddings, for the Wan 2.1 TPU Sampler."
    FUNCTION = "encode"
    RETURN_TYPES = ("TENSOR", "TENSOR")  # (1, tokens, width) each
    RETURN_NAMES = ("prompt_embeds", "negative_prompt_embeds")

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": text_widgets(), "optional": model_widget() | CONFIG_INPUT}

    @in_words_of_nodes()
    def encode(self, prompt, negative_prompt, model_id=MODEL_ID, config=None):
        import torch

        texts = from_prompts(prompt, negative_prompt)
        # The sampler decides about guidance and previews later, so the negative prompt is always encoded.
        later = "guidance_scale=2", "preview_every=0"
        composed = compose_part([*choose(config, model_id), *texts, *later, *ANY_SIZE])
        embeddings = torch.tensor(run_stages(["text"], composed)["embeddings"])
        return embeddings[:1].clone(), embeddings[1:].clone()


class Wan21TPUSampler:
    CATEGORY = "TPU/Wan2.1"
    DESCRIPTION = "Embeddings to the latents of a video, for the Wan 2.1 TPU VAE Decoder. Shows previews."
    FUNCTION = "sample"
    RETURN_TYPES = ("LATENT", "INT")  # (1, channels, frames, height, width), normalised as in the model
    RETURN_NAMES = ("latents", "num_frames")

    @classmethod
    def INPUT_TYPES(cls):
        tooltip = {"tooltip": "From a Wan 2.1 Text Encoder"}
        embeddings = {"prompt_embeds": ("TENSOR", tooltip), "negative_prompt_embeds": ("TENSOR", tooltip)}
        optional = model_widget() | flow_shift_widget() | CONFIG_INPUT
        return {"required": embeddings | sampling_widgets(), "optional": optional}

    VALIDATE_INPUTS = classmethod(check_seed)

    @in_words_of_nodes()
    def sample(self, prompt_embeds, negative_prompt_embeds, height, width, num_frames, num_inference_steps,
               guidance_scale, seed, model_id=MODEL_ID, flow_shift=START.resolution.flow_shift, config=None):
        import torch

        sampling = from_widgets(
            config, height=height, width=width, num_frames=num_frames, num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale, seed=seed, flow_shift=flow_shift,
        )
        composed = compose_part([*choose(config, model_id), *sampling])
        prompts = {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}
        shape = 1, *family_of(composed).texts[0].shapes(composed)["embeddings"]
        remedy = "connect a Wan 2.1 Text Encoder, and one Config node to both, or give both the same model_id"
        for name, tensor in prompts.items():
            check_tensor(name, tensor, shape, f"{composed.model.name} takes (1, tokens, width); {remedy}")
        taken = list(prompts.values())[: text_count(composed)]
        embeddings = torch.cat(taken).float().cpu().numpy()
        values = run_stages(["denoise"], composed, {"embeddings": embeddings}, helpers=["decode"])
        return {"samples": torch.tensor(values["latents"]), "num_frames": num_frames}, num_frames


class Wan21TPUVAEDecoder:
    CATEGORY = "TPU/Wan2.1"
    DESCRIPTION = "Latents of the Wan 2.1 TPU Sampler to frames, for Create Video."
    FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE", "FLOAT")
    RETURN_NAMES = ("frames", "fps")

    @classmethod
    def INPUT_TYPES(cls):
        latents = {"latents": ("LATENT", {"tooltip": "From a Wan 2.1 TPU Sampler"})}
        return {"required": latents, "optional": model_widget() | fps_widget() | CONFIG_INPUT}

    @in_words_of_nodes()
    def decode(self, latents, model_id=MODEL_ID, fps=START.resolution.fps, config=None):
        samples = latents.get("samples") if isinstance(latents, dict) else latents
        chosen = choose(config, model_id)
        composed = compose_part([*chosen, *ANY_SIZE])
        geometry = geometry_of(composed)
        takes = f"{composed.model.name} takes one video, (1, channels, frames, height, width)"
        remedy = f"{takes}; connect Wan 2.1 TPU Sampler, and the same Config node to both"
        check_tensor("latents", samples, (1, geometry.channels, None, None, None), remedy)
        pixels = geometry.pixels(samples.shape)
        size = from_widgets(height=pixels["height"], width=pixels["width"], num_frames=pixels["frames"], fps=fps)
        values = run_stages(["decode"], compose([*chosen, *size]), {"latents": samples.float().cpu().numpy()})
        return as_image(values["frames"]), float(fps)


class Wan21TPUPipeline:
    CATEGORY = "TPU/Wan2.1"
    DESCRIPTION = (
        "Prompt to frames: Wan 2.1 Text Encoder, TPU Sampler and TPU VAE Decoder in one node. Takes pictures and "
        "videos for the models that start from them."
    )
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE", "FLOAT")
    RETURN_NAMES = ("frames", "fps")

    @classmethod
    def INPUT_TYPES(cls):
        optional = model_widget() | fps_widget() | flow_shift_widget() | CONFIG_INPUT | file_inputs()
        return {"required": text_widgets() | sampling_widgets(), "optional": optional}

    VALIDATE_INPUTS = classmethod(check_seed)

    @in_words_of_nodes()
    def generate(self, prompt, negative_prompt, height, width, num_frames, num_inference_steps, guidance_scale, seed,
                 model_id=MODEL_ID, fps=START.resolution.fps, flow_shift=START.resolution.flow_shift, config=None,
                 image=None, last_image=None, video=None, mask=None, references=None, pose=None, face=None,
                 background=None, audio=None):
        sampling = from_widgets(
            config, height=height, width=width, num_frames=num_frames, num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale, seed=seed, flow_shift=flow_shift, fps=fps,
        )
        given = {
            "image": image, "last_image": last_image, "video": video, "pose": pose, "face": face,
            "background": background, "mask": mask, "references": references, "audio": audio,
        }
        overrides = [*choose(config, model_id), *from_prompts(prompt, negative_prompt), *sampling]
        check_files(compose(overrides), given)
        with files.private_folder() as folder:
            composed = compose([*overrides, *from_files(folder, fps, given)], files="whole")
            return as_image(run_stages(list(composed.stages), composed)["frames"]), float(fps)
