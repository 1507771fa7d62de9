"""What the demo model was taught: pictures, four steps, a style. How it is taught, and what is stored of it."""
import json
import sys
from random import Random

import diffusers
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from safetensors import safe_open

from tests import reference, tiny
from tests.conftest import ROOT, SMALL, make_config, results, run_into
from tests.reference import TEXTS, assert_same
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ADAPTER_SETTINGS
from wan_torchax.runtime.adapters import parse, place_one

sys.path.insert(0, str(ROOT / "tools"))
import demo_world as world
import judge_demo
import teach_demo

MODEL = ROOT / "models/demo"
FOLDERS = {"i2v": "models/demo_i2v", "four_steps": "models/demo_4step", "outline": "models/demo_outline"}
MOST_BYTES = {"i2v": 15_000_000, "four_steps": 3_000_000, "outline": 1_000_000}
PROMPT = "the red star moves left"


def settings(what, *overrides):
    with initialize_config_dir(str(ROOT / "tools/conf"), version_base="1.3"):
        return compose("teach_demo_smoke", [f"what={what}", f"model={MODEL}", *overrides])


@pytest.fixture(scope="module")
def networks():
    return teach_demo.load(settings("i2v"), torch.device("cpu"))


# ---------------------------------------------------------------- teaching


@pytest.mark.system
@pytest.mark.parametrize("what", [
    pytest.param("i2v", marks=pytest.mark.full), "four_steps", pytest.param("outline", marks=pytest.mark.full),
])
def test_teaching_runs_through(tmp_path, what):
    teach_demo.run(settings(what, f"output={tmp_path}"), None)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["seconds"] and metrics["settings"]["seed"] == 0 and metrics["held_out_prompts"] == 1
    assert (tmp_path / teach_demo.WEIGHTS[what]).stat().st_size <= MOST_BYTES[what]


@torch.no_grad()
def test_a_picture_is_told_and_drawn_as_diffusers_does(networks):
    """The judge's videos are those of the pipeline, with whatever weights."""
    torch.manual_seed(0)
    transformer = teach_demo.widen(networks["transformer"])
    transformer.patch_embedding.weight.data += 0.05 * torch.randn(transformer.patch_embedding.weight.shape)
    parts = reference.components(MODEL, "text_encoder", "vae")
    pipeline = diffusers.WanImageToVideoPipeline(
        **parts, transformer=with_own_attention(transformer), image_encoder=None, image_processor=None,
        scheduler=diffusers.UniPCMultistepScheduler.from_pretrained(MODEL / "scheduler"), transformer_2=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 32, 32) * 2 - 1
    image = Image.fromarray(judge_demo.to_frames(picture[:, :, None][0])[0])
    given = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1
    cfg = settings("i2v", "i2v.guidance=2.0")
    expected = pipeline(image=image, prompt=PROMPT, height=32, width=32, num_frames=17, num_inference_steps=2,
                        guidance_scale=2.0, generator=torch.Generator().manual_seed(0), output_type="np",
                        max_sequence_length=tiny.TOKENS).frames[0]
    drawn = teach_demo.show(cfg, networks, transformer, [PROMPT], given)[0]
    assert judge_demo.likeness(drawn, (expected * 255).round()) > 45


def with_own_attention(transformer):
    """A copy that attends as diffusers does."""
    copied = diffusers.WanTransformer3DModel.from_config(transformer.config)
    copied.load_state_dict(transformer.state_dict())
    return copied


@torch.no_grad()
def test_a_wider_transformer_begins_as_the_demo(networks):
    latents, text, moment = torch.randn(1, 16, 2, 4, 4), torch.randn(1, 40, 128), torch.tensor([700.0])
    wide = teach_demo.widen(networks["transformer"])
    expected = networks["transformer"](latents, moment, text, return_dict=False)[0]
    drawn = wide(torch.cat((latents, torch.randn(1, 20, 2, 4, 4)), 1), moment, text, return_dict=False)[0]
    torch.testing.assert_close(drawn, expected)


