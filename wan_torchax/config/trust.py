"""What an artefact may set. No JAX, no torch.

An artefact is untrusted input: a video's metadata, a run folder, a list of prompts, a workflow, a request. It may only
choose what the project offers: a group's option by name, and the keys that schema.py marks as `offered`, each with a
literal of the key's type. Code, commands, flags and paths come only from the owner's command line. Every artefact
passes through `override`, whose result is safe to compose.

    override("resolution.height", 64)         # "resolution.height=64"
    override("prompt.text", "${oc.env:HOME}") # "prompt.text='\\${oc.env:HOME}'": not interpolated
    override("compile.xla_flags", ["…"])      # ConfigError
"""
import contextlib
import dataclasses
import functools
import json
import math
import re
import reprlib
import typing
from typing import Any

import yaml
from hydra.errors import HydraException

from wan_torchax import private
from wan_torchax.config import schema
from wan_torchax.config.commandline import key_of, known_keys, options, plain_text, quote
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import flatten, nearest

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
MOST_LETTERS = 1000  # of a number or list given as text
MOST_PROMPT = 100_000  # of an override with a prompt


def parsed(values: dict) -> dict[str, Any]:
    """An artefact's values by key, each of the key's type; raises if one is not allowed. Objects may be nested."""
    return {key: chosen(key, value) if key in groups() else offered_value(key, value) for key, value in flatten(values)}


def overrides(values: dict) -> list[str]:
    """The same, as overrides for `compose`."""
    return [f"{key}={written(value, key in groups())}" for key, value in parsed(values).items()]


def override(key: str, value: Any) -> str:
    return overrides({key: value})[0]


def chosen(group: str, value: Any) -> str | list[str]:
    """An option of a group, or several where its options are rows of a table."""
    several = value if isinstance(value, list) and group in tables() else [value]
    if not all(name in options(group) for name in several):
        raise ConfigError(f"{group}={shown(value)}: no such option; one of: {', '.join(options(group))}")
    return value


def repeated(text: str) -> list[str]:
    """An artefact's override in Hydra's grammar, as overrides that are safe to compose."""
    most = MOST_PROMPT if re.match(r"[\w.]+=['\"]", text) else MOST_LETTERS  # Hydra is slow at unquoted text
    if len(text) > most:
        raise ConfigError(f"{shown(text)}: longer than {most} characters")
    try:
        change = private.parse_override(text)
    except (HydraException, RecursionError) as error:
        raise ConfigError(f"{shown(text)}: not an override ({shown(str(error).splitlines()[0])})") from error
    if change.type.name != "CHANGE" or change.package is not None:
        raise ConfigError(f"{shown(key_of(text))}: may only be added or removed on the command line")
    if change.is_sweep_override():
        raise ConfigError(f"{shown(text)}: several values; sweeps are only allowed on the command line")
    value = change.value()
    return overrides({change.key_or_group: plain_text(value) if isinstance(value, str) else value})


def offered_value(key: str, value: Any) -> Any:
    """The value, in the key's type; raises if it has another type or the key is not offered."""
    kind = kind_of(key)
    if kind is None:
        if key not in known_keys() and key.partition(".")[0] not in tables():
            raise ConfigError(f"{shown(key) or repr(key)}: no such key; {nearest(key, [*offered(), *groups()])}")
        raise ConfigError(f"{key}: may only be given on the command line")
    is_list = typing.get_origin(kind) is list  # also of texts
    if isinstance(value, str) and (is_list or str not in (kind, *typing.get_args(kind))):
        value = read_literal(value)
    if not fits(kind, value):
        raise ConfigError(f"{key}={shown(value)}: must be {words(kind)}")
    return value


class PlainLoader(yaml.SafeLoader):
    """Rejects aliases: with them, a few characters can expand to fill the memory."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases")
        return super().compose_node(parent, index)


def read_literal(text: str) -> Any:
    """A number or list given as YAML text; the text itself if it is neither."""
    if len(text) <= MOST_LETTERS:
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            return yaml.load(text, PlainLoader)
    return text


def is_offered(key: str) -> bool:
    return kind_of(key) is not None


def kind_of(key: str) -> Any:
    """The type of an offered key; None if the key is not offered."""
    parent, _, name = key.rpartition(".")
    table, _, row = parent.partition(".")
    if table in tables():
        return offered().get(f"{table}.*.{name}") if re.fullmatch(r"\w+", row) else None
    kind = offered().get(key)
    if kind is None and typing.get_origin(offered().get(parent)) is dict and re.fullmatch(r"\w+", name):
        return typing.get_args(offered()[parent])[1]
    return kind


@functools.cache
def offered() -> dict[str, Any]:
    """Every key that schema.py marks as offered, and its type."""
    return dict(walk(schema.Config, "", False))


@functools.cache
def groups() -> tuple[str, ...]:
    """The groups of which an artefact may choose an option."""
    named = (entry.name for entry in dataclasses.fields(schema.Config) if schema.GROUP in entry.metadata)
    return "preset", "sampling", "sparse", *named


@functools.cache
def tables() -> tuple[str, ...]:
    """The groups whose options are rows of a table: an artefact may choose several."""
    return tuple(entry.name for entry in dataclasses.fields(schema.Config) if entry.metadata.get(schema.ROWS))


def walk(kind, prefix: str, inside: bool):
    hints = typing.get_type_hints(kind)
    for entry in dataclasses.fields(kind):
        key, hint, marked = prefix + entry.name, hints[entry.name], inside or schema.OFFERED in entry.metadata
        if dataclasses.is_dataclass(hint):
            yield from walk(hint, f"{key}.", marked)
        elif entry.metadata.get(schema.ROWS):
            yield from walk(entry.metadata[schema.ROWS], f"{key}.*.", False)
        elif marked:
            yield key, entry.metadata.get(schema.KIND) or hint


def fits(kind, value) -> bool:
    """Whether a value has a type, as strictly as in JSON: a bool is not an int."""
    if typing.get_origin(kind) is typing.Union:
        return any(fits(part, value) for part in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(fits(typing.get_args(kind)[0], item) for item in value)
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e300 and not math.isnan(value)
    return type(value) is kind


def words(kind) -> str:
    if typing.get_origin(kind) is typing.Union:
        return " or ".join("null" if part is type(None) else words(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) in (list, dict):
        return f"a {typing.get_origin(kind).__name__} of texts or numbers"
    return WORDS[kind]


def written(value, plain: bool = False) -> str:
    """A literal in Hydra's grammar; `plain`: for texts that need no quotes, such as an option's name."""
    if isinstance(value, list):
        return f"[{','.join(written(item, plain) for item in value)}]"
    return (value if plain else quote(value)) if isinstance(value, str) else json.dumps(value)


def shown(value) -> str:
    """A value for a message, truncated before formatting: it may be huge."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
