"""Videos made in segments that go on from the last frames of the one before, as diffusers' pipelines make each segment
from the same weights, what comes before it and one generator."""
import math
import shutil
from types import SimpleNamespace

import diffusers
import numpy
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file

from tests import given, hunyuan15, reference, tiny
from tests.conftest import SMALL, generate_into, make_config, run_into
from tests.reference import TEXTS, psnr, relative_error
from tests.serving import Server
from tests.test_family import NO_PICTURES, TWO, on
from wan_torchax.config import clips
from wan_torchax.config.clips import read_frames
from wan_torchax.config.commandline import rewrite
from wan_torchax.config.long import MOST_FRAMES, long_warnings
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.events import Advanced, Began, Decoded, Stepped, to_all
from wan_torchax.records import outputs
from wan_torchax.records.stored import take_over
from wan_torchax.runtime.jobs import find_job
from wan_torchax.serve import page
from wan_torchax.serve.queue import Job, events_from
from wan_torchax.serve.worker import Reporter
from wan_torchax.session import session
from wan_torchax.stages.stage import find, result_settings
from wan_torchax.work import RunStep, joined

SYSTEM, FULL = pytest.mark.system, pytest.mark.full
SEGMENTS = ["pipeline.segments.frames=5", "resolution.fps=16", "fit=stretch", "steps=2"]
PICTURE = f"image={given.picture('first')}"


def made_in(folder) -> list[dict]:
    """What the repeated stages have left, by segment."""
    numbers = range(len([*folder.glob("decode.*.safetensors")]))
    return [{name: value for path in folder.glob(f"*.{number}.safetensors") for name, value in load_file(path).items()}
            for number in numbers]


def assert_continued(folder, arguments, by_hand) -> None:
    """`by_hand(last frames of the segment before, number of the segment, generator)` gives its latents and frames."""
    config, events = make_config(*arguments), []
    folder.mkdir()
    generate_into(config, folder, listener=events.append)
    segments, made, frames = config.pipeline.segments, made_in(folder), config.resolution.frames
    new = segments.frames - segments.overlap
    assert len(made) == math.ceil((frames - segments.overlap) / new) > 1
    generator, last, joined = torch.Generator().manual_seed(config.seed), None, []
    for number, values in enumerate(made):
        latents, expected = by_hand(last, number, generator)
        assert relative_error(values["latents"], latents) < 1e-4, number
        assert values["frames"].shape == expected.shape and psnr(values["frames"], expected) > 55
        last = values["frames"][-segments.overlap :]
        joined.append(values["frames"][segments.overlap if number else 0 :])
    joined = numpy.concatenate(joined)[:frames]
    shown = numpy.concatenate([event.frames for event in events if isinstance(event, Decoded)])
    assert numpy.array_equal(shown, joined) and joined.std() > 1
    assert clips.frame_count(folder / "video.mp4", config.resolution.fps) == frames


def segment_of(config):
    """The config of a segment alone."""
    part = config.copy()
    part.resolution.frames = config.pipeline.segments.frames
    return part


# ---------------------------------------------------------------- from a picture


