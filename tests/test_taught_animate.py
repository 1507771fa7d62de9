"""The demo model that follows driving videos: how they are drawn, how it is taught, and that this is what runs."""
import json
import sys

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from safetensors.numpy import load_file

from tests.conftest import ROOT, make_config, run_into
from tests.reference import psnr, relative_error
from wan_torchax.config.clips import read_frames

sys.path.insert(0, str(ROOT / "tools"))
import demo_world as world
import driving
import judge_demo
import teach_animate
import teach_demo
import train_demo

TIMES = driving.there_and_back(33)


def settings(*overrides):
    folders = [f"model={ROOT / 'models/demo'}", f"start_from={ROOT / 'models/demo_i2v'}"]
    with initialize_config_dir(str(ROOT / "tools/conf"), version_base="1.3"):
        return compose("teach_animate_smoke", [*folders, *overrides])


def clip(animation):
    """What is asked for, as the world itself draws it."""
    _, things, _, background = animation
    return judge_demo.to_frames(world.render(things[None], background[None], times=TIMES)[0])


def shaken(network):
    """With noise on every weight: what is zero would hide mistakes."""
    torch.manual_seed(1)
    for parameter in network.parameters():
        parameter.data += 0.03 * torch.randn(parameter.shape)
    return network.requires_grad_(False)


# ---------------------------------------------------------------- driving videos


def test_held_out_animations_are_always_the_same():
    state = torch.random.get_rng_state()
    listed = driving.held_out()
    assert len(listed) == len(world.HELD_OUT) and str(listed) == str(driving.held_out())
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_judge_finds_true_renders_right_and_others_not():
    listed = driving.held_out()[::12]
    scenes, truths = [one[0] for one in listed], [clip(one) for one in listed]
    right = judge_demo.animated(truths, scenes, truths)
    assert right.pop("distance_px") == right.pop("distance_px_most") == 0 and set(right.values()) == {1.0}
    aside = judge_demo.animated([np.roll(frames, 6, axis=2) for frames in truths], scenes, truths)
    assert aside["distance_px"] == pytest.approx(6, abs=0.1) and aside["overlap"] < 0.7 and aside["colour"] == 1
    assert judge_demo.animated(truths[1:] + truths[:1], scenes, truths)["colour"] < 0.5
    empty = np.broadcast_to(truths[0][:, :1, :1], truths[0].shape)
    assert judge_demo.followed(empty, truths[0]) == {"distance_px": 128, "distance_px_most": 128, "overlap": 0}


def test_skeletons_are_where_things_are_and_faces_as_large():
    torch.manual_seed(0)
    things = driving.move_anyhow(torch.stack([one[1] for one in driving.held_out()[:4]]), share=1.0)
    poses, faces = driving.pose_video(things, TIMES), driving.face_video(things, TIMES)
    x, y, radius, turn = (one[..., 0, 0] for one in world.course(dict(zip(world.FIELDS, things[:, 0].T)), TIMES))
    line = (torch.arange(128) + 0.5) / 64 - 1
    white, green = ((poses > 0.5).all(1), (poses[:, 1] > 0) & (poses[:, 0] < 0))
    for mark, place in ((white, (x, y)), (green, (x + driving.ARM * turn.sin(), y - driving.ARM * turn.cos()))):
        centres = [(mark.sum(axis) * line).sum(-1) / mark.sum((2, 3)) for axis in (2, 3)]
        torch.testing.assert_close(torch.stack(centres), torch.stack(place), atol=0.02, rtol=0)
    area = ((faces[:, 0] + 1) / 2).sum((2, 3)) / 64
    torch.testing.assert_close(area, torch.pi * (0.95 * driving.FACE_SCALE * radius) ** 2, atol=0.1, rtol=0.06)


def test_files_hold_what_is_drawn(tmp_path):
    _, *numbers = driving.held_out()[5]
    driving.write(tmp_path, numbers, 33)
    things, shown, background = (one[None] for one in numbers)
    for name, video in (("pose", driving.pose_video(things, TIMES)), ("face", driving.face_video(things, TIMES)),
                        ("truth", world.render(things, background, times=TIMES))):
        stored = torch.tensor(np.stack(list(read_frames(tmp_path / f"{name}.mkv", 99, driving.FPS))))
        torch.testing.assert_close(stored.permute(3, 0, 1, 2) / 127.5 - 1, driving.as_stored(video)[0])
    picture = torch.tensor(np.array(Image.open(tmp_path / "picture.png"))).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(picture, driving.as_stored(world.render(shown, background, times=slice(0, 1)))[0, :, 0])


# ---------------------------------------------------------------- teaching


@torch.no_grad()
def test_it_begins_as_the_model_for_pictures():
    """What is new counts for nothing, and for something once it is learned."""
    cfg = settings("image_encoder.image_size=32", "image_encoder.patch_size=16")
    network = teach_animate.build(cfg).train_quickly()
    start = teach_animate.WanTransformer3DModel.from_pretrained(cfg.start_from, subfolder="transformer").float()
    train_demo.attend_quickly(start, train_demo.QuickAttention(teach_animate.PROMPT_TOKENS))
    given = torch.randn(1, 36, 3, 4, 4), torch.tensor([700.0]), torch.randn(1, 40, 128)
    told = {"pictures": torch.randn(1, 3, 32, 32), "poses": torch.randn(1, 16, 2, 4, 4),
            "faces": torch.rand(1, 3, 5, 16, 16)}
    expected = start(*given, return_dict=False)[0]
    torch.testing.assert_close(network(*given, **told)[0], expected)
    shaken(network)
    drawn = network(*given, **told)[0]
    for name, value in told.items():
        changed = network(*given, **told | {name: value.roll(1, -1)})[0]
        assert relative_error(changed.numpy(), drawn.numpy()) > 1e-4, name


