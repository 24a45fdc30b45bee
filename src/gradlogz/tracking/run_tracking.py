"""Detections filtered target by target, many targets at once.

    track     reads, finds the levels of noise, filters, perhaps smooths        -> Tracks

Targets of about one length are one batch. What moves a state depends on the time that has passed alone, and is made
once for each time that occurs. Positions count from where a target was first seen, and the first belief about them is
so wide that the detection replaces it; what it is compared with is therefore nothing, and it has no innovation.

Read next: noise_levels.py (the model), records.py (what comes out).
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
from .noise_levels import Levels, belief_of, levels_of, model_of
from .records import StateEstimate, Tracks
from .settings import TrackingSettings, check

Show = Callable[[int, int], None]
FILTERS = {"imm": imm, "gpb1": gpb1, "gpb2": gpb2}
ROWS = 1 << 16  # of a batch, padding included: what a smoother keeps of them is a few hundred MB
FITTED_ROWS, FITTED_STEPS = 4096, 256  # from which levels are learned
ITERATIONS = 60  # of learning, at most


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
    """Filter detections of moving targets, and say what is known of each.

    Arguments that are not listed are fields of `TrackingSettings`.

    Args:
        detections: a CSV or parquet file with columns time, target, x, y and perhaps z, or a dictionary of such
            columns; None is the built-in scenario.
        progress: True shows a bar on standard error; a function is called with the rows done and all rows, among them
            those from which levels are learned, once for each round.

    Law: tests/tracking/test_tracks_are_what_the_filters_say.py.

    >>> found = track({"time": [0, 1, 2, 3], "x": [0.0, 1.1, 1.9, 3.0], "y": [0.0, 0.0, None, 0.1]}, sigma=0.1)
    >>> found.filtered.mean[-1].round(decimals=0)  # x, y and how fast they change
    tensor([3., 0., 1., 0.], dtype=torch.float64)
    """
    base = TrackingSettings() if detections is not None else scenario.settings_of(model or "turn")
    settings = changed(
        base, filter=filter, model=model, sigma=sigma, noise=noise, turn_rate=turn_rate, smooth=smooth, fit=fit,
        skip_bad=skip_bad, seed=seed,
    )  # fmt: skip
    check(settings)
    if detections is None:
        found, source = scenario.flights(settings.seed), ""
    else:
        found = read(detections, skip_bad=settings.skip_bad)
        source = "FILE.csv" if isinstance(detections, dict) else str(detections)
    return _tracked(found, settings, source, reporter(progress, "rows"))


def _tracked(detections: Detections, settings: TrackingSettings, source: str, show: Show) -> Tracks:
    """Levels, the model that they make, and what it finds."""
    levels, dimensions, rounds = levels_of(detections, settings), detections.position.shape[-1], 0
    model = model_of(levels, settings, dimensions)
    learning = 0  # rows that are read while levels are learned, if every round is needed
    if settings.fit:
        batch = _learned_from(detections)
        rows = int(batch.inside.sum())
        learning = rows * ITERATIONS
        total = learning + len(detections.time)
        levels, rounds = _fitted(batch, settings, levels, model, lambda done: show(rows * done, total))
        model = model_of(levels, settings, dimensions)
    return _run(detections, settings, levels, model, rounds, source, learning, show)


# Batches ------------------------------------------------------------------------------------------------------------


class TargetBatch(NamedTuple):
    """Targets side by side, padded to the longest."""

    rows: Int[Tensor, "b t"]
    inside: Bool[Tensor, "b t"]
    dt: Float[Tensor, "b t"]
    origin: Float[Tensor, "b d"]
    observations: Float[Tensor, "b t d"]

    @property
    def counts(self) -> Int[Tensor, "b t d"]:
        """How often each coordinate has been seen."""
        return (~self.observations.isnan()).cumsum(1)


def batches(detections: Detections, most: int) -> Iterator[TargetBatch]:
    """All targets, those of about one length together; none is padded to more than twice its length."""
    order, starts, lengths = grouped(detections.target)
    by_length = lengths.argsort(descending=True, stable=True)
    sizes = lengths[by_length]
    first = 0
    while first < len(sizes):
        longest = int(sizes[first])
        half = int((2 * sizes >= longest).sum())  # how many are long enough, as they descend
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
    seen = ~y.isnan()
    origin = y.gather(1, seen.long().argmax(1, keepdim=True)).squeeze(1).nan_to_num()
    return TargetBatch(rows, inside, dt, origin, y - origin.unsqueeze(1))


def _of_steps(model: SwitchingModel, dt: Tensor) -> SwitchingModel:
    """The model of steps of these lengths, each length made once if lengths are few."""
    occurring, place = dt.unique(return_inverse=True)
    if 2 * len(occurring) > dt.numel():
        return model.at(dt)
    of = model.at(occurring)
    assert isinstance(of.transition, Tensor)  # it is no longer continuous
    return dataclasses.replace(of, transition=of.transition[place], F=of.F[place], Q=of.Q[place])


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
    """Filter one batch after the other, and put the rows back into their order; `done` counts the work before."""
    n, d = detections.position.shape
    belief = belief_of(levels, model, d)
    model = dataclasses.replace(model, validate=False)
    shapes = ((2 * d,), (2 * d, 2 * d), (model.modes,))
    filtered = StateEstimate(*(torch.empty(n, *shape, dtype=torch.float64) for shape in shapes))
    smoothed = StateEstimate(*map(torch.empty_like, filtered)) if settings.smooth else None
    nis = torch.empty(4, n, dtype=torch.float64)
    log_likelihood, total = 0.0, done + n
    for batch in batches(detections, ROWS):
        of, rows = _of_steps(model, batch.dt), batch.rows[batch.inside]
        if smoothed is not None:
            later = smooth(of, batch.observations, belief, method="imm" if settings.filter == "imm" else "gpb2")
            found = later.filtered
            _put(smoothed, rows, _estimate(later, batch, batch.counts[:, -1:]))
        else:
            found = FILTERS[settings.filter](of, batch.observations, belief)
        _put(filtered, rows, _estimate(found, batch, batch.counts))
        begins = (batch.counts == 1) & ~batch.observations.isnan()  # compared with nothing
        compared = normalized_innovation(found._replace(innovation=found.innovation.masked_fill(begins, math.nan)))
        nis[:, rows] = torch.stack([part[batch.inside] for part in compared[:4]])
        log_likelihood += float(found.log_likelihood.sum())
        done += len(rows)
        show(done, total)
    value, low, high, degrees = nis
    return Tracks(
        settings, detections, levels, model, filtered, smoothed, value, low, high, degrees, log_likelihood, rounds,
        source,
    )  # fmt: skip


def _estimate(found: Filtered | Smoothed, batch: TargetBatch, counts: Tensor) -> StateEstimate:
    """Positions and velocities of the rows that count, where they are known."""
    d = batch.observations.shape[-1]
    per = found.mean.shape[-1] // d
    places = [*range(0, per * d, per), *range(1, per * d, per)]
    mean = found.mean[..., places]
    mean[..., :d] += batch.origin.unsqueeze(1)
    known = torch.cat((counts >= 1, counts >= 2), -1).expand(mean.shape)
    mean = mean.masked_fill(~known, math.nan)
    covariance = found.covariance[..., places, :][..., places]
    inside = batch.inside
    return StateEstimate(mean[inside], covariance[inside], found.log_mode_probability[inside].exp())


def _put(whole: StateEstimate, rows: Tensor, part: StateEstimate) -> None:
    for all_, some in zip(whole, part, strict=True):
        all_[rows] = some


# Learning -----------------------------------------------------------------------------------------------------------


def _learned_from(detections: Detections) -> TargetBatch:
    """Some targets spread over all, and of each as many rows as levels are learned from."""
    lengths = detections.target.bincount()
    who = (lengths >= 3).nonzero().flatten()
    if len(who) == 0:
        remedy = "Give --sigma and --noise in place of --fit."
        raise InputValueError(
            "track", "detections", "a target must have three rows to fit levels, got fewer in each", remedy
        )
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
    """Levels that make what was seen likeliest; and in how many rounds."""
    shared = ["R"] if settings.model == "cv" else ["Q", "R"]
    found = fit(
        model,
        Series(batch.observations, times=batch.dt.cumsum(-1), lengths=batch.inside.sum(-1)),
        belief_of(levels, model, batch.observations.shape[-1]),
        learn=["Q", "R"],
        structure={"Q": "scale", "R": "scale"},
        max_iterations=ITERATIONS,
        tolerance=1e-5,
        shared=shared,
        smoother="imm",
        progress=lambda done, _: show(done),
    )
    learned = found.model
    sigma = math.sqrt(float(learned.R[0, 0, 0]))
    levels = levels._replace(sigma=sigma, noise=float(learned.Q[0, 1, 1]), manoeuvre=float(learned.Q[1, 1, 1]))
    return levels, len(found.history) - 1
