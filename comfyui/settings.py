"""A workflow's settings, as overrides for composing a config.

A workflow is untrusted, so it may only choose what the project offers: all its settings go through
wan_torchax/config/trust.py. Paths, flags and code come from whoever starts ComfyUI, in WAN_TORCHAX_OVERRIDES.
"""
import contextlib
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf

from wan_torchax.config import commandline, inputs, live, trust
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.config.wording import flatten

from . import files, host

OWNER = "WAN_TORCHAX_OVERRIDES"
SERVER_DEFAULTS = ("keep_resident=true", "preview_every=5")  # better for a server than run.py's defaults
# A valid size, for when the size does not matter or is not known yet.
ANY_SIZE = ("resolution.height=${model.min_size}", "resolution.width=${model.min_size}")
UNCHANGED = "default"  # a choice in the Config node: the preset's value, else the owner's, else conf/config.yaml's

# Widgets, by their names in the earlier TPU nodes -> config keys.
WIDGETS = {
    "prompt": "prompt.text", "negative_prompt": "prompt.negative", "height": "resolution.height",
    "width": "resolution.width", "num_frames": "resolution.frames", "fps": "resolution.fps",
    "flow_shift": "resolution.flow_shift", "num_inference_steps": "steps", "guidance_scale": "guidance_scale",
    "seed": "seed",
}

# Phrases in the runner's messages for the command line -> their equivalents in a graph.
WORDS = {
    "on the command line": f"by whoever starts ComfyUI, in {OWNER}",
    "not an override": "not a setting of the form key=value",
    "give each set of flags a process of its own": "restart ComfyUI to change them",
    " (python run.py --cfg job shows them all)": "",
    "give video=clip.mp4 too": "connect video too",
    inputs.SIZE_REMEDY: "choose another resolution, or set height and width",
}


@dataclass(frozen=True)
class Chosen:
    """Checked settings of a Config node and the Adapter nodes after it. ComfyUI lets a workflow write any list into an
    input, but it cannot forge one of these."""

    overrides: tuple[str, ...]
    recipe: dict = field(default_factory=dict)  # widgets -> the values that an adapter was made for


def compose(overrides=(), files="none"):
    """This server's config with a workflow's overrides on top, validated; `files` as in validation.validate."""
    config = compose_unchecked(overrides)
    if list(config.stages) != list(config.pipeline.stages):
        raise ConfigError(f"stages={list(config.stages)}: every node has its own; leave the line out")
    validate(config, files)
    return config


def compose_unchecked(overrides):
    owner = commandline.rewrite(shlex.split(os.environ.get(OWNER, "")))
    config = commandline.compose([*SERVER_DEFAULTS, *owner, *overrides])
    if live.is_on(config):  # it shows its frames themselves, as they come
        config = commandline.compose([*SERVER_DEFAULTS, "preview_every=0", *owner, *overrides])
    return config


def check_files(config, given) -> None:
    """The connected pictures and videos must be those that the model starts from."""
    taken, model = inputs.taken(config), config.model.name
    for name, tensor in given.items():
        if tensor is not None and name not in taken:
            has = f"{model} starts from {', '.join(taken)}" if taken else f"{model} starts from a prompt alone"
            raise ConfigError(f"{name}: {has}; disconnect it, or choose another model in the Config node")
        if tensor is None and name in taken and name not in config.pipeline.optional:
            raise ConfigError(f"{name}: {model} starts from it; connect a node that gives one, like Load Image")


def from_files(folder, fps, given) -> list[str]:
    """Write them to a folder of our own; returns overrides that name the files."""
    said: dict[str, str | list[str]] = {}
    for name, tensor in given.items():
        if tensor is None:
            continue
        path = Path(folder) / name
        if name in inputs.SOUNDS:
            said[name] = files.write_sound(path, tensor)
            continue
        frames = files.pixels(name, tensor, 3 if name == "mask" else 4)
        if name == "references":
            said[name] = [files.write_picture(Path(f"{path}_{k}"), frame) for k, frame in enumerate(frames)]
        elif name in ("image", "last_image") or (name == "mask" and len(frames) == 1):
            said[name] = files.write_picture(path, frames[0])
        else:
            said[name] = files.write_video(path, frames, fps)
    return [f"{name}={trust.written(value)}" for name, value in said.items()]


def from_config_node(overrides="", **choices) -> Chosen:
    """The settings of a Config node's widgets: options of groups, and one setting per line."""
    chosen = [trust.override(group, name) for group, name in choices.items() if name != UNCHANGED]
    lines = [line.strip() for line in overrides.splitlines()]
    settings = [trust.repeated(line) for line in lines if line and not line.startswith("#")]
    return Chosen((*chosen, *(safe for listed in settings for safe in listed)))


def adapter_names() -> list[str]:
    """An Adapter node's choices: the project's own, and the files in ComfyUI's LoRA folders."""
    return [*(name for name in commandline.options("adapter") if name != "none"), *host.adapter_files()]


