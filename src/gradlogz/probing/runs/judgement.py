"""Records that predictions return: measured values and judgements.

    Measured     one value with its confidence interval, of a head, a layer or the model
    Judgement    findings with their verdicts, and the result for the model, as numbers
    graded       a judgement in the words of the kind of its claim

Read next: ../hypothesis_tests.py (from one to the other), records.py (findings).
"""

from typing import Literal, NamedTuple

from ..._typing import Float, Tensor
from .records import DESCRIPTIVE, NAN, SELF_CHECK, TESTED, Detail, Finding, Remark

Ruling = Literal["supported", "refuted", "inconclusive", "described", "passed", "failed", "not applicable"]
# Verdicts of claims that are not tested, by kind; others are unchanged.
GRADED: dict[str, dict[str, Ruling]] = {
    DESCRIPTIVE: dict.fromkeys(TESTED, "described"),
    SELF_CHECK: {"supported": "passed", "refuted": "failed"},
}


class Measured(NamedTuple):
    """One value with its 95 % confidence interval; for a null, the expected value and its 95 % band.

    layer: name of the layer as in `capture`, numbered from the second call of a tied layer on; empty for the model.
    head: None for a quantity of the layer or of the model.
    freedom: degrees of freedom of the interval.
    replicates: values in the replicates of documents, from which the interval is computed.
    """

    layer: str
    head: int | None
    quantity: str
    value: float
    low: float = NAN
    high: float = NAN
    tokens: int = 0
    freedom: float = NAN
    replicates: Float[Tensor, " r"] | None = None


class Judgement(NamedTuple):
    """Findings with their verdicts, and the result for the model.

    quantity: the quantity that `value` summarises. judged, supported, refuted: numbers of heads or layers.
    details: further numbers. remarks: conditions that hold. The declaration has the words of both.
    """

    findings: list[Finding]
    verdict: Ruling
    quantity: str = ""
    value: float = NAN
    low: float = NAN
    high: float = NAN
    null: float = NAN
    null_low: float = NAN
    null_high: float = NAN
    judged: int = 0
    supported: int = 0
    refuted: int = 0
    details: tuple[Detail, ...] = ()
    remarks: tuple[Remark, ...] = ()


def graded(judgement: Judgement, kind: str) -> Judgement:
    """Judgement in the words of the kind of its claim: descriptive claims are not tested, self-checks pass or fail."""
    words = GRADED.get(kind, {})
    findings = [f._replace(verdict=words.get(f.verdict, f.verdict)) for f in judgement.findings]
    judgement = judgement._replace(findings=findings, verdict=words.get(judgement.verdict, judgement.verdict))
    return judgement._replace(supported=0, refuted=0) if kind == DESCRIPTIVE else judgement


def split(layer: str) -> tuple[str, int]:
    """Module name and number of the call of a layer: "layer#2" is the second call."""
    name, _, call = layer.partition("#")
    return name, int(call or 1)
