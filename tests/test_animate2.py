"""Wan Animate 2 as diffusers' modular pipeline makes it from the same weights and seed: each frame attends to its own
frame of a driving video, segments go on from each other, with and without guidance."""
import functools
import json
import re
import subprocess
from types import SimpleNamespace

import diffusers
import numpy
import pytest
import torch
import transformers
from diffusers.loaders import single_file_utils
from diffusers.models.transformers import transformer_wan_animate_2 as animate2
from diffusers.modular_pipelines.wan_animate_2 import denoise as segments
from diffusers.modular_pipelines.wan_animate_2.video_processor import WanAnimate2VideoProcessor
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from tests import given, reference, tiny
from tests.conftest import SMALL, make_config, resolve_here, resolve_there, run_into
from tests.conftest import build as build_stage
from tests.reference import NEGATIVE, PROMPT, TEXTS, psnr, relative_error
from tests.test_family import on
from wan_torchax.config import inputs, jobs
from wan_torchax.config.clips import ffmpeg, read_frames
from wan_torchax.config.commandline import compose
from wan_torchax.models.pictures import bicubic, pixels_of, read_mirrored, read_picture, read_video
from wan_torchax.models.wan import files
from wan_torchax.models.wan.blocks import build
from wan_torchax.serve import requests
from wan_torchax.stages.caching import skip_steps
from wan_torchax.stages.denoise import Denoise
from wan_torchax.stages.driven import Driven

FULL, SYSTEM = pytest.mark.full, pytest.mark.system
DRIVING = "somebody dances"
GUIDED = ["guidance_scale=3", "scheduler=dpm", "guider=animate2"]
EIGHT = [*on("{dp:2,sp:2,tp:2}", "tp"), "sharding.attention.ulysses=sp"]  # prompts, tokens and heads
DISTILLED = ["guidance_scale=1", "scheduler=euler"]
SETTINGS = [
    "pipeline.segments.frames=5", "resolution.fps=16", "model.text_tokens=512", "fit=contain", "resolution.width=80",
    f"driving_prompt={DRIVING}",
]


def driven(frames):
    """The pipeline's inputs: a driving video of so many frames."""
    taken = f"image={given.picture('first')}", f"video={given.clip('video', frames)}", f"resolution.frames={frames}"
    return [*SMALL, *TEXTS, *tiny.model("driven"), "pipeline=animate2", *SETTINGS, *taken]


@torch.no_grad()
def in_diffusers(config, monkeypatch):
    """Conditions and latents of each segment, and the frames of the video."""
    folder, seen = tiny.checkpoint("driven"), []
    transformer = tiny.driven_by_video(**tiny.TRANSFORMER | tiny.KINDS["driven"])
    transformer.load_state_dict(load_torch(folder / "transformer" / "diffusion_pytorch_model.safetensors"))
    pipeline = diffusers.WanAnimate2Blocks().init_pipeline()
    pipeline.update_components(
        **reference.components(folder, "text_encoder", "vae"), transformer=transformer,
        scheduler=reference.scheduler(config), guider=diffusers.ClassifierFreeGuidance(config.guidance_scale),
        image_encoder=transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder"),
    )
    forward, decode = transformer.forward, segments.decode_vae

    @functools.wraps(forward)
    def seeing(latents, **named):
        condition = named["condition_latents"][0]
        if named["kv_cache_mode"] == "extract":
            assert torch.equal(condition[4:], latents[0]) and (condition[:4] == 1).all()
            seen.append({"driving_latents": latents[0]})
        else:
            seen[-1]["character_frames"] = condition
        return forward(latents, **named)

    def decoding(vae, latents):
        seen[-1]["latents"] = latents
        return decode(vae, latents)

    monkeypatch.setattr(transformer, "forward", seeing)
    monkeypatch.setattr(segments, "decode_vae", decoding)
    monkeypatch.setattr(animate2, "create_block_mask", whole_mask)
    monkeypatch.setattr(animate2, "dispatch_attention_fn", masked_attention)
    size, frames = config.resolution, read_frames(config.video, config.resolution.frames, config.resolution.fps)
    state = pipeline(
        prompt=PROMPT, negative_prompt=NEGATIVE, prompt_ref=DRIVING, image=Image.open(config.image),
        driving_video=[Image.fromarray(frame) for frame in frames], height=size.height, width=size.width,
        segment_frame_length=config.pipeline.segments.frames, num_inference_steps=config.steps,
        prev_segment_conditioning_frames=config.pipeline.segments.overlap,
        generator=torch.Generator().manual_seed(config.seed),
    )
    return seen, (state.get("videos")[0] * 255).round()


def whole_mask(logic, B, H, Q_LEN, KV_LEN, **_):
    """The mask of diffusers' formula, written out: flex attention without torch.compile takes minutes."""
    return logic(0, 0, torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None])


