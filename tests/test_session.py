"""One Session: threads queue, what is made is shared and used again, failures free it, events tell the whole story."""
import json
import shutil
import threading

import numpy
import pytest
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file

from tests import tiny
from tests.conftest import make_config
from wan_torchax import events
from wan_torchax.config import registry, resolve
from wan_torchax.config.inputs import with_texts
from wan_torchax.config.resolve import Job
from wan_torchax.config.schema import ConfigError, PipelineStage
from wan_torchax.config.validation import validate
from wan_torchax.models.modules import construct
from wan_torchax.runtime.checkpoint import find_all
from wan_torchax.runtime.programs import Program
from wan_torchax.session import Session
from wan_torchax.stages.denoise import Denoise
from wan_torchax.stages.stage import Stage, find

SIZE = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=3"]
STAGES = ["text", "denoise", "decode"]


@pytest.fixture
def configure(request):
    """Of each test its own prompt, which no other has had encoded."""
    model, prompt = tiny.model(), f"prompt={request.node.name}"
    return lambda *overrides: with_texts(make_config(*model, *SIZE, prompt, *overrides))


@pytest.fixture
def twins(configure, tmp_path):
    """A folder whose two transformers are the same, and the config of a pipeline that uses both."""
    tiny.copied("text", tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "transformer_2")
    shutil.copytree(tmp_path / "model" / "transformer", tmp_path / "model" / "transformer_2")
    both = "pipeline.stages.denoise.uses=[transformer,transformer_2]"
    return tmp_path / "model", configure(f"model.path={tmp_path / 'model'}", both)


def run(session, config, names=STAGES, emit=events.silence, **values):
    resolved = session.resolve(config, names, emit)
    return session.run(resolved, names, resolved.inputs() | values, emit)


def test_jobs_that_differ_in_prompt_and_seed_are_decided_once(configure, monkeypatch):
    def decided(*overrides):
        resolved = Session().resolve(configure(*overrides), STAGES)
        stages = {name: find(name).recipe_for(name, resolved).key for name in STAGES}
        return resolved, stages, {name: find(name).view_of(name, resolved).config for name in STAGES}

    resolve.resolved_last.clear()
    alone = decided("seed=2", "prompt=b")
    resolve.resolved_last.clear()
    decided("seed=1", "prompt=a")
    monkeypatch.setattr(resolve.attention, "choose", None)
    after, recipes, views = decided("seed=2", "prompt=b")
    assert (after.config, recipes, views) == (alone[0].config, *alone[1:])
    assert (after.seeds, after.inputs()["prompt"], views["denoise"].seed) == ((2,), "b", 2)
    assert views["denoise"].get("scheduler") is not None and OmegaConf.is_readonly(views["denoise"])
    with pytest.raises(TypeError):  # another number of steps is not of their kind
        decided("steps=2")


# ---------------------------------------------------------------- one at a time


