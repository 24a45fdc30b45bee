"""Deferred Ctrl-C and SIGTERM: a long pass ends after the current batch.

Read next: ../run_probe.py, which tests for it after every batch.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Context in which the first Ctrl-C or SIGTERM is only recorded and a second one interrupts.

    Yields the test for the first. SIGTERM keeps its meaning in programs that let it end them, as most do; the command
    line does not. Ctrl-C keeps being ignored where it is, as in commands that a script starts in the background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {}
    if (handler := signal.getsignal(signal.SIGINT)) is not signal.SIG_IGN:
        before[signal.SIGINT] = handler
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        before[signal.SIGTERM] = signal.default_int_handler
    noted: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        noted.append(True)
        _set(before)
        sys.stderr.write("\nFinishing this batch. Press Ctrl-C again to stop at once.\n")

    _set(dict.fromkeys(before, note))
    try:
        yield lambda: bool(noted)
    finally:
        _set(before)


def _set(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
