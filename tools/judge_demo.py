"""What is to be seen in a clip of the demo world, measured from its frames alone; nothing here is learned.

    from judge_demo import describe, judge
    describe(frames)            # frames [time, height, width, 3], uint8: background and things, in words
    judge(frames, scene)        # {"colour": True, "shape": True, "motion": True, ...} against a demo_world.Scene
    judge_live(frames, scene)   # the same of a video without an end, or of as much of it as shows one scene

    python tools/judge_demo.py                          # the judge on ground truth: every combination once
    python tools/judge_demo.py --live                   # and on videos without an end
    python tools/judge_demo.py --model models/demo      # the model on the held-out prompts
    python tools/judge_demo.py --video out.mp4          # say what a video shows

How: the background is the median of each row's ends; what differs from it falls into connected pieces; pieces are
followed from frame to frame; a piece's outline is compared with every shape at every angle; the path, area and angle
over time give the motion. In a video without an end who leaves at one side comes in at the other: its edges are joined.
"""
from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from random import Random

import demo_world as world
import numpy as np
import torch
from scipy import ndimage

GRID = 32  # an outline is compared as a picture of GRID x GRID points
DEGREES = 5  # between two angles an outline is compared at
PERIOD = {"circle": DEGREES, "square": 90, "triangle": 120, "star": 72, "heart": 360, "ring": DEGREES}
CONTRAST = 30  # of 255: a pixel farther than this from the background belongs to a thing
SMALLEST = 1 / 650  # of the frame's area: smaller pieces are specks
STRETCH, STRIDE = world.FRAMES, 8  # frames of a live video that are judged together, and to the next such
MOSTLY = 0.75  # of a live video's stretches: where so many are right the video is


@dataclass(frozen=True)
class Seen:
    """One thing as measured. Positions and radii are in the world's units (the frame spans -1..1)."""

    colour: str
    shape: str
    motion: str
    place: tuple[str, str]  # (left | middle | right, top | middle | bottom)
    x: float
    y: float
    radius: float
    present: float  # share of the frames it is in


@dataclass(frozen=True)
class Piece:
    """A connected piece of foreground in one frame."""

    x: float
    y: float
    area: float
    colour: np.ndarray
    outline: np.ndarray  # [GRID * GRID], centred and scaled to unit area, zero mean, unit length


# ---------------------------------------------------------------- from frames to words


def describe(frames: np.ndarray) -> dict:
    """{"background": colour, "things": [Seen, ...]}, the largest thing first. frames [time, height, width, 3] uint8."""
    frames = np.asarray(frames)
    background = backdrop(frames)
    return described([pieces(frame, background) for frame in frames], background, frames.shape[1:3])


def described(frames: list[list[Piece]], background: np.ndarray, size: tuple[int, int], endless: bool = False) -> dict:
    """The same from the pieces of frames of this height and width; of an `endless` video the edges are joined."""
    tracks = follow(frames, size if endless else None)
    lasting = [track for track in tracks if len(track) >= 0.6 * len(frames)]
    things = [_measure(track, len(frames), size, endless) for track in lasting]
    name = nearest_colour(np.median(background, axis=0), world.BACKGROUNDS)
    return {"background": name, "things": sorted(things, key=lambda thing: -thing.radius)}


def backdrop(frames: np.ndarray) -> np.ndarray:
    """The background's colour in every row, [height, 3]: the median of the row's ends over time."""
    ends = np.concatenate((frames[:, :, :3], frames[:, :, -3:]), axis=2)
    return np.median(ends, axis=(0, 2)).astype(np.float32)


def pieces(frame: np.ndarray, background: np.ndarray, endless: bool = False) -> list[Piece]:
    """The connected pieces of one frame that are not background and not specks."""
    difference = frame.astype(np.float32) - background[:, None]
    labels, count = ndimage.label(np.abs(difference).max(-1) > CONTRAST)
    if endless:
        labels = joined(labels)
    large_pieces = []
    for label in range(1, count + 1):
        core = labels == label
        if core.sum() >= SMALLEST * core.size:
            large_pieces.append(_whole(frame, difference, core) if endless else _piece(frame, difference, core))
    return large_pieces


