"""Log-sum-exp over all pairs of rows: the sum of every contrastive loss, in memory linear in the rows.

    s_ij = <q_i, k_j> + bias_j                                      logits
    G_i  = log sum_j exp s_ij,      over the keys that i may see
    E_i  = sum_j p_ij k_j,          p_ij = exp(s_ij - G_i)          attention
    dG   -> dq_i = g_i E_i,         dk_j = sum_i g_i p_ij q_i

The gradient of the keys is attention of the keys to the queries: logits <k_j, q_i> + log|g_i| - G_i, with values
sign(g_i) q_i, output o_j and log normaliser l_j, give dk_j = o_j exp(l_j + bias_j). Forward and backward pass are
thus two calls of a forward kernel, and no weights are stored.

To exclude the key that is the query itself, one call sums over the keys before it and one over those after it. With
labels, masks or other excluded keys each block of queries has a mask of pairs. Up to SMALL pairs a matrix of logits is
faster than the kernels (logit_losses.py).

Read next: ../../contrastive/likelihood.py (the meaning of these sums).
"""

from collections.abc import Iterator
from typing import Any

import torch

from ..._autocast import autocast_disabled
from ..._typing import Bool, Float, Tensor
from ...special import log_domain
from ..attention import dispatch
from ..attention.blocked import logits_at_once
from ..attention.operator import attention
from ..attention.scoring import Scoring, Sight
from .logit_losses import each_row, is_special, logits
from .row_loss import RowLoss
from .rowwise import Part, rowwise
from .visible_pairs import VisiblePairs

# Number of columns of the smallest tile of Triton.
NARROW = 16
# Number of pairs up to which a matrix of logits is faster than the kernels of attention.
SMALL = 1 << 15


def log_sum_exp(
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | Float[Tensor, "m n"] | None,
    visible: VisiblePairs = VisiblePairs(),
    *,
    precision: torch.dtype | None = None,
) -> Float[Tensor, " m"]:
    """Log-sum-exp G_i of every query, -inf with zero gradients for an empty sum. Differentiable in all three tensors.

    With a half `precision`, queries and keys are rounded to it while sums are float32.
    """
    m, n = query.shape[0], key.shape[0]
    if n == 0:
        return query.new_full((m,), -torch.inf)
    special = is_special(query, key, bias)
    by_pair = bias is not None and bias.ndim == 2
    if by_pair or (special and not visible.plain) or (not special and m * n <= SMALL):
        return each_row(_LogSumExpOfRows(m, visible), query, key, bias, precision=precision)
    if not visible.plain:
        operands = (query, key) if bias is None else (query, key, bias)
        if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
            return _LogSumExp.apply(*_as_head(query, key, bias), Scoring(1.0), precision, visible)[0, 0]
        q, k, b = _as_head(query, key, bias)
        return _forward(q, k, k[..., :NARROW], b, Scoring(1.0), precision, visible)[1][0, 0]
    if visible.itself:
        return _fused(query, key, bias, Scoring(1.0), precision, special)
    more = n - m  # the kernels align the last query with the last key
    before, after = Scoring(1.0, right=-1 - more), Scoring(1.0, left=more - 1)
    return log_add(*(_fused(query, key, bias, part, precision, special) for part in (before, after)))


