"""The config's dataclasses and `validate()`: pure, no JAX, no torch.

Hydra composes the files under conf/ against these classes, so a misspelt key or a wrong type fails
before anything heavy loads. `validate()` then checks what types cannot say.
"""
from __future__ import annotations

from dataclasses import dataclass, field

# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class Kernel:
    """One attention kernel and its tunables. `attention.self` and `attention.cross` each hold one."""

    kernel: str = "auto"  # auto | splash | cudnn | xla
    block_q: int = 512
    block_kv: int = 512
    min_keys: int = 0  # shorter key sequences go to `xla`
    interpret: bool = False


@dataclass
class Attention:
    self: Kernel = field(default_factory=Kernel)
    cross: Kernel = field(default_factory=Kernel)


@dataclass
class Parallel:
    """Which mesh axes spread the batch, the heads and the tokens of attention (`sharding.attention`)."""

    batch: str | None = None
    heads: str | None = None
    ulysses: str | None = None
    ring: str | None = None
