"""Whole checkpoints of Wan's classes with random weights, a few layers deep: what most of the tests run on.

    tiny.model("controlled")        # overrides for one of KINDS; its checkpoint is made once a session, by whoever asks
    tiny.copied("text", folder)     # the same on a checkpoint that a test may change
"""
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

from tests.conftest import FOLDER, ROOT

TRANSFORMER = dict(
    num_layers=2, num_attention_heads=8, attention_head_dim=16, ffn_dim=64, in_channels=16, out_channels=16,
    text_dim=32, freq_dim=32, patch_size=[1, 2, 2], rope_max_seq_len=64,
)
TEXT_ENCODER = dict(d_model=32, d_kv=8, d_ff=64, num_heads=8, num_layers=2, feed_forward_proj="gated-gelu")
VAE = dict(z_dim=16, base_dim=8, num_res_blocks=1)
VAE_22 = dict(  # Wan 2.2's way: residual, folded, another scale
    z_dim=24, base_dim=8, decoder_base_dim=12, num_res_blocks=1, is_residual=True, in_channels=12, out_channels=12,
    patch_size=2, scale_factor_temporal=4, scale_factor_spatial=16, latents_mean=[0.1] * 24, latents_std=[1.5] * 24,
)
IMAGE_ENCODER = dict(
    hidden_size=24, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14,
    hidden_act="gelu",
)
AUDIO_ENCODER = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, conv_dim=[8] * 7,
    conv_kernel=[10, 3, 3, 3, 3, 2, 2], conv_stride=[5, 2, 2, 2, 2, 2, 2], conv_bias=True, num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4, layer_norm_eps=1e-5,
)
TOKENS = 128  # of a prompt: model.text_tokens of conf/model/demo.yaml
SHOWN = {  # what conf/model/demo.yaml says of itself, and this model says otherwise
    "transformer": ("num_layers", "attention_head_dim", "ffn_dim", "in_channels", "text_dim", "rope_max_seq_len"),
    "text_encoder": ("d_model", "d_kv", "num_layers"),
}
PICTURE = dict(in_channels=36)  # 16 of noise, 4 of the mask, 16 of the picture
SEEN = PICTURE | dict(image_dim=24, added_kv_proj_dim=128)  # and a picture's tokens
DRIVEN = SEEN | dict(refer_offset_t=1, refer_offset_h=0, refer_offset_w=-1, refer_stride=1)
KINDS = {  # what is special about the transformer
    "text": {},
    "pictured": PICTURE,
    "seen": SEEN,
    "seen_both": SEEN | dict(pos_embed_seq_len=10),  # five tokens of a picture
    "five": dict(in_channels=24, out_channels=24),  # as Wan 2.2's 5B
    "controlled": dict(num_layers=4, vace_layers=[0, 2], vace_in_channels=96),
    "animated": SEEN | dict(
        num_layers=4, motion_encoder_channel_sizes={"4": 6, "8": 8, "16": 4}, motion_encoder_size=16,
        motion_style_dim=12, motion_dim=3, motion_encoder_dim=10, face_encoder_hidden_dim=6, face_encoder_num_heads=3,
        inject_face_latents_blocks=2,
    ),
    "driven": DRIVEN | dict(num_layers=11),
    "driven_wide": DRIVEN | dict(num_layers=2, attention_head_dim=64, added_kv_proj_dim=512),
    # VideoX-Fun's: control latents and a reference, or a camera's path; of the A14B and of the 5B.
    "fun_control": dict(in_channels=52, add_ref_conv=True, in_dim_ref_conv=16),
    "fun_control_5b": dict(in_channels=76, out_channels=24, add_ref_conv=True, in_dim_ref_conv=24),
    "fun_camera": PICTURE | dict(
        add_control_adapter=True, in_dim_control_adapter=24, downscale_factor_control_adapter=8,
    ),
    "fun_camera_5b": dict(
        in_channels=52, out_channels=24, add_control_adapter=True, in_dim_control_adapter=24,
        downscale_factor_control_adapter=16,
    ),
    "spoken": dict(
        num_layers=4, audio_inject_layers=[0, 2, 3], audio_dim=16, num_audio_layers=4, num_audio_token=3, cond_dim=16,
        motion_frames=73,
    ),
    "wide": dict(num_attention_heads=4, attention_head_dim=64),  # heads that the TPU's kernel takes
    "deep": dict(num_layers=5),
}
EXPERTS = ("text", "pictured", "controlled", "fun_control", "fun_camera")  # kinds of which there are two transformers
PIPELINES = {  # of conf/pipeline: the kind of model each goes with
    "t2v": "text", "v2v": "text", "i2v": "pictured", "flf2v": "pictured", "i2v_clip": "seen", "flf2v_clip": "seen_both",
    "ti2v": "five", "vace": "controlled", "animate": "animated", "replace": "animated", "animate2": "driven",
    "s2v": "spoken", "i2v_long": "pictured",
    **{name: name for name in ("fun_control", "fun_control_5b", "fun_camera", "fun_camera_5b")},
}


def model(kind: str = "text") -> list[str]:
    """The demo's config for a checkpoint of this kind, which nobody may change."""
    return overrides(checkpoint(kind), **KINDS[kind])


