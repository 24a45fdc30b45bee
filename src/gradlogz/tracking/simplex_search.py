"""Minimum of a function of a few numbers without derivatives: the simplex search of Nelder and Mead [nelder65].

    simplex      n + 1 points; the worst is reflected at the centre of the others, and the step is doubled where that
                 finds a new best point and halved where it finds none; if this fails, all points move towards the best
    converged    values of the simplex differ by less than the tolerance, in two searches in a row

Read next: level_fit.py, which maximises a likelihood with it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .._typing import Float, Tensor

RESTARTS = 6  # searches, each from the end of the one before: a simplex may become flat too early


class Minimum(NamedTuple):
    """Lowest point, its value, the number of evaluations, and whether the search converged."""

    point: list[float]
    value: float
    evaluations: int
    converged: bool


def minimum(
    function: Callable[[list[float]], float],
    start: Sequence[float],
    *,
    step: float = 0.5,
    tolerance: float = 1e-4,
    most: int = 1000,
) -> Minimum:
    """Search from a start, with first steps of this length; infinite values are avoided.

    >>> result = minimum(lambda p: (p[0] - 1) ** 2 + 10 * (p[1] - p[0] ** 2) ** 2, [0.0, 0.0], tolerance=1e-9)
    >>> [round(x, 3) for x in result.point], result.converged
    ([1.0, 1.0], True)
    """
    best, value, evaluations = list(start), math.inf, 0
    for _ in range(RESTARTS):
        before = value
        best, value, spent, settled = _search(function, best, step, tolerance, most - evaluations)
        evaluations += spent
        if settled and before - value < tolerance:
            return Minimum(best, value, evaluations, True)
        if evaluations >= most:
            break
    return Minimum(best, value, evaluations, False)


def _search(
    function: Callable[[list[float]], float], start: list[float], step: float, tolerance: float, most: int
) -> tuple[list[float], float, int, bool]:
    """One search: point, value, evaluations, and whether the values of the simplex agree."""
    n = len(start)
    points = torch.tensor(start, dtype=torch.float64).repeat(n + 1, 1)
    points[1:] += step * torch.eye(n, dtype=torch.float64)
    count = 0

    def at(point: Float[Tensor, "n"]) -> float:
        nonlocal count
        count += 1
        return function(point.tolist())

    values = torch.tensor([at(point) for point in points], dtype=torch.float64)
    while count < most:
        values, order = values.sort()
        points = points[order]
        if float(values[-1] - values[0]) < tolerance:
            return points[0].tolist(), float(values[0]), count, True
        centre, worst = points[:-1].mean(0), points[-1]
        reflected = 2 * centre - worst
        value = at(reflected)
        if value < values[0]:  # expand
            further = 3 * centre - 2 * worst
            beyond = at(further)
            reflected, value = (further, beyond) if beyond < value else (reflected, value)
        elif value >= values[-2]:  # contract
            towards = reflected if value < values[-1] else worst
            inner = (centre + towards) / 2
            between = at(inner)
            if between < min(value, float(values[-1])):
                reflected, value = inner, between
        if value < values[-1]:
            points[-1], values[-1] = reflected, value
        else:  # shrink
            points[1:] = (points[1:] + points[0]) / 2
            values[1:] = torch.tensor([at(point) for point in points[1:]], dtype=torch.float64)
    values, order = values.sort()
    return points[order[0]].tolist(), float(values[0]), count, False
