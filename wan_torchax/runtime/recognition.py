"""Which model a weight file is of, by the names and shapes of its tensors. No JAX, no torch.

    recognize(Path("wan2.1_t2v_14B_bf16.safetensors"))      # {"transformer": ["wan21_t2v_14b", "wan22_t2v_a14b"]}
    with_models(["model.path=wan2.1_t2v_14B_bf16.safetensors"])     # the model, and the file as its transformer

The file chooses among the models of conf/ and nothing else.
"""
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from wan_torchax import own_path
from wan_torchax.config.commandline import key_of, options, quote, read_option
from wan_torchax.config.registry import FAMILIES, load
from wan_torchax.config.schema import ConfigError
from wan_torchax.models.family import ComponentSpec
from wan_torchax.runtime.checkpoint import FILES, index, local_folder, read_architecture, single_file
from wan_torchax.runtime.formats import Stored, by_module, without_ones

PATH, COMPONENT = "model.path", "model.paths."
VAE, TINY = f"{COMPONENT}vae", "tiny_vae"
CHOOSE = ("model", "preset")


def recognize(place: Path) -> dict[str, list[str]]:
    """The components in a file or folder, and the models that each may belong to."""
    tensors: dict[str, Stored] = index(place)
    found: dict[str, list[str]] = {}

    @functools.cache  # the models of a family share their names
    def named(family: str, component: str) -> dict[str, Stored]:
        return by_module(tensors, load(FAMILIES, family).components[component])

    for name in sorted(options("model"), key=is_derived):
        model = described(name)
        for component in model["architecture"]:
            spec = load(FAMILIES, model["family"]).components[component]
            landmarks = spec.landmarks(architecture_of(model, component, spec))
            stored = named(model["family"], component) if landmarks else {}
            if landmarks and all(fits(stored.get(one), shape) for one, shape in landmarks.items()):
                found.setdefault(component, []).append(name)
    return found


def is_derived(name: str) -> bool:
    """Whether a model is another one's, with files of its own that have names of their own."""
    return "paths" in described(name)


def architecture_of(model: Mapping, component: str, spec: ComponentSpec) -> Mapping:
    """What conf/ says of a component, completed by its config.json if that is local."""
    architecture = model["architecture"][component]
    folder = local_folder(model.get("paths", {}).get(component, model["path"]))
    if folder and (folder / component / "config.json").is_file():
        return read_architecture(folder / component, architecture, component, spec)
    return architecture


def fits(stored: Stored | None, shape: tuple | None) -> bool:
    if stored is None or shape is None:
        return stored is shape
    return without_ones(stored.shape) == without_ones(shape)


@functools.cache
def described(name: str) -> dict[str, Any]:
    """A model's file in conf/, with those that it extends. Hydra would take seconds to compose all of them."""
    own: Any = OmegaConf.to_container(read_option("model", name))
    described_by: dict[str, Any] = {}
    for entry in own.pop("defaults"):
        if isinstance(entry, str) and entry != "_self_":
            described_by = described(entry)
        elif "/family@_here_" in entry:
            described_by = {"family": entry["/family@_here_"]}
    return merged(described_by, own)


def merged(first: Mapping, second: Mapping) -> dict:
    """The second's values over the first's, table by table."""
    both = {name: merged(first[name], value) for name, value in second.items()
            if isinstance(value, dict) and isinstance(first.get(name), dict)}
    return {**first, **second, **both}


# ---------------------------------------------------------------- the command line


def with_models(arguments: list[str]) -> list[str]:
    """Arguments with `model.path=<file>` as the path of the components in it, with `vae=tiny` for a tiny decoder's file
    as the VAE, and with the model that a transformer's file is of, unless they choose one."""
    given = {key_of(argument): argument.partition("=")[2].strip("'\"") for argument in arguments}
    path, chosen = given.get(PATH, ""), any(key in given for key in CHOOSE)
    if given.get("task") == "inspect":
        return arguments
    if is_tiny(given.get(VAE, "")) and "vae" not in given:
        arguments = [argument for argument in arguments if key_of(argument) != VAE]
        arguments += ["vae=tiny", f"++{COMPONENT}{TINY}={quote(given[VAE])}"]
    file = single_file(path, "path")
    if file is not None:
        components = recognize(file)
        check_known(PATH, path, components)
        if not chosen and "transformer" not in components:
            component, names = next(iter(components.items()))
            remedy = f"model={names[0]} model.{component}={path}"
            raise ConfigError(f"{PATH}={path}: holds the {component} of {', '.join(names)}; choose one: {remedy}")
        arguments = [argument for argument in arguments if key_of(argument) != PATH]
        arguments += [f"++{COMPONENT}{component}={quote(path)}" for component in components]
        given |= {f"{COMPONENT}{component}": path for component in components}
    transformer = given.get(f"{COMPONENT}transformer", "")
    if chosen or not transformer.endswith(FILES):
        return arguments
    return [f"model={model_of(transformer, two=f'{COMPONENT}transformer_2' in given)}", *arguments]


def is_tiny(path: str) -> bool:
    """Whether a path is a tiny decoder's file."""
    file = single_file(path, "vae")
    return file is not None and TINY in recognize(file)


def model_of(path: str, two: bool) -> str:
    """The model of a transformer's file. Where several have these shapes, the one whose name's parts are in the file's
    name. With `two`, one that has two transformers."""
    names = recognize(own_path(path)).get("transformer", [])
    check_known("model.transformer", path, names)
    experts = {name: len(described(name).get("experts", ["transformer"])) for name in names}
    names = [name for name in names if experts[name] == 2] if two else names
    closeness = {name: closeness_of(name, path) for name in names}
    best = [name for name in names if closeness[name] == max(closeness.values())]
    if len(best) != 1:
        listed = ", ".join(f"model={name}" for name in best) or "a model with two transformers"
        raise ConfigError(f"model.transformer={path}: neither its shapes nor its name tell which it is; say {listed}")
    if experts[best[0]] == 2 and not two:
        remedy = "give both: model.transformer=<high noise> model.transformer_2=<low noise>"
        raise ConfigError(f"{path}: one of the two transformers of {best[0]}; {remedy}, or model={best[0]} too")
    return best[0]


def closeness_of(name: str, path: str) -> tuple[int, bool, int]:
    """How many parts of a model's name are in a file's name, and how few are not: wan21_t2v_14b, wan2.1-T2V_14B.gguf"""
    text = re.sub(r"[^a-z0-9]", "", Path(path).stem.lower())
    parts = [re.sub(r"^a(?=\d)", "", part) for part in re.sub(r"(?<=\d)_(?=\d)", "", name).split("_")]
    return sum(part in text for part in parts), not is_derived(name), -len(parts)


def check_known(key: str, path: str, found) -> None:
    if not found:
        names = list(index(own_path(path)))
        tensors = f"{names[0]} and {len(names) - 1} others" if names else "none at all"
        raise ConfigError(f"{key}={path}: no model of conf/model has its tensors ({tensors}) in their shapes")
