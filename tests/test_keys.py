"""Keys cannot forget: every leaf of the config is changed in turn, and what follows from it has another key then."""
import contextlib
import functools
import itertools
import json
import re
from pathlib import Path

import jax
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests import given, tiny
from tests.conftest import make_config
from wan_torchax.config import inputs
from wan_torchax.config.resolve import Job, resolve
from wan_torchax.config.schema import ConfigError, Rule, copied
from wan_torchax.config.wording import flatten
from wan_torchax.devices.mesh import Here
from wan_torchax.records.outputs import config_hash, settle
from wan_torchax.runtime.checkpoint import find_all
from wan_torchax.runtime.components import Component
from wan_torchax.runtime.jobs import find_job
from wan_torchax.session import Session
from wan_torchax.stages.stage import LAST_BITS, find, result_settings

SMALL = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "mesh=cpu_8", "attention=xla"]
# What a leaf is changed to, by its name, where a number more or another letter would not do.
OTHERS = {
    r"model\.dtype\..*": "bfloat16",
    r"model\.noise_dtype": "bfloat16",
    r"attention\.devices": {"cpu": "xla"},
    r"stages": ["text"],
    r"guidance": "sequential",
    r"guidance_scale": 1.0,
    r"mesh\.axes\.dp": -1,
    r"mesh\.platform": None,
    r"sharding\.(axes\.heads|attention\.batch)": None,
    r"sharding\.picture": [],
    r"sharding\.attention\.groups": [1, 1],
    r"scheduler\.target": "DPMSolverMultistepScheduler",
    r"scheduler\.sigmas": [1.0, 0.5],
    r"scheduler\.round_times": "integer",
    r"compile\.matmul_precision": "highest",
    r"compile\.store": None,
    r"(vae|preview)\.component": "tiny_vae",
    r"guider\.skip_layers": [0],
    r"guider\.mode": "cfg_zero",
    r"adapter\.mode": "beside",
    r"windows\.mode": "static",
    r"resolution\.(height|width)": 128,
    r"resolution\.frames": 9,
    r"attention\..*\.block_(q|kv)": 8,
    r"ops\..*\.platforms": ["tpu"],
    r"serve\.choices": {"scheduler": ["unipc"]},
}
# Leaves that say what the model or the pipeline is. Another value is another model, which this checkpoint is not.
FIXED = ("model.architecture.", "model.family", "pipeline.", "model.path", "scheduler.arguments.use_flow_sigmas")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def config(checkpoint):
    return make_config(*tiny.overrides(checkpoint), *SMALL)


def leaves(config):
    return [key for key, _ in flatten(OmegaConf.to_container(config)) if not key.startswith(FIXED)]


def changed(config, key):
    """The config with one leaf changed, to the first other value that its type takes."""
    named = [other for pattern, other in OTHERS.items() if re.fullmatch(pattern, key)]
    for other in named or others(OmegaConf.select(config, key)):
        changed = copied(config)
        with contextlib.suppress(OmegaConfBaseException):
            OmegaConf.update(changed, key, other, merge=False, force_add=True)
            return changed
    raise AssertionError(f"{key}: no other value to try; add one to OTHERS")


def others(value):
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1]
    if isinstance(value, list) or OmegaConf.is_list(value):
        return [[] if len(value) else ["tp"]]
    if OmegaConf.is_dict(value):  # an empty table
        return [{"added": Rule("encoder", ["heads"])}, {"added": "x"}]
    return [f"{value}_other", 1, 1.5, True]


@pytest.fixture
def unchecked(monkeypatch):
    """Configs that are wrong are resolved too: what follows from them is the question."""
    check_nothing(monkeypatch)


def check_nothing(monkeypatch):
    monkeypatch.setattr("wan_torchax.config.validation.validate", lambda config: None)
    monkeypatch.setattr("wan_torchax.config.validation.validate_resolved", lambda config, devices: None)


@functools.cache  # no leaf that is changed below says where the checkpoint is
def checkpoints(path, changed_at):
    config = make_config(*tiny.overrides(path))
    return find_all(config, [name for name in config.model.architecture if (path / name).is_dir()])


def resolve_all(config):
    weights = Path(config.model.path) / "transformer" / "diffusion_pytorch_model.safetensors"
    stored = checkpoints(Path(config.model.path), weights.stat().st_mtime_ns)
    return resolve(Job.of(config, stored), Here(jax.devices("cpu")))


