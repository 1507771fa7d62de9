"""The judge on clips the world itself drew, where the answer is known; and on clips spoiled on purpose."""
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import demo_world as world
import judge_demo as judge

ONE_OF_EACH_MOTION = [
    world.Scene(
        (world.Thing(world.COLOURS[k % 8], shape, motion, world.SIZES[k % 2] if motion != "growing" else None),),
        "black" if k % 2 else "gray",
    )
    for k, (shape, motion) in enumerate(
        (shape, motion)
        for motion in world.MOTIONS for shape in ("square", "heart", "star") if world.can_be(shape, motion)
    )
]


@pytest.mark.parametrize(
    "scene", ONE_OF_EACH_MOTION, ids=lambda scene: f"{scene.things[0].shape}-{scene.things[0].motion}"
)
def test_one_thing_is_seen_as_drawn(scene):
    verdict = judge.judge(judge.ground_truth([scene])[0], scene)
    assert all(verdict.values()), verdict


def test_two_things_are_seen_as_drawn():
    random = Random(5)
    scenes = [world.sample_scene(random, world.COMBINATIONS, pair_share=1.0) for _ in range(12)]
    rates, _ = judge.adherence(judge.ground_truth(scenes), scenes)
    assert all(rate == 1 for rate in rates.values()), rates


def test_every_shape_and_colour_is_told_apart():
    for shape in world.SHAPES:
        for colour in world.COLOURS[::3]:
            scene = world.Scene((world.Thing(colour, shape, size="small"),), "black")
            (thing,) = judge.describe(judge.ground_truth([scene])[0])["things"]
            assert (thing.shape, thing.colour) == (shape, colour)


def test_each_wrong_aspect_is_noticed():
    drawn = world.Scene((world.Thing("red", "star", "left", "big", "top"),), "black")
    frames = judge.ground_truth([drawn])[0]
    wrong = {
        "colour": world.Scene((world.Thing("blue", "star", "left", "big", "top"),), "black"),
        "shape": world.Scene((world.Thing("red", "circle", "left", "big", "top"),), "black"),
        "motion": world.Scene((world.Thing("red", "star", "right", "big", "top"),), "black"),
        "size": world.Scene((world.Thing("red", "star", "left", "small", "top"),), "black"),
        "place": world.Scene((world.Thing("red", "star", "left", "big", "bottom"),), "black"),
        "background": world.Scene((world.Thing("red", "star", "left", "big", "top"),), "white"),
        "count": world.Scene((drawn.things[0], world.Thing("blue", "ring", "still")), "black"),
    }
    for aspect, scene in wrong.items():
        assert not judge.judge(frames, scene)[aspect], aspect


def test_reversed_clip_moves_the_other_way():
    scene = world.Scene((world.Thing("green", "heart", "up"),), "white")
    frames = judge.ground_truth([scene])[0][::-1]
    assert judge.describe(frames)["things"][0].motion == "down"


def test_noise_and_an_empty_clip_show_no_thing():
    noise = np.random.default_rng(0).integers(0, 256, (17, 64, 64, 3), dtype=np.uint8)
    verdict = judge.judge(noise, ONE_OF_EACH_MOTION[0])
    assert not verdict["colour"] or not verdict["shape"]
    assert judge.describe(np.full((17, 64, 64, 3), 128, np.uint8))["things"] == []
