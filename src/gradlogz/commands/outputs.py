"""Where the results of commands go: the terminal, a page, JSON.

check_file, check_drawing   refuse, before anything is computed, what could not be written after it
terminal                    a console on standard output, or on standard error where JSON takes standard output
progress                    a bar that disappears
write_page, write_json      the files
finish                      all files, then the table of results and where the files are
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console
from rich.markup import escape

from .._input_errors import InputValueError, MissingPackageError

if TYPE_CHECKING:
    from rich.text import Text

STANDARD_OUTPUT = "-"
RUN_PAGE = "report.html"  # in the folder of a run

Open = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")]


class Tell(Protocol):
    """Update a progress bar: done, total (0 if not known), and what is being done; None leaves a part as it is."""

    def __call__(self, done: int | None = None, total: int | None = None, /, *, what: str | None = None) -> None: ...


def check_file(call: str, flag: str, path: Path | str | None) -> None:
    """Refuse a file that cannot be written; None, or standard output for JSON, is no file."""
    if path is None or (flag == "--json" and path == STANDARD_OUTPUT):
        return
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        fact = "a folder" if path.is_dir() else "no such folder" if not path.parent.is_dir() else "no permission"
        condition = f"{flag} must name a file that can be written"
        raise InputValueError(call, flag, f"{condition}, got {path}, {fact}", "Name another.")


def check_drawing(call: str) -> None:
    """Refuse a page where what draws it is not installed."""
    from ..page import missing

    if (name := missing()) is not None:
        condition, remedy = (
            f"{name} must be installed to make a page",
            "Install it with: pip install 'gradlogz[report]'.",
        )
        raise MissingPackageError(call, name, f"{condition}, got no {name}", remedy)


def terminal(json: str | None) -> Console:
    """The console for what a command prints beside its JSON."""
    return Console(stderr=json == STANDARD_OUTPUT)


@contextmanager
def progress(console: Console, what: str, total: int | None = None) -> Iterator[Tell]:
    """A progress bar that disappears at the end; without a total it only moves."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def tell(done: int | None = None, total: int | None = None, /, *, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        yield tell


def write_page(console: Console, path: Path, html: str, *, show: bool) -> None:
    """Write a page, print where it is, and open it in a browser if asked to."""
    import webbrowser

    from ..page import write

    write(path, html)
    console.print(f"page: {escape(str(path))} ({len(html) / 1e6:.1f} MB)", highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(path.resolve().as_uri())


def write_json(path: str | None, text: str) -> None:
    """Write JSON to a file or to standard output, if asked to."""
    from ..page import write

    if path == STANDARD_OUTPUT:
        print(text)
    elif path is not None:
        write(path, f"{text}\n")


def finish(
    console: Console,
    lines: "Iterable[Text]",
    *,
    run: str,
    page: Path,
    html: str,
    json: str | None,
    data: str,
    tables: Iterable[str] = (),
    show: bool,
) -> None:
    """Write the page and the JSON, then print the table and three closing lines; open the page if asked to.

    Files come first, so that a closed pipe costs no result.
    """
    import webbrowser

    from ..page import write
    from ..reporting.result_table import closing_lines, print_lines, terminal_width

    write(page, html)
    if json != STANDARD_OUTPUT:
        write_json(json, data)
    files = [*tables, *([json] if json not in (None, STANDARD_OUTPUT) else [])]
    results = "standard output" if json == STANDARD_OUTPUT else "not written; --json FILE writes them"
    size = f"{page} ({len(html) / 1e6:.1f} MB)"
    print_lines(console, [*lines, *closing_lines(run, ", ".join(files) or results, size, terminal_width(console))])
    if json == STANDARD_OUTPUT:
        print(data)
    if show:
        webbrowser.open(page.resolve().as_uri())
