"""Starting at once: what a run leaves for the next, when that is taken, and when it is not."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy
import pytest
import tokenizers
from safetensors.numpy import load_file

from tests import awkward, tiny
from tests.conftest import ROOT, make_config
from tests.fork import Server, warm
from wan_torchax import events
from wan_torchax.config.inputs import with_texts
from wan_torchax.models import tokens as tokenizing
from wan_torchax.models.wan import clean
from wan_torchax.records import provenance, store
from wan_torchax.records.store import Store
from wan_torchax.runtime.build_cache import BuildCache, environment, pack_tree, unpack_tree
from wan_torchax.session import Session
from wan_torchax.stages.stage import find

# ---------------------------------------------------------------- the store


@pytest.fixture
def kept(tmp_path):
    """A store with one entry."""
    kept = Store(tmp_path / "store", 2**30)
    kept.write("table", {"steps": 3}, {"note": "x"}, {"numbers": numpy.arange(5.0)})
    return kept


def entry_of(kept) -> Path:
    (file,) = kept.folder.iterdir()
    return file


def test_an_entry_is_found_by_what_it_was_made_from(kept):
    entry = kept.read("table", {"steps": 3})
    assert entry.about == {"note": "x"} and numpy.array_equal(entry.arrays["numbers"], numpy.arange(5.0))
    assert kept.read("table", {"steps": 4}) is None and kept.read("plan", {"steps": 3}) is None
    assert entry_of(kept).stat().st_mode & 0o777 == 0o600 and kept.folder.stat().st_mode & 0o777 == 0o700


def test_numbers_come_back_as_they_went_however_they_lay_in_memory(tmp_path):
    kept, table = Store(tmp_path / "store", 2**30), numpy.arange(24.0).reshape(2, 3, 4)
    views = {"part": table[..., :-1], "turned": table.T, "one": table[:, 1]}
    kept.write("table", {}, {}, views)
    entry = kept.read("table", {})
    assert all(numpy.array_equal(entry.arrays[name], view) for name, view in views.items())


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def as_link(file):
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


DAMAGE = {
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "cut short or changed"),
    "empty": (lambda file: file.write_bytes(b""), "cut short or changed"),
    "a bit of its numbers": (lambda file: flip(file, -3), "cut short or changed"),
    "a bit of what it says": (lambda file: flip(file, 80), "cut short or changed"),
    "a bit of its checksum": (lambda file: flip(file, 5), "cut short or changed"),
    "open to others": (lambda file: file.chmod(0o620), "others can write to it"),
    "a link": (as_link, "Too many levels of symbolic links"),
    "an open folder": (lambda file: file.parent.chmod(0o755), "is open to others"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_whole_or_not_ours_alone_is_not_taken_and_told(kept, caplog, damage):
    change, reason = DAMAGE[damage]
    change(entry_of(kept))
    assert kept.read("table", {"steps": 3}) is None
    assert reason in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize("whose", ["stat", "fstat"])
def test_what_belongs_to_another_user_is_not_taken_and_told(kept, caplog, monkeypatch, whose):
    """The folder, and a single entry in a folder of ours."""
    real = getattr(os, whose)

    def foreign(path, *arguments, **options):
        status = real(path, *arguments, **options)
        return os.stat_result([*status[:4], status.st_uid + 1, *status[5:]]) if os.path != path else status

    monkeypatch.setattr(os, whose, foreign)
    assert kept.read("table", {"steps": 3}) is None
    assert f"belongs to user {os.getuid() + 1}" in caplog.text


def test_an_entry_under_anothers_name_is_not_taken(kept, caplog):
    entry_of(kept).rename(kept.path("table", {"steps": 4}))
    assert kept.read("table", {"steps": 4}) is None and "made from something else" in caplog.text


def test_the_entries_not_used_for_longest_go_first(tmp_path):
    kept = Store(tmp_path, 3000)
    tmp_path.chmod(0o700)
    for number in range(4):
        kept.write("table", {"number": number}, {}, {"numbers": numpy.zeros(100)})
        os.utime(kept.path("table", {"number": number}), (number, number))
        if number == 2:
            assert kept.read("table", {"number": 0}), "it is used, so 1 is the oldest now"
    left = [number for number in range(4) if kept.has("table", {"number": number})]
    assert 1 not in left and {0, 3} <= set(left)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3000


def test_what_a_lost_process_left_goes_too(kept):
    old, new = kept.folder / ".partial-1-table", kept.folder / ".partial-2-table"
    old.touch(), new.touch()
    os.utime(old, (0, time.time() - 2 * store.LEFT_OVER_SECONDS))
    kept.trim()
    assert not old.exists() and new.exists()


def test_a_store_that_cannot_be_written_is_told_and_no_more(tmp_path, caplog):
    (tmp_path / "file").touch()
    Store(tmp_path / "file", 1).write("table", {}, {}, {})
    assert "is not cached" in caplog.text


# ---------------------------------------------------------------- what counts


def test_trees_are_the_same_from_json():
    leaf = jax.ShapeDtypeStruct((2, 3), "float32", sharding=jax.NamedSharding(
        jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec(None, "tp")
    ))
    tree = [{"b": leaf, "a": (leaf, [leaf])}, leaf]
    packed = json.loads(json.dumps(pack_tree(tree)))
    assert jax.tree.structure(unpack_tree(packed, lambda _: 0)) == jax.tree.structure(tree)
    assert unpack_tree(packed, lambda row: row["spec"])[1] == [None, "tp"]


def test_a_line_of_the_sources_counts(tmp_path, monkeypatch):
    for folder in ("kernels", "wan_torchax/stages"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("patches.py", "kernels/splash.py", "wan_torchax/stages/text.py"):
        (tmp_path / file).write_text("x = 1\n")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    made = [provenance.sources.__wrapped__()]
    for file in ("patches.py", "kernels/splash.py", "wan_torchax/stages/text.py"):
        (tmp_path / file).write_text("x = 2\n")
        made.append(provenance.sources.__wrapped__())
    assert len(set(made)) == 4


def another_version(monkeypatch, package):
    real = provenance.version
    monkeypatch.setattr(provenance, "version", lambda name: "9.9" if name == package else real(name))


CHANGED = {
    **{f"another {package}": lambda m, package=package: another_version(m, package)
       for package in ("jax", "jaxlib", "torch", "torchax", "diffusers", "transformers")},
    "other sources": lambda m: m.setattr(provenance, "sources", lambda: "other"),
    "other flags": lambda m: m.setenv("XLA_FLAGS", "--xla_other"),
    "other TPU flags": lambda m: m.setenv("LIBTPU_INIT_ARGS", "--xla_other"),
    "another process": lambda m: m.setattr(jax, "process_index", lambda: 1),
    "another processor": lambda m: m.setattr("wan_torchax.runtime.build_cache.processor", lambda: "other"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_stands_behind_every_recipe_counts(monkeypatch, change):
    mesh = jax.make_mesh((1,), ("tp",))
    before = environment(mesh)
    assert before == environment(mesh)
    CHANGED[change](monkeypatch)
    assert environment(mesh) != before


def test_devices_and_options_of_jax_count():
    one, two = (jax.make_mesh((count,), ("tp",)) for count in (1, 2))
    assert environment(one) != environment(two)
    assert {"jax_enable_x64", "jax_default_matmul_precision"} <= environment(one)["jax"].keys()
    assert not any("cache_dir" in name for name in environment(one)["jax"])


# ---------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    """A tokenizer of the kind that Wan's checkpoints have."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator(awkward.texts(), trainer)
    content = json.loads(made.to_str())
    # Of a hundred x in a row several ways to cut are as good; the last bits of the scores would choose one.
    content["model"]["vocab"] = [[piece, round(score, 3)] for piece, score in content["model"]["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = dict(tokenizer_class="T5TokenizerFast", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_ids": 0}))
    return folder


