"""Wan 2.1 in ComfyUI: nodes that compose the configs of run.py and call the functions of run.py.

Node ids, input names and their order are those of the TPU nodes these replace, so that saved workflows load. What a
widget says wins over the config; everything else comes from the config, by default the embedded demo model.
"""
import functools
import gc
import os

from . import host, project

# JAX would take most of a GPU's memory at once, and ComfyUI's other models need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# What suits a server better than a command; a Config node can say otherwise.
SERVER_DEFAULTS = ("keep_resident=true", "preview_every=5")

LARGEST_SEED = 2**53 - 1  # exact in JavaScript
UNCHANGED = "default"  # a choice of the Config node: as the preset or conf/config.yaml says

with project.at_work():
    DEMO = project.compose(())  # what the widgets start with


# ---------------------------------------------------------------- work


def run_stages(names, overrides, results=None, helpers=()):
    """Compose the config and run some stages of the pipeline; returns the config and the stages' results (numpy).

    `helpers` are stages whose weights may be used on the way: the decoder, for previews. Torch is what it was before
    and after, whatever happens: torchax is on only while a program is traced, in the engine's own thread.
    """
    import torch

    # ComfyUI runs nodes in inference mode, which is a thread's own, and the engine builds and traces modules in two
    # threads: in both, torch is here as it is under run.py.
    with project.at_work(), torch.inference_mode(False):
        import run
        from wan_torchax.records import outputs as records

        config = project.compose([*SERVER_DEFAULTS, *overrides])
        folders = {name: run.find_checkpoint(config, name) for name in (*names, *helpers)}
        check_inputs(config.model, results or {})
        mesh = run.start_jax(config)
        from wan_torchax import session as engine  # after the flags are set

        watcher = engine.Watcher(host.Bar, on_preview=functools.partial(host.show_preview, config.steps))
        prompts = run.read_prompts(config)
        return config, engine.execute(config, mesh, list(names), folders, prompts, results or {}, records.Clock(), watcher)


def check_inputs(model, results) -> None:
    """Embeddings and latents must be those of a model like this one; the compiled programs would say so less clearly."""
    tokens = (model.text_tokens, model.architecture.transformer.text_dim)
    if "text" in results and results["text"].shape[1:] != tokens:
        raise ValueError(f"embeddings of (tokens, width) {results['text'].shape[1:]}: {model.name} takes {tokens}; use one config or model_id for all nodes")
    channels = model.architecture.vae.z_dim
    if "denoise" in results and results["denoise"].shape[1] != channels:
        raise ValueError(f"latents of {results['denoise'].shape[1]} channels: {model.name} takes {channels}; use this pack's sampler with the same config")


def release() -> None:
    """Let go of weights, programs and embeddings."""
    if "engine" in project.modules:
        project.modules["engine"].kept.clear()
        gc.collect()


host.on_memory_request(release)


def choose_config(config, model_id) -> list[str]:
    """The Config node's overrides, or without one those that choose a model by its path or Hub id."""
    if config is not None:
        return list(config)
    from omegaconf import OmegaConf

    paths = {OmegaConf.load(project.ROOT / "conf" / "model" / f"{name}.yaml").path: name for name in project.options("model")}
    if model_id not in paths:
        raise ValueError(f"model_id={model_id}: not a path in conf/model ({', '.join(paths)}); connect a Config node to use another checkpoint")
    return [f"model={paths[model_id]}"]


def prompt_overrides(prompt, negative_prompt) -> list[str]:
    return [f"prompt.text={prompt}", f"prompt.negative={negative_prompt}", "prompt.file=null", "prompt.negative_file=null"]


def sampling_overrides(height, width, num_frames, num_inference_steps, guidance_scale, seed, flow_shift) -> list[str]:
    size = [f"resolution.height={height}", f"resolution.width={width}", f"resolution.frames={num_frames}", f"resolution.flow_shift={flow_shift}"]
    return [*size, f"steps={num_inference_steps}", f"guidance_scale={guidance_scale}", f"seed={seed}"]


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
    size = {"min": 64, "max": 1280, "step": 16}
    return {
        "height": ("INT", {"default": DEMO.resolution.height, **size}),
        "width": ("INT", {"default": DEMO.resolution.width, **size}),
        "num_frames": ("INT", {"default": DEMO.resolution.frames, "min": 1, "max": 121, "step": 4, "tooltip": "4n+1"}),
        "num_inference_steps": ("INT", {"default": DEMO.steps, "min": 1, "max": 100}),
        "guidance_scale": ("FLOAT", {"default": DEMO.guidance_scale, "min": 0.0, "max": 20.0, "step": 0.1, "tooltip": "1 turns guidance off: half the work"}),
        "seed": ("INT", {"default": DEMO.seed, "min": 0, "max": LARGEST_SEED, "control_after_generate": True}),
    }


def model_widget() -> dict:
    return {"model_id": ("STRING", {"default": DEMO.model.path, "tooltip": "A path or Hub id in conf/model. Not looked at when a config is connected"})}


