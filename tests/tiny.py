"""A whole checkpoint of Wan's classes with random weights, two layers deep: what parity and keys are tested on."""
import shutil
from pathlib import Path

import torch

from tests.conftest import ROOT

TRANSFORMER = dict(
    num_layers=2, num_attention_heads=8, attention_head_dim=16, ffn_dim=64, in_channels=16, out_channels=16,
    text_dim=32, freq_dim=32, patch_size=[1, 2, 2], rope_max_seq_len=64,
)
TEXT_ENCODER = dict(d_model=32, d_kv=8, d_ff=64, num_heads=8, num_layers=2, feed_forward_proj="gated-gelu")
VAE = dict(z_dim=16, base_dim=8, num_res_blocks=1)
SHOWN = {  # what conf/model/demo.yaml says of itself, and this model says otherwise
    "transformer": ("num_layers", "attention_head_dim", "ffn_dim", "in_channels", "text_dim", "rope_max_seq_len"),
    "text_encoder": ("d_model", "d_kv", "num_layers"),
}


def make_checkpoint(folder: Path, experts: int = 1, **transformer) -> Path:
    """Tokenizer and scheduler are the demo model's."""
    import diffusers
    import transformers

    demo = ROOT / "models" / "demo"
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors", "metrics.json"))
    vocabulary = transformers.AutoConfig.from_pretrained(demo / "text_encoder").vocab_size
    torch.manual_seed(0)
    modules = {
        "transformer": diffusers.WanTransformer3DModel(**TRANSFORMER | transformer),
        "text_encoder": transformers.UMT5EncoderModel(transformers.UMT5Config(**TEXT_ENCODER, vocab_size=vocabulary)),
        "vae": diffusers.AutoencoderKLWan(**VAE),
    }
    if experts == 2:
        modules["transformer_2"] = diffusers.WanTransformer3DModel(**TRANSFORMER | transformer)
    for name, module in modules.items():
        for parameter in module.parameters():  # norms and modulations too: ones and zeros would hide mistakes
            parameter.data += 0.05 * torch.randn(parameter.shape)
        module.save_pretrained(folder / name)
    return folder


def overrides(folder: Path, **transformer) -> list[str]:
    """The demo's config for this checkpoint."""
    values = {"transformer": TRANSFORMER | transformer, "text_encoder": TEXT_ENCODER}
    keys = [(component, name) for component, names in SHOWN.items() for name in names]
    return [f"model.path={folder}", *(f"model.architecture.{c}.{name}={values[c][name]}" for c, name in keys)]
