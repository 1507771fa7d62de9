"""Wan's speech-to-video as its own formulas make it (tests/s2v.py) from the same weights and seed: segments that go on
from each other, sounds of any format and length, skeletons or none."""
import base64
import subprocess
import wave
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_file

from tests import given, lora, reference, s2v, tiny
from tests.conftest import SMALL, generate_into, make_config, run_into
from tests.reference import TEXTS, psnr, relative_error
from tests.test_adapters import learned_in
from tests.test_family import on
from wan_torchax.config import clips, inputs, sounds
from wan_torchax.config.clips import ffmpeg
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.events import Began
from wan_torchax.models import wav2vec2
from wan_torchax.models.pictures import pixels_of, read_picture, read_video
from wan_torchax.serve import requests
from wan_torchax.stages.audio import frame_places

FULL = pytest.mark.full
SIZE = ["resolution.height=64", "resolution.width=64", "resolution.fps=16", "fit=stretch"]
SEGMENTS = ["pipeline=s2v", "pipeline.segments.frames=8", f"image={given.picture('first')}"]


@torch.no_grad()
def test_a_sound_is_encoded_as_in_transformers(monkeypatch):
    """Padding changes nothing, nor does attention with some of the queries at a time."""
    encoder = transformers.Wav2Vec2Model.from_pretrained(tiny.checkpoint("spoken") / "audio_encoder")
    samples = numpy.random.default_rng(0).normal(size=9000).astype("float32")
    expected = s2v.features(encoder, samples, 40, 24)  # the last frames have no sound
    arrays = {name: jnp.array(parameter.numpy()) for name, parameter in encoder.named_parameters()}
    padded = numpy.zeros(12_000, "float32")
    padded[:9000] = (samples - samples.mean()) / samples.std()
    monkeypatch.setattr(wav2vec2, "QUERIES", 8)
    encode = jax.jit(lambda arrays, sound: wav2vec2.encode(arrays, encoder.config, sound, 9000))
    hidden = numpy.asarray(encode(arrays, jnp.array(padded)))
    places = frame_places(27, 50, 30, 40, 24)
    assert wav2vec2.token_count(9000, encoder.config) == 27 and 20 < places["heard"].sum() < 24
    share = places["share"][:, None]
    made = hidden[:, places["before"]] * (1 - share) + hidden[:, places["after"]] * share
    made = made * places["heard"][:, None]
    assert relative_error(made.swapaxes(0, 1), expected.numpy()) < 1e-5


@pytest.mark.parametrize("rate, channels, suffix", [
    (16_000, 1, "wav"), (8_000, 1, "wav"), (44_100, 2, "flac"), (48_000, 2, "mka"), (22_050, 1, "mp3"),
])
def test_sounds_of_any_format_are_read_at_one_rate(rate, channels, suffix):
    """Channels are averaged: the second one here is the first's negative at half the loudness."""
    samples, expected = (sounds.read(given.sound(0.6, *kind)) for kind in ((rate, channels, suffix), ()))
    assert samples.dtype == numpy.float32 and abs(len(samples) - 9600) < 2500
    count = min(len(samples), 9600)
    scale = numpy.abs(numpy.fft.rfft(samples[:count])).max() / numpy.abs(numpy.fft.rfft(expected[:count])).max()
    assert scale == pytest.approx(1 if channels == 1 else 0.25, rel=0.1)
    loudest = [numpy.abs(numpy.fft.rfft(one[:count])).argmax() for one in (samples, expected)]
    assert loudest[0] == pytest.approx(loudest[1], abs=10)


def test_the_video_is_as_long_as_the_sound_and_has_it(tmp_path):
    """Its first frame is the sound's fourth: what was dropped is not heard."""
    config = make_config("model=wan22_s2v_14b", f"image={given.picture('first')}", f"audio={given.sound(2.0)}")
    size = config.resolution
    assert (size.frames, size.fps, size.flow_shift) == (29, 16, 3)
    assert (config.steps, config.guidance_scale) == (40, 4.5)
    assert size.height % 64 == size.width % 64 == 0 and size.height * size.width <= 1024 * 704
    validate(config)
    assert inputs.sound_of(config) == given.sound(2.0)
    few = make_config("model=wan22_s2v_14b", f"audio={given.sound(2.0)}", "resolution.frames=7")
    assert few.resolution.frames == 7 and make_config("model=wan22_s2v_14b").resolution.frames == 77


