"""Files that a port begins with: a family's folder, its configs, and a parity test that says what is missing.

They go into the run folder, laid out as in the project; docs/porting.md says how to go on from them.
"""
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from wan_torchax.tasks.port import Report

FAMILY = '''"""{title}, begun by task=port: tests/test_{name}.py lists what is to be written."""
from wan_torchax.models.family import ComponentSpec, lazily

HERE = "wan_torchax.models.{name}"
COMPONENTS = {{
{components}
}}


def geometry(architecture):
    raise NotImplementedError("geometry: channels, frame and size scale, patch; see wan_torchax/config/geometry.py")


def conditions():
    raise NotImplementedError("conditions: {conditions}")
'''
BLOCKS = '''"""{title}: the transformer as pure functions of its arrays, see docs/porting.md."""
import torch


def build(kind, architecture):
    """The module on the meta device: names and shapes, no memory."""
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, kind)(**architecture).eval()
{functions}

def denoiser(module, forward):
    raise NotImplementedError("denoiser: embed, run the blocks (models/loop.py), project; see models/wan/blocks.py")
'''
BLOCK = '''

def {function}(layer, carry):
    raise NotImplementedError("{function}: one of {blocks} blocks of {stack}, with {layers}")
'''
TEST = '''"""Parity of {title} with diffusers: what task=port found missing, and the comparison once it is written."""
import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1] / "wan_torchax/models/{name}"
MISSING = {missing}
FINDINGS = {findings}


def load(file):
    spec = importlib.util.spec_from_file_location(file, HERE / f"{{file}}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file, function, arguments", MISSING)
def test_it_is_written(file, function, arguments):
    try:
        getattr(load(file), function)(*[None] * arguments)
    except NotImplementedError as missing:
        pytest.fail(f"missing: {{missing}}", pytrace=False)
    except Exception:
        pass  # written, and it wants real arguments


@pytest.mark.parametrize("kind, where, remedy", FINDINGS)
def test_what_was_found_is_dealt_with(kind, where, remedy):
    done = (HERE / "done.txt").read_text().splitlines() if (HERE / "done.txt").exists() else []
    if where not in done:
        pytest.fail(f"{{kind}} at {{where}}: {{remedy}} (then add the place to done.txt)", pytrace=False)
'''


def component_name(kind: type) -> str:
    return "vae" if hasattr(kind, "decode") else "transformer"


def family_name(model: str) -> str:
    """A Python name for the family: "hunyuan_video15" for HunyuanVideo15Transformer3DModel."""
    short = re.sub(r"(Transformer\w*|Pipeline|Model)$", "", Path(model).name) or Path(model).name
    return re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", short)).strip("_").lower()


def write(folder: Path, model: str, reports: "Sequence[Report]") -> list[Path]:
    """All files; returns their paths."""
    name, title = family_name(model), Path(model).name
    denoisers = [report for report in reports if report.entry == "forward"]
    stacks = [(report, stack) for report in denoisers for stack in report.stacks]
    functions = {re.sub(r"\W+", "_", stack.name): (report, stack) for report, stack in stacks}
    files = {
        f"wan_torchax/models/{name}/__init__.py": FAMILY.format(
            title=title, name=name,
            components="\n".join(
                f'    "{one.component}": ComponentSpec(lambda architecture: lazily(f"{{HERE}}.blocks", "build")'
                f'("{one.kind.__name__}", architecture), stacks={tuple(stack.name for stack in one.stacks)!r}),'
                for one in {report.component: report for report in reports}.values()
            ),
            conditions=", ".join(f"{key} {shape}" for one in denoisers for key, shape in one.inputs.items()),
        ),
        f"wan_torchax/models/{name}/blocks.py": BLOCKS.format(
            title=title,
            functions="".join(
                BLOCK.format(
                    function=f"{function}_block", blocks=stack.blocks, stack=stack.name, layers=layers_of(report, stack)
                )
                for function, (report, stack) in functions.items()
            ),
        ),
        f"conf/family/{name}.yaml": family_config(name, title, reports),
        f"conf/model/{name}.yaml": model_config(name, title, model, reports),
        f"tests/test_{name}.py": TEST.format(
            title=title, name=name,
            missing=listed([("__init__", "geometry", 1), ("__init__", "conditions", 0), ("blocks", "denoiser", 2)]
                           + [("blocks", f"{function}_block", 2) for function in functions]),
            findings=listed(sorted({(one.kind, one.where, one.remedy) for report in reports for one in report.findings
                                    if one.kind != "table made while running"})),
        ),
    }
    paths = []
    for place, text in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return paths


def listed(rows: Sequence[tuple]) -> str:
    return "[\n" + "".join(f"    {row!r},\n" for row in rows) + "]"


def layers_of(report: "Report", stack) -> str:
    names = [name for rule in report.rules if rule.pattern.startswith(re.escape(stack.name) + r"\.")
             for name in re.findall(r"\\\.\((.*)\)\\\.", rule.pattern)]
    return ", ".join(names).replace("\\", "").replace("|", ", ") or "its layers"


def family_config(name: str, title: str, reports: "Sequence[Report]") -> str:
    rows: dict[str, dict] = {}
    for report in reports:
        rows.setdefault(report.component, {}).update(
            {rule.name: {"pattern": rule.pattern, "axes": rule.axes} for rule in report.rules}
        )
    header = f"# {title}: what the dimensions of its weights are, as task=port found them in the data flow.\n"
    return header + yaml.safe_dump({"family": name, "weights": rows}, sort_keys=False, width=200)


def model_config(name: str, title: str, model: str, reports: "Sequence[Report]") -> str:
    architecture = {report.component: json.loads(json.dumps(report.settings)) for report in reports}  # tuples as lists
    header = f"# {title}, from its class's defaults or its config.json.\n"
    content = {"family": name, "path": model, "architecture": architecture}
    return header + yaml.safe_dump(content, sort_keys=False, width=200)
