"""Monotone equilibria: a certificate that a fixed point is unique, and splitting methods that find it.

    x = prox(F(x)),  i.e.  0 in A x + ∂phi(x),  A = I - F              prox of a convex phi                  [winston20]
    <A x - A y, x - y> >= m |x - y|²,  m > 0                           strongly monotone: exactly one fixed point

For attention, F(x) = u + tau sum_n p_n v_n with p = softmax(beta <x, k_n>), the Jacobian is a covariance:

    J = tau beta Cov_p(v, k),   |Cov_p(v, k)| <= diam(v) diam(k) / 4   Popoviciu along every pair of directions
    m >= 1 - |tau beta| diam(v) diam(k) / 4                            any values
    m >= 1 - tau beta diam(k)² / 4                                     values = keys: J is positive semidefinite
    m >= 1                                                             values = keys and tau beta <= 0: descent

With one key at a and one at -a the condition tau beta diam² / 4 < 1 is sharp: x = tau a tanh(beta a x) has three fixed
points from tau beta a² = 1 on. In descent there is always one fixed point, although plain iteration cycles.

    forward-backward     x' = prox_c(x - c A x)                        c < 2 m / L²; c < 2 / L if J is symmetric
                                                                       the last few steps are combined (Anderson)
    Peaceman-Rachford    y = 2 x - z,  z' = 2 (I + c A)^-1 y - y,  x' = prox_c(z')          every c > 0
    prox_c(y) = argmin phi(x) + |x - y|² / 2c;  prox = prox_1

Read next: fixed_points.py (the gradient, and methods for any map), monotone_attention.py (a layer).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from .._errors import InputValueError, check_floats, shape_of
from .._typing import Bool, Float, Tensor
from .fixed_points import MEMORY, Anderson, Equilibrium, Map, Solver, equilibrium, solved

Prox = Callable[[Tensor, Tensor], Tensor]  # of a point [*b, d] and a step size that broadcasts against it

PAIRS = 1 << 22  # distances computed at once
EXACT = "donot_use_mm_for_euclid_dist"  # products of vectors would lose half of the digits
NEWTON_STEPS = 30  # of the scalar equation of tanh: monotone, and quadratic near the root


class Certificate(NamedTuple):
    """Bounds on A = I - F for every x, one for each batch of keys.

    Attributes:
        monotonicity: lower bound m on <A x - A y, x - y> / |x - y|².
        lipschitz: upper bound L on |A x - A y| / |x - y|.
        symmetric: True if the Jacobian is symmetric, so that larger steps converge.
    """

    monotonicity: Float[Tensor, "..."]
    lipschitz: Float[Tensor, "..."]
    symmetric: bool = False

    @property
    def unique(self) -> Bool[Tensor, "..."]:
        """True where x = prox(F(x)) has exactly one fixed point, for the prox of any convex function."""
        return self.monotonicity > 0

    @property
    def step_size(self) -> Float[Tensor, "..."]:
        """Step size of the forward-backward method with the best guaranteed rate."""
        m, L = self.monotonicity, self.lipschitz
        return 2 / (m + L) if self.symmetric else m / L.square()


def attention_certificate(
    keys: Float[Tensor, "*b n d"],
    values: Float[Tensor, "*b n d"] | None = None,
    *,
    beta: float = 1.0,
    tau: float = 1.0,
) -> Certificate:
    """Certificate of F(x) = u + tau sum_n p_n v_n, p = softmax(beta <x, k_n>), for any u; one for each batch.

    For logits beta <x, B k_n> and values W k_n pass keys @ B.mT and keys @ W.mT. Masked keys may be included: the bound
    holds for every subset.

    Args:
        values: by default the keys, with which attention is a gradient.
        beta: inverse temperature; may be negative.
        tau: factor of attention; with tau beta < 0 the step is a descent.

    Law: tests/laws/test_monotone_equilibria_are_unique.py.

    >>> import torch
    >>> certificate = attention_certificate(torch.tensor([[1.0], [-1.0]]), beta=0.9)
    >>> bool(certificate.unique), round(float(certificate.monotonicity), 4)
    (True, 0.1)
    """
    check_floats("attention_certificate", keys=keys, **({} if values is None else {"values": values}))
    if keys.ndim < 2 or (values is not None and values.shape != keys.shape):
        fact = f"shapes {shape_of(keys)}" + ("" if values is None else f" and {shape_of(values)}")
        condition = "keys and values must be [*b, n, d] of one shape"
        remedy = "Pass values in the space of the queries, that is after the output map."
        raise InputValueError("attention_certificate", "keys", f"{condition}, got {fact}", remedy)
    across = diameter(keys)
    spread = across.square() if values is None else across * diameter(values)
    bound = abs(tau * beta) * spread / 4
    one = torch.ones_like(bound)
    if values is not None:
        return Certificate(1 - bound, 1 + bound)
    if tau * beta <= 0:
        return Certificate(one, 1 + bound, symmetric=True)
    return Certificate(1 - bound, (bound - 1).clamp(min=1.0), symmetric=True)  # eigenvalues from 1 - bound to 1


def bound_of_heads(
    k: Float[Tensor, "b h n e"],
    v: Float[Tensor, "b h n e"],
    W_q: Float[Tensor, "he d"],
    W_o: Float[Tensor, "d he"],
    *,
    prefixes: bool = False,
) -> Float[Tensor, "b ..."]:
    """Bound on the Jacobian of multi-head attention in x, sum_h diam(W_qh^T k_h) diam(W_oh v_h) / 4 sqrt(e), [b].

    Keys and values of each head are compared in the space of tokens. With `prefixes` the bounds are those of attention
    to the first 1 ... n keys, [b, n], as under a causal mask.
    """
    h, e = k.shape[1], k.shape[-1]
    into = W_q.to(k.dtype).reshape(h, e, -1)
    out = W_o.to(v.dtype).reshape(-1, h, e).permute(1, 2, 0)
    across = prefix_diameters if prefixes else diameter
    return (across(k @ into) * across(v @ out)).sum(1) / (4 * math.sqrt(e))


def diameter(points: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b"]:
    """Largest distance between two points, [*b]; differentiable, by blocks in memory linear in the points."""
    n = points.shape[-2]
    if n == 0:
        return points.new_zeros(points.shape[:-2])
    with torch.no_grad():
        flat = points.detach().reshape(-1, n, points.shape[-1])
        rows = max(1, PAIRS // max(1, n * len(flat)))
        largest = [
            torch.cdist(flat[:, first : first + rows], flat, compute_mode=EXACT).amax(-1) for first in range(0, n, rows)
        ]
        farthest = torch.cat(largest, -1).argmax(-1)
        start = flat[torch.arange(len(flat), device=flat.device), farthest]
        end = (flat - start.unsqueeze(-2)).norm(dim=-1).argmax(-1)
    lead = points.shape[:-2]
    a, b = (
        points.gather(-2, index.reshape(*lead, 1, 1).expand(*lead, 1, points.shape[-1])) for index in (farthest, end)
    )
    return torch.linalg.vector_norm(a - b, dim=-1).squeeze(-1)


def prefix_diameters(points: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"]:
    """Diameters of the first 1 ... n points, [*b, n]: the largest distance so far of a point to an earlier one."""
    n = points.shape[-2]
    if n == 0:
        return points.new_zeros(points.shape[:-1])
    with torch.no_grad():
        flat = points.detach().reshape(-1, n, points.shape[-1])
        rows = max(1, PAIRS // max(1, n * len(flat)))
        earlier = [
            torch.cdist(flat[:, first : first + rows], flat[:, : first + rows], compute_mode=EXACT)
            .tril(first)
            .argmax(-1)
            for first in range(0, n, rows)
        ]
        farthest = torch.cat(earlier, -1).reshape(*points.shape[:-1], 1)
    apart = points - points.gather(-2, farthest.expand_as(points))
    return torch.linalg.vector_norm(apart, dim=-1).cummax(-1).values


def monotone_equilibrium(
    step: Map,
    start: Float[Tensor, "*b d"],
    certificate: Certificate,
    *,
    prox: str | Prox = "none",
    method: Literal["forward_backward", "peaceman_rachford"] = "forward_backward",
    max_iterations: int = 1000,
    tolerance: float | None = None,
    throw: bool = True,
) -> Equilibrium:
    """The one fixed point of x = prox(F(x)), by a splitting method that converges from every start.

    Gradients are those of `equilibrium`: one linear solve, whatever the number of steps.

    Args:
        step: the map F of [*b, d], applied to each token separately.
        start: initial tokens.
        certificate: bounds on I - F, such as those of `attention_certificate`; its batch is that of `start`, from the
            left. The monotonicity must be positive.
        prox: "none"; "relu" (phi: 0 on positive numbers, else infinite), "box" (the same for [-1, 1]), "ball" (for
            tokens of length up to sqrt(d)), "tanh"; or a function prox(point, c) of a point and a step size.
        method: "forward_backward" takes steps, of which the last few are combined; "peaceman_rachford" solves an
            equation by Newton's method in each iteration, and may need fewer of them.
        max_iterations: largest number of iterations.
        tolerance: bound on |prox(F(x)) - x| relative to 1 + |x|; default: eps^(2/3) of the dtype.
        throw: raise an error if a token does not converge; otherwise see `converged`.

    Law: tests/laws/test_monotone_equilibria_are_unique.py.

    >>> import torch
    >>> keys, u = torch.randn(8, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    >>> descent = lambda x: u - 3.0 * (x @ keys.mT).softmax(-1) @ keys
    >>> certificate = attention_certificate(keys, tau=-3.0)
    >>> x = monotone_equilibrium(descent, torch.zeros_like(u), certificate).state
    >>> torch.allclose(descent(x), x)
    True
    """
    check_floats("monotone_equilibrium", start=start)
    if not bool(certificate.unique.all()):
        worst = float(certificate.monotonicity.min())
        problem = f"certificate must have a positive monotonicity, but its smallest is {worst:.3g}"
        remedy = "Reduce tau or beta, or use equilibrium, which needs no certificate and may find one of several."
        raise InputValueError("monotone_equilibrium", "certificate", problem, remedy)
    if method not in ("forward_backward", "peaceman_rachford"):
        condition = 'method must be "forward_backward" or "peaceman_rachford"'
        remedy = "Use forward_backward unless its steps are very small."
        raise InputValueError("monotone_equilibrium", "method", f"{condition}, got {method!r}", remedy)
    near = _prox(prox)
    m, L = (_per_token(t, start) for t in (certificate.monotonicity, certificate.lipschitz))
    ones = torch.ones_like(m)
    solver: Solver
    if method == "forward_backward":
        solver = _ForwardBackward(step, near, _per_token(certificate.step_size, start), start.detach())
    else:
        tight = 0.01 * (torch.finfo(start.dtype).eps ** (2 / 3) if tolerance is None else tolerance)
        solver = _PeacemanRachford(step, near, (m * L).rsqrt(), start.detach(), tight)
    return solved(
        lambda x: near(step(x), ones), start.detach(), solver,
        max_iterations=max_iterations, tolerance=tolerance, throw=throw,
    )  # fmt: skip


class _ForwardBackward(Solver):
    """A step against A, then the prox; the last few such steps are combined (Anderson).

    The step alone is a contraction. After a combination that raised its residual, steps alone follow, twice as many
    after each failure, so that every start converges.
    """

    def __init__(self, step: Map, prox: Prox, size: Tensor, start: Tensor) -> None:
        self.step, self.prox, self.size = step, prox, size
        self.combination = Anderson(start, MEMORY)
        self.before = torch.full(start.shape[:-1], torch.inf, dtype=start.dtype, device=start.device)
        self.waits = torch.zeros(start.shape[:-1], dtype=torch.long, device=start.device)
        self.failures = torch.zeros_like(self.waits)

    def moved(self, x: Tensor, image: Tensor, converged: Tensor) -> Tensor:
        stepped = self.prox(x - self.size * (x - self.step(x)), self.size)
        residual = (stepped - x).norm(dim=-1)
        failed = (residual > self.before) & (self.waits == 0)
        self.failures = self.failures + failed.long()
        self.waits = torch.where(failed, 2 ** self.failures.clamp(max=20), (self.waits - 1).clamp(min=0))
        self.before = residual
        combined = self.combination.moved(x, stepped, converged)
        return torch.where((self.waits > 0).unsqueeze(-1), stepped, combined)


class _PeacemanRachford(Solver):
    """Reflections at the resolvents of A and of the prox in turn."""

    def __init__(self, step: Map, prox: Prox, size: Tensor, start: Tensor, tolerance: float) -> None:
        self.step, self.prox, self.size, self.z, self.tolerance = step, prox, size, start, tolerance

    def moved(self, x: Tensor, image: Tensor, converged: Tensor) -> Tensor:
        c, y = self.size, 2 * x - self.z
        resolvent = equilibrium(
            lambda w: (y + c * self.step(w)) / (1 + c), x, method="newton", tolerance=self.tolerance, throw=False
        )
        self.z = 2 * resolvent.state - y
        return self.prox(self.z, c)


def _per_token(bound: Tensor, start: Tensor) -> Tensor:
    """A bound [*b] as a tensor that broadcasts against the tokens [*b, ..., d]."""
    bound = bound.detach().to(start)
    return bound.reshape(*bound.shape, *(1,) * (start.ndim - bound.ndim))


# Proximal maps -------------------------------------------------------------------------------------------------------


def _ball(x: Tensor, _: Tensor) -> Tensor:
    radius = math.sqrt(x.shape[-1])
    return x * (radius / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=radius))


def _tanh(y: Tensor, c: Tensor) -> Tensor:
    """tanh(t) with (1 - c) tanh(t) + c t = y: the prox of phi' = atanh(x) - x; tanh(y) for c = 1.

    Newton's method from t = y converges without overshooting, since the left side is concave for c < 1 and convex for
    c > 1 on the side of y.
    """
    if bool((c == 1).all()):
        return torch.tanh(y)
    t = y
    for _ in range(NEWTON_STEPS):
        image = torch.tanh(t)
        t = t - ((1 - c) * image + c * t - y) / (c + (1 - c) * (1 - image.square()))
    return torch.tanh(t)


PROXES: dict[str, Prox] = {
    "none": lambda x, _: x,
    "relu": lambda x, _: torch.relu(x),
    "box": lambda x, _: x.clamp(-1.0, 1.0),
    "ball": _ball,
    "tanh": _tanh,
}


def _prox(prox: str | Prox) -> Prox:
    if callable(prox):
        return prox
    if prox not in PROXES:
        condition, remedy = f"prox must be one of {', '.join(PROXES)}", "Or pass a function of a point and a step size."
        raise InputValueError("monotone_equilibrium", "prox", f"{condition}, got {prox!r}", remedy)
    return PROXES[prox]
