"""Classes and functions by the names that configs use. As strings, so that listing the names imports nothing.

Only these tables decide what is imported: a name from an artefact can select one of their rows and nothing else.
"""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wan_torchax.models.family import Family

FAMILIES = {
    "hunyuan15": "wan_torchax.models.hunyuan15.FAMILY",
    "wan": "wan_torchax.models.wan.FAMILY",
    "flux": "wan_torchax.models.flux.FAMILY",
    "flux2": "wan_torchax.models.flux2.FAMILY",
}
STAGES = {
    "text": "wan_torchax.stages.text.Text",
    "image": "wan_torchax.stages.image.Image",
    "encode": "wan_torchax.stages.encode.Encode",
    "face": "wan_torchax.stages.face.Face",
    "audio": "wan_torchax.stages.audio.Audio",
    "voice": "wan_torchax.stages.voice.Voice",
    "coarse_encode": "wan_torchax.stages.coarse.CoarseEncode",
    "coarse": "wan_torchax.stages.coarse.Coarse",
    "denoise": "wan_torchax.stages.denoise.Denoise",
    "driven": "wan_torchax.stages.driven.Driven",
    "live": "wan_torchax.stages.live.Live",
    "reencode": "wan_torchax.stages.encode.Encode",
    "decode": "wan_torchax.stages.decode.Decode",
    "preview": "wan_torchax.stages.preview.Preview",
}
TASKS = {
    "generate": "wan_torchax.run.generate",
    "plan": "wan_torchax.tasks.plan.plan",
    "tune": "wan_torchax.tasks.tune.tune",
    "presets": "wan_torchax.tasks.presets.presets",
    "calibrate": "wan_torchax.tasks.calibrate.calibrate",
    "doctor": "wan_torchax.tasks.doctor.doctor",
    "serve": "wan_torchax.tasks.serve.serve",
    "port": "wan_torchax.tasks.port.port",
    "verify": "wan_torchax.tasks.verify.verify",
    "inspect": "wan_torchax.tasks.inspection.inspect",
}


def load(table: dict[str, str], name: str) -> Any:
    """The class, function or object behind a name of one of the tables."""
    module, _, attribute = table[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def family_of(config) -> "Family":
    """The family of a config's model."""
    return load(FAMILIES, config.model.family)
