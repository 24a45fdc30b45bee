"""The entries of findings: rows, claims, tokens.

    Declaration  the texts of a prediction: title, claim, formula, method, quantities, what refutes it, references
    Finding      one quantity: its value and interval, the same under the null, and a verdict if it is judged
    Claim        one prediction about one model, in words, with its verdict
    Summary      a claim, and how its rows divide
    Token        one token of interest, with the text about it

Read next: findings.py (all of them together), findings_file.py (as JSON), ../reporting (how they are shown).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

VERDICTS = ("supported", "refuted", "undecided", "not applicable")
NAN = math.nan


class Quantity(NamedTuple):
    """Unit and formula of one quantity, as an axis shows them."""

    unit: str
    formula: str


class Declaration(NamedTuple):
    """What a prediction declares about itself, as data: a page of a run is made from this and the rows alone.

    method: paragraphs on how the quantities are computed; decision_rule: when a head or layer supports or refutes the
    claim; references: keys of references.bib.
    """

    title: str
    claim: str
    formula: str
    refutes: str
    method: tuple[str, ...]
    decision_rule: str
    quantities: Mapping[str, Quantity]
    references: tuple[str, ...] = ()


class Finding(NamedTuple):
    """One quantity of one head, or of one layer where head is None, or of the model where layer is empty.

    `low` and `high` end the interval of 95 %, `null_low` and `null_high` that of the control; NaN where there is none.
    The verdict is empty where a quantity is told and not judged.
    """

    model: str
    prediction: str
    layer: str
    call: int
    head: int | None
    quantity: str
    value: float
    low: float = NAN
    high: float = NAN
    null: float = NAN
    null_low: float = NAN
    null_high: float = NAN
    tokens: int = 0
    verdict: str = ""


class Claim(NamedTuple):
    """What one prediction comes to for one model: the claim in words, the quantity that is judged, the verdict, why.

    The value is that of the whole model, of the middle head or what else the prediction takes for it. `note` says how
    many heads stand after the correction of Benjamini and Hochberg.
    """

    model: str
    prediction: str
    claim: str
    quantity: str
    value: float
    low: float
    high: float
    null: float
    verdict: str
    words: str
    note: str = ""


class Summary(NamedTuple):
    """A claim and how the rows of its prediction divide: `share` is that of the supported among those judged."""

    model: str
    prediction: str
    claim: str
    quantity: str
    value: float
    low: float
    high: float
    null: float
    judged: int
    supported: int
    refuted: int
    share: float
    note: str
    verdict: str
    words: str


class Token(NamedTuple):
    """A token that stands out: largest covariance, a sink, an example against a claim."""

    model: str
    kind: str
    layer: str
    call: int
    head: int | None
    value: float
    document: str
    position: int
    text: str