class _LogSumExpOfRows(RowLoss):
    """Log-sum-exp of the visible logits of every row."""

    shift_invariant = False

    def __init__(self, m: int, visible: VisiblePairs, rows: Any = slice(None)) -> None:
        self.m, self.visible, self.rows = m, visible, rows

    def at(self, rows: Any) -> "_LogSumExpOfRows":
        return type(self)(self.m, self.visible, rows)

    def _masked(self, s: Tensor) -> Tensor:
        hidden = self.visible.hidden(self.rows, self.m, slice(None), s.shape[1], s.device)
        return s if hidden is None else s.masked_fill(hidden, -torch.inf)

    def value(self, s: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
        return log_domain.log_sum_exp(self._masked(s))  # a bias may be -inf

    def value_and_slope(self, s: Float[Tensor, "r n"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "r n"]]:
        s = self._masked(s)
        return log_domain.log_sum_exp(s), log_domain.softmax(s)


def pairs(
    function: Any,
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | Float[Tensor, "m n"] | None,
    visible: VisiblePairs,
    *rows: Tensor,
) -> Tensor:
    """Apply function(s, key, *rows) to blocks of queries; the logits s [r, n] are -inf where a key does not enter."""
    m, n = query.shape[0], key.shape[0]
    by_pair = bias is not None and bias.ndim == 2

    def block(q: Tensor, at: Tensor, row_bias: Part, *rest: Any) -> Tensor:
        *block_rows, k, key_bias = rest
        s = logits(q, k, row_bias if by_pair else key_bias)
        hidden = visible.hidden(at, m, slice(None), n, q.device)
        return function(s if hidden is None else s.masked_fill(hidden, -torch.inf), k, *block_rows)

    at = torch.arange(m, device=query.device)
    by_row: Any = (query, at, bias if by_pair else None, *rows)
    return rowwise(block, by_row, (key, None if by_pair else bias), width=n)


def log_add(first: Float[Tensor, " m"], second: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Compute log(exp first + exp second); -inf with zero gradients where both are -inf."""
    top = torch.maximum(first, second).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = (first - top).exp() + (second - top).exp()
    some = total > 0
    return torch.where(some, total.where(some, 1.0).log() + top, -torch.inf)


def _as_head(query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys and key bias as one head of attention."""
    return query[None, None], key[None, None], None if bias is None else bias[None, None, None]


def _fused(
    query: Tensor, key: Tensor, bias: Tensor | None, scoring: Scoring, precision: torch.dtype | None, special: bool
) -> Tensor:
    """Log-sum-exp by the kernels of attention, as one head."""
    q, k, b = _as_head(query, key, bias)
    operands = (q, k) if b is None else (q, k, b)
    if not special and torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _LogSumExp.apply(q, k, b, scoring, precision, VisiblePairs())[0, 0]
    if special:
        q, k = _rounded(q, precision), _rounded(k, precision)
        return attention(q, k, k[..., :NARROW], Sight(b), scoring, statistics=False).log_normalizer[0, 0]
    return _forward(q, k, k[..., :NARROW], b, scoring, precision, VisiblePairs())[1][0, 0]


def _rounded(tensor: Tensor, precision: torch.dtype | None) -> Tensor:
    return tensor if precision is None else tensor.to(precision)


def _forward(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scoring: Scoring,
    precision: torch.dtype | None,
    visible: VisiblePairs,
) -> tuple[Tensor, Tensor]:
    """Output and log normaliser of all queries; by blocks of queries if each of them needs a mask of pairs."""
    q, k, v = (_rounded(t, precision) for t in (query, key, values))
    if visible.plain:
        return dispatch.forward(q, k, v, Sight(bias), scoring, None, statistics=False)[:2]
    m, n = q.shape[2], k.shape[2]
    parts = []
    for rows in _slices(m, n, q.device):
        sight = Sight(bias, _mask(visible.hidden(rows, m, slice(None), n, q.device)))
        parts.append(dispatch.forward(q[:, :, rows], k, v, sight, scoring, None, statistics=False))
    return torch.cat([part.output for part in parts], 2), torch.cat([part.log_normalizer for part in parts], 2)


def _mask(hidden: Tensor | None) -> Tensor | None:
    return None if hidden is None else hidden.logical_not_()[None, None]


def _slices(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Blocks of rows of at most logits_at_once pairs."""
    size = max(1, logits_at_once(device) // max(1, width))
    for first in range(0, rows, size):
        yield slice(first, first + size)


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp that saves the output of attention, which is the gradient of the queries."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        bias: Tensor | None,
        scoring: Scoring,
        precision: torch.dtype | None,
        visible: VisiblePairs,
    ) -> Tensor:
        values = key if ctx.needs_input_grad[0] else key[..., :NARROW]
        output, log_normalizer = _forward(query, key, values, bias, scoring, precision, visible)
        ctx.scoring, ctx.precision, ctx.visible = scoring, precision, visible
        ctx.save_for_backward(query, key, bias, log_normalizer, output)
        return log_normalizer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_disabled(gradient):
            return *_LogSumExp.gradients(ctx, gradient), None, None, None

    @staticmethod
    def gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and bias."""
        query, key, bias, G, E = ctx.saved_tensors
        wanted, visible = ctx.needs_input_grad[:3], ctx.visible
        q, k = _rounded(query, ctx.precision), _rounded(key, ctx.precision)
        if torch.is_grad_enabled():  # create_graph: use the operation that has second derivatives
            inputs = [t for t, want in zip((query, key, bias), wanted, strict=True) if want]
            if visible.plain:
                again = attention(q, k, k[..., :NARROW], Sight(bias), ctx.scoring, statistics=False).log_normalizer
            else:
                flat = None if bias is None else bias[0, 0, 0]
                again = pairs(_log_sum_exp_of, q[0, 0], k[0, 0], flat, visible)[None, None]
            grads = iter(torch.autograd.grad(again, inputs, gradient, create_graph=True))
            return tuple(next(grads) if want else None for want in wanted)
        grad_query = gradient.unsqueeze(-1) * E if wanted[0] else None
        grad_key = grad_bias = None
        if wanted[1] or wanted[2]:
            transposed = Scoring(ctx.scoring.scale, None, ctx.scoring.right, ctx.scoring.left)
            if wanted[1]:
                grad_key = _received(k, q, q, gradient, G, bias, transposed, visible)
            if wanted[2]:
                ones = q.new_ones(()).expand(*q.shape[:-1], NARROW)
                grad_bias = _received(k, q, ones, gradient, G, bias, transposed, visible)[..., 0].unsqueeze(-2)
        return grad_query, grad_key, grad_bias


def _log_sum_exp_of(s: Tensor, _: Tensor) -> Tensor:
    return log_domain.log_sum_exp(s)


def _received(
    key: Tensor,
    query: Tensor,
    values: Tensor,
    gradient: Tensor,
    log_normalizer: Tensor,
    bias: Tensor | None,
    scoring: Scoring,
    visible: VisiblePairs,
) -> Tensor:
    """`received`, with labels or masks by blocks of keys."""
    if visible.plain:
        return received(key, query, values, gradient, log_normalizer, bias, scoring)
    m, n = query.shape[2], key.shape[2]
    log_factor, signed = _sent(values, gradient, log_normalizer)
    result = gradient.new_empty(*key.shape[:3], values.shape[-1])
    for keys in _slices(n, m, key.device):
        hidden = visible.hidden(slice(None), m, keys, n, key.device)
        sight = Sight(log_factor, _mask(None if hidden is None else hidden.mT.contiguous()))
        key_bias = None if bias is None else bias[..., keys]
        result[:, :, keys] = _collected(key[:, :, keys], query, signed, sight, key_bias, scoring)
    return result


def received(
    key: Float[Tensor, "b h n d"],
    query: Float[Tensor, "b h m d"],
    values: Float[Tensor, "b h m v"],
    gradient: Float[Tensor, "b h m"],
    log_normalizer: Float[Tensor, "b h m"],
    bias: Float[Tensor, "b h 1 n"] | None,
    scoring: Scoring,
    mask: Bool[Tensor, "b h n m"] | None = None,
) -> Float[Tensor, "b h n v"]:
    """Sum sum_i g_i p_ij values_i of every key: its attention to the queries times their mass."""
    log_factor, signed = _sent(values, gradient, log_normalizer)
    return _collected(key, query, signed, Sight(log_factor, mask), bias, scoring)


def _sent(values: Tensor, gradient: Tensor, log_normalizer: Tensor) -> tuple[Tensor, Tensor]:
    """log|g_i| - G_i as a bias, and the values with the sign of g_i."""
    # A query without gradient or without keys contributes nothing.
    empty = (gradient == 0) | (log_normalizer == -torch.inf)
    log_factor = (gradient.abs().log() - log_normalizer).masked_fill(empty, -torch.inf)
    return log_factor.unsqueeze(-2), gradient.sign().unsqueeze(-1).to(values.dtype) * values


def _collected(
    key: Tensor, query: Tensor, signed: Tensor, sight: Sight, bias: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attention of the keys to the queries, times their mass."""
    result = dispatch.forward(key, query, signed, sight, scoring, None, statistics=False)
    mass = result.log_normalizer if bias is None else result.log_normalizer + bias.squeeze(-2)
    return result.output * mass.exp().unsqueeze(-1)
