"""Wrong results that nobody would have noticed: each a case that once gave one."""
import json
import shutil

import numpy
import pytest
from omegaconf import OmegaConf
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.conftest import ROOT, make_config
from wan_torchax.config import inputs
from wan_torchax.config.attention import read_kernel
from wan_torchax.config.frames import open_picture
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.kernels.settings import Kernel
from wan_torchax.models.wan import FAMILY
from wan_torchax.records import outputs
from wan_torchax.records.fingerprints import fingerprint
from wan_torchax.runtime import adapters
from wan_torchax.serve.requests import files_in


def picture(path, colour, size=(64, 64)):
    Image.new("RGB", size, colour).save(path)
    return path


# ---------------------------------------------------------------- pictures


def test_one_frame_of_a_picture_is_that_picture(tmp_path):
    from wan_torchax.models.wan.conditions import first_and_last

    class View:
        config = OmegaConf.create({"resolution": {"frames": 1, "height": 16, "width": 16}, "fit": "cover"})
        geometry = FAMILY.geometry(make_config().model.architecture)

    seen = []

    def encode(frames, pixels):
        seen.append(pixels(range(frames)))
        return numpy.zeros((1, 16, 1, 2, 2), numpy.float32)

    condition = first_and_last(View, {"image": picture(tmp_path / "red.png", "red")}, encode)
    assert seen[0][0, 0].min() == 1 and seen[0][0, 1].max() == -1, "red, not grey"
    assert (condition[:, :4] == 1).all()


def test_first_and_last_picture_need_more_than_one_frame(tmp_path):
    pair = [f"{key}={picture(tmp_path / f'{key}.png', 'red')}" for key in ("image", "last_image")]
    with pytest.raises(ConfigError, match="resolution.frames=1: pipeline=flf2v"):
        validate(make_config("model=wan22_i2v_a14b", "pipeline=flf2v", "resolution=480p", "resolution.frames=1", *pair))


def test_sixteen_bits_of_grey_stay_grey(tmp_path):
    values = numpy.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(numpy.uint16)
    Image.fromarray(values).save(tmp_path / "grey.png")
    pixels = numpy.asarray(open_picture(tmp_path / "grey.png"))[..., 0].astype(int)
    assert numpy.abs(pixels - values / 257).max() <= 1


def test_another_picture_of_the_same_name_has_its_own_size(tmp_path):
    path = picture(tmp_path / "photo.png", "red", (640, 320))
    wide = make_config("model=wan22_i2v_a14b", "resolution=auto", f"image={path}").resolution
    assert wide.width > wide.height
    picture(path, "red", (320, 640))
    tall = make_config("model=wan22_i2v_a14b", "resolution=auto", f"image={path}").resolution
    assert tall.width < tall.height


def test_references_keep_their_order_and_old_ones_go(tmp_path):
    (tmp_path / "inputs").mkdir()
    for number in range(12):
        suffix = "png" if number % 2 else "jpeg"
        picture(tmp_path / "inputs" / f"references.{number}.{suffix}", "red")
    order = [int(path.name.split(".")[1]) for path in files_in(tmp_path)["references"]]
    assert order == [int(path.name.split(".")[1]) for path in inputs.copies(tmp_path, "references")] == list(range(12))
    mine = [picture(tmp_path / f"{name}.png", "blue") for name in "ab"]
    config = make_config("model=wan21_vace_1_3b", "resolution=480p", f"references=[{mine[0]},{mine[1]}]")
    outputs.copy_pictures(tmp_path, config)
    assert sorted(path.name for path in (tmp_path / "inputs").iterdir()) == ["references.0.png", "references.1.png"]


@pytest.mark.parametrize("name", ["photo", "photo.jpg~", "photo.1"])
def test_a_picture_without_a_usual_suffix_is_found_again(tmp_path, name):
    """Pillow reads its content, so a run starts from it, and its copy is what resume and replay start from."""
    Image.new("RGB", (32, 32)).save(tmp_path / name, "PNG")
    config = make_config("model=demo_i2v", f"image='{tmp_path / name}'")
    (tmp_path / "run").mkdir()
    outputs.copy_pictures(tmp_path / "run", config)
    assert [path.read_bytes() for path in inputs.copies(tmp_path / "run", "image")] == [(tmp_path / name).read_bytes()]


# ---------------------------------------------------------------- adapters


def lora(path, settings=None, **changed):
    names = [f"transformer.blocks.{block}.attn1.to_{name}" for block in range(2) for name in "qk"]
    tensors = {f"{name}.lora_A.weight": numpy.ones((4, 128), "float32") for name in names}
    tensors |= {f"{name}.lora_B.weight": numpy.ones((128, 4), "float32") for name in names}
    metadata = None if settings is None else {"lora_adapter_metadata": json.dumps(settings)}
    save_file(tensors | changed, path, metadata)
    return path


