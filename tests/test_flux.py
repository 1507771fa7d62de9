"""FLUX.1 as diffusers' own pipeline makes it from the same weights and seed."""
import base64
import functools
import io
import json
import re

import diffusers
import jax
import jax.numpy as jnp
import numpy
import openai
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests import flux
from tests.conftest import ROOT, make_config, results, run_into
from tests.denoisers import KERNELS, arrays_of, mesh_of
from tests.reference import assert_same, psnr, relative_error
from tests.serving import DEADLINE, Server
from wan_torchax.config.commandline import compose, rewrite
from wan_torchax.config.registry import family_of
from wan_torchax.config.resolve import plain
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels.settings import Parallel
from wan_torchax.models.family import Forward, Rows
from wan_torchax.models.flux import blocks
from wan_torchax.models.flux.adapters import NAMES
from wan_torchax.patches import torchax_on
from wan_torchax.records.media import read_metadata
from wan_torchax.records.stored import read_stored
from wan_torchax.runtime import adapters
from wan_torchax.session import session
from wan_torchax.tasks.attempt import attempt

SIZE = ["resolution.height=96", "resolution.width=128"]  # 6 x 8 tokens
ODD = ["resolution.height=80", "resolution.width=112"]  # 5 x 7 tokens, which nothing divides
FULL, SYSTEM = pytest.mark.full, pytest.mark.system


def on(axes, sharding):
    return ["mesh=cpu_8", f"mesh.axes={axes}", f"sharding={sharding}"]


@functools.cache
def expected(kind, *size):
    return flux.in_diffusers(kind, make_config(*flux.model(kind), *size))


@pytest.mark.parametrize("kind, size, overrides", [
    pytest.param("dev", SIZE, [], id="dev", marks=FULL),
    pytest.param("dev", SIZE, ["model.scan_blocks=false"], id="written out", marks=FULL),
    pytest.param("schnell", ODD, [], id="schnell, odd size", marks=SYSTEM),
    pytest.param("dev", SIZE, on("{dp:1,sp:1,tp:8}", "tp"), id="tp", marks=FULL),
    pytest.param("dev", SIZE, on("{dp:2,sp:4,tp:1}", "sequence"), id="tokens, weights gathered", marks=FULL),
    pytest.param("dev", ODD, on("{dp:1,sp:8,tp:1}", "ring"), id="odd size in a ring", marks=FULL),
    pytest.param("dev", SIZE, on("{dp:1,sp:2,tp:4}", "tp_ring"), id="heads over tp, tokens in a ring", marks=SYSTEM),
])
def test_it_is_diffusers(tmp_path, kind, size, overrides):
    session.results.clear()
    values, known = results(run_into(tmp_path, *flux.model(kind), *size, *overrides)), expected(kind, *size)
    for name in ("embeddings", "pooled"):
        assert relative_error(values[name], known[name]) < 1e-4
    assert_same(values, known["latents"], known["frames"])


def test_the_result_is_a_picture_that_can_be_replayed(tmp_path):
    """Without loss, with its settings; no video is written, and the decoder has no program for later frames."""
    overrides = [*flux.model("schnell"), *ODD, "seed=11"]
    values = results(run_into(tmp_path / "made", *overrides))
    made = tmp_path / "made" / "picture.png"
    assert not (tmp_path / "made" / "video.mp4").exists()
    assert numpy.array_equal(numpy.asarray(Image.open(made)), values["frames"][0])
    assert list(session.stages["decode"].programs.entries) == ["first"]
    stored = read_stored(made, "replay")
    assert "model=flux1_schnell" in stored.overrides and stored.config["seed"] == 11
    assert read_metadata(ROOT / "docs" / "demo.png") is None


