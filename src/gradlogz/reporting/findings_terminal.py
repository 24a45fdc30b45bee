"""Findings on a terminal: the summary as a table of rich, or as plain lines.

Read next: findings_notebook.py (the same in a notebook), formatting.py.
"""

from collections.abc import Iterator
from typing import Any

from ..probing.runs.findings import Findings
from .formatting import STYLES, decimals, interval, model_line, support

WIDE = 140  # columns from which on a table has one for what was found
NARROW = 100  # columns below which the null goes below the value, and the support into the words


def rich_table(findings: Findings, _console: Any, options: Any) -> Iterator[Any]:
    """The summary as a table of rich, as wide as the terminal allows."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    wide, narrow = options.max_width >= WIDE, options.max_width < NARROW
    for model, facts in findings.facts.items():
        yield Text.from_markup(f"[bold]{escape(model)}[/]  [dim]{escape(model_line(facts))}[/]")
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("prediction", no_wrap=True)
        table.add_column("claim", overflow="fold", ratio=3)
        table.add_column("value", justify="right", no_wrap=True)
        if not narrow:
            table.add_column("null", justify="right", no_wrap=True)
            table.add_column("support", justify="right", no_wrap=True)
        if wide:
            table.add_column("what was found", overflow="fold", ratio=3)
        table.add_column("verdict", no_wrap=True)
        for s in (s for s in findings.summary() if s.model == model):
            null, count = decimals(s.null), support(s)
            found = " ".join(filter(None, (s.words, s.note or (count and narrow and f"Support: {count}."))))
            claim = escape(s.claim) + ("" if wide or not found else f"\n[dim]{escape(found)}[/]")
            # The interval goes below its value: beside it, it would leave no room for the words.
            lines = (decimals(s.value), interval(s.low, s.high, decimals), null and narrow and f"null {null}")
            verdict = f"[{STYLES[s.verdict].terminal}]{s.verdict}[/]" if s.verdict else ""
            beside = [] if narrow else [null, count, escape(found)] if wide else [null, count]
            table.add_row(escape(s.prediction), claim, "\n".join(filter(None, lines)), *beside, verdict)
        yield table


def plain_lines(findings: Findings) -> str:
    """The summary as plain lines."""
    lines = []
    for model, facts in findings.facts.items():
        lines.append(f"{model}  {model_line(facts)}".rstrip())
        for s in (s for s in findings.summary() if s.model == model):
            numbers = decimals(s.value), interval(s.low, s.high, decimals)
            lines.append("  " + "  ".join(filter(None, (s.prediction, s.verdict, *numbers, s.words, s.note))))
    return "\n".join(lines)
