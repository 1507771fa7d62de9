"""Lists of key blocks for models that were not trained for them: Radial attention's and Sparse-VideoGen's lists, in
whole pipelines, and with steps and layers that attend to all keys."""
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference, tiny
from tests.conftest import make_config, results, run_into
from tests.reference import TEXTS, relative_error
from tests.test_coarse import COARSE, SHORT, in_torch
from tests.test_sparse import HEAD_DIM, HEADS, PLACES, SIZE, SPLASH, Reference, attend, by_head, normal, placed
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels import masks
from wan_torchax.kernels.attention import Attend
from wan_torchax.kernels.settings import Kernel, Sparse
from wan_torchax.kernels.sparse import Blocks

GRID = 5, 6, 9


def even(tokens, block_q, block_kv):
    return Blocks.even(tokens, block_q), Blocks.even(tokens, block_kv)


# ---------------------------------------------------------------- lists


def published_radial(grid, size, decay):
    """Radial attention's own mask of blocks, by its rule for pairs of frames: a block counts if of its columns with any
    key more than 60 % have more than a third of their rows."""
    frames, tokens = grid[0], grid[1] * grid[2]
    starts, places = np.arange(0, frames * tokens, size), np.arange(tokens)
    mask = np.zeros((len(starts),) * 2, bool)
    for query_frame in range(frames):
        own = np.flatnonzero((starts < (query_frame + 1) * tokens) & (starts + size > query_frame * tokens))
        begin, end = (np.clip(starts[own] + more - query_frame * tokens, 0, tokens)[:, None] for more in (0, size))
        for key_frame in range(frames):
            apart = abs(query_frame - key_frame)
            width = max(128, 2 ** int(tokens).bit_length() / 2 ** apart.bit_length() * decay)
            width = tokens if apart == 0 or key_frame == 0 else tokens // 2 if apart == 1 else int(width)
            rows = np.clip(np.minimum(end, places + width + 1) - np.maximum(begin, places - width), 0, None) / size
            block = (key_frame * tokens + places) // size
            first = np.flatnonzero(np.diff(block, prepend=-1))
            some, many = (np.add.reduceat(rows > least, first, axis=1, dtype=int) for least in (0, 1 / 3))
            mask[np.ix_(own, block[first])] |= many > 0.6 * some
    return mask


def test_radial_lists_hold_what_the_published_mask_has():
    grid, (query_blocks, key_blocks) = (21, 45, 80), even(75_600, 128, 128)
    mask = published_radial(grid, 128, decay=0.2)
    assert 0.23 < mask.mean() < 0.25
    lists = masks.radial(grid, query_blocks, key_blocks, int(0.25 * len(key_blocks.sizes)))
    np.testing.assert_array_equal(lists[:, 0], np.arange(591))  # the own block first
    assert np.take_along_axis(mask, lists, axis=1).sum() > 0.95 * mask.sum()


