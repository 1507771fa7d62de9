"""The demo model's world: coloured shapes that move over a coloured background, and English about them.

A `Scene` says what is seen (one or two `Thing`s over a background). From it come
  - `motion_numbers(scene, random)`: the numbers a clip is drawn from, positions and speeds varied,
  - `render(things, backgrounds)`: the clips, drawn on whichever device the numbers are on,
  - `caption(scene, random)`: one of very many ways to say it.
Videos without an end show scenes that follow each other: `sample_change`, `successive_numbers`, `render_scenes`.

    scene = sample_scene(random.Random(0))
    things, background = motion_numbers(scene, random.Random(0))
    video = render(things[None], background[None])      # [1, 3, 17, 128, 128] in -1..1

Coordinates: x grows to the right and y downwards, the frame spans -1..1 in both, a radius of 1 is half a frame.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from random import Random

import torch

# ---------------------------------------------------------------- what there is

PALETTE = {
    "red": (222, 38, 38),
    "orange": (245, 135, 20),
    "yellow": (250, 225, 50),
    "green": (40, 160, 65),
    "blue": (40, 85, 220),
    "purple": (145, 55, 190),
    "pink": (250, 135, 195),
    "white": (245, 245, 245),
    "black": (14, 14, 18),
    "gray": (128, 128, 128),
}
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")
BACKGROUNDS = ("black", "white", "gray", "blue", "green", "yellow", "purple")
SHAPES = ("circle", "square", "triangle", "star", "heart", "ring")
MOTIONS = ("left", "right", "up", "down", "bouncing", "circling", "growing", "spinning", "still")
SIZES = ("small", "big")
ROUND = ("circle", "ring")  # a turn of these cannot be seen, so they never spin

OFF_CENTRE = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1), "middle": (0, 0)}
# Where a thing may be said to be, by its motion; a moving thing has a place only across its path.
PLACES = {
    "left": ("top", "middle", "bottom"),
    "right": ("top", "middle", "bottom"),
    "up": ("left", "middle", "right"),
    "down": ("left", "middle", "right"),
    "bouncing": ("left", "middle", "right"),
    "circling": ("middle",),
    "growing": ("left", "middle", "right", "top", "bottom"),
    "spinning": ("left", "middle", "right", "top", "bottom"),
    "still": ("left", "middle", "right", "top", "bottom"),
}
# Two things never cross: side by side they move up and down, stacked they move sideways.
PAIR_MOTIONS = {
    ("left", "right"): ("up", "down", "bouncing", "growing", "spinning", "still"),
    ("top", "bottom"): ("left", "right", "growing", "spinning", "still"),
}

FRAMES, SIZE = 17, 128
PROMPT_TOKENS = 128  # what prompts are padded to: model.text_tokens of conf/model/demo.yaml


@dataclass(frozen=True)
class Thing:
    """One object. `size` and `place` of None mean: not said, so anything ordinary will do."""

    colour: str
    shape: str
    motion: str = "still"
    size: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Scene:
    """One or two things over a background; two are in reading order (left, right or top, bottom)."""

    things: tuple[Thing, ...]
    background: str


def is_held_out(colour: str, shape: str, motion: str) -> bool:
    """Combinations kept from training: of every colour and shape, one motion; each pair is still seen."""
    return (COLOURS.index(colour) + 2 * SHAPES.index(shape) + 4 * MOTIONS.index(motion)) % len(MOTIONS) == 0


def can_be(shape: str, motion: str) -> bool:
    return not (motion == "spinning" and shape in ROUND)


COMBINATIONS = [(c, s, m) for c in COLOURS for s in SHAPES for m in MOTIONS if can_be(s, m)]
HELD_OUT = [combination for combination in COMBINATIONS if is_held_out(*combination)]
SEEN = [combination for combination in COMBINATIONS if not is_held_out(*combination)]


# What `labels` numbers: these of each thing, then the background; 0 stands for what is not there or not said.
ASPECTS = {"colour": COLOURS, "shape": SHAPES, "motion": MOTIONS, "size": SIZES, "place": tuple(OFF_CENTRE)}
LABELS = (*ASPECTS.values(), *ASPECTS.values(), BACKGROUNDS)


def labels(scene: Scene) -> list[int]:
    """The scene as one number per entry of LABELS."""
    things = [*scene.things, None][:2]
    said = [getattr(thing, aspect, None) for thing in things for aspect in ASPECTS] + [scene.background]
    return [0 if value is None else 1 + names.index(value) for value, names in zip(said, LABELS)]


# ---------------------------------------------------------------- drawing scenes by lot


def sample_scene(random: Random, combinations=SEEN, pair_share: float = 0.4) -> Scene:
    """A scene whose (colour, shape, motion) combinations all come from `combinations`."""
    if random.random() < pair_share:
        places = random.choice(list(PAIR_MOTIONS))
        first = _sample_thing(random, combinations, PAIR_MOTIONS[places])
        second = _sample_thing(random, combinations, PAIR_MOTIONS[places], other_than=first.colour)
        things = replace(first, place=places[0]), replace(second, place=places[1])
    else:
        things = (_sample_thing(random, combinations, MOTIONS),)
    return Scene(things, _sample_background(random, things))


def _sample_thing(random: Random, combinations, motions, other_than: str | None = None) -> Thing:
    while True:
        colour, shape, motion = random.choice(combinations)
        if colour != other_than and motion in motions:
            return _dress(random, colour, shape, motion)


def _sample_background(random: Random, things: tuple[Thing, ...]) -> str:
    taken = {thing.colour for thing in things}
    return random.choice([name for name in BACKGROUNDS if name not in taken])


def _dress(random: Random, colour: str, shape: str, motion: str) -> Thing:
    """Add a size and a place, or leave them unsaid."""
    size = random.choice((*SIZES, None)) if motion != "growing" else None
    place = random.choice(PLACES[motion]) if random.random() < 0.5 else None
    return Thing(colour, shape, motion, size, place)


def fixed_prompts(seed: int, pairs: int) -> list[tuple[str, Scene]]:
    """Every held-out combination once, then `pairs` scenes of two held-out things: always the same list."""
    random = Random(seed)
    scenes = []
    for colour, shape, motion in HELD_OUT:
        things = (_dress(random, colour, shape, motion),)
        scenes.append(Scene(things, _sample_background(random, things)))
    scenes += [sample_scene(random, HELD_OUT, pair_share=1.0) for _ in range(pairs)]
    return [(caption(scene, random, complete=True), scene) for scene in scenes]


def held_out_prompts() -> list[tuple[str, Scene]]:
    """The list adherence is reported on."""
    return fixed_prompts(seed=2025, pairs=26)


def validation_prompts() -> list[tuple[str, Scene]]:
    """Another wording and other backgrounds of the same combinations: the list checkpoints are chosen on."""
    return fixed_prompts(seed=7, pairs=18)


def held_out_pictures(short: bool = False) -> list[tuple[str, Scene, torch.Tensor, torch.Tensor]]:
    """(sentence, scene, its numbers): sixty clips whose first frames are given. `short` tells the motion only."""
    random = Random(60)
    listed = [(text, scene, *motion_numbers(scene, random)) for text, scene in fixed_prompts(seed=60, pairs=13)]
    return [(motion_sentence(scene, random), scene, *numbers) if short else (text, scene, *numbers)
            for text, scene, *numbers in listed]


# ---------------------------------------------------------------- English

SHAPE_WORDS = {
    "circle": ("circle", "ball", "disc", "dot"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "heart": ("heart",),
    "ring": ("ring", "donut", "hoop"),
}
COLOUR_WORDS = {"purple": ("purple", "violet"), "gray": ("gray", "grey")}
SIZE_WORDS = {"small": ("small", "little", "tiny"), "big": ("big", "large", "huge")}
PLACE_WORDS = {
    "left": ("on the left", "on the left side"),
    "right": ("on the right", "on the right side"),
    "top": ("at the top", "near the top"),
    "bottom": ("at the bottom", "near the bottom"),
    "middle": ("in the middle", "in the center", "in the centre"),
}
# Each verb as (participle, third person): "a ball moving", "a ball moves".
TRAVEL = (
    ("moving", "moves"), ("sliding", "slides"), ("gliding", "glides"), ("drifting", "drifts"),
    ("flying", "flies"), ("going", "goes"), ("travelling", "travels"), ("floating", "floats"),
)
DIRECTION_WORDS = {
    "left": ("left", "to the left", "leftwards", "from right to left", "towards the left"),
    "right": ("right", "to the right", "rightwards", "from left to right", "towards the right"),
    "up": ("up", "upwards", "from bottom to top", "towards the top"),
    "down": ("down", "downwards", "from top to bottom", "towards the bottom"),
}
MOTION_WORDS = {
    "up": (("rising", "rises"),),
    "down": (("falling", "falls"), ("sinking", "sinks")),
    "bouncing": (
        ("bouncing", "bounces"), ("bouncing up and down", "bounces up and down"),
        ("jumping up and down", "jumps up and down"), ("hopping", "hops"),
    ),
    "circling": (
        ("circling", "circles"), ("moving in a circle", "moves in a circle"),
        ("circling around", "circles around"), ("flying in circles", "flies in circles"),
    ),
    "growing": (("growing", "grows"), ("getting bigger", "gets bigger"), ("growing larger", "grows larger")),
    "spinning": (("spinning", "spins"), ("rotating", "rotates"), ("spinning around", "spins around")),
    "still": (("staying still", "stays still"), ("standing still", "stands still"), ("not moving", "does not move")),
}
OPENINGS = ("a video of", "an animation of", "a clip of", "an animation showing", "there is")
BACKDROPS = ("on a {} background", "against a {} background", "over a {} background", "in front of a {} background")


def caption(scene: Scene, random: Random, complete: bool = False) -> str:
    """The scene in words. Unless `complete`, now and then only part of it is said."""
    if not complete and random.random() < 0.08:
        return _fragment(scene, random)
    describe = _describe_pair if len(scene.things) == 2 else _describe_one
    backdrop = "" if not complete and random.random() < 0.12 else scene.background
    return _finish(describe(scene.things, random), backdrop, random)


def motion_sentence(scene: Scene, random: Random) -> str:
    """Only what moves how, for those who see a picture of the scene: "the red star spins and the ball moves left"."""
    alone = len(scene.things) == 1
    parts = []
    for thing in scene.things:
        name = _name(replace(thing, size=None), random)
        if alone and random.random() < 0.5:
            name = _word(SHAPE_WORDS, thing.shape, random)
        place = "" if alone or random.random() < 0.5 else _place(thing, random)
        parts.append(_join("the", name, place, _motion(thing.motion, random)[1]))
    return _finish(" and ".join(parts), "", random)


def _finish(sentence: str, background: str, random: Random) -> str:
    """Put the background before or after the sentence; vary its case and full stop."""
    if background:
        colour = _word(COLOUR_WORDS, background, random)
        backdrop = random.choice(BACKDROPS).format(colour)
        sentence = random.choice((
            f"{sentence} {backdrop}", f"{sentence} {backdrop}", f"{sentence}, {backdrop}", f"{backdrop}, {sentence}",
            f"{sentence}, {colour} background", f"{sentence}. The background is {colour}",
        ))
    sentence = re.sub(r"\ba(?= orange)", "an", sentence)
    if random.random() < 0.5:
        sentence = sentence[0].upper() + sentence[1:]
    return sentence + random.choice(("", "", "."))


def _describe_one(things: tuple[Thing, ...], random: Random) -> str:
    thing = things[0]
    participle, verb = _motion(thing.motion, random)
    place = _place(thing, random)
    name = _name(thing, random)
    some = _join(_opening(random), f"a {name}")
    if thing.motion == "still" and random.random() < 0.5:
        return _join(some, place)
    return random.choice((
        _join(some, participle, place), _join(some, place, participle),
        _join(f"a {name}", verb, place), _join(f"the {name}", verb, place),
        _join(f"the {name}", place, "is", participle), _join(name, participle, place),
    ))


def _describe_pair(things: tuple[Thing, ...], random: Random) -> str:
    first, second = things
    names = [_name(thing, random) for thing in things]
    places = [_place(thing, random) for thing in things]
    (doing, does), (doing_too, does_too) = (_motion(thing.motion, random) for thing in things)
    opening = _opening(random)
    ways = [
        _join(opening, f"a {names[0]} {doing} {places[0]} and a {names[1]} {doing_too} {places[1]}"),
        _join(opening, f"a {names[1]} {doing_too} {places[1]} and a {names[0]} {doing} {places[0]}"),
        f"{places[0]} a {names[0]} {does} and {places[1]} a {names[1]} {does_too}",
        f"{places[0]} a {names[0]} {doing}, {places[1]} a {names[1]} {doing_too}",
    ]
    if first.place == "top":
        ways.append(f"a {names[0]} {doing} above a {names[1]} {doing_too}")
        ways.append(f"a {names[1]} {doing_too} below a {names[0]} {doing}")
    if first.motion == second.motion:
        ways.append(f"a {names[0]} {places[0]} and a {names[1]} {places[1]}, both {doing}")
    return random.choice(ways)


def _fragment(scene: Scene, random: Random) -> str:
    """A few words about one side of the scene: what a negative prompt usually is."""
    thing = random.choice(scene.things)
    return random.choice((
        f"{_word(COLOUR_WORDS, scene.background, random)} background", _name(thing, random),
        _word(COLOUR_WORDS, thing.colour, random), _word(SHAPE_WORDS, thing.shape, random),
        _motion(thing.motion, random)[0],
    ))


def _word(table, key: str, random: Random) -> str:
    return random.choice(table.get(key, (key,)))


def _name(thing: Thing, random: Random) -> str:
    size = _word(SIZE_WORDS, thing.size, random) if thing.size else ""
    return _join(size, _word(COLOUR_WORDS, thing.colour, random), _word(SHAPE_WORDS, thing.shape, random))


def _opening(random: Random) -> str:
    return random.choice(OPENINGS) if random.random() < 0.25 else ""


def _place(thing: Thing, random: Random) -> str:
    return _word(PLACE_WORDS, thing.place, random) if thing.place else ""


def _motion(motion: str, random: Random) -> tuple[str, str]:
    """(participle, third person) of one way to say the motion."""
    ways = MOTION_WORDS.get(motion, ())
    if motion in DIRECTION_WORDS and random.random() > 0.15 * len(ways):
        direction = random.choice(DIRECTION_WORDS[motion])
        participle, verb = random.choice(TRAVEL)
        return f"{participle} {direction}", f"{verb} {direction}"
    return random.choice(ways)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def vocabulary() -> list[str]:
    """Every word the captions are made of, sorted: what the tokenizer knows as whole words."""
    tables = (SHAPE_WORDS, COLOUR_WORDS, SIZE_WORDS, PLACE_WORDS, DIRECTION_WORDS)
    text = " ".join(phrase for table in tables for phrases in table.values() for phrase in phrases)
    text += " " + " ".join(" ".join(pair) for pairs in (TRAVEL, *MOTION_WORDS.values()) for pair in pairs)
    text += " " + " ".join((*OPENINGS, *BACKDROPS, *PALETTE)).replace("{}", "")
    text += " a an the and is both above below , ."
    words = set(text.split())
    return sorted(words | {word.capitalize() for word in words})


# ---------------------------------------------------------------- numbers

# One row a thing: what `render` needs to draw it at any time from 0 to 1. `since` is how long it has moved before.
FIELDS = ("shape", "red", "green", "blue", "x", "y", "travel_x", "travel_y", "bounce", "orbit", "phase",
          "radius", "radius_end", "turn", "angle", "since")
RADIUS = {"small": (0.17, 0.20), None: (0.25, 0.30), "big": (0.36, 0.40)}
ASIDE = 0.47  # from the middle: where a thing is that is said to be at a side
HEADING = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def motion_numbers(scene: Scene, random: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """The scene as numbers: things [2, fields] (the second is empty when there is one) and background [3]."""
    rows = [_thing_numbers(thing, random, shrink=0.8 if len(scene.things) == 2 else 1.0) for thing in scene.things]
    rows += [[0.0] * len(FIELDS)] * (2 - len(rows))
    return torch.tensor(rows), torch.tensor(PALETTE[scene.background]) / 255


def _thing_numbers(thing: Thing, random: Random, shrink: float) -> list[float]:
    numbers = dict.fromkeys(FIELDS, 0.0)
    numbers["shape"] = SHAPES.index(thing.shape)
    numbers["red"], numbers["green"], numbers["blue"] = (channel / 255 for channel in PALETTE[thing.colour])
    place = thing.place or random.choice(PLACES[thing.motion])
    for axis, side in zip("xy", OFF_CENTRE[place]):
        numbers[axis] = side * ASIDE + random.uniform(-0.05, 0.05)
    radius = random.uniform(*RADIUS[thing.size]) * shrink
    numbers |= {"radius": radius, "radius_end": radius}
    return list((numbers | _moving(thing, numbers, random, shrink)).values())


def _moving(thing: Thing, at: dict[str, float], random: Random, shrink: float) -> dict[str, float]:
    """What the thing's motion changes in its numbers."""
    if thing.motion in HEADING:
        distance = random.uniform(0.8, 0.95)
        x, y = HEADING[thing.motion]
        return {"travel_x": x * distance, "travel_y": y * distance}
    if thing.motion == "bouncing":
        return {"y": 0.35 + random.uniform(-0.03, 0.03), "bounce": random.uniform(0.58, 0.66)}
    if thing.motion == "circling":
        return {"orbit": random.uniform(0.28, 0.34), "phase": random.uniform(0, math.tau)}
    if thing.motion == "growing":
        return {"radius": 0.15 * shrink, "radius_end": random.uniform(0.40, 0.46) * shrink}
    if thing.motion == "spinning":
        return {"turn": random.uniform(0.9, 1.1) * math.pi}
    return {}


