"""What happens to the command line before and after Hydra: free text in, clear errors out. No JAX, no torch."""
import re
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wan_torchax import ROOT
from wan_torchax.config import schema

# Swept without compiling or loading anything again.
CHEAP = ("seed", "prompt", "prompt.text", "prompt.negative", "guidance_scale", "steps", "resolution.fps", "resolution.flow_shift", "output.quality")
CONF = ROOT / "conf"
PLUGINS = {("hydra/launcher", name): f"hydra-{name.partition('_')[0]}-launcher" for name in ("submitit_local", "submitit_slurm", "ray")}
TEXT_KEYS = {"prompt": "prompt.text", "prompt.text": "prompt.text", "negative_prompt": "prompt.negative", "prompt.negative": "prompt.negative"}


sweep_folders: dict[Path, bool] = {}  # folders of several jobs, which get a report at the end; True: a launcher may run them elsewhere


class SweepFolder(Callback):
    """Hydra tells it where the jobs of a sweep will be, whichever launcher runs them and wherever (hydra.callbacks in conf/config.yaml)."""

    def on_multirun_start(self, config, **_):
        sweep_folders[Path(config.hydra.sweep.dir)] = True


def rewrite(arguments: list[str]) -> list[str]:
    """Turn what people type into what Hydra's grammar takes.

    prompt="a cat, running = fun" becomes a quoted prompt.text; prompt=<name> still picks conf/prompt/<name>.yaml.
    In a sweep the axes that cost nothing to change go last, where they vary fastest: programs and weights are then
    used by one job after the other instead of being made again.
    """
    rewritten = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and key in TEXT_KEYS and not (key == "prompt" and set(value.split(",")) <= set(options("prompt"))):
            argument = f"{TEXT_KEYS[key]}={quote(value)}"
        elif separator and key == "prompts":
            argument = f"prompts={quote(value)}"
        rewritten.append(argument)
    if {"-m", "--multirun"} & set(arguments):
        overrides = [argument for argument in rewritten if "=" in argument and not argument.startswith("-")]
        flags = [argument for argument in rewritten if argument not in overrides]
        overrides.sort(key=lambda override: override.partition("=")[0] in CHEAP)  # stable: otherwise the order stays
        return [*flags, *overrides, "sweep.active=true"]
    return rewritten


def quote(text: str) -> str:
    """A string literal of Hydra's grammar that means exactly this text (line breaks become spaces)."""
    text = re.sub(r"(\\*)\$\{", lambda found: found.group(1) * 2 + r"\${", text.replace("\n", " "))
    text = re.sub(r"(\\*)('|$)", lambda found: found.group(1) * 2 + (r"\'" if found.group(2) else ""), text)
    return f"'{text}'"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def explain(error: Exception) -> str:
    """An error of Hydra's or OmegaConf's as one message: key, value and the nearest that exists."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
        if (group, name) in PLUGINS:
            return f"{group}={name}: comes with a plugin that is not installed; pip install {PLUGINS[group, name]}"
        return f"{group}={name}: no such option; {schema.nearest(name, options(group))}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {str(error).splitlines()[0]}; put quotes around the value: 'key=\"value\"'"
    found = re.search(r"Could not (?:override|append to config\.? .*?) '?([\w.@/]+)'?", str(error))
    key = getattr(cause, "full_key", None) or (found.group(1) if found else None)
    unknown = re.search(r"(?:Key '[^']+' (?:not in|is not in struct)|No match in the defaults list|not in struct)", f"{error} {cause}")
    if key and unknown:
        return f"{key}: no such key or group; {schema.nearest(key, known_keys())} (python run.py --cfg job shows them all)"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip() and not line.strip().startswith(("full_key", "object_type", "reference_type"))]
    reason = " ".join(lines[:2])
    return f"{key}: {reason}" if key and key not in reason else reason


def known_keys() -> list[str]:
    """Every key that can be overridden, dotted, and every group."""
    def walk(node, prefix):
        for name in node:
            yield prefix + name
            child = node._get_node(name)
            if OmegaConf.is_dict(child):
                yield from walk(child, f"{prefix}{name}.")

    return [*walk(schema.root(), ""), "preset", "negative_prompt"]


USER_ERRORS = (HydraException, OmegaConfBaseException)
