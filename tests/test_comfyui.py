"""The ComfyUI nodes: their contracts, the example graphs, and that torch and other people's modules are left alone.

With COMFYUI_HOME set to a ComfyUI checkout, and COMFYUI_PYTHON to a Python that has its requirements and this project's
(by default the one that runs the tests), a real server runs the example workflow too.
"""
import contextlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

import imageio_ffmpeg
import jax
import numpy
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from tests import flux, hunyuan15, tiny
from tests.conftest import ROOT, results, run_into
from wan_torchax import patches
from wan_torchax.config import sounds
from wan_torchax.config.commandline import options
from wan_torchax.config.schema import ADAPTER_SETTINGS, ConfigError
from wan_torchax.events import Advanced, Began, Decoded, Queued
from wan_torchax.runtime import programs, weights
from wan_torchax.session import session
from wan_torchax.stages import step


def load(folder: Path, name: str):
    """A folder of nodes, imported as ComfyUI does: by its path, under a name of no package."""
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


comfyui = load(ROOT / "comfyui", "custom_nodes/wan")
files, host, nodes, settings = comfyui.nodes.settings.files, comfyui.host, comfyui.nodes, comfyui.settings
NODES = comfyui.NODE_CLASS_MAPPINGS
WORKFLOWS, API = ROOT / "comfyui" / "workflows", ROOT / "comfyui" / "api"
DEMOS = ("demo", "demo_adapter", "demo_four_steps", "demo_image_to_video")
EXAMPLES = (*DEMOS, "t2v_14b_720p_v6e8")
STOCK = {  # ComfyUI's own nodes in the examples: inputs in the order of their widgets, and outputs
    "CreateVideo": ({"images": "IMAGE", "audio": "AUDIO", "fps": "FLOAT"}, ("VIDEO",)),
    "SaveVideo": ({"video": "VIDEO", "filename_prefix": "STRING", "format": "COMBO", "codec": "COMBO"}, ()),
}
PROMPT = json.loads((API / "demo.json").read_text())["2"]["inputs"]["prompt"]
FAST_PATH = torch.backends.mha.get_fastpath_enabled()
SMALL_INPUTS = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 3}
PATIENCE = 120  # seconds a server may take


