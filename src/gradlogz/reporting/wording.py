"""What a run found, in sentences and chips.

Read next: pages.py, which puts them on top.
"""

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..page import Chip, Group, Link
from ..probing.prediction import Prediction
from ..probing.predictions import PREDICTIONS
from ..probing.records import VERDICTS, Summary
from ..probing.run_probe import name_of

STATUSES: dict[str, Any] = {
    "supported": "agrees", "refuted": "departs", "undecided": "undecided", "not applicable": "silent", "": "silent",
}  # fmt: skip
KNOWN: dict[str, Prediction] = {name_of(p): p for p in PREDICTIONS}


def chip(verdict: str) -> Chip:
    """A verdict in its colour."""
    return Chip(verdict or "not judged", STATUSES[verdict])


def title_of(prediction: str) -> str:
    """The name of a prediction, as words."""
    return prediction.replace("_", " ")


def claim_of(claim: Summary) -> str:
    """A claim in its words, else by its name."""
    return _words(claim) or title_of(claim.prediction)


def _words(claim: Summary) -> str:
    """The words of a claim, or of its prediction where a run has lost them; none if nobody knows them."""
    known = KNOWN.get(claim.prediction)
    return claim.claim or ("" if known is None else known.claim)


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


def groups(claims: Sequence[Summary]) -> tuple[Group, ...]:
    """The claims under their verdicts, each by its name and in its words."""
    found = []
    for verdict in (*VERDICTS, ""):
        entries = tuple(
            (Link(title_of(claim.prediction), claim.prediction), _words(claim))
            for claim in claims
            if claim.verdict == verdict
        )
        if entries:
            found.append(Group(Chip(f"{len(entries)} {verdict or 'not judged'}", STATUSES[verdict]), entries))
    return tuple(found)


def described(facts: Mapping[str, Any]) -> str:
    """A model in a line or two."""
    said = [str(facts["architecture"])] if facts.get("architecture") else []
    if isinstance(facts.get("parameters"), int):
        said.append(f"{facts['parameters'] / 1e6:,.1f} M parameters")
    said += [f"{facts[name]} {name}" for name in ("layers", "heads") if facts.get(name)]
    said += [f"{facts['dtype']}"] if facts.get("dtype") else []
    if isinstance(facts.get("tokens"), int):
        said.append(f"measured on {facts['tokens']:,} tokens of {facts.get('documents', 'some')} documents")
    origin = ", ".join(str(facts[name]) for name in ("source", "licence") if facts.get(name))
    return ". ".join(part for part in (", ".join(said), origin) if part) + "." if said else "Nothing is known of it."


def explained(prediction: str) -> tuple[str, ...]:
    """How a prediction is measured, from the head of its file; without what only readers of code need."""
    known = KNOWN.get(prediction)
    paragraphs = [] if known is None else (inspect.getdoc(known) or "").split("\n\n")
    return tuple(_spelt(p, known) for p in paragraphs[1:] if not p.startswith("Read next"))


def _spelt(text: str, prediction: Any) -> str:
    """The text with the numbers that its constants stand for."""

    def value(found: re.Match[str]) -> str:
        number = getattr(prediction, found[0], None)
        return f"{number:g}" if isinstance(number, int | float) else found[0]

    return re.sub(r"\b[A-Z]{3,}\b", value, text)


def _hold(count: int) -> str:
    return "holds" if count == 1 else "hold"


def _do(count: int) -> str:
    return "does" if count == 1 else "do"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
