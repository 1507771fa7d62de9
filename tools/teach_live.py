"""Teach the demo model to be live: chunk by chunk, four steps each, without an end, following prompts that change.

    python tools/teach_live.py                      # five minutes on one H200, and two around them
    python tools/teach_live.py minutes=2            # any key of tools/conf/teach_live.yaml
    python tools/teach_live.py start_from=outputs/demo_live output=outputs/more     # the last stage once more
    python tools/teach_live.py --smoke              # a few steps on the CPU
    python tools/teach_live.py --judge outputs/demo_live        # stored weights, on the held-out prompts once more

transformer/, metrics.json and README.md go into `output`. The weights are written every minute, at the end of each
stage, and before they are judged; what is judged is what was written. They run with

    python run.py model=demo_live model.transformer=outputs/demo_live \\
        prompt="a red ball bouncing on a black background" \\
        'live.prompts=["5: a blue star spinning on a black background"]'

What is asked of it is well-posed. Speeds and sizes are the world's usual ones, and what a prompt does not say goes on
(demo_world.follow_on): so every chunk follows from its prompt and the chunks before it, except the first, of which a
place may be left open. Three stages:

    flow        a chunk at any noise level after true ones, as the demo model was trained: learns what first chunks may
                be, and to read what it keeps
    first       what that makes of noise in many steps, for first chunks: from the same noise it is one picture, while
                of all that fit the prompt a loss would take the mean
    rollout     four steps from noise: first chunks as those of the same noise, all others as the world draws them,
                after chunks of its own. Gradients go through the four steps and what is kept, not from chunk to chunk

Window, positions and the time at which chunks are read are those of conf/live/demo.yaml; a test compares the latents
with those of pipeline=live.
"""
from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random

import demo_world as world
import numpy as np
import teach_demo
import teach_tiny_vae
import torch
import train_demo
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict
from safetensors.torch import load_file
from teach_demo import Shelf, Weights
from torch.nn import functional
from training import Clock, autocast, say, teach_and_judge, teaching

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SCALE = 4  # frames of the video in a latent frame; the first is one
FPS = 8
SETTLED = FPS  # frames after a change of the prompt that are not judged: a second


def with_live(cfg: DictConfig) -> DictConfig:
    """The settings with those of conf/live/demo.yaml."""
    with initialize_config_dir(str(ROOT / "conf/live"), version_base="1.3"):
        live = compose("demo")
    expected = {"first": None, "sink": 0, "positions": "relative", "recache": True, "blend": 0, "rebuild": False}
    wrong = [f"{key}={live[key]}" for key, value in expected.items() if live[key] != value]
    if wrong or live.window % live.chunk or live.window < 2 * live.chunk:
        raise SystemExit(f"conf/live/demo.yaml: {', '.join(wrong) or f'window={live.window}'} cannot be taught here")
    with open_dict(cfg):
        cfg.live = live
    return cfg


# ---------------------------------------------------------------- data


def frames_of(cfg: DictConfig, chunks: int) -> int:
    """Frames of so many chunks at the beginning of a video."""
    return (chunks * cfg.live.chunk - 1) * SCALE + 1 if chunks else 0


def scene_frames(cfg: DictConfig, plan: list[int], chunks: int) -> list[int]:
    """Frames of each scene of a video in which another one begins with the chunks of a plan."""
    ends = [frames_of(cfg, number) for number in (0, *plan, chunks)]
    return [after - before for before, after in itertools.pairwise(ends)]


