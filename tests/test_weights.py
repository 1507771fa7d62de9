"""Loading: what goes where, what is refused, and that host memory never holds a second copy."""
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from tests import tiny
from tests.conftest import ROOT, make_config
from wan_torchax import interruption
from wan_torchax.config.schema import ConfigError, Rule
from wan_torchax.models.family import ComponentSpec
from wan_torchax.records.fingerprints import fingerprint
from wan_torchax.runtime import checkpoint, reading, weights


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def small_module():
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16))
    module._keep_in_fp32_modules = ["1"]
    return module


def plan(mesh, dtype="float32", module=None, gather=None, stacks=(), **rules):
    """A module's arrays; a rule is a pattern and names of dimensions, which stand for mesh axes of the same name."""
    rows = {name: OmegaConf.structured(Rule(*row)) for name, row in rules.items()}
    axes = {"tp": "tp", "dp": "dp", "both": ["dp", "tp"]}
    layout = weights.Layout(mesh, rows, axes, gather, "model.weights.x")
    spec = ComponentSpec(build=lambda architecture: None, stacks=stacks)
    return weights.array_specs(module or small_module(), spec, {}, layout, dtype)


@pytest.mark.parametrize("spec", [["tp"], [None, "tp"], ["dp", "tp"]], ids=str)
@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "float8_e4m3fn"])
def test_plan_and_load_put_every_part_where_the_table_says(mesh, tmp_path, spec, stored_as):
    shapes = {"0.weight": (16, 8), "0.bias": (16,), "1.weight": (16,), "1.bias": (16,)}
    stored = {name: torch.randn(shape).to(getattr(torch, stored_as)) for name, shape in shapes.items()}
    save_torch(stored, tmp_path / "model.safetensors")
    tensors, seen = plan(mesh, "bfloat16", matrix=(r"0\.weight", spec), bias=(r"0\.bias", ["tp"])), []
    weights.check(tensors, tmp_path)
    arrays = weights.load(tensors, tmp_path, seen.append)
    assert arrays["0.weight"].sharding.spec == jax.sharding.PartitionSpec(*spec)
    assert arrays["0.bias"].addressable_shards[0].data.shape == (4,)
    assert arrays["0.weight"].dtype == jnp.bfloat16 and arrays["1.weight"].dtype == jnp.float32
    assert sum(seen) == 16 * 9 * 2 + 2 * 16 * 4
    for name, array in arrays.items():
        cast = stored[name].to(getattr(torch, array.dtype.name)).float().numpy()
        numpy.testing.assert_array_equal(numpy.asarray(array).astype("float32"), cast)


def test_weights_stored_as_integers_are_refused(mesh, tmp_path):
    """They would need a scale that this model does not have."""
    others = {name: numpy.zeros(16) for name in ("0.bias", "1.weight", "1.bias")}
    save_file({"0.weight": numpy.zeros((16, 8), "int8")} | others, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"0.weight: stored as I8, which is none of F64, F32, F16, BF16"):
        weights.check(plan(mesh), tmp_path)


@pytest.mark.parametrize(
    "rules, message",
    [
        (dict(typo=(r"9\..*", ["tp"])), "model.weights.x.typo: pattern .* matches nothing"),
        (
            dict(one=(r"0\..*", ["tp"]), two=(r".*\.weight", [])),
            "0.weight matches one and two; make their patterns disjoint",
        ),
        (dict(long=(r"0\.bias", ["tp", "dp"])), "0.bias has 1 dimensions, the spec .* has 2; shorten the spec"),
    ],
)
def test_rules_that_do_not_fit_are_refused(mesh, rules, message):
    with pytest.raises(ConfigError, match=message):
        plan(mesh, **rules)


def test_a_rule_of_a_part_that_some_models_have_may_match_nothing(mesh):
    tensors = plan(mesh, odd=(r"0\.weight", [None, "both"]), more=(r"9\..*", ["tp"], True))
    assert tensors["0.weight"].sharding.spec == jax.sharding.PartitionSpec(None, ("dp", "tp"))