def joined(labels: np.ndarray) -> np.ndarray:
    """Labels [height, width] in which pieces that touch across opposite edges have one number."""
    labels = labels.copy()
    for _ in range(2):  # a piece in a corner is up to four
        for edges in (labels[:, [0, -1]], labels[[0, -1]].T):
            for one, other in edges[(edges > 0).all(1)]:
                labels[labels == max(one, other)] = min(one, other)
    return labels


def _whole(frame: np.ndarray, difference: np.ndarray, core: np.ndarray) -> Piece:
    """A piece, moved away from the edges to be measured, where it is."""
    shift = [-int(core.any(axis=1 - axis).argmin()) for axis in (0, 1)]  # an empty line becomes the edge
    piece = _piece(*(np.roll(array, shift, (0, 1)) for array in (frame, difference, core)))
    height, width = core.shape
    return replace(piece, x=(piece.x - shift[1]) % width, y=(piece.y - shift[0]) % height)


def _piece(frame: np.ndarray, difference: np.ndarray, core: np.ndarray) -> Piece:
    inner = ndimage.binary_erosion(core)
    inner = inner if inner.any() else core
    colour = np.median(frame[inner], axis=0)
    contrast = np.median(difference[inner], axis=0)
    covered = (difference @ contrast / max(contrast @ contrast, 1.0)).clip(0, 1)
    covered *= ndimage.binary_dilation(core, iterations=2)
    area = covered.sum()
    rows, columns = np.indices(core.shape)
    x, y = (covered * columns).sum() / area, (covered * rows).sum() / area
    return Piece(x, y, area, colour, normalised_outline(covered, x, y, area))


def normalised_outline(covered: np.ndarray, x: float, y: float, area: float) -> np.ndarray:
    """The covered part around (x, y), scaled so that its area is always the same, as a unit vector [GRID * GRID]."""
    line = np.linspace(-1.9, 1.9, GRID) * math.sqrt(area / math.pi)
    points = np.meshgrid(y + line, x + line, indexing="ij")
    sampled = ndimage.map_coordinates(covered, points, order=1, mode="constant").ravel()
    sampled = sampled - sampled.mean()
    return (sampled / max(np.linalg.norm(sampled), 1e-6)).astype(np.float32)


@cache
def templates() -> tuple[list[tuple[str, int]], np.ndarray]:
    """Every shape at every angle it can be told apart at: names [n] (shape, degrees) and outlines [n, GRID * GRID]."""
    names = [(shape, angle) for shape in world.SHAPES for angle in range(0, PERIOD[shape], DEGREES)]
    line = torch.linspace(-2, 2, 160)
    shape = torch.tensor([world.SHAPES.index(shape) for shape, _ in names])[:, None, None]
    turn = torch.tensor([math.radians(angle) for _, angle in names])[:, None, None]
    pictures = world.cover(shape, line[None, None], line[None, :, None], torch.tensor(1.0), turn, pixel=0.025).numpy()
    rows, columns = np.indices(pictures.shape[1:])
    outlines = []
    for picture in pictures:
        area = picture.sum()
        centre = (picture * columns).sum() / area, (picture * rows).sum() / area
        outlines.append(normalised_outline(picture, *centre, area))
    return names, np.stack(outlines)


def follow(frames: list[list[Piece]], size: tuple[int, int] | None = None) -> list[list[tuple[int, Piece]]]:
    """Join the pieces of successive frames into tracks of (frame, piece): each piece to the nearest track's end. With a
    `size`, height and width, edges are joined."""
    tracks: list[list[tuple[int, Piece]]] = []
    for time, frame_pieces in enumerate(frames):
        free = list(range(len(tracks)))
        for piece in sorted(frame_pieces, key=lambda piece: -piece.area):
            best = min(free, key=lambda index: _step(tracks[index][-1][1], piece, size), default=None)
            if best is not None and _step(tracks[best][-1][1], piece, size) < 200:
                tracks[best].append((time, piece))
                free.remove(best)
            else:
                tracks.append([(time, piece)])
    return tracks


