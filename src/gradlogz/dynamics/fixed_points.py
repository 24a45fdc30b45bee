"""Where a map of tokens comes to rest, and how that place depends on everything.

    x* = f(x*)                                           e.g. f = N(x + tau att_K(x)) with frozen keys      [theory 5.8]
    dx*/dtheta = (I - J)^-1 df/dtheta,  J = df/dx        solved with products J^T v alone: no matrix, no unrolled graph
    x' = x + t (I - J)^-1 (f(x) - x)                     Newton's method, with products J v alone; t = 1, 1/2, 1/4 ...
    x  = (lambda I - Sigma)^-1 mu,  |x| = r,  lambda > lambda_max              on the sphere, Gaussian keys [theory 4.4]

Anderson's method mixes the last few steps so that the residual is least. Newton's squares the residual with each step
near the end, and finds places that repel as well as those that attract. Each token goes by itself, so that none depends
on its neighbours, and each stops by itself.

Read next: equilibrium_attention.py (the layer), evolution.py (the way there), hopfield.py (without a contraction).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple, TypedDict

import torch

from .._errors import InputRuntimeError, InputValueError, check_floats, shape_of
from .._typing import Bool, Float, Int, Tensor

Map = Callable[[Tensor], Tensor]

MEMORY = 6  # steps that Anderson's method mixes
NEAR = 0.05  # how far a step may move a token, relative to its size, for steps to be mixed
KRYLOV = 16  # products with a Jacobian that a linear solve combines before it starts again
CYCLES = 4  # how often the solve of one of Newton's steps starts again
HALVINGS = 4  # of one of Newton's steps, before plain steps take its place


class EquilibriumOptions(TypedDict, total=False):
    """Arguments that a caller of `equilibrium` passes on to it."""

    method: Literal["anderson", "newton", "iterate"]
    max_iterations: int
    tolerance: float | None
    throw: bool


class Equilibrium(NamedTuple):
    """Where the tokens rest, how far f still moves each, whether that is little enough, and after how many steps."""

    state: Float[Tensor, "*b d"]
    residual: Float[Tensor, "*b"]
    converged: Bool[Tensor, "*b"]
    steps: Int[Tensor, "*b"]

    def distinct(self, *, tolerance: float = 1e-4) -> Float[Tensor, "k ..."]:
        """The different places among those that were reached, up to this part of their largest length."""
        found: list[Tensor] = []
        unit = self.state.shape[self.residual.ndim :]
        states = self.state.detach().reshape(-1, unit.numel())[self.converged.reshape(-1)]
        size = tolerance * float(states.norm(dim=-1).max()) if len(states) else 0.0
        while len(states):
            found.append(states[0])
            states = states[(states - states[0]).norm(dim=-1) > size]
        return (torch.stack(found) if found else states).reshape(-1, *unit)


def equilibrium(
    step: Map,
    start: Float[Tensor, "*b d"],
    *,
    method: Literal["anderson", "newton", "iterate"] = "anderson",
    tokens_interact: bool = False,
    max_iterations: int = 200,
    tolerance: float | None = None,
    throw: bool = True,
) -> Equilibrium:
    """The fixed point of a map that acts on every token by itself, from a start; differentiable by the implicit rule.

    Gradients with respect to whatever `step` is made of cost one linear solve, of the size of a token, and no memory
    for the steps that were made. They are of first order. `start` has none: the place does not depend on it.

    Args:
        step: f, a function of [*b, d] that treats tokens alike and apart.
        method: "anderson" mixes steps. "newton" solves for them, with products of the Jacobian and a vector: few steps,
            each of the price of several, and the choice where "anderson" is slow. Both may stop at a place that does
            not attract, a saddle that "iterate", plain steps, would leave in time. `spectral_radius` tells which.
        tokens_interact: a state is [n, d], tokens that depend on each other; [*b, n, d] are states that do not.
        tolerance: of |f(x) - x| relative to 1 + |x|; eps^(2/3) of the dtype by default.
        throw: raise if a token has not come to rest, or has no gradient; otherwise `converged` says so.

    Law: tests/laws/test_equilibria_are_where_tokens_rest.py.

    >>> import torch
    >>> a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    >>> x = equilibrium(lambda x: torch.cos(a * x), torch.zeros(1, 1, dtype=torch.float64)).state
    >>> bool((x - torch.cos(a * x)).abs() < 1e-9)
    True
    """
    check_floats("equilibrium", start=start)
    if method not in ("anderson", "newton", "iterate"):
        condition, remedy = 'method must be "anderson", "newton" or "iterate"', "Anderson's method suits most maps."
        raise InputValueError("equilibrium", "method", f"{condition}, got {method!r}", remedy)
    if start.ndim < 1 + tokens_interact:
        remedy = "Add the missing dimension with unsqueeze."
        condition = f"start must be [*b, {'n, d' if tokens_interact else 'd'}]"
        raise InputValueError("equilibrium", "start", f"{condition}, got shape {shape_of(start)}", remedy)
    enough = torch.finfo(start.dtype).eps ** (2 / 3) if tolerance is None else tolerance
    f, x, restore = _flat(step, start.detach(), tokens_interact)
    with torch.no_grad():
        _check_step(f, x)
        solver = _Newton(f, x) if method == "newton" else _Anderson(x, MEMORY if method == "anderson" else 1)
        x, residual, resting, taken = _solved(f, x, solver, max_iterations, enough)
    if throw and not bool(resting.all()):
        fact = f"{int((~resting).sum())} of {resting.numel()} tokens that still move after {max_iterations} steps"
        remedy = "Raise max_iterations or the tolerance, or pass throw=False and look at converged."
        raise InputRuntimeError("equilibrium", None, f"every token must come to rest, got {fact}", remedy)
    if torch.is_grad_enabled():
        x = _attached(f, x, max_iterations, enough, throw)
    return Equilibrium(restore(x), residual, resting, taken)


def spectral_radius(
    step: Map, state: Float[Tensor, "*b d"], *, tokens_interact: bool = False, steps: int = 100
) -> Float[Tensor, "..."]:
    """The growth of a small displacement of each token under repeated steps, by products with the Jacobian alone.

    Below 1 the place of rest attracts. The power method: exact in the limit if one eigenvalue is largest in size.
    """
    f, x, _ = _flat(step, state, tokens_interact)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    v = v / v.norm(dim=-1, keepdim=True)
    logs = []
    for _ in range(steps):
        v = torch.func.jvp(f, (x,), (v,))[1]
        size = v.norm(dim=-1, keepdim=True)
        logs.append(size.squeeze(-1).log())
        v = v / size.clamp(min=torch.finfo(v.dtype).tiny)
    late = torch.stack(logs[steps // 2 :])
    return late.mean(0).exp()


def jacobian_penalty(
    step: Map,
    state: Float[Tensor, "*b d"],
    *,
    tokens_interact: bool = False,
    probes: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "..."]:
    """An unbiased estimate of tr(J^T J) / d of each token, to be added to a loss: small Jacobians come to rest quickly.

        E |J^T v|² = tr(J J^T)  for random signs v                                                              [bai21]

    Differentiable with respect to whatever `step` is made of, at this state. With many probes it is the mean square of
    the singular values. Law: tests/laws/test_equilibria_are_where_tokens_rest.py.
    """
    f, x, _ = _flat(step, state.detach(), tokens_interact)
    wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        image = f(at := x.requires_grad_())
        found = []
        for _ in range(probes):
            v = 2.0 * torch.randint(2, x.shape, generator=generator, device=x.device).to(x.dtype) - 1
            options = {"create_graph": wanted, "retain_graph": True, "allow_unused": True, "materialize_grads": True}
            (pulled,) = torch.autograd.grad(image, at, v, **options)
            found.append(pulled.square().mean(-1))
        return torch.stack(found).mean(0)


# The way there -------------------------------------------------------------------------------------------------------


def _flat(step: Map, x: Tensor, tokens_interact: bool) -> tuple[Map, Tensor, Map]:
    """The same with states as rows, and the way back."""
    if not tokens_interact:
        return step, x, lambda y: y
    unit = x.shape[-2:]

    def rows(y: Tensor) -> Tensor:
        image = step(y.unflatten(-1, unit))
        return image.flatten(-2) if image.ndim > 1 else image

    return rows, x.flatten(-2), lambda y: y.unflatten(-1, unit)


def _check_step(step: Map, x: Tensor) -> None:
    image = step(x)
    if image.shape != x.shape:
        remedy = "Return one token for each token."
        condition, fact = f"step must keep the shape {shape_of(x)}", f"shape {shape_of(image)}"
        raise InputValueError("equilibrium", "step", f"{condition}, got {fact}", remedy)


class _Solver(ABC):
    """Where to go from x, knowing f(x)."""

    @abstractmethod
    def moved(self, x: Tensor, image: Tensor, resting: Tensor) -> Tensor:
        """The next state of every token; that of a resting one is not looked at."""


def _solved(
    step: Map, x: Tensor, solver: _Solver, max_iterations: int, enough: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every token until it rests: the state, the residual, whether it rests, and the steps."""
    resting = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
    taken = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    residual = torch.full(x.shape[:-1], torch.inf, dtype=x.dtype, device=x.device)
    for _ in range(max_iterations):
        image = step(x)
        size = (image - x).norm(dim=-1)
        residual = torch.where(resting, residual, size)
        taken = taken + (~resting).long()
        resting = resting | (size <= enough * (1 + x.norm(dim=-1)))
        if bool(resting.all()):
            break
        x = torch.where(resting.unsqueeze(-1), x, solver.moved(x, image, resting))
    return x, residual, resting, taken


