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
from wan_torchax.config import coarse
from wan_torchax.config.geometry import steps_skipped
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ADAPTER_SETTINGS, Adapter
from wan_torchax.config.wording import one_of

MODES = ("merge", "beside")
MOST_RANK = 1024
TARGETS = ("all", "high", "low", "transformer", "transformer_2")
MOST_STRENGTH = 10
SHAPE = "a path, or repo and file; it may have revision, strength, blocks and target"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
IN_FOLDERS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")  # as PEFT and diffusers save them
PEFT_FILE, PEFT_SETTINGS = IN_FOLDERS[0], "adapter_config.json"  # lora_alpha is in the second


def rows(config: DictConfig) -> dict[str, Adapter]:
    """Every adapter, including those of strength 0, in config order."""
    return {name: OmegaConf.to_object(typed(row)) for name, row in config.adapter.items()
            if name not in ADAPTER_SETTINGS}


def typed(row) -> DictConfig:
    """A row with every key; strengths are floats, so that 1 and 1.0 have one key."""
    made = OmegaConf.merge(OmegaConf.structured(Adapter), row)
    strengths = made.strength if OmegaConf.is_list(made.strength) else [made.strength]
    strengths = [float(one) if type(one) is int else one for one in strengths]
    made.strength = strengths if OmegaConf.is_list(made.strength) else strengths[0]
    return made


def components(row: Adapter, experts: list[str]) -> list[str]:
    """The transformers that an adapter applies to."""
    high, low = experts[0], experts[-1]
    names = {"all": experts, "high": [high], "low": [low]}
    return [name for name in experts if any(name in names.get(target, [target]) for target in row.target)]


def is_for(row: Adapter | DictConfig, config: DictConfig) -> bool:
    """Whether an adapter says nothing of models, or that it was made for this one."""
    return not row.models or config.model.name in row.models


# ---------------------------------------------------------------- validation


def adapter_problems(config: DictConfig) -> Iterator[str]:
    """Invalid rows and missing files; file contents are checked when the checkpoints are found."""
    yield from setting_problems(config)
    for name in config.adapter:
        if name in ADAPTER_SETTINGS:
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
        yield from step_problems(key, row, config)
        if not is_for(row, config):
            yield f"{key}: was made for model={' or '.join(row.models)}, not for model={config.model.name}"


def setting_problems(config: DictConfig) -> Iterator[str]:
    """What is said of all rows."""
    settings = {name: config.adapter.get(name, usual) for name, usual in ADAPTER_SETTINGS.items()}
    if not isinstance(settings["allow_unmatched"], bool):
        yield f"adapter.allow_unmatched={settings['allow_unmatched']}: must be true or false"
    yield from one_of("adapter.mode", settings["mode"], MODES)
    if not isinstance(settings["rank"], int) or not 1 <= settings["rank"] <= MOST_RANK:
        yield f"adapter.rank={settings['rank']}: must be from 1 to {MOST_RANK}; usual 64"
    if settings["mode"] == "beside" and not any(spec.adapted for spec in family_of(config).components.values()):
        yield f"adapter.mode=beside: adapters of {config.model.family} are merged only; use adapter.mode=merge"


def step_problems(key: str, row: DictConfig, config: DictConfig) -> Iterator[str]:
    """A strength for each step."""
    if not OmegaConf.is_list(row.strength):
        return
    key, steps = f"{key}.strength={row.strength}", config.steps - steps_skipped(config)
    if config.adapter.get("mode") != "beside":
        yield f"{key}: merged weights have one strength; set adapter.mode=beside, or one number"
    if len(row.strength) != steps:
        yield f"{key}: has {len(row.strength)} numbers, the run {steps} steps; one for each"
    if coarse.is_on(config):
        yield f"{key}: pipeline={config.pipeline.name} counts its coarse steps apart; one number"


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
    strengths = row.strength if OmegaConf.is_list(row.strength) else [row.strength]
    if not all(type(one) in (int, float) and abs(one) <= MOST_STRENGTH for one in strengths):  # also rejects NaN
        yield f"{key}.strength={row.strength}: must be from -{MOST_STRENGTH} to {MOST_STRENGTH}; usual 1.0, 0 is off"
    if not all(abs(factor) <= MOST_STRENGTH for factor in row.blocks):
        yield f"{key}.blocks={row.blocks}: each must be from -{MOST_STRENGTH} to {MOST_STRENGTH}; usual 0 to 1"
    if not row.target:
        yield f"{key}.target=[]: name at least one of {', '.join(TARGETS)}; strength=0 turns an adapter off"
    for target in row.target:
        yield from one_of(f"{key}.target", target, TARGETS)
        if target in ("high", "low", "transformer_2") and len(experts) == 1:
            yield f"{key}.target={target}: this model has one transformer; leave it out, or use all"
