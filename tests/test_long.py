"""Videos longer than a model was trained for."""
import numpy
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from PIL import Image

from tests import given, reference, tiny
from tests.conftest import make_config, results, run_into
from tests.test_family import NO_PICTURES
from wan_torchax.config.long import long_warnings, passes, window_tables
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.models.wan import geometry

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
    assert "riflex=true or windows=static is for that" in longer
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
    ("static", "pyramid", "t2v", []),
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
