"""HunyuanVideo 1.5 against diffusers' modules and pipelines, on the same weights."""
import diffusers
import jax
import jax.numpy as jnp
import numpy
import openai
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as pipelines
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from omegaconf import OmegaConf
from PIL import Image

from tests import hunyuan15
from tests.conftest import make_config, results, run_into
from tests.denoisers import KERNELS, arrays_of, mesh_of
from tests.reference import distance, psnr, relative_error
from tests.serving import DEADLINE, Server
from wan_torchax.config.frames import read_frames
from wan_torchax.config.inputs import nearest_bucket
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels.settings import Kernel, Parallel, Products
from wan_torchax.models.family import Forward
from wan_torchax.models.hunyuan15 import blocks, conditions, prompts, vae
from wan_torchax.patches import conv3d_as_sum_of_2d, torchax_on
from wan_torchax.session import session

GRID = 3, 4, 6
COUNTS, GLYPH_COUNTS = (7, 10), (4, 0)  # of the prompt and of the negative prompt, of 10 and 6


@pytest.fixture(scope="module", params=[False, True], ids=["t2v", "i2v, two times"])
def case(request):
    """A transformer, its inputs as the stages give them, and what diffusers makes of both."""
    pictured, generator = request.param, torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    module = hunyuan15.transformer(use_meanflow=pictured)
    latents, condition = draw(1, 4, *GRID), draw(1, 5, *GRID) * pictured
    text, glyphs, image = draw(2, 10, 32), draw(2, 6, 24), draw(1, 5, 16) * pictured
    masks = [torch.arange(size)[None] < torch.tensor(counts)[:, None]
             for size, counts in ((10, COUNTS), (6, GLYPH_COUNTS))]
    with torch.no_grad():
        expected = module(
            torch.cat([latents, condition], 1).repeat(2, 1, 1, 1, 1), torch.full((2,), 700.0), text, masks[0].float(),
            torch.full((2,), 500.0) if pictured else None, glyphs, masks[1].float(), image.repeat(2, 1, 1),
        )[0].numpy()
    given = {"embeddings": text, "counts": torch.tensor(COUNTS), "glyphs": glyphs,
             "glyph_counts": torch.tensor(GLYPH_COUNTS)}
    if pictured:
        given |= {"condition": condition, "image_embeddings": image, "next_timestep": torch.tensor(500.0)}
    return module, latents.repeat(2, 1, 1, 1, 1).numpy(), {k: v.numpy() for k, v in given.items()}, expected


LAYOUTS = {
    "one device": (dict(dp=1, sp=1, tp=1), Parallel(), {}),
    "written out": (dict(dp=1, sp=1, tp=1), Parallel(), dict(scan=False)),
    "tp": (dict(dp=1, sp=1, tp=8), Parallel(batch="dp", heads="tp"), {}),
    "tokens over sp": (dict(dp=2, sp=4, tp=1), Parallel(batch="dp", ulysses="sp"), dict(gather="sp", multiple=32)),
    "ring": (dict(dp=1, sp=8, tp=1), Parallel(ring="sp"), dict(multiple=64)),
}


QUICK = ("one device", "tokens over sp")  # the others in the full lane


@pytest.mark.parametrize("layout", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in LAYOUTS
])
def test_the_transformer_is_diffusers(case, layout):
    module, latents, given, expected = case
    axes, parallel, more = LAYOUTS[layout]
    forward = Forward(
        dict(module.config), "float32", GRID, 10, tuple(given), mesh_of(**axes), parallel,
        Kernel(kernel="xla", block_q=16, block_kv=16), Kernel(kernel="xla"), Products(),
        make_config().precision, **more,
    )
    velocity = jax.jit(blocks.denoiser(module, forward))
    output = velocity(arrays_of(module, "transformer_blocks"), latents, jnp.float32(700), given)
    assert relative_error(output.velocity, expected) < 1e-5
    assert output.residual.shape == (2, 72 + -72 % forward.multiple, 128)


# ---------------------------------------------------------------- VAE