@pytest.mark.system
def test_two_threads_queue_and_get_what_they_asked_for(configure):
    session, order, made = Session(), [], {}

    def ask(seed):
        def emit(event):
            if isinstance(event, events.Began) and event.phase in STAGES:
                order.append(seed)

        made[seed] = run(session, configure(f"seed={seed}", "keep_resident=true"), emit=emit)["frames"]

    threads = [threading.Thread(target=ask, args=[seed]) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(order) == 5, "the text is encoded once"
    assert order in ([1, 1, 1, 2, 2], [2, 2, 2, 1, 1]), "one after the other"
    for seed in (1, 2):
        assert numpy.array_equal(made[seed], run(session, configure(f"seed={seed}"))["frames"])
    assert not numpy.array_equal(made[1], made[2])


def test_events_tell_the_whole_story(configure):
    heard = []
    run(Session(), configure("preview_every=1", "keep_resident=true"), emit=heard.append)
    began = [event.phase for event in heard if isinstance(event, events.Began)]
    ended = [event.phase for event in heard if isinstance(event, events.Ended)]
    assert began == ended, "one phase at a time"
    assert [phase for phase in began if not phase.startswith("compile_")] == [
        "start", "build", "load_text_encoder", "text", "load_transformer", "load_vae", "denoise", "decode",
    ]
    totals = {event.phase: event.total for event in heard if isinstance(event, events.Began)}
    counted = dict.fromkeys(totals, 0)
    for event in heard:
        if isinstance(event, events.Advanced):
            counted[event.phase] += event.count
    assert all(counted[phase] == total for phase, total in totals.items() if total is not None)
    assert totals["denoise"] == 3 and totals["decode"] == 5 and totals["load_vae"] > 1000
    assert [event.step for event in heard if isinstance(event, events.Stepped)] == [1, 2, 3]
    assert [event.step for event in heard if isinstance(event, events.Previewed)] == [1, 2]
    finished = [(event.stage, list(event.values)) for event in heard if isinstance(event, events.Finished)]
    assert finished == [("text", ["embeddings"]), ("denoise", ["latents"]), ("decode", ["frames"])]
    compiled = {event.program for event in heard if isinstance(event, events.Compiled)}
    assert compiled == {"text.text_encoder", "denoise.step", "decode.first", "decode.later"}
    for place, event in enumerate(heard):
        if isinstance(event, events.Compiled):
            stage = event.program.partition(".")[0]
            assert stage not in [earlier.phase for earlier in heard[:place] if isinstance(earlier, events.Began)]


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", [events.Took, events.Compiled])
def test_a_listener_is_called_in_the_thread_that_runs_the_session(configure, unkept, kind):
    """Also with what others do: what it raises there ends the run."""
    threads, parts = set(), set()

    def listen(event):
        threads.add(threading.get_ident())
        parts.add(getattr(event, "part", None))
        if isinstance(event, kind) and {"imports", "tracing"} <= parts:
            raise Stop

    with pytest.raises(Stop):
        run(Session(), configure(), emit=listen)
    assert threads == {threading.get_ident()}


# ---------------------------------------------------------------- what stays, what goes


def stop_at(step):
    def emit(event):
        if isinstance(event, events.Stepped) and event.step == step:
            raise Stop

    return emit


@pytest.mark.parametrize("resident", [False, True])
def test_a_run_that_is_stopped_frees_its_weights_unless_they_may_stay(configure, resident):
    session, config = Session(), configure(f"keep_resident={str(resident).lower()}")
    with pytest.raises(Stop):
        run(session, config, emit=stop_at(2))
    assert bool(session.components["transformer"].arrays) is resident
    assert run(session, config)["frames"].shape == (5, 64, 64, 3), "and the next goes on"


def test_weights_go_as_soon_as_no_stage_needs_them(configure):
    session, present = Session(), {}

    def emit(event):
        if isinstance(event, events.Began) and event.phase in STAGES:
            present[event.phase] = {name for name, component in session.components.items() if component.arrays}

    run(session, configure(), emit=emit)
    assert present == {"text": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}}
    assert not any(component.arrays for component in session.components.values())


def test_another_model_frees_the_old_before_the_new_is_loaded(configure):
    session = Session()
    run(session, configure("keep_resident=true"), ["text"])
    old = session.components["text_encoder"]
    assert old.arrays
    run(session, configure("keep_resident=true", "model.dtype.text_encoder=bfloat16"), ["text"])
    assert not old.arrays and session.components["text_encoder"] is not old


# ---------------------------------------------------------------- components apart from stages


class Average(Stage):
    """A stage made for these tests: it runs part of the VAE's encoder on frames."""

    @classmethod
    def parts(cls, family):
        return {"vae": r"quant_conv\..*"}

    @classmethod
    def temporaries(cls, resolved):
        return 0.0

    def build(self):
        from wan_torchax.devices.sharding import replicated, struct

        def average(arrays, frames):
            return sum(array.mean() for array in arrays.values()) * frames.mean()

        frames = struct(self.mesh, (5, 64, 64, 3), "float32")
        self.add("average", Program(average, "vae", [frames], replicated(self.mesh)))

    def run(self, view, values, emit):
        (frames,) = self.programs.put("average", (values["frames"],))
        return {"mean": numpy.asarray(self("average", frames))}


