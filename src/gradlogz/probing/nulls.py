"""Nulls that need no other model: what values of matrices are under random rotations.

    band       mean ± z_.975 sd
    p          2 Phi(-|z|),   z = (value - null) / sd        of both: the value's is that of its interval, 0 for a point

Read next: predictions/tie.py, predictions/qk_geometry.py.
"""

import math
from collections.abc import Sequence

import torch

from .._typing import Float, Tensor
from .findings import Finding
from .statistics import GROUPS, benjamini_hochberg, student_quantile

NORMAL = 1.959963984540054  # quantile .975


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


def centred(W: Float[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """(I - 11ᵀ/D) W on the axis of the stream: what a norm that centres can see."""
    return W - W.mean(axis, keepdim=True)
