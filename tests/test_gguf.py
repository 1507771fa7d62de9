"""GGUF: what llama.cpp's own package writes is read, and dequantized on the devices to the same numbers."""
import gguf
import jax
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file

from tests.conftest import ROOT, SMALL, generate_into, results
from tests.test_files import in_names_of_wan
from wan_torchax.config.commandline import compose, rewrite
from wan_torchax.config.schema import ConfigError, Rule
from wan_torchax.config.validation import validate
from wan_torchax.kernels.dequantized import FORMATS, dequantize
from wan_torchax.models.family import ComponentSpec
from wan_torchax.runtime import checkpoint, recognition, weights
from wan_torchax.runtime.formats import BLOCKS

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ROWS, COLUMNS = 16, 512


def blocks(format, rows=ROWS, columns=COLUMNS, seed=0):
    """Random blocks whose scales are finite."""
    numbers, size = BLOCKS[format]
    raw = numpy.random.default_rng(seed).integers(0, 256, (rows, columns // numbers * size), dtype=numpy.uint8)
    for place in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2),
                  "Q5_K": (0, 2)}.get(format, (0,)):
        raw.reshape(rows, -1, size)[..., place + 1] &= 0x3B  # the float16's high byte: no infinity, no NaN
    return raw


def reference(raw, format):
    return gguf.quants.dequantize(raw, Type[format]).astype("float32")


def test_every_format_has_its_size():
    for format, (size, _) in FORMATS.items():
        assert (BLOCKS[format][0], size) == BLOCKS[format] == gguf.GGML_QUANT_SIZES[Type[format]]
    assert FORMATS.keys() == BLOCKS.keys()


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_are_dequantized_bit_for_bit(format):
    raw = blocks(format)
    expected = reference(raw, format)
    assert numpy.isfinite(expected).all() and len(numpy.unique(expected)) > 100
    found = jax.jit(dequantize, static_argnums=1)(raw, format)
    numpy.testing.assert_array_equal(numpy.asarray(found).view("uint32"), expected.view("uint32"))


# ---------------------------------------------------------------- files


