"""Simulations, phase diagrams and presets, for a terminal.

Read next: ../simulation/run_simulation.py (how they are made), ../commands/simulate.py (where they are printed).
"""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from ..simulation.presets import Preset
from ..simulation.records import Phases, Simulation
from . import phases_page
from .simulation_wording import agreement, verdict_sentence

COLOURS = {"agrees": "green", "departs": "red", "undecided": "yellow"}


def preset_lines(presets: Iterable[Preset]) -> list[str]:
    """The presets, one line each: a table of rich would fold them, and piped into grep half of a line is lost."""
    rows = [
        ("preset", "theory expects", "where", "what"),
        *((p.name, p.expects or "nothing", p.source, p.says) for p in presets),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last])
        for *cells, last in rows
    ]


def simulation_summary(simulation: Simulation) -> list[Text]:
    """What has become of the clouds, and whether theory expected it."""
    status, words = agreement(simulation)
    return [
        Text(verdict_sentence(simulation), "bold"),
        Text(f"{words[0].upper()}{words[1:]}.", COLOURS.get(status, "dim")),
    ]


def phases_summary(phases: Phases) -> Text:
    """How many places of the grid ended in which way."""
    return Text(phases_page.page_of(phases).verdict.sentence, "bold")


def evidence_table(simulation: Simulation, width: int) -> Table:
    """Verdicts and their numbers, a row for each seed; where so many columns have no room, a column for each."""
    verdicts = simulation.verdicts
    names = list(dict.fromkeys(name for v in verdicts for name in v.evidence))
    columns = [["seed", *(str(simulation.settings.seed + i) for i in range(len(verdicts)))]]
    columns.append(["verdict", *(v.kind for v in verdicts)])
    for name in names:
        numbers = [f"{v.evidence[name]:.3g}" if name in v.evidence else "" for v in verdicts]
        columns.append([name.replace("_", " "), *numbers])
    rows = list(zip(*columns, strict=True))
    if sum(max(map(len, column)) + 2 for column in columns) > width:
        rows = [tuple(column) for column in columns]
    table = Table(box=None, pad_edge=False, header_style="bold")
    words = "verdict" if rows[0][1] == "verdict" else "seed"  # the head of the column that holds no numbers
    for head in rows[0]:
        table.add_column(head, justify="left" if head == words else "right")
    for row in rows[1:]:
        table.add_row(*row)
    return table
