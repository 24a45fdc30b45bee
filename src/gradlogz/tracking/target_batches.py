"""Targets side by side: batches of similar length, and a model for the times between their detections.

Transition matrices depend only on the time between detections and are computed once for each time that occurs.

Read next: tracking_model.py, run_tracking.py (the filter), outliers.py.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .._typing import Bool, Float, Int, Tensor
from ..filters.models.switching_model import SwitchingModel
from .detections import Detections, grouped

ROWS = 1 << 16  # of a batch with padding; a smoother stores a few hundred MB for them


class TargetBatch(NamedTuple):
    """Targets side by side, padded to the longest.

    Attributes:
        rows: indices of the detections.
        inside: False for padding.
        dt: time since the previous row of the target.
        origin: first detection of each coordinate.
        observations: positions relative to the origin; NaN if not detected.
        velocity: reported velocities, if they are used; NaN if missing.
    """

    rows: Int[Tensor, "b t"]
    inside: Bool[Tensor, "b t"]
    dt: Float[Tensor, "b t"]
    origin: Float[Tensor, "b d"]
    observations: Float[Tensor, "b t d"]
    velocity: Float[Tensor, "b t 2"] | None = None

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
        yield batch_of(detections, order, starts[by_length[first:end]], sizes[first:end])
        first = end


def batch_of(detections: Detections, order: Tensor, starts: Tensor, lengths: Tensor) -> TargetBatch:
    """Batch of the targets whose rows begin at these positions of `order`, with these numbers of rows."""
    at = torch.arange(int(lengths.max()))
    inside = at < lengths.unsqueeze(-1)
    rows = order[(starts.unsqueeze(-1) + at).clamp(max=len(order) - 1)]
    rows = torch.where(inside, rows, rows[:, :1])
    y = detections.used[rows].masked_fill(~inside.unsqueeze(-1), math.nan)
    time = detections.time[rows]
    dt = time.diff(dim=-1, prepend=time[:, :1]).masked_fill(~inside, 0.0)
    detected = ~y.isnan()
    origin = y.gather(1, detected.long().argmax(1, keepdim=True)).squeeze(1).nan_to_num()
    velocity = detections.used_velocity
    if velocity is not None:
        velocity = velocity[rows].masked_fill(~inside.unsqueeze(-1), math.nan)
    return TargetBatch(rows, inside, dt, origin, y - origin.unsqueeze(1), velocity)


def discretized(model: SwitchingModel, dt: Tensor) -> SwitchingModel:
    """The model for steps of these lengths; each distinct length is computed once if there are few."""
    distinct, index = dt.unique(return_inverse=True)
    if 2 * len(distinct) > dt.numel():
        return model.at(dt)
    discrete = model.at(distinct)
    assert isinstance(discrete.transition, Tensor)  # no longer a Generator
    return dataclasses.replace(
        discrete, transition=discrete.transition[index], F=discrete.F[index], Q=discrete.Q[index]
    )
