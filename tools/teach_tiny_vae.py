"""Teach the demo a tiny decoder, TAEHV's architecture: from the latents of its VAE to the clips that they were made of.

    python tools/teach_tiny_vae.py                      # about ten minutes on two cores
    python tools/teach_tiny_vae.py minutes=20           # any key of tools/conf/teach_tiny_vae.yaml
    python tools/teach_tiny_vae.py --smoke              # a few steps

Weights, config.json and metrics.json go into `output`. metrics.json compares it with the VAE's own decoder, on clips
that neither has seen.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import demo_world as world
import diffusers
import teach_demo
import torch
import train_demo
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from training import Clock, about, command_line, learning_rate, say, write_metrics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from wan_torchax.models.tiny_vae import MemoryBlock, TinyVAE

HELD_OUT = 99  # added to the seed for clips that are only measured


def decode_whole(tiny: TinyVAE, latents: torch.Tensor) -> torch.Tensor:
    """Clips [batch, 3, frames, height, width] in 0..1, not clamped: a clamp would leave the farthest pixels without a
    gradient."""
    batch, frames = len(latents), latents.transpose(1, 2).flatten(0, 1)
    for layer in tiny.decoder:
        if isinstance(layer, MemoryBlock):
            clips = frames.unflatten(0, (batch, -1))
            before = torch.cat([torch.zeros_like(clips[:, :1]), clips[:, :-1]], dim=1)
            frames = layer(frames, before.flatten(0, 1))
        else:
            frames = layer(frames)
    return frames.unflatten(0, (batch, -1))[:, 3:].transpose(1, 2)


@torch.no_grad()
def encoded(cfg: DictConfig, vae, count: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents, and the clips that they were made of, in 0..1."""
    batches, latents, clips = train_demo.stream(cfg, 2, seed), [], []
    while 2 * len(clips) < count:
        things, backgrounds = next(batches)[:2]
        clip = world.render(things.to(device), backgrounds.to(device), size=cfg.clip_size)
        latents.append(teach_demo.encode(vae, clip))
        clips.append((clip + 1) / 2)
    return torch.cat(latents), torch.cat(clips)


def windows(cfg: DictConfig, latents: torch.Tensor, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A window of each of some clips, the same for all."""
    chosen, side = torch.randint(len(latents), (cfg.batch,)), cfg.window
    scale = clips.shape[-1] // latents.shape[-1]
    top, left = (int(torch.randint(latents.shape[-1] - side + 1, ())) for _ in range(2))
    rows, columns = slice(top, top + side), slice(left, left + side)
    pixels = slice(scale * top, scale * (top + side)), slice(scale * left, scale * (left + side))
    return latents[chosen][..., rows, columns], clips[chosen][..., *pixels]


def train(cfg: DictConfig, tiny: TinyVAE, latents: torch.Tensor, clips: torch.Tensor) -> Clock:
    clock = Clock(cfg.minutes, cfg.steps)
    optimizer = torch.optim.AdamW(tiny.parameters(), cfg.learning_rate, (0.9, 0.98), weight_decay=0.0)
    while clock.progress < 1:
        given, expected = windows(cfg, latents, clips)
        difference = decode_whole(tiny, given) - expected
        error = difference.square().mean()
        (error + 0.05 * difference.abs().mean()).backward()
        optimizer.param_groups[0]["lr"] = learning_rate(cfg.learning_rate, clock, cfg.warmup_steps)
        torch.nn.utils.clip_grad_norm_(tiny.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step += 1
        if clock.step % 100 == 1:
            say(**clock.state(), psnr=psnr(error.detach()))
    return clock


def psnr(error: torch.Tensor) -> float:
    return float(-10 * torch.log10(error))


@torch.no_grad()
def measured(cfg: DictConfig, vae, tiny: TinyVAE, device: torch.device) -> dict[str, float]:
    """PSNR of both decoders on clips that were held out."""
    latents, clips = encoded(cfg, vae, cfg.held_out, cfg.seed + HELD_OUT, device)
    mean, deviation = train_demo.latent_statistics(vae, device)
    decoders = {
        "tiny_psnr": lambda one: decode_whole(tiny, one),
        "exact_psnr": lambda one: (train_demo.decode_whole(vae, one * deviation + mean) + 1) / 2,
    }

    def rebuilt(decode):
        return torch.cat([decode(one).clamp(0, 1) for one in latents.split(1)])

    return {name: psnr((rebuilt(decode) - clips).square().mean()) for name, decode in decoders.items()}


def main() -> None:
    _, cfg = command_line(__doc__, "teach_tiny_vae")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if cfg.device == "auto" else cfg.device)
    torch.manual_seed(cfg.seed)
    vae = diffusers.AutoencoderKLWan.from_pretrained(cfg.model, subfolder="vae").to(device).requires_grad_(False)
    train_demo.take_whole_clips(vae)
    architecture = {"latent_channels": vae.config.z_dim, "patch_size": 1, "widths": OmegaConf.to_container(cfg.widths)}
    tiny = TinyVAE(**architecture).to(device)
    clock = train(cfg, tiny, *encoded(cfg, vae, cfg.bank, cfg.seed, device))
    folder = Path(cfg.output)
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.half().cpu().contiguous() for name, tensor in tiny.state_dict().items()}
    tiny.load_state_dict(halves)  # what is stored is what is measured
    save_file(halves, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(architecture, indent=2) + "\n")
    write_metrics(folder, about(cfg, {"tiny_vae": clock.state()}) | measured(cfg, vae, tiny, device))


if __name__ == "__main__":
    main()
