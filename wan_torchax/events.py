"""What a Session tells while it works. A listener is a function of one event; what it raises ends the run in order. It
is only ever called in the thread that runs the session."""
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from wan_torchax import interruption


@dataclass(frozen=True)
class Began:
    """A phase of the work begins: `start`, `build`, `load_<component>`, `compile_<stage>` or a stage's own name."""

    phase: str
    total: int | None = None  # of what Advanced will count
    unit: str = ""


@dataclass(frozen=True)
class Advanced:
    """Some of a phase is done. A count of 0 says that it goes on."""

    phase: str
    count: int


@dataclass(frozen=True)
class Ended:
    """A phase is done, the devices in step with the clock."""

    phase: str
    seconds: float


@dataclass(frozen=True)
class Compiled:
    """A program is ready."""

    program: str  # <stage>.<name>
    seconds: float
    from_cache: bool
    memory: Any  # XLA's account of the memory it takes
    from_store: bool = False  # not even traced


@dataclass(frozen=True)
class Took:
    """Some of a start is done: imports, devices, tracing, compiling, reading or sending, which go on side by side."""

    part: str
    seconds: float


@dataclass(frozen=True)
class Stepped:
    """One denoising step is done."""

    step: int  # from 1
    steps: int
    seconds: float
    estimate: Any  # part of the latents as they would end if the video went straight on from here, on the devices
    work: str = "full"  # how much of it was computed: full, prompt or reuse
    measures: Any = None  # a few numbers that the step leaves, for those who calibrate
    rescued: tuple[int, int] | None = None  # rows of attention that its guard computed again, in how many layers
    video: int = 0  # which of the videos that are denoised together: each is told of
    videos: int = 1  # how many that are


@dataclass(frozen=True)
class Previewed:
    """How the video looks so far."""

    step: int
    frame: Any  # uint8 (height, width, 3)
    video: int = 0  # as of the step


@dataclass(frozen=True)
class Decoded:
    """More frames of the video, in order, before all of them are there."""

    frames: Any  # uint8 (frames, height, width, 3)


@dataclass(frozen=True)
class Finished:
    """A stage has its result."""

    stage: str
    values: dict[str, Any]  # numpy arrays by name
    segment: int | None = None  # of a video that is made in several


Event = Began | Advanced | Ended | Compiled | Took | Stepped | Previewed | Decoded | Finished
Listener = Callable[[Event], None]


def silence(event: Event) -> None:
    """The listener nobody listens with."""


def to_all(*listeners: Listener) -> Listener:
    """One listener that tells several, in order."""

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


class Background(threading.Thread):
    """A thread beside the one that runs the session. What it tells waits in a queue until that one hands it on."""

    def __init__(self, work: Callable[[Listener], None]):
        self.told: SimpleQueue[Event] = SimpleQueue()
        super().__init__(target=work, args=[self.told.put])

    def hand_on(self, emit: Listener) -> None:
        """Tell what this thread has told so far."""
        while not self.told.empty():
            emit(self.told.get())

    def finish(self) -> None:
        """Wait for the end of its work, but not if this process is asked to end."""
        while self.is_alive():
            interruption.check()
            self.join(interruption.LOOK_SECONDS)