class Videos(torch.utils.data.IterableDataset):
    """An endless stream of batches of each plan in turn: its number, things [batch, scenes, 2, fields], backgrounds
    [batch, scenes, 3] and tokens [batch, scenes, CAPTION_TOKENS]."""

    def __init__(self, cfg: DictConfig, seed: int):
        self.batch, self.seed = cfg.refresh, seed
        self.frames = [scene_frames(cfg, plan, cfg.chunks) for plan in cfg.plans]

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        random = Random(f"{self.seed} {worker.id if worker else 0}")
        tokenizer = train_demo.build_tokenizer()
        for number in itertools.cycle(range(len(self.frames))):
            rows = [self.draw(self.frames[number], random, tokenizer) for _ in range(self.batch)]
            yield number, *(torch.cat(column) for column in zip(*rows))

    def draw(self, frames: list[int], random: Random, tokenizer) -> tuple[torch.Tensor, ...]:
        scenes = [world.sample_scene(random)]
        while len(scenes) < len(frames):
            scenes.append(world.sample_change(scenes[-1], random))
        # The first caption may leave something open; those that follow say what changes.
        captions = [world.caption(scene, random, complete=place > 0) for place, scene in enumerate(scenes)]
        return *world.successive_numbers(scenes, frames, random), train_demo.tokenize(tokenizer, captions)[None]


class Bank:
    """Encoded videos of every plan and what is said of their scenes, on the device; more join as it is asked."""

    def __init__(self, cfg: DictConfig, networks: dict, device: torch.device):
        self.cfg, self.networks, self.device = cfg, networks, device
        loader = torch.utils.data.DataLoader(Videos(cfg, cfg.seed + 1), batch_size=None, num_workers=cfg.workers)
        self.batches, self.shelves = iter(loader), [Shelf(cfg.bank, device) for _ in cfg.plans]
        while min(shelf.added for shelf in self.shelves) < cfg.bank_start:
            self.add()
            say(stage="bank", videos=sum(shelf.added for shelf in self.shelves))

    @torch.no_grad()
    def add(self) -> None:
        number, *arrays = next(self.batches)
        things, backgrounds, tokens = (array.to(self.device) for array in arrays)
        frames = scene_frames(self.cfg, self.cfg.plans[number], self.cfg.chunks)
        with autocast(self.device):
            videos = world.render_scenes(things, backgrounds, frames, self.cfg.clip_size)
            text = train_demo.read(self.networks["text_encoder"], tokens.flatten(0, 1))
            latents = teach_demo.encode(self.networks["vae"], videos)
        self.shelves[number].add(latents, text.unflatten(0, tokens.shape[:2]))

    def draw(self, number: int, batch: int) -> list[torch.Tensor]:
        """Latents [batch, channels, frames, height, width] and texts [batch, scenes, tokens, channels] of a plan."""
        return self.shelves[number].draw(batch)


# ---------------------------------------------------------------- the causal model


class CausalBlock(WanTransformerBlock):
    """Wan's block for a chunk of a video: it also attends to what is kept of earlier ones."""

    def forward(self, hidden, text, modulation, turns, kept, is_there):
        """Of tokens, with keys and values [batch, kept tokens, heads, channels] of earlier chunks. Gives the tokens and
        the chunk's own keys, before RoPE, and values."""
        modulation = self.scale_shift_table + modulation.float()
        shift, scale, gate, last_shift, last_scale, last_gate = modulation.chunk(6, 1)
        normed, own = self.norm1(hidden) * (1 + scale) + shift, self.attn1
        query, key, value = own.norm_q(own.to_q(normed)), own.norm_k(own.to_k(normed)), own.to_v(normed)
        dtype = value.dtype
        query, key, value = (one.float().unflatten(2, (own.heads, -1)) for one in (query, key, value))
        keys, values = (torch.cat(pair, 1) for pair in zip(kept, (key, value)))
        turned = train_demo.turn_pairs(query, *(table[:, -query.shape[1] :] for table in turns))
        parts = turned, train_demo.turn_pairs(keys, *turns), values
        parts = (one.to(dtype).transpose(1, 2) for one in parts)
        seen = functional.scaled_dot_product_attention(*parts, is_there)
        hidden = hidden + own.to_out[0](seen.transpose(1, 2).flatten(2)) * gate
        hidden = hidden + self.attn2(self.norm2(hidden), text, None, None)
        hidden = hidden + self.ffn(self.norm3(hidden) * (1 + last_scale) + last_shift) * last_gate
        return hidden, key, value