def write(path, tensors, about=()):
    """A file by llama.cpp's package; tensors: name -> (raw rows, format), or an array."""
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_array("tokens", ["a", "word"])
    for name, value in about:
        writer.add_array(name, value)
    for name, tensor in tensors.items():
        raw, format = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, raw, raw_dtype=format and Type[format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Model(torch.nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        blocks = (torch.nn.ModuleDict({"map": torch.nn.Linear(COLUMNS, ROWS)}) for _ in range(layers))
        self.blocks, self.head = torch.nn.ModuleList(blocks), torch.nn.Linear(COLUMNS, ROWS, bias=False)


def specs_of(axes, dtype):
    with torch.device("meta"):
        module = Model()
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = {"all": OmegaConf.structured(Rule(r".*weight", axes))}
    spec = ComponentSpec(lambda architecture: None, stacks=("blocks",))
    layout = weights.Layout(mesh, rules, {"tp": "tp"}, None, "model.weights.x")
    return weights.array_specs(module, spec, {}, layout, dtype)


def model_file(path, format):
    """Three layers and a head, and the numbers they stand for."""
    names = [*(f"blocks.{layer}.map.weight" for layer in range(3)), "head.weight"]
    raw = {name: blocks(format, seed=seed) for seed, name in enumerate(names)}
    biases = {f"blocks.{layer}.map.bias": numpy.full(ROWS, layer, "float32") for layer in range(3)}
    write(path, {name: (rows, format) for name, rows in raw.items()} | biases)
    return {name: reference(rows, format) for name, rows in raw.items()}


@pytest.mark.parametrize("axes", [["tp"], [None, "tp"]], ids=str)
@pytest.mark.parametrize("format", ["Q8_0", "Q4_K"])
def test_a_file_is_loaded_as_the_numbers_it_stands_for(format, axes, tmp_path):
    expected, specs = model_file(tmp_path / "a.gguf", format), specs_of(axes, "float32")
    weights.check(specs, tmp_path / "a.gguf")
    arrays = weights.load(specs, tmp_path / "a.gguf", lambda count: None)
    assert arrays["head.weight"].sharding == specs["head.weight"].sharding
    numpy.testing.assert_array_equal(arrays["head.weight"], expected["head.weight"])
    for layer in range(3):
        numpy.testing.assert_array_equal(arrays["blocks.*.map.weight"][layer], expected[f"blocks.{layer}.map.weight"])
    assert numpy.asarray(arrays["blocks.*.map.bias"])[2, 0] == 2


def test_adapters_are_merged_into_dequantized_weights(tmp_path):
    expected, specs = model_file(tmp_path / "a.gguf", "Q5_0"), specs_of(["tp"], "float32")
    rng = numpy.random.default_rng(9)
    up, down = rng.normal(size=(ROWS, 2)).astype("float32"), rng.normal(size=(2, COLUMNS)).astype("float32")
    save_file({"up": up, "down": down}, tmp_path / "x.safetensors")
    header = checkpoint.read_header(tmp_path / "x.safetensors")
    names = "blocks.1.map.weight", "head.weight"
    changes = {name: [weights.Change(0.5, (header["up"], header["down"]))] for name in names}
    arrays = weights.load(specs, tmp_path / "a.gguf", lambda count: None, changes=changes)
    found = arrays["blocks.*.map.weight"][1], arrays["head.weight"]
    for name, array in zip(names, found):
        numpy.testing.assert_allclose(array, expected[name] + 0.5 * up @ down, rtol=1e-5, atol=1e-4)
    numpy.testing.assert_array_equal(arrays["blocks.*.map.weight"][0], expected["blocks.0.map.weight"])


def test_plain_numbers_and_original_shapes(tmp_path):
    tensor = numpy.arange(48, dtype="float32").reshape(4, 12)
    write(tmp_path / "a.gguf", {"a": tensor, "b": tensor.astype("float16")},
          [("comfy.gguf.orig_shape.a", [4, 3, 1, 2, 2])])
    found = checkpoint.index(tmp_path / "a.gguf")
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        "a": ("F32", (4, 3, 1, 2, 2)), "b": ("F16", (4, 12))}
    assert (numpy.fromfile(found["b"].file, "float16", 48, offset=found["b"].offset) == tensor.ravel()).all()


def test_formats_that_are_not_implemented_are_named(tmp_path):
    write(tmp_path / "a.gguf", {"a": (numpy.zeros((4, 54), "uint8"), "TQ1_0")})
    with pytest.raises(ConfigError, match="a is in GGUF's type 34; F32, F16, Q4_0, .* are implemented"):
        checkpoint.index(tmp_path / "a.gguf")


@pytest.mark.system
def test_a_video_from_a_gguf_file(tmp_path):
    """The demo's transformer in blocks of eight bits: the video is that of the numbers that they stand for."""
    demo = ROOT / "models" / "demo" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors, plain = {}, {}
    for name, tensor in in_names_of_wan(load_file(demo)).items():
        tensor = tensor.astype("float32")
        in_blocks = tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and "blocks" in name
        tensors[name] = (gguf.quants.quantize(tensor, Type.Q8_0), "Q8_0") if in_blocks else tensor
        plain[name] = reference(*tensors[name]) if in_blocks else tensor
    write(tmp_path / "demo-Q8_0.gguf", tensors)
    save_file(plain, tmp_path / "demo.safetensors")
    made = []
    for name in ("demo-Q8_0.gguf", "demo.safetensors"):
        overrides = recognition.with_models(rewrite([f"model.path={tmp_path / name}"]))
        config = compose([*rewrite([*SMALL, "steps=2", "stages=[text,denoise]"]), *overrides])
        validate(config)
        folder = tmp_path / "run" / name
        folder.mkdir(parents=True)
        generate_into(config, folder, overrides)
        made.append(results(folder)["latents"])
    numpy.testing.assert_array_equal(*made)
