"""Values with confidence intervals, and many p-values at once.

    p_(k) <= level k / m      of m p-values in ascending order: what is rejected at a false discovery rate [benjamini95]

Read next: sums.py and comoments.py, where the intervals come from; ../hypothesis_tests.py, where p-values do.
"""

from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Tensor

LEVEL = 0.95


class Estimate(NamedTuple):
    """A value with its interval of 95 % and the degrees of freedom behind it; ends are NaN where nothing is known."""

    value: Float[Tensor, "*s"]
    low: Float[Tensor, "*s"]
    high: Float[Tensor, "*s"]
    freedom: Float[Tensor, "*s"]


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
