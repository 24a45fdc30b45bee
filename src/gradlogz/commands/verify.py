"""gradlogz verify: check every statement, show the table, write it as a page and as JSON.

Read next: ../verification/program.py (what is checked), ../reporting/verification_terminal.py (what is printed).
"""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .._input_errors import InputValueError
from .outputs import check_drawing, check_file, progress, terminal, write_json, write_page


def command(
    json: Annotated[
        str | None, typer.Option(help="Write the table as JSON to this file; - is standard output.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Only the statement with this key, or those that contain this text.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write the table as a page to this file.", show_default=False)] = None,
) -> int:
    """Check the theory: every statement of the sources that can be computed, as printed and as corrected.

    Exits with 1 if a corrected statement fails.
    """
    from ..reporting import report
    from ..reporting.verification_page import data_of
    from ..reporting.verification_terminal import statement_table, verification_summary
    from ..verification.program import statements, verify
    from ..verification.statement import Verification

    console = terminal(json)
    check_file("verify", "--json", json)
    check_file("verify", "--out", out)
    if out is not None:
        check_drawing("verify")
    selected = statements(only)
    if not selected:
        condition, remedy = "--only must match a statement", "Without it all are checked."
        raise InputValueError("verify", "--only", f"{condition}, got {only!r}", remedy)
    results = []
    with progress(console, "Checking the theory", len(selected)) as tell:
        for result in verify(selected):
            results.append(result)
            tell(len(results))
    verification = Verification(tuple(results))
    console.print(statement_table(results, console.width))
    for line in verification_summary(results):
        console.print(line)
    if out is not None:
        write_page(console, Path(out), report(verification), show=False)
    write_json(json, dumps(data_of(verification), indent=2, ensure_ascii=False))
    return 0 if verification.holds else 1
