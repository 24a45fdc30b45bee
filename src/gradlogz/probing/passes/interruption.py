"""Ctrl-C as a question: a long pass ends after the batch that is under way.

Read next: ../run_probe.py, which asks after every batch.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within this context the first Ctrl-C is only noted: the function given says whether; a second one interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)
    noted: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        noted.append(True)
        signal.signal(signal.SIGINT, before)
        sys.stderr.write("\nFinishing this batch; once more to stop at once.\n")

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
