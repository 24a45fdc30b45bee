"""The statements of the theory as a page: each as printed and as corrected, its residual and its verdict.

Read next: ../verification/program.py (how they are checked), ../page (how it looks).
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import __version__
from ..page import Cell, Chip, Column, Page, Section, Table, Verdict
from ..verification import program
from .citations import cited
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


def page_of(verdicts: Sequence[program.Verdict]) -> Page:
    """The page of the statements that were checked."""
    failed = failures(verdicts)
    chip = Chip(f"{len(failed)} fail", "departs") if failed else Chip("all hold", "agrees")
    rows = tuple(map(_row, verdicts))
    table = Table("statements", "Statements, as printed and as corrected", COLUMNS, rows, stacked=True)
    return Page(
        name="gradlogz-verification",
        title="The theory, checked",
        subtitle="Every statement of the sources that can be computed, as printed and as corrected.",
        verdict=Verdict(headline(verdicts), (chip,), tuple(f"Fails: {line}" for line in failed)),
        sections=(Section("Statements", (table,)),),
        methods=METHODS,
        reproduce={
            "version": f"gradlogz {__version__}, torch {torch.__version__}",
            "command": "gradlogz verify --out FILE",
        },
        references=cited(METHODS),
        data=data_of(verdicts),
        made_by="gradlogz verify",
    )


def data_of(verdicts: Sequence[program.Verdict]) -> dict[str, Any]:
    """The statements as plain data, as in the JSON of the command."""
    return {"version": __version__, **json.loads(program.as_json(verdicts))}


def _row(v: program.Verdict) -> tuple[Cell, ...]:
    s = v.statement
    residual = v.residual if math.isfinite(v.residual) else None
    chip = Chip("holds", "agrees") if v.holds else Chip("fails", "departs")
    return s.key, s.where, s.printed, v.printed, s.corrected, residual, chip
