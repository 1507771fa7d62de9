"""The rest of the family, each as diffusers' own pipeline makes it from the same weights and seed."""
import diffusers
import numpy
import pytest
import torch
import transformers
from PIL import Image

from tests import given, reference, tiny
from tests.conftest import SMALL, make_config, metrics, results, run_into
from tests.reference import TEXTS, assert_same, relative_error
from wan_torchax.config.clips import read_frames
from wan_torchax.config.geometry import expert_at
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.models.pictures import read_picture
from wan_torchax.records.stored import take_over
from wan_torchax.session import session
from wan_torchax.stages.sampling import scheduler_table

FULL, SYSTEM = pytest.mark.full, pytest.mark.system
NO_PICTURES = {"image_encoder": None, "image_processor": None}
TWO = ["model.experts=[transformer,transformer_2]", "model.boundary=0.875"]


def on(axes, sharding):
    return ["mesh=cpu_8", f"mesh.axes={axes}", f"sharding={sharding}"]


@pytest.fixture
def run(tmp_path):
    """Run a config; gives it and its values."""

    def run_it(*overrides, folder="run"):
        arguments = [*SMALL, *TEXTS, "fit=stretch", *overrides]
        return make_config(*arguments), results(run_into(tmp_path / folder, *arguments))

    return run_it


# ---------------------------------------------------------------- two experts


@pytest.mark.system
@pytest.mark.parametrize("overrides", [
    pytest.param([], id="guidance of each", marks=FULL),
    pytest.param(["guidance_scale_2=1"], id="guidance off in the second", marks=FULL),
    pytest.param(["expert_weights=swapped", "scheduler=euler"], id="swapped, flow Euler"),
    pytest.param(on("{dp:2,sp:2,tp:2}", "tp_ring"), id="eight devices"),
])
def test_two_experts_are_diffusers(run, overrides):
    config, values = run(*tiny.model(), *TWO, "steps=6", "guidance_scale_2=2.5", *overrides)
    assert {expert_at(config, time) for time in scheduler_table(config)[0]} == {"transformer", "transformer_2"}
    pipeline = reference.load(tiny.checkpoint("text"), config, boundary_ratio=0.875)
    made = reference.make(pipeline, config, guidance_scale_2=config.guidance_scale_2)
    assert_same(values, *made)


def test_experts_share_one_program_and_swapped_ones_its_memory(run, monkeypatch):
    session.clear()
    loaded = []
    from wan_torchax.runtime.components import Component

    load = Component.load
    monkeypatch.setattr(Component, "load", lambda self, *rest: (loaded.append(self.name), load(self, *rest)))
    only = [*tiny.model(), *TWO, "steps=6", "keep_resident=true", "stages=[text,denoise]"]
    _, swapped = run(*only, "expert_weights=swapped")
    assert [name for name in loaded if "transformer" in name] == ["transformer", "transformer_2"]
    assert list(session.stages["denoise"].programs.entries) == ["step"]
    loaded = [name for name, component in session.components.items() if component.is_loaded()]
    assert "transformer_2" in loaded and "transformer" not in loaded
    _, resident = run(*only, "expert_weights=resident", folder="again")
    assert session.components["transformer"].is_loaded() and session.components["transformer_2"].is_loaded()
    assert numpy.array_equal(swapped["latents"], resident["latents"])
    session.clear()


def test_the_switch_is_where_wans_settings_put_it():
    """T2V-A14B: 40 steps at shift 12, boundary 0.875: the second expert begins after 26 steps."""
    config = make_config("model=wan22_t2v_a14b", "resolution=720p")
    validate(config)
    experts = [expert_at(config, time) for time in scheduler_table(config)[0]]
    assert config.resolution.flow_shift == 12 and experts.index("transformer_2") == 26
    control = make_config("model=wan22_vace_fun_a14b", "resolution=720p")
    validate(control)
    experts = [expert_at(control, time) for time in scheduler_table(control)[0]]
    assert (control.steps, control.guidance_scale, control.guidance_scale_2) == (50, 5.0, None)
    assert control.resolution.flow_shift == 12 and experts.index("transformer_2") == 32


# ---------------------------------------------------------------- pictures


def pictures(*names):
    return [Image.open(given.picture(name)) for name in names]


