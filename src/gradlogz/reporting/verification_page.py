"""Page of `verify`: every statement as printed and as corrected, with residuals and verdicts, by source document.

Read next: ../verification/program.py (the checks), ../page (the layout).
"""

import math
from typing import Any

import torch

from .. import __version__
from ..page import Cell, Chip, Column, Page, Section, Table, Text, VerdictBanner
from ..verification.statement import StatementResult, Verification
from .citations import cited, keys_in
from .verification_wording import by_document, failures, false_as_printed, headline, source_of

COLUMNS = (
    Column("statement"),
    Column("section"),
    Column("as printed"),
    Column("printed residual", "1"),
    Column("as corrected"),
    Column("corrected residual", "1"),
    Column("tolerance", "1"),
    Column("verdict"),
)
READING = (
    "Each row is one statement. Its key is an equation, proposition or theorem of the source, an erratum (E1, E2, ...; "
    "docs/errata.md), or a section of docs/theory.md.",
    "A statement without a printed formula is correct in its source. Otherwise the row shows the formula of the source "
    "and its correction.",
    "A residual is the largest absolute error relative to the scale of the statement: about 1e-16 if the formula is "
    "true, of order 1 if it is false. It is missing where the printed formula cannot be evaluated.",
    "The verdict is on the corrected formula, which holds if its residual is at most the tolerance.",
)
METHODS = (
    "Each statement of the paper [shim22], its appendix, its two draft notes or docs/theory.md is evaluated in float64 "
    "at random points. The library is compared with sums over points, modes, states or quadrature nodes, with "
    "derivatives of such sums, and with iterations of a written map. None of these uses the library.",
)


def page_of(verification: Verification) -> Page:
    """The page of a verification."""
    results = verification.results
    failed = failures(results)
    chip = Chip(f"{len(failed)} fail", "departs") if failed else Chip("all hold", "agrees")
    return Page(
        name="gradlogz-verification",
        title="Verification of the theory",
        subtitle="Statements of the sources, as printed and as corrected, compared with sums and quadrature.",
        verdict=VerdictBanner(headline(results), (chip,), tuple(failed)),
        sections=(Section("How to read this page", (Text(READING),)), *map(_section, by_document(results).values())),
        methods=METHODS,
        reproduce={
            "version": f"gradlogz {__version__}, torch {torch.__version__}",
            "command": "gradlogz verify --out FILE",
        },
        references=cited(keys_in(METHODS)),
        data=data_of(verification),
        made_by="gradlogz verify",
    )


def _section(results: list[StatementResult]) -> Section:
    """The statements of one source document as a table, without the columns that are empty in all of them."""
    title, _ = source_of(results[0].statement)
    rows = list(map(_row, results))
    filled = [i for i in range(len(COLUMNS)) if any(row[i] is not None for row in rows)]
    wrong = sum(map(false_as_printed, results))
    caption = f"{len(results)} statements" + (f", {wrong} of them false as printed." if wrong else ".")
    name = "statements-" + "".join(c for c in title.lower() if c.isalnum())
    columns = tuple(COLUMNS[i] for i in filled)
    table = Table(
        name, "Statements", columns, tuple(tuple(row[i] for i in filled) for row in rows), caption, stacked=True
    )
    return Section(title, (table,))


def data_of(verification: Verification) -> dict[str, Any]:
    """The results as plain data; infinite residuals are None."""
    rows = [
        {
            "statement": r.statement.key,
            "where": r.statement.where,
            "printed": r.statement.printed,
            "printed_residual": _finite(r.printed),
            "corrected": r.statement.corrected,
            "residual": _finite(r.residual),
            "tolerance": r.statement.tolerance,
            "holds": r.holds,
            "error": r.error,
            "seconds": round(r.seconds, 4),
        }
        for r in verification.results
    ]
    return {"statements": rows, "hold": verification.holds}


def _row(r: StatementResult) -> tuple[Cell, ...]:
    s = r.statement
    chip = Chip("holds", "agrees") if r.holds else Chip("fails", "departs")
    residuals = _finite(r.printed), _finite(r.residual)
    return s.key, source_of(s)[1] or None, s.printed, residuals[0], s.corrected, residuals[1], s.tolerance, chip


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
