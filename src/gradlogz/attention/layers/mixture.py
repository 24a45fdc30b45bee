"""Attention to Gaussians instead of points: keys with learned covariances.

    h       = sum_n N(k_n, Sigma_n),  Sigma_n = U diag(c_n) U^T      a Gaussian around each key   [theory 6.1]
    G(eta)  = log sum_n exp(<k_n, eta> + <eta, Sigma_n eta> / 2)     eta = W_q x / sqrt(d)
    ∇G(eta) = sum_n r_n (k_n + Sigma_n eta)                          the head's output, r = softmax over n
    output  = concat_h(∇G_h) W_o

A key of large variance has larger logits, for queries of any direction, and adds a multiple of the query to the output.
Softmax attention (with values = keys) is the limit c -> 0. Covariances that all keys of a head share change no weight,
since they add the same to every logit: keys smoothed by one Gaussian, ∇G = attention + Sigma eta [theory 6.5].

Read next: moment.py (covariances as input and output), ../../measures/mixture.py (`GaussianMessages`, the formula).
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import softplus

from ..._errors import InputValueError
from ..._typing import Bool, Float, Tensor
from ...measures.mixture import GaussianMessages
from ..functional import attend
from ..result import Attention
from .heads import check_sizes, check_statistics, check_tokens, join, split, statistics_of_forward


class MixtureAttention(nn.Module):
    """Multi-head attention whose keys are Gaussians with learned covariances: the output of a head is ∇G exactly.

    Cost: linear memory. Diagonal covariances per token double the size of keys and values, and so the multiplications
    of softmax attention; those of rank r add r coordinates to both; those per head add none. The keys of a head are its
    values, mapped by W_o. When not to use it: where values must be independent of the keys use `MultiheadAttention`;
    where uncertainty comes with the data use `MomentAttention`.

    Args:
        covariance: "token", variances of each token, softplus(W_c x); or "head", shared by all tokens.
        rank: None for diagonal covariances, or the number of directions U, learned for each head.
        bias: biases of the projections.

    Variances are 0.018 initially, so that training starts near softmax attention.
    Law: tests/laws/test_mixture_attention_is_a_gradient.py.

    >>> import torch
    >>> layer, x = MixtureAttention(8, 2, dtype=torch.float64), torch.randn(3, 6, 8, dtype=torch.float64)
    >>> output, heads = layer.attend(x)
    >>> G = lambda y: layer.attend(y, x)[1].log_normalizer.sum()
    >>> W_q = layer.q_proj.weight.reshape(2, 4, 8)  # the gradient of G in the query, back through eta = W_q x / 2
    >>> torch.allclose(torch.func.grad(G)(x), torch.einsum("bhmd,hde->bme", heads.output, W_q) / 2)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        covariance: Literal["head", "token"] = "token",
        rank: int | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("MixtureAttention", embed_dim, num_heads)
        if covariance not in ("head", "token"):
            condition, remedy = (
                'covariance must be "head" or "token"',
                "Choose token for one covariance per token, head for one per head.",
            )
            raise InputValueError("MixtureAttention", "covariance", f"{condition}, got {covariance!r}", remedy)
        if rank is not None and rank < 1:
            remedy = "Leave it out for diagonal covariances."
            raise InputValueError("MixtureAttention", "rank", f"rank must be at least 1, got {rank}", remedy)
        super().__init__()
        self.embed_dim, self.num_heads, self.covariance, self.rank = embed_dim, num_heads, covariance, rank
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        d = embed_dim // num_heads
        axes = d if rank is None else rank
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(3))
        self.directions = None if rank is None else nn.Parameter(torch.randn(num_heads, d, rank, **options) * d**-0.5)
        if covariance == "token":
            self.variance_proj = nn.Linear(embed_dim, num_heads * axes, **options)
            nn.init.constant_(self.variance_proj.bias, -4.0)
        else:
            self.variance = nn.Parameter(torch.full((num_heads, axes), -4.0, **options))

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
            key: tokens of the keys; by default those of the queries.
            attn_mask: as in `attend`: bool, True = attend, or added to the logits (log weights of the mixture);
                broadcasts against [*b, h, m, n].
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
        statistics: Literal["none", "scalar"] = "scalar",
    ) -> tuple[Float[Tensor, "*b m d"], Attention]:
        """Output, and statistics of each head [*b, h, m]: output is ∇G and log_normalizer G of the mixture.

        Entropy and moments of the logits are those of the responsibilities r.
        """
        key = query if key is None else key
        check_tokens("MixtureAttention", self.embed_dim, query=query, key=key)
        check_statistics("MixtureAttention", statistics)
        eta = split(self.q_proj(query), self.num_heads) * (self.embed_dim // self.num_heads) ** -0.5
        mu = split(self.k_proj(key), self.num_heads)
        options: dict[str, Any] = {
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "statistics": statistics,
            "scale": 1.0,
        }
        if self.covariance == "head":
            result = self._smoothed(eta, mu, attend(eta, mu, mu, **options))
        else:
            messages = GaussianMessages(mu, split(softplus(self.variance_proj(key)), self.num_heads), self.directions)
            points = messages.keys()
            result = attend(messages.queries(eta), points, points, **options)
            result = result._replace(output=messages.mean(eta, result.output))
        return self.out_proj(join(result.output)), result

    def extra_repr(self) -> str:
        shape = "" if self.rank is None else f", rank={self.rank}"
        return f"{self.embed_dim}, num_heads={self.num_heads}, covariance={self.covariance!r}{shape}"

    def _smoothed(self, eta: Tensor, mu: Tensor, result: Attention) -> Attention:
        """Attention convolved with N(0, Sigma): adds <eta, Sigma eta> / 2 to each logit and Sigma eta to the mean."""
        c = softplus(self.variance).unsqueeze(-2)
        attended = torch.cat((result.output, c.expand(*result.output.shape[:-1], -1)), -1)
        output = GaussianMessages(mu, c, self.directions).mean(eta, attended)
        output = output.masked_fill((result.log_normalizer == -torch.inf).unsqueeze(-1), 0.0)
        rise = (eta * (output - result.output)).sum(-1) / 2
        result = result._replace(output=output, log_normalizer=result.log_normalizer + rise)
        if result.mean_logit is None or result.max_logit is None:
            return result
        return result._replace(mean_logit=result.mean_logit + rise, max_logit=result.max_logit + rise)