def start_elsewhere(things: torch.Tensor, share: float = 0.5) -> torch.Tensor:
    """Things [clips, 2, fields] of which a share moves less far and begins anywhere on its way, or grows from any size.

    In the world a thing's place tells its motion: one at the left goes right. Of a picture another may be asked.
    """
    at = FIELDS.index
    things = things.clone()
    moved = torch.rand(things.shape[:2], device=things.device) < share
    less = torch.where(moved, 0.45 * torch.rand_like(things[..., 0]), 0.0)
    aside = less * (2 * torch.rand_like(less) - 1)
    for place, travel in (("x", "travel_x"), ("y", "travel_y")):
        things[..., at(place)] += aside * things[..., at(travel)]
        things[..., at(travel)] *= 1 - less
    things[..., at("y")] -= aside.abs() * things[..., at("bounce")] * 0.7
    things[..., at("bounce")] *= 1 - 0.7 * less
    grows = things[..., at("radius_end")] > things[..., at("radius")]
    things[..., at("radius")] *= torch.where(grows, 1 + 1.3 * less, 1.0)
    return things


# ---------------------------------------------------------------- scenes that follow each other

class Steady(Random):
    """Chooses, and varies nothing."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def steady_numbers(scene: Scene, random: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """`motion_numbers` with the usual speeds, sizes and places: of what is drawn only an unsaid place is not known."""
    return motion_numbers(scene, Steady(random.getrandbits(32)))


def sample_change(scene: Scene, random: Random, combinations=SEEN) -> Scene:
    """The scene that follows: another one, or the same thing with another colour, shape, motion or background."""
    if len(scene.things) == 2 or random.random() < 0.5:
        return sample_scene(random, combinations)
    (thing,), aspect = scene.things, random.choice(("colour", "shape", "motion", "background"))
    if aspect == "background":
        return replace(scene, background=_sample_background(random, scene.things))
    while True:
        colour, shape, motion = random.choice(combinations)
        wanted = replace(thing, **{aspect: {"colour": colour, "shape": shape, "motion": motion}[aspect]})
        if (wanted.colour, wanted.shape, wanted.motion) in combinations and wanted.colour != scene.background:
            size = None if wanted.motion == "growing" else thing.size
            place = thing.place if thing.place in PLACES[wanted.motion] else None
            return replace(scene, things=(replace(wanted, size=size, place=place),))


def follow_on(scene: Scene, random: Random, earlier: Scene, things: torch.Tensor, time: float):
    """Numbers, as `steady_numbers` has them, of a scene that follows an earlier one whose `things` [2, fields] were
    drawn up to a time (in clips).

    What is not said goes on: a motion that stays the same goes on as it was, another one starts where the thing is, as
    far as that can be. A place that is said is where the thing then is.
    """
    numbers, background = steady_numbers(scene, random)
    before = dict(zip(FIELDS, things.unbind(-1)))
    old_x, old_y = ((one + 1).remainder(2) - 1 for one in _centre(before, time + before["since"]))
    for row, thing in enumerate(scene.things):
        if row >= len(earlier.things):
            continue  # nothing was there
        new, old = dict(zip(FIELDS, numbers[row].tolist())), dict(zip(FIELDS, things[row].tolist()))
        if thing.motion == earlier.things[row].motion and thing.place in (None, earlier.things[row].place):
            new |= {name: old[name] for name in ("x", "y", "phase")} | {"since": old["since"] + time}
        elif thing.motion in HEADING:
            x, y = old_x[row].item(), old_y[row].item()
            along = HEADING[thing.motion][0] != 0
            x, y = (x, _aside(y, new["y"], thing)) if along else (_aside(x, new["x"], thing), y)
            new |= {"x": x + new["travel_x"] / 2, "y": y + new["travel_y"] / 2}
        elif thing.motion == "bouncing":
            new["x"] = _aside(old_x[row].item(), new["x"], thing)
        elif thing.motion != "circling":
            new |= {"x": _aside(old_x[row].item(), new["x"], thing), "y": _aside(old_y[row].item(), new["y"], thing)}
        numbers[row] = torch.tensor(list(new.values()))
    return numbers, background


def _aside(here: float, said: float, thing: Thing) -> float:
    """Where a thing goes on along an axis: where it is, not too near an edge, unless a place is said."""
    return said if thing.place else min(max(here, -ASIDE), ASIDE)


def successive_numbers(scenes: list[Scene], frames: list[int], random: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Things [1, scenes, 2, fields] and backgrounds [1, scenes, 3] of scenes that follow each other, each for so many
    frames."""
    numbers = [steady_numbers(scenes[0], random)]
    for earlier, scene, count in zip(scenes, scenes[1:], frames):
        numbers.append(follow_on(scene, random, earlier, numbers[-1][0], count / (FRAMES - 1)))
    things, backgrounds = zip(*numbers)
    return torch.stack(things)[None], torch.stack(backgrounds)[None]