class _Anderson(_Solver):
    """The mixture of the last steps whose residual is least; plain steps where it is far from rest, or memory is 1."""

    def __init__(self, x: Tensor, memory: int) -> None:
        self.images = torch.zeros(*x.shape[:-1], memory, x.shape[-1], dtype=x.dtype, device=x.device)
        self.residuals = torch.zeros_like(self.images)
        self.used = torch.zeros(self.images.shape[:-1], dtype=torch.bool, device=x.device)
        self.before = torch.full(x.shape[:-1], torch.inf, dtype=x.dtype, device=x.device)

    def moved(self, x: Tensor, image: Tensor, resting: Tensor) -> Tensor:
        r = image - x
        size, scale = r.norm(dim=-1), 1 + x.norm(dim=-1)
        # Mixed only near the end and while it helps: far away it may lead to places that do not attract.
        helps = (size <= NEAR * scale) & (size < self.before)
        self.before = size
        self.used = torch.cat((self.used[..., 1:] & helps.unsqueeze(-1), torch.ones_like(self.used[..., :1])), -1)
        self.images = torch.cat((self.images[..., 1:, :], image.unsqueeze(-2)), -2)
        self.residuals = torch.cat((self.residuals[..., 1:, :], r.unsqueeze(-2)), -2)
        return _mixed(self.images, self.residuals, self.used)


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


