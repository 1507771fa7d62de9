"""Adapters of every trainer, merged while weights load: as diffusers fuses them, or as the formula says."""
import hashlib
import json

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import lora, lycoris, reference, tiny
from tests.conftest import SMALL, make_config, metrics, results, run_into
from tests.reference import TEXTS, psnr
from wan_torchax.config import jobs
from wan_torchax.config.commandline import compose
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.records import media
from wan_torchax.records.stored import take_over
from wan_torchax.runtime import adapters
from wan_torchax.runtime.checkpoint import read_header
from wan_torchax.runtime.jobs import find_job
from wan_torchax.session import Session, session

DIFFS = ("blocks.1.norm2.weight", "blocks.0.norm2.bias", "blocks.0.attn1.norm_q.weight", "blocks.1.scale_shift_table",
         "blocks.0.ffn.net.2.bias", "patch_embedding.weight", "patch_embedding.bias", "scale_shift_table",
         "condition_embedder.time_proj.bias", "proj_out.bias")


FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def weights():
    """The transformer's, as they are stored."""
    return load_file(tiny.checkpoint("text") / "transformer" / FILE)


def loaded(*overrides, component="transformer"):
    """A component's arrays by checkpoint name, float32, after loading them in a session of their own."""
    config = make_config(*SMALL, *tiny.model(), *overrides)
    validate(config)
    own = Session()
    resolved = own.resolve(config, ["denoise"])
    own.build(resolved, ["denoise"])
    part = own.components[component]
    part.check()
    part.load(part.specs, lambda event: None)
    arrays = {}
    for name, tensor in part.specs.items():
        value = numpy.asarray(part.arrays[name]).astype("float32")
        arrays |= dict(zip(tensor.sources, value if tensor.stacked else [value]))
    return arrays


def assert_merged(arrays, weights, changes, within=1e-5):
    """Each tensor is the checkpoint's with what is added; relative to the tensor's largest number."""
    for name, array in arrays.items():
        expected = weights[name].double() + sum(change.double() for change in changes.get(name, ()))
        error = numpy.abs(array - expected.numpy()).max() / expected.abs().max()
        assert error < within, (name, error)


def adapter(name, path, **rest):
    row = ", ".join(f"{key}: {value}" for key, value in {"path": path, **rest}.items())
    return f"adapter.{name}={{{row}}}"


def learned_in(file, weights):
    """What a file adds to each tensor, from the factors that are found for it."""
    stored, added = {key: numpy.asarray(value) for key, value in load_file(file).items()}, {}
    keys = {one.offset: key for key, one in read_header(file).items()}
    for name, changes in place(file, weights).items():
        for change in changes:
            first, *second = (stored[keys[one.offset]].reshape(one.shape) for one in change.factors)
            added[name] = change.scale * (numpy.tensordot(first, second[0], 1) if second else first)
    return added


@pytest.mark.parametrize("name", lora.FORMATS)
def test_every_format_is_the_formula(weights, tmp_path, name):
    """Two ranks, an alpha that is neither, and differences of norms, biases, modulations and the patch embedding."""
    learned = lora.Learned(weights).differ(weights, *DIFFS)
    file = learned.save(tmp_path / "x.safetensors", **lora.FORMATS[name])
    added, expected = learned_in(file, weights), learned.changes()
    assert added.keys() == expected.keys()
    for key, value in expected.items():
        numpy.testing.assert_allclose(added[key], value.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["diffusers", "musubi"])
def test_what_a_file_adds_is_merged_while_loading(weights, tmp_path, name):
    learned = lora.Learned(weights).differ(weights, *DIFFS)
    file = learned.save(tmp_path / "x.safetensors", **lora.FORMATS[name])
    arrays = loaded(adapter("style", file, strength=0.7))
    assert_merged(arrays, weights, {key: [0.7 * value] for key, value in learned.changes().items()})


# ---------------------------------------------------------------- as diffusers fuses them


def fused(*files, strengths=(1.0,)):
    """diffusers' own: a pipeline whose transformer has these adapters fused into it."""
    names, pipeline = [], reference.load(tiny.checkpoint("text"), make_config(*SMALL))
    for number, file in enumerate(files):
        names.append(f"adapter{number}")
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=names[-1])
    pipeline.set_adapters(names, list(strengths))
    pipeline.fuse_lora(components=["transformer"], adapter_names=names)
    pipeline.unload_lora_weights()
    return pipeline


