"""Tracks on a terminal: one line per quantity, with the verdict on consistency.

Read next: result_table.py (the layout), ../commands/track.py (which prints them).
"""

import textwrap

from rich.text import Text

from ..tracking.records import Tracks
from ..tracking.track_quantities import track_quantities
from .result_table import result_table
from .tracks_wording import headline, quantity_cells, quantity_name, remarks, rule, truth_errors

HEADS = ("quantity", "value", "95 % CI", "expected")
METHODS = f"95 % CI: Wilson's interval of a share, assuming independent innovations. {rule()} –: not available."


def tracks_table(tracks: Tracks, width: int) -> list[Text]:
    """One line per quantity: value, 95 % confidence interval, expected value and verdict; then remarks on the rows."""
    rows = track_quantities(tracks)
    cells = [(quantity_name(row), *quantity_cells(row, tracks)) for row in rows]
    table = result_table(HEADS, cells, [row.verdict for row in rows], width)
    lines = [line for sentence in remarks(tracks) for line in textwrap.wrap(sentence, width)]
    return [*table, *(Text(line, "yellow") for line in lines)]


def tracks_details(tracks: Tracks, width: int) -> list[Text]:
    """Sentences on consistency and errors, and the rule for the verdicts."""
    sentences = (headline(tracks), truth_errors(tracks), METHODS)
    return [Text(line) for text in sentences for line in textwrap.wrap(text, width)]
