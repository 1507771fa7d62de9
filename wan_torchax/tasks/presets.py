"""task=presets: what is published."""
from pathlib import Path

from wan_torchax.config.commandline import CONF, options


def presets(config, folder: Path, overrides=()) -> None:
    """The presets as a table: name, and the first line of its file."""
    for name in options("preset"):
        header = (CONF / "preset" / f"{name}.yaml").read_text().splitlines()[1].lstrip("# ")
        print(f"{name:36} {header}")
