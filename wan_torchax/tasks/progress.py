"""Progress bars on a terminal, from a Session's events."""
import sys

from tqdm import tqdm

from wan_torchax.devices import distributed
from wan_torchax.events import Advanced, Began, Ended, Event

LABELS = {"load_": "loading ", "compile_": "compiling "}


def bar(total: int | None, description: str, **options) -> tqdm:
    """A progress bar on process 0's terminal, nothing elsewhere."""
    shown = sys.stderr.isatty() and distributed.is_first()
    return tqdm(total=total, desc=description, disable=not shown, leave=False, **options)


class Bars:
    """A listener that shows a bar for every phase that takes a while, one at a time."""

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
        label = event.phase
        for prefix, words in LABELS.items():
            label = words + label.removeprefix(prefix) if label.startswith(prefix) else label
        options = {"bar_format": "{desc}: {elapsed}"} if event.total is None else {"unit": event.unit}
        self.phase, self.bar = event.phase, bar(event.total, label, unit_scale=event.unit == "B", **options)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = self.phase = None
