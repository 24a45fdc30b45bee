"""gradlogz compare: several runs on one page.

Read next: ../reporting/comparison_page.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from .outputs import Open, check_file, terminal, write_page


def command(
    runs: Annotated[
        list[str], typer.Argument(help="Folders of runs of gradlogz probe, two or more.", metavar="RUN RUN ...")
    ],
    out: Annotated[str, typer.Option(help="The page.")] = "compare.html",
    open_: Open = False,
) -> int:
    """Put several runs side by side: models, or checkpoints of one training with trends over its steps.

    A run has a step if its facts, its name or its folder say so, as in step1000 or checkpoint-500.
    """
    from ..reporting import compare

    check_file("compare", "--out", out)
    write_page(terminal(None), Path(out), compare(runs), show=open_)
    return 0
