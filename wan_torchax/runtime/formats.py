"""How files store tensors: safetensors' dtypes, eight bits with scales, GGUF's blocks; and whose tensors they are by
their names. No JAX."""
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy

from wan_torchax.config.schema import ConfigError
from wan_torchax.models.family import ComponentSpec, Rows

# GGUF's block formats: numbers of a block, and its bytes.
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
# Names of stored dtypes -> numpy's and torch's. Blocks are read as bytes.
STORED_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", **dict.fromkeys(BLOCKS, "uint8"),
}
# What ComfyUI, ModelOpt and others put beside a weight in eight bits: its scale, and what is not needed here: scales
# of activations, which are measured as they come, and settings of their kernels.
SCALES = ("scale_weight", "weight_scale")
NOT_NEEDED = re.compile(r"(.*\.)?(scale_input|input_scale|comfy_quant|scaled_fp8)")


@dataclass(frozen=True)
class Stored:
    """A tensor's location on disk; the dtype is safetensors' or GGUF's name."""

    file: Path
    dtype: str
    shape: tuple
    offset: int
    shift: int = 0  # row i of the tensor is stored as row i + shift; after the last comes the first
    scale: "Stored | None" = None  # what its numbers are multiplied by: one number, or one per row

    @property
    def in_blocks(self) -> bool:
        return self.dtype in BLOCKS


def row_bytes(stored: Stored) -> int:
    numbers = math.prod(stored.shape[1:])
    if stored.in_blocks:
        per_block, size = BLOCKS[stored.dtype]
        return numbers // per_block * size
    return numbers * numpy.dtype(STORED_DTYPES[stored.dtype]).itemsize


def bytes_of(stored: Stored) -> int:
    """Its bytes on disk."""
    return (stored.shape[0] if stored.shape else 1) * row_bytes(stored)


# ---------------------------------------------------------------- names


def with_scales(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors, with the scales of those in eight bits taken from beside them."""
    weights = {name: stored for name, stored in tensors.items() if not NOT_NEEDED.fullmatch(name)}
    for name in tensors:
        module, _, end = name.rpartition(".")
        weight = f"{module}.weight"
        if end not in SCALES or weight not in tensors:
            continue
        scale, rows = weights.pop(name), tensors[weight].shape[:1]
        if scale.dtype not in ("F32", "F16", "BF16") or without_ones(scale.shape) not in ((), rows):
            stored = f"{scale.dtype} of shape {scale.shape}"
            raise ConfigError(f"{scale.file}: {name} is {stored}; one number is implemented, or one for each row")
        weights[weight] = replace(tensors[weight], scale=replace(scale, shape=(math.prod(scale.shape),)))
    return weights


def by_module(
    files: Mapping[str, Stored], spec: ComponentSpec, shapes: Mapping[str, tuple] = MappingProxyType({})
) -> dict[str, Stored]:
    """A component's tensors by module name. `shapes` are the module's, for layers that are one in a file."""
    wrapper = next((one for one in spec.wrappers if any(name.startswith(one) for name in files)), "")
    inside = {name.removeprefix(wrapper): stored for name, stored in files.items() if name.startswith(wrapper)}
    foreign = any(re.search(spec.foreign, name) for name in inside)
    named: dict[str, Stored] = {}
    for name, stored in inside.items():
        name = name.removeprefix(spec.prefix)
        renamed = (spec.rename(name) if foreign else spec.respell(name)) or name
        if isinstance(renamed, Rows):
            counts = [shapes[part][0] for part in renamed.names if shapes.get(part)]
            named |= split_rows(stored, renamed, counts if len(counts) == len(renamed.names) else ())
        else:
            named[renamed] = stored
    return {name: with_shape(stored, shapes.get(name)) for name, stored in named.items()}


def with_shape(stored: Stored, shape: tuple | None) -> Stored:
    """The tensor in the module's shape, where only dimensions of size one differ: linear layers and 1 x 1 convolutions,
    modulations."""
    return replace(stored, shape=shape) if shape and without_ones(shape) == without_ones(stored.shape) else stored


def without_ones(shape: tuple) -> tuple:
    return tuple(size for size in shape if size != 1)


def split_rows(stored: Stored, rows: Rows, counts: Sequence[int] = ()) -> dict[str, Stored]:
    """The tensors that `rows` names, with so many rows each; by default as many. One whose rows cannot be split is left
    as it is: its shape then fits none."""
    whole = stored.shape[0] if stored.shape else 0
    counts = counts or [whole // len(rows.names)] * len(rows.names)
    odd = rows.swapped and any(count % 2 for count in counts)
    if stored.dtype not in STORED_DTYPES or sum(counts) != whole or odd:
        return dict.fromkeys(rows.names, stored)
    starts, scales = itertools.accumulate(counts, initial=0), dict.fromkeys(rows.names, stored.scale)
    if stored.scale and stored.scale.shape != (1,):
        scales = dict(split_rows(stored.scale, Rows(rows.names), counts))
    return {
        name: replace(
            stored, shape=(count, *stored.shape[1:]), offset=stored.offset + start * row_bytes(stored),
            shift=count // 2 if rows.swapped else 0, scale=scales[name],
        )
        for name, count, start in zip(rows.names, counts, starts)
    }
