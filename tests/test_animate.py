"""Wan Animate as diffusers' WanAnimatePipeline makes it from the same weights and seed: segments that go on from each
other, a character that moves and one that is put into a video."""
import diffusers
import numpy
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file

from tests import given, reference, tiny
from tests.conftest import SMALL, make_config, run_into
from tests.reference import NEGATIVE, PROMPT, TEXTS, psnr, relative_error
from tests.test_family import on
from wan_torchax.config.clips import read_frames

FULL = pytest.mark.full
OVERLAP = ["pipeline.segments.frames=9", "pipeline.segments.overlap=5"]
SEGMENTS = ["pipeline.segments.frames=5", "resolution.fps=16", "model.text_tokens=512", "fit=stretch"]


def driven(pipeline, frames):
    """A pipeline's inputs: videos of so many frames."""
    videos = [name for name in given.TAKEN[pipeline] if name != "image"]
    files = [f"{name}={given.clip(name, frames)}" for name in videos]
    return [f"pipeline={pipeline}", f"image={given.picture('first')}", f"resolution.frames={frames}", *files]


def in_diffusers(config, monkeypatch):
    """Conditions and latents of each segment, and the frames of the video."""
    folder, seen = tiny.checkpoint("animated"), []
    transformer = diffusers.WanAnimateTransformer3DModel.from_pretrained(folder / "transformer")
    pipeline = reference.load(
        folder, config, diffusers.WanAnimatePipeline, transformer=transformer,
        image_encoder=transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder"),
        image_processor=transformers.CLIPImageProcessor.from_pretrained(folder / "image_processor"),
    )
    forward, decode = transformer.forward, pipeline.vae.decode
    mean, deviation = (
        torch.tensor(pipeline.vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std")
    )

    def seeing(**named):
        channels = pipeline.vae.config.z_dim
        seen.append({"given_frames": named["hidden_states"][:, channels:], "pose_latents": named["pose_hidden_states"]})
        return forward(**named)

    def decoding(latents, **named):
        seen[-1]["latents"] = (latents - mean) / deviation
        return decode(latents, **named)

    monkeypatch.setattr(transformer, "forward", seeing)
    monkeypatch.setattr(pipeline.vae, "decode", decoding)
    size, segments = config.resolution, config.pipeline.segments
    videos = {
        name: [Image.fromarray(frame) for frame in read_frames(config[name], size.frames, size.fps)]
        for name in given.TAKEN[config.pipeline.name] if name != "image"
    }
    with torch.no_grad():
        frames = pipeline(
            Image.open(config.image), **{f"{name}_video": video for name, video in videos.items()}, prompt=PROMPT,
            negative_prompt=NEGATIVE, height=size.height, width=size.width, segment_frame_length=segments.frames,
            prev_segment_conditioning_frames=segments.overlap, num_inference_steps=config.steps,
            guidance_scale=config.guidance_scale, generator=torch.Generator().manual_seed(config.seed),
            mode=config.pipeline.name, output_type="np",
        ).frames[0]
    return [one for one in seen if "latents" in one], (frames * 255).round()


@pytest.mark.parametrize("pipeline, frames, overrides", [
    pytest.param("animate", 12, ["guidance_scale=1"], id="three segments, the last mirrored"),
    pytest.param("replace", 8, ["guidance_scale=3"], id="replaced, guided"),
    pytest.param("animate", 3, ["guidance_scale=3"], id="shorter than a segment", marks=FULL),
    pytest.param("replace", 14, [*OVERLAP, "guidance_scale=1"], id="an overlap of five", marks=FULL),
    pytest.param("animate", 6, ["guidance=sequential", "model.scan_blocks=false"], id="written out", marks=FULL),
    pytest.param("replace", 9, on("{dp:2,sp:2,tp:2}", "tp_ring"), id="eight devices", marks=pytest.mark.system),
    pytest.param("animate", 9, on("{dp:1,sp:8,tp:1}", "sequence"), id="tokens over sp", marks=FULL),
])
def test_it_is_diffusers(pipeline, frames, overrides, tmp_path, monkeypatch):
    arguments = [*SMALL, *TEXTS, *tiny.model("animated"), *SEGMENTS, *driven(pipeline, frames), "steps=3", *overrides]
    arguments.append("output.keep_frames=true")
    config = make_config(*arguments)
    run_into(tmp_path / "run", *arguments)
    parts, expected = in_diffusers(config, monkeypatch)
    made = []
    for number, part in enumerate(parts):
        values = {}
        for stage in ("encode", "denoise", "decode"):
            values |= load_file(tmp_path / "run" / f"{stage}.{number}.safetensors")
        for name in ("given_frames", "pose_latents"):
            assert relative_error(values[name], part[name].numpy()) < 1e-4, (number, name)
        assert relative_error(values["latents"], part["latents"].numpy()) < 1e-4, number
        made.append(values["frames"][config.pipeline.segments.overlap if number else 0 :])
    made = numpy.concatenate(made)[:frames]
    assert made.shape == expected.shape and made.std() > 1 and psnr(made, expected) > 55
