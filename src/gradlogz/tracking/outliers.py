"""Outliers among detections, found by a filter of a model that expects some.

    model        that of the tracks, with outliers (../filters.gaussian.clutter.py)
    rejected     rows whose probability of being an outlier, given the earlier detections, exceeds 1/2

The filter runs forward and backward in time, and a row must be an outlier in both directions: the beginning of a
manoeuvre is unexpected in one of them only. Near its start a filter does not notice an outlier; there the other
direction decides, unless it has lost the target, which shows in more than twice as many outliers. A second round,
without the rejected rows, finds outliers that these have hidden. If two or more rows of a target and at least
30 % of them (MANY) are outliers, its noise levels are too small: none is rejected.

Read next: target_batches.py, run_tracking.py (which filters the remaining detections).
"""

import math

import torch

from .._typing import Bool, Float, Tensor
from ..filters.gaussian.clutter import prior_with_clutter, with_clutter, without_clutter
from ..filters.gaussian.switching import imm
from ..filters.models.switching_model import SwitchingModel
from ..filters.prior_and_series import Prior
from .detections import Detections
from .noise_levels import DIFFUSE, SAMPLE, Levels
from .target_batches import ROWS, TargetBatch, batches
from .tracking_model import DetectionNoise, diffuse_deviation, model_of_batch, noise_in, prior_of_batch

ROUNDS = 2
NEAR = 3  # rows at the start of a filter, before it knows velocities
SPARE = 2  # outliers that one direction may have in excess of twice those of the other
MANY = 0.3  # share of the rows of a target from which on none is rejected
FAR, HIGH = 2.0, 0.95  # outliers are spread over FAR times the HIGH quantile of the distances from the first detection


def outliers_in(
    detections: Detections,
    model: SwitchingModel,
    prior: Prior,
    levels: Levels,
    noise: DetectionNoise | None,
    probability: float,
) -> Bool[Tensor, "n"]:
    """Rows that are outliers; each row is one with this probability before its position is known."""
    rejected = torch.zeros(len(detections.time), dtype=torch.bool)
    for batch in batches(detections, ROWS):
        detected = (~batch.observations.isnan()).any(-1)
        outlying = torch.zeros_like(detected)
        for _ in range(ROUNDS):
            y = batch.observations.masked_fill(outlying.unsqueeze(-1), math.nan)
            outlying |= _both_directions(batch._replace(observations=y), model, prior, levels, noise, probability)
        few = outlying.sum(-1) < torch.clamp(MANY * detected.sum(-1), min=1.5)
        rejected[batch.rows[batch.inside]] = (outlying & few.unsqueeze(-1))[batch.inside]
    return rejected


def _both_directions(
    batch: TargetBatch,
    model: SwitchingModel,
    prior: Prior,
    levels: Levels,
    noise: DetectionNoise | None,
    probability: float,
) -> Bool[Tensor, "b t"]:
    """Rows that are probably outliers in both directions of time; near the ends, in the direction that ends there."""
    order, detected = _reversed(batch.inside), (~batch.observations.isnan()).any(-1)
    turned = batch._replace(
        rows=_taken(batch.rows, order),
        observations=_taken(batch.observations, order),
        dt=_backward(batch.dt, order),
    )
    forward, backward = (
        _outlier_probability(each, model, prior, levels, noise, probability) > 0.5 for each in (batch, turned)
    )
    forward, backward = forward & detected, _taken(backward, order) & detected
    ahead, back = forward.sum(-1, keepdim=True), backward.sum(-1, keepdim=True)
    at, length = torch.arange(detected.shape[-1]), batch.inside.sum(-1, keepdim=True)
    first = (at < NEAR) & (back <= 2 * ahead + SPARE)
    last = (at >= length - NEAR) & (ahead <= 2 * back + SPARE)
    return (forward & backward) | (backward & first) | (forward & last)


def _outlier_probability(
    batch: TargetBatch,
    model: SwitchingModel,
    prior: Prior,
    levels: Levels,
    noise: DetectionNoise | None,
    probability: float,
) -> Float[Tensor, "b t"]:
    """Probability that each row is an outlier, given the rows before it."""
    covariance = outlier_covariance(batch, levels, noise)
    robust = with_clutter(model_of_batch(model, batch, noise_in(batch, noise)), probability, covariance)
    beginning = prior_with_clutter(prior_of_batch(prior, noise))
    filtered = imm(robust, batch.observations, beginning, fields=("log_mode_probability",))
    return without_clutter(filtered.log_mode_probability)[1]


def outlier_covariance(batch: TargetBatch, levels: Levels, noise: DetectionNoise | None) -> Float[Tensor, "b t d d"]:
    """Covariance of the positions of outliers, relative to the first detection of a target."""
    y = batch.observations
    deviation = _extent(y).clamp(min=diffuse_deviation(levels)).unsqueeze(-1)
    if noise is not None:  # outliers of a row are spread widely compared with its own noise
        sigma = noise.ordinary.diagonal(dim1=-2, dim2=-1).amax(-1).sqrt()
        deviation = deviation.maximum(DIFFUSE * sigma[batch.rows])
    return deviation.square()[..., None, None] * torch.eye(y.shape[-1], dtype=y.dtype)


def _extent(y: Float[Tensor, "b t d"]) -> Float[Tensor, "b"]:
    """FAR times the HIGH quantile of the distances of each target, from at most 2 SAMPLE coordinates of all."""
    some = y[:, :: max(1, y.numel() // SAMPLE)]
    return FAR * some.abs().flatten(1).nanquantile(HIGH, -1).nan_to_num()


def _reversed(inside: Bool[Tensor, "b t"]) -> Tensor:
    """Index of the rows of each target in reverse order; padding stays at the end."""
    at, lengths = torch.arange(inside.shape[-1]), inside.sum(-1, keepdim=True)
    return torch.where(inside, lengths - 1 - at, at)


def _taken(values: Tensor, order: Tensor) -> Tensor:
    return values.gather(1, order.reshape(*order.shape, *(1,) * (values.ndim - 2)).expand(values.shape))


def _backward(dt: Float[Tensor, "b t"], order: Tensor) -> Float[Tensor, "b t"]:
    """Time since the later neighbour; 0 for the last row of a target, which is the first now."""
    following = torch.nn.functional.pad(dt[:, 1:], (0, 1))
    return _taken(following, order)
