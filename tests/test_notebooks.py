"""The notebooks' cells, from top to bottom, with the demo model in an environment that they make: NOTEBOOKS=1."""
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.skipif("NOTEBOOKS" not in os.environ, reason="installs everything: NOTEBOOKS=1")
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_the_cells_run(path, tmp_path, monkeypatch):
    given = {"WAN_DEMO": "1", "WAN_WORK": tmp_path, "WAN_CACHE": tmp_path / "cache", "WAN_PROJECT": ROOT}
    given |= {"WAN_LOCK": "cpu", "IPYTHONDIR": tmp_path, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=500, kernel_name="python3").execute(cwd=tmp_path)
    (shown,) = book.cells[-1].outputs
    assert "data:video/mp4;base64," in shown.data["text/html"]
    told = "".join(output.text for output in book.cells[-2].outputs)
    assert "denoise: 8 steps" in told and "denoise: 8 of 8 steps" in told, "progress without a terminal"


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_a_preset_and_leaves_the_kernel_without_jax(path):
    book = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in book.cells if cell.cell_type == "code")
    preset = code.split('PRESET = "')[1].split('"')[0]
    assert (ROOT / f"conf/preset/{preset}.yaml").exists()
    assert "import jax" not in code and "import torch" not in code
    assert all(not cell.get("outputs") for cell in book.cells), "clear the outputs"
