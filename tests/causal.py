"""Self-Forcing's loop in plain torch, on the weights of diffusers' transformer: what pipeline=live is compared with.

Keys and values are kept as its code keeps them: appended, and those behind the sink shifted out of the window.
"""
from functools import partial
from pathlib import Path

import diffusers
import jax.numpy as jnp
import torch
from omegaconf import OmegaConf

from wan_torchax.stages.live import noise


class Shifted:
    """The keys and values of one layer, chunk by chunk in the order of time: number, first frame, keys, values."""

    def __init__(self, window, sink, relative):
        self.window, self.sink, self.relative, self.chunks = window, sink, relative, []

    def attend(self, chunk, grid, query, key, value):
        """Of queries and keys before RoPE, (frames, tokens, heads, channels)."""
        number, first = chunk
        if self.chunks and self.chunks[-1][0] == number:  # an earlier pass of the same chunk
            self.chunks.pop()
        self.make_room(len(key))
        self.chunks.append((number, first, key, value))
        places = [self.frames(place) if self.relative else one[1] for place, one in enumerate(self.chunks)]
        keys = torch.cat([rotated(one[2], grid, place) for one, place in zip(self.chunks, places)])
        values = torch.cat([one[3] for one in self.chunks])
        return softmax(rotated(query, grid, places[-1]), keys, values)

    def make_room(self, frames):
        """Shift out what is behind the sink, for so many frames."""
        while self.frames(len(self.chunks)) + frames > self.window:
            sinks = next(count for count in range(len(self.chunks)) if self.frames(count) >= self.sink)
            self.chunks.pop(sinks)

    def frames(self, count):
        """Of so many chunks."""
        return sum(len(chunk[2]) for chunk in self.chunks[:count])


class Masked:
    """All chunks in one pass: a token sees those of its own chunk and of earlier ones."""

    def __init__(self, chunk):
        self.chunk = chunk

    def attend(self, chunk, grid, query, key, value):
        query, key = (rotated(array, grid, 0) for array in (query, key))
        chunks = torch.arange(len(query)).repeat_interleave(query.shape[1]) // self.chunk
        return softmax(query, key, value, chunks[:, None] >= chunks[None])