@pytest.mark.parametrize("pipeline, frames, overrides", [
    pytest.param("i2v_long", 12, ["guidance_scale=1"], id="three segments, the last cut"),
    pytest.param("i2v_long", 9, TWO, id="two experts", marks=SYSTEM),
    pytest.param("i2v_clip_long", 8, ["model.text_tokens=512"], id="an image encoder", marks=SYSTEM),
    pytest.param("ti2v_long", 9, ["resolution.width=128"], id="the 5B", marks=SYSTEM),
    pytest.param("i2v_long", 12, on("{dp:2,sp:2,tp:2}", "tp_ring"), id="eight devices", marks=FULL),
    pytest.param("ti2v_long", 10, ["resolution.width=128", *on("{dp:2,sp:1,tp:2}", "tp")], id="dp, tp", marks=FULL),
])
def test_a_segment_begins_with_the_last_frame_as_its_picture(pipeline, frames, overrides, tmp_path):
    kind, long = tiny.PIPELINES[pipeline.removesuffix("_long")], [f"pipeline={pipeline}", f"resolution.frames={frames}"]
    arguments = [*SMALL, *TEXTS, *tiny.model(kind), *SEGMENTS, PICTURE, *long, *overrides]
    config, folder = make_config(*arguments), tiny.checkpoint(kind)
    parts = NO_PICTURES
    if kind == "seen":
        parts = {"image_encoder": transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder"),
                 "image_processor": transformers.CLIPImageProcessor.from_pretrained(folder / "image_processor")}
    if kind == "pictured":
        parts = parts | {"boundary_ratio": config.model.boundary}
        parts |= {} if len(config.model.experts) == 2 else {"transformer_2": None}
    pipe = reference.load(folder, config, diffusers.WanImageToVideoPipeline, **parts, expand_timesteps=kind == "five")

    def by_hand(last, number, generator):
        picture = Image.open(given.picture("first")) if last is None else Image.fromarray(last[-1])
        tokens = {"max_sequence_length": 512} if kind == "seen" else {}
        return reference.make(pipe, segment_of(config), image=picture, generator=generator, **tokens)

    assert_continued(tmp_path / "run", arguments, by_hand)


@SYSTEM
def test_hunyuan_goes_on_from_its_last_frame(tmp_path):
    arguments = [*hunyuan15.model("hunyuan15_i2v_480p"), *TEXTS, "pipeline=i2v_hunyuan15_long", PICTURE, *SEGMENTS,
                 "fit=cover", "resolution.area=4096", "resolution.frames=8", "output.keep_frames=true"]
    config = make_config(*arguments)
    pipe = hunyuan15.pipeline(diffusers.HunyuanVideo15ImageToVideoPipeline, hunyuan15.checkpoint(), config)

    @torch.no_grad()
    def by_hand(last, number, generator):
        picture = Image.open(given.picture("first")) if last is None else Image.fromarray(last[-1])
        settings = dict(prompt=reference.PROMPT, negative_prompt=reference.NEGATIVE, num_frames=5, generator=generator,
                        num_inference_steps=config.steps, image=picture, output_type="latent")
        latents = pipe(**settings).frames
        frames = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
        return latents[0].numpy(), (pipe.video_processor.postprocess_video(frames, "np")[0] * 255).round()

    assert_continued(tmp_path / "run", arguments, by_hand)


# ---------------------------------------------------------------- with control


@SYSTEM
@pytest.mark.parametrize("names, overlap, frames", [
    pytest.param("", 1, 12, id="a prompt alone"),
    pytest.param("video mask first", 5, 16, id="a video, a mask and a reference"),
    pytest.param("video", 3, 14, id="a video, three frames", marks=FULL),
])
def test_a_segment_begins_with_the_last_frames_which_stay(names, overlap, frames, tmp_path):
    """Past the end of the given videos, their frames go backwards."""
    files = [f"{name}={given.clip(name, frames)}" for name in ("video", "mask") if name in names]
    files += [f"references=[{given.picture('first')}]"] if "first" in names else []
    sizes = ["pipeline.segments.frames=9", f"pipeline.segments.overlap={overlap}", f"resolution.frames={frames}"]
    arguments = [*SMALL, *TEXTS, *tiny.model("controlled"), *SEGMENTS, "pipeline=vace_long", *files, *sizes]
    config = make_config(*arguments)
    folder, size = tiny.checkpoint("controlled"), config.resolution
    transformer = diffusers.WanVACETransformer3DModel.from_pretrained(folder / "transformer")
    pipe = reference.load(folder, config, diffusers.WanVACEPipeline, transformer=transformer, transformer_2=None)

    def clip(name, first):
        if name not in names:
            return numpy.full((9, 64, 64, 3), 0.5 if name == "video" else 1.0, "float32")
        whole = [Image.fromarray(frame) for frame in read_frames(given.clip(name, frames), frames, 16)]
        whole = numpy.stack([frame.resize((size.width, size.height), Image.LANCZOS) for frame in whole + whole[-2::-1]])
        return whole[first : first + 9].astype("float32") / 255

    def by_hand(last, number, generator):
        first = number * (9 - overlap)
        video, mask = clip("video", first), clip("mask", first)
        if last is not None:
            video[:overlap], mask[:overlap] = last / numpy.float32(255), 0
        references = [Image.open(given.picture("first"))] if "first" in names else None
        return reference.make(
            pipe, segment_of(config), in_front=len(references or ()), generator=generator, reference_images=references,
            video=video[None], mask=mask[None],
        )

    assert_continued(tmp_path / "run", arguments, by_hand)