THEIRS = {  # what diffusers loads: no modulations, no patch embedding, of biases those beside low-rank factors
    "diffusers": (dict(alpha=None, top=False), dict(lora.FORMATS["diffusers"]), ()),
    "ComfyUI": (dict(top=False), lora.FORMATS["ComfyUI"], ("blocks.0.ffn.net.2.bias", "blocks.1.attn1.to_q.bias")),
    "ai-toolkit": (dict(top=False), lora.FORMATS["ai-toolkit"], ()),
    "musubi": (dict(top=False), lora.FORMATS["musubi"], ()),
}


@pytest.mark.parametrize("name", THEIRS)
def test_formats_that_diffusers_knows_are_fused_as_there(weights, tmp_path, name):
    settings, form, diffs = THEIRS[name]
    file = lora.Learned(weights, **settings).differ(weights, *diffs).save(tmp_path / "x.safetensors", **form)
    theirs = fused(file).transformer.state_dict()
    assert any((theirs[key] - weights[key]).abs().max() > 0.01 for key in weights)
    assert_merged(loaded(adapter("style", file)), theirs, {})


def test_peft_says_its_alpha_in_the_header(weights, tmp_path):
    """One for all, and another for some modules, as diffusers writes them."""
    learned = lora.Learned(weights, top=False)
    settings = {"transformer.lora_alpha": 6, "transformer.alpha_pattern": {"attn2.to_q": 3}, "transformer.r": 2}
    metadata = {"lora_adapter_metadata": json.dumps(settings), "format": "pt"}
    file = learned.save(tmp_path / "x.safetensors", prefix="transformer.", metadata=metadata)
    halved = {key: value * (0.5 if "attn2.to_q" in key else 1) for key, value in learned.changes().items()}
    arrays = loaded(adapter("style", file))
    assert_merged(arrays, weights, {key: [value] for key, value in halved.items()})


TWO = ["model.experts=[transformer,transformer_2]", "model.boundary=0.875"]


def test_two_adapters_on_two_experts_over_eight_devices(weights, tmp_path):
    """The sum of both on the first, one of them on the second; bfloat16 rounds once, after all is added."""
    one, other = lora.Learned(weights, seed=1), lora.Learned(weights, seed=2).differ(weights, *DIFFS)
    files = [one.save(tmp_path / "a.safetensors", **lora.FORMATS["musubi"]),
             other.save(tmp_path / "b.safetensors", **lora.FORMATS["ComfyUI"])]
    rows = [adapter("a", files[0], strength=0.5, target="[high]"), adapter("b", files[1], strength=-1.5)]
    mesh = ["mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:4}", "sharding=tp", "model.dtype.transformer=bfloat16"]
    overrides = [*TWO, *mesh, *rows]
    scaled = (0.5, one.changes()), (-1.5, other.changes())
    both = {key: [scale * learned[key] for scale, learned in scaled if key in learned] for key in weights}
    second = load_file(tiny.checkpoint("text") / "transformer_2" / FILE)
    exact = 2**-8  # half of the last bit of bfloat16, of the largest number
    assert_merged(loaded(*overrides), weights, both, within=exact)
    changes = {key: [-1.5 * value] for key, value in other.changes().items()}
    assert_merged(loaded(*overrides, component="transformer_2"), second, changes, within=exact)


def test_blocks_have_strengths_of_their_own(weights, tmp_path):
    """What lies outside the blocks has the row's alone."""
    learned = lora.Learned(weights)
    file = learned.save(tmp_path / "x.safetensors", **lora.FORMATS["ComfyUI"])
    factors = {key: {"0": -0.5, "1": 0.0}[key.split(".")[1]] if key.startswith("blocks") else 1.0 for key in weights}
    arrays = loaded(adapter("style", file, strength=0.8, blocks="[-0.5,0]"))
    assert_merged(arrays, weights, {key: [0.8 * factors[key] * value] for key, value in learned.changes().items()})
    for name in weights:
        assert "blocks.1" not in name or numpy.array_equal(arrays[name], weights[name].numpy())
    with pytest.raises(ConfigError, match="adapter.style.blocks: has 3 numbers, the model 2 blocks; one for each"):
        loaded(adapter("style", file, blocks="[1,1,1]"))


