"""Outputs of commands: the terminal, a page, JSON.

check_file, check_drawing, check_tables   raise before the computation if an output cannot be written after it
terminal                    a console on standard output, or on standard error if JSON takes standard output
print_lines, print_closing  lines of a table on a console, and the three lines after it
progress                    a transient progress bar
write_json, write_tables, open_page       the files
finish                      all files, then the table of results and where the files are
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console

from .._displays import PLAIN_WIDTH
from .._input_errors import InputValueError, MissingPackageError

if TYPE_CHECKING:
    from rich.text import Text

    from ..probing.runs.findings import Findings
    from ..reporting.findings_terminal import StyledLine

STANDARD_OUTPUT = "-"
RUN_PAGE = "report.html"  # in the folder of a run

Open = Annotated[
    bool, typer.Option("--open/--no-open", help="Open the page in a browser (default: no).", show_default=False)
]
Csv = Annotated[
    str | None,
    typer.Option("--csv", help="CSV file for the rows of heads and layers (default: none).", show_default=False),
]
Parquet = Annotated[
    str | None,
    typer.Option("--parquet", help="Parquet file for the same rows; needs polars (default: none).", show_default=False),
]


class Tell(Protocol):
    """Update a progress bar: steps done, total steps (0 if unknown), description; None leaves a part unchanged."""

    def __call__(self, done: int | None = None, total: int | None = None, /, *, what: str | None = None) -> None: ...


def check_file(call: str, flag: str, path: Path | str | None) -> None:
    """Raise if a file cannot be written; None, and standard output for JSON, always can."""
    if path is None or (flag == "--json" and path == STANDARD_OUTPUT):
        return
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        missing = f"there is no folder {path.parent}" if not path.parent.is_dir() else f"{path.parent} is not writable"
        reason = "it is a folder" if path.is_dir() else missing
        raise InputValueError(call, flag, f"{flag} {path} cannot be written: {reason}", "Name another file.")


def check_drawing(call: str) -> None:
    """Raise if a package that pages need is not installed."""
    from ..page import missing

    if (name := missing()) is not None:
        remedy = "Install it with: pip install 'gradlogz[report]'."
        raise MissingPackageError(call, name, f"{name} is needed for pages and is not installed", remedy)


def check_tables(call: str, csv: str | None, parquet: str | None) -> None:
    """Raise if a table of rows cannot be written, or if parquet is wanted and polars is not installed."""
    check_file(call, "--csv", csv)
    check_file(call, "--parquet", parquet)
    if parquet is not None and find_spec("polars") is None:
        remedy = "Install it with: pip install 'gradlogz[tables]', or use --csv."
        raise MissingPackageError(call, "polars", "polars is needed for --parquet and is not installed", remedy)


def terminal(json: str | None) -> Console:
    """A console beside the JSON output; 80 columns wide if it is no terminal and COLUMNS is not set."""
    stderr = json == STANDARD_OUTPUT
    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    return Console(stderr=stderr, width=fixed)


def print_lines(console: Console, lines: "Iterable[StyledLine]") -> None:
    """Print lines of a table, in ASCII if the console has no other characters."""
    from ..reporting.findings_terminal import rich_lines

    for text in rich_lines(lines, console.encoding):
        console.print(text, highlight=False, soft_wrap=False)


def print_closing(console: Console, run: str, results: str | os.PathLike[str], page: str) -> None:
    """Print the three closing lines of every command: what was run, where the results are, where the page is."""
    from ..reporting.result_table import closing_lines

    for line in closing_lines(run, os.fspath(results), page, console.width):
        console.print(line, highlight=False, soft_wrap=True)


def open_page(path: Path) -> None:
    """Open a page in a browser."""
    import webbrowser

    webbrowser.open(path.resolve().as_uri())


@contextmanager
def progress(console: Console, what: str, total: int | None = None) -> Iterator[Tell]:
    """Transient progress bar; without a total it only moves."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def tell(done: int | None = None, total: int | None = None, /, *, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        yield tell


def write_json(path: str | None, text: str) -> None:
    """Write JSON to a file or to standard output; nothing if the path is None."""
    from ..page import write

    if path == STANDARD_OUTPUT:
        print(text)
    elif path is not None:
        write(path, f"{text}\n")


def write_tables(csv: str | None, parquet: str | None, findings: "Findings") -> None:
    """Write the rows of findings as CSV and as parquet, where a path is given."""
    from ..page import replaced, write

    if csv is not None:
        write(csv, findings.csv())
    if parquet is not None:
        with replaced(parquet) as part:
            findings.frame().write_parquet(part)


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
    """Write the page and the JSON, then print the table and three closing lines; open the page in a browser if `show`.

    Files come first, so that a closed pipe costs no result.
    """
    from ..page import write
    from ..reporting import result_table as table

    write(page, html)
    if json != STANDARD_OUTPUT:
        write_json(json, data)
    files = [*tables, *([json] if json not in (None, STANDARD_OUTPUT) else [])]
    results = ", ".join(files) or ("standard output" if json else "not written (--json FILE writes them)")
    size = f"{page} ({len(html) / 1e6:.1f} MB)"
    table.print_lines(console, [*lines, *table.closing_lines(run, results, size, console.width)])
    if json == STANDARD_OUTPUT:
        print(data)
    if show:
        open_page(page)
