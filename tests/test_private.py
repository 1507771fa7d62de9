"""What the project uses of others without their promise: a canary for each entry of private.py, and none elsewhere."""
import ast
import asyncio
import copy
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy
import pytest
from packaging.version import Version

from tests.conftest import ROOT
from wan_torchax import private
from wan_torchax.devices import start

FOLDERS = ("kernels", "wan_torchax", "comfyui", "benchmarks", "tools")
SOURCES = [ROOT / "run.py", ROOT / "patches.py", *(file for name in FOLDERS for file in (ROOT / name).rglob("*.py"))]
INTERNAL = ("jax.experimental.mosaic", "hydra.core.global_hydra", "hydra.core.override_parser", "hydra.version")
# Names with an underscore that their packages document.
DOCUMENTED = {
    "_exit": "Python's os",
    "_getframe": "Python's sys",
    "_asdict": "Python's named tuples",
    "_replace": "Python's named tuples",
    "_target_": "a key of Hydra's configs",
    "_foreach_add_": "torch",
    "_foreach_lerp_": "torch",
    "_foreach_mul_": "torch",
}


# ---------------------------------------------------------------- the list


@pytest.mark.parametrize("name", private.ENTRIES)
def test_an_entry_is_complete(name):
    entry = private.ENTRIES[name]
    assert entry.packages and entry.why and entry.until and getattr(private, name).__doc__
    assert f"test_{name}" in globals(), f"private.{name} has no canary here"


@pytest.mark.parametrize("package", private.VERSIONS)
def test_what_is_installed_was_checked(package):
    """An older version is an error; a newer one is not: that is what the canaries are for."""
    installed, (first, last) = Version(version(package)).release, private.VERSIONS[package]
    assert installed >= Version(first).release
    if installed > Version(last).release:
        warnings.warn(f"{package} {version(package)}: private.py was checked with {first} to {last}", stacklevel=1)


def test_every_package_has_its_versions():
    assert {package for entry in private.ENTRIES.values() for package in entry.packages} == set(private.VERSIONS)


def test_it_costs_nothing_to_import():
    program = "import sys; before = set(sys.modules); import wan_torchax.private; print(*set(sys.modules) - before)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"jax", "torch", "torchax", "diffusers", "transformers", "numpy", "hydra"} & set(answer.stdout.split())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def private_names(tree: ast.AST):
    """(line, name) of all that a file uses of others: imports, attributes, also by their names, and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in (".".join([*base, alias.name]) for alias in node.names):
                if any(map(is_private, module.split("."))) or f"{module}.".startswith(tuple(f"{x}." for x in INTERNAL)):
                    yield node.lineno, module
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if is_private(node.attr) and not own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            named = node.args[1:2] if called in ("getattr", "setattr", "hasattr", "delattr") else []
            names = [name.value for name in named if isinstance(name, ast.Constant)]
            yield from ((node.lineno, name) for name in names if is_private(name))
            yield from ((node.lineno, word.arg) for word in node.keywords if is_private(word.arg or ""))


def test_nothing_private_is_used_elsewhere():
    used = [
        (name, f"{file.relative_to(ROOT)}:{line}")
        for file in SOURCES if file.name != "private.py" for line, name in private_names(ast.parse(file.read_text()))
    ]
    undocumented = [(name, place) for name, place in used if name not in DOCUMENTED]
    assert not undocumented, "belongs into wan_torchax/private.py, with a canary"
    assert {name for name, _ in used} == set(DOCUMENTED), "what is listed is used"


@pytest.mark.parametrize("line", [
    "from jax._src import xla_bridge", "import jax._src.core", "from jax.experimental.mosaic import gpu",
    "from jax.experimental.mosaic.gpu import utils", "node._get_node(name)", "getattr(module, '_hidden', None)",
    "Array(_registers=registers)", "module._flag = False",
])
def test_such_lines_are_seen(line):
    assert list(private_names(ast.parse(line)))


@pytest.mark.parametrize("line", [
    "from jax.experimental.pallas import mosaic_gpu", "from __future__ import annotations", "self._own", "x.__name__",
])
def test_and_such_lines_are_not(line):
    assert not list(private_names(ast.parse(line)))


# ---------------------------------------------------------------- JAX


def compile_anew(constant):
    jax.jit(lambda x: x * constant).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


@pytest.fixture
def empty_cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    start.use_cache(str(tmp_path))
    yield tmp_path
    start.use_cache(before)


def test_uncached(empty_cache):
    other = threading.Thread(target=compile_anew, args=(2.5,))
    with private.uncached():
        compile_anew(1.5)
        assert not list(empty_cache.iterdir())
        other.start()
        other.join()
    assert list(empty_cache.iterdir()), "another thread goes on with the cache"
    before = len(list(empty_cache.iterdir()))
    compile_anew(3.5)
    assert len(list(empty_cache.iterdir())) > before


def test_remove_damaged_entries(empty_cache):
    compile_anew(4.5)
    (entry,) = empty_cache.glob("*-cache")
    entry.write_bytes(b"damaged")
    jax.clear_caches()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        compile_anew(4.5)
    assert entry.read_bytes() != b"damaged"


def test_has_devices():
    program = "import jax; from wan_torchax.private import has_devices as has; print(has(), len(jax.devices()), has())"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "8", "True"]


def test_find_cluster(monkeypatch):
    slurm = {"JOB_ID": "5", "STEP_NODELIST": "first,second", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    coordinator, *place = private.find_cluster(None, None, None, 5)
    assert coordinator.startswith("first:") and place == [2, 1]
    assert private.find_cluster("host:1", 4, None, 5) == ("host:1", 4, 1)


def test_cudnn_attention(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))
    query, key = (jax.ShapeDtypeStruct((2, tokens, 4, 64), jnp.bfloat16) for tokens in (256, 128))
    program = jax.jit(lambda *arrays: private.cudnn_attention(*arrays, scale=0.125)).trace(query, key, key)
    out, log_sum = program.out_info
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (log_sum.shape, log_sum.dtype) == ((2, 4, 256), jnp.float32)
    assert "__cudnn$fmha" in program.lower(lowering_platforms=("cuda",)).as_text()
    counted = jax.jit(lambda *arrays: private.cudnn_attention(*arrays[:3], scale=0.125, counts=arrays[3]))
    program = counted.trace(query, key, key, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert [one.shape for one in program.out_info] == [out.shape, log_sum.shape]
    assert '"mask_type": "PADDING"' in program.lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')


def lowered_kernel(write):
    """A kernel for GPUs as text, of which `write` makes a part."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(_):
        plgpu.inline_mgpu()(lambda _: write())()

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.int32))
    return jax.jit(kernel).trace().lower(lowering_platforms=("cuda",)).as_text()


