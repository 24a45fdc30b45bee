"""Noise levels estimated from detections.

    e = p_1 - (h_2 p_0 + h_0 p_2) / (h_0 + h_2)       deviation of a detection from linear interpolation between two
    Var e = sigma² a + noise c                        others, h_0 after the first and h_2 before the last
    a = 1 + (h_2² + h_0²) / (h_0 + h_2)²,   c = (h_0 h_2)² / (3 (h_0 + h_2))          for diffusing velocities

Near triples (small c) and wide triples (large c) give two equations for sigma² and noise. The median of e² / a, scaled
to a mean, makes them robust to manoeuvres; the 95 % quantile of e² over wide triples gives the manoeuvre level. Process
noise is that of x and y; z has its own sigma.

    Var e = sigma² a + noise c + jitter² v² a         along the velocity v, if the times of detections are inaccurate

If deviations along the path exceed those across it, times have a jitter, and sigma and noise are those across the path.

Read next: tracking_model.py (the model with these levels), level_fit.py (maximum likelihood), run_tracking.py.
"""

import math
from typing import NamedTuple

import torch

from .._errors import InputValueError
from .._typing import Float, Tensor
from .detections import Detections, grouped
from .settings import TrackingSettings

WIDE = 4  # rows from the centre of a wide triple to its ends
MEDIAN, HIGH = 0.4549364, 3.8414588  # chi-square with one degree of freedom: median and 95 % quantile
CLEARLY = 2.0  # least ratio of the variances along and across the path that is taken for a jitter of times
DOUBT = 7.0  # two standard errors of the ratio of two medians of squares, times the root of their number
FAST = 6.0  # standard deviations that a target must move between the ends of a wide triple to have a direction
MOVING, ENOUGH = 0.2, 50  # least share and least number of triples of such targets that a jitter is estimated from
LATE, LATE_JITTER, LATE_SIGMA = 0.1, 6.0, 3.0  # of late detections: share, jitter and sigma relative to the others
LASTS = 20.0  # mean duration of the first mode in steps; the others last half as long
LEAST = 1e-3  # least process noise per step, relative to sigma²: without it the gain would go to 0
FLOOR = 1e-6  # least sigma, relative to the length of a step
RISE = 10.0  # least ratio of manoeuvre noise to quiet noise
SAMPLE = 1 << 20  # largest number of triples
SMALLEST = 1e-2  # least standard deviation of a height, relative to that of x and y
DIFFUSE = 1e3  # standard deviation of the diffuse position prior in sigmas


class Levels(NamedTuple):
    """Noise levels and scales of a model.

    Attributes:
        sigma: standard deviation of a detected coordinate: of x and y if it is estimated, the root mean square over all
            coordinates if it is given.
        noise: spectral density of the process noise in the first mode, length² / time³.
        manoeuvre: spectral density in the other modes.
        turn_rate: turn rate in radians per unit of time.
        step: median time between two rows of a target.
        speed: 95 % quantile of the speed between rows.
        ratios: standard deviation of each coordinate, divided by sigma.
        durations: mean duration of each mode.
        moderate: spectral density in the second mode of the model cv3.
        jitter: standard deviation of the times of detections.
        late: share of late detections, whose times and positions are less accurate.
        late_jitter, late_sigma: their standard deviations.
    """

    sigma: float
    noise: float
    manoeuvre: float
    turn_rate: float
    step: float
    speed: float
    ratios: tuple[float, ...]
    durations: tuple[float, ...]
    moderate: float = 0.0
    jitter: float = 0.0
    late: float = 0.0
    late_jitter: float = 0.0
    late_sigma: float = 0.0


