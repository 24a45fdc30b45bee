"""Student's 95 % confidence intervals of means over independent runs.

    mean ± t s / sqrt(n)        t: quantile of Student's distribution with n - 1 degrees of freedom
    difference of means         Welch's interval, with his degrees of freedom
    mean of independent means   likewise, of sum_i m_i / k

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
    error: float
    freedom: float
    number: int

    def minus(self, other: "Interval") -> "Interval":
        """Difference of two independent means."""
        return _combined([self, other], [1.0, -1.0])


def student(values: list[float]) -> Interval:
    """Mean and CI of at least two independent values.

    >>> student([1.0, 2.0, 3.0]).mean
    2.0
    """
    n = len(values)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return _interval(mean, deviation / math.sqrt(n), n - 1, n)


def mean_of(intervals: list[Interval]) -> Interval:
    """Mean of independent means, such as those of several primes; every one has the same weight.

    >>> mean_of([student([1.0, 2.0]), student([3.0, 4.0, 8.0])]).mean
    3.25
    """
    return _combined(intervals, [1 / len(intervals)] * len(intervals))


def _combined(intervals: list[Interval], weights: list[float]) -> Interval:
    """Weighted sum of independent means, with the degrees of freedom of Welch and Satterthwaite."""
    parts = [(w * each.error) ** 2 for w, each in zip(weights, intervals, strict=True)]
    squares = sum(part**2 / each.freedom for part, each in zip(parts, intervals, strict=True))
    freedom = sum(parts) ** 2 / squares if squares > 0 else 1.0
    mean = sum(w * each.mean for w, each in zip(weights, intervals, strict=True))
    return _interval(mean, math.sqrt(sum(parts)), freedom, sum(each.number for each in intervals))


def _interval(mean: float, error: float, freedom: float, number: int) -> Interval:
    arm = float(student_quantile(torch.tensor(freedom, dtype=torch.float64))) * error
    return Interval(mean, mean - arm, mean + arm, error, freedom, number)
