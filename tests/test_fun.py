"""VideoX-Fun's models as its own formulas make them (tests/fun.py) from the same weights and seed: a control video, a
picture to start from, a reference, a camera's path."""
import numpy
import pytest
import torch

from tests import fun, given, reference, tiny
from tests.conftest import make_config
from tests.reference import psnr, relative_error
from tests.test_family import on, run  # noqa: F401
from wan_torchax.config import camera, inputs, trust
from wan_torchax.config.schema import ConfigError
from wan_torchax.models.pictures import on_white, pixels_of, read_picture, read_video
from wan_torchax.serve import page, requests

FULL, SYSTEM = pytest.mark.full, pytest.mark.system
TWO = ["model.experts=[transformer,transformer_2]", "model.boundary=0.7"]
WIDE = ["resolution.width=128", "resolution.frames=9"]


def assert_made(config, values, **pixels):
    """A run's conditions, latents and frames are those of the formulas."""
    folder, names = tiny.checkpoint(tiny.PIPELINES[config.pipeline.name]), config.model.experts
    pipe = reference.load(folder, config, **{name: fun.load(folder / name) for name in names})
    made = fun.make(pipe, config, **pixels)
    for name in made.keys() - {"latents", "frames"}:
        assert relative_error(values[name], made[name].numpy()) < 1e-4 if made[name].any() else not values[name].any()
    assert relative_error(values["latents"], made["latents"].numpy()) < 1e-4
    assert values["frames"].std() > 1 and psnr(values["frames"], made["frames"]) > 55


@pytest.mark.parametrize("pipeline, names, overrides", [
    pytest.param("fun_control", "video first", TWO, id="two experts, a picture", marks=SYSTEM),
    pytest.param("fun_control_5b", "video first last", WIDE, id="the 5B, a picture and a reference", marks=SYSTEM),
    pytest.param("fun_control_5b", "video", WIDE, id="the 5B, no picture", marks=SYSTEM),
    pytest.param("fun_control", "video last", ["resolution.height=80", "resolution.width=96"], id="odd size",
                 marks=FULL),
    pytest.param("fun_control", "video first last", on("{dp:2,sp:2,tp:2}", "tp_ring"), id="eight devices",
                 marks=FULL),
    pytest.param("fun_control_5b", "video first", [*WIDE, *on("{dp:1,sp:8,tp:1}", "sequence")], id="tokens over sp",
                 marks=FULL),
    pytest.param("fun_control_5b", "video first", [*WIDE, "guidance=sequential", "model.scan_blocks=false"],
                 id="written out", marks=FULL),
])
def test_control(run, pipeline, names, overrides):  # noqa: F811
    files = [f"video={given.clip('video')}", "resolution.fps=16", "fit=stretch"]
    files += [f"image={given.picture('first')}"] if "first" in names else []
    files += [f"references=[{given.picture('last')}]"] if "last" in names else []
    config, values = run(*tiny.model(pipeline), f"pipeline={pipeline}", *files, "steps=4", *overrides)
    size = config.resolution
    pixels = {"control": pixels_of(read_video(given.clip("video"), size, "stretch"))}
    if "first" in names:
        pixels["image"] = read_picture(given.picture("first"), size.height, size.width, "stretch")[None, :, None]
    if "last" in names:
        scale = 16 if "5b" in pipeline else 8
        pixels["reference"] = on_white(given.picture("last"), size.height, size.width, scale)
    assert_made(config, values, **{name: torch.tensor(array) for name, array in pixels.items()})


@pytest.mark.parametrize("pipeline, path, overrides", [
    pytest.param("fun_camera", "pan_left,zoom_in+clockwise", TWO, id="two experts, two moves"),
    pytest.param("fun_camera_5b", "zoom_out", WIDE, id="the 5B", marks=SYSTEM),
    pytest.param("fun_camera", "pan_up*0.5", ["resolution.height=96", "resolution.width=80"], id="portrait",
                 marks=FULL),
    pytest.param("fun_camera", "anticlockwise", on("{dp:2,sp:2,tp:2}", "tp"), id="eight devices",
                 marks=SYSTEM),
    pytest.param("fun_camera_5b", "pan_down", [*WIDE, *on("{dp:1,sp:8,tp:1}", "sequence")], id="tokens over sp",
                 marks=FULL),
])
def test_camera(run, pipeline, path, overrides):  # noqa: F811
    files = [f"image={given.picture('first')}", f"camera=[{path}]", "fit=stretch"]
    config, values = run(*tiny.model(pipeline), f"pipeline={pipeline}", *files, "steps=4", *overrides)
    size = config.resolution
    picture = read_picture(given.picture("first"), size.height, size.width, "stretch")[None, :, None]
    poses = numpy.linalg.inv(padded(camera.poses(config.camera, size.frames)))
    assert_made(config, values, image=torch.tensor(picture), rays=fun.rays_of(poses, size.height, size.width))


