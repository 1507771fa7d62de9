"""Pages: figures are those of the results, links lead somewhere, and commands are ones that the project has."""
import importlib.util
import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.conftest import ROOT, make_config
from wan_torchax.config.commandline import options
from wan_torchax.config.registry import TASKS
from wan_torchax.config.validation import validate

PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "comfyui/*.md", "kernels/*.md", "models/*/*.md")
    for path in ROOT.glob(pattern)
)
COMMAND = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?python run\.py([^\n]*)$", re.MULTILINE)
# Files that a reader has and the tests do not; and a sampler's words.
FILES = (
    "resume|replay|prompts|image|last_image|video|pose|face|background|mask|references|audio|prompt\\.file"
    "|adapter\\.\\w+"
)
# Of weights, too: a file says which model it is.
NOT_HERE = re.compile(rf"({FILES})=|model\.\w+=.*\.(safetensors|gguf)$|.*(=choice\(|…)")
GROUPS = (
    "pipeline", "model", "mesh", "distributed", "sharding", "attention", "resolution", "scheduler", "ops", "cache",
    "adapter", "sampling", "sparse", "guider", "live", "vae", "preview", "windows",
)

spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks/figures.py")
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)


def test_figures_are_those_of_the_results():
    assert figures.compare() == [], "python benchmarks/figures.py --write"


def test_a_figure_that_differs_is_found(monkeypatch):
    rows = [row | {"seconds": row.get("seconds", 0) * 2} for row in figures.GPU["rows"]]
    monkeypatch.setitem(figures.GPU, "rows", rows)
    differences = figures.compare()
    assert any("README.md" in line for line in differences) and any("conf/preset" in line for line in differences)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.name)
def test_a_result_says_how_it_was_made(path):
    result = json.loads(path.read_text())
    assert result["command"] and result["device"] and result["versions"] and result["n"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{page}: {target}"


def test_the_index_has_every_page():
    index = (ROOT / "docs/README.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index] == ["README.md"]


def commands():
    """Every `python run.py …` of the pages' code, with its page; a command goes on where a line ends in a backslash."""
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            for line in COMMAND.findall(block.replace("\\\n", " ")):
                yield pytest.param(line, id=f"{page}:{line.strip()[:60]}")


@pytest.mark.system
@pytest.mark.parametrize("line", list(commands()))
def test_a_command_on_a_page_composes(line):
    """Everything it names is there, and what it asks for is valid. The tests of each feature run it."""
    words = shlex.split(line.replace("$(seq -s, -f %g/12 12)", "1/12"), comments=True)
    overrides = [word for word in words if "=" in word and not word.startswith(("-", "hydra"))]
    if "-m" in words:  # the first job of a sweep
        overrides = [re.sub(r"=([\w./]+),[\w./,]+$", r"=\1", override) for override in overrides]
    shown = [override for override in overrides if not NOT_HERE.match(override)]
    config = make_config(*shown)
    assert config.task in TASKS
    if shown == overrides and config.distributed.name == "none" and (config.mesh.hosts or 1) == 1:
        validate(config)


@pytest.mark.parametrize("group", GROUPS)
def test_the_settings_list_every_option(group):
    lines = (ROOT / "docs/settings.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| `{group}` |")]
    assert [name for name in options(group) if name not in row] == []


def test_the_script_ends_with_a_status():
    ran = subprocess.run([sys.executable, "benchmarks/figures.py"], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "every figure is that of the results")


def test_the_table_of_modes_is_that_of_the_results():
    table = (ROOT / "benchmarks/results/quality_demo.md").read_text()
    assert table in (ROOT / "docs/quality.md").read_text()