@pytest.fixture(scope="module", autouse=True)
def owner(cache):
    """What whoever starts ComfyUI says: where compiled programs are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.OWNER, shlex.quote(cache))
        yield cache


def inputs_of(kind: str) -> dict:
    """Input names to types, widgets with several choices as COMBO."""
    if kind in STOCK:
        return STOCK[kind][0]
    listed = NODES[kind].INPUT_TYPES()
    specs = listed["required"] | listed.get("optional", {})
    return {name: "COMBO" if isinstance(spec[0], list) else spec[0] for name, spec in specs.items()}


def outputs_of(kind: str) -> tuple:
    return STOCK[kind][1] if kind in STOCK else NODES[kind].RETURN_TYPES


# ---------------------------------------------------------------- contracts


@pytest.mark.parametrize("name", NODES)
def test_a_node_keeps_its_contract(name):
    node = NODES[name]
    assert node.CATEGORY == "TPU/Wan2.1" and name in comfyui.NODE_DISPLAY_NAME_MAPPINGS
    assert len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    listed = node.INPUT_TYPES()
    assert set(listed) <= {"required", "optional"}
    parameters = inspect.signature(getattr(node, node.FUNCTION)).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        assert list(parameters)[1:] == list(inputs_of(name))
        optionals = listed.get("optional", {})
        assert all(parameters[optional].default is not inspect.Parameter.empty for optional in optionals)
    for kind, limits in (spec for group in listed.values() for spec in group.values() if spec[0] in ("INT", "FLOAT")):
        assert limits["min"] <= limits["default"] <= limits["max"]
        assert type(limits["default"]) is {"INT": int, "FLOAT": float}[kind]
    json.dumps(listed)  # /object_info sends it


@pytest.mark.parametrize("name", NODES)
def test_a_node_explains_itself_in_the_words_of_nodes(name):
    listed = NODES[name].INPUT_TYPES()
    inputs = {key: spec for group in listed.values() for key, spec in group.items()}
    assert all(len(spec) == 2 and spec[1].get("tooltip") for spec in inputs.values()), "an input without a tooltip"
    texts = NODES[name].DESCRIPTION, *(spec[1]["tooltip"] for spec in inputs.values())
    assert not [text for text in texts if re.search(r"hydra|run\.py|command|override|argument|conf/", text, re.I)]


def test_saved_workflows_of_the_earlier_nodes_still_fit():
    """Names and order of inputs, which widgets are saved by, and of outputs, which links are saved by."""
    sampling = ["height", "width", "num_frames", "num_inference_steps", "guidance_scale", "seed"]
    assert list(inputs_of("Wan21TextEncoder")) == ["prompt", "negative_prompt", "model_id", "config"]
    embeddings, texts = ["prompt_embeds", "negative_prompt_embeds"], ["prompt", "negative_prompt"]
    assert list(inputs_of("Wan21TPUSampler")) == [*embeddings, *sampling, "model_id", "flow_shift", "config"]
    assert list(inputs_of("Wan21TPUVAEDecoder")) == ["latents", "model_id", "fps", "config"]
    files = ["image", "last_image", "video", "mask", "references", "pose", "face", "background", "audio"]  # came later
    assert list(inputs_of("Wan21TPUPipeline")) == [*texts, *sampling, "model_id", "fps", "flow_shift", "config", *files]
    assert NODES["Wan21TextEncoder"].RETURN_NAMES == ("prompt_embeds", "negative_prompt_embeds")
    assert NODES["Wan21TPUSampler"].RETURN_NAMES == ("latents", "num_frames")
    for name in ("Wan21TPUVAEDecoder", "Wan21TPUPipeline"):
        assert NODES[name].RETURN_TYPES[0] == "IMAGE" and NODES[name].RETURN_NAMES == ("frames", "fps")
    assert settings.choose(None, "Wan-AI/Wan2.1-T2V-14B-Diffusers") == ["model=wan21_t2v_14b"]
    with pytest.raises(ConfigError, match="model_id=no/such: no model that this project has .*connect a .*Config node"):
        settings.choose(None, "no/such")


@pytest.fixture
def loras(tmp_path, monkeypatch):
    """Files in ComfyUI's folder for LoRAs, by these names."""

    def put(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(b"x")
        listed = types.SimpleNamespace(
            get_filename_list=lambda kind: list(names), get_full_path=lambda kind, name: str(tmp_path / name)
        )
        monkeypatch.setattr(host, "folder_paths", listed)

    return put


def adapt(config, *adapters, strength=1.0, target=settings.UNCHANGED):
    """What a chain of Adapter nodes gives: the config, and the numbers."""
    outputs = (config,)
    for adapter in adapters:
        outputs = nodes.Wan21Adapter().adapt(outputs[0], adapter, strength, target)
    return outputs


def rows_of(chosen) -> dict:
    """The adapters of a config, by name."""
    adapters = settings.compose(chosen.overrides).adapter
    return {name: row for name, row in adapters.items() if name not in ADAPTER_SETTINGS}


def test_an_adapter_node_chooses_among_the_owners_files(tmp_path, loras):
    loras("sub/my style.safetensors", "old.pt")
    assert {"lightning_4step", "sub/my style.safetensors"} <= set(settings.adapter_names())
    assert not {"none", "old.pt"} & set(settings.adapter_names())
    start = configure()[0]
    chosen = adapt(start, "sub/my style.safetensors", strength=0.5, target="all")[0]
    rows = rows_of(adapt(chosen, "lightx2v_t2v_21", strength=0.7)[0])
    path = str(tmp_path / "sub" / "my style.safetensors")
    assert rows["sub_my_style"] == {"path": path, "strength": 0.5, "target": ["all"]}
    assert rows["lightx2v"].strength == 0.7 and rows["lightx2v"].repo == "lightx2v/Wan2.1-Distill-Loras"
    for wrong, message in (
        ((start, "/etc/passwd", 1.0, "all"), "adapter=/etc/passwd: no such adapter"),
        ((["adapter.x.path=/etc/passwd"], "lightx2v_t2v_21", 1.0, "all"), "not from a Wan 2.1 Config node"),
        ((start, "lightx2v_t2v_21", "${oc.env:HOME}", "all"), "must be a number"),
        ((start, "lightx2v_t2v_21", 1.0, "low"), "this model has one transformer"),
        ((start, "lightx2v_t2v_21", 1.0, "high"), "this model has one transformer"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            nodes.Wan21Adapter().adapt(*wrong)


NAMES = ["a-b", "a_b", "a b", "猫", "犬", "4steps", "null", *ADAPTER_SETTINGS, "x" * 200, "it's ${here}, \\"]


def test_every_lora_has_a_row_of_its_own_whatever_it_is_called(tmp_path, loras):
    files = [f"{name}.safetensors" for name in NAMES]
    loras(*files)
    rows = rows_of(adapt(configure()[0], *files)[0])
    assert [row.path for row in rows.values()] == [str(tmp_path / file) for file in files]


def test_adapters_one_after_the_other_add_up(loras):
    """One file twice, one file for each expert, one that a line names already, two options."""
    loras("style.safetensors")
    twice = rows_of(adapt(configure()[0], "style.safetensors", "style.safetensors", strength=0.5)[0])
    assert [row.strength for row in twice.values()] == [0.5, 0.5]
    chosen = configure(model="wan22_t2v_a14b", resolution="480p")[0]
    for target, strength in (("high", 1.0), ("low", 0.5)):
        chosen = adapt(chosen, "style.safetensors", strength=strength, target=target)[0]
    assert [(row.target, row.strength) for row in rows_of(chosen).values()] == [(["high"], 1.0), (["low"], 0.5)]
    named = adapt(configure(overrides="adapter=demo_outline")[0], "demo_outline", strength=0.5)[0]
    assert [row.get("strength") for row in rows_of(named).values()] == [None, 0.5]
    both = rows_of(adapt(configure()[0], "lightx2v_t2v_21", "lightx2v_i2v_21")[0])
    assert [re.search("t2v|i2v", row.file)[0] for row in both.values()] == ["t2v", "i2v"]


def test_an_adapter_brings_its_recipe():
    chosen, *numbers = adapt(configure()[0], "demo_4step", "demo_outline")
    named = dict(zip(nodes.Wan21Adapter.RETURN_NAMES[1:], numbers))
    assert (named["num_inference_steps"], named["guidance_scale"]) == (4, 1.0)
    config = settings.compose(chosen.overrides)
    assert (config.steps, config.guidance_scale, config.scheduler.name) == (4, 1.0, "euler")
    assert adapt(configure(overrides="steps=7")[0], "demo_outline")[4] == 7, "one without a recipe changes no number"


@pytest.mark.parametrize("name", ["Wan21TPUSampler", "Wan21TPUPipeline"])
@pytest.mark.parametrize(("steps", "scale", "told"), [(20, 1.0, "num_inference_steps"), (4, 4.0, "guidance_scale")])
def test_widgets_that_contradict_an_adapters_recipe_are_told(name, steps, scale, told):
    inputs = CALLS[name] | {"num_inference_steps": steps, "guidance_scale": scale}
    with pytest.raises(ConfigError, match=f"^{told}=.*Adapter node"):
        getattr(NODES[name](), NODES[name].FUNCTION)(**inputs, config=adapt(configure()[0], "demo_4step")[0])


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"overrides": "guidance_scale=4"}, "guidance_scale=4"), ({"overrides": "scheduler=unipc"}, "scheduler=unipc"),
        ({"preset": "t2v_demo_128_cpu_v2"}, "num_inference_steps=20"),
        ({"preset": "t2v_demo_128_cpu_v2", "overrides": "steps=4"}, "guidance_scale=4"),
    ],
)
def test_a_config_that_contradicts_an_adapters_recipe_is_told(choices, told):
    with pytest.raises(ConfigError, match=f"^{told}.*Config node"):
        adapt(configure(**choices)[0], "demo_4step")


def test_without_a_config_node_the_decoder_takes_any_models_latents(monkeypatch):
    def run_stages(names, config, values):
        size = config.resolution
        assert (config.model.name, size.frames, size.height, size.width) == ("wan21_t2v_14b", 81, 720, 1280)
        return {"frames": numpy.zeros((1, 1, 1, 3), numpy.uint8)}

    monkeypatch.setattr(nodes, "run_stages", run_stages)
    latents = {"samples": torch.zeros(1, 16, 21, 90, 160)}
    assert nodes.Wan21TPUVAEDecoder().decode(latents, "Wan-AI/Wan2.1-T2V-14B-Diffusers", fps=16)[1] == 16.0


@pytest.mark.parametrize("name", ["Wan21TPUSampler", "Wan21TPUPipeline"])
def test_a_seed_of_an_earlier_workflow_is_told_which_it_was(name):
    check = NODES[name].VALIDATE_INPUTS
    assert list(inspect.signature(check).parameters) == ["seed"], "ComfyUI finds inputs by their names"
    assert NODES[name].INPUT_TYPES()["required"]["seed"][1]["max"] == 2**32 - 1
    assert [check(seed) for seed in (0, 2**32 - 1, None)] == [True] * 3
    assert all("whole number" in check(seed) for seed in ("abc", 1.5, [1], True))
    assert check(2**32 + 7) == "4294967303 is not from 0 to 4294967295; 7 (it modulo 2**32) gives the same video"


