"""Batches of targets, filtered one by one: in this process, or by an engine.

    BatchWork     a batch with its model: depends on nothing else
    BatchTracks   its results, for the rows of the batch

Read next: run_tracking.py (puts the rows in order), target_batches.py (the batches).
"""

import math
from typing import NamedTuple

import torch

from .._typing import Bool, Float, Int, Tensor
from ..filters.gaussian.consistency import normalized_innovation
from ..filters.gaussian.innovation_scores import innovation_scores
from ..filters.gaussian.smoother import Smoothed, smooth
from ..filters.gaussian.switching import gpb1, gpb2, imm
from ..filters.models.switching_model import SwitchingModel
from ..filters.prior_and_series import Prior
from ..filters.results import Filtered
from .records import StateEstimate
from .settings import TrackingSettings
from .target_batches import TargetBatch
from .tracking_model import DetectionNoise, model_of_batch, motion_probability, noise_in, with_velocity

FILTERS = {"imm": imm, "gpb1": gpb1, "gpb2": gpb2}


class BatchWork(NamedTuple):
    """A batch of targets with its model.

    noise: that of the rows of the batch, if rows differ. sigma_velocity: that of reported velocities, if they are used.
    """

    filter: str
    smooths: bool
    model: SwitchingModel
    prior: Prior
    noise: DetectionNoise | None
    batch: TargetBatch
    sigma_velocity: float | None = None


class BatchTracks(NamedTuple):
    """Results for the rows of a batch.

    nis: values, low and high ends, degrees of freedom. innovations: values, predicted standard deviations, scores.
    """

    rows: Int[Tensor, " n"]
    filtered: StateEstimate
    smoothed: StateEstimate | None
    nis: Float[Tensor, "4 n"]
    innovations: Float[Tensor, "3 n d"]
    log_scores: Float[Tensor, " n"]
    log_likelihood: float


def work_of(
    settings: TrackingSettings,
    model: SwitchingModel,
    prior: Prior,
    noise: DetectionNoise | None,
    batch: TargetBatch,
) -> BatchWork:
    """Return the work of a batch, with no more than its own rows of the noise."""
    sigma_velocity = settings.sigma_velocity
    return BatchWork(settings.filter, settings.smooth, model, prior, noise_in(batch, noise), batch, sigma_velocity)


def filtered_batch(work: BatchWork) -> BatchTracks:
    """Filter, and smooth if asked, the targets of a batch."""
    model, batch = work.model, work.batch
    discrete, smoothed, y = model_of_batch(model, batch, work.noise), None, batch.observations
    d = y.shape[-1]
    first = (batch.counts == 1) & ~y.isnan()  # relative to a diffuse prior: no innovation
    if work.sigma_velocity is not None and batch.velocity is not None:
        discrete = with_velocity(discrete, d, work.sigma_velocity)
        y = torch.cat((y, batch.velocity), -1)
        first = torch.cat((first, first.any(-1, keepdim=True).expand(batch.velocity.shape)), -1)
    if work.smooths:
        smoothing = smooth(discrete, y, work.prior, method="imm" if work.filter == "imm" else "gpb2")
        filtering = smoothing.filtered
        smoothed = _estimate(smoothing, batch, slice(-1, None), model.modes)
    else:
        filtering = FILTERS[work.filter](discrete, y, work.prior)
    innovation = filtering.innovation.masked_fill(first, math.nan)
    by_mode = filtering.mode_innovation.masked_fill(first.unsqueeze(-2), math.nan)
    tested = filtering._replace(innovation=innovation, mode_innovation=by_mode)
    deviation = filtering.innovation_covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    scores = innovation_scores(tested, joint=False)
    untested = innovation.isnan().all(-1) | first.any(-1)
    inside: Bool[Tensor, "b t"] = batch.inside
    return BatchTracks(
        batch.rows[inside],
        _estimate(filtering, batch, slice(None), model.modes),
        smoothed,
        torch.stack([part[inside] for part in normalized_innovation(tested, mixture=True)[:4]]),
        torch.stack([part[inside][:, :d] for part in (innovation, deviation, scores)]),
        filtering.step_log_likelihood.masked_fill(untested, math.nan)[inside],
        float(filtering.log_likelihood.sum()),
    )


def _estimate(result: Filtered | Smoothed, batch: TargetBatch, known_at: slice, modes: int) -> StateEstimate:
    """Positions and velocities of the rows of a batch, NaN without an estimate from the rows up to `known_at`."""
    d, counts = batch.observations.shape[-1], batch.counts
    moving = counts >= 2
    if batch.velocity is not None:
        moving[..., :2] |= (~batch.velocity.isnan()).cumsum(1) >= 1
    per = result.mean.shape[-1] // d
    places = [*range(0, per * d, per), *range(1, per * d, per)]
    mean = result.mean[..., places]
    mean[..., :d] += batch.origin.unsqueeze(1)
    known = torch.cat((counts >= 1, moving), -1)[:, known_at].expand(mean.shape)
    mean = mean.masked_fill(~known, math.nan)
    covariance = result.covariance[..., places, :][..., places]
    inside = batch.inside
    return StateEstimate(
        mean[inside], covariance[inside], motion_probability(result.log_mode_probability[inside], modes)
    )
