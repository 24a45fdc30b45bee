"""Student's 95 % confidence intervals of means over independent runs.

    mean ± t s / sqrt(n)        t: quantile of Student's distribution with n - 1 degrees of freedom
    difference of means         Welch's interval, with his degrees of freedom

Read next: metric/experiment.py, which uses them.
"""

import math
from typing import NamedTuple

import torch

from gradlogz.special.distributions import student_quantile


class Interval(NamedTuple):
    """Mean of independent values, and its 95 % CI."""

    mean: float
    low: float
    high: float
    deviation: float
    number: int

    def minus(self, other: "Interval") -> "Interval":
        """Difference of two independent means."""
        parts = [each.deviation**2 / each.number for each in (self, other)]
        error = math.sqrt(sum(parts))
        freedom = 1.0
        if error > 0:
            squares = (part**2 / (each.number - 1) for part, each in zip(parts, (self, other), strict=True))
            freedom = sum(parts) ** 2 / sum(squares)
        return _interval(self.mean - other.mean, error, freedom, self.number + other.number)


def student(values: list[float]) -> Interval:
    """Mean and CI of at least two independent values.

    >>> student([1.0, 2.0, 3.0]).mean
    2.0
    """
    n = len(values)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return _interval(mean, deviation / math.sqrt(n), n - 1, n, deviation)


def _interval(mean: float, error: float, freedom: float, number: int, deviation: float = math.nan) -> Interval:
    arm = float(student_quantile(torch.tensor(freedom, dtype=torch.float64))) * error
    return Interval(mean, mean - arm, mean + arm, deviation, number)
