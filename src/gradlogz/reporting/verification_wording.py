"""Results of `verify` as text, shared by the terminal and the page.

Read next: verification_terminal.py and verification_page.py (which use it).
"""

from collections.abc import Sequence

from ..verification.statement import Statement, StatementResult

DOCUMENTS = {  # how `where` begins, and the title of that source
    "paper": "Paper [shim22]",
    "note 1": "Draft note 1: exponential families",
    "note 2": "Draft note 2: filters",
    "appendix": "Appendix: Hopfield networks",
    "theory": "Theory (docs/theory.md)",
}


def source_of(statement: Statement) -> tuple[str, str]:
    """The title of the source document, and the section or equation in it ("" if the key names it)."""
    for prefix, title in DOCUMENTS.items():
        if statement.where.startswith(prefix):
            return title, statement.where.removeprefix(prefix).strip()
    return statement.where, ""


def by_document(results: Sequence[StatementResult]) -> dict[str, list[StatementResult]]:
    """The results under the title of their source document, documents in the order of DOCUMENTS."""
    groups: dict[str, list[StatementResult]] = {title: [] for title in DOCUMENTS.values()}
    for result in results:
        groups.setdefault(source_of(result.statement)[0], []).append(result)
    return {title: group for title, group in groups.items() if group}


def false_as_printed(result: StatementResult) -> bool:
    """True if the formula of the source was computed and its residual exceeds the tolerance."""
    return result.printed is not None and result.printed > result.statement.tolerance


def headline(results: Sequence[StatementResult]) -> str:
    """The number of corrected statements that hold and fail, and of statements that are false as printed."""
    hold, wrong = sum(r.holds for r in results), sum(map(false_as_printed, results))
    total, printed = len(results), f"{wrong} {'is' if wrong == 1 else 'are'} false as printed"
    return f"{hold} of {total} statements hold as corrected, {total - hold} fail; {printed}."


def failures(results: Sequence[StatementResult]) -> list[str]:
    """One line for each corrected statement that fails: its key, and its error or residual."""
    return [f"{r.statement.key} fails: {_reason(r)}" for r in results if not r.holds]


def _reason(result: StatementResult) -> str:
    return result.error or f"residual {residual(result.residual)}, tolerance {residual(result.statement.tolerance)}"


def residual(value: float) -> str:
    """A residual in two digits, in one below 0.001: 0.73, 2e-16."""
    return f"{value:.2g}" if value == 0 or value >= 1e-3 else f"{value:.0e}"
