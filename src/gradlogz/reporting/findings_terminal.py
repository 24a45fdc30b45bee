"""Findings on a terminal: one line for each claim, grouped by kind and verdict, at most as wide as the terminal.

    claim                          value           95 % CI     null  support/refute
    refuted predictions (1)
    ✗ Tied QK and OV matrices     -0.053  -0.061 to -0.044    0.001      0/72 of 72

From 80 columns on all columns are shown; narrower terminals lose the confidence interval, then the null value and the
counts. Long titles are cut. A console that cannot encode the symbols has ASCII in their place.

Read next: findings_wording.py (the sentences of --details), findings_notebook.py (the same table in a notebook).
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._displays import PLAIN_WIDTH
from ..probing.runs.findings import Findings
from ..probing.runs.records import TESTED, Summary
from .findings_wording import Declarations, cautions, graded_groups, profile, sentences_of, title_of
from .formatting import STYLES, SYMBOLS, counts_of, encodable, interval, measured_line, short_decimals

WIDEST = 100  # columns of a sentence on a wide terminal
NO_BREAK = "\N{NO-BREAK SPACE}"
TITLE = 28  # columns of a title with its symbol


class NumberColumn(NamedTuple):
    """A column of numbers: its heading, its width, and the least width of a terminal that shows it."""

    heading: str
    width: int
    terminal: int


COLUMNS = (
    NumberColumn("value", 7, 36),
    NumberColumn("95 % CI", 16, 80),
    NumberColumn("null", 7, 50),
    NumberColumn("support/refute", 14, 60),
)


class StyledLine(NamedTuple):
    """A line of text with a style of rich, which applies to its first `extent` characters, or to all of them."""

    text: str
    style: str = ""
    extent: int | None = None


def table_lines(findings: Findings, width: int, *, details: bool = False) -> Iterator[StyledLine]:
    """The table of claims for each model below a line with its facts; every line at most `width` columns wide."""
    for model, facts in findings.facts.items():
        yield from _wrapped(StyledLine(f"{model}: {measured_line(facts)}".rstrip(": "), "bold"), width)
        yield from claim_lines(findings, model, width, details=details)


def claim_lines(findings: Findings, model: str, width: int, *, details: bool = False) -> Iterator[StyledLine]:
    """The table of claims for one model, without its facts.

    details: add the sentences of each claim and its values by layer below its line.
    """
    claims = [claim for claim in findings.summary() if claim.model == model]
    if not claims:
        return
    columns = [column for column in COLUMNS if column.terminal <= width]
    yield StyledLine(_row("claim", [column.heading for column in columns], columns, width), "dim")
    declarations = findings.declarations
    for heading, verdict, group in graded_groups(declarations, claims):
        noun = " predictions" if verdict in TESTED else ""
        yield StyledLine(f"{heading}{noun} ({len(group)})", f"bold {STYLES[verdict].terminal}".strip())
        for claim in group:
            title = title_of(declarations, claim.prediction)
            row = _row(f"{SYMBOLS[claim.verdict]} {title}", _cells(claim, columns), columns, width)
            yield StyledLine(row, STYLES[claim.verdict].terminal, 1)
            if details or claim.verdict == "failed":
                rows = [row for row in findings.rows if (row.model, row.prediction) == (model, claim.prediction)]
                layers = profile(claim, rows, declarations.get(claim.prediction)) if details else ""
                yield from sentence_lines(claim, declarations, width, further=layers)
    for caution in cautions(findings.facts.get(model, {})):
        yield from _wrapped(StyledLine(caution, "yellow"), width)


def rich_table(findings: Findings, _console: Any, options: Any, *, details: bool = False) -> Iterator[Any]:
    """The table of claims for a console of rich."""
    return rich_lines(table_lines(findings, options.max_width, details=details), options.encoding)


def rich_lines(lines: Iterable[StyledLine], encoding: str) -> Iterator[Any]:
    """Lines as texts of rich that are never wrapped, in ASCII if the encoding has no symbols."""
    from rich.text import Text

    for line in lines:
        text = Text(encodable(line.text, encoding), no_wrap=True, overflow="crop")
        if line.style:
            text.stylize(line.style, 0, line.extent)
        yield text


def plain_lines(findings: Findings) -> str:
    """The table of claims as plain text of 80 columns."""
    return "\n".join(line.text for line in table_lines(findings, PLAIN_WIDTH))


def cut(text: str, width: int) -> str:
    """The text, padded or cut with an ellipsis to exactly `width` columns."""
    return text.ljust(width) if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _row(title: str, cells: Sequence[str], columns: Sequence[NumberColumn], width: int) -> str:
    gap = "  " if width >= PLAIN_WIDTH else " "
    numbers = "".join(gap + cell.rjust(column.width) for cell, column in zip(cells, columns, strict=True))
    return (cut(title, min(max(width - len(numbers), 8), TITLE)) + numbers)[:width].rstrip()


def _cells(claim: Summary, columns: Sequence[NumberColumn]) -> list[str]:
    texts = {
        "value": short_decimals(claim.value),
        "95 % CI": interval(claim.low, claim.high, short_decimals),
        "null": short_decimals(claim.null),
        "support/refute": counts_of(claim),
    }
    return [texts[column.heading] for column in columns]


def sentence_lines(
    claim: Summary, declarations: Declarations, width: int, name: str = "", *, further: str = ""
) -> Iterator[StyledLine]:
    """The sentences of a claim, indented and wrapped, after the name of a run if there is one."""
    text = " ".join(filter(None, (sentences_of(declarations, claim), further))).replace(" %", f"{NO_BREAK}%")
    text = f"{name}: {text}" if name and text else text
    for line in textwrap.wrap(text, max(min(width, WIDEST) - 4, 16), break_on_hyphens=False):
        yield StyledLine(f"    {line.replace(NO_BREAK, ' ')}", "dim")


def _wrapped(line: StyledLine, width: int) -> Iterator[StyledLine]:
    for text in textwrap.wrap(line.text, width):
        yield StyledLine(text, line.style)