@pytest.mark.parametrize("which", ["demo", "unigram"])
def test_500_awkward_texts_become_the_tokens_that_diffusers_gives_its_model(which, unigram, tmp_path):
    import transformers
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    folder, listed = ROOT / "models/demo/tokenizer" if which == "demo" else unigram, awkward.texts(500)
    assert len(set(listed)) > 450
    tokenizing.load_tokenizer(folder, Store(tmp_path / "store", 2**30))  # by transformers
    tokenizing.load_tokenizer.cache_clear()
    tokens, mask = tokenizing.tokenize(folder, listed, 64, Store(tmp_path / "store", 2**30), clean)  # from the store
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs(
        [prompt_clean(prompt) for prompt in listed], padding="max_length", max_length=64, truncation=True,
        return_tensors="np",
    )
    assert numpy.array_equal(tokens, expected.input_ids) and numpy.array_equal(mask, expected.attention_mask)


# ---------------------------------------------------------------- one run after the other


SIZE = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=2", "output.keep_frames=true"]
STAGES = ("text", "denoise", "decode")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """Of a model that a test may change, and a store of these tests alone."""
    folder = tmp_path_factory.mktemp("kept")
    return [*tiny.copied("text", folder / "model"), *SIZE, f"compile.store={folder / 'store'}"]


