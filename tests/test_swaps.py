"""Adapters beside weights, with strengths from step to step, and exchanged without loading the model again."""
import functools
import itertools
import re
import shlex

import numpy
import pytest
from safetensors.torch import load_file

from tests import flux, flux2, given, hunyuan15, lora, reference, tiny
from tests.conftest import ROOT, SMALL, make_config, results, run_into
from tests.reference import TEXTS, relative_error
from tests.test_flux import ODD, on
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.events import silence
from wan_torchax.models import loop
from wan_torchax.models.family import DOWN, UP
from wan_torchax.runtime import weights as loading
from wan_torchax.runtime.build_cache import BuildCache
from wan_torchax.serve.choices import at_hand
from wan_torchax.session import Session, session

BESIDE = ["adapter.mode=beside", "adapter.rank=8"]
NO_DECODE = "stages=[text,denoise]"


@pytest.fixture(scope="module")
def weights():
    return load_file(tiny.checkpoint("text") / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def files(weights, tmp_path_factory):
    """Two adapters of all linear layers of the blocks, the second with diffs and layers outside the blocks too."""
    folder = tmp_path_factory.mktemp("adapters")
    first = lora.Learned(weights, seed=1, top=False)
    second = lora.Learned(weights, seed=2).differ(weights, "blocks.1.attn1.to_q.bias", "blocks.0.norm2.weight")
    return [one.save(folder / f"{name}.safetensors", **lora.FORMATS["ComfyUI"])
            for name, one in (("first", first), ("second", second))]


def row(name, path, **rest):
    return f"adapter.{name}={{{', '.join(f'{key}: {value}' for key, value in {'path': path, **rest}.items())}}}"


def latents(folder, *overrides):
    return results(run_into(folder, *SMALL, *TEXTS, *tiny.model(), NO_DECODE, *overrides))["latents"]


# ---------------------------------------------------------------- beside


EIGHT = ["mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}", "sharding=tp_ring"]


@pytest.mark.parametrize("mesh", [pytest.param([], id="one device", marks=pytest.mark.full),
                                  pytest.param(EIGHT, id="eight devices", marks=pytest.mark.system)])
def test_beside_is_merged(files, tmp_path, mesh):
    """Both adapters, with factors of blocks; what is no low-rank factor of a block is merged."""
    rows = [row("a", files[0], strength=0.7, blocks="[-0.5,1]"), row("b", files[1], strength=-0.4)]
    merged = latents(tmp_path / "merged", *rows, *mesh)
    assert relative_error(latents(tmp_path / "beside", *rows, *mesh, *BESIDE), merged) < 1e-4
    assert relative_error(latents(tmp_path / "none", *mesh), merged) > 1e-2


@pytest.mark.system
def test_control_blocks_have_adapters_beside_them(tmp_path):
    weights = load_file(tiny.checkpoint("controlled") / "transformer" / "diffusion_pytorch_model.safetensors")
    learned = lora.Learned(weights, top=False)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        known = module.split(".", 2)[-1] in (*lora.ORIGINAL, "proj_out")
        if name.startswith("vace_blocks") and weight.ndim == 2 and known:
            learned.pairs[module] = learned.random(2, weight.shape[1]), learned.random(weight.shape[0], 2)
    file = learned.save(tmp_path / "x.safetensors", **lora.FORMATS["diffusers"])
    common = [*SMALL, *TEXTS, *tiny.model("controlled"), *given.overrides("vace"), "stages=[text,encode,denoise]",
              row("a", file)]
    merged, beside = (results(run_into(tmp_path / name, *common, *more))["latents"]
                      for name, more in (("merged", []), ("beside", BESIDE)))
    assert relative_error(beside, merged) < 1e-4


@pytest.mark.parametrize("tokens, summed", [(3, False), (400, True)])
def test_factors_are_added_to_a_weight_or_to_its_result(tokens, summed, monkeypatch):
    """Whichever is less work: 24 x 16 products of a rank for the weight, 40 for each token."""
    numbers = numpy.random.default_rng(0)
    array, weight, down, up = (numbers.standard_normal(shape, numpy.float32) for shape in (
        (1, tokens, 16), (1, 24, 16), (1, 4, 16), (1, 24, 4)))
    bias = numpy.ones((1, 24), "float32")
    arrays = {"to_q.weight": weight, "to_q.bias": bias, f"to_q.{DOWN}": down, f"to_q.{UP}": up}
    sums, with_factors = [], loop.Layer.with_factors
    monkeypatch.setattr(loop.Layer, "with_factors", lambda *given: sums.append(given) or with_factors(*given))
    blocks = loop.Blocks(arrays, 1, functools.partial(loop.linear_with_adapters, loop.plain_linear), None, gathered={})
    made = blocks.layer(0).linear("to_q", array, gelu=True)
    expected = loop.finish(array @ (weight + up @ down)[0].T + 1, loop.Options(gelu=True))
    assert relative_error(numpy.asarray(made), numpy.asarray(expected)) < 1e-5 and bool(sums) == summed


OTHERS = {  # a model, its checkpoint, and what its run takes
    "flux": (lambda: flux.model("dev"), lambda: flux.checkpoint("dev"), [*ODD, "steps=2"]),
    "flux2": (flux2.model, flux2.checkpoint, [*ODD, "steps=2", *on("{dp:2,sp:2,tp:2}", "tp_ring")]),
    "hunyuan15": (hunyuan15.model, hunyuan15.checkpoint, [
        "prompt=a cat", "resolution.height=48", "resolution.width=64", "resolution.frames=5", "steps=2"
    ]),
}


@pytest.mark.system
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_adapters_beside_their_weights(family, tmp_path, read):
    """The factors of every linear layer of the blocks; then none, without the weights being read again."""
    model, checkpoint, more = OTHERS[family]
    state = load_file(checkpoint() / "transformer" / "diffusion_pytorch_model.safetensors")
    learned = lora.Learned({}, alpha=None)
    for name, weight in state.items():
        if re.match(r"(single_)?transformer_blocks\.", name) and name.endswith(".weight") and weight.ndim == 2:
            learned.pairs[name.removesuffix(".weight")] = learned.random(2, weight.shape[1]), learned.random(
                weight.shape[0], 2)
    file = learned.save(tmp_path / "x.safetensors", **lora.FORMATS["diffusers"])
    common, session.results = [*model(), *more, NO_DECODE], {}
    merged = results(run_into(tmp_path / "merged", *common, row("a", file, strength=0.5)))["latents"]
    common += [*BESIDE, "keep_resident=true"]
    beside = results(run_into(tmp_path / "beside", *common, row("a", file, strength=0.5)))["latents"]
    assert relative_error(beside, merged) < 1e-4
    assert not session.components["transformer"].placement.merged
    read.clear()
    assert relative_error(results(run_into(tmp_path / "none", *common))["latents"], merged) > 1e-2
    assert all("lora_" in name for names in read for name in names)
    session.clear()


def test_a_strength_for_each_step_is_diffusers(files, tmp_path):
    strengths = [1.0, 0.5, 0.0]
    config = make_config(*SMALL, *tiny.model())
    pipeline = reference.load(tiny.checkpoint("text"), config)
    pipeline.load_lora_weights(str(files[0].parent), weight_name=files[0].name, adapter_name="a")
    pipeline.set_adapters(["a"], [strengths[0]])

    def next_strength(pipeline, step, *_):
        pipeline.set_adapters(["a"], [(*strengths, 0.0)[step + 1]])
        return {}

    expected, _ = reference.make(pipeline, config, decoded=False, callback_on_step_end=next_strength)
    found = latents(tmp_path / "steps", row("a", files[0], strength=strengths), *BESIDE)
    assert relative_error(found[0], expected) < 1e-4
    assert relative_error(latents(tmp_path / "one", row("a", files[0]), *BESIDE), found) > 1e-3


# ---------------------------------------------------------------- exchanged


def resolved_with(*overrides):
    config = make_config(*SMALL, *tiny.model(), "model.dtype.transformer=bfloat16", *overrides)
    validate(config)
    return Session().resolve(config, ["denoise"])


def component_of(session, *overrides):
    """The transformer with these adapters, its arrays on the devices."""
    return component_in(session, resolved_with(*overrides))


def component_in(session, resolved):
    session.build(resolved, ["denoise"], BuildCache.of(resolved))
    component = session.components["transformer"]
    component.check()
    component.load(component.specs, silence)
    return component


@pytest.fixture
def read(monkeypatch):
    """Names of the arrays that are read from checkpoints, by load."""
    names, load = [], loading.load
    monkeypatch.setattr(loading, "load", lambda specs, *rest: (names.append(set(specs)), load(specs, *rest))[1])
    return names


def bits(component):
    return {name: numpy.asarray(array).tobytes() for name, array in component.arrays.items()}


@pytest.mark.system
@pytest.mark.parametrize("more", [pytest.param([], id="merged"), pytest.param(BESIDE, id="beside")])
def test_a_hundred_exchanges_leave_the_weights_of_a_fresh_load(files, more):
    """Adapters and strengths come and go; where weights are never changed but made anew, nothing drifts."""
    first, second = (row(name, file) for name, file in zip("ab", files))
    cases = [[], [first], [first, "adapter.a.strength=0.3"], [first, second], [second]]
    resolved = [resolved_with(*case, *more) for case in cases]
    fresh = [bits(component_in(Session(), one)) for one in resolved]
    assert len({tuple(sorted(one.items())) for one in fresh}) == (4 if more else 5)  # a strength beside is no weight
    one = Session()
    for number, case in zip(range(100), itertools.cycle([0, 1, 2, 4, 3, 1, 0, 3, 2, 4, 4])):
        component = component_in(one, resolved[case])
        if number % 11 > 5 or number > 90:
            assert bits(component) == fresh[case], (number, case)


def test_only_what_adapters_change_is_read_again(files, read):
    one = Session()
    component_of(one, *BESIDE)
    whole = read.pop()
    component_of(one, row("a", files[0]), *BESIDE)
    (factors,) = read
    assert factors and all("lora_" in name for name in factors) and len(factors) < len(whole)
    component_of(one, row("a", files[0], strength=0.1), *BESIDE)
    assert len(read) == 1, "a strength reads nothing"
    component_of(one, row("b", files[1]), *BESIDE)
    merged = {name for name in read[-1] if "lora_" not in name}
    assert {"blocks.*.attn1.to_q.bias", "blocks.*.norm2.weight"} < merged and "blocks.*.attn1.to_q.weight" not in merged
    component_of(one, *BESIDE)
    assert read[-1] == read[-2]


def test_quantized_weights_are_not_rounded_again(files):
    eight = ["precision=int8_weights", "precision.first=0", "precision.last=0", *BESIDE]
    plain, adapted = (bits(component_of(Session(), *eight, *rows)) for rows in ([], [row("a", files[0])]))
    changed = {name for name in plain if plain[name] != adapted[name]}
    assert any(name.endswith("quantized") for name in plain) and all("lora_" in name for name in changed) and changed


def test_a_program_serves_all_adapters_beside(files, tmp_path):
    session.clear()
    common = [*BESIDE, "keep_resident=true"]
    plain = latents(tmp_path / "plain", *common)
    program = session.stages["denoise"]
    changed = latents(tmp_path / "changed", row("a", files[0]), *common)
    again = latents(tmp_path / "again", *common)
    assert session.stages["denoise"] is program and relative_error(changed, plain) > 1e-2
    numpy.testing.assert_array_equal(plain, again)
    session.clear()


def test_an_exchange_that_fails_is_made_good(files, monkeypatch):
    """Neither old weights nor half of them are taken for the new ones."""
    one, second = Session(), row("b", files[1])
    component_of(one, row("a", files[0]))
    load_one = loading.load_one

    def broken(name, *rest):
        if "ffn" in name:
            raise OSError("the disk is gone")
        return load_one(name, *rest)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="disk"):
        patched.setattr(loading, "load_one", broken)
        component_of(one, second)
    assert not one.components["transformer"].is_loaded() or not one.components["transformer"].stale()
    assert bits(component_of(one, second)) == bits(component_of(Session(), second))


