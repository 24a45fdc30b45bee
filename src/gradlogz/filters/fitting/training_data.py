"""Series as training data, flattened and in chunks; the system that is fitted; and the result of one start.

Read next: learning.py.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Tensor
from ..gaussian.clutter import Clutter, cluttered, prior_with_clutter
from ..models.switching_model import SwitchingModel
from ..prior_and_series import Prior, Series
from ..validation import intervals

CELLS = 1 << 23  # numbers held at a time for smoothed pairs of states
# Dimensions of the fields of a prior of all series; one more comes first if each series has its own.
OF_ALL_SERIES = {"mean": 2, "covariance": 3, "log_mode_probability": 1}


class System(NamedTuple):
    """A model, the prior of its modes (mean [k, s], or [b, k, s] for each series) and its outliers (None: none)."""

    model: SwitchingModel
    prior: Prior
    clutter: Clutter | None

    def of_series(self, rows: slice) -> "System":
        """The system of some of the series, whose priors may differ."""
        fields = {}
        for name, shared in OF_ALL_SERIES.items():
            field = getattr(self.prior, name)
            fields[name] = field[rows] if field.ndim > shared else field
        return self._replace(prior=Prior(**fields, per="mode"))

    def as_filtered(self, series: Series) -> tuple[SwitchingModel, Prior, Series]:
        """Arguments of a filter; outliers are modes, which continuous time must be discretised for."""
        if self.clutter is None:
            return self.model, self.prior, series
        model = self.model
        if model.continuous:
            dt = intervals("fit", model, series, validate=False)
            assert dt is not None  # continuous time
            model, series = model.at(dt), dataclasses.replace(series, times=None)
        return cluttered(model, self.clutter), prior_with_clutter(self.prior), series


def flattened(series: Series) -> Series:
    """Flatten the targets of a series to [b, t, o], with times for each target."""
    y, mask, lengths, times = series.observations, series.mask, series.lengths, series.times
    count, steps = y.shape[:-2].numel(), y.shape[-2:]
    if mask is not None:
        mask = (mask if mask.ndim == y.ndim else mask.unsqueeze(-1).expand(y.shape)).reshape(count, *steps)
    lengths = None if lengths is None else lengths.reshape(count)
    times = None if times is None else times.expand(y.shape[:-1]).reshape(count, steps[0])
    return Series(y.reshape(count, *steps), mask=mask, lengths=lengths, times=times)


def chunks(series: Series, size: int) -> Iterator[tuple[Series, slice]]:
    """Yield `size` series [b, t, o] at a time, and their rows."""
    fields: dict[str, Any] = {f.name: getattr(series, f.name) for f in dataclasses.fields(Series)}
    for i in range(0, len(series.observations), size):
        rows = slice(i, i + size)
        part: dict[str, Any] = {name: None if t is None else t[rows] for name, t in fields.items()}
        yield Series(**part), rows


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

    system: System
    log_likelihood: float
    history: list[float]
    converged: bool
