"""Driving videos of the demo's world: how a shape moves, as Wan Animate is told it, apart from who moves.

    python tools/driving.py outputs/driving                                             # an orange star circles
    python tools/driving.py outputs/driving --shape heart --colour pink --motion bouncing --background blue
    python tools/driving.py outputs/driving --frames 17                                 # one segment, not two

writes picture.png, pose.mkv and face.mkv, without loss, and truth.mkv, the video that is asked for. The picture says
who: shape, colour and background; it shows the shape upright, elsewhere and of another size. The pose says where it is,
in a white dot, and how far it is turned: towards a green one. The face says how large it is, in a disc of its own.
"""
from __future__ import annotations

import argparse
import math
from pathlib import Path
from random import Random

import demo_world as world
import numpy as np
import torch

FPS = 8
FACE = 16  # pixels a side
ARM, JOINT = 0.22, 0.1  # from the white dot to the green one, and the radius of both
FACE_SCALE = 2.0  # of a radius in the face to one in the video
# What moves anyhow moves in all ways at the same time, each as much as a number from such a range says.
ANYHOW = {"x": (-0.25, 0.25), "y": (-0.2, 0.3), "travel_x": (-0.6, 0.6), "travel_y": (-0.6, 0.6), "bounce": (0, 0.3),
          "orbit": (0, 0.2), "phase": (0, math.tau), "radius": (0.15, 0.42), "radius_end": (0.15, 0.42),
          "turn": (-1.1 * math.pi, 1.1 * math.pi), "angle": (-math.pi, math.pi)}
# A picture's shape is still, upright, and anywhere.
ELSEWHERE = dict.fromkeys(("travel_x", "travel_y", "bounce", "orbit", "turn", "angle"), (0, 0)) | {
    "x": (-0.5, 0.5), "y": (-0.5, 0.5), "radius": (0.2, 0.4)}


# ---------------------------------------------------------------- numbers


def move_anyhow(things: torch.Tensor, share: float = 0.5) -> torch.Tensor:
    """Things [clips, things, fields] of which a share goes ways that have no name in the world."""
    moved = torch.rand(things.shape[:2], device=things.device) < share
    return torch.where(moved[..., None], _by_lot(things, ANYHOW), things)


def portrait(things: torch.Tensor) -> torch.Tensor:
    """The same things as a picture shows them."""
    things = _by_lot(things, ELSEWHERE)
    things[..., world.FIELDS.index("radius_end")] = things[..., world.FIELDS.index("radius")]
    return things


def _by_lot(things: torch.Tensor, ranges: dict[str, tuple[float, float]]) -> torch.Tensor:
    things = things.clone()
    for name, (low, high) in ranges.items():
        column = things[..., world.FIELDS.index(name)]
        column.copy_(low + (high - low) * torch.rand_like(column))
    return things


def there_and_back(frames: int) -> torch.Tensor:
    """Times of so many frames: a clip, the same clip backwards, and so on."""
    step = 1 / (world.FRAMES - 1)
    return 1 - (1 - (torch.arange(frames) * step).remainder(2)).abs()


