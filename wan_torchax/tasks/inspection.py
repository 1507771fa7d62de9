"""task=inspect: what a weight file or a checkpoint folder is, how to run it, and where it fits.

    python run.py task=inspect model.path=wan2.1-t2v-14b-Q4_K_M.gguf                       # or a folder of such files
    python run.py task=inspect model.path=flux1-dev.safetensors inspect.adapters=~/loras   # which of these fit it

Reads headers only. inspect.json in the run folder has the same.
"""
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wan_torchax import own_path
from wan_torchax.config.commandline import compose, options
from wan_torchax.config.registry import FAMILIES, family_of, load
from wan_torchax.config.schema import ConfigError
from wan_torchax.models.family import ComponentSpec, Family
from wan_torchax.records.files import write_text
from wan_torchax.runtime.adapters import match, parse
from wan_torchax.runtime.checkpoint import FILES, files_of, index
from wan_torchax.runtime.formats import Stored
from wan_torchax.runtime.recognition import TINY, architecture_of, described, recognize

EXAMPLES = 3
ELSEWHERE = ("auto", "cpu_8")  # meshes that are no certain machine


def inspect(config, folder: Path, overrides=()) -> None:
    """Print and record what is at model.path."""
    path, report = own_path(config.model.path), {}
    for place in places(path):
        print(place)
        try:
            report[str(place)] = inspect_one(place, config)
        except ConfigError as error:
            report[str(place)] = {"problem": str(error)}
            say("problem", str(error))
    write_text(folder / "inspect.json", json.dumps(report, indent=1) + "\n")
    if all("problem" in row for row in report.values()):
        raise ConfigError(f"model.path={config.model.path}: nothing there can be run; see above")


def places(path: Path) -> list[Path]:
    """The components at a path: a file, a component's folder, those of a checkpoint, or files that lie in a folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"model.path={path}: task=inspect reads a local file or folder; download it first")
    inside = [child for child in sorted(path.iterdir()) if child.is_dir() and files_of(child)]
    loose = [child for child in sorted(path.iterdir()) if child.suffix in FILES]
    found = [path] if (path / "config.json").is_file() and loose else inside or loose
    if not found:
        raise ConfigError(f"model.path={path}: no {' or '.join(FILES)} files in it or in its folders")
    return found


def inspect_one(place: Path, config) -> dict[str, Any]:
    tensors = index(place)
    report: dict[str, Any] = {"holds": holds(place, tensors), "models": recognize(place)}
    say("holds", report["holds"])
    if not report["models"]:
        report["adapter_of"] = [name for name in FAMILIES if is_adapter(place, load(FAMILIES, name))]
        if not report["adapter_of"]:
            raise ConfigError("neither a component of a model in conf/model nor an adapter for one")
        say("is", f"an adapter; family {', '.join(report['adapter_of'])}: adapter as in docs/adapters.md")
        return report
    for component, names in report["models"].items():
        say(component, f"fits {', '.join(f'model={name}' for name in names)}")
    say("run it", how_to_run(place, report["models"]))
    if "transformer" in report["models"]:
        name = report["models"]["transformer"][0]
        report["machines"] = dict(machines(name, config))
        if config.inspect.adapters:
            report["adapters"] = dict(adapters_in(own_path(config.inspect.adapters), name))
    return report


def say(what: str, text: str) -> None:
    print(f"  {what:14} {text}", flush=True)


def holds(place: Path, tensors: Mapping[str, Stored]) -> str:
    """Parameters, bytes and precision."""
    kinds: Counter[str] = Counter()
    for stored in tensors.values():
        kinds[f"{stored.dtype}{' with scales' if stored.scale else ''}"] += math.prod(stored.shape)
    numbers, size = kinds.total(), sum(file.stat().st_size for file in files_of(place))
    shares = ", ".join(f"{kind} {count / max(numbers, 1):.1%}" for kind, count in kinds.most_common())
    return f"{len(tensors)} tensors, {numbers / 1e6:,.1f} million parameters, {size / 2**20:,.1f} MiB: {shares}"


def how_to_run(place: Path, models: Mapping[str, list[str]]) -> str:
    source = place.parent if place.is_dir() else place
    if "transformer" not in models:
        tiny = ["vae=tiny"] if TINY in models else []
        return " ".join([*tiny, *(f"model.{component}={source}" for component in models)])
    name, command = models["transformer"][0], f"python run.py model={models['transformer'][0]} model.path={source}"
    rest = [component for component in described(name)["architecture"] if component not in (*models, TINY)]
    if place.is_dir() or not rest:
        return command
    return f"{command}; {', '.join(rest)}: from {described(name)['path']}, or from files, model.{rest[0]}=…"


# ---------------------------------------------------------------- machines


def machines(name: str, config) -> Iterator[tuple[str, dict]]:
    """By mesh: what the largest stage needs of a chip's memory, as task=plan estimates it."""
    import jax

    from wan_torchax.session import Session
    from wan_torchax.tasks import plan

    plan.use_fake_devices(config)
    resolution = size_of(name)
    for mesh in (mesh for mesh in options("mesh") if mesh not in ELSEWHERE):
        choice = compose([f"model={name}", f"mesh={mesh}", *resolution, f"precision={config.precision.name}"])
        try:
            resolved = plan.describe(choice)
            with jax.sharding.use_abstract_mesh(resolved.mesh):
                stages = Session().build(resolved, resolved.graph.stages)
            rows = plan.memory(resolved, stages, {"compiler": None})
        except ConfigError as error:  # e.g. heads that do not divide
            say(f"mesh={mesh}", f"does not fit: {error}")
            yield mesh, {"fits": False, "why": str(error)}
            continue
        most = max(rows.values(), key=lambda row: row["total_gib"])
        fits, size = all(row["fits"] for row in rows.values()), choice.resolution
        needs = f"{most['total_gib']:.1f} of {most['limit_gib']:.0f} GiB a chip at {size.width} x {size.height}"
        say(f"mesh={mesh}", f"{'fits' if fits else 'too large'}: {needs} x {size.frames}")
        yield mesh, {"fits": fits, "gib": most["total_gib"], "limit_gib": most["limit_gib"]}


def size_of(name: str) -> list[str]:
    """The resolution that a model was made for, unless its file in conf/ chooses one."""
    config = compose([f"model={name}"])
    if config.resolution.height >= config.model.min_size:
        return []
    return ["resolution=704p" if config.model.area > 480 * 832 else "resolution=480p"]


# ---------------------------------------------------------------- adapters


def is_adapter(place: Path, family: Family) -> bool:
    try:
        contents = parse(place, family.adapters)
    except ConfigError:
        return False
    return bool(contents.modules) and not contents.unknown


def adapters_in(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Of each adapter in a folder: whether it fits a model."""
    family = family_of(compose([f"model={name}"]))
    spec: ComponentSpec = family.components["transformer"]
    module = spec.build(architecture_of(described(name), "transformer", spec))
    shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    for file in sorted(folder.glob("**/*.safetensors")):
        try:
            placed, elsewhere, problems = match(parse(file, family.adapters), shapes, family)
        except ConfigError as error:
            answer = str(error).removeprefix(f"{file}: ")
        else:
            others = [*elsewhere, *problems]
            answer = f"fits: {len(placed)} tensors" if placed and not others else (
                f"does not fit: {len(others)} keys, e.g. {'; '.join(others[:EXAMPLES])}")
        say("adapter", f"{file.relative_to(folder)}: {answer}")
        yield str(file), answer
