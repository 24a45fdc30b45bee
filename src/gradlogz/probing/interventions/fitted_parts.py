"""Replacements that are fitted to other documents: mean outputs of heads, mean updates and affine feed-forward maps.

    mean        mean over tokens of the outputs of each head, and of the update of a feed-forward sublayer
    affine      intercept + input B, the least-squares map from the input of a feed-forward sublayer to its update

Read next: ../statistics/regression.py (the fit), ../predictions/linearity.py (its R²).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..corpus.batching import Batch
from ..inside.architecture import Architecture
from ..inside.events import Attended, Event, Passed
from ..inside.following import follow
from ..inside.hooks import without_cache
from ..passes.placement import placed
from ..statistics import Comoments, comoments_of, merge, solve
from .losses import Kind, task_of


class Affine(NamedTuple):
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
    feed_forward: dict[str, Affine]
    tokens: int


class _HeadSums(NamedTuple):
    tokens: Tensor
    total: Float[Tensor, "h v"]

    def merge(self, other: "_HeadSums") -> "_HeadSums":
        return _HeadSums(self.tokens + other.tokens, self.total + other.total)


def fit_parts(
    model: nn.Module,
    architecture: Architecture,
    batches: Iterable[Batch],
    kind: Kind,
    tokenizer: Any,
    *,
    heads: bool,
    feed_forward: bool,
) -> FittedParts:
    """Return the means and maps of a model on the documents of these batches, in one pass."""
    sums: dict[str, _HeadSums] = {}
    moments: dict[str, Comoments] = {}
    tokens = 0
    for batch in batches:
        batch = placed(batch, model)
        batch_pass = BatchPass(batch)

        def add(event: Event, batch_pass: BatchPass = batch_pass) -> None:
            nonlocal sums, moments
            if isinstance(event, Attended) and heads and event.attention.output is not None:
                real = batch_pass.real(event)[:, None, :, None]
                total = torch.where(real, event.attention.output, 0.0).double().sum((0, 2))
                sums = merge(sums, {event.layer: _HeadSums(real.sum(), total)})
            elif isinstance(event, Passed) and feed_forward and event.sublayer.kind == "feed_forward":
                x, y, real = (t.flatten(0, 1) for t in (event.input, event.update, batch_pass.real(event)))
                added = comoments_of(x, y, group=0, weights=real, yy="trace")
                moments = merge(moments, {event.sublayer.name: added})

        task = task_of(kind, batch, tokenizer)
        with follow(model, architecture, add, statistics="none"):
            model(**task.inputs, **without_cache(model))
        tokens += int(batch.inputs["attention_mask"].sum())
    means = {layer: each.total / each.tokens for layer, each in sums.items()}
    return FittedParts(means, {name: _affine(each) for name, each in moments.items()}, tokens)


def _affine(moments: Comoments) -> Affine:
    total = moments.total()
    B = solve(total.xx, total.xy)
    return Affine(B, total.mean_y - total.mean_x @ B, total.mean_y)
