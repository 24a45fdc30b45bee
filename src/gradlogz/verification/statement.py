"""A statement of the theory, as printed and as corrected, with the computation that checks it.

    @statement("E8", "paper 3.2", printed="...", corrected="...")
    def kl_is_bregman() -> Outcome: ...

A check returns residuals relative to the scale of its statement, which are zero up to rounding if the statement is
true. The corrected formula must hold. The residual of the printed formula shows the size of the misprint.

Read next: program.py (runs the checks), paper.py (the first statements).
"""

from collections.abc import Callable
from typing import NamedTuple

from .._displays import shown
from .._typing import Tensor


class Outcome(NamedTuple):
    """Residuals of a statement: as corrected and, where the source differs, as printed."""

    corrected: float
    printed: float | None = None


class Statement(NamedTuple):
    """One numbered statement of a source, with its check."""

    key: str
    where: str
    printed: str | None
    corrected: str
    tolerance: float
    check: Callable[[], Outcome]


class StatementResult(NamedTuple):
    """The residuals of a statement, and whether it holds as corrected."""

    statement: Statement
    residual: float
    printed: float | None
    holds: bool
    error: str | None
    seconds: float


class Verification(NamedTuple):
    """The statements that were checked, each with its result."""

    results: tuple[StatementResult, ...]

    @property
    def holds(self) -> bool:
        """True if every corrected statement holds."""
        return all(result.holds for result in self.results)

    def _repr_html_(self) -> str:
        """The page, for a notebook."""
        return str(shown(self, "html"))


STATEMENTS: list[Statement] = []


def statement(
    key: str, where: str, *, corrected: str, printed: str | None = None, tolerance: float = 1e-12
) -> Callable[[Callable[[], Outcome]], Callable[[], Outcome]]:
    """Register a check under the key of its statement.

    Args:
        where: source document and section: "paper 3.1" (shim22), "note 1" (exponential families), "note 2" (filters),
            "appendix" (of the paper, on Hopfield networks), or "theory" (docs/theory.md) if there is no other source.
        corrected: the formula that must hold.
        printed: the formula of the source, if it differs.
    """

    def register(check: Callable[[], Outcome]) -> Callable[[], Outcome]:
        STATEMENTS.append(Statement(key, where, printed, corrected, tolerance, check))
        return check

    return register


def gap(actual: Tensor, expected: Tensor, scale: float = 1.0) -> float:
    """max|actual - expected| / scale; infinite if a number is NaN or the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    worst = float((actual - expected).detach().abs().nan_to_num(float("inf")).max()) if actual.numel() else 0.0
    return worst / scale


def violation(smaller: Tensor, larger: Tensor, scale: float = 1.0) -> float:
    """Largest violation of smaller <= larger, divided by scale; 0 if it holds everywhere."""
    return float((smaller - larger).detach().clamp(min=0.0).nan_to_num(float("inf")).max()) / scale