@torch.no_grad()
def test_an_adapter_is_stored_as_it_was_learned_and_fits(networks, tmp_path):
    student = teach_demo.adapt(networks["transformer"], 4)
    learned = {name: value for name, value in student.named_parameters() if value.requires_grad}
    for value in learned.values():
        value.copy_((value + 0.05 * torch.randn(value.shape)).bfloat16())
    path = tmp_path / "demo_4step.safetensors"
    teach_demo.save_adapter(learned, path)
    stored = teach_demo.stored_transformer(settings("four_steps"), networks["transformer"], tmp_path)
    given = torch.randn(1, 16, 2, 4, 4), torch.tensor([700.0]), torch.randn(1, 40, 128)
    torch.testing.assert_close(*(one(*given, return_dict=False)[0] for one in (stored, student)))
    shapes = {name: tuple(value.shape) for name, value in networks["transformer"].state_dict().items()}
    names = family_of(make_config()).adapters
    placed, elsewhere, problems = place_one(parse(path, names), shapes, names.bare)
    assert 2 * len(placed) == len(learned) and not elsewhere and not problems


@pytest.mark.parametrize("hollow", (False, pytest.param(True, marks=pytest.mark.full)))
def test_what_starts_elsewhere_or_is_an_outline_moves_as_it_did(hollow):
    random = Random(5)
    scenes = [world.sample_scene(random, world.COMBINATIONS, 0.2) for _ in range(20)]
    things, backgrounds = zip(*(world.motion_numbers(scene, random) for scene in scenes))
    torch.manual_seed(0)
    clips = world.render(world.start_elsewhere(torch.stack(things), 1.0), torch.stack(backgrounds), hollow=hollow)
    clips = [judge_demo.to_frames(clip) for clip in clips]
    rates = judge_demo.outlined(clips, scenes) if hollow else judge_demo.adherence(clips, scenes)[0]
    assert rates["motion"] == rates["colour"] == rates["shape"] == 1 and rates.get("hollow", 1) > 0.95


def test_held_out_pictures_are_sixty_and_always_the_same():
    for short in (False, True):
        listed = world.held_out_pictures(short)
        assert len(listed) == 60 and str(listed) == str(world.held_out_pictures(short))
        assert all(world.is_held_out(t.colour, t.shape, t.motion) for _, scene, *_ in listed for t in scene.things)


# ---------------------------------------------------------------- what is stored


def stored(what):
    """The weights' file and what metrics.json says of them; skips where they are not there."""
    folder = ROOT / FOLDERS[what]
    if not (folder / teach_demo.WEIGHTS[what]).exists():
        pytest.skip(f"no {folder}")
    return folder / teach_demo.WEIGHTS[what], json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize("what", FOLDERS)
def test_stored_weights_are_small_and_say_how_they_were_made(what):
    path, metrics = stored(what)
    assert path.stat().st_size <= MOST_BYTES[what]
    assert metrics["command"] and metrics["commit"] and metrics["versions"] and metrics["held_out_prompts"] >= 60
    with safe_open(path, "pt") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - no mapping
    assert kinds == ({"F16"} if what == "i2v" else {"BF16"})


def test_pictures_meet_their_targets():
    rates = stored("i2v")[1]["held_out"]
    assert rates["first_frame_db"] >= 26 and min(rates["motion"], rates["colour"]) >= 0.9
    assert rates["shape"] >= 0.88, "that of the demo, from which it began"


def test_four_steps_are_nearly_as_good_as_twenty():
    few, many = stored("four_steps")[1]["held_out"], json.loads((MODEL / "metrics.json").read_text())["held_out"]
    assert all(few[aspect] >= many[aspect] - 0.05 for aspect in many)


def test_outlines_are_hollow_and_move_as_told():
    rates = stored("outline")[1]["held_out"]
    assert rates["hollow"] >= 0.5 and rates["motion"] >= 0.9 and rates["colour"] >= 0.8


def test_four_steps_bring_their_recipe():
    config = make_config("adapter=[demo_4step,demo_outline]")
    assert (config.steps, config.guidance_scale, config.scheduler.name) == (4, 1.0, "euler")
    assert set(config.adapter) == {*ADAPTER_SETTINGS, "demo_4step", "demo_outline"}


@pytest.mark.full
def test_demo_i2v_is_diffusers(tmp_path):
    stored("i2v")
    picture = tmp_path / "first.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(picture)
    overrides = [*SMALL, *TEXTS, "model=demo_i2v", f"image={picture}"]
    config, values = make_config(*overrides), results(run_into(tmp_path / "run", *overrides))
    transformer = diffusers.WanTransformer3DModel.from_pretrained(ROOT / "models/demo_i2v/transformer")
    pipeline = reference.load(
        MODEL, config, diffusers.WanImageToVideoPipeline, transformer=transformer, transformer_2=None,
        image_encoder=None, image_processor=None,
    )
    assert_same(values, *reference.make(pipeline, config, image=Image.open(picture)))
