"""Make the pictures of README and docs anew, by the commands they stand beside, into docs/: after new weights, or when
the page looks different.

    python tools/readme_pictures.py             # all of them, about five minutes on two cores
    python tools/readme_pictures.py i2v         # docs/i2v.png
    python tools/readme_pictures.py serve       # the page; needs Chromium (tools/browser.py)

docs/architecture.svg is drawn by hand. docs/pictures.json says with which weights each was made; a test compares.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random

import browser
import demo_world as world
import imageio.v3 as imageio
import judge_demo
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MADE = DOCS / "pictures.json"
GAP = 4  # white pixels between frames
DEADLINE = 300  # seconds, of a video or a page
SHOWN = (  # in the page's gallery: prompt, seed, settings
    ("a big yellow star spinning in the middle on a purple background", 3, {}),
    ("a red heart bouncing up and down on a white background", 5, {}),
    ("an orange star moving right above a blue circle moving left on a black background", 1, {}),
    ("a purple heart getting bigger in the middle on a white background", 2, {}),
    ("a big red heart bouncing on the left and a yellow star spinning on the right on a blue background", 2025,
     {"adapter": "demo_outline"}),
    ("a white ball moving in a circle on a blue background", 4, {"adapter": "demo_4step"}),
)
WAITING = (("a big orange ball moving from left to right on a black background", 7, {"steps": 60}), *SHOWN[:2])


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


def animate(folder: Path) -> None:
    """A picture and most of a round of its pose; below them the video."""
    subprocess.run([sys.executable, "tools/driving.py", folder], cwd=ROOT, check=True)
    driving = (f"{name}={folder / name}.mkv" for name in ("pose", "face"))
    made = run(folder / "made", "model=demo_animate", f"image={folder / 'picture.png'}", *driving)
    picture = imageio.imread(folder / "picture.png")
    pose = imageio.imread(folder / "pose.mkv")
    strip("animate", [picture, *some(pose[:14])], [np.full_like(picture, 255), *some(made[:14])])


def live(folder: Path) -> None:
    """Ten seconds, of which the last five follow another prompt."""
    later = 'live.prompts=["5: a yellow star spinning on a purple background"]'
    made = run(folder, "model=demo_live", "prompt=a red ball moving right on a blue background", later)
    strip("live", some(made[4:], 9))


def four_steps(folder: Path) -> None:
    strip("four_steps", some(run(folder / "twenty")), some(run(folder / "four", "adapter=demo_4step")))


def outline(folder: Path) -> None:
    strengths = "0", "0.5", "1"
    command = ["-m", "adapter=demo_outline", f"adapter.demo_outline.strength={','.join(strengths)}"]
    subprocess.run([sys.executable, "run.py", *command, f"hydra.sweep.dir={folder}"], cwd=ROOT, check=True)
    strip("outline", *(some(imageio.imread(path)) for path in sorted(folder.glob("*/video.mp4"))))


def guiders(folder: Path) -> None:
    """Strong guidance, plain and projected; a heart of any colour in four steps, and away from red."""
    heart = "adapter=demo_4step", "prompt=a big heart in the middle on a blue background"
    runs = {
        "cfg": ["guidance_scale=8"], "apg": ["guidance_scale=8", "guider=apg"], "any": heart,
        "nag": [*heart, "guider=nag", "negative_prompt=a red heart"],
    }
    strip("guiders", *(some(run(folder / name, *overrides)) for name, overrides in runs.items()))


def serve(folder: Path) -> None:
    """The page with a gallery, one video in the making and two that wait."""
    with started(folder) as url:
        for prompt, seed, fields in SHOWN:
            ask(f"{url}/v1/videos/sync", {"prompt": prompt, "seed": seed} | fields)
        for prompt, seed, fields in WAITING:
            ask(f"{url}/v1/videos", {"prompt": prompt, "seed": seed} | fields)
        driver = browser.start(folder / "profile")
        try:
            browser.show(driver, 1280, 900)
            driver.get(url)
            half_way = (
                "const job = document.querySelector('.job img'), videos = document.querySelectorAll('.run video');"
                f"return videos.length === {len(SHOWN)} && job?.complete && Number(job.dataset.step) > 30"
            )
            wait_for(lambda: driver.execute_script(half_way))
            driver.execute_script("document.querySelector('.example').click(); document.activeElement.blur()")
            wait_for(lambda: driver.execute_script("return document.querySelector('#estimate').textContent"))
            driver.save_screenshot(str(DOCS / "serve.png"))
        finally:
            driver.quit()


@contextlib.contextmanager
def started(folder: Path) -> Iterator[str]:
    """A server's address; it ends with the block."""
    places = [f"serve.folder={folder / 'queue'}", f"hydra.run.dir={folder / 'log'}"]
    command = [sys.executable, "run.py", "task=serve", "serve.gallery=[]", "serve.port=0", *places]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line.strip() for line in server.stdout if line.startswith("http"))
        wait_for(lambda: ask(f"{url}/readyz"))
        yield url
    finally:
        server.terminate()
        server.wait(DEADLINE)


def ask(url: str, fields: dict | None = None) -> bytes | None:
    """What a server answers; None if it cannot yet."""
    body = None if fields is None else json.dumps(fields).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return None
        raise RuntimeError(error.read().decode()) from error


def wait_for(condition) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {DEADLINE} s")
        time.sleep(0.1)


PICTURES = {make.__name__: make for make in (demo, v2v, i2v, animate, live, four_steps, outline, guiders, serve)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="|".join(PICTURES), help="which; all without a name")
    names = parser.parse_args().names or list(PICTURES)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[name](Path(folder) / name)
        made = json.loads(MADE.read_text()) if MADE.exists() else {}
        MADE.write_text(json.dumps(made | {name: weights_hash()}, indent=2, sort_keys=True) + "\n")


def weights_hash() -> str:
    """Of all embedded models."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "models").rglob("*.safetensors")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
