"""Batched filtering of many targets.

    track     read detections, estimate noise levels, reject outliers, filter, smooth        -> Tracks

Targets of similar length form one batch (target_batches.py). Outliers are rejected first (outliers.py), and the noise
levels are those of the other detections. Positions are relative to the first detection of a target, with a diffuse
prior; the first detection of a coordinate therefore has no innovation.

Read next: noise_levels.py (the model), records.py (the results).
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
from ..filters.fitting.learning import fit
from ..filters.gaussian.consistency import normalized_innovation
from ..filters.gaussian.smoother import Smoothed, smooth
from ..filters.gaussian.switching import gpb1, gpb2, imm
from ..filters.models.switching_model import SwitchingModel
from ..filters.prior_and_series import Series
from ..filters.results import Filtered
from . import scenario
from .columns import Source
from .detections import Detections, grouped, read
from .noise_levels import Levels, levels_of, model_of, prior_of
from .outliers import outliers_in
from .records import StateEstimate, Tracks
from .settings import TrackingSettings, check
from .target_batches import ROWS, TargetBatch, batch_of, batches, model_of_batch

Show = Callable[[int, int], None]
FILTERS = {"imm": imm, "gpb1": gpb1, "gpb2": gpb2}
FITTED_ROWS, FITTED_STEPS = 4096, 256  # rows of a fit, and the longest series of a target
ITERATIONS = 60  # largest number of iterations of a fit


def track(
    detections: Source | None = None,
    *,
    filter: str | None = None,
    model: str | None = None,
    columns: Mapping[str, str] | None = None,
    sigma: float | Sequence[float] | None = None,
    noise: float | None = None,
    turn_rate: float | None = None,
    outliers: float | None = None,
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
            rows, where each iteration of a fit counts its rows.

    Law: tests/tracking/test_tracks_are_what_the_filters_say.py.

    >>> tracks = track({"time": [0, 1, 2, 3], "x": [0.0, 1.1, 1.9, 3.0], "y": [0.0, 0.0, None, 0.1]}, sigma=0.1)
    >>> tracks.filtered.mean[-1].round(decimals=0)  # x, y, vx, vy
    tensor([3., 0., 1., 0.], dtype=torch.float64)
    """
    base = TrackingSettings() if detections is not None else scenario.settings_of(model or "turn")
    settings = changed(
        base, filter=filter, model=model, columns=columns, sigma=_numbers(sigma), noise=noise, turn_rate=turn_rate,
        outliers=outliers, smooth=smooth, fit=fit, skip_bad=skip_bad, seed=seed,
    )  # fmt: skip
    check(settings)
    if detections is None:
        rows, source = scenario.flights(settings.seed), ""
    else:
        rows = read(detections, columns=settings.columns, skip_bad=settings.skip_bad)
        source = str(detections) if isinstance(detections, str | os.PathLike) else "FILE.csv"
    return _tracked(rows, settings, source, reporter(progress, "rows"))


def _numbers(sigma: float | Sequence[float] | None) -> float | tuple[float, ...] | None:
    """One number, or several as a tuple, also of an array."""
    values = getattr(sigma, "tolist", lambda: sigma)()
    return tuple(values) if isinstance(values, Sequence) else values


def _tracked(detections: Detections, settings: TrackingSettings, source: str, show: Show) -> Tracks:
    """Estimate or fit the noise levels, and filter with the resulting model."""
    if settings.sigma is not None:
        detections = detections._replace(sigma=None)  # the setting replaces the column
    if settings.fit and detections.sigma is not None:
        problem = "fit needs one standard deviation for all rows, but the detections have a column with them"
        raise InputValueError("track", "fit", problem, "Drop fit (--fit), or pass sigma (--sigma) as its start.")
    dimensions, rounds = detections.position.shape[-1], 0
    levels = levels_of(detections, settings)
    for _ in range(2 if settings.outliers else 0):  # levels that outliers have raised hide some of them
        detections = _without_outliers(detections, settings, levels, model_of(levels, settings, dimensions))
        levels = levels_of(detections, settings)
    model = model_of(levels, settings, dimensions)
    learning = 0  # rows processed by the fit, if it needs every iteration
    if settings.fit:
        batch = _fit_sample(detections)
        rows = int(batch.inside.sum())
        learning = rows * ITERATIONS
        total = learning + len(detections.time)
        levels, rounds = _fitted(batch, settings, levels, model, lambda done: show(rows * done, total))
        model = model_of(levels, settings, dimensions)
        detections = _without_outliers(detections, settings, levels, model) if settings.outliers else detections
    return _run(detections, settings, levels, model, rounds, source, learning, show)


def _without_outliers(
    detections: Detections, settings: TrackingSettings, levels: Levels, model: SwitchingModel
) -> Detections:
    """Detections with outliers marked as rejected; earlier marks are replaced."""
    detections = detections._replace(rejected=None)
    prior = prior_of(levels, model, detections.position.shape[-1])
    model = dataclasses.replace(model, validate=False)
    return detections._replace(rejected=outliers_in(detections, model, prior, levels, settings.outliers))