def heard(path):
    """A video's sound at 8 kHz."""
    command = [ffmpeg(), "-v", "error", "-i", path, "-f", "s16le", "-ac", "1", "-ar", "8000", "-"]
    return numpy.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, numpy.int16).astype(float)


@pytest.mark.parametrize("sound, frames, overrides", [
    pytest.param(0.9, 13, [], id="two segments", marks=FULL),
    pytest.param(0.4, 19, [f"pose={given.clip('pose', 19)}"], id="three, skeletons, a sound that ends",
                 marks=pytest.mark.system),
    pytest.param(3.0, 5, ["guidance_scale=1"], id="one, a sound that goes on", marks=FULL),
    pytest.param(0.9, 11, ["guidance=sequential", "model.scan_blocks=false"], id="written out", marks=FULL),
    pytest.param(0.9, 13, on("{dp:2,sp:2,tp:2}", "tp_ring"), id="eight devices", marks=pytest.mark.system),
    pytest.param(0.9, 13, on("{dp:1,sp:8,tp:1}", "sequence"), id="tokens over sp", marks=FULL),
])
def test_it_is_wans_own(sound, frames, overrides, tmp_path):
    arguments = [*SMALL, *TEXTS, *tiny.model("spoken"), *SIZE, *SEGMENTS, f"audio={given.sound(sound)}", "steps=3"]
    arguments += [f"resolution.frames={frames}", "guidance_scale=3", "output.keep_frames=true", *overrides]
    config, run = make_config(*arguments), run_into(tmp_path / "run", *arguments)
    folder, size = tiny.checkpoint("spoken"), config.resolution
    encoder = transformers.Wav2Vec2Model.from_pretrained(folder / "audio_encoder")
    total = -(-(frames + 3) // 8) * 8
    features = s2v.features(encoder, sounds.read(given.sound(sound))[: total * 1000], 16, total)
    assert relative_error(load_file(run / "audio.safetensors")["audio_features"], features.numpy()) < 1e-4
    pipe = reference.load(folder, config, transformer=s2v.load(folder / "transformer"))
    picture = torch.tensor(read_picture(given.picture("first"), 64, 64, "stretch"))[None, :, None]
    pose = torch.tensor(pixels_of(read_video(Path(config.pose), size, "stretch"))) if config.pose else None
    shown, parts = [], s2v.make(pipe, config, picture, features.permute(1, 2, 0), pose)
    for number, part in enumerate(parts):
        values = {}
        for stage in ("encode", "denoise", "decode"):
            values |= load_file(run / f"{stage}.{number}.safetensors")
        for name in part.keys() - {"frames"}:
            expected = part[name].numpy()
            assert relative_error(values[name], expected) < 1e-4 if expected.any() else not values[name].any(), name
        assert values["frames"].std() > 1 and psnr(values["frames"], part["frames"].numpy()) > 55
        shown.append(values["frames"][0 if number else 3 :])
    assert len(parts) == total // 8
    assert clips.frame_count(run / "video.mp4", 16) == frames
    if sound == 0.9:
        assert len(heard(run / "video.mp4")) == pytest.approx(8000 * min(0.9 - 3 / 16, frames / 16), abs=1100)


@pytest.mark.system
def test_a_run_that_ended_between_segments_goes_on_with_the_same_bits(tmp_path):
    """Before the second of two is denoised; what is there of it, and of the others, is not made again."""
    arguments = [*SMALL, *TEXTS, *tiny.model("spoken"), *SIZE, *SEGMENTS, f"audio={given.sound(2.0)}", "steps=2"]
    arguments += ["resolution.frames=13", "guidance_scale=3"]
    run_into(tmp_path / "whole", *arguments)
    begun: list[str] = []

    def end_before_the_second(event):
        begun.extend([event.phase] if isinstance(event, Began) else [])
        if begun.count("denoise") == 2:
            raise KeyboardInterrupt

    (tmp_path / "part").mkdir()
    with pytest.raises(KeyboardInterrupt):
        generate_into(make_config(*arguments), tmp_path / "part", listener=end_before_the_second)
    begun.clear()
    (tmp_path / "again").mkdir()
    config = make_config(*arguments, f"resume={tmp_path / 'part'}")
    generate_into(config, tmp_path / "again", listener=end_before_the_second)
    assert [begun.count(name) for name in config.pipeline.stages] == [0, 0, 0, 0, 1, 1], begun
    results = list((tmp_path / "whole").glob("*.safetensors"))
    assert {f"{name}.1.safetensors" for name in ("encode", "voice", "denoise", "decode")} <= {r.name for r in results}
    for path in results:
        again = load_file(tmp_path / "again" / path.name)
        assert all(numpy.array_equal(again[name], value) for name, value in load_file(path).items()), path.name
    assert clips.frame_count(tmp_path / "again/video.mp4", 16) == 13


# ---------------------------------------------------------------- adapters


NAMES = {  # ours -> as Wan, ComfyUI and DiffSynth-Studio spell them
    "audio_injector.0.to_q": "audio_injector.injector.0.q", "audio_injector.2.to_out": "audio_injector.injector.2.o",
    "audio_injector.1.linear": "audio_injector.injector_adain_layers.1.linear",
    "casual_audio_encoder.encoder.final_linear": "casual_audio_encoder.encoder.final_linear",
    "blocks.1.attn1.to_k": "blocks.1.self_attn.k",
}


@pytest.mark.parametrize("prefix, name", [
    ("diffusion_model.", NAMES.get), ("", NAMES.get), ("lora_unet_", lambda module: NAMES[module].replace(".", "_")),
    ("transformer.", str),
], ids=["ComfyUI", "DiffSynth", "musubi", "diffusers"])
def test_adapters_of_every_spelling_reach_the_voice(prefix, name, tmp_path):
    weights = torch_file(tiny.checkpoint("spoken") / "transformer/diffusion_pytorch_model.safetensors")
    learned = lora.Learned({})
    for module in NAMES:
        rows, columns = weights[f"{module}.weight"].shape
        learned.pairs[module] = learned.random(2, columns), learned.random(rows, 2)
    learned.differ(weights, "pose_patch_embedding.bias", "casual_audio_encoder.encoder.conv2.conv.weight")
    file = learned.save(tmp_path / "x.safetensors", prefix, lambda module: name(module) if module in NAMES else module)
    added, expected = learned_in(file, weights), learned.changes()
    assert added.keys() == expected.keys()
    for key, value in expected.items():
        numpy.testing.assert_allclose(added[key], value.numpy(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- where sounds come from


@pytest.mark.parametrize("suffix", ["wav", "mp3", "flac", "ogg", "mp4"])
def test_a_server_takes_sounds_by_what_they_are(suffix, tmp_path):
    content = given.sound(0.6, 16_000, 1, suffix).read_bytes()
    (tmp_path / "inputs").mkdir()
    requests.write_files(tmp_path, {"audio": [content]})
    assert requests.files_in(tmp_path) == {"audio": [tmp_path / "inputs" / f"audio.{suffix}"]}
    for kind in ("x-wav", "webm;codecs=opus"):  # a browser's recordings say such things
        link = f"data:audio/{kind};base64," + base64.b64encode(content).decode()
        assert requests.bytes_of("audio", {"audio_url": link}) == [content]


def test_a_server_takes_nothing_else_for_a_sound(tmp_path):
    (tmp_path / "inputs").mkdir()
    for content in (b"#EXTM3U\nfile:///etc/passwd", given.picture("first").read_bytes(), b"RIFF____WEBPVP8 "):
        with pytest.raises(ConfigError, match="audio: not a file that is taken; send WAV, MP3"):
            requests.write_files(tmp_path, {"audio": [content]})


def test_a_playlist_is_not_opened(tmp_path):
    playlist = tmp_path / "list.wav"
    playlist.write_text(f"#EXTM3U\n#EXTINF:1,\n{given.sound()}\n")
    with pytest.raises(OSError, match="Invalid data|list.wav"):
        sounds.read(playlist)


def test_silence_is_told_and_a_blink_refused(tmp_path, caplog):
    paths = [tmp_path / "silence.wav", tmp_path / "blink.wav"]
    for path, seconds in zip(paths, (1, 0.05)):
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(bytes(2 * int(16_000 * seconds)))
    config = make_config("model=wan22_s2v_14b")
    with caplog.at_level("WARNING"):
        assert not list(inputs.sound_problems("audio=silence.wav", paths[0], config, True))
    assert "audio=silence.wav: silence; nobody will speak" in caplog.text
    for whole in (True, False):  # a server says so at once, not behind the videos that wait
        (problem,) = inputs.sound_problems("audio=blink.wav", paths[1], config, whole)
        assert problem == "audio=blink.wav: 0.050 seconds of sound; at least 0.3"
