"""Trainers' names for the modules of the FLUX transformers: Black Forest Labs' own (ComfyUI; kohya's with underscores),
XLabs', or diffusers' (ai-toolkit, PEFT; OneTrainer's with underscores)."""
import re
from collections.abc import Mapping

from wan_torchax.models.family import AdapterNames, Rows

# A name -> diffusers' name, or those of the layers that it is one of, or with its rows in another order.
Table = Mapping[str, str | tuple[str, ...] | Rows]
IMAGE_IN, TEXT_IN = (
    tuple(f"attn.{name}" for name in names)
    for names in (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))
)
ATTENTION = {  # of double blocks; the last four are XLabs'
    "img_attn.qkv": IMAGE_IN, "txt_attn.qkv": TEXT_IN, "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out", "processor.qkv_lora1": IMAGE_IN, "processor.qkv_lora2": TEXT_IN,
    "processor.proj_lora1": "attn.to_out.0", "processor.proj_lora2": "attn.to_add_out",
}
DOUBLE = ATTENTION | {
    "img_mlp.0": "ff.net.0.proj", "img_mlp.2": "ff.net.2", "img_mod.lin": "norm1.linear",
    "txt_mlp.0": "ff_context.net.0.proj", "txt_mlp.2": "ff_context.net.2", "txt_mod.lin": "norm1_context.linear",
}
SINGLE = {
    "linear1": (*IMAGE_IN, "proj_mlp"), "linear2": "proj_out", "modulation.lin": "norm.linear",
    "processor.qkv_lora": IMAGE_IN, "processor.proj_lora": "proj_out",
}
HEAD = {"final_layer.adaLN_modulation.1": Rows(("norm_out.linear",), swapped=True)}  # shift before scale there
REST = HEAD | {
    "img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out",
    **{f"{old}_in.{layer}_layer": f"time_text_embed.{new}_embedder.linear_{number}"
       for old, new in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance"))
       for layer, number in (("in", 1), ("out", 2))},
}
# PEFT's, ComfyUI's, diffusers', kohya's and OneTrainer's, LyCORIS'.
PREFIX = (
    r"(?:base_model\.model\.)?"
    r"(?:(?:model\.)?diffusion_model\.|transformer\.|lora_unet__?|lora_transformer_|lycoris_)?"
)


def names_of(double: Table, single: Table, rest: Table) -> AdapterNames:
    """The names of a transformer with these layers in its blocks and outside of them."""
    tables = {
        "double_blocks": ("transformer_blocks", with_underscores(double)),
        "single_blocks": ("single_transformer_blocks", with_underscores(single)),
        "transformer_blocks": ("transformer_blocks", with_underscores(own(double))),
        "single_transformer_blocks": ("single_transformer_blocks", with_underscores(own(single))),
    }
    others = with_underscores({**rest, **own(rest)})

    def translate(module: str, native: bool) -> str | Rows | None:
        """single_blocks_3_linear2 -> single_transformer_blocks.3.proj_out; None if the transformer has no such layer"""
        match = re.fullmatch(r"(\w*?blocks)[._](\d+)[._](.+)", module)
        if match is None or match[1] not in tables:
            return others.get(module)  # type: ignore[return-value]  # no plain tuple is among these
        stack, table = tables[match[1]]
        part, start = table.get(match[3]), f"{stack}.{match[2]}."
        return Rows(tuple(start + one for one in part)) if isinstance(part, tuple) else part and start + part

    return AdapterNames(PREFIX, re.compile("transformer_blocks"), translate)


def own(names: Table) -> Table:
    """diffusers' names for themselves."""
    listed: dict[str, str] = {}
    for theirs in names.values():
        several = theirs.names if isinstance(theirs, Rows) else (theirs,) if isinstance(theirs, str) else theirs
        listed |= {name: name for name in several}
    return listed


def with_underscores(names: Table) -> Table:
    """The same table, with every key also spelled with underscores for dots."""
    return {spelt: theirs for name, theirs in names.items() for spelt in (name, name.replace(".", "_"))}


NAMES = names_of(DOUBLE, SINGLE, REST)