def masked_attention(query, key, value, attn_mask=None, **_):
    streams = (array.transpose(1, 2) for array in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*streams, attn_mask=attn_mask).transpose(1, 2)


@pytest.mark.parametrize("frames, overrides", [
    pytest.param(8, GUIDED, id="two segments, the last mirrored, guided", marks=FULL),
    pytest.param(9, DISTILLED, id="two segments, distilled", marks=SYSTEM),
    pytest.param(11, [*GUIDED, "guidance=sequential", "model.scan_blocks=false"], id="written out", marks=FULL),
    pytest.param(8, [*GUIDED, *EIGHT], id="eight devices, the last mirrored, guided", marks=SYSTEM),
    pytest.param(9, [*DISTILLED, *on("{dp:1,sp:8,tp:1}", "sequence")], id="tokens over sp", marks=FULL),
])
def test_it_is_diffusers(frames, overrides, tmp_path, monkeypatch):
    arguments = [*driven(frames), *overrides]
    config = make_config(*arguments)
    run_into(tmp_path / "run", *arguments)
    parts, expected = in_diffusers(config, monkeypatch)
    made = []
    for number, part in enumerate(parts):
        values = {}
        for stage in ("encode", "driven", "decode"):
            values |= load_file(tmp_path / "run" / f"{stage}.{number}.safetensors")
        for name in ("driving_latents", "character_frames", "latents"):
            assert relative_error(values[name][0], part[name].numpy()) < 1e-4, (number, name)
        made.append(values["frames"][config.pipeline.segments.overlap if number else 0 :])
    made = numpy.concatenate(made)[:frames]
    assert len(parts) == -(-(frames - 1) // 4)
    assert made.shape == expected.shape and made.std() > 1 and psnr(made, expected) > 55


@pytest.mark.system
def test_the_kernel_of_tpus_reads_the_same(tmp_path):
    """It keeps values with tokens last; what is read is handed on with tokens first."""
    arguments = [*driven(5), *tiny.model("driven_wide"), *DISTILLED, "steps=2", "model.dtype.transformer=bfloat16"]
    blocks = "block_q: 256, block_kv: 512, tile_kv: 256, sub_q: 128, chunk_kv: 128, interpret: true"
    made = []
    for name, more in (("xla", []), ("splash", [f"attention.self={{kernel: splash, {blocks}}}"])):
        run_into(tmp_path / name, *arguments, *more)
        made.append(load_file(tmp_path / name / "driven.0.safetensors")["latents"])
    assert relative_error(*made[::-1]) < 0.01


def test_the_driving_video_has_no_negative_prompt():
    """With NAG it is read as without; the video alone is pushed away from a negative prompt."""
    job, read = [*driven(9), "guidance_scale=1"], []
    for guider in ("cfg", "nag"):
        stage = build_stage(resolve_here(*job, f"guider={guider}").segments()[0], "driven")
        read.append(stage.programs.lower()["read"].as_text())
    assert read[0] == read[1]


def test_a_picture_and_a_frame_are_seen_as_in_diffusers():
    """On black, sides rounded down, and for the image encoder resized as torch does."""
    size = SimpleNamespace(frames=5, fps=16, height=64, width=96)
    how, clip = dict(height=64, width=96, resize_mode="fill"), given.clip("video", 5)
    expected = WanAnimate2VideoProcessor(resample="bicubic").preprocess(Image.open(given.picture("last")), **how)
    made = read_picture(given.picture("last"), 64, 96, "letterbox_picture")
    assert numpy.abs(made - expected[0].numpy()).max() < 1e-6
    frames = [Image.fromarray(frame) for frame in read_frames(clip, 5, 16)]
    expected = WanAnimate2VideoProcessor(resample="bilinear").preprocess_video(frames, **how)
    assert numpy.abs(pixels_of(read_video(clip, size, "letterbox_video")) - expected.numpy()).max() < 1e-6
    seen = torch.nn.functional.interpolate(torch.tensor(made)[None], (224, 200), mode="bicubic", align_corners=False)
    assert numpy.abs(bicubic(made, 224, 200) - seen[0].numpy()).max() < 1e-5


def test_past_its_end_the_driving_video_goes_back_and_the_last_frame_comes_twice():
    size = SimpleNamespace(frames=9, fps=16, height=32, width=32)
    whole = read_video(given.clip("video", 9), size, "stretch")
    size.frames = 5
    path = given.clip("video", 9)
    assert numpy.array_equal(read_mirrored(path, size, "stretch", 7, twice=True), whole[[7, 8, 8, 7, 6]])
    few = read_mirrored(given.clip("video", 2), size, "stretch", 0, twice=True)
    assert numpy.array_equal(few, few[[0, 1, 1, 0, 0]]) and numpy.abs(few[0].astype(int) - few[1]).max() > 9


def test_published_files_have_the_names_of_wan():
    """In the original's layout and in diffusers': both become those of Wan's class, and so does config.json."""
    folder = tiny.checkpoint("driven") / "transformer"
    stored = files.described(json.loads((folder / "config.json").read_text()))
    names = [*load_file(folder / "diffusion_pytorch_model.safetensors")]
    back = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "add_k_proj": "k_img", "add_v_proj": "v_img",
            "norm_added_k": "norm_k_img"}
    layers = "|".join(map(re.escape, back))
    inside = [re.sub(r"^(blocks\.\d+)", r"\1.block", name) for name in names]
    original = [re.sub(rf"(?<=_attn\.)({layers})(?=\.)", lambda found: back[found[1]], name) for name in inside]
    assert {*single_file_utils.convert_wan_animate_2_transformer_to_diffusers(dict.fromkeys(original))} == {*names}
    settings = {name: value for name, value in stored.items() if not name.startswith("_")}
    module = build(settings | {"image_dim": 24, "added_kv_proj_dim": 128})
    known = {name for name, _ in module.named_parameters()}
    assert {files.rename(name) for name in names} == {files.rename(name) for name in original} == known
    assert all(any(re.search(files.FOREIGN, name) for name in layout) for layout in (names, original))


