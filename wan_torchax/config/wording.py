"""Phrases that error messages share."""
import copy
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CHOICES_SHOWN = 12


def nearest(value, choices: Iterable[str]) -> str:
    """The choice most like a misspelt value."""
    choices = list(choices)
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
    if close:
        return f"nearest: {close[0]}"
    rest = f" and {len(choices) - CHOICES_SHOWN} more" if len(choices) > CHOICES_SHOWN else ""
    return "one of: " + ", ".join(choices[:CHOICES_SHOWN]) + rest


def nearest_multiple(value: int, base: int, offset: int = 0) -> str:
    """The two valid values around `value`, valid being base * n + offset."""
    below = max((value - offset) // base * base + offset, offset or base)
    return f"nearest {below} or {below + base}" if below != value else str(value)


def one_of(key: str, value, choices: Iterable[str]) -> Iterator[str]:
    """A problem if the value is not among the choices."""
    choices = list(choices)
    if value not in choices:
        close = nearest(value, choices)
        every = f"; all: {', '.join(choices)}" if close.startswith("nearest") and len(choices) <= CHOICES_SHOWN else ""
        yield f"{key}={value}: unknown; {close}{every}"


def listed(problems: list[str], most: int | None = None) -> str:
    """Problems as the lines of one message."""
    rest = 0 if most is None else max(len(problems) - most, 0)
    shown = problems[:most] + ([f"and {rest} more"] if rest else [])
    return "\n".join(f"  - {problem}" for problem in shown)


def flatten(node: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """{"a": {"b": 1}} -> ("a.b", 1)."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}. A later key's value replaces what an earlier one has there."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        node = made
        for name in parents:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        node[last] = copy.deepcopy(value)  # further keys may go into it
    return made
