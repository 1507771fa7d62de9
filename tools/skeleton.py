"""Draws skeletons from keypoints, for pose=… of Wan Animate and VACE.

    python tools/skeleton.py openpose/ pose.mp4 --size 1280x720 --fps 30        # a folder of OpenPose's JSON files
    python tools/skeleton.py wholebody.json pose.mp4 --size 1280x720            # MMPose, COCO-WholeBody

Of each frame the first person is drawn, in OpenPose's colours on black: body and hands. Keypoints are in pixels; if
they are of a video of another size, `--of 1920x1080` says so. Fewer points than a format has are an error, points that
an estimator is not sure of are left out.
"""
import argparse
import colorsys
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy
from PIL import Image, ImageDraw

Size = tuple[int, int]  # width, height
# OpenPose's 18: nose, neck, right shoulder, elbow, wrist, left ones, right hip, knee, ankle, left ones, eyes, ears.
LIMBS = (
    (1, 2), (1, 5), (2, 3), (3, 4), (5, 6), (6, 7), (1, 8), (8, 9), (9, 10), (1, 11), (11, 12), (12, 13), (1, 0),
    (0, 14), (14, 16), (0, 15), (15, 17),
)
BODY_25 = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18)  # where OpenPose's newer model has them
COCO = (0, None, 6, 8, 10, 5, 7, 9, 12, 14, 16, 11, 13, 15, 2, 1, 4, 3)  # COCO has no neck
FINGERS = tuple((joint if joint % 4 else 0, joint + 1) for joint in range(20))  # four joints each
WHOLE_BODY = 133
HANDS = (slice(91, 112), slice(112, 133))  # of COCO-WholeBody


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a JSON file, or a folder of them, one for each frame")
    parser.add_argument("target", type=Path)
    parser.add_argument("--size", type=size, required=True, help="of the video: 1280x720")
    parser.add_argument("--of", type=size, help="what the keypoints' pixels are of; by default --size")
    parser.add_argument("--fps", type=float, default=30)
    parser.add_argument("--least", type=float, default=0.3, help="leave out points with a lower score")
    options = parser.parse_args()
    try:
        people = [person_of(frame) for frame in frames_of(options.source)]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        sys.exit(f"{options.source}: neither OpenPose's keypoints nor COCO-WholeBody's ({error!r})")
    if not people:
        sys.exit(f"{options.source}: has no frames")
    scale = numpy.divide(options.size, options.of or options.size)
    write(options.target, (draw(person, options.size, scale, options.least) for person in people), options)
    print(f"{options.target}: {len(people)} frames, {sum(map(bool, people))} with a person")


def size(text: str) -> Size:
    width, height = map(int, text.split("x"))
    return width, height


# ---------------------------------------------------------------- formats


def frames_of(source: Path) -> list:
    """What the file says of each frame, or each file of the folder."""
    if source.is_dir():
        return [json.loads(path.read_text()) for path in sorted(source.glob("*.json"))]
    read = json.loads(source.read_text())
    frames = read["instance_info"] if isinstance(read, dict) else read
    return sorted(frames, key=lambda frame: frame.get("frame_id", 0))


def person_of(frame: dict) -> list[numpy.ndarray]:
    """The first person's body (18, 3) and hands (21, 3): x, y, score. Nothing if the frame has nobody."""
    people = frame["people"] if "people" in frame else frame["instances"]
    if not people:
        return []
    if "pose_keypoints_2d" in people[0]:
        return of_openpose(people[0])
    points = numpy.column_stack([numpy.reshape(people[0]["keypoints"], (-1, 2)), people[0]["keypoint_scores"]])
    if len(points) != WHOLE_BODY:
        raise ValueError(f"{len(points)} keypoints, not {WHOLE_BODY}")
    shoulders = points[[5, 6]]
    neck = numpy.append(shoulders[:, :2].mean(axis=0), shoulders[:, 2].min())
    body = numpy.stack([neck if place is None else points[place] for place in COCO])
    return [body, *(points[hand] for hand in HANDS)]


def of_openpose(person: dict) -> list[numpy.ndarray]:
    keys = ("pose_keypoints_2d", "hand_left_keypoints_2d", "hand_right_keypoints_2d")
    body, *hands = (numpy.reshape(numpy.float64(person.get(key) or []), (-1, 3)) for key in keys)
    if len(body) not in (18, 25) or any(len(hand) not in (0, 21) for hand in hands):
        raise ValueError(f"{len(body)} keypoints of a body, {[len(hand) for hand in hands]} of hands")
    return [body[list(BODY_25)] if len(body) == 25 else body, *(hand for hand in hands if len(hand))]


# ---------------------------------------------------------------- drawing


def draw(person: list[numpy.ndarray], size: Size, scale: numpy.ndarray, least: float) -> Image.Image:
    """A person on black: limbs in darker colours than joints, as OpenPose draws them."""
    canvas = Image.new("RGB", size)
    pen, width = ImageDraw.Draw(canvas), max(round(min(size) / 120), 1)
    for number, points in enumerate(person):
        lines, thick = (LIMBS, width) if number == 0 else (FINGERS, max(width // 2, 1))
        seen = {place: tuple(point[:2] * scale) for place, point in enumerate(points) if point[2] >= least}
        for place, (start, end) in enumerate(lines):
            if start in seen and end in seen:
                pen.line([seen[start], seen[end]], colour(place, len(lines) + 1, 0.6), 2 * thick)
        for place, (x, y) in seen.items():
            tint = colour(place, len(points), 1.0) if number == 0 else (0, 0, 255)
            pen.ellipse((x - thick, y - thick, x + thick, y + thick), tint)
    return canvas


def colour(place: int, count: int, value: float) -> tuple[int, ...]:
    """Hues of the rainbow, in order."""
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(place / count, 1, value))


def write(target: Path, frames: Iterable[Image.Image], options) -> None:
    import imageio_ffmpeg

    writer = imageio_ffmpeg.write_frames(
        target, options.size, fps=options.fps, codec="libx264", macro_block_size=2, output_params=["-crf", "10"],
    )
    writer.send(None)
    for frame in frames:
        writer.send(numpy.asarray(frame))
    writer.close()


if __name__ == "__main__":
    main()
