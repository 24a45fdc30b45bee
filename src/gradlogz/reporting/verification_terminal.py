"""What became of the statements of the theory, for a terminal.

Read next: ../verification/program.py (how they are checked), verification_page.py (the same as a page).
"""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..verification.statement import StatementResult
from .verification_wording import KEYS, failures, headline

WIDE = 140  # columns from which on a table may have six of them


def statement_table(results: Sequence[StatementResult], width: int) -> Table:
    """The verdicts; on a narrow terminal the printed formula goes below the corrected one instead of beside it."""
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("statement", no_wrap=True)
    if wide:
        table.add_column("as printed", overflow="fold", ratio=2)
        table.add_column("off by", justify="right", no_wrap=True)
    table.add_column("as corrected" if wide else "as corrected (and as printed)", overflow="fold", ratio=3)
    table.add_column("residual", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for v in results:
        printed, corrected = escape(v.statement.printed or ""), escape(v.statement.corrected)
        off = "" if v.printed is None else f"[yellow]{v.printed:.2g}[/]"
        if not wide and off:
            corrected += f"\n[dim]printed: {printed}[/] [yellow]off by {v.printed:.2g}[/]"
        beside = [printed, off] if wide else []
        verdict = "[green]holds[/]" if v.holds else "[bold red]fails[/]"
        table.add_row(escape(v.statement.key), *beside, corrected, f"{v.residual:.0e}", verdict)
    return table


def verification_summary(results: Sequence[StatementResult]) -> list[Text]:
    """A line for each corrected statement that fails, how many hold, and where the keys come from."""
    failed = [Text.assemble(("fails", "bold red"), f" {line}") for line in failures(results)]
    return [*failed, Text(headline(results)), Text(KEYS, "dim")]