@pytest.fixture(scope="module")
def configure(overrides):
    return lambda *others: with_texts(make_config(*overrides, *others))


@pytest.fixture(scope="module")
def first(overrides, tmp_path_factory):
    """The run that finds an empty store: its folder."""
    folder = tmp_path_factory.mktemp("first") / "run"
    answer = warm().run([*overrides, f"hydra.run.dir={folder}"])
    assert answer.returncode == 0 and answer.torch, answer.output
    return folder


def run(config, names=STAGES):
    """A run as of a new process; what it gave and told."""
    heard, session = [], Session()
    tokenizing.load_tokenizer.cache_clear()
    resolved = session.resolve(config, names, heard.append)
    return session.run(resolved, names, resolved.inputs(), heard.append), heard


def stored(folder):
    """What a run has written."""
    return {key: value for name in STAGES for key, value in load_file(folder / f"{name}.safetensors").items()}


def programs(folder):
    return json.loads((folder / "metrics.json").read_text())["compile"]


def made(heard):
    return {event.program: event.from_store for event in heard if isinstance(event, events.Compiled)}


def began(heard):
    return [event.phase for event in heard if isinstance(event, events.Began)]


@pytest.mark.system
def test_the_first_run_traces_and_the_second_does_not_and_gives_the_same(configure, first):
    assert {name: program["from_store"] for name, program in programs(first).items()} == dict.fromkeys(
        ["text.text_encoder", "denoise.step", "decode.first", "decode.later"], False
    )
    again, heard = run(configure())
    assert made(heard) == dict.fromkeys(["denoise.step", "decode.first", "decode.later"], True)
    assert "load_text_encoder" not in began(heard), "the prompt is known"
    assert not [event for event in heard if isinstance(event, events.Took) and event.part == "tracing"]
    for name, value in stored(first).items():
        assert numpy.array_equal(value, again[name]), name


@pytest.mark.system
def test_a_warm_run_imports_no_torch_and_makes_the_same_video(overrides, first, tmp_path):
    server = Server()  # it has not imported torch either
    try:
        second = server.run([*overrides, f"hydra.run.dir={tmp_path / 'run'}"])
    finally:
        server.close()
    assert second.returncode == 0 and not second.torch, second.output
    ours, theirs = stored(tmp_path / "run"), stored(first)
    assert ours.keys() == theirs.keys() and all(numpy.array_equal(ours[key], theirs[key]) for key in ours)
    assert all(program["from_store"] for program in programs(tmp_path / "run").values())
    start = json.loads((tmp_path / "run" / "metrics.json").read_text())["start"]
    assert start.keys() == {"imports", "devices", "tracing", "compiling", "reading", "sending"}
    assert start["tracing"] == 0 < min(start[part] for part in ("imports", "devices", "reading", "sending"))


@pytest.mark.system
def test_a_new_prompt_is_encoded_by_the_program_that_is_kept(configure, first):
    _, heard = run(configure("prompt=something else"), ["text"])
    assert made(heard) == {"text.text_encoder": True}
    _, heard = run(configure("prompt= something\telse "), ["text"])
    assert made(heard) == {}, "the same once it is cleaned"


@pytest.mark.system
def test_an_executable_that_cannot_be_loaded_is_made_again_and_told(configure, first, caplog):
    folder = Path(configure().compile.store)
    before = {file: file.read_bytes() for file in folder.glob("executable-*")}
    for file in before:
        flip(file, -9)
    values, heard = run(configure("prompt=a third one"), ["text"])
    assert made(heard) == {"text.text_encoder": False} and "retracing text" in caplog.text
    assert "in the store: it was cut short or changed" in caplog.text
    assert numpy.isfinite(values["embeddings"]).all()
    for file, content in before.items():
        file.write_bytes(content)


def test_what_is_kept_runs_also_if_jaxs_own_cache_had_it(configure, tmp_path):
    """An executable that came out of that cache would be written without its functions, and fail where it runs."""
    jaxs, ours = f"compile.cache_dir={tmp_path / 'jax'}", f"compile.store={tmp_path / 'store'}"
    small = ["model.text_tokens=16", jaxs]
    run(configure(*small, "compile.store=null"), ["text"])
    expected, _ = run(configure(*small, ours), ["text"])
    (tmp_path / "store").rename(tmp_path / "moved")
    for file in (tmp_path / "moved").glob("result-*"):
        file.unlink()
    again, heard = run(configure(*small, f"compile.store={tmp_path / 'moved'}"), ["text"])
    assert made(heard) == {"text.text_encoder": True}
    assert numpy.array_equal(expected["embeddings"], again["embeddings"])


