"""Events that a Session emits while it works. A listener is a function of one event; an exception from it aborts the
run cleanly. Listeners are only called in the thread that runs the session."""
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from wan_torchax import interruption


@dataclass(frozen=True)
class Began:
    """A phase begins: `start`, `build`, `load_<component>`, `compile_<stage>` or a stage's own name."""

    phase: str
    total: int | None = None  # the sum of the counts that Advanced will report
    unit: str = ""


@dataclass(frozen=True)
class Advanced:
    """Progress within a phase. A count of 0 is a heartbeat."""

    phase: str
    count: int


@dataclass(frozen=True)
class Ended:
    """A phase is done; the time includes its device work."""

    phase: str
    seconds: float


@dataclass(frozen=True)
class Compiled:
    """A program is ready."""

    program: str  # <stage>.<name>
    seconds: float
    from_cache: bool
    memory: Any  # XLA's memory analysis
    from_store: bool = False  # loaded without tracing


@dataclass(frozen=True)
class Took:
    """Time spent on part of the start: imports, devices, tracing, compiling, reading, sending. Parts may overlap."""

    part: str
    seconds: float


@dataclass(frozen=True)
class Stepped:
    """One denoising step is done."""

    step: int  # from 1
    steps: int
    seconds: float
    estimate: Any  # the predicted clean latents (x0) of all videos in the batch, on the devices
    work: str = "full"  # how much of it was computed: full, prompt or reuse; coarse: at half height and width
    measures: Any = None  # measurements of the step, for cache calibration
    rescued: tuple[int, int] | None = None  # attention rows that the guard recomputed, and in how many layers
    video: int = 0  # index in the batch; each video gets its own event
    videos: int = 1  # batch size


@dataclass(frozen=True)
class Previewed:
    """What the video looks like so far: its first frame, or all of them if the decoder is quick (conf/preview)."""

    step: int
    frames: Any  # uint8 (frames, height, width, 3)
    video: int = 0  # as in Stepped


@dataclass(frozen=True)
class Decoded:
    """The next frames of the video, in order, while decoding goes on."""

    frames: Any  # uint8 (frames, height, width, 3)


@dataclass(frozen=True)
class Asked:
    """A live video is about to begin a chunk. A listener that has a new prompt for it appends it, and the prompt's
    embeddings are appended in turn."""

    second: float  # of the video, at which the chunk begins
    prompts: list[str] = field(default_factory=list)
    embeddings: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Reencoded:
    """A live video is about to read what is kept anew. The latents of its first picture, as the decoder shows it, are
    appended."""

    latents: list[Any] = field(default_factory=list)  # (1, channels, 1, height, width)


@dataclass(frozen=True)
class Queued:
    """A stage has queued work on the devices: the time to fetch what they made before."""

    stage: str
    more: bool = False  # it queues more at once: what is not ready yet is left for later


@dataclass(frozen=True)
class Part:
    """A part of a stage's result, while the stage goes on."""

    stage: str
    number: int
    values: dict[str, Any]  # as in Finished


@dataclass(frozen=True)
class Finished:
    """A stage has produced its result."""

    stage: str
    values: dict[str, Any]  # numpy arrays by name
    segment: int | None = None  # if the video has several


Event = (
    Began | Advanced | Ended | Compiled | Took | Stepped | Previewed | Decoded | Asked | Reencoded | Queued | Part
    | Finished
)
Listener = Callable[[Event], None]


def silence(event: Event) -> None:
    """A listener that ignores all events."""


def to_all(*listeners: Listener) -> Listener:
    """A listener that forwards events to several, in order."""

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


class Background(threading.Thread):
    """A background thread. Its events are queued until the session's thread forwards them."""

    def __init__(self, work: Callable[[Listener], None]):
        self.events: SimpleQueue[Event] = SimpleQueue()
        super().__init__(target=work, args=[self.events.put])

    def forward(self, emit: Listener) -> None:
        """Emit the events queued so far."""
        while not self.events.empty():
            emit(self.events.get())

    def finish(self) -> None:
        """Join the thread; raises Interrupted if the process is asked to end."""
        while self.is_alive():
            interruption.check()
            self.join(interruption.LOOK_SECONDS)
