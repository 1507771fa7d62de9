"""The pictures of README and docs show what the embedded models make now."""
import json
import re
import sys

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import readme_pictures


def test_pictures_were_made_with_the_weights_that_are_here():
    """After new weights: python tools/readme_pictures.py."""
    now = readme_pictures.weights_hash()
    assert json.loads((ROOT / "docs" / "pictures.json").read_text()) == dict.fromkeys(readme_pictures.PICTURES, now)


def test_every_picture_of_the_texts_is_made_by_the_tool():
    texts = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    shown = {name for path in texts for name in re.findall(r"!\[[^]]*\]\((?:docs/)?([\w.]+)\)", path.read_text())}
    made = {f"{name}.{kind}" for name in readme_pictures.PICTURES for kind in ("png", "gif")}
    assert shown - made == {"architecture.svg"} and {"serve.png", "demo.gif"} <= shown
