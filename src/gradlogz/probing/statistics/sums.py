"""Sums over documents, and the same sums over 200 bootstrap samples of documents.

    sums_0     = sum_d s_d                      s_d: what document d adds to each of k columns, the first its weight
    sums_r     = sum_d w_dr s_d                 w_dr ~ Poisson(1), from the key of d alone
    value      = f(sums_0),   draws = f(sums_r)                       any f of sums: mean, ratio, variance, correlation
    low, high  = value - c (value - q_.025), value + c (q_.975 - value)                           q: quantiles of draws
    c          = sqrt(n / (n - 1)) t_.975(n - 1) / z_.975
    n          = sums_0² / Var_r(sums_r)  of the weight column: how many documents of equal weight would say as much

The ends of the percentile interval are drawn apart by c because its coverage is too small for few documents; with c
it is right for means of normal documents, and c is 1 for many. Below two documents there is no interval. Draws are
blind to what no document showed: of rare events and of few, skewed documents the coverage stays below 95 %.

Read next: hashing.py (the weights), comoments.py (matrices, for which 200 replicates would be too many).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Int, Tensor
from ...special.distributions import student_quantile
from .estimates import LEVEL, Estimate
from .hashing import bootstrap_weights
from .validation import check_alike, double


class DocumentWeights:
    """The weights of the documents of a batch in each bootstrap sample, computed once for the many sums of a batch."""

    def __init__(self, keys: Int[Tensor, " b"]) -> None:
        self.keys = keys
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Float[Tensor, "b r"]:
        """1 and the weights of each replicate, on a device."""
        if device not in self._on:
            weights = bootstrap_weights(self.keys.to(device, non_blocking=True))
            self._on[device] = torch.cat((torch.ones_like(weights[:, :1]), weights), 1)
        return self._on[device]


class Sums(NamedTuple):
    """k columns summed over documents, [0], and over each bootstrap sample of documents, [1:]; float64."""

    totals: Float[Tensor, "r *s k"]

    def merge(self, other: "Sums") -> "Sums":
        """The sums over both."""
        check_alike("Sums.merge", self, other)
        return Sums(self.totals + other.totals)


def sums_of(values: Float[Tensor, "b *s k"], documents: Int[Tensor, " b"] | DocumentWeights) -> Sums:
    """The sums of rows of documents, each already summed over its tokens; several rows may be of one document.

    The first column is the weight of the row, such as its count of tokens.

    Args:
        documents: the key of the document of each row, or their weights where several sums share them.
    """
    weights = documents if isinstance(documents, DocumentWeights) else DocumentWeights(documents)
    if values.ndim < 2 or values.shape[:1] != weights.keys.shape:
        fact = f"shapes {shape_of(values)} and {shape_of(weights.keys)}"
        remedy = "Sum over tokens first and pass the key of the document of each row."
        raise InputValueError("sums_of", "values", f"values must be [b, *s, k] beside keys [b], got {fact}", remedy)
    values = double(values)
    return Sums((weights.on(values.device).mT @ values.flatten(1)).unflatten(1, values.shape[1:]))


def bootstrap(function: Callable[[Tensor], Tensor], sums: Sums) -> Estimate:
    """function(totals) with its interval; the function takes [r, *s, k] to [r, *e] and is called once.

    Where it joins entries, so that e is another shape than s, the entry of fewest documents counts for all.
    """
    found = function(sums.totals)
    value, draws = found[0], found[1:]
    tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=draws.dtype, device=draws.device)
    low, high = torch.nanquantile(draws, tails, 0)  # a draw may have no document at all
    n = documents(sums)
    n = n if n.shape == value.shape else n.min().expand(value.shape)
    z = math.sqrt(2) * torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)).item()
    c = (n / (n - 1)).sqrt() * student_quantile(n - 1) / z
    return Estimate(value, value - c * (value - low), value + c * (high - value), n - 1)


def documents(sums: Sums) -> Float[Tensor, "*s"]:
    """How many documents of equal weight would vary as these do under the bootstrap, 0 if there is no weight.

    For documents of weights w_d it is (sum w)² / sum w², known to about 10 % from 200 replicates.
    """
    weight = sums.totals[..., 0]
    return torch.where(weight[0] > 0, weight[0].square() / (weight[1:] - weight[0]).square().mean(0), 0.0)


def mean(totals: Float[Tensor, "*r k"], column: int = 1) -> Float[Tensor, "*r"]:
    """Of a column, over the weight in the first."""
    return totals[..., column] / totals[..., 0]


def ratio(totals: Float[Tensor, "*r k"], above: int = 1, below: int = 2) -> Float[Tensor, "*r"]:
    """Of two columns."""
    return totals[..., above] / totals[..., below]


def variance(totals: Float[Tensor, "*r k"]) -> Float[Tensor, "*r"]:
    """Of x, from the columns (1, x, x²) of `moment_columns`; divided by the weight."""
    x, xx = mean(totals, 1), mean(totals, 2)
    return (xx - x.square()).clamp(min=0.0)


def correlation(totals: Float[Tensor, "*r k"]) -> Float[Tensor, "*r"]:
    """Of x and y, from the columns (1, x, x², y, xy, y²) of `moment_columns`; NaN where one of them is constant."""
    x, xx, y, xy, yy = (mean(totals, column) for column in range(1, 6))
    spread = (xx - x.square()).clamp(min=0.0) * (yy - y.square()).clamp(min=0.0)
    return ((xy - x * y) / spread.sqrt()).clamp(-1.0, 1.0)


def moment_columns(
    x: Float[Tensor, "b *s n"],
    y: Float[Tensor, "b *s n"] | None = None,
    *,
    valid: Bool[Tensor, "b n"] | None = None,
    shift: float | Float[Tensor, "*s"] = 0.0,
    shift_y: float | Float[Tensor, "*s"] = 0.0,
) -> Float[Tensor, "b *s k"]:
    """Each row summed over its tokens: (1, x, x²), and with y also (y, xy, y²).

    The shifts are subtracted first. They must be the same for all batches; near the means, such as those of the first
    batch, they keep the variance from being a small difference of large numbers. Means are then means less the shift.
    """
    x = _shifted(double(x), shift)
    columns = [torch.ones_like(x), x, x.square()]
    if y is not None:
        y = _shifted(double(y), shift_y)
        columns += [y, x * y, y.square()]
    found = torch.stack(columns, -1)
    if valid is not None:
        seen = valid.to(x.device, non_blocking=True).reshape(len(valid), *(1,) * (x.ndim - 2), -1, 1)
        found = found.masked_fill(~seen, 0.0)
    return found.sum(-2)


def _shifted(x: Tensor, shift: float | Tensor) -> Tensor:
    return x - (shift.to(x, non_blocking=True).unsqueeze(-1) if isinstance(shift, Tensor) else shift)
