"""Progress from a Session's events: bars on a terminal, lines elsewhere, progress.json for other programs."""
import contextlib
import json
import logging
import sys
import time
from pathlib import Path

from tqdm import tqdm

from wan_torchax.devices import distributed
from wan_torchax.events import Advanced, Began, Ended, Event, Stepped
from wan_torchax.records.files import write_text

log = logging.getLogger("wan")
WRITE_SECONDS = 0.5  # least interval between writes of progress.json, except for steps
LABELS = {"load_": "loading ", "compile_": "compiling "}


def bar(total: int | None, description: str, **options) -> tqdm:
    """A progress bar on process 0's terminal, nothing elsewhere."""
    shown = sys.stderr.isatty() and distributed.is_first()
    return tqdm(total=total, desc=description, disable=not shown, leave=False, **options)


class Bars:
    """A listener that shows a bar for every long phase, one at a time."""

    def __init__(self):
        self.bar: tqdm | None = None
        self.phase: str | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Began):
            self.close()
            if event.total is not None or event.phase.startswith("compile_"):
                self.open(event)
        elif isinstance(event, Advanced) and event.phase == self.phase:
            self.bar.update(event.count) if event.count else self.bar.refresh()
        elif isinstance(event, Ended) and event.phase == self.phase:
            self.close()

    def open(self, event: Began) -> None:
        options = {"bar_format": "{desc}: {elapsed}"} if event.total is None else {"unit": event.unit}
        options["unit_scale"] = event.unit == "B"
        self.phase, self.bar = event.phase, bar(event.total, label(event.phase), **options)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = self.phase = None


def label(phase: str) -> str:
    """A phase in words."""
    for prefix, words in LABELS.items():
        if phase.startswith(prefix):
            return words + phase.removeprefix(prefix)
    return phase


class Progress:
    """A listener that updates progress.json in the run folder and, without a terminal for bars, logs a line for every
    phase and for every tenth of the steps."""

    def __init__(self, folder: Path):
        self.folder, self.logs = folder, not sys.stderr.isatty()
        self.state, self.written, self.began = {}, 0.0, time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Began):
            self.state = {"phase": event.phase, "done": 0, "total": event.total, "unit": event.unit}
            self.write()
            steps = f": {event.total} steps" if event.unit == "step" else ""
            self.log(f"{label(event.phase)}{steps}")
        elif isinstance(event, Advanced) and event.phase == self.state.get("phase"):
            self.state["done"] += event.count
            if self.state["unit"] == "step" or time.monotonic() - self.written > WRITE_SECONDS:
                self.write()
        elif isinstance(event, Stepped) and self.is_tenth(event):
            self.log(f"{event.step} of {event.steps} steps, {event.seconds:.3f} s each")

    def is_tenth(self, event: Stepped) -> bool:
        """Whether this step completes another tenth of them."""
        return event.step * 10 // event.steps > (event.step - 1) * 10 // event.steps

    def log(self, line: str) -> None:
        if self.logs:
            log.info(line)

    def write(self) -> None:
        self.written = time.monotonic()
        state = self.state | {"seconds": round(self.written - self.began, 1)}
        with contextlib.suppress(OSError):  # a full disk should fail the run at its results, not here
            write_text(self.folder / "progress.json", json.dumps(state) + "\n")
