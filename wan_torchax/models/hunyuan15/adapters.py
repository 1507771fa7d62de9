"""Names of HunyuanVideo 1.5's modules in checkpoints and adapters: the original's or diffusers', with dots or
underscores."""
import re
from collections.abc import Mapping

from wan_torchax.models.family import AdapterNames, Rows

QKV = Rows(("attn.to_q", "attn.to_k", "attn.to_v"))
ADDED = Rows(("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"))
TEXT = "context_embedder"
REFINER_BLOCKS = f"{TEXT}.token_refiner.refiner_blocks"


def stream(name: str, qkv: Rows, out: str, feed_forward: str, norm: str, norms: str) -> dict[str, str | Rows]:
    """The modules of one stream of a block, in the original's and in ComfyUI's names."""
    return {
        **{f"{name}_attn_{part}": theirs for part, theirs in zip("qkv", qkv.names)}, f"{name}_attn.qkv": qkv,
        f"{name}_attn_proj": out, f"{name}_attn.proj": out,
        **{f"{name}_mlp.{part}": f"{feed_forward}.net.0.proj" for part in ("fc1", "0")},
        **{f"{name}_mlp.{part}": f"{feed_forward}.net.2" for part in ("fc2", "2")},
        **{f"{name}_mod.{part}": f"{norm}.linear" for part in ("linear", "lin")},
        **{f"{name}_attn_{part}_norm": f"{norms}_{part}" for part in "qk"},
        **{f"{name}_attn.norm.{part}_norm": f"{norms}_{part[0]}" for part in ("query", "key")},
    }


BLOCK = {
    **stream("img", QKV, "attn.to_out.0", "ff", "norm1", "attn.norm"),
    **stream("txt", ADDED, "attn.to_add_out", "ff_context", "norm1_context", "attn.norm_added"),
}
REFINER: dict[str, str | Rows] = {
    "self_attn_qkv": QKV, "self_attn.qkv": QKV, "self_attn_proj": "attn.to_out.0", "self_attn.proj": "attn.to_out.0",
    "mlp.fc1": "ff.net.0.proj", "mlp.fc2": "ff.net.2", "mlp.0": "ff.net.0.proj", "mlp.2": "ff.net.2",
    "adaLN_modulation.1": "norm_out.linear", "norm1": "norm1", "norm2": "norm2",
}
TIMES = {
    "time_in": "time_embed.timestep_embedder", "time_r_in": "time_embed.timestep_embedder_r",
    "txt_in.t_embedder": f"{TEXT}.time_text_embed.timestep_embedder",
}
IMAGE = {0: "norm_in", 1: "linear_1", 3: "linear_2", 4: "norm_out"}
REST: dict[str, str | Rows] = {
    **{f"{name}.{old}": f"{theirs}.linear_{new}" for name, theirs in TIMES.items()
       for old, new in (("mlp.0", 1), ("mlp.2", 2), ("in_layer", 1), ("out_layer", 2))},
    **{f"txt_in.c_embedder.{old}": f"{TEXT}.time_text_embed.text_embedder.linear_{new}"
       for old, new in (("linear_1", 1), ("linear_2", 2), ("in_layer", 1), ("out_layer", 2))},
    **{f"byt5_in.fc{number}": f"{TEXT}_2.linear_{number}" for number in (1, 2, 3)},
    **{f"vision_in.proj.{number}": f"image_embedder.{theirs}" for number, theirs in IMAGE.items()},
    "txt_in.input_embedder": f"{TEXT}.proj_in", "byt5_in.layernorm": f"{TEXT}_2.norm", "img_in.proj": "x_embedder.proj",
    "cond_type_embedding": "cond_type_embed", "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": Rows(("norm_out.linear",), swapped=True),  # shift before scale there
}
# ComfyUI's, diffusers', PEFT's, musubi-tuner's, LyCORIS'.
PREFIX = (
    r"(?:base_model\.model\.)?"
    r"(?:(?:model\.)?diffusion_model\.|transformer\.|lora_unet_|lora_transformer_|lycoris_)?"
)
NATIVE = re.compile(rf"transformer_blocks|{TEXT}|x_embedder|image_embedder|time_embed[._]|proj_out\b|^norm_out")


def with_underscores(names: Mapping) -> dict:
    """The same table, with every key also spelled with underscores for dots."""
    return {spelt: theirs for name, theirs in names.items() for spelt in (name, name.replace(".", "_"))}


def same(names: Mapping) -> dict[str, str]:
    """Diffusers' names of a table's modules, to themselves."""
    return {one: one for theirs in names.values() for one in (theirs.names if isinstance(theirs, Rows) else [theirs])}


TABLES = {  # by whether a file uses diffusers' names: (blocks, the refiner's blocks, rest)
    False: tuple(map(with_underscores, (BLOCK, REFINER, REST))),
    True: tuple(with_underscores(same(names)) for names in (BLOCK, REFINER, REST)),
}
LISTS = {  # likewise, patterns of the lists of blocks
    False: (r"double_blocks", r"txt_in[._]individual_token_refiner[._]blocks"),
    True: (r"transformer_blocks", REFINER_BLOCKS.replace(".", "[._]")),
}


def translate(module: str, native: bool) -> str | Rows | None:
    """A module's name in diffusers: double_blocks.0.img_attn_q -> transformer_blocks.0.attn.to_q; None if it is no
    module of the model."""
    *blocks, rest = TABLES[native]
    for pattern, theirs, names in zip(LISTS[native], ("transformer_blocks", REFINER_BLOCKS), blocks):
        if match := re.fullmatch(rf"{pattern}[._](\d+)[._](.+)", module):
            part = names.get(match[2])
            return part and within(f"{theirs}.{match[1]}", part)
    return rest.get(module)


def within(block: str, part: str | Rows) -> str | Rows:
    if isinstance(part, str):
        return f"{block}.{part}"
    return Rows(tuple(f"{block}.{name}" for name in part.names), part.swapped)


NAMES = AdapterNames(PREFIX, NATIVE, translate)
