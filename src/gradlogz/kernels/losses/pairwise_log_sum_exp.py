"""Log-sum-exp over all pairs of rows: the sum of every contrastive loss, in memory linear in the rows.

    s_ij = <q_i, k_j> + bias_j                                      logits
    G_i  = log sum_j exp s_ij,      over the keys that i may see
    E_i  = sum_j p_ij k_j,          p_ij = exp(s_ij - G_i)          attention
    dG   -> dq_i = g_i E_i,         dk_j = sum_i g_i p_ij q_i

The gradient of the keys is attention of the keys to the queries: logits <k_j, q_i> + log|g_i| - G_i, with values
sign(g_i) q_i, output o_j and log normaliser l_j, give dk_j = o_j exp(l_j + bias_j). Forward and backward pass are
thus two calls of a forward kernel, and no weights are stored.

To exclude the key that is the query itself, one call sums over the keys before it and one over those after it. Labels
and masks are compared block by block (rowwise.py).

Read next: ../../contrastive/likelihood.py (the meaning of these sums).
"""

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..._typing import Bool, Float, Int, Tensor
from ...special import log_domain
from ..attention import dispatch, reference
from ..attention.operator import attention, is_traced, under_transform
from ..attention.scoring import Scoring, Sight
from .rowwise import Part, rowwise

# Number of columns of the smallest tile of Triton.
NARROW = 16


class VisiblePairs(NamedTuple):
    """The keys that enter the sum of each query; by default all.

    Attributes:
        itself: True if key i enters the sum of query i.
        labels: labels of the queries and of the keys.
        same: True to sum over keys with the label of the query, False over keys with other labels.
        included: index of a key for each query that enters regardless of its label and of the mask.
        excluded: index of a key for each query that never enters.
        mask: True where key j enters the sum of query i.
    """

    itself: bool = True
    labels: tuple[Int[Tensor, " m"], Int[Tensor, " n"]] | None = None
    same: bool = True
    included: Int[Tensor, " m"] | None = None
    excluded: Int[Tensor, " m"] | None = None
    mask: Bool[Tensor, "m n"] | None = None

    @property
    def plain(self) -> bool:
        """True if no pairs have to be compared one by one."""
        return self.labels is None and self.mask is None and self.excluded is None


def log_sum_exp(
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    visible: VisiblePairs = VisiblePairs(),
    *,
    precision: torch.dtype | None = None,
) -> Float[Tensor, " m"]:
    """Log-sum-exp G_i of every query, -inf with zero gradients for an empty sum. Differentiable in all three tensors.

    With a half `precision`, queries and keys are rounded to it while sums are float32; sums with labels, masks or
    excluded keys are not rounded.
    """
    if not visible.plain:
        return pairs(lambda s, _: log_domain.log_sum_exp(s), query, key, bias, visible)
    if visible.itself:
        return _fused(query, key, bias, Scoring(1.0), precision)
    more = key.shape[0] - query.shape[0]  # the kernels align the last query with the last key
    before, after = Scoring(1.0, right=-1 - more), Scoring(1.0, left=more - 1)
    return log_add(*(_fused(query, key, bias, part, precision) for part in (before, after)))


def pairs(
    function: Any,
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    visible: VisiblePairs,
    *rows: Tensor,
) -> Tensor:
    """Apply function(s, key, *rows) to blocks of queries; the logits s [r, n] are -inf where a key does not enter."""

    def block(q: Tensor, at: Tensor, labels: Part, included: Part, excluded: Part, mask: Part, *rest: Any) -> Tensor:
        *block_rows, k, bias, key_labels = rest
        s = reference.logits(q, k, None if bias is None else bias.unsqueeze(0))
        hidden = _hidden(visible, at, labels, key_labels, included, excluded, mask, k.shape[0])
        return function(s if hidden is None else s.masked_fill(hidden, -torch.inf), k, *block_rows)

    query_labels, key_labels = (None, None) if visible.labels is None else visible.labels
    at = torch.arange(query.shape[0], device=query.device)
    by_row: Any = (query, at, query_labels, visible.included, visible.excluded, visible.mask, *rows)
    return rowwise(block, by_row, (key, bias, key_labels), width=key.shape[0])


def _hidden(
    visible: VisiblePairs,
    at: Tensor,
    labels: Part,
    key_labels: Part,
    included: Part,
    excluded: Part,
    mask: Part,
    n: int,
) -> Tensor | None:
    """Mask [r, n] of the pairs of a block that do not enter; None if all do."""
    key = torch.arange(n, device=at.device)
    hidden = None
    if labels is not None and key_labels is not None:
        hidden = (labels.unsqueeze(-1) != key_labels) if visible.same else (labels.unsqueeze(-1) == key_labels)
    if mask is not None:
        hidden = ~mask if hidden is None else hidden | ~mask
    if hidden is not None and included is not None:
        hidden = hidden & (key != included.unsqueeze(-1))
    if not visible.itself:
        itself = key == at.unsqueeze(-1)
        hidden = itself if hidden is None else hidden | itself
    if excluded is not None:
        out = key == excluded.unsqueeze(-1)
        hidden = out if hidden is None else hidden | out
    return hidden


