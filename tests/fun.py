"""VideoX-Fun's transformers and pipelines by its own formulas, in torch: a reference's tokens before the video's, a
camera's rays through every pixel, a time for every token.

    module = fun.transformer(**architecture)                    # diffusers' with the layers that it lacks
    values = fun.make(pipeline, config, control=…, image=…, reference=…)
"""
import diffusers
import numpy
import torch

from tests.reference import NEGATIVE, PROMPT, decode
from wan_torchax.config.geometry import expert_at

FIELDS = {"add_ref_conv", "in_dim_ref_conv", "add_control_adapter", "in_dim_control_adapter",
          "downscale_factor_control_adapter"}


class Residual(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (torch.nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, hidden):
        return hidden + self.conv2(torch.relu(self.conv1(hidden)))


class Adapter(torch.nn.Module):
    """Of a camera's rays."""

    def __init__(self, channels, fold, width, patch):
        super().__init__()
        self.unshuffle = torch.nn.PixelUnshuffle(fold)
        self.conv = torch.nn.Conv2d(channels * fold**2, width, patch, patch)
        self.residual_blocks = torch.nn.Sequential(Residual(width))

    def forward(self, rays):
        """(1, channels, frames, height, width) to (1, width, frames, rows, columns)."""
        frames = self.unshuffle(rays[0].transpose(0, 1))
        return self.residual_blocks(self.conv(frames)).transpose(0, 1)[None]


def transformer(**architecture):
    fields = {name: architecture.pop(name) for name in FIELDS & architecture.keys()}
    module = diffusers.WanTransformer3DModel(**architecture)
    width, patch = module.config.num_attention_heads * module.config.attention_head_dim, module.config.patch_size[1:]
    if fields.get("add_ref_conv"):
        module.ref_conv = torch.nn.Conv2d(fields["in_dim_ref_conv"], width, patch, patch)
    if fields.get("add_control_adapter"):
        channels, fold = fields["in_dim_control_adapter"], fields["downscale_factor_control_adapter"]
        module.control_adapter = Adapter(channels, fold, width, patch)
    module.register_to_config(**fields)
    return module


def load(folder, build=None):
    """A transformer of a checkpoint, by the function that builds it: diffusers would leave out the layers that it
    lacks."""
    from safetensors.torch import load_file

    stored = diffusers.WanTransformer3DModel.load_config(folder)
    module = (build or transformer)(**{name: value for name, value in stored.items() if not name.startswith("_")})
    module.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"))
    return module.eval()


def forward(module, latents, times, text, rays=None, reference=None):
    """The velocity of latents (1, channels, frames, height, width) with a time for every token of the video."""
    hidden = module.patch_embedding(latents)
    if rays is not None:
        hidden = hidden + module.control_adapter(rays)
    sizes, hidden = hidden.shape[2:], hidden.flatten(2).transpose(1, 2)
    grid = torch.zeros(1, 1, sizes[0] + (reference is not None), *latents.shape[3:])
    if reference is not None:
        shown = module.ref_conv(reference).flatten(2).transpose(1, 2)
        hidden = torch.cat([shown, hidden], dim=1)
        times = torch.cat([times[-1:].expand(shown.shape[1]), times])
    time, rows, text, _ = module.condition_embedder(times, text, None, timestep_seq_len=len(times))
    rows = rows.unflatten(2, (6, -1))
    for block in module.blocks:
        hidden = block(hidden, text, rows, module.rope(grid))
    shift, scale = (module.scale_shift_table[None] + time[:, :, None]).unbind(2)
    hidden = module.proj_out(module.norm_out(hidden.float()) * (1 + scale) + shift)
    hidden = hidden[:, -sizes.numel():].unflatten(1, sizes).unflatten(4, (*module.config.patch_size, -1))
    return hidden.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(1, -1, *latents.shape[2:])


def rays_of(world_to_camera, height, width):
    """CameraCtrl's Plücker coordinates (1, 24, latent frames, height, width) of cameras (frames, 4, 4): each latent
    frame has those of four frames, the first one's four times."""
    focal = numpy.array([0.532139961, 0.946026558])
    if width / height < 1280 / 720:
        focal[0] = height * 1280 / 720 * focal[0] / width
    else:
        focal[1] = width / (1280 / 720) * focal[1] / height
    poses = torch.tensor(world_to_camera[0] @ numpy.linalg.inv(world_to_camera)).float()
    rows, columns = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    x, y = (columns - width / 2) / (focal[0] * width), (rows - height / 2) / (focal[1] * height)
    ahead = torch.nn.functional.normalize(torch.stack([x, y, torch.ones_like(x)], -1).float(), dim=-1).flatten(0, 1)
    directions = ahead @ poses[:, :3, :3].transpose(1, 2)
    moments = torch.cross(poses[:, None, :3, 3].expand_as(directions), directions, dim=-1)
    rays = torch.cat([moments, directions], -1).unflatten(1, (height, width)).permute(3, 0, 1, 2)
    rays = torch.cat([rays[:, :1].repeat_interleave(4, 1), rays[:, 1:]], 1)
    return rays.unflatten(1, (-1, 4)).transpose(1, 2).flatten(0, 1)[None]


@torch.no_grad()
def make(pipeline, config, control=None, image=None, reference=None, rays=None):
    """Conditions, latents and frames. Pixels are (1, 3, frames, height, width) in -1..1; what is None is absent."""
    vae, scheduler, size = pipeline.vae, pipeline.scheduler, config.resolution
    mean, deviation = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))

    def encode(pixels):
        return (vae.encode(pixels).latent_dist.mode() - mean) / deviation

    noise = torch.zeros(1, vae.config.z_dim, (size.frames - 1) // 4 + 1, size.height // vae.config.scale_factor_spatial,
                        size.width // vae.config.scale_factor_spatial)
    latents = torch.randn(noise.shape, generator=torch.Generator().manual_seed(config.seed))
    mask, given = torch.zeros(1, 4, *noise.shape[2:]), torch.zeros_like(noise)
    if image is not None:
        grey = torch.zeros(1, 3, size.frames - 1, size.height, size.width)
        mask[:, :, 0], given = 1, encode(torch.cat([image, grey], dim=2))
    values = {"condition": torch.cat([mask, given], dim=1)}
    if control is not None:
        values["control_latents"] = encode(control)
        shown = torch.zeros_like(noise[:, :, :1]) if reference is None else encode(reference)
        values["reference_latent"] = shown
    held = image is not None and vae.config.scale_factor_spatial == 16
    prompts = pipeline.encode_prompt(PROMPT, NEGATIVE, max_sequence_length=config.model.text_tokens)
    scheduler.set_timesteps(config.steps)
    moving = torch.ones_like(noise[:, :1])
    moving[:, :, 0] = 0 if held else 1
    for time in scheduler.timesteps:
        latents = (1 - moving) * given + moving * latents
        channels = [values[name] for name in ("control_latents", "condition") if name in values]
        expert = getattr(pipeline, expert_at(config, time.item()))
        times = (moving[0, 0, :, ::2, ::2] * time).flatten()
        shown = values["reference_latent"][:, :, 0] if control is not None else None
        prompted, negative = (
            forward(expert, torch.cat([latents, *channels], dim=1), times, text, rays, shown) for text in prompts
        )
        velocity = negative + config.guidance_scale * (prompted - negative)
        latents = scheduler.step(velocity, time, latents, return_dict=False)[0]
    latents = (1 - moving) * given + moving * latents
    return values | {"latents": latents, "frames": decode(pipeline, latents)}
