"""Make the README's pictures by the commands it shows, into docs/.

    python tools/readme_pictures.py             # all of them, two minutes on two cores
    python tools/readme_pictures.py i2v         # docs/i2v.png
"""
from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import demo_world as world
import imageio.v3 as imageio
import judge_demo
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GAP = 4  # white pixels between frames


def run(folder: Path, *overrides: str) -> np.ndarray:
    """The frames of `python run.py …`."""
    subprocess.run([sys.executable, "run.py", *overrides, f"hydra.run.dir={folder}"], cwd=ROOT, check=True)
    return imageio.imread(folder / "video.mp4")


def strip(name: str, *rows: list[np.ndarray]) -> None:
    """docs/<name>.png: rows of frames one below the other."""
    height, width = rows[0][0].shape[:2]
    size = (width + GAP) * len(rows[0]) - GAP, (height + GAP) * len(rows) - GAP
    picture = Image.new("RGB", size, "white")
    for line, frames in enumerate(rows):
        for column, frame in enumerate(frames):
            picture.paste(Image.fromarray(frame), (column * (width + GAP), line * (height + GAP)))
    picture.save(DOCS / f"{name}.png", optimize=True)


def some(frames: np.ndarray, count: int = 5) -> list[np.ndarray]:
    return [frames[k] for k in np.linspace(0, len(frames) - 1, count).round().astype(int)]


def demo(folder: Path) -> None:
    frames = [Image.fromarray(frame).resize((256, 256), Image.LANCZOS) for frame in run(folder)]
    frames[0].save(DOCS / "demo.gif", save_all=True, append_images=frames[1:], duration=120, loop=0)
    shutil.copyfile(folder / "contact_sheet.png", DOCS / "demo.png")


def v2v(folder: Path) -> None:
    given = run(folder / "given", "prompt=a big red circle moving right on a white background")
    made = run(folder / "made", "pipeline=v2v", f"video={folder / 'given/video.mp4'}", "strength=0.75",
               "prompt=a big green star moving right on a purple background")
    strip("v2v", some(given), some(made))


def i2v(folder: Path) -> None:
    scene = world.Scene((world.Thing("pink", "heart", "down", place="left"),), "green")
    numbers = world.motion_numbers(scene, Random(0))
    picture = judge_demo.to_frames(world.render(*(one[None] for one in numbers), times=slice(0, 1))[0])[0]
    folder.mkdir()
    Image.fromarray(picture).save(folder / "heart.png")
    made = run(folder / "made", "model=demo_i2v", f"image={folder / 'heart.png'}", "prompt=the heart moves down")
    strip("i2v", [picture, *some(made)[1:]])


def four_steps(folder: Path) -> None:
    strip("four_steps", some(run(folder / "twenty")), some(run(folder / "four", "adapter=demo_4step")))


def outline(folder: Path) -> None:
    strengths = "0", "0.5", "1"
    command = ["-m", "adapter=demo_outline", f"adapter.demo_outline.strength={','.join(strengths)}"]
    subprocess.run([sys.executable, "run.py", *command, f"hydra.sweep.dir={folder}"], cwd=ROOT, check=True)
    strip("outline", *(some(imageio.imread(path)) for path in sorted(folder.glob("*/video.mp4"))))


PICTURES = {make.__name__: make for make in (demo, v2v, i2v, four_steps, outline)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="|".join(PICTURES), help="which; all without a name")
    names = parser.parse_args().names or list(PICTURES)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[name](Path(folder) / name)


if __name__ == "__main__":
    main()
