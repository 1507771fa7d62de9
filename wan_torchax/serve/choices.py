"""Adapters and few-step recipes of conf/ that a server offers by default: their files are on this machine and fit the
model it serves. serve.choices overrides them."""
import contextlib
from pathlib import Path

import yaml

from wan_torchax.config.adapters import components, is_for
from wan_torchax.config.commandline import CONF, options
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import Adapter, ConfigError
from wan_torchax.runtime.adapters import find, match, parse
from wan_torchax.runtime.checkpoint import find_present, index
from wan_torchax.runtime.formats import by_module

# Keys that a recipe sets.
RECIPE_KEYS = ("steps", "guidance_scale", "guidance_scale_2", "scheduler", "resolution.flow_shift")


def at_hand(config) -> dict[str, list[str]]:
    """Options by group, `none` first; empty if the model is not on this machine or nothing fits it."""
    shapes = shapes_of(config)
    if shapes is None:
        return {}
    adapters = [name for name in options("adapter") if fits(rows_of(name), shapes, config)]
    recipes = [name for name in options("sampling") if adapter_of(name) in adapters]
    offered = {"adapter": adapters, "sampling": recipes}
    return {group: ["none", *names] if group == "adapter" else names for group, names in offered.items() if names}


def shapes_of(config) -> dict[str, dict[str, tuple]] | None:
    """Shapes of the transformers' tensors; None if the model is not on this machine."""
    present, family = find_present(config, config.model.experts), family_of(config)
    if len(present) < len(config.model.experts):
        return None
    tensors = {name: by_module(index(there.path), family.spec(name)) for name, there in present.items()}
    return {name: {key: one.shape for key, one in stored.items()} for name, stored in tensors.items()}


def rows_of(name: str) -> dict[str, dict]:
    """The adapters in a file of conf/adapter, which may also be a recipe."""
    content = read(CONF / "adapter" / f"{name}.yaml")
    return content.get("adapter", content)


def adapter_of(recipe: str) -> str | None:
    """The option of conf/adapter that a file of conf/sampling chooses."""
    defaults = read(CONF / "sampling" / f"{recipe}.yaml").get("defaults", [])
    return next((one["override /adapter"] for one in defaults if "override /adapter" in one), None)


def is_recipe(group: str, name: str) -> bool:
    """Whether an option sets how to sample, and so replaces the owner's sampling settings."""
    return "scheduler" in read(CONF / group / f"{name}.yaml")


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def fits(rows: dict[str, dict], shapes: dict[str, dict[str, tuple]], config) -> bool:
    """Whether there are rows, each with its file on this machine and all of the file's weights matching the model."""
    family = family_of(config)
    with contextlib.suppress(ConfigError, OSError):
        for name, row in rows.items():
            adapter = Adapter(**row)
            path, targets = find(name, adapter, local_only=True), components(adapter, list(config.model.experts))
            if path is None or not path.is_file() or not targets or not is_for(adapter, config):
                return False
            for target in targets:
                placed, elsewhere, problems = match(parse(path, family.adapters), shapes[target], family)
                if not placed or elsewhere or problems:
                    return False
        return bool(rows)
    return False
