"""Deep equilibrium attention with exactly one fixed point, for all weights and inputs.

    x* = prox(u + M x* + g att(x*))             u = W_u s: injection of the input tokens s
    M  = -A^T A + B - B^T                       monotone part: <x, M x> <= 0                                [winston20]
    g  = (1 - m) / max(1 - m, bound)            bound = sum_h diam(v_h) diam(k_h) / 4 sqrt(d)               monotone.py

k_h = W_qh^T W_k c and v_h = W_oh W_v c are keys and values of a context c in the space of tokens. Diameters are those
of the keys that a query sees: hidden keys change neither its strength g nor its fixed point. The Jacobian J of the
map then satisfies <y, (I - J) y> >= m |y|² for every x, so that the fixed point is unique and every start reaches it.

Read next: monotone.py (certificate and solver), equilibrium_attention.py (any contraction, no certificate).
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import pad

from .._autocast import autocast_disabled, wide
from .._errors import InputValueError, shape_of
from .._typing import Bool, Float, Tensor
from ..kernels.attention.operator import attention
from ..kernels.attention.scoring import Scoring, Sight
from .fixed_points import Equilibrium
from .monotone import Certificate, Prox, bound_of_heads, monotone_equilibrium
from .projections import check_heads, in_heads, projected


class MonotoneAttention(nn.Module):
    """Deep equilibrium layer whose fixed point is unique by construction: multi-head attention to a fixed context.

    Cost: as `EquilibriumAttention`, and the largest distance between two keys in each head, n² distances in linear
    memory. torch.compile leaves the solver out of the graph.

    Args:
        margin: m in (0, 1], the monotonicity; with a small margin attention is stronger and the solver slower.
        prox: "none", "relu", "box", "ball" or "tanh", as in `monotone_equilibrium`.
        bias: biases of the projections.

    `method`, `max_iterations`, `tolerance` and `throw` are those of `monotone_equilibrium`.

    Law: tests/laws/test_monotone_equilibria_are_unique.py.

    >>> import torch
    >>> layer, s = MonotoneAttention(8, 2, dtype=torch.float64), torch.randn(3, 6, 8, dtype=torch.float64)
    >>> x, (F, certificate) = layer(s), layer.step(s)
    >>> bool((F(x) - x).abs().max() < 1e-9), bool((certificate.monotonicity >= layer.margin).all())
    (True, True)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        margin: float = 0.2,
        prox: str | Prox = "none",
        bias: bool = True,
        method: Literal["forward_backward", "peaceman_rachford"] = "forward_backward",
        max_iterations: int = 2000,
        tolerance: float | None = None,
        throw: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads("MonotoneAttention", embed_dim, num_heads)
        if not 0 < margin <= 1:
            remedy = "Pass a lower bound on the monotonicity, such as 0.2."
            raise InputValueError("MonotoneAttention", "margin", f"margin must be in (0, 1], got {margin}", remedy)
        super().__init__()
        self.embed_dim, self.num_heads, self.margin, self.prox = embed_dim, num_heads, margin, prox
        self.method: Literal["forward_backward", "peaceman_rachford"] = method
        self.max_iterations, self.tolerance, self.throw = max_iterations, tolerance, throw
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(3))
        self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        small = 0.3 / math.sqrt(embed_dim)
        self.contracting, self.turning = (
            nn.Parameter(small * torch.randn(embed_dim, embed_dim, **options)) for _ in range(2)
        )

    def forward(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*b m d"]:
        """The fixed point, [*b, m, d].

        Args:
            query: input tokens s, injected in every step.
            key: context tokens; default: the input tokens.
            key_padding_mask: True = ignore the key.
            is_causal: apply a causal mask.
        """
        return self.settle(query, key, key_padding_mask=key_padding_mask, is_causal=is_causal).state

    def settle(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
    ) -> Equilibrium:
        """The fixed point with residual, convergence flag and number of iterations of every token, [*b, m]."""
        F, certificate = self.step(query, key, key_padding_mask=key_padding_mask, is_causal=is_causal)
        with autocast_disabled(query):
            start = torch.zeros_like(wide(query))
            # The number of steps depends on the data, so no graph can hold it.
            solve = (
                torch.compiler.disable(monotone_equilibrium) if torch.compiler.is_compiling() else monotone_equilibrium
            )
            result = solve(
                F, start, certificate, prox=self.prox, method=self.method, max_iterations=self.max_iterations,
                tolerance=self.tolerance, throw=self.throw,
            )  # fmt: skip
        return result._replace(state=result.state.to(query.dtype))

    def step(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
    ) -> tuple[Callable[[Tensor], Tensor], Certificate]:
        """The map F for this input, without the prox, and its certificate.

        It is that of the keys that are not padded, one for each batch [*b]; with a causal mask it is that of the keys
        up to the query, one for each query [*b, m].
        """
        context = query if key is None else key
        for name, t in (("query", query), ("key", context)):
            if t.ndim < 2 or t.shape[-1] != self.embed_dim or t.shape[:-2] != query.shape[:-2]:
                condition = f"{name} must be [*b, tokens, embed_dim={self.embed_dim}], with the same batch for both"
                remedy = "Put the batch dimensions first."
                raise InputValueError("MonotoneAttention", name, f"{condition}, got shape {shape_of(t)}", remedy)
        visible = None
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != context.shape[:-1]:
                fact = f"{key_padding_mask.dtype} of shape {shape_of(key_padding_mask)}"
                condition = f"key_padding_mask must be bool of shape {tuple(context.shape[:-1])}"
                remedy = "Pass a mask that is True for the keys to ignore."
                raise InputValueError("MonotoneAttention", "key_padding_mask", f"{condition}, got {fact}", remedy)
            visible = ~key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
            context = _without_padding(context, key_padding_mask)
        with autocast_disabled(query):
            u = projected(self.in_proj, wide(query))
            k, v = (in_heads(projected(p, wide(context)), self.num_heads) for p in (self.k_proj, self.v_proj))
            bound = bound_of_heads(k, v, self.q_proj.weight, self.out_proj.weight, prefixes=is_causal)
            if is_causal:
                bound = _of_queries(bound, query.shape[-2])
            bound = bound.reshape(query.shape[: -1 if is_causal else -2])
            strength = 1 - self.margin
            g = strength / bound.clamp(min=strength) if strength else torch.zeros_like(bound)
            A, B = self.contracting.to(u.dtype), self.turning.to(u.dtype)
            M = -A.mT @ A + B - B.mT
            lipschitz = 1 + torch.linalg.matrix_norm(M, 2) + g * bound
            certificate = Certificate((1 - g * bound).detach(), lipschitz.detach())
        scoring = Scoring((self.embed_dim // self.num_heads) ** -0.5, None, None, 0 if is_causal else None)

        def F(x: Tensor) -> Tensor:
            with autocast_disabled(x):
                q = in_heads(projected(self.q_proj, x), self.num_heads)
                result = attention(q, k, v, Sight(mask=visible), scoring, statistics=False)
                attended = projected(self.out_proj, result.output.transpose(1, 2).reshape(x.shape))
                return u + x @ M.mT + g.reshape(*g.shape, *(1,) * (x.ndim - g.ndim)) * attended

        return F, certificate

    def extra_repr(self) -> str:
        prox = self.prox if isinstance(self.prox, str) else "function"
        return f"{self.embed_dim}, num_heads={self.num_heads}, margin={self.margin}, prox={prox!r}"


def _without_padding(context: Tensor, hidden: Tensor) -> Tensor:
    """The context with its first visible token in place of hidden ones, which adds no distance between keys."""
    if not hidden.shape[-1]:
        return context
    first = (~hidden).long().argmax(-1)[..., None, None]
    token = context.gather(-2, first.expand(*first.shape[:-1], context.shape[-1]))
    token = token.masked_fill(hidden.all(-1)[..., None, None], 0.0)
    return torch.where(hidden.unsqueeze(-1), token, context)


def _of_queries(bound: Tensor, m: int) -> Tensor:
    """Bounds [b, n] of the first 1 ... n keys as those of the last m queries; 0 for queries before the first key."""
    n = bound.shape[-1]
    return bound[..., n - m :] if m <= n else pad(bound, (m - n, 0))
