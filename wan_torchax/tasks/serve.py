"""task=serve: OpenAI's video API and a page, until Ctrl-C or SIGTERM."""
from pathlib import Path

from wan_torchax.serve.processes import supervise
from wan_torchax.serve.queue import Queue
from wan_torchax.serve.requests import Base


def serve(config, folder: Path, overrides=()) -> None:
    """Serve requests for videos, with this command line's settings as defaults."""
    supervise(Base.of(config, list(overrides)), Queue(Path(config.serve.folder)))
