"""Published presets never change: each is compared with the copy it was published with.

A new preset has no copy yet: PUBLISH=1 python -m pytest tests/test_presets.py writes it (and never replaces one).
"""
import difflib
import os
import pickle
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT, make_config
from wan_torchax import private
from wan_torchax.config import inputs
from wan_torchax.config.commandline import CONF, options
from wan_torchax.config.resolve import Job
from wan_torchax.config.validation import validate
from wan_torchax.config.wording import flatten
from wan_torchax.stages.stage import result_settings

GOLDEN = Path(__file__).parent / "golden"
PICTURE = ROOT / "docs" / "demo.png"


def published(name):
    """What makes a preset's video: the settings its last stage's result depends on, and those of the file."""
    config = make_config(f"preset={name}")
    for key in set(inputs.taken(config)) - set(config.pipeline.optional) - set(inputs.VIDEOS):
        config[key] = str(PICTURE)
    validate(config, files="none")
    of_the_result = result_settings(Job.of(config, {}), list(config.pipeline.stages)[-1])
    settings = dict(flatten(OmegaConf.to_container(config, resolve=True)))
    of_the_file = "output.", "resolution."
    return {key: settings[key] for key in settings if key in of_the_result or key.startswith(of_the_file)}


@pytest.mark.parametrize("name", options("preset"))
def test_a_published_preset_does_not_change(name):
    """Keys that were added since are allowed; a value that changed or a key that went is not."""
    golden, now = GOLDEN / f"{name}.yaml", published(name)
    if not golden.exists():
        remedy = "write it with PUBLISH=1 python -m pytest tests/test_presets.py"
        assert os.environ.get("PUBLISH"), f"{name} has no published copy; {remedy}"
        golden.write_text(OmegaConf.to_yaml(OmegaConf.create(now)))
    reference = OmegaConf.to_container(pickle.loads(private.loaded(golden.read_text(), golden.name)))
    was, current = ([f"{key}: {values.get(key, 'gone')}" for key in reference] for values in (reference, now))
    difference = "\n".join(difflib.unified_diff(was, current, "published", "now", lineterm="", n=0))
    stem, _, version = name.rpartition("_v")
    assert not difference, (
        f"{name} was published and must stay as it was; put it back and add {stem}_v{int(version) + 1}\n{difference}"
    )


@pytest.mark.parametrize("name", options("preset"))
def test_a_preset_is_named_and_headed_as_the_others(name):
    named = r"(t2v|i2v|flf2v|ti2v|vace|animate2?|fun_control|fun_camera|s2v|t2i|live)_[a-z0-9_]+_v\d+"
    assert re.fullmatch(named, name), "<task>_<size>_<resolution>_<chips>_v<N>"
    text = (CONF / "preset" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    assert f"python run.py preset={name}" in text and "Hardware:" in text and "Time:" in text and "Result:" in text


def test_a_changed_preset_is_caught(monkeypatch):
    name = options("preset")[-1]
    real = make_config(f"preset={name}")
    real.steps += 1
    monkeypatch.setattr("tests.test_presets.make_config", lambda *_: real)
    with pytest.raises(AssertionError, match="must stay as it was; put it back and add .*_v2(.|\n)*steps"):
        test_a_published_preset_does_not_change(name)
