"""Deferred Ctrl-C: a long pass ends after the current batch.

Read next: ../run_probe.py, which tests for it after every batch.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Context in which the first Ctrl-C is only recorded and a second one interrupts; yields the test for the first."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)
    noted: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        noted.append(True)
        signal.signal(signal.SIGINT, before)
        sys.stderr.write("\nFinishing this batch. Press Ctrl-C again to stop at once.\n")

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
