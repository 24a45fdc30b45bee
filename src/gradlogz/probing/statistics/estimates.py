"""Values with intervals, and what they say against a null.

    p = P(|T| >= t(null))                                    Student's law (../../special/distributions.py)
    t(null) = t_.975 (value - null) / (value - low)          below the value; above it (null - value) / (high - value)

An interval of 95 % holds exactly the nulls whose p-value is above 0.05, also where it is not symmetric.

Read next: sums.py and comoments.py, where the intervals come from.
"""

from typing import NamedTuple

import torch

from ..._errors import InputValueError, sentence
from ..._typing import Bool, Float, Tensor
from ...special.distributions import student_p, student_quantile

LEVEL = 0.95


class Estimate(NamedTuple):
    """A value with its interval of 95 % and the degrees of freedom behind it; ends are NaN where nothing is known."""

    value: Float[Tensor, "*s"]
    low: Float[Tensor, "*s"]
    high: Float[Tensor, "*s"]
    freedom: Float[Tensor, "*s"]


def p_value(estimate: Estimate, null: float | Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The two-sided p-value of a null value; NaN where there is no interval, 1 where value and null are one."""
    value, low, high, freedom = estimate
    null = torch.as_tensor(null, dtype=value.dtype, device=value.device)
    distance = (value - null).abs()
    arm = torch.where(null < value, value - low, high - value)
    t = student_quantile(freedom) * distance / arm
    return student_p(torch.where((distance == 0) & ~arm.isnan(), 0.0, t), freedom)


def permutation_p(
    value: Float[Tensor, "*s"], null: Float[Tensor, "draws *s"], *, sides: int = 1
) -> Float[Tensor, "*s"]:
    """(1 + #{null >= value}) / (1 + draws): never 0, and valid for any number of draws  [phipson10].

    With two sides, twice the smaller of both ends. NaN where the value or a draw is.
    """
    if sides not in (1, 2):
        raise InputValueError(
            sentence("permutation_p", "sides must be 1 or 2", f"{sides}", "1 asks for large values only.")
        )
    above = (1 + (null >= value).sum(0).double()) / (1 + len(null))
    if sides == 2:
        below = (1 + (null <= value).sum(0).double()) / (1 + len(null))
        above = (2 * torch.minimum(above, below)).clamp(max=1.0)
    return torch.where(value.isnan() | null.isnan().any(0), torch.nan, above)


def benjamini_hochberg(p_values: Float[Tensor, "..."], level: float = 0.05) -> Bool[Tensor, "..."]:
    """Which of all hypotheses to reject so that at most `level` of the rejected are expected to be true  [benjamini95].

    Rejects the k smallest p-values, k the greatest with p_(k) <= level k / m. NaN is no test: it does not count in m.
    """
    p = p_values.flatten()
    tested = ~p.isnan()
    ordered = p.masked_fill(~tested, torch.inf).sort().values
    ranks = torch.arange(1, len(p) + 1, device=p.device, dtype=p.dtype)
    passed = ordered <= level * ranks / tested.sum().clamp(min=1)
    bound = ordered.masked_fill(~passed, -torch.inf).max() if len(p) else p.new_tensor(-torch.inf)
    return (tested & (p <= bound)).reshape(p_values.shape)
