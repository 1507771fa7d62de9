"""Wan Animate as diffusers' WanAnimatePipeline makes it from the same weights and seed: segments that go on from each
other, a character that moves and one that is put into a video."""
import contextlib
import re
import shutil
import subprocess
from functools import partial
from types import SimpleNamespace

import diffusers
import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file

from tests import given, reference, tiny
from tests.conftest import SMALL, generate_into, make_config, run_into
from tests.reference import NEGATIVE, PROMPT, TEXTS, psnr, relative_error
from tests.test_family import on
from wan_torchax.config import clips, frames, inputs
from wan_torchax.config.clips import ffmpeg, read_frames
from wan_torchax.events import Began
from wan_torchax.models.family import Rows
from wan_torchax.models.pictures import read_mirrored, read_video
from wan_torchax.models.wan import face
from wan_torchax.models.wan.adapters import translate
from wan_torchax.records import media
from wan_torchax.runtime.jobs import find_job
from wan_torchax.stages.stage import find

FULL, SYSTEM = pytest.mark.full, pytest.mark.system
EIGHT = on("{dp:2,sp:2,tp:2}", "tp_ring")
OVERLAP = ["pipeline.segments.frames=13", "pipeline.segments.overlap=5"]
SEGMENTS = ["pipeline.segments.frames=5", "resolution.fps=16", "model.text_tokens=512", "fit=stretch"]


@torch.no_grad()
def test_a_face_is_encoded_as_in_diffusers():
    """Frames in batches of eight and a rest; a black face for the negative prompt; nothing for the reference."""
    module = diffusers.WanAnimateTransformer3DModel.from_pretrained(tiny.checkpoint("animated") / "transformer")
    frames = numpy.random.default_rng(0).integers(0, 256, (13, 16, 16, 3), dtype=numpy.uint8)
    pixels = torch.tensor(numpy.stack([frames, numpy.zeros_like(frames)])).permute(0, 1, 4, 2, 3) / 127.5 - 1
    motions = module.motion_encoder(pixels.flatten(0, 1)).unflatten(0, (2, 13))
    expected = module.face_encoder(motions).numpy()
    arrays = {name: jnp.array(parameter.numpy()) for name, parameter in module.named_parameters()}
    encode = jax.jit(partial(face.encode, module), static_argnums=2)
    tokens = numpy.asarray(encode(arrays, jnp.array(frames), 2))
    assert tokens.shape == (2, 5, 4, 128) and not tokens[:, 0].any()
    assert relative_error(tokens[:, 1:], expected) < 1e-5
    assert numpy.array_equal(tokens[:1], encode(arrays, jnp.array(frames), 1))


@pytest.mark.parametrize("guidance", [["guidance_scale=1"], ["guidance_scale=3"], ["guidance_scale=1", "guider=nag"]])
def test_the_face_has_what_denoising_takes_of_it(guidance):
    """One for each prompt that is encoded: NAG has a negative one without guidance too."""
    job = find_job(make_config(*SMALL, *tiny.model("animated"), *SEGMENTS, *driven("animate", 9), *guidance))
    part, derived = job.segments()[0], find("denoise").derived("denoise", job.segments()[0])
    shape = find("face").result_shapes("face", part)["face_embeddings"]
    assert shape == (derived["texts"], *derived["conditions"]["face_embeddings"])
    assert shape == (1 if guidance == ["guidance_scale=1"] else 2, 3, 4, 128)


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
    pytest.param("animate", 12, ["guidance_scale=1"], id="three segments, the last mirrored", marks=SYSTEM),
    pytest.param("replace", 8, ["guidance_scale=3"], id="replaced, guided", marks=FULL),
    pytest.param("animate", 3, ["guidance_scale=3"], id="shorter than a segment", marks=FULL),
    pytest.param("replace", 14, [*OVERLAP, "guidance_scale=1"], id="an overlap of five", marks=FULL),
    pytest.param("animate", 6, ["guidance=sequential", "model.scan_blocks=false"], id="written out", marks=FULL),
    pytest.param("replace", 8, ["guidance_scale=3", *EIGHT], id="replaced, guided, eight devices", marks=SYSTEM),
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


@pytest.mark.system
def test_a_run_goes_on_within_its_segments(tmp_path):
    """Two of three segments are there; what the third begins with is read, not made again."""
    arguments = [*SMALL, *TEXTS, *tiny.model("animated"), *SEGMENTS, *driven("animate", 12), "steps=2"]
    arguments += ["guidance_scale=1", "output.keep_frames=true"]
    run_into(tmp_path / "whole", *arguments)
    part = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for path in [*part.glob("*.2.safetensors"), part / "video.mp4"]:
        path.unlink()
    started = []
    (tmp_path / "again").mkdir()
    generate_into(
        make_config(*arguments, f"resume={part}"), tmp_path / "again",
        listener=lambda event: started.append(event.phase) if isinstance(event, Began) else None,
    )
    assert [started.count(name) for name in ("text", "encode", "face", "denoise", "decode")] == [0, 1, 1, 1, 1]
    for path in (tmp_path / "whole").glob("*.2.safetensors"):
        again = load_file(tmp_path / "again" / path.name)
        assert all(numpy.array_equal(again[name], value) for name, value in load_file(path).items()), path.name
    assert clips.frame_count(tmp_path / "again" / "video.mp4", 16) == 12


