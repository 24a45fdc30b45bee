"""What predictions measure and conclude, as records.

    Measured     one value with its interval, of a head, a layer or the model
    Judgement    the findings with their verdicts, and the verdict on the claim

Read next: ../hypothesis_tests.py (from one to the other), records.py (findings).
"""

from typing import Literal, NamedTuple

from .records import NAN, Finding

Ruling = Literal["supported", "refuted", "undecided", "not applicable"]


class Measured(NamedTuple):
    """One value with its interval; of a null, the value expected and the band it stays in.

    layer: the name that `capture` gives, numbered from the second call of a tied layer on.
    head: None for what concerns the whole layer; layer "" for what concerns the whole model.
    """

    layer: str
    head: int | None
    quantity: str
    value: float
    low: float = NAN
    high: float = NAN
    tokens: int = 0


class Judgement(NamedTuple):
    """The findings with their verdicts, and the verdict on the claim for the whole model with a sentence of reasons.

    value, low, high, null: the number that the sentence is about; quantity: which of the quantities of the findings it
        is a summary of.
    note: how many heads stand after the correction of Benjamini and Hochberg.
    """

    findings: list[Finding]
    verdict: Ruling
    words: str
    value: float = NAN
    low: float = NAN
    high: float = NAN
    null: float = NAN
    quantity: str = ""
    note: str = ""


def split(layer: str) -> tuple[str, int]:
    """The module of a layer and which call of it: "layer#2" is the second."""
    name, _, call = layer.partition("#")
    return name, int(call or 1)
