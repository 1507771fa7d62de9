"""The demo model as a live one, and its tiny decoder: the endless world, its judge, and how both are taught."""
import sys
from random import Random

import numpy as np

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import demo_world as world
import judge_demo

# ---------------------------------------------------------------- the world without an end


def scenes_of(count, pairs=0.3, seed=3):
    """Pairs of scenes of which the second follows the first, of all combinations."""
    random = Random(seed)
    first = [world.sample_scene(random, world.COMBINATIONS, pairs) for _ in range(count)]
    return [[scene, world.sample_change(scene, random, world.COMBINATIONS)] for scene in first]


def one(colour, shape, motion, place=None, background="black"):
    return world.Scene((world.Thing(colour, shape, motion, place=place),), background)


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
