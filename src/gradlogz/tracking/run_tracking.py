"""Batched filtering of many targets.

    track     read detections, estimate noise levels, reject outliers, filter, smooth        -> Tracks

Targets of similar length form one batch (target_batches.py). Stale rows (stale_rows.py) and outliers (outliers.py) are
rejected first, and the noise levels are those of the other detections. Positions are relative to the first detection of
a target, with a diffuse prior; the first detection of a coordinate therefore has no innovation.

Read next: noise_levels.py, tracking_model.py, level_fit.py, records.py (the results).
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence

import torch

from .._errors import InputValueError
from .._progress import Progress, reporter
from .._settings import changed
from .._typing import Tensor
from ..filters.gaussian.consistency import normalized_innovation
from ..filters.gaussian.innovation_scores import innovation_scores
from ..filters.gaussian.smoother import Smoothed, smooth
from ..filters.gaussian.switching import gpb1, gpb2, imm
from ..filters.results import Filtered
from . import scenario
from .columns import Source
from .detections import Detections, read
from .level_fit import EVALUATIONS, SAMPLED_ROWS, fitted_levels
from .levels_file import checked_levels, read_levels
from .noise_levels import Levels, levels_of
from .outliers import outliers_in
from .records import StateEstimate, Tracks
from .settings import TrackingSettings, check
from .stale_rows import stale_rows
from .target_batches import ROWS, TargetBatch, batches
from .tracking_model import (
    model_of,
    model_of_batch,
    motion_probability,
    noise_of,
    prior_of,
    prior_of_batch,
    velocities_of,
)

Show = Callable[[int, int], None]
FILTERS = {"imm": imm, "gpb1": gpb1, "gpb2": gpb2}


def track(
    detections: Source | None = None,
    *,
    filter: str | None = None,
    model: str | None = None,
    columns: Mapping[str, str] | None = None,
    sigma: float | Sequence[float] | None = None,
    noise: float | None = None,
    jitter: float | None = None,
    turn_rate: float | None = None,
    outliers: float | None = None,
    levels: Levels | str | os.PathLike[str] | None = None,
    smooth: bool | None = None,
    fit: bool | None = None,
    skip_bad: bool | None = None,
    seed: int | None = None,
    progress: Progress = False,
) -> Tracks:
    """Filter detections of moving targets with a switching Kalman filter.

    The other arguments are fields of `TrackingSettings`.

    Args:
        detections: path of a CSV or parquet file with columns time, target, x, y and optionally z, or such columns in
            a dictionary, a DataFrame of pandas or polars, or an xarray.Dataset; None selects the built-in scenario.
        progress: True shows a bar on standard error; a function is called with the completed and the total number of
            rows, where each likelihood of a fit counts its rows.
        levels: noise levels of an earlier run, `tracks.levels`, or the path of its results (--json).

    Law: tests/tracking/test_tracks_are_what_the_filters_say.py.

    >>> tracks = track({"time": [0, 1, 2, 3], "x": [0.0, 1.1, 1.9, 3.0], "y": [0.0, 0.0, None, 0.1]}, sigma=0.1)
    >>> tracks.filtered.mean[-1].round(decimals=0)  # x, y, vx, vy
    tensor([3., 0., 1., 0.], dtype=torch.float64)
    """
    base = TrackingSettings() if detections is not None else scenario.settings_of(model or "turn")
    settings = changed(
        base, filter=filter, model=model, columns=columns, sigma=_numbers(sigma), noise=noise, jitter=jitter,
        turn_rate=turn_rate, outliers=outliers, levels=_name_of(levels), smooth=smooth, fit=fit,
        skip_bad=skip_bad, seed=seed,
    )  # fmt: skip
    check(settings)
    if detections is None:
        rows, source = scenario.flights(settings.seed), ""
    else:
        rows = read(detections, columns=settings.columns, skip_bad=settings.skip_bad)
        source = str(detections) if isinstance(detections, str | os.PathLike) else "FILE.csv"
    earlier = read_levels(levels) if isinstance(levels, str | os.PathLike) else levels
    if earlier is not None:
        earlier = checked_levels(earlier, settings, rows)
    return _tracked(rows, settings, earlier, source, reporter(progress, "rows"))


def _name_of(levels: Levels | str | os.PathLike[str] | None) -> str | None:
    """Path of the levels, for the command that reproduces the page."""
    return "LEVELS.json" if isinstance(levels, Levels) else None if levels is None else str(levels)


def _numbers(sigma: float | Sequence[float] | None) -> float | tuple[float, ...] | None:
    """One number, or several as a tuple, also of an array."""
    values = getattr(sigma, "tolist", lambda: sigma)()
    return tuple(values) if isinstance(values, Sequence) else values


def _tracked(
    detections: Detections, settings: TrackingSettings, levels: Levels | None, source: str, show: Show
) -> Tracks:
    """Estimate or fit the noise levels, and filter with the resulting model; `levels`: those of an earlier run."""
    if settings.sigma is not None:
        detections = detections._replace(sigma=None)  # the setting replaces the column
    if settings.fit and detections.sigma is not None:
        problem = "fit needs one standard deviation for all rows, but the detections have a column with them"
        raise InputValueError("track", "fit", problem, "Drop fit (--fit), or pass sigma (--sigma) as its start.")

    def estimated() -> Levels:
        return levels_of(detections, settings) if levels is None else levels

    now = estimated()
    stale = stale_rows(detections, now.sigma)
    if bool(stale.any()):
        detections = detections._replace(stale=stale)
        now = estimated()
    for _ in range(2 if settings.outliers else 0):  # levels that outliers have raised hide some of them
        detections = _without_outliers(detections, settings, now)
        now = estimated()
    evaluations, converged, learning = 0, True, 0
    if settings.fit:
        learning = EVALUATIONS * SAMPLED_ROWS  # rows processed by the fit, if it needs every evaluation
        total = learning + len(detections.time)
        now, evaluations, converged = fitted_levels(
            detections, settings, now, lambda count: show(SAMPLED_ROWS * count, total)
        )
        detections = _without_outliers(detections, settings, now) if settings.outliers else detections
    return _run(detections, settings, now, evaluations, converged, source, learning, show)


def _without_outliers(detections: Detections, settings: TrackingSettings, levels: Levels) -> Detections:
    """Detections with outliers marked as rejected; earlier marks are replaced."""
    detections, d = detections._replace(rejected=None), detections.position.shape[-1]
    model = dataclasses.replace(model_of(levels, settings, d), validate=False)
    noise = noise_of(detections, levels, velocities_of(detections, settings, levels))
    prior = prior_of(levels, model, d)
    return detections._replace(rejected=outliers_in(detections, model, prior, levels, noise, settings.outliers))


def _run(
    detections: Detections,
    settings: TrackingSettings,
    levels: Levels,
    evaluations: int,
    converged: bool,
    source: str,
    done: int,
    show: Show,
) -> Tracks:
    """Filter batch by batch and restore the order of the rows; `done` counts the rows of the fit."""
    n, d = detections.position.shape
    model = dataclasses.replace(model_of(levels, settings, d), validate=False)
    noise = noise_of(detections, levels, velocities_of(detections, settings, levels))
    prior = prior_of_batch(prior_of(levels, model, d), noise)
    shapes = ((2 * d,), (2 * d, 2 * d), (model.modes,))
    filtered = StateEstimate(*(torch.empty(n, *shape, dtype=torch.float64) for shape in shapes))
    smoothed = StateEstimate(*map(torch.empty_like, filtered)) if settings.smooth else None
    nis = torch.empty(4, n, dtype=torch.float64)
    innovations = torch.empty(3, n, d, dtype=torch.float64)  # values, predicted standard deviations, and scores
    log_scores = torch.empty(n, dtype=torch.float64)
    log_likelihood, total = 0.0, done + n
    for batch in batches(detections, ROWS):
        discrete, rows = model_of_batch(model, batch, noise), batch.rows[batch.inside]
        if smoothed is not None:
            smoothing = smooth(
                discrete, batch.observations, prior, method="imm" if settings.filter == "imm" else "gpb2"
            )
            filtering = smoothing.filtered
            _put(smoothed, rows, _estimate(smoothing, batch, batch.counts[:, -1:], model.modes))
        else:
            filtering = FILTERS[settings.filter](discrete, batch.observations, prior)
        _put(filtered, rows, _estimate(filtering, batch, batch.counts, model.modes))
        first = (batch.counts == 1) & ~batch.observations.isnan()  # relative to a diffuse prior: no innovation
        innovation = filtering.innovation.masked_fill(first, math.nan)
        by_mode = filtering.mode_innovation.masked_fill(first.unsqueeze(-2), math.nan)
        tested = filtering._replace(innovation=innovation, mode_innovation=by_mode)
        nis[:, rows] = torch.stack([part[batch.inside] for part in normalized_innovation(tested, mixture=True)[:4]])
        deviation = filtering.innovation_covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        scores = innovation_scores(tested, joint=False)
        innovations[:, rows] = torch.stack([part[batch.inside] for part in (innovation, deviation, scores)])
        untested = innovation.isnan().all(-1) | first.any(-1)
        log_scores[rows] = filtering.step_log_likelihood.masked_fill(untested, math.nan)[batch.inside]
        log_likelihood += float(filtering.log_likelihood.sum())
        done += len(rows)
        show(done, total)
    value, low, high, degrees = nis
    return Tracks(
        settings, detections, levels, model, filtered, smoothed, value, low, high, degrees, log_likelihood, evaluations,
        converged, source, innovations[0], innovations[1], innovations[2], log_scores,
    )  # fmt: skip


def _estimate(result: Filtered | Smoothed, batch: TargetBatch, counts: Tensor, modes: int) -> StateEstimate:
    """Positions and velocities of the rows of a batch, NaN before there is an estimate."""
    d = batch.observations.shape[-1]
    per = result.mean.shape[-1] // d
    places = [*range(0, per * d, per), *range(1, per * d, per)]
    mean = result.mean[..., places]
    mean[..., :d] += batch.origin.unsqueeze(1)
    known = torch.cat((counts >= 1, counts >= 2), -1).expand(mean.shape)
    mean = mean.masked_fill(~known, math.nan)
    covariance = result.covariance[..., places, :][..., places]
    inside = batch.inside
    return StateEstimate(
        mean[inside], covariance[inside], motion_probability(result.log_mode_probability[inside], modes)
    )


def _put(estimates: StateEstimate, rows: Tensor, batch: StateEstimate) -> None:
    for target, values in zip(estimates, batch, strict=True):
        target[rows] = values
