"""Rows of findings as a table with a fixed schema: CSV, parquet and data frames.

One row is one quantity of a head, a layer or the model; docs/probe.md explains every column. Numbers that do not exist
are empty cells: NaN of a finding, the head of a layer's quantity, the step of a model that is no checkpoint.

Read next: records.py (Finding), findings.py (Findings.frame).
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..._foreign_text import table_cell
from .records import Finding

# Name and type of every column, in order: those of a finding, and the training step after the model.
COLUMNS: dict[str, type] = {"model": str, "step": int}
COLUMNS |= {
    name: kind if isinstance(kind, type) else int  # the only union is that of the head, int | None
    for name, kind in Finding.__annotations__.items()
    if name not in COLUMNS
}


def table_rows(facts: Mapping[str, Mapping[str, Any]], rows: Sequence[Finding]) -> list[tuple[Any, ...]]:
    """Return the cells of every row, in the order of COLUMNS; None where there is no value."""
    steps = {model: _step(known.get("step")) for model, known in facts.items()}
    return [
        tuple(_cell(steps[row.model] if name == "step" else getattr(row, name)) for name in COLUMNS) for row in rows
    ]


def csv_text(facts: Mapping[str, Mapping[str, Any]], rows: Sequence[Finding]) -> str:
    """Return the table as CSV with a line of column names; numbers keep all their digits.

    A name that a spreadsheet would compute, such as =1+1, has an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([table_cell(cell) for cell in row] for row in table_rows(facts, rows))
    return text.getvalue()


def _cell(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _step(value: Any) -> int | None:
    """Return the training step among the facts of a model; None if it has none."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
