"""The paper as a program: every numbered statement that can be computed, run and judged.

A chapter that brings statements of its own adds its module to the imports below.

Read next: statement.py (what a statement is), ../cli.py (the table).
"""

import json
import math
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import attention_statements, draft_notes, measure_families, measure_operations, paper, paper_section_3_3
from .statement import STATEMENTS, Statement

MODULES = (paper, paper_section_3_3, draft_notes, measure_families, measure_operations, attention_statements)


class StatementResult(NamedTuple):
    """The residuals of a statement, and whether it holds as corrected."""

    statement: Statement
    residual: float
    printed: float | None
    holds: bool
    error: str | None
    seconds: float


def statements(only: str | None = None) -> list[Statement]:
    """All registered statements, the one with this key, or those whose key or formula contains this text."""
    order = [module.__name__ for module in MODULES]
    ordered = sorted(STATEMENTS, key=lambda s: order.index(s.check.__module__))
    named = [s for s in ordered if only is not None and s.key.lower() == only.lower()]
    return named or [s for s in ordered if only is None or only.lower() in f"{s.key} {s.where} {s.corrected}".lower()]


def verify(selected: Iterable[Statement] | None = None) -> Iterator[StatementResult]:
    """Check statements one by one. A check that raises has failed, and its error is part of the verdict."""
    for one in statements() if selected is None else selected:
        start = time.perf_counter()
        try:
            outcome, error = one.check(), None
        except Exception as problem:  # any failure of a check is a verdict on its statement
            outcome, error = None, f"{type(problem).__name__}: {problem}"
        residual = math.inf if outcome is None else outcome.corrected
        printed = None if outcome is None else outcome.printed
        yield StatementResult(one, residual, printed, residual <= one.tolerance, error, time.perf_counter() - start)


def as_json(verdicts: Iterable[StatementResult]) -> str:
    """The table as JSON: an object with one row per statement, infinities as null."""
    rows = [
        {
            "statement": v.statement.key,
            "where": v.statement.where,
            "printed": v.statement.printed,
            "printed_residual": _finite(v.printed),
            "corrected": v.statement.corrected,
            "residual": _finite(v.residual),
            "tolerance": v.statement.tolerance,
            "holds": v.holds,
            "error": v.error,
            "seconds": round(v.seconds, 4),
        }
        for v in verdicts
    ]
    return json.dumps({"statements": rows, "hold": all(row["holds"] for row in rows)}, indent=2, ensure_ascii=False)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
