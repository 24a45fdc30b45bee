"""gradlogz report: the page of a run, made again.

Read next: ../reporting/pages_by_result.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from .outputs import RUN_PAGE, Open, check_drawing, check_file, terminal, write_page


def command(
    run: Annotated[str, typer.Argument(help="The folder of a run of gradlogz probe.")],
    out: Annotated[
        str | None, typer.Option(help="The page; by default report.html in the folder.", show_default=False)
    ] = None,
    open_: Open = False,
) -> int:
    """Make the page of a run again: verdicts, a map of heads, every claim with its figures, all data.

    A damaged or incomplete run has a page of what can be read, which says what is missing.
    """
    from ..reporting import report

    path = Path(out) if out is not None else Path(run) / RUN_PAGE
    if out is not None:  # without it the folder of the run is named, and `report` says what is wrong with that
        check_file("report", "--out", path)
    check_drawing("report")
    html = report(run)
    check_file("report", "--out", path)
    write_page(terminal(None), path, html, show=open_)
    return 0
