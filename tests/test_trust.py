"""What a stranger made can only choose among what the project offers: videos, folders, lists, checkpoints."""
import contextlib
import fnmatch
import functools
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import tracemalloc
import typing
from random import Random
from types import SimpleNamespace

import jax
import numpy
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from safetensors.torch import save_file

from tests import given, lycoris, tiny
from tests.conftest import ROOT, SMALL, make_config
from tests.serving import Server
from wan_torchax.config import clips, frames, inputs, jobs, sounds, trust
from wan_torchax.config.commandline import compose, literal, plain_text, rewrite
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import flatten
from wan_torchax.models.tokens import load_tokenizer
from wan_torchax.records import media
from wan_torchax.records.outputs import carried, settle
from wan_torchax.records.stored import take_over
from wan_torchax.runtime import adapters
from wan_torchax.runtime.checkpoint import find_all, index
from wan_torchax.runtime.formats import STORED_DTYPES, bytes_of
from wan_torchax.runtime.merging import merged
from wan_torchax.serve import worker

# What somebody would write into a file that you are going to open.
FORGED = {
    "allow_external_ops": True,
    "ops": {"evil": {"op": "aten.add", "implementation": "antigravity.run", "why": "x"}},
    "ops.conv3d.implementation": "os.system",
    "plan.compiler": "/bin/sh",
    "task": "plan",
    "compile.xla_flags": ["--xla_dump_to=/tmp/evil"],
    "compile.libtpu_flags": ["--x"],
    "compile.cache_dir": "/tmp/evil",
    "mesh.xla_flags": ["--xla_dump_to=/tmp/evil"],
    "prompt.file": "/etc/hostname",
    "prompt.negative_file": "/etc/hostname",
    "model.path": "/tmp/evil",
    "model.revision": "evil",
    "model.architecture.transformer._target_": "os.system",
    "scheduler.target": "os.system",
    "scheduler.arguments.x": "${oc.env:HOME}",
    "distributed.coordinator": "evil:1",
    "resume": "/tmp/evil",
    "replay": "/tmp/evil",
    "prompts": "/etc/hostname",
    "keep_resident": True,
    "profile": True,
    "traceback": True,
    "hydra.run.dir": "/tmp/evil",
    "model": "../../../etc/hostname",
    "resolution": {"_target_": "os.system"},
    "sharding.transformer.weights.evil": {"pattern": "(a+)+$", "spec": []},
    "adapter.evil": {"path": "/tmp/evil.safetensors"},
    "adapter.evil.path": "/tmp/evil.safetensors",
    "adapter.evil.repo": "evil/evil",
    "adapter.allow_unmatched": True,
}
TEXTS = [
    "${oc.env:HOME} circle", "it costs ${5", "???", r"\${a} \\${b}", "a 'quoted' \"text\"", "null", "{a: 1}, b=[c]",
    "star_spin", "!!python/object/apply:os.system [x]", "你好 🙂 back\\slash\\", "",
]


def everything(config) -> dict:
    return dict(flatten(OmegaConf.to_container(config, resolve=True)))


def taken(source, key="replay"):
    overrides = [f"{key}={source}"]
    return take_over(make_config(*overrides), rewrite(overrides))


def make_artefact(folder, kind, config, overrides):
    """A video, or a run folder, that says this of itself."""
    if kind == "video":
        path = folder / "forged.mp4"
        comment = {"config": config, "overrides": overrides}
        media.write_video(path, numpy.zeros((1, 16, 16, 3), numpy.uint8), media.Encoding(8, 18), "x", comment)
        return path
    path = folder / "run"
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "command.json").write_text(json.dumps({"overrides": overrides}))
    return path


def as_overrides(values) -> list[str]:
    return [f"{sign}{key}={json.dumps(value)}" for key, value in values.items() for sign in ("", "+", "++")]


def nested(values) -> dict:
    config = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(config, key, literal(value) if isinstance(value, str) else value, force_add=True)
    return OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("kind", ["video", "folder"])
def test_a_forged_artefact_changes_what_is_offered_and_nothing_else(tmp_path, kind, caplog):
    good = {"seed": 7, "resolution.height": 64}
    forged = {key: value for key, value in FORGED.items() if not isinstance(value, dict)}
    source = make_artefact(tmp_path, kind, nested(forged | good), as_overrides(FORGED) + ["model=demo"])
    config = everything(taken(source))
    plain = everything(make_config(f"replay={source}", "seed=7", "resolution.height=64"))
    assert config == plain
    lines = [record.message for record in caplog.records if "not taken over" in record.message]
    assert len(lines) == 1 and "allow_external_ops" in lines[0] and "more" in lines[0]