def held_out_changes(count: int | None = None) -> list[tuple[list[str], list[Scene]]]:
    """Pairs of prompts and their scenes, of which the second follows the first: the list live videos are judged on."""
    listed = held_out_prompts()
    pairs = zip(listed, [*listed[7:], *listed[:7]])
    return [([first[0], second[0]], [first[1], second[1]]) for first, second in pairs][:count]


# ---------------------------------------------------------------- pictures

ANGLES = 720  # entries of a shape's outline
SOFTNESS = 2.0  # pixels over which an edge fades
HOLLOW = 0.55  # of a radius: what is left out of a thing that is drawn as an outline; a ring is one already


def _polygon_outline(corners: list[tuple[float, float]]) -> torch.Tensor:
    """Distance from the origin to the polygon's edge in every direction, [ANGLES]; the origin lies inside."""
    angle = torch.arange(ANGLES) * (math.tau / ANGLES)
    direction = torch.stack((angle.cos(), angle.sin()), -1)[:, None]
    start = torch.tensor(corners)
    edge = start.roll(-1, 0) - start
    cross = direction[..., 0] * edge[:, 1] - direction[..., 1] * edge[:, 0]
    distance = (start[:, 0] * edge[:, 1] - start[:, 1] * edge[:, 0]) / cross
    along = (start[:, 0] * direction[..., 1] - start[:, 1] * direction[..., 0]) / cross
    hit = (distance > 0) & (along >= -1e-4) & (along <= 1 + 1e-4)
    return distance.where(hit, torch.tensor(math.inf)).amin(1)


