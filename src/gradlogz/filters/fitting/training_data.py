"""Series to learn from, some at a time, and where a start has led.

Read next: learning.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ..models.switching_model import SwitchingModel
from .parametrization import Beginning

CELLS = 1 << 23  # numbers of smoothed pairs of states that are held at a time


class Data(NamedTuple):
    """Series, all of one shape."""

    y: Float[Tensor, "b t o"]
    mask: Bool[Tensor, "b t o"] | None
    lengths: Int[Tensor, "b"] | None
    times: Float[Tensor, "b t"] | None

    def chunks(self, size: int) -> "Iterator[Data]":
        """Some series at a time."""
        for i in range(0, len(self.y), size):
            y, *rest = (None if part is None else part[i : i + size] for part in self)
            assert y is not None  # only what follows may be
            yield Data(y, *rest)

    @property
    def counted(self) -> Bool[Tensor, "b t"]:
        """Steps before the end of their series."""
        b, t = self.y.shape[:2]
        if self.lengths is None:
            return torch.ones(b, t, dtype=torch.bool, device=self.y.device)
        return torch.arange(t, device=self.y.device) < self.lengths.unsqueeze(-1)

    @property
    def seen(self) -> Bool[Tensor, "b t o"]:
        seen = ~self.y.isnan() & self.counted.unsqueeze(-1)
        return seen if self.mask is None else seen & self.mask


class End(NamedTuple):
    """Where a start has led."""

    model: SwitchingModel
    begin: Beginning
    log_likelihood: float
    history: list[float]
    converged: bool