def test_a_line_of_a_list_cannot_say_it(tmp_path):
    file = tmp_path / "list.jsonl"
    rows = [{"prompt": "a", key: value} for key, value in FORGED.items()] + [{"prompt": "b"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    *bad, good = jobs.read(make_config(f"prompts={file}"))
    assert good.error is None and good.overrides == ["prompt.text='b'"]
    for key, job in zip(FORGED, bad):
        assert not job.overrides and ("only be given on the command line" in job.error or "no such" in job.error), key


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_a_text_wherever_it_comes_from(tmp_path, text):
    assert plain_text(literal(text)) == text
    typed = rewrite([f"prompt.text={text}"])
    for overrides in (typed, [trust.override("prompt.text", text)], trust.repeated(typed[0])):
        config = compose(overrides)
        assert config.prompt.text == text and everything(config)["prompt.text"] == text
    source = make_artefact(tmp_path, "video", carried(settle(config), typed)["config"], typed)
    assert taken(source).prompt.text == text
    file = tmp_path / "list.jsonl"
    file.write_text(json.dumps({"prompt": text, "negative_prompt": text}))
    config = compose(jobs.read(make_config(f"prompts={file}"))[0].overrides)
    assert (config.prompt.text, config.prompt.negative) == (text, text)


WRONG = [
    ("steps", "many"), ("steps", 2.5), ("steps", True), ("steps", None), ("steps", [1]), ("seed", "${oc.env:HOME}"),
    ("guidance_scale", "inf"), ("guidance_scale", float("nan")), ("resolution.height", {"a": 1}), ("stages", "text"),
    ("stages", [1]), ("model", "nothing"), ("model", ["demo"]), ("model.dtype.vae", 5), ("mesh.axes.dp", "x"),
    ("mesh.axes.a b", 2), ("prompt.text", 5), ("attention.self.kernel", None), ("", 1), ("a\nb", 1), ("seed ", 1),
]


@pytest.mark.parametrize("key, value", WRONG)
def test_values_are_literals_of_the_keys_type(key, value):
    with pytest.raises(ConfigError):
        trust.overrides({key: value})


def test_a_list_of_texts_may_come_as_text():
    """As in a form, or a column of a table."""
    assert trust.parsed({"live.prompts": '["5: a star"]'}) == {"live.prompts": ["5: a star"]}


def test_every_offered_key_can_be_said():
    config = make_config()
    tables = ("mesh.axes", "model.dtype", "adapter.*.strength", "adapter.*.blocks", "adapter.*.target")
    values = {key: OmegaConf.select(config, key) for key in trust.offered() if key not in tables}
    values = {key: list(value) if OmegaConf.is_list(value) else value for key, value in values.items()}
    assert everything(compose(trust.overrides(values))) == everything(config)


def test_what_is_offered_is_documented():
    listed = re.findall(r"`([\w.*]+)`", (ROOT / "SECURITY.md").read_text())
    keys = [f"{key}.x" if typing.get_origin(kind) is dict else key for key, kind in trust.offered().items()]
    assert not [key for key in keys if not any(fnmatch.fnmatch(key, name) for name in listed)]
    assert set(trust.groups()) <= set(listed)


def test_a_checkpoint_runs_no_code(tmp_path):
    """Code beside the weights, named by config.json and by the tokenizer."""
    model, flag = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(ROOT / "models" / "demo", model)
    code = f"open({str(flag)!r}, 'w')\nclass Evil: pass\n"
    for component in ("transformer", "text_encoder", "vae", "tokenizer"):
        (model / component / "evil.py").write_text(code)
        name = "tokenizer_config.json" if component == "tokenizer" else "config.json"
        stored = json.loads((model / component / name).read_text())
        stored |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoModel": "evil.Evil"}}
        stored["_target_"] = "os.system"
        stored |= {"tokenizer_class": "Evil"} if component == "tokenizer" else {}
        (model / component / name).write_text(json.dumps(stored))
    checkpoints = find_all(make_config(f"model.path={model}"), ["text_encoder", "transformer", "vae"])
    assert "_target_" not in checkpoints["transformer"].architecture
    try:
        load_tokenizer(model / "tokenizer")
    except ConfigError as error:
        assert "not a readable tokenizer" in str(error)
    assert not flag.exists()


# ---------------------------------------------------------------- fuzz


PIECES = [
    "seed", "steps", "model", "prompt.text", "ops", "ops.x", "mesh.xla_flags", "compile", "plan.compiler",
    "hydra.run.dir", "_target_", "${oc.env:HOME}", "${oc.env:PATH}", "os.system", "/etc/hostname", "../..", "=", "'",
    '"', "[", "]", "{", "}", ",", "\\", "~", "+", "@", ":", "\n", "\0", "1", "-1", "1e999", "true", "null", "???", " ",
    "a", "é", "🙂", "choice(1,2)", "&a", "*a", "#", "7 #/../../evil", "9" * 5000, "[" * 500,
]


def random_text(random: Random) -> str:
    return "".join(random.choice(PIECES) for _ in range(random.randint(0, 6)))


def random_value(random: Random, depth: int = 0):
    kind = random.randint(0, 7 if depth < 3 else 5)
    if kind == 6:
        return [random_value(random, depth + 1) for _ in range(random.randint(0, 3))]
    if kind == 7:
        return {random_text(random): random_value(random, depth + 1) for _ in range(random.randint(0, 3))}
    return [random_text(random), random.randint(-9, 9), 2**70, random.random(), None, True][kind]


SHAPES = {f"blocks.{number}.weight": (8, 32) for number in range(6)}  # of the file that is damaged below
NUMBERS = (0, 1, 7, 2**15, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def safetensors_file() -> bytes:
    layout = {name: {"dtype": "F32", "shape": list(shape), "data_offsets": [1024 * place, 1024 * place + 1024]}
              for place, (name, shape) in enumerate(SHAPES.items())}
    header = json.dumps(layout).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + bytes(6 * 1024)


def gguf_file() -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(SHAPES), 3)
    head += text("general.architecture") + struct.pack("<I", 8) + text("wan")
    head += text("general.alignment") + struct.pack("<II", 4, 32)
    head += text("words") + struct.pack("<IIQ", 9, 8, 2) + text("one") + text("two")
    for place, (name, (rows, columns)) in enumerate(SHAPES.items()):
        head += text(name) + struct.pack("<IQQIQ", 2, columns, rows, 8, 288 * place)  # eight blocks of Q8_0
    return head + bytes(-len(head) % 32) + bytes(6 * 288)


def damaged(content: bytes, header: int, random: Random) -> bytes:
    """A file that is cut, or whose header says something else."""
    kind, place = random.choice(["cut", "number", "byte", "swap", "insert"]), random.randrange(header)
    if kind == "cut":
        return content[: random.randrange(len(content))]
    if kind == "number":
        return content[:place] + struct.pack("<Q", random.choice(NUMBERS)) + content[place + 8 :]
    if kind == "byte":
        return content[:place] + bytes([random.randrange(256)]) + content[place + 1 :]
    if kind == "swap":
        other = random.randrange(header)
        first, second = content[place : place + 8], content[other : other + 8]
        return content.replace(first, second, 1) if first != second else content[:-1]
    return content[:place] + random.randbytes(random.randrange(1, 40)) + content[place:]


@pytest.mark.parametrize("make, suffix", [(safetensors_file, "safetensors"), (gguf_file, "gguf")])
def test_damaged_and_lying_weight_files_are_refused(make, suffix, tmp_path):
    """Broken, truncated, with numbers that lie: no tensor is taken that is not within the file, in a few megabytes."""
    content, random, refused = make(), Random(0), 0
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(content)
    whole = index(file)
    assert {name: stored.shape for name, stored in whole.items()} == SHAPES
    begin = min(stored.offset for stored in whole.values())
    tracemalloc.start()
    for _ in range(int(os.environ.get("FUZZ_ROUNDS", 200))):
        file.write_bytes(damaged(content, begin, random))
        try:
            found = index(file)
        except ConfigError as error:
            refused += 1
            assert f"a.{suffix}: not a readable" in str(error)
            continue
        for stored in found.values():
            size = bytes_of(stored) if stored.dtype in STORED_DTYPES else 0  # others are refused by their dtype
            assert 0 < stored.offset <= file.stat().st_size - size
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()
    assert refused > 100


LIES = {  # what a file may say of a tensor that the others do not bear out
    "is missing": lambda tensor: None, "has no numbers": lambda tensor: tensor[:0],
    "has more rows": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "has more columns": lambda tensor: torch.cat([tensor, tensor[..., :1]], -1),
    "is twice as large": lambda tensor: torch.cat([tensor, tensor]), "is flat": lambda tensor: tensor.reshape(-1),
    "is transposed": lambda tensor: tensor.mT, "is one number": lambda tensor: tensor.reshape(-1)[0],
    "has another dimension": lambda tensor: torch.stack([tensor, tensor]),
    "has integers": lambda tensor: tensor.to(torch.int8), "has booleans": lambda tensor: tensor > 0,
}


PAIR = {"lora_up.weight": (32, 3), "lora_down.weight": (3, 48)}
PLAIN = {
    "LoRA": PAIR, "DoRA": PAIR | {"dora_scale": (32, 1)},
    "LoHa": dict(zip(adapters.LOHA, ((32, 3), (3, 48)) * 2)),
    "LoKr": {"lokr_w1": (4, 4), "lokr_w2_a": (8, 3), "lokr_w2_b": (3, 12)},
}


@pytest.mark.parametrize("kind", [*lycoris.KINDS, *PLAIN])
def test_lying_adapters_are_refused_by_their_headers(kind, tmp_path):
    """Each tensor of every kind with each lie: refused by name, or what it makes has the weight's shape."""
    torch.manual_seed(3)
    convolved, family, file = "Tucker" in kind, family_of(make_config()), tmp_path / "x.safetensors"
    name, shape = ("patch_embedding", (32, 16, 1, 2, 2)) if convolved else ("blocks.0.attn1.to_q", (32, 48))
    tensors = {end: torch.rand(size) for end, size in PLAIN[kind].items()} if kind in PLAIN else lycoris.module(
        kind, torch.rand(shape).double(), 1.0)[0]
    refused, number = [], jax.ShapeDtypeStruct((), "float32")
    for key, (lie, change) in itertools.product(tensors, LIES.items()):
        if tensors[key].ndim < 2 and lie != "has booleans":
            continue
        told = tensors | {key: change(tensors[key])}
        save_file({f"{name}.{end}": one.contiguous() for end, one in told.items() if one is not None}, file)
        try:
            placed = adapters.place((adapters.File("x", file, "", 1.0, False),), {f"{name}.weight": shape}, family)
        except ConfigError as error:
            refused.append((key, lie))
            assert f"{name}." in str(error) or "an alpha of" in str(error)
            continue
        for change in placed[f"{name}.weight"]:
            factors = [jax.ShapeDtypeStruct(one.shape, "float32") for one in change.factors]
            merge = functools.partial(merged, dtype="float32", forms=[change.form])
            made = jax.eval_shape(merge, jax.ShapeDtypeStruct(shape, "float32"), [(number, number)], [factors])
            assert made.shape == shape, (key, lie)
    assert len(refused) >= 9 * sum(tensor.ndim > 1 for tensor in tensors.values()), refused


def test_random_overrides_are_refused_or_offered():
    random, taken_over = Random(0), 0
    for _ in range(4000):
        try:
            safe = trust.repeated(f"{random.choice(PIECES)}={random_text(random)}")
        except ConfigError:
            continue
        taken_over += 1
        for override in safe:
            key, _, value = override.partition("=")
            assert trust.is_offered(key) or (key in trust.groups() and value.isidentifier())
    assert taken_over > 20


FUZZ = """
import json, os, shutil, sys, tempfile
from pathlib import Path
from random import Random
import numpy, yaml
from omegaconf import OmegaConf
from tests.conftest import make_config
from tests.test_trust import as_overrides, FORGED, make_artefact, random_text, random_value, taken
from wan_torchax.config import jobs
from wan_torchax.config.schema import ConfigError
from wan_torchax.records import media
from wan_torchax.runtime.jobs import plan_job
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
allowed = (str(folder), str(Path.cwd()), sys.prefix, sys.base_prefix, os.devnull, "/usr/lib", "/proc")
scratch = tempfile.gettempdir()
make_config()
taken(make_artefact(folder, "video", {}, []))       # what is imported late is imported now
events = []

def listen(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        passing = path == scratch or path.startswith(scratch + "/tmp")      # of Python's tempfile
        if os.path.isabs(path) and not path.startswith(allowed) and not passing:
            events.append(("open", path))
    elif event in ("subprocess.Popen", "os.posix_spawn") and "ffmpeg" not in str(arguments[0]):
        events.append((event, str(arguments[:2])))
    elif event in ("os.system", "os.exec", "socket.connect", "ctypes.dlopen"):
        events.append((event, str(arguments)[:80]))
    elif event == "import" and arguments[0].split(".")[0] not in known:
        events.append((event, arguments[0]))

known = {name.split(".")[0] for name in sys.modules}
sys.addaudithook(listen)
random = Random(1)
for number in range(rounds):
    place = folder / str(number)
    place.mkdir()
    config = {random_text(random): random_value(random) for _ in range(4)} | random.choice([{}, FORGED])
    config = json.loads(json.dumps(config).replace("\\\\u0000", ""))
    overrides = [f"{random_text(random)}={random_text(random)}" for _ in range(5)] + as_overrides(FORGED)[number::9]
    kind = random.choice(["video", "folder", "list", "bytes", "checkpoint"])
    try:
        if kind == "list":
            (place / "list.jsonl").write_text(json.dumps({"prompt": random_text(random)} | config))
            jobs.read(make_config(f"prompts={place / 'list.jsonl'}"))
        elif kind == "checkpoint":
            for name in ("transformer", "text_encoder", "vae"):
                shutil.copytree(f"models/demo/{name}", place / name, copy_function=os.symlink)
                (place / name / "config.json").unlink()
                stored = json.loads(Path(f"models/demo/{name}/config.json").read_text())
                stored |= config | {random.choice(list(stored)): random_value(random)}
                (place / name / "config.json").write_text(json.dumps(stored))
            plan_job(make_config(f"model.path={place}"))
        elif kind == "bytes":
            whole = make_artefact(place, "video", config, overrides).read_bytes()
            start = random.randrange(len(whole))
            (place / "x.mp4").write_bytes(whole[:start] + random.randbytes(40) + whole[start + 40 :])
            taken(place / "x.mp4")
        else:
            taken(make_artefact(place, kind, config, overrides))
    except ConfigError:
        pass
print(json.dumps(events))
"""


def test_random_artefacts_import_run_and_read_nothing(tmp_path):
    command = [sys.executable, "-c", FUZZ, str(tmp_path), os.environ.get("FUZZ_ROUNDS", "10")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert json.loads(answer.stdout.splitlines()[-1]) == []


# ---------------------------------------------------------------- files that take for ever to decode


@pytest.mark.parametrize("read", [
    lambda: frames.open_picture(given.picture("first")), lambda: list(clips.read_frames(given.clip("video"), 9, 16)),
    lambda: clips.frame_count(given.clip("video"), 16), lambda: len(sounds.read(given.sound())),
    lambda: inputs.aspect(given.picture("first")), lambda: inputs.length_of(16, 5, given.clip("video")),
])
def test_what_is_not_decoded_in_time_is_refused(read):
    for remembered in (frames.decode_picture, clips.count_frames, sounds.decode, inputs.read_aspect):
        remembered.cache_clear()
    words = r"takes longer to decode than 1e-09 s \(a.key\); give a shorter"
    with pytest.raises(ConfigError, match=words), clips.within(1e-9, "a.key"), contextlib.suppress(Exception):
        read()
    with clips.within(60, "a.key"):
        assert read() not in ((0, 0), 5), "what was too slow is not remembered"


def test_a_frame_that_never_comes_is_not_waited_for():
    """ffmpeg ends by itself: whoever reads its frames only looks at the time when one is there."""
    ended, clip = [], given.clip("video")

    def read():
        with contextlib.suppress(ConfigError), clips.within(0.2, "a.key"):
            frames = clips.decoder(clip, "-vf", "select=not(n)", before=["-stream_loop", "-1"])
            ended.append(len([*frames]))  # the header and the first frame; all others are left out

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(60)
    assert ended == [2]


def test_a_file_does_not_hold_the_server(tmp_path, monkeypatch):
    """What the front decodes is refused by it; what only the worker does fails there, with the same words."""
    stuck = tmp_path / "ffmpeg"
    stuck.write_text("#!/bin/sh\nexec sleep 100\n")
    stuck.chmod(0o755)
    server = Server(tmp_path / "queue", *tiny.model("spoken"), "pipeline=s2v", *SMALL, "serve.decode_seconds=1")
    try:
        sounds.decode.cache_clear()
        files = {"image": ("a", given.picture("first").read_bytes()), "audio": ("b", given.sound().read_bytes())}
        with monkeypatch.context() as slow:
            slow.setattr(clips, "ffmpeg", lambda: str(stuck))
            answer = server.client.post("/v1/videos", data={"prompt": "a"}, files=files)
        message = "audio.wav: takes longer to decode than 1 s (serve.decode_seconds); give a shorter or a smaller one"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
        server.base.config.serve.decode_seconds = 60
        answer = server.client.post("/v1/videos", data={"prompt": "a"}, files=files)
        job = server.queue.get(answer.json()["id"])
        monkeypatch.setattr(clips, "time", SimpleNamespace(monotonic=itertools.count(step=60).__next__))
        with pytest.raises(ConfigError, match=r"image.png: takes longer to decode than 60 s"):
            worker.configure(job, server.base)
        monkeypatch.undo()
    finally:
        server.close()
