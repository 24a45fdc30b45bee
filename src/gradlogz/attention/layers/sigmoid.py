"""Sigmoid attention as a layer: every key is taken or left on its own.

    logits = <W_q x_m, W_k y_n> / sqrt(d) + b_h - log(number of visible keys)         b_h learned, initially 0
    output = W_o concat_h(sum_n sigmoid(logits) W_v y_n)                                                [ramapuram24]

Read next: ../sigmoid.py (the statistics), multihead.py (keys that compete).
"""

import math
from typing import Any, Literal

import torch
from torch import nn

from ..._typing import Bool, Float, Tensor
from ..sigmoid import SigmoidAttended, sigmoid_attend
from .heads import check_sizes, check_tokens, join, split


class SigmoidAttention(nn.Module):
    """Multi-head attention with a sigmoid for each key instead of a softmax over the keys.

    The weights of a row need not sum to one: a head can attend to nothing, without a sink, and to many keys at full
    weight. The statistics are those of independent bits; `total_weight` is the expected number of attended keys.

    Cost: all logits by blocks of queries in plain torch, several times that of the kernels of `attend`.

    Args:
        bias: biases of the projections.

    Law: tests/laws/test_sigmoid_attention_takes_subsets.py.

    >>> import torch
    >>> output, heads = SigmoidAttention(8, 2).attend(torch.randn(3, 6, 8), is_causal=True)
    >>> heads.total_weight.shape
    torch.Size([3, 2, 6])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("SigmoidAttention", embed_dim, num_heads)
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        self.offset = nn.Parameter(torch.zeros(num_heads, **options))

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
        return self.attend(query, key, attn_mask=attn_mask, is_causal=is_causal, statistics="none")[0]

    def attend(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        statistics: Literal["none", "scalar"] = "scalar",
    ) -> tuple[Float[Tensor, "*b m d"], SigmoidAttended]:
        """Output, and statistics of each head [*b, h, m]."""
        key = query if key is None else key
        check_tokens("SigmoidAttention", self.embed_dim, query=query, key=key)
        q, k, v = (
            split(p(t), self.num_heads) for p, t in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, key))
        )
        # The offset is one more coordinate of the keys: a bias would be compared with -inf for every pair.
        size = q.shape[-1]
        offset = (math.sqrt(size) * self.offset).to(k.dtype)[:, None, None].expand(*k.shape[:-1], 1)
        q, k = torch.cat((q, torch.ones_like(q[..., :1])), -1), torch.cat((k, offset), -1)
        heads = sigmoid_attend(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=1 / math.sqrt(size), statistics=statistics
        )
        return self.out_proj(join(heads.output)), heads

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}"
