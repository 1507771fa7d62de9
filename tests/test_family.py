"""The rest of the family, each as diffusers' own pipeline makes it from the same weights and seed."""
import json

import diffusers
import imageio_ffmpeg
import numpy
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests import tiny
from tests.conftest import SMALL, make_config
from tests.test_parity import NEGATIVE, PROMPT, TEXTS, psnr, relative_error, results
from wan_torchax.config.clips import read_frames
from wan_torchax.config.commandline import rewrite
from wan_torchax.config.geometry import expert_at
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.models.pictures import read_picture
from wan_torchax.records.stored import take_over
from wan_torchax.session import session
from wan_torchax.stages.sampling import scheduler_table
from wan_torchax.tasks.generate import generate as generate_into

SIZE = dict(height=64, width=64, num_frames=5)


def components(folder, *names):
    """Of a checkpoint, as diffusers loads them."""
    kinds = {
        "text_encoder": transformers.UMT5EncoderModel, "vae": diffusers.AutoencoderKLWan,
        "transformer": diffusers.WanTransformer3DModel, "transformer_2": diffusers.WanTransformer3DModel,
    }
    loaded = {name: kinds[name].from_pretrained(folder / name) for name in names}
    return loaded | {"tokenizer": transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")}


def scheduler(config):
    return getattr(diffusers, config.scheduler.target)(**config.scheduler.arguments)


@pytest.fixture
def run(tmp_path, cache):
    """Run a config; gives its values."""

    def run_it(*overrides, folder="run"):
        (tmp_path / folder).mkdir()
        arguments = [*SMALL, *TEXTS, cache, *overrides]
        config = make_config(*arguments)
        validate(config)
        generate_into(config, tmp_path / folder, rewrite(arguments))
        return config, results(tmp_path / folder)

    return run_it


def assert_same(values, latents, frames):
    assert relative_error(values["latents"], latents) < 1e-4
    assert psnr(values["frames"], (frames * 255).round()) > 55


# ---------------------------------------------------------------- two experts


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("experts") / "model", experts=2)


def two(folder, boundary=0.875):
    return [*tiny.overrides(folder), "model.experts=[transformer,transformer_2]", f"model.boundary={boundary}"]


