"""Driving videos of the demo's world, and how what follows them is judged."""
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import ROOT
from wan_torchax.config.clips import read_frames

sys.path.insert(0, str(ROOT / "tools"))
import demo_world as world
import driving
import judge_demo

TIMES = driving.there_and_back(33)


def clip(animation):
    """What is asked for, as the world itself draws it."""
    _, things, _, background = animation
    return judge_demo.to_frames(world.render(things[None], background[None], times=TIMES)[0])


# ---------------------------------------------------------------- driving videos


def test_held_out_animations_are_always_the_same():
    state = torch.random.get_rng_state()
    listed = driving.held_out()
    assert len(listed) == len(world.HELD_OUT) and str(listed) == str(driving.held_out())
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_judge_finds_true_renders_right_and_others_not():
    listed = driving.held_out()[::6]
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
