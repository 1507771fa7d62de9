"""Teach the demo model more and leave it as it is: to start from a picture, to draw in four steps, to draw in a style.

    python tools/teach_demo.py what=i2v                 # a transformer that takes a picture, as Wan 2.2's do
    python tools/teach_demo.py what=four_steps          # an adapter: four steps, no guidance
    python tools/teach_demo.py what=outline             # an adapter: things as outlines
    python tools/teach_demo.py what=i2v i2v.minutes=9   # any key of tools/conf/teach_demo.yaml
    python tools/teach_demo.py --smoke what=i2v         # a few steps on the CPU
    python tools/teach_demo.py --judge models/demo_i2v what=i2v      # stored weights, on the held-out prompts once more

Weights and metrics.json go into `output`. The weights are written every minute, at the end of the time, and before
they are judged; what is judged is what was written.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import demo_world as world
import diffusers
import numpy as np
import torch
import train_demo
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanTransformer3DModel
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from torch.nn import functional
from training import (
    Clock,
    Every,
    Recorded,
    apply_gradients,
    autocast,
    build_optimizers,
    learning_rate,
    say,
    set_rate,
    teach_and_judge,
    teaching,
)

MASK = 4  # channels: one for each frame that a latent frame stands for
WEIGHTS = {"i2v": "transformer/diffusion_pytorch_model.safetensors", "four_steps": "demo_4step.safetensors",
           "outline": "demo_outline.safetensors"}
Weights = dict[str, torch.Tensor]


# ---------------------------------------------------------------- data


class Shelf:
    """Rows of tensors on the device, from which batches are drawn at random; where it is full the oldest go."""

    def __init__(self, capacity: int, device: torch.device):
        self.capacity, self.device, self.columns = capacity, device, None
        self.added, self.filled = 0, torch.zeros((), device=device)

    def add(self, *rows: torch.Tensor) -> None:
        if self.columns is None:
            kind = torch.float16 if self.device.type == "cuda" else torch.float32
            self.columns = [torch.zeros(self.capacity, *row.shape[1:], dtype=kind, device=self.device) for row in rows]
        places = torch.arange(self.added, self.added + len(rows[0]), device=self.device) % self.capacity
        for column, values in zip(self.columns, rows):
            column[places] = values.to(column.dtype)
        self.added += len(rows[0])
        self.filled.fill_(min(self.added, self.capacity))

    def draw(self, batch: int) -> list[torch.Tensor]:
        chosen = (torch.rand(batch, device=self.device) * self.filled).long().clamp(max=self.capacity - 1)
        return [column[chosen].float() for column in self.columns]


@torch.no_grad()
def encode(vae, clips: torch.Tensor) -> torch.Tensor:
    """Normalised latents of clips."""
    mean, deviation = train_demo.latent_statistics(vae, clips.device)
    return (train_demo.encode_whole(vae, clips)[0] - mean) / deviation


def condition(vae, pictures: torch.Tensor, frames: int = world.FRAMES) -> torch.Tensor:
    """What Wan 2.2 is told of pictures [n, 3, height, width]: a mask of four channels, 1 in the first latent frame, and
    the latents of a video that begins with the picture and is grey from then on."""
    video = torch.zeros(*pictures.shape[:2], frames, *pictures.shape[2:], device=pictures.device)
    video[:, :, 0] = pictures
    latents = encode(vae, video)
    mask = torch.zeros_like(latents[:, :MASK])
    mask[:, :, 0] = 1
    return torch.cat((mask, latents), 1)


def picture_caption(scene: world.Scene, random) -> str:
    """The whole scene in words, or only the motion."""
    return (world.caption if random.random() < 0.5 else world.motion_sentence)(scene, random)


# ---------------------------------------------------------------- models


def load(cfg: DictConfig, device: torch.device) -> dict:
    """The demo model's networks, which stay as they are."""
    kinds = {"text_encoder": transformers.UMT5EncoderModel, "transformer": WanTransformer3DModel,
             "vae": diffusers.AutoencoderKLWan}
    networks = {name: kind.from_pretrained(cfg.model, subfolder=name).float().to(device).requires_grad_(False)
                for name, kind in kinds.items()}
    train_demo.take_whole_clips(networks["vae"])
    train_demo.attend_quickly(networks["transformer"])
    return networks