def _step(before: Piece, after: Piece, size: tuple[int, int] | None) -> float:
    """How unlike two pieces are: pixels apart plus the change of colour."""
    apart = abs(before.y - after.y), abs(before.x - after.x)
    if size:  # the nearest way round
        apart = tuple(min(one, whole - one) for one, whole in zip(apart, size))
    return math.hypot(*apart) + float(np.abs(before.colour - after.colour).max())


def nearest_colour(colour: np.ndarray, names=world.COLOURS) -> str:
    return min(names, key=lambda name: float(np.square(colour - np.array(world.PALETTE[name])).sum()))


# ---------------------------------------------------------------- one thing


def _measure(track: list[tuple[int, Piece]], frames: int, size: tuple[int, int], endless: bool) -> Seen:
    height, width = size
    times = np.array([time for time, _ in track]) / max(frames - 1, 1)
    x = np.array([piece.x for _, piece in track]) / (width - 1) * 2 - 1
    y = np.array([piece.y for _, piece in track]) / (height - 1) * 2 - 1
    area = np.array([piece.area for _, piece in track]) * (4 / (width * height))
    radius = float(np.median(np.sqrt(area / math.pi)))
    if endless:
        x, y, area = np.unwrap(x, period=2), np.unwrap(y, period=2), _ever_growing(area)
    shape, angles = _shape([piece for _, piece in track])
    colour = nearest_colour(np.median([piece.colour for _, piece in track], axis=0))
    centre_x, centre_y = (x.max() + x.min()) / 2, (y.max() + y.min()) / 2
    return Seen(
        colour=colour,
        shape=shape,
        motion=name_motion(times, x, y, area, math.degrees(_turned(angles, PERIOD[shape]))),
        place=(_third(centre_x, "left", "right"), _third(centre_y, "top", "bottom")),
        x=round(float(centre_x), 3),
        y=round(float(centre_y), 3),
        radius=round(radius, 3),
        present=len(track) / frames,
    )


def _ever_growing(area: np.ndarray) -> np.ndarray:
    """An area over time as if it had never begun anew: where it falls by half from one frame to the next."""
    rise = np.diff(np.log(area))
    return area[0] * np.exp(np.concatenate(([0.0], np.cumsum(np.where(rise < math.log(0.5), 0.0, rise)))))


def _shape(track: list[Piece]) -> tuple[str, list[float]]:
    """The shape that fits best over all frames, larger pieces counting more, and its angle in each frame."""
    names, outlines = templates()
    likeness = np.stack([piece.outline for piece in track]) @ outlines.T
    columns = {shape: [k for k, (name, _) in enumerate(names) if name == shape] for shape in world.SHAPES}
    weight = np.sqrt([piece.area for piece in track])
    shape = max(columns, key=lambda name: float((likeness[:, columns[name]].max(1) * weight).sum()))
    angles = likeness[:, columns[shape]].argmax(1) * DEGREES
    return shape, [math.radians(angle) for angle in angles]


def _turned(angles: list[float], period: int) -> float:
    """The whole turn of a track in radians; successive angles are taken as near as the shape's symmetry allows."""
    if period <= DEGREES:
        return 0.0
    unwrapped = np.unwrap(angles, period=math.radians(period))
    return float(unwrapped[-1] - unwrapped[0])


