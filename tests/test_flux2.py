"""FLUX.2 klein as diffusers' own pipeline makes it from the same weights and seed."""
import functools

import pytest

from tests import flux2
from tests.conftest import make_config, results, run_into
from tests.reference import assert_same, relative_error
from tests.test_flux import FULL, ODD, SIZE, SYSTEM, on
from wan_torchax.models.family import Rows
from wan_torchax.models.flux2 import blocks
from wan_torchax.models.flux2.adapters import DOUBLE, NAMES, REST, SINGLE
from wan_torchax.session import session


@functools.cache
def expected(*overrides):
    return flux2.in_diffusers(make_config(*flux2.model(), *overrides))


GUIDED = [*ODD, "guidance_scale=3", "steps=2"]


@pytest.mark.parametrize("size, overrides", [
    pytest.param(SIZE, [], id="four steps' schedule", marks=SYSTEM),
    pytest.param(GUIDED, ["model.scan_blocks=false"], id="guided, odd size, written out", marks=FULL),
    pytest.param(SIZE, on("{dp:1,sp:1,tp:8}", "tp"), id="tp", marks=FULL),
    pytest.param(SIZE, on("{dp:2,sp:4,tp:1}", "sequence"), id="tokens, weights gathered", marks=FULL),
    pytest.param(GUIDED, on("{dp:2,sp:2,tp:2}", "tp_ring"), id="guided, heads over tp, tokens in a ring", marks=SYSTEM),
])
def test_it_is_diffusers(tmp_path, size, overrides):
    session.results.clear()
    values, known = results(run_into(tmp_path, *flux2.model(), *size, *overrides)), expected(*size)
    assert relative_error(values["embeddings"], known["embeddings"]) < 1e-4
    assert_same(values, known["latents"], known["frames"])


@pytest.mark.full
def test_layers_that_are_one_have_eight_bits(tmp_path):
    base = [*flux2.model(), *ODD, "stages=[text,denoise]"]
    exact = results(run_into(tmp_path / "exact", *base))["latents"]
    eight = ["precision=int8_weights", "precision.first=1", "precision.last=0"]
    small = results(run_into(tmp_path / "small", *base, *eight))["latents"]
    assert 1e-5 < relative_error(small, exact) < 0.05


def test_lora_names_are_those_of_the_model():
    """Black Forest Labs' and diffusers' names lead to layers that the transformer has."""
    model = {name.removesuffix(".weight") for name, _ in blocks.build(flux2.TRANSFORMER).named_parameters()}
    for table, stack, theirs in ((DOUBLE, "transformer_blocks", "double_blocks"),
                                 (SINGLE, "single_transformer_blocks", "single_blocks")):
        for name in table:
            made = NAMES.translate(f"{theirs}.1.{name}", False)
            assert set(made.names if isinstance(made, Rows) else [made]) <= model, name
            assert made == NAMES.translate(f"{theirs}_1_{name.replace('.', '_')}", False)
        assert NAMES.translate(f"{stack}.0.attn.to_v", True) in model | {None}
    made = [NAMES.translate(name, False) for name in REST]
    assert {name for one in made for name in (one.names if isinstance(one, Rows) else [one])} <= model
