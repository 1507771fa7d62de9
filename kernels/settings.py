"""Kernel settings as plain dataclasses: the config's schema includes them without importing JAX."""
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Optional

TILE = 4, 4, 4  # VSA's: frames, height and width in tokens
UNTRAINED = "radial", "band"  # kinds of lists for checkpoints that were not trained for any


@dataclass(frozen=True)
class Sparse:
    """Which blocks of keys a block of queries attends to; documented in conf/sparse/*.yaml."""

    kind: str = "none"  # none | sla | vsa | radial | band
    keep: float = 0.1  # share of the key blocks
    block_q: int = 128  # queries that share a list
    block_kv: int = 64  # keys of an entry
    dense_above: float = 1.0  # steps with more noise than this share attend to all keys
    dense_layers: int = 0  # the first layers that do

    def __bool__(self) -> bool:
        return self.kind != "none"

    @property
    def is_dense_at_times(self) -> bool:
        return self.kind in UNTRAINED and (self.dense_above < 1 or self.dense_layers > 0)

    @property
    def lists_tiles(self) -> bool:
        """Whether blocks are VSA's tiles, some of them partial, and not even runs of tokens."""
        return self.kind == "vsa" and self.block_q == self.block_kv == prod(TILE)

    def count(self, blocks: int) -> int:
        """Entries of a list, of this many key blocks: rounded as the published code does, down for SLA, up for VSA."""
        exact = round(self.keep * blocks, 6)
        return min(blocks, max(1, ceil(exact) if self.kind == "vsa" else int(exact)))

    def pairs(self, grid: tuple[int, int, int]) -> int:
        """Pairs of a query and a key, partial blocks counted in full, of a video's tokens."""
        if self.lists_tiles:
            blocks = query_blocks = prod(ceil(length / side) for length, side in zip(grid, TILE))
        else:
            blocks, query_blocks = (ceil(prod(grid) / size) for size in (self.block_kv, self.block_q))
        return query_blocks * self.block_q * self.count(blocks) * self.block_kv


@dataclass(frozen=True)
class Kernel:
    """An attention kernel and its tunables; conf/attention/*.yaml documents them, with measurements."""

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
    eight_bits: bool = False  # hopper only: int8 and e4m3 products, approximate
    sparse: Sparse = Sparse()
    interpret: bool = False  # run the Pallas kernel on CPU, for tests
    # Omit the Pallas kernel's body, for plans: compiling it takes minutes, and the compiler's estimate ignores it.
    outline: bool = False

    @classmethod
    def of(cls, values: Mapping) -> "Kernel":
        """From a config's values."""
        return cls(**{**values, "sparse": Sparse(**values.get("sparse", {}))})

    @property
    def turns_values(self) -> bool:
        """Whether values are kept with tokens last, as the kernel takes them: XLA would turn those of all layers in
        every pass."""
        return self.kernel == "splash"


def vmem_bytes(tokens: int, block_q: int, head_dim: int, kernel: Kernel, buffers: int) -> int:
    """VMEM of the splash kernel over lists: all keys and values of a head in so many buffers, queries and outputs in
    two, its state, and two chunks of scores."""
    blocks = 2 * head_dim * (2 * buffers * tokens + 4 * block_q)
    state = block_q * (head_dim * (2 * (2 if kernel.fold_scale else 1) + 4) + 4 * 8 * 4)
    return blocks + state + 2 * 4 * kernel.chunk_kv * 256


@dataclass(frozen=True)
class Question:
    """A transformer's attention requirements; kernels are checked against them before anything loads."""

    heads: int
    head_dim: int
    grid: Optional[tuple[int, int, int]] = None  # frames, height and width of the tokens; None: cross-attention
    norm: Optional[str] = None  # QK norm: over the whole `width`, or per `head`
    beside: int = 0  # extra tokens besides the grid's: a prompt's, of which not all are valid, or another video's
    sparse: tuple[str, ...] = ()  # kinds of sparse attention that there are models for


@dataclass(frozen=True)
class Products:
    """The kernel of the linear layers in the transformer's blocks; documented in conf/products/*.yaml."""

    kernel: str = "xla"  # xla | pallas
    rows: int = 1184  # tokens of a block
    weights_mib: int = 16  # of a block of weights
    vmem_mib: int = 112
    ahead: bool = False
    unrolled: bool = False
    upright: bool = True
    interpret: bool = False  # as in Kernel
    outline: bool = False


@dataclass(frozen=True)
class Parallel:
    """The mesh axes that shard the batch, heads and tokens of attention (`sharding.attention`)."""

    batch: Optional[str] = None
    heads: Optional[str] = None
    ulysses: Optional[str] = None  # a program may use several, as a tuple, outermost first
    ring: Optional[str] = None
    groups: tuple[int, ...] = ()  # relative sizes of groups of heads that Ulysses exchanges in turn; (): all at once

    def group_sizes(self, heads: int) -> Optional[list[int]]:
        """The heads of each group, of those that a device computes; None if they do not divide so."""
        parts, rest = divmod(heads, sum(self.groups))
        return None if rest else [parts * share for share in self.groups]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that shard the tokens, outermost first."""
        ulysses = self.ulysses if isinstance(self.ulysses, tuple) else (self.ulysses,)
        return tuple(axis for axis in (self.ring, *ulysses) if axis)
