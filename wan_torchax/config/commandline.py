"""What happens to the command line before and after Hydra: free text in, clear errors out. No JAX, no torch."""
import functools
import os
import pickle
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from wan_torchax import ROOT, private
from wan_torchax.config import schema
from wan_torchax.config.wording import nearest

CONF = ROOT / "conf"
HYDRA_VERSION = "1.3"
# Keys that can be swept without recompiling or reloading anything.
CHEAP = (
    "seed", "prompt", "prompt.text", "prompt.negative", "guidance_scale", "steps", "resolution.fps",
    "resolution.flow_shift", "output.quality",
)
LAUNCHERS = {name: f"hydra-{name.partition('_')[0]}-launcher" for name in ("submitit_local", "submitit_slurm", "ray")}
TEXT_KEYS = {
    "prompt": "prompt.text",
    "prompt.text": "prompt.text",
    "negative_prompt": "prompt.negative",
    "prompt.negative": "prompt.negative",
    "driving_prompt": "driving_prompt",
}
# Components that may be given apart, as a checkpoint's folder or a single file: model.vae=… is model.paths.vae.
COMPONENTS = (
    "transformer", "transformer_2", "text_encoder", "text_encoder_2", "image_encoder", "audio_encoder", "vae",
    "tiny_vae",
)
# Names that diffusers, ComfyUI and others use -> our keys.
FOREIGN = {
    "num_inference_steps": "steps", "num_steps": "steps", "sample_steps": "steps", "sampling_steps": "steps",
    "cfg": "guidance_scale", "cfg_scale": "guidance_scale", "true_cfg_scale": "guidance_scale",
    "sample_guide_scale": "guidance_scale", "height": "resolution.height", "width": "resolution.width",
    "num_frames": "resolution.frames", "frames": "resolution.frames", "frame_num": "resolution.frames",
    "length": "resolution.frames", "fps": "resolution.fps", "frame_rate": "resolution.fps",
    "shift": "resolution.flow_shift", "flow_shift": "resolution.flow_shift", "sample_shift": "resolution.flow_shift",
    "negative": "negative_prompt", "neg_prompt": "negative_prompt", "n_prompt": "negative_prompt",
    "noise_seed": "seed", "base_seed": "seed", "denoise": "strength", "sampler": "scheduler",
    "sampler_name": "scheduler", "sample_solver": "scheduler", "lora": "adapter", "input_image": "image",
    "start_image": "image", "end_image": "last_image", "input_video": "video", "reference_images": "references",
    "pose_video": "pose", "face_video": "face", "background_video": "background", "mask_video": "mask",
    "driving_video": "video", "prompt_ref": "driving_prompt", "audio_path": "audio",
    "model_path": "model.path", "ckpt_dir": "model.path", "output_dir": "hydra.run.dir",
    "output_path": "hydra.run.dir", "save_file": "hydra.run.dir", "crf": "output.quality",
    "host": "serve.host",
}
FLAGS = (  # Hydra's
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info",
    "--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun",
)
# OmegaConf's messages about wrong types -> ours.
WRONG_TYPES = {
    r"Value '(?P<value>.*)' of type '\w+' could not be converted to Integer": "a whole number",
    r"Value '(?P<value>.*)' of type '\w+' could not be converted to Float": "a number",
    r"Value '(?P<value>.*)' is not a valid bool": "true or false",
    r"is not Optional": "something; null is not allowed here",
    r"is not a ListConfig, list or tuple": "a list, e.g. [one,two]",
    r"Cannot assign \w+ to Dict": "a mapping, e.g. {name: value}",
}
USER_ERRORS = (HydraException, OmegaConfBaseException)
composing = threading.RLock()  # Hydra's state is global

ConfigStore.instance().store("schema", schema.root())


# ---------------------------------------------------------------- composing


def compose(overrides: Iterable[str]) -> DictConfig:
    """The config that `python run.py` would run with, from overrides in Hydra's grammar (see `rewrite`).

    Hydra takes a fifth of a second to compose the files of conf/, so its result is cached for each set of options, and
    values are applied to a copy. OmegaConf copies node by node, which takes three times as long as unpickling.
    """
    overrides = list(overrides)
    options = tuple(text for text in overrides if is_option(text))
    try:
        config = pickle.loads(compose_options(options))
    except USER_ERRORS as error:
        raise schema.ConfigError(explain(error)) from error
    return changed(config, [text for text in overrides if text not in options])


