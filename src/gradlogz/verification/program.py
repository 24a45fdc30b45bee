"""Run the checks of all statements.

A new module of statements is added to the imports below and to MODULES.

Read next: statement.py (what a statement is), ../reporting/verification_terminal.py (the table).
"""

import math
import time
from collections.abc import Iterable, Iterator

from . import (
    attention_filter_statements,
    attention_statements,
    cloud_statements,
    conjugate_statements,
    contrastive_statements,
    draft_note_1,
    dynamics_statements,
    energy_statements,
    filter_statements,
    hopfield_statements,
    layer_statements,
    link_statements,
    measure_families,
    measure_operations,
    paper,
    paper_section_3_3,
    sampling_statements,
)
from .statement import STATEMENTS, Statement, StatementResult

MODULES = (  # in the order of the table
    paper,
    paper_section_3_3,
    draft_note_1,
    contrastive_statements,
    measure_families,
    measure_operations,
    attention_statements,
    layer_statements,
    cloud_statements,
    dynamics_statements,
    hopfield_statements,
    energy_statements,
    filter_statements,
    conjugate_statements,
    attention_filter_statements,
    link_statements,
    sampling_statements,
)


def statements(only: str | None = None) -> list[Statement]:
    """All statements; or the one whose key is `only`; or those whose key, source or formula contains it."""
    order = [module.__name__ for module in MODULES]
    ordered = sorted(STATEMENTS, key=lambda s: order.index(s.check.__module__))
    named = [s for s in ordered if only is not None and s.key.lower() == only.lower()]
    return named or [s for s in ordered if only is None or only.lower() in f"{s.key} {s.where} {s.corrected}".lower()]


def verify(selected: Iterable[Statement] | None = None) -> Iterator[StatementResult]:
    """Check the statements in turn; a check that raises counts as a failure, with its error in the result."""
    for one in statements() if selected is None else selected:
        start = time.perf_counter()
        try:
            outcome, error = one.check(), None
        except Exception as problem:  # any exception is a failure of the statement
            outcome, error = None, f"{type(problem).__name__}: {problem}"
        residual = math.inf if outcome is None else outcome.corrected
        printed = None if outcome is None else outcome.printed
        yield StatementResult(one, residual, printed, residual <= one.tolerance, error, time.perf_counter() - start)
