"""What a run found, in sentences and chips; texts of a prediction are those that the run declares.

    title_of, claim_of, method_of, facts_of     of a prediction, by its declaration; by its name where there is none
    unit_and_formula                            of a quantity; a bare number where none is declared

Read next: findings_page.py, which puts them on top; ../probing/runs/records.py (Declaration).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..page import Chip, Group, Link
from ..probing.runs.records import VERDICTS, Declaration, Quantity, Summary
from .citations import keys_in
from .formatting import STYLES

Declarations = Mapping[str, Declaration]


def chip(verdict: str, count: int | None = None) -> Chip:
    """A verdict in its colour, and how many claims have it."""
    word = verdict or "not judged"
    return Chip(word if count is None else f"{count} {word}", STYLES[verdict].status)


def title_of(declarations: Declarations, prediction: str) -> str:
    """The title of a prediction, or its name as words."""
    declared = declarations.get(prediction)
    return prediction.replace("_", " ") if declared is None else declared.title


def claim_of(declarations: Declarations, claim: Summary) -> str:
    """A claim in its words, else by its title."""
    return _words(declarations, claim) or title_of(declarations, claim.prediction)


def _words(declarations: Declarations, claim: Summary) -> str:
    """The words of a claim, or of its prediction where a run has lost them; none if it declares nothing."""
    declared = declarations.get(claim.prediction)
    return claim.claim or ("" if declared is None else declared.claim)


def facts_of(declarations: Declarations, prediction: str) -> dict[str, str]:
    """Formula, decision rule and what refutes a prediction; nothing if the run does not declare it."""
    declared = declarations.get(prediction)
    if declared is None:
        return {}
    texts = {
        "formula": declared.formula,
        "decision rule": declared.decision_rule,
        "refuted by": declared.refutes,
    }
    return {name: text for name, text in texts.items() if text}


def method_of(declarations: Declarations, prediction: str) -> tuple[str, ...]:
    """How a prediction is measured, in paragraphs."""
    declared = declarations.get(prediction)
    return () if declared is None else tuple(declared.method)


def unit_and_formula(declarations: Declarations, prediction: str, quantity: str) -> Quantity:
    """The unit and the formula of a quantity, by the name it has in findings; a bare number if it is not declared.

    A name that is not declared is looked for without what stands behind its first comma, then without what was left
    out: "gain, permuted" is a gain, "excess of log trace without first tokens" an excess of log trace.
    """
    declared = declarations.get(prediction)
    for name in (quantity, quantity.partition(",")[0], quantity.partition(" without ")[0]):
        if declared is not None and name in declared.quantities:
            return declared.quantities[name]
    return Quantity("1", "")


def keys_cited(declarations: Declarations, predictions: Iterable[str]) -> list[str]:
    """The keys of the works that predictions cite: those in their texts and those they list."""
    declared = [declarations[name] for name in predictions if name in declarations]
    texts = [text for each in declared for text in (*each.method, each.decision_rule, each.claim, each.refutes)]
    return [*keys_in(texts), *(key for each in declared for key in each.references)]


def verdict_sentence(model: str, claims: Sequence[Summary]) -> str:
    """How many claims hold for the model, and how many do not."""
    counts = Counter(claim.verdict for claim in claims)
    judged = sum(counts[verdict] for verdict in ("supported", "refuted", "undecided"))
    if not judged:
        return f"No claim could be judged for {model}."
    return (
        f"Of {judged} claim{'s' if judged != 1 else ''} that could be judged for {model}, {counts['supported']} "
        f"{_hold(counts['supported'])}, {counts['refuted']} {_do(counts['refuted'])} not, and {counts['undecided']} "
        f"{_are(counts['undecided'])} undecided."
    )


def groups(declarations: Declarations, claims: Sequence[Summary]) -> tuple[Group, ...]:
    """The claims under their verdicts, each by its title and in its words."""
    found = []
    for verdict in (*VERDICTS, ""):
        entries = tuple(
            (Link(title_of(declarations, claim.prediction), claim.prediction), _words(declarations, claim))
            for claim in claims
            if claim.verdict == verdict
        )
        if entries:
            found.append(Group(chip(verdict, len(entries)), entries))
    return tuple(found)


def _hold(count: int) -> str:
    return "holds" if count == 1 else "hold"


def _do(count: int) -> str:
    return "does" if count == 1 else "do"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
