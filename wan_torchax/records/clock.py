"""The timings in metrics.json, collected from a Session's events."""
import itertools
import logging
import os
import threading
import time
from pathlib import Path

from wan_torchax.events import Compiled, Ended, Event, Stepped, Took

log = logging.getLogger("wan")
GIB = 2**30
MEMORY = ("argument", "output", "temp", "generated_code")
# Parts of a start. They overlap, so their sum is not elapsed time.
START = ("imports", "devices", "tracing", "compiling", "reading", "sending")
clocks = itertools.count()  # clocks created by this process


class Clock:
    """A listener that records seconds by phase, step and compilation."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.steps: list[float] = []
        self.work: list[str] = []
        self.together = 1
        self.rescued: list[tuple[int, int]] = []
        self.programs: dict[str, dict] = {}
        self.start: dict[str, float] = dict.fromkeys(START, 0.0)
        self.start["imports"] = process_seconds()
        self.began = time.perf_counter()
        self.lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Ended) and not event.phase.startswith("compile_"):
            self.seconds[event.phase] = event.seconds
        elif isinstance(event, Stepped):
            self.steps.append(event.seconds)
            self.work.append(event.work)
            self.together = event.videos
            if event.rescued is not None:
                self.rescued.append(event.rescued)
        elif isinstance(event, Compiled):
            self.compiled(event)
        elif isinstance(event, Took):
            with self.lock:  # weights and programs load in threads
                self.start[event.part] += event.seconds

    def compiled(self, event: Compiled) -> None:
        memory = {part: round(getattr(event.memory, f"{part}_size_in_bytes") / GIB, 4) for part in MEMORY}
        self.programs[event.program] = {
            "seconds": round(event.seconds, 3), "from_cache": event.from_cache, "from_store": event.from_store,
            "memory_gib": memory,
        }
        source = "from the store" if event.from_store else "from the cache" if event.from_cache else "not in the cache"
        log.info(
            "compiled %s in %.1f s (%s); per device %.3f GiB arguments, %.3f GiB temporaries",
            event.program, event.seconds, source, memory["argument"], memory["temp"],
        )

    def median_step(self) -> float | None:
        """The median over fully computed steps."""
        whole = sorted(seconds for seconds, work in zip(self.steps, self.work) if work == "full")
        return whole[len(whole) // 2] if whole else None

    def rescued_rows(self) -> dict | None:
        """How often the attention guard fired; None if the kernels have none."""
        if not self.rescued:
            return None
        rows, layers = zip(*self.rescued)
        return {"rows": sum(rows), "layers_at_most": max(layers), "steps": sum(count > 0 for count in rows)}

    def report(self) -> dict:
        """Times including device work, with compilation reported separately."""
        total, median = time.perf_counter() - self.began, self.median_step()
        return {
            "seconds": {name: round(value, 4) for name, value in (self.seconds | {"total": total}).items()},
            "start": {part: round(seconds, 4) for part, seconds in self.start.items()},
            "step_seconds": [round(value, 4) for value in self.steps],
            "step_seconds_median": median and round(median, 4),
            "step_work": {kind: self.work.count(kind) for kind in dict.fromkeys(self.work)},
            "denoised_together": self.together,  # batch size: step times are for the whole batch
            "attention_rescued": self.rescued_rows(),
            "compile": self.programs,
        }


def process_seconds() -> float:
    """Seconds since the process started, for Python's start and imports; 0 for later jobs."""
    if next(clocks) or not Path("/proc/self/stat").exists():
        return 0.0
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
