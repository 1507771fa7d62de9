"""What a workflow says, as overrides that a config is composed with.

A workflow may be a stranger's, so it chooses among what the project offers and nothing else: all it says goes through
wan_torchax/config/trust.py. Paths, flags and code come from whoever starts ComfyUI, in WAN_TORCHAX_OVERRIDES.
"""
import contextlib
import os
import re
import shlex

from omegaconf import OmegaConf

from wan_torchax.config import commandline, trust
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.config.wording import flatten

from . import files, host

OWNER = "WAN_TORCHAX_OVERRIDES"
SERVER_DEFAULTS = ("keep_resident=true", "preview_every=5")  # what suits a server better than a command
# Where the size does not matter, or is not known yet: one that the model takes.
ANY_SIZE = ("resolution.height=${model.min_size}", "resolution.width=${model.min_size}")
UNCHANGED = "default"  # a choice of the Config node: as the preset says, else the owner, else conf/config.yaml

# Widgets, by their names in the earlier TPU nodes -> keys of the config.
WIDGETS = {
    "prompt": "prompt.text", "negative_prompt": "prompt.negative", "height": "resolution.height",
    "width": "resolution.width", "num_frames": "resolution.frames", "fps": "resolution.fps",
    "flow_shift": "resolution.flow_shift", "num_inference_steps": "steps", "guidance_scale": "guidance_scale",
    "seed": "seed",
}

# What the runner tells people at a command line -> what it means to those who look at a graph.
WORDS = {
    "on the command line": f"by whoever starts ComfyUI, in {OWNER}",
    "not an override": "not a setting of the form key=value",
    "give each set of flags a process of its own": "restart ComfyUI to change them",
    " (python run.py --cfg job shows them all)": "",
}


class Chosen(tuple):
    """What a Config node has checked. ComfyUI lets a workflow write any list into an input, but not one of these."""


def compose(overrides=(), files="none"):
    """The config of this server with what a workflow says on top, checked; pictures and videos as `files` says."""
    owner = commandline.rewrite(shlex.split(os.environ.get(OWNER, "")))
    config = commandline.compose([*SERVER_DEFAULTS, *owner, *overrides])
    validate(config, files)
    return config


def from_files(fps, references=None, **given) -> list[str]:
    """What is connected to the inputs for pictures and videos, as overrides that name files of our own."""
    said = {}
    for name, tensor in given.items():
        if tensor is not None:
            frames = files.pixels(tensor)
            still = name in ("image", "last_image") or (name == "mask" and len(frames) == 1)
            said[name] = files.write_picture(frames[0]) if still else files.write_video(frames, fps)
    if references is not None:
        said["references"] = [files.write_picture(frame) for frame in files.pixels(references)]
    return [f"{name}={trust.written(value)}" for name, value in said.items()]


def from_config_node(overrides="", **choices) -> Chosen:
    """What the widgets of a Config node say: options of groups, and a setting a line."""
    chosen = [trust.override(group, name) for group, name in choices.items() if name != UNCHANGED]
    lines = [line.strip() for line in overrides.splitlines()]
    settings = [trust.repeated(line) for line in lines if line and not line.startswith("#")]
    return Chosen([*chosen, *(safe for listed in settings for safe in listed)])


def adapter_names() -> list[str]:
    """What an Adapter node chooses among: the project's own, and the files in ComfyUI's folders for LoRAs."""
    return [*(name for name in commandline.options("adapter") if name != "none"), *host.adapter_files()]


def adapter_option(name) -> tuple[dict, list[str]]:
    """Rows of a file of conf/adapter, and as overrides the recipe that some bring."""
    said = OmegaConf.to_container(OmegaConf.load(commandline.CONF / "adapter" / f"{name}.yaml"))
    if "adapter" not in said:
        return said, []
    rows, chosen = said.pop("adapter"), [pair for entry in said.pop("defaults") for pair in entry.items()]
    groups = [f"{group.removeprefix('override /')}={option}" for group, option in chosen]
    return rows, groups + [f"{key}={trust.written(value)}" for key, value in flatten(said)]


def from_adapter_node(config, adapter, strength, target) -> Chosen:
    """What an Adapter node adds to a Config node's settings: rows of a file that its owner has, by the file's name."""
    if not isinstance(config, Chosen):
        raise ConfigError("config: not from a Wan 2.1 Config node; connect one")
    own, recipe = host.adapter_files(), []
    if adapter not in adapter_names():
        raise ConfigError(f"adapter={adapter}: no such adapter; one of: {', '.join(adapter_names())}")
    if adapter in own:
        stem = re.sub(r"\W+", "_", adapter.removesuffix(".safetensors"))
        rows = {stem: {"path": own[adapter]}}
    else:
        rows, recipe = adapter_option(adapter)
    added = [f"adapter.{name}.{key}={trust.written(value)}" for name, row in rows.items() for key, value in row.items()]
    for name in rows:
        added.append(trust.override(f"adapter.{name}.strength", strength))
        added += [] if target == UNCHANGED else [trust.override(f"adapter.{name}.target", [target])]
    return Chosen([*config, *recipe, *added])


def from_widgets(**values) -> list[str]:
    return [trust.override(WIDGETS[name], value) for name, value in values.items()]


def from_prompts(prompt, negative_prompt) -> list[str]:
    texts = from_widgets(prompt=prompt, negative_prompt=negative_prompt)
    return [*texts, "prompt.file=null", "prompt.negative_file=null"]


def choose(config, model_id) -> list[str]:
    """What the Config node says, or without one what chooses a model by its path or Hub id."""
    if isinstance(config, Chosen):
        return list(config)
    if config is not None:
        raise ConfigError("config: not from a Wan 2.1 Config node; connect one")
    paths = model_paths()
    if model_id not in paths.values():
        known, remedy = ", ".join(paths.values()), "connect a Wan 2.1 Config node to choose among all"
        raise ConfigError(f"model_id={model_id}: no model that this project has ({known}); {remedy}")
    return [f"model={name}" for name, path in paths.items() if path == model_id]


def model_paths() -> dict[str, str]:
    """Names of models -> their paths in conf/model."""
    folder = commandline.CONF / "model"
    return {name: OmegaConf.load(folder / f"{name}.yaml").path for name in commandline.options("model")}


@contextlib.contextmanager
def in_words_of_nodes(widgets=WIDGETS):
    """Errors that name widgets, and what can be done about them in ComfyUI."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        for theirs, ours in WORDS.items():
            message = message.replace(theirs, ours)
        for widget, key in widgets.items():
            message = re.sub(rf"(?<![\w.]){re.escape(key)}=", f"{widget}=", message)
        raise ConfigError(message) from error
