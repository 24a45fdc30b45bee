"""Propagation through layers, and a repeated layer, on a terminal.

Read next: result_table.py (the layout), ../commands/simulate_model.py (which prints them).
"""

import textwrap
from collections.abc import Mapping, Sequence

from rich.text import Text

from ..probing.propagation.records import LayerIteration, Propagation, SeedMean
from .propagation_wording import headline, interval_text, iteration_headline, observable_name, series_name
from .result_table import result_table
from .simulation_wording import number

# Rows of the table, and depths counted from the end at which the observables of attention exist.
SHOWN = ("sliced_wasserstein", "effective_rank", "mean_fraction", "radius", "expansion", "contraction", "entropy",
         "self_weight", "clusters")  # fmt: skip
ITERATED = ("mean_fraction", "effective_rank", "radius", "displacement", "log_pair_energy", "entropy", "clusters",
            "within")  # fmt: skip
LAST_ATTENTION = ("entropy", "self_weight")  # of the last layer: after it there is no attention
METHODS = (
    "Values after the last layer (attention entropy and self-weight: in the last layer), mean over seeds ± half of "
    "Student's 95 % confidence interval. Untrained: random weights as before training. Redrawn: random weights with "
    "the spectra of the trained matrices. Both read the same sampled tokens."
)


def propagation_table(result: Propagation, width: int) -> list[Text]:
    """One line per observable: its value after the last layer in each series."""
    heads = ("after the last layer", *(series_name(s, result.settings.start, short=True) for s in result.observed))
    places = {name: -2 if name in LAST_ATTENTION else -1 for name in SHOWN}
    values = {name: [result.estimate(s, name, place) for s in result.observed] for name, place in places.items()}
    return _fitting(heads, values, width)


def iteration_table(result: LayerIteration, width: int) -> list[Text]:
    """One line per observable: its value at the start and after the last repetition, of each series."""
    names = {s: series_name(s, result.settings.start, short=True) for s in result.observed}
    heads = ("quantity", *(f"{names[s]}, {at}" for s in result.observed for at in ("start", "end")))
    values = {}
    for name in ITERATED:
        times = (1 if name == "displacement" else 0, -1)  # a displacement needs a step
        values[name] = [result.estimate(s, name, t) for s in result.observed for t in times]
    return _fitting(heads, values, width)


def propagation_details(result: Propagation, width: int) -> list[Text]:
    """The headline, the methods, and a table of means by depth for each of the main observables."""
    lines = [Text(line) for text in (headline(result), METHODS) for line in textwrap.wrap(text, width)]
    for name in ("sliced_wasserstein", "effective_rank", "mean_fraction", "expansion", "contraction"):
        heads = ("depth", *(series_name(s, result.settings.start, short=True) for s in result.observed))
        rows = [
            (str(depth), *(number(result.estimate(s, name, depth).value) for s in result.observed))
            for depth in range(result.depths)
        ]
        lines += [Text(observable_name(name), "bold"), *result_table(heads, rows, None, width)]
    return lines


def iteration_details(result: LayerIteration, width: int) -> list[Text]:
    """The headline in words."""
    return [Text(line) for line in textwrap.wrap(iteration_headline(result), width)]


def _fitting(heads: Sequence[str], values: Mapping[str, Sequence[SeedMean]], width: int) -> list[Text]:
    """The table of these values, with fewer decimals if it would be too wide; a list if it still is."""
    tables = []
    for decimals in (4, 3, 2):
        rows = [
            (observable_name(name, short=True), *(interval_text(value, decimals) for value in row))
            for name, row in values.items()
        ]
        tables.append(result_table(heads, rows, None, width))
    return next((lines for lines in tables if lines[0].plain.startswith(heads[0])), tables[0])