FACTORS = """
import json, pathlib, sys, jax, numpy
from wan_torchax.records.store import Store
from wan_torchax.runtime import build_cache

cache = build_cache.BuildCache(Store(pathlib.Path(sys.argv[1]), 2**30), {})
mesh = jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1])
struct = jax.ShapeDtypeStruct((4, 3), "float32", sharding=build_cache.sharded(mesh, ()))
if sys.argv[2:]:
    made, _ = build_cache.load_program(cache, json.loads(sys.argv[2]), {}, mesh)
    print(numpy.asarray(made({}, jax.device_put(numpy.eye(4, 3, dtype="float32"), struct.sharding))).tolist())
else:
    lowered = jax.jit(lambda arrays, matrix: jax.numpy.linalg.qr(matrix)[0]).lower({}, struct)
    about = build_cache.describe_program(lowered, "component", [struct])
    build_cache.compile_and_cache(cache, about, lowered)
    print(json.dumps(about))
"""


def test_a_program_that_calls_lapack_runs_where_it_was_not_traced(tmp_path):
    command, about = [sys.executable, "-c", FACTORS, tmp_path / "store"], []
    for _ in range(2):
        ended = subprocess.run([*command, *about], cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        about = [ended.stdout]
    assert numpy.abs(json.loads(ended.stdout)).tolist() == numpy.eye(4, 3).tolist()


def test_jaxs_own_cache_serves_where_nothing_is_kept(configure, tmp_path):
    config = configure("model.text_tokens=24", f"compile.cache_dir={tmp_path}", "compile.store=null")
    for known in (False, True):
        jax.clear_caches()
        _, heard = run(config, ["text"])
        assert [event.from_cache for event in heard if isinstance(event, events.Compiled)] == [known]


def misses(config, names=STAGES) -> set[str]:
    """The entries that a run would not find."""
    session = Session()
    resolved = session.resolve(config, names)
    build_cache = BuildCache.of(resolved)
    kinds = {f"programs-{name}": find(name).recipe_for(name, resolved) for name in names}
    return {name for name, recipe in kinds.items() if build_cache.read(name, recipe) is None}


ALL = {"programs-text", "programs-denoise", "programs-decode"}
LEAVES = {
    "seed=8": set(), "guidance_scale=4": set(), "prompt=x": set(), "output.quality=20": set(), "preview_every=1": set(),
    "guidance_scale=1": {"programs-text", "programs-denoise"}, "resolution.frames=9": {"programs-denoise"},
    "guidance=sequential": {"programs-denoise"}, "model.dtype.vae=bfloat16": {"programs-decode"},
    "model.text_tokens=64": {"programs-text", "programs-denoise"}, "compile.matmul_precision=highest": ALL,
    "ops.conv3d.platforms=[tpu]": ALL, "model.scan_blocks=false": {"programs-denoise"}, "mesh=cpu_8": ALL,
    "scheduler=euler": {"programs-denoise"},
}


@pytest.mark.system
@pytest.mark.parametrize("override", LEAVES)
def test_a_leaf_that_counts_misses_and_no_other_does(configure, first, override):
    assert misses(configure(override)) == LEAVES[override]


@pytest.mark.system
def test_another_fine_tune_misses_its_plan_and_its_embeddings(configure, first):
    folder = Path(configure().model.path)
    file = folder / "text_encoder" / "model.safetensors"
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-64] + bytes(64))
        _, heard = run(configure(), ["text"])
    finally:
        file.write_bytes(content)
    assert "load_text_encoder" in began(heard) and made(heard) == {"text.text_encoder": True}
    kinds = [file.name.rpartition("-")[0] for file in Path(configure().compile.store).iterdir()]
    assert kinds.count("plan-text_encoder") == 2 and kinds.count("plan-vae") == 1


@pytest.mark.system
def test_without_a_store_nothing_is_kept(configure, first):
    folder = Path(configure().compile.store)
    before = sorted(folder.iterdir())
    _, heard = run(configure("compile.store=null", "prompt=nobody will know"), ["text"])
    assert made(heard) == {"text.text_encoder": False} and sorted(folder.iterdir()) == before


@pytest.mark.system
def test_why_a_run_traces_is_one_line(configure, first, caplog):
    with caplog.at_level("INFO"):
        run(configure("model.text_tokens=32", "prompt=y"), ["text"])
    lines = [record.getMessage() for record in caplog.records if "traced, since" in record.getMessage()]
    assert lines == ["text: traced, since the store has none with settings.model.text_tokens=32 (but 128)"]