def test_a_name_that_no_mesh_axis_shares_is_whole(mesh):
    tensors = plan(mesh, matrix=(r"0\.weight", ["heads", "tp"]), bias=(r"0\.bias", ["heads"]))
    specs = [tensors[name].sharding.spec for name in ("0.weight", "0.bias")]
    assert specs == [jax.sharding.PartitionSpec(None, "tp"), jax.sharding.PartitionSpec()]


def test_a_dimension_that_does_not_divide_is_refused():
    mesh = jax.make_mesh((3,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    message = r"model.weights.x.linear: 0.weight has 16 in dimension 0, not divisible by tp = 3"
    with pytest.raises(ConfigError, match=message):
        plan(mesh, linear=(r"0\.weight", ["tp"]))


def test_what_no_rule_matches_is_whole_on_every_device_and_told(mesh):
    lines = weights.summary(plan(mesh, linear=(r"0\..*", ["tp"])))
    assert any("(replicated)" in line and "2 tensors" in line for line in lines)


def blocks(count=3):
    with torch.device("meta"):
        module = torch.nn.Module()
        module.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 16) for _ in range(count))
        module.head = torch.nn.Linear(8, 16)
    return module


def test_equal_blocks_are_one_array_with_the_layer_in_front(mesh):
    rules = dict(matrix=(r"(blocks\.\d+|head)\.weight", ["tp"]))
    tensors = plan(mesh, module=blocks(), stacks=("blocks",), **rules)
    assert tensors.keys() == {"blocks.*.weight", "blocks.*.bias", "head.weight", "head.bias"}
    stacked = tensors["blocks.*.weight"]
    assert stacked.shape == (3, 16, 8) and stacked.sources == [f"blocks.{layer}.weight" for layer in range(3)]
    assert stacked.sharding.spec == jax.sharding.PartitionSpec(None, "tp")
    assert tensors["head.weight"].sharding.spec == jax.sharding.PartitionSpec("tp")
    assert plan(mesh, module=blocks(), **rules).keys() == {name for name, _ in blocks().named_parameters()}


def test_matrices_that_are_gathered_lie_in_parts_by_rows(mesh):
    rules = dict(matrix=(r"(blocks\.\d+|head)\.weight", [None, "heads"]), bias=(r"blocks\.\d+\.bias", ["heads"]))
    tensors = plan(mesh, module=blocks(), stacks=("blocks",), gather="dp", **rules)
    specs = {name: tensor.sharding.spec for name, tensor in tensors.items()}
    whole = jax.sharding.PartitionSpec()
    assert specs == {
        "blocks.*.weight": jax.sharding.PartitionSpec(None, "dp"), "blocks.*.bias": whole, "head.weight": whole,
        "head.bias": whole,
    }, "the blocks' matrices alone"


def test_layers_of_one_array_have_one_rule(mesh):
    rules = dict(some=(r"blocks\.[01]\.weight", ["tp"]), last=(r"blocks\.2\.weight", []))
    with pytest.raises(ConfigError, match=r"layers of blocks.0.weight, one array, match different rules"):
        plan(mesh, module=blocks(), stacks=("blocks",), **rules)


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(mesh, tmp_path):
    stored = {
        "0.weight": numpy.zeros((16, 9), "float32"),
        "0.bias": numpy.zeros(16, "float32"),
        "extra": numpy.zeros(1),
    }
    save_file(stored, tmp_path / "a.safetensors")
    tensors = plan(mesh)
    with pytest.raises(ConfigError) as error:
        weights.check(tensors, tmp_path)
    listed = "missing: 1.weight", "unexpected: extra", "0.weight: shape (16, 9) in the checkpoint, (16, 8) in the model"
    assert all(text in str(error.value) for text in listed)
    with pytest.raises(ConfigError, match="missing: 1.weight") as error:
        weights.check(tensors, tmp_path, ignored=("extra",))
    assert "unexpected: extra" not in str(error.value)


