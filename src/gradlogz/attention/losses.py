"""Penalties on the statistics of attention, to be added to a training loss.

    z_loss               c mean G²                                              [chowdhery23] [zoph22]
    entropy_loss         c mean_h ((floor - H_h)_+² + (H_h - ceiling)_+²)       [zhai23] [jha25]
    logit_variance_loss  c mean V,   V = -dH / dlog beta at beta = 1

G, H and V are the log normaliser, the entropy and the logit variance of a row; H_h is the mean entropy of the rows of
head h. Rows that see no key and rows that `query_mask` hides are left out. The loss of several layers is the mean of
the losses of the layers. Nothing waits for the device.

Read next: result.py (the statistics), in_models/observation.py (those of every layer of a model).
"""

from collections.abc import Callable, Mapping

import torch

from .._errors import InputTypeError, InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor
from .result import SEES_NOTHING, Attention, by_heads

Statistics = Attention | Mapping[str, Attention]
QueryMask = Bool[Tensor, "*b m"] | Int[Tensor, "*b m"] | Float[Tensor, "*b m"]


def z_loss(
    statistics: Statistics, *, coefficient: float = 1e-4, query_mask: QueryMask | None = None
) -> Float[Tensor, ""]:
    """Penalty c mean G² on the log normaliser, which keeps the logits of attention from drifting.

    Args:
        statistics: the result of `attend`, or those of all layers, as `observe` returns them.
        coefficient: c. PaLM uses 1e-4 for the softmax of the output [chowdhery23], ST-MoE 1e-3 for that of its router
            [zoph22].
        query_mask: [*b, m], True or 1 for rows that count; Hugging Face's attention_mask if queries are tokens.

    Law: tests/laws/test_losses_of_statistics_are_their_definitions.py.

    >>> import torch, gradlogz
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)
    >>> attention = gradlogz.attend(q, k, v)
    >>> torch.isclose(gradlogz.attention.z_loss(attention), 1e-4 * attention.log_normalizer.square().mean())
    tensor(True)
    """

    def loss(attention: Attention, rows: Tensor) -> Tensor:
        return _mean(attention.log_normalizer.masked_fill(~rows, 0.0).square(), rows)

    return coefficient * _over_layers("z_loss", statistics, query_mask, loss)


def entropy_loss(
    statistics: Statistics,
    *,
    floor: float | None = None,
    ceiling: float | None = None,
    coefficient: float = 1e-5,
    query_mask: QueryMask | None = None,
) -> Float[Tensor, ""]:
    """Penalty on heads whose mean entropy lies below `floor` (entropy collapse) or above `ceiling`, both in nats.

    Args:
        statistics: as in `z_loss`.
        floor: such as 0.2 log n, the tolerance of [jha25] for n keys; heads near 0 precede divergence [zhai23].
        ceiling: such as 0.8 log n, against heads that stay uniform.
        coefficient: c; 1e-5 as in [jha25], whose bounds are learned for each head.
        query_mask: as in `z_loss`.

    Law: tests/laws/test_losses_of_statistics_are_their_definitions.py.
    """
    if floor is None and ceiling is None:
        problem = "floor or ceiling must be given"
        raise InputValueError("entropy_loss", "floor", problem, "Pass floor=0.2 * math.log(n) for n keys.")

    def loss(attention: Attention, rows: Tensor) -> Tensor:
        entropy = _field("entropy_loss", "entropy", attention)
        entropy, rows = by_heads(entropy), by_heads(rows)
        heads = rows.any((0, 2))
        mean = entropy.masked_fill(~rows, 0.0).sum((0, 2)) / rows.sum((0, 2)).clamp(min=1)
        below = torch.zeros_like(mean) if floor is None else (floor - mean).clamp(min=0.0)
        above = torch.zeros_like(mean) if ceiling is None else (mean - ceiling).clamp(min=0.0)
        return _mean((below.square() + above.square()).masked_fill(~heads, 0.0), heads)

    return coefficient * _over_layers("entropy_loss", statistics, query_mask, loss)


def logit_variance_loss(
    statistics: Statistics, *, coefficient: float = 1e-4, query_mask: QueryMask | None = None
) -> Float[Tensor, ""]:
    """Penalty c mean V on the variance of the logits under the attention weights.

    V is the rate at which the entropy falls as the logits grow, -dH / dlog beta: it is largest for heads that are about
    to collapse, and 0 for uniform and for collapsed ones.

    Args:
        statistics: as in `z_loss`.
        coefficient: c. No published default exists; 1e-4 is that of the z-loss.
        query_mask: as in `z_loss`.

    Law: tests/laws/test_losses_of_statistics_are_their_definitions.py.
    """

    def loss(attention: Attention, rows: Tensor) -> Tensor:
        return _mean(_field("logit_variance_loss", "logit_variance", attention).masked_fill(~rows, 0.0), rows)

    return coefficient * _over_layers("logit_variance_loss", statistics, query_mask, loss)


def _over_layers(
    call: str, statistics: Statistics, query_mask: Tensor | None, loss: Callable[[Attention, Tensor], Tensor]
) -> Tensor:
    """Mean of the losses of all layers."""
    layers = [statistics] if isinstance(statistics, Attention) else statistics
    layers = list(layers.values()) if isinstance(layers, Mapping) else layers
    if not isinstance(layers, list) or not all(isinstance(layer, Attention) for layer in layers):
        problem = f"statistics must be an Attention or a mapping of them, got {type(statistics).__name__}"
        raise InputTypeError(call, "statistics", problem, "Pass the result of attend, or that of observe.")
    if not layers:
        problem = "statistics must have a layer, but the observation is empty"
        raise InputValueError(call, "statistics", problem, "Compute the loss after the model has run.")
    losses = [loss(layer, _rows(call, layer.log_normalizer, query_mask)) for layer in layers]
    return torch.stack([each.to(losses[0]) for each in losses]).mean()


def _rows(call: str, log_normalizer: Tensor, query_mask: Tensor | None) -> Tensor:
    """Return which rows count, like log_normalizer: those that see a key and that query_mask does not hide."""
    rows = ~(log_normalizer <= SEES_NOTHING)  # as Attention.seen: NaN stays in the loss
    if query_mask is None:
        return rows
    mask = query_mask.bool()
    mask = mask.unsqueeze(-2) if log_normalizer.ndim > mask.ndim else mask
    try:
        return rows & mask.expand_as(rows)
    except RuntimeError:
        fact = f"shape {shape_of(query_mask)} for statistics of shape {shape_of(log_normalizer)}"
        problem = f"query_mask must be [*b, m], got {fact}"
    raise InputValueError(call, "query_mask", problem, "Pass one number for each query of each sequence.")


def _mean(values: Tensor, rows: Tensor) -> Tensor:
    """Mean over rows of values that are 0 elsewhere; 0 if there is no row."""
    return values.sum() / rows.sum().clamp(min=1)


def _field(call: str, name: str, attention: Attention) -> Tensor:
    field = getattr(attention, name)
    if field is None:
        problem = f'statistics must contain {name}, which statistics="none" leaves out'
        raise InputValueError(call, "statistics", problem, 'Pass statistics="scalar" to attend or observe.')
    return field
