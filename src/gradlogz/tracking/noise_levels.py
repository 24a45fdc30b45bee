"""Levels of noise that nobody has given, from the detections themselves; and the model that they make.

    e = p_1 - (h_2 p_0 + h_0 p_2) / (h_0 + h_2)       how far a detection lies from the line between two others,
    Var e = sigma² a + noise c                        h_0 after the first and h_2 before the last of them
    a = 1 + (h_2² + h_0²) / (h_0 + h_2)²,   c = (h_0 h_2)² / (3 (h_0 + h_2))          of velocities that diffuse

Neighbours (c small) and detections that lie further apart (c large) are two equations for sigma² and noise. Medians of
e² / a stand for its mean, so that a few manoeuvres do not count; they are what the largest e² of the wide triples say.

Read next: run_tracking.py.
"""

import math
from typing import Any, NamedTuple

import torch

from .._typing import Float, Tensor
from ..filters.models.linear_motion import constant_acceleration, constant_velocity, coordinated_turn
from ..filters.models.switching_model import SwitchingModel
from .detections import Detections, grouped
from .settings import TrackingSettings

WIDE = 4  # rows from the middle of a wide triple to its ends
MEDIAN, HIGH = 0.4549364, 3.8414588  # of a chi-square of one degree: its median and its 95 % point
LASTS = 20.0  # steps that the first mode lasts, and half as many each other
LEAST = 1e-3  # of sigma² that noise adds in a step at least: a model without noise would learn nothing any more
FLOOR = 1e-6  # of a step that sigma is at least
RISE = 10.0  # times the quiet noise that a manoeuvre has at least
SAMPLE = 1 << 20  # triples that are looked at
WIDER = 1e3  # sigmas of the first belief about a position, or all positions


class Levels(NamedTuple):
    """The numbers of a model.

    Attributes:
        sigma: standard deviation of what is observed of a coordinate.
        noise: spectral density of the first mode.
        manoeuvre: of the others.
        turn_rate: radians a unit of time.
        step: the usual time between two rows of a target.
        speed: that few are above.
        extent: of all positions of a target.
    """

    sigma: float
    noise: float
    manoeuvre: float
    turn_rate: float
    step: float
    speed: float
    extent: float


def levels_of(detections: Detections, settings: TrackingSettings) -> Levels:
    """The levels given, and for the others what the detections say."""
    order, _, _ = grouped(detections.target)
    t, who, p = detections.time[order], detections.target[order], detections.position[order]
    dt = t.diff()[who.diff() == 0]
    step = float(dt.median()) if len(dt) else 1.0
    length, speed = _steps(t, who, p)
    near, wide = _triples(t, who, p, 1), _triples(t, who, p, WIDE)
    r, q, high = _solved(near, wide)
    r = settings.sigma**2 if settings.sigma is not None else r if math.isfinite(r) else (length / 10 or 1.0) ** 2
    r = max(r, (FLOOR * (length or 1.0)) ** 2)
    least = LEAST * r / step**3
    noise = settings.noise or max(q, least)
    sigma = math.sqrt(r)
    rate = math.radians(settings.turn_rate) if settings.turn_rate else _turning(t, who, p, sigma, step)
    extent = float((p - _first(p, who)).abs().nan_to_num().max())
    return Levels(sigma, noise, max(high, RISE * noise), rate, step, max(speed, sigma / step), extent)


def model_of(levels: Levels, settings: TrackingSettings, dimensions: int) -> SwitchingModel:
    """The modes of the settings, in continuous time."""
    r = levels.sigma**2
    numbers: dict[str, Any] = {"observation_variance": r, "dtype": torch.float64}
    straight = constant_velocity(dimensions, spectral_density=levels.noise, **numbers)
    components = None
    if settings.model == "cv":
        others = [constant_velocity(dimensions, spectral_density=levels.manoeuvre, **numbers)]
    elif settings.model == "turn":
        noise = {"spectral_density": levels.noise, **numbers}
        others = [coordinated_turn(dimensions, rate=w * levels.turn_rate, **noise) for w in (1, -1)]
    else:
        jerk = levels.manoeuvre / levels.step**2  # what moves a velocity as much as the manoeuvre does in a step
        others = [constant_acceleration(dimensions, spectral_density=jerk, **numbers)]
        components = [[i for i in range(3 * dimensions) if i % 3 < 2], range(3 * dimensions)]
    k = 1 + len(others)
    rate = torch.zeros(k, k, dtype=torch.float64)
    rate[0, 1:] = 1 / (LASTS * levels.step * (k - 1))
    rate[1:, 0] = 2 / (LASTS * levels.step)
    rate -= torch.diag_embed(rate.sum(-1))
    return SwitchingModel.of([straight, *others], rate=rate, components=components)


