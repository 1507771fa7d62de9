"""TAEHV: a tiny decoder for the latents of a large video VAE (conf/vae/tiny.yaml), as a torch module.

Its convolutions see one frame. Time enters in two places: a memory block also sees its input of the frame before, and
what enlarges frames may make two of one. No JAX: tools/teach_tiny_vae.py teaches it with torch alone.
"""
import torch

BLOCKS = 3  # memory blocks at each size
FRAMES = 1, 2, 2  # made of one, at each doubling of the size


class TinyVAE(torch.nn.Module):
    """The decoder, by the names of the published files: decoder.3.conv.0.weight. Frames (frames, channels, height,
    width) of latents in, of colours from 0 to 1 out."""

    def __init__(self, latent_channels=16, patch_size=1, widths=(256, 128, 64, 64)):
        super().__init__()
        layers = [Squash(), convolution(latent_channels, widths[0]), torch.nn.ReLU()]
        for width, following, frames in zip(widths, widths[1:], FRAMES):
            layers += [MemoryBlock(width) for _ in range(BLOCKS)]
            layers += [torch.nn.Upsample(scale_factor=2.0, mode="nearest-exact"), MoreFrames(width, frames)]
            layers += [convolution(width, following, bias=False)]
        layers += [torch.nn.ReLU(), convolution(widths[-1], 3 * patch_size**2), torch.nn.PixelShuffle(patch_size)]
        self.decoder = torch.nn.Sequential(*layers)


def convolution(inputs: int, outputs: int, **named) -> torch.nn.Conv2d:
    return torch.nn.Conv2d(inputs, outputs, 3, padding=1, **named)


class Squash(torch.nn.Module):
    """Limits latents smoothly to -3..3."""

    def forward(self, frames):
        return torch.tanh(frames / 3) * 3


class MemoryBlock(torch.nn.Module):
    """A residual block that also sees the frame before each."""

    def __init__(self, width: int):
        super().__init__()
        middle = torch.nn.ReLU(), convolution(width, width), torch.nn.ReLU()
        self.conv = torch.nn.Sequential(convolution(2 * width, width), *middle, convolution(width, width))

    def forward(self, frames, before):
        return torch.relu(self.conv(torch.cat([frames, before], dim=1)) + frames)


class MoreFrames(torch.nn.Module):
    """One frame to several, from its channels."""

    def __init__(self, width: int, frames: int):
        super().__init__()
        self.conv = torch.nn.Conv2d(width, frames * width, 1, bias=False)

    def forward(self, frames):
        return self.conv(frames).reshape(-1, *frames.shape[1:])