@pytest.mark.system
@pytest.mark.parametrize("pipeline, overrides", [
    pytest.param("flf2v_clip", [], id="first and last"),
    pytest.param("i2v_clip", [], id="first", marks=FULL),
    pytest.param("i2v_clip", on("{dp:2,sp:1,tp:4}", "tp"), id="heads over tp", marks=FULL),
    pytest.param("flf2v_clip", on("{dp:1,sp:8,tp:1}", "sequence"), id="tokens over sp", marks=FULL),
])
def test_image_to_video_with_an_image_encoder_is_diffusers(run, pipeline, overrides):
    kind = tiny.PIPELINES[pipeline]
    # diffusers takes the last 512 tokens for text wherever pictures are tokens too.
    config, values = run(*tiny.model(kind), "model.text_tokens=512", *given.overrides(pipeline), *overrides)
    folder = tiny.checkpoint(kind)
    pipe = reference.load(
        folder, config, diffusers.WanImageToVideoPipeline,
        image_encoder=transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder"),
        image_processor=transformers.CLIPImageProcessor.from_pretrained(folder / "image_processor"),
    )
    first, *last = pictures("first", *(["last"] if "flf" in pipeline else []))
    with torch.no_grad():
        embeddings = pipe.encode_image([first, *last]).numpy()
    assert relative_error(values["image_embeddings"], embeddings) < 1e-4
    ends = {"image": first, "last_image": last[0] if last else None}
    assert_same(values, *reference.make(pipe, config, max_sequence_length=512, **ends))


@pytest.mark.parametrize("pipeline, overrides", [
    pytest.param("flf2v", TWO, id="first and last"),
    pytest.param("i2v", ["guidance_scale=1"], id="one expert, unguided", marks=FULL),
    pytest.param(
        "i2v", [*TWO, "resolution.height=80", "resolution.width=96", "resolution.frames=9"], id="other sizes",
        marks=FULL,
    ),
    pytest.param("flf2v", [*TWO, *on("{dp:2,sp:2,tp:2}", "tp")], id="eight devices", marks=FULL),
])
def test_image_to_video_is_diffusers(run, pipeline, overrides):
    config, values = run(*tiny.model("pictured"), "steps=4", *given.overrides(pipeline), *overrides)
    parts = {} if len(config.model.experts) == 2 else {"transformer_2": None}
    pipe = reference.load(
        tiny.checkpoint("pictured"), config, diffusers.WanImageToVideoPipeline, boundary_ratio=config.model.boundary,
        **NO_PICTURES, **parts,
    )
    kept, prepare = {}, pipe.prepare_latents

    def prepare_and_keep(*arguments, **named):
        latents, kept["condition"] = prepare(*arguments, **named)
        return latents, kept["condition"]

    pipe.prepare_latents = prepare_and_keep
    first, *last = pictures("first", *(["last"] if "flf" in pipeline else []))
    made = reference.make(pipe, config, image=first, last_image=last[0] if last else None)
    assert relative_error(values["condition"], kept["condition"].numpy()) < 1e-4
    assert_same(values, *made)


@pytest.mark.system
@pytest.mark.parametrize("pipeline, overrides", [
    pytest.param("ti2v", [], id="a picture"),
    pytest.param("t2v", [], id="a prompt", marks=FULL),
    pytest.param("ti2v", ["guidance=sequential"], id="one prompt after the other", marks=FULL),
    pytest.param("ti2v", on("{dp:2,sp:1,tp:2}", "tp"), id="dp and tp", marks=FULL),
    pytest.param("ti2v", on("{dp:1,sp:4,tp:1}", "sequence"), id="tokens over sp", marks=FULL),
])
def test_the_5b_is_diffusers(run, pipeline, overrides):
    size = ["resolution.width=128", "resolution.frames=9"]
    config, values = run(*tiny.model("five"), *size, *given.overrides(pipeline), *overrides)
    pictured = pipeline == "ti2v"
    kind = diffusers.WanImageToVideoPipeline if pictured else diffusers.WanPipeline
    absent = NO_PICTURES if pictured else {}
    pipe = reference.load(tiny.checkpoint("five"), config, kind, expand_timesteps=True, **absent)
    assert_same(values, *reference.make(pipe, config, **({"image": pictures("first")[0]} if pictured else {})))


# ---------------------------------------------------------------- videos


def frames_of(name, size):
    """A clip as the pipelines are to have it."""
    return [Image.fromarray(frame) for frame in read_frames(given.clip(name), size.frames, 16)]


@pytest.mark.parametrize("overrides", [
    pytest.param(["strength=0.3", "steps=10"], id="a little"),
    pytest.param(
        ["strength=1.0", "steps=3", "resolution.height=80", "resolution.width=96"], id="all of it, odd size",
        marks=FULL,
    ),
    pytest.param(
        ["strength=0.6", "steps=5", "scheduler=euler", *on("{dp:2,sp:2,tp:2}", "tp_ring")],
        id="flow Euler, eight devices", marks=FULL,
    ),
])
def test_video_to_video_is_diffusers(run, overrides):
    config, values = run(*tiny.model(), *given.overrides("v2v"), "resolution.fps=16", *overrides)
    pipe = reference.load(tiny.checkpoint("text"), config, diffusers.WanVideoToVideoPipeline)
    video = frames_of("video", config.resolution)
    assert_same(values, *reference.make(pipe, config, video=video, strength=config.strength, num_frames=None))


