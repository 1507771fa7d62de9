"""Guidance: prompt and negative prompt are combined as diffusers' guiders do, step by step."""
from itertools import combinations

import jax.numpy as jnp
import numpy
import pytest
import torch
import transformers
from diffusers import HunyuanVideo15Pipeline, WanImageToVideoPipeline, guiders
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer
from diffusers.hooks import LayerSkipConfig
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
from PIL import Image

from tests import given, hunyuan15, reference, tiny
from tests.conftest import SMALL, make_config, results, run_into
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.models import family
from wan_torchax.models.wan.blocks import pushed
from wan_torchax.runtime.jobs import plan_job
from wan_torchax.stages import caching
from wan_torchax.stages.denoise import Denoise, guider_of, schedule_rows
from wan_torchax.stages.guidance import AVERAGE, guide
from wan_torchax.stages.sampling import scheduler_table

SCALE, STEPS = 6.0, 4
NO_DECODE = "stages=[text,denoise]"
SHAPE = 2, 3, 2, 4, 5  # two videos: each has its own norms
THEIRS = {  # overrides -> diffusers' guider
    "guider=cfg": lambda: guiders.ClassifierFreeGuidance(SCALE),
    "guider.rescale=0.7": lambda: guiders.ClassifierFreeGuidance(SCALE, guidance_rescale=0.7),
    "guider=cfg_zero": lambda: guiders.ClassifierFreeZeroStarGuidance(SCALE, zero_init_steps=1),
    "guider=cfg_zero guider.zero_steps=0 guider.rescale=0.3":
        lambda: guiders.ClassifierFreeZeroStarGuidance(SCALE, zero_init_steps=0, guidance_rescale=0.3),
    "guider=apg guider.most_norm=9": lambda: guiders.AdaptiveProjectedGuidance(  # as published: p + (s - 1) · projected
        SCALE - 1, adaptive_projected_guidance_momentum=-0.75, adaptive_projected_guidance_rescale=9.0, eta=0.0,
        use_original_formulation=True),
    "guider=apg guider.momentum=0 guider.parallel=0.4 guider.most_norm=0": lambda: guiders.AdaptiveProjectedGuidance(
        SCALE - 1, adaptive_projected_guidance_momentum=None, adaptive_projected_guidance_rescale=0.0, eta=0.4,
        use_original_formulation=True),
}


@pytest.mark.parametrize("overrides", THEIRS)
def test_every_step_is_diffusers(overrides):
    theirs, guider = THEIRS[overrides](), guider_of(make_config(*overrides.split()))
    if guider.remembers:  # theirs begins to when it is given inputs
        theirs.momentum_buffer = MomentumBuffer(guider.momentum)
    rng, state = numpy.random.default_rng(0), {AVERAGE: jnp.zeros(SHAPE)}
    for step in range(STEPS):
        theirs.set_state(step, STEPS, torch.tensor(1000.0 - step))
        prompt, negative = rng.normal(size=(2, *SHAPE)).astype("float32")
        expected = theirs.forward(torch.tensor(prompt), torch.tensor(negative)).pred.numpy()
        schedule = {"guidance_scale": jnp.float32(SCALE), "zeroed": jnp.float32(step < guider.zero_steps)}
        found, state = guide(guider, jnp.asarray(prompt), jnp.asarray(negative), schedule, state)
        numpy.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cfg", "cfg_zero", "apg"])
def test_a_scale_of_one_is_the_prompt_alone(name):
    guider, (prompt, negative) = guider_of(make_config(f"guider={name}")), jnp.ones((2, *SHAPE)) * 3
    state = {AVERAGE: jnp.full(SHAPE, 5.0)}
    schedule = {"guidance_scale": jnp.float32(1), "zeroed": jnp.float32(0)}
    found, after = guide(guider, prompt, negative * 0.5, schedule, state)
    numpy.testing.assert_allclose(found, prompt, rtol=1e-6)
    numpy.testing.assert_array_equal(after[AVERAGE], state[AVERAGE])


def test_the_first_steps_change_nothing():
    config = make_config("guider=cfg_zero", "guider.zero_steps=2", "steps=5")
    assert list(schedule_rows(config, scheduler_table(config, None), None)["zeroed"]) == [1, 1, 0, 0, 0]


@pytest.mark.system
def test_a_run_with_each(generate):
    """One video apart from the other; CFG-Zero*'s only step of one changes nothing."""
    common = "steps=3", "guidance_scale=4", "stages=[text,denoise]"
    made = {name: results(generate(*common, *name.split(), folder=name))["latents"]
            for name in ("guider=cfg", "guider=cfg_zero", "guider=apg guider.most_norm=1")}
    first, *others = made.values()
    assert all(numpy.isfinite(one).all() and numpy.abs(one - first).max() > 1e-3 for one in others)
    still = [results(generate("steps=1", "guider=cfg_zero", f"guidance_scale={scale}", "stages=[text,denoise]",
                              folder=f"still{scale}"))["latents"] for scale in (3, 9)]
    numpy.testing.assert_array_equal(*still)


