"""Sums over documents and over 200 bootstrap samples of documents.

    sums_0     = sum_d s_d                      s_d: contribution of document d to k columns, the first its weight
    sums_r     = sum_d w_dr s_d                 w_dr ~ Poisson(1), a function of the key of d alone
    value      = f(sums_0),   draws = f(sums_r)                       any f of sums: mean, ratio, variance, correlation
    low, high  = value - c (value - q_.025), value + c (q_.975 - value)           q: quantiles of draws; estimates.py
    n          = sums_0² / Var_r(sums_r)  of the weight column: effective number of documents

The factor c(n) widens the percentile interval, whose coverage is too small for few documents. With c the coverage is
correct for means of normally distributed documents; c tends to 1 for many documents. With fewer than two documents
there is no interval. The bootstrap cannot represent values that occur in no document: for rare events, and for few
documents with a skewed distribution, the coverage stays below 95 %.

Read next: hashing.py (the weights), comoments.py (matrices, for which 200 replicates would be too many).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Int, Tensor
from .estimates import Estimate, interval_of
from .hashing import bootstrap_weights
from .validation import check_alike, double


class DocumentWeights:
    """Bootstrap weights of the documents of a batch, computed once for all its sums."""

    def __init__(self, keys: Int[Tensor, " b"]) -> None:
        self.keys = keys
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Float[Tensor, "b r"]:
        """Return a column of ones followed by the weights of each replicate, on a device."""
        if device not in self._on:
            weights = bootstrap_weights(self.keys.to(device, non_blocking=True))
            self._on[device] = torch.cat((torch.ones_like(weights[:, :1]), weights), 1)
        return self._on[device]


class Sums(NamedTuple):
    """k columns summed over documents, [0], and over each bootstrap sample of documents, [1:]; float64."""

    totals: Float[Tensor, "r *s k"]

    def merge(self, other: "Sums") -> "Sums":
        """Return the sums over the documents of both."""
        check_alike("Sums.merge", self, other)
        return Sums(self.totals + other.totals)


def sums_of(values: Float[Tensor, "b *s k"], documents: Int[Tensor, " b"] | DocumentWeights) -> Sums:
    """Return the sums over rows, each a sum over the tokens of a document; a document may have several rows.

    The first column is the weight of the row, such as its number of tokens.

    Args:
        documents: key of each row's document, or the bootstrap weights if several sums share them.
    """
    weights = documents if isinstance(documents, DocumentWeights) else DocumentWeights(documents)
    if values.ndim < 2 or values.shape[:1] != weights.keys.shape:
        problem = f"values must be [b, *s, k] for keys [b], got {shape_of(values)} for keys {shape_of(weights.keys)}"
        remedy = "Sum over tokens first, and pass the key of each row's document."
        raise InputValueError("sums_of", "values", problem, remedy)
    values = double(values)
    return Sums((weights.on(values.device).mT @ values.flatten(1)).unflatten(1, values.shape[1:]))


def bootstrap(function: Callable[[Tensor], Tensor], sums: Sums) -> Estimate:
    """Return function(totals) with its confidence interval; the function maps [r, *s, k] to [r, *e] and is called once.

    If e differs from s because the function combines entries, the entry with the fewest documents determines n.
    """
    values = function(sums.totals)
    value, draws = values[0], values[1:]
    n = documents(sums)
    n = n if n.shape == value.shape else n.min().expand(value.shape)
    return interval_of(value, draws.movedim(0, -1), n - 1)


def documents(sums: Sums) -> Float[Tensor, "*s"]:
    """Return the effective number of documents, 0 if the total weight is 0.

    For documents of weights w_d it is (sum w)² / sum w², estimated to about 10 % from 200 replicates.
    """
    weight = sums.totals[..., 0]
    return torch.where(weight[0] > 0, weight[0].square() / (weight[1:] - weight[0]).square().mean(0), 0.0)


def mean(totals: Float[Tensor, "*r k"], column: int = 1) -> Float[Tensor, "*r"]:
    """Return the weighted mean of a column: its total over that of the weights in the first column."""
    return totals[..., column] / totals[..., 0]


def ratio(totals: Float[Tensor, "*r k"], above: int = 1, below: int = 2) -> Float[Tensor, "*r"]:
    """Return the ratio of the totals of two columns, `above` over `below`."""
    return totals[..., above] / totals[..., below]


def variance(totals: Float[Tensor, "*r k"]) -> Float[Tensor, "*r"]:
    """Return the variance of x (divided by the weight) from the columns (1, x, x²) of `moment_columns`."""
    x, xx = mean(totals, 1), mean(totals, 2)
    return (xx - x.square()).clamp(min=0.0)


def correlation(totals: Float[Tensor, "*r k"]) -> Float[Tensor, "*r"]:
    """Return the correlation of x and y from columns (1, x, x², y, xy, y²) of `moment_columns`; NaN if undefined."""
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
    """Return the columns (1, x, x²), and with y also (y, xy, y²), of each row, summed over its tokens.

    The shifts are subtracted first and must be equal for all batches. Shifts near the means, such as the means of the
    first batch, avoid cancellation in the variance. Means are then relative to the shift.
    """
    x = _shifted(double(x), shift)
    columns = [torch.ones_like(x), x, x.square()]
    if y is not None:
        y = _shifted(double(y), shift_y)
        columns += [y, x * y, y.square()]
    stacked = torch.stack(columns, -1)
    if valid is not None:
        mask = valid.to(x.device, non_blocking=True).reshape(len(valid), *(1,) * (x.ndim - 2), -1, 1)
        stacked = stacked.masked_fill(~mask, 0.0)
    return stacked.sum(-2)


def _shifted(x: Tensor, shift: float | Tensor) -> Tensor:
    return x - (shift.to(x, non_blocking=True).unsqueeze(-1) if isinstance(shift, Tensor) else shift)
