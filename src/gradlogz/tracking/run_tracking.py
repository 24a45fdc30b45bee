"""Batched filtering of many targets.

    track     read detections, estimate noise levels, reject outliers, filter, smooth        -> Tracks

Targets of similar length form one batch (target_batches.py). Stale rows (stale_rows.py) and outliers (outliers.py) are
rejected first, and the noise levels are those of the other detections. Positions are relative to the first detection of
a target, with a diffuse prior; the first detection of a coordinate therefore has no innovation.

Read next: noise_levels.py, tracking_model.py, level_fit.py, records.py (the results).
"""

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .. import __version__
from .._errors import InputValueError
from .._progress import Progress, reporter
from .._settings import changed
from .._typing import Tensor
from ..engine import Engine, engine_of, run_items
from . import scenario
from .columns import Source
from .detections import Detections, read
from .filtered_batches import BatchTracks, BatchWork, filtered_batch, work_of
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
    noise_of,
    prior_of,
    prior_of_batch,
    velocities_of,
)

Show = Callable[[int, int], None]


class _Parts(NamedTuple):
    """Divided work: who filters batches of targets, and where their results are."""

    engine: Engine
    folder: Path | None
    restart: bool
    show: Show


def track(
    detections: Source | None = None,
    *,
    filter: str | None = None,
    model: str | None = None,
    columns: Mapping[str, str] | None = None,
    sigma: float | Sequence[float] | None = None,
    sigma_velocity: float | None = None,
    noise: float | None = None,
    jitter: float | None = None,
    turn_rate: float | None = None,
    outliers: float | None = None,
    levels: Levels | str | os.PathLike[str] | None = None,
    smooth: bool | None = None,
    fit: bool | None = None,
    skip_bad: bool | None = None,
    seed: int | None = None,
    engine: str | Engine | None = None,
    workers: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    restart: bool = False,
    address: str | None = None,
    progress: Progress = False,
) -> Tracks:
    """Filter detections of moving targets with a switching Kalman filter.

    The other arguments are fields of `TrackingSettings`.

    Args:
        detections: path of a CSV or parquet file with columns time, target, x, y and optionally z, or such columns in
            a dictionary, a DataFrame of pandas or polars, or an xarray.Dataset; None selects the built-in scenario.
        progress: True shows a bar on standard error; a function is called with the completed and the total number of
            rows, where each likelihood of a fit counts its rows; of batches of targets while an engine filters them.
        levels: noise levels of an earlier run, `tracks.levels`, or the path of its results (--json).
        engine: who filters batches of targets: "process" (this one), "processes" of this machine, "slurm", "ray", or an
            `Engine`; None for this process without parts. Results do not depend on it.
        workers: number of processes or jobs at a time (default: number of cores).
        folder: folder of finished batches, from which the same call continues (default: none).
        restart: begin again in a folder that has finished batches.
        address: address of the Ray cluster: "auto", or HOST:PORT (default: a new one on this machine).

    Law: tests/tracking/test_tracks_are_what_the_filters_say.py.

    >>> tracks = track({"time": [0, 1, 2, 3], "x": [0.0, 1.1, 1.9, 3.0], "y": [0.0, 0.0, None, 0.1]}, sigma=0.1)
    >>> tracks.filtered.mean[-1].round(decimals=0)  # x, y, vx, vy
    tensor([3., 0., 1., 0.], dtype=torch.float64)
    """
    base = TrackingSettings() if detections is not None else scenario.settings_of(model or "turn")
    settings = changed(
        base, filter=filter, model=model, columns=columns, sigma=_numbers(sigma),
        sigma_velocity=sigma_velocity, noise=noise, jitter=jitter, turn_rate=turn_rate, outliers=outliers,
        levels=_name_of(levels), smooth=smooth, fit=fit, skip_bad=skip_bad, seed=seed,
    )  # fmt: skip
    check(settings)
    if detections is None:
        if settings.sigma_velocity is not None:
            problem = "the built-in scenario has no velocities, but sigma_velocity is given"
            raise InputValueError("track", "sigma_velocity", problem, "Pass detections, or drop sigma_velocity.")
        rows, source = scenario.flights(settings.seed), ""
    else:
        with_velocity = settings.sigma_velocity is not None
        rows = read(detections, columns=settings.columns, skip_bad=settings.skip_bad, with_velocity=with_velocity)
        source = str(detections) if isinstance(detections, str | os.PathLike) else "FILE.csv"
    earlier = read_levels(levels) if isinstance(levels, str | os.PathLike) else levels
    if earlier is not None:
        earlier = checked_levels(earlier, settings, rows)
    parts = None
    if engine is not None or folder is not None:
        place = None if folder is None else Path(folder)
        if not isinstance(engine, Engine):
            engine = engine_of("track", engine or "processes", workers=workers, folder=place, address=address)
        parts = _Parts(engine, place, restart, reporter(progress, "batches of targets"))
    return _tracked(rows, settings, earlier, source, reporter(progress, "rows"), parts)


