"""Lists of prompts: every format, per-line settings, seeds, shards, and lines that are broken."""
import json
import re

import pytest

from tests.conftest import make_config
from wan_torchax.config import jobs
from wan_torchax.config.commandline import compose
from wan_torchax.config.schema import ConfigError


def read(*overrides):
    config = make_config(*overrides)
    return jobs.share(jobs.read(config), config.shard)


def test_a_text_file_is_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a cat, running\n\n  it's = a dog  \n")
    first, second = read(f"prompts={file}")
    assert first.overrides == ["prompt.text='a cat, running'"] and second.overrides == [r"prompt.text='it\'s = a dog'"]
    assert re.fullmatch(r"a-cat-running-\w{8}", first.name) and re.fullmatch(r"it-s-a-dog-\w{8}", second.name)


def test_a_line_more_leaves_the_others_where_they_are(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\na dog\na cat\n")
    cat, dog, again = (job.name for job in read(f"prompts={file}"))
    assert again == f"{cat}-2"
    file.write_text("a bird\na cat\na dog\n")
    assert [job.name for job in read(f"prompts={file}")][1:] == [cat, dog]


def test_csv_and_jsonl_carry_settings_of_their_own(tmp_path):
    table, lines = tmp_path / "jobs.csv", tmp_path / "jobs.jsonl"
    table.write_text('prompt,seed,negative_prompt,resolution\n"a cat, running",3,blurry,480p\na dog,,,\n')
    lines.write_text(
        '{"prompt": "a cat, running", "seed": 3, "negative_prompt": "blurry", "resolution": "480p"}\n\n'
        '{"prompt": "a dog"}\n'
    )
    expected = [
        ["prompt.text='a cat, running'", "prompt.negative='blurry'", "resolution=480p", "seed=3"],
        ["prompt.text='a dog'"],
    ]
    for file in (table, lines):
        parsed = read(f"prompts={file}")
        assert [sorted(job.overrides) for job in parsed] == [sorted(row) for row in expected]
        assert all(job.error is None for job in parsed)
        config = compose(parsed[0].overrides)
        settings = config.prompt.text, config.prompt.negative, config.seed, config.resolution.width
        assert settings == ("a cat, running", "blurry", 3, 832)


def test_a_list_names_files_beside_it_and_no_others(tmp_path):
    file, other = tmp_path / "jobs.csv", tmp_path / "secret" / "photo.png"
    (tmp_path / "list").mkdir(), other.parent.mkdir()
    (tmp_path / "list" / "link.png").symlink_to(other)
    file = tmp_path / "list" / "jobs.jsonl"
    lines = [{"image": "photo.png"}, {"references": ["a.png", "b.png"]}, {"references": "[a.png]"}]
    lines += [{"image": name} for name in ("../secret/photo.png", str(other), "link.png", 7)]
    file.write_text("\n".join(json.dumps({"prompt": "a cat"} | line) for line in lines))
    beside = tmp_path / "list"
    first, second, third, *bad = read(f"prompts={file}")
    assert compose(first.overrides).image == str(beside / "photo.png")
    assert compose(second.overrides).references == [str(beside / "a.png"), str(beside / "b.png")]
    assert compose(third.overrides).references == [str(beside / "a.png")]
    assert all("a list may only name files in its own folder" in job.error for job in bad)
    (typed,) = read(f'prompts=[{{"prompt": "a", "image": "{other}"}}]')
    assert "a list may only name files in its own folder" in typed.error


def test_a_list_on_the_command_line():
    parsed = read('prompts=["one, two", {"prompt": "three", "seed": 4}]')
    assert [job.overrides for job in parsed] == [["prompt.text='one, two'"], ["prompt.text='three'", "seed=4"]]


def test_seeds_multiply_the_prompts():
    names = [re.sub("-[0-9a-f]{8}-", "-", job.name) for job in read('prompts=["a", "b"]', "seeds=[5,9]")]
    assert names == ["a-seed5", "a-seed9", "b-seed5", "b-seed9"]
    jobs = read("seeds=3", "seed=7")
    assert [(job.name, job.overrides) for job in jobs] == [(f"seed{seed}", [f"seed={seed}"]) for seed in (7, 8, 9)]


def test_a_lines_own_seed_gives_way_and_that_is_told(caplog):
    job, = read('prompts=[{"prompt": "a", "seed": 3}]', "seeds=[5]")
    assert job.overrides == ["prompt.text='a'", "seed=5"]
    assert "line 1: its own seed=3 gives way to seeds=5" in caplog.text


def test_shards_split_the_list_once_and_whole():
    prompts = 'prompts=["a", "b", "c", "d", "e"]'
    parts = [[job.name[0] for job in read(prompts, f"shard={part}/3")] for part in (1, 2, 3)]
    assert parts == [["a", "d"], ["b", "e"], ["c"]]


def test_together_are_those_that_differ_in_text_and_seed_alone(tmp_path):
    """A share of a list has some seeds of a line, and then of another with settings of its own."""
    file = tmp_path / "jobs.jsonl"
    lines = [{"prompt": "a"}, {"prompt": "b", "negative_prompt": "c"}, {"prompt": "d", "steps": 3}, {"seed": 1}]
    file.write_text("\n".join(map(json.dumps, lines)))
    for shard, sizes in ((None, [3] * 4), ("1/3", [2, 1, 1]), ("1/2", [3, 2, 1])):
        config = make_config(f"prompts={file}", "images=3", *([f"shard={shard}"] if shard else []))
        groups = list(jobs.groups(jobs.share(jobs.read(config), config.shard), 3))
        assert [len(group) for group in groups] == sizes
        assert all(len({"steps=3" in job.overrides for job in group}) == 1 for group in groups)
        assert all(len({job.error for job in group}) == 1 for group in groups)


def test_broken_lines_are_told_with_their_number_and_the_others_kept(tmp_path):
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "a"}\n{oops\n{"seed": 3}\n[1]\n{"prompt": "b"}\n')
    parsed = read(f"prompts={file}")
    assert [job.error and job.error.split(":")[0] for job in parsed] == [None, "line 2", "line 3", "line 4", None]
    assert "not JSON" in parsed[1].error and "no prompt" in parsed[2].error and "not a mapping" in parsed[3].error
    table = tmp_path / "jobs.csv"
    table.write_text("prompt,seed\na,1,extra\nb,2\n")
    assert [job.error and "more fields" in job.error for job in read(f"prompts={table}")] == [True, None]


def test_odd_but_sound_lines_are_taken(tmp_path):
    table, lines = tmp_path / "jobs.csv", tmp_path / "jobs.jsonl"
    table.write_text(f"prompt,seed\n{'a' * 200_000},1\nstar_spin,2\n")
    lines.write_text(
        '{"prompt": "one\u2028line\x85still", "negative_prompt": null}\n'
        '{"prompt": "", "resolution": {"height": 64, "width": 80}, "mesh.axes": {"tp": 1}}\n'
    )
    long, name = read(f"prompts={table}")
    assert len(long.overrides[0]) > 200_000 and name.overrides[0] == "prompt.text='star_spin'", "no option of a group"
    assert [job.error for job in (long, name)] == [None, None] and len(long.name) < 64
    one, two = (compose(job.overrides) for job in read(f"prompts={lines}"))
    assert one.prompt.text == "one\u2028line\x85still" and one.prompt.negative == make_config().prompt.negative
    assert two.prompt.text == "" and (two.resolution.height, two.resolution.width, two.mesh.axes.tp) == (64, 80, 1)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["prompts=/no/file.txt"], "cannot be read"),
        (["prompts=/no/file.doc"], "unknown kind of file; use .txt"),
        (["prompts=[oops"], "not a JSON list"),
        (["prompts=[]"], "holds no prompt"),
        (["seeds=few"], "seeds=few: how many .*, or a list"),
        (["seeds=0"], "seeds=0: how many .*, or a list"),
        (["seeds=2", "shard=3"], "write part/parts"),
        (["seeds=2", "shard=4/3"], "the part must be from 1 to 3"),
    ],
)
def test_bad_lists_are_told(overrides, message):
    with pytest.raises(ConfigError, match=message):
        read(*overrides)