def test_mosaic_gpu():
    from jax.extend.mlir import ir

    mosaic = private.mosaic_gpu()

    def write():
        number, arguments = ir.IntegerType.get_signless(32), [mosaic.warpgroup_idx(sync=False)]
        told = mosaic.llvm.inline_asm(number, arguments, "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        array = mosaic.FragmentedArray.splat(told, (), is_signed=True)
        assert array.shape == () and array.registers.size == 1

    assert "mov.b32 $0, $1;" in lowered_kernel(write)


def test_fragmented_array():
    """Of 64 x 32 values each of 128 threads has 16, four to a register."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith

    layout, arrays = private.mosaic_gpu().WGMMA_LAYOUT_8BIT, []

    def write():
        small = ir.Float8E4M3FNType.get()
        four = ir.VectorType.get((4,), small)
        zeros = arith.constant(four, ir.DenseElementsAttr.get_splat(four, ir.FloatAttr.get(small, 0)))
        registers = numpy.full(layout.registers_shape((64, 32)), zeros, dtype=object)
        array = private.fragmented_array(registers, layout)
        assert array.mlir_dtype == small
        arrays.append(array)

    lowered_kernel(write)
    assert [(array.shape, array.registers.size, array.layout) for array in arrays] == [((64, 32), 4, layout)]


def test_jax_settings():
    with jax.default_matmul_precision("float32"):
        assert private.jax_settings()["jax_default_matmul_precision"] == "float32"
    settings = private.jax_settings()
    assert settings["jax_enable_x64"] is False and "jax_compilation_cache_dir" in settings


def test_on_compilation(empty_cache):
    events = []
    private.on_compilation(lambda: events.append("found"), lambda: events.append("compiled"))
    compile_anew(4.5)
    assert events == ["compiled"]
    compile_anew(4.5)
    assert sorted(events) == ["compiled", "compiled", "found"]


# ---------------------------------------------------------------- torch and torchax


def test_missing_overloads():
    import torch

    with private.missing_overloads(lambda op, overload: f"{op}/{overload}" if overload == "old" else None):
        assert torch.ops.aten.add.old == "aten::add/old"
        assert torch.ops.aten.add.Tensor(torch.ones(1), torch.ones(1)) == 2
        with pytest.raises(AttributeError):
            torch.ops.aten.add.new  # noqa: B018
    with pytest.raises(AttributeError):
        torch.ops.aten.add.old  # noqa: B018


def test_overridden_ops():
    import torch

    from wan_torchax.patches import interop, torchax

    def silu():
        with environment:
            return interop.jax_view(torch.nn.functional.silu(interop.torch_view(jnp.ones(())))).item()

    environment = torchax.default_env()
    before = silu()
    with private.overridden_ops(environment, {torch.nn.functional.silu: lambda x, inplace: x * 3}):
        assert silu() == 3
    assert silu() == before != 3


def test_dispatch_mode():
    import torch

    seen = []

    class Names(private.dispatch_mode()):
        def __torch_dispatch__(self, op, kinds, arguments=(), keywords=None):
            seen.append(op.overloadpacket.__name__)
            return op(*arguments, **(keywords or {}))

    with Names():
        torch.ones(2).sin()
    assert seen == ["ones", "sin"]


def test_has_lowering():
    import torch

    from wan_torchax.patches import torchax

    environment = torchax.default_env()
    assert private.has_lowering(environment, torch.ops.aten.sin.default)
    assert not private.has_lowering(environment, torch.ops.aten.segment_reduce.default)


# ---------------------------------------------------------------- diffusers and transformers


def test_hide_torch_xla(monkeypatch):
    from diffusers.utils import import_utils, is_torch_xla_available

    monkeypatch.setattr(import_utils, "_torch_xla_available", True)
    assert is_torch_xla_available()
    private.hide_torch_xla()
    assert not is_torch_xla_available()


def test_float32_parts():
    from diffusers import WanTransformer3DModel
    from transformers import UMT5EncoderModel

    assert {"time_embedder", "norm2"} <= set(private.float32_parts(WanTransformer3DModel, "bfloat16"))
    assert private.float32_parts(UMT5EncoderModel, "float16") == ("wo",)
    assert private.float32_parts(UMT5EncoderModel, "bfloat16") == ()


@pytest.mark.parametrize("draws", [True, False])
def test_given_noise(draws):
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=draws)
    scheduler.set_timesteps(4)
    module = sys.modules[type(scheduler).__module__]
    draw, noise = module.randn_tensor, torch.full((2,), 7.0)
    with private.given_noise(scheduler) as given:
        given[:] = [noise]
        sample = scheduler.step(torch.zeros(2), scheduler.timesteps[0], torch.zeros(2), return_dict=False)[0]
    assert given == ([] if draws else [noise])
    assert module.randn_tensor is draw and (sample.tolist() == [0, 0]) != draws


# ---------------------------------------------------------------- Hydra


def test_hydra_apart(tmp_path):
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import getbase

    with private.hydra_apart():  # as others may have left it
        initialize_config_dir(str(tmp_path), version_base="1.2")
        theirs = GlobalHydra.instance().hydra
        with private.hydra_apart(), initialize_config_dir(str(tmp_path), version_base="1.3"):
            assert GlobalHydra.instance().hydra is not theirs
        assert GlobalHydra.instance().hydra is theirs and str(getbase()) == "1.2"


def test_quick_hydra(tmp_path):
    """The same config as without it, and the same errors; a file's defaults may refer to others."""
    import hydra
    import yaml
    from omegaconf import OmegaConf, _utils

    (tmp_path / "size").mkdir()
    (tmp_path / "colour").mkdir()
    defaults = "defaults: [size: big, colour: '${size}', _self_]"
    (tmp_path / "config.yaml").write_text(f"{defaults}\nother: 1e-3\nday: 2020-01-02\n")
    (tmp_path / "size" / "big.yaml").write_text("pixels: [1, 2.5, true, null, 'x']\n")
    (tmp_path / "colour" / "big.yaml").write_text("red: 010\nname: ${other}\n")

    def composed():
        with private.hydra_apart(), hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
            return OmegaConf.to_container(hydra.compose("config"), resolve=True)

    plain, get_loader = composed(), _utils.get_yaml_loader
    with private.quick_hydra():
        assert _utils.get_yaml_loader().__mro__[1].__module__ == "yaml._yaml", "the parser in C"
        assert composed() == plain == {
            "size": {"pixels": [1, 2.5, True, None, "x"]}, "colour": {"red": 8, "name": 0.001}, "other": 0.001,
            "day": "2020-01-02",
        }
        with pytest.raises(yaml.YAMLError, match="duplicate key a"):
            yaml.load("a: 1\na: 2", Loader=_utils.get_yaml_loader())
        (tmp_path / "size" / "big.yaml").write_text("pixels: [3]\n")
        assert composed()["size"] == {"pixels": [3]}, "what a file says now"
        (tmp_path / "size" / "big.yaml").write_text("pixels: [\n")
        with pytest.raises(yaml.YAMLError, match="big.yaml"):
            composed()
        assert type(OmegaConf.load(tmp_path / "config.yaml").other) is float, "from a path too"
    assert _utils.get_yaml_loader is get_loader


def test_quick_hydra_nodes():
    """Copies and merges of configs inside the block: their own, with flags and types, each node with its parent."""
    from omegaconf import DictConfig, OmegaConf, ReadonlyConfigError

    from wan_torchax.config import schema

    def copied():
        config = schema.root()
        OmegaConf.set_readonly(config.pipeline, True)
        config.merge_with({"seed": 3, "resolution": {"height": 64}, "ops": {"one": {"op": ["aten.add"]}}})
        return config, config.copy(), copy.deepcopy(config.ops)

    def nodes(node):
        inside = vars(node).get("_content")
        inside = inside.values() if isinstance(inside, dict) else inside if isinstance(inside, list) else ()
        assert all(child._get_parent() is node for child in inside)
        types = type(node), node._metadata.object_type, node._metadata.ref_type, dict(node._metadata.flags or {})
        return [*types, vars(node).get("_val"), *(nodes(child) for child in inside)]

    plain = copied()
    with private.quick_hydra():
        assert DictConfig.__deepcopy__ is private.pickled
        quick = copied()
    assert [nodes(config) for config in quick] == [nodes(config) for config in plain]
    config, twin, part = quick
    with private.quick_hydra(), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: copy.deepcopy(config.ops), range(400)))
    assert config.ops._get_parent() is config, "whoever else copies it"
    assert part._get_parent() is config and part is not config.ops
    twin.seed = 4
    assert config.seed == 3
    with pytest.raises(ReadonlyConfigError):
        twin.pipeline.name = "other"


