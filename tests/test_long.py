"""Videos longer than a model was trained for."""
import contextlib
import gc
import math
import os
import tempfile
import threading
import tracemalloc
from functools import partial
from pathlib import Path

import imageio_ffmpeg
import jax
import numpy
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from PIL import Image

from tests import given, reference, tiny
from tests.conftest import generate_into, make_config, results, run_into
from tests.test_family import NO_PICTURES
from wan_torchax import events
from wan_torchax.config.long import long_warnings, passes, window_tables
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.models.wan import geometry
from wan_torchax.records.files import Spool
from wan_torchax.records.growing import Growing
from wan_torchax.records.media import MOST_QUEUED, Encoder, Encoding
from wan_torchax.records.results import read, save
from wan_torchax.runtime.jobs import find_job
from wan_torchax.session import Session
from wan_torchax.stages.decode import Decoding
from wan_torchax.tasks.generate import read_results

SIZE = ["resolution.height=64", "resolution.width=80", "steps=2"]

# ---------------------------------------------------------------- RIFLEx


def slowed(rope: WanRotaryPosEmbed, number: int, frames: int) -> None:
    """As published: the angle of frequency `number`, counted from 1, is position * 0.9 * 2 pi / frames."""
    angles = numpy.arange(rope.max_seq_len) * (0.9 * 2 * numpy.pi / frames)
    for name, wave in (("freqs_cos", numpy.cos), ("freqs_sin", numpy.sin)):
        for column in (2 * number - 2, 2 * number - 1):
            getattr(rope, name)[:, column] = torch.from_numpy(wave(angles))


@pytest.mark.system
def test_riflex_is_diffusers_with_the_published_table(tmp_path):
    """Nine latent frames, of which all would see the same if the table were not used."""
    asked = [*tiny.model(), *SIZE, "resolution.frames=33", "model.riflex_frequency=2", *reference.TEXTS]
    made = {riflex: results(run_into(tmp_path / riflex, *asked, f"riflex={riflex}")) for riflex in ("true", "false")}
    pipeline = reference.load(tiny.checkpoint("text"), make_config(*asked))
    for riflex in ("false", "true"):
        if riflex == "true":
            slowed(pipeline.transformer.rope, 2, 9)
        latents, _ = reference.make(pipeline, make_config(*asked), decoded=False)
        assert reference.relative_error(made[riflex]["latents"], latents) < 1e-4
    assert reference.relative_error(made["true"]["latents"], made["false"]["latents"]) > 1e-3


def test_riflex_doubles_the_length_that_is_allowed():
    longer = ["model=wan21_t2v_14b", "resolution=480p", "resolution.frames=161"]
    with pytest.raises(ConfigError, match="resolution.frames=161: wan21_t2v_14b takes at most 121"):
        validate(make_config(*longer))
    validate(make_config(*longer, "riflex=true"))
    with pytest.raises(ConfigError, match="resolution.frames=165: wan21_t2v_14b takes at most 161"):
        validate(make_config(*longer, "riflex=true", "resolution.frames=165"))


@pytest.mark.parametrize("model", ["wan22_ti2v_5b", "hunyuan15_t2v_480p", "demo"])
def test_riflex_is_refused_where_its_frequency_is_not_known(model):
    with pytest.raises(ConfigError, match=f"riflex=true: it is not known .* in model={model}"):
        validate(make_config(f"model={model}", "riflex=true", *(["resolution=704p"] if model != "demo" else [])))


def test_its_use_is_explained():
    model = ["model=wan21_t2v_14b", "resolution=480p"]
    (short,) = long_warnings(make_config(*model, "riflex=true"))
    (longer,) = long_warnings(make_config(*model, "resolution.frames=101"))
    assert "trained for 81 frames" in short and "only helps longer videos" in short
    assert "riflex=true, windows=static or, with a picture, a pipeline=…_long is for that" in longer
    assert not [*long_warnings(make_config(*model))]


# ---------------------------------------------------------------- windows

LENGTH, OVERLAP, FRAMES = 3, 2, 7  # latent frames
WINDOWS = ["windows.frames=9", "windows.overlap=5", "resolution.frames=25"]


