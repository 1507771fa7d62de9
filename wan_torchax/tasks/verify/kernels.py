"""The config's kernels against XLA in float32: at the step's shapes and at awkward ones, on every device and together.

Each device computes the whole of a case from the same inputs, in one program without communication: results must be the
same bit for bit from call to call and from device to device, so a device that differs from most is wrong. Errors are
those of some rows, the first and the last among them, for which float32 is cheap at any length.
"""
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import PartitionSpec

from wan_torchax.config.attention import parallel_of
from wan_torchax.config.resolve import Resolved
from wan_torchax.devices.sharding import replicated
from wan_torchax.kernels import lanes, quantized, rotary, sparse, splash_lists
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.norm import Norm
from wan_torchax.kernels.parallel import Pieces
from wan_torchax.kernels.product import Linear
from wan_torchax.kernels.settings import Kernel, Products, Sparse
from wan_torchax.models.loop import plain_norm
from wan_torchax.session import session
from wan_torchax.stages.stage import main_stage
from wan_torchax.tasks.doctor import Finding
from wan_torchax.tasks.tune import median_seconds

ROWS = 64  # for which the float32 result is computed
AWKWARD = ((1, 257), (129, 127), (300, 769))  # queries, keys: neither fills blocks nor tiles
FEW = 77  # tokens: an awkward number for other kernels
SLOWER = 1.15  # times XLA's seconds
NOTICED = 1e-3  # seconds: below, launches are what is timed
BOUNDS = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3}  # relative error; a bf16 value is rounded by up to 2**-9
EIGHT_BITS = 0.1  # of attention with 8-bit products (docs/precision.md: up to 5 % at random inputs)


@dataclass(frozen=True)
class Case:
    """A kernel at one shape."""

    name: str
    remedy: str  # what to use instead of the kernel; empty: it is XLA's
    shapes: tuple  # of the inputs, normally distributed
    run: Callable  # the kernel: the inputs to (rows, …)
    plain: Callable | None  # the same by XLA, to compare seconds; None: they do not matter, as at an awkward shape
    exact: Callable  # (row numbers, *inputs) in float32 -> those rows
    rows: int
    bound: float


def check(resolved: Resolved, folder: Path, report: dict) -> Iterator[Finding]:
    """Every case on every device, then attention on all together."""
    report["kernels"] = rows = []
    for case in cases(resolved):
        row, findings = measure(case, resolved)
        rows.append(row)
        yield from findings
    if resolved.mesh.size > 1:
        row, finding = together(resolved)
        rows.append(row)
        yield finding
    if not any(row["wrong"] for row in rows):
        worst = max(rows, key=lambda row: row["error"] / row["bound"])
        what = f"{len(rows)} cases, the same bits on each of {resolved.mesh.size} and from call to call; worst error "
        yield Finding("kernels", "ok", f"{what}{worst['error']:.1e}, bound {worst['bound']:.0e}")


# ---------------------------------------------------------------- one case


def measure(case: Case, resolved: Resolved) -> tuple[dict, list[Finding]]:
    """Errors, repeatability and seconds of a case, and what is wrong with them."""
    mesh, config = resolved.mesh, resolved.config
    inputs = [draw(mesh, seed, shape, config.model.dtype.transformer) for seed, shape in enumerate(case.shapes)]
    numbers = jnp.unique(jnp.linspace(0, case.rows - 1, min(ROWS, case.rows)).astype(int))

    def kernel(*arrays):
        out = case.run(*arrays)
        return checksum(out), out[numbers].astype(jnp.float32)

    run = on_each(kernel, mesh)
    sums, picked = (numpy.asarray(part) for part in run(*inputs))
    again = numpy.asarray(run(*inputs)[0])
    with jax.default_matmul_precision("highest"):
        truths = numpy.asarray(on_each(lambda *arrays: case.exact(numbers, *wide(arrays)), mesh)(*inputs))
    truth = truths[usual(truths)]
    errors = [relative_error(part, truth) for part in picked]
    row = {"case": case.name, "error": max(errors), "bound": case.bound, "wrong": []}
    row["seconds"] = median_seconds(lambda: run(*inputs), config.verify.repeats)
    if case.remedy and case.plain:
        plain = on_each(lambda *arrays: checksum(case.plain(*arrays)), mesh)
        row["xla_seconds"] = median_seconds(lambda: plain(*inputs), config.verify.repeats)
    return row, list(faults(case, row, errors, sums, again, mesh))


