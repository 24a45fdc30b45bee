"""Progress of long computations: the meaning of every `progress` argument.

    progress=False               no output
    progress=True                a text bar on standard error; where that is no terminal, a line for every tenth
    progress=f                   f(done, total) after each unit of work; total is 0 if unknown

Law: tests/package/test_progress_has_one_meaning.py.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence

WIDTH = 40  # width of the bar in characters, where the terminal has room for it

Progress = bool | Callable[[int, int], None]


def reporter(progress: Progress, unit: str, names: Sequence[str] = ()) -> Callable[[int, int], None]:
    """Return the function to call with (done, total): `progress` itself, text for True, no output for False.

    names: of all units of work; the text has the name of the next one, on which work begins.
    """
    if callable(progress):
        return progress
    if not progress:
        return _silent
    return (progress_bar if sys.stderr.isatty() else progress_lines)(unit, names)


def progress_bar(unit: str, names: Sequence[str] = ()) -> Callable[[int, int], None]:
    """Return a text bar on standard error: work done, units per second, and remaining seconds if the total is known."""
    clock = Clock()
    ended = False

    def show(done: int, total: int) -> None:
        nonlocal ended
        if ended:
            return
        clock.tick(done)
        text = f"{done:,} {unit}" + (f", {clock.rate:,.0f} per second" if clock.rate > 0 else "")
        columns = shutil.get_terminal_size().columns - 1  # a full line would wrap
        if total > 0:
            text = f" {done:,}/{total:,} {unit}{clock.left(total)}{_at_work(done, names)}"
            width = max(min(WIDTH, columns - len(text)), 0)
            filled = min(width * done // total, width)
            text = f"{'█' * filled}{'·' * (width - filled)}{text}"
            ended = done >= total
        sys.stderr.write(f"\r{text[:columns]:<{columns}}" + ("\n" if ended else ""))
        sys.stderr.flush()

    return show


def progress_lines(unit: str, names: Sequence[str] = ()) -> Callable[[int, int], None]:
    """Return a writer of lines on standard error: one for each tenth of the work, or for each doubling of it."""
    clock = Clock()
    tenths, least = 0, 1

    def show(done: int, total: int) -> None:
        nonlocal tenths, least
        clock.tick(done)
        left = ""
        if total > 0:
            if min(10 * done // total, 10) <= tenths:
                return
            tenths = min(10 * done // total, 10)
            text = f"{tenths * 10} %, {done:,}/{total:,} {unit}"
            left = clock.left(total)
        else:
            if done < least:
                return
            least = 2 * done
            text = f"{done:,} {unit}"
        sys.stderr.write(f"{text}, {clock.seconds:,.0f} s{left}{_at_work(done, names)}\n")
        sys.stderr.flush()

    return show


class Clock:
    """Seconds of the work, and the rate of what is done since the first report.

    Work that continues first reports what earlier calls have finished, which does not count for the time left.
    """

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._first: tuple[int, float] | None = None  # work done and seconds at the first report
        self._done, self.seconds = 0, 0.0

    def tick(self, done: int) -> None:
        """Take note of the work done so far."""
        self.seconds = time.perf_counter() - self._begun
        self._first = self._first or (done, self.seconds)
        self._done = done

    @property
    def rate(self) -> float:
        """Units per second; 0 before the second report."""
        done, seconds = self._first or (0, 0.0)
        return (self._done - done) / max(self.seconds - seconds, 1e-9)

    def left(self, total: int) -> str:
        """Time left as ", 12 s left"; empty at the beginning and at the end."""
        return f", {(total - self._done) / self.rate:,.0f} s left" if self.rate > 0 and self._done < total else ""


def _silent(done: int, total: int) -> None:
    """Show nothing."""


def _at_work(done: int, names: Sequence[str]) -> str:
    return f": {names[done]}" if done < len(names) else ""