def in_chunks(function, arrays, pieces):
    """A video's pieces, one after the other, as the stages run them."""
    made, caches = [], None
    with torchax_on({torch.nn.functional.conv3d: conv3d_as_sum_of_2d}):
        compiled = jax.jit(function)
        for piece in pieces:
            one, caches = compiled(arrays, piece.numpy(), caches)
            made.append(numpy.asarray(one))
    return numpy.concatenate(made, axis=2)


@pytest.mark.system
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.full)])
def test_the_vae_in_chunks_is_diffusers_whole(devices):
    """Five latent frames: the first, later ones, and attention over all before. Eight devices share four columns."""
    module, generator = hunyuan15.vae(), torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 5, 3, 4, generator=generator)
    with torch.no_grad():
        pixels = module.decode(latents).sample.clamp(-1, 1)
        expected = module.encode(pixels[:, :, :9]).latent_dist.mode().numpy()
    mesh, scale = mesh_of(dp=1, sp=1, tp=devices), module.config.scaling_factor
    config = OmegaConf.create({
        "resolution": {"frames": 17}, "model": {"dtype": {"vae": "float32"}},
        "sharding": {"picture": [None, None, None, None, "tp"] if devices > 1 else []},
    })
    decode, encode = (make(module, config, mesh)[0] for make in (vae.decoder, vae.encoder))
    made = in_chunks(decode, arrays_of(module), (latents * scale).split(1, 2))
    assert relative_error(made, pixels.numpy()) < 1e-5 and made.shape == (1, 3, 17, 48, 64)
    pieces = pixels[:, :, :1], pixels[:, :, 1:5], pixels[:, :, 5:9]
    assert relative_error(in_chunks(encode, arrays_of(module), pieces), expected * scale) < 1e-5


# ---------------------------------------------------------------- prompts and sizes


def test_the_chat_is_the_pipelines():
    message = pipelines.HunyuanVideo15Pipeline._get_mllm_prompt_embeds.__kwdefaults__ or {}
    system = message.get("system_message") or pipelines.HunyuanVideo15Pipeline._get_mllm_prompt_embeds.__defaults__[2]
    assert system == prompts.SYSTEM
    chat = pipelines.format_text_input(["", "a cat"], system)
    made = hunyuan15.tokenizer().apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert [prompts.in_chat(prompt) for prompt in ("", "a cat")] == made


@pytest.mark.parametrize("prompt", [
    'a sign "OPEN"', "“curly” and \"straight\", “curly” again", "none 'here'", 'an "unfinished', 'two "a" "b" and ""',
    "", f'a long one: "{"ä" * 200}"',
])
def test_glyphs_are_the_pipelines(prompt):
    import transformers

    text = pipelines.extract_glyph_texts(prompt)
    assert prompts.quoted(prompt) == text
    ids, mask = prompts.tokenize_glyphs({}, [prompt], 256, None)
    if text is None:
        assert not mask.any() and not ids.any()
        return
    expected = transformers.ByT5Tokenizer(extra_ids=0)(text, padding="max_length", max_length=256, truncation=True)
    assert ids[0].tolist() == expected["input_ids"] and mask[0].tolist() == expected["attention_mask"]


def test_buckets_are_the_pipelines():
    processor, draw = HunyuanVideo15ImageProcessor(), numpy.random.default_rng(0).integers(64, 2000, (100, 2)).tolist()
    for height, width in (*draw, (1280, 720), (720, 1280), (500, 500)):
        for side in (640, 960):
            if max(height, width) <= 3.9 * min(height, width):
                expected = processor.calculate_default_height_width(height, width, side)
                assert nearest_bucket(height / width, side**2, 16) == expected


@pytest.mark.parametrize("model, side", [("hunyuan15_i2v_480p", 640), ("hunyuan15_i2v_720p", 960)])
def test_the_size_is_that_of_the_picture(tmp_path, model, side):
    Image.new("RGB", (700, 1000)).save(tmp_path / "tall.png")
    config = make_config(f"model={model}", "resolution=auto", "prompt=a cat", f"image={tmp_path / 'tall.png'}")
    validate(config)
    expected = HunyuanVideo15ImageProcessor().calculate_default_height_width(1000, 700, side)
    assert (config.resolution.height, config.resolution.width) == expected