def faults(case: Case, row: dict, errors: list[float], sums, again, mesh) -> Iterator[Finding]:
    """What is wrong with a case, named by device."""
    devices, instead = list(mesh.devices.flat), f"{case.remedy} avoids this kernel" if case.remedy else ""
    most, votes = Counter(sums.tolist()).most_common(1)[0]
    differing = [index for index in range(len(devices)) if sums[index] != most or 2 * votes <= len(devices)]
    wrong = [index for index, error in enumerate(errors) if not error <= case.bound]
    if unsteady := [index for index in range(len(devices)) if sums[index] != again[index]]:
        row["wrong"] += [f"not repeatable on {named(devices, unsteady)}"]
        what = f"{case.name}: the second call gives other bits on {named(devices, unsteady)}"
        yield Finding("kernels", "bad", what, instead or "the device: its host's logs, another device")
    elif differing:
        row["wrong"] += [f"differs on {named(devices, differing)}"]
        how = "gives other bits than most" if len(differing) < len(devices) else "do not agree, and no majority does"
        what = f"{case.name}: {named(devices, differing)} {how}"
        yield Finding("device", "bad", what, "leave it out (mesh.axes), and have its host looked at")
    if wrong and len(wrong) == len(devices):
        row["wrong"] += ["error beyond its bound"]
        what = f"{case.name}: error {row['error']:.1e}, at most {case.bound:.0e} is usual"
        yield Finding("kernels", "bad", what, instead or "compile.matmul_precision=highest, other versions of JAX")
    elif wrong and not differing:
        row["wrong"] += [f"wrong on {named(devices, wrong)}"]
        yield Finding("device", "bad", f"{case.name}: wrong on {named(devices, wrong)}", "leave it out (mesh.axes)")
    lost = row["seconds"] - SLOWER * row.get("xla_seconds", math.inf)
    if lost > NOTICED:
        times = row["seconds"] / row["xla_seconds"]
        yield Finding("slow", "note", f"{case.name}: takes {times:.1f} times what XLA takes", f"try {case.remedy}")


def on_each(function: Callable, mesh) -> Callable:
    """Every device computes the function of the same inputs; results are stacked, (devices, …)."""

    def alone(*arrays):
        return jax.tree.map(lambda out: out[None], function(*arrays))

    spread = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(alone, mesh=mesh, in_specs=PartitionSpec(), out_specs=spread, check_vma=False))


def checksum(array):
    """A number that changes with any bit of an array: its words, weighted by their places, modulo 2**32."""
    words = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32).ravel()
    places = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * places, dtype=jnp.uint32)


def draw(mesh, seed: int, shape: tuple[int, ...], dtype: str):
    """Normal numbers with a mean, the same on all devices."""
    make = jax.jit(
        lambda: 0.5 + jax.random.normal(jax.random.key(seed), shape, jnp.float32), out_shardings=replicated(mesh)
    )
    return make().astype(dtype)


def usual(copies: numpy.ndarray) -> int:
    """The index of a copy that most devices have."""
    contents = [copy.tobytes() for copy in copies]
    return contents.index(Counter(contents).most_common(1)[0][0])


def wide(arrays) -> list:
    return [array.astype(jnp.float32) for array in arrays]


def relative_error(out, truth) -> float:
    """Infinite if a value is not finite."""
    error = float(numpy.linalg.norm(out - truth) / numpy.linalg.norm(truth))
    return error if math.isfinite(error) else math.inf


def named(devices: list, indices: list[int]) -> str:
    return ", ".join(f"device {devices[index].id}" for index in indices)


# ---------------------------------------------------------------- the cases


def cases(resolved: Resolved) -> Iterator[Case]:
    """The kernels that a step of this config runs on one device."""
    config = resolved.config
    yield from attention_cases(resolved)
    yield from linear_cases(resolved)
    if config.products.kernel == "pallas":
        yield from norm_cases(resolved)
    if config.attention.self.kernel == "splash":
        yield from lane_cases(resolved)


