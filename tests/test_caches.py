"""Steps that are not computed: which they are, that nothing else changes, and that what is reused is what it says."""
import shutil

import numpy
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from tests import reference, tiny
from tests.conftest import SMALL, build, make_config, metrics, resolve_here, results, run_into
from tests.reference import TEXTS, relative_error
from wan_torchax.config import caches
from wan_torchax.config.caches import CURVES
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.session import session
from wan_torchax.stages import caching
from wan_torchax.stages.sampling import Table, scheduler_table
from wan_torchax.stages.step import guess
from wan_torchax.tasks.calibrate import calibrate

# Of 50 steps, what MagCache's own code leaves out at (threshold, most in a row).
PUBLISHED = {(0.04, 2): (21, 21), (0.06, 2): (22, 23), (0.12, 2): (25, 25), (0.12, 4): (29, 29), (0.24, 6): (32, 32)}


def published(ratios, threshold, most, steps=50):
    """MagCache's algorithm as its authors have it, of one branch."""
    product, error, count, skips = 1.0, 0.0, 0, []
    for step, ratio in enumerate([1.0, *ratios]):
        skip = False
        if step >= int(0.2 * steps):
            product *= ratio
            count += 1
            error += abs(1 - product)
            skip = error < threshold and count <= most
            if not skip:
                product, error, count = 1.0, 0.0, 0
        skips.append(skip)
    return skips


@pytest.mark.parametrize("settings", PUBLISHED, ids=str)
@pytest.mark.parametrize("place, model", [*enumerate(["wan21_t2v_14b", "wan21_t2v_1_3b"])])
def test_the_skipped_steps_are_those_of_the_published_algorithm(place, model, settings):
    file = CURVES / f"{model}.yaml"
    curve, stored = caching.read_curve(file), yaml.safe_load(file.read_text())
    overrides = [f"cache.threshold={settings[0]}", f"cache.most_in_a_row={settings[1]}", "steps=50"]
    config = make_config(f"model={model}", "resolution=720p", "cache=magcache", *overrides)
    validate(config)
    own = Table(curve.sigmas * 1000, None, curve.sigmas)  # the schedule it was measured at
    for table in (own, scheduler_table(config)):
        skips = [kind == caching.REUSE for kind in caching.plan(config, table)]
        assert skips == published(stored["ratios"], *settings) == published(stored["ratios_negative"], *settings)
        assert sum(skips) == PUBLISHED[settings][place]


def test_fewer_steps_are_not_told_the_ratios_of_more():
    """Between two of 20 steps more changes than between two of 50: fewer can be left out than by the nearest ratio."""
    found = []
    for threshold, most in ((0.06, 2), (0.12, 2), (0.12, 4), (0.24, 6)):
        overrides = [f"cache.threshold={threshold}", f"cache.most_in_a_row={most}", "steps=20"]
        config = make_config("model=wan21_t2v_14b", "resolution=480p", "cache=magcache", *overrides)
        found.append(caching.plan(config, scheduler_table(config)).count(caching.REUSE))
    assert found == [6, 9, 9, 11]


def test_a_curve_over_its_own_steps_is_itself():
    curve = caching.read_curve(CURVES / "wan22_t2v_a14b.yaml")
    numpy.testing.assert_allclose(curve.at(curve.sigmas)[1:], curve.ratios, rtol=1e-6)


def test_each_expert_begins_with_steps_of_its_own():
    config = make_config("model=wan22_t2v_a14b", "resolution=720p", "cache=magcache", "cache.threshold=1")
    work = caching.plan(config, scheduler_table(config))
    assert caching.REUSE not in work[:5] and work[5] == caching.REUSE
    assert caching.REUSE not in work[26:28], "the second expert's first steps"


def test_guidance_rests_in_every_step_but_the_fifth():
    config = make_config("steps=50", "cache=guidance")
    work = caching.plan(config, scheduler_table(config))
    assert work.count(caching.PROMPT) == 23 and caching.REUSE not in work
    assert [place for place in range(16, 45) if work[place] == caching.FULL] == [16, 21, 26, 31, 36, 41]
    half = make_config("steps=10", "cache.guidance_stop=0.5")
    assert caching.plan(half, scheduler_table(half)) == [caching.FULL] * 5 + [caching.PROMPT] * 5