def scales(path):
    contents = adapters.parse(path, FAMILY.adapters)
    return {module: adapters.scale_of(contents, module, 4) for module in contents.modules}


def test_alpha_patterns_are_regular_expressions_as_in_peft(tmp_path):
    from peft.utils.other import get_pattern_key  # what PEFT itself asks

    patterns = {r"blocks\.0\..*to_q": 8, "to_k": 2, "^blocks.1.attn1.to_q": 16, "o_q": 100}
    settings = {"transformer.lora_alpha": 4, "transformer.alpha_pattern": patterns}
    found = scales(lora(tmp_path / "a.safetensors", settings))
    assert found == {
        module: patterns.get(get_pattern_key(patterns, module), 4) / 4 for module in found
    } and set(found.values()) == {2.0, 0.5, 4.0}


@pytest.mark.parametrize("pattern", ["blocks.(", "(.*.*)*x", "a*b*c*d*e*", "x" * 500])
def test_a_pattern_that_is_none_or_too_much_is_refused_by_its_name(tmp_path, pattern):
    settings = {"transformer.lora_alpha": 4, "transformer.alpha_pattern": {pattern: 8}}
    with pytest.raises(ConfigError, match="a.safetensors: alpha_pattern"):
        scales(lora(tmp_path / "a.safetensors", settings))


def test_dora_without_its_vectors_is_not_merged_as_plain(tmp_path):
    with pytest.raises(ConfigError, match="a.safetensors: is DoRA by its settings"):
        scales(lora(tmp_path / "a.safetensors", {"transformer.lora_alpha": 4, "transformer.use_dora": True}))


def test_what_is_not_finite_in_an_adapter_is_the_adapters(tmp_path, two_layers, generate):
    broken = numpy.full((4, 128), numpy.nan, "float32")
    file = lora(tmp_path / "style.safetensors", **{"transformer.blocks.0.attn1.to_q.lora_A.weight": broken})
    with pytest.raises(ConfigError, match="style.safetensors: has numbers that are not finite"):
        generate(*two_layers, f"adapter.style.path={file}", "stages=[text,denoise]")


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("override", ["eight_bits=true", "fold_scale=false", "block_q=64", "interpret=true"])
def test_what_kernel_auto_would_drop_is_refused(override):
    with pytest.raises(ConfigError, match=rf"attention.self.{override.partition('=')[0]}=\S+ kernel=auto brings"):
        validate(make_config(f"attention.self.{override}"))


def test_what_may_stand_beside_kernel_auto_holds():
    part = Kernel(kernel="auto", window=5, smooth_keys=True, min_keys=7)
    kernel = read_kernel("xla", "self", part)
    assert (kernel.kernel, kernel.window, kernel.smooth_keys, kernel.min_keys) == ("xla", 5, True, 7)


def test_a_sweep_that_goes_on_makes_again_what_is_written_otherwise(tmp_path):
    settled = outputs.settle(make_config())
    metrics = {
        "config_hash": outputs.config_hash(settled, {}), "stages": settled["stages"], "output": settled["output"],
        "step_seconds_median": 1.5, "seconds": {"total": 2.0},
    }
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    assert outputs.finished_before(settled, {}, tmp_path) == 1.5
    for override in ("output.quality=30", "output.keep_frames=true"):
        assert outputs.finished_before(outputs.settle(make_config(override)), {}, tmp_path) is None


# ---------------------------------------------------------------- fingerprints


def test_every_tensor_counts_in_a_fingerprint(tmp_path):
    """Also under a folder that is called as the Hub's are."""
    folder = tmp_path / "snapshots" / "mine" / "transformer"
    shutil.copytree(ROOT / "models" / "demo" / "transformer", folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file(tensors, file)  # with the header that all have below
    before = fingerprint([folder])
    for name in list(tensors)[:: max(len(tensors) // 12, 1)]:
        changed = {key: value.copy() for key, value in tensors.items()}
        changed[name].reshape(-1)[:] += 1
        save_file(changed, file)
        assert fingerprint([folder]) != before, name


def test_the_hubs_blobs_count_by_their_names(tmp_path):
    blob, folder = tmp_path / "blobs" / ("a" * 64), tmp_path / "snapshots" / "x" / "vae"
    folder.mkdir(parents=True), blob.parent.mkdir()
    blob.write_bytes(b"weights")
    (folder / "a.safetensors").symlink_to(blob)
    before = fingerprint([folder])
    other = tmp_path / "blobs" / ("b" * 64)
    other.write_bytes(b"weights")
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(other)
    assert fingerprint([folder]) != before


