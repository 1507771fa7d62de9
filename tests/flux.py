"""A whole checkpoint of FLUX.1's classes with random weights, and what diffusers' pipeline makes of it.

    flux.model("dev")                       # overrides for one of KINDS; its checkpoint is made once a session
    flux.in_diffusers("dev", config)        # embeddings, pooled, latents and the image
"""
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.conftest import FOLDER, ROOT

TRANSFORMER = dict(
    in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=32, num_attention_heads=8,
    joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=[8, 12, 12],
)
CLIP = dict(
    hidden_size=20, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=17,
    hidden_act="quick_gelu", eos_token_id=2,
)
T5 = dict(d_model=24, d_kv=8, d_ff=48, num_heads=8, num_layers=2, feed_forward_proj="gated-gelu")
VAE = dict(
    latent_channels=4, block_out_channels=[8, 8, 16, 16], layers_per_block=1, norm_num_groups=2, scaling_factor=0.6,
    shift_factor=0.3, use_quant_conv=False, use_post_quant_conv=False, down_block_types=["DownEncoderBlock2D"] * 4,
    up_block_types=["UpDecoderBlock2D"] * 4,
)
KINDS = {"dev": dict(guidance_embeds=True), "schnell": dict(guidance_embeds=False)}
TOKENS = 24
PROMPT, NEGATIVE = "a red circle on a white background", "blue"


def randomize(module, seed: int = 0):
    """Weights of which every one matters: torch's own would hide mistakes in norms, biases and conditions."""
    import torch

    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape) * parameter[0].numel() ** -0.5
        else:
            parameter.data = 0.2 * torch.randn(parameter.shape) + (name.endswith("weight"))
    return module.eval()


def checkpoint(kind: str) -> Path:
    return made_once(Path(FOLDER) / "models" / f"flux_{kind}", lambda folder: make_checkpoint(folder, kind))


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that is made by whoever asks first."""
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        mine = Path(tempfile.mkdtemp(dir=folder.parent)) / folder.name
        make(mine)
        try:
            os.rename(mine, folder)
        except OSError:  # the other worker was first, with the same numbers
            shutil.rmtree(mine)
    return folder


def make_checkpoint(folder: Path, kind: str) -> None:
    """Both tokenizers are the demo model's."""
    import diffusers
    import transformers

    demo = ROOT / "models" / "demo"
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(demo / "tokenizer", folder / name)
    clip, t5 = (dict(own, vocab_size=vocabulary()) for own in (CLIP, T5))
    modules = {
        "transformer": diffusers.FluxTransformer2DModel(**TRANSFORMER | KINDS[kind]),
        "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(**clip)),
        "text_encoder_2": transformers.T5EncoderModel(transformers.T5Config(**t5)),
        "vae": diffusers.AutoencoderKL(**VAE),
    }
    for number, (name, module) in enumerate(modules.items()):
        randomize(module, number).save_pretrained(folder / name)
    name_as_on_the_hub(folder / "text_encoder" / "model.safetensors")


def vocabulary() -> int:
    return json.loads((ROOT / "models" / "demo" / "text_encoder" / "config.json").read_text())["vocab_size"]


def name_as_on_the_hub(file: Path) -> None:
    """CLIP's tensors by the names that earlier versions of transformers gave them."""
    from safetensors.numpy import load_file, save_file

    tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def model(kind: str = "dev") -> list[str]:
    """The config of a model for this checkpoint."""
    folder = checkpoint(kind)
    shown = {
        "transformer": TRANSFORMER, "text_encoder": CLIP | dict(vocab_size=vocabulary()),
        "text_encoder_2": T5 | dict(vocab_size=vocabulary()), "vae": VAE,
    }
    return [
        f"model=flux1_{kind}", f"model.path={folder}", f"model.text_tokens={TOKENS}", "model.min_size=16",
        *(f"model.dtype.{component}=float32" for component in shown),
        *(f"++model.architecture.{component}.{name}={value}" for component, values in shown.items()
          for name, value in values.items()),
        "model.noise_dtype=float32", "steps=3", "output.keep_frames=true", f"prompt={PROMPT}",
        f"negative_prompt={NEGATIVE}",
    ]


def in_diffusers(kind: str, config, transformer=None) -> dict:
    """embeddings, pooled, latents and frames, as the runner names them."""
    import diffusers
    import torch
    import transformers

    folder = checkpoint(kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.model_max_length = CLIP["max_position_embeddings"]
    shift = {} if kind == "schnell" else dict(
        use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096, base_shift=0.5, max_shift=1.15,
    )
    pipeline = diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(**shift),
        diffusers.AutoencoderKL.from_pretrained(folder / "vae"),
        transformers.CLIPTextModel.from_pretrained(folder / "text_encoder"), tokenizer,
        transformers.T5EncoderModel.from_pretrained(folder / "text_encoder_2"),
        transformers.AutoTokenizer.from_pretrained(folder / "tokenizer_2"),
        transformer or diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer"),
    )
    pipeline.set_progress_bar_config(disable=True)
    size = config.resolution
    settings = dict(
        prompt=PROMPT, height=size.height, width=size.width, num_inference_steps=config.steps,
        guidance_scale=config.guidance_scale, max_sequence_length=TOKENS, output_type="latent",
        generator=torch.Generator().manual_seed(config.seed),
    )
    with torch.no_grad():
        embeddings, pooled, _ = pipeline.encode_prompt(PROMPT, max_sequence_length=TOKENS)
        latents = pipeline(**settings).images
        latents = pipeline._unpack_latents(latents, size.height, size.width, pipeline.vae_scale_factor)
        pixels = pipeline.vae.decode(latents / VAE["scaling_factor"] + VAE["shift_factor"]).sample
    frames = (pipeline.image_processor.postprocess(pixels, output_type="np") * 255).round()
    return dict(
        embeddings=embeddings.numpy(), pooled=pooled.numpy(), latents=latents.numpy()[:, :, None], frames=frames
    )
