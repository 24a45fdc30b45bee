"""Records of findings: declarations, rows, claims, tokens.

    Declaration  the texts of a prediction: title, claim, formula, method, quantities, and the words of its result
    Finding      one quantity: value, confidence interval, null value, and a verdict if it is judged
    Claim        the result of one prediction for one model: numbers and a verdict, no sentences
    Detail       a number reported beside the judged one; Remark: a condition that holds
    Summary      a claim with the counts of its rows
    Token        an extreme token with its context

Sentences are made from a claim and its declaration by one function, ../../reporting/findings_wording.py.

Read next: findings.py (all records of a run), findings_file.py (as JSON).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

TESTED = ("supported", "refuted", "inconclusive")  # verdicts of a test
VERDICTS = (*TESTED, "described", "passed", "failed", "not applicable")
PREDICTED, BEYOND, DESCRIPTIVE, SELF_CHECK = "prediction", "beyond the theory", "descriptive", "self-check"
KINDS = (PREDICTED, BEYOND, DESCRIPTIVE, SELF_CHECK)
NAN = math.nan


class Quantity(NamedTuple):
    """Unit and formula of one quantity, as shown on an axis."""

    unit: str
    formula: str


class Label(NamedTuple):
    """Name of a detail, the format of its numbers, the name of its null value, and the outcome that is counted."""

    text: str
    number: str = "{:.2f}"
    null: str = "null"
    counted: str = "above the null"


class Declaration(NamedTuple):
    """Texts that a prediction declares; a page of a run needs only these and the rows.

    Attributes:
        title: short name, at most 26 characters for tables of a terminal.
        formula: definition of the judged statistic, in words and symbols.
        refutes: condition under which a head or layer (the model, if it is judged as a whole) refutes the claim.
        method: paragraphs on how the quantities are computed.
        decision_rule: reasons for the bounds, and how the verdict on the model follows.
        references: keys of references.bib.
        supports: condition under which a head or layer supports the claim; empty in runs of earlier versions, whose
            decision rule contains it.
        statistic: name of the value of the claim, such as "median cosine".
        null: name of its null value, such as "random-rotation null".
        null_reason: what the null model keeps, what it destroys, and why it is the one for this claim; the reason for
            none, if there is none.
        unit: singular noun of the objects that are counted ("head"); empty if the model is judged as a whole.
        number: format of the value and of its null value.
        outcomes: predicates of the objects that support and that refute the claim.
        correction: the multiple-testing correction of the counts; empty if there is none.
        details: labels of details by key.
        remarks: one sentence for each remark, by key; `{name}` is a number of the remark, `{layers}` its layers.
        labels: readable names of quantities whose names in the rows are not.
        places: plural noun of the rows without a head, by quantity ("sublayers"); by default the plural of `unit`, or
            "layers" if that is the head.
        kind: what the claim is: a "prediction" of the theory; a test "beyond the theory", of a statement that the
            theory does not make; "descriptive", with values, intervals and nulls but no test; or a "self-check" of the
            measurement, true of every model. Only predictions are evidence for or against the theory.
        power: shares of supported and refuted heads or layers for planted effects of known size; empty if they were
            not measured.
        bounds: derivation of every number in `supports` and `refutes`, and of further thresholds, by a key that begins
            with the number.
        interesting: the smallest effect that is called interesting; the bound is below it, so that it can be found.
    """

    title: str
    claim: str
    formula: str
    refutes: str
    method: tuple[str, ...]
    decision_rule: str
    quantities: Mapping[str, Quantity]
    references: tuple[str, ...] = ()
    supports: str = ""
    statistic: str = "value"
    null: str = "null"
    unit: str = "head"
    number: str = "{:.2f}"
    outcomes: tuple[str, str] = ("support the claim", "refute it")
    correction: str = "FDR 5 %, Benjamini–Hochberg"
    details: Mapping[str, Label] = {}
    remarks: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    places: Mapping[str, str] = {}
    kind: str = PREDICTED
    power: str = ""
    bounds: Mapping[str, str] = {}
    interesting: str = ""
    null_reason: str = ""


class Finding(NamedTuple):
    """One quantity of a head, of a layer (head None) or of the model (empty layer).

    `low` and `high` are the ends of the 95 % confidence interval, with `freedom` degrees of freedom, `null_low` and
    `null_high` those of the 95 % band of the null distribution, with `null_freedom`; NaN where there is none. The
    verdict is empty for quantities that are not judged.
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
    freedom: float = NAN
    null_freedom: float = NAN


class Detail(NamedTuple):
    """A number reported beside the value of a claim; its label is declared under `key`.

    count, total: number of heads or layers with the declared outcome, and of all that were compared.
    layer: the layer of an extreme value.
    """

    key: str
    value: float = NAN
    low: float = NAN
    high: float = NAN
    null: float = NAN
    count: int | None = None  # type: ignore[assignment]  # as a record it has no use for tuple.count
    total: int | None = None
    layer: str = ""


class Remark(NamedTuple):
    """A condition that holds for a claim; its sentence is declared under `key`."""

    key: str
    numbers: Mapping[str, float] = {}
    layers: tuple[str, ...] = ()


class Claim(NamedTuple):
    """The result of one prediction for one model.

    Attributes:
        claim: the claim in words, as declared.
        quantity: the quantity of the findings that `value` summarises.
        value, low, high: the value for the model (the median over heads or layers unless the declared statistic is
            another) with its 95 % confidence interval.
        null, null_low, null_high: the null value with its 95 % band.
        text: sentences stored with the claim, as in runs of format 1 and 2; shown in place of generated ones.
        judged, supported, refuted: numbers of heads or layers.
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
    text: str = ""
    judged: int = 0
    supported: int = 0
    refuted: int = 0
    null_low: float = NAN
    null_high: float = NAN
    details: tuple[Detail, ...] = ()
    remarks: tuple[Remark, ...] = ()


class Summary(NamedTuple):
    """A claim with its counts, those of the rows where the claim has none; `share`: supported over judged."""

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
    verdict: str
    text: str = ""
    null_low: float = NAN
    null_high: float = NAN
    details: tuple[Detail, ...] = ()
    remarks: tuple[Remark, ...] = ()


class Token(NamedTuple):
    """A token with one of the largest variances of attended values, or one of the largest logits, of a layer."""

    model: str
    kind: str
    layer: str
    call: int
    head: int | None
    value: float
    document: str
    position: int
    text: str
