"""gradlogz compare: several runs on one page.

Read next: ../reporting/comparison_page.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from .outputs import Open, check_file, print_lines, terminal, write_page


def command(
    runs: Annotated[
        list[str], typer.Argument(help="Two or more run folders of gradlogz probe.", metavar="RUN RUN ...")
    ],
    out: Annotated[str, typer.Option(help="HTML file of the page.")] = "compare.html",
    open_: Open = False,
) -> int:
    """Compare runs: different models, or checkpoints of one training with trends over its steps.

    The step of a checkpoint is read from its facts, its name or its folder, as in step1000 or checkpoint-500.
    """
    from ..reporting.comparison_page import page_of_runs, read_all
    from ..reporting.comparison_terminal import comparison_lines
    from ..reporting.findings_page import rendered

    check_file("compare", "--out", out)
    every = read_all(runs)
    html = rendered(page_of_runs(every), "compare")
    console = terminal(None)
    print_lines(console, comparison_lines(every.names, every.claims, every.declarations, console.width))
    console.print(f"Runs: {', '.join(runs)}", highlight=False, soft_wrap=True, markup=False)
    write_page(console, Path(out), html, show=open_)
    return 0
