"""Attention that passes on mean and covariance: Gaussian messages between tokens.

    h      = sum_n w_n N(mu_n, Sigma_n)                             the tokens, each with its uncertainty
    logits = log w_n + <mu_n, eta> + <eta, Sigma_n eta> / 2         eta = W_q x / sqrt(d)             [theory 8.4]
    m_n    = mu_n + Sigma_n eta                                     token n as the query sees it
    mean   = sum_n r_n m_n                                          = ∇G(eta), r = softmax(logits)
    cov    = sum_n r_n (Sigma_n + (m_n - mean)(m_n - mean)^T)       = ∇²G(eta)                        [theory 6.1]
    output = W_o mean, W_o cov W_o^T + Q                            X' = W_o X + noise                [theory 8.3]

Softmax attention is what is left as Sigma_n -> 0; the covariance that it drops is then the Fisher information of the
attended keys, and this layer hands it on to the next.

Read next: ../../measures/mixture.py (`GaussianMessages`, where the formula is), mixture.py (covariances that are
learned, not received).
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, softplus

from ..._autocast import autocast_disabled
from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Tensor
from ...kernels.attention.scoring import Block, Scoring, visible
from ...measures.gating import gated_mean, gated_spread
from ...measures.gaussian import Gaussian
from ...measures.mixture import GaussianMessages, Mixture
from .. import masks
from ..functional import attend
from ..result import Attention
from .heads import check_sizes, check_statistics, check_tokens, join, split, wide


class MeanAndCovariance(NamedTuple):
    """What one layer gives to the next: `layer(*moments)`."""

    mean: Float[Tensor, "*b n d"]
    covariance: Float[Tensor, "*b n d"] | Float[Tensor, "*b n d d"]


class MomentAttention(nn.Module):
    """Attention between Gaussian tokens: (mean, covariance) in, (mean, covariance) out.

    Each head sees the tokens through its keys, N(W_k mean, W_k covariance W_k^T), tilts that mixture by its query, and
    gives on the mean and covariance of what comes out, mapped by its part of W_o. Heads are independent draws that are
    added (a convolution), so their covariances add. Keys are the values here, as in the theory: the value map is W_o.

    With covariance="diagonal" a token has a variance for each coordinate, and a head keeps the variances of its keys,
    not their correlations: the nearest independent law. With "full" covariances are matrices and nothing is dropped.

    Cost: diagonal, linear memory; keys of 2 and values of 5 times the head size in one call of `attend`, 3.5 times the
    multiplications of softmax attention. Full, memory of queries x tokens x size: for a few hundred tokens. When not to
    use it: where no uncertainty comes in and none is wanted. `MultiheadAttention.attend` with statistics="moments"
    tells the variance of the values for less. Variances keep the digits that are left of the squared spread of all
    keys.

    Args:
        covariance: "diagonal", variances [*b, n, embed_dim]; or "full", matrices [*b, n, embed_dim, embed_dim].
        noise: learn the diagonal of Q, initially 0.0067; without it Q = 0.
        bias: of the projections, which moves means alone.

    Law: tests/laws/test_moment_attention_tilts_a_mixture_of_gaussians.py.

    >>> import torch
    >>> layer = MomentAttention(8, 2, noise=False, dtype=torch.float64)
    >>> x = torch.randn(3, 6, 8, dtype=torch.float64)
    >>> found = layer(x, torch.zeros_like(x))  # tokens without uncertainty: softmax attention with values = keys
    >>> q, k = (p(x).reshape(3, 6, 2, 4).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    >>> by_hand = (q @ k.mT / 2).softmax(-1) @ k
    >>> torch.allclose(found.mean, layer.out_proj(by_hand.transpose(1, 2).flatten(-2)))
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
            condition, remedy = 'covariance must be "diagonal" or "full"', "Leave it out for variances."
            raise InputValueError("MomentAttention", "covariance", f"{condition}, got {covariance!r}", remedy)
        super().__init__()
        self.embed_dim, self.num_heads, self.covariance = embed_dim, num_heads, covariance
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **made) for _ in range(3))
        self.noise = nn.Parameter(torch.full((embed_dim,), -5.0, **made)) if noise else None

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
            mean: where the tokens are; each makes its query of it. The covariance of a token counts where it is seen.
            covariance: nonnegative variances, or positive semidefinite matrices.
            memory: mean and covariance of other tokens to attend to.
            attn_mask: as of `attend`: bool, True = attend, or added to the logits; [*b, h, m, n] or what broadcasts to
                it. Log weights w_n of the tokens are such an addition.
        """
        return self.attend(mean, covariance, memory, attn_mask=attn_mask, is_causal=is_causal, statistics="none")[0]

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
        """The moments, and the statistics of each head [*b, h, m]: output ∇G, value_variance the diagonal of ∇²G.

        Full covariances come with these two and the log normaliser alone.
        """
        seen_mean, seen_covariance = memory or (mean, covariance)
        check_statistics("MomentAttention", statistics)
        self._check(mean, covariance, "covariance")
        self._check(seen_mean, seen_covariance, "covariance of memory")
        h, dtype = self.num_heads, self.out_proj.weight.dtype
        eta = split(self.q_proj(mean), h) * (self.embed_dim // h) ** -0.5
        mu = split(self.k_proj(seen_mean), h)
        with autocast_disabled(eta):  # a variance is a difference: half precision has no digits left for it
            given = (wide(eta), wide(mu), wide(seen_covariance), attn_mask, is_causal)
            found, whole = self._full(*given) if self.covariance == "full" else self._diagonal(*given, statistics)
            if self.noise is not None:
                Q = softplus(wide(self.noise))
                whole = whole + (Q if self.covariance == "diagonal" else torch.diag_embed(Q))
        return MeanAndCovariance(self.out_proj(join(found.output).to(dtype)), whole.to(seen_covariance.dtype)), found

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
        """Attention to the points that stand for the Gaussians, and the variance of the sum of the heads."""
        W_k, W_o = wide(self.k_proj.weight), wide(self.out_proj.weight)  # Shorthand
        messages = GaussianMessages(mu, split(linear(variance, W_k.square()), self.num_heads))
        found = attend(
            messages.queries(eta),
            messages.keys(),
            messages.values(),
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=1.0,
            statistics=statistics,
        )
        mean, spread = messages.moments(eta, found.output, found.seen)
        return found._replace(output=mean, value_variance=spread), linear(join(spread), W_o.square())

    def _full(
        self, eta: Tensor, mu: Tensor, Sigma: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Attention, Tensor]:
        """The mixture by its definition, and the covariance of the sum of the heads."""
        h = self.num_heads
        W_k, W_o = wide(self.k_proj.weight).unflatten(0, (h, -1)), wide(self.out_proj.weight).unflatten(1, (h, -1))
        Sigma = torch.einsum("hde,...nef,hgf->...hndg", W_k, Sigma, W_k)
        log_w = _log_weights(attn_mask, is_causal, eta, mu.shape[-2])
        mixture = Mixture(log_w, Gaussian(mu, Sigma, validate=False), validate=False)
        r, tilted = mixture.responsibilities(eta), mixture.components.mean(eta.unsqueeze(-3)).movedim(-3, -2)
        mean = gated_mean(r, tilted)
        # The average of Sigma_n by itself: `mixture.covariance` would hold one for each pair of query and token.
        covariance = (r @ Sigma.flatten(-2)).unflatten(-1, Sigma.shape[-2:]) + gated_spread(r, tilted, mean)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        found = Attention(mean, mixture.log_normalizer(eta), value_variance=variance)
        return found, torch.einsum("ehd,...hmdg,fhg->...mef", W_o, covariance, W_o)

    def _check(self, mean: Tensor, covariance: Tensor, name: str) -> None:
        check_tokens("MomentAttention", self.embed_dim, mean=mean)
        shape = mean.shape if self.covariance == "diagonal" else (*mean.shape, self.embed_dim)
        if covariance.shape != shape:
            condition = f"{name} must be {tuple(shape)}, {self.covariance}, beside its mean"
            remedy = "Variances are [*b, n, d], matrices [*b, n, d, d]; no uncertainty is torch.zeros."
            raise InputValueError("MomentAttention", name, f"{condition}, got shape {shape_of(covariance)}", remedy)


def _log_weights(attn_mask: Tensor | None, is_causal: bool, eta: Tensor, n: int) -> Tensor:
    """What `attend` makes of a mask, as log weights [*b, h, m, n]."""
    *lead, h, m, _ = eta.shape
    sight = masks.sight(attn_mask, None, None, lead=torch.Size(lead), size=(h, m, n), like=eta)
    left, right = masks.band(is_causal, None)
    seen = visible(sight, Scoring(1.0, None, left, right), Block(0, m, 0, n), m, n, eta.device)
    log_w = eta.new_zeros(()) if sight.bias is None else sight.bias
    log_w = log_w if seen is None else torch.where(seen, log_w, -torch.inf)
    return log_w.expand(math.prod(lead), h, m, n).reshape(*lead, h, m, n)