def held_out(seed: int = 2026) -> list[tuple[world.Scene, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Every combination kept from training once: the scene, its one thing [1, fields], the same as the picture has it,
    and the background [3]. Always the same list."""
    random, listed = Random(seed), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for combination in world.HELD_OUT:
            scene = world.sample_scene(random, [combination], pair_share=0.0)
            things, background = world.motion_numbers(scene, random)
            listed.append((scene, things[:1], portrait(things[:1]), background))
    return listed


# ---------------------------------------------------------------- videos


def pose_video(things: torch.Tensor, times: torch.Tensor, size: int = world.SIZE) -> torch.Tensor:
    """Skeletons of the first things: [clips, 3, frames, size, size] in -1..1."""
    x, y, _, turn = world.course(dict(zip(world.FIELDS, things[:, 0].unbind(-1))), times.to(things.device))
    top = x + ARM * turn.sin(), y - ARM * turn.cos()
    video = torch.zeros(len(things), 3, len(times), size, size, device=things.device)
    for place, name in (((x, y), "white"), (top, "green")):
        colour = torch.tensor(world.PALETTE[name], device=things.device)[:, None, None, None] / 255
        video = torch.lerp(video, colour, disc(*place, torch.full_like(x, JOINT), size))
    return video * 2 - 1


def face_video(things: torch.Tensor, times: torch.Tensor, size: int = FACE) -> torch.Tensor:
    """Faces of the first things: [clips, 3, frames, size, size] in -1..1."""
    x, _, radius, _ = world.course(dict(zip(world.FIELDS, things[:, 0].unbind(-1))), times.to(things.device))
    middle = torch.zeros_like(x)
    return disc(middle, middle, FACE_SCALE * radius, size).expand(-1, 3, -1, -1, -1) * 2 - 1


def disc(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor, size: int) -> torch.Tensor:
    """How much of each pixel a disc covers: [clips, 1, frames, size, size] from numbers [clips, frames, 1, 1]."""
    line = (torch.arange(size, device=x.device) + 0.5) * (2 / size) - 1
    circle = torch.tensor(world.SHAPES.index("circle"), device=x.device)
    pixel = world.SOFTNESS * 2 / size
    return world.cover(circle, line[None, :] - x, line[:, None] - y, radius, torch.zeros_like(x), pixel)[:, None]


def as_stored(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in -1..1 with the 256 values that a file has of them."""
    return ((pixels + 1) * 127.5).round() / 127.5 - 1


# ---------------------------------------------------------------- files


def write(folder: Path, numbers: tuple[torch.Tensor, ...], frames: int, size: int = world.SIZE) -> None:
    """Files of one thing [1, fields] as it moves, the same as the picture shows it, and a background [3]."""
    import judge_demo
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    times, (things, shown, background) = there_and_back(frames), (one[None] for one in numbers)
    picture = world.render(shown, background, size, slice(0, 1))
    Image.fromarray(judge_demo.to_frames(picture[0])[0]).save(folder / "picture.png")
    videos = {"pose": pose_video(things, times, size), "face": face_video(things, times),
              "truth": world.render(things, background, size, times)}
    for name, video in videos.items():
        write_video(folder / f"{name}.mkv", judge_demo.to_frames(video[0]))


def write_video(path: Path, frames: np.ndarray) -> None:
    """Frames [time, height, width, 3], uint8, without loss."""
    import imageio_ffmpeg

    sizes = dict(size=frames.shape[2:0:-1], fps=FPS, codec="libx264rgb", pix_fmt_in="rgb24", pix_fmt_out="rgb24")
    writer = imageio_ffmpeg.write_frames(path, **sizes, quality=None, output_params=["-crf", "0"])
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--colour", choices=world.COLOURS, default="orange")
    parser.add_argument("--shape", choices=world.SHAPES, default="star")
    parser.add_argument("--motion", choices=world.MOTIONS, default="circling")
    parser.add_argument("--background", choices=world.BACKGROUNDS, default="black")
    parser.add_argument("--frames", type=int, default=2 * world.FRAMES - 1, help="as long as two segments")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not world.can_be(given.shape, given.motion):
        parser.error(f"--motion {given.motion}: a turn of a {given.shape} cannot be seen")
    if given.colour == given.background:
        parser.error(f"--background {given.background}: nothing can be seen of a {given.colour} {given.shape} on it")
    torch.manual_seed(given.seed)
    scene = world.Scene((world.Thing(given.colour, given.shape, given.motion),), given.background)
    things, background = world.motion_numbers(scene, Random(given.seed))
    write(given.folder, (things[:1], portrait(things[:1]), background), given.frames)


if __name__ == "__main__":
    main()
