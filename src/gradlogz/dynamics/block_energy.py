"""A transformer block with an energy: attention and feed-forward layer as two terms of one function.

    A(x) = sum_h log sum_n exp(beta <W_qh x, W_kh c_n>) / beta       attention to a context c
    ∇A   = sum_h W_qh^T att_h(x)                                     values = keys, output map = W_q^T
    F(x) = sum_a F(<w_a, x> + b_a)                                   feed-forward layer                 feed_forward.py
    E(x) = |x|²/2 - A(x) - F(x)                                      the energy of the block
    x'   = x + s y,  y = ∇A(x) + ∇F(x) - x                           lowers E by s (1 - s (1 + c |W|²) / 2) |y|²

The sublayers also have energies of their own, |x|²/2 - A(x) and |x|²/2 - F(x) [bal20]. Applied one after the other, as
in a transformer, each lowers its own; their sequence lowers neither of the two nor E in general. Only sublayers in
parallel descend E.

Without a context the tokens are the keys. Then E has a second term in its gradient, since a token is also the key of
others: sum_i a_ij W_k^T W_q x_i [hoover23]. `step` has both terms, and E falls for small s; ordinary attention has the
first alone and is the gradient of no energy.

Read next: feed_forward.py, hopfield.py (one head without projections).
"""

import math
from typing import Any

import torch
from torch import nn

from .._autocast import autocast_disabled, wide
from .._errors import InputValueError, shape_of
from .._typing import Float, Tensor
from ..kernels.attention.operator import attention
from ..kernels.attention.scoring import Scoring, Sight
from .feed_forward import HopfieldFeedForward
from .projections import check_heads, in_heads