@pytest.mark.system
def test_several_pictures_are_denoised_as_one(tmp_path, caplog):
    """As each is made alone; on two devices, each with its picture."""
    caplog.set_level("INFO", logger="wan")
    overrides = [*flux.model("dev"), *ODD, "steps=2", "seed=5"]
    several = rewrite([*overrides, *on("{dp:2,sp:1,tp:4}", "tp"), "images=2"])
    attempt(compose(several), tmp_path / "both", several)
    assert "2 videos are denoised together" in caplog.text
    for seed in (5, 6):
        values = results(tmp_path / "both" / f"seed{seed}")
        alone = results(run_into(tmp_path / f"alone{seed}", *overrides, f"seed={seed}"))
        assert relative_error(values["latents"], alone["latents"]) < 1e-4
        picture = numpy.asarray(Image.open(tmp_path / "both" / f"seed{seed}" / "picture.png"))
        assert psnr(picture, alone["frames"][0]) > 55
        metrics = json.loads((tmp_path / "both" / f"seed{seed}" / "metrics.json").read_text())
        assert len(metrics["step_seconds"]) == metrics["denoised_together"] == 2


# ---------------------------------------------------------------- adapters

QKV = tuple(f"attn.to_{name}" for name in "qkv")


def test_every_trainers_names_are_known():
    """One layer as it is spelled by kohya, ComfyUI, XLabs, ai-toolkit, PEFT and OneTrainer."""
    out = "transformer_blocks.1.attn.to_out.0"
    queries = Rows(tuple(f"transformer_blocks.1.{name}" for name in QKV))
    keys = {
        "lora_unet_double_blocks_1_img_attn_proj.lora_down.weight": out,
        "diffusion_model.double_blocks.1.img_attn.proj.lora_A.weight": out,
        "double_blocks.1.processor.proj_lora1.down.weight": out,
        "transformer.transformer_blocks.1.attn.to_out.0.lora_A.weight": out,
        "base_model.model.transformer_blocks.1.attn.to_out.0.lora_A.weight": out,
        "lora_transformer_transformer_blocks_1_attn_to_out_0.lora_down.weight": out,
        "lora_unet_double_blocks_1_img_attn_qkv.lora_down.weight": queries,
        "double_blocks.1.processor.qkv_lora1.down.weight": queries,
        "lora_unet_single_blocks_2_linear1.lora_down.weight":
            Rows(tuple(f"single_transformer_blocks.2.{name}" for name in (*QKV, "proj_mlp"))),
        "lora_unet_single_blocks_2_linear2.alpha": "single_transformer_blocks.2.proj_out",
    }
    for key, module in keys.items():
        match = re.fullmatch(rf"{NAMES.prefix}(?P<module>[\w.]+?)\.(?:{'|'.join(adapters.ENDS)})", key)
        assert match and NAMES.translate(match["module"], False) == module, key
    names = [*keys.values(), "norm_out.linear", "x_embedder"]
    model = {name.removesuffix(".weight") for name, _ in blocks.build(flux.TRANSFORMER).named_parameters()}
    assert {one for name in names for one in (name.names if isinstance(name, Rows) else (name,))} <= model