CASES = {
    "guidance of each": ["guidance_scale_2=2.5"],
    "guidance off in the second": ["guidance_scale_2=1"],
    "swapped, flow Euler": ["guidance_scale_2=2.5", "expert_weights=swapped", "scheduler=euler"],
    "eight devices": ["guidance_scale_2=2.5", "mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}", "sharding=tp_ring"],
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_two_experts_are_diffusers(run, experts, overrides):
    session.clear()
    config, values = run(*two(experts), "steps=6", *overrides)
    timesteps = scheduler_table(config)[0]
    assert {expert_at(config, time) for time in timesteps} == {"transformer", "transformer_2"}
    pipeline = diffusers.WanPipeline(
        **components(experts, "text_encoder", "vae", "transformer", "transformer_2"), scheduler=scheduler(config),
        boundary_ratio=0.875,
    )
    pipeline.set_progress_bar_config(disable=True)
    settings = dict(
        prompt=PROMPT, negative_prompt=NEGATIVE, num_inference_steps=6, guidance_scale=config.guidance_scale,
        guidance_scale_2=config.guidance_scale_2, max_sequence_length=tiny.TOKENS, **SIZE,
    )
    made = {
        kind: pipeline(**settings, generator=torch.Generator().manual_seed(config.seed), output_type=kind).frames[0]
        for kind in ("latent", "np")
    }
    assert_same(values, made["latent"].numpy(), made["np"])


def test_experts_share_one_program_and_swapped_ones_its_memory(run, experts, monkeypatch):
    session.clear()
    loaded = []
    from wan_torchax.runtime.components import Component

    load = Component.load
    monkeypatch.setattr(Component, "load", lambda self, *rest: (loaded.append(self.name), load(self, *rest)))
    steps = ["steps=6", "keep_resident=true"]
    _, swapped = run(*two(experts), *steps, "expert_weights=swapped")
    assert [name for name in loaded if "transformer" in name] == ["transformer", "transformer_2"]
    assert list(session.stages["denoise"].programs.entries) == ["step"]
    loaded = [name for name, component in session.components.items() if component.is_loaded()]
    assert "transformer_2" in loaded and "transformer" not in loaded
    _, resident = run(*two(experts), *steps, "expert_weights=resident", folder="again")
    assert session.components["transformer"].is_loaded() and session.components["transformer_2"].is_loaded()
    assert numpy.array_equal(swapped["latents"], resident["latents"])
    session.clear()


def test_the_switch_is_where_wans_settings_put_it():
    """T2V-A14B: 40 steps at shift 12, boundary 0.875: the second expert begins after 26 steps."""
    config = make_config("model=wan22_t2v_a14b", "resolution=720p")
    validate(config)
    experts = [expert_at(config, time) for time in scheduler_table(config)[0]]
    assert config.resolution.flow_shift == 12 and experts.index("transformer_2") == 26


# ---------------------------------------------------------------- pictures


CHANNELS = dict(in_channels=36)  # 16 of noise, 4 of the mask, 16 of the picture


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("pictured") / "model", experts=2, **CHANNELS)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two pictures of noise with some shape in them, of another aspect than the video's."""
    folder, generator = tmp_path_factory.mktemp("pictures"), numpy.random.default_rng(0)
    for name, size in (("first", (90, 70)), ("last", (64, 100))):
        pixels = generator.integers(0, 256, (*size[::-1], 3), dtype=numpy.uint8)
        pixels[: size[1] // 2] //= 4
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Checkpoints with an image encoder: of one picture, and of two."""
    folder = tmp_path_factory.mktemp("seen")
    made = {name: tiny.make_checkpoint(folder / name, **channels) for name, channels in SEEN.items()}
    file = made["flf2v_clip"] / "image_encoder" / "model.safetensors"  # as on the Hub
    save_file({f"vision_model.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return made


SEEN = {  # five tokens of a picture
    "i2v_clip": CHANNELS | dict(image_dim=24, added_kv_proj_dim=128),
    "flf2v_clip": CHANNELS | dict(image_dim=24, added_kv_proj_dim=128, pos_embed_seq_len=10),
}
SEEN_CASES = {
    "first": ["pipeline=i2v_clip"],
    "first and last": ["pipeline=flf2v_clip"],
    "heads over tp": ["pipeline=i2v_clip", "mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:4}", "sharding=tp"],
    "tokens over sp": ["pipeline=flf2v_clip", "mesh=cpu_8", "mesh.axes={dp:1,sp:8,tp:1}", "sharding=sequence"],
}


@pytest.mark.parametrize("overrides", SEEN_CASES.values(), ids=SEEN_CASES)
def test_image_to_video_with_an_image_encoder_is_diffusers(run, seen, pictures, overrides):
    session.clear()
    name = overrides[0].partition("=")[2]
    both, folder = name == "flf2v_clip", seen[name]
    paths = [f"image={pictures / 'first.png'}"] + ([f"last_image={pictures / 'last.png'}"] if both else [])
    # diffusers takes the last 512 tokens for text wherever pictures are tokens too.
    model = [*tiny.overrides(folder, **SEEN[name]), "model.text_tokens=512"]
    config, values = run(*model, "steps=3", "fit=stretch", *paths, *overrides)
    processor = transformers.CLIPImageProcessor.from_pretrained(folder / "image_processor")
    encoder = transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder")
    pipeline = diffusers.WanImageToVideoPipeline(
        **components(folder, "text_encoder", "vae", "transformer"), scheduler=scheduler(config),
        image_encoder=encoder, image_processor=processor,
    )
    pipeline.set_progress_bar_config(disable=True)
    given = [Image.open(pictures / "first.png"), Image.open(pictures / "last.png")][: 1 + both]
    with torch.no_grad():
        embeddings = pipeline.encode_image(given).numpy()
    assert relative_error(values["image_embeddings"], embeddings) < 1e-4

    def make(kind):
        return pipeline(
            image=given[0], last_image=given[1] if both else None, prompt=PROMPT, negative_prompt=NEGATIVE, **SIZE,
            num_inference_steps=3, guidance_scale=config.guidance_scale, output_type=kind,
            max_sequence_length=512, generator=torch.Generator().manual_seed(config.seed),
        ).frames[0]

    assert_same(values, make("latent").numpy(), make("np"))


def with_picture(folder, *overrides):
    experts = ["model.experts=[transformer,transformer_2]", "model.boundary=0.9"]
    return [*tiny.overrides(folder, **CHANNELS), *experts, *overrides]


PICTURE_CASES = {
    "first and last": ["pipeline=flf2v"],
    "one expert, unguided": ["pipeline=i2v", "model.experts=[transformer]", "model.boundary=null", "guidance_scale=1"],
    "other sizes": ["pipeline=i2v", "resolution.height=80", "resolution.width=96", "resolution.frames=9"],
    "eight devices": ["pipeline=flf2v", "mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}", "sharding=tp"],
}


@pytest.mark.parametrize("overrides", PICTURE_CASES.values(), ids=PICTURE_CASES)
def test_image_to_video_is_diffusers(run, pictured, pictures, overrides):
    session.clear()
    paths = [f"image={pictures / 'first.png'}"]
    paths += [f"last_image={pictures / 'last.png'}"] if "pipeline=flf2v" in overrides else []
    config, values = run(*with_picture(pictured), "steps=4", "fit=stretch", *paths, *overrides)
    experts, size = list(config.model.experts), config.resolution
    pipeline = diffusers.WanImageToVideoPipeline(
        **components(pictured, "text_encoder", "vae", *experts), scheduler=scheduler(config),
        image_encoder=None, image_processor=None, boundary_ratio=config.model.boundary,
        **({} if len(experts) == 2 else {"transformer_2": None}),
    )
    pipeline.set_progress_bar_config(disable=True)
    kept, prepare = {}, pipeline.prepare_latents

    def prepare_and_keep(*arguments, **named):
        latents, kept["condition"] = prepare(*arguments, **named)
        return latents, kept["condition"]

    pipeline.prepare_latents = prepare_and_keep
    last = Image.open(pictures / "last.png") if "pipeline=flf2v" in overrides else None

    def make(kind):
        return pipeline(
            image=Image.open(pictures / "first.png"), last_image=last, prompt=PROMPT, negative_prompt=NEGATIVE,
            height=size.height, width=size.width, num_frames=size.frames, num_inference_steps=4,
            guidance_scale=config.guidance_scale, output_type=kind, max_sequence_length=tiny.TOKENS,
            generator=torch.Generator().manual_seed(config.seed),
        ).frames[0]

    latents, frames = make("latent").numpy(), make("np")
    assert relative_error(values["condition"], kept["condition"].numpy()) < 1e-4
    assert_same(values, latents, frames)


FIVE = dict(in_channels=24, out_channels=24)


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """As Wan 2.2's 5B: its own VAE, and a picture that is the first latent frame."""
    return tiny.make_checkpoint(tmp_path_factory.mktemp("five") / "model", vae=tiny.VAE_22, **FIVE)


FIVE_CASES = {
    "a prompt": ["pipeline=t2v"],
    "a picture": ["pipeline=ti2v"],
    "one prompt after the other": ["pipeline=ti2v", "guidance=sequential"],
    "dp and tp": ["pipeline=ti2v", "mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:2}"],
    "tokens over sp": [
        "pipeline=ti2v", "mesh=cpu_8", "mesh.axes={dp:1,sp:4,tp:1}", "sharding=sequence",
    ],
}


@pytest.mark.parametrize("overrides", FIVE_CASES.values(), ids=FIVE_CASES)
def test_the_5b_is_diffusers(run, five, pictures, overrides):
    session.clear()
    pictured = "pipeline=ti2v" in overrides
    size = ["resolution.height=64", "resolution.width=128", "resolution.frames=9", "steps=3", "fit=stretch"]
    given = [f"image={pictures / 'first.png'}"] if pictured else []
    config, values = run(*tiny.overrides(five, **FIVE), *size, *given, *overrides)
    kind = diffusers.WanImageToVideoPipeline if pictured else diffusers.WanPipeline
    absent = {"image_encoder": None, "image_processor": None} if pictured else {}
    pipeline = kind(
        **components(five, "text_encoder", "vae", "transformer"), scheduler=scheduler(config), expand_timesteps=True,
        **absent,
    )
    pipeline.set_progress_bar_config(disable=True)

    def make(output):
        return pipeline(
            **({"image": Image.open(pictures / "first.png")} if pictured else {}), prompt=PROMPT,
            negative_prompt=NEGATIVE, height=64, width=128, num_frames=9, num_inference_steps=3,
            guidance_scale=config.guidance_scale, output_type=output, max_sequence_length=tiny.TOKENS,
            generator=torch.Generator().manual_seed(config.seed),
        ).frames[0]

    assert_same(values, make("latent").numpy(), make("np"))


# ---------------------------------------------------------------- videos


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """A video and a mask of nine frames, without loss."""
    folder, generator = tmp_path_factory.mktemp("clips"), numpy.random.default_rng(0)
    noise = generator.integers(0, 256, (9, 80, 96, 3), dtype=numpy.uint8)
    noise[:, :40] //= 3
    mask = numpy.zeros_like(noise)
    for frame in range(9):
        mask[frame, 8 * frame % 40 :, 30:70] = 255
    for name, frames in (("video", noise), ("mask", mask)):
        sizes = dict(size=(96, 80), fps=16, codec="libx264rgb", pix_fmt_in="rgb24", pix_fmt_out="rgb24")
        writer = imageio_ffmpeg.write_frames(folder / f"{name}.mkv", **sizes, output_params=["-crf", "0"])
        writer.send(None)
        for frame in frames:
            writer.send(numpy.ascontiguousarray(frame))
        writer.close()
    return folder


def frames_of(path, count):
    return [Image.fromarray(frame) for frame in read_frames(path, count, 16)]


V2V_CASES = {
    "a little": ["strength=0.3", "steps=10"],
    "all of it, odd size": ["strength=1.0", "steps=3", "resolution.height=80", "resolution.width=96"],
    "flow Euler, eight devices": [
        "strength=0.6", "steps=5", "scheduler=euler", "mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}", "sharding=tp_ring",
    ],
}


@pytest.mark.parametrize("overrides", V2V_CASES.values(), ids=V2V_CASES)
def test_video_to_video_is_diffusers(run, experts, clips, overrides):
    session.clear()
    given = ["pipeline=v2v", f"video={clips / 'video.mkv'}", "fit=stretch", "resolution.fps=16"]
    config, values = run(*tiny.overrides(experts), *given, *overrides)
    size = config.resolution
    pipeline = diffusers.WanVideoToVideoPipeline(
        **components(experts, "text_encoder", "vae", "transformer"), scheduler=scheduler(config)
    )
    pipeline.set_progress_bar_config(disable=True)

    def make(kind):
        return pipeline(
            video=frames_of(clips / "video.mkv", size.frames), prompt=PROMPT, negative_prompt=NEGATIVE,
            height=size.height, width=size.width, num_inference_steps=config.steps, strength=config.strength,
            guidance_scale=config.guidance_scale, output_type=kind, max_sequence_length=tiny.TOKENS,
            generator=torch.Generator().manual_seed(config.seed),
        ).frames[0]

    assert_same(values, make("latent").numpy(), make("np"))


CONTROLLED = dict(num_layers=4, vace_layers=[0, 2], vace_in_channels=96)


@pytest.fixture(scope="module")
def controlled(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("controlled") / "model", **CONTROLLED)


VACE_CASES = {
    "video and mask, odd size, other scale": [
        "video", "mask", "resolution.height=80", "resolution.width=96", "resolution.frames=9", "conditioning_scale=0.6",
    ],
    "one reference, unguided": ["first", "guidance_scale=1"],
    "all, heads over tp": ["video", "mask", "first", "last", "mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:4}"],
    "all, tokens over sp": [
        "video", "mask", "first", "last", "mesh=cpu_8", "mesh.axes={dp:1,sp:8,tp:1}", "sharding=sequence",
    ],
    "not in a loop": ["video", "first", "model.scan_blocks=false"],
}


@pytest.mark.parametrize("case", VACE_CASES.values(), ids=VACE_CASES)
def test_vace_is_diffusers(run, controlled, clips, pictures, case):
    session.clear()
    files = {name: clips / f"{name}.mkv" for name in ("video", "mask") if name in case}
    references = [pictures / f"{name}.png" for name in ("first", "last") if name in case]
    given = [f"{name}={path}" for name, path in files.items()]
    given += [f"references=[{','.join(map(str, references))}]", "fit=stretch", "resolution.fps=16"]
    overrides = [text for text in case if "=" in text]
    config, values = run(*tiny.overrides(controlled, **CONTROLLED), "pipeline=vace", "steps=3", *given, *overrides)
    size = config.resolution
    parts = components(controlled, "text_encoder", "vae")
    transformer = diffusers.WanVACETransformer3DModel.from_pretrained(controlled / "transformer")
    pipeline = diffusers.WanVACEPipeline(**parts, transformer=transformer, scheduler=scheduler(config))
    pipeline.set_progress_bar_config(disable=True)
    kept, forward = {}, transformer.forward

    def forward_and_keep(*arguments, **named):
        kept["control"] = named["control_hidden_states"]
        return forward(*arguments, **named)

    transformer.forward = forward_and_keep
    frames = {
        name: [frame.resize((size.width, size.height), Image.LANCZOS) for frame in frames_of(path, size.frames)]
        for name, path in files.items()
    }

    def make(kind):
        return pipeline(
            **frames, reference_images=[Image.open(path) for path in references] or None, prompt=PROMPT,
            negative_prompt=NEGATIVE, height=size.height, width=size.width, num_frames=size.frames,
            num_inference_steps=3, guidance_scale=config.guidance_scale, output_type=kind,
            max_sequence_length=tiny.TOKENS,
            conditioning_scale=1.0 if config.conditioning_scale is None else config.conditioning_scale,
            generator=torch.Generator().manual_seed(config.seed),
        ).frames[0]

    latents, made = make("latent").numpy()[:, len(references) :], make("np")
    assert relative_error(values["control"], kept["control"].numpy()) < 1e-4
    assert_same(values, latents, made)


@pytest.mark.parametrize("kind", ["five", "i2v_clip", "controlled"])
def test_it_is_as_close_to_float32_by_the_kernels_of_linear_layers(run, request, pictures, clips, kind):
    """With modulation that differs from token to token, with a picture's tokens beside the text's, and with hints."""
    first, folder = f"image={pictures / 'first.png'}", request.getfixturevalue("seen" if kind in SEEN else kind)
    settings, given = {
        "five": (FIVE, ["pipeline=ti2v", first]),
        "i2v_clip": (SEEN["i2v_clip"], ["model.text_tokens=512", "pipeline=i2v_clip", first]),
        "controlled": (CONTROLLED, ["pipeline=vace", f"video={clips / 'video.mkv'}"]),
    }[kind]
    model = [*tiny.overrides(folder[kind] if kind in SEEN else folder, **settings), *given]
    small = "resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=2", "fit=stretch"
    half = "model.dtype.transformer=bfloat16"
    runs = {"exact": [], "xla": [half], "pallas": [half, "products=pallas", "products.interpret=true"]}
    latents = {}
    for name, overrides in runs.items():
        session.clear()
        latents[name] = run(*model, *small, *overrides, folder=name)[1]["latents"]
    errors = {name: numpy.linalg.norm(found - latents["exact"]) for name, found in latents.items()}
    assert 0 < errors["pallas"] < 1.2 * errors["xla"]
    assert numpy.abs(latents["xla"] - latents["pallas"]).max() > 0


def test_the_5b_has_wans_settings_and_refuses_a_last_picture(pictures):
    config = make_config("model=wan22_ti2v_5b", "resolution=704p")
    validate(config)
    size = config.resolution
    assert (size.height, size.width, size.frames, size.fps, size.flow_shift) == (704, 1280, 121, 24, 5)
    with pytest.raises(ConfigError, match="resolution.height=720: must be a multiple of 32; nearest 704 or 736"):
        validate(make_config("model=wan22_ti2v_5b", "resolution=720p"))
    paths = [f"image={pictures / 'first.png'}", f"last_image={pictures / 'last.png'}"]
    with pytest.raises(ConfigError, match="last_image=.*: pipeline=ti2v takes no such file"):
        validate(make_config("model=wan22_ti2v_5b", "resolution=704p", "pipeline=ti2v", *paths))


def test_a_picture_is_known_by_what_it_holds(run, pictured, pictures, tmp_path):
    """Copied into the run folder, in the metrics by its hash; another picture of the same name is another result."""
    picture = tmp_path / "photo.png"
    picture.write_bytes((pictures / "first.png").read_bytes())
    only = ["stages=[text,encode]", f"image={picture}", "pipeline=i2v"]
    run(*with_picture(pictured), *only)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert set(metrics["inputs"]) == {"image"} and "image" not in metrics["weights"]
    assert (tmp_path / "run" / "inputs" / "image.png").read_bytes() == picture.read_bytes()
    overrides = [f"replay={tmp_path / 'run'}"]
    assert take_over(make_config(*overrides), overrides).image == str(tmp_path / "run" / "inputs" / "image.png")
    copy = tmp_path / "run" / "inputs" / "image.png"
    copy.unlink()
    copy.symlink_to(picture)
    assert take_over(make_config(*overrides), overrides).image is None, "a folder may link to what is not its own"
    picture.write_bytes((pictures / "last.png").read_bytes())
    with pytest.raises(ConfigError, match="encode.safetensors was made with other settings(.|\n)*input.image"):
        run(*with_picture(pictured), *only, f"resume={tmp_path / 'run'}", folder="again")


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
def test_pictures_that_cannot_be_used_are_told_first(tmp_path, pictured, name, message):
    (tmp_path / "text.png").write_text("hello")
    noise = numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(tmp_path / "half.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "half.png").read_bytes()[:5000])
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "tiny.png")
    image = [f"image={tmp_path / name}"] if name else []
    with pytest.raises(ConfigError, match=message):
        validate(make_config(*SMALL, *with_picture(pictured), "pipeline=i2v", *image))


def test_a_picture_that_the_pipeline_does_not_take_is_told(pictures):
    with pytest.raises(ConfigError, match="last_image=.*: pipeline=t2v takes no such file; choose a model"):
        validate(make_config(f"last_image={pictures / 'last.png'}"))
    with pytest.raises(ConfigError, match="pipeline=i2v: gives the transformer 36 channels, and demo takes 16"):
        validate(make_config("pipeline=i2v", f"image={pictures / 'first.png'}"))


@pytest.mark.parametrize(
    "model, settings",
    [
        ("wan21_i2v_14b_480p", ("i2v_clip", 3, 40, 5.0)), ("wan21_i2v_14b_720p", ("i2v_clip", 5, 40, 5.0)),
        ("wan21_flf2v_14b", ("flf2v_clip", 16, 50, 5.5)),
    ],
)
def test_the_models_with_an_image_encoder_have_wans_settings(model, settings, pictures):
    paths = [f"image={pictures / 'first.png'}"] + ([f"last_image={pictures / 'last.png'}"] if "flf" in model else [])
    config = make_config(f"model={model}", "resolution=480p" if "480p" in model else "resolution=720p", *paths)
    validate(config)
    assert (config.pipeline.name, config.resolution.flow_shift, config.steps, config.guidance_scale) == settings


def test_the_image_to_video_model_has_wans_settings(pictures):
    config = make_config("model=wan22_i2v_a14b", "resolution=720p", f"image={pictures / 'first.png'}")
    validate(config)
    experts = [expert_at(config, time) for time in scheduler_table(config)[0]]
    assert (config.pipeline.name, config.resolution.flow_shift, config.steps) == ("i2v", 5, 40)
    assert (config.guidance_scale, config.guidance_scale_2) == (3.5, 3.5) and experts.index("transformer_2") == 15
