"""Ctrl-C and SIGTERM: a handler sets a flag, and the work looks at it where it can be left in order.

    install()                    # run.py, once
    for step in steps:
        check()                  # raises Interrupted, here and nowhere else

An exception from a handler could come out of any line: of one that holds a lock, which would stay held, or of a
callback of Python's own, which would lose it.
"""
import os
import signal
import threading
from collections.abc import Collection, Iterator

LOOK_SECONDS = 0.1  # between two looks at the flag while something is waited for
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
asked: signal.Signals | None = None  # the flag: the signal that asked this process to end


class Interrupted(KeyboardInterrupt):
    """This process was asked to end. As a Ctrl-C, it passes `except Exception`, ours and those of libraries."""

    def __init__(self, number: signal.Signals):
        super().__init__(number.name)
        self.word, self.status = WORDS[number], exit_status(number)


def exit_status(number: int) -> int:
    """130 for SIGINT, 143 for SIGTERM: what a shell says of a process that a signal has ended."""
    return 128 + number


def check() -> None:
    """Raise Interrupted if this process was asked to end."""
    if asked is not None:
        raise Interrupted(asked)


def wait(futures: Collection) -> None:
    """Until all of them are done, or this process is asked to end."""
    from concurrent import futures as library  # not before the handlers are there: it takes longer than all the rest

    check()
    while library.wait(futures, LOOK_SECONDS).not_done:
        check()


def install() -> None:
    """From here on the first signal sets the flag, and the second ends the process. Once, in the main thread."""
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
    """Answer signals at once. Python calls handlers in the main thread, when its native call returns: a device may
    hang. The number of each signal is in the pipe before that."""
    numbers = heard(reader)
    next(numbers)
    os.write(2, b"interrupted: ends after the work in hand; once more ends at once\n")
    os._exit(exit_status(next(numbers)))


def heard(reader: int) -> Iterator[int]:
    while True:
        (number,) = os.read(reader, 1)
        if number in WORDS:
            yield number


def forget() -> None:
    """In a forked child: its signals are not its parent's, whose pipe it has, and it has no thread that listens."""
    global asked
    asked = None
    signal.set_wakeup_fd(-1)
    for number in WORDS:
        signal.signal(number, signal.SIG_DFL)