def test_stored_weights_follow_what_drives_them():
    folder = ROOT / "models/demo_animate"
    metrics = json.loads((folder / "metrics.json").read_text())
    rates = metrics["held_out"]
    assert metrics["command"] and metrics["commit"] and metrics["versions"] and metrics["held_out_videos"] >= 40
    assert sum((folder / file).stat().st_size for file in teach_animate.STORED.values()) < 18_000_000
    assert min(rates["colour"], rates["background"]) == 1 and min(rates["shape"], rates["followed"]) >= 0.9
    assert rates["distance_px"] < 1


@pytest.mark.system
def test_the_stored_model_moves_a_shape(tmp_path):
    animation = driving.held_out()[5]
    driving.write(tmp_path, animation[1:], 17)
    driven = [f"{name}={tmp_path / name}.mkv" for name in ("pose", "face")]
    run_into(tmp_path / "run", "model=demo_animate", f"image={tmp_path / 'picture.png'}", *driven, "steps=8")
    files = tmp_path / "run/video.mp4", tmp_path / "truth.mkv"
    found = judge_demo.followed(*(np.stack(list(read_frames(file, 99, driving.FPS))) for file in files))
    assert found["distance_px"] < 3 and found["overlap"] > 0.75


@pytest.mark.system
def test_teaching_runs_through(tmp_path):
    teach_animate.run(settings(f"output={tmp_path}"), None)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["stages"]["animate"]["step"] == 2 and metrics["held_out_videos"] == 1
    assert metrics["settings"]["seed"] == 0 and "pixels from where" in (tmp_path / "README.md").read_text()
    assert sum((tmp_path / file).stat().st_size for file in teach_animate.STORED.values()) < 18_000_000
    learned, start = teach_animate.stored(tmp_path).transformer, teach_animate.build(settings()).transformer
    assert learned.pose_patch_embedding.weight.any() and not start.pose_patch_embedding.weight.any()
    assert torch.equal(learned.motion_encoder.motion_synthesis_weight,
                       start.motion_encoder.motion_synthesis_weight.half())


@pytest.mark.system
@torch.no_grad()
def test_what_is_taught_is_what_runs(tmp_path):
    """Conditions, latents and frames of two segments, from files and from numbers."""
    side = "clip_size=64", "image_encoder.image_size=64", "judge.steps=2"
    cfg, folder, animation = settings(*side), tmp_path / "model", driving.held_out()[5]
    network = shaken(teach_animate.build(cfg))
    teach_animate.save(network, {}, folder)
    network, networks = teach_animate.stored(folder).train_quickly(), teach_animate.load(cfg, torch.device("cpu"))
    driving.write(tmp_path, animation[1:], 33, size=64)
    overrides = [
        "model=demo_animate", f"model.path={folder}", "model.architecture.image_encoder.image_size=64",
        f"image={tmp_path / 'picture.png'}",
        *(f"{name}={tmp_path / name}.mkv" for name in ("pose", "face")), "model.area=4096", "prompt=",
        "seed=0", "steps=2", "output.keep_frames=true",
    ]
    config = make_config(*overrides)
    assert (config.resolution.frames, config.resolution.height, config.pipeline.segments.frames) == (33, 64, 17)
    run_into(tmp_path / "run", *overrides)

    def made(stage, number):
        return load_file(tmp_path / "run" / f"{stage}.{number}.safetensors")

    numbers = [one[None] for one in animation[1:]]
    for number in (0, 1):
        told = teach_animate.example(
            cfg, networks["vae"], numbers, TIMES[16 * number : 16 * number + 17], torch.tensor([False]))
        values = made("encode", number) | made("face", number)
        assert relative_error(values["pose_latents"], told["poses"].numpy()) < 1e-4
        motions = network.transformer.motion_encoder(told["faces"][0].transpose(0, 1))[None]
        faces = network.transformer.face_encoder(motions).numpy()
        assert relative_error(values["face_embeddings"][:, 1:], faces) < 1e-4
        if number == 0:
            assert relative_error(values["given_frames"], told["given"].numpy()) < 1e-4
    before = torch.tensor(made("decode", 0)["last_pixels"])
    goes_on = teach_demo.condition(networks["vae"], before[:, :, 0]).numpy()
    assert relative_error(values["given_frames"][:, :, 1:], goes_on) < 1e-4
    tokens = network.image_encoder(told["pictures"], output_hidden_states=True).hidden_states[-2]
    assert relative_error(load_file(tmp_path / "run/image.safetensors")["image_embeddings"], tokens.numpy()) < 1e-4
    video = teach_animate.show(cfg, networks, network, [animation])[0]
    whole = np.concatenate([made("decode", 0)["frames"], made("decode", 1)["frames"][1:]])
    assert video.shape == whole.shape == (33, 64, 64, 3) and whole.std() > 1 and psnr(video, whole) > 45