def test_quick_hydra_looks_for_a_sweep_where_one_is_asked_for():
    """No file of conf/ asks for one, so that without quick_hydra the answer is the same."""
    from hydra._internal.hydra import Hydra
    from omegaconf import OmegaConf

    composed = SimpleNamespace(hydra=SimpleNamespace(mode="MULTIRUN"))
    composes = SimpleNamespace(compose_config=lambda **named: composed)
    assert Hydra.get_mode(composes, "config", []) == "MULTIRUN"
    with private.quick_hydra():
        assert Hydra.get_mode(composes, "config", ["hydra.mode=MULTIRUN"]) == "MULTIRUN"
        assert Hydra.get_mode(composes, "config", ["seed=1"]) is None
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert OmegaConf.select(OmegaConf.load(path), "hydra.mode") is None, path


def test_remember_interpolations():
    """A short text is parsed once, and read as what it refers to is then; a wrong one is an error each time."""
    from omegaconf import OmegaConf, base
    from omegaconf.errors import GrammarParseError

    private.remember_interpolations()
    config = OmegaConf.create({"size": 2, "twice": "${size} and ${size} of this test"})
    assert config.twice == "2 and 2 of this test"
    config.size = 3
    assert config.twice == "3 and 3 of this test"
    short, long = "${size} and ${size} of this test", "${size}" + 200 * "x"
    assert base.parse(short) is base.parse(short) and base.parse(long) is not base.parse(long)
    for _ in range(2):
        with pytest.raises(GrammarParseError):
            config.size = "${of this test"


