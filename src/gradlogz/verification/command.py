"""gradlogz verify: check every statement, show the table, write it as JSON.

Read next: program.py (what is checked).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ..page import write
from .program import StatementResult, as_json, statements, verify

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 140  # columns from which on a table may have six of them


def verify_command(json: str | None, only: str | None) -> int:
    """The command, with its exit status: 1 if a corrected statement fails, 2 if nothing could be checked."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=json == "-")
    if json not in (None, "-") and not Path(json).parent.is_dir():
        console.print(f"verify: --json must name a file in a folder that exists; got {json}. Make the folder first.")
        return 2
    selected = statements(only)
    if not selected:
        console.print(f"verify: --only must match a statement; got {only!r}. Without it all are checked.")
        return 2
    verdicts = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Checking the theory", total=len(selected))
        for verdict in verify(selected):
            verdicts.append(verdict)
            progress.advance(task)
    console.print(_table(verdicts, console.width))
    failed = [v for v in verdicts if not v.holds]
    for v in failed:
        console.print(
            f"[bold red]fails[/] {v.statement.key}: {v.error or f'residual {v.residual:.1e}'}", highlight=False
        )
    wrong = sum(v.printed is not None and v.printed > v.statement.tolerance for v in verdicts)
    console.print(
        f"{len(verdicts) - len(failed)} of {len(verdicts)} corrected statements hold; "
        f"{wrong} are false as printed, off by the size shown.",
        highlight=False,
    )
    console.print(
        "Keys are those of the paper, of docs/errata.md (E...) and of docs/theory.md; residuals are relative to the "
        "scale of the statement.",
        style="dim",
        highlight=False,
    )
    if json == "-":
        print(as_json(verdicts))
    elif json is not None:
        write(json, f"{as_json(verdicts)}\n")
    return 1 if failed else 0


def _table(verdicts: list[StatementResult], width: int) -> "Table":
    """The verdicts; on a narrow terminal the printed formula goes below the corrected one instead of beside it."""
    from rich.markup import escape
    from rich.table import Table

    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("statement", no_wrap=True)
    if wide:
        table.add_column("as printed", overflow="fold", ratio=2)
        table.add_column("off by", justify="right", no_wrap=True)
    table.add_column("as corrected" if wide else "as corrected (and as printed)", overflow="fold", ratio=3)
    table.add_column("residual", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for v in verdicts:
        printed, corrected = escape(v.statement.printed or ""), escape(v.statement.corrected)
        off = "" if v.printed is None else f"[yellow]{v.printed:.2g}[/]"
        if not wide and off:
            corrected += f"\n[dim]printed: {printed}[/] [yellow]off by {v.printed:.2g}[/]"
        beside = [printed, off] if wide else []
        verdict = "[green]holds[/]" if v.holds else "[bold red]fails[/]"
        table.add_row(escape(v.statement.key), *beside, corrected, f"{v.residual:.0e}", verdict)
    return table