# ---------------------------------------------------------------- skip-layer guidance


@pytest.mark.parametrize("rescale", [0, 0.7])
def test_a_third_pass_is_combined_as_in_diffusers(rescale):
    theirs = guiders.SkipLayerGuidance(SCALE, 2.8, skip_layer_guidance_layers=[1], guidance_rescale=rescale)
    guider = guider_of(make_config("guider=skip_layer", f"guider.rescale={rescale}"))
    theirs.set_state(2, 20, torch.tensor(900.0))
    three = numpy.random.default_rng(0).normal(size=(3, *SHAPE)).astype("float32")
    expected = theirs.forward(*map(torch.tensor, three)).pred.numpy()
    prompt, negative, skipped = map(jnp.asarray, three)
    found, _ = guide(guider, prompt, negative, {"guidance_scale": jnp.float32(SCALE)}, {}, skipped)
    numpy.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps, start, stop", [(50, 0.01, 0.2), (7, 0.0, 1.0), (30, 0.33, 0.5)])
def test_layers_are_skipped_in_diffusers_steps(steps, start, stop):
    shares = f"guider.skip_start={start}", f"guider.skip_stop={stop}"
    config = make_config("guider=skip_layer", *shares, f"steps={steps}", "guidance_scale=4")
    theirs = guiders.SkipLayerGuidance(4.0, 2.8, start, stop, [1])
    expected = []
    for step in range(steps):
        theirs.set_state(step, steps, torch.tensor(900.0))
        expected.append("skip" if theirs.num_conditions == 3 else "full")
    assert caching.plan(config, scheduler_table(config, None)) == expected


def test_a_cache_computes_the_steps_that_skip_layers():
    """MagCache would reuse some of them; guidance's rests begin after them."""
    plain = "model=wan21_t2v_1_3b", "cache=magcache_guidance", "guidance_scale=4", "steps=20"
    config = make_config(*plain, "guider=skip_layer", "guider.skip_start=0.3", "guider.skip_stop=0.5")
    table = scheduler_table(config, None)
    work = caching.plan(config, table)
    assert [place for place, kind in enumerate(work) if kind == "skip"] == [7, 8, 9]
    assert {"reuse", "full", "prompt"} <= set(work) and all(caching.kept_steps(config, table)[7:10])
    assert "reuse" in caching.plan(make_config(*plain), table)[7:10]


class SkipLayers(torch.nn.Module):
    """A transformer that leaves out blocks in some steps: in every second call, the negative prompt's, or in another of
    the prompt, whose velocity is added so that the pipeline's guidance comes out as skip-layer guidance."""

    def __init__(self, inner, config):
        super().__init__()
        self.inner, self.settings, self.calls = inner, config, 0

    def __getattr__(self, name):
        return super().__getattr__(name) if name in ("_modules", "inner") else getattr(self.inner, name)

    def forward(self, *arguments, **named):
        guider, step, negative = self.settings.guider, self.calls // 2, self.calls % 2
        self.calls += 1
        skips = int(guider.skip_start * self.settings.steps) < step < int(guider.skip_stop * self.settings.steps)
        if negative:
            return self.call(skips and guider.skip_negative, *arguments, **named)
        (prompt,) = self.call(False, *arguments, **named)
        if skips and not guider.skip_negative:
            (skipped,) = self.call(True, *arguments, **named)
            prompt = prompt + guider.skip_scale / self.settings.guidance_scale * (prompt - skipped)
        return (prompt,)

    def call(self, skips, *arguments, **named):
        for number in self.settings.guider.skip_layers if skips else ():
            self.inner.blocks[number].forward = lambda hidden, *others: hidden
        out = self.inner(*arguments, **named)
        for block in self.inner.blocks:
            block.__dict__.pop("forward", None)
        return out


