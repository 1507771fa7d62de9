"""task=calibrate: measures a curve for cache=magcache, with this config's model, scheduler and shift.

    python run.py task=calibrate model=wan21_t2v_14b resolution=480p mesh=v6e_8 prompt="a cat on the grass"
    python run.py task=calibrate 'calibrate.prompts=["a red heart growing","a blue star spinning"]'

Every step is computed; the magnitude of the blocks' residual is compared with that of the previous step, token by
token. Writes <model>.yaml, which belongs in conf/curve, and curve.png.
"""
import logging
from pathlib import Path

import numpy
from omegaconf import OmegaConf
from PIL import Image, ImageDraw, ImageFont

from wan_torchax.config import inputs
from wan_torchax.config.commandline import literal
from wan_torchax.events import Stepped, to_all
from wan_torchax.records import provenance
from wan_torchax.records.files import claimed, write_text
from wan_torchax.session import session
from wan_torchax.stages.stage import main_stage
from wan_torchax.tasks.progress import Bars

log = logging.getLogger("wan")


def calibrate(config, folder: Path, overrides=()) -> float:
    """Write the curve; returns the mean of its last ratio."""
    config = inputs.with_texts(config)
    OmegaConf.update(config, "cache", {"name": "calibrate", "mode": "calibrate"})
    texts = list(config.calibrate.prompts) or [None]
    with claimed(folder):
        runs = [measure(config, text) for text in texts]
        ratios = numpy.mean(runs, axis=0)  # (steps, prompts); the first step has no previous one
        name = config.model.name
        write_text(folder / f"{name}.yaml", describe(config, ratios[1:], len(runs)))
        draw(folder / "curve.png", f"{name}: size of the blocks' residual, relative to the step before", ratios[1:])
    print(folder / f"{name}.yaml")
    return float(ratios[-1].mean())


def measure(config, text: str | None) -> numpy.ndarray:
    """(steps, prompts) of one video."""
    local, ratios = config.copy(), []
    if text is not None:
        local.prompt.text = literal(text)

    def note(event):
        if isinstance(event, Stepped):
            ratios.append(event.measures)

    resolved = session.resolve(local, local.stages)
    names = [name for name in resolved.graph.upstream(main_stage(resolved.graph)) if name in local.stages]
    session.run(resolved, names, resolved.inputs(), to_all(Bars(), note))
    return numpy.stack(ratios)


def describe(config, ratios: numpy.ndarray, runs: int) -> str:
    """The curve as a file for conf/curve."""
    size, versions = config.resolution, provenance.versions()
    made = ", ".join(f"{name} {versions[name]}" for name in ("jax", "torch", "diffusers") if versions.get(name))
    what = f"{config.model.name}: how fast the size of the blocks' residual changes from step to step"
    lines = [
        f"# {what}, for cache=magcache.",
        f"# Videos: {runs}, {size.width} x {size.height} x {size.frames}, guidance {config.guidance_scale}.",
        f"source: task=calibrate, {made}",
        f"commit: {provenance.git_revision()}",
        "licence: that of this project",
        f"steps: {config.steps}",
        f"shift: {size.flow_shift}",
        f"solver: {config.scheduler.name}",
        f"resolution: {size.width}x{size.height}",
    ]
    for key, column in zip(("ratios", "ratios_negative"), ratios.T):
        parts = (column[start : start + 14] for start in range(0, len(column), 14))
        lines.append(f"{key}: [" + ",\n  ".join(", ".join(f"{ratio:.5f}" for ratio in part) for part in parts) + "]")
    return "\n".join(lines) + "\n"


def draw(path: Path, title: str, ratios: numpy.ndarray) -> None:
    """Plot the curve, one line per prompt."""
    width, height, margin = 900, 420, 60
    picture, font = Image.new("RGB", (width, height), "white"), ImageFont.load_default(16)
    pen = ImageDraw.Draw(picture)
    low, high = min(0.9, float(ratios.min())), max(1.02, float(ratios.max()))
    pen.text((margin, 15), title, fill="black", font=font)

    def place(step, ratio):
        right = margin + (width - 2 * margin) * step / max(len(ratios) - 1, 1)
        return right, height - margin - (height - 2 * margin) * (ratio - low) / (high - low)

    for mark in numpy.linspace(low, high, 5):
        pen.line([place(0, mark), place(len(ratios) - 1, mark)], fill="#dddddd")
        pen.text((8, place(0, mark)[1] - 8), f"{mark:.2f}", fill="black", font=font)
    for column, (name, colour) in zip(ratios.T, (("prompt", "#2f6690"), ("negative prompt", "#d1495b"))):
        pen.line([place(step, ratio) for step, ratio in enumerate(column)], fill=colour, width=3)
        left = margin + (0 if name == "prompt" else 120)
        pen.text((left, height - 30), name, fill=colour, font=font)
    picture.save(path)
