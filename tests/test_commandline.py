"""Free text reaches the config unharmed, and Hydra's errors come out as one clear message."""
import subprocess
import sys

import pytest

from tests.conftest import ROOT, make_config
from wan_torchax.config import commandline, registry
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate

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
    "task=foo": "task=foo: unknown; ",
    "num_frames=5": "num_frames: no such key or group; write resolution.frames=5",
    "width=832": "write resolution.width=832",
    "cfg=5": "write guidance_scale=5",
    "num_inference_steps=5": "write steps=5",
    "negative=blurry": "write negative_prompt=blurry",
    "--steps=5": "--steps: settings have no dashes; write steps=5",
    "--num-frames=5": "write resolution.frames=5",
    "--sampling=x": "write sampling=x",
    "--stesp=5": "--stesp: no such flag; settings are key=value; nearest: steps",
}


@pytest.mark.parametrize("override", UNKNOWN)
def test_unknown_keys_and_wrong_types_are_told(override):
    with pytest.raises(ConfigError) as error:
        validate(make_config(override))
    assert UNKNOWN[override] in str(error.value)


def test_a_task_that_is_none_is_told_all_there_are():
    with pytest.raises(ConfigError) as error:
        validate(make_config("task=foo"))
    assert all(task in str(error.value) for task in registry.TASKS)


@pytest.mark.parametrize("typed, answer", [
    (["--steps", "5"], "write steps=5"), (["--seed", "seed=3"], "write seed=…"), (["--prompt"], "write prompt=…"),
])
def test_flags_of_other_programs_are_told_what_to_write(typed, answer):
    with pytest.raises(ConfigError) as error:
        commandline.rewrite(typed)
    assert str(error.value).endswith(answer)


def test_hydras_flags_pass_also_shortened():
    typed = ["--cfg", "job", "--multi", "--config-dir=x", "-m", "seed=1"]
    assert commandline.rewrite(typed)[:4] == typed[:4]


def test_an_empty_negative_prompt_is_one():
    assert make_config("negative_prompt=").prompt.negative == ""


def test_names_of_others_lead_to_keys_that_are():
    keys = {*commandline.known_keys(), "hydra.run.dir"}
    assert set(commandline.FOREIGN.values()) <= keys
    assert not set(commandline.FOREIGN) & keys, "a key of ours is taken as it is"


def command(*arguments, **options):
    program = [sys.executable, "run.py", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, **options)


def test_help_lists_groups_and_examples():
    answer = command("--help")
    assert answer.returncode == 0
    groups = ("model: causvid_1_3b, demo, ", "mesh: auto", "resolution: 1280x720", "sharding:", "pipeline: ", "preset=")
    assert all(group in answer.stdout for group in groups)
    assert answer.stdout.count("  python run.py") >= 5
    assert commandline.TASKS.keys() == registry.TASKS.keys() and len(commandline.KEYS) >= 20
    for name, words in (commandline.TASKS | commandline.KEYS).items():
        assert any(line.split()[:1] == [name] and line.endswith(words) for line in answer.stdout.splitlines()), name
    assert commandline.KEYS.keys() <= {*commandline.known_keys(), "hydra.run.dir"}
    assert "guidance_scale: 4.0" in command("--cfg", "job", "--resolve").stdout


def test_help_loads_neither_jax_nor_torch():
    heavy = "[name for name in ('jax', 'torch', 'diffusers', 'numpy') if name in sys.modules]"
    program = f"import atexit, runpy, sys; atexit.register(lambda: print({heavy}))"
    program += "; sys.argv = ['run.py', '--help']; runpy.run_path('run.py', run_name='__main__')"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "table", [registry.TASKS, registry.STAGES, registry.FAMILIES], ids=["tasks", "stages", "families"]
)
def test_every_name_has_what_it_stands_for(table):
    for name in table:
        assert registry.load(table, name) is not None
