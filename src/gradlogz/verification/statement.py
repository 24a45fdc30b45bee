"""A statement of the theory, as printed and as corrected, with the computation that decides.

    @statement("E8", "paper 3.2", printed="...", corrected="...")
    def kl_is_bregman() -> Outcome: ...

A check computes residuals relative to the scale of its statement: zero but for rounding if the statement is true. The
corrected form must hold; the printed one is shown with its size, because a reader of the paper meets it first.

Read next: program.py (which runs them), paper.py (the first of them).
"""

from collections.abc import Callable
from typing import NamedTuple

from .._displays import shown
from .._typing import Tensor


class Outcome(NamedTuple):
    """How far a statement is from true: as corrected, and, where that differs, as printed."""

    corrected: float
    printed: float | None = None


class Statement(NamedTuple):
    """One numbered statement of the sources."""

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
        """Whether every corrected statement holds."""
        return all(result.holds for result in self.results)

    def _repr_html_(self) -> str:
        """The page inside a notebook."""
        return str(shown(self, "html"))


STATEMENTS: list[Statement] = []


def statement(
    key: str, where: str, *, corrected: str, printed: str | None = None, tolerance: float = 1e-12
) -> Callable[[Callable[[], Outcome]], Callable[[], Outcome]]:
    """Register a check under the key of its statement.

    Args:
        where: the place in the sources: "paper" (shim22), "note 1" (exponential families), "note 2" (filters), or
            "theory" for what is in none of them.
        corrected: the formula that must hold.
        printed: the formula of the source, where it is another one.
    """

    def register(check: Callable[[], Outcome]) -> Callable[[], Outcome]:
        STATEMENTS.append(Statement(key, where, printed, corrected, tolerance, check))
        return check

    return register


def gap(actual: Tensor, expected: Tensor, scale: float = 1.0) -> float:
    """max|actual - expected| / scale; infinite where one of them is NaN or the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    worst = float((actual - expected).abs().nan_to_num(float("inf")).max()) if actual.numel() else 0.0
    return worst / scale


def violation(smaller: Tensor, larger: Tensor, scale: float = 1.0) -> float:
    """How far smaller <= larger is from true, at worst: 0 where it holds."""
    return float((smaller - larger).clamp(min=0.0).nan_to_num(float("inf")).max()) / scale
