"""Several runs on a terminal: one line for each claim, and for each run its verdict as a symbol with the value.

    claim                         minilm   smollm2    change
    verdicts differ (1)
      Ascent of log normaliser  ~  0.010  ✓  0.210    +0.200

Runs that do not fit into the width follow in further tables. The change is shown for two runs.

Read next: comparison_page.py (the page), findings_terminal.py (one run).
"""

from collections.abc import Iterator, Mapping, Sequence

from ..probing.runs.records import Summary
from .findings_terminal import TITLE, StyledLine, cut, sentence_lines
from .findings_wording import Declarations, by_agreement, title_of
from .formatting import SYMBOLS, decimals

CELL = 10  # columns of a run
GAP = "  "


def comparison_lines(
    names: Sequence[str],
    claims: Sequence[Mapping[str, Summary]],
    declarations: Declarations,
    width: int,
    *,
    details: bool = False,
) -> Iterator[StyledLine]:
    """Tables of the claims of runs, by their names, each line at most `width` columns wide.

    details: add the sentences of each run below its line.
    """
    title = min(TITLE, max(width - (CELL + len(GAP)), 8))
    fitting = max((width - title) // (CELL + len(GAP)), 1)
    for start in range(0, len(names), fitting):
        part = slice(start, start + fitting)
        changes = len(names) == 2 and fitting >= 3
        table = _table(names[part], claims[part], _groups(claims), declarations, title, changes=changes)
        for line, prediction in table:
            yield line
            for name, summaries in zip(names[part], claims[part], strict=True) if details else ():
                if prediction in summaries:
                    yield from sentence_lines(summaries[prediction], declarations, width, name)


def _groups(claims: Sequence[Mapping[str, Summary]]) -> dict[str, list[str]]:
    """Predictions whose verdicts differ between runs, whose verdicts agree, and those that are not tested in all."""
    headings = ("verdicts differ", "same verdict", "not tested in every run")
    return {heading: names for heading, names in zip(headings, by_agreement(claims), strict=True) if names}


def _table(
    names: Sequence[str],
    claims: Sequence[Mapping[str, Summary]],
    groups: Mapping[str, Sequence[str]],
    declarations: Declarations,
    title: int,
    *,
    changes: bool,
) -> Iterator[tuple[StyledLine, str]]:
    """Lines of one table, each with its prediction, which is empty for headings."""
    headings = [*names, *(["change"] if changes else [])]
    heading_cells = "".join(GAP + cut(name, CELL).strip().rjust(CELL) for name in headings)
    yield StyledLine(cut("claim", title) + heading_cells, "dim"), ""
    for heading, predictions in groups.items():
        yield StyledLine(f"{heading} ({len(predictions)})", "bold"), ""
        for prediction in predictions:
            summaries = [each.get(prediction) for each in claims]
            cells = [_cell(summary) for summary in summaries]
            if changes:
                cells.append(_change(summaries))
            text = cut(f"  {title_of(declarations, prediction)}", title)
            yield StyledLine((text + "".join(GAP + cell.rjust(CELL) for cell in cells)).rstrip()), prediction


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return ""
    return f"{SYMBOLS[summary.verdict]} {decimals(summary.value).rjust(CELL - 2)}"


def _change(summaries: Sequence[Summary | None]) -> str:
    first, last = summaries
    text = "" if first is None or last is None else decimals(last.value - first.value)
    return f"+{text}" if text and not text.startswith("-") else text
