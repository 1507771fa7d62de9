"""tools/skeleton.py: keypoints of two formats become the same skeletons."""
import json
import subprocess
import sys

import numpy
import pytest

from tests.conftest import ROOT
from wan_torchax.config.clips import read_frames

TOOL = ROOT / "tools" / "skeleton.py"
# x, y of OpenPose's 18, in pixels of 320 x 240.
BODY = [
    (160, 40), (160, 70), (130, 70), (110, 105), (95, 140), (190, 70), (210, 105), (225, 140), (140, 140), (138, 180),
    (135, 220), (180, 140), (182, 180), (185, 220), (153, 33), (167, 33), (145, 38), (175, 38),
]
TO_COCO = [0, 15, 14, 17, 16, 5, 2, 6, 3, 7, 4, 11, 8, 12, 9, 13, 10]
HAND = [(0, 0), *((6 * finger - 12, -5 * joint) for finger in range(5) for joint in range(1, 5))]


def draw(*arguments):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def openpose(moved, scores=1.0):
    body = [number for x, y in BODY for number in (x + moved, y, scores)]
    hand = [number for x, y in HAND for number in (225 + moved + x, 145 + y, scores)]
    return {"people": [{"pose_keypoints_2d": body, "hand_left_keypoints_2d": hand}]}


def whole_body(moved):
    points = numpy.zeros((133, 2))
    points[:17] = [(BODY[place][0] + moved, BODY[place][1]) for place in TO_COCO]
    points[91:112] = [(225 + moved + x, 145 + y) for x, y in HAND]
    scores = [1.0] * 17 + [0.0] * 74 + [1.0] * 21 + [0.0] * 21
    return {"instances": [{"keypoints": points.tolist(), "keypoint_scores": scores}]}


def test_two_formats_give_the_same_skeletons(tmp_path):
    folder = tmp_path / "openpose"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number:012d}_keypoints.json").write_text(json.dumps(openpose(10 * number)))
    frames = [whole_body(10 * number) | {"frame_id": number} for number in range(4)]
    (tmp_path / "mmpose.json").write_text(json.dumps({"meta_info": {}, "instance_info": frames[::-1]}))
    videos = []
    for source in (folder, tmp_path / "mmpose.json"):
        target = tmp_path / f"{source.stem}.mp4"
        ran = draw(source, target, "--size", "640x480", "--of", "320x240", "--fps", 24)
        assert ran.returncode == 0 and "4 frames, 4 with a person" in ran.stdout, ran.stderr
        videos.append(numpy.stack(list(read_frames(target, 4, 24))).astype(int))
    assert videos[0].shape == (4, 480, 640, 3) and numpy.abs(videos[0] - videos[1]).max() < 8
    first, last = videos[0][0], videos[0][3]
    assert numpy.abs(first[:, :-60] - last[:, 60:]).mean() < 1, "30 of 320 pixels to the right"
    assert first[:10].max() < 16 and (first.max(axis=2) > 60).mean() > 0.005, "on black"
    right, left = first[180, 220:260].sum(axis=0), first[180, 380:420].sum(axis=0)
    assert right[0] > 1.2 * right[1] and left[1] > 1.2 * left[0], "a right arm is orange, a left one green"


def test_points_of_low_scores_are_left_out(tmp_path):
    (tmp_path / "faint.json").write_text(json.dumps([openpose(0, scores=0.2), {"people": []}]))
    ran = draw(tmp_path / "faint.json", tmp_path / "faint.mp4", "--size", "320x240")
    assert ran.returncode == 0 and "2 frames, 1 with a person" in ran.stdout, ran.stderr
    assert max(frame.max() for frame in read_frames(tmp_path / "faint.mp4", 2, 30)) < 16


@pytest.mark.parametrize("text", ["{oops", "[]", "[{}]", '[{"people": [{"pose_keypoints_2d": [1, 2, 3]}]}]'])
def test_what_is_no_skeleton_is_told(text, tmp_path):
    (tmp_path / "keypoints.json").write_text(text)
    ran = draw(tmp_path / "keypoints.json", tmp_path / "pose.mp4", "--size", "320x240")
    assert ran.returncode == 1 and "keypoints.json: " in ran.stderr and "Traceback" not in ran.stderr
    assert not (tmp_path / "pose.mp4").exists()