def windows_of(mode: str, step: int) -> list[list[int]]:
    """The published definitions, on lists of frames: ordinary windows, or those from a step's offset on."""
    if mode == "static":
        windows, start = [], 0
        while start + LENGTH < FRAMES:
            windows.append([*range(start, start + LENGTH)])
            start += LENGTH - OVERLAP
        return [*windows, [*range(FRAMES - LENGTH, FRAMES)]]
    halved = sum(2.0**-(bit + 1) for bit in range(64) if step >> bit & 1)
    offset = round(FRAMES * halved)
    starts = range(offset, FRAMES + offset - OVERLAP, LENGTH - OVERLAP)
    windows, place, unique = [[(start + frame) % FRAMES for frame in range(LENGTH)] for start in starts], 0, []
    while place < len(windows):
        if windows[place] != sorted(windows[place]):  # over the end
            windows[place] = [*range(FRAMES - LENGTH, FRAMES)]
            if 0 not in windows[(place + 1) % len(windows)]:
                windows.insert(place + 1, [*range(LENGTH)])
        place += 1
    for window in windows:
        unique += [] if window in unique else [window]
    return unique


def weights_of(kind: str, window: list[int]) -> list[float]:
    if kind == "pyramid":
        return [1, 2, 1]
    rising, falling = kind == "linear" and window[0] > 0, kind == "linear" and window[-1] < FRAMES - 1
    weights = [1.0] * LENGTH
    if rising:
        weights[:OVERLAP] = [1e-37, 1.0]
    if falling:
        weights[-OVERLAP:] = [1.0, 1e-37]
    return weights


def seen_through_windows(pipeline, mode: str, kind: str) -> None:
    """The pipeline's transformer on one window after another; conditions of channels begin with the first frame."""
    whole, timesteps = pipeline.transformer.forward, []

    def forward(hidden_states, timestep, **named):
        if float(timestep[0]) not in timesteps:
            timesteps.append(float(timestep[0]))
        total, counts = torch.zeros(1, 16, *hidden_states.shape[2:]), torch.zeros(FRAMES)
        for window in windows_of(mode, len(timesteps) - 1):
            part = hidden_states[:, :, window].clone()
            part[:, 16:, 0] = hidden_states[:, 16:, 0]
            (velocity,) = whole(hidden_states=part, timestep=timestep, **named | {"return_dict": False})
            weights = torch.tensor(weights_of(kind, window))
            total[:, :, window] += velocity * weights[:, None, None]
            counts[window] += weights
        return (total / counts[:, None, None],)

    pipeline.transformer.forward = forward


def freed(seed: int, shape) -> torch.Tensor:
    """FreeNoise's definition."""
    noise, generator = torch.randn(shape, generator=torch.Generator().manual_seed(seed)), torch.Generator()
    generator.manual_seed(seed)
    new = LENGTH - OVERLAP
    for start in range(0, FRAMES - LENGTH, new):
        order = start + torch.randperm(new, generator=generator)
        noise[:, :, start + LENGTH : start + LENGTH + new] = noise[:, :, order]
    return noise


@pytest.mark.parametrize("mode, kind, pipeline, overrides", [
    pytest.param("static", "pyramid", "t2v", [], marks=pytest.mark.system),
    pytest.param("uniform", "linear", "i2v", ["guidance=sequential"], marks=pytest.mark.system),
    pytest.param("uniform", "pyramid", "t2v", ["windows.free_noise=false"], marks=pytest.mark.full),
    pytest.param("static", "flat", "i2v", ["mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=sequence"],
                 marks=pytest.mark.full),
])
def test_windows_are_diffusers_on_each_and_averaged(tmp_path, mode, kind, pipeline, overrides):
    asked = [*tiny.model("pictured" if pipeline == "i2v" else "text"), *SIZE, "steps=3", *WINDOWS, *reference.TEXTS,
             *given.overrides(pipeline), "fit=stretch", f"windows={mode}", f"windows.weights={kind}", *overrides]
    config, values = make_config(*asked), results(run_into(tmp_path / "run", *asked))
    pictured = {"image": Image.open(given.picture("first"))} if pipeline == "i2v" else {}
    parts = {"transformer_2": None, **NO_PICTURES} if pictured else {}
    pipe = reference.load(tiny.checkpoint(tiny.PIPELINES[pipeline]), config,
                          WanImageToVideoPipeline if pictured else WanPipeline, **parts)
    seen_through_windows(pipe, mode, kind)
    latents = freed(config.seed, (1, 16, FRAMES, 8, 10)) if config.windows.free_noise else None
    expected, _ = reference.make(pipe, config, decoded=False, latents=latents, **pictured)
    assert reference.relative_error(values["latents"], expected) < 1e-4