def local(resolved: Resolved) -> dict[str, int]:
    """What one device has of tokens and heads, in a block and in self-attention."""
    parallel, sizes = parallel_of(resolved.config.sharding), resolved.mesh.shape
    ring, ulysses, heads = (sizes.get(axis, 1) for axis in (parallel.ring, parallel.ulysses, parallel.heads))
    count, head_dim = resolved.family.heads(resolved.config.model.architecture)
    return {
        "tokens": math.ceil(resolved.tokens / (ring * ulysses)), "keys": math.ceil(resolved.tokens / ring),
        "heads": max(count // (heads * ulysses), 1), "head_dim": head_dim, "width": count * head_dim, "parts": ulysses,
    }


def attention_cases(resolved: Resolved) -> Iterator[Case]:
    config, here = resolved.config, local(resolved)
    lengths = {"self": (here["keys"], here["keys"]), "cross": (here["tokens"], config.model.text_tokens)}
    for part, real in lengths.items():
        kernel = Kernel.of(config.attention[part])
        if kernel.sparse:
            yield lists_case(config, kernel, here)
            kernel = replace(kernel, sparse=Sparse())
        yield attention_case(config, part, kernel, real, here["heads"], here["head_dim"])
        if kernel.kernel == "xla" and part == "cross":
            continue  # the same code as above
        for awkward in AWKWARD:
            case = attention_case(config, part, replace(kernel, min_keys=0), awkward, 1, here["head_dim"])
            yield replace(case, plain=None)


def attention_case(config, part: str, kernel: Kernel, lengths: tuple[int, int], heads: int, head_dim: int) -> Case:
    queries, keys = lengths
    if kernel.window is not None:
        keys = queries
    plain = Kernel(kernel="xla", window=kernel.window)
    name = kernel.kernel if keys >= kernel.min_keys else "xla"
    eight = kernel.eight_bits and name == "hopper"
    return Case(
        f"attention.{part} {name}{' in 8 bits' if eight else ''}, {queries} x {keys}, {heads} x {head_dim}",
        "" if name == "xla" else "attention=xla",
        tuple((1, tokens, heads * head_dim) for tokens in (queries, keys, keys)),
        lambda *arrays: Attend(head_dim, kernel)(*arrays)[0],
        lambda *arrays: Attend(head_dim, plain)(*arrays)[0],
        partial(attention_rows, head_dim, kernel.window), queries,
        EIGHT_BITS if eight else BOUNDS[config.model.dtype.transformer],
    )


def lists_case(config, kernel: Kernel, here: dict[str, int]) -> Case:
    """Attention to lists of key blocks, chosen as SLA does; on a TPU with its linear branch, which the kernel adds."""
    head_dim, dtype, tokens = here["head_dim"], config.model.dtype.transformer, here["keys"]
    blocks = tuple(sparse.Blocks.even(tokens, size) for size in (kernel.sparse.block_q, kernel.sparse.block_kv))

    def chosen(query, key):
        scores = sparse.sla_scores(query.astype(dtype), key.astype(dtype), *blocks, head_dim)
        return sparse.top(scores, kernel.sparse.count(len(blocks[1].sizes)))

    projection = jnp.eye(head_dim), jnp.zeros(head_dim)
    joined = kernel.kernel == "splash" and kernel.sparse.kind == "sla"

    def plain(query, key, value):
        out = sparse.listed(query, key, value, chosen(query, key), *blocks, head_dim)[0]
        return out + sparse.linear_branch(query, key, value, tokens, *projection, head_dim)[0] if joined else out

    def attend(query, key, value):
        if not joined:
            return Attend(head_dim, kernel).listed(query, key, value, chosen(query, key), *blocks)[0][0]
        value_t = value.swapaxes(1, 2)
        *_, sums, total = splash_lists.passed(query, key, value_t, *blocks, head_dim, kernel)
        linear, lists = sparse.Linear.of(sums, total, *projection, query.dtype), chosen(query, key)
        return splash_lists.attention(query, key, value_t, lists, *blocks, head_dim, kernel, linear)[0][0].T

    return Case(
        f"attention.self {kernel.kernel} to lists, {tokens} x {tokens}, {here['heads']} x {head_dim}",
        "" if kernel.kernel == "xla" else "attention=xla", ((1, tokens, here["heads"] * head_dim),) * 3,
        attend, None, lambda numbers, *arrays: plain(*arrays)[numbers], tokens, BOUNDS[dtype],
    )


def attention_rows(head_dim, window, numbers, query, key, value):
    """Those rows of attention, written out."""
    split = [array[0].reshape(array.shape[1], -1, head_dim) for array in (query[:, numbers], key, value)]
    scores = jnp.einsum("qhd,khd->hqk", *split[:2]) * head_dim**-0.5
    if window is not None:
        near = abs(numbers[:, None] - jnp.arange(key.shape[1])[None, :]) <= window
        scores = jnp.where(near, scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), split[2]).reshape(len(numbers), -1)


