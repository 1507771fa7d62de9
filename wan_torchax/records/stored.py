"""`resume` and `replay`: a stored run's configuration composed again, with what this command line says on top."""
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wan_torchax.config.commandline import compose, key_of, literal
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import flatten
from wan_torchax.records import media
from wan_torchax.records.outputs import CALL, UNCOUNTED, is_under

log = logging.getLogger("wan")
HERE = "runs are under outputs/<date>/<time>"


@dataclass
class Stored:
    """What a run folder or a video says of how it was made."""

    config: dict
    overrides: list[str] | None  # None: not known
    metrics: dict = field(default_factory=dict)  # device, mesh, versions …; empty if the run did not get that far


def take_over(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The config of the run that `resume` or `replay` names, with this command line's overrides on top; else `config`.

    Both are composed anew, so that an override here has the consequences it has anywhere: another resolution brings its
    flow shift, another model its steps. Where conf/ or a default has changed since, the stored value holds, unless this
    command line touches it.
    """
    key = "replay" if config.replay is not None else "resume"
    if config[key] is None:
        return config
    stored = read_stored(Path(config[key]), key)
    if "preset" in map(key_of, overrides):
        raise ConfigError(f"{key}={config[key]}: takes its whole configuration from there; leave preset out")
    before = [override for override in stored.overrides or [] if not replaced(key_of(override), overrides)]
    try:
        base = compose(before)
    except ConfigError as error:
        log.warning("%s=%s: %s; its values are taken one by one", key, config[key], error)
        before, base = [], compose([])
    try:
        return pin(compose([*before, *overrides]), base, stored.config, [key_of(override) for override in overrides])
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}={config[key]}: made by another version of this program ({reason})") from error


def replaced(key: str, overrides: list[str]) -> bool:
    """Whether a stored override gives way: it belongs to the call, or this command line sets it, or its whole group."""
    return is_under(key, (*CALL, "compile.cache_dir", *map(key_of, overrides)))


def pin(now: DictConfig, base: DictConfig, stored: dict, said: list[str]) -> DictConfig:
    """`now` with the values of the stored config that its own overrides (`base`) do not give any more.

    What this command line says, and what follows from it, stays: where `now` differs from `base`. A value that is an
    interpolation (the scheduler's shift follows the resolution's) is looked at once all others are in place, and left
    alone where it then gives what was stored. Keys that the stored config does not have came with a later version.
    """
    values = {key: value for key, value in flatten(stored) if not is_under(key, (*CALL, "compile.cache_dir"))}
    for interpolated in (False, True):
        today, new = leaves(base), leaves(now)
        for key, value in values.items():
            if is_interpolated(now, key) is not interpolated or today.get(key) == value:
                continue
            if key not in today and is_under(key, UNCOUNTED):
                continue  # of another version, and nothing that videos are made from
            follows = key in today and key in new and new[key] != today[key]
            set_value(base, key, value)
            if not (follows or is_under(key, said)):
                set_value(now, key, value)
    return now


def set_value(config: DictConfig, key: str, value) -> None:
    value = literal(value) if isinstance(value, str) else value
    OmegaConf.update(config, key, value, merge=False, force_add=is_open(config, key))


def leaves(config: DictConfig) -> dict:
    return dict(flatten(OmegaConf.to_container(config, resolve=True)))


def is_interpolated(config: DictConfig, key: str) -> bool:
    """Whether a key's value, or one that it lies in, is an interpolation."""
    parts = key.split(".")
    for end in range(1, len(parts) + 1):
        parent = OmegaConf.select(config, ".".join(parts[: end - 1])) if end > 1 else config
        if not OmegaConf.is_dict(parent) or parts[end - 1] not in parent:
            return False
        if OmegaConf.is_interpolation(parent, parts[end - 1]):
            return True
    return False


def is_open(config: DictConfig, key: str) -> bool:
    """Whether a key may be added: into tables by name (rules, ops, architectures), not into classes of the schema."""
    parent = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
    return parent is None or OmegaConf.get_type(parent) is dict


def read_stored(path: Path, key: str) -> Stored:
    """Read a run folder or, for `replay`, a video."""
    if (path / "config.yaml").is_file():
        metrics, command = (read_json(path / name) for name in ("metrics.json", "command.json"))
        overrides = command.get("overrides", metrics.get("overrides"))
        return Stored(yaml.safe_load((path / "config.yaml").read_text()), overrides, metrics)
    video = ", or a video made by this program" if key == "replay" else ""
    if path.is_dir():
        raise ConfigError(f"{key}={path}: not a run folder (it has no config.yaml); {HERE}")
    if not path.is_file():
        raise ConfigError(f"{key}={path}: no such run folder{' or video' if video else ''}; {HERE}")
    metadata = media.read_metadata(path)
    if key == "resume" or not metadata or "config" not in metadata:
        raise ConfigError(f"{key}={path}: carries no settings; give a run folder{video}")
    return Stored(metadata["config"], metadata.get("overrides"), metadata)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {}


def compare_replay(config: DictConfig, now: dict) -> None:
    """Say in what a replay cannot be expected to be bit for bit the same."""
    if config.replay is None:
        return
    then = read_stored(Path(config.replay), "replay").metrics
    for key in ("config_hash", "device", "devices", "mesh", "versions"):
        if then.get(key) != now[key]:
            log.warning("replay: %s differs: %s then, %s now; the video will be alike, not the same bit for bit",
                        key, then.get(key), now[key])