class _Newton(_Solver):
    """A step that would end at rest if f were affine, halved until the residual falls by half of what it should.

    Where it does not, f itself makes the next steps, twice as many after each failure: a token that plain steps bring
    to rest does come to rest.
    """

    def __init__(self, step: Map, x: Tensor) -> None:
        self.step = step
        self.products = min(KRYLOV * CYCLES, x.shape[-1])
        self.waits = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        self.failures = torch.zeros_like(self.waits)

    def moved(self, x: Tensor, image: Tensor, resting: Tensor) -> Tensor:
        out = resting | (self.waits > 0)
        self.waits = (self.waits - 1).clamp(min=0)
        if bool(out.all()):
            return image
        r = (image - x).masked_fill(out.unsqueeze(-1), 0.0)
        size = r.norm(dim=-1)
        # As exact as the residual is small: enough for it to be squared, and no product is spent before that pays.
        goal = (size / (1 + x.norm(dim=-1))).clamp(max=0.1) * size
        way, _ = _krylov(lambda v: v - torch.func.jvp(self.step, (x,), (v,))[1], r, goal, self.products)
        length, trial = torch.ones_like(size), x + way
        for _ in range(HALVINGS):
            falls = (self.step(trial) - trial).norm(dim=-1) <= (1 - length / 2) * size
            if bool((falls | out).all()):
                break
            length = torch.where(falls, length, length / 2)
            trial = x + length.unsqueeze(-1) * way
        falls = falls & ~out
        self.failures = self.failures + (~falls & ~out).long()
        self.waits = torch.where(falls | out, self.waits, 4 * 2 ** self.failures.clamp(max=20))
        return torch.where(falls.unsqueeze(-1), trial, image)