def _name_of(levels: Levels | str | os.PathLike[str] | None) -> str | None:
    """Path of the levels, for the command that reproduces the page."""
    return "LEVELS.json" if isinstance(levels, Levels) else None if levels is None else str(levels)


def _numbers(sigma: float | Sequence[float] | None) -> float | tuple[float, ...] | None:
    """One number, or several as a tuple, also of an array."""
    values = getattr(sigma, "tolist", lambda: sigma)()
    return tuple(values) if isinstance(values, Sequence) else values


def _tracked(
    detections: Detections,
    settings: TrackingSettings,
    levels: Levels | None,
    source: str,
    show: Show,
    parts: _Parts | None,
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
    return _run(detections, settings, now, evaluations, converged, source, learning, show, parts)


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
    parts: _Parts | None,
) -> Tracks:
    """Filter batch by batch and restore the order of the rows; `done` counts the rows of the fit."""
    n, d = detections.position.shape
    model = dataclasses.replace(model_of(levels, settings, d), validate=False)
    noise = noise_of(detections, levels, velocities_of(detections, settings, levels))
    prior = prior_of_batch(prior_of(levels, model, d), noise)
    work = partial(work_of, settings, model, prior, noise)
    shapes = ((2 * d,), (2 * d, 2 * d), (model.modes,))
    filtered = StateEstimate(*(torch.full((n, *shape), math.nan, dtype=torch.float64) for shape in shapes))
    smoothed = StateEstimate(*map(torch.clone, filtered)) if settings.smooth else None
    nis = torch.full((4, n), math.nan, dtype=torch.float64)
    innovations = torch.full((3, n, d), math.nan, dtype=torch.float64)  # values, predicted deviations, and scores
    log_scores = torch.full((n,), math.nan, dtype=torch.float64)
    log_likelihood = 0.0
    division, failures, interrupted = batches(detections, ROWS), dict[str, str](), False
    if parts is None:
        results = _one_by_one(division, work, done, done + n, show)
    else:
        states, failures, interrupted = run_items(
            filtered_batch, {f"targets-{i:06d}": work(batch) for i, batch in enumerate(division)}, engine=parts.engine,
            folder=parts.folder, facts=_facts(settings, detections, levels), restart=parts.restart, call="track",
            progress=parts.show,
        )  # fmt: skip
        results = iter(states.values())
    for result in results:
        rows = result.rows
        _put(filtered, rows, result.filtered)
        if smoothed is not None and result.smoothed is not None:
            _put(smoothed, rows, result.smoothed)
        nis[:, rows], innovations[:, rows], log_scores[rows] = result.nis, result.innovations, result.log_scores
        log_likelihood += result.log_likelihood
    value, low, high, degrees = nis
    return Tracks(
        settings, detections, levels, model, filtered, smoothed, value, low, high, degrees, log_likelihood, evaluations,
        converged, source, innovations[0], innovations[1], innovations[2], log_scores, failures, interrupted,
    )  # fmt: skip


def _one_by_one(
    division: Iterable[TargetBatch], work: Callable[[TargetBatch], BatchWork], done: int, total: int, show: Show
) -> Iterator[BatchTracks]:
    """Yield the results of batches, each filtered in this process; `done` counts the rows of the fit."""
    for batch in division:
        result = filtered_batch(work(batch))
        yield result
        done += len(result.rows)
        show(done, total)


def _facts(settings: TrackingSettings, detections: Detections, levels: Levels) -> dict[str, object]:
    """Return what the results of batches depend on."""
    return {"version": __version__, **asdict(settings), "levels": repr(levels), "rows": _hash_of(detections)}


def _hash_of(detections: Detections) -> str:
    """Return the sha256 of the rows that are filtered."""
    digest = hashlib.sha256()
    for tensor in (detections.time, detections.target, detections.used, detections.sigma, detections.used_velocity):
        digest.update(b"" if tensor is None else tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _put(estimates: StateEstimate, rows: Tensor, batch: StateEstimate) -> None:
    for target, values in zip(estimates, batch, strict=True):
        target[rows] = values
