"""Noise levels by maximum likelihood.

    maximise over the levels     log p(detections | levels)          of the filter imm, given the first detections

Outliers that were not rejected would spoil the levels: each detection is one with a small probability (REMAINING), with
a spread that does not depend on the levels (outliers.py). With a larger one, rare large errors and manoeuvres, which
the filter will have to explain, would count as outliers: on the Swiss flights of docs/aircraft.md, 1 % halved the
fitted manoeuvre noise and lowered the coverage on other flights from 93.4 to 92.8 %.

The parameters are logarithms of standard deviations, spectral densities, durations and the turn rate, and the logit of
the share of late detections. There are at most a dozen, the compiled filter is fast, and the velocities in the noise of
detections (tracking_model.py) are those of the start: a search without derivatives is the simplest that works.

Read next: simplex_search.py, noise_levels.py (the start), run_tracking.py.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._errors import InputValueError
from ..filters.gaussian.clutter import prior_with_clutter, with_clutter
from ..filters.gaussian.switching import imm
from .detections import Detections, grouped
from .noise_levels import Levels
from .outliers import outlier_covariance
from .settings import TrackingSettings
from .simplex_search import minimum
from .target_batches import ROWS, batches
from .tracking_model import model_of, model_of_batch, noise_in, noise_of, prior_of, prior_of_batch, velocities_of

SAMPLED_ROWS, SAMPLED_STEPS = 8192, 256  # rows of a fit, and the longest series of a target
EVALUATIONS = 2500  # largest number of likelihoods; three modes with late detections need 1,600
TOLERANCE = 2e-5  # nats per detection
RANGE = 1e3  # factor by which a level may differ from its start
REMAINING = 1e-6  # probability of an outlier among the detections that were not rejected
SHORTEST = 0.25  # mean duration of a mode, in steps
LARGEST_SHARE = 0.5  # of late detections


class LevelFit(NamedTuple):
    """Fitted levels, the number of likelihoods, and whether the search converged."""

    levels: Levels
    evaluations: int
    converged: bool


def fitted_levels(
    detections: Detections, settings: TrackingSettings, levels: Levels, show: Callable[[int], None]
) -> LevelFit:
    """Levels of largest likelihood for a sample of the detections; `show` is called with the number of evaluations."""
    sample = _sample(detections)
    d = sample.position.shape[-1]
    velocity, series = velocities_of(sample, settings, levels), list(batches(sample, ROWS))
    prior = prior_of(levels, model_of(levels, settings, d), d)  # one prior: the first detection has no information
    names = _names(settings, levels)
    start = _packed(levels, names)
    start_noise = noise_of(sample, levels, velocity)
    far = [outlier_covariance(batch, levels, start_noise) if settings.outliers else None for batch in series]
    detected, count = int((~sample.used.isnan()).any(-1).sum()), 0

    def loss(point: list[float]) -> float:
        nonlocal count
        count += 1
        show(count)
        trial = _unpacked(levels, names, point)
        if not _is_sensible(trial, levels):
            return math.inf
        model = dataclasses.replace(model_of(trial, settings, d), validate=False)
        noise = noise_of(sample, trial, velocity)
        total = 0.0
        for batch, covariance in zip(series, far, strict=True):
            discrete = model_of_batch(model, batch, noise_in(batch, noise))
            beginning = prior_of_batch(prior, noise)
            if covariance is not None:
                discrete = with_clutter(discrete, REMAINING, covariance)
                beginning = prior_with_clutter(beginning)
            total += float(imm(discrete, batch.observations, beginning, fields=("mean",)).log_likelihood.sum())
        return -total / detected

    best = minimum(loss, start, tolerance=TOLERANCE, most=EVALUATIONS)
    return LevelFit(_unpacked(levels, names, best.point), best.evaluations, best.converged)


def _sample(detections: Detections) -> Detections:
    """A sample of the targets, evenly spread, each with at most SAMPLED_STEPS rows."""
    lengths = detections.target.bincount()
    who = (lengths >= 3).nonzero().flatten()
    if len(who) == 0:
        problem = "detections has no target with three rows, which a fit of the noise levels needs"
        raise InputValueError("track", "detections", problem, "Pass sigma and noise in place of fit (--fit).")
    wanted = max(1, SAMPLED_ROWS // int(lengths[who].double().mean().clamp(max=SAMPLED_STEPS)))
    who = who[:: math.ceil(len(who) / wanted)]
    order, starts, _ = grouped(detections.target)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - starts[detections.target[order]]  # of a row in its target
    chosen = torch.isin(detections.target, who) & (place < SAMPLED_STEPS)
    rows = chosen.nonzero().flatten()
    return detections.rows(rows)._replace(position=detections.used[rows], rejected=None, stale=None)


def _names(settings: TrackingSettings, levels: Levels) -> list[str]:
    """Names of the levels that are fitted."""
    names = ["sigma", "noise", *(f"duration {i}" for i in range(len(settings.modes)))]
    names += ["turn_rate"] if settings.model == "turn" else ["manoeuvre"]
    names += ["moderate"] if settings.model == "cv3" else []
    names += ["jitter"] if levels.jitter else []
    return names + (["late", "late_jitter", "late_sigma"] if levels.jitter and levels.late else [])


def _packed(levels: Levels, names: list[str]) -> list[float]:
    values = {**levels._asdict(), **{f"duration {i}": value for i, value in enumerate(levels.durations)}}
    return [math.log(values[n] / (1 - values[n])) if n == "late" else math.log(values[n]) for n in names]


def _unpacked(levels: Levels, names: list[str], point: list[float]) -> Levels:
    values: dict[str, Any] = {
        n: 1 / (1 + math.exp(-x)) if n == "late" else math.exp(x) for n, x in zip(names, point, strict=True)
    }
    durations = tuple(values.pop(f"duration {i}") for i in range(len(levels.durations)))
    return levels._replace(durations=durations, **values)


def _is_sensible(trial: Levels, start: Levels) -> bool:
    """Modes in their order, and no level far from its start, where a likelihood of too few rows may be unbounded."""
    names = ("sigma", "noise", "manoeuvre", "moderate", "turn_rate", "jitter", "late_jitter", "late_sigma")
    near = all(getattr(trial, n) <= RANGE * getattr(start, n) for n in names) and trial.sigma >= start.sigma / 10
    ordered = trial.noise <= trial.moderate <= trial.manoeuvre or trial.moderate == start.moderate
    durable = all(SHORTEST * start.step <= t <= RANGE * start.step for t in trial.durations)
    return near and ordered and trial.noise <= trial.manoeuvre and durable and trial.late <= LARGEST_SHARE