def _krylov(product: Map, wanted: Tensor, goal: Tensor, products: int) -> tuple[Tensor, Tensor]:
    """The solution x of product(x) = wanted for every row, and what is left: the residual is least at every product.

    Simpler GMRES: the images of the directions are made orthonormal, so that the residual needs no solve. The next
    direction is the residual while it falls, else the last image, which leads out where the residual is stuck.
    """
    x, r, size = torch.zeros_like(wanted), wanted, wanted.norm(dim=-1)
    deep = min(KRYLOV, products)
    directions = wanted.new_zeros(*wanted.shape[:-1], deep, wanted.shape[-1])
    for cycle in range(-(-products // deep)):
        if cycle:
            r = wanted - product(x)
            size = r.norm(dim=-1)
        if not bool((size > goal).any()):
            break
        directions.zero_()
        images, R = (
            torch.zeros_like(directions),
            torch.eye(deep, dtype=x.dtype, device=x.device).repeat(*size.shape, 1, 1),
        )
        along = wanted.new_zeros(*size.shape, deep)
        p = _unit(r, size, size > goal)
        for j in range(deep):
            w = product(p)
            whole = w.norm(dim=-1)
            for _ in range(2):  # twice, for the sake of rounding
                c = images @ w.unsqueeze(-1)
                w = w - (images.mT @ c).squeeze(-1)
                R[..., j] += c.squeeze(-1)
            length = w.norm(dim=-1)
            new = length > 10 * torch.finfo(w.dtype).eps * whole  # else nothing is left to be found in this direction
            w = _unit(w, length, new)
            R[..., j, j] = torch.where(new, length, 1.0)
            directions[..., j, :], images[..., j, :] = p, w
            along[..., j] = (r * w).sum(-1)
            r = r - along[..., j, None] * w
            before, size = size, r.norm(dim=-1)
            live = size > goal
            if not bool(live.any()):
                break
            p = torch.where((size <= 0.9 * before).unsqueeze(-1), _unit(r, size, live), w * live.unsqueeze(-1))
        y = torch.linalg.solve_triangular(R, along.unsqueeze(-1), upper=True)
        x = x + (directions.mT @ y).squeeze(-1)
    return x, size


def _unit(vector: Tensor, length: Tensor, which: Tensor) -> Tensor:
    return torch.where(which.unsqueeze(-1), vector / torch.where(which, length, 1.0).unsqueeze(-1), 0.0)


# The gradient --------------------------------------------------------------------------------------------------------


def _attached(step: Map, x: Tensor, max_iterations: int, enough: float, throw: bool) -> Tensor:
    """f(x*), whose gradient is that of x* once it has passed (I - J^T)^-1."""
    at = x.detach().requires_grad_()
    with torch.enable_grad():
        image, whole = step(at), step(x.detach())
    if not whole.requires_grad:
        return x

    def product(v: Tensor) -> Tensor:
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return v - torch.autograd.grad(image, at, v, **options)[0]

    def through(gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # f was differentiated at a constant x*, which is wrong from the second order on
            condition, fact = "its gradient must not be differentiated again", "create_graph=True"
            raise InputRuntimeError(
                "equilibrium", None, f"{condition}, got {fact}", "Unroll the steps for second derivatives."
            )
        goal = enough * gradient.norm(dim=-1)
        found, left = _krylov(product, gradient, goal, max(max_iterations, 1))
        if throw and bool((left > goal).any()):
            fact = f"{int((left > goal).sum())} of {left.numel()} tokens without"
            remedy = "The Jacobian has an eigenvalue near 1 there: change the map, or pass throw=False."
            raise InputRuntimeError("equilibrium", None, f"every token must have a gradient, got {fact}", remedy)
        return found

    whole.register_hook(through)
    return whole


def secular_equilibrium(
    mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"], *, radius: float = 1.0
) -> Float[Tensor, "*b d"]:
    """Where attention to N(mean, covariance) and a projection to the sphere come to rest.

        x = (lambda I - Sigma)^-1 mu,  |x| = r,  lambda > lambda_max(Sigma)                                [theory 4.4]

    This is the highest point of <mu, x> + <x, Sigma x> / 2 on the sphere, by bisection of the secular equation.
    On a large sphere there may be one more place that attracts, a local maximum towards the other end of the axis.
    """
    check_floats("secular_equilibrium", mean=mean, covariance=covariance)
    c, V = torch.linalg.eigh(covariance)
    m = (V.mT @ mean.unsqueeze(-1)).squeeze(-1)
    if not radius > 0 or bool((m.abs().amax(-1) == 0).any()):
        condition, remedy = (
            "radius must be positive and mean not 0",
            "Around 0 both ends of the longest axis are such places.",
        )
        fact = f"{radius} and a mean of length {float(m.norm(dim=-1).min()):.3g}"
        raise InputValueError("secular_equilibrium", "radius", f"{condition}, got {fact}", remedy)
    top = c[..., -1]
    low, high = top, top + m.norm(dim=-1) / radius  # |x| is infinite at the one and at most r at the other
    for _ in range(200):
        middle = (low + high) / 2
        long = (m / (middle.unsqueeze(-1) - c)).norm(dim=-1) > radius
        low, high = torch.where(long, middle, low), torch.where(long, high, middle)
    return (V @ (m / (high.unsqueeze(-1) - c)).unsqueeze(-1)).squeeze(-1)