@pytest.mark.parametrize("make", [masks.radial, masks.spatial, masks.temporal])
def test_lists_name_the_own_block_and_the_first_frame_and_no_block_twice(make):
    query_blocks, key_blocks = even(270, 16, 8)
    lists = make(GRID, query_blocks, key_blocks, 20)
    own = (query_blocks.starts + np.array(query_blocks.sizes) // 2) // 8
    assert all(len(set(row)) == 20 and set(range(7)) <= set(row) for row in lists.tolist())
    assert all(abs(row[0] - block) <= 1 for row, block in zip(lists, own))


def test_bands_are_of_neighbouring_frames_or_of_places():
    query_blocks, key_blocks = even(24 * 64, 16, 16)
    frame = np.arange(96) // 4  # four blocks in a frame of 64 tokens
    spatial, temporal = (make((24, 8, 8), query_blocks, key_blocks, 28) for make in (masks.spatial, masks.temporal))
    later = slice(16, 80)  # away from the ends and the first frame
    assert abs(frame[spatial[later, 5:]] - frame[later, None]).max() <= 3
    # all frames' blocks in the same place, before any other but the first frame's
    places = np.sort(temporal[later] % 4, axis=1)
    assert all(list(row).count(block % 4) == 24 for row, block in zip(places, range(16, 80)))


# ---------------------------------------------------------------- attention


def listed_reference(query, key, value, lists, shape):
    """One head, in float64."""
    blocks = [slice(start, start + shape[1]) for start in range(0, len(key), shape[1])]
    out = np.zeros_like(query)
    for number, chosen in enumerate(lists):
        rows = slice(number * shape[0], (number + 1) * shape[0])
        out[rows] = attend(query[rows], *(np.concatenate([x[blocks[j]] for j in chosen]) for x in (key, value)))
    return out


@pytest.mark.parametrize("place", PLACES, ids=["one device", "Ulysses", "heads"])
def test_radial_attention_is_that_to_its_lists(place):
    arrays = [normal(1, 270, HEADS * HEAD_DIM, seed=seed) for seed in range(3)]
    attention = placed(Kernel(kernel="xla", sparse=Sparse("radial", 0.4, 16, 8)), place, 270, GRID)
    lists = masks.radial(GRID, *even(270, 16, 8), 13)
    out, _ = jax.jit(attention.counted)(*arrays)
    expected = by_head(lambda *x: listed_reference(*x, lists, (16, 8)), *arrays)
    assert relative_error(np.asarray(out), expected) < 1e-5


@pytest.mark.parametrize("place", PLACES, ids=["one device", "Ulysses", "heads"])
def test_every_head_takes_the_band_that_fits_it(place):
    """Heads 0, 2, … attend to their frame, the others to their place."""
    frame, spot = np.divmod(np.arange(270), 54)
    codes = [normal(270, HEAD_DIM, seed=9)[number] * 3 for number in (frame, spot)]
    keys = np.stack([codes[head % 2] for head in range(HEADS)], axis=1).reshape(1, 270, -1)
    arrays, blocks = (keys, keys, normal(1, 270, HEADS * HEAD_DIM)), even(270, 16, 8)
    attention = placed(Kernel(kernel="xla", sparse=Sparse("band", 0.5, 16, 8)), place, 270, GRID)
    out, _ = jax.jit(attention.counted)(*arrays)
    choices, number = [make(GRID, *blocks, 17) for make in (masks.spatial, masks.temporal)], iter(range(HEADS))
    expected = by_head(lambda *x: listed_reference(*x, choices[next(number) % 2], (16, 8)), *arrays)
    assert relative_error(np.asarray(out), expected) < 1e-5


@pytest.mark.parametrize("kind", ["radial", "band"])
def test_a_step_or_a_layer_may_attend_to_all_keys(kind):
    arrays = [normal(1, 270, HEADS * HEAD_DIM, seed=seed) for seed in range(3)]
    attention = Attend(HEAD_DIM, Kernel(kernel="xla", sparse=Sparse(kind, 0.2, 16, 8)), keys=270, grid=GRID)
    dense = np.asarray(Attend(HEAD_DIM, Kernel(kernel="xla"))(*arrays))
    counted = jax.jit(lambda flag, *x: attention.counted(*x, branch=(flag,))[0])
    assert relative_error(np.asarray(counted(True, *arrays)), dense) < 1e-6
    assert relative_error(np.asarray(counted(False, *arrays)), dense) > 0.05


@pytest.mark.parametrize("kind", ["radial", pytest.param("band", marks=pytest.mark.system)])
def test_the_tpu_kernel_has_the_same_lists(kind):
    arrays = [jnp.array(normal(1, 1200, 256, seed=seed), jnp.bfloat16) for seed in range(3)]

    def run(kernel, cast):
        kernel = replace(kernel, sparse=Sparse(kind, 0.4, 256, 128))
        attention = Attend(128, kernel, keys=1200, grid=(5, 12, 20))
        return np.float32(jax.jit(attention.counted)(*(array.astype(cast) for array in arrays))[0])

    assert reference.distance(run(SPLASH, jnp.bfloat16), run(Kernel(kernel="xla"), jnp.float32)) < 6e-3


# ---------------------------------------------------------------- whole pipelines


class Listed(Reference):
    """An attention processor of diffusers: lists in the second step, of two calls each; all keys before."""

    def __init__(self, lists):
        self.lists, self.calls, self.kind, self.own = lists, 0, "radial", (None, None)

    def __call__(self, *arguments, **named):
        self.calls += 1
        return super().__call__(*arguments, **named)

    def one_head(self, query, key, value):
        if self.calls <= 2:
            return attend(query, key, value)
        return listed_reference(query, key, value, self.lists, (16, 8))


@pytest.mark.system
def test_a_video_is_the_pipelines(tmp_path):
    """Of two steps and two layers, the second step's second layer has lists."""
    config = make_config(*SIZE, *TEXTS)
    pipeline = reference.load(tiny.checkpoint("text"), config)
    pipeline.transformer.blocks[1].attn1.set_processor(Listed(masks.radial((5, 7, 5), *even(175, 16, 8), 8)))
    expected = reference.make(pipeline, config, decoded=False)[0][None]
    shape = "attention.self.sparse={kind:radial,keep:0.4,block_q:16,block_kv:8,dense_above:0.95,dense_layers:1}"
    overrides = [*tiny.model("text"), *TEXTS, *SIZE, "stages=[text,denoise]"]
    values = results(run_into(tmp_path / "run", *overrides, shape))
    assert relative_error(values["latents"], expected) < 1e-4
    plain = results(run_into(tmp_path / "plain", *overrides))
    assert relative_error(plain["latents"], expected) > 1e-3


class ListedAtBothSizes(Reference):
    """The same with lists in every call, for the tokens of a coarse and of a full step."""

    def __init__(self, *grids):
        self.grids, self.kind, self.own = {int(np.prod(grid)): grid for grid in grids}, "radial", (None, None)

    def one_head(self, query, key, value):
        blocks = even(len(query), 8, 4)
        lists = masks.radial(self.grids[len(query)], *blocks, len(blocks[1].sizes) // 2)
        return listed_reference(query, key, value, lists, (8, 4))


@pytest.mark.system
def test_coarse_steps_have_lists_of_their_size(tmp_path):
    lists = "attention.self.sparse={kind:radial,keep:0.5,block_q:8,block_kv:4}"
    overrides = [*tiny.model("text"), *SHORT, COARSE, lists]
    values = results(run_into(tmp_path / "run", *overrides, "stages=[text,coarse,denoise]"))
    expected = in_torch("text", make_config(*overrides), values, ListedAtBothSizes((2, 2, 2), (2, 4, 4)))
    assert relative_error(values["latents"], expected) < 1e-4


@pytest.mark.parametrize("overrides, message", [
    (["model=turbowan21_t2v_14b", "sparse=radial"], "is trained for sla"),
    (["sparse=radial", "attention.self.sparse.dense_above=1.5"], "dense_above=1.5: a share of noise"),
    (["sparse=band", "attention.self.sparse.dense_layers=-1"], "dense_layers=-1: how many"),
    (["model=turbowan21_t2v_14b", "attention.self.sparse.dense_layers=2"], "is trained for all steps and layers"),
    (["model=wan21_t2v_14b", "mesh=v6e_8", "attention=splash_v6e", "sparse=band"], "use sparse=band_tpu"),
    (["model=hunyuan15_t2v_480p", "sparse=radial"], "not for models of this family"),
    (["model=wan21_vace_14b", "pipeline=vace", "sparse=radial"], "control blocks"),
    (["model=wan22_fun_control_a14b", "sparse=radial", "video=clip.mp4"], "has a reference's"),
    (["model=wan22_fun_control_a14b", "attention.self.window=64", "video=clip.mp4"], "behind the video's"),
])
def test_what_cannot_be_is_told(overrides, message):
    size = ["resolution=480p"] if overrides[0].startswith("model=") else []
    with pytest.raises(ConfigError, match=message):
        validate(make_config(*overrides, *size), files="none")
