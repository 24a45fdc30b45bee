"""Several runs on a terminal: one line for each claim, and for each run its verdict as a symbol with the value.

    claim                           minilm   smollm2  change          95 % CI      p
    verdicts differ (1)
      Ascent of log normaliser    ~  0.010  ✓  0.210  +0.200   0.181 to 0.219 <.001*

Two runs have their difference with its 95 % confidence interval and p-value; below 80 columns only the difference. More
runs than fit into the width follow in further tables.

Read next: comparison_page.py (the page), ../probing/runs/differences.py, findings_terminal.py (one run).
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from .._displays import PLAIN_WIDTH
from ..probing.runs.differences import Difference
from ..probing.runs.records import Summary
from .findings_terminal import TITLE, StyledLine, cut, sentence_lines
from .findings_wording import Declarations, by_agreement, title_of
from .formatting import SYMBOLS, decimals, interval, p_value, short_decimals

CELL = 10  # columns of a run
GAP = "  "
DIFFERENCE = {"change": 7, "95 % CI": 16, "p": 6}  # widths of the columns of a difference


def comparison_lines(
    names: Sequence[str],
    claims: Sequence[Mapping[str, Summary]],
    declarations: Declarations,
    width: int,
    *,
    differences: Mapping[str, Difference] | None = None,
    details: bool = False,
) -> Iterator[StyledLine]:
    """Tables of the claims of runs, by their names, each line at most `width` columns wide.

    differences: of two runs, by prediction. details: add the sentences of each run below its line.
    """
    full, names = names, _short_names(names, CELL - 1)
    if names != full:
        yield from (StyledLine(line, "dim") for line in textwrap.wrap(f"runs  {', '.join(full)}", width))
    if len(names) == 2 and differences and width >= PLAIN_WIDTH:
        yield from _of_two(names, claims, declarations, differences, width, details=details)
        return
    title = min(TITLE, max(width - (CELL + len(GAP)), 8))
    fitting = max((width - title) // (CELL + len(GAP)), 1)
    for start in range(0, len(names), fitting):
        part = slice(start, start + fitting)
        changes = len(names) == 2 and fitting >= 3
        headings = [*names[part], *(["change"] if changes else [])]
        yield StyledLine(_line("claim", headings, [CELL] * len(headings), title, GAP), "dim")
        for text, prediction in _headed(claims, declarations):
            if not prediction:
                yield StyledLine(text, "bold")
                continue
            summaries = [each.get(prediction) for each in claims[part]]
            cells = [_cell(summary, CELL) for summary in summaries] + ([_change(summaries)] if changes else [])
            yield StyledLine(_line(text, cells, [CELL] * len(cells), title, GAP))
            yield from _details(prediction, names[part], claims[part], declarations, width, details=details)


def _short_names(names: Sequence[str], width: int) -> Sequence[str]:
    """Names of runs without parts that all begin with, as few as make them fit: step10, step20 of net@step10, ..."""
    common = next((i for i, letters in enumerate(zip(*names, strict=False)) if len({*letters}) > 1), 0)
    for end in [0, *(i + 1 for i, letter in enumerate(names[0][:common]) if letter in "@/-_. ")]:
        short = [name[end:] for name in names]
        if all(short) and max(map(len, short)) <= width:
            return names if end == 0 else short
    return names


def _of_two(
    names: Sequence[str],
    claims: Sequence[Mapping[str, Summary]],
    declarations: Declarations,
    differences: Mapping[str, Difference],
    width: int,
    *,
    details: bool,
) -> Iterator[StyledLine]:
    """The table of two runs with their differences."""
    gap, run = (GAP, CELL) if width >= PLAIN_WIDTH + 8 else (" ", CELL - 1)
    widths = [run, run, *DIFFERENCE.values()]
    yield StyledLine(_line("claim", [*names, *DIFFERENCE], widths, TITLE, gap), "dim")
    for text, prediction in _headed(claims, declarations):
        if not prediction:
            yield StyledLine(text, "bold")
            continue
        cells = [_cell(each.get(prediction), run) for each in claims]
        d = differences.get(prediction)
        if d is not None:
            star = "*" if d.significant else " "
            change, ends = _signed(d.value, short_decimals), interval(d.low, d.high, short_decimals)
            cells += [change, ends, f"{p_value(d.p)}{star}"]
        yield StyledLine(_line(text, cells, widths[: len(cells)], TITLE, gap))
        yield from _details(prediction, names, claims, declarations, width, details=details)
    paired = [d.paired for d in differences.values() if not math.isnan(d.p)]
    if paired:
        yield StyledLine(
            f"Paired over the same documents: {sum(paired)} of {len(paired)}. *: significant at FDR 5 %.", "dim"
        )


def _headed(claims: Sequence[Mapping[str, Summary]], declarations: Declarations) -> Iterator[tuple[str, str]]:
    """Headings, without a prediction, and titles of claims, by the agreement of their verdicts."""
    headings = ("verdicts differ", "same verdict", "descriptions and self-checks", "not tested in every run")
    for heading, predictions in zip(headings, by_agreement(claims), strict=True):
        if predictions:
            yield f"{heading} ({len(predictions)})", ""
        for prediction in predictions:
            yield f"  {title_of(declarations, prediction)}", prediction


def _details(
    prediction: str,
    names: Sequence[str],
    claims: Sequence[Mapping[str, Summary]],
    declarations: Declarations,
    width: int,
    *,
    details: bool,
) -> Iterator[StyledLine]:
    for name, summaries in zip(names, claims, strict=True) if details else ():
        if prediction in summaries:
            yield from sentence_lines(summaries[prediction], declarations, width, name)


def _line(text: str, cells: Sequence[str], widths: Sequence[int], title: int, gap: str) -> str:
    numbers = "".join(gap + cut(cell, n).strip().rjust(n) for cell, n in zip(cells, widths, strict=True))
    return (cut(text, title) + numbers).rstrip()


def _cell(summary: Summary | None, width: int) -> str:
    if summary is None:
        return ""
    number = decimals(summary.value)
    number = number if len(number) <= width - 2 else short_decimals(summary.value)
    return f"{SYMBOLS[summary.verdict]} {number.rjust(width - 2)}"


def _change(summaries: Sequence[Summary | None]) -> str:
    first, last = summaries
    return "" if first is None or last is None else _signed(last.value - first.value)


def _signed(value: float, number: Callable[[float], str] = decimals) -> str:
    text = number(value)
    return f"+{text}" if text and not text.startswith("-") else text