def widen(transformer: WanTransformer3DModel) -> WanTransformer3DModel:
    """The same function with a picture's channels of input, which count for nothing yet."""
    added = MASK + transformer.config.out_channels
    channels = transformer.config.in_channels + added
    wide = WanTransformer3DModel.from_config({**transformer.config, "in_channels": channels})
    weights, patches = transformer.state_dict(), "patch_embedding.weight"
    weights[patches] = functional.pad(weights[patches], (0, 0) * 3 + (0, added))
    wide.load_state_dict(weights)
    train_demo.attend_quickly(wide)
    return wide.to(transformer.device)


class Adapted(torch.nn.Linear):
    """A linear layer with something of low rank added to its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight + self.up @ self.down, self.bias)


def adapt(transformer: WanTransformer3DModel, rank: int) -> WanTransformer3DModel:
    """A copy of which only what is added to its linear layers can be learned; at first that is nothing."""
    copied = deepcopy(transformer).requires_grad_(False)
    for module in list(copied.modules()):
        if type(module) is torch.nn.Linear:
            rows, columns = module.weight.shape
            module.__class__ = Adapted
            module.down = torch.nn.Parameter(torch.randn(rank, columns, device=module.weight.device) / columns**0.5)
            module.up = torch.nn.Parameter(torch.zeros(rows, rank, device=module.weight.device))
    return copied


def save_transformer(transformer: WanTransformer3DModel, weights: Weights, path: Path) -> None:
    """diffusers' layout, as float16."""
    transformer.save_config(path.parent)
    store({name: value.half() for name, value in weights.items()}, path)


def save_adapter(weights: Weights, path: Path) -> None:
    """diffusers' names, as bfloat16; alpha is the rank."""
    ends = {"down": "lora_A.weight", "up": "lora_B.weight"}
    named = {tuple(name.rsplit(".", 1)): value for name, value in weights.items()}
    store({f"transformer.{module}.{ends[end]}": value.bfloat16() for (module, end), value in named.items()}, path)


def store(weights: Weights, path: Path) -> None:
    """The whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, part, {"format": "pt"})
    part.replace(path)


def stored_transformer(cfg: DictConfig, transformer: WanTransformer3DModel, folder: Path) -> WanTransformer3DModel:
    """What a folder's weights make of the demo's transformer."""
    weights = {name: value.float() for name, value in load_file(folder / WEIGHTS[cfg.what]).items()}
    if cfg.what == "i2v":
        changed = widen(transformer)
        changed.load_state_dict(weights)
        return changed
    changed = deepcopy(transformer)
    for name, module in changed.named_modules():
        if f"transformer.{name}.lora_A.weight" in weights:
            down, up = (weights[f"transformer.{name}.lora_{end}.weight"] for end in "AB")
            module.weight += (up @ down).to(module.weight.device)
    return changed


# ---------------------------------------------------------------- learning


def train(cfg: DictConfig, settings: DictConfig, network: torch.nn.Module, losses: Callable | list[Callable],
          save: Callable[[Weights], None], refresh: Callable[[], None] = lambda: None) -> dict:
    """Lower a loss, or several in turn, until the time is up; each must be the same computation whenever it is called.
    The network ends as the average of its weights. Returns the clock's state."""
    learned = {name: value for name, value in network.named_parameters() if value.requires_grad}
    average = {name: value.detach().clone() for name, value in learned.items()}
    optimizers = build_optimizers(torch.nn.ModuleDict({"transformer": network}), cfg.weight_decay, settings.muon)

    def step(loss_of: Callable) -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        apply_gradients(optimizers)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.values()), list(learned.values()), 1 - settings.ema)
        return loss.detach()

    device = next(network.parameters()).device
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    losses = losses if isinstance(losses, list) else [losses]
    steps = itertools.cycle([Recorded(partial(step, loss), device, pool=pool) for loss in losses])
    clock, due, progress_due = Clock(settings.minutes, settings.steps), Every(cfg.checkpoint_minutes), Every(0.1)
    while clock.progress < 1:
        if clock.step % cfg.refresh_every == 0:
            refresh()
        set_rate(optimizers, learning_rate(settings.learning_rate, clock, cfg.warmup_steps))
        loss = next(steps)()
        clock.step += 1
        if clock.step == 1 or progress_due():
            say(stage=cfg.what, **clock.state(), loss=loss.item())
        if due():
            save(average)
    network.load_state_dict(average, strict=False)
    save(average)
    say(stage=cfg.what, **clock.state(), done=True)
    return clock.state()


