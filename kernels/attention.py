"""Attention as the config asks for it: which kernel, on which devices.

    out = attend_flat(query, key, value, head_dim, kernel, parallel, mesh)   # (batch, tokens, heads * head_dim)

It runs inside `jax.jit`. A kernel sees only the tokens and heads of its own device and returns, beside
its output, the log-sum-exp of every score row, which is all that is needed to merge two partial results.
"""
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from omegaconf import OmegaConf
from wan_torchax.kernels import parallel as schemes
from wan_torchax.kernels import splash
from wan_torchax.kernels.rotary import rotate

from wan_torchax.config import schema, validation

CONF = Path(__file__).parent.parent / "conf" / "attention"
MASKED = splash.LOWEST  # finite: a row masked so far must not become inf - inf


def attend_flat(query, key, value, head_dim, kernel, parallel=None, mesh=None, cross=False, rotary=None, keys=None):
    """softmax(query · keyᵀ / sqrt(head_dim)) · value per head, on (batch, tokens, heads * head_dim).

    `cross` says that the keys are few and every device holds them all, so that no token has to travel. `rotary`, the cosines
    and sines of RoPE as (tokens, head_dim) float32, turns queries and keys first. Only the first `keys` keys count, where
    given; the rest is padding.
    """
    parallel, keys = parallel or schema.Parallel(), keys or key.shape[1]

    def prepare(query, key, tables=(), first=0, axes=(), parts=1):
        """RoPE and smoothing on one device's tokens, these from `first` on, the others over `axes`; the heads cut into parts."""
        with jax.named_scope("rope"):
            query, key = (rotate(x, *tables, head_dim, kernel, parts) if tables else schemes.cut(x, parts, 2) for x in (query, key))
        if kernel.smooth_keys:
            real = first + jnp.arange(key.shape[2]) < keys
            total = jnp.sum(jnp.where(real[:, None], key, 0), axis=2, keepdims=True, dtype=jnp.float32)
            key = key - (lax.psum(total, axes) / keys).astype(key.dtype)
        return query, key

    def local(query, key, value, keys):
        return KERNELS[chosen(kernel, keys)](query, key, value, keys, head_dim, kernel)

    if mesh is None:
        query, key = prepare(query, key, rotary or ())
        return local(query[0], key[0], value, keys)[0]
    return schemes.spread(local, prepare, query, key, value, rotary or (), keys, head_dim, parallel, mesh, cross)


def chosen(kernel, keys):
    """The kernel's name for this many keys on one device."""
    return kernel.kernel if keys >= kernel.min_keys else "xla"


def xla(query, key, value, keys, head_dim, kernel):
    """Blockwise attention with an online softmax in plain JAX: no platform holds the whole score matrix."""
    batch, queries, width = query.shape
    heads = width // head_dim
    query_blocks = blocks(query, min(kernel.block_q, queries), heads)
    key_blocks = blocks(key, min(kernel.block_kv, keys), heads)
    value_blocks = blocks(value, min(kernel.block_kv, keys), heads)
    block_q, block_kv = query_blocks.shape[2], key_blocks.shape[2]

    def one_query_block(indexed):
        index, query_block = indexed
        rows = index * block_q + jnp.arange(block_q)

        def step(carry, block):
            number, key_block, value_block = block
            columns = number * block_kv + jnp.arange(block_kv)
            scores = jnp.einsum("bqhd,bkhd->bhqk", query_block, key_block, preferred_element_type=jnp.float32)
            scores = jnp.where(visible(rows, columns, keys, kernel.window), scores * head_dim**-0.5, MASKED)
            return online_step(carry, scores, value_block), None

        shape = (batch, heads, block_q)
        start = (jnp.zeros((*shape, head_dim), jnp.float32), jnp.full(shape, MASKED), jnp.zeros(shape))
        (out, maximum, total), _ = lax.scan(step, start, (jnp.arange(len(key_blocks)), key_blocks, value_blocks))
        return out / total[..., None], maximum + jnp.log(total)

    out, log_sum = lax.map(one_query_block, (jnp.arange(len(query_blocks)), query_blocks))
    out = out.transpose(1, 0, 3, 2, 4).reshape(batch, -1, width)[:, :queries]  # (blocks, batch, heads, block_q, dim)
    log_sum = log_sum.transpose(1, 2, 0, 3).reshape(batch, heads, -1)[..., :queries]
    return out.astype(query.dtype), log_sum


