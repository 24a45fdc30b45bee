"""From values beside their nulls to verdicts, the same way for every claim about heads or layers.

    supported    the interval lies beyond `supports` on the side that the claim says
    refuted      the interval lies beyond `refutes` on the other side
    undecided    neither, or there is no interval; not applicable where nothing was counted

Both only if the p-value of that bound stands in the procedure of Benjamini and Hochberg at 5 %, over all heads of the
model and for each of the two questions by itself. Where an interval came from is no longer known here: p-values are
those of Student's law with the fewest degrees of freedom that an interval has, one less than there are groups. The
model: supported if more than half of its heads that can be judged are, refuted likewise, else undecided.

Values of matrices alone have nulls that need no other model, those of random rotations:

    band       mean ± z_.975 sd
    p          2 Phi(-|z|),   z = (value - null) / sd        of both: the value's is that of its interval, 0 for a point

Read next: predictions/entropy.py, predictions/tie.py.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import torch

from .._typing import Tensor
from ..special.distributions import student_p, student_quantile
from .runs.judgement import Measured, Ruling
from .runs.records import Finding
from .statistics import GROUPS, Estimate, Sums, benjamini_hochberg, bootstrap

NORMAL = 1.959963984540054  # quantile .975


class Bounds(NamedTuple):
    """What the interval of a finding must pass for the claim, and against it."""

    supports: float
    refutes: float


class Counted(NamedTuple):
    """The judged rows of a model: their middle values, how many there are of each verdict, and which it is for all."""

    verdict: Ruling
    supported: int
    refuted: int
    judged: int
    value: float
    null: float

    @property
    def note(self) -> str:
        """The sentence about the correction."""
        return "" if not self.judged else (
            f"With Benjamini and Hochberg at 5 %: {self.supported} for and {self.refuted} against, of {self.judged}."
        )  # fmt: skip


def judge(
    findings: Sequence[Finding], quantity: str, bounds: Callable[[Finding], Bounds], *, small: bool = False
) -> list[Finding]:
    """The findings, those of the quantity with verdicts; with `small` the claim is that values are small."""
    of = [f for f in findings if f.quantity == quantity]
    sign = -1.0 if small else 1.0
    passed = []
    for side, name in ((sign, "supports"), (-sign, "refutes")):
        passed.append(benjamini_hochberg(_p_values(of, [getattr(bounds(f), name) for f in of], side)).tolist())
    rulings = iter(zip(*passed, strict=True))
    judged = []
    for f in findings:
        if f.quantity == quantity:
            supported, refuted = next(rulings)
            known = "supported" if supported else "refuted" if refuted else "undecided"
            f = f._replace(verdict=known if f.tokens else "not applicable")
        judged.append(f)
    return judged


def count(findings: Sequence[Finding], quantity: str) -> Counted:
    """How the rows of a quantity divide."""
    of = [f for f in findings if f.quantity == quantity and f.verdict not in ("", "not applicable")]
    supported, refuted = (sum(f.verdict == v for f in of) for v in ("supported", "refuted"))
    verdict: Ruling = "undecided" if of else "not applicable"
    if 2 * supported > len(of):
        verdict = "supported"
    elif 2 * refuted > len(of):
        verdict = "refuted"
    return Counted(verdict, supported, refuted, len(of), middle(f.value for f in of), middle(f.null for f in of))


def middle(values: Iterable[float]) -> float:
    """The median of those that are numbers; NaN of none."""
    known = [v for v in values if not math.isnan(v)]
    return median(known) if known else math.nan


def also_random(findings: Sequence[Finding], quantity: str, bound: float, *, small: bool = False) -> str:
    """A sentence where what supports a claim is also so with random weights, which are the null of this quantity."""
    of = [f for f in findings if f.quantity == quantity and f.verdict == "supported"]
    shared = sum(f.null < bound if small else f.null > bound for f in of)
    if not shared:
        return ""
    return f" Of the {len(of)} that support it {shared} would with random weights too: there it is no work of training."


def measured(layer: str, quantity: str, estimate: Estimate, tokens: Tensor | float) -> list[Measured]:
    """One row for each head of an estimate [h], or one for the layer of an estimate without dimensions."""
    value, low, high = (t.detach().double().cpu().reshape(-1).tolist() for t in estimate[:3])
    count = torch.as_tensor(tokens).detach().double().cpu().expand(len(value)).tolist()
    heads: Sequence[int | None] = [None] if estimate.value.ndim == 0 else range(len(value))
    return [
        Measured(layer, head, quantity, v, a, b, int(n))
        for head, v, a, b, n in zip(heads, value, low, high, count, strict=True)
    ]


def bootstrapped(sums: Mapping[str, Sums], function: Callable[[Tensor], Tensor]) -> dict[str, Estimate]:
    """function(totals) with its interval for the heads of every layer, [h], all layers at once."""
    if not sums:
        return {}
    found = bootstrap(function, Sums(torch.cat([s.totals for s in sums.values()], 1)))
    parts = [t.split([s.totals.shape[1] for s in sums.values()]) for t in found]
    return {layer: Estimate(*part) for layer, part in zip(sums, zip(*parts, strict=True), strict=True)}


def absent(layer: str, quantity: str) -> Measured:
    """The row of a layer of which nothing can be counted."""
    return Measured(layer, None, quantity, math.nan)


def random_band(layer: str, quantity: str, values: Tensor) -> list[Measured]:
    """What a head of a random twin is expected to have, and the band in which one more of them would lie.

        mean ± t_.975(h - 1) sd sqrt(1 + 1 / h)      over the h heads of the layer

    Heads of random weights differ by chance alone, so that the band holds what another draw of the weights would do.
    """
    h = len(values)
    mean = values.double().mean()
    sd = values.double().std() if h > 1 else values.new_tensor(0.0).double()
    arm = _quantile(max(h - 1, 1)) * float(sd) * math.sqrt(1 + 1 / h)
    return [Measured(layer, i, quantity, float(mean), float(mean) - arm, float(mean) + arm) for i in range(h)]


def band(expected: float, deviation: float) -> tuple[float, float, float]:
    """A null with the ends of its band of 95 %, of a normal law."""
    return expected, expected - NORMAL * deviation, expected + NORMAL * deviation


def outside(findings: Sequence[Finding]) -> list[bool]:
    """Which values stand apart from their nulls, by Benjamini and Hochberg at 5 %; the sides are not told apart."""
    value, low, null, high = (
        torch.tensor([getattr(f, name) for f in findings], dtype=torch.float64)
        for name in ("value", "low", "null", "null_high")
    )
    own = (value - low) / student_quantile(torch.tensor(GROUPS - 1.0))
    z = (value - null) / (own.square() + ((high - null) / NORMAL).square()).sqrt()
    found: list[bool] = benjamini_hochberg(torch.erfc(z.abs() / math.sqrt(2))).tolist()
    return found


def _p_values(findings: Sequence[Finding], bounds: Sequence[float], side: float) -> Tensor:
    """The p-values of bounds, 1 if an interval holds it or lies on the wrong side, NaN if there is no interval."""
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