def _corners(count: int, *radii: float) -> list[tuple[float, float]]:
    """`count` corners, the first straight up, at the given radii in turn."""
    corners = []
    for k in range(count):
        radius, angle = radii[k % len(radii)], math.tau * k / count
        corners.append((radius * math.sin(angle), -radius * math.cos(angle)))
    return corners


def _heart_corners(count: int = 180) -> list[tuple[float, float]]:
    points = []
    for k in range(count):
        t = math.tau * k / count
        height = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((16 * math.sin(t) ** 3 / 15.5, -(height + 1.5) / 15.5))
    return points


def outlines() -> torch.Tensor:
    """Outlines of all SHAPES at radius 1, [shapes, ANGLES], angle 0 to the right and growing clockwise."""
    diagonal = 1.15
    half_side = diagonal * math.sqrt(0.5)
    square = [(half_side * x, half_side * y) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    return torch.stack((
        torch.full((ANGLES,), 0.95), _polygon_outline(square), _polygon_outline(_corners(3, 1.2)),
        _polygon_outline(_corners(10, 1.2, 0.52)), _polygon_outline(_heart_corners()), torch.full((ANGLES,), 1.0),
    ))


HOLES = torch.tensor([0.55 if shape == "ring" else 0.0 for shape in SHAPES])
OUTLINES = outlines()


def cover(shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor, turn: torch.Tensor,
          pixel: float) -> torch.Tensor:
    """How much of each point a shape covers, 0..1. x and y are offsets from its centre; all broadcast together."""
    distance = torch.hypot(x, y)
    index = (torch.atan2(y, x) - turn).remainder(math.tau) * (ANGLES / math.tau)
    below, part = index.long() % ANGLES, index.frac()
    table = OUTLINES.to(x.device)
    edge = table[shape, below] * (1 - part) + table[shape, (below + 1) % ANGLES] * part
    inside = ((edge * radius - distance) / pixel + 0.5).clamp(0, 1)
    inner = HOLES.to(x.device)[shape]
    hole = ((inner * radius - distance) / pixel + 0.5).clamp(0, 1) * (inner > 0)
    return inside * (1 - hole)


def render(
    things: torch.Tensor, backgrounds: torch.Tensor, size: int = SIZE, times: slice | torch.Tensor = slice(None),
    hollow: bool = False,
) -> torch.Tensor:
    """Draw clips: things [clips, 2, fields], backgrounds [clips, 3] -> [clips, 3, frames, size, size] in -1..1.

    `times` picks some of the FRAMES frames, or is the time of each. `hollow` leaves a thick outline of every thing.
    """
    picked = isinstance(times, slice)
    time = torch.linspace(0, 1, FRAMES, device=things.device)[times] if picked else times.to(things.device)
    return _paint(things, backgrounds, time, size, hollow)


def render_on(things: torch.Tensor, backgrounds: torch.Tensor, frames: int, size: int = SIZE) -> torch.Tensor:
    """`render` of so many frames, in which motions go on: who leaves at one side comes in at the other, and who has
    grown begins anew."""
    time = torch.arange(frames, device=things.device) / (FRAMES - 1)
    return _paint(things, backgrounds, time, size, endless=True)


def render_scenes(things: torch.Tensor, backgrounds: torch.Tensor, frames: list[int], size: int = SIZE) -> torch.Tensor:
    """Videos of `successive_numbers`: [videos, 3, all frames, size, size]."""
    scenes = zip(things.unbind(1), backgrounds.unbind(1), frames)
    return torch.cat([render_on(*numbers, count, size) for *numbers, count in scenes], 2)


def _paint(things, backgrounds, time, size: int, hollow: bool = False, endless: bool = False) -> torch.Tensor:
    line = (torch.arange(size, device=things.device) + 0.5) * (2 / size) - 1
    y, x = line[:, None], line[None, :]
    light = 1.06 - 0.12 * (y + 1) / 2  # a little brighter at the top
    video = (backgrounds[:, :, None, None, None] * light).expand(-1, -1, len(time), -1, size)
    for row in things.unbind(1):
        video = _draw(video, dict(zip(FIELDS, row.unbind(-1))), (x, y), time, hollow, endless)
    return video.clamp(0, 1) * 2 - 1


def _centre(thing: dict[str, torch.Tensor], time) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a thing is at a time, on a plane without edges."""
    time = torch.as_tensor(time)
    angle = thing["phase"] + math.tau * time
    x = thing["x"] + thing["travel_x"] * (time - 0.5) + thing["orbit"] * angle.cos()
    y = thing["y"] + thing["travel_y"] * (time - 0.5) + thing["orbit"] * angle.sin()
    return x, y - thing["bounce"] * (math.tau * time).sin().abs()


def course(thing: dict[str, torch.Tensor], time: torch.Tensor, endless: bool = False) -> tuple[torch.Tensor, ...]:
    """x, y, radius and turn of one thing per clip at each time, all [clips, frames, 1, 1]."""
    shaped = {name: value[:, None, None, None] for name, value in thing.items()}
    time = shaped["since"] + time[None, :, None, None]
    growth = time.frac() if endless else time
    radius = shaped["radius"] + (shaped["radius_end"] - shaped["radius"]) * growth
    return *_centre(shaped, time), radius, shaped["angle"] + shaped["turn"] * time


def _draw(video, thing, points, time, hollow, endless):
    """Lay one thing per clip over the video; a radius of 0 draws nothing."""
    x, y = points
    centre_x, centre_y, radius, turn = course(thing, time, endless)
    offset_x, offset_y = x - centre_x, y - centre_y
    if endless:  # the nearest way round
        offset_x, offset_y = ((offset + 1).remainder(2) - 1 for offset in (offset_x, offset_y))
    shape, pixel = thing["shape"].long()[:, None, None, None], SOFTNESS * 2 / x.shape[-1]
    covered = cover(shape, offset_x, offset_y, radius, turn, pixel=pixel)
    if hollow:
        covered = covered * (1 - cover(shape, offset_x, offset_y, HOLLOW * radius, turn, pixel=pixel))
    covered = (covered * (radius > 0))[:, None]
    colour = torch.stack((thing["red"], thing["green"], thing["blue"]), 1)[:, :, None, None, None]
    shade = (1 - 0.08 * offset_y / radius.clamp(min=1e-3)).clamp(0.9, 1.1)[:, None]
    return torch.lerp(video, colour * shade, covered)
