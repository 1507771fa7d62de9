"""Which class or function does what, by the name a config uses. Strings, so that asking for the names imports nothing.

Only this table says what is imported: a name that an artefact brings can choose among its rows and nothing else.
"""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wan_torchax.models.family import Family

FAMILIES = {
    "wan": "wan_torchax.models.wan.FAMILY",
    "flux": "wan_torchax.models.flux.FAMILY",
    "flux2": "wan_torchax.models.flux2.FAMILY",
}
STAGES = {
    "text": "wan_torchax.stages.text.Text",
    "image": "wan_torchax.stages.image.Image",
    "encode": "wan_torchax.stages.encode.Encode",
    "denoise": "wan_torchax.stages.denoise.Denoise",
    "decode": "wan_torchax.stages.decode.Decode",
}
TASKS = {
    "generate": "wan_torchax.run.generate",
    "plan": "wan_torchax.tasks.plan.plan",
    "tune": "wan_torchax.tasks.tune.tune",
    "presets": "wan_torchax.tasks.presets.presets",
    "calibrate": "wan_torchax.tasks.calibrate.calibrate",
    "doctor": "wan_torchax.tasks.doctor.doctor",
    "serve": "wan_torchax.tasks.serve.serve",
}


def load(table: dict[str, str], name: str) -> Any:
    """The class, function or object behind a name of one of the tables."""
    module, _, attribute = table[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def family_of(config) -> "Family":
    """What the model of a config belongs to."""
    return load(FAMILIES, config.model.family)