def make_causal(transformer: WanTransformer3DModel) -> WanTransformer3DModel:
    train_demo.attend_quickly(transformer)
    for block in transformer.blocks:
        block.__class__ = CausalBlock
    return transformer


def stored(networks: dict, folder: Path) -> WanTransformer3DModel:
    """A folder's weights."""
    transformer = make_causal(deepcopy(networks["transformer"]))
    transformer.load_state_dict({name: value.float() for name, value in load_file(folder / WEIGHTS).items()})
    return transformer


class Video:
    """Videos [batch] that are being made as pipeline=live makes one: what is kept of them, and the prompt that applies.

    Keys and values of as many chunks as the window has besides a chunk's own; missing ones are masked. RoPE knows only
    distances, so places count from the window's end.
    """

    def __init__(self, transformer: WanTransformer3DModel, live: DictConfig, text: torch.Tensor):
        self.transformer, self.live, self.text = transformer, live, text
        self.earlier = live.window // live.chunk - 1
        self.kept, self.made = [], []

    def change(self, text: torch.Tensor) -> None:
        """Another prompt: what stays is read again with it, as if it were a video's beginning."""
        self.text, self.kept = text, []
        for latents in self.made:
            self.read(latents)

    def add(self, latents: torch.Tensor) -> None:
        """Go on with a finished chunk."""
        self.made = [*self.made, latents][-self.earlier :]
        self.read(latents)

    def read(self, latents: torch.Tensor) -> None:
        level = torch.full((len(latents),), self.live.context_noise / 1000, device=latents.device)
        self.kept = [*self.kept, self.forward(latents, level)[1]][-self.earlier :]

    def velocity(self, latents: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Of a chunk at noise levels [batch]."""
        return self.forward(latents, level)[0]

    def forward(self, latents: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor, list]:
        """(velocity, the chunk's keys and values of each layer)."""
        model, (batch, _, frames, height, width) = self.transformer, latents.shape
        turns = model.rope(latents.new_empty(1, 1, frames * (self.earlier + 1), height, width))
        hidden = model.patch_embedding(latents).flatten(2).transpose(1, 2).float()
        embedded, modulation, text, _ = model.condition_embedder(level * 1000, self.text, None)
        missing = (self.earlier - len(self.kept)) * hidden.shape[1]
        is_there = (torch.arange(turns[0].shape[1], device=latents.device) >= missing)[None, None, None]
        own = []
        for number, block in enumerate(model.blocks):
            kept = self.of_layer(number, hidden, missing)
            hidden, *pair = block(hidden, text, modulation.unflatten(1, (6, -1)), turns, kept, is_there)
            own.append(pair)
        shift, scale = (model.scale_shift_table + embedded[:, None]).chunk(2, dim=1)
        out = model.proj_out(model.norm_out(hidden) * (1 + scale) + shift).float()
        out = out.reshape(batch, frames, height // 2, width // 2, 2, 2, -1).permute(0, 6, 1, 2, 4, 3, 5)
        return out.reshape(latents.shape), own

    def of_layer(self, number: int, hidden: torch.Tensor, missing: int) -> list[torch.Tensor]:
        """Keys and values that are kept of a layer, zeros for missing ones. These need gradients like the others: for
        the compiler it would be another program."""
        heads, channels = self.transformer.config.num_attention_heads, self.transformer.config.attention_head_dim
        empty = hidden.new_zeros(len(hidden), missing, heads, channels).requires_grad_(torch.is_grad_enabled())
        return [torch.cat([empty, *(chunk[number][which] for chunk in self.kept)], 1) for which in (0, 1)]


def levels_of(cfg: DictConfig, sigmas: Iterable[float]) -> list[float]:
    """Noise levels of steps, and 0."""
    return [*(cfg.shift * sigma / (1 + (cfg.shift - 1) * sigma) for sigma in sigmas), 0.0]


def denoised(cfg: DictConfig, video: Video, noise: torch.Tensor) -> torch.Tensor:
    """A chunk by the few steps of Euler's from noise."""
    latents = noise
    for high, low in itertools.pairwise(levels_of(cfg, cfg.sigmas)):
        level = torch.full((len(noise),), high, device=noise.device)
        latents = latents - (high - low) * video.velocity(latents, level)
    return latents


@torch.no_grad()
def generate(cfg: DictConfig, transformer: WanTransformer3DModel, texts: torch.Tensor, plan: list[int],
             noise: torch.Tensor) -> torch.Tensor:
    """Latents of whole videos from noise of their shape; texts [batch, prompts, tokens, channels], of which the next
    applies from each chunk of a plan on."""
    video, chunks = Video(transformer, cfg.live, texts[:, 0]), []
    for number, part in enumerate(noise.split(cfg.live.chunk, 2)):
        if number in plan:
            video.change(texts[:, plan.index(number) + 1])
        chunks.append(denoised(cfg, video, part))
        video.add(chunks[-1])
    return torch.cat(chunks, 2)


# ---------------------------------------------------------------- learning


def flow_loss(cfg: DictConfig, transformer: WanTransformer3DModel, plan: list[int], empty: torch.Tensor,
              latents: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each chunk's velocity at random noise levels, after true chunks."""
    device, losses = latents.device, []
    dropped = torch.rand(len(texts), 1, 1, device=device) < cfg.first.caption_dropout
    video = Video(transformer, cfg.live, torch.where(dropped, empty, texts[:, 0]))
    for number, chunk in enumerate(latents.split(cfg.live.chunk, 2)):
        if number in plan:
            video.change(texts[:, plan.index(number) + 1])
        level = torch.rand(len(chunk), device=device)
        level = cfg.shift * level / (1 + (cfg.shift - 1) * level)
        noise = torch.randn_like(chunk)
        velocity = video.velocity(torch.lerp(chunk, noise, level[:, None, None, None, None]), level)
        losses.append(functional.mse_loss(velocity, noise - chunk))
        if number == 0:
            video.text = texts[:, 0]
        video.add(roughened(cfg, chunk))
    return torch.stack(losses).mean()


def roughened(cfg: DictConfig, latents: torch.Tensor) -> torch.Tensor:
    """Latents with a little noise and in another shade here and there, more in some videos than in others: such errors
    are not to grow from chunk to chunk."""
    noise, shade = torch.rand(2, len(latents), 1, 1, 1, 1, device=latents.device)
    areas = torch.randn(*latents.shape[:2], 1, 2, 2, device=latents.device)
    areas = functional.interpolate(areas, (1, *latents.shape[3:]), mode="trilinear")
    return latents + cfg.read_noise * noise * torch.randn_like(latents) + cfg.read_shade * shade * areas


@torch.no_grad()
def first_chunks(cfg: DictConfig, bank: Bank, make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
    """Pairs of noise and what is made of it, with their texts, on a Shelf; and the clock's state."""
    settings, device = cfg.first, bank.device
    shelf = Shelf(settings.batches * settings.batch, device)
    clock = Clock(cfg.minutes * settings.share, settings.batches)
    for number in itertools.cycle(range(len(cfg.plans))):
        latents, texts = bank.draw(number, settings.batch)
        text, noise = texts[:, 0], torch.randn_like(latents[:, :, : cfg.live.chunk])
        with autocast(device):
            shelf.add(noise, make(noise, text), text)
        clock.step += 1
        if clock.progress >= 1:
            break
    say(stage="first", **clock.state(), pairs=shelf.added)
    return shelf, clock.state()


def guided(cfg: DictConfig, teacher: WanTransformer3DModel, empty: torch.Tensor, noise: torch.Tensor,
           text: torch.Tensor) -> torch.Tensor:
    """A first chunk by many of Euler's steps, with guidance from the empty caption."""
    latents, video = noise, Video(teacher, cfg.live, torch.cat((text, empty.expand(text.shape))))
    for high, low in itertools.pairwise(levels_of(cfg, np.linspace(1, 0, cfg.first.steps, endpoint=False))):
        level = torch.full((2 * len(noise),), high, device=noise.device)
        told, untold = video.velocity(torch.cat((latents, latents)), level).chunk(2)
        latents = latents - (high - low) * (untold + cfg.first.guidance * (told - untold))
    return latents


def rollout_loss(cfg: DictConfig, transformer: WanTransformer3DModel, plan: list[int], pairs: Shelf,
                 latents: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Error of chunks in few steps: of a first one, and of those that follow a true one and each other."""
    noise, wanted, text = pairs.draw(len(latents))
    losses = [error(cfg, denoised(cfg, Video(transformer, cfg.live, text), noise), wanted)]
    chunks, video = latents.split(cfg.live.chunk, 2), Video(transformer, cfg.live, texts[:, 0])
    video.add(roughened(cfg, chunks[0]))
    for number, chunk in enumerate(chunks[1:], 1):
        if number in plan:
            video.change(texts[:, plan.index(number) + 1])
        made = denoised(cfg, video, torch.randn_like(chunk))
        losses.append(error(cfg, made, chunk))
        video.add(roughened(cfg, made.detach()))
    return torch.stack(losses).mean()


def error(cfg: DictConfig, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean squared error, in which what stands out from the background counts `things` times as much as all of the
    picture, however small it is: a tiny star is three hundredths of it."""
    background = wanted.flatten(3).median(3).values[..., None, None]
    stands_out = (wanted - background).square().mean(1, keepdim=True)
    share = stands_out / stands_out.mean((1, 2, 3, 4), keepdim=True).clamp(min=1e-6)
    weight = (1 + cfg.things * share.clamp(max=30)) / (1 + cfg.things)
    return ((made - wanted).square() * weight).mean()


def teach(cfg: DictConfig, networks: dict, folder: Path, device: torch.device) -> dict:
    """All stages; the transformer ends as the average of its weights, in the folder. Returns the clocks' states."""
    bank, empty = Bank(cfg, networks, device), teach_demo.empty_text(networks)
    begun = stored(networks, Path(cfg.start_from)) if cfg.start_from else make_causal(networks["transformer"])
    student = deepcopy(begun).requires_grad_(True)
    teach_demo.compiled(cfg, student)

    def stage(name: str, loss_of, *given) -> dict:
        settings = cfg[name]

        def loss(number: int, plan: list[int]) -> torch.Tensor:
            with autocast(device):
                return loss_of(cfg, student, plan, *given, *bank.draw(number, settings.batch))

        losses = [partial(loss, number, plan) for number, plan in enumerate(cfg.plans)]
        timed = OmegaConf.create({**settings, "minutes": cfg.minutes * settings.share})
        return teach_demo.train(OmegaConf.create({**cfg, "what": name}), timed, student, losses, save, bank.add)

    def save(weights: Weights) -> None:
        teach_demo.save_transformer(student, weights, folder / WEIGHTS)

    if not cfg.start_from:
        clocks = {"flow": stage("flow", flow_loss, empty)}
        make = partial(guided, cfg, deepcopy(student), empty)
    else:
        clocks, make = {}, lambda noise, text: denoised(cfg, Video(begun, cfg.live, text), noise)
    pairs, clocks["first"] = first_chunks(cfg, bank, make)
    return clocks | {"rollout": stage("rollout", rollout_loss, pairs)}


# ---------------------------------------------------------------- judging


@torch.no_grad()
def show(cfg: DictConfig, networks: dict, transformer: WanTransformer3DModel, listed: list[list[str]]):
    """Videos as frames of uint8, by the tiny decoder: the prompts of row k, each for `judge.chunks`, with the
    configured seed + k."""
    import judge_demo

    settings, device, videos = cfg.judge, transformer.device, []
    tiny = teach_tiny_vae.stored(Path(cfg.model), device)
    count, side = len(listed[0]), cfg.clip_size // 8
    plan = [settings.chunks * place for place in range(1, count)]
    shape = 16, settings.chunks * count * cfg.live.chunk, side, side
    for start in range(0, len(listed), settings.batch):
        rows = listed[start : start + settings.batch]
        texts = teach_demo.spoken(networks, [prompt for row in rows for prompt in row]).unflatten(0, (len(rows), count))
        seeds = (torch.Generator().manual_seed(settings.seed + start + place) for place in range(len(rows)))
        noise = torch.stack([torch.randn(shape, generator=seed) for seed in seeds]).to(device)
        for part in generate(cfg, transformer, texts, plan, noise).split(settings.decoded):
            videos += [judge_demo.to_frames(video) for video in teach_tiny_vae.decode(tiny, part)]
        say(stage="judge", videos=len(videos))
    return videos


def judge(cfg: DictConfig, networks: dict, folder: Path) -> dict:
    """Rates of stored weights on held-out prompts and on those that follow them, as metrics.json has them."""
    import judge_demo

    transformer = stored(networks, folder)
    listed, scenes = zip(*world.held_out_changes(cfg.judge.prompts))
    videos, change = show(cfg, networks, transformer, list(listed)), frames_of(cfg, cfg.judge.chunks)
    parts = {"held_out": slice(0, change), "after_change": slice(change + SETTLED, None)}
    rates = {}
    for place, (name, part) in enumerate(parts.items()):
        verdicts = [judge_demo.judge_live(video[part], row[place]) for video, row in zip(videos, scenes)]
        rates[name] = judge_demo.shares(verdicts)[0]
    return rates | {"held_out_prompts": len(videos)}


CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---
# The demo model, live

The [demo model's](../demo/README.md) transformer, 14 MB, made causal: a video without an end, chunk by chunk, that
follows prompts which change. Text encoder, tokenizer and decoder are the demo's.

- **What it does**: chunks of {chunk} latent frames in {steps} steps without guidance, each after the {earlier} chunks
  before it (`live=demo`), decoded by the demo's tiny decoder. Things that leave at one side come in at the other, and
  what has grown begins anew. What a new prompt does not say goes on: where a thing is, and how it moves if that stays
  the same.
- **What it does not**: anything that the demo does not draw. Prompts that follow must name the background too. Speeds
  and sizes are always the usual ones.
- **Training**: `tools/teach_live.py`, {minutes:g} minutes on {hardware}, from {begun}; videos drawn by
  `tools/demo_world.py`. `metrics.json` has the command, commit, settings, versions, seconds and results.
- **How good**: {count} videos of two prompts, each for {seconds:.0f} seconds, whose combinations of colour, shape and
  motion were kept from training. `tools/judge_demo.py` finds right: with the first prompt {held_out}; after the change
  {after_change}.
- **Licence**: Apache-2.0, as the project.
"""


def card(cfg: DictConfig, metrics: dict) -> str:
    def told(name: str) -> str:
        return ", ".join(f"{aspect} {100 * metrics[name][aspect]:.1f} %" for aspect in ("colour", "shape", "motion"))

    begun = "weights of an earlier run" if metrics["settings"]["start_from"] else "the demo's transformer"
    return CARD.format(
        begun=begun,
        chunk=cfg.live.chunk, steps=len(cfg.sigmas), earlier=cfg.live.window // cfg.live.chunk - 1,
        minutes=metrics["settings"]["minutes"], hardware=metrics["hardware"], count=metrics["held_out_prompts"],
        seconds=cfg.judge.chunks * cfg.live.chunk * SCALE / FPS, held_out=told("held_out"),
        after_change=told("after_change"),
    )


# ---------------------------------------------------------------- running


def run(cfg: DictConfig, judged: str | None) -> None:
    cfg = with_live(cfg)
    folder = teach_and_judge(cfg, judged, teach_demo.load, teach, judge)
    (folder / "README.md").write_text(card(cfg, json.loads((folder / "metrics.json").read_text())))


if __name__ == "__main__":
    teaching(__doc__, "teach_live", run)
