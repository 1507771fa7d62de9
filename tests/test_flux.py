"""FLUX.1 as diffusers' own pipeline makes it from the same weights and seed."""
import functools

import numpy
import pytest
from PIL import Image

from tests import flux
from tests.conftest import ROOT, make_config, results, run_into
from tests.reference import assert_same, relative_error
from wan_torchax.records.media import read_metadata
from wan_torchax.records.stored import read_stored
from wan_torchax.session import session

SIZE = ["resolution.height=96", "resolution.width=128"]  # 6 x 8 tokens
ODD = ["resolution.height=80", "resolution.width=112"]  # 5 x 7 tokens, which nothing divides
FULL = pytest.mark.full


def on(axes, sharding):
    return ["mesh=cpu_8", f"mesh.axes={axes}", f"sharding={sharding}"]


@functools.cache
def expected(kind, *size):
    return flux.in_diffusers(kind, make_config(*flux.model(kind), *size))


@pytest.mark.parametrize("kind, size, overrides", [
    pytest.param("dev", SIZE, [], id="dev"),
    pytest.param("dev", SIZE, ["model.scan_blocks=false"], id="written out", marks=FULL),
    pytest.param("schnell", ODD, [], id="schnell, odd size"),
    pytest.param("dev", SIZE, on("{dp:1,sp:1,tp:8}", "tp"), id="tp", marks=FULL),
    pytest.param("dev", SIZE, on("{dp:2,sp:4,tp:1}", "sequence"), id="tokens, weights gathered", marks=FULL),
    pytest.param("dev", ODD, on("{dp:1,sp:8,tp:1}", "ring"), id="odd size in a ring", marks=FULL),
    pytest.param("dev", SIZE, on("{dp:1,sp:2,tp:4}", "tp_ring"), id="heads over tp, tokens in a ring"),
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