def levels_of(detections: Detections, settings: TrackingSettings) -> Levels:
    """Levels of the settings; those that are None are estimated from the detections."""
    order, _, _ = grouped(detections.target)
    t, who, p = detections.time[order], detections.target[order], detections.used[order]
    dt = t.diff()[(who.diff() == 0) & (t.diff() > 0)]
    step = float(dt.median()) if len(dt) else 1.0
    declared = _declared_sigma(detections, settings)
    length, speed = _steps(t, who, p)
    jitter = settings.jitter
    if jitter is None:
        jitter = _jitter(t, who, p[:, :2]) if declared is None else 0.0
    near, wide = (_triples(t, who, p[:, :2], apart, across=jitter > 0) for apart in (1, WIDE))
    r, q, high = _solved(near, wide)
    if declared is not None:
        r = float(declared.square().mean())
    elif not math.isfinite(r):
        r = (length / 10 or 1.0) ** 2
    r = max(r, (FLOOR * (length or 1.0)) ** 2)
    least = LEAST * r / step**3
    noise = settings.noise or max(q, least)
    sigma = math.sqrt(r)
    rate = math.radians(settings.turn_rate) if settings.turn_rate else _turning(t, who, p, sigma, step)
    ratios = _height_ratio(t, who, p, r) if declared is None else tuple((declared / sigma).tolist())
    manoeuvre = max(high, RISE * noise)
    durations = (LASTS * step, *[LASTS * step / 2] * (len(settings.modes) - 1))
    late = (LATE, LATE_JITTER * jitter, LATE_SIGMA * sigma) if jitter else (0.0, 0.0, 0.0)
    return Levels(
        sigma, noise, manoeuvre, rate, step, max(speed, sigma / step), ratios, durations,
        math.sqrt(noise * manoeuvre), jitter, *late,
    )  # fmt: skip


def _height_ratio(t: Tensor, who: Tensor, p: Tensor, r: float) -> tuple[float, ...]:
    """Standard deviations relative to that of x and y, whose variance is r: heights have a noise of their own."""
    if p.shape[-1] == 2:
        return (1.0, 1.0)
    height = _solved(*(_triples(t, who, p[:, 2:], apart) for apart in (1, WIDE)))[0]
    ratio = math.sqrt(height / r) if math.isfinite(height) else 1.0
    return (1.0, 1.0, max(ratio, SMALLEST))


def _declared_sigma(detections: Detections, settings: TrackingSettings) -> Float[Tensor, "d"] | None:
    """Standard deviation of each coordinate, if the settings or the detections have it; rows by their median."""
    if settings.sigma is None:
        return None if detections.sigma is None else detections.sigma.median(0).values
    declared = torch.tensor(settings.sigma, dtype=torch.float64).flatten()
    if len(declared) not in (1, detections.position.shape[-1]):
        problem = f"sigma has {len(declared)} numbers, but detections have {detections.position.shape[-1]} coordinates"
        raise InputValueError("track", "sigma", problem, "Pass one number, or one for each coordinate.")
    return declared.expand(detections.position.shape[-1])


# Estimation ---------------------------------------------------------------------------------------------------------


class Triples(NamedTuple):
    """e² / a and c / a of triples of detections, one entry per coordinate."""

    squared: Float[Tensor, "n"]
    drift: Float[Tensor, "n"]


