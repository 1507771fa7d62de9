"""Sparse attention: lists of key blocks, SLA and VSA by their published formulas, kernels given equal lists, whole
pipelines with checkpoints trained for it."""
import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import reference, tiny
from tests.conftest import make_config, resolve_here, results, run_into
from tests.reference import TEXTS, relative_error
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels import sparse, splash_lists
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import TILE, Kernel, Parallel, Sparse
from wan_torchax.session import session

HEADS, HEAD_DIM = 8, 16
SYSTEM = pytest.mark.system


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---------------------------------------------------------------- lists


@pytest.mark.parametrize("blocks, count", [(1, 1), (7, 3), (600, 60), (1182, 118)])
def test_the_highest_blocks_come_first_and_of_equal_ones_the_first(blocks, count):
    scores = np.round(normal(3, blocks) * 4) / 4  # many are equal, some negative
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(sparse.top(jnp.array(scores), count), expected)


@pytest.mark.parametrize("kind, keep, blocks, count", [
    ("sla", 0.1, 1182, 118), ("sla", 0.15, 1182, 177), ("sla", 0.1, 512, 51), ("sla", 0.15, 512, 76),
    ("vsa", 0.2, 624, 125), ("vsa", 0.1, 624, 63), ("vsa", 0.2, 1440, 288), ("vsa", 0.1, 1440, 144),
    ("sla", 0.1, 3, 1), ("vsa", 1.0, 5, 5),
])
def test_lists_are_as_long_as_published(kind, keep, blocks, count):
    assert Sparse(kind, keep).count(blocks) == count