def name_motion(times: np.ndarray, x: np.ndarray, y: np.ndarray, area: np.ndarray, turned: float) -> str:
    """Which of the world's motions a path is. x, y and area over time, the turn in degrees."""
    wide, high = np.ptp(x), np.ptp(y)
    if _winding(x, y) > 0.7 and min(wide, high) > 0.3:
        return "circling"
    if high > 0.35 and high > 2 * wide and _reversals(y) >= 2:
        return "bouncing"
    if max(wide, high) > 0.35:
        if wide > high:
            return "right" if np.polyfit(times, x, 1)[0] > 0 else "left"
        return "down" if np.polyfit(times, y, 1)[0] > 0 else "up"
    if area[-3:].mean() > 2 * area[:3].mean():
        return "growing"
    return "spinning" if abs(turned) > 60 else "still"


def _winding(x: np.ndarray, y: np.ndarray) -> float:
    """Turns around the middle of the path, as a positive number."""
    middle_x, middle_y = (x.max() + x.min()) / 2, (y.max() + y.min()) / 2
    angle = np.unwrap(np.arctan2(y - middle_y, x - middle_x))
    return abs(angle[-1] - angle[0]) / math.tau


def _reversals(path: np.ndarray, least: float = 0.12) -> int:
    """How often a path turns back by at least `least`."""
    count, extreme, direction = 0, path[0], 0
    for value in path[1:]:
        if direction * (value - extreme) > 0 or (direction == 0 and abs(value - extreme) > least):
            direction = direction or math.copysign(1, value - extreme)
            extreme = value
        elif direction and abs(value - extreme) > least:
            count, extreme, direction = count + 1, value, -direction
    return count


def _third(position: float, low: str, high: str) -> str:
    return low if position < -0.25 else high if position > 0.25 else "middle"


# ---------------------------------------------------------------- against what was asked

ASPECTS = ("count", "colour", "shape", "motion", "place", "size", "background")


def judge(frames: np.ndarray, scene: world.Scene) -> dict[str, bool]:
    """Whether each aspect of every thing in the scene is right in the frames."""
    return compared(describe(frames), scene)


def judge_live(frames: np.ndarray, scene: world.Scene) -> dict[str, bool]:
    """The same of a video without an end: right is what is in most stretches of it, each judged by itself."""
    frames = np.asarray(frames)
    background = backdrop(frames)
    found = [pieces(frame, background, endless=True) for frame in frames]
    starts = range(0, max(len(frames) - STRETCH, 0) + 1, STRIDE)
    seen = [described(found[start : start + STRETCH], background, frames.shape[1:3], True) for start in starts]
    verdicts = [compared(one, scene) for one in seen]
    return {aspect: float(np.mean([verdict[aspect] for verdict in verdicts])) >= MOSTLY for aspect in ASPECTS}


def compared(seen: dict, scene: world.Scene) -> dict[str, bool]:
    """What `describe` has seen against the scene."""
    things = _matched(seen["things"], scene)
    pairs = list(zip(things, scene.things))
    all_there = len(pairs) == len(scene.things)
    return {
        "count": len(seen["things"]) == len(scene.things),
        "colour": all_there and all(thing.colour == asked.colour for thing, asked in pairs),
        "shape": all_there and all(thing.shape == asked.shape for thing, asked in pairs),
        "motion": all_there and all(thing.motion == asked.motion for thing, asked in pairs),
        "place": all_there and all(asked.place is None or asked.place in thing.place for thing, asked in pairs),
        "size": all_there and all(_size_fits(thing, asked, len(pairs)) for thing, asked in pairs),
        "background": seen["background"] == scene.background,
    }


def _matched(seen: list[Seen], scene: world.Scene) -> list[Seen]:
    """The largest things, in the scene's reading order."""
    largest = seen[: len(scene.things)]
    if scene.things[0].place in ("top", "bottom"):
        return sorted(largest, key=lambda thing: thing.y)
    return sorted(largest, key=lambda thing: thing.x)


def _size_fits(seen: Seen, asked: world.Thing, count: int) -> bool:
    """Small and big are told apart at the size of an ordinary thing, reckoned as a disc of the same area."""
    if asked.size is None:
        return True
    outline = world.OUTLINES[world.SHAPES.index(asked.shape)]
    hole = world.HOLES[world.SHAPES.index(asked.shape)]
    as_disc = math.sqrt(float((outline**2).mean() - hole**2))
    ordinary = np.mean(world.RADIUS[None]) * (0.8 if count == 2 else 1.0) * as_disc
    return seen.radius < ordinary if asked.size == "small" else seen.radius > ordinary