def test_parse_override():
    parsed = private.parse_override("resolution.height=64")
    assert (parsed.type.name, parsed.package, parsed.key_or_group, parsed.value()) == (
        "CHANGE", None, "resolution.height", 64,
    )
    kinds = [private.parse_override(text).type.name for text in ("+a=1", "++a=1", "~a")]
    assert "CHANGE" not in kinds
    assert private.parse_override("a@b=c").package == "b"
    assert private.parse_override("a=1,2").is_sweep_override() and not parsed.is_sweep_override()


def test_apply_overrides():
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    config = OmegaConf.create({"a": {"b": 1}, "c": None})
    OmegaConf.set_struct(config, True)
    private.apply_overrides(config, ["a.b=2", "c=[1,{d:x}]", "+a.e='f,g'"])
    assert config == {"a": {"b": 2, "e": "f,g"}, "c": [1, {"d": "x"}]}
    with pytest.raises(HydraException, match="unknown"):
        private.apply_overrides(config, ["unknown=1"])


def test_h11_protocol():
    """What serve/connections.py builds on."""
    import h11
    import uvicorn
    from uvicorn.server import ServerState

    async def connect():
        config = uvicorn.Config(None)
        config.load()
        connection, transport = private.h11_protocol()(config, ServerState(), {}), Mock()
        connection.connection_made(transport)
        assert connection in connection.connections and connection.transport is transport
        assert connection.loop is asyncio.get_running_loop()
        connection.data_received(b"GET / HTTP/1.1\r\n")
        assert connection.conn.their_state is h11.IDLE, "headers have not ended"
        connection.connection_lost(None)
        assert connection not in connection.connections

    asyncio.run(connect())
