"""Fixed points of maps of tokens, with gradients by the implicit function theorem.

    x* = f(x*)                                           e.g. f = N(x + tau att_K(x)) with fixed keys      [theory 5.8]
    dx*/dtheta = (I - J)^-1 df/dtheta,  J = df/dx        one linear solve with products J^T v, no unrolled graph
    x' = x + t (I - J)^-1 (f(x) - x)                     Newton's method with products J v; t = 1, 1/2, 1/4, ...
    x  = (lambda I - Sigma)^-1 mu,  |x| = r,  lambda > lambda_max              on the sphere, Gaussian keys [theory 4.4]

Anderson's method combines the last few steps so that the residual is smallest. Newton's method converges quadratically
near the solution and also finds unstable fixed points. Tokens are solved independently of each other, and each stops
when it has converged.

Read next: monotone.py (maps with one fixed point), equilibrium_attention.py (the layer), evolution.py (plain
iteration), hopfield.py (without a contraction).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple, TypedDict

import torch

from .._errors import InputRuntimeError, InputValueError, check_floats, shape_of
from .._typing import Bool, Float, Int, Tensor

Map = Callable[[Tensor], Tensor]

MEMORY = 6  # steps that Anderson's method combines
NEAR = 0.05  # largest step, relative to the size of a token, at which steps are combined
KRYLOV = 16  # products with the Jacobian before a linear solve restarts
CYCLES = 4  # restarts of the linear solve of a Newton step
HALVINGS = 4  # halvings of a Newton step before plain steps replace it


class EquilibriumOptions(TypedDict, total=False):
    """Keyword arguments that callers pass on to `equilibrium`."""

    method: Literal["anderson", "newton", "iterate"]
    max_iterations: int
    tolerance: float | None
    throw: bool


class Equilibrium(NamedTuple):
    """Fixed points, with the residual |f(x) - x|, the convergence flag and the number of steps of each token."""

    state: Float[Tensor, "*b d"]
    residual: Float[Tensor, "*b"]
    converged: Bool[Tensor, "*b"]
    steps: Int[Tensor, "*b"]

    def distinct(self, *, tolerance: float = 1e-4) -> Float[Tensor, "k ..."]:
        """The distinct fixed points, [k, ...]: those that differ by more than `tolerance` times the largest length."""
        points: list[Tensor] = []
        unit = self.state.shape[self.residual.ndim :]
        states = self.state.detach().reshape(-1, unit.numel())[self.converged.reshape(-1)]
        size = tolerance * float(states.norm(dim=-1).max()) if len(states) else 0.0
        while len(states):
            points.append(states[0])
            states = states[(states - states[0]).norm(dim=-1) > size]
        return (torch.stack(points) if points else states).reshape(-1, *unit)


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
    """Find a fixed point of a map that acts on each token separately, starting from `start`.

    The result is differentiable with respect to the tensors that `step` uses: the gradient costs one linear solve of
    the size of a token and no memory for the steps. Second derivatives are not available. `start` has no gradient,
    because the fixed point does not depend on it.

    Args:
        step: the map f of [*b, d], applied to each token separately.
        start: initial tokens, [*b, d], or [*b, n, d] with `tokens_interact`.
        method: "anderson" combines steps. "newton" needs fewer but costlier steps, and is preferable where "anderson"
            is slow. Both may converge to an unstable fixed point, which plain iteration ("iterate") would leave; check
            with `spectral_radius`.
        tokens_interact: the tokens of a state [n, d] depend on each other; [*b, n, d] are independent states.
        max_iterations: largest number of steps.
        tolerance: bound on |f(x) - x| relative to 1 + |x|; default: eps^(2/3) of the dtype.
        throw: raise an error if a token does not converge or has no gradient; otherwise see `converged`.

    Law: tests/laws/test_equilibria_are_where_tokens_rest.py.

    >>> import torch
    >>> a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    >>> x = equilibrium(lambda x: torch.cos(a * x), torch.zeros(1, 1, dtype=torch.float64)).state
    >>> bool((x - torch.cos(a * x)).abs() < 1e-9)
    True
    """
    check_floats("equilibrium", start=start)
    if method not in ("anderson", "newton", "iterate"):
        condition, remedy = 'method must be "anderson", "newton" or "iterate"', "Use anderson for most maps."
        raise InputValueError("equilibrium", "method", f"{condition}, got {method!r}", remedy)
    if start.ndim < 1 + tokens_interact:
        remedy = "Add the missing dimension with unsqueeze."
        condition = f"start must be [*b, {'n, d' if tokens_interact else 'd'}]"
        raise InputValueError("equilibrium", "start", f"{condition}, got shape {shape_of(start)}", remedy)
    f, x, restore = _flat(step, start.detach(), tokens_interact)
    solver = _Newton(f, x) if method == "newton" else Anderson(x, MEMORY if method == "anderson" else 1)
    result = solved(f, x, solver, max_iterations=max_iterations, tolerance=tolerance, throw=throw)
    return result._replace(state=restore(result.state))


def solved(
    f: Map, x: Tensor, solver: "Solver", *, max_iterations: int, tolerance: float | None, throw: bool
) -> Equilibrium:
    """The fixed point that a solver finds from x, with its gradient."""
    tolerance = torch.finfo(x.dtype).eps ** (2 / 3) if tolerance is None else tolerance
    with torch.no_grad():
        _check_step(f, x)
        x, residual, converged, counts = _iterated(f, x, solver, max_iterations, tolerance)
    if throw and not bool(converged.all()):
        failed = f"{int((~converged).sum())} of {converged.numel()} tokens"
        problem = f"{failed} did not converge within max_iterations={max_iterations}"
        remedy = "Raise max_iterations or the tolerance, or pass throw=False and check converged."
        raise InputRuntimeError("equilibrium", "max_iterations", problem, remedy)
    if torch.is_grad_enabled():
        x = _attached(f, x, max_iterations, tolerance, throw)
    return Equilibrium(x, residual, converged, counts)


def spectral_radius(
    step: Map, state: Float[Tensor, "*b d"], *, tokens_interact: bool = False, steps: int = 100
) -> Float[Tensor, "..."]:
    """Spectral radius of the Jacobian at each token, by the power method with Jacobian-vector products.

    A fixed point is stable if it is below 1. Converges if one eigenvalue is largest in absolute value.
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
    """Unbiased estimate of tr(J^T J) / d at each token, a regulariser: small Jacobians converge quickly.

        E |J^T v|² = tr(J J^T)  for random signs v                                                              [bai21]

    Differentiable with respect to the tensors that `step` uses, at a fixed state. With many probes it converges to the
    mean square of the singular values. Law: tests/laws/test_equilibria_are_where_tokens_rest.py.
    """
    f, x, _ = _flat(step, state.detach(), tokens_interact)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        image = f(point := x.requires_grad_())
        estimates = []
        for _ in range(probes):
            v = 2.0 * torch.randint(2, x.shape, generator=generator, device=x.device).to(x.dtype) - 1
            options = {
                "create_graph": create_graph,
                "retain_graph": True,
                "allow_unused": True,
                "materialize_grads": True,
            }
            (pulled,) = torch.autograd.grad(image, point, v, **options)
            estimates.append(pulled.square().mean(-1))
        return torch.stack(estimates).mean(0)


