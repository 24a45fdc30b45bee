"""Confidence and prediction intervals.

    band_of_draws      [X_(k), X_(m+1-k)],  k = (m + 1) (1 - level) / 2    contains one more draw; any distribution
    band_of_mean       mean ± t s / sqrt(m),  t of Student with m - 1      contains the mean; normal distribution
    bootstrap_clouds   n tokens of a cloud, drawn with replacement                                          [efron79]

Read next: gaussian_null.py (draws under the null), evolution.py (intervals over time).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .._errors import InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from ..special.distributions import student_quantile

PIECE = 1 << 22  # largest number of elements held at once


class ConfidenceBand(NamedTuple):
    """An interval from low to high with a given coverage, and its centre (median or mean)."""

    low: Float[Tensor, "*s"]
    middle: Float[Tensor, "*s"]
    high: Float[Tensor, "*s"]

    def holds(self, value: Float[Tensor, "*s"]) -> Tensor:
        """True where a value lies in the interval, ends included."""
        return (self.low <= value) & (value <= self.high)


def band_of_draws(draws: Float[Tensor, "m *s"], *, level: float) -> ConfidenceBand:
    """Prediction interval from order statistics: contains one more draw with probability `level` or more.

    It holds for every distribution: all orders of m + 1 exchangeable numbers are equally likely, so [X_(k), X_(m+1-k)]
    contains one more with probability 1 - 2 k / (m + 1), or more if there are ties. The middle is the median.
    """
    m = draws.shape[0]
    least = math.ceil(2 / (1 - level) - 1 - 1e-9) if 0 < level < 1 else 0
    if not 0 < level < 1 or m < least:
        problem = f"level must be in (0, 1), with at least 2 / (1 - level) - 1 draws, got level={level} and {m} draws"
        remedy = f"Take {max(least, 39)} draws or more." if least else "Pass a probability, such as 0.95."
        raise InputValueError("band_of_draws", "level", problem, remedy)
    k = int((m + 1) * (1 - level) / 2 + 1e-9)
    ordered = draws.sort(0).values
    return ConfidenceBand(ordered[k - 1], draws.quantile(0.5, 0), ordered[m - k])


def band_of_mean(draws: Float[Tensor, "m *s"], *, level: float) -> ConfidenceBand:
    """Student's confidence interval of the mean; the middle is the sample mean.

    Exact for normal draws, approximate otherwise.
    """
    m = draws.shape[0]
    if not 0 < level < 1 or m < 2:
        problem = f"level must be in (0, 1), with at least two draws, got level={level} and {m} draws"
        remedy = "Evolve a batch of clouds, or bootstrap one."
        raise InputValueError("band_of_mean", "level", problem, remedy)
    t = float(student_quantile(torch.tensor(m - 1.0), level))
    half = t * draws.std(0) / math.sqrt(m)
    return ConfidenceBand(draws.mean(0) - half, draws.mean(0), draws.mean(0) + half)


def bootstrap_clouds(
    cloud: Float[Tensor, "n d"], draws: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "m n d"]:
    """Bootstrap samples of a cloud, [m, n, d]: n tokens drawn with replacement.

    Evolve them as a batch to measure the sampling variability of an observable. Repeated tokens share their attention
    weight, so self weights are lower than in a new cloud.
    """
    check_floats("bootstrap_clouds", cloud=cloud)
    if cloud.ndim != 2 or draws < 1:
        problem = f"cloud must be [n, d] and draws positive, got shape {shape_of(cloud)} and draws={draws}"
        raise InputValueError("bootstrap_clouds", "cloud", problem, "Pass one cloud of the batch.")
    n = cloud.shape[0]
    where = torch.device("cpu") if generator is None else generator.device
    return cloud[torch.randint(n, (draws, n), generator=generator, device=where).to(cloud.device)]


def in_pieces(draws: int, size: int) -> Iterator[int]:
    """Yield batch sizes that sum to `draws`, for clouds of `size` numbers, so that memory stays bounded."""
    piece = max(1, PIECE // max(size, 1))
    for first in range(0, draws, piece):
        yield min(piece, draws - first)
