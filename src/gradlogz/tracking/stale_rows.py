"""Rows that repeat an earlier position of a moving target, and are no new detections.

    p_r = p_s              all coordinates of row r are those of an earlier row s, and of all rows between them
    v                      speed from s to the next other position (at the end of a target, from the one before s)
    stale                  v (t_r - t_s) > 4 sigma: the target has moved by more than noise can hide

Sources that write their last known position at regular times contain such rows; used as detections they would stop the
target. A target at rest, or one on a coarse grid, repeats positions too: there v (t_r - t_s) stays small.

Read next: run_tracking.py.
"""

import torch

from .._typing import Bool, Tensor
from .detections import Detections, grouped

CLEAR = 4.0  # standard deviations by which a target must have moved


def stale_rows(detections: Detections, sigma: float) -> Bool[Tensor, "n"]:
    """Rows whose position is out of date, for detections with this standard deviation."""
    detected = ~detections.position.isnan().any(-1)
    order, _, _ = grouped(detections.target)
    order = order[detected[order]]
    t, who, p = detections.time[order], detections.target[order], detections.position[order]
    repeats = torch.nn.functional.pad((who.diff() == 0) & (p.diff(dim=0) == 0).all(-1), (1, 0))
    stale = torch.zeros(len(detections.time), dtype=torch.bool)
    if not bool(repeats.any()):
        return stale
    starts = (~repeats).nonzero().flatten()  # rows with a new position
    run = (~repeats).cumsum(0) - 1
    first, later, earlier = starts[run], starts[(run + 1).clamp(max=len(starts) - 1)], starts[(run - 1).clamp(min=0)]
    other = torch.where((who[later] == who[first]) & (later > first), later, earlier)
    moves = (who[other] == who[first]) & (t[other] != t[first])
    speed = (p[other] - p[first]).norm(dim=-1) / (t[other] - t[first]).abs()
    stale[order] = repeats & moves & (speed * (t - t[first]) > CLEAR * sigma)
    return stale
