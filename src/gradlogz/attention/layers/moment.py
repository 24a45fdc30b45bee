"""Attention between Gaussian tokens: mean and covariance in, mean and covariance out.

    h      = sum_n w_n N(mu_n, Sigma_n)                             the tokens, each with its uncertainty
    logits = log w_n + <mu_n, eta> + <eta, Sigma_n eta> / 2         eta = W_q x / sqrt(d)             [theory 8.4]
    m_n    = mu_n + Sigma_n eta                                     token n, tilted by the query
    mean   = sum_n r_n m_n                                          = ∇G(eta), r = softmax(logits)
    cov    = sum_n r_n (Sigma_n + (m_n - mean)(m_n - mean)^T)       = ∇²G(eta)                        [theory 6.1]
    output = W_o mean, W_o cov W_o^T + Q                            X' = W_o X + noise                [theory 8.3]

Softmax attention is the limit Sigma_n -> 0. The covariance that it drops is then the Fisher information of the
attended keys; this layer passes it to the next.

Read next: ../../measures/mixture.py (`GaussianMessages`, the formula), mixture.py (learned covariances).
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, softplus

from ..._autocast import autocast_disabled, wide
from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Tensor
from ...kernels.attention.scoring import Block, Scoring, visible
from ...measures.gating import gated_mean, gated_spread
from ...measures.gaussian import Gaussian
from ...measures.mixture import GaussianMessages, Mixture
from .. import masks
from ..functional import attend
from ..result import Attention
from .heads import check_sizes, check_statistics, check_tokens, join, split, statistics_of_forward


class MeanAndCovariance(NamedTuple):
    """Moments of the tokens, input and output of a layer: `layer(*moments)`."""

    mean: Float[Tensor, "*b n d"]
    covariance: Float[Tensor, "*b n d"] | Float[Tensor, "*b n d d"]


class MomentAttention(nn.Module):
    """Attention between Gaussian tokens: (mean, covariance) in, (mean, covariance) out.

    Each head projects the tokens to keys N(W_k mean, W_k covariance W_k^T), tilts that mixture by its query, and maps
    the mean and covariance of the tilted mixture by its part of W_o. Heads are independent and added (a convolution),
    so their covariances add. Keys are the values here, as in the theory: the value map is W_o.

    With covariance="diagonal" a token has a variance for each coordinate, and a head keeps the variances of its keys
    and drops their correlations: the nearest independent distribution. With "full" covariances are matrices.

    Cost: diagonal, linear memory; keys of 2 and values of 5 times the head size in one call of `attend`, 3.5 times the
    multiplications of softmax attention. Full, memory of queries x tokens x size: for a few hundred tokens. When not to
    use it: for tokens without uncertainty. `MultiheadAttention.attend` with statistics="moments" computes the variance
    of the values at a lower cost. Variances are differences of squares and lose digits where they are small relative to
    the spread of all keys.

    Args:
        covariance: "diagonal", variances [*b, n, embed_dim]; or "full", matrices [*b, n, embed_dim, embed_dim].
        noise: learn the diagonal of Q, initially 0.0067; without it Q = 0.
        bias: biases of the projections; they change means only.

    Law: tests/laws/test_moment_attention_tilts_a_mixture_of_gaussians.py.

    >>> import torch
    >>> layer = MomentAttention(8, 2, noise=False, dtype=torch.float64)
    >>> x = torch.randn(3, 6, 8, dtype=torch.float64)
    >>> moments = layer(x, torch.zeros_like(x))  # tokens without uncertainty: softmax attention with values = keys
    >>> q, k = (p(x).reshape(3, 6, 2, 4).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    >>> by_hand = (q @ k.mT / 2).softmax(-1) @ k
    >>> torch.allclose(moments.mean, layer.out_proj(by_hand.transpose(1, 2).flatten(-2)))
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        covariance: Literal["diagonal", "full"] = "diagonal",
        noise: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("MomentAttention", embed_dim, num_heads)
        if covariance not in ("diagonal", "full"):
            condition, remedy = 'covariance must be "diagonal" or "full"', "Leave it out for diagonal covariances."
            raise InputValueError("MomentAttention", "covariance", f"{condition}, got {covariance!r}", remedy)
        super().__init__()
        self.embed_dim, self.num_heads, self.covariance = embed_dim, num_heads, covariance
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(3))
        self.noise = nn.Parameter(torch.full((embed_dim,), -5.0, **options)) if noise else None

    def forward(
        self,
        mean: Float[Tensor, "*b m d"],
        covariance: Float[Tensor, "*b m d"] | Float[Tensor, "*b m d d"],
        memory: tuple[Float[Tensor, "*b n d"], Float[Tensor, "..."]] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
    ) -> MeanAndCovariance:
        """Mean and covariance of each token after attention to all of them, or to those of `memory`.

        Args:
            mean: means of the tokens, from which the queries are projected.
            covariance: nonnegative variances, or positive semidefinite matrices.
            memory: mean and covariance of other tokens to attend to.
            attn_mask: as in `attend`: bool, True = attend, or added to the logits, as log weights log w_n of the
                tokens; broadcasts against [*b, h, m, n].
        """
        statistics = statistics_of_forward()
        return self.attend(mean, covariance, memory, attn_mask=attn_mask, is_causal=is_causal, statistics=statistics)[0]

    def attend(
        self,
        mean: Float[Tensor, "*b m d"],
        covariance: Float[Tensor, "*b m d"] | Float[Tensor, "*b m d d"],
        memory: tuple[Float[Tensor, "*b n d"], Float[Tensor, "..."]] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        statistics: Literal["none", "scalar"] = "scalar",
    ) -> tuple[MeanAndCovariance, Attention]:
        """Moments, and statistics of each head [*b, h, m]: output is ∇G, value_variance the diagonal of ∇²G.

        With full covariances, only these two and the log normaliser are computed.
        """
        key_mean, key_covariance = memory or (mean, covariance)
        check_statistics("MomentAttention", statistics)
        self._check(mean, covariance, "covariance")
        self._check(key_mean, key_covariance, "covariance of memory")
        h, dtype = self.num_heads, self.out_proj.weight.dtype
        eta = split(self.q_proj(mean), h) * (self.embed_dim // h) ** -0.5
        mu = split(self.k_proj(key_mean), h)
        with autocast_disabled(eta):  # a variance is a difference, for which half precision has too few digits
            arguments = (wide(eta), wide(mu), wide(key_covariance), attn_mask, is_causal)
            result, spread = (
                self._full(*arguments) if self.covariance == "full" else self._diagonal(*arguments, statistics)
            )
            if self.noise is not None:
                Q = softplus(wide(self.noise))
                spread = spread + (Q if self.covariance == "diagonal" else torch.diag_embed(Q))
        return MeanAndCovariance(self.out_proj(join(result.output).to(dtype)), spread.to(key_covariance.dtype)), result

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, covariance={self.covariance!r}"

    def _diagonal(
        self,
        eta: Tensor,
        mu: Tensor,
        variance: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        statistics: Literal["none", "scalar"],
    ) -> tuple[Attention, Tensor]:
        """Attention to the points that represent the Gaussians, and the variance of the sum of the heads."""
        W_k, W_o = wide(self.k_proj.weight), wide(self.out_proj.weight)  # Shorthand
        messages = GaussianMessages(mu, split(linear(variance, W_k.square()), self.num_heads))
        result = attend(
            messages.queries(eta),
            messages.keys(),
            messages.values(),
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=1.0,
            statistics=statistics,
        )
        mean, spread = messages.moments(eta, result.output, result.log_normalizer != -torch.inf)
        return result._replace(output=mean, value_variance=spread), linear(join(spread), W_o.square())

    def _full(
        self, eta: Tensor, mu: Tensor, Sigma: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Attention, Tensor]:
        """Moments of the mixture by definition, and the covariance of the sum of the heads."""
        h = self.num_heads
        W_k, W_o = wide(self.k_proj.weight).unflatten(0, (h, -1)), wide(self.out_proj.weight).unflatten(1, (h, -1))
        Sigma = torch.einsum("hde,...nef,hgf->...hndg", W_k, Sigma, W_k)
        log_w = _log_weights(attn_mask, is_causal, eta, mu.shape[-2])
        mixture = Mixture(log_w, Gaussian(mu, Sigma, validate=False), validate=False)
        r, tilted = mixture.responsibilities(eta), mixture.components.mean(eta.unsqueeze(-3)).movedim(-3, -2)
        mean = gated_mean(r, tilted)
        # Average Sigma_n directly: `mixture.covariance` would hold a matrix for each pair of query and token.
        covariance = (r @ Sigma.flatten(-2)).unflatten(-1, Sigma.shape[-2:]) + gated_spread(r, tilted, mean)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        result = Attention(mean, mixture.log_normalizer(eta), value_variance=variance)
        return result, torch.einsum("ehd,...hmdg,fhg->...mef", W_o, covariance, W_o)

    def _check(self, mean: Tensor, covariance: Tensor, name: str) -> None:
        check_tokens("MomentAttention", self.embed_dim, mean=mean)
        shape = mean.shape if self.covariance == "diagonal" else (*mean.shape, self.embed_dim)
        if covariance.shape != shape:
            condition = f"{name} must have shape {tuple(shape)} ({self.covariance}), matching its mean"
            remedy = "Pass variances [*b, n, d] or matrices [*b, n, d, d]; use torch.zeros for no uncertainty."
            raise InputValueError("MomentAttention", name, f"{condition}, got shape {shape_of(covariance)}", remedy)


def _log_weights(attn_mask: Tensor | None, is_causal: bool, eta: Tensor, n: int) -> Tensor:
    """A mask of `attend` as log weights, [*b, h, m, n]."""
    *lead, h, m, _ = eta.shape
    sight = masks.sight(attn_mask, None, None, lead=torch.Size(lead), size=(h, m, n), like=eta)
    left, right = masks.band(is_causal, None)
    visible_keys = visible(sight, Scoring(1.0, None, left, right), Block(0, m, 0, n), m, n, eta.device)
    log_w = eta.new_zeros(()) if sight.bias is None else sight.bias
    log_w = log_w if visible_keys is None else torch.where(visible_keys, log_w, -torch.inf)
    return log_w.expand(math.prod(lead), h, m, n).reshape(*lead, h, m, n)
