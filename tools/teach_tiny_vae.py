"""Teach a tiny decoder to imitate the demo's own: vae=tiny, TAEHV's structure, a fraction of the time.

    python tools/teach_tiny_vae.py                  # three minutes on one H200
    python tools/teach_tiny_vae.py minutes=1        # any key of tools/conf/teach_tiny_vae.yaml
    python tools/teach_tiny_vae.py --smoke          # a few steps on the CPU
    python tools/teach_tiny_vae.py --judge outputs/demo_tiny_vae        # stored weights, measured once more

tiny_vae/ (config.json and weights, of the widths in conf/model/demo.yaml) and metrics.json go into `output`. They run
with

    python run.py vae=tiny model.tiny_vae=outputs/demo_tiny_vae prompt="a red ball bouncing on a black background"

It sees the latents of videos that demo_world.py draws, two scenes each, and learns the frames that the demo's decoder
makes of them. What it is measured by is the peak signal-to-noise ratio against those frames.
"""
from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import demo_world as world
import diffusers
import teach_demo
import torch
import train_demo
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from teach_demo import Shelf, Weights
from training import autocast, teach_and_judge, teaching

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import wan_torchax  # noqa: E402

wan_torchax.leave_sys_path()
from wan_torchax.models.taehv import MemoryBlock, TinyVAE  # noqa: E402

WEIGHTS = "tiny_vae/diffusion_pytorch_model.safetensors"
SCENE_FRAMES = [world.FRAMES, world.FRAMES - 1]  # of two scenes


def architecture() -> dict:
    return OmegaConf.to_container(OmegaConf.load(ROOT / "conf/model/demo.yaml").architecture.tiny_vae)


def decode(tiny: TinyVAE, latents: torch.Tensor) -> torch.Tensor:
    """Whole videos: normalised latents [n, channels, frames, height, width] to pixels [n, 3, frames, height, width],
    -1..1 where they are colours: a clamp would leave others without a gradient."""
    count, frames = len(latents), latents.transpose(1, 2).flatten(0, 1)
    for layer in tiny.decoder:
        if isinstance(layer, MemoryBlock):
            videos = frames.unflatten(0, (count, -1))
            before = torch.cat((torch.zeros_like(videos[:, :1]), videos[:, :-1]), 1)
            frames = layer(frames, before.flatten(0, 1))
        else:
            frames = layer(frames)
    videos = frames.unflatten(0, (count, -1)).transpose(1, 2)
    return videos[:, :, 3:] * 2 - 1  # of the first latent frame the last of its frames


@torch.no_grad()
def examples(cfg: DictConfig, vae, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of videos of two scenes, and the frames that the exact decoder makes of them."""
    things, backgrounds = (values.to(vae.device) for values in batch[:2])
    numbers = (torch.stack((values, values.roll(1, 0)), 1) for values in (things, backgrounds))
    with autocast(vae.device):
        latents = teach_demo.encode(vae, world.render_scenes(*numbers, SCENE_FRAMES, cfg.clip_size)).float()
        mean, deviation = train_demo.latent_statistics(vae, vae.device)
        frames = train_demo.decode_whole(vae, latents * deviation + mean)
    return latents, frames.float().clamp(-1, 1)


def load(cfg: DictConfig, device: torch.device) -> diffusers.AutoencoderKLWan:
    """The decoder that is imitated."""
    vae = diffusers.AutoencoderKLWan.from_pretrained(cfg.model, subfolder="vae").float().to(device)
    train_demo.take_whole_clips(vae)
    return vae.requires_grad_(False)


def teach(cfg: DictConfig, vae, folder: Path, device: torch.device) -> dict:
    """Lower the error until the time is up. Returns the clock's state."""
    tiny, shelf = TinyVAE(**architecture()).to(device), Shelf(cfg.bank, device)
    batches = train_demo.stream(cfg, cfg.refresh, cfg.seed)
    refresh = teach_demo.shelve(cfg, shelf, batches, lambda *batch: examples(cfg, vae, batch))

    def loss() -> torch.Tensor:
        latents, frames = shelf.draw(cfg.batch)
        with autocast(device):
            difference = decode(tiny, latents).float() - frames
        return difference.square().mean() + 0.05 * difference.abs().mean()

    return {"tiny_vae": teach_demo.train(cfg, cfg, tiny, loss, lambda weights: save(weights, folder), refresh)}


def save(weights: Weights, folder: Path) -> None:
    """As vae=tiny reads it, in float16."""
    teach_demo.store({name: value.half() for name, value in weights.items()}, folder / WEIGHTS)
    (folder / "tiny_vae/config.json").write_text(json.dumps(architecture(), indent=2) + "\n")


def stored(folder: Path, device: torch.device) -> TinyVAE:
    """A folder's decoder."""
    tiny = TinyVAE(**architecture()).to(device)
    tiny.load_state_dict({name: value.float() for name, value in load_file(folder / WEIGHTS).items()})
    return tiny


@torch.no_grad()
def measure(cfg: DictConfig, vae, folder: Path) -> dict:
    """Decibels of stored weights against the exact decoder's frames, over videos that were not seen."""
    tiny = stored(folder, vae.device)
    ratios, batches = [], train_demo.stream(cfg, 2, cfg.seed + 99)
    while len(ratios) < cfg.measured:
        latents, frames = examples(cfg, vae, next(batches))
        errors = (decode(tiny, latents).clamp(-1, 1) - frames).square().mean((1, 2, 3, 4))
        ratios += [10 * math.log10(4 / max(error, 1e-10)) for error in errors.tolist()]
    mean, least = sum(ratios) / len(ratios), min(ratios)
    return {"psnr_db": round(mean, 2), "psnr_db_least": round(least, 2), "videos": len(ratios)}


def run(cfg: DictConfig, judged: str | None) -> None:
    teach_and_judge(cfg, judged, load, teach, measure)


if __name__ == "__main__":
    teaching(__doc__, "teach_tiny_vae", run)
