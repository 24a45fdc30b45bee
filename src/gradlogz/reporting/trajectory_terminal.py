"""A training run on a terminal: one line for each claim, with its first and last value and the verdicts in between.

    claim                           step 0  step 300  verdicts
    Ascent of log normaliser        0.010     0.210  ~~~✓✓✓

Read next: trajectory_page.py (the page), comparison_terminal.py (runs side by side).
"""

import textwrap
from collections.abc import Iterator

from .comparison_page import Runs
from .findings_terminal import TITLE, StyledLine, cut, sentence_lines
from .findings_wording import title_of
from .formatting import SYMBOLS, decimals
from .trajectory_page import duplicate_sentences

NUMBER = 10  # columns of a value


def trajectory_lines(runs: Runs, width: int, *, details: bool = False) -> Iterator[StyledLine]:
    """Table of the claims over checkpoints, then the checkpoints with the same weights.

    Verdicts that do not fit are left out from the beginning; a checkpoint without the claim is a space. details: add
    the sentences of the last checkpoint below each line.
    """
    title = min(TITLE, max(width - 2 * NUMBER - 4, 8))
    room = max(width - title - 2 * NUMBER - 2, 2)
    ends = ("first", "last") if runs.steps is None else (f"step {step:g}" for step in (runs.steps[0], runs.steps[-1]))
    heads = "".join(head.rjust(NUMBER) if len(head) < NUMBER else head[5:].rjust(NUMBER) for head in ends)
    yield StyledLine(f"{cut('claim', title)}{heads}  verdicts"[:width], "dim")
    for prediction in runs.predictions:
        summaries = [claims.get(prediction) for claims in runs.claims]
        tested = [summary for summary in summaries if summary is not None]
        symbols = "".join(" " if summary is None else SYMBOLS[summary.verdict] for summary in summaries)
        symbols = symbols if len(symbols) <= room else f"…{symbols[-room + 1 :]}"
        values = "".join(decimals(summary.value).rjust(NUMBER) for summary in (tested[0], tested[-1]))
        name = cut(title_of(runs.declarations, prediction), title)
        yield StyledLine(f"{name}{values}  {symbols}"[:width].rstrip())
        if details:
            yield from sentence_lines(tested[-1], runs.declarations, width, runs.names[-1])
    for sentence in duplicate_sentences(runs):
        yield from (StyledLine(line, "yellow") for line in textwrap.wrap(sentence, width))
