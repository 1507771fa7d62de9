"""Requests that once were refused, and ought to work: each against diffusers or the result on one device."""
import diffusers
import numpy
import pytest
from PIL import Image

from tests import given, reference, tiny
from tests.conftest import SMALL, make_config, results, run_into
from tests.reference import TEXTS, assert_same
from wan_torchax.config import trust
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.models.pictures import read_video
from wan_torchax.session import Session


@pytest.fixture
def run(tmp_path):
    """Run a config; gives it and its values."""

    def run_it(*overrides, folder="run"):
        arguments = [*SMALL, *TEXTS, "fit=stretch", *overrides]
        return make_config(*arguments), results(run_into(tmp_path / folder, *arguments))

    return run_it


# ---------------------------------------------------------------- sizes that the devices do not divide


@pytest.mark.parametrize("size", [(1600, 900), (1200, 900), (900, 900), (900, 1600), (1170, 2532)])
def test_any_picture_is_taken_with_its_own_aspect_on_eight_devices(tmp_path, size):
    Image.new("RGB", size).save(tmp_path / "photo.png")
    command = "model=wan22_i2v_a14b", "resolution=auto", f"image={tmp_path / 'photo.png'}", "prompt=a cat"
    config = make_config(*command, "mesh=v6e_8")
    validate(config)
    assert config.resolution == make_config(*command, "mesh=v6e_1").resolution, "one video, whatever makes it"


@pytest.mark.system
@pytest.mark.parametrize("axes, sharding", [
    ("{dp:1,sp:8,tp:1}", "sequence"), pytest.param("{dp:2,sp:1,tp:4}", "tp", marks=pytest.mark.full),
])
def test_picture_to_video_is_diffusers_at_sizes_that_eight_devices_do_not_divide(run, axes, sharding):
    """70 tokens; latents of 10 x 14."""
    sizes = ["resolution.height=80", "resolution.width=112"]
    place = ["mesh=cpu_8", f"mesh.axes={axes}", f"sharding={sharding}"]
    config, values = run(*tiny.model("pictured"), *given.overrides("i2v"), *sizes, *place)
    pipe = reference.load(
        tiny.checkpoint("pictured"), config, diffusers.WanImageToVideoPipeline, transformer_2=None, image_encoder=None,
        image_processor=None,
    )
    assert_same(values, *reference.make(pipe, config, image=Image.open(given.picture("first"))))


@pytest.mark.system
def test_the_5b_is_diffusers_at_sizes_that_eight_devices_do_not_divide(run):
    """Upright: latents of 10 x 6."""
    sizes = ["resolution.height=160", "resolution.width=96"]
    config, values = run(*tiny.model("five"), *given.overrides("ti2v"), *sizes, "mesh=cpu_8")
    pipe = reference.load(
        tiny.checkpoint("five"), config, diffusers.WanImageToVideoPipeline, expand_timesteps=True, image_encoder=None,
        image_processor=None,
    )
    assert_same(values, *reference.make(pipe, config, image=Image.open(given.picture("first"))))


