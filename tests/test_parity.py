"""The same numbers as diffusers' WanPipeline, on the same weights and seed, on every mesh, tokens on every device."""
import re

import pytest
import torch

from tests import reference, tiny
from tests.conftest import ROOT, SMALL, make_config, resolve_here, results, run_into
from tests.reference import NEGATIVE, PROMPT, TEXTS, assert_same, distance, psnr, relative_error
from wan_torchax.session import session
from wan_torchax.stages.denoise import LANES

# 960 tokens: over eight devices the last has 64 beside 64 of padding, the others 128 each.
LARGE = ["resolution.height=240", "resolution.width=256", "resolution.frames=13", "steps=2"]
NO_DECODE = "stages=[text,denoise]"


def in_diffusers(folder, *overrides, dtype=torch.float32, decoded=True):
    """What diffusers makes of the prompt: embeddings, latents and frames."""
    config = make_config(*overrides)
    pipeline = reference.load(folder, config, dtype=dtype)
    with torch.no_grad():
        embeddings = torch.cat(pipeline.encode_prompt(PROMPT, NEGATIVE, max_sequence_length=tiny.TOKENS))
    latents, frames = reference.make(pipeline, config, decoded=decoded)
    return {"embeddings": embeddings.float().numpy(), "latents": latents[None], "frames": frames}


@pytest.fixture(scope="module")
def small():
    return in_diffusers(tiny.checkpoint("text"), *SMALL)


@pytest.fixture(scope="module")
def large():
    return in_diffusers(tiny.checkpoint("text"), *LARGE, decoded=False)


@pytest.fixture
def run(tmp_path):
    """Run the tiny model; gives its values."""

    def run_it(*overrides):
        session.results.clear()  # the text is encoded on every mesh
        return results(run_into(tmp_path, *tiny.model(), *TEXTS, "output.keep_frames=true", *overrides))

    return run_it


# ---------------------------------------------------------------- two layers, every layout


def on(axes, sharding, *more):
    return ["mesh=cpu_8", f"mesh.axes={axes}", f"sharding={sharding}", *more]


FULL = pytest.mark.full
LAYOUTS = [  # those that spread the tokens at a size where every device has some, the others at a smaller one
    pytest.param([*LARGE, NO_DECODE], id="one device"),
    pytest.param([*SMALL, "model.scan_blocks=false", NO_DECODE], id="blocks written out"),
    pytest.param([*SMALL, *on("{dp:1,sp:1,tp:8}", "tp"), NO_DECODE], id="tp", marks=FULL),
    pytest.param([*SMALL, *on("{dp:2,sp:1,tp:1}", "tp"), NO_DECODE], id="dp", marks=FULL),
    pytest.param([*SMALL, *on("{dp:2,sp:1,tp:4}", "tp")], id="dp and tp", marks=pytest.mark.system),
    pytest.param([*LARGE, *on("{dp:2,sp:4,tp:1}", "sequence"), NO_DECODE], id="tokens over sp, Ulysses", marks=FULL),
    pytest.param([*LARGE, *on("{dp:2,sp:4,tp:1}", "tokens"), NO_DECODE], id="the same, whole weights", marks=FULL),
    pytest.param(
        [*LARGE, *on("{dp:2,sp:4,tp:1}", "tokens", "sharding.attention.groups=[1,1]"), NO_DECODE], id="heads in groups",
        marks=pytest.mark.system,
    ),
    pytest.param([*LARGE, *on("{dp:1,sp:8,tp:1}", "ring"), NO_DECODE], id="tokens over sp, ring", marks=FULL),
    pytest.param([*LARGE, *on("{dp:2,sp:2,tp:2}", "tp_ring"), NO_DECODE], id="heads over tp, tokens in a ring"),
    # sp traded for heads, tp passed around
    pytest.param(
        [*LARGE, *on("{dp:2,sp:2,tp:2}", "sequence", "sharding.attention.ring=tp"), NO_DECODE], id="Ulysses and ring",
        marks=pytest.mark.system,
    ),
    pytest.param([*SMALL, *on("{dp:2,sp:1,tp:4}", "replicate"), NO_DECODE], id="everything everywhere", marks=FULL),
]


@pytest.mark.parametrize("overrides", LAYOUTS)
def test_every_layout_is_diffusers(run, request, overrides):
    expected = request.getfixturevalue("small" if SMALL[0] in overrides else "large")
    values = run(*overrides)
    assert relative_error(values["embeddings"], expected["embeddings"]) < 1e-4
    assert_same(values, expected["latents"], None if NO_DECODE in overrides else expected["frames"])


def test_every_device_has_tokens_of_its_own():
    """The layouts that spread them send something real between devices, and one of the shares is partly padding."""
    tokens = resolve_here(*LARGE).tokens
    assert 7 * LANES < tokens < 8 * LANES
    spread = [case.values[0] for case in LAYOUTS if re.search("sp:[^1]", str(case.values))]
    assert len(spread) == 6 and all(LARGE[0] in layout for layout in spread)


@pytest.mark.full
def test_bfloat16_is_as_close_to_float32_as_diffusers_is(run, small):
    """Transformer and text encoder in bfloat16, diffusers' as ours; the VAE too, where diffusers has float32."""
    theirs = in_diffusers(tiny.checkpoint("text"), *SMALL, dtype=torch.bfloat16, decoded=False)
    values = run("model.dtype={text_encoder:bfloat16,transformer:bfloat16,vae:bfloat16}", *SMALL)
    for name in ("embeddings", "latents"):
        ours, peer = distance(values[name], small[name]), distance(theirs[name], small[name])
        assert 0 < ours < 1.2 * peer, name
        assert distance(values[name], theirs[name]) < 2 * peer, name
    assert 35 < psnr(values["frames"], small["frames"]) < 100


# ---------------------------------------------------------------- the embedded model


def test_the_demo_model_is_diffusers(tmp_path):
    """Its own weights, at another size."""
    values = results(run_into(tmp_path, *SMALL, *TEXTS))
    expected = in_diffusers(ROOT / "models" / "demo", *SMALL)
    assert relative_error(values["embeddings"], expected["embeddings"]) < 1e-4
    assert_same(values, expected["latents"], expected["frames"])
