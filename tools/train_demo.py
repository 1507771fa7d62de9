"""Train the demo model: a miniature of Wan 2.1 that draws the world of demo_world.py.

    python tools/train_demo.py                        # everything, about a quarter of an hour on one H200
    python tools/train_demo.py denoiser.minutes=30    # any key of tools/conf/train_demo.yaml
    python tools/train_demo.py --smoke                # a few steps on the CPU
    python tools/train_demo.py --init                 # only an untrained model, to build on

First the VAE learns to rebuild clips and the text encoder to tell what a caption says; then text encoder and
transformer learn together to take noise out of the VAE's latents (flow matching). Data is drawn as it is needed.
A stopped run goes on where it was: run the same command again.
The best checkpoint by judged adherence ends up in <output>/model, with metrics.json beside it.
"""
from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from random import Random

import demo_world as world
import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, WanRMS_norm
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch.nn import functional
from training import (
    Clock,
    Every,
    Recorded,
    about,
    apply_gradients,
    autocast,
    build_optimizers,
    command_line,
    learning_rate,
    load_optimizers,
    say,
    set_rate,
    write_metrics,
)
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

CAPTION_TOKENS = 39  # longer than any caption of the world
STORED = {"text_encoder": "model.safetensors", "transformer": "diffusion_pytorch_model.safetensors",
          "vae": "diffusion_pytorch_model.safetensors"}


# ---------------------------------------------------------------- models


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words of the world, single ASCII characters for other words, bytes for everything else."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocabulary += [("▁" + word, -1.0) for word in world.vocabulary() if word.isalpha()]
    vocabulary += [("▁", -5.0)] + [(chr(code), -6.0) for code in range(33, 127)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=world.PROMPT_TOKENS,
    )


def build_models(cfg: DictConfig, device: torch.device) -> dict[str, torch.nn.Module]:
    """The three networks in float32: those of `start_from`, or new ones, seeded."""
    torch.manual_seed(cfg.seed)
    text = UMT5Config(feed_forward_proj="gated-gelu", dropout_rate=0.0, is_encoder_decoder=False, use_cache=False,
                      pad_token_id=0, eos_token_id=1, **cfg.model.text_encoder)
    networks = {
        "text_encoder": UMT5EncoderModel(text),
        "transformer": WanTransformer3DModel(in_channels=16, out_channels=16, **cfg.model.transformer),
        "vae": AutoencoderKLWan(**cfg.model.vae),
    }
    look_away_from_padding(networks["transformer"])
    for name, folder in cfg.start_from.items():
        if folder:
            networks[name] = type(networks[name]).from_pretrained(folder, subfolder=name)
    return {name: network.float().to(device).train() for name, network in networks.items()}


@torch.no_grad()
def look_away_from_padding(transformer: WanTransformer3DModel) -> None:
    """Begin with attention on a prompt's few words, which five hundred paddings would drown.

    Padding is zeros, so with these biases its key is -0.01 everywhere, which the norm makes -1; queries are around 0.6.
    """
    text = transformer.condition_embedder.text_embedder
    text.linear_1.bias.zero_()
    text.linear_2.bias.zero_()
    for block in transformer.blocks:
        block.attn2.to_k.bias.fill_(-0.01)
        block.attn2.to_q.bias.fill_(0.6)


def pipeline_of(cfg: DictConfig, networks: dict[str, torch.nn.Module]) -> WanPipeline:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True,
                                        num_train_timesteps=1000, **cfg.model.scheduler)
    return WanPipeline(tokenizer=build_tokenizer(), scheduler=scheduler, **networks)