def copied(kind: str, folder: Path) -> list[str]:
    """The same for a copy in this folder."""
    shutil.copytree(checkpoint(kind), folder)
    return overrides(folder, **KINDS[kind])


def checkpoint(kind: str) -> Path:
    """The folder of a kind's checkpoint, of this session."""
    folder = Path(FOLDER) / "models" / kind
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        mine = Path(tempfile.mkdtemp(dir=folder.parent)) / kind
        vae = VAE if KINDS[kind].get("out_channels", 16) == 16 else VAE_22
        make_checkpoint(mine, 1 + (kind in EXPERTS), vae, **KINDS[kind])
        if kind == "seen_both":
            name_as_on_the_hub(mine / "image_encoder" / "model.safetensors")
        try:
            os.rename(mine, folder)
        except OSError:  # the other worker was first, with the same numbers
            shutil.rmtree(mine)
    return folder


def make_checkpoint(folder: Path, experts: int = 1, vae: dict = VAE, **transformer) -> Path:
    """Tokenizer and scheduler are the demo model's."""
    import diffusers
    import torch
    import transformers

    from tests import fun, s2v

    demo = ROOT / "models" / "demo"
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors", "metrics.json", "tiny_vae"))
    wan = diffusers.WanVACETransformer3DModel if "vace_layers" in transformer else diffusers.WanTransformer3DModel
    wan = diffusers.WanAnimateTransformer3DModel if "motion_dim" in transformer else wan
    wan = fun.transformer if fun.FIELDS & transformer.keys() else wan
    wan = driven_by_video if "refer_offset_w" in transformer else wan
    wan = s2v.transformer if s2v.FIELDS & transformer.keys() else wan
    vocabulary = transformers.AutoConfig.from_pretrained(demo / "text_encoder").vocab_size
    torch.manual_seed(0)
    modules = {
        "transformer": wan(**TRANSFORMER | transformer),
        "text_encoder": transformers.UMT5EncoderModel(transformers.UMT5Config(**TEXT_ENCODER, vocab_size=vocabulary)),
        "vae": diffusers.AutoencoderKLWan(**vae),
    }
    if experts == 2:
        modules["transformer_2"] = wan(**TRANSFORMER | transformer)
    if "image_dim" in transformer:
        seen = image_encoder(transformer)
        modules["image_encoder"] = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**seen))
        side = seen["image_size"]
        sizes = dict(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        transformers.CLIPImageProcessor(**sizes).save_pretrained(folder / "image_processor")
    if "audio_dim" in transformer:
        modules["audio_encoder"] = s2v.sound_encoder(**AUDIO_ENCODER)
    for name, module in modules.items():
        for parameter in module.parameters():  # norms and modulations too: ones and zeros would hide mistakes
            parameter.data += 0.05 * torch.randn(parameter.shape)
        module.save_pretrained(folder / name)
    return folder


def driven_by_video(**settings):
    """Animate 2's class, whose own names are Wan's; the size of a picture's tokens is a constant in it."""
    from diffusers.models.transformers import transformer_wan_animate_2 as animate2

    width = settings["num_attention_heads"] * settings["attention_head_dim"]
    module = animate2.WanAnimate2Transformer3DModel(
        dim=width, in_dim=settings["in_channels"], num_heads=settings["num_attention_heads"],
        **{name: settings[name] for name in ("num_layers", "ffn_dim", "text_dim", "freq_dim")},
    )
    module.img_emb = animate2.MLPProj(settings["image_dim"], width)
    return module


def image_encoder(transformer: dict) -> dict:
    """Animate 2's pictures have CLIP's size: another is not foreseen."""
    return IMAGE_ENCODER | (dict(image_size=224, patch_size=112) if "refer_offset_w" in transformer else {})


def name_as_on_the_hub(file: Path) -> None:
    """An image encoder's tensors by the names that earlier versions of transformers gave them."""
    from safetensors.numpy import load_file, save_file

    save_file({f"vision_model.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def overrides(folder: Path, **transformer) -> list[str]:
    """The demo's config for this checkpoint."""
    values = {"transformer": TRANSFORMER | transformer, "text_encoder": TEXT_ENCODER}
    keys = [(component, name) for component, names in SHOWN.items() for name in names]
    shown = {name: value for name, value in transformer.items() if not isinstance(value, dict)}
    added = [f"++model.architecture.transformer.{name}={value}" for name, value in shown.items()]
    if transformer.get("out_channels", 16) != 16:
        shown = ("z_dim", "scale_factor_spatial", "patch_size", "is_residual", "decoder_base_dim")
        added += [f"++model.architecture.vae.{name}={VAE_22[name]}" for name in shown]
    if "image_dim" in transformer:
        seen = image_encoder(transformer)
        added += [f"++model.architecture.image_encoder.{name}={value}" for name, value in seen.items()]
        added.append("++model.dtype.image_encoder=float32")
    if "audio_dim" in transformer:
        added += [f"++model.architecture.audio_encoder.{name}={value}" for name, value in AUDIO_ENCODER.items()]
        added.append("++model.dtype.audio_encoder=float32")
    return [f"model.path={folder}", *(f"model.architecture.{c}.{name}={values[c][name]}" for c, name in keys), *added]


def write_zeros(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of float32 zeros that takes no disk."""
    layout, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        layout[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(layout).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