def linear_cases(resolved: Resolved) -> Iterator[Case]:
    """Each shape of the blocks' linear layers; with kernels of our own also what they fuse, at awkward sizes."""
    config, tokens = resolved.config, local(resolved)["tokens"]
    for outputs, inputs in layer_shapes(resolved):
        yield linear_case(config, tokens, outputs, inputs, {})
    if config.products.kernel == "pallas":
        for options in ({"gelu": True}, {"transpose_out": True}, {"transpose_in": True, "residual": True}):
            yield replace(linear_case(config, FEW, 300, 256, options), plain=None)
    if puts_together(config):
        rows = 3 * config.attention.self.sub_q
        yield replace(linear_case(config, rows, 300, 256, {"pieces": True, "transpose_in": True}), plain=None)


def puts_together(config) -> bool:
    """Whether a layer's kernel puts attention's outputs together from the pieces that were sent."""
    return config.products.kernel == "pallas" and config.products.ahead and bool(config.sharding.attention.groups)


def layer_shapes(resolved: Resolved) -> list[tuple[int, int]]:
    """(outputs, inputs) of the blocks' linear layers, each once."""
    name = main_stage(resolved.graph)
    (arrays, *_) = session.build(resolved, [name])[name].specs.values()
    layers = resolved.family.products(resolved.config.model.architecture.transformer)
    stored = (arrays.get(f"{layer}.{kind}") for layer in layers for kind in ("weight", "quantized"))
    return sorted({spec.shape[-2:] for spec in stored if spec is not None})


def linear_case(config, rows, outputs, inputs, options) -> Case:
    kind, precision = config.products.kernel, config.precision
    shapes = (1, rows, inputs), (outputs, inputs), (outputs,), (1, rows, outputs)

    def weights(weight):
        return quantized.quantize(weight, precision.weights) if precision.weights else (weight, None)

    def plain(array, weight, bias, residual):
        small, scale = weights(weight)
        if scale is not None:
            out = quantized.linear(array, small, scale, bias, precision.activations)
        else:
            out = jnp.einsum("bta,oa->bto", array, weight) + bias
        out = jax.nn.gelu(out, approximate=True) if "gelu" in options else out
        return (out + residual if "residual" in options else out)[0]

    def run(array, weight, bias, residual):
        small, scale = weights(weight)
        after = options | ({"residual": residual} if "residual" in options else {})
        if after.pop("pieces", False):
            array = Pieces((array.reshape(1, 3, 1, -1, inputs).swapaxes(3, 4),))
        return Linear(Products(**config.products))(array, small, bias, scale=scale, **after)[0]

    def exact(numbers, array, weight, bias, residual):
        return plain(array[:, numbers], weight, bias, residual[:, numbers])

    remedy = "products=xla" if kind == "pallas" else "precision=none" if precision.weights else ""
    words = ["linear layer", kind, precision.weights, *options]
    return Case(
        f"{' '.join(word for word in words if word)}, {rows} x {inputs} x {outputs}", remedy, shapes,
        run if kind == "pallas" else plain, plain if kind == "pallas" else None, exact, rows,
        BOUNDS[config.model.dtype.transformer] * (2 if precision.weights else 1),
    )


def norm_cases(resolved: Resolved) -> Iterator[Case]:
    config, here = resolved.config, local(resolved)
    norm = Norm(Products(**config.products))
    for tokens in (here["tokens"], FEW):
        shapes = (1, tokens, here["width"]), (1, here["width"]), (1, here["width"])
        yield Case(
            f"norm, {tokens} x {here['width']}", "products=xla", shapes,
            lambda *arrays: norm(*arrays)[0], None if tokens == FEW else lambda *arrays: plain_norm(*arrays, 1e-6)[0],
            lambda numbers, array, *rows: plain_norm(array[:, numbers], *rows, 1e-6)[0], tokens,
            BOUNDS[config.model.dtype.transformer],
        )


