"""What the kernels can be told. Plain data: the config's schema takes these classes in, and imports no JAX for them."""
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Kernel:
    """One attention kernel and its tunables; conf/attention/*.yaml says what each means and what was measured."""

    kernel: str = "auto"  # auto | splash | hopper | cudnn | xla
    block_q: int = 512
    block_kv: int = 512
    tile_kv: int = 512  # splash only, like the next four
    sub_q: int = 512
    chunk_kv: int = 256
    fold_scale: bool = True  # scale queries, kept as two bf16 terms, instead of scores
    vmem_mib: int = 64
    min_keys: int = 0  # shorter key sequences go to `xla`
    window: Optional[int] = None  # a query sees keys at most this many tokens away
    smooth_keys: bool = False  # subtract the mean key first: the same result in exact arithmetic
    eight_bits: bool = False  # hopper only: products of int8 and e4m3, approximate
    interpret: bool = False  # run the Pallas kernel on CPU, for tests
    # Leave the Pallas kernel's body out, for plans: compiling it takes minutes, and the compiler gives it no cycles.
    outline: bool = False


@dataclass(frozen=True)
class Question:
    """What a transformer asks of attention: kernels are held against it before anything loads."""

    heads: int
    head_dim: int
    grid: Optional[tuple[int, int, int]] = None  # frames, height and width of the tokens; None: a text's are the keys
    norm: Optional[str] = None  # of queries and keys: over the whole `width`, or each `head` by itself
    beside: int = 0  # tokens beside the grid's that attend and are attended to, as many as count in each prompt


@dataclass(frozen=True)
class Products:
    """Which kernel the linear layers of the transformer's blocks have; conf/products/*.yaml says more."""

    kernel: str = "xla"  # xla | pallas
    rows: int = 1184  # tokens of a block
    weights_mib: int = 16  # of a block of weights
    vmem_mib: int = 112
    interpret: bool = False  # as in Kernel
    outline: bool = False


@dataclass(frozen=True)
class Parallel:
    """Which mesh axes spread the batch, the heads and the tokens of attention (`sharding.attention`)."""

    batch: Optional[str] = None
    heads: Optional[str] = None
    ulysses: Optional[str] = None  # a program may name several, the slower first
    ring: Optional[str] = None

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that share the tokens, the slower first."""
        ulysses = self.ulysses if isinstance(self.ulysses, tuple) else (self.ulysses,)
        return tuple(axis for axis in (self.ring, *ulysses) if axis)