def _triples(t: Tensor, who: Tensor, p: Tensor, apart: int, *, across: bool = False) -> Triples:
    """Deviations of both coordinates, or those across the path."""
    if len(t) <= 2 * apart:
        return Triples(t[:0], t[:0])
    first, middle, last = slice(None, -2 * apart), slice(apart, -apart), slice(2 * apart, None)
    same = (who[first] == who[last]) & (t[first] < t[last])
    h_0, h_2 = (t[middle] - t[first])[same], (t[last] - t[middle])[same]
    w = (h_2 / (h_0 + h_2)).unsqueeze(-1)
    e = p[middle][same] - w * p[first][same] - (1 - w) * p[last][same]
    a = 1 + w**2 + (1 - w) ** 2
    c = ((h_0 * h_2) ** 2 / (3 * (h_0 + h_2))).unsqueeze(-1)
    if across:
        e = _along_and_across(e, (p[last] - p[first])[same])[1].unsqueeze(-1)
    detected = e.isfinite()
    squared, drift = (e**2 / a)[detected], (c / a).expand_as(e)[detected]
    every = max(1, len(squared) // SAMPLE)
    return Triples(squared[::every], drift[::every])


def _along_and_across(e: Float[Tensor, "n xy"], chord: Float[Tensor, "n xy"]) -> tuple[Tensor, Tensor]:
    """Components of deviations along and across the way between the ends of a triple."""
    way = chord / chord.norm(dim=-1, keepdim=True)
    return (e * way).sum(-1), e[:, 1] * way[:, 0] - e[:, 0] * way[:, 1]


def _jitter(t: Tensor, who: Tensor, p: Float[Tensor, "n xy"]) -> float:
    """Standard deviation of times, from near triples of targets that move; 0 unless errors lie along the path.

    The path is that of the ends of wide triples: errors of the near triple itself must not decide its direction.
    """
    if len(t) <= 2 * WIDE:
        return 0.0
    same = (who[: -2 * WIDE] == who[2 * WIDE :]) & (t[: -2 * WIDE] < t[2 * WIDE :])
    chord = (p[2 * WIDE :] - p[: -2 * WIDE])[same]
    before, middle, after = ((part[WIDE + i : len(t) - WIDE + i])[same] for part, i in ((p, -1), (p, 0), (p, 1)))
    h_0, h_2 = (t.diff()[WIDE + i : len(t) - WIDE + i][same] for i in (-1, 0))
    w = (h_2 / (h_0 + h_2)).unsqueeze(-1)
    a = (1 + w**2 + (1 - w) ** 2).squeeze(-1)
    e = middle - w * before - (1 - w) * after
    along, across = (part.square() / a for part in _along_and_across(e, chord))
    valid = (along + across).isfinite()
    if not bool(valid.any()):
        return 0.0
    moving = valid & (chord.norm(dim=-1) > FAST * math.sqrt(float(across[valid].median()) / MEDIAN))
    if int(moving.sum()) < max(ENOUGH, MOVING * int(valid.sum())):
        return 0.0
    speed = chord.norm(dim=-1)[moving] / (t[2 * WIDE :] - t[: -2 * WIDE])[same][moving]
    late, wide = (float((part[moving] / speed**2).median()) / MEDIAN for part in (along, across))
    clearly = CLEARLY * (1 + DOUBT / math.sqrt(int(moving.sum())))
    return math.sqrt(late - wide) if late > clearly * wide else 0.0


def _solved(near: Triples, wide: Triples) -> tuple[float, float, float]:
    """sigma², noise and manoeuvre noise; sigma² is NaN without triples."""
    if len(near.squared) == 0:
        return math.nan, 0.0, 0.0
    m, c = float(near.squared.median()) / MEDIAN, float(near.drift.median())
    if len(wide.squared) == 0:
        return m, 0.0, 0.0
    m_wide, c_wide = float(wide.squared.median()) / MEDIAN, float(wide.drift.median())
    if c == 0 or c_wide == 0:  # most detections have the same time as another one
        return m, 0.0, 0.0
    q = min(max((m_wide - m) / (c_wide - c), 0.0) if c_wide > c else 0.0, m / c)
    r = max(m - q * c, 0.0)
    largest = float(wide.squared.quantile(0.95)) / HIGH
    return r, q, max((largest - r) / c_wide, 0.0)


def _steps(t: Tensor, who: Tensor, p: Tensor) -> tuple[float, float]:
    """Median length of a step, and the 95 % quantile of the speed."""
    same = (who.diff() == 0) & (t.diff() > 0)
    moved = p.diff(dim=0)[same].square().sum(-1).sqrt()
    detected = moved.isfinite()
    if not bool(detected.any()):
        return 0.0, 0.0
    speeds = (moved / t.diff()[same])[detected]
    every = max(1, len(speeds) // SAMPLE)
    return float(moved[detected].median()), float(speeds[::every].quantile(0.95))


def _turning(t: Tensor, who: Tensor, p: Tensor, sigma: float, step: float) -> float:
    """90 % quantile of the turn rate along wide triples, at least one radian in fifty steps."""
    least = 1 / (50 * step)
    if len(t) <= 2 * WIDE:
        return least
    first, middle, last = slice(None, -2 * WIDE), slice(WIDE, -WIDE), slice(2 * WIDE, None)
    before, after = (p[middle] - p[first])[:, :2], (p[last] - p[middle])[:, :2]
    far = 6 * sigma
    clear = (who[first] == who[last]) & (t[first] < t[last]) & (before.norm(dim=-1) > far) & (after.norm(dim=-1) > far)
    if not bool(clear.any()):
        return least
    before, after, passed = before[clear], after[clear], (t[last] - t[first])[clear] / 2
    cross = before[:, 0] * after[:, 1] - before[:, 1] * after[:, 0]
    rates = torch.atan2(cross, (before * after).sum(-1)).abs() / passed
    return max(float(rates[:: max(1, len(rates) // SAMPLE)].quantile(0.9)), least)
