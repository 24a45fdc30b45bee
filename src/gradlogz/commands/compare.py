"""gradlogz compare: several runs on one page.

Read next: ../reporting/comparison_page.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from .outputs import Details, Force, Open, check_files, open_page, print_closing, print_lines, terminal


def command(
    runs: Annotated[
        list[str], typer.Argument(help="Two or more run folders of gradlogz probe.", metavar="RUN RUN ...")
    ],
    out: Annotated[str, typer.Option(help="HTML page to write.")] = "compare.html",
    details: Details = False,
    force: Force = False,
    open_: Open = False,
) -> int:
    """Compare results of gradlogz probe: for different models, or for checkpoints of one model during training.

    Prints a table of verdicts, with the differences of two runs and their 95 % CIs, and writes an HTML page.

    Differences are paired if both runs read the same documents.

    The training step is read from the metadata of a run folder, or from the name of the folder or model (step1000).
    """
    from .._output_files import write
    from ..reporting.comparison_page import page_of_runs, read_all
    from ..reporting.comparison_terminal import comparison_lines
    from ..reporting.findings_page import rendered

    check_files("compare", {"--out": out}, force=force)
    every = read_all(runs)
    html = rendered(page_of_runs(every), "compare")
    path = Path(out)
    write(path, html)  # before the table, so that a closed pipe costs no page
    console = terminal(None)
    differences = every.differences if len(runs) == 2 else None
    lines = comparison_lines(
        every.names, every.claims, every.declarations, console.width, differences=differences, details=details
    )
    print_lines(console, lines)
    print_closing(console, f"{len(runs)} runs compared", ", ".join(runs), f"{path} ({len(html) / 1e6:.1f} MB)")
    if open_:
        open_page(path)
    return 0
