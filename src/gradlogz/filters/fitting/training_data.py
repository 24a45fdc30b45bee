"""Series as training data, flattened and in chunks; and the result of one start.

Read next: learning.py.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Tensor
from ..models.switching_model import SwitchingModel
from ..prior_and_series import Prior, Series

CELLS = 1 << 23  # numbers held at a time for smoothed pairs of states


def flattened(series: Series) -> Series:
    """Flatten the targets of a series to [b, t, o], with times for each target."""
    y, mask, lengths, times = series.observations, series.mask, series.lengths, series.times
    count, steps = y.shape[:-2].numel(), y.shape[-2:]
    if mask is not None:
        mask = (mask if mask.ndim == y.ndim else mask.unsqueeze(-1).expand(y.shape)).reshape(count, *steps)
    lengths = None if lengths is None else lengths.reshape(count)
    times = None if times is None else times.expand(y.shape[:-1]).reshape(count, steps[0])
    return Series(y.reshape(count, *steps), mask=mask, lengths=lengths, times=times)


def chunks(series: Series, size: int) -> Iterator[Series]:
    """Yield `size` series [b, t, o] at a time."""
    fields: dict[str, Any] = {f.name: getattr(series, f.name) for f in dataclasses.fields(Series)}
    for i in range(0, len(series.observations), size):
        part: dict[str, Any] = {name: None if t is None else t[i : i + size] for name, t in fields.items()}
        yield Series(**part)


def valid_steps(series: Series) -> Bool[Tensor, "b t"]:
    """Mask of the steps before the end of each series."""
    y, lengths = series.observations, series.lengths
    b, t = y.shape[:2]
    if lengths is None:
        return torch.ones(b, t, dtype=torch.bool, device=y.device)
    return torch.arange(t, device=y.device) < lengths.unsqueeze(-1)


def observed_entries(series: Series) -> Bool[Tensor, "b t o"]:
    """Mask of the observed entries."""
    observed = ~series.observations.isnan() & valid_steps(series).unsqueeze(-1)
    return observed if series.mask is None else observed & series.mask


class FitRun(NamedTuple):
    """Result of one start."""

    model: SwitchingModel
    prior: Prior
    log_likelihood: float
    history: list[float]
    converged: bool