def flow_shift_widget() -> dict:
    return {"flow_shift": ("FLOAT", {"default": DEMO.resolution.flow_shift, "min": 1.0, "max": 10.0, "step": 0.5, "tooltip": "480p: 3, 720p: 5"})}


def fps_widget() -> dict:
    return {"fps": ("INT", {"default": DEMO.resolution.fps, "min": 1, "max": 120})}


CONFIG_INPUT = {"config": ("WAN_CONFIG", {"tooltip": "From a Wan 2.1 Config node; without one, model_id chooses the model"})}


# ---------------------------------------------------------------- nodes


class Wan21Config:
    """A preset, choices from conf/ and any Hydra overrides, for the other nodes; its numbers can be linked to their widgets."""

    CATEGORY = "TPU/Wan2.1"
    DESCRIPTION = "Everything run.py's command line can say: a preset, a model, a mesh, and one Hydra override a line."
    FUNCTION = "configure"
    RETURN_TYPES = ("WAN_CONFIG", "INT", "INT", "INT", "INT", "FLOAT", "FLOAT", "INT")
    RETURN_NAMES = ("config", "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "flow_shift", "fps")

    @classmethod
    def INPUT_TYPES(cls):
        choices = {group: ([UNCHANGED, *project.options(group)],) for group in ("preset", "model", "resolution", "mesh")}
        tooltip = "One a line, as on run.py's command line: sharding.transformer.weights.attention_out.spec=[null]"
        return {"required": choices | {"overrides": ("STRING", {"multiline": True, "default": "", "placeholder": "key=value", "tooltip": tooltip})}}

    @classmethod
    def IS_CHANGED(cls, **choices):
        """The config itself: files in conf/ may have been edited since the last run."""
        from omegaconf import OmegaConf

        with project.at_work():
            return OmegaConf.to_yaml(project.compose(config_overrides(**choices)), resolve=True)

    def configure(self, **choices):
        overrides = config_overrides(**choices)
        with project.at_work():
            config = project.compose(overrides)
        size = config.resolution
        return overrides, size.height, size.width, size.frames, config.steps, config.guidance_scale, size.flow_shift, size.fps


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
        embeddings = torch.tensor(run_stages(["text"], overrides)[1]["text"])
        return embeddings[:1].clone(), embeddings[1:].clone()


class Wan21TPUSampler:
    """Embeddings to latents (1, channels, latent frames, height / 8, width / 8), normalised as the model has them."""

    CATEGORY = "TPU/Wan2.1"
    FUNCTION = "sample"
    RETURN_TYPES = ("LATENT", "INT")
    RETURN_NAMES = ("latents", "num_frames")

    @classmethod
    def INPUT_TYPES(cls):
        embeddings = {"prompt_embeds": ("TENSOR",), "negative_prompt_embeds": ("TENSOR",)}
        return {"required": embeddings | sampling_widgets(), "optional": model_widget() | flow_shift_widget() | CONFIG_INPUT}

    def sample(self, prompt_embeds, negative_prompt_embeds, height, width, num_frames, num_inference_steps, guidance_scale, seed,
               model_id=DEMO.model.path, flow_shift=DEMO.resolution.flow_shift, config=None):
        import torch

        sampling = sampling_overrides(height, width, num_frames, num_inference_steps, guidance_scale, seed, flow_shift)
        wanted = [prompt_embeds, negative_prompt_embeds] if guidance_scale != 1 else [prompt_embeds]
        embeddings = torch.cat(wanted).float().numpy()
        _, results = run_stages(["denoise"], [*choose_config(config, model_id), *sampling], {"text": embeddings}, helpers=["decode"])
        return {"samples": torch.tensor(results["denoise"]), "num_frames": num_frames}, num_frames


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
            raise ValueError(f"latents of shape {tuple(samples.shape)}: one video, (1, channels, frames, height, width), is wanted")
        frames, height, width = samples.shape[2:]
        size = [f"resolution.frames={4 * frames - 3}", f"resolution.height={8 * height}", f"resolution.width={8 * width}", f"resolution.fps={fps}"]
        _, results = run_stages(["decode"], [*choose_config(config, model_id), *size], {"denoise": samples.float().cpu().numpy()})
        return image(results["decode"]), float(fps)


class Wan21TPUPipeline:
    """Prompt to frames in one node."""

    CATEGORY = "TPU/Wan2.1"
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE", "FLOAT")
    RETURN_NAMES = ("frames", "fps")

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": text_widgets() | sampling_widgets(), "optional": model_widget() | fps_widget() | flow_shift_widget() | CONFIG_INPUT}

    def generate(self, prompt, negative_prompt, height, width, num_frames, num_inference_steps, guidance_scale, seed,
                 model_id=DEMO.model.path, fps=DEMO.resolution.fps, flow_shift=DEMO.resolution.flow_shift, config=None):
        sampling = sampling_overrides(height, width, num_frames, num_inference_steps, guidance_scale, seed, flow_shift)
        overrides = [*choose_config(config, model_id), *prompt_overrides(prompt, negative_prompt), *sampling, f"resolution.fps={fps}"]
        _, results = run_stages(["text", "denoise", "decode"], overrides)
        return image(results["decode"]), float(fps)