def test_only_safetensors_are_read(mesh, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="model.bin can run code when opened and is not read"):
        checkpoint.index(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        checkpoint.index(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"0.bias": numpy.zeros(16)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="0.bias is in a.safetensors and in b.safetensors; keep one set"):
        checkpoint.index(tmp_path)


@pytest.mark.parametrize(
    "path, message",
    [("no/such/folder", "neither a local folder"), ("some-org/some-model", "the Hub cannot be reached")],
)
def test_absent_checkpoints_are_told(path, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint.find(make_config(f"model.path={path}"), "transformer")


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no folder transformer/"):
        checkpoint.find(make_config(f"model.path={tmp_path}"), "transformer")


def test_an_architecture_that_contradicts_the_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_layers": 30, "eps": 1e-6, "_class_name": "X"}))
    spec = ComponentSpec(lambda architecture: None)
    found = checkpoint.read_architecture(tmp_path, {"num_layers": 30}, "transformer", spec)
    assert found == {"num_layers": 30, "eps": 1e-6}
    with pytest.raises(ConfigError, match="num_layers: 30 in the checkpoint, 40 in the config"):
        checkpoint.read_architecture(tmp_path, {"num_layers": 40}, "transformer", spec)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        checkpoint.read_architecture(tmp_path, {}, "transformer", spec)


@pytest.fixture
def component(tmp_path):
    """A component's folder with a file larger than what is sampled of it."""
    folder = tmp_path / "model" / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": numpy.random.default_rng(0).random((1024, 2048)).astype("float32")}, folder / "a.safetensors")
    return folder


def change_a_tensor(folder):
    save_file({"weight": numpy.random.default_rng(1).random((1024, 2048)).astype("float32")}, folder / "a.safetensors")


CHANGES = {
    "another fine-tune of the same shape": change_a_tensor,
    "a file more": lambda folder: (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes()),
    "another name": lambda folder: (folder / "a.safetensors").rename(folder / "c.safetensors"),
    "another config": lambda folder: (folder / "config.json").write_text("{ }"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_changes_with_the_files(component, change):
    before = fingerprint([component])
    assert before == fingerprint([component]) and len(before) == 16
    CHANGES[change](component)
    assert fingerprint([component]) != before


def test_a_checkpoints_folder_may_move(component, tmp_path):
    before = fingerprint([component])
    assert fingerprint([component.parent.rename(tmp_path / "elsewhere") / "transformer"]) == before


@pytest.mark.parametrize("spec", [("x",), (None, "x")])
def test_a_change_is_merged_some_rows_at_a_time(spec, tmp_path, monkeypatch):
    """Each device's part in three goes, of which the last overlaps the one before; a layer that nothing is added to in
    one."""
    monkeypatch.setattr(weights, "SENT_NUMBERS", 24)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, *spec))
    draw = numpy.random.default_rng(0).standard_normal
    stack, ups, downs = (draw((2, *shape)).astype("float32") for shape in ((22, 6), (22, 2), (2, 6)))
    save_file({"0": stack[0], "1": stack[1]}, tmp_path / "model.safetensors")
    (tmp_path / "adapter").mkdir()
    factors = {"up": ups[0], "down": downs[0], "up2": ups[1], "down2": downs[1]}
    save_file(factors, tmp_path / "adapter" / "x.safetensors")
    up, down, up2, down2 = map(checkpoint.index(tmp_path / "adapter").get, factors)
    changes = {"1": [weights.Change(0.5, (up, down)), weights.Change(2.0, (up2, down2))]}
    tensor = weights.ArraySpec(stack.shape, "float32", sharding, "x", ["0", "1"], stacked=True)
    shape, begins = weights.some_rows((22, 6), weights.layer_sharding(tensor))
    assert (shape, begins) == {"x": ((8, 6), [0, 4, 7]), None: ((8, 6), [0, 8, 14])}[spec[0]]
    loaded = weights.load({"stack": tensor}, tmp_path, lambda count: None, changes=changes)["stack"]
    expected = numpy.stack([stack[0], stack[1] + 0.5 * ups[0] @ downs[0] + 2 * ups[1] @ downs[1]])
    numpy.testing.assert_allclose(loaded, expected, rtol=1e-5, atol=1e-6)
    assert loaded.sharding == sharding


STREAM = """
import sys, jax, torch
from pathlib import Path
from wan_torchax.models.family import ComponentSpec
from wan_torchax.records.provenance import peak_host_bytes
from wan_torchax.runtime import weights
from wan_torchax.runtime.checkpoint import read_header
imported, layers, width, depth = peak_host_bytes(), 12, 4096, 2
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(depth))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
with torch.device("meta"):
    model = Model()
mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
spec, folder = ComponentSpec(lambda _: model, stacks=("blocks",)), Path(sys.argv[1])
tensors = weights.array_specs(model, spec, {}, weights.Layout(mesh), "float32")
header, factors = read_header(folder / "adapter" / "x.safetensors"), {}
for name in (name for name in weights.source_shapes(tensors) if "maps.0" in name):
    factors[name] = [weights.Change(0.5, (header[f"{name}.up"], header[f"{name}.down"]))]
arrays = weights.load(tensors, folder, lambda count: None, changes=factors)
print(imported, sum(tensor.bytes for tensor in tensors.values()), peak_host_bytes())
"""


@pytest.mark.system
def test_streaming_never_holds_a_second_copy(tmp_path):
    """1.5 GiB of weights, stacked for the scan, an adapter of rank 64 merged on the way: peak resident memory under the
    device's bytes plus 1 GiB."""
    layers, width, depth, rank = 12, 4096, 2, 64
    for layer in range(layers):  # one file a layer
        tiny.write_zeros(tmp_path / f"{layer}.safetensors", {
            f"blocks.{layer}.maps.{index}.weight": (width, width) for index in range(depth)
        })
    (tmp_path / "adapter").mkdir()
    names = [f"blocks.{layer}.maps.0.weight" for layer in range(layers)]  # half of them
    shapes = {f"{name}.up": (width, rank) for name in names} | {f"{name}.down": (rank, width) for name in names}
    tiny.write_zeros(tmp_path / "adapter" / "x.safetensors", shapes)
    command = [sys.executable, "-c", STREAM, str(tmp_path)]
    optimised = os.environ | {"XLA_FLAGS": ""}  # or the products take a minute
    answer = subprocess.run(command, cwd=ROOT, env=optimised, capture_output=True, text=True, check=True)
    imported, on_device, peak = map(int, answer.stdout.split())
    assert on_device == 3 * 2**29
    assert peak < on_device + max(2**30, imported + 2**29)  # torch's CUDA build alone takes 1 GiB


def loads_of(folder):
    """Every tensor of a folder, to the first device."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [reading.Load([stored], "float32", stored.shape, one) for stored in checkpoint.index(folder).values()]


def test_readers_that_wait_hold_no_memory(tmp_path):
    save_file({"a": numpy.arange(8.0)}, tmp_path / "model.safetensors")
    reading_on = reading.read_ahead(loads_of(tmp_path))
    (part,) = next(reading_on).values()
    memory = weakref.ref(part.base)  # numpy names the one array that all views of the buffer share
    del part
    deadline = time.monotonic() + 60
    while memory() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert memory() is None
    reading_on.close()


LEFT_OPEN = """
import sys
from pathlib import Path

import jax

from wan_torchax.runtime import checkpoint, reading

one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
stored = checkpoint.index(Path(sys.argv[1])).values()
left_open = reading.read_ahead([reading.Load([tensor], "float32", tensor.shape, one) for tensor in stored])
next(left_open)
"""


def test_reading_that_nobody_ended_does_not_keep_python_from_ending(tmp_path):
    save_file({"a": numpy.arange(8.0), "b": numpy.arange(4.0)}, tmp_path / "model.safetensors")
    subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path)], cwd=ROOT, check=True, timeout=100)


def test_an_interruption_waits_for_no_reader(tmp_path, monkeypatch):
    """A disk on the network may never answer."""
    save_file({"a": numpy.arange(8.0)}, tmp_path / "model.safetensors")
    answer = threading.Event()
    monkeypatch.setattr(reading, "read_rows", lambda *_: answer.wait(120))
    monkeypatch.setattr(interruption, "asked", None)
    threading.Timer(0.3, interruption.remember, [signal.SIGINT, None]).start()
    began = time.monotonic()
    with pytest.raises(interruption.Interrupted):
        list(reading.read_ahead(loads_of(tmp_path)))
    assert time.monotonic() - began < 60
    answer.set()
