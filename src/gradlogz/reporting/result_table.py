"""Result tables on a terminal, the same for every command: one line per quantity, then three closing lines.

    quantity       value    95 % CI  expected  verdict
    cluster count   4.25  3.45–5.05       4–5  ✓ supported

    run      ...     what was computed
    results  ...     where the result files are
    page     ...     where the page is

A table that is wider than the terminal becomes a list, two or more lines per quantity; no cell is ever cut.

Read next: simulation_terminal.py, tracks_terminal.py and verification_terminal.py (the rows).
"""

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from .formatting import STYLES, encodable
from .formatting import SYMBOLS as VERDICT_SYMBOLS

GAP = "  "
NO_VALUE = "–"
LOOKS = {  # verdict of a command: verdict with the same symbol and colour
    **dict.fromkeys(("supported", "consistent", "holds"), "supported"),
    **dict.fromkeys(("refuted", "inconsistent", "fails"), "refuted"),
    "inconclusive": "inconclusive",
}
SYMBOLS = {verdict: (VERDICT_SYMBOLS[look], STYLES[look].terminal) for verdict, look in LOOKS.items()}
Row = Sequence[str]


def marked(verdict: str) -> Text:
    """The verdict with its symbol and colour; a dash, and the reason if any, for a quantity that is not judged."""
    if verdict not in SYMBOLS:
        return Text(f"{NO_VALUE} {verdict}".strip(), "bright_black")
    symbol, colour = SYMBOLS[verdict]
    return Text(f"{symbol} {verdict}", colour)


def result_table(heads: Row, rows: Sequence[Row], verdicts: Sequence[str] | None, width: int) -> list[Text]:
    """Lines of a table of `width` columns at most: the cells of each row, then its verdict, if there are verdicts.

    The first cell names the quantity; empty cells are shown as a dash.
    """
    cells = [[cell or NO_VALUE for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    marks = [Text() for _ in rows] if verdicts is None else [marked(verdict) for verdict in verdicts]
    head = "" if verdicts is None else "verdict"
    last = max(len(mark) for mark in [Text(head), *marks])
    if sum(widths) + len(GAP) * len(widths) + last > width:
        return [line for row, mark in zip(cells, marks, strict=True) for line in _listed(heads, row, mark, width)]
    lines = [Text(_aligned([*heads], widths) + head, "bold")]
    lines = lines + [Text(_aligned(row, widths)).append_text(mark) for row, mark in zip(cells, marks, strict=True)]
    for line in lines:
        line.rstrip()
    return lines


def _aligned(row: Row, widths: Sequence[int]) -> str:
    """Cells side by side, each with the gap after it; the name to the left, numbers to the right."""
    first, *others = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return GAP.join([first, *others]) + GAP


def _listed(heads: Row, row: Row, mark: Text, width: int) -> list[Text]:
    """One quantity as a few lines: its name and verdict, then its other cells, each after its head."""
    name, *others = row
    pairs = [f"{head} {cell}".replace(" ", "\0") for head, cell in zip(heads[1:], others, strict=True) if cell != "–"]
    # Lines break between pairs only.
    body = textwrap.wrap(", ".join(pairs), width - len(GAP), break_on_hyphens=False) if pairs else []
    if mark.plain in ("", NO_VALUE):
        first = [Text(name, "bold")]
    elif len(name) + len(GAP) + len(mark) <= width:
        first = [Text(name, "bold").append(GAP).append_text(mark)]
    else:
        first = [Text(name, "bold"), Text(GAP).append_text(mark)]
    return [*first, *(Text(GAP + line.replace("\0", " ")) for line in body)]


def closing_lines(run: str, results: str, page: str, width: int) -> list[Text]:
    """Three lines after a table: what was run, folded to `width`; the result files; the page."""
    indent = " " * 9
    folded = textwrap.fill(run, max(width, 40), initial_indent=indent, subsequent_indent=indent).strip()
    parts = (("run", folded), ("results", results), ("page", page))
    return [Text.assemble((f"{name:<9}", "bold"), value) for name, value in parts]


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    """Print lines without cutting them, in ASCII if the console has no other characters."""
    for line in lines:
        line.plain = encodable(line.plain, console.encoding)
        console.print(line, soft_wrap=True, highlight=False)