def lane_cases(resolved: Resolved) -> Iterator[Case]:
    """RoPE, and the copies before and after an all-to-all."""
    config, here = resolved.config, local(resolved)
    kernel, bound = Kernel.of(config.attention.self), BOUNDS[config.model.dtype.transformer]
    head_dim, plain = here["head_dim"], Kernel(kernel="xla")

    def rotate(kernel, tables, array):
        return rotary.rotate(array, *tables, head_dim, kernel)[0, 0]

    def exact(tables, numbers, array):
        return rotary.rotate_plain(array[:, numbers], *(table[numbers] for table in tables))[0]

    for tokens in (here["tokens"], FEW):
        angles = jnp.repeat(jnp.linspace(0, 6, tokens * head_dim // 2).reshape(tokens, -1), 2, axis=1)
        tables = jnp.cos(angles), jnp.sin(angles)
        yield Case(
            f"rope, {tokens} x {here['width']}", "attention=xla", ((1, tokens, here["width"]),),
            partial(rotate, kernel, tables), None if tokens == FEW else partial(rotate, plain, tables),
            partial(exact, tables), tokens, bound,
        )
    parts = max(here["parts"], 2)
    tokens = parts * lanes.LANES * math.ceil(here["keys"] / (parts * lanes.LANES))
    yield Case(
        f"copies, {parts} x {tokens}", "attention=xla", ((1, 256, tokens),),
        lambda array: lanes.join(lanes.cut(array, parts, kernel), kernel)[0], None,
        lambda numbers, array: array[0, numbers], 256, bound,
    )


# ---------------------------------------------------------------- all devices together


def together(resolved: Resolved) -> tuple[dict, Finding]:
    """Self-attention of all tokens, sharded over the mesh as in a step."""
    config, mesh, head_dim = resolved.config, resolved.mesh, local(resolved)["head_dim"]
    parallel = replace(parallel_of(config.sharding), batch=None)
    kernel = replace(Kernel.of(config.attention.self), sparse=Sparse())
    tokens, dtype = resolved.tokens, config.model.dtype.transformer
    padding = -tokens % (lanes.LANES * math.prod(mesh.shape[axis] for axis in parallel.token_axes))
    inputs = [draw(mesh, seed, (1, tokens + padding, local(resolved)["width"]), dtype) for seed in range(3)]
    numbers = jnp.unique(jnp.linspace(0, tokens - 1, ROWS).astype(int))
    attend = Attend(head_dim, kernel, parallel, mesh, keys=tokens)

    @jax.jit
    def run(*arrays):
        out, _ = attend.counted(*arrays, in_pieces=puts_together(config))
        return (out.joined() if isinstance(out, Pieces) else out)[0, numbers]

    def exact(*arrays):
        query, *others = wide(arrays)
        return attention_rows(head_dim, kernel.window, numbers, query, *(array[:, :tokens] for array in others))

    with jax.default_matmul_precision("highest"):
        truth = numpy.asarray(jax.jit(exact, out_shardings=replicated(mesh))(*inputs))
    first, again = (numpy.asarray(run(*inputs), numpy.float32) for _ in range(2))
    bound = EIGHT_BITS if kernel.eight_bits else BOUNDS[dtype]
    what = f"attention of {mesh.size} devices together, {resolved.tokens} tokens"
    row = {"case": what, "error": relative_error(first, truth), "bound": bound, "wrong": []}
    row["seconds"] = median_seconds(lambda: run(*inputs), config.verify.repeats)
    if not row["error"] <= bound:
        row["wrong"].append("error beyond its bound")
        remedy = "the machine check names links that lose data; attention=xla, or another sharding, avoids the kernel"
        return row, Finding("together", "bad", f"{what}: error {row['error']:.1e}", remedy)
    if (first != again).any():
        row["wrong"].append("not repeatable")
        return row, Finding("together", "bad", f"{what}: the second call gives other bits", "another sharding")
    return row, Finding("together", "ok", f"{what}: error {row['error']:.1e}, repeatable bit for bit")
