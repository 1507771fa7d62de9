"""To run a family's denoiser by itself, without a session: on a module's arrays, in JAX or with a TPU's kernels."""
import math
import re

import jax
import numpy

from wan_torchax.kernels.settings import Kernel, Products

XLA = Kernel(kernel="xla"), Products()
PALLAS = (
    Kernel(kernel="splash", block_q=128, block_kv=128, tile_kv=128, sub_q=128, chunk_kv=128, interpret=True),
    Products(kernel="pallas", rows=64, weights_mib=1, interpret=True),
)
KERNELS = {"exact": ("float32", *XLA), "xla": ("bfloat16", *XLA), "pallas": ("bfloat16", *PALLAS)}


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