def unchanged() -> dict:
    return {"preset": "default", "model": "default", "resolution": "default", "mesh": "default", "overrides": ""}


def configure(**choices):
    return nodes.Wan21Config().configure(**unchanged() | choices)


def test_the_config_node_chooses_options_and_settings():
    overrides = "\n# slower\n  steps=40 \nguidance_scale=6\n"
    config, *numbers = configure(model="wan21_t2v_14b", resolution="720p", mesh="v6e_8", overrides=overrides)
    assert config.overrides == ("model=wan21_t2v_14b", "resolution=720p", "mesh=v6e_8", "steps=40", "guidance_scale=6")
    assert numbers == [720, 1280, 81, 40, 6.0, 5.0, 16]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("stepz=3", "stepz: no such key; nearest: steps"), ("steps=0", "steps=0: must be from 1 to 1000"),
        ("stages=[text]", "stages=.*leave the line out"),
        ("resolution=auto", "resolution: there is no picture .*; choose another resolution, or set height and width"),
        ("model=wan", "model=wan: no such option"), ("steps", "steps: not a setting of the form key=value"),
    ],
)
def test_the_config_node_refuses_clearly(overrides, message):
    with pytest.raises(ConfigError, match=message):
        configure(overrides=overrides)


def test_the_config_node_is_changed_when_its_config_is():
    before = nodes.Wan21Config.IS_CHANGED(overrides="# nothing")
    assert nodes.Wan21Config.IS_CHANGED(overrides="model.scan_blocks=false") != before


# ---------------------------------------------------------------- a stranger's workflow


FORGED = {  # lines of a Config node -> the key that is named
    "+ops.mine={op: aten.add, implementation: forged.add, why: mine}": "ops.mine",
    "ops={mine: {implementation: forged.add}}": "ops.mine.implementation",
    "ops.mine.implementation=forged.add": "ops.mine.implementation",
    "allow_external_ops=true": "allow_external_ops",
    "plan.compiler=/bin/sh": "plan.compiler",
    "compile.xla_flags=[--xla_dump_to=/forged]": "compile.xla_flags",
    "compile.cache_dir=/forged": "compile.cache_dir",
    "mesh.xla_flags=[--xla_dump_to=/forged]": "mesh.xla_flags",
    "mesh={xla_flags: ['--xla_dump_to=/forged']}": "mesh.xla_flags",
    "model.path=/forged": "model.path",
    "model={path: /forged}": "model.path",
    "prompt.file=/etc/hostname": "prompt.file",
    "distributed=auto": "distributed",
    "scheduler.target=forged.Scheduler": "scheduler.target",
    "hydra.run.dir=/forged": "hydra.run.dir",
    "hydra/launcher=slurm": "hydra/launcher",
    "preset@hydra=forged": "preset@hydra",
    "steps=${oc.env:HOME}": "steps",
    "model=../../forged": "model",
}


