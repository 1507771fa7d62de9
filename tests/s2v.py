"""Wan's speech-to-video by its own formulas, in torch: tokens of a reference and of earlier frames behind the video's,
a voice that the video attends to after some blocks, segments that are decoded behind what came before them.

    module = s2v.transformer(**architecture)                    # diffusers' with the layers that it lacks
    parts = s2v.make(pipeline, config, image, features, pose)   # of each segment
"""
import diffusers
import numpy
import torch
import transformers
from torch import nn
from torch.nn import functional

from tests import fun
from tests.reference import NEGATIVE, PROMPT

FIELDS = {"audio_inject_layers", "audio_dim", "num_audio_layers", "num_audio_token", "cond_dim", "motion_frames"}


class Causal(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 3, stride)

    def forward(self, hidden):
        """(batch, frames, channels)"""
        padded = functional.pad(hidden.transpose(1, 2), (2, 0), mode="replicate")
        return self.conv(padded).transpose(1, 2)


class Encoder(nn.Module):
    def __init__(self, channels, width, heads):
        super().__init__()
        self.heads = heads
        self.conv1_local, self.conv1_global = Causal(channels, width // 4 * heads), Causal(channels, width // 4)
        self.conv2, self.conv3 = Causal(width // 4, width // 2, 2), Causal(width // 2, width, 2)
        self.final_linear = nn.Linear(width, width)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, width))

    def rest(self, hidden):
        for layer in (nn.Identity(), self.conv2, self.conv3):
            hidden = layer(hidden)
            hidden = functional.silu(functional.layer_norm(hidden, hidden.shape[-1:], eps=1e-6))
        return hidden

    def forward(self, features):
        local = self.conv1_local(features).unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
        local = self.rest(local).unflatten(0, (-1, self.heads)).transpose(1, 2)
        learned = self.padding_tokens.expand(*local.shape[:2], 1, -1)
        return self.final_linear(self.rest(self.conv1_global(features))), torch.cat([local, learned], dim=2)


class Listener(nn.Module):
    """The published name is casual_audio_encoder."""

    def __init__(self, layers, channels, width, heads):
        super().__init__()
        self.encoder = Encoder(channels, width, heads)
        self.weights = nn.Parameter(torch.ones(1, layers, 1, 1) * 0.01)

    def forward(self, features):
        """(batch, layers, channels, frames)"""
        shares = functional.silu(self.weights)
        return self.encoder((features * shares / shares.sum(1, keepdim=True)).sum(1).transpose(1, 2))


class Injector(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, hidden, tokens, whole):
        """Of each latent frame (frames, tokens, width)."""
        shift, scale = self.linear(functional.silu(whole))[:, None].chunk(2, dim=2)
        hidden = functional.layer_norm(hidden, hidden.shape[-1:], eps=1e-5) * (1 + scale) + shift
        parts = self.norm_q(self.to_q(hidden)), self.norm_k(self.to_k(tokens)), self.to_v(tokens)
        split = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.to_out(functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))


def transformer(**architecture):
    fields = {name: architecture.pop(name) for name in FIELDS & architecture.keys()}
    module = diffusers.WanTransformer3DModel(**architecture)
    heads, channels = module.config.num_attention_heads, module.config.in_channels
    width, patch = heads * module.config.attention_head_dim, module.config.patch_size
    module.pose_patch_embedding = nn.Conv3d(fields["cond_dim"], width, patch, patch)
    features = fields["num_audio_layers"], fields["audio_dim"]
    module.casual_audio_encoder = Listener(*features, width, fields["num_audio_token"])
    module.audio_injector = nn.ModuleList(Injector(width, heads) for _ in fields["audio_inject_layers"])
    module.frame_packer = nn.ModuleDict({
        name: nn.Conv3d(channels, width, (size, 2 * size, 2 * size), (size, 2 * size, 2 * size))
        for name, size in (("proj", 1), ("proj_2x", 2), ("proj_4x", 4))
    })
    module.trainable_cond_mask = nn.Embedding(3, width)
    module.register_to_config(**fields)
    return module


def load(folder):
    return fun.load(folder, transformer)


def sound_encoder(**architecture):
    own = dict(feat_extract_norm="layer", do_stable_layer_norm=True, mask_time_prob=0.0, mask_feature_prob=0.0)
    return transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**architecture, **own))


@torch.no_grad()
def features(encoder, samples, fps, frames):
    """(frames, layers, channels): wav2vec 2.0's hidden states at 50 a second, resampled to 30, then to the video's."""
    samples = torch.tensor((samples - samples.mean()) / numpy.sqrt(samples.var() + 1e-7))
    hidden, layers = [], encoder.encoder.layers
    hooks = [layer.register_forward_pre_hook(lambda _, given: hidden.append(given[0])) for layer in layers]
    hidden.append(encoder(samples[None]).last_hidden_state)
    for hook in hooks:
        hook.remove()
    hidden = torch.cat(hidden).transpose(1, 2)
    resampled = functional.interpolate(hidden, int(hidden.shape[2] / 50 * 30), mode="linear", align_corners=True)
    made = torch.zeros(frames, *hidden.shape[:2])
    for frame, place in enumerate(numpy.round(numpy.arange(frames) / fps * 30).astype(int)):
        if place < resampled.shape[2]:
            made[frame] = resampled[:, :, place]
    return made


# ---------------------------------------------------------------- the transformer


