"""Free text reaches the config unharmed, and Hydra's errors come out as one clear message."""
import subprocess
import sys

import pytest

from tests.conftest import ROOT, make_config
from wan_torchax.config import commandline, registry
from wan_torchax.config.schema import ConfigError

TEXTS = [
    "a cat, running = fun (really), 你好!",
    "it's \"quoted\" and 'quoted'",
    "braces {a: b} [c, d] and ${model.name} or \\${x}",
    "back\\slash, a trailing one \\",
    "# not a comment % & * ? | ; $HOME ~ !",
    "key=value other=thing +more ~less @here",
    "emoji 🎬 and tabs\tinside",
    "null",
    "42",
    "true",
    "'",
    "\\'",
    "choice(a,b)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_prompt_arrives_as_typed(text):
    config = make_config(f"prompt={text}", f"negative_prompt={text}")
    assert config.prompt.text == text
    assert config.prompt.negative == text


def test_a_prompt_of_the_group_is_still_chosen_by_name():
    assert make_config("prompt=default").prompt.text == make_config().prompt.text
    sweep = "prompt=star_spin,two_lanes"
    assert commandline.rewrite([sweep]) == [sweep], "a sweep over the group"


def test_in_a_sweep_prompts_stay_whole_and_cheap_axes_go_last():
    rewritten = commandline.rewrite(["-m", "seed=1,2", "prompt=a, b", "mesh=auto,cpu_8"])
    assert rewritten == ["-m", "mesh=auto,cpu_8", "seed=1,2", "prompt.text='a, b'", "sweep.active=true"]


# what is typed -> what the message must say
UNKNOWN = {
    "stesp=3": "stesp: no such key or group; nearest: steps",
    "model.scan_block=true": "model.scan_block: no such key or group; nearest: model.scan_blocks",
    "resolutoin=480p": "resolutoin: no such key or group; nearest: resolution",
    "resolution=481p": "resolution=481p: no such option; nearest: 480p",
    "mesh=v6e8": "mesh=v6e8: no such option; nearest: v6e_8",
    "steps=many": "steps=many: must be a whole number",
    "keep_resident=perhaps": "keep_resident=perhaps: must be true or false",
    "resolution.frames=8.5": "resolution.frames=8.5: must be a whole number",
    "attention.self.blok_q=3": "attention.self.blok_q: no such key or group; nearest: attention.self.block_q",
    "steps=[1,": "steps=[1,",
}


@pytest.mark.parametrize("override", UNKNOWN)
def test_unknown_keys_and_wrong_types_are_told(override):
    with pytest.raises(ConfigError) as error:
        make_config(override)
    assert UNKNOWN[override] in str(error.value)


def command(*arguments, **options):
    program = [sys.executable, "run.py", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, **options)


def test_help_lists_groups_and_examples():
    answer = command("--help")
    assert answer.returncode == 0
    groups = ("model: demo", "mesh: auto", "resolution: 480p", "sharding:", "pipeline: ", "preset=")
    assert all(group in answer.stdout for group in groups)
    assert answer.stdout.count("  python run.py") >= 5
    assert "guidance_scale: 4.0" in command("--cfg", "job", "--resolve").stdout


def test_help_loads_neither_jax_nor_torch():
    heavy = "[name for name in ('jax', 'torch', 'diffusers', 'numpy') if name in sys.modules]"
    program = f"import atexit, runpy, sys; atexit.register(lambda: print({heavy}))"
    program += "; sys.argv = ['run.py', '--help']; runpy.run_path('run.py', run_name='__main__')"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "table", [registry.TASKS, registry.STAGES, registry.COMPONENTS], ids=["tasks", "stages", "components"]
)
def test_every_name_has_what_it_stands_for(table):
    for name in table:
        assert callable(registry.load(table, name))