def test_the_video_has_the_sound_of_the_driving_one(tmp_path):
    """As much of it as the video is long."""
    silent, loud = given.clip("pose", 9), tmp_path / "face.mkv"
    tone = ["-f", "lavfi", "-i", "sine=frequency=440:sample_rate=8000:duration=3"]
    subprocess.run([ffmpeg(), "-v", "error", "-i", silent, *tone, "-c:v", "copy", loud], check=True)
    files = [f"image={given.picture('first')}", f"pose={silent}", f"face={loud}"]
    config = make_config("model=wan22_animate_14b", *files)
    assert inputs.sound_of(config) == loud
    assert inputs.sound_of(make_config("model=wan22_animate_14b", *files[:2], f"face={silent}")) is None
    frames = numpy.zeros((16, 32, 32, 3), numpy.uint8)
    media.write_video(tmp_path / "video.mp4", frames, media.Encoding(16, 18, loud), "a title", {"seed": 3})
    assert clips.probe(tmp_path / "video.mp4").has_sound and clips.frame_count(tmp_path / "video.mp4", 16) == 16
    assert media.read_metadata(tmp_path / "video.mp4") == {"seed": 3}
    heard = subprocess.run(
        [ffmpeg(), "-v", "error", "-i", tmp_path / "video.mp4", "-f", "s16le", "-ac", "1", "-ar", "8000", "-"],
        capture_output=True, check=True,
    ).stdout
    samples = numpy.frombuffer(heard, numpy.int16).astype(float)
    assert 7500 < len(samples) < 9500 and samples.std() > 1000


def test_a_sound_that_cannot_be_taken_costs_no_video(tmp_path, caplog):
    """Of a driving video only the pictures are looked at before everything is computed."""
    path = tmp_path / "video.mp4"
    frames, odd = numpy.zeros((4, 32, 32, 3), numpy.uint8), tmp_path / "odd.mkv"
    odd.write_bytes(b"\x1aE\xdf\xa3")
    media.write_video(path, frames, media.Encoding(16, 18, odd), "a title", {"seed": 3})
    assert media.read_metadata(path) == {"seed": 3} and f"{odd}: the video is silent" in caplog.text


def test_what_is_typed_meanwhile_does_not_end_a_video(tmp_path, monkeypatch):
    """ffmpeg would take a q for its own, lines that a shell's loop has yet to read, and a server's Ctrl-C."""
    begun = []

    class Watched(subprocess.Popen):
        def __init__(self, command, **named):
            begun.append(named.get("process_group") == 0 and ("-nostdin" in command or named["stdin"] is not None))
            super().__init__(command, **named)

    ffmpeg()  # asks for its version, once
    monkeypatch.setattr(subprocess, "Popen", Watched)
    frames, path = numpy.zeros((4, 32, 32, 3), numpy.uint8), tmp_path / "video.mp4"
    media.write_video(path, frames, media.Encoding(16, 18), "a title", {"seed": 3})
    assert media.read_metadata(path) == {"seed": 3}
    assert begun == [True] * 3, "the encoder, what adds metadata, and what reads it"


def test_size_and_length_follow_the_driving_video():
    files = driven("animate", 13)
    config = make_config("model=wan22_animate_14b", "model.fps=16", *(text for text in files if "frames" not in text))
    size = config.resolution
    assert (size.frames, size.fps, size.flow_shift) == (13, 16, 5)
    assert size.width / size.height == pytest.approx(96 / 80, 0.02)
    assert size.height * size.width <= 1280 * 720 < (size.height + 16) * (size.width + 16)
    assert make_config("model=wan22_animate_14b", *files, "resolution.frames=7").resolution.frames == 7
    assert make_config("model=wan22_animate_14b").resolution.frames == 77, "before a driving video is known"
    assert (config.steps, config.guidance_scale, config.pipeline.segments.frames) == (20, 1.0, 77)


@pytest.mark.parametrize("fps, count", [(16, 9), (8, 5), (30, 16), (24, 13), (120, 64)])
def test_frames_are_counted_as_they_are_read(fps, count):
    path = given.clip("pose", 9)
    assert clips.frame_count(path, fps) == len(list(read_frames(path, 100, fps))) == count