def changed(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The composed config with overrides of values applied to it."""
    try:
        private.apply_overrides(config, overrides)
    except USER_ERRORS as error:
        raise schema.ConfigError(explain(error)) from error
    return config


@functools.lru_cache(maxsize=256)
def compose_options(overrides: tuple[str, ...]) -> bytes:
    """The config for some options of conf/'s groups, pickled."""
    with (
        composing, private.quick_hydra(), private.hydra_apart(),
        hydra.initialize_config_dir(str(CONF), version_base=HYDRA_VERSION),
    ):
        config = hydra.compose("config", list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return pickle.dumps(with_names(config, choices), pickle.HIGHEST_PROTOCOL)


def with_names(config: DictConfig, choices: Mapping[str, str]) -> DictConfig:
    """The config, with each group's `name` set to the chosen option, for messages and metrics."""
    for group, choice in choices.items():
        node = config.get(group.partition("@")[0])
        if OmegaConf.is_dict(node) and "name" in node and choice is not None:
            node.name = choice
    return config


def is_option(override: str) -> bool:
    """Whether an override chooses an option of a group rather than setting a value."""
    key = key_of(override)
    return "@" in key or key.startswith("hydra") or (CONF / key).is_dir()


def options(group: str) -> list[str]:
    """The names of a group's files in conf/."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def read_option(group: str, name: str) -> DictConfig:
    """What a group's file says by itself."""
    path = CONF / group / f"{name}.yaml"
    return pickle.loads(private.loaded(path.read_text(encoding="utf-8"), str(path)))


# ---------------------------------------------------------------- before Hydra


HELP = """\
wan-torchax: Wan text-to-video through torchax and JAX, from Hydra configs.

Usage: python run.py [key=value ...] [-m for a sweep]

Examples:
  python run.py
  python run.py prompt="a blue star moving left on a white background" seed=7
  python run.py preset=t2v_demo_128_cpu_v2 seeds=4
  python run.py model=wan21_t2v_14b resolution=480p mesh=v6e_8 prompt="a cat walks on the grass, realistic"
  python run.py -m seed=1,2,3 scheduler=unipc,euler

Tasks (default: task=generate):
{tasks}

Common keys:
{keys}

Groups (group=option):
{groups}

Every setting, with comments: conf/config.yaml and the files under conf/<group>/.
The whole composed config: python run.py --cfg job --resolve
Shell completion: eval "$(python run.py -sc install=bash)"
Full traceback of an error: traceback=true
Hydra's own flags: python run.py --hydra-help
"""
TASKS = {
    "generate": "make a video",
    "serve": "serve an HTTP API and a web page",
    "plan": "estimate whether it fits these chips and how fast it is; needs neither chips nor weights",
    "presets": "list the published configurations",
    "doctor": "check this machine for problems",
    "verify": "check what the devices compute and how fast: one page, made to be sent",
    "tune": "find the fastest attention blocks for this shape and device",
    "calibrate": "measure a curve for cache=magcache",
    "inspect": "what a weight file is, how to run it, where it fits: model.path=<file or folder>",
    "port": "what a diffusers model needs to run here, and the files to begin with",
}
KEYS = {
    "prompt": "what the video shows",
    "negative_prompt": "what the video should not show",
    "model": "which model",
    "preset": "a published configuration: model, size, mesh and everything else",
    "resolution": "size and length by name: 480p, 720p",
    "resolution.width": "pixels",
    "resolution.height": "pixels",
    "resolution.frames": "number of frames, 4n+1",
    "resolution.fps": "frames per second",
    "steps": "denoising steps",
    "guidance_scale": "how closely the video follows the prompt",
    "seed": "same seed, same video",
    "seeds": "several videos: seeds=4",
    "prompts": "many videos: a file or a JSON list",
    "image": "a picture to start from",
    "video": "a video to change or to follow",
    "adapter": "a LoRA",
    "sampling": "a recipe for few steps",
    "mesh": "the chips and how they are arranged",
    "resume": "a run's folder: finish what is missing",
    "replay": "a video: make it again",
    "hydra.run.dir": "the output folder",
}


def help_text() -> str:
    """The text of --help. Hydra's own help takes seconds: it copies the whole schema for every group."""
    inner = ("hydra", "chip")  # Hydra's own, and the chips that meshes refer to
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name not in inner)
    listed = {group: ", ".join(options(group)) for group in groups}
    return HELP.format(tasks=table(TASKS), keys=table(KEYS), groups=table(listed, ": "))


def table(rows: Mapping[str, str], between: str = "") -> str:
    width = 0 if between else max(map(len, rows)) + 2
    return "\n".join(f"  {name:{width}}{between}{text}" for name, text in rows.items())


def rewrite(arguments: list[str]) -> list[str]:
    """Rewrite arguments as typed into Hydra's grammar.

    prompt="a cat, running = fun" becomes a quoted prompt.text; prompt=<name> still picks conf/prompt/<name>.yaml.
    model.vae=<path> becomes model.paths.vae.
    In a sweep, axes that are cheap to change go last, where they vary fastest: consecutive jobs then reuse programs and
    weights.
    """
    rewritten = []
    check_flags(arguments)
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and not key:
            raise schema.ConfigError(f"{argument}: no key before the =; write key=value")
        if separator and key in FOREIGN:
            raise schema.ConfigError(f"{key}: no such key or group; write {FOREIGN[key]}={value}")
        if key in ("hydra.run.dir", "hydra.sweep.dir") and Path(value).resolve() in (ROOT, Path.cwd()):
            raise schema.ConfigError(f"{argument}: a run needs a folder of its own, e.g. {key}=outputs/first")
        by_name = key == "prompt" and set(value.split(",")) <= set(options("prompt"))
        if separator and key in TEXT_KEYS and not by_name:
            argument = f"{TEXT_KEYS[key]}={quote(value)}"
        elif separator and key == "prompts":
            argument = f"prompts={quote(value)}"
        elif separator and key.removeprefix("model.") in COMPONENTS and key.startswith("model."):
            argument = f"++model.paths.{key.removeprefix('model.')}={value}"
        rewritten.append(argument)
    if {"-m", "--multirun"} & set(arguments):
        overrides = [argument for argument in rewritten if "=" in argument and not argument.startswith("-")]
        flags = [argument for argument in rewritten if argument not in overrides]
        overrides.sort(key=lambda override: key_of(override) in CHEAP)  # stable: otherwise the order stays
        return [*flags, *overrides, "sweep.active=true"]
    return rewritten


def check_flags(arguments: list[str]) -> None:
    """Reject `--steps 5` and `--steps=5`, the syntax of other programs. Hydra's own flags may be abbreviated."""
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        name, separator, value = argument.partition("=")
        if not name.startswith("--") or any(flag.startswith(name) for flag in FLAGS):
            continue
        if not separator:
            value = "…" if not following or following.startswith("-") or "=" in following else following
        key = name[2:].replace("-", "_")
        key = FOREIGN.get(key, key)
        if key not in known_keys():
            raise schema.ConfigError(f"{name}: no such flag; settings are key=value; {nearest(key, known_keys())}")
        raise schema.ConfigError(f"{name}: settings have no dashes; write {key}={value}")


def key_of(override: str) -> str:
    """`+ops.mine={…}`, `~ops.mine` -> ops.mine."""
    return override.lstrip("+~").partition("=")[0]


def quote(text: str) -> str:
    """A string literal in Hydra's grammar for exactly this text (line breaks become spaces)."""
    text = literal(text.replace("\n", " "))
    text = re.sub(r"(\\*)('|$)", lambda match: match.group(1) * 2 + (r"\'" if match.group(2) else ""), text)
    return f"'{text}'"


def literal(text: str) -> str:
    """An OmegaConf value that reads as exactly this text: `${…}` in it is not interpolated."""
    if text == "???":  # OmegaConf's marker of a missing value, which cannot be escaped
        return '${text:"???"}'
    return re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + r"\${", text)


