"""Simulations, phase diagrams and presets on a terminal.

Read next: result_table.py (the layout), ../commands/simulate.py (which prints them).
"""

import math
import textwrap
from collections.abc import Iterable

from rich.text import Text

from ..page import Figure
from ..simulation.final_quantities import final_quantities
from ..simulation.presets import Preset
from ..simulation.records import Phases, Simulation
from . import phases_page
from .result_table import result_table
from .simulation_wording import (
    BY_SEEDS,
    BY_VALUE,
    NULL_BAND,
    STATE_NAMES,
    agreement,
    bounds,
    number,
    plateau_sentence,
    prediction_text,
    quantity_cells,
    quantity_name,
    short_name,
    verdict_sentence,
)

HEADS = ("quantity", "value", "95 % CI", "expected")
METHODS = (
    "Values are means over seeds with Student's 95 % confidence interval (CI), or shares of seeds with Wilson's. A "
    f"dash in the last column: not tested, because the theory makes no prediction. {BY_SEEDS} {BY_VALUE}"
)


def preset_lines(presets: Iterable[Preset]) -> list[str]:
    """The presets, one line each whatever the width of the terminal, so that they can be piped into grep."""
    rows = [
        ("preset", "prediction", "source", "description"),
        *((p.name, prediction_text(p) or "none", p.source, p.description) for p in presets),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last])
        for *cells, last in rows
    ]


def simulation_table(simulation: Simulation, width: int) -> list[Text]:
    """One line per quantity: value, 95 % confidence interval, expected value and verdict."""
    rows = final_quantities(simulation)
    verdicts = [row.verdict or ("null band" if row.reference == "null" else "") for row in rows]
    names = [quantity_name(row, short=True) for row in rows]
    tables = [
        result_table(
            HEADS, [(n, *quantity_cells(row, digits)) for n, row in zip(names, rows, strict=True)], verdicts, width
        )
        for digits in (3, 2)  # shorter intervals if the table would be too wide
    ]
    return next((lines for lines in tables if lines[0].plain.startswith(HEADS[0])), tables[0])


def simulation_details(simulation: Simulation, width: int) -> list[Text]:
    """Sentences on final states, prediction and plateaus, the rules of the verdicts, and the evidence of each seed."""
    null_band = NULL_BAND if any(row.reference == "null" for row in final_quantities(simulation)) else ""
    states, prediction = verdict_sentence(simulation), agreement(simulation)[1]
    sentences = [states, prediction, plateau_sentence(simulation), METHODS, null_band]
    folded = [line for text in sentences if text for line in textwrap.wrap(text, width)]
    return [Text(line) for line in folded] + evidence_lines(simulation)


def evidence_lines(simulation: Simulation) -> list[Text]:
    """Final state of each seed with its evidence, one line per number."""
    lines = []
    for i, verdict in enumerate(simulation.verdicts):
        lines.append(Text(f"seed {simulation.settings.seed + i}: {verdict.kind}", "bold"))
        lines += [Text(f"  {short_name(name):<26}{number(value)}") for name, value in verdict.evidence.items()]
    return lines


def phases_table(phases: Phases, width: int) -> list[Text]:
    """One line per final state: number and share of grid points, ranges of cluster count and effective rank."""
    points, rows = phases.points.values(), []
    for kind in phases_page.kinds_of(phases):
        evidence = [p.evidence for p in points if p.kind == kind]
        ranges = []
        for name in ("clusters", "effective_rank"):
            values = [e[name] for e in evidence if math.isfinite(e.get(name, math.nan))]
            clear = name != "clusters" or kind in phases_page.GATHERED
            ranges.append(bounds(min(values), max(values)) if values and clear else "")
        rows.append(
            (STATE_NAMES.get(kind, kind), str(len(evidence)), f"{100 * len(evidence) / len(points):.0f} %", *ranges)
        )
    return result_table(("final state", "points", "share", "cluster count", "effective rank"), rows, None, width)


def phases_details(phases: Phases, width: int) -> list[Text]:
    """Sentences on the final states and the phase boundaries of the theory."""
    page = phases_page.page_of(phases)
    figure = next(part for part in page.sections[0].parts if isinstance(part, Figure))
    sentences = [page.verdict.sentence, figure.caption.removesuffix(phases_page.HOVER), *page.methods]
    return [Text(line) for text in sentences for line in textwrap.wrap(text, width)]