def test_two_stages_share_a_component(configure, monkeypatch):
    """Each loads its own part of it, once; a run ends with all of it freed."""
    config = configure()
    OmegaConf.update(config, "pipeline.stages.average", PipelineStage(["vae"], ["frames"], ["mean"]), force_add=True)
    monkeypatch.setitem(registry.STAGES, "average", "tests.test_session.Average")
    session, loads, together = Session(), [], []

    def emit(event):
        if isinstance(event, events.Began) and event.phase == "load_vae":
            loads.append(event.total)
        if isinstance(event, events.Began) and event.phase == "average":
            together.append({name.split(".")[0] for name in session.components["vae"].arrays})

    values = run(session, config, [*STAGES, "average"], emit=emit)
    assert values["mean"].shape == () and len(loads) == 2 and min(loads) < 10_000 < max(loads)
    assert together == [{"decoder", "post_quant_conv", "quant_conv"}], "nothing is loaded that no stage asked for"
    assert session.stages["decode"].components["vae"] is session.stages["average"].components["vae"]


class Alternating(Denoise):
    """Two experts in turn, through one program."""

    def __call__(self, program, *arguments, component=None):
        self.calls = getattr(self, "calls", 0) + 1
        return super().__call__(program, *arguments, component=list(self.components)[self.calls % 2])


def test_two_components_share_one_program(configure, twins, monkeypatch):
    monkeypatch.setitem(registry.STAGES, "denoise", "tests.test_session.Alternating")
    heard = []
    same = run(Session(), twins[1], ["text", "denoise"], emit=heard.append)["latents"]
    loads = [event.phase for event in heard if isinstance(event, events.Ended) and "load_transformer" in event.phase]
    assert loads == ["load_transformer", "load_transformer_2"]
    assert [event.program for event in heard if isinstance(event, events.Compiled)].count("denoise.step") == 1
    monkeypatch.undo()
    assert numpy.array_equal(same, run(Session(), configure(), ["text", "denoise"])["latents"]), "equal weights"


def test_twins_of_different_architectures_are_refused(twins):
    folder, config = twins
    settings = json.loads((folder / "transformer_2" / "config.json").read_text())
    (folder / "transformer_2" / "config.json").write_text(json.dumps(settings | {"eps": 1e-5}))
    with pytest.raises(ConfigError, match="are of different architectures"):
        Session().resolve(config, ["denoise"])


# ---------------------------------------------------------------- what a model brings


def test_a_setting_that_a_class_does_not_take_is_left_out_and_told(configure, tmp_path, caplog):
    """As Wan 2.2's VAE has one."""
    folder = tmp_path / "model"
    tiny.copied("text", folder)
    settings = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps(settings | {"clip_output": False}))
    resolved = Session().resolve(configure(f"model.path={folder}"), ["decode"])
    with caplog.at_level("INFO"):
        Session().build(resolved, ["decode"])
    assert "AutoencoderKLWan: clip_output=False in the checkpoint's config.json is left out" in caplog.text


def test_a_class_gets_what_it_takes(caplog):
    class Model:
        def __init__(self, width, depth=1):
            self.made = width, depth

        def eval(self):
            return self

    assert construct(Model, OmegaConf.create({"width": 3, "clip_output": False})).made == (3, 1)
    with pytest.raises(ConfigError, match="colour=red in the checkpoint's config.json: Model does not know it"):
        construct(Model, OmegaConf.create({"width": 3, "colour": "red"}))


def test_a_transformer_that_wants_a_pictures_tokens_is_refused_where_no_stage_gives_them():
    image = ["+model.architecture.transformer.added_kv_proj_dim=128", "+model.architecture.transformer.image_dim=16"]
    with pytest.raises(ConfigError, match="model=demo wants a picture's tokens, and pipeline=t2v gives none"):
        validate(make_config(*image))


def test_weights_come_from_where_they_are_now(configure, tmp_path):
    """Of two folders with the same weights one is overwritten: the other's are loaded from the other."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        tiny.copied("text", folder)
    session, file = Session(), folders[0] / "transformer" / "diffusion_pytorch_model.safetensors"
    exact = run(session, configure(f"model.path={folders[0]}", "keep_resident=false"))["latents"]
    save_file({name: tensor * 1.1 for name, tensor in load_file(file).items()}, file)
    again = run(session, configure(f"model.path={folders[1]}", "keep_resident=false"))["latents"]
    assert numpy.array_equal(again, exact)
    assert not numpy.array_equal(run(session, configure(f"model.path={folders[0]}"))["latents"], exact)


def test_components_may_be_found_one_after_another(two_layers):
    """As those are that have to be downloaded first."""
    job = Job.of(make_config(*two_layers), {})
    assert job.with_checkpoints(find_all(job.config, ["vae"])).checkpoints.keys() == {"vae"}
