"""Teach the demo model to follow driving videos, as Wan Animate does: a picture says who, a video of skeletons and one
of a face say how (tools/driving.py).

    python tools/teach_animate.py                       # about seven minutes on one H200
    python tools/teach_animate.py minutes=9             # any key of tools/conf/teach_animate.yaml
    python tools/teach_animate.py --smoke               # a few steps on the CPU
    python tools/teach_animate.py --judge models/demo_animate       # stored weights, on the held-out animations

In `output` there are then the weights of diffusers' WanAnimateTransformer3DModel and of an image encoder, metrics.json
and README.md. The model runs from there:

    python tools/driving.py outputs/driving
    python run.py model=demo_animate model.path=outputs/demo_animate image=outputs/driving/picture.png \\
        pose=outputs/driving/pose.mkv face=outputs/driving/face.mkv

Weights are written every minute and at the end of the time; what is judged is what was written.
"""
from __future__ import annotations

import json
from pathlib import Path

import demo_world as world
import driving
import numpy as np
import teach_demo
import torch
import train_demo
import transformers
from diffusers import WanAnimateTransformer3DModel, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan_animate import WanAnimateMotionEncoder
from omegaconf import DictConfig, OmegaConf
from teach_demo import MASK, Weights
from training import teach_and_judge, teaching

# What a prompt is padded to: diffusers' attention takes all tokens before the last 512 for a picture's.
PROMPT_TOKENS = 512
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
STORED = {"transformer": "transformer/diffusion_pytorch_model.safetensors",
          "image_encoder": "image_encoder/model.safetensors"}


# ---------------------------------------------------------------- the model


class MotionEncoder(WanAnimateMotionEncoder):
    """diffusers' encoder whose directions are computed once. They stay as they are: what follows is linear and learns
    any others, and a CUDA graph cannot record their QR decomposition."""

    def forward(self, face_image: torch.Tensor, channel_dim: int = 1) -> torch.Tensor:
        pixels = self.conv_in(face_image)
        for block in self.res_blocks:
            pixels = block(pixels)
        shares = self.conv_out(pixels).flatten(1)
        for linear in self.motion_network:
            shares = linear(shares)
        return shares @ self.directions.T

    @torch.no_grad()
    def keep_directions(self) -> None:
        weight = self.motion_synthesis_weight.requires_grad_(False)
        weight.copy_(weight.half())  # as it is stored
        self.register_buffer("directions", torch.linalg.qr(weight.cpu() + 1e-8)[0].to(weight.device), persistent=False)


class Animator(torch.nn.Module):
    """Image encoder and transformer as one module, so that they share optimizers and an average."""

    def __init__(self, transformer: WanAnimateTransformer3DModel, image_encoder: transformers.CLIPVisionModel):
        super().__init__()
        self.transformer, self.image_encoder = transformer, image_encoder

    def train_quickly(self) -> Animator:
        """The same function, as a CUDA graph can record it: of a caption, one padding, and a picture's tokens."""
        side = self.image_encoder.config
        shown = (side.image_size // side.patch_size) ** 2 + 1
        train_demo.attend_quickly(self.transformer, train_demo.QuickAttention(PROMPT_TOKENS, shown))
        self.transformer.motion_encoder.__class__ = MotionEncoder
        self.transformer.motion_encoder.keep_directions()
        return self

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    def forward(self, latents, moment, text, return_dict=False, **told: torch.Tensor) -> tuple[torch.Tensor]:
        """(velocity [batch, 16, 1 + time, height, width],) of noise and given frames. Told are pictures, normalized for
        the image encoder, poses, which are latents, and faces, pixels [batch, 3, frames, side, side]."""
        faces, tokens = told["faces"], self.image_encoder(told["pictures"], output_hidden_states=True).hidden_states[-2]
        return self.transformer(latents, moment, text, tokens, told["poses"], faces, return_dict=return_dict,
                                motion_encode_batch_size=faces.shape[0] * faces.shape[2])


def build(cfg: DictConfig) -> Animator:
    """A model that begins as the one it starts from: what is new counts for nothing yet."""
    start = WanTransformer3DModel.from_pretrained(cfg.start_from, subfolder="transformer").float()
    width = start.config.num_attention_heads * start.config.attention_head_dim
    torch.manual_seed(cfg.seed)
    transformer = WanAnimateTransformer3DModel.from_config({
        **start.config, "image_dim": cfg.image_encoder.hidden_size, "added_kv_proj_dim": width,
        "latent_channels": start.config.out_channels, **OmegaConf.to_container(cfg.transformer),
    })
    if unknown := transformer.load_state_dict(start.state_dict(), strict=False).unexpected_keys:
        raise ValueError(f"{cfg.start_from}: has {unknown}, which Animate's transformer has not")
    silent = [transformer.pose_patch_embedding, *(one.to_out for one in transformer.face_adapter),
              *(block.attn2.add_v_proj for block in transformer.blocks)]
    for layer in silent:
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
    encoder = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**cfg.image_encoder))
    return Animator(transformer, encoder)


