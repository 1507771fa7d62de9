"""task=presets: lists the published configurations."""
from pathlib import Path

from wan_torchax.config.commandline import CONF, options


def presets(config, folder: Path, overrides=()) -> None:
    """Print the presets as a table: name, and the description at the top of its file."""
    for name in options("preset"):
        header = (CONF / "preset" / f"{name}.yaml").read_text().splitlines()[1].lstrip("# ")
        print(f"{name:36} {header}")
