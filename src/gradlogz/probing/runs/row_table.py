"""Rows of findings as a table with a fixed schema: CSV, parquet and data frames.

One row is one quantity of a head, a layer or the model; docs/probe.md explains every column. Numbers that do not exist
are empty cells: NaN of a finding, the head of a layer's quantity, the step of a model that is no checkpoint. SCHEMA
increases by 1 whenever a column is added, removed, renamed or gets another meaning.

Read next: records.py (Finding), findings.py (Findings.frame).
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..._foreign_text import table_cell
from .records import Declaration, Finding

SCHEMA = 2  # version of the columns; 1 had no unit
METADATA = {"gradlogz_schema": str(SCHEMA)}  # of parquet files

# Name and type of every column, in order: those of a finding, the training step after the model, the unit at the end.
COLUMNS: dict[str, type] = {"model": str, "step": int}
COLUMNS |= {
    name: kind if isinstance(kind, type) else int  # the only union is that of the head, int | None
    for name, kind in Finding.__annotations__.items()
    if name not in COLUMNS
}
COLUMNS |= {"unit": str}

Facts = Mapping[str, Mapping[str, Any]]  # {model: its facts}
Declarations = Mapping[str, Declaration]  # {prediction: its declaration}


def table_rows(facts: Facts, rows: Sequence[Finding], declarations: Declarations) -> list[tuple[Any, ...]]:
    """Return the cells of every row, in the order of COLUMNS; None where there is no value."""
    steps = {model: _step(known.get("step")) for model, known in facts.items()}
    units = {
        (name, quantity): measured.unit
        for name, declared in declarations.items()
        for quantity, measured in declared.quantities.items()
    }
    return [
        tuple(map(_cell, (row.model, steps[row.model], *row[1:], units.get((row.prediction, row.quantity), ""))))
        for row in rows
    ]


def csv_text(facts: Facts, rows: Sequence[Finding], declarations: Declarations) -> str:
    """Return the table as CSV with a line of column names; numbers keep all their digits.

    A name that a spreadsheet would compute, such as =1+1, has an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([table_cell(cell) for cell in row] for row in table_rows(facts, rows, declarations))
    return text.getvalue()


def _cell(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _step(value: Any) -> int | None:
    """Return the training step among the facts of a model; None if it has none."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