def save(network: Animator, weights: Weights, folder: Path) -> None:
    """diffusers' layout, as float16. `weights` are those that were learned; the others are as they are in it."""
    network.transformer.save_config(folder / "transformer")
    side = network.image_encoder.config.image_size
    described = json.loads(network.image_encoder.config.to_json_string())
    # transformers loads in the dtype it finds here.
    described |= {"architectures": ["CLIPVisionModel"], "dtype": "float32"}
    write_json(folder / "image_encoder/config.json", described)
    steps = {f"do_{name}": True for name in ("convert_rgb", "resize", "center_crop", "rescale", "normalize")}
    write_json(folder / "image_processor/preprocessor_config.json", {
        "image_processor_type": "CLIPImageProcessor", **steps,
        "size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "resample": 3,
        "rescale_factor": 1 / 255, "image_mean": CLIP_MEAN, "image_std": CLIP_DEVIATION,
    })
    for part, file in STORED.items():
        whole = getattr(network, part).state_dict()
        whole = {name: weights.get(f"{part}.{name}", value).half() for name, value in whole.items()}
        teach_demo.store(whole, folder / file)


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def stored(folder: Path) -> Animator:
    """The model of a folder."""
    transformer = WanAnimateTransformer3DModel.from_pretrained(folder, subfolder="transformer")
    encoder = transformers.CLIPVisionModel.from_pretrained(folder, subfolder="image_encoder")
    return Animator(transformer, encoder).float().requires_grad_(False)


# ---------------------------------------------------------------- what it is told


def given_frames(vae, pictures: torch.Tensor, before: torch.Tensor, goes_on: torch.Tensor) -> torch.Tensor:
    """[n, 20, 1 + latent frames, …] of pictures [n, 3, height, width]: the picture as a latent frame of its own, and of
    a segment's frames the first, where it goes on from a frame before; each behind its mask."""
    reference, goes_on = teach_demo.encode(vae, pictures[:, :, None]), goes_on.float()[:, None, None, None]
    first = torch.cat((torch.ones_like(reference[:, :MASK]), reference), 1)
    segment = teach_demo.condition(vae, before * goes_on)
    segment[:, :MASK] *= goes_on[..., None]
    return torch.cat((first, segment), 2)


def for_image_encoder(pictures: torch.Tensor) -> torch.Tensor:
    mean, deviation = (torch.tensor(values, device=pictures.device)[:, None, None]
                       for values in (CLIP_MEAN, CLIP_DEVIATION))
    return (pictures / 2 + 0.5 - mean) / deviation


def example(cfg: DictConfig, vae, numbers, times: torch.Tensor, goes_on: torch.Tensor) -> dict[str, torch.Tensor]:
    """A segment to learn from, and its conditions. Numbers: things [n, 1, fields] as they move, the same as pictures
    show them, and backgrounds [n, 3]."""
    things, shown, backgrounds = numbers
    size, side = cfg.clip_size, cfg.image_encoder.image_size
    clips, pictures, seen, poses, faces = map(driving.as_stored, (
        world.render(things, backgrounds, size, times),
        world.render(shown, backgrounds, size, slice(0, 1))[:, :, 0],
        world.render(shown, backgrounds, side, slice(0, 1))[:, :, 0],
        driving.pose_video(things, times, size),
        driving.face_video(things, times, cfg.transformer.motion_encoder_size),
    ))
    given = given_frames(vae, pictures, clips[:, :, 0], goes_on)
    latents = torch.cat((given[:, MASK:, :1], teach_demo.encode(vae, clips)), 2)
    return {"latents": latents, "given": given, "pictures": for_image_encoder(seen),
            "poses": teach_demo.encode(vae, poses), "faces": faces}