@pytest.mark.parametrize("model, steps, scale, target, skipped", [
    ("wan22_animate2_14b", 40, 3, "DPMSolverMultistepScheduler", [9]),
    ("wan22_animate2_14b_distilled", 10, 1, "FlowMatchEulerDiscreteScheduler", []),
])
def test_settings_are_the_published_ones(model, steps, scale, target, skipped):
    config = make_config(f"model={model}", f"image={given.picture('first')}", f"video={given.clip('video', 9)}")
    size = config.resolution
    assert (config.steps, config.guidance_scale, config.scheduler.target) == (steps, scale, target)
    assert list(config.guider.skip_layers) == skipped and config.scheduler.arguments.get("shift", size.flow_shift) == 5
    assert (size.frames, size.fps) == (13, 24), "as long as the driving video"
    assert size.width / size.height == pytest.approx(90 / 70, 0.03), "as the picture"
    assert size.height * size.width <= 800 * 640 < (size.height + 16) * (size.width + 16)
    assert config.driving_prompt == "人物动作的参考视频"
    table = SimpleNamespace(timesteps=numpy.linspace(1000, 100, steps))
    assert skip_steps(config, table) == [bool(skipped)] * steps, "in all steps"


def test_what_is_kept_of_the_driving_video_is_shared_by_heads():
    """40 layers' keys and values of 21 latent frames: 34 GB, an eighth of it on each chip."""
    chips = "mesh=v6e_8", "sharding=sequence", "mesh.axes={dp:1,sp:8,tp:1}"
    size = "resolution.height=800", "resolution.width=640"
    resolved = resolve_there("task=plan", "model=wan22_animate2_14b_distilled", *chips, *size).segments()[0]
    kept = 2 * 2 * 40 * 21 * 50 * 40 * 5120
    more = Driven.temporaries(resolved) - Denoise.temporaries(resolved)
    assert more == kept / 8 and 4e9 < more < 5e9
    assert Driven.flops(resolved)["self-attention"] == 40 * 4 * 5120 * (44_000**2 + 21 * 2000**2)


def test_the_sound_is_the_driving_videos(tmp_path):
    loud, tone = tmp_path / "loud.mkv", ["-f", "lavfi", "-i", "sine=frequency=440:duration=1"]
    subprocess.run([ffmpeg(), "-v", "error", "-i", given.clip("video", 9), *tone, "-c:v", "copy", loud], check=True)
    files_given = [f"image={given.picture('first')}", f"video={loud}"]
    assert inputs.sound_of(make_config("model=wan22_animate2_14b", *files_given)) == loud
    assert inputs.sound_of(make_config("model=wan21_vace_14b", "resolution=720p", files_given[1])) is None


def test_a_list_and_a_request_say_what_the_driving_video_shows(tmp_path):
    said = "${oc.env:HOME} it's, a dance"
    table = tmp_path / "jobs.jsonl"
    table.write_text(json.dumps({"prompt": "an astronaut", "video": "dance.mp4", "driving_prompt": said}))
    (job,) = jobs.read(make_config(f"prompts={table}"))
    config = compose(["model=wan22_animate2_14b", *job.overrides])
    assert (config.driving_prompt, config.video) == (said, str(tmp_path / "dance.mp4"))
    base = requests.Base.of(make_config("model=wan22_animate2_14b"), ["model=wan22_animate2_14b"])
    values, _ = requests.read(base, {"prompt": "an astronaut", "driving_prompt": said})
    assert compose(base.overrides_for(values, {"video": [tmp_path / "dance.mp4"]})).driving_prompt == said
