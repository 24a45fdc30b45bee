"""Where a map of tokens comes to rest, and how that place depends on everything.

    x* = f(x*)                                           e.g. f = N(x + tau att_K(x)) with frozen keys      [theory 5.8]
    dx*/dtheta = (I - J)^-1 df/dtheta,  J = df/dx        solved with products J^T v alone: no matrix, no unrolled graph
    x  = (lambda I - Sigma)^-1 mu,  |x| = r,  lambda > lambda_max              on the sphere, Gaussian keys [theory 4.4]

Anderson's method mixes the last few steps so that the residual is least; each token by itself, so that none depends on
its neighbours, and each stops by itself.

Read next: evolution.py (the way there), hopfield.py (the same without a contraction).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from .._errors import check_floats, sentence, shape_of
from .._typing import Bool, Float, Int, Tensor

MEMORY = 6  # steps that Anderson's method mixes
NEAR = 0.05  # how far a step may move a token, relative to its size, for steps to be mixed


class Equilibrium(NamedTuple):
    """Where the tokens rest, how far f still moves each, whether that is little enough, and after how many steps."""

    state: Float[Tensor, "*b d"]
    residual: Float[Tensor, "*b"]
    converged: Bool[Tensor, "*b"]
    steps: Int[Tensor, "*b"]

    def distinct(self, *, tolerance: float = 1e-4) -> Float[Tensor, "k d"]:
        """The different places among those that were reached, up to this part of their largest length."""
        found: list[Tensor] = []
        states = self.state.detach().reshape(-1, self.state.shape[-1])[self.converged.reshape(-1)]
        size = tolerance * float(states.norm(dim=-1).max()) if len(states) else 0.0
        while len(states):
            found.append(states[0])
            states = states[(states - states[0]).norm(dim=-1) > size]
        return torch.stack(found) if found else states


def equilibrium(
    step: Callable[[Tensor], Tensor],
    start: Float[Tensor, "*b d"],
    *,
    method: Literal["anderson", "iterate"] = "anderson",
    steps: int = 200,
    tolerance: float | None = None,
    throw: bool = True,
) -> Equilibrium:
    """The fixed point of a map that acts on every token by itself, from a start; differentiable by the implicit rule.

    Gradients with respect to whatever `step` is made of cost one more solve, of the size of a token, and no memory for
    the steps that were made. `start` has no gradient: the place of rest does not depend on it.

    Args:
        step: f, a function of [*b, d] that treats tokens alike and apart.
        method: "anderson" mixes steps and is quicker; it may also stop at a place that does not attract, a saddle that
            "iterate" would leave in time. `spectral_radius` tells which.
        tolerance: of |f(x) - x| relative to 1 + |x|; eps^(2/3) of the dtype by default.
        throw: raise if a token has not come to rest; otherwise `converged` says so.

    Law: tests/laws/test_equilibria_are_where_tokens_rest.py.

    >>> import torch
    >>> a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    >>> x = equilibrium(lambda x: torch.cos(a * x), torch.zeros(1, 1, dtype=torch.float64)).state
    >>> bool((x - torch.cos(a * x)).abs() < 1e-9)
    True
    """
    check_floats("equilibrium", start=start)
    if method not in ("anderson", "iterate"):
        remedy = "Anderson's method needs fewer steps."
        raise ValueError(sentence("equilibrium", 'method must be "anderson" or "iterate"', f"{method!r}", remedy))
    enough = torch.finfo(start.dtype).eps ** (2 / 3) if tolerance is None else tolerance
    memory = MEMORY if method == "anderson" else 1
    with torch.no_grad():
        x, residual, resting, taken = _solved(step, start.detach(), memory, steps, enough)
    if throw and not bool(resting.all()):
        fact = f"{int((~resting).sum())} of {resting.numel()} tokens that still move after {steps} steps"
        remedy = "Allow more steps, a larger tolerance, or pass throw=False and look at converged."
        raise RuntimeError(sentence("equilibrium", "every token must come to rest", fact, remedy))
    if torch.is_grad_enabled():
        x = _Implicit.attach(step, x, memory, steps, enough)
    return Equilibrium(x, residual, resting, taken)


class _Implicit:
    """Gives a fixed point its gradient."""

    @staticmethod
    def attach(step: Callable[[Tensor], Tensor], x: Tensor, memory: int, steps: int, enough: float) -> Tensor:
        """f(x*), whose gradient is that of x* once it has passed (I - J^T)^-1."""
        at = x.detach().requires_grad_()
        with torch.enable_grad():
            image = step(at)
            whole = step(x.detach())
        if not whole.requires_grad:
            return x

        def through(gradient: Tensor) -> Tensor:
            def pull(w: Tensor) -> Tensor:
                (found,) = torch.autograd.grad(image, at, w, retain_graph=True)
                return gradient + found

            with torch.no_grad():
                return _solved(_graded(pull), gradient, memory, steps, enough)[0]

        whole.register_hook(through)
        return whole


def _graded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return function(x).detach()

    return run


def _solved(
    step: Callable[[Tensor], Tensor], x: Tensor, memory: int, steps: int, enough: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anderson's method for every token, plain steps where it is far from rest."""
    if step(x).shape != x.shape:
        remedy = "Return one token for each token."
        condition, fact = f"step must keep the shape {shape_of(x)}", f"shape {shape_of(step(x))}"
        raise ValueError(sentence("equilibrium", condition, fact, remedy))
    resting = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
    taken = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    residual = torch.full(x.shape[:-1], torch.inf, dtype=x.dtype, device=x.device)
    images = torch.zeros(*x.shape[:-1], memory, x.shape[-1], dtype=x.dtype, device=x.device)
    residuals, used = torch.zeros_like(images), torch.zeros(images.shape[:-1], dtype=torch.bool, device=x.device)
    before = residual
    for _ in range(steps):
        image = step(x)
        r = image - x
        size, scale = r.norm(dim=-1), 1 + x.norm(dim=-1)
        residual = torch.where(resting, residual, size)
        taken = taken + (~resting).long()
        resting = resting | (size <= enough * scale)
        if bool(resting.all()):
            break
        # Mixed only near the end and while it helps: far away it may lead to places that do not attract.
        helps = (size <= NEAR * scale) & (size < before)
        before = size
        used = torch.cat((used[..., 1:] & helps.unsqueeze(-1), torch.ones_like(used[..., :1])), -1)
        images = torch.cat((images[..., 1:, :], image.unsqueeze(-2)), -2)
        residuals = torch.cat((residuals[..., 1:, :], r.unsqueeze(-2)), -2)
        x = torch.where(resting.unsqueeze(-1), x, _mixed(images, residuals, used))
    return x, residual, resting, taken