# ---------------------------------------------------------------- teaching


def teach(cfg: DictConfig, networks: dict, folder: Path, device: torch.device) -> dict:
    """Fine-tune the transformer with what is new in it, and an image encoder; text encoder and VAE are the demo's."""
    vae, empty = networks["vae"], teach_demo.empty_text(networks)
    network = build(cfg).to(device).train_quickly()
    shelf, names = teach_demo.Shelf(cfg.bank, device), []

    def make(things, backgrounds, tokens):
        things = driving.move_anyhow(things[:, :1])
        times = torch.linspace(0, 1, world.FRAMES)
        times = times if torch.rand(()) < 0.5 else times.flip(0)
        goes_on = torch.rand(len(things), device=device) < cfg.goes_on
        made = example(cfg, vae, (things, driving.portrait(things), backgrounds), times, goes_on)
        black = torch.rand(len(things), 1, 1, 1, 1, device=device) < cfg.face_dropout
        made["faces"] = torch.where(black, -1.0, made["faces"])
        # The caption is that of another clip: what it says is no help, so any prompt will do.
        made["text"] = train_demo.read(networks["text_encoder"], tokens.roll(1, 0))
        names[:] = made
        return tuple(made.values())

    def loss() -> torch.Tensor:
        drawn = dict(zip(names, shelf.draw(cfg.batch)))
        told = [drawn.pop(name) for name in ("latents", "text", "given")]
        return teach_demo.flow_loss(cfg, network, empty, *told, **drawn)

    refresh = teach_demo.shelve(cfg, shelf, train_demo.stream(cfg, cfg.refresh, cfg.seed + 1), make)
    teach_demo.compiled(cfg, network.transformer)
    clock = teach_demo.train(cfg, cfg, network, loss, lambda weights: save(network, weights, folder), refresh)
    return {"animate": clock}


# ---------------------------------------------------------------- drawing and judging


@torch.no_grad()
def show(cfg: DictConfig, networks: dict, network: Animator, animations: list) -> list[np.ndarray]:
    """Videos as frames of uint8: animation k with the configured seed + k, segment after segment, with no prompt."""
    import judge_demo

    vae, device, settings, videos = networks["vae"], network.device, cfg.judge, []
    mean, deviation = train_demo.latent_statistics(vae, device)
    times, overlap = driving.there_and_back(settings.frames), 1
    shape = 16, 1 + (world.FRAMES - 1) // 4 + 1, cfg.clip_size // 8, cfg.clip_size // 8
    for start in range(0, len(animations), settings.batch):
        part = animations[start : start + settings.batch]
        numbers = [torch.stack(values).to(device) for values in list(zip(*part))[1:]]
        noises = [torch.Generator().manual_seed(settings.seed + start + k) for k in range(len(part))]
        text = teach_demo.empty_text(networks).expand(len(part), -1, -1)
        pixels: list[torch.Tensor] = []
        for first in range(0, settings.frames - overlap, world.FRAMES - overlap):
            goes_on = torch.full((len(part),), bool(pixels), device=device)
            told = example(cfg, vae, numbers, times[first : first + world.FRAMES], goes_on)
            if pixels:
                told["given"][:, :, 1:] = teach_demo.condition(vae, pixels[-1][:, :, -1])

            def velocity(latents, moment, text, told=told):
                named = {name: told[name] for name in ("pictures", "poses", "faces")}
                return network(torch.cat((latents, told["given"]), 1), moment.expand(len(latents)), text, **named)[0]

            noise = torch.cat([torch.randn(1, *shape, generator=one) for one in noises]).to(device)
            sampler = teach_demo.demo_sampler(cfg, settings.steps, device)
            latents = teach_demo.draw(velocity, noise, [text], sampler, guidance=1.0)[-1][:, :, 1:]
            pixels.append(train_demo.decode_whole(vae, latents * deviation + mean).clamp(-1, 1))
        whole = torch.cat([one[:, :, overlap if number else 0 :] for number, one in enumerate(pixels)], 2)
        videos += [judge_demo.to_frames(video) for video in whole]
    return videos


