"""Progress of long computations: the meaning of every `progress` argument.

    progress=False               no output
    progress=True                a text bar on standard error; where that is no terminal, a line for every tenth
    progress=f                   f(done, total) after each unit of work; total is 0 if unknown

Law: tests/package/test_progress_has_one_meaning.py.
"""

import sys
import time
from collections.abc import Callable

WIDTH = 40  # width of the bar in characters

Progress = bool | Callable[[int, int], None]


def reporter(progress: Progress, unit: str) -> Callable[[int, int], None]:
    """Return the function to call with (done, total): `progress` itself, text for True, no output for False."""
    if callable(progress):
        return progress
    if not progress:
        return _silent
    return progress_bar(unit) if sys.stderr.isatty() else progress_lines(unit)


def progress_bar(unit: str) -> Callable[[int, int], None]:
    """Return a text bar on standard error: work done, units per second, and remaining seconds if the total is known."""
    begun = time.perf_counter()
    ended = False

    def show(done: int, total: int) -> None:
        nonlocal ended
        if ended:
            return
        rate = done / max(time.perf_counter() - begun, 1e-9)
        text = f"{done:,} {unit}, {rate:,.0f} per second"
        if total > 0:
            filled = min(WIDTH * done // total, WIDTH)
            text = f"{'█' * filled}{'·' * (WIDTH - filled)} {done:,}/{total:,} {unit}"
            if done > 0:
                text += f", {max(total - done, 0) / rate:,.0f} s left"
            ended = done >= total
        sys.stderr.write(f"\r{text:<100}" + ("\n" if ended else ""))
        sys.stderr.flush()

    return show


def progress_lines(unit: str) -> Callable[[int, int], None]:
    """Return a writer of lines on standard error: one for each tenth of the work, or for each doubling of it."""
    begun = time.perf_counter()
    tenths, least = 0, 1

    def show(done: int, total: int) -> None:
        nonlocal tenths, least
        seconds = time.perf_counter() - begun
        if total > 0:
            if min(10 * done // total, 10) <= tenths:
                return
            tenths = min(10 * done // total, 10)
            left = seconds * (total - done) / done
            text = f"{tenths * 10} %, {done:,}/{total:,} {unit}, about {left:,.0f} s left"
        else:
            if done < least:
                return
            least = 2 * done
            text = f"{done:,} {unit}"
        sys.stderr.write(f"{text}, {seconds:,.0f} s\n")
        sys.stderr.flush()

    return show


def _silent(done: int, total: int) -> None:
    """Show nothing."""