def softmax(query, key, value, mask=None):
    query, key, value = (array.flatten(0, 1).transpose(0, 1) for array in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    return out.transpose(0, 1).flatten(1)


def rotated(array, grid, first):
    """RoPE: a head's channels are split among time, height and width, and pairs of them turn by their angles."""
    channels = array.shape[-1]
    side = 2 * (channels // 6)
    height, width = grid
    axes = (torch.arange(first, first + len(array)), channels - 2 * side), (torch.arange(height), side), (
        torch.arange(width), side)
    angles = [place.double()[:, None] / 10000 ** (torch.arange(0, size, 2).double() / size) for place, size in axes]
    shape = len(array), height, width
    parts = [
        angle.reshape([-1 if index == axis else 1 for index in range(3)] + [angle.shape[1]]).expand(*shape, -1)
        for axis, angle in enumerate(angles)
    ]
    turn = torch.polar(torch.tensor(1.0).double(), torch.cat(parts, dim=-1).reshape(len(array), -1, 1, channels // 2))
    pairs = torch.view_as_complex(array.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).float()


@torch.no_grad()
def forward(model, latents, time, text, chunk, layers):
    """The velocity of a chunk (1, channels, frames, height, width), which has a number and a first frame; `layers` keep
    its keys and values."""
    heads, (_, _, frames, height, width) = model.config.num_attention_heads, latents.shape
    hidden = model.patch_embedding(latents).flatten(2).transpose(1, 2)
    embedded, modulation, text, _ = model.condition_embedder(torch.tensor([time]), text, None)
    modulation = modulation.unflatten(1, (6, -1))
    for block, kept in zip(model.blocks, layers):
        shift, scale, gate, last_shift, last_scale, last_gate = (block.scale_shift_table + modulation).chunk(6, dim=1)
        normed, own = block.norm1(hidden) * (1 + scale) + shift, block.attn1
        parts = own.norm_q(own.to_q(normed)), own.norm_k(own.to_k(normed)), own.to_v(normed)
        parts = [part[0].unflatten(-1, (heads, -1)).unflatten(0, (frames, -1)) for part in parts]
        out = kept.attend(chunk, (height // 2, width // 2), *parts)
        hidden = hidden + own.to_out[0](out[None]) * gate
        hidden = hidden + block.attn2(block.norm2(hidden), text, None, None)
        normed = block.norm3(hidden) * (1 + last_scale) + last_shift
        hidden = hidden + block.ffn(normed) * last_gate
    shift, scale = (model.scale_shift_table + embedded[:, None]).chunk(2, dim=1)
    out = model.proj_out(model.norm_out(hidden) * (1 + scale) + shift)
    out = out.reshape(1, frames, height // 2, width // 2, 2, 2, -1).permute(0, 6, 1, 2, 4, 3, 5)
    return out.reshape(latents.shape)


def load(folder):
    return diffusers.WanTransformer3DModel.from_pretrained(folder / "transformer")


def generate(model, config, texts, sizes, change=None, given=()):
    """The latents of all chunks, which have these numbers of latent frames; the first are those `given`. The second
    prompt applies from the chunk `change` on, or half and then whole; what the first of them still sees is read again
    with it, as if it were the video's beginning."""
    live = config.live
    window = sum(sizes) if live.window is None else live.window
    layers = [Shifted(window, live.sink, live.positions == "relative") for _ in model.blocks]
    made, text = [], texts[:1]
    for number, frames in enumerate(sizes):
        own = 1, model.config.out_channels, frames, config.resolution.height // 8, config.resolution.width // 8
        changes = change is not None and change <= number < change + max(live.blend, 1)
        if changes:
            text = texts[1:] if number - change + 1 >= live.blend else (texts[:1] + texts[1:]) / 2
        if number and (live.rebuild or (changes and live.recache)):
            for kept in layers:
                kept.make_room(frames)
            staying = [one[:2] for one in layers[0].chunks]
            for kept in layers:
                kept.chunks.clear()
            for old in staying:
                kept = made[old[0]]
                if live.reencode and old == staying[0] and old[0] > 0:
                    kept = torch.cat([picture(config, torch.cat(made, dim=2), old[1]), kept[:, :, 1:]], dim=2)
                forward(model, kept, float(live.context_noise), text, old, layers)

        def drawn(step, own=own, number=number):
            return torch.tensor(noise({"seed": jnp.uint32(config.seed), "chunk": number}, step, own).tolist())

        chunk = number, sum(sizes[:number])
        if number < len(given):
            latents = given[number]
        else:
            latents = sampled(config, partial(forward, model, text=text, chunk=chunk, layers=layers), drawn)
        forward(model, latents, float(live.context_noise), text, chunk, layers)
        made.append(latents)
    return torch.cat(made, dim=2).numpy()


@torch.no_grad()
def picture(config, latents, number):
    """A latent frame as the last picture that it decodes to is encoded alone."""
    vae = diffusers.AutoencoderKLWan.from_pretrained(Path(config.model.path) / "vae")
    mean, deviation = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    pixels = vae.decode(latents * deviation + mean).sample[:, :, 4 * number : 4 * number + 1]
    return (vae.encode(pixels).latent_dist.mode() - mean) / deviation


def sampled(config, velocity, drawn):
    """A chunk from noise: by a solver of diffusers, or renoised with fresh noise after each step."""
    latents, shift = drawn(0), config.resolution.flow_shift
    if config.scheduler.sigmas is None:
        solver = diffusers.UniPCMultistepScheduler(**OmegaConf.to_container(config.scheduler.arguments, resolve=True))
        solver.set_timesteps(config.steps)
        for time in solver.timesteps:
            latents = solver.step(velocity(latents, float(time)), time, latents, return_dict=False)[0]
        return latents
    sigmas = [shift * sigma / (1 + (shift - 1) * sigma) for sigma in config.scheduler.sigmas]
    for step, sigma in enumerate(sigmas):
        time = round(1000 * sigma) if config.scheduler.round_times else 1000 * sigma
        clean = latents - sigma * velocity(latents, time)
        after = sigmas[step + 1] if step + 1 < len(sigmas) else 0.0
        latents = (1 - after) * clean + after * drawn(step + 1)
    return latents