def blocks(array, size, heads):
    """(batch, tokens, width) -> (blocks, batch, size, heads, head_dim), the last block padded with zeros."""
    batch, tokens, width = array.shape
    padded = jnp.pad(array, ((0, 0), (0, -tokens % size), (0, 0)))
    return padded.reshape(batch, -1, size, heads, width // heads).swapaxes(0, 1)


def visible(rows, columns, keys, window):
    """Which key each query may see: the real ones, and with a window only those at most that far away."""
    seen = columns[None, :] < keys
    return seen if window is None else seen & (abs(rows[:, None] - columns[None, :]) <= window)


def online_step(carry, scores, value_block):
    """Add one block of keys to (out, maximum, total), all still to be divided by total."""
    out, maximum, total = carry
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
    correction = jnp.exp(maximum - new_maximum)
    weights = jnp.exp(scores - new_maximum[..., None])
    product = jnp.einsum("bhqk,bkhd->bhqd", weights.astype(value_block.dtype), value_block, preferred_element_type=jnp.float32)
    return out * correction[..., None] + product, new_maximum, total * correction + weights.sum(axis=-1)


def cudnn(query, key, value, keys, head_dim, kernel):
    """cuDNN's fused attention (NVIDIA, bf16 or fp16).

    It is 7 to 9 % slower where the keys are no multiple of 128 (75,600 are not): there, the last few are attended to apart
    (benchmarks/attention_gpu.py).
    """
    whole = keys // 128 * 128
    if whole in (0, keys):
        return cudnn_call(query, key[:, :keys], value[:, :keys], head_dim)
    most, rest = (cudnn_call(query, key[:, part], value[:, part], head_dim) for part in (slice(whole), slice(whole, keys)))
    out, log_sum = schemes.merge(most, rest, head_dim)
    return out.astype(query.dtype), log_sum


def cudnn_call(query, key, value, head_dim):
    # jax.nn.dot_product_attention rounds the log-sum-exp to bf16, too coarse to merge with; this is the function under it.
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    split = [x.reshape(*x.shape[:2], -1, head_dim) for x in (query, key, value)]
    out, log_sum = dot_product_attention(*split, scale=head_dim**-0.5, return_residual=True)
    return out.reshape(query.shape), log_sum


def tpu_splash(query, key, value, keys, head_dim, kernel):
    """The Pallas kernel, which takes values and gives outputs with tokens along the lanes."""
    out, log_sum = splash.attention(query, key, value.swapaxes(1, 2), keys, head_dim, kernel)
    return out.swapaxes(1, 2), log_sum


def gpu_hopper(*arguments):
    """The Pallas kernel for NVIDIA Hopper."""
    from wan_torchax.kernels import hopper  # its compiler's modules take a second to import

    return hopper.attention(*arguments)


KERNELS = {"xla": xla, "cudnn": cudnn, "splash": tpu_splash, "hopper": gpu_hopper}


def resolve(attention, device, dtype, head_dim=128):
    """Replace every `kernel: auto` by what conf/attention/auto.yaml names for this device; read once, at build time.

    A device kind ("TPU v6 lite") goes before its platform ("gpu"). Where the kernel named there does not serve the dtype or
    the head dim (only `xla` has float32; splash and hopper have head dims 64 and 128), `xla` does.
    """
    found = attention.devices.get(device.device_kind) or attention.devices.get(device.platform)
    parts = {name: choose(getattr(attention, name), name, attention.devices, found, device, dtype, head_dim) for name in ("self", "cross")}
    return replace(attention, **parts)


def choose(part, name, devices, found, device, dtype, head_dim):
    if part.kernel != "auto":
        return part
    if found is None:
        raise schema.ConfigError(f"attention=auto: nothing in attention.devices for {device.device_kind!r}; has {', '.join(devices)}")
    kernel = read_kernel(found, name, part)
    if not validation.takes_dtype(kernel.kernel, str(dtype)) or list(validation.unserved(kernel, head_dim)):
        kernel = read_kernel("xla", name, part)
    problems = list(validation.kernel_problems(kernel, head_dim))
    if problems:
        raise schema.ConfigError(f"conf/attention/{found}.yaml: {name}.{problems[0]}")
    return kernel


def read_kernel(file, name, part):
    """The values of a file in conf/attention, less what the config says beside `kernel: auto`."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{file}.yaml"))[name]
    return schema.Kernel(**values | {"window": part.window, "smooth_keys": part.smooth_keys, "outline": part.outline})