ODD = ["resolution.height=80", "resolution.width=96", "resolution.frames=9", "conditioning_scale=0.6"]


@pytest.mark.parametrize("names, overrides", [
    pytest.param("video mask first last", ["conditioning_scale=0.6"], id="all, other scale"),
    pytest.param("video mask", ODD, id="video and mask, odd size, other scale", marks=FULL),
    pytest.param("first", ["guidance_scale=1"], id="one reference, unguided", marks=FULL),
    pytest.param("video mask first last", on("{dp:2,sp:1,tp:4}", "tp"), id="all, heads over tp", marks=FULL),
    pytest.param("video mask first last", on("{dp:1,sp:8,tp:1}", "sequence"), id="all, tokens over sp", marks=FULL),
    pytest.param("video first", ["model.scan_blocks=false"], id="written out", marks=FULL),
    pytest.param("video mask first", [*TWO, "steps=6", "guidance_scale_2=2.5"], id="two experts", marks=SYSTEM),
    pytest.param(
        "video mask first", [*TWO, "steps=6", *on("{dp:2,sp:2,tp:2}", "tp_ring")], id="two experts, eight devices",
        marks=FULL,
    ),
])
def test_vace_is_diffusers(run, names, overrides):
    clips = [name for name in ("video", "mask") if name in names]
    references = [name for name in ("first", "last") if name in names]
    files = [f"{name}={given.clip(name)}" for name in clips]
    files += [f"references=[{','.join(str(given.picture(name)) for name in references)}]", "resolution.fps=16"]
    config, values = run(*tiny.model("controlled"), "pipeline=vace", *files, *overrides)
    folder, size = tiny.checkpoint("controlled"), config.resolution
    experts = {
        name: diffusers.WanVACETransformer3DModel.from_pretrained(folder / name) for name in config.model.experts
    }
    pipe = reference.load(folder, config, diffusers.WanVACEPipeline, boundary_ratio=config.model.boundary, **experts)
    assert {expert_at(config, time) for time in scheduler_table(config)[0]} == {*experts}
    transformer = experts["transformer"]
    kept, forward = {}, transformer.forward

    def forward_and_keep(*arguments, **named):
        kept["control"] = named["control_hidden_states"]
        return forward(*arguments, **named)

    transformer.forward = forward_and_keep
    resized = {
        name: [frame.resize((size.width, size.height), Image.LANCZOS) for frame in frames_of(name, size)]
        for name in clips
    }
    scale = 1.0 if config.conditioning_scale is None else config.conditioning_scale
    made = reference.make(
        pipe, config, in_front=len(references), reference_images=pictures(*references) or None,
        conditioning_scale=scale, guidance_scale_2=config.guidance_scale_2, **resized,
    )
    assert relative_error(values["control"], kept["control"].numpy()) < 1e-4
    assert_same(values, *made)


@FULL
@pytest.mark.parametrize("pipeline", ["ti2v", "i2v_clip", "vace"])
def test_it_is_as_close_to_float32_by_the_kernels_of_linear_layers(run, pipeline):
    """With modulation that differs from token to token, with a picture's tokens beside the text's, and with hints."""
    model = [*tiny.model(tiny.PIPELINES[pipeline]), *given.overrides(pipeline), "steps=2"]
    model += ["stages=[text,image,encode,denoise]" if "clip" in pipeline else "stages=[text,encode,denoise]"]
    half = "model.dtype.transformer=bfloat16"
    runs = {"exact": [], "xla": [half], "pallas": [half, "products=pallas", "products.interpret=true"]}
    latents = {name: run(*model, *overrides, folder=name)[1]["latents"] for name, overrides in runs.items()}
    errors = {name: numpy.linalg.norm(found - latents["exact"]) for name, found in latents.items()}
    assert 0 < errors["pallas"] < 1.2 * errors["xla"]
    assert numpy.abs(latents["xla"] - latents["pallas"]).max() > 0


# ---------------------------------------------------------------- files and settings


def test_the_5b_has_wans_settings_and_refuses_a_last_picture():
    config = make_config("model=wan22_ti2v_5b", "resolution=704p")
    validate(config)
    size = config.resolution
    assert (size.height, size.width, size.frames, size.fps, size.flow_shift) == (704, 1280, 121, 24, 5)
    with pytest.raises(ConfigError, match="resolution.height=720: must be a multiple of 32; nearest 704 or 736"):
        validate(make_config("model=wan22_ti2v_5b", "resolution=720p"))
    paths = given.overrides("flf2v")[1:]
    with pytest.raises(ConfigError, match="last_image=.*: pipeline=ti2v takes no such file"):
        validate(make_config("model=wan22_ti2v_5b", "resolution=704p", "pipeline=ti2v", *paths))


