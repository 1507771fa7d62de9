"""HunyuanVideo 1.5 with random weights, a few layers deep; every parameter matters to the result."""
import functools
import math
import tempfile
from pathlib import Path

import diffusers
import tokenizers
import torch
import transformers

from tests.conftest import FOLDER
from wan_torchax.models.hunyuan15 import prompts

TRANSFORMER = dict(
    in_channels=9, out_channels=4, num_attention_heads=8, attention_head_dim=16, num_layers=3, num_refiner_layers=2,
    mlp_ratio=2.0, text_embed_dim=32, text_embed_2_dim=24, image_embed_dim=16, rope_axes_dim=[4, 6, 6], target_size=64,
)
VAE = dict(latent_channels=4, block_out_channels=[8, 16, 16, 16, 16], layers_per_block=1)
QWEN = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    rms_norm_eps=1e-6, vocab_size=560,
)
T5 = dict(
    d_model=24, d_kv=8, d_ff=32, num_heads=2, num_layers=2, feed_forward_proj="gated-gelu", vocab_size=264,
    relative_attention_num_buckets=32, relative_attention_max_distance=128, layer_norm_epsilon=1e-6,
)
SIGLIP = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
    hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6,
)
TOKENS = 48  # of a prompt
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (  # Qwen's, as far as it matters here
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def randomized(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights as large as their inputs are many, norms and biases that are not ones and zeros: with torch's own, the
    text hardly changes the video."""
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        spread = torch.randn(parameter.shape)
        if name.endswith("gamma") or (parameter.ndim == 1 and name.endswith("weight")):
            parameter.data = 1 + 0.2 * spread
        elif parameter.ndim == 1:
            parameter.data = 0.2 * spread
        else:
            parameter.data = spread * math.prod(parameter.shape[1:]) ** -0.5
    return module.eval()


def transformer(**changes) -> torch.nn.Module:
    return randomized(diffusers.HunyuanVideo15Transformer3DModel(**TRANSFORMER | changes))


def vae() -> torch.nn.Module:
    return randomized(diffusers.AutoencoderKLHunyuanVideo15(**VAE))


def qwen() -> torch.nn.Module:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6}
    return randomized(transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(**QWEN, rope_parameters=rope)))


def tokenizer():
    """Byte pairs of the chat's own text: its words are a token each."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=QWEN["vocab_size"], special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([prompts.in_chat("a red circle moving right")] * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], padding_side="right", chat_template=CHAT
    )


def make_checkpoint(folder: Path, **changes) -> Path:
    modules = {
        "transformer": transformer(**changes), "vae": vae(), "text_encoder": qwen(),
        "text_encoder_2": randomized(transformers.T5EncoderModel(transformers.T5Config(**T5))),
        "image_encoder": randomized(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIGLIP))),
    }
    for name, module in modules.items():
        module.save_pretrained(folder / name)
    tokenizer().save_pretrained(folder / "tokenizer")
    size = {"height": SIGLIP["image_size"], "width": SIGLIP["image_size"]}
    transformers.SiglipImageProcessorPil(size=size).save_pretrained(folder / "feature_extractor")
    return folder


@functools.cache
def checkpoint(**changes) -> Path:
    """A checkpoint that nobody may change, of this process."""
    return make_checkpoint(Path(tempfile.mkdtemp(dir=FOLDER)), **changes)


def model(name: str = "hunyuan15_t2v_480p", **changes) -> list[str]:
    """Overrides for it."""
    parts = {"transformer": TRANSFORMER | changes, "vae": VAE, "text_encoder": QWEN, "text_encoder_2": T5}
    if "i2v" in name:
        parts["image_encoder"] = SIGLIP
    keys = [(part, key, value) for part, values in parts.items() for key, value in values.items()]
    rows = [f"++model.architecture.{part}.{key}={value}" for part, key, value in keys]
    dtypes = [f"model.dtype.{part}=float32" for part in parts]
    return [
        f"model={name}", f"model.path={checkpoint(**changes)}", *rows, *dtypes, f"model.text_tokens={TOKENS}",
        "model.noise_dtype=float32", "model.min_size=16",
    ]


def components(folder: Path, *names: str) -> dict:
    """What diffusers' pipelines are made of."""
    kinds = {
        "transformer": diffusers.HunyuanVideo15Transformer3DModel, "vae": diffusers.AutoencoderKLHunyuanVideo15,
        "text_encoder": transformers.Qwen2_5_VLTextModel, "text_encoder_2": transformers.T5EncoderModel,
        "tokenizer": transformers.AutoTokenizer, "image_encoder": transformers.SiglipVisionModel,
        "feature_extractor": transformers.SiglipImageProcessorPil,
    }
    return {name: kinds[name].from_pretrained(folder / name) for name in names}


def pipeline(kind: type, folder: Path, config):
    names = ["transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer"]
    if kind is diffusers.HunyuanVideo15ImageToVideoPipeline:
        names += ["image_encoder", "feature_extractor"]
    made = kind(
        **components(folder, *names), tokenizer_2=transformers.ByT5Tokenizer(extra_ids=0),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=config.resolution.flow_shift),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=config.guidance_scale),
    )
    made.tokenizer_max_length = TOKENS
    made.set_progress_bar_config(disable=True)
    return made
