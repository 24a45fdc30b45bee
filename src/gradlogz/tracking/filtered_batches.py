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
from .target_batches import TargetBatch
from .tracking_model import DetectionNoise, model_of_batch, motion_probability, noise_in

FILTERS = {"imm": imm, "gpb1": gpb1, "gpb2": gpb2}


class BatchWork(NamedTuple):
    """A batch of targets with its model. noise: that of the rows of the batch, if rows differ."""

    filter: str
    smooths: bool
    model: SwitchingModel
    prior: Prior
    noise: DetectionNoise | None
    batch: TargetBatch


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
    settings_filter: str,
    smooths: bool,
    model: SwitchingModel,
    prior: Prior,
    noise: DetectionNoise | None,
    batch: TargetBatch,
) -> BatchWork:
    """Return the work of a batch, with no more than its own rows of the noise."""
    return BatchWork(settings_filter, smooths, model, prior, noise_in(batch, noise), batch)


def filtered_batch(work: BatchWork) -> BatchTracks:
    """Filter, and smooth if asked, the targets of a batch."""
    model, batch = work.model, work.batch
    discrete, smoothed = model_of_batch(model, batch, work.noise), None
    if work.smooths:
        smoothing = smooth(discrete, batch.observations, work.prior, method="imm" if work.filter == "imm" else "gpb2")
        filtering = smoothing.filtered
        smoothed = _estimate(smoothing, batch, batch.counts[:, -1:], model.modes)
    else:
        filtering = FILTERS[work.filter](discrete, batch.observations, work.prior)
    first = (batch.counts == 1) & ~batch.observations.isnan()  # relative to a diffuse prior: no innovation
    innovation = filtering.innovation.masked_fill(first, math.nan)
    by_mode = filtering.mode_innovation.masked_fill(first.unsqueeze(-2), math.nan)
    tested = filtering._replace(innovation=innovation, mode_innovation=by_mode)
    deviation = filtering.innovation_covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    scores = innovation_scores(tested, joint=False)
    untested = innovation.isnan().all(-1) | first.any(-1)
    inside: Bool[Tensor, "b t"] = batch.inside
    return BatchTracks(
        batch.rows[inside],
        _estimate(filtering, batch, batch.counts, model.modes),
        smoothed,
        torch.stack([part[inside] for part in normalized_innovation(tested, mixture=True)[:4]]),
        torch.stack([part[inside] for part in (innovation, deviation, scores)]),
        filtering.step_log_likelihood.masked_fill(untested, math.nan)[inside],
        float(filtering.log_likelihood.sum()),
    )


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
