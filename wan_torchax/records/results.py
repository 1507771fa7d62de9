"""Results of stages in a run's folder: written whole, with the settings that made them, and read again by `resume`."""
import json
import os
from pathlib import Path

import numpy
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import listed


def path_of(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.safetensors"


def save(folder: Path, stage: str, values: dict[str, numpy.ndarray], settings: dict) -> None:
    """A stage's values with the settings that made them. The file appears whole or not at all."""
    path = path_of(folder, stage)
    partial = path.with_name(f".partial-{path.name}")
    arrays = {name: numpy.ascontiguousarray(value) for name, value in values.items()}
    save_file(arrays, partial, metadata={"settings": json.dumps(settings)})
    os.replace(partial, path)


def read(folder: Path, stage: str, gives: list[str]) -> tuple[dict[str, numpy.ndarray], dict]:
    """A stage's values and the settings that made them."""
    path = path_of(folder, stage)
    try:
        with safe_open(path, framework="numpy") as handle:
            return {name: handle.get_tensor(name) for name in gives}, json.loads(handle.metadata()["settings"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        remedy = "remove it to make it again"
        raise ConfigError(f"{path}: not a stage result of this program ({error}); {remedy}") from error


def compare(path: Path, made_with: dict, settings: dict) -> None:
    """Refuse a result that was made with other settings. Those it does not know came with a later version."""
    differences = [
        f"{key}: {made_with[key]!r} there, {value!r} now"
        for key, value in settings.items()
        if key in made_with and made_with[key] != value
    ]
    if differences:
        remedy = "run without resume, or with the same"
        raise ConfigError(f"{path} was made with other settings; {remedy}:\n{listed(differences)}")
