"""Series as training data: all targets in one dimension, some of them at a time; and where a start has led.

Read next: learning.py.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Tensor
from ..models.switching_model import SwitchingModel
from ..prior_and_series import Prior, Series

CELLS = 1 << 23  # numbers of smoothed pairs of states that are held at a time


def flattened(series: Series) -> Series:
    """The same series as [b, t, o], with times of each target."""
    y, mask, lengths, times = series.observations, series.mask, series.lengths, series.times
    count, steps = y.shape[:-2].numel(), y.shape[-2:]
    if mask is not None:
        mask = (mask if mask.ndim == y.ndim else mask.unsqueeze(-1).expand(y.shape)).reshape(count, *steps)
    lengths = None if lengths is None else lengths.reshape(count)
    times = None if times is None else times.expand(y.shape[:-1]).reshape(count, steps[0])
    return Series(y.reshape(count, *steps), mask=mask, lengths=lengths, times=times)


def chunks(series: Series, size: int) -> Iterator[Series]:
    """Some series [b, t, o] at a time."""
    given: dict[str, Any] = {f.name: getattr(series, f.name) for f in dataclasses.fields(Series)}
    for i in range(0, len(series.observations), size):
        part: dict[str, Any] = {name: None if t is None else t[i : i + size] for name, t in given.items()}
        yield Series(**part)


def counted(series: Series) -> Bool[Tensor, "b t"]:
    """Steps before the end of their series."""
    y, lengths = series.observations, series.lengths
    b, t = y.shape[:2]
    if lengths is None:
        return torch.ones(b, t, dtype=torch.bool, device=y.device)
    return torch.arange(t, device=y.device) < lengths.unsqueeze(-1)


def seen(series: Series) -> Bool[Tensor, "b t o"]:
    """Where there are observations."""
    there = ~series.observations.isnan() & counted(series).unsqueeze(-1)
    return there if series.mask is None else there & series.mask


class FitRun(NamedTuple):
    """Where a start has led."""

    model: SwitchingModel
    prior: Prior
    log_likelihood: float
    history: list[float]
    converged: bool