class EnergyBlock(nn.Module):
    """Block of attention and feed-forward layer in parallel, a step of descent on one energy.

    The values of attention are its keys, and the output map is the transposed query map, so that attention is a
    gradient.

    Args:
        embed_dim: size of a token.
        num_heads: heads of attention.
        hidden: hidden units of the feed-forward layer.
        activation: that of `HopfieldFeedForward`.
        beta: inverse temperature of attention, positive; default: 1 / sqrt(embed_dim / num_heads).
        damping: step size s.
        steps: number of steps of a forward pass.

    Law: tests/laws/test_blocks_descend_an_energy.py.

    >>> import torch
    >>> block, (x, c) = EnergyBlock(8, 2, 32, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    >>> bool((block.energy(block(x, c), c) <= block.energy(x, c)).all())
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden: int,
        *,
        activation: str = "relu",
        beta: float | None = None,
        damping: float = 0.5,
        steps: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads("EnergyBlock", embed_dim, num_heads)
        if not 0 < damping < 2:
            remedy = "Pass 1 or less; without a context small values descend."
            raise InputValueError("EnergyBlock", "damping", f"damping must be in (0, 2), got {damping}", remedy)
        if beta is not None and not 0 < beta < math.inf:
            remedy = "Pass a positive inverse temperature: with others a step is no descent."
            raise InputValueError("EnergyBlock", "beta", f"beta must be positive and finite, got {beta}", remedy)
        super().__init__()
        self.embed_dim, self.num_heads, self.damping, self.steps = embed_dim, num_heads, damping, steps
        self.beta = 1 / math.sqrt(embed_dim // num_heads) if beta is None else beta
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj = (nn.Linear(embed_dim, embed_dim, bias=False, **options) for _ in range(2))
        self.feed_forward = HopfieldFeedForward(embed_dim, hidden, activation=activation, **options)

    def forward(
        self, x: Float[Tensor, "*b m d"], context: Float[Tensor, "*b n d"] | None = None
    ) -> Float[Tensor, "*b m d"]:
        """The tokens after `steps` steps, [*b, m, d].

        Args:
            x: tokens.
            context: tokens of the keys, fixed; default: the tokens themselves, which then move together.
        """
        for _ in range(self.steps):
            x = self.step(x, context)
        return x

    def energy(
        self, x: Float[Tensor, "*b m d"], context: Float[Tensor, "*b n d"] | None = None
    ) -> Float[Tensor, "..."]:
        """Energy |x|²/2 - A(x) - F(x): of every token, [*b, m], or without a context of all tokens together, [*b]."""
        per_token = x.square().sum(-1) / 2 - self.attention_potential(x, context) - self.feed_forward.potential(x)
        return per_token if context is not None else per_token.sum(-1)

    def attention_potential(
        self, x: Float[Tensor, "*b m d"], context: Float[Tensor, "*b n d"] | None = None
    ) -> Float[Tensor, "*b m"]:
        """A(x), the log normalisers of the heads, summed and divided by beta, [*b, m]."""
        return self._attended(x, context)[1]

    def step(
        self, x: Float[Tensor, "*b m d"], context: Float[Tensor, "*b n d"] | None = None
    ) -> Float[Tensor, "*b m d"]:
        """One step x - s ∇E(x) of both sublayers in parallel, [*b, m, d]."""
        downhill = self._attended(x, context)[0] + self.feed_forward(x) - x
        if context is None:
            downhill = downhill + self._as_keys(x)
        return x + self.damping * downhill

    def attention_step(self, x: Float[Tensor, "*b m d"], context: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b m d"]:
        """Step of the attention sublayer alone, a descent of |x|²/2 - A(x)."""
        return x + self.damping * (self._attended(x, context)[0] - x)

    def feed_forward_step(self, x: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        """Step of the feed-forward sublayer alone, a descent of |x|²/2 - F(x)."""
        return self.feed_forward.step(x, damping=self.damping)

    def descent(self, x: Float[Tensor, "*b m d"], context: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b m"]:
        """Lower bound on the decrease of the energy of every token in a step with a fixed context, [*b, m]."""
        s = self.damping
        factor = s * (1 - s * (1 + self.feed_forward.negative_curvature()) / 2)
        return factor * ((self.step(x, context) - x) / s).square().sum(-1)

    def extra_repr(self) -> str:
        solver = f"damping={self.damping}, steps={self.steps}"
        return f"{self.embed_dim}, num_heads={self.num_heads}, beta={self.beta:.4g}, {solver}"

    def _attended(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """∇A(x) for fixed keys, and A(x)."""
        c = x if context is None else context
        for name, t in (("x", x), ("context", c)):
            if t.ndim < 2 or t.shape[-1] != self.embed_dim or t.shape[:-2] != x.shape[:-2]:
                condition = f"{name} must be [*b, tokens, embed_dim={self.embed_dim}], with the same batch for both"
                raise InputValueError(
                    "EnergyBlock", name, f"{condition}, got shape {shape_of(t)}", "Put the batch dimensions first."
                )
        q, k = (in_heads(t, self.num_heads) for t in (self.q_proj(x), self.k_proj(c)))
        result = attention(q, k, k, Sight(), Scoring(float(self.beta)), statistics=False)
        output = result.output.transpose(1, 2).reshape(x.shape) @ self.q_proj.weight
        return output, result.log_normalizer.sum(1).reshape(x.shape[:-1]) / self.beta

    def _as_keys(self, x: Tensor) -> Tensor:
        """Gradient of the potentials of all tokens in their keys, sum_i a_ij W_k^T q_i: attention of keys to queries.

        The weights a_ij = exp(beta <q_i, k_j> - G_i) are normalised over j; -G_i is one more coordinate of a query.
        """
        q, k = (in_heads(p(x), self.num_heads) for p in (self.q_proj, self.k_proj))
        with autocast_disabled(x):  # log normalisers as coordinates: half precision would lose the weights
            wide_q, wide_k = wide(q), wide(k)
            scoring = Scoring(float(self.beta))
            G = attention(wide_q, wide_k, wide_k, Sight(), scoring, statistics=False).log_normalizer.unsqueeze(-1)
            keys = torch.cat((wide_k, torch.ones_like(wide_k[..., :1])), -1)
            queries = torch.cat((wide_q, -G / self.beta), -1)
            result = attention(keys, queries, wide_q, Sight(), scoring, statistics=False)
            pulled = (result.log_normalizer.exp().unsqueeze(-1) * result.output).to(q.dtype)
        return pulled.transpose(1, 2).reshape(x.shape) @ self.k_proj.weight
