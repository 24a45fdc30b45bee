"""Batched filtering of many targets.

    track     read detections, estimate noise levels, filter, smooth        -> Tracks

Targets of similar length form one batch. Transition matrices depend only on the time between detections and are
computed once for each time that occurs. Positions are relative to the first detection of a target, with a diffuse
prior; the first detection of a coordinate therefore has no innovation.

Read next: noise_levels.py (the model), records.py (the results).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .._errors import InputValueError
from .._progress import Progress, reporter
from .._settings import changed
from .._typing import Bool, Float, Int, Tensor
from ..filters.fitting.learning import fit
from ..filters.gaussian.consistency import normalized_innovation
from ..filters.gaussian.smoother import Smoothed, smooth
from ..filters.gaussian.switching import gpb1, gpb2, imm
from ..filters.models.switching_model import SwitchingModel
from ..filters.prior_and_series import Series
from ..filters.results import Filtered
from . import scenario
from .detections import Detections, Source, grouped, read
from .noise_levels import Levels, levels_of, model_of, prior_of
from .records import StateEstimate, Tracks
from .settings import TrackingSettings, check

Show = Callable[[int, int], None]
FILTERS = {"imm": imm, "gpb1": gpb1, "gpb2": gpb2}
ROWS = 1 << 16  # of a batch with padding; a smoother stores a few hundred MB for them
FITTED_ROWS, FITTED_STEPS = 4096, 256  # rows of a fit, and the longest series of a target
ITERATIONS = 60  # largest number of EM iterations


def track(
    detections: Source | None = None,
    *,
    filter: str | None = None,
    model: str | None = None,
    sigma: float | None = None,
    noise: float | None = None,
    turn_rate: float | None = None,
    smooth: bool | None = None,
    fit: bool | None = None,
    skip_bad: bool | None = None,
    seed: int | None = None,
    progress: Progress = False,
) -> Tracks:
    """Filter detections of moving targets with a switching Kalman filter.

    The other arguments are fields of `TrackingSettings`.

    Args:
        detections: path of a CSV or parquet file with columns time, target, x, y and optionally z, or a dictionary of
            such columns; None selects the built-in scenario.
        progress: True shows a bar on standard error; a function is called with the completed and the total number of
            rows, where each EM iteration of a fit counts its rows.

    Law: tests/tracking/test_tracks_are_what_the_filters_say.py.

    >>> tracks = track({"time": [0, 1, 2, 3], "x": [0.0, 1.1, 1.9, 3.0], "y": [0.0, 0.0, None, 0.1]}, sigma=0.1)
    >>> tracks.filtered.mean[-1].round(decimals=0)  # x, y, vx, vy
    tensor([3., 0., 1., 0.], dtype=torch.float64)
    """
    base = TrackingSettings() if detections is not None else scenario.settings_of(model or "turn")
    settings = changed(
        base, filter=filter, model=model, sigma=sigma, noise=noise, turn_rate=turn_rate, smooth=smooth, fit=fit,
        skip_bad=skip_bad, seed=seed,
    )  # fmt: skip
    check(settings)
    if detections is None:
        rows, source = scenario.flights(settings.seed), ""
    else:
        rows = read(detections, skip_bad=settings.skip_bad)
        source = "FILE.csv" if isinstance(detections, dict) else str(detections)
    return _tracked(rows, settings, source, reporter(progress, "rows"))


def _tracked(detections: Detections, settings: TrackingSettings, source: str, show: Show) -> Tracks:
    """Estimate or fit the noise levels, and filter with the resulting model."""
    levels, dimensions, rounds = levels_of(detections, settings), detections.position.shape[-1], 0
    model = model_of(levels, settings, dimensions)
    learning = 0  # rows processed by the fit, if it needs every iteration
    if settings.fit:
        batch = _fit_sample(detections)
        rows = int(batch.inside.sum())
        learning = rows * ITERATIONS
        total = learning + len(detections.time)
        levels, rounds = _fitted(batch, settings, levels, model, lambda done: show(rows * done, total))
        model = model_of(levels, settings, dimensions)
    return _run(detections, settings, levels, model, rounds, source, learning, show)


# Batches ------------------------------------------------------------------------------------------------------------


class TargetBatch(NamedTuple):
    """Targets side by side, padded to the longest.

    Attributes:
        rows: indices of the detections.
        inside: False for padding.
        dt: time since the previous row of the target.
        origin: first detection of each coordinate.
        observations: positions relative to the origin; NaN if not detected.
    """

    rows: Int[Tensor, "b t"]
    inside: Bool[Tensor, "b t"]
    dt: Float[Tensor, "b t"]
    origin: Float[Tensor, "b d"]
    observations: Float[Tensor, "b t d"]

    @property
    def counts(self) -> Int[Tensor, "b t d"]:
        """Number of detections of each coordinate so far."""
        return (~self.observations.isnan()).cumsum(1)


def batches(detections: Detections, most: int) -> Iterator[TargetBatch]:
    """Batches of targets of similar length; none is padded to more than twice its length."""
    order, starts, lengths = grouped(detections.target)
    by_length = lengths.argsort(descending=True, stable=True)
    sizes = lengths[by_length]
    first = 0
    while first < len(sizes):
        longest = int(sizes[first])
        half = int((2 * sizes >= longest).sum())  # number of targets of at least half the length; sizes descend
        end = min(half, first + max(1, most // longest))
        yield _batch(detections, order, starts[by_length[first:end]], sizes[first:end])
        first = end


def _batch(detections: Detections, order: Tensor, starts: Tensor, lengths: Tensor) -> TargetBatch:
    at = torch.arange(int(lengths.max()))
    inside = at < lengths.unsqueeze(-1)
    rows = order[(starts.unsqueeze(-1) + at).clamp(max=len(order) - 1)]
    rows = torch.where(inside, rows, rows[:, :1])
    y = detections.position[rows].masked_fill(~inside.unsqueeze(-1), math.nan)
    time = detections.time[rows]
    dt = time.diff(dim=-1, prepend=time[:, :1]).masked_fill(~inside, 0.0)
    detected = ~y.isnan()
    origin = y.gather(1, detected.long().argmax(1, keepdim=True)).squeeze(1).nan_to_num()
    return TargetBatch(rows, inside, dt, origin, y - origin.unsqueeze(1))


def _discretized(model: SwitchingModel, dt: Tensor) -> SwitchingModel:
    """The model for steps of these lengths; each distinct length is computed once if there are few."""
    distinct, index = dt.unique(return_inverse=True)
    if 2 * len(distinct) > dt.numel():
        return model.at(dt)
    discrete = model.at(distinct)
    assert isinstance(discrete.transition, Tensor)  # no longer a Generator
    return dataclasses.replace(
        discrete, transition=discrete.transition[index], F=discrete.F[index], Q=discrete.Q[index]
    )


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
        discrete, rows = _discretized(model, batch.dt), batch.rows[batch.inside]
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
        position=detections.position[chosen],
    )
    order, starts, sizes = grouped(part.target)
    return _batch(part, order, starts, sizes.clamp(max=FITTED_STEPS))


def _fitted(
    batch: TargetBatch,
    settings: TrackingSettings,
    levels: Levels,
    model: SwitchingModel,
    show: Callable[[int], None],
) -> tuple[Levels, int]:
    """Noise levels fitted by EM, and the number of iterations."""
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
    sigma = math.sqrt(float(fitted.model.R[0, 0, 0]))
    levels = levels._replace(
        sigma=sigma, noise=float(fitted.model.Q[0, 1, 1]), manoeuvre=float(fitted.model.Q[1, 1, 1])
    )
    return levels, len(fitted.history) - 1
