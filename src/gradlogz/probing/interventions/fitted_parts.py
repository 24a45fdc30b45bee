"""Replacements that are fitted to other documents: mean outputs of heads, mean updates and affine feed-forward maps.

    mean        mean over tokens of the outputs of each head, and of the update of a feed-forward sublayer
    affine      intercept + input B, the least-squares map from the input of a feed-forward sublayer to its update

Read next: ../statistics/regression.py (the fit), ../predictions/linearity.py (its R²).
"""

from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..inside.events import Attended, Event, Passed
from ..statistics import Comoments, comoments_of, merge, solve


class AffineMap(NamedTuple):
    """The map x -> intercept + x coefficients, and the mean of its targets."""

    coefficients: Float[Tensor, "D D"]
    intercept: Float[Tensor, " D"]
    mean: Float[Tensor, " D"]

    def __call__(self, x: Float[Tensor, "b n D"]) -> Float[Tensor, "b n D"]:
        """Return the values of the map, computed in float64."""
        return (self.intercept + x.double() @ self.coefficients).to(x.dtype)


class FittedParts(NamedTuple):
    """Mean outputs of the heads of each attention layer, [h, v], and affine maps of the feed-forward sublayers."""

    heads: dict[str, Float[Tensor, "h v"]]
    feed_forward: dict[str, AffineMap]
    tokens: int


class _HeadSums(NamedTuple):
    tokens: Tensor
    total: Float[Tensor, "h v"]

    def merge(self, other: "_HeadSums") -> "_HeadSums":
        return _HeadSums(self.tokens + other.tokens, self.total + other.total)


class PartSums:
    """Sums over the events of passes from which the parts are fitted."""

    def __init__(self, *, heads: bool, feed_forward: bool) -> None:
        self._wants_heads, self._wants_feed_forward = heads, feed_forward
        self._heads: dict[str, _HeadSums] = {}
        self._feed_forward: dict[str, Comoments] = {}
        self.tokens = 0

    def add(self, event: Event, batch_pass: BatchPass) -> None:
        """Add the outputs of the heads of an attention layer, or the input and update of a feed-forward sublayer."""
        if isinstance(event, Attended) and self._wants_heads and event.attention.output is not None:
            real = batch_pass.real(event)[:, None, :, None]
            total = torch.where(real, event.attention.output, 0.0).double().sum((0, 2))
            self._heads = merge(self._heads, {event.layer: _HeadSums(real.sum(), total)})
        elif isinstance(event, Passed) and self._wants_feed_forward and event.sublayer.kind == "feed_forward":
            x, y, real = (t.flatten(0, 1) for t in (event.input, event.update, batch_pass.real(event)))
            added = comoments_of(x, y, group=0, weights=real, yy="trace")
            self._feed_forward = merge(self._feed_forward, {event.sublayer.name: added})

    def fitted(self) -> FittedParts:
        """Return the means and the affine maps."""
        heads = {layer: each.total / each.tokens for layer, each in self._heads.items()}
        return FittedParts(heads, {name: _affine(each) for name, each in self._feed_forward.items()}, self.tokens)


def _affine(moments: Comoments) -> AffineMap:
    total = moments.total()
    B = solve(total.xx, total.xy)
    return AffineMap(B, total.mean_y - total.mean_x @ B, total.mean_y)
