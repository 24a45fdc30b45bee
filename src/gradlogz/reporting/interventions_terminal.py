"""Interventions on a terminal: one line for each comparison with a control, then the largest differences.

Read next: result_table.py (the layout), interventions_page.py (the page).
"""

import textwrap

from rich.text import Text

from ..probing.interventions.records import Interventions
from .formatting import digits
from .interventions_wording import difference_of, headline, layer_labels, place_of, title_of_variant, unit_of
from .result_table import result_table

LARGEST = 8  # effects in the list of the largest


def interventions_table(interventions: Interventions, width: int) -> list[Text]:
    """Medians and counts of each comparison, and the effects that differ most from their controls."""
    comparisons = [
        (
            title_of_variant(c.intervention, c.variant), c.control, digits(c.median("value")),
            digits(c.median("control_value")), f"{c.outcomes('above')}/{c.outcomes('below')} of {len(c.rows)}",
        )
        for c in interventions.comparisons()
    ]  # fmt: skip
    heads = ("intervention", "control", "change", "control's", "above/below")
    lines = [Text(line) for line in textwrap.wrap(headline(interventions), width)]
    lines += result_table(heads, comparisons, None, width)
    labels = layer_labels(interventions.rows)
    largest = sorted((row for row in interventions.rows if row.outcome), key=lambda row: -abs(row.difference))[:LARGEST]
    if largest:
        cells = [
            (
                f"{place_of(row, labels)}, {title_of_variant(row.intervention, row.variant)} / {row.control}",
                digits(row.value), difference_of(row),
            )
            for row in largest
        ]  # fmt: skip
        lines.append(Text(f"Largest differences at FDR 5 % [{unit_of(interventions)}]", "bold"))
        lines += result_table(("layer, intervention / control", "change", "difference (95 % CI)"), cells, None, width)
    return lines