def adherence(videos: list[np.ndarray], scenes: list[world.Scene]) -> tuple[dict[str, float], list[dict[str, bool]]]:
    """Share of clips in which each aspect is right, and the verdict on each clip."""
    return shares([judge(video, scene) for video, scene in zip(videos, scenes)])


def shares(verdicts: list[dict[str, bool]]) -> tuple[dict[str, float], list[dict[str, bool]]]:
    """Share of verdicts in which each aspect is right, and the verdicts."""
    return {aspect: float(np.mean([verdict[aspect] for verdict in verdicts])) for aspect in ASPECTS}, verdicts


def hollowness(frames: np.ndarray) -> float:
    """Share of all pieces that show the background in their middle."""
    background = backdrop(frames)
    middles = [(frame, round(piece.y), round(piece.x)) for frame in frames for piece in pieces(frame, background)]
    hollow = [np.abs(frame[y, x] - background[y]).max() <= CONTRAST for frame, y, x in middles]
    return float(np.mean(hollow)) if hollow else 0.0


def filled(frames: np.ndarray) -> np.ndarray:
    """Frames in which what things enclose has their colour."""
    background, solid = backdrop(frames)[:, None], frames.copy()
    for frame in solid:
        labels, count = ndimage.label(np.abs(frame - background).max(-1) > CONTRAST)
        for label in range(1, count + 1):
            piece = labels == label
            frame[ndimage.binary_fill_holes(piece) & ~piece] = np.median(frame[piece], axis=0)
    return solid


def outlined(videos: list[np.ndarray], scenes: list[world.Scene]) -> dict[str, float]:
    """Adherence of clips whose things are drawn as outlines, judged as if solid; a ring is then a circle."""
    solid = [replace(scene, things=tuple(
        replace(thing, shape="circle") if thing.shape == "ring" else thing for thing in scene.things
    )) for scene in scenes]
    hollow = float(np.mean([hollowness(video) for video in videos]))
    return adherence([filled(video) for video in videos], solid)[0] | {"hollow": hollow}


