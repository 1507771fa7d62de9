"""HunyuanVideo 1.5's parts against diffusers' modules, on the same weights."""
import math
import re

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch

from tests import hunyuan15
from tests.conftest import make_config
from tests.reference import relative_error
from wan_torchax.kernels.settings import Kernel, Parallel, Products
from wan_torchax.models.family import Forward
from wan_torchax.models.hunyuan15 import blocks

GRID = 3, 4, 6
COUNTS, GLYPH_COUNTS = (7, 10), (4, 0)  # of the prompt and of the negative prompt, of 10 and 6


def arrays_of(module, *stacks) -> dict:
    """A module's parameters as the loader hands them out: those of stacked blocks with a leading dimension."""
    made: dict = {}
    for name, parameter in module.named_parameters():
        match = re.fullmatch(r"(\w+)\.\d+\.(.+)", name)
        stacked = match is not None and match[1] in stacks
        made.setdefault(f"{match[1]}.*.{match[2]}" if stacked else name, []).append(parameter.detach().numpy())
    return {name: numpy.stack(parts) if ".*." in name else parts[0] for name, parts in made.items()}


def mesh_of(**axes):
    names, sizes = tuple(axes), tuple(axes.values())
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[: math.prod(sizes)])


@pytest.fixture(scope="module", params=[False, True], ids=["t2v", "i2v, two times"])
def case(request):
    """A transformer, its inputs as the stages give them, and what diffusers makes of both."""
    pictured, generator = request.param, torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    module = hunyuan15.transformer(use_meanflow=pictured)
    latents, condition = draw(1, 4, *GRID), draw(1, 5, *GRID) * pictured
    text, glyphs, image = draw(2, 10, 24), draw(2, 6, 20), draw(1, 5, 12) * pictured
    masks = [torch.arange(size)[None] < torch.tensor(counts)[:, None]
             for size, counts in ((10, COUNTS), (6, GLYPH_COUNTS))]
    with torch.no_grad():
        expected = module(
            torch.cat([latents, condition], 1).repeat(2, 1, 1, 1, 1), torch.full((2,), 700.0), text, masks[0].float(),
            torch.full((2,), 500.0) if pictured else None, glyphs, masks[1].float(), image.repeat(2, 1, 1),
        )[0].numpy()
    conditions = {"embeddings": text, "counts": torch.tensor(COUNTS), "glyphs": glyphs,
                  "glyph_counts": torch.tensor(GLYPH_COUNTS)}
    if pictured:
        conditions |= {"condition": condition, "image_embeddings": image, "next_timestep": torch.tensor(500.0)}
    return module, latents.repeat(2, 1, 1, 1, 1).numpy(), {k: v.numpy() for k, v in conditions.items()}, expected


LAYOUTS = {
    "one device": (dict(dp=1, sp=1, tp=1), Parallel(), {}),
    "written out": (dict(dp=1, sp=1, tp=1), Parallel(), dict(scan=False)),
    "tp": (dict(dp=1, sp=1, tp=8), Parallel(batch="dp", heads="tp"), {}),
    "tokens over sp": (dict(dp=2, sp=4, tp=1), Parallel(batch="dp", ulysses="sp"), dict(gather="sp", multiple=32)),
    "ring": (dict(dp=1, sp=8, tp=1), Parallel(ring="sp"), dict(multiple=64)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_transformer_is_diffusers(case, layout):
    module, latents, conditions, expected = case
    axes, parallel, more = LAYOUTS[layout]
    forward = Forward(
        dict(module.config), "float32", GRID, 10, tuple(conditions), mesh_of(**axes), parallel,
        Kernel(kernel="xla", block_q=16, block_kv=16), Kernel(kernel="xla"), Products(),
        make_config().precision, **more,
    )
    velocity = jax.jit(blocks.denoiser(module, forward))
    output = velocity(arrays_of(module, "transformer_blocks"), latents, jnp.float32(700), conditions)
    assert relative_error(output.velocity, expected) < 1e-5
    assert output.residual.shape == (2, 72 + -72 % forward.multiple, 128)