@pytest.mark.parametrize("line", FORGED)
def test_a_forged_line_is_refused(line, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("something was composed of it")

    monkeypatch.setattr(settings.commandline, "compose", refuse)
    for say in (nodes.Wan21Config.IS_CHANGED, nodes.Wan21Config().configure):
        with pytest.raises(ConfigError) as error:
            say(preset="default", overrides=f"steps=40\n{line}")
        assert re.match(rf"{re.escape(FORGED[line])}[:=]", str(error.value))
        assert not re.search(r"command line|run\.py", str(error.value))


def test_a_forged_line_imports_and_reads_nothing(monkeypatch, tmp_path):
    """Whatever says it: a line, a choice, or an input that only links reach."""
    (tmp_path / "forged.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Path, "read_text", lambda *_: pytest.fail("a file was read"))
    for line in FORGED:
        with pytest.raises(ConfigError):
            configure(overrides=line)
    for choice in ({"model": "../../forged"}, {"hydra/launcher": "slurm"}, {"ops.mine.implementation": "forged.add"}):
        with pytest.raises(ConfigError, match=f"^{next(iter(choice))}[:=]"):
            configure(**choice)
    assert "forged" not in sys.modules


@pytest.mark.parametrize("texts", [("${oc.env:HOME}", "???"), ("a 'cat', \"dog\" \\", "null"), ("\\${x}", "{a: 1}")])
def test_prompts_are_texts(texts):
    prompt = settings.compose(settings.from_prompts(*texts)).prompt
    assert (prompt.text, prompt.negative) == texts


def test_a_text_in_a_line_is_a_text():
    config = settings.compose(configure(overrides="prompt.text='${oc.env:HOME}'")[0].overrides)
    assert config.prompt.text == "${oc.env:HOME}"


FORGED_CONFIG = ["compile.xla_flags=[--xla_dump_to=/forged]"]
CALLS = {  # nodes -> what they need beside a config
    "Wan21TextEncoder": {"prompt": "a cat", "negative_prompt": ""},
    "Wan21TPUSampler": dict.fromkeys(("prompt_embeds", "negative_prompt_embeds"), torch.zeros(1, 128, 128))
    | SMALL_INPUTS | {"guidance_scale": 5.0, "seed": 1},
    "Wan21TPUVAEDecoder": {"latents": {"samples": torch.zeros(1, 16, 2, 8, 8)}},
    "Wan21TPUPipeline": {"prompt": "a cat", "negative_prompt": ""} | SMALL_INPUTS | {"guidance_scale": 5.0, "seed": 1},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_config_that_no_config_node_made_is_refused(name):
    """ComfyUI hands an input {"__value__": …} of a workflow to the node as it is."""
    with pytest.raises(ConfigError, match="^config: not from a Wan 2.1 Config node"):
        getattr(NODES[name](), NODES[name].FUNCTION)(**CALLS[name], config=FORGED_CONFIG)


def test_the_owner_says_what_a_workflow_may_not(monkeypatch):
    """In Hydra's grammar, as a shell splits it; what a workflow may say too, it says last."""
    monkeypatch.setenv(settings.OWNER, "model.path='/data/my models' compile.xla_flags=[--xla_flag] steps=7 seed=5")
    config = settings.compose(configure(overrides="seed=6")[0].overrides)
    assert (config.model.path, config.compile.xla_flags) == ("/data/my models", ["--xla_flag"])
    assert (config.steps, config.seed) == (7, 6)
    assert config.keep_resident is True, "what suits a server stays"


# ---------------------------------------------------------------- workflows


def read(name, folder=API):
    return json.loads((folder / f"{name}.json").read_text())


def test_the_template_browser_lists_only_what_opens():
    """It shows every JSON file of such a folder; one in API format would give an empty canvas."""
    shown = ("example_workflows", "example", "examples", "workflow", "workflows")
    listed = [path for name in shown for path in (ROOT / "comfyui" / name).glob("*.json")]
    assert sorted(path.stem for path in listed) == sorted(EXAMPLES)
    assert all({"nodes", "links", "version"} <= json.loads(path.read_text()).keys() for path in listed)
    assert sorted(path.stem for path in API.glob("*.json")) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_api_workflow_fits_the_nodes(name):
    graph = read(name)
    for node in graph.values():
        kinds = inputs_of(node["class_type"])
        for key, value in node["inputs"].items():
            if isinstance(value, list):
                source, number = value
                assert outputs_of(graph[source]["class_type"])[number] == kinds[key]
            elif node["class_type"] in NODES and kinds[key] == "COMBO":
                assert value in NODES[node["class_type"]].INPUT_TYPES()["required"][key][0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_workflow_follows_its_config_node(name):
    """Every number comes from where the node's config does, so that another preset or adapter needs no other change."""
    graph = read(name)
    linked = [node["inputs"] for node in graph.values() if "config" in inputs_of(node["class_type"])]
    for inputs in linked:
        source = inputs["config"][0]
        for number, output in enumerate(nodes.Wan21Config.RETURN_NAMES):
            assert inputs.get(output, [source, number]) == [source, number]
    assert all(graph[inputs["config"][0]]["class_type"] in ("Wan21Config", "Wan21Adapter") for inputs in linked)


@pytest.mark.parametrize(("name", "steps", "scale"), list(zip(DEMOS, (20, 20, 4, 20), (4.0, 4.0, 1.0, 3.5))))
def test_a_workflow_goes_from_node_to_node(name, steps, scale, monkeypatch):
    """Without the work: what a node gives is what the next one takes, and the last numbers are the recipe's."""

    def run_stages(names, config, values=None, helpers=()):
        seen["pictures"] = [Path(config[key]).is_file() for key in settings.inputs.taken(config)]
        if "denoise" in names:
            seen["sampling"] = config.steps, config.guidance_scale
        frames = numpy.zeros((17, 128, 128, 3), numpy.uint8)
        embeddings, latents = numpy.zeros((2, 128, 128), numpy.float32), numpy.zeros((1, 16, 5, 16, 16), numpy.float32)
        return {"embeddings": embeddings, "latents": latents, "frames": frames}

    seen = {}
    monkeypatch.setattr(nodes, "run_stages", run_stages)
    made = execute(read(name))
    assert made["images"].shape == (17, 128, 128, 3) and made["fps"] == 8.0
    assert seen == {"sampling": (steps, scale), "pictures": [True] if "image" in name else []}


@pytest.mark.parametrize("name", DEMOS)
def test_a_workflow_has_a_thumbnail(name):
    """ComfyUI's template browser shows <name>.jpg, of exactly this ending. A frame of the video that it makes."""
    with Image.open(WORKFLOWS / f"{name}.jpg") as picture:
        assert picture.format == "JPEG" and min(picture.size) >= 256
        assert numpy.asarray(picture).std() > 10, "nothing is to be seen"


def test_the_14b_workflow_uses_its_preset():
    chosen = read("t2v_14b_720p_v6e8")["1"]["inputs"]
    assert chosen == unchanged() | {"preset": "t2v_14b_720p_v6e8_v1"}


FEW = ("t2v_14b_720p_v6e8_v1", "i2v_14b_480p_v6e8_v1", "t2v_demo_128_cpu_v2")
PRESETS = [pytest.param(name, marks=[] if name in FEW else pytest.mark.full) for name in options("preset")]


@pytest.mark.parametrize("preset", PRESETS)
def test_any_preset_can_be_chosen_in_the_demo_workflow(preset):
    chosen = read("demo")["1"]["inputs"]
    assert chosen == unchanged()
    config, height, width, *_ = configure(**chosen | {"preset": preset})
    assert config.overrides == (f"preset={preset}",)
    assert min(height, width) == int(re.search(r"_(\d{3,4})p?_", preset)[1])


def test_a_presets_numbers_reach_the_sampler(monkeypatch):
    def run_stages(names, config, values=None, helpers=()):
        seen.update(config.resolution)
        return {"latents": numpy.zeros((1, 16, 1, 1, 1), numpy.float32)}

    seen, graph = {}, read("demo")
    monkeypatch.setattr(nodes, "run_stages", run_stages)
    graph["1"]["inputs"]["preset"] = "t2v_14b_720p_v6e8_v1"
    graph["3"]["inputs"] |= dict.fromkeys(("prompt_embeds", "negative_prompt_embeds"), torch.zeros(1, 512, 4096))
    execute({key: graph[key] for key in ("1", "3")})
    assert (seen["height"], seen["width"], seen["frames"], seen["flow_shift"]) == (720, 1280, 81, 5.0)


@pytest.mark.parametrize("name", EXAMPLES)
def test_both_formats_of_a_workflow_are_the_same_graph(name):
    graph = {key: (node["class_type"], node["inputs"]) for key, node in read(name).items()}
    assert graph == to_api(read(name, WORKFLOWS))


def to_api(workflow) -> dict:
    """What ComfyUI's frontend makes of a saved workflow: widgets by position (a seed is followed by its control),
    links by number."""
    sources = {number: [str(origin), output] for number, origin, output, *_ in workflow["links"]}
    graph = {}
    for node in workflow["nodes"]:
        values, inputs = iter(node["widgets_values"]), {}
        for key, kind in inputs_of(node["type"]).items():
            if kind in ("INT", "FLOAT", "STRING", "COMBO"):
                inputs[key] = next(values)
            if key == "seed":
                assert next(values) in ("fixed", "randomize")
        inputs |= {slot["name"]: sources[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
        assert next(values, None) is None
        graph[str(node["id"])] = node["type"], inputs
    return graph


# ---------------------------------------------------------------- beside others


def in_new_process(code, folder, **environment) -> str:
    """Run code that finds `load()`, which imports a node folder as ComfyUI does, by its path."""
    prelude = "import importlib.util, sys\nfrom pathlib import Path\n" + inspect.getsource(load)
    program = [sys.executable, "-c", prelude + textwrap.dedent(code)]
    answer = subprocess.run(
        program, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    return answer.stdout + answer.stderr


def test_in_a_folder_of_any_name_pytest_imports_the_project_alone(monkeypatch):
    """As where its name is none of a package: wan-torchax."""
    monkeypatch.setitem(sys.modules, "__init__", None)  # is taken out again
    load(ROOT, "__init__")


@pytest.mark.system
def test_linked_beside_others(tmp_path):
    """Light to import; the one name taken is the package's, and sys.path and Hydra's state are as they were."""
    (tmp_path / "wan.nodes").symlink_to(ROOT / "comfyui")
    for name in ("schema", "run", "media", "patches"):
        (tmp_path / f"{name}.py").write_text(f"whose = 'theirs: {name}'")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("whose = 'theirs: kernels'")
    code = f"""
        import schema
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        initialize_config_dir({str(tmp_path)!r}, version_base="1.2")
        theirs, path = GlobalHydra.instance().hydra, list(sys.path)
        wan = load(Path("wan.nodes"), "wan_x_nodes")
        heavy = {{"jax", "torch", "torchax", "diffusers"}} & set(sys.modules)
        assert not heavy, heavy
        node = wan.NODE_CLASS_MAPPINGS["Wan21Config"]()
        assert node.configure(preset="default", overrides="steps=7")[4] == 7
        import kernels, media, patches, run
        names = [module.whose for module in (schema, run, media, patches, kernels)]
        assert names == ["theirs: " + name for name in ("schema", "run", "media", "patches", "kernels")]
        assert sys.path == path
        assert GlobalHydra.instance().hydra is theirs
        from hydra.version import getbase
        assert str(getbase()) == "1.2"
        print("in order")
    """
    answer = in_new_process(code, tmp_path)
    assert answer.splitlines()[-1] == "in order", answer


@pytest.mark.system
def test_copied_it_needs_to_know_the_project(tmp_path):
    shutil.copytree(ROOT / "comfyui", tmp_path / "custom_nodes" / "wan", ignore=shutil.ignore_patterns("__pycache__"))
    code = "print(len(load(Path('custom_nodes/wan'), 'custom_nodes/wan').NODE_CLASS_MAPPINGS))"
    assert "set WAN_TORCHAX_HOME to the project's folder" in in_new_process(code, tmp_path, WAN_TORCHAX_HOME="")
    assert in_new_process(code, tmp_path, WAN_TORCHAX_HOME=str(ROOT)).splitlines()[-1] == "6"
    broken = in_new_process(code, tmp_path, WAN_TORCHAX_HOME=str(ROOT), **{settings.OWNER: "stepz=3"})
    assert f"ImportError: {settings.OWNER}: stepz: no such key" in broken


@pytest.mark.system
def test_the_whole_project_cloned(tmp_path):
    """As ComfyUI finds it in custom_nodes: the nodes of that clone, and their workflows in the template browser."""
    clone = tmp_path / "custom_nodes" / "wan-torchax"
    heavy = {"outputs", "models", "benchmarks", "docs", "tests", "tools", "shared"}

    def left_out(folder, names):
        hidden = {name for name in names if name.startswith(".") or name == "__pycache__"}
        return hidden | heavy if Path(folder) == ROOT else hidden

    shutil.copytree(ROOT, clone, symlinks=True, ignore=left_out)
    code = f"""
        wan = load(Path({str(clone)!r}), {str(clone)!r})
        import wan_torchax
        assert wan_torchax.ROOT == Path({str(clone)!r}).resolve()
        print(*wan.NODE_CLASS_MAPPINGS, wan.NODE_CLASS_MAPPINGS["Wan21Config"]().configure(preset="default")[1])
    """
    answer = in_new_process(code, tmp_path)
    assert answer.splitlines()[-1] == " ".join([*NODES, "128"]), answer
    assert set(comfyui.NODE_DISPLAY_NAME_MAPPINGS) == set(NODES)
    assert sorted(path.stem for path in clone.glob("example_workflows/*.json")) == sorted(EXAMPLES)


# ---------------------------------------------------------------- execution


class Cancelled(Exception):
    pass


@pytest.fixture
def comfy(monkeypatch):
    """As much of ComfyUI as the nodes use: `cancel_at` counts questions, `bars` has every progress bar's values."""
    seen = types.SimpleNamespace(questions=0, cancel_at=None, bars=[], previews=[], free=0.0, unloaded=0)

    def question():
        seen.questions += 1
        if seen.questions == seen.cancel_at:
            raise Cancelled

    class ProgressBar:
        def __init__(self, total):
            self.values = [0]
            seen.bars.append((total, self.values))

        def update(self, count):
            self.values.append(self.values[-1] + count)

        def update_absolute(self, value, total=None, preview=None):
            seen.previews.append((value, total, preview))

    def free_memory(memory_required, device, keep_loaded=()):
        seen.unloaded += 1
        return []

    management = types.SimpleNamespace(
        throw_exception_if_processing_interrupted=question,
        free_memory=free_memory,
        get_free_memory=lambda device: seen.free,
    )
    monkeypatch.setattr(host, "management", management)
    monkeypatch.setattr(host, "ProgressBar", ProgressBar)
    return seen


def small_demo(**inputs):
    """The demo workflow at the size of the other tests, with what they share compiled."""
    graph = read("demo")
    for node in graph.values():
        node["inputs"] |= {key: value for key, value in (SMALL_INPUTS | inputs).items() if key in node["inputs"]}
    return graph


def execute(graph) -> dict:
    """Run a graph as ComfyUI does: every node once its inputs are there, in inference mode. Gives what was saved."""
    done, saved = {}, {}
    stock = {"CreateVideo": lambda **inputs: (inputs,), "SaveVideo": lambda video, **_: saved.update(video) or ()}

    def value(link):
        return result(link[0])[link[1]] if isinstance(link, list) else link

    def result(key):
        if key not in done:
            kind, inputs = graph[key]["class_type"], {name: value(link) for name, link in graph[key]["inputs"].items()}
            function = stock[kind] if kind in stock else getattr(NODES[kind](), NODES[kind].FUNCTION)
            with torch.inference_mode():
                done[key] = function(**inputs)
            assert_torch_is_plain()
        return done[key]

    for key in graph:
        result(key)
    return saved


def assert_torch_is_plain():
    """Nothing of torchax acts on torch, and tensors are torch's own."""
    assert type(torch.ones(2) + 1) is torch.Tensor and type(torch.nn.Linear(2, 2).weight) is torch.nn.Parameter
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not patches.torchax.default_env().enabled
    assert torch.backends.mha.get_fastpath_enabled() is FAST_PATH and torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32


@pytest.fixture
def smallest(owner, monkeypatch):
    """The server's model is the smallest."""
    monkeypatch.setenv(settings.OWNER, shlex.join([owner, *tiny.model()]))


@pytest.fixture(scope="module")
def demo_frames(owner):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.OWNER, shlex.join([owner, *tiny.model()]))
        assert_torch_is_plain()
        return execute(small_demo(seed=7))


@pytest.fixture
def made(demo_frames, smallest):
    """The demo workflow, run once; its frames and what was compiled for it stay for the other tests."""
    return demo_frames


def pipeline(**inputs):
    with torch.inference_mode():
        everything = SMALL_INPUTS | {"prompt": PROMPT, "negative_prompt": "", "guidance_scale": 4.0, "seed": 7} | inputs
        return nodes.Wan21TPUPipeline().generate(**everything)[0]


def test_the_demo_workflow_gives_an_image_batch(made):
    frames = made["images"]
    assert type(frames) is torch.Tensor and frames.device.type == "cpu" and frames.dtype is torch.float32
    assert frames.shape == (5, 64, 64, 3) and 0 <= frames.min() < frames.max() <= 1
    assert made["fps"] == 8.0


def test_a_video_goes_through_the_pipeline_node_as_through_run_py(made, generate, tmp_path):
    chosen = configure(overrides="pipeline=v2v\nstrength=0.4")[0]
    video = pipeline(config=chosen, video=made["images"], seed=8)
    file = files.write_video(tmp_path / "video", files.pixels("video", made["images"], 4), 8)
    folder = generate("pipeline=v2v", "strength=0.4", f"video={file}", "seed=8", f"prompt={PROMPT}")
    expected = load_file(folder / "decode.safetensors")["frames"]
    assert numpy.array_equal((video * 255).round().to(torch.uint8).numpy(), expected)
    with pytest.raises(ConfigError, match="^image: demo starts from a prompt alone; disconnect"):
        pipeline(image=made["images"][:1])
    with pytest.raises(ConfigError, match="^video: demo starts from it; connect"):
        pipeline(config=chosen)
    with pytest.raises(ConfigError, match="- video: has 3 frames .* num_frames=5"):
        pipeline(config=chosen, video=made["images"][:3])


@pytest.mark.parametrize("name", ["Wan21TextEncoder", "Wan21TPUSampler", "Wan21TPUVAEDecoder"])
@pytest.mark.parametrize("choices", [{"model": "demo_i2v"}, {"overrides": "pipeline=v2v"}])
def test_models_that_start_from_pictures_are_for_the_full_pipeline(name, choices):
    with pytest.raises(ConfigError, match=r"^demo\w* starts from (image|video): use .*Full Pipeline"):
        getattr(NODES[name](), NODES[name].FUNCTION)(**CALLS[name], config=configure(**choices)[0])


class Broken(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_connected_lies_in_a_private_folder_while_a_node_runs(fails, monkeypatch, tmp_path):
    picture = torch.rand(2, 64, 64, 3)

    def run_stages(names, config):
        file = Path(config.image)
        folders.append(file.parent)
        assert file.parent.parent == tmp_path and file.parent.stat().st_mode & 0o777 == 0o700
        with Image.open(file) as saved:
            assert numpy.array_equal(numpy.asarray(saved), files.pixels("image", picture, 4)[0])
        if fails:
            raise Broken
        return {"frames": numpy.zeros((5, 64, 64, 3), numpy.uint8)}

    folders = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(nodes, "run_stages", run_stages)
    for _ in range(2):
        with pytest.raises(Broken) if fails else contextlib.nullcontext():
            pipeline(config=configure(model="demo_i2v")[0], image=picture)
    assert len(set(folders)) == 2, "two processes, or users, have folders of their own"
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_a_process_that_ends_takes_its_folder_along(tmp_path):
    code = f"""
        files = load(Path({str(ROOT / "comfyui")!r}), "wan_x_nodes").nodes.files
        folder = files.private_folder()
        (Path(folder.name) / "image.png").write_text("")
        print(folder.name)
    """
    answer = in_new_process(code, tmp_path, TMPDIR=str(tmp_path))
    assert Path(answer.splitlines()[-1]).parent == tmp_path, answer
    assert not list(tmp_path.iterdir())


def test_the_same_frames_as_run_py(made, generate):
    folder = generate("seed=7", f"prompt={PROMPT}")
    expected = load_file(folder / "decode.safetensors")["frames"]
    assert numpy.array_equal((made["images"] * 255).round().to(torch.uint8).numpy(), expected)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["magcache", "magcache_guidance", "easycache", "guidance"])
def test_a_cache_goes_through_the_nodes(smallest, generate, mode):
    lines = [f"cache={mode}", "cache.threshold=0.3", "cache.guidance_every=3"]
    frames = execute(small_demo(overrides="\n".join(lines), num_inference_steps=9, seed=7))["images"]
    folder = generate(*lines, "seed=7", "steps=9", f"prompt={PROMPT}")
    expected = load_file(folder / "decode.safetensors")["frames"]
    assert numpy.array_equal((frames * 255).round().to(torch.uint8).numpy(), expected)
    assert json.loads((folder / "metrics.json").read_text())["step_work"]["full"] < 9


def test_the_full_pipeline_gives_the_same_frames_as_the_three_nodes(made):
    assert torch.equal(pipeline(), made["images"])


def test_another_seed_compiles_and_loads_nothing(made, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("something was made again")

    pipeline()
    monkeypatch.setattr(programs, "compile_all", refuse)
    monkeypatch.setattr(weights, "load", refuse)
    other = execute(small_demo(seed=8))["images"]
    assert not torch.equal(other, made["images"])


def test_progress_and_previews(made, comfy):
    execute(small_demo(overrides="preview_every=1"))
    assert (3, [0, 1, 2, 3]) in comfy.bars and (5, [0, 1, 5]) in comfy.bars
    assert [preview[:2] for preview in comfy.previews] == [(1, 3), (2, 3)]
    assert comfy.previews[0][2][0] == "JPEG" and comfy.previews[0][2][1].size == (64, 64)


LIVE = (
    "pipeline=live", "live=self_forcing", "live.chunk=2", "live.window=null", "scheduler=renoise_linear", "steps=4",
    "guidance_scale=1", "resolution.frames=21",
)


def test_a_live_video_shows_its_frames_as_they_come(comfy):
    """Without previews, which it has no room for; and its progress is that of its steps alone."""
    assert settings.compose(LIVE).preview_every == 0 and settings.compose().preview_every == 5
    frames, listener = numpy.zeros((4, 64, 64, 3), numpy.uint8), host.Listener(4)
    for event in (
        Began("live", 8, "step"), Queued("live"), *[Advanced("live", 1)] * 4, Queued("live"), Advanced("decode", 4),
        Decoded(frames), Advanced("live", 1),
    ):
        listener(event)
    assert comfy.bars[0] == (8, [0, 1, 2, 3, 4, 5]) and [preview[:2] for preview in comfy.previews] == [(4, 8)]
    assert comfy.previews[0][2][1].size == (64, 64)


def test_a_live_video_is_made_by_the_whole_pipeline():
    with pytest.raises(ConfigError, match="has pipeline=live: use Wan 2.1 TPU Full Pipeline"):
        nodes.compose_part(LIVE)


def test_cancelled_between_steps_then_run_again(made, comfy):
    pipeline()
    needed, comfy.questions = comfy.questions, 0
    for comfy.cancel_at in (needed // 2, needed - 1):
        comfy.questions = 0
        with pytest.raises(Cancelled):
            pipeline()
        assert_torch_is_plain()
    comfy.cancel_at = None
    assert torch.equal(pipeline(), made["images"])


@pytest.mark.system
def test_failed_then_cancelled_while_compiling_then_run_again(made, comfy, monkeypatch, unkept):
    """Torch stays plain, and what the compiler had not finished is not waited for by the next run."""

    def fail(*arguments):
        raise RuntimeError("out of memory")

    session.clear()
    with monkeypatch.context() as broken:
        broken.setattr(step, "advance", fail)  # while the step is traced, with torchax on
        with pytest.raises(RuntimeError, match="out of memory"):
            pipeline()
    assert_torch_is_plain()
    comfy.questions, comfy.cancel_at = 0, 2
    with pytest.raises(Cancelled):
        pipeline()
    assert_torch_is_plain()
    assert torch.equal(pipeline(), made["images"])


@pytest.mark.parametrize(
    ("embeddings", "told"),
    [
        ((torch.zeros(1, 128, 4096), torch.zeros(1, 128, 128)), r"^prompt_embeds: \(1, 128, 4096\)"),
        ((torch.zeros(1, 128, 128), torch.zeros(1, 64, 128)), r"^negative_prompt_embeds: \(1, 64, 128\)"),
        ((torch.zeros(2, 128, 128), torch.zeros(2, 128, 128)), r"^prompt_embeds: \(2, 128, 128\)"),
        ((torch.zeros(128), torch.zeros(128)), r"^prompt_embeds: \(128,\)"),
        (([[0.0]], {"a": 1}), "^prompt_embeds: list"),
        ((torch.zeros(1, 128, 128), None), "^negative_prompt_embeds: None"),
    ],
)
def test_embeddings_that_are_none_are_told(embeddings, told):
    with pytest.raises(ConfigError, match=f"{told}.*Text Encoder"):
        nodes.Wan21TPUSampler().sample(*embeddings, **SMALL_INPUTS, guidance_scale=5.0, seed=1)


@pytest.mark.parametrize(
    "latents",
    [
        {"samples": torch.zeros(1, 4, 2, 8, 8)}, {"samples": torch.zeros(2, 16, 2, 8, 8)},
        {"samples": torch.zeros(1, 4, 8, 8)}, {"samples": [1]}, {}, [1], None,
    ],
)
def test_latents_that_are_none_are_told(latents):
    with pytest.raises(ConfigError, match="^latents: .* is not .*connect Wan 2.1 TPU Sampler"):
        nodes.Wan21TPUVAEDecoder().decode(latents)


@pytest.mark.parametrize("picture", [[1], torch.zeros(64, 64, 3), torch.zeros(0, 64, 64, 3), torch.zeros(1, 64, 64, 2)])
def test_pictures_that_are_none_are_told(picture):
    with pytest.raises(ConfigError, match="^image: .*ComfyUI's IMAGE"):
        pipeline(config=configure(model="demo_i2v")[0], image=picture)


@pytest.mark.parametrize("name", ["Wan21TPUSampler", "Wan21TPUPipeline"])
@pytest.mark.parametrize(
    ("inputs", "told"),
    [({"height": 720}, " height=720: demo takes 64 to 256; nearest 256"), ({"seed": "abc"}, "^seed=abc: .*number")],
)
def test_numbers_that_do_not_fit_the_model_are_told(name, inputs, told):
    with pytest.raises(ConfigError, match=told):
        getattr(NODES[name](), NODES[name].FUNCTION)(**CALLS[name] | inputs)


def test_a_mesh_that_needs_other_flags_needs_a_restart(made):
    """JAX reads its flags once a process, and ComfyUI is one process."""
    with pytest.raises(ConfigError, match="xla_gpu_enable_triton_gemm=false.*; restart ComfyUI"):
        pipeline(config=configure(mesh="gpu_1")[0])


@pytest.mark.parametrize(("scale", "count"), [(5.0, 2), (1.0, 1)])
def test_without_guidance_the_negative_prompt_is_left_out(monkeypatch, scale, count):
    def run_stages(names, config, values, helpers):
        assert values["embeddings"].shape == (count, 128, 128) and config.guidance_scale == scale
        return {"latents": numpy.zeros((1, 16, 2, 8, 8), numpy.float32)}

    monkeypatch.setattr(nodes, "run_stages", run_stages)
    embeddings = torch.zeros(1, 128, 128), torch.ones(1, 128, 128)
    nodes.Wan21TPUSampler().sample(*embeddings, **SMALL_INPUTS, guidance_scale=scale, seed=1)


def test_memory_is_given_back_when_comfyui_lacks_it(made, comfy):
    def loaded():
        return [name for name, component in session.components.items() if component.arrays]

    pipeline()
    before = loaded()
    assert "transformer" in before
    host.on_memory_request(nodes.release)
    comfy.free = 1e9
    host.management.free_memory(1e6, "cpu", keep_loaded=[])
    assert loaded() == before, "there is enough"
    live = len(jax.live_arrays())
    host.management.free_memory(1e30, "cpu")
    assert comfy.unloaded == 2
    assert not session.components and not session.stages and len(jax.live_arrays()) < live


# ---------------------------------------------------------------- a real server


INSTALLED = {"wan_torchax": ROOT / "comfyui", "wan-torchax": ROOT}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A ComfyUI server with both ways to install, everything it writes in a folder of its own."""
    if "COMFYUI_HOME" not in os.environ:
        pytest.skip("COMFYUI_HOME is not set")
    base, home = tmp_path_factory.mktemp("comfyui"), Path(os.environ["COMFYUI_HOME"])
    (base / "custom_nodes").mkdir()
    for name, folder in INSTALLED.items():
        (base / "custom_nodes" / name).symlink_to(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--port", str(port), "--base-directory", base]
    command = [comfyui_python(), home / "main.py", "--cpu", *place, "--disable-api-nodes"]
    environment = os.environ | {"XDG_CACHE_HOME": str(base), "JAX_NUM_CPU_DEVICES": "1"}
    with (base / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(f"http://127.0.0.1:{port}/system_stats", process)
        yield types.SimpleNamespace(address=f"127.0.0.1:{port}", log=base / "log.txt")
    finally:
        process.terminate()
        process.wait(PATIENCE)


def comfyui_python() -> str:
    return os.environ.get("COMFYUI_PYTHON", sys.executable)


def wait_for(address, process):
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return get(address)
        except urllib.error.URLError:
            time.sleep(0.5)
    raise AssertionError("the server did not start")


def get(address):
    return json.load(urllib.request.urlopen(address, timeout=PATIENCE))


def client(server, output, *changes):
    """The example client; gives the time and what it printed."""
    sizes = [f"3.{key}={value}" for key, value in SMALL_INPUTS.items()]
    place = ["--server", server.address, "--output", output]
    script = [comfyui_python(), ROOT / "comfyui" / "client.py", API / "demo.json"]
    command = [*script, *sizes, *changes, *place]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.system
def test_a_real_server_lists_the_nodes(server):
    listed = get(f"http://{server.address}/object_info")
    for name in NODES:
        assert listed[name]["display_name"] == comfyui.NODE_DISPLAY_NAME_MAPPINGS[name]
        assert listed[name]["category"] == "TPU/Wan2.1"
    assert "Cannot import" not in server.log.read_text()


@pytest.mark.system
@pytest.mark.parametrize("name", INSTALLED)
def test_a_real_server_offers_the_workflows(server, name):
    assert sorted(get(f"http://{server.address}/workflow_templates")[name]) == sorted(EXAMPLES)
    for example in EXAMPLES:
        assert get(f"http://{server.address}/api/workflow_templates/{name}/{example}.json") == read(example, WORKFLOWS)


@pytest.mark.system
def test_a_real_server_makes_the_video_and_compiles_once(server, tmp_path):
    for seed in (1, 2):
        answer = client(server, tmp_path / f"{seed}.mp4", f"3.seed={seed}")
        assert answer.returncode == 0, answer.stderr + server.log.read_text()
        assert answer.stdout.splitlines()[-1] == str(tmp_path / f"{seed}.mp4")
        facts = next(imageio_ffmpeg.read_frames(str(tmp_path / f"{seed}.mp4")))
        assert facts["size"] == (64, 64) and facts["fps"] == 8
    assert (tmp_path / "1.mp4").read_bytes() != (tmp_path / "2.mp4").read_bytes()
    assert server.log.read_text().count("compiled denoise.step") == 1


@pytest.mark.system
def test_a_real_server_tells_what_is_wrong(server, tmp_path):
    answer = client(server, tmp_path / "no.mp4", "3.height=512")
    assert answer.returncode == 1 and " height=512: demo takes 64 to 256; nearest 256" in answer.stderr
    for change, message in {
        "3.sed=1": "the workflow has no input 3.sed; it has ",
        f"3.seed={2**32 + 7}": "7 (it modulo 2**32) gives the same video",
        "1.overrides=model.path=/forged": "model.path: may only be given by whoever starts ComfyUI",
        "2.config=" + json.dumps({"__value__": FORGED_CONFIG}): "config: not from a Wan 2.1 Config node",
    }.items():
        answer = client(server, tmp_path / "no.mp4", change)
        assert answer.returncode == 1 and message in answer.stderr


@pytest.mark.system
def test_a_real_server_goes_on_after_cancelling_and_freeing(server, tmp_path):
    script = [comfyui_python(), ROOT / "comfyui" / "client.py", API / "demo.json"]
    command = [*script, "3.num_inference_steps=100", "--server", server.address]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    progress = ""
    while "node 3: " not in progress:  # the sampler; at the end of the stream nothing more comes
        read_on = process.stderr.read(1)
        assert read_on, progress
        progress += read_on
    post(server, "/interrupt")
    assert "cancelled on the server" in process.communicate(timeout=PATIENCE)[1]
    loads = server.log.read_text().count("transformer: ")
    deadline = time.monotonic() + PATIENCE
    while "let go of weights" not in server.log.read_text():  # ComfyUI may miss what it is asked while it tidies up
        assert time.monotonic() < deadline, "nothing was freed"
        post(server, "/free", {"unload_models": True, "free_memory": True})
        time.sleep(0.5)
    answer = client(server, tmp_path / "after.mp4", "3.seed=3")
    assert answer.returncode == 0 and (tmp_path / "after.mp4").stat().st_size > 0, answer.stderr
    assert server.log.read_text().count("transformer: ") == loads + 1, "the weights were not freed"


def post(server, path, body=None):
    content, kind = json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{server.address}{path}", content, kind)
    urllib.request.urlopen(request, timeout=PATIENCE).read()


@pytest.mark.system
@pytest.mark.parametrize("name", ["flux1_schnell", "hunyuan15_i2v_480p"])
def test_other_families_go_through_the_pipeline_node_as_through_run_py(owner, monkeypatch, tmp_path, name):
    is_video = "hunyuan" in name
    own = hunyuan15.model(name) if is_video else [one for one in flux.model("schnell") if "prompt=" not in one]
    monkeypatch.setenv(settings.OWNER, shlex.join([owner, *own]))
    given = {"image": torch.rand(1, 48, 64, 3)} if is_video else {}
    size = {"height": 48, "width": 64, "num_frames": 5 if is_video else 1, "num_inference_steps": 2}
    resolution = {"resolution": "848x480"} if is_video else {}  # its own is a picture's, which this node has not
    chosen = configure(model=name, **resolution)[0]
    made = pipeline(config=chosen, **size, guidance_scale=1.0, **given)
    overrides = ["resolution.height=48", "resolution.width=64", f"resolution.frames={size['num_frames']}", "steps=2"]
    overrides += ["resolution.flow_shift=" + str(nodes.START.resolution.flow_shift)]
    if is_video:
        picture = tmp_path / "image.png"
        Image.fromarray(files.pixels("image", given["image"], 4)[0]).save(picture)
        overrides.append(f"image={picture}")
    texts = [f"prompt={PROMPT}", "negative_prompt=", "guidance_scale=1", "seed=7", "output.keep_frames=true"]
    expected = results(run_into(tmp_path / "run", *own, *overrides, *texts))["frames"]
    assert numpy.array_equal((made * 255).round().to(torch.uint8).numpy(), expected)


def test_comfyui_gives_a_sound(tmp_path):
    wave = torch.rand(1, 2, 8000) - 0.5
    file = files.write_sound(tmp_path / "audio", {"waveform": wave, "sample_rate": 16_000})
    assert numpy.allclose(sounds.read(Path(file)), wave[0].mean(0), atol=1e-4)
    with pytest.raises(ConfigError, match="audio: a waveform of shape .2, 1, 5.; it takes ComfyUI's AUDIO, one sound"):
        files.write_sound(tmp_path / "audio", {"waveform": torch.zeros(2, 1, 5), "sample_rate": 8000})
