"""Attention until nothing moves: one layer in place of infinitely many that share their weights.

    x* = N(x* + u + tau att(x*))                            where the tokens come to rest   [theory 5.8] [bai19]
    u       = W_u s                                         what the tokens s inject into every step
    att(x)  = W_o concat_h softmax(W_q x k^T / sqrt(d)) v   k = W_k c, v = W_v c of a context c, or of s itself
    N       = layer_norm, rms_norm, sphere, resolvent       what holds the tokens                       contraction.py

Keys that stay make every token come to rest by itself; keys that move, k = W_k x*, make the tokens of a sample come to
rest together. The gradient is that of the place of rest: its memory is that of one step, however many were made.

Read next: fixed_points.py (how the place is found and differentiated), hopfield.py (the resolvent without injection).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import linear

from .._autocast import autocast_disabled
from .._errors import InputValueError, shape_of
from .._typing import Bool, Float, Tensor
from ..kernels.attention.operator import attention
from ..kernels.attention.scoring import Scoring, Sight
from .contraction import contraction_of
from .fixed_points import Equilibrium, equilibrium, spectral_radius

CONTRACTIONS = ("layer_norm", "rms_norm", "sphere", "resolvent")


class EquilibriumAttention(nn.Module):
    """Multi-head attention repeated until the tokens rest, with input injection: a deep equilibrium layer.

    The layer is a map and a solver. `step(...)` gives the map, to which everything of fixed_points.py applies;
    `forward` the place of rest; `settle` that place with residual, convergence and steps of every token. Padding is
    torch's (True = leave the key out) and the batch comes first. There is no dropout: a map that changes from step to
    step has no place of rest.

    Cost: a forward pass is at most `max_iterations` attention calls, a backward pass one linear solve of as many
    backward passes of one step; memory is that of one step, times the few states that the solver keeps. The state is
    float32 or better under autocast and in half precision, since residuals are differences. Compiled with torch.compile
    it stays out of the graph. When not to use it: if a fixed number of steps will do, `evolve` is a loop without a
    solve.

    Args:
        tau: how far a step goes along attention; 0 < tau. Small ones rest sooner.
        contraction: "layer_norm", "rms_norm", "sphere" or "resolvent", which divides by 1 + tau.
        moving: keys and values are those of x* itself, and a sample rests as a whole.
        kdim: of the context; embed_dim by default.
        method: "anderson", "newton" or "iterate", as of `equilibrium`; so are max_iterations, tolerance and throw.

    Law: tests/laws/test_equilibrium_attention_rests.py.

    >>> import torch
    >>> layer, s = EquilibriumAttention(8, 2, dtype=torch.float64), torch.randn(3, 6, 8, dtype=torch.float64)
    >>> x = layer(s)
    >>> bool((layer.step(s)(x) - x).abs().max() < 1e-9)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        tau: float = 1.0,
        contraction: Literal["layer_norm", "rms_norm", "sphere", "resolvent"] = "layer_norm",
        moving: bool = False,
        kdim: int | None = None,
        bias: bool = True,
        method: Literal["anderson", "newton", "iterate"] = "anderson",
        max_iterations: int = 200,
        tolerance: float | None = None,
        throw: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            fact, condition = (
                f"embed_dim={embed_dim} and num_heads={num_heads}",
                "embed_dim must be a multiple of num_heads",
            )
            remedy = "Each head has embed_dim / num_heads coordinates."
            raise InputValueError("EquilibriumAttention", "embed_dim", f"{condition}, got {fact}", remedy)
        if contraction not in CONTRACTIONS:
            remedy = "Others make tokens depend on each other."
            condition = f"contraction must be one of {', '.join(CONTRACTIONS)}"
            raise InputValueError("EquilibriumAttention", "contraction", f"{condition}, got {contraction!r}", remedy)
        if not tau > 0:
            remedy = "1 is a whole step along attention."
            raise InputValueError("EquilibriumAttention", "tau", f"tau must be positive, got {tau}", remedy)
        super().__init__()
        self.embed_dim, self.num_heads, self.kdim = embed_dim, num_heads, embed_dim if kdim is None else kdim
        self.tau, self.contraction, self.moving = tau, contraction, moving
        self.method: Literal["anderson", "newton", "iterate"] = method
        self.max_iterations, self.tolerance, self.throw = max_iterations, tolerance, throw
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj, self.q_proj = (nn.Linear(embed_dim, embed_dim, bias, **made) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(self.kdim, embed_dim, bias, **made) for _ in range(2))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **made)

    def forward(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n e"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*b m d"]:
        """Where the tokens rest.

        Args:
            query: the tokens s that are injected.
            key: the context that is attended to; the same tokens if not given.
            key_padding_mask: True = leave the key out.
            is_causal: a token sees those before it and itself.
        """
        return self.settle(query, key, key_padding_mask=key_padding_mask, is_causal=is_causal).state

    def settle(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n e"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
    ) -> Equilibrium:
        """The place of rest with residual, converged and steps: [*b, m] of tokens, or [*b] of samples if keys move."""
        f = self.step(query, key, key_padding_mask=key_padding_mask, is_causal=is_causal)
        with autocast_disabled(query):
            start = contraction_of(self.contraction, self.tau)(self._injected(query))
            # How many steps are made depends on numbers: no graph holds them. (At import it would load the compiler.)
            solve = torch.compiler.disable(equilibrium) if torch.compiler.is_compiling() else equilibrium
            found = solve(
                f, start, method=self.method, tokens_interact=self.moving, max_iterations=self.max_iterations,
                tolerance=self.tolerance, throw=self.throw,
            )  # fmt: skip
        return found._replace(state=found.state.to(query.dtype))

    def step(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n e"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
    ) -> Callable[[Tensor], Tensor]:
        """The map x -> N(x + u + tau att(x)) of these tokens and keys: for `spectral_radius` and `jacobian_penalty`."""
        self._check(query, key, key_padding_mask)
        with autocast_disabled(query):
            u = self._injected(query)
            context = _wide(query if key is None else key)
            seen = None if key_padding_mask is None else ~key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
            kept = None if self.moving else (self._heads(self.k_proj, context), self._heads(self.v_proj, context))
        N = contraction_of(self.contraction, self.tau)
        scoring = Scoring((self.embed_dim // self.num_heads) ** -0.5, None, None, 0 if is_causal else None)

        def f(x: Tensor) -> Tensor:
            with autocast_disabled(x):
                k, v = (self._heads(self.k_proj, x), self._heads(self.v_proj, x)) if kept is None else kept
                found = attention(self._heads(self.q_proj, x), k, v, Sight(mask=seen), scoring, statistics=False)
                joined = found.output.transpose(1, 2).reshape(x.shape)
                return N(x + u + self.tau * _linear(self.out_proj, joined))

        return f

    def spectral_radius(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n e"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
        steps: int = 100,
    ) -> Float[Tensor, "..."]:
        """How a small displacement grows at the place of rest: below 1 where it attracts."""
        with torch.no_grad():
            sees: dict[str, Any] = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
            state = _wide(self.settle(query, key, **sees).state)
            return spectral_radius(self.step(query, key, **sees), state, tokens_interact=self.moving, steps=steps)

    def extra_repr(self) -> str:
        size = "" if self.kdim == self.embed_dim else f", kdim={self.kdim}"
        map_ = f"tau={self.tau}, contraction={self.contraction!r}" + (", moving=True" if self.moving else "")
        solver = f"method={self.method!r}, max_iterations={self.max_iterations}"
        return f"{self.embed_dim}, num_heads={self.num_heads}{size}, {map_}, {solver}"

    def _injected(self, query: Tensor) -> Tensor:
        return _linear(self.in_proj, _wide(query))

    def _heads(self, projection: nn.Linear, tokens: Tensor) -> Tensor:
        """Projected and split, [b, h, n, d] with one batch dimension."""
        found = _linear(projection, tokens)
        return found.reshape(-1, tokens.shape[-2], self.num_heads, found.shape[-1] // self.num_heads).transpose(1, 2)

    def _check(self, query: Tensor, key: Tensor | None, padding: Tensor | None) -> None:
        call = "EquilibriumAttention"
        if key is not None and self.moving:
            remedy = "Leave it out, or build the layer with moving=False."
            raise InputValueError(call, "key", "key must not be given where the tokens are the keys, got one", remedy)
        sizes = {"query": (query, self.embed_dim), "key": (query if key is None else key, self.kdim)}
        for name, (t, size) in sizes.items():
            if t.ndim < 2 or t.shape[-1] != size or t.shape[:-2] != query.shape[:-2]:
                condition = f"{name} must be [*b, tokens, {size}], with one batch for query and key"
                remedy = "The batch comes first; kdim is the size of the context."
                raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
        wanted = sizes["key"][0].shape[:-1]
        if padding is not None and (padding.dtype != torch.bool or padding.shape != wanted):
            condition = f"key_padding_mask must be bool of shape {tuple(wanted)}"
            remedy = "True leaves a key out."
            raise InputValueError(
                call, "key_padding_mask", f"{condition}, got {padding.dtype} of shape {shape_of(padding)}", remedy
            )


def _linear(projection: nn.Linear, tokens: Tensor) -> Tensor:
    """In the precision of the tokens."""
    bias = None if projection.bias is None else projection.bias.to(tokens.dtype)
    return linear(tokens, projection.weight.to(tokens.dtype), bias)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
