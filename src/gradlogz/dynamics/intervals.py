"""Where a number lies, with a given probability.

    of draws   [X_(k), X_(m+1-k)],  k = (m + 1) (1 - level) / 2     where one more draw lies; exact for every law
    of mean    mean ± t s / sqrt(m),  t of Student with m - 1       where the mean of the law lies; for a normal one
    bootstrap  n tokens of a cloud, with replacement                draws from one cloud: the bootstrap       [efron79]

Read next: gaussian_null.py (draws from a Gaussian), evolution.py (bands over time).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .._errors import InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from ..special.distributions import student_quantile

PIECE = 1 << 22  # numbers that are held at once


class ConfidenceBand(NamedTuple):
    """Where a number lies with a given probability: between low and high, about the middle."""

    low: Float[Tensor, "*s"]
    middle: Float[Tensor, "*s"]
    high: Float[Tensor, "*s"]

    def holds(self, value: Float[Tensor, "*s"]) -> Tensor:
        """Whether each value lies in it, ends included."""
        return (self.low <= value) & (value <= self.high)


def band_of_draws(draws: Float[Tensor, "m *s"], *, level: float) -> ConfidenceBand:
    """Where one more draw lies with at least this probability, whatever the law; the middle is the median.

    Order statistics, equally many on both sides: m + 1 exchangeable numbers are in each order equally often, so that
    [X_(k), X_(m+1-k)] holds one more with probability 1 - 2 k / (m + 1), no less with ties.
    """
    m = draws.shape[0]
    least = math.ceil(2 / (1 - level) - 1 - 1e-9) if 0 < level < 1 else 0
    if not 0 < level < 1 or m < least:
        condition = "level must be in (0, 1) and draws at least 2 / (1 - level) - 1"
        remedy = f"Take {max(least, 39)} draws or more." if least else "A level is a probability, such as 0.95."
        raise InputValueError("band_of_draws", "level", f"{condition}, got {level} and {m} draws", remedy)
    k = int((m + 1) * (1 - level) / 2 + 1e-9)
    ordered = draws.sort(0).values
    return ConfidenceBand(ordered[k - 1], draws.quantile(0.5, 0), ordered[m - k])


def band_of_mean(draws: Float[Tensor, "m *s"], *, level: float) -> ConfidenceBand:
    """Where the mean of the law of the draws lies, by Student's interval; the middle is their mean.

    Exact for a normal law, near for others when there are many draws.
    """
    m = draws.shape[0]
    if not 0 < level < 1 or m < 2:
        condition = "level must be in (0, 1) and draws at least 2"
        remedy = "Evolve a batch of clouds, or bootstrap one."
        raise InputValueError("band_of_mean", "level", f"{condition}, got {level} and {m} draws", remedy)
    t = float(student_quantile(torch.tensor(m - 1.0), level))
    half = t * draws.std(0) / math.sqrt(m)
    return ConfidenceBand(draws.mean(0) - half, draws.mean(0), draws.mean(0) + half)


def bootstrap_clouds(
    cloud: Float[Tensor, "n d"], draws: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "m n d"]:
    """Clouds of n tokens drawn from those of one cloud, with replacement: the bootstrap.

    Evolve them as a batch: how much they differ is how much is owed to the choice of the tokens. A token that is drawn
    twice shares its weight with itself, so that self weights are lower than in a new cloud.
    """
    check_floats("bootstrap_clouds", cloud=cloud)
    if cloud.ndim != 2 or draws < 1:
        condition, fact = "cloud must be [n, d] and draws positive", f"shape {shape_of(cloud)} and {draws}"
        raise InputValueError(
            "bootstrap_clouds", "cloud", f"{condition}, got {fact}", "A batch of clouds has its own spread."
        )
    n = cloud.shape[0]
    where = torch.device("cpu") if generator is None else generator.device
    return cloud[torch.randint(n, (draws, n), generator=generator, device=where).to(cloud.device)]


def in_pieces(draws: int, size: int) -> Iterator[int]:
    """How many clouds of so many numbers to draw at a time, so that memory stays bounded."""
    piece = max(1, PIECE // max(size, 1))
    for first in range(0, draws, piece):
        yield min(piece, draws - first)