def test_a_lora_of_joined_layers_is_added(tmp_path):
    """kohya's: queries, keys and values in one, of a single block the feed-forward too; with alpha."""
    torch.manual_seed(3)
    width, rank, alpha = 256, 4, 2.0
    layers = {
        "double_blocks_1_txt_attn_qkv": [f"transformer_blocks.1.attn.add_{name}_proj" for name in "qkv"],
        "single_blocks_2_linear1": [f"single_transformer_blocks.2.{name}" for name in (*QKV, "proj_mlp")],
        "single_blocks_0_linear2": ["single_transformer_blocks.0.proj_out"],
        "final_layer_adaLN_modulation_1": ["norm_out.linear"],
    }
    transformer, tensors = diffusers.FluxTransformer2DModel.from_pretrained(flux.checkpoint("dev") / "transformer"), {}
    for name, modules in layers.items():
        weights = [transformer.get_submodule(module).weight for module in modules]
        down = torch.randn(rank, weights[0].shape[1]) * 0.2
        up = torch.randn(sum(len(weight) for weight in weights), rank) * 0.2
        factors = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(alpha)}
        tensors |= {f"lora_unet_{name}.{end}": tensor for end, tensor in factors.items()}
        if "adaLN" in name:
            up = up.roll(len(up) // 2, 0)  # shift before scale in the file, behind it in diffusers
        for weight, rows in zip(weights, up.split([len(weight) for weight in weights])):
            weight.data += 0.5 * alpha / rank * rows @ down
    assert 2 * width == len(weights[0])
    save_file(tensors, tmp_path / "style.safetensors")
    overrides = [*flux.model("dev"), *ODD, "steps=2"]
    adapter = f"adapter.style={{path: {tmp_path / 'style.safetensors'}, strength: 0.5}}"
    values = results(run_into(tmp_path / "run", *overrides, adapter, "stages=[text,denoise]"))
    config = make_config(*overrides)
    known, without = (flux.in_diffusers("dev", config, **parts) for parts in (dict(transformer=transformer), {}))
    assert relative_error(values["latents"], known["latents"]) < 1e-4
    assert relative_error(values["latents"], without["latents"]) > 1e-2


def test_a_lora_of_other_widths_is_refused(tmp_path):
    tensors = {f"lora_unet_double_blocks_0_img_attn_qkv.lora_{name}.weight": torch.randn(*shape)
               for name, shape in (("down", (2, 256)), ("up", (700, 2)))}
    save_file(tensors, tmp_path / "style.safetensors")
    with pytest.raises(ConfigError, match="700 outputs, the model's layers have 768"):
        run_into(tmp_path / "run", *flux.model("dev"), *ODD, f"adapter.style.path={tmp_path / 'style.safetensors'}")


# ---------------------------------------------------------------- options


@pytest.mark.system
def test_a_cache_and_eight_bits_serve_it(tmp_path):
    base = [*flux.model("dev"), *ODD, "stages=[text,denoise]"]
    exact = results(run_into(tmp_path / "exact", *base))["latents"]
    for mode in ("int8_weights", "int8"):
        eight = [f"precision={mode}", "precision.first=1", "precision.last=0"]
        small = results(run_into(tmp_path / mode, *base, *eight))["latents"]
        assert 1e-5 < relative_error(small, exact) < 0.05, mode
    cached = results(run_into(tmp_path / "cached", *base, "cache=easycache", "steps=8"))["latents"]
    assert numpy.isfinite(cached).all()


@pytest.mark.parametrize("model", ["flux1_dev", "flux2_klein_4b"])
def test_every_large_layer_of_the_blocks_has_eight_bits(model):
    """Of both kinds of blocks: in single ones several layers are one."""
    config = make_config(f"model={model}", "precision=fp8", "prompt=a cat")
    validate(config)
    patterns = [config.model.weights.transformer[rule].pattern for rule in config.precision.layers]
    module = family_of(config).spec("transformer").build(plain(config.model.architecture.transformer))
    large = {name for name, weight in module.named_parameters() if "blocks.0." in name and weight.ndim == 2}
    exact = {name for name in large if not any(re.fullmatch(pattern, name) for pattern in patterns)}
    assert len(large) > 12 and all(".norm" in name for name in exact), exact  # modulations


@pytest.mark.parametrize("overrides, message", [
    (["pipeline=t2i_flux"], "takes the guidance scale as an input; use pipeline=t2i_flux_guided"),
    (["products=pallas", "mesh=cpu_8"], "a kernel for TPUs, and mesh=cpu_8 has none; use products=xla"),
    (["products=pallas", "mesh=v6e_8", "sharding=tp"], "sharding=tp cuts them with the heads"),
    (["products=pallas", "model=flux2_klein_4b", "pipeline=t2i"], "has no layers for it; use products=xla"),
    (["resolution.frames=5"], "takes at most 1"),
    (["resolution=auto"], "there is no picture to derive height and width from"),
    (["attention=xla", "attention.self.window=4"], "text and image attend to each other"),
])
def test_what_it_cannot_do_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config("model=flux1_dev", "prompt=a cat", *overrides))