@pytest.mark.parametrize("mode", ["static", "uniform"])
def test_the_windows_are_the_published_ones(mode):
    """Of more steps than a run has; every frame is in one."""
    config = make_config(*tiny.model(), *WINDOWS, f"windows={mode}", "windows.weights=linear")
    places, weights = window_tables(config, geometry(config.model.architecture), 40)
    for step, (rows, amounts) in enumerate(zip(places.tolist(), weights)):
        counted = [row for row, amount in zip(rows, amounts) if amount.sum()]
        assert counted == windows_of(mode, step)
        assert {frame for row in counted for frame in row} == {*range(FRAMES)}
        for row, amount in zip(counted, amounts):
            numpy.testing.assert_allclose(amount, weights_of("linear", row), atol=2e-6)


def test_a_step_costs_what_its_windows_do():
    """81 frames in windows of 81 are one forward pass; with 129 two windows."""
    model = ["model=wan21_t2v_14b", "resolution=480p", "windows=static"]
    for frames, expected in ((81, 1), (129, 2), (481, 9)):
        config = make_config(*model, f"resolution.frames={frames}")
        validate(config)
        assert passes(config, geometry(config.model.architecture)) == expected


@pytest.mark.system
def test_a_video_that_fits_a_window_is_made_as_without(generate):
    plain, windowed = (generate(f"windows={mode}", "windows.overlap=5", folder=mode) for mode in ("none", "static"))
    assert numpy.array_equal(results(plain)["latents"], results(windowed)["latents"])


REFUSED = [
    (["windows.frames=80"], "windows.frames=80: must be 4n.1"),
    (["windows.frames=1"], "windows.frames=1: must be 4n.1, 5 or more"),
    (["windows.frames=125"], "windows.frames=125: wan21_t2v_14b takes at most 121"),
    (["windows.overlap=81"], "windows.overlap=81: must be from 0 to 77"),
    (["windows.weights=round"], "windows.weights=round"),
    (["cache=easycache"], "windows=static: cache=easycache keeps what a step computes of one window"),
    (["riflex=true"], "windows=static: a window is no longer than the model was trained for; set riflex=false"),
    (["pipeline=t2v_coarse"], "windows=static: pipeline=t2v_coarse makes its video in parts already"),
    (["model=wan22_ti2v_5b", "pipeline=ti2v"], "gives first_latent, which is of the whole video"),
    (["model=wan22_i2v_a14b", "pipeline=flf2v"], "gives last_image, which is of the whole video"),
    (["model=hunyuan15_t2v_480p"], "which is of the whole video"),
]


@pytest.mark.parametrize("overrides, message", REFUSED)
def test_what_does_not_go_with_windows_is_told(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config("model=wan21_t2v_14b", "resolution=704p", "windows=static", *overrides), files="none")


# ---------------------------------------------------------------- memory


