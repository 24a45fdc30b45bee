"""Heads as one mixture, each weighted by its log normaliser for the query.

    h       = sum_k pi_k h_k                                        h_k: the keys projected by head k    [theory 6.2]
    G_k(x)  = log sum_n exp(<W_qk x, W_kk y_n> / sqrt(d))           the log normaliser of head k
    r       = softmax_k(log pi_k + G_k(x))                          gates: one softmax over all pairs of head and key
    G(x)    = log sum_k pi_k exp G_k(x)
    ∇G(x)   = sum_k r_k W_qk^T o_k / sqrt(d)                        o_k: attention of head k with values = keys
    KL(q‖r) = G(x) - sum_k q_k (G_k(x) + log(pi_k / q_k))           the cost of gates q that do not depend on x

Ordinary multi-head attention has constant gates: it is the gradient of the Jensen bound on the right.

Read next: multihead.py (heads that are added, a convolution), ../../measures/mixture.py (`Mixture.lower_bound`).
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Tensor
from ...special import log_domain
from ..functional import attend
from ..result import Attention
from .heads import check_sizes, check_tokens, join, split, statistics_of_forward


class Gated(NamedTuple):
    """Heads of a mixture, their gates, and the log normaliser of the mixture.

    Attributes:
        heads: the result of `attend` for each head.
        gates: r, or the gates passed instead; they sum to one over the heads.
        log_normalizer: G of the mixture.
        gap: KL(pi‖r) in nats, the gap of the Jensen bound with gates pi: the incoherence of the heads.
    """

    heads: Attention
    gates: Float[Tensor, "*b h m"]
    log_normalizer: Float[Tensor, "*b m"]
    gap: Float[Tensor, "*b m"]


class GatedHeads(nn.Module):
    """Multi-head attention whose heads are gated by their log normalisers: the exact mixture of the heads.

    A tied layer follows the theory: values are keys, the output map is the transposed query map, and the output is the
    gradient of sqrt(d) G in the query token, so that adding it is a step of gradient ascent on one log normaliser. An
    untied layer has the value and output maps of multi-head attention and gates h r_k, which are 1 on average: with
    `gates` fixed at 1/h it is `torch.nn.MultiheadAttention`. The weights pi are learned in both, initially uniform.

    Cost: one call of `attend`, which also returns the log normalisers, and a softmax over heads. When not to use it:
    where heads should work independently. The head with the largest logits can take almost all the weight; monitor
    `gap`.

    Args:
        tied: W_v = W_k and W_o = W_q^T, without a bias on the output.
        bias: biases of the projections.

    Law: tests/laws/test_gated_heads_are_a_mixture.py.

    >>> import torch
    >>> layer, x = GatedHeads(8, 2, tied=True, dtype=torch.float64), torch.randn(3, 6, 8, dtype=torch.float64)
    >>> G = lambda y: layer.attend(y, x)[1].log_normalizer.sum()
    >>> torch.allclose(layer(x), 4**0.5 * torch.func.grad(G)(x))
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        tied: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("GatedHeads", embed_dim, num_heads)
        super().__init__()
        self.embed_dim, self.num_heads, self.tied = embed_dim, num_heads, tied
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        if not tied:
            self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        self.log_weights = nn.Parameter(torch.zeros(num_heads, **options))

    def forward(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        gates: Float[Tensor, "..."] | None = None,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*b m d"]:
        """Output of the layer.

        Args:
            query: tokens of the queries.
            key: tokens of the keys and values; by default those of the queries.
            gates: fixed gates instead of r, [h] or [*b, h, m]; torch.full((h,), 1 / h) is ordinary attention.
            attn_mask: as in `attend`: bool, True = attend, or added to the logits; broadcasts against [*b, h, m, n].
        """
        statistics = statistics_of_forward()
        return self.attend(query, key, gates=gates, attn_mask=attn_mask, is_causal=is_causal, statistics=statistics)[0]

    def attend(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        gates: Float[Tensor, "..."] | None = None,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        statistics: Literal["none", "scalar", "moments"] = "scalar",
    ) -> tuple[Float[Tensor, "*b m d"], Gated]:
        """Output, and the heads with their gates, the log normaliser of the mixture and its gap."""
        key = query if key is None else key
        check_tokens("GatedHeads", self.embed_dim, query=query, key=key)
        h = self.num_heads
        q, k = split(self.q_proj(query), h), split(self.k_proj(key), h)
        v = k if self.tied else split(self.v_proj(key), h)
        result = attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, statistics=statistics)
        log_pi = self.log_weights.log_softmax(0)
        s = (result.log_normalizer + log_pi.unsqueeze(-1)).movedim(-2, -1)  # [*b, m, h]
        r = log_domain.softmax(s).movedim(-1, -2)
        if gates is not None:
            r = self._fixed_gates(gates, r)
        gated = Gated(result, r, log_domain.log_sum_exp(s), coherence(result.log_normalizer, log_pi, log_pi.exp()))
        weighted = join((r.unsqueeze(-1) * result.output).to(result.output.dtype))
        if self.tied:
            return weighted @ self.q_proj.weight.to(weighted.dtype), gated
        return self.out_proj(h * weighted), gated

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, tied={self.tied}"

    def _fixed_gates(self, gates: Tensor, like: Tensor) -> Tensor:
        """Expand gates [h] to [*b, h, m]."""
        per_row = gates.unsqueeze(-1) if gates.ndim == 1 else gates
        if per_row.shape[-2] != self.num_heads or per_row.ndim > like.ndim:
            condition = f"gates must be [h] or [*b, h, m] with h={self.num_heads} heads"
            raise InputValueError(
                "GatedHeads", "gates", f"{condition}, got shape {shape_of(gates)}", "Pass one gate for each head."
            )
        return per_row.to(like.dtype).expand_as(like)


def coherence(
    log_normalizer: Float[Tensor, "*b h m"],
    log_weights: Float[Tensor, "h"] | None = None,
    gates: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "*b m"]:
    """KL(q‖r), r = softmax_k(log pi_k + G_k): the cost of constant gates q over heads for each query.   [theory 6.2]

    It applies to any multi-head attention: `log_normalizer` is that of its heads. By default pi and q are uniform. It
    is 0 where the log normalisers of all heads are equal, and on rows that see no key.
    """
    h = log_normalizer.shape[-2]
    uniform = log_normalizer.new_full((h,), -math.log(h))
    log_pi = uniform if log_weights is None else log_weights
    q = uniform.exp() if gates is None else gates
    s = (log_normalizer + log_pi.unsqueeze(-1)).movedim(-2, -1)
    alive = s.detach().amax(-1, keepdim=True) != -torch.inf
    log_r = torch.where(alive, s, 0.0).log_softmax(-1)
    divergence = (q * (q.log() - log_r).masked_fill(q == 0, 0.0)).sum(-1)
    return divergence.masked_fill(~alive.squeeze(-1), 0.0)