def judge(cfg: DictConfig, networks: dict, folder: Path) -> dict:
    """Rates of stored weights on the held-out animations, as metrics.json has them."""
    import judge_demo

    network = stored(folder).to(networks["vae"].device).train_quickly()
    listed, times = driving.held_out()[: cfg.judge.videos], driving.there_and_back(cfg.judge.frames)
    truths = [judge_demo.to_frames(world.render(things[None], background[None], cfg.clip_size, times)[0])
              for _, things, _, background in listed]
    rates = judge_demo.animated(show(cfg, networks, network, listed), [one[0] for one in listed], truths)
    return {"held_out": {name: round(rate, 4) for name, rate in rates.items()}, "held_out_videos": len(listed)}


# ---------------------------------------------------------------- what is written beside the weights

CARD = """\
---
license: apache-2.0
library_name: diffusers
---
# The demo model for driving videos

The [demo model for pictures](../demo_i2v/README.md), {megabytes:.0f} MB, with what Wan Animate has beside: skeletons
added to the video's tokens, a face that blocks attend to, and a small image encoder. Text encoder, tokenizer, VAE and
scheduler are the [demo's](../demo/README.md).

- **What it does**: the shape of a picture moves as two videos say. The *pose* shows a white dot where it is and a green
  one towards its top; the *face* a disc whose size is the shape's. The picture says shape, colour and background; the
  shape in it is upright, anywhere and of any size. Any prompt will do: captions were those of other clips. Longer
  videos are made in segments of 17 frames, each beginning with the last frame of the one before.
- **What it does not**: pictures of anything but one shape of the demo's world.
- **Training**: `{command}`, {minutes:.1f} minutes on {hardware}, from demo_i2v's transformer; clips
  drawn by `tools/demo_world.py` and `tools/driving.py`.
- **How good**: {videos} animations of {frames} frames whose combinations of colour, shape and motion were kept from
  training. The judge finds the colour right in {colour:.1%}, the shape in {shape:.1%}. The shape is on average
  {distance_px:.1f} pixels from where it should be, {distance_px_most:.1f} at most; {followed:.1%} of the videos overlap
  by three quarters with what was asked for (`metrics.json`).
- **Licence**: Apache-2.0, as the project.

```
python tools/driving.py outputs/driving
python run.py model=demo_animate image=outputs/driving/picture.png \\
    pose=outputs/driving/pose.mkv face=outputs/driving/face.mkv
```

With diffusers:

```
own = "models/demo_animate"
pipeline = WanAnimatePipeline.from_pretrained(
    "models/demo", transformer=WanAnimateTransformer3DModel.from_pretrained(own, subfolder="transformer"),
    image_encoder=CLIPVisionModel.from_pretrained(own, subfolder="image_encoder"),
    image_processor=CLIPImageProcessor.from_pretrained(own, subfolder="image_processor"),
)
frames = pipeline(image, pose, face, prompt="", height=128, width=128, segment_frame_length=17).frames[0]
```
"""


def write_card(cfg: DictConfig, folder: Path, metrics: dict) -> None:
    size = sum((folder / file).stat().st_size for file in STORED.values()) / 1e6
    minutes = metrics["stages"]["animate"]["elapsed"] / 60
    text = CARD.format(megabytes=size, minutes=minutes, videos=metrics["held_out_videos"], frames=cfg.judge.frames,
                       command=metrics["command"], hardware=metrics["hardware"], **metrics["held_out"])
    (folder / "README.md").write_text(text)


# ---------------------------------------------------------------- running


def load(cfg: DictConfig, device: torch.device) -> dict:
    """The demo's text encoder and VAE."""
    networks = teach_demo.load(cfg, device)
    del networks["transformer"]
    return networks


def run(cfg: DictConfig, judged: str | None) -> None:
    folder = teach_and_judge(cfg, judged, load, teach, judge)
    write_card(cfg, folder, json.loads((folder / "metrics.json").read_text()))


if __name__ == "__main__":
    teaching(__doc__, "teach_animate", run)
