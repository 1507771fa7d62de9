"""The ComfyUI nodes: their contracts, the example graphs, and that torch and other people's modules are left alone.

With COMFYUI_HOME set to a ComfyUI checkout, and COMFYUI_PYTHON to a Python that has its requirements and this project's
(by default the one that runs the tests), a real server runs the example workflow too.
"""
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
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
from safetensors.numpy import load_file

import comfyui
from comfyui import host, nodes
from tests.conftest import ROOT
from wan_torchax import patches
from wan_torchax.config.schema import ConfigError
from wan_torchax.runtime import programs, weights
from wan_torchax.session import session
from wan_torchax.stages import denoise

NODES = comfyui.NODE_CLASS_MAPPINGS
WORKFLOWS = ROOT / "comfyui" / "workflows"
EXAMPLES = ("demo", "t2v_14b_720p_v6e8")
STOCK = {  # ComfyUI's own nodes in the examples: inputs in the order of their widgets, and outputs
    "CreateVideo": ({"images": "IMAGE", "audio": "AUDIO", "fps": "FLOAT"}, ("VIDEO",)),
    "SaveVideo": ({"video": "VIDEO", "filename_prefix": "STRING", "format": "COMBO", "codec": "COMBO"}, ()),
}
PROMPT = json.loads((WORKFLOWS / "demo_api.json").read_text())["2"]["inputs"]["prompt"]
FAST_PATH = torch.backends.mha.get_fastpath_enabled()
SMALL_INPUTS = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 3}


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
    for kind, settings in (spec for group in listed.values() for spec in group.values() if spec[0] in ("INT", "FLOAT")):
        assert settings["min"] <= settings["default"] <= settings["max"]
        assert type(settings["default"]) is {"INT": int, "FLOAT": float}[kind]
    json.dumps(listed)  # /object_info sends it


def test_saved_workflows_of_the_earlier_nodes_still_fit():
    """Names and order of inputs, which widgets are saved by, and of outputs, which links are saved by."""
    sampling = ["height", "width", "num_frames", "num_inference_steps", "guidance_scale", "seed"]
    assert list(inputs_of("Wan21TextEncoder")) == ["prompt", "negative_prompt", "model_id", "config"]
    embeddings, texts = ["prompt_embeds", "negative_prompt_embeds"], ["prompt", "negative_prompt"]
    assert list(inputs_of("Wan21TPUSampler")) == [*embeddings, *sampling, "model_id", "flow_shift", "config"]
    assert list(inputs_of("Wan21TPUVAEDecoder")) == ["latents", "model_id", "fps", "config"]
    assert list(inputs_of("Wan21TPUPipeline")) == [*texts, *sampling, "model_id", "fps", "flow_shift", "config"]
    assert NODES["Wan21TextEncoder"].RETURN_NAMES == ("prompt_embeds", "negative_prompt_embeds")
    assert NODES["Wan21TPUSampler"].RETURN_NAMES == ("latents", "num_frames")
    for name in ("Wan21TPUVAEDecoder", "Wan21TPUPipeline"):
        assert NODES[name].RETURN_TYPES[0] == "IMAGE" and NODES[name].RETURN_NAMES == ("frames", "fps")
    assert nodes.choose_config(None, "Wan-AI/Wan2.1-T2V-14B-Diffusers") == ["model=wan21_t2v_14b"]
    with pytest.raises(ValueError, match="model_id=no/such: not a path in conf/model .*connect a Config node"):
        nodes.choose_config(None, "no/such")


def configure(**choices):
    everything = {"preset": "default", "model": "default", "resolution": "default", "mesh": "default", "overrides": ""}
    return nodes.Wan21Config().configure(**everything | choices)


def test_the_config_node_says_what_the_command_line_can():
    overrides = "\n# slower\n  steps=40 \nguidance_scale=6\n"
    config, *numbers = configure(model="wan21_t2v_14b", resolution="720p", mesh="v6e_8", overrides=overrides)
    assert config == ("model=wan21_t2v_14b", "resolution=720p", "mesh=v6e_8", "steps=40", "guidance_scale=6")
    assert numbers == [720, 1280, 81, 40, 6.0, 5.0, 16]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("stepz=3", "stepz: no such key or group; nearest: steps"), ("steps=0", "steps=0: must be from 1 to 1000"),
        ("model=wan", "model=wan: no such option"),
    ],
)
def test_the_config_node_refuses_clearly(overrides, message):
    with pytest.raises(ConfigError, match=message):
        configure(overrides=overrides)