def test_the_adaptive_cache_sums_up_what_it_leaves_out():
    config = make_config("steps=10", "cache=easycache", "cache.threshold=0.1", "cache.retention=0.2", "cache.last=1")
    adaptive, kinds = caching.Adaptive(config, scheduler_table(config)), []
    for place in range(10):
        kinds.append(adaptive.choose(place, caching.FULL))
        # the velocity changes by 0.6 times what the latents do, and is of size 1; the latents change by 0.1 a step
        adaptive.learn(numpy.array([0.1, 1.0, 0.12, 0.2]), kinds[-1])
    computed, left_out = caching.FULL, caching.REUSE  # 0.06 is little enough, 0.12 is not
    assert kinds == [computed, computed, *[left_out, computed] * 4]


def test_the_guess_is_the_formula():
    generator = numpy.random.default_rng(0)
    prompt, last = generator.normal(size=(1, 4, 3, 8, 12)), generator.normal(size=(2, 4, 3, 8, 12))
    difference = numpy.fft.fft2(last[1:]) - numpy.fft.fft2(last[:1])
    frequencies = numpy.abs(numpy.fft.fftfreq(8))[:, None], numpy.abs(numpy.fft.fftfreq(12))[None]
    low = (frequencies[0] <= 1 / 8) & (frequencies[1] <= 1 / 8)
    expected = numpy.fft.ifft2(numpy.fft.fft2(prompt) + numpy.where(low, 1.2, 1.0) * difference).real
    made = guess(numpy.float32(prompt), numpy.float32(last), numpy.float32([1.2, 1.0]))
    numpy.testing.assert_allclose(made, expected, atol=1e-4)


# ---------------------------------------------------------------- runs


@pytest.fixture
def run(tmp_path):
    """Run the tiny model with a cache; gives its config and its values."""

    def run_it(*overrides, folder="run"):
        arguments = [*SMALL, *TEXTS, *tiny.model(), *overrides]
        return make_config(*arguments), results(run_into(tmp_path / folder, *arguments))

    return run_it


def test_without_a_cache_there_is_no_trace_of_one():
    stage = build(resolve_here(*SMALL, *tiny.model()), "denoise")
    assert list(stage.programs.entries) == ["step"] and list(stage.programs.entries["step"].arguments[0]) == ["slots"]


def in_diffusers(config, work):
    """diffusers' latents where the blocks are left out in some steps and what they added last is added again."""
    pipeline = reference.load(tiny.checkpoint("text"), config)
    transformer, kept, calls = pipeline.transformer, {}, []
    blocks = transformer.blocks

    class Blocks(torch.nn.Module):
        def forward(self, hidden, *rest):
            branch, step = len(calls) % 2, len(calls) // 2
            calls.append(None)
            if work[step] == caching.REUSE:
                return hidden + kept[branch]
            out = hidden
            for block in blocks:
                out = block(out, *rest)
            kept[branch] = out - hidden
            return out

    transformer.blocks = torch.nn.ModuleList([Blocks()])
    return reference.make(pipeline, config, decoded=False)[0]


MAGCACHE = ["cache=magcache", "cache.curve=wan21_t2v_1_3b", "steps=10", "stages=[text,denoise]"]
EIGHT = ["mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=sequence"]


@pytest.mark.parametrize("layout", [
    pytest.param([], id="one device"),
    pytest.param(["guidance=sequential"], id="one prompt after the other", marks=pytest.mark.full),
    pytest.param(EIGHT, id="eight devices", marks=pytest.mark.full),
])
def test_magcache_reuses_what_the_blocks_added(run, layout):
    config, values = run(*MAGCACHE, *layout)
    work = caching.plan(config, scheduler_table(config))
    assert 3 <= work.count(caching.REUSE) <= 6
    assert relative_error(values["latents"], in_diffusers(config, work)) < 1e-4


