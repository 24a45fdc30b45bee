"""Linear attention as a layer: keys and values of each head are summed into one matrix.

    S      = sum_n phi(W_k y_n) (W_v y_n)^T                          the Hebbian state of a head
    output = W_o concat_h(scale S_h^T phi(W_qh x) / exp G_h)         without exp G_h for identity features

Read next: ../linear.py (the sums, chunks and energies), sigmoid.py.
"""

from typing import Any, Literal

import torch
from torch import nn

from ..._typing import Bool, Float, Tensor
from ..linear import FeatureMap, LinearAttended, LinearState, linear_attend
from .heads import check_sizes, check_tokens, join, split


class LinearAttention(nn.Module):
    """Multi-head linear attention: time and memory linear in the tokens, and a state of fixed size for decoding.

    With identity features and values = keys a head ascends the quadratic energy of the Hopfield network that stores its
    keys by Hebb's rule, whose capacity is linear in the size of a head; softmax attention ascends an energy of
    exponential capacity.

    When not to use it: to retrieve single keys among more than the size of a head.

    Args:
        feature_map: "elu", "relu", "identity" or a function, as in `linear_attend`.
        normalize: divide by the sum of the weights; default: unless features are the identity.
        bias: biases of the projections.

    Law: tests/laws/test_linear_attention_is_a_sum.py.

    >>> import torch
    >>> layer, x = LinearAttention(8, 2), torch.randn(3, 6, 8)
    >>> output, heads = layer.attend(x, is_causal=True)
    >>> heads.log_normalizer.shape, heads.state.memory.shape
    (torch.Size([3, 2, 6]), torch.Size([3, 2, 4, 4]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str | FeatureMap = "elu",
        normalize: bool | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("LinearAttention", embed_dim, num_heads)
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.feature_map, self.normalize = feature_map, normalize
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))

    def forward(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*b m d"]:
        """Output of the layer.

        Args:
            query: tokens of the queries.
            key: tokens of the keys and values; by default those of the queries.
            attn_mask: bool, True = attend; broadcasts against [*b, h, m, n].
        """
        return self.attend(query, key, attn_mask=attn_mask, is_causal=is_causal, statistics="none")[0]

    def attend(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        state: LinearState | None = None,
        statistics: Literal["none", "scalar"] = "scalar",
    ) -> tuple[Float[Tensor, "*b m d"], LinearAttended]:
        """Output, and log normalisers [*b, h, m] and states of the heads; `state` is that of earlier tokens."""
        key = query if key is None else key
        check_tokens("LinearAttention", self.embed_dim, query=query, key=key)
        q, k, v = (
            split(p(t), self.num_heads) for p, t in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, key))
        )
        heads = linear_attend(
            q, k, v, feature_map=self.feature_map, normalize=self.normalize, attn_mask=attn_mask, is_causal=is_causal,
            state=state, statistics=statistics,
        )  # fmt: skip
        return self.out_proj(join(heads.output)), heads

    def extra_repr(self) -> str:
        name = self.feature_map if isinstance(self.feature_map, str) else "function"
        return f"{self.embed_dim}, num_heads={self.num_heads}, feature_map={name!r}"