# ---------------------------------------------------------------- refused


WRONG = {
    ("adapter.mode=besides",): "adapter.mode=besides: unknown; nearest: beside",
    ("adapter.rank=0",): "adapter.rank=0: must be from 1 to 1024",
    ("adapter.demo_outline.strength=[1,0]", "steps=2"): "merged weights have one strength; set adapter.mode=beside",
    ("adapter.mode=beside", "adapter.demo_outline.strength=[1,0]", "steps=3"): "has 2 numbers, the run 3 steps",
    ("adapter.mode=beside", "adapter.demo_outline.strength=[1,99]", "steps=2"): "must be from -10 to 10",
}


@pytest.mark.parametrize("overrides", WRONG, ids=str)
def test_what_cannot_be_is_told(overrides):
    with pytest.raises(ConfigError, match=WRONG[overrides]):
        validate(make_config("adapter=demo_outline", *overrides))


@pytest.mark.parametrize("adapter", ["demo_4step", "demo_outline"])
def test_an_adapter_made_for_another_model_is_refused_and_not_offered(adapter):
    """Its weights have the same shapes."""
    config = make_config("model=demo_live", f"adapter={adapter}")
    with pytest.raises(ConfigError, match=f"adapter.{adapter}: was made for model=demo.*, not for model=demo_live"):
        validate(config)
    assert at_hand(config) == {} and adapter in at_hand(make_config())["adapter"]


def test_the_pages_commands_with_the_embedded_adapters_are_taken():
    page = (ROOT / "docs" / "adapters.md").read_text().partition("## Beside the weights")[2]
    commands = [shlex.split(line)[2:] for line in page.split("```")[1].strip().splitlines()]
    for overrides in commands:
        validate(make_config(*overrides, "task=plan", "mesh=gpu_1"))
        if overrides[0].startswith("adapter=demo_"):
            own = Session()
            own.build(own.resolve(make_config(*overrides), ["denoise"]), ["denoise"])
            assert own.components["transformer"].placement.rank


def test_ranks_that_do_not_fit_and_strengths_of_diffs_are_told(files):
    with pytest.raises(ConfigError, match="adapter.rank=3: the adapters' ranks add up to 4; set adapter.rank=4"):
        component_of(Session(), row("a", files[0]), "adapter.mode=beside", "adapter.rank=3")
    with pytest.raises(ConfigError, match=r"adapter.b.strength=\[1.0, 0.0, 1.0\]: .* so it is merged; give one number"):
        component_of(Session(), row("b", files[1], strength=[1, 0, 1]), *BESIDE)