@pytest.mark.parametrize("overrides", [
    pytest.param(["guider=skip_layer", "guider.skip_layers=[0]"], id="a third pass", marks=pytest.mark.full),
    pytest.param(["guider=skip_layer_negative", "guider.skip_layers=[0]"], id="the negative prompt's"),
    pytest.param(["guider=skip_layer_negative", "guider.skip_layers=[1]", "guidance=sequential"], id="one by one",
                 marks=pytest.mark.system),
    pytest.param(["guider=skip_layer", "guider.skip_layers=[1]", "mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}",
                  "sharding=tp_ring"], id="eight devices", marks=pytest.mark.system),
])
def test_skipped_layers_are_those_of_diffusers(generate, overrides):
    arguments = [*reference.TEXTS, *overrides, "guidance_scale=4", "steps=4", "guider.skip_stop=0.8", NO_DECODE]
    config = make_config(*SMALL, *tiny.model(), *arguments)
    pipeline = reference.load(tiny.checkpoint("text"), config)
    pipeline.transformer = SkipLayers(pipeline.transformer, config)
    expected, _ = reference.make(pipeline, config, decoded=False)
    plain, _ = reference.make(reference.load(tiny.checkpoint("text"), config), config, decoded=False)
    found = results(generate(*arguments))["latents"][0]
    assert reference.relative_error(found, expected) < 1e-4 < 1e-3 < reference.relative_error(plain, expected)


@pytest.mark.system
def test_hunyuan_video_skips_as_its_pipeline_does(tmp_path):
    sizes = ["resolution.height=48", "resolution.width=80", "resolution.frames=9", "steps=4"]
    arguments = [*hunyuan15.model(), *reference.TEXTS, *sizes, "guider=skip_layer", "guider.skip_layers=[0]",
                 "guider.skip_stop=0.8", "guidance_scale=4", NO_DECODE]
    config = make_config(*arguments)
    # diffusers' hooks do not know this block yet.
    TransformerBlockRegistry.register(HunyuanVideo15TransformerBlock, TransformerBlockMetadata(0, 1))
    pipeline = hunyuan15.pipeline(HunyuanVideo15Pipeline, hunyuan15.checkpoint(), config)
    made = []
    for stop in (0.8, 0.01):
        skipped = LayerSkipConfig([0], fqn="transformer_blocks")
        pipeline.guider = guiders.SkipLayerGuidance(4.0, 2.8, 0.01, stop, skip_layer_config=skipped)
        with torch.no_grad():
            made.append(pipeline(
                reference.PROMPT, reference.NEGATIVE, height=48, width=80, num_frames=9, num_inference_steps=4,
                generator=torch.Generator().manual_seed(config.seed), output_type="latent",
            ).frames.numpy())
    expected, plain = made
    found = results(run_into(tmp_path, *arguments))["latents"]
    assert reference.relative_error(found, expected) < 1e-4 < 1e-3 < reference.relative_error(plain, expected)


# ---------------------------------------------------------------- NAG: the negative prompt in cross-attention


class Nag:
    """The published formula in plain torch, as a processor of diffusers' cross-attention."""

    def __init__(self, negative, config, ratios):
        self.negative, self.guider, self.tokens, self.ratios = negative, config.guider, config.model.text_tokens, ratios

    def __call__(self, attention, hidden, context, mask=None, rotary=None):
        query = attention.norm_q(attention.to_q(hidden))

        def attend(key, value):
            heads = (one.unflatten(2, (attention.heads, -1)).transpose(1, 2) for one in (query, key, value))
            return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

        def to_text(text):
            return attend(attention.norm_k(attention.to_k(text)), attention.to_v(text))

        prompt, negative = to_text(context[:, -self.tokens :]), to_text(self.negative)
        far = self.guider.nag * prompt - (self.guider.nag - 1) * negative
        ratio = far.norm(1, -1, keepdim=True) / prompt.norm(1, -1, keepdim=True)
        self.ratios.append(ratio)
        far = torch.where(ratio > self.guider.nag_limit, far / ratio * self.guider.nag_limit, far)
        out = self.guider.nag_share * far + (1 - self.guider.nag_share) * prompt
        if attention.add_k_proj is not None:
            pictures = context[:, : -self.tokens]
            out = out + attend(attention.norm_added_k(attention.add_k_proj(pictures)), attention.add_v_proj(pictures))
        return attention.to_out[0](out)


def nag_in_diffusers(pipeline, config, **given):
    """Its latents where every cross-attention is pushed away from the negative prompt's."""
    with torch.no_grad():
        _, negative = pipeline.encode_prompt(reference.PROMPT, reference.NEGATIVE, max_sequence_length=tiny.TOKENS)
        negative = pipeline.transformer.condition_embedder.text_embedder(negative)
    ratios = []
    for name, module in pipeline.transformer.named_modules():
        if name.endswith("attn2"):
            module.set_processor(Nag(negative, config, ratios))
    latents, _ = reference.make(pipeline, config, decoded=False, **given)
    assert 0.1 < (torch.cat(ratios) > config.guider.nag_limit).float().mean() < 0.9  # some are limited, others not
    return latents


NAG = ["guider=nag", "guider.nag=4", "guider.nag_limit=1.1", "guider.nag_share=0.6", "guidance_scale=1", NO_DECODE]


