"""Outputs of commands: the terminal, a page, JSON.

check_files, check_drawing, check_tables  raise before the computation if an output cannot be written after it
terminal                    a console on standard output, or on standard error if JSON takes standard output
print_lines, print_closing  lines of a table on a console, and the three lines after it
progress                    a transient progress bar
page_of                     the page of a run, in its folder
write_json, write_tables, open_page       the files
finish                      all files, then the table of results and where the files are
keeping                     results are on the disk: an error from here on ends with exit status 3
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console

from .._displays import PLAIN_WIDTH
from .._foreign_text import visible
from .._input_errors import InputError, InputValueError, MissingPackageError
from .._output_files import check_file, replaced, same_file, write

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    from ..probing.runs.findings import Findings
    from ..reporting.findings_terminal import StyledLine

STANDARD_OUTPUT = "-"
RUN_PAGE = "report.html"  # in the folder of a run
NO_PAGE = "none; pip install 'gradlogz[report]', then gradlogz report"

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
Force = Annotated[
    bool, typer.Option("--force", help="Also replace existing files that gradlogz did not write.", show_default=False)
]
Details = Annotated[
    bool, typer.Option("--details", help="Print the numbers of each claim in sentences, below its line.")
]


class Tell(Protocol):
    """Update a progress bar: steps done, total steps (0 if unknown), description; None leaves a part unchanged."""

    def __call__(self, done: int | None = None, total: int | None = None, /, *, what: str | None = None) -> None: ...


def check_files(
    call: str,
    files: Mapping[str, Path | str | None],
    *,
    inputs: Iterable[str | None] = (),
    force: bool = False,
) -> None:
    """Raise if a file of the options cannot be written, is written twice, or is an input of the command.

    files: paths by flag; None is no file, and - for --json is standard output.
    """
    paths = {flag: path for flag, path in files.items() if path is not None}
    if paths.get("--json") == STANDARD_OUTPUT:
        del paths["--json"]
    for flag, path in paths.items():
        check_file(call, flag, path, force=force)
    read = [path for path in inputs if path is not None and path != STANDARD_OUTPUT]
    for number, (flag, path) in enumerate(paths.items()):
        twice = [f"that of {other}" for other in list(paths)[:number] if same_file(path, paths[other])]
        twice += ["the input of this command" for other in read if _is_input(path, other)]
        if twice:
            problem = f"{flag} {path} is the same file as {twice[0]}"
            raise InputValueError(call, flag, problem, "Name another file.")


def _is_input(path: Path | str, source: str) -> bool:
    """True if an output is the file of an input; inputs that are no usable path are refused by their readers."""
    try:
        return same_file(path, Path(source).expanduser())
    except (OSError, ValueError, RuntimeError):
        return False


def check_drawing(call: str) -> None:
    """Raise if a package that pages need is not installed."""
    from ..page import missing

    if (name := missing()) is not None:
        remedy = "Install it with: pip install 'gradlogz[report]'."
        raise MissingPackageError(call, name, f"{name} is needed for pages and is not installed", remedy)


def check_tables(call: str, parquet: str | None) -> None:
    """Raise if parquet is wanted and polars is not installed."""
    if parquet is not None and find_spec("polars") is None:
        remedy = "Install it with: pip install 'gradlogz[tables]', or use --csv."
        raise MissingPackageError(call, "polars", "polars is needed for --parquet and is not installed", remedy)


def terminal(json: str | None) -> Console:
    """A console beside the JSON output; 80 columns wide if it is no terminal and COLUMNS is not set."""
    stderr = json == STANDARD_OUTPUT
    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    return _Terminal(stderr=stderr, width=fixed, markup=False, emoji=False)


class _Terminal(Console):
    """A console on which names of strangers cannot move the cursor, and brackets in them are brackets."""

    def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> "Iterable[Segment]":
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


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


def page_of(run: Path, report: Callable[[Path], str]) -> str:
    """Write the page of a run, as `report` renders it, into its folder; return its path, or how to install pages."""
    from ..page import missing

    return NO_PAGE if missing() else str(write(run / RUN_PAGE, report(run)))


def write_json(path: str | None, text: str) -> None:
    """Write JSON to a file or to standard output; nothing if the path is None."""
    if path == STANDARD_OUTPUT:
        print_json(text)
    elif path is not None:
        write(path, f"{text}\n")


def print_json(text: str) -> None:
    """Print JSON in UTF-8, which is its encoding whatever that of the terminal."""
    sys.stdout.flush()
    sys.stdout.buffer.write(f"{text}\n".encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()


def write_tables(csv: str | None, parquet: str | None, findings: "Findings") -> None:
    """Write the rows of findings as CSV and as parquet, where a path is given."""
    if csv is not None:
        write(csv, findings.csv())
    if parquet is not None:
        from .._parquet import write_parquet
        from ..probing.runs.row_table import METADATA

        with replaced(parquet) as part:
            write_parquet(findings.frame(), part, metadata=METADATA)


@contextmanager
def keeping(results: Sequence[Path | str]) -> Iterator[None]:
    """Context with results on the disk, if any: bad input, or an output that fails, ends it with exit status 3."""
    try:
        yield
    except InputError as error:
        error.results = ", ".join(map(str, results)) or None
        raise


def finish(
    console: Console,
    lines: "Iterable[Text]",
    *,
    run: str,
    page: Path,
    html: str,
    json: str | None,
    data: str,
    tables: Sequence[str] = (),
    show: bool,
) -> None:
    """Write the page and the JSON, then print the table and three closing lines; open the page in a browser if `show`.

    Files come first, so that a closed pipe costs no result.
    """
    from ..reporting import result_table as table

    written: list[Path | str] = list(tables)
    with keeping(written):
        write(page, html)
        written.append(page)
        if json != STANDARD_OUTPUT:
            write_json(json, data)
    files = [*tables, *([json] if json not in (None, STANDARD_OUTPUT) else [])]
    results = ", ".join(files) or ("standard output" if json else "not written (--json FILE writes them)")
    size = f"{page} ({len(html) / 1e6:.1f} MB)"
    table.print_lines(console, [*lines, *table.closing_lines(run, results, size, console.width)])
    if json == STANDARD_OUTPUT:
        print_json(data)
    if show:
        open_page(page)
