"""The demo model as a live one, and its tiny decoder: the endless world, its judge, and how both are taught."""
import json
import re
import shlex
import sys
from pathlib import Path
from random import Random

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from tests.conftest import ROOT, make_config, results, run_into
from tests.reference import relative_error
from wan_torchax.config.clips import read_frames
from wan_torchax.config.validation import validate
from wan_torchax.models.taehv import TinyVAE
from wan_torchax.models.tiny_vae import decode_chunk
from wan_torchax.stages.live import noise
from wan_torchax.stages.sampling import scheduler_table

sys.path.insert(0, str(ROOT / "tools"))
import demo_world as world
import judge_demo
import teach_demo
import teach_live
import teach_tiny_vae

MODEL = ROOT / "models/demo"

# ---------------------------------------------------------------- the world without an end


def scenes_of(count, pairs=0.3, seed=3):
    """Pairs of scenes of which the second follows the first, of all combinations."""
    random = Random(seed)
    first = [world.sample_scene(random, world.COMBINATIONS, pairs) for _ in range(count)]
    return [[scene, world.sample_change(scene, random, world.COMBINATIONS)] for scene in first]


def one(colour, shape, motion, place=None, background="black"):
    return world.Scene((world.Thing(colour, shape, motion, place=place),), background)


@pytest.mark.system
def test_the_judge_is_right_about_true_videos():
    """One of every motion and some pairs, each followed by another scene."""
    random = Random(1)
    chosen = [next(c for c in random.sample(world.COMBINATIONS, 400) if c[2] == motion) for motion in world.MOTIONS]
    listed = [[scene, world.sample_change(scene, random)] for scene in
              [world.sample_scene(random, [combination], 0.0) for combination in chosen]] + scenes_of(2, 1.0)
    for video, scenes in zip(judge_demo.true_lives(listed, [32, 32]), listed):
        for part, scene in zip(np.split(video, 2), scenes):
            assert all(judge_demo.judge_live(part, scene).values()), scene


def test_the_judge_sees_what_is_wrong():
    """A thing that stops, loses its colour or its shape half way, or turns back."""
    moving = one("red", "star", "left")
    for wrong, aspect in ((one("red", "star", "still"), "motion"), (one("blue", "star", "left"), "colour"),
                          (one("red", "ring", "left"), "shape"), (one("red", "star", "right"), "motion")):
        (video,) = judge_demo.true_lives([[moving, wrong]], [16, 25])
        assert not judge_demo.judge_live(video, moving)[aspect]


def test_what_is_not_said_goes_on():
    """Where a thing is, and its motion if that stays the same; a said place is where it then is."""
    def pictures(*scenes):
        return judge_demo.true_lives([list(scenes)], [16, 16])[0].astype(int)

    def centre(picture):
        (piece,) = judge_demo.pieces(picture.astype(np.uint8), judge_demo.backdrop(picture[None]), endless=True)
        return np.array([piece.x, piece.y])

    same = pictures(one("red", "circle", "bouncing", "left"), one("red", "circle", "bouncing"))
    alone = pictures(one("red", "circle", "bouncing", "left"), one("red", "circle", "bouncing", "left"))
    assert (same == alone).all(), "nothing has changed"
    painted = pictures(one("red", "star", "spinning", "left"), one("blue", "star", "spinning"))
    assert np.abs(painted[15] - painted[16])[..., 2].max() > 100, "red has become blue"
    assert np.abs(centre(painted[15]) - centre(painted[16])).max() < 2
    turned = pictures(one("red", "circle", "left"), one("red", "circle", "up"))
    assert np.abs(centre(turned[15]) - centre(turned[16])).max() < 8
    placed = pictures(one("red", "circle", "still", "left"), one("red", "circle", "still", "right"))
    assert centre(placed[16])[0] > 80 > 40 > centre(placed[15])[0]


def test_held_out_changes_are_only_of_held_out_things():
    listed = world.held_out_changes()
    assert len(listed) >= 60 and str(listed) == str(world.held_out_changes())
    for prompts, scenes in listed:
        assert len(prompts) == 2 and scenes[0] != scenes[1]
        assert all(world.is_held_out(t.colour, t.shape, t.motion) for scene in scenes for t in scene.things)


def test_changes_keep_to_the_combinations_that_are_seen():
    random = Random(0)
    scene, kinds = world.sample_scene(random), set()
    for _ in range(400):
        after = world.sample_change(scene, random)
        assert all(not world.is_held_out(t.colour, t.shape, t.motion) for t in after.things)
        assert all(t.colour != after.background for t in after.things)
        kinds.add(len(after.things))
        scene = after
    assert kinds == {1, 2}