def keys_of(config) -> dict[str, str]:
    """Of every stage's programs and every component's arrays; none where the config is refused before it gets there."""
    keys = {}
    with contextlib.suppress(ConfigError):
        resolved = resolve_all(config)
        for name in resolved.config.model.architecture:
            keys[name] = Component.key_for(name, resolved)
        for name in resolved.graph.stages:
            with contextlib.suppress(ConfigError):
                keys[name] = find(name).recipe_for(name, resolved).key
    return keys


def made(name, config):
    """What a key stands for: a component's plan of arrays, a stage's lowered programs; or why there are none."""
    jax.config.update("jax_default_matmul_precision", config.compile.matmul_precision)  # as devices.start does
    try:
        resolved = resolve_all(config)
        if name in resolved.config.model.architecture:
            specs = Component(name, resolved).specs.items()
            return {key: (spec.struct, spec.sources, spec.stacked) for key, spec in specs}
        programs = Session().build(resolved, [name])[name].programs
        return {key: program.as_text() for key, program in programs.lower().items()}
    except Exception as error:
        return str(error)
    finally:
        jax.config.update("jax_default_matmul_precision", None)


NAMES = ("text_encoder", "transformer", "vae", "text", "denoise", "decode")


@pytest.fixture(scope="module")
def keys(config):
    keys = keys_of(config)
    assert keys.keys() >= set(NAMES)
    return keys


@pytest.fixture(scope="module")
def keys_by_leaf(config):
    """The keys with each leaf changed in turn."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_nothing(monkeypatch)
        base, found = keys_of(config), {}
        assert base.keys() >= set(NAMES)
        for _, named in itertools.groupby(leaves(config), lambda leaf: leaf.partition(".")[0]):
            group = list(named)
            if len(group) > 1 and keys_of(functools.reduce(changed, group, config)) == base:
                found |= dict.fromkeys(group, base)  # none of them counts
            else:
                found |= {leaf: keys_of(changed(config, leaf)) for leaf in group}
        return found


@pytest.mark.system
@pytest.mark.parametrize("name", NAMES)
def test_what_a_key_does_not_notice_changes_nothing(config, keys, keys_by_leaf, name, unchecked):
    """All leaves that a key leaves out, changed at once; if anything follows, each half of them, to say which. Some
    count only together, and then the key notices both."""
    unnoticed = [leaf for leaf, new in keys_by_leaf.items() if new.get(name) == keys[name]]
    assert len(unnoticed) > 40 and "seed" in unnoticed
    before = made(name, config)

    def forgotten(leaves):
        together = functools.reduce(changed, leaves, config)
        if keys_of(together).get(name) == keys[name] and made(name, together) == before:
            return []
        half = len(leaves) // 2
        return forgotten(leaves[:half]) + forgotten(leaves[half:]) if half else leaves

    assert forgotten(unnoticed) == []


FOLLOWS = [
    ("transformer", "model.dtype.transformer"), ("denoise", "model.scan_blocks"), ("denoise", "guidance"),
    ("denoise", "guidance_scale"), ("denoise", "attention.self.block_q"), ("text", "model.text_tokens"),
    ("denoise", "compile.matmul_precision"), ("decode", "sharding.picture"), ("denoise", "sharding.axes.heads"),
    ("text_encoder", "mesh.axes.tp"),
]
FOLLOWS += [pytest.param(*pair, marks=pytest.mark.full) for pair in (
    ("denoise", "resolution.frames"), ("decode", "resolution.height"), ("decode", "ops.conv3d.platforms"),
    ("denoise", "scheduler.target"), ("text", "model.dtype.transformer"),
)]


@pytest.mark.system
@pytest.mark.parametrize("name, leaf", FOLLOWS)
def test_what_follows_from_a_leaf_is_seen(config, keys, keys_by_leaf, name, leaf, unchecked):
    """So that the test above could fail."""
    assert made(name, changed(config, leaf)) != made(name, config)
    assert keys_by_leaf[leaf].get(name) != keys[name]


CHEAP = ("seed=7", "prompt=a blue star", "negative_prompt=a red one", "steps=9", "guidance_scale=7", "resolution.fps=3",
         "resolution.flow_shift=9", "output.quality=30", "preview_every=1", "keep_resident=true")


@pytest.mark.parametrize("override", CHEAP)
def test_what_costs_nothing_to_sweep_makes_nothing_anew(checkpoint, keys, override):
    assert keys_of(make_config(*tiny.overrides(checkpoint), *SMALL, override)) == keys


def test_other_weights_are_other_arrays_and_the_same_programs(config, keys, checkpoint):
    file = checkpoint / "transformer" / "diffusion_pytorch_model.safetensors"
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-64] + bytes(64))
        others = keys_of(config)
    finally:
        file.write_bytes(content)
    assert {name for name in keys if keys[name] != others[name]} == {"transformer"}


# ---------------------------------------------------------------- results and hashes


@pytest.mark.parametrize("pipeline", tiny.PIPELINES)
def test_a_result_depends_on_all_that_a_stage_can_read(pipeline):
    """What a stage sees of a config is in its result's key, but for keys that change the last bits or nothing."""
    job = find_job(make_config(*tiny.model(tiny.PIPELINES[pipeline]), *SMALL, *given.overrides(pipeline)))
    for name in job.graph.stages:
        kind, settings, view = find(name), result_settings(job, name), find(name).view_of(name, job)
        for key, value in flatten(OmegaConf.to_container(view.config)):
            beside = LAST_BITS.fullmatch(key) or key.startswith(kind.reads_beside or "\0")
            assert beside or settings[key] == value, f"{name} reads {key}"
        assert all(settings[f"weights.{part}"] for part in job.graph.stages[name].uses)
        files = [key for key in job.graph.input_keys(name) if key in inputs.FILES]
        assert all(bool(settings[f"input.{key}"]) == bool(job.config[key]) for key in files)
        for before in job.graph.upstream(name):
            assert result_settings(job, before).items() <= settings.items()
        with pytest.raises(OmegaConfBaseException):
            _ = view.config.compile.store


