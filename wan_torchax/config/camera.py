"""Paths of a camera, by the names of moves: the key `camera`. No JAX, no torch.

    camera=zoom_in                              # for the whole video
    camera=[pan_left,zoom_in+clockwise,static]  # one move after the other, each for a third of the frames; `+`: at once
    camera=[pan_up*0.5]                         # at half the speed

A move has the speed at which it would take the whole video: the units and directions are VideoX-Fun's.
"""
import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from omegaconf import ListConfig

from wan_torchax.config.wording import one_of

if TYPE_CHECKING:  # not at run time: --help must be fast
    import numpy

# Where the world goes, seen from the camera, in a whole video: right, down and ahead, and a turn about the view.
MOVES = {
    "static": (0, 0, 0, 0), "pan_left": (1.5, 0, 0, 0), "pan_right": (-1.5, 0, 0, 0), "pan_up": (0, 1.5, 0, 0),
    "pan_down": (0, -1.5, 0, 0), "zoom_in": (0, 0, -3, 0), "zoom_out": (0, 0, 3, 0),
    "clockwise": (0, 0, 0, -math.pi / 3), "anticlockwise": (0, 0, 0, math.pi / 3),
}
MOST_MOVES, MOST_SPEED = 32, 10
PART = re.compile(r"([a-z_]+)(?:\*(\d+(?:\.\d+)?))?")


def camera_problems(config) -> Iterator[str]:
    """Moves that are unknown, or not taken by the pipeline."""
    path, most = moves_of(config.camera), min(MOST_MOVES, config.resolution.frames)
    if path and not is_taken(config):
        shown, remedy = f"camera=[{','.join(path)}]", "use model=wan22_fun_camera_a14b or wan22_fun_camera_5b"
        yield f"{shown}: pipeline={config.pipeline.name} moves no camera; {remedy}"
    elif len(path) > most:
        yield f"camera: {len(path)} moves, one after the other; at most {most}"
    for part in (part for move in path for part in move.split("+")):
        match = PART.fullmatch(part)
        yield from one_of("camera", match[1] if match else part, MOVES)
        if match and float(match[2] or 1) > MOST_SPEED:
            yield f"camera={part}: a speed of at most {MOST_SPEED}"


def is_taken(config) -> bool:
    """Whether the config's pipeline moves a camera."""
    return "camera" in config.pipeline.inputs.values()


def moves_of(path) -> list[str]:
    """The moves of a list, or of a text with commas. What is neither is a move that nobody knows."""
    moves = path if isinstance(path, (list, ListConfig)) else str("" if path is None else path).split(",")
    return [move for move in (str(move).replace(" ", "") for move in moves) if move]


def poses(path: Iterable[str] | str, frames: int) -> "numpy.ndarray":
    """(frames, 3, 4): of each frame's camera, rotation and place in the coordinates of the first one's."""
    import numpy

    moves = [sum_of(move) for move in moves_of(path)]
    ends = [frames * (number + 1) // len(moves) for number in range(len(moves))]
    before, start, seen = numpy.eye(4), 0, []
    for move, end in zip(moves, ends):
        seen += [moved(move, place / frames) @ before for place in range(end - start)]
        before, start = moved(move, (end - start) / frames) @ before, end
    return numpy.linalg.inv(numpy.stack(seen))[:, :3].astype(numpy.float32)


def sum_of(move: str) -> list[float]:
    """Moves at once."""
    parts = [match.groups() for match in map(PART.fullmatch, move.split("+")) if match]
    return [sum(MOVES[name][axis] * float(speed or 1) for name, speed in parts) for axis in range(4)]


def moved(move: list[float], share: float) -> "numpy.ndarray":
    """(4, 4): the world's coordinates to the camera's after a share of a move."""
    import numpy

    *place, angle = (share * number for number in move)
    matrix = numpy.eye(4)
    matrix[:2, :2] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    matrix[:3, 3] = place
    return matrix
