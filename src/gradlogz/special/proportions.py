"""Proportions with their 95 % confidence intervals.

    share_of(number, total)   Wilson's interval: the p with (number / total - p)² = z² p (1 - p) / total     [wilson27]

Law: tests/tracking/test_tracks_are_what_the_filters_say.py.
"""

import math
from typing import NamedTuple

NORMAL_QUANTILE = 1.959963984540054  # 97.5 %


class Share(NamedTuple):
    """A proportion, number / total, with its 95 % confidence interval.   [wilson27]"""

    number: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The proportion; NaN if the total is 0."""
        return self.number / self.total if self.total else math.nan


def share_of(number: int, total: int) -> Share:
    """The proportion number / total with Wilson's interval, which is valid for small totals too.

    >>> [round(end, 2) for end in share_of(4, 4)[2:]]
    [0.51, 1.0]
    """
    if total == 0:
        return Share(0, 0, 0.0, 1.0)
    z, p = NORMAL_QUANTILE, number / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return Share(number, total, centre - half, centre + half)
