"""Which class or function does what, by the name a config uses. Strings, so that asking for the names imports nothing.

Only this table says what is imported: a name that an artefact brings can choose among its rows and nothing else.
"""
import importlib

STAGES = {
    "text": "wan_torchax.stages.text.Text",
    "image": "wan_torchax.stages.image.Image",
    "encode": "wan_torchax.stages.encode.Encode",
    "encode_first": "wan_torchax.stages.encode.EncodeFirst",
    "encode_video": "wan_torchax.stages.encode.EncodeVideo",
    "encode_control": "wan_torchax.stages.control.EncodeControl",
    "denoise": "wan_torchax.stages.denoise.Denoise",
    "decode": "wan_torchax.stages.decode.Decode",
}
COMPONENTS = {
    "text_encoder": "wan_torchax.models.text_encoder.TextEncoder",
    "image_encoder": "wan_torchax.models.image_encoder.ImageEncoder",
    "transformer": "wan_torchax.models.transformer.Transformer",
    "transformer_2": "wan_torchax.models.transformer.Transformer",
    "vae": "wan_torchax.models.vae.Vae",
}
TASKS = {
    "generate": "wan_torchax.tasks.generate.generate",
    "plan": "wan_torchax.tasks.plan.plan",
    "tune": "wan_torchax.tasks.tune.tune",
    "presets": "wan_torchax.tasks.presets.presets",
    "calibrate": "wan_torchax.tasks.calibrate.calibrate",
    "doctor": "wan_torchax.tasks.doctor.doctor",
    "serve": "wan_torchax.tasks.serve.serve",
}


# Components that another's settings describe (architecture, dtype, sharding): they have other weights and nothing else,
# so that one compiled program serves both.
TWINS = {"transformer_2": "transformer"}


def described_by(component: str) -> str:
    """The name under which a component stands in the config."""
    return TWINS.get(component, component)


def load(table: dict[str, str], name: str):
    """The class or function behind a name of one of the tables."""
    module, _, attribute = table[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)