def adapter_option(name) -> tuple[dict, list[str]]:
    """The rows of a file of conf/adapter, and the recipe that some include, as overrides."""
    said = OmegaConf.to_container(commandline.read_option("adapter", name))
    if "adapter" not in said:
        return said, []
    rows, chosen = said.pop("adapter"), [pair for entry in said.pop("defaults") for pair in entry.items()]
    groups = [f"{group.removeprefix('override /')}={option}" for group, option in chosen]
    return rows, groups + [f"{key}={trust.written(value)}" for key, value in flatten(said)]


def widget_values(config) -> dict:
    """A config's values for all widgets, and its scheduler, which is part of a recipe too."""
    keys = WIDGETS | {"scheduler": "scheduler.name"}
    return {widget: OmegaConf.select(config, key) for widget, key in keys.items()}


def recipe_of(adapter) -> dict:
    """The values that a file of conf/adapter was made for, by widget: those it changes in a default config."""
    plain = widget_values(commandline.compose([]))
    adapted = widget_values(commandline.compose([f"adapter={adapter}"]))
    return {widget: value for widget, value in adapted.items() if value != plain[widget]}


def check_recipe(recipe, values, remedy) -> None:
    """Check widgets against an adapter's recipe: with other steps or guidance the video is ruined, without a hint why.
    """
    for widget, needed in recipe.items():
        if widget in values and values[widget] != needed:
            advice = remedy.format(widget=widget, line=f"{WIDGETS.get(widget, widget)}={needed}")
            raise ConfigError(f"{widget}={values[widget]}: the adapter was made for {needed}; {advice}")


def from_adapter_node(config, adapter, strength, target) -> Chosen:
    """A Config node's settings with an Adapter node's rows added, from one of the owner's files, by name."""
    chosen, own = checked(config), host.adapter_files()
    if adapter not in adapter_names():
        raise ConfigError(f"adapter={adapter}: no such adapter; one of: {', '.join(adapter_names())}")
    if adapter in own:
        rows, options, recipe = {adapter.removesuffix(".safetensors"): {"path": own[adapter]}}, [], {}
    else:
        (rows, options), recipe = adapter_option(adapter), recipe_of(adapter)
    names, added = list(compose_unchecked(chosen.overrides).adapter), []
    for name, row in rows.items():
        names.append(unused_name(name, names))
        key = f"adapter.{names[-1]}"
        added += [f"{key}.{entry}={trust.written(value)}" for entry, value in row.items()]
        added.append(trust.override(f"{key}.strength", strength))
        added += [] if target == UNCHANGED else [trust.override(f"{key}.target", [target])]
    adapted = Chosen((*options, *chosen.overrides, *added), chosen.recipe | recipe)
    remedy = "write a line {line} into the Config node"
    check_recipe(recipe, widget_values(compose_unchecked(adapted.overrides)), remedy)
    return adapted


def unused_name(text, names) -> str:
    """A name for a row of adapters, derived from a text: a word in Hydra's grammar that is not among `names`."""
    word = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
    word = word if word[:1].isalpha() else f"lora_{word}".rstrip("_")
    numbered = (f"{word}_{number}" for number in range(2, len(names) + 3))
    return next(name for name in (word, *numbered) if name not in names)


def from_widgets(config=None, **values) -> list[str]:
    """Overrides from widgets: they take precedence over the config, but must match its adapter's recipe."""
    if config is not None:
        check_recipe(checked(config).recipe, values, "link it to {widget} of the last Wan 2.1 Adapter node")
    return [trust.override(WIDGETS[name], value) for name, value in values.items()]


def from_prompts(prompt, negative_prompt) -> list[str]:
    texts = from_widgets(prompt=prompt, negative_prompt=negative_prompt)
    return [*texts, "prompt.file=null", "prompt.negative_file=null"]


def choose(config, model_id) -> list[str]:
    """The Config node's overrides, or without one an override for the model with this path or Hub id."""
    if config is not None:
        return list(checked(config).overrides)
    paths = model_paths()
    if model_id not in paths.values():
        known, remedy = ", ".join(paths.values()), "connect a Wan 2.1 Config node to choose among all"
        raise ConfigError(f"model_id={model_id}: no model that this project has ({known}); {remedy}")
    return [f"model={next(name for name, path in paths.items() if path == model_id)}"]  # several may share a path


def checked(config) -> Chosen:
    if not isinstance(config, Chosen):
        raise ConfigError("config: not from a Wan 2.1 Config node; connect one")
    return config


def model_paths() -> dict[str, str]:
    """Models' names -> their paths in conf/model, those with a transformer from elsewhere last."""
    files = {name: commandline.read_option("model", name) for name in commandline.options("model")}
    return {name: files[name].path for name in sorted(files, key=lambda name: "paths" in files[name])}


@contextlib.contextmanager
def in_words_of_nodes(widgets=WIDGETS):
    """Reword errors: they name widgets, and remedies that exist in ComfyUI."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        for theirs, ours in WORDS.items():
            message = message.replace(theirs, ours)
        message = re.sub(rf"=[^=\n]*{files.PREFIX}\S+:", ":", message)  # to the user, what is connected is not a file
        for widget, key in widgets.items():
            message = re.sub(rf"(?<![\w.]){re.escape(key)}=", f"{widget}=", message)
        raise ConfigError(message) from error
