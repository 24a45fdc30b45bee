"""Gradient ascent with an inverse Hessian from the last steps (L-BFGS), and an estimate of what is left to gain.

    x' = x + t d,   d = B g,   B the L-BFGS approximation of the inverse of -∇²l     [nocedal06, Algorithm 7.4]
    l(x*) - l(x) ≈ <g, B g> / 2                                                       the Newton decrement

Near a maximum of a log likelihood l(x*) - l(x) = δ²/2, where δ is the distance in standard errors (the norm of the
information matrix). Iterations therefore end where <g, B g> / 2 is small in nats, not where steps are short.

Read next: gradient_fit.py (the log likelihood), em.py (the same bound for EM).
"""

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor

STEPS_KEPT = 20
INCREASE, CURVATURE = 1e-4, 0.9  # of the strong Wolfe conditions
TRIALS = 25  # of one line search

Evaluate = Callable[[Tensor], tuple[float, Tensor]]


class Point(NamedTuple):
    """A point with its value and gradient."""

    place: Float[Tensor, "p"]
    value: float
    gradient: Float[Tensor, "p"]


class AscentResult(NamedTuple):
    """The highest point, the value after each iteration, and whether little is left to gain."""

    best: Point
    history: list[float]
    converged: bool


def ascend(
    evaluate: Evaluate,
    start: Float[Tensor, "p"],
    *,
    scale: float = 1.0,
    enough: float,
    max_iterations: int,
    report: Callable[[int, float], None],
) -> AscentResult:
    """Increase a function until the Newton decrement is at most `enough` at two points in succession.

    Args:
        evaluate: value and gradient at a point; a value that is not finite ends the line search before it.
        start: the first point.
        scale: length of the first step divided by that of the gradient; steps longer than 1 are shortened.
        enough: bound of the estimated gain that is left.
        max_iterations: maximum number of line searches.
        report: function of the number of the iteration and the value after it.
    """
    now = Point(start, *evaluate(start))
    history, pairs, is_near = [now.value], deque[tuple[Tensor, Tensor]](maxlen=STEPS_KEPT), False
    for i in range(max_iterations):
        direction = _direction(pairs, now.gradient)
        left = float(now.gradient @ direction) / 2
        rounding = 8 * torch.finfo(start.dtype).eps * abs(now.value)
        was_near, is_near = is_near, left <= max(enough, rounding)
        if left <= rounding or (was_near and is_near):
            return AscentResult(now, history, converged=True)
        first = 1.0 if pairs else min(scale, 1.0 / float(now.gradient.abs().sum()))
        after = _search(evaluate, now, direction, first)
        if after is None and pairs:  # the approximation misleads: begin anew along the gradient
            pairs.clear()
            continue
        if after is None:
            break
        move, turn = after.place - now.place, now.gradient - after.gradient
        if float(move @ turn) > 0:
            pairs.append((move, turn))
        now = after
        history.append(now.value)
        report(i, now.value)
    return AscentResult(now, history, converged=False)


def _direction(pairs: deque[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
    """B g by the two loops over steps s and changes y of the gradient."""
    q, factors = gradient.clone(), []
    for s, y in reversed(pairs):
        factor = (s @ q) / (s @ y)
        q = q - factor * y
        factors.append(factor)
    if pairs:
        s, y = pairs[-1]
        q = q * ((s @ y) / (y @ y))
    for (s, y), factor in zip(pairs, reversed(factors), strict=True):
        q = q + (factor - (y @ q) / (s @ y)) * s
    return q


def _search(evaluate: Evaluate, start: Point, direction: Tensor, first: float) -> Point | None:
    """Point along a direction that fulfils the strong Wolfe conditions, or the best of all trials; None if none rises.

    Brackets by doubling, then interpolates between the best point and the other end.   [nocedal06, Algorithms 3.5, 3.6]
    """
    slope = float(start.gradient @ direction)
    low, low_t, low_slope = start, 0.0, slope
    high_t, high_value, high_slope = math.inf, math.nan, math.nan
    t = first
    for _ in range(TRIALS):
        trial = Point(start.place + t * direction, *evaluate(start.place + t * direction))
        rate = float(trial.gradient @ direction)
        rises = math.isfinite(trial.value) and math.isfinite(rate)
        if not rises or trial.value < start.value + INCREASE * t * slope or trial.value <= low.value:
            high_t, high_value, high_slope = t, trial.value, rate
        elif abs(rate) <= CURVATURE * slope:
            return trial
        else:
            if rate * (high_t - low_t) <= 0:
                high_t, high_value, high_slope = low_t, low.value, low_slope
            low, low_t, low_slope = trial, t, rate
        if math.isinf(high_t):
            t = 4 * t
        else:
            t = _between(low_t, low.value, low_slope, high_t, high_value, high_slope)
    return low if low_t > 0 else None


def _between(a: float, f_a: float, slope_a: float, b: float, f_b: float, slope_b: float) -> float:
    """Maximum of the cubic through two values and slopes, kept off the ends; their middle if it has none."""
    middle = (a + b) / 2
    if not all(map(math.isfinite, (f_b, slope_b))):
        return a + 0.2 * (b - a)
    d = slope_a + slope_b - 3 * (f_a - f_b) / (a - b)
    square = d * d - slope_a * slope_b
    if square < 0:
        return middle
    root = math.copysign(math.sqrt(square), b - a)
    below = slope_a - slope_b + 2 * root
    if below == 0:
        return middle
    t = b - (b - a) * (d + root - slope_b) / below
    low, high = min(a, b), max(a, b)
    margin = 0.1 * (high - low)
    return min(max(t, low + margin), high - margin) if math.isfinite(t) else middle
