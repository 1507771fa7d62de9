"""Trainers' names for the modules of FLUX.2's transformer, spelled as FLUX.1's."""
from wan_torchax.models.flux.adapters import ATTENTION, HEAD, names_of

DOUBLE = ATTENTION | {
    "img_mlp.0": "ff.linear_in", "img_mlp.2": "ff.linear_out", "txt_mlp.0": "ff_context.linear_in",
    "txt_mlp.2": "ff_context.linear_out",
}
SINGLE = {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"}
REST = HEAD | {
    "img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    **{f"{name}.lin": f"{name}.linear" for name in (
        "single_stream_modulation", "double_stream_modulation_img", "double_stream_modulation_txt",
    )},
}
NAMES = names_of(DOUBLE, SINGLE, REST)