# ---------------------------------------------------------------- teaching the transformer


def test_a_small_thing_counts_as_much_as_a_large_one():
    """Of videos in which one thing is missing, of 3 x 3 cells or 8 x 8."""
    def missing(side):
        wanted = torch.zeros(1, 16, 2, 16, 16)
        wanted[..., :side, :side] = 1
        return teach_live.error(settings("teach_live"), torch.zeros_like(wanted), wanted)

    assert missing(8) < 1.3 * missing(3)  # by their areas 7 times


RUN = [
    "pipeline=live", "live=demo", "scheduler=euler", "scheduler.sigmas=[1,0.75,0.5,0.25]", "guidance_scale=1",
    "output.keep_frames=true",
]
SIZE = ["resolution.height=64", "resolution.width=64", "resolution.frames=37", "resolution.fps=8"]  # five chunks
PROMPTS = ["a red star moving left on a black background", "a blue heart bouncing on a white background"]


def settings(name, *overrides):
    with initialize_config_dir(str(ROOT / "tools/conf"), version_base="1.3"):
        return compose(f"{name}_smoke", [f"model={MODEL}", *overrides])


@torch.no_grad()
def roughly_taught(folder):
    """The demo's transformer with other weights, as the tool stores them."""
    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel.from_pretrained(MODEL, subfolder="transformer")
    for weight in transformer.parameters():
        weight.mul_(1 + 0.05 * torch.randn_like(weight))
    teach_demo.save_transformer(transformer, transformer.state_dict(), folder / teach_live.WEIGHTS)


def test_what_is_taught_is_what_a_live_video_is_made_with(tmp_path):
    """Chunk by chunk: window, positions, steps, and what is read again after a change of the prompt."""
    roughly_taught(tmp_path)
    later = f"live.prompts=['2.5: {PROMPTS[1]}']"
    arguments = [*RUN, *SIZE, f"model.transformer={tmp_path}", f"prompt={PROMPTS[0]}", later, "stages=[text,live]"]
    made, config = results(run_into(tmp_path / "run", *arguments))["latents"], make_config(*arguments)
    cfg = teach_live.with_live(settings("teach_live"))
    table = scheduler_table(config)
    assert np.allclose(table.timesteps, [1000 * level for level in teach_live.levels_of(cfg, cfg.sigmas)[:-1]])
    networks = teach_demo.load(cfg, torch.device("cpu"))
    transformer = teach_live.stored(networks, tmp_path)
    drawn = [noise({"seed": jnp.uint32(config.seed), "chunk": chunk}, 0, (1, 16, 2, 8, 8)) for chunk in range(5)]
    drawn, texts = torch.tensor(np.concatenate(drawn, axis=2)), teach_demo.spoken(networks, PROMPTS)[None]
    expected = teach_live.generate(cfg, transformer, texts, [3], drawn).numpy()
    for chunk in range(5):
        part = slice(2 * chunk, 2 * chunk + 2)
        assert relative_error(made[:, :, part], expected[:, :, part]) < 1e-4, chunk
    unchanged = teach_live.generate(cfg, transformer, texts, [], drawn).numpy()
    assert relative_error(unchanged[:, :, :6], expected[:, :, :6]) == 0
    assert relative_error(unchanged[:, :, 6:], expected[:, :, 6:]) > 1e-2, "the prompt matters"


@pytest.mark.parametrize("tool", (teach_live, teach_tiny_vae))
def test_the_command_of_a_docstring_is_valid(tool):
    (command,) = re.findall(r"python run\.py (.*?)\n\n", tool.__doc__, re.DOTALL)
    config = make_config(*shlex.split(command.replace("\\\n", " ")))
    validate(config)
    assert Path(tool.WEIGHTS).parts[0] in config.model.paths


@pytest.mark.system
def test_teaching_runs_through(tmp_path):
    """The output runs as its docstring says."""
    teach_live.run(settings("teach_live", f"output={tmp_path}"), None)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["stages"].keys() == {"flow", "first", "rollout"} and metrics["settings"]["live"]["window"] == 6
    assert metrics["held_out_prompts"] == 1 and metrics["held_out"].keys() == metrics["after_change"].keys()
    assert (tmp_path / teach_live.WEIGHTS).stat().st_size < 15_000_000
    assert "colour" in (tmp_path / "README.md").read_text()
    made = results(run_into(tmp_path / "run", *RUN, *SIZE, f"model.transformer={tmp_path}", "stages=[text,live]"))
    assert made["latents"].shape == (1, 16, 10, 8, 8)


