"""gradlogz report: rebuild the page of a run.

Read next: ../reporting/pages_by_result.py.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from .._input_errors import InputValueError
from .._paths import is_plain_file
from .outputs import (
    RUN_PAGE,
    Csv,
    Details,
    Force,
    Open,
    Parquet,
    check_drawing,
    check_files,
    check_tables,
    keeping,
    open_page,
    print_closing,
    print_lines,
    terminal,
    write_tables,
)


def command(
    run: Annotated[str, typer.Argument(help="Run folder of gradlogz probe.")],
    out: Annotated[
        str | None, typer.Option(help="HTML page to write (default: report.html in RUN).", show_default=False)
    ] = None,
    details: Details = False,
    csv: Csv = None,
    parquet: Parquet = None,
    force: Force = False,
    open_: Open = False,
) -> int:
    """Rebuild the HTML page of a probe run: verdicts, a map of heads, figures and data for every claim.

    Prints a table of verdicts and writes an HTML page.

    If files of the run are damaged or missing, the page lists them and shows what can be read.
    """
    from .._output_files import write
    from ..reporting.findings_page import page_of_run, rendered
    from ..reporting.findings_terminal import claim_lines
    from ..reporting.formatting import measured_line
    from ..reporting.run_contents import contents_of

    path = Path(out) if out is not None else Path(run) / RUN_PAGE
    if out is not None:  # the default is in the run folder, whose errors contents_of describes
        check_files("report", {"--out": path}, force=force)
    check_files("report", {"--csv": csv, "--parquet": parquet}, force=force)
    check_tables("report", parquet)
    check_drawing("report")
    contents = contents_of(run, "report")
    if out is None and os.path.lexists(path) and not is_plain_file(path):
        raise InputValueError("report", "--out", f"{path} is a link, or no file", "Name the page with --out.")
    html = rendered(page_of_run(contents), "report")
    check_files("report", {"--out": path, "--csv": csv, "--parquet": parquet}, force=force)
    write(path, html)  # before the table, so that a closed pipe costs no page
    with keeping([path]):
        write_tables(csv, parquet, contents.findings)
    console = terminal(None)
    print_lines(console, claim_lines(contents.findings, contents.name, console.width, details=details))
    measured = f"{contents.name}, {measured_line(contents.facts)}".rstrip(", ")
    print_closing(console, measured, run, f"{path} ({len(html) / 1e6:.1f} MB)")
    if open_:
        open_page(path)
    return 0
