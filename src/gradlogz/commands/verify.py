"""gradlogz verify: check every statement, print the table, write it as a page and as JSON.

Read next: ../verification/program.py (the checks), ../reporting/verification_terminal.py (the table).
"""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .._input_errors import InputValueError
from .outputs import Force, check_drawing, check_files, progress, terminal, write_json


def command(
    json: Annotated[
        str | None,
        typer.Option(help="JSON file for the results; - for standard output (default: none).", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Statement to check: its key, such as E8, or text in its key, source or formula (default: all).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="HTML page to write (default: none).", show_default=False)] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print every formula in full, with its tolerance.")
    ] = False,
    force: Force = False,
) -> int:
    """Check statements of the paper (Shim, 2022), its appendix, two draft notes and docs/theory.md numerically.

    The statements use all chapters: measures, attention, dynamics, filters, contrastive. Prints a table. For a formula
    with a known error, the corrected form is checked, and also the published form where it can be computed.

    The exit status is 1 if a statement or a correction fails. The failure of a published formula with a known error
    does not count.
    """
    from rich.text import Text

    from .._output_files import write
    from ..reporting import report
    from ..reporting.result_table import print_lines
    from ..reporting.verification_page import data_of
    from ..reporting.verification_terminal import detail_lines, statement_lines, verification_summary
    from ..verification.program import statements, verify
    from ..verification.statement import Verification

    console = terminal(json)
    check_files("verify", {"--json": json, "--out": out}, force=force)
    if out is not None:
        check_drawing("verify")
    selected = statements(only)
    if not selected:
        problem = f"--only {only!r} matches no statement"
        raise InputValueError("verify", "--only", problem, "Drop --only to list the keys of all statements.")
    results = []
    with progress(console, "Checking the theory", len(selected)) as update:
        for result in verify(selected):
            results.append(result)
            update(len(results))
    verification = Verification(tuple(results))
    if out is not None:
        write(Path(out), report(verification))
    width = console.width
    print_lines(console, (detail_lines if details else statement_lines)(results, width))
    print_lines(console, [Text(), *verification_summary(results, out, width)])
    write_json(json, dumps(data_of(verification), indent=2, ensure_ascii=False))
    return 0 if verification.holds else 1