@pytest.mark.system
@pytest.mark.parametrize("height, width", [(64, 80), pytest.param(144, 64, marks=pytest.mark.full)])
def test_any_side_is_decoded_as_on_one_device_also_by_lines(cache, height, width):
    """Ten columns of latents or eighteen lines, over eight devices."""
    latents = numpy.random.default_rng(0).normal(size=(1, 16, 3, height // 8, width // 8)).astype("float32")
    size = cache, f"resolution.height={height}", f"resolution.width={width}", "resolution.frames=9"

    def frames(*overrides):
        session = Session()
        resolved = session.resolve(make_config(*size, *overrides), ["decode"])
        return session.run(resolved, ["decode"], {"latents": latents})["frames"].astype(int)

    alone, spread = frames("mesh.axes.tp=1"), ["mesh=cpu_8", "sharding=sequence", "mesh.axes={dp:2,sp:4,tp:1}"]
    assert alone.shape == (9, height, width, 3) and alone.std() > 5
    for lines in ("false", "true"):
        assert numpy.abs(frames(*spread, f"mesh.chip.vae_lines={lines}") - alone).max() <= 1


# ---------------------------------------------------------------- settings


@pytest.mark.system
def test_each_control_layer_has_its_own_scale_as_in_diffusers(run):
    config, values = run(*tiny.model("controlled"), "pipeline=vace", "conditioning_scale=[1.0,0.25]")
    folder = tiny.checkpoint("controlled")
    transformer = diffusers.WanVACETransformer3DModel.from_pretrained(folder / "transformer")
    pipe = reference.load(folder, config, diffusers.WanVACEPipeline, transformer=transformer)
    assert_same(values, *reference.make(pipe, config, conditioning_scale=[1.0, 0.25]))
    _, other = run(*tiny.model("controlled"), "pipeline=vace", "conditioning_scale=1.0", folder="other")
    assert numpy.abs(values["latents"] - other["latents"]).max() > 1e-3


@pytest.mark.parametrize("scale, message", [
    ("[1,1,1]", "has 3 values, model=demo 2 control layers; one for each"),
    ("[]", "has 0 values"), ("[1,11]", "must be from 0 to 10"), ("[1,a]", "must be from 0 to 10"),
    ("much", "must be from 0 to 10"), ("true", "must be from 0 to 10"), ("{a:1}", "must be from 0 to 10"),
])
def test_scales_that_fit_no_control_layers_are_refused(scale, message):
    with pytest.raises(ConfigError, match=rf"conditioning_scale=.*{message}"):
        validate(make_config(*SMALL, *tiny.model("controlled"), "pipeline=vace", f"conditioning_scale={scale}"))


def test_a_request_may_give_a_scale_for_each_control_layer():
    assert trust.override("conditioning_scale", "[1.0, 0.25]") == "conditioning_scale=[1.0,0.25]"
    assert trust.override("conditioning_scale", 1) == "conditioning_scale=1"
    with pytest.raises(ConfigError, match="conditioning_scale=much: must be a number or a list"):
        trust.override("conditioning_scale", "much")


@pytest.mark.parametrize("model", ["wan22_t2v_a14b", "preset=t2v_a14b_720p_v6e8_v1"])
def test_guidance_is_turned_off_by_one_key(model):
    chosen = [model] if "=" in model else [f"model={model}", "resolution=480p"]
    validate(make_config(*chosen, "guidance_scale=1", "prompt=a cat"))
    with pytest.raises(ConfigError, match="guidance_scale_2=2.5: guidance_scale=1.0 decides"):
        validate(make_config(*chosen, "guidance_scale=1", "guidance_scale_2=2.5", "prompt=a cat"))


@pytest.mark.parametrize("boundary", [0, 1.0])
def test_a_boundary_may_leave_all_steps_to_one_expert_as_in_diffusers(run, boundary):
    experts = ["model.experts=[transformer,transformer_2]", f"model.boundary={boundary}"]
    config, values = run(*tiny.model(), *experts)
    pipe = reference.load(tiny.checkpoint("text"), config, boundary_ratio=boundary)
    assert_same(values, *reference.make(pipe, config))


@pytest.mark.parametrize("boundary", [-0.1, 1.1, "nan"])
def test_a_boundary_is_a_share(boundary):
    with pytest.raises(ConfigError, match="model.boundary=.*: one and null, or two and a share from 0 to 1"):
        validate(make_config("model=wan22_t2v_a14b", "resolution=480p", f"model.boundary={boundary}", "prompt=a cat"))


@pytest.mark.parametrize("duration", [None, 1000])
def test_a_still_gif_is_a_picture(tmp_path, duration):
    still, moving = tmp_path / "still.gif", tmp_path / "moving.gif"
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "lime", "blue", "white", "black")]
    frames[0].save(still, **({} if duration is None else {"duration": duration}))
    frames[0].save(moving, save_all=True, append_images=frames[1:], duration=100)
    model = [*SMALL, *tiny.model("controlled"), "pipeline=vace", "resolution.fps=10"]
    validate(make_config(*model, f"video={moving}", f"mask={still}"))
    with pytest.raises(ConfigError, match="still.gif: is one picture; give a video of at least 5 frames"):
        validate(make_config(*model, f"video={still}"))
    size = make_config(*model).resolution
    assert read_video(still, size, "cover").shape == read_video(moving, size, "cover").shape == (5, 64, 64, 3)
    assert (read_video(still, size, "cover")[:, :, :, 0] > 250).all()