# ---------------------------------------------------------------- runs


def arguments_of(frames: int) -> list[str]:
    return [*SMALL, *TEXTS, *tiny.model("pictured"), *SEGMENTS, PICTURE, "pipeline=i2v_long", "guidance_scale=1",
            f"resolution.frames={frames}"]


@SYSTEM
def test_a_video_that_fits_a_segment_is_made_as_without(tmp_path):
    longer = load_file(run_into(tmp_path / "long", *arguments_of(5)) / "denoise.safetensors")
    usual = load_file(run_into(tmp_path / "i2v", *arguments_of(5), "pipeline=i2v") / "denoise.safetensors")
    assert numpy.array_equal(longer["latents"], usual["latents"])


@SYSTEM
def test_a_run_goes_on_within_its_segments_by_one_program(tmp_path):
    """Two of three segments are there; frames come segment by segment, and all segments share one program."""
    session.clear()
    arguments, events = arguments_of(12), []
    run_into(tmp_path / "whole", *arguments)
    assert [*session.stages["denoise"].programs.entries] == ["step"]
    part = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for path in [*part.glob("*.2.safetensors"), part / "video.mp4"]:
        path.unlink()
    (tmp_path / "again").mkdir()
    generate_into(make_config(*arguments, f"resume={part}"), tmp_path / "again", listener=events.append)
    started = [event.phase for event in events if isinstance(event, Began)]
    assert [started.count(name) for name in ("text", "encode", "denoise", "decode")] == [0, 1, 1, 1]
    assert sum(len(event.frames) for event in events if isinstance(event, Decoded)) == 12
    for path in (tmp_path / "whole").glob("*.2.safetensors"):
        again = load_file(tmp_path / "again" / path.name)
        assert all(numpy.array_equal(again[name], value) for name, value in load_file(path).items()), path.name
    assert clips.frame_count(tmp_path / "again" / "video.mp4", 16) == 12


def test_what_a_later_segment_encodes_depends_on_all_before_it():
    """Its picture is a frame of another video if the seed is another; the first segment's is not."""
    jobs = [find_job(make_config(*arguments_of(9), f"seed={seed}")).segments() for seed in (7, 8)]
    first, later = ([result_settings(parts[number], "encode") for parts in jobs] for number in (0, 1))
    assert first[0] == first[1] and later[0] != later[1]
    assert later[0]["seed"] == 7 and later[0]["prompt.text"] == reference.PROMPT


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("overrides, frames", [
    (["model=wan22_i2v_a14b", "pipeline=i2v_long"], 81), (["model=wan21_i2v_14b_480p", "pipeline=i2v_clip_long"], 81),
    (["model=wan22_ti2v_5b", "pipeline=ti2v_long", "resolution=704p"], 121),
    (["model=wan21_vace_14b", "pipeline=vace_long"], 81),
    (["model=hunyuan15_i2v_480p", "pipeline=i2v_hunyuan15_long", "resolution=848x480"], 121),
    (["model=demo_i2v", "pipeline=i2v_long", "resolution=demo"], 17),
])
def test_every_model_that_begins_with_frames_can_go_on(overrides, frames):
    config = make_config("resolution=480p", *overrides, "resolution.frames=1000")
    validate(config, files="none")
    assert config.pipeline.segments.frames == frames == config.model.frames and not [*long_warnings(config)]