@pytest.mark.parametrize("pipeline", tiny.PIPELINES)
def test_what_changes_a_result_changes_its_key(pipeline):
    model = [*tiny.model(tiny.PIPELINES[pipeline]), *SMALL, *given.overrides(pipeline)]
    last = list(make_config(*model).pipeline.stages)[-1]

    def settings(*overrides):
        return result_settings(find_job(make_config(*model, *overrides)), last)

    base = settings()
    changes = ["seed=7", "prompt=x", "steps=9", "guidance_scale=7", "resolution.frames=9", "attention.self.window=5"]
    changes += ["resolution.fps=3"] if pipeline in ("v2v", "vace", "animate", "replace", "animate2") else []
    changes += ["driving_prompt=y"] if pipeline == "animate2" else []
    changes += ["fit=stretch"] if given.TAKEN[pipeline] else []
    changes += [f"{key}={given.picture('last')}" for key in given.TAKEN[pipeline] if key == "image"]
    for change in changes:
        assert settings(change) != base, change
    for same in ("output.quality=30", "model.scan_blocks=false", "guidance=sequential", "sharding=replicate"):
        assert settings(same) == base, same


def hash_of(*overrides, prints=None):
    return config_hash(settle(make_config(*overrides)), prints or {"vae": "a"})


def test_the_hash_of_a_config_changes_with_what_makes_the_video_or_its_time():
    base = hash_of()
    counted = ("seed=7", "prompt=x", "attention=xla", "mesh=cpu_8", "ops=none", "model.scan_blocks=false", "steps=9")
    for override in counted:
        assert hash_of(override) != base, override
    assert hash_of(prints={"vae": "b"}) != base


def test_the_hash_of_a_config_leaves_out_what_makes_neither():
    base = hash_of()
    uncounted = (
        "plan.margin_gib=9", "tune.repeats=9", "output.quality=9", "task=plan", "profile=true", "preview_every=3",
        "compile.cache_dir=/elsewhere", "compile.store=null", "compile.store_gib=1",
        "traceback=true", "+attention.devices.TPU_v9=xla",
    )
    for override in uncounted:
        assert hash_of(override) == base, override


def test_a_key_that_a_later_version_adds_leaves_the_hash_as_it_was():
    """With the default that means what it was before there was the key."""
    settled = settle(make_config())
    before = config_hash(settled, {})
    later = json.loads(json.dumps(settled))
    for key in ("interpret", "outline", "smooth_keys"):  # as if these had just been added
        del settled["attention"]["self"][key]
    assert config_hash(settled, {}) == config_hash(later, {}) == before


def test_a_curve_measured_again_is_another_result(monkeypatch, tmp_path):
    from wan_torchax.config import caches

    name = "wan21_t2v_1_3b"
    file = tmp_path / f"{name}.yaml"
    file.write_text((caches.CURVES / file.name).read_text())
    monkeypatch.setattr(caches, "CURVES", tmp_path)
    config = make_config(*tiny.model(), *SMALL, "cache=magcache", f"cache.curve={name}")
    before = result_settings(find_job(config), "denoise")
    file.write_text(file.read_text().replace("0.9", "0.8"))
    assert result_settings(find_job(config), "denoise") != before