def test_the_config_node_is_changed_when_its_config_is():
    before = nodes.Wan21Config.IS_CHANGED(overrides="")
    assert nodes.Wan21Config.IS_CHANGED(overrides="# nothing") == before
    assert nodes.Wan21Config.IS_CHANGED(overrides="model.scan_blocks=false") != before


# ---------------------------------------------------------------- workflows


def read(name):
    return json.loads((WORKFLOWS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_api_workflow_fits_the_nodes(name):
    graph = read(f"{name}_api")
    for node in graph.values():
        kinds = inputs_of(node["class_type"])
        for key, value in node["inputs"].items():
            if isinstance(value, list):
                source, number = value
                assert outputs_of(graph[source]["class_type"])[number] == kinds[key]
            elif node["class_type"] in NODES and kinds[key] == "COMBO":
                assert value in NODES[node["class_type"]].INPUT_TYPES()["required"][key][0]
    config = next(node for node in graph.values() if node["class_type"] == "Wan21Config")
    sampler = next(node for node in graph.values() if node["class_type"] == "Wan21TPUSampler")
    chosen = dict(zip(nodes.Wan21Config.RETURN_NAMES, configure(**config["inputs"])))
    assert all(sampler["inputs"][key] == value for key, value in chosen.items() if key not in ("config", "fps"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_both_formats_of_a_workflow_are_the_same_graph(name):
    graph = {key: (node["class_type"], node["inputs"]) for key, node in read(f"{name}_api").items()}
    assert graph == to_api(read(name))


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
    prelude = """
        import importlib.util, sys
        def load(folder):
            spec = importlib.util.spec_from_file_location(folder.replace(".", "_x_"), folder + "/__init__.py")
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    """
    program = [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)]
    answer = subprocess.run(
        program, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    return answer.stdout + answer.stderr


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
        wan = load({str(tmp_path / "wan.nodes")!r})
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


def test_copied_it_needs_to_know_the_project(tmp_path):
    shutil.copytree(ROOT / "comfyui", tmp_path / "custom_nodes" / "wan", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"print(len(load({str(tmp_path / 'custom_nodes' / 'wan')!r}).NODE_CLASS_MAPPINGS))"
    assert "set WAN_TORCHAX_HOME to the project's folder" in in_new_process(code, tmp_path, WAN_TORCHAX_HOME="")
    assert in_new_process(code, tmp_path, WAN_TORCHAX_HOME=str(ROOT)).splitlines()[-1] == "5"


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


def small(graph, cache, **inputs):
    """A graph of the demo model at the size of the other tests, with what they share compiled."""
    for node in graph.values():
        node["inputs"] |= {key: value for key, value in (SMALL_INPUTS | inputs).items() if key in node["inputs"]}
        if node["class_type"] == "Wan21Config":
            node["inputs"]["overrides"] += f"\n{cache}"
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


@pytest.fixture(scope="module")
def made(cache):
    """The demo workflow, run once; its frames and what was compiled for it stay for the other tests."""
    assert_torch_is_plain()
    return execute(small(read("demo_api"), cache, seed=7))


def pipeline(cache, **inputs):
    with torch.inference_mode():
        everything = SMALL_INPUTS | {"prompt": PROMPT, "negative_prompt": "", "guidance_scale": 4.0, "seed": 7} | inputs
        return nodes.Wan21TPUPipeline().generate(**everything, config=(cache,))[0]


def test_the_demo_workflow_gives_an_image_batch(made):
    frames = made["images"]
    assert type(frames) is torch.Tensor and frames.device.type == "cpu" and frames.dtype is torch.float32
    assert frames.shape == (5, 64, 64, 3) and 0 <= frames.min() < frames.max() <= 1
    assert made["fps"] == 8.0


def test_the_same_frames_as_run_py(made, generate):
    folder = generate("seed=7", f"prompt={PROMPT}")
    expected = load_file(folder / "decode.safetensors")["frames"]
    assert numpy.array_equal((made["images"] * 255).round().to(torch.uint8).numpy(), expected)


def test_the_full_pipeline_gives_the_same_frames_as_the_three_nodes(made, cache):
    assert torch.equal(pipeline(cache), made["images"])


def test_another_seed_compiles_and_loads_nothing(made, cache, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("something was made again")

    pipeline(cache)
    monkeypatch.setattr(programs, "compile_all", refuse)
    monkeypatch.setattr(weights, "load", refuse)
    other = execute(small(read("demo_api"), cache, seed=8))["images"]
    assert not torch.equal(other, made["images"])


def test_progress_and_previews(made, cache, comfy):
    graph = small(read("demo_api"), f"{cache}\npreview_every=1")
    execute(graph)
    assert (3, [0, 1, 2, 3]) in comfy.bars and (5, [0, 1, 5]) in comfy.bars
    assert [preview[:2] for preview in comfy.previews] == [(1, 3), (2, 3)]
    assert comfy.previews[0][2][0] == "JPEG" and comfy.previews[0][2][1].size == (64, 64)


def test_cancelled_between_steps_then_run_again(made, cache, comfy):
    pipeline(cache)
    needed, comfy.questions = comfy.questions, 0
    for comfy.cancel_at in (needed // 2, needed - 1):
        comfy.questions = 0
        with pytest.raises(Cancelled):
            pipeline(cache)
        assert_torch_is_plain()
    comfy.cancel_at = None
    assert torch.equal(pipeline(cache), made["images"])


def test_cancelled_while_compiling_then_run_again(made, cache, comfy):
    """What the compiler had not finished must not be waited for by the next run."""
    session.clear()
    comfy.cancel_at = 2
    with pytest.raises(Cancelled):
        pipeline(cache)
    assert_torch_is_plain()
    assert torch.equal(pipeline(cache), made["images"])


def test_an_error_in_the_middle_leaves_torch_plain(made, cache, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(denoise, "advance", fail)  # while the step is traced, with torchax on
        with pytest.raises(RuntimeError, match="out of memory"):
            pipeline(cache, height=80)
    assert_torch_is_plain()
    assert torch.equal(pipeline(cache), made["images"])


def test_what_does_not_fit_the_model_is_told(cache):
    sampler, decoder = nodes.Wan21TPUSampler(), nodes.Wan21TPUVAEDecoder()
    sizes = SMALL_INPUTS | {"guidance_scale": 5.0, "seed": 1}
    with pytest.raises(ValueError, match=r"embeddings of \(tokens, width\) \(512, 4096\): demo takes \(512, 128\)"):
        sampler.sample(torch.zeros(1, 512, 4096), torch.zeros(1, 512, 4096), **sizes)
    with pytest.raises(ValueError, match="latents of 4 channels: demo takes 16"):
        decoder.decode({"samples": torch.zeros(1, 4, 2, 8, 8)})
    with pytest.raises(ValueError, match="one video"):
        decoder.decode({"samples": torch.zeros(1, 4, 8, 8)})
    with pytest.raises(ConfigError, match="resolution.height=720: demo takes 64 to 256; nearest 256"):
        sampler.sample(torch.zeros(1, 512, 128), torch.zeros(1, 512, 128), **sizes | {"height": 720})


@pytest.mark.parametrize(("scale", "count"), [(5.0, 2), (1.0, 1)])
def test_without_guidance_the_negative_prompt_is_left_out(monkeypatch, scale, count):
    def run_stages(names, overrides, values, helpers):
        assert values["embeddings"].shape == (count, 512, 128) and f"guidance_scale={scale}" in overrides
        return {"latents": numpy.zeros((1, 16, 2, 8, 8), numpy.float32)}

    monkeypatch.setattr(nodes, "run_stages", run_stages)
    embeddings = torch.zeros(1, 512, 128), torch.ones(1, 512, 128)
    nodes.Wan21TPUSampler().sample(*embeddings, **SMALL_INPUTS, guidance_scale=scale, seed=1)


def test_memory_is_given_back_when_comfyui_lacks_it(made, cache, comfy):
    pipeline(cache)
    host.on_memory_request(nodes.release)
    comfy.free = 1e9
    host.management.free_memory(1e6, "cpu", keep_loaded=[])
    assert all(component.arrays for component in session.components.values()), "there is enough"
    live = len(jax.live_arrays())
    host.management.free_memory(1e30, "cpu")
    assert comfy.unloaded == 2
    assert not session.components and not session.stages and len(jax.live_arrays()) < live - 100


# ---------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A ComfyUI server with this folder linked into its custom nodes, everything it writes in a folder of its own."""
    if "COMFYUI_HOME" not in os.environ:
        pytest.skip("COMFYUI_HOME is not set")
    base, home = tmp_path_factory.mktemp("comfyui"), Path(os.environ["COMFYUI_HOME"])
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / "wan_torchax").symlink_to(ROOT / "comfyui")
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
        process.wait(60)


def comfyui_python() -> str:
    return os.environ.get("COMFYUI_PYTHON", sys.executable)


def wait_for(address, process, seconds=180):
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return get(address)
        except urllib.error.URLError:
            time.sleep(0.5)
    raise AssertionError("the server did not start")


def get(address):
    return json.load(urllib.request.urlopen(address))


def client(server, output, *changes):
    """The example client; gives the time and what it printed."""
    sizes = [f"3.{key}={value}" for key, value in SMALL_INPUTS.items()]
    place = ["--server", server.address, "--output", output]
    script = [comfyui_python(), ROOT / "comfyui" / "client.py", WORKFLOWS / "demo_api.json"]
    command = [*script, *sizes, *changes, *place]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_real_server_lists_the_nodes(server):
    listed = get(f"http://{server.address}/object_info")
    for name in NODES:
        assert listed[name]["display_name"] == comfyui.NODE_DISPLAY_NAME_MAPPINGS[name]
        assert listed[name]["category"] == "TPU/Wan2.1"


def test_a_real_server_makes_the_video_and_compiles_once(server, tmp_path):
    for seed in (1, 2):
        answer = client(server, tmp_path / f"{seed}.mp4", f"3.seed={seed}")
        assert answer.returncode == 0, answer.stderr + server.log.read_text()
        assert answer.stdout.splitlines()[-1] == str(tmp_path / f"{seed}.mp4")
        facts = next(imageio_ffmpeg.read_frames(str(tmp_path / f"{seed}.mp4")))
        assert facts["size"] == (64, 64) and facts["fps"] == 8
    assert (tmp_path / "1.mp4").read_bytes() != (tmp_path / "2.mp4").read_bytes()
    assert server.log.read_text().count("compiled denoise.step") == 1


def test_a_real_server_tells_what_is_wrong(server, tmp_path):
    answer = client(server, tmp_path / "no.mp4", "3.height=512")
    assert answer.returncode == 1 and "resolution.height=512: demo takes 64 to 256; nearest 256" in answer.stderr
    assert "the workflow has no input 3.sed; it has " in client(server, tmp_path / "no.mp4", "3.sed=1").stderr


def test_a_real_server_goes_on_after_cancelling_and_freeing(server, tmp_path):
    script = [comfyui_python(), ROOT / "comfyui" / "client.py", WORKFLOWS / "demo_api.json"]
    command = [*script, "3.num_inference_steps=100", "--server", server.address]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not get(f"http://{server.address}/queue")["queue_running"] and process.poll() is None:
        time.sleep(0.2)
    time.sleep(2)
    post(server, "/interrupt")
    assert "cancelled on the server" in process.communicate(timeout=120)[1]
    loads = server.log.read_text().count("transformer: ")
    post(server, "/free", {"unload_models": True, "free_memory": True})
    answer = client(server, tmp_path / "after.mp4", "3.seed=3")
    assert answer.returncode == 0 and (tmp_path / "after.mp4").stat().st_size > 0, answer.stderr
    assert server.log.read_text().count("transformer: ") == loads + 1, "the weights were not freed"


def post(server, path, body=None):
    content, kind = json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"http://{server.address}{path}", content, kind)).read()