def belief_of(levels: Levels, model: SwitchingModel, dimensions: int) -> dict[str, Any]:
    """Mean, covariance and modes before the first detection, positions counted from it: all but nothing is known.

    The chain is as it is after a long time: two thirds in the first mode.
    """
    s = model.state_size // dimensions
    wide = max(WIDER * levels.sigma, levels.extent)
    acceleration = levels.speed / levels.step / 10
    deviations = torch.tensor([wide, 2 * levels.speed, acceleration][:s], dtype=torch.float64).repeat(dimensions)
    share = torch.tensor([2.0, *[1 / (model.modes - 1)] * (model.modes - 1)], dtype=torch.float64) / 3
    mean = torch.zeros(model.state_size, dtype=torch.float64)
    return {"mean": mean, "covariance": deviations.square().diag(), "log_mode_probability": share.log()}


# What detections say of them ----------------------------------------------------------------------------------------


class Triples(NamedTuple):
    """e² / a and c / a of triples of detections, coordinate by coordinate."""

    squared: Float[Tensor, "n"]
    drift: Float[Tensor, "n"]


def _triples(t: Tensor, who: Tensor, p: Tensor, apart: int) -> Triples:
    if len(t) <= 2 * apart:
        return Triples(t[:0], t[:0])
    first, middle, last = slice(None, -2 * apart), slice(apart, -apart), slice(2 * apart, None)
    same = who[first] == who[last]
    h_0, h_2 = (t[middle] - t[first])[same], (t[last] - t[middle])[same]
    w = (h_2 / (h_0 + h_2)).unsqueeze(-1)
    e = p[middle][same] - w * p[first][same] - (1 - w) * p[last][same]
    a = 1 + w**2 + (1 - w) ** 2
    c = ((h_0 * h_2) ** 2 / (3 * (h_0 + h_2))).unsqueeze(-1)
    seen = e.isfinite()
    squared, drift = (e**2 / a)[seen], (c / a).expand_as(e)[seen]
    every = max(1, len(squared) // SAMPLE)
    return Triples(squared[::every], drift[::every])


def _solved(near: Triples, wide: Triples) -> tuple[float, float, float]:
    """sigma², noise and that of manoeuvres; not a number where there are no triples."""
    if len(near.squared) == 0:
        return math.nan, 0.0, 0.0
    m, c = float(near.squared.median()) / MEDIAN, float(near.drift.median())
    if len(wide.squared) == 0:
        return m, 0.0, 0.0
    m_wide, c_wide = float(wide.squared.median()) / MEDIAN, float(wide.drift.median())
    q = min(max((m_wide - m) / (c_wide - c), 0.0) if c_wide > c else 0.0, m / c)
    r = max(m - q * c, 0.0)
    largest = float(wide.squared.quantile(0.95)) / HIGH
    return r, q, max((largest - r) / c_wide, 0.0)


def _steps(t: Tensor, who: Tensor, p: Tensor) -> tuple[float, float]:
    """The usual length of a step, and a speed that few are above."""
    same = who.diff() == 0
    moved = p.diff(dim=0)[same].square().sum(-1).sqrt()
    seen = moved.isfinite()
    if not bool(seen.any()):
        return 0.0, 0.0
    speeds = (moved / t.diff()[same])[seen]
    every = max(1, len(speeds) // SAMPLE)
    return float(moved[seen].median()), float(speeds[::every].quantile(0.95))


def _turning(t: Tensor, who: Tensor, p: Tensor, sigma: float, step: float) -> float:
    """The rate at which paths turn where they turn most, a tenth of them; of paths that do not, one in fifty steps."""
    least = 1 / (50 * step)
    if len(t) <= 2 * WIDE:
        return least
    first, middle, last = slice(None, -2 * WIDE), slice(WIDE, -WIDE), slice(2 * WIDE, None)
    before, after = (p[middle] - p[first])[:, :2], (p[last] - p[middle])[:, :2]
    far = 6 * sigma
    clear = (who[first] == who[last]) & (before.norm(dim=-1) > far) & (after.norm(dim=-1) > far)
    if not bool(clear.any()):
        return least
    before, after, passed = before[clear], after[clear], (t[last] - t[first])[clear] / 2
    cross = before[:, 0] * after[:, 1] - before[:, 1] * after[:, 0]
    rates = torch.atan2(cross, (before * after).sum(-1)).abs() / passed
    return max(float(rates[:: max(1, len(rates) // SAMPLE)].quantile(0.9)), least)


def _first(p: Tensor, who: Tensor) -> Tensor:
    """What was first seen of each coordinate of its target, for every row; rows are grouped by target."""
    rows = torch.arange(len(p)).unsqueeze(-1).expand(p.shape)
    count = int(who.max()) + 1
    at = torch.full((count, p.shape[-1]), len(p)).scatter_reduce(
        0, who.unsqueeze(-1).expand(p.shape), torch.where(p.isnan(), len(p), rows), "amin"
    )
    padded = torch.nn.functional.pad(p, (0, 0, 0, 1), value=math.nan)
    return padded.gather(0, at)[who]