def test_strengths_of_blocks_are_part_of_the_weights_key(weights, tmp_path):
    file = lora.Learned(weights).save(tmp_path / "x.safetensors", **lora.FORMATS["ComfyUI"])
    rows = [adapter("style", file), adapter("style", file, blocks="[1,0]"), adapter("style", file, blocks="[0,1]")]
    configs = [make_config(*SMALL, *tiny.model(), row) for row in rows]
    assert len({find_job(config).checkpoints["transformer"].fingerprint for config in configs}) == 3


# ---------------------------------------------------------------- LoHa, LoKr, DoRA


def in_peft(kind, folder):
    """A transformer with random factors of this kind, saved by PEFT, and its weights once PEFT has merged them."""
    import diffusers
    import peft

    torch.manual_seed(0)
    targets = ["attn1.to_q", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    config = {
        "LoHa": lambda: peft.LoHaConfig(r=4, alpha=6, target_modules=targets, init_weights=False),
        "LoKr": lambda: peft.LoKrConfig(r=3, alpha=6, target_modules=targets, init_weights=False),
        "LoKr, decomposed": lambda: peft.LoKrConfig(
            r=2, alpha=5, target_modules=targets, init_weights=False, decompose_both=True),
        "LoKr, whole": lambda: peft.LoKrConfig(r=64, alpha=32, target_modules=targets, init_weights=False),
        "DoRA": lambda: peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False, use_dora=True),
    }[kind]()
    base = diffusers.WanTransformer3DModel.from_pretrained(tiny.checkpoint("text") / "transformer")
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape)
    model.save_pretrained(folder)
    return model.merge_and_unload().state_dict()


@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "LoKr, decomposed", "LoKr, whole", "DoRA"])
def test_what_peft_merges_is_merged_as_there(weights, tmp_path, kind):
    theirs = in_peft(kind, tmp_path)
    changed = [key for key in weights if (theirs[key] - weights[key]).abs().max() > 1e-3]
    assert len(changed) == 8  # four layers of two blocks
    assert_merged(loaded(adapter("style", tmp_path)), theirs, {}, within=1e-6 if kind != "DoRA" else 3e-6)


def test_lycoris_files_over_eight_devices(weights, tmp_path):
    """Its names, alpha of LoKr without a rank, DoRA over inputs, strengths; on sharded weights."""
    torch.manual_seed(1)
    start, target = "lycoris_blocks_1_", "blocks.1."
    kron = torch.randn(8, 4), torch.randn(16, 32)
    hada = [0.3 * torch.randn(*shape) for shape in ((64, 3), (3, 128), (64, 3), (3, 128))]
    norms = 1 + torch.rand(1, 128)
    tensors = {f"{start}self_attn_q.lokr_w1": kron[0], f"{start}self_attn_q.lokr_w2": kron[1],
               f"{start}self_attn_q.alpha": torch.tensor(99.0), f"{start}ffn_0.alpha": torch.tensor(6.0),
               f"{start}ffn_0.dora_scale": norms}
    tensors |= {f"{start}ffn_0.{name}": tensor for name, tensor in zip(adapters.LOHA, hada)}
    save_file(tensors, tmp_path / "x.safetensors")
    query, wide = weights[f"{target}attn1.to_q.weight"], weights[f"{target}ffn.net.0.proj.weight"]
    whole = wide + 6 / 3 * (hada[0] @ hada[1]) * (hada[2] @ hada[3])
    decomposed = whole * norms / whole.norm(dim=0, keepdim=True)
    expected = weights | {
        f"{target}attn1.to_q.weight": query + 0.5 * torch.kron(*kron),
        f"{target}ffn.net.0.proj.weight": wide + 0.5 * (decomposed - wide),
    }
    mesh = ["mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:4}", "sharding=tp"]
    arrays = loaded(adapter("style", tmp_path / "x.safetensors", strength=0.5), *mesh)
    assert_merged(arrays, expected, {}, within=1e-6)


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("kind", lycoris.KINDS)
def test_what_lycoris_merges_is_merged_as_there(weights, tmp_path, kind, strength):
    torch.manual_seed(2)
    convolution, linear = ("patch_embedding", "patch_embedding"), ("blocks_1_ffn_0", "blocks.1.ffn.net.0.proj")
    module, name = convolution if "Tucker" in kind else linear
    tensors, expected = lycoris.module(kind, weights[f"{name}.weight"].double(), strength)
    file = tmp_path / "x.safetensors"
    save_file({f"lycoris_{module}.{key}": one.float().contiguous() for key, one in tensors.items()}, file)
    mesh = ["mesh=cpu_8", "mesh.axes={dp:2,sp:1,tp:4}", "sharding=tp"] if strength == 1 else []
    arrays = loaded(adapter("style", file, strength=strength), *mesh)
    assert_merged(arrays, weights | {f"{name}.weight": expected}, {}, within=1e-6)
    assert (expected - weights[f"{name}.weight"]).abs().max() > 0.01