def test_tiles_hold_every_token_once_and_partial_ones_are_shorter():
    grid = 5, 6, 9
    order, blocks = sparse.tile_order(grid, TILE), sparse.Blocks.tiles(grid, TILE)
    assert sorted(order) == list(range(270)) and sum(blocks.sizes) == 270 and len(blocks.sizes) == 12
    positions = np.stack(np.unravel_index(order, grid), axis=1)
    for start, size in zip(blocks.starts, blocks.sizes):
        assert len({tuple(position // TILE) for position in positions[start : start + size]}) == 1
    assert len(sparse.Blocks.tiles((21, 30, 52), TILE).sizes) == 624
    assert len(sparse.Blocks.tiles((21, 45, 80), TILE).sizes) == 1440
    assert blocks.sizes == (64, 64, 32, 32, 16, 16, 16, 8, 8, 8, 4, 2)  # full ones first
    array = jnp.array(normal(1, 280, 4))
    np.testing.assert_array_equal(blocks.unpadded(blocks.padded(array), 280)[:, :270], array[:, :270])


# ---------------------------------------------------------------- the published formulas


def softmax(array):
    array = np.exp(array - array.max(-1, keepdims=True))
    return array / array.sum(-1, keepdims=True)


def attend(query, key, value):
    return softmax(query @ key.T * query.shape[1] ** -0.5) @ value


def sla_reference(query, key, value, branch, shape, keep):
    """One head, in float64: (tokens, head_dim)."""
    (weight, bias), (block_q, block_kv) = branch, shape
    blocks = [slice(start, start + block_kv) for start in range(0, len(key), block_kv)]
    means = np.stack([(key - key.mean(0))[block].mean(0) for block in blocks])
    out = np.zeros_like(query)
    for start in range(0, len(query), block_q):
        rows = slice(start, start + block_q)
        best = np.argsort(-means @ query[rows].mean(0))[: min(len(blocks), int(keep * len(blocks)))]
        out[rows] = attend(query[rows], *(np.concatenate([x[blocks[j]] for j in best]) for x in (key, value)))
    features, sums = softmax(query), softmax(key).T @ value
    linear = features @ sums / (1e-5 + features @ softmax(key).sum(0))[:, None]
    return out + linear @ weight.T + bias


def vsa_reference(query, key, value, gate, grid, keep):
    """One head, in float64, tokens in the video's order."""
    at = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 3) // TILE
    number = np.ravel_multi_index(at.T, [-(-length // side) for length, side in zip(grid, TILE)])
    tiles = [np.flatnonzero(number == tile) for tile in range(number.max() + 1)]
    means = [np.stack([x[tile].mean(0) for tile in tiles]) for x in (query, key, value)]
    scores = means[0] @ means[1].T * query.shape[1] ** -0.5
    coarse, out = softmax(scores) @ means[2], np.zeros_like(query)
    count = max(1, min(len(tiles), int(np.ceil(round(keep * len(tiles), 6)))))
    for tile, row in zip(tiles, scores):
        chosen = np.concatenate([tiles[j] for j in np.argsort(-row)[:count]])
        out[tile] = attend(query[tile], key[chosen], value[chosen])
    return out + coarse[number] * gate


def merged_reference(query, key, value, grid, shape, keep):
    """VSA with lists of even blocks, without its gate: one head, in float64, tokens in the order of tiles."""
    tiles = sparse.Blocks.tiles(grid, TILE)
    number = tiles.numbers(len(query))
    means = [np.stack([x[number == tile].mean(0) for tile in range(len(tiles.sizes))]) for x in (query, key)]
    weights = softmax(means[0] @ means[1].T * query.shape[1] ** -0.5)
    by_token = weights[number][:, number] / np.array(tiles.sizes)[number]  # (queries, keys): sums to a tile's weight
    blocks = [slice(start, start + shape[1]) for start in range(0, len(key), shape[1])]
    count, out = int(np.ceil(round(keep * len(blocks), 6))), np.zeros_like(query)
    for start in range(0, len(query), shape[0]):
        rows = slice(start, start + shape[0])
        best = np.argsort([-by_token[rows, block].sum() for block in blocks])[:count]
        out[rows] = attend(query[rows], *(np.concatenate([x[blocks[j]] for j in best]) for x in (key, value)))
    return out


def by_head(function, *arrays):
    """Apply to each head of (1, tokens, heads * head_dim)."""
    split = [np.float64(array)[0].reshape(-1, HEADS, HEAD_DIM) for array in arrays]
    return np.stack([function(*(array[:, head] for array in split)) for head in range(HEADS)], 1).reshape(
        arrays[0].shape
    )


PLACES = [None, Parallel(ulysses="x"), Parallel(heads="x")]


def placed(kernel, parallel, tokens, grid):
    if parallel is None:
        return Attend(HEAD_DIM, kernel, grid=grid)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    return Attend(HEAD_DIM, kernel, parallel, mesh, keys=tokens, grid=grid)


@pytest.mark.parametrize("place", PLACES, ids=["one device", "Ulysses", "heads"])
@pytest.mark.parametrize("grid, shape, keep", [((5, 6, 9), (32, 16), 0.3), ((3, 7, 5), (128, 64), 0.6)])
def test_sla_is_its_formula(place, grid, shape, keep):
    tokens = int(np.prod(grid))
    arrays = [normal(1, tokens, HEADS * HEAD_DIM, seed=seed) for seed in range(3)]
    weight, bias = normal(HEAD_DIM, HEAD_DIM, seed=3), normal(HEAD_DIM, seed=4)
    attention = placed(Kernel(kernel="xla", sparse=Sparse("sla", keep, *shape)), place, tokens, grid)
    out, _ = jax.jit(lambda *x: attention.counted(*x[:3], branch=x[3:]))(*arrays, weight, bias)
    expected = by_head(lambda *x: sla_reference(*x, (np.float64(weight), bias), shape, keep), *arrays)
    assert relative_error(np.asarray(out), expected) < 1e-5


@pytest.mark.parametrize("place", PLACES, ids=["one device", "Ulysses", "heads"])
def test_vsa_is_its_formula(place):
    grid, keep = (5, 6, 9), 0.4
    arrays = [normal(1, 270, HEADS * HEAD_DIM, seed=seed) for seed in range(4)]
    order = sparse.tile_order(grid, TILE)
    attention = placed(Kernel(kernel="xla", sparse=Sparse("vsa", keep, 64, 64)), place, 270, grid)
    (out, coarse), _ = jax.jit(attention.counted)(*(array[:, order] for array in arrays[:3]))
    out = out + coarse[:, sparse.Blocks.tiles(grid, TILE).numbers(270)] * arrays[3][:, order]
    expected = by_head(lambda *x: vsa_reference(*x, grid, keep), *arrays)
    assert relative_error(np.asarray(out)[:, sparse.video_order(grid, TILE)], expected) < 1e-5


@pytest.mark.parametrize("place", PLACES, ids=["one device", "Ulysses", "heads"])
@pytest.mark.parametrize("shape, keep", [((128, 64), 0.4), ((256, 128), 0.3), ((96, 32), 0.2)])
def test_vsa_in_blocks_of_several_tiles_takes_those_with_most_of_the_coarse_attention(place, shape, keep):
    grid = 5, 6, 9
    arrays = [normal(1, 270, HEADS * HEAD_DIM, seed=seed) for seed in range(3)]
    attention = placed(Kernel(kernel="xla", sparse=Sparse("vsa", keep, *shape)), place, 270, grid)
    (out, _), _ = jax.jit(attention.counted)(*arrays)
    expected = by_head(lambda *x: merged_reference(*x, grid, shape, keep), *arrays)
    assert relative_error(np.asarray(out), expected) < 1e-5


@pytest.mark.parametrize("kind", ["sla", "vsa"])
def test_with_all_blocks_it_is_dense(kind):
    arrays = [normal(1, 270, HEADS * HEAD_DIM, seed=seed) for seed in range(3)]
    kernel, grid = Kernel(kernel="xla", sparse=Sparse(kind, 1.0, 64, 64)), (5, 6, 9)
    nothing = (np.zeros((HEAD_DIM, HEAD_DIM), np.float32), np.zeros(HEAD_DIM, np.float32)) if kind == "sla" else ()
    out, _ = jax.jit(partial(Attend(HEAD_DIM, kernel, grid=grid).counted, branch=nothing))(*arrays)
    dense = jax.jit(Attend(HEAD_DIM, Kernel(kernel="xla")))(*arrays)
    assert relative_error(np.asarray(out if kind == "sla" else out[0]), np.asarray(dense)) < 1e-5


# ---------------------------------------------------------------- kernels, given equal lists


SPLASH = Kernel(kernel="splash", block_q=1024, chunk_kv=256, fold_scale=True, interpret=True)


@pytest.mark.parametrize("tokens, head_dim, keep, scale, fold", [
    (1500, 128, 0.5, 1.0, True),  # the last block is partial, and in some of the lists; lists of odd length
    (700, 64, 1.0, 1.0, False),
    pytest.param(5000, 128, 0.9, 1.0, True, marks=pytest.mark.system),  # two stretches of code and a rest
    (1500, 128, 0.5, 12.0, True),  # rows leave the fast path's range
])
def test_the_tpu_kernel_is_the_plain_one(tokens, head_dim, keep, scale, fold):
    query, key, value = (
        jnp.array(normal(1, tokens, 2 * head_dim, seed=seed) * size, jnp.bfloat16)
        for seed, size in enumerate((scale, scale, 1))
    )
    blocks = sparse.Blocks.even(tokens, 256), sparse.Blocks.even(tokens, 128)
    kernel = replace(SPLASH, fold_scale=fold)

    @jax.jit
    def attend(*arrays):
        scores = sparse.sla_scores(*arrays[:2], *blocks, head_dim)
        chosen = sparse.top(scores, Sparse("sla", keep).count(len(blocks[1].sizes)))
        expected = sparse.listed(*(array.astype(jnp.float32) for array in arrays), chosen, *blocks, head_dim)
        query, key, value = arrays
        return expected, *splash_lists.attention(query, key, value.swapaxes(1, 2), chosen, *blocks, head_dim, kernel)

    expected, out, rescued = attend(query, key, value)
    assert reference.distance(np.float32(out.swapaxes(1, 2)), np.float32(expected)) < 4e-3
    assert (int(rescued) > 0) == (scale > 1)


@pytest.mark.parametrize("tokens, padding, head_dim, dtype, bound", [
    (1500, 0, 128, jnp.bfloat16, 6e-3),
    (2100, 60, 64, jnp.float32, 2e-4),  # two steps of the pass, padding after the tokens
])
def test_on_a_tpu_sla_adds_its_linear_branch_to_the_lists(tokens, padding, head_dim, dtype, bound):
    arrays = [jnp.array(normal(2, tokens + padding, 2 * head_dim, seed=seed), dtype) for seed in range(3)]
    branch = jnp.array(normal(head_dim, head_dim, seed=4), dtype), jnp.array(normal(head_dim, seed=5), dtype)
    settings = Sparse("sla", 0.3, block_q=256, block_kv=128)

    def attend(kernel, cast):
        given = [array.astype(cast) for array in (*arrays, *branch)]
        attend = Attend(head_dim, replace(kernel, sparse=settings), keys=tokens)
        out, _ = jax.jit(lambda *arrays: attend.counted(*arrays[:3], branch=arrays[3:]))(*given)
        return np.float32(out)[:, :tokens]

    out, expected = attend(SPLASH, dtype), attend(Kernel(kernel="xla"), jnp.float32)
    assert reference.distance(out, expected) < bound


def test_on_a_tpu_vsa_has_its_lists_and_its_coarse_branch():
    grid, tokens = (5, 12, 20), 1200
    arrays = [jnp.array(normal(1, tokens + 16, 256, seed=seed), jnp.bfloat16) for seed in range(3)]

    def attend(kernel, cast):
        attend = Attend(128, replace(kernel, sparse=Sparse("vsa", 0.3, 256, 128)), keys=tokens, grid=grid)
        (out, coarse), _ = jax.jit(attend.counted)(*(array.astype(cast) for array in arrays))
        return np.float32(out)[:, :tokens], np.float32(coarse)

    for one, other in zip(attend(SPLASH, jnp.bfloat16), attend(Kernel(kernel="xla"), jnp.float32)):
        assert reference.distance(one, other) < 6e-3


@pytest.mark.parametrize("block_q, block_kv", [(128, 64), (128, 128), (64, 64)])
def test_the_hopper_kernel_lowers_over_lists(block_q, block_kv):
    """benchmarks/sparse_gpu.py checks its numbers on such a GPU."""
    array = jax.ShapeDtypeStruct((1, 5000, 256), jnp.bfloat16)
    weight, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 128), (128,)))
    kernel = Kernel(kernel="hopper", block_q=128, block_kv=128, sparse=Sparse("sla", 0.2, block_q, block_kv))
    attention = jax.jit(lambda *x: Attend(128, kernel).counted(*x[:3], branch=x[3:]))
    text = attention.trace(array, array, array, weight, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2 and "hopper_lists" in text


def test_the_hopper_kernel_lowers_over_tiles():
    """With partial ones, of which there is an odd number."""
    array = jax.ShapeDtypeStruct((1, 990, 256), jnp.bfloat16)
    kernel = Kernel(kernel="hopper", block_q=128, block_kv=128, sparse=Sparse("vsa", 0.4, 64, 64))
    attention = jax.jit(Attend(128, kernel, keys=990, grid=(9, 10, 11)).counted)
    text = attention.trace(array, array, array).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2 and "hopper_lists" in text


def test_kernels_read_partial_blocks_last():
    blocks = sparse.Blocks.even(130, 32)  # the fifth has two tokens
    chosen = jnp.array([[[[4, 0, 2], [1, 0, 2]]]])
    assert sparse.ordered(chosen, blocks, 2).tolist() == [[[[2, 0, 4, 5], [1, 0, 2, 5]]]]


# ---------------------------------------------------------------- whole pipelines


SIZE = ["resolution.height=112", "resolution.width=80", "resolution.frames=17", "steps=2"]  # tokens 5 x 7 x 5
LISTS = {
    "sla": ["attention.self.sparse.block_q=16", "attention.self.sparse.block_kv=8", "attention.self.sparse.keep=0.3"],
    "vsa": ["attention.self.sparse.keep=0.4"],
}
SPELLINGS = {"diffusers": "attn1.attn_op.local_attn.proj_l", "FastVideo": "attn1.attn_impl.proj_l",
             "ours": "attn1.proj_l"}


def added_tensors(kind, spelling):
    width = HEADS * HEAD_DIM
    name, size = (SPELLINGS[spelling], HEAD_DIM) if kind == "sla" else ("to_gate_compress", width)
    tensors = {}
    for layer in range(2):
        tensors[f"blocks.{layer}.{name}.weight"] = normal(size, size, seed=layer) / size**0.5
        tensors[f"blocks.{layer}.{name}.bias"] = normal(size, seed=layer + 9) * 0.3
    return tensors


def trained(folder, kind, spelling="diffusers"):
    """A tiny checkpoint with a branch's weights, and the overrides that run it."""
    from safetensors.numpy import load_file, save_file

    overrides = tiny.copied("text", folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | added_tensors(kind, spelling), file, {"format": "pt"})
    architecture = f"++model.architecture.transformer.attention_type={kind}"
    return [*overrides, architecture, f"sparse={kind}", *LISTS[kind], *TEXTS, *SIZE, "stages=[text,denoise]"]


class Reference:
    """An attention processor of diffusers by the published formulas, in float64."""

    def __init__(self, kind, tensors, layer, grid, keep):
        self.kind, self.grid, self.keep = kind, grid, keep
        self.own = [tensors[name] for name in sorted(tensors) if name.startswith(f"blocks.{layer}.")]  # bias, weight

    def __call__(self, attention, hidden, text=None, mask=None, rotary=None, **_):
        query, key = attention.norm_q(attention.to_q(hidden)), attention.norm_k(attention.to_k(hidden))
        arrays = [array.unflatten(2, (HEADS, -1)) for array in (query, key, attention.to_v(hidden))]
        arrays[:2] = [self.rotated(array, *rotary) for array in arrays[:2]]
        bias, weight = self.own
        if self.kind == "vsa":
            arrays.append(hidden @ torch.tensor(weight).T + torch.tensor(bias))
        flat = [array.flatten(2).numpy() if array.ndim == 4 else array.numpy() for array in arrays]
        rows = [by_head(self.one_head, *(array[row : row + 1] for array in flat)) for row in range(len(hidden))]
        return attention.to_out[0](torch.tensor(np.concatenate(rows), dtype=hidden.dtype))

    def one_head(self, *arrays):
        if self.kind == "vsa":
            return vsa_reference(*arrays, self.grid, self.keep)
        bias, weight = self.own
        return sla_reference(*arrays, (weight, bias), (16, 8), self.keep)

    @staticmethod
    def rotated(array, cosine, sine):
        first, second = array.unflatten(-1, (-1, 2)).unbind(-1)
        cosine, sine = cosine[..., 0::2], sine[..., 1::2]
        return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1).flatten(-2)


@pytest.fixture(scope="module", params=["sla", "vsa"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def expected(kind, tmp_path_factory):
    """A function that gives the latents of a pipeline, which are the same on every mesh."""
    config, made = make_config(*SIZE, *TEXTS), {}

    def make():
        if not made:
            pipeline = reference.load(tiny.checkpoint("text"), config)
            tensors, keep = added_tensors(kind, "ours"), float(LISTS[kind][-1].partition("=")[2])
            for layer, block in enumerate(pipeline.transformer.blocks):
                block.attn1.set_processor(Reference(kind, tensors, layer, (5, 7, 5), keep))
            made["latents"] = reference.make(pipeline, config, decoded=False)[0][None]
        return made["latents"]

    return make


@pytest.mark.parametrize("place", [
    pytest.param([], id="one device"),
    pytest.param(["mesh=cpu_8", "mesh.axes={dp:1,sp:8,tp:1}", "sharding=tokens"], id="tokens", marks=SYSTEM),
    pytest.param(["mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:4}", "sharding=tp"], id="heads", marks=SYSTEM),
])
def test_a_video_is_the_pipelines(tmp_path, kind, expected, place):
    overrides = trained(tmp_path / "model", kind)
    values = results(run_into(tmp_path / "run", *overrides, *place))
    assert relative_error(values["latents"], expected()) < 1e-4


@pytest.mark.parametrize("spelling", ["FastVideo", "ours"])
def test_every_spelling_of_the_projection_is_read(tmp_path, spelling):
    session.results.clear()
    one, other = (trained(tmp_path / name, "sla", name) for name in ("diffusers", spelling))
    folders = run_into(tmp_path / "one run", *one), run_into(tmp_path / "other run", *other)
    np.testing.assert_array_equal(*(results(folder)["latents"] for folder in folders))


def test_verify_checks_the_kernel_over_lists(tmp_path):
    from wan_torchax.tasks.verify.kernels import attention_cases

    resolved = resolve_here(*trained(tmp_path / "model", "sla"))
    (case,) = [case for case in attention_cases(resolved) if "to lists" in case.name]
    arrays = [jnp.array(normal(*shape, seed=seed)) for seed, shape in enumerate(case.shapes)]
    rows = np.arange(0, 175, 10)
    assert relative_error(case.run(*arrays)[rows], case.exact(rows, *arrays)) < case.bound


# ---------------------------------------------------------------- refusals


def test_a_branch_is_never_dropped(tmp_path):
    """Weights that the config does not use, and a config whose weights are missing."""
    overrides = trained(tmp_path / "model", "sla")
    dense = [one for one in overrides if "sparse" not in one and "attention_type" not in one]
    with pytest.raises(ConfigError, match=r"proj_l"):
        run_into(tmp_path / "dense", *dense)
    shutil.copytree(tiny.checkpoint("text"), tmp_path / "plain")
    plain = [one if not one.startswith("model.path=") else f"model.path={tmp_path / 'plain'}" for one in overrides]
    with pytest.raises(ConfigError, match=r"proj_l"):
        run_into(tmp_path / "missing", *plain)


def test_a_checkpoint_that_says_what_it_was_trained_for_is_believed(tmp_path):
    import json

    overrides = trained(tmp_path / "model", "sla")
    file = tmp_path / "model" / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_type": "sla", "sla_topk": 0.1}))
    dense = [one for one in overrides if "sparse" not in one and "attention_type" not in one]
    with pytest.raises(ConfigError, match="sparse=none: model=demo is trained for sla"):
        run_into(tmp_path / "dense", *dense)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_type": "sagesla"}))
    with pytest.raises(ConfigError, match="sagesla"):
        run_into(tmp_path / "unknown", *dense)


@pytest.mark.parametrize("overrides, message", [
    (["model=turbowan21_t2v_14b", "sparse=none"], "sparse=none: model=turbowan21_t2v_14b is trained for sla"),
    (["sparse=sla"], "sparse=sla: model=demo is trained for none"),
    (["model=turbowan21_t2v_14b", "attention.self.sparse.keep=0"], "keep=0.0: the share of key blocks"),
    (["model=turbowan21_t2v_14b", "mesh=v6e_8", "sharding=ring"], "a ring has a part of them"),
    (["model=turbowan21_t2v_14b", "attention=hopper", "attention.self.sparse.block_q=256"],
     "kernel=hopper has 64 x 64, 128 x 64, 128 x 128"),
    (["model=turbowan21_t2v_14b", "mesh=v6e_8", "attention=splash_v6e"], "use sparse=sla_tpu"),
    (["model=turbowan21_t2v_14b", "attention=cudnn"], "kernel=cudnn has no lists"),
    (["model=fastwan21_t2v_14b", "mesh=v6e_8", "attention=splash_v6e"], "use sparse=vsa_tpu"),
    (["model=turbowan21_t2v_14b", "mesh=v7x_8", "attention=splash_v7x", "sparse=sla_tpu", "attention.self.vmem_mib=16"],
     "32760 tokens, need 20.7 MiB of VMEM, the limit is vmem_mib=16; use fewer frames"),
    (["model=turbowan21_t2v_14b", "attention=hopper_eight"], "products of 16 bits only"),
    (["model=turbowan21_t2v_14b", "attention=xla", "attention.self.window=9"], "chooses the keys itself"),
    (["model=fastwan22_ti2v_5b", "pipeline=ti2v", "image=docs/demo.png"], "its tokens lie in tiles"),
    (["model=flux1_dev", "attention=xla", "sparse=sla"], "not for models of this family"),
    (["attention=xla", "attention.cross.sparse.kind=sla"], "lists are for a video's own tokens"),
    (["attention=xla", "attention.self.sparse.kind=sta"], "kind=sta"),
])
def test_what_cannot_be_is_told(overrides, message):
    size = ["resolution=480p"] if "wan2" in overrides[0] else []
    with pytest.raises(ConfigError, match=message):
        validate(make_config(*overrides, *size))