@pytest.mark.full
def test_resting_guidance_is_the_same_over_all_chips(run, unkept):
    """On a mesh with guidance over dp the prompt alone has its tokens over dp too."""
    mode = ["cache=magcache_guidance", *MAGCACHE[1:], "cache.guidance_every=3"]
    _, one = run(*mode)
    session.clear()
    config, eight = run(*mode, *EIGHT, folder="eight")
    assert caching.PROMPT in caching.plan(config, scheduler_table(config))
    text = session.stages["denoise"].programs.lower()["prompt"].as_text()
    assert '{"dp", "sp"}' in text or '"dp","sp"' in text.replace(" ", ""), "tokens over both axes"
    assert relative_error(eight["latents"], one["latents"]) < 1e-4


def test_easycache_leaves_steps_out_and_says_so(run, tmp_path):
    run("cache=easycache", "cache.threshold=1", "steps=8", "stages=[text,denoise]")
    work = metrics(tmp_path / "run")["step_work"]
    assert work["reuse"] >= 3 and sum(work.values()) == 8


@pytest.mark.system
@pytest.mark.parametrize("mode", [
    "magcache_guidance",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("guidance", "magcache", "easycache")),
])
def test_a_mode_is_resumed_and_replayed(mode, tmp_path, two_layers):
    """The same steps are left out, so the frames are the same bit for bit, and the video says which mode made it."""
    settings = ["cache.guidance_every=3", "cache.threshold=0.3", "cache.curve=wan21_t2v_1_3b", "preview_every=3"]
    first = run_into(tmp_path / "first", *two_layers, "steps=10", f"cache={mode}", *settings)
    made, work = results(first)["frames"], metrics(first)["step_work"]
    assert work["full"] < 10 and (first / "preview.png").is_file()
    shutil.copytree(first, half := tmp_path / "half")
    for name in ("denoise.safetensors", "decode.safetensors", "video.mp4", "metrics.json"):
        (half / name).unlink()
    for again, argument in {half: f"resume={half}", tmp_path / "new": f"replay={first / 'video.mp4'}"}.items():
        run_into(again, argument, *two_layers, "steps=10")
        assert numpy.array_equal(results(again)["frames"], made), argument
        assert metrics(again)["step_work"] == work


def test_calibration_writes_a_curve_that_a_run_can_use(tmp_path, monkeypatch):
    arguments = [*SMALL, *tiny.model(), "steps=6"]
    prompts = 'calibrate.prompts=["a red ball","a blue star"]'
    config = make_config("task=calibrate", *arguments, prompts)
    validate(config)
    calibrate(config, tmp_path)
    stored = yaml.safe_load((tmp_path / "demo.yaml").read_text())
    assert len(stored["ratios"]) == len(stored["ratios_negative"]) == 5 and stored["solver"] == "unipc"
    assert all(0.2 < ratio < 5 for ratio in stored["ratios"]) and (tmp_path / "curve.png").is_file()
    monkeypatch.setattr(caches, "CURVES", tmp_path)
    assert len(caching.plan(make_config(*arguments, "cache=magcache"), scheduler_table(config))) == 6


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["cache=magcache", "cache.curve=nobody"], "cache.curve=nobody: there is no such curve; cache=easycache needs"),
        (["cache=guidance", "guidance_scale=1"], "cache=guidance: lets guidance rest, and guidance_scale=1.0 is none"),
        (["cache.mode=calibrate"], "cache.mode=calibrate: unknown; one of: magcache, easycache"),
        (["cache.guidance_start=0.6", "cache.guidance_stop=0.5"], "guidance_start=0.6: must be below guidance_stop"),
        (["cache=easycache", "scheduler=renoise"], "scheduler=renoise draws noise in every step"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config(*overrides))


def test_every_curve_says_where_it_is_from():
    for path in CURVES.glob("*.yaml"):
        stored = yaml.safe_load(path.read_text())
        assert {"source", "commit", "licence", "steps", "shift", "solver"} <= stored.keys(), path
        assert len(stored["ratios"]) == len(stored["ratios_negative"]) == stored["steps"] - 1
        assert OmegaConf.load(path) is not None and path.read_text().startswith("# ")
