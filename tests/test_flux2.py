"""FLUX.2 klein as diffusers' own pipeline makes it from the same weights and seed."""
import functools

import pytest

from tests import flux2
from tests.conftest import make_config, results, run_into
from tests.reference import assert_same, relative_error
from tests.test_flux import FULL, ODD, SIZE, on
from wan_torchax.session import session


@functools.cache
def expected(*overrides):
    return flux2.in_diffusers(make_config(*flux2.model(), *overrides))


GUIDED = [*ODD, "guidance_scale=3", "steps=2"]


@pytest.mark.parametrize("size, overrides", [
    pytest.param(SIZE, [], id="four steps' schedule"),
    pytest.param(GUIDED, ["model.scan_blocks=false"], id="guided, odd size, written out", marks=FULL),
    pytest.param(SIZE, on("{dp:1,sp:1,tp:8}", "tp"), id="tp", marks=FULL),
    pytest.param(SIZE, on("{dp:2,sp:4,tp:1}", "sequence"), id="tokens, weights gathered", marks=FULL),
    pytest.param(GUIDED, on("{dp:2,sp:2,tp:2}", "tp_ring"), id="guided, heads over tp, tokens in a ring"),
])
def test_it_is_diffusers(tmp_path, size, overrides):
    session.results.clear()
    values, known = results(run_into(tmp_path, *flux2.model(), *size, *overrides)), expected(*size)
    assert relative_error(values["embeddings"], known["embeddings"]) < 1e-4
    assert_same(values, known["latents"], known["frames"])