def padded(poses):
    """(frames, 3, 4) as (frames, 4, 4)."""
    return numpy.concatenate([poses, numpy.broadcast_to([[[0, 0, 0, 1.0]]], (len(poses), 1, 4))], axis=1)


# ---------------------------------------------------------------- a camera's path

# The last of 81 frames in VideoX-Fun's own files of poses: three rows of the world's coordinates to the camera's.
PUBLISHED = {
    "zoom_in": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, -2.962962962962963]],
    "pan_left": [[1, 0, 0, 1.4814814814814814], [0, 1, 0, 0], [0, 0, 1, 0]],
    "pan_left+pan_up": [[1, 0, 0, 1.4814814814814814], [0, 1, 0, 1.4814814814814814], [0, 0, 1, 0]],
    "clockwise": [
        [0.5111541954058733, 0.8594890275733451, 0, 0], [-0.8594890275733451, 0.5111541954058733, 0, 0], [0, 0, 1, 0],
    ],
}


@pytest.mark.parametrize("move", PUBLISHED)
def test_moves_are_the_published_ones(move):
    poses = camera.poses([move], 81)
    assert numpy.allclose(poses[0], numpy.eye(4)[:3])
    assert numpy.allclose(numpy.linalg.inv(padded(poses))[-1, :3], PUBLISHED[move], atol=1e-6)


def test_one_move_goes_on_from_the_other():
    """Each at its own speed, for its share of the frames; a turned camera moves in its own directions."""
    both, left = camera.poses(["pan_left", "static"], 9), camera.poses(["pan_left"], 9)
    assert numpy.allclose(both[:5], left[:5]) and numpy.allclose(both[5:], both[4:5]), both[:, 0, 3]
    assert numpy.allclose(camera.poses(["pan_left*0.5"], 9)[:, 0, 3] * 2, left[:, 0, 3])
    turned = camera.poses(["clockwise*1.5", "zoom_in", "pan_up"], 12)
    assert numpy.allclose(turned[8, :, 3], [0, 0, 1], atol=1e-6), "zooming is along the view, however it is turned"
    assert turned[11, 0, 3] ** 2 + turned[11, 1, 3] ** 2 == pytest.approx((1.5 * 3 / 12) ** 2, 1e-5)
    assert len(camera.poses(["zoom_in"] * 3, 10)) == 10


def test_a_request_says_how_the_camera_moves():
    """As a list, or as the page's text; what is missing is told in the page's words."""
    assert requests.FIELDS["camera"] == "camera"
    for said in (["pan_left", "zoom_in+clockwise"], "pan_left, zoom_in + clockwise"):
        config = make_config("model=wan22_fun_camera_5b", trust.override("camera", said))
        assert camera.moves_of(config.camera) == ["pan_left", "zoom_in+clockwise"]
    with pytest.raises(ConfigError, match="camera=3: must be"):
        trust.override("camera", 3)
    problems = inputs.input_problems(make_config("model=wan22_fun_camera_5b"))
    (missing,) = (text for text in problems if text.startswith("camera"))
    assert page.worded(missing) == "Choose a move of the camera first."


def test_a_model_chooses_its_pipeline_and_settings():
    for name, channels in {"control_a14b": 52, "control_5b": 148, "camera_a14b": 36, "camera_5b": 100}.items():
        config = make_config(f"model=wan22_fun_{name}", "resolution=704p")
        assert config.pipeline.name == f"fun_{name}".removesuffix("_a14b")
        assert config.model.architecture.transformer.in_channels == channels
        steps = 40 if name == "control_5b" else 50  # as in the examples
        assert (config.steps, config.guidance_scale, config.guidance_scale_2) == (steps, 6.0, None)
        assert config.resolution.flow_shift == 5
