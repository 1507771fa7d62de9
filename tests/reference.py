"""What diffusers' own pipelines make of the same weights, texts and seed, each run once.

    pipeline = reference.load(checkpoint, config)                       # or another kind, with its own parts
    latents, frames = reference.make(pipeline, config, image=picture)
"""
import diffusers
import numpy
import torch
import transformers

from tests import tiny

PROMPT = "a red circle moving right on a white background"
NEGATIVE = "a blue square"
TEXTS = [f"prompt={PROMPT}", f"negative_prompt={NEGATIVE}"]
KINDS = {
    "text_encoder": transformers.UMT5EncoderModel, "vae": diffusers.AutoencoderKLWan,
    "transformer": diffusers.WanTransformer3DModel, "transformer_2": diffusers.WanTransformer3DModel,
}


def components(folder, *names):
    """Of a checkpoint, as diffusers loads them; the tokenizer too."""
    loaded = {name: KINDS[name].from_pretrained(folder / name) for name in names}
    return loaded | {"tokenizer": transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")}


def scheduler(config):
    return getattr(diffusers, config.scheduler.target)(**config.scheduler.arguments)


def load(folder, config, kind=diffusers.WanPipeline, dtype=torch.float32, **parts):
    """A pipeline of a checkpoint, with the experts that the config names."""
    names = [name for name in ("text_encoder", "vae", *config.model.experts) if name not in parts]
    pipeline = kind(**components(folder, *names) | {"scheduler": scheduler(config)} | parts)
    for name in ("text_encoder", *config.model.experts):
        getattr(pipeline, name).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def make(pipeline, config, in_front=0, decoded=True, **given):
    """(latents, frames) as the config asks for them; `in_front` latent frames are not the video's."""
    size = config.resolution
    sizes = dict(height=size.height, width=size.width)
    settings = dict(
        prompt=PROMPT, negative_prompt=NEGATIVE, num_inference_steps=config.steps, output_type="latent",
        guidance_scale=config.guidance_scale, max_sequence_length=tiny.TOKENS, num_frames=size.frames,
        generator=torch.Generator().manual_seed(config.seed),
    ) | sizes | given
    latents = pipeline(**{name: value for name, value in settings.items() if value is not None}).frames
    latents = latents[:, :, in_front:]
    return latents[0].float().numpy(), decode(pipeline, latents) if decoded else None


def decode(pipeline, latents):
    """Frames from 0 to 255, as the pipelines decode their latents."""
    vae = pipeline.vae
    mean, deviation = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    pixels = vae.decode(latents.to(vae.dtype) * deviation + mean, return_dict=False)[0]
    return (pipeline.video_processor.postprocess_video(pixels, output_type="np")[0] * 255).round()


# ---------------------------------------------------------------- how close


def relative_error(values, expected):
    return numpy.abs(values - expected).max() / numpy.abs(expected).max()


def distance(values, expected):
    return numpy.linalg.norm(values - expected) / numpy.linalg.norm(expected)


def psnr(frames, expected):
    error = numpy.mean((frames.astype(float) - expected.astype(float)) ** 2)
    return numpy.inf if error == 0 else 10 * numpy.log10(255**2 / error)


def assert_same(values, latents, frames=None):
    """A run's values against a pipeline's."""
    assert relative_error(values["latents"], latents) < 1e-4
    if frames is not None:
        assert values["frames"].shape == frames.shape and values["frames"].std() > 1
        assert psnr(values["frames"], frames) > 55
