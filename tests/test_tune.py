"""task=tune: times what runs, passes over what does not, and leaves a config that composes."""
import json
import shutil

import pytest
import yaml

from tests.conftest import SMALL, make_config
from wan_torchax.config.commandline import CONF
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.tasks.tune import tune


@pytest.fixture
def conf(tmp_path):
    (tmp_path / "conf" / "attention").mkdir(parents=True)
    return tmp_path / "conf"


def search(tmp_path, conf, *overrides):
    config = make_config(*SMALL, "task=tune", "attention=xla", "tune.repeats=1", *overrides)
    return tune(config, tmp_path, conf=conf)


def test_the_fastest_blocks_become_a_config(tmp_path, conf):
    blocks = 'tune.search=["attention.self.block_q=8,32,-5","attention.self.block_kv=32"]'
    seconds = search(tmp_path, conf, blocks)
    tries = json.loads((tmp_path / "tune.json").read_text())["tries"]
    assert [row["seconds"] is None for row in tries] == [False, False, True]
    assert "block_q=-5: must be positive" in tries[2]["error"]
    assert seconds == min(row["seconds"] for row in tries[:2])
    (written,) = (conf / "attention").iterdir()
    assert written.name == "cpu_demo_64x64x5.yaml" and written.read_text().startswith("# Tuned for demo_64x64x5 on cpu")
    best = min(tries[:2], key=lambda row: row["seconds"])["values"]
    assert yaml.safe_load(written.read_text())["self"]["block_q"] == best["attention.self.block_q"]
    target = CONF / "attention" / written.name
    try:
        shutil.copy(written, target)
        assert make_config(f"attention={target.stem}").attention.self.block_q == best["attention.self.block_q"]
    finally:
        target.unlink()


def test_auto_is_resolved_first(tmp_path, conf):
    search(tmp_path, conf, "attention=auto", 'tune.search=["attention.self.block_kv=8,32"]')
    (written,) = (conf / "attention").iterdir()
    kernel = yaml.safe_load(written.read_text())["self"]
    assert kernel["kernel"] == "xla" and kernel["block_kv"] in (8, 32)


@pytest.mark.system
def test_other_keys_time_the_whole_step(tmp_path, conf):
    assert search(tmp_path, conf, 'tune.search=["guidance=batched,sequential"]') > 0
    tries = json.loads((tmp_path / "tune.json").read_text())["tries"]
    assert [row["values"]["guidance"] for row in tries if row["seconds"]] == ["batched", "sequential"]


def test_nothing_that_runs_is_an_error(tmp_path, conf):
    with pytest.raises(ConfigError, match="none of the 1 tries"):
        search(tmp_path, conf, 'tune.search=["attention.self.block_q=0"]')


@pytest.mark.parametrize(
    "value, message",
    [("[]", "name at least one key"), ('["attention.blok=1"]', "no key attention.blok"), ('["steps"]', "needs values")],
)
def test_bad_searches_are_told(value, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config("task=tune", f"tune.search={value}"))