# ---------------------------------------------------------------- what fits nowhere


def place(file, weights, allow=False):
    """What a file adds to these weights, or the error."""
    row = adapters.File("style", file, "", 1.0, allow)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return adapters.place((row,), shapes, family_of(make_config()))


def broken(tensors, **changes):
    """A file's tensors, some changed; None takes one away."""
    return {key: value for key, value in (tensors | changes).items() if value is not None}


REFUSED = {
    "one wrong key": ({"diffusion_model.blocks.0.self_atn.q.lora_A.weight": torch.zeros(2, 128)},
                      "diffusion_model.blocks.0.self_atn.q.lora_A.weight: no model of the family wan has"),
    "ranks differ": ({"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.zeros(3, 128)},
                     r"self_attn.q.lora_A.weight: ranks differ: \(128, 4\) and \(3, 128\)"),
    "another width": ({"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.zeros(4, 256)},
                      r"shape \(4, 256\), the model's tensor is \(128, 128\)"),
    "more blocks": ({"diffusion_model.blocks.7.norm3.diff": torch.zeros(128)},
                    "blocks.7.norm3.diff: the model has fewer blocks"),
    "half a pair": ({"diffusion_model.blocks.0.self_attn.q.lora_B.weight": None},
                    "self_attn.q.lora_A.weight: its other half is missing"),
    "half of LoKr": ({"diffusion_model.blocks.0.self_attn.q.lokr_w1": torch.zeros(4, 4)}, "its other half is missing"),
    "LoKr of another size": ({
        "diffusion_model.blocks.0.self_attn.q.lokr_w1": torch.zeros(4, 4),
        "diffusion_model.blocks.0.self_attn.q.lokr_w2": torch.zeros(4, 8),
    }, r"q.lokr_w2: \(4, 4\) times \(4, 8\), the model's tensor is \(128, 128\)"),
    "DoRA of another size": ({"diffusion_model.blocks.0.self_attn.q.dora_scale": torch.zeros(120, 1)},
                             r"q.dora_scale: shape \(120, 1\), the model's tensor is"),
    "Tucker without its factors": ({"diffusion_model.blocks.0.self_attn.q.lokr_t2": torch.zeros(4)},
                                   "q.lokr_t2: its other half is missing"),
    "Tucker of a linear layer": ({"diffusion_model.blocks.0.self_attn.q.lora_mid.weight": torch.zeros(4, 4, 2, 2)},
                                 r"q.lora_mid.weight: shape \(4, 4, 2, 2\), the model's tensor is \(128, 128\)"),
    "Tucker of another rank": ({"diffusion_model.patch_embedding.lora_mid.weight": torch.zeros(3, 3, 1, 2, 2),
                                "diffusion_model.patch_embedding.lora_up.weight": torch.zeros(128, 2),
                                "diffusion_model.patch_embedding.lora_down.weight": torch.zeros(3, 16)},
                               "patch_embedding.lora_mid.weight: ranks differ"),
    "Tucker of a norm": ({f"diffusion_model.blocks.0.norm3.{key}": torch.zeros(*shape) for key, shape in (
        ("lora_up.weight", (128, 2)), ("lora_down.weight", (2, 3)), ("lora_mid.weight", (2, 2)))},
        r"norm3.lora_down.weight: shape \(2, 3\), the model's tensor is \(128,\)"),
    "Tucker of a whole factor": ({f"diffusion_model.blocks.0.self_attn.q.{key}": torch.zeros(*shape) for key, shape in (
        ("lokr_w1", (8, 8)), ("lokr_w2", (16, 16)), ("lokr_t2", (16, 16)))}, "q.lokr_t2: its other half is missing"),
    "OFT of another size": ({"diffusion_model.blocks.0.self_attn.q.oft_blocks": torch.zeros(15, 8, 8)},
                            r"q.oft_blocks: rotations \(15, 8, 8\) do not turn 128 rows"),
    "OFT that is not square": ({"diffusion_model.blocks.0.self_attn.q.oft_blocks": torch.zeros(16, 8, 4)},
                               "q.oft_blocks: rotations"),
    "BOFT with too many turns": ({"diffusion_model.blocks.0.self_attn.q.oft_blocks": torch.zeros(6, 16, 8, 8)},
                                 r"rotations \(6, 16, 8, 8\) do not turn"),
    "numbers for rows alone": ({"diffusion_model.blocks.0.self_attn.q.rescale": torch.zeros(128, 1)},
                               "q.rescale: its other half is missing"),
    "PEFT's OFT": ({"base_model.model.blocks.0.attn1.to_q.oft_R.weight": torch.zeros(4, 6)}, "is PEFT's OFT, which is"),
    "an alpha of two": ({"diffusion_model.blocks.0.self_attn.q.alpha": torch.zeros(2)}, "it must be one number"),
    "integers": ({"diffusion_model.blocks.0.norm3.diff": torch.zeros(128, dtype=torch.int8)}, "stored as I8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_does_not_fit_is_refused_by_key(weights, tmp_path, name):
    changes, message = REFUSED[name]
    file = lora.Learned(weights).save(tmp_path / "x.safetensors", **lora.FORMATS["ComfyUI"])
    save_file(broken(load_file(file), **changes), file)
    with pytest.raises(ConfigError, match=message):
        place(file, weights)


def test_one_wrong_key_stops_a_run_before_weights_load(weights, tmp_path):
    file = lora.Learned(weights).save(tmp_path / "x.safetensors", **lora.FORMATS["ComfyUI"])
    save_file(broken(load_file(file), **REFUSED["one wrong key"][0]), file)
    with pytest.raises(ConfigError, match="self_atn"):
        loaded(adapter("style", file))


def test_what_is_left_out_is_told(weights, tmp_path, caplog):
    """A LoRA of an image-to-video model, whose image keys this model has not; and a wrong key that is allowed."""
    learned = lora.Learned(weights)
    file = learned.save(tmp_path / "x.safetensors", **lora.FORMATS["ComfyUI"])
    image = {f"diffusion_model.blocks.{n}.cross_attn.k_img.lora_{half}.weight": torch.zeros(*shape)
             for n in range(2) for half, shape in (("A", (2, 128)), ("B", (128, 2)))}
    save_file(load_file(file) | image, file)
    added = place(file, weights)
    assert "4 keys are of another model and found no place, e.g. diffusion_model.blocks.0.cross" in caplog.text
    save_file(load_file(file) | {"diffusion_model.blocks.0.typo.diff": torch.zeros(3)}, file)
    allowed = place(file, weights, allow=True)
    assert "1 keys are left out, e.g. diffusion_model.blocks.0.typo.diff: no model of the family" in caplog.text
    assert added.keys() == allowed.keys() == {f"{module}.weight" for module in learned.pairs}
    save_file({key: value for key, value in load_file(file).items() if "k_img" in key}, file)
    with pytest.raises(ConfigError, match="is for another model; nothing in it fits"):
        place(file, weights, allow=True)


BAD = {
    "adapter.style.strength=0.5": "adapter.style: needs a path, or repo and file; .*those that are configured: none",
    "adapter.style={path: /no/such.safetensors}": "adapter.style.path=/no/such.safetensors: no such file",
    "adapter.style={path: x.pt}": "x.pt can run code when opened and is not read",
    "adapter.style={path: x.safetensors, repo: a/b, file: c.safetensors}": "has a path and a Hub id",
    "adapter.style={path: x.safetensors, strength: 99}": "adapter.style.strength=99.0: must be from -10 to 10",
    "adapter.style={path: x.safetensors, blocks: [1, 99]}": "each must be from -10 to 10",
    "adapter.style={path: x.safetensors, target: [low]}": "this model has one transformer",
    "adapter.style={path: x.safetensors, target: [hihg]}": "adapter.style.target=hihg: unknown; nearest: high",
    "adapter.style={file: x.safetensors, weight: 1}": "needs a path, or repo and file",
    "adapter=lightning": "adapter=lightning: no such option; nearest: lightning_4step",
}


@pytest.mark.parametrize("override", BAD)
def test_rows_that_are_none_are_told(override):
    with pytest.raises(ConfigError, match=BAD[override]):
        validate(make_config(override))


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def style(weights, tmp_path_factory):
    file = tmp_path_factory.mktemp("style") / "style.safetensors"
    return lora.Learned(weights, top=False).save(file, **lora.FORMATS["ComfyUI"])


def run(folder, *overrides):
    run_into(folder, *SMALL, *TEXTS, *tiny.model(), "keep_resident=true", *overrides)
    return results(folder), metrics(folder)


@pytest.mark.system
def test_a_run_is_diffusers_and_a_strength_loads_the_transformer_alone(style, tmp_path, monkeypatch):
    """Off, whole and off again: frames as diffusers', what is loaded and compiled, metrics, resume and replay."""
    from wan_torchax.runtime.components import Component

    session.clear()
    loads, load = [], Component.load
    monkeypatch.setattr(Component, "load", lambda self, tensors, emit: (
        loads.append(self.name) if not self.is_loaded() else None, load(self, tensors, emit)))
    row = adapter("style", style)
    mine = "prompt=of this test alone"  # so that no other has had it encoded
    off, before = run(tmp_path / "off", row, "adapter.style.strength=0", mine)
    program = session.stages["denoise"]
    on, _ = run(tmp_path / "other", row, "adapter.style.strength=0.5", mine)
    assert loads == ["text_encoder", "transformer", "vae", "transformer"] and session.stages["denoise"] is program
    assert psnr(on["frames"], off["frames"]) < 40
    on, told = run(tmp_path / "on", row, "adapter.style.strength=0.5")
    _, frames = reference.make(fused(style, strengths=(0.5,)), make_config(*SMALL))
    assert psnr(on["frames"], frames) > 55
    digest = hashlib.sha256(style.read_bytes()).hexdigest()
    assert told["adapters"] == {"style": {"sha256": digest, "strength": 0.5, "target": ["all"]}}
    assert before["adapters"] == {} and told["config_hash"] != before["config_hash"]
    assert told["weights"]["transformer"] == f"{before['weights']['transformer']}+{digest[:16]}*0.5"
    session.clear()
    replays(tmp_path / "on", style)


def replays(folder, style):
    """A video says the hash and the strength and no path; its file is given again, and the strength is the video's."""
    for source in (folder, folder / "video.mp4"):
        asked = [f"replay={source}"]
        assert "style" not in take_over(make_config(*asked), asked).adapter
        asked += [f"adapter.style.path={style}"]
        assert take_over(make_config(*asked), asked).adapter.style == {"path": str(style), "strength": 0.5}
    assert str(style) not in json.dumps(media.read_metadata(folder / "video.mp4"))


def test_a_list_may_say_strengths_and_options_but_no_path(tmp_path):
    rows = [
        {"adapter.style.strength": 0.5}, {"adapter": "lightning_4step"}, {"adapter.style.path": "/etc/x.safetensors"},
        {"adapter.allow_unmatched": True}, {"adapter": {"style": {"repo": "a/b"}}}, {"adapter.a b.strength": 1},
    ]
    file = tmp_path / "list.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "x"} | row) for row in rows))
    listed = jobs.read(make_config(f"prompts={file}"))
    assert [job.error is None for job in listed] == [True, True, False, False, False, False]
    said = [job.overrides[-1] for job in listed[:2]]
    assert said == ["adapter.style.strength=0.5", "adapter=lightning_4step"]
    assert "only be given on the command line" in listed[2].error
    configured = compose(["adapter.style={path: mine.safetensors}", *listed[0].overrides]).adapter.style
    assert configured == {"path": "mine.safetensors", "strength": 0.5}