def export(cfg: DictConfig, networks: dict[str, torch.nn.Module], folder: Path) -> None:
    """Write the pipeline in diffusers' layout, weights as float16."""
    pipeline_of(cfg, networks).save_pretrained(folder, safe_serialization=True)
    for name, file in STORED.items():
        weights = load_file(folder / name / file)
        halves = {key: value.half().contiguous() for key, value in weights.items()}
        save_file(halves, folder / name / file, metadata={"format": "pt"})
    # The general class name is the one every release of transformers knows.
    _edit_json(folder / "model_index.json", tokenizer=["transformers", "PreTrainedTokenizerFast"])
    _edit_json(folder / "tokenizer/tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    # transformers loads in the dtype it finds here.
    _edit_json(folder / "text_encoder/config.json", dtype="float32")


def _edit_json(path: Path, **values) -> None:
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


# ---------------------------------------------------------------- data


class Scenes(torch.utils.data.IterableDataset):
    """An endless stream of batches: things [batch, 2, fields], backgrounds [batch, 3], tokens [batch, CAPTION_TOKENS]
    and labels [batch, world.LABELS]."""

    def __init__(self, batch: int, seed: int, caption=world.caption):
        self.batch, self.seed, self.caption = batch, seed, caption

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        random = Random(f"{self.seed} {worker.id if worker else 0}")
        tokenizer = build_tokenizer()
        while True:
            scenes = [world.sample_scene(random) for _ in range(self.batch)]
            things, backgrounds = zip(*(world.motion_numbers(scene, random) for scene in scenes))
            captions = [self.caption(scene, random) for scene in scenes]
            labels = torch.tensor([world.labels(scene) for scene in scenes])
            yield torch.stack(things), torch.stack(backgrounds), tokenize(tokenizer, captions), labels


def tokenize(tokenizer: PreTrainedTokenizerFast, captions: list[str]) -> torch.Tensor:
    """Token ids [captions, CAPTION_TOKENS], padded with 0."""
    return tokenizer(
        captions, padding="max_length", max_length=CAPTION_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


def stream(cfg: DictConfig, batch: int, seed: int, caption=world.caption):
    """Batches of scenes from the workers; another seed gives other scenes."""
    loader = torch.utils.data.DataLoader(Scenes(batch, seed, caption), batch_size=None, num_workers=cfg.workers)
    return iter(loader)


class Bank:
    """A store of encoded clips and their captions on the device, from which batches are drawn at random.

    Encoding a clip costs about as much as a training step on it, so each clip is used several times while new
    ones keep replacing the oldest.
    """

    def __init__(self, cfg: DictConfig, vae: AutoencoderKLWan, device: torch.device):
        self.vae, self.device, self.capacity, self.clip_size = vae, device, cfg.denoiser.bank, cfg.clip_size
        self.latents: torch.Tensor | None = None  # [capacity, 16, 5, 16, 16]
        self.tokens = torch.zeros(self.capacity, CAPTION_TOKENS, dtype=torch.int32, device=device)
        self.added, self.filled = 0, torch.zeros((), device=device)
        self.mean, self.deviation = latent_statistics(vae, device)

    @torch.no_grad()
    def add(self, things: torch.Tensor, backgrounds: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        clips = world.render(things.to(self.device), backgrounds.to(self.device), size=self.clip_size)
        with autocast(self.device):
            latents = encode_whole(self.vae, clips)[0]
        if self.latents is None:
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            self.latents = torch.zeros(self.capacity, *latents.shape[1:], dtype=dtype, device=self.device)
        places = torch.arange(self.added, self.added + len(tokens), device=self.device) % self.capacity
        self.latents[places] = latents.to(self.latents.dtype)
        self.tokens[places] = tokens.to(self.device, torch.int32)
        self.added += len(tokens)
        self.filled.fill_(min(self.added, self.capacity))

    def draw(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised latents, token ids) of `batch` clips."""
        chosen = (torch.rand(batch, device=self.device) * self.filled).long().clamp(max=self.capacity - 1)
        return (self.latents[chosen].float() - self.mean) / self.deviation, self.tokens[chosen].long()


def latent_statistics(vae: AutoencoderKLWan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents' mean and deviation that the VAE's config states, each [1, channels, 1, 1, 1]."""
    config = vae.config
    return tuple(
        torch.tensor(list(values), device=device)[None, :, None, None, None]
        for values in (config.latents_mean, config.latents_std)
    )


# ---------------------------------------------------------------- stage one: the VAE


class QuickNorm(WanRMS_norm):
    """Wan's norm without its steps in float32, which take as long as the convolutions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp(min=1e-12)
        return x * (self.scale / size).to(x.dtype) * self.gamma.to(x.dtype)


class WholeResample(WanResample):
    """Wan's resampling, also for whole clips: a fifth of the launches of four frames at a time, the same function."""

    def forward(self, x: torch.Tensor, feat_cache=None, feat_idx=None) -> torch.Tensor:
        if feat_cache is not None:  # four frames at a time
            return super().forward(x, feat_cache, feat_idx)
        first, rest = x[:, :, :1], x[:, :, 1:]
        if self.mode == "upsample3d" and rest.shape[2]:
            doubled = self.time_conv(rest).unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
            x = torch.cat((first, doubled), 2)
        x = super().forward(x)
        if self.mode == "downsample3d" and rest.shape[2]:
            x = torch.cat((x[:, :, :1], self.time_conv(x)), 2)
        return x


def take_whole_clips(vae: AutoencoderKLWan) -> None:
    """Make `encode_whole` and `decode_whole` possible; the VAE's own methods stay what they are."""
    for module in vae.modules():
        module.__class__ = {WanResample: WholeResample, WanRMS_norm: QuickNorm}.get(type(module), type(module))
    for weight in vae.parameters():
        if weight.ndim == 5:  # the layout GPUs convolve in
            weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)


def encode_whole(vae: AutoencoderKLWan, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and logarithm of the variance of the clips' latents."""
    mean, logvar = vae.quant_conv(vae.encoder(clips)).float().chunk(2, 1)
    return mean, logvar.clamp(-30, 20)


def decode_whole(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Clips, not clamped to -1..1: a clamp would leave the farthest pixels without a gradient."""
    return vae.decoder(vae.post_quant_conv(latents))


def train_vae(cfg: DictConfig, vae: AutoencoderKLWan, state: dict, device: torch.device) -> None:
    """Teach the VAE to rebuild clips; at the end its config holds the latents' mean and deviation."""
    saved = state.get("vae", {})
    clock = Clock(cfg.vae.minutes, cfg.vae.steps, **saved.get("clock", {}))
    for part in (vae.encoder, vae.quant_conv):
        part.requires_grad_(cfg.vae.train_encoder)
    optimizers = build_optimizers(vae, 0.0, cfg.vae.muon)
    if saved:
        vae.load_state_dict(saved["weights"])
        load_optimizers(optimizers, saved)
    batches, checkpoint_due = stream(cfg, cfg.vae.batch, cfg.seed + clock.step), Every(cfg.vae.checkpoint_minutes)
    recorded = {}
    while clock.progress < 1:
        frames = next(frames for until, frames in cfg.vae.frames if clock.progress < until)
        clips = vae_clips(cfg, next(batches), frames, device)
        if frames not in recorded:
            recorded = {frames: Recorded(lambda clips: vae_step(cfg, vae, optimizers, clips), device, clips)}
        set_rate(optimizers, learning_rate(cfg.vae.learning_rate, clock, 100))
        error, kl = recorded[frames](clips)
        clock.step += 1
        if clock.step % 200 == 1:
            say(stage="vae", **clock.state(), frames=frames, error=error.item(), kl=kl.item())
        if checkpoint_due() or clock.progress >= 1:
            state["vae"] = {
                "weights": vae.state_dict(),
                "optimizers": [one.state_dict() for one in optimizers],
                "clock": clock.state(),
            }
            save_state(cfg, state)
    statistics = vae.config.latents_mean, vae.config.latents_std
    state["vae"]["latents"] = measure_latents(cfg, vae, batches, device) if cfg.vae.train_encoder else statistics
    save_state(cfg, state)


def vae_clips(cfg: DictConfig, batch, frames: int, device: torch.device) -> torch.Tensor:
    """A window of each clip, the same for all: [batch, 3, frames, crop, crop]."""
    things, backgrounds = batch[:2]
    start, top, left = (
        int(torch.randint(whole - part + 1, ()))
        for whole, part in ((world.FRAMES, frames), (cfg.clip_size, cfg.vae.crop), (cfg.clip_size, cfg.vae.crop))
    )
    times = slice(start, start + frames)
    clips = world.render(things.to(device), backgrounds.to(device), size=cfg.clip_size, times=times)
    return clips[..., top : top + cfg.vae.crop, left : left + cfg.vae.crop].contiguous()


def vae_step(cfg: DictConfig, vae: AutoencoderKLWan, optimizers: list[torch.optim.Optimizer], clips: torch.Tensor):
    """One step of training; returns (squared error, kl)."""
    with autocast(clips.device):
        mean, logvar = encode_whole(vae, clips)
        rebuilt = decode_whole(vae, mean + (0.5 * logvar).exp() * torch.randn_like(mean))
    difference = rebuilt.float() - clips
    error = difference.square().mean()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    (error + 0.05 * difference.abs().mean() + cfg.vae.kl_weight * kl).backward()
    apply_gradients(optimizers)
    return error.detach(), kl.detach()


@torch.no_grad()
def measure_latents(cfg: DictConfig, vae: AutoencoderKLWan, batches, device: torch.device):
    """Mean and deviation of every latent channel over a few hundred clips, as two lists."""
    latents = []
    for _ in range(math.ceil(min(512, 4 * cfg.vae.batch) / cfg.vae.batch)):
        things, backgrounds = next(batches)[:2]
        clips = world.render(things.to(device), backgrounds.to(device), size=cfg.clip_size)
        latents.append(vae.encode(clips).latent_dist.sample().transpose(0, 1).flatten(1))
    latents = torch.cat(latents, 1)
    return [round(v, 5) for v in latents.mean(1).tolist()], [round(v, 5) for v in latents.std(1).tolist()]


@torch.no_grad()
def rebuild_psnr(vae: AutoencoderKLWan, clips: int = 32, size: int = world.SIZE, seed: int = 99) -> float:
    """Mean peak signal-to-noise ratio in dB of rebuilt clips, encoded to the mean latent."""
    random, device = Random(seed), vae.device
    ratios = []
    for _ in range(clips):
        things, background = world.motion_numbers(world.sample_scene(random, world.COMBINATIONS), random)
        clip = world.render(things[None].to(device), background[None].to(device), size=size)
        rebuilt = vae.decode(vae.encode(clip).latent_dist.mode()).sample
        ratios.append(10 * math.log10(4 / (rebuilt - clip).square().mean().item()))
    return float(np.mean(ratios))


# ---------------------------------------------------------------- stage two: reading


def train_text(cfg: DictConfig, encoder: UMT5EncoderModel, state: dict, device: torch.device) -> None:
    """Teach the text encoder to put what a caption says into every word, where the transformer finds it at once."""
    head = torch.nn.Linear(encoder.config.d_model, sum(len(names) + 1 for names in world.LABELS), device=device)
    optimizers = build_optimizers(torch.nn.ModuleList((encoder, head)), 0.0, cfg.text.muon)
    clock, batches = Clock(math.inf, cfg.text.steps), stream(cfg, cfg.text.batch, cfg.seed + 2)

    def step(tokens, labels):
        loss, right = reading_loss(encoder, head, tokens, labels)
        loss.backward()
        apply_gradients(optimizers)
        return loss.detach(), right

    recorded = None
    while clock.progress < 1:
        examples = [value.to(device) for value in next(batches)[2:]]
        recorded = recorded or Recorded(step, device, *examples)
        set_rate(optimizers, learning_rate(cfg.text.learning_rate, clock, 100))
        loss, right = recorded(*examples)
        clock.step += 1
        if clock.step % 250 == 0 or clock.progress >= 1:
            say(stage="text", **clock.state(), loss=loss.item(), right=right.item())
    state["text"] = {"weights": encoder.state_dict(), "clock": clock.state()}
    save_state(cfg, state)


def reading_loss(encoder: UMT5EncoderModel, head: torch.nn.Linear, tokens: torch.Tensor, labels: torch.Tensor):
    """(cross entropy of the scene's labels as each word tells them, share of them told right)."""
    mask = tokens != 0
    with autocast(tokens.device):
        guesses = head(encoder(tokens, mask.long()).last_hidden_state).float()
    loss, right = 0.0, 0.0
    for guess, label in zip(guesses.split([len(names) + 1 for names in world.LABELS], -1), labels.unbind(1)):
        label = label[:, None].expand(mask.shape)
        entropy = functional.cross_entropy(guess.transpose(1, 2), label, reduction="none")
        loss = loss + (entropy * mask).sum() / mask.sum()
        right = right + ((guess.argmax(-1) == label) * mask).sum() / mask.sum() / len(world.LABELS)
    return loss, right


# ---------------------------------------------------------------- stage three: text encoder and transformer


class QuickAttention:
    """What diffusers' processor does, quicker to train: one padding stands for all; pairs are turned without copies.

    The last token of the text is that padding: to attend to n equal tokens is to attend to one with log(n) more. A
    prompt has `tokens`, and before them come those of a picture, as many as `shown`.
    """

    def __init__(self, tokens: int = world.PROMPT_TOKENS, shown: int = 0):
        self.tokens, self.shown = tokens, shown

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states[:, self.shown :]
        query, key, value = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(text)), attn.to_v(text)
        query, key, value = (one.unflatten(2, (attn.heads, -1)) for one in (query, key, value))
        if rotary_emb is not None:
            query, key = turn_pairs(query, *rotary_emb), turn_pairs(key, *rotary_emb)
        query, key, value = (one.to(value.dtype).transpose(1, 2) for one in (query, key, value))
        bias = None
        if encoder_hidden_states is not None:
            bias = query.new_zeros(1, 1, 1, text.shape[1])
            bias[..., -1] = math.log(self.tokens - text.shape[1] + 1)
        seen = functional.scaled_dot_product_attention(query, key, value, bias)
        if self.shown and encoder_hidden_states is not None:
            picture = encoder_hidden_states[:, : self.shown]
            key, value = attn.norm_added_k(attn.add_k_proj(picture)), attn.add_v_proj(picture)
            key, value = (one.to(query.dtype).unflatten(2, (attn.heads, -1)).transpose(1, 2) for one in (key, value))
            seen = seen + functional.scaled_dot_product_attention(query, key, value)
        return attn.to_out[0](seen.transpose(1, 2).flatten(2))


def attend_quickly(transformer: WanTransformer3DModel, quick: QuickAttention | None = None) -> None:
    quick = quick or QuickAttention()
    for block in transformer.blocks:
        block.attn1.processor = block.attn2.processor = quick


def turn_pairs(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; x [batch, tokens, heads, channels]."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosines[..., 0::2], sines[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


def read(encoder: UMT5EncoderModel, tokens: torch.Tensor) -> torch.Tensor:
    """Embeddings of captions, then one padding: [captions, CAPTION_TOKENS + 1, channels]."""
    mask = (tokens != 0).long()
    return functional.pad(encoder(tokens, mask).last_hidden_state * mask[..., None], (0, 0, 0, 1))


class Denoiser(torch.nn.Module):
    """Text encoder and transformer as one module, so that they share optimizers and an average."""

    def __init__(self, text_encoder: UMT5EncoderModel, transformer: WanTransformer3DModel):
        super().__init__()
        self.text_encoder, self.transformer = text_encoder, transformer

    def pad_once(self) -> Denoiser:
        """The same function of CAPTION_TOKENS and one padding instead of a whole prompt's."""
        attend_quickly(self.transformer)
        return self

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Velocity [batch, 16, time, height, width]."""
        return self.transformer(latents, timestep, read(self.text_encoder, tokens), return_dict=False)[0]


def flow_loss(cfg: DictConfig, denoiser: Denoiser, latents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the velocity from clip to noise at random noise levels."""
    level = torch.rand(len(latents), device=latents.device)
    level = cfg.denoiser.shift * level / (1 + (cfg.denoiser.shift - 1) * level)
    noise = torch.randn_like(latents)
    mixed = torch.lerp(latents, noise, level[:, None, None, None, None])
    # The empty caption is the end token alone.
    empty = functional.pad(torch.ones_like(tokens[:, :1]), (0, tokens.shape[1] - 1))
    dropped = torch.rand(len(tokens), 1, device=tokens.device) < cfg.denoiser.caption_dropout
    with autocast(latents.device):
        velocity = denoiser(mixed, level * 1000, torch.where(dropped, empty, tokens))
    return functional.mse_loss(velocity.float(), noise - latents)


def denoiser_step(cfg: DictConfig, denoiser: Denoiser, average: Denoiser, optimizers: list[torch.optim.Optimizer],
                  bank: Bank) -> torch.Tensor:
    """One step on clips from the bank; the average of the weights follows. Returns the loss."""
    loss = flow_loss(cfg, denoiser, *bank.draw(cfg.denoiser.batch))
    loss.backward()
    apply_gradients(optimizers)
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(denoiser.parameters()), 1 - cfg.denoiser.ema)
    return loss.detach()


def train_denoiser(cfg: DictConfig, networks: dict[str, torch.nn.Module], state: dict, device: torch.device) -> None:
    """Teach copies of text encoder and transformer; the networks are the average of their weights."""
    average = Denoiser(networks["text_encoder"], networks["transformer"]).requires_grad_(False)
    denoiser = deepcopy(average).requires_grad_(True).pad_once()
    optimizers = build_optimizers(denoiser, cfg.denoiser.weight_decay, cfg.denoiser.muon)
    saved = state.get("denoiser", {})
    if saved:
        denoiser.load_state_dict(saved["weights"])
        average.load_state_dict(saved["average"])
        load_optimizers(optimizers, saved)
    clock = Clock(cfg.denoiser.minutes, cfg.denoiser.steps, **saved.get("clock", {}))
    batches = stream(cfg, cfg.denoiser.refresh, cfg.seed + 1 + clock.step)
    bank = fill_bank(cfg, networks["vae"], batches, device)
    if cfg.compile:
        denoiser.compile(fullgraph=True)
    step = Recorded(lambda: denoiser_step(cfg, denoiser, average, optimizers, bank), device)
    evaluation_due, checkpoint_due = Every(cfg.evaluate.every_minutes), Every(cfg.denoiser.checkpoint_minutes)
    while clock.progress < 1:
        if clock.step % cfg.denoiser.refresh_every == 0:
            bank.add(*next(batches))
        set_rate(optimizers, learning_rate(cfg.denoiser.learning_rate, clock, cfg.denoiser.warmup_steps))
        loss = step()
        clock.step += 1
        if clock.step % 200 == 1:
            say(stage="denoiser", **clock.state(), loss=loss.item(), clips=bank.added)
        finished = clock.progress >= 1
        if clock.progress >= cfg.evaluate.from_progress and (evaluation_due() or finished):
            keep_best(cfg, networks["vae"], average, clock, state)
        if checkpoint_due() or clock.progress >= 1:  # judging takes time: it may be over only now
            state["denoiser"] = {"weights": denoiser.state_dict(), "average": average.state_dict(),
                                 "optimizers": [one.state_dict() for one in optimizers], "clock": clock.state()}
            save_state(cfg, state)


def fill_bank(cfg: DictConfig, vae: AutoencoderKLWan, batches, device: torch.device) -> Bank:
    bank = Bank(cfg, vae, device)
    while bank.added < cfg.denoiser.bank_start:
        bank.add(*next(batches))
    say(stage="bank", clips=bank.added)
    return bank


# ---------------------------------------------------------------- judging


@torch.no_grad()
def draw_prompts(cfg: DictConfig, networks: dict[str, torch.nn.Module], prompts: list[str]) -> list[np.ndarray]:
    """Clips [17, 128, 128, 3] through diffusers' own pipeline, prompt k with the configured seed + k."""
    pipeline = pipeline_of(cfg, networks)
    pipeline.set_progress_bar_config(disable=True)
    noise = [torch.Generator("cpu").manual_seed(cfg.evaluate.seed + k) for k in range(len(prompts))]
    clips = pipeline(list(prompts), generator=noise, height=world.SIZE, width=world.SIZE, num_frames=world.FRAMES,
                     num_inference_steps=cfg.evaluate.steps, guidance_scale=cfg.evaluate.guidance,
                     max_sequence_length=world.PROMPT_TOKENS, output_type="np").frames
    return list((clips * 255).round().astype(np.uint8))


def measure(cfg: DictConfig, vae: AutoencoderKLWan, denoiser: Denoiser, listed) -> dict[str, float]:
    """Share of the listed (prompt, scene) pairs in which each aspect is drawn right."""
    import judge_demo

    prompts, scenes = zip(*listed)
    networks = {"vae": vae, "text_encoder": denoiser.text_encoder, "transformer": denoiser.transformer}
    return judge_demo.adherence(draw_prompts(cfg, networks, prompts), scenes)[0]


def keep_best(cfg: DictConfig, vae: AutoencoderKLWan, average: Denoiser, clock: Clock, state: dict) -> None:
    """Judge the averaged weights on the validation prompts; keep and export them if they are the best so far."""
    rates = measure(cfg, vae, average, world.validation_prompts())
    score = np.mean([rates[aspect] for aspect in ("colour", "shape", "motion")]).item()
    say(stage="validation", **clock.state(), score=score, **rates)
    if score >= state.get("best", {"score": -1})["score"]:
        state["best"] = {"score": score, "step": clock.step, "rates": rates,
                         "weights": {key: value.cpu().clone() for key, value in average.state_dict().items()}}
        networks = {"vae": vae, "text_encoder": average.text_encoder, "transformer": average.transformer}
        export(cfg, networks, Path(cfg.output) / "model")


def finish(cfg: DictConfig, networks: dict[str, torch.nn.Module], state: dict) -> None:
    """Export the best checkpoint and write its metrics.json; a run that judged nothing exports its last average."""
    denoiser = Denoiser(networks["text_encoder"], networks["transformer"])
    denoiser.load_state_dict(state["best"]["weights"] if "best" in state else state["denoiser"]["average"])
    folder = Path(cfg.output) / "model"
    export(cfg, networks, folder)
    stages = {name: stage["clock"] for name, stage in state.items() if "clock" in stage}
    metrics = about(cfg, stages) | {"seconds": round(sum(stage["elapsed"] for stage in stages.values()), 1)}
    if "best" in state:
        metrics["vae_psnr_db"] = round(rebuild_psnr(networks["vae"]), 2)
        metrics["best_step"] = state["best"]["step"]
        metrics["validation"] = state["best"]["rates"]
        metrics["held_out"] = measure(cfg, networks["vae"], denoiser, world.held_out_prompts())
        metrics["held_out_prompts"] = len(world.held_out_prompts())
        say(stage="held_out", psnr=metrics["vae_psnr_db"], **metrics["held_out"])
    write_metrics(folder, metrics)


# ---------------------------------------------------------------- running


def save_state(cfg: DictConfig, state: dict) -> None:
    """Write state.pt whole or not at all."""
    path = Path(cfg.output) / "state.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def train(cfg: DictConfig) -> None:
    """All stages, from wherever <output>/state.pt says the last run stopped."""
    if cfg.device == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        device = torch.device(cfg.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    path = Path(cfg.output) / "state.pt"
    state = torch.load(path, map_location=device, weights_only=False) if path.exists() else {}
    networks = build_models(cfg, device)
    vae = networks["vae"]
    take_whole_clips(vae)
    if cfg.vae.minutes and "latents" not in state.get("vae", {}):
        train_vae(cfg, vae, state, device)
    if "vae" in state:
        vae.load_state_dict(state["vae"]["weights"])
        mean, deviation = state["vae"]["latents"]
        vae.register_to_config(latents_mean=mean, latents_std=deviation)
    vae.requires_grad_(False)
    export(cfg, networks, Path(cfg.output) / "model")
    say(stage="vae", done=True, psnr=rebuild_psnr(vae, clips=2, size=cfg.clip_size))
    if cfg.text.steps and "text" not in state:
        train_text(cfg, networks["text_encoder"], state, device)
    if "text" in state:
        networks["text_encoder"].load_state_dict(state["text"]["weights"])
    train_denoiser(cfg, networks, state, device)
    finish(cfg, networks, state)


def main() -> None:
    flag = dict(action="store_true", help="write an untrained model and stop")
    arguments, cfg = command_line(__doc__, "train_demo", "--init", **flag)
    if arguments.init:
        export(cfg, build_models(cfg, torch.device("cpu")), Path(cfg.output) / "model")
    else:
        train(cfg)


if __name__ == "__main__":
    main()