def plain_text(value: str) -> str:
    """The inverse of `literal`; what looks like an interpolation is text too."""
    if value == literal("???"):
        return "???"
    return re.sub(r"(\\*)\$\{", lambda match: match.group(1)[: len(match.group(1)) // 2] + "${", value)


# ---------------------------------------------------------------- sweeps


sweep_folders: dict[Path, bool] = {}  # folders with several jobs, for the report; True: may be run by another launcher


class SweepFolder(Callback):
    """A Hydra callback that records the folder of a sweep, whichever launcher runs it (hydra.callbacks in conf)."""

    def on_multirun_start(self, config, **_) -> None:
        sweep_folders[Path(config.hydra.sweep.dir)] = True
        if not config.hydra.launcher._target_.endswith(".BasicLauncher"):  # workers must be able to import the package
            paths = str(ROOT), os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


# ---------------------------------------------------------------- after Hydra


def explain(error: Exception) -> str:
    """An error of Hydra or OmegaConf as one message: key, value and the nearest valid choice."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
        if group == "hydra/launcher" and name in LAUNCHERS:
            return f"{group}={name}: needs a plugin that is not installed; pip install {LAUNCHERS[name]}"
        return f"{group}={name}: no such option; {nearest(name, options(group))}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {str(error).splitlines()[0]}; put quotes around the value: 'key=\"value\"'"
    absent = re.search(r"Could not delete from config. '([\w.@/]+)' does not exist", str(error))
    if absent:
        return f"~{absent.group(1)}: there is no such key to remove; {nearest(absent.group(1), known_keys())}"
    named = re.search(r"Could not (?:override|append to config\.? .*?) '?([\w.@/]+)'?", str(error))
    key = getattr(cause, "full_key", None) or (named.group(1) if named else None)
    unknown = r"(?:Key '[^']+' (?:not in|is not in struct)|No match in the defaults list|not in struct)"
    if key and re.search(unknown, f"{error} {cause}"):
        close = nearest(key, known_keys())
        return f"{key}: no such key or group; {close} (python run.py --cfg job shows them all)"
    for pattern, rule in WRONG_TYPES.items():
        if key and (match := re.search(pattern, str(cause))):
            value = f"={match['value']}" if "value" in match.groupdict() else ""
            return f"{key}{value}: must be {rule}"
    details = ("full_key", "object_type", "reference_type")
    lines = [line.strip() for line in str(cause).splitlines()]
    reason = " ".join([line for line in lines if line and not line.startswith(details)][:2])
    return f"{key}: {reason}" if key and key not in reason else reason


@functools.cache
def known_keys() -> list[str]:
    """Every key that can be overridden, as a dotted path, and every group."""

    def walk(node, prefix):
        for name, child in node.items():
            yield prefix + name
            if isinstance(child, dict):
                yield from walk(child, f"{prefix}{name}.")

    return [*walk(OmegaConf.to_container(schema.root()), ""), "preset", "sampling", "negative_prompt"]