def decode(frames: int) -> tuple[int, list[int], numpy.ndarray]:
    """Decode a video's latents: most bytes on the host, besides what was there at the first chunk; bytes on the devices
    at each chunk; the frames."""
    config = make_config(*tiny.model(), *SIZE, f"resolution.frames={frames}", "windows=static", "windows.overlap=5")
    session, on_devices = Session(), []
    resolved = session.resolve(config, ["decode"])
    values = {"latents": numpy.random.default_rng(0).normal(size=resolved.latent_shape).astype("float32")}

    def listener(event):
        if isinstance(event, events.Decoded):
            on_devices.append(sum(array.nbytes for array in jax.live_arrays()))
            tracemalloc.start()  # from the first chunk on: weights are loaded, programs compiled

    made = session.run(resolved, ["decode"], values, listener)["frames"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most, on_devices, made


@pytest.mark.system
def test_decoding_takes_the_memory_of_a_chunk_however_long_the_video_is(monkeypatch):
    """Frames that are too many for memory are in a file; those of a video that is not are the same."""
    size = 3 * 64 * 80
    held, _, expected = decode(101)
    monkeypatch.setattr("wan_torchax.records.files.IN_MEMORY", 0)
    short, _, _ = decode(41)
    longer, on_devices, frames = decode(101)
    assert isinstance(frames, numpy.memmap) and numpy.array_equal(frames, expected)
    assert held > 101 * size and longer < short + 20 * size
    assert max(on_devices[-5:]) < max(on_devices[5:10]) + size


def bytes_of_arrays() -> tuple[int, int]:
    """On the host, as numpy allocates them, and on the devices."""
    ours = tracemalloc.DomainFilter(True, numpy.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
    return sum(trace.size for trace in traces), sum(array.nbytes for array in jax.live_arrays())


def held_after(folder, kind, *overrides) -> list[tuple[int, int]]:
    """Run a config: bytes on host and devices at every event of a kind."""
    held = []

    def listener(event):
        if isinstance(event, kind) and getattr(event, "stage", "") in ("live", "decode"):
            gc.collect()
            tracemalloc.start()  # from the first part on: weights are loaded, programs compiled
            held.append(bytes_of_arrays())

    folder.mkdir()
    generate_into(make_config(*overrides), folder, listener=listener)
    tracemalloc.stop()
    return held


LONG = {  # what is made, the event behind each part of it, and bytes of a part that must not be held
    "segments": (
        [*tiny.model("pictured"), "pipeline=i2v_long", f"image={given.picture('first')}", "resolution.frames=37",
         "pipeline.segments.frames=5"], events.Finished, 5 * 3 * 64 * 64,
    ),
    "chunks": (
        [*tiny.model("text"), "pipeline=live", "live=self_forcing", "live.chunk=2", "live.window=4",
         "scheduler=renoise", "scheduler.sigmas=[1,0.5]", "resolution.frames=93"], events.Part, 2 * 16 * 8 * 8 * 4,
    ),
}


@pytest.mark.system
@pytest.mark.parametrize("kind", LONG)
def test_a_video_in_parts_takes_the_memory_of_a_few(tmp_path, monkeypatch, kind):
    """From the third part on nothing is added but the poster's frame, neither on the host nor on the devices, and a run
    that goes on reads a part where it needs it."""
    monkeypatch.setattr("wan_torchax.records.files.IN_MEMORY", 0)
    monkeypatch.setattr("wan_torchax.records.media.SHEET_FRAMES", 1)
    overrides, event, part = LONG[kind]
    asked = [*overrides, "resolution.height=64", "resolution.width=64", "guidance_scale=1", "steps=2", *reference.TEXTS]
    held = held_after(tmp_path / "run", event, *asked)
    assert len(held) >= 9
    for place, name in enumerate(("host", "devices")):
        sizes = [one[place] for one in held]
        assert min(sizes[-3:]) < sizes[2] + part + 3 * 64 * 64, f"{name}: {sizes}"  # besides what is being encoded
    tracemalloc.start()
    at_hand = read_results(find_job(make_config(*asked, f"resume={tmp_path / 'run'}")), tmp_path)
    assert len([*at_hand.segments, *at_hand.finished.get("live", ())]) >= 9 and bytes_of_arrays()[0] < 6 * part
    tracemalloc.stop()


@pytest.mark.system
def test_the_process_does_not_grow_over_a_long_live_video(tmp_path, monkeypatch):
    """All that it holds, not arrays alone, has not grown by half of the chunks that went by, nor where they would be
    joined. The embedded model makes small frames, which are enlarged: a chunk that is kept is then more than what else
    comes and goes."""
    chunks, scale, decode, held = 32, 8, Decoding.decode, []

    def enlarged(decoding, latent):
        frames, finite = decode(decoding, latent)
        return jax.device_put(numpy.asarray(frames).repeat(scale, 1).repeat(scale, 2)), finite

    def listener(event):
        if isinstance(event, (events.Part, events.Finished)) and event.stage in ("live", "decode"):
            gc.collect()
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

    monkeypatch.setattr(Decoding, "decode", enlarged)
    monkeypatch.setattr("wan_torchax.records.growing.MOST_QUEUED", 1)  # for the encoder
    live = ["pipeline=live", "live=demo", "vae=tiny", "scheduler=renoise_linear", "scheduler.sigmas=[1]"]
    sizes = [f"resolution.{side}=64" for side in ("height", "width")]
    overrides = [*live, *sizes, f"resolution.frames={8 * chunks - 3}", "guidance_scale=1", "mesh.axes={dp:1,sp:1,tp:1}"]
    generate_into(make_config(*overrides), tmp_path, overrides, listener=listener)
    part = 8 * (scale * 64) ** 2 * 3
    assert len(held) == chunks + 2 and max(held[-6:]) - max(held[8:12]) < 8 * part, [size // 10**6 for size in held]


def test_frames_in_a_file_are_saved_without_a_copy(tmp_path):
    spool = Spool(100_000)
    for number in range(40):
        spool.append(numpy.full((5, 64, 64, 3), number, "uint8"))
    frames, given = spool.array(), {"seed": 3}
    tracemalloc.start()
    save(tmp_path / "decode.safetensors", {"frames": frames, "counts": numpy.arange(3)}, given)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert frames.shape == (200, 64, 64, 3) and most < frames.nbytes / 10
    shapes = {"frames": frames.shape, "counts": (3,)}
    values, settings = read(tmp_path / "decode.safetensors", shapes)
    assert settings == given and numpy.array_equal(values["frames"], frames)
    assert values["frames"][199].max() == values["frames"][199].min() == 39 and list(values["counts"]) == [0, 1, 2]


def temporary_bytes() -> int:
    """Of this process's files in TMPDIR that have no names."""
    sizes = {}
    for opened in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(opened).endswith("(deleted)") and os.readlink(opened).startswith(tempfile.gettempdir()):
                sizes[opened.stat().st_ino] = opened.stat().st_size
    return sum(sizes.values())


@pytest.mark.system
@pytest.mark.parametrize("kind", LONG)
def test_frames_of_a_long_video_take_no_disk_but_the_videos(tmp_path, monkeypatch, kind):
    """They go to the encoder alone; in temporary files are at most those of two segments. The video, its poster and its
    contact sheet are those of frames in memory, or in files where they are asked for, also if a run goes on behind half
    of the frames."""
    asked = [*LONG[kind][0], "resolution.height=64", "resolution.width=64", "guidance_scale=1", "steps=2"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(name, *more, stop=math.inf):
        """The most bytes in temporary files, and what is shown."""
        folder, most, decoded = tmp_path / name, [0], []

        def listener(event):
            most.append(temporary_bytes())
            decoded.extend([event] if isinstance(event, events.Decoded) else [])
            if len(decoded) >= stop:
                raise KeyboardInterrupt

        folder.mkdir()
        with contextlib.suppress(KeyboardInterrupt):
            generate_into(make_config(*asked, *reference.TEXTS, *more), folder, listener=listener)
            _, *shown = imageio_ffmpeg.read_frames(str(folder / "video.mp4"))
            return max(most), (shown, [Image.open(path).tobytes() for path in sorted(folder.glob("*.png"))])

    _, whole = run("in_memory")
    monkeypatch.setattr("wan_torchax.records.files.IN_MEMORY", 0)
    assert run("half", stop=10) is None
    passing, streamed = run("on", f"resume={tmp_path / 'half'}")
    files, kept = run("kept", "output.keep_frames=true")
    _, again = run("again", f"resume={tmp_path / 'kept'}")  # as if it had been killed before the video was written
    assert whole == streamed == kept == again and len(whole[0]) > 30
    assert passing <= (2 * 5 if kind == "segments" else 0) * 3 * 64 * 64 and files >= len(whole[0]) * 3 * 64 * 64
    assert not [*(tmp_path / "on").glob("decode*")] and [*(tmp_path / "kept").glob("decode*")]


def test_many_frames_are_in_the_video_alone(generate, monkeypatch):
    monkeypatch.setattr("wan_torchax.records.files.IN_MEMORY", 0)
    folder = generate("output.keep_frames=false")
    assert (folder / "video.mp4").stat().st_size > 1000 and (folder / "poster.png").is_file()
    assert (folder / "denoise.safetensors").is_file() and not (folder / "decode.safetensors").exists()


@pytest.mark.parametrize("kind", ["whole", "live"])
def test_frames_wait_for_a_slow_encoder(tmp_path, monkeypatch, kind):
    """What is queued is in memory."""
    written, going_on, encoding = [], threading.Event(), Encoding(8, 18)
    encoder = {"whole": Encoder, "live": partial(Growing, lengths=(1, 1))}[kind](tmp_path / "video.mp4", encoding)
    monkeypatch.setattr(encoder, "write", lambda frames, *more: (going_on.wait(60), written.append(frames)))
    frames = numpy.zeros((1, 64, 64, 3), numpy.uint8)
    adding = threading.Thread(target=lambda: [encoder.add(frames) for _ in range(3 * MOST_QUEUED)])
    adding.start()
    adding.join(1)
    assert adding.is_alive() and len(encoder.queued) <= MOST_QUEUED + 1
    going_on.set()
    adding.join(60)
    assert not adding.is_alive()
    encoder.close()
    assert len(written) >= 2 * MOST_QUEUED


def test_an_encoder_that_has_died_ends_the_run_at_once(tmp_path):
    """Not when all frames are computed."""
    encoder, frames = Encoder(tmp_path / "video.mp4", Encoding(8, 18)), numpy.zeros((1, 64, 64, 3), numpy.uint8)
    encoder.add(frames)
    encoder.process.kill()
    encoder.process.wait()
    with pytest.raises(OSError, match="ffmpeg failed"):
        encoder.add(frames)
    encoder.close()
