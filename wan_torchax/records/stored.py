"""`resume` and `replay`: recomposes a stored run's configuration with this command line's overrides on top.

A folder or video is untrusted: only settings that trust.py allows in an artefact are used, and the rest is reported.
"""
import contextlib
import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from wan_torchax.config import inputs, trust
from wan_torchax.config.commandline import compose, key_of, literal, options
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import flatten
from wan_torchax.records import media
from wan_torchax.records.outputs import CALL, UNCOUNTED, config_hash, is_under, settle

log = logging.getLogger("wan")
HERE = "runs are under outputs/<date>/<time>"
SHOWN = 10  # keys to list
MOST_BYTES = {".yaml": 256_000, ".json": 16_000_000}  # size limits of settings files; YAML is slow to parse
MOST_OVERRIDES = 200


@dataclass
class Stored:
    """The settings stored in a run folder or a video."""

    config: dict
    overrides: list[str]
    metrics: dict = field(default_factory=dict)  # device, mesh, versions …; empty if the run did not get that far


def take_over(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The config of the run that `resume` or `replay` names, with this command line's overrides on top; else `config`.

    Both are recomposed, so that overrides have their usual consequences: another resolution brings its flow shift,
    another model its steps. Where conf/ or a default has changed since, the stored value wins unless this command line
    overrides it.
    """
    key = "replay" if config.replay is not None else "resume"
    if config[key] is None:
        return config
    if None not in (config.replay, config.resume):
        raise ConfigError(f"resume={config.resume} and replay={config.replay}: give one of the two")
    stored = read_stored(Path(config[key]), key)
    if "preset" in map(key_of, overrides):
        raise ConfigError(f"{key}={config[key]}: takes its whole configuration from there; leave preset out")
    before, refused = repeat([text for text in stored.overrides if not replaced(key_of(text), overrides)])
    try:
        base = compose(before)
    except ConfigError as error:
        log.warning("%s=%s: %s; its values are taken one by one", key, config[key], error)
        before, base = [], compose([])
    said = [key_of(override) for override in overrides]
    now = pin(compose([*before, *overrides]), base, stored.config, said)
    today, then = leaves(now), dict(flatten(stored.config))
    refused = [key for key in refused if key not in then or today.get(key) != then[key]]  # pin may have taken it over
    warn_refused(f"{key}={config[key]}", [*refused, *differing(now, stored.config, said)])
    return with_pictures(with_adapters(now, config[key], stored, said), Path(config[key]), stored)


def composed_from(config: DictConfig, overrides: list[str]) -> list[str]:
    """The overrides behind what `take_over` gives: those of the run that is taken over, then this command line's. A
    run records them, so that it can be taken over in its turn."""
    key = "replay" if config.replay is not None else "resume"
    if config[key] is None:
        return overrides
    stored = read_stored(Path(config[key]), key)
    before, _ = repeat([text for text in stored.overrides if not replaced(key_of(text), overrides)])
    return [*before, *overrides]


def with_adapters(now: DictConfig, source: str, stored: Stored, said: list[str]) -> DictConfig:
    """Restore strengths and targets of adapters whose files this command line gives; warn about missing ones."""
    for key, value in flatten(stored.config):
        row = key.rpartition(".")[0]
        given = key.startswith("adapter.") and OmegaConf.is_dict(OmegaConf.select(now, row))
        if given and is_sound(key, value) and not is_under(key, said) and OmegaConf.select(now, key) is None:
            OmegaConf.update(now, key, value, force_add=True)
    for name, row in list(now.adapter.items()):  # a stored strength whose file is not given
        if OmegaConf.is_dict(row) and not (row.get("path") or row.get("repo") or f"adapter.{name}" in rows_of(said)):
            del now.adapter[name]
    made_with = stored.metrics.get("adapters")
    for name, about in made_with.items() if isinstance(made_with, dict) else ():
        if isinstance(about, dict) and re.fullmatch(r"\w{1,80}", name) and name not in now.adapter:
            known = re.fullmatch(r"[0-9a-f]{64}", str(about.get("sha256"))) and f" (sha256 {about['sha256']})"
            remedy = f"give it: adapter.{name}.path=<file>"
            log.warning("%s: was made with an adapter%s that is not there; %s", source, known or "", remedy)
    return now


def rows_of(keys: list[str]) -> set[str]:
    """adapter.style.path -> adapter.style."""
    return {".".join(key.split(".")[:2]) for key in keys}


def with_pictures(now: DictConfig, source: Path, stored: Stored) -> DictConfig:
    """Use the input files that the run folder has copies of; warn about missing ones."""
    recorded = stored.metrics.get("inputs")
    for key in inputs.taken(now):
        if inputs.paths(now, key):
            continue
        copies = [literal(str(path)) for path in inputs.copies(source, key)]
        if copies:
            now[key] = copies if OmegaConf.is_list(now[key]) else copies[0]
        elif isinstance(recorded, dict) and (key in recorded or key not in now.pipeline.optional):
            log.warning("%s: was made from a file that is not there; give it: %s=<file>", source, key)
    return now


def repeat(stored: list[str]) -> tuple[list[str], list[str]]:
    """The stored overrides that are trusted, and the keys of those that are not."""
    taken, refused = [], []
    for text in stored:
        try:
            taken += trust.repeated(text)
        except ConfigError:
            refused += [] if is_under(key_of(text), UNCOUNTED) else [key_of(text)]
    return taken, refused


def differing(now: DictConfig, stored: dict, said: list[str]) -> list[str]:
    """Keys that only a command line may set and whose stored values differ."""
    today = leaves(now)
    keys = [key for key, value in flatten(stored) if key not in today or today[key] != value]
    return [key for key in keys if not (trust.is_offered(key) or is_under(key, (*said, *UNCOUNTED)))]


def warn_refused(source: str, keys: list[str]) -> None:
    keys = list(dict.fromkeys(key[:80] for key in keys))
    if keys:
        names = ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")
        log.warning("%s: not taken over, since they may only be given on the command line: %s", source, names)


def replaced(key: str, overrides: list[str]) -> bool:
    """Whether to drop a stored override: it belongs to the invocation, or this command line sets it or its group."""
    return is_under(key, (*CALL, "compile.cache_dir", "compile.store", *map(key_of, overrides)))


def pin(now: DictConfig, base: DictConfig, stored: dict, said: list[str]) -> DictConfig:
    """`now` with those values of the stored config that its own overrides (`base`) no longer produce.

    Overrides of this command line and their consequences, where `now` differs from `base`, are kept. Interpolated
    values (the scheduler's shift follows the resolution's) are handled last and kept if they yield the stored value.
    Keys that the stored config lacks were added by a later version.
    """
    values = {key: value for key, value in flatten(stored) if not is_under(key, CALL) and is_sound(key, value)}
    for interpolated in (False, True):
        today, new = leaves(base), leaves(now)
        for key, value in values.items():
            if is_interpolated(now, key) is not interpolated or today.get(key) == value:
                continue
            if key not in today or key not in new:
                continue  # from another version, mesh or model
            follows = new[key] != today[key]
            set_value(base, key, value)
            if not (follows or is_under(key, said)):
                set_value(now, key, value)
    return now


def set_value(config: DictConfig, key: str, value) -> None:
    OmegaConf.update(config, key, literal(value) if isinstance(value, str) else value, merge=False)


def is_sound(key: str, value) -> bool:
    """Whether an artefact may set the key to this value."""
    try:
        return trust.is_offered(key) and trust.offered_value(key, value) == value
    except ConfigError:
        return False


def leaves(config: DictConfig) -> dict:
    return dict(flatten(OmegaConf.to_container(config, resolve=True)))


def is_interpolated(config: DictConfig, key: str) -> bool:
    """Whether a key or one of its parents is an interpolation."""
    parts = key.split(".")
    for end in range(1, len(parts) + 1):
        parent = OmegaConf.select(config, ".".join(parts[: end - 1])) if end > 1 else config
        if not OmegaConf.is_dict(parent) or parts[end - 1] not in parent:
            return False
        if OmegaConf.is_interpolation(parent, parts[end - 1]):
            return True
    return False


def read_stored(path: Path, key: str) -> Stored:
    """Read a run folder or, for `replay`, a video."""
    if (path / "config.yaml").is_file():
        names = "config.yaml", "metrics.json", "command.json"
        config, metrics, command = (read_mapping(path / name) for name in names)
        return make_stored(config, command.get("overrides", metrics.get("overrides")), metrics)
    video = ", or a video made by this program" if key == "replay" else ""
    if path.is_dir():
        raise ConfigError(f"{key}={path}: not a run folder (it has no config.yaml); {HERE}")
    if not path.is_file():
        raise ConfigError(f"{key}={path}: no such run folder{' or video' if video else ''}; {HERE}")
    metadata = media.read_metadata(path)
    if key == "resume" or not metadata or "config" not in metadata:
        raise ConfigError(f"{key}={path}: carries no settings; give a run folder{video}")
    return make_stored(metadata["config"], metadata.get("overrides"), metadata)


def make_stored(config, overrides, metrics: dict) -> Stored:
    """From untrusted data; if the overrides are unknown, they are reconstructed from the names of chosen options."""
    config = config if isinstance(config, dict) else {}
    if not isinstance(overrides, list):
        names = {group: config[group].get("name") for group in trust.groups() if isinstance(config.get(group), dict)}
        overrides = [f"{group}={name}" for group, name in names.items() if name in options(group)]
    if len(overrides) > MOST_OVERRIDES:
        raise ConfigError(f"a run with {len(overrides)} overrides; at most {MOST_OVERRIDES} are taken over")
    return Stored(config, [text for text in overrides if isinstance(text, str)], metrics)


def read_mapping(path: Path) -> dict:
    """A YAML or JSON file of a run folder; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MOST_BYTES[path.suffix]:
            raise ValueError(f"it has more than {MOST_BYTES[path.suffix]} bytes")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, trust.PlainLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({str(error).splitlines()[0]}); runs write it whole") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a mapping of keys to values")
    return content


def is_alike(config: DictConfig, folder: Path) -> bool:
    """Whether what is in the folder of a sweep's job was made with its settings, those of its speed included."""
    if not config.sweep.resume:
        return False
    with contextlib.suppress(ConfigError):
        before = read_mapping(folder / "config.yaml")
        return bool(before) and config_hash(before, {}) == config_hash(settle(config), {})
    return False


def compare_replay(config: DictConfig, now: dict) -> None:
    """Warn about differences that prevent a bit-identical replay."""
    if config.replay is None:
        return
    then = {"adapters": {}} | read_stored(Path(config.replay), "replay").metrics
    for key in ("config_hash", "adapters", "device", "devices", "mesh", "versions"):
        if then.get(key) != now[key]:
            log.warning("replay: %s differs: %s then, %s now; the video will be alike, not the same bit for bit",
                        key, then.get(key), now[key])
