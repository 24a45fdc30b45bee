"""Hypothesis tests: from values and null values to verdicts, the same way for every prediction.

    supported      H0: value <= bounds.supports is rejected     two-sided p-value, counted in the direction of the claim
    refuted        H0: value >= bounds.refutes is rejected      the same, in the other direction
    inconclusive   neither, or no confidence interval; not applicable without measurements

For each of the two questions the false discovery rate over all heads (or layers) of the model is 5 % (Benjamini–
Hochberg). Confidence intervals come from the bootstrap or the jackknife; the p-value of a bound inverts the interval,
by Student's t distribution with the fewest degrees of freedom that an interval may have, the number of groups - 1. The
model: supported if more than half of its judged heads are supported, refuted likewise, else inconclusive.

Quantities of weights alone have a null distribution under random rotations, taken to be normal:

    band       mean ± z_.975 sd
    p          2 Phi(-|z|),   z = (value - null) / sd      sd: of null and value together; that of an exact value is 0

Read next: predictions/entropy.py, predictions/tie.py.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch

from .._typing import Tensor
from ..special.distributions import student_p, student_quantile
from .prediction import Baseline
from .runs.judgement import Judgement, Measured, Ruling
from .runs.records import Detail, Finding, Remark
from .statistics import GROUPS, Estimate, Sums, benjamini_hochberg, bootstrap

NORMAL = 1.959963984540054  # quantile .975
NOTHING_MEASURED, ALSO_BASELINE = "nothing_measured", "also_baseline"  # keys of remarks


class Bounds(NamedTuple):
    """Bounds that a confidence interval must lie beyond to support the claim, and to refute it."""

    supports: float
    refutes: float


class Counted(NamedTuple):
    """Counts of the verdicts of judged rows, the medians of their values and null values, and the majority verdict."""

    verdict: Ruling
    supported: int
    refuted: int
    judged: int
    value: float
    null: float


def judge(
    findings: Sequence[Finding], quantity: str, bounds: Callable[[Finding], Bounds], *, small: bool = False
) -> list[Finding]:
    """Findings with verdicts for the rows of `quantity`; with `small` the claim is that values are small."""
    rows = [f for f in findings if f.quantity == quantity]
    sign = -1.0 if small else 1.0
    rejected = []
    for side, name in ((sign, "supports"), (-sign, "refutes")):
        rejected.append(benjamini_hochberg(_p_values(rows, [getattr(bounds(f), name) for f in rows], side)).tolist())
    rulings = iter(zip(*rejected, strict=True))
    judged = []
    for f in findings:
        if f.quantity == quantity:
            supported, refuted = next(rulings)
            verdict = "supported" if supported else "refuted" if refuted else "inconclusive"
            exact = f.low == f.high  # a function of the weights alone, which needs no tokens
            f = f._replace(verdict=verdict if f.tokens or exact else "not applicable")
        judged.append(f)
    return judged


def count(findings: Sequence[Finding], quantity: str) -> Counted:
    """Counts of the verdicts on a quantity, with medians and the majority verdict."""
    rows = [f for f in findings if f.quantity == quantity and f.verdict not in ("", "not applicable")]
    supported, refuted = (sum(f.verdict == v for f in rows) for v in ("supported", "refuted"))
    verdict: Ruling = "inconclusive" if rows else "not applicable"
    if 2 * supported > len(rows):
        verdict = "supported"
    elif 2 * refuted > len(rows):
        verdict = "refuted"
    return Counted(verdict, supported, refuted, len(rows), median(f.value for f in rows), median(f.null for f in rows))


def conclude(
    findings: list[Finding], quantity: str, *, details: Sequence[Detail] = (), remarks: Sequence[Remark] = ()
) -> Judgement:
    """Judgement by the majority of the judged rows: medians and counts, details and remarks.

    Without judged rows the claim is not applicable, and the one remark is NOTHING_MEASURED.
    """
    counts = count(findings, quantity)
    if not counts.judged:
        return Judgement(findings, "not applicable", quantity, remarks=(Remark(NOTHING_MEASURED),))
    return Judgement(
        findings, counts.verdict, quantity, counts.value, null=counts.null, judged=counts.judged,
        supported=counts.supported, refuted=counts.refuted, details=tuple(details), remarks=tuple(remarks),
    )  # fmt: skip


def median(values: Iterable[float]) -> float:
    """Median without NaN; NaN of nothing."""
    numbers = [v for v in values if not math.isnan(v)]
    return statistics.median(numbers) if numbers else math.nan


def median_detail(key: str, findings: Sequence[Finding], quantity: str) -> Detail:
    """Medians of the values and null values of a quantity."""
    rows = [f for f in findings if f.quantity == quantity]
    return Detail(key, median(f.value for f in rows), null=median(f.null for f in rows))


def shared_with_baseline(
    findings: Sequence[Finding], quantity: str, bound: float, *, small: bool = False
) -> tuple[Remark, ...]:
    """A remark if supporting rows pass the bound with random weights too, the null of this quantity."""
    rows = [f for f in findings if f.quantity == quantity and f.verdict == "supported"]
    shared = sum(f.null < bound if small else f.null > bound for f in rows)
    return (Remark(ALSO_BASELINE, {"shared": shared, "supported": len(rows)}),) if shared else ()


def measured(layer: str, quantity: str, estimate: Estimate, tokens: Tensor | float) -> list[Measured]:
    """One row for each head of an estimate [h], or one row for the layer if the estimate is a scalar."""
    value, low, high = (t.detach().double().cpu().reshape(-1).tolist() for t in estimate[:3])
    count = torch.as_tensor(tokens).detach().double().cpu().expand(len(value)).tolist()
    heads: Sequence[int | None] = [None] if estimate.value.ndim == 0 else range(len(value))
    return [
        Measured(layer, head, quantity, v, a, b, int(n))
        for head, v, a, b, n in zip(heads, value, low, high, count, strict=True)
    ]


def bootstrapped(sums: Mapping[str, Sums], function: Callable[[Tensor], Tensor]) -> dict[str, Estimate]:
    """function(totals) with its bootstrap interval, [h] for each layer; all layers are computed at once."""
    if not sums:
        return {}
    estimate = bootstrap(function, Sums(torch.cat([s.totals for s in sums.values()], 1)))
    parts = [t.split([s.totals.shape[1] for s in sums.values()]) for t in estimate]
    return {layer: Estimate(*part) for layer, part in zip(sums, zip(*parts, strict=True), strict=True)}


def absent(layer: str, quantity: str) -> Measured:
    """Row without a value, for a layer in which the quantity cannot be measured."""
    return Measured(layer, None, quantity, math.nan)


def random_band(layer: str, quantity: str, values: Tensor) -> list[Measured]:
    """Null value and 95 % prediction band for a head, from the h heads of the random-weights baseline.

        mean ± t_.975(h - 1) sd sqrt(1 + 1 / h)      over the h heads of the layer

    Heads of the baseline are exchangeable, so that the band holds a further draw of the weights with probability 95 %.
    """
    h = len(values)
    mean = values.double().mean()
    sd = values.double().std() if h > 1 else values.new_tensor(0.0).double()
    arm = _quantile(max(h - 1, 1)) * float(sd) * math.sqrt(1 + 1 / h)
    return [Measured(layer, i, quantity, float(mean), float(mean) - arm, float(mean) + arm) for i in range(h)]


def matched_null(baseline: Baseline | None, quantities: Container[str]) -> list[Measured]:
    """Null values from matched random models: mean and 95 % prediction band of one more draw.

        mean ± t_.975(m - 1) sd sqrt(1 + 1 / m)      over the m draws with a value for this layer and head

    The band includes the variance over draws of the weights and over samples of windows. Fewer than two draws have no
    band.
    """
    values: dict[tuple[str, int | None, str], list[float]] = defaultdict(list)
    for m in chain.from_iterable(baseline.matched if baseline is not None else ()):
        if m.quantity in quantities and not math.isnan(m.value):
            values[m.layer, m.head, m.quantity].append(m.value)
    return [Measured(*place, *_prediction_band(each)) for place, each in values.items() if len(each) > 1]


def _prediction_band(values: Sequence[float]) -> tuple[float, float, float]:
    mean, m = statistics.fmean(values), len(values)
    arm = _quantile(m - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / m)
    return mean, mean - arm, mean + arm


def band(expected: float, deviation: float) -> tuple[float, float, float]:
    """Mean and ends of the 95 % band of a normal null distribution."""
    return expected, expected - NORMAL * deviation, expected + NORMAL * deviation


def outside(findings: Sequence[Finding]) -> list[bool]:
    """Findings whose values differ from their null values, by a two-sided test at FDR 5 %."""
    value, low, null, high = (
        torch.tensor([getattr(f, name) for f in findings], dtype=torch.float64)
        for name in ("value", "low", "null", "null_high")
    )
    deviation = (value - low) / student_quantile(torch.tensor(GROUPS - 1.0))
    z = (value - null) / (deviation.square() + ((high - null) / NORMAL).square()).sqrt()
    rejected: list[bool] = benjamini_hochberg(torch.erfc(z.abs() / math.sqrt(2))).tolist()
    return rejected


def _p_values(findings: Sequence[Finding], bounds: Sequence[float], side: float) -> Tensor:
    """p-values of the bounds, 1 where the interval contains the bound or lies on the other side, NaN without one."""
    fields = torch.tensor([[f.value, f.low, f.high] for f in findings], dtype=torch.float64).reshape(-1, 3)
    value, low, high = fields.mT
    bound = torch.tensor(bounds, dtype=torch.float64)
    near = low if side > 0 else high
    t = _quantile(GROUPS - 1) * (value - bound).abs() / (value - near).abs()
    p = student_p(t, torch.full_like(t, GROUPS - 1))
    return torch.where(side * (near - bound) <= 0, 1.0, p)


@lru_cache
def _quantile(freedom: int) -> float:
    return float(student_quantile(torch.tensor(float(freedom), dtype=torch.float64)))