def _mixed(images: Tensor, residuals: Tensor, used: Tensor) -> Tensor:
    """The mixture of the images in use whose residual is least; the last image where that is no number."""
    R = residuals * used.unsqueeze(-1)
    gram = R @ R.mT
    # Regularised by its own size: the last residuals are nearly parallel close to the end. What is unused gets none.
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    own = torch.where(used, 1e-12 * trace + torch.finfo(R.dtype).tiny, 1.0)
    weights = torch.linalg.solve(gram + torch.diag_embed(own), used.to(R.dtype).unsqueeze(-1))
    weights = weights / weights.sum(-2, keepdim=True)
    mixed = (weights * images).sum(-2)
    return torch.where(torch.isfinite(mixed).all(-1, keepdim=True), mixed, images[..., -1, :])


def spectral_radius(
    step: Callable[[Tensor], Tensor], state: Float[Tensor, "*b d"], *, steps: int = 100
) -> Float[Tensor, "*b"]:
    """The growth of a small displacement of each token under repeated steps, by products with the Jacobian alone.

    Below 1 the place of rest attracts. The power method: exact in the limit if one eigenvalue is largest in size.
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state)
    v = v / v.norm(dim=-1, keepdim=True)
    logs = []
    for _ in range(steps):
        v = torch.func.jvp(step, (state,), (v,))[1]
        size = v.norm(dim=-1, keepdim=True)
        logs.append(size.squeeze(-1).log())
        v = v / size.clamp(min=torch.finfo(v.dtype).tiny)
    late = torch.stack(logs[steps // 2 :])
    return late.mean(0).exp()


def secular_equilibrium(
    loc: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"], *, radius: float = 1.0
) -> Float[Tensor, "*b d"]:
    """Where attention to N(loc, covariance) and a projection to the sphere come to rest.

        x = (lambda I - Sigma)^-1 mu,  |x| = r,  lambda > lambda_max(Sigma)                                [theory 4.4]

    This is the highest point of <mu, x> + <x, Sigma x> / 2 on the sphere, by bisection of the secular equation.
    On a large sphere there may be one more place that attracts, a local maximum towards the other end of the axis.
    """
    check_floats("secular_equilibrium", loc=loc, covariance=covariance)
    c, V = torch.linalg.eigh(covariance)
    m = (V.mT @ loc.unsqueeze(-1)).squeeze(-1)
    if not radius > 0 or bool((m.abs().amax(-1) == 0).any()):
        condition, remedy = (
            "radius must be positive and loc not 0",
            "Around 0 both ends of the longest axis are such places.",
        )
        raise ValueError(sentence("secular_equilibrium", condition, f"{radius} and a loc", remedy))
    top = c[..., -1]
    low, high = top, top + m.norm(dim=-1) / radius  # |x| is infinite at the one and at most r at the other
    for _ in range(200):
        middle = (low + high) / 2
        long = (m / (middle.unsqueeze(-1) - c)).norm(dim=-1) > radius
        low, high = torch.where(long, middle, low), torch.where(long, high, middle)
    return (V @ (m / (high.unsqueeze(-1) - c)).unsqueeze(-1)).squeeze(-1)
