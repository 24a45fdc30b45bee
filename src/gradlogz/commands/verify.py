"""gradlogz verify: check every statement, show the table, write it as a page and as JSON.

Read next: ../verification/program.py (what is checked), ../reporting/verification_terminal.py (what is printed).
"""

from pathlib import Path
from typing import Annotated

import typer

from .._input_errors import InputValueError, sentence
from .outputs import Open, check_drawing, check_file, progress, terminal, write_json, write_page


def command(
    json: Annotated[
        str | None, typer.Option(help="Write the table as JSON to this file; - is standard output.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Only the statement with this key, or those that contain this text.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write the table as a page to this file.", show_default=False)] = None,
    open_: Open = False,
) -> int:
    """Check the theory: every statement of the sources that can be computed, as printed and as corrected.

    Exits with 1 if a corrected statement fails.
    """
    from ..page import render
    from ..reporting.verification_page import page_of
    from ..reporting.verification_terminal import statement_table, verification_summary
    from ..verification.program import as_json, statements, verify

    console = terminal(json)
    check_file("verify", "--json", json)
    check_file("verify", "--out", out)
    if out is not None:
        check_drawing("verify")
    selected = statements(only)
    if not selected:
        condition, remedy = "--only must match a statement", "Without it all are checked."
        raise InputValueError(sentence("verify", condition, repr(only), remedy))
    verdicts = []
    with progress(console, "Checking the theory", len(selected)) as tell:
        for verdict in verify(selected):
            verdicts.append(verdict)
            tell(len(verdicts))
    console.print(statement_table(verdicts, console.width))
    for line in verification_summary(verdicts):
        console.print(line)
    if out is not None:
        write_page(console, Path(out), render(page_of(verdicts)), show=open_)
    write_json(json, as_json(verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else 1
