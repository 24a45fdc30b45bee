"""Cosine attention: softmax attention on the sphere, with a learned temperature of each head.

    logits = beta_h <q / |q|, k / |k|>                  between -beta_h and beta_h                          [liu22]
    output = W_o concat_h(softmax(logits) W_v y)

A head is the family of the unit keys at the natural parameter beta_h q / |q|: all queries have one length, and the
statistics are those of `attend`. The log normaliser of n keys lies between log n - beta_h and log n + beta_h.

Read next: multihead.py (queries of any length), ../../measures/sphere.py (keys that are uniform on the sphere).
"""

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import normalize

from ..._autocast import wide
from ..._errors import InputValueError
from ..._typing import Bool, Float, Tensor
from ..functional import attend
from ..result import Attention
from .heads import check_sizes, check_tokens, join, split, statistics_of_forward


class CosineAttention(nn.Module):
    """Multi-head attention whose logits are cosines times a learned inverse temperature.

    Logits are bounded, whatever the size of the tokens. A query or key of length 0 has logits 0.

    Args:
        beta: initial inverse temperature of every head; its logarithm is learned.
        largest: bound on the inverse temperature, 100 as in [liu22].
        bias: biases of the projections.

    Law: tests/laws/test_cosine_attention_lives_on_the_sphere.py.

    >>> import torch
    >>> output, heads = CosineAttention(8, 2, beta=10.0).attend(100 * torch.randn(3, 6, 8))
    >>> bool((heads.max_logit <= 10.001).all())
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        beta: float = 10.0,
        largest: float = 100.0,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("CosineAttention", embed_dim, num_heads)
        if not 0 < beta <= largest:
            remedy = "Pass a positive inverse temperature, and a larger bound if it is needed."
            problem = f"beta must be in (0, largest={largest}], got {beta}"
            raise InputValueError("CosineAttention", "beta", problem, remedy)
        super().__init__()
        self.embed_dim, self.num_heads, self.largest = embed_dim, num_heads, largest
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        self.log_beta = nn.Parameter(torch.full((num_heads,), math.log(beta), **options))

    def forward(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*b m d"]:
        """Output of the layer.

        Args:
            query: tokens of the queries.
            key: tokens of the keys and values; by default those of the queries.
            attn_mask: as in `attend`: bool, True = attend, or added to the logits; broadcasts against [*b, h, m, n].
        """
        statistics = statistics_of_forward()
        return self.attend(query, key, attn_mask=attn_mask, is_causal=is_causal, statistics=statistics)[0]

    def attend(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        statistics: Literal["none", "scalar", "moments"] = "scalar",
    ) -> tuple[Float[Tensor, "*b m d"], Attention]:
        """Output, and statistics of each head [*b, h, m]; with "moments", keys are the unit keys."""
        key = query if key is None else key
        check_tokens("CosineAttention", self.embed_dim, query=query, key=key)
        q, k, v = (
            split(p(t), self.num_heads) for p, t in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, key))
        )
        beta = self.log_beta.clamp(max=math.log(self.largest)).exp()[:, None, None]
        q, k = (normalize(wide(t), dim=-1) for t in (q, k))  # the least length, 1e-12, is 0 in float16
        q, k = (beta * q).to(v.dtype), k.to(v.dtype)
        result = attend(q, k, v, scale=1.0, attn_mask=attn_mask, is_causal=is_causal, statistics=statistics)
        return self.out_proj(join(result.output)), result

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, largest={self.largest}"
