"""Hypothesis tests: from values and null values to verdicts, the same way for every prediction.

    supported      H0: value <= bounds.supports is rejected     two-sided p-value, counted in the direction of the claim
    refuted        H0: value >= bounds.refutes is rejected      the same, in the other direction
    inconclusive   neither, no confidence interval, or no null value where the bound is one
    not applicable without a value

For each of the two questions the false discovery rate over all heads (or layers) of the model is 5 % (Benjamini–
Hochberg) over samples of documents. A bound may be the end of the 95 % band of a null, which is fixed there: up to 5 %
of random heads are beyond it, however much text is read. Confidence intervals come from the bootstrap or the jackknife;
the p-value of a bound inverts the interval, by Student's t distribution with the degrees of freedom of the interval:
the effective number of documents, or the number of groups, - 1.

The model: supported if more than half of its judged heads are, by one test of this statement, and refuted likewise:

    p          that at most half of the heads are beyond the bound         partial conjunction [benjamini08]
    level      5 % / TESTS                                                 Bonferroni over the tested claims of a run

Quantities of weights alone have a null distribution under random rotations, taken to be normal:

    band       mean ± z_.975 sd
    p          P(|T| >= |t|),  t = (value - null) / sd      sd: of null and value together; that of an exact value is 0,
                                                            and T is then normal

Read next: predictions/entropy.py, predictions/tie.py.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from .._typing import Float, Tensor
from ..special.distributions import student_p, student_quantile
from .prediction import Baseline
from .runs.judgement import Judgement, Measured, Ruling, graded
from .runs.records import DESCRIPTIVE, Detail, Finding, Label, Remark
from .statistics import (
    GROUPS,
    Estimate,
    Sums,
    benjamini_hochberg,
    bootstrap,
    facing,
    majority_p_value,
    median_estimate,
    p_values,
    prediction_band,
)

NORMAL = 1.959963984540054  # quantile .975
POWER = 0.8  # probability with which a detectable effect is found
TESTS = 11  # tests in a run; at most ten claims are tested now, at the level at which their power was measured
LEVEL = 0.05 / TESTS  # of the verdict on a model: a false one in any claim has a probability of at most 5 %
NOTHING_MEASURED = "nothing_measured"  # key of a remark
MAJORITY = "p_value_of_the_verdict"  # keys of details
DETECTABLE, DIFFERENCE = "detectable_value", "detectable_difference"
COMPATIBLE = "compatible"  # key of a detail

# Labels of the details that `conclude` adds to every tested claim.
TEST_DETAILS = {
    MAJORITY: Label(f"p-value of the verdict at level {LEVEL:.4f}", "{:.2g}"),
    DETECTABLE: Label(f"detectable value ({100 * POWER:g} % power)", "{:.2g}"),
    DIFFERENCE: Label(f"detectable difference to the null ({100 * POWER:g} % power)", "{:.2g}"),
}


class Bounds(NamedTuple):
    """Bounds that a confidence interval must lie beyond to support the claim, and to refute it."""

    supports: float
    refutes: float


class Judged(NamedTuple):
    """Findings with verdicts for the rows of a quantity, and what the verdict on the model needs of their tests.

    supports, refutes: p-values of the rows in both directions, NaN for rows that cannot be tested. detectable: function
    of a level, the smallest value, or difference to the null, that the test of a row at this level finds with a
    probability of 80 %; NaN if unknown. key: of the detail that reports it.
    """

    findings: list[Finding]
    supports: Float[Tensor, " n"]
    refutes: Float[Tensor, " n"]
    detectable: Callable[[float], Float[Tensor, " n"]]
    key: str = DETECTABLE


class Counted(NamedTuple):
    """Counts of the verdicts of judged rows, the medians of their values and null values, and the majority verdict."""

    verdict: Ruling
    supported: int
    refuted: int
    judged: int
    value: float
    null: float


def judge(
    findings: Sequence[Finding],
    quantity: str,
    bounds: Callable[[Finding], Bounds],
    *,
    small: bool = False,
    needs: Float[Tensor, " n"] | None = None,
) -> Judged:
    """Judge the rows of `quantity` by bounds at FDR 5 %; with `small` the claim is that values are small.

    needs: p-values of a second condition of support; the larger of both tests that both hold (intersection-union test
    [berger82]).
    """
    rows = [f for f in findings if f.quantity == quantity]
    sign = -1.0 if small else 1.0
    limits = [bounds(f) for f in rows]
    supports = _p_values(rows, [b.supports for b in limits], sign)
    supports = supports if needs is None else torch.maximum(supports, needs)
    refutes = _p_values(rows, [b.refutes for b in limits], -sign)
    detectable = partial(_detectable, rows, limits, sign)
    return Judged(_ruled(findings, quantity, supports, refutes), supports, refutes, detectable)


def refutable(
    findings: Sequence[Finding], quantity: str, other: str, bounds: Callable[[Finding], Bounds]
) -> tuple[Judged, Detail]:
    """Judge a claim that two quantities of a head are small, and which can only be refuted.

    A head is refuted if either value is above its bound (twice the smaller p-value). It is compatible, which is
    counted, if both are below (the larger p-value): untrained heads may be, too, so that nothing is supported.
    """
    rows = [f for f in findings if f.quantity == quantity]
    beside = {head_of(f): f for f in findings if f.quantity == other}
    pairs = rows, [beside.get(head_of(f), f) for f in rows]  # a layer without values has one row of one quantity
    limits = [[bounds(f) for f in each] for each in pairs]
    below, above = (
        torch.stack(
            [_p_values(f, [getattr(b, name) for b in each], side) for f, each in zip(pairs, limits, strict=True)]
        )
        for name, side in (("supports", -1.0), ("refutes", 1.0))
    )
    refutes = (2 * above.amin(0)).clamp(max=1.0)
    compatible = benjamini_hochberg(below.amax(0))
    never = torch.full_like(refutes, math.nan)
    detectable = partial(_detectable, rows, [b._replace(supports=math.nan) for b in limits[0]], -1.0)
    judged = Judged(_ruled(findings, quantity, never, refutes), never, refutes, lambda level: detectable(level / 2))
    total = len(_applicable(judged.findings, quantity))
    return judged, Detail(COMPATIBLE, count=int(compatible.sum()), total=total)


def head_of(f: Finding) -> tuple[str, int, int | None]:
    """Layer, call and head of a row."""
    return f.layer, f.call, f.head


def _ruled(
    findings: Sequence[Finding], quantity: str, supports: Float[Tensor, " n"], refutes: Float[Tensor, " n"]
) -> list[Finding]:
    """Findings with the verdicts that p-values have at FDR 5 %."""
    return _with_verdicts(findings, quantity, *(benjamini_hochberg(p).tolist() for p in (supports, refutes)))


def _detectable(rows: Sequence[Finding], limits: Sequence[Bounds], sign: float, level: float) -> Float[Tensor, " n"]:
    """Smallest values of a claim that tests of rows at a level find with probability POWER; NaN if unknown.

        bound ± (t_(1 - level/2) + t_.8) se          se: of the confidence interval, which faces the bound

    Of claims that cannot be supported it is the value that refutes them.
    """
    value, low, high = _fields(rows, "value", "low", "high")
    supports, refutes = torch.tensor(limits, dtype=torch.float64).reshape(-1, 2).mT
    side = torch.where(supports.isfinite(), sign, -sign)
    bound = torch.where(supports.isfinite(), supports, refutes)
    freedom = _freedom(rows)
    error = facing(value, low, high, bound) / student_quantile(freedom)
    return torch.where(bound.isfinite(), bound + side * _arms(freedom, level) * error, torch.nan)


def _arms(freedom: Float[Tensor, " n"], level: float) -> Float[Tensor, " n"]:
    """Standard errors between a bound and an effect that a two-sided test finds with probability POWER."""
    return student_quantile(freedom, 1 - level) + student_quantile(freedom, 2 * POWER - 1)


def _with_verdicts(
    findings: Sequence[Finding], quantity: str, supported: Sequence[bool], refuted: Sequence[bool]
) -> list[Finding]:
    """Findings with the verdicts of the rows of a quantity, in their order."""
    rulings = iter(zip(supported, refuted, strict=True))
    judged = []
    for f in findings:
        if f.quantity == quantity:
            supports, refutes = next(rulings)
            verdict = "supported" if supports else "refuted" if refutes else "inconclusive"
            exact = f.low == f.high  # a function of the weights alone, which needs no tokens
            applicable = (f.tokens or exact) and not math.isnan(f.value)
            f = f._replace(verdict=verdict if applicable else "not applicable")
        judged.append(f)
    return judged


def judge_against_null(
    findings: Sequence[Finding], quantity: str, *, also: Sequence[str] = (), small: bool = False
) -> Judged:
    """Judge the rows of `quantity`, whose bound is the null value itself, at FDR 5 % each way.

    A row must be beyond its null value and, with `also`, beyond those of further quantities of the same head: the
    largest of their p-values tests that all hold (intersection-union test [berger82]). Rows without a null value are
    inconclusive.
    """
    rows = [f for f in findings if f.quantity == quantity]
    place = {head_of(f): i for i, f in enumerate(rows)}
    tests = [_against_null(rows)]
    for other in also:
        further = [f for f in findings if f.quantity == other]
        more = torch.full((4, len(rows)), math.nan, dtype=torch.float64)
        more[:, [place[head_of(f)] for f in further]] = torch.stack(_against_null(further))
        tests.append(_Tests(*more))
    above, below = (torch.stack(p).amax(0) for p in ([t.above for t in tests], [t.below for t in tests]))  # keeps NaN

    def detectable(level: float) -> Float[Tensor, " n"]:
        return torch.stack([_arms(t.freedom, level) * t.error for t in tests]).amax(0)

    supports, refutes = (below, above) if small else (above, below)
    return Judged(_ruled(findings, quantity, supports, refutes), supports, refutes, detectable, DIFFERENCE)


def practically_null(key: str, findings: Sequence[Finding], quantity: str, least: float) -> Detail:
    """Count of inconclusive rows whose 95 % confidence interval lies within ±least of their null value."""
    rows = [f for f in findings if f.quantity == quantity and not math.isnan(f.value)]
    inconclusive = [f for f in rows if f.verdict not in ("supported", "refuted")]
    equal = sum(f.null - least < f.low and f.high < f.null + least for f in inconclusive)
    return Detail(key, count=equal, total=len(rows))


def is_majority(detail: Detail) -> bool:
    """Return whether a count is of more than half of its total."""
    return 2 * (detail.count or 0) > (detail.total or 0)


def against_null(rows: Sequence[Finding]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """p-values of value <= null and of value >= null; NaN without a null value."""
    tests = _against_null(rows)
    return tests.above, tests.below


class _Tests(NamedTuple):
    """p-values of value <= null and of value >= null; standard error of the difference and its degrees of freedom."""

    above: Float[Tensor, " n"]
    below: Float[Tensor, " n"]
    error: Float[Tensor, " n"]
    freedom: Float[Tensor, " n"]


def _against_null(rows: Sequence[Finding]) -> _Tests:
    """Tests of rows against their null values; NaN without one.

        t = (value - null) / sqrt(se² + sd²)        se: of the value; sd: prediction error of one more draw of the null

    Degrees of freedom by Welch and Satterthwaite. The variance over draws is thereby in the p-value, so that models
    which are draws of the null themselves are rarely supported or refuted. p-values are two-sided, and 1 on the other
    side.
    """
    value, low, high, null, null_high, null_freedom = _fields(
        rows, "value", "low", "high", "null", "null_high", "null_freedom"
    )
    freedom = _freedom(rows)
    null_freedom = null_freedom.nan_to_num(math.inf)  # bands of normal distributions
    variance = (facing(value, low, high, null) / student_quantile(freedom)).square()
    null_variance = ((null_high - null) / student_quantile(null_freedom)).square()
    total = variance + null_variance
    welch = total.square() / (variance.square() / freedom + null_variance.square() / null_freedom)
    p = student_p((value - null) / total.sqrt(), welch)
    above, below = (torch.where((side > 0) | p.isnan(), p, 1.0) for side in (value - null, null - value))
    return _Tests(above, below, total.sqrt(), welch)


def describe(
    findings: Sequence[Finding], quantity: str, *, details: Sequence[Detail] = (), remarks: Sequence[Remark] = ()
) -> Judgement:
    """Judgement without a test: the medians of a quantity, details and remarks."""
    none = [False] * sum(f.quantity == quantity for f in findings)
    described = _with_verdicts(findings, quantity, none, none)
    return graded(counted(described, quantity, details=details, remarks=remarks), DESCRIPTIVE)


def count(findings: Sequence[Finding], quantity: str) -> Counted:
    """Counts of the verdicts on a quantity, with medians and the majority verdict."""
    rows = _applicable(findings, quantity)
    supported, refuted = (sum(f.verdict == v for f in rows) for v in ("supported", "refuted"))
    verdict: Ruling = "inconclusive" if rows else "not applicable"
    if 2 * supported > len(rows):
        verdict = "supported"
    elif 2 * refuted > len(rows):
        verdict = "refuted"
    return Counted(verdict, supported, refuted, len(rows), median(f.value for f in rows), median(f.null for f in rows))


def conclude(
    judged: Judged, quantity: str, *, details: Sequence[Detail] = (), remarks: Sequence[Remark] = ()
) -> Judgement:
    """Judgement of the model: a test that more than half of the judged rows are beyond the bound, at level LEVEL.

    Details and remarks follow, with the p-value of the verdict and the effect that it detects: if all of n rows have
    it, each is found with probability POWER at the level of the smallest of the n - floor(n / 2) p-values of the test.
    """
    judgement = counted(judged.findings, quantity, details=details, remarks=remarks)
    if not judgement.judged:
        return judgement
    rows = [f for f in judged.findings if f.quantity == quantity]
    tested = [i for i, f in enumerate(rows) if f.verdict != "not applicable"]
    supports, refutes = (majority_p_value(p[tested].nan_to_num(1.0)) for p in (judged.supports, judged.refutes))
    verdict: Ruling = "supported" if supports <= LEVEL else "refuted" if refutes <= LEVEL else "inconclusive"
    strictest = LEVEL / (len(tested) - len(tested) // 2)
    effect = median(judged.detectable(strictest)[tested].tolist())
    tests = (Detail(MAJORITY, min(supports, refutes)), Detail(judged.key, effect))
    return judgement._replace(verdict=verdict, details=(*judgement.details, *tests))


def counted(
    findings: list[Finding], quantity: str, *, details: Sequence[Detail] = (), remarks: Sequence[Remark] = ()
) -> Judgement:
    """Judgement by the number of rows with each verdict: medians and counts, details and remarks.

    Without judged rows the claim is not applicable, and the one remark is NOTHING_MEASURED.
    """
    counts = count(findings, quantity)
    if not counts.judged:
        return Judgement(findings, "not applicable", quantity, remarks=(Remark(NOTHING_MEASURED),))
    return Judgement(
        findings, counts.verdict, quantity, counts.value, null=counts.null, judged=counts.judged,
        supported=counts.supported, refuted=counts.refuted, details=tuple(details), remarks=tuple(remarks),
    )  # fmt: skip


def _applicable(findings: Sequence[Finding], quantity: str) -> list[Finding]:
    return [f for f in findings if f.quantity == quantity and f.verdict not in ("", "not applicable")]


def median(values: Iterable[float]) -> float:
    """Median without NaN; NaN of nothing."""
    numbers = [v for v in values if not math.isnan(v)]
    return statistics.median(numbers) if numbers else math.nan


def median_detail(key: str, findings: Sequence[Finding], quantity: str) -> Detail:
    """Medians of the values and null values of a quantity."""
    rows = [f for f in findings if f.quantity == quantity]
    return Detail(key, median(f.value for f in rows), null=median(f.null for f in rows))


def measured(layer: str, quantity: str, estimate: Estimate, tokens: Tensor | float) -> list[Measured]:
    """One row for each head of an estimate [h], or one row for the layer if the estimate is a scalar."""
    value, low, high, freedom = (t.detach().double().cpu().reshape(-1).tolist() for t in estimate[:4])
    count = torch.as_tensor(tokens).detach().double().cpu().expand(len(value)).tolist()
    heads: Sequence[int | None] = [None] if estimate.value.ndim == 0 else range(len(value))
    replicates = [None] * len(value) if estimate.replicates is None else _by_row(estimate.replicates, len(value))
    return [
        Measured(layer, head, quantity, v, a, b, int(n), df, r)
        for head, v, a, b, n, df, r in zip(heads, value, low, high, count, freedom, replicates, strict=True)
    ]


def _by_row(replicates: Float[Tensor, "*s r"], rows: int) -> Iterable[Float[Tensor, " r"] | None]:
    """Replicates of each row in float32, None if they are unknown."""
    flat = replicates.detach().float().cpu().reshape(rows, -1)
    return flat.unbind() if flat.shape[1] else [None] * rows


def median_interval(rows: Sequence[Measured]) -> tuple[float, float]:
    """Confidence interval of the median of values whose replicates are of the same documents; NaN without replicates.

    Values of weights alone are constant over replicates.
    """
    rows = [m for m in rows if not math.isnan(m.value)]
    counts = {0 if m.replicates is None else len(m.replicates) for m in rows if m.low != m.high}
    if not rows or len(counts) > 1 or 0 in counts:
        return math.nan, math.nan
    values = torch.tensor([m.value for m in rows], dtype=torch.float64)
    if not counts:
        return (value := median(values.tolist())), value
    draws = [m.replicates if m.low != m.high else values.new_full((*counts,), m.value) for m in rows]
    freedom = min(m.freedom for m in rows if m.low != m.high)
    estimate = median_estimate(values, torch.stack(draws), values.new_tensor(freedom))  # type: ignore[arg-type]
    return float(estimate.low), float(estimate.high)


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


def random_band(layer: str, head: int | None, quantity: str, draws: Float[Tensor, " m"]) -> Measured:
    """Null value and 95 % prediction band of one more draw, from the draws of a null."""
    mean, arm = (float(t) for t in prediction_band(draws.double()))
    return Measured(layer, head, quantity, mean, mean - arm, mean + arm, freedom=len(draws) - 1.0)


def matched_null(baseline: Baseline | None, quantities: Container[str]) -> list[Measured]:
    """Null values from the matched baseline: mean and 95 % prediction band of one more draw.

        mean ± t_.975(m - 1) sd sqrt(1 + 1 / m)      over the m draws with a finite value for this layer and head

    The band includes the variance over rotations and over samples of windows. Fewer than two draws have no
    band.
    """
    return _bands(baseline.matched if baseline is not None else (), quantities)


def rescaled_null(values: Sequence[Measured], baseline: Baseline | None, names: Mapping[str, str]) -> list[Measured]:
    """Null values of quantities, as further quantities: random queries of equal logit variance, with their band.

        value + mean ± t_.975(m - 1) sd sqrt(1 + 1 / m)      mean, sd: of the differences of m draws to the model itself

    Both are measured on the windows of the draw, so that windows that differ from each other do not widen the band.
    """
    known = {(m.layer, m.head, m.quantity): m.value for m in values}
    rows = []
    for m in _bands(baseline.rescaled if baseline is not None else (), names):
        value = known.get((m.layer, m.head, m.quantity), math.nan)
        shifted = m._replace(value=value + m.value, low=value + m.low, high=value + m.high)
        rows.append(shifted._replace(quantity=names[m.quantity]))
    return rows


def _bands(draws: Iterable[Iterable[Measured]], quantities: Container[str]) -> list[Measured]:
    values: dict[tuple[str, int | None, str], list[float]] = defaultdict(list)
    for m in chain.from_iterable(draws):
        if m.quantity in quantities and math.isfinite(m.value):
            values[m.layer, m.head, m.quantity].append(m.value)
    several = {place: torch.tensor(each, dtype=torch.float64) for place, each in values.items() if len(each) > 1}
    return [random_band(*place, each) for place, each in several.items()]


def band(expected: float, deviation: float) -> tuple[float, float, float]:
    """Mean and ends of the 95 % band of a normal null distribution."""
    return expected, expected - NORMAL * deviation, expected + NORMAL * deviation


def outside(findings: Sequence[Finding]) -> list[bool]:
    """Findings whose values differ from their null values, by a two-sided test at FDR 5 %."""
    rejected: list[bool] = benjamini_hochberg(torch.minimum(*against_null(findings))).tolist()
    return rejected


def beyond_the_null(finding: Finding, least: float) -> Bounds:
    """Bounds beyond ±least and beyond the band of the null; without a null nothing is supported or refuted."""
    if math.isnan(finding.null_low) or math.isnan(finding.null_high):
        return Bounds(math.inf, -math.inf)
    return Bounds(max(least, finding.null_high), min(-least, finding.null_low))


def _p_values(findings: Sequence[Finding], bounds: Sequence[float], side: float) -> Tensor:
    """p-values of the bounds, 1 where the interval contains the bound or lies on the other side, NaN without one."""
    value, low, high = _fields(findings, "value", "low", "high")
    bound = torch.tensor(bounds, dtype=torch.float64)
    near = low if side > 0 else high
    return torch.where(side * (near - bound) <= 0, 1.0, p_values(value, low, high, _freedom(findings), bound))


def _fields(findings: Sequence[Finding], *names: str) -> tuple[Float[Tensor, " n"], ...]:
    """Fields of findings as tensors, in float64."""
    return tuple(torch.tensor([getattr(f, name) for f in findings], dtype=torch.float64) for name in names)


def _freedom(findings: Sequence[Finding]) -> Tensor:
    """Degrees of freedom of the intervals; infinite for values without sampling error, of all groups if unknown."""
    freedom = [math.inf if f.low == f.high else f.freedom for f in findings]
    return torch.tensor(freedom, dtype=torch.float64).nan_to_num(GROUPS - 1.0, posinf=math.inf)
