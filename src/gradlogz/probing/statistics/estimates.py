"""Values with confidence intervals from replicates, and control of the false discovery rate.

    bootstrap    low, high  = value - c (value - q_.025), value + c (q_.975 - value)      q: quantiles of 200 replicates
                 c          = sqrt(n / (n - 1)) t_.975(n - 1) / z_.975                     n - 1: degrees of freedom
    jackknife    value ± t_.975(G - 1) sqrt(sum_g (replicate_g - value)²)                  one replicate for each group
    p_(k) <= level k / m      k-th smallest of m p-values: rejected at false discovery rate `level`        [benjamini95]

A replicate depends on the names of documents alone: replicate i of two statistics, or of two models, has the same
weights of documents. A function of several statistics (a median over heads, a difference of two models) therefore has
the function of their replicates as its replicates, and from these its confidence interval.

Read next: sums.py and comoments.py (replicates), ../hypothesis_tests.py (p-values).
"""

import math
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Tensor
from ...special.distributions import student_p, student_quantile
from .hashing import GROUPS

LEVEL = 0.95


class Estimate(NamedTuple):
    """A value with its 95 % confidence interval and degrees of freedom; `low` and `high` are NaN if unknown.

    replicates: values in the 200 bootstrap samples of documents, or for the groups of the jackknife, whose squared
        distances from the value sum to the squared standard error. Of r = 8 groups those without tokens have the value
        itself; r < 8 if the numbers of the groups are unknown, and 0 without an interval. Replicates of all estimates
        of a run are of the same documents.
    """

    value: Float[Tensor, "*s"]
    low: Float[Tensor, "*s"]
    high: Float[Tensor, "*s"]
    freedom: Float[Tensor, "*s"]
    replicates: Float[Tensor, "*s r"] = None  # type: ignore[assignment]


def interval_of(
    value: Float[Tensor, "*s"], replicates: Float[Tensor, "*s r"], freedom: Float[Tensor, "*s"]
) -> Estimate:
    """Return a value with the confidence interval of its replicates, NaN below one degree of freedom."""
    t = student_quantile(freedom)
    if replicates.shape[-1] <= GROUPS:
        arm = t * (replicates - value.unsqueeze(-1)).square().sum(-1).sqrt()
        arm = arm if replicates.shape[-1] else torch.full_like(value, torch.nan)
        return Estimate(value, value - arm, value + arm, freedom, replicates)
    tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=value.dtype, device=value.device)
    low, high = torch.nanquantile(replicates, tails, -1)  # a replicate may contain no document
    z = math.sqrt(2) * torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)).item()
    c = ((freedom + 1) / freedom).sqrt() * t / z
    return Estimate(value, value - c * (value - low), value + c * (high - value), freedom, replicates)


def median_estimate(
    values: Float[Tensor, " h"], replicates: Float[Tensor, "h r"], freedom: Float[Tensor, ""]
) -> Estimate:
    """Return the median over heads with its confidence interval: that of the medians of aligned replicates."""
    return interval_of(_median(values.unsqueeze(-1)).squeeze(-1), _median(replicates), freedom)


def _median(values: Float[Tensor, "h r"]) -> Float[Tensor, " r"]:
    """Return the median over heads of each replicate."""
    return torch.nanquantile(values.double(), 0.5, 0)


def p_values(
    value: Float[Tensor, "*s"],
    low: Float[Tensor, "*s"],
    high: Float[Tensor, "*s"],
    freedom: Float[Tensor, "*#s"],
    bound: Float[Tensor, "*#s"] | float = 0.0,
) -> Float[Tensor, "*s"]:
    """Return two-sided p-values of value = bound, by Student's t with the standard error of the confidence interval.

    The standard error is the distance to the end of the interval that faces the bound, divided by the quantile.
    """
    t = student_quantile(freedom) * (value - bound).abs() / facing(value, low, high, bound)
    return torch.where(value == bound, 1.0, student_p(t, freedom))


def facing(
    value: Float[Tensor, "*s"], low: Float[Tensor, "*s"], high: Float[Tensor, "*s"], bound: Float[Tensor, "*#s"] | float
) -> Float[Tensor, "*s"]:
    """Return the distance of a value to the end of its confidence interval that faces a bound."""
    return torch.where(value > bound, value - low, high - value)


def prediction_band(draws: Float[Tensor, "m *s"]) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Return the mean of m draws and the arm of the 95 % prediction band of one more of them; 0 of a single draw.

    mean ± t_.975(m - 1) sd sqrt(1 + 1 / m)      of a normal distribution
    """
    m = len(draws)
    spread = draws.std(0) if m > 1 else torch.zeros_like(draws[0])
    quantile = student_quantile(torch.tensor(max(m - 1.0, 1.0), dtype=torch.float64)).to(draws)
    return draws.mean(0), quantile * spread * math.sqrt(1 + 1 / m)


def benjamini_hochberg(p_values: Float[Tensor, "..."], level: float = 0.05) -> Bool[Tensor, "..."]:
    """Return which hypotheses to reject at false discovery rate `level`  [benjamini95].

    Rejects the k smallest p-values, k the largest with p_(k) <= level k / m. NaN entries are not tests and do not count
    in m.
    """
    p = p_values.flatten()
    tested = ~p.isnan()
    ordered = p.masked_fill(~tested, torch.inf).sort().values
    ranks = torch.arange(1, len(p) + 1, device=p.device, dtype=p.dtype)
    passed = ordered <= level * ranks / tested.sum().clamp(min=1)
    bound = ordered.masked_fill(~passed, -torch.inf).max() if len(p) else p.new_tensor(-torch.inf)
    return (tested & (p <= bound)).reshape(p_values.shape)


def majority_p_value(p_values: Float[Tensor, " n"]) -> float:
    """Return the p-value of "at most half of the n hypotheses are false"; 1 of none  [benjamini08].

        min over i >= u of (n - u + 1) / (i - u + 1) p_(i)         u = floor(n / 2) + 1, p_(i) in ascending order

    This is Simes' test of the n - u + 1 largest p-values, for independent or positively dependent ones, as for
    `benjamini_hochberg`.
    """
    n = len(p_values)
    if not n:
        return 1.0
    largest = p_values.sort().values[n // 2 :]
    ranks = torch.arange(1, len(largest) + 1, dtype=p_values.dtype)
    return min(1.0, float((len(largest) / ranks * largest).min()))
