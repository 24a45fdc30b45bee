"""Phase boundaries of the theory.

    tau = 0                                 ascent above, descent below
    1 + tau beta = 0                        the step is singular on a Gaussian cloud of variance 1        [theory 4.4]
    gamma_n = -1                            descent overshoots in mode n, the first that the contraction leaves free
        tau = s / (1 - s beta),  s = -2 / (n beta^(n-1))
    beta = 1 - sqrt(1 - 2 log N / d)        tokens of norm sqrt(d) have self-weight 1/2                   [theory 10.3]
    beta = 4 / diam²                        below it fixed keys have one fixed point                     [theory 5.7]

Read next: ../reporting/phases_page.py, which draws them.
"""

import math
from typing import NamedTuple

import torch

from ..dynamics.growth import critical_beta
from .grid import Range
from .initial_clouds import ascent_of
from .records import Phases
from .settings import SimulationSettings

ORDERS = {  # order of the first mode that a contraction leaves free
    **dict.fromkeys(("sphere", "rms_norm", "layer_norm"), 1),
    **dict.fromkeys(("scalar", "batch_norm"), 2),
    **dict.fromkeys(("zca", "pca", "cholesky", "monge"), 3),
}
POINTS = 200  # of a curve


class Boundary(NamedTuple):
    """A phase boundary: its points inside the diagram, fewer than two if it does not cross the diagram."""

    name: str
    x: list[float]
    y: list[float]


def overshoot(order: int, beta: float) -> float:
    """The step size tau at which mode n of a Gaussian cloud of variance 1 is multiplied by -1."""
    s = -2 / (order * beta ** (order - 1))
    return s / (1 - s * beta)


def boundaries(phases: Phases) -> list[Boundary]:
    """Phase boundaries of a diagram with two axes."""
    if len(phases.ranges) < 2:
        return []
    x, y = phases.ranges
    s, names = phases.settings, (x.name, y.name)
    lines: list[tuple[str, list[tuple[float, float]]]] = []
    swept = {r.name: r for r in phases.ranges}
    if "contraction" not in names and s.plain:
        if set(names) == {"beta", "tau"}:
            lines += _descent_lines(s, swept["beta"], names)
        elif "tau" in names:
            lines.append(("τ = 0", _level(swept, names, "tau", 0.0)))
    if "beta" in names and s.plain and not s.keys and not s.causal and s.heads == 1:
        lines.append(("self-weight 1/2", _half_self_weight(s, swept, names)))
    if "beta" in names and s.plain and s.keys > 1 and not {"dim", "tokens"} & set(names):
        keys = ascent_of(s).keys
        assert isinstance(keys, torch.Tensor)  # since s.keys > 1
        lines.append(("β diam² = 4", _level(swept, names, "beta", 4 / float(torch.pdist(keys).max()) ** 2)))
    inside = [(name, [p for p in points if _inside(p[0], x) and _inside(p[1], y)]) for name, points in lines]
    return [Boundary(name, [p[0] for p in points], [p[1] for p in points]) for name, points in inside]


def _descent_lines(
    s: SimulationSettings, beta: Range, names: tuple[str, str]
) -> list[tuple[str, list[tuple[float, float]]]]:
    grid = [b for b in _spaced(beta) if b > 0]
    order = ORDERS.get(s.contraction.split("+")[-1])
    lines = [("τ = 0", [(b, 0.0) for b in grid]), ("1 + τβ = 0", [(b, -1 / b) for b in grid])]
    if order is not None:
        lines.append((f"γ of mode {order} = −1", [(b, overshoot(order, b)) for b in grid]))
    return [(name, [p if names[0] == "beta" else (p[1], p[0]) for p in points]) for name, points in lines]


def _half_self_weight(
    s: SimulationSettings, swept: dict[str, Range], names: tuple[str, str]
) -> list[tuple[float, float]]:
    """Critical beta along the other axis: a straight line, or a curve over dim or tokens."""
    other = names[1] if names[0] == "beta" else names[0]
    positions = range(len(swept[other].values)) if other == "contraction" else _spaced(swept[other])
    points = []
    for position in positions:
        n = position if other == "tokens" else s.tokens
        dim = position if other == "dim" else s.dim
        inside = 1 - 2 * math.log(n) / dim
        critical = critical_beta(s.tokens, s.dim) if other not in ("dim", "tokens") else 1 - math.sqrt(max(inside, 0))
        if inside >= 0 and math.isfinite(critical):
            points.append((critical, float(position)))
    return points if names[0] == "beta" else [(b, a) for a, b in points]


def _level(swept: dict[str, Range], names: tuple[str, str], name: str, value: float) -> list[tuple[float, float]]:
    """Straight line at one value of an axis."""
    other = names[1] if names[0] == name else names[0]
    ends = range(len(swept[other].values)) if other == "contraction" else _spaced(swept[other])
    points = [(value, float(end)) for end in ends]
    return points if names[0] == name else [(b, a) for a, b in points]


def _spaced(r: Range) -> list[float]:
    low, high = min(r.values), max(r.values)
    return [low + (high - low) * i / (POINTS - 1) for i in range(POINTS)]


def _inside(value: float, r: Range) -> bool:
    if r.name == "contraction":
        return True
    return min(r.values) <= value <= max(r.values)
