"""Ctrl-C and SIGTERM: the handler only sets a flag, and the work checks it where it can stop cleanly.

    install()                    # run.py, once
    for step in steps:
        check()                  # raises Interrupted, here and nowhere else

An exception raised by a handler could surface at any line: while a lock is held, or in a callback of the interpreter,
which would swallow it.
"""
import os
import signal
import threading
from collections.abc import Collection, Iterator

LOOK_SECONDS = 0.1  # polling interval for the flag while waiting
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
asked: signal.Signals | None = None  # the flag: the signal that asked this process to end


class Interrupted(KeyboardInterrupt):
    """The process was asked to end. A KeyboardInterrupt, so `except Exception` does not catch it."""

    def __init__(self, number: signal.Signals):
        super().__init__(number.name)
        self.word, self.status = WORDS[number], exit_status(number)


def exit_status(number: int) -> int:
    """130 for SIGINT, 143 for SIGTERM, as shells report processes killed by a signal."""
    return 128 + number


def check() -> None:
    """Raise Interrupted if this process was asked to end."""
    if asked is not None:
        raise Interrupted(asked)


def wait(futures: Collection) -> None:
    """Wait until all are done; raises Interrupted if the process is asked to end."""
    from concurrent import futures as library  # slow to import: the handlers should be installed before

    check()
    while library.wait(futures, LOOK_SECONDS).not_done:
        check()


def install() -> None:
    """Install the handlers: the first signal sets the flag, the second ends the process. Call once, in the main
    thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    os.register_at_fork(after_in_child=forget)
    for number in WORDS:
        signal.signal(number, remember)
    threading.Thread(target=listen, args=[reader], daemon=True).start()


def remember(number: int, frame) -> None:
    global asked
    asked = asked or signal.Signals(number)


def listen(reader: int) -> None:
    """React to signals at once. Python runs handlers in the main thread only after its native call returns, which may
    hang; the wakeup pipe receives the signal number immediately."""
    numbers = received(reader)
    next(numbers)
    os.write(2, b"interrupted: ends after the work in hand; once more ends at once\n")
    os._exit(exit_status(next(numbers)))


def received(reader: int) -> Iterator[int]:
    while True:
        (number,) = os.read(reader, 1)
        if number in WORDS:
            yield number


def forget() -> None:
    """Reset in a forked child: it inherits the parent's pipe but not the thread that reads it."""
    global asked
    asked = None
    signal.set_wakeup_fd(-1)
    for number in WORDS:
        signal.signal(number, signal.SIG_DFL)
