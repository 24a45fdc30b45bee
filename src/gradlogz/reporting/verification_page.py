"""The statements of the theory as a page: each as printed and as corrected, its residual and its verdict.

Read next: ../verification/program.py (how they are checked), ../page (how it looks).
"""

import math
from typing import Any

import torch

from .. import __version__
from ..page import Cell, Chip, Column, Page, Section, Table, VerdictBanner
from ..verification.statement import StatementResult, Verification
from .citations import cited, keys_in
from .verification_wording import KEYS, failures, headline

COLUMNS = (
    Column("statement"),
    Column("where"),
    Column("as printed"),
    Column("off by", "1"),
    Column("as corrected"),
    Column("residual", "1"),
    Column("verdict"),
)
METHODS = (
    "A statement of the paper [shim22], of its draft notes or of the theory is computed and compared with sums over "
    "points or quadrature nodes that are written out. It holds if the residual is within its tolerance. Where a source "
    "prints another formula than the corrected one, that formula is computed too.",
    KEYS,
)


def page_of(verification: Verification) -> Page:
    """The page of the statements that were checked."""
    results = verification.results
    failed = failures(results)
    chip = Chip(f"{len(failed)} fail", "departs") if failed else Chip("all hold", "agrees")
    rows = tuple(map(_row, results))
    table = Table("statements", "Statements, as printed and as corrected", COLUMNS, rows, stacked=True)
    return Page(
        name="gradlogz-verification",
        title="The theory, checked",
        subtitle="Every statement of the sources that can be computed, as printed and as corrected.",
        verdict=VerdictBanner(headline(results), (chip,), tuple(f"Fails: {line}" for line in failed)),
        sections=(Section("Statements", (table,)),),
        methods=METHODS,
        reproduce={
            "version": f"gradlogz {__version__}, torch {torch.__version__}",
            "command": "gradlogz verify --out FILE",
        },
        references=cited(keys_in(METHODS)),
        data=data_of(verification),
        made_by="gradlogz verify",
    )


def data_of(verification: Verification) -> dict[str, Any]:
    """The statements as plain data; infinities are None."""
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
    return s.key, s.where, s.printed, _finite(r.printed), s.corrected, _finite(r.residual), chip


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