def followed(frames: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """How near the largest thing of each frame is to where it should be: pixels between their centres, on average and
    at most, a frame's width where there is none; and the share of what either covers that both do."""
    far, both, either = [], 0, 0
    backgrounds = backdrop(frames), backdrop(truth)
    for pair in zip(frames, truth):
        pairs = list(zip(pair, backgrounds))
        seen, asked = (max(pieces(*one), key=lambda piece: piece.area, default=None) for one in pairs)
        far.append(math.hypot(seen.x - asked.x, seen.y - asked.y) if seen else float(frames.shape[2]))
        seen, asked = (np.abs(frame - background[:, None]).max(-1) > CONTRAST for frame, background in pairs)
        both, either = both + (seen & asked).sum(), either + (seen | asked).sum()
    return {"distance_px": float(np.mean(far)), "distance_px_most": max(far), "overlap": float(both / either)}


def animated(videos: list[np.ndarray], scenes: list[world.Scene], truths: list[np.ndarray]) -> dict[str, float]:
    """Share of driven videos in which the picture's one thing is alone, of its colour and shape, over its background,
    and how it follows: means over the videos, the largest distance, and the share that overlaps by three quarters."""
    verdicts, ways = adherence(videos, scenes)[0], [followed(*one) for one in zip(videos, truths)]
    rates = {aspect: verdicts[aspect] for aspect in ("count", "colour", "shape", "background")}
    means = {name: float(np.mean([way[name] for way in ways])) for name in ("distance_px", "overlap")}
    followers = float(np.mean([way["overlap"] >= 0.75 for way in ways]))
    return rates | means | {"distance_px_most": max(way["distance_px_most"] for way in ways), "followed": followers}


def likeness(frame: np.ndarray, picture: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of a frame against the picture it should be, both uint8; 100 where it is."""
    error = np.square(frame.astype(np.float32) - picture).mean()
    return float(10 * np.log10(255**2 / max(error, 255**2 / 1e10)))


def to_frames(video: torch.Tensor) -> np.ndarray:
    """A clip [3, time, height, width] in -1..1 as uint8 frames [time, height, width, 3]."""
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()


def ground_truth(scenes: list[world.Scene], seed: int = 0) -> list[np.ndarray]:
    """The scenes as the world itself draws them."""
    random = Random(seed)
    clips = []
    for scene in scenes:
        things, background = world.motion_numbers(scene, random)
        clips.append(to_frames(world.render(things[None], background[None])[0]))
    return clips


def true_lives(listed: list[list[world.Scene]], frames: list[int], seed: int = 0) -> list[np.ndarray]:
    """Videos of scenes that follow each other, each for so many frames, as the world itself draws them."""
    random, videos = Random(seed), []
    for scenes in listed:
        parts = world.render_scenes(*world.successive_numbers(scenes, frames, random), frames)
        videos.append(to_frames(parts[0]))
    return videos


# ---------------------------------------------------------------- command line


def generate(model: str, prompts: list[str], seed: int, **settings) -> list[np.ndarray]:
    """Clips through diffusers' own pipeline, prompt k with seed `seed + k`."""
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    clips = []
    for k, prompt in enumerate(prompts):
        noise = torch.Generator("cpu").manual_seed(seed + k)
        clip = pipeline(prompt, generator=noise, height=world.SIZE, width=world.SIZE, num_frames=world.FRAMES,
                        max_sequence_length=world.PROMPT_TOKENS, output_type="np", **settings).frames[0]
        clips.append((clip * 255).round().astype(np.uint8))
    return clips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a pipeline to judge on the held-out prompts")
    parser.add_argument("--video", help="a video file to describe")
    parser.add_argument("--live", action="store_true", help="videos of ten seconds of each of two scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    arguments = parser.parse_args()
    if arguments.video:
        import imageio.v3 as imageio

        seen = describe(imageio.imread(arguments.video))
        print(json.dumps({**seen, "things": [asdict(thing) for thing in seen["things"]]}, indent=2))
        return
    if arguments.live:
        random = Random(arguments.seed)
        first = [world.sample_scene(random, [combination], 0.0) for combination in world.COMBINATIONS]
        first += [world.sample_scene(random, world.COMBINATIONS, 1.0) for _ in range(100)]
        listed = [[scene, world.sample_change(scene, random, world.COMBINATIONS)] for scene in first]
        videos = true_lives(listed, [80, 80], arguments.seed)
        scenes = [scene for pair in listed for scene in pair]
        halves = [half for video in videos for half in np.split(video, 2)]
        rates, verdicts = shares([judge_live(half, scene) for half, scene in zip(halves, scenes)])
    elif arguments.model:
        prompts, scenes = zip(*world.held_out_prompts())
        clips = generate(arguments.model, prompts, arguments.seed, num_inference_steps=arguments.steps,
                         guidance_scale=arguments.guidance)
        rates, verdicts = adherence(clips, scenes)
    else:
        random = Random(arguments.seed)
        scenes = [world.sample_scene(random, [combination], 0.0) for combination in world.COMBINATIONS]
        scenes += [world.sample_scene(random, world.COMBINATIONS, 1.0) for _ in range(100)]
        rates, verdicts = adherence(ground_truth(scenes, arguments.seed), scenes)
    for scene, verdict in zip(scenes, verdicts):
        if not all(verdict.values()):
            print([aspect for aspect, right in verdict.items() if not right], scene)
    print(json.dumps({"clips": len(scenes), **{aspect: round(rate, 4) for aspect, rate in rates.items()}}))


if __name__ == "__main__":
    main()
