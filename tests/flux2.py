"""A whole checkpoint of FLUX.2's classes with random weights, and what diffusers' pipeline makes of it."""
import shutil
from pathlib import Path

from tests.conftest import FOLDER, ROOT
from tests.flux import NEGATIVE, PROMPT, VAE, made_once, randomize, vocabulary

TRANSFORMER = dict(
    in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=32, num_attention_heads=8,
    joint_attention_dim=72, mlp_ratio=2.0, axes_dims_rope=[4, 12, 12, 4], guidance_embeds=False,
)
QWEN = dict(
    hidden_size=24, intermediate_size=40, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
)
OUT_LAYERS = [1, 3, 4]
AUTOENCODER = {
    name: value for name, value in VAE.items() if name not in ("scaling_factor", "shift_factor") and "quant" not in name
}
TOKENS = 96
# What Qwen3's makes of one message without thinking.
TEMPLATE = (
    "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def checkpoint() -> Path:
    return made_once(Path(FOLDER) / "models" / "flux2", make_checkpoint)


def make_checkpoint(folder: Path) -> None:
    import diffusers
    import torch
    import transformers

    shutil.copytree(ROOT / "models" / "demo" / "tokenizer", folder / "tokenizer")
    config = transformers.Qwen3Config(**QWEN, vocab_size=vocabulary(), rope_theta=1e6, tie_word_embeddings=True)
    modules = {
        "transformer": diffusers.Flux2Transformer2DModel(**TRANSFORMER),
        "text_encoder": transformers.Qwen3ForCausalLM(config),
        "vae": diffusers.AutoencoderKLFlux2(**AUTOENCODER),
    }
    statistics = modules["vae"].bn
    statistics.running_mean.data = torch.randn(statistics.num_features, generator=torch.Generator().manual_seed(1))
    statistics.running_var.data = 0.5 + torch.rand(statistics.num_features, generator=torch.Generator().manual_seed(2))
    for number, (name, module) in enumerate(modules.items()):
        randomize(module, number).save_pretrained(folder / name)


def model() -> list[str]:
    """The config of a model for this checkpoint."""
    folder = checkpoint()
    shown = {
        "transformer": TRANSFORMER, "vae": AUTOENCODER,
        "text_encoder": QWEN | dict(vocab_size=vocabulary(), out_layers=OUT_LAYERS),
    }
    return [
        "model=flux2_klein_4b", f"model.path={folder}", f"model.text_tokens={TOKENS}", "model.min_size=16",
        *(f"model.dtype.{component}=float32" for component in shown),
        *(f"++model.architecture.{component}.{name}={value}" for component, values in shown.items()
          for name, value in values.items()),
        "model.noise_dtype=float32", "steps=3", "output.keep_frames=true", f"prompt={PROMPT}",
        f"negative_prompt={NEGATIVE}",
    ]


def in_diffusers(config) -> dict:
    """embeddings, latents and frames, as the runner names them."""
    import diffusers
    import torch
    import transformers

    folder = checkpoint()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    vae = diffusers.AutoencoderKLFlux2.from_pretrained(folder / "vae")
    pipeline = diffusers.Flux2KleinPipeline(
        scheduler, vae, transformers.Qwen3ForCausalLM.from_pretrained(folder / "text_encoder"), tokenizer,
        diffusers.Flux2Transformer2DModel.from_pretrained(folder / "transformer"), is_distilled=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    size, layers = config.resolution, tuple(OUT_LAYERS)
    with torch.no_grad():
        embeddings, _ = pipeline.encode_prompt(PROMPT, max_sequence_length=TOKENS, text_encoder_out_layers=layers)
        negative, _ = pipeline.encode_prompt(NEGATIVE, max_sequence_length=TOKENS, text_encoder_out_layers=layers)
        whole = pipeline(
            prompt_embeds=embeddings, negative_prompt_embeds=negative, height=size.height, width=size.width,
            num_inference_steps=config.steps, guidance_scale=config.guidance_scale, output_type="latent",
            generator=torch.Generator().manual_seed(config.seed),
        ).images
        pixels = vae.decode(whole).sample
        mean, variance = (getattr(vae.bn, name).view(1, -1, 1, 1) for name in ("running_mean", "running_var"))
        latents = (pipeline._patchify_latents(whole) - mean) / torch.sqrt(variance + vae.config.batch_norm_eps)
    frames = (pipeline.image_processor.postprocess(pixels, output_type="np") * 255).round()
    embeddings = torch.cat([embeddings, negative][: 1 + (config.guidance_scale > 1)])
    return dict(embeddings=embeddings.numpy(), latents=latents.numpy()[:, :, None], frames=frames)