def log_add(first: Float[Tensor, " m"], second: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Compute log(exp first + exp second); -inf with zero gradients where both are -inf."""
    top = torch.maximum(first, second).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = (first - top).exp() + (second - top).exp()
    some = total > 0
    return torch.where(some, total.where(some, 1.0).log() + top, -torch.inf)


def _fused(query: Tensor, key: Tensor, bias: Tensor | None, scoring: Scoring, precision: torch.dtype | None) -> Tensor:
    """Log-sum-exp by the kernels of attention, as one head."""
    q, k, b = query[None, None], key[None, None], None if bias is None else bias[None, None, None]
    operands = (q, k) if b is None else (q, k, b)
    special = (
        under_transform() or torch.compiler.is_compiling() or forward_ad._current_level >= 0 or is_traced(operands)
    )
    if not special and torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _LogSumExp.apply(q, k, b, scoring, precision)[0, 0]
    q, k = _rounded(q, precision), _rounded(k, precision)
    if special:
        G = attention(q, k, k[..., :NARROW], Sight(b), scoring, statistics=False).log_normalizer
    else:
        G = dispatch.forward(q, k, k[..., :NARROW], Sight(b), scoring, None, statistics=False).log_normalizer
    return G[0, 0]


def _rounded(tensor: Tensor, precision: torch.dtype | None) -> Tensor:
    return tensor if precision is None else tensor.to(precision)


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp that saves the output of attention, which is the gradient of the queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, scoring: Scoring, precision: torch.dtype | None
    ) -> Tensor:
        q, k = _rounded(query, precision), _rounded(key, precision)
        values = k if ctx.needs_input_grad[0] else k[..., :NARROW]
        result = dispatch.forward(q, k, values, Sight(bias), scoring, None, statistics=False)
        ctx.scoring, ctx.precision = scoring, precision
        ctx.save_for_backward(query, key, bias, result.log_normalizer, result.output)
        return result.log_normalizer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, bias, G, E = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph: use the operation that has second derivatives
            inputs = [t for t, want in zip((query, key, bias), wanted, strict=True) if want]
            q, k = _rounded(query, ctx.precision), _rounded(key, ctx.precision)
            recomputed = attention(q, k, k[..., :NARROW], Sight(bias), ctx.scoring, statistics=False)
            grads = iter(torch.autograd.grad(recomputed.log_normalizer, inputs, gradient, create_graph=True))
            return *(next(grads) if want else None for want in wanted), None, None
        grad_query = gradient.unsqueeze(-1) * E if wanted[0] else None
        grad_key = grad_bias = None
        if wanted[1] or wanted[2]:
            transposed = Scoring(ctx.scoring.scale, None, ctx.scoring.right, ctx.scoring.left)
            query, key = _rounded(query, ctx.precision), _rounded(key, ctx.precision)
            if wanted[1]:
                grad_key = received(key, query, query, gradient, G, bias, transposed)
            if wanted[2]:
                ones = query.new_ones(()).expand(*query.shape[:-1], NARROW)
                grad_bias = received(key, query, ones, gradient, G, bias, transposed)[..., 0].unsqueeze(-2)
        return grad_query, grad_key, grad_bias, None, None


def received(
    key: Float[Tensor, "b h n d"],
    query: Float[Tensor, "b h m d"],
    values: Float[Tensor, "b h m v"],
    gradient: Float[Tensor, "b h m"],
    log_normalizer: Float[Tensor, "b h m"],
    bias: Float[Tensor, "b h 1 n"] | None,
    scoring: Scoring,
) -> Float[Tensor, "b h n v"]:
    """Sum sum_i g_i p_ij values_i of every key: its attention to the queries times their mass."""
    # A query without gradient or without keys contributes nothing.
    empty = (gradient == 0) | (log_normalizer == -torch.inf)
    log_factor = (gradient.abs().log() - log_normalizer).masked_fill(empty, -torch.inf)
    signed = gradient.sign().unsqueeze(-1).to(values.dtype) * values
    result = dispatch.forward(key, query, signed, Sight(log_factor.unsqueeze(-2)), scoring, None, statistics=False)
    mass = result.log_normalizer if bias is None else result.log_normalizer + bias.squeeze(-2)
    return result.output * mass.exp().unsqueeze(-1)