def angles(head_dim, times, rows, columns):
    """RoPE's angles (tokens, head_dim / 2) of a box of positions."""
    side = 2 * (head_dim // 6)
    parts = []
    for axis, (size, places) in enumerate(zip((head_dim - 2 * side, side, side), (times, rows, columns))):
        rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        shape = [1, 1, 1, size // 2]
        shape[axis] = len(places)
        turned = torch.outer(torch.as_tensor(places, dtype=torch.float64), rates).reshape(shape)
        parts.append(turned.expand(len(times), len(rows), len(columns), -1))
    return torch.cat(parts, dim=3).flatten(0, 2)


def forward(module, latents, time, text, given):
    """The velocity of latents (1, channels, frames, height, width); motion is None in a first segment."""
    reference, motion, pose, features = given
    config, before = module.config, module.config.motion_frames
    heard = torch.cat([features[..., :1].repeat(1, 1, 1, before), features], dim=3)
    whole, tokens = (part[0, (before + 3) // 4 :] for part in module.casual_audio_encoder(heard))
    hidden = module.patch_embedding(latents) + module.pose_patch_embedding(pose)
    frames, height, width = hidden.shape[2:]
    hidden = [hidden.flatten(2).transpose(1, 2), module.patch_embedding(reference).flatten(2).transpose(1, 2)]
    boxes = [(range(frames), range(height), range(width)), ([30], range(height), range(width))]
    kinds = [0, 1]
    if motion is not None:
        for name, part, times, size in (
            ("proj", motion[:, :, -1:], [-1], 1), ("proj_2x", motion[:, :, -3:-1], [-3], 2),
            ("proj_4x", motion[:, :, -19:-3], [-19, -14, -9, -4], 4),
        ):
            hidden.append(module.frame_packer[name](part).flatten(2).transpose(1, 2))
            lines = [numpy.linspace(0, side - 1, side // size).astype(int) for side in (height, width)]
            boxes.append((times, *lines))
            kinds.append(2)
    hidden = [part + module.trainable_cond_mask.weight[kind] for part, kind in zip(hidden, kinds)]
    count, hidden = hidden[0].shape[1], torch.cat(hidden, dim=1)
    turned = torch.cat([angles(config.attention_head_dim, *box) for box in boxes]).repeat_interleave(2, dim=1)
    rotary = [wave(turned).float()[None, :, None] for wave in (torch.cos, torch.sin)]
    times = torch.where(torch.arange(hidden.shape[1]) < count, time, 0.0)
    embedded, rows, text, _ = module.condition_embedder(times, text, None, timestep_seq_len=len(times))
    layers = list(config.audio_inject_layers)
    for number, block in enumerate(module.blocks):
        hidden = block(hidden, text, rows.unflatten(2, (6, -1)), rotary)
        if number in layers:
            video = hidden[0, :count].unflatten(0, (frames, -1))
            taken = module.audio_injector[layers.index(number)](video, tokens, whole)
            hidden = torch.cat([hidden[:, :count] + taken.flatten(0, 1)[None], hidden[:, count:]], dim=1)
    shift, scale = (module.scale_shift_table[None] + embedded[:, :count, None]).unbind(2)
    hidden = module.proj_out(module.norm_out(hidden[:, :count]) * (1 + scale) + shift)
    hidden = hidden.unflatten(1, (frames, height, width)).unflatten(4, (*config.patch_size, -1))
    return hidden.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(latents.shape)


# ---------------------------------------------------------------- the pipeline


@torch.no_grad()
def make(pipeline, config, image, features, pose=None):
    """Conditions, latents and frames of each segment. image (1, 3, 1, height, width), pose (1, 3, frames, …) in -1..1,
    features (layers, channels, frames) of all segments."""
    vae, module, size = pipeline.vae, pipeline.transformer, config.resolution
    mean, deviation = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))

    def encode(pixels):
        return (vae.encode(pixels).latent_dist.mode() - mean) / deviation

    def decode(latents):
        return vae.decode(latents * deviation + mean, return_dict=False)[0]

    own, kept = config.pipeline.segments.frames, module.config.motion_frames
    reference, last = encode(image), torch.zeros(1, 3, kept, size.height, size.width)
    prompts = pipeline.encode_prompt(PROMPT, NEGATIVE, max_sequence_length=config.model.text_tokens)
    generator, parts = torch.Generator().manual_seed(config.seed), []
    for start in range(0, features.shape[2], own):
        shape = 1, vae.config.z_dim, own // 4, size.height // 8, size.width // 8
        latents, motion = torch.randn(shape, generator=generator), encode(last) if start else None
        skeleton = torch.zeros(shape)
        if pose is not None:
            frames = pose[:, :, start : start + own]
            black = -torch.ones(1, 3, own - frames.shape[2], size.height, size.width)
            frames = torch.cat([frames, black], dim=2)
            skeleton = encode(torch.cat([frames[:, :, :1], frames], dim=2))[:, :, 1:]
        heard = features[None, :, :, start : start + own]
        pipeline.scheduler.set_timesteps(config.steps)
        for time in pipeline.scheduler.timesteps:
            velocity, negative = (
                forward(module, latents, time, text, (reference, motion, skeleton, heard * said))
                for text, said in zip(prompts, (1, 0))
            )
            velocity = negative + config.guidance_scale * (velocity - negative)
            latents = pipeline.scheduler.step(velocity, time, latents, return_dict=False)[0]
        pixels = decode(torch.cat([reference if motion is None else motion, latents], dim=2))[:, :, -own:]
        shown = pixels if start else pixels[:, :, 3:]
        parts.append({
            "reference_latent": reference, "skeleton_latents": skeleton, "latents": latents,
            "motion_latents": torch.zeros(1, vae.config.z_dim, 19, *shape[3:]) if motion is None else motion,
            "frames": ((pixels[0].clamp(-1, 1) + 1) * 127.5).round().permute(1, 2, 3, 0),
        })
        last = torch.cat([last, shown], dim=2)[:, :, -kept:]
    return parts
