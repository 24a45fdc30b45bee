"""Differences of two runs: of every judged quantity, and of the value of every claim, with confidence intervals.

    d           = value of the second run - value of the first
    paired      replicates of d = differences of replicates, if both runs read the same documents
    unpaired    low  = d - sqrt((v - v_low)² + (u_high - u)²)       u, v: values of the first and of the second run
                high = d + sqrt((v_high - v)² + (u - u_low)²)                                              [zou08]
    p           P(|T| >= t),   t = t_.975 |d| / |d - end of the interval that faces 0|

Replicate i weights the same documents in the same way in both runs, so that what a document does to both values drops
out of a paired difference. The value of a claim that is a median over heads has the medians of replicates as its
replicates; its interval is too narrow if the heads around the median are closer than their sampling errors, where a
median is not smooth. Differences of heads are tested at FDR 5 % within a claim, those of claims at FDR 5 % over all
claims.

Read next: replicates.py, ../statistics/estimates.py (the interval), ../../reporting/comparison_page.py.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..statistics import GROUPS, benjamini_hochberg, interval_of, p_values
from .findings import Findings
from .records import NAN, Finding, Summary
from .replicates import place_of

UNJUDGED = ("", "not applicable")
FLAT = 1e-6  # width of an interval, relative to the values, that is the rounding of replicates in float32


class Difference(NamedTuple):
    """The difference of one value between two runs, the second minus the first.

    layer, call, head: empty, 1 and None for the value of a claim. low, high: 95 % confidence interval, NaN if unknown,
    as for a rank correlation that is the same in all replicates; both equal to the value for quantities of weights
    alone, which have no sampling error and no p-value.
    paired: the interval is that of replicates of the same documents. significant: at FDR 5 %.
    """

    prediction: str
    quantity: str
    layer: str
    call: int
    head: int | None
    first: float
    last: float
    value: float
    low: float
    high: float
    p: float
    paired: bool
    significant: bool
    verdicts: tuple[str, str]


class _Side(NamedTuple):
    """A value of one run with its interval, degrees of freedom and replicates."""

    value: float
    low: float
    high: float
    freedom: float
    replicates: Float[Tensor, " r"] | None

    @property
    def exact(self) -> bool:
        return self.low == self.high


def same_documents(one: Findings, other: Findings) -> bool:
    """Return whether two runs of one model each read the same documents; false if either does not record them."""
    first, last = (next(iter(each.facts.values()), {}).get("fingerprint") for each in (one, other))
    return first is not None and first == last


def differences_of_rows(one: Findings, other: Findings, prediction: str) -> list[Difference]:
    """Return the differences of the judged rows of a prediction that both runs have, by layer, head and quantity."""
    paired = same_documents(one, other)
    sides = [
        {row[2:6]: (row, _side(findings, row)) for row in _judged(findings, prediction)} for findings in (one, other)
    ]
    both = [place for place in sides[0] if place in sides[1]]
    results = []
    for place in both:
        (row, a), (second, b) = sides[0][place], sides[1][place]
        layer, call, head, quantity = place
        head_of = (prediction, quantity, layer, call, head)
        results.append(_difference(head_of, a, b, (row.verdict, second.verdict), paired=paired))
    return _tested(results)


def differences_of_claims(one: Findings, other: Findings) -> dict[str, Difference]:
    """Return the differences of the values of claims, by prediction, for the claims that both runs have."""
    paired = same_documents(one, other)
    summaries = [{s.prediction: s for s in findings.summary()} for findings in (one, other)]
    results = [
        _difference(
            (name, a.quantity, "", 1, None),
            _side_of_claim(one, a),
            _side_of_claim(other, b),
            (a.verdict, b.verdict),
            paired=paired,
        )
        for name, a in summaries[0].items()
        if (b := summaries[1].get(name)) is not None and math.isfinite(a.value) and math.isfinite(b.value)
    ]
    return {each.prediction: each for each in _tested(results)}


def _judged(findings: Findings, prediction: str) -> list[Finding]:
    rows = [row for row in findings.rows if row.prediction == prediction and row.verdict not in UNJUDGED]
    return [row for row in rows if math.isfinite(row.value)]


def _side(findings: Findings, row: Finding) -> _Side:
    stored = findings.replicates.get(place_of(row))
    return _Side(row.value, row.low, row.high, row.freedom, None if stored is None else stored.values)


def _side_of_claim(findings: Findings, claim: Summary) -> _Side:
    """Return the value of a claim, with the medians of replicates if it is the median of its rows."""
    rows = [row for row in _judged(findings, claim.prediction) if row.quantity == claim.quantity]
    sides = [_side(findings, row) for row in rows]
    freedom = min((s.freedom for s in sides if not s.exact), default=NAN)
    is_median = bool(sides) and math.isclose(median(s.value for s in sides), claim.value, abs_tol=1e-12)
    return _Side(claim.value, claim.low, claim.high, freedom, _medians(sides) if is_median else None)


def _medians(sides: Sequence[_Side]) -> Float[Tensor, " r"] | None:
    """Return the median over rows of each replicate; None unless all rows with sampling error have equally many."""
    stored = [side.replicates for side in sides if not side.exact]
    sizes = {None if each is None else len(each) for each in stored}
    if len(sizes) != 1 or None in sizes:
        return None
    (r,) = sizes
    rows = [torch.full((r,), side.value) if side.exact else side.replicates for side in sides]  # type: ignore[arg-type]
    return torch.nanquantile(torch.stack(rows).double(), 0.5, 0)  # type: ignore[arg-type]


def _difference(
    place: tuple[str, str, str, int, int | None], a: _Side, b: _Side, verdicts: tuple[str, str], *, paired: bool
) -> Difference:
    value = b.value - a.value
    known = [side.freedom for side in (a, b) if not side.exact and math.isfinite(side.freedom)]
    freedom = torch.tensor(min(known, default=GROUPS - 1.0), dtype=torch.float64)  # earlier versions do not record it
    if a.exact and b.exact:
        return Difference(*place, a.value, b.value, value, value, value, NAN, False, False, verdicts)
    paired = paired and _aligned(a, b)
    if paired:
        draws = b.replicates.double() - a.replicates.double()  # type: ignore[union-attr]
        estimate = interval_of(torch.tensor(value, dtype=torch.float64), draws, freedom)
        low, high = float(estimate.low), float(estimate.high)
    else:
        low = value - math.hypot(b.value - b.low, a.high - a.value)
        high = value + math.hypot(b.high - b.value, a.value - a.low)
    if high - low <= FLAT * max(abs(a.value), abs(b.value)):
        low = high = NAN
    numbers = torch.tensor([value, low, high], dtype=torch.float64)
    p = NAN if math.isnan(low) else p_values(numbers[0], numbers[1], numbers[2], freedom)
    return Difference(*place, a.value, b.value, value, low, high, float(p), paired, False, verdicts)


def _aligned(a: _Side, b: _Side) -> bool:
    """Return whether both sides have the same replicates; the same documents are in the same groups."""
    return a.replicates is not None and b.replicates is not None and len(a.replicates) == len(b.replicates)


def _tested(differences: Iterable[Difference]) -> list[Difference]:
    """Return the differences with those that are significant at FDR 5 % marked."""
    each = list(differences)
    rejected = benjamini_hochberg(torch.tensor([d.p for d in each], dtype=torch.float64)).tolist()
    return [d._replace(significant=yes) for d, yes in zip(each, rejected, strict=True)]