def compiled(cfg: DictConfig, transformer: WanTransformer3DModel) -> WanTransformer3DModel:
    """Block by block: all are one program, which takes a sixth of the time to compile."""
    for block in transformer.blocks if cfg.compile else ():
        block.compile(fullgraph=True, dynamic=False)
    return transformer


def flow_loss(cfg: DictConfig, transformer: WanTransformer3DModel, empty: torch.Tensor, latents: torch.Tensor,
              text: torch.Tensor, *conditions: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the velocity from clip to noise at random noise levels, as the demo model was trained.
    Conditions are channels of the input, or go to the transformer by name."""
    level = torch.rand(len(latents), device=latents.device)
    level = cfg.shift * level / (1 + (cfg.shift - 1) * level)
    noise = torch.randn_like(latents)
    mixed = torch.lerp(latents, noise, level[:, None, None, None, None])
    dropped = torch.rand(len(text), 1, 1, device=text.device) < cfg.caption_dropout
    with autocast(latents.device):
        text = torch.where(dropped, empty, text)
        velocity = transformer(torch.cat((mixed, *conditions), 1), level * 1000, text, return_dict=False, **named)[0]
    return functional.mse_loss(velocity.float(), noise - latents)


def shelve(cfg: DictConfig, shelf: Shelf, batches, make: Callable) -> Callable[[], None]:
    """Fill a shelf with what is made of batches of scenes; returns what adds one more."""
    def add() -> None:
        with torch.no_grad(), autocast(shelf.device):
            shelf.add(*make(*(values.to(shelf.device) for values in next(batches)[:3])))

    while shelf.added < cfg.bank_start:
        add()
    say(stage="bank", clips=shelf.added)
    return add


def teach_i2v(cfg: DictConfig, networks: dict, save_to: Path, device: torch.device) -> dict:
    """Fine-tune the whole transformer with a picture's channels; text encoder and VAE are the demo's."""
    vae, encoder, empty = networks["vae"], networks["text_encoder"], empty_text(networks)
    transformer = widen(networks["transformer"]).requires_grad_(True)

    def make(things, backgrounds, tokens):
        clips = world.render(world.start_elsewhere(things), backgrounds, size=cfg.clip_size)
        return encode(vae, clips), train_demo.read(encoder, tokens), condition(vae, clips[:, :, 0])

    shelf = Shelf(cfg.bank, device)
    batches = train_demo.stream(cfg, cfg.refresh, cfg.seed + 1, picture_caption)
    refresh = shelve(cfg, shelf, batches, make)
    compiled(cfg, transformer)
    return {"i2v": train(cfg, cfg.i2v, transformer, lambda: flow_loss(cfg, transformer, empty, *shelf.draw(cfg.batch)),
                         lambda weights: save_transformer(transformer, weights, save_to), refresh)}


def teach_outline(cfg: DictConfig, networks: dict, save_to: Path, device: torch.device) -> dict:
    """An adapter, from clips in which things are outlines, with the same captions."""
    vae, encoder, empty = networks["vae"], networks["text_encoder"], empty_text(networks)
    transformer = adapt(networks["transformer"], cfg.outline.rank)

    def make(things, backgrounds, tokens):
        clips = world.render(things, backgrounds, size=cfg.clip_size, hollow=True)
        return encode(vae, clips), train_demo.read(encoder, tokens)

    shelf = Shelf(cfg.bank, device)
    refresh = shelve(cfg, shelf, train_demo.stream(cfg, cfg.refresh, cfg.seed + 1), make)
    compiled(cfg, transformer)
    return {"outline": train(cfg, cfg.outline, transformer,
                             lambda: flow_loss(cfg, transformer, empty, *shelf.draw(cfg.batch)),
                             lambda weights: save_adapter(weights, save_to), refresh)}


def teach_four_steps(cfg: DictConfig, networks: dict, save_to: Path, device: torch.device) -> dict:
    """An adapter whose four steps without guidance lead where the demo's twenty with guidance do.

    First each step alone learns to go from one point of the demo's way to the next; then all four together, from
    noise, learn to end where it ends.
    """
    sigmas = [*four_steps(cfg, "cpu").sigmas.tolist()]
    levels = torch.tensor(sigmas, device=device)
    shelf, clock = demo_ways(cfg, networks, len(sigmas), device)
    student = adapt(networks["transformer"], cfg.four_steps.rank)
    compiled(cfg, student)

    def velocity(latents, level, text):
        with autocast(device):
            return student(latents, level.expand(len(latents)) * 1000, text, return_dict=False)[0].float()

    def one_step() -> torch.Tensor:
        points, text = shelf.draw(cfg.batch)
        rows = torch.arange(len(points), device=device)
        place = torch.randint(len(sigmas) - 1, rows.shape, device=device)
        here, there, high, low = points[rows, place], points[rows, place + 1], levels[place], levels[place + 1]
        wanted = (here - there) / (high - low)[:, None, None, None, None]
        return functional.mse_loss(velocity(here, high, text), wanted)

    def all_steps() -> torch.Tensor:
        points, text = shelf.draw(cfg.batch)
        latents = points[:, 0]
        for high, low in itertools.pairwise(levels):
            latents = latents - (high - low) * velocity(latents, high, text)
        return functional.mse_loss(latents, points[:, -1])

    def save(weights: Weights) -> None:
        save_adapter(weights, save_to)

    return {"teacher": clock, "each": train(cfg, cfg.four_steps.each, student, one_step, save),
            "unrolled": train(cfg, cfg.four_steps.unrolled, student, all_steps, save)}


def demo_ways(cfg: DictConfig, networks: dict, points: int, device: torch.device) -> tuple[Shelf, dict]:
    """What the demo makes of noise with its own sampler: latents at the student's noise levels, and the text."""
    settings, side = cfg.four_steps.teacher, cfg.clip_size // 8
    clock, shelf = Clock(settings.minutes, settings.batches), Shelf(settings.batches * cfg.batch, device)
    batches, empty = train_demo.stream(cfg, cfg.batch, cfg.seed + 1), empty_text(networks)
    teacher = compiled(cfg, deepcopy(networks["transformer"]))

    def velocity(latents, moment, text):
        with autocast(device):
            return teacher(latents, moment.expand(len(latents)), text, return_dict=False)[0].float()

    while clock.progress < 1:
        with torch.no_grad(), autocast(device):
            text = train_demo.read(networks["text_encoder"], next(batches)[2].to(device))
        noise = torch.randn(cfg.batch, 16, (world.FRAMES - 1) // 4 + 1, side, side, device=device)
        way = draw(velocity, noise, [text, empty], demo_sampler(cfg, settings.steps, device), settings.guidance)
        shelf.add(torch.stack(way[:: settings.steps // (points - 1)], 1), text)
        clock.step += 1
    say(stage="teacher", **clock.state(), ways=shelf.added)
    return shelf, clock.state()


TEACH = {"i2v": teach_i2v, "four_steps": teach_four_steps, "outline": teach_outline}


# ---------------------------------------------------------------- drawing and judging


def empty_text(networks: dict) -> torch.Tensor:
    """The empty caption, which guidance leads away from: [1, CAPTION_TOKENS + 1, channels]."""
    return spoken(networks, [""])


@torch.no_grad()
def spoken(networks: dict, captions: list[str]) -> torch.Tensor:
    encoder = networks["text_encoder"]
    return train_demo.read(encoder, train_demo.tokenize(train_demo.build_tokenizer(), captions).to(encoder.device))


def demo_sampler(cfg: DictConfig, steps: int, device) -> UniPCMultistepScheduler:
    scheduler = UniPCMultistepScheduler.from_pretrained(cfg.model, subfolder="scheduler")
    scheduler.set_timesteps(steps, device=device)
    return scheduler


def four_steps(cfg: DictConfig, device) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=cfg.shift)
    scheduler.set_timesteps(sigmas=list(cfg.four_steps.sigmas), device=device)
    return scheduler


@torch.no_grad()
def draw(velocity: Callable, noise: torch.Tensor, texts: list[torch.Tensor], scheduler, guidance: float):
    """The latents before the first step and after each. Texts: the captions, and what guidance leads away from."""
    way = [noise]
    for moment in scheduler.timesteps:
        told = velocity(way[-1], moment, texts[0])
        if guidance > 1:
            untold = velocity(way[-1], moment, texts[1].expand(texts[0].shape))
            told = untold + guidance * (told - untold)
        way.append(scheduler.step(told, moment, way[-1], return_dict=False)[0])
    return way


@torch.no_grad()
def show(cfg: DictConfig, networks: dict, transformer: WanTransformer3DModel, captions: list[str],
         pictures: torch.Tensor | None = None) -> list[np.ndarray]:
    """Clips as frames of uint8: caption k with the configured seed + k, from its picture where there are some."""
    import judge_demo

    vae, device, settings, clips = networks["vae"], transformer.device, cfg.judge, []
    mean, deviation = train_demo.latent_statistics(vae, device)
    shape = 1, 16, (world.FRAMES - 1) // 4 + 1, cfg.clip_size // 8, cfg.clip_size // 8
    for start in range(0, len(captions), settings.batch):
        part = slice(start, start + settings.batch)
        text = spoken(networks, list(captions[part]))
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(settings.seed + start + k))
                 for k in range(len(text))]
        given = () if pictures is None else (condition(vae, pictures[part].to(device)),)

        def velocity(latents, moment, text, given=given):
            return transformer(torch.cat((latents, *given), 1), moment.expand(len(latents)), text, return_dict=False)[0]

        few = cfg.what == "four_steps"
        scheduler = four_steps(cfg, device) if few else demo_sampler(cfg, settings.steps, device)
        guidance = 1.0 if few else cfg[cfg.what].guidance
        latents = draw(velocity, torch.cat(noise).to(device), [text, empty_text(networks)], scheduler, guidance)
        videos = train_demo.decode_whole(vae, latents[-1] * deviation + mean)
        clips += [judge_demo.to_frames(video) for video in videos]
    return clips


def judge(cfg: DictConfig, networks: dict, folder: Path) -> dict:
    """Rates of stored weights on the held-out prompts, as metrics.json has them."""
    import judge_demo

    transformer = stored_transformer(cfg, networks["transformer"], folder)
    if cfg.what != "i2v":
        prompts, scenes = zip(*world.held_out_prompts()[: cfg.judge.prompts])
        clips = show(cfg, networks, transformer, prompts)
        outline = cfg.what == "outline"
        rates = judge_demo.outlined(clips, scenes) if outline else judge_demo.adherence(clips, scenes)[0]
        return {"held_out": rates, "held_out_prompts": len(prompts)}
    rates = {}
    for name, short in (("held_out", False), ("held_out_motion_only", True)):
        prompts, scenes, *numbers = zip(*world.held_out_pictures(short)[: cfg.judge.prompts])
        drawn = world.render(*map(torch.stack, numbers), size=cfg.clip_size, times=slice(0, 1))
        pictures = [judge_demo.to_frames(video)[0] for video in drawn]
        given = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
        clips = show(cfg, networks, transformer, prompts, given)
        ratios = [judge_demo.likeness(clip[0], picture) for clip, picture in zip(clips, pictures)]
        rates[name] = judge_demo.adherence(clips, scenes)[0] | {
            "first_frame_db": round(float(np.mean(ratios)), 2), "first_frame_db_least": round(min(ratios), 2)}
    return rates | {"held_out_prompts": len(prompts)}


# ---------------------------------------------------------------- running


def teach(cfg: DictConfig, networks: dict, folder: Path, device: torch.device) -> dict:
    return TEACH[cfg.what](cfg, networks, folder / WEIGHTS[cfg.what], device)


def run(cfg: DictConfig, judged: str | None) -> None:
    teach_and_judge(cfg, judged, load, teach, judge)


if __name__ == "__main__":
    teaching(__doc__, "teach_demo", run)