def test_a_browsers_recording_plays_at_the_speed_it_was_filmed_at(tmp_path):
    """Its header says no rate, only each frame when it was seen; here every fifth was missed."""
    path = tmp_path / "recording.webm"
    gray = "nullsrc=size=64x48:rate=20:duration=2,format=gray,geq=lum=6*N,select=not(eq(mod(n\\,5)\\,2))"
    codec = ["-c:v", "libvpx", "-pix_fmt", "yuv420p", "-fps_mode", "passthrough", "-live", "1"]
    subprocess.run([ffmpeg(), "-v", "error", "-f", "lavfi", "-i", gray, *codec, path], check=True)
    rate = re.compile(rb"\x23\xe3\x83\x84....", re.DOTALL)  # the element DefaultDuration; in its place one that is void
    path.write_bytes(rate.sub(b"\xec\x86" + bytes(6), path.read_bytes()))
    assert clips.probe(path).fps == clips.RECORDED_FPS and clips.frame_count(path, 10) == 20
    shades = [frame.mean() for frame in read_frames(path, 20, 10)]
    assert len(shades) == 20 and numpy.abs(numpy.array(shades) - 12 * numpy.arange(20)).max() < 10, shades


def test_a_camera_that_slows_down_in_the_dark_is_no_slow_motion(tmp_path):
    """Phones film so: the header has the average rate, which is neither that of the beginning nor that of the end."""
    path = tmp_path / "phone.mp4"
    gray = "nullsrc=size=64x48:rate=20:duration=2,format=gray,geq=lum=6*N,select=lt(n\\,20)+not(mod(n\\,4))"
    codec = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-fps_mode", "passthrough"]
    subprocess.run([ffmpeg(), "-v", "error", "-f", "lavfi", "-i", gray, *codec, path], check=True)
    shades = [frame.mean() for frame in read_frames(path, 30, 10)]
    assert clips.frame_count(path, 10) == len(shades) == pytest.approx(19, abs=1)
    assert numpy.abs(numpy.array(shades) - 12 * numpy.arange(len(shades))).max() < 20, shades


def test_a_frame_that_is_shown_for_hours_is_not_repeated_all_that_time(tmp_path):
    """A file of some kilobytes could ask for terabytes."""
    path, shown = tmp_path / "slides.mp4", "testsrc=size=64x48:rate=1:duration=3,setpts=if(eq(N\\,2)\\,9999/TB\\,PTS)"
    subprocess.run([ffmpeg(), "-v", "error", "-f", "lavfi", "-i", shown, "-fps_mode", "passthrough", path], check=True)
    assert clips.count_frames(path)[0] < 10


@pytest.mark.parametrize("fps", [16, 24, 5])
def test_segments_read_a_driving_video_once(monkeypatch, fps):
    """Each goes on where the one before ended, and keeps no more than a segment."""
    path, decoder, decoded = given.clip("pose", 60), clips.decoder, []

    def counted(*about, **options):
        with contextlib.closing(decoder(*about, **options)) as frames:
            for frame in frames:
                decoded.append(frame)
                yield frame

    total = clips.frame_count(path, fps)
    size = SimpleNamespace(frames=total, fps=fps, height=32, width=48)
    whole = frames.read_frames(path, size, "cover")
    monkeypatch.setattr(clips, "decoder", counted)
    size.frames = 7
    segments = range(0, total - 1, 5)
    for first in segments:
        part = frames.read_frames(path, size, "cover", first)
        assert numpy.array_equal(part, whole[first : first + 7])
        assert all(len(one.kept) <= 7 for one in frames.onward.values())
    assert len(decoded) < 60 + 7 * 16 / fps + 10, "the first segment twice"
    mirrored = read_mirrored(path, size, "cover", segments[-1] + 1)
    count = total - segments[-1] - 1
    assert numpy.array_equal(mirrored[:count], whole[-count:]) and numpy.array_equal(mirrored[count], whole[-2])
    assert numpy.array_equal(frames.read_frames(path, size, "cover", 2), whole[2:9]), "it goes back too"
    (opened,) = frames.onward.values()
    frames.close_onward()
    assert not frames.onward and opened.frames.gi_frame is None, "ffmpeg has ended"


def test_what_lies_past_the_end_is_mirrored():
    size = SimpleNamespace(frames=9, fps=16, height=32, width=32)
    whole = read_video(given.clip("pose", 9), size, "stretch")
    size.frames = 5
    assert numpy.array_equal(read_mirrored(given.clip("pose", 9), size, "stretch", 2), whole[2:7])
    assert numpy.array_equal(read_mirrored(given.clip("pose", 9), size, "stretch", 7), whole[[7, 8, 7, 6, 5]])
    few = read_mirrored(given.clip("pose", 3), size, "stretch", 0)
    assert numpy.array_equal(few, few[[0, 1, 2, 1, 0]]) and numpy.abs(few[0].astype(int) - few[1]).max() > 9
    one = read_mirrored(given.clip("pose", 1), size, "stretch", 0)
    assert len(one) == 5 and numpy.array_equal(one, one[[0] * 5])


def test_adapters_of_either_spelling_reach_the_face():
    """In Wan's own files its keys and values are one layer."""
    assert translate("face_adapter.fuser_blocks.3.linear1_q", native=False) == "face_adapter.3.to_q"
    both = translate("face_adapter_fuser_blocks_3_linear1_kv", native=False)
    assert both == Rows(("face_adapter.3.to_k", "face_adapter.3.to_v"))
    assert translate("face_adapter.3.to_out", native=True) == "face_adapter.3.to_out"
    assert translate("face_adapter.3.to_somewhere", native=True) is None
