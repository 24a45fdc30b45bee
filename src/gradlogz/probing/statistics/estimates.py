"""Values with confidence intervals, and control of the false discovery rate.

    p_(k) <= level k / m      k-th smallest of m p-values: rejected at false discovery rate `level`        [benjamini95]

Read next: sums.py and comoments.py (confidence intervals), ../hypothesis_tests.py (p-values).
"""

from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Tensor

LEVEL = 0.95


class Estimate(NamedTuple):
    """A value with its 95 % confidence interval and degrees of freedom; `low` and `high` are NaN if unknown."""

    value: Float[Tensor, "*s"]
    low: Float[Tensor, "*s"]
    high: Float[Tensor, "*s"]
    freedom: Float[Tensor, "*s"]


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
