"""Results of `verify` on a terminal: one line per statement, grouped by source document, then three closing lines.

    statement  source  formula                      printed  corrected
    Paper [shim22]
    Eq. 2, E2  3.1     Z(η) = L{h}(-η)               ✗ 0.73    ✓ 2e-16

Columns that do not fit a narrow terminal are left out, first the formula, then the source.

Read next: ../verification/program.py (the checks), verification_page.py (the page), result_table.py (symbols).
"""

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ..verification.statement import StatementResult
from .result_table import GAP, NO_VALUE, SYMBOLS, closing_lines
from .verification_wording import by_document, failures, false_as_printed, headline, residual, source_of

HEADS = ("statement", "source", "formula", "printed", "corrected")
LEGEND = f"Relative residuals: ✓ holds, ✗ false, {NO_VALUE} not computed. Full formulas: --details."
LEAST_FORMULA = 16  # columns below which a formula is not worth its place


def statement_lines(results: Sequence[StatementResult], width: int) -> list[Text]:
    """The table, one line of at most `width` columns for each statement."""
    rows = {title: list(map(_cells, group)) for title, group in by_document(results).items()}
    columns = list(zip(HEADS, *((cell.plain for cell in row) for group in rows.values() for row in group), strict=True))
    widths = dict(zip(HEADS, (max(map(cell_len, column)) for column in columns), strict=True))
    shown = _shown(widths, width)
    lines = [_line([Text(head) for head in HEADS], widths, shown, "bold")]
    for title, group in rows.items():
        lines += [Text(title, "bold cyan"), *(_line(row, widths, shown) for row in group)]
    return [*lines, *(Text(line, "dim") for line in textwrap.wrap(LEGEND, width))]


def _cells(result: StatementResult) -> list[Text]:
    s = result.statement
    printed = Text(NO_VALUE, "bright_black")
    if result.printed is not None:
        wrong = false_as_printed(result)
        printed = Text(f"{'✗' if wrong else '✓'} {residual(result.printed)}", "yellow" if wrong else "green")
    symbol, colour = SYMBOLS["holds" if result.holds else "fails"]
    corrected = Text(f"{symbol} {residual(result.residual)}", colour)
    return [Text(s.key), Text(source_of(s)[1].split(",")[0], "bright_black"), Text(s.corrected), printed, corrected]


def _shown(widths: dict[str, int], width: int) -> list[str]:
    """The columns that fit; sets the width of the formula to the room that is left."""
    room = width - sum(widths[head] + len(GAP) for head in HEADS if head != "formula")
    if room >= LEAST_FORMULA:
        widths["formula"] = min(widths["formula"], room)
        return list(HEADS)
    without_formula = [head for head in HEADS if head != "formula"]
    fits = sum(widths[head] for head in without_formula) + len(GAP) * (len(without_formula) - 1) <= width
    return without_formula if fits else [head for head in without_formula if head != "source"]


def _line(cells: Sequence[Text], widths: dict[str, int], shown: Sequence[str], style: str = "") -> Text:
    line = Text(style=style)
    for i, (head, cell) in enumerate((h, c) for h, c in zip(HEADS, cells, strict=True) if h in shown):
        line.append(GAP if i else "")
        space = " " * (widths[head] - cell_len(cell.plain))
        if head in ("printed", "corrected"):
            line.append(space).append_text(cell)
        elif space or cell_len(cell.plain) == widths[head]:
            line.append_text(cell).append(space)
        else:
            line.append(set_cell_size(cell.plain, widths[head] - 1) + "…")
    line.rstrip()
    return line


def detail_lines(results: Sequence[StatementResult], width: int) -> list[Text]:
    """Every statement in full: the formula as corrected and as printed, with residuals and the tolerance."""
    lines = []
    for title, group in by_document(results).items():
        lines.append(Text(title, "bold cyan"))
        for r in group:
            s = r.statement
            symbol, colour = SYMBOLS["holds" if r.holds else "fails"]
            lines.append(Text.assemble((symbol, colour), f" {s.key} ({s.where})"))
            label = "statement" if s.printed is None else "corrected"
            lines += _folded(label, s.corrected, f"residual {residual(r.residual)}, tolerance {s.tolerance:.0e}", width)
            if s.printed is not None:
                note = "not computed" if r.printed is None else f"residual {residual(r.printed)}"
                lines += _folded("printed", s.printed, note, width)
    return lines


def _folded(label: str, formula: str, note: str, width: int) -> list[Text]:
    indent = " " * 15
    text = textwrap.fill(
        f"{formula}  [{note}]", max(width, 40), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return [Text(f"    {label:<9}  {text.strip()}", "" if label != "printed" else "dim")]


def verification_summary(results: Sequence[StatementResult], page: str | None, width: int) -> list[Text]:
    """One line for each statement that fails, then three: what was checked, how many hold, where the page is."""
    failed = [Text(f"✗ {line}", "bold red") for line in failures(results)]
    run = f"{len(results)} statement{'' if len(results) == 1 else 's'} compared with explicit sums or quadrature"
    return [*failed, *closing_lines(run, headline(results), page or "none; --out FILE writes one", width)]
