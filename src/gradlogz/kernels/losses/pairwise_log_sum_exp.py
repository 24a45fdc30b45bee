"""log sum exp over all pairs of rows: the one sum of every contrastive loss, in memory linear in the rows.

    s_ij = <q_i, k_j> + bias_j                                      logits
    G_i  = log sum_j exp s_ij,      over the keys that i may see
    E_i  = sum_j p_ij k_j,          p_ij = exp(s_ij - G_i)          attention
    dG   -> dq_i = g_i E_i,         dk_j = sum_i g_i p_ij q_i

The second gradient is attention again, from the side of the keys: logits <k_j, q_i> + log|g_i| - G_i, with values
sign(g_i) q_i, output o_j and log normaliser l_j, give dk_j = o_j exp(l_j + bias_j). Two calls of a forward kernel are
thus a forward and a backward pass, and no weight is ever stored.

A key that is the query itself is left out by two calls, one for the keys before it and one for those after it. Labels
and masks are compared block after block (rowwise.py).

Read next: ../../contrastive/likelihood.py, which says what these sums mean.
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

# Triton's tiles have at least 16 columns.
NARROW = 16


class VisiblePairs(NamedTuple):
    """Which keys a query sees; the default is all.

    Attributes:
        itself: whether query i sees key i.
        labels: of the queries and of the keys, to be compared.
        same: whether a query sees the keys of its own label alone, or those of other labels alone.
        kept: a key for each query that it sees whatever its label and the mask are.
        dropped: a key for each query that it does not see whatever the rest says.
        mask: True where key j is seen by query i.
    """

    itself: bool = True
    labels: tuple[Int[Tensor, " m"], Int[Tensor, " n"]] | None = None
    same: bool = True
    kept: Int[Tensor, " m"] | None = None
    dropped: Int[Tensor, " m"] | None = None
    mask: Bool[Tensor, "m n"] | None = None

    @property
    def plain(self) -> bool:
        """Whether no pairs have to be compared one by one."""
        return self.labels is None and self.mask is None and self.dropped is None


def log_sum_exp(
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    seen: VisiblePairs = VisiblePairs(),
    *,
    precision: torch.dtype | None = None,
) -> Float[Tensor, " m"]:
    """G_i of every query: -inf, with zero gradients, where it sees no key. Differentiable in all three.

    In a half precision queries meet keys rounded to it, sums stay in float32; pairs that are compared are not rounded.
    """
    if not seen.plain:
        return pairs(lambda s, _: log_domain.log_sum_exp(s), query, key, bias, seen)
    if seen.itself:
        return _fused(query, key, bias, Scoring(1.0), precision)
    more = key.shape[0] - query.shape[0]  # the kernels count positions from the last key
    before, after = Scoring(1.0, right=-1 - more), Scoring(1.0, left=more - 1)
    return log_add(*(_fused(query, key, bias, part, precision) for part in (before, after)))


def pairs(
    function: Any,
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    seen: VisiblePairs,
    *rows: Tensor,
) -> Tensor:
    """function(s, key, *rows) of the logits [r, n] of every block of queries, -inf where a key is not seen."""

    def block(q: Tensor, at: Tensor, own: Part, kept: Part, dropped: Part, mask: Part, *rest: Any) -> Tensor:
        *beside, k, bias, of_keys = rest
        s = reference.logits(q, k, None if bias is None else bias.unsqueeze(0))
        hidden = _hidden(seen, at, own, of_keys, kept, dropped, mask, k.shape[0])
        return function(s if hidden is None else s.masked_fill(hidden, -torch.inf), k, *beside)

    of_queries, of_keys = (None, None) if seen.labels is None else seen.labels
    at = torch.arange(query.shape[0], device=query.device)
    by_row: Any = (query, at, of_queries, seen.kept, seen.dropped, seen.mask, *rows)
    return rowwise(block, by_row, (key, bias, of_keys), width=key.shape[0])


def _hidden(
    seen: VisiblePairs, at: Tensor, own: Part, of_keys: Part, kept: Part, dropped: Part, mask: Part, n: int
) -> Tensor | None:
    """Which logits [r, n] of a block are to be -inf; None is none."""
    key = torch.arange(n, device=at.device)
    hidden = None
    if own is not None and of_keys is not None:
        hidden = (own.unsqueeze(-1) != of_keys) if seen.same else (own.unsqueeze(-1) == of_keys)
    if mask is not None:
        hidden = ~mask if hidden is None else hidden | ~mask
    if hidden is not None and kept is not None:
        hidden = hidden & (key != kept.unsqueeze(-1))
    if not seen.itself:
        itself = key == at.unsqueeze(-1)
        hidden = itself if hidden is None else hidden | itself
    if dropped is not None:
        out = key == dropped.unsqueeze(-1)
        hidden = out if hidden is None else hidden | out
    return hidden


def log_add(first: Float[Tensor, " m"], second: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """log(exp first + exp second), -inf with zero gradients where both are."""
    top = torch.maximum(first, second).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = (first - top).exp() + (second - top).exp()
    some = total > 0
    return torch.where(some, total.where(some, 1.0).log() + top, -torch.inf)


def _fused(query: Tensor, key: Tensor, bias: Tensor | None, scoring: Scoring, precision: torch.dtype | None) -> Tensor:
    """G by the kernels of attention, as one head."""
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
    """G, with attention kept from the forward pass as the gradient of the queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, scoring: Scoring, precision: torch.dtype | None
    ) -> Tensor:
        q, k = _rounded(query, precision), _rounded(key, precision)
        values = k if ctx.needs_input_grad[0] else k[..., :NARROW]
        found = dispatch.forward(q, k, values, Sight(bias), scoring, None, statistics=False)
        ctx.scoring, ctx.precision = scoring, precision
        ctx.save_for_backward(query, key, bias, found.log_normalizer, found.output)
        return found.log_normalizer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, bias, G, E = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph: by the operation that has second derivatives
            inputs = [t for t, want in zip((query, key, bias), wanted, strict=True) if want]
            q, k = _rounded(query, ctx.precision), _rounded(key, ctx.precision)
            again = attention(q, k, k[..., :NARROW], Sight(bias), ctx.scoring, statistics=False)
            found = iter(torch.autograd.grad(again.log_normalizer, inputs, gradient, create_graph=True))
            return *(next(found) if want else None for want in wanted), None, None
        of_query = gradient.unsqueeze(-1) * E if wanted[0] else None
        of_key = of_bias = None
        if wanted[1] or wanted[2]:
            turned = Scoring(ctx.scoring.scale, None, ctx.scoring.right, ctx.scoring.left)
            query, key = _rounded(query, ctx.precision), _rounded(key, ctx.precision)
            if wanted[1]:
                of_key = received(key, query, query, gradient, G, bias, turned)
            if wanted[2]:
                ones = query.new_ones(()).expand(*query.shape[:-1], NARROW)
                of_bias = received(key, query, ones, gradient, G, bias, turned)[..., 0].unsqueeze(-2)
        return of_query, of_key, of_bias, None, None


def received(
    key: Float[Tensor, "b h n d"],
    query: Float[Tensor, "b h m d"],
    values: Float[Tensor, "b h m v"],
    gradient: Float[Tensor, "b h m"],
    log_normalizer: Float[Tensor, "b h m"],
    bias: Float[Tensor, "b h 1 n"] | None,
    scoring: Scoring,
) -> Float[Tensor, "b h n v"]:
    """sum_i g_i p_ij values_i of every key: its attention to the queries, times the mass of it."""
    # What has no gradient or sees no keys gives nothing.
    nothing = (gradient == 0) | (log_normalizer == -torch.inf)
    given = (gradient.abs().log() - log_normalizer).masked_fill(nothing, -torch.inf)
    signed = gradient.sign().unsqueeze(-1).to(values.dtype) * values
    found = dispatch.forward(key, query, signed, Sight(given.unsqueeze(-2)), scoring, None, statistics=False)
    mass = found.log_normalizer if bias is None else found.log_normalizer + bias.squeeze(-2)
    return found.output * mass.exp().unsqueeze(-1)