def test_stored_weights_follow_their_prompts():
    """After ten seconds, and after a change of the prompt."""
    folder = ROOT / "models/demo_live"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["command"] and metrics["commit"] and metrics["versions"] and metrics["held_out_prompts"] == 73
    assert (folder / teach_live.WEIGHTS).stat().st_size < 15_000_000
    for aspect, least in (("colour", 0.95), ("shape", 0.95), ("motion", 0.95), ("background", 0.99)):
        assert min(metrics[part][aspect] for part in ("held_out", "after_change")) >= least, aspect


def test_what_stored_models_say_of_their_training_names_no_machine():
    for path in (ROOT / "models").rglob("metrics.json"):
        metrics = json.loads(path.read_text())
        assert metrics["settings"]["output"].startswith("outputs/") and " /" not in metrics["command"], path
        assert "=/" not in metrics["command"], path


@pytest.mark.system
def test_the_stored_model_follows_what_it_is_told(tmp_path):
    """Four seconds of one thing, then four of another, in both of which everything is right."""
    scenes = one("red", "circle", "right", background="blue"), one("yellow", "star", "spinning", background="purple")
    told = ["prompt=a red circle moving right on a blue background",
            "live.prompts=['4: a yellow star spinning on a purple background']"]
    run_into(tmp_path, "model=demo_live", "resolution.frames=69", *told)
    frames = np.stack(list(read_frames(tmp_path / "video.mp4", 99, 8)))
    assert len(frames) == 69
    for part, scene in zip((frames[:37], frames[45:]), scenes):
        right = judge_demo.judge_live(part, scene)
        assert all(right[aspect] for aspect in ("colour", "shape", "motion", "background")), right


def test_losses_are_of_every_chunk():
    """Their gradients reach every weight, also those that read what is kept."""
    cfg = teach_live.with_live(settings("teach_live"))
    torch.manual_seed(0)
    networks = teach_demo.load(cfg, torch.device("cpu"))
    student = teach_live.make_causal(networks["transformer"]).requires_grad_(True)
    latents, texts = torch.randn(1, 16, 6, 4, 4), torch.randn(1, 2, 40, 128)
    pairs = teach_demo.Shelf(1, torch.device("cpu"))
    pairs.add(torch.randn(1, 16, 2, 4, 4), torch.randn(1, 16, 2, 4, 4), texts[:, 0])
    for loss, given in ((teach_live.flow_loss, texts[:, 0]), (teach_live.rollout_loss, pairs)):
        student.zero_grad()
        loss(cfg, student, [2], given, latents, texts).backward()
        assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in student.parameters())


# ---------------------------------------------------------------- teaching the tiny decoder


@torch.no_grad()
def test_the_tiny_decoder_is_taught_as_it_runs():
    """Whole videos are those of one latent frame after the other."""
    torch.manual_seed(0)
    tiny, latents = TinyVAE(widths=(12, 8, 6, 10)), torch.randn(2, 16, 3, 4, 6)
    for video, whole in zip(latents, teach_tiny_vae.decode(tiny, latents)):
        caches, pieces = None, []
        for latent in video[None].split(1, 2):
            pixels, caches = decode_chunk(tiny, latent, caches)
            pieces.append(pixels)
        assert whole.shape == (3, 9, 32, 48) and whole.std() > 1e-3
        torch.testing.assert_close(torch.cat(pieces, 2)[0], whole.clamp(-1, 1))


@pytest.mark.system
def test_teaching_the_tiny_decoder_runs_through(tmp_path):
    """The output runs as its docstring says, at the widths of conf/model/demo.yaml."""
    teach_tiny_vae.run(settings("teach_tiny_vae", f"output={tmp_path}"), None)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["psnr_db"] and metrics["videos"] >= 1 and metrics["stages"]["tiny_vae"]["step"] == 3
    tiny = ["vae=tiny", f"model.tiny_vae={tmp_path}", "stages=[text,live,decode]", "output.keep_frames=true"]
    made = results(run_into(tmp_path / "run", *RUN, *SIZE, "resolution.frames=5", *tiny))
    assert made["frames"].shape == (5, 64, 64, 3) and made["frames"].std() > 0