@pytest.mark.parametrize("size", [(101, 70), (70, 101), (64, 48), (640, 31)])
def test_an_image_is_framed_as_the_pipeline_does(tmp_path, size):
    noise = numpy.random.default_rng(0).integers(0, 255, (*size[::-1], 3), "uint8")
    Image.fromarray(noise).save(tmp_path / "image.png")
    expected = HunyuanVideo15ImageProcessor().resize(Image.fromarray(noise), 48, 64, resize_mode="crop")
    framed = conditions.framed(tmp_path / "image.png", OmegaConf.create({"height": 48, "width": 64}), "cover")
    assert numpy.array_equal(numpy.asarray(framed), numpy.asarray(expected))


@pytest.mark.parametrize("overrides, message", [
    (["pipeline=t2v"], "use pipeline=t2v_hunyuan15 or i2v_hunyuan15"),
    (["model.architecture.transformer.in_channels=64"], "in_channels=64: with this VAE it is 65"),
    (["model.architecture.transformer.patch_size=2"], "patch_size=2: a token of HunyuanVideo 1.5 is one latent pixel"),
    (["model.noise_dtype=float64"], "model.noise_dtype=float64"),
])
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config("model=hunyuan15_t2v_480p", "prompt=a cat", *overrides))


def test_sizes_and_schedules_are_the_models():
    config = make_config("model=hunyuan15_t2v_720p", "prompt=a cat")
    size = config.resolution
    assert (size.height, size.width, size.frames, size.fps, size.flow_shift) == (720, 1280, 121, 24, 9.0)
    config = make_config("model=hunyuan15_i2v_480p_step_distilled", "prompt=a cat", "image=docs/demo.png")
    assert (config.steps, config.guidance_scale, config.resolution.flow_shift) == (12, 1.0, 7.0)
    assert config.resolution.height % 16 == config.resolution.width % 16 == 0 < config.resolution.height


# ---------------------------------------------------------------- whole pipelines


CASES = {
    "t2v": ("hunyuan15_t2v_480p", {}, ["resolution.height=48", "resolution.width=80"]),
    "t2v, tp": (
        "hunyuan15_t2v_480p", {}, ["resolution.height=48", "resolution.width=80", "mesh=cpu_8",
                                   "mesh.axes={dp:2,sp:1,tp:4}"],
    ),
    "i2v, sp, two times": (
        "hunyuan15_i2v_480p", {"use_meanflow": True},
        ["resolution.area=4096", "mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=sequence"],
    ),
    "i2v, one after the other": ("hunyuan15_i2v_480p", {}, ["resolution.area=4096", "guidance=sequential"]),
}
PROMPT, NEGATIVE = 'a sign "OPEN" moving', "red"


@pytest.mark.system
@pytest.mark.parametrize("case", [
    pytest.param(case, marks=() if case == "i2v, sp, two times" else pytest.mark.full) for case in CASES
])
def test_a_video_is_the_pipelines(tmp_path, case):
    """Counts of valid tokens differ, quotes are in one prompt alone, and no device divides the sizes."""
    name, changes, overrides = CASES[case]
    pictured, kind = "i2v" in name, diffusers.HunyuanVideo15Pipeline
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "num_frames": 9, "num_inference_steps": 3}
    if pictured:
        picture = numpy.random.default_rng(0).integers(0, 255, (70, 101, 3), "uint8")
        Image.fromarray(picture).save(tmp_path / "image.png")
        overrides = [*overrides, f"image={tmp_path / 'image.png'}"]
        kind, given["image"] = diffusers.HunyuanVideo15ImageToVideoPipeline, Image.fromarray(picture)
    overrides = [*hunyuan15.model(name, **changes), *overrides, "steps=3", "resolution.frames=9",
                 f"prompt={PROMPT}", f"negative_prompt={NEGATIVE}", "output.keep_frames=true"]
    config = make_config(*overrides)
    if not pictured:
        given |= {"height": config.resolution.height, "width": config.resolution.width}
    pipeline = hunyuan15.pipeline(kind, hunyuan15.checkpoint(**changes), config)
    with torch.no_grad():
        text, mask, glyphs, glyph_mask = pipeline.encode_prompt([PROMPT, NEGATIVE], batch_size=2)
        made = [pipeline(**given, generator=torch.Generator().manual_seed(config.seed), output_type=output).frames
                for output in ("latent", "np")]
    values = results(run_into(tmp_path / "run", *overrides))
    assert values["counts"].tolist() == mask.sum(1).tolist() and values["counts"][0] > values["counts"][1]
    assert values["glyph_counts"].tolist() == glyph_mask.sum(1).tolist() and values["glyph_counts"][1] == 0
    assert relative_error(values["embeddings"], (text * mask[..., None]).numpy()) < 1e-4
    assert relative_error(values["glyphs"], (glyphs * glyph_mask[..., None]).numpy()) < 1e-4
    assert relative_error(values["latents"], made[0].numpy()) < 1e-4
    assert psnr(values["frames"], (made[1][0] * 255).round()) > 55


