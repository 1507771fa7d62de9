"""What adapters change in a tensor: LoRA, LoHa, LoKr, DoRA, OFT and weight diffs.

    change = Change(scale, (up, down))                                  # files' tensors, and how they go together
    merged(base, [(0.8, 1.0)], [(up, down)], "bfloat16", [Form()])      # traced: base + 0.8 · up · down
"""
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from wan_torchax.runtime.formats import Stored


@dataclass(frozen=True)
class Form:
    """How an adapter's factors make what is added to a tensor."""

    # None (LoRA, diffs): one group of factors. hadamard (LoHa), kronecker (LoKr): of the products of two groups.
    # tucker (LoRA of a convolution): one group of three. rotation (OFT, BOFT): of the tensor itself.
    combine: str | None = None
    groups: tuple[int, ...] = ()  # the number of factors in each
    decomposed: bool = False  # DoRA: the last factor is the norms that the sum of tensor and addition is scaled to

    @property
    def is_plain(self) -> bool:
        return self.combine is None and not self.decomposed

    @property
    def has_strength(self) -> bool:
        """Whether a strength is not just a factor of the addition."""
        return self.decomposed or self.combine == "rotation"


@dataclass(frozen=True)
class Change:
    """An adapter's addition to one checkpoint tensor: scale · up · down, scale · diff, or as `form` says."""

    scale: float  # of a rotation: the most that it may turn, 0 for no limit
    factors: tuple[Stored, ...]  # (up, down) of shapes (rows, rank) and (rank, …), or one like the tensor
    form: Form = Form()
    strength: float = 1.0  # if the form has its own; else it is in the scale
    sha256: str = ""  # of its file


def merged(base, scales, added, dtype, forms: Iterable[Form] = ()):
    """base + Σ scale · product of factors, in float32 and cast once. By default a TPU would multiply in bfloat16."""
    base = total = base.astype(jnp.float32)
    for (scale, strength), factors, form in zip(scales, added, forms or [Form()] * len(added)):
        factors = [factor.astype(jnp.float32) for factor in factors]
        norms = factors.pop() if form.decomposed else None
        if form.combine == "rotation":
            total = total + rotated(base, factors, scale, strength) - base
            continue
        whole = product(scale, factors) if form.combine is None else combined(scale, factors, form)
        whole = total + whole.reshape(total.shape)
        total = whole if norms is None else total + strength * (with_norms(whole, norms) - total)
    return total.astype(dtype)


def product(scale, factors):
    """scale · first · second, if there is a second; with a third (rank, rank, …) between them, first (rank, rows)."""
    first, *others = factors
    if not others:
        return scale * first
    if len(others) == 2:
        return jnp.einsum("ij...,ip,jr->pr...", others[1], scale * first, others[0], precision="highest")
    transposed = jax.lax.optimization_barrier((scale * first).T)  # this layout is an eighth faster on CPU
    return jnp.tensordot(transposed, others[0], (0, 0), precision="highest")


def combined(scale, factors, form: Form):
    """Two products, multiplied number by number, or each number of the first with the whole second; or one of three."""
    if form.combine == "tucker":
        return product(scale, [factors[0].T, *factors[1:]])
    count, _ = form.groups
    first, second = product(scale, factors[:count]), product(1, factors[count:])
    if form.combine == "hadamard":
        return first * second
    (rows, columns), (inner_rows, inner_columns, *rest) = first.shape, second.shape
    spread = first.reshape(rows, 1, columns, 1, *[1] * len(rest)) * second[None, :, None]
    return spread.reshape(rows * inner_rows, columns * inner_columns, *rest)


def with_norms(array, norms):
    """The array, scaled to these norms over the dimensions in which there is only one."""
    over = tuple(place for place, size in enumerate(norms.shape) if size == 1)
    found = jnp.sqrt(jnp.sum(array**2, over, keepdims=True))
    return array * (norms / jnp.maximum(found, jnp.finfo("float32").tiny))


# ---------------------------------------------------------------- rotations


def rotated(array, factors, limit, strength):
    """OFT: each block of rows turned by its own matrix, (blocks, size, size). BOFT: by several, (times, blocks, size,
    size), each time with rows that lie further apart. Then every row times a number, if there is a second factor."""
    blocks, *scales = factors
    turns, rows = rotations(blocks, limit, strength), array.reshape(len(array), -1)
    if blocks.ndim == 3:
        rows = turned("knm,knc->kmc", turns, rows)
    else:
        for number, turn in enumerate(turns):
            half = 2**number * blocks.shape[-1] // 2
            rows = turned("knm,kmc->knc", turn, regrouped(rows, 2, half))
            rows = regrouped(rows, half, 2)
    rows = rows.reshape(array.shape)
    return rows * scales[0] if scales else rows


def rotations(blocks, limit, strength):
    """(I + Q) (I - Q)^-1 with Q = blocks - blocksᵀ, no longer than the limit; by the strength away from I."""
    skew = blocks - blocks.swapaxes(-1, -2)
    length = jnp.linalg.norm(skew) + 1e-8
    skew = jnp.where((limit > 0) & (length > limit), skew * limit / length, skew)
    one = jnp.eye(blocks.shape[-1])
    with jax.default_matmul_precision("highest"):
        return strength * jnp.linalg.solve(one - skew, one + skew) + (1 - strength) * one


def turned(equation: str, turns, rows):
    parts = rows.reshape(*turns.shape[:2], -1)
    return jnp.einsum(equation, turns, parts, precision="highest").reshape(rows.shape)


def regrouped(rows, outer: int, inner: int):
    """Rows (…, outer, inner) in the order (…, inner, outer)."""
    return rows.reshape(-1, outer, inner, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
