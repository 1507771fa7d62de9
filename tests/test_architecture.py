"""The house: floors that stand on each other, no arrow upward, no circle, no name taken from others."""
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from wan_torchax.config import registry

# From the ground up. A module may import from its own floor and from those below; docs/architecture.md draws them.
FLOORS = [
    ("private",),
    ("kernels",),
    ("patches", "events", "interruption"),
    ("config",),
    ("records",),
    ("devices",),
    ("models",),
    ("runtime",),
    ("stages",),
    ("work",),
    ("session",),
    ("tasks", "serve"),
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
PACKAGE = ROOT / "wan_torchax"


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, those at the top of the project included."""
    inside = {path: path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    beside = {path: path.relative_to(ROOT) for path in [*(ROOT / "kernels").glob("*.py"), ROOT / "patches.py"]}
    names = {path: ".".join(place.with_suffix("").parts) for path, place in (inside | beside).items()}
    return {name.removesuffix(".__init__").removesuffix("__init__"): path for path, name in names.items()}


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, wherever in it."""
    listed, tree = set(), ast.parse(path.read_text())
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    for block in blocks:
        if ast.unparse(block.test) == "TYPE_CHECKING":  # names for annotations alone
            block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "wan_torchax":
            base = node.module.removeprefix("wan_torchax").lstrip(".")
            listed |= {f"{base}.{alias.name}".lstrip(".") for alias in node.names} | {base}
        elif isinstance(node, ast.Import):
            listed |= {alias.name.removeprefix("wan_torchax.") for alias in node.names if "wan_torchax." in alias.name}
    return listed & set(MODULES)


MODULES = modules()
GRAPH = {name: imports(path) - {name, ""} for name, path in MODULES.items()}


def floor(name: str) -> int:
    return HEIGHT[name.split(".")[0]]


def test_every_module_is_on_a_floor():
    assert {name.split(".")[0] for name in MODULES if name} == set(HEIGHT)
    assert sum(map(len, GRAPH.values())) > 100, "the graph is not empty"


def test_no_arrow_goes_up():
    upward = [(name, other) for name, others in GRAPH.items() if name for other in others if floor(other) > floor(name)]
    assert not upward


def test_no_circle():
    seen, path = set(), []

    def visit(name):
        assert name not in path, f"{' -> '.join([*path, name])}"
        if name in seen:
            return
        seen.add(name)
        path.append(name)
        for other in GRAPH[name]:
            visit(other)
        path.pop()

    for name in GRAPH:
        visit(name)


LIGHT = {"kernels": ("omegaconf", "hydra", "torch"), "config": ("jax", "torch", "diffusers")}


@pytest.mark.parametrize("floor_name, forbidden", LIGHT.items())
def test_lower_floors_are_light(floor_name, forbidden):
    """Kernels know nothing of configs, and configs load nothing heavy."""
    for name, path in MODULES.items():
        if name.split(".")[0] == floor_name:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [module for module in names if module.split(".")[0] in forbidden], path


NAMES_OF_WAN = re.compile(
    r"attn[12]|ffn\.net|vace|scale_shift_table|norm_added|condition_embedder|patch_embedding|add_[kv]_proj|umt5", re.I
)


def test_only_its_folder_knows_a_family():
    """Wan's names stand in wan_torchax/models/wan and in conf/, and nowhere else; other families have their own."""
    families = tuple(f"models.{family}" for family in registry.FAMILIES)
    knowing = [
        name for name, path in MODULES.items()
        if not name.startswith(families) and NAMES_OF_WAN.search(path.read_text())
    ]
    assert not knowing and NAMES_OF_WAN.search(MODULES["models.wan.blocks"].read_text())


def test_the_entry_is_short():
    assert len((ROOT / "run.py").read_text().splitlines()) <= 150


def test_a_stage_says_of_itself_without_torch():
    """What keys, resume and a warm run need of a stage costs no import of torch."""
    program = "import sys; from wan_torchax.stages import text, denoise, decode; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


# ---------------------------------------------------------------- names


def test_hugging_faces_kernels_is_itself(tmp_path):
    """Installed beside us (requirements-dev.txt), it is what `import kernels` means, and transformers uses it."""
    program = """
import sys, wan_torchax
wan_torchax.leave_sys_path()
import kernels, transformers
from wan_torchax.kernels import attention
assert "site-packages" in kernels.__file__, kernels.__file__
assert kernels.__version__.startswith("0.17") and transformers.utils.is_kernels_available()
assert attention.__name__ == "wan_torchax.kernels.attention"
print("both")
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.stdout.strip() == "both", answer.stderr


def test_without_it_our_folder_is_not_taken_for_it(tmp_path):
    """A folder without __init__.py is a package to Python if nothing better is on sys.path: we are not on it."""
    program = """
import importlib.util, sys, wan_torchax
wan_torchax.leave_sys_path()
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
assert importlib.util.find_spec("kernels") is None and importlib.util.find_spec("patches") is None
import wan_torchax.kernels.settings
print("found")
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.stdout.strip() == "found", answer.stderr


def test_nothing_is_left_on_the_path_of_others(tmp_path):
    """run.py exports nothing; a launcher's workers, which have to find the package, take it off again."""
    program = "import os, sys; sys.argv = ['run.py', 'task=presets', 'hydra.run.dir={}']; import runpy\n"
    program += "try: runpy.run_path('run.py', run_name='__main__')\nexcept SystemExit: pass\n"
    program += "left = [entry for entry in sys.path if os.path.realpath(entry) == os.getcwd()]\n"
    program += "print(os.environ.get('PYTHONPATH'), left)"
    command = [sys.executable, "-c", program.format(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "None []", answer.stdout + answer.stderr
