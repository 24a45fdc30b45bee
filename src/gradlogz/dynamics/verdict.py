"""What has become of a cloud, in one word.

    blow-up      it left the finite numbers
    collapsed    one cluster: tokens are within 5 % of the radius of its middle
    clusters     several
    frozen       tokens give themselves more than half of their weight                               [theory 10.3]
    gaussian     not to be told from a Gaussian of the same size, by sliced Wasserstein distance and kurtosis
    other        none of these

Read next: observables.py (the numbers), gaussian_null.py (what a Gaussian shows).
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
    """What has become of a cloud, and the numbers that say so.

    kind: "blow-up", "collapsed" (one cluster), "clusters", "frozen" (tokens attend to themselves), "gaussian" (not to
        be told from one of the same size), or "other".
    """

    kind: str
    evidence: dict[str, float]


def verdict_of(x: Float[Tensor, "n d"], seen: AttentionRecord, blown: int) -> CloudVerdict:
    """What has become of one cloud."""
    n, d = x.shape
    if blown >= 0:
        return CloudVerdict("blow-up", {"step": blown, "radius": float(radius(x, seen, None))})
    evidence = {
        "clusters": float(clusters(x, seen, None)),
        "within": float(within(x, seen, None)),
        "mean_fraction": float(mean_fraction(x, seen, None)),
        "effective_rank": float(effective_rank(x, seen, None)),
        "self_weight": float(self_weight(x, seen, None)),
    }
    if n == 1 or (evidence["within"] < LINK and evidence["clusters"] <= min(n, SAMPLE) / 5):
        return CloudVerdict("collapsed" if evidence["clusters"] == 1 else "clusters", evidence)
    if evidence["self_weight"] > 0.5:
        return CloudVerdict("frozen", evidence)
    evidence["sliced_wasserstein"] = float(sliced_wasserstein(x, seen, None))
    evidence["sliced_wasserstein of a gaussian"] = _farthest_gaussian(n, d, seen)
    evidence["kurtosis"] = float(kurtosis(x, seen, None))
    # Mardia's: kurtosis of n tokens of a Gaussian has variance 8 d (d + 2) / n.
    usual = abs(evidence["kurtosis"]) < 3 * math.sqrt(8 * d * (d + 2) / n)
    if usual and evidence["sliced_wasserstein"] <= evidence["sliced_wasserstein of a gaussian"]:
        return CloudVerdict("gaussian", evidence)
    return CloudVerdict("other", evidence)


def _farthest_gaussian(n: int, d: int, seen: AttentionRecord) -> float:
    """What `sliced_wasserstein` stays below for a Gaussian cloud of n tokens, 99 times in 100.

    It does not depend on the moments, so that one cloud of each size serves for all.
    """
    generator = torch.Generator().manual_seed(1)
    found = [
        sliced_wasserstein(torch.randn(k, n, d, generator=generator, dtype=torch.float64), seen, None)
        for k in in_pieces(199, n * max(d, DIRECTIONS))
    ]
    return float(band_of_draws(torch.cat(found), level=0.98).high)
