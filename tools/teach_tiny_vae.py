"""Teach a tiny decoder for the demo's latents: vae=tiny, TAEHV's structure, a fraction of the time.

    python tools/teach_tiny_vae.py                  # three minutes on one H200
    python tools/teach_tiny_vae.py minutes=1        # any key of tools/conf/teach_tiny_vae.yaml
    python tools/teach_tiny_vae.py start_from=models/demo output=outputs/more       # go on with stored weights
    python tools/teach_tiny_vae.py --smoke          # a few steps on the CPU
    python tools/teach_tiny_vae.py --judge outputs/demo_tiny_vae        # stored weights, measured once more

tiny_vae/ (config.json and weights, of the widths in conf/model/demo.yaml) and metrics.json go into `output`. They run
with

    python run.py vae=tiny model.tiny_vae=outputs/demo_tiny_vae prompt="a red ball bouncing on a black background"

It sees the latents of videos that demo_world.py draws, several scenes each, as live ones have them: things leave at one
side and come in at the other, and what has grown begins anew. It learns the frames that were drawn, and is measured by
the peak signal-to-noise ratio against them, beside the demo's own decoder.
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
SCENE_FRAMES = [world.FRAMES] + 3 * [world.FRAMES - 1]


def architecture() -> dict:
    return OmegaConf.to_container(OmegaConf.load(ROOT / "conf/model/demo.yaml").architecture.tiny_vae)


def decode(tiny: TinyVAE, latents: torch.Tensor) -> torch.Tensor:
    """Whole videos: normalised latents [n, channels, frames, height, width] to pixels [n, 3, frames, height, width],
    -1..1 where they are colours: a clamp would leave others without a gradient."""
    count, frames = len(latents), latents.transpose(1, 2).flatten(0, 1).contiguous(memory_format=torch.channels_last)
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
    """Latents of videos, and their frames. Scenes are those of a batch in turn, each at any time of its motion."""
    things, backgrounds = (values.to(vae.device) for values in batch[:2])
    scenes = [torch.stack([values.roll(turn, 0) for turn in range(len(SCENE_FRAMES))], 1)
              for values in (things, backgrounds)]
    scenes[0][..., world.FIELDS.index("since")] = 4 * torch.rand(scenes[0].shape[:-1], device=vae.device)
    frames = world.render_scenes(*scenes, SCENE_FRAMES, cfg.clip_size)
    with autocast(vae.device):
        return teach_demo.encode(vae, frames).float(), frames


@torch.no_grad()
def exactly_decoded(vae, latents: torch.Tensor) -> torch.Tensor:
    """Frames by the demo's own decoder."""
    mean, deviation = train_demo.latent_statistics(vae, vae.device)
    with autocast(vae.device):
        return train_demo.decode_whole(vae, latents * deviation + mean).float()


def load(cfg: DictConfig, device: torch.device) -> diffusers.AutoencoderKLWan:
    """The demo's VAE."""
    vae = diffusers.AutoencoderKLWan.from_pretrained(cfg.model, subfolder="vae").float().to(device)
    train_demo.take_whole_clips(vae)
    return vae.requires_grad_(False)


def teach(cfg: DictConfig, vae, folder: Path, device: torch.device) -> dict:
    """Lower the error until the time is up. Returns the clock's state."""
    tiny = stored(Path(cfg.start_from), device) if cfg.start_from else TinyVAE(**architecture()).to(device)
    tiny, shelf = tiny.to(memory_format=torch.channels_last), Shelf(cfg.bank, device)
    batches = train_demo.stream(cfg, cfg.refresh, cfg.seed)
    refresh = teach_demo.shelve(cfg, shelf, batches, lambda *batch: examples(cfg, vae, batch))

    def loss() -> torch.Tensor:
        latents, frames = shelf.draw(cfg.batch)
        rough = cfg.noise * torch.rand(len(latents), 1, 1, 1, 1, device=device) * torch.randn_like(latents)
        with autocast(device):
            difference = decode(tiny, latents + rough).float() - frames
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
    """Decibels of stored weights and of the demo's own decoder, over videos that were not seen, and the least."""
    tiny, batches = stored(folder, vae.device), train_demo.stream(cfg, len(SCENE_FRAMES), cfg.seed + 99)
    tiny_ratios, own_ratios = [], []
    while len(tiny_ratios) < cfg.measured:
        latents, frames = examples(cfg, vae, next(batches))
        for ratios, made in ((tiny_ratios, decode(tiny, latents)), (own_ratios, exactly_decoded(vae, latents))):
            errors = (made.clamp(-1, 1) - frames).square().mean((1, 2, 3, 4))
            ratios += [10 * math.log10(4 / max(error, 1e-10)) for error in errors.tolist()]
    rates = {"videos": len(tiny_ratios)}
    for name, ratios in (("psnr_db", tiny_ratios), ("own_psnr_db", own_ratios)):
        rates |= {name: round(sum(ratios) / len(ratios), 2), f"{name}_least": round(min(ratios), 2)}
    return rates


def run(cfg: DictConfig, judged: str | None) -> None:
    teach_and_judge(cfg, judged, load, teach, measure)


if __name__ == "__main__":
    teaching(__doc__, "teach_tiny_vae", run)
