"""Deep equilibrium attention: the fixed point of one attention layer, applied infinitely often.

    x* = N(x* + u + tau att(x*))                            fixed point                     [theory 5.8] [bai19]
    u       = W_u s                                         injection of the input tokens s in every step
    att(x)  = W_o concat_h softmax(W_q x k^T / sqrt(d)) v   k = W_k c, v = W_v c of a context c, or of s itself
    N       any contraction                                 of each token, or of all together           contraction.py

With fixed keys every token converges separately; with moving keys, k = W_k x*, the tokens of a sample converge
together. The gradient is that of the fixed point and needs the memory of one step, whatever the number of steps.

With the contraction "shrinkage" the fixed point is that of x = u / tau + att(x), and `certificate` bounds the Jacobian
of its right side.

Read next: fixed_points.py (solver and gradient), monotone_attention.py (one fixed point for all weights), hopfield.py
(`shrinkage` without injection).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from .._autocast import autocast_disabled, wide
from .._errors import InputError, InputValueError, shape_of
from .._typing import Bool, Float, Tensor
from ..kernels.attention.operator import attention
from ..kernels.attention.scoring import Scoring, Sight
from .contraction import Affine, Composed, Contraction, ContractionLike, Nothing, Shrinkage, contraction_of
from .fixed_points import Equilibrium, equilibrium, spectral_radius
from .monotone import Certificate, bound_of_heads
from .projections import check_heads, in_heads, projected


class EquilibriumAttention(nn.Module):
    """Deep equilibrium layer: multi-head attention with input injection, iterated to its fixed point.

    `forward` returns the fixed point, `settle` also the residual, convergence flag and number of steps of every token,
    and `step` the map, for the functions of fixed_points.py. Padding masks follow torch (True = ignore the key), and
    the batch comes first. There is no dropout, since a random map has no fixed point.

    Cost: a forward pass makes at most `max_iterations` attention calls; a backward pass is one linear solve with as
    many backward passes of one step. Memory is that of one step times the few states that the solver stores. The state
    is float32 or better under autocast and in half precision, since residuals are small differences. torch.compile
    leaves the solver out of the graph. If a fixed number of steps suffices, use `evolve`.

    Args:
        tau: step size along attention, positive; small values converge sooner.
        contraction: as in `evolve`: a name, a `Contraction`, a function of tokens such as torch.tanh, a module such as
            nn.LayerNorm, whose parameters are learned, or a tuple of these. "shrinkage" divides by 1 + tau. A function
            or module must act on each token separately, unless keys move. Contractions that use the moments of all
            tokens ("center", "zca") make the tokens of a sample converge together.
        moving: take keys and values from x* itself; the tokens of a sample then converge together.
        kdim: dimension of the context; default: embed_dim.
        bias: add biases to the projections.
        method: "anderson", "newton" or "iterate", see `equilibrium`; likewise max_iterations, tolerance and throw.

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
        contraction: ContractionLike = "layer_norm",
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
        check_heads("EquilibriumAttention", embed_dim, num_heads)
        if not tau > 0:
            remedy = "Pass a step size such as 1."
            raise InputValueError("EquilibriumAttention", "tau", f"tau must be positive, got {tau}", remedy)
        try:
            together = moving or _uses_moments(contraction_of(contraction, tau))
        except InputError:
            condition = "contraction must be one of the contractions of evolve, without those of Gaussian keys"
            remedy = "Pass a name such as layer_norm, a Contraction, a function of tokens, or a module."
            fact = contraction if isinstance(contraction, str) else type(contraction).__name__
            raise InputValueError("EquilibriumAttention", "contraction", f"{condition}, got {fact!r}", remedy) from None
        super().__init__()
        self.tokens_interact = together
        self.embed_dim, self.num_heads, self.kdim = embed_dim, num_heads, embed_dim if kdim is None else kdim
        self.tau, self.contraction, self.moving = tau, contraction, moving
        if isinstance(contraction, tuple):
            self.contractions = nn.ModuleList(part for part in contraction if isinstance(part, nn.Module))
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
        key: Float[Tensor, "*b n e"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
    ) -> Equilibrium:
        """The fixed point with residual, converged and steps: [*b, m], or [*b] if tokens converge together."""
        f = self.step(query, key, key_padding_mask=key_padding_mask, is_causal=is_causal)
        with autocast_disabled(query):
            start = contraction_of(self.contraction, self.tau)(self._injected(query))
            # The number of steps depends on the data, so no graph can hold it. (At import it would load the compiler.)
            solve = torch.compiler.disable(equilibrium) if torch.compiler.is_compiling() else equilibrium
            result = solve(
                f, start, method=self.method, tokens_interact=self.tokens_interact, max_iterations=self.max_iterations,
                tolerance=self.tolerance, throw=self.throw,
            )  # fmt: skip
        return result._replace(state=result.state.to(query.dtype))

    def step(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n e"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "*b n"] | None = None,
        is_causal: bool = False,
    ) -> Callable[[Tensor], Tensor]:
        """The map x -> N(x + u + tau att(x)) for this input, for `spectral_radius` and `jacobian_penalty`."""
        self._check(query, key, key_padding_mask)
        with autocast_disabled(query):
            u = self._injected(query)
            context = wide(query if key is None else key)
            visible = (
                None if key_padding_mask is None else ~key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
            )
            fixed = None if self.moving else (self._heads(self.k_proj, context), self._heads(self.v_proj, context))
        N = contraction_of(self.contraction, self.tau)
        scoring = Scoring((self.embed_dim // self.num_heads) ** -0.5, None, None, 0 if is_causal else None)

        def f(x: Tensor) -> Tensor:
            with autocast_disabled(x):
                k, v = (self._heads(self.k_proj, x), self._heads(self.v_proj, x)) if fixed is None else fixed
                result = attention(self._heads(self.q_proj, x), k, v, Sight(mask=visible), scoring, statistics=False)
                joined = result.output.transpose(1, 2).reshape(x.shape)
                return N(x + u + self.tau * projected(self.out_proj, joined))

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
        """Spectral radius of the Jacobian at the fixed point; below 1 the fixed point is stable."""
        with torch.no_grad():
            masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
            state = wide(self.settle(query, key, **masks).state)
            return spectral_radius(
                self.step(query, key, **masks), state, tokens_interact=self.tokens_interact, steps=steps
            )

    def certificate(self, query: Float[Tensor, "*b m d"], key: Float[Tensor, "*b n e"] | None = None) -> Certificate:
        """Certificate of x = u / tau + att(x), the fixed points with the contraction "shrinkage", one for each batch.

            m >= 1 - sum_h diam(W_oh v_h) diam(W_qh^T k_h) / 4 sqrt(d)                                      monotone.py

        Where its monotonicity is positive, the fixed point is unique, with any mask.
        """
        self._check(query, key, None)
        if self.moving or not isinstance(contraction_of(self.contraction, self.tau), Shrinkage):
            problem = "certificate needs fixed keys and the contraction that divides by 1 + tau"
            remedy = "Build the layer with moving=False and that contraction, or use MonotoneAttention."
            raise InputValueError("EquilibriumAttention.certificate", None, problem, remedy)
        context = wide(query if key is None else key)
        k, v = self._heads(self.k_proj, context), self._heads(self.v_proj, context)
        bound = bound_of_heads(k, v, self.q_proj.weight, self.out_proj.weight).reshape(query.shape[:-2])
        return Certificate(1 - bound, 1 + bound)

    def extra_repr(self) -> str:
        size = "" if self.kdim == self.embed_dim else f", kdim={self.kdim}"
        name = self.contraction if isinstance(self.contraction, str) else type(self.contraction).__name__
        map_ = f"tau={self.tau}, contraction={name!r}" + (", moving=True" if self.moving else "")
        solver = f"method={self.method!r}, max_iterations={self.max_iterations}"
        return f"{self.embed_dim}, num_heads={self.num_heads}{size}, {map_}, {solver}"

    def _injected(self, query: Tensor) -> Tensor:
        return projected(self.in_proj, wide(query))

    def _heads(self, projection: nn.Linear, tokens: Tensor) -> Tensor:
        """Tokens projected and split into heads, [b, h, n, d] with one batch dimension."""
        return in_heads(projected(projection, tokens), self.num_heads)

    def _check(self, query: Tensor, key: Tensor | None, padding: Tensor | None) -> None:
        call = "EquilibriumAttention"
        if key is not None and self.moving:
            problem = "key cannot be passed to a layer with moving=True, whose tokens are the keys"
            raise InputValueError(call, "key", problem, "Drop key, or build the layer with moving=False.")
        sizes = {"query": (query, self.embed_dim), "key": (query if key is None else key, self.kdim)}
        for name, (t, size) in sizes.items():
            if t.ndim < 2 or t.shape[-1] != size or t.shape[:-2] != query.shape[:-2]:
                condition = f"{name} must be [*b, tokens, {size}], with the same batch for query and key"
                remedy = "Put the batch first, and set kdim to the dimension of the context."
                raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
        shape = sizes["key"][0].shape[:-1]
        if padding is not None and (padding.dtype != torch.bool or padding.shape != shape):
            condition = f"key_padding_mask must be bool of shape {tuple(shape)}"
            remedy = "Pass a mask that is True for the keys to ignore."
            raise InputValueError(
                call, "key_padding_mask", f"{condition}, got {padding.dtype} of shape {shape_of(padding)}", remedy
            )


def _uses_moments(contraction: Contraction) -> bool:
    """Return whether a contraction depends on the moments of the cloud, so that tokens depend on each other."""
    if isinstance(contraction, Composed):
        return any(map(_uses_moments, contraction.parts))
    return isinstance(contraction, Affine) and not isinstance(contraction, Nothing | Shrinkage)
