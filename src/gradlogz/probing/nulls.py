"""Nulls that need no other model: what values of matrices are under random rotations.

    band       mean ± z_.975 sd
    p          2 Phi(-|z|),   z = z_.975 (value - null) / (null_high - null)         of a value without sampling error

Read next: predictions/tie.py, predictions/qk_geometry.py.
"""

import math
from collections.abc import Sequence

import torch

from .._typing import Float, Tensor
from .findings import Finding
from .statistics import benjamini_hochberg

NORMAL = 1.959963984540054  # quantile .975


def band(expected: float, deviation: float) -> tuple[float, float, float]:
    """A null with the ends of its band of 95 %, of a normal law."""
    return expected, expected - NORMAL * deviation, expected + NORMAL * deviation


def outside(findings: Sequence[Finding]) -> list[bool]:
    """Which values stand apart from their nulls, by Benjamini and Hochberg at 5 %; the sides are not told apart."""
    z = [NORMAL * (f.value - f.null) / (f.null_high - f.null) if f.null_high > f.null else math.nan for f in findings]
    p = torch.erfc(torch.tensor(z, dtype=torch.float64).abs() / math.sqrt(2))
    found: list[bool] = benjamini_hochberg(p).tolist()
    return found


def centred(W: Float[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """(I - 11ᵀ/D) W on the axis of the stream: what a norm that centres can see."""
    return W - W.mean(axis, keepdim=True)