def test_a_picture_is_known_by_what_it_holds(run, tmp_path):
    """Copied into the run folder, in the metrics by its hash; another picture of the same name is another result."""
    picture = tmp_path / "photo.png"
    picture.write_bytes(given.picture("first").read_bytes())
    only = [*tiny.model("pictured"), "stages=[text,encode]", f"image={picture}", "pipeline=i2v"]
    run(*only)
    told = metrics(tmp_path / "run")
    assert set(told["inputs"]) == {"image"} and "image" not in told["weights"]
    assert (tmp_path / "run" / "inputs" / "image.png").read_bytes() == picture.read_bytes()
    overrides = [f"replay={tmp_path / 'run'}"]
    assert take_over(make_config(*overrides), overrides).image == str(tmp_path / "run" / "inputs" / "image.png")
    copy = tmp_path / "run" / "inputs" / "image.png"
    copy.unlink()
    copy.symlink_to(picture)
    assert take_over(make_config(*overrides), overrides).image is None, "a folder may link to what is not its own"
    picture.write_bytes(given.picture("last").read_bytes())
    with pytest.raises(ConfigError, match="encode.safetensors was made with other settings(.|\n)*input.image"):
        run(*only, f"resume={tmp_path / 'run'}", folder="again")


def test_fits(tmp_path):
    Image.new("RGB", (40, 20), "white").save(tmp_path / "wide.png")
    for fit, edge in (("cover", 1.0), ("contain", -1.0), ("stretch", 1.0)):
        picture = read_picture(tmp_path / "wide.png", 32, 32, fit)
        assert picture.shape == (3, 32, 32) and picture[0, 0, 16] == pytest.approx(edge, abs=0.02), fit


def test_pictures_are_upright_and_what_is_transparent_is_white(tmp_path, caplog):
    turned = Image.new("RGB", (64, 32), "black")
    turned.paste("white", (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter to the right
    turned.save(tmp_path / "turned.png", exif=exif)
    upright = read_picture(tmp_path / "turned.png", 64, 32, "stretch")
    assert upright[0, 5].mean() > 0.9 and upright[0, -5].mean() < -0.9
    Image.new("RGBA", (32, 32), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    with caplog.at_level("INFO"):
        assert read_picture(tmp_path / "clear.png", 32, 32, "cover").min() == 1
    assert "becomes white" in caplog.text


@pytest.mark.parametrize(
    "name, message",
    [
        ("none.png", "no such file"), ("text.png", "not a picture that Pillow reads"), ("half.png", "not a picture"),
        ("bomb.png", "more than 100 million pixels"), ("tiny.png", "too small"), ("", "image: missing; pipeline=i2v"),
    ],
)
def test_pictures_that_cannot_be_used_are_told_first(tmp_path, name, message):
    (tmp_path / "text.png").write_text("hello")
    noise = numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(tmp_path / "half.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "half.png").read_bytes()[:5000])
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "tiny.png")
    image = [f"image={tmp_path / name}"] if name else []
    with pytest.raises(ConfigError, match=message):
        validate(make_config(*SMALL, *tiny.model("pictured"), "pipeline=i2v", *image))


def test_a_picture_that_the_pipeline_does_not_take_is_told():
    with pytest.raises(ConfigError, match="last_image=.*: pipeline=t2v takes no such file; choose a model"):
        validate(make_config(f"last_image={given.picture('last')}"))
    with pytest.raises(ConfigError, match="pipeline=i2v: gives the transformer 36 channels, and demo takes 16"):
        validate(make_config(*given.overrides("i2v")))


@pytest.mark.parametrize(
    "model, settings",
    [
        ("wan21_i2v_14b_480p", ("i2v_clip", 3, 40, 5.0)), ("wan21_i2v_14b_720p", ("i2v_clip", 5, 40, 5.0)),
        ("wan21_flf2v_14b", ("flf2v_clip", 16, 50, 5.5)),
    ],
)
def test_the_models_with_an_image_encoder_have_wans_settings(model, settings):
    paths = given.overrides("flf2v" if "flf" in model else "i2v")[1:]
    config = make_config(f"model={model}", "resolution=480p" if "480p" in model else "resolution=720p", *paths)
    validate(config)
    assert (config.pipeline.name, config.resolution.flow_shift, config.steps, config.guidance_scale) == settings


def test_the_image_to_video_model_has_wans_settings():
    config = make_config("model=wan22_i2v_a14b", "resolution=720p", f"image={given.picture('first')}")
    validate(config)
    experts = [expert_at(config, time) for time in scheduler_table(config)[0]]
    assert (config.pipeline.name, config.resolution.flow_shift, config.steps) == ("i2v", 5, 40)
    assert (config.guidance_scale, config.guidance_scale_2) == (3.5, 3.5) and experts.index("transformer_2") == 15