# Solvers -------------------------------------------------------------------------------------------------------------


def _flat(step: Map, x: Tensor, tokens_interact: bool) -> tuple[Map, Tensor, Map]:
    """The map and its argument with one row for each state, and the inverse reshaping."""
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
        condition, fact = f"step must return the shape {shape_of(x)} of its argument", f"shape {shape_of(image)}"
        raise InputValueError("equilibrium", "step", f"{condition}, got {fact}", remedy)


class Solver(ABC):
    """Choose the next state from x and f(x)."""

    @abstractmethod
    def moved(self, x: Tensor, image: Tensor, converged: Tensor) -> Tensor:
        """The next state of every token; ignored for tokens that have converged."""


def _iterated(
    step: Map, x: Tensor, solver: Solver, max_iterations: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Iterate every token until it converges: state, residual, convergence flag and number of steps."""
    converged = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
    counts = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    residual = torch.full(x.shape[:-1], torch.inf, dtype=x.dtype, device=x.device)
    for _ in range(max_iterations):
        image = step(x)
        size = (image - x).norm(dim=-1)
        residual = torch.where(converged, residual, size)
        counts = counts + (~converged).long()
        converged = converged | (size <= tolerance * (1 + x.norm(dim=-1)))
        if bool(converged.all()):
            break
        x = torch.where(converged.unsqueeze(-1), x, solver.moved(x, image, converged))
    return x, residual, converged, counts


class Anderson(Solver):
    """Anderson acceleration; a plain step far from convergence, or if memory is 1."""

    def __init__(self, x: Tensor, memory: int) -> None:
        self.images = torch.zeros(*x.shape[:-1], memory, x.shape[-1], dtype=x.dtype, device=x.device)
        self.residuals = torch.zeros_like(self.images)
        self.used = torch.zeros(self.images.shape[:-1], dtype=torch.bool, device=x.device)
        self.before = torch.full(x.shape[:-1], torch.inf, dtype=x.dtype, device=x.device)

    def moved(self, x: Tensor, image: Tensor, converged: Tensor) -> Tensor:
        r = image - x
        size, scale = r.norm(dim=-1), 1 + x.norm(dim=-1)
        # Combine only near convergence and while the residual falls: elsewhere it may lead to unstable fixed points.
        helps = (size <= NEAR * scale) & (size < self.before)
        self.before = size
        self.used = torch.cat((self.used[..., 1:] & helps.unsqueeze(-1), torch.ones_like(self.used[..., :1])), -1)
        self.images = torch.cat((self.images[..., 1:, :], image.unsqueeze(-2)), -2)
        self.residuals = torch.cat((self.residuals[..., 1:, :], r.unsqueeze(-2)), -2)
        return _mixed(self.images, self.residuals, self.used)


def _mixed(images: Tensor, residuals: Tensor, used: Tensor) -> Tensor:
    """The combination of the used images with the smallest residual; the last image where it is not finite."""
    R = residuals * used.unsqueeze(-1)
    gram = R @ R.mT
    # Regularised relative to the trace, since late residuals are nearly parallel. Unused images get weight 0.
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    ridge = torch.where(used, 1e-12 * trace + torch.finfo(R.dtype).tiny, 1.0)
    weights = torch.linalg.solve(gram + torch.diag_embed(ridge), used.to(R.dtype).unsqueeze(-1))
    weights = weights / weights.sum(-2, keepdim=True)
    mixed = (weights * images).sum(-2)
    return torch.where(torch.isfinite(mixed).all(-1, keepdim=True), mixed, images[..., -1, :])


class _Newton(Solver):
    """A Newton step, halved until the residual falls by at least half of the predicted decrease.

    After a failed step, plain steps follow, twice as many after each failure, so every token that plain iteration
    brings to convergence converges.
    """

    def __init__(self, step: Map, x: Tensor) -> None:
        self.step = step
        self.products = min(KRYLOV * CYCLES, x.shape[-1])
        self.waits = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        self.failures = torch.zeros_like(self.waits)

    def moved(self, x: Tensor, image: Tensor, converged: Tensor) -> Tensor:
        out = converged | (self.waits > 0)
        self.waits = (self.waits - 1).clamp(min=0)
        if bool(out.all()):
            return image
        r = (image - x).masked_fill(out.unsqueeze(-1), 0.0)
        size = r.norm(dim=-1)
        # Accuracy relative to the residual: sufficient for quadratic convergence, without wasted products.
        goal = (size / (1 + x.norm(dim=-1))).clamp(max=0.1) * size
        direction, _ = _krylov(lambda v: v - torch.func.jvp(self.step, (x,), (v,))[1], r, goal, self.products)
        length, trial = torch.ones_like(size), x + direction
        for _ in range(HALVINGS):
            falls = (self.step(trial) - trial).norm(dim=-1) <= (1 - length / 2) * size
            if bool((falls | out).all()):
                break
            length = torch.where(falls, length, length / 2)
            trial = x + length.unsqueeze(-1) * direction
        falls = falls & ~out
        self.failures = self.failures + (~falls & ~out).long()
        self.waits = torch.where(falls | out, self.waits, 4 * 2 ** self.failures.clamp(max=20))
        return torch.where(falls.unsqueeze(-1), trial, image)


def _krylov(product: Map, target: Tensor, goal: Tensor, products: int) -> tuple[Tensor, Tensor]:
    """Solve product(x) = target for every row by GMRES; returns the solution and the norm of the residual.

    Simpler GMRES: the images of the directions are orthonormalised, so that the residual needs no solve. The next
    direction is the residual while it falls, otherwise the last image, which continues where the residual stagnates.
    """
    x, r, size = torch.zeros_like(target), target, target.norm(dim=-1)
    deep = min(KRYLOV, products)
    directions = target.new_zeros(*target.shape[:-1], deep, target.shape[-1])
    for cycle in range(-(-products // deep)):
        if cycle:
            r = target - product(x)
            size = r.norm(dim=-1)
        if not bool((size > goal).any()):
            break
        directions.zero_()
        images, R = (
            torch.zeros_like(directions),
            torch.eye(deep, dtype=x.dtype, device=x.device).repeat(*size.shape, 1, 1),
        )
        along = target.new_zeros(*size.shape, deep)
        p = _unit(r, size, size > goal)
        for j in range(deep):
            w = product(p)
            full_length = w.norm(dim=-1)
            for _ in range(2):  # twice, against rounding errors
                c = images @ w.unsqueeze(-1)
                w = w - (images.mT @ c).squeeze(-1)
                R[..., j] += c.squeeze(-1)
            length = w.norm(dim=-1)
            new = length > 10 * torch.finfo(w.dtype).eps * full_length  # otherwise the direction adds nothing
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


def _attached(step: Map, x: Tensor, max_iterations: int, tolerance: float, throw: bool) -> Tensor:
    """f(x*), with a hook that multiplies its gradient by (I - J^T)^-1 and so makes it the gradient of x*."""
    point = x.detach().requires_grad_()
    with torch.enable_grad():
        image, attached = step(point), step(x.detach())
    if not attached.requires_grad:
        return x

    def product(v: Tensor) -> Tensor:
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return v - torch.autograd.grad(image, point, v, **options)[0]

    def through(gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # x* is constant in the graph, so second derivatives would be wrong
            problem = "the gradient of a fixed point cannot be differentiated again (create_graph=True)"
            raise InputRuntimeError("equilibrium", None, problem, "Unroll the steps for second derivatives.")
        goal = tolerance * gradient.norm(dim=-1)
        solution, left = _krylov(product, gradient, goal, max(max_iterations, 1))
        if throw and bool((left > goal).any()):
            failed = f"{int((left > goal).sum())} of {left.numel()} tokens"
            problem = f"the gradient solve failed for {failed}, since the Jacobian has an eigenvalue near 1 there"
            raise InputRuntimeError("equilibrium", None, problem, "Change the map, or pass throw=False.")
        return solution

    attached.register_hook(through)
    return attached


def secular_equilibrium(
    mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"], *, radius: float = 1.0
) -> Float[Tensor, "*b d"]:
    """Fixed point of attention to N(mean, covariance) followed by projection to the sphere, [*b, d].

        x = (lambda I - Sigma)^-1 mu,  |x| = r,  lambda > lambda_max(Sigma)                                [theory 4.4]

    It is the maximum of <mu, x> + <x, Sigma x> / 2 on the sphere, found by bisection of the secular equation. On a
    large sphere there may be a second stable fixed point, a local maximum near the opposite end of the main axis. If mu
    is orthogonal to the main axis, lambda may be lambda_max: then x and its mirror image are maxima, and one of them is
    returned.
    """
    check_floats("secular_equilibrium", mean=mean, covariance=covariance)
    c, V = torch.linalg.eigh(covariance)
    m = (V.mT @ mean.unsqueeze(-1)).squeeze(-1)
    if not radius > 0 or bool((m.abs().amax(-1) == 0).any()):
        condition = "radius must be positive and mean must not be 0"
        remedy = "Pass a mean other than 0, for which the fixed point is not unique."
        fact = f"radius={radius} and a mean of length {float(m.norm(dim=-1).min()):.3g}"
        raise InputValueError("secular_equilibrium", "radius", f"{condition}, got {fact}", remedy)

    def at(above: Tensor) -> Tensor:
        """x in the axes of Sigma for lambda = lambda_max + above."""
        return torch.where(m == 0, 0.0, m / (above.unsqueeze(-1) + c[..., -1:] - c))

    low, high = torch.zeros_like(m[..., 0]), m.norm(dim=-1) / radius  # |x| is at most r at high
    for _ in range(200):
        center = (low + high) / 2
        long = at(center).norm(dim=-1) > radius
        low, high = torch.where(long, center, low), torch.where(long, high, center)
    x = at(high)
    missing = radius**2 - x.square().sum(-1)  # rounding, unless lambda is lambda_max
    missing = missing.where(missing > 64 * torch.finfo(x.dtype).eps * radius**2, 0.0)
    last = torch.where(m[..., -1] < 0, -1.0, 1.0) * (x[..., -1].square() + missing).sqrt()
    x = torch.cat((x[..., :-1], torch.where(missing > 0, last, x[..., -1]).unsqueeze(-1)), -1)
    return (V @ x.unsqueeze(-1)).squeeze(-1)
