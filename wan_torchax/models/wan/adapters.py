"""Trainers' names for the modules of Wan's transformer: Wan's original or diffusers', with dots or underscores."""
import re
from collections.abc import Mapping

from wan_torchax.models.family import AdapterNames, Rows

# Wan's original names -> diffusers', for blocks and for the rest.
ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
PICTURES = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
BLOCK = {
    # Animate 2's class in diffusers has the names of either in modules with Wan's.
    **{f"{ours}.{name}": f"{theirs}.{new}"
       for ours, theirs, layers in (("self_attn", "attn1", ATTENTION), ("cross_attn", "attn2", ATTENTION | PICTURES))
       for old, new in layers.items() for name in (old, new)},
    "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2",
    "norm1": "norm1", "norm2": "norm3", "norm3": "norm2", "modulation": "scale_shift_table",
    "before_proj": "proj_in", "after_proj": "proj_out",
}
FACE_ADAPTER: dict[str, str | Rows] = {
    "linear1_q": "to_q", "linear1_kv": Rows(("to_k", "to_v")), "linear2": "to_out", "q_norm": "norm_q",
    "k_norm": "norm_k",
}
# Speech-to-video's. Its layers after the blocks are lists of their kinds: injector.3.q, injector_adain_layers.3.linear.
INJECTOR = {
    "q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out", "norm_q": "norm_q", "norm_k": "norm_k", "linear": "linear",
}
VOICE = (
    *(f"casual_audio_encoder.encoder.{name}.conv" for name in ("conv1_local", "conv1_global", "conv2", "conv3")),
    "casual_audio_encoder.encoder.final_linear", *(f"frame_packer.{name}" for name in ("proj", "proj_2x", "proj_4x")),
)
EMBEDDER = "condition_embedder"
REST = {
    **{name: name for name in ("patch_embedding", "vace_patch_embedding", "pose_patch_embedding", *VOICE)},
    "cond_encoder": "pose_patch_embedding", "head.head": "proj_out",
    "head.modulation": "scale_shift_table", "time_projection.1": f"{EMBEDDER}.time_proj",
    **{f"{kind}_embedding.{old}": f"{EMBEDDER}.{kind}_embedder.linear_{new}"
       for kind in ("time", "text") for old, new in ((0, 1), (2, 2))},
    "img_emb.proj.0": f"{EMBEDDER}.image_embedder.norm1", "img_emb.proj.4": f"{EMBEDDER}.image_embedder.norm2",
    "img_emb.proj.1": f"{EMBEDDER}.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": f"{EMBEDDER}.image_embedder.ff.net.2", "img_emb.emb_pos": f"{EMBEDDER}.image_embedder.pos_embed",
}
BARE = ("scale_shift_table", "pos_embed")  # parameters that are not a module's weight
# ComfyUI's, diffusers', DiffSynth-Studio's, kohya's, OneTrainer's and LyCORIS'.
PREFIX = (
    r"(?:base_model\.model\.)?"
    r"(?:(?:model\.)?diffusion_model\.|transformer\.|(?:pipe\.)?dit2?\.|lora_unet__?|lora_transformer_|lycoris_)?"
)
NATIVE = re.compile(rf"attn[12]|ffn[._]net|{EMBEDDER}|scale_shift_table|proj_(?:in|out)\b")  # only in diffusers' names


def with_underscores(names: Mapping[str, str]) -> dict[str, str]:
    """The same table, with every key also spelled with underscores for dots."""
    return {spelt: theirs for name, theirs in names.items() for spelt in (name, name.replace(".", "_"))}


def same(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: theirs for theirs in names.values()}


TABLES = {  # by whether a file uses diffusers' names: (blocks, rest)
    False: (with_underscores(BLOCK), with_underscores(REST)),
    True: (with_underscores(same(BLOCK)), with_underscores(same(REST))),
}


FACES: dict[bool, dict] = {False: FACE_ADAPTER, True: {name: name for name in ("to_q", "to_k", "to_v", "to_out")}}


def translate(module: str, native: bool) -> str | Rows | None:
    """A module's name in diffusers: blocks_0_self_attn_q -> blocks.0.attn1.to_q; None if no Wan model has it."""
    blocks, rest = TABLES[native]
    if match := re.fullmatch(r"face_adapter[._](?:fuser_blocks[._])?(\d+)[._](.+)", module):
        return within(f"face_adapter.{match[1]}", FACES[native].get(match[2]))
    if match := re.fullmatch(r"audio_injector[._](injector(?:_adain_layers)?[._])?(\d+)[._](.+)", module):
        return within(f"audio_injector.{match[2]}", (INJECTOR if match[1] else same(INJECTOR)).get(match[3]))
    match = re.fullmatch(r"((?:vace_)?blocks)[._](\d+)[._](?:block[._])?(.+)", module)
    if match is None:
        return rest.get(module)
    part = blocks.get(match[3])
    return part and f"{match[1]}.{match[2]}.{part}"


def within(block: str, part: str | Rows | None) -> str | Rows | None:
    if isinstance(part, Rows):
        return Rows(tuple(f"{block}.{name}" for name in part.names))
    return part and f"{block}.{part}"


def modulation(module: str) -> str | None:
    """The modulation table of a block or the head, for `diff_m` keys."""
    table = translate(f"{module}.modulation", native=False)
    return table if isinstance(table, str) else None


NAMES = AdapterNames(PREFIX, NATIVE, translate, BARE, modulation)