def _run(
    detections: Detections,
    settings: TrackingSettings,
    levels: Levels,
    model: SwitchingModel,
    rounds: int,
    source: str,
    done: int,
    show: Show,
) -> Tracks:
    """Filter batch by batch and restore the order of the rows; `done` counts the rows of the fit."""
    n, d = detections.position.shape
    prior = prior_of(levels, model, d)
    model = dataclasses.replace(model, validate=False)
    shapes = ((2 * d,), (2 * d, 2 * d), (model.modes,))
    filtered = StateEstimate(*(torch.empty(n, *shape, dtype=torch.float64) for shape in shapes))
    smoothed = StateEstimate(*map(torch.empty_like, filtered)) if settings.smooth else None
    nis = torch.empty(4, n, dtype=torch.float64)
    innovations = torch.empty(2, n, d, dtype=torch.float64)  # values and predicted standard deviations
    log_likelihood, total = 0.0, done + n
    for batch in batches(detections, ROWS):
        discrete, rows = model_of_batch(model, batch, detections.sigma), batch.rows[batch.inside]
        if smoothed is not None:
            smoothing = smooth(
                discrete, batch.observations, prior, method="imm" if settings.filter == "imm" else "gpb2"
            )
            filtering = smoothing.filtered
            _put(smoothed, rows, _estimate(smoothing, batch, batch.counts[:, -1:]))
        else:
            filtering = FILTERS[settings.filter](discrete, batch.observations, prior)
        _put(filtered, rows, _estimate(filtering, batch, batch.counts))
        first = (batch.counts == 1) & ~batch.observations.isnan()  # relative to a diffuse prior: no innovation
        innovation = filtering.innovation.masked_fill(first, math.nan)
        nis[:, rows] = torch.stack(
            [part[batch.inside] for part in normalized_innovation(filtering._replace(innovation=innovation))[:4]]
        )
        deviation = filtering.innovation_covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        innovations[:, rows] = torch.stack((innovation[batch.inside], deviation[batch.inside]))
        log_likelihood += float(filtering.log_likelihood.sum())
        done += len(rows)
        show(done, total)
    value, low, high, degrees = nis
    return Tracks(
        settings, detections, levels, model, filtered, smoothed, value, low, high, degrees, log_likelihood, rounds,
        source, *innovations,
    )  # fmt: skip


def _estimate(result: Filtered | Smoothed, batch: TargetBatch, counts: Tensor) -> StateEstimate:
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
    return StateEstimate(mean[inside], covariance[inside], result.log_mode_probability[inside].exp())


def _put(estimates: StateEstimate, rows: Tensor, batch: StateEstimate) -> None:
    for target, values in zip(estimates, batch, strict=True):
        target[rows] = values


# Fitting ------------------------------------------------------------------------------------------------------------


def _fit_sample(detections: Detections) -> TargetBatch:
    """A sample of the targets, evenly spread, each with at most FITTED_STEPS rows."""
    lengths = detections.target.bincount()
    who = (lengths >= 3).nonzero().flatten()
    if len(who) == 0:
        problem = "detections has no target with three rows, which a fit of the noise levels needs"
        raise InputValueError("track", "detections", problem, "Pass sigma and noise in place of fit (--fit).")
    wanted = max(1, FITTED_ROWS // int(lengths[who].double().mean().clamp(max=FITTED_STEPS)))
    who = who[:: math.ceil(len(who) / wanted)]
    chosen = torch.isin(detections.target, who)
    part = detections._replace(
        time=detections.time[chosen],
        target=detections.target[chosen].unique(return_inverse=True)[1],
        position=detections.used[chosen],
        rejected=None,
    )
    order, starts, sizes = grouped(part.target)
    return batch_of(part, order, starts, sizes.clamp(max=FITTED_STEPS))


def _fitted(
    batch: TargetBatch,
    settings: TrackingSettings,
    levels: Levels,
    model: SwitchingModel,
    show: Callable[[int], None],
) -> tuple[Levels, int]:
    """Noise levels fitted by maximum likelihood, and the number of iterations."""
    shared = ["R"] if settings.model == "cv" else ["Q", "R"]
    fitted = fit(
        model,
        Series(batch.observations, times=batch.dt.cumsum(-1), lengths=batch.inside.sum(-1)),
        prior_of(levels, model, batch.observations.shape[-1]),
        learn=["Q", "R"],
        structure={"Q": "scale", "R": "scale"},
        max_iterations=ITERATIONS,
        tolerance=1e-5,
        shared=shared,
        smoother="imm",
        progress=lambda done, _: show(done),
    )
    sigma = math.sqrt(float(fitted.model.R[0, 0, 0])) / levels.ratios[0]
    levels = levels._replace(
        sigma=sigma, noise=float(fitted.model.Q[0, 1, 1]), manoeuvre=float(fitted.model.Q[1, 1, 1])
    )
    return levels, len(fitted.history) - 1