# ---------------------------------------------------------------- a TPU's kernels


@pytest.mark.full
def test_a_tpus_kernels_compute_the_same():
    """Attention, linear layers and norms in Pallas, on heads as wide as the real ones; tokens over two devices."""
    module = hunyuan15.transformer(num_attention_heads=2, attention_head_dim=128, rope_axes_dim=[16, 56, 56])
    generator = torch.Generator().manual_seed(1)
    given = {"embeddings": (2, 10, 32), "glyphs": (2, 6, 24)}
    given = {name: torch.randn(shape, generator=generator).numpy() for name, shape in given.items()}
    given |= {"counts": numpy.array(COUNTS), "glyph_counts": numpy.array(GLYPH_COUNTS)}
    latents = numpy.repeat(torch.randn(1, 4, 3, 10, 11, generator=generator).numpy(), 2, axis=0)
    made = {}
    for name, (dtype, kernel, products) in KERNELS.items():
        arrays, inputs = (
            {key: jnp.asarray(value, dtype if value.dtype == numpy.float32 else None) for key, value in values.items()}
            for values in (arrays_of(module, "transformer_blocks"), given)
        )
        forward = Forward(
            dict(module.config), dtype, (3, 10, 11), 10, tuple(given), mesh_of(dp=1, sp=2, tp=1),
            Parallel(ulysses="sp"), kernel, kernel, products, make_config().precision, multiple=256,
        )
        output = jax.jit(blocks.denoiser(module, forward))(arrays, latents.astype(dtype), jnp.float32(700), inputs)
        made[name] = numpy.asarray(output.velocity, numpy.float32)
    errors = {name: distance(made[name], made["exact"]) for name in ("xla", "pallas")}
    assert errors["pallas"] < 1.3 * errors["xla"] < 0.05, errors


@pytest.mark.system
def test_openais_client_makes_a_video_of_a_picture(tmp_path):
    """The server and its page with this family: the picture comes with the request, and sizes are in its multiples."""
    Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (60, 80, 3), "uint8")).save(tmp_path / "image.png")
    size = ["resolution.height=48", "resolution.width=64", "resolution.frames=5", "resolution.fps=8", "steps=2"]
    server = Server(tmp_path / "queue", *hunyuan15.model("hunyuan15_i2v_480p"), *size, works=True)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)
        fields = dict(prompt='a cat says "hello"', size="64x48", input_reference=tmp_path / "image.png")
        video = client.videos.create(**fields, extra_body={"seed": 7})
        assert server.finished(video.id)["status"] == "completed"
        (tmp_path / "video.mp4").write_bytes(client.videos.download_content(video.id).read())
        frames = read_frames(tmp_path / "video.mp4", make_config(*size).resolution, "cover")
        assert frames.shape == (5, 48, 64, 3) and frames.std() > 1
        assert server.get("/page/runs").json()["data"][0]["file"] == "video.mp4"
        assert 'type="file"' in server.get("/").text, "the page asks for a picture"
    finally:
        server.close()
        session.clear()
