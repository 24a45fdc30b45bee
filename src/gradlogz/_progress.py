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
    begun = time.perf_counter()
    ended = False

    def show(done: int, total: int) -> None:
        nonlocal ended
        if ended:
            return
        rate = done / max(time.perf_counter() - begun, 1e-9)
        text = f"{done:,} {unit}, {rate:,.0f} per second"
        columns = shutil.get_terminal_size().columns - 1  # a full line would wrap
        if total > 0:
            left = f", {max(total - done, 0) / rate:,.0f} s left" if done > 0 else ""
            text = f" {done:,}/{total:,} {unit}{left}{_at_work(done, names)}"
            width = max(min(WIDTH, columns - len(text)), 0)
            filled = min(width * done // total, width)
            text = f"{'█' * filled}{'·' * (width - filled)}{text}"
            ended = done >= total
        sys.stderr.write(f"\r{text[:columns]:<{columns}}" + ("\n" if ended else ""))
        sys.stderr.flush()

    return show


def progress_lines(unit: str, names: Sequence[str] = ()) -> Callable[[int, int], None]:
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
        sys.stderr.write(f"{text}, {seconds:,.0f} s{_at_work(done, names)}\n")
        sys.stderr.flush()

    return show


def _silent(done: int, total: int) -> None:
    """Show nothing."""


def _at_work(done: int, names: Sequence[str]) -> str:
    return f": {names[done]}" if done < len(names) else ""