@pytest.mark.parametrize("overrides", [
    pytest.param([], id="one device"),
    pytest.param(["mesh=cpu_8", "mesh.axes={dp:2,sp:2,tp:2}", "sharding=tp_ring"], id="eight devices",
                 marks=pytest.mark.system),
])
def test_nag_is_the_formula(generate, overrides):
    arguments = [*reference.TEXTS, *NAG, *overrides]
    config = make_config(*SMALL, *tiny.model(), *arguments)
    expected = nag_in_diffusers(reference.load(tiny.checkpoint("text"), config), config)
    found = results(generate(*arguments))
    assert found["embeddings"].shape[0] == 2
    assert reference.relative_error(found["latents"][0], expected) < 1e-4


@pytest.mark.system
def test_nag_leaves_a_pictures_attention_alone(tmp_path):
    arguments = [*SMALL, *tiny.model("seen"), *given.overrides("i2v_clip"), "fit=stretch", *NAG,
                 *reference.TEXTS, "stages=[text,image,encode,denoise]"]
    config = make_config(*arguments)
    folder = tiny.checkpoint("seen")
    pipeline = reference.load(
        folder, config, WanImageToVideoPipeline,
        image_encoder=transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder"),
        image_processor=transformers.CLIPImageProcessor.from_pretrained(folder / "image_processor"),
    )
    expected = nag_in_diffusers(pipeline, config, image=Image.open(given.picture("first")))
    assert reference.relative_error(results(run_into(tmp_path, *arguments))["latents"][0], expected) < 1e-4


@pytest.mark.system
def test_nag_of_one_is_the_plain_run_and_the_negative_prompt_guides_without_guidance(generate):
    common = "steps=2", "guidance_scale=1", "stages=[text,denoise]"
    made = {name: results(generate(*common, *name.split(), folder=str(place)))["latents"] for place, name in enumerate((
        "guider=cfg", "guider=nag guider.nag=1", "guider=nag negative_prompt=circle", "guider=nag negative_prompt=red",
    ))}
    plain, one, *others = made.values()
    numpy.testing.assert_array_equal(plain, one)
    assert all(numpy.abs(first - second).max() > 1e-3 for first, second in combinations([plain, *others], 2))


def test_nag_of_a_pass_with_the_negative_prompt_is_that_pass():
    """With guidance too, only the prompt's pass is changed."""
    attention = jnp.asarray(numpy.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
    numpy.testing.assert_allclose(pushed(family.Nag(11.0, 2.5, 0.25), attention, attention), attention, rtol=1e-5)


def test_a_plan_counts_nag():
    """One more cross-attention, of fewer keys than a second pass has."""
    plain, nag, guided = (
        Denoise.flops(plan_job(make_config("guidance_scale=" + scale, f"guider={name}")))
        for scale, name in (("1", "cfg"), ("1", "nag"), ("4", "cfg"))
    )
    assert nag["cross-attention"] == 2 * plain["cross-attention"] and plain["total"] < nag["total"] < guided["total"]


WRONG = {
    ("guider=skip_layer",): "guider.skip_layers=.9.: demo has layers 0 to 5; nearest 5",
    ("guider=skip_layer", "model=wan21_t2v_14b", "guidance_scale=1"): "guider=skip_layer: combines prompt and negative",
    ("guider.skip_scale=3",): "skips none, so the other skip_ keys are of no use",
    ("guider=skip_layer", "model=flux1_dev"): "flux has no guidance to skip layers for",
    ("guider=nag", "guider.nag=1", "guider.nag_share=1"): "nag_limit and nag_share are of no use",
    ("guider=nag", "model=hunyuan15_t2v_480p"): "guider.nag=11.0: hunyuan15 has no cross-attention to text",
    ("guider=nag", "guider.nag_limit=-1"): "guider.nag_limit=-1.0: must be from 0 to 100",
    ("guider=apg", "guidance_scale=1"): "combines prompt and negative prompt, and guidance_scale=1.0 is none",
    ("guider=cfg_zero", "model=flux1_dev"): "guidance is an input of the model; use guider=cfg",
    ("guider.mode=apgg",): "guider.mode=apgg: unknown; nearest: apg",
    ("guider.momentum=0.5",): "momentum, parallel and most_norm are of guider=apg",
    ("guider.rescale=2",): "guider.rescale=2.0: must be from 0 to 1",
    ("guider=cfg_zero", "guider.zero_steps=99"): "guider.zero_steps=99: must be from 0 to",
}


@pytest.mark.parametrize("overrides", WRONG, ids=str)
def test_what_cannot_be_is_told(overrides):
    with pytest.raises(ConfigError, match=WRONG[overrides]):
        validate(make_config(*overrides))
