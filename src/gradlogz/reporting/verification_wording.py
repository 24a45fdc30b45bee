"""What became of the statements of the theory, in sentences.

Read next: verification_terminal.py and verification_page.py (where they stand).
"""

from collections.abc import Sequence

from ..verification.statement import StatementResult

KEYS = (
    "Keys are those of the paper, of docs/errata.md (E...) and of docs/theory.md; residuals are relative to the "
    "scale of the statement."
)


def headline(results: Sequence[StatementResult]) -> str:
    """How many corrected statements hold, and how many are false as printed."""
    hold = sum(v.holds for v in results)
    wrong = sum(v.printed is not None and v.printed > v.statement.tolerance for v in results)
    return f"{hold} of {len(results)} corrected statements hold; {wrong} are false as printed, off by the size shown."


def failures(results: Sequence[StatementResult]) -> list[str]:
    """The key of each corrected statement that fails, with its error or its residual."""
    return [f"{v.statement.key}: {v.error or f'residual {v.residual:.1e}'}" for v in results if not v.holds]