REFUSED = [
    (["model=wan21_t2v_14b"], "resolution.frames=201: wan21_t2v_14b takes at most 121; windows=static has no such"),
    (["model=wan22_i2v_a14b"], "takes at most 121; pipeline=i2v_long goes on from its last frames, in segments"),
    (["model=wan22_i2v_a14b", "pipeline=flf2v"], "resolution.frames=201: wan22_i2v_a14b takes at most 121$"),
    (["pipeline.segments.frames=125"], "pipeline.segments.frames=125: wan22_i2v_a14b takes at most 121"),
    (["riflex=true"], "riflex=true: a segment of pipeline=i2v_long is no longer than the model was trained for"),
    (["windows=static"], "windows=static: pipeline=i2v_long makes its video in parts already"),
    (["stages=[text,encode,denoise]"], "encode goes on from what decode gives of the segment before; add decode"),
]


@pytest.mark.parametrize("overrides, message", REFUSED)
def test_what_cannot_go_on_is_told(overrides, message):
    long = ["model=wan22_i2v_a14b", "pipeline=i2v_long"] if not any("model=" in text for text in overrides) else []
    with pytest.raises(ConfigError, match=message):
        config = make_config(*long, "resolution=480p", "resolution.frames=201", "prompt=a", *overrides)
        validate(config, files="none")


def test_a_server_and_its_page_take_any_number_of_frames(tmp_path):
    (field,) = [one for one in page.numbers(make_config("model=demo_i2v", "pipeline=i2v_long")) if one.name == "frames"]
    assert field.most == MOST_FRAMES
    made = Server(tmp_path / "queue", "model=demo_i2v", "pipeline=i2v_long")
    try:
        files = {"input_reference": given.picture("first").read_bytes()}
        answer = made.client.post("/v1/videos", data={"prompt": "a", "frames": "44"}, files=files)
        assert answer.status_code == 200 and answer.json()["frames"] == 44, answer.text
    finally:
        made.close()


def test_progress_is_that_of_all_segments(tmp_path):
    """Of three the first is a third of the video, and its steps are a third of them."""
    config, job, heard = make_config(*arguments_of(12)), Job("video_0", tmp_path, {"segments": 3}), []
    reporter = Reporter(job, lambda: False)
    reporter.expect(config.pipeline.stages)
    resolved = SimpleNamespace(config=config)
    for segment in range(3):
        emit = joined(RunStep("denoise", resolved, segment), resolved, to_all(heard.append, reporter))
        for phase in ("encode", "denoise", "decode"):
            emit(Began(phase, 5, "frame"))
            for step in (1, 2) if phase == "denoise" else ():
                emit(Stepped(step, 2, 0.1, None))
        emit(Advanced("decode", 5))
    steps = [(event.step, event.steps) for event in heard if isinstance(event, Stepped)]
    assert steps == [(step, 6) for step in range(1, 7)]
    progress = [event["progress"] for event in events_from(tmp_path, 0)[0] if event["event"] == "decoding"]
    assert progress[1::2] == [34, 66, 98], progress


def test_a_video_can_be_replayed_with_its_own_overlap(tmp_path):
    """Also where the folder is somebody else's."""
    folder = tmp_path / "run"
    folder.mkdir()
    arguments = rewrite([*arguments_of(13), "pipeline.segments.frames=9", "pipeline.segments.overlap=3"])
    config = make_config(*arguments)
    outputs.write_config(folder, outputs.settle(config), arguments)
    overrides = [*tiny.model("pictured"), PICTURE, f"replay={folder}"]
    segments = take_over(make_config(*overrides), rewrite(overrides)).pipeline.segments
    assert (segments.frames, segments.overlap) == (9, 3)


def test_segments_overlap():
    job = find_job(make_config(*arguments_of(9), "pipeline.segments.overlap=0"))
    (problem,) = find("decode").problems("decode", job)
    assert problem.startswith("pipeline.segments.overlap=0: each segment begins with frames of the one before")
