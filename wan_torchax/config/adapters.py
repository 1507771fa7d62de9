"""The adapters of a config, each a row of conf/adapter. No JAX, no torch.

    rows(config)                    # {"style": Adapter(path="x.safetensors", strength=0.8, target=["high"]), …}
    components(row, experts)        # ["transformer"]
"""
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wan_torchax import own_path
from wan_torchax.config.schema import Adapter
from wan_torchax.config.wording import one_of

ALLOW = "allow_unmatched"  # the only key of the group that is not a row
TARGETS = ("all", "high", "low", "transformer", "transformer_2")
MOST_STRENGTH = 10
SHAPE = "a path, or repo and file; it may have revision, strength, blocks and target"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
IN_FOLDERS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")  # as PEFT and diffusers save them
PEFT_FILE, PEFT_SETTINGS = IN_FOLDERS[0], "adapter_config.json"  # lora_alpha is in the second


def rows(config: DictConfig) -> dict[str, Adapter]:
    """Every adapter, including those of strength 0, in config order."""
    return {name: OmegaConf.to_object(typed(row)) for name, row in config.adapter.items() if name != ALLOW}


def typed(row) -> DictConfig:
    return OmegaConf.merge(OmegaConf.structured(Adapter), row)


def components(row: Adapter, experts: list[str]) -> list[str]:
    """The transformers that an adapter applies to."""
    high, low = experts[0], experts[-1]
    names = {"all": experts, "high": [high], "low": [low]}
    return [name for name in experts if any(name in names.get(target, [target]) for target in row.target)]


# ---------------------------------------------------------------- validation


def adapter_problems(config: DictConfig) -> Iterator[str]:
    """Invalid rows and missing files; file contents are checked when the checkpoints are found."""
    if not isinstance(config.adapter.get(ALLOW, False), bool):
        yield f"adapter.{ALLOW}={config.adapter[ALLOW]}: must be true or false"
    for name in config.adapter:
        if name == ALLOW:
            continue
        key = f"adapter.{name}"
        if not re.fullmatch(r"\w+", str(name)):
            yield f"{key}: a name is letters, digits and _"
        try:
            row = typed(config.adapter[name])
        except (OmegaConfBaseException, ValueError, TypeError):
            yield f"{key}={config.adapter[name]}: needs {SHAPE}, e.g. {{path: style.safetensors, strength: 0.8}}"
            continue
        yield from place_problems(key, row, config.task == "plan", named(config))
        yield from number_problems(key, row, list(config.model.experts))


def named(config: DictConfig) -> str:
    """The adapters that have a file, for messages about one that has none."""
    entries = {name: row for name, row in config.adapter.items() if OmegaConf.is_dict(row)}
    with_file = [name for name, row in entries.items() if row.get("path") or row.get("repo")]
    return f"those that are configured: {', '.join(with_file) or 'none'}"


def place_problems(key: str, row: DictConfig, planned: bool, configured: str) -> Iterator[str]:
    """Problems with a file's location. A plan does not need the file."""
    if row.path is None and None in (row.repo, row.file):
        yield f"{key}: needs {SHAPE}; {configured}"
    elif row.path is not None and (row.repo or row.file):
        yield f"{key}: has a path and a Hub id; give one of the two"
    name = row.path or row.file
    if row.path is not None and own_path(row.path).is_dir():
        yield from folder_problems(f"{key}.path={row.path}", own_path(row.path))
    elif name is not None and name.endswith(PICKLES):
        yield f"{key}: {name} can run code when opened and is not read; convert it to safetensors"
    elif row.path is not None and not planned and not own_path(row.path).is_file():
        yield f"{key}.path={row.path}: no such file"
    elif name is not None and not name.endswith(".safetensors"):
        yield f"{key}: {name} is no .safetensors file; convert it, or name the folder that PEFT saved"


def folder_problems(key: str, folder: Path) -> Iterator[str]:
    """A folder must be one that PEFT or diffusers saved."""
    if not file_of(folder).is_file():
        pickles = "".join(f" ({path.name} can run code when opened)" for path in folder.glob("adapter_model.bin"))
        yield f"{key}: a folder without {' or '.join(IN_FOLDERS)}{pickles}; name a .safetensors file"


def file_of(path: Path) -> Path:
    """An adapter's file: the path itself, or in a folder the file that PEFT or diffusers saved."""
    return next((path / name for name in IN_FOLDERS if (path / name).is_file()), path)


def number_problems(key: str, row: DictConfig, experts: list[str]) -> Iterator[str]:
    if not abs(row.strength) <= MOST_STRENGTH:  # also rejects NaN
        yield f"{key}.strength={row.strength}: must be from -{MOST_STRENGTH} to {MOST_STRENGTH}; usual 1.0, 0 is off"
    if not all(abs(factor) <= MOST_STRENGTH for factor in row.blocks):
        yield f"{key}.blocks={row.blocks}: each must be from -{MOST_STRENGTH} to {MOST_STRENGTH}; usual 0 to 1"
    if not row.target:
        yield f"{key}.target=[]: name at least one of {', '.join(TARGETS)}; strength=0 turns an adapter off"
    for target in row.target:
        yield from one_of(f"{key}.target", target, TARGETS)
        if target in ("high", "low", "transformer_2") and len(experts) == 1:
            yield f"{key}.target={target}: this model has one transformer; leave it out, or use all"