# ---------------------------------------------------------------- a TPU's kernels


@pytest.mark.parametrize("head_dim, axes", [
    pytest.param(128, dict(dp=1, sp=1), id="one device"),
    pytest.param(128, dict(dp=2, sp=4), id="pictures and tokens over eight", marks=SYSTEM),
    pytest.param(32, dict(dp=2, sp=1), id="heads that linear layers do not turn", marks=FULL),
])
def test_a_tpus_kernels_compute_the_same(head_dim, axes):
    """Linear layers with norm and RoPE, norms and attention in Pallas, for two pictures of 5 x 7 tokens and a text of
    24, which do not divide over the devices."""
    sizes = [head_dim // 8, *[head_dim * 7 // 16] * 2] if head_dim == 128 else [8, 12, 12]
    own = dict(attention_head_dim=head_dim, num_attention_heads=256 // head_dim, axes_dims_rope=sizes)
    own = flux.TRANSFORMER | own | dict(guidance_embeds=True)
    stacked = diffusers.FluxTransformer2DModel(**own)
    stacked = arrays_of(flux.randomize(stacked), "transformer_blocks", "single_transformer_blocks")
    generator, given = numpy.random.default_rng(1), {"embeddings": (2, flux.TOKENS, 24), "pooled": (2, 20)}
    given = {name: generator.normal(1, 1, shape).astype("float32") for name, shape in given.items()}
    given["guidance"] = numpy.float32([2, 4])  # times 1000 they are in bfloat16
    latents = generator.normal(0, 1, (2, 4, 1, 10, 14)).astype("float32")
    made = {}
    for name, (dtype, kernel, products) in KERNELS.items():
        arrays, inputs = (
            {key: jnp.asarray(value, dtype) for key, value in values.items()} for values in (stacked, given)
        )
        forward = Forward(
            own, dtype, (1, 5, 7), flux.TOKENS, tuple(given), mesh_of(**axes, tp=1),
            Parallel(batch="dp", ring="sp"), kernel, kernel, products, make_config().precision,
        )
        function = jax.jit(blocks.denoiser(blocks.build(own), forward))
        with torchax_on():
            output = function(arrays, latents.astype(dtype), jnp.float32(700), inputs)
        made[name] = numpy.asarray(output.velocity, numpy.float32)
    errors = {name: relative_error(made[name], made["exact"]) for name in ("xla", "pallas")}
    assert 0 < errors["pallas"] < 1.2 * errors["xla"] < 0.06, errors


# ---------------------------------------------------------------- the server


@pytest.mark.system
def test_the_server_makes_pictures(tmp_path):
    """Through OpenAI's client for images, two as one batch, and as what the page shows."""
    overrides = [text for text in flux.model("schnell") if "prompt=" not in text]
    server = Server(tmp_path / "queue", *overrides, *ODD, "steps=1", "serve.batch=2", works=True)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)
        made = client.images.generate(prompt=flux.PROMPT, n=2, size="112x80", extra_body={"seed": 3})
        first, second = (Image.open(io.BytesIO(base64.b64decode(one.b64_json))) for one in made.data)
        assert first.size == second.size == (112, 80) and first.tobytes() != second.tobytes()
        video, *_ = server.get("/v1/videos").json()["data"]
        assert video["media_type"] == "image/png" and video["frames"] == 1
        content = server.get(f"/v1/videos/{video['id']}/content")
        assert content.headers["content-type"] == "image/png" and content.content[:4] == b"\x89PNG"
        runs = server.get("/page/runs").json()["data"]
        assert {run["file"] for run in runs} == {"picture.png"}
        page = server.get("/").text
        assert 'name="steps"' in page and 'name="frames"' not in page
        assert server.get(f"{runs[0]['files']}/picture.png").content[:4] == b"\x89PNG"
    finally:
        server.close()
