"""The VAE's decoder by lines, against diffusers' own."""
import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
from diffusers import AutoencoderKLWan
from jax.sharding import PartitionSpec

from tests.conftest import build, make_config, resolve_here
from wan_torchax.config.schema import ConfigError
from wan_torchax.models.wan import vae_lines
from wan_torchax.session import Session


@pytest.mark.system
@pytest.mark.parametrize("upright, chips", [
    (False, 1), (True, 2),
    pytest.param(False, 2, marks=pytest.mark.full), pytest.param(True, 1, marks=pytest.mark.full),
])
def test_decoding_by_lines_is_diffusers_decode(upright, chips, monkeypatch):
    """With channels of 5, 10 and 20, which are widened to 8 (two lines side by side), 16 and 24, and the longer side
    over the chips."""
    monkeypatch.setattr(vae_lines, "LANES", 8)
    torch.manual_seed(0)
    vae, size = AutoencoderKLWan(base_dim=5, num_res_blocks=1).eval(), (6, 4) if upright else (4, 6)
    latents = torch.randn(1, 16, 3, *size)
    with torch.no_grad():
        expected = vae.decode(latents).sample.numpy()
    arrays = {name: jnp.asarray(tensor.numpy()) for name, tensor in vae.state_dict().items()}

    def decode(arrays, latent, caches):
        return vae_lines.decode_chunk(arrays, latent, caches, "chips", max(size), upright)

    mesh = jax.make_mesh((chips,), ("chips",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:chips])
    spec, carry = PartitionSpec(*[None] * (3 if upright else 4), "chips"), PartitionSpec(None, "chips")
    specs = {"in_specs": (PartitionSpec(), spec, carry), "out_specs": (spec, carry)}
    decode, chunks, caches = jax.jit(jax.shard_map(decode, mesh=mesh, check_vma=False, **specs)), [], None
    for latent in latents.split(1, dim=2):
        pixels, caches = decode(arrays, jnp.asarray(latent.numpy()), caches)
        chunks.append(numpy.asarray(pixels))
    assert {cache.shape[-1] for cache in caches.values()} == {16, 24}
    numpy.testing.assert_allclose(numpy.concatenate(chunks, axis=2), expected, atol=2e-5)


@pytest.mark.full
def test_the_stage_decodes_the_same_by_lines(cache):
    """Eight chips, two columns of latents each; frames differ by a rounding here and there."""
    latents = numpy.random.default_rng(0).normal(size=(1, 16, 2, 8, 16)).astype("float32")
    spread = "mesh=cpu_8", "sharding=sequence", "mesh.axes={dp:2,sp:4,tp:1}", "resolution.height=64"
    size = *spread, "resolution.width=128", "resolution.frames=5"

    def frames(lines):
        session, config = Session(), make_config(*size, cache, f"mesh.chip.vae_lines={lines}")
        resolved = session.resolve(config, ["decode"])
        return session.run(resolved, ["decode"], {"latents": latents})["frames"].astype(int)

    plain, by_lines = frames("false"), frames("true")
    assert plain.shape == (5, 64, 128, 3) and plain.std() > 5
    assert numpy.abs(plain - by_lines).max() <= 1 and 0 < (plain != by_lines).mean() < 1e-3  # it was another program


def test_what_it_cannot_decode_is_told_before_weights_load():
    with pytest.raises(ConfigError, match="mesh.chip.vae_lines=true: is for Wan 2.1's VAE and a picture that sharding"):
        build(resolve_here("mesh.axes.tp=1", "sharding.picture=[]", "mesh.chip.vae_lines=true"), "decode")
