"""Classify the final state of a cloud of tokens.

    blow-up      a coordinate became infinite or NaN
    collapsed    one cluster: its tokens lie within 5 % of the cloud's radius around their mean
    clusters     several such clusters
    frozen       the mean attention weight of a token on itself exceeds 1/2                          [theory 10.3]
    gaussian     sliced Wasserstein distance (whitened cloud to a standard Gaussian) and kurtosis are those of a
                 Gaussian cloud of equal size
    other        none of these

A verdict holds the numbers that decide it, each with its value under the null (a Gaussian cloud) where there is one.

Read next: observables.py (the numbers), gaussian_null.py (their null distributions).
"""

import math
from typing import NamedTuple

import torch

from .._typing import Float, Tensor
from .intervals import band_of_draws, in_pieces
from .observables import (
    DIRECTIONS,
    LINK,
    SAMPLE,
    AttentionRecord,
    clusters,
    effective_rank,
    kurtosis,
    mean_fraction,
    radius,
    self_weight,
    sliced_wasserstein,
    within,
)


class CloudVerdict(NamedTuple):
    """The kind of a cloud's final state, and the numbers that decide it.

    Attributes:
        kind: "blow-up", "collapsed" (one cluster), "clusters", "frozen" (tokens attend to themselves), "gaussian"
            (no significant difference from a Gaussian cloud of equal size) or "other".
        evidence: the observables that decide the kind. `sliced_wasserstein_null` is the 99 % quantile of
            `sliced_wasserstein` for a Gaussian cloud of equal size.
    """

    kind: str
    evidence: dict[str, float]


def cloud_verdict(x: Float[Tensor, "n d"], record: AttentionRecord, blow_up_step: int) -> CloudVerdict:
    """Classify one cloud; `blow_up_step` is -1 if all its coordinates stayed finite."""
    n, d = x.shape
    if blow_up_step >= 0:
        return CloudVerdict("blow-up", {"step": blow_up_step, "radius": float(radius(x, record, None))})
    evidence = {
        "clusters": float(clusters(x, record, None)),
        "within": float(within(x, record, None)),
        "mean_fraction": float(mean_fraction(x, record, None)),
        "effective_rank": float(effective_rank(x, record, None)),
        "self_weight": float(self_weight(x, record, None)),
    }
    if n == 1 or (evidence["within"] < LINK and evidence["clusters"] <= min(n, SAMPLE) / 5):
        return CloudVerdict("collapsed" if evidence["clusters"] == 1 else "clusters", evidence)
    if evidence["self_weight"] > 0.5:
        return CloudVerdict("frozen", evidence)
    evidence["sliced_wasserstein"] = float(sliced_wasserstein(x, record, None))
    evidence["sliced_wasserstein_null"] = _sliced_wasserstein_null(n, d, record)
    evidence["kurtosis"] = float(kurtosis(x, record, None))
    # Mardia: for n tokens of a Gaussian the kurtosis has variance 8 d (d + 2) / n.
    usual_kurtosis = abs(evidence["kurtosis"]) < 3 * math.sqrt(8 * d * (d + 2) / n)
    if usual_kurtosis and evidence["sliced_wasserstein"] <= evidence["sliced_wasserstein_null"]:
        return CloudVerdict("gaussian", evidence)
    return CloudVerdict("other", evidence)


def _sliced_wasserstein_null(n: int, d: int, record: AttentionRecord) -> float:
    """The 99 % quantile of `sliced_wasserstein` for n tokens of a Gaussian in d dimensions.

    The statistic is invariant to the mean and covariance, so the quantile depends on n and d alone.
    """
    generator = torch.Generator().manual_seed(1)
    draws = [
        sliced_wasserstein(torch.randn(k, n, d, generator=generator, dtype=torch.float64), record, None)
        for k in in_pieces(199, n * max(d, DIRECTIONS))
    ]
    return float(band_of_draws(torch.cat(draws), level=0.98).high)
